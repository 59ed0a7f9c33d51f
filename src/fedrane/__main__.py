"""``python -m fedrane``: the command ``fedrane`` where its script is not on the path."""

from fedrane.cli import main

main()

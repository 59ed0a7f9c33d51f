"""The names of the paper's tables and figures, without importing what makes them."""

from __future__ import annotations

from importlib import resources
from importlib.resources.abc import Traversable

FOLDER: Traversable = resources.files("fedrane") / "experiments"
COMMON, PAPER = "common", "paper"
ALL = "all"


def known() -> list[str]:
    """The targets that ship with the package, in the order of the paper."""
    order = ("table-gfl", "table-pfl", "cosine", "tsne", "clients", "epochs", "lambda-cd", "temperature", "minority")
    shipped = {path.name.removesuffix(".toml") for path in FOLDER.iterdir() if path.name.endswith(".toml")}
    return [*order, *sorted(shipped - {*order, COMMON, PAPER})]

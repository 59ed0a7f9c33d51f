"""What is printed: names and texts come from files of others too, and must not control the terminal."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from fedrane.errors import printable


class PlainConsole(Console):
    """Prints each text without control characters: with escapes in their place. Line breaks and tabs stay."""

    def render_str(self, text: str, **how: Any) -> Text:
        """Rich passes every text through here, also the cells of tables, and before it measures them."""
        return super().render_str(printable(text), **how)


def console(stderr: bool = False) -> Console:
    """Standard output, or standard error."""
    return PlainConsole(stderr=stderr, emoji=False)

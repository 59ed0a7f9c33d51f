"""What is printed cannot control the terminal: names come from files, and files from anyone."""

from __future__ import annotations

import pytest
from rich.table import Table

from fedrane.errors import printable
from fedrane.system import terminal

HOSTILE = "a\x1b[31mred\x1b]0;title\x07\r\x9b2J\u202etxt.exe\u2066\ud800"


@pytest.mark.parametrize("stderr", [False, True])
def test_no_text_controls_the_terminal(capsys: pytest.CaptureFixture[str], stderr: bool) -> None:
    """Wherever in what is printed it stands."""
    console = terminal.console(stderr)
    table = Table(HOSTILE, title=HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    for each in (HOSTILE, f"[bold]{HOSTILE}[/]", table):
        console.print(each, soft_wrap=True, highlight=False)
    console.print(HOSTILE, markup=False, soft_wrap=True)
    shown = "".join(capsys.readouterr())
    assert "".join(shown.split("\n")).replace("\n", "").isprintable()
    assert shown.replace("\n", "").count("\\x1b[31mred\\x1b]0;title\\x07\\r\\x9b2J\\u202etxt.exe") >= 3


def test_text_of_all_languages_stays_as_it_is() -> None:
    for text in ("täglich … 5 × 3 – α", "两\n行\t列", "می\u200cخواهم", "👩\u200d🔬", "שלום", "a\u00a0b"):
        assert printable(text) == text

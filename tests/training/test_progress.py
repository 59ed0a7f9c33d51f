"""What a run shows: when, where, and that the terminal is restored."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

import fedrane
from fedrane.training import progress
from fedrane.training.progress import Lines, ProgressBar, shown, watcher
from problems import quick


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From now on, standard error is what a person sees, outside of a test. (A fixture would be undone by pytest.)"""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    return stream


@pytest.fixture
def notebook(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What a notebook is asked to show: how, and the HTML."""
    seen: list[tuple[str, str]] = []

    class Handle:
        def update(self, page: str) -> None:
            seen.append(("update", page))

    def display(page: Any, display_id: bool = False) -> Handle:
        seen.append(("new", page) if display_id else ("once", page.html))  # the latter is rich's
        return Handle()

    module: Any = ModuleType("IPython.display")
    module.HTML, module.display = str, display
    monkeypatch.setitem(sys.modules, "IPython", ModuleType("IPython"))
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return seen


def test_a_terminal_shows_a_bar_unless_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = at_a_terminal(monkeypatch)
    fedrane.run(quick(rounds=2), progress=False)
    assert terminal.getvalue() == ""
    fedrane.run(quick(rounds=2))
    text = terminal.getvalue()
    assert "2/2" in text
    assert "global" in text
    assert capsys.readouterr().out == "", "standard output is the user's"


def test_a_bar_is_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    """None in a test, in a file or where there is no standard error, also if colours are forced."""
    at_a_terminal(monkeypatch)
    assert isinstance(shown(None)[0], ProgressBar)
    monkeypatch.setenv("FORCE_COLOR", "1")
    for stream in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", stream)
        assert shown(None) == []


def test_progress_that_is_asked_for_is_plain_lines_in_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    fedrane.run(quick(rounds=2), progress=True)
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("  ")[0] for line in err.splitlines()[1:]] == ["round 1/2", "round 2/2"]
    assert isinstance(watcher(Console(file=io.StringIO())), Lines)


def test_a_resumed_run_shows_it_too(tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fedrane.run(quick(rounds=2), tmp_path / "run", stop=lambda: True)
    assert capsys.readouterr() == ("", "")
    fedrane.resume(tmp_path / "run")
    assert capsys.readouterr() == ("", "")
    fedrane.resume(tmp_path / "run", rounds=3, progress=True)
    assert "going on after round 2" in capsys.readouterr().err


def test_a_comparison_names_each_run(capsys: pytest.CaptureFixture[str]) -> None:
    fedrane.compare({"a": quick(rounds=1), "b": quick(rounds=1, method="local")}, progress=True)
    err = capsys.readouterr().err
    assert "a, seed 0 round 1/1" in err
    assert "b, seed 0 round 1/1" in err


def test_a_notebook_shows_one_bar_that_is_drawn_again(notebook: list[tuple[str, str]]) -> None:
    """Once below the cell, then in its place: also without the package ipywidgets, which rich would need."""
    fedrane.run(quick(rounds=3), callbacks=[watcher(Console(force_jupyter=True), "mine ")])
    assert [kind for kind, _ in notebook] == ["once", "new", "update", "update", "update"]
    assert "4 clients" in notebook.pop(0)[1]
    for done, (_, page) in enumerate(notebook):
        assert f"{done}/3" in page
        assert page.startswith("<pre")
        assert "mine" in page
    assert "global" in notebook[-1][1]


class Breaks(fedrane.Callback):
    def round(self, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt


@pytest.mark.parametrize("more", [[], [Breaks()]])
def test_the_terminal_is_restored(monkeypatch: pytest.MonkeyPatch, more: list[fedrane.Callback]) -> None:
    """The cursor that the bar hides is shown again, also after an error."""
    stream = Terminal()
    bar = ProgressBar(Console(file=stream, force_terminal=True, color_system="standard"))
    go: Callable[[], Any] = lambda: fedrane.run(quick(rounds=2), callbacks=[*more, bar])  # noqa: E731
    if more:
        with pytest.raises(KeyboardInterrupt):
            go()
    else:
        go()
    hidden, restored = stream.getvalue().rfind("\x1b[?25l"), stream.getvalue().rfind("\x1b[?25h")
    assert 0 <= hidden < restored


class Order(fedrane.Callback):
    def __init__(self) -> None:
        self.seen: list[str] = []

    def prepare(self, folder: Any) -> None:
        self.seen.append(f"prepare {folder}")

    def begin(self, *_: Any) -> None:
        self.seen.append("begin")

    def end(self, result: fedrane.Result) -> None:
        self.seen.append("end")

    def close(self) -> None:
        self.seen.append("close")


def test_a_callback_gets_its_folder_and_is_closed_in_any_case(tmp_path: Any) -> None:
    whole, broken = Order(), Order()
    fedrane.run(quick(rounds=1), tmp_path / "run", callbacks=[whole])
    assert whole.seen == [f"prepare {tmp_path / 'run'}", "begin", "end", "close"]
    with pytest.raises(KeyboardInterrupt):
        fedrane.run(quick(rounds=1), callbacks=[broken, Breaks()])
    assert broken.seen == ["prepare None", "begin", "close"]


def test_the_headline_takes_names_as_they_are() -> None:
    result = fedrane.run(quick(rounds=1))
    named = result.experiment.replace(dataset="[red]data.npz")
    console = Console(file=io.StringIO(), width=200)
    console.print(progress.headline(named, result.federation))
    assert "[red]data.npz" in console.file.getvalue()  # type: ignore[attr-defined]

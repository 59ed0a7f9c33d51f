"""How the runs of a report were made: settings, versions, machines, dates, commands; and their numbers as data."""

from __future__ import annotations

import datetime
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from fedrane.config.settings import FIELD, NAME
from fedrane.engines import AUTO
from fedrane.engines.evaluation import Metrics
from fedrane.experiment import defaults
from fedrane.report.runs import Line, Run, in_words
from fedrane.report.style import duration
from fedrane.training.sessions import Entry
from fedrane.training.wording import count

DIGITS = 6
"""Significant digits of the data on a page."""
SHOWN_COMMANDS = 2


class Fact(NamedTuple):
    """A title and its text: words, or ``key=value`` and commands as code."""

    title: str
    rows: Sequence[tuple[str, Sequence[str]]]
    """The name of a line, or nothing if it holds for all, and the words."""
    code: bool = False
    rest: Sequence[str] = ()
    """More of the same, shown on demand."""


def facts(lines: Sequence[Line]) -> list[Fact]:
    """In the order in which a reader asks; what is not known is left out."""
    entries = [entry for line in lines for run in line.runs for entry in run.sessions]
    commands = _distinct(_command(entry) for entry in entries)
    candidates = [
        Fact("Not the defaults", _settings(lines, lambda key, value, default: value != default != AUTO), True),
        Fact("Default is auto", _settings(lines, lambda key, value, default: default == AUTO), True),
        Fact("Seeds", [("", [", ".join(map(str, sorted({run.seed for line in lines for run in line.runs})))])]),
        Fact("Versions", [("", _versions(entries))]),
        Fact("Machine", [("", _distinct(_machine(entry) for entry in entries))]),
        Fact("Date", [("", [_dates(entries)])]),
        Fact("Command", [("", commands[:SHOWN_COMMANDS])], True, commands[SHOWN_COMMANDS:]),
    ]
    return [fact for fact in candidates if any(any(words) for _, words in fact.rows)]


def _distinct(words: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(filter(None, words)))


def _settings(lines: Sequence[Line], wanted: Callable[[str, Any, Any], bool]) -> Sequence[tuple[str, Sequence[str]]]:
    """First those that all lines have in common, then each line's own."""
    each = []
    for line in lines:
        known = defaults(str(line.settings[NAME]))
        each.append(
            {
                f"{key}={in_words(value)}": None
                for key, value in line.settings.items()
                if key != NAME and wanted(key, value, known.get(key))
            }
        )
    common = [pair for pair in each[0] if all(pair in pairs for pairs in each)]
    own = [
        (line.name, [p.removeprefix(FIELD) for p in pairs if p not in common])
        for line, pairs in zip(lines, each, strict=True)
    ]
    return [("", common)] * bool(common) + [(name, pairs) for name, pairs in own if pairs]


def _versions(entries: Sequence[Entry]) -> list[str]:
    """Each program with all its versions."""
    versions_of: dict[str, dict[str, None]] = {}
    for entry in entries:
        for program, version in entry.get("versions", {}).items():
            versions_of.setdefault(str(program), {})[str(version)] = None
    return [f"{program} {' and '.join(versions)}" for program, versions in versions_of.items()]


def _machine(entry: Entry) -> str:
    machine = entry.get("machine", {})
    threads = entry.get("threads")
    parts = (
        machine.get("device_name"),
        machine.get("device"),
        f"engine {entry['engine']}" if entry.get("engine") else "",
        count(threads, "thread") if isinstance(threads, int) and threads else "",
    )
    return " · ".join(str(part) for part in parts if part)


def _dates(entries: Sequence[Entry]) -> str:
    """From the first start to the last end that was recorded."""
    times = sorted(time for entry in entries for key in ("start", "end") if (time := _time(entry.get(key))))
    if not times:
        return ""
    first, last = times[0], times[-1]
    passed = duration((last - first).total_seconds())
    day = "" if first.date() == last.date() else f"{last:%Y-%m-%d}, "
    return f"{first:%Y-%m-%d, %H:%M} to {day}{last:%H:%M} UTC ({passed})"


def _time(text: object) -> datetime.datetime | None:
    try:
        time = datetime.datetime.fromisoformat(str(text))
    except ValueError:  # none yet, or a file that was edited
        return None
    return time.astimezone(datetime.UTC) if time.tzinfo else time.replace(tzinfo=datetime.UTC)


def _command(entry: Entry) -> str:
    """As it is typed: the program without its folder."""
    command = str(entry.get("command", ""))
    try:
        program, *words = shlex.split(command)
    except ValueError:  # no words, or a file that was edited
        return command
    path = PurePath(program)
    ours = path.name == "fedrane" or path.parts[-2:] == ("fedrane", "__main__.py")
    return shlex.join(["fedrane", *words]) if ours else command


# ---- the data


def data(lines: Sequence[Line], version: str) -> dict[str, Any]:
    """The numbers of each run, for other programs: every round's, and of the last round each client's and class's."""
    return {
        "made_by": f"fedrane {version}",
        "about": {
            "metrics": "one value for each round that was recorded; null if it was not measured",
            "last": "the last list of each metric that has a value for each client, class or member of the cohort",
            "training_examples": "a row for each client, a column for each class",
        },
        "methods": [{"name": line.name, "runs": [_run(run) for run in line.runs]} for line in lines],
    }


def _run(run: Run) -> dict[str, Any]:
    return {
        "seed": run.seed,
        "rounds": run.rounds,
        "finished": run.finished,
        "settings": _plain(run.settings),
        "sessions": _plain(run.sessions),
        "classes": list(run.classes),
        "training_examples": run.labels.tolist(),
        "metrics": _columns(run.history),
        "last": {
            key: _plain(value) for record in run.history for key, value in record.items() if isinstance(value, list)
        },
    }


def _columns(history: Sequence[Metrics]) -> dict[str, list[Any]]:
    keys = dict.fromkeys(key for record in history for key, value in record.items() if _is_number(value))
    return {key: [_plain(record[key]) if _is_number(record.get(key)) else None for record in history] for key in keys}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _plain(value: Any) -> Any:
    """As JSON values; a number that is not finite is None."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)

"""Whether the files of a run are as they were written, and belong together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedrane.config import sources
from fedrane.errors import CheckpointError, FedraneError
from fedrane.experiment import read_toml
from fedrane.system import loading, named_code
from fedrane.training import sessions, user_code
from fedrane.training.result import last_round
from fedrane.training.run_folder import (
    CALIBRATION,
    CODE,
    CONFIG,
    METADATA,
    METRICS,
    PARTITION,
    SESSIONS,
    SUMMARY,
    TRACKERS,
    Folder,
    round_of,
)
from fedrane.training.saved import read_calibration

OLD = "an earlier version began this run: its files have no digests, and only their form is checked"
UNCHECKED = f"not checked, since {METADATA} is damaged"


class Finding(NamedTuple):
    """What was found of a file, by its path in the run folder."""

    file: str
    problem: str = ""
    note: str = ""


def verify(folder: Folder) -> Iterator[Finding]:
    """Check each file of a run; nothing is written, and none of its code is run."""
    folder.require_run()
    metadata = _found(METADATA, folder.read_metadata)
    yield metadata if metadata.problem or folder.id else metadata._replace(note=OLD)
    for file, check in _checks(folder, {} if metadata.problem else folder.read_metadata()):
        yield Finding(file, note=UNCHECKED) if metadata.problem else _found(file, check)


def _found(file: str, check: Callable[[], object]) -> Finding:
    try:
        check()
    except (FedraneError, OSError) as error:
        return Finding(file, str(error))
    return Finding(file)


def _checks(folder: Folder, metadata: Mapping[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
    """Every file that is there, or should be, and what checks it."""
    then = user_code.recorded(metadata)
    yield CONFIG, partial(_config, folder)
    yield PARTITION, partial(_same, folder.path / PARTITION, then.get("partition"))
    yield METRICS, partial(_metrics, folder)
    optional: dict[str, Callable[[Folder], object]]
    optional = {
        TRACKERS: lambda folder: folder.read_json(TRACKERS),
        SUMMARY: _summary,
        CALIBRATION: partial(read_calibration, round=0),
        SESSIONS: sessions.read,
    }
    for name, check in optional.items():
        if (folder.path / name).is_file():
            yield name, partial(check, folder)
    for path in folder.checkpoints():
        yield str(path.relative_to(folder.path)), partial(folder.read_checkpoint, path)
    copies = {path.stem.rpartition("-")[2]: path for path in sorted((folder.path / CODE).glob("*.py"))}
    for digest in copies.keys() | {then[key] for key in named_code.KEYS if key in then}:
        path = copies.get(digest, folder.path / CODE / f"NAME-{digest}.py")
        yield f"{CODE}/{path.name}", partial(_same, path, digest)


def _config(folder: Folder) -> None:
    values = read_toml(folder.path / CONFIG)
    user_code.require_recorded(folder, values)
    sessions.require_planned(folder, values.get("rounds", 0))


def _metrics(folder: Folder) -> None:
    """The last line of an unfinished run may have been cut off by a kill; of a finished one it may not."""
    last = last_round(folder.read_metrics())
    folder.metrics_until(max([last, *map(round_of, folder.checkpoints())]))
    if folder.finished and not (folder.path / METRICS).read_bytes().endswith(b"\n"):
        raise CheckpointError(f"{folder.path / METRICS} does not end with a whole line", remedy="Put it back as it was")


def _summary(folder: Folder) -> None:
    summary, last = folder.read_json(SUMMARY), last_round(folder.read_metrics())
    if not isinstance(summary, dict) or summary.get("rounds") != last:
        raise CheckpointError(f"{folder.path / SUMMARY} is not that of the {last} rounds in {METRICS}")


def _same(path: Path, digest: str | None) -> None:
    """A file is there, and has this digest where one is known."""
    now = loading.digest(path)[: sources.LENGTH]
    if digest not in (None, now):
        raise CheckpointError(f"{path} is not as it was written", "its digest is another", "Put it back as it was")

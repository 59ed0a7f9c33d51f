"""A run folder: configuration, metrics, checkpoints. A run can be resumed from it, killed at any moment.

Each round first appends its line to ``metrics.jsonl`` and then writes its checkpoint, in one rename. So the newest
checkpoint has all its lines, and lines after it are cut off when the run is resumed.

Every file carries the run's id, or a digest that depends on it, and is checked when it is read
(docs/decisions/0020-digests-of-a-run.md). A folder of an earlier version has none, and goes on without.
"""

from __future__ import annotations

import json
import operator
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fedrane import tree
from fedrane.errors import CheckpointError, FileError
from fedrane.experiment import Experiment
from fedrane.system.files import (
    PARTS,
    PRIVATE,
    as_text,
    clear_errors,
    is_ours,
    move_into_place,
    plain_size,
    read_text,
    require_ours,
    take,
    user_path,
    write_atomically,
)
from fedrane.task import Model, State
from fedrane.training import digests
from fedrane.training.round_records import problem

try:
    import fcntl
except ImportError:  # not a Unix: the folder is not locked there
    fcntl = None  # type: ignore[assignment]

CONFIG, METRICS, SUMMARY = "config.toml", "metrics.jsonl", "summary.json"
METADATA, PARTITION, SESSIONS = "metadata.json", "partition.npz", "sessions.json"
CODE, CALIBRATION, TRACKERS = "code", "calibration.json", "trackers.json"
COMPARISON = "comparison.json"
"""In the folder of a comparison: the order and the labels of its methods, by the names of their folders."""
DIGESTS = ("sources", "fingerprints", "accepted")
"""The entries of the metadata that identify the inputs; later ones override earlier ones."""
ENTRIES = {**dict.fromkeys(DIGESTS, dict), "settings": dict, "deviations": list, "id": str}
"""The types of the metadata's entries that earlier versions did not write."""
RUN = "run"
"""The purpose of a run folder, in its mark."""
KEPT = 2
"""Checkpoints."""
FORMAT = 1
TIMINGS = frozenset({"seconds", "eval_seconds", "samples_per_second", "warmup", "warmup_seconds", digests.DIGEST})
"""The entries of a metrics line or a summary that differ between two runs of one experiment."""


class Checkpoint(NamedTuple):
    round: int
    server: State
    client_states: dict[int, State]
    run: str = ""
    """The id of its run."""


Encoded = tuple[tree.Tensors, dict[str, str]]
"""The tensors of a checkpoint's file by their paths, and its metadata."""


class Folder:
    """One run on disk."""

    def __init__(self, path: str | Path) -> None:
        self.path = user_path(path)
        self._lock: Any = None
        self._id: str | None = None
        self._last_digest: str | None = None
        """Of the last line of the metrics, once it is known."""

    # ---- creating and opening

    def create(self) -> None:
        """Create the folder, or use an empty one, or one of a run that never started: its leftovers are removed."""
        self.require_free()
        take(self.path, RUN)
        self.lock()
        self.require_free()  # now that it is locked: another process may have started one
        with clear_errors(self.path):
            (self.path / "checkpoints").mkdir(exist_ok=True)
        self._clear(METRICS, SUMMARY, CALIBRATION, "checkpoints/round-*.safetensors")

    def open(self) -> None:
        """Open an existing run."""
        self.require_run()
        self.read_metadata()  # before anything is written: a folder of another program may hold a config.toml too
        self.lock()
        self._clear()

    def _clear(self, *patterns: str) -> None:
        """Remove these files, and partial files that a killed process left, ours and those of safetensors."""
        with clear_errors(self.path):
            for pattern in (*patterns, PARTS, f"{CODE}/{PARTS}", "checkpoints/round-*.part", "checkpoints/.tmp*"):
                for path in self.held().glob(pattern):
                    path.unlink()

    def require_free(self) -> None:
        if self.holds_run():
            raise CheckpointError(
                f"{self.path} already holds a run",
                "its results would be overwritten",
                f"Go on with it: fedrane resume {self.path} — or choose another --out",
            )
        require_ours(self.path, RUN)

    def is_free(self) -> bool:
        """Whether a run may be created here."""
        return not self.holds_run() and is_ours(self.path, RUN)

    def require_run(self) -> None:
        if not self.holds_run():
            raise CheckpointError(f"{self.path} holds no run", f"it has no {CONFIG}", "Start one with 'fedrane run'")

    def holds_run(self) -> bool:
        return (self.path / CONFIG).is_file()

    def lock(self) -> None:
        if fcntl is None:
            return
        lock = self.path / ".lock"
        with clear_errors(lock):
            if os.path.lexists(lock):
                plain_size(lock)  # to open a pipe would wait for its other end
            self._lock = lock.open("a")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            raise CheckpointError(
                f"{self.path} is in use by another process", "two would overwrite each other", "Wait for it, or stop it"
            ) from error
        self.held()  # it may have been replaced before it was locked

    def held(self, name: str = "") -> Path:
        """The path of a file to write; an error if the folder was deleted, moved or replaced since it was locked.

        The lock file is open, so no other file can have its number.
        """
        path = self.path / name
        if self._lock is None:
            return path
        with clear_errors(path):
            try:
                held = os.path.samestat(os.fstat(self._lock.fileno()), (self.path / ".lock").stat())
            except FileNotFoundError:
                held = False
        if not held:
            raise FileError(
                f"{self.path} is no longer the folder of this run",
                "it was deleted, moved or replaced, and another run may use it now",
                "If it was moved, resume it where it is now",
            )
        return path

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    # ---- configuration

    def write_config(self, experiment: Experiment) -> None:
        write_atomically(self.held(CONFIG), experiment.to_toml())

    @property
    def id(self) -> str:
        """The id of the run; empty if the folder has none, as that of an earlier version or of a comparison."""
        if self._id is None and (self.path / METADATA).is_file():
            self.read_metadata()
        return self._id or ""

    def write_json(self, name: str, value: Any) -> None:
        """Write a file; its object, or those of its list, get a digest."""
        if self.id:
            value = digests.add(value, self.id) if isinstance(value, list) else digests.add([value], self.id)[0]
        self._write_json(name, value)

    def _write_json(self, name: str, value: Any) -> None:
        write_atomically(self.held(name), json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    def read_json(self, name: str) -> Any:
        """What :meth:`write_json` wrote, checked."""
        value = self._read_json(name)
        if isinstance(value, dict):
            return self._checked([value], self.path / name)[0]
        if isinstance(value, list) and all(isinstance(entry, dict) for entry in value):
            return self._checked(value, self.path / name, ", entry {}")
        return value

    def _read_json(self, name: str) -> Any:
        path = self.path / name
        try:
            return json.loads(read_text(path))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing", "the run did not get so far", "Resume the run") from error
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    def _checked(self, records: Sequence[Mapping[str, Any]], path: Path, numbered: str = "") -> list[dict[str, Any]]:
        """The records of a file without their digests; an error if one is not as it was written."""
        if not self.id and not any(digests.DIGEST in record for record in records):
            return [dict(record) for record in records]
        before = [self.id, *(str(record.get(digests.DIGEST)) for record in records)]
        return [
            digests.check(record, digest, f"{path}{numbered.format(number)}")
            for number, (record, digest) in enumerate(zip(records, before, strict=False), 1)
        ]

    def write_metadata(self, metadata: Mapping[str, Any]) -> None:
        self._id = metadata.get("id", "")
        self._write_json(METADATA, digests.add([metadata], "")[0] if self._id else metadata)

    def read_metadata(self) -> dict[str, Any]:
        """What the run's models and inputs are, with checked types."""
        metadata = self._read_json(METADATA)
        if isinstance(metadata, dict) and metadata.keys() & {"id", digests.DIGEST}:
            metadata = digests.check(metadata, "", str(self.path / METADATA))
        try:
            known = isinstance(metadata["inputs"]["classes"], list)
            known &= np.array(metadata["labels"], dtype=np.int64).ndim == 2
        except (KeyError, TypeError, ValueError, OverflowError):
            known = False
        if not known:
            raise CheckpointError(f"{self.path / METADATA} has no classes and labels")
        for name, expected in ENTRIES.items():
            entries = metadata.get(name, expected())
            texts = entries.values() if name in DIGESTS and isinstance(entries, dict) else entries
            if not isinstance(entries, expected) or not all(isinstance(text, str) for text in texts):
                raise CheckpointError(f"{self.path / METADATA}: {name} cannot be read")
        self._id = metadata.get("id", "")
        return dict(metadata)

    @property
    def label(self) -> str:
        """The label of this run in a comparison; empty if it has none."""
        above = self.path.resolve().parent
        return read_labels(above.parent).get(above.name, "")

    @property
    def finished(self) -> bool:
        return (self.path / SUMMARY).is_file()

    def reopen(self, last: int, rounds: int, planned: Experiment | None = None) -> None:
        """Remove what was written after the round ``last`` of ``rounds``, and write the new plan if there is one.

        In this order: if killed at any moment, it is a run of the old or of the new plan, and can be resumed. The
        checkpoint of a post-training stage must not stay beside a new plan, where its number is that of a round.
        """
        self._clear(SUMMARY, CALIBRATION)
        if planned:
            with clear_errors(self.path):
                for path in self.checkpoints():
                    if round_of(path) > last:
                        path.unlink()
        self.cut_metrics(last)
        if planned:
            self.write_config(planned)
        self.prune(last, rounds)  # a killed process may have saved one and removed none

    # ---- metrics

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        path = self.held(METRICS)
        if self.id:
            if self._last_digest is None:
                self.read_metrics()
            (record,) = digests.add([record], self._last_digest or self.id)
            self._last_digest = record[digests.DIGEST]
        with clear_errors(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def read_metrics(self) -> list[dict[str, Any]]:
        """The complete lines; the last one may have been cut off by a kill."""
        path = self.path / METRICS
        lines = read_text(path, errors="replace").split("\n") if path.is_file() else []
        records: list[dict[str, Any]] = []
        for number, line in enumerate(lines, 1):
            try:
                if line:
                    records.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                if number < len(lines):
                    raise CheckpointError(f"{path}, line {number}, is not JSON: {error}", remedy="Remove it") from error
                break
            if line and not isinstance(records[-1], dict):
                raise CheckpointError(f"{path}, line {number}, is not the record of a round", remedy="Remove it")
        self._last_digest = records[-1].get(digests.DIGEST) if records else None
        checked = self._checked(records, path, ", line {},")
        for number, record in enumerate(checked, 1):
            if why := problem(record):
                raise CheckpointError(f"{path}, line {number}, {why}", remedy="Remove it")
        return checked

    def metrics_until(self, last: int) -> list[dict[str, Any]]:
        """The records up to the round ``last``, that of a checkpoint, or 0."""
        kept = [record for record in self.read_metrics() if record["round"] <= last]
        rounds = [record["round"] for record in kept]
        if (rounds[-1] if rounds else 0) != last or rounds != sorted({*rounds}):
            raise CheckpointError(
                f"{self.path / METRICS} does not have one line for each round up to {last}",
                f"the checkpoint is of round {last}, and lines before it were lost or doubled",
                "Put the file back as it was",
            )
        return kept

    def cut_metrics(self, last: int) -> list[dict[str, Any]]:
        """Drop the records after the round ``last``, and return the others."""
        kept = self.metrics_until(last)
        lines = digests.add(kept, self.id) if self.id else kept
        write_atomically(self.held(METRICS), "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
        self._last_digest = lines[-1].get(digests.DIGEST) if lines else None
        return kept

    # ---- checkpoints

    def checkpoints(self) -> list[Path]:
        """From oldest to newest."""
        paths = (self.path / "checkpoints").glob("round-*.safetensors")
        return sorted((path for path in paths if re.fullmatch(r"round-\d{6,}\.safetensors", path.name)), key=round_of)

    def save(self, checkpoint: Checkpoint, rounds: int) -> Path:
        """Write, fsync, rename."""
        path = self.held(f"checkpoints/round-{checkpoint.round:06d}.safetensors")
        with clear_errors(path):
            write(path, checkpoint._replace(run=self.id))
        self.prune(checkpoint.round, rounds)
        return path

    def prune(self, last: int, rounds: int) -> None:
        """Of the checkpoints up to the round ``last``, keep two, and that of the last of ``rounds``: a run is
        extended from it. Later ones could not be read."""
        paths = [path for path in self.checkpoints() if round_of(path) <= last]
        before_post_training = [path for path in paths if round_of(path) <= rounds]
        with clear_errors(self.path):
            for old in set(paths) - {*paths[-KEPT:], *before_post_training[-1:]}:
                old.unlink()

    def newest(
        self, device: torch.device | str = "cpu", clients: bool = True, last: int | None = None
    ) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that can be read, up to the round ``last``, and the errors of newer ones."""
        problems: list[str] = []
        paths = [path for path in self.checkpoints() if last is None or round_of(path) <= last]
        if not paths and (self.checkpoints() or self.finished):
            what = f" of its rounds up to {last}" if self.checkpoints() else ""
            raise CheckpointError(
                f"{self.path} has no checkpoint{what} any more",
                "its results were recorded, and its models removed",
                "Start it again in another folder",
            )
        for path in reversed(paths):
            try:
                return self.read_checkpoint(path, device, clients), problems
            except CheckpointError as error:
                problems.append(str(error))
        if problems:
            raise CheckpointError(
                f"no checkpoint of {self.path} can be read", problems[0], "Restore the folder, or start the run again"
            )
        return None, problems

    def read_checkpoint(self, path: Path, device: torch.device | str = "cpu", clients: bool = True) -> Checkpoint:
        """A checkpoint of this run."""
        checkpoint = read(path, device, clients)
        if (checkpoint.run, checkpoint.round) != (self.id, round_of(path)):
            raise CheckpointError(
                f"{path} is round {checkpoint.round} of {checkpoint.run or 'a run without id'}",
                f"it is not a checkpoint of this run, {self.id or 'which has no id'}, or not of that round",
                "Put back the one that was there, or remove it",
            )
        return checkpoint


def default_name(experiment: Experiment) -> str:
    """The name of a run for which the user gives none."""
    dataset = Path(experiment.dataset).stem or "data"
    return f"{dataset}-{experiment.method_name.rpartition(':')[2]}-seed{experiment.seed}"


def round_of(path: Path) -> int:
    """From a checkpoint's name."""
    return int(path.stem.removeprefix("round-"))


def write(path: Path, checkpoint: Checkpoint, durable: bool = True, private: bool = False) -> Encoded:
    """Write a checkpoint atomically; with ``durable``, even if the power fails; with ``private``, for its owner."""
    part = path.with_name(path.name + ".part")
    tensors, metadata = encode(checkpoint)
    try:
        part.unlink(missing_ok=True)  # of a killed process, perhaps with another mode
        part.touch(PRIVATE if private else 0o666)
        mode = part.stat().st_mode
        save_file(tensors, part, metadata)
        part.chmod(mode)  # as for any other file: safetensors makes its files private
        if durable:
            with part.open("rb+") as file:
                os.fsync(file.fileno())
    except (OSError, SafetensorError):
        part.unlink(missing_ok=True)
        raise
    if durable:
        move_into_place(part, path)
    else:
        part.replace(path)
    return tensors, metadata


def encode(checkpoint: Checkpoint) -> Encoded:
    """Tensors by path, and a header as text: the round, which clients have joined, which dicts are empty, checksums.

    The header also has the order of the paths: safetensors sorts tensors by name, and sums in that order round
    differently. It is one entry, since several would be written in any order. A tensor that occurs more than once
    (a frozen head that every client holds) is written once: ``paths`` has the path under which each is stored.
    """
    states = {
        "server": checkpoint.server,
        "client_states": {str(k): checkpoint.client_states[k] for k in sorted(checkpoint.client_states)},
    }
    tensors: tree.Tensors = {}
    paths: dict[str, str] = {}
    first: dict[Any, str] = {}
    storages: set[int] = set()
    for path, leaf in tree.flatten(states).items():
        memory = (leaf.data_ptr(), leaf.shape, leaf.stride(), leaf.dtype) if leaf.numel() else path
        paths[path] = first.setdefault(memory, path)
        if paths[path] == path:
            value = leaf.detach().cpu().contiguous()
            held = value.untyped_storage().data_ptr()
            tensors[path] = value.clone() if held in storages else value  # the library refuses views of one another
            storages.add(held)
    header = {
        "format": FORMAT,
        "run": checkpoint.run,
        "round": checkpoint.round,
        "joined": sorted(checkpoint.client_states),
        "empty": sorted(empty_dicts(states)),
        "paths": paths,
        "crc32": {path: digests.of_tensor(value) for path, value in tensors.items()},
    }
    return tensors, {"fedrane": json.dumps(digests.add([header], "")[0])}


def empty_dicts(node: Any, path: str = "") -> Iterator[str]:
    """Paths of the dicts that hold nothing, which a list of leaves forgets."""
    if isinstance(node, State | Model):
        node = node._asdict()
    if isinstance(node, tuple):
        raise TypeError(f"{path}: what a method keeps is tensors in dicts, not {type(node).__name__}")
    if isinstance(node, dict):
        if not node:
            yield path
        for name, value in node.items():
            yield from empty_dicts(value, f"{path}{tree.SEPARATOR}{name}" if path else str(name))


def read(path: Path, device: torch.device | str = "cpu", clients: bool = True) -> Checkpoint:
    """Read a checkpoint; without ``clients``, the server's state only, which may be a hundred times smaller."""
    try:
        plain_size(path)
        with as_text(path) as readable, safe_open(readable, framework="pt", device=str(device)) as file:
            header = read_header((file.metadata() or {}).get("fedrane", "{}"), str(path))
            if header.get("format") != FORMAT:
                raise CheckpointError(
                    f"{path} has format {header.get('format')}", f"this version reads format {FORMAT}"
                )
            if not clients:
                header["joined"] = []
                header["paths"] = {name: at for name, at in header["paths"].items() if name.startswith("server/")}
            tensors = {name: file.get_tensor(name) for name in set(header["paths"].values())}
        return decode(tensors, header)
    except CheckpointError:
        raise
    except Exception as error:  # a header of anything else raises almost anything
        reason = str(error) if isinstance(error, OSError | SafetensorError | ValueError) else repr(error)
        raise CheckpointError(f"{path} cannot be read: {reason}", "it is damaged or not a checkpoint") from error


def read_header(text: str, where: str) -> dict[str, Any]:
    """The header of a checkpoint; checked, unless an earlier version wrote it."""
    header: dict[str, Any] = json.loads(text)
    if header.keys() & {"run", "crc32", digests.DIGEST}:
        header = digests.check(header, "", f"the header of {where}")
    return header


def decode(tensors: Mapping[str, torch.Tensor], header: Mapping[str, Any]) -> Checkpoint:
    """The reverse of :func:`encode`; an error if a tensor is not what was encoded."""
    for path, value in tensors.items() if "crc32" in header else ():
        if header["crc32"][path] != digests.of_tensor(value):
            raise ValueError(f"the checksum of its tensor {path} is another")
    nested = refill({name: tensors[first] for name, first in header["paths"].items()}, header["empty"])
    client_states = {k: as_state(nested["client_states"][str(k)]) for k in header["joined"]}
    run = header.get("run", "")
    return Checkpoint(operator.index(header["round"]), as_state(nested["server"]), client_states, run)


def refill(tensors: Mapping[str, torch.Tensor], empty: Sequence[str]) -> dict[str, Any]:
    """The nested dicts of these leaves, empty dicts included."""
    nested = tree.nest(tensors)
    for path in empty:
        node = nested
        for name in path.split(tree.SEPARATOR):
            node = node.setdefault(name, {})
    return nested


def as_state(nested: dict[str, Any]) -> State:
    return State(Model(nested["model"]["params"], nested["model"]["stats"]), nested["extra"])


def read_labels(comparison: Path) -> dict[str, str]:
    """The labels of a comparison's methods, by the names of their folders; empty if there is no comparison."""
    labels = _of_comparison(comparison, "labels", {})
    if not isinstance(labels, dict) or not all(isinstance(label, str) for label in labels.values()):
        raise CheckpointError(f"{comparison / COMPARISON} has no labels")
    return labels


def read_order(comparison: Path) -> list[str]:
    """The folders of a comparison's methods, in the order in which they were named; empty if it is not known."""
    order = _of_comparison(comparison, "order", [])
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise CheckpointError(f"{comparison / COMPARISON}: the order of the methods cannot be read")
    return order


def _of_comparison(comparison: Path, entry: str, missing: Any) -> Any:
    if not (comparison / COMPARISON).is_file():
        return missing
    content = Folder(comparison).read_json(COMPARISON)
    return content.get(entry, missing) if isinstance(content, dict) else None

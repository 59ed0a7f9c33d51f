"""What a run folder notices of itself: settings that were edited, files that are damaged or of another run."""

from __future__ import annotations

import json
import shutil
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedrane
import folders
from asserts import same_bytes
from fedrane import tree
from fedrane.engines import processes
from fedrane.errors import CheckpointError, ConfigError, FedraneError
from fedrane.testing.conformance import states
from fedrane.training import digests, run_folder
from fedrane.training.run_folder import (
    CALIBRATION,
    CONFIG,
    METADATA,
    METRICS,
    PARTITION,
    SESSIONS,
    SUMMARY,
    Checkpoint,
    Folder,
    encode,
)
from fedrane.training.verify import OLD, verify
from harness import USER_METHODS, checkpoints, same_run
from problems import SLOW, Listener, quick

ROUNDS = 4


def damaged(run: Path) -> dict[str, str]:
    return {found.file: found.problem for found in verify(Folder(run)) if found.problem}


def finished(path: Path, **changes: Any) -> Path:
    fedrane.run(quick(**{"rounds": ROUNDS, "method": "local", "participation": 0.6} | changes), path)
    return path


def unfinished(path: Path, after: int = 2, **changes: Any) -> Path:
    asked = iter([False] * (after - 1) + [True])
    fedrane.run(quick(**{"rounds": ROUNDS} | changes), path, stop=lambda: next(asked))
    return path


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its own code; it is only read."""
    folder = tmp_path_factory.mktemp("verified")
    (folder / "own.py").write_text(USER_METHODS.read_text())
    return finished(folder / "run", method=f"{folder / 'own.py'}:Gliding")


def test_every_file_of_an_intact_run_is_checked_and_none_written(run: Path) -> None:
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}
    found = list(verify(Folder(run)))
    assert not any(each.problem or each.note for each in found)
    ours = {str(path.relative_to(run)) for path in before if not path.name.startswith(".")}
    assert {each.file for each in found} == ours
    assert {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()} == before


# ---- single bits


def content(path: Path) -> Any:
    """What is read of a file: some bits, as that of the E in 1e-5, change nothing."""
    if path.suffix == ".safetensors":
        checkpoint = run_folder.read(path)
        tensors, header = encode(checkpoint)
        return {name: value.numpy().tobytes() for name, value in tensors.items()}, header
    if path.suffix == ".toml":
        return {k: v for k, v in tomllib.loads(path.read_text()).items() if k not in digests.UNRECORDED}
    if path.suffix == ".py":
        return path.read_bytes()
    return [
        json.loads(text) for text in (path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()])
    ]


def flips(run: Path, each: int) -> Iterator[tuple[Path, int]]:
    """Bits of every file, drawn; and all of the last byte."""
    chance = np.random.default_rng(0)
    for path in sorted(path for path in run.rglob("*") if path.is_file() and not path.name.startswith(".")):
        size = 8 * path.stat().st_size
        yield from ((path, int(bit)) for bit in {*chance.integers(size, size=each), *range(size - 8, size)})


@pytest.mark.parametrize("each", [6, pytest.param(60, marks=SLOW)])
def test_a_flipped_bit_is_found_or_changes_nothing(run: Path, tmp_path: Path, each: int) -> None:
    other = tmp_path / "run"
    shutil.copytree(run, other)
    found = 0
    for path, bit in flips(other, each):
        before, intact = path.read_bytes(), content(path) if path.suffix != ".npz" else None
        flipped = bytearray(before)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        problems = damaged(other)
        assert problems or content(path) == intact, f"bit {bit} of {path.name}"
        assert not problems or str(path.relative_to(other)) in problems, (path, problems)
        found += bool(problems)
        path.write_bytes(before)
    assert found > 9 * each
    assert not damaged(other)


@pytest.mark.parametrize("part", ["server", "client_states"])
def test_a_flipped_bit_of_a_checkpoint_costs_a_round(tmp_path: Path, part: str) -> None:
    """The older one is used, with a message, and the end is the same; without the clients only the server is read."""
    e = {"method": "local"}
    reference = finished(tmp_path / "reference", participation=1.0)
    done = unfinished(tmp_path / "run", after=3, **e)
    newest = Folder(done).checkpoints()[-1]
    checkpoint = run_folder.read(newest)
    tensors, _ = encode(checkpoint)
    name = next(name for name, value in tensors.items() if name.startswith(part) and value.numel() > 8)
    raw, data = newest.read_bytes(), tensors[name].numpy().tobytes()
    at = raw.index(data)
    newest.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :])
    with pytest.raises(CheckpointError, match=f"the checksum of its tensor {name}"):
        run_folder.read(newest)
    if part == "client_states":
        same_bytes(run_folder.read(newest, clients=False).server, checkpoint.server)
    with pytest.warns(UserWarning, match="An older checkpoint is used"):
        assert fedrane.load(done).round == 2
    listener = Listener()
    fedrane.resume(done, callbacks=[listener])
    assert any("Going on from an older checkpoint" in text for text in listener.messages)
    same_run(done, reference)


def test_an_edited_header_is_found(tmp_path: Path) -> None:
    """What it says of the clients cannot be checked by any tensor."""
    run = unfinished(tmp_path / "run", method="local", after=3)
    newest = Folder(run).checkpoints()[-1]
    raw = newest.read_bytes()
    assert raw.count(b'"joined\\": [0, 1') == 1
    newest.write_bytes(raw.replace(b'"joined\\": [0, 1', b'"joined\\": [0, 0'))
    with pytest.raises(CheckpointError, match=r"the header of .* is not as it was written"):
        run_folder.read(newest)


@pytest.mark.parametrize("value", [torch.zeros(0), torch.ones(()), torch.ones(3, 2).T, torch.ones(3).bfloat16()])
def test_any_tensor_has_a_checksum(value: torch.Tensor) -> None:
    assert digests.of_tensor(value) == digests.of_tensor(value.clone())
    assert digests.of_tensor(value) != digests.of_tensor(value.double())
    assert digests.of_tensor(value) != digests.of_tensor(value[None])


# ---- edits


def edit(run: Path, key: str, value: object) -> None:
    config = run / CONFIG
    table, _, name = key.rpartition(".")
    head, _, tail = config.read_text().partition(f"[{table}]\n") if table else ("", "", config.read_text())
    lines = tail.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"{name} = "))
    lines[at] = f"{name} = {json.dumps(value)}"
    config.write_text(head + (f"[{table}]\n" if table else "") + "\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("key", "old", "new"),
    [("lr", 0.1, 0.2), ("seed", 0, 5), ("partition.test", 0.2, 0.4), ("method.name", "local", "fedavg")],
)
def test_a_setting_that_was_edited_is_named(tmp_path: Path, key: str, old: object, new: object) -> None:
    """With its old value and its new one, and nothing is written."""
    run = unfinished(tmp_path / "run", method="local", lr=0.1)
    edit(run, key, new)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for action in (fedrane.resume, fedrane.load):
        with pytest.raises(CheckpointError, match=rf"has {key}={new}, and the run began with {key}={old}"):
            action(run)
    with pytest.raises(CheckpointError, match=f"has {key}={new}"):
        fedrane.resume(run, accept_changes=True)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    assert [*damaged(run)] == [CONFIG]


def test_where_a_run_goes_on_may_be_edited(tmp_path: Path) -> None:
    """Of the keys of a configuration, those that do not decide its result."""
    reference, run = finished(tmp_path / "reference"), tmp_path / "run"
    unfinished(run, method="local", participation=0.6)
    edit(run, "checkpoint_every", 2)
    result = fedrane.resume(run)
    same_bytes(states(result), states(fedrane.resume(reference)))


def test_an_engine_that_was_edited_is_said_and_recorded(tmp_path: Path) -> None:
    """It may change last bits, and nothing else; as it was, nothing is said."""
    run = unfinished(tmp_path / "run", rounds=6)
    began = json.loads((run / SESSIONS).read_text())[0]
    for key, value in (("engine", "threaded"), ("threads", began["threads"] + 1)):
        edit(run, key, value)
        fedrane.resume(run, stop=lambda: True)
        (note,) = json.loads((run / SESSIONS).read_text())[-1]["notes"]
        assert f"{CONFIG} was edited: {key}={value} (was {began[key]})" in note
        edit(run, key, began[key])
    fedrane.resume(run)
    assert json.loads((run / SESSIONS).read_text())[-1]["notes"] == []


def test_rounds_that_were_edited_are_no_plan(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run")
    edit(run, "rounds", 9)
    with pytest.raises(CheckpointError, match=r"has rounds=9, and the run was planned with rounds=4.* rounds=9"):
        fedrane.resume(run)
    assert [*damaged(run)] == [CONFIG]
    edit(run, "rounds", 4)
    assert fedrane.resume(run, rounds=9).round == 9
    assert not damaged(run)


def without(lines: list[str]) -> list[str]:
    return [lines[0], *lines[2:]]


def doubled(lines: list[str]) -> list[str]:
    return [lines[0], *lines]


def swapped(lines: list[str]) -> list[str]:
    return [lines[1], lines[0], *lines[2:]]


def shortened(lines: list[str]) -> list[str]:
    return lines[:-1]


@pytest.mark.parametrize("change", [without, doubled, swapped, shortened])
@pytest.mark.parametrize("old", [False, True])
def test_lines_that_are_missing_or_doubled(tmp_path: Path, change: Callable[[list[str]], list[str]], old: bool) -> None:
    """Also in a folder without digests, unless a line between others is missing."""
    run = unfinished(tmp_path / "run", after=3)
    if old:
        folders.older(run)
    path = run / METRICS
    path.write_text("".join(change(path.read_text().splitlines(keepends=True))))
    if old and change is without:
        return
    with pytest.raises(CheckpointError, match=METRICS):
        fedrane.resume(run)
    assert [*damaged(run)] == [METRICS]


def test_a_line_that_was_edited(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", after=3)
    path = run / METRICS
    path.write_text(path.read_text().replace('"round": 2, "cohort": [0, ', '"round": 2, "cohort": [1, '))
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl, line 2, is not as it was written"):
        fedrane.resume(run)


# ---- files of another run


@pytest.mark.parametrize("changes", [{"seed": 1}, {"lr": 0.01}])
def test_a_checkpoint_of_another_run_is_not_used(tmp_path: Path, changes: dict[str, Any]) -> None:
    reference = finished(tmp_path / "reference", method="fedavg", participation=1.0)
    other = unfinished(tmp_path / "other", after=3, **changes)
    run = unfinished(tmp_path / "run", after=3)
    shutil.copy(Folder(other).checkpoints()[-1], Folder(run).checkpoints()[-1])
    assert [*damaged(run)] == ["checkpoints/round-000003.safetensors"]
    listener = Listener()
    fedrane.resume(run, callbacks=[listener])
    assert any(Folder(other).id in text and "not a checkpoint of this run" in text for text in listener.messages)
    same_run(run, reference)


def test_a_checkpoint_under_another_number_is_not_used(tmp_path: Path) -> None:
    run = unfinished(tmp_path / "run", after=3)
    two, three = Folder(run).checkpoints()
    shutil.copy(two, three)
    with pytest.warns(UserWarning, match="is round 2 of"):
        assert fedrane.load(run).round == 2


def more(run: Path) -> None:
    fedrane.resume(run, rounds=ROUNDS + 1)


def load(run: Path) -> None:
    fedrane.load(run)


def summary(run: Path) -> None:
    Folder(run).read_json(SUMMARY)


@pytest.mark.parametrize(
    ("name", "reader"),
    [(METRICS, more), (SESSIONS, more), (METADATA, more), (PARTITION, more), (CALIBRATION, load), (SUMMARY, summary)],
)
def test_a_file_of_another_run_is_known(tmp_path: Path, name: str, reader: Callable[[Path], None]) -> None:
    """Metadata of another run fit none of the other files."""
    run, other = finished(tmp_path / "run"), finished(tmp_path / "other", seed=1)
    shutil.copy(other / name, run / name)
    assert (name in damaged(run)) == (name != METADATA)
    assert damaged(run)
    with pytest.raises(FedraneError):
        reader(run)


def test_runs_of_one_experiment_have_one_id(tmp_path: Path) -> None:
    """Wherever and however far they run, since they are the same bytes; another experiment has another."""
    ids = [
        Folder(finished(tmp_path / name, **changes)).id
        for name, changes in {
            "one": {},
            "longer": {"rounds": ROUNDS + 1},
            "elsewhere": {"checkpoint_every": 2},
            "other": {"seed": 1},
        }.items()
    ]
    assert len(set(ids[:3])) == 1
    assert ids[3] != ids[0]
    assert (
        checkpoints(tmp_path / "one")["round-000004.safetensors"]
        == (checkpoints(tmp_path / "elsewhere")["round-000004.safetensors"])
    )


# ---- folders of earlier versions, and leftovers


def test_a_folder_without_digests_goes_on_without(tmp_path: Path) -> None:
    reference = fedrane.run(quick(rounds=ROUNDS))
    run = folders.older(unfinished(tmp_path / "run"))
    assert [found.note for found in verify(Folder(run)) if found.note] == [OLD]
    assert fedrane.load(run).round == 2
    same_bytes(states(fedrane.resume(run)), states(reference))
    assert not Folder(run).id
    assert digests.DIGEST not in (run / METRICS).read_text()
    assert not damaged(run)


@pytest.mark.parametrize("engine", ["sequentiel", "processes", "flower-remote"])
def test_a_mistaken_engine_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(processes, "impossible", lambda: "it may not fork")
    with pytest.raises(ConfigError):
        fedrane.run(quick(engine=engine), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_third_checkpoint_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed after the last checkpoint is saved, and before an older one is removed."""
    e = quick(rounds=ROUNDS)

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    fedrane.run(e, tmp_path / "reference")
    save = Folder.save

    def saved(self: Folder, checkpoint: Checkpoint, rounds: int) -> Path:
        if checkpoint.round == ROUNDS:
            monkeypatch.setattr(Folder, "prune", killed)
        return save(self, checkpoint, rounds)

    monkeypatch.setattr(Folder, "save", saved)
    with pytest.raises(KeyboardInterrupt):
        fedrane.run(e, tmp_path / "run")
    monkeypatch.undo()
    assert len(checkpoints(tmp_path / "run")) == 3
    fedrane.resume(tmp_path / "run")
    assert checkpoints(tmp_path / "run") == checkpoints(tmp_path / "reference")


def test_what_cannot_be_read_is_not_counted_as_kept(tmp_path: Path) -> None:
    """Two checkpoints that can be read are kept beside one that cannot."""
    folder = Folder(unfinished(tmp_path / "run"))
    state, _ = folder.newest()
    assert state
    (tmp_path / "run" / "checkpoints" / "round-000009.safetensors").touch()
    folder.save(state._replace(round=3), ROUNDS)
    assert [run_folder.round_of(path) for path in folder.checkpoints()] == [2, 3, 9]


def test_tensors_may_share_a_checksum_entry(tmp_path: Path) -> None:
    """A tensor that occurs twice is stored and checked once."""
    value = torch.ones(3)
    state = fedrane.task.State(fedrane.task.Model({"a": value, "b": value}, {}), {})
    run_folder.write(tmp_path / "c", Checkpoint(1, state, {0: state}))
    same_bytes(run_folder.read(tmp_path / "c").client_states[0], state)
    assert len(tree.flatten(state)) == 2

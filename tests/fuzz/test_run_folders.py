"""A run folder in which anything was changed: its models, its report and its resumption, or one clear error."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fedrane
from contained import examples, used_or_refused
from damage import as_json, damaged, replaced, toml_of, values, words
from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.experiment import read_toml
from fedrane.report import page, runs
from fedrane.training.predictor import predict
from fedrane.training.run_folder import CALIBRATION, CONFIG, METADATA, METRICS, SESSIONS, SUMMARY
from folders import older
from problems import quick

pytestmark = pytest.mark.slow

STRANGER = """\
import os
from fedrane.methods.fedavg import FedAvg
open({path!r}, "w")
class M(FedAvg): pass
def network(shape, classes): open({path!r}, "w")
"""
CODE = (
    "subprocess:call",
    "os:system",
    "stranger.py:M",
    "stranger.py:network",
    "builtins:exec",
    "json:loads",
    "torch.nn:Linear",
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished run of a method with both models, and with a state at each client; with digests and without, which
    would find nearly every change before anything else reads it."""
    path = tmp_path_factory.mktemp("whole") / "run"
    fedrane.run(quick(method="ditto", clients=2, rounds=2, batch=512), path)
    shutil.copytree(path, path.with_name("older"))
    return path, older(path.with_name("older"))


@pytest.fixture
def fresh(whole: tuple[Path, Path], tmp_path: Path) -> Callable[[bool], Path]:
    """A copy that may be changed, with digests or without; each replaces the last."""

    def copied(digests: bool) -> Path:
        shutil.rmtree(tmp_path / "box", ignore_errors=True)
        shutil.copytree(whole[0 if digests else 1], tmp_path / "box" / "run")
        canary = str(tmp_path / "box" / "canary")
        (tmp_path / "box" / "run" / "stranger.py").write_text(STRANGER.format(path=canary), encoding="utf-8")
        return tmp_path / "box" / "run"

    return copied


def used(run: Path, resumed: bool = True) -> None:
    """What anybody does with a run folder; going on with it last, which takes longer."""
    box = run.parent

    def models() -> None:
        loaded = fedrane.load(run)
        one = loaded.model if GLOBAL in loaded.algorithm.models_on(loaded.task) else loaded.personal(0)
        list(predict(one, [("zeros", np.zeros(loaded.inputs.shape, np.float32))], 1))
        if PERSONAL in loaded.algorithm.models_on(loaded.task):
            loaded.personal(1)

    def report() -> None:
        lines, notes = runs.gather([run])
        page.html(lines, notes, {}, "", None)

    used_or_refused(box, models)
    used_or_refused(box, report)
    os.chdir(run)  # where a relative name of a file of code would be found
    result = used_or_refused(box, lambda: fedrane.resume(run))
    if result is not None:
        assert all(bool(leaf.isfinite().all()) for leaf in result.server.model.params.values())
    assert not (box / "canary").exists()


FILES = (CONFIG, METADATA, METRICS, SUMMARY, SESSIONS, CALIBRATION, "partition.npz", ".fedrane")


@examples(12)
@given(data=st.data())
def test_any_bytes_of_any_file(
    data: st.DataObject, fresh: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    run = fresh(data.draw(st.booleans()))
    for name in data.draw(st.lists(st.sampled_from(FILES), min_size=1, max_size=2, unique=True)):
        (run / name).write_bytes(data.draw(damaged((run / name).read_bytes())))
    if data.draw(st.booleans()):
        (run / SUMMARY).unlink()  # so that there is something to go on with
    used(run)


@examples(12)
@given(data=st.data())
def test_any_value_of_json(data: st.DataObject, fresh: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    run = fresh(data.draw(st.booleans()))
    name = data.draw(st.sampled_from([METADATA, METRICS, SESSIONS, CALIBRATION]))
    lines = (run / name).read_text().splitlines() if name == METRICS else [(run / name).read_text()]
    parts: list[Any] = list(map(json.loads, lines))
    parts = data.draw(replaced(parts)) if name == METRICS else [data.draw(replaced(parts[0]))]
    text = "".join(as_json(part) + "\n" for part in parts) if isinstance(parts, list) else as_json(parts)
    (run / name).write_text(text)
    if data.draw(st.booleans()):
        (run / SUMMARY).unlink()
    used(run)


@examples(12)
@given(data=st.data())
def test_any_setting(data: st.DataObject, fresh: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    run = fresh(data.draw(st.booleans()))
    odd = st.sampled_from(CODE) | values | words
    settings = data.draw(replaced(read_toml(run / CONFIG), odd))
    if isinstance(settings, dict) and data.draw(st.booleans()):
        settings[data.draw(st.sampled_from(["method", "model", "dataset", "data_root"]))] = data.draw(odd)
    tables = settings.items() if isinstance(settings, dict) else [("it", settings)]
    text = "".join(f"{toml_of(str(key))} = {toml_of(value)}\n" for key, value in tables)
    (run / CONFIG).write_text(text, encoding="utf-8", errors="replace")
    (run / SUMMARY).unlink()
    used(run)


@examples(12)
@given(data=st.data())
def test_any_bytes_of_a_checkpoint(
    data: st.DataObject, fresh: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also its header alone, which is JSON."""
    monkeypatch.chdir("/")
    run = fresh(data.draw(st.booleans()))
    for path in sorted((run / "checkpoints").iterdir()):
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        how = data.draw(st.sampled_from(["bytes", "header", "text", "json", "ours"]))
        header = json.loads(content[8 : 8 + size])
        if how == "header":
            changed = data.draw(damaged(content[8 : 8 + size]))
        elif how == "json":
            changed = as_json(data.draw(replaced(header))).encode()
        elif how == "ours":
            ours = json.loads(header["__metadata__"]["fedrane"])
            header["__metadata__"]["fedrane"] = as_json(data.draw(replaced(ours)))
            changed = as_json(header).encode()
        else:
            path.write_bytes(data.draw(damaged(content)))
            continue
        path.write_bytes(len(changed).to_bytes(8, "little") + changed + content[8 + size :])
    used(run)


def test_the_whole_folder_is_used(fresh: Callable[[bool], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what is above does not pass because everything is refused."""
    monkeypatch.chdir("/")
    run = fresh(True)
    used(run)
    assert torch.is_tensor(next(iter(fedrane.load(run).server.model.params.values())))
    assert runs.gather([run])[0]

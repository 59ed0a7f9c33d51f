"""A run that goes on: what it notices of its inputs, how it takes more rounds, and what it records of itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import pwd
import re
import shutil
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import fedrane
from asserts import same_bytes, untimed
from fedrane import Algorithm, Callback, Experiment, tree
from fedrane.data import catalogue
from fedrane.data.dataset import Dataset
from fedrane.errors import CheckpointError, ConfigError, DataError
from fedrane.methods import METHODS, Method
from fedrane.report.comparison import compare
from fedrane.report.runs import gather
from fedrane.system import named_code
from fedrane.testing.conformance import blobs, network, states
from fedrane.training import digests, loop, run_folder, sessions
from fedrane.training.run_folder import METADATA, SESSIONS, Folder, round_of
from harness import USER_METHODS
from problems import EVERY_METHOD, Listener, dense, quick


def stopped(experiment: Experiment, out: Path, after: int = 1, **more: Any) -> fedrane.Result:
    """A run that is asked to stop after some rounds."""
    asked = iter([False] * (after - 1) + [True] * 1000)
    result = fedrane.run(experiment, out, stop=lambda: next(asked), **more)
    assert not result.finished
    return result


def entries(run: Path) -> list[dict[str, Any]]:
    checkpoint: list[dict[str, Any]] = json.loads((run / SESSIONS).read_text())
    return checkpoint


def edited(run: Path, **changes: Any) -> None:
    """Other metadata, with the digest that they should have: as of another version, or of an attacker."""
    folder = Folder(run)
    folder.write_metadata(folder.read_metadata() | changes)


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


# ---- what a run records of itself


def test_every_session_is_recorded(tmp_path: Path) -> None:
    """Versions, machine, command, times and rounds of the start and of each resume; how each ended."""
    stopped(quick(rounds=3), tmp_path / "run")
    fedrane.resume(tmp_path / "run")
    first, second = entries(tmp_path / "run")
    for entry in (first, second):
        assert entry["versions"] == {
            "fedrane": fedrane.__version__,
            "python": platform.python_version(),
            "torch": str(torch.__version__),
            "numpy": np.__version__,
        }
        assert entry["threads"] == 1
        assert entry["machine"]["device"] == "cpu"
        assert entry["machine"]["device_name"]
        assert entry["engine"] == "sequential"
        assert Path(sys.argv[0]).name in entry["command"]
        assert entry["start"] <= entry["end"]
        assert entry["start"].endswith("+00:00")
    assert (first["outcome"], second["outcome"]) == ("stopped", "finished")
    assert first["rounds"] == {"planned": 3, "before": 0, "after": 1}
    assert second["rounds"] == {"planned": 3, "before": 1, "after": 3}


def test_what_differs_from_run_to_run_is_in_one_file(tmp_path: Path) -> None:
    """Metadata and configuration of one experiment are the same bytes, whoever runs it."""
    for name in ("one", "two"):
        fedrane.run(quick(rounds=1), tmp_path / name)
    for name in (METADATA, "config.toml", "partition.npz"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_session_that_fails_records_how(tmp_path: Path) -> None:
    e = Experiment(clients=3, rounds=40, epochs=5, batch=8, lr=1e30, model_head="head")
    with pytest.raises(fedrane.FedraneError):
        fedrane.run(e, tmp_path / "run", dataset=blobs(), model=network(False))
    (entry,) = entries(tmp_path / "run")
    assert entry["outcome"].startswith("Diverged: round")
    assert entry["end"] is not None


def test_other_versions_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run goes on; its user knows that bits may differ."""
    stopped(quick(rounds=2), tmp_path / "run")
    now = sessions.versions()
    monkeypatch.setattr(sessions, "versions", lambda: now | {"torch": "9.9"})
    listener = Listener()
    fedrane.resume(tmp_path / "run", callbacks=[listener])
    (note,) = listener.messages
    assert f"torch 9.9 (was {torch.__version__})" in note
    assert "numpy" not in note
    assert entries(tmp_path / "run")[1]["notes"] == [note]


def test_the_engine_and_its_threads_are_recorded(tmp_path: Path) -> None:
    fedrane.run(quick(rounds=1, threads=2), tmp_path / "run")
    assert (entries(tmp_path / "run")[0]["engine"], entries(tmp_path / "run")[0]["threads"]) == ("sequential", 2)


# ---- inputs that changed


def npz(path: Path, seed: int = 0) -> Path:
    examples = blobs(90, seed)
    np.savez(path, x=examples.x, y=examples.y, x_test=examples.x_test, y_test=examples.y_test)
    return path


def of_file(path: Path) -> Experiment:
    return quick(dataset=str(path), model="mlp", clients=3, rounds=3)


def test_data_that_changed_stop_a_resume(tmp_path: Path) -> None:
    """One clear error, and the folder is left as it is; the same content in a new file is no change."""
    data, run = npz(tmp_path / "own.npz"), tmp_path / "run"
    stopped(of_file(data), run)
    before = files(run)
    npz(data, seed=1)
    with pytest.raises(CheckpointError, match=r"the dataset \S+own\.npz changed since .*--accept-changes"):
        fedrane.resume(run)
    assert files(run) == before
    examples = blobs(90, 0)
    np.savez_compressed(data, x=examples.x, y=examples.y, x_test=examples.x_test, y_test=examples.y_test)
    result = fedrane.resume(run)
    same_bytes(states(result), states(fedrane.run(of_file(data))))


def test_a_change_can_be_accepted_and_is_recorded(tmp_path: Path) -> None:
    """Once: the next resume knows it. A comparison does not take the run for one of the new data."""
    data, run = npz(tmp_path / "own.npz"), tmp_path / "all" / "m" / "seed-0"
    e = of_file(data)
    stopped(e, run)
    metadata = json.loads((run / METADATA).read_text())
    npz(data, seed=1)
    listener = Listener()
    fedrane.resume(run, accept_changes=True, callbacks=[listener], stop=lambda: True)
    assert any("own.npz changed since" in text for text in listener.messages)
    entry, after = entries(run)[1], json.loads((run / METADATA).read_text())
    assert entry["changed_inputs"] == {
        "data": {"from": metadata["fingerprints"]["data"], "to": after["accepted"]["data"]}
    }
    assert after["fingerprints"] == metadata["fingerprints"]
    assert after["inputs"]["mean"] != metadata["inputs"]["mean"], (
        "a model normalises with the numbers it was trained with"
    )
    result = fedrane.resume(run)
    assert result.finished
    assert entries(run)[2]["changed_inputs"] == {}
    for seed in (1, 0):
        npz(data, seed)
        with pytest.raises(CheckpointError, match=r"own\.npz changed since the run began, which was accepted"):
            compare({"m": e}, seeds=[0], out=tmp_path / "all")
    (note,) = gather([run])[1]
    assert "which was accepted" in note


def test_known_data_that_changed_stop_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(quick(rounds=2), tmp_path / "run")
    digits = catalogue.load("digits")
    x = digits.x.copy()
    x[0, 0, 0, 0] ^= 1
    other = Dataset("digits", x, digits.y, digits.x_test, digits.y_test, digits.classes, digits.mean, digits.std)
    changed = dataclasses.replace(catalogue.EMBEDDED["digits"], read=lambda: other)
    monkeypatch.setitem(catalogue.EMBEDDED, "digits", changed)  # type: ignore[index]
    with pytest.raises(CheckpointError, match="the dataset digits changed"):
        fedrane.resume(tmp_path / "run")


@pytest.mark.parametrize("part", ["x", "y", "x_test", "y_test"])
def test_data_handed_over_are_known_by_their_content(tmp_path: Path, part: str) -> None:
    e = Experiment(clients=3, rounds=2, batch=32, model="mlp")
    stopped(e, tmp_path / "run", dataset=blobs())
    other = blobs()
    getattr(other, part)[0] = 1 - getattr(other, part)[0]
    with pytest.raises(CheckpointError, match="the dataset <python> changed"):
        fedrane.resume(tmp_path / "run", dataset=other)
    assert fedrane.resume(tmp_path / "run", dataset=blobs()).finished


@pytest.mark.parametrize("part", ["mean", "std"])
def test_data_handed_over_are_known_by_their_normalisation(tmp_path: Path, part: str) -> None:
    e, examples = Experiment(clients=3, rounds=2, batch=32, model="mlp"), replace(blobs(), mean=(0.3,) * 6)
    stopped(e, tmp_path / "run", dataset=examples)
    shutil.copytree(tmp_path / "run", tmp_path / "old")
    values = getattr(examples, part)
    other = replace(examples, **{part: (values[0] + 0.1, *values[1:])})
    with pytest.raises(CheckpointError, match="the dataset's mean and std changed since"):
        fedrane.resume(tmp_path / "run", dataset=other)
    close = replace(examples, **{part: (float(np.nextafter(values[0], 9.0)), *values[1:])})
    assert fedrane.resume(tmp_path / "run", dataset=close).finished
    prints = json.loads((tmp_path / "old" / METADATA).read_text())["fingerprints"]
    del prints["normalisation"]  # as in a folder of an older version
    edited(tmp_path / "old", fingerprints=prints)
    assert fedrane.resume(tmp_path / "old", dataset=examples).finished


def test_a_network_handed_over_is_known_by_its_layers_and_weights(tmp_path: Path) -> None:
    e = Experiment(clients=3, rounds=2, batch=32, model_head="2")
    torch.manual_seed(0)
    mine = dense((6,), 3)
    stopped(e, tmp_path / "run", dataset=blobs(), model=mine)
    other = nn.Sequential(mine[0], nn.ReLU(), mine[2])
    with pytest.raises(CheckpointError, match="the network changed since"):
        fedrane.resume(tmp_path / "run", dataset=blobs(), model=other)
    with pytest.raises(CheckpointError, match="not the one that was trained"):
        fedrane.load(tmp_path / "run", model=other)
    with pytest.raises(CheckpointError, match="the first weights of the network changed"):
        fedrane.resume(tmp_path / "run", dataset=blobs(), model=dense((6,), 3))
    assert fedrane.resume(tmp_path / "run", dataset=blobs(), model=mine).finished


def test_a_partition_that_changed(tmp_path: Path) -> None:
    """That of the folder is an input; the file it was made from is not needed any more, and a message reports it."""
    saved = tmp_path / "saved.npz"
    fedrane.run(quick(rounds=1), tmp_path / "other")
    shutil.copy(tmp_path / "other" / "partition.npz", saved)
    e = quick(rounds=2, partition=fedrane.Partitioning(file=str(saved)))
    stopped(e, tmp_path / "run")
    fedrane.run(quick(rounds=1, seed=5), tmp_path / "seed")
    shutil.copy(tmp_path / "seed" / "partition.npz", saved)
    listener = Listener()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    fedrane.resume(tmp_path / "run", callbacks=[listener])
    assert listener.messages == [f"{saved} changed since the run began: the partition in its folder is used."]
    shutil.copy(saved, tmp_path / "copy" / "partition.npz")
    with pytest.raises(CheckpointError, match=r"the folder's partition\.npz changed"):
        fedrane.resume(tmp_path / "copy")


# ---- files that are JSON and yet not what was written


INPUTS = {"shape": [1, 8, 8], "classes": ["a"], "mean": [0.0], "std": [1.0]}


def load(run: Path) -> None:
    fedrane.load(run)


def more(run: Path) -> None:
    fedrane.resume(run, rounds=2)


def table(run: Path) -> None:
    compare({"fedavg": quick(rounds=1)}, seeds=[0], out=run.parent.parent)


@pytest.mark.parametrize(
    ("file", "content", "readers"),
    [
        ("calibration.json", {"round": 1}, (load,)),
        ("calibration.json", [], (load,)),
        ("calibration.json", {"round": 1, "models": {"global": {"temperature": -1, "examples": ""}}}, (load,)),
        ("calibration.json", {"round": 1, "models": {"global": {"temperature": None, "examples": ""}}}, (load,)),
        ("sessions.json", [1], (more,)),
        ("sessions.json", {}, (more,)),
        ("sessions.json", [{"versions": [1]}], (more,)),
        ("metadata.json", [], (load, more, table)),
        ("metadata.json", {"inputs": {}, "labels": [[1]]}, (load, more, table)),
        ("metadata.json", {"inputs": [], "labels": [[1]]}, (load, more, table)),
        ("metadata.json", {"inputs": {"classes": ["a"]}, "labels": [[1]]}, (load,)),
        ("metadata.json", {"inputs": INPUTS, "labels": "many"}, (load, more, table)),
        ("metadata.json", {"inputs": INPUTS, "labels": [[1]], "fingerprints": [1]}, (load, more, table)),
        ("metadata.json", {"inputs": INPUTS, "labels": [[1]], "deviations": 1}, (load, more, table)),
        ("summary.json", [], (table,)),
        ("summary.json", {"samples_per_second": 1.0, "global/last": {}}, (table,)),
        ("metrics.jsonl", [1], (more,)),
    ],
)
def test_a_damaged_file_is_one_clear_error(
    file: str, content: Any, readers: Any, finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "all" / "fedavg" / "seed-0"
    shutil.copytree(finished_run, run)
    (run / file).write_text(json.dumps(content) + "\n")
    before = files(run)
    for reader in readers:
        with pytest.raises(CheckpointError, match=file.replace(".", r"\.")):
            reader(run)
        assert files(run) == before


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    fedrane.run(quick(rounds=1), run)
    return run


# ---- states of another version


@pytest.mark.parametrize("norm", ["shared", "local"])
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_a_method_goes_on_keeping_what_it_begins_with(method: str, norm: str, tmp_path: Path) -> None:
    """So that states of another version can be recognised; before the post-training stage and after it."""
    e = quick(method=method, rounds=2, participation=0.6, model_head="head", norm=norm)
    more = {"dataset": blobs(), "model": network(True)}
    stopped(e, tmp_path / "run", **more)
    assert fedrane.resume(tmp_path / "run", **more).finished
    assert fedrane.resume(tmp_path / "run", **more).finished


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_tensors_of_another_type_are_one_clear_error(dtype: torch.dtype, tmp_path: Path) -> None:
    """Whole numbers have no gradient, and float64 would turn the run into one of another precision."""
    stopped(quick(method="scaffold", rounds=2), tmp_path / "run")
    (path,) = Folder(tmp_path / "run").checkpoints()
    checkpoint = run_folder.read(path)
    server, other = checkpoint.server, tree.map(lambda leaf: leaf.to(dtype), checkpoint.client_states[0])
    forged = [checkpoint._replace(server=server._replace(model=tree.map(lambda leaf: leaf.to(dtype), server.model)))]
    forged += [] if dtype.is_floating_point else [checkpoint._replace(client_states={0: other})]
    for changed in forged:
        run_folder.write(path, changed)
        with pytest.raises(CheckpointError, match=f"{dtype} in the checkpoint|of another version of scaffold"):
            fedrane.resume(tmp_path / "run")
    run_folder.write(path, forged[0])
    with pytest.raises(CheckpointError, match=f"{dtype} in the checkpoint"):
        fedrane.load(tmp_path / "run")


@pytest.mark.parametrize(("method", "lost"), [("ditto", "global"), ("scaffold", "control"), ("apple", "relation")])
def test_states_of_another_version_are_one_clear_error(method: str, lost: str, tmp_path: Path) -> None:
    stopped(quick(method=method, rounds=2), tmp_path / "run")
    (path,) = Folder(tmp_path / "run").checkpoints()
    checkpoint = run_folder.read(path)
    client_state = checkpoint.client_states[2]
    assert lost in client_state.extra
    extra = {key: value for key, value in client_state.extra.items() if key != lost}
    run_folder.write(
        path, checkpoint._replace(client_states=checkpoint.client_states | {2: client_state._replace(extra=extra)})
    )
    before = files(tmp_path / "run")
    with pytest.raises(CheckpointError, match=f"are of another version of {method}.*Start the run again"):
        fedrane.resume(tmp_path / "run")
    assert files(tmp_path / "run") == before


# ---- a method and a network of one's own


def user_method(tmp_path: Path, **changes: Any) -> tuple[Path, Experiment]:
    """A file with a method and a network, and an experiment that names both."""
    file = tmp_path / "own.py"
    file.write_text(USER_METHODS.read_text())
    named = {"method": f"{file}:Gliding", "model": f"{file}:network", "model_head": "classifier"}
    return file, quick(**(named | {"rounds": 3} | changes))


def forget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As another user on another machine."""
    monkeypatch.setattr(named_code, "_named", set())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nobody"))


def test_a_method_that_was_edited_stops_a_resume(tmp_path: Path) -> None:
    """Accepted, the new code runs, also in the process that has loaded the old; each version's copy is kept."""
    file, e = user_method(tmp_path)
    stopped(e, tmp_path / "run")
    file.write_text(USER_METHODS.read_text().replace("1 / (1 + length)", "0.0"))
    with pytest.raises(
        CheckpointError, match=r"the method's file \S+own\.py and the network's file \S+own\.py changed"
    ):
        fedrane.resume(tmp_path / "run")
    before = fedrane.load(tmp_path / "run").server
    result = fedrane.resume(tmp_path / "run", accept_changes=True, stop=lambda: True)
    same_bytes(result.server.model.params, before.model.params)
    copies = [path.read_text() for path in (tmp_path / "run" / "code").glob("own-*.py")]
    assert sorted(copies) == sorted([USER_METHODS.read_text(), file.read_text()])


def test_a_folder_holds_the_code_it_was_made_with(tmp_path: Path) -> None:
    """Whether the file is gone or edited, a model is loaded and a run resumed from the copy."""
    file, e = user_method(tmp_path)
    reference = fedrane.run(e)
    stopped(e, tmp_path / "run")
    x = torch.from_numpy(fedrane.data.load("digits").x_test[:5])
    expected = fedrane.load(tmp_path / "run").model(x)
    file.write_text("raise RuntimeError")
    assert torch.equal(fedrane.load(tmp_path / "run").model(x), expected)
    file.unlink()
    assert torch.equal(fedrane.load(tmp_path / "run").model(x), expected)
    listener = Listener()
    result = fedrane.resume(tmp_path / "run", callbacks=[listener])
    same_bytes(states(result), states(reference))
    assert f"{file} is gone: its copy in the run folder is used." in listener.messages
    assert result.experiment.model == f"{file}:network"


def test_a_copy_that_is_gone_or_damaged(tmp_path: Path) -> None:
    file, e = user_method(tmp_path)
    stopped(e, tmp_path / "run")
    file.unlink()
    (copy,) = (tmp_path / "run" / "code").glob("*.py")
    copy.write_text("other = 1")
    for note in (r"and so has its copy", r"no copy of it"):
        for action in (fedrane.load, fedrane.resume):
            with pytest.raises(CheckpointError, match=note):
                action(tmp_path / "run")
        copy.unlink(missing_ok=True)


@pytest.mark.parametrize("gone", [True, False])
def test_code_of_somebody_elses_folder_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """Neither its copy nor the file it names, until the user trusts it; then it is known."""
    file, e = user_method(tmp_path)
    fedrane.run(e, tmp_path / "run")
    forget(monkeypatch, tmp_path)
    if gone:
        file.unlink()
    monkeypatch.setattr(fedrane.system.loading, "_from_file", lambda *a: pytest.fail("code was run"))
    for action in (fedrane.load, fedrane.resume):
        with pytest.raises(ConfigError, match=r"names code: method=.*own\.py.*--trust-code"):
            action(tmp_path / "run")
    monkeypatch.undo()
    forget(monkeypatch, tmp_path)
    assert fedrane.load(tmp_path / "run", trust_code=True).round == 4
    assert fedrane.load(tmp_path / "run").round == 4
    monkeypatch.setattr(named_code, "_named", set())
    assert fedrane.load(tmp_path / "run").round == 4, "as another process of the same user"


@pytest.mark.parametrize("function", ["subprocess:call", "subprocess:Popen", "os:system"])
def test_a_folder_cannot_name_any_function_as_its_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    """One that is called with values from the folder, for instance: not even if it is trusted."""
    fedrane.run(quick(rounds=2), tmp_path / "run", stop=lambda: True)
    forget(monkeypatch, tmp_path)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('model = "mlp"', f'model = "{function}"'))
    edited(tmp_path / "run", settings={})
    where, name = function.split(":")
    monkeypatch.setattr(f"{where}.{name}", lambda *a: pytest.fail("it was called"))
    for action in (fedrane.load, fedrane.resume):
        with pytest.raises(ConfigError, match=f"names code: model={function}.*the installed module {where}"):
            action(tmp_path / "run")
    for action in (fedrane.load, fedrane.resume):
        with pytest.raises(ConfigError, match=f"model={function} is not a network"):
            action(tmp_path / "run", trust_code=True)
    inputs = json.loads((tmp_path / "run" / METADATA).read_text())["inputs"]
    edited(tmp_path / "run", inputs=inputs | {"shape": ["touch", str(tmp_path / "made")]})
    with pytest.raises(CheckpointError, match="touch"):
        fedrane.load(tmp_path / "run", trust_code=True)
    assert not (tmp_path / "made").exists()


def test_code_that_is_refused_or_trusted_is_reported_with_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The file that is loaded: here the copy, since the original is gone."""
    file, e = user_method(tmp_path)
    stopped(e, tmp_path / "run")
    forget(monkeypatch, tmp_path)
    file.unlink()
    (copy,) = (tmp_path / "run" / "code").glob("*.py")
    said = f"{copy} (SHA-256 {hashlib.sha256(copy.read_bytes()).hexdigest()})"
    with pytest.raises(ConfigError, match=re.escape(f"Read {said}")):
        fedrane.load(tmp_path / "run")
    fedrane.load(tmp_path / "run", trust_code=True)
    assert f"trusted, and loaded from {said}" in caplog.text


@pytest.mark.filterwarnings("ignore:.*is not used")
@pytest.mark.parametrize("words", [[], ["method=fedavg", "model=mlp"]], ids=["as it is", "overridden"])
def test_a_run_folders_configuration_cannot_name_code_for_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    """``fedrane run RUN/config.toml``: not even where words name another method, unless a word names the code."""
    file, e = user_method(tmp_path, rounds=1)
    fedrane.run(e, tmp_path / "run")
    config = str(tmp_path / "run" / "config.toml")
    forget(monkeypatch, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(fedrane.system.loading, "_from_file", lambda *a: pytest.fail("code was run"))
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        with pytest.raises(
            ConfigError, match=rf"config.toml names code: .*SHA-256 {digest}.*yourself.*method=\S+own.py"
        ):
            fedrane.run([config, *words])
    named = [f"method={file}:Gliding", f"model={file}:network"]
    assert fedrane.run([config, *named], tmp_path / "named").finished
    assert fedrane.run([config, *words], tmp_path / "again").finished


def test_code_that_an_own_file_names_is_reported_once_with_its_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file, e = user_method(tmp_path, rounds=1)
    (tmp_path / "mine.toml").write_text(e.to_toml())
    forget(monkeypatch, tmp_path)
    for _ in range(2):
        Experiment.from_toml(tmp_path / "mine.toml")
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    assert (
        caplog.text.count(f"names code: method={file}:Gliding; trusted, and loaded from {file} (SHA-256 {digest})") == 1
    )


@pytest.mark.parametrize("key", ["method", "algorithm", '"method.name"'])
def test_a_folder_names_its_method_in_any_form(tmp_path: Path, key: str) -> None:
    """``method = "…"`` is the short form of a table with a name."""
    fedrane.run(quick(rounds=1), tmp_path / "run")
    file, config = tmp_path / "evil.py", tmp_path / "run" / "config.toml"
    file.write_text(f"open({str(tmp_path / 'made')!r}, 'w')")
    config.write_text(f'{key} = "{file}:M"\n' + config.read_text().replace('[method]\nname = "fedavg"\n', ""))
    for action in (fedrane.load, fedrane.resume):
        with pytest.raises(ConfigError, match="names code: method="):
            action(tmp_path / "run")
    assert not (tmp_path / "made").exists()


def test_an_account_without_a_home_can_run_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked again next time, since nothing can be remembered."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    (tmp_path / "mine.py").write_text("from fedrane.methods.fedavg import FedAvg\nclass Mine(FedAvg): ...\n")
    experiment = quick(method=f"{tmp_path / 'mine.py'}:Mine", rounds=1)
    assert fedrane.run(experiment, tmp_path / "run").finished
    assert fedrane.load(tmp_path / "run").round == 1


@pytest.mark.parametrize("moved", [True, False])
def test_only_what_was_named_of_a_file_is_known(tmp_path: Path, moved: bool) -> None:
    """A folder may not have any other function of it called; by its path as by its content."""
    file, e = user_method(tmp_path, method="fedavg")
    fedrane.run(e, tmp_path / "run")
    config, other = tmp_path / "run" / "config.toml", tmp_path / "elsewhere.py"
    other.write_text(USER_METHODS.read_text())
    text = config.read_text().replace(f"{file}:network", f"{other if moved else file}:Path")
    config.write_text(text)
    edited(tmp_path / "run", sources={})
    with pytest.raises(ConfigError, match="names code: model="):
        fedrane.load(tmp_path / "run")


def test_a_compiled_file_beside_the_code_is_not_run(tmp_path: Path) -> None:
    """It could hold anything: only the source is known."""
    import py_compile

    file = tmp_path / "mine.py"
    file.write_text("VALUE = 1\n")
    py_compile.compile(str(file), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    file.write_text("VALUE = 2\n")
    assert fedrane.system.loading.load(f"{file}:VALUE", "model") == 2


def seven(shape: tuple[int, ...], classes: int) -> nn.Module:
    return dense(shape, 7)


def test_a_network_with_other_outputs_than_classes() -> None:
    e = Experiment(clients=3, rounds=1, model_head="2")
    with pytest.raises(
        ConfigError, match=r"scores of shape \(1, 7\) for one example: there must be one score for each of the 3"
    ):
        fedrane.run(e, dataset=blobs(), model=seven)


def wider(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 9), nn.Tanh(), nn.Linear(9, classes))


def deeper(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Sequential(nn.Linear(shape[0], 5), nn.Linear(5, 5)), nn.Tanh(), nn.Linear(5, classes))


@pytest.mark.parametrize(
    ("other", "note"), [(wider, r"body\.0\.weight is of shape \(9, 6\), and of shape \(5, 6\)"), (deeper, "missing")]
)
def test_another_network_at_prediction(tmp_path: Path, other: Any, note: str) -> None:
    e = Experiment(clients=3, rounds=1, batch=32, model_head="2")
    fedrane.run(e, tmp_path / "run", dataset=blobs(), model=dense)
    with pytest.raises(CheckpointError, match=rf"not the one that was trained.*{note}"):
        fedrane.load(tmp_path / "run", model=other)


# ---- more rounds


@pytest.mark.parametrize("schedule_kind", ["constant", "step", "exponential"])
@pytest.mark.parametrize("finished", [True, False])
def test_more_rounds_equal_a_run_planned_with_them(tmp_path: Path, schedule_kind: str, finished: bool) -> None:
    """The same bytes and the same configuration; the change is on record."""
    schedule = {"constant": {}, "exponential": {"factor": 0.5}, "step": {"factor": 0.5, "every": 2}}[schedule_kind]
    schedule |= {"kind": schedule_kind}
    common = {"method": "local", "participation": 0.6, "client_dropout": 0.2, "momentum": 0.5, "schedule": schedule}
    e = quick(rounds=4, **common)
    fedrane.run(e.replace(rounds=6), tmp_path / "reference")
    if finished:
        fedrane.run(e, tmp_path / "run")
    else:
        stopped(e, tmp_path / "run", after=2)
    listener = Listener()
    result = fedrane.resume(tmp_path / "run", rounds=6, callbacks=[listener])
    done = 4 if finished else 2
    assert listener.messages == [f"rounds=6 instead of 4; it goes on from round {done}."]
    same_bytes(states(result), states(fedrane.run(e.replace(rounds=6))))
    assert untimed(Folder(tmp_path / "run").read_metrics()) == untimed(Folder(tmp_path / "reference").read_metrics())
    assert (tmp_path / "run" / "config.toml").read_bytes() == (tmp_path / "reference" / "config.toml").read_bytes()
    last = entries(tmp_path / "run")[-1]
    assert last["rounds"] == {"planned": 6, "planned_before": 4, "before": done, "after": 6}
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["rounds"] == 6


def test_more_rounds_of_a_schedule_that_depends_on_them(tmp_path: Path) -> None:
    """A message and the record state that the result is not that of a run planned so."""
    e = quick(rounds=2, schedule={"kind": "cosine"})
    fedrane.run(e, tmp_path / "run")
    listener = Listener()
    fedrane.resume(tmp_path / "run", rounds=4, callbacks=[listener])
    assert "not that of a run planned with 4" in listener.messages[1]
    assert entries(tmp_path / "run")[1]["notes"] == listener.messages
    assert gather([tmp_path / "run"])[1] == [f"{tmp_path / 'run'}: {listener.messages[1]}"]


def test_fewer_rounds_than_planned_but_more_than_done(tmp_path: Path) -> None:
    e = quick(rounds=9)
    stopped(e, tmp_path / "run", after=2)
    result = fedrane.resume(tmp_path / "run", rounds=3)
    same_bytes(states(result), states(fedrane.run(e.replace(rounds=3))))


@dataclass(frozen=True)
class Last(Algorithm):
    """One post-training stage, in which every client trains the head alone."""

    def trains(self, name: str) -> bool:
        return name.startswith("head")


@dataclass(frozen=True)
class Finishing(Algorithm):
    """FedAvg with three post-training stages: more than checkpoints are kept."""

    def post_training(self) -> tuple[Algorithm, ...]:
        return Last(), Last(), Last()


@pytest.mark.parametrize(
    ("method", "stop"), [("fedbabu", None), ("spherefed", None), ("finishing", None), ("finishing", 4)]
)
def test_more_rounds_go_on_from_before_post_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, stop: int | None
) -> None:
    """What the post-training stages made is taken back, their records too, and it is run again at the end."""
    monkeypatch.setitem(METHODS, "finishing", Method(Finishing, "–"))
    e = quick(method=method, rounds=2, checkpoint_every=2)
    if stop:
        stopped(e, tmp_path / "run", after=stop)
    else:
        fedrane.run(e, tmp_path / "run")
    result = fedrane.resume(tmp_path / "run", rounds=5)
    reference = fedrane.run(e.replace(rounds=5), tmp_path / "reference")
    same_bytes(states(result), states(reference))
    assert untimed(Folder(tmp_path / "run").read_metrics()) == untimed(reference.history)


class Interrupts(Callback):
    """Ctrl-C before the first round."""

    def begin(self, *about: Any) -> None:
        raise KeyboardInterrupt


def test_interrupted_right_after_more_rounds_were_planned(tmp_path: Path) -> None:
    """The post-training stage's state is not taken for that of the round whose number it had."""
    e = quick(method="fedbabu", rounds=2)
    fedrane.run(e, tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        fedrane.resume(tmp_path / "run", rounds=4, callbacks=[Interrupts()])
    assert entries(tmp_path / "run")[1]["outcome"] == "KeyboardInterrupt"
    same_bytes(states(fedrane.resume(tmp_path / "run")), states(fedrane.run(e.replace(rounds=4))))


def test_more_rounds_without_the_checkpoint_before_post_training(tmp_path: Path) -> None:
    fedrane.run(quick(method="fedbabu", rounds=2), tmp_path / "run")
    for path in Folder(tmp_path / "run").checkpoints():
        if round_of(path) <= 2:
            path.unlink()
    before = files(tmp_path / "run")
    with pytest.raises(CheckpointError, match="no checkpoint of its rounds up to 2 any more"):
        fedrane.resume(tmp_path / "run", rounds=4)
    assert files(tmp_path / "run") == before


def test_a_finished_run_without_checkpoints_is_not_started_again(tmp_path: Path) -> None:
    """Its results would be lost without a word."""
    fedrane.run(quick(rounds=2), tmp_path / "run")
    for path in Folder(tmp_path / "run").checkpoints():
        path.unlink()
    before = files(tmp_path / "run")
    for rounds in (None, 5):
        with pytest.raises(CheckpointError, match="no checkpoint"):
            fedrane.resume(tmp_path / "run", rounds=rounds)
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize("rounds", [0, 1, 2])
def test_not_fewer_rounds_than_are_done(tmp_path: Path, rounds: int) -> None:
    stopped(quick(rounds=4), tmp_path / "run", after=2)
    before = files(tmp_path / "run")
    with pytest.raises(ConfigError, match=rf"rounds={rounds}"):
        fedrane.resume(tmp_path / "run", rounds=rounds)
    assert files(tmp_path / "run") == before


def test_more_rounds_of_a_run_that_stopped_early(tmp_path: Path) -> None:
    e = quick(rounds=60, lr=1e-6, validation=0.2, patience=2)
    assert fedrane.run(e, tmp_path / "run").round < 60
    with pytest.raises(ConfigError, match=r"stopped early \(patience=2\)"):
        fedrane.resume(tmp_path / "run", rounds=100)


def test_the_evaluation_of_an_old_last_round_does_not_count_for_patience(tmp_path: Path) -> None:
    """A run planned with more rounds would not have made it."""
    e = quick(rounds=5, lr=1e-9, validation=0.2, patience=2, eval_every=2)
    reference = fedrane.run(e.replace(rounds=60))
    assert reference.round == 6, "after three evaluations without a rise: of rounds 2, 4 and 6"
    fedrane.run(e, tmp_path / "run")
    result = fedrane.resume(tmp_path / "run", rounds=60)
    assert result.round == reference.round
    same_bytes(states(result), states(reference))


def test_a_resume_that_changes_nothing_leaves_the_folder_as_it_is(tmp_path: Path) -> None:
    fedrane.run(quick(method="fedbabu", rounds=2), tmp_path / "run")
    before = files(tmp_path / "run")
    assert fedrane.resume(tmp_path / "run").finished
    assert fedrane.resume(tmp_path / "run", rounds=2).finished
    assert files(tmp_path / "run") == before


def test_fewer_examples_are_one_clear_error(tmp_path: Path) -> None:
    """Also where changes are accepted: the partition counts more of them."""
    data = npz(tmp_path / "own.npz")
    stopped(of_file(data), tmp_path / "run")
    examples = blobs(60, 0)
    np.savez(data, x=examples.x, y=examples.y, x_test=examples.x_test, y_test=examples.y_test)
    with pytest.raises(DataError, match="for 90 examples"):
        fedrane.resume(tmp_path / "run", accept_changes=True)


def test_a_plan_that_was_cut_short_is_still_known_for_what_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while the new plan is written, the run has rounds of two plans, and reports it afterwards."""
    fedrane.run(quick(rounds=2, schedule={"kind": "cosine"}), tmp_path / "run")

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    written = Folder.write_config
    monkeypatch.setattr(Folder, "write_config", lambda *a: (written(*a), killed()))
    with pytest.raises(KeyboardInterrupt):
        fedrane.resume(tmp_path / "run", rounds=4)
    monkeypatch.undo()
    assert fedrane.resume(tmp_path / "run").round == 4
    (deviation,) = json.loads((tmp_path / "run" / METADATA).read_text())["deviations"]
    assert "depends on the number of rounds" in deviation


def test_a_temperature_is_that_of_its_model(tmp_path: Path) -> None:
    """The post-training round has the number of a round of the new plan."""
    fedrane.run(quick(method="fedbabu", rounds=2), tmp_path / "run")
    assert fedrane.load(tmp_path / "run").calibration
    asked = iter([True])
    fedrane.resume(tmp_path / "run", rounds=4, stop=lambda: next(asked))
    assert fedrane.load(tmp_path / "run").round == 3
    assert not fedrane.load(tmp_path / "run").calibration


def test_changed_data_leave_a_finished_run_as_it_is(tmp_path: Path) -> None:
    file = npz(tmp_path / "d.npz")
    fedrane.run(of_file(file), tmp_path / "run")
    before = files(tmp_path / "run")
    npz(file, seed=1)
    fedrane.resume(tmp_path / "run", accept_changes=True)
    assert files(tmp_path / "run") == before


def test_a_run_killed_before_it_was_calibrated_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(loop, "calibrate", fails)
    with pytest.raises(MemoryError):
        fedrane.run(quick(rounds=1), tmp_path / "run")
    monkeypatch.undo()
    assert Folder(tmp_path / "run").finished
    assert not fedrane.load(tmp_path / "run").calibration
    fedrane.resume(tmp_path / "run")
    assert fedrane.load(tmp_path / "run").calibration


@pytest.mark.parametrize(
    "change",
    ["[" * 100_000, "[]", {"paths": None}, {"paths": {"x": "y"}}, {"round": "1"}, {"joined": [99]}, {"empty": [3]}],
    ids=["deep", "list", "no paths", "other paths", "round", "joined", "empty"],
)
def test_a_checkpoint_with_another_header_is_one_clear_error(tmp_path: Path, change: Any) -> None:
    fedrane.run(quick(rounds=1), tmp_path / "run")
    (path,) = Folder(tmp_path / "run").checkpoints()
    with safe_open(path, "pt") as file:
        header = json.loads(file.metadata()["fedrane"])
    del header[digests.DIGEST]
    changed = [change] if isinstance(change, str) else [header | change, *digests.add([header | change], "")]
    for text, why in zip(map(json.dumps, changed), ("is not as it was written", "cannot be read"), strict=False):
        save_file(load_file(path), path, {"fedrane": change if isinstance(change, str) else text})
        with pytest.raises(CheckpointError, match="cannot be read" if isinstance(change, str) else why):
            run_folder.read(path)


def test_checkpoints_beyond_six_digits_are_seen_in_order(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    (tmp_path / "checkpoints").mkdir()
    for name in ("999999", "1000000", "000012", "12"):
        (tmp_path / "checkpoints" / f"round-{name}.safetensors").touch()
    assert [round_of(path) for path in folder.checkpoints()] == [12, 999_999, 1_000_000]

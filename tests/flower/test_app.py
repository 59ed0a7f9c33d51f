"""A federation of several machines, its server and clients as the app has them, on a grid without processes."""

from __future__ import annotations

import json
import math
import os
import stat
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch.nn import functional as F
from typer.testing import CliRunner

import fedrane
from asserts import same_bytes
from fedrane import Experiment, data, report
from fedrane.cli.commands import app as command
from fedrane.data.readers import read_labelled
from fedrane.errors import CheckpointError, ConfigError, DataError, FileError
from fedrane.flower.app import client, models
from fedrane.flower.certificates import certificates
from fedrane.flower.engine import TooFewRepliesError
from fedrane.flower.nodes import NodePool
from fedrane.flower.project import AppConfig
from fedrane.flower.server import ServerSettings, serve
from fedrane.methods import METHODS
from fedrane.methods.fedprox import FedProx
from fedrane.report import measures
from fedrane.report.runs import gather
from fedrane.system import named_code
from fedrane.training.run_folder import Folder
from flower_apps import CLIENTS, Federation, same_as_local
from flower_grids import LoopGrid, trained
from harness import USER_METHODS, metrics
from problems import ALWAYS_TESTED, slow_except


@pytest.mark.parametrize("method", slow_except(ALWAYS_TESTED, METHODS))
def test_a_federation_ends_as_a_local_run_does(method: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, method=method, validation=0.2, rounds=2, batch=999)
    same_as_local(federation, federation.serve())


def test_examples_are_dealt_over_others_only_by_force(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    words = ["flower", "deal", str(tmp_path / "app"), str(tmp_path / "data")]
    (tmp_path / "data" / "client-1.npz").write_text("precious")
    (tmp_path / "data" / "client-0.npz").unlink()
    with pytest.raises(FileError, match=r"client-1.npz exists already.*--force"):
        CliRunner().invoke(command, words, catch_exceptions=False)
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == [
        "client-1.npz",
        "client-2.npz",
        "client-3.npz",
    ]
    assert CliRunner().invoke(command, [*words, "--force"]).exit_code == 0
    federation.serve()


def test_a_clients_own_state_that_is_not_finite_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By the client itself: the server never sees it. Its state stays that of the round before."""
    federation = Federation(tmp_path, **{"method": "ditto", "method.strength": 1e6, "rounds": 1})
    federation.serve()
    assert federation.grid is not None
    refused = [m.content.config_records["refused"]["why"] for m in federation.grid.seen if "refused" in m.content]
    assert refused
    assert all("error 'diverged'" in str(why) for why in refused), refused
    for expected in ("own state is no longer finite", "models of client"):  # when it trains, and at the end
        assert expected in caplog.text


def test_a_clients_models_have_all_digits_of_a_float64_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="ditto", precision="float64", rounds=2)
    same_as_local(federation, federation.serve())


def test_examples_and_labels_stay_with_their_client(tmp_path: Path) -> None:
    """What the server is sent is what the method shares, and counts."""
    federation = Federation(tmp_path, method="fedper", rounds=2)
    federation.serve()
    assert federation.grid is not None
    replies = [m for m in federation.grid.seen if m.metadata.reply_to_message_id]
    records = {name for reply in replies for name in reply.content}
    assert records == {"identity", "up", "metrics", "reply", "personal.test"}
    paths = {path for reply in replies for r in reply.content.array_records.values() for path in r}
    assert paths == {path for path in paths if path.startswith("model/params/body.")}


def test_a_client_counts_its_classes_only_if_it_wants_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(tmp_path, rounds=1, method="fedper")
    shy = {k: v for k, v in federation.config(0).items() if k != "class-counts"}
    configs: dict[int, Any] = {0: shy}
    monkeypatch.setattr(federation, "config", lambda k: configs.get(k) or Federation.config(federation, k))
    record = metrics(federation.serve())[-1]
    assert "personal/accuracy" in record
    assert "personal/recall" not in record


TWO_CLASSES = ("auroc", "auprc", "f1", "sensitivity_at_specificity_95")


def two_classes(tmp_path: Path, **more: Any) -> Federation:
    settings = {"dataset": "breast-cancer", "positive": "malignant", "method": "fedrod", "rounds": 1, "lr": 0.02}
    return Federation(tmp_path, **settings, **{"participation": 1.0, "partition.alpha": 1.0} | more)


def test_measures_of_two_classes_are_those_of_a_local_run(tmp_path: Path) -> None:
    federation = two_classes(tmp_path)
    out = federation.serve(test_data="breast-cancer")
    same_as_local(federation, out)
    wanted = {f"{prefix}{name}" for prefix in ("global/", "global/local_", "personal/") for name in TWO_CLASSES}
    assert wanted <= metrics(out)[-1].keys()
    assert 0 < metrics(out)[-1]["personal/clients_with_both_classes"] <= CLIENTS


def test_a_client_that_keeps_its_class_counts_sends_no_auroc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the AUROC of a few examples its class counts can be worked out."""
    federation, open_config = two_classes(tmp_path), Federation.config
    local = federation.local.federation
    shy = next(k for k, r in enumerate(local.split.test) if len(local.train.y[r].unique()) == 2)
    monkeypatch.setattr(federation, "config", lambda k: open_config(federation, k) | {"class-counts": k != shy})
    record = metrics(federation.serve(test_data="breast-cancer"))[-1]
    assert federation.grid is not None
    sent = [r for m in federation.grid.seen if (r := m.content.metric_records.get("personal.test"))]
    assert [r for r in sent if "auroc" in r and "class_examples" in r], "others send it"
    assert not [r for r in sent if "auroc" in r and "class_examples" not in r]
    assert len([r for r in sent if "class_examples" not in r]) == 1
    assert {f"global/{name}" for name in TWO_CLASSES} <= record.keys(), "of the server's own test examples"
    assert "personal/accuracy" in record
    assert not [key for key in record if key.startswith(("personal/", "global/local_")) and key.endswith(TWO_CLASSES)]


COUNTS = {
    "more hits than examples": {"hits": 10**6},
    "negative": {"few": -1},
    "not finite": {"loss": float("nan")},
    "a number for a list": {"class_examples": 5},
    "other classes": {"class_examples": [1, 2], "class_hits": [0, 0]},
    "classes that do not sum up": {"class_examples": [1] * 10, "class_hits": [0] * 10},
}


@pytest.mark.parametrize("lie", COUNTS)
def test_counts_that_cannot_be_are_left_out(lie: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=1, method="fedper", participation=1.0, batch=999)

    def up(reply: Message) -> Message:
        record = reply.content.metric_records.get("personal.test")
        if record is not None and reply.metadata.src_node_id == 1000:
            for name, value in COUNTS[lie].items():
                record[name] = value
        return reply

    record = metrics(federation.serve(up=up))[-1]
    assert record["unevaluated"] == [0]
    assert len(record["personal/clients"]) == CLIENTS - 1


# ---- the server dies


class Killed(BaseException):
    pass


def dying(round: int) -> Callable[[Message], Message]:
    def down(message: Message) -> Message:
        request = message.content.config_records.get("request")
        if request and request["round"] == round and request["client"] % 2 == 1:
            raise Killed
        return message

    return down


@pytest.mark.parametrize("method", slow_except(ALWAYS_TESTED, ["fedper", "scaffold", "ditto"]))
@pytest.mark.parametrize("every", [1, 3])
def test_a_server_that_is_killed_goes_on_from_its_checkpoint(method: str, every: int, tmp_path: Path) -> None:
    """Clients' states intact: those that had run ahead of the checkpoint go back with it."""
    federation = Federation(tmp_path, method=method, checkpoint_every=every, participation=1.0, rounds=6)
    for round in (2, 4, 6):
        with pytest.raises(Killed):
            federation.serve(down=dying(round))
    same_as_local(federation, federation.serve())
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["server_start"] == 4


def test_a_server_reports_that_it_goes_back_to_an_older_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path, rounds=4, participation=1.0)
    with pytest.raises(Killed):
        federation.serve(down=dying(4))
    newest = sorted((tmp_path / "run" / "checkpoints").iterdir())[-1]
    newest.write_bytes(b"")
    same_as_local(federation, federation.serve())
    assert f"{newest} cannot be read" in caplog.text
    assert "Going on from an older checkpoint." in caplog.text


def test_a_local_runs_folder_is_not_a_federations(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=2)
    fedrane.run(federation.app.experiment.replace(engine="sequential", threads=1), tmp_path / "run")
    with pytest.raises(CheckpointError, match=r"metadata\.json is not that of a federation"):
        federation.serve()


def test_tuning_after_an_early_stop_has_the_lr_of_the_last_round_run(tmp_path: Path) -> None:
    """As in a local run; also by a server that is killed between the rounds and the post-training stage."""
    schedule: dict[str, Any] = {"schedule.kind": "exponential", "schedule.factor": 0.5}
    settings = {"rounds": 9, "lr": 1e-3, "validation": 0.2, "patience": 1, "participation": 1.0} | schedule
    federation = Federation(tmp_path, method="fedbabu", **settings)
    with pytest.raises(Killed):
        federation.serve(down=dying(10))
    same_as_local(federation, federation.serve())
    rounds = [record["round"] for record in federation.local.history]
    assert len(rounds) < 10
    assert rounds[-1] == 10


def test_another_experiment_does_not_go_on_in_its_folder(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=1)
    federation.serve()
    federation.app = federation.app._replace(experiment=federation.app.experiment.replace(lr=0.5))
    with pytest.raises(ConfigError, match="another experiment"):
        federation.serve()


def test_too_few_replies_stop_a_federation_and_lose_nothing(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="scaffold", participation=1.0)

    def up(reply: Message) -> Message | None:
        fields = reply.content.config_records.get("reply")
        return None if fields and fields["round"] == 3 and fields["client"] > 0 else reply

    with pytest.raises(TooFewRepliesError):
        federation.serve(up=up, min_replies=2)
    same_as_local(federation, federation.serve())


# ---- clients come late


def test_all_clients_are_waited_for(tmp_path: Path) -> None:
    federation = Federation(tmp_path)
    with pytest.raises(ConfigError, match="client 2, 3 has not come"):
        federation.serve(nodes=2)


def late_client(federation: Federation, folder: Path) -> dict[str, Any]:
    """A client that is not of the roster, with examples of its own."""
    examples = data.load("digits")
    np.savez(folder / "late.npz", x=examples.x_test[:100], y=examples.y_test[:100])
    return {"partition-id": 9, "data": str(folder / "late.npz"), "folder": str(folder / "clients" / "9")}


BY_NUMBER = ["apple", "fedmtl"]
"""They hold something for each client of the roster, and no model that is for everybody."""


def with_late_client(federation: Federation, folder: Path) -> tuple[Path, list[int]]:
    """A run in whose second round a late client joins, and the rounds whose models it is given."""
    config, rounds = late_client(federation, folder), list[int]()

    def down(message: Message) -> Message:
        request, grid = message.content.config_records.get("request"), federation.grid
        if request and request["round"] == 2 and grid is not None:
            grid.configs[9] = config
            grid.join(client=9, node=5)
        if request and request["client"] == 9:
            rounds.append(request["round"])
        return message

    return federation.serve(down=down), rounds


@pytest.mark.parametrize("method", slow_except(ALWAYS_TESTED, [name for name in METHODS if name not in BY_NUMBER]))
def test_one_that_joins_after_the_start_gets_the_model_and_makes_it_its_own(method: str, tmp_path: Path) -> None:
    federation = Federation(tmp_path, method=method, participation=1.0, rounds=3, batch=256)
    out, rounds = with_late_client(federation, tmp_path)
    same_as_local(federation, out)  # the run itself takes no notice
    assert rounds == [2, fedrane.load(out).round]
    held = federation.personal(9)
    x, y = read_labelled(tmp_path / "late.npz", federation.app.inputs.classes)
    with torch.no_grad():
        loss = {which: F.cross_entropy(m(torch.from_numpy(x)), torch.from_numpy(y)) for which, m in held.items()}
    stages = Experiment(method=method).algorithm.post_training()
    if any(not stage.trains_model for stage in stages):  # what came is kept, under the head that was fixed
        shared = (dict(held[which].state_dict()) for which in ("global", "personal"))
        same_bytes(*({name: value for name, value in state.items() if "body" in name} for state in shared))
    else:
        assert loss["personal"] < loss.get("global", math.log(10))
    if "global" in held:
        same_bytes(dict(held["global"].state_dict()), dict(federation.local.model.state_dict()))


@pytest.mark.parametrize("method", BY_NUMBER)
def test_one_that_joins_where_there_is_no_model_for_it_is_reported(
    method: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(tmp_path, method=method, participation=1.0, rounds=3, batch=999)
    out, rounds = with_late_client(federation, tmp_path)
    same_as_local(federation, out)
    assert not rounds
    assert "client 9 came after the start: this method has nothing for it" in caplog.text


def test_one_that_joins_after_the_end_gets_the_model(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="fedper", rounds=2)
    out = federation.serve()
    before = (out / "metrics.jsonl").read_bytes()
    config = late_client(federation, tmp_path)
    federation.grid = federation.connect(0)
    federation.grid.configs[9] = config
    federation.grid.join(client=9, node=5)
    serve(federation.app, ServerSettings(str(out), timeout=30.0), federation.grid)
    assert set(federation.personal(9)) == {"personal"}
    assert (out / "metrics.jsonl").read_bytes() == before
    assert not list(trained(federation.grid.seen))


def test_predictions_at_the_client(tmp_path: Path) -> None:
    federation = Federation(tmp_path, method="fedrane", rounds=1, participation=1.0)
    out = federation.serve()
    folder, examples = str(tmp_path / "clients" / "1"), str(tmp_path / "data" / "client-1.npz")
    done = CliRunner().invoke(command, ["flower", "predict", folder, examples])
    assert done.exit_code == 0, done.output
    assert {"input", "class", "score"} == set(json.loads(done.output.splitlines()[0]))
    with pytest.raises(ConfigError, match="with their clients"):
        fedrane.load(out).personal(1)
    with pytest.raises(ConfigError, match="flwr run"):
        fedrane.resume(out)


def test_code_that_a_clients_folder_names_is_run_if_it_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own account has run the app; another one must trust what was left there."""
    file = tmp_path / "mine.py"
    file.write_text(USER_METHODS.read_text())
    federation = Federation(tmp_path, method=f"{file}:Plain", rounds=1, participation=1.0)
    federation.serve()
    folder, examples = str(tmp_path / "clients" / "1"), str(tmp_path / "data" / "client-1.npz")
    ask = ["flower", "predict", folder, examples]
    monkeypatch.setattr(named_code, "_named", set())
    known = CliRunner().invoke(command, ask)
    assert known.exit_code == 0, known.output
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "nobody"))
    file.write_text(USER_METHODS.read_text() + f"\nopen({str(tmp_path / 'made')!r}, 'w').close()\n")
    monkeypatch.setattr(named_code, "_named", set())
    refused = CliRunner().invoke(command, ask)
    assert isinstance(refused.exception, ConfigError)
    assert "names code: method=" in str(refused.exception)
    with pytest.raises(ConfigError, match="--trust-code"):
        models(folder)
    assert not (tmp_path / "made").exists()
    deal = ["flower", "deal", str(tmp_path / "app"), str(tmp_path / "again")]
    assert isinstance(CliRunner().invoke(command, deal).exception, ConfigError)
    assert not (tmp_path / "made").exists()
    assert CliRunner().invoke(command, [*ask, "--trust-code"]).stdout == known.stdout
    assert (tmp_path / "made").exists()
    assert models(folder).keys() == {"global"}


# ---- what a client reads


def test_labels_are_names_of_classes_or_their_positions(tmp_path: Path) -> None:
    x = np.zeros((3, 2), np.float32)
    for y in (np.array(["c", "a", "c"]), np.array([2, 0, 2])):
        np.savez(tmp_path / "examples.npz", x=x, y=y)
        assert read_labelled(tmp_path / "examples.npz", ("a", "b", "c"))[1].tolist() == [2, 0, 2]
    np.savez(tmp_path / "examples.npz", x=x, y=np.array([2, 0, 3]))
    with pytest.raises(DataError, match="label '3'"):
        read_labelled(tmp_path / "examples.npz", ("a", "b", "c"))


def test_keys_are_private_while_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into a folder that others may read: it was there before."""
    pytest.importorskip("cryptography")
    make = os.open

    def opened(name: Any, *args: Any, **more: Any) -> int:
        descriptor = make(name, *args, **more)
        seen.append((Path(name).name, stat.S_IMODE(os.fstat(descriptor).st_mode)))
        return descriptor

    seen: list[tuple[str, int]] = []
    monkeypatch.setattr(os, "open", opened)
    before = os.umask(0)
    try:
        done = CliRunner().invoke(command, ["flower", "certs", str(tmp_path), "--nodes", "2"])
    finally:
        os.umask(before)
    assert done.exit_code == 0, done.output
    secret = [mode for name, mode in seen if name.startswith(("server.key", "node-")) and ".pub" not in name]
    assert secret == [0o600] * 3
    assert all(stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600 for name in ("server.key", "node-0", "node-1"))


@pytest.mark.parametrize("texts", [False, True])
def test_examples_of_another_shape_are_refused(
    texts: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The server gets the reason only if the node's configuration says so; the node's own log has it."""
    federation = Federation(tmp_path, rounds=1, participation=1.0)
    config = federation.config
    monkeypatch.setattr(federation, "config", lambda k: config(k) | ({"error-texts": True} if texts else {}))
    np.savez(tmp_path / "data" / "client-2.npz", x=np.zeros((20, 1, 9, 9), np.uint8), y=np.zeros(20, int))
    out = federation.serve()
    assert ("shape" in metrics(out)[0]["refused"]["2"]) == texts
    assert ("error 'data'" in metrics(out)[0]["refused"]["2"]) != texts
    assert "examples of shape (1, 9, 9)" in caplog.text


def test_a_population_beyond_the_nodes_memory_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def down(message: Message) -> Message:
        request = message.content.config_records.get("request")
        if request and request["client"] == 2:
            request["population"] = 10**12
        return message

    federation = Federation(tmp_path, rounds=1, participation=1.0)
    out = federation.serve(down=down)
    assert "error 'data'" in metrics(out)[0]["refused"]["2"]
    assert "a federation of 1000000000000 clients, as the server says, needs about" in caplog.text


def test_examples_of_a_users_reader_are_read_as_a_file_is(tmp_path: Path) -> None:
    """Fractions become bytes; bytes as floats are refused, and not taken for either."""
    app, digits = Federation(tmp_path).app, data.load("digits")
    pool = app.pool(digits.x / 255, digits.y, app.task())
    assert np.array_equal(pool.x.numpy(), digits.x)
    with pytest.raises(DataError, match=r"from 0\.0 to 255\.0"):
        app.pool(digits.x.astype(np.float32), digits.y, app.task())


def test_a_node_without_data_reports_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(tmp_path, rounds=1)
    home = client(federation.folder / "app" / "app_app")
    grid = LoopGrid(home, [0], configs={0: {"partition-id": 0}})
    messages: list[str] = []
    pool = NodePool(grid, "ab" * 16, timeout=30.0, log=messages.append)
    pool.discover()
    assert not pool.nodes
    assert "error 'configuration'" in messages[0]
    assert "has no data" in caplog.text


def test_a_client_whose_node_is_gone_is_found_with_another(tmp_path: Path) -> None:
    """A node without a registered key has another name after each start; the old one fades only slowly."""
    federation = Federation(tmp_path, rounds=1)
    grid, messages = federation.connect(1), list[str]()
    pool = NodePool(grid, "ab" * 16, timeout=30.0, log=messages.append)
    pool.discover()
    assert pool.nodes == {0: 1000}
    grid.join(client=0, node=5)
    pool.discover()
    assert pool.nodes == {0: 1000}
    assert "which node 1000 is" in messages[0]
    del grid.online[1000]
    pool.discover()
    assert pool.nodes == {0: 5}


def test_an_app_is_not_written_over_something(tmp_path: Path) -> None:
    Federation(tmp_path, rounds=1)
    for words in (["new", str(tmp_path / "app")], ["certs", str(tmp_path / "app")]):
        result = CliRunner().invoke(command, ["flower", *words])
        assert isinstance(result.exception, ConfigError)


def test_an_app_or_keys_are_not_written_onto_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for command_name in ("new", "certs"):
        done = CliRunner().invoke(command, ["flower", command_name, str(tmp_path / "file")])
        assert "file is a file" in str(done.exception)


@pytest.mark.parametrize("host", ["", "a b", "x" * 65, "a/b", "é.example", "-x", "1.2.3.999", "a\nb", "a..b", "*"])
def test_a_host_that_cannot_be_gets_no_certificate(host: str) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an address"):
        certificates([host], 1)


def test_a_quote_in_a_path_is_escaped_in_the_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path('q"uote.py').write_text("from fedrane.methods.fedavg import FedAvg\nclass Mine(FedAvg): pass\n")
    done = CliRunner().invoke(command, ["flower", "new", "app", "clients=3", 'method=q"uote.py:Mine'])
    assert done.exit_code == 0, done.output
    assert 'q"uote.py:Mine' in tomllib.loads(Path("app/pyproject.toml").read_text())["project"]["description"]


def test_an_app_of_words_in_any_order(tmp_path: Path) -> None:
    """What is asked for arrives, or is an error before anything is written."""
    federation = Federation(tmp_path, **{"method.strength": 5, "method": "fedprox"})
    assert federation.app.experiment.algorithm == FedProx(5.0)
    x, y = np.zeros((12, 3), np.float32), np.arange(12) % 2
    np.savez(tmp_path / "owned.npz", x=x, y=y, client=np.arange(12) % 3)
    owned = f"dataset={tmp_path / 'owned.npz'}"
    refused = [["partition.shards=2"], ["method.nonsense=5"], [owned, "partition.alpha=0.5"], [owned, "clients=7"]]
    refused += [["engine=stacked"], ["skew.noise=0.1"], ["augment.crop=8"], [owned, "augment.flip=true"]]
    for words in refused:
        result = CliRunner().invoke(command, ["flower", "new", str(tmp_path / "other"), *words])
        assert isinstance(result.exception, ConfigError | DataError), words
        assert words[-1].partition("=")[0] in str(result.exception)
    assert not (tmp_path / "other").exists()
    (tmp_path / "e.toml").write_text('engine = "stacked"')
    result = CliRunner().invoke(command, ["flower", "new", str(tmp_path / "other"), str(tmp_path / "e.toml")])
    assert "engine=stacked is not used" in result.stderr
    assert AppConfig.read(tmp_path / "other" / "app_other").experiment.engine == "auto"


def test_the_app_lists_its_settings(tmp_path: Path) -> None:
    import tomllib

    federation = Federation(tmp_path, rounds=1)
    fields = tomllib.loads((tmp_path / "app" / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    settings = ServerSettings.read(fields)
    assert settings._replace(out="") == ServerSettings(out="")
    assert {key.replace("-", "_") for key in fields} == set(ServerSettings._fields)
    with pytest.raises(ConfigError, match="minimal"):
        ServerSettings.read({"minimal": 3})
    assert isinstance(federation.app.experiment, Experiment)


def test_a_report_on_a_federation(tmp_path: Path) -> None:
    """All that its server knows: curves, clients by their numbers and their numbers of examples; not the classes."""
    federation = Federation(tmp_path, method="fedper", rounds=2, participation=1.0)
    out = federation.serve()
    lines, _ = gather([out])
    run = lines[0].first
    assert not run.knows_classes
    assert run.labels[:, 0].tolist() == [len(examples) for examples in federation.local.federation.split.train]
    written = report.write([out], tmp_path / "page.html", figures=tmp_path / "figures", samples=0)
    assert "does not leave the clients" in written.read_text(encoding="utf-8")
    assert {"accuracy.png", "clients.png", "partition.png"} <= {path.name for path in (tmp_path / "figures").iterdir()}
    (shown,) = measures.clients(lines, "personal")
    assert shown.clients.tolist() == [0, 1, 2, 3]
    folder = Folder(out)
    last = folder.read_metrics()[-1] | {"round": 3, "unevaluated": [1], "personal/clients": [0.5, 0.6, 0.7]}
    folder.append_metrics(last)
    (shown,) = measures.clients(gather([out])[0], "personal")
    assert shown.clients.tolist() == [0, 2, 3], "a client that did not reply does not shift the others"
    report.write([out], tmp_path / "page.html", samples=0)


def test_a_federation_records_its_sessions_and_notices_an_edited_method(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(USER_METHODS.read_text())
    federation = Federation(tmp_path, method=f"{file}:Plain", rounds=1)
    out = federation.serve()
    (session,) = json.loads((out / "sessions.json").read_text())
    assert (session["engine"], session["outcome"], session["rounds"]["after"]) == ("flower-remote", "finished", 1)
    assert [path.read_text() for path in (out / "code").iterdir()] == [USER_METHODS.read_text()]
    federation.serve()
    file.write_text(USER_METHODS.read_text() + "\n# edited\n")
    with pytest.raises(CheckpointError, match=r"mine\.py changed since the run"):
        federation.serve()

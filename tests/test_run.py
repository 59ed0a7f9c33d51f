"""Whole runs from Python: cohorts, dropouts, post-training, early stop, divergence, results in hand."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedrane
from asserts import same_bytes, untimed
from fedrane import (
    Algorithm,
    Attack,
    Callback,
    Client,
    Context,
    Done,
    Experiment,
    Gate,
    Model,
    Outcome,
    Partitioning,
    State,
    Task,
    Work,
    tree,
)
from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.config.settings import dotted
from fedrane.data import sampling
from fedrane.errors import CheckpointError, ConfigError, DataError, Diverged, FileError
from fedrane.methods import METHODS, Method
from fedrane.report.comparison import compare, run_folder
from fedrane.task import Batch, cross_entropy
from fedrane.testing.conformance import blobs, experiment, network, states
from fedrane.training.run_folder import Folder
from harness import same_run
from problems import EVERY_METHOD, Listener, dense, quick


def test_rounds_to_come_take_no_memory() -> None:
    result = fedrane.run(quick(rounds=10**9), stop=lambda: True)
    assert (result.finished, result.round) == (False, 1)


def test_an_early_stop_skips_any_number_of_rounds() -> None:
    result = fedrane.run(quick(rounds=10**9, patience=1, validation=0.2, lr=1e-9))
    assert result.finished
    assert result.round < 10


WORDS = ["dataset=digits", "model=mlp", "clients=4", "rounds=2", "epochs=1", "batch=256", "device=cpu"]


def test_an_experiment_may_be_a_file_or_words(tmp_path: Path) -> None:
    """As on the command line, in any order; a lone word is a file or one setting."""
    path = tmp_path / "exp.toml"
    path.write_text(Experiment.from_words(WORDS).to_toml())
    wanted = fedrane.run(Experiment.from_words(WORDS))
    for asked in (path, str(path), WORDS, [path, *WORDS], tuple(WORDS)):
        same_bytes(states(fedrane.run(asked)), states(wanted))
    other = fedrane.run(["method=local", str(path), "rounds=1"], tmp_path / "run")
    assert (other.experiment.method_name, other.round) == ("local", 1)
    assert fedrane.run("seed=3", stop=lambda: True).experiment.seed == 3


@pytest.mark.parametrize(
    ("asked", "out", "message"),
    [
        ("nowhere.toml", None, r"there is no file nowhere\.toml"),
        (Path("nowhere"), None, "there is no file nowhere"),
        (["a.toml", "b.toml"], None, r"a\.toml and b\.toml: one experiment is one file"),
        ("method=fedprox clients=4", None, r"is one word.*Write \['method=fedprox', 'clients=4'\]"),
        (["method=fedprox clients=4"], None, "is one word"),
        (["methd=fedprox"], None, "Did you mean 'method'"),
        ("fedprox", None, "'fedprox' is not key=value"),
        ("method=fedprox", "rounds=5", r"out='rounds=5' is a setting.*Write run\(\[…, 'rounds=5'\]\)"),
        ("method=fedprox", "method.strength=5", "is a setting"),
    ],
)
def test_mistakes_in_what_is_asked_for(
    asked: Any, out: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        fedrane.run(asked, out)
    assert not list(tmp_path.iterdir())


def test_a_folder_may_be_named_like_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fedrane.run(Experiment.from_words([*WORDS, "lr=0.2"]), "lr=0.2")
    fedrane.run(WORDS, "./lr=0.1")
    assert {path.name for path in tmp_path.iterdir()} == {"lr=0.1", "lr=0.2"}


def test_what_a_file_has_in_vain_is_a_warning_where_it_is_called(tmp_path: Path) -> None:
    (tmp_path / "exp.toml").write_text("rounds = 2\n[schedule]\nfactor = 0.5\n")
    words = [word for word in WORDS if not word.startswith("rounds=")]
    with pytest.warns(UserWarning, match=r"schedule\.factor=0\.5 is not used") as seen:
        fedrane.run([tmp_path / "exp.toml", *words])
    assert [warning.filename for warning in seen] == [__file__]


def test_results_in_hand() -> None:
    result = fedrane.run(quick(rounds=8, lr=0.3, batch=16))
    assert result.finished
    assert [r["round"] for r in result.history] == list(range(1, 9))
    last = result.history[-1]
    assert last["global/accuracy"] > 0.8
    assert result.summary["global/last"]["round"] == 8
    assert result.summary["global/best"]["global/accuracy"] == max(r["global/accuracy"] for r in result.history)
    data = fedrane.data.load("digits")
    scores = result.model(torch.from_numpy(data.x_test))
    assert float((scores.argmax(1).numpy() == data.y_test).mean()) == pytest.approx(last["global/accuracy"])
    assert isinstance(result.model, nn.Module)
    assert len(last["cosine"]) == 4
    assert last["bytes_up"] == last["bytes_down"] == 4 * sum(p.numel() for p in result.model.parameters()) * 4
    with pytest.raises(ConfigError, match="no personal model"):
        result.personal(0)


def test_personal_models_in_hand(tmp_path: Path) -> None:
    result = fedrane.run(quick(method="local", rounds=3), tmp_path / "run")
    data = fedrane.data.load("digits")
    examples = result.federation.split.test[2]
    hits = result.personal(2)(torch.from_numpy(data.x[examples])).argmax(1).numpy() == data.y[examples]
    assert float(hits.mean()) == pytest.approx(result.history[-1]["personal/clients"][2])
    with pytest.raises(ConfigError, match="no global model"):
        _ = result.model
    with pytest.raises(ConfigError, match="no client 4"):
        result.personal(4)
    saved = fedrane.load(tmp_path / "run")
    x = torch.from_numpy(data.x[examples])
    assert torch.equal(saved.personal(2)(x), result.personal(2)(x))
    assert result.history[-1]["bytes_up"] == 0, "nothing travels"
    assert "cosine" not in result.history[-1], "nothing is shared, so the server makes no step"


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("method", EVERY_METHOD)
def test_loaded_models_are_those_in_hand(method: str, precision: str, tmp_path: Path) -> None:
    """To the last digit, also of clients that never took part."""
    e = experiment(method, rounds=2, participation=0.4, precision=precision)
    result = fedrane.run(e, tmp_path / "run", dataset=blobs(), model=network())
    saved = fedrane.load(tmp_path / "run", model=network())
    for kind in result.algorithm.models_on(result.task):
        for k in range(result.population if kind == PERSONAL else 1):
            models = (models.model if kind == GLOBAL else models.personal(k) for models in (result, saved))
            same_bytes(*(dict(model.state_dict()) for model in models))


@pytest.mark.parametrize("method", ["fedavg", "fedrane", "fedper", "ditto"])
def test_the_step_of_whatever_is_shared_has_its_cosines(method: str) -> None:
    """Also of a method without a global model; the average of one client is that client's own way."""
    alone = fedrane.run(quick(method=method, clients=1, rounds=1)).history[0]
    assert alone["cosine"] == pytest.approx([1.0])


def test_cohorts_and_dropouts_are_the_plans() -> None:
    e = quick(rounds=6, clients=10, participation=0.5, client_dropout=0.4, seed=3)
    result = fedrane.run(e)
    for record in result.history:
        cohort = sampling.cohort(3, record["round"], 10, 0.5)
        assert sorted(record["cohort"] + record["lost"]) == cohort
        assert record["lost"] == sampling.lost(3, record["round"], cohort, 0.4)
        assert len(record.get("cosine", [])) == len(record["cohort"])
    assert {k for r in result.history for k in r["cohort"]} == set(result.client_states)


def test_all_methods_see_the_same_cohorts() -> None:
    runs = [fedrane.run(quick(method=name, rounds=4, clients=8, participation=0.5)) for name in ("fedavg", "local")]
    assert [r["cohort"] for r in runs[0].history] == [r["cohort"] for r in runs[1].history]
    assert all(
        np.array_equal(a, b)
        for a, b in zip(runs[0].federation.split.train, runs[1].federation.split.train, strict=True)
    )


def test_a_round_that_everybody_loses_changes_nothing() -> None:
    result = fedrane.run(quick(rounds=3, clients=2, client_dropout=0.97, seed=1))
    assert any(not r["cohort"] for r in result.history)
    empty = [r for r in result.history if not r["cohort"]]
    assert all("train/loss" not in r and r["global/accuracy"] > 0 for r in empty)
    start = result.algorithm.init(result.task, result.federation.roster)
    if all(not r["cohort"] for r in result.history):
        same_bytes(result.server, start)


class Keeps(Algorithm):
    """Personal predictions without parameters of the client's own."""

    models: ClassVar[tuple[str, ...]] = (GLOBAL, PERSONAL)


def test_the_personal_model_is_the_one_after_local_training() -> None:
    """And a client not yet sampled predicts with the global model."""
    e = Experiment(
        method=Keeps(), clients=5, rounds=1, epochs=2, batch=16, participation=0.4, model_head="head", lr=0.5
    )
    result = fedrane.run(e, dataset=blobs(), model=network())
    absent = next(k for k in range(5) if k not in result.client_states)
    present = next(iter(result.client_states))
    x = torch.from_numpy(blobs().x_test)
    assert torch.equal(result.personal(absent)(x), result.model(x))
    assert not torch.equal(result.personal(present)(x), result.model(x))
    assert set(result.client_states[present].model.params) == set(result.server.model.params)


@pytest.mark.parametrize("affine", [True, False])
def test_normalisation_kept_local_is_fedbn(affine: bool) -> None:
    """Personal predictions only; BatchNorm layers differ from client to client and never travel."""

    def normalised(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, affine=affine), nn.Tanh(), nn.Linear(8, 3))

    e = Experiment(clients=3, rounds=2, norm="local", model_head="3", batch=16)
    result = fedrane.run(e, dataset=blobs(), model=normalised)
    assert "global/accuracy" not in result.history[-1]
    assert "personal/accuracy" in result.history[-1]
    names = {"body.1.weight", "body.1.bias"} if affine else set()
    assert all(
        set(client_state.model.params) == names and len(client_state.model.stats) == 2
        for client_state in result.client_states.values()
    )
    first = result.task.init()
    same_bytes({n: result.server.model.params[n] for n in names}, {n: first.params[n] for n in names})
    name = "body.1.running_mean"
    assert not torch.equal(result.client_states[0].model.stats[name], result.client_states[1].model.stats[name])


@dataclass(frozen=True)
class Tune(Algorithm):
    """A post-training stage: every client trains the head it got, for itself."""

    epochs: int = 3
    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def trains(self, name: str) -> bool:
        return name.startswith("head")

    def local_epochs(self, epochs: int) -> int:
        return self.epochs

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(up=State(Model({}, {}), {"marker": torch.ones(())}))


@dataclass(frozen=True)
class Finishing(Algorithm):
    """FedAvg with a post-training stage."""

    def post_training(self) -> tuple[Algorithm, ...]:
        return (Tune(),)


def test_post_training_runs_after_the_last_round_with_everybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(METHODS, "finishing", Method(Finishing, "–"))
    e = quick(method="finishing", rounds=3, participation=0.5, lr=0.3)
    result = fedrane.run(e, tmp_path / "run")
    last = result.history[-1]
    assert last["round"] == 4
    assert last["cohort"] == [0, 1, 2, 3]
    assert "personal/accuracy" in last
    assert "global/accuracy" not in last
    assert last["train/examples"] == 3 * sum(len(examples) for examples in result.federation.split.train)
    x = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    assert torch.equal(fedrane.load(tmp_path / "run").personal(1)(x), result.personal(1)(x))
    assert result.summary["global/last"]["round"] == 3


def test_early_stop_by_validation() -> None:
    """Stops when validation accuracy has stalled, and its examples are neither trained nor tested on."""
    result = fedrane.run(quick(rounds=60, lr=0.5, batch=16, validation=0.2, patience=3))
    rounds = [r["round"] for r in result.history]
    assert rounds[-1] < 60
    seen = [r["validation/accuracy"] for r in result.history]
    assert max(seen[-3:]) <= max(seen[:-3])
    split = result.federation.split
    for k in range(4):
        parts = (set(split.train[k]), set(split.validation[k]), set(split.test[k]))
        assert all(parts)
        assert sum(map(len, parts)) == len(set.union(*parts))
    assert result.finished


@dataclass(frozen=True)
class RecordsLr(Algorithm):
    """Records the learning rate it is given, in its rounds and in two post-training stages."""

    parts: int = 2

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        return loss, outcome._replace(metrics={"loss": loss, "lr": ctx.client.lr + 0 * loss})

    def post_training(self) -> tuple[Algorithm, ...]:
        return (RecordsLr(0),) * self.parts


@pytest.mark.parametrize("after", [2, 3, 4])
def test_post_training_has_the_lr_of_the_last_round_that_was_run(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds that an early stop left out do not lower it; also after a resume, between those stages too."""
    monkeypatch.setitem(METHODS, "records-lr", Method(RecordsLr, "–"))
    schedule = {"kind": "exponential", "factor": 0.5}
    e = quick(
        method="records-lr", rounds=20, lr=1e-12, schedule=schedule, validation=0.2, patience=2, precision="float64"
    )
    whole = fedrane.run(e)
    assert [r["round"] for r in whole.history] == [1, 2, 3, 21, 22], "at this learning rate the accuracy never rises"
    lrs = [r["clients/lr"][0] for r in whole.history]
    assert lrs == pytest.approx([1e-12, 0.5e-12, 0.25e-12, 0.25e-12, 0.25e-12], abs=0)
    watcher = Watcher()
    part = fedrane.run(e, tmp_path / "part", callbacks=[watcher], stop=lambda: len(watcher.seen) == after)
    assert len(part.history) == after
    resumed = fedrane.resume(tmp_path / "part")
    same_bytes(states(resumed), states(whole))
    assert untimed(resumed.history) == untimed(whole.history)


def test_post_training_after_all_rounds_has_the_lr_of_the_last() -> None:
    result = fedrane.run(quick(method=RecordsLr(), rounds=3, lr=0.1, schedule={"kind": "cosine"}, precision="float64"))
    lrs = [r["clients/lr"][0] for r in result.history]
    assert lrs == pytest.approx([0.1, 0.075, 0.025, 0.025, 0.025])


def test_divergence_is_reported_and_the_last_checkpoint_is_from_before(tmp_path: Path) -> None:
    e = Experiment(clients=3, rounds=40, epochs=5, batch=8, lr=1e30, model_head="head")
    with pytest.raises(Diverged, match=r"round \d+: the model is no longer finite.*client"):
        fedrane.run(e, tmp_path / "run", dataset=blobs(), model=network(False))
    checkpoint, problems = Folder(tmp_path / "run").newest()
    assert not problems
    if checkpoint is not None:
        assert all(torch.isfinite(p).all() for p in checkpoint.server.model.params.values())


@pytest.mark.parametrize(
    ("words", "number"),
    [
        (["method=local", "lr=1e6"], 1),
        (["method=ditto", "method.strength=1e6"], 1),
        (["method=fedbabu", "method.tune_lr=1000"], 3),
    ],
)
def test_a_clients_own_state_that_is_not_finite_ends_the_run(words: list[str], number: int, tmp_path: Path) -> None:
    """Though no upload shows it: of personal models, and in a post-training stage."""
    words = [*words, "dataset=digits", "model=mlp", "clients=4", "rounds=2", "engine=sequential"]
    with pytest.raises(Diverged, match=rf"round {number}: the model is no longer finite \(from client \d"):
        fedrane.run(Experiment.from_words(words), tmp_path / "run")
    folder = Folder(tmp_path / "run")
    assert not folder.finished
    checkpoint, _ = folder.newest()
    assert checkpoint is None or (checkpoint.round < number and tree.finite(checkpoint.client_states))


@dataclass(frozen=True)
class Overflowing(Algorithm):
    """Finite parameters, whose scores are not."""

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        return super().predict(task, model, x, mask) * torch.inf


@dataclass(frozen=True)
class Masking(Algorithm):
    """A class that is never predicted."""

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        scores = super().predict(task, model, x, mask)
        return torch.cat([torch.full_like(scores[:, :1], -torch.inf), scores[:, 1:]], 1)


def test_scores_that_are_not_numbers_end_the_run() -> None:
    with pytest.raises(Diverged, match="round 1"):
        fedrane.run(quick(method=Overflowing(), rounds=1))
    assert fedrane.run(quick(method=Masking(), rounds=1)).finished, "an infinite loss says something else"


class Meanwhile(Callback):
    """Does something to the folder of a run after its first round."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work = work

    def round(self, record: dict[str, Any]) -> None:
        if record["round"] == 1:
            self.work()


def test_a_run_whose_folder_is_deleted_stops(tmp_path: Path) -> None:
    gone = Meanwhile(lambda: shutil.rmtree(tmp_path / "run"))
    with pytest.raises(FileError, match=r"no longer the folder of this run.*deleted, moved or replaced"):
        fedrane.run(quick(), tmp_path / "run", callbacks=[gone])
    assert not (tmp_path / "run").exists(), "and none is made again"


def test_a_run_whose_folder_is_moved_can_be_resumed_there(tmp_path: Path) -> None:
    fedrane.run(quick(), tmp_path / "whole")
    moved = Meanwhile(lambda: (tmp_path / "run").rename(tmp_path / "there"))
    with pytest.raises(FileError, match="resume it where it is now"):
        fedrane.run(quick(), tmp_path / "run", callbacks=[moved])
    assert not (tmp_path / "run").exists()
    fedrane.resume(tmp_path / "there")
    same_run(tmp_path / "there", tmp_path / "whole")


def test_a_run_leaves_alone_the_one_in_its_folder(tmp_path: Path) -> None:
    """Its folder was deleted, and another run began in one of the same name."""

    def replace() -> None:
        shutil.rmtree(tmp_path / "run")
        fedrane.run(quick(seed=1), tmp_path / "run", stop=lambda: True)

    with pytest.raises(FileError, match="no longer the folder of this run"):
        fedrane.run(quick(), tmp_path / "run", callbacks=[Meanwhile(replace)])
    fedrane.resume(tmp_path / "run")
    fedrane.run(quick(seed=1), tmp_path / "whole")
    same_run(tmp_path / "run", tmp_path / "whole")


class Fails(Algorithm):
    """Its third step goes wrong."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        if int(ctx.client.round) == 2 and int(ctx.client.index) == 1:
            raise ValueError("as a user's method might")
        net = task.training(model, batch)
        loss = cross_entropy(net.head(net.body(batch.x)), batch)
        return loss, Outcome(net.stats, {"loss": loss})


def test_an_error_in_a_hook_names_stage_client_and_round() -> None:
    with pytest.raises(ValueError, match="as a user's") as caught:
        fedrane.run(quick(method=Fails(), rounds=3))
    assert caught.value.__notes__ == ["in step 0 of client 1, round 2"]


class Watcher(Callback):
    """Records its calls."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def begin(self, experiment: Experiment, federation: Any, history: Any, total: int) -> None:
        self.seen.append(f"begin {len(history)}/{total}")

    def round(self, record: dict[str, Any]) -> None:
        self.seen.append(f"round {record['round']}")

    def end(self, result: fedrane.Result) -> None:
        self.seen.append(f"end {result.finished}")


def test_stop_and_resume_equal_an_uninterrupted_run(tmp_path: Path) -> None:
    """Asked to stop after two rounds, then resumed: the same bytes; callbacks see what happened."""
    e = quick(method="local", rounds=5, participation=0.6, momentum=0.5)
    whole = fedrane.run(e, tmp_path / "whole")
    watcher = Watcher()
    part = fedrane.run(e, tmp_path / "part", callbacks=[watcher], stop=lambda: "round 1" in watcher.seen)
    assert not part.finished
    assert watcher.seen == ["begin 0/5", "round 1", "round 2", "end False"]
    again = Watcher()
    resumed = fedrane.resume(tmp_path / "part", callbacks=[again])
    assert again.seen == ["begin 2/5", "round 3", "round 4", "round 5", "end True"]
    same_bytes(states(resumed), states(whole))
    assert untimed(resumed.history) == untimed(whole.history)
    assert untimed(Folder(tmp_path / "part").read_metrics()) == untimed(whole.history)
    names = [path.name for path in Folder(tmp_path / "whole").checkpoints()]
    assert names == ["round-000004.safetensors", "round-000005.safetensors"]


def test_what_was_handed_over_must_be_handed_over_again(tmp_path: Path) -> None:
    e = Experiment(clients=3, rounds=2, model_head="2", batch=32)
    fedrane.run(e, tmp_path / "run", dataset=blobs(), model=dense)
    with pytest.raises(ConfigError, match="handed over from Python"):
        fedrane.resume(tmp_path / "run")
    with pytest.raises(ConfigError, match="handed over from Python"):
        fedrane.resume(tmp_path / "run", dataset=blobs())
    assert fedrane.resume(tmp_path / "run", dataset=blobs(), model=dense).finished
    assert fedrane.load(tmp_path / "run", model=dense).model(torch.zeros(1, 6)).shape == (1, 3)


def test_a_torch_dataset_and_a_network_of_ones_own() -> None:
    """Any map-style dataset; a module object starts from the weights it holds."""
    data = blobs(90)
    pairs = torch.utils.data.TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y))
    module = dense((6,), 3)
    e = Experiment(clients=3, rounds=1, epochs=1, batch=32, lr=1e-12, model_head="2")
    result = fedrane.run(e, dataset=pairs, model=module)
    torch.testing.assert_close(result.server.model.params["body.0.weight"], module[0].weight.detach())


def test_natural_clients(tmp_path: Path) -> None:
    data = blobs(90)
    np.savez(tmp_path / "own.npz", x=data.x, y=data.y, client=np.arange(90) % 7)
    e = quick(dataset=str(tmp_path / "own.npz"), model="auto", clients=7)
    result = fedrane.run(e, tmp_path / "run")
    assert result.population == 7
    assert result.experiment.clients == 7
    assert result.experiment.model == "mlp"
    assert fedrane.resume(tmp_path / "run").finished
    with pytest.raises(DataError, match=r"has 7 clients, but clients=5.*Use clients=7"):
        fedrane.run(e.replace(clients=5))
    assert fedrane.run(e.replace(clients=Experiment.clients)).population == 7, (
        "what nobody set is not held against them"
    )


def test_what_the_data_leave_without_effect(tmp_path: Path) -> None:
    """That the clients are the data's own is known only when these are read: then, and before a folder is made."""
    data = blobs(90)
    np.savez(tmp_path / "own.npz", x=data.x, y=data.y, client=np.arange(90) % 7)
    words = [f"dataset={tmp_path / 'own.npz'}", "rounds=1", "epochs=1"]
    for key in ("partition.alpha=0.5", "partition.minimum=10", "norm=batch"):
        with pytest.raises(ConfigError, match=rf"{key} would have no effect"):
            fedrane.run(Experiment.from_words([*words, key]), tmp_path / "run")
    with pytest.raises(DataError, match="has 7 clients, but clients=20"):
        fedrane.run(Experiment.from_words([*words, "clients=20"]), tmp_path / "run")
    with pytest.raises(ConfigError, match=r"partition\.alpha=0\.1 would have no effect"):
        fedrane.run(quick(dataset=words[0][8:], clients=7, partition=Partitioning(alpha=0.1)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    (tmp_path / "c.toml").write_text('precision = "tf32"\ndevice = "cpu"\n[partition]\nalpha = 0.1\n')
    listener = Listener()
    fedrane.run(Experiment.from_toml(tmp_path / "c.toml", words), tmp_path / "run", callbacks=[listener])
    assert [text.partition(": ")[2] for text in listener.messages] == [
        "partition.alpha=0.1 is not used: that needs partition.kind=dirichlet or dirichlet-capped or quantity or "
        "dirichlet-quantity, and partition.kind is natural",
        "precision=tf32 is not used: that needs a GPU, and device is cpu",
    ]
    assert Experiment.from_toml(tmp_path / "run" / "config.toml").precision == "float32"
    again = Listener()
    fedrane.run(Experiment.from_toml(tmp_path / "run" / "config.toml"), callbacks=[again])
    assert not again.messages, "what a run has written runs again without a word"


def test_metrics_are_plain_json(tmp_path: Path) -> None:
    fedrane.run(quick(rounds=2), tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is not JSON")) for line in lines]
    assert [r["round"] for r in records] == [1, 2]
    for key in ("train/loss", "seconds", "samples_per_second", "bytes_up", "bytes_down", "cosine", "global/accuracy"):
        assert all(key in r for r in records), key


def test_eval_every(tmp_path: Path) -> None:
    result = fedrane.run(quick(rounds=5, eval_every=2))
    assert [r["round"] for r in result.history if "global/accuracy" in r] == [2, 4, 5]


def test_a_folder_is_used_by_one_process(tmp_path: Path) -> None:
    fedrane.run(quick(rounds=1), tmp_path / "run")
    holder = Folder(tmp_path / "run")
    holder.open()
    with pytest.raises(CheckpointError, match="in use"):
        fedrane.resume(tmp_path / "run")
    holder.close()
    fedrane.resume(tmp_path / "run")
    with pytest.raises(CheckpointError, match="already holds a run"):
        fedrane.run(quick(rounds=1), tmp_path / "run")


class Breaks(Algorithm):
    """No upload of it is finite."""

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(up=tree.scale(done.up, float("nan")))


def test_one_methods_divergence_is_not_the_others(tmp_path: Path) -> None:
    """A comparison goes on, says which diverged, and leaves its cells empty."""
    experiments = {
        "fedavg": quick(rounds=1),
        "breaks": quick(method=Breaks(), rounds=1),
        "local": quick(method="local"),
    }
    done = compare(experiments, seeds=[0], out=tmp_path / "all")
    assert done is not None
    assert set(done.diverged) == {"breaks"}
    assert [len(done.runs[name]) for name in experiments] == [1, 0, 1]
    assert "diverged" in (tmp_path / "all" / "table.md").read_text()


def test_a_comparison_takes_for_auto_only_what_auto_can_come_to(tmp_path: Path) -> None:
    """A finished run with another network or partition is another experiment."""
    np.savez(tmp_path / "flat.npz", x=np.arange(240.0).reshape(120, 2) % 7, y=np.arange(120) % 2)
    plain = Experiment(dataset=str(tmp_path / "flat.npz"), clients=3, rounds=1, epochs=1)
    open_keys = {"model", "engine", "device", "precision", "partition.kind"}
    assert {key for key, value in dotted(plain.to_dict()).items() if value == "auto"} == open_keys
    config = run_folder(tmp_path / "all", "fedavg", 0).path / "config.toml"
    assert compare({"fedavg": plain}, seeds=[0], out=tmp_path / "all")
    settled = config.read_text().replace('"cuda"', '"cpu"').replace('"bf16"', '"float32"')
    for key, taken, refused in (
        ("model", ["mlp"], ["convnet", "resnet18"]),
        ("engine", ["stacked", "threaded", "processes"], ["flower-bf16", "flower-remote"]),
        ("device", ["cpu", "cuda"], ["cuda:1", "mps"]),
        ("precision", ["float32"], ["float64", "bf16"]),  # on a CPU
        ("kind", ["natural", "dirichlet"], ["iid", "shards"]),
    ):
        for value in (*taken, *refused):
            config.write_text(re.sub(rf'\n{key} = ".*"', f'\n{key} = "{value}"', settled, count=1))
            if value in taken:
                assert compare({"fedavg": plain}, seeds=[0], out=tmp_path / "all")
            else:
                with pytest.raises(CheckpointError, match=rf"{key}={value}, not auto \({taken[0]}"):
                    compare({"fedavg": plain}, seeds=[0], out=tmp_path / "all")
    config.write_text(settled.replace('"cpu"', '"cuda"').replace('"float32"', '"bf16"'))
    assert compare({"fedavg": plain}, seeds=[0], out=tmp_path / "all")


class LargeBatches(fedrane.Algorithm):
    """Cannot say what it records from two examples."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        metrics = {**outcome.metrics, "other": loss} if len(batch.y) > 2 else outcome.metrics
        return loss, outcome._replace(metrics=metrics)


def test_metrics_that_depend_on_the_batch_are_an_error() -> None:
    with pytest.raises(ValueError, match="the metrics loss, other, and loss for a batch of two"):
        fedrane.run(quick(method=LargeBatches(), engine="sequential"))


class WithoutOutcome(fedrane.Algorithm):
    """Forgets what is recorded."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        return super().objective(task, ctx, model, batch)[0]  # type: ignore[return-value]


@pytest.mark.parametrize("engine", ["sequential", "threaded"])
def test_an_objective_that_returns_the_loss_alone_is_one_clear_error(engine: str) -> None:
    with pytest.raises(ConfigError, match=r"WithoutOutcome.objective returns Tensor.*Return \(loss, Outcome"):
        fedrane.run(quick(method=WithoutOutcome(), engine=engine))


class WithoutRecord(fedrane.Algorithm):
    """Forgets what is recorded, or to return anything."""

    def update(self, *given: Any) -> Any:
        return super().update(*given)[0]


class WithoutReturn(fedrane.Algorithm):
    def aggregate(self, *given: Any) -> Any:
        super().aggregate(*given)


@pytest.mark.parametrize(
    ("method", "returned"),
    [
        (WithoutRecord, r"WithoutRecord\.update returns State of Model, dict"),
        (WithoutReturn, "aggregate returns NoneType"),
    ],
)
def test_a_server_step_that_returns_something_else_is_one_clear_error(method: Any, returned: str) -> None:
    with pytest.raises(ConfigError, match=rf"{returned}: the server's next state and what to record are needed"):
        fedrane.run(quick(method=method()))


class NestedRecord(fedrane.Algorithm):
    """Records what cannot be read back."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        after, record = super().aggregate(task, server, ups, cohort)
        return after, record | {"mine/matrix": [[1.0, 2.0], [3.0, 4.0]]}


def test_a_record_that_cannot_be_read_back_is_refused_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"round 1 has a mine/matrix that cannot be.*flat lists"):
        fedrane.run(quick(method=NestedRecord()), tmp_path / "run")
    assert Folder(tmp_path / "run").read_metrics() == []


def test_an_attack_does_not_depend_on_the_engine() -> None:
    """With Flower there is a gate by default, and elsewhere none."""
    with pytest.raises(ConfigError, match="gate"):
        quick(attack=Attack("sign"), engine="flower")
    assert quick(attack=Attack("sign"), engine="flower", gate=Gate("refuse")).attack.kind == "sign"


def test_a_tilde_is_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Python there is no shell to replace it: a folder called ~ was made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    fedrane.run(quick(rounds=1), "~/run")
    fedrane.compare(["fedavg"], quick(rounds=1), out="~/all")
    assert (tmp_path / "home" / "run" / "config.toml").is_file()
    assert (tmp_path / "home" / "all" / "table.csv").is_file()
    with pytest.raises(FileError, match="home directory"):
        fedrane.run(quick(rounds=1), "~nobody-here/run")
    assert [path.name for path in tmp_path.iterdir()] == ["home"]

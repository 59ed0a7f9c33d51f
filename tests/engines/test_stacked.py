"""Clients side by side end where clients one after another end."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedrane
from asserts import close, same_bytes, untimed
from fedrane import Experiment, tree
from fedrane.data.dataset import Dataset
from fedrane.engines import make, stacked, static_step
from fedrane.methods import METHODS
from fedrane.methods.fedavg import FedAvg
from fedrane.testing import conformance
from fedrane.training.result import Result
from problems import EVERY_METHOD, federation, slow_except, table


def both(method: Any, normalised: bool = True, **changes: Any) -> tuple[Result, Result]:
    one, other = (
        conformance.trained(method, normalised, engine=engine, **changes) for engine in ("sequential", "stacked")
    )
    return one, other


@pytest.mark.parametrize("norm", slow_except(["shared"], ["shared", "batch", "local"]))
@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_ends_where_the_sequential_engine_ends(name: str, norm: str) -> None:
    entry = METHODS[name]
    one, other = both(
        entry.cls(**entry.preset),
        norm=norm,
        rounds=3,
        participation=0.6,
        client_dropout=0.2,
        momentum=0.5,
        weight_decay=0.01,
    )
    close(conformance.states(one), conformance.states(other), 1e-12)
    for a, b in zip(untimed(one.history), untimed(other.history), strict=True):
        for key in a.keys() - {"gne/iterations"}:
            assert a[key] == pytest.approx(b[key], abs=1e-9), key


class Images(nn.Module):
    """Strides, borders, a 1 × 1 map, both pools, a shortcut, normalisation and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.second = nn.Sequential(nn.Conv2d(4, 5, 3, 2, 1, bias=False), nn.BatchNorm2d(5, affine=False), nn.ReLU())
        self.third = nn.Sequential(nn.Conv2d(5, 5, 3, 1, 1), nn.GroupNorm(1, 5), nn.Conv2d(5, 5, 3, padding="same"))
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        x = F.adaptive_avg_pool2d(x + self.third(x), 1).flatten(1)
        scores: Tensor = self.head(x)
        return scores


@pytest.mark.parametrize("norm", ["shared", "batch", "local", "group"])
@pytest.mark.parametrize("side", [6, 12])
def test_networks_of_convolutions(norm: str, side: int) -> None:
    numbers = np.random.Generator(np.random.Philox(5))
    y = np.arange(90) % 3
    x = numbers.integers(0, 255, (90, 2, side, side)).astype(np.uint8)
    examples = Dataset("noise", x[:70], y[:70], x[70:], y[70:], tuple("abc"), (0.5, 0.5), (0.25, 0.25))
    settings: dict[str, Any] = {"clients": 4, "rounds": 2, "epochs": 2, "batch": 8, "model_head": "head", "norm": norm}
    settings |= {"precision": "float64", "device": "cpu", "weight_decay": 0.01}
    runs = []
    for engine in ("sequential", "stacked"):
        experiment = Experiment(method="fedrane-wo-lra", engine=engine, **settings)
        runs.append(fedrane.run(experiment, dataset=examples, model=lambda shape, classes: Images()))
    close(conformance.states(runs[0]), conformance.states(runs[1]), 1e-12)
    assert runs[0].history[-1]["personal/loss"] == pytest.approx(runs[1].history[-1]["personal/loss"], abs=1e-9)


class Asks(fedrane.Algorithm):
    """Reads a value in a hook, which a stacked tensor does not have."""

    def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
        loss, outcome = super().objective(task, ctx, model, batch)
        return loss * (1 if float(loss.detach()) > 0 else 2), outcome


def test_a_method_that_cannot_be_stacked_runs_one_by_one_and_reports_why() -> None:
    with pytest.warns(UserWarning, match=r"Asks runs one client at a time.*: its hook step cannot be stacked"):
        other = conformance.trained(Asks(), engine="stacked")
    one = conformance.trained(Asks(), engine="sequential")
    same_bytes(conformance.states(one), conformance.states(other))


def test_a_mistake_in_a_hook_is_not_hidden() -> None:
    class Wrong(fedrane.Algorithm):
        def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
            raise KeyError("no such thing")

    with pytest.warns(UserWarning, match="one client at a time"), pytest.raises(KeyError, match="no such thing"):
        conformance.trained(Wrong(), engine="stacked")


def test_many_chunks_end_where_one_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    full = conformance.trained(METHODS["scaffold"].cls(), engine="stacked", clients=7)
    monkeypatch.setitem(stacked.MAX_STACKED_CLIENTS, "cpu", 3)
    chunks = conformance.trained(METHODS["scaffold"].cls(), engine="stacked", clients=7)
    close(conformance.states(full), conformance.states(chunks), 1e-12)


def test_streams_end_where_one_ends_and_record_in_the_first_round_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are cut into stacks differently, and each stack is large enough for all of them from the start."""
    made: list[int] = []

    class Counted(static_step.Recording):
        def __init__(self, *args: Any) -> None:
            made.append(0)
            super().__init__(*args)

    class Rounds(fedrane.Callback):
        recordings: list[int] = []  # noqa: RUF012 - one run

        def round(self, record: Any) -> None:
            self.recordings.append(len(made))

    settings: dict[str, Any] = {"clients": 23, "rounds": 2, "epochs": 1, "batch": 16, "device": "cpu"}
    settings |= {"precision": "float64", "partition": {"alpha": 0.3}, "engine": "stacked"}
    experiment = Experiment(method="scaffold", **settings)
    full = fedrane.run(experiment)
    monkeypatch.setattr(static_step, "Recording", Counted)
    monkeypatch.setitem(stacked.MAX_STREAMS, "cpu", 3)
    monkeypatch.setitem(stacked.MAX_STACKED_CLIENTS, "cpu", 7)
    streams = fedrane.run(experiment, callbacks=[Rounds()])
    close(conformance.states(full), conformance.states(streams), 1e-12)
    first, *rest = Rounds.recordings
    assert first > 3
    assert rest == [first]


@pytest.mark.parametrize("max_streams", [1, 2, 3])
@pytest.mark.parametrize("steps", [[10] * 8, [100, 10, 10, 10], [7], [50, 50, 1, 1], [9, 8, 7, 3, 2, 1, 0]])
def test_the_longest_clients_go_beside_the_others_where_all_then_end_sooner(steps: list[int], max_streams: int) -> None:
    def end(cuts: tuple[int, ...]) -> float:
        parts = [steps[a:b] for a, b in pairwise((0, *cuts, len(steps)))]
        return max(stacked.STEP_OVERHEAD * part[0] + sum(part) for part in parts)

    pieces = stacked.split_over_streams(steps, max_streams)
    assert [k for piece in pieces for k in range(len(steps))[piece]] == list(range(len(steps)))
    every = (cuts for n in range(max_streams) for cuts in combinations(range(1, len(steps)), n))
    assert end(tuple(piece.start for piece in pieces[1:])) == min(map(end, every))


def test_one_long_client_has_its_own_stack() -> None:
    assert stacked.split_over_streams([100, 10, 10, 10], 2) == [slice(0, 1), slice(1, 4)]


class HandsOn(fedrane.Algorithm):
    """Keeps the parameters of the two steps before, which are thus handed from one entry to another, one turned."""

    def begin(self, task: Any, ctx: Any) -> Any:
        work = super().begin(task, ctx)
        zeros = tree.zeros_like(work.model.params)
        square = {"square": torch.arange(4, dtype=task.dtype).reshape(2, 2)}
        return work._replace(extra={"a": zeros, "b": dict(zeros), "turned": square})

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        after = super().step(task, ctx, work, batch)
        turned = {"square": work.extra["turned"]["square"].mT}
        return after._replace(extra={"a": work.model.params, "b": work.extra["a"], "turned": turned})

    def finish(self, task: Any, ctx: Any, work: Any) -> Any:
        done = super().finish(task, ctx, work)
        return done._replace(client_state=done.client_state._replace(extra=work.extra))


def test_a_value_handed_on_is_the_old_one() -> None:
    one, other = both(HandsOn())
    close(conformance.states(one), conformance.states(other), 1e-12)


def test_who_is_asked_together_does_not_depend_on_who_was_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run begins with another cohort, and must give the same predictions to the last bit."""
    asked, predict = list[int](), stacked.Stacked._predict

    def spy(self: Any, models: list[Any], *about: Any) -> Any:
        asked.append(len(models))
        return predict(self, models, *about)

    monkeypatch.setattr(stacked.Stacked, "_predict", spy)
    result = conformance.trained(METHODS["local"].cls(), engine="stacked", participation=0.3)
    assert set(asked) == {result.population}


def test_a_last_batch_of_one_example_leaves_the_running_statistics_alone() -> None:
    """33 examples in batches of 32: nearly the same in every engine; a single example leaves the first ones."""
    data, sizes = table(90), (33, 20, 1)
    ends = np.cumsum(sizes)
    clients = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    fed = federation(data, clients, lambda *_: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)), "1", batch=32)
    method = FedAvg()
    server = method.init(fed.task, fed.roster)
    first = server.model.stats
    reference = make("sequential", method, fed).train_round(server, {}, [0, 1, 2], 1, 0.0, 60).ups.model.stats
    for engine in ("stacked", "threaded"):
        close(make(engine, method, fed).train_round(server, {}, [0, 1, 2], 1, 0.0, 60).ups.model.stats, reference)
    for k, examples in enumerate(clients[:2]):
        x = torch.from_numpy(data.x[examples]).double()
        torch.testing.assert_close(reference["body.0.running_mean"][k], x.mean(0), rtol=0, atol=0.1)
        torch.testing.assert_close(reference["body.0.running_var"][k], x.var(0), rtol=0.1, atol=0)
    same_bytes(tree.row(reference, 2), first)

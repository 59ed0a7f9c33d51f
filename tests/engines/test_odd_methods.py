"""Methods and networks of users, lawful and out of the ordinary: every engine ends where the sequential one ends."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import grad_and_value
from torch.nn import functional as F

import fedrane
from asserts import close, untimed
from fedrane import Algorithm, Experiment, tree
from fedrane.algorithm import Outcome
from fedrane.data.partition import Partition, Partitioning, save
from fedrane.errors import ConfigError, FedraneError
from fedrane.task import Model, State
from fedrane.testing import conformance
from problems import slow_except

ENGINES = ("stacked", "threaded", "processes")


class Twice(Algorithm):
    """What a step makes is twice in its result, and the second is what is sent."""

    def begin(self, task: Any, ctx: Any) -> Any:
        work = super().begin(task, ctx)
        return work._replace(extra={"last": dict(work.model.params)})

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        after = super().step(task, ctx, work, batch)
        return after._replace(extra={"last": dict(after.model.params)})

    def finish(self, task: Any, ctx: Any, work: Any) -> Any:
        done = super().finish(task, ctx, work)
        sent = Model(self.exchanged(task, work.extra["last"]), done.up.model.stats)
        return done._replace(up=done.up._replace(model=sent))


class WritesToConstants(Algorithm):
    """Numbers that only Python makes, then changed in place."""

    def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
        loss, outcome = super().objective(task, ctx, model, batch)
        one, other = torch.tensor(1.0, dtype=task.dtype), torch.from_numpy(np.ones(1)).to(task.dtype)
        for _ in range(3):
            one *= 0.9
            other *= 0.9
        return loss * one * other.sum(), outcome


class Penalty(Algorithm):
    """The gradient's length is a part of the loss: second derivatives."""

    def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
        def inner(params: Any) -> Any:
            return Algorithm.objective(self, task, ctx, Model(params, model.stats), batch)

        gradients, (loss, outcome) = grad_and_value(inner, has_aux=True)(dict(model.params))
        stats = {name: value.detach() for name, value in outcome.stats.items()}
        return loss + 0.1 * tree.dot(gradients, gradients), Outcome(stats, {"loss": loss})


class CustomGradient(Algorithm):
    """A step as it is usually written, by autograd, shorter where a gradient is large."""

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        params = {name: value.detach().requires_grad_() for name, value in work.model.params.items()}
        loss, outcome = self.objective(task, ctx, Model(params, work.model.stats), batch)
        gradients = torch.autograd.grad(loss, list(params.values()), allow_unused=True, materialize_grads=True)
        lr = ctx.client.lr / (1 + self.lengths(gradients).max())
        new = {
            name: (value - lr * gradient).detach()
            for (name, value), gradient in zip(params.items(), gradients, strict=True)
        }
        stats = {name: value.detach() for name, value in outcome.stats.items()}
        sums = {name: work.sums[name] + len(batch.y) * outcome.metrics[name].detach() for name in work.sums}
        return work._replace(model=Model(new, stats), sums=sums)

    def lengths(self, gradients: Any) -> Tensor:
        return torch.stack([gradient.norm() for gradient in gradients])


class ListsNumbers(CustomGradient):
    """The lengths are put into a list, from which Python reads them."""

    def lengths(self, gradients: Any) -> Tensor:
        return torch.tensor([gradient.norm() for gradient in gradients])


class Counts(Algorithm):
    """Logs what each client's steps count as a metric."""

    def finish(self, task: Any, ctx: Any, work: Any) -> Any:
        done = super().finish(task, ctx, work)
        extra = {name: torch.as_tensor(value).to(task.dtype) for name, value in work.extra.items()}
        return done._replace(metrics={**done.metrics, **extra})


class OtherOrder(Counts):
    """A step names what it keeps in another order than the beginning."""

    def begin(self, task: Any, ctx: Any) -> Any:
        zero = torch.zeros((), dtype=task.dtype)
        return super().begin(task, ctx)._replace(extra={"many": zero, "half": zero + 1})

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        now = {"half": work.extra["half"] * 0.5, "many": work.extra["many"] + 1}
        return super().step(task, ctx, work, batch)._replace(extra=now)


class OtherDtype(Counts):
    """A count that starts as an integer and goes on in fractions."""

    def begin(self, task: Any, ctx: Any) -> Any:
        return super().begin(task, ctx)._replace(extra={"many": torch.zeros((), dtype=torch.int64)})

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        return super().step(task, ctx, work, batch)._replace(extra={"many": work.extra["many"] + 1.5})


class CountsInPython(Counts):
    """A count that is no tensor."""

    def begin(self, task: Any, ctx: Any) -> Any:
        return super().begin(task, ctx)._replace(extra={"many": 0})

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        return super().step(task, ctx, work, batch)._replace(extra={"many": work.extra["many"] + 1})


class Grows(Algorithm):
    """What a client keeps is longer by one with each round it takes part in."""

    def join(self, task: Any, server: Any, client: Any) -> Any:
        return State(super().join(task, server, client).model, {"past": torch.zeros(0, dtype=task.dtype)})

    def finish(self, task: Any, ctx: Any, work: Any) -> Any:
        done = super().finish(task, ctx, work)
        past = torch.cat([ctx.client_state.extra["past"], done.metrics["loss"].reshape(1)])
        return done._replace(client_state=State(done.client_state.model, {"past": past}))


class NoSteps(Algorithm):
    """A round without training."""

    def local_epochs(self, epochs: int) -> int:
        return 0


FALLS_BACK = {
    CustomGradient: "hook step",
    ListsNumbers: "hook step",
    OtherDtype: "where begin gave",
    CountsInPython: "hook begin",
    Grows: "different shapes",
}
"""Those that cannot be stacked, and the reason in the warning."""


@pytest.mark.parametrize("engine", slow_except(["stacked", "threaded"], ENGINES))
@pytest.mark.parametrize(
    "method_class",
    [
        Twice,
        WritesToConstants,
        Penalty,
        CustomGradient,
        ListsNumbers,
        OtherOrder,
        OtherDtype,
        CountsInPython,
        Grows,
        NoSteps,
    ],
)
def test_an_odd_method_ends_alike(method_class: type[Algorithm], engine: str) -> None:
    settings: dict[str, Any] = {"rounds": 3, "participation": 0.6}
    one = conformance.trained(method_class(), engine="sequential", **settings)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        other = conformance.trained(method_class(), engine=engine, **settings)
    messages = [str(warning.message) for warning in caught if "one client at a time" in str(warning.message)]
    assert len(messages) == (engine == "stacked" and method_class in FALLS_BACK), messages
    assert all(FALLS_BACK[method_class] in text for text in messages)
    close(conformance.states(one), conformance.states(other), 1e-12)
    for a, b in zip(untimed(one.history), untimed(other.history), strict=True):
        for key in a:
            assert a[key] == pytest.approx(b[key], abs=1e-9), key


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_of_one_row_ends_alike(engine: str, tmp_path: Any) -> None:
    """BatchNorm makes of a single value its bias, 0 at first, whose sign a ReLU sees: it must be 0 in every engine."""
    examples = conformance.blobs()
    order = np.random.default_rng(0).permutation(len(examples.y))
    cuts = np.cumsum([2, 3, 16])
    save(Partition(tuple(np.sort(piece) for piece in np.split(order, cuts))), tmp_path / "p.npz")
    settings: dict[str, Any] = {"clients": 4, "rounds": 4, "epochs": 2, "batch": 16, "model_head": "head"}
    settings |= {"precision": "float64", "device": "cpu", "norm": "local"}
    chosen = Experiment(**settings, partition=Partitioning(file=str(tmp_path / "p.npz"), test=0.2))
    one, other = (
        fedrane.run(chosen.replace(engine=name), dataset=examples, model=conformance.network(True))
        for name in ("sequential", engine)
    )
    close(conformance.states(one), conformance.states(other), 1e-12)


# ---- networks


class UserNetwork(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 5), nn.Linear(5, 3)
        self.register_buffer("shift", torch.linspace(-1, 1, 6))

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(torch.relu(self.first(x + self.shift)))
        return scores


class Drops(UserNetwork):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.dropout(x, 0.5, self.training))


class Remembers(UserNetwork):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.shift.mul_(0.9)
        return super().forward(x)


class Doubles(UserNetwork):
    """Without randomness, and different in training and in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x if self.training else x)


def trained(network: type[nn.Module], **changes: Any) -> fedrane.Result:
    settings: dict[str, Any] = {"clients": 3, "rounds": 1, "batch": 16, "model_head": "head", "device": "cpu"}
    return fedrane.run(Experiment(**settings | changes), dataset=conformance.blobs(), model=lambda shape, n: network())


@pytest.mark.parametrize(
    ("network", "message"), [(Drops, r"random numbers.*nn\.Dropout"), (Remembers, "buffer body.shift")]
)
def test_a_network_that_is_no_function_is_refused(network: type[nn.Module], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trained(network)


@pytest.mark.parametrize("engine", ["sequential", *ENGINES])
def test_a_network_knows_whether_it_trains(engine: str) -> None:
    evaluating = trained(Doubles, engine=engine)
    params = evaluating.server.model.params
    x = torch.from_numpy(conformance.blobs().x_test).float()
    body = {name.removeprefix("body."): value for name, value in params.items() if name.startswith("body.")}
    head = {name.removeprefix("head."): value for name, value in params.items() if name.startswith("head.")}
    shifted = x + torch.linspace(-1, 1, 6)
    hidden = torch.relu(F.linear(shifted, body["first.weight"], body["first.bias"]))
    accuracy = (F.linear(hidden, head["weight"], head["bias"]).argmax(1).numpy() == conformance.blobs().y_test).mean()
    assert evaluating.history[-1]["global/accuracy"] == pytest.approx(accuracy)
    assert torch.allclose(evaluating.model(x), F.linear(hidden, head["weight"], head["bias"]), atol=1e-6)


def test_a_network_s_constants_are_as_short_as_its_numbers() -> None:
    assert np.isfinite(trained(UserNetwork, precision="bf16").history[-1]["train/loss"])


# ---- what is written down


class ReportsMuch(Algorithm):
    def aggregate(self, task: Any, server: Any, ups: Any, cohort: Any) -> Any:
        aggregated, record = super().aggregate(task, server, ups, cohort)
        return aggregated, {
            **record,
            "np": np.float32(1.5),
            "pair": (1, torch.tensor(2.0)),
        }


class ReportsForSome(Algorithm):
    def finish(self, task: Any, ctx: Any, work: Any) -> Any:
        done = super().finish(task, ctx, work)
        return done._replace(metrics={**done.metrics, "odd": done.metrics["loss"]}) if ctx.client.index % 2 else done


@pytest.mark.filterwarnings("ignore:.*one client at a time")
@pytest.mark.parametrize("engine", ["sequential", *ENGINES])
def test_a_metric_is_reported_by_all_clients_or_by_none(engine: str) -> None:
    with pytest.raises(FedraneError, match=r"client 1 reports \['loss', 'odd'\], client 0 \['loss'\].* same names"):
        conformance.trained(ReportsForSome(), engine=engine)


class KeepsAView(Algorithm):
    def finish(self, task: Any, ctx: Any, work: Any) -> Any:
        done = super().finish(task, ctx, work)
        full = torch.arange(6, dtype=task.dtype).reshape(2, 3)
        return done._replace(client_state=State(done.client_state.model, {"full": full, "part": full[0]}))


@pytest.mark.parametrize("method_class", [ReportsMuch, KeepsAView])
def test_what_a_method_reports_and_keeps_is_written(method_class: type[Algorithm], tmp_path: Any) -> None:
    chosen = conformance.experiment(method_class(), engine="sequential", rounds=1)
    ended = fedrane.run(chosen, tmp_path / "run", dataset=conformance.blobs(), model=conformance.network(True))
    assert (tmp_path / "run" / "checkpoints").is_dir()
    if method_class is ReportsMuch:
        record = ended.history[-1]
        assert (record["np"], record["pair"]) == (1.5, [1, 2.0])


def test_nothing_to_clip() -> None:
    """A method that trains no parameter at all, with a bound on the gradient's length."""

    class Frozen(Algorithm):
        def trains(self, name: str) -> bool:
            return False

    one = conformance.trained(Frozen(), engine="sequential", clip=1.0)
    assert np.isfinite(one.history[-1]["train/loss"])

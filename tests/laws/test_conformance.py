"""Every registered method satisfies the laws, and each law is violated by a method made for it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from fedrane import Algorithm, tree
from fedrane.algorithm import PERSONAL, Done, Outcome, Work, sample_ratio
from fedrane.methods import METHODS
from fedrane.ops.reduction import Summary
from fedrane.task import Batch, Client, Context, Model, State, Task, cross_entropy
from fedrane.testing import conformance
from problems import EVERY_METHOD


@pytest.mark.parametrize("law", conformance.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_keeps_every_law(name: str, law: Any) -> None:
    entry = METHODS[name]
    assert conformance.check(entry.cls(**entry.preset), law) is None


ROBUST = {name for name, entry in METHODS.items() if entry.cls.__module__.endswith(".robust")}
"""They aggregate statistics as they do parameters, with a law of their own."""


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ROBUST])
def test_statistics_are_averaged_by_rows(name: str) -> None:
    """BatchNorm's running statistics of all clients are averaged by examples, for any aggregation of parameters."""
    method = METHODS[name].cls(**METHODS[name].preset)
    bench = conformance.Bench(conformance.trained(method, post_training=False, rounds=1), method)
    server, epochs = bench.result.server, method.local_epochs(1)
    sent = bench.engine.train_round(server, bench.result.client_states, [0, 1, 3], 2, 0.1, epochs)
    after, _ = method.aggregate(bench.result.task, server, sent.ups, sent.cohort)
    ratio = sent.cohort.size.double() / sent.cohort.size.sum()
    for path, examples in sent.ups.model.stats.items():
        assert not torch.equal(examples[0], examples[1]), "nothing to average"
        torch.testing.assert_close(after.model.stats[path], ratio @ examples, rtol=1e-10, atol=1e-12)


class Global(Algorithm):
    """Draws from torch's global generator."""

    def start(self, task: Task, ctx: Context) -> Model:
        model = super().start(task, ctx)
        return Model({name: p + 0.1 * torch.randn_like(p) for name, p in model.params.items()}, model.stats)


class Deaf(Algorithm):
    """Always starts from the same point and never changes."""

    def init(self, task: Task, roster: Any) -> State:
        return State(tree.zeros_like(task.init()), {})

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(up=ctx.down)


class FirstWins(Algorithm):
    """Takes the statistics of the first client, as one popular library does with BatchNorm's buffers."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().aggregate(task, server, ups, cohort)
        first = {name: examples[0] for name, examples in ups.model.stats.items()}
        return averaged._replace(model=Model(averaged.model.params, first)), record


class SharesOfItsPart(Algorithm):
    """Counts a client by its share of the examples of those that are summed with it."""

    def summary(self, task: Task, server: State, ups: State, cohort: Client) -> Summary:
        return super().summary(task, server, ups, cohort._replace(size=sample_ratio(cohort)))


class InPlace(Algorithm):
    """Writes to its arguments."""

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        after = super().step(task, ctx, work, batch)
        for name, value in work.model.params.items():
            value.copy_(after.model.params[name])
        return after


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x.sum().item() > 1,
    "if": lambda x: "high" if x.sum() > 1 else "low",
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "index": lambda x: [0, 1][x.argmax() * 0],
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.detach().numpy(),
    "asarray": lambda x: np.asarray(x.detach()),
    "cpu": lambda x: x.cpu(),
    "print": lambda x: str(x),
    "format": lambda x: f"{x}",
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "in": lambda x: 1.0 in x,
}


@dataclass(frozen=True)
class Reads(Algorithm):
    """Reads a tensor's values on the client."""

    how: str = "item"
    hook: str = "objective"

    def _look(self, hook: str, x: torch.Tensor) -> None:
        if hook == self.hook:
            READS[self.how](x)

    def start(self, task: Task, ctx: Context) -> Model:
        self._look("start", ctx.client.labels.float())
        return super().start(task, ctx)

    def begin(self, task: Task, ctx: Context) -> Work:
        self._look("begin", ctx.client.labels.float())
        return super().begin(task, ctx)

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        self._look("step", batch.x)
        return super().step(task, ctx, work, batch)

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[torch.Tensor, Outcome]:
        self._look("objective", batch.x)
        loss, outcome = super().objective(task, ctx, model, batch)
        self._look("loss", loss[None])
        return loss, outcome

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        self._look("finish", work.examples[None])
        return super().finish(task, ctx, work)

    def predict(self, task: Task, model: Model, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self._look("predict", x)
        return super().predict(task, model, x, mask)


class Forgetful(Algorithm):
    """Keeps something that a checkpoint cannot store."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def shares(self, name: str) -> bool:
        return name.startswith("body")

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(client_state=done.client_state._replace(extra={"a/b": torch.zeros(1)}))


class Meddler(Algorithm):
    """Changes the client state before the server has aggregated anything."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def shares(self, name: str) -> bool:
        return False

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        for value in ctx.client_state.model.params.values():
            value.add_(1.0)
        return super().finish(task, ctx, work)


class Widens(Algorithm):
    """Lets the model become double precision."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().aggregate(task, server, ups, cohort)
        return tree.map(torch.Tensor.double, averaged), record


class Shortens(Algorithm):
    """Keeps and sends sums in float32, for any precision of the run."""

    where: ClassVar[str] = "up"

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        shortened = State(done.up.model if self.where == "up" else done.client_state.model, {"sum": torch.zeros(3)})
        return done._replace(**{self.where: shortened})


class KeepsShortened(Shortens):
    """The same for what stays with the client."""

    where: ClassVar[str] = "client_state"


class Zeroed(Algorithm):
    """Freezes the head by zeroing its gradient, so that weight decay still moves it (a defect seen elsewhere)."""

    def trains(self, name: str) -> bool:
        return name.startswith("body")

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        after = super().step(task, ctx, work, batch)
        shrunk = {name: p * 0.99 if name.startswith("head") else p for name, p in after.model.params.items()}
        return after._replace(model=Model(shrunk, after.model.stats))

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(up=State(work.model, {}))


class Divides(Algorithm):
    """Is not finite if BatchNorm has statistics that are not shared."""

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(client_state=State(tree.scale(work.model, float("nan")), {}))


class CountsPadding(Algorithm):
    """Averages over padding too."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[torch.Tensor, Outcome]:
        net = task.training(model, batch)
        loss = cross_entropy(net.head(net.body(batch.x)), batch) * batch.mask.sum() / len(batch.mask)
        return loss, Outcome(net.stats, {"loss": loss})


class Leaks(Algorithm):
    """Declares that the head is not shared, and sends it."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def shares(self, name: str) -> bool:
        return name.startswith("body")

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        return super().finish(task, ctx, work)._replace(up=State(work.model, {}))


class BatchWise(Algorithm):
    """Its prediction depends on the batch."""

    def predict(self, task: Task, model: Model, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().predict(task, model, x - x.mean(0), mask)


@dataclass(frozen=True)
class Uphill(Algorithm):
    """Increases the loss."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[torch.Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        return -0.01 * loss, outcome


class OneLabel(Algorithm):
    """Uses only the first label, as without mixup."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[torch.Tensor, Outcome]:
        return super().objective(task, ctx, model, batch._replace(mixed=None))


class Blurs(Algorithm):
    """Adds to its inputs, as if they were always quantities."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[torch.Tensor, Outcome]:
        return super().objective(task, ctx, model, batch._replace(x=batch.x + 0.1))


MUTANTS = {
    "one_seed_gives_the_same_bytes": Global,
    "another_seed_gives_another_result": Deaf,
    "order_of_clients_is_irrelevant": FirstWins,
    "parts_of_a_cohort_add_up": SharesOfItsPart,
    "hooks_leave_their_inputs_unchanged": InPlace,
    "client_hooks_read_no_values": Reads,
    "state_survives_a_checkpoint": Forgetful,
    "absent_clients_keep_their_state": Meddler,
    "dtype_is_kept": Widens,
    "frozen_parameters_do_not_move": Zeroed,
    "works_with_and_without_normalisation": Divides,
    "padding_changes_nothing": CountsPadding,
    "mixed_labels_count": OneLabel,
    "numbers_of_a_vocabulary_stay_whole": Blurs,
    "only_what_is_shared_travels": Leaks,
    "models_are_those_declared": BatchWise,
    "it_learns": Uphill,
}


def test_every_law_has_a_mutant() -> None:
    assert set(MUTANTS) == {law.__name__ for law in conformance.LAWS}


@pytest.mark.parametrize("law", conformance.LAWS, ids=lambda law: law.__name__)
def test_every_law_can_be_broken(law: Any) -> None:
    assert conformance.check(MUTANTS[law.__name__](), law) is not None


@pytest.mark.parametrize("method", [Shortens, KeepsShortened])
def test_nothing_a_method_adds_has_fewer_digits(method: type[Algorithm]) -> None:
    problem = conformance.check(method(), conformance.dtype_is_kept)
    assert problem is not None
    assert "extra/sum is torch.float32 in a float64 run" in problem


@pytest.mark.parametrize("name", METHODS)
def test_no_number_a_method_adds_has_gone_through_float32(name: str) -> None:
    """A float64 number with 17 to 24 significant bits was rounded to float32 at some point."""
    method = METHODS[name].cls(**METHODS[name].preset)
    # Without BatchNorm and with decay every parameter changes: initial values are float32 numbers.
    result = conformance.trained(method, False, rounds=2, weight_decay=0.01)
    for path, leaf in tree.flatten(conformance.states(result)).items():
        if "/extra/" in path and leaf.is_floating_point():
            mantissa = torch.frexp(leaf.double()).mantissa
            bits24, shorter = (torch.frac(mantissa * 2**digits) == 0 for digits in (24, 16))
            rounded = bits24 & ~shorter
            assert rounded.double().mean() < 0.5, f"{path} in a float64 run: {leaf.flatten()[:3]}"


# ---- client hooks and values


@pytest.mark.parametrize("how", READS)
def test_every_way_to_read_a_value_is_noticed(how: str) -> None:
    assert conformance.check(Reads(how), conformance.client_hooks_read_no_values) is not None


@pytest.mark.parametrize("hook", ["start", "begin", "step", "objective", "loss", "finish", "predict"])
def test_every_client_hook_is_watched(hook: str) -> None:
    """And the message names the line and the operation."""
    problem = conformance.check(Reads("item", hook), conformance.client_hooks_read_no_values)
    lines, first = inspect.getsourcelines(READS["item"])
    assert problem is not None
    assert "torch.Tensor.item" in problem
    assert f"{__file__}:{first + next(i for i, line in enumerate(lines) if 'item()' in line)}" in problem


class Gathers(Algorithm):
    """Selects by index and by ``where``, without synchronising."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[torch.Tensor, Outcome]:
        order = batch.y.argsort()
        kept = torch.where(batch.x[order] > 0, batch.x[order], 0.0).index_select(0, order)
        loss, outcome = super().objective(task, ctx, model, batch)
        return loss + 0 * kept.masked_fill(kept > 1, 0.0).sum(), outcome


def test_what_computes_without_waiting_is_allowed() -> None:
    assert conformance.check(Gathers(), conformance.client_hooks_read_no_values) is None


def test_the_server_may_read_values() -> None:
    """FedRANE's bargain iterates until it has converged."""
    assert conformance.check(METHODS["fedrane"].cls(), conformance.client_hooks_read_no_values) is None


# ---- learning


class Median(Algorithm):
    """Yin et al. 2018: the median of each coordinate; normalisation statistics stay unchanged."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        return State(
            Model(tree.map(lambda examples: examples.median(0).values, ups.model.params), server.model.stats), {}
        ), {}


class Trimmed(Algorithm):
    """The mean of each coordinate without its largest and its smallest value."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        return State(tree.map(lambda examples: examples.sort(0).values[1:-1].mean(0), ups.model), {}), {}


class Still(Algorithm):
    """A server that ignores the uploads."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        return server, {}


class Backwards(Algorithm):
    """A server that steps away from its clients."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().aggregate(task, server, ups, cohort)
        away = {name: 2 * p - averaged.model.params[name] for name, p in server.model.params.items()}
        return averaged._replace(model=averaged.model._replace(params=away)), record


@pytest.mark.parametrize("method", [Median, Trimmed])
def test_a_robust_aggregator_learns(method: type[Algorithm]) -> None:
    assert conformance.check(method(), conformance.it_learns) is None


@pytest.mark.parametrize("method", [Still, Backwards])
def test_a_server_that_does_not_follow_does_not_learn(method: type[Algorithm]) -> None:
    assert conformance.check(method(), conformance.it_learns) is not None


# ---- a method that crashes


class Crashes(Algorithm):
    """Always crashes: the network does not accept inputs of this width."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[torch.Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        return loss + task.training(model, batch).body(batch.x[:, :2]).sum(), outcome  # the crash


class CrashesLocally(Algorithm):
    """Crashes if normalisation layers stay with the client."""

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[torch.Tensor, Outcome]:
        loss, outcome = super().objective(task, ctx, model, batch)
        return loss + 0 * sum(ctx.down.model.params[name].sum() for name in model.params), outcome


def test_a_crash_is_reported_once_with_its_position() -> None:
    """The first law reports the error, the line and the hook; the others are marked as repeated."""
    first, *others = conformance.verdicts(Crashes())
    lines, begin = inspect.getsourcelines(Crashes)
    line = begin + next(i for i, text in enumerate(lines) if "the crash" in text)
    assert f"({__file__}:{line}, in Crashes.objective; in step 0 of client" in first.problem
    assert "RuntimeError" in first.problem
    assert not first.again
    assert len(others) == len(conformance.LAWS) - 1
    assert all(verdict.again and verdict.problem for verdict in others)


def test_laws_that_do_not_crash_are_judged() -> None:
    """A crash in one law does not stop the others."""
    verdicts = {verdict.law.__name__: verdict for verdict in conformance.verdicts(CrashesLocally())}
    (name,) = (name for name, verdict in verdicts.items() if verdict.problem)
    assert name == "works_with_and_without_normalisation"
    assert "KeyError" in verdicts[name].problem
    assert not any(verdict.again for verdict in verdicts.values())


# ---- the laws also apply to post-training stages


@dataclass(frozen=True)
class Closing(Algorithm):
    """A method that is correct before its post-training stage."""

    last: str = ""

    def trains(self, name: str) -> bool:
        return not name.startswith("head.")

    def post_training(self) -> tuple[Algorithm, ...]:
        return ((FINALES | ALLOWED)[self.last](),)


class Thaws(Closing):
    """Decays a head that it declares as frozen."""

    def post_training(self) -> tuple[Algorithm, ...]:
        return ()

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        params = {name: p * 0.9 if name.startswith("head.") else p for name, p in server.model.params.items()}
        return State(Model(params, server.model.stats), {}), {}


class Melts(Closing):
    """Changes its clients' heads, which it declares as frozen."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def post_training(self) -> tuple[Algorithm, ...]:
        return ()

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(client_state=State(tree.scale(work.model, 0.9), {}))


class Tunes(Closing):
    """A post-training stage may train what the rounds before it froze."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def trains(self, name: str) -> bool:
        return name.startswith("head.")

    def post_training(self) -> tuple[Algorithm, ...]:
        return ()


FINALES: dict[str, type[Algorithm]] = {
    "frozen_parameters_do_not_move": Thaws,
    "hooks_leave_their_inputs_unchanged": InPlace,
    "order_of_clients_is_irrelevant": FirstWins,
    "padding_changes_nothing": CountsPadding,
    "only_what_is_shared_travels": Leaks,
    "client_hooks_read_no_values": Reads,
    "frozen": Melts,
}
ALLOWED = {"tunes": Tunes}


@pytest.mark.parametrize("name", FINALES)
def test_a_post_training_stage_can_break_a_law(name: str) -> None:
    law = next(law for law in conformance.LAWS if law.__name__.startswith(name))
    problem = conformance.check(Closing(name), law)
    assert problem is not None
    assert "after post-training" in problem or not name.startswith("frozen")


def test_a_post_training_stage_may_tune_what_was_frozen() -> None:
    assert conformance.check(Closing("tunes"), conformance.frozen_parameters_do_not_move) is None

"""The protocol: what the server keeps, what a client keeps, what travels, and what one local step does.

The defaults are FedAvg (McMahan et al. 2017). A method overrides only the hooks in which its paper differs. Engines
decide where and when the hooks run.

Hooks are pure: they return new trees and never write to their arguments. Client hooks (``start`` to ``finish``,
``predict``) do not synchronise with the host and do not branch on data, so they can be captured and stacked. ``init``,
``update`` and ``aggregate`` run on the server and may do both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedrane import tree
from fedrane.data import sampling
from fedrane.errors import ConfigError
from fedrane.kernels.dispatch import disabled
from fedrane.ops.reduction import Partial, Summary, Term, Totals
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task, prediction_loss
from fedrane.tree import Tensors

GLOBAL, PERSONAL = "global", "personal"
Grid = Mapping[str, tuple[Any, ...]]
Choices = Mapping[str, tuple[str, ...]]
Needs = Mapping[str, tuple[str, ...]]
Span = sampling.Span


class Outcome(NamedTuple):
    """What an objective returns besides its loss."""

    stats: Tensors
    metrics: Tensors
    """Scalars, the same names for every batch; their means over the examples are recorded."""


class Work(NamedTuple):
    """A client's state between two local steps."""

    model: Model
    optimizer: dict[str, Any]
    """The state of the optimiser: the velocity of SGD with momentum, the moments of Adam."""
    examples: Tensor
    """Number of examples seen so far, without padding."""
    sums: Tensors
    """Sum of each recorded metric over these examples."""
    extra: dict[str, Any]


class Done(NamedTuple):
    """The result of a client's round. ``client_state`` is committed only after the server has aggregated ``up``."""

    up: State
    client_state: State
    metrics: Tensors


@dataclass(frozen=True)
class Algorithm:
    """FedAvg. The fields of a subclass are its hyper-parameters."""

    models: ClassVar[tuple[str, ...]] = (GLOBAL,)
    """Which models the method has: a global one, personal ones, or both."""
    grid: ClassVar[Grid] = {}
    """The values of its fields that ``fedrane tune`` searches."""
    choices: ClassVar[Choices] = {}
    """The values that a field may have, if they are few; ``check_choices(self)`` in ``__post_init__`` checks them."""
    trains_model: ClassVar[bool] = True
    """Whether its steps train, and so see augmented inputs. False for a stage that only measures."""
    needs_classes: ClassVar[str] = ""
    """Why it cannot be trained where a number is predicted (regression); empty: it can."""
    needs: ClassVar[Needs] = {}
    """Fields that only have an effect if another, or a key of the experiment, has a certain value:
    ``{"calibrate=True": ("ridge",)}``, ``{"a=x|y": …}`` or ``{"optimizer=sgd": …}``."""

    # ---- what is kept where

    def prepare(self, task: Task) -> Task:
        """The network the method trains: with another head, or one more branch."""
        return task

    def shares(self, name: str) -> bool:
        """Whether a parameter is sent to the server; otherwise it stays with the client."""
        return True

    def trains(self, name: str) -> bool:
        """Whether a parameter is trained; otherwise it is frozen."""
        return True

    def changes(self, name: str) -> bool:
        """Whether the server's copy changes from round to round. Constants are sent to a client only once."""
        return self.trains(name)

    def init(self, task: Task, roster: Roster) -> State:
        """The server's state before the first round."""
        return State(task.init(), {})

    def join(self, task: Task, server: State, client: Client) -> State:
        """A client's state before its first round: the server's copy of what the client will keep."""
        return State(self._keep(task, server.model), {})

    # ---- one round

    def send(self, task: Task, server: State, client: Client) -> State:
        """What the server sends to a client."""
        return State(self._part(task, server.model, shared=True), {})

    def start(self, task: Task, ctx: Context) -> Model:
        """The model that local training starts from: the one that was sent, with the client's private parts."""
        return _overlay(ctx.down.model, self._part(task, ctx.client_state.model, shared=False))

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        """The loss of one batch."""
        net = task.training(model, batch)
        loss = prediction_loss(net.head(net.body(batch.x)), batch)
        return loss, Outcome(net.stats, {"loss": loss})

    def begin(self, task: Task, ctx: Context) -> Work:
        """The state before the first local step: the start, a fresh optimiser, zero sums."""
        model = self.start(task, ctx)
        zero = torch.zeros((), dtype=task.dtype, device=task.device)
        optimizer = task.optimizer.init(tree.pick(model.params, self.trains))
        return Work(model, optimizer, zero, dict.fromkeys(_metric_names(self, task, ctx, model), zero), {})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        """One step of the optimiser on the objective."""
        params, stats = work.model

        def loss(trained: Tensors) -> tuple[Tensor, Outcome]:
            returned = self.objective(task, ctx, Model({**params, **trained}, stats), batch)
            if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Outcome)):
                raise ConfigError(
                    f"{type(self).__name__}.objective returns {type(returned).__name__}",
                    "a step needs the loss and what is recorded of it",
                    "Return (loss, Outcome(net.stats, {'loss': loss})), or what super().objective returns",
                )
            return returned

        trained = tree.pick(params, self.trains)
        grads, (_, outcome) = grad_and_value(loss, has_aux=True)(trained)
        trained, optimizer = task.optimizer.update(trained, grads, work.optimizer, ctx.client.lr)
        examples = batch.mask.sum().to(work.examples.dtype)
        if outcome.metrics.keys() != work.sums.keys():
            given, known = ", ".join(outcome.metrics), ", ".join(work.sums)
            raise ValueError(f"objective returns the metrics {given}, and {known} for a batch of two zero inputs")
        sums = {name: work.sums[name] + examples * outcome.metrics[name].detach() for name in work.sums}
        model = Model({**params, **trained}, {name: value.detach() for name, value in outcome.stats.items()})
        return work._replace(model=model, optimizer=optimizer, examples=work.examples + examples, sums=sums)

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        """What is uploaded, what the client keeps, and the round's metrics."""
        stats = self._part(task, work.model, shared=True).stats
        up = Model(self.exchanged(task, work.model.params), stats)
        metrics = tree.scale(work.sums, 1 / work.examples.clamp(min=1))
        return Done(State(up, {}), State(self._keep(task, work.model), {}), metrics)

    def summary(self, task: Task, server: State, ups: State, cohort: Client) -> Summary:
        """What the server needs of some of a cohort's uploads, which are stacked: sums over these clients. An engine
        adds those of all parts up. What is summed of a client must not depend on who else is in its part."""
        size, model = cohort.size, server.model
        return {
            "params": Term(ups.model.params, size, model.params),
            "stats": Term(ups.model.stats, size, model.stats),
        }

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        """The server's next state from the sums over the whole cohort, and what to record."""
        return server._replace(model=Model(totals["params"].mean(), totals["stats"].mean())), {}

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        """The server's next state from all uploads, stacked in the order of client numbers, and what to record.

        To be overridden by a method that must see every upload at once; the others override the two hooks above.
        """
        totals = Partial.of(self.summary(task, server, ups, cohort)).totals(len(cohort.index))
        return self.update(task, server, totals, cohort)

    @property
    def sees_uploads(self) -> bool:
        """Whether the server must have all uploads at once: it must where ``aggregate`` is overridden."""
        return type(self).aggregate is not Algorithm.aggregate

    # ---- post-training stages and predictions

    def local_epochs(self, epochs: Span) -> Span:
        """The number of local epochs in a round, given the experiment's; ``Steps`` stands for a number of steps."""
        return epochs

    def post_training(self) -> tuple[Algorithm, ...]:
        """Post-training stages: methods that each run one round with all clients after the last round."""
        return ()

    def global_model(self, task: Task, server: State) -> Model:
        return server.model

    def personal_model(self, task: Task, ctx: Context) -> Model:
        """The client's personal model: the server's, overlaid with what the client keeps."""
        return _overlay(ctx.down.model, ctx.client_state.model)

    def predict(self, task: Task, model: Model, x: Tensor, mask: Tensor) -> Tensor:
        """The class scores of a global or a personal model; in regression one number, the standardised prediction."""
        net = task.evaluating(model, mask)
        return net.head(net.body(x))

    # ---- helpers of the hooks above; a method uses them and does not override them

    @final
    def models_on(self, task: Task) -> tuple[str, ...]:
        """Which models the method has on this task: with local normalisation layers there is no global one."""
        return (PERSONAL,) if task.norm == "local" and task.norm_names else self.models

    @final
    def exchanged(self, task: Task, params: Tensors) -> Tensors:
        """The parameters that are uploaded: shared and trained."""
        return tree.pick(params, lambda name: self._shared(task, name) and self.trains(name))

    def _shared(self, task: Task, name: str) -> bool:
        return self.shares(name) and not task.private(name)

    def _part(self, task: Task, model: Model, shared: bool) -> Model:
        def wanted(name: str) -> bool:
            return self._shared(task, name) == shared

        return Model(tree.pick(model.params, wanted), tree.pick(model.stats, wanted))

    def _keep(self, task: Task, model: Model) -> Model:
        """What the client keeps: its private parts. Without any, a method with personal models keeps the whole one."""
        private = self._part(task, model, shared=False)
        return model if PERSONAL in self.models_on(task) and not any(private) else private


def sample_ratio(cohort: Client) -> Tensor:
    """Each client's share of the cohort's examples; all zero if there are none."""
    sizes = cohort.size.double()
    return sizes / sizes.sum().clamp(min=1)


def epochs_after(first: float, epochs: Span, method: str) -> Span:
    """The epochs of a round in which a method's own ``first`` ones come before the experiment's."""
    if isinstance(epochs, sampling.Steps):
        why = f"{method} trains {first:g} of its own before it, which are counted in epochs"
        raise ConfigError(f"steps={epochs.count} with method={method}", why, "Use epochs")
    return first + epochs


def _overlay(below: Model, above: Model) -> Model:
    return Model({**below.params, **above.params}, {**below.stats, **above.stats})


_names: WeakKeyDictionary[Task, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def _metric_names(algorithm: Algorithm, task: Task, ctx: Context, model: Model) -> tuple[str, ...]:
    """The metrics that an objective returns, from one call on two empty examples; once for each task and method."""
    known = _names.setdefault(task, {})
    if (key := f"{type(algorithm)} {algorithm}") not in known:
        x, number = task.zeros(2), torch.zeros(2, dtype=torch.int64, device=task.device)
        try:
            with torch.no_grad(), disabled():  # kernels would be compiled for this size of batch alone
                _, outcome = algorithm.objective(
                    task, ctx, model, Batch(x, task.zero_labels(2), number == 0, number[0], full=True)
                )
        except Exception:  # noqa: BLE001 - the first step raises it again, where it belongs
            return ("loss",)
        known[key] = tuple(outcome.metrics)
    return known[key]

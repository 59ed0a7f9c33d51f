"""The protocol: what the server keeps, what a client keeps, what travels, and what one local step does.

The defaults ARE FedAvg (McMahan et al. 2017). A method overrides the hooks in which its paper differs and nothing else;
engines decide where and when the hooks run.

Hooks are pure: they return new trees and write nothing. Client hooks (``start`` to ``finish``, ``predict``) hold no
host synchronisation and no branch on data, so that they can be captured and stacked; ``init`` and ``aggregate`` run
on the server and may do both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value

from fedrane import tree
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task, cross_entropy
from fedrane.tree import Tensors

GLOBAL, PERSONAL = "global", "personal"
Grid = Mapping[str, tuple[Any, ...]]
Needs = Mapping[str, tuple[str, ...]]


class Outcome(NamedTuple):
    """What an objective gives beside its loss."""

    stats: Tensors
    metrics: Tensors
    """Scalars by the names in ``records``."""


class Work(NamedTuple):
    """A client's state between two local steps."""

    model: Model
    velocity: Tensors
    rows: Tensor
    """Live rows seen so far."""
    sums: Tensors
    """Of each recorded metric, weighted by live rows."""
    extra: dict[str, Any]


class Done(NamedTuple):
    """What a client's round ends in. ``own`` is committed only when the server has merged ``up``."""

    up: State
    own: State
    metrics: Tensors


@dataclass(frozen=True)
class Algorithm:
    """FedAvg. Fields of a subclass are its hyper-parameters."""

    answers: ClassVar[tuple[str, ...]] = (GLOBAL,)
    """Which models the method gives: a global one, personal ones, or both."""
    grid: ClassVar[Grid] = {}
    """The values of its fields among which ``fedrane tune`` looks for the best."""
    trains_model: ClassVar[bool] = True
    """Whether its steps train, and so see augmented inputs; a stage that only measures has it false."""
    needs: ClassVar[Needs] = {}
    """Fields without effect unless another has a certain value: ``{"calibrate=True": ("ridge",)}``, or ``"a=x|y"``."""

    @property
    def records(self) -> tuple[str, ...]:
        """The metrics its objective reports."""
        return ("loss",)

    # ---- what is kept where

    def prepare(self, task: Task) -> Task:
        """The network as the method needs it: another head, one more branch."""
        return task

    def shares(self, name: str) -> bool:
        """Travels to the server, or stays with its client."""
        return True

    def trains(self, name: str) -> bool:
        """Moves, or is frozen."""
        return True

    def changes(self, name: str) -> bool:
        """Whether the server's copy changes from round to round; what does not goes down to a client only once."""
        return self.trains(name)

    def init(self, task: Task, roster: Roster) -> State:
        """What the server holds before the first round."""
        return State(task.init(), {})

    def join(self, task: Task, server: State, client: Client) -> State:
        """What a client holds before its first round: what it will keep, as the server has it."""
        return State(self._keep(task, server.model), {})

    # ---- one round

    def send(self, task: Task, server: State, client: Client) -> State:
        """What goes down to a client."""
        return State(self._part(task, server.model, shared=True), {})

    def start(self, task: Task, ctx: Context) -> Model:
        """The model local training starts from: what came down, with the client's own parts in place."""
        return _overlay(ctx.down.model, self._part(task, ctx.own.model, shared=False))

    def objective(self, task: Task, ctx: Context, model: Model, batch: Batch) -> tuple[Tensor, Outcome]:
        """The loss of one batch."""
        net = task.training(model, batch)
        loss = cross_entropy(net.head(net.body(batch.x)), batch)
        return loss, Outcome(net.stats, {"loss": loss})

    def begin(self, task: Task, ctx: Context) -> Work:
        model = self.start(task, ctx)
        zero = torch.zeros((), dtype=task.dtype, device=task.device)
        velocity = task.sgd.init(tree.pick(model.params, self.trains))
        return Work(model, velocity, zero, dict.fromkeys(self.records, zero), {})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        """One step of gradient descent on the objective."""
        params, stats = work.model

        def loss(trained: Tensors) -> tuple[Tensor, Outcome]:
            return self.objective(task, ctx, Model({**params, **trained}, stats), batch)

        trained = tree.pick(params, self.trains)
        grads, (_, outcome) = grad_and_value(loss, has_aux=True)(trained)
        trained, velocity = task.sgd.update(trained, grads, work.velocity, ctx.client.rate)
        rows = batch.live.sum().to(work.rows.dtype)
        sums = {name: work.sums[name] + rows * outcome.metrics[name].detach() for name in self.records}
        model = Model({**params, **trained}, {name: value.detach() for name, value in outcome.stats.items()})
        return work._replace(model=model, velocity=velocity, rows=work.rows + rows, sums=sums)

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        """What goes up, what stays, and what is recorded."""
        stats = self._part(task, work.model, shared=True).stats
        up = Model(self.exchanged(task, work.model.params), stats)
        metrics = tree.scale(work.sums, 1 / work.rows.clamp(min=1))
        return Done(State(up, {}), State(self._keep(task, work.model), {}), metrics)

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        """The server's next state from the uploads (stacked, in the order of client numbers), and what to record."""
        ratio = sample_ratio(cohort)
        params = tree.move(server.model.params, ups.model.params, ratio)
        stats = tree.move(server.model.stats, ups.model.stats, ratio)
        return server._replace(model=Model(params, stats)), {}

    # ---- after the last round, and the answers

    def local_epochs(self, epochs: int) -> int:
        """How often a client goes through its rows in a round, where the experiment says ``epochs``."""
        return epochs

    def finale(self) -> tuple[Algorithm, ...]:
        """Methods that each run one round with all clients after the last."""
        return ()

    def answers_on(self, task: Task) -> tuple[str, ...]:
        """The answers on this task: with normalisation layers kept local there is no global model to ask."""
        return (PERSONAL,) if task.norm == "local" and task.norm_names else self.answers

    def depends_on_batch(self, task: Task) -> bool:
        """Whether an answer depends on the rows it is given with: then batches are those of training, of one client."""
        return task.norm == "batch"

    def global_model(self, task: Task, server: State) -> Model:
        return server.model

    def personal_model(self, task: Task, ctx: Context) -> Model:
        """The client's own model; what it has not trained yet is the server's."""
        return _overlay(ctx.down.model, ctx.own.model)

    def predict(self, task: Task, model: Model, x: Tensor, live: Tensor) -> Tensor:
        """Class scores of a global or a personal model."""
        net = task.answering(model, live)
        return net.head(net.body(x))

    # ---- shared by the hooks above

    def exchanged(self, task: Task, params: Tensors) -> Tensors:
        """Those of the parameters that go up: shared and trained."""
        return tree.pick(params, lambda name: self._shared(task, name) and self.trains(name))

    def _shared(self, task: Task, name: str) -> bool:
        return self.shares(name) and not task.private(name)

    def _part(self, task: Task, model: Model, shared: bool) -> Model:
        def wanted(name: str) -> bool:
            return self._shared(task, name) == shared

        return Model(tree.pick(model.params, wanted), tree.pick(model.stats, wanted))

    def _keep(self, task: Task, model: Model) -> Model:
        """A method with personal answers but nothing of a client's own keeps the model its client has trained."""
        own = self._part(task, model, shared=False)
        return model if PERSONAL in self.answers_on(task) and not any(own) else own


def sample_ratio(cohort: Client) -> Tensor:
    """Each client's share of the cohort's rows; all zero where nobody has any."""
    sizes = cohort.size.double()
    return sizes / sizes.sum().clamp(min=1)


def _overlay(below: Model, above: Model) -> Model:
    return Model({**below.params, **above.params}, {**below.stats, **above.stats})

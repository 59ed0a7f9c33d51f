"""FedBABU: Oh, Kim & Yun, "FedBABU: Towards Enhanced Representation for Federated Image Classification", ICLR 2022.

The head keeps its random initial weights, for all rounds and clients. Only the body is trained, and averaged as in
FedAvg:

    θ_B ← Σ_k (n_k / n) θ_B,k,        θ_H fixed.

After the last round each client fine-tunes a copy of the global model on its examples, and predicts with it.

*Deviations*: the head is not passed to the optimiser, so neither momentum nor weight decay moves it; the official code
gives it a learning rate of 0. Tuning uses the experiment's optimiser at a fraction of its last learning rate: the
official code trains at 0.1 falling to 0.001, and tunes at 0.001 with momentum 0.9, about 0.01 without. If only a part
is tuned, BatchNorm's running statistics still change, as in that code. Before the post-training stage a client predicts
with the model it trained last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm, Choices, Done, Grid, Span, Work
from fedrane.errors import check_choices, check_ranges
from fedrane.ops.reduction import Summary, Totals
from fedrane.task import Batch, Client, Context, Model, State, Task


@dataclass(frozen=True)
class FedBABU(Algorithm):
    """A body trained under a fixed random head; at the end each client fine-tunes a copy."""

    models: ClassVar[tuple[str, ...]] = (GLOBAL, PERSONAL)
    grid: ClassVar[Grid] = {"tune_lr": (0.03, 0.1, 0.3)}
    choices: ClassVar[Choices] = {"tune": ("full", "head", "body")}

    tune: str = "full"
    """What clients fine-tune after the last round: the ``full`` model, the ``head`` or the ``body``."""
    tune_epochs: int = 5
    """τ_f, the epochs of fine-tuning."""
    tune_lr: float = 0.1
    """The learning rate of fine-tuning, as a multiple of that of the last round."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_ranges(self, tune_epochs=(1, 1000), tune_lr=(1e-6, 1e3))

    def trains(self, name: str) -> bool:
        return not _head(name)

    def post_training(self) -> tuple[Algorithm, ...]:
        return (Tuning(self.tune, self.tune_epochs, self.tune_lr),)


@dataclass(frozen=True)
class Tuning(FedBABU):
    """FedBABU's post-training stage: nothing is uploaded, and the server does not change."""

    def trains(self, name: str) -> bool:
        return self.tune == "full" or _head(name) == (self.tune == "head")

    def changes(self, name: str) -> bool:
        return not _head(name)

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        client = ctx.client._replace(lr=self.tune_lr * ctx.client.lr)
        return super().step(task, ctx._replace(client=client), work, batch)

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        return done._replace(up=State(Model({}, {}), {}), client_state=State(work.model, {}))

    def summary(self, task: Task, server: State, ups: State, cohort: Client) -> Summary:
        return {}

    def update(self, task: Task, server: State, totals: Totals, cohort: Client) -> tuple[State, dict[str, Any]]:
        return server, {}

    def local_epochs(self, epochs: Span) -> Span:
        return self.tune_epochs

    def post_training(self) -> tuple[Algorithm, ...]:
        return ()


def _head(name: str) -> bool:
    return name.startswith("head.")

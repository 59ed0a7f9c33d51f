"""FedRep: Collins, Hassani, Mokhtari & Shakkottai, "Exploiting Shared Representations for Personalized Federated
Learning", ICML 2021.

Body and head as in FedPer, but trained in turn. In each round client k first fits its head to the body that was sent,
and then trains the body under the head that it has found:

    θ_P,k ← θ_P,k − η ∇_P f_k(θ_B, θ_P,k)        for ``head_epochs`` epochs, θ_B frozen,
    θ_B,k ← θ_B,k − η ∇_B f_k(θ_B,k, θ_P,k)      for the experiment's ``epochs``, θ_P,k frozen,

and the server sets θ_B ← Σ_k (n_k / n) θ_B,k. Client k predicts with (θ_B, θ_P,k).

*Deviations*: uploads are weighted by examples, as in the authors' code; the paper weights clients equally. Neither
momentum nor weight decay moves what is frozen. BatchNorm's running statistics follow all epochs, as in that code.
``clip`` applies to the gradient of both parts together. After the last round that code trains the heads of all clients
once more; here a client predicts with its last head.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedrane import tree
from fedrane.algorithm import PERSONAL, Algorithm, Grid, Span, Work, epochs_after
from fedrane.errors import check_ranges
from fedrane.task import Batch, Context, Model, Task


@dataclass(frozen=True)
class FedRep(Algorithm):
    """A private head is fitted first, then the shared body is trained under it."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)
    grid: ClassVar[Grid] = {"head_epochs": (1, 5, 10)}

    head_epochs: int = 10
    """Epochs of the head at the start of a round; the experiment's ``epochs`` of the body follow."""

    def __post_init__(self) -> None:
        check_ranges(self, head_epochs=(0, 1000))
        if self.head_epochs == 0:
            warnings.warn("FedRep with method.head_epochs=0 never trains a head", stacklevel=3)

    def shares(self, name: str) -> bool:
        return not _head(name)

    def local_epochs(self, epochs: Span) -> Span:
        return epochs_after(self.head_epochs, epochs, "fedrep")

    def begin(self, task: Task, ctx: Context) -> Work:
        work = super().begin(task, ctx)
        return work._replace(extra={"on_head": self._on_head(ctx, work)})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        """A step of all, which the part that is frozen does not take. The body starts with a fresh optimiser."""
        on_head, params = self._on_head(ctx, work), work.model.params
        fresh = task.optimizer.init(tree.pick(params, self.trains))
        switched = work.extra["on_head"] & ~on_head
        optimizer = tree.map(lambda new, old: torch.where(switched, new, old), fresh, work.optimizer)
        after = super().step(task, ctx, work._replace(optimizer=optimizer), batch)
        moved = {n: torch.where(on_head == _head(n), new, params[n]) for n, new in after.model.params.items()}
        return after._replace(model=Model(moved, after.model.stats), extra={"on_head": on_head})

    def _on_head(self, ctx: Context, work: Work) -> Tensor:
        return work.examples < self.head_epochs * ctx.client.size


def _head(name: str) -> bool:
    return name.startswith("head.")

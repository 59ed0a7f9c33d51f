"""The loss of the model that a client received, over all of its examples, uploaded with its trained model.

A fair server needs to know how well each client is served before it trains. The losses recorded in training do not say
that: they are of models that have already moved.
"""

from __future__ import annotations

import torch

from fedrane.algorithm import Algorithm, Done, Work
from fedrane.task import Batch, Context, Task


class ReceivedLoss(Algorithm):
    """Every client uploads F_k(θ), the loss of the received model θ, as ``loss``.

    With each batch the objective is computed once more, for θ: one more forward pass in a step, and no other pass over
    the examples. Every epoch sees each example once, so the mean over all epochs is the mean over the examples. It is
    the objective that the client minimises, so in training mode and with augmented inputs, if there are any.
    """

    def begin(self, task: Task, ctx: Context) -> Work:
        zero = torch.zeros((), dtype=task.dtype, device=task.device)
        return super().begin(task, ctx)._replace(extra={"received": zero})

    def step(self, task: Task, ctx: Context, work: Work, batch: Batch) -> Work:
        after = super().step(task, ctx, work, batch)
        loss, _ = self.objective(task, ctx, self.start(task, ctx), batch)
        examples = batch.mask.sum().to(loss.dtype)
        return after._replace(extra={"received": work.extra["received"] + examples * loss.detach()})

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        mean = work.extra["received"] / work.examples.clamp(min=1)
        return done._replace(up=done.up._replace(extra={"loss": mean}))

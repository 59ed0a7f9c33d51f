"""A client in the middle of its round, to hold objectives and their gradients to formulas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from fedrane import Algorithm, Context, Model
from fedrane.engines.sequential import Sequential
from fedrane.task import Batch, Task
from fedrane.testing import conformance
from fedrane.tree import Tensors
from problems import DOUBLE, federation, table


class Midway(NamedTuple):
    """The first client after an epoch: its model is no longer the one that was sent."""

    task: Task
    ctx: Context
    params: Tensors
    batch: Batch

    def features(self, params: Tensors) -> Tensor:
        """Of the network ``problems.dense``, by hand."""
        return torch.tanh(self.batch.x @ params["body.0.weight"].T + params["body.0.bias"])

    def scores(self, params: Tensors) -> Tensor:
        return self.features(params) @ params["head.weight"].T + params["head.bias"]

    def loss(self, method: Algorithm, params: Tensors) -> Tensor:
        return method.objective(self.task, self.ctx, Model(params, {}), self.batch)[0]

    def gradient(self, method: Algorithm) -> Tensors:
        return torch.func.grad(lambda params: self.loss(method, params))(self.params)


def midway(method: Algorithm, examples: Sequence[int] = range(20), lr: float = 0.5) -> Midway:
    """Batches of 8 examples of three classes; the last batch is padded with large numbers."""
    fed = federation(table(60), [list(examples), list(range(20, 60))], batch=8)
    fed = replace(fed, task=method.prepare(fed.task))
    engine = Sequential(method, fed)
    ctx = engine.context(method.init(fed.task, fed.roster), None, fed.client(0, 1, lr, 1))
    work = method.begin(fed.task, ctx)
    *whole, last = engine.batches(0, 1, 1)
    for batch in whole:
        work = method.step(fed.task, ctx, work, batch)
    return Midway(fed.task, ctx, work.model.params, conformance._pad(last, 3))


def differences_agree(loss: Callable[[Tensors], Tensor], params: Tensors) -> None:
    """The gradient of each parameter along a random direction is that of finite differences."""
    gradient = torch.func.grad(loss)(params)
    draws = torch.Generator().manual_seed(1)
    for name, value in params.items():
        along = torch.randn(value.shape, generator=draws, dtype=DOUBLE)
        ends = [float(loss({**params, name: value + step * along})) for step in (1e-6, -1e-6)]
        expected = pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-5, abs=1e-8)
        assert float((gradient[name] * along).sum()) == expected

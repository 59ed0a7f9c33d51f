"""Stochastic gradient descent as a pure function, and the learning rate over rounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from fedrane import tree
from fedrane.errors import ConfigError, nearest
from fedrane.kernels.sgd_step import sgd_step
from fedrane.tree import Tensors

SCHEDULES = ("constant", "step", "exponential", "cosine")


@dataclass(frozen=True)
class SGD:
    """Momentum and weight decay with the conventions of ``torch.optim.SGD``; momentum starts at zero
    in every round, and only the parameters handed over are touched, so a frozen one has neither decay nor momentum."""

    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest length of the whole gradient; 0 means any."""

    @property
    def penalty(self) -> float:
        """The weight decay that is part of the gradient."""
        return self.weight_decay

    @property
    def stable(self) -> float:
        """On a quadratic, steps grow without bound if lr times its curvature is larger."""
        return 2 * (1 + self.momentum)

    def init(self, params: Tensors) -> Tensors:
        """The velocity; without momentum there is none."""
        return tree.zeros_like(params) if self.momentum else {}

    def update(self, params: Tensors, grads: Tensors, velocity: Tensors, lr: Tensor) -> tuple[Tensors, Tensors]:
        grads = clipped(grads, self.clip)
        if self.weight_decay:
            grads = {name: grads[name] + self.weight_decay * params[name] for name in params}
        if self.momentum:
            velocity = {name: self.momentum * velocity[name] + grads[name] for name in params}
            grads = velocity
        return {name: sgd_step(params[name], grads[name], lr) for name in params}, velocity


def clipped(grads: Tensors, length: float) -> Tensors:
    """The gradient, scaled down if all of it together is longer than this; 0 means any length."""
    return tree.scale(grads, (length / (tree.norm(grads) + 1e-6)).clamp(max=1)) if length else grads


@dataclass(frozen=True)
class Schedule:
    """The learning rate's factor in a round."""

    kind: str = "constant"
    """How the learning rate changes: it is multiplied by ``factor`` each round (``exponential``) or each ``every``
    rounds (``step``), or follows a ``cosine`` down to ``floor``."""
    factor: float = 0.99
    """What the learning rate is multiplied by, for kind=step and kind=exponential."""
    every: int = 1
    """Rounds between two multiplications, for kind=step."""
    floor: float = 0.0
    """Where a cosine ends, as a fraction of ``lr``."""
    warmup: int = 0
    """Rounds before that in which the learning rate rises linearly: with 4 it is 1/5, 2/5, 3/5 and 4/5 of ``lr``. From
    the next round on it follows ``kind``."""

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ConfigError(f"schedule.kind={self.kind!r} is not known", remedy=nearest(self.kind, SCHEDULES))
        if not 0 < self.factor <= 1:
            raise ConfigError(
                f"schedule.factor={self.factor}", "the learning rate is multiplied by it", "Use 0 < factor <= 1"
            )
        if self.every < 1:
            raise ConfigError(f"schedule.every={self.every}", "it counts rounds", "Use 1 or more")
        if not 0 <= self.floor <= 1:
            raise ConfigError(
                f"schedule.floor={self.floor}", "it is a part of the first learning rate", "Use 0 <= floor <= 1"
            )
        if self.warmup < 0:
            raise ConfigError(f"schedule.warmup={self.warmup}", "it counts rounds", "Use 0 (no warm-up) or more")

    def at(self, round: int, rounds: int) -> float:
        """For rounds 1, 2, …, ``rounds``."""
        if round <= self.warmup:
            return round / (self.warmup + 1)
        done, rounds = round - 1 - self.warmup, rounds - self.warmup
        if self.kind == "exponential":
            return self.factor**done
        if self.kind == "step":
            return float(self.factor ** (done // self.every))
        if self.kind == "cosine":
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done / rounds))
        return 1.0

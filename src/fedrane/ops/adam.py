"""Adam and AdamW as pure functions, and which optimisers clients can use.

Adam: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015. With the gradient g of step t,

    m ← β₁ m + (1 − β₁) g,        v ← β₂ v + (1 − β₂) g²,
    θ ← θ − η (m / (1 − β₁ᵗ)) / (√(v / (1 − β₂ᵗ)) + ε).

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019. The weight decay is not added to g;
it shrinks θ by the factor 1 − η · weight_decay before each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedrane import tree
from fedrane.errors import ConfigError
from fedrane.kernels.sgd_step import sgd_step
from fedrane.ops.sgd import SGD, clipped
from fedrane.tree import Tensors

OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class AdamConstants:
    """The constants of Adam and AdamW."""

    momentum: float = 0.9  # β₁
    """Of Adam and AdamW: the weight of earlier steps in the direction (β₁)."""
    decay: float = 0.999  # β₂
    """Of Adam and AdamW: the weight of earlier steps in the second moment (β₂)."""
    floor: float = 1e-8  # ε
    """Of Adam and AdamW: added to the root of the second moment (ε); gradients below it are not scaled up."""

    def __post_init__(self) -> None:
        for name in ("momentum", "decay"):
            if not 0 <= getattr(self, name) < 1:
                why = "it is the weight of earlier steps, and the last one needs some too"
                raise ConfigError(f"adam.{name}={getattr(self, name)}", why, f"Use 0 <= adam.{name} < 1")
        if not 1e-30 <= self.floor < math.inf:  # as a float32 it must not be zero
            raise ConfigError(f"adam.floor={self.floor}", "steps are divided by it", "Use for instance adam.floor=1e-8")


@dataclass(frozen=True)
class Adam:
    """Adam with the conventions of ``torch.optim.Adam``, or of ``AdamW`` if ``decoupled``; its moments start at zero in
    every round, and only the parameters handed over are touched."""

    constants: AdamConstants = field(default_factory=AdamConstants)
    weight_decay: float = 0.0
    clip: float = 0.0
    """Largest length of the whole gradient; 0 means any."""
    decoupled: bool = False
    """Whether weight decay shrinks the parameters and is not part of the gradient: AdamW."""

    @property
    def penalty(self) -> float:
        """The weight decay that is part of the gradient."""
        return 0.0 if self.decoupled else self.weight_decay

    @property
    def stable(self) -> float:
        """The length of a step is about lr, whatever the curvature."""
        return math.inf

    def init(self, params: Tensors) -> dict[str, Any]:
        """No steps yet, and both moments zero."""
        steps = next(iter(params.values())).new_zeros(()) if params else torch.zeros(())
        return {"steps": steps, "mean": tree.zeros_like(params), "square": tree.zeros_like(params)}

    def update(
        self, params: Tensors, grads: Tensors, state: dict[str, Any], lr: Tensor
    ) -> tuple[Tensors, dict[str, Any]]:
        grads = clipped(grads, self.clip)
        if self.penalty:
            grads = {name: grads[name] + self.penalty * params[name] for name in params}
        elif self.weight_decay:
            params = {name: value * (1 - lr * self.weight_decay) for name, value in params.items()}
        keep, decay = self.constants.momentum, self.constants.decay
        steps = state["steps"] + 1
        mean = {name: keep * state["mean"][name] + (1 - keep) * grads[name] for name in params}
        square = {name: decay * state["square"][name] + (1 - decay) * grads[name].square() for name in params}
        step_size, root = lr / _weight(keep, steps), _weight(decay, steps).sqrt()
        direction = {name: mean[name] / (square[name].sqrt() / root + self.constants.floor) for name in params}
        moved = {name: sgd_step(params[name], direction[name], step_size) for name in params}
        return moved, {"steps": steps, "mean": mean, "square": square}


Optimizer = SGD | Adam


def _weight(decay: float, steps: Tensor) -> Tensor:
    """1 − decayᵗ: what the weights of t steps add up to. In this form a float32 has all its digits also near 0."""
    return -torch.expm1(steps * (math.log(decay) if decay else -math.inf))


def optimizer(kind: str, constants: AdamConstants, momentum: float, weight_decay: float, clip: float) -> Optimizer:
    """The optimiser of that name, one of ``OPTIMIZERS``."""
    if kind == "sgd":
        return SGD(momentum, weight_decay, clip)
    if kind == "adamw" and not weight_decay:
        why, remedy = "without weight decay it is Adam", "Use optimizer=adam, or set for instance weight_decay=0.01"
        raise ConfigError("optimizer=adamw with weight_decay=0", why, remedy)
    return Adam(constants, weight_decay, clip, decoupled=kind == "adamw")


def name_of(used: Optimizer) -> str:
    """One of ``OPTIMIZERS``."""
    return "sgd" if isinstance(used, SGD) else "adamw" if used.decoupled else "adam"


def require(used: Optimizer, kinds: Sequence[str], what: str, why: str, otherwise: str = "") -> None:
    """An error if a method, or a choice of its fields, is only right with these optimisers."""
    if name_of(used) not in kinds:
        choices = (*(f"optimizer={kind}" for kind in kinds), *filter(None, [otherwise]))
        raise ConfigError(f"{what} with optimizer={name_of(used)}", why, f"Use {' or '.join(choices)}")

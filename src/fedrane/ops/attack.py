"""Hostile clients in a simulation, so that servers can be compared under attack.

Of a hostile client's upload θ_k the server, which has θ, gets

    sign     θ − factor · (θ_k − θ)
    scale    θ + factor · (θ_k − θ)
    noise    θ_k + factor · ‖θ_k − θ‖ · g,   g Gaussian of length about one, drawn for every round and tensor

(what a method sends besides a model is multiplied by −factor or factor, or gets noise as long). With ``labels`` it
trains on its examples with label c as if they were of class C − 1 − c, and sends what it has trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrane import tree
from fedrane.data import streams
from fedrane.data.sampling import round_half_up
from fedrane.errors import ConfigError, nearest
from fedrane.task import Model, State

NONE, SIGN, SCALE, NOISE, LABELS = KINDS = ("none", "sign", "scale", "noise", "labels")


@dataclass(frozen=True)
class Attack:
    """Which clients are hostile in a simulation, and what they do."""

    kind: str = NONE
    """``sign`` uploads the opposite of what was trained, ``scale`` too much of it, ``noise`` adds Gaussian noise, and
    ``labels`` trains on labels in reverse order."""
    share: float = 0.2
    """The fraction of all clients that are hostile, drawn once."""
    factor: float = 10.0
    """How long a hostile upload is, in lengths of what was trained."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"attack.kind={self.kind!r} is not known", remedy=nearest(self.kind, KINDS))
        if not 0 < self.share < 1:
            raise ConfigError(f"attack.share={self.share}", "it is a fraction of the clients", "Use for instance 0.2")
        if not 0 < self.factor < 1e6:
            raise ConfigError(f"attack.factor={self.factor}", "it multiplies uploads", "Use for instance 10")

    def hostile(self, population: int, seed: int) -> list[int]:
        """The clients that attack; at least one."""
        if self.kind == NONE:
            return []
        count = max(1, round_half_up(self.share * population))
        return sorted(streams.permutation(population, seed, "attack")[:count].tolist())

    def labels(self, y: NDArray[np.int64], classes: int, examples: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
        """The labels of all examples, those of the hostile clients' training examples reversed."""
        flipped = y.copy()
        for of in examples:
            flipped[of] = classes - 1 - y[of]
        return flipped

    def uploads(self, server: State, ups: State, rows: Sequence[int], keys: Sequence[int]) -> State:
        """The uploads, those of the hostile clients in place of what they trained; ``keys`` are of their noise."""
        if self.kind not in (SIGN, SCALE, NOISE) or not rows:
            return ups
        index = torch.tensor(rows)
        generators = [torch.Generator().manual_seed(key) for key in keys]

        def turned(stacked: Tensor, base: Tensor | None = None) -> Tensor:
            if not stacked.is_floating_point():
                return stacked
            origin = torch.zeros_like(stacked[0]) if base is None else base
            away = stacked[index] - origin
            return stacked.index_copy(0, index.to(stacked.device), origin + self._instead(away, generators))

        model = Model(*(_each(turned, *pair) for pair in zip(ups.model, server.model, strict=True)))
        return State(model, tree.map(turned, ups.extra))

    def _instead(self, away: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        if self.kind == NOISE:
            noise = torch.stack([torch.randn(row.shape, generator=g) for row, g in zip(away, generators, strict=True)])
            lengths = away.reshape(len(away), -1).norm(dim=1) / math.sqrt(max(1, away[0].numel()))
            longer: Tensor = self.factor * lengths.reshape(-1, *[1] * (away.dim() - 1)) * noise.to(away)
            return away + longer
        return away * (self.factor if self.kind == SCALE else -self.factor)


def _each(turned: Callable[[Tensor, Tensor], Tensor], ups: tree.Tensors, server: tree.Tensors) -> tree.Tensors:
    return {name: turned(stacked, server[name]) for name, stacked in ups.items()}

"""LG-FedAvg: Liang et al., "Think Locally, Act Globally: Federated Learning with Local and Global Representations",
arXiv:2001.01523, 2020.

The mirror image of FedPer: every client learns its own representation, the body, which never leaves it. The head on top
of it is averaged as in FedAvg, and both are trained together:

    θ_H ← Σ_k (n_k / n) θ_H,k,        client k predicts with (θ_B,k, θ_H).

*Deviations*: uploads are weighted by examples, where the authors' code weights clients equally. That code starts from a
model trained by FedAvg for hundreds of rounds, and evaluates each client's best model so far; here bodies start from
the common initial weights, and the last one counts. The paper's auxiliary losses on the representation and its ensemble
of all bodies for an unknown client are not implemented. The shared layers are the network's head.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedrane.algorithm import PERSONAL, Algorithm


@dataclass(frozen=True)
class LGFedAvg(Algorithm):
    """A body that never leaves its client, and a shared head."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def shares(self, name: str) -> bool:
        return name.startswith("head.")

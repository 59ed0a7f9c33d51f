"""FedPer: Arivazhagan et al., "Federated Learning with Personalization Layers", arXiv:1912.00818, 2019.

The body is averaged as in FedAvg. The head is trained together with the body, but stays with its client and is never
sent:

    θ_B ← Σ_k (n_k / n) θ_B,k,        client k predicts with (θ_B, θ_P,k).

*Deviations*: the personal layers are the network's head, one layer; the paper also tries the last residual blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedrane.algorithm import PERSONAL, Algorithm


@dataclass(frozen=True)
class FedPer(Algorithm):
    """A shared body, and a head that never leaves its client."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def shares(self, name: str) -> bool:
        return not name.startswith("head.")

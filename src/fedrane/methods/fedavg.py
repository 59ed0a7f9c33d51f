"""FedAvg: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.

Each round the server sends θ, every client k of the cohort runs E epochs of SGD on its n_k examples, and

    θ ← θ + Σ_k (n_k / n) (θ_k − θ),        n = Σ_k n_k over the cohort.

*Deviations*: none. The defaults of the protocol are this method.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedrane.algorithm import Algorithm


@dataclass(frozen=True)
class FedAvg(Algorithm):
    """FedAvg as in its paper."""

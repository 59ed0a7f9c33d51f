"""Servers that tolerate hostile clients.

Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018: every number of the
new model is the median of the clients', or their mean without the share β of the largest and of the smallest.

Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NeurIPS 2017: Krum takes the
upload whose K − f − 2 nearest neighbours are nearest (squared distances), multi-Krum averages the K − f best.

Pillutla et al., "Robust Aggregation for Federated Learning", IEEE TSP 2022 (RFA): the geometric median,
argmin_v Σ (n_k / n) ‖v − θ_k‖, by the smoothed Weiszfeld algorithm.

f = ⌈share · K⌉ of the K uploads of a round may be hostile, but always fewer than half.

*Deviations*: all uploads count equally, as in the papers, but for RFA's. BatchNorm's statistics are aggregated in the
same way as the parameters: Krum and RFA take the weights that these have. The papers of Krum and of the trimmed mean
aggregate gradients; here, as in FedAvg, the change of several local steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fedrane import tree
from fedrane.algorithm import Algorithm, Grid, sample_ratio
from fedrane.errors import check_ranges
from fedrane.ops import byzantine
from fedrane.task import Client, Model, State, Task


@dataclass(frozen=True)
class Median(Algorithm):
    """The median of every number."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        cut = self.cut(len(cohort.index))
        model = Model(*(byzantine.middle(*pair, cut) for pair in zip(server.model, ups.model, strict=True)))
        return server._replace(model=model), {"robust/tolerated": cut}

    def cut(self, count: int) -> int:
        """How many of the largest and of the smallest are dropped."""
        return (count - 1) // 2


@dataclass(frozen=True)
class TrimmedMean(Median):
    """The mean of every number, without the largest and the smallest."""

    grid: ClassVar[Grid] = {"share": (0.1, 0.2, 0.3, 0.4)}

    share: float = 0.2  # β
    """The largest part of a round's uploads that may be hostile."""

    def __post_init__(self) -> None:
        check_ranges(self, share=(1e-3, 0.4999))

    def cut(self, count: int) -> int:
        return byzantine.tolerated(self.share, count)


@dataclass(frozen=True)
class Krum(Algorithm):
    """The upload that has the nearest neighbours."""

    grid: ClassVar[Grid] = {"share": (0.1, 0.2, 0.3, 0.4)}

    share: float = 0.2
    """The largest part of a round's uploads that may be hostile."""

    def __post_init__(self) -> None:
        check_ranges(self, share=(1e-3, 0.4999))

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        count = len(cohort.index)
        hostile = byzantine.tolerated(self.share, count)
        squares = byzantine.distances(server.model.params, ups.model.params)
        weights = byzantine.krum(squares, hostile, self.kept(count, hostile))
        chosen = cohort.index[weights > 0].tolist()
        return _moved(server, ups, weights), {"robust/tolerated": hostile, "robust/chosen": chosen}

    def kept(self, count: int, hostile: int) -> int:
        """How many uploads are averaged."""
        return 1


@dataclass(frozen=True)
class MultiKrum(Krum):
    """The average of the uploads that have the nearest neighbours."""

    def kept(self, count: int, hostile: int) -> int:
        return count - hostile


@dataclass(frozen=True)
class RFA(Algorithm):
    """The geometric median of the uploads."""

    smoothing: float = 1e-6  # ν
    """The least distance that an upload is taken to have from the median."""
    iterations: int = 100
    """Of Weiszfeld's algorithm."""

    def __post_init__(self) -> None:
        check_ranges(self, smoothing=(1e-12, 1), iterations=(1, 10_000))

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        squares = byzantine.distances(server.model.params, ups.model.params)
        ratio = sample_ratio(cohort)
        weights = byzantine.geometric_median(squares, ratio, self.smoothing, self.iterations)
        return _moved(server, ups, weights), {"robust/weights": weights}


def _moved(server: State, ups: State, weights: Tensor) -> State:
    return server._replace(
        model=Model(*(tree.move(*pair, weights) for pair in zip(server.model, ups.model, strict=True)))
    )

"""FedFV: Wang, Fan, Qi, Wen, Wang & Yu, "Federated Learning with Fair Averaging", IJCAI 2021.

Gradients g_k = θ − θ_k that point away from each other cancel in an average, at the cost of the smaller group. Before
they are averaged, each one is projected onto the plane orthogonal to every other with which it conflicts (g_k · g_j <
0), in the order of rising losses F_j(θ); those of the share α of clients with the largest losses stay as they are:

    g_k ← g_k − (g_k · g_j / ‖g_j‖²) g_j,        g = (1/m) Σ_k g_k.

The last gradients of clients that are absent, if not older than τ rounds, stand for theirs: for each of these rounds,
the oldest first, g is projected in the same way against the sum of those with which it conflicts. At the end g is made
as long as the plain average, and θ ← θ − g.

*Deviations*: clients count equally, as in the paper, but one without examples does not. BatchNorm's statistics are
averaged by examples. F_k(θ) is measured along with local training (:class:`fedrane.ops.received.ReceivedLoss`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedrane import tree
from fedrane.algorithm import Grid
from fedrane.errors import check_ranges
from fedrane.ops import conflict
from fedrane.ops.nash import gram
from fedrane.ops.received import ReceivedLoss
from fedrane.task import Client, Model, Roster, State, Task


@dataclass(frozen=True)
class FedFV(ReceivedLoss):
    """Conflicting gradients are projected before they are averaged."""

    grid: ClassVar[Grid] = {"kept": (0.0, 0.1, 0.3, 0.5), "history": (0, 1, 3)}

    kept: float = 0.1
    """α, the share of the clients, those with the largest losses, whose gradients are not projected."""
    history: int = 1
    """τ, for how many rounds the last gradient of an absent client stands for it; 0 remembers none."""

    def __post_init__(self) -> None:
        check_ranges(self, kept=(0, 0.9999), history=(0, 1_000_000))

    def init(self, task: Task, roster: Roster) -> State:
        start, clients = super().init(task, roster), len(roster.sizes)
        if not self.history:
            return start
        params = self.exchanged(task, start.model.params)
        gradients = {name: value.new_zeros(clients, *value.shape) for name, value in params.items()}
        return start._replace(extra={"gradients": gradients, "round": torch.zeros_like(roster.sizes)})

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        averaged, record = super().aggregate(task, server, ups, cohort)
        before, trained = server.model.params, (cohort.size > 0).double()
        rows = {name: before[name] - uploads for name, uploads in ups.model.params.items()}
        extra = dict(server.extra)
        groups: list[list[int]] = []
        if self.history:
            groups, absent = self._absent(server, cohort)
            past = server.extra["gradients"]
            extra["gradients"] = {name: past[name].index_copy(0, cohort.index, value) for name, value in rows.items()}
            extra["round"] = extra["round"].index_copy(0, cohort.index, cohort.round)
            rows = {name: torch.cat([value, past[name][absent]]) for name, value in rows.items()}
        zero = {name: torch.zeros_like(before[name]) for name in rows}
        inner, losses = gram(zero, rows), ups.extra["loss"]
        mixes = conflict.projected(inner, losses, conflict.kept(self.kept, int(trained.sum())))
        equal = trained / trained.sum().clamp(min=1)
        mix = conflict.without_absent(inner, equal @ mixes, groups)
        plain = torch.zeros_like(mix).index_copy(0, torch.arange(len(equal), device=mix.device), equal)
        step = tree.move(zero, rows, conflict.as_long_as(inner, mix, plain))
        params = before | {name: before[name] - value for name, value in step.items()}
        record |= {"fedfv/conflicts": (inner[: len(equal), : len(equal)] < 0).sum() // 2}
        return State(Model(params, averaged.model.stats), extra), record

    def _absent(self, server: State, cohort: Client) -> tuple[list[list[int]], list[int]]:
        """The absent clients with a recent gradient, and the rows that theirs will have, by round, the oldest first."""
        last = server.extra["round"].index_fill(0, cohort.index, 0).tolist()
        oldest = max(1, int(cohort.round[0]) - self.history)
        recent = sorted((round, client) for client, round in enumerate(last) if round >= oldest)
        groups: dict[int, list[int]] = {}
        for row, (round, _) in enumerate(recent, len(cohort.index)):
            groups.setdefault(round, []).append(row)
        return list(groups.values()), [client for _, client in recent]

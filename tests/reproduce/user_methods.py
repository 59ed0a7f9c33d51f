"""A user's own methods: one that works, one that breaks, one that leaves the finite numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedrane import tree
from fedrane.algorithm import Algorithm
from fedrane.task import Client, State, Task


@dataclass(frozen=True)
class Plain(Algorithm):
    """FedAvg under another name."""


@dataclass(frozen=True)
class Broken(Algorithm):
    """Not a method: its second round fails."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        if int(cohort.round[0]) == 2:
            raise ZeroDivisionError("nobody is\nleft")
        return super().aggregate(task, server, ups, cohort)


@dataclass(frozen=True)
class Exploding(Algorithm):
    """Not a method: its model grows beyond all numbers."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        state, record = super().aggregate(task, server, ups, cohort)
        return tree.scale(state, 1e39), record

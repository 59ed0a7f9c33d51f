"""A user's file: a method with a state and a post-training stage, and a network."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedrane import tree
from fedrane.algorithm import Algorithm
from fedrane.task import Client, Roster, State, Task


@dataclass(frozen=True)
class Plain(Algorithm):
    """FedAvg, which a test can hold up in the middle of a round."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        gate = Path(os.environ.get("FEDRANE_TEST_GATE", "/nowhere"))
        while gate.exists() and gate.read_text() == str(int(cohort.round[0])):
            gate.with_suffix(".reached").touch()
            time.sleep(0.005)
        return super().aggregate(task, server, ups, cohort)


@dataclass(frozen=True)
class Gliding(Plain):
    """FedAvg whose server moves on with momentum, and one round of plain FedAvg at the end."""

    glide: float = 0.5

    def init(self, task: Task, roster: Roster) -> State:
        model = task.init()
        return State(
            model, {"velocity": tree.zeros_like(model.params), "log": {"length": torch.zeros(()), "empty": {}}}
        )

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        aggregated, record = super().aggregate(task, server, ups, cohort)
        step = tree.sub(aggregated.model.params, server.model.params)
        velocity = tree.add(tree.scale(server.extra["velocity"], self.glide), step)
        length = tree.norm(velocity)
        params = tree.add(server.model.params, tree.scale(velocity, 1 / (1 + length)))
        extra = {"velocity": velocity, "log": {"length": length, "empty": {}}}
        return State(aggregated.model._replace(params=params), extra), {**record, "length": float(length)}

    def post_training(self) -> tuple[Algorithm, ...]:
        return (Algorithm(),)


@dataclass(frozen=True)
class Forgetful(Algorithm):
    """Not a method: it draws from the global random numbers."""

    def aggregate(self, task: Task, server: State, ups: State, cohort: Client) -> tuple[State, dict[str, Any]]:
        aggregated, record = super().aggregate(task, server, ups, cohort)
        return tree.scale(aggregated, 1 + 0.1 * float(torch.rand(()))), record


class Small(nn.Module):
    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(torch.Size(shape).numel(), 12)
        self.classifier = nn.Linear(12, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.tanh(self.hidden(x.flatten(1))))


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Small(shape, classes)

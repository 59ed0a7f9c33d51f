"""This library, as it comes: ``engine=auto``, float32."""

from __future__ import annotations

from typing import Any

import _job
from _problems import experiment

import fedrane
from fedrane.data.dataset import Dataset
from fedrane.training.callbacks import Callback


class Rounds(Callback):
    def __init__(self) -> None:
        self.clock = _job.Clock()
        self.records: list[Any] = []

    def round(self, record: Any) -> None:
        self.clock()
        self.records.append(record)


def run(job: _job.Job, path: str) -> dict[str, Any]:
    parts = (each.numpy() for each in (job.pixels, job.y, job.test_pixels, job.test_y))
    dataset = Dataset("job", *parts, tuple("abcdefghij"), *(tuple(each.tolist()) for each in (job.mean, job.std)))
    settings = {"rounds": job.rounds, "epochs": job.epochs, "batch": job.batch, "lr": job.lr}
    rounds = Rounds()
    rounds.clock()
    result = fedrane.run(
        experiment("fmnist", "fedavg", precision="float32", device="cpu", **settings),
        dataset=dataset,
        callbacks=[rounds],
    )
    federation = result.federation
    for numbers, expected in zip(federation.split.train, job.clients, strict=True):
        if sorted(numbers.tolist()) != expected.tolist():
            raise SystemExit("the clients have other examples")
    everyone = list(range(len(job.clients)))
    planned = [federation.batches(number, everyone, job.epochs) for number in range(job.rounds)]
    return {
        "marks": rounds.clock.marks,
        "sizes": [len(numbers) for numbers in federation.split.train],
        "parameters": sum(value.numel() for value in result.server.model.params.values()),
        "steps": sum(len(each.keys) for one in planned for each in one.values()),
        "examples": sum(round(record["samples_per_second"] * record["seconds"]) for record in rounds.records),
        "accuracy": rounds.records[-1]["global/accuracy"],
    }


if __name__ == "__main__":
    _job.main(run, "fedrane")

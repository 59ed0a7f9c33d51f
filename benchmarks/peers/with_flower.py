"""Flower's FedAvg strategy in its simulation, one process of one thread per core. The local loop is its user's."""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any

import _job
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "FLWR_TELEMETRY_ENABLED": "0"}


def client_app(path: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        job, k = _job.read(path), int(context.node_config["partition-id"])
        network = _job.Network()
        network.load_state_dict(message.content["arrays"].to_torch_state_dict())
        before, began = _job.done.copy(), time.process_time()
        _job.train(network, job, k)
        numbers = {"num-examples": len(job.clients[k]), "client": k, "threads": torch.get_num_threads()}
        numbers |= {"processor": time.process_time() - began, **(_job.done - before)}
        content = RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": MetricRecord(numbers)})
        return Message(content, reply_to=message)

    return app


def run(job: _job.Job, path: str) -> dict[str, Any]:
    app, clock, network = ServerApp(), _job.Clock(), job.network()
    done, sizes, threads = Counter[str](), {}, set()
    processor = [0.0]

    def count(replies: list[RecordDict], weighted_by: str) -> MetricRecord:
        for reply in replies:
            numbers = reply["metrics"]
            sizes[numbers["client"]] = numbers["num-examples"]
            threads.add(numbers["threads"])
            processor.append(numbers["processor"])
            done.update(steps=numbers["steps"], examples=numbers["examples"])
        return MetricRecord()

    def mark(number: int, arrays: ArrayRecord) -> None:
        clock(sum(processor))

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        everyone = len(job.clients)
        strategy = FedAvg(1.0, 0.0, everyone, 0, everyone, train_metrics_aggr_fn=count)
        first = ArrayRecord(network.state_dict())
        result = strategy.start(grid, first, job.rounds, train_config=ConfigRecord(), evaluate_fn=mark)
        network.load_state_dict(result.arrays.to_torch_state_dict())

    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(app, client_app(path), len(job.clients), backend_config=resources)
    return {
        "marks": clock.marks,
        "sizes": [sizes[k] for k in sorted(sizes)],
        "parameters": _job.parameters(network),
        **done,
        "threads": f"{max(threads)} in each of {os.cpu_count()} processes",
        "accuracy": _job.accuracy(network, job),
    }


if __name__ == "__main__":
    os.environ.update(ENVIRONMENT)
    _job.main(run, "flwr", "ray")

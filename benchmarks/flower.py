"""Seconds per round without the training itself: our FedAvg, and Flower's FedAvg strategy on the same nodes.

Both run in one simulation, on the same grid and processes, with the same network, examples and local steps. Training
is timed separately, by the local engine. Rounds of both alternate, and the median of each is given. Flower's grid polls
for replies ten times per second, ours a hundred times: Flower is timed as it is, and polling as often as ours.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from _harness import arguments, save
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app import Context as NodeContext
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg as FlowerFedAvg
from rich.console import Console
from rich.table import Table
from torch import nn

import fedrane
from fedrane import Experiment
from fedrane.engines.sequential import Sequential
from fedrane.flower import simulation
from fedrane.flower.client import client_app
from fedrane.methods.fedavg import FedAvg
from fedrane.task import Context, Model, State

PLAIN = "plain.pickle"
LR = 0.1


def network(width: int) -> Any:
    def build(shape: tuple[int, ...], classes: int) -> nn.Module:
        hidden = nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 256), nn.Tanh()
        return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(256, classes))

    return build


def both(scratch: Path) -> ClientApp:
    """A client that handles our messages, and those of Flower's strategy."""
    ours, app = client_app(simulation.SimulatedClients(scratch)), ClientApp()
    app.query()(ours)

    @app.train()
    def train(message: Message, context: NodeContext) -> Message:
        if "request" in message.content:
            return ours(message, context)
        federation = simulation._load(scratch / PLAIN)
        k, config = int(context.node_config["partition-id"]), message.content["config"]
        client = federation.client(k, config["server-round"], LR, 1)
        model = Model(message.content["arrays"].to_torch_state_dict(), {})
        ctx = Context(State(model, {}), State(Model({}, {}), {}), client)
        done = Sequential(FedAvg(), federation).train_client(ctx, k, config["server-round"], 1)
        examples = len(federation.split.train[k])
        metrics = MetricRecord({"num-examples": examples, "loss": float(done.metrics["loss"])})
        return Message(
            RecordDict({"arrays": ArrayRecord(dict(done.up.model.params)), "metrics": metrics}), reply_to=message
        )

    return app


def measure(width: int, clients: int, rounds: int) -> dict[str, Any]:
    experiment = Experiment(
        dataset="digits", clients=clients, rounds=1, epochs=1, batch=999, lr=LR, device="cpu", model_head="5"
    )
    result = fedrane.run(experiment, model=network(width))
    federation, server, everyone = result.federation, result.server, list(range(clients))
    alone = Sequential(FedAvg(), federation)
    seconds: dict[str, list[float]] = {"training": [], "ours": [], "flower": [], "flower_looking_as_often": []}
    logging.getLogger("flwr").setLevel(logging.ERROR)
    with simulation.Simulation(clients, app=both) as started:
        simulation._open.append(started)
        simulation._save(started.scratch / PLAIN, federation)
        engine = simulation.SimulationEngine(FedAvg(), federation)
        strategy = FlowerFedAvg(1.0, 0.0, clients, 0, clients)
        first, client_states = ArrayRecord(dict(server.model.params)), dict(result.client_states)
        usual = started.grid.pull_interval
        for round in range(rounds + 1):  # the first warms the processes up
            times = [time.perf_counter()]
            alone.train_round(server, {}, everyone, round, LR, 1)
            times.append(time.perf_counter())
            one = engine.train_round(server, client_states, everyone, round, LR, 1)
            server, _ = FedAvg().aggregate(federation.task, server, one.ups, one.cohort)
            client_states = dict(one.client_states)
            times.append(time.perf_counter())
            for interval in (usual, simulation.POLL_INTERVAL):
                started.grid.pull_interval = interval
                asked = strategy.configure_train(round, first, ConfigRecord(), started.grid)
                replies = started.grid.send_and_receive(asked, timeout=600)
                strategy.aggregate_train(round, replies)
                times.append(time.perf_counter())
            if round:
                for name, begin, end in zip(seconds, times, times[1:], strict=False):
                    seconds[name].append(end - begin)
        simulation._open.remove(started)
    median = {name: sorted(values)[len(values) // 2] for name, values in seconds.items()}
    # Clients train at the same time, in as many processes as there are cores.
    training = median["training"] / min(clients, os.cpu_count() or 1)
    size = sum(p.numel() * p.element_size() for p in server.model.params.values())
    row = {"width": width, "clients": clients, "rounds": rounds, "megabytes": size / 1e6, "training_s": training}
    row |= {f"{name}_s": median[name] - training for name in seconds if name != "training"}
    return row | {"flower_over_ours": row["flower_s"] / row["ours_s"]}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=31)
    given = parser.parse_args()
    results = []
    for width in (64, 4096):
        results.append(measure(width, 6, given.rounds))
    table = Table(
        "arrays", "clients", "training", "ours, beyond it", "Flower's FedAvg", "looking as often", "Flower / ours"
    )
    for row in results:
        table.add_row(
            f"{row['megabytes']:.2f} MB",
            str(row["clients"]),
            f"{row['training_s']:.3f} s",
            f"{row['ours_s']:.3f} s",
            f"{row['flower_s']:.3f} s",
            f"{row['flower_looking_as_often_s']:.3f} s",
            f"{row['flower_over_ours']:.2f}",
        )
    Console().print(table)
    save("flower", results, given.out)


if __name__ == "__main__":
    main()

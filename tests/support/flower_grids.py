"""A grid without processes: each message gets its reply at once, and may be tampered with on its way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from asserts import untimed
from fedrane import Experiment, Result, tree
from fedrane.flower import simulation
from fedrane.flower.client import client_app
from fedrane.flower.simulation import SimulatedClients
from fedrane.methods.apple import APPLE
from fedrane.training.setup import as_dataset, make_partition, resolve
from problems import quick


def small(**changes: Any) -> Experiment:
    """Six clients, three of them in a round."""
    settings = {"clients": 6, "rounds": 5, "participation": 0.5, "device": "cpu", "partition": {"alpha": 0.3}}
    return quick(**(settings | changes))


def federation_of(experiment: Experiment) -> Any:
    """A stand-in that has the number of nodes."""
    examples = as_dataset(experiment, None)
    experiment = resolve(experiment, examples, False, False)
    count = len(make_partition(experiment, examples).clients)
    return type("Few", (), {"population": count, "task": type("Cpu", (), {"device": type("D", (), {"type": "cpu"})})})


def as_over_flower(local: Result) -> list[dict[str, Any]]:
    """A local run's records, with what Flower must send beside: the first states that clients cannot work out.

    Only APPLE's are such: its newcomers start from the server's mix of all cores, which they would sum up in another
    order, and so a little differently, from the cores that come down. Before anybody has trained all cores are alike.
    """
    records, met = untimed(local.history), set[int]()
    for record in records:
        new = set(record["cohort"]) - met
        met |= new
        if isinstance(local.experiment.algorithm, APPLE) and record["round"] > 1:
            record["bytes_down"] += len(new) * tree.nbytes(local.server.model.params)
    return records


Change = Callable[[Message], Message | None]


class LoopGrid(Grid):
    """``down`` and ``up`` see each message on its way; what they give goes on, and nothing is a loss."""

    def __init__(
        self,
        app: ClientApp,
        nodes: Iterable[int],
        down: Change | None = None,
        up: Change | None = None,
        configs: dict[int, Any] | None = None,
        keys: dict[int, bytes] | None = None,
    ) -> None:
        self.configs, self.keys = dict(configs or {}), dict(keys or {})
        self.app, self.down, self.up = app, down or (lambda m: m), up or (lambda m: m)
        self.online = {1000 + 7 * k: k for k in nodes}
        self.contexts: dict[int, Context] = {}
        self.replies: dict[str, Message] = {}
        self.seen: list[Message] = []
        """Everything that travelled, both ways."""
        self._ids = itertools.count()
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1  # what Flower sets in its processes

    def join(self, client: int, node: int) -> None:
        self.online[node] = client

    def get_nodes(self) -> Iterable[NodeInfo]:
        return [NodeInfo(node_id=node, public_key=self.keys.get(k, b"")) for node, k in self.online.items()]

    def get_node_ids(self) -> Iterable[int]:
        return list(self.online)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        return [self._deliver(message) for message in messages]

    def _deliver(self, message: Message) -> str:
        name, node = f"m{next(self._ids)}", message.metadata.dst_node_id
        message.metadata.__dict__["_message_id"] = name
        arrived = self.down(message)
        if arrived is not None and node in self.online:
            client = self.online[node]
            config = self.configs.get(client, {"partition-id": client, "num-partitions": len(self.online)})
            context = self.contexts.setdefault(node, Context(1, node, config, RecordDict(), {}))
            reply = self.app(arrived, context)
            self.seen += [arrived, reply]
            changed = self.up(reply)
            if changed is not None:
                self.replies[name] = changed
        return name

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        there = [name for name in reversed(list(message_ids)) if name in self.replies]  # in another order than asked
        return [self.replies.pop(name) for name in there]

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any:
        return None

    def create_message(self, *args: Any, **more: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> Iterable[Message]:
        raise NotImplementedError


class Loop:
    """Stands for a simulation."""

    def __init__(self, scratch: Path, nodes: int, **tampering: Any) -> None:
        self.scratch, self.nodes = scratch, nodes
        self.grid = LoopGrid(client_app(SimulatedClients(scratch)), range(nodes), **tampering)

    def check(self) -> None: ...


@contextmanager
def looped(scratch: Path, nodes: int = 6, **tampering: Any) -> Iterator[Loop]:
    """Inside, runs with engine=flower use a grid without processes."""
    loop: Any = Loop(scratch, nodes, **tampering)
    simulation._open.append(loop)
    try:
        yield loop
    finally:
        simulation._open.remove(loop)


def trained(messages: Iterable[Message], message_type: str = "train") -> Iterator[Message]:
    return (m for m in messages if m.metadata.message_type == message_type)

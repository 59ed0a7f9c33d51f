"""A federation on one machine: Flower's own nodes in Ray's processes, and a server that can look into their folders.

Messages, codec and client code are those of a real federation. What a simulation adds is what no real server could do:
it hands the nodes their examples through a file, and reads the clients' states from their folders, so that a run's
metrics, checkpoints and models are those of a local run.
"""

from __future__ import annotations

import math
import os
import queue
import secrets
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context as NodeContext
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from fedrane import tree
from fedrane.algorithm import Algorithm
from fedrane.data.federation import Federation
from fedrane.data.sampling import Span
from fedrane.engines.base import Trained
from fedrane.engines.evaluation import Metrics
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError, FedraneError
from fedrane.flower.client import LocalClient, client_app, client_folder
from fedrane.flower.client_state import NEVER, ClientStateStore, SavedState
from fedrane.flower.engine import FlowerEngine
from fedrane.flower.messages import ClientRequest
from fedrane.flower.nodes import NodePool
from fedrane.system import ray_runtime
from fedrane.task import Model, State

FEDERATION = "federation.pickle"
POLL_INTERVAL = 0.01
"""Seconds between looks for replies, which cost next to nothing here."""
ENVIRONMENT = {**ray_runtime.ENVIRONMENT, "FLWR_TELEMETRY_ENABLED": "0"}


class SimulationError(FedraneError):
    """Flower's simulation has not started, or has ended too soon."""


# ---- the nodes


@dataclass(frozen=True)
class SimulatedClients:
    """Finds a node's client in the files that the simulation has written for it; they are of our own process, so
    trusted."""

    scratch: Path

    def identity(self, context: NodeContext, key: str) -> tuple[int, int]:
        client = int(context.node_config["partition-id"])
        split = _load(self.scratch / key / FEDERATION).split
        return client, sum(len(part[client]) for part in (split.train, split.validation, split.test))

    def client(self, context: NodeContext, request: ClientRequest) -> LocalClient:
        client = int(context.node_config["partition-id"])
        here = self.scratch / request.key
        federation: Federation = _load(here / FEDERATION)
        algorithm: Algorithm = _load(here / request.method_file)
        return LocalClient(client, algorithm, federation, _store(here, client, context.state, request.key))

    def sends_error_texts(self, context: NodeContext) -> bool:
        """Its server is its user."""
        return True

    def keep_models(
        self, client: LocalClient, request: ClientRequest, global_model: Model | None, personal: Model | None
    ) -> None:
        """The run has the models already."""


def _store(folder: Path, client: int, state: RecordDict, key: str) -> ClientStateStore:
    """It lasts as long as the simulation: nothing must outlive a power cut."""
    return ClientStateStore(client_folder(folder, client), state, key, durable=False)


@lru_cache(maxsize=8)
def _load(path: Path) -> Any:
    return ray_runtime.loads(path.read_bytes())


def _save(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(ray_runtime.dumps(value))


# ---- the grid


class Simulation:
    """Flower's simulation in the background, its grid in hand."""

    def __init__(self, nodes: int, cuda: bool = False, app: Callable[[Path], ClientApp] | None = None) -> None:
        self.nodes, self.cuda = nodes, cuda
        self._app = app or (lambda scratch: client_app(SimulatedClients(scratch)))
        self._grids: queue.Queue[Grid | BaseException] = queue.Queue()
        self._over = threading.Event()

    def __enter__(self) -> Simulation:
        self._scratch = tempfile.TemporaryDirectory(prefix="fedrane-", ignore_cleanup_errors=True)
        self.scratch = Path(self._scratch.name)
        self._thread = threading.Thread(target=self._run, name="flower", daemon=True)
        self._thread.start()
        self.grid = self._checked(self._grids.get())
        while len(list(self.grid.get_node_ids())) < self.nodes:  # Flower hands the grid out before it has its nodes
            with suppress(queue.Empty):
                self._checked(self._grids.get(timeout=0.05))
        return self

    def _checked(self, received: Grid | BaseException) -> Grid:
        if isinstance(received, BaseException):
            self.__exit__()
            raise SimulationError(f"Flower's simulation does not start: {received}") from received
        return received

    def check(self) -> None:
        """Raise unless it still runs."""
        if not self._thread.is_alive():
            received = None if self._grids.empty() else self._grids.get()
            cause = received if isinstance(received, BaseException) else None
            why = str(cause) if cause else "no reason is known"
            raise SimulationError("Flower's simulation has ended", why, "Go on from the last checkpoint") from cause

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()
        self._scratch.cleanup()

    def _run(self) -> None:
        app = ServerApp()

        @app.main()
        def main(grid: Grid, context: NodeContext) -> None:
            self._grids.put(grid)
            self._over.wait()

        workers = max(1, min(self.nodes, os.cpu_count() or 1))
        resources = {"num_cpus": 1, "num_gpus": 1 / workers if self.cuda else 0.0}
        ray = {"num_cpus": workers, **ray_runtime.LOGGING}
        backend: dict[str, Any] = {"init_args": ray, "client_resources": resources}
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            run_simulation(app, self._app(self.scratch), self.nodes, backend_config=backend)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the thread that waits must get it
            self._grids.put(error)


_open: list[Simulation] = []


@contextmanager
def simulation(federation: Federation) -> Iterator[Simulation]:
    """A simulation with a node for each client; inside another one of as many nodes, that one, which saves a start."""
    nodes = federation.population
    if _open and _open[-1].nodes == nodes:
        yield _open[-1]
        return
    with ray_runtime.quiet("flwr", "ray"), Simulation(nodes, federation.task.device.type == "cuda") as started:
        _open.append(started)
        try:
            yield started
        finally:
            _open.remove(started)


# ---- the engine


@dataclass
class SimulatedStates:
    """The clients' states, in folders that a simulation's server can read; what a run already holds is put there
    first."""

    folder: Path
    key: str
    device: torch.device
    _last: dict[int, tuple[int, State]] = field(default_factory=dict)
    """The round aggregated last of each client, and its state then."""

    def aggregated(self, client: int, client_state: State | None, round: int) -> int:
        if client_state is None:
            return NEVER
        last, held = self._last.get(client, (NEVER, None))
        if held is None or not _same(held, client_state):
            last = round - 1  # of a run that was resumed: its state goes where the client looks for it
            self._store(client).put(last, SavedState(tree.map(lambda leaf: leaf.cpu(), client_state), {}))
            self._last[client] = last, client_state
        return last

    def committed(self, client: int, round: int) -> State:
        saved = self._store(client).committed(round, round)
        assert saved is not None  # noqa: S101 - it gives the copy of a round or raises
        client_state = tree.map(lambda leaf: leaf.to(self.device), saved.client_state)
        self._last[client] = round, client_state
        return client_state

    def _store(self, client: int) -> ClientStateStore:
        return _store(self.folder, client, RecordDict(), self.key)


def _same(a: State, b: State) -> bool:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=False)
    return len(tree.leaves(a)) == len(tree.leaves(b)) and all(x is y for x, y in pairs)


class SimulationEngine:
    """Trains in the nodes of a simulation. It evaluates here, where all clients' models and examples are."""

    def __init__(self, algorithm: Algorithm, federation: Federation, bf16: bool = False) -> None:
        self.algorithm, self.federation, self.bf16 = algorithm, federation, bf16
        self.local = Sequential(algorithm, federation)
        self._nodes: FlowerEngine | None = None

    def train_round(
        self,
        server: State,
        client_states: Mapping[int, State],
        clients: list[int],
        round: int,
        lr: float,
        epochs: Span,
        reduce: bool = False,
    ) -> Trained:
        if self._nodes is None:
            self._nodes = self._connect()
        messages: list[str] = []
        self._nodes.pool.log = messages.append
        trained = self._nodes.train_round(server, client_states, clients, round, lr, epochs)
        return trained._replace(messages=tuple(messages))

    def evaluate(self, server: State, client_states: Mapping[int, State], round: int) -> Metrics:
        return self.local.evaluate(server, client_states, round)

    def _connect(self) -> FlowerEngine:
        if not _open or _open[-1].nodes != self.federation.population:
            raise ConfigError(
                "engine=flower outside of a simulation", "its clients are nodes", "Run inside engines.opened(…)"
            )
        pool, states = _session(self.federation, _open[-1], self.bf16)
        method_file = f"{secrets.token_hex(8)}.pickle"
        _save(states.folder / method_file, self.algorithm)
        return FlowerEngine(self.algorithm, self.federation, pool, states, method_file)


def _session(federation: Federation, simulated: Simulation, bf16: bool) -> tuple[NodePool, SimulatedStates]:
    """One for all stages of a run, which share what the clients keep."""
    for known, grid, pool, states in _sessions:
        if known is federation and grid is simulated and pool.bf16 == bf16:
            return pool, states
    # Nodes that start slowly are not missing: whatever happens to them, Flower replies for them.
    pool = NodePool(
        simulated.grid,
        secrets.token_hex(16),
        bf16=bf16,
        query_timeout=math.inf,
        poll_interval=POLL_INTERVAL,
        check=simulated.check,
    )
    states = SimulatedStates(simulated.scratch / pool.key, pool.key, federation.task.device)
    _save(states.folder / FEDERATION, federation)
    _sessions[:] = [session for session in _sessions if session[1] in _open]  # those of closed simulations are over
    _sessions.append((federation, simulated, pool, states))
    return pool, states


_sessions: list[tuple[Federation, Simulation, NodePool, SimulatedStates]] = []

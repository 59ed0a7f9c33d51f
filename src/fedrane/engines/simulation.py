"""A federation on one machine: Flower's own nodes in Ray's processes, and a server that can look into their folders.

Messages, codec and client code are those of a real federation. What a simulation adds is what no real server could do:
it hands the nodes their rows through a file, and reads the clients' states from their folders, so that a run's metrics,
checkpoints and models are those of a local run.
"""

from __future__ import annotations

import logging
import math
import os
import queue
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context as NodeContext
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from numpy.typing import NDArray
from ray import cloudpickle

from fedrane import tree
from fedrane.algorithm import Algorithm
from fedrane.engines import Predicted, Trained
from fedrane.engines.flower import Fleet, Flower, Order, Site, client_app, where
from fedrane.engines.sequential import Sequential
from fedrane.engines.store import NEVER, Kept, Store
from fedrane.errors import ConfigError, FedraneError
from fedrane.federation import Federation, Pool
from fedrane.task import Model, State

FEDERATION = "federation.pickle"
PAUSE = 0.01
"""Seconds between looks for answers, which cost next to nothing here."""
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "FLWR_TELEMETRY_ENABLED": "0"}
"""Nothing is reported to anybody, and Ray does what it will do in future versions, of which it would warn."""


class SimulationError(FedraneError):
    """Flower's simulation has not started, or has ended too soon."""


# ---- the nodes


@dataclass(frozen=True)
class SimulatedHome:
    """A node's client is found in the files that the simulation has written for it; of our own process, so trusted."""

    scratch: Path

    def client(self, context: NodeContext, key: str) -> tuple[int, int]:
        client = int(context.node_config["partition-id"])
        return client, len(_load(self.scratch / key / FEDERATION).split.train[client])

    def site(self, context: NodeContext, order: Order) -> Site:
        client = int(context.node_config["partition-id"])
        here = self.scratch / order.key
        federation: Federation = _load(here / FEDERATION)
        algorithm: Algorithm = _load(here / order.stage)
        rows = len(federation.split.train[client])
        return Site(client, rows, algorithm, federation, _store(here, client, context.state, order.key))

    def conclude(self, site: Site, order: Order, whole: Model | None, personal: Model | None) -> None:
        """The run has the models already."""


def _store(folder: Path, client: int, state: RecordDict, key: str) -> Store:
    """It lasts as long as the simulation: nothing must outlive a power cut."""
    return Store(where(folder, client), state, key, durable=False)


@lru_cache(maxsize=8)
def _load(path: Path) -> Any:
    with path.open("rb") as file:
        return cloudpickle.load(file)


def _save(path: Path, value: Any) -> None:
    """By value where a node could not import it: what stands in a user's file."""
    pickle: Any = cloudpickle
    users = [module for name, module in list(sys.modules.items()) if name.startswith("fedrane_user_")]
    for module in users:
        pickle.register_pickle_by_value(module)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(value))
    finally:
        for module in users:
            pickle.unregister_pickle_by_value(module)


# ---- the grid


class Simulation:
    """Flower's simulation in the background, its grid in hand."""

    def __init__(self, nodes: int, cuda: bool = False, app: Callable[[Path], ClientApp] | None = None) -> None:
        self.nodes, self.cuda = nodes, cuda
        self._app = app or (lambda scratch: client_app(SimulatedHome(scratch)))
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

    def _checked(self, found: Grid | BaseException) -> Grid:
        if isinstance(found, BaseException):
            self.__exit__()
            raise SimulationError(f"Flower's simulation does not start: {found}") from found
        return found

    def check(self) -> None:
        """Whether it still runs."""
        if not self._thread.is_alive():
            found = None if self._grids.empty() else self._grids.get()
            cause = found if isinstance(found, BaseException) else None
            why = str(cause) if cause else "nothing says why"
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
        ray = {"num_cpus": workers, "logging_level": logging.ERROR, "log_to_driver": False}
        backend: dict[str, Any] = {"init_args": ray, "client_resources": resources}
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        try:
            run_simulation(app, self._app(self.scratch), self.nodes, backend_config=backend)
        except BaseException as error:  # noqa: BLE001 - whatever it is, the thread that waits must hear of it
            self._grids.put(error)


_open: list[Simulation] = []


@contextmanager
def simulation(federation: Federation) -> Iterator[Simulation]:
    """A simulation with a node for each client; inside another one of as many nodes, that one, which saves a start."""
    nodes = federation.population
    if _open and _open[-1].nodes == nodes:
        yield _open[-1]
        return
    with _quiet("flwr", "ray"), Simulation(nodes, federation.task.device.type == "cuda") as started:
        _open.append(started)
        try:
            yield started
        finally:
            _open.remove(started)


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Only errors: what a run says of itself is said by its callbacks."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


# ---- the engine


@dataclass
class SharedFolders:
    """The clients' folders, which a simulation's server can read; what a run already holds is laid there first."""

    folder: Path
    key: str
    device: torch.device
    _book: dict[int, tuple[int, State]] = field(default_factory=dict)

    def merged(self, client: int, own: State | None, round: int) -> int:
        if own is None:
            return NEVER
        last, held = self._book.get(client, (NEVER, None))
        if held is None or not _same(held, own):
            last = round - 1  # of a run that was resumed: its state goes where the client looks for it
            self._store(client).put(last, Kept(tree.map(lambda leaf: leaf.cpu(), own), {}))
            self._book[client] = last, own
        return last

    def kept(self, client: int, round: int) -> State:
        found = self._store(client).settle(round, round)
        assert found is not None  # noqa: S101 - settle gives the copy of a round or raises
        own = tree.map(lambda leaf: leaf.to(self.device), found.own)
        self._book[client] = round, own
        return own

    def _store(self, client: int) -> Store:
        return _store(self.folder, client, RecordDict(), self.key)


def _same(a: State, b: State) -> bool:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=False)
    return len(tree.leaves(a)) == len(tree.leaves(b)) and all(x is y for x, y in pairs)


class Simulated:
    """Training in the nodes; answers, which need every client's model, by the server, which has them."""

    def __init__(self, algorithm: Algorithm, federation: Federation, short: bool = False) -> None:
        self.algorithm, self.federation, self.short = algorithm, federation, short
        self.local = Sequential(algorithm, federation)
        self._engine: Flower | None = None

    def train(
        self, server: State, owns: Mapping[int, State], clients: list[int], round: int, rate: float, epochs: int
    ) -> Trained:
        if self._engine is None:
            self._engine = self._connect()
        heard: list[str] = []
        self._engine.fleet.tell = heard.append
        trained = self._engine.train(server, owns, clients, round, rate, epochs)
        return trained._replace(say=tuple(heard))

    def personal(self, server: State, own: State | None, client: int, round: int) -> Model:
        return self.local.personal(server, own, client, round)

    def predict(self, model: Model, pool: Pool, rows: NDArray[np.int64]) -> Predicted:
        return self.local.predict(model, pool, rows)

    def predict_each(self, models: list[Model], pool: Pool, rows: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        return self.local.predict_each(models, pool, rows)

    def _connect(self) -> Flower:
        if not _open or _open[-1].nodes != self.federation.population:
            raise ConfigError(
                "engine=flower outside of a simulation", "its clients are nodes", "Run inside engines.opened(…)"
            )
        fleet, folders = _session(self.federation, _open[-1], self.short)
        stage = f"{secrets.token_hex(8)}.pickle"
        _save(folders.folder / stage, self.algorithm)
        return Flower(self.algorithm, self.federation, fleet, folders, stage)


def _session(federation: Federation, simulated: Simulation, short: bool) -> tuple[Fleet, SharedFolders]:
    """One for all stages of a run, which share what the clients keep."""
    for known, grid, fleet, folders in _sessions:
        if known is federation and grid is simulated and fleet.short == short:
            return fleet, folders
    # Nodes that start slowly are not missing: whatever happens to them, Flower answers for them.
    fleet = Fleet(
        simulated.grid, secrets.token_hex(16), short=short, question=math.inf, pause=PAUSE, check=simulated.check
    )
    folders = SharedFolders(simulated.scratch / fleet.key, fleet.key, federation.task.device)
    _save(folders.folder / FEDERATION, federation)
    _sessions[:] = [session for session in _sessions if session[1] in _open]  # those of closed simulations are over
    _sessions.append((federation, simulated, fleet, folders))
    return fleet, folders


_sessions: list[tuple[Federation, Simulation, Fleet, SharedFolders]] = []

"""A federation of real machines as a Flower app: what its server and its clients do with Flower's grid and context.

The server knows the experiment, the form of the inputs and how many rows each client has. Rows, labels and what a
method keeps with its client never reach it.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Context as NodeContext
from flwr.app import RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedrane import data, own_code, sources
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.calibration import Calibration
from fedrane.data.own import as_inputs, read_labelled
from fedrane.data.partition import Split, split_client
from fedrane.engines import Engine
from fedrane.engines.flower import CONCLUDE, Fleet, Flower, Order, Site, client_app
from fedrane.engines.store import NEVER, Store
from fedrane.errors import CheckpointError, ConfigError, DataError, FedraneError
from fedrane.evaluation import Metrics, official, over_clients, overall, validation
from fedrane.experiment import REMOTE, Experiment, read_toml
from fedrane.federation import Federation, Normaliser, Pool, describe, each_of
from fedrane.files import write_atomically
from fedrane.report.style import describe_round
from fedrane.run import (
    OLDER,
    Callback,
    Result,
    _Loop,
    _Stage,
    algorithm_at,
    as_dataset,
    at_rest,
    automatic_precision,
    make_partition,
    make_task,
    pick_device,
)
from fedrane.task import Client, Model, State, Task
from fedrane.threads import limited
from fedrane.training import sessions
from fedrane.training.predictor import Inputs, Predictor
from fedrane.training.run_folder import KEPT, METADATA, Checkpoint, Folder, read, write

EXPERIMENT, INPUTS, FINAL = "experiment.toml", "inputs.json", "final.safetensors"
LOG = logging.getLogger("flwr")
Rows = tuple[NDArray[Any], NDArray[np.int64]]


class App(NamedTuple):
    """What every party of a federation has agreed on; it travels with the app's code."""

    experiment: Experiment
    inputs: Inputs

    @classmethod
    def read(cls, folder: Path) -> App:
        """What the experiment names is run: of an app that its user runs, or once that is known or trusted."""
        experiment = Experiment.from_toml(folder / EXPERIMENT)
        device = pick_device(experiment.device)
        precision = automatic_precision(experiment.precision, device)
        experiment = experiment.replace(device=str(device), precision=precision)
        return cls(experiment, Inputs.from_dict(Folder(folder).read_json(INPUTS), folder / INPUTS))

    def write(self, folder: Path) -> None:
        write_atomically(folder / EXPERIMENT, self.experiment.to_toml())
        write_atomically(folder / INPUTS, json.dumps(self.inputs.to_dict(), indent=1) + "\n")

    def task(self) -> Task:
        return make_task(self.experiment, self.inputs.shape, len(self.inputs.classes), None)

    def pool(self, x: NDArray[Any], y: NDArray[np.int64], task: Task) -> Pool:
        x = as_inputs(x, "the client's x") if len(x) else x  # an app's own reader may give fractions, or anything
        if tuple(x.shape[1:]) != self.inputs.shape:
            raise DataError(f"rows of shape {tuple(x.shape[1:])}", f"the federation's are {self.inputs.shape}")
        image = len(self.inputs.shape) == 3
        constants = Normaliser.from_constants(self.inputs.mean, self.inputs.std, image, task.dtype, task.device)
        return Pool.of(x, y, constants)

    def nothing(self, task: Task) -> Pool:
        kind = np.uint8 if len(self.inputs.shape) == 3 else np.float32
        return self.pool(np.zeros((0, *self.inputs.shape), kind), np.zeros(0, np.int64), task)


# ---- a client


RowsOf = Callable[[NodeContext, Experiment, Inputs], Rows]


def own_rows(context: NodeContext, experiment: Experiment, inputs: Inputs) -> Rows:
    """The rows in the file or folder that the node's own configuration names; in a simulation, a client's share.

    Nothing that the server says decides what is read.
    """
    if "data" in context.node_config:
        return read_labelled(str(context.node_config["data"]), inputs.classes, experiment.image_size)
    if "num-partitions" not in context.node_config:
        raise ConfigError(
            "this node has no data", "a client's rows come from its own machine", "--node-config 'data=\"PATH\" …'"
        )
    rows = as_dataset(experiment, None)
    mine = make_partition(experiment, rows).clients[_number(context)]
    return rows.x[mine], rows.y[mine]


def _number(context: NodeContext) -> int:
    number = context.node_config.get("partition-id")
    if type(number) is not int or number < 0:
        raise ConfigError(
            f"partition-id={number!r}", "it is this client's number, from 0", "--node-config 'partition-id=0 …'"
        )
    return number


def own_folder(context: NodeContext) -> Path:
    """Where this client keeps its state and its models."""
    default = Path.home() / ".fedrane" / f"client-{_number(context)}"
    return Path(str(context.node_config.get("folder", default))).expanduser()


def client(folder: Path, rows: RowsOf = own_rows) -> ClientApp:
    """The ClientApp of the app in this folder, for rows of this function."""
    return client_app(AppHome(folder, rows))


@dataclass
class AppHome:
    """A node's client: what the app says, and the rows that lie here."""

    folder: Path
    rows: RowsOf
    _app: App | None = None

    @property
    def app(self) -> App:
        if self._app is None:
            self._app = App.read(self.folder)
        return self._app

    def client(self, context: NodeContext, key: str) -> tuple[int, int]:
        y = self.rows(context, *self.app)[1]
        return _number(context), len(self._split(_number(context), len(y))[0])

    def site(self, context: NodeContext, order: Order) -> Site:
        app, number = self.app, _number(context)
        x, y = self.rows(context, *app)
        task = app.task()
        others = max(order.population, number + 1)
        parts = self._split(number, len(y))
        none = np.zeros(0, np.int64)
        split = Split(*(tuple(part if k == number else none for k in range(others)) for part in parts))
        pools, e = (app.pool(x, y, task), app.nothing(task)), app.experiment
        federation = Federation(task, *pools, split, order.batch, e.seed, e.augment)
        store = Store(own_folder(context), context.state, order.key)
        counts = bool(context.node_config.get("class-counts", False))
        algorithm, threads = algorithm_at(app.experiment, order.round), app.experiment.threads
        return Site(number, len(parts[0]), algorithm, federation, store, counts, threads)

    def conclude(self, site: Site, order: Order, whole: Model | None, personal: Model | None) -> None:
        nothing, folder = Model({}, {}), site.store.folder
        models = Checkpoint(order.round, State(whole or nothing, {}), {site.client: State(personal or nothing, {})})
        folder.mkdir(parents=True, exist_ok=True)
        self.app.write(folder)
        own_code.remember(self.app.experiment)  # its operator runs this app, and so may ask its models
        write(folder / FINAL, models)

    def _split(self, number: int, rows: int) -> tuple[NDArray[np.int64], ...]:
        e = self.app.experiment
        return split_client(np.arange(rows), number, e.seed, e.partition.test, e.validation)


def ended_last(folder: str | Path) -> Path:
    """Of the experiments in a client's folder, that one's own."""
    found = sorted(Path(folder).glob(f"*/{FINAL}"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise CheckpointError(
            f"{folder} holds no models", "a client gets them when the federation ends", "Name the client's folder"
        )
    return found[-1].parent


def models(folder: str | Path, *, trust_code: bool = False) -> dict[str, Predictor]:
    """The models in a client's folder, of the experiment that ended last: ``global`` and ``personal``.

    ``trust_code`` lets a method or network run that the folder names and you have not run before.
    """
    return left_behind(folder, trust_code)[1]


def left_behind(folder: str | Path, trust_code: bool = False) -> tuple[App, dict[str, Predictor]]:
    """What a federation has left in a client's folder: data, of which any may have been written by somebody else."""
    last = ended_last(folder)
    own_code.require_named(last, read_toml(last / EXPERIMENT), trust_code)
    app = App.read(last)
    app = app._replace(experiment=at_rest(app.experiment))
    kept = read(last / FINAL)
    algorithm, task = algorithm_at(app.experiment, kept.round), app.task()
    mine = next(iter(kept.owns.values()))
    held = {GLOBAL: kept.server.model, PERSONAL: mine.model}
    return app, {kind: Predictor(task, algorithm, model, app.inputs) for kind, model in held.items() if model.params}


# ---- the server


@dataclass(frozen=True, eq=False)
class Register(Federation):
    """Clients of whom the server knows how many rows they train on, and nothing else."""

    guests: dict[int, int] = field(default_factory=dict)
    """Rows of those who came after the roster was made."""

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """All rows of a client as if of one class: the others are not the server's to know."""
        return np.array([[len(rows)] for rows in self.split.train])

    def client(self, index: int, round: int, rate: float, epochs: int) -> Client:
        size = len(self.split.train[index]) if index < self.population else self.guests[index]
        steps = epochs * -(-size // self.batch)
        blank = np.zeros((self.population, self.task.classes), np.int64)
        who = each_of(describe(self.task, [0], blank, round, rate, [steps]))[0]
        return who._replace(index=torch.full_like(who.index, index), size=torch.full_like(who.size, size))


class Receipts:
    """The server keeps no client's state: only which of its uploads it has merged last."""

    def merged(self, client: int, own: State | None, round: int) -> int:
        return NEVER if own is None else int(own.extra["merged"])

    def kept(self, client: int, round: int) -> State:
        return State(Model({}, {}), {"merged": torch.tensor(round)})


class Log(Callback):
    """Flower's log, which ``flwr run --stream`` and ``flwr log`` show."""

    def round(self, record: Metrics) -> None:
        LOG.info("round %s: %s", record["round"], describe_round(record))

    def message(self, text: str) -> None:
        LOG.warning("%s", text)

    def end(self, result: Result) -> None:
        LOG.info("finished after round %s; results: %s", result.round, result.folder)


class RemoteLoop(_Loop):
    """The rounds of any run; clients train and evaluate where they are."""

    def __init__(self, app: App, federation: Federation, fleet: Fleet, folder: Folder) -> None:
        self.experiment, self.folder, self.callbacks, self.stop = app.experiment, folder, [Log()], lambda: False
        self.algorithm, self.inputs = app.experiment.algorithm, app.inputs
        self.task, self.federation, self.fleet = federation.task, federation, fleet
        self.history, self.owns = [], {}
        self._welcomed: set[int] = set()
        fleet.tell = self.tell

    def _calibrate(self, result: Result) -> dict[str, Calibration]:
        """The examples are with the clients."""
        return {}

    def _engine(self, algorithm: Algorithm) -> Engine:
        return Flower(algorithm, self.federation, self.fleet, Receipts())  # type: ignore[return-value]  # see _evaluate

    def _one_round(self, stage: _Stage) -> bool:
        stop = super()._one_round(stage)
        self.fleet.find()
        new = {k for k in self.fleet.nodes if k >= self.federation.population} - self._welcomed
        self._welcomed |= new
        self.welcome(sorted(new), wait=False)
        return stop

    def _evaluate(self, stage: _Stage) -> Metrics:
        """Every client counts its own hits; the server adds them up."""
        engine: Flower = stage.engine  # type: ignore[assignment]  # made above
        everyone = list(range(self.federation.population))
        answers, refused = engine.evaluate(self.server, self.owns, everyone, stage.round)
        metrics: Metrics = {"unevaluated": sorted(refused)} if refused else {}
        for k, why in sorted(refused.items()):
            self.tell(f"round {stage.round}: client {k} is not evaluated: {why}")
        held = {}
        for kind, tallies in answers.items():
            tested = [parts[0] for parts in tallies.values()]
            held[kind] = [parts[1] for parts in tallies.values() if len(parts) > 1]
            if kind == GLOBAL and len(self.federation.test):
                model = stage.algorithm.global_model(self.task, self.server)
                metrics |= official(engine.local, self.federation, model)
            if kind == PERSONAL and tested:
                metrics |= overall(PERSONAL, tested)
            if tested:
                metrics |= over_clients("global/local_" if kind == GLOBAL else "personal/", tested)
        return metrics | validation(held)

    def welcome(self, clients: list[int], wait: bool = True) -> None:
        """The model as it is, for these clients to keep: the run's own, or guests, who begin from it."""
        federation: Register = self.federation  # type: ignore[assignment]  # this loop has no other
        guests = [k for k in clients if k >= federation.population]
        federation.guests.update({k: self.fleet.sizes[k] for k in guests})
        if not clients:
            return
        done = self.done()
        algorithm = algorithm_at(self.experiment, done)
        engine = Flower(algorithm, federation, self.fleet, Receipts())
        epochs = algorithm.local_epochs(self.experiment.epochs)
        letters = engine.letters(self.server, self.owns, done, self._rate(max(done, 1)), epochs)
        orders: dict[int, RecordDict] = {}
        for k in clients:
            try:
                orders[k] = letters.evaluate(k)
            except IndexError:  # the method keeps something for each client by its number
                if k not in guests:
                    raise
                self.tell(f"client {k} came after the start: this method has nothing for it before the next run")
        if wait:
            _, refused = self.fleet.ask(CONCLUDE, orders, lambda k, content: True)
            for k, why in sorted(refused.items()):
                self.tell(f"client {k} has not got the model: {why}")
        elif orders:
            self.fleet.push(CONCLUDE, orders)
            self.tell(f"client {', '.join(map(str, orders))} came after the start: it is given round {done}'s model")


class Settings(NamedTuple):
    """The app's run configuration; how the federation is run, and nothing that decides its result."""

    out: str = "runs/federation"
    timeout: float = 3600.0
    minimum: int = 1
    retries: int = 3
    wait: float = 600.0
    test_data: str = ""
    short: bool = False

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> Settings:
        given = {key.replace("-", "_"): value for key, value in config.items()}
        unknown = given.keys() - cls._field_defaults.keys()
        if unknown:
            raise ConfigError(f"run configuration {', '.join(sorted(unknown))}", "nothing is known by that name")
        kinds = {name: type(value) for name, value in cls._field_defaults.items()}
        return cls(**{name: kinds[name](value) for name, value in given.items()})


def server(folder: Path) -> ServerApp:
    """The ServerApp of the app in this folder."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: NodeContext) -> None:
        serve(App.read(folder), Settings.read(context.run_config), grid)

    return app


def serve(app: App, settings: Settings, grid: Grid) -> None:
    """A run from its start, or from its last checkpoint; a finished one hands its models out to who has come."""
    folder = Folder(Path(settings.out).expanduser().absolute())
    experiment = _served(app.experiment)
    app = app._replace(experiment=experiment)
    fleet = Fleet(
        grid,
        secrets.token_hex(16),
        timeout=settings.timeout,
        minimum=settings.minimum,
        retries=settings.retries,
        short=settings.short,
        history=KEPT * experiment.checkpoint_every,
        pause=0.5,
        tell=lambda text: LOG.warning("%s", text),
    )
    fresh = not folder.holds_run()
    cleanup = ExitStack()
    cleanup.callback(folder.close)
    cleanup.enter_context(limited(1))
    try:
        facts = _begin(app, folder, fleet, settings.wait) if fresh else _continue(app, folder, fleet)
        loop = RemoteLoop(app, _register(app, settings, facts["labels"]), fleet, folder)
        done = folder.finished
        checkpoint, problems = folder.newest(loop.task.device) if not fresh else (None, [])
        for problem in problems:
            loop.tell(f"{problem} {OLDER}")
        history = folder.cut_metrics(checkpoint.round if checkpoint else 0) if not fresh else []
        if done and checkpoint:
            loop.server, loop.owns, loop.history = checkpoint.server, dict(checkpoint.owns), history
            LOG.info("the run in %s is finished: its model is handed out", folder.path)
        else:
            earlier = [] if fresh else sessions.read(folder)
            loop.history = history
            with sessions.recorded(folder, earlier, sessions.describe(experiment, loop.done()), loop.done):
                loop.go(checkpoint, history)
        fleet.find()
        loop.welcome(sorted(fleet.nodes))
    except FedraneError as error:
        LOG.error("%s", error)
        raise
    finally:
        cleanup.close()


def _served(experiment: Experiment) -> Experiment:
    """As the server's folder has it: its own arithmetic is merging, for which one thread is enough on any machine."""
    return experiment.replace(engine=REMOTE, threads=experiment.threads or 1)


def _begin(app: App, folder: Folder, fleet: Fleet, wait: float) -> dict[str, Any]:
    """A first question to every node makes the roster: who is there, with how many rows."""
    everyone = set(range(app.experiment.clients))
    end = time.monotonic() + wait
    fleet.timeout, timeout = min(fleet.timeout, wait), fleet.timeout
    while True:
        fleet.find()
        missing = sorted(everyone - fleet.sizes.keys())
        if not missing:
            break
        if time.monotonic() > end:
            raise ConfigError(
                f"client {', '.join(map(str, missing))} has not come within {wait:g} s",
                f"the experiment has {len(everyone)} clients, and all are known before the first round",
                "Start their SuperNodes, or set clients in experiment.toml",
            )
        time.sleep(1)
    fleet.timeout = timeout
    folder.create()
    sizes = [fleet.sizes[k] for k in sorted(everyone)]
    facts = {"inputs": app.inputs.to_dict(), "labels": [[n] for n in sizes], "key": fleet.key, "life": fleet.life}
    facts["sources"] = _code(app)
    own_code.remember(app.experiment)
    own_code.keep(app.experiment, folder)
    folder.write_json(METADATA, facts)
    folder.write_config(app.experiment)
    return facts


def _code(app: App) -> dict[str, str]:
    """Digests of the method's and the network's own files; the data are not the server's to know."""
    return {key: found for key, found in sources.contents(app.experiment).items() if key in own_code.KEYS}


def _continue(app: App, folder: Folder, fleet: Fleet) -> dict[str, Any]:
    folder.open()
    facts = folder.read_metadata()
    elsewhere = "Choose another folder: flwr run --run-config 'out=\"…\"'"
    if changed := sources.changed(facts.get("sources", {}), _code(app)):
        files = " and ".join(str(sources.own_files(app.experiment)[key]) for key in changed)
        raise CheckpointError(f"{files} changed since the run in {folder.path} began", "it would be another", elsewhere)
    own_code.remember(app.experiment)
    with own_code.opened(folder) as experiment:
        if _served(experiment).to_dict() != app.experiment.to_dict():
            raise ConfigError(
                f"{folder.path} holds a run of another experiment",
                f"its config.toml differs from the app's {EXPERIMENT}",
                elsewhere,
            )
    if not isinstance(facts.get("key"), str) or not isinstance(facts.get("life"), int):
        raise CheckpointError(
            f"{folder.path / METADATA} is not that of a federation", "it has no key and life", elsewhere
        )
    facts["life"] += 1
    folder.write_json(METADATA, facts)
    fleet.key, fleet.life = facts["key"], facts["life"]
    fleet.sizes = {k: row[0] for k, row in enumerate(facts["labels"])}
    return facts


def _register(app: App, settings: Settings, labels: list[list[int]]) -> Register:
    task, sizes = app.task(), [row[0] for row in labels]
    test = app.nothing(task)
    if settings.test_data:
        rows = data.load(settings.test_data, app.experiment.data_root or None, app.experiment.image_size)
        places = {name: place for place, name in enumerate(app.inputs.classes)}
        if not set(rows.classes) <= places.keys():
            raise DataError(f"{settings.test_data} has classes {rows.classes}", f"they are {app.inputs.classes}")
        test = app.pool(rows.x_test, np.array([places[rows.classes[y]] for y in rows.y_test]), task)
    train = tuple(np.broadcast_to(np.int64(0), n) for n in sizes)
    split = Split(train, (), ())
    batch = min(app.experiment.batch, max(sizes))
    return Register(task, app.nothing(task), test, split, batch, app.experiment.seed)

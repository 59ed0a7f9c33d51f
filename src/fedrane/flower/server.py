"""The server of a federation of real machines: the training loop of any run, with clients that are nodes of a grid.

The server knows the experiment, the form of the inputs and how many examples each client has. Examples, labels and what
a method keeps with its client never reach it.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from flwr.app import RecordDict
from flwr.serverapp import Grid

from fedrane import data
from fedrane.config import sources
from fedrane.data.dataset import Dataset
from fedrane.data.partition import Split, split_sizes
from fedrane.data.tabular import is_table, read_table
from fedrane.data.text import from_text, is_text
from fedrane.engines.evaluation import Metrics
from fedrane.errors import CheckpointError, ConfigError, DataError, FedraneError
from fedrane.experiment import Experiment
from fedrane.flower.engine import MessageBuilder
from fedrane.flower.messages import DELIVER
from fedrane.flower.nodes import NodePool
from fedrane.flower.project import EXPERIMENT, AppConfig
from fedrane.flower.remote import RemoteFederation, make_engine
from fedrane.flower.roster import ROSTER, Roster
from fedrane.ops.attack import Attack
from fedrane.system import named_code
from fedrane.system.files import user_path
from fedrane.system.threads import limited
from fedrane.training import digests, sessions, user_code
from fedrane.training.callbacks import Callback
from fedrane.training.loop import TrainingLoop
from fedrane.training.result import Result
from fedrane.training.resume import OLDER
from fedrane.training.run_folder import KEPT, METADATA, Folder
from fedrane.training.setup import algorithm_at
from fedrane.training.wording import describe_round

LOG = logging.getLogger("flwr")


class ServerSettings(NamedTuple):
    """The app's run configuration: how the federation is run, and nothing that decides its result."""

    out: str = "runs/federation"
    timeout: float = 3600.0
    min_replies: int = 1
    retries: int = 3
    wait: float = 600.0
    min_clients: int = 0
    """The fewest clients that the run starts with, after ``wait``; 0 means all."""
    test_data: str = ""
    bf16: bool = False
    roster: str = ROSTER
    """A file in the app, or on the server's machine; empty for none."""

    @classmethod
    def read(cls, config: Mapping[str, Any]) -> ServerSettings:
        given = {key.replace("-", "_"): value for key, value in config.items()}
        unknown = given.keys() - cls._field_defaults.keys()
        if unknown:
            raise ConfigError(f"run configuration {', '.join(sorted(unknown))}", "nothing is known by that name")
        types = {name: type(value) for name, value in cls._field_defaults.items()}
        return cls(**{name: types[name](value) for name, value in given.items()})


class FlowerLog(Callback):
    """Writes to Flower's log, which ``flwr run --stream`` and ``flwr log`` show."""

    def round(self, record: Metrics) -> None:
        LOG.info("round %s: %s", record["round"], describe_round(record))

    def message(self, text: str) -> None:
        LOG.warning("%s", text)

    def end(self, result: Result) -> None:
        LOG.info("finished after round %s; results: %s", result.round, result.folder)


class ModelDelivery(Callback):
    """Sends clients the current model, to keep: after each round those who came after the start, who begin from it."""

    def __init__(self, loop: TrainingLoop, federation: RemoteFederation) -> None:
        self.loop, self.federation, self.pool = loop, federation, federation.pool
        self._served: set[int] = set()

    def round(self, record: Metrics) -> None:
        self.pool.discover()
        new = {k for k in self.pool.nodes if not self.federation.takes_part(k)} - self._served
        self._served |= new
        requests = self._requests(sorted(new))
        if requests:
            self.pool.send(DELIVER, requests)
            late = ", ".join(map(str, requests))
            self.loop.message(f"client {late} came after the start: it is given round {self.loop.done()}'s model")

    def to_all(self) -> None:
        """To every client that is connected; wait until they have it."""
        self.pool.discover()
        _, refused = self.pool.request(DELIVER, self._requests(sorted(self.pool.nodes)), lambda k, content: True)
        for k, why in sorted(refused.items()):
            self.loop.message(f"client {k} has not got the model: {why}")

    def _requests(self, clients: list[int]) -> dict[int, RecordDict]:
        if not clients:
            return {}
        loop = self.loop
        late = [k for k in clients if not self.federation.takes_part(k)]
        self.federation.late_clients.update({k: _split(loop.experiment, self.pool.sizes[k])[0] for k in late})
        done = loop.done()
        algorithm = algorithm_at(loop.experiment, done)
        engine = make_engine(algorithm, self.federation)
        lr, epochs = loop.lr_of(max(done, 1)), algorithm.local_epochs(loop.experiment.length)
        messages = MessageBuilder(engine, loop.server, loop.client_states, done, lr, epochs)
        requests: dict[int, RecordDict] = {}
        for k in clients:
            try:
                requests[k] = messages.evaluate(k)
            except IndexError:  # the method keeps something for each client by its number
                if k not in late:
                    raise
                loop.message(f"client {k} came after the start: this method has nothing for it before the next run")
        return requests


def serve(config: AppConfig, settings: ServerSettings, grid: Grid, roster: Roster | None = None) -> None:
    """A run from its start or its last checkpoint; a finished one sends its models to the clients that are there."""
    folder = Folder(user_path(settings.out).absolute())
    experiment = _deployed(config.experiment)
    config = config._replace(experiment=experiment)
    pool = NodePool(
        grid,
        secrets.token_hex(16),
        timeout=settings.timeout,
        min_replies=settings.min_replies,
        retries=settings.retries,
        bf16=settings.bf16,
        rounds_back=KEPT * experiment.checkpoint_every,
        poll_interval=0.5,
        one_by_one=True,
        roster=roster,
        log=lambda text: LOG.warning("%s", text),
    )
    fresh = not folder.holds_run()
    cleanup = ExitStack()
    cleanup.callback(folder.close)
    cleanup.enter_context(limited(1))
    try:
        if roster is None:
            LOG.warning("There is no roster: which client a node is, and how many examples it has, are believed")
        else:
            roster.require_complete(experiment.clients)
        metadata = _start(config, folder, pool, settings) if fresh else _restart(config, folder, pool)
        federation = _federation(config, settings, metadata["examples"], pool)
        # The examples are with the clients, and so the models are not calibrated.
        loop = TrainingLoop(experiment, federation, config.inputs, folder, [FlowerLog()], calibrates=False)
        pool.log = loop.message
        delivery = ModelDelivery(loop, federation)
        loop.callbacks.append(delivery)
        finished = folder.finished
        checkpoint, problems = folder.newest(federation.task.device) if not fresh else (None, [])
        for problem in problems:
            loop.message(f"{problem} {OLDER}")
        history = folder.cut_metrics(checkpoint.round if checkpoint else 0) if not fresh else []
        if checkpoint:
            loop.restore(checkpoint, history)
        if finished and checkpoint:
            LOG.info("the run in %s is finished: its model is sent to the clients", folder.path)
        else:
            earlier = [] if fresh else sessions.read(folder)
            with sessions.recorded(folder, earlier, sessions.describe(experiment, loop.done()), loop.done):
                loop.run()
        delivery.to_all()
    except FedraneError as error:
        LOG.error("%s", error)
        raise
    finally:
        cleanup.close()


def _deployed(experiment: Experiment) -> Experiment:
    """As the server's folder has it: it only aggregates, for which one thread is enough on any machine."""
    if experiment.attack.kind != Attack.kind:
        raise ConfigError(
            f"attack.kind={experiment.attack.kind}",
            "hostile clients are simulated, and those of a federation are real",
            "Remove it from experiment.toml",
        )
    if experiment.skew.on:
        raise ConfigError(
            f"{experiment.skew}",
            "feature skew is simulated, and the examples of a federation's clients are as they are",
            "Remove [skew] from experiment.toml",
        )
    return experiment.replace(engine="flower-remote", threads=experiment.threads or 1)


def _start(config: AppConfig, folder: Folder, pool: NodePool, settings: ServerSettings) -> dict[str, Any]:
    """Wait for the clients; their first reply has the number of their examples."""
    everyone, wait = set(range(config.experiment.clients)), settings.wait
    end = time.monotonic() + wait
    pool.timeout, timeout = min(pool.timeout, wait), pool.timeout
    while True:
        pool.discover()
        missing = sorted(everyone - pool.sizes.keys())
        if not missing:
            break
        if time.monotonic() > end:
            absent = f"client {', '.join(map(str, missing))} has not come within {wait:g} s"
            if len(everyone) - len(missing) >= (settings.min_clients or len(everyone)):
                LOG.warning("%s: the run starts without", absent)
                break
            raise ConfigError(
                absent,
                f"the experiment has {len(everyone)} clients, and {settings.min_clients or 'all'} must have come",
                "Start their SuperNodes, and see the log for nodes that are not accepted; or set min-clients",
            )
        time.sleep(1)
    pool.timeout = timeout
    folder.create()
    examples = [pool.sizes.get(k, 0) for k in sorted(everyone)]
    metadata = {
        "inputs": config.inputs.to_dict(),
        "examples": examples,
        "labels": [[_split(config.experiment, n)[0]] for n in examples],
        "key": pool.key,
        "server_start": pool.server_start,
        **digests.identity(config.experiment, {"sources": _code_digests(config)}),
    }
    user_code.remember(config.experiment)
    user_code.keep(config.experiment, folder)
    folder.write_metadata(metadata)
    folder.write_config(config.experiment)
    return metadata


def _code_digests(config: AppConfig) -> dict[str, str]:
    """Of the method's and the network's own files; the server does not know the data."""
    return {key: value for key, value in sources.contents(config.experiment).items() if key in named_code.KEYS}


def _restart(config: AppConfig, folder: Folder, pool: NodePool) -> dict[str, Any]:
    folder.open()
    metadata = folder.read_metadata()
    elsewhere = "Choose another folder: flwr run --run-config 'out=\"…\"'"
    if changed := sources.changed(metadata.get("sources", {}), _code_digests(config)):
        files = " and ".join(str(sources.user_files(config.experiment)[key]) for key in changed)
        raise CheckpointError(f"{files} changed since the run in {folder.path} began", "it would be another", elsewhere)
    user_code.remember(config.experiment)
    with user_code.opened(folder) as experiment:
        if _deployed(experiment).to_dict() != config.experiment.to_dict():
            raise ConfigError(
                f"{folder.path} holds a run of another experiment",
                f"its config.toml differs from the app's {EXPERIMENT}",
                elsewhere,
            )
    kinds = {"key": str, "server_start": int, "examples": list}
    if missing := [name for name, kind in kinds.items() if not isinstance(metadata.get(name), kind)]:
        raise CheckpointError(
            f"{folder.path / METADATA} is not that of a federation", f"it has no {', '.join(missing)}", elsewhere
        )
    metadata["server_start"] += 1
    folder.write_metadata(metadata)
    pool.key, pool.server_start = metadata["key"], metadata["server_start"]
    pool.sizes = {k: n for k, n in enumerate(metadata["examples"]) if n}
    return metadata


def _split(experiment: Experiment, examples: int) -> tuple[int, int, int]:
    """How many examples a client trains, validates and tests with; none of a client that the run started without."""
    return split_sizes(examples, experiment.partition.test, experiment.validation) if examples else (0, 0, 0)


def _federation(config: AppConfig, settings: ServerSettings, examples: list[int], pool: NodePool) -> RemoteFederation:
    task, parts = config.task(), zip(*(_split(config.experiment, n) for n in examples), strict=True)
    test = config.empty_pool(task)
    if settings.test_data:
        dataset = _test_data(settings.test_data, config)
        if bool(dataset.classes) != bool(config.inputs.classes):
            raise DataError(f"{settings.test_data} is of another task", "either classes are predicted, or a number")
        index = {name: number for number, name in enumerate(config.inputs.classes)}
        if not set(dataset.classes) <= index.keys():
            raise DataError(f"{settings.test_data} has classes {dataset.classes}", f"they are {config.inputs.classes}")
        y = np.array([index[dataset.classes[y]] for y in dataset.y_test]) if index else dataset.y_test
        test = config.pool(dataset.x_test, y, task)
    # Their numbers are known, and nothing else of them.
    split = Split(*(tuple(np.broadcast_to(np.int64(0), n) for n in sizes) for sizes in parts))
    batch = min(config.experiment.batch, max(map(len, split.train)))
    return RemoteFederation(task, config.empty_pool(task), test, split, batch, config.experiment.seed, pool=pool)


def _test_data(name: str, config: AppConfig) -> Dataset:
    e, inputs = config.experiment, config.inputs
    if inputs.table and is_table(name):
        return read_table(name, e.table_options, inputs.table)
    if inputs.alphabet and is_text(name):
        return from_text(name, inputs.shape[0], inputs.alphabet)
    read = data.load(name, e.data_root or None, e.image_size, e.table_options, e.window)
    if read.alphabet != inputs.alphabet:
        raise DataError(f"{name} has other characters than the federation's text", "their numbers would differ")
    return read

"""A Flower app for real machines: its ServerApp, its ClientApp, and the models that a client keeps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context as NodeContext
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from numpy.typing import NDArray

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.data.federation import Federation
from fedrane.data.partition import Split, split_client
from fedrane.data.readers import read_labelled
from fedrane.data.text import is_text, read_text, windows
from fedrane.errors import CheckpointError, ConfigError
from fedrane.experiment import Experiment, read_toml
from fedrane.flower.client import LocalClient, client_app
from fedrane.flower.client_state import ClientStateStore
from fedrane.flower.messages import ClientRequest
from fedrane.flower.project import EXPERIMENT, AppConfig
from fedrane.flower.roster import Roster
from fedrane.flower.server import ServerSettings, serve
from fedrane.system import memory
from fedrane.system.files import private_folder, user_path
from fedrane.task import Model, State
from fedrane.training import user_code
from fedrane.training.predictor import Inputs, Predictor
from fedrane.training.run_folder import Checkpoint, read, write
from fedrane.training.setup import algorithm_at, as_dataset, at_rest, make_partition

FINAL = "final.safetensors"
Examples = tuple[NDArray[Any], NDArray[np.int64]]
ReadExamples = Callable[[NodeContext, Experiment, Inputs], Examples]


def server(folder: Path) -> ServerApp:
    """The ServerApp of the app in this folder."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: NodeContext) -> None:
        settings = ServerSettings.read(context.run_config)
        roster = Roster.read(folder / Path(settings.roster).expanduser()) if settings.roster else None
        serve(AppConfig.read(folder), settings, grid, roster)

    return app


# ---- a client


def node_examples(context: NodeContext, experiment: Experiment, inputs: Inputs) -> Examples:
    """The examples in the file or folder that the node's own configuration names; in a simulation, a client's share.

    Nothing that the server sends decides what is read.
    """
    if "data" in context.node_config:
        source = str(context.node_config["data"])
        if inputs.alphabet and is_text(source):
            (window,) = inputs.shape
            return windows(read_text(user_path(source), window), inputs.alphabet, window)
        return read_labelled(source, inputs.classes, experiment.image_size, inputs.table, inputs.vocabulary)
    if "num-partitions" not in context.node_config:
        raise ConfigError(
            "this node has no data", "a client's examples come from its own machine", "--node-config 'data=\"PATH\" …'"
        )
    examples = as_dataset(experiment, None)
    mine = make_partition(experiment, examples).clients[_client_index(context)]
    return examples.x[mine], examples.y[mine]


def _client_index(context: NodeContext) -> int:
    index = context.node_config.get("partition-id")
    if type(index) is not int or index < 0:
        raise ConfigError(
            f"partition-id={index!r}", "it is this client's number, from 0", "--node-config 'partition-id=0 …'"
        )
    return index


def node_folder(context: NodeContext) -> Path:
    """Where this node's client keeps its state and its models."""
    default = f"~/.fedrane/client-{_client_index(context)}"
    return user_path(str(context.node_config.get("folder", default)))


def client(folder: Path, examples: ReadExamples = node_examples) -> ClientApp:
    """The ClientApp of the app in this folder, for the examples that this function reads."""
    return client_app(AppClients(folder, examples))


@dataclass
class AppClients:
    """A node's client: by the app's configuration, and the examples on this machine."""

    folder: Path
    examples: ReadExamples

    @cached_property
    def config(self) -> AppConfig:
        return AppConfig.read(self.folder)

    def identity(self, context: NodeContext, key: str) -> tuple[int, int]:
        return _client_index(context), len(self.examples(context, *self.config)[1])

    def client(self, context: NodeContext, request: ClientRequest) -> LocalClient:
        config, e, index = self.config, self.config.experiment, _client_index(context)
        x, y = self.examples(context, *config)
        task = config.task()
        population = max(request.population, index + 1)
        per_client = 256 + 32 * len(config.inputs.classes)  # its parts of the data, and its row in the counts of labels
        memory.require(population * per_client, f"a federation of {population} clients, as the server says,")
        none = np.zeros(0, np.int64)
        parts = self._split(index, len(y))
        split = Split(*(tuple(part if k == index else none for k in range(population)) for part in parts))
        pools = config.pool(x, y, task), config.empty_pool(task)
        federation = Federation(task, *pools, split, request.batch, e.seed, e.augment)
        store = ClientStateStore(node_folder(context), context.state, request.key)
        reports_classes = bool(context.node_config.get("class-counts", False))
        return LocalClient(index, algorithm_at(e, request.round), federation, store, reports_classes, e.threads)

    def sends_error_texts(self, context: NodeContext) -> bool:
        return context.node_config.get("error-texts") is True

    def keep_models(
        self, client: LocalClient, request: ClientRequest, global_model: Model | None, personal: Model | None
    ) -> None:
        empty, folder = Model({}, {}), client.store.folder
        client_states = {client.index: State(personal or empty, {})}
        private_folder(folder)
        self.config.write(folder)
        user_code.remember(self.config.experiment)  # its operator runs this app, and so may use its models
        kept = Checkpoint(request.round, State(global_model or empty, {}), client_states)
        write(folder / FINAL, kept, private=True)

    def _split(self, index: int, size: int) -> tuple[NDArray[np.int64], ...]:
        e = self.config.experiment
        ordered = bool(self.config.inputs.alphabet)
        return split_client(np.arange(size), index, e.seed, e.partition.test, e.validation, ordered)


# ---- the models in a client's folder


def models(folder: str | Path, *, trust_code: bool = False) -> dict[str, Predictor]:
    """The models in a client's folder, of the experiment that ended last: ``global`` and ``personal``.

    ``trust_code`` lets a method or network run that the folder names and you have not run before.
    """
    return read_client_models(folder, trust_code)[1]


def read_client_models(folder: str | Path, trust_code: bool = False) -> tuple[AppConfig, dict[str, Predictor]]:
    """The models in a client's folder, with their app's configuration: data that somebody else may have written."""
    last = _newest(folder)
    user_code.require_named(last, read_toml(last / EXPERIMENT), trust_code)
    config = AppConfig.read(last)
    config = config._replace(experiment=at_rest(config.experiment))
    kept = read(last / FINAL)
    algorithm, task = algorithm_at(config.experiment, kept.round), config.task()
    mine = next(iter(kept.client_states.values()))
    held = {GLOBAL: kept.server.model, PERSONAL: mine.model}
    return config, {
        which: Predictor(task, algorithm, model, config.inputs) for which, model in held.items() if model.params
    }


def _newest(folder: str | Path) -> Path:
    """The folder of the experiment that ended last."""
    files = sorted(Path(folder).glob(f"*/{FINAL}"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise CheckpointError(
            f"{folder} holds no models", "a client gets them when the federation ends", "Name the client's folder"
        )
    return files[-1].parent

"""A Flower app on disk: the experiment and the form of the inputs, which all parties share, and the files around them.

It does not import Flower, which is an extra.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedrane.data.federation import Pool
from fedrane.data.readers import as_inputs
from fedrane.errors import DataError
from fedrane.experiment import Experiment
from fedrane.flower.roster import ROSTER, Entry, Roster
from fedrane.system.files import toml_value, write_atomically
from fedrane.task import Task
from fedrane.training.predictor import Inputs
from fedrane.training.run_folder import Folder
from fedrane.training.setup import automatic_precision, make_task, pick_device

EXPERIMENT, INPUTS = "experiment.toml", "inputs.json"


class AppConfig(NamedTuple):
    """What every party of a federation has agreed on; it travels with the app's code."""

    experiment: Experiment
    inputs: Inputs

    @classmethod
    def read(cls, folder: Path) -> AppConfig:
        """The code that the experiment names is run: call it for your own app, or once that code is trusted."""
        experiment = Experiment.from_toml(folder / EXPERIMENT)
        device = pick_device(experiment.device)
        precision = automatic_precision(experiment.precision, device)
        experiment = experiment.replace(device=str(device), precision=precision)
        return cls(experiment, Inputs.from_dict(Folder(folder).read_json(INPUTS), folder / INPUTS))

    def write(self, folder: Path) -> None:
        write_atomically(folder / EXPERIMENT, self.experiment.to_toml())
        write_atomically(folder / INPUTS, json.dumps(self.inputs.to_dict(), indent=1) + "\n")

    def task(self) -> Task:
        i = self.inputs
        return make_task(self.experiment, i.shape, i.classes, None, i.vocabulary, i.target)

    def pool(self, x: NDArray[Any], y: NDArray[Any], task: Task) -> Pool:
        if len(x):  # an app's own reader may give fractions, or anything
            x = as_inputs(x, "the client's x", self.inputs.vocabulary)
        if tuple(x.shape[1:]) != self.inputs.shape:
            raise DataError(f"examples of shape {tuple(x.shape[1:])}", f"the federation's are {self.inputs.shape}")
        return Pool.of(x, y, self.inputs.normaliser(task), task.target)

    def empty_pool(self, task: Task) -> Pool:
        dtype = np.uint8 if self.inputs.images else np.int64 if self.inputs.vocabulary else np.float32
        return self.pool(
            np.zeros((0, *self.inputs.shape), dtype), np.zeros(0, np.int64 if self.inputs.classes else np.float64), task
        )


def write_project(folder: Path, config: AppConfig) -> None:
    """An app that ``flwr run`` can run."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
    package = "app_" + name.replace("-", "_")
    method, clients = config.experiment.method_name, config.experiment.clients
    out = json.dumps(str(Path("runs") / name))[1:-1]
    description = toml_value(f"A federation: {method} on {clients} clients.")  # a path may have quotes
    contents = {
        "pyproject.toml": PYPROJECT.format(name=name, package=package, description=description, out=out, roster=ROSTER),
        f"{package}/__init__.py": "",
        f"{package}/server_app.py": SERVER,
        f"{package}/client_app.py": CLIENT,
        f"{package}/data.py": DATA,
    }
    for path, text in contents.items():
        write_atomically(folder / path, text)
    config.write(folder / package)
    Roster(dict.fromkeys(range(clients), Entry())).write(folder / package / ROSTER)


PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1.0.0"
description = {description}
license = "Apache-2.0"
requires-python = ">=3.11"
dependencies = ["fedrane[flower]"]

[tool.setuptools]
packages = ["{package}"]

[tool.flwr.app]
publisher = "fedrane"

[tool.flwr.app.components]
serverapp = "{package}.server_app:app"
clientapp = "{package}.client_app:app"

[tool.flwr.app.config]
# The run folder on the server's machine; a run that is there already is resumed.
out = "{out}"
# Seconds after which a round ends with the clients that have replied.
timeout = 3600.0
# The fewest replies that make a round; how often a round with fewer is repeated before the run stops.
min-replies = 1
retries = 3
# Seconds to wait for all clients before the first round.
wait = 600.0
# The fewest clients that the run starts with, once that time is over; 0 means all.
min-clients = 0
# Whose key is which client's: a file in the app's package, or on the server's machine; empty to believe all nodes.
roster = "{roster}"
# A dataset on the server's machine whose test examples measure the global model; empty for none.
test-data = ""
# Send bfloat16: half the bytes.
bf16 = false
"""

SERVER = '''\
"""The server: it aggregates what the clients send, and writes the run folder."""

from pathlib import Path

from fedrane.flower.app import server

app = server(Path(__file__).parent)
'''

CLIENT = '''\
"""A client: it trains on examples that never leave its machine."""

from pathlib import Path

from fedrane.flower.app import client

from .data import examples

app = client(Path(__file__).parent, examples)
'''

DATA = '''\
"""Where a client's examples come from; the server does not decide it."""

from fedrane.flower.app import node_examples


def examples(context, experiment, inputs):
    """This client's inputs and labels: arrays x (examples, …) as in an .npz file, and y (indices of inputs.classes, or
    the numbers to predict).

    As it stands: the CSV or .npz file or the folder of images that the node was started with, --node-config
    'data="PATH" …'; in a simulation, a share of the experiment's dataset. Replace it to read from elsewhere, a database
    for instance.
    """
    return node_examples(context, experiment, inputs)
'''

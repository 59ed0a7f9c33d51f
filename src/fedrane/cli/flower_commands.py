"""``fedrane flower …``: an app for a federation, certificates for a trial, and predictions with a client's models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from fedrane.cli.arguments import Force, Trust, Words, experiment_of, note
from fedrane.cli.console import write_line
from fedrane.config import effects
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment, read_toml
from fedrane.flower.certificates import DAYS, certificates
from fedrane.flower.project import EXPERIMENT, AppConfig, write_project
from fedrane.system.extras import require
from fedrane.system.files import clear_errors, private_folder, require_new, usable, write_atomically
from fedrane.training import user_code
from fedrane.training.predictor import Inputs, predict, read_named_inputs
from fedrane.training.setup import as_dataset, automatic_model, make_partition

flower_app = typer.Typer(help="Federations of several machines, with Flower.", no_args_is_help=True)
APP = "fedrane.flower.app"
"""It imports Flower, which is an extra."""
UNUSED = {"engine": "each client of a federation trains on its own machine"}
"""Settings of an experiment that have no effect in a federation, and why."""


def _require_empty(folder: Path, why: str) -> None:
    if usable(folder).exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", why, "Name a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", why, "Name another folder")


@flower_app.command("new")
def new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet, or is empty.")],
    words: Words = None,
) -> None:
    """Write a Flower app that runs an experiment: flwr run DIR.

    Only the form of the inputs (shape, classes, mean and deviation) is taken from the experiment's dataset: a small
    sample that is like the clients' examples will do.
    """
    require("flower", "fedrane flower new", APP)
    experiment = experiment_of(words)
    _require_empty(folder, "an app is written into a folder of its own")
    examples = as_dataset(experiment, None)
    resolved = experiment.replace(
        model=automatic_model(experiment.model, examples.shape),
        partition=experiment.partition.resolved(examples.client is not None),
    )
    experiment, unused = effects.settle(resolved.set_by(experiment.origin), UNUSED)
    note(unused)
    experiment.augment.check(examples.shape)
    experiment = experiment.replace(clients=len(make_partition(experiment, examples).clients))
    user_code.remember(experiment)
    write_project(folder, AppConfig(experiment, Inputs.of(examples)))
    write_line(f"{folder}: {experiment.method_name} for {experiment.clients} clients; how to run it: docs/deploy.md\n")


@flower_app.command("deal")
def deal_command(
    app: Annotated[Path, typer.Argument(metavar="APP", help="An app that 'fedrane flower new' has written.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write client-0.npz and so on.")],
    force: Force = False,
    trust_code: Trust = False,
) -> None:
    """For a trial: deal the experiment's dataset out into one file for each client, as a local run would."""
    require("flower", "fedrane flower deal", APP)
    files = list(app.glob(f"*/{EXPERIMENT}"))
    if len(files) != 1:
        raise ConfigError(f"{app} is not an app", f"it has no {EXPERIMENT}", "Write one: fedrane flower new DIR")
    user_code.require_named(files[0].parent, read_toml(files[0]), trust_code)
    experiment = Experiment.from_toml(files[0])
    dataset = as_dataset(experiment, None)
    partition = make_partition(experiment, dataset)
    files = [folder / f"client-{client}.npz" for client in range(len(partition.clients))]
    for file in files:
        require_new(file, force)
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, mine in zip(files, partition.clients, strict=True):
            np.savez(file, x=dataset.x[mine], y=dataset.y[mine])
    write_line(f"{folder}: the examples of {len(partition.clients)} clients\n")


@flower_app.command("certs")
def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address of the server; may be given several times.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", help="How many nodes get a key.", min=1, max=10_000)] = 3,
) -> None:
    """Make a CA, a certificate for the server and a key for each node: for a trial, for a month.

    In production, use certificates of your organisation's CA, and let each node make its own key:
    ssh-keygen -t ecdsa -b 384 -N "" -f node.
    """
    require("flower", "fedrane flower certs", "cryptography")
    _require_empty(folder, "keys in use would be overwritten")
    private_folder(folder)
    for path, (content, mode) in certificates(hosts or ["127.0.0.1", "localhost"], nodes).items():
        write_atomically(folder / path, content, mode)
    write_line(f"{folder}: ca.crt, server.pem, server.key and {nodes} node keys, for {DAYS} days\n")
    write_line(
        'For a trial only. In production: your own CA, and ssh-keygen -t ecdsa -b 384 -N "" -f node on each node\n'
    )


@flower_app.command("predict")
def predict_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A client's folder.")],
    files: Annotated[list[Path], typer.Argument(help="Images, or .npz files with x.")],
    use_global: Annotated[bool, typer.Option("--global", help="Predict with the global model.")] = False,
    trust_code: Trust = False,
) -> None:
    """Predict with a client's models of a federation: its own, or the global one; as lines of JSON."""
    require("flower", "fedrane flower predict", APP)
    from fedrane.flower.app import read_client_models

    app, models = read_client_models(folder, trust_code)
    which = "global" if use_global or "personal" not in models else "personal"
    if which not in models:
        raise ConfigError(f"there is no {which} model in {folder}", "the method gives none", "Leave out --global")
    model = models[which]
    inputs = [
        named for file in files for named in read_named_inputs(file, model.inputs.shape, app.experiment.image_size)
    ]
    for one in predict(model, inputs, app.experiment.batch):
        write_line(json.dumps(one) + "\n")

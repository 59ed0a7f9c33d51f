"""``fedrane flower …``: an app for a federation, certificates for a trial, and predictions with a client's models."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fedrane.cli.arguments import Force, Trust, Words, experiment_of, note
from fedrane.cli.console import write_line
from fedrane.errors import ConfigError
from fedrane.flower.roster import MAX_EXAMPLES, ROSTER, Roster, public_key
from fedrane.system.extras import require
from fedrane.system.files import clear_errors, private_folder, require_new, usable, write_atomically

flower_app = typer.Typer(help="Federations of several machines, with Flower.", no_args_is_help=True)
APP = "fedrane.flower.app"
"""It imports Flower, which is an extra."""
UNUSED = {
    "engine": "each client of a federation trains on its own machine",
    **dict.fromkeys(
        ("attack.kind", "attack.share", "attack.factor"),
        "hostile clients are simulated, and those of a federation are real",
    ),
    **dict.fromkeys(
        ("skew.noise", "skew.rotation", "skew.intensity"),
        "it is simulated, and the examples of a federation's clients are as they are",
    ),
}
"""Settings of an experiment that have no effect in a federation, and why."""


def _require_empty(folder: Path, why: str) -> None:
    if usable(folder).exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", why, "Name a folder")
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", why, "Name another folder")


def _package(app: Path) -> Path:
    """The folder of the app's package."""
    from fedrane.flower.project import EXPERIMENT

    files = list(app.glob(f"*/{EXPERIMENT}"))
    if len(files) != 1:
        raise ConfigError(f"{app} is not an app", f"it has no {EXPERIMENT}", "Write one: fedrane flower new DIR")
    return files[0].parent


def _fill_in(package: Path, entries: Sequence[Mapping[str, Any]], first: int = 0) -> None:
    """Write these fields of the roster's clients, from the first on."""
    roster = Roster.read(package / ROSTER)
    for client, fields in enumerate(entries, first):
        roster = roster.having(client, **fields)
    roster.write(package / ROSTER)


@flower_app.command("new")
def new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet, or is empty.")],
    settings: Words = None,
) -> None:
    """Write a Flower app that runs an experiment: flwr run DIR.

    Only the form of the inputs (shape, classes, mean and deviation) is taken from the experiment's dataset: a small
    sample that is like the clients' examples will do.
    """
    require("flower", "fedrane flower new", APP)
    from fedrane.config import effects
    from fedrane.flower.project import AppConfig, write_project
    from fedrane.training import user_code
    from fedrane.training.predictor import Inputs
    from fedrane.training.setup import as_dataset, automatic_model, make_partition, partitioning

    experiment = experiment_of(settings)
    _require_empty(folder, "an app is written into a folder of its own")
    examples = as_dataset(experiment, None)
    resolved = experiment.replace(
        model=automatic_model(experiment.model, examples.shape, examples.vocabulary),
        partition=partitioning(experiment, examples),
    )
    experiment, unused = effects.settle(resolved.set_by(experiment.origin), UNUSED)
    note(unused)
    experiment.augment.check(examples.shape, examples.vocabulary)
    experiment = experiment.replace(clients=len(make_partition(experiment, examples).clients))
    for text in examples.notes:
        write_line(f"{text}\n")
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
    """For a trial: deal the experiment's dataset out into one file for each client, as a local run would.

    The app's roster gets the number of each client's examples.
    """
    require("flower", "fedrane flower deal", APP)
    import numpy as np

    from fedrane.experiment import Experiment, read_toml
    from fedrane.flower.project import EXPERIMENT
    from fedrane.training import user_code
    from fedrane.training.setup import as_dataset, make_partition

    package = _package(app)
    user_code.require_named(package, read_toml(package / EXPERIMENT), trust_code)
    experiment = Experiment.from_toml(package / EXPERIMENT)
    dataset = as_dataset(experiment, None)
    partition = make_partition(experiment, dataset)
    files = [folder / f"client-{client}.npz" for client in range(len(partition.clients))]
    for file in files:
        require_new(file, force)
    with clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file, mine in zip(files, partition.clients, strict=True):
            # By name: an index could be taken for the name of another class, if classes are called 1, 2, 3.
            y = np.array(dataset.classes)[dataset.y[mine]] if dataset.classes else dataset.y[mine]
            np.savez(file, x=dataset.x[mine], y=y)
    _fill_in(package, [{"examples": len(mine)} for mine in partition.clients])
    write_line(f"{folder}: the examples of {len(partition.clients)} clients\n")


@flower_app.command("certs")
def certs_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write them.")],
    hosts: Annotated[
        list[str] | None, typer.Option("--host", help="A name or address of the server; may be given several times.")
    ] = None,
    nodes: Annotated[int, typer.Option("--nodes", help="How many nodes get a key.", min=1, max=10_000)] = 3,
    app: Annotated[
        Path | None, typer.Option("--app", metavar="APP", help="An app in whose roster client N gets the key node-N.")
    ] = None,
) -> None:
    """Make a CA, a certificate for the server and a key for each node: for a trial, for a month.

    In production, use certificates of your organisation's CA, and let each node make its own key:
    ssh-keygen -t ecdsa -b 384 -N "" -f node.
    """
    require("flower", "fedrane flower certs", "cryptography")
    from fedrane.flower.certificates import DAYS, certificates

    _require_empty(folder, "keys in use would be overwritten")
    package = _package(app) if app else None
    private_folder(folder)
    files = certificates(hosts or ["127.0.0.1", "localhost"], nodes)
    for path, (content, mode) in files.items():
        write_atomically(folder / path, content, mode)
    if package:
        _fill_in(package, [{"key": files[f"node-{node}.pub"][0].decode()} for node in range(nodes)])
    write_line(f"{folder}: ca.crt, server.pem, server.key and {nodes} node keys, for {DAYS} days\n")
    write_line(
        'For a trial only. In production: your own CA, and ssh-keygen -t ecdsa -b 384 -N "" -f node on each node\n'
    )


@flower_app.command("roster")
def roster_command(
    app: Annotated[Path, typer.Argument(metavar="APP", help="An app that 'fedrane flower new' has written.")],
    client: Annotated[int, typer.Argument(metavar="CLIENT", help="Its number, from 0.", min=0, max=MAX_EXAMPLES)],
    key: Annotated[Path, typer.Argument(metavar="KEY.pub", help="The public key that its node is registered with.")],
    examples: Annotated[
        int, typer.Option("--examples", help="How many it has at most, for testing included.", min=2, max=MAX_EXAMPLES)
    ],
) -> None:
    """Write down whose key is a client's, and how many examples it has at most: other nodes are not believed."""
    require("flower", "fedrane flower roster", "cryptography")
    package = _package(app)
    if not usable(key).is_file():
        raise ConfigError(f"there is no file {key}", "it is the .pub file that the client has sent")
    text = key.read_text(encoding="utf-8", errors="replace")
    public_key(text, str(key))
    _fill_in(package, [{"key": text, "examples": examples}], first=client)
    write_line(f"{package / ROSTER}: client {client} has this key, and at most {examples} examples\n")


@flower_app.command("predict")
def predict_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A client's folder.")],
    files: Annotated[list[Path], typer.Argument(help="Images, CSV files, or .npz files with x.")],
    use_global: Annotated[bool, typer.Option("--global", help="Predict with the global model.")] = False,
    trust_code: Trust = False,
) -> None:
    """Predict with a client's models of a federation: its own, or the global one; as lines of JSON."""
    require("flower", "fedrane flower predict", APP)
    from fedrane.flower.app import read_client_models
    from fedrane.training.predictor import predict, read_named_inputs

    app, models = read_client_models(folder, trust_code)
    which = "global" if use_global or "personal" not in models else "personal"
    if which not in models:
        raise ConfigError(f"there is no {which} model in {folder}", "the method gives none", "Leave out --global")
    model = models[which]
    inputs = [named for file in files for named in read_named_inputs(file, model.inputs, app.experiment.image_size)]
    for one in predict(model, inputs, app.experiment.batch):
        write_line(json.dumps(one) + "\n")

"""``fedrane flower …``: an app for a federation, certificates for a trial, and the models that a client was left."""

from __future__ import annotations

import datetime
import ipaddress
import json
import re
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from fedrane import effects
from fedrane.cli.arguments import Trust, Words, experiment_of, note
from fedrane.cli.console import write_line
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment
from fedrane.extras import require
from fedrane.files import write_atomically
from fedrane.run import as_dataset, automatic_model, make_partition
from fedrane.training.predictor import Inputs, predict, read_rows

flower_app = typer.Typer(help="Federations of several machines, with Flower.", no_args_is_help=True)
APP = "fedrane.flower_app"
"""It imports Flower, which is an extra."""
IDLE = {"engine": "each client of a federation trains on its own machine, which no engine does"}
"""Settings of an experiment that a federation has no use for."""
DAYS = 30
"""A trial's certificates hold for a month."""

PYPROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "{name}"
version = "1.0.0"
description = "A federation: {method} on {clients} clients."
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
# The run folder on the server's machine; a run that lies there is gone on with.
out = "{out}"
# Seconds after which a round ends with those who have answered.
timeout = 3600.0
# The fewest answers that make a round; how often a round with fewer is repeated before the run stops.
minimum = 1
retries = 3
# Seconds to wait for all clients before the first round.
wait = 600.0
# A dataset on the server's machine whose test rows measure the global model; empty for none.
test-data = ""
# Send numbers of 16 bits: half the bytes.
short = false
"""

SERVER = '''\
"""The server: it merges what the clients send, and keeps the run's folder."""

from pathlib import Path

from fedrane.flower_app import server

app = server(Path(__file__).parent)
'''

CLIENT = '''\
"""A client: it trains on rows that never leave its machine."""

from pathlib import Path

from fedrane.flower_app import client

from .data import rows

app = client(Path(__file__).parent, rows)
'''

DATA = '''\
"""Where a client's rows come from; the server has no say in it."""

from fedrane.flower_app import own_rows


def rows(context, experiment, inputs):
    """This client's inputs and labels: arrays x (rows, …) as in an .npz file, and y (places among inputs.classes).

    As it stands: the .npz file or the folder of images that the node was started with, --node-config 'data="PATH" …';
    in a simulation, a share of the experiment's dataset. Replace it to read from elsewhere, a database for instance.
    """
    return own_rows(context, experiment, inputs)
'''


@flower_app.command("new")
def new_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that does not exist yet, or is empty.")],
    words: Words = None,
) -> None:
    """Write a Flower app that runs an experiment: flwr run DIR.

    The experiment's dataset is looked at for the form of the inputs (shape, classes, mean and deviation) alone; a small
    sample of the same kind as the clients' rows will do.
    """
    require("flower", "fedrane flower new", APP)
    from fedrane.flower_app import App

    experiment = experiment_of(words)
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "an app is written into a folder of its own", "Name another one")
    rows = as_dataset(experiment, None)
    resolved = experiment.replace(
        model=automatic_model(experiment.model, rows.shape),
        partition=experiment.partition.resolved(rows.client is not None),
    )
    experiment, unused = effects.settle(resolved.set_by(experiment.origin), IDLE)
    note(unused)
    experiment.augment.check(rows.shape)
    experiment = experiment.replace(clients=len(make_partition(experiment, rows).clients))
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
    package = "app_" + name.replace("-", "_")
    said = {"name": name, "package": package, "method": experiment.method_name, "clients": experiment.clients}
    out = json.dumps(str(Path("runs") / name))[1:-1]
    contents = {
        "pyproject.toml": PYPROJECT.format(**said, out=out),
        f"{package}/__init__.py": "",
        f"{package}/server_app.py": SERVER,
        f"{package}/client_app.py": CLIENT,
        f"{package}/data.py": DATA,
    }
    for path, text in contents.items():
        write_atomically(folder / path, text)
    App(experiment, Inputs.of(rows)).write(folder / package)
    write_line(f"{folder}: {experiment.method_name} for {experiment.clients} clients; how to run it: docs/deploy.md\n")


@flower_app.command("deal")
def deal_command(
    app: Annotated[Path, typer.Argument(metavar="APP", help="An app that 'fedrane flower new' has written.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write client-0.npz and so on.")],
) -> None:
    """For a trial: deal the experiment's dataset out into one file for each client, as a local run would."""
    require("flower", "fedrane flower deal", APP)
    from fedrane.flower_app import EXPERIMENT

    found = list(app.glob(f"*/{EXPERIMENT}"))
    if len(found) != 1:
        raise ConfigError(f"{app} is not an app", f"it has no {EXPERIMENT}", "Write one: fedrane flower new DIR")
    experiment = Experiment.from_toml(found[0])
    rows = as_dataset(experiment, None)
    partition = make_partition(experiment, rows)
    folder.mkdir(parents=True, exist_ok=True)
    for client, mine in enumerate(partition.clients):
        np.savez(folder / f"client-{client}.npz", x=rows.x[mine], y=rows.y[mine])
    write_line(f"{folder}: the rows of {len(partition.clients)} clients\n")


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
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty", "keys in use would be overwritten", "Name another folder")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path, (content, mode) in certificates(hosts or ["127.0.0.1", "localhost"], nodes).items():
        write_atomically(folder / path, content)
        (folder / path).chmod(mode)
    write_line(f"{folder}: ca.crt, server.pem, server.key and {nodes} node keys, for {DAYS} days\n")
    write_line(
        'For a trial only. In production: your own CA, and ssh-keygen -t ecdsa -b 384 -N "" -f node on each node\n'
    )


def certificates(hosts: list[str], nodes: int) -> dict[str, tuple[bytes, int]]:
    """Contents and modes by path. The CA's own key is forgotten: nobody can add to it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    now = datetime.datetime.now(datetime.UTC)

    def named(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def begun(subject: str, key: Any) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(named(subject))
            .issuer_name(named("fedrane trial CA"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
        )

    def address(host: str) -> x509.GeneralName:
        try:
            return x509.IPAddress(ipaddress.ip_address(host))
        except ValueError:
            return x509.DNSName(host)

    def usage(signs_certificates: bool) -> x509.KeyUsage:
        rest = dict.fromkeys(
            ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement", "encipher_only"), False
        )
        return x509.KeyUsage(
            digital_signature=True,
            key_cert_sign=signs_certificates,
            crl_sign=signs_certificates,
            decipher_only=False,
            **rest,
        )

    ca_key, server_key = ec.generate_private_key(ec.SECP384R1()), ec.generate_private_key(ec.SECP384R1())
    ca = (
        begun("fedrane trial CA", ca_key)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage(True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    certificate = (
        begun(hosts[0], server_key)
        .add_extension(x509.SubjectAlternativeName([address(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(usage(False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA384())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    files = {
        "ca.crt": (ca.public_bytes(pem), 0o644),
        "server.pem": (certificate.public_bytes(pem), 0o644),
        "server.key": (server_key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain), 0o600),
    }
    for node in range(nodes):
        key = ec.generate_private_key(ec.SECP384R1())
        files[f"node-{node}"] = key.private_bytes(pem, serialization.PrivateFormat.OpenSSH, plain), 0o600
        public = key.public_key()
        ssh = public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
        files[f"node-{node}.pub"] = ssh + b"\n", 0o644
    return files


@flower_app.command("predict")
def predict_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A client's folder.")],
    files: Annotated[list[Path], typer.Argument(help="Images, or .npz files with x.")],
    whole: Annotated[bool, typer.Option("--global", help="Answer with the global model.")] = False,
    trust_code: Trust = False,
) -> None:
    """Answer with the models that a federation has left a client: its own, or the global one; as lines of JSON."""
    require("flower", "fedrane flower predict", APP)
    from fedrane.flower_app import left_behind

    app, found = left_behind(folder, trust_code)
    kind = "global" if whole or "personal" not in found else "personal"
    if kind not in found:
        raise ConfigError(f"there is no {kind} model in {folder}", "the method gives none", "Leave out --global")
    model = found[kind]
    rows = [row for file in files for row in read_rows(file, model.inputs.shape, app.experiment.image_size)]
    for one in predict(model, rows, app.experiment.batch):
        write_line(json.dumps(one) + "\n")

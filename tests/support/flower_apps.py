"""An app in a folder, and its server and clients on a grid without processes."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedrane
from asserts import same_bytes
from fedrane.cli.commands import app as command
from fedrane.flower.app import client, models
from fedrane.flower.project import AppConfig
from fedrane.flower.roster import ROSTER, Roster, public_key
from fedrane.flower.server import ServerSettings, serve
from flower_grids import LoopGrid, as_over_flower
from harness import metrics

CLIENTS = 4


class Federation:
    """An app in a folder, its clients' data and folders, and a grid to its nodes."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        settings = {"dataset": "digits", "model": "mlp", "clients": CLIENTS, "rounds": 4, "epochs": 1, "batch": 64}
        settings |= {"participation": 0.5, "partition.alpha": 0.3, "device": "cpu"} | changes
        words = [f"{key}={value}" for key, value in settings.items()]
        done = CliRunner().invoke(command, ["flower", "new", str(folder / "app"), *words])
        assert done.exit_code == 0, done.output
        done = CliRunner().invoke(command, ["flower", "deal", str(folder / "app"), str(folder / "data")])
        assert done.exit_code == 0, done.output
        self.folder, self.app = folder, AppConfig.read(folder / "app" / "app_app")
        self.grid: LoopGrid | None = None
        self.keys: dict[int, bytes] = {}
        """Of the clients' nodes, as Flower shows them."""
        self.roster: Roster | None = None

    def serve(self, nodes: int = CLIENTS, out: str = "run", **more: Any) -> Path:
        """A run, or the rest of one."""
        self.grid = self.connect(nodes, **{key: more.pop(key) for key in ("up", "down") if key in more})
        settings = {"out": str(self.folder / out), "timeout": 0.5, "retries": 0, "wait": 0.1, "test_data": "digits"}
        serve(self.app, ServerSettings(**(settings | more)), self.grid, self.roster)
        return self.folder / out

    def connect(self, nodes: int, **tampering: Any) -> LoopGrid:
        configs = {k: self.config(k) for k in range(nodes)}
        app = client(self.folder / "app" / "app_app")
        return LoopGrid(app, range(nodes), configs=configs, keys=self.keys, **tampering)

    def with_roster(self, more: int = 0) -> Federation:
        """Every client gets a key, and so do some that the experiment does not have."""
        command_line = ["flower", "certs", str(self.folder / "certs"), "--app", str(self.folder / "app")]
        done = CliRunner().invoke(command, [*command_line, "--nodes", str(self.app.experiment.clients + more)])
        assert done.exit_code == 0, done.output
        self.roster = Roster.read(self.folder / "app" / "app_app" / ROSTER)
        for k in range(self.app.experiment.clients, self.app.experiment.clients + more):
            self.roster = self.roster.having(k, examples=1000)
        self.keys |= {k: public_key(entry.key, "") for k, entry in self.roster.entries.items()}
        return self

    def config(self, k: int) -> dict[str, Any]:
        paths = {"data": str(self.folder / "data" / f"client-{k}.npz"), "folder": str(self.folder / "clients" / str(k))}
        return {"partition-id": k, "class-counts": True, **paths}

    def personal(self, k: int) -> dict[str, Any]:
        return models(self.folder / "clients" / str(k))

    @cached_property
    def local(self) -> fedrane.Result:
        return fedrane.run(self.app.experiment.replace(engine="sequential"))


def same_as_local(federation: Federation, out: Path) -> None:
    """The server's state, every measure, and the models that each client keeps."""
    local, remote = federation.local, fedrane.load(out)
    same_bytes(remote.server, local.server)
    for a, b in zip(metrics(out), as_over_flower(local), strict=True):
        for key in b:
            if key.endswith("/loss"):  # summed client by client, not over all examples at once
                assert a[key] == pytest.approx(b[key], rel=1e-12)
            else:
                assert a[key] == b[key], key
    for k in local.client_states:  # one that was never sampled has trained for itself at the end
        held = federation.personal(k)
        for which in local.algorithm.models_on(local.task):
            expected = local.model if which == "global" else local.personal(k)
            same_bytes(dict(held[which].state_dict()), dict(expected.state_dict()))

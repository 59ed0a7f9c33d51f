"""Flower's programs as real processes, by the commands of docs/deploy.md; whatever happens, none of them is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import fedrane
from fedrane import tree
from fedrane.experiment import Experiment
from fedrane.flower.project import AppConfig
from fedrane.flower.roster import ROSTER
from fedrane.training.run_folder import read
from harness import environment, metrics

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"
PATIENCE = 600.0
"""Seconds for anything; a loaded machine is no defect."""


def commands() -> list[tuple[str, str]]:
    """The page's tested blocks, in order, each with whether it is done once or stays."""
    blocks = re.findall(r"^<!-- test: (\w+) -->\n```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    modes = ["once", "stays", "once", "stays", "stays", "stays", "once", "once", "stays", "once"]
    assert [mode for mode, _ in blocks] == modes
    return blocks


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def until(holds: Callable[[], Any], what: str, patience: float = PATIENCE) -> None:
    end = time.monotonic() + patience
    while not holds():
        assert time.monotonic() < end, f"waited in vain until {what}"
        time.sleep(0.2)


class Program:
    """A command that stays, with all its children in a group of their own."""

    def __init__(self, name: str, script: str, folder: Path, env: dict[str, str]) -> None:
        self.name, self.script, self.folder, self.env = name, script, folder, env
        self.log = folder / f"{name}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", f"exec {self.script}"],
                cwd=self.folder,
                env=self.env,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """At once, with its children, whatever state they are in."""
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                self.send(number)
            except ProcessLookupError:
                break
        self.process.wait(PATIENCE)


class Federation:
    """The page's federation in a folder, on free ports."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.programs = folder, dict[str, Program]()
        self.ports = dict(zip((8000, 9100, 9101, 9102, 8100), free_ports(5), strict=True))
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(folder / "flwr")}
        quiet |= {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0"}
        self.env = environment(PATH=path, PYTHONPATH=str(ROOT / "src"), **quiet)
        once = [text for mode, text in commands() if mode == "once"]
        stays = [text for mode, text in commands() if mode == "stays"]
        self.prepare, self.register, self.run_command, self.predict, self.simulate = map(self.adapt, once)
        self.link, *self.nodes, self.simulation_link = map(self.adapt, stays)

    def adapt(self, script: str) -> str:
        for port, free in self.ports.items():
            script = re.sub(rf"\b{port}\b", str(free), script)
        return script.strip()

    def do(self, script: str, check: bool = True) -> str:
        done = subprocess.run(
            ["bash", "-euc", script], cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=PATIENCE
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def start(self, name: str, script: str) -> Program:
        (self.folder / f"{name}.log").unlink(missing_ok=True)
        self.programs[name] = Program(name, script, self.folder, self.env)
        return self.programs[name]

    def start_link(self) -> None:
        self.listening("link", self.link)
        self.do(self.register)

    def listening(self, name: str, script: str) -> None:
        link = self.start(name, script)
        until(lambda: "Application startup complete" in link.output or not link.running, "the SuperLink is up")
        assert link.running, link.output

    def start_nodes(self) -> None:
        for k, script in enumerate(self.nodes):
            self.start(f"node-{k}", script)
        for k in range(len(self.nodes)):
            self.wait_for_node(k)

    def wait_for_node(self, k: int, since: int = 0) -> None:
        """Flower lets a killed node in again only once it has given the old one up; until then it must try again."""
        program = self.programs[f"node-{k}"]

        def entered() -> bool:
            if not program.running:
                program.start()
                time.sleep(3)
            return "SuperNode ID" in program.output[since:]

        until(entered, f"node {k} has entered")

    def app(self, name: str, *words: str) -> AppConfig:
        """The page's app under another name, with other settings."""
        command = self.prepare.splitlines()[0].replace("flower new trial", f"flower new {name}")
        keys = [word.partition("=")[0] for word in words]
        page = [word for word in command.split() if word.partition("=")[0] not in keys]
        self.do(" ".join([*page, *words]))
        package = self.folder / name / f"app_{name.replace('-', '_')}"
        shutil.copy(self.folder / "trial" / "app_trial" / ROSTER, package)  # of the same clients
        return AppConfig.read(package)

    def submit(self, app: str = "trial", out: str = "run", **config: Any) -> str:
        """The page's command, to its end."""
        return self.do(self.submission(app, out, **config))

    def submission(self, app: str, out: str, **config: Any) -> str:
        more = " ".join(f"{key.replace('_', '-')}={value}" for key, value in config.items())
        script = self.run_command.replace("flwr run trial", f"flwr run {app}").replace("/run\\", f"/{out}\\")
        return script.replace('test-data=\\"digits\\"', f'test-data=\\"digits\\" {more}')

    def close(self) -> None:
        for program in reversed(list(self.programs.values())):
            program.stop()
        until(lambda: not self._killed(), "all processes are gone")

    def _killed(self) -> list[int]:
        """What still ran in this folder: Flower gives the ServerApp a session of its own."""
        killed = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if (process / "cwd").readlink() == self.folder:
                    os.kill(int(process.name), signal.SIGKILL)
                    killed.append(int(process.name))
        return killed

    # ---- what came of it

    def experiment(self, app: str = "trial") -> Experiment:
        return AppConfig.read(self.folder / app / f"app_{app.replace('-', '_')}").experiment

    def rounds(self, out: str) -> int:
        path = self.folder / out / "metrics.jsonl"
        return len(metrics(self.folder / out)) if path.is_file() else 0

    def finished(self, out: str) -> bool:
        return (self.folder / out / "summary.json").is_file()

    def kept(self, out: str, client: int) -> Any:
        """What a client keeps of the round whose upload the server has aggregated last."""
        key = json.loads((self.folder / out / "metadata.json").read_text())["key"]
        last = int(fedrane.load(self.folder / out).client_states[client].extra["aggregated"])
        path = self.folder / "clients" / str(client) / key / f"round-{last:06d}.safetensors"
        return read(path).client_states[0]

    def logs(self) -> str:
        return "\n".join(f"==== {name}\n{program.output[-3000:]}" for name, program in self.programs.items())


def controls_sum_up(federation: Federation, out: str) -> None:
    """SCAFFOLD's (1/N) Σ c_i = c, with each c_i read from its client's folder."""
    control = fedrane.load(federation.folder / out).server.extra["control"]
    client_states = [federation.kept(out, k).extra["control"] for k in range(3)]
    mean = {name: sum(client_state[name] for client_state in client_states) / 3 for name in control}
    assert float(tree.norm(tree.sub(mean, control))) <= 1e-5 * float(tree.norm(control))

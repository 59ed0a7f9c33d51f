"""Tries the sdist and the wheel in dist/ in a new environment, away from the repository.

    make package

The wheel was built from the sdist, so that one holds what the other needs. First without extras, where commands that
need one must say so; then with them; last with the lowest versions that pyproject.toml allows, but for torch, of
which a second one would be gigabytes.
"""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from resolve import CONSTRAINTS, CUDA, ROOT, lowest, resolve

TINY = ("dataset=digits", "model=mlp", "clients=4", "rounds=2", "epochs=1", "batch=256", "device=cpu")
LARGE = (*CUDA, "torch", "triton")
EXTRAS = {"report": ("report", "run"), "flower": ("flower", "new", "app", *TINY)}
"""A command that needs each of them."""


class Trial:
    """A new environment, and a folder to work in."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.work = folder / "venv" / "bin", folder / "work"
        self.work.mkdir()
        hidden = ("PYTHON", "FEDRANE_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
        self.environment = {**kept, "OMP_NUM_THREADS": "1", "FEDRANE_DATA": str(folder / "data")}
        self(sys.executable, "-m", "venv", folder / "venv")

    def __call__(self, program: str | Path, *words: str | Path, refused: str = "") -> str:
        """What the program has written; ``refused`` is what it must say, in one line, when it gives up."""
        command = [str(self.bin / program), *map(str, words)]
        said = shlex.join([Path(program).name, *command[1:]])
        began = time.monotonic()
        done = subprocess.run(command, cwd=self.work, env=self.environment, capture_output=True, text=True, check=False)
        as_meant = done.returncode == 2 and refused in done.stderr and done.stderr.count("\n") == 1
        if not as_meant if refused else done.returncode:
            raise SystemExit(f"FAILED ({done.returncode}): {said}\n{done.stdout}{done.stderr}")
        print(
            f"{time.monotonic() - began:6.1f} s  {said}{' is refused, as it should be' if refused else ''}", flush=True
        )
        return done.stdout

    def install(self, *words: str | Path) -> None:
        self("pip", "install", "--quiet", "--disable-pip-version-check", *words)

    def wrote(self, *paths: str) -> None:
        for path in paths:
            if not any(self.work.glob(path)):
                raise SystemExit(f"FAILED: no {path} was written")

    def files(self) -> list[str]:
        """What of the package is installed."""
        listed = self("pip", "show", "--files", "fedrane").partition("Files:")[2].split()
        return sorted(path for path in listed if ".dist-info" not in path and "__pycache__" not in path)


def without_extras(trial: Trial, version: str) -> None:
    where = trial("python", "-c", "import fedrane; print(fedrane.__file__)").strip()
    if not Path(where).is_relative_to(trial.bin.parent):
        raise SystemExit(f"FAILED: {where} is not what was installed")
    for program in (("fedrane",), ("python", "-m", "fedrane")):
        if trial(*program, "--version").strip() != version:
            raise SystemExit(f"FAILED: the version is not {version}")
    trial("fedrane", "methods")
    trial("fedrane", "methods", "fedrane")
    trial("fedrane", "datasets")
    trial("fedrane", "run", *TINY, "--out", "run")
    trial("fedrane", "partition", "preset=paper", *TINY, "--plot", "clients.png")
    trial("fedrane", "reproduce", "all", "--dry-run", "--measuring", "0")
    for extra, command in EXTRAS.items():
        trial("fedrane", *command, refused=f"pip install 'fedrane[{extra}]'")


def with_report(trial: Trial, out: str) -> None:
    trial("fedrane", "run", *TINY, "--tensorboard", "--out", f"{out}/board")
    trial("fedrane", "compare", "--methods", "fedavg,fedrane", *TINY, "--out", f"{out}/all")
    trial("fedrane", "report", f"{out}/all", "-o", f"{out}/page.html", "--figures", f"{out}/figures")
    trial.wrote(
        *(f"{out}/{path}" for path in ("board/tensorboard/events*", "all/table.md", "all/table.tex", "all/report.html"))
    )
    trial.wrote(f"{out}/page.html", f"{out}/figures/*.svg")


def with_flower(trial: Trial) -> None:
    trial("fedrane", "flower", "new", "app", *TINY)
    trial("fedrane", "flower", "deal", "app", "rows")
    trial("fedrane", "flower", "certs", "certs")
    trial.wrote("app/pyproject.toml", "app/*/server_app.py", "rows/client-3.npz", "certs/ca.crt")
    trial("python", "-c", "import sys; sys.path.append('app'); import app_app.server_app, app_app.client_app")
    trial("python", "-c", "from fedrane import engines; engines.check('flower')")


def lower_bounds(trial: Trial, folder: Path) -> None:
    versions, problem = resolve(lowest(".".join(platform.python_version_tuple()[:2]), ("report",)))
    if problem:
        raise SystemExit(problem)
    chosen = folder / "lowest.txt"
    chosen.write_text("".join(f"{n}=={v}\n" for n, v in versions.items() if not n.startswith(LARGE)))
    trial.install("--no-deps", "--only-binary", ":all:", "-r", chosen)
    trial("fedrane", "partition", *TINY, "--plot", "clients.png", "--force")
    with_report(trial, "lowest")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trial = Trial(folder)
        (sdist,), (wheel,) = (list((ROOT / "dist").glob(pattern)) for pattern in ("*.tar.gz", "*.whl"))
        trial.install("-c", CONSTRAINTS, wheel)
        without_extras(trial, wheel.name.split("-")[1])
        trial.install("-c", CONSTRAINTS, f"fedrane[{','.join(EXTRAS)}]")  # as the refusals say
        trial("pip", "check")
        with_report(trial, "pinned")
        with_flower(trial)
        from_wheel = trial.files()
        trial.install("--no-deps", "--force-reinstall", sdist)
        if trial.files() != from_wheel:
            raise SystemExit("FAILED: sdist and wheel install different files")
        lower_bounds(trial, folder)
    print(f"{sdist.name} and {wheel.name} are good")


if __name__ == "__main__":
    main()

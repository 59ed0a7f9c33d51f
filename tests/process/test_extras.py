"""Without an extra, what needs it reports how to install it, in one line and before anything is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrane.cli.flower_commands import flower_app
from fedrane.system import extras
from harness import TINY, Driver, refused

FLOWER, REPORT = "pip install 'fedrane[flower]'", "pip install 'fedrane[report]'"
WORDS = (*TINY, "rounds=1")
SUBCOMMANDS = {
    "new": ("app", "clients=3"),
    "deal": ("app", "data"),
    "certs": ("certs",),
    "roster": ("app", "0", "node.pub", "--examples", "100"),
    "predict": ("client", "examples.npz"),
}


def test_all_subcommands_are_tried() -> None:
    assert {command.name for command in flower_app.registered_commands} == SUBCOMMANDS.keys()


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_a_subcommand_without_flower(fedrane: Driver, tmp_path: Path, name: str) -> None:
    ended = fedrane("flower", name, *SUBCOMMANDS[name], cwd=tmp_path, absent=("flwr", "ray", "cryptography"))
    refused(ended, f"fedrane flower {name}", FLOWER)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_its_help_needs_no_extra(fedrane: Driver, name: str) -> None:
    ended = fedrane("flower", name, "--help", absent=("flwr", "ray", "cryptography"))
    assert ended.status == 0
    assert name in ended.stdout


@pytest.mark.parametrize("absent", ["flwr", "ray", "flwr.serverapp"])  # the last: a Flower that is too old
@pytest.mark.parametrize("engine", ["flower", "flower-bf16"])
def test_the_engine_without_flower(fedrane: Driver, tmp_path: Path, engine: str, absent: str) -> None:
    for command in ("run", "compare"):
        ended = fedrane(command, "--out", "made", *WORDS, f"engine={engine}", cwd=tmp_path, absent=(absent,))
        refused(ended, "engine=flower", absent, FLOWER)
    assert not list(tmp_path.iterdir())


def test_the_engine_without_ray(fedrane: Driver, tmp_path: Path) -> None:
    ended = fedrane("run", "--out", "made", *WORDS, "engine=ray", cwd=tmp_path, absent=("ray",))
    refused(ended, "engine=ray", "pip install 'fedrane[ray]'")
    assert not list(tmp_path.iterdir())


def test_to_resume_without_flower(fedrane: Driver, tmp_path: Path) -> None:
    """The run was begun where Flower is installed."""
    assert fedrane("run", "--out", tmp_path / "run", *WORDS, "engine=sequential").status == 0
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('engine = "sequential"', 'engine = "flower"'))
    before = sorted(tmp_path.rglob("*"))
    refused(fedrane("resume", tmp_path / "run", absent=("flwr",)), "engine=flower", FLOWER)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("absent", ["plotly", "jinja2"])
def test_a_report_without_plotly_or_jinja(fedrane: Driver, tmp_path: Path, absent: str) -> None:
    assert fedrane("run", "--out", tmp_path / "run", *WORDS).status == 0
    refused(fedrane("report", "run", cwd=tmp_path, absent=(absent,)), "the page", absent, REPORT)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_run_without_tensorboard(fedrane: Driver, tmp_path: Path) -> None:
    absent = ("tensorboard", "torch.utils.tensorboard")
    refused(fedrane("run", "--tensorboard", "--out", "run", *WORDS, cwd=tmp_path, absent=absent), "TensorBoard", REPORT)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("option", "package"), [("--wandb", "wandb"), ("--mlflow", "mlflow")])
def test_a_run_without_a_tracker(fedrane: Driver, tmp_path: Path, option: str, package: str) -> None:
    ended = fedrane("run", option, "--out", "run", *WORDS, cwd=tmp_path, absent=(package,))
    refused(ended, f"pip install 'fedrane[{package}]'")
    assert not list(tmp_path.iterdir())


def test_a_defect_of_ours_is_not_taken_for_an_absent_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        extras.require("flower", "a command", "fedrane.nowhere")

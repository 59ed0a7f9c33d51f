"""Flower's own simulation, in Ray's processes: every method ends as it does locally, to the last bit."""

from __future__ import annotations

import gc
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedrane
from asserts import same_bytes, untimed
from fedrane import engines
from fedrane.errors import ConfigError
from fedrane.flower import simulation
from fedrane.methods import METHODS
from flower_grids import as_over_flower, federation_of, looped, small
from harness import same_run
from problems import SLOW

pytestmark = pytest.mark.filterwarnings("default")  # Flower's and Ray's own are theirs to mend


@SLOW
def test_runs_end_as_they_do_locally(subtests: pytest.Subtests, ray: None, tmp_path: Path) -> None:
    """In one test, so that Ray, which takes longer to start than all of this to run, starts once."""
    for name in METHODS:
        with subtests.test(name):
            a_method_ends_as_it_does_locally(name)
    with subtests.test("resume"):
        a_run_can_be_stopped_and_resumed(tmp_path)
    with subtests.test("objects"):
        data_and_network_from_python_reach_the_nodes()


@pytest.fixture
def ray() -> Iterator[None]:
    with engines.opened("flower", federation_of(small())):
        yield
    with warnings.catch_warnings(action="ignore"):  # files that Ray has left open are closed here, not at the end
        gc.collect()


def everything(result: fedrane.Result) -> dict[str, Any]:
    return {
        "server": result.server,
        "client_states": {str(k): client_state for k, client_state in sorted(result.client_states.items())},
    }


def a_method_ends_as_it_does_locally(name: str) -> None:
    """Global and personal weights, and every metric of every round, those of post-training too."""
    experiment = small(method=name)
    local, remote = fedrane.run(experiment), fedrane.run(experiment.replace(engine="flower"))
    same_bytes(everything(local), everything(remote))
    assert as_over_flower(local) == untimed(remote.history)


def a_run_can_be_stopped_and_resumed(tmp_path: Path) -> None:
    """The folder is that of a local run, but for the engine's name."""
    experiment = small(method="fedper", engine="flower", client_dropout=0.2)
    rounds = iter(range(1, 99))
    stopped = fedrane.run(experiment, tmp_path / "stopped", stop=lambda: next(rounds) == 2)
    assert not stopped.finished
    fedrane.resume(tmp_path / "stopped")
    fedrane.run(experiment, tmp_path / "reference")
    same_run(tmp_path / "stopped", tmp_path / "reference")
    fedrane.run(experiment.replace(engine="sequential"), tmp_path / "local")
    for path in (tmp_path / "local" / "checkpoints").iterdir():
        assert path.read_bytes() == (tmp_path / "reference" / "checkpoints" / path.name).read_bytes()


def data_and_network_from_python_reach_the_nodes() -> None:
    from torch import nn

    digits = fedrane.data.load("digits")

    def net(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, classes))

    experiment = small(model_head="3", rounds=2)
    local, remote = (
        fedrane.run(experiment.replace(engine=engine), dataset=digits, model=net) for engine in ("sequential", "flower")
    )
    same_bytes(everything(local), everything(remote))


def test_without_a_simulation_there_are_no_nodes(tmp_path: Path) -> None:
    experiment = small(engine="flower", clients=4)
    with looped(tmp_path, nodes=4) as loop:
        result = fedrane.run(experiment)
    assert loop.grid.seen
    with pytest.raises(ConfigError, match="outside of a simulation"):
        engines.make("flower", experiment.algorithm, result.federation).train_round(result.server, {}, [0], 1, 0.1, 1)


class Importing(dict[str, Any]):
    """Modules of which another is imported while one reads their list."""

    def items(self) -> Any:
        for name, module in super().items():
            self[f"{name}_too"] = module
            yield name, module


def test_another_thread_may_import_while_a_method_is_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method = small().algorithm
    with monkeypatch.context() as patch:
        patch.setattr(sys, "modules", Importing(sys.modules))
        simulation._save(tmp_path / "method.pickle", method)
    assert simulation._load(tmp_path / "method.pickle") == method

"""On a GPU: the captured, stacked engine against the sequential one, and against itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import fedrane
from asserts import same_bytes
from fedrane import conformance, tree
from fedrane.data.dataset import Dataset
from fedrane.methods import METHODS
from fedrane.models import kernels_available
from fedrane.run import Result

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def images(channels: int = 3, side: int = 32, rows: int = 300) -> Dataset:
    """Noise about one pattern a class."""
    numbers = np.random.Generator(np.random.Philox(1))
    y = np.arange(rows + 60) % 4
    patterns = numbers.integers(0, 200, (4, channels, side, side))
    x = (patterns[y] + numbers.integers(0, 55, (len(y), channels, side, side))).astype(np.uint8)
    middle, spread = (0.5,) * channels, (0.25,) * channels
    return Dataset("images", x[:rows], y[:rows], x[rows:], y[rows:], tuple("abcd"), middle, spread)


def trained(method: Any, engine: str, dataset: Dataset | None = None, **changes: Any) -> Result:
    settings: dict[str, Any] = {"clients": 5, "rounds": 2, "epochs": 2, "batch": 16, "lr": 0.05, "device": "cuda"}
    settings |= {"precision": "float32", "engine": engine} | changes
    experiment = fedrane.Experiment(method=method, **settings)
    return fedrane.run(experiment, dataset=dataset or images())


def gaps(a: Result, b: Result) -> list[float]:
    """The differences between two runs' states, each beside the size of the tensor it is in, in order."""
    x, y = (tree.flatten(conformance.states(result)) for result in (a, b))
    assert x.keys() == y.keys()
    floats = [name for name in x if x[name].is_floating_point() and x[name].numel()]
    return sorted(float((x[n] - y[n]).abs().max() / x[n].abs().max().clamp(min=1e-3)) for n in floats)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_captured_and_ends_where_the_sequential_engine_ends(name: str) -> None:
    """Within the rounding of float32; a warning (that it could not be stacked) is an error."""
    entry = METHODS[name]
    one, many = (
        trained(entry.kind(**entry.preset), engine, images(1, 28), participation=0.8, weight_decay=1e-3)
        for engine in ("sequential", "stacked")
    )
    assert gaps(one, many)[-1] < 2e-3
    assert one.history[-1].keys() == many.history[-1].keys()


@pytest.mark.parametrize("model", ["resnet18", "resnet18-cifar", "convnet", "mlp"])
@pytest.mark.parametrize("norm", ["shared", "batch", "local", "group"])
def test_every_network(model: str, norm: str) -> None:
    if model in ("convnet", "mlp") and norm != "shared":
        pytest.skip("it has no normalisation")
    settings: dict[str, Any] = {"model": model, "norm": norm, "lr": 0.01, "rounds": 1, "epochs": 1, "batch": 64}
    one, many = (trained("fedavg", engine, **settings) for engine in ("sequential", "stacked"))
    found = gaps(one, many)
    # The slopes by BatchNorm's shifts are sums that nearly cancel, and rounding is what is left of some of them.
    assert found[len(found) // 2] < 1e-3
    assert found[-1] < 0.2


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedrane"])
def test_a_run_repeats_itself_bit_for_bit(name: str, precision: str) -> None:
    first, second = (trained(name, "auto", model="resnet18", precision=precision) for _ in range(2))
    same_bytes(conformance.states(first), conformance.states(second))


def test_a_resumed_run_equals_one_never_stopped(tmp_path: Any) -> None:
    dataset = images(1, 28)
    settings = {"device": "cuda", "clients": 5, "rounds": 4, "epochs": 1, "batch": 16, "participation": 0.6}
    whole = fedrane.run(fedrane.Experiment(method="scaffold", **settings), dataset=dataset)
    rounds = iter([False, True])
    fedrane.run(
        fedrane.Experiment(method="scaffold", **settings), tmp_path / "run", dataset=dataset, stop=lambda: next(rounds)
    )
    resumed = fedrane.resume(tmp_path / "run", dataset=dataset)
    same_bytes(conformance.states(whole), conformance.states(resumed))


def test_bf16_learns_as_float32_does() -> None:
    wide, narrow = (trained("fedavg", "stacked", rounds=6, precision=p) for p in ("float32", "bf16"))
    assert narrow.history[-1]["global/accuracy"] > wide.history[-1]["global/accuracy"] - 0.1


class Draws(fedrane.Algorithm):
    """Asks the host in a hook, which no graph can hold."""

    def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
        loss, outcome = super().objective(task, ctx, model, batch)
        return loss * (1 if float(loss.detach()) > 0 else 2), outcome


def test_a_method_that_cannot_be_captured_runs_eagerly_and_says_why() -> None:
    with pytest.warns(UserWarning, match=r"one client at a time.*: its hook step"):
        result = trained(Draws(), "auto")
    assert np.isfinite(result.history[-1]["global/loss"])


def test_the_slots_are_said() -> None:
    class Ear(fedrane.Callback):
        heard: list[str] = []  # noqa: RUF012 - one run

        def message(self, text: str) -> None:
            self.heard.append(text)

    fedrane.run(
        fedrane.Experiment(method="fedavg", clients=5, rounds=1, device="cuda"), dataset=images(), callbacks=[Ear()]
    )
    assert any("clients side by side" in text for text in Ear.heard)


def test_the_kernels_are_in_use() -> None:
    assert kernels_available(), "this GPU's torch comes with Triton; without it convolutions are slow"

"""The GPU's kernels on a CPU: Triton's interpreter runs them, slowly, in float32, where there is no GPU to do so."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedrane
from asserts import close
from fedrane.data.dataset import Dataset
from fedrane.engines import stacked, static_step
from fedrane.kernels import dispatch
from fedrane.kernels.batch_norm import normalise
from fedrane.kernels.convolution import convolve
from fedrane.kernels.sgd_step import sgd_step
from fedrane.kernels.stacked_mode import stacked_mode
from fedrane.ops import graph
from fedrane.testing import conformance
from gradients import Tensors, gradients_of
from problems import SLOW

pytest.importorskip("triton", reason="Triton comes for Linux alone")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs them itself (test_gpu.py)"),
    pytest.mark.filterwarnings("ignore:(divide by zero|invalid value):RuntimeWarning"),  # beyond a matrix's edge
]


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Layers of stacked clients by the kernels, as on a GPU; gives their modules by name."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def module(name: str) -> ModuleType:
        return importlib.import_module(f"fedrane.kernels.gpu.{name}")

    monkeypatch.setattr(dispatch, "gpu_kernels", lambda x, name: module(name) if x.dtype == torch.float32 else None)
    return module


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def near(actual: Tensors, true: Tensors, within: float = 1e-5) -> None:
    for a, b in zip(actual, true, strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b).abs().max()) < within * float(b.abs().max())


@pytest.mark.parametrize("beforehand", [False, True])
@pytest.mark.parametrize(
    ("side", "channels", "outputs", "taps", "stride", "padding"),
    [
        pytest.param(8, 3, 20, 7, 2, 3, marks=SLOW),  # as patches
        (6, 1, 8, 5, 1, 0),
        (2, 3, 5, 5, 1, 2),  # as patches, without taps that see padding only
        (1, 4, 5, 3, 1, 1),
        (5, 16, 20, 3, 1, 1),
        (5, 17, 9, 3, 2, 1),  # nothing a multiple of a block
        (4, 16, 24, 1, 2, 0),  # three of four positions are seen by no tap
        (2, 32, 17, 3, 2, 1),  # with taps that see padding only
        (1, 16, 17, 3, 1, 1),
        (6, 17, 9, 3, 3, 1),
    ],
)
def test_a_convolution(
    kernels: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    beforehand: bool,
    side: int,
    channels: int,
    outputs: int,
    taps: int,
    stride: int,
    padding: int,
) -> None:
    """Its weights are cast beforehand where there are many, which changes no number of float32."""
    if beforehand:
        monkeypatch.setattr(kernels("convolution"), "MIN_CAST_CLIENTS", 1)
        monkeypatch.setattr(kernels("convolution"), "MIN_CAST_ROWS", 1)
    inputs = noise(2, 3, channels, side, side), noise(2, outputs, channels, taps, taps), noise(2, outputs)
    after = (side + 2 * padding - taps) // stride + 1
    weights = noise(2, 3, outputs, after, after)
    actual = gradients_of(
        lambda x, w, b: convolve(x, w, b, stride, padding), weights.float(), *(v.float() for v in inputs)
    )
    near(actual, gradients_of(lambda x, w, b: F.conv2d(x, w, b, stride, padding), weights, *inputs))


@pytest.mark.parametrize("channels", [2, pytest.param(16, marks=SLOW)])
def test_a_convolution_of_a_map_that_is_not_square(kernels: Callable[[str], ModuleType], channels: int) -> None:
    """Tall, with a tap that sees padding only in one direction, and enough positions to sum them in parts."""
    inputs = noise(2, 43, channels, 12, 1), noise(2, 7, channels, 3, 3), noise(2, 7)
    weights = noise(2, 43, 7, 12, 1)
    actual = gradients_of(lambda x, w, b: convolve(x, w, b, 1, 1), weights.float(), *(v.float() for v in inputs))
    near(actual, gradients_of(lambda x, w, b: F.conv2d(x, w, b, 1, 1), weights, *inputs))


@pytest.mark.parametrize("one_launch", [0, 10**6])
@pytest.mark.parametrize(("examples", "side"), [(5, 3), (70, 2)])
def test_normalisation(
    kernels: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, examples: int, side: int, one_launch: int
) -> None:
    """By one kernel, and by three."""
    monkeypatch.setattr(kernels("batch_norm"), "MAX_ONE_LAUNCH_VALUES", one_launch)
    mask = torch.arange(examples) < torch.tensor([[examples], [examples - 2]])
    weights = noise(2, examples, 20, side, side, seed=1) * mask[:, :, None, None, None]
    inputs = 3 + 2 * noise(2, examples, 20, side, side), noise(2, 20), noise(2, 20)
    old = noise(2, 2, 20).abs()

    def both(dtype: torch.dtype) -> Tensors:
        def one(mask: Tensor, old: Tensor, weights: Tensor, *inputs: Tensor) -> Tensors:
            def total(*inputs: Tensor) -> tuple[Tensor, Tensors]:
                y, new = normalise(inputs[0], mask, *inputs[1:], old, 1e-5, 0.1)
                return (y * weights).sum(), (y * mask[:, None, None, None], new)

            gradients, actual = torch.func.grad(total, argnums=(0, 1, 2), has_aux=True)(*inputs)
            return (*actual, *gradients)

        return torch.vmap(one)(mask, old.to(dtype), weights.to(dtype), *(v.to(dtype) for v in inputs))

    near(both(torch.float32), both(torch.float64))


@pytest.mark.parametrize("one_launch", [0, 10**6])
def test_a_single_value_is_normalised_to_the_bias(
    kernels: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, one_launch: int
) -> None:
    """To the last bit: a ReLU sees the sign."""
    monkeypatch.setattr(kernels("batch_norm"), "MAX_ONE_LAUNCH_VALUES", one_launch)
    x, mask = 100 * noise(2, 4, 9, 1, 1).float(), torch.arange(4) < 1
    weight, bias, old = (noise(2, 9, seed=n).float() for n in range(3))
    bias[:, ::3] = 0
    y = torch.vmap(lambda x, w, b, o: normalise(x, mask, w, b, torch.stack([o, o]), 1e-5, 0.1)[0])(x, weight, bias, old)
    assert torch.equal(y[:, 0, :, 0, 0], bias)


@pytest.mark.parametrize("one_launch", [0, 10**6])
@pytest.mark.parametrize("examples", [0, 1])
def test_what_has_no_variance_leaves_the_running_statistics_as_they_are(
    kernels: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, examples: int, one_launch: int
) -> None:
    """Also where padding holds NaN; beside it a client with a variance, whose statistics move."""
    monkeypatch.setattr(kernels("batch_norm"), "MAX_ONE_LAUNCH_VALUES", one_launch)
    x, mask = noise(2, 4, 9, 1, 1).float(), torch.arange(4) < torch.tensor([[examples], [3]])
    x[0, examples:] = torch.nan
    weight, bias = (noise(2, 9, seed=n).float() for n in range(2))
    old = noise(2, 2, 9, seed=2).float().abs()
    new = torch.vmap(lambda *given: normalise(*given, 1e-5, 0.1)[1])(x, mask, weight, bias, old)
    assert torch.equal(new[0], old[0])
    values = x[1, :3, :, 0, 0].double()
    fresh = torch.stack([values.mean(0), values.var(0)])
    torch.testing.assert_close(new[1].double(), 0.9 * old[1] + 0.1 * fresh, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("side", "size", "stride", "padding"),
    [(8, 3, 2, 1), (8, 2, 2, 0), (7, 3, 3, 0), (5, 3, 1, 1), (18, 17, 1, 0)],
)
def test_pooling(side: int, size: int, stride: int, padding: int) -> None:
    x = noise(2, 2, 5, side, side).relu()  # with ties
    after = (side + 2 * padding - size) // stride + 1
    weights = noise(2, 2, 5, after, after)

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, size, stride, padding)

    with stacked_mode():
        actual = gradients_of(pool, weights.float(), x.float())
    near(actual, gradients_of(pool, weights, x))


@pytest.mark.parametrize("turned", [0, 1, 2])
def test_an_sgd_step(turned: int) -> None:
    """Of tensors that lie one way, or two, or both turned."""
    start, by, lr = noise(3, 4, 5, 3, 3), noise(3, 4, 5, 3, 3, seed=1), noise(3, seed=2)
    start, by = (v.to(memory_format=torch.channels_last_3d) if n < turned else v for n, v in enumerate((start, by)))
    with stacked_mode():
        actual = gradients_of(sgd_step, by.float(), start.float(), by.float(), lr.float())
    near(actual, gradients_of(lambda start, by, lr: start - lr * by, by, start, by, lr))


@pytest.mark.parametrize("form", graph.CHOICES["closed_form"])
def test_relations(form: str) -> None:
    centres = noise(2, 4, 6)[:, torch.arange(17) % 4]
    features, mask = centres + noise(2, 17, 6, seed=1), torch.ones(2, 17, dtype=torch.bool)
    mask[1, 11:] = False
    true = graph.relations(features, mask, 0.1, 3, form)
    actual = torch.vmap(lambda z, mask: graph.relations(z, mask, 0.1, 3, form, differentiable=False))(
        features.float(), mask
    )
    near((actual.weights,), (true.weights,), 5e-4)
    assert torch.allclose(actual.change.double(), true.change, atol=1e-3)


@pytest.mark.parametrize("module", ["convolution", "batch_norm", "pooling", "sgd_step", "inverse"])
def test_no_argument_has_a_name_that_the_compilers_launcher_takes_for_its_own(
    kernels: Callable[[str], ModuleType], module: str
) -> None:
    """It puts them beside variables of these names, which then hide them; the interpreter does not mind."""
    actual = [value for value in vars(kernels(module)).values() if hasattr(value, "arg_names")]
    assert actual
    assert not {"params", "specialization", "options"} & {name for kernel in actual for name in kernel.arg_names}


class Small(nn.Module):
    """A little of everything that has a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.conv, self.head = nn.Conv2d(8, 16, 3, 1, 1), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.max_pool2d(self.norm(self.stem(x)), 3, 2, 1))
        scores: Tensor = self.head(torch.flatten(F.adaptive_avg_pool2d(self.conv(x), 1), 1))
        return scores


class Plain(static_step.Recording):
    """Of a recording nothing but the work, for the interpreter writes where no recorder sees it."""

    def replay(self) -> None:
        self.work()


@pytest.mark.parametrize("method", ["scaffold", pytest.param("fedrane", marks=SLOW)])
def test_a_run_by_the_kernels_ends_where_the_sequential_engine_ends(
    monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(static_step, "Recording", Plain)
    monkeypatch.setitem(stacked.MAX_STREAMS, "cpu", 2)
    y = np.arange(44) % 3
    x = np.random.Generator(np.random.Philox(5)).integers(0, 255, (44, 1, 6, 6)).astype(np.uint8)
    dataset = Dataset("noise", x[:34], y[:34], x[34:], y[34:], tuple("abc"), (0.5,), (0.25,))
    settings: dict[str, Any] = {"clients": 4, "rounds": 1, "epochs": 1, "batch": 8, "model_head": "head"}
    settings |= {"device": "cpu", "precision": "float32", "partition": {"minimum": 5}}
    runs = []
    for which in ("sequential", "stacked"):
        torch.manual_seed(0)
        experiment = fedrane.Experiment(method=method, engine=which, **settings)
        runs.append(conformance.states(fedrane.run(experiment, dataset=dataset, model=Small())))
    close(runs[0], runs[1], 1e-4)

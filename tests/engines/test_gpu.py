"""On a GPU: the captured, stacked engine against the sequential one, and against itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedrane
from asserts import same_bytes
from fedrane import tree
from fedrane.data.augment import Augmentation, Augmenter
from fedrane.data.dataset import Dataset
from fedrane.data.federation import Normaliser
from fedrane.kernels.batch_norm import normalise
from fedrane.kernels.convolution import convolve
from fedrane.kernels.dispatch import triton_available
from fedrane.kernels.sgd_step import sgd_step
from fedrane.kernels.stacked_mode import stacked_mode
from fedrane.methods import METHODS
from fedrane.ops import graph
from fedrane.task import Batch, Model
from fedrane.testing import conformance
from fedrane.training.result import Result
from fedrane.training.setup import make_task
from gradients import Tensors, gradients_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def images(channels: int = 3, side: int = 32, examples: int = 300) -> Dataset:
    """Noise about one pattern a class."""
    numbers = np.random.Generator(np.random.Philox(1))
    y = np.arange(examples + 60) % 4
    patterns = numbers.integers(0, 200, (4, channels, side, side))
    x = (patterns[y] + numbers.integers(0, 55, (len(y), channels, side, side))).astype(np.uint8)
    middle, spread = (0.5,) * channels, (0.25,) * channels
    return Dataset("images", x[:examples], y[:examples], x[examples:], y[examples:], tuple("abcd"), middle, spread)


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


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, device="cuda")


def errors(actual: Tensors, true: Tensors) -> list[float]:
    """The largest error in each tensor, beside the usual size of its numbers."""
    return [float((a.double() - b).abs().max() / b.square().mean().sqrt()) for a, b in zip(actual, true, strict=True)]


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(
    ("side", "channels", "outputs", "taps", "stride", "padding"),
    [
        (28, 1, 16, 5, 1, 0),  # the ConvNet's
        (12, 16, 32, 5, 1, 0),
        (32, 3, 64, 7, 2, 3),  # ResNet-18's
        (8, 64, 64, 3, 1, 1),
        (8, 64, 128, 3, 2, 1),
        (8, 64, 128, 1, 2, 0),
        (4, 128, 128, 3, 1, 1),
        (2, 256, 512, 3, 2, 1),
        (1, 512, 512, 3, 1, 1),
        (7, 5, 9, 3, 2, 1),  # nothing a multiple of a block
    ],
)
def test_a_convolution_by_the_kernels_is_exact_to_rounding(
    side: int, channels: int, outputs: int, taps: int, stride: int, padding: int, biased: bool
) -> None:
    torch.manual_seed(0)
    stack = 3 if biased else 7  # of many clients the weights are shortened beforehand
    inputs = [noise(stack, 37, channels, side, side), noise(stack, outputs, channels, taps, taps)]
    inputs += [noise(stack, outputs)] if biased else []
    after = (side + 2 * padding - taps) // stride + 1
    weights = noise(stack, 37, outputs, after, after)

    def true(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return F.conv2d(x, weight, bias, stride, padding)

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return convolve(x, weight, bias, stride, padding)

    exact = gradients_of(true, weights, *inputs)
    torch.backends.cuda.matmul.allow_tf32 = False
    float32 = gradients_of(ours, weights.float(), *(v.float() for v in inputs))
    assert max(errors(float32, exact)) < 1e-4  # TF32 would give some 1e-3
    x, *rest = (v.float() for v in inputs)  # parameters stay float32, also beside a bf16 map
    bf16 = gradients_of(ours, weights.float(), x.bfloat16(), *rest)
    assert max(errors(bf16, exact)) < 0.1


@pytest.mark.parametrize(("side", "channels"), [(8, 64), (1, 512), (5, 7)])
def test_normalisation_by_the_kernels_is_exact_to_rounding(side: int, channels: int) -> None:
    torch.manual_seed(0)
    x = 3 + 2 * noise(3, 37, channels, side, side)
    mask = torch.arange(37, device="cuda") < torch.tensor([[37], [20], [9]], device="cuda")
    weights = noise(3, 37, channels, side, side) * mask[:, :, None, None, None]
    old, inputs = noise(3, 2, channels).abs(), (x, noise(3, channels), noise(3, channels))

    def ours(mask: Tensor, old: Tensor) -> Callable[..., Tensor]:
        return lambda x, weight, bias: normalise(x, mask, weight, bias, old, 1e-5, 0.1)[0]

    def all_of(dtype: torch.dtype) -> list[Tensors]:
        return [
            gradients_of(
                ours(mask[k], old[k].to(dtype)), weights[k : k + 1].to(dtype), *(v[k : k + 1].to(dtype) for v in inputs)
            )
            for k in range(3)
        ]

    for actual, true, kept in zip(all_of(torch.float32), all_of(torch.float64), mask, strict=True):
        actual, true = ((y[:, kept], *rest) for y, *rest in (actual, true))
        assert max(errors(actual, true)) < 1e-3


@pytest.mark.parametrize("examples", [3, 700])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_normalisation_by_the_kernels_of_a_single_value_is_the_bias(examples: int, dtype: torch.dtype) -> None:
    """To the last bit: a ReLU sees the sign. Small maps take one kernel, large ones three."""
    x, mask = (100 * noise(2, examples, 9, 1, 1)).to(dtype), torch.arange(examples, device="cuda") < 1
    weight, bias, old = (noise(2, 9).float() for _ in range(3))
    bias[:, ::3] = 0
    y = torch.vmap(lambda x, w, b, o: normalise(x, mask, w, b, torch.stack([o, o]), 1e-5, 0.1)[0])(x, weight, bias, old)
    assert torch.equal(y[:, 0, :, 0, 0], bias.to(dtype))


@pytest.mark.parametrize(
    ("side", "size", "stride", "padding"), [(16, 3, 2, 1), (24, 2, 2, 0), (7, 3, 3, 0), (7, 3, 1, 1)]
)
def test_pooling_by_the_kernels_is_the_librarys(side: int, size: int, stride: int, padding: int) -> None:
    torch.manual_seed(0)
    x = noise(3, 5, 6, side, side).relu()  # with ties
    after = (side + 2 * padding - size) // stride + 1
    weights = noise(3, 5, 6, after, after).float()

    def pool(x: Tensor) -> Tensor:
        return F.max_pool2d(x, size, stride, padding)

    plain = [gradients_of(pool, weights[k : k + 1], x[k : k + 1].float()) for k in range(3)]
    with stacked_mode():
        ours = gradients_of(pool, weights, x.float())
    for actual, true in zip(ours, (torch.cat(part) for part in zip(*plain, strict=True)), strict=True):
        assert torch.allclose(actual, true, atol=1e-6)


def test_an_sgd_step_by_the_kernels_has_gradients_too() -> None:
    start, by, lr = (
        noise(3, 4, 5, 3, 3).float().to(memory_format=torch.channels_last_3d),
        noise(3, 4, 5, 3, 3),
        noise(3),
    )
    by, lr = by.float(), lr.float()

    def ours(start: Tensor, by: Tensor, lr: Tensor) -> Tensor:
        with stacked_mode():
            return sgd_step(start, by, lr)

    actual = gradients_of(ours, by, start, by, lr)
    true = gradients_of(lambda start, by, lr: start - lr * by, by, start, by, lr)
    assert max(errors(actual, tuple(v.double() for v in true))) < 1e-5


@pytest.mark.parametrize("form", graph.CHOICES["closed_form"])
@pytest.mark.parametrize(("examples", "width"), [(20, 8), (31, 16), (128, 64), (128, 512)])
def test_relations_by_the_kernels_are_as_exact_as_products_of_float32(examples: int, width: int, form: str) -> None:
    torch.manual_seed(0)
    centres = noise(3, 4, width)[:, torch.arange(examples, device="cuda") % 4]
    features, mask = centres + noise(3, examples, width), torch.ones(3, examples, dtype=torch.bool, device="cuda")
    mask[1, examples // 2 :] = False
    true = graph.relations(features, mask, 0.1, 5, form)
    products = graph.relations(features.float(), mask, 0.1, 5, form)
    actual = torch.vmap(lambda z, mask: graph.relations(z, mask, 0.1, 5, form, differentiable=False))(
        features.float(), mask
    )
    by_products, by_kernels = (
        float((r.weights - true.weights).norm() / true.weights.norm()) for r in (products, actual)
    )
    assert by_kernels < 2 * by_products + 1e-5
    assert torch.allclose(actual.change.double(), true.change, atol=1e-3)


@pytest.mark.parametrize("model", ["convnet", "resnet18"])
def test_a_networks_gradients_are_as_exact_as_the_librarys_own(model: str) -> None:
    """Against float64: what float32 loses on the way through the network, both lose."""
    examples, method = (
        images(1 if model == "convnet" else 3, 28 if model == "convnet" else 32),
        METHODS["fedavg"].cls(),
    )
    lost = {}
    for how, precision in (("true", "float64"), ("library", "float32"), ("kernels", "float32")):
        task = make_task(
            fedrane.Experiment(model=model, precision=precision, device="cuda"),
            examples.shape,
            examples.classes,
            None,
        )
        start = task.init()
        x = Normaliser.of(examples, task.dtype, task.device)(torch.from_numpy(examples.x[:128]).cuda())
        y, mask = torch.from_numpy(examples.y[:128]).cuda(), torch.ones(128, dtype=torch.bool, device="cuda")
        batch = Batch(x, y, mask, torch.tensor(0, device="cuda"), full=how != "kernels")

        def loss(params: tree.Tensors, task: Any = task, start: Any = start, batch: Batch = batch) -> Tensor:
            actual: Tensor = method.objective(task, None, Model(params, start.stats), batch)[0]  # type: ignore[arg-type]
            return actual

        if how == "kernels":
            with stacked_mode():
                gradients = torch.vmap(lambda params: torch.func.grad(loss)(params))(tree.stack([start.params] * 2))
            gradients = {name: value[1] for name, value in gradients.items()}
        else:
            gradients = torch.func.grad(loss)(start.params)
        lost[how] = {name: value.double() for name, value in gradients.items()}
    true = lost.pop("true")
    library, kernels = (
        sorted(float((actual[n] - true[n]).norm() / true[n].norm()) for n in true) for actual in lost.values()
    )
    print(f"{model}: lost in float32, library {library[len(library) // 2]:.1e}, worst {library[-1]:.1e}; "
          f"kernels {kernels[len(kernels) // 2]:.1e}, worst {kernels[-1]:.1e}")  # fmt: skip
    assert kernels[len(kernels) // 2] < 4 * library[len(library) // 2] + 1e-6
    assert kernels[-1] < 4 * library[-1] + 1e-6


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_captured_and_ends_where_the_sequential_engine_ends(name: str) -> None:
    """Within the rounding of float32; a warning (that it could not be stacked) is an error."""
    entry = METHODS[name]
    one, other = (
        trained(entry.cls(**entry.preset), engine, images(1, 28), participation=0.8, weight_decay=1e-3)
        for engine in ("sequential", "stacked")
    )
    assert gaps(one, other)[-1] < 2e-3
    for a, b in zip(one.history, other.history, strict=True):  # predictions, captured in round 1, are of each round
        assert a.keys() == b.keys()
        for key in (key for key in a if key.endswith("/loss")):
            assert b[key] == pytest.approx(a[key], rel=5e-3, abs=1e-3), key


@pytest.mark.parametrize("model", ["resnet18", "resnet18-cifar", "convnet", "mlp"])
@pytest.mark.parametrize("norm", ["shared", "batch", "local", "group"])
def test_every_network(model: str, norm: str) -> None:
    if model in ("convnet", "mlp") and norm != "shared":
        pytest.skip("it has no normalisation")
    settings: dict[str, Any] = {"model": model, "norm": norm, "lr": 0.01, "rounds": 1, "epochs": 1, "batch": 64}
    one, other = (trained("fedavg", engine, **settings) for engine in ("sequential", "stacked"))
    actual = gaps(one, other)
    # The gradients of BatchNorm's biases are sums that nearly cancel, and rounding is what is left of some of them.
    assert actual[len(actual) // 2] < 1e-3
    assert actual[-1] < 0.2


@pytest.mark.parametrize("precision", ["float32", "tf32", "bf16"])
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedrane"])
def test_a_run_repeats_itself_bit_for_bit(name: str, precision: str) -> None:
    first, second = (trained(name, "auto", model="resnet18", precision=precision) for _ in range(2))
    same_bytes(conformance.states(first), conformance.states(second))


def test_a_resumed_run_equals_one_never_stopped(tmp_path: Any) -> None:
    dataset = images(1, 28)
    settings = {"device": "cuda", "clients": 5, "rounds": 4, "epochs": 1, "batch": 16, "participation": 0.6}
    reference = fedrane.run(fedrane.Experiment(method="scaffold", **settings), dataset=dataset)
    rounds = iter([False, True])
    fedrane.run(
        fedrane.Experiment(method="scaffold", **settings), tmp_path / "run", dataset=dataset, stop=lambda: next(rounds)
    )
    resumed = fedrane.resume(tmp_path / "run", dataset=dataset)
    same_bytes(conformance.states(reference), conformance.states(resumed))


def test_bf16_learns_as_float32_does() -> None:
    float32, bf16 = (trained("fedavg", "stacked", rounds=6, precision=p) for p in ("float32", "bf16"))
    assert bf16.history[-1]["global/accuracy"] > float32.history[-1]["global/accuracy"] - 0.1


class Draws(fedrane.Algorithm):
    """Asks the host in a hook, which no graph can hold."""

    def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
        loss, outcome = super().objective(task, ctx, model, batch)
        return loss * (1 if float(loss.detach()) > 0 else 2), outcome


def test_a_method_that_cannot_be_captured_runs_eagerly_and_reports_why() -> None:
    with pytest.warns(UserWarning, match=r"one client at a time.*: its hook step"):
        result = trained(Draws(), "auto")
    assert np.isfinite(result.history[-1]["global/loss"])


def test_the_size_of_a_stack_is_reported() -> None:
    class Ear(fedrane.Callback):
        messages: list[str] = []  # noqa: RUF012 - one run

        def message(self, text: str) -> None:
            self.messages.append(text)

    fedrane.run(
        fedrane.Experiment(method="fedavg", clients=5, rounds=1, device="cuda"), dataset=images(), callbacks=[Ear()]
    )
    assert any("clients side by side" in text for text in Ear.messages)


def test_the_kernels_are_in_use() -> None:
    assert triton_available(), "this GPU's torch comes with Triton; without it convolutions are slow"


def test_augmented_inputs_are_those_of_a_cpu() -> None:
    how, examples = Augmentation(crop=4, flip=True, mixup=0.5), torch.arange(60).reshape(3, 20) % 7
    mask, keys = torch.arange(60).reshape(3, 20) % 20 < 13, torch.tensor([5, 6, 2**61])
    x, actual = torch.from_numpy(images(examples=7).x), []
    for device in ("cpu", "cuda"):
        augmenter = Augmenter.of(how, torch.device(device), torch.float32)
        moved = augmenter.move(x.to(device), examples.to(device), keys.to(device))
        mixed = augmenter.mix(moved.float(), examples.to(device), mask.to(device), keys.to(device))
        actual.append([part.cpu() for part in (moved, mixed[0], *mixed[1])])
    for host, gpu in zip(*actual, strict=True):
        torch.testing.assert_close(host, gpu, rtol=1e-6, atol=1e-6 * float(host.abs().max()))


@pytest.mark.parametrize("name", ["fedavg", "spherefed", "fedrane"])
def test_augmentation_is_captured(name: str) -> None:
    how = Augmentation(crop=4, flip=True, mixup=1.0)
    one, other, again = (trained(name, e, images(1, 28), augment=how) for e in ("sequential", "stacked", "stacked"))
    assert gaps(one, other)[-1] < 2e-3
    same_bytes(conformance.states(other), conformance.states(again))

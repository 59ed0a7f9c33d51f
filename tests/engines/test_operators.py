"""The operators that recordings may repeat: enough for everything built in and for common layers, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedrane
from asserts import close
from fedrane import Experiment
from fedrane.data.dataset import Dataset
from fedrane.engines import make, replay
from fedrane.engines.operators import REPLAYABLE
from fedrane.engines.replay import Recording
from fedrane.methods import METHODS
from fedrane.models import MODELS, SEQUENCES
from fedrane.testing import conformance
from problems import EVERY_METHOD

ENGINES = ["stacked", "threaded"]
SMALL_MODELS = ["mlp", "convnet"]


def numbers(vocabulary: int = 5) -> Dataset:
    draws = np.random.Generator(np.random.Philox(3))
    x, y = draws.integers(0, vocabulary, (28, 4)), np.arange(28) % 2
    return Dataset("numbers", x[:24], y[:24], x[24:], y[24:], ("a", "b"), (), (), vocabulary=vocabulary)


def images() -> Dataset:
    numbers = np.random.Generator(np.random.Philox(3))
    x, y = numbers.integers(0, 255, (28, 3, 8, 8)).astype(np.uint8), np.arange(28) % 2
    return Dataset("noise", x[:24], y[:24], x[24:], y[24:], ("a", "b"), (0.5,) * 3, (0.25,) * 3)


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Why work was not recorded, each time."""
    reasons: list[str] = []
    give_up = replay._Recorder.give_up

    def spy(recorder: Any, reason: str) -> None:
        reasons.append(reason)
        give_up(recorder, reason)

    monkeypatch.setattr(replay._Recorder, "give_up", spy)
    return reasons


def trained(method: Any, model: str, engine: str, **changes: Any) -> fedrane.Result:
    settings: dict[str, Any] = {"clients": 2, "rounds": 1, "epochs": 1, "batch": 4, "lr": 0.01, "threads": 1}
    settings |= {"device": "cpu", "precision": "float32", "partition": {"alpha": 100.0}} | changes
    dataset = numbers() if model in SEQUENCES else images()
    return fedrane.run(Experiment(method=method, model=model, engine=engine, **settings), dataset=dataset)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "model",
    [*SMALL_MODELS, *(pytest.param(name, marks=pytest.mark.slow) for name in MODELS if name not in SMALL_MODELS)],
)
@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_on_every_model_is_replayed(name: str, model: str, engine: str, refused: list[str]) -> None:
    entry = METHODS[name]
    trained(entry.cls(**entry.preset), model, engine)
    assert not [reason for reason in refused if reason]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("model", "changes"),
    [
        *(pytest.param("resnet18", {"norm": norm}, marks=pytest.mark.slow) for norm in ("batch", "local", "group")),
        *(
            pytest.param("resnet18", {"precision": precision}, marks=pytest.mark.slow)
            for precision in ("bf16", "float64")
        ),
        ("convnet", {"precision": "bf16"}),
        ("mlp", {"momentum": 0.9, "weight_decay": 0.01, "clip": 1.0, "precision": "float64"}),
        ("convnet", {"augment": {"crop": 2, "flip": True}}),
        ("lstm", {"precision": "float64"}),
        ("mlp", {"participation": 0.5, "client_dropout": 0.3, "rounds": 2}),
    ],
    ids=str,
)
def test_every_setting_is_replayed(model: str, changes: dict[str, Any], engine: str, refused: list[str]) -> None:
    trained("fedrane", model, engine, **changes)
    assert not [reason for reason in refused if reason]


def test_mixup_is_replayed_on_stacked_clients(refused: list[str]) -> None:
    """Of one client alone its weight is read by Python, so steps are done plainly."""
    trained("fedrane", "convnet", "stacked", augment={"mixup": 1.0})
    assert not [reason for reason in refused if reason]


GENERATOR = torch.Generator().manual_seed(0)
WEIGHT, KERNEL = torch.randn(4, 4, generator=GENERATOR), torch.randn(4, 2, 3, 3, generator=GENERATOR)
RECURRENT = nn.LSTM(4, 4, batch_first=True)
Y = torch.tensor([0, 3, 1, 2])


def image(x: Tensor) -> Tensor:
    return torch.stack([x, x.T]).reshape(1, 2, 4, 4)


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    **{
        f.__name__: f
        for f in (
            *(F.gelu, F.silu, F.elu, F.celu, F.selu, F.leaky_relu, F.softplus, F.softsign, F.hardtanh, F.relu6),
            *(F.hardswish, F.hardsigmoid, F.mish, F.relu, F.logsigmoid, F.tanhshrink),
            *(torch.sigmoid, torch.tanh, torch.exp, torch.expm1, torch.sin, torch.cos, torch.atan, torch.erf),
            *(torch.abs, torch.square, torch.neg, torch.sign, torch.floor, torch.round, torch.nan_to_num),
        )
    },
    "tanh of gelu": lambda x: F.gelu(x, approximate="tanh"),
    "log": lambda x: (x.square() + 1).log() + (x.square() + 1).log2() + torch.log1p(x.square()),
    "powers": lambda x: (x.square() + 1).sqrt() + (x.square() + 1).rsqrt() + x.pow(3) + 1 / (x.square() + 1),
    "power of a tensor": lambda x: (x.square() + 1) ** WEIGHT,
    "softmax": lambda x: x.softmax(-1) + x.log_softmax(0),
    "logsumexp": lambda x: x.logsumexp(-1),
    "sums": lambda x: x.sum() + x.mean(0) + x.prod(-1) + x.cumsum(0) + x.cumprod(1),
    "moments": lambda x: x.var(0) + x.std(1) + x.norm() + x.norm(dim=0) + torch.linalg.vector_norm(x, 1),
    "extremes": lambda x: x.amax(0) + x.amin(1) + x.max() + x.min() + x.max(0).values + x.min(1).values,
    "choices": lambda x: x.argmax(0) + x.argmin(0) + x.sort(0).values + x.topk(2, 0).values.sum(0) + x.argsort(0),
    "two": lambda x: torch.maximum(x, WEIGHT) + torch.minimum(x, WEIGHT) + torch.lerp(x, WEIGHT, 0.3),
    "clamped": lambda x: x.clamp(-1, 1) + x.clamp(min=0) + x.clamp(max=0.5) + x.clamp(min=WEIGHT),
    "compared": lambda x: x * ((x > 0) & (x < 2) | (x == 1) | ~(x >= WEIGHT) | (x != WEIGHT) | (x <= 1)),
    "shapes": lambda x: torch.cat([*x.split(2), x.flip(0), x.roll(1, 1), torch.stack([x, x]).flatten(0, 1)]),
    "tiled": lambda x: x.repeat(2, 1) + x.repeat_interleave(2, 0) + x.tile(2, 1) + x.unfold(0, 2, 1).sum() * 0,
    "slices": lambda x: x[1:, ::2] + x[:3, 1::2],
    "ranges": lambda x: x * torch.arange(0, 8, 2) + torch.arange(1, 5),
    "triangles": lambda x: x.tril() + x.triu(1) + x.diagonal().sum() + torch.diag_embed(x[0]),
    "gathered": lambda x: x.gather(1, Y[:, None]) + x[Y] + x.index_select(0, Y) + F.embedding(Y, x),
    "scattered": lambda x: torch.zeros(4, 4).scatter_add(0, Y.expand(4, 4), x) + torch.zeros(4, 4).index_add(0, Y, x),
    "products": lambda x: x @ WEIGHT + x.T @ x + torch.einsum("ij,kj->ik", x, WEIGHT) + torch.outer(x[0], x[1]),
    "batched products": lambda x: torch.bmm(x[None], x[None]) + torch.baddbmm(x[None], x[None], WEIGHT[None]),
    "linear": lambda x: F.linear(x, WEIGHT, WEIGHT[0]),
    "layer norm": lambda x: F.layer_norm(x, (4,), WEIGHT[0], WEIGHT[1]),
    "group norm": lambda x: F.group_norm(image(x), 2, WEIGHT[0, :2], WEIGHT[1, :2]),
    "batch norm": lambda x: F.batch_norm(x, None, None, WEIGHT[0], WEIGHT[1], training=True),
    "instance norm": lambda x: F.instance_norm(image(x)),
    "normalised": lambda x: F.normalize(x) + F.cosine_similarity(x, WEIGHT),
    "distances": lambda x: torch.cdist(x, WEIGHT) + F.pairwise_distance(x, WEIGHT),
    "prelu": lambda x: F.prelu(x, WEIGHT[0]),
    "glu": lambda x: F.glu(x),
    "conv1d": lambda x: F.conv1d(x[None], KERNEL[:, 0, :1].expand(4, 4, 3), padding=1),
    "conv2d": lambda x: F.conv2d(image(x), KERNEL, WEIGHT[0], padding=1) + F.conv2d(image(x), KERNEL, padding="same"),
    "strided": lambda x: F.conv2d(image(x), KERNEL, stride=2, padding=1),
    "depthwise": lambda x: F.conv2d(image(x), KERNEL[:2, :1], padding=1, groups=2),
    "conv3d": lambda x: F.conv3d(image(x)[None], KERNEL[:1, :1, None]),
    "transposed": lambda x: F.conv_transpose2d(image(x), KERNEL.transpose(0, 1)),
    "pools": lambda x: F.max_pool2d(image(x), 2) + F.avg_pool2d(image(x), 2) + F.adaptive_avg_pool2d(image(x), 2),
    "more pools": lambda x: (
        F.adaptive_max_pool2d(image(x), 1) + F.max_pool1d(x[None], 2).sum() + F.avg_pool1d(x, 2).sum()
    ),
    "padded": lambda x: F.pad(image(x), (1, 1, 1, 1)).sum() + F.pad(image(x), (1, 1, 1, 1), mode="reflect"),
    "resized": lambda x: F.interpolate(image(x), scale_factor=2) + F.interpolate(image(x), (8, 8), mode="bilinear"),
    "shuffled": lambda x: F.pixel_unshuffle(image(x), 2),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "lstm": lambda x: RECURRENT(x[None])[0],
    "cross entropy": lambda x: F.cross_entropy(x, Y) + F.cross_entropy(x, Y, label_smoothing=0.1, reduction="none"),
    "soft targets": lambda x: F.cross_entropy(x, WEIGHT.softmax(-1)),
    "losses": lambda x: (
        F.mse_loss(x, WEIGHT) + F.l1_loss(x, WEIGHT) + F.smooth_l1_loss(x, WEIGHT) + F.huber_loss(x, WEIGHT)
    ),
    "binary": lambda x: F.binary_cross_entropy_with_logits(x, WEIGHT.sigmoid()),
    "divergence": lambda x: F.kl_div(x.log_softmax(-1), WEIGHT.softmax(-1), reduction="batchmean"),
    "margin": lambda x: F.triplet_margin_loss(x, WEIGHT, WEIGHT.T) + F.hinge_embedding_loss(x, WEIGHT.sign()),
    "cast": lambda x: x.bfloat16().float() + x.double().float() + x.long() + x.bool(),
    "made": lambda x: (
        x + torch.ones_like(x) + torch.zeros_like(x) + torch.full_like(x, 2) + torch.arange(4) + torch.eye(4)
    ),
    "in place": lambda x: x.clone().add_(x).mul_(2).sub_(1).div_(3).clamp_(-1, 1).relu_(),
    "one hot": lambda x: x * (Y[:, None] == torch.arange(4)),
}


def gradient(layer: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def total(x: Tensor) -> Tensor:
        y = layer(x)
        return (y * torch.arange(1.0, y.numel() + 1).reshape(y.shape)).sum() + 0 * x.sum()

    return torch.func.grad(total)


NOT_STACKED = ("tiled", "lstm", "in place")
"""PyTorch has no batching rule for an operator of these: under ``vmap`` it warns and takes one client at a time."""


@pytest.mark.parametrize(
    ("name", "stacked"),
    [*((name, False) for name in LAYERS), *((name, True) for name in LAYERS if name not in NOT_STACKED)],
)
def test_common_layers_are_replayed_with_the_same_bits(name: str, stacked: bool) -> None:
    one = gradient(LAYERS[name])
    work = torch.vmap(one) if stacked else lambda x: one(x[0])[None]
    x, out = (torch.zeros(3 if stacked else 1, 4, 4) for _ in range(2))
    recorded = Recording(lambda: out.copy_(work(x)), [out])
    for seed in range(3):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        recorded.replay()
        assert torch.equal(out, work(x))
    assert not recorded.refused
    assert recorded.calls


@torch.library.custom_op("fedrane_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return 2 * x


@doubled.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


doubled.register_vmap(lambda info, in_dims, x: (doubled(x), in_dims[0]))


class Unknown(fedrane.Algorithm):
    """Uses an operator that nobody has tried."""

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        after = super().step(task, ctx, work, batch)
        params = {name: doubled(value) / 2 for name, value in after.model.params.items()}
        return after._replace(model=after.model._replace(params=params))


@pytest.mark.parametrize("engine", ENGINES)
def test_an_unknown_operator_is_done_plainly_and_reported_once(engine: str) -> None:
    assert "fedrane_tests::doubled" not in REPLAYABLE
    one, other = (conformance.trained(Unknown(), engine=name) for name in ("sequential", engine))
    close(conformance.states(one), conformance.states(other), 1e-12)
    method, fed = other.algorithm, other.federation
    server, used = method.init(fed.task, fed.roster), make(engine, method, fed)
    messages = [used.train_round(server, {}, [0, 1], round, 0.1, 2).messages for round in (1, 2)]
    [message] = messages[0]
    assert "fedrane_tests::doubled is not known to repeat correctly" in message
    assert not messages[1]


def test_nothing_that_depends_on_chance_or_changes_its_shape_by_values_is_listed() -> None:
    bad = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
    for name in REPLAYABLE:
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        operator = getattr(getattr(getattr(torch.ops, space), packet), overload or "default")
        if name != "aten::index.Tensor":  # by a mask it would; that is seen call by call
            assert bad.isdisjoint(operator.tags), name

"""A network as pure functions: its initialisation, its parts, and what an added branch leaves unchanged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from asserts import same_bytes
from fedrane import models
from fedrane.errors import ConfigError
from fedrane.models import MODELS, split_head
from fedrane.models.sequences import LastOutput
from fedrane.task import Batch, Task, cross_entropy, masked_mean
from problems import dense, task_of


def known(name: str, shape: tuple[int, ...], classes: int = 10, **settings: object) -> Task:
    return Task.build(*models.build(name, shape, classes), shape, classes, **settings)


@pytest.mark.parametrize(
    ("name", "shape", "width"),
    [
        ("mlp", (13,), 64),
        ("mlp", (1, 8, 8), 64),
        ("convnet", (1, 8, 8), 64),
        ("convnet", (1, 28, 28), 64),
        ("convnet", (3, 32, 32), 64),
        ("convnet", (3, 20, 31), 64),
        ("resnet18", (3, 32, 32), 512),
        ("resnet18-cifar", (3, 8, 8), 512),
    ],
)
def test_models_give_features_of_their_width(name: str, shape: tuple[int, ...], width: int) -> None:
    task = known(name, shape)
    assert task.width == width
    net = task.evaluating(task.init(), torch.ones(2, dtype=torch.bool))
    features = net.body(torch.zeros(2, *shape))
    assert features.shape == (2, width)
    assert net.head(features).shape == (2, 10)


@pytest.mark.parametrize(("name", "width"), [("lstm", 128), ("transformer", 64)])
def test_models_of_sequences_give_features_of_their_width(name: str, width: int) -> None:
    task = Task.build(*models.build(name, (9,), 10, 7), (9,), 10, vocabulary=7)
    assert task.width == width
    net = task.evaluating(task.init(), torch.ones(2, dtype=torch.bool))
    assert net.head(net.body(task.zeros(2))).shape == (2, 10)


def test_every_known_model_is_tried_above() -> None:
    assert set(MODELS) == {"mlp", "convnet", "resnet18", "resnet18-cifar", "lstm", "transformer"}


def test_the_lstm_is_that_of_the_library() -> None:
    """The same parameters by the same names give the same output after the last element."""
    ours, theirs = LastOutput(5, 4).double(), nn.LSTM(5, 4, batch_first=True).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(3, 6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ours(x), theirs(x)[0][:, -1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "vocabulary"), [("mlp", 7), ("lstm", 0)])
def test_a_model_for_other_inputs_is_refused(name: str, vocabulary: int) -> None:
    with pytest.raises(ConfigError, match="Use model=lstm" if vocabulary else "Use model=mlp or convnet"):
        models.build(name, (9,), 3, vocabulary)


def test_the_convnet_is_the_papers() -> None:
    """Two 5 × 5 convolutions of 16 and 32, and a linear embedding of 64."""
    shapes = {name: tuple(p.shape) for name, p in known("convnet", (1, 28, 28)).init().params.items()}
    assert shapes["body.conv1.weight"] == (16, 1, 5, 5)
    assert shapes["body.conv2.weight"] == (32, 16, 5, 5)
    assert shapes["body.embed.weight"] == (64, 32 * 4 * 4)
    assert shapes["head.weight"] == (10, 64)


def test_the_resnet_has_the_size_of_resnet18() -> None:
    """With ten classes and the ImageNet stem: 11,176,512 in the body and 5,130 in the head."""
    task = known("resnet18", (3, 32, 32))
    assert sum(p.numel() for p in task.init().params.values()) == 11_181_642


@pytest.mark.parametrize(("name", "shape"), [("convnet", (4,)), ("resnet18", (4,)), ("convnet", (1, 3, 3))])
def test_a_model_refuses_what_it_cannot_take(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="model=mlp"):
        known(name, shape)


def test_a_branch_does_not_change_how_the_others_start() -> None:
    plain = known("mlp", (5,))
    more = plain.add("aside", nn.Linear(64, 3))
    start = more.init()
    assert {"aside.weight", "aside.bias"} == start.params.keys() - plain.init().params.keys()
    same_bytes({name: start.params[name] for name in plain.init().params}, plain.init().params)


def test_the_seed_decides_the_start_and_torchs_generator_does_not() -> None:
    task = known("convnet", (1, 8, 8))
    starts = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.random.get_rng_state()
        starts.append(task.init())
        assert torch.equal(state, torch.random.get_rng_state())
    first, second = starts
    same_bytes(first, second)
    assert not torch.equal(first.params["head.weight"], replace(task, seed=1).init().params["head.weight"])


def test_every_layer_has_a_stream_of_its_own() -> None:
    """Layers of the same shape start from different draws."""
    start = task_of(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)), "2", (4,), 4).init().params
    weights = [start[name] for name in ("body.0.weight", "body.1.weight", "head.weight")]
    assert all(not torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])


def test_precisions_start_alike() -> None:
    single, double = (known("mlp", (5,), dtype=dtype).init() for dtype in (torch.float32, torch.float64))
    same_bytes(single.params, {name: p.float() for name, p in double.params.items()})


def test_a_given_network_keeps_its_weights() -> None:
    network = dense((6,), 3).double()
    task = task_of(network, "2", (6,), 3, fresh=False)
    assert torch.equal(task.init().params["body.0.weight"], network[0].weight)
    assert not torch.equal(task_of(network, "2", (6,), 3).init().params["body.0.weight"], network[0].weight)


def test_a_branch_of_a_network_that_keeps_its_weights_starts_from_the_seed() -> None:
    """The branch has no weights to keep, and torch's global generator must not matter."""
    first, again, other = (
        task_of(dense((6,), 3), "2", (6,), 3, fresh=False, seed=seed).add("extra", nn.Linear(5, 4)).init().params
        for seed in (0, 0, 1)
    )
    fresh = task_of(dense((6,), 3), "2", (6,), 3).add("extra", nn.Linear(5, 4)).init().params
    for name in ("extra.weight", "extra.bias"):
        assert torch.equal(first[name], again[name])
        assert torch.equal(first[name], fresh[name])
        assert not torch.equal(first[name], other[name])


def test_a_head_may_be_nested() -> None:
    network = nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 2)))
    task = task_of(network, "1.1", (4,), 2)
    assert task.width == 7
    assert set(task.init().params) == {"body.1.0.weight", "body.1.0.bias", "head.weight", "head.bias"}


def test_a_wrong_head_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no submodule 'fc'.*Known: 0, 1, 2"):
        split_head(dense((6,), 3), "fc", (6,))
    with pytest.raises(ConfigError, match="last operation"):
        split_head(dense((6,), 3), "0", (6,))


def test_a_network_for_other_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cannot take examples of shape \(9,\)"):
        split_head(dense((6,), 3), "2", (9,))


def test_the_given_network_is_left_as_it_was() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).train()
    before = {name: value.clone() for name, value in network.state_dict().items()}
    task_of(network, "2", (4,), 2)
    assert network.training
    assert isinstance(network[1], nn.BatchNorm1d)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())


def test_losses_leave_out_padding() -> None:
    scores, y = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    mask = torch.tensor([True, True, False, True, False, False])
    scores[~mask] = float("nan")
    batch = Batch(torch.zeros(6), y, mask, torch.tensor(0))
    expected = nn.functional.cross_entropy(scores[mask], y[mask])
    torch.testing.assert_close(cross_entropy(scores, batch), expected)
    assert masked_mean(torch.randn(6), torch.zeros(6, dtype=torch.bool)) == 0

"""Layers that know their batch: equal to torch's on the examples, blind to the padding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedrane.data.noise import uniform
from fedrane.errors import ConfigError
from fedrane.models.layers import KeyedDropout, MaskedBatchNorm, Pass, within
from fedrane.models.norms import POLICIES, convert, norm_names

SHAPES = [(12, 5), (12, 5, 4, 3), (12, 5, 7)]


def dressed(x: Tensor, extra: int) -> tuple[Tensor, Tensor]:
    """Examples with padding scattered between them."""
    mask = torch.zeros(len(x) + extra, dtype=torch.bool)
    mask[torch.randperm(len(mask), generator=torch.Generator().manual_seed(4))[: len(x)]] = True
    padded = torch.full((len(mask), *x.shape[1:]), 1e6, dtype=x.dtype)
    padded[mask] = x
    return padded, mask


def pair(shape: tuple[int, ...], affine: bool = True) -> tuple[nn.Module, nn.Module]:
    layer_class = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    theirs = layer_class(shape[1], affine=affine).double()
    if affine:
        nn.init.normal_(theirs.weight)
        nn.init.normal_(theirs.bias)
    ours = convert(nn.Sequential(theirs), "body", "shared").double()
    return theirs, ours


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_batchnorm_equals_torchs_without_padding(shape: tuple[int, ...], padded: bool, affine: bool) -> None:
    theirs, ours = pair(shape, affine)
    x = torch.randn(shape, dtype=torch.float64) * 3 + 1
    expected = theirs.train()(x)
    given, mask = dressed(x, 6) if padded else (x, torch.ones(len(x), dtype=torch.bool))
    now = Pass(True, mask, full=not padded)
    with within(now):
        got = ours(given)[mask]
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(now.fresh["body.0.running_mean"], theirs.running_mean)
    torch.testing.assert_close(now.fresh["body.0.running_var"], theirs.running_var)
    assert torch.equal(ours[0].running_mean, torch.zeros(shape[1], dtype=torch.float64)), "a pass writes nothing"


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_its_gradients_are_torchs(shape: tuple[int, ...], padded: bool, affine: bool) -> None:
    """Of the examples and of the affine parameters; padding has none."""
    theirs, ours = pair(shape, affine)
    x, weights = torch.randn(2, *shape, dtype=torch.float64)
    given, mask = dressed(x, 6) if padded else (x, torch.ones(len(x), dtype=torch.bool))
    x.requires_grad_()
    (theirs.train()(x) * weights).sum().backward()
    given = given.detach().requires_grad_()
    with within(Pass(True, mask, full=not padded)):
        (ours(given)[mask] * weights).sum().backward()
    assert given.grad is not None
    torch.testing.assert_close(given.grad[mask], x.grad, rtol=1e-9, atol=1e-9)
    assert bool((given.grad[~mask] == 0).all())
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-9)


def test_batchnorm_at_test_uses_running_statistics() -> None:
    theirs, ours = pair((8, 5))
    state = {"running_mean": torch.randn(5).double(), "running_var": torch.rand(5).double() + 0.5}
    theirs.load_state_dict(state, strict=False)
    ours[0].load_state_dict(state, strict=False)
    x = torch.randn(8, 5, dtype=torch.float64)
    with within(Pass(False, torch.ones(8, dtype=torch.bool), full=False)):
        torch.testing.assert_close(ours(x), theirs.eval()(x))
    torch.testing.assert_close(ours.eval()(x), theirs(x), msg="outside of a pass it is an ordinary module")


STATISTICS = "running_mean", "running_var"


def with_statistics(shape: tuple[int, ...]) -> tuple[nn.Module, nn.Module]:
    """Both layers with running statistics that are not the first ones."""
    state = {"running_mean": torch.randn(shape[1]).double(), "running_var": torch.rand(shape[1]).double() + 0.5}
    layers = pair(shape)
    layers[0].load_state_dict(state, strict=False)
    layers[1][0].load_state_dict(state, strict=False)
    return layers


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 1, 1)], ids=str)
@pytest.mark.parametrize(("examples", "full"), [(0, False), (1, False), (1, True)])
def test_what_has_no_variance_leaves_the_running_statistics_as_they_are(
    shape: tuple[int, ...], examples: int, full: bool
) -> None:
    """One value a channel, or none: the output is the bias, also for padding, which would grow with every layer."""
    _, ours = with_statistics(shape)
    x = torch.randn(shape, dtype=torch.float64)[: 1 if full else None]
    now = Pass(True, torch.arange(len(x)) < examples, full)
    with within(now):
        y = ours(x)
    torch.testing.assert_close(y, ours[0].bias.reshape(1, 5, *shape[2:]).expand_as(y), rtol=0, atol=0)
    for name in STATISTICS:
        assert torch.equal(now.fresh[f"body.0.{name}"], ours[0].get_buffer(name))


@pytest.mark.parametrize("shape", [(1, 5, 4), (1, 5, 3, 2), (2, 5)], ids=str)
@pytest.mark.parametrize("padded", [False, True])
def test_one_row_of_many_positions_has_a_variance(shape: tuple[int, ...], padded: bool) -> None:
    """And so have two examples: the unbiased one, as in torch."""
    theirs, ours = with_statistics(shape)
    x = torch.randn(shape, dtype=torch.float64)
    given, mask = dressed(x, 3) if padded else (x, torch.ones(len(x), dtype=torch.bool))
    now = Pass(True, mask, full=not padded)
    with within(now):
        got = ours(given)[mask]
    torch.testing.assert_close(got, theirs.train()(x), rtol=1e-10, atol=1e-10)
    for name in STATISTICS:
        torch.testing.assert_close(now.fresh[f"body.0.{name}"], theirs.get_buffer(name), rtol=1e-12, atol=1e-12)


def test_one_example_without_padding_is_its_own_mean() -> None:
    _, ours = pair((1, 5))
    with within(Pass(True, torch.ones(1, dtype=torch.bool), full=True)):
        torch.testing.assert_close(ours(torch.randn(1, 5, dtype=torch.float64))[0], ours[0].bias)


def test_batch_policy_uses_the_batch_also_at_test() -> None:
    layer = convert(nn.Sequential(nn.BatchNorm1d(3)), "body", "batch").double()
    x = torch.randn(6, 3, dtype=torch.float64) + 5
    with within(Pass(False, torch.ones(6, dtype=torch.bool), full=False)):
        torch.testing.assert_close(layer(x).mean(0), torch.zeros(3, dtype=torch.float64), atol=1e-12, rtol=0)
    assert not list(layer.buffers())


def test_group_policy_leaves_no_statistics() -> None:
    network = convert(nn.Sequential(nn.BatchNorm2d(64), nn.BatchNorm2d(6), nn.BatchNorm1d(5)), "body", "group")
    assert [layer.num_groups for layer in network] == [16, 1, 1]
    assert not list(network.buffers())


def test_norm_names_are_those_of_the_layers() -> None:
    network = convert(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), "body", "local")
    assert set(norm_names(network, "body")) == {
        f"body.1.{n}" for n in ("weight", "bias", "running_mean", "running_var")
    }


def test_a_batchnorm_alone_is_converted() -> None:
    assert isinstance(convert(nn.BatchNorm1d(3), "head", "shared"), MaskedBatchNorm)


@pytest.mark.parametrize(
    ("layer", "policy", "words"),
    [
        (nn.BatchNorm1d(3, momentum=None), "shared", "momentum=None"),
        (nn.BatchNorm1d(3, track_running_stats=False), "shared", "norm=batch"),
        (nn.InstanceNorm1d(3, track_running_stats=True), "shared", "track_running_stats=False"),
        (nn.LazyLinear(3), "shared", "lazy"),
        (nn.LSTM(3, 3, 2, dropout=0.5), "shared", "dropout"),
        (nn.AlphaDropout(0.5), "shared", "generator"),
        (nn.Linear(2, 2), "sharde", "Did you mean 'shared'"),
    ],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_what_no_policy_covers_is_refused_with_a_remedy(layer: nn.Module, policy: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        convert(nn.Sequential(layer), "body", policy)
    assert caught.value.remedy


def test_policies_are_the_four() -> None:
    assert POLICIES == ("shared", "batch", "local", "group")


def dropped(key: int, examples: int, layer: KeyedDropout) -> Tensor:
    x = torch.ones(examples, 50, dtype=torch.float64)
    with within(Pass(True, torch.ones(examples, dtype=torch.bool), True, torch.tensor(key))):
        return layer(x)


def test_dropout_is_a_function_of_the_key() -> None:
    layer = KeyedDropout(0.3, layer=2, by_channel=False)
    assert torch.equal(dropped(7, 40, layer), dropped(7, 40, layer))
    assert not torch.equal(dropped(7, 40, layer), dropped(8, 40, layer))
    assert torch.equal(dropped(7, 60, layer)[:40], dropped(7, 40, layer)), "padding moves no mask"
    values = dropped(7, 400, layer)
    assert set(values.unique().tolist()) == {0.0, 1 / 0.7}
    assert abs(float((values == 0).double().mean()) - 0.3) < 0.01


def test_dropout_works_however_deep() -> None:
    """The number of the layer is part of the mix, and may be large."""
    masks = [dropped(7, 40, KeyedDropout(0.5, layer, by_channel=False)) for layer in (0, 5, 6, 1000)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def test_dropout_is_off_outside_of_training() -> None:
    layer = KeyedDropout(0.9, 0, by_channel=False)
    x = torch.randn(5, 4)
    assert torch.equal(layer(x), x)
    with within(Pass(False, torch.ones(5, dtype=torch.bool), True, torch.tensor(1))):
        assert torch.equal(layer(x), x)


def test_channel_dropout_drops_whole_channels() -> None:
    layer = convert(nn.Sequential(nn.Dropout2d(0.5)), "body", "shared")[0]
    with within(Pass(True, torch.ones(9, dtype=torch.bool), True, torch.tensor(3))):
        out = layer(torch.ones(9, 8, 3, 3))
    per_channel = out.flatten(2)
    assert torch.equal(per_channel.amin(2), per_channel.amax(2))
    assert 0 < float((per_channel[..., 0] == 0).float().mean()) < 1


def test_noise_is_uniform_and_uncorrelated() -> None:
    position = torch.arange(100_000)
    a, b = uniform(torch.tensor(5), 1, position), uniform(torch.tensor(6), 1, position)
    for numbers in (a, b):
        assert abs(float(numbers.mean()) - 0.5) < 5e-3
        assert abs(float(numbers.var()) - 1 / 12) < 2e-3
        neighbours = torch.corrcoef(torch.stack([numbers[:-1], numbers[1:]]))[0, 1]
        assert abs(float(neighbours)) < 0.015
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.015


def test_the_pass_works_under_vmap_and_grad() -> None:
    """What a stacked engine does: the layer mapped over clients equals it client by client."""
    _, ours = pair((6, 5))
    x = torch.randn(3, 6, 5, dtype=torch.float64)
    mask = torch.rand(3, 6) < 0.7

    def loss(weight: Tensor, examples: Tensor, mask: Tensor) -> Tensor:
        with within(Pass(True, mask, full=False)):
            out = torch.func.functional_call(ours, {"0.weight": weight}, (examples,))
        return (out.square() * mask[:, None]).sum()

    gradient = torch.func.grad(loss)
    weight = torch.randn(5, dtype=torch.float64)
    together = torch.func.vmap(gradient, in_dims=(None, 0, 0))(weight, x, mask)
    torch.testing.assert_close(together, torch.stack([gradient(weight, x[k], mask[k]) for k in range(3)]))

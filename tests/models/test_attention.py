"""Attention whose dropout masks come from the batch's key: torch's in all else, alike in every engine."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fedrane
from asserts import close, same_bytes
from fedrane import models
from fedrane.errors import ConfigError
from fedrane.models.attention import Attention
from fedrane.models.layers import Pass, within
from fedrane.models.norms import convert
from fedrane.task import Task
from fedrane.testing import conformance
from problems import Listener, task_of

WIDTH, LENGTH, EXAMPLES = 8, 5, 3
DRAWS = torch.Generator().manual_seed(2)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=DRAWS)


def layers(**settings: Any) -> tuple[nn.MultiheadAttention, nn.Module]:
    """The library's, and ours with the same parameters."""
    theirs = nn.MultiheadAttention(WIDTH, 2, **settings).double()
    for bias in (theirs.in_proj_bias, theirs.out_proj.bias):
        if bias is not None:
            nn.init.normal_(bias)
    return theirs, convert(nn.Sequential(theirs), "body", "shared")[0]


PADDING = torch.arange(LENGTH).expand(EXAMPLES, LENGTH) >= torch.tensor([[3], [5], [4]])
LATER = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"need_weights": False},
        {"average_attn_weights": False},
        {"attn_mask": LATER},
        {"attn_mask": LATER, "is_causal": True},
        {"attn_mask": drawn(LENGTH, LENGTH)},
        {"attn_mask": LATER.expand(2 * EXAMPLES, LENGTH, LENGTH)},
        {"key_padding_mask": PADDING},
        {"key_padding_mask": PADDING, "attn_mask": LATER},
    ],
    ids=lambda more: " ".join(f"{name} {getattr(v, 'dtype', v)}" for name, v in more.items()) or "plain",
)
def test_it_is_torchs(batch_first: bool, bias: bool, more: dict[str, Any]) -> None:
    """With other keys than queries, too; and the gradients of what went in."""
    theirs, ours = layers(batch_first=batch_first, bias=bias)
    assert isinstance(ours, Attention)
    shape = (EXAMPLES, LENGTH, WIDTH) if batch_first else (LENGTH, EXAMPLES, WIDTH)
    inputs = [drawn(*shape).requires_grad_() for _ in range(3)]
    expected, weights = theirs(*inputs, **more)
    got, shares = ours(*inputs, **more)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    assert (shares is None) == (weights is None)
    if weights is not None:
        torch.testing.assert_close(shares, weights, rtol=1e-10, atol=1e-12)
    for one, other in zip(
        torch.autograd.grad(got.square().sum(), inputs),
        torch.autograd.grad(expected.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


def test_of_a_single_example() -> None:
    theirs, ours = layers(batch_first=True)
    x = drawn(LENGTH, WIDTH)
    for one, other in zip(ours(x, x, x), theirs(x, x, x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def passed(layer: nn.Module, x: Tensor, key: int = 3, train: bool = True) -> Any:
    with within(Pass(train, torch.ones(EXAMPLES, dtype=torch.bool), True, torch.tensor(key))):
        return layer(x, x, x, average_attn_weights=False)


def test_its_dropout_is_a_function_of_the_key() -> None:
    _, ours = layers(batch_first=True, dropout=0.4)
    x = drawn(EXAMPLES, LENGTH, WIDTH)
    (_, dropped), (_, whole) = passed(ours, x), passed(ours, x, train=False)
    kept = dropped != 0
    assert 0.4 < kept.double().mean() < 0.8
    torch.testing.assert_close(dropped[kept], (whole / 0.6)[kept])
    assert torch.equal(passed(ours, x)[0], passed(ours, x)[0])
    assert not torch.equal(passed(ours, x)[0], passed(ours, x, key=4)[0])
    torch.testing.assert_close(passed(ours, x[:2])[0], passed(ours, x)[0][:2], msg="padding moves no mask")


def test_its_masks_do_not_depend_on_the_order_of_dimensions() -> None:
    _, first = layers(batch_first=True, dropout=0.4)
    _, second = layers(batch_first=False, dropout=0.4)
    second.load_state_dict(first.state_dict())
    x = drawn(EXAMPLES, LENGTH, WIDTH)
    torch.testing.assert_close(passed(first, x)[0], passed(second, x.transpose(0, 1))[0].transpose(0, 1))


@pytest.mark.parametrize("setting", [{"kdim": 4}, {"add_bias_kv": True}, {"add_zero_attn": True}])
def test_an_unusual_attention_with_dropout_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="draws its own dropout masks"):
        layers(dropout=0.1, **setting)
    layers(**setting)


# ---- stock layers of a transformer


class Encoder(nn.Module):
    """A stock encoder on the six columns of a table, taken for a sequence."""

    def __init__(self, batch_first: bool = True, decoder: bool = False) -> None:
        super().__init__()
        self.batch_first = batch_first
        self.embed = nn.Linear(1, WIDTH)
        settings: dict[str, Any] = {"dim_feedforward": 12, "dropout": 0.2, "batch_first": batch_first}
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 2, **settings), 2)
        self.decoder = nn.TransformerDecoderLayer(WIDTH, 2, **settings) if decoder else None
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x[:, :, None])
        h = self.encoder(h if self.batch_first else h.transpose(0, 1))
        h = self.decoder(h, h) if self.decoder else h
        out: Tensor = self.head(h.mean(1 if self.batch_first else 0))
        return out


def ended(engine: str, network: nn.Module) -> fedrane.Result:
    listener = Listener()
    chosen = conformance.experiment("fedavg", engine=engine, rounds=2, epochs=1, threads=1)
    result = fedrane.run(
        chosen, dataset=conformance.blobs(90), model=lambda *_: network, callbacks=[listener], progress=False
    )
    assert listener.messages == [], "steps are stacked and replayed"
    return result


@pytest.mark.parametrize("engine", ["stacked", "threaded"])
@pytest.mark.parametrize(("batch_first", "decoder"), [(True, True), (False, False)])
@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_engines_agree_on_stock_layers_with_dropout(engine: str, batch_first: bool, decoder: bool) -> None:
    """In the order of dimensions, too, in which the number of examples decides where an example's numbers are."""
    one, other = ended("sequential", Encoder(batch_first, decoder)), ended(engine, Encoder(batch_first, decoder))
    close(conformance.states(one), conformance.states(other), 1e-12)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
def test_a_prediction_is_that_of_the_stock_layer() -> None:
    network = Encoder().double().eval()
    task = task_of(network, "head", (6,), 3, fresh=False)
    x = drawn(4, 6)
    net = task.evaluating(task.init(), torch.ones(4, dtype=torch.bool))
    with torch.no_grad():
        torch.testing.assert_close(net.head(net.body(x)), network(x), rtol=1e-9, atol=1e-10)


def test_all_of_a_transformer_is_initialised_from_the_seed() -> None:
    """Attention's projections have no initialisation that a network would find by the name of all others."""

    def first(seed: int, drawn_before: int) -> dict[str, Tensor]:
        torch.manual_seed(drawn_before)
        return Task.build(*models.build("transformer", (6,), 3, 9), (6,), 3, vocabulary=9, seed=seed).init().params

    same_bytes(first(0, 1), first(0, 2))
    other = first(1, 1)
    for name, value in first(0, 1).items():
        constant = bool((value == value.flatten()[0]).all())
        assert constant or not torch.equal(value, other[name]), name


class Swapped(nn.Module):
    """Dropout where the examples are the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.drop(x.T).T)
        return out


def test_dropout_over_the_examples_is_refused() -> None:
    with pytest.raises(ConfigError, match="dropout depends on how many examples") as caught:
        task_of(Swapped(), "head", (6,), 3)
    assert "batch_first=True" in caught.value.remedy

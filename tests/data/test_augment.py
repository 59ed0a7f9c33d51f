"""Augmentation: what is drawn, from which key, and that every engine draws the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta, kstest
from torch import Tensor
from torch.nn import functional as F

import fedrane
from asserts import close, same_bytes, untimed
from fedrane import Augmentation, Experiment
from fedrane.data.augment import Augmenter
from fedrane.data.dataset import Dataset
from fedrane.errors import ConfigError
from fedrane.methods import METHODS
from fedrane.task import Batch, cross_entropy
from fedrane.testing import conformance
from problems import ALWAYS_TESTED, slow_except

KEY = torch.tensor(77)
EVERYTHING = Augmentation(crop=1, flip=True, mixup=0.7)


def augmenter(**how: Any) -> Augmenter:
    return Augmenter.of(Augmentation(**how), torch.device("cpu"), torch.float64)


def pictures(examples: int, side: int = 6) -> Tensor:
    """Images whose pixels identify their original position: none is black, and no two are equal."""
    numbers = np.random.Generator(np.random.Philox(1)).permutation(examples * side * side)
    return torch.from_numpy(numbers.reshape(examples, 1, side, side) + 1)


def shift(image: Tensor, down: int, right: int, mirrored: bool) -> Tensor:
    """By padding and cropping, as in other libraries."""
    side, pad = image.shape[-1], 2
    padded = F.pad(image, (pad, pad, pad, pad))[:, pad + down : pad + down + side, pad + right : pad + right + side]
    return padded.flip(-1) if mirrored else padded


def seen(moved: Tensor, originals: Tensor) -> list[tuple[int, int, bool]]:
    """The shift and flip that produced each image."""
    ways = [(d, r, m) for d in range(-2, 3) for r in range(-2, 3) for m in (False, True)]
    moves = []
    for image, original in zip(moved, originals, strict=True):
        fits = [way for way in ways if torch.equal(shift(original, *way), image)]
        assert len(fits) == 1
        moves += fits
    return moves


def test_images_are_padded_cut_and_mirrored_uniformly() -> None:
    x = pictures(10)
    examples = torch.arange(2000) % 10
    moves = seen(augmenter(crop=2, flip=True).move(x, examples, KEY), x[examples])
    counts = np.array([moves.count(way) for way in sorted(set(moves))])
    assert len(counts) == 50
    assert ((counts - 40) ** 2 / 40).sum() < 85, "χ² of 49 degrees of freedom: one in a thousand is above"


def test_each_part_alone() -> None:
    x, examples = pictures(4), torch.arange(4).repeat(50)
    shifts = seen(augmenter(crop=1).move(x, examples, KEY), x[examples])
    assert {(d, r) for d, r, _ in shifts} == {(d, r) for d in (-1, 0, 1) for r in (-1, 0, 1)}
    assert not any(mirrored for *_, mirrored in shifts)
    flips = seen(augmenter(flip=True).move(x, examples, KEY), x[examples])
    assert {(d, r) for d, r, _ in flips} == {(0, 0)}
    assert 70 < sum(mirrored for *_, mirrored in flips) < 130


def test_another_key_and_another_position_draw_otherwise() -> None:
    x, examples = pictures(1), torch.zeros(40, dtype=torch.int64)
    one, other = (augmenter(crop=2, flip=True).move(x, examples, key) for key in (KEY, KEY + 1))
    assert not torch.equal(one, other)
    assert len(set(seen(one, x[examples]))) > 10


def mixed(examples: int, counted: int, key: Tensor = KEY, mixup: float = 1.0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mix inputs that are their own index: the mixture, its partners, the weight, and the labels of the partners."""
    x = torch.arange(examples, dtype=torch.float64)[:, None] + 1
    y, mask = torch.arange(examples) % 3, torch.arange(examples) < counted
    x[counted:] = torch.nan  # padding may have any value
    inputs, other = augmenter(mixup=mixup).mix(x, y, mask, key)
    partner = ((inputs - x) / other.weight[:, None] + x)[:counted, 0].round().long() - 1
    assert torch.equal(other.y[:counted], y[partner])
    return inputs[:counted], partner, other.weight, other.y


def test_every_example_is_a_partner_once_and_padding_never() -> None:
    for counted in (1, 2, 5, 8):
        assert mixed(8, counted)[1].sort().values.tolist() == list(range(counted))


def test_partners_are_uniform() -> None:
    orders = [mixed(4, 4, KEY + k)[1].tolist() for k in range(2400)]
    counts = np.array([orders.count(order) for order in {tuple(f): f for f in orders}.values()])
    assert len(counts) == 24
    assert ((counts - 100) ** 2 / 100).sum() < 50, "χ² of 23 degrees of freedom: one in a thousand is above"


def test_an_example_alone_is_never_mixed() -> None:
    x = torch.rand(1, 5, dtype=torch.float64)
    inputs, _ = augmenter(mixup=1.0).mix(x, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.bool), KEY)
    assert torch.equal(inputs, x)


@pytest.mark.parametrize("mixup", [0.2, 1.0, 4.0])
def test_weights_are_of_a_beta_distribution(mixup: float) -> None:
    keys, mask = KEY + torch.arange(1000), torch.ones(1000, 2, dtype=torch.bool)
    _, other = augmenter(mixup=mixup).mix(mask.double()[..., None], mask.long(), mask, keys)
    assert kstest(other.weight[:, 0].numpy(), beta(mixup, mixup).cdf).pvalue > 1e-3


def test_padding_changes_nothing_and_clients_side_by_side_are_as_alone() -> None:
    keys, examples = torch.tensor([3, 4]), torch.tensor([[5, 2, 7, 0], [1, 1, 0, 0]])
    mask = torch.tensor([[True] * 4, [True, True, False, False]])
    x, y, how = pictures(8), torch.arange(8), augmenter(crop=2, flip=True, mixup=0.5)
    moved = how.move(x, examples, keys).double()
    both, other = how.mix(moved, y[examples], mask, keys)
    for k, count in enumerate((4, 2)):
        alone = how.move(x, examples[k, :count], keys[k]).double()
        assert torch.equal(alone, moved[k, :count])
        inputs, labels = how.mix(alone, y[examples[k, :count]], mask[k, :count], keys[k])
        assert torch.equal(inputs, both[k, :count])
        assert torch.equal(labels.y, other.y[k, :count])
        assert torch.equal(labels.weight, other.weight[k, :count])


def test_losses_are_those_of_the_mixed_targets() -> None:
    scores, y = torch.randn(6, 3, dtype=torch.float64), torch.arange(6) % 3
    x, mask = torch.randn(6, 2, dtype=torch.float64), torch.tensor([True] * 5 + [False])
    inputs, other = augmenter(mixup=1.0).mix(x, y, mask, KEY)
    batch = Batch(inputs, y, mask, KEY, mixed=other)
    assert torch.allclose(batch.targets(3).sum(1), torch.ones(6, dtype=torch.float64))
    by_hand = -(batch.targets(3) * scores.log_softmax(1)).sum(1)[:5].mean()
    assert cross_entropy(scores, batch) == pytest.approx(float(by_hand), rel=1e-12)


# ---- whole runs


def run(engine: str, method: Any = "fedavg", **changes: Any) -> fedrane.Result:
    settings: dict[str, Any] = {"clients": 4, "rounds": 2, "epochs": 1, "batch": 32, "precision": "float64"}
    settings |= {"dataset": "digits", "model": "mlp", "device": "cpu", "augment": EVERYTHING}
    return fedrane.run(Experiment(method=method, engine=engine, **(settings | changes)))


@pytest.mark.parametrize("name", slow_except(ALWAYS_TESTED, METHODS))
def test_every_method_in_every_engine(name: str) -> None:
    runs = [run(engine, name) for engine in ("sequential", "stacked", "threaded")]
    plain = run("sequential", name, augment=Augmentation())
    for other in runs[1:]:
        close(conformance.states(runs[0]), conformance.states(other), 1e-10)  # a calibration solves
    assert runs[0].history[0]["train/loss"] != plain.history[0]["train/loss"], "it was seen"


def test_the_evaluation_sees_plain_inputs() -> None:
    changed = Augmentation(crop=3, flip=True)
    still, moved = (run("sequential", lr=1e-300, augment=how) for how in (Augmentation(), changed))
    for a, b in zip(still.history, moved.history, strict=True):
        assert a["global/loss"] == b["global/loss"]
        assert a["train/loss"] != b["train/loss"]


def test_a_calibration_sees_plain_inputs() -> None:
    runs = [run(engine, "spherefed", lr=1e-300) for engine in ("sequential", "stacked")]
    plain = run("sequential", "spherefed", lr=1e-300, augment=Augmentation())
    for result in runs:
        close(result.server.extra, plain.server.extra, 1e-12)


def test_a_resumed_run_is_the_same(tmp_path: Any) -> None:
    settings: dict[str, Any] = {"dataset": "digits", "clients": 4, "rounds": 4, "epochs": 1, "batch": 32}
    experiment = Experiment(augment=EVERYTHING, device="cpu", **settings)
    whole = fedrane.run(experiment, tmp_path / "whole")
    asked = iter([False, True])
    fedrane.run(experiment, tmp_path / "cut", stop=lambda: next(asked, True))
    resumed = fedrane.resume(tmp_path / "cut")
    same_bytes(conformance.states(whole), conformance.states(resumed))
    assert untimed(whole.history) == untimed(resumed.history)


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"crop": 2}, "augment.crop on inputs of shape (3,): they are not images"),
        ({"flip": True}, "augment.flip on inputs of shape (3,)"),
    ],
)
def test_tables_are_neither_cropped_nor_mirrored(how: dict[str, Any], says: str) -> None:
    x, y = np.random.Generator(np.random.Philox(2)).normal(size=(60, 3)).astype(np.float32), np.arange(60) % 2
    examples = Dataset("table", x[:40], y[:40], x[40:], y[40:], ("a", "b"), (0.0,) * 3, (1.0,) * 3)
    settings: dict[str, Any] = {"clients": 2, "rounds": 1, "partition": fedrane.Partitioning(kind="iid")}
    with pytest.raises(ConfigError) as caught:
        fedrane.run(Experiment(augment=Augmentation(**how), **settings), dataset=examples)
    assert says in str(caught.value)
    fedrane.run(Experiment(augment=Augmentation(mixup=1.0), **settings), dataset=examples)


@pytest.mark.parametrize("how", [{"crop": -1}, {"mixup": -0.5}, {"mixup": float("nan")}])
def test_what_cannot_be_is_refused(how: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="augment"):
        Augmentation(**how)


def test_a_crop_contains_part_of_its_image() -> None:
    with pytest.raises(ConfigError, match=r"augment\.crop=8 on images of 8 × 8"):
        run("sequential", augment=Augmentation(crop=8))

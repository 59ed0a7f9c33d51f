"""What a trained model takes, and what it refuses rather than predict wrongly."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedrane
from fedrane import Experiment, Predictor
from fedrane.data import load
from fedrane.errors import DataError
from fedrane.methods.fedavg import FedAvg
from fedrane.testing import conformance
from fedrane.training.predictor import Inputs, read_named_inputs

DIGITS = load("digits")
BYTES = torch.from_numpy(DIGITS.x_test)


@cache
def images() -> Predictor:
    settings: dict[str, Any] = {"clients": 5, "rounds": 3, "batch": 16, "model": "mlp", "device": "cpu"}
    return fedrane.run(Experiment(dataset="digits", eval_every=3, **settings)).model


@cache
def table() -> Predictor:
    return conformance.trained(FedAvg(), rounds=1).model


def accuracy(scores: Tensor) -> float:
    return float((scores.argmax(1) == torch.from_numpy(DIGITS.y_test)).double().mean())


# ---- images


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fractions_are_predicted_as_bytes_are(dtype: torch.dtype) -> None:
    torch.testing.assert_close(images()(BYTES.to(dtype) / 255), images()(BYTES))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_short_fractions_lose_no_more_than_they_have_lost(dtype: torch.dtype) -> None:
    """They are widened before they are multiplied."""
    fractions = (BYTES / 255).to(dtype)
    assert torch.equal(images()(fractions), images()(fractions.float()))


def test_black_and_white_is_fractions() -> None:
    mask = BYTES > 127
    torch.testing.assert_close(images()(mask), images()(255 * mask.to(torch.uint8)))


@pytest.mark.parametrize(
    ("x", "word"),
    [
        (BYTES.float(), "divide by"),  # bytes as floats: once multiplied by 255 in silence
        (BYTES.double(), "divide by"),
        (BYTES.long(), "as uint8"),
        (BYTES.to(torch.int16) * 200, "65535"),
        (BYTES / 255 - 0.5, "do not normalise"),
        (torch.full((2, 1, 8, 8), 1.01), "from 1.01"),
        (torch.full((2, 1, 8, 8), torch.nan), "not a number"),
        (torch.full((2, 1, 8, 8), torch.inf), "to inf"),
        (torch.zeros((2, 1, 8, 8), dtype=torch.complex64), "x.real"),
    ],
)
def test_what_is_no_image_is_refused(x: Tensor, word: str) -> None:
    with pytest.raises(DataError) as error:
        images()(x)
    assert word in str(error.value).replace("1.0099999904632568", "1.01")
    assert str(x.dtype) in str(error.value)


def test_one_bad_pixel_is_enough() -> None:
    x = BYTES / 255
    x[17, 0, 3, 3] = 255
    with pytest.raises(DataError, match=r"from 0.0 to 255.0"):
        images()(x)


@pytest.mark.parametrize(
    ("shape", "word"),
    [
        ((1, 8, 8), "x[None]"),
        ((5, 8, 8, 1), "permute"),
        ((5, 3, 8, 8), "(1, 8, 8)"),
        ((5, 1, 9, 9), "Resize"),
        ((5, 64), "(1, 8, 8)"),
        ((), "(1, 8, 8)"),
    ],
)
def test_images_of_another_shape_are_refused(shape: tuple[int, ...], word: str) -> None:
    with pytest.raises(DataError) as error:
        images()(torch.zeros(shape))
    assert word in str(error.value)
    assert str(shape) in str(error.value)


def test_only_tensors_are_taken() -> None:
    with pytest.raises(DataError, match=r"torch.as_tensor"):
        images()(DIGITS.x_test)  # type: ignore[arg-type]


def test_an_empty_batch_has_no_predictions() -> None:
    assert images()(torch.zeros(0, 1, 8, 8)).shape == (0, 10)


# ---- tables


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float16])
def test_a_table_may_hold_any_numbers(dtype: torch.dtype) -> None:
    examples = torch.arange(12).reshape(2, 6).to(dtype)
    torch.testing.assert_close(table()(examples), table()(examples.double()))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e300])
def test_a_table_holds_finite_numbers(value: float) -> None:
    """As the model computes: 1e300 is one in 64 bits and none in 32."""
    model = conformance.trained(FedAvg(), rounds=1, precision="float32").model
    examples = torch.zeros(3, 6, dtype=torch.float64)
    examples[1, 2] = value
    with pytest.raises(DataError, match=r"the input holds (nan|-?inf)"):
        model(examples)


@pytest.mark.parametrize(("shape", "word"), [((6,), "x[None]"), ((2, 5), "columns"), ((2, 6, 1), "(6,)")])
def test_a_table_of_another_width_is_refused(shape: tuple[int, ...], word: str) -> None:
    with pytest.raises(DataError) as error:
        table()(torch.zeros(shape))
    assert word in str(error.value)


# ---- where values cannot be looked at


def test_values_need_not_be_looked_at() -> None:
    model = conformance.trained(FedAvg(), rounds=1).model
    model.check_values = False
    assert model(torch.full((1, 6), torch.nan)).isnan().all()
    examples = torch.zeros(4, 6, dtype=torch.float64)
    stacked = torch.func.vmap(lambda example: model(example[None])[0])(examples)
    torch.testing.assert_close(stacked, model(examples))


def test_a_compiled_model_predicts_alike() -> None:
    compiled = torch.no_grad()(torch.compile(images(), backend="eager"))
    torch.testing.assert_close(compiled(BYTES[:4] / 255), images()(BYTES[:4]))
    torch.testing.assert_close(compiled(BYTES[:4]), images()(BYTES[:4]))


# ---- files


def shaped(*shape: int) -> Inputs:
    return Inputs(shape, ("a", "b"), (0.0,) * shape[0], (1.0,) * shape[0])


@pytest.mark.parametrize("x", [DIGITS.x_test, DIGITS.x_test / 255, (DIGITS.x_test / 255).astype(np.float32)])
def test_examples_of_a_file_are_bytes(x: Any, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=x)
    examples = np.stack([example for _, example in read_named_inputs(tmp_path / "x.npz", shaped(1, 8, 8), 0)])
    assert examples.dtype == np.uint8
    assert np.array_equal(examples, DIGITS.x_test)


@pytest.mark.parametrize(
    ("x", "word"),
    [
        (DIGITS.x_test.astype(np.float32), "divide by"),
        (DIGITS.x_test.astype(np.int64), "as uint8"),
        (DIGITS.x_test.astype(np.uint16) * 257, "65535"),
        (DIGITS.x_test / 255 - 0.5, "do not normalise"),
        (np.full((2, 8, 8), np.nan), "not a number"),
    ],
)
def test_a_file_of_other_images_is_refused(x: Any, word: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=x)
    with pytest.raises(DataError) as error:
        list(read_named_inputs(tmp_path / "x.npz", shaped(1, 8, 8), 0))
    assert word in str(error.value)
    assert str(tmp_path / "x.npz") in str(error.value)


def test_a_file_of_other_columns_is_refused(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.zeros((2, 5)))
    with pytest.raises(DataError, match="columns"):
        list(read_named_inputs(tmp_path / "x.npz", shaped(6), 0))


def test_the_metadata_of_an_older_version_is_enough() -> None:
    old = {"shape": [1, 8, 8], "classes": ["a", "b"], "mean": [0.5], "std": [0.2]}
    assert Inputs.from_dict(old, Path("metadata.json")).images
    assert not Inputs.from_dict({**old, "shape": [6]}, Path("metadata.json")).images

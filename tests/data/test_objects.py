"""Datasets whose items are dictionaries, as those of Hugging Face: their columns, classes, clients and splits.

The fakes do what the package's documentation says of ``datasets.Dataset``: a length, items by index, the names of the
columns, and features, of which a ``ClassLabel`` has the names of the classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fedrane
from fedrane import Experiment
from fedrane.data import Dataset, from_huggingface
from fedrane.errors import ConfigError, DataError, FedraneError, NoEffect
from fedrane.training.setup import as_dataset

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (12, 6, 5), dtype=np.uint8)
COLOUR = RNG.integers(0, 256, (12, 6, 5, 3), dtype=np.uint8)
NAMES = ("eel", "ant", "cat")
Y = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1]


class Records:
    """Examples by column, read one at a time; ``reads`` counts them."""

    def __init__(self, features: Mapping[str, Any] | None = None, **columns: Any) -> None:
        self.columns_, self.features, self.reads = columns, features, 0

    @property
    def column_names(self) -> list[str]:
        return list(self.columns_)

    def __len__(self) -> int:
        return len(next(iter(self.columns_.values())))

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads += 1
        return {name: values[index] for name, values in self.columns_.items()}


def pictures(images: Any = GREY) -> list[Image.Image]:
    return [Image.fromarray(image) for image in images]


def labelled(names: tuple[str, ...] = NAMES, column: str = "label") -> dict[str, Any]:
    return {"image": object(), column: SimpleNamespace(names=list(names))}


def passed(given: Any, **settings: Any) -> Dataset:
    """The dataset as a run gets it."""
    return as_dataset(Experiment(dataset="<python>", **settings), given)


@pytest.mark.parametrize("read", [passed, from_huggingface])
@pytest.mark.parametrize(("image", "label"), [("image", "label"), ("img", "labels"), ("pixels", "label")])
def test_pictures_and_labels_are_recognised(read: Callable[..., Dataset], image: str, label: str) -> None:
    given = Records(labelled(column=label), **{image: pictures(), label: Y})
    train = read({"train": given, "test": Records(**{image: pictures(GREY[:4]), label: [2, 2, 0, 1]})})
    assert np.array_equal(train.x[:, 0], GREY)
    assert np.array_equal(train.x_test[:, 0], GREY[:4])
    assert (train.y.tolist(), train.y_test.tolist()) == (Y, [2, 2, 0, 1])
    assert train.classes == NAMES  # in the order of the dataset, and with those that have no examples
    assert train.options["label"] == label
    assert not train.notes
    assert given.reads == len(Y)  # each item is decoded once


def test_one_split_holds_out_a_fifth() -> None:
    assert len(passed(Records(image=pictures(), label=Y)).y_test) == 2


def test_columns_are_chosen_by_the_settings_and_clients_are_numbered() -> None:
    writers = ["b", "a", "a", "b", "c", "c"] * 2
    given = Records(image=pictures(), character=list("xyxyxyxyxyxy"), writer=writers, id=list(range(12)))
    train = from_huggingface(given, given, label="character", client="writer", drop="id")
    assert train.classes == ("x", "y")
    assert train.client is not None
    assert train.client.tolist() == [1, 0, 0, 1, 2, 2] * 2
    assert len(train.y_test) == 12
    assert (train.options["label"], train.options["client"], train.options["drop"]) == ("character", "writer", "id")


def test_a_run_is_trained_on_it_and_resumed(tmp_path: Any) -> None:
    x = RNG.integers(0, 256, (60, 8, 8), dtype=np.uint8)
    given = Records(image=pictures(x), label=[number % 3 for number in range(60)], owner=[n % 2 for n in range(60)])
    words = ["client=owner", "rounds=1", "epochs=1", "batch=16", "model=mlp", "device=cpu"]
    assert fedrane.run(words, tmp_path / "run", dataset=given).population == 2
    result = fedrane.resume(tmp_path / "run", rounds=2, dataset=given)
    assert result.experiment.label == "label"  # what was recognised is written down
    assert len(result.history) == 2
    with pytest.raises(FedraneError, match="dictionaries"):
        fedrane.resume(tmp_path / "run", rounds=3, dataset=[(image, 0) for image in x])  # type: ignore[arg-type]


@pytest.mark.parametrize("as_tensor", [False, True])
def test_arrays_rows_and_tensors_are_inputs_too(as_tensor: bool) -> None:
    """With ``with_format("torch")`` items are tensors; without, numbers are lists."""
    rows = RNG.random((12, 3)).astype(np.float32)
    given = Records(x=torch.from_numpy(rows) if as_tensor else rows.tolist(), label=torch.tensor(Y) if as_tensor else Y)
    train = passed(given)
    assert train.shape == (3,)
    assert np.isin(train.x, rows).all()


def test_items_without_names_of_columns_and_features_are_read() -> None:
    items = [{"image": image, "label": y} for image, y in zip(pictures(), Y, strict=True)]
    assert passed(items).classes == ("0", "1")


def test_grey_pictures_among_coloured_ones_become_rgb() -> None:
    mixed = [*pictures(COLOUR[:6]), *pictures(GREY[6:])]
    train = from_huggingface(Records(image=mixed, label=Y), Records(image=pictures(GREY), label=Y))
    assert train.shape == (3, 6, 5)
    assert np.array_equal(train.x[0], COLOUR[0].transpose(2, 0, 1))
    assert (train.x[6:] == GREY[6:, None]).all()
    assert (train.x_test == GREY[:, None]).all()


@pytest.mark.parametrize("given", [Records(image=pictures(), label=Y), list(zip(pictures(), Y, strict=True))])
def test_pictures_are_resized(given: Any) -> None:
    assert passed(given, image_size=4).shape == (1, 4, 4)
    assert passed(given).shape == (1, 6, 5)


def test_what_is_not_used_is_noted() -> None:
    given = Records(img=pictures(), fine_label=Y, coarse_label=Y)
    train = passed({"train": given, "validation": given}, label="fine_label")
    assert train.notes == (
        "dataset: not used are the columns coarse_label",
        "dataset: not used are the splits validation",
    )


SIZES = [Image.new("L", (4, 4)), *[Image.new("L", (5, 5))] * 11]


@pytest.mark.parametrize(
    ("given", "settings", "error", "message"),
    [
        (Records(image=pictures(), digit=Y), {}, ConfigError, "columns image, digit.*none.* called label.*label=NAME"),
        (Records(image=pictures(), label=Y), {"label": "lable"}, DataError, r"no column 'lable' \(label=.*'label'"),
        (Records(image=pictures(), label=Y), {"client": "who"}, DataError, r"no column 'who' \(client=who\)"),
        (Records(image=pictures(), label=Y), {"client": "label"}, ConfigError, "a column has one use"),
        (Records(a=[1] * 12, b=[2] * 12, label=Y), {}, ConfigError, r"columns a, b beside label.*drop=.*to_pandas"),
        (Records(label=Y), {}, ConfigError, "no column beside label: one column is the input. Leave"),
        (Records(image=SIZES, label=Y), {}, DataError, r"item 1 is \(1, 5, 5\) and item 0.*or set image_size"),
        (Records(image=GREY, label=Y), {"image_size": 4}, DataError, "image_size is 4 .*only PIL images"),
        (Records(image=pictures(), label=[None] * 12), {}, DataError, "y is object"),
        (Records(labelled(("a",)), image=pictures(), label=Y), {}, DataError, "label 1 is not one of the given"),
        (Records(image=[], label=[]), {}, DataError, "x is"),
        ({"validation": Records(image=pictures(), label=Y)}, {}, DataError, r"splits validation: 'train' is trained"),
        (Records(image=pictures(), label=Y), {"impute": "median"}, NoEffect, "impute=median would have no effect"),
        (list(zip(GREY, Y, strict=True)), {"label": "label"}, NoEffect, "label=label would .*nor are its items"),
        (iter([]), {}, DataError, "has no length"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(
    given: Any, settings: dict[str, Any], error: type[FedraneError], message: str
) -> None:
    with pytest.raises(error, match=message):
        passed(given, **settings)


def test_the_size_of_images_that_are_read_already_is_an_error() -> None:
    with pytest.raises(NoEffect, match="image_size=4 would have no effect"):
        passed(from_huggingface(Records(image=pictures(), label=Y)), image_size=4)

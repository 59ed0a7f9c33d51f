"""Inputs that are numbers of a vocabulary reach the network as int64, as they are, in every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedrane
from asserts import close
from fedrane import Experiment
from fedrane.data.dataset import Dataset
from fedrane.errors import ConfigError, DataError
from fedrane.testing import conformance
from problems import FORKS, Listener

VOCABULARY = 300
"""Above 255: what is stored as bytes, or taken for pixels, would show."""


def sequences(vocabulary: int = VOCABULARY) -> Dataset:
    x = np.random.default_rng(0).integers(0, vocabulary, (160, 6))
    x[0, 0] = vocabulary - 1
    y = x[:, -1] % 3
    return Dataset("seq", x[:120], y[:120], x[120:], y[120:], tuple("abc"), (), (), vocabulary=vocabulary)


class Sees(nn.Module):
    """An embedding of each element, and all inputs that it was given."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(vocabulary, 3), nn.Dropout(0.2), nn.Linear(18, 3)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == torch.int64
        out: Tensor = self.head(self.drop(self.embed(x).flatten(1)))
        return out


def network(shape: tuple[int, ...], classes: int, vocabulary: int) -> nn.Module:
    assert (shape, classes, vocabulary) == ((6,), 3, VOCABULARY)
    return Sees(vocabulary)


def experiment(**changes: Any) -> Experiment:
    settings = {"clients": 4, "rounds": 2, "epochs": 1, "batch": 16, "precision": "float64", "engine": "sequential"}
    return Experiment(**(settings | changes))


def trained(engine: str, model: Any = network, **changes: Any) -> fedrane.Result:
    listener = Listener()
    head = "head" if model else ""
    chosen = experiment(engine=engine, model_head=head, threads=1 if engine == "stacked" else 2, **changes)
    result = fedrane.run(chosen, dataset=sequences(), model=model, callbacks=[listener], progress=False)
    assert listener.messages == [], "steps are stacked and replayed"
    return result


@pytest.mark.parametrize("engine", ["stacked", "threaded", pytest.param("processes", marks=FORKS)])
@pytest.mark.parametrize("model", [network, None], ids=["own", "lstm"])
def test_engines_agree(engine: str, model: Any) -> None:
    one, other = trained("sequential", model), trained(engine, model)
    close(conformance.states(one), conformance.states(other), 1e-12)
    assert other.history[-1]["global/accuracy"] == one.history[-1]["global/accuracy"]


def test_half_precision_is_for_the_arithmetic_alone() -> None:
    """bf16 holds no whole numbers above 256: an input that was converted would meet another row of the embedding."""
    fine, coarse = trained("sequential", precision="float32"), trained("sequential", precision="bf16")
    close(fine.server.model.params, coarse.server.model.params, 0.02)


def test_neither_mean_nor_scale_reaches_them() -> None:
    """The embedding's row of the last number is what moves the prediction: nothing is normalised on the way."""
    result = trained("sequential")
    model = result.model
    x = torch.full((1, 6), VOCABULARY - 1)
    rows = model.parts["body"].embed.weight[VOCABULARY - 1].repeat(6)
    torch.testing.assert_close(model(x)[0], model.parts["head"](rows))
    assert result.federation.train.x.dtype == torch.int16, "stored in few bytes"


@pytest.mark.parametrize(
    ("x", "why"),
    [
        (torch.zeros(1, 6), "the input is of torch.float32"),
        (torch.full((1, 6), VOCABULARY), "numbers from 300 to 300"),
        (torch.full((1, 6), -1), "numbers from -1 to -1"),
        (torch.zeros(1, 7, dtype=torch.int64), "a batch of sequences of numbers of shape"),
    ],
)
def test_a_prediction_for_other_inputs_is_refused(x: Tensor, why: str) -> None:
    model = trained("sequential").model
    with pytest.raises(DataError, match=why):
        model(x)


@pytest.mark.parametrize(("key", "value"), [("crop", 1), ("flip", True), ("mixup", 1.0)])
def test_they_are_not_augmented(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"augment.{key}=?.* on inputs"):
        fedrane.run(experiment(augment={key: value}), dataset=sequences(), progress=False)


def test_a_run_is_resumed_and_loaded(tmp_path: Path) -> None:
    stopping = iter([True])
    first = fedrane.run(experiment(), tmp_path / "run", dataset=sequences(), stop=lambda: next(stopping, False))
    assert not first.finished
    resumed = fedrane.resume(tmp_path / "run", dataset=sequences())
    whole = fedrane.run(experiment(), dataset=sequences())
    assert resumed.experiment.model == "lstm"
    close(resumed.server.model.params, whole.server.model.params, 0.0)
    x = torch.from_numpy(sequences().x_test).long()
    torch.testing.assert_close(fedrane.load(tmp_path / "run").model(x), whole.model(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("x", "vocabulary", "why"),
    [
        (np.zeros((2, 3), np.float32), 4, "whole numbers"),
        (np.zeros((2, 3, 1), np.int64), 4, "whole numbers"),
        (np.full((2, 3), 4), 4, "from 4 to 4"),
        (np.full((2, 3), -1), 4, "from -1 to -1"),
    ],
)
def test_other_inputs_with_a_vocabulary_are_refused(x: Any, vocabulary: int, why: str) -> None:
    y = np.zeros(len(x), np.int64)
    with pytest.raises(DataError, match=why):
        Dataset("bad", x, y, x, y, ("a",), (), (), vocabulary=vocabulary)


def test_inputs_with_a_vocabulary_have_no_mean_and_one_length() -> None:
    x, y = np.zeros((2, 3), np.int64), np.zeros(2, np.int64)
    with pytest.raises(DataError, match="no mean"):
        Dataset("bad", x, y, x, y, ("a",), (0.0,) * 3, (1.0,) * 3, vocabulary=4)
    with pytest.raises(DataError, match="training inputs of length 3 and test inputs of 2"):
        Dataset("bad", x, y, x[:, :2], y, ("a",), (), (), vocabulary=4)


def test_a_file_of_arrays_declares_its_vocabulary(tmp_path: Path) -> None:
    data = sequences()
    np.savez(tmp_path / "a.npz", x=data.x, y=data.y, x_test=data.x_test, y_test=data.y_test, vocabulary=VOCABULARY)
    read = fedrane.data.load(str(tmp_path / "a.npz"))
    assert (read.vocabulary, read.shape) == (VOCABULARY, (6,))
    np.testing.assert_array_equal(read.x, data.x)
    np.savez(tmp_path / "table.npz", x=data.x, y=data.y)
    assert fedrane.data.load(str(tmp_path / "table.npz")).x.dtype == np.float32, "without one, it is a table"
    for wrong in (np.array([3, 4]), np.array(2.5), np.array(0)):
        np.savez(tmp_path / "b.npz", x=data.x, y=data.y, vocabulary=wrong)
        with pytest.raises(DataError, match="vocabulary is"):
            fedrane.data.load(str(tmp_path / "b.npz"))


def test_a_torch_dataset_of_sequences() -> None:
    data = sequences()
    items = torch.utils.data.TensorDataset(torch.from_numpy(data.x), torch.from_numpy(data.y))
    read = fedrane.data.from_torch(items, items, vocabulary=VOCABULARY)
    np.testing.assert_array_equal(read.x, data.x)
    assert read.vocabulary == VOCABULARY


@pytest.mark.parametrize(("setting", "why"), [({"max_norm": 1.0}, "max_norm"), ({"sparse": True}, "sparse")])
def test_an_embedding_that_is_no_pure_function_is_refused(setting: dict[str, Any], why: str) -> None:
    layer = nn.Sequential(nn.Embedding(VOCABULARY, 2, **setting), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(ConfigError, match=why):
        fedrane.run(experiment(model_head="2"), dataset=sequences(), model=layer, progress=False)

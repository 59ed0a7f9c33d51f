"""Trained models as plain modules: from inputs as they are stored to class scores, or to the number to predict."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data import readers, tabular, text
from fedrane.data.columns import Table
from fedrane.data.dataset import Dataset, Target
from fedrane.data.federation import Normaliser, describe, each_of
from fedrane.data.tabular import Frame
from fedrane.engines import DEPLOYED
from fedrane.errors import CheckpointError, ConfigError, DataError
from fedrane.experiment import Experiment
from fedrane.task import Context, Model, State, Task
from fedrane.training.calibration import Calibration

Stored = Tensor | Frame | str | Path
"""Inputs as they are stored: a tensor; a table with named columns, as a data frame or the path of a CSV file; or, for
a model of text, the text before the character to predict."""


@dataclass(frozen=True)
class Inputs:
    """What a model must know about the dataset it was trained on."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    table: Table | None = None
    """The columns of a table that have names."""
    vocabulary: int = 0
    """Inputs are numbers from 0 to ``vocabulary`` − 1; 0 if they are quantities."""
    alphabet: str = ""
    """Of a text: its characters, in the order of their numbers."""
    target: Target | None = None
    """The number that is predicted; None if classes are."""

    @property
    def images(self) -> bool:
        """Images are bytes (channels, height, width); other inputs are rows of a table of numbers."""
        return len(self.shape) == 3

    def normaliser(self, task: Task) -> Normaliser:
        """What turns stored inputs into those of the network."""
        return Normaliser.from_constants(self.mean, self.std, self.images, task.dtype, task.device, self.vocabulary)

    def require_table(self, what: object) -> Table:
        """The columns by their names; an error if what the model was trained on had no names."""
        if self.table is None:
            expected = f"the model takes {'images' if self.images else 'rows of numbers, in columns without names'}"
            raise DataError(f"{what} is a table with named columns", expected, "Give a tensor, or an .npz file")
        return self.table

    @classmethod
    def of(cls, dataset: Dataset) -> Inputs:
        kind = dataset.table, dataset.vocabulary, dataset.alphabet, dataset.target
        return cls(dataset.shape, dataset.classes, dataset.mean, dataset.std, *kind)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any], where: Path) -> Inputs:
        """``where`` they were read."""
        types = {"shape": int, "classes": str, "mean": float, "std": float}
        try:
            table = Table.from_dict(values["table"]) if values.get("table") else None
            shape, classes, mean, std = (tuple(map(convert, values[name])) for name, convert in types.items())
            vocabulary, alphabet = int(values.get("vocabulary", 0)), str(values.get("alphabet", ""))
            of = values.get("target")
            target = Target(float(of["mean"]), float(of["std"])) if of else None
            if bool(classes) == bool(target):
                raise ValueError("either classes are predicted, or a number")
            return cls(shape, classes, mean, std, table, vocabulary, alphabet, target)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{where}: the form of the inputs cannot be read: {error!r}") from error


class Predictor(nn.Module):
    """A trained model as a plain module: from inputs as they are stored to class scores (examples, classes).

    In regression, it gives the predicted numbers (examples, 1), in the unit of the labels.

    Images are bytes (``uint8``) 0 … 255, or floating-point fractions 0 … 1; table rows are numbers as in the table.
    A model that was trained on a table with named columns also takes data frames and paths of CSV files, one that was
    trained on a text the text (str) whose next character it predicts. Anything else
    is an error. The parameters are a copy: they may be moved, saved, or trained further.
    """

    check_values: bool = True
    """Check the values of each batch: fractions in [0, 1], no NaN. On a GPU this synchronises; set it to False if that
    is too slow, or under ``vmap``. Calls that are compiled, exported or captured are not checked."""

    def __init__(
        self, task: Task, algorithm: Algorithm, model: Model, inputs: Inputs, calibration: Calibration | None = None
    ) -> None:
        super().__init__()
        self.inputs, self.calibration, self._task, self._algorithm = inputs, calibration, task, algorithm
        values = {**model.params, **model.stats}
        held = {name.partition(".")[0] for name in values}
        missing = {name for name, part in task.parts.items() if name not in held and list(part.parameters())}
        # A branch that this model does not have must not keep the task's initial parameters.
        kept = {name: copy.deepcopy(part) for name, part in task.parts.items() if name not in missing}
        self.parts = nn.ModuleDict(kept)
        loaded = self.parts.load_state_dict({name: value.clone() for name, value in values.items()}, strict=False)
        missing_keys = set(loaded.missing_keys) & {name for name, _ in self.parts.named_parameters()}
        if wrong := sorted({*missing_keys, *loaded.unexpected_keys}):
            owner = "network" if wrong[0] in missing_keys else "trained model"
            raise CheckpointError(
                f"only the {owner} has {wrong[0]}", "the network is not the one that was trained", "Give that one"
            )
        normaliser = inputs.normaliser(task)
        self.register_buffer("scale", normaliser.scale)
        self.register_buffer("shift", normaliser.shift)
        self.eval()

    @property
    def temperature(self) -> float | None:
        """Scores are divided by it before the softmax; None if the model is not calibrated."""
        return self.calibration.temperature if self.calibration else None

    def forward(self, x: Stored) -> Tensor:
        examples = self._as_stored(x)
        normalise = Normaliser(self.get_buffer("scale"), self.get_buffer("shift"), self.inputs.vocabulary)
        model = Model(dict(self.parts.named_parameters()), dict(self.parts.named_buffers()))
        mask = torch.ones(len(examples), dtype=torch.bool, device=examples.device)
        scores = self._algorithm.predict(self._task, model, normalise(examples), mask)
        return scores if (target := self.inputs.target) is None else target.mean + target.std * scores

    def predict(self, x: Stored) -> list[str] | list[float]:
        """The class of each input, by its name; in regression, its number."""
        scores: Tensor = self(x)
        if self.inputs.target:
            numbers: list[float] = scores[:, 0].tolist()
            return numbers
        return [self.inputs.classes[best] for best in scores.argmax(1).tolist()]

    def predict_proba(self, x: Stored) -> Tensor:
        """The probability of each class; an error if the model is not calibrated."""
        if self.inputs.target:
            raise ConfigError("a model of numbers gives no probabilities", "it knows no classes", "Use predict")
        if self.temperature is None:
            raise ConfigError(
                "this model's scores are not calibrated",
                "a softmax of them is not the probability that the model is right",
                "Use the scores, or a model of a run that has finished on this version",
            )
        scores: Tensor = self(x)
        return (scores / self.temperature).softmax(1)

    @property
    def _device(self) -> torch.device:
        return self.get_buffer("scale").device

    def _as_stored(self, x: Stored) -> Tensor:
        """Pixels 0 … 255, or a table's numbers; an error for inputs unlike those the model was trained on."""
        if isinstance(x, str) and self.inputs.alphabet:
            return torch.from_numpy(text.last_window(x, self.inputs.alphabet, *self.inputs.shape)).to(self._device)
        if not isinstance(x, Tensor) and isinstance(x, (str, Path, Frame)):  # the first, for torch.compile
            table = self.inputs.require_table("the input")
            return torch.from_numpy(table.encode(tabular.read_known(x, table))).to(self._device)
        if not isinstance(x, Tensor):
            raise DataError(f"the input is a {type(x).__name__}", "a model takes tensors", "Use torch.as_tensor(x)")
        self._check_shape(tuple(x.shape))
        if x.is_complex():
            raise DataError(f"the input is of {x.dtype}", "the model takes real numbers", "Use x.real")
        if self.inputs.vocabulary:
            return self._tokens(x)
        return self._pixels(x) if self.inputs.images else self._numbers(x)

    def _pixels(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            return x
        fractions = x.is_floating_point() or x.dtype == torch.bool
        values = _extremes(x) if self._may_look(x) else ()
        if not (fractions and all(0 <= value <= 1 for value in values)):
            raise readers.not_pixels("the input", x.dtype, values)
        return x.to(self.get_buffer("scale").dtype) * 255

    def _tokens(self, x: Tensor) -> Tensor:
        if x.is_floating_point() or x.dtype == torch.bool:
            raise DataError(f"the input is of {x.dtype}", "the model takes the numbers of a vocabulary", "Use x.long()")
        x = x.long()
        low, high = _extremes(x) if self._may_look(x) else (0, 0)
        if low < 0 or high >= self.inputs.vocabulary:
            raise DataError(
                f"the input has numbers from {low} to {high}",
                f"the model's vocabulary has {self.inputs.vocabulary}, numbered from 0",
                "Number the words or characters as in training",
            )
        return x

    def _numbers(self, x: Tensor) -> Tensor:
        if self._may_look(x):
            for bound in _extremes(x.to(self.get_buffer("scale").dtype)):
                if not math.isfinite(bound):
                    raise DataError(
                        f"the input holds {bound}", "a table row is finite numbers", "Fill in or leave out such rows"
                    )
        return x

    def _check_shape(self, given: tuple[int, ...]) -> None:
        shape = self.inputs.shape
        if given[1:] == shape:
            return
        remedy = (
            "Resize or crop them" if self.inputs.images else "Give the columns of the training table, in their order"
        )
        if self.inputs.vocabulary:
            remedy = "Cut or pad them"
        if given == shape:
            remedy = "For a single one: x[None]"
        elif self.inputs.images and given[1:] == (*shape[1:], shape[0]):
            remedy = "Put the channels first: x.permute(0, 3, 1, 2)"
        expected = "images (channels, height, width)" if self.inputs.images else "table rows"
        if self.inputs.vocabulary:
            expected = "sequences of numbers"
        raise DataError(
            f"the input is of shape {given}", f"the model takes a batch of {expected} of shape {shape}", remedy
        )

    def _may_look(self, x: Tensor) -> bool:
        if not self.check_values or torch.compiler.is_compiling():
            return False
        return x.numel() > 0 and not x.is_meta and not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def _extremes(x: Tensor) -> tuple[float, float]:
    """The smallest and the largest value, both NaN if there is one, with one synchronisation."""
    comparable = x.detach() if x.dtype not in (torch.bool, torch.float16, torch.bfloat16) else x.detach().float()
    low, high = torch.stack(torch.aminmax(comparable)).tolist()
    return low, high


@dataclass(frozen=True, eq=False, repr=False)
class Models:
    """A run's trained models, global and personal."""

    experiment: Experiment
    algorithm: Algorithm
    """The method, or the last one of its post-training stage."""
    task: Task
    inputs: Inputs
    server: State
    client_states: Mapping[int, State]
    labels: NDArray[np.int64]
    """Training examples of each client (row) and class (column)."""
    round: int
    calibration: Mapping[str, Calibration]
    """Of the global and of the personal models; empty until the run has finished."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.experiment.method_name}, {self.population} clients, round {self.round}>"

    @property
    def population(self) -> int:
        return len(self.labels)

    @property
    def model(self) -> Predictor:
        """The global model."""
        self._require(GLOBAL)
        return self._predictor(self.algorithm.global_model(self.task, self.server), GLOBAL)

    def personal(self, client: int) -> Predictor:
        """The model of one client; if it never took part, the model it would start from."""
        self._require(PERSONAL)
        if self.experiment.engine in DEPLOYED:
            raise ConfigError(
                "the personal models are not here",
                "they are with their clients",
                "There: fedrane flower predict FOLDER",
            )
        if not 0 <= client < self.population:
            raise ConfigError(f"there is no client {client}", f"this run has clients 0 … {self.population - 1}")
        who = each_of(describe(self.task, [client], self.labels, self.round))[0]
        client_state = self.client_states.get(client) or self.algorithm.join(self.task, self.server, who)
        ctx = Context(self.algorithm.send(self.task, self.server, who), client_state, who)
        return self._predictor(self.algorithm.personal_model(self.task, ctx), PERSONAL)

    def _predictor(self, model: Model, which: str) -> Predictor:
        return Predictor(self.task, self.algorithm, model, self.inputs, self.calibration.get(which))

    def _require(self, which: str) -> None:
        available: Iterable[str] = self.algorithm.models_on(self.task)
        if which not in available:
            other = "personal models: name a client (--client 0)" if which == GLOBAL else "one global model only"
            raise ConfigError(f"{self.experiment.method_name} has no {which} model", f"it gives {other}")


def read_named_inputs(path: Path, inputs: Inputs, image_size: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """The inputs in an image, a CSV or Parquet file or an .npz file (its ``x``), each with a name.

    ``image_size`` is the side that images were resized to for training, 0 if they were not.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder", "inputs come from files", f"Name its files: {path}/*")
    shape = inputs.shape

    def check_shape(given: tuple[int, ...]) -> None:
        if given != shape:
            remedy = "Give its columns, in their order" if len(shape) == 1 else "Resize or crop them"
            remedy = "Cut or pad them" if inputs.vocabulary else remedy
            raise DataError(f"{path} holds inputs of shape {given}", f"the model was trained on {shape}", remedy)

    if path.suffix == ".npz":
        x = readers.read_inputs(path, check_shape, inputs.vocabulary)
        names = [f"{path}[{i}]" for i in range(len(x))]
    elif inputs.alphabet and text.is_text(path):
        before = text.read_text(path, *shape).removesuffix("\n")  # which editors put at the end of a file
        x, names = text.last_window(before, inputs.alphabet, *shape), [str(path)]
    elif inputs.vocabulary:
        raise DataError(f"{path} is no .npz or text file", "the model takes sequences of numbers of a vocabulary")
    elif tabular.is_table(path):
        table = inputs.require_table(path)
        x = table.encode(tabular.read_known(path, table))
        names = [f"{path}[{i}]" for i in range(len(x))]
    elif len(shape) == 1:
        raise DataError(f"{path} is no CSV or .npz file", f"the model takes table rows of {shape[0]} numbers")
    else:
        x, names = readers.read_image(path, shape, image_size)[np.newaxis], [str(path)]
        check_shape(x.shape[1:])
    yield from zip(names, x, strict=True)


@torch.no_grad()
def predict(model: Predictor, examples: Sequence[tuple[str, NDArray[Any]]], batch: int) -> Iterator[dict[str, Any]]:
    """The class of each input, with its probability, or its score if the model is not calibrated; or its number.

    Inputs are passed in batches of ``batch``: with norm=batch a prediction depends on its batch.
    """
    measure, scores_of = ("score", model) if model.temperature is None else ("probability", model.predict_proba)
    for begin in range(0, len(examples), batch):
        names, values = zip(*examples[begin : begin + batch], strict=True)
        for name, scores in zip(names, scores_of(torch.tensor(np.stack(values))), strict=True):
            if model.inputs.target:
                yield {"input": name, "prediction": float(scores[0])}
                continue
            best = int(scores.argmax())
            yield {"input": name, "class": model.inputs.classes[best], measure: float(scores[best])}

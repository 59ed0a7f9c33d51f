"""Trained models outside of training: plain modules that take rows as they are stored and give class scores."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data import own
from fedrane.data.dataset import Dataset
from fedrane.errors import CheckpointError, ConfigError, DataError
from fedrane.experiment import REMOTE, Experiment
from fedrane.federation import Normaliser, describe, each_of
from fedrane.task import Context, Model, State, Task


@dataclass(frozen=True)
class Inputs:
    """What a model must know of the dataset it was trained on."""

    shape: tuple[int, ...]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def of(cls, dataset: Dataset) -> Inputs:
        return cls(dataset.shape, dataset.classes, dataset.mean, dataset.std)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Inputs:
        kinds = {"shape": int, "classes": str, "mean": float, "std": float}
        try:
            return cls(*(tuple(map(kind, values[name])) for name, kind in kinds.items()))
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"the form of the inputs cannot be read: {error!r}") from error


class Predictor(nn.Module):
    """A trained model as a plain module: rows as they are stored to class scores.

    Images are bytes 0 … 255, or floating-point fractions 0 … 1; table rows are as in the table. The parameters are a
    copy: they may be moved, saved, or trained further.
    """

    def __init__(self, task: Task, algorithm: Algorithm, model: Model, inputs: Inputs) -> None:
        super().__init__()
        self.inputs, self._task, self._algorithm = inputs, task, algorithm
        values = {**model.params, **model.stats}
        held = {name.partition(".")[0] for name in values}
        missing = {name for name, part in task.parts.items() if name not in held and list(part.parameters())}
        # A branch that the model does not have must not be taken for one that it has.
        kept = {name: copy.deepcopy(part) for name, part in task.parts.items() if name not in missing}
        self.parts = nn.ModuleDict(kept)
        loaded = self.parts.load_state_dict({name: value.clone() for name, value in values.items()}, strict=False)
        lacking = set(loaded.missing_keys) & {name for name, _ in self.parts.named_parameters()}
        if odd := sorted({*lacking, *loaded.unexpected_keys}):
            whose = "network" if odd[0] in lacking else "trained model"
            raise CheckpointError(
                f"the {whose} alone has {odd[0]}", "the network is not the one that was trained", "Give that one"
            )
        image = len(inputs.shape) == 3
        normaliser = Normaliser.from_constants(inputs.mean, inputs.std, image, task.dtype, task.device)
        self.register_buffer("scale", normaliser.scale)
        self.register_buffer("shift", normaliser.shift)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if len(self.inputs.shape) == 3 and x.is_floating_point():
            x = x * 255
        normalise = Normaliser(self.get_buffer("scale"), self.get_buffer("shift"))
        model = Model(dict(self.parts.named_parameters()), dict(self.parts.named_buffers()))
        live = torch.ones(len(x), dtype=torch.bool, device=x.device)
        return self._algorithm.predict(self._task, model, normalise(x), live)


@dataclass(frozen=True, eq=False, repr=False)
class Models:
    """A run's trained models, global and personal."""

    experiment: Experiment
    algorithm: Algorithm
    """The method, or the last part of its finale."""
    task: Task
    inputs: Inputs
    server: State
    owns: Mapping[int, State]
    labels: NDArray[np.int64]
    """Training rows of each client (row) and class (column)."""
    round: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.experiment.method_name}, {self.population} clients, round {self.round}>"

    @property
    def population(self) -> int:
        return len(self.labels)

    @property
    def model(self) -> Predictor:
        """The global model."""
        self._require(GLOBAL)
        return self._predictor(self.algorithm.global_model(self.task, self.server))

    def personal(self, client: int) -> Predictor:
        """The model of one client; one that never took part answers with what it would start from."""
        self._require(PERSONAL)
        if self.experiment.engine == REMOTE:
            raise ConfigError(
                "the personal models are not here",
                "they are with their clients",
                "There: fedrane flower predict FOLDER",
            )
        if not 0 <= client < self.population:
            raise ConfigError(f"there is no client {client}", f"this run has clients 0 … {self.population - 1}")
        who = each_of(describe(self.task, [client], self.labels, self.round))[0]
        own = self.owns.get(client) or self.algorithm.join(self.task, self.server, who)
        ctx = Context(self.algorithm.send(self.task, self.server, who), own, who)
        return self._predictor(self.algorithm.personal_model(self.task, ctx))

    def _predictor(self, model: Model) -> Predictor:
        return Predictor(self.task, self.algorithm, model, self.inputs)

    def _require(self, answer: str) -> None:
        answers: Iterable[str] = self.algorithm.answers_on(self.task)
        if answer not in answers:
            other = "personal models: name a client (--client 0)" if answer == GLOBAL else "one global model alone"
            raise ConfigError(f"{self.experiment.method_name} has no {answer} model", f"it gives {other}")


def read_rows(path: Path, shape: tuple[int, ...], image_size: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """The rows of an image or an .npz file (its ``x``), as the model takes them, each with a name.

    ``image_size`` is what images were resized to for training, 0 if they were not.
    """
    if path.is_dir():
        raise DataError(f"{path} is a folder", "rows come from files", f"Name its files: {path}/*")
    if path.suffix == ".npz":
        x = own.read_inputs(path)
        names = [f"{path}[{i}]" for i in range(len(x))]
    elif len(shape) == 1:
        raise DataError(f"{path} is not an .npz file", f"the model takes table rows of {shape[0]} numbers")
    else:
        x, names = own.read_image(path, shape, image_size)[np.newaxis], [str(path)]
    if x.shape[1:] != shape:
        raise DataError(
            f"{path} holds rows of shape {x.shape[1:]}", f"the model was trained on {shape}", "Resize or crop them"
        )
    yield from zip(names, x, strict=True)


@torch.no_grad()
def answer(model: Predictor, rows: Sequence[tuple[str, NDArray[Any]]], batch: int) -> Iterator[dict[str, Any]]:
    """The class of each row and how sure the model is; ``batch`` rows at a time, on which it depends if norm=batch."""
    for begin in range(0, len(rows), batch):
        names, values = zip(*rows[begin : begin + batch], strict=True)
        for name, chances in zip(names, model(torch.tensor(np.stack(values))).softmax(1), strict=True):
            best = int(chances.argmax())
            yield {"input": name, "class": model.inputs.classes[best], "probability": float(chances[best])}

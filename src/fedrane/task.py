"""The learning task: a network as pure functions of its parameters, and losses that ignore padding."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedrane.data.augment import Mixed
from fedrane.data.dataset import Target
from fedrane.data.streams import key
from fedrane.errors import ConfigError
from fedrane.kernels import precision
from fedrane.models.frozen import freeze, matching
from fedrane.models.layers import KeyedDropout, Pass, within
from fedrane.models.norms import convert, norm_names
from fedrane.ops import adam
from fedrane.ops.sgd import SGD
from fedrane.tree import Tensors


class Model(NamedTuple):
    """A network's tensors: its parameters, and BatchNorm's running statistics."""

    params: Tensors
    stats: Tensors


class State(NamedTuple):
    """What the server or a client keeps, or what is sent: a model or a part of one, and what a method adds."""

    model: Model
    extra: dict[str, Any]
    """Tensors in (nested) dicts."""


class Batch(NamedTuple):
    """The examples of one training step. All batches have the same length; shorter ones are padded."""

    x: Tensor
    y: Tensor
    mask: Tensor
    key: Tensor
    """The key of the step's noise, made of (seed, round, client, step)."""
    full: bool = False
    """True if it is known that nothing is padding. Allows faster paths with the same results."""
    mixed: Mixed | None = None
    """With mixup, the second label of each example and its weight. ``targets`` and the losses below respect it."""

    def targets(self, classes: int) -> Tensor:
        """The target class probabilities: one-hot, or with mixup a mixture of two."""
        dtype = self.x.dtype if self.x.is_floating_point() else torch.float32
        target = one_hot(self.y, classes).to(dtype)
        if self.mixed is None:
            return target
        other = one_hot(self.mixed.y, classes).to(dtype)
        return target + self.mixed.weight.to(dtype)[:, None] * (other - target)


class Client(NamedTuple):
    """What a client knows about itself; stacked, a cohort. ``labels`` (its class counts) never reaches the server."""

    index: Tensor  # type: ignore[assignment]  # hides tuple.index, which is not used
    size: Tensor
    labels: Tensor | None
    steps: Tensor
    round: Tensor
    lr: Tensor
    population: int


class Roster(NamedTuple):
    """What the server knows before the first round: each client's number of training examples."""

    sizes: Tensor


class Context(NamedTuple):
    """What a client knows during training: what the server sent, its client state, and its description."""

    down: State
    client_state: State
    client: Client


@dataclass(frozen=True, eq=False)
class Task:
    """The network's parts (``body``, ``head`` and the branches a method adds), their initialisation, and the optimiser.

    Parameters are named ``part.layer.weight``. Each layer is initialised from its own random stream, keyed by the seed
    and the layer's name, so adding a branch does not change the others.
    """

    parts: Mapping[str, nn.Module]
    classes: int
    """0 if a number is predicted."""
    width: int
    """The number of features the body returns."""
    shape: tuple[int, ...] = ()
    """Of one example."""
    vocabulary: int = 0
    """Inputs are int64, from 0 to ``vocabulary`` − 1; 0 if they are real numbers."""
    optimizer: adam.Optimizer = field(default_factory=SGD)
    """What makes a step of a gradient: SGD, Adam or AdamW."""
    norm: str = "shared"
    seed: int = 0
    fresh: bool = True
    """Draw the first parameters from the seed. Otherwise training starts from the weights of the modules."""
    dtype: torch.dtype = torch.float32
    """The dtype of parameters, uploads, sums and predictions."""
    compute: torch.dtype | None = None
    """The dtype of the body's arithmetic in training, if it differs."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batch_dependent: bool = False
    """The method's predictions depend on the rest of their batch."""
    positive: int = 1
    """Of two classes, the one that is to be found: AUROC, AUPRC, F1 and sensitivity are of it."""
    target: Target | None = None
    """The number that is predicted (regression); None if classes are."""
    frozen: frozenset[str] = frozenset()
    """Names of parameters and statistics that are constants of the modules, and in no model."""

    @classmethod
    def build(cls, body: nn.Module, head: nn.Module, shape: tuple[int, ...], classes: int, **settings: Any) -> Task:
        """A task on examples of that shape. A forward pass gives the width of the features."""
        parts = {"body": copy.deepcopy(body), "head": copy.deepcopy(head)}
        parts = {part: convert(module, part, settings.get("norm", "shared")) for part, module in parts.items()}
        task = cls(parts, classes, 0, shape, **settings)
        with torch.no_grad():
            net = task.evaluating(task.init(), torch.ones(1, dtype=torch.bool, device=task.device))
            features = net.body(task.zeros(1))
            width, scores = features.shape[-1], net.head(features)
            if scores.shape != (1, task.outputs):
                needed = f"one score for each of the {classes} classes" if classes else "one number, the prediction"
                raise ConfigError(
                    f"the network returns scores of shape {tuple(scores.shape)} for one example",
                    f"there must be {needed}",
                    "Size the last layer by the number of classes that your function receives, which is 1 for a number",
                )
            task._require_pure(task.zeros(2))
        return replace(task, width=width)

    def _require_pure(self, x: Tensor) -> None:
        """Refuse a network that draws its own random numbers or writes to itself: its result would depend on the
        engine."""
        y, mask = (torch.ones(len(x), dtype=dtype, device=self.device) for dtype in (torch.int64, torch.bool))
        batch = Batch(x, y, mask, y[0], full=True)
        before = {part: {n: b.clone() for n, b in module.named_buffers()} for part, module in self.parts.items()}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            states = _generators(self.device)
            net = self.training(self.init(), batch)
            net.head(net.body(x))
            drawn = any(not torch.equal(*pair) for pair in zip(states, _generators(self.device), strict=True))
        if drawn:
            raise ConfigError(
                "the network draws its own random numbers during training",
                "they would differ between engines and after a resume",
                "Use nn.Dropout, whose masks are made from the seed, instead of F.dropout",
            )
        for part, buffers in before.items():
            now = dict(self.parts[part].named_buffers())
            for name, buffer in buffers.items():
                if not torch.equal(buffer, now[name]):
                    raise ConfigError(
                        f"the network changes its buffer {part}.{name} during training",
                        "no client state, upload or checkpoint would contain it",
                        "Only the running statistics of BatchNorm are supported",
                    )

        self._require_masks_of_examples()

    def _require_masks_of_examples(self) -> None:
        """Refuse a network in which an example's dropout mask depends on how many examples its batch has: there is more
        or less padding on another engine."""
        layers = (layer for module in self.parts.values() for layer in module.modules())
        if not any(isinstance(layer, KeyedDropout) and layer.p for layer in layers):
            return
        x, model, exact = self.zeros(3), self.init(), replace(self, compute=None)
        x = x if self.vocabulary else torch.linspace(-1, 1, x.numel(), dtype=x.dtype, device=x.device).reshape(x.shape)
        y, mask = torch.zeros(3, dtype=torch.int64, device=self.device), torch.arange(3, device=self.device) < 2

        def scores(examples: int) -> Tensor:
            batch = Batch(x[:examples], y[:examples], mask[:examples], y[0])
            net = exact.training(model, batch)
            return net.head(net.body(batch.x))[:2]

        two, padded = scores(2), scores(3)
        if (two - padded).abs().max() > 0.01 * two.abs().max():  # rounding is far less, also in TF32
            raise ConfigError(
                "the network's dropout depends on how many examples its batch has",
                "batches are padded, so its result would depend on the engine",
                "Give nn.Dropout tensors whose first dimension is the examples' (batch_first=True)",
            )

    def __post_init__(self) -> None:
        for module in self.parts.values():
            module.to(device=self.device, dtype=self.dtype)

    @property
    def outputs(self) -> int:
        """How many numbers the network gives for an example: a score for each class, or the prediction."""
        return self.classes or 1

    def zero_labels(self, examples: int) -> Tensor:
        """Labels of zero, of the dtype of a batch's: class numbers, or numbers to predict, standardised."""
        return torch.zeros(examples, dtype=self.dtype if self.target else torch.int64, device=self.device)

    def zeros(self, examples: int) -> Tensor:
        """Inputs of zeros, of the shape and the dtype of a batch's."""
        dtype = torch.int64 if self.vocabulary else self.dtype
        return torch.zeros(examples, *self.shape, dtype=dtype, device=self.device)

    def add(self, part: str, module: nn.Module) -> Task:
        """The task with one more branch, or with one replaced. The branch is always initialised from the seed."""
        new = convert(copy.deepcopy(module), part, self.norm)
        self._initialise(part, new)
        return replace(self, parts={**self.parts, part: new})

    def freeze(self, patterns: Iterable[str]) -> Task:
        """The task in which the parameters and statistics that match are constants with their initial values."""
        first = self.init()
        tensors = {**first.params, **first.stats}
        names = matching(tensors, patterns)
        # One statistic of a layer says nothing without the other.
        layers = {name.rpartition(".")[0] for name in names if self.is_stat(name)}
        names |= {name for name in first.stats if name.rpartition(".")[0] in layers}
        values = {name: tensors[name] for name in names}
        parts = {part: freeze(module, part, values) for part, module in self.parts.items()}
        return replace(self, parts=parts, frozen=self.frozen | names)

    def init(self) -> Model:
        """The initial model."""
        params: Tensors = {}
        stats: Tensors = {}
        for part, module in self.parts.items():
            # Always drawn in float32 on the CPU, so that all precisions and devices start from the same weights.
            first = copy.deepcopy(module).to(device="cpu", dtype=torch.float32 if self.fresh else None)
            if self.fresh:
                self._initialise(part, first)
            params |= {f"{part}.{name}": self._copy(p) for name, p in first.named_parameters()}
            stats |= {f"{part}.{name}": self._copy(b) for name, b in first.named_buffers() if self.is_stat(name)}
        return Model(params, stats)

    def _initialise(self, part: str, module: nn.Module) -> None:
        for path, layer in module.named_modules():
            if hasattr(layer, "reset_parameters"):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(key(self.seed, "init", f"{part}.{path}"))
                    layer.reset_parameters()

    def _copy(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device=self.device, dtype=self.dtype)

    @staticmethod
    def is_stat(name: str) -> bool:
        """Whether a buffer is changed by training; the others are constants."""
        return name.endswith(("running_mean", "running_var"))

    @property
    def sgd(self) -> SGD:
        """The optimiser, for a method that is only right with SGD: another one is an error."""
        adam.require(self.optimizer, ("sgd",), "this method", "it is written for SGD")
        assert isinstance(self.optimizer, SGD)  # noqa: S101 - as required
        return self.optimizer

    @property
    def depends_on_batch(self) -> bool:
        """Whether a prediction depends on the rest of its batch. If so, a client's are batches of the training size."""
        return self.norm == "batch" or self.batch_dependent

    @cached_property
    def norm_names(self) -> frozenset[str]:
        return frozenset(name for part, module in self.parts.items() for name in norm_names(module, part))

    def private(self, name: str) -> bool:
        """Whether every method leaves it with the client: normalisation layers under ``norm=local``."""
        return self.norm == "local" and name in self.norm_names

    def training(self, model: Model, batch: Batch) -> Net:
        """The network bound to a model, in training mode."""
        return Net(self, model, Pass(True, batch.mask, batch.full, batch.key))

    def evaluating(self, model: Model, mask: Tensor) -> Net:
        """The network bound to a model, in evaluation mode."""
        return Net(self, model, Pass(False, mask, full=False))


class Net:
    """A network bound to a model for one pass; lives inside one hook. ``stats`` are the statistics after it."""

    def __init__(self, task: Task, model: Model, now: Pass) -> None:
        self._task, self._model, self._now = task, model, now

    def part(self, name: str, *inputs: Tensor) -> Tensor:
        """What the named branch makes of its inputs."""
        prefix, module = name + ".", self._task.parts[name]
        if module.training != self._now.train:
            module.train(self._now.train)
        tensors = {
            key.removeprefix(prefix): value
            for tensors in (self._model.params, self._model.stats)
            for key, value in tensors.items()
            if key.startswith(prefix)
        }
        compute = self._task.compute if self._now.train and name == "body" else None
        with within(self._now):
            if compute:
                norms = {key.removeprefix(prefix) for key in self._task.norm_names if key.startswith(prefix)}
                return precision.call_in(compute, module, tensors, inputs, keep=norms).to(self._task.dtype)
            out: Tensor = functional_call(module, tensors, inputs, strict=False)
        return out

    def body(self, x: Tensor) -> Tensor:
        return self.part("body", x)

    def head(self, features: Tensor) -> Tensor:
        return self.part("head", features)

    @property
    def stats(self) -> Tensors:
        return {**self._model.stats, **self._now.fresh}


def _generators(device: torch.device) -> list[Tensor]:
    """The states of the random number generators."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the examples that are not padding; padding may hold any value."""
    return torch.where(mask, values, 0).sum() / mask.sum().clamp(min=1)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """One-hot rows e_y, by a comparison: the library's ``one_hot`` synchronises with the host."""
    return y[:, None] == torch.arange(classes, device=y.device)


def prediction_loss(scores: Tensor, batch: Batch) -> Tensor:
    """The loss of the task: the cross entropy, or where a number is predicted the squared error of the first score."""
    if not batch.y.is_floating_point():
        return cross_entropy(scores, batch)
    target = batch.y if batch.mixed is None else torch.lerp(batch.y, batch.mixed.y, batch.mixed.weight)
    return masked_mean((scores[:, 0] - target).square(), batch.mask)


def cross_entropy(scores: Tensor, batch: Batch) -> Tensor:
    """The mean cross entropy over the batch without padding, with mixup's second labels; it needs classes."""
    if batch.y.is_floating_point():
        raise ConfigError(
            "cross_entropy where a number is predicted",
            "it is a loss of classes",
            "Use prediction_loss(scores, batch), which suits both",
        )
    losses = F.cross_entropy(scores, batch.y, reduction="none")
    if batch.mixed is not None:
        losses = torch.lerp(losses, F.cross_entropy(scores, batch.mixed.y, reduction="none"), batch.mixed.weight)
    return masked_mean(losses, batch.mask)

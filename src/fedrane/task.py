"""What is learnt: a network as pure functions of its parameters, and losses over the rows that count."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from fedrane.data.augment import Mixed
from fedrane.data.streams import key
from fedrane.errors import ConfigError
from fedrane.kernels import precision
from fedrane.models.layers import Pass, within
from fedrane.models.norms import convert, norm_names
from fedrane.sgd import SGD
from fedrane.tree import Tensors


class Model(NamedTuple):
    """A network's tensors: what gradients move, and BatchNorm's running statistics."""

    params: Tensors
    stats: Tensors


class State(NamedTuple):
    """What is kept (server, own) or travels (down, up): a model, or a part of one, and what a method adds to it."""

    model: Model
    extra: dict[str, Any]
    """A tree of tensors in dicts."""


class Batch(NamedTuple):
    """Rows of one training step. All batches have one length; rows that only fill it up are not live."""

    x: Tensor
    y: Tensor
    live: Tensor
    key: Tensor
    """Where the step's noise comes from: a number made of (seed, round, client, step)."""
    full: bool = False
    """Known in advance that every row is live; faster paths may use it, results are the same."""
    mixed: Mixed | None = None
    """With mixup, the other example's label and its part in each; the losses below and ``targets`` respect it."""

    def targets(self, classes: int) -> Tensor:
        """What each row's class probabilities should be: the row e_y, or with mixup two of them mixed."""
        target = one_hot(self.y, classes).to(self.x.dtype)
        if self.mixed is None:
            return target
        other = one_hot(self.mixed.y, classes).to(self.x.dtype)
        return target + self.mixed.weight.to(self.x.dtype)[:, None] * (other - target)


class Client(NamedTuple):
    """What a client knows of itself; stacked, a cohort. ``labels`` (its class counts) never reaches the server."""

    index: Tensor  # type: ignore[assignment]  # a tuple's method of that name is not needed here
    size: Tensor
    labels: Tensor | None
    steps: Tensor
    round: Tensor
    rate: Tensor
    population: int


class Roster(NamedTuple):
    """What the server knows before the first round: how many training rows each client has."""

    sizes: Tensor


class Context(NamedTuple):
    """All a client knows while it trains: what came down, what it kept, and who it is."""

    down: State
    own: State
    client: Client


@dataclass(frozen=True, eq=False)
class Task:
    """The network's parts (``body``, ``head`` and whatever branches a method adds), how they start, and the optimiser.

    Parameters are named ``part.layer.weight``. Each layer starts from its own stream, keyed by the seed and its name,
    so that a branch more or less does not change the others.
    """

    parts: Mapping[str, nn.Module]
    classes: int
    width: int
    """How many features the body gives."""
    sgd: SGD = field(default_factory=SGD)
    norm: str = "shared"
    seed: int = 0
    fresh: bool = True
    """Draw the first parameters from the seed; otherwise the network starts from the weights it holds."""
    dtype: torch.dtype = torch.float32
    """Of what is kept, sent, added up and answered with."""
    compute: torch.dtype | None = None
    """Of the body's arithmetic in training, where it is another."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def build(cls, body: nn.Module, head: nn.Module, shape: tuple[int, ...], classes: int, **settings: Any) -> Task:
        """A task on rows of that shape; the width of the features is read off one row."""
        parts = {"body": copy.deepcopy(body), "head": copy.deepcopy(head)}
        parts = {part: convert(module, part, settings.get("norm", "shared")) for part, module in parts.items()}
        task = cls(parts, classes, width=0, **settings)
        with torch.no_grad():
            row = torch.zeros(1, *shape, dtype=task.dtype, device=task.device)
            net = task.answering(task.init(), torch.ones(1, dtype=torch.bool, device=task.device))
            features = net.body(row)
            width, scores = features.shape[-1], net.head(features)
            if scores.shape != (1, classes):
                raise ConfigError(
                    f"the network gives scores of shape {tuple(scores.shape)} for one row",
                    f"there are {classes} classes, and each has one score",
                    "Make the last layer by the number of classes that your function is given",
                )
            task._require_pure(torch.zeros(2, *shape, dtype=task.dtype, device=task.device))
        return replace(task, width=width)

    def _require_pure(self, x: Tensor) -> None:
        """A network that draws random numbers of its own, or writes to itself, would be another in every engine."""
        y, live = (torch.ones(len(x), dtype=kind, device=self.device) for kind in (torch.int64, torch.bool))
        rows = Batch(x, y, live, y[0], full=True)
        before = {part: {n: b.clone() for n, b in module.named_buffers()} for part, module in self.parts.items()}
        with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
            states = _generators(self.device)
            net = self.training(self.init(), rows)
            net.head(net.body(x))
            drawn = any(not torch.equal(*pair) for pair in zip(states, _generators(self.device), strict=True))
        if drawn:
            raise ConfigError(
                "the network draws random numbers of its own while it trains",
                "they would differ from engine to engine, and after a resume",
                "Use nn.Dropout, whose masks are made from the seed, and no F.dropout",
            )
        for part, buffers in before.items():
            now = dict(self.parts[part].named_buffers())
            for name, buffer in buffers.items():
                if not torch.equal(buffer, now[name]):
                    raise ConfigError(
                        f"the network changes its buffer {part}.{name} while it trains",
                        "no client's state, upload or checkpoint would hold it",
                        "Of buffers that change, only BatchNorm's are followed",
                    )

    def __post_init__(self) -> None:
        for module in self.parts.values():
            module.to(device=self.device, dtype=self.dtype)

    def add(self, part: str, module: nn.Module) -> Task:
        """The task with one more branch, or with one replaced; it starts from the seed whatever the network does."""
        new = convert(copy.deepcopy(module), part, self.norm)
        self._draw(part, new)
        return replace(self, parts={**self.parts, part: new})

    def init(self) -> Model:
        """The first model."""
        params: Tensors = {}
        stats: Tensors = {}
        for part, module in self.parts.items():
            # Drawn in float32 on the CPU whatever the run's own, so that all precisions and devices start alike.
            first = copy.deepcopy(module).to(device="cpu", dtype=torch.float32 if self.fresh else None)
            if self.fresh:
                self._draw(part, first)
            params |= {f"{part}.{name}": self._own(p) for name, p in first.named_parameters()}
            stats |= {f"{part}.{name}": self._own(b) for name, b in first.named_buffers() if self.is_stat(name)}
        return Model(params, stats)

    def _draw(self, part: str, module: nn.Module) -> None:
        for path, layer in module.named_modules():
            if hasattr(layer, "reset_parameters"):
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(key(self.seed, "init", f"{part}.{path}"))
                    layer.reset_parameters()

    def _own(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone().to(device=self.device, dtype=self.dtype)

    @staticmethod
    def is_stat(name: str) -> bool:
        """A buffer that training changes; the others are constants."""
        return name.endswith(("running_mean", "running_var"))

    @cached_property
    def norm_names(self) -> frozenset[str]:
        return frozenset(name for part, module in self.parts.items() for name in norm_names(module, part))

    def private(self, name: str) -> bool:
        """Kept with the client whatever the method: normalisation layers under the policy ``local``."""
        return self.norm == "local" and name in self.norm_names

    def training(self, model: Model, batch: Batch) -> Net:
        """The network on a training batch."""
        return Net(self, model, Pass(True, batch.live, batch.full, batch.key))

    def answering(self, model: Model, live: Tensor) -> Net:
        """The network as it is used."""
        return Net(self, model, Pass(False, live, full=False))


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
    """The states of what random numbers are drawn from."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])]


def mean_over_live(values: Tensor, live: Tensor) -> Tensor:
    """The mean over live rows; a dead row may hold anything."""
    return torch.where(live, values, 0).sum() / live.sum().clamp(min=1)


def one_hot(y: Tensor, classes: int) -> Tensor:
    """The rows e_y; a comparison, because the library's ``one_hot`` looks at values."""
    return y[:, None] == torch.arange(classes, device=y.device)


def cross_entropy(scores: Tensor, batch: Batch) -> Tensor:
    losses = F.cross_entropy(scores, batch.y, reduction="none")
    if batch.mixed is not None:
        losses = torch.lerp(losses, F.cross_entropy(scores, batch.mixed.y, reduction="none"), batch.mixed.weight)
    return mean_over_live(losses, batch.live)

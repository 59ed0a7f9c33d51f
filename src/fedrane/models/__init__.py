"""Networks: each a body, which ends in features, and a head, which ends in class scores."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedrane.errors import ConfigError, nearest
from fedrane.models import sequences
from fedrane.models.bodies import BODIES
from fedrane.system import loading

__all__ = ["MODELS", "SEQUENCES", "WITHOUT_NORM", "build", "check", "load", "split_head"]

Factory = Callable[[tuple[int, ...], int], nn.Module]
"""A user's function: input shape and number of classes to a network."""
SEQUENCES = {"lstm": sequences.lstm, "transformer": sequences.transformer}
"""Those for numbers of a vocabulary, such as a text's characters."""
MODELS = (*BODIES, *SEQUENCES)
WITHOUT_NORM = ("mlp", "convnet", *SEQUENCES)
"""Those that have no BatchNorm."""


def build(name: str, shape: tuple[int, ...], classes: int, vocabulary: int = 0) -> tuple[nn.Module, nn.Module]:
    """The body and the linear head of a model known by name."""
    check(name)
    if (name in SEQUENCES) != bool(vocabulary):
        takes, are = ("numbers of a vocabulary", "quantities") if name in SEQUENCES else ("quantities", "such numbers")
        others = SEQUENCES if vocabulary else BODIES
        raise ConfigError(
            f"model={name} takes {takes}", f"the dataset's inputs are {are}", f"Use model={' or '.join(others)}"
        )
    body, width = SEQUENCES[name](shape, vocabulary) if vocabulary else BODIES[name](shape)
    return body, nn.Linear(width, classes)


def check(name: str) -> None:
    """Whether there is a model of that name."""
    if name not in MODELS:
        remedy = nearest(name, MODELS) + ", or a file of yours: model=path.py:function model_head=NAME"
        raise ConfigError(f"model={name!r} is not known", remedy=remedy)


def load(name: str) -> nn.Module | Factory:
    """A user's network, or what makes it.

    Of an installed module only a network will do: among its functions there may be any, such as ``subprocess:call``.
    """
    loaded: nn.Module | Factory = loading.load(name, "model")
    network = isinstance(loaded, nn.Module) or (isinstance(loaded, type) and issubclass(loaded, nn.Module))
    if not network and not (callable(loaded) and loading.file_of(name)):
        raise ConfigError(
            f"model={name} is not a network",
            "it must derive from torch.nn.Module; only in a file of yours may it be a function",
            "Write model=path.py:function",
        )
    return loaded


def split_head(
    module: nn.Module, head: str, shape: tuple[int, ...], vocabulary: int = 0
) -> tuple[nn.Module, nn.Module]:
    """A user's network as body and head, the head being the submodule of that name."""
    names = [name for name, _ in module.named_modules() if name]
    if head not in names:
        raise ConfigError(
            f"the network has no submodule {head!r} to be its head",
            "the methods need to know where features end and the classifier begins",
            f"Name it with model_head=…. {nearest(head, names)}",
        )
    body, last = copy.deepcopy(module), copy.deepcopy(module.get_submodule(head))
    above, _, name = head.rpartition(".")
    setattr(body.get_submodule(above), name, nn.Identity())
    _check_split(module, body, last, head, (shape, vocabulary))
    return body, last


def _check_split(
    network: nn.Module, body: nn.Module, head: nn.Module, name: str, form: tuple[tuple[int, ...], int]
) -> None:
    """Raise unless the head is the network's last operation; tested on two artificial examples."""
    modes = [(module, module.training) for module in (network, body, head)]
    parameter = next(network.parameters(), torch.zeros(()))
    shape, vocabulary = form
    elements = 2 * torch.Size(shape).numel()
    plain = (
        torch.arange(elements) % vocabulary if vocabulary else torch.linspace(-1, 1, elements, dtype=parameter.dtype)
    )
    examples = plain.reshape(2, *shape).to(parameter.device)
    expected = _try(network, examples)
    got = _try(nn.Sequential(body, head), examples)
    for module, mode in modes:
        module.train(mode)
    if isinstance(expected, str):
        raise ConfigError(f"the network cannot take examples of shape {shape}: {expected}")
    if isinstance(got, str) or expected.shape != got.shape or not torch.allclose(expected, got, rtol=1e-4, atol=1e-5):
        raise ConfigError(
            f"submodule {name!r} is not the network's last operation",
            "class scores must be head(body(x))",
            "Name the last layer, or move what follows it into it",
        )


def _try(network: nn.Module, examples: Tensor) -> Tensor | str:
    """Class scores, or why there are none."""
    try:
        with torch.no_grad():
            scores: Tensor = network.eval()(examples)
            return scores
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return str(error).splitlines()[0]

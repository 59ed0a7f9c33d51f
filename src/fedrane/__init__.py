"""Federated learning on data that differ from client to client."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fedrane._version import __version__

__all__ = [
    "AdamConstants",
    "Algorithm",
    "Attack",
    "Augmentation",
    "Batch",
    "Callback",
    "Client",
    "Comparison",
    "Context",
    "Dataset",
    "Done",
    "Experiment",
    "FeatureSkew",
    "FedraneError",
    "Gate",
    "MLflowLogger",
    "Model",
    "Models",
    "Outcome",
    "Partitioning",
    "Predictor",
    "Result",
    "Roster",
    "Schedule",
    "State",
    "Steps",
    "Task",
    "TensorBoardLogger",
    "WandbLogger",
    "Work",
    "__version__",
    "compare",
    "load",
    "resume",
    "run",
]

if TYPE_CHECKING:
    from fedrane.algorithm import Algorithm, Done, Outcome, Work
    from fedrane.data.augment import Augmentation
    from fedrane.data.dataset import Dataset
    from fedrane.data.partition import Partitioning
    from fedrane.data.sampling import Steps
    from fedrane.data.skew import FeatureSkew
    from fedrane.errors import FedraneError
    from fedrane.experiment import Experiment
    from fedrane.ops.adam import AdamConstants
    from fedrane.ops.attack import Attack
    from fedrane.ops.gate import Gate
    from fedrane.ops.sgd import Schedule
    from fedrane.report.comparison import Comparison, compare
    from fedrane.runner import load, resume, run
    from fedrane.task import Batch, Client, Context, Model, Roster, State, Task
    from fedrane.training.callbacks import Callback
    from fedrane.training.predictor import Models, Predictor
    from fedrane.training.result import Result
    from fedrane.training.trackers import MLflowLogger, TensorBoardLogger, WandbLogger
else:  # imported when it is used: torch takes seconds, and the help of the command does not need it
    _NAMES = {
        "algorithm": ("Algorithm", "Done", "Outcome", "Work"),
        "data.augment": ("Augmentation",),
        "data.dataset": ("Dataset",),
        "data.partition": ("Partitioning",),
        "data.sampling": ("Steps",),
        "data.skew": ("FeatureSkew",),
        "errors": ("FedraneError",),
        "experiment": ("Experiment",),
        "ops.attack": ("Attack",),
        "ops.gate": ("Gate",),
        "ops.adam": ("AdamConstants",),
        "ops.sgd": ("Schedule",),
        "report.comparison": ("Comparison", "compare"),
        "runner": ("load", "resume", "run"),
        "task": ("Batch", "Client", "Context", "Model", "Roster", "State", "Task"),
        "training.callbacks": ("Callback",),
        "training.predictor": ("Models", "Predictor"),
        "training.result": ("Result",),
        "training.trackers": ("MLflowLogger", "TensorBoardLogger", "WandbLogger"),
    }
    _HOMES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            globals()[name] = getattr(import_module(_HOMES[name]), name)
            return globals()[name]
        module = f"{__name__}.{name}"
        try:
            return import_module(module)  # such as fedrane.data after import fedrane
        except ModuleNotFoundError as error:
            if error.name != module:
                raise
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})

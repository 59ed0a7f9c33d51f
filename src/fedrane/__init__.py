"""Federated learning on data that differ from client to client."""

from fedrane._version import __version__
from fedrane.algorithm import Algorithm, Done, Outcome, Work
from fedrane.data.augment import Augmentation
from fedrane.data.dataset import Dataset
from fedrane.data.partition import Partitioning
from fedrane.errors import FedraneError
from fedrane.experiment import Experiment
from fedrane.ops.gate import Gate
from fedrane.ops.sgd import Schedule
from fedrane.run import load, resume, run
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task
from fedrane.training.callbacks import Callback
from fedrane.training.predictor import Models, Predictor
from fedrane.training.result import Result

__all__ = [
    "Algorithm",
    "Augmentation",
    "Batch",
    "Callback",
    "Client",
    "Context",
    "Dataset",
    "Done",
    "Experiment",
    "FedraneError",
    "Gate",
    "Model",
    "Models",
    "Outcome",
    "Partitioning",
    "Predictor",
    "Result",
    "Roster",
    "Schedule",
    "State",
    "Task",
    "Work",
    "__version__",
    "load",
    "resume",
    "run",
]

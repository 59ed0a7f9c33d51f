"""The models of a run folder."""

from __future__ import annotations

import math
import warnings

import numpy as np

from fedrane.config import sources
from fedrane.errors import CheckpointError
from fedrane.task import Task
from fedrane.training import user_code
from fedrane.training.calibration import Calibration
from fedrane.training.predictor import Inputs, Models
from fedrane.training.run_folder import CALIBRATION, METADATA, Checkpoint, Folder
from fedrane.training.setup import Network, algorithm_at, at_rest, make_task


def read_models(folder: Folder, model: Network = None, clients: bool = True, trust_code: bool = False) -> Models:
    """Without ``clients`` their states are not read, and only the global model is available."""
    folder.require_run()
    metadata = folder.read_metadata()
    inputs = Inputs.from_dict(metadata["inputs"], folder.path / METADATA)
    checkpoint, problems = folder.newest(clients=clients)
    for problem in problems:
        warnings.warn(f"{problem} An older checkpoint is used.", stacklevel=3)
    if checkpoint is None:
        raise CheckpointError(
            f"{folder.path} has no checkpoint yet", remedy=f"Go on with it: fedrane resume {folder.path}"
        )
    with user_code.opened(folder, trust_code) as experiment:
        experiment = at_rest(experiment)
        task = make_task(experiment, inputs.shape, inputs.classes, model, inputs.vocabulary, inputs.target)
    require_fit(task, checkpoint, folder)
    known = model is not None or task.frozen
    if known and user_code.recorded(metadata).get("network", now := sources.of_network(task)) != now:
        raise _other_network(folder, "its layers or constants differ")
    algorithm = algorithm_at(experiment, checkpoint.round)
    labels = np.array(metadata["labels"], dtype=np.int64)
    calibration = read_calibration(folder, checkpoint.round)
    return Models(
        experiment,
        algorithm,
        task,
        inputs,
        checkpoint.server,
        checkpoint.client_states,
        labels,
        checkpoint.round,
        calibration,
    )


def read_calibration(folder: Folder, round: int) -> dict[str, Calibration]:
    """That of the models of this round; nothing where the run has not finished, or was one of an older version."""
    if not (folder.path / CALIBRATION).is_file():
        return {}
    stored = folder.read_json(CALIBRATION)
    try:
        calibrations = {
            which: Calibration(float(c["temperature"]), str(c["examples"])) for which, c in stored["models"].items()
        }
        fits = stored["round"] == round
        if not all(0 < calibration.temperature < math.inf for calibration in calibrations.values()):
            raise ValueError("a temperature is positive and finite")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder.path / CALIBRATION} has no round and temperatures of its models",
            remedy="Put it back as it was; removed, the models give scores and no probabilities",
        ) from error
    return calibrations if fits else {}


def require_fit(task: Task, checkpoint: Checkpoint, folder: Folder) -> None:
    """A checkpoint of another network must not be taken for one of this."""
    here = {f"{part}.{name}": tuple(p.shape) for part, m in task.parts.items() for name, p in m.named_parameters()}
    for name, value in checkpoint.server.model.params.items():
        if here.get(name) != tuple(value.shape):
            difference = f"of shape {here[name]}" if name in here else "missing"
            raise _other_network(
                folder, f"its {name} is {difference}, and of shape {tuple(value.shape)} in the checkpoint"
            )
        if value.dtype != task.dtype:
            raise _other_network(folder, f"its {name} is of {task.dtype}, and of {value.dtype} in the checkpoint")


def _other_network(folder: Folder, why: str) -> CheckpointError:
    return CheckpointError(
        f"the network is not the one that was trained in {folder.path}",
        why,
        "Give the network that it was trained with",
    )

"""What is checked before a run goes on: its states, its inputs, and a new number of rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fedrane import methods, tree
from fedrane.algorithm import Algorithm
from fedrane.config import sources
from fedrane.config.settings import dotted
from fedrane.data.dataset import Dataset
from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics
from fedrane.errors import CheckpointError, ConfigError
from fedrane.experiment import Experiment, read_toml
from fedrane.system import loading
from fedrane.task import State, Task
from fedrane.training import user_code
from fedrane.training.result import last_round, stalled
from fedrane.training.run_folder import CONFIG, PARTITION, Checkpoint, Folder, empty_dicts
from fedrane.training.setup import Network, Source

OLDER = "Going on from an older checkpoint."


def require_same_states(
    experiment: Experiment, algorithm: Algorithm, federation: Federation, checkpoint: Checkpoint, folder: Folder
) -> None:
    """States that another version of the library wrote must not reach hooks that expect others.

    A method of the library goes on keeping what ``join`` gives, and that has one form for all clients; it may keep more
    later. A user's method may do otherwise; its file is watched instead.
    """
    name = experiment.method_name
    if name not in methods.METHODS or not checkpoint.client_states:
        return
    client = federation.client(min(checkpoint.client_states), checkpoint.round, 0.0, 0)
    other = CheckpointError(
        f"the clients' states in {folder.path} are of another version of {name}",
        "they do not hold what it keeps now",
        "Start the run again in another folder, or go on with the version that began it",
    )
    try:
        expected = _form(algorithm.join(federation.task, checkpoint.server, client))
    except KeyError as error:  # of the server's state
        raise other from error
    if any(expected - _form(client_state) for client_state in checkpoint.client_states.values()):
        raise other


def _form(state: State) -> set[tuple[str, tuple[torch.Size, bool] | None]]:
    """The paths of all dicts, and of all tensors with their shapes, and whether these are floats."""
    shapes = {path: (leaf.shape, leaf.is_floating_point()) for path, leaf in tree.flatten(state).items()}
    ends = {f"{path}{tree.SEPARATOR}" for path in empty_dicts(state)} | shapes.keys()
    parts = [path.split(tree.SEPARATOR) for path in ends]
    dicts = {tree.SEPARATOR.join(names[:depth]) for names in parts for depth in range(1, len(names))}
    return {*shapes.items(), *((path, None) for path in dicts)}


def of_data(dataset: Dataset, given: Source) -> dict[str, str]:
    """The digest of the data; for a dataset handed over from Python also of its normalisation."""
    prints = {"data": sources.of_dataset(dataset)}
    if dataset.table:
        prints["table"] = sources.of_table(dataset.table)
    return prints if given is None else prints | {"normalisation": sources.of_normalisation(dataset)}


def fingerprints(task: Task, given: Network, folder: Folder) -> dict[str, str]:
    """Of the partition, and of a network that was handed over: there is no file to compare."""
    prints = {"partition": sources.digest(folder.path / PARTITION)}
    if given is not None or task.frozen:  # no checkpoint has what is frozen
        prints["network"] = sources.of_network(task)
    if isinstance(given, nn.Module):
        prints["weights"] = sources.of_weights(given)
    return prints


class RecordedInputs:
    """The inputs of a run as its folder knows them, and which of them are others now."""

    def __init__(self, folder: Folder, accept: bool) -> None:
        self.folder, self._accept = folder, accept
        settings = {key: str(value) for key, value in dotted(read_toml(folder.path / CONFIG)).items()}
        self._words = {
            "method.name": f"the method's file {loading.file_of(settings.get('method.name', ''))}",
            "model": f"the network's file {loading.file_of(settings.get('model', ''))}",
            "data": f"the dataset {settings.get('dataset')}",
            "table": "the columns of the dataset",
            "normalisation": "the dataset's mean and std",
            "partition": f"the folder's {PARTITION}",
            "network": "the network",
            "weights": "the first weights of the network",
        }
        self._metadata = folder.read_metadata()
        self._then = user_code.recorded(self._metadata)
        self.changed: dict[str, dict[str, str]] = {}
        """Digests then and now."""

    def check(self, now: Mapping[str, str]) -> None:
        changed = sources.changed(self._then, now)
        if changed and not self._accept:
            what = " and ".join(self._words[key] for key in changed)
            raise CheckpointError(
                f"{what} changed since the run in {self.folder.path} began",
                "its end would be the result of neither the old input nor the new one",
                "Put back what it was, or start a new run; to go on all the same: --accept-changes "
                "(from Python, accept_changes=True)",
            )
        self.changed |= {key: {"from": self._then[key], "to": now[key]} for key in changed}

    def accepted(self) -> list[str]:
        return [f"{self._words[key]} changed since the run began, which was accepted." for key in self.changed]

    def unused(self, experiment: Experiment) -> list[str]:
        """What changed and does not matter any more."""
        file = sources.user_files(experiment).get("partition.file")
        if file and sources.changed(self._then, {"partition.file": sources.digest(file)}):
            return [f"{file} changed since the run began: the partition in its folder is used."]
        return []

    def write(self, metadata: dict[str, Any], deviations: list[str]) -> None:
        """From now on this is what the run's inputs are; what they were when it began stays on record.

        ``deviations`` are the reasons why its result is not that of a run of its configuration.
        """
        accepted = self._metadata.get("accepted", {}) | {key: pair["to"] for key, pair in self.changed.items()}
        known = {
            "accepted": accepted,
            "deviations": [*dict.fromkeys([*self._metadata.get("deviations", []), *deviations])],
        }
        self.folder.write_metadata(self._metadata | metadata | known)


def replanned(before: Experiment, now: Experiment, history: Sequence[Metrics]) -> str:
    """A message on the new number of rounds; an error where they cannot be run."""
    done = last_round(history)
    if now.rounds <= done:
        raise ConfigError(
            f"rounds={now.rounds}", f"{done} rounds of this run are done", f"Use rounds={done + 1} or more"
        )
    if stalled(now, history):
        raise ConfigError(
            f"rounds={now.rounds}",
            f"this run has stopped early (patience={now.patience}): more rounds would not be made",
            "Start a new run with a larger patience",
        )
    return f"rounds={now.rounds} instead of {before.rounds}; it goes on from round {done}."


def changed_lrs(before: Experiment, now: Experiment, done: int) -> list[str]:
    """A message if the rounds that are done had other learning rates than the new plan has for them."""
    if all(before.schedule.at(r, before.rounds) == now.schedule.at(r, now.rounds) for r in range(1, done + 1)):
        return []
    return [
        f"schedule.kind={now.schedule.kind} depends on the number of rounds: the learning rates of rounds 1 to "
        f"{done} were those for {before.rounds}, so the result is not that of a run planned with {now.rounds}."
    ]

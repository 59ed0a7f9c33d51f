"""The rounds: cohort, training, merging, evaluation, record, checkpoint; and on from there after a stop."""

from __future__ import annotations

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.profiler import record_function

from fedrane import (
    data,
    effects,
    engines,
    loading,
    methods,
    models,
    own_code,
    settings,
    sources,
    timing,
    tree,
)
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.calibration import Calibration, calibrate
from fedrane.data import partition as partitions
from fedrane.data import plan
from fedrane.data.dataset import Dataset
from fedrane.data.own import MapStyle, from_torch
from fedrane.engines import Engine, Trained
from fedrane.engines.processes import impossible
from fedrane.errors import CheckpointError, ConfigError, Diverged
from fedrane.evaluation import Metrics, evaluate
from fedrane.experiment import PYTHON, Experiment, read_toml
from fedrane.federation import Federation
from fedrane.settings import dotted
from fedrane.sgd import SGD
from fedrane.task import State, Task
from fedrane.threads import cores, limited
from fedrane.training import sessions
from fedrane.training.predictor import Inputs, Models
from fedrane.training.run_folder import (
    CALIBRATION,
    CONFIG,
    METADATA,
    PARTITION,
    SUMMARY,
    Checkpoint,
    Folder,
    empty_dicts,
)

PHASES = TRAIN, MERGE, EVALUATE, SAVE = ("train", "merge", "evaluate", "save a checkpoint")
"""The parts of a round, by the names they have in a trace."""
OLDER = "Going on from an older checkpoint."


class Callback:
    """What another logger hooks into; every method may stay as it is."""

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        """Before the first round of this process; ``history`` is what earlier ones recorded."""

    def round(self, record: Metrics) -> None:
        """After each round."""

    def message(self, text: str) -> None:
        """Something the user should know."""

    def end(self, result: Result) -> None:
        """After the last round, or when the run was asked to stop."""


@dataclass(frozen=True, eq=False, repr=False)
class Result(Models):
    """A run in hand: what was measured, and the trained models."""

    federation: Federation
    history: list[Metrics]
    finished: bool
    folder: Path | None = None

    @property
    def summary(self) -> Metrics:
        return summarise(self.experiment, self.history)


Source = Dataset | MapStyle | None
Network = nn.Module | models.Factory | None


def run(
    experiment: Experiment,
    out: str | Path | None = None,
    *,
    dataset: Source = None,
    model: Network = None,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
    calibrate: bool = True,
) -> Result:
    """Run an experiment from its start; with ``out``, in a folder from which it can be resumed.

    ``dataset`` and ``model`` take the place of the experiment's own: a :class:`Dataset` or any map-style torch one; a
    network (which keeps the weights it holds) or a function (input shape, classes) → network (which starts from the
    seed), whose classifier the experiment names as ``model_head``. Without ``calibrate`` a run ends a little sooner,
    and its models give scores instead of probabilities.
    """
    engines.check(experiment.engine)
    folder = None if out is None else Folder(out)
    if folder:
        folder.require_free()
    with ExitStack() as cleanup:
        most = cleanup.enter_context(limited(1))  # where a run begins does not depend on the number of threads
        rows = as_dataset(experiment, dataset)
        experiment, unused = settled(experiment, rows, dataset is not None, model is not None)
        for callback, text in itertools.product(callbacks, settings.as_messages(unused)):
            callback.message(text)
        partition = make_partition(experiment, rows)
        experiment = experiment.replace(clients=len(partition.clients))
        loop = _Loop(experiment, rows, partition, model, folder, callbacks, stop, calibrate)
        loop.choose_engine(most)
        experiment = loop.experiment
        if folder:
            cleanup.callback(folder.close)
            if experiment.method_name.startswith("__main__:"):
                warnings.warn("a method of the running script cannot be found again to resume the run", stacklevel=2)
            folder.create()  # only now: a mistake in the configuration leaves no folder behind
            partitions.save(partition, folder.path / PARTITION, dataset=rows.name)
            own_code.remember(experiment)
            own_code.keep(experiment, folder)
            prints = _of_data(rows, dataset) | _fingerprints(loop.task, model, folder)
            folder.write_json(
                METADATA, loop.facts() | {"sources": sources.contents(experiment), "fingerprints": prints}
            )
            session = sessions.describe(experiment, 0)
            cleanup.enter_context(sessions.recorded(folder, [], session, loop.done))
            folder.write_config(experiment)  # last: a folder with a configuration can be resumed
        cleanup.enter_context(engines.opened(experiment.engine, loop.federation))
        return loop.go(None, [])


def resume(
    out: str | Path,
    *,
    rounds: int | None = None,
    accept_changes: bool = False,
    trust_code: bool = False,
    dataset: Source = None,
    model: Network = None,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
    calibrate: bool = True,
) -> Result:
    """Go on with a run from its newest checkpoint; the end equals that of a run never interrupted, bit for bit.

    ``rounds`` plans another number of them than the run began with, also for a finished run: it then goes on from its
    last round, before any finale. An input that has changed since the run began is an error unless ``accept_changes``.
    ``trust_code`` lets a method or network run that the folder names and you have not run before.
    """
    folder = Folder(out)
    with ExitStack() as cleanup:
        cleanup.callback(folder.close)
        folder.open()
        inputs = _Recorded(folder, accept_changes)
        inputs.check(own_code.now(folder))  # before any of it is run
        before = cleanup.enter_context(own_code.opened(folder, trust_code, accept_changes))
        experiment = before if rounds is None else before.replace(rounds=rounds)
        replan = experiment.rounds != before.rounds
        engines.check(experiment.engine)
        pick_device(experiment.device)
        most = cleanup.enter_context(limited(1))
        rows = as_dataset(experiment, dataset)
        inputs.check(_of_data(rows, dataset))
        partition = partitions.load(folder.path / PARTITION, len(rows.y))
        loop = _Loop(experiment, rows, partition, model, folder, callbacks, stop, calibrate)
        inputs.check(_fingerprints(loop.task, model, folder))
        checkpoint, problems = folder.newest(loop.task.device, last=before.rounds if replan else None)
        done = checkpoint.round if checkpoint else 0
        if checkpoint:
            require_fit(loop.task, checkpoint, folder)
            _require_same_states(loop, algorithm_at(before, done), checkpoint)
        loop.history = folder.metrics_until(done)
        notes = [f"{problem} {OLDER}" for problem in problems]
        notes += [f"{file} is gone: its copy in the run folder is used." for file in own_code.gone(folder)]
        notes += inputs.unused(experiment)
        deviations = inputs.accepted()
        if replan:
            notes.append(_replanned(before, experiment, loop))
            deviations += _other_rates(before, experiment, done)
        notes += deviations
        idle = folder.finished and not replan and done == _last_round(folder.read_metrics())
        notes += loop.choose_engine(most, resumed=True)
        chosen = loop.experiment
        if not idle:
            earlier, session = sessions.read(folder), sessions.describe(chosen, done)
            if earlier and (other := sessions.differences(earlier[-1], session)):
                notes.append(f"not as in the session before: {', '.join(other)}. The last bits of results may differ.")
            session |= {"changed_inputs": inputs.changed, "notes": notes}
            if replan:
                session["rounds"]["planned_before"] = before.rounds
            cleanup.enter_context(sessions.recorded(folder, earlier, session, loop.done))
            if deviations:  # before the new plan stands: killed in between, they must not be forgotten
                own_code.keep(experiment, folder)
                inputs.write(loop.facts(), deviations)
            folder.reopen(done, experiment if replan else None)
        for note in notes:
            loop.tell(note)
        cleanup.enter_context(engines.opened(chosen.engine, loop.federation))
        return loop.go(checkpoint, loop.history)


def load(out: str | Path, *, model: Network = None, trust_code: bool = False) -> Models:
    """The models of a run folder, finished or not; needs no dataset.

    ``trust_code`` lets a method or network run that the folder names and you have not run before.
    """
    return read_models(Folder(out), model, trust_code=trust_code)


def read_models(folder: Folder, model: Network = None, clients: bool = True, trust_code: bool = False) -> Models:
    """Without ``clients`` their states are not read: the global model alone may be asked for then."""
    folder.require_run()
    facts = folder.read_metadata()
    inputs = Inputs.from_dict(facts["inputs"], folder.path / METADATA)
    checkpoint, problems = folder.newest(clients=clients)
    for problem in problems:
        warnings.warn(f"{problem} An older checkpoint is used.", stacklevel=3)
    if checkpoint is None:
        raise CheckpointError(
            f"{folder.path} has no checkpoint yet", remedy=f"Go on with it: fedrane resume {folder.path}"
        )
    with own_code.opened(folder, trust_code) as experiment:
        experiment = at_rest(experiment)
        task = make_task(experiment, inputs.shape, len(inputs.classes), model)
    require_fit(task, checkpoint, folder)
    if model is not None and own_code.recorded(facts).get("network", now := sources.of_network(task)) != now:
        raise _other_network(folder, "its layers or constants differ")
    algorithm = algorithm_at(experiment, checkpoint.round)
    labels = np.array(facts["labels"], dtype=np.int64)
    calibration = read_calibration(folder, checkpoint.round)
    return Models(
        experiment, algorithm, task, inputs, checkpoint.server, checkpoint.owns, labels, checkpoint.round, calibration
    )


def read_calibration(folder: Folder, round: int) -> dict[str, Calibration]:
    """That of the models of this round; nothing where the run has not finished, or was one of an older version."""
    if not (folder.path / CALIBRATION).is_file():
        return {}
    stored = folder.read_json(CALIBRATION)
    try:
        found = {kind: Calibration(float(c["temperature"]), str(c["examples"])) for kind, c in stored["models"].items()}
        fits = stored["round"] == round
        if not all(0 < calibration.temperature < math.inf for calibration in found.values()):
            raise ValueError("a temperature is positive and finite")
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{folder.path / CALIBRATION} has no round and temperatures of its models",
            remedy="Put it back as it was; removed, the models give scores and no probabilities",
        ) from error
    return found if fits else {}


def at_rest(experiment: Experiment) -> Experiment:
    """The experiment as its models are used afterwards: on the CPU, with all the digits they have."""
    precision = "float64" if experiment.precision == "float64" else "float32"
    return experiment.replace(device="cpu", precision=precision)


def require_fit(task: Task, checkpoint: Checkpoint, folder: Folder) -> None:
    """A checkpoint of another network must not be taken for one of this."""
    here = {f"{part}.{name}": tuple(p.shape) for part, m in task.parts.items() for name, p in m.named_parameters()}
    for name, value in checkpoint.server.model.params.items():
        if here.get(name) != tuple(value.shape):
            found = f"of shape {here[name]}" if name in here else "missing"
            raise _other_network(folder, f"its {name} is {found}, and of shape {tuple(value.shape)} in the checkpoint")


def _other_network(folder: Folder, why: str) -> CheckpointError:
    return CheckpointError(
        f"the network is not the one that was trained in {folder.path}",
        why,
        "Give the network that it was trained with",
    )


# ---- a run that goes on


def _require_same_states(loop: _Loop, algorithm: Algorithm, checkpoint: Checkpoint) -> None:
    """States that another version of the library wrote must not reach hooks that expect others.

    A method of the library goes on keeping what ``join`` gives, and that has one form for all clients; it may keep more
    later. A user's method may do otherwise; its file is watched instead.
    """
    name, folder = loop.experiment.method_name, loop.folder
    if name not in methods.METHODS or not checkpoint.owns or not folder:
        return
    client = loop.federation.client(min(checkpoint.owns), checkpoint.round, 0.0, 0)
    other = CheckpointError(
        f"the clients' states in {folder.path} are of another version of {name}",
        "they do not hold what it keeps now",
        "Start the run again in another folder, or go on with the version that began it",
    )
    try:
        expected = _form(algorithm.join(loop.task, checkpoint.server, client))
    except KeyError as error:  # of the server's state
        raise other from error
    if any(expected - _form(own) for own in checkpoint.owns.values()):
        raise other


def _form(state: State) -> set[tuple[str, torch.Size | None]]:
    """The paths of all dicts, and of all tensors with their shapes."""
    shapes = {path: leaf.shape for path, leaf in tree.flatten(state).items()}
    ends = {f"{path}{tree.SEPARATOR}" for path in empty_dicts(state)} | shapes.keys()
    parts = [path.split(tree.SEPARATOR) for path in ends]
    dicts = {tree.SEPARATOR.join(names[:depth]) for names in parts for depth in range(1, len(names))}
    return {*shapes.items(), *((path, None) for path in dicts)}


def _of_data(rows: Dataset, given: Source) -> dict[str, str]:
    """Of the examples; and of how they are scaled, where somebody hands that over with them."""
    found = {"data": sources.of_dataset(rows)}
    return found if given is None else found | {"normalisation": sources.of_normalisation(rows)}


def _fingerprints(task: Task, given: Network, folder: Folder) -> dict[str, str]:
    """Of the partition, and of a network that was handed over: there is no file to compare."""
    found = {"partition": sources.digest(folder.path / PARTITION)}
    if given is not None:
        found["network"] = sources.of_network(task)
    if isinstance(given, nn.Module):
        found["weights"] = sources.of_weights(given)
    return found


class _Recorded:
    """The inputs of a run as its folder knows them, and which of them are others now."""

    def __init__(self, folder: Folder, accept: bool) -> None:
        self.folder, self._accept = folder, accept
        settings = {key: str(value) for key, value in dotted(read_toml(folder.path / CONFIG)).items()}
        self._words = {
            "method.name": f"the method's file {loading.file_of(settings.get('method.name', ''))}",
            "model": f"the network's file {loading.file_of(settings.get('model', ''))}",
            "data": f"the dataset {settings.get('dataset')}",
            "normalisation": "the dataset's mean and std",
            "partition": f"the folder's {PARTITION}",
            "network": "the network",
            "weights": "the first weights of the network",
        }
        self._facts = folder.read_metadata()
        self._then = own_code.recorded(self._facts)
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
        file = sources.own_files(experiment).get("partition.file")
        if file and sources.changed(self._then, {"partition.file": sources.digest(file)}):
            return [f"{file} changed since the run began: the partition in its folder is used."]
        return []

    def write(self, facts: dict[str, Any], deviations: list[str]) -> None:
        """From now on this is what the run's inputs are; what they were when it began stays on record.

        ``deviations`` say why its result is not that of a run of its configuration.
        """
        accepted = self._facts.get("accepted", {}) | {key: pair["to"] for key, pair in self.changed.items()}
        known = {
            "accepted": accepted,
            "deviations": [*dict.fromkeys([*self._facts.get("deviations", []), *deviations])],
        }
        self.folder.write_json(METADATA, self._facts | facts | known)


def _replanned(before: Experiment, now: Experiment, loop: _Loop) -> str:
    """What is to be said of another number of rounds; an error where they cannot be made."""
    done = loop.done()
    if now.rounds <= done:
        raise ConfigError(
            f"rounds={now.rounds}", f"{done} rounds of this run are done", f"Use rounds={done + 1} or more"
        )
    if loop.stalled():
        raise ConfigError(
            f"rounds={now.rounds}",
            f"this run has stopped early (patience={now.patience}): more rounds would not be made",
            "Start a new run with a larger patience",
        )
    return f"rounds={now.rounds} instead of {before.rounds}; it goes on from round {done}."


def _other_rates(before: Experiment, now: Experiment, done: int) -> list[str]:
    """Where the rounds that are done had other learning rates than the new plan has for them."""
    if all(before.schedule.at(r, before.rounds) == now.schedule.at(r, now.rounds) for r in range(1, done + 1)):
        return []
    return [
        f"schedule.kind={now.schedule.kind} depends on the number of rounds: the learning rates of rounds 1 to "
        f"{done} were those for {before.rounds}, so the result is not that of a run planned with {now.rounds}."
    ]


def _last_round(history: Sequence[Metrics]) -> int:
    return int(history[-1]["round"]) if history else 0


def algorithm_at(experiment: Experiment, round: int) -> Algorithm:
    """The method, or in a round after the last, the part of its finale."""
    stages = (experiment.algorithm, *experiment.algorithm.finale())
    return stages[max(0, round - experiment.rounds)]


# ---- making what a run needs


def as_dataset(experiment: Experiment, given: Source) -> Dataset:
    if given is None:
        if experiment.dataset == PYTHON:
            raise ConfigError(
                "this run's dataset was handed over from Python", "it is not in the folder", "Pass dataset=… again"
            )
        root = Path(experiment.data_root) if experiment.data_root else None
        return data.load(experiment.dataset, root, experiment.image_size)
    return given if isinstance(given, Dataset) else from_torch(given)


def resolve(experiment: Experiment, rows: Dataset, own_data: bool, own_model: bool) -> Experiment:
    """The experiment with every ``auto`` replaced by what it came to."""
    device = pick_device(experiment.device)
    changes: dict[str, Any] = {
        "dataset": PYTHON if own_data else _absolute(experiment.dataset, rows),
        "model": PYTHON if own_model else automatic_model(experiment.model, rows.shape),
        "device": str(device),
        "precision": automatic_precision(experiment.precision, device),
        "partition": experiment.partition.resolved(rows.client is not None),
    }
    return experiment.replace(**changes).set_by(experiment.origin)


def settled(
    experiment: Experiment, rows: Dataset, own_data: bool, own_model: bool
) -> tuple[Experiment, list[settings.Notice]]:
    """The experiment resolved, and without what can have no effect on these rows, this network and this device."""
    made, unused = effects.settle(resolve(experiment, rows, own_data, own_model))
    return resolve(made, rows, own_data, own_model), unused  # what was taken out may have left an ``auto`` behind


def _absolute(name: str, rows: Dataset) -> str:
    """A path in a run folder must hold wherever the run is resumed from."""
    return name if rows.name == name else str(Path(name).resolve())


def automatic_model(model: str, shape: tuple[int, ...]) -> str:
    """The paper's choice: ConvNet for grey images, ResNet-18 for colour; an MLP for tables."""
    if model != "auto":
        return loading.absolute(model)
    return "mlp" if len(shape) == 1 else "convnet" if shape[0] == 1 else "resnet18"


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"device={name} cannot be used: {reason}", remedy="Use device=auto or device=cpu") from error
    return device


def automatic_precision(name: str, device: torch.device) -> str:
    """bf16 with float32 parameters on a GPU that has it (docs/performance.md)."""
    if name != "auto":
        return name
    return "bf16" if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False) else "float32"


def make_partition(experiment: Experiment, rows: Dataset) -> partitions.Partition:
    """How many clients there are is the experiment's to say, unless the data or a saved partition know.

    A number that was asked for must then be theirs.
    """
    how = experiment.partition
    asked = "clients" in (experiment.origin or ()) or experiment.clients != Experiment.clients
    clients = experiment.clients if asked or not (how.file or how.kind == "natural") else 0
    return partitions.partition(rows.y, len(rows.classes), clients, how, experiment.seed, rows.client)


def make_task(experiment: Experiment, shape: tuple[int, ...], classes: int, given: Network) -> Task:
    body, head = _network(experiment, shape, classes, given)
    short = experiment.precision in ("tf32", "bf16")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = short
    task = Task.build(
        body,
        head,
        shape,
        classes,
        sgd=SGD(experiment.momentum, experiment.weight_decay, experiment.clip),
        norm=experiment.norm,
        seed=experiment.seed,
        fresh=not isinstance(given, nn.Module),
        dtype=torch.float64 if experiment.precision == "float64" else torch.float32,
        compute=torch.bfloat16 if experiment.precision == "bf16" else None,
        device=torch.device(experiment.device),
    )
    return experiment.algorithm.prepare(task)


def _network(
    experiment: Experiment, shape: tuple[int, ...], classes: int, given: Network
) -> tuple[nn.Module, nn.Module]:
    if given is None and experiment.model == PYTHON:
        raise ConfigError("this run's network was handed over from Python", remedy="Pass model=… again")
    if given is None and not loading.is_reference(experiment.model):
        return models.build(experiment.model, shape, classes)
    if given is None:
        given = loading.load(experiment.model, "model")
    if isinstance(given, nn.Module):
        return models.split_head(given, experiment.model_head, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(experiment.seed)
        return models.split_head(given(shape, classes), experiment.model_head, shape)


# ---- the rounds


@dataclass(frozen=True)
class _Stage:
    """A round to come: the method's own, or one of its finale."""

    round: int
    algorithm: Algorithm
    engine: Engine
    finale: bool


class _Loop:
    def __init__(
        self,
        experiment: Experiment,
        rows: Dataset,
        partition: partitions.Partition,
        network: Network,
        folder: Folder | None,
        callbacks: Sequence[Callback],
        stop: Callable[[], bool],
        calibrates: bool = True,
    ) -> None:
        self.experiment, self.folder, self.callbacks, self.stop = experiment, folder, callbacks, stop
        self.calibrates = calibrates
        self.algorithm = experiment.algorithm
        self.inputs = Inputs.of(rows)
        self.task = make_task(experiment, rows.shape, len(rows.classes), network)
        split = partitions.split(partition, experiment.seed, experiment.partition.test, experiment.validation)
        self.federation = Federation.of(self.task, rows, split, experiment.batch, experiment.seed, experiment.augment)
        self.history: list[Metrics] = []
        self.owns: dict[int, State] = {}

    warm = False
    """Whether this process has trained a round of it."""
    calibrates = True
    """Whether its end fits temperatures."""

    def choose_engine(self, most: int, resumed: bool = False) -> list[str]:
        """The engine and its threads, where they were left open; a run that is resumed keeps its own, as far as this
        machine has them. Gives what is to be said of it."""
        engine, threads, notes = self.experiment.engine, self.experiment.threads, []
        if resumed and engine == "processes" and (why := impossible()):
            engine = "threaded"
            found = f"engine=processes cannot be used here: {why}"
            notes.append(f"{found}. Going on with engine=threaded, to the same bits")
        engine, threads = engines.choose(engine, threads, self.algorithm, self.federation, most)
        if resumed and engine in engines.WORKERS:
            threads = min(threads, most)  # they decide how fast it goes, and nothing else
        elif resumed and threads > cores():
            here = f"this machine has {cores()}"
            notes.append(f"begun on {threads} threads, and {here}: last digits may differ, and it may be slow")
        self.experiment = self.experiment.replace(engine=engine, threads=threads)
        return notes

    def done(self) -> int:
        """The last round that is recorded."""
        return _last_round(self.history)

    def facts(self) -> dict[str, Any]:
        """What a model of this run must know when it is loaded, and who holds what."""
        return {"inputs": self.inputs.to_dict(), "labels": self.federation.labels.tolist()}

    def tell(self, text: str) -> None:
        for callback in self.callbacks:
            callback.message(text)

    def go(self, checkpoint: Checkpoint | None, history: list[Metrics]) -> Result:
        e, self.history = self.experiment, history
        if checkpoint is None:
            self.server, done = self.algorithm.init(self.task, self.federation.roster), 0
        else:
            self.server, self.owns, done = checkpoint.server, dict(checkpoint.owns), checkpoint.round
        with limited(e.threads):
            stages = list(self._stages())
        with limited(engines.arithmetic(e.engine, e.threads)):
            return self._rounds(stages, done)

    def _rounds(self, stages: list[_Stage], done: int) -> Result:
        for callback in self.callbacks:
            callback.begin(self.experiment, self.federation, self.history, len(stages))
        finished = True
        stalled = False
        for stage in stages[done:]:
            if not stage.finale and self.stalled():
                if not stalled:
                    after = f"{self.experiment.patience} evaluations"
                    self.tell(f"stopped early: the validation accuracy has not risen for {after}")
                stalled = True
                continue
            stop = self._one_round(stage)
            if stop and stage is not stages[-1]:
                finished = False
                break
        return self._end(finished)

    def _stages(self) -> Iterator[_Stage]:
        e = self.experiment
        main = self._engine(self.algorithm)
        for round in range(1, e.rounds + 1):
            yield _Stage(round, self.algorithm, main, finale=False)
        for extra, algorithm in enumerate(self.algorithm.finale(), 1):
            yield _Stage(e.rounds + extra, algorithm, self._engine(algorithm), finale=True)

    def _engine(self, algorithm: Algorithm) -> Engine:
        return engines.make(self.experiment.engine, algorithm, self.federation)

    def _one_round(self, stage: _Stage) -> bool:
        """Gives whether to stop after it; if so, it is saved."""
        e, number = self.experiment, stage.round
        began = time.perf_counter()
        cohort = self._cohort(stage)
        lost = [] if stage.finale else plan.lost(e.seed, number, cohort, e.dropout)
        answered = [k for k in cohort if k not in lost]
        record: Metrics = {"round": number, "cohort": answered, "lost": lost}
        rows = 0
        if answered:
            if not self.warm:
                record[timing.WARMUP] = self.warm = True
            rate = self._rate(number)
            epochs = stage.algorithm.local_epochs(e.epochs)
            with record_function(TRAIN):
                trained = stage.engine.train(self.server, self.owns, answered, number, rate, epochs)
            record["cohort"] = trained.cohort.index.tolist()
            record["lost"] = [k for k in cohort if k not in record["cohort"]]
            with record_function(MERGE):
                record |= self._merge(stage, trained)
            rows = trained.rows
        seconds = time.perf_counter() - began
        if self._due(stage):
            with record_function(EVALUATE):
                record |= self._evaluate(stage)
        record["seconds"] = seconds
        record["eval_seconds"] = time.perf_counter() - began - seconds
        record["samples_per_second"] = rows / seconds
        return self._record(stage, record)

    def _rate(self, round: int) -> float:
        """The learning rate of a round. A finale has that of the last round that was run: ``patience`` may have ended
        the rounds long before the schedule's last."""
        e = self.experiment
        if round > e.rounds:
            round = max((int(r["round"]) for r in self.history if r["round"] <= e.rounds), default=e.rounds)
        return e.lr * e.schedule.at(round, e.rounds)

    def _evaluate(self, stage: _Stage) -> Metrics:
        return evaluate(stage.engine, self.federation, stage.algorithm, self.server, self.owns, stage.round)

    def _cohort(self, stage: _Stage) -> list[int]:
        e = self.experiment
        if stage.finale:
            return list(range(self.federation.population))
        return plan.cohort(e.seed, stage.round, self.federation.population, e.participation)

    def _merge(self, stage: _Stage, trained: Trained) -> Metrics:
        """The server's step; only now does what the clients kept become theirs."""
        before = self.server.model.params
        clients = trained.cohort.index.tolist()
        whole = dict(zip(clients, tree.finite_rows(trained.ups) or [True] * len(clients), strict=True))
        server, metrics = stage.algorithm.aggregate(self.task, self.server, trained.ups, trained.cohort)
        if not tree.finite(server) or not any(whole.values()):
            raise self._diverged(stage.round, [k for k in clients if not whole[k]])
        for text in (*trained.say, *metrics.pop("say", ())):
            self.tell(f"round {stage.round}: {text}")
        self.server = tree.map(tree.as_saved, server)  # as it comes back from a checkpoint
        for k, own in ((k, own) for k, own in trained.owns.items() if whole[k]):
            self.owns[k] = tree.map(tree.as_saved, own)
        record: Metrics = {
            "train/loss": float(np.average(trained.metrics["loss"], weights=_weights(trained))),
            "train/rows": trained.rows,
            "bytes_down": trained.bytes_down,
            "bytes_up": trained.bytes_up,
        }
        record |= {f"clients/{name}": values for name, values in trained.metrics.items()} | metrics
        if trained.refused:
            record["refused"] = dict(trained.refused)
        ups = tree.pick(trained.ups.model.params, before.__contains__)
        step = {name: server.model.params[name] - before[name] for name in ups}
        # A method without a global model may still move what it shares; one that only collects uploads has no step.
        if step and (
            GLOBAL in stage.algorithm.answers_on(self.task) or any(bool(part.any()) for part in step.values())
        ):
            record["cosine"] = tree.cosines(step, before, ups)
        return record

    def _diverged(self, number: int, bad: list[int]) -> Diverged:
        return Diverged(
            f"round {number}: the model is no longer finite (from client {', '.join(map(str, bad)) or 'none alone'})",
            "nothing after this would mean anything; what was saved is from before it",
            f"Use a smaller rate (lr is {self.experiment.lr}) or clip=10",
        )

    def _due(self, stage: _Stage) -> bool:
        return stage.finale or stage.round % self.experiment.eval_every == 0 or stage.round == self.experiment.rounds

    def _record(self, stage: _Stage, record: Metrics) -> bool:
        stop = self.stop()
        record = {key: _plain(value) for key, value in record.items()}
        self.history.append(record)
        if self.folder:
            self.folder.append_metrics(record)
            last = stage.finale or stage.round == self.experiment.rounds
            if last or stage.round % self.experiment.checkpoint_every == 0 or stop or self.stalled():
                with record_function(SAVE):
                    self.folder.save(Checkpoint(stage.round, self.server, self.owns), self.experiment.rounds)
        for callback in self.callbacks:
            callback.round(record)
        return stop

    def stalled(self) -> bool:
        """No rise of the validation accuracy in the last ``patience`` evaluations.

        Those by ``eval_every``: that of a last round would not have been made had more rounds been planned.
        """
        patience, every = self.experiment.patience, self.experiment.eval_every
        due = (r for r in self.history if r["round"] % every == 0)
        seen = [r["validation/accuracy"] for r in due if r.get("validation/accuracy") is not None]
        return patience > 0 and len(seen) > patience and max(seen[-patience:]) <= max(seen[:-patience])

    def _end(self, finished: bool) -> Result:
        done = self.done()
        result = Result(
            self.experiment,
            algorithm_at(self.experiment, done),
            self.task,
            self.inputs,
            self.server,
            self.owns,
            self.federation.labels,
            done,
            {},
            self.federation,
            self.history,
            finished,
            self.folder.path if self.folder else None,
        )
        if finished:
            if self.folder:
                self.folder.write_json(SUMMARY, result.summary)
            result = replace(result, calibration=self._calibrated(result))
        for callback in self.callbacks:
            callback.end(result)
        return result

    def _calibrated(self, result: Result) -> dict[str, Calibration]:
        """Once: a finished run that is resumed keeps what it has."""
        if self.folder and (known := read_calibration(self.folder, result.round)):
            return known
        if not self.calibrates:
            return {}
        found = self._calibrate(result)
        if self.folder:
            models = {kind: calibration._asdict() for kind, calibration in found.items()}
            self.folder.write_json(CALIBRATION, {"round": result.round, "models": models})
        return found

    def _calibrate(self, result: Result) -> dict[str, Calibration]:
        return calibrate(result, self.federation, self._engine(result.algorithm))


def _weights(trained: Trained) -> list[float]:
    sizes: list[float] = trained.cohort.size.double().tolist()
    return sizes if sum(sizes) else [1.0] * len(sizes)


def _plain(value: Any) -> Any:
    """As JSON can hold it; what is not finite becomes empty."""
    if isinstance(value, torch.Tensor | np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def evaluated(history: Sequence[Metrics], whose: str) -> list[Metrics]:
    """The rounds in which that measure was taken."""
    return [r for r in history if r.get(f"{whose}/accuracy") is not None]


def best_of(measured: Sequence[Metrics], whose: str) -> Metrics:
    """The round of the highest accuracy, the first of equals."""
    return max(measured, key=lambda r: (r[f"{whose}/accuracy"], -r["round"]))


def summarise(experiment: Experiment, history: Sequence[Metrics]) -> Metrics:
    """The last evaluation and the best one of each measure, by name and round."""
    summary: Metrics = {
        "method": experiment.method_name,
        "seed": experiment.seed,
        "rounds": history[-1]["round"] if history else 0,
        "seconds": sum(r["seconds"] + r["eval_seconds"] for r in history),
        "warmup_seconds": timing.warmup(history, experiment.rounds),
        "samples_per_second": timing.speed(history, experiment.rounds),
        "bytes_up": sum(r.get("bytes_up", 0) for r in history),
        "bytes_down": sum(r.get("bytes_down", 0) for r in history),
    }
    for whose in (GLOBAL, PERSONAL):
        measured = evaluated(history, whose)
        if measured:
            for name, record in (("last", measured[-1]), ("best", best_of(measured, whose))):
                picked = {k: v for k, v in record.items() if k.startswith(whose + "/") and not isinstance(v, list)}
                summary[f"{whose}/{name}"] = {"round": record["round"], **picked}
    return summary

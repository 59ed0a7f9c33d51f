"""Run an experiment, go on with one, load its models."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from fedrane import engines
from fedrane.config import settings, sources
from fedrane.config.settings import FIELD, NAME, canonical
from fedrane.config.words import Words, as_experiment
from fedrane.data import partition as partitions
from fedrane.errors import ConfigError
from fedrane.experiment import KEYS, PYTHON, Experiment
from fedrane.system.threads import limited
from fedrane.training import digests, sessions, user_code
from fedrane.training.callbacks import Callback
from fedrane.training.loop import TrainingLoop
from fedrane.training.predictor import Inputs, Models
from fedrane.training.progress import shown
from fedrane.training.result import Result, last_round
from fedrane.training.resume import (
    OLDER,
    RecordedInputs,
    changed_lrs,
    fingerprints,
    of_data,
    replanned,
    require_same_states,
)
from fedrane.training.run_folder import CONFIG, PARTITION, Folder
from fedrane.training.saved import read_models, require_fit
from fedrane.training.setup import (
    Network,
    Source,
    advice,
    algorithm_at,
    as_dataset,
    choose_engine,
    make_federation,
    make_partition,
    pick_device,
    settled,
)


def run(
    experiment: Experiment | Words,
    out: str | Path | None = None,
    *,
    dataset: Source = None,
    model: Network = None,
    callbacks: Sequence[Callback] = (),
    stop: Callable[[], bool] = lambda: False,
    calibrate: bool = True,
    progress: bool | None = None,
) -> Result:
    """Run an experiment from its start; with ``out``, in a folder from which it can be resumed.

    The experiment may also be a TOML file, or words as on the command line: ``run("exp.toml")``,
    ``run(["exp.toml", "rounds=5"])``, ``run(["method=fedprox", "clients=10"])``.

    ``dataset`` and ``model`` replace those of the experiment: a ``Dataset``, a data frame (its ``label`` is in the
    experiment), any map-style torch dataset, or one of Hugging Face; a network (which keeps the weights it holds) or a
    function (input shape, classes) → network (which starts from the seed), whose classifier the experiment names as
    ``model_head``. Without ``calibrate`` a run ends a little sooner, and its models give scores instead of
    probabilities. ``progress`` shows a progress bar, by default in a terminal and in a notebook.
    """
    if not isinstance(experiment, Experiment):
        _require_folder(out)
    objects = {"dataset": dataset, "model": model}
    experiment = as_experiment(experiment, {key: PYTHON for key, value in objects.items() if value is not None})
    engines.check(experiment.engine)
    callbacks = [*callbacks, *shown(progress)]
    folder = None if out is None else Folder(out)
    if folder:
        folder.require_free()
    with ExitStack() as cleanup:
        max_threads = cleanup.enter_context(limited(1))  # where a run begins does not depend on the number of threads
        source, dataset = dataset, as_dataset(experiment, dataset)
        experiment, unused = settled(experiment, dataset, source is not None, model is not None)
        for callback, text in itertools.product(
            callbacks, [*settings.as_messages(unused), *advice(experiment), *dataset.notes]
        ):
            callback.message(text)
        partition = make_partition(experiment, dataset)
        experiment = experiment.replace(clients=len(partition.clients))
        federation = make_federation(experiment, dataset, partition, model)
        experiment, _ = choose_engine(experiment, federation, max_threads)
        loop = TrainingLoop(experiment, federation, Inputs.of(dataset), folder, callbacks, stop, calibrate)
        if folder:
            cleanup.callback(folder.close)
            if experiment.method_name.startswith("__main__:"):
                warnings.warn("a method of the running script cannot be found again to resume the run", stacklevel=2)
            experiment.to_toml()  # an error for a name that no file can hold
            folder.create()  # only now: a mistake in the configuration leaves no folder behind
            partitions.save(partition, folder.held(PARTITION), dataset=dataset.name)
            user_code.remember(experiment)
            user_code.keep(experiment, folder)
            prints = of_data(dataset, source) | fingerprints(federation.task, model, folder)
            inputs = {"sources": sources.contents(experiment), "fingerprints": prints}
            folder.write_metadata(loop.metadata() | digests.identity(experiment, inputs))
            session = sessions.describe(experiment, 0)
            cleanup.enter_context(sessions.recorded(folder, [], session, loop.done))
            folder.write_config(experiment)  # last: a folder with a configuration can be resumed
        cleanup.enter_context(engines.opened(experiment.engine, federation, experiment.threads))
        return loop.run()


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
    progress: bool | None = None,
) -> Result:
    """Go on with a run from its newest checkpoint; the end equals that of a run never interrupted, bit for bit.

    ``rounds`` plans another number of them than the run began with, also for a finished run: it then goes on from its
    last round, before any post-training stage. An input that has changed since the run began is an error unless
    ``accept_changes``.
    ``trust_code`` lets a method or network run that the folder names and you have not run before. ``progress`` is as
    for ``run``.
    """
    folder = Folder(out)
    callbacks = [*callbacks, *shown(progress)]
    with ExitStack() as cleanup:
        cleanup.callback(folder.close)
        folder.open()
        inputs = RecordedInputs(folder, accept_changes)
        inputs.check(user_code.now(folder))  # before any of it is run
        before = cleanup.enter_context(user_code.opened(folder, trust_code, accept_changes))
        sessions.require_planned(folder, before.rounds)
        experiment = before if rounds is None else before.replace(rounds=rounds)
        replan = experiment.rounds != before.rounds
        engines.check(experiment.engine)
        pick_device(experiment.device)
        max_threads = cleanup.enter_context(limited(1))
        source, dataset = dataset, as_dataset(experiment, dataset)
        inputs.check(of_data(dataset, source))
        partition = partitions.load(folder.path / PARTITION, len(dataset.y))
        federation = make_federation(experiment, dataset, partition, model)
        inputs.check(fingerprints(federation.task, model, folder))
        checkpoint, problems = folder.newest(federation.task.device, last=before.rounds if replan else None)
        done = checkpoint.round if checkpoint else 0
        if checkpoint:
            require_fit(federation.task, checkpoint, folder)
            require_same_states(experiment, algorithm_at(before, done), federation, checkpoint, folder)
        history = folder.metrics_until(done)
        notes = [f"{problem} {OLDER}" for problem in problems]
        notes += [f"{file} is gone: its copy in the run folder is used." for file in user_code.gone(folder)]
        notes += inputs.unused(experiment)
        deviations = inputs.accepted()
        if replan:
            notes.append(replanned(before, experiment, history))
            deviations += changed_lrs(before, experiment, done)
        notes += deviations
        idle = folder.finished and not replan and done == last_round(folder.read_metrics())
        chosen, choices = choose_engine(experiment, federation, max_threads, resumed=True)
        notes += choices
        loop = TrainingLoop(chosen, federation, Inputs.of(dataset), folder, callbacks, stop, calibrate)
        if checkpoint:
            loop.restore(checkpoint, history)
        if not idle:
            earlier, session = sessions.read(folder), sessions.describe(chosen, done)
            if earlier and (other := sessions.differences(earlier[-1], session)):
                notes.append(f"not as in the session before: {', '.join(other)}. The last bits of results may differ.")
            if earlier and (other := sessions.edited(earlier[0], experiment)):
                notes.append(f"{CONFIG} was edited: {', '.join(other)}. The last bits of results may differ.")
            session |= {"changed_inputs": inputs.changed, "notes": notes}
            if replan:
                session[sessions.ROUNDS]["planned_before"] = before.rounds
            cleanup.enter_context(sessions.recorded(folder, earlier, session, loop.done))
            if deviations:  # before the new plan stands: killed in between, they must not be forgotten
                user_code.keep(experiment, folder)
                inputs.write(loop.metadata(), deviations)
            folder.reopen(done, experiment.rounds, experiment if replan else None)
        for note in notes:
            loop.message(note)
        cleanup.enter_context(engines.opened(chosen.engine, federation, chosen.threads))
        return loop.run()


def _require_folder(out: str | Path | None) -> None:
    """A second word is not the folder: ``run("exp.toml", "rounds=5")``."""
    key, equals, _ = str(out).partition("=")
    if isinstance(out, str) and equals and (canonical(key) in {*KEYS, NAME} or key.startswith(FIELD)):
        raise ConfigError(
            f"out={out!r} is a setting", "the second argument is the run folder", f"Write run([…, {out!r}])"
        )


def load(out: str | Path, *, model: Network = None, trust_code: bool = False) -> Models:
    """The models of a run folder, finished or not; needs no dataset.

    ``trust_code`` lets a method or network run that the folder names and you have not run before.
    """
    return read_models(Folder(out), model, trust_code=trust_code)

"""The rounds of a run: cohort, training, aggregation, evaluation, record, checkpoint."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.profiler import record_function

from fedrane import engines, tree
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data import sampling
from fedrane.data.federation import Federation
from fedrane.data.streams import key
from fedrane.engines import Engine, Trained
from fedrane.engines.evaluation import Metrics
from fedrane.errors import ConfigError, Diverged
from fedrane.experiment import Experiment
from fedrane.ops import gate as gates
from fedrane.ops.attack import Attack
from fedrane.system import memory
from fedrane.system.threads import limited
from fedrane.task import State
from fedrane.training import timing
from fedrane.training.calibration import Calibration, calibrate
from fedrane.training.callbacks import Callback
from fedrane.training.gating import gated, loss_objection
from fedrane.training.predictor import Inputs
from fedrane.training.result import Result, last_round, stalled
from fedrane.training.round_records import problem
from fedrane.training.run_folder import CALIBRATION, SUMMARY, Checkpoint, Folder
from fedrane.training.saved import read_calibration
from fedrane.training.setup import algorithm_at

PHASES = TRAIN, AGGREGATE, EVALUATE, SAVE = ("train", "aggregate", "evaluate", "save a checkpoint")
"""The parts of a round, by the names they have in a trace."""
KEPT_UPLOADS = {"cpu": 1 << 30, "cuda": 1 << 33}
"""Bytes of uploads that a round keeps at once, by device; more are summed up as they come, to the same bits."""


@dataclass(frozen=True)
class Stage:
    """A round to come: a regular one of the method, or one of its post-training stage."""

    round: int
    algorithm: Algorithm
    engine: Engine
    post_training: bool


class TrainingLoop:
    """The rounds of an experiment on a federation, on any engine.

    With a folder, rounds are recorded and checkpoints saved there. ``stop`` is called after each round.
    """

    def __init__(
        self,
        experiment: Experiment,
        federation: Federation,
        inputs: Inputs,
        folder: Folder | None = None,
        callbacks: Sequence[Callback] = (),
        stop: Callable[[], bool] = lambda: False,
        calibrates: bool = True,
    ) -> None:
        self.experiment, self.federation, self.inputs = experiment, federation, inputs
        self.folder, self.callbacks, self.stop, self.calibrates = folder, list(callbacks), stop, calibrates
        self.algorithm, self.task = experiment.algorithm, federation.task
        self.gate = experiment.gate.on(experiment.engine)
        self.hostile = set(experiment.attack.hostile(federation.population, experiment.seed))
        self.history: list[Metrics] = []
        self.client_states: dict[int, State] = {}
        self.server: State
        self._start = 0
        """The round of the checkpoint that it goes on from."""
        self._warm = False
        """Whether this process has trained a round."""

    def done(self) -> int:
        """The last round that is recorded."""
        return last_round(self.history)

    def metadata(self) -> dict[str, Any]:
        """What is needed to load a model of this run, and the label counts of its clients."""
        return {"inputs": self.inputs.to_dict(), "labels": self.federation.labels.tolist()}

    def message(self, text: str) -> None:
        for callback in self.callbacks:
            callback.message(text)

    def restore(self, checkpoint: Checkpoint, history: list[Metrics]) -> None:
        """Go on from a checkpoint and the records up to it."""
        self.server, self.client_states, self.history = checkpoint.server, dict(checkpoint.client_states), history
        self._start = checkpoint.round

    def run(self) -> Result:
        """All rounds that are left."""
        e = self.experiment
        if not self._start:
            self.server = self.algorithm.init(self.task, self.federation.roster)
        with limited(e.threads):  # all engines now: a mistake in one must not show after the last round
            main = self._engine(self.algorithm)
            extra = [(algorithm, self._engine(algorithm)) for algorithm in self.algorithm.post_training()]
        with limited(engines.server_threads(e.engine, e.threads)):
            return self._rounds(main, extra)

    def _rounds(self, main: Engine, extra: Sequence[tuple[Algorithm, Engine]]) -> Result:
        last = self.experiment.rounds + len(extra)
        with ExitStack() as closing:
            for callback in self.callbacks:
                closing.callback(callback.close)
                callback.prepare(self.folder.path if self.folder else None)
                callback.begin(self.experiment, self.federation, self.history, last)
            finished = True
            for stage in self._stages(main, extra):
                if self._one_round(stage) and stage.round < last:
                    finished = False
                    break
            return self._end(finished)

    def _stages(self, main: Engine, extra: Sequence[tuple[Algorithm, Engine]]) -> Iterator[Stage]:
        """Those that are left, one after the other: a list of all would grow with ``rounds``."""
        rounds = self.experiment.rounds
        for round in range(self._start + 1, rounds + 1):
            if stalled(self.experiment, self.history):
                after = f"{self.experiment.patience} evaluations"
                self.message(f"stopped early: the validation accuracy has not risen for {after}")
                break
            yield Stage(round, self.algorithm, main, post_training=False)
        for round, (algorithm, engine) in enumerate(extra, rounds + 1):
            if round > self._start:
                yield Stage(round, algorithm, engine, post_training=True)

    def _engine(self, algorithm: Algorithm) -> Engine:
        return engines.make(self.experiment.engine, algorithm, self.federation)

    def _one_round(self, stage: Stage) -> bool:
        """Returns whether to stop after it; if so, it is saved."""
        e, number = self.experiment, stage.round
        began = time.perf_counter()
        cohort = self._cohort(stage)
        dropped = [] if stage.post_training else sampling.lost(e.seed, number, cohort, e.client_dropout)
        # A federation may have started without some of its clients: of these it has no examples.
        participants = [k for k in cohort if k not in dropped and len(self.federation.split.train[k])]
        lost = [k for k in cohort if k not in participants]
        record: Metrics = {"round": number, "cohort": participants, "lost": lost}
        examples = 0
        before = self.server, dict(self.client_states)
        if participants:
            if not self._warm:
                record[timing.WARMUP] = self._warm = True
            lr = self.lr_of(number)
            epochs = stage.algorithm.local_epochs(e.length)
            with record_function(TRAIN):
                reduce = self._reduces(stage.algorithm, participants)
                trained = stage.engine.train_round(
                    self.server, self.client_states, participants, number, lr, epochs, reduce
                )
            if hostile := sorted(self.hostile & set(trained.cohort.index.tolist())):
                trained, record["hostile"] = self._attacked(trained, hostile, number), hostile
            if self.gate:
                trained = gated(self.gate, self.server, trained)
            record["cohort"] = trained.cohort.index.tolist()
            trained = trained._replace(examples=self.federation.examples_trained(record["cohort"], epochs))
            record["lost"] = [k for k in cohort if k not in record["cohort"]]
            record |= {name: dict(of) for name in ("refused", "clipped") if (of := getattr(trained, name))}
            for text in trained.messages:
                self.message(f"round {number}: {text}")
            if record["cohort"]:
                with record_function(AGGREGATE):
                    record |= self._aggregate(stage, trained)
                if self.gate and (why := gates.objection(self.gate, before[0], self.server)):
                    self._reject(before, record, why)
            examples = trained.examples
        seconds = time.perf_counter() - began
        if self._due(stage):
            with record_function(EVALUATE):
                record |= self._evaluated(stage)
                if self.gate and (why := loss_objection(self.gate, record, self.history, self.task.classes)):
                    self._reject(before, record, why)
                    record |= self._evaluated(stage)
                self._require_numbers(stage, record)
        record["seconds"] = seconds
        record["eval_seconds"] = time.perf_counter() - began - seconds
        record["samples_per_second"] = examples / seconds
        return self._record(stage, record)

    def _reduces(self, algorithm: Algorithm, participants: Sequence[int]) -> bool:
        """Whether uploads are summed up as they come. They are all kept, and their cosines recorded, if they are few;
        and where somebody must see each of them."""
        size = len(participants) * tree.nbytes(self.server.model)
        if size <= KEPT_UPLOADS.get(self.task.device.type, KEPT_UPLOADS["cpu"]):
            return False
        sees = {
            "the method": algorithm.sees_uploads,
            f"gate.kind={self.experiment.gate.kind}": self.gate is not None,
            f"attack.kind={self.experiment.attack.kind}": not self.hostile.isdisjoint(participants),
        }
        who = [name for name, must in sees.items() if must]
        if who and self.task.device.type == "cpu" and size > memory.available():
            needed = f"{memory.as_text(size)} for the uploads of {len(participants)} clients"
            self.message(f"{needed}, more than is free: {' and '.join(who)} must have all of them at once")
        return not who

    def _attacked(self, trained: Trained, hostile: Sequence[int], round: int) -> Trained:
        """The round with what the hostile clients send instead."""
        clients, seed = trained.cohort.index.tolist(), self.experiment.seed
        keys = [key(seed, "attack", round, k) for k in hostile]
        rows = [clients.index(k) for k in hostile]
        return trained._replace(ups=self.experiment.attack.uploads(self.server, trained.ups, rows, keys))

    def _evaluated(self, stage: Stage) -> Metrics:
        return stage.engine.evaluate(self.server, self.client_states, stage.round)

    def _require_numbers(self, stage: Stage, record: Metrics) -> None:
        """An error if finite parameters give scores that are not numbers.

        A loss may be infinite: that of a method which gives some classes the score −∞.
        """
        if any(math.isnan(record.get(f"{which}/loss", 0.0)) for which in (GLOBAL, PERSONAL)):
            raise self._diverged(stage.round, [])

    def _reject(self, before: tuple[State, dict[int, State]], record: Metrics, why: str) -> None:
        """Go back to the last good model, before anything of the new one is saved."""
        self.server, self.client_states = before
        record["rejected"] = why
        self.message(f"round {record['round']}: the aggregated model is not used, and the last one kept: {why}")

    def lr_of(self, round: int) -> float:
        """The learning rate of a round. The post-training stage has that of the last round that was run:
        ``patience`` may have ended the rounds long before the schedule's last."""
        e = self.experiment
        if round > e.rounds:
            round = max((int(r["round"]) for r in self.history if r["round"] <= e.rounds), default=e.rounds)
        return e.lr * e.schedule.at(round, e.rounds)

    def _cohort(self, stage: Stage) -> list[int]:
        e = self.experiment
        if stage.post_training:
            return list(range(self.federation.population))
        return sampling.cohort(e.seed, stage.round, self.federation.population, e.participation)

    def _aggregate(self, stage: Stage, trained: Trained) -> Metrics:
        """The server's step; only now does what the clients kept become theirs."""
        before = self.server.model.params
        clients = trained.cohort.index.tolist()
        if trained.sums:
            rows, after = trained.sums.finite, trained.sums.update(trained.cohort)
        else:
            rows = tree.finite_rows(trained.ups) or [True] * len(clients)
            after = stage.algorithm.aggregate(self.task, self.server, trained.ups, trained.cohort)
        server, metrics = _server_step(stage.algorithm, after)
        finite = dict(zip(clients, rows, strict=True))
        kept = {k: state for k, state in trained.client_states.items() if finite[k]}
        broken = [] if tree.finite(kept) else [k for k, state in kept.items() if not tree.finite(state)]
        if broken or not tree.finite(server) or not any(finite.values()):
            raise self._diverged(stage.round, sorted({*broken, *(k for k in clients if not finite[k])}))
        for text in metrics.pop("messages", ()):
            self.message(f"round {stage.round}: {text}")
        self.server = tree.map(tree.as_saved, server)  # as it comes back from a checkpoint
        for k, client_state in kept.items():
            self.client_states[k] = tree.map(tree.as_saved, client_state)
        record: Metrics = {
            "train/loss": float(np.average(trained.metrics["loss"], weights=_weights(trained))),
            "train/examples": trained.examples,
            "bytes_down": trained.bytes_down,
            "bytes_up": trained.bytes_up,
        }
        record |= {f"clients/{name}": values for name, values in trained.metrics.items()} | metrics
        ups = tree.pick(trained.ups.model.params, before.__contains__)
        step = {name: server.model.params[name] - before[name] for name in ups}
        # A method without a global model may still move what it shares; one that only collects uploads has no step.
        if step and (GLOBAL in stage.algorithm.models_on(self.task) or any(bool(part.any()) for part in step.values())):
            record["cosine"] = tree.cosines(step, before, ups)
        return record

    def _diverged(self, number: int, bad: list[int]) -> Diverged:
        remedy = f"Use a smaller learning rate (lr is {self.experiment.lr}) or clip=10; "
        remedy += "a learning rate or strength of the method may be too large as well"
        if (kind := self.experiment.attack.kind) != Attack.kind:
            remedy = f"attack.kind={kind} may be why: use a robust method or gate.kind=refuse. {remedy}"
        return Diverged(
            f"round {number}: the model is no longer finite (from client {', '.join(map(str, bad)) or 'none alone'})",
            "nothing after this would mean anything; what was saved is from before it",
            remedy,
        )

    def _due(self, stage: Stage) -> bool:
        return (
            stage.post_training
            or stage.round % self.experiment.eval_every == 0
            or stage.round == self.experiment.rounds
        )

    def _record(self, stage: Stage, record: Metrics) -> bool:
        stop = self.stop()
        record = {key: _plain(value) for key, value in record.items()}
        if why := problem(record, self.federation.population):
            raise ConfigError(
                f"the record of round {stage.round} {why}",
                "it could not be read back, neither to resume nor for a report",
                "What a method's aggregate records is numbers, texts, or flat lists of numbers",
            )
        self.history.append(record)
        if self.folder:
            self.folder.append_metrics(record)
            last = stage.post_training or stage.round == self.experiment.rounds
            if (
                last
                or stage.round % self.experiment.checkpoint_every == 0
                or stop
                or stalled(self.experiment, self.history)
            ):
                with record_function(SAVE):
                    self.folder.save(Checkpoint(stage.round, self.server, self.client_states), self.experiment.rounds)
        for callback in self.callbacks:
            callback.round(record)
        return stop

    def _end(self, finished: bool) -> Result:
        done = self.done()
        result = Result(
            self.experiment,
            algorithm_at(self.experiment, done),
            self.task,
            self.inputs,
            self.server,
            self.client_states,
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
        if not self.calibrates or self.task.target:  # a number has no probability
            return {}
        calibrations = calibrate(result, self.federation, self._engine(result.algorithm))
        if self.folder:
            models = {which: calibration._asdict() for which, calibration in calibrations.items()}
            self.folder.write_json(CALIBRATION, {"round": result.round, "models": models})
        return calibrations


def _server_step(algorithm: Algorithm, returned: Any) -> tuple[State, Metrics]:
    """What a method's server step must return; an error if it is something else."""
    match returned:
        case (State() as server, dict() as record):
            return server, record
    given = type(returned).__name__
    if isinstance(returned, tuple):
        given += f" of {', '.join(type(part).__name__ for part in returned)}"
    raise ConfigError(
        f"{type(algorithm).__name__}.{'aggregate' if algorithm.sees_uploads else 'update'} returns {given}",
        "the server's next state and what to record are needed",
        "Return (server._replace(model=…), {}), or what super() returns",
    )


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

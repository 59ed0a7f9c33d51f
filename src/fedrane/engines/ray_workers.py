"""Clients in the workers of a Ray cluster: the cores or the GPUs of one machine or of several.

Workers are Ray's actors. The examples are in Ray's object store, once on each machine. A round's clients are cut into
ranges of about equal work, which go to the workers, the largest first; a worker that dies is replaced, and its range is
trained again. On a CPU a worker trains one client after another, as one of ``threaded`` does, so a round's result
depends neither on how many workers there are nor on which of them die. With a GPU it trains its range as a stack.
"""

from __future__ import annotations

import secrets
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import ray
import torch
from numpy.typing import NDArray
from ray.exceptions import RayError

from fedrane.algorithm import Algorithm
from fedrane.data.federation import Federation, Pool
from fedrane.data.sampling import Span
from fedrane.engines.base import LocalEngine, Summed, Sums, Trained, joined
from fedrane.engines.evaluation import Predicted
from fedrane.engines.sequential import NOTHING, Sequential
from fedrane.engines.stacked import Stacked
from fedrane.engines.threaded import Worker
from fedrane.errors import ConfigError, FedraneError, portable
from fedrane.system import ray_runtime
from fedrane.system.loading import raised_at
from fedrane.system.ray_runtime import dumps, loads
from fedrane.task import Model, State

RANGES_PER_WORKER = 4
"""On a CPU: small enough that no worker waits long for the last one."""
MAX_RANGE = 64
"""Clients of a range, on average, at most: a worker has their uploads at once."""
MAX_ATTEMPTS = 3
"""How often a job may lose its worker. One that kills each worker would end otherwise never."""
START_SECONDS = 300.0
"""How long to wait for a worker while none is alive: a cluster may be starting a machine."""
LOST = "a worker of Ray has died; another one repeats what it was computing"
Arrays = dict[str, tuple[NDArray[Any], NDArray[Any]]]
"""Inputs and labels of the pools, by name."""


class Ours(NamedTuple):
    """What identifies a federation and an engine in the workers."""

    federation: str
    engine: str


# ---- in a worker


class RayWorker:
    """Computes for one range of clients at a time."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.key = ""
        self.federation: Federation
        self.engines: dict[str, LocalEngine] = {}

    def ready(self) -> None:
        """Returns when it has been made."""

    def do(self, ours: Ours, federation: bytes, arrays: Arrays, algorithm: bytes, common: bytes, own: bytes) -> bytes:
        """Do a job with a method on a federation, which are kept for the next one. Errors are returned, not raised."""
        try:
            if ours.federation != self.key:
                self.key, self.engines = ours.federation, {}
                self.federation = _with_examples(loads(federation), arrays)
            if ours.engine not in self.engines:
                made = Stacked if self.federation.task.device.type == "cuda" else Worker
                self.engines[ours.engine] = made(loads(algorithm), self.federation)
            job, *given = loads(common)
            return dumps(job(self.engines[ours.engine], *given, *loads(own)))
        except Exception as error:  # noqa: BLE001 - it is raised where the run is
            if place := raised_at(error):
                error.add_note(place)
            return dumps(_Failed(portable(error)))


class _Failed(NamedTuple):
    error: Exception


def _train(
    engine: LocalEngine,
    server: State,
    round: int,
    lr: float,
    epochs: Span,
    reduce: bool,
    first: int,
    clients: list[int],
    client_states: Mapping[int, State],
) -> tuple[Trained, Summed | None]:
    trained = engine.train_round(server, client_states, clients, round, lr, epochs)
    trained = trained._replace(refused={}, clipped={})  # read-only mappings cannot be pickled
    if not reduce:
        return trained, None
    task, cohort = engine.federation.task, trained.cohort
    return trained._replace(ups=NOTHING), Summed.of(engine.algorithm, task, server, trained.ups, cohort, first)


def _predict(engine: LocalEngine, pool: str, model: Model, examples: NDArray[np.int64]) -> Predicted:
    return engine.predict(model, getattr(engine.federation, pool), examples)


def _predict_each(
    engine: LocalEngine, pool: str, models: list[Model], examples: tuple[NDArray[np.int64], ...]
) -> list[Predicted]:
    return engine.predict_each(models, getattr(engine.federation, pool), examples)


POOLS = ("train", "test")


def _without_examples(federation: Federation) -> tuple[Federation, Arrays]:
    pools = {name: getattr(federation, name) for name in POOLS}
    arrays = {name: (pool.x.cpu().numpy(), pool.y.cpu().numpy()) for name, pool in pools.items()}
    return replace(federation, **{name: replace(p, x=p.x[:0], y=p.y[:0]) for name, p in pools.items()}), arrays


def _with_examples(federation: Federation, arrays: Arrays) -> Federation:
    device = federation.task.device
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # and nobody writes
        pools = {
            name: replace(getattr(federation, name), x=torch.from_numpy(x).to(device), y=torch.from_numpy(y).to(device))
            for name, (x, y) in arrays.items()
        }
    return replace(federation, **pools)


# ---- the workers


@dataclass
class _Job:
    given: tuple[Any, ...]
    """The arguments of :meth:`RayWorker.do`."""
    cost: float
    attempts: int = 0


class WorkerPool:
    """As many workers as there are free cores or GPUs: of this machine, or of the joined cluster."""

    def __init__(self, gpu: bool) -> None:
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        self.gpu, self.size = gpu, max(1, int(free.get("GPU" if gpu else "CPU", 1)))
        actor: Any = ray.remote(RayWorker)
        self._actor = actor.options(num_cpus=1, num_gpus=int(gpu))
        self._starting: dict[Any, Any] = {}
        self._idle: list[Any] = []
        self._failed_starts = 0
        self.messages: list[str] = []
        self.sent: WeakKeyDictionary[Any, tuple[Any, ...]] = WeakKeyDictionary()
        """Keys of federations and engines, and references to what is in Ray's object store of them."""
        self._start(self.size)

    def close(self) -> None:
        for actor in (*self._starting.values(), *self._idle):
            ray.kill(actor)

    def run(self, jobs: Sequence[_Job]) -> Iterator[tuple[int, Any]]:
        """The results of the jobs as they come, with their numbers; the costliest are begun first."""
        waiting = deque(sorted(range(len(jobs)), key=lambda number: -jobs[number].cost))
        running: dict[Any, tuple[int, Any]] = {}
        try:
            while waiting or running:
                while waiting and self._idle:
                    number, actor = waiting.popleft(), self._idle.pop()
                    running[actor.do.remote(*jobs[number].given)] = number, actor
                ref = self._next(running)
                if ref in self._starting:
                    self._started(ref)
                    continue
                number, actor = running.pop(ref)
                try:
                    pickled = ray.get(ref)
                except RayError as error:
                    self._lost(jobs[number], error)
                    waiting.appendleft(number)
                else:
                    self._idle.append(actor)
                    yield number, _result(pickled)
        except BaseException:  # an interrupt as well: what is being computed is not waited for
            for _, actor in running.values():
                ray.kill(actor)
            self._start(len(running))
            raise

    def _next(self, running: Mapping[Any, Any]) -> Any:
        """The first worker to have started or job to have ended."""
        timeout = None if running or self._idle else START_SECONDS
        done, _ = ray.wait([*self._starting, *running], num_returns=1, timeout=timeout)
        if not done:
            raise FedraneError(
                f"no worker of Ray has started within {START_SECONDS:.0f} s",
                "the cluster has no free core or GPU, or its machines are gone",
                "Look at 'ray status', and resume the run when there are some",
            )
        return done[0]

    def _started(self, ref: Any) -> None:
        actor = self._starting.pop(ref)
        try:
            ray.get(ref)
        except RayError as error:  # it raised, or its machine is gone
            self._failed_starts += 1
            if self._failed_starts == MAX_ATTEMPTS:
                raise FedraneError("workers of Ray do not start", str(error)) from error
            self._start(1)
        else:
            self._failed_starts = 0
            self._idle.append(actor)

    def _lost(self, job: _Job, error: RayError) -> None:
        job.attempts += 1
        if job.attempts == MAX_ATTEMPTS:
            raise FedraneError(
                f"{job.attempts} workers of Ray have died with the same clients",
                str(error).partition("\n")[0],
                "Most often memory ran out: use fewer workers (threads=…), or smaller clients",
            ) from error
        self.messages.append(LOST)
        self._start(1)

    def _start(self, count: int) -> None:
        for _ in range(count):
            actor = self._actor.remote()
            self._starting[actor.ready.remote()] = actor


def _result(pickled: bytes) -> Any:
    result = loads(pickled)
    if isinstance(result, _Failed):
        raise result.error
    return result


_open: list[WorkerPool] = []


@contextmanager
def opened(gpu: bool, workers: int) -> Iterator[None]:
    """Workers on this machine or in the cluster of ``RAY_ADDRESS``; inside another such context, those of that one,
    which saves a start."""
    if any(pool.gpu == gpu for pool in _open):
        yield
        return
    with ray_runtime.running(workers):
        pool = WorkerPool(gpu)
        _open.append(pool)
        try:
            yield
        finally:
            _open.remove(pool)
            pool.close()


# ---- the engine


class Ray(LocalEngine):
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        self.algorithm, self.federation = algorithm, federation
        self.sequential = Sequential(algorithm, federation)
        self.gpu = federation.task.device.type == "cuda"

    @property
    def workers(self) -> WorkerPool:
        for pool in _open:
            if pool.gpu == self.gpu:
                return pool
        raise ConfigError("engine=ray without workers", "they last as long as a run", "Run inside engines.opened(…)")

    def train_round(
        self,
        server: State,
        client_states: Mapping[int, State],
        clients: list[int],
        round: int,
        lr: float,
        epochs: Span,
        reduce: bool = False,
    ) -> Trained:
        clients = sorted(clients)
        costs = [self.federation.examples_trained([k], epochs) for k in clients]

        def own(part: slice) -> tuple[Any, ...]:
            kept = {k: client_states[k] for k in clients[part] if k in client_states}
            return part.start, clients[part], kept

        sums = Sums(self.algorithm, self.federation.task, server) if reduce else None
        parts: dict[int, Trained] = {}
        for number, (trained, summed) in self._as_they_come((_train, server, round, lr, epochs, reduce), own, costs):
            parts[number] = trained
            if sums and summed:
                sums.take(summed)
        whole = joined([parts[number] for number in sorted(parts)], sums)
        messages, self.workers.messages = (*whole.messages, *self.workers.messages), []
        return whole._replace(messages=self.sequential.once(messages))

    def personal(self, server: State, client_state: State | None, client: int, round: int) -> Model:
        return self.sequential.personal(server, client_state, client, round)

    def predict(self, model: Model, pool: Pool, examples: NDArray[np.int64]) -> Predicted:
        size = self.sequential.predict_batch_size
        batches = [examples[begin : begin + size] for begin in range(0, len(examples), size)]
        if not batches:
            return Predicted.nothing(self.federation.task)
        parts = self._each(
            (_predict, self._name(pool), model),
            lambda part: (np.concatenate(batches[part]),),
            [len(batch) for batch in batches],
        )
        return Predicted(*(np.concatenate(column) for column in zip(*map(_present, parts), strict=True)))

    def predict_each(self, models: list[Model], pool: Pool, examples: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        parts = self._each(
            (_predict_each, self._name(pool)),
            lambda part: (models[part], examples[part]),
            [len(some) for some in examples],
        )
        return [predicted for part in parts for predicted in part]

    def _name(self, pool: Pool) -> str:
        return next(name for name in POOLS if getattr(self.federation, name) is pool)

    def _each(
        self, common: tuple[Any, ...], own: Callable[[slice], tuple[Any, ...]], costs: Sequence[float]
    ) -> list[Any]:
        """What the workers return for ranges of clients or batches, in their order."""
        results = dict(self._as_they_come(common, own, costs))
        return [results[number] for number in sorted(results)]

    def _as_they_come(
        self, common: tuple[Any, ...], own: Callable[[slice], tuple[Any, ...]], costs: Sequence[float]
    ) -> Iterator[tuple[int, Any]]:
        """The number of each range and what a worker returns for it; ``own`` gives what only a range needs."""
        workers = self.workers
        given = (*self._send(workers), ray.put(dumps(common)))
        count = workers.size * (1 if workers.gpu else RANGES_PER_WORKER)
        parts = ranges(costs, max(count, -(-len(costs) // MAX_RANGE)))
        return workers.run([_Job((*given, dumps(own(part))), sum(costs[part])) for part in parts])

    def _send(self, workers: WorkerPool) -> tuple[Any, ...]:
        """Put the method and the federation where all workers find them: once, and the stages of a run share it."""
        sent = workers.sent
        if self.federation not in sent:
            federation, arrays = _without_examples(self.federation)
            sent[self.federation] = secrets.token_hex(8), ray.put(dumps(federation)), ray.put(arrays)
        if self not in sent:
            sent[self] = secrets.token_hex(8), ray.put(dumps(self.algorithm))
        (federation_key, *data), (key, algorithm) = sent[self.federation], sent[self]
        return Ours(federation_key, key), *data, algorithm


def ranges(costs: Sequence[float], count: int) -> list[slice]:
    """Cut into at most ``count`` ranges of about equal cost; none is empty."""
    ends = np.cumsum(costs)
    wanted = np.arange(1, count) * ends[-1] / count
    cuts = {0, len(costs), *(np.searchsorted(ends, wanted, side="right")).tolist()}
    return [slice(*pair) for pair in pairwise(sorted(cuts))]


def _present(predicted: Predicted) -> list[NDArray[Any]]:
    return [column for column in predicted if column is not None]

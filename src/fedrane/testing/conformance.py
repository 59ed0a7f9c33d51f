"""The laws that every method must satisfy. ``fedrane check`` applies them to your own method.

Each law takes a method, runs its hooks on a small federation, and raises :class:`Broken` with the problem.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from fedrane import tree
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data.augment import Mixed
from fedrane.data.dataset import Dataset
from fedrane.data.partition import Partitioning
from fedrane.engines.base import Trained
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment
from fedrane.ops.reduction import Partial
from fedrane.runner import run
from fedrane.system.threads import limited
from fedrane.task import Batch, Client, Context, Model, State
from fedrane.training.result import Result
from fedrane.training.run_folder import TIMINGS, Checkpoint, Folder

CLASSES, FEATURES = 3, 6
TOLERANCE = 1e-9


class Broken(Exception):  # noqa: N818 - a law is broken
    """A law does not hold."""


def need(holds: bool, problem: str) -> None:
    if not holds:
        raise Broken(problem)


class Verdict(NamedTuple):
    """The result of one law."""

    law: Callable[[Algorithm], None]
    problem: str = ""
    """What is wrong; empty if the law holds."""
    crash: str = ""
    """The error that the method raised, and where. Then it is unknown whether the law holds."""
    again: bool = False
    """Whether an earlier law reported the same crash."""


def verdicts(algorithm: Algorithm) -> Iterator[Verdict]:
    """The results of all laws. A crash that stops several of them is marked as repeated."""
    crashes = set()
    for law in LAWS:
        verdict = judge(algorithm, law)
        yield verdict._replace(again=verdict.crash in crashes)
        crashes |= {verdict.crash} - {""}


def check(algorithm: Algorithm, law: Callable[[Algorithm], None]) -> str | None:
    """The problem with one law, or None if it holds."""
    problem = judge(algorithm, law).problem
    return f"{title(law)}: {problem}" if problem else None


def judge(algorithm: Algorithm, law: Callable[[Algorithm], None]) -> Verdict:
    """Check a method against one law."""
    try:
        with limited(1):
            law(algorithm)
    except Exception as error:  # noqa: BLE001 - every error that a method raises is its failure
        name = "" if isinstance(error, Broken) else type(error).__name__
        position = _position(error, algorithm)
        where = "; ".join(part for part in (position, *getattr(error, "__notes__", ())) if part)
        problem = ": ".join(part for part in (name, str(error)) if part) + (f" ({where})" if where else "")
        return Verdict(law, problem, f"{name} {position or error}" if name else "")
    return Verdict(law)


def _position(error: Exception, algorithm: Algorithm) -> str:
    """The line and the hook of an error: in the method's file if possible, otherwise in any file of no library."""
    files = {
        vars(sys.modules[k.__module__]).get("__file__") for k in type(algorithm).__mro__ if k.__module__ in sys.modules
    }
    files.discard(sys.modules[Algorithm.__module__].__file__)
    libraries = tuple(f"{Path(library.__file__ or '').parent}{os.sep}" for library in (torch, sys.modules["fedrane"]))
    in_method, elsewhere = "", ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        position = f"{code.co_filename}:{line}, in {code.co_qualname}"
        if code.co_filename in files:
            in_method = position
        elif not code.co_filename.startswith(libraries):
            elsewhere = position
    return in_method or elsewhere


def title(law: Callable[[Algorithm], None]) -> str:
    return law.__name__.replace("_", " ")


# ---- a small federation


def blobs(examples: int = 150, seed: int = 0) -> Dataset:
    """A table of three clusters in six dimensions."""
    numbers = np.random.Generator(np.random.Philox(seed))
    y = np.arange(examples + 60) % CLASSES
    centres = 2 * np.eye(CLASSES, FEATURES)
    x = (centres[y] + 0.5 * numbers.standard_normal((len(y), FEATURES))).astype(np.float32)
    names = tuple("abc")
    ones, zeros = (1.0,) * FEATURES, (0.0,) * FEATURES
    return Dataset("blobs", x[:examples], y[:examples], x[examples:], y[examples:], names, zeros, ones)


class Small(nn.Module):
    """A network with all difficulties: normalisation, dropout, a separate head."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity(), nn.Linear(FEATURES, 8), nn.Identity())
        self.norm = nn.BatchNorm1d(8) if normalised else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.drop(torch.relu(self.norm(self.inner(x)))))
        return out


VOCABULARY = 5


def codes() -> Dataset:
    """Sequences of six numbers of a vocabulary; the class depends on the last one."""
    x = np.random.Generator(np.random.Philox(1)).integers(0, VOCABULARY, (90, FEATURES))
    y = x[:, -1] % CLASSES
    return Dataset("codes", x[:60], y[:60], x[60:], y[60:], tuple("abc"), (), (), vocabulary=VOCABULARY)


class Embedded(nn.Module):
    """A network on numbers of a vocabulary, which sees whether they still are."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 2)
        self.inner = nn.Linear(2 * FEATURES, 8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        need(x.dtype == torch.int64, f"the network gets {x.dtype}, and numbers of a vocabulary are int64")
        out: torch.Tensor = self.head(torch.relu(self.inner(self.embed(x).flatten(1))))
        return out


def network(normalised: bool = True) -> Callable[[tuple[int, ...], int], nn.Module]:
    return lambda shape, classes: Small(normalised)


def experiment(algorithm: Algorithm, **changes: Any) -> Experiment:
    settings: dict[str, Any] = {
        "clients": 5,
        "rounds": 3,
        "epochs": 2,
        "batch": 16,
        "model_head": "head",
        "precision": "float64",
        "device": "cpu",
        "engine": "sequential",
    }
    return Experiment(method=algorithm, **(settings | changes))


def trained(algorithm: Algorithm, normalised: bool = True, *, post_training: bool = True, **changes: Any) -> Result:
    """The result of a run, with or without its post-training stages."""
    chosen = experiment(algorithm, **changes)
    rounds = iter(range(1, chosen.rounds + 1))
    stop = (lambda: False) if post_training else (lambda: next(rounds) == chosen.rounds)
    try:
        return run(chosen, dataset=blobs(), model=network(normalised), stop=stop, progress=False)
    except ConfigError:
        if not changes.get("momentum"):
            raise
    changes["momentum"] = 0.0  # some methods refuse momentum
    return trained(algorithm, normalised, post_training=post_training, **changes)


@dataclass(frozen=True)
class Bench:
    """A federation after one round, to call the hooks of a method or of a post-training stage directly."""

    result: Result
    algorithm: Algorithm

    @property
    def engine(self) -> Sequential:
        return Sequential(self.algorithm, self.result.federation)

    def context(self, client: int) -> Context:
        who = self.result.federation.client(client, 2, 0.1, 1)
        return self.engine.context(self.result.server, self.result.client_states.get(client), who)


def benches(algorithm: Algorithm, normalised: bool = True, **changes: Any) -> list[Bench]:
    """One for the method, and one for each post-training stage."""
    result = trained(algorithm, normalised, **changes)
    return [Bench(result, stage) for stage in (algorithm, *algorithm.post_training())]


def states(result: Result) -> dict[str, Any]:
    return {
        "server": result.server,
        "client_states": {str(k): client_state for k, client_state in result.client_states.items()},
    }


# ---- the laws


def one_seed_gives_the_same_bytes(algorithm: Algorithm) -> None:
    first, second = (trained(algorithm, participation=0.6, client_dropout=0.2, momentum=0.5) for _ in range(2))
    need(tree.equal(states(first), states(second)), "two runs with one seed end in different states")
    for a, b in zip(first.history, second.history, strict=True):
        different = [key for key in a if key not in TIMINGS and a[key] != b.get(key)]
        need(not different, f"two runs with one seed record different {', '.join(different)}")


def another_seed_gives_another_result(algorithm: Algorithm) -> None:
    first, second = (trained(algorithm, seed=seed) for seed in (0, 1))
    need(not tree.equal(states(first), states(second)), "the seed changes nothing")


def order_of_clients_is_irrelevant(algorithm: Algorithm) -> None:
    permutation = torch.tensor([3, 0, 4, 2, 1])
    for bench in benches(algorithm, rounds=1):
        task, server = bench.result.task, bench.result.server
        sent = bench.engine.train_round(server, bench.result.client_states, [0, 1, 2, 3, 4], 2, 0.1, 2)
        first, _ = bench.algorithm.aggregate(task, server, sent.ups, sent.cohort)
        second, _ = bench.algorithm.aggregate(task, server, *_some(sent, permutation))
        gap = max((float((a - b).abs().max()) for a, b in _pairs(first, second) if a.numel()), default=0.0)
        need(gap <= TOLERANCE, f"the server's state depends on the order of the clients (by {gap:.1e})")


def parts_of_a_cohort_add_up(algorithm: Algorithm) -> None:
    """A server that need not see every upload takes the same step from the sums over any parts, to the bit."""
    everyone, cuts = [0, 1, 2, 3, 4], ([0, 5], [0, 2, 5], [0, 3, 4, 5], [0, 1, 2, 3, 4, 5])
    for bench in benches(algorithm, rounds=1):
        if bench.algorithm.sees_uploads:
            continue
        task, server = bench.result.task, bench.result.server
        sent = bench.engine.train_round(server, bench.result.client_states, everyone, 2, 0.1, 2)
        whole, record = bench.algorithm.aggregate(task, server, sent.ups, sent.cohort)
        for ends in cuts:
            rows = [(begin, _some(sent, torch.arange(begin, end))) for begin, end in pairwise(ends)]
            parts = [Partial.of(bench.algorithm.summary(task, server, *some), begin) for begin, some in rows]
            totals = reduce(Partial.__add__, reversed(parts)).totals(len(everyone))
            server_of_parts, of_parts = bench.algorithm.update(task, server, totals, sent.cohort)
            same = tree.equal(whole, server_of_parts) and str(record) == str(of_parts)
            need(same, f"the server's state depends on which uploads are summed together (clients {ends[:-1]} first)")


def hooks_leave_their_inputs_unchanged(algorithm: Algorithm) -> None:
    for bench in benches(algorithm, rounds=1, participation=0.6):
        _pure(bench)


def _pure(bench: Bench) -> None:
    task, server, algorithm = bench.result.task, bench.result.server, bench.algorithm
    before = tree.map(torch.clone, server)
    ctx = bench.context(0)
    kept = tree.map(torch.clone, _in_context(ctx))
    work = algorithm.begin(task, ctx)
    for batch in bench.engine.batches(0, 2, 1):
        seen = tree.map(torch.clone, work._asdict())
        after = algorithm.step(task, ctx, work, batch)
        need(tree.equal(seen, work._asdict()), "step changes its argument work")
        work = after
    seen = tree.map(torch.clone, work._asdict())
    algorithm.finish(task, ctx, work)
    algorithm.personal_model(task, ctx)
    need(tree.equal(seen, work._asdict()), "finish changes its argument work")
    need(tree.equal(kept, _in_context(ctx)), "a client hook changes what the server sent or the client state")
    sent = bench.engine.train_round(server, bench.result.client_states, [0, 1, 2], 2, 0.1, 1)
    ups = tree.map(torch.clone, sent.ups)
    algorithm.aggregate(task, server, sent.ups, sent.cohort)
    need(tree.equal(ups, sent.ups), "aggregate changes the uploads")
    need(tree.equal(before, server), "a hook changes the server's state in place")


def client_hooks_read_no_values(algorithm: Algorithm) -> None:
    """Client hooks must not wait for a tensor's value or branch on it, so that they can be captured and stacked."""
    for bench in benches(algorithm, rounds=1):
        stage, task, ctx, engine = bench.algorithm, bench.result.task, bench.context(1), bench.engine
        batches = [each for batch in engine.batches(1, 2, 1) for each in (batch, _pad(batch, 3))]
        with _hidden_values():
            work = stage.begin(task, ctx)
            for batch in batches:
                work = stage.step(task, ctx, work, batch)
            stage.finish(task, ctx, work)
        available = stage.models_on(task)
        models = [stage.global_model(task, bench.result.server)] if GLOBAL in available else []
        models += [stage.personal_model(task, ctx)] if PERSONAL in available else []
        for model in models:
            with _hidden_values():
                stage.predict(task, model, batches[0].x, batches[0].mask)


def state_survives_a_checkpoint(algorithm: Algorithm) -> None:
    result = trained(algorithm, rounds=2, participation=0.6)
    with tempfile.TemporaryDirectory() as path, closing(Folder(Path(path))) as folder:
        folder.create()
        folder.save(Checkpoint(2, result.server, dict(result.client_states)), 2)
        read, _ = folder.newest()
    need(read is not None and read.round == 2, "the checkpoint cannot be read")
    if read is not None:
        same = tree.equal(read.server, result.server) and read.client_states.keys() == result.client_states.keys()
        same = same and all(
            tree.equal(read.client_states[k], client_state) for k, client_state in result.client_states.items()
        )
        need(same, "the state loaded from a checkpoint differs from the one that was saved")


def absent_clients_keep_their_state(algorithm: Algorithm) -> None:
    result = trained(algorithm, rounds=4, participation=0.6, client_dropout=0.3)
    bench = Bench(result, algorithm)
    before = {k: tree.map(torch.clone, client_state) for k, client_state in result.client_states.items()}
    sent = bench.engine.train_round(result.server, result.client_states, [0, 2], 5, 0.1, 1)
    need(
        sent.client_states.keys() == {0, 2}, f"training clients 0 and 2 returned states of {sorted(sent.client_states)}"
    )
    need(
        all(tree.equal(before[k], result.client_states[k]) for k in before),
        "training changes a state before it is committed",
    )
    uploaded = {k for record in result.history for k in record["cohort"]}
    need(set(result.client_states) == uploaded, "a client that never uploaded has a state")


def dtype_is_kept(algorithm: Algorithm) -> None:
    """Models keep the run's dtype. What a method adds to them may be more precise, but never less."""
    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        for bench in benches(algorithm, rounds=1, precision=name):
            sent = bench.engine.train_round(bench.result.server, bench.result.client_states, [0, 1, 2, 3, 4], 2, 0.1, 1)
            trees = {
                **states(bench.result),
                "ups": sent.ups,
                "kept": {str(k): client_state for k, client_state in sent.client_states.items()},
            }
            for path, leaf in tree.flatten(trees).items():
                allowed = (dtype,) if "/model/" in path else (dtype, torch.float64)
                kept = not leaf.is_floating_point() or leaf.dtype in allowed
                need(kept, f"{path} is {leaf.dtype} in a {name} run")


def frozen_parameters_do_not_move(algorithm: Algorithm) -> None:
    """Checked for each stage: a post-training stage may tune what the rounds before it freeze."""
    result = trained(algorithm, post_training=False, rounds=10, epochs=1, momentum=0.9, weight_decay=0.1, lr=0.05)
    task, federation, server, client_states = result.task, result.federation, result.server, dict(result.client_states)
    first = algorithm.init(task, federation.roster).model
    _unmoved(algorithm, "server", first, server.model)
    for k, client_state in client_states.items():
        _unmoved(algorithm, f"client {k}", first, client_state.model)
    for number, stage in enumerate(algorithm.post_training(), result.round + 1):
        engine, everyone = Sequential(stage, federation), list(range(federation.population))
        contexts = {
            k: engine.context(server, client_states.get(k), federation.client(k, number, 0.05, 1)) for k in everyone
        }
        sent = engine.train_round(server, client_states, everyone, number, 0.05, stage.local_epochs(1))
        after, _ = stage.aggregate(task, server, sent.ups, sent.cohort)
        _unmoved(stage, "server after post-training", server.model, after.model)
        for k, client_state in sent.client_states.items():
            kept = tree.equal(
                client_state, contexts[k].client_state
            )  # the state from before this stage, not what the stage started from
            if not kept:
                _unmoved(stage, f"client {k} after post-training", stage.start(task, contexts[k]), client_state.model)
        server, client_states = after, dict(sent.client_states)


def works_with_and_without_normalisation(algorithm: Algorithm) -> None:
    for normalised in (True, False):
        for norm in ("shared", "batch", "local", "group"):
            result = trained(algorithm, normalised, norm=norm, rounds=2)
            need(tree.finite(states(result)), f"norm={norm}: the state is not finite")
            need(_measured(result) != [], f"norm={norm}: nothing was measured")


def padding_changes_nothing(algorithm: Algorithm) -> None:
    for bench in (*benches(algorithm, True, rounds=1), *benches(algorithm, False, rounds=1)):
        stage, task, ctx = bench.algorithm, bench.result.task, bench.context(1)
        exact = padded = stage.begin(task, ctx)
        for batch in bench.engine.batches(1, 2, 1):
            exact = stage.step(task, ctx, exact, batch)
            padded = stage.step(task, ctx, padded, _pad(batch, 7))
        done = [stage.finish(task, ctx, work)._asdict() for work in (exact, padded)]
        gap = max((float((a - b).abs().max()) for a, b in _pairs(*done) if a.numel()), default=0.0)
        need(gap <= TOLERANCE, f"padding changes the result (by {gap:.1e})")


def mixed_labels_count(algorithm: Algorithm) -> None:
    """With mixup an example has two labels. If the weight of the second is 1, it must count as the only one."""
    for bench in benches(algorithm, rounds=1):
        stage, task, ctx = bench.algorithm, bench.result.task, bench.context(1)
        if not stage.trains_model:
            continue
        only = mixed = stage.begin(task, ctx)
        for batch in bench.engine.batches(1, 2, 1):
            other = (batch.y + 1) % CLASSES
            only = stage.step(task, ctx, only, batch._replace(y=other))
            mixed = stage.step(task, ctx, mixed, batch._replace(mixed=Mixed(other, torch.ones_like(batch.x[:, 0]))))
        done = [stage.finish(task, ctx, work)._replace(metrics={})._asdict() for work in (only, mixed)]
        gap = max((float((a - b).abs().max()) for a, b in _pairs(*done) if a.numel()), default=0.0)
        need(
            gap <= TOLERANCE,
            f"the second labels of augment.mixup are ignored (by {gap:.1e}): the loss must use "
            "cross_entropy(scores, batch) or batch.targets(classes), not batch.y",
        )


def numbers_of_a_vocabulary_stay_whole(algorithm: Algorithm) -> None:
    """Inputs that are characters or words reach an embedding as they are, in training and in predictions."""
    chosen = experiment(algorithm, clients=3, rounds=2, epochs=1)
    result = run(chosen, dataset=codes(), model=lambda shape, classes: Embedded(), progress=False)
    need(tree.finite(states(result)), "the state is not finite")
    need(_measured(result) != [], "nothing was measured")


def only_what_is_shared_travels(algorithm: Algorithm) -> None:
    for bench in benches(algorithm, rounds=1, participation=0.6):
        sent = bench.engine.train_round(bench.result.server, bench.result.client_states, [0, 1], 2, 0.1, 1)
        for where, names in (("down", bench.context(0).down.model.params), ("up", sent.ups.model.params)):
            kept = [name for name in names if not bench.algorithm.shares(name)]
            need(not kept, f"{', '.join(kept)} is not shared but is sent {where}")
        need(sent.cohort.labels is None, "the server sees the clients' labels")


def models_are_those_declared(algorithm: Algorithm) -> None:
    result = trained(algorithm, rounds=2)
    examples = torch.from_numpy(blobs().x_test[:9])
    declared = result.algorithm.models_on(result.task)
    models = ([result.model] if GLOBAL in declared else []) + ([result.personal(0)] if PERSONAL in declared else [])
    need(bool(models), "it declares no model")
    for model in models:
        together = model(examples)
        need(together.shape == (9, CLASSES), f"scores of shape {tuple(together.shape)} for 9 examples")
        need(bool(torch.isfinite(together).all()), "scores are not finite")
        alone = torch.cat([model(example[None]) for example in examples])
        need(torch.allclose(together, alone), "the prediction of an example depends on the rest of its batch")
    for whose in (GLOBAL, PERSONAL):
        present = f"{whose}/accuracy" in result.history[-1]
        need(present == (whose in declared), f"{whose} accuracy is {'' if present else 'not '}measured")


def it_learns(algorithm: Algorithm) -> None:
    """Checked on IID clients. How well a method handles heterogeneous ones is a research question, not a law: a median
    of parameters, for example, follows the classes that most clients have."""
    result = trained(algorithm, rounds=20, epochs=2, partition=Partitioning(kind="iid"))
    for whose, accuracy in _measured(result):
        need(accuracy > 0.7, f"{whose} accuracy {accuracy:.2f} after 20 rounds on three well-separated clusters")


LAWS: tuple[Callable[[Algorithm], None], ...] = (
    one_seed_gives_the_same_bytes,
    another_seed_gives_another_result,
    order_of_clients_is_irrelevant,
    parts_of_a_cohort_add_up,
    hooks_leave_their_inputs_unchanged,
    client_hooks_read_no_values,
    state_survives_a_checkpoint,
    absent_clients_keep_their_state,
    dtype_is_kept,
    frozen_parameters_do_not_move,
    works_with_and_without_normalisation,
    padding_changes_nothing,
    mixed_labels_count,
    numbers_of_a_vocabulary_stay_whole,
    only_what_is_shared_travels,
    models_are_those_declared,
    it_learns,
)


@contextmanager
def _hidden_values() -> Iterator[None]:
    """Raise :class:`Broken` when the value of a tensor is read, or when a shape depends on it."""
    with _Operators(), _Conversions():  # type: ignore[no-untyped-call]
        yield


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects operators that synchronise with the host: ``item()``, ``bool()``, ``nonzero()``, …"""

    TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.TAGS & set(func.tags) and not (func is torch.ops.aten.index.Tensor and not _masks(args[1])):
            _read(str(func))
        return func(*args, **(kwargs or {}))


class _Conversions(TorchFunctionMode):
    """Detects copies to the host without an operator, and gives operators the names that users know."""

    NAMES = ("tolist", "numpy", "__array__", "cpu", "__repr__", "__format__")
    FUNCTIONS = frozenset(getattr(torch.Tensor, name) for name in NAMES)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = resolve_name(func) or str(func)
        if func in self.FUNCTIONS:
            _read(name)
        try:
            return func(*args, **(kwargs or {}))
        except Broken:
            _read(name)


def _masks(indices: Any) -> bool:
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)


def _read(operation: str) -> None:
    raise Broken(f"a client hook waits for a tensor's values ({operation}), so it cannot be captured or stacked")


def _unmoved(algorithm: Algorithm, who: str, before: Model, after: Model) -> None:
    for name, value in after.params.items():
        frozen = name in before.params and not algorithm.trains(name)
        need(not frozen or tree.equal(value, before.params[name]), f"{who}: frozen {name} has changed")


def _pairs(a: Any, b: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = tree.flatten(a), tree.flatten(b)
    need(x.keys() == y.keys(), f"different trees: {sorted(x.keys() ^ y.keys())}")
    return ((x[path], y[path]) for path in x)


def _in_context(ctx: Context) -> dict[str, State]:
    return {"down": ctx.down, "client_state": ctx.client_state}


def _some(sent: Trained, rows: torch.Tensor) -> tuple[State, Client]:
    """The uploads of these clients, and who they are."""
    tensors: dict[str, Any] = {k: v for k, v in sent.cohort._asdict().items() if isinstance(v, torch.Tensor)}
    cohort = sent.cohort._replace(**{k: v[rows] for k, v in tensors.items()})
    return tree.map(lambda leaf: leaf[rows], sent.ups), cohort


def _measured(result: Result) -> list[tuple[str, float]]:
    last = result.history[-1]
    return [(whose, last[f"{whose}/accuracy"]) for whose in (GLOBAL, PERSONAL) if f"{whose}/accuracy" in last]


def _pad(batch: Batch, extra: int) -> Batch:
    """The batch with padding whose values would change a result."""
    x = torch.cat([batch.x, torch.full((extra, *batch.x.shape[1:]), 1e3, dtype=batch.x.dtype)])
    y = torch.cat([batch.y, batch.y.new_zeros(extra)])
    mask = torch.cat([batch.mask, batch.mask.new_zeros(extra)])
    return Batch(x, y, mask, batch.key, full=False)

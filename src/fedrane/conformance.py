"""The laws every method must keep, whatever its paper says; ``fedrane check`` holds a method of one's own to them.

Each law takes a method, runs its hooks on a small federation and raises :class:`Broken` with what it found.
"""

from __future__ import annotations

import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
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
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment
from fedrane.run import Result, run
from fedrane.task import Batch, Context, Model, State
from fedrane.threads import limited
from fedrane.training.run_folder import TIMINGS, Checkpoint, Folder

CLASSES, FEATURES = 3, 6
TOLERANCE = 1e-9


class Broken(Exception):  # noqa: N818 - a law is broken
    """A law does not hold."""


def need(holds: bool, found: str) -> None:
    if not holds:
        raise Broken(found)


class Verdict(NamedTuple):
    """What became of one law."""

    law: Callable[[Algorithm], None]
    problem: str = ""
    """What is wrong; empty where the law holds."""
    crash: str = ""
    """The method raised an error of its own: which and where. Then nobody knows whether the law holds."""
    again: bool = False
    """The same crash has been reported of an earlier law."""


def verdicts(algorithm: Algorithm) -> Iterator[Verdict]:
    """All laws; a mistake that stops the method in each of them is described once."""
    crashes = set()
    for law in LAWS:
        found = judge(algorithm, law)
        yield found._replace(again=found.crash in crashes)
        crashes |= {found.crash} - {""}


def check(algorithm: Algorithm, law: Callable[[Algorithm], None]) -> str | None:
    """What is wrong, or nothing."""
    problem = judge(algorithm, law).problem
    return f"{title(law)}: {problem}" if problem else None


def judge(algorithm: Algorithm, law: Callable[[Algorithm], None]) -> Verdict:
    """Hold a method to one law."""
    try:
        with limited(1):
            law(algorithm)
    except Exception as error:  # noqa: BLE001 - whatever a method raises, it is the method that fails
        kind = "" if isinstance(error, Broken) else type(error).__name__
        place = _place(error, algorithm)
        where = "; ".join(part for part in (place, *getattr(error, "__notes__", ())) if part)
        said = ": ".join(part for part in (kind, str(error)) if part) + (f" ({where})" if where else "")
        return Verdict(law, said, f"{kind} {place or error}" if kind else "")
    return Verdict(law)


def _place(error: Exception, algorithm: Algorithm) -> str:
    """The line in which an error arose, and the hook: of the method's own file, else of any that is not a library's."""
    own = {
        vars(sys.modules[k.__module__]).get("__file__") for k in type(algorithm).__mro__ if k.__module__ in sys.modules
    }
    own.discard(sys.modules[Algorithm.__module__].__file__)
    libraries = tuple(f"{Path(library.__file__ or '').parent}{os.sep}" for library in (torch, sys.modules["fedrane"]))
    found = {False: "", True: ""}
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        mine = code.co_filename in own
        if mine or not code.co_filename.startswith(libraries):
            found[mine] = f"{code.co_filename}:{line}, in {code.co_qualname}"
    return found[True] or found[False]


def title(law: Callable[[Algorithm], None]) -> str:
    return law.__name__.replace("_", " ")


# ---- a small federation


def blobs(rows: int = 150, seed: int = 0) -> Dataset:
    """Three clouds in six dimensions, as a table."""
    numbers = np.random.Generator(np.random.Philox(seed))
    y = np.arange(rows + 60) % CLASSES
    centres = 2 * np.eye(CLASSES, FEATURES)
    x = (centres[y] + 0.5 * numbers.standard_normal((len(y), FEATURES))).astype(np.float32)
    names = tuple("abc")
    ones, zeros = (1.0,) * FEATURES, (0.0,) * FEATURES
    return Dataset("blobs", x[:rows], y[:rows], x[rows:], y[rows:], names, zeros, ones)


class Small(nn.Module):
    """A network with everything that can go wrong: normalisation, dropout, a head of its own."""

    def __init__(self, normalised: bool) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Identity(), nn.Linear(FEATURES, 8), nn.Identity())
        self.norm = nn.BatchNorm1d(8) if normalised else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.drop(torch.relu(self.norm(self.inner(x)))))
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


def trained(algorithm: Algorithm, normalised: bool = True, *, finale: bool = True, **changes: Any) -> Result:
    """A run to its end, or to where its finale would begin."""
    chosen = experiment(algorithm, **changes)
    done = iter(range(1, chosen.rounds + 1))
    stop = (lambda: False) if finale else (lambda: next(done) == chosen.rounds)
    try:
        return run(chosen, dataset=blobs(), model=network(normalised), stop=stop)
    except ConfigError:
        if not changes.get("momentum"):
            raise
    changes["momentum"] = 0.0  # some methods' papers exclude momentum
    return trained(algorithm, normalised, finale=finale, **changes)


@dataclass(frozen=True)
class Bench:
    """A federation after one round, whose hooks, or those of a part of its finale, can be called by hand."""

    result: Result
    algorithm: Algorithm

    @property
    def engine(self) -> Sequential:
        return Sequential(self.algorithm, self.result.federation)

    def context(self, client: int) -> Context:
        who = self.result.federation.client(client, 2, 0.1, 1)
        return self.engine.context(self.result.server, self.result.owns.get(client), who)


def benches(algorithm: Algorithm, normalised: bool = True, **changes: Any) -> list[Bench]:
    """One for the method, one for each part of its finale."""
    result = trained(algorithm, normalised, **changes)
    return [Bench(result, stage) for stage in (algorithm, *algorithm.finale())]


def states(result: Result) -> dict[str, Any]:
    return {"server": result.server, "owns": {str(k): own for k, own in result.owns.items()}}


# ---- the laws


def one_seed_gives_the_same_bytes(algorithm: Algorithm) -> None:
    first, second = (trained(algorithm, participation=0.6, dropout=0.2, momentum=0.5) for _ in range(2))
    need(tree.equal(states(first), states(second)), "two runs with one seed end in different states")
    for a, b in zip(first.history, second.history, strict=True):
        different = [key for key in a if key not in TIMINGS and a[key] != b.get(key)]
        need(not different, f"two runs with one seed record different {', '.join(different)}")


def another_seed_gives_another_result(algorithm: Algorithm) -> None:
    first, second = (trained(algorithm, seed=seed) for seed in (0, 1))
    need(not tree.equal(states(first), states(second)), "the seed changes nothing")


def order_of_clients_is_irrelevant(algorithm: Algorithm) -> None:
    turned = torch.tensor([3, 0, 4, 2, 1])
    for bench in benches(algorithm, rounds=1):
        task, server = bench.result.task, bench.result.server
        sent = bench.engine.train(server, bench.result.owns, [0, 1, 2, 3, 4], 2, 0.1, 2)
        moved: dict[str, Any] = {k: v[turned] for k, v in sent.cohort._asdict().items() if isinstance(v, torch.Tensor)}
        cohort = sent.cohort._replace(**moved)
        forward, _ = bench.algorithm.aggregate(task, server, sent.ups, sent.cohort)
        backward, _ = bench.algorithm.aggregate(task, server, tree.map(lambda leaf: leaf[turned], sent.ups), cohort)
        gap = max((float((a - b).abs().max()) for a, b in _pairs(forward, backward) if a.numel()), default=0.0)
        need(gap <= TOLERANCE, f"the server's state depends on the order of its clients (by {gap:.1e})")


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
        need(tree.equal(seen, work._asdict()), "step changes the work it is given")
        work = after
    seen = tree.map(torch.clone, work._asdict())
    algorithm.finish(task, ctx, work)
    algorithm.personal_model(task, ctx)
    need(tree.equal(seen, work._asdict()), "finish changes the work it is given")
    need(tree.equal(kept, _in_context(ctx)), "a client hook changes what came down or what the client keeps")
    sent = bench.engine.train(server, bench.result.owns, [0, 1, 2], 2, 0.1, 1)
    ups = tree.map(torch.clone, sent.ups)
    algorithm.aggregate(task, server, sent.ups, sent.cohort)
    need(tree.equal(ups, sent.ups), "aggregate changes the uploads")
    need(tree.equal(before, server), "a hook changes the server's state in place")


def client_hooks_read_no_values(algorithm: Algorithm) -> None:
    """What they compute must not wait for a number, nor depend on one: then it can be captured and stacked."""
    for bench in benches(algorithm, rounds=1):
        stage, task, ctx, engine = bench.algorithm, bench.result.task, bench.context(1), bench.engine
        batches = [kind for batch in engine.batches(1, 2, 1) for kind in (batch, _pad(batch, 3))]
        with _hidden_values():
            work = stage.begin(task, ctx)
            for batch in batches:
                work = stage.step(task, ctx, work, batch)
            stage.finish(task, ctx, work)
        answers = stage.answers_on(task)
        models = [stage.global_model(task, bench.result.server)] if GLOBAL in answers else []
        models += [stage.personal_model(task, ctx)] if PERSONAL in answers else []
        for model in models:
            with _hidden_values():
                stage.predict(task, model, batches[0].x, batches[0].live)


def state_survives_a_checkpoint(algorithm: Algorithm) -> None:
    result = trained(algorithm, rounds=2, participation=0.6)
    with tempfile.TemporaryDirectory() as path, closing(Folder(Path(path))) as folder:
        folder.create()
        folder.save(Checkpoint(2, result.server, dict(result.owns)), 2)
        read, _ = folder.newest()
    need(read is not None and read.round == 2, "the checkpoint is gone")
    if read is not None:
        same = tree.equal(read.server, result.server) and read.owns.keys() == result.owns.keys()
        same = same and all(tree.equal(read.owns[k], own) for k, own in result.owns.items())
        need(same, "what comes back from a checkpoint is not what went in")


def absent_clients_keep_their_state(algorithm: Algorithm) -> None:
    watched = trained(algorithm, rounds=4, participation=0.6, dropout=0.3)
    bench = Bench(watched, algorithm)
    before = {k: tree.map(torch.clone, own) for k, own in watched.owns.items()}
    sent = bench.engine.train(watched.server, watched.owns, [0, 2], 5, 0.1, 1)
    need(sent.owns.keys() == {0, 2}, f"training clients 0 and 2 gave states to {sorted(sent.owns)}")
    need(all(tree.equal(before[k], watched.owns[k]) for k in before), "training changes a state before it is committed")
    answered = {k for record in watched.history for k in record["cohort"]}
    need(set(watched.owns) == answered, "a client that never answered has a state")


def dtype_is_kept(algorithm: Algorithm) -> None:
    """Of models exactly; what a method adds to them may have more digits than the run's, but never fewer."""
    for name, dtype in (("float32", torch.float32), ("float64", torch.float64)):
        for bench in benches(algorithm, rounds=1, precision=name):
            sent = bench.engine.train(bench.result.server, bench.result.owns, [0, 1, 2, 3, 4], 2, 0.1, 1)
            trees = {**states(bench.result), "ups": sent.ups, "kept": {str(k): own for k, own in sent.owns.items()}}
            for path, leaf in tree.flatten(trees).items():
                allowed = (dtype,) if "/model/" in path else (dtype, torch.float64)
                kept = not leaf.is_floating_point() or leaf.dtype in allowed
                need(kept, f"{path} has become {leaf.dtype} in a {name} run")


def frozen_parameters_do_not_move(algorithm: Algorithm) -> None:
    """Asked of each stage: a finale may tune what the rounds before it leave alone."""
    result = trained(algorithm, finale=False, rounds=10, epochs=1, momentum=0.9, weight_decay=0.1, lr=0.05)
    task, federation, server, owns = result.task, result.federation, result.server, dict(result.owns)
    first = algorithm.init(task, federation.roster).model
    _unmoved(algorithm, "server", first, server.model)
    for k, own in owns.items():
        _unmoved(algorithm, f"client {k}", first, own.model)
    for number, stage in enumerate(algorithm.finale(), result.round + 1):
        engine, everyone = Sequential(stage, federation), list(range(federation.population))
        contexts = {k: engine.context(server, owns.get(k), federation.client(k, number, 0.05, 1)) for k in everyone}
        sent = engine.train(server, owns, everyone, number, 0.05, stage.local_epochs(1))
        after, _ = stage.aggregate(task, server, sent.ups, sent.cohort)
        _unmoved(stage, "server after the finale", server.model, after.model)
        for k, own in sent.owns.items():
            kept = tree.equal(own, contexts[k].own)  # what was there before this stage, not what it started from
            if not kept:
                _unmoved(stage, f"client {k} after the finale", stage.start(task, contexts[k]), own.model)
        server, owns = after, dict(sent.owns)


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
        need(gap <= TOLERANCE, f"rows that are not live change the result (by {gap:.1e})")


def mixed_labels_count(algorithm: Algorithm) -> None:
    """With mixup an example has two labels: if the part of the second is the whole, it counts as the only one."""
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
            f"labels that augment.mixup mixes in are not learnt (by {gap:.1e}): the loss must be "
            "cross_entropy(scores, batch) or made from batch.targets(classes), not from batch.y",
        )


def only_what_is_shared_travels(algorithm: Algorithm) -> None:
    for bench in benches(algorithm, rounds=1, participation=0.6):
        sent = bench.engine.train(bench.result.server, bench.result.owns, [0, 1], 2, 0.1, 1)
        for where, names in (("down", bench.context(0).down.model.params), ("up", sent.ups.model.params)):
            kept = [name for name in names if not bench.algorithm.shares(name)]
            need(not kept, f"{', '.join(kept)} is not shared but goes {where}")
        need(sent.cohort.labels is None, "the server sees its clients' labels")


def answers_are_those_declared(algorithm: Algorithm) -> None:
    result = trained(algorithm, rounds=2)
    rows = torch.from_numpy(blobs().x_test[:9])
    declared = result.algorithm.answers_on(result.task)
    models = ([result.model] if GLOBAL in declared else []) + ([result.personal(0)] if PERSONAL in declared else [])
    need(bool(models), "it declares no answer")
    for model in models:
        together = model(rows)
        need(together.shape == (9, CLASSES), f"scores of shape {tuple(together.shape)} for 9 rows")
        need(bool(torch.isfinite(together).all()), "scores are not finite")
        alone = torch.cat([model(row[None]) for row in rows])
        need(torch.allclose(together, alone), "the answer for a row depends on the other rows of its batch")
    for whose in (GLOBAL, PERSONAL):
        present = f"{whose}/accuracy" in result.history[-1]
        need(present == (whose in declared), f"{whose} accuracy is {'' if present else 'not '}measured")


def it_learns(algorithm: Algorithm) -> None:
    """On clients that are alike: how well a method copes with others is for a study to say, and no law. A median of
    parameters, for one, follows the classes that most clients have."""
    result = trained(algorithm, rounds=20, epochs=2, partition=Partitioning(kind="iid"))
    for whose, accuracy in _measured(result):
        need(accuracy > 0.7, f"{whose} accuracy {accuracy:.2f} after 20 rounds on three well-parted clouds")


LAWS: tuple[Callable[[Algorithm], None], ...] = (
    one_seed_gives_the_same_bytes,
    another_seed_gives_another_result,
    order_of_clients_is_irrelevant,
    hooks_leave_their_inputs_unchanged,
    client_hooks_read_no_values,
    state_survives_a_checkpoint,
    absent_clients_keep_their_state,
    dtype_is_kept,
    frozen_parameters_do_not_move,
    works_with_and_without_normalisation,
    padding_changes_nothing,
    mixed_labels_count,
    only_what_is_shared_travels,
    answers_are_those_declared,
    it_learns,
)


@contextmanager
def _hidden_values() -> Iterator[None]:
    """Whoever asks a tensor for its values, or makes a shape depend on them, breaks the law."""
    with _Operators(), _Conversions():  # type: ignore[no-untyped-call]
        yield


class _Operators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Operators whose result, or its shape, the host must wait for: ``item()``, ``bool()``, ``nonzero()``, …"""

    TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.TAGS & set(func.tags) and not (func is torch.ops.aten.index.Tensor and not _masks(args[1])):
            _read(str(func))
        return func(*args, **(kwargs or {}))


class _Conversions(TorchFunctionMode):
    """Those that copy a tensor to the host without an operator; and of operators, the names that users know."""

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
        need(not frozen or tree.equal(value, before.params[name]), f"{who}: frozen {name} has moved")


def _pairs(a: Any, b: Any) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = tree.flatten(a), tree.flatten(b)
    need(x.keys() == y.keys(), f"different trees: {sorted(x.keys() ^ y.keys())}")
    return ((x[path], y[path]) for path in x)


def _in_context(ctx: Context) -> dict[str, State]:
    return {"down": ctx.down, "own": ctx.own}


def _measured(result: Result) -> list[tuple[str, float]]:
    last = result.history[-1]
    return [(whose, last[f"{whose}/accuracy"]) for whose in (GLOBAL, PERSONAL) if f"{whose}/accuracy" in last]


def _pad(batch: Batch, extra: int) -> Batch:
    """The batch with rows that do not count, holding what would be noticed."""
    x = torch.cat([batch.x, torch.full((extra, *batch.x.shape[1:]), 1e3, dtype=batch.x.dtype)])
    y = torch.cat([batch.y, batch.y.new_zeros(extra)])
    live = torch.cat([batch.live, batch.live.new_zeros(extra)])
    return Batch(x, y, live, batch.key, full=False)

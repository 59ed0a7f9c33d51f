"""Clients side by side: their state is one stack of tensors, and one call makes a step of all of them.

The hooks run unchanged under ``torch.func.vmap``. On a GPU a step of the whole stack (gathering the rows, every hook,
writing the result back) is captured as a CUDA graph once and then replayed, so that Python and launches cost nothing;
on a CPU it is recorded (:mod:`fedrane.engines.recording`).

Clients are taken longest first, so those still at work are always the first of the stack; when half of them are done a
smaller graph over the first rows of the same buffers goes on. What does not differ from client to client, such as
the server's model, is held once. A method that cannot be stacked runs one client at a time, and the user is told why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from textwrap import shorten
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedrane import tree
from fedrane.algorithm import Algorithm, Done, Work
from fedrane.engines import Predicted, Trained
from fedrane.engines.recording import Recording, overwrite
from fedrane.engines.sequential import CHUNK, Sequential
from fedrane.federation import Federation, Pool, each_of
from fedrane.kernels.stacked_mode import stacked_mode
from fedrane.task import Batch, Client, Context, Model, State

MOST = {"cuda": 64, "cpu": 256}
"""Clients in a stack: more of them add little speed."""
SHARE = 0.5
"""The part of the free memory that a stack may take."""
LANES = {"cuda": 3, "cpu": 1}
"""Stacks at work at a time: on a GPU, while one waits, another computes."""
FIXED = 5.0
"""What a step of a stack costs whatever its clients, in steps of one client more: 3 to 5 on an H200."""
Plan = tuple[NDArray[Any], ...]
"""A client's rows in each of its steps, which of them are live, and the keys of its noise."""


class Cannot(Exception):  # noqa: N818 - a message, not a failure of the run
    """A hook that does not run on stacked clients, and why."""


class _Split(NamedTuple):
    """Trees of one shape, one a client: leaves that are the same tensor for all are held once."""

    leaves: list[Tensor]
    same: tuple[bool, ...]
    shape: Any
    clients: int

    @classmethod
    def of(cls, contexts: list[Context]) -> _Split:
        """What clients keep is never held once, though it is the same at first: buffers then fit every round."""
        trees = [{"down": c.down, "own": c.own} for c in contexts]
        try:
            columns = tree.columns(trees)
        except ValueError as error:
            raise Cannot("its hooks join and finish give a client trees of different shapes to keep") from error
        same = tuple(
            name.startswith(f"down{tree.SEPARATOR}") and all(leaf is column[0] for leaf in column)
            for name, column in columns.items()
        )
        try:
            leaves = [c[0] if one else torch.stack(c) for c, one in zip(columns.values(), same, strict=True)]
        except RuntimeError as error:
            raise Cannot("its hooks join and finish give clients tensors of different shapes to keep") from error
        who = _columns([c.client for c in contexts])
        shape = pytree.tree_structure({**trees[0], "client": who})
        return cls([*leaves, *who.values()], (*same, *(False for _ in who)), shape, len(contexts))

    @classmethod
    def of_models(cls, models: list[Model]) -> _Split:
        leaves = [torch.stack(column) for column in tree.columns(models).values()]
        return cls(leaves, (False,) * len(leaves), pytree.tree_structure(models[0]), len(models))

    @property
    def dims(self) -> list[int | None]:
        return [None if one else 0 for one in self.same]

    def first(self, n: int) -> list[Tensor]:
        return [leaf if one else leaf[:n] for leaf, one in zip(self.leaves, self.same, strict=True)]

    def kind(self) -> tuple[Any, ...]:
        """Two splits of one kind fit the same buffers."""
        sizes = (
            (leaf.shape if one else leaf.shape[1:], leaf.dtype)
            for leaf, one in zip(self.leaves, self.same, strict=True)
        )
        return (self.same, str(self.shape), *sizes)


class _Table(NamedTuple):
    """Batches: for each step of each client the rows, which of them live, and the key of its noise."""

    rows: Tensor
    live: Tensor
    keys: Tensor

    @classmethod
    def empty(cls, steps: int, width: int, device: torch.device) -> _Table:
        return cls(
            torch.zeros(steps, width, dtype=torch.int64, device=device),
            torch.zeros(steps, width, dtype=torch.bool, device=device),
            torch.zeros(steps, dtype=torch.int64, device=device),
        )


class _Lane:
    """One stack of clients with its buffers and graphs; on a GPU it has a stream of its own."""

    def __init__(self, algorithm: Algorithm, federation: Federation, slots: int) -> None:
        self.algorithm, self.federation, self.slots = algorithm, federation, slots
        self.device = federation.task.device
        self.cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if self.cuda else None  # type: ignore[no-untyped-call]
        self.pool = torch.cuda.graph_pool_handle() if self.cuda else None
        self.sizes = sorted({-(-slots * part // 8) for part in (1, 2, 3, 4, 6, 8)} | {1})
        self.graphs: dict[int, torch.cuda.CUDAGraph | Recording] = {}
        self.kind: tuple[Any, ...] | None = None
        self.ctx: _Split
        self.work: list[Tensor] = []
        self.work_shape: Any = None
        self.table = _Table.empty(0, 0, self.device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=self.device)

    @contextmanager
    def busy(self) -> Iterator[None]:
        with torch.cuda.stream(self.stream) if self.cuda else nullcontext():
            yield

    def make_room(self, steps: int, width: int) -> None:
        """For so many steps of all clients together."""
        if steps >= len(self.table.rows):  # a longer table has another address, so the graphs go with the old one
            self.graphs = {}
            # Room for somewhat longer cohorts, and at the end a row that is dead: there a finished client stands.
            self.table = _Table.empty(steps + steps // 4 + 1, width, self.device)

    def load(self, contexts: list[Context], plans: list[Plan]) -> None:
        """Put these clients, longest first, at the start of their round."""
        ctx = _Split.of(contexts)
        with could("begin"):
            work = self._begin(ctx)
        kind = ctx.kind() + tuple((leaf.shape[1:], leaf.dtype) for leaf in work)
        if self.kind != kind:
            self.kind, self.graphs = kind, {}
            self.ctx = ctx._replace(
                leaves=[
                    torch.empty_like(leaf) if one else _last(leaf.new_empty(self.slots, *leaf.shape[1:]))
                    for leaf, one in zip(ctx.leaves, ctx.same, strict=True)
                ]
            )
            self.work = [_last(leaf.new_zeros(self.slots, *leaf.shape[1:])) for leaf in work]
        _copy(self.ctx.first(len(plans)), ctx.leaves)
        _copy(self.first(len(plans)), work)
        self._lay_table(plans)

    def _lay_table(self, plans: list[Plan]) -> None:
        columns = [np.concatenate(column) for column in zip(*plans, strict=True)]
        self.table.live[-1] = False
        for to, values in zip(self.table, columns, strict=True):
            to[: len(values)].copy_(torch.from_numpy(values))
        self.position.fill_(len(self.table.rows) - 1)
        starts = np.cumsum([0, *(len(plan[0]) for plan in plans)])[:-1]
        self.position[: len(plans)].copy_(torch.from_numpy(starts))

    def go(self, steps: list[int]) -> Iterator[float]:
        """Step by step to the end of the round, each with what it costs; then :meth:`result` can be asked for."""
        self.finished = [torch.empty_like(leaf) for leaf in self.first(len(steps))]
        before = 0
        for until in sorted(set(steps)):
            now, left = sum(s >= until for s in steps), sum(s > until for s in steps)
            if until > before:
                step = self._stepper(now)
            for _ in range(until - before):
                with self.busy(), could("step"):
                    step()
                yield FIXED + now
            with self.busy():
                _copy([f[left:now] for f in self.finished], [w[left:now] for w in self.work])
            before = until

    def first(self, n: int) -> list[Tensor]:
        return [leaf[:n] for leaf in self.work]

    def _stepper(self, active: int) -> Callable[[], None]:
        """What makes one step of the first clients of the stack."""
        size = next(s for s in self.sizes if s >= active)
        if size not in self.graphs:
            with could("step"):
                self.graphs[size] = self._capture(size)
        return self.graphs[size].replay

    def _capture(self, size: int) -> torch.cuda.CUDAGraph | Recording:
        if not self.cuda:
            return Recording(lambda: self.step(size), [*self.work, self.position])
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with self.busy():
            self.after_step(size)  # compiles what is compiled on first use; nothing is written
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            self.step(size)
        return graph

    def step(self, n: int) -> None:
        """One step of the first ``n``, written back to the buffers."""
        overwrite(self.first(n), self.after_step(n))
        # A client that has finished stays at the last row, which is dead.
        self.position[:n] = (self.position[:n] + 1).clamp(max=len(self.table.rows) - 1)

    def after_step(self, n: int) -> list[Tensor]:
        rows, live, keys = (column[self.position[:n]] for column in self.table)
        batches = self.federation.training_batch(rows, live, keys, self.algorithm.trains_model)
        dims = pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batches)

        def step(ctx: list[Tensor], work: list[Tensor], batch: Batch) -> list[Tensor]:
            now = pytree.tree_unflatten(work, self.work_shape)
            after = self.algorithm.step(self.federation.task, self._context(ctx, self.ctx.shape), now, batch)
            return self._leaves_like_before(after)

        with stacked_mode():
            found: list[Tensor] = vmap(step, in_dims=(self.ctx.dims, 0, dims))(
                self.ctx.first(n), self.first(n), batches
            )
        return found

    def _leaves_like_before(self, after: Work) -> list[Tensor]:
        """In the order in which ``begin`` gave them; what has no place there is a reason not to be stacked."""
        leaves = pytree.tree_leaves(after)
        if pytree.tree_structure(after) != self.work_shape:
            named = tree.flatten(after)
            names = tree.flatten(pytree.tree_unflatten(self.work, self.work_shape))
            if named.keys() != names.keys():
                raise ValueError("it gives other entries than begin")
            leaves = [named[name] for name in names]
        for leaf, buffer in zip(leaves, self.work, strict=True):
            if leaf.shape != buffer.shape[1:] or leaf.is_floating_point() != buffer.is_floating_point():
                before = f"{tuple(buffer.shape[1:])} of {buffer.dtype}"
                raise ValueError(f"it gives {tuple(leaf.shape)} of {leaf.dtype} where begin gave {before}")
        return leaves

    def result(self, n: int) -> Done:
        shapes: list[Any] = []

        def finish(ctx: list[Tensor], work: list[Tensor]) -> list[Tensor]:
            now = pytree.tree_unflatten(work, self.work_shape)
            done = self.algorithm.finish(self.federation.task, self._context(ctx, self.ctx.shape), now)
            shapes.append(pytree.tree_structure(done))
            return pytree.tree_leaves(done)

        with could("finish"):
            found = vmap(finish, in_dims=(self.ctx.dims, 0))(self.ctx.first(n), self.finished)
        self.finished = []
        done: Done = pytree.tree_unflatten([leaf.contiguous() for leaf in found], shapes[0])
        return done

    def _begin(self, ctx: _Split) -> list[Tensor]:
        def begin(leaves: list[Tensor], one: Tensor) -> list[Tensor]:
            work = self.algorithm.begin(self.federation.task, self._context(leaves, ctx.shape))
            self.work_shape = pytree.tree_structure(work)
            return pytree.tree_leaves(work)

        found = vmap(begin, in_dims=(ctx.dims, 0))(ctx.leaves, torch.zeros(ctx.clients, device=self.device))
        return [_last(leaf) for leaf in found]

    def _context(self, leaves: list[Tensor], shape: Any) -> Context:
        found = pytree.tree_unflatten(leaves, shape)
        client = Client(**found["client"], population=self.federation.population)
        return Context(found["down"], found["own"], client)


class Stacked:
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        self.algorithm, self.federation = algorithm, federation
        self.device = federation.task.device
        self.most = MOST.get(self.device.type, 64)
        self.lanes = LANES.get(self.device.type, 1)
        self.one_by_one = Sequential(algorithm, federation)
        self.alone = False
        self._slots = 0
        self._room = self.most
        self._lanes: dict[int, _Lane] = {}
        self._said: list[str] = []
        self._plans: dict[tuple[int, int], dict[int, Plan]] = {}
        self._questions: dict[tuple[Any, ...], _Questions] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    # ---- training

    def train(
        self, server: State, owns: Mapping[int, State], clients: list[int], round: int, rate: float, epochs: int
    ) -> Trained:
        if not self.alone:
            try:
                return self._train(server, owns, sorted(clients), round, rate, epochs)
            except Cannot as reason:
                self.alone, self._lanes = True, {}
                name = type(self.algorithm).__name__
                warnings.warn(f"{name} runs one client at a time, which is slower: {reason}", stacklevel=2)
        return self.one_by_one.train(server, owns, clients, round, rate, epochs)

    def _train(
        self, server: State, owns: Mapping[int, State], clients: list[int], round: int, rate: float, epochs: int
    ) -> Trained:
        federation = self.federation
        cohort = federation.cohort(clients, round, rate, epochs)
        place, who = {k: i for i, k in enumerate(clients)}, each_of(cohort)

        def contexts(clients: list[int]) -> list[Context]:
            with could("send or join"):
                return [self.one_by_one.context(server, owns.get(k), who[place[k]]) for k in clients]

        plans = self._plan(clients, round, epochs)
        order = sorted(clients, key=lambda k: (-len(plans[k][0]), k))
        self._slots = self._slots or self._choose_slots(lambda: contexts(order[:2]), plans[order[0]], len(clients))
        waves = [order[begin : begin + self._slots] for begin in range(0, len(order), self._slots)]
        self._make_room([[plans[k] for k in wave] for wave in waves])
        parts, down = [], 0
        for wave in waves:
            there = contexts(wave)  # not of all clients at once: some methods send much to each
            parts += self._wave(there, [plans[k] for k in wave])
            firsts = [k not in owns for k in wave]  # what could be stacked is of one size, but for who is new
            for first in set(firsts):
                arriving = self.one_by_one.arriving(there[firsts.index(first)].down, first)
                down += firsts.count(first) * tree.nbytes(arriving)
        if len(clients) == federation.population:  # while the device is still at work
            self._plans = {(round + 1, epochs): self._plan(clients, round + 1, epochs)}
        done = _in_order(parts, [place[k] for k in order])
        said, self._said = tuple(self._said), []
        return Trained(
            ups=done.up,
            cohort=cohort._replace(labels=None),
            owns=dict(zip(clients, tree.unstack(done.own, len(clients)), strict=True)),
            metrics={name: values.tolist() for name, values in done.metrics.items()},
            rows=epochs * sum(len(federation.split.train[k]) for k in clients),
            bytes_down=down,
            bytes_up=tree.nbytes(done.up),
            say=said,
        )

    def _make_room(self, waves: list[list[Plan]]) -> None:
        """Lanes that have room for every wave of the round: one that grew would capture all it has anew."""
        most: dict[int, tuple[int, int]] = {}
        for plans in waves:
            for number, piece in enumerate(self._pieces(plans)):
                clients, steps = most.get(number, (0, 0))
                most[number] = max(clients, len(plans[piece])), max(steps, sum(len(plan[0]) for plan in plans[piece]))
        for number, (clients, steps) in most.items():
            lane = self._lanes.get(number)
            if lane is None or lane.slots < clients:
                slots = clients if self.lanes > 1 else self._slots
                lane = self._lanes[number] = _Lane(self.algorithm, self.federation, slots)
            lane.make_room(steps, waves[0][0][0].shape[1])

    def _pieces(self, plans: list[Plan]) -> list[slice]:
        return in_lanes([len(plan[0]) for plan in plans], self.lanes)

    def _wave(self, contexts: list[Context], plans: list[Plan]) -> list[Done]:
        """Train these clients, longest first: the longest few beside the others, lest they end alone."""
        steps, pieces = [len(plan[0]) for plan in plans], self._pieces(plans)
        lanes, runs = [], []
        for number, piece in enumerate(pieces):
            lane = self._lanes[number]
            if lane.stream is not None:
                lane.stream.wait_stream(torch.cuda.current_stream())
            with lane.busy():
                lane.load(contexts[piece], plans[piece])
            lanes.append(lane)
            runs.append(lane.go(steps[piece]))
        _together(runs)
        done = []
        for lane, piece in zip(lanes, pieces, strict=True):
            if lane.stream is not None:
                torch.cuda.current_stream().wait_stream(lane.stream)
            done.append(lane.result(len(steps[piece])))
        return done

    def _plan(self, clients: list[int], round: int, epochs: int) -> dict[int, Plan]:
        known = self._plans.pop((round, epochs), {})
        if known.keys() == set(clients):
            return known
        train, batches = self.federation.split.train, self.federation.batches(round, clients, epochs)
        return {k: (train[k][rows], live, keys) for k, (rows, live, keys) in batches.items()}

    def _choose_slots(self, contexts: Callable[[], list[Context]], plan: Plan, clients: int) -> int:
        """As many clients in a stack as memory allows; said."""
        if self.device.type != "cuda":
            return min(clients, self.most)
        need = self._weigh(contexts, plan)
        reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        self._room = max(1, min(self.most, int(SHARE * (free + reserved) / max(need, 1))))
        slots = min(clients, self._room)
        gib = 2**30
        self._said.append(
            f"{slots} clients side by side: one takes {need / gib:.2f} of {(free + reserved) / gib:.0f} GiB free "
            f"({total / gib:.0f} in all)"
        )
        return slots

    def _weigh(self, contexts: Callable[[], list[Context]], plan: Plan) -> int:
        """The memory that one client of a stack takes, tried with two."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        two = contexts()
        lane = _Lane(self.algorithm, self.federation, len(two))
        lane.make_room(len(two) * len(plan[0]), plan[0].shape[1])
        lane.load(two, [plan] * len(two))
        with could("step"):
            lane.after_step(len(two))
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) // len(two)

    # ---- answers

    def personal(self, server: State, own: State | None, client: int, round: int) -> Model:
        return self.one_by_one.personal(server, own, client, round)

    def predict(self, model: Model, pool: Pool, rows: NDArray[np.int64]) -> Predicted:
        return self.predict_each([model], pool, (rows,))[0]

    @torch.no_grad()
    def predict_each(self, models: list[Model], pool: Pool, rows: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        """Stacked as far as memory was found to allow for training, in which a client takes more; not by how many were
        trained, which is another number in a run that is resumed."""
        if self.alone:
            return self.one_by_one.predict_each(models, pool, rows)
        found = list[Predicted]()
        try:
            for i in range(0, len(models), self._room):
                found += self._predict(models[i : i + self._room], pool, rows[i : i + self._room])
        except Cannot as reason:
            warnings.warn(f"{type(self.algorithm).__name__} answers for one client at a time: {reason}", stacklevel=2)
            self.alone = True
            return self.one_by_one.predict_each(models, pool, rows)
        return found

    def _predict(self, models: list[Model], pool: Pool, rows: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        chunk = self.federation.batch if self.algorithm.depends_on_batch(self.federation.task) else CHUNK
        longest = max(len(r) for r in rows)
        if not longest:
            return [Predicted(np.zeros(0, np.int64), np.zeros(0)) for _ in rows]
        width = min(chunk, longest)
        index = np.zeros((-(-longest // width), len(rows), width), dtype=np.int64)
        live = np.zeros(index.shape, dtype=np.bool_)
        for k, r in enumerate(rows):
            for number in range(-(-len(r) // width)):
                piece = r[number * width : (number + 1) * width]
                index[number, k, : len(piece)], live[number, k, : len(piece)] = piece, True
        with could("personal_model"):
            split = _Split.of_models(models)
        with could("predict"):
            asked = self._asked(split, pool, width)
            labels, losses = asked.all(split.leaves, index, live)
        # A client's rows fill its chunks one after the other, so the live ones are the first.
        return [Predicted(labels[k, : len(r)], losses[k, : len(r)]) for k, r in enumerate(rows)]

    def _asked(self, split: _Split, pool: Pool, width: int) -> _Questions:
        kind = (id(pool), split.clients, width, split.kind())
        if kind not in self._questions:
            self._questions[kind] = _Questions(self.algorithm, self.federation, pool, split, width, self._pool)
        return self._questions[kind]


class _Questions:
    """A stack of models asked about so many rows each; on a GPU captured once, for all rounds."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, rows: Pool, split: _Split, width: int, pool: Any
    ) -> None:
        """``pool`` is the memory that graphs of answers, of which one runs at a time, have in common."""
        self.algorithm, self.federation, self.rows, self.split, self.pool = algorithm, federation, rows, split, pool
        self.leaves = [_last(torch.empty_like(leaf)) for leaf in split.leaves]
        device = federation.task.device
        self.index = torch.zeros(split.clients, width, dtype=torch.int64, device=device)
        self.live = torch.zeros(split.clients, width, dtype=torch.bool, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.found: tuple[Tensor, Tensor]

    def all(
        self, leaves: list[Tensor], index: NDArray[np.int64], live: NDArray[np.bool_]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Labels and losses (clients, rows) of all chunks (number, clients, width)."""
        _copy(self.leaves, leaves)
        every, alive = (torch.from_numpy(v).to(self.index.device) for v in (index, live))
        parts = []
        for rows, lives in zip(every, alive, strict=True):
            self.index.copy_(rows)
            self.live.copy_(lives)
            parts.append(tuple(part.clone() for part in self._answer()))
        labels, losses = (torch.cat(part, 1) for part in zip(*parts, strict=True))
        return labels.cpu().numpy(), losses.double().cpu().numpy()

    def _answer(self) -> tuple[Tensor, Tensor]:
        if self.index.device.type != "cuda":
            return self._eager()
        if self.graph is None:
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._eager()  # compiles what is compiled on first use
            torch.cuda.synchronize()
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, pool=self.pool):
                self.found = self._eager()
        self.graph.replay()
        return self.found

    def _eager(self) -> tuple[Tensor, Tensor]:
        def answer(leaves: list[Tensor], x: Tensor, alive: Tensor) -> Tensor:
            model = pytree.tree_unflatten(leaves, self.split.shape)
            return self.algorithm.predict(self.federation.task, model, x, alive)

        x, y = self.rows.take(self.index)
        with stacked_mode():
            scores = vmap(answer, in_dims=(self.split.dims, 0, 0))(self.leaves, x, self.live)
        return scores.argmax(-1), torch.nn.functional.cross_entropy(scores.movedim(-1, 1), y, reduction="none")


@contextmanager
def could(hook: str) -> Iterator[None]:
    """What a hook raises when it is stacked or captured, as a reason not to; a mistake shows again without."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
        raise Cannot(f"its hook {hook} cannot be stacked ({reason})") from error


def _columns(clients: list[Client]) -> dict[str, Tensor]:
    names = [name for name in Client._fields if name != "population"]
    return {name: torch.stack([getattr(client, name) for client in clients]) for name in names}


def in_lanes(steps: list[int], most: int) -> list[slice]:
    """Clients, longest first, in at most so many lanes side by side, such that all have ended soonest."""
    before = [0, *accumulate(steps)]

    @cache
    def best(begin: int, lanes: int) -> tuple[float, tuple[int, ...]]:
        def cost(end: int) -> float:
            return FIXED * steps[begin] + before[end] - before[begin]

        options: list[tuple[float, tuple[int, ...]]] = [(cost(len(steps)), (len(steps),))]
        if lanes > 1:
            for cut in range(begin + 1, len(steps)):
                rest, cuts = best(cut, lanes - 1)
                options.append((max(cost(cut), rest), (cut, *cuts)))
        return min(options)

    return [slice(*ends) for ends in pairwise((0, *best(0, most)[1]))]


def _together(runs: list[Iterator[float]]) -> None:
    """Go on with whichever run is behind, so that the device always has both to do."""
    spent = dict.fromkeys(range(len(runs)), 0.0)
    while spent:
        behind = min(spent, key=lambda number: spent[number])
        cost = next(runs[behind], None)
        if cost is None:
            del spent[behind]
        else:
            spent[behind] += cost


def _copy(to: list[Tensor], values: list[Tensor]) -> None:
    if to:
        torch._foreach_copy_(to, values)


def _last(stack: Tensor) -> Tensor:
    """Stacked convolution weights with their channels last in memory, as the products take them."""
    if stack.dim() != 5:
        return stack
    return stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _in_order(parts: list[Done], places: list[int]) -> Done:
    """The waves' results as one, in the order of client numbers."""
    whole = parts[0] if len(parts) == 1 else tree.map(lambda *rows: torch.cat(rows), *parts)
    if places == sorted(places):
        return whole
    back = torch.tensor(np.argsort(places)).to(tree.leaves(whole)[0].device)
    return tree.map(lambda rows: rows[back], whole)

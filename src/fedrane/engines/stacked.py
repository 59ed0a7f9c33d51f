"""Clients side by side: their state is one stack of tensors, and one call makes a step of all of them.

The hooks run unchanged under ``torch.func.vmap``. On a GPU a step of the whole stack (gathering the rows, every hook,
writing the result back) is captured as a CUDA graph once and then replayed, so that Python and launches cost nothing.

Clients are taken longest first, so those still at work are always the first of the stack; when half of them are done a
smaller graph over the first rows of the same buffers goes on. What does not differ from client to client, such as
the server's model, is held once. A method that cannot be stacked runs one client at a time, and the user is told why.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import vmap
from torch.utils import _pytree as pytree

from fedrane import tree
from fedrane.algorithm import Algorithm, Done
from fedrane.engines import Predicted, Trained
from fedrane.engines.sequential import CHUNK, Sequential
from fedrane.federation import Federation, Pool, one_of
from fedrane.models.stacked import AsProducts
from fedrane.task import Batch, Client, Context, Model, State

MOST = 64
"""Clients in a stack: more of them add little speed."""
SHARE = 0.5
"""The part of the free memory that a stack may take."""


class Cannot(Exception):  # noqa: N818 - a message, not a failure of the run
    """A hook that does not run on stacked clients, and why."""


class _Split(NamedTuple):
    """Trees of one shape, one a client: leaves that are the same tensor for all are held once."""

    leaves: list[Tensor]
    same: tuple[bool, ...]
    shape: Any

    @classmethod
    def of(cls, contexts: list[Context]) -> _Split:
        """What clients keep is never held once, though it is the same at first: buffers then fit every round."""
        trees = [(c.down, (c.own, _columns(c.client))) for c in contexts]
        if len({str(pytree.tree_structure(t)) for t in trees}) > 1:
            raise Cannot("its hooks join and finish give a client trees of different shapes to keep")
        sent, columns = len(pytree.tree_leaves(trees[0][0])), list(zip(*map(pytree.tree_leaves, trees), strict=True))
        same = tuple(i < sent and all(leaf is c[0] for leaf in c) for i, c in enumerate(columns))
        leaves = [c[0] if one else torch.stack(c) for c, one in zip(columns, same, strict=True)]
        return cls(leaves, same, pytree.tree_structure(trees[0]))

    @classmethod
    def of_models(cls, models: list[Model]) -> _Split:
        columns = list(zip(*(pytree.tree_leaves(m) for m in models), strict=True))
        leaves = [torch.stack(c) for c in columns]
        return cls(leaves, (False,) * len(leaves), pytree.tree_structure(models[0]))

    @property
    def dims(self) -> list[int | None]:
        return [None if one else 0 for one in self.same]

    def first(self, n: int) -> list[Tensor]:
        return [leaf if one else leaf[:n] for leaf, one in zip(self.leaves, self.same, strict=True)]

    def kind(self) -> tuple[Any, ...]:
        """Two splits of one kind fit the same buffers."""
        return (self.same, self.shape, *((leaf.shape, leaf.dtype) for leaf in self.leaves))


class _Table(NamedTuple):
    """The batches of a wave: for each step of each client the rows, which of them live, and the key of its noise."""

    rows: Tensor
    live: Tensor
    keys: Tensor


class Stacked:
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        self.algorithm, self.federation = algorithm, federation
        self.device = federation.task.device
        self.one_by_one = Sequential(algorithm, federation)
        self.alone = False
        self._slots: int | None = None
        self._kind: tuple[Any, ...] | None = None
        self._said: list[str] = []
        self._plans: dict[tuple[int, int, int], tuple[NDArray[Any], ...]] = {}

    # ---- training

    def train(
        self, server: State, owns: Mapping[int, State], clients: list[int], round: int, rate: float, epochs: int
    ) -> Trained:
        if not self.alone:
            try:
                return self._train(server, owns, sorted(clients), round, rate, epochs)
            except Cannot as reason:
                self.alone = True
                self._forget()
                warnings.warn(
                    f"{type(self.algorithm).__name__} runs one client at a time: {reason}. It is slower; "
                    "see docs/performance.md",
                    stacklevel=2,
                )
        return self.one_by_one.train(server, owns, clients, round, rate, epochs)

    def _train(
        self, server: State, owns: Mapping[int, State], clients: list[int], round: int, rate: float, epochs: int
    ) -> Trained:
        federation = self.federation
        steps = {k: epochs * -(-len(federation.split.train[k]) // federation.batch) for k in clients}
        order = sorted(clients, key=lambda k: (-steps[k], k))
        cohort = federation.cohort(clients, round, rate, epochs)
        place = {k: i for i, k in enumerate(clients)}
        contexts = {}
        for k in clients:
            with could("send or join"):
                contexts[k] = self.one_by_one.context(server, owns.get(k), one_of(cohort, place[k]))
        slots = self._slots or self._choose_slots([contexts[k] for k in order[:2]], len(clients))
        waves, parts = [order[i : i + slots] for i in range(0, len(order), slots)], []
        for wave in waves:
            parts.append(self._wave([contexts[k] for k in wave], wave, [steps[k] for k in wave], round, epochs))
        done = _in_order(parts, [place[k] for k in order])
        if len(clients) == federation.population:
            self._look_ahead(clients, round + 1, epochs)  # while the device is still at work
        first = [k for k in clients if k not in owns]
        metrics = {name: values.tolist() for name, values in done.metrics.items()}
        return Trained(
            ups=done.up,
            cohort=cohort._replace(labels=None),
            owns={k: tree.row(done.own, place[k]) for k in clients},
            metrics=metrics,
            rows=epochs * sum(len(federation.split.train[k]) for k in clients),
            bytes_down=sum(self.one_by_one.arriving(contexts[k].down, first=k in first) for k in clients),
            bytes_up=tree.nbytes(done.up),
            say=tuple(self._drain()),
        )

    def _wave(self, contexts: list[Context], clients: list[int], steps: list[int], round: int, epochs: int) -> Done:
        """Train these clients, longest first."""
        ctx = _Split.of(contexts)
        with could("begin"):
            work = self._stacked(self._begin, ctx, len(clients))
        if self._kind != ctx.kind() + _kind_of(work):
            self._make_buffers(ctx, work)
        n = len(clients)
        _copy(self._ctx.first(n), ctx.first(n))
        _copy(_rows(self._work, n), work)
        self._lay_table(clients, round, epochs)
        finished = [torch.empty_like(leaf) for leaf in work]
        before, active = 0, n
        for until in sorted(set(steps)):
            now = sum(s > before for s in steps)
            self._advance(now, until - before)
            left = sum(s > until for s in steps)
            _copy([f[left:now] for f in finished], [w[left:now] for w in _rows(self._work, active)])
            before = until
        with could("finish"):
            return self._finished(ctx, finished, n)

    def _advance(self, active: int, steps: int) -> None:
        """So many steps of the first clients of the stack."""
        if self.device.type != "cuda":
            with could("step"):
                for _ in range(steps):
                    self._step(active)
            return
        size = next(s for s in self._sizes if s >= active)
        if size not in self._graphs:
            self._graphs[size] = self._capture(size)
        for _ in range(steps):
            self._graphs[size].replay()

    def _step(self, n: int) -> None:
        """One step of the first ``n``, written back to the buffers."""
        new = self._next(n)
        _copy(_rows(self._work, n), new)
        # A client that has finished stays at the last row, which is dead.
        self._position[:n] = (self._position[:n] + 1).clamp(max=len(self._table.rows) - 1)

    def _next(self, n: int) -> list[Tensor]:
        position = self._position[:n]
        rows, live, keys = (column[position] for column in self._table)
        x, y = self.federation.train.take(rows)
        shape = self._work_shape

        def step(ctx: list[Tensor], work: list[Tensor], batch: Batch) -> list[Tensor]:
            now = pytree.tree_unflatten(work, shape)
            after = self.algorithm.step(self.federation.task, self._context(ctx), now, batch)
            return pytree.tree_leaves(after)

        batch = Batch(x, y, live, keys)[:4]
        with AsProducts():
            found: list[Tensor] = vmap(
                lambda ctx, work, *parts: step(ctx, work, Batch(*parts)), in_dims=(self._ctx.dims, 0, 0, 0, 0, 0)
            )(self._ctx.first(n), _rows(self._work, n), *batch)
        return found

    def _capture(self, size: int) -> torch.cuda.CUDAGraph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with could("step"):
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._next(size)  # compiles what is compiled on first use; nothing is written
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(size)
        return graph

    # ---- what is kept from round to round

    def _make_buffers(self, ctx: _Split, work: list[Tensor]) -> None:
        self._forget()
        slots = self._slots or 1
        self._kind = ctx.kind() + _kind_of(work)
        self._ctx = ctx._replace(
            leaves=[
                torch.empty_like(leaf) if one else _last(leaf.new_empty(slots, *leaf.shape[1:]))
                for leaf, one in zip(ctx.leaves, ctx.same, strict=True)
            ]
        )
        self._work = [_last(leaf.new_zeros(slots, *leaf.shape[1:])) for leaf in work]
        lengths = sorted((len(rows) for rows in self.federation.split.train), reverse=True)[:slots]
        self._per_epoch = sum(-(-n // self.federation.batch) for n in lengths)
        self._room = 0
        self._position = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._sizes = sorted({-(-slots * part // 8) for part in (1, 2, 3, 4, 6, 8)} | {1})
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    def _forget(self) -> None:
        self._kind = None
        self._graphs = {}
        self._work = []

    def _lay_table(self, clients: list[int], round: int, epochs: int) -> None:
        plans = [self._plan(k, round, epochs) for k in clients]
        rows, live, keys = (np.concatenate(column) for column in zip(*plans, strict=True))
        if len(rows) > self._room:  # a longer table has another address, so the graphs go with the old one
            self._graphs = {}
            self._room = max(len(rows), epochs * self._per_epoch)
            width, device = rows.shape[1], self.device
            # One row more, all dead: where a client stands that has finished.
            self._table = _Table(
                torch.zeros(self._room + 1, width, dtype=torch.int64, device=device),
                torch.zeros(self._room + 1, width, dtype=torch.bool, device=device),
                torch.zeros(self._room + 1, dtype=torch.int64, device=device),
            )
        for to, values in zip(self._table, (rows, live, keys), strict=True):
            to[: len(values)].copy_(torch.from_numpy(values))
        starts = np.cumsum([0, *(len(p[0]) for p in plans)])[:-1]
        self._position.fill_(0)
        self._position[: len(clients)].copy_(torch.from_numpy(starts))

    def _plan(self, client: int, round: int, epochs: int) -> tuple[NDArray[Any], ...]:
        known = self._plans.pop((client, round, epochs), None)
        if known is not None:
            return known
        rows, live, keys = self.federation.batches(round, client, epochs)
        return self.federation.split.train[client][rows], live, keys

    def _look_ahead(self, clients: list[int], round: int, epochs: int) -> None:
        self._plans = {(k, round, epochs): self._plan(k, round, epochs) for k in clients}

    def _choose_slots(self, contexts: list[Context], clients: int) -> int:
        """As many clients in a stack as memory allows; said."""
        self._slots = min(clients, MOST)
        if self.device.type != "cuda":
            return self._slots
        total = torch.cuda.get_device_properties(self.device).total_memory
        need = self._weigh(contexts)
        free = torch.cuda.mem_get_info(self.device)[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        self._slots = max(1, min(self._slots, int(SHARE * free / max(need, 1))))
        gib = 2**30
        self._said.append(
            f"{self._slots} clients side by side: one takes {need / gib:.2f} of {free / gib:.0f} GiB free "
            f"({total / gib:.0f} in all)"
        )
        return self._slots

    def _weigh(self, contexts: list[Context]) -> int:
        """The memory that one client of a stack takes, tried with two."""
        torch.cuda.synchronize()
        ctx = _Split.of(contexts)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        n = len(contexts)
        with could("begin"):
            work = self._stacked(self._begin, ctx, n)
        slots, self._slots = self._slots, n
        self._make_buffers(ctx, work)
        _copy(self._ctx.leaves, ctx.leaves)
        _copy(self._work, work)
        width = self.federation.batch
        self._table = _Table(
            torch.zeros(1, width, dtype=torch.int64, device=self.device),
            torch.ones(1, width, dtype=torch.bool, device=self.device),
            torch.zeros(1, dtype=torch.int64, device=self.device),
        )
        with could("step"):
            self._next(n)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated(self.device) - before
        self._forget()
        self._slots = slots
        return peak // n

    def _drain(self) -> list[str]:
        said, self._said = self._said, []
        return said

    # ---- the hooks, stacked

    def _context(self, leaves: list[Tensor]) -> Context:
        down, (own, columns) = pytree.tree_unflatten(leaves, self._ctx_shape)
        return Context(down, own, Client(**columns, population=self.federation.population))

    def _stacked(self, hook: Callable[..., Any], ctx: _Split, n: int) -> list[Tensor]:
        self._ctx_shape = ctx.shape
        found: list[Tensor] = vmap(hook, in_dims=(ctx.dims, 0))(ctx.leaves, torch.zeros(n, device=self.device))
        return [_last(leaf) for leaf in found]

    def _begin(self, leaves: list[Tensor], one: Tensor) -> list[Tensor]:
        work = self.algorithm.begin(self.federation.task, self._context(leaves))
        self._work_shape = pytree.tree_structure(work)
        return pytree.tree_leaves(work)

    def _finished(self, ctx: _Split, work: list[Tensor], n: int) -> Done:
        shapes: list[Any] = []

        def finish(leaves: list[Tensor], now: list[Tensor]) -> list[Tensor]:
            done = self.algorithm.finish(
                self.federation.task, self._context(leaves), pytree.tree_unflatten(now, self._work_shape)
            )
            shapes.append(pytree.tree_structure(done))
            return pytree.tree_leaves(done)

        found = vmap(finish, in_dims=(ctx.dims, 0))(ctx.leaves, work)
        done: Done = pytree.tree_unflatten([leaf.contiguous() for leaf in found], shapes[0])
        return done

    # ---- answers

    def personal(self, server: State, own: State | None, client: int, round: int) -> Model:
        return self.one_by_one.personal(server, own, client, round)

    def predict(self, model: Model, pool: Pool, rows: NDArray[np.int64]) -> Predicted:
        return self.one_by_one.predict(model, pool, rows)

    @torch.no_grad()
    def predict_each(self, models: list[Model], pool: Pool, rows: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        """Stacked as far as memory was found to allow for training, in which a client takes more."""
        if self.alone:
            return self.one_by_one.predict_each(models, pool, rows)
        slots, found = self._slots or MOST, list[Predicted]()
        try:
            for i in range(0, len(models), slots):
                found += self._predict(models[i : i + slots], pool, rows[i : i + slots])
        except Cannot as reason:
            warnings.warn(f"{type(self.algorithm).__name__} answers for one client at a time: {reason}", stacklevel=2)
            self.alone = True
            return self.one_by_one.predict_each(models, pool, rows)
        return found

    def _predict(self, models: list[Model], pool: Pool, rows: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        task = self.federation.task
        chunk = self.federation.batch if self.algorithm.depends_on_batch(task) else CHUNK
        longest = max(len(r) for r in rows)
        width = min(chunk, longest)
        index = np.zeros((-(-longest // width) if width else 0, len(rows), width), dtype=np.int64)
        live = np.zeros(index.shape, dtype=np.bool_)
        for k, r in enumerate(rows):
            for number in range(-(-len(r) // width) if width else 0):
                piece = r[number * width : (number + 1) * width]
                index[number, k, : len(piece)], live[number, k, : len(piece)] = piece, True
        with could("personal_model"):
            split = _Split.of_models(models)
        labels, losses = [], []

        def answer(leaves: list[Tensor], x: Tensor, alive: Tensor) -> Tensor:
            return self.algorithm.predict(task, pytree.tree_unflatten(leaves, split.shape), x, alive)

        for number in range(len(index)):
            x, y = pool.take(index[number])
            alive = torch.from_numpy(live[number]).to(self.device)
            with could("predict"), AsProducts():
                scores = vmap(answer, in_dims=(split.dims, 0, 0))(split.leaves, x, alive)
            labels.append(scores.argmax(-1))
            losses.append(torch.nn.functional.cross_entropy(scores.movedim(-1, 1), y, reduction="none"))
        if not labels:
            return [Predicted(np.zeros(0, np.int64), np.zeros(0)) for _ in rows]
        all_labels, all_losses = torch.cat(labels, 1).cpu().numpy(), torch.cat(losses, 1).double().cpu().numpy()
        # A client's rows fill its chunks one after the other, so the live ones are the first.
        return [Predicted(all_labels[k, : len(r)], all_losses[k, : len(r)]) for k, r in enumerate(rows)]


@contextmanager
def could(hook: str) -> Iterator[None]:
    """What a hook raises when it is stacked or captured, as a reason not to; a mistake shows again without."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines()
        raise Cannot(
            f"its hook {hook} cannot be stacked ({type(error).__name__}: {lines[0] if lines else ''})"
        ) from error


def _columns(client: Client) -> dict[str, Any]:
    return {name: value for name, value in client._asdict().items() if name != "population"}


def _kind_of(work: list[Tensor]) -> tuple[Any, ...]:
    return tuple((leaf.shape[1:], leaf.dtype) for leaf in work)


def _rows(leaves: list[Tensor], n: int) -> list[Tensor]:
    return [leaf[:n] for leaf in leaves]


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

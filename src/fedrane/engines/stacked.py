"""Clients side by side: their state is one stack of tensors, and one call makes a step of all of them.

The hooks run unchanged under ``torch.func.vmap``. A step of all clients (gathering the examples, every hook, writing
the result back) works on static buffers (:mod:`fedrane.engines.static_step`): a GPU captures it as a CUDA graph, a CPU
records it, and both then replay it, so that Python and launches cost nothing.

A round's clients are cut into chunks that memory allows, and each chunk into stacks, on a GPU one per stream. Clients
are taken longest first, so those still training are always the first of their stack; when half of them are done a
smaller graph over the first entries of the same buffers goes on. What does not differ from client to client, such as
the server's model, is held once. A method that cannot be stacked runs one client at a time, with a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
from fedrane.data.federation import Federation, Pool, each_of
from fedrane.data.sampling import Span
from fedrane.engines.base import LocalEngine, Sums, Trained
from fedrane.engines.evaluation import Predicted, against
from fedrane.engines.replay import overwrite
from fedrane.engines.sequential import NOTHING, Sequential, not_replayed, stack_clients
from fedrane.engines.static_step import StaticStep
from fedrane.kernels.stacked_mode import stacked_mode
from fedrane.task import Batch, Client, Context, Model, State

MAX_STACKED_CLIENTS = {"cuda": 64, "cpu": 256}
"""Clients of a stack, by device: more of them add little speed."""
MAX_MEMORY_SHARE = 0.5
"""The part of the free memory that a stack may take."""
MAX_STREAMS = {"cuda": 3, "cpu": 1}
"""Stacks that train at a time, by device: on a GPU, while one waits, another computes."""
STEP_OVERHEAD = 5.0
"""The fixed cost of a step of a stack, in units of what one more client adds: 3 to 5 on an H200."""
Plan = tuple[NDArray[Any], ...]
"""For each step of a client: the examples, their mask (False for padding) and the key of its noise."""


class NotStackable(Exception):  # noqa: N818 - a reason, not a failure of the run
    """A hook that does not run on stacked clients, and why."""


class _StackedTrees(NamedTuple):
    """Trees of one shape, one per client: leaves that are the same tensor for all are held once."""

    leaves: list[Tensor]
    shared: tuple[bool, ...]
    shape: Any
    clients: int

    @classmethod
    def of(cls, contexts: list[Context]) -> _StackedTrees:
        """What clients keep is never held once, though it is the same at first: buffers then fit every round."""
        trees = [{"down": c.down, "client_state": c.client_state} for c in contexts]
        try:
            columns = tree.columns(trees)
        except ValueError as error:
            raise NotStackable("its hooks join and finish give a client trees of different shapes to keep") from error
        shared = tuple(
            name.startswith(f"down{tree.SEPARATOR}") and all(leaf is column[0] for leaf in column)
            for name, column in columns.items()
        )
        try:
            leaves = [c[0] if one else torch.stack(c) for c, one in zip(columns.values(), shared, strict=True)]
        except RuntimeError as error:
            raise NotStackable("its hooks join and finish give clients tensors of different shapes to keep") from error
        who = _columns([c.client for c in contexts])
        shape = pytree.tree_structure({**trees[0], "client": who})
        return cls([*leaves, *who.values()], (*shared, *(False for _ in who)), shape, len(contexts))

    @classmethod
    def of_models(cls, models: list[Model]) -> _StackedTrees:
        leaves = [torch.stack(column) for column in tree.columns(models).values()]
        return cls(leaves, (False,) * len(leaves), pytree.tree_structure(models[0]), len(models))

    @property
    def dims(self) -> list[int | None]:
        return [None if one else 0 for one in self.shared]

    def first(self, n: int) -> list[Tensor]:
        return [leaf if one else leaf[:n] for leaf, one in zip(self.leaves, self.shared, strict=True)]

    def buffers(self, clients: int) -> list[Tensor]:
        """Memory for that number of clients."""
        return [
            torch.empty_like(leaf) if one else _channels_last(leaf.new_empty(clients, *leaf.shape[1:]))
            for leaf, one in zip(self.leaves, self.shared, strict=True)
        ]

    def layout(self) -> tuple[Any, ...]:
        """Trees of one layout fit the same buffers."""
        sizes = (
            (leaf.shape if one else leaf.shape[1:], leaf.dtype)
            for leaf, one in zip(self.leaves, self.shared, strict=True)
        )
        return (self.shared, str(self.shape), *sizes)


class _Table(NamedTuple):
    """Batches: for each step of each client the examples, their mask (False for padding) and the key of its noise."""

    examples: Tensor
    mask: Tensor
    keys: Tensor

    @classmethod
    def empty(cls, steps: int, width: int, device: torch.device) -> _Table:
        return cls(
            torch.zeros(steps, width, dtype=torch.int64, device=device),
            torch.zeros(steps, width, dtype=torch.bool, device=device),
            torch.zeros(steps, dtype=torch.int64, device=device),
        )


class _TrainingStack:
    """One stack of clients in training: its static buffers and captured steps; on a GPU it has its own stream."""

    def __init__(self, algorithm: Algorithm, federation: Federation, slots: int) -> None:
        self.algorithm, self.federation, self.slots = algorithm, federation, slots
        self.device = federation.task.device
        cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(self.device) if cuda else None  # type: ignore[no-untyped-call]
        self.static = StaticStep(self.device, self.stream, torch.cuda.graph_pool_handle() if cuda else None)
        self.sizes = sorted({-(-slots * part // 8) for part in (1, 2, 3, 4, 6, 8)} | {1})
        self.ctx: _StackedTrees
        self.work: list[Tensor] = []
        self.work_shape: Any = None
        self.table = _Table.empty(0, 0, self.device)
        self.position = torch.zeros(slots, dtype=torch.int64, device=self.device)

    def reserve(self, steps: int, width: int) -> None:
        """Make a table for ``steps`` steps of all clients together."""
        if steps >= len(self.table.examples):  # a longer table has another address, which captured steps do not know
            self.static.forget()
            # Space for somewhat longer cohorts, and at the end an entry of padding: a finished client stays there.
            self.table = _Table.empty(steps + steps // 4 + 1, width, self.device)

    def load(self, contexts: list[Context], plans: list[Plan]) -> None:
        """Put these clients, longest first, at the start of their round."""
        ctx = _StackedTrees.of(contexts)
        with errors_of_hook("begin"):
            work = self._begin(ctx)

        def allocate() -> list[Tensor]:
            self.ctx = ctx._replace(leaves=ctx.buffers(self.slots))
            self.work = [_channels_last(leaf.new_zeros(self.slots, *leaf.shape[1:])) for leaf in work]
            return [*self.ctx.leaves, *self.work]

        layout = ctx.layout() + tuple((leaf.shape[1:], leaf.dtype) for leaf in work)
        self.static.load([*ctx.leaves, *work], layout, allocate)
        self._fill_table(plans)

    def _fill_table(self, plans: list[Plan]) -> None:
        columns = [np.concatenate(column) for column in zip(*plans, strict=True)]
        self.table.mask[-1] = False
        for to, values in zip(self.table, columns, strict=True):
            to[: len(values)].copy_(torch.from_numpy(values))
        self.position.fill_(len(self.table.examples) - 1)
        starts = np.cumsum([0, *(len(plan[0]) for plan in plans)])[:-1]
        self.position[: len(plans)].copy_(torch.from_numpy(starts))

    def run(self, steps: list[int]) -> Iterator[float]:
        """Step by step to the end of the round, each with its cost; then :meth:`result` is available."""
        self.finished = [torch.empty_like(leaf) for leaf in self.first(len(steps))]
        before = 0
        for until in sorted(set(steps)):
            now, left = sum(s >= until for s in steps), sum(s > until for s in steps)
            for _ in range(until - before):
                with errors_of_hook("step"):
                    self._replay(now)
                yield STEP_OVERHEAD + now
            with self.static.on_stream():
                _copy([f[left:now] for f in self.finished], [w[left:now] for w in self.work])
            before = until

    def first(self, n: int) -> list[Tensor]:
        return [leaf[:n] for leaf in self.work]

    def _replay(self, active: int) -> None:
        """One step of the first clients of the stack."""
        size = next(s for s in self.sizes if s >= active)
        self.static.run(
            work=lambda: self.step(size),
            writes=[*self.work, self.position],
            size=size,
            warm_up=lambda: self.after_step(size),  # which writes nothing
        )

    def step(self, n: int) -> None:
        """One step of the first ``n``, written back to the buffers."""
        overwrite(self.first(n), self.after_step(n))
        # A client that has finished stays at the last entry, which is padding.
        self.position[:n] = (self.position[:n] + 1).clamp(max=len(self.table.examples) - 1)

    def after_step(self, n: int) -> list[Tensor]:
        examples, mask, keys = (column[self.position[:n]] for column in self.table)
        batches = self.federation.training_batch(examples, mask, keys, self.algorithm.trains_model)
        dims = pytree.tree_map(lambda leaf: 0 if isinstance(leaf, Tensor) else None, batches)

        def step(ctx: list[Tensor], work: list[Tensor], batch: Batch) -> list[Tensor]:
            now = pytree.tree_unflatten(work, self.work_shape)
            after = self.algorithm.step(self.federation.task, self._context(ctx, self.ctx.shape), now, batch)
            return self._leaves_like_before(after)

        with stacked_mode():
            after: list[Tensor] = vmap(step, in_dims=(self.ctx.dims, 0, dims))(
                self.ctx.first(n), self.first(n), batches
            )
        return after

    def _leaves_like_before(self, after: Work) -> list[Tensor]:
        """In the order in which ``begin`` gave them; other leaves than those cannot be stacked."""
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

        with errors_of_hook("finish"):
            leaves = vmap(finish, in_dims=(self.ctx.dims, 0))(self.ctx.first(n), self.finished)
        self.finished = []
        done: Done = pytree.tree_unflatten([leaf.contiguous() for leaf in leaves], shapes[0])
        return done

    def _begin(self, ctx: _StackedTrees) -> list[Tensor]:
        def begin(leaves: list[Tensor], one: Tensor) -> list[Tensor]:
            work = self.algorithm.begin(self.federation.task, self._context(leaves, ctx.shape))
            self.work_shape = pytree.tree_structure(work)
            return pytree.tree_leaves(work)

        work = vmap(begin, in_dims=(ctx.dims, 0))(ctx.leaves, torch.zeros(ctx.clients, device=self.device))
        return [_channels_last(leaf) for leaf in work]

    def _context(self, leaves: list[Tensor], shape: Any) -> Context:
        parts = pytree.tree_unflatten(leaves, shape)
        client = Client(**parts["client"], population=self.federation.population)
        return Context(parts["down"], parts["client_state"], client)


class Stacked(LocalEngine):
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        self.algorithm, self.federation = algorithm, federation
        self.device = federation.task.device
        self.max_clients = MAX_STACKED_CLIENTS.get(self.device.type, 64)
        self.max_streams = MAX_STREAMS.get(self.device.type, 1)
        self.sequential = Sequential(algorithm, federation)
        self.one_by_one = False
        self._slots = 0
        self._stacks: dict[int, _TrainingStack] = {}
        self._messages: list[str] = []
        self._plans: dict[tuple[int, Span], dict[int, Plan]] = {}
        self._predictions: dict[tuple[Any, ...], _PredictionStack] = {}
        self._pool = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None

    # ---- training

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
        if not self.one_by_one:
            sums = Sums(self.algorithm, self.federation.task, server) if reduce else None
            try:
                return self._train(server, client_states, sorted(clients), round, lr, epochs, sums)
            except NotStackable as reason:
                self.one_by_one, self._stacks = True, {}
                name = type(self.algorithm).__name__
                warnings.warn(f"{name} runs one client at a time, which is slower: {reason}", stacklevel=2)
        return self.sequential.train_round(server, client_states, clients, round, lr, epochs, reduce)

    def _train(
        self,
        server: State,
        client_states: Mapping[int, State],
        clients: list[int],
        round: int,
        lr: float,
        epochs: Span,
        sums: Sums | None,
    ) -> Trained:
        federation = self.federation
        cohort = federation.cohort(clients, round, lr, epochs)
        position, who = {k: i for i, k in enumerate(clients)}, each_of(cohort)

        def contexts(clients: list[int]) -> list[Context]:
            with errors_of_hook("send or join"):
                return [self.sequential.context(server, client_states.get(k), who[position[k]]) for k in clients]

        plans = self._plan(clients, round, epochs)

        def longest_first(clients: list[int]) -> list[int]:
            return sorted(clients, key=lambda k: (-len(plans[k][0]), k))

        order = longest_first(clients)
        self._slots = self._slots or self._choose_slots(lambda: contexts(order[:2]), plans[order[0]], len(clients))
        queue = clients if sums else order  # sums go by the order of clients, and so only wait for those of a chunk
        chunks = [longest_first(queue[begin : begin + self._slots]) for begin in range(0, len(queue), self._slots)]
        self._make_stacks([[plans[k] for k in chunk] for chunk in chunks])
        parts, down, up = list[Done](), 0, 0
        for chunk in chunks:
            received = contexts(chunk)  # not of all clients at once: some methods send much to each
            done = _in_order(self._train_chunk(received, [plans[k] for k in chunk]), [position[k] for k in chunk])
            up += tree.nbytes(done.up)
            if sums:
                sums.add(done.up, stack_clients([who[position[k]] for k in sorted(chunk)]))
                done = done._replace(up=NOTHING)
            parts.append(done)
            firsts = [k not in client_states for k in chunk]  # what can be stacked has one size, but for who is new
            for first in set(firsts):
                arriving = self.sequential.arriving(received[firsts.index(first)].down, first)
                down += firsts.count(first) * tree.nbytes(arriving)
        if len(clients) == federation.population:  # while the device is still computing
            self._plans = {(round + 1, epochs): self._plan(clients, round + 1, epochs)}
        done = _in_order(parts, [position[k] for chunk in chunks for k in sorted(chunk)])
        return Trained(
            ups=done.up,
            cohort=cohort._replace(labels=None),
            client_states=dict(zip(clients, tree.unstack(done.client_state, len(clients)), strict=True)),
            metrics={name: values.tolist() for name, values in done.metrics.items()},
            examples=federation.examples_trained(clients, epochs),
            bytes_down=down,
            bytes_up=up,
            messages=self._new_messages(),
            sums=sums,
        )

    def _new_messages(self) -> tuple[str, ...]:
        """Each once in a run."""
        for stack in self._stacks.values():
            if message := not_replayed(self.algorithm, stack.static.refused):
                self._messages.append(message)
        return self.sequential.once(self._messages)

    def _make_stacks(self, chunks: list[list[Plan]]) -> None:
        """Stacks that are large enough for every chunk of the round: one that grew would have to capture again."""
        largest: dict[int, tuple[int, int]] = {}
        for plans in chunks:
            for number, piece in enumerate(self._pieces(plans)):
                clients, steps = largest.get(number, (0, 0))
                needed = sum(len(plan[0]) for plan in plans[piece])
                largest[number] = max(clients, len(plans[piece])), max(steps, needed)
        for number, (clients, steps) in largest.items():
            stack = self._stacks.get(number)
            if stack is None or stack.slots < clients:
                slots = clients if self.max_streams > 1 else self._slots
                stack = self._stacks[number] = _TrainingStack(self.algorithm, self.federation, slots)
            stack.reserve(steps, chunks[0][0][0].shape[1])

    def _pieces(self, plans: list[Plan]) -> list[slice]:
        return split_over_streams([len(plan[0]) for plan in plans], self.max_streams)

    def _train_chunk(self, contexts: list[Context], plans: list[Plan]) -> list[Done]:
        """Train these clients, longest first. The longest ones run in parallel with the others, so that they do not end
        alone."""
        steps, pieces = [len(plan[0]) for plan in plans], self._pieces(plans)
        stacks, runs = [], []
        for number, piece in enumerate(pieces):
            stack = self._stacks[number]
            if stack.stream is not None:
                stack.stream.wait_stream(torch.cuda.current_stream())
            with stack.static.on_stream():
                stack.load(contexts[piece], plans[piece])
            stacks.append(stack)
            runs.append(stack.run(steps[piece]))
        _interleave(runs)
        done = []
        for stack, piece in zip(stacks, pieces, strict=True):
            if stack.stream is not None:
                torch.cuda.current_stream().wait_stream(stack.stream)
            done.append(stack.result(len(steps[piece])))
        return done

    def _plan(self, clients: list[int], round: int, epochs: Span) -> dict[int, Plan]:
        known = self._plans.pop((round, epochs), {})
        if known.keys() == set(clients):
            return known
        train, batches = self.federation.split.train, self.federation.batches(round, clients, epochs)
        return {k: (train[k][examples], mask, keys) for k, (examples, mask, keys) in batches.items()}

    def _choose_slots(self, contexts: Callable[[], list[Context]], plan: Plan, clients: int) -> int:
        """The number of clients in a stack, as memory allows; logged."""
        if self.device.type != "cuda":
            return min(clients, self.max_clients)
        need = self._memory_of_a_client(contexts, plan)
        reserved = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        self.max_clients = max(1, min(self.max_clients, int(MAX_MEMORY_SHARE * (free + reserved) / max(need, 1))))
        slots = min(clients, self.max_clients)
        gib = 2**30
        self._messages.append(
            f"{slots} clients side by side: one takes {need / gib:.2f} of {(free + reserved) / gib:.0f} GiB free "
            f"({total / gib:.0f} in all)"
        )
        return slots

    def _memory_of_a_client(self, contexts: Callable[[], list[Context]], plan: Plan) -> int:
        """The memory that one client of a stack takes, measured with two."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        two = contexts()
        stack = _TrainingStack(self.algorithm, self.federation, len(two))
        stack.reserve(len(two) * len(plan[0]), plan[0].shape[1])
        stack.load(two, [plan] * len(two))
        with errors_of_hook("step"):
            stack.after_step(len(two))
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated(self.device) - before) // len(two)

    # ---- prediction

    def personal(self, server: State, client_state: State | None, client: int, round: int) -> Model:
        return self.sequential.personal(server, client_state, client, round)

    def predict(self, model: Model, pool: Pool, examples: NDArray[np.int64]) -> Predicted:
        return self.predict_each([model], pool, (examples,))[0]

    @torch.no_grad()
    def predict_each(self, models: list[Model], pool: Pool, examples: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        """Stacked as far as memory allows for training, in which a client takes more. The number of clients trained so
        far does not matter: it differs in a resumed run."""
        if self.one_by_one:
            return self.sequential.predict_each(models, pool, examples)
        predicted = list[Predicted]()
        try:
            for i in range(0, len(models), self.max_clients):
                predicted += self._predict(models[i : i + self.max_clients], pool, examples[i : i + self.max_clients])
        except NotStackable as reason:
            warnings.warn(f"{type(self.algorithm).__name__} predicts for one client at a time: {reason}", stacklevel=2)
            self.one_by_one = True
            return self.sequential.predict_each(models, pool, examples)
        return predicted

    def _predict(self, models: list[Model], pool: Pool, examples: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        longest = max(len(r) for r in examples)
        if not longest:
            return [Predicted.nothing(self.federation.task) for _ in examples]
        width = min(self.sequential.predict_batch_size, longest)
        index = np.zeros((-(-longest // width), len(examples), width), dtype=np.int64)
        mask = np.zeros(index.shape, dtype=np.bool_)
        for k, r in enumerate(examples):
            for number in range(-(-len(r) // width)):
                piece = r[number * width : (number + 1) * width]
                index[number, k, : len(piece)], mask[number, k, : len(piece)] = piece, True
        with errors_of_hook("personal_model"):
            trees = _StackedTrees.of_models(models)
        with errors_of_hook("predict"):
            predicted = self._prediction_stack(trees, pool, width).predict(trees, index, mask)
        # A client's examples fill its chunks one after the other, so padding comes last.
        return [Predicted.of([column[k, : len(r)] for column in predicted]) for k, r in enumerate(examples)]

    def _prediction_stack(self, trees: _StackedTrees, pool: Pool, width: int) -> _PredictionStack:
        key = (id(pool), trees.clients, width, trees.layout())
        if key not in self._predictions:
            static = StaticStep(self.device, pool=self._pool)
            self._predictions[key] = _PredictionStack(self.algorithm, self.federation, pool, static)
        return self._predictions[key]


class _PredictionStack:
    """A stack of models that predict ``width`` examples each at a time; on a GPU captured once, for all rounds."""

    def __init__(self, algorithm: Algorithm, federation: Federation, examples: Pool, static: StaticStep) -> None:
        self.algorithm, self.federation, self.examples, self.static = algorithm, federation, examples, static
        self.models: _StackedTrees
        self.index: Tensor
        self.mask: Tensor

    def predict(self, models: _StackedTrees, index: NDArray[np.int64], mask: NDArray[np.bool_]) -> list[Tensor]:
        """The columns of what is predicted, (clients, examples), of all chunks (number, clients, width)."""
        chunks = [torch.from_numpy(values).to(self.static.device) for values in (index, mask)]

        def allocate() -> list[Tensor]:
            self.models = models._replace(leaves=models.buffers(models.clients))
            self.index, self.mask = (torch.zeros_like(values[0]) for values in chunks)
            return [*self.models.leaves, self.index, self.mask]

        parts = []
        for number, (examples, chunk_mask) in enumerate(zip(*chunks, strict=True)):
            if number:
                self.index.copy_(examples)
                self.mask.copy_(chunk_mask)
            else:
                self.static.load([*models.leaves, examples, chunk_mask], models.layout(), allocate)
            parts.append(tuple(part.clone() for part in self.static.run(self._compared, writes=None)))
        return [torch.cat(part, 1).cpu() for part in zip(*parts, strict=True)]

    def _compared(self) -> tuple[Tensor, ...]:
        def predict(leaves: list[Tensor], x: Tensor, chunk_mask: Tensor) -> Tensor:
            model = pytree.tree_unflatten(leaves, self.models.shape)
            return self.algorithm.predict(self.federation.task, model, x, chunk_mask)

        x, y = self.examples.take(self.index)
        with stacked_mode():
            scores = vmap(predict, in_dims=(self.models.dims, 0, 0))(self.models.leaves, x, self.mask)
        return against(scores, y)


@contextmanager
def errors_of_hook(hook: str) -> Iterator[None]:
    """What a hook raises when it is stacked or captured is a reason not to; a mistake in it is raised again without."""
    try:
        yield
    except torch.cuda.OutOfMemoryError:
        raise
    except Exception as error:
        reason = shorten(f"{type(error).__name__}: {error}", 160, placeholder=" …")
        raise NotStackable(f"its hook {hook} cannot be stacked ({reason})") from error


def _columns(clients: list[Client]) -> dict[str, Tensor]:
    names = [name for name in Client._fields if name != "population"]
    return {name: torch.stack([getattr(client, name) for client in clients]) for name in names}


def split_over_streams(steps: list[int], max_streams: int) -> list[slice]:
    """Split clients, longest first, into at most ``max_streams`` parallel stacks such that all end soonest."""
    before = [0, *accumulate(steps)]

    @cache
    def best(begin: int, streams: int) -> tuple[float, tuple[int, ...]]:
        def cost(end: int) -> float:
            return STEP_OVERHEAD * steps[begin] + before[end] - before[begin]

        options: list[tuple[float, tuple[int, ...]]] = [(cost(len(steps)), (len(steps),))]
        if streams > 1:
            for cut in range(begin + 1, len(steps)):
                rest, cuts = best(cut, streams - 1)
                options.append((max(cost(cut), rest), (cut, *cuts)))
        return min(options)

    return [slice(*ends) for ends in pairwise((0, *best(0, max_streams)[1]))]


def _interleave(runs: list[Iterator[float]]) -> None:
    """Go on with whichever run is behind, so that the device always has all of them to do."""
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


def _channels_last(stack: Tensor) -> Tensor:
    """Stacked convolution weights with their channels last in memory, as the products take them."""
    if stack.dim() != 5:
        return stack
    return stack.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _in_order(parts: list[Done], positions: list[int]) -> Done:
    """The results of all chunks, in the order of client numbers."""
    done = parts[0] if len(parts) == 1 else tree.map(lambda *stacked: torch.cat(stacked), *parts)
    if positions == sorted(positions):
        return done
    back = torch.tensor(np.argsort(positions)).to(tree.leaves(done)[0].device)
    return tree.map(lambda stacked: stacked[back], done)

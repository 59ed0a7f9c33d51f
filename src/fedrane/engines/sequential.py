"""The reference: one client after another, one step after another, nothing clever.

Padding is cut off here rather than masked, so this engine is also the oracle for those that mask it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrane import tree
from fedrane.algorithm import Algorithm, Done, Work
from fedrane.data.federation import Federation, Pool
from fedrane.data.sampling import Span
from fedrane.engines.base import COLUMNS, LocalEngine, Sums, Trained, require_same_metrics
from fedrane.engines.evaluation import Predicted, against
from fedrane.task import Batch, Client, Context, Model, State

T = TypeVar("T")
NOTHING = State(Model({}, {}), {})
MAX_PREDICT_EXAMPLES = 1024
"""Examples predicted at a time, if predictions do not depend on the batch."""


class Sequential(LocalEngine):
    def __init__(self, algorithm: Algorithm, federation: Federation) -> None:
        self.algorithm, self.federation = algorithm, federation
        self._reported: set[str] = set()

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
        def one(engine: Sequential, k: int) -> tuple[Client, Done, int, str]:
            client = engine.federation.client(k, round, lr, epochs)
            ctx = engine.context(server, client_states.get(k), client)
            down = tree.nbytes(engine.arriving(ctx.down, first=k not in client_states))
            return client, engine.train_client(ctx, k, round, epochs), down, engine.message

        clients = sorted(clients)
        sizes = [len(self.federation.split.train[k]) for k in clients]
        sums = Sums(self.algorithm, self.federation.task, server) if reduce else None
        ups, cohort, kept, metrics, messages = list[State](), list[Client](), {}, [], []
        bytes_down = bytes_up = 0
        with closing(self.in_order(one, clients)) if sums else nullcontext(self.each(one, clients, sizes)) as results:
            for k, (client, done, down, message) in zip(clients, results, strict=True):
                if sums:
                    sums.add(tree.stack([done.up]), stack_clients([client]))
                else:
                    ups.append(done.up)
                cohort.append(client)
                kept[k] = done.client_state
                metrics.append(done.metrics)
                messages.append(message)
                bytes_down, bytes_up = bytes_down + down, bytes_up + tree.nbytes(done.up)
        return Trained(
            ups=NOTHING if sums else tree.stack(ups),
            cohort=stack_clients(cohort),
            client_states=kept,
            metrics=metrics_of_all(clients, metrics),
            examples=self.federation.examples_trained(clients, epochs),
            bytes_down=bytes_down,
            bytes_up=bytes_up,
            messages=self.once(messages),
            sums=sums,
        )

    message = ""
    """A message for the user on how this engine, or this worker of one, trained its last client; often empty."""

    def once(self, messages: Iterable[str]) -> tuple[str, ...]:
        """Those that have not been reported before in this run."""
        new = tuple(dict.fromkeys(m for m in messages if m and m not in self._reported))
        self._reported |= set(new)
        return new

    def each(self, work: Callable[[Sequential, int], T], items: Sequence[int], sizes: Sequence[int]) -> list[T]:
        """The results of ``work`` for each item; ``sizes`` are the relative costs."""
        return [work(self, item) for item in items]

    def in_order(self, work: Callable[[Sequential, int], T], items: Sequence[int]) -> Generator[T, None, None]:
        """The results one by one, in the order of the items; few are there at a time, however many items there are."""
        return (work(self, item) for item in items)

    def context(self, server: State, client_state: State | None, client: Client) -> Context:
        task, algorithm = self.federation.task, self.algorithm
        client_state = algorithm.join(task, server, client) if client_state is None else client_state
        return Context(algorithm.send(task, server, client), client_state, client)

    def train_client(self, ctx: Context, k: int, round: int, epochs: Span) -> Done:
        with naming("begin", k, round):
            work = self.begin(ctx)
        for number, (examples, key) in enumerate(self.planned(k, round, epochs)):
            with naming(f"step {number}", k, round):
                work = self.step(ctx, work, examples, key)
        with naming("finish", k, round):
            return self.finish(ctx, work)

    def begin(self, ctx: Context) -> Work:
        return self.algorithm.begin(self.federation.task, ctx)

    def step(self, ctx: Context, work: Work, examples: Tensor, key: Tensor) -> Work:
        return self.algorithm.step(self.federation.task, ctx, work, self.batch(examples, key))

    def finish(self, ctx: Context, work: Work) -> Done:
        return self.algorithm.finish(self.federation.task, ctx, work)

    def planned(self, k: int, round: int, epochs: Span) -> Iterator[tuple[Tensor, Tensor]]:
        """The examples of each step, and the key of its noise."""
        federation = self.federation
        for examples, mask, key in zip(*federation.batches(round, [k], epochs)[k], strict=True):
            yield torch.from_numpy(federation.split.train[k][examples[mask]]), torch.tensor(key)

    def batch(self, examples: Tensor, key: Tensor) -> Batch:
        device = self.federation.task.device
        mask = torch.ones(len(examples), dtype=torch.bool, device=device)
        return self.federation.training_batch(
            examples.to(device), mask, key.to(device), self.algorithm.trains_model, full=True
        )

    def batches(self, k: int, round: int, epochs: Span) -> Iterator[Batch]:
        return (self.batch(*planned) for planned in self.planned(k, round, epochs))

    def personal(self, server: State, client_state: State | None, client: int, round: int) -> Model:
        ctx = self.context(server, client_state, self.federation.client(client, round, 0.0, 0))
        return self.algorithm.personal_model(self.federation.task, ctx)

    def predict(self, model: Model, pool: Pool, examples: NDArray[np.int64]) -> Predicted:
        size = self.predict_batch_size
        chunks = [examples[begin : begin + size] for begin in range(0, len(examples), size)]
        if not chunks:
            return Predicted.nothing(self.federation.task)
        predicted = self.each(
            lambda engine, position: engine.predict_batch(model, pool, chunks[position]),
            range(len(chunks)),
            [len(c) for c in chunks],
        )
        return Predicted.of([torch.cat(parts) for parts in zip(*predicted, strict=True)])

    @property
    def predict_batch_size(self) -> int:
        """Examples predicted together."""
        return self.federation.batch if self.federation.task.depends_on_batch else MAX_PREDICT_EXAMPLES

    @torch.no_grad()
    def predict_batch(self, model: Model, pool: Pool, examples: NDArray[np.int64]) -> tuple[Tensor, ...]:
        """The columns of what is predicted of one batch."""
        x, y = pool.take(examples)
        mask = torch.ones(len(y), dtype=torch.bool, device=y.device)
        return against(self.algorithm.predict(self.federation.task, model, x, mask), y)

    def predict_each(self, models: list[Model], pool: Pool, examples: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        return self.each(
            lambda engine, k: engine.predict(models[k], pool, examples[k]),
            range(len(models)),
            [len(r) for r in examples],
        )

    def arriving(self, down: State, first: bool) -> State:
        """What must really be sent: a parameter that never changes at the server goes to a client once."""
        if first:
            return down
        changed = tree.pick(down.model.params, self.algorithm.changes)
        return State(Model(changed, down.model.stats), down.extra)


def not_replayed(algorithm: Algorithm, reason: str) -> str:
    """A message, if there is a reason."""
    name = type(algorithm).__name__
    return f"{name}'s steps are not replayed from a recording, which is slower: {reason}" if reason else ""


def metrics_of_all(clients: Sequence[int], metrics: Sequence[Mapping[str, Tensor]]) -> dict[str, list[float]]:
    for k, reported in zip(clients, metrics, strict=True):
        require_same_metrics(clients[0], metrics[0], k, reported)
    return {name: [float(reported[name]) for reported in metrics] for name in metrics[0]}


def stack_clients(clients: Sequence[Client]) -> Client:
    """A cohort as the server sees it: without its clients' labels."""
    columns = {name: torch.stack([getattr(client, name) for client in clients]) for name in COLUMNS}
    return Client(labels=None, population=clients[0].population, **columns)


@contextmanager
def naming(stage: str, client: int, round: int) -> Iterator[None]:
    """Add to an error in a hook where it happened."""
    try:
        yield
    except Exception as error:
        error.add_note(f"in {stage} of client {client}, round {round}")
        raise

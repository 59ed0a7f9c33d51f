"""The engine whose clients are nodes of a Flower grid: the server's hooks run here, the clients' in the nodes."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
from flwr.app import ConfigRecord, MetricRecord, RecordDict

from fedrane import tree
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data.federation import Federation
from fedrane.data.sampling import Span, Steps
from fedrane.engines.base import Trained
from fedrane.engines.evaluation import Count, Metrics, official, over_clients, overall, validation
from fedrane.engines.sequential import Sequential, stack_clients
from fedrane.errors import FedraneError
from fedrane.flower.client_state import NEVER, derive_first_state, initial_server_state
from fedrane.flower.codec import Encoder, Layout, MessageError, decode, digest, schema, sent_bytes
from fedrane.flower.messages import (
    EVALUATE,
    MAX_NUMBER,
    TRAIN,
    ClientReply,
    ClientRequest,
    is_bounded_number,
    read_count,
    require_only,
)
from fedrane.flower.nodes import NodePool
from fedrane.task import Client, Context, Model, State
from fedrane.training.run_folder import as_state, empty_dicts, refill
from fedrane.tree import Tensors


class TooFewRepliesError(FedraneError):
    """A round in which too few clients replied."""


class ClientStates(Protocol):
    """What the server knows of the clients' states."""

    def aggregated(self, client: int, client_state: State | None, round: int) -> int:
        """The round whose upload was aggregated last, if the run has a state of this client."""

    def committed(self, client: int, round: int) -> State:
        """What the run holds for the client once this round is aggregated."""


class FlowerEngine:
    """Trains and evaluates by messages to the nodes of a pool."""

    def __init__(
        self,
        algorithm: Algorithm,
        federation: Federation,
        pool: NodePool,
        states: ClientStates,
        method_file: str = "",
    ) -> None:
        self.algorithm, self.federation = algorithm, federation
        self.pool, self.states, self.method_file = pool, states, method_file
        self.local = Sequential(algorithm, federation)
        self._template: tuple[State, Mapping[str, torch.Tensor]] | None = None

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
        """A round with those who reply; what cannot be used is left out, logged and recorded. All uploads are kept."""
        messages = MessageBuilder(self, server, client_states, round, lr, epochs)
        replies: dict[int, ClientReply] = {}
        refused: dict[int, str] = {}
        need = min(self.pool.min_replies, len(clients))
        for attempt in range(self.pool.retries + 1):
            missing = [k for k in clients if k not in replies]
            if attempt:
                self.pool.log(f"{len(replies)} of {need} replies: the others are asked again")
                self.pool.wait_for(missing)
            new, refused = self._train(messages, missing)
            replies |= new
            for k, why in sorted(refused.items()):
                self.pool.log(f"client {k} is left out: {why}")
            if len(replies) >= need:
                break
        else:
            raise TooFewRepliesError(
                f"round {round}: {len(replies)} of {len(clients)} clients replied and {need} are needed",
                "; ".join(f"client {k}: {why}" for k, why in sorted(refused.items())[:3]),
                "What was saved is from before it: see to the clients, then go on from the last checkpoint",
            )
        return self._trained(messages, replies, refused)

    def _train(self, messages: MessageBuilder, clients: list[int]) -> tuple[dict[int, ClientReply], dict[int, str]]:
        def read(k: int, content: RecordDict) -> ClientReply | None:
            if "missing_constants" in content.config_records:
                require_only(content, "missing_constants")
                return None
            return messages.read_reply(k, content)

        replies, refused = self.pool.request(TRAIN, {k: messages.train(k) for k in clients}, read)
        incomplete = [k for k, reply in replies.items() if reply is None]
        if incomplete:  # a folder restored from an older copy: what never changes is sent once more
            messages.send_constants_to(incomplete)
            again, why = self.pool.request(TRAIN, {k: messages.train(k) for k in incomplete}, read)
            replies, refused = replies | again, refused | why
        return {k: reply for k, reply in replies.items() if reply is not None}, refused

    def _trained(
        self, messages: MessageBuilder, replies: Mapping[int, ClientReply], refused: Mapping[int, str]
    ) -> Trained:
        order = sorted(replies)  # they came in any order, in which sums would round differently
        clients = [messages.client(k) for k in order]
        return Trained(
            ups=tree.stack([replies[k].up for k in order]),
            cohort=stack_clients(clients),
            client_states={k: self.states.committed(k, messages.round) for k in order},
            metrics={name: [replies[k].metrics[name] for k in order] for name in replies[order[0]].metrics},
            examples=self.federation.examples_trained(order, messages.epochs),
            bytes_down=sum(messages.bytes_down(k) for k in order),
            bytes_up=sum(messages.bytes_up(k) for k in order),
            refused={**{str(k): refused[k] for k in sorted(refused)}, **self.pool.newly_refused()},
        )

    def upload_template(self, server: State, k: int) -> tuple[State, Mapping[str, torch.Tensor]]:
        """What an upload looks like, and its metrics: those of a client which makes no step; the same in all rounds."""
        if self._template is None:
            task, algorithm = self.federation.task, self.algorithm
            client = self.federation.client(k, 1, 0.1, 1)
            ctx = Context(algorithm.send(task, server, client), algorithm.join(task, server, client), client)
            done = algorithm.finish(task, ctx, algorithm.begin(task, ctx))
            self._template = done.up, done.metrics
        return self._template

    def evaluate(self, server: State, client_states: Mapping[int, State], round: int) -> Metrics:
        """Every client counts its own correct predictions; the server adds them up."""
        task, messages = self.federation.task, MessageBuilder(self, server, client_states, round, 0.0, 0)
        here = [k for k, examples in enumerate(self.federation.split.train) if len(examples)]
        requests = {k: messages.evaluate(k) for k in here}
        replies, refused = self.pool.request(EVALUATE, requests, self._read_tallies)
        refused |= dict.fromkeys({*range(self.federation.population)} - {*here}, "the run started without it")
        metrics: Metrics = {"unevaluated": sorted(refused)} if refused else {}
        for k, why in sorted(refused.items()):
            self.pool.log(f"round {round}: client {k} is not evaluated: {why}")
        held_out = {}
        for which in self.algorithm.models_on(task):
            tallies = [replies[k][which] for k in sorted(replies)]
            tested = [parts[0] for parts in tallies]
            held_out[which] = [parts[1] for parts in tallies if len(parts) > 1]
            if which == GLOBAL and len(self.federation.test):
                metrics |= official(self.local, self.federation, self.algorithm.global_model(task, server))
            if which == PERSONAL and tested:
                metrics |= overall(task, PERSONAL, tested)
            if tested:
                metrics |= over_clients(task, "global/local_" if which == GLOBAL else "personal/", tested)
        return metrics | validation(task, held_out)

    def _read_tallies(self, k: int, content: RecordDict) -> dict[str, list[Count]]:
        """Of each model that the method has: the counts of the test examples, and of validation ones if there are."""
        counts_of, split, task = {}, self.federation.split, self.federation.task
        models, parts_of = self.algorithm.models_on(task), ("test", "validation")
        require_only(content, *(f"{which}.{part}" for which in models for part in parts_of))
        for which in models:
            parts = [content.metric_records.get(f"{which}.{part}") for part in parts_of]
            declared = (len(examples[k]) for examples in (split.test, split.validation))
            test, held = (read_count(record, task, n) for record, n in zip(parts, declared, strict=True))
            if test is None:
                raise MessageError(f"no counts of its {which} model", "every client has test examples")
            counts_of[which] = [test] if held is None else [test, held]
        return counts_of


class MessageBuilder:
    """Makes the messages of one round, and reads their replies."""

    def __init__(
        self,
        engine: FlowerEngine,
        server: State,
        client_states: Mapping[int, State],
        round: int,
        lr: float,
        epochs: Span,
    ) -> None:
        self.engine, self.server, self.client_states = engine, server, client_states
        self.round, self.lr, self.epochs = round, lr, epochs
        self._encoder = Encoder(engine.pool.bf16)
        self._downs: dict[int, State] = {}
        self._sent_bytes: dict[int, int] = {}
        self._without_constants: set[int] = set()
        self._digests: dict[int, tuple[torch.Tensor, str]] = {}
        self._initial: State | None = None

    def send_constants_to(self, clients: Iterable[int]) -> None:
        """Send these clients also what never changes, as if for the first time."""
        self._without_constants |= set(clients)

    def client(self, k: int) -> Client:
        return self.engine.federation.client(k, self.round, self.lr, self.epochs)

    def train(self, k: int) -> RecordDict:
        return self._message(k, None)

    def evaluate(self, k: int) -> RecordDict:
        """With the global model, if there is one: mostly it is what comes down anyway."""
        task, algorithm = self.engine.federation.task, self.engine.algorithm
        has_global = GLOBAL in algorithm.models_on(task)
        return self._message(k, algorithm.global_model(task, self.server) if has_global else None)

    def _message(self, k: int, global_model: Model | None) -> RecordDict:
        engine, pool, federation = self.engine, self.engine.pool, self.engine.federation
        client = self.client(k)
        down = engine.algorithm.send(federation.task, self.server, client)
        aggregated = engine.states.aggregated(k, self.client_states.get(k), self.round)
        leaves = tree.flatten(down)
        changing = tree.flatten(engine.local.arriving(down, first=False))
        constant = {path: self._digest(leaf) for path, leaf in leaves.items() if path not in changing}
        sent = leaves if aggregated == NEVER or k in self._without_constants else changing
        first = self._underivable(down, client) if aggregated == NEVER else {}
        model = {} if global_model is None else tree.flatten(State(global_model, {}))
        beside = {path: leaf for path, leaf in model.items() if leaves.get(path) is not leaf}
        request = ClientRequest(
            key=pool.key,
            server_start=pool.server_start,
            method_file=engine.method_file,
            client=k,
            population=federation.population,
            round=self.round,
            lr=float(self.lr),
            epochs=0.0 if isinstance(self.epochs, Steps) else float(self.epochs),
            steps=self.epochs.count if isinstance(self.epochs, Steps) else 0,
            batch=federation.batch,
            aggregated=aggregated,
            oldest=max(self.round - 1 - pool.rounds_back, 0),
            bf16=pool.bf16,
            layout=Layout.of(down, constant).to_text(),
            first_state=Layout.of_leaves(first).to_text() if first else "",
            global_model="" if global_model is None else Layout.of(State(global_model, {})).to_text(),
        )
        self._downs[k] = down
        self._sent_bytes[k] = sent_bytes(sent, pool.bf16, frozenset(constant)) + sent_bytes(first, False)
        return RecordDict(
            {
                "request": request.record(),
                "down": self._encoder.record(sent, frozenset(constant)),
                "first_state": self._encoder.record(first, frozenset(first)),
                "global_model": self._encoder.record(beside, frozenset(beside)),
            }
        )

    def read_reply(self, k: int, content: RecordDict) -> ClientReply:
        """A client's reply, if it is as expected; else nothing of it is used."""
        require_only(content, "reply", "up", "metrics")
        given = content.config_records.get("reply", ConfigRecord())
        federation = self.engine.federation
        examples = federation.examples_trained([k], self.epochs)
        expected = {"client": k, "round": self.round, "num_examples": examples}
        if dict(given) != expected:
            raise MessageError(f"it reports {reprlib.repr(dict(given))}", f"{expected} was expected")
        if "up" not in content.array_records:
            raise MessageError("no arrays")
        template, metrics = self.engine.upload_template(self.server, k)
        tensors = decode(content.array_records["up"], schema(tree.flatten(template)), self._encoder.bf16)
        if self._encoder.bf16:
            base = {path: leaf.cpu() for path, leaf in tree.flatten(self._downs[k]).items()}
            tensors = {path: leaf + base.get(path, 0) for path, leaf in tensors.items()}
        device = federation.task.device
        up = as_state(refill({path: leaf.to(device) for path, leaf in tensors.items()}, list(empty_dicts(template))))
        measured = dict(content.metric_records.get("metrics", MetricRecord()))
        if measured.keys() != metrics.keys() or not all(map(is_bounded_number, measured.values())):
            raise MessageError(
                f"metrics {reprlib.repr(measured)}",
                f"numbers up to {MAX_NUMBER:g} called {', '.join(metrics)} were expected",
            )
        return ClientReply(up, {name: float(measured[name]) for name in metrics})  # type: ignore[arg-type]  # checked

    def bytes_down(self, k: int) -> int:
        return self._sent_bytes[k]

    def bytes_up(self, k: int) -> int:
        return sent_bytes(tree.flatten(self.engine.upload_template(self.server, k)[0]), self._encoder.bf16)

    def _underivable(self, down: State, client: Client) -> Tensors:
        """Those leaves of a client's first state that it cannot derive from what comes down and the seed."""
        task, algorithm = self.engine.federation.task, self.engine.algorithm
        real = tree.flatten(algorithm.join(task, self.server, client))
        if self._initial is None:
            self._initial = initial_server_state(algorithm, self.engine.federation)
        derived = tree.flatten(derive_first_state(algorithm, task, self._initial, down, client))
        return {path: leaf for path, leaf in real.items() if path not in derived or not tree.equal(leaf, derived[path])}

    def _digest(self, leaf: torch.Tensor) -> str:
        known = self._digests.get(id(leaf))
        if known is None:  # the tensor is held as well: the id of a freed one could be reused
            known = self._digests[id(leaf)] = leaf, digest(leaf)
        return known[1]

"""Rounds over a Flower grid: the server's hooks run here, the clients' in Flower's nodes, by the code of a local run.

A message says all that a client must know: the round, its rate, which of its uploads was merged last, and what comes
down. An answer carries what goes up, and the objective's metrics. Neither holds a parameter that the method keeps where
it is; one that never changes at the server goes to a client once, and by its digest afterwards.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, get_type_hints

import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app import Context as NodeContext
from flwr.clientapp import ClientApp
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedrane import tree
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.engines import Trained, automatic_threads
from fedrane.engines.codec import Encoder, Layout, Refused, decode, digest, schema, sent_bytes
from fedrane.engines.sequential import Sequential, stack_clients
from fedrane.engines.store import NEVER, Kept, Store
from fedrane.errors import FedraneError
from fedrane.evaluation import Tally, answer
from fedrane.federation import Federation
from fedrane.task import Client, Context, Model, Roster, State, Task
from fedrane.threads import limited
from fedrane.training.run_folder import as_state, empty_dicts, refill
from fedrane.tree import Tensors

TRAIN, EVALUATE, QUERY, CONCLUDE = "train", "evaluate", "query", "evaluate.conclude"
PARAMS = "model/params/"
TALLY = ("rows", "hits", "loss", "few", "few_hits")
LARGEST = 10**9
"""More rows than any one client has: a larger number is a mistake or a lie."""
T = TypeVar("T")


class TooFew(FedraneError):  # noqa: N818 - it says what happened
    """A round in which too few clients answered."""


# ---- what a message says


class Order(NamedTuple):
    """What the server tells a client beside the arrays."""

    key: str
    """Of the experiment: a client keeps one state for each."""
    life: int
    """How often the server has been started on it."""
    stage: str
    """Where a simulation's node finds the method; empty where the round tells it."""
    client: int
    population: int
    round: int
    rate: float
    epochs: int
    batch: int
    merged: int
    keep: int
    short: bool
    layout: str
    joining: str
    """The layout of what a client cannot work out of its first state by itself."""
    whole: str
    """The layout of the global model, where it is asked about; what came down is not repeated."""

    def record(self) -> ConfigRecord:
        return ConfigRecord(self._asdict())

    @classmethod
    def read(cls, content: RecordDict) -> Order:
        said = content.config_records.get("order", ConfigRecord())
        wanted = get_type_hints(cls)
        if said.keys() != wanted.keys():
            raise Refused(
                "a message of another version", f"it says {', '.join(said)}", "Install one version everywhere"
            )
        for name, kind in wanted.items():
            if type(said[name]) is not kind:
                raise Refused(f"{name} is {said[name]!r}", f"it is of type {kind.__name__}")
        return cls(**said)  # type: ignore[arg-type]  # checked just now


class Answer(NamedTuple):
    """What a client's training gives, checked."""

    up: State
    metrics: dict[str, float]


# ---- the nodes


@dataclass
class Fleet:
    """The nodes of a grid by the client each of them is, and how long to wait for them."""

    grid: Grid
    key: str
    life: int = 1
    timeout: float = 3600.0
    """Seconds after which a round ends with those who have answered."""
    minimum: int = 1
    """The fewest answers that make a round."""
    retries: int = 0
    """How often a round is repeated, with those who have not answered, before the run stops."""
    short: bool = False
    history: int = 0
    """Rounds that a resumed server may go back."""
    question: float = 60.0
    """Seconds to wait for a node to say who it is, and until it is asked again."""
    pause: float = 0.1
    tell: Callable[[str], None] = lambda text: None
    check: Callable[[], None] = lambda: None
    """Called while waiting; it raises if there is nothing to wait for any more."""
    nodes: dict[int, int] = field(default_factory=dict)
    """The node of each client."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Training rows of each client, as it said."""
    _known: set[int] = field(default_factory=set)
    _asked: dict[int, float] = field(default_factory=dict)
    _claims: dict[int, list[int]] = field(default_factory=dict)
    """The nodes that say they are a client, in the order in which they came."""

    def find(self) -> None:
        """Ask nodes that are new who they are; a client whose node is gone may be with another one."""
        now, online = time.monotonic(), set(self.grid.get_node_ids())
        patience = min(self.timeout, self.question)
        new = [n for n in sorted(online - self._known) if now - self._asked.get(n, -math.inf) > patience]
        if new:
            question = RecordDict({"who": ConfigRecord({"key": self.key})})
            asked = {node: (node, question) for node in new}
            answers, refused = self._exchange(QUERY, asked, _introduction, patience)
            self._asked |= dict.fromkeys(new, time.monotonic())
            for node, why in refused.items():
                self.tell(f"node {node} is not taken in: {why}")
            for node, (client, rows) in sorted(answers.items(), key=lambda item: item[1]):
                self._take_in(node, client, rows, online)
        for client, claims in self._claims.items():
            there = [node for node in claims if node in online]
            if there and self.nodes.get(client) not in online:
                self.nodes[client] = there[0]

    def _take_in(self, node: int, client: int, rows: int, online: set[int]) -> None:
        self._known.add(node)
        if self.sizes.setdefault(client, rows) != rows:
            self.tell(f"client {client} came with {rows} rows and had {self.sizes[client]}: left out")
            return
        claims = self._claims.setdefault(client, [])
        if any(other in online for other in claims):
            self.tell(f"node {node} says that it is client {client}, which node {claims[0]} is: left out")
        claims.append(node)

    def ask(
        self, kind: str, orders: Mapping[int, RecordDict], read: Callable[[int, RecordDict], T]
    ) -> tuple[dict[int, T], dict[int, str]]:
        """What the clients answer, read and checked, and why of others nothing can be used."""
        self.find()
        online = set(self.grid.get_node_ids())
        there = {k: self.nodes[k] for k in orders if self.nodes.get(k) in online}
        absent = {k: "it is not connected" for k in orders if k not in there}
        asked = {k: (node, orders[k]) for k, node in there.items()}
        answers, refused = self._exchange(kind, asked, read, self.timeout)
        return answers, refused | absent

    def wait(self, clients: list[int]) -> None:
        """Until these clients are connected, or nobody would wait for them any longer."""
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            self.find()
            online = set(self.grid.get_node_ids())
            if all(self.nodes.get(k) in online for k in clients):
                return
            time.sleep(self.pause)

    def push(self, kind: str, orders: Mapping[int, RecordDict]) -> None:
        """Send without waiting for an answer."""
        for k, content in orders.items():
            self.grid.push_messages([Message(content, self.nodes[k], kind, ttl=self.timeout)])

    def _exchange(
        self,
        kind: str,
        asked: Mapping[int, tuple[int, RecordDict]],
        read: Callable[[int, RecordDict], T],
        timeout: float,
    ) -> tuple[dict[int, T], dict[int, str]]:
        waiting: dict[str, int] = {}
        refused: dict[int, str] = {}
        for who, (node, content) in asked.items():
            # Valid for as long as anybody waits: what a node takes up later would answer a round that is over.
            sent = list(self.grid.push_messages([Message(content, node, kind, ttl=timeout)]))
            if sent and sent[0]:
                waiting[sent[0]] = who
            else:
                refused[who] = "the message could not be sent"
        answers: dict[int, T] = {}
        end = time.monotonic() + timeout
        while waiting and time.monotonic() < end:
            self.check()
            for reply in self.grid.pull_messages(list(waiting)):
                if reply.metadata.reply_to_message_id not in waiting or _expired(reply):
                    continue
                who = waiting.pop(reply.metadata.reply_to_message_id)
                try:
                    answers[who] = read(who, _content(reply))
                except Refused as error:
                    refused[who] = str(error)
                except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
                    refused[who] = f"an answer that cannot be read: {type(error).__name__}: {error}"
            if waiting:
                time.sleep(self.pause)
        return answers, refused | dict.fromkeys(waiting.values(), f"no answer within {timeout:g} s")


def _expired(reply: Message) -> bool:
    """Flower's own answer where a message's time ran out a moment before ours: the client has said nothing."""
    gone = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
    return reply.has_error() and reply.error.code in gone


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise Refused(
            f"it failed: {reply.error.reason.strip().splitlines()[-1] if reply.error.reason else 'no reason'}"
        )
    said = reply.content.config_records.get("refused", ConfigRecord())
    if said:
        raise Refused(str(said.get("why", "no reason")))
    return reply.content


def _introduction(node: int, content: RecordDict) -> tuple[int, int]:
    said = content.config_records.get("me", ConfigRecord())
    client, rows = said.get("client"), said.get("rows")
    if type(client) is not int or type(rows) is not int or not 0 <= client < LARGEST or not 0 < rows < LARGEST:
        raise Refused(
            f"it says that it is client {client!r} with {rows!r} rows", "both are whole numbers, from 0 and 1"
        )
    return client, rows


# ---- the server's end


class Ledger(Protocol):
    """Where the server finds what it knows of the clients' states."""

    def merged(self, client: int, own: State | None, round: int) -> int:
        """The round whose upload was merged last, where the run holds ``own`` for this client."""

    def kept(self, client: int, round: int) -> State:
        """What the run holds once this round is merged."""


class Flower:
    """An engine whose clients are nodes of a grid."""

    def __init__(
        self, algorithm: Algorithm, federation: Federation, fleet: Fleet, ledger: Ledger, stage: str = ""
    ) -> None:
        self.algorithm, self.federation = algorithm, federation
        self.fleet, self.ledger, self.stage = fleet, ledger, stage
        self.local = Sequential(algorithm, federation)
        self._agreed: tuple[State, Mapping[str, torch.Tensor]] | None = None

    def train(
        self, server: State, owns: Mapping[int, State], clients: list[int], round: int, rate: float, epochs: int
    ) -> Trained:
        """A round with those who answer; what cannot be used is left out, said, and recorded."""
        letters = self.letters(server, owns, round, rate, epochs)
        answers: dict[int, Answer] = {}
        refused: dict[int, str] = {}
        need = min(self.fleet.minimum, len(clients))
        for attempt in range(self.fleet.retries + 1):
            missing = [k for k in clients if k not in answers]
            if attempt:
                self.fleet.tell(f"{len(answers)} of {need} answers: asked again")
                self.fleet.wait(missing)
            new, refused = self._train(letters, missing)
            answers |= new
            for k, why in sorted(refused.items()):
                self.fleet.tell(f"client {k} is left out: {why}")
            if len(answers) >= need:
                break
        else:
            raise TooFew(
                f"round {round}: {len(answers)} of {len(clients)} clients answered and {need} are needed",
                "; ".join(f"client {k}: {why}" for k, why in sorted(refused.items())[:3]),
                "What was saved is from before it: see to the clients, then go on from the last checkpoint",
            )
        return self._trained(letters, answers, round, rate, epochs, refused)

    def _train(self, letters: Letters, clients: list[int]) -> tuple[dict[int, Answer], dict[int, str]]:
        def read(k: int, content: RecordDict) -> Answer | None:
            return None if "forgot" in content.config_records else letters.answer(k, content)

        answers, refused = self.fleet.ask(TRAIN, {k: letters.train(k) for k in clients}, read)
        forgot = [k for k, answer in answers.items() if answer is None]
        if forgot:  # a folder restored from an older copy: what never changes is sent once more
            letters.forget(forgot)
            again, why = self.fleet.ask(TRAIN, {k: letters.train(k) for k in forgot}, read)
            answers, refused = answers | again, refused | why
        return {k: answer for k, answer in answers.items() if answer is not None}, refused

    def _trained(
        self,
        letters: Letters,
        answers: Mapping[int, Answer],
        round: int,
        rate: float,
        epochs: int,
        refused: Mapping[int, str],
    ) -> Trained:
        order = sorted(answers)  # they came in any order, in which sums would round differently
        ids = [self.federation.client(k, round, rate, epochs) for k in order]
        return Trained(
            ups=tree.stack([answers[k].up for k in order]),
            cohort=stack_clients(ids),
            owns={k: self.ledger.kept(k, round) for k in order},
            metrics={name: [answers[k].metrics[name] for k in order] for name in answers[order[0]].metrics},
            rows=sum(epochs * int(who.size) for who in ids),
            bytes_down=sum(letters.bytes_down(k) for k in order),
            bytes_up=sum(letters.bytes_up(k) for k in order),
            refused={str(k): refused[k] for k in sorted(refused)},
        )

    def agreement(self, server: State, k: int) -> tuple[State, Mapping[str, torch.Tensor]]:
        """What an upload looks like, and its metrics: those of a client which makes no step; the same in all rounds."""
        if self._agreed is None:
            task, algorithm = self.federation.task, self.algorithm
            client = self.federation.client(k, 1, 0.1, 1)
            ctx = Context(algorithm.send(task, server, client), algorithm.join(task, server, client), client)
            done = algorithm.finish(task, ctx, algorithm.begin(task, ctx))
            self._agreed = done.up, done.metrics
        return self._agreed

    def evaluate(
        self, server: State, owns: Mapping[int, State], clients: list[int], round: int
    ) -> tuple[dict[str, dict[int, list[Tally]]], dict[int, str]]:
        """For each answer of the method, of each client: what it makes of its test and of its validation rows."""
        letters = self.letters(server, owns, round, 0.0, 0)
        answers, refused = self.fleet.ask(EVALUATE, {k: letters.evaluate(k) for k in clients}, self._tallies)
        kinds = self.algorithm.answers_on(self.federation.task)
        return {kind: {k: answers[k][kind] for k in sorted(answers)} for kind in kinds}, refused

    def _tallies(self, k: int, content: RecordDict) -> dict[str, list[Tally]]:
        found = {}
        for kind in self.algorithm.answers_on(self.federation.task):
            parts = [content.metric_records.get(f"{kind}.{part}") for part in ("test", "validation")]
            found[kind] = [tally for tally in (_tally(record) for record in parts) if tally is not None]
            classes = {len(tally.class_rows) for tally in found[kind]}
            if not found[kind] or not classes <= {0, self.federation.task.classes}:
                raise Refused(f"no counts of its {kind} model, or of {classes} classes")
        return found

    def letters(self, server: State, owns: Mapping[int, State], round: int, rate: float, epochs: int) -> Letters:
        return Letters(self, server, owns, round, rate, epochs, Encoder(self.fleet.short))


def _tally(record: MetricRecord | None) -> Tally | None:
    if record is None:
        return None
    values: dict[str, Any] = dict(record)
    numbers = [values.get(name) for name in TALLY]
    if not all(isinstance(n, int | float) and math.isfinite(n) and 0 <= n < LARGEST * LARGEST for n in numbers):
        raise Refused(f"counts {dict(zip(TALLY, numbers, strict=True))}", "they are finite and not negative")
    rows, hits, loss, few, few_hits = numbers
    if not (0 < rows < LARGEST and hits <= rows and few_hits <= few <= rows):  # type: ignore[operator]  # numbers
        raise Refused(f"counts {dict(zip(TALLY, numbers, strict=True))}", "parts are not larger than the whole")
    by_class = [tuple(int(n) for n in values.get(name, ())) for name in ("class_rows", "class_hits")]
    if by_class[0] and (sum(by_class[0]) != rows or sum(by_class[1]) != hits or min(map(min, by_class)) < 0):
        raise Refused(f"classes {by_class}", f"they sum up to {rows} rows and {hits} hits")
    return Tally(int(rows), int(hits), float(loss), int(few), int(few_hits), *by_class)  # type: ignore[arg-type]


class Letters:
    """The messages of one round, and how their answers are read."""

    def __init__(
        self,
        engine: Flower,
        server: State,
        owns: Mapping[int, State],
        round: int,
        rate: float,
        epochs: int,
        encoder: Encoder,
    ) -> None:
        self.engine, self.server, self.owns, self.round, self.rate, self.epochs = (
            engine,
            server,
            owns,
            round,
            rate,
            epochs,
        )
        self.encoder, self._downs, self._sent, self._forgot = encoder, dict[int, State](), dict[int, int](), set[int]()
        self._digests: dict[int, tuple[torch.Tensor, str]] = {}
        self._first: State | None = None

    def forget(self, clients: Iterable[int]) -> None:
        """Send these clients everything."""
        self._forgot |= set(clients)

    def train(self, k: int) -> RecordDict:
        return self._letter(k, None)

    def evaluate(self, k: int) -> RecordDict:
        """With the global model, if there is one to ask: mostly it is what comes down anyway."""
        task, algorithm = self.engine.federation.task, self.engine.algorithm
        asked = GLOBAL in algorithm.answers_on(task)
        return self._letter(k, algorithm.global_model(task, self.server) if asked else None)

    def _letter(self, k: int, whole: Model | None) -> RecordDict:
        engine, fleet = self.engine, self.engine.fleet
        federation = engine.federation
        client = federation.client(k, self.round, self.rate, self.epochs)
        down = engine.algorithm.send(federation.task, self.server, client)
        merged = engine.ledger.merged(k, self.owns.get(k), self.round)
        leaves = tree.flatten(down)
        changing = tree.flatten(engine.local.arriving(down, first=False))
        constant = {path: self._digest(leaf) for path, leaf in leaves.items() if path not in changing}
        sent = leaves if merged == NEVER or k in self._forgot else changing
        joining = self._joining(down, client) if merged == NEVER else {}
        model = {} if whole is None else tree.flatten(State(whole, {}))
        beside = {path: leaf for path, leaf in model.items() if leaves.get(path) is not leaf}
        order = Order(
            key=fleet.key,
            life=fleet.life,
            stage=engine.stage,
            client=k,
            population=federation.population,
            round=self.round,
            rate=float(self.rate),
            epochs=self.epochs,
            batch=federation.batch,
            merged=merged,
            keep=max(self.round - 1 - fleet.history, 0),
            short=fleet.short,
            layout=Layout.of(down, constant).to_text(),
            joining=Layout.of_leaves(joining).to_text() if joining else "",
            whole="" if whole is None else Layout.of(State(whole, {})).to_text(),
        )
        self._downs[k] = down
        self._sent[k] = sent_bytes(sent, fleet.short, frozenset(constant)) + sent_bytes(joining, False)
        return RecordDict(
            {
                "order": order.record(),
                "down": self.encoder.record(sent, frozenset(constant)),
                "joining": self.encoder.record(joining, frozenset(joining)),
                "whole": self.encoder.record(beside, frozenset(beside)),
            }
        )

    def answer(self, k: int, content: RecordDict) -> Answer:
        """A client's answer, if it is what was agreed; else nothing of it is used."""
        said = content.config_records.get("said", ConfigRecord())
        federation = self.engine.federation
        rows = self.epochs * len(federation.split.train[k])
        expected = {"client": k, "round": self.round, "rows": rows}
        if dict(said) != expected:
            raise Refused(f"it says {dict(said)}", f"{expected} was asked for")
        if "up" not in content.array_records:
            raise Refused("no arrays")
        template, metrics = self.engine.agreement(self.server, k)
        names = schema(tree.flatten(template))
        tensors = decode(content.array_records["up"], names, self.encoder.short)
        if self.encoder.short:
            tensors = {path: leaf + self._base(k).get(path, 0) for path, leaf in tensors.items()}
        device = federation.task.device
        up = as_state(refill({path: leaf.to(device) for path, leaf in tensors.items()}, list(empty_dicts(template))))
        measured = dict(content.metric_records.get("metrics", MetricRecord()))
        if measured.keys() != metrics.keys() or not all(_is_number(value) for value in measured.values()):
            raise Refused(f"metrics {measured}", f"finite numbers called {', '.join(metrics)} were agreed")
        return Answer(up, {name: float(measured[name]) for name in metrics})  # type: ignore[arg-type]  # checked

    def bytes_down(self, k: int) -> int:
        return self._sent[k]

    def bytes_up(self, k: int) -> int:
        return sent_bytes(tree.flatten(self.engine.agreement(self.server, k)[0]), self.encoder.short)

    def _base(self, k: int) -> Tensors:
        return {path: leaf.cpu() for path, leaf in tree.flatten(self._downs[k]).items()}

    def _joining(self, down: State, client: Client) -> Tensors:
        """Those leaves of a client's first state that it cannot work out from what comes down and the seed."""
        task, algorithm = self.engine.federation.task, self.engine.algorithm
        real = tree.flatten(algorithm.join(task, self.server, client))
        if self._first is None:
            self._first = blank(algorithm, self.engine.federation)
        guess = tree.flatten(guessed(algorithm, task, self._first, down, client))
        return {path: leaf for path, leaf in real.items() if path not in guess or not tree.equal(leaf, guess[path])}

    def _digest(self, leaf: torch.Tensor) -> str:
        found = self._digests.get(id(leaf))
        if found is None:
            found = self._digests[id(leaf)] = leaf, digest(leaf)
        return found[1]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def blank(algorithm: Algorithm, federation: Federation) -> State:
    """The server before the first round, as a client can know it: without the others' sizes."""
    ones = torch.ones(federation.population, dtype=torch.int64, device=federation.task.device)
    return algorithm.init(federation.task, Roster(ones))


def guessed(algorithm: Algorithm, task: Task, first: State, down: State, client: Client) -> State:
    """A client's first state, from what came down, laid over what the seed gives: the server as a client knows it."""
    params, stats = ({**before, **now} for before, now in zip(first.model, down.model, strict=True))
    extra = first.extra | {name: part for name, part in down.extra.items() if _alike(part, first.extra.get(name, part))}
    try:
        return algorithm.join(task, State(Model(params, stats), extra), client)
    except (KeyError, IndexError, RuntimeError):  # it needs more of the server than that: all of it is sent
        return State(Model({}, {}), {})


def _alike(a: Any, b: Any) -> bool:
    """Whether two trees may stand for each other; a part of what the server holds is not the whole."""
    return schema(tree.flatten(a)) == schema(tree.flatten(b))


# ---- the client's end


class Site(NamedTuple):
    """A client at home: who it is, what it holds, and where it keeps its state."""

    client: int
    rows: int
    algorithm: Algorithm
    federation: Federation
    store: Store
    counts_classes: bool = True
    """Whether it tells the server how many rows of each class it has tested."""
    threads: int = 0
    """Those of an operation; 0 goes by the work."""


class Home(Protocol):
    """How a node finds its own client: by its context alone, and for an order, the method and the federation."""

    def client(self, context: NodeContext, key: str) -> tuple[int, int]:
        """Its number and its training rows."""

    def site(self, context: NodeContext, order: Order) -> Site: ...

    def conclude(self, site: Site, order: Order, whole: Model | None, personal: Model | None) -> None:
        """Keep the final models."""


def client_app(home: Home) -> ClientApp:
    """A Flower ClientApp that answers the server's messages from this home."""
    app = ClientApp()

    def answering(work: Callable[[Message, NodeContext], RecordDict]) -> Callable[[Message, NodeContext], Message]:
        def handle(message: Message, context: NodeContext) -> Message:
            try:
                content = work(message, context)
            except FedraneError as error:  # the server is told why; anything else is a defect, which Flower reports
                content = RecordDict({"refused": ConfigRecord({"why": str(error)})})
            return Message(content, reply_to=message)

        return handle

    def visiting(do: Callable[[Visit], RecordDict]) -> Callable[[Message, NodeContext], RecordDict]:
        def work(message: Message, context: NodeContext) -> RecordDict:
            with limited(1) as most:
                visit = Visit(home, message, context)
                with limited(visit.threads(most)):
                    return do(visit)

        return work

    @app.query()
    @answering
    def query(message: Message, context: NodeContext) -> RecordDict:
        key = str(message.content.config_records["who"]["key"])
        client, rows = home.client(context, key)
        return RecordDict({"me": ConfigRecord({"client": client, "rows": rows})})

    app.train()(answering(visiting(Visit.train)))
    app.evaluate()(answering(visiting(Visit.evaluate)))
    app.evaluate("conclude")(answering(visiting(Visit.conclude)))
    return app


class Visit:
    """One message at its client."""

    def __init__(self, home: Home, message: Message, context: NodeContext) -> None:
        self.home, self.content = home, message.content
        self.order = Order.read(message.content)
        self.site = home.site(context, self.order)
        if self.site.client != self.order.client:
            raise Refused(f"a message for client {self.order.client}", f"this is client {self.site.client}")
        self.site.store.admit(self.order.life)
        self.kept = self.site.store.settle(self.order.merged, self.order.keep)
        self.engine = Sequential(self.site.algorithm, self.site.federation)
        self.layout = Layout.from_text(self.order.layout)

    def threads(self, most: int) -> int:
        """As many as the sequential engine would take here, so that a client ends with the same bits."""
        site = self.site
        return site.threads or automatic_threads("sequential", site.algorithm, site.federation, most)

    def train(self) -> RecordDict:
        order, site = self.order, self.site
        received = self._received()
        if received is None:
            return RecordDict({"forgot": ConfigRecord({"round": order.round})})
        down, constant = received
        ctx = self._context(down)
        done = self.engine.train_client(ctx, order.client, order.round, order.epochs)
        site.store.put(order.round, Kept(tree.map(lambda leaf: leaf.cpu().contiguous(), done.own), constant))
        up = tree.flatten(done.up)
        if order.short:
            base = tree.flatten(down)
            up = {path: leaf - base[path] if path in base else leaf for path, leaf in up.items()}
        rows = order.epochs * len(site.federation.split.train[order.client])
        return RecordDict(
            {
                "up": Encoder(order.short).record(up),
                "metrics": MetricRecord({name: float(value) for name, value in done.metrics.items()}),
                "said": ConfigRecord({"client": order.client, "round": order.round, "rows": rows}),
            }
        )

    def evaluate(self) -> RecordDict:
        content = RecordDict()
        for kind, model in self._models().items():
            federation = self.site.federation
            models = [model] * federation.population
            for part, tallies in zip(
                ("test", "validation"), answer(self.engine, federation, self.site.algorithm, models), strict=True
            ):
                if tallies:
                    content[f"{kind}.{part}"] = self._counts(tallies[self.order.client])
        return content

    def conclude(self) -> RecordDict:
        """Keep the last models; a client that never took part first trains on its own rows, for itself alone."""
        models = self._models(personalise=self.order.merged == NEVER)
        self.home.conclude(self.site, self.order, models.get(GLOBAL), models.get(PERSONAL))
        return RecordDict({"said": ConfigRecord({"client": self.order.client, "round": self.order.round})})

    def _models(self, personalise: bool = False) -> dict[str, Model]:
        received = self._received()
        if received is None:
            raise Refused("what was sent once is not here any more", "the client's folder was changed", "Restore it")
        down, _ = received
        task, algorithm = self.site.federation.task, self.site.algorithm
        ctx = self._context(down)
        models: dict[str, Model] = {}
        if self.order.whole:
            models[GLOBAL] = self._whole(down)
        if personalise:
            done = self.engine.train_client(ctx, self.order.client, self.order.round, self.order.epochs)
            trained = Model(*({**a, **b} for a, b in zip(down.model, done.up.model, strict=True)))
            ctx = ctx._replace(own=done.own)
            models[PERSONAL] = trained
        if PERSONAL in algorithm.answers_on(task):
            models[PERSONAL] = algorithm.personal_model(task, ctx)
        return models

    def _whole(self, down: State) -> Model:
        layout = Layout.from_text(self.order.whole)
        came = self.content.array_records["whole"]
        tensors = self._checked({path: leaf for path, leaf in layout.schema.items() if path in came}, came, short=False)
        return layout.state({**tree.flatten(down), **tensors}).model

    def _received(self) -> tuple[State, Tensors] | None:
        """What came down, with what came once before; nothing, if that is not here."""
        came, layout = self.content.array_records["down"], self.layout
        expected = layout.schema
        parts = self.site.federation.task.parts.items()
        shapes = {f"{part}.{name}": tuple(p.shape) for part, module in parts for name, p in module.named_parameters()}
        for path, leaf in expected.items():
            if path.startswith(PARAMS) and shapes.get(path.removeprefix(PARAMS)) != leaf.shape:
                raise Refused(f"{path} of {leaf.shape} came down", "this client's network has no such parameter")
        held = self.kept.constant if self.kept else {}
        constant: Tensors = {}
        for path, name in layout.constant.items():
            mine = held.get(path.removeprefix(PARAMS))
            if path not in came:
                if mine is None or digest(mine) != name:
                    return None
                constant[path] = mine
        wanted = {path: leaf for path, leaf in expected.items() if path not in constant}
        tensors = self._checked(wanted, came, self.order.short)
        everything = {**tensors, **{path: leaf.to(self.site.federation.task.device) for path, leaf in constant.items()}}
        remembered = {path.removeprefix(PARAMS): everything[path].cpu() for path in layout.constant}
        return layout.state(everything), remembered

    def _checked(self, wanted: Any, came: Any, short: bool) -> Tensors:
        device = self.site.federation.task.device
        tensors = decode(came, wanted, short, frozenset(self.layout.constant))
        return {path: leaf.to(device) for path, leaf in tensors.items()}

    def _context(self, down: State) -> Context:
        order, federation, algorithm = self.order, self.site.federation, self.site.algorithm
        client = federation.client(order.client, order.round, order.rate, order.epochs)
        device = federation.task.device
        if self.kept:
            own = tree.map(lambda leaf: leaf.to(device), self.kept.own)
            return Context(down, own, client)
        guess = guessed(algorithm, federation.task, blank(algorithm, federation), down, client)
        empty, told = list(empty_dicts(guess)), dict[str, torch.Tensor]()
        if order.joining:
            layout = Layout.from_text(order.joining)
            told = self._checked(layout.schema, self.content.array_records["joining"], short=False)
        return Context(down, as_state(refill({**tree.flatten(guess), **told}, empty)), client)

    def _counts(self, tally: Tally) -> MetricRecord:
        values = {name: value for name, value in tally._asdict().items() if name in TALLY}
        if self.site.counts_classes:
            values |= {"class_rows": list(tally.class_rows), "class_hits": list(tally.class_hits)}
        return MetricRecord(values)


def where(folder: Path, client: int) -> Path:
    """A client's folder among others."""
    return folder / f"client-{client:06d}"

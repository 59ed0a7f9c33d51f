"""The client's end: a Flower ClientApp that trains, evaluates and keeps its state by the code of a local run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from flwr.app import Array, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.app import Context as NodeContext
from flwr.clientapp import ClientApp

from fedrane import tree
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data.federation import Federation
from fedrane.engines import automatic_threads
from fedrane.engines.evaluation import tally_predictions
from fedrane.engines.sequential import Sequential
from fedrane.errors import Diverged, FedraneError
from fedrane.flower.client_state import NEVER, ClientStateStore, SavedState, derive_first_state, initial_server_state
from fedrane.flower.codec import Encoder, Layout, MessageError, Schema, decode, digest
from fedrane.flower.messages import PARAMS, ClientRequest, count_record, identity_record, refusal_record
from fedrane.system.threads import limited
from fedrane.task import Context, Model, State
from fedrane.training.run_folder import as_state, empty_dicts, refill
from fedrane.tree import Tensors

LOG = logging.getLogger("flwr")


@dataclass(frozen=True)
class LocalClient:
    """A node's client: its number, its data, its method, and where it keeps its state."""

    index: int
    algorithm: Algorithm
    federation: Federation
    store: ClientStateStore
    reports_classes: bool = True
    """Whether the server gets the number of its test examples of each class."""
    threads: int = 0
    """Those of an operation; 0 goes by the work."""


class ClientProvider(Protocol):
    """How a node finds its client: its identity by its context alone; for a request, method and data as well."""

    def identity(self, context: NodeContext, key: str) -> tuple[int, int]:
        """The client's number, and how many examples it has."""

    def client(self, context: NodeContext, request: ClientRequest) -> LocalClient: ...

    def sends_error_texts(self, context: NodeContext) -> bool:
        """Whether the server gets the texts of errors, which may name files and labels, and not only their kind."""

    def keep_models(
        self, client: LocalClient, request: ClientRequest, global_model: Model | None, personal: Model | None
    ) -> None:
        """Save the models that the server has delivered."""


def client_app(provider: ClientProvider) -> ClientApp:
    """A Flower ClientApp that replies to the server's messages for the provider's client."""
    app = ClientApp()

    def replying(work: Callable[[Message, NodeContext], RecordDict]) -> Callable[[Message, NodeContext], Message]:
        def handle(message: Message, context: NodeContext) -> Message:
            try:
                content = work(message, context)
            except Exception as error:  # Flower would send its text to the server, whatever that holds
                LOG.error("%s", error, exc_info=None if isinstance(error, FedraneError) else error)
                content = refusal_record(error, provider.sends_error_texts(context))
            return Message(content, reply_to=message)

        return handle

    def handling(do: Callable[[RequestHandler], RecordDict]) -> Callable[[Message, NodeContext], RecordDict]:
        def work(message: Message, context: NodeContext) -> RecordDict:
            with limited(1) as max_threads:
                handler = RequestHandler(provider, message, context)
                with limited(handler.threads(max_threads)):
                    return do(handler)

        return work

    @app.query()
    @replying
    def query(message: Message, context: NodeContext) -> RecordDict:
        key = str(message.content.config_records["query"]["key"])
        return identity_record(*provider.identity(context, key))

    app.train()(replying(handling(RequestHandler.train)))
    app.evaluate()(replying(handling(RequestHandler.evaluate)))
    app.evaluate("deliver")(replying(handling(RequestHandler.deliver)))
    return app


class RequestHandler:
    """Handles one message at its client."""

    def __init__(self, provider: ClientProvider, message: Message, context: NodeContext) -> None:
        self.provider, self.content = provider, message.content
        self.request = request = ClientRequest.read(message.content)
        self.client = provider.client(context, request)
        if self.client.index != request.client:
            raise MessageError(f"a message for client {request.client}", f"this is client {self.client.index}")
        self.client.store.require_current(request.server_start)
        self.saved = self.client.store.committed(request.aggregated, request.oldest)
        self.engine = Sequential(self.client.algorithm, self.client.federation)
        self.layout = Layout.from_text(request.layout)

    def threads(self, max_threads: int) -> int:
        """As many as the sequential engine would take here, so that a client ends with the same bits."""
        client = self.client
        return client.threads or automatic_threads("sequential", client.algorithm, client.federation, max_threads)

    def train(self) -> RecordDict:
        request = self.request
        received = self._received()
        if received is None:
            return RecordDict({"missing_constants": ConfigRecord({"round": request.round})})
        down, constant = received
        done = self.engine.train_client(self._context(down), request.client, request.round, request.length)
        client_state = tree.map(lambda leaf: leaf.cpu().contiguous(), done.client_state)
        if not tree.finite(client_state):  # the server refuses such an upload, and never sees this
            raise Diverged(f"client {request.client}'s own state is no longer finite in round {request.round}")
        self.client.store.put(request.round, SavedState(client_state, constant))
        up = tree.flatten(done.up)
        if request.bf16:  # the change is rounded, and not the model
            base = tree.flatten(down)
            up = {path: leaf - base[path] if path in base else leaf for path, leaf in up.items()}
        examples = self.client.federation.examples_trained([request.client], request.length)
        return RecordDict(
            {
                "up": Encoder(request.bf16).record(up),
                "metrics": MetricRecord({name: float(value) for name, value in done.metrics.items()}),
                "reply": ConfigRecord({"client": request.client, "round": request.round, "num_examples": examples}),
            }
        )

    def evaluate(self) -> RecordDict:
        content, client = RecordDict(), self.client
        for which, model in self._models().items():
            models = [model] * client.federation.population
            tallies = tally_predictions(self.engine, client.federation, models)
            for part, each in zip(("test", "validation"), tallies, strict=True):
                if each:
                    content[f"{which}.{part}"] = count_record(each[client.index], client.reports_classes)
        return content

    def deliver(self) -> RecordDict:
        """Keep the models; a client that never took part first trains on its own examples, for itself alone."""
        models = self._models(personalise=self.request.aggregated == NEVER)
        if not tree.finite(models):
            raise Diverged(f"the models of client {self.request.client} are not finite")
        self.provider.keep_models(self.client, self.request, models.get(GLOBAL), models.get(PERSONAL))
        return RecordDict({"reply": ConfigRecord({"client": self.request.client, "round": self.request.round})})

    def _models(self, personalise: bool = False) -> dict[str, Model]:
        received = self._received()
        if received is None:
            raise MessageError(
                "what was sent once is not here any more", "the client's folder was changed", "Restore it"
            )
        down, _ = received
        request, algorithm, task = self.request, self.client.algorithm, self.client.federation.task
        ctx = self._context(down)
        models: dict[str, Model] = {}
        if request.global_model:
            models[GLOBAL] = self._global_model(down)
        if personalise:
            done = self.engine.train_client(ctx, request.client, request.round, request.length)
            models[PERSONAL] = Model(*({**a, **b} for a, b in zip(down.model, done.up.model, strict=True)))
            ctx = ctx._replace(client_state=done.client_state)
        if PERSONAL in algorithm.models_on(task):
            models[PERSONAL] = algorithm.personal_model(task, ctx)
        return models

    def _global_model(self, down: State) -> Model:
        layout = Layout.from_text(self.request.global_model)
        received = self._arrays("global_model")
        expected = {path: leaf for path, leaf in layout.schema.items() if path in received}
        tensors = self._decoded(expected, received, bf16=False)
        return layout.state({**tree.flatten(down), **tensors}).model

    def _received(self) -> tuple[State, Tensors] | None:
        """What was received, with the constants received before; None if those are missing."""
        received, layout = self._arrays("down"), self.layout
        expected = layout.schema
        parts = self.client.federation.task.parts.items()
        shapes = {f"{part}.{name}": tuple(p.shape) for part, module in parts for name, p in module.named_parameters()}
        for path, leaf in expected.items():
            if path.startswith(PARAMS) and shapes.get(path.removeprefix(PARAMS)) != leaf.shape:
                raise MessageError(f"{path} {leaf.shape} was received", "this client's network has no such parameter")
        held = self.saved.constant if self.saved else {}
        constant: Tensors = {}
        for path, name in layout.constant.items():
            mine = held.get(path.removeprefix(PARAMS))
            if path not in received:
                if mine is None or digest(mine) != name:
                    return None
                constant[path] = mine
        wanted = {path: leaf for path, leaf in expected.items() if path not in constant}
        tensors = self._decoded(wanted, received, self.request.bf16)
        device = self.client.federation.task.device
        tensors |= {path: leaf.to(device) for path, leaf in constant.items()}
        kept = {path.removeprefix(PARAMS): tensors[path].cpu() for path in layout.constant}
        return layout.state(tensors), kept

    def _arrays(self, name: str) -> Mapping[str, Array]:
        record = self.content.array_records.get(name)
        if record is None:
            raise MessageError(f"a message without the arrays {name!r}")
        return record

    def _decoded(self, expected: Schema, received: Mapping[str, Array], bf16: bool) -> Tensors:
        device = self.client.federation.task.device
        tensors = decode(received, expected, bf16, frozenset(self.layout.constant))
        return {path: leaf.to(device) for path, leaf in tensors.items()}

    def _context(self, down: State) -> Context:
        request, federation, algorithm = self.request, self.client.federation, self.client.algorithm
        client = federation.client(request.client, request.round, request.lr, request.length)
        if self.saved:
            client_state = tree.map(lambda leaf: leaf.to(federation.task.device), self.saved.client_state)
            return Context(down, client_state, client)
        initial = initial_server_state(algorithm, federation)
        derived = derive_first_state(algorithm, federation.task, initial, down, client)
        sent: dict[str, torch.Tensor] = {}
        if request.first_state:
            layout = Layout.from_text(request.first_state)
            sent = self._decoded(layout.schema, self._arrays("first_state"), bf16=False)
        client_state = as_state(refill({**tree.flatten(derived), **sent}, list(empty_dicts(derived))))
        return Context(down, client_state, client)


def client_folder(folder: Path, client: int) -> Path:
    """A client's folder among others."""
    return folder / f"client-{client:06d}"

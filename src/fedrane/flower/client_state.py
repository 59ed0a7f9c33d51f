"""A client's state between rounds, in its own folder and in Flower's context; and its first state.

Each round leaves a copy, keyed by its number. The newest is pending: only the server's next message shows whether its
upload was aggregated. Every message names the round whose upload was aggregated last. Later copies were lost, or belong
to rounds that a resumed server has given up: they are dropped. So a killed node, a lost upload and a server that goes
back to its checkpoint all find the right copy.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any, NamedTuple

import torch
from flwr.app import ConfigRecord, RecordDict

from fedrane import tree
from fedrane.algorithm import Algorithm
from fedrane.data.federation import Federation
from fedrane.errors import CheckpointError
from fedrane.flower.codec import Encoder, MessageError, schema
from fedrane.system.files import PRIVATE, clear_errors, private_folder, write_atomically
from fedrane.task import Client, Model, Roster, State, Task
from fedrane.training.run_folder import Checkpoint, decode, read, read_header, write
from fedrane.tree import Tensors

LOG = logging.getLogger("flwr")
NEVER = -1
"""The round of a client whose upload was never aggregated."""
SERVER_START = "server_start"


class SavedState(NamedTuple):
    client_state: State
    constant: Tensors
    """Parameters that were received once and never change at the server."""


class ClientStateStore:
    """The copies of one client in one experiment."""

    def __init__(self, folder: Path, state: RecordDict, key: str, durable: bool = True) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", key):
            raise MessageError(f"the experiment's key is {key!r}", "it becomes the name of a folder")
        self.folder, self._state, self._prefix, self._durable = folder / key, state, f"fedrane.{key}.", durable

    def require_current(self, server_start: int) -> None:
        """Refuse what a server sent before it was restarted: it may arrive late."""
        path = self.folder / SERVER_START
        seen = int(path.read_text()) if path.is_file() else 0
        if server_start < seen:
            raise MessageError(f"a message of server start {server_start}", f"the server is now in start {seen}")
        if server_start > seen:
            private_folder(self.folder)
            write_atomically(path, str(server_start), PRIVATE)

    def committed(self, aggregated: int, oldest: int) -> SavedState | None:
        """The copy of the round aggregated last; None for ``NEVER``.

        Later copies are dropped. Of those up to ``oldest``, the earliest round that a resumed server may go back to,
        only the newest is kept.
        """
        held = sorted(self._rounds())
        for round in held:
            newer = [other for other in held if round < other <= min(oldest, aggregated)]
            if round > aggregated or newer:
                self._drop(round)
        return None if aggregated == NEVER else self._get(aggregated)

    def put(self, round: int, saved: SavedState) -> None:
        copy = Checkpoint(round, State(Model(saved.constant, {}), {}), {0: saved.client_state})
        with clear_errors(self._path(round)):
            private_folder(self.folder)
            tensors, metadata = write(self._path(round), copy, self._durable, private=True)
        self._state[self._name(round)] = Encoder().record(tensors)
        self._state[self._name(round) + ".metadata"] = ConfigRecord({"fedrane": metadata["fedrane"]})

    # ---- one copy in both stores

    def _get(self, round: int) -> SavedState:
        problem = "no copy of it is left"
        if self._path(round).is_file():
            try:
                copy = read(self._path(round))
                return SavedState(copy.client_states[0], copy.server.model.params)
            except CheckpointError as error:
                problem = str(error)
        if self._name(round) in self._state.array_records:
            arrays = self._state.array_records[self._name(round)]
            header = str(self._state.config_records[self._name(round) + ".metadata"]["fedrane"])
            tensors = {path: torch.from_numpy(array.numpy().copy()) for path, array in arrays.items()}
            try:
                copy = decode(tensors, read_header(header, "Flower's copy"))
                return SavedState(copy.client_states[0], copy.server.model.params)
            except (CheckpointError, ValueError) as error:
                problem += f", and in Flower's context: {error}"
        LOG.error("%s should hold the state of round %s: %s", self.folder, round, problem)
        raise MessageError(
            f"this client's state of round {round} is lost",
            "the server has aggregated that round, and the client's folder should hold it",
            "Restore that folder",
        )

    def _drop(self, round: int) -> None:
        self._path(round).unlink(missing_ok=True)
        for name in (self._name(round), self._name(round) + ".metadata"):
            self._state.pop(name, None)

    def _rounds(self) -> set[int]:
        files = self.folder.glob("round-*.safetensors")
        names = [path.stem.removeprefix("round-") for path in files]
        names += [
            name.removeprefix(self._prefix) for name in self._state.array_records if name.startswith(self._prefix)
        ]
        return {int(name) for name in names if name.isdigit()}

    def _path(self, round: int) -> Path:
        return self.folder / f"round-{round:06d}.safetensors"

    def _name(self, round: int) -> str:
        return f"{self._prefix}{round}"


# ---- the first state


def initial_server_state(algorithm: Algorithm, federation: Federation) -> State:
    """The server before the first round, as a client can know it: without the others' sizes."""
    ones = torch.ones(federation.population, dtype=torch.int64, device=federation.task.device)
    return algorithm.init(federation.task, Roster(ones))


def derive_first_state(algorithm: Algorithm, task: Task, initial: State, down: State, client: Client) -> State:
    """A client's first state, from what was received and the initial server state; empty if that is not enough."""
    params, stats = ({**before, **now} for before, now in zip(initial.model, down.model, strict=True))
    extra = {name: part for name, part in down.extra.items() if _same_schema(part, initial.extra.get(name, part))}
    try:
        return algorithm.join(task, State(Model(params, stats), initial.extra | extra), client)
    except (KeyError, IndexError, RuntimeError):  # it needs more of the server than that: all of it is sent
        return State(Model({}, {}), {})


def _same_schema(a: Any, b: Any) -> bool:
    """Whether both states have the same paths, dtypes and shapes."""
    return schema(tree.flatten(a)) == schema(tree.flatten(b))

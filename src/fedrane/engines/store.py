"""What a client of a federation keeps between rounds: in its own folder, and in Flower's context.

Each round leaves a copy, keyed by its number. The newest is pending: the client learns only from the server's next
message whether its upload was merged. Every message names the round whose upload the server has merged last; copies
beyond it were lost or belong to a future that a resumed server has given up, and are dropped. So a killed node, a lost
upload and a server that goes back to its checkpoint all find the right one.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import torch
from flwr.app import ConfigRecord, RecordDict

from fedrane.engines.codec import Encoder, Refused
from fedrane.errors import CheckpointError
from fedrane.files import clear_errors, write_atomically
from fedrane.task import Model, State
from fedrane.training.run_folder import Checkpoint, decode, encode, read, write
from fedrane.tree import Tensors

NEVER = -1
"""The round of a client whose upload was never merged."""
LIFE = "life"


class Kept(NamedTuple):
    own: State
    constant: Tensors
    """Parameters that came down once and never change at the server."""


class Store:
    """One client's copies in one experiment."""

    def __init__(self, folder: Path, state: RecordDict, key: str, durable: bool = True) -> None:
        if not re.fullmatch(r"[0-9a-f]{8,64}", key):
            raise Refused(f"the experiment's key is {key!r}", "it becomes the name of a folder")
        self.folder, self._state, self._prefix, self._durable = folder / key, state, f"fedrane.{key}.", durable

    def admit(self, life: int) -> None:
        """A server that was resumed counts its lives: what an earlier one sent may arrive late, and is refused."""
        path = self.folder / LIFE
        seen = int(path.read_text()) if path.is_file() else 0
        if life < seen:
            raise Refused(f"a message of the server's life {life}", f"it was resumed since, and is in life {seen}")
        if life > seen:
            write_atomically(path, str(life))

    def settle(self, merged: int, keep: int) -> Kept | None:
        """The copy of the round merged last; later ones are dropped, and of those up to ``keep`` all but the newest."""
        held = sorted(self._rounds())
        for round in held:
            newer = [other for other in held if round < other <= min(keep, merged)]
            if round > merged or newer:
                self._drop(round)
        return None if merged == NEVER else self._get(merged)

    def put(self, round: int, kept: Kept) -> None:
        copy = Checkpoint(round, State(Model(kept.constant, {}), {}), {0: kept.own})
        with clear_errors(self._path(round)):
            self.folder.mkdir(parents=True, exist_ok=True)
            write(self._path(round), copy, self._durable)
        tensors, said = encode(copy)
        self._state[self._name(round)] = Encoder().record(tensors)
        self._state[self._name(round) + ".said"] = ConfigRecord({"fedrane": said["fedrane"]})

    # ---- one copy in both places

    def _get(self, round: int) -> Kept:
        problem = "no copy of it is left"
        if self._path(round).is_file():
            try:
                copy = read(self._path(round))
                return Kept(copy.owns[0], copy.server.model.params)
            except CheckpointError as error:
                problem = str(error)
        if self._name(round) in self._state.array_records:
            arrays = self._state.array_records[self._name(round)]
            said = json.loads(str(self._state.config_records[self._name(round) + ".said"]["fedrane"]))
            copy = decode({path: torch.from_numpy(array.numpy().copy()) for path, array in arrays.items()}, said)
            return Kept(copy.owns[0], copy.server.model.params)
        raise Refused(
            f"what this client kept in round {round} is lost: {problem}",
            f"the server has merged that round, and {self.folder} should hold it",
            "Restore the client's folder",
        )

    def _drop(self, round: int) -> None:
        self._path(round).unlink(missing_ok=True)
        for name in (self._name(round), self._name(round) + ".said"):
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

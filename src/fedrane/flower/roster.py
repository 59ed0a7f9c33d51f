"""The roster of a federation: the key of each client's node, and how many examples it has at most.

Flower's SuperLink checks each call of a node against the public key that the node is registered with, and shows a
ServerApp these keys. So a node is the client whose key it has, whatever it reports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from fedrane.errors import ConfigError
from fedrane.system.extras import require
from fedrane.system.files import toml_value, write_atomically

ROSTER = "roster.toml"
MAX_EXAMPLES = 10**9 - 1
"""More than any one client has: a larger number is a mistake or made up."""
HEADER = """\
# Who takes part in this federation. A node is a client only if it is registered with the client's key, and if it has at
# most so many examples, those for testing included. To fill an entry in, or to add one for a client that comes late:
# fedrane flower roster APP CLIENT KEY.pub --examples NUMBER
"""
_REMEDY = "Write it: fedrane flower roster APP CLIENT KEY.pub --examples NUMBER"


class Entry(NamedTuple):
    """What the operator declares of a client."""

    key: str = ""
    """The public key of its node, as in the .pub file."""
    examples: int = 0
    """At most, for training, validation and testing together."""


def public_key(text: str, whose: str) -> bytes:
    """A key of a .pub file in the form in which Flower shows it."""
    require("flower", "a roster", "cryptography")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    try:
        key = load_ssh_public_key(text.encode())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{whose} cannot be read: {error}", "it is the content of a .pub file", _REMEDY) from error
    if not isinstance(key, EllipticCurvePublicKey):
        raise ConfigError(
            f"{whose} is of another kind",
            "Flower's nodes have ECDSA keys",
            'Make one: ssh-keygen -t ecdsa -b 384 -N ""',
        )
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


@dataclass(frozen=True)
class Roster:
    """The entry of each client, by its number."""

    entries: Mapping[int, Entry]

    @classmethod
    def read(cls, path: Path) -> Roster:
        from fedrane.experiment import read_toml  # here: it imports torch, which the command line does not need

        content = read_toml(path)
        clients = content.pop("client", {})
        if content or not isinstance(clients, dict):
            raise ConfigError(
                f"{path} has {', '.join(content) or 'a client'}", "it has tables [client.NUMBER]", _REMEDY
            )
        return cls({_number(path, name): _entry(path, name, fields) for name, fields in clients.items()})

    def write(self, path: Path) -> None:
        tables = [
            "\n".join([f"[client.{k}]", *(f"{name} = {toml_value(value)}" for name, value in entry._asdict().items())])
            for k, entry in sorted(self.entries.items())
        ]
        write_atomically(path, "\n\n".join([HEADER, *tables]) + "\n")

    def having(self, client: int, **changes: Any) -> Roster:
        """The roster with these values for this client; of a key only what identifies it, and no comment."""
        if "key" in changes:
            changes["key"] = " ".join(changes["key"].split()[:2])
        entry = self.entries.get(client, Entry())._replace(**changes)
        return Roster({**self.entries, client: entry})

    @cached_property
    def owners(self) -> dict[bytes, int]:
        """The client of each key, as Flower shows it."""
        owners: dict[bytes, int] = {}
        for k, entry in self.entries.items():
            other = owners.setdefault(public_key(entry.key, f"the key of client {k} in {ROSTER}"), k)
            if other != k:
                raise ConfigError(f"clients {other} and {k} have the same key in {ROSTER}", "a node is one client")
        return owners

    def require_complete(self, clients: int) -> None:
        """An error unless there is an entry for each client of the experiment, and all are filled in."""
        missing = [k for k in range(clients) if k not in self.entries]
        missing += [k for k, entry in self.entries.items() if not entry.key or not entry.examples]
        if missing:
            raise ConfigError(
                f"client {', '.join(map(str, sorted(missing)))} has no key or no number of examples in {ROSTER}",
                "a node is believed only if both are known",
                f"{_REMEDY}; or believe all nodes: --run-config 'roster=\"\"'",
            )


def _number(path: Path, name: str) -> int:
    if not re.fullmatch("0|[1-9][0-9]{0,8}", name):
        raise ConfigError(f"{path} has a client {name!r}", "it is its number, from 0")
    return int(name)


def _entry(path: Path, name: str, fields: Any) -> Entry:
    if not isinstance(fields, dict) or fields.keys() != {*Entry._fields}:
        raise ConfigError(f"{path}: client {name} is not described", f"it has {' and '.join(Entry._fields)}", _REMEDY)
    key, examples = fields["key"], fields["examples"]
    if not isinstance(key, str) or type(examples) is not int or examples < 0:
        raise ConfigError(
            f"{path}: client {name} has key={key!r} and examples={examples!r}",
            "they are the content of a .pub file, and a number",
            _REMEDY,
        )
    return Entry(key, examples)

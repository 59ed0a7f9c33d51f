"""The nodes of a Flower grid: which client each of them is, and how messages are exchanged with them."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedrane.flower.codec import MessageError
from fedrane.flower.messages import QUERY, bounded_text, read_identity
from fedrane.flower.roster import Roster

T = TypeVar("T")


@dataclass
class NodePool:
    """The nodes of a grid by the client each of them is, and how long to wait for them."""

    grid: Grid
    key: str
    server_start: int = 1
    timeout: float = 3600.0
    """Seconds after which a round ends with those who have replied."""
    min_replies: int = 1
    """The fewest replies that make a round."""
    retries: int = 0
    """How often a round is repeated, with those who have not replied, before the run stops."""
    bf16: bool = False
    rounds_back: int = 0
    """Rounds that a resumed server may go back."""
    query_timeout: float = 60.0
    """Seconds to wait for a node to identify itself, and until it is asked again, then twice as long each time."""
    poll_interval: float = 0.1
    one_by_one: bool = False
    """Ask Flower for each reply by itself: one that it cannot parse takes with it all that were asked for together."""
    log: Callable[[str], None] = lambda text: None
    check: Callable[[], None] = lambda: None
    """Called while waiting; it raises if there is nothing to wait for any more."""
    roster: Roster | None = None
    """Whose key is which client's, and how many examples it has at most; without one, nodes are believed."""
    nodes: dict[int, int] = field(default_factory=dict)
    """The node of each client."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Examples of each client, as it reported."""
    _known: set[int] = field(default_factory=set)
    _queries: dict[int, int] = field(default_factory=dict)
    _next_query: dict[int, float] = field(default_factory=dict)
    """When a node that is not known yet is asked again."""
    _claims: dict[int, list[int]] = field(default_factory=dict)
    """The nodes that report to be a client, in the order in which they came."""
    _refused: dict[int, str] = field(default_factory=dict)
    """Nodes that are no client of this federation, and why."""
    _recorded: dict[int, str] = field(default_factory=dict)
    """Of these, what the run's record has already."""

    def discover(self) -> None:
        """Ask new nodes which client they are; a client whose node is gone may be with another one."""
        now, online = time.monotonic(), self._online()
        patience = min(self.timeout, self.query_timeout)
        new = [n for n in sorted(online.keys() - self._known) if now > self._next_query.get(n, -math.inf)]
        if new:
            query = RecordDict({"query": ConfigRecord({"key": self.key})})
            identities, refused = self._exchange(QUERY, {node: (node, query) for node in new}, read_identity, patience)
            for node in new:  # one that never replies must not take half of the time
                self._queries[node] = self._queries.get(node, 0) + 1
                self._next_query[node] = time.monotonic() + patience * 2 ** min(self._queries[node] - 1, 10)
            for node, why in refused.items():
                self._refuse(node, why, online[node])
            for node, (client, size) in sorted(identities.items(), key=lambda item: (item[1][0], item[0])):
                self._accept(node, client, size, online)
        for client, claims in self._claims.items():
            there = [node for node in claims if node in online]
            if there and self.nodes.get(client) != there[0]:  # the first one, whenever it is there
                if client in self.nodes:
                    self.log(f"client {client} is now with node {there[0]}, and was with node {self.nodes[client]}")
                self.nodes[client] = there[0]

    def _online(self) -> dict[int, int | None]:
        """The nodes that may be clients: with a roster those that are registered with one of its keys, and whose."""
        if self.roster is None:
            return dict.fromkeys(self.grid.get_node_ids())
        owners = {node.node_id: self.roster.owners.get(node.public_key) for node in self.grid.get_nodes()}
        for node in sorted(node for node, owner in owners.items() if owner is None):
            self._refuse(node, "its key is not in the roster")
        return {node: owner for node, owner in owners.items() if owner is not None}

    def _refuse(self, node: int, why: str, owner: int | None = None) -> None:
        """Once for each reason: it may be asked again."""
        why = why if owner is None else f"it has client {owner}'s key, and {why}"
        if self._refused.get(node) != why:
            self.log(f"node {node} is not accepted: {why}")
        self._refused[node] = why

    def newly_refused(self) -> dict[str, str]:
        """Nodes that were refused since the last call, for the run's record."""
        new = {node: why for node, why in self._refused.items() if self._recorded.get(node) != why}
        self._recorded |= new
        return {f"node {node}": new[node] for node in sorted(new)}

    def _accept(self, node: int, client: int, size: int, online: Mapping[int, int | None]) -> None:
        """Take a node for the client that it reports to be, unless something speaks against it."""
        owner = online[node]
        if owner not in (None, client):
            self._refuse(node, f"it reports to be client {client}", owner)
        elif self.roster and size > (most := self.roster.entries[client].examples):
            self._refuse(node, f"it reports {size} examples, of at most {most} in the roster", owner)
        elif self.sizes.setdefault(client, size) != size:
            self._refuse(
                node, f"it reports client {client} with {size} examples, which had {self.sizes[client]}", owner
            )
        else:
            self._known.add(node)
            self._refused.pop(node, None)
            claims = self._claims.setdefault(client, [])
            if first := next((other for other in claims if other in online), None):
                self._refuse(node, f"it reports to be client {client}, which node {first} is", owner)
            claims.append(node)

    def request(
        self, message_type: str, requests: Mapping[int, RecordDict], read: Callable[[int, RecordDict], T]
    ) -> tuple[dict[int, T], dict[int, str]]:
        """The clients' replies, read and checked, and why there is none of the others."""
        self.discover()
        online = self._online()
        there = {k: self.nodes[k] for k in requests if self.nodes.get(k) in online}
        absent = {k: "it is not connected" for k in requests if k not in there}
        messages = {k: (node, requests[k]) for k, node in there.items()}
        replies, refused = self._exchange(message_type, messages, read, self.timeout)
        return replies, refused | absent

    def wait_for(self, clients: list[int]) -> None:
        """Until these clients are connected, or ``timeout`` has passed."""
        end = time.monotonic() + self.timeout
        while time.monotonic() < end:
            self.discover()
            online = self._online()
            if all(self.nodes.get(k) in online for k in clients):
                return
            time.sleep(self.poll_interval)

    def send(self, message_type: str, requests: Mapping[int, RecordDict]) -> None:
        """Without waiting for a reply."""
        for k, content in requests.items():
            self._push(message_type, self.nodes[k], content, self.timeout)

    def _push(self, message_type: str, node: int, content: RecordDict, timeout: float) -> list[str]:
        """Flower names a message by the hash of what is in it, and takes a reply from any node that knows the name: so
        there is something in it that no other node can guess."""
        nonce = secrets.token_hex(16)
        return list(self.grid.push_messages([Message(content, node, message_type, ttl=timeout, group_id=nonce)]))

    def _exchange(
        self,
        message_type: str,
        messages: Mapping[int, tuple[int, RecordDict]],
        read: Callable[[int, RecordDict], T],
        timeout: float,
    ) -> tuple[dict[int, T], dict[int, str]]:
        waiting: dict[str, int] = {}
        refused: dict[int, str] = {}
        for who, (node, content) in messages.items():
            # Valid for as long as anybody waits: a node that takes it up later would reply to a round that is over.
            sent = self._push(message_type, node, content, timeout)
            if sent and sent[0]:
                waiting[sent[0]] = who
            else:
                refused[who] = "the message could not be sent"
        replies: dict[int, T] = {}
        end = time.monotonic() + timeout
        while waiting and time.monotonic() < end:
            self.check()
            for name, reply in self._pull(list(waiting)):
                if name not in waiting:
                    continue
                try:
                    if isinstance(reply, Exception):
                        raise reply
                    if _expired(reply):
                        continue
                    replies[waiting[name]] = read(waiting[name], _content(reply))
                except MessageError as error:
                    refused[waiting[name]] = bounded_text(str(error))
                except Exception as error:  # noqa: BLE001 - whatever a reply raises costs that reply alone
                    refused[waiting[name]] = bounded_text(
                        f"a reply that cannot be read: {type(error).__name__}: {error}"
                    )
                del waiting[name]
            if waiting:
                time.sleep(self.poll_interval)
        return replies, refused | dict.fromkeys(waiting.values(), f"no reply within {timeout:g} s")

    def _pull(self, names: list[str]) -> Iterator[tuple[str, Message | Exception]]:
        """The replies that are there, each with the id of its message, or what came instead of a reply."""
        if not self.one_by_one:
            for reply in self.grid.pull_messages(names):
                yield reply.metadata.reply_to_message_id, reply
            return
        for name in names:
            try:
                pulled = list(self.grid.pull_messages([name]))
            except Exception as error:  # noqa: BLE001 - Flower cannot parse it, or the link to Flower is broken
                self.grid.get_node_ids()  # raises if it is the link
                yield name, error
            else:
                yield from ((name, reply) for reply in pulled)


def _expired(reply: Message) -> bool:
    """Flower's own reply where a message's time ran out a moment before ours: the client has sent nothing."""
    gone = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE)
    return reply.has_error() and reply.error.code in gone


def _content(reply: Message) -> RecordDict:
    if reply.has_error():
        raise MessageError(
            f"it failed: {reply.error.reason.strip().splitlines()[-1] if reply.error.reason else 'no reason'}"
        )
    refusal = reply.content.config_records.get("refused", ConfigRecord())
    if refusal:
        raise MessageError(str(refusal.get("why", "no reason")))
    return reply.content

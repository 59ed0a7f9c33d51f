"""The nodes of a Flower grid: which client each of them is, and how messages are exchanged with them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.common.constant import ErrorCode
from flwr.serverapp import Grid

from fedrane.flower.codec import MessageError
from fedrane.flower.messages import QUERY, bounded_text, read_identity

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
    """Seconds to wait for a node to identify itself, and until it is asked again."""
    poll_interval: float = 0.1
    one_by_one: bool = False
    """Ask Flower for each reply by itself: one that it cannot parse takes with it all that were asked for together."""
    log: Callable[[str], None] = lambda text: None
    check: Callable[[], None] = lambda: None
    """Called while waiting; it raises if there is nothing to wait for any more."""
    nodes: dict[int, int] = field(default_factory=dict)
    """The node of each client."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Training examples of each client, as it reported."""
    _known: set[int] = field(default_factory=set)
    _queried: dict[int, float] = field(default_factory=dict)
    _claims: dict[int, list[int]] = field(default_factory=dict)
    """The nodes that report to be a client, in the order in which they came."""

    def discover(self) -> None:
        """Ask new nodes which client they are; a client whose node is gone may be with another one."""
        now, online = time.monotonic(), set(self.grid.get_node_ids())
        patience = min(self.timeout, self.query_timeout)
        new = [n for n in sorted(online - self._known) if now - self._queried.get(n, -math.inf) > patience]
        if new:
            query = RecordDict({"query": ConfigRecord({"key": self.key})})
            identities, refused = self._exchange(QUERY, {node: (node, query) for node in new}, read_identity, patience)
            self._queried |= dict.fromkeys(new, time.monotonic())
            for node, why in refused.items():
                self.log(f"node {node} is not accepted: {why}")
            for node, (client, size) in sorted(identities.items(), key=lambda item: item[1]):
                self._accept(node, client, size, online)
        for client, claims in self._claims.items():
            there = [node for node in claims if node in online]
            if there and self.nodes.get(client) not in online:
                self.nodes[client] = there[0]

    def _accept(self, node: int, client: int, size: int, online: set[int]) -> None:
        self._known.add(node)
        if self.sizes.setdefault(client, size) != size:
            self.log(f"client {client} came with {size} examples and had {self.sizes[client]}: left out")
            return
        claims = self._claims.setdefault(client, [])
        if any(other in online for other in claims):
            self.log(f"node {node} reports to be client {client}, which node {claims[0]} is: left out")
        claims.append(node)

    def request(
        self, message_type: str, requests: Mapping[int, RecordDict], read: Callable[[int, RecordDict], T]
    ) -> tuple[dict[int, T], dict[int, str]]:
        """The clients' replies, read and checked, and why there is none of the others."""
        self.discover()
        online = set(self.grid.get_node_ids())
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
            online = set(self.grid.get_node_ids())
            if all(self.nodes.get(k) in online for k in clients):
                return
            time.sleep(self.poll_interval)

    def send(self, message_type: str, requests: Mapping[int, RecordDict]) -> None:
        """Without waiting for a reply."""
        for k, content in requests.items():
            self.grid.push_messages([Message(content, self.nodes[k], message_type, ttl=self.timeout)])

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
            sent = list(self.grid.push_messages([Message(content, node, message_type, ttl=timeout)]))
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
        """The replies that are there, each with the message that it answers, or what came instead of a reply."""
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

"""Which client a node is, and how many examples it has: what is proven by its key and bounded by the roster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, Message
from typer.testing import CliRunner

import fedrane
from fedrane.cli.commands import app as command
from fedrane.errors import ConfigError
from fedrane.flower.nodes import NodePool
from fedrane.flower.project import AppConfig
from fedrane.flower.roster import ROSTER, Entry, Roster, public_key
from fedrane.flower.server import ServerSettings, serve
from fedrane.methods import METHODS
from flower_apps import CLIENTS, Federation, same_as_local
from flower_grids import LoopGrid, trained
from harness import metrics
from problems import ALWAYS_TESTED, slow_except

STRANGER, IMPOSTOR = 1, 2
"""Nodes whose numbers come before those of the real ones: where nothing else decides, they would win."""


def claiming(grid: LoopGrid, node: int, client: int, number: int = 99, key: bytes = b"") -> None:
    """A node that does all that a client does, from a configuration of its own."""
    grid.configs[number] = dict(grid.configs[client])
    grid.keys[number] = key
    grid.join(client=number, node=node)


def identity(change: Callable[[Any], None], client: int) -> Callable[[Message], Message]:
    def up(reply: Message) -> Message:
        me = reply.content.config_records.get("identity")
        if me is not None and me["client"] == client:
            change(me)
        return reply

    return up


def fewer(federation: Federation, client: int) -> str:
    """A file with some of the client's examples: whoever has fewer used to win."""
    path = federation.folder / "fewer.npz"
    examples = np.load(federation.folder / "data" / f"client-{client}.npz")
    np.savez(path, x=examples["x"][:30], y=examples["y"][:30])
    return str(path)


def serving(federation: Federation, grid: LoopGrid, **changes: Any) -> Path:
    federation.grid = grid
    settings = {"out": str(federation.folder / "run"), "timeout": 0.5, "retries": 0, "wait": 0.1, "test_data": "digits"}
    serve(federation.app, ServerSettings(**(settings | changes)), grid, federation.roster)
    return federation.folder / "run"


# ---- who a node is


def test_a_claim_on_another_s_number_is_refused_logged_and_recorded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a node with a key that is not in the roster, and by one with another client's key; both come first."""
    federation = Federation(tmp_path, rounds=2, participation=1.0, method="fedper").with_roster(more=1)
    grid = federation.connect(CLIENTS)
    claiming(grid, STRANGER, client=0)
    claiming(grid, IMPOSTOR, client=0, number=98, key=federation.keys[CLIENTS])
    for number in (98, 99):
        grid.configs[number] |= {"data": fewer(federation, 0), "folder": str(tmp_path / f"of-{number}")}
    out = serving(federation, grid)
    same_as_local(federation, out)
    reasons = {
        f"node {STRANGER}": "its key is not in the roster",
        f"node {IMPOSTOR}": f"it has client {CLIENTS}'s key, and it reports to be client 0",
    }
    assert metrics(out)[0]["refused"] == reasons
    assert "refused" not in metrics(out)[1]
    for node, why in reasons.items():
        assert caplog.text.count(f"{node} is not accepted: {why}") == 1
    addressed = {m.metadata.dst_node_id for m in grid.seen if not m.metadata.reply_to_message_id}
    assert STRANGER not in addressed, "it gets nothing, not even a question"
    assert IMPOSTOR not in {m.metadata.dst_node_id for m in trained(grid.seen)}


def test_a_key_is_one_client_wherever_its_node_is(tmp_path: Path) -> None:
    """Flower admits a key once; should there be two, it is the first until that one is gone, and again when it is
    back."""
    federation = Federation(tmp_path, rounds=1).with_roster()
    grid, messages = federation.connect(1), list[str]()
    pool = NodePool(grid, "ab" * 16, timeout=30.0, log=messages.append, roster=federation.roster)
    pool.discover()
    claiming(grid, 5, client=0, key=federation.keys[0])
    pool.discover()
    assert pool.nodes == {0: 1000}
    assert messages == [
        "node 5 is not accepted: it has client 0's key, and it reports to be client 0, which node 1000 is"
    ]
    first = grid.online.pop(1000)
    pool.discover()
    assert pool.nodes == {0: 5}
    grid.online[1000] = first
    pool.discover()
    assert pool.nodes == {0: 1000}
    assert messages[1:] == [f"client 0 is now with node {a}, and was with node {b}" for a, b in ((5, 1000), (1000, 5))]


@pytest.mark.parametrize("count", [30, 10**6], ids=["fewer", "more"])
def test_without_a_roster_nobody_locks_out_the_first(count: int, tmp_path: Path) -> None:
    """Whatever number of examples the other one reports."""
    federation = Federation(tmp_path, rounds=1)
    grid, messages = federation.connect(1), list[str]()
    pool = NodePool(grid, "ab" * 16, timeout=30.0, log=messages.append)
    pool.discover()
    size = pool.sizes[0]
    claiming(grid, 5, client=0)
    grid.up = identity(lambda me: me.__setitem__("num_examples", count), 0)
    pool.discover()
    assert (pool.nodes, pool.sizes) == ({0: 1000}, {0: size})
    assert messages == [f"node 5 is not accepted: it reports client 0 with {count} examples, which had {size}"]


def test_of_two_that_come_at_once_without_a_roster_both_are_named(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=1)
    grid, messages = federation.connect(1), list[str]()
    claiming(grid, 2000, client=0)
    grid.configs[99]["data"] = fewer(federation, 0)
    pool = NodePool(grid, "ab" * 16, timeout=30.0, log=messages.append)
    pool.discover()
    assert pool.nodes == {0: 1000}, "it used to be the one with fewer examples"
    assert len(messages) == 1
    assert "node 2000" in messages[0]


def test_a_node_that_never_replies_is_asked_more_and_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question holds up the others: one node must not take half of a run's time."""
    federation, times, clock = Federation(tmp_path, rounds=1), list[float](), [0.0]

    def down(message: Message) -> None:
        times.append(clock[0])

    pool = NodePool(federation.connect(1, down=down), "ab" * 16, query_timeout=60.0)
    monkeypatch.setattr("fedrane.flower.nodes.time.monotonic", lambda: clock[0])
    monkeypatch.setattr("fedrane.flower.nodes.time.sleep", lambda seconds: clock.__setitem__(0, clock[0] + 30.0))
    while clock[0] < 3600.0:
        pool.discover()
        clock[0] += 1.0
    assert times[0] == 0.0
    assert len(times) <= 6
    assert pool.grid.get_node_ids() == [1000]


def test_a_server_without_a_roster_warns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Federation(tmp_path, rounds=1).serve()
    assert "There is no roster: which client a node is" in caplog.text


def test_no_node_can_guess_the_name_of_another_s_message(tmp_path: Path) -> None:
    """Flower takes a reply from any node that knows it, and it is the hash of what is in the message."""
    federation = Federation(tmp_path, rounds=1, participation=1.0).with_roster()
    federation.serve()
    assert federation.grid is not None
    sent = [m.metadata.group_id for m in federation.grid.seen if not m.metadata.reply_to_message_id]
    assert len(sent) == len(set(sent))
    assert all(len(bytes.fromhex(nonce)) >= 16 for nonce in sent)


# ---- how many examples it has


@pytest.mark.parametrize("count", [10**15, 10**9, 999_999_999, 1000])
def test_more_examples_than_declared_are_refused(count: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(tmp_path, rounds=1, participation=1.0).with_roster()
    up = identity(lambda me: me.__setitem__("num_examples", count), 3)
    with pytest.raises(ConfigError, match=r"client 3 has not come within .* all must have come"):
        federation.serve(up=up)
    assert "node 1021 is not accepted: it has client 3's key, and it reports" in caplog.text
    assert f"{count} examples" in caplog.text


def test_a_run_starts_without_a_client_that_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It takes no part, also after a restart of the server; when it reports what was declared, it gets the model."""
    federation = Federation(tmp_path, rounds=3, participation=1.0, method="fedper").with_roster()
    up = identity(lambda me: me.__setitem__("num_examples", 10**9), 3)
    with pytest.raises(ZeroDivisionError):
        federation.serve(up=up, min_clients=3, down=_failing_in_round(2))
    out = federation.serve(up=up, min_clients=3)
    assert "client 3 has not come within 0.1 s: the run starts without" in caplog.text
    assert [(line["cohort"], line["lost"]) for line in metrics(out)] == [([0, 1, 2], [3])] * 3
    assert metrics(out)[-1]["unevaluated"] == [3]
    assert len(metrics(out)[-1]["personal/clients"]) == 3
    metadata = json.loads((out / "metadata.json").read_text())
    assert (metadata["examples"][3], metadata["labels"][3]) == (0, [0])
    assert not (tmp_path / "clients" / "3").exists()
    before = (out / "metrics.jsonl").read_bytes()
    federation.serve()
    assert (out / "metrics.jsonl").read_bytes() == before
    assert set(federation.personal(3)) == {"personal"}
    fedrane.report.write([out], tmp_path / "page.html", samples=0)


def _failing_in_round(number: int) -> Callable[[Message], Message]:
    def down(message: Message) -> Message:
        request = message.content.config_records.get("request")
        if request and request["round"] == number:
            raise ZeroDivisionError
        return message

    return down


@pytest.mark.parametrize("method", slow_except(ALWAYS_TESTED, METHODS))
def test_every_method_does_without_an_absent_client(method: str, tmp_path: Path) -> None:
    """It counts with no examples, also where a method holds something for each client."""
    federation = Federation(tmp_path, method=method, rounds=2, participation=1.0, batch=999, eval_every=2)
    out = federation.serve(nodes=3, min_clients=3)
    assert [line["cohort"] for line in metrics(out)] == [[0, 1, 2]] * len(metrics(out))
    assert metrics(out)[-1]["unevaluated"] == [3]


def test_fewer_clients_than_asked_for_do_not_start_a_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=1)
    with pytest.raises(ConfigError, match="has 4 clients, and 3 must have come"):
        federation.serve(nodes=2, min_clients=3)


def test_a_round_of_nobody_but_an_absent_client_does_not_end_a_run(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=3, participation=0.25)
    grid = federation.connect(CLIENTS)
    grid.online.pop(1000)
    out = serving(federation, grid, min_clients=3)
    assert [(line["cohort"], line["lost"]) for line in metrics(out)] == [([2], []), ([2], []), ([], [0])]


def test_a_client_of_the_roster_may_come_late(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=2, participation=1.0, method="fedper").with_roster(more=1)
    (tmp_path / "data" / f"client-{CLIENTS}.npz").write_bytes((tmp_path / "data" / "client-0.npz").read_bytes())

    def down(message: Message) -> Message:
        request, grid = message.content.config_records.get("request"), federation.grid
        if request and request["round"] == 2 and grid is not None:
            grid.configs[CLIENTS] = federation.config(CLIENTS)
            grid.join(client=CLIENTS, node=5)
        return message

    out = federation.serve(down=down)
    same_as_local(federation, out)
    assert set(federation.personal(CLIENTS)) == {"personal"}


def test_a_resumed_server_goes_by_the_new_roster(tmp_path: Path) -> None:
    """A client whose machine was replaced has a new key; the old one is worth nothing any more."""
    federation = Federation(tmp_path, rounds=3, participation=1.0, method="fedper").with_roster(more=1)
    assert federation.roster is not None
    with pytest.raises(ZeroDivisionError):
        federation.serve(down=_failing_in_round(2))
    new = federation.roster.entries[CLIENTS].key
    entries = {k: entry for k, entry in federation.roster.entries.items() if k < CLIENTS}
    federation.roster = Roster(entries).having(0, key=new)
    with pytest.raises(ZeroDivisionError):
        federation.serve(down=_failing_in_round(3))
    federation.keys[0] = public_key(new, "")
    out = federation.serve()
    assert [line["lost"] for line in metrics(out)] == [[], [0], []]
    assert metrics(out)[1]["refused"]["node 1000"] == "its key is not in the roster"


# ---- a hostile world


def test_four_hostile_nodes_of_six_do_not_ruin_a_federation(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Weights × 1e30 and × −10, a claim on another's number, and 10⁹ examples: each is named, and the honest win."""
    settings = {"clients": 6, "rounds": 5, "epochs": 5, "batch": 32, "participation": 1.0, "partition.alpha": 10}
    federation = Federation(tmp_path, **settings, method="fedavg", eval_every=5).with_roster()
    grid = federation.connect(6)
    grid.configs[4] |= {"partition-id": 0, "data": fewer(federation, 0)}

    def up(reply: Message) -> Message:
        node, factor = grid.online[reply.metadata.src_node_id], {2: 1e30, 3: -10.0}
        if node in factor and "up" in reply.content:
            record = reply.content.array_records["up"]
            for name, array in record.items():
                record[name] = Array(np.float32(factor[node]) * array.numpy())
        return identity(lambda me: me.__setitem__("num_examples", 10**9), 5)(reply)

    grid.up = up
    out = serving(federation, grid, min_clients=4)
    lines = metrics(out)
    assert [line["cohort"] for line in lines] == [[0, 1]] * 5
    honest = federation.local.history[-1]["global/accuracy"]
    assert lines[-1]["global/accuracy"] > honest - 0.05
    for expected in (
        "client 2 is left out: the norm of its params is",
        "client 3 is left out: the norm of its params is",
        "node 1028 is not accepted: it has client 4's key, and it reports to be client 0",
        "node 1035 is not accepted: it has client 5's key, and it reports client 5 with 1000000000 examples",
    ):
        assert expected in caplog.text
    recorded = {name for line in lines for name in line["refused"]}
    assert recorded == {"2", "3", "node 1028", "node 1035"}


# ---- the file


def roster_file(federation: Federation) -> Path:
    return federation.folder / "app" / "app_app" / ROSTER


def test_the_commands_of_a_trial_fill_a_roster_in(tmp_path: Path) -> None:
    """``new`` lists the clients, ``deal`` counts their examples, ``certs --app`` adds their keys."""
    federation = Federation(tmp_path)
    dealt = Roster.read(roster_file(federation))
    sizes = [len(np.load(tmp_path / "data" / f"client-{k}.npz")["y"]) for k in range(CLIENTS)]
    assert dealt.entries == {k: Entry("", n) for k, n in enumerate(sizes)}
    with pytest.raises(ConfigError, match=r"client 0, 1, 2, 3 has no key or no number of examples"):
        dealt.require_complete(CLIENTS)
    federation.with_roster()
    filled = Roster.read(roster_file(federation))
    filled.require_complete(CLIENTS)
    assert [entry.examples for entry in filled.entries.values()] == sizes
    keys = [(tmp_path / "certs" / f"node-{k}.pub").read_text() for k in range(CLIENTS)]
    assert filled.owners == {public_key(key, ""): k for k, key in enumerate(keys)}
    with pytest.raises(ConfigError, match="client 4 has no key"):
        filled.require_complete(CLIENTS + 1)


def test_an_operator_adds_a_client_s_key(tmp_path: Path) -> None:
    federation = Federation(tmp_path).with_roster()
    (tmp_path / "node.pub").write_bytes((tmp_path / "certs" / "node-0.pub").read_bytes().strip() + b" jane@hospital\n")
    words = ["flower", "roster", str(tmp_path / "app"), "9", str(tmp_path / "node.pub"), "--examples", "500"]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 0, done.output
    roster = Roster.read(roster_file(federation))
    assert roster.entries[9].examples == 500
    assert "jane" not in roster_file(federation).read_text()
    with pytest.raises(ConfigError, match="clients 0 and 9 have the same key"):
        roster.owners  # noqa: B018 - it is read where it is needed first
    assert AppConfig.read(roster_file(federation).parent) == federation.app, "it is no part of the experiment"


@pytest.mark.parametrize("key", ["", "not a key", "ssh-ed25519", "missing"])
def test_a_key_that_is_none_is_refused(key: str, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    federation = Federation(tmp_path)
    before, file = roster_file(federation).read_bytes(), tmp_path / "node.pub"
    ed25519 = Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    if key != "missing":
        file.write_text(ed25519 if key == "ssh-ed25519" else key)
    words = ["flower", "roster", str(tmp_path / "app"), "0", str(file), "--examples", "5"]
    with pytest.raises(ConfigError, match=r"node\.pub"):
        CliRunner().invoke(command, words, catch_exceptions=False)
    assert roster_file(federation).read_bytes() == before


@pytest.mark.parametrize(
    "text",
    [
        "version = 1",
        "client = 3",
        "[client]\n0 = 5",
        "[client.-1]\nkey = ''\nexamples = 5",
        "[client.01]\nkey = ''\nexamples = 5",
        "[client.0]\nkey = ''",
        "[client.0]\nkey = ''\nexamples = 5\nmore = 1",
        "[client.0]\nkey = 3\nexamples = 5",
        "[client.0]\nkey = ''\nexamples = true",
        "[client.0]\nkey = ''\nexamples = -5",
        "[client.0",
    ],
)
def test_a_roster_that_cannot_be_meant_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / ROSTER).write_text(text)
    with pytest.raises(ConfigError, match=r"roster\.toml"):
        Roster.read(tmp_path / ROSTER)


def test_an_incomplete_roster_stops_the_server_before_anybody_is_asked(tmp_path: Path) -> None:
    federation = Federation(tmp_path, rounds=1)
    federation.roster = Roster.read(roster_file(federation))
    with pytest.raises(ConfigError, match=r"or believe all nodes: --run-config 'roster=\"\"'"):
        federation.serve()
    assert federation.grid is not None
    assert not federation.grid.seen


def test_the_roster_is_the_app_s_or_of_the_server_s_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.app import Context, RecordDict

    from fedrane.flower import app as apps

    federation = Federation(tmp_path, rounds=1).with_roster()
    seen: list[Any] = []
    monkeypatch.setattr(apps, "serve", lambda config, settings, grid, roster: seen.append(roster))
    elsewhere = tmp_path / "elsewhere.toml"
    Roster({0: Entry("x", 5)}).write(elsewhere)
    for given in ({}, {"roster": str(elsewhere)}, {"roster": ""}):
        apps.server(roster_file(federation).parent)(federation.connect(0), Context(1, 1, {}, RecordDict(), given))
    assert seen == [federation.roster, Roster({0: Entry("x", 5)}), None]

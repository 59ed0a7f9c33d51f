"""Real processes that die, hang and lie: the round goes on with the others, and what clients keep stays right."""

from __future__ import annotations

import shlex
import signal

import pytest

import fedrane
from asserts import same_bytes
from deploy_federation import Federation, Program, controls_sum_up, until
from fedrane.flower.app import models
from harness import metrics

WRAPPED = """

from flwr.clientapp import ClientApp

honest, app = app, ClientApp()
app.query()(honest)
app.evaluate()(honest)
app.evaluate("deliver")(honest)
"""
"""A client app around the honest one, which replies to all but training."""
LIAR = '''

import numpy as np
from flwr.app import Array


@app.train()
def train(message, context):
    """Clients 1 and 2 lie in another way in every round but the last."""
    reply = honest(message, context)
    lie = LIES.get((context.node_config["partition-id"], message.content["request"]["round"]))
    if lie:
        up, reply_fields = reply.content["up"], reply.content["reply"]
        lie(up, reply_fields, next(iter(up)))
    return reply


def lost(up, reply_fields, name):
    raise RuntimeError("lost on the way")  # the client has kept its state, the server gets nothing


def hundredfold(array):
    return Array(np.tile(array.numpy(), (100,) + (1,) * (len(array.shape) - 1)))


LIES = {
    (1, 1): lambda up, reply_fields, name: up.__setitem__(name, Array(np.full_like(up[name].numpy(), np.nan))),
    (2, 1): lambda up, reply_fields, name: up.__setitem__(name, Array(up[name].numpy()[:1])),
    (1, 2): lambda up, reply_fields, name: up.pop(name),
    (2, 2): lambda up, reply_fields, name: up.__setitem__("more", up[name]),
    (1, 3): lambda up, reply_fields, name: reply_fields.__setitem__("num_examples", -7),
    (2, 3): lambda up, reply_fields, name: reply_fields.__setitem__("num_examples", 10**15),
    (1, 4): lambda up, reply_fields, name: up.__setitem__(name, hundredfold(up[name])),
    (2, 4): lost,
}
'''
REASONS = [
    {"1": "not finite", "2": "(1, 64)"},
    {"1": "missing", "2": "not asked for"},
    {"1": "-7", "2": "1000000000000000"},
    {"1": "(12800, 64)", "2": "lost on the way"},
    {},
]


def dishonest(federation: Federation, name: str, training: str, *words: str) -> None:
    """An app whose clients train in this way."""
    federation.app(name, *words)
    path = federation.folder / name / f"app_{name}" / "client_app.py"
    path.write_text(path.read_text() + WRAPPED + training)


def test_clients_that_lie_are_left_out(federation: Federation) -> None:
    dishonest(federation, "liars", LIAR, "method=scaffold")
    output = federation.submit("liars", "run-liars", timeout=300.0)
    assert federation.finished("run-liars"), output + federation.logs()
    lines = metrics(federation.folder / "run-liars")
    assert [line["lost"] for line in lines] == [[1, 2]] * 4 + [[]]
    for line, reasons in zip(lines, REASONS, strict=True):
        assert line.get("refused", {}).keys() == reasons.keys()
        for client, reason in reasons.items():
            assert reason in line["refused"][client]
            assert f"client {client} is left out" in output
    controls_sum_up(federation, "run-liars")


SILENT = '''

from pathlib import Path


@app.train()
def train(message, context):
    """From the second round on, lost while a file of this name is in the client's folder."""
    reply = honest(message, context)
    if message.content["request"]["round"] > 1 and (Path(context.node_config["folder"]) / "silent").exists():
        raise RuntimeError("lost on the way")
    return reply
'''


def test_too_few_replies_stop_the_run_and_lose_nothing(federation: Federation) -> None:
    """The round is repeated, then the run stops; the same command goes on to the result of a run that lost no reply."""
    dishonest(federation, "few", SILENT, "method=scaffold", "rounds=2", "eval_every=2")
    silent = [federation.folder / "clients" / str(k) / "silent" for k in (1, 2)]
    for file in silent:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    output = federation.do(federation.submission("few", "run-few", min_replies=2, retries=1), check=False)
    assert "1 of 3" in output
    assert federation.rounds("run-few") == 1
    assert not federation.finished("run-few")
    for file in silent:
        file.unlink()
    output = federation.submit("few", "run-few", min_replies=2)
    assert federation.finished("run-few"), output + federation.logs()
    local = fedrane.run(federation.experiment("few").replace(engine="sequential", device="cpu"))
    same_bytes(fedrane.load(federation.folder / "run-few").server, local.server)
    controls_sum_up(federation, "run-few")


def submitted(federation: Federation, app: str, out: str, **config: object) -> Program:
    """The page's command as a process of its own."""
    script = federation.submission(app, out, **config)
    return federation.start(out, f"bash -euc {shlex.quote(script)}")


HELD = '''

import time
from pathlib import Path


@app.train()
def train(message, context):
    """From the second round on, not before a file of this name is gone from the client's folder."""
    folder = Path(context.node_config["folder"])
    while message.content["request"]["round"] > 1 and (folder / "hold").exists():
        (folder / "training").touch()
        time.sleep(0.1)
    return honest(message, context)
'''
ROUND = 60
"""Seconds until a round ends: several times what three clients need on two cores."""


def test_nodes_that_are_killed_or_hang_do_not_stop_the_round(federation: Federation) -> None:
    """The round ends by its timeout, or Flower's, with the one that replied; the others come back with their states."""
    dishonest(federation, "faults", HELD, "method=scaffold", "rounds=40", "eval_every=40")
    out, folder = "run-faults", federation.folder / "run-faults"
    hanging, killed = federation.programs["node-1"], federation.programs["node-2"]
    clients = [federation.folder / "clients" / str(k) for k in (1, 2)]
    for client in clients:
        client.mkdir(parents=True, exist_ok=True)
        (client / "hold").touch()
    submitted(federation, "faults", out, timeout=float(ROUND))
    try:
        until(lambda: all((client / "training").exists() for client in clients), "both train in the second round")
        hanging.send(signal.SIGSTOP)
        since = len(killed.output)
        killed.stop()
        until(lambda: federation.rounds(out) >= 2, "the round ends without them")
        line = metrics(folder)[1]
        assert line["cohort"] == [0]
        assert line["refused"].keys() == {"1", "2"}
        late = f"no reply within {ROUND} s"
        # Flower may notice sooner that a node's heartbeat is missing, after up to a minute.
        assert all(why == late or "Node Unavailable" in why for why in line["refused"].values())
        assert line["seconds"] >= ROUND or late not in line["refused"].values()
        for client in clients:
            (client / "hold").unlink()
        hanging.send(signal.SIGCONT)
        federation.wait_for_node(2, since)
        until(lambda: metrics(folder)[-1]["cohort"] == [0, 1, 2], "all take part again")
    finally:
        federation.close()  # the server, too: it must not aggregate while its folder is read
    controls_sum_up(federation, out)


def test_a_server_that_is_killed_is_resumed_with_every_head_intact(federation: Federation) -> None:
    """FedPer: the heads are with the clients, and the server has never seen them."""
    federation.app("heads", "method=fedper", "rounds=2", "eval_every=2")
    run = submitted(federation, "heads", "run-heads")
    until(lambda: federation.rounds("run-heads") >= 1, "a round is done")
    run.stop()
    _restart(federation)
    output = federation.submit("heads", "run-heads")
    assert federation.finished("run-heads"), output + federation.logs()
    local = fedrane.run(federation.experiment("heads").replace(engine="sequential", device="cpu"))
    same_bytes(fedrane.load(federation.folder / "run-heads").server, local.server)
    for k in range(3):
        held = models(federation.folder / "clients" / str(k))["personal"]
        same_bytes(dict(held.state_dict()), dict(local.personal(k).state_dict()))
    assert metrics(federation.folder / "run-heads")[-1]["personal/clients"] == local.history[-1]["personal/clients"]


def _restart(federation: Federation) -> None:
    """All of Flower's processes at once, as after a power cut; the SuperLink had no database."""
    federation.close()
    federation.start_link()
    federation.start_nodes()


@pytest.fixture(autouse=True)
def _alive(federation: Federation) -> None:
    """A test that ends with dead processes starts them for the next."""
    if not all(federation.programs[name].running for name in ("link", "node-0", "node-1", "node-2")):
        _restart(federation)

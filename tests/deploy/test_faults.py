"""Real processes that die, hang and lie: the round goes on with the others, and what clients keep stays right."""

from __future__ import annotations

import shlex
import signal

import pytest

import fedrane
from asserts import same_bytes
from deploy_federation import Federation, Program, until
from fedrane import tree
from fedrane.flower_app import models
from harness import metrics

LIAR = '''

import numpy as np
from flwr.app import Array
from flwr.clientapp import ClientApp

honest, app = app, ClientApp()
app.query()(honest)
app.evaluate()(honest)
app.evaluate("conclude")(honest)


@app.train()
def train(message, context):
    """Client 2 lies in another way in every round."""
    reply, round = honest(message, context), message.content["order"]["round"]
    if context.node_config["partition-id"] != 2 or round > 8:
        return reply
    if round == 8:
        raise RuntimeError("lost on the way")  # the client has kept its state, the server gets nothing
    up, said = reply.content["up"], reply.content["said"]
    name = next(iter(up))
    values = up[name].numpy()
    lies = {
        1: lambda: up.__setitem__(name, Array(np.full_like(values, np.nan))),
        2: lambda: up.__setitem__(name, Array(values[:1])),
        3: lambda: up.pop(name),
        4: lambda: up.__setitem__("more", Array(values)),
        5: lambda: said.__setitem__("rows", -7),
        6: lambda: said.__setitem__("rows", 10**15),
        7: lambda: up.__setitem__(name, Array(np.tile(values, (100,) + (1,) * (values.ndim - 1)))),
    }
    lies[round]()
    return reply
'''
REASONS = ("not finite", "was agreed", "missing", "not asked for", "-7", "10000000000", "was agreed", "lost on the way")


def controls_sum_up(federation: Federation, out: str) -> None:
    """SCAFFOLD's (1/N) Σ c_i = c, with each c_i read from its client's folder."""
    control = fedrane.load(federation.folder / out).server.extra["control"]
    owns = [federation.kept(out, k).extra["control"] for k in range(3)]
    mean = {name: sum(own[name] for own in owns) / 3 for name in control}
    assert float(tree.norm(tree.sub(mean, control))) <= 1e-5 * float(tree.norm(control))


def test_a_client_that_lies_is_left_out(federation: Federation) -> None:
    federation.app("liar", "method=scaffold", "rounds=9", "eval_every=9")
    path = federation.folder / "liar" / "app_liar" / "client_app.py"
    path.write_text(path.read_text() + LIAR)
    said = federation.submit("liar", "run-liar", timeout=300.0)
    assert federation.finished("run-liar"), said + federation.logs()
    lines = metrics(federation.folder / "run-liar")
    assert [line["lost"] for line in lines] == [[2]] * 8 + [[]]
    for line, reason in zip(lines, REASONS, strict=False):
        assert reason in line["refused"]["2"]
    assert "client 2 is left out" in said
    controls_sum_up(federation, "run-liar")


def submitted(federation: Federation, app: str, out: str, **config: object) -> Program:
    """The page's command as a process of its own."""
    script = federation.submission(app, out, **config)
    return federation.start(out, f"bash -euc {shlex.quote(script)}")


def test_a_node_that_is_killed_or_hangs_does_not_stop_the_round(federation: Federation) -> None:
    """The killed one comes back with its state."""
    federation.app("faults", "method=scaffold", "rounds=40", "eval_every=40")
    out, folder = "run-faults", federation.folder / "run-faults"
    killed, hanging = federation.programs["node-2"], federation.programs["node-1"]
    run = submitted(federation, "faults", out, timeout=60.0)
    try:
        until(lambda: federation.rounds(out) >= 1, "a round is done")
        heard = killed.said.count("Receiving: train")
        until(lambda: killed.said.count("Receiving: train") > heard or federation.rounds(out) >= 3, "it trains")
        since = len(killed.said)
        killed.stop()
        until(lambda: any(2 in line["lost"] for line in metrics(folder)), "a round ends without it")
        federation.wait_for_node(2, since)
        gone = federation.rounds(out)
        until(lambda: any(2 in line["cohort"] for line in metrics(folder)[gone:]), "it takes part again")

        hanging.send(signal.SIGSTOP)
        until(lambda: any(1 in line["lost"] for line in metrics(folder)), "a round ends without the one that hangs")
        hanging.send(signal.SIGCONT)
        reasons = {why for line in metrics(folder) for why in line.get("refused", {}).values()}
        assert reasons
        assert all("no answer" in why or "connected" in why or "failed" in why for why in reasons), reasons
    finally:
        run.stop()
        federation.programs["link"].stop()
    controls_sum_up(federation, out)


def test_a_server_that_is_killed_is_resumed_with_every_head_intact(federation: Federation) -> None:
    """FedPer: the heads are with the clients, and the server has never seen them."""
    federation.app("heads", "method=fedper", "rounds=4", "eval_every=4")
    run = submitted(federation, "heads", "run-heads")
    until(lambda: federation.rounds("run-heads") >= 2, "two rounds are done")
    run.stop()
    _restart(federation)
    said = federation.submit("heads", "run-heads")
    assert federation.finished("run-heads"), said + federation.logs()
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

"""Six real nodes, four of them hostile: the federation of the other two ends almost as an honest one of six would."""

from __future__ import annotations

from pathlib import Path

import fedrane
from deploy_federation import Federation, free_ports
from harness import metrics

NODES = 6
ATTACKS = {2: 'attack=\\"huge\\"', 3: 'attack=\\"against\\"', 5: 'attack=\\"examples\\"'}
"""What is added to these nodes' configurations; node 4 reports to be client 0."""
HOSTILE = """

import numpy as np
from flwr.app import Array
from flwr.clientapp import ClientApp

honest, app = app, ClientApp()
app.evaluate()(honest)
app.evaluate("deliver")(honest)


@app.query()
def query(message, context):
    reply = honest(message, context)
    if context.node_config.get("attack") == "examples":
        reply.content["identity"]["num_examples"] = 10**9
    return reply


@app.train()
def train(message, context):
    reply = honest(message, context)
    factor = {"huge": 1e30, "against": -10.0}.get(context.node_config.get("attack"))
    if factor:
        up = reply.content["up"]
        for name in list(up):
            up[name] = Array(np.float32(factor) * up[name].numpy())
    return reply
"""


class SixNodes(Federation):
    """The page's federation with six clients; the code of the hostile ones is switched on by their configurations."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        for old, new in {
            "method=fedrane": "method=fedavg partition.alpha=10",
            "clients=3 rounds=5 epochs=1": f"clients={NODES} rounds=3 epochs=10",
            "batch=64 eval_every=5": "batch=16 eval_every=3",
            "--nodes 3": f"--nodes {NODES}",
        }.items():
            assert old in self.prepare
            self.prepare = self.prepare.replace(old, new)
        assert "in 0 1 2;" in self.register
        self.register = self.register.replace("in 0 1 2;", f"in {' '.join(map(str, range(NODES)))};")
        self.nodes = [self.node(k, port) for k, port in enumerate(free_ports(NODES))]

    def node(self, k: int, port: int) -> str:
        script = self.nodes[0].replace(str(self.ports[9100]), str(port))
        for old in ("certs/node-0", "partition-id=0", "client-0.npz", "clients/0"):
            assert old in script
            script = script.replace(old, old.replace("0", str(k)))
        if k == 4:
            return script.replace("partition-id=4", "partition-id=0")
        return script.removesuffix('"') + f' {ATTACKS[k]}"' if k in ATTACKS else script


def test_four_hostile_nodes_of_six_do_not_ruin_a_federation(tmp_path: Path) -> None:
    federation = SixNodes(tmp_path)
    try:
        federation.do(federation.prepare)
        app = tmp_path / "trial" / "app_trial" / "client_app.py"
        app.write_text(app.read_text() + HOSTILE)
        federation.start_link()
        federation.start_nodes()
        output = federation.submit("trial", "run", wait=120.0, min_clients=4)
        assert federation.finished("run"), output + federation.logs()
    finally:
        federation.close()
    lines = metrics(tmp_path / "run")
    assert [line["cohort"] for line in lines] == [[0, 1]] * 3
    local = fedrane.run(federation.experiment().replace(engine="sequential", device="cpu"))
    assert lines[-1]["global/accuracy"] > local.history[-1]["global/accuracy"] - 0.05
    for expected in (
        "client 2 is left out: the norm of its params is",
        "client 3 is left out: the norm of its params is",
        "it has client 4's key, and it reports to be client 0",
        "it has client 5's key, and it reports client 5 with 1000000000 examples",
    ):
        assert expected in output
    recorded = [why for name, why in lines[0]["refused"].items() if name.startswith("node ")]
    assert [sum(f"client {k}'s key" in why for why in recorded) for k in (4, 5)] == [1, 1]
    assert lines[0]["refused"].keys() >= {"2", "3"}

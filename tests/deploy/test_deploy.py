"""The page's federation with real processes, TLS and node authentication: the result of a local run, bit for bit."""

from __future__ import annotations

import json

import pytest

import fedrane
from asserts import same_bytes
from deploy_federation import Federation, free_ports, until
from fedrane import tree
from fedrane.flower_app import models
from harness import metrics


def same_as_local(federation: Federation, app: str, out: str) -> None:
    local = fedrane.run(federation.experiment(app).replace(engine="sequential", device="cpu"))
    remote = fedrane.load(federation.folder / out)
    same_bytes(remote.server, local.server)
    mine, theirs = metrics(federation.folder / out)[-1], local.history[-1]
    for key in ("round", "cohort", "lost", "train/loss", "bytes_up", "bytes_down", "global/accuracy"):
        assert mine.get(key) == theirs.get(key), key
    assert mine.get("personal/clients") == theirs.get("personal/clients")


def test_the_page_from_beginning_to_end(federation: Federation) -> None:
    """FedRANE, five rounds; then what a client was left answers."""
    said = federation.do(federation.run_command)
    assert federation.finished("run"), said + federation.logs()
    same_as_local(federation, "trial", "run")
    answers = [json.loads(line) for line in federation.do(federation.predict).splitlines()]
    assert {"class", "input", "probability"} == set(answers[0])
    local = fedrane.run(federation.experiment().replace(engine="sequential", device="cpu"))
    for k in range(3):
        held = models(federation.folder / "clients" / str(k))
        same_bytes(dict(held["personal"].state_dict()), dict(local.personal(k).state_dict()))


def test_scaffold(federation: Federation) -> None:
    federation.app("scaffold", "method=scaffold")
    said = federation.submit("scaffold", "run-scaffold")
    assert federation.finished("run-scaffold"), said + federation.logs()
    same_as_local(federation, "scaffold", "run-scaffold")
    control = fedrane.load(federation.folder / "run-scaffold").server.extra["control"]
    owns = [federation.kept("run-scaffold", k).extra["control"] for k in range(3)]
    mean = {name: sum(own[name] for own in owns) / 3 for name in control}
    assert float(tree.norm(tree.sub(mean, control))) <= 1e-5 * float(tree.norm(control))


def test_the_page_s_simulation(federation: Federation) -> None:
    """Flower's own command, in Ray's processes; the rows are dealt as a local run deals them."""
    federation.listening("simulation", federation.simulation_link)
    try:
        said = federation.do(federation.simulate)
    finally:
        federation.programs["simulation"].stop()
    assert federation.finished("simulated"), said + federation.logs()
    same_as_local(federation, "trial", "simulated")


# ---- nobody enters


@pytest.fixture(scope="module")
def strangers(federation: Federation) -> Federation:
    federation.do("fedrane flower certs strangers --nodes 1")
    return federation


def entrant(federation: Federation, name: str, *changes: tuple[str, str]) -> str:
    """The page's first node with something changed, until it gives up; what it and the SuperLink say."""
    script = federation.nodes[0] + " --max-retries 2"
    script = script.replace(str(federation.ports[9100]), str(free_ports(1)[0]))
    for old, new in changes:
        assert old in script
        script = script.replace(old, new)
    before = len(federation.programs["link"].said)
    program = federation.start(name, script)
    try:
        until(lambda: not program.running, f"{name} is refused", 120)
    finally:
        program.stop()
    assert "SuperNode ID" not in program.said
    return program.said + federation.programs["link"].said[before:]


def test_an_unregistered_key_is_refused(strangers: Federation) -> None:
    said = entrant(strangers, "unregistered", ("certs/node-0", "strangers/node-0"))
    assert "No SuperNode found with the given public key" in said


def test_a_wrong_ca_is_refused(strangers: Federation) -> None:
    said = entrant(strangers, "wrong-ca", ("certs/ca.crt", "strangers/ca.crt"))
    assert "certificate" in said.lower()


def test_plaintext_is_refused(strangers: Federation) -> None:
    said = entrant(strangers, "plaintext", ("--root-certificates certs/ca.crt", "--insecure"))
    assert any(word in said.lower() for word in ("http", "tls", "disconnected", "connect"))

"""The page's federation with real processes, TLS and node authentication: the result of a local run, bit for bit."""

from __future__ import annotations

import json

import pytest

import fedrane
from asserts import same_bytes
from deploy_federation import Federation, controls_sum_up, free_ports, until
from fedrane.flower.app import models
from harness import metrics


def same_as_local(federation: Federation, app: str, out: str) -> fedrane.Result:
    local = fedrane.run(federation.experiment(app).replace(engine="sequential", device="cpu"))
    remote = fedrane.load(federation.folder / out)
    same_bytes(remote.server, local.server)
    mine, theirs = metrics(federation.folder / out)[-1], local.history[-1]
    for key in ("round", "cohort", "lost", "train/loss", "bytes_up", "bytes_down", "global/accuracy"):
        assert mine.get(key) == theirs.get(key), key
    assert mine.get("personal/clients") == theirs.get("personal/clients")
    return local


def test_the_page_from_beginning_to_end(federation: Federation) -> None:
    """FedRANE, five rounds; then predictions with the models that a client keeps."""
    output = federation.do(federation.run_command)
    assert federation.finished("run"), output + federation.logs()
    local = same_as_local(federation, "trial", "run")
    predictions = [json.loads(line) for line in federation.do(federation.predict).splitlines()]
    assert {"class", "input", "score"} == set(predictions[0])
    for k in range(3):
        held = models(federation.folder / "clients" / str(k))
        same_bytes(dict(held["personal"].state_dict()), dict(local.personal(k).state_dict()))


def test_scaffold(federation: Federation) -> None:
    federation.app("scaffold", "method=scaffold")
    output = federation.submit("scaffold", "run-scaffold")
    assert federation.finished("run-scaffold"), output + federation.logs()
    same_as_local(federation, "scaffold", "run-scaffold")
    controls_sum_up(federation, "run-scaffold")


def test_the_page_s_simulation(federation: Federation) -> None:
    """Flower's own command, in Ray's processes; the examples are partitioned as in a local run."""
    federation.listening("simulation", federation.simulation_link)
    try:
        output = federation.do(federation.simulate)
    finally:
        federation.programs["simulation"].stop()
    assert federation.finished("simulated"), output + federation.logs()
    same_as_local(federation, "trial", "simulated")


# ---- nobody enters


STRANGERS = {
    "an unregistered key": ("certs/node-0", "strangers/node-0", ("No SuperNode found with the given public key",)),
    "a wrong CA": ("certs/ca.crt", "strangers/ca.crt", ("certificate", "CERTIFICATE")),
    "plaintext": (
        "--root-certificates certs/ca.crt --auth-supernode-private-key certs/node-0",
        "--insecure",
        ("disconnected", "could not establish a connection"),
    ),
}
"""The page's first node with something changed, and what the logs report, in one form or another."""


@pytest.fixture(scope="module")
def logs(federation: Federation) -> dict[str, str]:
    """The output of strangers until they give up, and the SuperLink's."""
    federation.do("fedrane flower certs strangers --nodes 1")
    link = federation.programs["link"]
    before = len(link.output)
    programs = {}
    for (name, (old, new, _)), port in zip(STRANGERS.items(), free_ports(len(STRANGERS)), strict=True):
        script = federation.nodes[0].replace(str(federation.ports[9100]), str(port)) + " --max-retries 2"
        assert old in script
        programs[name] = federation.start(name.replace(" ", "-"), script.replace(old, new))
    try:
        until(lambda: not any(program.running for program in programs.values()), "all have given up", 120)
    finally:
        for program in programs.values():
            program.stop()
    return {name: program.output + link.output[before:] for name, program in programs.items()}


@pytest.mark.parametrize("name", STRANGERS)
def test_nobody_enters(name: str, logs: dict[str, str]) -> None:
    assert "SuperNode ID" not in logs[name]
    assert any(reason in logs[name] for reason in STRANGERS[name][2]), logs[name]

"""FedBABU: a head that does not change, and tuning that is plain SGD and does not change the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fedrane
from asserts import same_bytes
from fedrane import tree
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedbabu import FedBABU, Tuning
from fedrane.ops.sgd import SGD
from fedrane.testing import conformance
from fedrane.testing.conformance import states
from problems import dense, federation, quick, table

PARTS = ["full", "head", "body"]
HALVES = [list(range(20)), list(range(20, 60))]


def heads(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tree.pick(params, lambda name: name.startswith("head."))


def bodies(params: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return tree.pick(params, lambda name: name.startswith("body."))


def test_the_head_does_not_move_in_ten_rounds() -> None:
    """Not by momentum or weight decay, to the last bit, on the server and on every client."""
    settings: dict[str, Any] = {"rounds": 10, "momentum": 0.9, "weight_decay": 0.1, "lr": 0.05}
    result = conformance.trained(FedBABU(), post_training=False, **settings)
    first = result.algorithm.init(result.task, result.federation.roster).model.params
    for params in (
        result.server.model.params,
        *(client_state.model.params for client_state in result.client_states.values()),
    ):
        same_bytes(heads(params), heads(first))
        assert not any(tree.equal(params[name], first[name]) for name in bodies(first) if "weight" in name)


@pytest.mark.parametrize("tune", PARTS)
@pytest.mark.parametrize("norm", ["shared", "local"])
def test_post_training_leaves_the_server_as_it_was(tune: str, norm: str) -> None:
    before = conformance.trained(FedBABU(tune), post_training=False, norm=norm, momentum=0.5)
    after = conformance.trained(FedBABU(tune), norm=norm, momentum=0.5)
    assert len(after.history) == len(before.history) + 1
    same_bytes(after.server, before.server)
    assert after.history[-1]["bytes_up"] == 0
    for k, client_state in after.client_states.items():
        assert not tree.equal(client_state, before.client_states[k])


@pytest.mark.parametrize("tune", PARTS)
def test_tuning_is_plain_sgd_from_the_global_model(tune: str) -> None:
    """torch's optimiser on the tuned part, over the client's batches."""
    fed = federation(table(60), HALVES, batch=8, sgd=SGD(momentum=0.9, weight_decay=0.01))
    method = FedBABU(tune, tune_epochs=3, tune_lr=0.5)
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [0, 1], 1, 0.1, 2)
    server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    (stage,) = method.post_training()
    assert stage.local_epochs(9) == 3
    engine = Sequential(stage, fed)
    tuned = engine.train_round(server, sent.client_states, [0, 1], 2, 0.1, 3)
    for k in (0, 1):
        network = dense((6,), 3).double()
        names = ("body.0.weight", "body.0.bias", "head.weight", "head.bias")
        for parameter, name in zip(network.parameters(), names, strict=True):
            parameter.data = server.model.params[name].clone()
        assert isinstance(network, nn.Sequential)
        parts = {"full": network, "head": network[2], "body": network[0]}
        optimiser = torch.optim.SGD(parts[tune].parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)
        for batch in engine.batches(k, 2, 3):
            network.zero_grad()
            F.cross_entropy(network(batch.x), batch.y).backward()
            optimiser.step()
        for parameter, name in zip(network.parameters(), names, strict=True):
            mine = tuned.client_states[k].model.params[name]
            torch.testing.assert_close(mine, parameter.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("norm", ["shared", "local"])
def test_what_is_not_tuned_stays_the_servers(norm: str) -> None:
    """Tuning only the head does not change the body, and vice versa."""
    for tune, rest in (("head", bodies), ("body", heads)):
        result = conformance.trained(FedBABU(tune), norm=norm, momentum=0.9, weight_decay=0.1, participation=0.6)
        assert sorted(result.client_states) == [0, 1, 2, 3, 4], "also those who never took part are tuned"
        for client_state in result.client_states.values():
            shared = tree.pick(rest(client_state.model.params), lambda name, task=result.task: not task.private(name))
            same_bytes(shared, tree.pick(result.server.model.params, shared.__contains__))
            assert not tree.equal(
                client_state.model.params["head.weight"], result.server.model.params["head.weight"]
            ) or (tune == "body")
            assert tree.flatten(client_state.model).keys() == tree.flatten(result.server.model).keys()


def test_the_personal_predictions() -> None:
    """The tuned model; before post-training the one the client trained last."""
    before, after = (conformance.trained(FedBABU(), post_training=post_training) for post_training in (False, True))
    assert isinstance(after.algorithm, Tuning)
    for result in (before, after):
        same_bytes(dict(result.personal(1).parts.named_parameters()), result.client_states[1].model.params)
        same_bytes(dict(result.model.parts.named_parameters()), result.server.model.params)
    assert torch.equal(before.client_states[1].model.params["head.weight"], before.server.model.params["head.weight"])
    assert not torch.equal(after.client_states[1].model.params["head.weight"], after.server.model.params["head.weight"])
    assert {"personal/accuracy", "global/accuracy"} <= after.history[-1].keys()


@pytest.mark.parametrize("tune", PARTS)
def test_in_post_training_the_body_goes_down_and_the_head_is_there_already(tune: str) -> None:
    result = fedrane.run(quick(method=FedBABU(tune), rounds=2))
    body = 4 * 4 * sum(p.numel() for p in bodies(result.server.model.params).values())
    head = 4 * 4 * sum(p.numel() for p in heads(result.server.model.params).values())
    assert [record["bytes_down"] for record in result.history] == [body + head, body, body]
    assert [record["bytes_up"] for record in result.history] == [body, body, 0]


def test_a_run_stopped_before_post_training_resumes_with_it(tmp_path: Path) -> None:
    e = quick(method=FedBABU(tune_epochs=2), rounds=2)
    rounds = iter((False, True, False))
    stopped = fedrane.run(e, tmp_path / "run", stop=lambda: next(rounds))
    assert not stopped.finished
    resumed, whole = fedrane.resume(tmp_path / "run"), fedrane.run(e)
    same_bytes(states(resumed), states(whole))
    same_bytes(
        dict(fedrane.load(tmp_path / "run").personal(0).named_parameters()), dict(whole.personal(0).named_parameters())
    )


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"tune": "heads"}, "'head'"), ({"tune_epochs": 0}, "tune_epochs"), ({"tune_lr": 0.0}, "tune_lr")],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    """Including tuning without effect."""
    with pytest.raises(ConfigError, match=words):
        FedBABU(**settings)

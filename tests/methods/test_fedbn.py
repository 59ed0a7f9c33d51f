"""FedBN: FedAvg with normalisation layers that stay with their client, under the name of its paper."""

from __future__ import annotations

import pytest
import torch

from asserts import same_bytes
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedbn import FedBN
from fedrane.runner import run
from fedrane.testing import conformance
from problems import Listener


def logged(normalised: bool = True, **changes: object) -> list[str]:
    """What a run of two rounds says of FedBN."""
    listener, chosen = Listener(), conformance.experiment(FedBN(), rounds=2, **changes)
    network = conformance.network(normalised)
    run(chosen, dataset=conformance.blobs(), model=network, callbacks=[listener], progress=False)
    return [message for message in listener.messages if "FedBN" in message]


@pytest.mark.parametrize("norm", ["shared", "local"])
def test_it_is_fedavg_with_local_normalisation(norm: str) -> None:
    """Bit for bit, whatever the experiment says of the two."""
    settings = {"participation": 0.6, "client_dropout": 0.2, "momentum": 0.5, "weight_decay": 0.01}
    ours = conformance.trained(FedBN(), norm=norm, **settings)
    same_bytes(conformance.states(ours), conformance.states(conformance.trained(FedAvg(), norm="local", **settings)))
    assert not logged(norm=norm)


def test_normalisation_layers_never_leave() -> None:
    """Found by their type: none of these names has a "bn"."""
    (bench,) = conformance.benches(FedBN())
    sent = bench.engine.train_round(bench.result.server, bench.result.client_states, [0, 1], 4, 0.1, 1)
    layers = {name for name in bench.result.server.model.params if ".norm." in name}
    assert len(layers) == 2
    assert not layers & (sent.ups.model.params.keys() | bench.context(0).down.model.params.keys())
    assert not sent.ups.model.stats
    for kept in sent.client_states.values():
        assert kept.model.params.keys() == layers
        assert len(kept.model.stats) == 2
    assert not torch.equal(*(sent.client_states[k].model.params[min(layers)] for k in (0, 1)))


def test_a_client_predicts_with_the_servers_model_and_its_own_layers() -> None:
    result = conformance.trained(FedBN())
    parts = dict(result.personal(1).parts.named_parameters())
    same_bytes(parts, {**result.server.model.params, **result.client_states[1].model.params})
    assert "global/accuracy" not in result.history[-1]


@pytest.mark.parametrize(("norm", "normalised"), [("group", True), ("batch", True), ("shared", False)])
def test_without_a_layer_to_keep_it_is_fedavg_and_logged(norm: str, normalised: bool) -> None:
    """Once; and clients predict with the server's model."""
    ours, plain = (conformance.trained(method, normalised, norm=norm) for method in (FedBN(), FedAvg()))
    same_bytes(ours.server, plain.server)
    same_bytes(dict(ours.personal(1).parts.named_parameters()), ours.server.model.params)
    (message,) = logged(normalised, norm=norm)
    assert ("norm=" + norm if normalised else "has no BatchNorm") in message

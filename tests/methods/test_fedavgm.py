"""FedAvgM: SGD with momentum on the clients' average change."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fedrane
from asserts import close
from fedrane import tree
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedavgm import FedAvgM
from problems import quick, server_rounds


def test_momentum_by_torch_s_optimizer() -> None:
    """SGD on the negative change: m ← β m + Δ, then θ ← θ + η m."""
    parameters: dict[str, Tensor] = {}
    for before, change, server in server_rounds(FedAvgM(0.7, 0.5)):
        if not parameters:
            parameters = {name: value.clone().requires_grad_() for name, value in before.items()}
            optimizer = torch.optim.SGD(parameters.values(), lr=0.5, momentum=0.7)
        for name, parameter in parameters.items():
            parameter.grad = -change[name]
        optimizer.step()
        close(server.model.params, {name: value.detach() for name, value in parameters.items()}, 1e-12)


def test_without_momentum_it_is_fedavg() -> None:
    e = quick(precision="float64", participation=0.5)
    ours, plain = (fedrane.run(e.replace(method=method)).server.model for method in (FedAvgM(momentum=0.0), FedAvg()))
    close(ours.params, plain.params, 1e-12)


def test_its_momentum_is_resumed(tmp_path: object) -> None:
    e = quick(method=FedAvgM(), rounds=4)
    whole = fedrane.run(e).server
    fedrane.run(e.replace(rounds=2), f"{tmp_path}/run")
    assert tree.equal(fedrane.resume(f"{tmp_path}/run", rounds=4).server, whole)


def test_a_learning_rate_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="global_lr"):
        FedAvgM(global_lr=0.0)

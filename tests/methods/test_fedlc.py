"""FedLC: margins by class counts, and classes that a client does not have."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from asserts import close
from fedrane import Algorithm
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedlc import FedLC
from fedrane.ops.balance import margin
from fedrane.tree import Tensors
from objectives import midway
from problems import DOUBLE, federation, table


@pytest.mark.parametrize("absent", ["excluded", "one"])
def test_the_loss_by_a_double_loop(absent: str) -> None:
    """Over the examples and classes of a client with 1, 13 and no examples of the three."""
    method = FedLC(strength=2.5, absent=absent)
    client = midway(method, [0, *range(1, 39, 3)])
    assert client.ctx.client.labels is not None
    counts = [1.0, 13.0, math.inf if absent == "excluded" else 1.0]
    assert client.ctx.client.labels.tolist() == [1, 13, 0]
    scores = client.scores(client.params)
    total = 0.0
    for i in range(len(client.batch.y)):
        margins = [2.5 / counts[c] ** 0.25 for c in range(3)]
        weights = [math.exp(float(scores[i, c]) - margins[c]) for c in range(3)]
        weights[2] = 0.0 if absent == "excluded" else weights[2]
        total -= float(client.batch.mask[i]) * math.log(weights[int(client.batch.y[i])] / sum(weights))
    assert float(client.loss(method, client.params)) == pytest.approx(total / float(client.batch.mask.sum()), rel=1e-12)


def test_a_rare_class_must_win_by_more() -> None:
    """At the margins, s_y − s_c = τ (n_y^(−1/4) − n_c^(−1/4)), all classes have the same probability."""
    counts = torch.tensor([1.0, 16.0, 81.0], dtype=DOUBLE)
    torch.testing.assert_close(margin(counts, 3.0), -torch.tensor([3.0, 1.5, 1.0], dtype=DOUBLE))


def around(method: Algorithm, clients: list[list[int]]) -> tuple[Tensors, Tensors]:
    """The model before a round, and the clients' after it."""
    fed = federation(table(60), clients, batch=8)
    server = method.init(fed.task, fed.roster)
    sent = Sequential(method, fed).train_round(server, {}, [*range(len(clients))], 1, 0.3, 3)
    return server.model.params, sent.ups.model.params


@pytest.mark.parametrize("absent", ["excluded", "one"])
def test_with_equal_counts_it_is_fedavg(absent: str) -> None:
    halves = [list(range(24)), list(range(24, 60))]
    close(around(FedLC(5.0, absent), halves)[1], around(FedAvg(), halves)[1], 1e-12)


def test_a_class_the_client_lacks() -> None:
    """Excluded, its row of the head has no gradient, and a client of one class learns nothing; as one, both move."""
    y = table(60).y
    clients = [np.flatnonzero(y != 2).tolist(), np.flatnonzero(y == 2).tolist()]
    before, after = around(FedLC(), clients)
    assert torch.equal(after["head.weight"][0, 2], before["head.weight"][2])
    assert not torch.equal(after["head.weight"][0, 0], before["head.weight"][0])
    assert all(torch.equal(after[name][1], before[name]) for name in before)
    before, after = around(FedLC(absent="one"), clients)
    assert bool((after["head.bias"][0, 2] < before["head.bias"][2]).all())
    assert not torch.equal(after["head.weight"][1], before["head.weight"])


def test_bad_values_are_refused_and_zero_is_reported() -> None:
    with pytest.raises(ConfigError, match="strength"):
        FedLC(strength=-1.0)
    with pytest.raises(ConfigError, match="absent"):
        FedLC(absent="zero")
    with pytest.warns(UserWarning, match="is FedAvg"):
        FedLC(strength=0.0)

"""The loss of the received model is measured exactly, and local training does not change by that."""

from __future__ import annotations

import pytest
import torch

from asserts import same_bytes
from fedrane import tree
from fedrane.engines.sequential import Sequential
from fedrane.methods.fedavg import FedAvg
from fedrane.ops.received import ReceivedLoss
from fedrane.ops.sgd import SGD
from fedrane.testing import conformance
from problems import federation, table

CLIENTS = [list(range(7)), list(range(7, 60))]


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("batch", [8, 10_000])
def test_it_is_the_loss_of_the_model_that_was_sent(epochs: int, batch: int) -> None:
    """The mean over a client's examples, however unequal its batches and however far it trains."""
    fed = federation(table(60), CLIENTS, batch=batch, sgd=SGD(momentum=0.9))
    method = ReceivedLoss()
    engine, server = Sequential(method, fed), method.init(fed.task, fed.roster)
    sent = engine.train_round(server, {}, [0, 1], 1, 0.5, epochs)
    for k in (0, 1):
        there = engine.predict(server.model, fed.train, fed.split.train[k]).losses.mean()
        assert float(sent.ups.extra["loss"][k]) == pytest.approx(float(there), rel=1e-12)


def test_training_is_that_of_fedavg() -> None:
    """Under normalisation and dropout too: bit for bit."""
    runs = [conformance.trained(method, momentum=0.5, participation=0.6) for method in (ReceivedLoss(), FedAvg())]
    same_bytes(*(run.server for run in runs))


def test_padding_and_an_empty_client_have_no_loss() -> None:
    fed = federation(table(60), CLIENTS, batch=8)
    method = ReceivedLoss()
    engine, server = Sequential(method, fed), method.init(fed.task, fed.roster)
    ctx = engine.context(server, None, fed.client(0, 1, 0.1, 1))
    work = method.begin(fed.task, ctx)
    assert float(method.finish(fed.task, ctx, work).up.extra["loss"]) == 0
    (batch,) = engine.batches(0, 1, 1)
    padded = batch._replace(
        x=torch.cat([batch.x, 1e3 * torch.ones_like(batch.x)]),
        y=torch.cat([batch.y, batch.y]),
        mask=torch.cat([batch.mask, ~batch.mask]),
        full=False,
    )
    exact, other = (method.finish(fed.task, ctx, method.step(fed.task, ctx, work, b)).up.extra for b in (batch, padded))
    assert tree.norm(tree.sub(exact, other)) < 1e-12

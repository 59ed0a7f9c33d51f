"""Local training: every client alone, as if there were no rounds and no other clients."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from asserts import close, same_bytes
from fedrane.engines.sequential import Sequential
from fedrane.methods.local import Local
from fedrane.ops.sgd import SGD
from fedrane.task import State
from problems import dense, federation, table


def test_rounds_are_one_long_training() -> None:
    """torch's SGD on the client's batches of all rounds, from the common start."""
    fed = federation(table(50), [list(range(20)), list(range(20, 50))], batch=8, sgd=SGD(0.0, 1e-2))
    method, engine = Local(), Sequential(Local(), fed)
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    module = dense((6,), 3).double()
    first = {name.removeprefix("body.").replace("head.", "2."): p.clone() for name, p in server.model.params.items()}
    module.load_state_dict(first)
    optimiser = torch.optim.SGD(module.parameters(), 0.1, weight_decay=1e-2)
    for round in (1, 2, 3):
        sent = engine.train_round(server, client_states, [0, 1], round, 0.1, 2)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states = dict(sent.client_states)
        for batch in engine.batches(1, round, 2):
            optimiser.zero_grad()
            F.cross_entropy(module(batch.x), batch.y).backward()
            optimiser.step()
    params = {name.removeprefix("body.").replace("head.", "2."): p for name, p in client_states[1].model.params.items()}
    close(params, dict(module.state_dict()), 1e-12)


def test_nothing_travels() -> None:
    """Nothing is sent, so a client's result is the same bytes with any other clients."""
    examples = [list(range(20)), list(range(20, 50))]
    fed = federation(table(50), examples, batch=8)
    engine = Sequential(Local(), fed)
    server = Local().init(fed.task, fed.roster)
    both, alone = engine.train_round(server, {}, [0, 1], 1, 0.1, 2), engine.train_round(server, {}, [1], 1, 0.1, 2)
    assert both.bytes_up == both.bytes_down == 0
    assert not both.ups.model.params
    same_bytes(both.client_states[1], alone.client_states[1])
    after, _ = Local().aggregate(fed.task, server, both.ups, both.cohort)
    same_bytes(after, server)

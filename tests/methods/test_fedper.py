"""FedPer: heads never leave, bodies are FedAvg's."""

from __future__ import annotations

import torch

import fedrane
from fedrane import tree
from fedrane.engines.sequential import Sequential
from fedrane.methods.fedper import FedPer
from problems import federation, quick, table


def test_heads_never_leave() -> None:
    fed = federation(table(60), [list(range(20)), list(range(20, 60))], batch=8)
    method = FedPer()
    server = method.init(fed.task, fed.roster)
    engine = Sequential(method, fed)
    sent = engine.train_round(server, {}, [0, 1], 1, 0.1, 2)
    assert all(name.startswith("body.") for name in sent.ups.model.params)
    assert all(
        set(client_state.model.params) == {"head.weight", "head.bias"} for client_state in sent.client_states.values()
    )
    assert not torch.equal(
        sent.client_states[0].model.params["head.weight"], sent.client_states[1].model.params["head.weight"]
    )
    after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    for name, examples in sent.ups.model.params.items():
        torch.testing.assert_close(after.model.params[name], examples[0] / 3 + 2 * examples[1] / 3)
    again = engine.train_round(after, sent.client_states, [0, 1], 2, 0.1, 2)
    ctx = engine.context(after, sent.client_states[1], fed.client(1, 2, 0.1, 2))
    start = method.start(fed.task, ctx)
    kept = sent.client_states[1].model.params["head.weight"]
    assert torch.equal(start.params["head.weight"], kept), "a client goes on with its own"
    assert torch.equal(start.params["body.0.weight"], after.model.params["body.0.weight"])
    assert not tree.equal(again.client_states[1], sent.client_states[1])


def test_a_client_predicts_with_the_shared_body_and_its_own_head() -> None:
    result = fedrane.run(quick(method="fedper", rounds=3, lr=0.3))
    client_state = dict(result.personal(2).parts.named_parameters())
    assert torch.equal(client_state["head.weight"], result.client_states[2].model.params["head.weight"])
    assert torch.equal(client_state["body.embed.weight"], result.server.model.params["body.embed.weight"])
    assert "global/accuracy" not in result.history[-1]
    head = 4 * sum(p.numel() for name, p in client_state.items() if name.startswith("head."))
    assert result.history[-1]["bytes_up"] == 4 * (4 * sum(p.numel() for p in client_state.values()) - head)

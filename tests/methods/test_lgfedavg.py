"""LG-FedAvg: bodies never leave, heads are FedAvg's."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

import fedrane
from asserts import close, same_bytes
from fedrane.engines.sequential import Sequential
from fedrane.methods.fedper import FedPer
from fedrane.methods.lgfedavg import LGFedAvg
from fedrane.testing import conformance
from problems import Quadratics, federation, quick, table


def test_bodies_never_leave() -> None:
    fed = federation(table(60), [list(range(20)), list(range(20, 60))], batch=8)
    method = LGFedAvg()
    server = method.init(fed.task, fed.roster)
    engine = Sequential(method, fed)
    sent = engine.train_round(server, {}, [0, 1], 1, 0.1, 2)
    assert set(sent.ups.model.params) == {"head.weight", "head.bias"}
    kept = [sent.client_states[k].model.params for k in (0, 1)]
    assert all(set(params) == {"body.0.weight", "body.0.bias"} for params in kept)
    assert not torch.equal(kept[0]["body.0.weight"], kept[1]["body.0.weight"])
    after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    for name, heads in sent.ups.model.params.items():
        torch.testing.assert_close(after.model.params[name], heads[0] / 3 + 2 * heads[1] / 3)
    start = method.start(fed.task, engine.context(after, sent.client_states[1], fed.client(1, 2, 0.1, 2)))
    same_bytes(start.params, {**after.model.params, **kept[1]})


@dataclass(frozen=True)
class Mirrored(FedPer):
    """Sends what FedPer keeps, and keeps what it sends."""

    def shares(self, name: str) -> bool:
        return not super().shares(name)


def test_it_is_the_mirror_image_of_fedper() -> None:
    settings = {"participation": 0.6, "client_dropout": 0.2}
    runs = [conformance.trained(method, momentum=0.5, **settings) for method in (LGFedAvg(), Mirrored())]
    same_bytes(*map(conformance.states, runs))
    sent = [
        fedrane.run(quick(method=name, rounds=1)).history[0]["bytes_up"] for name in ("lg-fedavg", "fedper", "fedavg")
    ]
    assert sent[0] + sent[1] == sent[2], "each parameter is sent by exactly one of the two"
    assert 0 < sent[0] < sent[1]


def test_the_shared_head_in_closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """After local training to convergence it is the mean of the clients' minimisers, and the next round's start."""
    problem = Quadratics(monkeypatch)
    method, fed = LGFedAvg(), problem.federation
    server = method.init(fed.task, fed.roster)
    engine = Sequential(method, fed)
    sent = engine.train_round(server, {}, [0, 1, 2], 1, 0.15, 300)
    after, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    mean = torch.tensor([4.0, 5.0, 6.0], dtype=torch.float64) @ problem.centres / 15
    close({"head": problem.point(after.model.params)}, {"head": mean}, 1e-9)
    start = method.start(fed.task, engine.context(after, sent.client_states[2], fed.client(2, 2, 0.1, 1)))
    same_bytes(problem.point(start.params), problem.point(after.model.params))


def test_a_client_predicts_with_its_own_body_and_the_shared_head() -> None:
    """Statistics of normalisation layers are a part of the body."""
    result = conformance.trained(LGFedAvg())
    parts = {**dict(result.personal(2).parts.named_parameters()), **dict(result.personal(2).parts.named_buffers())}
    kept = result.client_states[2].model
    assert any(name.endswith("running_mean") for name in kept.stats)
    same_bytes({name: parts[name] for name in kept.params}, kept.params)
    same_bytes({name: parts[name] for name in kept.stats}, kept.stats)
    assert torch.equal(parts["head.weight"], result.server.model.params["head.weight"])
    assert "global/accuracy" not in result.history[-1]

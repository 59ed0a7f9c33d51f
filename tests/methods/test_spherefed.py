"""SphereFed: calibration is ridge regression on all examples, for any partition, and changes only the global head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor, nn

import fedrane
from asserts import same_bytes, untimed
from fedrane.data.federation import Federation
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.fedrane import FedRANE
from fedrane.methods.spherefed import Calibration, SphereFed
from fedrane.ops.sphere import Moments, squared_error, unit
from fedrane.task import Batch, State, one_hot
from fedrane.testing import conformance
from fedrane.testing.conformance import network, states
from problems import DOUBLE, Listener, dense, federation, quick, table

NETWORKS: dict[str, tuple[Callable[..., nn.Module], str]] = {"dense": (dense, "2"), "normalised": (network(), "head")}
SPLITS: list[tuple[list[list[int]], int]] = [
    ([list(range(60))], 10_000),
    ([list(range(30)), list(range(30, 60))], 8),
    ([list(range(60))[c::3] for c in range(3)], 7),  # each client has one class
    ([[0], list(range(1, 47)), list(range(47, 60))], 16),
]


def prepared(clients: list[list[int]], batch: int, network: str = "dense") -> Federation:
    make, head = NETWORKS[network]
    fed = federation(table(60), clients, make, head, batch)
    return replace(fed, task=SphereFed().prepare(fed.task))


def halfway(network: str) -> State:
    """A server state after some training, the same for all splits of the post-training stage."""
    fed, method = prepared(*SPLITS[1], network), SphereFed()
    server = method.init(fed.task, fed.roster)
    for round in (1, 2):
        sent = Sequential(method, fed).train_round(server, {}, [0, 1], round, 0.5, 3)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    return server


def features(fed: Federation, server: State) -> tuple[Tensor, Tensor]:
    x, y = fed.train.take(np.arange(60))
    mask = torch.ones(60, dtype=torch.bool)
    z = fed.task.evaluating(server.model, mask).body(x)
    return z / z.norm(dim=1, keepdim=True), y


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 10.0])
def test_calibration_is_ridge_regression_on_all_rows(network: str, ridge: float) -> None:
    """scikit-learn's, on the pooled features in evaluation mode, for every split and batch size."""
    server = halfway(network)
    for clients, batch in SPLITS:
        fed = prepared(clients, batch, network)
        (stage,) = SphereFed(ridge=ridge).post_training()
        everyone = list(range(len(clients)))
        sent = Sequential(stage, fed).train_round(server, {}, everyone, 3, 0.5, stage.local_epochs(5))
        after, _ = stage.aggregate(fed.task, server, sent.ups, sent.cohort)
        head_weight = stage.global_model(fed.task, after).params["head.weight"]
        z, y = features(fed, server)
        expected = Ridge(alpha=ridge, fit_intercept=False).fit(z.numpy(), np.eye(3)[y.numpy()]).coef_
        torch.testing.assert_close(head_weight, torch.from_numpy(expected), rtol=1e-7, atol=1e-9)
        same_bytes(after.model, server.model)


def test_each_row_counts_once() -> None:
    """For any number of epochs; padding never counts."""
    fed = prepared(*SPLITS[2])
    server = halfway("dense")
    (stage,) = SphereFed().post_training()
    assert stage.local_epochs(5) == 1
    engine = Sequential(stage, fed)
    sent = engine.train_round(server, {}, [0, 1, 2], 3, 0.5, stage.local_epochs(5))
    assert sent.ups.extra["examples"].tolist() == [20.0, 20.0, 20.0]
    z, y = features(fed, server)
    torch.testing.assert_close(sent.ups.extra["gram"].sum(0), z.T @ z)
    torch.testing.assert_close(sent.ups.extra["cross"].sum(0), z.T @ torch.eye(3, dtype=DOUBLE)[y])
    ctx = engine.context(server, None, fed.client(0, 3, 0.5, 1))
    work = stage.begin(fed.task, ctx)
    for batch in engine.batches(0, 3, 1):
        filled = torch.cat([batch.x, torch.full((4, 6), float("nan"), dtype=DOUBLE)])
        mask = torch.cat([batch.mask, torch.zeros(4, dtype=torch.bool)])
        y = torch.cat([batch.y, torch.ones(4, dtype=torch.int64)])
        work = stage.step(fed.task, ctx, work, Batch(filled, y, mask, batch.key))
    for name, value in stage.finish(fed.task, ctx, work).up.extra.items():
        torch.testing.assert_close(value, sent.ups.extra[name][0])
    result = fedrane.run(quick(method="spherefed", rounds=2, epochs=3))
    assert result.history[-1]["train/examples"] * 3 == result.history[0]["train/examples"]


def test_the_error_read_off_the_moments_is_the_squared_error() -> None:
    draws = torch.Generator().manual_seed(0)
    z = unit(torch.randn(40, 7, generator=draws, dtype=DOUBLE))
    y = torch.randint(4, (40,), generator=draws)
    batch = Batch(z, y, torch.arange(40) < 33, y[0])
    moments = Moments.of(z, batch, 4)
    for head in (torch.randn(4, 7, generator=draws, dtype=DOUBLE), moments.ridge_regression(0.1)):
        torch.testing.assert_close(moments.squared_error(head), squared_error(z @ head.T, batch))
    assert torch.equal(one_hot(y, 4).long(), nn.functional.one_hot(y, 4))


@pytest.mark.parametrize("seed", range(20))
def test_calibration_is_never_worse_on_the_training_examples(seed: int) -> None:
    """Never worse than any head by more than the ridge term ½ρ‖W‖² / n, including the fixed and the optimal head."""
    draws = torch.Generator().manual_seed(seed)
    examples = int(torch.randint(2, 60, (), generator=draws))
    z = unit(torch.randn(examples, 9, generator=draws, dtype=DOUBLE).clamp(min=0))  # some features are always zero
    y = torch.randint(5, (examples,), generator=draws)
    moments = Moments.of(z, Batch(z, y, torch.ones(examples, dtype=torch.bool), y[0]), 5)
    fixed = torch.linalg.qr(torch.randn(9, 5, generator=draws, dtype=DOUBLE))[0].T
    best = torch.linalg.lstsq(z, torch.eye(5, dtype=DOUBLE)[y], driver="gelsd").solution.T
    for ridge in (1e-9, 1e-3):
        error = moments.squared_error(moments.ridge_regression(ridge))
        for head in (fixed, best):
            allowed = 0.5 * ridge * head.square().sum() / examples
            assert float(error) <= float(moments.squared_error(head) + allowed) + 1e-12
    assert float(error) < float(moments.squared_error(fixed)), "compared with a random head there is much to gain"


def test_without_calibration_it_is_the_same_run_up_to_post_training() -> None:
    settings: dict[str, Any] = {"rounds": 4, "momentum": 0.5, "participation": 0.5, "clients": 6, "lr": 0.3}
    with_it, without = (fedrane.run(quick(method=SphereFed(calibrate=flag), **settings)) for flag in (True, False))
    assert untimed(with_it.history[:4]) == untimed(without.history)
    assert len(with_it.history) == 5
    same_bytes(with_it.server.model, without.server.model)
    for k, client_state in without.client_states.items():
        same_bytes(with_it.client_states[k], client_state)
    assert without.server.extra == {}
    last = with_it.history[-1]
    assert last["calibration/loss"] < last["train/loss"]


def test_the_calibrated_head_is_the_global_models_alone() -> None:
    result = fedrane.run(quick(method="spherefed", rounds=3, lr=0.5))
    assert isinstance(result.algorithm, Calibration)
    fixed = result.server.model.params["head.weight"]
    torch.testing.assert_close(fixed @ fixed.T, torch.eye(10), rtol=0, atol=1e-5)
    calibrated = result.server.extra["head.weight"]
    assert calibrated.dtype == torch.float32
    assert torch.equal(result.model.get_parameter("parts.head.weight"), calibrated)
    assert not torch.equal(calibrated, fixed)
    assert torch.equal(result.personal(1).get_parameter("parts.head.weight"), fixed)
    x = (torch.arange(5 * 64) * 37 % 256).to(torch.uint8).reshape(5, 1, 8, 8)
    z = result.model.parts["body"]((x / 255 - result.inputs.mean[0]) / result.inputs.std[0])
    torch.testing.assert_close(result.model(x), nn.functional.normalize(z) @ calibrated.T)


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.5, "participation": 0.5, "clients": 6}])
def test_it_is_fedrane_without_its_two_parts(settings: dict[str, Any]) -> None:
    """With and without its calibration."""
    for calibrate in (True, False):
        mine, other = (
            fedrane.run(quick(method=method, rounds=3, lr=0.3, **settings))
            for method in (SphereFed(calibrate=calibrate), FedRANE(lra=False, gne=False, calibrate=calibrate))
        )
        same_bytes(states(mine), states(other))
        assert untimed(mine.history) == untimed(other.history)
        assert len(mine.history) == 3 + calibrate


@pytest.mark.parametrize("method", [SphereFed(), FedRANE()])
@pytest.mark.parametrize(
    ("norm", "why"),
    [
        ("batch", "with norm=batch features depend on their batch"),
        ("local", "with norm=local there is no global model"),
    ],
)
def test_features_that_are_not_one_function_are_not_calibrated(
    method: SphereFed | FedRANE, norm: str, why: str
) -> None:
    listener = Listener()
    e = conformance.experiment(method, norm=norm)
    result = fedrane.run(e, dataset=conformance.blobs(), model=network(), callbacks=[listener])
    assert result.server.extra == {}
    assert listener.messages[-1] == f"round 4: no calibration: {why}"


def test_a_run_stopped_before_post_training_resumes_with_it(tmp_path: Path) -> None:
    e = quick(method="spherefed", rounds=2)
    rounds = iter((False, True, False))
    assert not fedrane.run(e, tmp_path / "run", stop=lambda: next(rounds)).finished
    resumed, whole = fedrane.resume(tmp_path / "run"), fedrane.run(e)
    same_bytes(states(resumed), states(whole))
    loaded = fedrane.load(tmp_path / "run").model
    same_bytes(dict(loaded.named_parameters()), dict(whole.model.named_parameters()))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="ridge"):
        SphereFed(ridge=0.0)
    with pytest.raises(ConfigError, match="wider model"):
        SphereFed().prepare(replace(prepared(*SPLITS[0]).task, classes=9))

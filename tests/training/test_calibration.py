"""Temperature scaling: the fit from sums, the examples it uses, and the probabilities it gives."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedrane
from fedrane import Experiment
from fedrane.data import load
from fedrane.errors import ConfigError
from fedrane.methods import METHODS
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.local import Local
from fedrane.testing import conformance
from fedrane.training import calibration, loop
from fedrane.training.calibration import RANGE, TRAINING, VALIDATION, ClientScores, fit
from fedrane.training.result import Result
from fedrane.training.run_folder import CALIBRATION, Folder
from harness import untimed
from problems import EVERY_METHOD

DIGITS = load("digits")


def drawn(examples: int, sharpness: float, seed: int = 0, classes: int = 5) -> ClientScores:
    """Examples whose labels are drawn from softmax(sharpness · scores)."""
    numbers = torch.Generator().manual_seed(seed)
    scores = torch.randn(examples, classes, dtype=torch.float64, generator=numbers)
    return ClientScores(scores, (sharpness * scores).softmax(1).multinomial(1, generator=numbers)[:, 0])


def likelihood(examples: ClientScores, beta: Tensor, wrong: float) -> Tensor:
    """The negative log-likelihood, for autograd."""
    classes = examples.scores.shape[1]
    target = torch.full_like(examples.scores, wrong / (classes - 1))
    target[torch.arange(len(examples.y)), examples.y] = 1 - wrong
    return -(target * (beta * examples.scores).log_softmax(1)).sum()


# ---- the fit


@pytest.mark.parametrize("wrong", [0.0, 0.1])
@pytest.mark.parametrize("beta", [0.2, 1.0, 30.0])
def test_the_sums_are_gradient_and_curvature(beta: float, wrong: float) -> None:
    examples, at = drawn(40, 2.0), torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(likelihood(examples, at, wrong), at, create_graph=True)
    (curvature,) = torch.autograd.grad(gradient, at)
    assert examples.sums(beta, wrong) == pytest.approx((float(gradient.detach()), float(curvature)))


@pytest.mark.parametrize("sharpness", [0.1, 0.7, 1.0, 5.0, 40.0])
def test_the_temperature_is_the_one_the_labels_were_drawn_at(sharpness: float) -> None:
    assert fit([drawn(40_000, sharpness)], [0.0]) == pytest.approx(1 / sharpness, rel=0.06)


@pytest.mark.parametrize("sharpness", [0.1, 1.0, 40.0])
def test_no_other_temperature_is_likelier(sharpness: float) -> None:
    examples, wrong = drawn(300, sharpness), 0.01
    temperature = fit([examples], [wrong])
    best = likelihood(examples, torch.tensor(1 / temperature), wrong)
    for other in (0.99, 1.01, 0.5, 2.0):
        assert likelihood(examples, torch.tensor(other / temperature), wrong) > best


def test_how_examples_lie_with_the_clients_does_not_matter() -> None:
    full = drawn(300, 3.0)
    parts = [
        ClientScores(full.scores[examples], full.y[examples]) for examples in torch.arange(300).split([10, 250, 40])
    ]
    assert fit(parts, [0.01] * 3) == pytest.approx(fit([full], [0.01]), rel=1e-9)


def test_a_model_without_errors_is_not_taken_for_certain() -> None:
    """One wrong prediction is added: after n correct ones, the confidence is about 1 − 1/n."""
    scores = torch.eye(4, dtype=torch.float64).repeat(25, 1)
    perfect = ClientScores(scores, scores.argmax(1))
    temperature = fit([perfect], [1 / 102])
    assert float((scores[0] / temperature).softmax(0).max()) == pytest.approx(1 - 1 / 102)


def test_a_model_worse_than_chance_is_sure_of_nothing() -> None:
    scores = torch.eye(4, dtype=torch.float64).repeat(25, 1)
    assert fit([ClientScores(scores, scores.argmin(1))], [0.01]) == pytest.approx(1 / RANGE[0], rel=1e-6)


# ---- at the end of a run


@cache
def digits(method: str, **changes: Any) -> Result:
    settings: dict[str, Any] = {"rounds": 10, "epochs": 2, "batch": 16, "clients": 10, "model": "mlp", "device": "cpu"}
    return fedrane.run(Experiment(dataset="digits", method=method, eval_every=100, **(settings | changes)))


def calibration_error(chances: Tensor, y: Tensor, bins: int = 15) -> float:
    """The expected calibration error: the distance of confidence from accuracy, over bins of confidence."""
    sure, label = chances.double().max(1)
    interval = (sure * bins).ceil().long()
    gaps = [(sure - (label == y).double())[interval == b].sum().abs() for b in range(bins + 1)]
    return float(sum(gaps)) / len(y)


@pytest.mark.parametrize("validation", [0.0, 0.2])
@pytest.mark.parametrize("method", ["spherefed", "fedrane-wo-lra", "fedavg"])
def test_probabilities_are_nearer_the_truth_than_a_softmax(method: str, validation: float) -> None:
    """On test examples, which are not used in the fit; without it, cosine scores are far off."""
    result = digits(method, validation=validation)
    x, y = torch.from_numpy(DIGITS.x_test), torch.from_numpy(DIGITS.y_test)
    with torch.no_grad():
        scores, chances = result.model(x), result.model.predict_proba(x)
    assert torch.equal(scores.argmax(1), chances.argmax(1))
    raw, calibrated = calibration_error(scores.softmax(1), y), calibration_error(chances, y)
    assert calibrated < raw
    assert calibrated < 0.06
    if method != "fedavg":
        assert raw > 0.7
    assert result.calibration["global"].examples == (VALIDATION if validation else TRAINING)


def test_personal_probabilities_are_near_the_truth() -> None:
    result = digits("spherefed")
    pool, examples = result.federation.train, result.federation.split.test
    with torch.no_grad():
        raw = torch.cat([result.personal(k)(pool.x[mine]) for k, mine in enumerate(examples)]).softmax(1)
        chances = torch.cat([result.personal(k).predict_proba(pool.x[mine]) for k, mine in enumerate(examples)])
    y = pool.y[np.concatenate(examples)]
    assert calibration_error(chances, y) < 0.06 < 0.7 < calibration_error(raw, y)


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_model_of_every_method_is_calibrated(name: str) -> None:
    result = conformance.trained(METHODS[name].cls(**METHODS[name].preset), rounds=2)
    assert set(result.calibration) == set(result.algorithm.models_on(result.task))
    assert all(math.isfinite(each.temperature) and each.temperature > 0 for each in result.calibration.values())


def scrambled(result: Result, keep: str) -> Result:
    """With other labels for all examples except one part of the split."""
    y = torch.full_like(result.federation.train.y, 0)
    for mine in getattr(result.federation.split, keep):
        y[mine] = result.federation.train.y[mine]
    train = replace(result.federation.train, y=y)
    test = replace(result.federation.test, y=torch.zeros_like(result.federation.test.y))
    return replace(result, federation=replace(result.federation, train=train, test=test))


@pytest.mark.parametrize(("share", "which"), [(0.0, "train"), (0.2, "validation")])
def test_test_examples_are_not_looked_at(share: float, which: str) -> None:
    """Only the labels of the examples that it is fitted to matter."""
    result = digits("spherefed", rounds=2, validation=share)
    again = scrambled(result, which)
    assert calibration.calibrate(result, again.federation, None) == result.calibration
    assert calibration.calibrate(result, scrambled(result, "test").federation, None) != result.calibration


def test_predictions_are_made_in_batches_where_they_depend_on_them() -> None:
    """With norm=batch, each client separately, in batches of the training size, as in an evaluation."""
    result = conformance.trained(FedAvg(), rounds=2, norm="batch")
    clients = []
    with torch.no_grad():
        for examples in result.federation.split.train:
            x, y = result.federation.train.x[examples], result.federation.train.y[examples]
            scores = torch.cat([result.model(part) for part in x.split(result.federation.batch)])
            clients.append(ClientScores(scores, y))
    wrong = 1 / (sum(len(client.y) for client in clients) + 2)
    assert fit(clients, [wrong] * 5) == result.calibration["global"].temperature


# ---- in the run folder


def small(tmp_path: Path, name: str, method: Any = None, **settings: Any) -> Result:
    experiment = conformance.experiment(method or FedAvg(), device="cpu")
    return fedrane.run(
        experiment, tmp_path / name, dataset=conformance.blobs(), model=conformance.network(), **settings
    )


def test_a_resumed_run_has_the_same_temperature(tmp_path: Path) -> None:
    full = small(tmp_path, "reference")
    stopped = small(tmp_path, "stopped", stop=lambda: True)
    assert stopped.calibration == {}
    assert not (tmp_path / "stopped" / CALIBRATION).exists()
    rest = {"dataset": conformance.blobs(), "model": conformance.network()}
    assert fedrane.resume(tmp_path / "stopped", **rest).calibration == full.calibration
    files = [(tmp_path / name / CALIBRATION).read_bytes() for name in ("reference", "stopped")]
    assert files[0] == files[1]


def test_a_loaded_model_has_its_temperature(tmp_path: Path) -> None:
    result = small(tmp_path, "run", Local())
    models = fedrane.load(tmp_path / "run", model=conformance.network())
    assert models.calibration == result.calibration
    assert models.personal(1).temperature == result.calibration["personal"].temperature
    x = torch.from_numpy(conformance.blobs().x_test)
    probabilities = models.personal(1).predict_proba(x)
    torch.testing.assert_close(probabilities, (models.personal(1)(x) / models.personal(1).temperature).softmax(1))


def test_a_folder_of_an_older_version_has_scores(tmp_path: Path) -> None:
    small(tmp_path, "run")
    (tmp_path / "run" / CALIBRATION).unlink()
    model = fedrane.load(tmp_path / "run", model=conformance.network()).model
    assert model.temperature is None
    with pytest.raises(ConfigError, match="not calibrated"):
        model.predict_proba(torch.zeros(1, 6))


def test_a_temperature_belongs_to_its_round(tmp_path: Path) -> None:
    """If the last checkpoint is damaged, an older one is used, and the temperature does not fit its scores."""
    small(tmp_path, "run")
    newest = Folder(tmp_path / "run").checkpoints()[-1]
    newest.write_bytes(b"")
    with pytest.warns(UserWarning, match="older checkpoint"):
        models = fedrane.load(tmp_path / "run", model=conformance.network())
    assert models.calibration == {}


def test_metrics_do_not_know_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics, summary and checkpoints are the same as without calibration."""
    small(tmp_path, "with")
    monkeypatch.setattr(loop, "calibrate", lambda models, federation, engine: {})
    small(tmp_path, "without")
    with_, without = (Folder(tmp_path / name) for name in ("with", "without"))
    assert json.loads((tmp_path / "without" / CALIBRATION).read_text())["models"] == {}
    assert [a.read_bytes() for a in with_.checkpoints()] == [b.read_bytes() for b in without.checkpoints()]
    assert list(map(untimed, with_.read_metrics())) == list(map(untimed, without.read_metrics()))

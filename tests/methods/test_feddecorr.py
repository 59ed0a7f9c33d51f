"""FedDecorr: the penalty by NumPy's correlations, in the paper's form and the code's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import fedrane
from fedrane import Model
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.feddecorr import FedDecorr, correlations
from fedrane.task import cross_entropy
from objectives import differences_agree, midway
from problems import DOUBLE, quick

FORMS = pytest.mark.parametrize("form", ["paper", "code"])


def examples(n: int, d: int, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(n), dtype=dtype) * 30


def penalty(features: Tensor, form: str = "paper", mask: Tensor | None = None) -> Tensor:
    mask = torch.ones(len(features), dtype=torch.bool) if mask is None else mask
    return FedDecorr(form=form)._penalty(features, mask)


def test_the_penalty_by_numpy() -> None:
    """‖K‖² / d²; in the code's form the mean square off the diagonal of XᵀX = (n − 1) K, divided by n."""
    features = examples(11, 5)
    k = np.corrcoef(features.numpy(), rowvar=False)
    assert float(penalty(features)) == pytest.approx((k**2).sum() / 25, rel=1e-9)
    off_diagonal = (10 * k)[~np.eye(5, dtype=bool)]
    assert float(penalty(features, "code")) == pytest.approx((off_diagonal**2).mean() / 11, rel=1e-9)


def test_the_loss_is_cross_entropy_and_the_penalty() -> None:
    method = FedDecorr(strength=0.7)
    client = midway(method, range(22))
    loss, outcome = method.objective(client.task, client.ctx, Model(client.params, {}), client.batch)
    plain = cross_entropy(client.scores(client.params), client.batch)
    expected = penalty(client.features(client.params)[client.batch.mask])
    torch.testing.assert_close(outcome.metrics["loss"], plain)
    torch.testing.assert_close(outcome.metrics["correlation"], expected)
    torch.testing.assert_close(loss, plain + 0.7 * expected)


@FORMS
def test_the_gradient_by_finite_differences(form: str) -> None:
    method = FedDecorr(strength=3.0, form=form)
    client = midway(method, range(22))
    differences_agree(lambda params: client.loss(method, params), client.params)


def test_orthogonal_and_equal_features() -> None:
    """Orthogonal ones leave the diagonal, 1/d; equal ones have 1, and in the code's form (n − 1)²/n."""
    signs = torch.tensor([[1, 1], [1, -1]], dtype=DOUBLE)
    orthogonal = 7 * torch.kron(signs, torch.kron(signs, signs))[:, 1:6] + 4  # without the constant column
    assert float(penalty(orthogonal)) == pytest.approx(1 / 5, rel=1e-8)
    assert float(penalty(orthogonal, "code")) == pytest.approx(0, abs=1e-15)
    equal = examples(9, 1).expand(9, 5) * torch.tensor([1.0, -2.0, 3.0, 0.5, -1.0], dtype=DOUBLE)
    assert float(penalty(equal)) == pytest.approx(1, rel=1e-8)
    assert float(penalty(equal, "code")) == pytest.approx(8**2 / 9, rel=1e-8)


@FORMS
def test_units_of_features_do_not_count(form: str) -> None:
    features = examples(10, 4)
    other = features * torch.tensor([1.0, -5.0, 0.2, 40.0], dtype=DOUBLE) + torch.tensor([0.0, 1.0, -9.0, 50.0])
    torch.testing.assert_close(penalty(other, form), penalty(features, form), rtol=1e-8, atol=0)


@FORMS
@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_padding_and_constant_features_count_nowhere(form: str, dtype: torch.dtype) -> None:
    features = examples(6, 4, dtype)
    features[:, 2] = 3.7
    mask = torch.tensor([True, False] * 6)
    padded = torch.full((12, 4), torch.inf, dtype=dtype)
    padded[mask] = features
    torch.testing.assert_close(penalty(padded, form, mask), penalty(features, form))
    assert float(correlations(padded, mask)[2].abs().max()) < 1e-5
    gradient = torch.func.grad(lambda f: penalty(f, form, mask))(padded)
    assert bool((gradient[~mask] == 0).all())
    assert bool(torch.isfinite(gradient).all())


@FORMS
@pytest.mark.parametrize("n", [0, 1, 2])
def test_two_examples_are_no_evidence_of_correlation(n: int, form: str) -> None:
    """They are on a line, so that any features are perfectly correlated."""
    mask = torch.arange(4) < n
    gradient, value = torch.func.grad_and_value(lambda f: penalty(f, form, mask))(examples(4, 3) / 1e5)
    assert float(value) == 0
    assert bool((gradient == 0).all())


def test_training_lowers_the_correlations() -> None:
    """Of the features of a client, far below those of a weak penalty."""

    def after(strength: float) -> float:
        result = fedrane.run(quick(method=FedDecorr(strength), rounds=3, precision="float64"))
        batch = next(Sequential(result.algorithm, result.federation).batches(0, 4, 1))
        features = result.task.evaluating(result.server.model, batch.mask).body(batch.x)
        return float(penalty(features, "code", batch.mask))

    assert after(3.0) < 0.7 * after(1e-6)


def test_bad_values_are_refused_and_zero_is_reported() -> None:
    with pytest.raises(ConfigError, match="strength"):
        FedDecorr(strength=-1.0)
    with pytest.raises(ConfigError, match="form"):
        FedDecorr(form="both")
    with pytest.warns(UserWarning, match="is FedAvg"):
        FedDecorr(strength=0.0)

"""The laws of relational mining."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from fedrane.errors import ConfigError
from fedrane.methods.fedrane import FedRANE
from fedrane.ops import graph
from fedrane.ops.contrast import discrimination
from fedrane.ops.graph import FLOOR, MessagePassing, effective_rank, homophily, inverse_root, pearson, relations

DOUBLE = torch.float64


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = DOUBLE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


Mine = Callable[..., graph.Relations]


@pytest.fixture(params=[True, False], ids=["products", "LAPACK"])
def mine(request: pytest.FixtureRequest) -> Mine:
    """``relations`` with a gradient by matrix products, and without one by LAPACK."""
    return partial(relations, differentiable=request.param)


def alive(examples: int) -> Tensor:
    return torch.ones(examples, dtype=torch.bool)


def clusters(sizes: tuple[int, ...] = (60, 50, 18), noise: float = 0.2, seed: int = 0) -> tuple[Tensor, Tensor]:
    y = torch.cat([torch.full((n,), c) for c, n in enumerate(sizes)])
    return draw(len(sizes), 64, seed=seed)[y] + noise * draw(len(y), 64, seed=seed + 1), y


def smoothed(correlation: Tensor, weights: Tensor, strength: float) -> float:
    """½‖P − PB‖² + 2λ Tr((BBᵀ + εI)^½)."""
    values = torch.linalg.eigvalsh(weights @ weights.mT + FLOOR * torch.eye(len(weights), dtype=DOUBLE))
    fit = 0.5 * (correlation - correlation @ weights).square().sum()
    return float(fit + 2 * strength * values.clamp(min=0).sqrt().sum())


def test_pearson_is_numpys() -> None:
    z = draw(9, 5) * 3 + 7
    np.testing.assert_allclose(pearson(z, alive(9)).numpy(), np.corrcoef(z.numpy()), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_a_constant_row_is_related_to_none(mine: Mine, dtype: torch.dtype) -> None:
    """Exactly: its rounding error is not treated as a direction."""
    z = draw(9, 7, dtype=dtype)
    z[2], z[5] = 0.1, 1e6 / 3
    correlation = pearson(z, alive(9))
    assert float(correlation[[2, 5]].abs().sum() + correlation[:, [2, 5]].abs().sum()) == 0
    assert float(mine(z, alive(9), 0.1).adjacency[[2, 5]].abs().sum()) == 0


@pytest.mark.parametrize("strength", [0.01, 0.1, 3.0])
@pytest.mark.parametrize("alternation", [1, 2, 5])
def test_the_exact_form_solves_its_inner_problem(mine: Mine, alternation: int, strength: float) -> None:
    """For the last Φ, each column is the constrained minimiser that a linear solver finds."""
    z = draw(10, 6)
    correlation = pearson(z, alive(10))
    eye = torch.eye(10, dtype=DOUBLE)
    phi = eye
    if alternation > 1:
        before = mine(z, alive(10), strength, alternation - 1, tolerance=0).weights
        values, vectors = torch.linalg.eigh(before @ before.mT + FLOOR * eye)
        phi = vectors @ torch.diag(values**-0.5) @ vectors.mT
    full = correlation.mT @ correlation + strength * (phi + phi.mT)
    weights = mine(z, alive(10), strength, alternation, tolerance=0).weights
    for j in range(10):
        rest = [i for i in range(10) if i != j]
        column = torch.linalg.solve(full[rest][:, rest], (correlation.mT @ correlation)[rest, j])
        torch.testing.assert_close(weights[rest, j], column, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("strength", [0.01, 0.1, 1.0])
@pytest.mark.parametrize("examples", [7, 40])
def test_the_exact_form_never_raises_the_smoothed_objective(mine: Mine, examples: int, strength: float) -> None:
    z = draw(examples, 16, seed=examples)
    correlation = pearson(z, alive(examples))
    values = [
        smoothed(correlation, mine(z, alive(examples), strength, n, tolerance=0).weights, strength)
        for n in range(1, 12)
    ]
    assert all(after <= before + 1e-9 * abs(before) for before, after in itertools.pairwise(values))
    assert values[-1] < values[0]


def test_the_papers_form_is_the_exact_one_where_phi_is_a_multiple_of_the_identity() -> None:
    z = draw(12, 8)
    exact, paper = (relations(z, alive(12), 0.1, 1, form).weights for form in ("exact", "paper"))
    torch.testing.assert_close(exact, paper, rtol=1e-9, atol=1e-12)
    exact, paper = (relations(z, alive(12), 0.1, 3, form).weights for form in ("exact", "paper"))
    assert float((exact - paper).norm() / exact.norm()) > 0.1, "they differ elsewhere"


def by_eigenvalues(z: Tensor, strength: float, alternations: int, form: str) -> Tensor:
    """B in float64 by the library's solvers."""
    correlation, eye = pearson(z, alive(len(z))), torch.eye(len(z), dtype=DOUBLE)
    weights, phi = torch.zeros_like(eye), eye
    for _ in range(alternations):
        penalty = 2 * strength * phi
        inverse = torch.linalg.inv(correlation.mT @ correlation + penalty)
        spread = inverse @ penalty
        exact = spread + inverse * (1 - spread.diagonal()) / inverse.diagonal()
        weights = -(exact if form == "exact" else inverse / inverse.diagonal()) * (1 - eye)
        values, vectors = torch.linalg.eigh(weights @ weights.mT + FLOOR * eye)
        phi = vectors @ torch.diag(values**-0.5) @ vectors.mT
    return weights


@pytest.mark.parametrize("differentiable", [True, False])
@pytest.mark.parametrize("noise", [0.3, 0.03, 0.001])
@pytest.mark.parametrize(("form", "within"), [("exact", 1e-3), ("paper", 1e-5)])
def test_a_float32_batch_of_tight_clusters_has_the_edges_of_float64(
    form: str, within: float, noise: float, differentiable: bool
) -> None:
    """Relative to the largest edge. In float32, the paper's form had errors of several times that."""
    z = clusters(noise=noise)[0].float()
    result = relations(z, alive(len(z)), 0.1, 5, form, tolerance=0, differentiable=differentiable)
    true = by_eigenvalues(z.double(), 0.1, 5, form)
    assert {values.dtype for values in result} == {torch.float32}
    assert float((result.weights.double() - true).abs().max() / true.abs().max()) < within


def test_more_alternations_of_the_papers_form_than_float64_bears_are_refused() -> None:
    assert FedRANE(closed_form="paper", alternations=10).alternations == 10
    assert FedRANE(alternations=11).alternations == 11
    with pytest.raises(ConfigError, match=r"alternations=11 .*closed_form=paper: .*rounding.*closed_form=exact"):
        FedRANE(closed_form="paper", alternations=11)


def test_the_papers_form_wanders() -> None:
    """The reason why it is not the default: it increases what it should decrease."""
    z = draw(20, 16, seed=2)
    correlation = pearson(z, alive(20))
    values = [
        smoothed(correlation, relations(z, alive(20), 0.1, n, "paper", tolerance=0).weights, 0.1) for n in (1, 2, 3, 5)
    ]
    assert max(values[1:]) > values[0]


@pytest.mark.parametrize("form", graph.CHOICES["closed_form"])
def test_the_adjacency_is_one(mine: Mine, form: str) -> None:
    result = mine(draw(3, 15, 6), alive(15).expand(3, -1), 0.1, 5, form)
    assert bool((result.weights.diagonal(dim1=-2, dim2=-1) == 0).all())
    assert torch.equal(result.adjacency, result.adjacency.mT)
    assert bool((result.adjacency >= 0).all())
    torch.testing.assert_close(result.adjacency, (result.weights.abs() + result.weights.abs().mT) / 2)


def test_batches_are_mined_apart(mine: Mine) -> None:
    z = draw(3, 15, 6)
    mask = torch.stack([alive(15), torch.arange(15) < 9, torch.arange(15) >= 4])
    together = mine(z, mask, 0.1)
    for k in range(3):
        alone = mine(z[k], mask[k], 0.1)
        torch.testing.assert_close(together.adjacency[k], alone.adjacency, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(together.change[k], alone.change)


def test_permuting_examples_permutes_the_graph(mine: Mine) -> None:
    z, turned = draw(20, 8), torch.randperm(20, generator=torch.Generator().manual_seed(1))
    straight, other = mine(z, alive(20), 0.1).adjacency, mine(z[turned], alive(20), 0.1).adjacency
    torch.testing.assert_close(other, straight[turned][:, turned], rtol=1e-8, atol=1e-10)


def test_scale_and_shift_of_a_row_change_nothing() -> None:
    z = draw(20, 8)
    a, b = torch.rand(20, 1, dtype=DOUBLE) * 10 + 0.01, draw(20, 1, seed=3)
    before, after = (relations(examples, alive(20), 0.1).adjacency for examples in (z, a * z + b))
    torch.testing.assert_close(after, before, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("junk", [float("nan"), 1.0], ids=["NaN", "numbers"])
@pytest.mark.parametrize("form", graph.CHOICES["closed_form"])
def test_padding_changes_nothing(mine: Mine, form: str, junk: float) -> None:
    """A batch padded to twice its size gives the same graph, and padding has no edges."""
    z = draw(16, 8)
    mask = torch.zeros(32, dtype=torch.bool)
    mask[torch.randperm(32, generator=torch.Generator().manual_seed(0))[:16]] = True
    padded = junk * draw(32, 8, seed=1)
    padded[mask] = z
    plain, full = mine(z, alive(16), 0.1, 4, form), mine(padded, mask, 0.1, 4, form)
    torch.testing.assert_close(full.adjacency[mask][:, mask], plain.adjacency, rtol=1e-8, atol=1e-10)
    assert float(full.adjacency[~mask].abs().sum() + full.adjacency[:, ~mask].abs().sum()) == 0
    torch.testing.assert_close(full.change, plain.change)


HARD = {
    "duplicates": draw(1, 16).expand(12, -1),
    "constant": torch.ones(12, 16),
    "zero": torch.zeros(12, 16),
    "two": draw(2, 16),
    "one": draw(1, 16),
    "opposite": torch.cat([draw(1, 16), -draw(1, 16)]),
    "huge": draw(12, 16) * 1e18,
    "small": draw(12, 16) * 1e-18,
    "an outlier": torch.cat([draw(11, 16), torch.ones(1, 16, dtype=DOUBLE)]),
    "more examples than features": draw(128, 8),
}


@pytest.mark.parametrize("name", HARD)
@pytest.mark.parametrize("strength", [1e-3, 0.1, 10.0])
def test_hard_batches_stay_finite_in_float32(name: str, strength: float) -> None:
    """Also the messages and their gradients, including those through the graph."""
    z = HARD[name].float().clone().requires_grad_()
    mask = alive(len(z))
    result = relations(z, mask, strength, 5)
    passing = MessagePassing(16 if z.shape[1] == 16 else 8, 2, "softmax", True, 0)
    out = passing(z, result.adjacency, mask)
    for values in (*result, out, effective_rank(result.weights)):
        assert bool(torch.isfinite(values).all())
    if name not in ("huge", "small"):
        out.square().mean().backward()
        assert bool(torch.isfinite(z.grad).all())
    for values in relations(z.detach(), mask, strength, 5, differentiable=False):
        assert bool(torch.isfinite(values).all())


def test_both_ways_mine_the_same_graph() -> None:
    z, mask = draw(4, 60, 16), torch.rand(4, 60, generator=torch.Generator().manual_seed(0)) < 0.9
    products, lapack = (relations(z, mask, 0.1, 5, differentiable=d) for d in (True, False))
    torch.testing.assert_close(products.weights, lapack.weights, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize("junk", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_related_to_none(mine: Mine, junk: float) -> None:
    """Training goes on to the end of the round, where divergence is one clear error."""
    z = draw(12, 5)
    z[3, 2] = junk
    adjacency = mine(z, alive(12), 0.1).adjacency
    assert bool(torch.isfinite(adjacency).all())
    assert float(adjacency[3].abs().sum()) == 0


def test_a_row_without_edges_gets_no_message() -> None:
    z = draw(5, 4)
    adjacency = torch.rand(5, 5, dtype=DOUBLE)
    adjacency[2] = adjacency[:, 2] = 0
    for attention in graph.CHOICES["attention"]:
        passing = MessagePassing(4, 1, attention, True, 0).double()
        out = passing(z, adjacency, alive(5))
        assert torch.equal(out[2], z[2])
        assert not torch.equal(out[1], z[1])
        assert bool((MessagePassing(4, 1, attention, False, 0).double()(z, adjacency, alive(5))[2] == 0).all())


def test_the_inverse_root_is_one() -> None:
    matrix = draw(4, 30, 12) / 5
    matrix = matrix @ matrix.mT + FLOOR * torch.eye(30, dtype=DOUBLE)
    root = inverse_root(matrix, alive(30).expand(4, -1))
    torch.testing.assert_close(root @ matrix @ root, torch.eye(30, dtype=DOUBLE).expand(4, -1, -1), rtol=0, atol=1e-6)
    single = inverse_root(matrix.float(), alive(30).expand(4, -1))
    assert float((single.double() - root).norm() / root.norm()) < 1e-3


def test_what_has_settled_is_left_alone(mine: Mine) -> None:
    """A graph stops when its change is below the tolerance, and reports the change of its last step."""
    z = draw(2, 25, 6)
    mask = alive(25).expand(2, -1)
    four, thirty = mine(z, mask, 0.1, 4, tolerance=0), mine(z, mask, 0.1, 30, tolerance=float("inf"))
    first = mine(z, mask, 0.1, 1)
    assert torch.equal(thirty.weights, first.weights)
    assert not torch.equal(four.weights, first.weights)
    assert bool((mine(z, mask, 0.1, 60).change < 0.02).all())


def test_same_class_edges_outweigh_chance() -> None:
    """On an imbalanced batch of three clusters: at least twice the class prior, also for the minority."""
    z, y = clusters()
    result = relations(z, alive(len(y)), 0.1)
    assert float(homophily(result.adjacency, y, alive(len(y)))) >= 2
    minority = y == 2
    share = (result.adjacency[minority][:, minority].sum() / result.adjacency[minority].sum()) / (
        (minority.sum() - 1) / (len(y) - 1)
    )
    assert float(share) >= 2


def test_homophily_of_a_blind_graph_is_one() -> None:
    _, y = clusters()
    blind = 1 - torch.eye(len(y), dtype=DOUBLE)
    assert float(homophily(blind, y, alive(len(y)))) == pytest.approx(1)


def test_effective_rank() -> None:
    assert float(effective_rank(torch.eye(7, dtype=DOUBLE))) == pytest.approx(7)
    assert float(effective_rank(draw(7, 1) @ draw(1, 7))) == pytest.approx(1)


def test_the_mean_degree_leaves_out_padding() -> None:
    adjacency, mask = torch.zeros(6, 6, dtype=DOUBLE), torch.arange(6) < 4
    adjacency[0, 1] = adjacency[1, 0] = 3.0
    assert float(graph.mean_degree(adjacency, mask)) == 6 / 4


def test_at_first_a_message_is_the_neighbour_itself() -> None:
    """So that z̃ is pulled towards its neighbours before training."""
    z, adjacency = draw(2, 4), torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=DOUBLE)
    passing = MessagePassing(4, 1, "softmax", True, 0).double()
    torch.testing.assert_close(passing(z, adjacency, alive(2)), z + z.flip(0))


def test_each_step_has_weights_of_its_own() -> None:
    """Two steps equal two single steps in sequence."""
    z, adjacency = draw(6, 4), torch.rand(6, 6, dtype=DOUBLE)
    both, *single = (MessagePassing(4, steps, "softmax", True, 0).double() for steps in (2, 1, 1))
    expected = z
    for number, passing in enumerate(single):
        for ours, theirs in zip(both.children(), passing.children(), strict=True):
            torch.nn.init.normal_(theirs[0].weight)
            ours[number].load_state_dict(theirs[0].state_dict())
        expected = passing(expected, adjacency, alive(6))
    torch.testing.assert_close(both(z, adjacency, alive(6)), expected)


def test_attention_is_the_formula() -> None:
    """Softmax over neighbours of the scaled product plus log A, by loops; and the paper's plain product."""
    z, adjacency = draw(6, 4), torch.rand(6, 6, dtype=DOUBLE)
    adjacency[0, 3] = 0
    mask = torch.tensor([True] * 5 + [False])
    for attention in graph.CHOICES["attention"]:
        passing = MessagePassing(4, 1, attention, False, 0).double()
        m, n, v = (part[0].weight for part in (passing.receive, passing.send, passing.value))
        out = passing(z, adjacency, mask)
        for i in range(5):
            near = [j for j in range(5) if adjacency[i, j] > 0]
            scores = torch.stack([(m @ z[i]) @ (n @ z[j]) / 2 for j in near])
            if attention == "softmax":
                scores = torch.softmax(scores + adjacency[i, near].log(), 0)
            expected = sum(s * (v @ z[j]) for s, j in zip(scores, near, strict=True))
            torch.testing.assert_close(out[i], expected)


def test_the_strongest_neighbours_alone() -> None:
    adjacency = torch.tensor([[0, 3, 2, 1], [3, 0, 0.5, 0.1], [2, 0.5, 0, 0.2], [1, 0.1, 0.2, 0.0]])
    kept = graph.strongest(adjacency, 1)
    assert kept.tolist() == [[0, 3, 2, 1], [3, 0, 0, 0], [2, 0, 0, 0], [1, 0, 0, 0]]
    assert torch.equal(graph.strongest(adjacency, 4), adjacency)


def test_gradients_of_attention_and_contrast_with_the_graph_held_fixed() -> None:
    z = draw(6, 4).requires_grad_()
    mask = torch.tensor([True] * 5 + [False])
    adjacency = relations(z.detach(), mask, 0.1, 3).adjacency
    passing = MessagePassing(4, 2, "softmax", True, 0).double()

    def loss(examples: Tensor, *weights: Tensor) -> Tensor:
        names = [name for name, _ in passing.named_parameters()]
        out = torch.func.functional_call(passing, dict(zip(names, weights, strict=True)), (examples, adjacency, mask))
        return discrimination(examples, out, mask, 0.5)

    assert torch.autograd.gradcheck(loss, (z, *passing.parameters()))


def test_gradients_through_the_graph() -> None:
    """At a fixed number of alternations."""
    z = draw(6, 5).requires_grad_()
    mask = torch.tensor([True] * 5 + [False])
    assert torch.autograd.gradcheck(
        lambda examples: relations(examples, mask, 0.1, 3, tolerance=0).adjacency, (z,), atol=1e-4
    )


def test_it_works_under_vmap_and_grad() -> None:
    """As in a stacked engine."""
    z, mask = draw(3, 10, 4), torch.rand(3, 10, generator=torch.Generator().manual_seed(0)) < 0.8

    def loss(examples: Tensor, mask: Tensor) -> Tensor:
        return relations(examples, mask, 0.1, 3).adjacency.square().sum()

    together = torch.func.vmap(torch.func.grad(loss))(z, mask)
    lapack = torch.func.vmap(partial(relations, strength=0.1, differentiable=False))(z, mask)
    for k in range(3):
        torch.testing.assert_close(together[k], torch.func.grad(loss)(z[k], mask[k]), rtol=1e-7, atol=1e-9)
        alone = relations(z[k], mask[k], 0.1, differentiable=False)
        torch.testing.assert_close(lapack.weights[k], alone.weights, rtol=1e-9, atol=1e-12)

"""The laws of bargaining."""

from __future__ import annotations

import math

import cvxpy
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from asserts import close
from fedrane.errors import ConfigError
from fedrane.ops import sketch
from fedrane.ops.matrices import Dense, Factored
from fedrane.ops.nash import SOLVERS, Agreement, Terms, agree, bargain, gram, negotiate
from fedrane.ops.sketch import Sketches, sketched
from fedrane.task import Client, Model

DOUBLE = torch.float64
TINY = 1e-10


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def positive(rows: int, columns: int, seed: int = 0) -> Tensor:
    return torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE) + 0.05


CASES = {
    "full rank": draw(200, 20),
    "one client": draw(7, 1),
    "rank 9 of 30": draw(50, 9) @ positive(9, 30),
    "badly scaled": draw(100, 20) * torch.logspace(-8, 8, 20, dtype=DOUBLE),
    "nearly parallel": draw(100, 1) + 1e-6 * draw(100, 20, seed=1),
    "conflicting": draw(40, 30),
    "many": draw(3000, 100),
}


@pytest.mark.parametrize("name", CASES)
def test_every_utility_is_the_power_over_the_weight(name: str) -> None:
    """p ∘ Mp = w to 1e-10, so that every ΔₖᵀGp is positive and equals w_k / p_k."""
    deviations = CASES[name]
    matrix = deviations.T @ deviations
    for powers in (None, positive(len(matrix), 1).flatten()):
        made = bargain(matrix, powers)
        w = torch.ones(len(matrix), dtype=DOUBLE) if powers is None else powers
        p = made.weights
        assert made.ridge == 0
        assert made.moves
        assert made.excluded == ()
        assert float((p * (matrix @ p) - w).abs().max()) <= TINY
        assert made.residual <= TINY
        utilities = deviations.T @ (deviations @ p)
        assert bool((utilities > 0).all())
        torch.testing.assert_close(utilities, w / p, rtol=1e-9, atol=0)


@pytest.mark.parametrize("method", SOLVERS)
def test_the_order_of_clients_is_irrelevant(method: str) -> None:
    matrix = CASES["full rank"].T @ CASES["full rank"]
    turned = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    p, q = bargain(matrix, method=method).weights, bargain(matrix[turned][:, turned], method=method).weights
    torch.testing.assert_close(q, p[turned], rtol=1e-7, atol=0)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(1e-6, 1e6), min_size=6, max_size=6), st.integers(0, 1000))
def test_scaling_a_client_scales_its_weight_and_no_direction(factors: list[float], seed: int) -> None:
    deviations, c = draw(30, 6, seed=seed), torch.tensor(factors, dtype=DOUBLE)
    p = bargain(deviations.T @ deviations).weights
    scaled = deviations * c
    q = bargain(scaled.T @ scaled).weights
    torch.testing.assert_close(q, p / c, rtol=1e-9, atol=0)
    torch.testing.assert_close(scaled @ q, deviations @ p, rtol=1e-8, atol=1e-10)


def test_equal_clients_get_equal_weight() -> None:
    one = draw(50, 1)
    p = bargain(one.expand(-1, 8).T @ one.expand(-1, 8)).weights
    torch.testing.assert_close(p, p[0].expand(8), rtol=1e-12, atol=0)


def test_two_orthogonal_clients_meet_half_way() -> None:
    """Along the bisector, for any lengths."""
    deviations = torch.tensor([[3.0, 0.0], [0.0, 0.01], [0.0, 0.0]], dtype=DOUBLE)
    step = deviations @ bargain(deviations.T @ deviations).weights
    torch.testing.assert_close(step / step.norm(), torch.tensor([1.0, 1.0, 0.0], dtype=DOUBLE) / math.sqrt(2))


@pytest.mark.parametrize("powers", [None, "unequal"])
def test_no_other_direction_of_that_length_has_a_higher_product(powers: str | None) -> None:
    """Against 2,000 perturbations of the optimum and positive mixtures of the clients."""
    deviations = draw(30, 8)
    w = torch.ones(8, dtype=DOUBLE) if powers is None else positive(8, 1, seed=5).flatten()
    step = deviations @ bargain(deviations.T @ deviations, None if powers is None else w).weights
    agreed = (w * (deviations.T @ step).log()).sum()
    near = step + step.norm() * torch.cat([s * draw(700, 30, seed=i) for i, s in enumerate((1e-3, 1e-2, 3e-2))])
    mixed = positive(6000, 8, seed=9) @ deviations.T
    others = torch.cat([near, mixed])
    others = others * (step.norm() / others.norm(dim=1, keepdim=True))
    utilities = others @ deviations
    allowed = (utilities > 0).all(1)
    assert int(allowed.sum()) >= 1000
    assert int(allowed[: len(near)].sum()) >= 500
    assert int(allowed[len(near) :].sum()) >= 200
    assert float((w * utilities[allowed].log()).sum(1).max()) <= float(agreed) + 1e-9


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clients", [2, 5, 20, 30])
def test_the_papers_sequence_agrees_with_newton(clients: int, seed: int) -> None:
    deviations = draw(200, clients, seed=seed) * torch.logspace(-3, 3, clients, dtype=DOUBLE)
    matrix = deviations.T @ deviations
    newton, sequence = bargain(matrix), bargain(matrix, method="sequential")
    lengths = matrix.diagonal().sqrt()
    assert sequence.ridge == 0
    assert float(((newton.weights - sequence.weights) * lengths).abs().max()) <= 1e-6


@pytest.mark.parametrize("clients", [1, 3, 10, 20])
def test_a_convex_solver_agrees(clients: int) -> None:
    """CVXPY on ½pᵀMp − Σ w log p; a missing solver is an error, without a fallback."""
    assert "CLARABEL" in cvxpy.installed_solvers()
    deviations = draw(60, clients, seed=3) / math.sqrt(60)
    w = positive(clients, 1, seed=4).flatten()
    p = cvxpy.Variable(clients)
    objective = cvxpy.sum_squares(deviations.numpy() @ p) / 2 - w.numpy() @ cvxpy.log(p)
    precise = {"tol_gap_abs": 1e-11, "tol_gap_rel": 1e-11, "tol_feas": 1e-11}
    problem = cvxpy.Problem(cvxpy.Minimize(objective))
    problem.solve(solver="CLARABEL", **precise)
    assert problem.status == "optimal"
    torch.testing.assert_close(
        bargain(deviations.T @ deviations, w).weights, torch.from_numpy(p.value), rtol=1e-6, atol=0
    )


# ---- no solution, or no clients


def test_all_zero() -> None:
    made = bargain(torch.zeros(4, 4, dtype=DOUBLE))
    assert made.excluded == (0, 1, 2, 3)
    assert not made.moves
    assert made.weights.tolist() == [0] * 4


def test_opposite_clients_do_not_move() -> None:
    one = draw(9, 1)
    both = torch.cat([one, -3 * one], 1)
    made = bargain(both.T @ both)
    assert made.ridge > 0
    assert not made.moves
    assert bool(torch.isfinite(made.weights).all())


@pytest.mark.parametrize(("clients", "directions"), [(30, 9), (1000, 20)])
def test_no_common_half_space_is_reported(clients: int, directions: int) -> None:
    """A ridge, reported with the residual of the system with it; finite weights, or no move."""
    deviations = draw(directions, clients)
    made = bargain(deviations.T @ deviations)
    assert made.ridge > 0
    lengths = deviations.norm(dim=0)
    scaled = (deviations / lengths).T @ (deviations / lengths) + made.ridge * torch.eye(clients, dtype=DOUBLE)
    x = made.weights * lengths
    assert float((x * (scaled @ x) - 1).abs().max()) == pytest.approx(made.residual, rel=0.5, abs=1e-7)
    assert made.residual <= 1e-6
    assert bool(torch.isfinite(made.weights).all())
    assert bool((made.weights > 0).all())


def test_what_is_not_finite_or_zero_is_left_out() -> None:
    deviations = draw(50, 7)
    deviations[3, 2], deviations[5, 4], deviations[:, 5] = float("nan"), float("inf"), 0
    made = bargain(gram({"w": torch.zeros(50, dtype=DOUBLE)}, {"w": deviations.T.contiguous()}))
    assert made.excluded == (2, 4, 5)
    kept = deviations[:, [0, 1, 3, 6]]
    torch.testing.assert_close(made.weights[[0, 1, 3, 6]], bargain(kept.T @ kept).weights, rtol=1e-10, atol=0)
    assert made.weights[[2, 4, 5]].tolist() == [0, 0, 0]


def test_an_unknown_solver_is_refused() -> None:
    with pytest.raises(ConfigError, match="'newton'"):
        bargain(torch.eye(2), method="newtn")


# ---- the Gram matrix, and the use of the weights


def test_the_gram_matrix_is_that_of_the_deviations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in small blocks, and from float32 uploads."""
    base = {"a": draw(3, 4).float(), "b": draw(5).float(), "unsent": draw(2).float()}
    rows = {name: base[name] + 1e-4 * draw(6, *base[name].shape, seed=1).float() for name in ("a", "b")}
    flat = torch.cat([(rows[n].double() - base[n].double()).flatten(1) for n in rows], 1)
    close({"m": gram(base, rows)}, {"m": flat @ flat.T}, 1e-18)
    monkeypatch.setattr("fedrane.tree.BLOCK_SIZE", 13)
    close({"m": gram(base, rows)}, {"m": flat @ flat.T}, 1e-18)


@pytest.mark.parametrize("dtype", [torch.float32, DOUBLE])
def test_deviations_are_taken_in_double_precision(dtype: torch.dtype) -> None:
    """For large and small deviations: the exact difference of the uploads, not a rounded one."""
    base = {"w": (1e3 * draw(40)).to(dtype)}
    for apart in (1e3, 1.0, 1e-6):
        rows = {"w": (base["w"].double() + apart * draw(5, 40, seed=1)).to(dtype)}
        exact = rows["w"].double() - base["w"].double()
        torch.testing.assert_close(gram(base, rows), exact @ exact.T, rtol=1e-12, atol=0)


def agreement(length: str, blend: float = 1.0, deviations: Tensor | None = None) -> tuple[Agreement, Tensor, Tensor]:
    deviations = draw(40, 6) if deviations is None else deviations
    ratio = torch.tensor([0.5, 0.1, 0.1, 0.1, 0.1, 0.1], dtype=DOUBLE)
    return agree(deviations.T @ deviations, ratio, None, length, blend, "newton"), deviations, ratio


def test_lengths() -> None:
    """Each rule keeps the direction and sets the length."""
    made, deviations, ratio = agreement("average")
    p, step = made.bargain.weights, deviations @ made.weights
    torch.testing.assert_close(step.norm(), (deviations @ ratio).norm())
    torch.testing.assert_close(step / step.norm(), (deviations @ p) / (deviations @ p).norm())
    assert float(agreement("simplex")[0].weights.sum()) == pytest.approx(1)
    literal = agreement("ball")[0].weights
    assert float((deviations @ literal).square().sum()) == pytest.approx(6), "‖Gp‖² = K"
    torch.testing.assert_close(literal, p)


def test_a_blend_is_between() -> None:
    whole, _, ratio = agreement("average")
    half = agreement("average", 0.5)[0].weights
    torch.testing.assert_close(half, (whole.weights + ratio) / 2)
    torch.testing.assert_close(agreement("average", 0.0)[0].weights, ratio)


def cohort(sizes: list[int]) -> Client:
    size = torch.tensor(sizes)
    return Client(torch.arange(10, 10 + len(sizes)), size, None, size, size, size.double(), 20)


def models(clients: int, seed: int = 0) -> tuple[Model, Model]:
    shapes = {"body.0.weight": (4, 3), "body.0.bias": (4,), "body.1.weight": (2, 4), "head.weight": (3, 2)}
    base = {name: draw(*shape, seed=seed) for name, shape in shapes.items()}
    rows = {name: base[name] + draw(clients, *shapes[name], seed=seed + 1) for name in shapes}
    stats = {"body.0.running_mean": draw(4)}
    return Model(base, stats), Model(rows, {"body.0.running_mean": draw(clients, 4, seed=8)})


def bargained(server: Model, ups: Model, names: list[str]) -> dict[str, Tensor]:
    """The names are one vector, clients have equal power, and the step has the length of the plain mean."""
    flat = torch.cat([(ups.params[n] - server.params[n]).flatten(1) for n in names], 1)
    p = bargain(flat @ flat.T).weights
    p = p * (flat.mean(0).norm() / (p @ flat).norm())
    return {n: server.params[n] + torch.tensordot(p, ups.params[n] - server.params[n], 1) for n in names}


@pytest.mark.parametrize(
    ("scope", "groups"),
    [
        ("model", [["body.0.weight", "body.0.bias", "body.1.weight", "head.weight"]]),
        ("layer", [["body.0.weight", "body.0.bias"], ["body.1.weight"], ["head.weight"]]),
        ("body", [["body.0.weight", "body.0.bias", "body.1.weight"]]),
        ("head", [["head.weight"]]),
    ],
)
def test_scopes(scope: str, groups: list[list[str]]) -> None:
    """Which parameters are bargained over, together or separately; the rest and statistics are averaged."""
    server, ups = models(5)
    (params, stats), record = negotiate(server, ups, cohort([7] * 5), Terms(scope=scope))
    expected = {name: rows.mean(0) for name, rows in ups.params.items()}
    for names in groups:
        expected |= bargained(server, ups, names)
    close(params, expected, 1e-12)
    close(stats, {"body.0.running_mean": ups.stats["body.0.running_mean"].mean(0)}, 1e-12)
    deviations = {name: rows - server.params[name] for name, rows in ups.params.items()}
    grams = [sum(d @ d.T for d in (deviations[name].flatten(1) for name in names)) for names in groups]
    assert record["gne/p"] == pytest.approx(torch.stack([bargain(gram).weights for gram in grams]).mean(0).tolist())
    assert record["gne/norms"] == pytest.approx(sum(gram.diagonal() for gram in grams).sqrt().tolist())
    assert record["gne/residual"] <= TINY
    assert record["gne/ridge"] == 0


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_power_by_samples(power: float) -> None:
    server, ups = models(4)
    sizes = [1, 2, 3, 10]
    _, record = negotiate(server, ups, cohort(sizes), Terms(power=power))
    flat = torch.cat([(ups.params[n] - server.params[n]).flatten(1) for n in ups.params], 1)
    w = torch.tensor(sizes, dtype=DOUBLE) ** power
    w = 4 * w / w.sum()
    torch.testing.assert_close(torch.tensor(record["gne/p"], dtype=DOUBLE), bargain(flat @ flat.T, w).weights)


@pytest.mark.parametrize("scope", ["model", "layer"])
def test_by_samples_a_client_may_be_split(scope: str) -> None:
    """Power by samples is what every example would have by itself: two clients with one client's deviation and its
    samples between them get what it got. With equal powers they get more."""
    server, ups = models(3)
    halves = [0, 1, 2, 2]
    split = Model({n: r[halves] for n, r in ups.params.items()}, {n: r[halves] for n, r in ups.stats.items()})
    for power, same in ((1.0, True), (0.0, False)):
        terms = Terms(power=power, scope=scope)
        (whole, _), _ = negotiate(server, ups, cohort([5, 9, 8]), terms)
        (parts, _), _ = negotiate(server, split, cohort([5, 9, 2, 6]), terms)
        gap = max(float((whole[n] - parts[n]).abs().max()) for n in whole)
        assert (gap < 1e-9) == same


def test_where_clients_agree_the_bargain_by_samples_is_the_average() -> None:
    server, ups = models(1)
    alike = Model({n: r[[0] * 3] for n, r in ups.params.items()}, {n: r[[0] * 3] for n, r in ups.stats.items()})
    _, record = negotiate(server, alike, cohort([1, 3, 4]), Terms(power=1.0, length="simplex"))
    assert record["gne/weights"] == pytest.approx([1 / 8, 3 / 8, 4 / 8], abs=1e-9)


def test_where_clients_have_nothing_in_common_each_pulls_by_the_root_of_its_power() -> None:
    lengths, w = torch.tensor([0.1, 1.0, 7.0], dtype=DOUBLE), torch.tensor([1.0, 4.0, 9.0], dtype=DOUBLE)
    made = bargain(torch.diag(lengths.square()), w)
    torch.testing.assert_close(made.weights * lengths, w.sqrt())


SKETCHED = Terms(power=1.0, scope="layer", gram="sketch", sketch=8)


@pytest.mark.parametrize(
    "terms", [Terms(), Terms(power=1.0, scope="layer"), Terms(length="ball", scope="body"), SKETCHED]
)
def test_a_broken_upload_is_left_out_of_everything(terms: Terms) -> None:
    """Parameters, statistics and record as without its upload, except that the record names it. Also of the layers in
    which its numbers are finite."""
    server, ups = models(5)
    ups.params["body.0.bias"][3] = float("nan")
    ups.stats["body.0.running_mean"][3] = float("inf")
    (params, stats), record = negotiate(server, ups, cohort([4, 5, 6, 7, 8]), terms)
    others = [0, 1, 2, 4]
    without = Model({n: r[others] for n, r in ups.params.items()}, {n: r[others] for n, r in ups.stats.items()})
    (again, stats_again), _ = negotiate(server, without, cohort([4, 5, 6, 8]), terms)
    close(params, again, 1e-12)
    close(stats, stats_again, 1e-12)
    assert record["gne/excluded"] == [13], "the client's index, not its position"


@pytest.mark.parametrize("known", ["exact", "sketch"])
@pytest.mark.parametrize("scope", ["model", "layer"])
def test_a_client_without_a_deviation_is_left_out(scope: str, known: str) -> None:
    """Of the length of the step and of the statistics too."""
    server, ups = models(4)
    for name, rows in ups.params.items():
        rows[2] = server.params[name]
    terms, others = Terms(power=1.0, scope=scope, gram=known, sketch=8), [0, 1, 3]
    (params, stats), record = negotiate(server, ups, cohort([1, 2, 30, 4]), terms)
    without = Model({n: r[others] for n, r in ups.params.items()}, {n: r[others] for n, r in ups.stats.items()})
    (again, stats_again), _ = negotiate(server, without, cohort([1, 2, 4]), terms)
    close(params, again, 1e-12)
    close(stats, stats_again, 1e-12)
    assert record["gne/excluded"] == [12]


def test_a_layer_that_nobody_trained_changes_nothing_else() -> None:
    """Layers bargain separately: who has no deviation in one of them still counts in the others and in statistics."""
    server, ups = models(3)
    expected = negotiate(server, ups, cohort([1, 2, 3]), Terms(scope="layer"))[0]
    ups.params["head.weight"][:] = server.params["head.weight"]
    (params, stats), record = negotiate(server, ups, cohort([1, 2, 3]), Terms(scope="layer"))
    close(params, expected.params | {"head.weight": server.params["head.weight"]}, 1e-15)
    close(stats, expected.stats, 1e-15)
    assert record["gne/moves"]
    assert (record["gne/excluded"], record["messages"]) == ([], [])


def test_layers_that_cancel_out_stay() -> None:
    server, ups = models(2)
    there = server.params["head.weight"]
    ups.params["head.weight"][0], ups.params["head.weight"][1] = there + 1, there - 1
    (params, _), record = negotiate(server, ups, cohort([3, 3]), Terms(scope="layer"))
    assert torch.equal(params["head.weight"], there)
    assert not torch.equal(params["body.1.weight"], server.params["body.1.weight"])
    assert record["messages"][-1] == "the clients cancel out: 1 of 3 layers do not move"


def test_clients_that_cancel_out_leave_the_model() -> None:
    server, _ = models(2)
    there = {name: torch.stack([p + 1, p - 1]) for name, p in server.params.items()}
    (params, _), record = negotiate(server, Model(there, {}), cohort([3, 3]), Terms())
    assert all(torch.equal(params[name], server.params[name]) for name in params)
    assert record["gne/moves"] is False
    assert record["gne/ridge"] > 0
    assert np.isfinite(record["gne/p"]).all()


def test_what_is_only_averaged_is_averaged_though_it_cancels() -> None:
    """Outside the scope, and with a blend of 0."""
    server, ups = models(2)
    ups.params["head.weight"][0], ups.params["head.weight"][1] = 1.0, -1.0
    server.params["head.weight"].zero_()
    (params, _), record = negotiate(server, ups, cohort([30, 10]), Terms(scope="body"))
    torch.testing.assert_close(params["head.weight"], torch.full((3, 2), 0.5, dtype=DOUBLE))
    assert record["gne/moves"]
    there = {name: torch.stack([p + 1, p - 1]) for name, p in server.params.items()}
    (params, _), _ = negotiate(server, Model(there, {}), cohort([30, 10]), Terms(blend=0.0))
    close(params, {name: p + 0.5 for name, p in server.params.items()}, 1e-12)


@pytest.mark.parametrize("seed", range(40))
def test_the_sequence_never_throws(seed: int) -> None:
    """Few dimensions, uneven powers, conflicts: a solution with a small residual, or a ridge."""
    draws = np.random.default_rng(seed)
    clients, directions = int(draws.integers(1, 12)), int(draws.integers(2, 30))
    deviations = draw(directions, clients, seed=seed)
    powers = torch.from_numpy(draws.gamma(0.5, size=clients) + 1e-3)
    made = bargain(deviations.T @ deviations, powers, "sequential")
    assert bool(torch.isfinite(made.weights).all())
    assert made.residual <= 1e-5 * max(1.0, float(powers.max()))


# ---- sketches instead of deviations


def crowd(clients: int, width: int, common: float = 0.7) -> Sketches:
    """Sketches of clients around a common direction, of lengths spread by e; without it they conflict."""
    numbers = draw(clients, width) + common * draw(width, seed=1)
    numbers *= draw(clients, 1, seed=2).exp()
    return Sketches(numbers, numbers.norm(dim=1) * positive(clients, 1, seed=3).flatten())


def as_matrix(sketches: Sketches) -> Tensor:
    """What the sketches say of the Gram matrix, with the exact norms."""
    unit = sketches.numbers / sketches.numbers.norm(dim=1, keepdim=True) * sketches.norms[:, None]
    return unit @ unit.T


@pytest.mark.parametrize("by", ["equal powers", "powers"])
@pytest.mark.parametrize("width", [64, 299, 300])
def test_newton_by_factors_is_newton(width: int, by: str) -> None:
    """To 1e-10, of 300 clients, and every utility is the power over the weight."""
    sketches = crowd(300, width)
    w = torch.ones(300, dtype=DOUBLE) if by == "equal powers" else positive(300, 1, seed=5).flatten() * 2
    made, dense = bargain(sketches, w), bargain(as_matrix(sketches), w)
    assert isinstance(sketches.cosines(np.ones(300, bool)), Factored if width < 300 else Dense)
    torch.testing.assert_close(made.weights, dense.weights, rtol=1e-10, atol=0)
    assert made.ridge == dense.ridge == 0
    assert made.moves
    assert made.residual <= TINY
    utilities = as_matrix(sketches) @ made.weights
    assert float((made.weights * utilities - w).abs().max()) <= TINY


def test_a_crowd_bargains_without_its_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    """30,000 clients, whose matrix would take 7 GB: it is never formed. The residual is the one that is promised."""
    monkeypatch.setattr(sketch, "Dense", None)
    sketches = crowd(30_000, 16, common=2.0)
    made = bargain(sketches, positive(30_000, 1).flatten())
    assert (made.ridge, made.moves, made.excluded) == (0, True, ())
    assert made.residual <= 1.05e-11
    assert bool((made.weights > 0).all())


@pytest.mark.parametrize("width", [8, 30])
def test_a_crowd_that_conflicts_gets_the_ridge_of_its_matrix(width: int) -> None:
    sketches = crowd(300, width, common=0.0)
    made, dense = bargain(sketches), bargain(as_matrix(sketches))
    assert made.ridge == dense.ridge > 0
    assert made.residual <= 1e-6
    torch.testing.assert_close(made.weights, dense.weights, rtol=1e-5, atol=0)


def test_the_papers_sequence_also_takes_sketches() -> None:
    sketches = crowd(30, 20)
    newton, sequence = bargain(sketches), bargain(sketches, method="sequential")
    torch.testing.assert_close(sequence.weights, newton.weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("power", [0.0, 1.0])
@pytest.mark.parametrize("width", [32, 256, 2048])
def test_the_error_of_the_weights_is_bounded_by_that_of_the_cosines(width: int, power: float) -> None:
    """docs/methods/fedrane.md: Σ w log²(p/p') + ‖G(p − p')‖² is at most R² = Σ (x x'/w) (Ex')², for the error E of the
    cosines and x = p ‖Δ‖; the first term also with Ex. The wider the sketches, the smaller it is."""
    rows = (draw(20, 4000) + 0.5 * draw(4000, seed=1)) * draw(20, 1, seed=2).exp()
    w = positive(20, 1, seed=3).flatten() ** power
    base, unit = {"w": torch.zeros(4000, dtype=DOUBLE)}, rows / rows.norm(dim=1, keepdim=True)
    sketches = sketched(base, {"w": rows}, width, 0, 1)
    exact, made = bargain(rows @ rows.T, w).weights * rows.norm(dim=1), bargain(sketches, w).weights * sketches.norms
    seen = sketches.numbers / sketches.numbers.norm(dim=1, keepdim=True)
    error = seen @ seen.T - unit @ unit.T
    weights = float((w * (made / exact).log().square()).sum())
    step = float((unit.T @ (exact - made)).square().sum())
    for x, distance in ((exact, 0.0), (made, step)):
        bound = float((exact * made / w * (error @ x).square()).sum())
        assert weights + distance <= bound * (1 + 1e-6)
    assert weights <= 12 / width * float(w.sum())


@pytest.mark.parametrize("scope", ["model", "layer", "body", "head"])
def test_small_groups_bargain_exactly(scope: str) -> None:
    """A sketch of as many numbers as a group has parameters loses nothing."""
    server, ups = models(5)
    plain, record = negotiate(server, ups, cohort([4, 5, 6, 7, 8]), Terms(power=1.0, scope=scope))
    terms = Terms(power=1.0, scope=scope, gram="sketch", sketch=30)
    after, sketch_record = negotiate(server, ups, cohort([4, 5, 6, 7, 8]), terms)
    close(after, plain, 1e-10)
    for key in ("gne/p", "gne/weights", "gne/norms"):
        assert sketch_record[key] == pytest.approx(record[key], rel=1e-9)


@pytest.mark.parametrize("length", ["average", "simplex", "ball"])
def test_the_step_is_the_exact_sum_of_an_exact_length(length: str) -> None:
    """Only the weights come from sketches."""
    server, ups = models(5)
    terms = Terms(length=length, gram="sketch", sketch=8)
    (params, _), record = negotiate(server, ups, cohort([7] * 5), terms, seed=3)
    sketches = sketched(server.params, ups.params, 8, 3, 7)
    p = bargain(sketches).weights
    flat = torch.cat([(ups.params[n] - server.params[n]).flatten(1) for n in ups.params], 1)
    exact = bargain(flat @ flat.T).weights
    assert not torch.allclose(p, exact, rtol=0.01)
    factor = {"average": flat.mean(0).norm() / (p @ flat).norm(), "simplex": 1 / p.sum(), "ball": torch.ones(())}
    weights = p * factor[length]
    torch.testing.assert_close(torch.tensor(record["gne/weights"], dtype=DOUBLE), weights, rtol=1e-10, atol=0)
    step = torch.cat([(params[n] - server.params[n]).flatten() for n in ups.params])
    torch.testing.assert_close(step, weights @ flat, rtol=1e-10, atol=1e-12)
    assert record["gne/norms"] == pytest.approx(flat.norm(dim=1).tolist())


def test_a_server_that_has_only_sketches_estimates_lengths() -> None:
    rows, ratio = draw(6, 40), torch.full((6,), 1 / 6, dtype=DOUBLE)
    sketches = sketched({"w": torch.zeros(40, dtype=DOUBLE)}, {"w": rows}, 8, 0, 1)
    weights = agree(sketches, ratio, None, "average", 1.0, "newton").weights
    lengths = [float((each @ sketches.numbers).norm()) for each in (weights, ratio)]
    assert lengths[0] == pytest.approx(lengths[1])


def test_sketches_are_drawn_for_each_seed_and_round() -> None:
    server, ups = models(5)
    again, round, seed = ((size, number) for size, number in ((7, 3), (8, 3), (7, 4)))
    terms = Terms(gram="sketch", sketch=8)
    first, same, *others = (
        negotiate(server, ups, cohort([size] * 5), terms, seed=number)[0].params
        for size, number in ((7, 3), again, round, seed)
    )
    close(first, same, 0.0)
    for other in others:
        assert not torch.allclose(first["head.weight"], other["head.weight"], rtol=1e-3)

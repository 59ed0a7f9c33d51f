"""Nash bargaining among clients: weights p > 0 with M p = w / p, for the Gram matrix M = GᵀG of their deviations.

With Δ = Gp every client's utility is Δ_kᵀΔ = w_k / p_k > 0, and among all steps of that length Δ has the highest
Σ w_k log Δ_kᵀΔ: the (asymmetric) Nash bargaining solution, with the current model as the disagreement point.

M p = w / p is the stationarity condition of the strictly convex ½ pᵀMp − Σ w log p, so a damped Newton method finds the
unique solution. M is first scaled to a unit diagonal; p is then scaled back exactly. The server needs no more than M,
so `Sketches` of the deviations may stand in for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedrane import tree
from fedrane.algorithm import sample_ratio
from fedrane.errors import ConfigError, nearest
from fedrane.ops import sketch
from fedrane.ops.matrices import Array, Dense, Matrix
from fedrane.ops.sketch import Sketches
from fedrane.task import Client, Model
from fedrane.tree import Tensors

Solver = Callable[[Matrix, Array, Array, float], tuple[Array, int]]
"""From the matrix, the powers w, a start and the tolerance to a solution and the number of iterations."""
MAX_NEWTON_STEPS = 200
RIDGES = {0.0: 1e-11, 1e-6: 1e-6, 1e-4: 1e-7, 1e-2: 1e-8}
"""The ridges tried in turn, each with its tolerance on the residual max |p ∘ Mp − w|. The rounding error grows with p²
and so with the inverse of the ridge, which allows no smaller ones."""
NEGLIGIBLE_STEP = 1e-6
"""If ‖Gp‖ / max p_k ‖Δ_k‖ is smaller, the clients cancel out and the server does not move."""


class Bargain(NamedTuple):
    """The solution of a bargaining problem."""

    weights: Tensor
    """p, one for each client; 0 for excluded ones."""
    residual: float
    """max |p ∘ Mp − w|, of the system with its ridge."""
    iterations: int
    ridge: float
    """Added to the unit diagonal if there is no solution without it, or none within the reach of float64."""
    excluded: tuple[int, ...]
    """Clients whose deviation is zero or not finite."""
    moves: bool
    """False if the clients cancel out: the disagreement point."""


def gram(base: Tensors, rows: Tensors) -> Tensor:
    """M_jk = Δ_jᵀΔ_k in float64, for Δ_k = rows_k − base, over the names in ``rows``.

    Computed block by block over the parameters, so that the deviations are never copied as a whole.
    """
    first = next(iter(rows.values()))
    total = torch.zeros(len(first), len(first), dtype=torch.float64, device=first.device)
    for part, origin in tree.blocks(base, rows):
        deviations = part.double() - origin.double()
        total += deviations @ deviations.T
    return total


class Exact(NamedTuple):
    """Deviations, of which the Gram matrix is known."""

    gram: Tensor

    @property
    def norms(self) -> Tensor:
        return self.gram.diagonal().clamp(min=0).sqrt()

    def usable(self) -> Tensor:
        """Who has a deviation that is finite and not zero."""
        squares = self.gram.diagonal()
        return torch.isfinite(squares) & (squares > np.finfo(float).tiny)

    def cosines(self, used: NDArray[np.bool_]) -> Matrix:
        """Between those used."""
        matrix = self.gram.detach().double().cpu().numpy()[np.ix_(used, used)]
        lengths = np.sqrt(np.diag(matrix))
        scaled = matrix / np.outer(lengths, lengths)
        np.fill_diagonal(scaled, 1.0)
        return Dense(scaled)

    def squares(self, weights: Tensor) -> Tensor:
        """‖Σ_k weights_k Δ_k‖² for each row of weights."""
        used = (weights != 0).any(0)
        inner = self.gram.double()[used][:, used]
        return torch.stack([row @ inner @ row for row in weights[:, used]])


def _known(gram: Tensor | Sketches) -> Exact | Sketches:
    return gram if isinstance(gram, Sketches) else Exact(gram)


class Agreement(NamedTuple):
    """A bargain, and the weights of the step Σ weights_k Δ_k."""

    bargain: Bargain
    weights: Tensor
    norms: Tensor
    """‖Δ_k‖."""


def agree(
    gram: Tensor | Sketches,
    ratio: Tensor,
    powers: Tensor | None,
    length: str,
    blend: float,
    solver: str,
    squares: Callable[[Tensor], Tensor] | None = None,
) -> Agreement:
    """Solve the bargain, then choose the length of the step along Gp: the paper's is unrelated to the clients' steps.

    ``average``  the length of Σ ratio_k Δ_k; ``simplex``  Σ p = 1; ``ball``  ‖Gp‖² = Σ w, the paper's p.
    ``blend`` is the weight of the bargain; the rest is the average by ``ratio``. Sketches only estimate the
    lengths of steps: give ``squares`` if these are known better.
    """
    known, solution = _known(gram), bargain(gram, powers, solver)
    p, average = solution.weights, _without(ratio, solution.excluded)
    if not solution.moves:
        weights = (1 - blend) * average
    else:
        norm, usual = (squares or known.squares)(torch.stack([p, average])).clamp(min=1e-300).sqrt()
        factor = {"average": usual / norm, "simplex": 1 / p.sum(), "ball": torch.ones_like(norm)}
        weights = blend * factor[length] * p + (1 - blend) * average
    return Agreement(solution, weights, known.norms)


def squares_of_sums(base: Tensors, rows: Tensors, weights: Tensor) -> Tensor:
    """‖Σ_k weights_k Δ_k‖² for each row of weights, exactly, block by block. A client of weight zero may hold NaN."""
    used = (weights != 0).any(0)
    total = torch.zeros(len(weights), dtype=torch.float64, device=weights.device)
    for part, origin in tree.blocks(base, rows):
        total += (weights[:, used] @ (part[used].double() - origin.double())).square().sum(1)
    return total


class Terms(NamedTuple):
    """How clients bargain.

    ``power``: a client with n examples has bargaining power n^power; 0 makes all equal. ``length``: see `agree`.
    ``scope``: the ``model`` as one vector, each ``layer`` separately, or only the ``body`` or ``head``, with the rest
    averaged. ``blend``: the weight of the bargain; the rest is the average. ``gram``: the inner products of deviations
    are ``exact``, or those of their ``sketch``es with so many numbers for each of the scope's groups.
    """

    power: float = 0.0
    length: str = "average"
    scope: str = "model"
    blend: float = 1.0
    solver: str = "newton"
    gram: str = "exact"
    sketch: int = 1024

    @classmethod
    def of(cls, method: object) -> Terms:
        """The fields of a method that bargains."""
        return cls(*(getattr(method, term) for term in cls._fields))


def negotiate(server: Model, ups: Model, cohort: Client, terms: Terms, seed: int = 0) -> tuple[Model, dict[str, Any]]:
    """The model after the bargain, and what to record. ``seed`` is the run's, for sketches.

    A client whose upload is not finite takes no part in anything. Statistics are averaged by sample ratio over the
    clients that took part in a bargain: bargaining weights need not sum to 1.
    """
    broken = [k for k, finite in enumerate(tree.finite_rows(ups)) if not finite]
    ratio = _without(sample_ratio(cohort), broken)
    powers = torch.where(ratio > 0, ratio**terms.power, 0.0)
    powers = powers * (ratio > 0).sum() / powers.sum().clamp(min=1e-300)  # 1 on average
    agreements: list[Agreement] = []
    params, round = dict(server.params), int(cohort.round[0])
    for names, bargained in groups(ups.params, terms.scope):
        part = {name: ups.params[name] for name in names}
        weights = ratio
        if bargained:
            exact = terms.gram == "exact"
            known = gram(params, part) if exact else sketch.sketched(params, part, terms.sketch, seed, round)
            squares = None if exact else partial(squares_of_sums, params, part)
            agreements.append(agree(known, ratio, powers, terms.length, terms.blend, terms.solver, squares))
            weights = agreements[-1].weights
        params |= tree.move({name: params[name] for name in names}, part, weights)
    excluded = sorted(set.intersection(*(set(a.bargain.excluded) for a in agreements))) if agreements else broken
    stats = tree.move(server.stats, ups.stats, _without(ratio, excluded))
    return Model(params, stats), _record(agreements, cohort.index[excluded].tolist())


def _without(ratio: Tensor, excluded: Sequence[int]) -> Tensor:
    """The ratio among the clients that are not excluded."""
    rest = ratio.double().clone()
    rest[list(excluded)] = 0
    return rest / rest.sum().clamp(min=1e-300)


def groups(rows: Tensors, scope: str) -> list[tuple[list[str], bool]]:
    """Groups of parameter names, and whether each is bargained over or averaged."""
    if scope == "model":
        return [(list(rows), True)]
    if scope == "layer":
        layers: dict[str, list[str]] = {}
        for name in rows:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
        return [(names, True) for names in layers.values()]
    inside = [name for name in rows if name.startswith("head.") == (scope == "head")]
    outside = [name for name in rows if name not in inside]
    return [(names, bargained) for names, bargained in ((inside, True), (outside, False)) if names]


def _record(agreements: list[Agreement], excluded: list[int]) -> dict[str, Any]:
    """What to record. If layers bargain separately: each client's mean weights over the layers, its norm over all."""
    bargains = [a.bargain for a in agreements]
    conflicts = [b for b in bargains if not b.moves and len(b.excluded) < len(b.weights)]  # somebody has a deviation
    ridge = max((b.ridge for b in bargains), default=0.0)
    messages = [f"clients {excluded} do not bargain: their deviation is zero or not finite"] if excluded else []
    messages += [f"the clients conflict: the bargain needed a ridge of {ridge:g}"] if ridge else []
    if conflicts:
        still = "the server does" if len(bargains) == 1 else f"{len(conflicts)} of {len(bargains)} layers do"
        messages += [f"the clients cancel out: {still} not move"]
    return {
        "messages": messages,
        "gne/p": _over([b.weights for b in bargains], torch.mean),
        "gne/weights": _over([a.weights for a in agreements], torch.mean),
        "gne/norms": _over([a.norms for a in agreements], torch.linalg.vector_norm),
        "gne/residual": max((b.residual for b in bargains), default=0.0),
        "gne/ridge": ridge,
        "gne/iterations": sum(b.iterations for b in bargains),
        "gne/moves": any(b.moves for b in bargains),
        "gne/excluded": excluded,
    }


def _over(layers: list[Tensor], reduce: Callable[..., Tensor]) -> list[float]:
    """One number for each client."""
    values: list[float] = reduce(torch.stack(layers), dim=0).tolist() if layers else []
    return values


def bargain(gram: Tensor | Sketches, powers: Tensor | None = None, method: str = "newton") -> Bargain:
    """Solve M p = w / p. ``powers`` is w (all 1 by default); ``sequential`` is the paper's convex-concave procedure.

    Of sketches, M has the exact norms and the sketches' cosines. M is never formed if the sketches are more than each
    has numbers: a hundred thousand clients can bargain.

    >>> bargain(torch.eye(3)).weights
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    if method not in SOLVERS:
        raise ConfigError(f"solver {method!r} is not known", remedy=nearest(method, SOLVERS))
    known = _known(gram)
    norms = known.norms.detach().double().cpu().numpy()
    w = np.ones(len(norms)) if powers is None else powers.detach().double().cpu().numpy()
    used = known.usable().cpu().numpy() & (w > 0)
    weights = torch.zeros(len(norms), dtype=torch.float64, device=known.norms.device)
    excluded = tuple(np.flatnonzero(~used).tolist())
    if not used.any():
        return Bargain(weights, 0.0, 0, 0.0, excluded, moves=False)
    cosines = known.cosines(used)
    x, residual, iterations, ridge = _with_ridge(cosines, w[used], SOLVERS[method])
    moves = float(x @ cosines.times(x)) > (NEGLIGIBLE_STEP * float(x.max())) ** 2
    weights[torch.from_numpy(used)] = torch.from_numpy(x / norms[used]).to(weights.device)
    return Bargain(weights, residual, iterations, ridge, excluded, moves)


def _with_ridge(matrix: Matrix, w: Array, solve: Solver) -> tuple[Array, float, int, float]:
    """The solution with the smallest ridge that works.

    Without a ridge there is no solution if some p ≥ 0 has Gp = 0. If Gp is nearly 0, p is so large that the rounding
    error, which grows with p², hides the solution.
    """
    start, total = matrix.start(w), 0
    for ridge, least in RIDGES.items():
        tolerance = max(least, SEQUENTIAL_TOLERANCE if solve is _sequential else 0.0) * max(1.0, float(w.max()))
        ridged = matrix.ridged(ridge)
        length = np.sqrt(w.sum() / max(start @ ridged.times(start), 1e-12))  # the best along this ray
        x, iterations = solve(ridged, w, start * length, tolerance)
        total += iterations
        residual = float(np.abs(x * ridged.times(x) - w).max())
        if residual <= tolerance:
            break
        start = x / x.max()
    if residual > tolerance and solve is _sequential:  # the sequence did not converge; Newton's method does
        return _with_ridge(matrix, w, _newton)
    return x, residual, total, ridge


def _newton(matrix: Matrix, w: Array, x: Array, tolerance: float) -> tuple[Array, int]:
    """Damped Newton on f(x) = ½ xᵀMx − Σ w log x, in relative changes of x.

    With this scaling the Hessian is x M x + w, which is well conditioned even if x is badly scaled. If f has no
    minimum, x grows without bound; the iteration stops when ‖Gp‖, which is √Σw at a solution, would be negligible.
    """
    bound, least = np.sqrt(w.sum()) / NEGLIGIBLE_STEP, float(w.min())
    best, smallest = x, np.inf
    step = 0
    while step < MAX_NEWTON_STEPS:
        step += 1
        product = matrix.times(x)
        gradient = x * product - w
        error = float(np.abs(gradient).max())
        if error > 0.5 * smallest and smallest <= tolerance:  # rounding allows no better
            break
        if error < smallest:
            best, smallest = x, error
        if error == 0.0 or x.max() > bound:
            break
        move = matrix.newton(x, w, gradient)
        if move is None:  # x is so large that rounding errors exceed w: treated as unbounded
            break
        length, descent = 1.0, float(gradient @ move)
        if -descent > 0.06 * least:  # otherwise the full step is safe: f / min w is self-concordant
            length = min(1.0, 0.9 / max(float(-move.min()), 1e-300))
            away = x * move
            rise, bend = float(away @ product), float(away @ matrix.times(away)) / 2

            def change(length: float, rise: float = rise, bend: float = bend, move: Array = move) -> float:
                return float(length * rise + length**2 * bend - w @ np.log1p(length * move))

            while change(length) > 0.1 * length * descent and length > 1e-8:
                length /= 2
        x = x * (1 + length * move)
    return (best if smallest <= tolerance else x), step


def _sequential(system: Matrix, w: Array, start: Array, tolerance: float) -> tuple[Array, int]:
    """The paper's sequence of convex problems: minimise Σ q + φ with φ_k = log p_k q_k − log w_k ≥ 0, q = Mp, where the
    concave φ is linearised at the last p, until p no longer changes."""
    matrix = system.dense()
    p = _feasible(matrix, w)
    if p is None:
        return start, 0
    step = 0
    while step < MAX_SEQUENTIAL_STEPS:
        step += 1
        cost = matrix.sum(0) + (np.diag(1 / p) + matrix / (matrix @ p)[:, None]).sum(0)
        new = _minimise(cost, matrix, w, p * 1.01)
        change = float(np.abs(new - p).max() / np.abs(p).max())
        p = new
        if change < 1e-10 or float(np.abs(p * (matrix @ p) - w).max()) <= 0.01 * tolerance:
            break
    return p, step


def _minimise(cost: Array, matrix: Array, w: Array, p: Array) -> Array:
    """Minimise costᵀp subject to φ(p) ≥ 0 by a log barrier: Newton's method on t costᵀp − Σ log φ for growing t,
    from a feasible p."""

    def value(p: Array, t: float) -> float:
        q = matrix @ p
        if p.min() <= 0 or q.min() <= 0:
            return np.inf
        phi = np.log(p) + np.log(q) - np.log(w)
        return float(t * cost @ p - np.log(phi).sum()) if phi.min() > 0 else np.inf

    t, last = 10.0 * len(p), 1e13 * len(p)
    while t <= last:
        for _ in range(100):
            q = matrix @ p
            if p.min() <= 0 or q.min() <= 0:
                return p
            phi, jacobian = np.log(p) + np.log(q) - np.log(w), np.diag(1 / p) + matrix / q[:, None]
            if not phi.min() > 0:  # not feasible: the barrier has no gradient here
                return p
            gradient = t * cost - jacobian.T @ (1 / phi)
            relative = matrix / q[:, None]
            hessian = (jacobian.T / phi**2) @ jacobian + np.diag(1 / (phi * p**2)) + (relative.T / phi) @ relative
            try:
                move = np.linalg.solve(hessian, -gradient)
            except np.linalg.LinAlgError:  # rounding errors allow no better
                return p
            descent, length, before = float(gradient @ move), 1.0, value(p, t)
            while value(p + length * move, t) > before + 0.1 * length * descent and length > 1e-12:
                length /= 2
            p = p + length * move if length > 1e-12 else p
            if -descent < (1e-10 if t == last else 1e-2) or length <= 1e-12:
                break
        t = min(50 * t, last) if t < last else 2 * last
    return p


def _feasible(matrix: Array, w: Array) -> Array | None:
    """A start p with all p_k q_k ≥ w_k: the p > 0 with the largest min q, scaled up. None if there is none."""
    from scipy.optimize import linprog  # slow to import

    clients = len(matrix)
    least_q = linprog(
        np.append(np.zeros(clients), -1.0),
        A_ub=np.column_stack([-matrix, np.ones(clients)]),
        b_ub=np.zeros(clients),
        A_eq=np.append(np.ones(clients), 0.0)[None],
        b_eq=[clients],
        bounds=[(1e-2, None)] * clients + [(None, None)],
    )
    if least_q.status != 0 or least_q.x[-1] <= 0:
        return None
    p: Array = least_q.x[:-1]
    feasible: Array = p * np.sqrt(1.01 * (w / (p * (matrix @ p))).max())
    return feasible


MAX_SEQUENTIAL_STEPS, SEQUENTIAL_TOLERANCE = 50, 1e-8
SOLVERS: dict[str, Solver] = {"newton": _newton, "sequential": _sequential}
CHOICES = {
    "length": ("average", "simplex", "ball"),
    "scope": ("model", "layer", "body", "head"),
    "solver": tuple(SOLVERS),
    "gram": ("exact", "sketch"),
}
NEEDS = {"gne=True": Terms._fields, "gram=sketch": ("sketch",)}
RANGES = {"blend": (0, 1), "power": (0, 2), **sketch.RANGES}
"""What ``Terms`` may be, and when they have an effect."""

"""The gate: uploads pass it before they are aggregated, so that no single one can ruin the model.

Of every part of an upload (parameters, statistics, whatever else a method sends) the norm is measured: of parameters
and statistics that of the deviation from the server's. A client k may reach

    min(absolute, max(factor · median of the cohort · max(1, n_k / median n), half the norm of the server's part))

with n_k examples: who trains more steps moves further, and a sum over examples grows with them. (Of what a method adds,
it is ``factor`` times the norm of what the server holds under that name: the first control that a client sends to
SCAFFOLD's server is a whole gradient, when others send small changes of theirs.) What is not finite is
always refused; what is beyond the bound is refused, or scaled down to it. Nothing else is changed, not in the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedrane import tree
from fedrane.errors import ConfigError, nearest
from fedrane.task import Client, Model, State
from fedrane.tree import Tensors

FLOWER, OFF, REFUSE, CLIP = KINDS = ("flower", "off", "refuse", "clip")
HARMLESS = 0.5
"""A deviation of this part of the server's norm is never an outlier: late in training most clients hardly move."""


@dataclass(frozen=True)
class Gate:
    """Which uploads are aggregated, and which models are kept."""

    kind: str = FLOWER
    """What happens to an upload that is an outlier: ``refuse`` it, ``clip`` it to the bound, or nothing (``off``).
    ``flower`` refuses it where clients are nodes of Flower, and is off elsewhere."""
    factor: float = 8.0
    """An upload beyond this many times the cohort's median norm is an outlier."""
    norm: float = 1e6
    """The largest norm of any upload and of any step of the server."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"gate.kind={self.kind!r} is not known", remedy=nearest(self.kind, KINDS))
        if not 1 < self.factor < math.inf:
            raise ConfigError(
                f"gate.factor={self.factor}", "half of all uploads are above their median", "Use for instance 8"
            )
        if not 0 < self.norm < math.inf:
            raise ConfigError(f"gate.norm={self.norm}", "it is the largest norm of an upload", "Use for instance 1e6")

    def on(self, engine: str) -> Gate | None:
        """The gate of a run on this engine; None if there is none."""
        if self.kind == FLOWER and engine.startswith("flower"):
            return Gate(REFUSE, self.factor, self.norm)
        return None if self.kind in (FLOWER, OFF) else self


class Passed(NamedTuple):
    """What the gate lets through."""

    ups: State
    """All uploads; those of outliers are clipped. Refused ones must not be used."""
    refused: dict[int, str]
    """Rows of the stack, and why."""
    clipped: dict[int, str]


def admit(gate: Gate, server: State, ups: State, cohort: Client) -> Passed:
    """Examine stacked uploads."""
    count = len(cohort.index)
    reasons: dict[int, list[str]] = {}
    refused: dict[int, str] = {}
    scales: dict[str, Tensor] = {}
    for part, base, rows in _parts(server, ups):
        norms = _norms(base, rows, count)
        summed = part not in Model._fields
        harmless = gate.factor * _norm(server.extra.get(part, {})) if summed else HARMLESS * _norm(_known(base, rows))
        limits = _limits(gate, norms, cohort.size.tolist(), harmless, summed)
        scale = torch.ones(count, dtype=torch.float64)
        for row, (norm, limit) in enumerate(zip(norms, limits, strict=True)):
            if not math.isfinite(norm):
                refused[row] = f"its {part} are not finite"
            elif norm > limit:
                reasons.setdefault(row, []).append(f"the norm of its {part} is {norm:.3g}, and {limit:.3g} is allowed")
                scale[row] = limit / norm
        scales[part] = scale
    outliers = {row: "; ".join(texts) for row, texts in reasons.items() if row not in refused}
    if gate.kind == REFUSE:
        return Passed(ups, dict(sorted((refused | outliers).items())), {})
    return Passed(_scaled(server, ups, scales) if outliers else ups, refused, outliers)


def objection(gate: Gate, before: State, after: State) -> str:
    """Why the server should not take this step; empty if it may."""
    changed = tree.map(lambda leaf: leaf[None], after)
    for part, base, rows in _parts(before, changed, relative=True):
        (norm,) = _norms(base, rows, 1)
        if not norm <= gate.norm:
            return f"its {part} would move by {norm:.3g}, and {gate.norm:.3g} is allowed"
    return ""


def _parts(server: State, ups: State, relative: bool = False) -> Iterator[tuple[str, Tensors, Tensors]]:
    """Each part's name, what it is compared with, and its rows. What a method adds to its uploads has names of its own
    there, and so is compared with nothing, unless ``relative``."""
    for part, rows in ups.model._asdict().items():
        yield part, getattr(server.model, part), rows
    for name, value in ups.extra.items():
        base = tree.flatten({name: server.extra[name]}) if relative and name in server.extra else {}
        yield name, base, tree.flatten({name: value})


def _floating(rows: Mapping[str, Tensor]) -> Tensors:
    return tree.pick(dict(rows), lambda name: rows[name].is_floating_point() and bool(rows[name].numel()))


def _origin(base: Tensors, name: str, stacked: Tensor) -> Tensor:
    known = base.get(name)
    return known if known is not None and known.shape == stacked.shape[1:] else torch.zeros_like(stacked[0])


def _norms(base: Tensors, rows: Tensors, count: int) -> list[float]:
    """Of each row's deviation, in float64, where a float32 has a finite square."""
    squares = torch.zeros(count, dtype=torch.float64)
    for name, stacked in _floating(rows).items():
        for block, piece in tree.deviations(_origin(base, name, stacked), stacked.reshape(count, -1)):
            squares[piece] += torch.linalg.vector_norm(block, dim=1, dtype=torch.float64).square().cpu()
    norms: list[float] = squares.sqrt().tolist()
    return norms


def _known(base: Tensors, rows: Tensors) -> Tensors:
    """The server's own part, as far as it is uploaded."""
    return tree.pick(base, _floating(rows).__contains__)


def _norm(part: Any) -> float:
    return math.sqrt(sum(float(leaf.double().square().sum()) for leaf in tree.leaves(part)))


def _limits(gate: Gate, norms: list[float], sizes: list[int], harmless: float, summed: bool) -> list[float]:
    """For each client. Of what a method adds, which may be a sum over examples, the absolute one is for one example."""
    absolute = [gate.norm * (max(n, 1) if summed else 1) for n in sizes]
    # What is refused anyway does not count, or two outliers of four could hide one another; what is clipped is used.
    clips = gate.kind == CLIP
    used = [n for n, most in zip(norms, absolute, strict=True) if n <= most or (clips and math.isfinite(n))]
    usual = median(used or [math.inf])
    size = max(median(sizes), 1)
    adaptive = [max(gate.factor * usual * max(1.0, n / size), harmless) if usual else math.inf for n in sizes]
    return list(map(min, adaptive, absolute))


def _scaled(server: State, ups: State, scales: Mapping[str, Tensor]) -> State:
    """Uploads whose outliers are moved back towards what they are compared with; the others to the last bit."""

    def moved(base: Tensors, rows: Tensors, scale: Tensor) -> Tensors:
        return dict(rows) | {
            name: _moved_back(_origin(base, name, stacked), stacked, scale) for name, stacked in _floating(rows).items()
        }

    params, stats = (
        moved(getattr(server.model, part), getattr(ups.model, part), scales[part]) for part in Model._fields
    )
    extra: dict[str, Any] = {}
    for name, value in ups.extra.items():
        flat = tree.flatten({name: value})
        extra |= tree.nest(flat | moved({}, flat, scales[name]))
    return State(Model(params, stats), extra)


def _moved_back(origin: Tensor, stacked: Tensor, scale: Tensor) -> Tensor:
    result = stacked.clone()
    for row in (scale < 1).nonzero().flatten().tolist():
        result[row] = origin + (stacked[row] - origin) * scale[row].to(stacked)
    return result

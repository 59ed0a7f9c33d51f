"""The gate in a round: which uploads are aggregated, and whether the server keeps the model that they give."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedrane import tree
from fedrane.engines import Trained
from fedrane.engines.evaluation import Metrics
from fedrane.ops import gate as gates
from fedrane.ops.gate import Gate
from fedrane.task import State

LOSS = "global/loss"
"""On the server's own test set: what clients report of themselves cannot make a model be rejected."""


def gated(gate: Gate, server: State, trained: Trained) -> Trained:
    """The round with the uploads that passed; the others are named, with the reason."""
    passed = gates.admit(gate, server, trained.ups, trained.cohort)
    if not passed.refused and not passed.clipped:
        return trained
    clients: list[int] = trained.cohort.index.tolist()
    refused, clipped = ({clients[row]: why for row, why in of.items()} for of in (passed.refused, passed.clipped))
    messages = [f"client {k} is left out: {why}" for k, why in refused.items()]
    messages += [f"client {k} is clipped: {why}" for k, why in clipped.items()]
    return _only(trained._replace(ups=passed.ups), [k not in refused for k in clients])._replace(
        messages=(*trained.messages, *messages),
        refused={**trained.refused, **{str(k): why for k, why in refused.items()}},
        clipped={str(k): why for k, why in clipped.items()},
    )


def _only(trained: Trained, kept: list[bool]) -> Trained:
    """The round without some of its clients; what they sent and received has been counted."""
    rows = [row for row, keep in enumerate(kept) if keep]
    cohort = trained.cohort
    columns = {name: getattr(cohort, name)[rows] for name in ("index", "size", "steps", "round", "lr")}
    fewer = cohort._replace(**columns)
    clients: list[int] = fewer.index.tolist()
    return trained._replace(
        ups=tree.map(lambda leaf: leaf[rows], trained.ups),
        cohort=fewer,
        client_states={k: trained.client_states[k] for k in clients},
        metrics={name: [values[row] for row in rows] for name, values in trained.metrics.items()},
    )


def loss_objection(gate: Gate, record: Metrics, history: Sequence[Metrics], classes: int) -> str:
    """Why a model should not be kept, by its loss where it was evaluated; empty if it may be."""
    loss = record.get(LOSS)
    if loss is None:
        return ""
    earlier = next((float(r[LOSS]) for r in reversed(history) if r.get(LOSS) is not None), 0.0)
    # A model that guesses has the logarithm of the classes, or the variance of the standardised number.
    limit = gate.factor * max(earlier, math.log(classes) if classes else 1.0)
    return "" if loss <= limit else f"its loss is {loss:.3g}, and {limit:.3g} is allowed"

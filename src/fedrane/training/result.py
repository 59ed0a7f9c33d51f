"""What a run gives: its history, the summary of it, and the trained models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics, headline
from fedrane.experiment import Experiment
from fedrane.training import timing
from fedrane.training.predictor import Models


@dataclass(frozen=True, eq=False, repr=False)
class Result(Models):
    """A run in hand: what was measured, and the trained models."""

    federation: Federation
    history: list[Metrics]
    finished: bool
    folder: Path | None = None

    @property
    def summary(self) -> Metrics:
        return summarise(self.experiment, self.history)


def last_round(history: Sequence[Metrics]) -> int:
    """The last round that is recorded; 0 before the first."""
    return int(history[-1]["round"]) if history else 0


def stalled(experiment: Experiment, history: Sequence[Metrics]) -> bool:
    """No rise of the validation accuracy, or R², in the last ``patience`` evaluations.

    Those by ``eval_every``: that of a last round would not have been made had more rounds been planned.
    """
    patience, every = experiment.patience, experiment.eval_every
    due = (r for r in history if r["round"] % every == 0)
    seen = [r[key] for r in due if (key := headline(r, "validation"))]
    return patience > 0 and len(seen) > patience and max(seen[-patience:]) <= max(seen[:-patience])


def evaluated(history: Sequence[Metrics], whose: str) -> list[Metrics]:
    """The rounds in which that measure was taken."""
    return [r for r in history if headline(r, whose)]


def best_of(measured: Sequence[Metrics], whose: str) -> Metrics:
    """The round of the highest accuracy or R², the first of equals."""
    return max(measured, key=lambda r: (r[headline(r, whose) or ""], -r["round"]))


def summarise(experiment: Experiment, history: Sequence[Metrics]) -> Metrics:
    """The last evaluation and the best one of each measure, by name and round."""
    summary: Metrics = {
        "method": experiment.method_name,
        "seed": experiment.seed,
        "rounds": history[-1]["round"] if history else 0,
        "seconds": sum(r.get(key) or 0 for r in history for key in ("seconds", "eval_seconds")),
        "warmup_seconds": timing.warmup(history, experiment.rounds),
        "samples_per_second": timing.speed(history, experiment.rounds),
        "bytes_up": sum(r.get("bytes_up", 0) for r in history),
        "bytes_down": sum(r.get("bytes_down", 0) for r in history),
    }
    for whose in (GLOBAL, PERSONAL):
        measured = evaluated(history, whose)
        if measured:
            for name, record in (("last", measured[-1]), ("best", best_of(measured, whose))):
                picked = {k: v for k, v in record.items() if k.startswith(whose + "/") and not isinstance(v, list)}
                summary[f"{whose}/{name}"] = {"round": record["round"], **picked}
    return summary

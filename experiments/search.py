"""Which reading of FedRANE wins on validation examples: successive halving over rounds, in pieces of any length.

    python experiments/search.py --data-root DATA --minutes 9    # runs what is missing, and saves after each run
    python experiments/search.py --show                          # the tables of docs/paper.md, from what was recorded

Trials, rungs and the rule of choice are in search.toml. Test examples choose nothing: their figures are not recorded.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedrane
from fedrane import Dataset, Experiment
from fedrane.errors import Diverged
from fedrane.reproduce import tune
from fedrane.reproduce.targets import key_of, settings_of
from fedrane.run import as_dataset
from fedrane.settings import flat, nested

HERE = Path(__file__).parent
EVALUATIONS = 10
"""In a run, whatever its rounds; the score is the mean of the last few."""
VALIDATION = 0.1
"""The part of each client's training examples that is set aside."""


class Piece(NamedTuple):
    """One run."""

    trial: str
    rounds: int
    alpha: float
    wanted: Experiment
    """As it would be in the table."""
    experiment: Experiment
    """The same on training examples alone."""


class Search:
    def __init__(self, plan: Path, results: Path, data_root: str) -> None:
        self.plan, self.results, self.data_root = tomllib.loads(plan.read_text()), results, data_root
        lines = results.read_text().splitlines() if results.exists() else []
        self.records = {key_of(record["settings"]): record for record in map(json.loads, lines)}
        self._rows: dict[float, Dataset] = {}

    def pieces(self) -> Iterator[Piece]:
        """All runs in the order in which they are worth it; those of a rung once the one before it is whole."""
        trials = list(self.plan["trials"])
        for number, rounds in enumerate(self.plan["rungs"]):
            if number:
                scores = {trial: self.score(trial, self.plan["rungs"][number - 1]) for trial in trials}
                if None in scores.values():
                    return
                trials = sorted(trials, key=lambda trial: -(scores[trial] or 0.0))[: self.plan["keep"]]
            for trial in trials:
                for alpha in self.plan["alphas"]:
                    yield self.piece(trial, rounds, alpha)

    def piece(self, trial: str, rounds: int, alpha: float) -> Piece:
        values = {**self.plan["base"], **self.plan["trials"][trial], "rounds": rounds, "partition.alpha": alpha}
        values |= {"seed": self.plan["seed"], "eval_every": max(1, rounds // EVALUATIONS), "data_root": self.data_root}
        # As from a file: a trial without a part may leave the base's settings of that part without effect.
        wanted = Experiment.from_dict(nested(flat(values))).set_by(dict.fromkeys(values, "search.toml"))
        return Piece(trial, rounds, alpha, wanted, tune.on_validation(wanted, VALIDATION))

    def record(self, piece: Piece) -> dict[str, Any] | None:
        return self.records.get(key_of(settings_of(piece.wanted)))

    def go(self, minutes: float) -> None:
        """Runs what is missing; none is begun that would not end in time, by what the last one took."""
        end, usual = time.monotonic() + 60 * minutes, 0.0
        for piece in self.pieces():
            if self.record(piece):
                continue
            if time.monotonic() + usual > end:
                return
            began = time.monotonic()
            self._run(piece)
            usual = time.monotonic() - began

    def _run(self, piece: Piece) -> None:
        began = time.monotonic()
        record: dict[str, Any] = {"trial": piece.trial, "rounds": piece.rounds, "alpha": piece.alpha}
        try:
            history = fedrane.run(piece.experiment, dataset=self.rows(piece), calibrate=False).history
            for whose in ("global", "personal"):
                record[whose] = [round(r[f"{whose}/accuracy"], 5) for r in history if f"{whose}/accuracy" in r]
            record["samples_per_second"] = round(statistics.median(r["samples_per_second"] for r in history))
        except Diverged as error:
            record |= {"global": [0.0], "personal": [0.0], "failed": str(error)}
        if torch.cuda.is_available():  # the next run finds the memory free
            gc.collect()
            torch.cuda.empty_cache()
        record |= {
            "seconds": round(time.monotonic() - began, 1),
            "torch": torch.__version__,
            "settings": settings_of(piece.wanted),
        }
        self.records[key_of(record["settings"])] = record
        self.results.parent.mkdir(parents=True, exist_ok=True)
        with self.results.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        print(line(record, self.plan["last"]), f"{record['seconds']:.0f} s", flush=True)

    def rows(self, piece: Piece) -> Dataset:
        """Training examples alone: test examples are not at hand, and validation examples stand in their place."""
        if piece.alpha not in self._rows:
            self._rows[piece.alpha] = tune.without_test(as_dataset(piece.wanted, None), piece.wanted, VALIDATION)
        return self._rows[piece.alpha]

    def score(self, trial: str, rounds: int) -> float | None:
        found = [self.record(self.piece(trial, rounds, alpha)) for alpha in self.plan["alphas"]]
        values = [last(r, whose, self.plan["last"]) for r in found if r for whose in ("global", "personal")]
        return statistics.fmean(values) if None not in found else None

    def show(self) -> None:
        for rounds in self.plan["rungs"]:
            scores = {trial: self.score(trial, rounds) for trial in self.plan["trials"]}
            done = sorted((t for t in scores if scores[t] is not None), key=lambda t: -(scores[t] or 0.0))
            heads = [f"α {alpha:g}, {w}" for alpha in self.plan["alphas"] for w in ("global", "personal")]
            print(f"\n{rounds} rounds, mean of the last {self.plan['last']} evaluations on validation examples, %\n")
            print("| trial | score |", " | ".join(heads), "|\n| --- |", " | ".join(["---:"] * (len(heads) + 1)), "|")
            for trial in done:
                found = [self.record(self.piece(trial, rounds, alpha)) for alpha in self.plan["alphas"]]
                cells = [last(r, w, self.plan["last"]) for r in found if r for w in ("global", "personal")]
                print(
                    f"| {trial} | {100 * (scores[trial] or 0):.2f} |", " | ".join(f"{100 * c:.1f}" for c in cells), "|"
                )


def last(record: dict[str, Any], whose: str, number: int) -> float:
    return statistics.fmean(record[whose][-number:])


def line(record: dict[str, Any], number: int) -> str:
    whole, own = (100 * last(record, whose, number) for whose in ("global", "personal"))
    return (
        f"{record['rounds']} rounds, α {record['alpha']:g}, {record['trial']}: {whole:.1f} global, {own:.1f} personal"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=HERE / "search.toml")
    parser.add_argument("--results", type=Path, default=HERE / "results" / "search" / "cifar10.jsonl")
    parser.add_argument("--data-root", default="")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--show", action="store_true", help="print what was recorded")
    asked = parser.parse_args()
    search = Search(asked.plan, asked.results, asked.data_root)
    if asked.show:
        search.show()
    else:
        search.go(asked.minutes)


if __name__ == "__main__":
    main()

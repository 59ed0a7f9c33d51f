"""Settings chosen on validation examples: a plan's runs, saved after each, by as many processes as are started.

    python experiments/search.py --data-root DATA --minutes 9                 # which reading of FedRANE: search.toml
    python experiments/search.py --plan experiments/contest.toml --data-root DATA --minutes 9    # all methods' settings
    python experiments/search.py --show                                       # the tables of docs/paper.md, as recorded
    python experiments/search.py --plan experiments/contest.toml --words      # the choices, for fedrane reproduce

The plans hold the trials and the rule of choice. Test examples choose nothing: their figures are not recorded.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import statistics
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedrane
from fedrane import Dataset, Experiment
from fedrane.config.settings import flat, nested
from fedrane.errors import Diverged
from fedrane.reproduce import tune
from fedrane.reproduce.targets import key_of, settings_of
from fedrane.training.setup import as_dataset

HERE = Path(__file__).parent
EVALUATIONS = 10
"""In a run of any number of rounds; the score is the mean of the last ones."""
VALIDATION = 0.1
"""The part of each client's training examples that is set aside."""
MODELS = ("global", "personal")


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
    """What a plan asks for, and what was recorded of it."""

    def __init__(self, plan: dict[str, Any], results: Path, data_root: str) -> None:
        self.plan, self.results, self.data_root = plan, results, data_root
        self.records: dict[str, dict[str, Any]] = {}
        self._datasets: dict[float, Dataset] = {}
        self.read()

    def pieces(self) -> Iterator[Piece]:
        """All runs, in the order in which they are worth it, as far as what was recorded decides them."""
        raise NotImplementedError

    def show(self) -> None:
        raise NotImplementedError

    def read(self) -> None:
        """What this and other processes have recorded."""
        files = [HERE / self.plan["also"]] if "also" in self.plan else []
        lines = [line for file in (*files, self.results) if file.exists() for line in file.read_text().splitlines()]
        self.records = {key_of(record["settings"]): record for record in map(json.loads, lines)}

    def runs(self, trial: str, changes: Mapping[str, Any], rounds: int) -> list[Piece]:
        """Of one setting, at all α."""
        return [self._piece(trial, changes, rounds, alpha) for alpha in self.plan["alphas"]]

    def _piece(self, trial: str, changes: Mapping[str, Any], rounds: int, alpha: float) -> Piece:
        values = {**self.plan["base"], **changes, "rounds": rounds, "partition.alpha": alpha}
        values |= {"seed": self.plan["seed"], "eval_every": max(1, rounds // EVALUATIONS), "data_root": self.data_root}
        # As from a file: a trial without a part may leave the base's settings of that part without effect.
        wanted = Experiment.from_dict(nested(flat(values))).set_by(dict.fromkeys(values, "the plan"))
        return Piece(trial, rounds, alpha, wanted, tune.on_validation(wanted, VALIDATION))

    def record(self, piece: Piece) -> dict[str, Any] | None:
        return self.records.get(key_of(settings_of(piece.wanted)))

    def score(self, pieces: list[Piece]) -> float | None:
        """The mean over α of the mean of a method's measures; None while a run is missing."""
        recorded = [self.record(piece) for piece in pieces]
        scores = [statistics.fmean(self.measures(record).values()) for record in recorded if record]
        return statistics.fmean(scores) if None not in recorded else None

    def measures(self, record: Mapping[str, Any]) -> dict[str, float]:
        """Accuracy by model, over the last evaluations, plus what post-training adds to the last of them."""
        gains = {model: after - record[model][-1] for model, after in record.get("after", {}).items()}
        means = {model: statistics.fmean(record[model][-self.plan["last"] :]) for model in MODELS if model in record}
        return {model: mean + gains.get(model, 0.0) for model, mean in means.items()}

    def go(self, minutes: float) -> None:
        """Runs what is missing and no other process is at; none is begun that would not end in time, by what the last
        one took."""
        end, usual = time.monotonic() + 60 * minutes, 0.0
        while time.monotonic() + usual < end:
            self.read()
            missing = [piece for piece in self.pieces() if not self.record(piece)]
            if not missing:
                return
            began = time.monotonic()
            if not any(self._claimed(piece) for piece in missing):
                return
            usual = time.monotonic() - began

    def _claimed(self, piece: Piece) -> bool:
        """Runs it, unless another process is at it."""
        claims = self.results.with_suffix(".claims")
        claims.mkdir(parents=True, exist_ok=True)
        with (claims / key_of(settings_of(piece.wanted))).open("w") as claim:
            try:
                fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)  # released when the process ends, also by a kill
            except BlockingIOError:
                return False
            self.read()
            if not self.record(piece):
                self._run(piece)
        return True

    def _run(self, piece: Piece) -> None:
        began = time.monotonic()
        record: dict[str, Any] = {"trial": piece.trial, "rounds": piece.rounds, "alpha": piece.alpha}
        try:
            history = fedrane.run(piece.experiment, dataset=self.examples(piece), calibrate=False).history
            during, after = history[: piece.rounds], history[piece.rounds :]
            record |= accuracies(during)
            if after:
                record["after"] = {model: values[-1] for model, values in accuracies(after).items()}
            record["samples_per_second"] = round(statistics.median(r["samples_per_second"] for r in history))
        except Diverged as error:
            record |= {**{model: [0.0] for model in piece.wanted.algorithm.models}, "failed": str(error)}
        if torch.cuda.is_available():  # the next run finds the memory free
            gc.collect()
            torch.cuda.empty_cache()
        record |= {
            "seconds": round(time.monotonic() - began, 1),
            "torch": torch.__version__,
            "settings": settings_of(piece.wanted),
        }
        with self.results.open("a") as file:
            file.write(json.dumps(record, ensure_ascii=False) + "\n")
        shown = ", ".join(f"{100 * value:.1f} {model}" for model, value in self.measures(record).items())
        print(
            f"{piece.rounds} rounds, α {piece.alpha:g}, {piece.trial}: {shown}, {record['seconds']:.0f} s", flush=True
        )

    def examples(self, piece: Piece) -> Dataset:
        """Training examples only: the validation examples take the place of the test examples."""
        if piece.alpha not in self._datasets:
            self._datasets[piece.alpha] = tune.without_test(as_dataset(piece.wanted, None), piece.wanted, VALIDATION)
        return self._datasets[piece.alpha]

    def table(self, title: str, trials: Mapping[str, list[Piece]]) -> None:
        """Of the settings that have all their runs, the best first."""
        scores = {trial: score for trial, pieces in trials.items() if (score := self.score(pieces)) is not None}
        heads = [f"α {alpha:g}, {model}" for alpha in self.plan["alphas"] for model in MODELS]
        print(f"\n{title}, mean of the last {self.plan['last']} evaluations on validation examples, %\n")
        print("| trial | score |", " | ".join(heads), "|\n| --- |", " | ".join(["---:"] * (len(heads) + 1)), "|")
        for trial in sorted(scores, key=lambda trial: -scores[trial]):
            recorded = [self.measures(self.record(piece) or {}) for piece in trials[trial]]
            cells = [f"{100 * each[model]:.1f}" if model in each else "–" for each in recorded for model in MODELS]
            print(f"| {trial} | {100 * scores[trial]:.2f} |", " | ".join(cells), "|")


class Halving(Search):
    """Trials of one method; the best of a rung run for longer."""

    def pieces(self) -> Iterator[Piece]:
        trials = list(self.plan["trials"])
        for number, rounds in enumerate(self.plan["rungs"]):
            if number:
                scores = {trial: self.score(self.trial(trial, self.plan["rungs"][number - 1])) for trial in trials}
                if None in scores.values():
                    return
                trials = sorted(trials, key=lambda trial: -(scores[trial] or 0.0))[: self.plan["keep"]]
            for trial in trials:
                yield from self.trial(trial, rounds)

    def trial(self, name: str, rounds: int) -> list[Piece]:
        return self.runs(name, self.plan["trials"][name], rounds)

    def show(self) -> None:
        for rounds in self.plan["rungs"]:
            self.table(f"{rounds} rounds", {name: self.trial(name, rounds) for name in self.plan["trials"]})


class Contest(Search):
    """Every method's settings, one key after the other: of a key's values the best is kept while the next is chosen.
    In the end the choice runs for longer, with the two best values of the first key, the learning rate."""

    @property
    def methods(self) -> list[str]:
        return list(self.plan["methods"])

    def choices(self) -> dict[str, dict[str, Any]]:
        """The settings of each method whose choice has been made."""
        chosen = {method: self.tried(method)[2] for method in self.methods}
        return {
            method: {key: settings[key] for key in self.plan["methods"][method]}
            for method, settings in chosen.items()
            if settings
        }

    def pieces(self) -> Iterator[Piece]:
        for method in self.methods:
            first, final, _ = self.tried(method)
            for pieces in (*first.values(), *final.values()):
                yield from pieces

    def tried(self, method: str) -> tuple[dict[str, list[Piece]], dict[str, list[Piece]], dict[str, Any] | None]:
        """The short runs and the long ones, as far as what was recorded decides them, and the choice."""
        lists = self.plan["methods"][method]
        chosen: dict[str, Any] = {"method": method, **{key: values[0] for key, values in lists.items()}}
        trials: dict[str, list[Piece]] = {}
        rates = []
        for key, values in lists.items():
            stage = [chosen | {key: value} for value in values]
            ranked, pieces = self.ranked(method, stage, self.plan["rounds"])
            trials |= pieces
            if not ranked:
                return trials, {}, None
            rates = rates or [settings[key] for settings in ranked[:2]]
            chosen = ranked[0]
        finalists = [chosen | {next(iter(lists)): rate} for rate in rates]
        ranked, final = self.ranked(method, finalists, self.plan["final"])
        return trials, final, ranked[0] if ranked else None

    def ranked(
        self, method: str, several: list[dict[str, Any]], rounds: int
    ) -> tuple[list[dict[str, Any]], dict[str, list[Piece]]]:
        """The settings, the best first, or none while a run is missing; and their runs."""
        titles = [self.title(method, settings) for settings in several]
        trials = {title: self.runs(title, each, rounds) for title, each in zip(titles, several, strict=True)}
        scores = [self.score(pieces) for pieces in trials.values()]
        if None in scores:
            return [], trials
        order = sorted(range(len(several)), key=lambda i: -(scores[i] or 0.0))
        return [several[i] for i in order], trials

    def title(self, method: str, settings: Mapping[str, Any]) -> str:
        """The values of what has several."""
        several = [key for key, values in self.plan["methods"][method].items() if len(values) > 1]
        return ", ".join([method, *(f"{key.removeprefix('method.')} {settings[key]:g}" for key in several)])

    def show(self) -> None:
        for method in self.methods:
            first, final, chosen = self.tried(method)
            for rounds, trials in ((self.plan["rounds"], first), (self.plan["final"], final)):
                if any(self.score(pieces) is not None for pieces in trials.values()):
                    self.table(f"{rounds} rounds", trials)
            if chosen:
                print("\nChosen:", self.title(method, chosen))


def accuracies(history: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Of each model that was evaluated."""
    values = {model: [round(r[key], 5) for r in history if (key := f"{model}/accuracy") in r] for model in MODELS}
    return {model: each for model, each in values.items() if each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, default=HERE / "search.toml")
    parser.add_argument(
        "--results", type=Path, help="where to record; default: results/search/DATASET.jsonl next to it"
    )
    parser.add_argument("--data-root", default="")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--methods", default="", help="of a contest: these only, comma-separated")
    parser.add_argument("--show", action="store_true", help="print what was recorded")
    parser.add_argument("--words", action="store_true", help="print a contest's choices as words of fedrane reproduce")
    asked = parser.parse_args()
    search = load(asked.plan, asked.results, asked.data_root)
    if asked.methods:
        search.plan["methods"] = {method: search.plan["methods"][method] for method in asked.methods.split(",")}
    if asked.show:
        search.show()
    elif asked.words:
        for method, settings in search.choices().items():
            print(*(f"{method}.{key.removeprefix('method.')}={value}" for key, value in settings.items()))
    else:
        search.go(asked.minutes)


def load(path: Path, results: Path | None = None, data_root: str = "") -> Search:
    plan = tomllib.loads(path.read_text())
    cls = Contest if "methods" in plan else Halving
    return cls(plan, results or path.parent / "results" / path.stem / f"{plan['base']['dataset']}.jsonl", data_root)


if __name__ == "__main__":
    main()

"""Kills runs of every method at random moments; each must end in the bytes of the run that was never killed.

python tests/fuzz/kills.py --kills 1000    an hour on two cores
python tests/fuzz/kills.py --kills 50 --seed 3 --methods fedrane,scaffold
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "support"), str(TESTS / "process")]

from fedrane.methods import METHODS  # noqa: E402
from fedrane.training.run_folder import CONFIG  # noqa: E402
from harness import TINY, Driver, same_run  # noqa: E402

WORDS = (*TINY, "participation=0.6", "client_dropout=0.2", "rounds=6")
EVERY = (1, 2, 3)
"""Rounds between checkpoints, drawn."""
PER_RUN = 6
"""Kills; then a run may come to its end, so that all methods have their turn."""


class Kills:
    """Runs that are killed again and again, and what came of them."""

    def __init__(self, driver: Driver, scratch: Path, seed: int, methods: Sequence[str]) -> None:
        self.driver, self.scratch, self.chance = driver, scratch, np.random.default_rng(seed)
        self.turns = itertools.cycle(methods)
        self.kills: Counter[str] = Counter()
        self.runs: Counter[str] = Counter()
        self.failures: list[str] = []
        self._seconds: dict[tuple[str, int], float] = {}

    def until(self, number: int) -> None:
        """Runs of the methods in turn, until so many processes were killed; each run is brought to its end."""
        while self.kills.total() < number:
            self.one_run(next(self.turns), number - self.kills.total())

    def one_run(self, method: str, most: int) -> None:
        """One run, killed at random moments, each within the time that it takes as a whole, until it ends."""
        every = int(self.chance.choice(EVERY))
        words = (*WORDS, f"method={method}", f"checkpoint_every={every}")
        reference, seconds = self._reference(method, every, words)
        run, killed = self.scratch / "run", 0
        shutil.rmtree(run, ignore_errors=True)
        while True:
            begun = ("resume", run) if (run / CONFIG).exists() else ("run", "--out", run, *words)
            process = self.driver.start(*begun)
            if killed < min(most, PER_RUN):
                time.sleep(self.chance.uniform(0, seconds))
                process.send(9)
            ended = process.wait()
            if not ended.killed:
                break
            killed += 1
        self.kills[method] += killed
        self.runs[method] += 1
        try:
            if ended.status:
                raise AssertionError(f"status {ended.status}: {ended.stderr}")
            same_run(run, reference)
        except AssertionError as error:
            self.failures.append(f"{method}, checkpoint_every={every}, after {killed} kills: {error}")

    def _reference(self, method: str, every: int, words: Sequence[str]) -> tuple[Path, float]:
        """The run that is never killed, and the seconds that it took."""
        folder = self.scratch / f"{method}-{every}"
        if (method, every) not in self._seconds:
            began = time.perf_counter()
            ended = self.driver("run", "--out", folder, *words)
            if ended.status:
                raise RuntimeError(f"{method} failed without a kill: {ended}")
            self._seconds[method, every] = time.perf_counter() - began
        return folder, self._seconds[method, every]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--methods", default=",".join(METHODS), help="with commas between them (default: all)")
    parser.add_argument("--scratch", type=Path, help="where the runs are (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        driver = Driver(Path(scratch))
        kills = Kills(driver, Path(scratch), options.seed, options.methods.split(","))
        while kills.kills.total() < options.kills and not kills.failures:
            kills.until(min(options.kills, kills.kills.total() + 50))
            print(f"{kills.kills.total()} kills, {kills.runs.total()} runs", flush=True)
        driver.close()
    for method, count in kills.kills.items():
        print(f"{method:12} {count:5} kills  {kills.runs[method]:4} runs")
    for failure in kills.failures:
        print(failure)
    print(
        f"{kills.kills.total()} kills in {kills.runs.total()} runs of {len(kills.kills)} methods: "
        f"{len(kills.failures)} runs ended in other bytes"
    )
    sys.exit(bool(kills.failures))


if __name__ == "__main__":
    main()

"""Lets every file operation and every allocation of a short run fail once, each in a run of its own.

    python tests/fuzz/faults.py                 all points, half an hour on two cores
    python tests/fuzz/faults.py --stride 10     every tenth

Afterwards the user does what the message says: resumes, or starts again where nothing had begun. The end must be the
very bytes of the run that nothing happened to. ``tests/process/faults.py`` says what fails how.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(TESTS), str(TESTS / "support"), str(TESTS / "process")]

from faults import ERRORS, MEMORY  # noqa: E402

from fedrane.training.run_folder import CONFIG  # noqa: E402
from harness import TINY, USER_METHODS, Driver, Ended, same_run  # noqa: E402

WORDS = (*TINY, f"method={USER_METHODS}:Gliding", "participation=0.6", "rounds=3")
"""With state on the server and with the clients, a post-training stage, and a copy of code in its folder."""


class Scenario(NamedTuple):
    """A command that fails on its way, and the folder that it finds; None for an empty place."""

    name: str
    begun: Path | None

    def command(self, run: Path) -> tuple[str | Path, ...]:
        return ("run", "--out", run, *WORDS) if self.begun is None else ("resume", run)


class Point(NamedTuple):
    """One failure: which operation of which command, and how."""

    scenario: Scenario
    at: int
    operation: str
    error: str

    def __str__(self) -> str:
        return f"{self.error} at operation {self.at} ({self.operation}) of {self.scenario.name}"


class Faults:
    """The failures of two commands: a run from its start, and one that is resumed."""

    def __init__(self, driver: Driver, scratch: Path) -> None:
        self.driver, self.scratch, self.reference = driver, scratch, scratch / "reference"
        must(driver("run", "--out", self.reference, *WORDS))
        begun = scratch / "begun"
        killed = driver("run", "--out", begun, *WORDS, sabotage={"trigger": "line", "at": 3})
        if not killed.killed:
            raise RuntimeError(f"it was not killed: {killed}")
        self.scenarios = (Scenario("run", None), Scenario("resume", begun))

    def points(self, stride: int = 1, error: str = "") -> Iterator[Point]:
        for scenario in self.scenarios:
            for kind in ("files", MEMORY):
                operations = self._operations(scenario, kind)
                moments: Iterable[int] = range(len(operations))
                if kind == MEMORY:  # the first time and the last that a line is reached
                    last = {name: at for at, name in enumerate(operations)}
                    moments = sorted({*map(operations.index, last), *last.values()})
                for number, at in enumerate([*moments][::stride]):
                    # With a stride, each operation fails in one way only.
                    errors = [MEMORY] if kind == MEMORY else [ERRORS[number % 3]] if stride > 1 else ERRORS
                    yield from (Point(scenario, at, operations[at], each) for each in errors if error in ("", each))

    def _operations(self, scenario: Scenario, kind: str) -> list[str]:
        run, log = self._place(scenario), self.scratch / f"{scenario.name}-{kind}.log"
        trap = {"trigger": "fault", "at": -1, "log": str(log), "error": kind, "folder": str(run)}
        must(self.driver(*scenario.command(run), sabotage=trap))
        return log.read_text().splitlines()

    def _place(self, scenario: Scenario) -> Path:
        run = self.scratch / "run"
        shutil.rmtree(run, ignore_errors=True)
        if scenario.begun:
            shutil.copytree(scenario.begun, run)
        return run

    def check(self, point: Point) -> str:
        """How the command ended; an error if the folder does not come to the same end, or a message is not clear."""
        run = self._place(point.scenario)
        trap = {"trigger": "fault", "at": point.at, "error": point.error, "folder": str(run)}
        ended = self.driver(*point.scenario.command(run), sabotage=trap)
        clear = ended.stderr.count("\n") == 1 and ended.stderr.startswith("error: ")
        if ended.status not in (0, 2) or (ended.status == 2 and not clear):
            raise AssertionError(f"{point}: {ended}")
        again = self.driver(*(("resume", run) if (run / CONFIG).exists() else ("run", "--out", run, *WORDS)))
        if again.status:
            raise AssertionError(f"{point}: afterwards {again}, and before that {ended}")
        same_run(run, self.reference)
        return "an error" if ended.status else "the run went on"


def must(ended: Ended) -> None:
    if ended.status:
        raise RuntimeError(f"it failed without a fault: {ended}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stride", type=int, default=1, help="only every n-th operation")
    parser.add_argument("--error", default="", choices=("", *ERRORS, MEMORY), help="only this one")
    parser.add_argument("--scratch", type=Path, help="where the runs are (default: a temporary folder)")
    options = parser.parse_args()
    outcomes: Counter[str] = Counter()
    failures: list[str] = []
    with tempfile.TemporaryDirectory(dir=options.scratch) as scratch:
        driver = Driver(Path(scratch))
        faults = Faults(driver, Path(scratch))
        for point in faults.points(options.stride, options.error):
            try:
                outcomes[f"{point.error}: {faults.check(point)}"] += 1
            except AssertionError as error:
                failures.append(f"{point}: {error}")
                print(failures[-1], flush=True)
        driver.close()
    for outcome, count in sorted(outcomes.items()):
        print(f"{count:6} {outcome}")
    print(f"{len(failures)} of {outcomes.total() + len(failures)} faults left a folder that does not come to its end")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()

"""Puts one defect at a time into the library and fails if a law that should notice it does not.

    python tests/mutations/run.py                    all mutants
    python tests/mutations/run.py fedprox nash       those of these tables
    python tests/mutations/run.py "nash:start"       those with that in their names
    python tests/mutations/run.py --document         write docs/defects.md

First the laws are held to the code as it is. Then torch and pytest, imported once, are forked for each mutant: the
child serves the changed source of that one module to whoever imports it, and runs the mutant's laws. Only a failing
test kills; what cannot be imported, has a name that is not there or runs out of time is itself a defect of the table.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: a child must not inherit a pool of threads
os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no law needs one, and a child is the sooner at work
os.environ["TRITON_INTERPRET"] = "1"  # before something imports Triton; what is held to laws here runs on a CPU
ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests" / "support")]

import pytest  # noqa: E402

from mutations.catalogue import DOCUMENT, Mutant, chosen, document  # noqa: E402

OPTIONS = ("-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT))
SLIPS = ("NameError", "UnboundLocalError", "SyntaxError", "ImportError", "ModuleNotFoundError")
"""A mutant that raises one of these is no defect somebody might make, but a slip in its table."""
NEEDED = (
    "fedrane.cli.commands",
    "fedrane.testing.conformance",
    "cvxpy",
    "hypothesis.strategies",
    "sklearn.linear_model",
    "torch.testing",
)
CONTEXT = multiprocessing.get_context("fork")


class Seen(NamedTuple):
    """What became of a law."""

    ran: int
    failed: str
    """Which test, and by what; empty if none."""
    slip: str


class Ended(NamedTuple):
    problem: str
    """Why the laws could not be asked; empty if they were."""
    laws: dict[str, Seen]


@dataclass
class Job:
    title: str
    laws: tuple[str, ...]
    mutant: Mutant | None
    ended: Ended = field(default_factory=lambda: Ended("never begun", {}))
    seconds: float = 0.0

    @property
    def problem(self) -> str:
        """Why a mutant is not killed, or why code without one does not pass."""
        if self.ended.problem:
            return self.ended.problem
        for law, seen in self.ended.laws.items():
            if not seen.ran:
                return f"{law} is not there"
            if seen.slip:
                return f"not a defect but a slip: {seen.slip}"
            if self.mutant and not seen.failed:
                return f"survives {law}"
            if not self.mutant and seen.failed:
                return f"fails without a mutant: {seen.failed}"
        return ""


# ---- in the child


class Changed(MetaPathFinder, SourceFileLoader):
    """Serves the changed source of one module."""

    def __init__(self, mutant: Mutant) -> None:
        super().__init__(mutant.module, str(mutant.path))
        self.mutant = mutant

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_file_location(name, self.path, loader=self) if name == self.mutant.module else None

    def get_code(self, name: str) -> CodeType:
        return compile(self.mutant.source(), self.path, "exec", dont_inherit=True)


@dataclass(eq=False)
class Recorder:
    """Notes which laws fail and by what; a law that has failed need not be asked again."""

    laws: tuple[str, ...]
    ran: dict[str, int] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    slips: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    def law(self, item: pytest.Item) -> str:
        return next(law for law in self.laws if item.nodeid == law or item.nodeid.startswith((law + "[", law + "::")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        return True if self.law(item) in self.failed else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        law = self.law(item)
        if report.when == "call":
            self.ran[law] = self.ran.get(law, 0) + 1
        if report.failed and call.excinfo is not None:
            text = f"{call.excinfo.typename}: {call.excinfo.value}"
            slip = next((word for word in SLIPS if f"{word}:" in text), "")
            if report.when != "call":
                self.problem = f"{item.nodeid} does not get as far as its test: {text}"
            elif slip:
                self.slips[law] = text
            self.failed[law] = f"{item.name}, {call.excinfo.typename}"
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.problem = f"{report.nodeid} cannot be collected: {report.longreprtext}"

    def ended(self) -> Ended:
        seen = {law: Seen(self.ran.get(law, 0), self.failed.get(law, ""), self.slips.get(law, "")) for law in self.laws}
        return Ended(self.problem, seen)


def work(job: Job, out: Connection, loud: bool) -> None:
    """Ask the laws, and send what they said."""
    os.chdir(ROOT)
    if not loud:
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
    recorder = Recorder(job.laws)
    try:
        if job.mutant:
            sys.meta_path.insert(0, Changed(job.mutant))
            importlib.import_module(job.mutant.module)
        status = pytest.main([*OPTIONS, *job.laws], plugins=[recorder])
        if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            recorder.problem = recorder.problem or f"pytest ends with {status!r}"
    except BaseException as error:  # noqa: BLE001 - whatever it is, it must be reported
        recorder.problem = f"cannot be imported: {type(error).__name__}: {error}"
    out.send(recorder.ended())
    out.close()


# ---- in the parent


def warm() -> None:
    """Import all that the library and its tests import, and forget the library itself."""
    for name in NEEDED:
        importlib.import_module(name)
    import torch  # only here: --document needs none

    torch.func.vmap(torch.func.grad(torch.sin))(torch.zeros(2))  # the first of these imports half of torch
    for name in [name for name in sys.modules if name.partition(".")[0] == "fedrane"]:
        del sys.modules[name]


def run(jobs: Sequence[Job], processes: int, limit: float, loud: bool) -> Iterator[Job]:
    """The jobs as they end, ``processes`` at a time."""
    waiting, running = list(reversed(jobs)), dict[Any, tuple[Job, Any, Connection, float]]()
    while waiting or running:
        while waiting and len(running) < processes:
            job = waiting.pop()
            here, there = CONTEXT.Pipe(duplex=False)
            process = CONTEXT.Process(target=work, args=(job, there, loud))
            process.start()
            there.close()
            running[here] = job, process, here, time.monotonic()
        ready = wait(list(running), timeout=0.2)
        for key in list(running):
            job, process, here, began = running[key]
            job.seconds = time.monotonic() - began
            if key in ready:
                try:
                    job.ended = here.recv()
                except EOFError:
                    job.ended = Ended("its process died without a word", {})
            elif job.seconds > limit:
                process.kill()
                job.ended = Ended(f"no answer within {limit:g} s", {})
            else:
                continue
            process.join()
            here.close()
            del running[key]
            yield job


def unchanged(mutants: Sequence[Mutant]) -> list[Job]:
    """All laws, on the code as it is; one job a table."""
    laws: dict[str, dict[str, None]] = {}
    for mutant in mutants:
        laws.setdefault(mutant.table, {}).update(dict.fromkeys(mutant.laws))
    return [Job(f"{table}: as it is", tuple(names), None) for table, names in laws.items()]


def report(jobs: Iterator[Job], good: str, bad: str) -> int:
    """One line a job; gives how many went wrong."""
    wrong = 0
    for job in jobs:
        by = "; ".join(seen.failed for seen in job.ended.laws.values() if seen.failed)
        wrong += bool(job.problem)
        word = bad if job.problem else good
        print(f"{word:9}{job.seconds:6.1f} s  {job.title}  {job.problem or by}".rstrip(), flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="*", help="all, where none is named")
    parser.add_argument("--document", action="store_true", help="write docs/defects.md and end")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--limit", type=float, default=300, help="seconds for one mutant")
    parser.add_argument("--loud", action="store_true", help="show what pytest says")
    words = parser.parse_args()
    if words.document:
        DOCUMENT.write_text(document(), encoding="utf-8")
        return 0
    mutants = []
    for mutant in chosen(words.tables):
        mutant.source()
        if not mutant.cpu or mutant.cpu in Path("/proc/cpuinfo").read_text().split():
            mutants.append(mutant)
        else:
            print(f"{mutant.title}: not tried, the CPU has no {mutant.cpu}")
    warm()
    settings = words.processes, words.limit, words.loud
    if wrong := report(run(unchanged(mutants), *settings), "holds", "FAILS"):
        print(f"the laws of {wrong} tables fail without any mutant: nothing else was tried")
        return 1
    jobs = [Job(mutant.title, mutant.laws, mutant) for mutant in mutants]
    wrong = report(run(jobs, *settings), "killed", "ALIVE")
    print(f"{len(jobs) - wrong} of {len(jobs)} mutants killed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

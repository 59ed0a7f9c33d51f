"""The tables of mutants fit the code as it stands, and what they are run by tells a dead mutant from a living one.

All of them are run by ``make mutations``.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from mutations.catalogue import DOCUMENT, ROOT, SOURCE, Mutant, chosen, defects, document, read, tables

RUN = Path(__file__).parent / "run.py"
ELSEWHERE = {"fedavg": "algorithm.py"}
"""Tables whose mutants are in another file than that of their name."""


@cache
def functions(path: str) -> set[str]:
    parsed = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in parsed.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("table", tables())
def test_every_mutant_applies(table: str) -> None:
    """Its text occurs once, the result compiles and is another program; its laws are there."""
    mutants = read(tables()[table])
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        compile(mutant.source(), mutant.file, "exec", dont_inherit=True)
        assert mutant.laws, mutant.title
        for law in mutant.laws:
            path, _, name = law.partition("::")
            assert name.partition("[")[0] in functions(path), f"{mutant.title}: there is no {law}"


def test_every_method_and_every_op_has_mutants() -> None:
    parts = [path for part in ("methods", "ops") for path in (SOURCE / part).glob("[!_]*.py")]
    for path in parts:
        file = ELSEWHERE.get(path.stem, str(path.relative_to(SOURCE)))
        assert sum(mutant.file == file for mutant in read(tables()[path.stem])) >= 5, f"{path.stem} has too few mutants"


def test_every_known_defect_is_repeated_and_the_page_says_so() -> None:
    repeated = {key for mutant in chosen(()) for key in mutant.repeats}
    assert repeated == {defect.key for defect in defects()}
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run: python tests/mutations/run.py --document"


LIVING = """
file = "methods/fedprox.py"
laws = "tests/methods/test_fedprox.py"

[[mutant]]
name = "nobody looks at this"
text = "strength: float = 0.01"
becomes = "strength: float = 0.02"
law = ["test_bad_strengths_are_refused"]

[[mutant]]
name = "cannot be imported"
text = "strength: float = 0.01"
becomes = "strength: float = nothing"
law = ["test_bad_strengths_are_refused"]

[[mutant]]
name = "a name that is not there"
text = "check_ranges(self, strength=(0, 1e6))"
becomes = "check_range(self, strength=(0, 1e6))"
law = ["test_bad_strengths_are_refused"]

[[mutant]]
name = "a process that dies"
text = "check_ranges(self, strength=(0, 1e6))"
becomes = "__import__('os').abort()"
law = ["test_bad_strengths_are_refused"]

[[mutant]]
name = "one of its laws does not notice"
text = "check_ranges(self, strength=(0, 1e6))"
becomes = "pass"
law = ["test_bad_strengths_are_refused", "test_without_its_term_it_is_fedavg"]
"""


def test_only_a_failing_law_kills(tmp_path: Path) -> None:
    """Three mutants that die, and five that must not be taken for dead."""
    table = tmp_path / "living.toml"
    table.write_text(LIVING, encoding="utf-8")
    dying = ["fedavg:statistics of the first", "nash:no solver", "scaffold:opposite sign"]
    command = [sys.executable, str(RUN), *dying, str(table)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 1, done.stdout + done.stderr
    assert [line.split()[0] for line in lines].count("holds") == 4
    killed, alive = (
        sorted(line.partition(" s  ")[2] for line in lines if line.startswith(word)) for word in ("killed", "ALIVE")
    )
    assert [line.partition("  ")[0] for line in killed] == sorted(mutant.title for mutant in chosen(dying))
    reasons = {line.partition("  ")[0].removeprefix("living: "): line.partition("  ")[2] for line in alive}
    assert reasons["nobody looks at this"].startswith("survives")
    assert reasons["cannot be imported"].startswith("cannot be imported: NameError")
    assert reasons["a name that is not there"].startswith("not a defect but a slip: NameError")
    assert reasons["a process that dies"] == "its process died without a word"
    assert reasons["one of its laws does not notice"].endswith("test_without_its_term_it_is_fedavg")
    assert len(reasons) == 5
    assert lines[-1] == "3 of 8 mutants killed"


def test_a_text_that_is_not_there_or_changes_nothing_is_said() -> None:
    mutant = Mutant("x", "y", "methods/fedprox.py", "no such text", "", (), ())
    with pytest.raises(ValueError, match="occurs 0 times"):
        mutant.source()
    mutant = Mutant("x", "y", "methods/fedprox.py", "  # μ", "", (), ())
    with pytest.raises(ValueError, match="nothing but comments"):
        mutant.source()

"""The tables of mutants fit the code as it stands, and what they are run by tells a dead mutant from a living one.

All of them are run by ``make mutations``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mutations.catalogue import DOCUMENT, ROOT, SOURCE, Mutant, changed, chosen, defects, document, read, tables

RUN = Path(__file__).parent / "run.py"
ELSEWHERE = {"fedavg": "algorithm.py"}
"""Tables whose mutants are in another file than that of their name."""


@pytest.mark.parametrize("table", tables())
def test_every_mutant_applies(table: str) -> None:
    """Its text occurs once, the result compiles and is another program."""
    mutants = read(tables()[table])
    assert len({mutant.name for mutant in mutants}) == len(mutants)
    for mutant in mutants:
        compile(mutant.source(), mutant.file, "exec", dont_inherit=True)
        assert mutant.laws, mutant.title


def test_every_law_is_there() -> None:
    """Also the case in brackets: pytest refuses a name that it does not find, and names it."""
    laws = {law for mutant in chosen(()) for law in mutant.laws}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *sorted(laws)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_every_method_and_every_op_has_mutants() -> None:
    parts = [path for part in ("methods", "ops") for path in (SOURCE / part).glob("[!_]*.py")]
    for path in parts:
        file = ELSEWHERE.get(path.stem, str(path.relative_to(SOURCE)))
        assert sum(mutant.file == file for mutant in read(tables()[path.stem])) >= 5, f"{path.stem} has too few mutants"


def test_every_known_defect_is_repeated_and_is_on_the_page() -> None:
    repeated = {key for mutant in chosen(()) for key in mutant.repeats}
    assert repeated == {defect.key for defect in defects()}
    assert DOCUMENT.read_text(encoding="utf-8") == document(), "run: python tests/mutations/run.py --document"


LIVING = """
file = "methods/fedprox.py"
laws = "tests/methods/test_fedprox.py"

[[mutant]]
name = "nobody looks at this"
in = "FedProx"
text = "float = 0.01"
becomes = "float = 0.02"
law = ["test_bad_strengths_are_refused"]

[[mutant]]
name = "cannot be imported"
in = "FedProx"
text = "float = 0.01"
becomes = "float = nothing"
law = ["test_bad_strengths_are_refused"]

[[mutant]]
name = "a name that is not there"
in = "FedProx.__post_init__"
text = "check_ranges"
becomes = "check_range"
law = ["test_bad_strengths_are_refused"]

[[mutant]]
name = "a process that dies"
in = "FedProx.__post_init__"
text = "check_ranges(…)"
becomes = "__import__('os').abort()"
law = ["test_bad_strengths_are_refused"]

[[mutant]]
name = "one of its laws does not notice"
in = "FedProx.__post_init__"
text = "check_ranges(…)"
becomes = "pass"
law = ["test_bad_strengths_are_refused", "test_without_its_term_it_is_fedavg"]
"""


@pytest.mark.slow
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


CODE = """\
def f(x):
    return x + g(x, (1, 2))  # x + 1


class A:
    def f(self, x):
        for each in x:
            self.seen(
                each,
                x[each + 1],
            )
            yield each - 1
"""


@pytest.mark.parametrize(
    ("name", "text", "becomes", "line"),
    [
        ("f", "x+g", "x - g", "    return x - g(x, (1, 2))  # x + 1"),
        ("f", "g(…)", "g(…)", "    return x + g(x, (1, 2))  # x + 1"),
        ("f", "(…, (…))", "(…, …)", "    return x + g(x, 1, 2)  # x + 1"),
        ("A", "x[…]", "…", "                each + 1,"),
        ("", "each - 1", "each", "            yield each"),
        ("A.f", "self.seen(each, …) yield", "for x in x:\n    yield", "                yield each - 1"),
    ],
)
def test_a_text_is_a_run_of_tokens_in_its_function(name: str, text: str, becomes: str, line: str) -> None:
    """However it is laid out, and whatever ``…`` stands for."""
    new = changed(CODE, name, text, becomes)
    compile(new, "code", "exec")
    assert line in new.splitlines()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("f", "x + 1", "occurs 0 times in f"),  # that is a comment
        ("f", "each", "occurs 0 times in f"),
        ("A", "each", "occurs 4 times in A"),
        ("", "x", "occurs 6 times in the file"),
        ("f", "return … 2", "occurs 0 times"),  # brackets that are not balanced
        ("B.f", "x", "there is no B.f"),
        ("f", "# x + 1", "nothing but comments"),
    ],
)
def test_a_text_that_does_not_occur_once_is_refused(name: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        changed(CODE, name, text, "")


@pytest.mark.parametrize(
    ("text", "becomes", "message"),
    [
        ("no such text", "", "x: y: its text occurs 0 times"),
        ("loss +", "(loss) +", "nothing but comments"),
        ("loss +", "loss (", "no Python"),
    ],
)
def test_a_mutant_that_changes_nothing_or_breaks_the_file_is_refused(text: str, becomes: str, message: str) -> None:
    mutant = Mutant("x", "y", "methods/fedprox.py", "FedProx.objective", text, becomes, (), ())
    with pytest.raises(ValueError, match=message):
        mutant.source()

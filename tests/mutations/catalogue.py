"""The tables of mutants: small defects, each with the laws that must notice it.

One file of ``mutants/`` for each method, op or part of the core::

    file = "methods/fedprox.py"            # under src/fedrane
    laws = "tests/methods/test_fedprox.py" # where laws without a path are

    [[mutant]]
    name = "distance not squared"
    text = "tree.dot(away, away)"          # occurs exactly once
    becomes = "tree.norm(away)"
    law = ["test_a_client_ends_at_the_proximal_minimiser"]
    repeats = ["flower-fedprox"]           # of defects.toml, where another library has this very defect

Here nothing is imported but the standard library: the tables are read before torch is.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
SOURCE = ROOT / "src" / "fedrane"
TABLES = HERE / "mutants"
DOCUMENT = ROOT / "docs" / "defects.md"
HEAD = """\
# Defects of others, and the laws that keep them out

Each row is a defect found in a library or in a paper's own code: read there, and mostly run. A mutant puts the same
defect into ours, and each law beside it must fail then; `make mutations` tries that, with these mutants and many more.
They are in `tests/mutations/mutants/`. This page is made from them by `python tests/mutations/run.py --document`, and a
test holds it to them.

| where | defect | law of ours that fails | mutant |
| --- | --- | --- | --- |"""


@dataclass(frozen=True)
class Mutant:
    """One defect in one file."""

    table: str
    name: str
    file: str
    text: str
    becomes: str
    laws: tuple[str, ...]
    """Node ids; each must fail."""
    repeats: tuple[str, ...]

    @property
    def title(self) -> str:
        return f"{self.table}: {self.name}"

    @property
    def path(self) -> Path:
        return SOURCE / self.file

    @property
    def module(self) -> str:
        parts = ("fedrane", *Path(self.file).with_suffix("").parts)
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def source(self) -> str:
        """The file with the defect in it."""
        whole = self.path.read_text(encoding="utf-8")
        if (found := whole.count(self.text)) != 1:
            raise ValueError(f"{self.title}: its text occurs {found} times in {self.file}, not once")
        changed = whole.replace(self.text, self.becomes)
        try:
            same = ast.dump(ast.parse(changed)) == ast.dump(ast.parse(whole))
        except SyntaxError as error:
            raise ValueError(f"{self.title}: what it leaves is no Python: {error}") from error
        if same:
            raise ValueError(f"{self.title}: nothing but comments or spaces is changed")
        return changed


@dataclass(frozen=True)
class Defect:
    """What another library, or a paper's own code, gets wrong."""

    key: str
    where: str
    what: str


def read(table: Path) -> list[Mutant]:
    content = tomllib.loads(table.read_text(encoding="utf-8"))
    return [
        Mutant(
            table=table.stem,
            name=entry["name"],
            file=entry.get("file", content["file"]),
            text=entry["text"],
            becomes=entry["becomes"],
            laws=tuple(law if "::" in law else f"{content['laws']}::{law}" for law in entry["law"]),
            repeats=tuple(entry.get("repeats", ())),
        )
        for entry in content["mutant"]
    ]


def tables() -> dict[str, Path]:
    return {path.stem: path for path in sorted(TABLES.glob("*.toml"))}


def chosen(words: Iterable[str]) -> list[Mutant]:
    """Those of the named tables (all, where none is named): ``fedprox``, ``fedprox:part of a name``, or a file."""
    known, found = tables(), []
    for word in list(words) or list(known):
        stem, _, part = ("", "", "") if word.endswith(".toml") else word.partition(":")
        if stem and stem not in known:
            raise SystemExit(f"there are no mutants of {stem!r}; there are some of {', '.join(known)}")
        mutants = [mutant for mutant in read(known.get(stem, Path(word))) if part in mutant.name]
        if not mutants:
            raise SystemExit(f"no mutant's name holds {part!r}")
        found += mutants
    return found


def defects() -> list[Defect]:
    content = tomllib.loads((HERE / "defects.toml").read_text(encoding="utf-8"))
    return [Defect(**entry) for entry in content["defect"]]


def document() -> str:
    """The table of ``docs/defects.md``."""
    mutants, lines = chosen(()), [HEAD]
    for defect in defects():
        for mutant in (m for m in mutants if defect.key in m.repeats):
            laws = "<br>".join(f"`{law.removeprefix('tests/')}`" for law in mutant.laws)
            lines.append(f"| {defect.where} | {defect.what} | {laws} | {mutant.title} |")
    return "\n".join(lines) + "\n"

"""The tables of mutants: small defects, each with the laws that must notice it.

One file of ``mutants/`` for each method, op or part of the core::

    file = "methods/fedprox.py"            # under src/fedrane
    laws = "tests/methods/test_fedprox.py" # where laws without a path are

    [[mutant]]
    name = "distance not squared"
    in = "FedProx.objective"               # function, method or class; without it, the whole file
    text = "tree.dot(…)"                   # occurs exactly once in there
    becomes = "tree.norm(away)"
    law = ["test_a_client_ends_at_the_proximal_minimiser"]
    repeats = ["flower-fedprox"]           # of defects.toml, where another library has this very defect
    cpu = "avx512_bf16"                    # what the CPU must have for the defect to show; most need nothing

``text`` is compared token by token: spaces, line breaks, indentation and comments do not matter. Keep it as short as
possible, so that a change of something else on the line does not break it. ``…`` stands for any tokens with balanced
brackets; the nth ``…`` of ``becomes`` is what the nth ``…`` of ``text`` stood for. Further lines of ``becomes`` are
indented like the line where ``text`` begins.

Here nothing is imported but the standard library: the tables are read before torch is.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

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


TOKEN = re.compile(
    r"""
    (?: \s | \\\n | \#[^\n]* )+                                            # nothing
    | ( [rRbBuUfF]{0,2} (?: \"{3} (?: \\. | [^\\] )*? \"{3} | \'{3} (?: \\. | [^\\] )*? \'{3}
                           | " (?: \\. | [^"\\\n] )* " | ' (?: \\. | [^'\\\n] )* ' )
    | [^\W\d]\w*
    | (?: 0[xXbBoO]\w+ | (?: \d[\d_]*\.?[\d_]* | \.\d[\d_]* ) (?: [eE][+-]?\d+ )? )
    | (?: \*\* | // | << | >> | [-+*/%@&|^<>=!:] ) = | -> | \*\* | // | << | >> | \.\.\.
    | . )
    """,
    re.VERBOSE | re.DOTALL,
)
ANY = "…"
OPEN, CLOSE = frozenset("([{"), frozenset(")]}")


class Token(NamedTuple):
    text: str
    begin: int
    end: int


class Span(NamedTuple):
    """Tokens from one number up to another, without that one."""

    begin: int
    end: int


@cache
def tokens(text: str) -> tuple[Token, ...]:
    """Also of what is not whole Python, such as ``x) + 1``."""
    return tuple(Token(found[1], *found.span(1)) for found in TOKEN.finditer(text) if found[1])


def match(pattern: Sequence[str], text: Sequence[str], at: int) -> list[Span] | None:
    """What each ``…`` of the pattern stands for, and last the whole, where the pattern fits ``text[at:]``."""
    if not pattern:
        return [Span(at, at)]
    if pattern[0] != ANY:
        rest = match(pattern[1:], text, at + 1) if at < len(text) and text[at] == pattern[0] else None
    else:
        depth, rest = 0, None
        for end in range(at, len(text) + 1):
            if depth == 0 and (rest := match(pattern[1:], text, end)) is not None:
                rest.insert(0, Span(at, end))
                break
            depth += 0 if end == len(text) else (text[end] in OPEN) - (text[end] in CLOSE)
            if depth < 0:
                break
    return rest and [*rest[:-1], Span(at, rest[-1].end)]


def nodes(parent: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    """Functions and classes with their qualified names, inner ones too."""
    for child in ast.iter_child_nodes(parent):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield prefix + child.name, child
            yield from nodes(child, f"{prefix}{child.name}.")
        else:
            yield from nodes(child, prefix)


@cache
def lines_of(whole: str, name: str) -> tuple[int, int]:
    """First and last line of the functions or classes of that name; a property and its setter are one."""
    found = [node for known, node in nodes(ast.parse(whole)) if known == name]
    if not found:
        raise ValueError(f"there is no {name}")
    first = min(part.lineno for node in found for part in (node, *getattr(node, "decorator_list", ())))
    return first, max(node.end_lineno or 0 for node in found)


@cache
def meaning(whole: str) -> str:
    """The program, without comments and layout."""
    return ast.dump(ast.parse(whole))


def changed(whole: str, name: str, text: str, becomes: str) -> str:
    """``whole`` with ``becomes`` for ``text`` in the function or class of that name (anywhere, if empty)."""
    parts = tokens(whole)
    if name:
        first, last = lines_of(whole, name)
        starts = [0, *(found.end() for found in re.finditer("\n", whole)), len(whole)]
        parts = tuple(part for part in parts if starts[first - 1] <= part.begin < starts[last])
    pattern, words = [part.text for part in tokens(text)], [part.text for part in parts]
    if not pattern:
        raise ValueError("its text is nothing but comments or spaces")
    spans = [found for at in range(len(words)) if (found := match(pattern, words, at)) is not None]
    if len(spans) != 1:
        raise ValueError(f"its text occurs {len(spans)} times in {name or 'the file'}, not once")
    *held, (begin, end) = spans[0]
    start = parts[begin].begin
    line = whole[whole.rfind("\n", 0, start) + 1 :]
    new = becomes.replace("\n", "\n" + line[: len(line) - len(line.lstrip(" "))])
    for part in held:
        stood = whole[parts[part.begin].begin : parts[part.end - 1].end] if part.end > part.begin else ""
        new = new.replace(ANY, stood, 1)
    return whole[:start] + new + whole[parts[end - 1].end :]


@dataclass(frozen=True)
class Mutant:
    """One defect in one file."""

    table: str
    name: str
    file: str
    scope: str
    """Which function or class of it; empty: all of it."""
    text: str
    becomes: str
    laws: tuple[str, ...]
    """Node ids; each must fail."""
    repeats: tuple[str, ...]
    cpu: str = ""
    """What the CPU must have for the defect to show."""

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
        try:
            new = changed(whole, self.scope, self.text, self.becomes)
        except ValueError as error:
            raise ValueError(f"{self.title}: {error}, {self.file}") from error
        try:
            same = ast.dump(ast.parse(new)) == meaning(whole)
        except SyntaxError as error:
            raise ValueError(f"{self.title}: what it leaves is no Python: {error}") from error
        if same:
            raise ValueError(f"{self.title}: nothing but comments or spaces is changed")
        return new


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
            scope=entry.get("in", ""),
            text=entry["text"],
            becomes=entry["becomes"],
            laws=tuple(law if "::" in law else f"{content['laws']}::{law}" for law in entry["law"]),
            repeats=tuple(entry.get("repeats", ())),
            cpu=entry.get("cpu", ""),
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

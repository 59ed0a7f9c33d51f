"""Build the documentation site: ``make docs``, or ``python docs/build_site.py [FOLDER]`` (default: ``build/docs``).

Pages are Markdown files in this folder, which also read well on a forge. Before Zensical makes HTML of them, in strict
mode, this program adds what is known elsewhere: the keys and the fields from the program, the commands from the command
line, the API from ``__all__``, the laws from the tests, the defects from ``defects.md``, the tutorials from the
notebooks in ``examples/``. A page says where with ``<!-- make: NAME -->``; what stands between that and ``<!-- made
-->`` is for readers of the file and is replaced. Every link and anchor of the HTML is checked, and that no page loads
anything from another host.
"""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import typer.main
import yaml

import fedrane
from fedrane import methods
from fedrane.cli.commands import app
from fedrane.config import reference
from fedrane.testing import conformance

DOCS = Path(__file__).parent.resolve()
ROOT = DOCS.parent
TARGET = ROOT / "build" / "docs"
EXAMPLES = ROOT / "examples"
PAGES = {"README.md": "index.md"} | {f"{name}.md": f"{name.lower()}.md" for name in ("CONTRIBUTING", "CHANGELOG")}
"""Files outside this folder that are pages of the site, or that a page stands for."""


def main() -> int:
    target = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else TARGET
    status = build(target)
    if status:
        return status
    problems = list(check(target / "site"))
    for problem in problems:
        print(problem, file=sys.stderr)
    if not problems:
        print(f"open {target / 'site' / 'index.html'} in a browser")
    return bool(problems)


def build(target: Path) -> int:
    """Write the pages and make HTML of them; the exit status of Zensical."""
    shutil.rmtree(target, ignore_errors=True)
    config = assemble(target)
    command = [Path(sys.executable).with_name("zensical"), "build", "--strict", "--clean", "-f", config]
    return subprocess.run(command, cwd=target, check=False).returncode


# ---- the pages


def assemble(target: Path) -> Path:
    """Write all pages and the configuration, and return its path."""
    pages = target / "pages"
    kinds = ("*.png", "*.css")
    for source in [path for kind in kinds for path in DOCS.rglob(kind)]:
        _copy(source, pages / source.relative_to(DOCS))
    for source, name in sources():
        _write(pages / name, page(source, name))
    tutorials = list(lessons())
    for lesson in tutorials:
        _write(pages / lesson.page, lesson.text)
    config = yaml.safe_load((DOCS / "site.yml").read_text(encoding="utf-8"))
    for section in config["nav"]:
        if "Tutorials" in section:
            section["Tutorials"] += [{lesson.title: lesson.page} for lesson in tutorials]
    _write(target / "mkdocs.yml", yaml.safe_dump(config, sort_keys=False, allow_unicode=True))
    return target / "mkdocs.yml"


def sources() -> Iterator[tuple[Path, str]]:
    """Every page: its file, and its name on the site."""
    for path in sorted(DOCS.rglob("*.md")):
        yield path, path.relative_to(DOCS).as_posix()
    for name, page_name in PAGES.items():
        if not (DOCS / page_name).exists():
            yield ROOT / name, page_name


def page(source: Path, name: str) -> str:
    """The text of a page, with what is generated, and with links that hold on the site."""
    text = source.read_text(encoding="utf-8")
    folder, stem = Path(name).parent.as_posix(), Path(name).stem
    if folder == "methods" and stem in methods.METHODS:
        text = with_fields(text, stem) + method_sections(stem)
    text = MAKE.sub(lambda found: GENERATORS[found["name"]](), text)
    if name == "defects.md":
        text = TEST.sub(in_words, text)
    return linked(text, source, name)


MAKE = re.compile(r"<!-- make: (?P<name>[\w-]+) -->.*?<!-- made -->", re.DOTALL)
LINK = re.compile(r"\[(?P<text>[^\]\n]*(?:\n[^\]\n]+)?)\]\((?P<path>[^()\s#]+)(?P<anchor>#[^()\s]*)?\)")


def linked(text: str, source: Path, name: str) -> str:
    """The text of a page, with links that hold on the site."""
    return LINK.sub(lambda found: _link(found, source, name), text)


def _link(found: re.Match[str], source: Path, name: str) -> str:
    """A link to a file of the repository that is no page becomes the file's name."""
    path = (source.parent / found["path"]).resolve()
    if "://" in found["path"] or not path.exists() or not path.is_relative_to(ROOT):
        return found[0]
    inside = path.relative_to(ROOT).as_posix()
    if path.is_relative_to(DOCS) and path.is_file() and path.suffix != ".py":
        there = path.relative_to(DOCS).as_posix()
    elif inside in PAGES:
        there = PAGES[inside]
    elif path == DOCS / "methods" or path == DOCS / "decisions":
        there = f"{path.name}/index.md"
    else:
        return found["text"] if found["text"].startswith("`") else f"{found['text']} (`{inside}`)"
    up = "../" * name.count("/")
    return f"[{found['text']}]({up}{there}{found['anchor'] or ''})"


# ---- what is generated


def row(*cells: object) -> str:
    return "| " + " | ".join(" ".join(str(cell).split()).replace("|", "\\|") for cell in cells) + " |\n"


def table(titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    titles = list(titles)
    return row(*titles) + row(*["---"] * len(titles)) + "".join(row(*cells) for cells in rows)


def code(value: object) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else ""


def commands() -> str:
    """Every command with its arguments and options."""
    return "\n".join(_commands(typer.main.get_command(app), "fedrane"))


def _commands(command: Any, name: str) -> Iterator[str]:
    if hasattr(command, "commands"):
        for inner in command.commands:
            yield from _commands(command.commands[inner], f"{name} {inner}")
        return
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option" and not p.hidden]
    words = " ".join(p.make_metavar(_context(command)) for p in arguments)
    yield f"## {name}\n\n```text\n{name} {words} [OPTIONS]\n```\n\n{_plain(command.help)}\n"
    rows = [(code(p.make_metavar(_context(command))), "", _plain(getattr(p, "help", ""))) for p in arguments]
    rows += [(", ".join(map(code, p.opts)), code(_default(p)), _plain(p.help)) for p in options]
    yield table(("argument or option", "default", "meaning"), rows) if rows else ""


def _context(command: Any) -> Any:
    return command.make_context(command.name, [], resilient_parsing=True)


def _default(option: Any) -> object:
    default = None if callable(option.default) else option.default
    return "" if default in (None, False, (), []) else default


def _plain(help_text: str | None) -> str:
    """Without the markup of the terminal."""
    return re.sub(r"\[/?(?:bold|dim|italic|red|green|yellow|cyan)?\]", "", help_text or "").strip()


def public() -> str:
    """The names that ``import fedrane`` gives, without those of the protocol: functions first."""
    names = [name for name in fedrane.__all__ if not name.startswith("_") and name not in PROTOCOL]
    return directives("fedrane", sorted(names, key=lambda name: isinstance(getattr(fedrane, name), type)))


PROTOCOL = ("Algorithm", "Work", "Done", "Outcome", "Task", "State", "Model", "Batch", "Client", "Roster", "Context")


def directives(module: str, names: Iterable[str]) -> str:
    """What mkdocstrings replaces by the documentation of these names."""
    return "\n\n".join(f"::: {module}.{name}" for name in names)


def operations() -> str:
    modules = sorted(path.stem for path in (ROOT / "src" / "fedrane" / "ops").glob("[!_]*.py"))
    return directives("fedrane.ops", modules)


def laws() -> str:
    """The laws of all methods, in the order in which ``fedrane check`` applies them."""
    rows = ((conformance.title(law), law.__doc__ or "") for law in conformance.LAWS)
    return table(("law", "what it checks"), rows)


def tutorials() -> str:
    found = list(lessons())
    return "\n".join(f"- [{each.title}]({Path(each.page).name}): {each.first_sentence}" for each in found)


def decisions() -> str:
    pages = sorted((DOCS / "decisions").glob("0*.md"))
    return "\n".join(f"- [{title(path.read_text(encoding='utf-8'))}]({path.name})" for path in pages)


def with_fields(text: str, stem: str) -> str:
    """A method's page, with all that is known of each field in the table that its file has of them."""
    found = FIELDS.search(text)
    if not found:
        return text
    titles, _, *lines = [cells(line) for line in found[0].splitlines()]
    written = {name.strip("`"): (symbol, " ".join(note)) for name, symbol, _, *note in lines}
    rows = []
    for key in reference.built_in()[stem].fields:
        symbol, note = written[key.name]
        rows.append((code(key.name), symbol, code(key.word), described(key), note))
    return text.replace(found[0], table(("field", "symbol", "default", "meaning", titles[-1]), rows))


FIELDS = re.compile(r"^\| field \|.*\n(?:\|.*\n)+", re.MULTILINE)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def described(key: reference.Key) -> str:
    """What a key means, and what it may be."""
    if not key.choices:
        return key.meaning
    return f"{key.meaning} One of {', '.join(map(code, key.choices))}{', or your own' if key.open else ''}."


def keys() -> str:
    """Every key of an experiment, by table of its TOML file."""
    groups: dict[str, list[reference.Key]] = {}
    for key in reference.keys():
        groups.setdefault(key.name.rpartition(".")[0], []).append(key)
    return "\n".join(_group(name, group) for name, group in groups.items())


def _group(name: str, group: list[reference.Key]) -> str:
    rows = (
        (code(key.name), key.type, code(key.word), described(key), ", ".join(map(code, key.aliases))) for key in group
    )
    heading = f"## {name}\n\n" if name else "## The experiment\n\n"
    return heading + table(("key", "type", "default", "meaning", "also"), rows)


def method_sections(stem: str) -> str:
    """What a method's page gets: the laws of its own, and who has had it wrong."""
    parts = ["\n## Laws\n\nIt keeps the [laws of all methods](../reference/laws.md), and these of its own:\n\n"]
    parts += [f"- {words}\n" for words in own_laws(stem)]
    wrong = {(defect.where, defect.what) for defect in defects() if file_of(stem) in defect.methods}
    if wrong:
        parts.append("\n## Defects elsewhere\n\nFound in other libraries; a law here fails for each of them.\n\n")
        parts.append(table(("where", "defect"), sorted(wrong)))
    return "".join(parts)


def file_of(stem: str) -> str:
    """The name of the file that a method is in; similar ones share it."""
    return methods.METHODS[stem].cls.__module__.rpartition(".")[2]


TEST = re.compile(r"`[\w/]+\.py::test_(?P<name>\w+)(?:\[(?P<method>\w+)-(?P<law>\w+)\])?`")


def in_words(test: re.Match[str]) -> str:
    """What a test holds, from its name; of a law of all methods, with the method it was tried on."""
    law = f"{test['method']}: {test['law']}" if test["law"] else test["name"]
    return law.replace("_", " ")


def own_laws(stem: str) -> Iterator[str]:
    """The tests of one method in words: each name, and its docstring."""
    path = ROOT / "tests" / "methods" / f"test_{file_of(stem)}.py"
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            words = node.name.removeprefix("test_").replace("_", " ")
            note = " ".join((ast.get_docstring(node) or "").split())
            yield f"{words}: {note}" if note else words


class Defect(NamedTuple):
    """A row of ``defects.md``."""

    where: str
    what: str
    methods: tuple[str, ...]
    """Those whose laws notice it."""


def defects() -> Iterator[Defect]:
    for line in (DOCS / "defects.md").read_text(encoding="utf-8").splitlines():
        if "::" in line:
            where, what, law, _ = cells(line)
            yield Defect(where, what, tuple(re.findall(r"methods/test_(\w+)\.py::", law)))


GENERATORS: dict[str, Callable[[], str]] = {
    "keys": keys,
    "commands": commands,
    "public": public,
    "protocol": lambda: directives("fedrane", PROTOCOL),
    "operations": operations,
    "conformance": lambda: directives("fedrane.testing.conformance", ("check", "verdicts", "Verdict", "trained")),
    "laws": laws,
    "tutorials": tutorials,
    "decisions": decisions,
}


# ---- tutorials


class Lesson(NamedTuple):
    """A tutorial: a notebook in ``examples/``, with what its cells printed."""

    title: str
    page: str
    text: str

    @property
    def first_sentence(self) -> str:
        _, _, text = self.text.partition("\n\n")
        return re.split(r"(?<=\.)\s", text, maxsplit=1)[0]


def lessons() -> Iterator[Lesson]:
    """The notebooks in ``examples/`` whose name begins with a number, in this order."""
    for path in sorted(EXAMPLES.glob("[0-9]*.ipynb")):
        name = f"tutorials/{path.stem}.md"
        text = linked(prose(json.loads(path.read_text(encoding="utf-8"))), path, name)
        yield Lesson(title(text), name, text)


def prose(notebook: dict[str, Any]) -> str:
    """Markdown of a notebook."""
    parts = []
    for cell in notebook["cells"]:
        parts.append(cell["source"] if cell["cell_type"] == "markdown" else f"```python\n{cell['source']}\n```")
        printed = "".join(output["text"] for output in cell.get("outputs", [])).rstrip()
        parts += [f"```text\n{printed}\n```"] * bool(printed)
    return "\n\n".join(parts) + "\n"


def title(text: str) -> str:
    found = re.search(r"^# (.+)$", text, re.MULTILINE)
    if not found:
        raise SystemExit("a page has no title: its first line should be '# …'")
    return found[1]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _copy(source: Path, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, path)


# ---- the check of the HTML


class Page(HTMLParser):
    """The anchors of a page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.text = text
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("prev", "next", "canonical"):
            self.loads.append(given.get("href", ""))
        elif tag in ("script", "img", "iframe", "source", "video", "audio") and "src" in given:
            self.loads.append(given["src"])


def check(site: Path) -> Iterator[str]:
    """Links that lead nowhere, addresses that are none, what a page would load from another host, and raw markup."""
    pages = {path: Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    for path, found in pages.items():
        if role := re.search(r":(?:attr|class|data|func|meth|mod):", found.text):
            yield f"{path.relative_to(site)} has {role[0]}: write the name alone"
        if path.name == "404.html":  # its links are from the root of a host
            continue
        here = path.relative_to(site)
        for link in [*found.links, *found.loads]:
            parts = urlsplit(link)
            if parts.scheme in ("http", "https"):
                if link in found.loads:
                    yield f"{here} loads {link} from another host"
                elif not re.fullmatch(r"[\w-]+(\.[\w-]+)+(:\d+)?", parts.netloc):
                    yield f"{here}: {link} is no address"
            elif not parts.scheme:
                there = (path.parent / unquote(parts.path)).resolve() if parts.path else path
                there = there / "index.html" if there.is_dir() else there
                if not there.exists():
                    yield f"{here}: {link} is not there"
                elif there in pages and parts.fragment and unquote(parts.fragment) not in pages[there].anchors:
                    yield f"{here}: {link} has no such anchor"
    for path in sorted(site.rglob("*.css")):
        for address in re.findall(r"(?:url\(|@import\s+)[\"']?(https?:[^\"')]+)", path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(site)} loads {address} from another host"


if __name__ == "__main__":
    sys.exit(main())

"""What the shell proposes for a word that is not complete. It needs no torch, so that the TAB key works at once."""

from __future__ import annotations

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import typer
from typer import _completion_shared as shells

from fedrane.config import reference
from fedrane.reproduce.names import ALL, known

Proposals = Iterable[tuple[str, str]]
"""Each with its description, which zsh and fish show."""
SETTINGS, FIELD, CONFIG = "settings", "method.", "config.toml"
_HARMLESS = re.compile(r"[\w@%+=:,./~ -]+")
"""Names of files that mean nothing else to a shell: zsh evaluates what is proposed, and bash puts it into the line as
it is, so a folder called ``$(…)`` would be a command."""
REGISTER = "compdef %(complete_func)s %(prog_name)s"
PROPOSE_OR_REGISTER = f"""
if [ "$funcstack[1]" = "_%(prog_name)s" ]; then
  %(complete_func)s "$@"
else
  {REGISTER}
fi"""


def answer_the_first_tab() -> None:
    """Zsh runs the installed script at the first TAB of a session, and typer's then registers and proposes nothing."""
    scripts = shells._completion_scripts
    scripts["zsh"] = scripts["zsh"].replace(f"\n{REGISTER}", PROPOSE_OR_REGISTER)


def words(ctx: typer.Context, incomplete: str) -> Iterator[tuple[str, str]]:
    """A ``key=`` of an experiment, its values, or a TOML file.

    bash splits words at ``=``: what is before it arrives as words of their own, and only the rest is completed.
    """
    before = _joined(ctx.params.get(SETTINGS) or ())
    given = dict(word.split("=", 1) for word in before if "=" in word)
    all = list(_keys(ctx, given))
    keys = {name: each for each in all for name in (each.name, *each.aliases)}
    last = before[-1] if before else ""
    split = last.endswith("=") or last in keys
    key, equals, value = (last.rstrip("="), "=", incomplete) if split else incomplete.partition("=")
    if equals:
        prefix = "" if split else f"{key}="
        if key in keys:
            yield from _starting(value, _values(keys[key]), prefix)
        return
    fitting = [each for each in all if each.name.startswith(key)]
    if len(fitting) == 1:  # with two proposals the shell stops after the "=", with one it would add a space
        yield f"{fitting[0].name}=", fitting[0].plain
        yield from ((f"{fitting[0].name}={value}", help) for value, help in _values(fitting[0]))
    else:
        yield from ((f"{each.name}=", each.plain) for each in fitting)
    yield from ((file, "a file of settings") for file in _files(incomplete, "*.toml"))


def method(incomplete: str) -> Proposals:
    return _starting(incomplete, _methods())


def methods(incomplete: str) -> Proposals:
    """Several names, comma-separated."""
    return _last(incomplete, _methods())


def dataset(incomplete: str) -> Proposals:
    return _starting(incomplete, _values(_key("dataset")))


def datasets(incomplete: str) -> Proposals:
    return _last(incomplete, _values(_key("dataset")))


def key(incomplete: str) -> Proposals:
    return _starting(incomplete, ((each.name, each.plain) for each in reference.keys()))


def target(incomplete: str) -> Proposals:
    return _starting(incomplete, ((name, "") for name in (*known(), ALL)))


def run_folder(incomplete: str) -> Proposals:
    """Folders with a run; without a start, those in runs/."""
    depths = (f"{depth}/{CONFIG}" for depth in ("*", "*/*", "*/*/*"))
    return ((file.removesuffix(f"/{CONFIG}"), "") for depth in depths for file in _files(incomplete or "runs/", depth))


def _files(start: str, rest: str) -> list[str]:
    found = glob.glob(glob.escape(start) + rest)  # noqa: PTH207 - a Path would not keep the start as it is written
    return sorted(filter(_HARMLESS.fullmatch, found))


def _joined(given: Sequence[str]) -> list[str]:
    """The words as they were written, where bash has split them."""
    return re.sub(r" ?= ?", "=", " ".join(given)).split(" ") if given else []


def _starting(start: str, all: Proposals, prefix: str = "") -> Proposals:
    return ((prefix + value, help) for value, help in all if value.startswith(start))


def _last(incomplete: str, all: Proposals) -> Proposals:
    done, comma, last = incomplete.rpartition(",")
    taken = done.split(",")
    return _starting(last, ((value, help) for value, help in all if value not in taken), done + comma)


def _methods() -> Proposals:
    return ((name, each.summary) for name, each in reference.built_in().items())


def _key(name: str) -> reference.Key:
    return next(each for each in reference.keys() if each.name == name)


def _values(each: reference.Key) -> Proposals:
    if each.name == "method":
        return _methods()
    choices = ("true", "false") if each.type == "bool" else each.choices or (each.word,)
    return ((value, "the default" if value == each.word else "") for value in choices if value)


def _keys(ctx: typer.Context, given: dict[str, Any]) -> Iterator[reference.Key]:
    """The keys of an experiment, the fields of its method, and in a comparison those of each method."""
    yield from reference.keys()
    entries = reference.built_in()
    named = [(FIELD, given.get("method", ""))]
    for label in str(ctx.params.get("names") or "").split(","):
        short, _, name = label.rpartition("=")
        named.append((f"{short or name}.", name))
    for prefix, name in named:
        for each in entries[name].fields if name in entries else ():
            yield replace(each, name=prefix + each.name)

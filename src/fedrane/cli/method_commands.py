"""``fedrane methods``, ``keys`` and ``check``: which methods and settings there are, and whether a method keeps the
laws."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedrane.cli import completion
from fedrane.cli.arguments import Json
from fedrane.cli.console import console_for, plain_table, print_message, write_line
from fedrane.config import reference
from fedrane.errors import ConfigError


def methods_command(
    name: Annotated[
        str | None,
        typer.Argument(help="A method, to see its fields.", show_default=False, autocompletion=completion.method),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods and which models each trains; or one method's paper and fields.

    A method of your own is named as in method=path.py:Class.
    """
    if name:
        _show_method(reference.find(name), as_json)
        return
    entries = [reference.find(each) for each in reference.names()]
    if as_json:
        for entry in entries:
            write_line(_as_json(entry))
        return
    table = plain_table("method", "published", "models", "what it is")
    for entry in entries:
        table.add_row(entry.name, f"{entry.venue} {entry.year or ''}".strip(), entry.category, escape(entry.summary))
    console = console_for(False)
    console.print(table)
    print_message(console, "fields of one: fedrane methods NAME")


def _show_method(entry: reference.Method, as_json: bool) -> None:
    if as_json:
        write_line(_as_json(entry))
        return
    console = console_for(False)
    models = {"both": "a global model and personal ones", "global": "a global model", "personal": "personal models"}
    print_message(console, f"{entry.name}: {entry.summary}")
    if entry.paper:
        print_message(console, f"paper: {entry.paper}")
    print_message(console, f"it has {models[entry.category]}")
    if entry.fields:
        _show(console, entry.fields, completion.FIELD)
    else:
        print_message(console, "it has no fields")


def _as_json(entry: reference.Method) -> str:
    return json.dumps(asdict(entry)) + "\n"


def keys_command(
    word: Annotated[
        str | None,
        typer.Argument(
            help="Only keys with this word in their name, meaning or values.",
            show_default=False,
            autocompletion=completion.key,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the keys of an experiment: type, default, values and meaning of each.

    A method's own fields are listed by 'fedrane methods NAME'.
    """
    keys = [key for key in reference.keys() if word is None or _mentions(key, word.lower())]
    if not keys:
        raise ConfigError(f"no key has to do with {word!r}", remedy="fedrane keys lists all")
    if as_json:
        for key in keys:
            write_line(json.dumps(asdict(key)) + "\n")
        return
    _show(console_for(False), keys)


def _mentions(key: reference.Key, word: str) -> bool:
    return any(word in text.lower() for text in (key.name, key.plain, *key.choices, *key.aliases))


def _show(console: Console, keys: Iterable[reference.Key], prefix: str = "") -> None:
    table = plain_table("key", "type", "default", "meaning and values")
    for key in keys:
        values = [*key.choices, *(["…"] if key.open else [])]
        lines = [key.plain, *([f"values: {', '.join(values)}"] if values else [])]
        lines += [f"also: {', '.join(key.aliases)}"] if key.aliases else []
        table.add_row(f"[bold]{prefix}{key.name}[/]", key.type, escape(key.word), escape("\n".join(lines)))
    console.print(table)


def check_command(
    method: Annotated[str, typer.Argument(help="A method's name, or path.py:Class.", autocompletion=completion.method)],
) -> None:
    """Test a method, yours or one of ours, against the laws that every method must keep."""
    from fedrane import methods
    from fedrane.testing import conformance

    console = console_for(False)
    entry = methods.find(method)
    verdicts = []
    for verdict in conformance.verdicts(entry.cls(**entry.preset)):
        verdicts.append(verdict)
        title = conformance.title(verdict.law)
        text = f"[green]holds[/]  {title}"
        if verdict.problem:
            text = f"[red]fails[/]  {title}: {escape(verdict.problem)}"
        if verdict.again:
            text = f"[yellow]not run[/]  {title}: the same error"
        console.print(text, highlight=False, soft_wrap=True)
    held, blocked = sum(not v.problem for v in verdicts), sum(v.again for v in verdicts)
    console.print(f"{held} of {len(verdicts)} laws hold" + (f", {blocked} could not be run" if blocked else ""))
    if held < len(verdicts):
        raise typer.Exit(1)

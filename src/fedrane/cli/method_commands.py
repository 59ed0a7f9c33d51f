"""``fedrane methods`` and ``check``: which methods there are, and whether one keeps the laws."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.markup import escape

from fedrane import methods
from fedrane.cli.arguments import Json
from fedrane.cli.console import console_for, plain_table, print_message, write_line
from fedrane.testing import conformance


def methods_command(
    name: Annotated[str | None, typer.Argument(help="A method, to see its fields.", show_default=False)] = None,
    as_json: Json = False,
) -> None:
    """List the methods and which models each trains; or one method's fields and defaults."""
    chosen = {name: methods.find(name)} if name else {key: methods.find(key) for key in methods.known()}
    if as_json:
        for key, entry in chosen.items():
            line: dict[str, Any] = {"name": key, "summary": entry.summary, "venue": entry.venue, "year": entry.year}
            line |= {"category": entry.category, "models": entry.cls.models, "fields": entry.fields}
            write_line(json.dumps(line) + "\n")
        return
    table = plain_table("method", "published", "models", "what it is")
    for key, entry in chosen.items():
        table.add_row(key, f"{entry.venue} {entry.year or ''}".strip(), entry.category, entry.summary)
    console = console_for(False)
    console.print(table)
    if not name:
        print_message(console, "fields of one: fedrane methods NAME")
        return
    values = plain_table("field", "default")
    for field, value in chosen[name].fields.items():
        values.add_row(f"method.{field}", str(value))
    console.print(values if chosen[name].fields else "it has no fields")


def check_command(method: Annotated[str, typer.Argument(help="A method's name, or path.py:Class.")]) -> None:
    """Test a method, yours or one of ours, against the laws that every method must keep."""
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

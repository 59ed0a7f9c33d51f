"""All commands, in the order in which ``fedrane --help`` lists them."""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from fedrane._version import __version__
from fedrane.cli import data_commands, method_commands, report_commands, reproduce_commands, run_commands
from fedrane.cli.flower_commands import flower_app
from fedrane.config.settings import ALIASES, FIELD, dotted
from fedrane.experiment import Experiment

app = typer.Typer(
    help="Federated learning on non-IID data: train, compare, report, reproduce.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(__version__)  # noqa: T201
        raise typer.Exit


def _keys() -> str:
    """All keys of an experiment, and their aliases."""
    keys = ["method", f"{FIELD}FIELD", *(key for key in dotted(Experiment().to_dict()) if not key.startswith(FIELD))]
    aliases = (f"{alias} → {key}" for alias, key in ALIASES.items())
    return f"[bold]Keys:[/] {', '.join(keys)}.\n\n\n\n[bold]Aliases:[/] {', '.join(aliases)}."


TRAINING, DATA, PAPER = "Training", "Data and methods", "The paper, and federations"
for name, command, panel in (
    ("run", run_commands.run_command, TRAINING),
    ("resume", run_commands.resume_command, TRAINING),
    ("predict", run_commands.predict_command, TRAINING),
    ("compare", report_commands.compare_command, TRAINING),
    ("report", report_commands.report_command, TRAINING),
    ("methods", method_commands.methods_command, DATA),
    ("check", method_commands.check_command, DATA),
    ("datasets", data_commands.datasets_command, DATA),
    ("partition", data_commands.partition_command, DATA),
    ("reproduce", reproduce_commands.reproduce_command, PAPER),
    ("tune", reproduce_commands.tune_command, PAPER),
):
    app.command(name, rich_help_panel=panel, epilog=_keys() if name == "run" else None)(command)
app.add_typer(data_commands.data_app, name="data", rich_help_panel=DATA)
app.add_typer(flower_app, name="flower", rich_help_panel=PAPER)

for group in (app, data_commands.data_app, flower_app):
    for entry in group.registered_commands:
        # One line for each paragraph of a docstring: the terminal wraps it to its own width.
        text = inspect.getdoc(entry.callback) or ""
        entry.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))

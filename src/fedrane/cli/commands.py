"""All commands, in the order in which ``fedrane --help`` lists them."""

from __future__ import annotations

import inspect
from typing import Annotated

import click
import typer
from typer.core import TyperCommand, TyperGroup

from fedrane._version import __version__
from fedrane.cli import completion, data_commands, method_commands, report_commands, reproduce_commands, run_commands
from fedrane.cli.flower_commands import flower_app
from fedrane.config import hints, reference
from fedrane.errors import ConfigError


class Command(TyperCommand):
    """A command that knows what to write instead of ``--rounds 5``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        given, settings = list(args), any(parameter.name == completion.SETTINGS for parameter in self.params)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if not settings or not (remedy := hints.for_option(error.option_name, given)):
                raise
            raise ConfigError(f"{ctx.command_path} has no option {error.option_name}", remedy=remedy) from error


class Group(TyperGroup):
    """The commands; it knows when ``run`` was left out."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        word = args[0]
        written = f"method={word}" if word in reference.built_in() else word
        if not ctx.resilient_parsing and word not in self.commands and ("=" in written or word.endswith(".toml")):
            raise ConfigError(f"{word} is not a command", remedy=f"Write {ctx.command_path} run {written}")
        return super().resolve_command(ctx, args)


completion.answer_the_first_tab()
app = typer.Typer(
    cls=Group,
    help="Federated learning on non-IID data: train, compare, report, reproduce.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False) -> None:
    if version:
        print(__version__)  # noqa: T201
        raise typer.Exit


def _keys() -> str:
    """All keys of an experiment, and the names of other libraries that are accepted for them."""
    names = ["method", f"{completion.FIELD}FIELD", *(key.name for key in reference.keys() if key.name != "method")]
    aliases = sorted(f"{alias} ({key.name})" for key in reference.keys() for alias in key.aliases)
    return (
        f"[bold]Keys:[/] {', '.join(names)}.\n\n\n\n[bold]Accepted too:[/] {', '.join(aliases)}."
        "\n\n\n\n'fedrane keys' explains them."
    )


TRAINING, DATA, PAPER = "Training", "Data and methods", "The paper, and federations"
for name, command, panel in (
    ("run", run_commands.run_command, TRAINING),
    ("resume", run_commands.resume_command, TRAINING),
    ("verify", run_commands.verify_command, TRAINING),
    ("predict", run_commands.predict_command, TRAINING),
    ("compare", report_commands.compare_command, TRAINING),
    ("report", report_commands.report_command, TRAINING),
    ("methods", method_commands.methods_command, DATA),
    ("keys", method_commands.keys_command, DATA),
    ("check", method_commands.check_command, DATA),
    ("datasets", data_commands.datasets_command, DATA),
    ("partition", data_commands.partition_command, DATA),
    ("reproduce", reproduce_commands.reproduce_command, PAPER),
    ("tune", reproduce_commands.tune_command, PAPER),
):
    epilog = _keys() if name == "run" else None
    app.command(name, cls=Command, rich_help_panel=panel, epilog=epilog)(command)
app.add_typer(data_commands.data_app, name="data", rich_help_panel=DATA)
app.add_typer(flower_app, name="flower", rich_help_panel=PAPER)

for group in (app, data_commands.data_app, flower_app):
    for entry in group.registered_commands:
        # One line for each paragraph of a docstring: the terminal wraps it to its own width.
        text = inspect.getdoc(entry.callback) or ""
        entry.help = "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))

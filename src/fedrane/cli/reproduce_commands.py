"""The commands ``fedrane reproduce`` and ``fedrane tune``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from fedrane.cli import completion
from fedrane.cli.arguments import DataRoot, with_data_root
from fedrane.cli.console import INTERRUPTED, Stop, console_for, plain_table, print_message, show, write_line
from fedrane.errors import ConfigError, nearest
from fedrane.reproduce.names import ALL, known
from fedrane.system.files import require_ours, take, taking, write_atomically

if TYPE_CHECKING:
    from fedrane.reproduce import tune
    from fedrane.reproduce.sweep import Sweep
    from fedrane.reproduce.targets import Cell, Selection, Target
    from fedrane.training.callbacks import Callback

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[key=value …]",
        help="Settings of the experiments.",
        show_default=False,
        autocompletion=completion.words,
    ),
]
Dataset = Annotated[
    str,
    typer.Option(
        "--dataset", help="Names, comma-separated (default: the target's).", autocompletion=completion.datasets
    ),
]
Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        help="Names, comma-separated, yours as path.py:Class; 'all' is the target's list.",
        autocompletion=completion.methods,
    ),
]
Rounds = Annotated[int | None, typer.Option("--rounds", help="Rounds (the paper's: 100).", show_default=False)]
Results = Annotated[Path, typer.Option("--results", help="The folder of results, one line for each cell.")]
Out = Annotated[Path, typer.Option("--out", help="The folder of tables, figures and run folders.")]
Retry = Annotated[bool, typer.Option("--retry", help="Run failed cells again, from the start.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON line for each cell on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the tables only.")]
RESULTS, OUT = Path("experiments/results"), Path("runs/reproduce")
OWN = ("reproduction", "*/*/config.toml")
"""The purpose of the folder ``--out``, and the pattern of the files in it that only we write."""
MEASURING = 120.0
"""Seconds that a dry run spends on measuring speeds."""


def reproduce_command(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help=f"{', '.join([*known(), ALL])}, or a TOML file.",
            autocompletion=completion.target,
        ),
    ],
    settings: Words = None,
    dataset: Dataset = "",
    alpha: Annotated[str, typer.Option("--alpha", help="Dirichlet parameters, comma-separated.")] = "",
    names: Methods = "",
    seeds: Annotated[str, typer.Option("--seeds", help="A count (5), a range (2-4), or a list (1,7).")] = "",
    rounds: Rounds = None,
    data_root: DataRoot = "",
    tuned: Annotated[Path | None, typer.Option("--tuned", help="The file that 'fedrane tune' wrote.")] = None,
    results: Results = RESULTS,
    out: Out = OUT,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and how long it takes.")] = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="In a dry run, measure the speeds that are not recorded (takes minutes).")
    ] = False,
    measuring: Annotated[
        float | None,
        typer.Option(help=f"The same, for this many seconds (default: {MEASURING:g}).", show_default=False),
    ] = None,
    show_only: Annotated[
        bool, typer.Option("--show", help="Run nothing; make tables and figures of the results so far.")
    ] = False,
    last: Annotated[bool, typer.Option("--last", help="Print the last round, not the best one.")] = False,
    retry: Retry = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reproduce a table or figure of the paper, and show our results beside the paper's.

    Only the cells that are missing are run. If it was stopped or killed, the same command goes on. Settings such as
    epochs=1 are for all methods, fedprox.strength=1 for one.
    """
    from fedrane.reproduce import tune
    from fedrane.reproduce.results import FAILED, ResultStore
    from fedrane.reproduce.sweep import UNKNOWN, Sweep
    from fedrane.reproduce.targets import (
        Selection,
        absent,
        best_settings,
        cells,
        conditions_of,
        parse_seeds,
        targets,
    )

    console = console_for(as_json)
    if (measure or measuring is not None) and not dry_run:
        raise ConfigError("--measure without --dry-run", "what is run is measured anyway", "Leave it out")
    if measuring is None:
        measuring = MEASURING if measure else 0.0
    require_ours(out, *OWN)
    data_root = data_root or _root_in(settings)
    selection = Selection(
        _names(dataset, "--dataset"),
        _numbers(alpha, "--alpha"),
        _names(names, "--methods"),
        parse_seeds(seeds) if seeds else (),
        _all_words(settings, rounds, data_root),
        tune.read(tuned) if tuned else (),
    )
    wanted = targets(target)
    for each in wanted:
        _check_target(each)
    here = {condition.dataset for each in wanted for condition in conditions_of(each, selection)}
    missing = absent(sorted(here), data_root)
    for name, how in missing.items():
        print_message(console, f"{name} is not on this machine: its cells stay empty. Get it with {how}")
    store = ResultStore(results)
    sweeps = [(each, Sweep(cells(each, selection), store, out / "cells", missing, retry)) for each in wanted]
    if tuned:
        titles = {
            cell.row.title: None
            for _, sweep in sweeps
            for cell in sweep.cells
            if best_settings(selection.tuned, cell.row.name, cell.condition)
        }
        print_message(console, f"settings of {tuned}: {', '.join(titles) or 'none fits'}")
    if not show_only and (measuring or not dry_run):
        take(out, *OWN)
    if dry_run:
        _dry_run(console, sweeps, out, measuring, as_json)
        return
    failed = 0
    with Stop(console).listening() as stop:
        for each, sweep in sweeps:
            sweep.records = store.read()  # with what the targets before it have done
            if not show_only and not sweep.go(_watch(console, quiet or as_json), stop, _logger(console, sweep, quiet)):
                print_message(console, f"stopped; the same command goes on ({results})")
                raise typer.Exit(INTERRUPTED)
            if as_json:
                for cell in sweep.cells:
                    write_line(json.dumps(_line(each, sweep, cell)) + "\n")
            if show_only and not any(cell.key in sweep.records for cell in sweep.cells):
                print_message(console, f"{each.name}: nothing is there yet, so nothing is written")
                continue
            _show(console, each, selection, sweep, out, last, as_json)
            failed += sum(sweep.status(cell) in (FAILED, UNKNOWN) for cell in sweep.cells)
    if failed:
        raise typer.Exit(1)


def tune_command(
    names: Annotated[
        str,
        typer.Argument(
            metavar="METHOD", help="A method, or several, comma-separated.", autocompletion=completion.methods
        ),
    ],
    settings: Words = None,
    dataset: Annotated[
        str, typer.Option("--dataset", help="Names, comma-separated.", autocompletion=completion.datasets)
    ] = "digits",
    alpha: Annotated[str, typer.Option("--alpha", help="Dirichlet parameters, comma-separated.")] = "0.5",
    seeds: Annotated[str, typer.Option("--seeds", help="A count (2), a range (2-4), or a list (1,7).")] = "1",
    rounds: Rounds = None,
    grid: Annotated[
        list[str] | None, typer.Option("--grid", help="key=v1,v2 instead of the method's own grid; may be repeated.")
    ] = None,
    validation: Annotated[float, typer.Option("--validation", help="The share of examples to validate on.")] = 0.2,
    measure: Annotated[str, typer.Option("--measure", help="global, personal, or both (their mean).")] = "both",
    data_root: DataRoot = "",
    out: Annotated[Path, typer.Option("--out", help="The folder of trials and their results.")] = Path("runs/tuned"),
    tuned: Annotated[
        Path | None,
        typer.Option(
            "--tuned", help="The file to write, or to add to (default: tuned.toml in --out).", show_default=False
        ),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option("--results", help="The folder of results (default: results in --out).", show_default=False),
    ] = None,
    retry: Retry = False,
    quiet: Quiet = False,
) -> None:
    """Search a method's best settings on validation examples, for --tuned of run, compare and reproduce.

    Test examples are never used. The grid is the method's own, and learning rates; a setting such as lr=0.1 replaces
    the values of its key. Finished trials are kept: if it was stopped, the same command goes on.
    """
    from fedrane import methods
    from fedrane.reproduce import tune
    from fedrane.reproduce.results import ResultStore
    from fedrane.reproduce.sweep import ELSEWHERE, Sweep, counts
    from fedrane.reproduce.targets import Condition, Selection, absent, parse_seeds
    from fedrane.training.wording import count

    console = console_for(False)
    if measure not in tune.MEASURES:
        raise ConfigError(f"--measure {measure}", remedy=nearest(measure, tune.MEASURES))
    require_ours(out, *OWN)
    data_root = data_root or _root_in(settings)
    selection = Selection(seeds=parse_seeds(seeds), words=_all_words(settings, rounds, data_root))
    datasets, tuned_methods = _names(dataset, "--dataset", needed=True), _names(names, "METHOD", needed=True)
    for name, how in absent(datasets, data_root).items():
        raise ConfigError(f"{name} is not on this machine", remedy=f"Get it with {how}")
    conditions = [Condition(name, number) for name in datasets for number in _numbers(alpha, "--alpha", needed=True)]
    for method in tuned_methods:
        if measure != tune.BOTH and measure not in methods.find(method).cls.models:
            raise ConfigError(f"{method} has no {measure} model", remedy=f"Use --measure {tune.BOTH}")
    tuned, results = tuned or out / "tuned.toml", results or out / "results"
    store = ResultStore(results / "tune")
    written, failed = False, False
    chosen = tune.for_each(tuned_methods, selection)
    planned = [  # all of them first: a mistake is reported before the first trial
        (
            method,
            condition,
            tune.trials(method, condition, tune.grid_of(method, grid or (), each.words), each, validation),
        )
        for method, each in chosen.items()
        for condition in conditions
    ]
    with taking(out, *OWN), tune.open_for_more(tuned):
        pass  # an error here comes before the trials, not after
    with Stop(console).listening() as stop:
        for method, condition, trials in planned:
            every = [cell for trial in trials for cell in trial.cells]
            sweep = Sweep(every, store, out / "tune", retry=retry, source=tune.TrialData(trials, validation))
            names_of = {cell.key: f"{cell.name}, {trial}" for trial in trials for cell in trial.cells}
            if not quiet:
                left = len(every) - len(sweep.waiting())
                done = f"; {left} are done" if left else ""
                what = f"{method} on {condition.dataset}, α {condition.alpha:g}: {tune.describe(trials)}{done}"
                print_message(console, what)
            if not sweep.go(_watch(console, quiet, names_of), stop, _logger(console, sweep, quiet, names_of)):
                print_message(console, f"stopped; the same command goes on ({out})")
                raise typer.Exit(INTERRUPTED)
            if others := counts(sweep).get(ELSEWHERE):
                print_message(
                    console, f"another process is running {count(others, 'trial')} of {method}, and will choose"
                )
                continue
            try:
                best = tune.choose(sweep, trials, condition, measure)
            except ConfigError as error:  # the other methods can still be tuned
                print_message(console, str(error))
                failed = True
                continue
            _show_trials(console, sweep, trials, best)
            tune.write(tuned, best)
            written = True
    if written:
        print_message(console, f"written: {tuned}; use it with --tuned {tuned} (fedrane run, compare and reproduce)")
    if failed:
        raise typer.Exit(1)


# ---- arguments


def _names(text: str, option: str, needed: bool = False) -> tuple[str, ...]:
    """Each name once. An empty text gives none, unless one is needed."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names and (text or needed):
        raise ConfigError(f"{option} {text!r}", "it names nothing", "Write names, comma-separated")
    return names


def _numbers(text: str, option: str, needed: bool = False) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in _names(text, option, needed))
    except ValueError as error:
        raise ConfigError(f"{option} {text}", "it is numbers, comma-separated", "Use 0.1,0.5") from error


def _all_words(words: Sequence[str] | None, rounds: int | None, data_root: str) -> tuple[str, ...]:
    made = list(words or ())
    made += [f"rounds={rounds}"] if rounds is not None else []
    return tuple(with_data_root(made, data_root))


def _root_in(words: Sequence[str] | None) -> str:
    """The folder of datasets, if it is among the settings."""
    return next((word.removeprefix("data_root=") for word in words or () if word.startswith("data_root=")), "")


def _check_target(target: Target) -> None:
    """A mistake in a user's target is reported before its cells are run."""
    from fedrane.reproduce import records, tables

    measures = (*target.measures, *target.drawn, *target.panels)
    for key, asked, there in (("measure", measures, tables.MEASURES), ("keeps", target.keeps, records.KEPT)):
        for name in asked:
            if name not in there:
                raise ConfigError(f"{target.name}.toml: {key} {name!r} is not known", remedy=nearest(name, there))


# ---- progress


def _watch(console: Console, quiet: bool, names: Mapping[str, str] = {}) -> Callable[[Cell], Sequence[Callback]]:
    """A progress bar for the cell in a terminal; elsewhere one line at its end."""
    from fedrane.cli.progress import printer

    return lambda cell: [
        printer(console, False, quiet or not console.is_terminal, f"{names.get(cell.key, cell.name)} ")
    ]


def _logger(
    console: Console, sweep: Sweep, quiet: bool, names: Mapping[str, str] = {}
) -> Callable[[Cell, int, int], None]:
    from fedrane.algorithm import GLOBAL, PERSONAL
    from fedrane.reproduce.results import FAILED
    from fedrane.training.wording import achieved

    def log(cell: Cell, number: int, total: int) -> None:
        if quiet:
            return
        record, name = sweep.records[cell.key], names.get(cell.key, cell.name)
        if record["status"] == FAILED:
            print_message(console, f"[{number}/{total}] {name}: {record['word']}: {record['reason']}")
            return
        bests = ((w, record[w]["best"]) for w in (GLOBAL, PERSONAL) if w in record)
        figures = (f"{w} {achieved({f'{w}/{name}': value for name, value in best.items()}, w)}" for w, best in bests)
        print_message(console, f"[{number}/{total}] {name}: {', '.join(figures)}, {record['seconds']:.1f} s")

    return log


# ---- results


def _show(
    console: Console, target: Target, selection: Selection, sweep: Sweep, out: Path, last: bool, as_json: bool
) -> None:
    from fedrane.reproduce import tables
    from fedrane.reproduce.draw import figures
    from fedrane.reproduce.sweep import ELSEWHERE, counts
    from fedrane.training.wording import count

    take(out, *OWN)
    made = tables.result_tables(target, selection, sweep)
    for suffix, text in (("md", tables.markdown(made)), ("csv", tables.as_csv(made)), ("tex", tables.latex(made))):
        write_atomically(out / f"{target.name}.{suffix}", text)
    drawn = figures(target, made, sweep, out)
    if not as_json:
        which = tables.LAST if last else tables.BEST
        for table in made:
            if (table.which == which or not table.how.percent) and table.has_anything():
                print_message(console, f"\n{table.title}")
                for grid in tables.terminal(table):
                    show(console, grid)
                print_message(console, table.caption)
    for note in made[0].notes:
        print_message(console, note)
    if elsewhere := counts(sweep).get(ELSEWHERE):
        print_message(console, f"another process is running {count(elsewhere, 'cell')} of {target.name}")
    pictures = "".join(f", {path}" for path in drawn)
    print_message(console, f"{target.name}: {_status(counts(sweep))}; {out / target.name}.md, .csv, .tex{pictures}")


def _status(numbers: dict[str, int]) -> str:
    from fedrane.reproduce.sweep import ABSENT, UNKNOWN, WAITING

    words = {WAITING: "to run", ABSENT: "without their dataset", UNKNOWN: "of an unknown method"}
    return ", ".join(f"{number} {words.get(state, state)}" for state, number in numbers.items())


def _line(target: Target, sweep: Sweep, cell: Cell) -> dict[str, Any]:
    from fedrane.algorithm import GLOBAL, PERSONAL

    record = sweep.records.get(cell.key, {})
    condition = {"dataset": cell.condition.dataset, "alpha": cell.condition.alpha, "value": cell.condition.value}
    line = {"target": target.name, "method": cell.row.name, **condition, "seed": cell.seed, "key": cell.key}
    line |= {"status": sweep.status(cell), "reason": sweep.reason(cell)}
    return line | {name: record.get(name) for name in (GLOBAL, PERSONAL, "seconds", "device", "version")}


def _show_trials(console: Console, sweep: Sweep, trials: Sequence[tune.Trial], best: tune.Tuned) -> None:
    from fedrane.reproduce import tune
    from fedrane.training.wording import count, percent

    table = plain_table(*trials[0].values, "validation accuracy or R²", "")
    for trial in trials:
        value = tune.score(sweep, trial, best.measure)
        result = sweep.reason(trial.cells[0]) or "failed" if value is None else percent(value)
        chosen = trial.values == best.settings
        line = [escape(str(v)) for v in (*trial.values.values(), result, "best" if chosen else "")]
        table.add_row(*(f"[bold]{text}[/]" if chosen else text for text in line))
    print_message(console, f"{best.method} on {best.dataset}, α {best.alpha:g}: {count(best.trials, 'trial')}")
    show(console, table)


# ---- dry run


def _dry_run(
    console: Console, sweeps: Sequence[tuple[Target, Sweep]], out: Path, measuring: float, as_json: bool
) -> None:
    from fedrane.reproduce.estimate import Speeds
    from fedrane.training.wording import clock, count

    planned: set[str] = set()
    total, unknown = 0.0, 0
    speeds = Speeds(sweeps[0][1], out / "speeds.json", measuring, lambda text: print_message(console, text))
    for target, sweep in sweeps:
        todo = {cell.key: cell for cell in sweep.waiting() if cell.key not in planned}
        planned |= todo.keys()
        times = {key: speeds.seconds(cell) for key, cell in todo.items()}
        total += sum(t for t in times.values() if t is not None)
        unknown += sum(t is None for t in times.values())
        if as_json:
            for cell in sweep.cells:
                line = _line(target, sweep, cell)
                write_line(json.dumps({**line, "seconds": times.get(cell.key)}) + "\n")
        else:
            _show_plan(console, target, sweep, times)
    known = f", about {clock(total)}" + (f" for {count(len(planned) - unknown, 'cell')}" if unknown else "")
    print_message(console, f"in all: {count(len(planned), 'cell')} to run" + (known if unknown < len(planned) else ""))
    if unknown:
        here = f"the speed of {count(unknown, 'cell')} on this machine is not known: none like it is recorded"
        print_message(console, here + ("" if measuring else "; --measure trains a few rounds to find out"))


def _show_plan(console: Console, target: Target, sweep: Sweep, times: dict[str, float | None]) -> None:
    from fedrane.reproduce.results import DONE, FAILED
    from fedrane.reproduce.sweep import ABSENT, UNKNOWN, WAITING, counts
    from fedrane.training.wording import clock

    table = plain_table("dataset", "method", "to run", "done", "failed", "time")
    table.title = f"{target.name}: {escape(target.title)}"
    groups: dict[tuple[str, str], list[Cell]] = {}
    for cell in sweep.cells:
        groups.setdefault((cell.condition.dataset, cell.row.title), []).append(cell)
    for (dataset, title), group in groups.items():
        states = counts(sweep, group)
        each = [times[cell.key] for cell in group if cell.key in times]
        known_times = [t for t in each if t is not None]
        seconds = [clock(sum(known_times))] if known_times else []
        time = " + ".join([*seconds, *(["?"] if len(known_times) < len(each) else [])])
        remark = " (no dataset)" if states.get(ABSENT) else " (unknown method)" if states.get(UNKNOWN) else ""
        numbers = [str(states.get(state, 0) or "") for state in (WAITING, DONE, FAILED)]
        table.add_row(escape(dataset), escape(title) + remark, *numbers, time)
    show(console, table)

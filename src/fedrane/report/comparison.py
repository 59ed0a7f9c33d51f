"""Several methods on the same partition, cohorts and seeds, and the table of their results."""

from __future__ import annotations

import html
import itertools
import operator
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.markup import escape
from rich.table import Table

from fedrane import engines
from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.config import effects, sources, words
from fedrane.config.settings import NAME, Notice, addressed, by_label, dotted
from fedrane.config.words import Words, warn
from fedrane.data.federation import Federation
from fedrane.data.partition import Partitioning
from fedrane.data.tabular import TABLE_KEYS
from fedrane.engines.evaluation import ACCURACY, Metrics, headline
from fedrane.errors import CheckpointError, ConfigError, Diverged, nearest
from fedrane.experiment import KEYS, Experiment, read_toml
from fedrane.methods import METHODS, known
from fedrane.ops.ranking import Ranking
from fedrane.ops.regression import R2
from fedrane.report.tables import (
    csv_text,
    mark_best,
    mark_html,
    mark_latex,
    mark_markdown,
    mark_terminal,
    markdown_table,
    tex,
)
from fedrane.runner import resume, run
from fedrane.system import extras, loading
from fedrane.system.files import taking, user_path, write_atomically
from fedrane.training import user_code
from fedrane.training.callbacks import Callback
from fedrane.training.predictor import Inputs
from fedrane.training.progress import shown
from fedrane.training.run_folder import COMPARISON, CONFIG, METADATA, METRICS, SUMMARY, Folder, read_labels, read_order
from fedrane.training.setup import automatic_model

if TYPE_CHECKING:
    from pandas import DataFrame

COLUMNS = (
    ("global last", GLOBAL, "last"),
    ("global best", GLOBAL, "best"),
    ("personal last", PERSONAL, "last"),
    ("personal best", PERSONAL, "best"),
)
ERRORS = ("rmse", "mae")
"""In the unit of the number that is predicted; the lower the better."""
MEASURES = (ACCURACY, "balanced_accuracy", "minority_accuracy", "f1", *Ranking._fields, R2, *ERRORS)
"""What a comparison can be by."""
_UPPER = ("f1", "auroc", "auprc", *ERRORS)
NAMES = {name: name.replace("_", " ") for name in MEASURES} | {name: name.upper() for name in _UPPER} | {R2: "R²"}
"""As readers know them."""


@dataclass(frozen=True)
class Cell:
    """A measure over seeds; None if the method has no such model."""

    mean: float | None
    deviation: float | None

    @classmethod
    def of(cls, summaries: Sequence[Metrics], model: str, which: str, measure: str = ACCURACY) -> Cell:
        values = (s.get(f"{model}/{which}", {}).get(f"{model}/{measure}") for s in summaries)
        return cls.over([value for value in values if value is not None])

    @classmethod
    def over(cls, values: Sequence[float]) -> Cell:
        if not values:
            return cls(None, None)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)

    @property
    def error(self) -> str:
        """As the text of an error, which has a unit of its own."""
        if self.mean is None:
            return "–"
        return f"{self.mean:.4g}" if self.deviation is None else f"{self.mean:.4g} ± {self.deviation:.2g}"

    def __str__(self) -> str:
        if self.mean is None:
            return "–"
        text = f"{100 * self.mean:.2f}"
        return text if self.deviation is None else f"{text} ± {100 * self.deviation:.2f}"


SAME = frozenset(
    {
        "dataset",
        "data_root",
        "image_size",
        "positive",
        "clients",
        "participation",
        "client_dropout",
        "validation",
        "seed",
    }
    | {"window", *TABLE_KEYS}
)
"""Keys that all methods of a comparison have in common: they decide the examples, the clients and the cohorts."""


@dataclass(frozen=True, repr=False)
class Comparison:
    """The summaries of each method's runs, one for each seed, as a table.

    In a notebook it is shown as a table; ``print`` shows it as Markdown.
    """

    runs: dict[str, list[Metrics]]
    folder: Path | None = None
    diverged: dict[str, str] = field(default_factory=dict)
    """What went wrong, by method."""
    labels: dict[str, str] = field(default_factory=dict)
    """What each label stands for."""
    finished: bool = True
    """False if it was asked to stop: then some runs are missing."""
    metric: str = ACCURACY
    """What was asked for, one of ``MEASURES``."""

    @property
    def measure(self) -> str:
        """What the table is of: R² where a number is predicted, and no other was asked for."""
        records = [
            s[key]
            for each in self.runs.values()
            for s in each
            for _, model, which in COLUMNS
            if (key := f"{model}/{which}") in s
        ]
        numbers = any(headline(record, model) == f"{model}/{R2}" for record in records for model in (GLOBAL, PERSONAL))
        return R2 if self.metric == ACCURACY and numbers else self.metric

    def by(self, metric: str) -> Comparison:
        """The same runs by another measure: ``balanced_accuracy``, ``auroc``, …"""
        if metric not in MEASURES:
            raise ConfigError(f"metric={metric} is not known", remedy=nearest(metric, MEASURES))
        return replace(self, metric=metric)

    def cell(self, method: str, model: str, which: str) -> Cell:
        return Cell.of(self.runs[method], model, which, self.measure)

    @property
    def columns(self) -> Sequence[tuple[str, str, str]]:
        """Title, model and round. The best round is the one of the highest accuracy or R², and of no other measure."""
        if self.measure in (ACCURACY, R2):
            return COLUMNS
        return [(f"{model} {NAMES[self.metric]}", model, "last") for model in (GLOBAL, PERSONAL)]

    @property
    def heads(self) -> list[str]:
        return ["method", *(title for title, _, _ in self.columns), "samples/s"]

    @property
    def caption(self) -> str:
        seeds = max(len(summaries) for summaries in self.runs.values())
        over = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
        lost = "".join(f"; {name} diverged in some runs, which are left out" for name in self.diverged)
        meant = "".join(f"; {label} is {what}" for label, what in self.labels.items())
        missing = "" if self.finished else "; unfinished"
        other = self.measure not in (ACCURACY, R2)
        unit = "the unit of the number" if self.metric in ERRORS else "%"
        what = f"{NAMES[self.measure]} in {unit}{', after the last round' if other else ''}"
        absent = f"– where the method has no such model{', or its runs no such measure' if other else ''}"
        return f"{what}{over}; {absent}{lost}{meant}{missing}"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The numbers of each method, not in per cent; None where there is none."""
        made = []
        for name, summaries in self.runs.items():
            row: dict[str, Any] = {"method": name, "seeds": len(summaries)}
            for title, model, which in self.columns:
                cell = self.cell(name, model, which)
                key = title.lower().replace(" ", "_")
                row |= {key: cell.mean, f"{key}_std": cell.deviation}
            made.append({**row, "samples_per_second": _speed(summaries), "diverged": name in self.diverged})
        return made

    def _lines(self, mark: Callable[[str, str], str], plain: Callable[[str], str] = str) -> Iterator[list[str]]:
        """The entries as text, the best of each column marked; equal as printed is equal."""
        text, sign = (operator.attrgetter("error"), -1) if self.metric in ERRORS else (str, 1)
        marks = [
            mark_best({name: sign * round(mean, 4) for name in self.runs if (mean := self.cell(name, *of).mean)})
            for _, *of in self.columns
        ]
        for name, summaries in self.runs.items():
            cells = zip(self.columns, marks, strict=True)
            speed = _speed(summaries)
            ended = "diverged" if name in self.diverged else ""
            yield [
                plain(name),
                *(mark(text(self.cell(name, model, which)), best.get(name, "")) for (_, model, which), best in cells),
                ended if speed is None else f"{speed:,.0f}",
            ]

    def table(self) -> Table:
        """For the terminal."""
        table = Table(caption=escape(self.caption), caption_justify="left", box=box.SIMPLE_HEAD)
        table.add_column("method", no_wrap=True)
        for title in self.heads[1:]:
            table.add_column(re.sub("[ /]", lambda by: "\n" + by[0].strip(), title), justify="right", no_wrap=True)
        for line in self._lines(mark_terminal, escape):
            table.add_row(*line)
        return table

    def to_markdown(self) -> str:
        return f"{markdown_table(self.heads, self._lines(mark_markdown))}\n{self.caption}\n"

    def to_csv(self, path: str | Path | None = None) -> str:
        """The numbers of ``rows``; with ``path``, also written there."""
        rows = self.rows
        return _written(path, csv_text(list(rows[0]), [list(row.values()) for row in rows]))

    def to_latex(self, path: str | Path | None = None) -> str:
        """A table for a paper, for the package booktabs; with ``path``, also written there."""
        lines = self._lines(lambda text, mark: mark_latex(tex(text), mark), tex)
        rows = [["Method", *map(tex, self.heads[1:])], *lines]
        head, *body = (f"{' & '.join(row)} \\\\" for row in rows)
        text = [
            "% Needs \\usepackage{booktabs}.",
            "\\begin{table}[t]",
            "\\centering",
            f"\\caption{{{tex(self.caption[0].upper() + self.caption[1:])}.}}",
            f"\\begin{{tabular}}{{l{'r' * (len(self.heads) - 1)}}}",
            "\\toprule",
            head,
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}",
            "\\end{table}\n",
        ]
        return _written(path, "\n".join(text))

    def to_pandas(self) -> DataFrame:
        """The numbers of ``rows`` as a data frame, with a row for each method."""
        extras.require("pandas", "to_pandas", "pandas")
        import pandas as pd

        frame = pd.DataFrame(self.rows).set_index("method")
        return frame.astype({name: float for name in frame if name not in ("seeds", "diverged")})  # None is NaN

    def __repr__(self) -> str:
        return self.to_markdown()

    def _repr_html_(self) -> str:
        """For notebooks."""
        heads = "".join(f"<th>{html.escape(head)}</th>" for head in self.heads)
        lines = ("".join(f"<td>{cell}</td>" for cell in line) for line in self._lines(mark_html, html.escape))
        body = "".join(f"<tr>{line}</tr>" for line in lines)
        caption = f"<caption style='caption-side:bottom'>{html.escape(self.caption)}</caption>"
        return f"<table>{caption}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"


def _speed(summaries: Sequence[Metrics]) -> float | None:
    return statistics.fmean(s["samples_per_second"] for s in summaries) if summaries else None


def _written(path: str | Path | None, text: str) -> str:
    if path is not None:
        write_atomically(Path(path), text)
    return text


def compare(
    methods: str | Sequence[str] | Mapping[str, Experiment],
    settings: Experiment | Words = (),
    *,
    seeds: int | Sequence[int] = 1,
    out: str | Path | None = None,
    callbacks: Callable[[str, int], Sequence[Callback]] = lambda name, seed: (),
    stop: Callable[[], bool] = lambda: False,
    progress: bool | None = None,
    metric: str = ACCURACY,
) -> Comparison:
    """Run several methods on the same partition, cohorts, batches and seeds.

    As on the command line, ``methods`` are names, or LABEL=NAME, and ``settings`` a TOML file, words, or both, of which
    LABEL.KEY=value is for one method only: ``compare(["fedavg", "fedprox"], ["clients=10", "fedprox.strength=0.1"])``.
    Settings can also be an experiment, whose method is replaced. Or ``methods`` are whole experiments by their labels.

    ``seeds`` is a number of them, from the experiment's seed on, or the seeds themselves. With ``out``, each run is in
    its own folder there, and the tables ``table.md``, ``table.csv`` and ``table.tex`` are written: finished runs are
    kept and interrupted ones resumed when the same comparison is made again. ``callbacks`` are made for each run, from
    its label and seed. ``progress`` shows a progress bar for each run, by default in a terminal and in a notebook.
    ``metric`` is what the tables are of, ``auroc`` for instance; made again with another one, they need no new runs.
    """
    Comparison({}).by(metric)  # which checks it before the first run
    if isinstance(methods, Mapping):
        if settings != ():
            raise ConfigError(
                "settings for whole experiments", "they have theirs already", "Change them with .replace(KEY=value)"
            )
        experiments = dict(methods)
    else:
        experiments, unused = experiments_of(methods, settings)
        warn(unused, stacklevel=3)
    if not experiments:
        raise ConfigError("there are no methods to compare", remedy="Name them: fedavg, fedprox, …")
    if isinstance(seeds, int):
        if seeds < 1:
            raise ConfigError(f"seeds={seeds}", "it counts repetitions", "Use 1 or more")
        first = next(iter(experiments.values())).seed
        seeds = range(first, first + seeds)
    _check_apart(experiments)
    _check_comparable(experiments)

    def watch(name: str, seed: int) -> Sequence[Callback]:
        return [*callbacks(name, seed), *shown(progress, f"{name}, seed {seed} ")]

    if out is None:
        return _compared(experiments, seeds, None, watch, stop).by(metric)
    out = user_path(out)
    with taking(out, "comparison", holding=f"*/seed-*/{CONFIG}"):
        comparison = _compared(experiments, seeds, out, watch, stop).by(metric)
    if comparison.finished:
        write_atomically(out / "table.md", comparison.to_markdown())
        comparison.to_csv(out / "table.csv")
        comparison.to_latex(out / "table.tex")
    return comparison


def experiments_of(
    names: str | Sequence[str], settings: Experiment | Words, above: words.Above | None = None
) -> tuple[dict[str, Experiment], list[Notice]]:
    """One experiment for each method, by label; LABEL.KEY=value is for that method only.

    ``above`` overrides the file. Also those values of a file that none of them uses.
    """
    text = names if isinstance(names, str) else ",".join(names)
    chosen = by_label(text, {"preset", *(f.name for f in fields(Experiment))})
    if not chosen:
        raise ConfigError("no methods are named", remedy=f"For instance {','.join(METHODS)}")
    if isinstance(settings, Experiment):
        return {label: settings.replace(method=name) for label, name in chosen.items()}, []

    def share(given: dict[str, str]) -> dict[str, dict[str, str]]:
        if NAME in given:
            raise ConfigError(
                f"method={given[NAME]} in a comparison",
                "its methods are named apart from the settings",
                "Name them all there",
            )
        shared, per_label = addressed(given, chosen, KEYS)
        for label, key in ((label, key) for label, mine in per_label.items() for key in mine):
            if _is_same(key):
                raise _different(f"{label}.{key}={per_label[label][key]}", key)
        return {label: {**shared, NAME: name, **per_label[label]} for label, name in chosen.items()}

    return words.experiments_of(settings, share, above)


def _is_same(key: str) -> bool:
    return key in SAME or key.startswith(("partition.", "skew."))


def _different(problem: str, key: str) -> ConfigError:
    why = "all methods are compared on the same examples, clients and cohorts"
    return ConfigError(problem, why, f"Set {key} for all of them")


def _check_comparable(experiments: Mapping[str, Experiment]) -> None:
    """Experiments that were made one by one agree in what all must have in common."""
    first, *others = experiments
    common = dotted(experiments[first].to_dict())
    for label in others:
        for key, value in dotted(experiments[label].to_dict()).items():
            if _is_same(key) and value != common[key]:
                raise _different(f"{label} has {key}={value}, and {first} has {key}={common[key]}", key)


def _compared(
    experiments: dict[str, Experiment],
    seeds: Sequence[int],
    out: Path | None,
    callbacks: Callable[[str, int], Sequence[Callback]],
    stop: Callable[[], bool],
) -> Comparison:
    done = Comparison({name: [] for name in experiments}, out, labels=_labels(experiments))
    for seed in seeds:
        for name, experiment in experiments.items():
            wanted = experiment.replace(seed=seed)
            folder = None if out is None else run_folder(out, name, seed)
            watch: list[Callback] = []
            if folder is None or not folder.finished:
                watch += callbacks(name, seed)
            if out is not None:
                watch.append(_Labelling(out, list(experiments), done.labels))
            try:
                summary = _trained(wanted, folder, watch, stop)
            except Diverged as error:  # the other methods can still be compared
                done.diverged[name] = str(error)
                for callback in watch:
                    callback.message(f"{name}, seed {seed}: {error}")
                continue
            if summary is None:
                return replace(done, finished=False)
            done.runs[name].append(summary)
    return done


def _trained(
    wanted: Experiment, folder: Folder | None, callbacks: Sequence[Callback], stop: Callable[[], bool]
) -> Metrics | None:
    """The summary of the run, which is started, resumed, or finished already; None if it was stopped."""
    how: dict[str, Any] = {"callbacks": callbacks, "stop": stop, "progress": False}
    if folder is None:
        result = run(wanted, calibrate=False, **how)
        return result.summary if result.finished else None
    if folder.holds_run():
        _require_same(folder, wanted)
        user_code.remember(wanted)
    if not folder.finished:
        result = resume(folder.path, **how) if folder.holds_run() else run(wanted, folder.path, **how)
        if not result.finished:
            return None
    return _summary(folder)


def _summary(folder: Folder) -> Metrics:
    """Checked: it has all that the table reads, as far as the method has such models."""
    summary = folder.read_json(SUMMARY)
    try:
        measured = [(model, f"{model}/{which}") for _, model, which in COLUMNS]
        numbers = [summary[name][headline(summary[name], model)] for model, name in measured if name in summary]
        others = [
            summary[name].get(f"{model}/{key}") for model, name in measured if name in summary for key in MEASURES
        ]
        numbers += [number for number in others if number is not None]
        readable = all(isinstance(number, int | float) for number in [summary["samples_per_second"], *numbers])
    except (KeyError, TypeError, AttributeError):
        readable = False
    if not readable:
        raise CheckpointError(
            f"{folder.path / SUMMARY} is not the summary of a run",
            remedy=f"Remove it: it is written again from {METRICS} when the comparison goes on",
        )
    return dict(summary)


def _check_apart(experiments: Mapping[str, Experiment]) -> None:
    """No two names share a folder or an experiment."""
    for name, other in itertools.combinations(experiments, 2):
        if run_folder("", name, 0).path == run_folder("", other, 0).path:
            raise ConfigError(f"{name} and {other}", "their folders would be the same", "Give them other labels")
        if experiments[name] == experiments[other]:
            raise ConfigError(
                f"{name} and {other} are the same experiment", remedy=f"Set a field of one: {other}.FIELD=value"
            )


def _labels(experiments: dict[str, Experiment]) -> dict[str, str]:
    """What each label stands for: its method, and the settings in which it differs from others of that method."""
    labels = {}
    for label, experiment in experiments.items():
        if label in known() or loading.is_reference(label):
            continue
        others = [dotted(e.to_dict()) for e in experiments.values() if e.method_name == experiment.method_name]
        settings = dotted(experiment.to_dict())
        changed = [
            f"{key.removeprefix('method.')}={settings[key]}"
            for key in settings
            if any(e[key] != settings[key] for e in others)
        ]
        labels[label] = f"{experiment.method_name} ({', '.join(changed)})" if changed else experiment.method_name
    return labels


class _Labelling(Callback):
    """Writes the order and the labels for later reports. Those of earlier comparisons in the folder stay."""

    def __init__(self, out: Path, names: Sequence[str], labels: dict[str, str]) -> None:
        self.out = out
        self.order = [run_folder(out, name, 0).path.parent.name for name in names]
        self.labels = {run_folder(out, label, 0).path.parent.name: label for label in labels}

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        order = dict.fromkeys([*self.order, *read_order(self.out)])
        content = {"order": list(order), "labels": read_labels(self.out) | self.labels}
        Folder(self.out).write_json(COMPARISON, content)


def run_folder(out: str | Path, method: str, seed: int) -> Folder:
    """Where a comparison keeps a run. The name of a user's method is a path, so it is cleaned."""
    return Folder(Path(out) / re.sub(r"[^\w.+-]+", "-", method).strip("-.") / f"seed-{seed}")


def _require_same(folder: Folder, wanted: Experiment) -> None:
    """The folder must hold a run of this experiment; values ``auto`` may have been resolved."""
    values = read_toml(folder.path / CONFIG)
    name = dotted(values).get("method.name")
    if name != wanted.method_name:  # before anything that the folder names is loaded
        raise _another(folder, "method.name", name, wanted.method_name)
    metadata = folder.read_metadata()
    for deviation in metadata.get("deviations", []):
        raise CheckpointError(
            f"{folder.path}: {deviation}", "it is no plain run of this experiment", "Choose another --out"
        )
    files = sources.user_files(wanted)
    for key in sources.changed(metadata.get("sources", {}), sources.contents(wanted)):
        raise CheckpointError(
            f"{files[key]} has changed since the run in {folder.path}",
            "its results would be taken for those of the present file",
            "Choose another --out",
        )
    config = Experiment.from_dict(values)
    saved, idle = dotted(config.to_dict()), effects.idle(config)
    from_auto = _from_auto(str(saved["device"]), Inputs.from_dict(metadata["inputs"], folder.path / METADATA))
    clients_given = wanted.partition.file or "natural" in (wanted.partition.kind, saved["partition.kind"])
    for key, now in dotted(wanted.to_dict()).items():
        was = saved.get(key)
        settled = (
            (now == engines.AUTO and was in from_auto.get(key, ()))
            or (key == "threads" and now == 0)
            or key in idle
            or (key == "clients" and clients_given)
            or (key in ("dataset", "model") and was == str(user_path(now).resolve()))
        )
        if was != now and not settled:
            means = f" ({' or '.join(from_auto[key])})" if now == engines.AUTO and key in from_auto else ""
            raise _another(folder, key, was, f"{now}{means}")


def _from_auto(device: str, inputs: Inputs) -> dict[str, Sequence[str]]:
    """What ``auto`` may have been resolved to on that device and with these inputs, by key."""
    drawn = Partitioning().resolved(False, bool(inputs.alphabet), inputs.target is not None)
    return {
        "model": (automatic_model(engines.AUTO, inputs.shape, inputs.vocabulary),),
        "partition.kind": ("natural", drawn.kind),
        "engine": engines.AUTOMATIC,
        "device": ("cpu", "cuda"),
        "precision": ("float32",) if device == "cpu" else ("float32", "bf16"),
    }


def _another(folder: Folder, key: str, was: object, now: object) -> CheckpointError:
    return CheckpointError(
        f"{folder.path} holds a run with {key}={was}, not {now}",
        "its results would be taken for another experiment's",
        "Choose another --out",
    )

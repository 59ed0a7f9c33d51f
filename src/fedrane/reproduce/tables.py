"""Tables of our results and the paper's: for the terminal, as Markdown, CSV and LaTeX."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from rich import box
from rich.markup import escape
from rich.table import Table

from fedrane.algorithm import GLOBAL, PERSONAL
from fedrane.report.tables import (
    csv_text,
    mark_best,
    mark_latex,
    mark_markdown,
    mark_terminal,
    markdown_table,
    tex,
)
from fedrane.reproduce.results import DONE, FAILED, Record
from fedrane.reproduce.sweep import Sweep
from fedrane.reproduce.targets import (
    COMPARISON,
    Cell,
    Condition,
    Row,
    Selection,
    Target,
    conditions_of,
    in_paper,
    rows_of,
)
from fedrane.training.wording import count

BEST, LAST = "best", "last"
NO_MODEL = "–"


@dataclass(frozen=True)
class Measure:
    """A number of a record."""

    title: str
    read: Callable[[Record, str], float | None]
    """Of the best or the last round, if it depends on the round."""
    percent: bool = True
    highest: bool = True
    """Whether more is better."""

    def text(self, value: float, signed: bool = False) -> str:
        sign = "+" if signed else ""
        return f"{100 * value:{sign}.2f}" if self.percent else f"{value:{sign}.3f}"


def _accuracy(model: str, name: str) -> Callable[[Record, str], float | None]:
    return lambda record, which: record.get(model, {}).get(which, {}).get(name)


MEASURES = {
    GLOBAL: Measure("G-FL: the global model on the official test set", _accuracy(GLOBAL, "accuracy")),
    PERSONAL: Measure("P-FL: each client's model on its own test examples", _accuracy(PERSONAL, "accuracy")),
    "global-minority": Measure(
        "The global model on each client's minority classes", _accuracy(GLOBAL, "minority_accuracy")
    ),
    "personal-minority": Measure(
        "Each client's model on its own minority classes", _accuracy(PERSONAL, "minority_accuracy")
    ),
    "cosine-spread": Measure(
        "Spread over clients of the cosines, mean over rounds",
        lambda record, which: record.get("cosine", {}).get("spread"),
        percent=False,
        highest=False,
    ),
    "cosine-least": Measure(
        "Least cosine over clients, mean over rounds",
        lambda record, which: record.get("cosine", {}).get("least"),
        percent=False,
    ),
    "separation": Measure(
        "Silhouette of the features by class",
        lambda record, which: (record["kept"].get("tsne") or {}).get("separation"),
        percent=False,
    ),
}


@dataclass(frozen=True)
class Entry:
    """One entry of a table: a value for each seed, what is missing, and the paper's value."""

    values: tuple[float, ...]
    done: int
    wanted: int
    trouble: str = ""
    """One word, if some seeds failed."""
    paper: float | None = None

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.values) if self.values else None

    @property
    def deviation(self) -> float | None:
        return statistics.stdev(self.values) if len(self.values) > 1 else None

    @property
    def difference(self) -> float | None:
        return None if self.mean is None or self.paper is None else self.mean - self.paper


@dataclass(frozen=True, eq=False)
class ResultTable:
    """One measure of all rows under all conditions."""

    target: Target
    measure: str
    which: str
    rows: Sequence[Row]
    conditions: Sequence[Condition]
    entries: Mapping[tuple[str, Condition], Entry]
    notes: Sequence[str]
    extent: str
    """The number of rounds, and of seeds."""

    @property
    def how(self) -> Measure:
        return MEASURES[self.measure]

    @property
    def title(self) -> str:
        return f"{self.target.title} – {self.how.title}" + (f", {self.which} round" if self.how.percent else "")

    def entry(self, row: Row, condition: Condition) -> Entry:
        return self.entries[row.name, condition]

    @cached_property
    def marks(self) -> dict[tuple[str, Condition], str]:
        """For each condition: the best is bold, the best comparison method after it is underlined."""
        made: dict[tuple[str, Condition], str] = {}
        for condition in self.conditions:
            means = {row.name: self._rank(self.entry(row, condition).mean) for row in self.rows}
            rivals = {row.name for row in self.rows if row.group == COMPARISON}
            made |= {(name, condition): mark for name, mark in mark_best(means, rivals).items()}
        return made

    def _rank(self, mean: float | None) -> float | None:
        if mean is None:
            return None
        shown = round(mean, 4 if self.how.percent else 3)  # equal as printed is equal
        return shown if self.how.highest else -shown

    def groups(self) -> list[tuple[str, list[Condition]]]:
        """Conditions by dataset, to be shown one below the other: side by side they are too wide."""
        names = dict.fromkeys(condition.dataset for condition in self.conditions)
        return [(name, [condition for condition in self.conditions if condition.dataset == name]) for name in names]

    def heading(self, condition: Condition) -> str:
        varies = "" if condition.value is None else f"{self.target.label} {condition.value:g}"
        alphas = {p.alpha for p in self.conditions}
        return ", ".join(filter(None, (f"α {condition.alpha:g}" if not varies or len(alphas) > 1 else "", varies)))

    def ours(self, entry: Entry) -> str:
        """The mean with its deviation; a dash if the method has no such model; empty if nothing was run."""
        if entry.mean is None:
            return entry.trouble or (NO_MODEL if entry.done else "")
        spread = "" if entry.deviation is None else f" ± {self.how.text(entry.deviation)}"
        return self.how.text(entry.mean) + spread + self.missing_seeds(entry)

    def missing_seeds(self, entry: Entry) -> str:
        """For an entry with fewer seeds than the others; what all entries miss is in the caption."""
        most_seeds = max(other.done for other in self.entries.values())
        return "" if entry.done == most_seeds else f" ({entry.done} of {entry.wanted} seeds)"

    def theirs(self, entry: Entry) -> tuple[str, str]:
        paper = "" if entry.paper is None else self.how.text(entry.paper)
        return paper, "" if entry.difference is None else self.how.text(entry.difference, signed=True)

    def has_paper(self, conditions: Sequence[Condition]) -> bool:
        return any(self.entry(row, condition).paper is not None for row in self.rows for condition in conditions)

    def has_anything(self) -> bool:
        return any(entry.values or entry.trouble for entry in self.entries.values())

    @property
    def caption(self) -> str:
        unit = "accuracy in %" if self.how.percent else self.how.title.lower()
        mean = ", mean ± standard deviation" if any(e.deviation is not None for e in self.entries.values()) else ""
        beside = ", beside the paper's and the difference to it" if self.has_paper(self.conditions) else ""
        marks = "; bold: best; underlined: the best comparison method after it" if self.marks else ""
        return f"{unit}{mean}, {self.extent}{beside}{marks}"


# ---- from results


def result_tables(
    target: Target, selection: Selection, sweep: Sweep, which: Sequence[str] = (BEST, LAST)
) -> list[ResultTable]:
    """The tables of all measures of a target; those that do not depend on the round, once."""
    rows, conditions = rows_of(target, selection.methods), conditions_of(target, selection)
    at: dict[tuple[str, Condition], list[Cell]] = {}
    for cell in sweep.cells:
        at.setdefault((cell.row.name, cell.condition), []).append(cell)
    notes, extent = trouble(sweep), _extent(list(at.values()), sweep)
    made = []
    for measure in target.measures:
        for one in which if MEASURES[measure].percent else which[:1]:
            entries = {
                (row.name, condition): _entry(measure, one, condition, at.get((row.name, condition), []), sweep)
                for row in rows
                for condition in conditions
            }
            made.append(ResultTable(target, measure, one, rows, conditions, entries, notes, extent))
    return made


def _extent(conditions: Sequence[Sequence[Cell]], sweep: Sweep) -> str:
    rounds = sorted({cell.experiment.rounds for cell in sweep.cells if cell.experiment})
    span = f"{rounds[0]} to {rounds[-1]} rounds" if len(rounds) > 1 else "".join(count(r, "round") for r in rounds)
    done = max((sum(sweep.status(cell) == DONE for cell in cells) for cells in conditions), default=0)
    wanted = max(map(len, conditions), default=0)
    seeds = count(wanted, "seed")
    return ", ".join(filter(None, (span, f"{done} of {seeds}" if 0 < done < wanted else seeds)))


def _entry(measure: str, which: str, condition: Condition, cells: Sequence[Cell], sweep: Sweep) -> Entry:
    done = [sweep.records[cell.key] for cell in cells if sweep.status(cell) == DONE]
    read = MEASURES[measure].read
    values = tuple(value for record in done if (value := read(record, which)) is not None)
    words = {sweep.records[c.key]["word"] for c in cells if sweep.status(c) == FAILED}
    words |= {"unknown" for c in cells if c.experiment is None}
    paper = in_paper(measure, cells[0].row.name, condition) if cells else None
    return Entry(values, len(done), len(cells), " ".join(sorted(words)), paper)


def trouble(sweep: Sweep) -> list[str]:
    """What went wrong: each reason once, with its cells."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for cell in sweep.cells:
        if reason := sweep.reason(cell):
            reasons.setdefault((cell.row.title, reason), []).append(cell.where)
    return [f"{title} [{_first_of(where)}]: {reason}" for (title, reason), where in reasons.items()]


def _first_of(where: Sequence[str]) -> str:
    return where[0] + (f", and {len(where) - 1} more" if len(where) > 1 else "")


# ---- for the terminal and as Markdown


def _columns(table: ResultTable, conditions: Sequence[Condition]) -> list[str]:
    beside = ["paper", "diff."] if table.has_paper(conditions) else []
    return ["method", *(head for condition in conditions for head in (table.heading(condition), *beside))]


def _lines(table: ResultTable, conditions: Sequence[Condition], mark: Callable[[str, str], str]) -> Iterator[list[str]]:
    beside = table.has_paper(conditions)
    for row in table.rows:
        line = [row.title]
        for condition in conditions:
            entry = table.entry(row, condition)
            line.append(mark(table.ours(entry), table.marks.get((row.name, condition), "")))
            line += table.theirs(entry) if beside else ()
        yield line


def terminal(table: ResultTable) -> Iterator[Table]:
    """One table for each dataset."""
    for dataset, conditions in table.groups():
        grid = Table(title=escape(dataset), title_justify="left", box=box.SIMPLE_HEAD)
        for index, head in enumerate(_columns(table, conditions)):
            grid.add_column(head, justify="right" if index else "left", no_wrap=True)
        for line in _lines(table, conditions, mark_terminal):
            grid.add_row(escape(line[0]), *line[1:])
        yield grid


def markdown(made: Sequence[ResultTable]) -> str:
    """All tables of a target, one below the other."""
    parts = [f"# {made[0].target.title}\n"]
    for table in made:
        parts.append(f"## {table.how.title}" + (f", {table.which} round" if table.how.percent else "") + "\n")
        for dataset, conditions in table.groups():
            body = markdown_table(_columns(table, conditions), _lines(table, conditions, mark_markdown))
            parts.append(f"### {dataset}\n\n{body}")
        parts.append(table.caption[0].upper() + table.caption[1:] + ".\n")
    if made[0].notes:
        parts.append("## What is missing\n\n" + "".join(f"- {note}\n" for note in made[0].notes))
    return "\n".join(parts)


# ---- as CSV: one line for each number


def as_csv(made: Sequence[ResultTable]) -> str:
    heads = ["target", "measure", "round", "dataset", "alpha", "varies", "value", "method", "mean", "deviation"]
    heads += ["seeds", "wanted", "paper", "difference", "trouble"]
    lines: list[list[object]] = []
    for table in made:
        for condition in table.conditions:
            for row in table.rows:
                entry = table.entry(row, condition)
                where = [table.target.name, table.measure, table.which, condition.dataset, f"{condition.alpha:g}"]
                value = "" if condition.value is None else f"{condition.value:g}"
                figures = [_plain(entry.mean), _plain(entry.deviation), entry.done, entry.wanted]
                beside = [_plain(entry.paper), _plain(entry.difference), entry.trouble]
                lines.append([*where, table.target.vary, value, row.name, *figures, *beside])
    return csv_text(heads, lines)


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.5f}"


# ---- as LaTeX


def latex(made: Sequence[ResultTable]) -> str:
    """Tables for a paper: each row is ours; below it, in small type, the paper's number and the difference."""
    head = "% Needs \\usepackage{booktabs} and \\usepackage{graphicx}.\n"
    return head + "\n".join(_latex_table(table) for table in made)


def _latex_table(table: ResultTable) -> str:
    groups = table.groups()
    rules = [(0, 0)]
    for _, conditions in groups:
        rules.append((rules[-1][1] + 1, rules[-1][1] + len(conditions)))
    names = " & ".join(f"\\multicolumn{{{len(conditions)}}}{{c}}{{{tex(dataset)}}}" for dataset, conditions in groups)
    under = " ".join(f"\\cmidrule(lr){{{first + 1}-{last + 1}}}" for first, last in rules[1:])
    heads = " & ".join(tex(table.heading(condition)) for condition in table.conditions)
    body = []
    for row, before in zip(table.rows, [None, *table.rows], strict=False):
        if before and before.group != row.group:
            body.append("\\midrule")
        entries = [table.entry(row, condition) for condition in table.conditions]
        marked = [_marked(table, row, condition) for condition in table.conditions]
        body.append(f"{tex(row.title)} & {' & '.join(marked)} \\\\")
        if any(entry.paper is not None for entry in entries):
            body.append(f"{{\\scriptsize paper}} & {' & '.join(_beside(table, entry) for entry in entries)} \\\\")
    return "\n".join(
        [
            "\\begin{table*}[t]",
            "\\centering",
            f"\\caption{{{tex(table.title)}: {tex(table.caption)}.}}",
            f"\\label{{tab:{table.target.name}-{table.measure}-{table.which}}}",
            "\\resizebox{\\textwidth}{!}{%",
            f"\\begin{{tabular}}{{l{'c' * len(table.conditions)}}}",
            "\\toprule",
            f" & {names} \\\\",
            under,
            f"Method & {heads} \\\\",
            "\\midrule",
            *body,
            "\\bottomrule",
            "\\end{tabular}}",
            "\\end{table*}\n",
        ]
    )


def _marked(table: ResultTable, row: Row, condition: Condition) -> str:
    entry = table.entry(row, condition)
    if entry.mean is None:
        return tex(table.ours(entry))
    text = mark_latex(table.how.text(entry.mean), table.marks.get((row.name, condition), ""))
    spread = "" if entry.deviation is None else f"{{\\scriptsize $\\pm$ {table.how.text(entry.deviation)}}}"
    return text + spread + tex(table.missing_seeds(entry))


def _beside(table: ResultTable, entry: Entry) -> str:
    paper, difference = table.theirs(entry)
    return f"{{\\scriptsize {paper}{f' (${difference}$)' if difference else ''}}}" if paper else ""

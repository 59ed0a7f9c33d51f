"""Reports on runs: the HTML page, figures for papers, t-SNE, comparisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedrane.algorithm import GLOBAL
from fedrane.errors import ConfigError, FedraneError, FileError
from fedrane.report import measures, page
from fedrane.report.runs import Line, Run, gather
from fedrane.report.tsne import SAMPLES, Points, points
from fedrane.system.files import write_atomically

__all__ = ["SAMPLES", "write"]


def write(
    runs: Sequence[str | Path],
    out: str | Path,
    *,
    figures: str | Path | None = None,
    title: str = "",
    target: float | None = None,
    samples: int = SAMPLES,
    data_root: str = "",
    trust_code: bool = False,
    log: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the report on these run folders, or on folders that contain runs, as one HTML file.

    ``figures`` is a folder for the same plots as PNG, SVG and PDF. ``target`` is the accuracy whose cost is shown
    first. ``samples`` is the number of test examples in t-SNE plots, 0 for none. ``data_root`` is the folder of
    datasets, if it is not the one that the runs used. ``trust_code`` allows t-SNE to run a method or network that a run
    folder names and that you never ran before. ``log`` is called before each step that takes long.
    """
    out = Path(out)
    if out.is_dir():
        raise FileError(f"{out} is a folder", "the page is one file", f"Write it into {out / 'report.html'}")
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"target {target}", "it is an accuracy between 0 and 1", "Use for instance 0.9")
    if samples and samples < 10:
        raise ConfigError(f"{samples} examples for t-SNE", "so few have no neighbours", "Use 0, or at least 10")
    page.require()  # before anything that takes long
    lines, notes = gather(runs)
    embedded = _embed(lines, samples, lambda run: points(run, samples, data_root, trust_code), log)
    write_atomically(out, page.html(lines, notes, embedded, title, target))
    if figures is not None:
        from fedrane.report.figures import draw  # matplotlib is slow to import

        draw(lines, embedded, Path(figures))
    return out


def _embed(
    lines: Sequence[Line], samples: int, embed: Callable[[Run], Points], log: Callable[[str], None]
) -> dict[int, Points | str]:
    embedded: dict[int, Points | str] = {}
    for number, line in enumerate(lines) if samples else ():
        if not measures.measured(line.first, f"{GLOBAL}/{measures.headline([line])}"):
            embedded[number] = "no global model."
            continue
        if not line.first.classes:
            embedded[number] = "no classes to colour it by."
            continue
        log(f"t-SNE of {line.name}, seed {line.first.seed}")
        try:
            embedded[number] = embed(line.first)
        except FedraneError as error:  # without its dataset a run has no t-SNE, but the rest of the page is written
            embedded[number] = str(error)
    return embedded

"""What runs leave to look at: a page, figures for papers, the picture of a partition."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fedrane.algorithm import GLOBAL
from fedrane.errors import ConfigError, FedraneError, FileError
from fedrane.files import write_atomically
from fedrane.report import measures, page
from fedrane.report.runs import Line, Run, gather
from fedrane.report.tsne import SAMPLES, Points, points

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
    tell: Callable[[str], None] = lambda text: None,
) -> Path:
    """Write the report on these run folders, or on folders that contain runs, as one HTML file.

    ``figures`` is a folder for the same pictures as PNG and SVG; ``target`` the accuracy to whose cost the page opens;
    ``samples`` how many test rows t-SNE lays out, 0 for none; ``data_root`` where datasets lie, if not where the runs
    had them; ``trust_code`` lets a run's own method or network be run that you have not run before, for t-SNE alone.
    What takes long is said to ``tell``.
    """
    out = Path(out)
    if out.is_dir():
        raise FileError(f"{out} is a folder", "the page is one file", f"Write it into {out / 'report.html'}")
    if target is not None and not 0 < target <= 1:
        raise ConfigError(f"target {target}", "it is an accuracy between 0 and 1", "Use for instance 0.9")
    if samples and samples < 10:
        raise ConfigError(f"{samples} rows for t-SNE", "so few have no neighbours", "Use 0 for none, or 10 and more")
    page.require()  # before anything that takes long
    lines, notes = gather(runs)
    embedded = _embed(lines, samples, lambda run: points(run, samples, data_root, trust_code), tell)
    write_atomically(out, page.html(lines, notes, embedded, title, target))
    if figures is not None:
        from fedrane.report.figures import draw  # matplotlib is slow to import

        draw(lines, embedded, Path(figures))
    return out


def _embed(
    lines: Sequence[Line], samples: int, place: Callable[[Run], Points], tell: Callable[[str], None]
) -> dict[int, Points | str]:
    found: dict[int, Points | str] = {}
    for number, line in enumerate(lines) if samples else ():
        if not measures.measured(line.first, f"{GLOBAL}/accuracy"):
            found[number] = "no global model."
            continue
        tell(f"t-SNE of {line.name}, seed {line.first.seed}")
        try:
            found[number] = place(line.first)
        except FedraneError as error:  # a dataset that is elsewhere must not cost the rest of the page
            found[number] = str(error)
    return found

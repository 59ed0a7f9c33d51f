"""Draws docs/images/speed.png and speed-dark.png, the plot on the page about performance, from benchmarks/results.

Run it from anywhere with ``python docs/make_speed_picture.py``: seconds, and nothing is measured.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
IMAGES = DOCS / "images"
COLOURS = 64
NETWORKS = {"convnet": "ConvNet", "resnet18": "ResNet-18"}
MEASURED = {("convnet", "fmnist"), ("resnet18", "cifar10")}
"""What was measured over numbers of clients."""
DEVICES = {"gpu": "H200", "cpu": "two CPU cores"}
UNITS = {1_000: "1 k", 10_000: "10 k", 100_000: "100 k", 1_000_000: "1 M"}


class Look(NamedTuple):
    name: str
    background: str
    text: str
    lines: str
    gpu: str
    cpu: str
    other: str


LOOKS = (
    Look("speed.png", "#ffffff", "#3d444d", "#d9dee3", "#2f6690", "#b3402a", "#9aa5b1"),
    Look("speed-dark.png", "#0d1117", "#d1d7e0", "#30363d", "#6cb6ff", "#f0883e", "#59636e"),
)


def results(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["results"]
    return found


def draw_clients(axes: Axes, look: Look) -> None:
    for device, where in DEVICES.items():
        for model, network in NETWORKS.items():
            rows = [row for row in results(f"scale-{device}") if (row["model"], row["dataset"]) in MEASURED]
            rows = [row for row in rows if row["model"] == model]
            points = sorted({row["clients"]: row["samples_per_second"] for row in rows}.items())
            if len(points) < 2:
                continue
            style = "o-" if model == "convnet" else "s--"
            clients, speeds = zip(*points, strict=True)
            axes.plot(clients, speeds, style, color=getattr(look, device), markersize=4, linewidth=1.6)
            under, text = points[len(points) // 2], {"textcoords": "offset points", "ha": "center", "fontsize": 9}
            axes.annotate(f"{network}, {where}", under, (0, -17), color=look.text, **text)
    axes.set(xscale="log", yscale="log", xlabel="clients, with the same examples in total", ylim=(5e3, 4e6))
    axes.set_xticks([10, 20, 50, 100, 500], ["10", "20", "50", "100", "500"])
    axes.set_xticks([], minor=True)
    axes.set_yticks(list(UNITS), list(UNITS.values()))
    axes.set_yticks([], minor=True)
    axes.set_title("FedAvg, samples/s", loc="left", fontsize=10.5, color=look.text)


def draw_methods(axes: Axes, look: Look) -> None:
    rows = sorted(results("methods-gpu"), key=lambda row: row["samples_per_second"])
    names = [row["method"] for row in rows]
    speeds = [row["samples_per_second"] / 1e6 for row in rows]
    colours = [look.gpu if row["method"] in ("fedavg", "fedrane") else look.other for row in rows]
    axes.barh(names, speeds, color=colours, height=0.7)
    for at, row in enumerate(rows):
        axes.text(speeds[at] + 0.02, at, f"{row['times_eager']:.0f} ×", va="center", fontsize=8, color=look.text)
    axes.set(xlim=(0, 2.0), xlabel="million samples/s, and × its own eager rounds")
    axes.set_title("ConvNet, H200, 20 clients", loc="left", fontsize=10.5, color=look.text)


def picture(look: Look) -> bytes:
    figure = Figure(figsize=(9.6, 4.4), dpi=120, layout="constrained", facecolor=look.background)
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    draw_clients(left, look)
    draw_methods(right, look)
    for axes in (left, right):
        axes.set_facecolor(look.background)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color(look.lines)
        axes.tick_params(colors=look.text, labelsize=8.5, length=0)
        axes.xaxis.label.set(color=look.text, fontsize=9)
    left.grid(color=look.lines, linewidth=0.6)
    right.grid(color=look.lines, linewidth=0.6, axis="x")
    for axes in (left, right):
        axes.set_axisbelow(True)
    drawn, light = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, facecolor=look.background)
    with Image.open(drawn) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(light, "PNG", optimize=True)
    return light.getvalue()


def main() -> None:
    for look in LOOKS:
        (IMAGES / look.name).write_bytes(picture(look))


if __name__ == "__main__":
    main()

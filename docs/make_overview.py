"""Draws docs/images/overview.png, the picture in the README, from runs made here: about five minutes on two cores.

Run it from anywhere with ``python docs/make_overview.py``.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

import fedrane
from fedrane.data import load
from fedrane.data.partition import partition

PICTURE = Path(__file__).parent / "images" / "overview.png"
CLIENTS, ROUNDS, SEEDS = 10, 20, (0, 1, 2)
COLOURS = {0.1: "#b3402a", 0.5: "#e0982a", 5.0: "#2f6690"}
MEASURES = {"fedavg": "global/local_accuracy", "local": "personal/accuracy"}
STYLES = {"fedavg": "-", "local": (0, (3, 2))}
NAMES = {"fedavg": "FedAvg, one global model", "local": "each client alone"}
GREY = "#59636e"


def curve(method: str, alpha: float, seed: int) -> list[float]:
    """The accuracy on the clients' own test examples after each round."""
    torch.set_num_threads(1)
    how = fedrane.Partitioning(kind="dirichlet", alpha=alpha)
    settings = fedrane.Experiment(
        method=method,
        dataset="digits",
        clients=CLIENTS,
        rounds=ROUNDS,
        batch=16,
        seed=seed,
        partition=how,
        device="cpu",
    )
    return [record[MEASURES[method]] for record in fedrane.run(settings).history]


def draw_partition(axes: Axes, alpha: float) -> None:
    digits = load("digits")
    how = fedrane.Partitioning(kind="dirichlet", alpha=alpha)
    counts = partition(digits.y, 10, CLIENTS, how, SEEDS[0]).counts(digits.y, 10)
    client, label = np.nonzero(counts)
    axes.scatter(client, label, s=2.2 * counts[client, label], color=COLOURS[alpha], alpha=0.85, linewidths=0)
    axes.set(xlim=(-0.6, CLIENTS - 0.4), ylim=(9.6, -0.6), xlabel="client", ylabel="class")
    axes.set_xticks(range(CLIENTS))
    axes.set_yticks(range(10))
    axes.set_title(f"Examples of each digit (area), {CLIENTS} clients, α = {alpha:g}", loc="left", fontsize=11)
    axes.grid(color="#e6e9ec", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)


def draw_curves(axes: Axes, curves: dict[tuple[str, float], NDArray[np.float64]]) -> None:
    rounds = np.arange(1, ROUNDS + 1)
    for (method, alpha), runs in curves.items():
        axes.plot(rounds, 100 * runs.mean(0), color=COLOURS[alpha], linestyle=STYLES[method], linewidth=1.8)
    axes.set(xlim=(1, ROUNDS), ylim=(38, 100), xlabel="round")
    axes.set_xticks([1, 5, 10, 15, 20])
    axes.set_title(
        f"Accuracy on the clients' own test examples, % (mean of {len(SEEDS)} seeds)", loc="left", fontsize=11
    )
    alphas = [Line2D([], [], color=colour, linewidth=1.8, label=f"α = {alpha:g}") for alpha, colour in COLOURS.items()]
    methods = [Line2D([], [], color=GREY, linewidth=1.8, linestyle=STYLES[m], label=NAMES[m]) for m in STYLES]
    axes.legend(handles=[*methods, *alphas], loc="lower right", fontsize=10, frameon=False)


def main() -> None:
    asked = [(method, alpha, seed) for method in STYLES for alpha in COLOURS for seed in SEEDS]
    with ProcessPoolExecutor(max_workers=2) as pool:
        found = list(pool.map(curve, *zip(*asked, strict=True)))
    curves = {(m, a): np.array([f for q, f in zip(asked, found, strict=True) if q[:2] == (m, a)]) for m, a, _ in asked}
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.25))
    draw_partition(left, 0.1)
    draw_curves(right, curves)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[:].set_color("#c8ced4")
        axes.tick_params(colors=GREY, labelsize=9.5)
    figure.get_layout_engine().set(w_pad=0.12)
    PICTURE.parent.mkdir(exist_ok=True)
    figure.savefig(PICTURE)


if __name__ == "__main__":
    main()

"""Colours and symbols that readers can tell apart, on both pages and with either colour vision."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from fedrane.report import style

VISION = {
    "usual": np.eye(3),
    "no green": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "no red": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
}
"""How linear RGB is seen: Machado, Oliveira & Fernandes 2009."""
PAGES = {"light": "#ffffff", "dark": "#191f26"}


def linear(colour: str) -> NDArray[np.float64]:
    parts = np.array([int(colour[k : k + 2], 16) for k in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def oklab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """Where equal distances look equally different."""
    cones = np.array([[0.4122, 0.5363, 0.0514], [0.2119, 0.6807, 0.1074], [0.0883, 0.2817, 0.6300]]) @ rgb.clip(0, 1)
    mixed = np.array([[0.2105, 0.7936, -0.0041], [1.9780, -2.4286, 0.4506], [0.0259, 0.7828, -0.8087]])
    return mixed @ np.cbrt(cones)


@pytest.mark.parametrize("vision", VISION)
def test_ten_classes_can_be_distinguished(vision: str) -> None:
    """Any two colours are farther apart than Tableau's ten are for readers with a usual vision, or nearly so."""
    seen = [oklab(VISION[vision] @ linear(colour)) for colour in style.class_colours(10)]
    assert min(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(seen, 2)) > 0.1


@pytest.mark.parametrize("surface", PAGES)
def test_colours_are_visible_on_the_page(surface: str) -> None:
    weights = np.array([0.2126, 0.7152, 0.0722])
    behind = linear(PAGES[surface]) @ weights
    for colour in style.COLOURS:
        low, high = sorted((linear(colour) @ weights, behind))
        assert (high + 0.05) / (low + 0.05) > 2, colour


def test_no_two_of_fifty_lines_look_the_same() -> None:
    looks = {(style.colour(k), style.symbol(k)) for k in range(len(style.COLOURS) * len(style.SYMBOLS))}
    assert len(looks) == 50

"""Feature skew: every client's images are made different in their own way, as by other cameras.

It changes all examples of a client, those of its local test set included, once and as they are stored. So every method
and engine sees the same bytes. The official test set stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedrane.data.streams import generator, permutation
from fedrane.errors import ConfigError
from fedrane.system import memory

Pixels = NDArray[np.float32]
_AT_ONCE = 1 << 20
"""Pixels that are changed at a time."""


@dataclass(frozen=True)
class FeatureSkew:
    """How far the clients' images differ from the dataset's; not at all by default."""

    noise: float = 0.0
    """Add Gaussian noise to a client's images: of this standard deviation (white is 1) for one client, and of evenly
    smaller ones for the others; 0 is off."""
    rotation: float = 0.0
    """Rotate all images of a client by its own angle; the angles are spread evenly from minus to plus this many
    degrees; 0 is off."""
    intensity: float = 0.0
    """Multiply each channel of a client's images by its own factor, so that colour images get a cast; the factors are
    spread evenly from 1 − intensity to 1 + intensity; 0 is off."""

    def __post_init__(self) -> None:
        for key, value, limit, what in (
            ("noise", self.noise, 1, "a standard deviation of pixels between 0 and 1"),
            ("rotation", self.rotation, 180, "an angle in degrees"),
        ):
            if not 0 <= value <= limit:
                raise ConfigError(f"skew.{key}={value}", f"it is {what}", f"Use 0 (off) to {limit}")
        if not 0 <= self.intensity < 1:
            raise ConfigError(
                f"skew.intensity={self.intensity}",
                "a channel is multiplied by 1 − intensity or more, and must not become black",
                "Use 0 (off) to less than 1, for instance 0.3",
            )

    @property
    def on(self) -> bool:
        return max(self.noise, self.rotation, self.intensity) > 0

    def described(self) -> str:
        """What is changed, in words.

        >>> FeatureSkew(noise=0.1, rotation=30).described()
        'noise of up to 0.1, rotation from −30° to 30°'
        """
        low, high = 1 - self.intensity, 1 + self.intensity
        parts = {
            f"noise of up to {self.noise:g}": self.noise,
            f"rotation from −{self.rotation:g}° to {self.rotation:g}°": self.rotation,
            f"intensity from {low:g} to {high:g} per channel": self.intensity,
        }
        return ", ".join(text for text, amount in parts.items() if amount)

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error if inputs of this shape are no images."""
        if self.on and len(shape) != 3:
            key = next(key for key in ("noise", "rotation", "intensity") if getattr(self, key))
            raise ConfigError(f"skew.{key} on inputs of shape {shape}", "they are not images", "Leave it out")

    def applied(self, x: NDArray[Any], clients: Sequence[NDArray[np.int64]], seed: int) -> NDArray[Any]:
        """Return all images ``x``, those of each client changed in its way; ``clients`` are the indices of theirs."""
        self.check(x.shape[1:])
        if not self.on:
            return x
        memory.require(x.nbytes, "the images of skewed clients", "Use fewer images")
        changed = x.copy()
        skews = ClientSkews.of(self, len(clients), x.shape[1], seed)
        at_once = max(1, _AT_ONCE // math.prod(x.shape[1:]))
        for client, examples in enumerate(clients):
            draw = generator(seed, "skew noise of", client)
            rotate = _Rotation.by(float(skews.angles[client]), *x.shape[2:]) if self.rotation else None
            for begin in range(0, len(examples), at_once):
                some = examples[begin : begin + at_once]
                pixels = x[some].astype(np.float32) * skews.factors[client][:, None, None]
                if rotate:
                    pixels = rotate(pixels)
                if self.noise:
                    noise = draw.standard_normal(pixels.shape, dtype=np.float32)
                    pixels += np.float32(255 * skews.deviations[client]) * noise
                changed[some] = np.rint(pixels.clip(0, 255))
        return changed


@dataclass(frozen=True, eq=False)
class ClientSkews:
    """What distinguishes the clients. Which client gets which of the evenly spread values is random."""

    deviations: NDArray[np.float64]
    """Of each client's noise."""
    angles: NDArray[np.float64]
    """Of each client, in degrees, counterclockwise."""
    factors: NDArray[np.float32]
    """Of each client and channel."""

    @classmethod
    def of(cls, how: FeatureSkew, clients: int, channels: int, seed: int) -> ClientSkews:
        around = np.linspace(-1, 1, clients)
        factors = [1 + how.intensity * around[permutation(clients, seed, "skew intensity", c)] for c in range(channels)]
        return cls(
            how.noise * (1 + permutation(clients, seed, "skew noise")) / clients,
            how.rotation * around[permutation(clients, seed, "skew rotation")],
            np.stack(factors, axis=1).astype(np.float32),
        )


@dataclass(frozen=True, eq=False)
class _Rotation:
    """A rotation of images about their centre, counterclockwise; bilinear, and black where nothing was."""

    sources: NDArray[np.int64]
    """The four pixels around the place from which each pixel comes: (4, height · width)."""
    weights: Pixels
    """How much of each it takes; 0 of those outside the image."""

    @classmethod
    def by(cls, degrees: float, height: int, width: int) -> _Rotation:
        cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
        down, right = np.mgrid[:height, :width].reshape(2, -1) - np.array([[height - 1], [width - 1]]) / 2
        row = cos * down + sin * right + (height - 1) / 2
        column = cos * right - sin * down + (width - 1) / 2
        sources, weights = [], []
        for below in (0, 1):
            for beside in (0, 1):
                r, c = np.floor(row) + below, np.floor(column) + beside
                inside = (r >= 0) & (r < height) & (c >= 0) & (c < width)
                sources.append(np.where(inside, r * width + c, 0).astype(np.int64))
                weights.append(np.where(inside, (1 - abs(row - r)) * (1 - abs(column - c)), 0))
        return cls(np.stack(sources), np.stack(weights).astype(np.float32))

    def __call__(self, images: Pixels) -> Pixels:
        flat = images.reshape(*images.shape[:2], -1)
        rotated = np.zeros_like(flat)
        for source, weight in zip(self.sources, self.weights, strict=True):
            rotated += flat[..., source] * weight
        return rotated.reshape(images.shape)

"""Augmentation of training inputs: random crops, horizontal flips and mixup, the same for every method and engine.

Everything is drawn on the device from the batch's key and an example's position in its batch, so every engine and
every resumed run sees the same inputs. Evaluation, prediction and stages that only measure are never augmented.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from fedrane.data.noise import uniform
from fedrane.errors import ConfigError

ROWS, COLUMNS, MIRROR, PARTNER, WEIGHT = range(1 << 20, (1 << 20) + 5)
"""The random streams of a batch's key used here; dropout layers use small numbers, far below these."""
QUANTILES = 4096
"""Intervals of the table from which a mixing weight is interpolated."""


@dataclass(frozen=True)
class Augmentation:
    """The augmentations of training inputs; none by default."""

    crop: int = 0
    """Pad images with this many black pixels on each side, then crop a random window of the original size; 0 is
    off."""
    flip: bool = False
    """Flip each image left to right with probability 1/2."""
    mixup: float = 0.0
    """Mix each example with another of its batch, with a weight from Beta(mixup, mixup); 1 is uniform, 0 is off."""

    def __post_init__(self) -> None:
        if self.crop < 0:
            raise ConfigError(f"augment.crop={self.crop}", "it counts pixels", "Use 0 (off) or for instance 4")
        if not 0 <= self.mixup < math.inf:
            raise ConfigError(
                f"augment.mixup={self.mixup}", "it is the parameter of a Beta distribution", "Use 0 (off) or 1"
            )

    def check(self, shape: tuple[int, ...], vocabulary: int = 0) -> None:
        """Raise an error if these augmentations do not work on inputs of this shape."""
        images = len(shape) == 3
        if self.mixup and vocabulary:
            raise ConfigError(
                f"augment.mixup={self.mixup} on inputs that are numbers of a vocabulary",
                "between two characters or words there is nothing to mix",
                "Leave it out; weight_decay or a network with dropout regularises as well",
            )
        for key, asked in (("crop", self.crop), ("flip", self.flip)):
            if asked and not images:
                raise ConfigError(
                    f"augment.{key} on inputs of shape {shape}",
                    "they are not images",
                    "Leave it out" + ("" if vocabulary else "; augment.mixup works on all inputs"),
                )
        if images and self.crop >= min(shape[1:]):
            raise ConfigError(
                f"augment.crop={self.crop} on images of {shape[1]} × {shape[2]}",
                "some crops would contain nothing of the image",
                "Use a smaller value, for instance an eighth of the side",
            )


class Mixed(NamedTuple):
    """For each mixed example, the label of its partner and the partner's weight, between 0 and 1."""

    y: Tensor
    weight: Tensor


@dataclass(frozen=True, eq=False)
class Augmenter:
    """Augments batches on a device; inputs may have extra leading dimensions before the batch dimension."""

    how: Augmentation
    weights: Tensor
    """Quantiles of the distribution of the mixing weight."""

    @classmethod
    def of(cls, how: Augmentation, device: torch.device, dtype: torch.dtype) -> Augmenter:
        from scipy.special import betaincinv  # slow to import

        steps = torch.linspace(0, 1, QUANTILES + 1, dtype=torch.float64)
        # The quantiles of a uniform weight are the steps themselves, to the last bit.
        weights = steps if how.mixup in (0, 1) else torch.from_numpy(betaincinv(how.mixup, how.mixup, steps.numpy()))
        return cls(how, weights.to(device=device, dtype=dtype))

    @property
    def moves(self) -> bool:
        return self.how.crop > 0 or self.how.flip

    @property
    def mixes(self) -> bool:
        return self.how.mixup > 0

    def move(self, x: Tensor, examples: Tensor, key: Tensor) -> Tensor:
        """Return the images ``x[examples]``, randomly shifted and flipped."""
        channels, height, width = x.shape[1:]
        rows, columns = (torch.arange(side, device=x.device) for side in (height, width))
        position = torch.arange(examples.shape[-1], device=x.device)
        down, right, mirrored = (uniform(key[..., None], s, position)[..., None] for s in (ROWS, COLUMNS, MIRROR))
        if self.how.flip:
            columns = torch.where(mirrored < 0.5, width - 1 - columns, columns)
        if self.how.crop:
            rows, columns = rows + self._shift(down), columns + self._shift(right)
        rows, columns = rows.expand(*examples.shape, height), columns.expand(*examples.shape, width)
        moved = x[
            examples[..., None, None, None],
            torch.arange(channels, device=x.device)[:, None, None],
            rows.clamp(0, height - 1)[..., None, :, None],
            columns.clamp(0, width - 1)[..., None, None, :],
        ]
        if not self.how.crop:
            return moved
        inside = _within(rows, height)[..., None, :, None] & _within(columns, width)[..., None, None, :]
        return torch.where(inside, moved, 0)

    def _shift(self, chance: Tensor) -> Tensor:
        """Map a uniform number to an integer from −crop to crop, all equally likely."""
        return (chance * (2 * self.how.crop + 1)).long() - self.how.crop

    def mix(self, x: Tensor, y: Tensor, mask: Tensor, key: Tensor) -> tuple[Tensor, Mixed]:
        """Mix each example with another; padding is never a partner, and a single example is not changed."""
        position = torch.arange(y.shape[-1], device=x.device).expand(y.shape)
        chance = torch.where(mask, uniform(key[..., None], PARTNER, position), 2.0)
        order = chance.argsort(dim=-1, stable=True)  # a random order of the examples, padding last
        partner = torch.where(mask, order.gather(-1, (mask.cumsum(-1) - 1).clamp(min=0)), position)
        weight = self._weight(uniform(key, WEIGHT, torch.zeros((), dtype=torch.int64, device=x.device)))
        starts = torch.arange(y[..., 0].numel(), device=x.device).reshape(*y.shape[:-1], 1) * y.shape[-1]
        flat = (partner + starts).flatten()
        inputs = x.reshape(-1, *x.shape[y.dim() :])[flat].reshape(x.shape)
        # Written so that an example that is its own partner is not changed, to the last bit.
        mixed = x + weight.reshape(*weight.shape, *(1,) * (x.dim() - weight.dim())) * (inputs - x)
        return mixed, Mixed(y.flatten()[flat].reshape(y.shape), weight[..., None].expand(y.shape))

    def _weight(self, chance: Tensor) -> Tensor:
        position = chance.to(self.weights.dtype) * QUANTILES
        below = position.long()  # chance is below 1
        low, high = self.weights[below], self.weights[below + 1]
        return low + (position - below) * (high - low)


def _within(position: Tensor, side: int) -> Tensor:
    return (position >= 0) & (position < side)

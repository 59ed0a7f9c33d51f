"""The paper's networks, each a body that ends in features; the head is a linear layer put on by the task."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrane.errors import ConfigError

SMALL_IMAGE = 16
"""Below this side two unpadded 5 × 5 convolutions with pooling leave nothing, so the ConvNet pads."""


def mlp(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """One hidden layer of 128 and features of 64; any input, images included."""
    layers = OrderedDict(
        flatten=nn.Flatten(), hidden=nn.Linear(math.prod(shape), 128), act=nn.ReLU(), embed=nn.Linear(128, 64)
    )
    layers["out"] = nn.ReLU()
    return nn.Sequential(layers), 64


def convnet(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Two 5 × 5 convolutions (16, 32) with max-pools, and a linear embedding of 64 (LeCun et al. 1998, readings 12)."""
    channels, side = _image(shape, "convnet")
    padding = 2 if side < SMALL_IMAGE else 0
    after = side
    for _ in range(2):
        after = (after + 2 * padding - 4) // 2
    if after < 1:
        raise ConfigError(f"convnet cannot take images of side {side}", "two pools leave nothing", "Use model=mlp")
    height, width = (((s + 2 * padding - 4) // 2 + 2 * padding - 4) // 2 for s in shape[1:])
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    # The larger of two is the same before and after a ReLU, which has a quarter of the work after the pool.
    for number, (inputs, outputs) in enumerate([(channels, 16), (16, 32)], 1):
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 5, padding=padding)
        layers[f"pool{number}"], layers[f"relu{number}"] = nn.MaxPool2d(2), nn.ReLU()
    layers["flatten"], layers["embed"] = nn.Flatten(), nn.Linear(32 * height * width, 64)
    return nn.Sequential(layers), 64


def resnet18(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """ResNet-18 with the ImageNet stem, also on 32 × 32 images, as the paper's authors use it (readings 11)."""
    return ResNet18(_image(shape, "resnet18")[0], imagenet_stem=True), 512


def resnet18_cifar(shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """ResNet-18 with the 3 × 3 stem made for 32 × 32 images: far better on CIFAR, about fifteen times the work."""
    return ResNet18(_image(shape, "resnet18-cifar")[0], imagenet_stem=False), 512


def _image(shape: tuple[int, ...], model: str) -> tuple[int, int]:
    if len(shape) != 3:
        raise ConfigError(
            f"model={model} on examples of shape {shape}", "it takes images (channels, height, width)", "Use model=mlp"
        )
    return shape[0], min(shape[1:])


class _Conv(nn.Conv2d):
    """A convolution without bias initialised as in He et al. (2015), by its outputs."""

    def __init__(self, inputs: int, outputs: int, size: int, stride: int = 1) -> None:
        super().__init__(inputs, outputs, size, stride, padding=size // 2, bias=False)

    def reset_parameters(self) -> None:
        nn.init.kaiming_normal_(self.weight, mode="fan_out", nonlinearity="relu")


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = _Conv(inputs, outputs, 3, stride), nn.BatchNorm2d(outputs)
        self.conv2, self.bn2 = _Conv(outputs, outputs, 3), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(_Conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(y)) + self.shortcut(x))


class ResNet18(nn.Module):
    """He et al. 2016, two basic blocks in each of four stages."""

    def __init__(self, channels: int, imagenet_stem: bool) -> None:
        super().__init__()
        self.conv = _Conv(channels, 64, 7, 2) if imagenet_stem else _Conv(channels, 64, 3)
        self.bn = nn.BatchNorm2d(64)
        self.pool: nn.Module = nn.MaxPool2d(3, 2, 1) if imagenet_stem else nn.Identity()
        widths = [64, 64, 128, 256, 512]
        self.stages = nn.Sequential(
            *(
                nn.Sequential(_Block(before, width, 1 if width == 64 else 2), _Block(width, width, 1))
                for before, width in itertools.pairwise(widths)
            )
        )

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.pool(self.bn(self.conv(x))))  # as in the ConvNet
        return torch.flatten(F.adaptive_avg_pool2d(self.stages(x), 1), 1)


BODIES = {"mlp": mlp, "convnet": convnet, "resnet18": resnet18, "resnet18-cifar": resnet18_cifar}

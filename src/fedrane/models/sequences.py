"""Networks for sequences of numbers of a vocabulary, such as the characters of a text: bodies that end in features.

They are written with plain operations on tensors, which run alike for one client and, under ``vmap``, for a stack of
them.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def lstm(shape: tuple[int, ...], vocabulary: int) -> tuple[nn.Module, int]:
    """An embedding of 8 and an LSTM of 128 units, whose last output is the features (one layer of McMahan et al. 2017's
    two of 256)."""
    layers = OrderedDict[str, nn.Module](embed=nn.Embedding(vocabulary, 8), lstm=LastOutput(8, 128))
    return nn.Sequential(layers), 128


def transformer(shape: tuple[int, ...], vocabulary: int) -> tuple[nn.Module, int]:
    """Two layers of width 64 with four heads (Vaswani et al. 2017), normalised first; features of the last element."""
    (length,) = shape
    return Transformer(length, vocabulary, 64), 64


class Transformer(nn.Module):
    """Embeddings of the elements and of their positions, and stock layers of a transformer."""

    def __init__(self, length: int, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layers = [
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.1, batch_first=True, norm_first=True)
            for _ in range(2)
        ]
        self.layers, self.norm = nn.Sequential(*layers), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.layers(self.embed(x) + self.place.weight)[:, -1])
        return out


class LastOutput(nn.Module):
    """The output of a one-layer LSTM after the last element of a sequence (examples, length, inputs).

    The parameters are those of ``nn.LSTM``, by name and meaning. That layer calls a library's kernel, which cannot be
    stacked.
    """

    def __init__(self, inputs: int, units: int) -> None:
        super().__init__()
        self.units = units
        self.weight_ih_l0 = nn.Parameter(torch.empty(4 * units, inputs))
        self.weight_hh_l0 = nn.Parameter(torch.empty(4 * units, units))
        self.bias_ih_l0 = nn.Parameter(torch.empty(4 * units))
        self.bias_hh_l0 = nn.Parameter(torch.empty(4 * units))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(self.units), 1 / math.sqrt(self.units))

    def forward(self, x: Tensor) -> Tensor:
        # What comes from the inputs is one product for all elements; only the rest must wait for the one before.
        from_inputs = F.linear(x, self.weight_ih_l0) + (self.bias_ih_l0 + self.bias_hh_l0)
        output, memory = self._cell(from_inputs[:, 0], None)
        for element in range(1, x.shape[1]):
            gates = from_inputs[:, element] + F.linear(output, self.weight_hh_l0)
            output, memory = self._cell(gates, memory)
        return output

    def _cell(self, gates: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
        write, keep, value, read = gates.chunk(4, -1)
        new = torch.sigmoid(write) * torch.tanh(value)
        memory = new if memory is None else new + torch.sigmoid(keep) * memory
        return torch.sigmoid(read) * torch.tanh(memory), memory

    def extra_repr(self) -> str:
        return f"{self.weight_ih_l0.shape[1]}, {self.units}"

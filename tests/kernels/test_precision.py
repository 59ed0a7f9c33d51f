"""A network's arithmetic in bf16: what is cast, and what keeps its dtype."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedrane.kernels import dispatch
from fedrane.kernels.precision import call_in


class Network(nn.Module):
    """Notes the dtypes it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.norm = nn.Parameter(torch.ones(2, 2, 1, 1)), nn.Parameter(torch.ones(2))
        self.register_buffer("constant", torch.ones(2))
        self.seen: dict[str, torch.dtype] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {name: value.dtype for name, value in self.state_dict(keep_vars=True).items()} | {"x": x.dtype}
        return x


def dtypes() -> dict[str, torch.dtype]:
    network = Network()
    call_in(torch.bfloat16, network, dict(network.named_parameters()), (torch.ones(2),), keep={"norm"})
    return network.seen


def test_what_is_kept_has_its_own_dtype() -> None:
    assert dtypes() == {
        "x": torch.bfloat16,
        "weight": torch.bfloat16,
        "norm": torch.float32,
        "constant": torch.bfloat16,
    }


def test_a_stacked_convolution_takes_its_weight_as_it_is() -> None:
    with dispatch.stacking():
        assert dtypes()["weight"] == torch.float32

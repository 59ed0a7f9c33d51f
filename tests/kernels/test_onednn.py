"""The work-around for oneDNN: every gradient of a bf16 convolution is written."""

from __future__ import annotations

import pytest
import torch

from fedrane.kernels.onednn import CompleteGradients


def leave_nan() -> None:
    """In memory that whoever asks for some is likely to get."""
    kept = [torch.full((n,), torch.nan) for n in (64, 1024, 4096, 1 << 15, 1 << 16, 1 << 18) for _ in range(3)]
    del kept


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("sides", "taps", "stride", "padding"),
    [
        ((1, 1), 3, 2, 1),  # ResNet's on images of 16 × 16
        ((1, 1), 5, (3, 2), 2),
        ((2, 2), 3, 3, 1),
        ((2, 2), 2, 3, 1),
        ((1, 6), 3, 2, 1),
        ((4, 4), 3, 2, 1),
        ((5, 4), 3, 1, 1),
        ((1,), 3, 2, 1),
        ((7,), 3, 2, 1),
    ],
    ids=str,
)
def test_bf16_convolutions_have_all_their_gradients(
    sides: tuple[int, ...], taps: int, stride: int, padding: int, dtype: torch.dtype
) -> None:
    """Some lie in memory that was never written, which may hold a number by chance: hence several times."""
    convolve = {1: torch.conv1d, 2: torch.conv2d}[len(sides)]
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        x, weight = (torch.randn(shape, generator=g) for shape in ((8, 16, *sides), (32, 16, *(taps,) * len(sides))))
        cast = [
            v.to(dtype, memory_format=torch.channels_last if v.dim() == 4 else torch.contiguous_format)
            for v in (x, weight)
        ]
        exact = [v.double().requires_grad_() for v in cast]
        cast = [v.requires_grad_() for v in cast]
        with CompleteGradients():
            got = convolve(*cast, None, stride, padding)
        expected = convolve(*exact, None, stride, padding)
        assert got.shape == expected.shape
        by = torch.randn(expected.shape, generator=g).to(dtype)
        leave_nan()
        pairs = zip(
            (got, *torch.autograd.grad(got, cast, by)),
            (expected, *torch.autograd.grad(expected, exact, by.double())),
            strict=True,
        )
        for ours, theirs in pairs:
            assert (ours - theirs).abs().max() <= 0.02 * theirs.abs().max()

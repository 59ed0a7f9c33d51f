"""Attention with plain operations on tensors: its dropout masks come from the batch's key, and vmap can stack it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedrane.models.layers import KeyedDropout


class Attention(nn.Module):
    """``nn.MultiheadAttention``, with the same parameters by the same names, and the same arguments.

    Training and evaluation take one path, so they differ in nothing but dropout.
    """

    _qkv_same_embed_dim = False
    """By this ``nn.TransformerEncoderLayer`` sees that its fused kernel for evaluation, which cannot be stacked, does
    not apply."""

    def __init__(self, layer: nn.MultiheadAttention, number: int) -> None:
        super().__init__()
        self.embed_dim, self.num_heads, self.batch_first = layer.embed_dim, layer.num_heads, layer.batch_first
        self.in_proj_weight, self.in_proj_bias = layer.in_proj_weight, layer.in_proj_bias
        self.out_proj = _Output(layer.out_proj)
        self.drop = KeyedDropout(layer.dropout, number, by_channel=False)

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.in_proj_weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        single = query.dim() == 2
        if single:
            query, key, value = query[None], key[None], value[None]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        swapped = not (single or self.batch_first)
        if swapped:
            query, key, value = (part.transpose(0, 1) for part in (query, key, value))
        q, k, v = self._projected(query, key, value)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        if is_causal and attn_mask is None:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        if attn_mask is not None:  # of all, or of each example and head
            scores = _masked(scores, attn_mask if attn_mask.dim() == 2 else attn_mask.reshape(scores.shape))
        if key_padding_mask is not None:
            scores = _masked(scores, key_padding_mask[:, None, None])
        weights: Tensor = self.drop(scores.softmax(-1))
        out = self.out_proj((weights @ v).transpose(1, 2).flatten(2))
        out = out.transpose(0, 1) if swapped else out[0] if single else out
        if not need_weights:
            return out, None
        weights = weights.mean(1) if average_attn_weights else weights
        return out, weights[0] if single else weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Queries, keys and values of each head: (examples, heads, length, width)."""
        weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [
            F.linear(part, weight, bias).reshape(*part.shape[:2], self.num_heads, -1).transpose(1, 2)
            for part, weight, bias in zip((query, key, value), weights, biases, strict=True)
        ]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, heads={self.num_heads}, batch_first={self.batch_first}"


class _Output(nn.Linear):
    """A linear layer whose bias starts at zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self.bias is not None:
            nn.init.zeros_(self.bias)


def _masked(scores: Tensor, mask: Tensor) -> Tensor:
    """A mask of booleans excludes where it is true; one of numbers is added."""
    return scores.masked_fill(mask, -math.inf) if mask.dtype == torch.bool else scores + mask

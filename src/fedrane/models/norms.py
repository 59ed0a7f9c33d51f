"""The policy for normalisation layers, and the conversion of a user's network to layers that can follow it.

``shared``  running statistics, averaged over clients by sample ratio (the default);
``batch``   batch statistics, also at test: a prediction then depends on the rest of its batch;
``local``   the normalisation layers, statistics and affine parameters, stay with their client (FedBN, Li et al. 2021);
``group``   BatchNorm is replaced by GroupNorm, which has no statistics to share.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin

from fedrane.errors import ConfigError, nearest
from fedrane.models.attention import Attention
from fedrane.models.layers import KeyedDropout, MaskedBatchNorm

POLICIES = ("shared", "batch", "local", "group")
GROUPS = 32
_EMBEDDINGS = {
    "max_norm": "it rescales its parameters in place, beside the optimiser",
    "sparse": "a sparse gradient can be neither clipped nor stacked",
    "scale_grad_by_freq": "it counts padding",
}
"""Settings of an embedding that no engine could reproduce."""


def check_policy(policy: str) -> None:
    if policy not in POLICIES:
        raise ConfigError(f"norm={policy!r} is not a policy", remedy=nearest(policy, POLICIES))


def convert(module: nn.Module, part: str, policy: str) -> nn.Module:
    """The module with its BatchNorm and dropout layers replaced by ones that follow the policy and the batch's key."""
    check_policy(policy)
    sequence_first = [child for child in module.modules() if _is_sequence_first(child)]
    for layer, (path, child) in enumerate(list(module.named_modules())):
        new = _replacement(child, f"{part}.{path}" if path else part, layer, policy)
        if new is not None and path:
            parent, _, name = path.rpartition(".")
            setattr(module.get_submodule(parent), name, new)
        elif new is not None:
            module = new
    for child in sequence_first:
        for dropout in child.children():
            if isinstance(dropout, KeyedDropout):
                dropout.batch_axis = 1
    return module


def _is_sequence_first(layer: nn.Module) -> bool:
    """Whether what the dropout layers of a transformer's layer get is (length, examples, features)."""
    return (
        isinstance(layer, nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) and not layer.self_attn.batch_first
    )


def _replacement(layer: nn.Module, name: str, number: int, policy: str) -> nn.Module | None:
    if isinstance(layer, LazyModuleMixin):
        raise ConfigError(
            f"{name} is a lazy layer ({type(layer).__name__})",
            "its parameters have no shape until the first batch, so nothing could be initialised or sent",
            "Give its input size, or run one batch through the network before handing it over",
        )
    if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
        raise ConfigError(
            f"{name} is an InstanceNorm with running statistics",
            "these are not covered by any policy for sharing statistics",
            "Set track_running_stats=False on it",
        )
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        for setting, why in _EMBEDDINGS.items():
            if getattr(layer, setting):
                raise ConfigError(f"{name} ({type(layer).__name__}) has {setting}", why, f"Make it without {setting}")
    if isinstance(layer, nn.TransformerEncoder):
        layer.enable_nested_tensor = layer.use_nested_tensor = False  # a path of its own, which reads values
    if isinstance(layer, nn.MultiheadAttention) and not _is_unusual(layer):
        return Attention(layer, number)
    if isinstance(layer, nn.RNNBase | nn.MultiheadAttention | nn.AlphaDropout | nn.FeatureAlphaDropout):
        if getattr(layer, "dropout", getattr(layer, "p", 0)) > 0:
            raise ConfigError(
                f"{name} ({type(layer).__name__}) draws its own dropout masks",
                "they would come from torch's global generator, so a resumed run could not equal an uninterrupted one",
                "Set its dropout to 0, or put a plain nn.Dropout beside it",
            )
        return None
    if isinstance(layer, _DropoutNd):
        return KeyedDropout(layer.p, number, by_channel=not isinstance(layer, nn.Dropout))
    if isinstance(layer, _BatchNorm):
        return _normalisation(layer, name, policy)
    return None


def _is_unusual(layer: nn.MultiheadAttention) -> bool:
    """Whether it has more than projections of queries, keys and values of one width."""
    return layer.in_proj_weight is None or layer.bias_k is not None or layer.add_zero_attn


def _normalisation(layer: _BatchNorm, name: str, policy: str) -> nn.Module:
    if policy == "group":
        return nn.GroupNorm(_groups(layer), layer.num_features, layer.eps, layer.affine)
    if layer.momentum is None:
        raise ConfigError(
            f"{name} has momentum=None (a cumulative average)",
            "its count of batches cannot be averaged over clients",
            "Give it a momentum such as 0.1, or use norm=batch or norm=group",
        )
    if not layer.track_running_stats and policy != "batch":
        raise ConfigError(
            f"{name} has track_running_stats=False",
            f"norm={policy} needs running statistics for the test",
            "Use norm=batch (batch statistics also at test), norm=group, or track_running_stats=True",
        )
    new = MaskedBatchNorm(
        layer.num_features, layer.eps, layer.momentum, layer.affine, tracked=policy != "batch", name=name
    )
    dtype = next((tensor.dtype for tensor in layer.state_dict().values() if tensor.is_floating_point()), None)
    new.to(dtype)  # a network in double precision keeps its digits
    new.load_state_dict({key: value for key, value in layer.state_dict().items() if key in new.state_dict()})
    return new


def _groups(layer: _BatchNorm) -> int:
    """At most 32 groups, of at least four channels; one where there is no map to average over."""
    channels = layer.num_features
    if isinstance(layer, nn.BatchNorm1d):
        return 1
    return max(g for g in range(1, GROUPS + 1) if channels % g == 0 and (g == 1 or channels // g >= 4))


def norm_names(module: nn.Module, part: str) -> Iterator[str]:
    """The names of the parameters and statistics of the BatchNorm layers."""
    for path, child in module.named_modules():
        if isinstance(child, MaskedBatchNorm):
            for name in child.state_dict():
                yield ".".join(filter(None, (part, path, name)))

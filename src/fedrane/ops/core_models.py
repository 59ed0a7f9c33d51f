"""APPLE's core models: a client mixes them, and downloads all of the others' in a round, or some of them.

``down`` has the cores that were sent and their indices ``which``. With limited downloads the client state has the last
copy of each core and the count ``had`` of its downloads. Client hooks call these functions: no generator, no branch on
data.
"""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor

from fedrane import tree
from fedrane.data.noise import uniform
from fedrane.task import Client, Context
from fedrane.tree import Tensors

T = TypeVar("T")
MIN_BASE = 1.5
"""The lower bound of b in the weights b^|p| of a request: with less, early requests would hardly depend on p."""
STREAM = 1 << 20
"""Far beyond the number of any dropout layer, whose masks come from the same key."""


def copies(core: Tensors, count: int) -> Tensors:
    """``count`` stacked copies of a core, which take no memory until one of them is replaced."""
    return {name: value.expand(count, *value.shape) for name, value in core.items()}


def put(stacked: T, positions: Tensor, new: T) -> T:
    """A stack of trees with those at ``positions`` replaced."""
    return tree.map(lambda old, row: old.index_copy(0, positions, row), stacked, new)


def next_in_number(clients: Tensor, limit: int) -> Tensor:
    """For each client the indices of the ``limit`` clients after it, at most of all others."""
    numbers = torch.arange(len(clients), device=clients.device)
    return (numbers[:, None] + numbers[1 : limit + 1]) % len(clients)


def numbers(client: Client) -> Tensor:
    return torch.arange(client.population, device=client.index.device)


def others(client: Client) -> Tensor:
    """The indices of all other clients. Only for the server: the shape depends on values."""
    everybody = numbers(client)
    return everybody[everybody != client.index]


def mix(ctx: Context, core: Tensors, relation: Tensor) -> Tensors:
    """Σ_j p_j w_j over the client's core, those that were sent, and the last copies of the others."""
    which, fresh, kept = ctx.down.extra["which"], ctx.down.extra["cores"], ctx.client_state.extra.get("cores", {})
    received = torch.cat([ctx.client.index.reshape(1), which])
    weight, rest = relation.index_select(0, received[:1]), torch.where(_among(received, ctx.client), 0, relation)
    coefficients = relation.index_select(0, which)
    mixed = {name: weight * core[name].flatten() + coefficients @ stacked.flatten(1) for name, stacked in fresh.items()}
    mixed |= {name: mixed[name] + rest @ stacked.flatten(1) for name, stacked in kept.items()}
    return {name: value.reshape(core[name].shape) for name, value in mixed.items()}


def first(core: Tensors, client: Client) -> dict[str, Any]:
    """The client state before the first download: copies of the initial core."""
    return {"cores": copies(core, client.population), "had": torch.zeros_like(numbers(client))}


def keep(ctx: Context) -> dict[str, Any]:
    """The client's copies, updated with the cores that were sent, and how often each has been sent."""
    down, client_state = ctx.down.extra, ctx.client_state.extra
    return {
        "cores": put(client_state["cores"], down["which"], down["cores"]),
        "had": client_state["had"] + _among(down["which"], ctx.client),
    }


def next_request(ctx: Context, relation: Tensor, had: Tensor, key: Tensor) -> Tensor:
    """The cores to request next, as many as were sent: first those never sent, then at random with weights b^|p|."""
    client, count = ctx.client, len(ctx.down.extra["which"])
    base = (client.round.double() * count / client.population).clamp(min=MIN_BASE)
    # A core that was never sent precedes any weight: the noise of a draw stays within 20.
    logits = relation.abs().double() * base.log() + torch.where(had > 0, 0.0, 1e6)
    return draw(torch.where(numbers(client) == client.index, -torch.inf, logits), count, key)


def draw(logits: Tensor, count: int, key: Tensor) -> Tensor:
    """``count`` different positions, one after another by the softmax of the ``logits`` that are left.

    With Gumbel noise added, the largest logit is such a draw, and the ``count`` largest are ``count`` draws.
    """
    chance = uniform(key, STREAM, torch.arange(len(logits), device=logits.device)).double() + 2.0**-25  # never 0 or 1
    return (logits - torch.log(-torch.log(chance))).topk(count).indices


def _among(which: Tensor, client: Client) -> Tensor:
    """Of all clients' numbers, those that are in ``which``."""
    return (numbers(client)[:, None] == which).any(1)

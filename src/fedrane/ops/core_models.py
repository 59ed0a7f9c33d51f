"""Core models that clients mix, where all of the others' come down in a round or only some.

``down`` holds the cores that came and ``which`` they are; ``own``, where not all come, the last copy of each, and
how often each was ``had``. Mixing, keeping and choosing are for a client's hooks: no generator, no branch on data.
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
LEAST_BASE = 1.5
STREAM = 1 << 20
"""Far beyond the number of any dropout layer, whose masks come from the same key."""


def copies(core: Tensors, count: int) -> Tensors:
    """So many rows of one core, which take no memory until one of them is replaced."""
    return {name: value.expand(count, *value.shape) for name, value in core.items()}


def put(rows: T, positions: Tensor, new: T) -> T:
    """A stack of trees with some of its rows replaced."""
    return tree.map(lambda old, row: old.index_copy(0, positions, row), rows, new)


def next_in_number(clients: Tensor, limit: int) -> Tensor:
    """For each client the numbers of the ``most`` after it, or of all others where there are no more."""
    numbers = torch.arange(len(clients), device=clients.device)
    return (numbers[:, None] + numbers[1 : limit + 1]) % len(clients)


def numbers(client: Client) -> Tensor:
    return torch.arange(client.population, device=client.index.device)


def others(client: Client) -> Tensor:
    """All numbers but the client's own; for the server, since how many those are is read off."""
    everybody = numbers(client)
    return everybody[everybody != client.index]


def mix(ctx: Context, core: Tensors, relation: Tensor) -> Tensors:
    """Σ_j p_j w_j: the client's own core, those that came down, and of all others the last copies."""
    which, fresh, kept = ctx.down.extra["which"], ctx.down.extra["cores"], ctx.client_state.extra.get("cores", {})
    at_hand = torch.cat([ctx.client.index.reshape(1), which])
    weight, rest = relation.index_select(0, at_hand[:1]), torch.where(_among(at_hand, ctx.client), 0, relation)
    came = relation.index_select(0, which)
    mixed = {name: weight * core[name].flatten() + came @ rows.flatten(1) for name, rows in fresh.items()}
    mixed |= {name: mixed[name] + rest @ rows.flatten(1) for name, rows in kept.items()}
    return {name: value.reshape(core[name].shape) for name, value in mixed.items()}


def first(core: Tensors, client: Client) -> dict[str, Any]:
    """What a client keeps before any core has come: copies of the one that all start from."""
    return {"cores": copies(core, client.population), "had": torch.zeros_like(numbers(client))}


def keep(ctx: Context) -> dict[str, Any]:
    """The client's copies with those that came in their positions, and how often each has come by now."""
    down, client_state = ctx.down.extra, ctx.client_state.extra
    return {
        "cores": put(client_state["cores"], down["which"], down["cores"]),
        "had": client_state["had"] + _among(down["which"], ctx.client),
    }


def wish(ctx: Context, relation: Tensor, had: Tensor, key: Tensor) -> Tensor:
    """As many numbers as came down, for the next round: first those never had, then by chance with weights b^|p|."""
    client, count = ctx.client, len(ctx.down.extra["which"])
    base = (client.round.double() * count / client.population).clamp(min=LEAST_BASE)
    # No weight counts beside never having had a core; the noise of a draw stays within 20.
    logits = relation.abs().double() * base.log() + torch.where(had > 0, 0.0, 1e6)
    return draw(torch.where(numbers(client) == client.index, -torch.inf, logits), count, key)


def draw(logits: Tensor, count: int, key: Tensor) -> Tensor:
    """``count`` different positions, one after another by the softmax of the ``logits`` that are left.

    With Gumbel noise added the largest logit is such a draw, and the ``count`` largest are that many.
    """
    chance = uniform(key, STREAM, torch.arange(len(logits), device=logits.device)).double() + 2.0**-25  # never 0 or 1
    return (logits - torch.log(-torch.log(chance))).topk(count).indices


def _among(which: Tensor, client: Client) -> Tensor:
    """Of all clients' numbers, those that are in ``which``."""
    return (numbers(client)[:, None] == which).any(1)

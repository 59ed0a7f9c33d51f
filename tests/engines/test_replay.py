"""A replay of a recording does what the work itself would do."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedrane
from asserts import close
from fedrane.engines import replay
from fedrane.engines.replay import Recording
from fedrane.methods import METHODS
from fedrane.task import State
from fedrane.testing import conformance

RECURRENT = nn.GRU(4, 4, batch_first=True)


def with_gradient(x: Tensor) -> Tensor:
    point = (x + 1).detach().requires_grad_()
    return torch.autograd.grad((point @ point).tanh().sum(), point)[0]


def running_mean(x: Tensor) -> Tensor:
    mean, var = torch.zeros(4), torch.ones(4)
    F.batch_norm(x, mean, var, training=True)
    return x * 0 + mean


VALUES: dict[str, Callable[[Tensor], Tensor]] = {
    "views": lambda x: x.T.reshape(-1)[1:].view(-1, 1).sum(0).expand(4, 4),
    "in place": lambda x: torch.zeros_like(x).add_(x).mul_(2),
    "in place through a view": lambda x: (lambda full: (full[1:].add_(x[1:]), full)[1])(torch.ones(4, 4)),
    "several results": lambda x: torch.linalg.qr(x + torch.eye(4) * 4)[1],
    "without a place to write to": lambda x: x.to(torch.float64).to(torch.float32),
    "numbers as positions": lambda x: x[(x[0] * 0).long()],
    "a choice by element": lambda x: torch.where(x > 0, x, -x),
    "a norm of what has gaps": lambda x: F.batch_norm(x.repeat(2, 2)[:, ::2], None, None, training=True)[:4],
    "a mask that is written through": lambda x: x.clone().masked_fill_(x > 0, 1.0),
    "turned in place": lambda x: (x + 1).t_() * torch.arange(4.0),
    "longer in place": lambda x: (x @ x).unsqueeze_(0).sum(1).expand(4, 4),
    "turned by the library": lambda x: RECURRENT(x.detach()[:, :, None].expand(4, 4, 4))[0].detach()[:, :, 0],
    "a spectrum": lambda x: (
        torch.stft(x.reshape(1, 16), 4, 2, window=torch.ones(4), return_complex=True).abs()[0, :1, :4].expand(4, 4)
    ),
    "a quantile": lambda x: x * torch.quantile(x, 0.5),
    "gradients of its own": with_gradient,
    "running statistics of a constant": running_mean,
    "a constant of Python": lambda x: x * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "a list of one": lambda x: torch._foreach_mul([x], 2.0)[0],
}
ASKED: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: x * float(x.sum()),
    "a branch": lambda x: x if x.sum() > 0 else -x,
    "a list": lambda x: x * x.flatten().tolist()[0],
    "an array": lambda x: x * float(x.numpy()[0, 0]),
    "where": lambda x: x + torch.nonzero(x > 0).sum(),
    "a mask": lambda x: x + x[x > 0].sum(),
    "a list of numbers": lambda x: x * torch.tensor([x.sum(), x.max()]).sum(),
    "a list of numbers, otherwise": lambda x: x * x.new_tensor([x.sum()]) * torch.as_tensor([x.max()]),
    "a list of numbers, as it once was": lambda x: x * torch.FloatTensor([x.sum()]),
    "another library's array": lambda x: x * float(np.from_dlpack(x)[0, 0]),
    "chance from a seed": lambda x: x * torch.randn(4, 4, generator=torch.Generator().manual_seed(0)).mul_(0.1),
    "a draw from a seed": lambda x: torch.bernoulli(x.sigmoid(), generator=torch.Generator().manual_seed(0)),
    "conjugates": lambda x: (torch.complex(x + 1, x).mH @ torch.complex(x, x - 1)).imag,
    "zeros left out": lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x),
    "memory that changes hands": lambda x: torch.zeros(4, 4).set_(x * 2) + 0,
}


@pytest.mark.parametrize("name", VALUES | ASKED)
def test_a_recording_gives_what_the_work_gives_for_any_numbers(name: str) -> None:
    what: Callable[[Tensor], Tensor] = (VALUES | ASKED)[name]
    x, out = torch.zeros(4, 4), torch.zeros(4, 4)
    recorded = Recording(lambda: out.copy_(what(x)), [out])
    for seed in range(3):
        x.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)))
        recorded.replay()
        assert torch.equal(out, what(x))
    assert bool(recorded.calls) == (name in VALUES)


def program(seed: int, x: Tensor) -> Tensor:
    """A random one, in which values are read again much later, turned, in parts, or never."""
    pick = random.Random(seed).randrange  # noqa: S311 - not a secret

    def one() -> Tensor:
        return values[max(0, len(values) - 1 - pick(6))]

    values = [x, x + 1]
    makers: list[Callable[[], Tensor]] = [
        lambda: one() + one(),
        lambda: torch.relu(one()),
        lambda: one() * 0.5,
        lambda: torch.where(one() > 0, one(), one().T),
        lambda: one() @ one() / 4,
        lambda: one().T,
        lambda: one()[1:].sum(0).expand(4, 4),
        lambda: torch.cat([one()[:2], one()[2:]]),
        lambda: one().clone().add_(one()),
        lambda: one().clone()[:2].mul_(2).repeat(2, 1),
        lambda: torch.linalg.qr(one())[0] + one()[:1],
        lambda: (torch.eye(4) + torch.ones(4).cumsum(0)) * one(),
        lambda: (torch.zeros(4, 4) + torch.eye(4)).add_(one()) + torch.eye(4),
    ]
    for _ in range(25):
        values.append(torch.tanh(makers[pick(len(makers))]()))
    return one() + one() + values[pick(len(values))]


@pytest.mark.parametrize("seed", range(60))
def test_memory_that_is_used_again_is_seen_by_nobody(seed: int) -> None:
    x, out = torch.zeros(4, 4), torch.zeros(4, 4)
    recorded = Recording(lambda: out.copy_(program(seed, x)), [out])
    for number in range(3):
        x.copy_(torch.randn(4, 4, generator=torch.Generator().manual_seed(number)))
        recorded.replay()
        assert torch.equal(out, program(seed, x))
    assert recorded.calls


def test_a_long_chain_needs_little_memory() -> None:
    x, out = torch.ones(64), torch.zeros(64)

    def chain() -> None:
        y = x
        for _ in range(50):
            y = (y * 1.01).cumsum(0) / 64
        out.copy_(y)

    recorder = replay._Recorder({replay.storage(out)})
    with recorder:
        chain()
    calls = replay._reuse_memory(replay._without_copies(recorder.calls), {replay.storage(out)})
    assert len({replay.storage(value) for call in calls for value in call.outputs}) <= 2


def test_what_depends_on_constants_alone_is_computed_once() -> None:
    x, out = torch.zeros(4, 4), torch.zeros(4, 4)

    def work() -> None:
        mask = torch.ones(4, 4, dtype=torch.bool) & ~torch.eye(4, dtype=torch.bool)
        out.copy_(x * (mask.to(x.dtype) / mask.sum()))

    recorded = Recording(work, [out])
    for number in range(3):
        x.fill_(number)
        recorded.replay()
        assert torch.equal(out, number * (1 - torch.eye(4)) / 12)
    assert recorded.calls is not None
    assert len(recorded.calls) == 2


UPDATES: dict[str, tuple[int, Callable[[Tensor, Tensor], list[Tensor]]]] = {
    "element by element": (0, lambda x, y: [x + 1, y * 2]),
    "each other": (1, lambda x, y: [y + 1, x + 1]),
    "read once more": (1, lambda x, y: [x + 1, (x * 3).sum() + y]),
    "made of a new one": (1, lambda x, y: (lambda new: [new, new * y])(x + 1)),
    "turned": (1, lambda x, y: [x + x.T, y + 1]),
    "a product": (1, lambda x, y: [x @ x, y + 1]),
    "a part": (1, lambda x, y: [(x + 1)[:1].expand(4, 4), y + 1]),
    "the same one twice": (2, lambda x, y: (lambda new: [new, new])(x + 1)),
    "left as it is": (2, lambda x, y: [x, y]),
    "another buffer": (2, lambda x, y: [y, (y * 2).sin()]),
}


@pytest.mark.parametrize("name", UPDATES)
def test_new_values_take_the_place_of_the_old_ones(name: str) -> None:
    """Directly where that makes no difference, else by a copy of the buffers."""
    copies, new = UPDATES[name]
    kept, recomputed = (
        [torch.randn(4, 4, generator=torch.Generator().manual_seed(k)) for k in (0, 1)] for _ in range(2)
    )
    recorded = Recording(lambda: torch._foreach_copy_(kept, new(*kept)), kept)
    for _ in range(3):
        recorded.replay()
        recomputed = [value.clone() for value in new(*recomputed)]
        assert all(torch.equal(a, b) for a, b in zip(kept, recomputed, strict=True))
    left: list[Any] = [call for call in recorded.calls or [] if "_foreach_copy_" in str(getattr(call, "func", ""))]
    assert sum(len(call.args[0]) for call in left) == copies


def test_what_would_keep_too_much_is_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = conformance.trained(METHODS["scaffold"].cls(), engine="stacked")
    monkeypatch.setattr(replay, "MAX_RECORDED_BYTES", 0)
    recomputed = conformance.trained(METHODS["scaffold"].cls(), engine="stacked")
    close(conformance.states(kept), conformance.states(recomputed), 1e-12)


class AsksOfWhatIsShared(fedrane.Algorithm):
    """Reads a number off the server's model, which is the same for all clients, so a stack has it as well."""

    def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
        loss, outcome = super().objective(task, ctx, model, batch)
        down: State = ctx.down
        return loss * (1 + down.model.params["head.weight"].abs().sum().tolist()), outcome


def test_a_number_asked_for_is_that_of_its_round() -> None:
    one, other = (conformance.trained(AsksOfWhatIsShared(), engine=engine) for engine in ("sequential", "stacked"))
    close(conformance.states(one), conformance.states(other), 1e-12)

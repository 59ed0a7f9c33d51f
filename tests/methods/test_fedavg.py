"""FedAvg's laws: what it equals, and what must not change it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from asserts import close, same_bytes
from fedrane.data.federation import Federation
from fedrane.engines.sequential import Sequential
from fedrane.methods.fedavg import FedAvg
from fedrane.ops.sgd import SGD
from fedrane.task import Batch, Client, Model, State
from problems import DOUBLE, dense, federation, table


def one_round(
    fed: Federation, server: State, round: int, lr: float, epochs: int = 1, order: list[int] | None = None
) -> State:
    engine = Sequential(FedAvg(), fed)
    sent = engine.train_round(server, {}, order or list(range(fed.population)), round, lr, epochs)
    return FedAvg().aggregate(fed.task, server, sent.ups, sent.cohort)[0]


def first(fed: Federation) -> State:
    return FedAvg().init(fed.task, fed.roster)


def as_module(state: State) -> nn.Sequential:
    """The same network as an ordinary module."""
    module = dense((6,), 3).double()
    values = {name.removeprefix("body.").replace("head.", "2."): value for name, value in state.model.params.items()}
    module.load_state_dict(values)
    assert isinstance(module, nn.Sequential)
    return module


def parameters(module: nn.Module) -> dict[str, Tensor]:
    named = {
        name.replace("2.", "head.") if name[0] == "2" else f"body.{name}": p for name, p in module.named_parameters()
    }
    return {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize("cuts", [[1, 2], [40, 41, 119], [10, 20, 30, 40], []], ids=str)
def test_a_full_batch_step_is_centralised_gradient_descent(cuts: list[int]) -> None:
    """For any partition, one full-batch step is one step on the pooled examples."""
    data = table(120)
    order = np.random.default_rng(1).permutation(120)
    fed = federation(data, [part.tolist() for part in np.split(order, cuts)])
    server = first(fed)
    module = as_module(server)
    x, y = fed.train.take(np.arange(120))
    for round in range(1, 6):
        server = one_round(fed, server, round, 0.3)
        module.zero_grad()
        F.cross_entropy(module(x), y).backward()
        with torch.no_grad():
            for p in module.parameters():
                p -= 0.3 * p.grad
    close(server.model.params, parameters(module), 1e-12)


@pytest.mark.parametrize("sgd", [SGD(), SGD(0.9, 1e-2), SGD(0.5, 0.0, clip=0.05)], ids=str)
def test_one_client_is_plain_sgd(sgd: SGD) -> None:
    """One client is torch's SGD on the same batches, with momentum reset in each round."""
    fed = federation(table(50), [list(range(50))], batch=16, sgd=sgd)
    server = first(fed)
    module = as_module(server)
    for round in (1, 2):
        server = one_round(fed, server, round, 0.1, epochs=2)
        optimiser = torch.optim.SGD(module.parameters(), 0.1, sgd.momentum, weight_decay=sgd.weight_decay)
        plan = fed.batches(round, [0], 2)[0]
        for examples, mask in zip(plan.examples, plan.mask, strict=True):
            x, y = fed.train.take(fed.split.train[0][examples[mask]])
            optimiser.zero_grad()
            F.cross_entropy(module(x), y).backward()
            if sgd.clip:
                nn.utils.clip_grad_norm_(module.parameters(), sgd.clip)
            optimiser.step()
    close(server.model.params, parameters(module), 1e-12)


def normalised(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, classes))


def test_one_client_with_batchnorm_is_plain_sgd() -> None:
    """Its running statistics too, updated in every step."""
    fed = federation(table(50), [list(range(50))], normalised, "3", batch=16)
    server = first(fed)
    module = normalised((6,), 3).double()
    assert isinstance(module, nn.Sequential)
    values = {**server.model.params, **server.model.stats}
    renamed = {name.removeprefix("body.").replace("head.", "3."): value.clone() for name, value in values.items()}
    module.load_state_dict(renamed, strict=False)
    for round in (1, 2):
        server = one_round(fed, server, round, 0.1, epochs=2)
        optimiser = torch.optim.SGD(module.parameters(), 0.1)
        for batch in Sequential(FedAvg(), fed).batches(0, round, 2):
            optimiser.zero_grad()
            F.cross_entropy(module(batch.x), batch.y).backward()
            optimiser.step()
    theirs = module.state_dict()
    close(server.model.params["body.0.weight"], theirs["0.weight"], 1e-12)
    close(server.model.params["head.bias"], theirs["3.bias"], 1e-12)
    close(server.model.stats, {f"body.1.{n}": theirs[f"1.{n}"] for n in ("running_mean", "running_var")}, 1e-12)


def test_the_recorded_loss_is_the_mean_over_rows() -> None:
    """Not over batches: the last one is shorter. At lr 0, so that the model is the same in all of them."""
    fed = federation(table(50), [list(range(21)), list(range(21, 50))], batch=8)
    server = first(fed)
    sent = Sequential(FedAvg(), fed).train_round(server, {}, [0, 1], 1, 0.0, 2)
    for k in (0, 1):
        x, y = fed.train.take(fed.split.train[k])
        expected = float(F.cross_entropy(as_module(server)(x), y).detach())
        assert sent.metrics["loss"][k] == pytest.approx(expected, rel=1e-12)


def test_the_order_of_clients_is_irrelevant() -> None:
    """To the last bit: uploads are aggregated in the order of client numbers, not of arrival."""
    fed = federation(table(60), [list(range(10)), list(range(10, 35)), list(range(35, 60))], batch=8)
    server, engine = first(fed), Sequential(FedAvg(), fed)
    one, other = (engine.train_round(server, {}, order, 1, 0.1, 2) for order in ([0, 1, 2], [2, 0, 1]))
    same_bytes(one.ups, other.ups)
    assert other.cohort.index.tolist() == [0, 1, 2]
    assert other.cohort.size.tolist() == [10, 25, 25]
    same_bytes(one_round(fed, server, 1, 0.1, 2, [0, 1, 2]), one_round(fed, server, 1, 0.1, 2, [2, 0, 1]))


def aggregated(base: Tensor, examples: Tensor, sizes: list[int]) -> Tensor:
    server = State(Model({"w": base}, {}), {})
    size = torch.tensor(sizes)
    cohort = Client(torch.arange(len(sizes)), size, None, size, size, size.double(), len(sizes))
    fed = federation(table(9), [[0], [1]])
    return FedAvg().aggregate(fed.task, server, State(Model({"w": examples}, {}), {}), cohort)[0].model.params["w"]


def test_a_client_of_weight_zero_changes_nothing() -> None:
    """Not even with NaN in its upload."""
    base, examples = torch.randn(4, dtype=DOUBLE), torch.randn(3, 4, dtype=DOUBLE)
    expected = aggregated(base, examples[:2], [5, 7])
    examples[2] = float("nan")
    same_bytes({"w": aggregated(base, examples, [5, 7, 0])}, {"w": expected})
    same_bytes({"w": aggregated(base, examples[2:], [0])}, {"w": base})


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 10**6), min_size=1, max_size=30),
    st.integers(0, 10**6),
    st.sampled_from([torch.float32, DOUBLE]),
)
def test_uploads_equal_to_the_model_leave_it(sizes: list[int], seed: int, dtype: torch.dtype) -> None:
    """To the last bit, in either precision."""
    base = torch.randn(17, generator=torch.Generator().manual_seed(seed), dtype=dtype) * 1e3
    same_bytes({"w": aggregated(base, base.expand(len(sizes), -1), sizes)}, {"w": base})


def test_the_mean_is_weighted_by_samples() -> None:
    """Against the explicit formula."""
    base, examples = torch.randn(4, dtype=DOUBLE), torch.randn(3, 4, dtype=DOUBLE)
    expected = (1 * examples[0] + 2 * examples[1] + 7 * examples[2]) / 10
    close({"w": aggregated(base, examples, [1, 2, 7])}, {"w": expected}, 1e-14)


def test_statistics_are_averaged_by_samples() -> None:
    """BatchNorm's running statistics of all clients, not of the first."""
    fed = federation(table(40), [list(range(10)), list(range(10, 40))], normalised, "3")
    server = first(fed)
    sent = Sequential(FedAvg(), fed).train_round(server, {}, [0, 1], 1, 0.1, 1)
    after = FedAvg().aggregate(fed.task, server, sent.ups, sent.cohort)[0].model.stats
    for name, examples in sent.ups.model.stats.items():
        close({name: after[name]}, {name: 0.25 * examples[0] + 0.75 * examples[1]})
    assert len(after) == len(sent.ups.model.stats) == 2


def test_a_padded_last_batch_trains_as_if_it_were_not() -> None:
    """A client's whole round, with padding and without, with BatchNorm and without."""
    for norm in (nn.BatchNorm1d(4), nn.Identity()):

        def network(shape: tuple[int, ...], classes: int, norm: nn.Module = norm) -> nn.Module:
            return nn.Sequential(nn.Linear(shape[0], 4), norm, nn.ReLU(), nn.Linear(4, classes))

        fed = federation(table(50), [list(range(21)), list(range(21, 50))], network, "3", batch=8, sgd=SGD(0.9))
        engine, method, server = Sequential(FedAvg(), fed), FedAvg(), first(fed)
        ctx = engine.context(server, None, fed.client(0, 1, 0.1, 3))
        cut = engine.train_client(ctx, 0, 1, 3)
        work = method.begin(fed.task, ctx)
        for batch in masked_batches(fed, 0, 1, 3):
            work = method.step(fed.task, ctx, work, batch)
        close(cut._asdict(), method.finish(fed.task, ctx, work)._asdict(), 1e-12)


def masked_batches(fed: Federation, client: int, round: int, epochs: int) -> list[Batch]:
    plan = fed.batches(round, [client], epochs)[client]
    assert not plan.mask.all()
    batches = []
    for examples, mask, key in zip(plan.examples, plan.mask, plan.keys, strict=True):
        x, y = fed.train.take(fed.split.train[client][examples])
        batches.append(Batch(x, y, torch.from_numpy(mask), torch.tensor(key)))
    return batches

"""APPLE: both gradients against finite differences; cores are sent, relations are not; downloads can be limited."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import fedrane
from asserts import close, same_bytes
from fedrane import tree
from fedrane.data.federation import Federation
from fedrane.engines import Trained
from fedrane.engines.sequential import Sequential
from fedrane.errors import ConfigError
from fedrane.methods.apple import APPLE
from fedrane.ops import core_models
from fedrane.task import Client, State, Task
from fedrane.testing import conformance
from problems import DOUBLE, federation, quick, slow_except, table

SIZES = (10, 20, 15, 25)


def four_clients() -> Federation:
    ends = [sum(SIZES[: k + 1]) for k in range(4)]
    return federation(table(70), [list(range(end - size, end)) for size, end in zip(SIZES, ends, strict=True)])


def after(method: APPLE, fed: Federation, rounds: int) -> tuple[State, dict[int, State], Trained]:
    """The state after some rounds with half the clients, and what the last of them sent."""
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    for round in range(1, rounds + 1):
        sent = Sequential(method, fed).train_round(
            server, client_states, [round % 4, (round + 2 + round // 4) % 4], round, 0.3, 2
        )
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states
    return server, client_states, sent


@pytest.mark.parametrize(("core_lr", "downloads"), [(1.0, 0), (3.0, 0), (1.0, 1)])
def test_one_step_goes_down_the_gradient_of_the_papers_objective(core_lr: float, downloads: int) -> None:
    """In core and relation, against central differences of an independent F; later cores are stale copies."""
    fed = four_clients()
    method = APPLE(0.01, strength=5.0, schedule="cosine", horizon=40, downloads=downloads, core_lr=core_lr)
    server, client_states, _ = after(method, fed, 5)
    k, engine = 1, Sequential(method, fed)
    ctx = engine.context(server, client_states[k], fed.client(k, 6, 0.1, 1))
    batch = next(engine.batches(k, 6, 1))
    work = method.begin(fed.task, ctx)
    stepped = method.step(fed.task, ctx, work, batch)
    rows = dict(ctx.client_state.extra["cores"] if downloads else server.extra["cores"])
    for position, j in enumerate(ctx.down.extra["which"].tolist()):
        rows = {
            name: v.index_copy(0, torch.tensor([j]), ctx.down.extra["cores"][name][[position]])
            for name, v in rows.items()
        }
    focus = (1 + torch.cos(torch.tensor(torch.pi * 5 / 40, dtype=DOUBLE))) / 2

    def objective(core: dict[str, Tensor], relation: Tensor) -> Tensor:
        mixed = {
            name: sum(relation[j] * (core[name] if j == k else v[j]) for j in range(4)) for name, v in rows.items()
        }
        hidden = torch.tanh(batch.x @ mixed["body.0.weight"].T + mixed["body.0.bias"])
        scores = hidden @ mixed["head.weight"].T + mixed["head.bias"]
        prior = torch.tensor(SIZES, dtype=DOUBLE) / sum(SIZES)
        return F.cross_entropy(scores, batch.y) + focus * 5.0 / 2 * (relation - prior).square().sum()

    here, relation, step = work.model.params, work.extra["relation"], 1e-5
    for j in range(4):
        nudge = step * F.one_hot(torch.tensor(j), 4).double()
        expected = (objective(here, relation + nudge) - objective(here, relation - nudge)) / (2 * step)
        torch.testing.assert_close((relation - stepped.extra["relation"])[j] / 0.01, expected, rtol=1e-6, atol=1e-8)
    for name, value in here.items():
        for position in range(0, value.numel(), 3):
            nudge = torch.zeros_like(value).flatten().index_fill(0, torch.tensor(position), step).reshape(value.shape)
            up, down = ({**here, name: value + sign * nudge} for sign in (1, -1))
            expected = core_lr * (objective(up, relation) - objective(down, relation)) / (2 * step)
            gradient = (value - stepped.model.params[name]).flatten()[position] / 0.1
            torch.testing.assert_close(gradient, expected, rtol=1e-6, atol=1e-8)


def test_cores_go_up_and_the_mix_as_trained_predicts() -> None:
    """The prediction uses the new relation, the client's new core, and the other cores of the last round."""
    fed, method = four_clients(), APPLE(coefficient_lr=0.05)
    server, client_states, _ = after(method, fed, 6)
    sent = Sequential(method, fed).train_round(server, client_states, [0, 3], 7, 0.3, 2)
    aggregated, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    assert sent.ups.extra == {}, "the relation does not leave"
    for row, k in enumerate((0, 3)):
        core, client_state = tree.row(sent.ups.model.params, row), sent.client_states[k]
        same_bytes(core, client_state.extra["core"])
        same_bytes(core, tree.row(aggregated.extra["cores"], k))
        personal = Sequential(method, fed).personal(aggregated, client_state, k, 8).params
        assert float(tree.norm(tree.sub(core, personal))) > 1e-3
        trained_on = {
            name: rows.index_copy(0, torch.tensor([k]), core[name][None])
            for name, rows in server.extra["cores"].items()
        }
        close(
            personal,
            {name: torch.tensordot(client_state.extra["relation"], rows, 1) for name, rows in trained_on.items()},
        )


def test_a_client_that_never_took_part_predicts_with_its_start() -> None:
    """The mix of all cores by p0; with limited downloads, the initial model."""
    for downloads in (0, 1):
        fed, method = four_clients(), APPLE(downloads=downloads)
        server, _, _ = after(method, fed, 2)
        engine, who = Sequential(method, fed), fed.client(1, 3, 0.1, 1)
        personal = engine.personal(server, None, 1, 3).params
        mixed = {name: torch.tensordot(server.extra["prior"], v, 1) for name, v in server.extra["cores"].items()}
        close(personal, server.model.params if downloads else mixed)
        start = method.begin(fed.task, engine.context(server, None, who)).model.params
        same_bytes(start, tree.row(server.extra["cores"], 1))


def test_nobody_sees_this_rounds_cores() -> None:
    """A client's training does not depend on which others take part."""
    fed, method = four_clients(), APPLE()
    server, client_states, _ = after(method, fed, 4)
    engine = Sequential(method, fed)
    together, alone = (engine.train_round(server, client_states, clients, 5, 0.3, 2) for clients in ([0, 1, 2, 3], [2]))
    same_bytes(together.client_states[2], alone.client_states[2])
    same_bytes(tree.row(together.ups, 2), tree.row(alone.ups, 0))


def test_absent_clients_cores_stay_at_the_server() -> None:
    fed, method = four_clients(), APPLE(downloads=2)
    server, client_states, _ = after(method, fed, 3)
    sent = Sequential(method, fed).train_round(server, client_states, [0, 3], 4, 0.3, 1)
    aggregated, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
    for k in range(4):
        stayed = tree.equal(tree.row(aggregated.extra["cores"], k), tree.row(server.extra["cores"], k))
        assert stayed == (k in (1, 2))
        assert k in (0, 3) or tree.equal(aggregated.extra["wanted"][k], server.extra["wanted"][k])


@pytest.mark.parametrize(("schedule", "half"), [("cosine", 0.5), ("exponential", 0.001**0.5)])
def test_the_penalty_fades_out(schedule: str, half: float) -> None:
    """λ = 1 in the first round, the paper's formula half way, and 0 from round L + 1 on."""
    method, fed = APPLE(schedule=schedule, horizon=10), four_clients()
    values = [float(method._focus(fed.client(0, round, 0.1, 1))) for round in (1, 6, 10, 11, 500)]
    assert values[:2] == pytest.approx([1.0, half])
    assert 0 < values[2] < half
    assert values[3:] == [0.0, 0.0]


@dataclass(frozen=True)
class Apart(APPLE):
    """Every client mixes only its own core."""

    def join(self, task: Task, server: State, client: Client) -> State:
        client_state = super().join(task, server, client)
        mine = (torch.arange(client.population) == client.index).to(task.dtype)
        return client_state._replace(extra={**client_state.extra, "relation": mine})


@pytest.mark.filterwarnings("ignore:APPLE with method.coefficient_lr=0")
def test_a_client_that_mixes_its_own_core_alone_trains_locally() -> None:
    settings = {"rounds": 3, "clients": 6, "participation": 0.5, "momentum": 0.5, "precision": "float64"}
    alone, apart = (fedrane.run(quick(method=method, **settings)) for method in ("local", Apart(coefficient_lr=0.0)))
    for k, client_state in alone.client_states.items():
        same_bytes(apart.client_states[k].model, client_state.model)


def test_a_fixed_relation_gives_a_warning() -> None:
    """All clients then start every round from the same mix."""
    with pytest.warns(UserWarning, match="all mix equally"):
        method = APPLE(coefficient_lr=0.0)
    fed = four_clients()
    server, client_states, _ = after(method, fed, 5)
    starts = []
    for k in (0, 3):
        ctx = Sequential(method, fed).context(server, client_states[k], fed.client(k, 6, 0.1, 1))
        starts.append(core_models.mix(ctx, ctx.client_state.extra["core"], ctx.client_state.extra["relation"]))
    close(*starts)


def test_it_starts_as_the_average_by_rows() -> None:
    fed, method = four_clients(), APPLE()
    client_state = method.join(fed.task, method.init(fed.task, fed.roster), fed.client(2, 1, 0.1, 1))
    torch.testing.assert_close(client_state.extra["relation"], torch.tensor(SIZES, dtype=DOUBLE) / sum(SIZES))


def test_relations_learn_whom_to_trust() -> None:
    """Two pairs of clients with contradicting labels: each learns larger weights for its own pair."""
    data = table(120)
    turned = torch.tensor([1, 2, 0]).numpy()[data.y]
    half = len(data.y) // 2
    data.y[half:] = turned[half:]
    fed = federation(data, [list(range(30)), list(range(30, 60)), list(range(60, 90)), list(range(90, 120))], batch=10)
    method = APPLE(coefficient_lr=0.02, core_lr=4.0)
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    for round in range(1, 31):
        sent = Sequential(method, fed).train_round(server, client_states, [0, 1, 2, 3], round, 0.3, 2)
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states
    for k, kin in ((0, 1), (1, 0), (2, 3), (3, 2)):
        relation = client_states[k].extra["relation"]
        assert all(relation[j] < min(relation[k], relation[kin]) for j in range(4) if j not in (k, kin))


@pytest.mark.parametrize("downloads", [1, 2])
def test_only_so_many_cores_come_down(downloads: int) -> None:
    """In bytes and in the tree: M cores, their numbers and p0; without a limit all other cores."""
    for limit, expected in ((downloads, downloads), (0, 4)):
        result = fedrane.run(quick(method=APPLE(downloads=limit), clients=5, rounds=2))
        core = tree.nbytes(tree.row(result.server.extra["cores"], 0))
        ctx = Sequential(result.algorithm, result.federation).context(
            result.server, result.client_states[3], result.federation.client(3, 3, 0.1, 1)
        )
        assert tree.nbytes(ctx.down) == expected * (core + 8) + 5 * 4
        assert 3 not in ctx.down.extra["which"].tolist()
        for record in result.history:
            assert record["bytes_down"] == 5 * tree.nbytes(ctx.down)
            assert record["bytes_up"] == 5 * (core + 8 * limit)


def test_the_mix_takes_the_last_copy_of_what_did_not_come() -> None:
    """Compared with a separate record of the last copy of each core that each client received."""
    fed, method = four_clients(), APPLE(downloads=1)
    server, client_states = method.init(fed.task, fed.roster), dict[int, State]()
    first = tree.row(server.extra["cores"], 0)
    book = {k: dict.fromkeys(range(4), first) for k in range(4)}
    for round in range(1, 9):
        cohort = [0, 1, 2, 3] if round % 3 else [1, 2]
        for k in cohort:
            which = int(method.send(fed.task, server, fed.client(k, round, 0.1, 1)).extra["which"])
            assert round > 3 or k in (0, 3) or book[k][which] is first, "those never had come first"
            book[k][which] = tree.row(server.extra["cores"], which)
        sent = Sequential(method, fed).train_round(server, client_states, cohort, round, 0.3, 1)
        for row, k in enumerate(cohort):
            client_state = sent.client_states[k]
            book[k][k] = tree.row(sent.ups.model.params, row)
            for j in set(range(4)) - {k}:
                same_bytes(tree.row(client_state.extra["cores"], j), book[k][j])
        server, _ = method.aggregate(fed.task, server, sent.ups, sent.cohort)
        client_states |= sent.client_states
    assert all(sorted(client_states[k].extra["had"].bool().tolist()) == [False, True, True, True] for k in range(4))


@pytest.mark.parametrize("law", slow_except(["it_learns"], [law.__name__ for law in conformance.LAWS]))
def test_with_limited_downloads_it_keeps_every_law(law: str) -> None:
    assert conformance.check(APPLE(downloads=2), getattr(conformance, law)) is None


def test_a_limit_that_does_not_bind_changes_nothing() -> None:
    runs = [conformance.trained(APPLE(downloads=limit), rounds=4, participation=0.6) for limit in (0, 4, 100)]
    for other in runs[1:]:
        close(other.server.extra["cores"], runs[0].server.extra["cores"])


@pytest.mark.parametrize("settings", [{"core_lr": 0.0}, {"horizon": 0}, {"schedule": "linear"}, {"downloads": -1}])
def test_what_has_no_meaning_is_refused(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        APPLE(**settings)  # type: ignore[arg-type]

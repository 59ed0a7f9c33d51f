"""The gate lets what is honest through to the last bit, and holds back what is not."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from asserts import same_bytes
from fedrane import Gate, Model, State, tree
from fedrane.errors import ConfigError
from fedrane.ops.gate import admit, objection
from fedrane.task import Client

SERVER = State(Model({"w": torch.full((3, 4), 0.5), "b": torch.zeros(())}, {"mean": torch.ones(2)}), {"control": {}})
REFUSE, CLIP = Gate("refuse"), Gate("clip")


def cohort(*sizes: int) -> Client:
    index = torch.arange(len(sizes))
    return Client(index, torch.tensor(sizes), None, index, index, index.double(), len(sizes))


def uploads(**changed: float) -> State:
    """Of five clients; ``changed`` multiplies a part of the last one's."""
    draws = torch.Generator().manual_seed(3)

    def some(*shape: int) -> torch.Tensor:
        return 0.1 * torch.randn((5, *shape), generator=draws)

    ups = State(
        Model({"w": 0.5 + some(3, 4), "b": some()}, {"mean": 1 + some(2)}),
        {"control": {"w": some(3, 4)}, "which": torch.arange(5)},
    )
    for name, factor in changed.items():
        part: Any = {"w": ups.model.params, "mean": ups.model.stats, "control": ups.extra["control"]}[name]
        leaf = part["w" if name == "control" else name]
        leaf[-1] *= factor
    return ups


@pytest.mark.parametrize("gate", [REFUSE, CLIP], ids=lambda gate: gate.kind)
def test_honest_uploads_pass_to_the_last_bit(gate: Gate) -> None:
    passed = admit(gate, SERVER, uploads(), cohort(5, 9, 7, 30, 4))
    assert not passed.refused
    assert not passed.clipped
    same_bytes(passed.ups, uploads())


@pytest.mark.parametrize("factor", [1e30, -10, 1e3, math.inf, math.nan])
@pytest.mark.parametrize("part", ["w", "mean", "control"])
def test_an_outlier_is_refused_alone(part: str, factor: float) -> None:
    factor *= 20 if part == "control" else 1
    passed = admit(REFUSE, SERVER, uploads(**{part: factor}), cohort(5, 5, 5, 5, 5))
    assert list(passed.refused) == [4]


@pytest.mark.parametrize("part", ["w", "mean", "control"])
def test_a_clipped_outlier_is_at_the_bound_and_the_others_are_as_they_came(part: str) -> None:
    sent = uploads(**{part: 1e30})
    passed = admit(CLIP, SERVER, sent, cohort(5, 5, 5, 5, 5))
    assert list(passed.clipped) == [4]
    assert not passed.refused
    same_bytes(tree.map(lambda leaf: leaf[:4], passed.ups), tree.map(lambda leaf: leaf[:4], sent))
    clipped = tree.map(lambda leaf: leaf.double(), passed.ups)
    again = admit(Gate("refuse", factor=8.001), SERVER, clipped, cohort(5, 5, 5, 5, 5))
    assert not again.refused  # what is clipped lies within the bound
    closer = admit(Gate("refuse", factor=7.9), SERVER, clipped, cohort(5, 5, 5, 5, 5))
    assert list(closer.refused) == [4]


def test_what_is_not_finite_cannot_be_clipped() -> None:
    assert list(admit(CLIP, SERVER, uploads(w=math.nan), cohort(5, 5, 5, 5, 5)).refused) == [4]


def test_who_has_more_examples_may_move_further() -> None:
    ups = uploads(control=20)
    assert admit(REFUSE, SERVER, ups, cohort(5, 5, 5, 5, 5)).refused
    assert not admit(REFUSE, SERVER, ups, cohort(5, 5, 5, 5, 100)).refused


def test_it_is_the_deviation_that_counts() -> None:
    """Of weights around 100, which are all of nearly the same norm."""
    server = State(Model({"w": torch.full((4,), 100.0)}, {}), {})
    rows = server.model.params["w"] + torch.tensor([[10.0], [-9.0], [11.0], [10.0], [120.0]])
    assert list(admit(REFUSE, server, State(Model({"w": rows}, {}), {}), cohort(5, 5, 5, 5, 5)).refused) == [4]


def test_a_small_deviation_is_no_outlier_though_the_others_are_smaller() -> None:
    still = SERVER.model.params["w"].expand(5, 3, 4).clone()
    still += 1e-6
    still[4] += 0.1
    assert not admit(REFUSE, SERVER, State(Model({"w": still}, {}), {}), cohort(5, 5, 5, 5, 5)).refused


def test_a_first_control_is_no_outlier_among_changes_of_controls() -> None:
    """SCAFFOLD's newcomers send a whole one: refused for that, they would never come in."""
    server = SERVER._replace(extra={"control": {"w": torch.full((3, 4), 0.5)}})
    ups = uploads()
    ups.extra["control"]["w"][:4] *= 0.01
    ups.extra["control"]["w"][4] = 0.5
    assert not admit(REFUSE, server, ups, cohort(5, 5, 5, 5, 5)).refused
    ups.extra["control"]["w"][4] = 50.0
    assert admit(REFUSE, server, ups, cohort(5, 5, 5, 5, 5)).refused


def test_one_alone_is_held_to_the_absolute_bound() -> None:
    """A cohort of one is its own median."""
    ups = tree.map(lambda leaf: leaf[4:], uploads(w=1e30))
    assert admit(REFUSE, SERVER, ups, cohort(5)).refused
    assert not admit(Gate("refuse", norm=1e32), SERVER, ups, cohort(5)).refused


def test_outliers_do_not_hide_one_another() -> None:
    """Two of four, one of them beyond the absolute bound: it is refused anyway, and so no measure for the other."""
    ups = tree.map(lambda leaf: leaf[:4].clone(), uploads())
    ups.model.params["w"][2] *= 1e30
    ups.model.params["w"][3] *= -10
    assert list(admit(REFUSE, SERVER, ups, cohort(5, 5, 5, 5)).refused) == [2, 3]


def test_a_method_without_uploads_passes() -> None:
    assert not admit(REFUSE, SERVER, State(Model({}, {}), {}), cohort(5, 5)).refused


def test_a_step_beyond_the_bound_is_objected_to() -> None:
    def moved(by: float) -> State:
        return State(Model({**SERVER.model.params, "b": torch.tensor(by)}, SERVER.model.stats), SERVER.extra)

    assert not objection(REFUSE, SERVER, moved(5.0))
    assert "params would move by" in objection(REFUSE, SERVER, moved(1e7))
    assert objection(REFUSE, SERVER, moved(math.nan))
    far = SERVER._replace(extra={"far": torch.full((2,), 1e9)})
    assert not objection(REFUSE, far, far)  # it is the step that counts


def test_it_is_on_by_itself_where_clients_are_nodes() -> None:
    assert [bool(Gate().on(engine)) for engine in ("sequential", "stacked", "flower", "flower-remote")] == [0, 0, 1, 1]
    assert Gate("clip").on("sequential") == Gate("clip")
    assert Gate("off").on("flower") is None


@pytest.mark.parametrize("wrong", [{"kind": "no"}, {"factor": 1.0}, {"factor": math.inf}, {"norm": 0.0}], ids=str)
def test_settings_that_mean_nothing_are_errors(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="gate"):
        Gate(**wrong)

"""The metrics, compared with numbers counted by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data.federation import Federation, Pool
from fedrane.data.partition import Split
from fedrane.engines.evaluation import Predicted, evaluate, minority_classes
from fedrane.task import Model, State
from problems import federation, table

NOBODY = State(Model({}, {}), {})


class Oracle:
    """An engine with fixed predictions: model ``w`` = 0 is always right, 1 predicts class 0, 2 is always wrong."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def personal(self, server: State, client_state: State | None, client: int, round: int) -> Model:
        return Model({"w": torch.tensor(client % 3)}, {})

    def predict(self, model: Model, pool: Pool, examples: NDArray[np.int64]) -> Predicted:
        mode = int(model.params["w"])
        y = pool.y.numpy()[examples]
        labels = [y, np.zeros_like(y), (y + 1) % 3][mode]
        self.asked.append(len(examples))
        return Predicted(labels, np.full(len(examples), 0.5))

    def predict_each(self, models: list[Model], pool: Pool, examples: tuple[NDArray[np.int64], ...]) -> list[Predicted]:
        return [self.predict(model, pool, r) for model, r in zip(models, examples, strict=True)]


def four_clients(
    test: tuple[list[int], ...] = ([0, 1, 2], [3, 4, 5, 6], [7, 8], [9]),
    held: tuple[list[int], ...] = ([],) * 4,
    norm: str = "shared",
) -> Federation:
    """The label of an example is its index modulo 3."""
    fed = federation(table(60), [[0, 1], [2], [3], [4]], norm=norm)
    parts = [tuple(np.array(examples, dtype=np.int64) for examples in part) for part in (held, test)]
    return Federation(fed.task, fed.train, fed.test, Split(fed.split.train, *parts), fed.batch, fed.seed)


def case(available: tuple[str, ...], validation: bool = False) -> dict[str, object]:
    """Clients 0 and 3 are always right, 1 predicts class 0, 2 is always wrong."""
    fed = four_clients(held=([12], [13, 14], [15], []) if validation else ([],) * 4)

    class Declared(Algorithm):
        pass

    Declared.models = available
    server = State(Model({"w": torch.tensor(1)}, {}), {})
    return evaluate(Oracle(), fed, Declared(), server, {}, 1)


def test_global_measures() -> None:
    m = case((GLOBAL,))
    assert m["global/accuracy"] == pytest.approx(1 / 3), "class 0 is a third of the official test examples"
    assert m["global/recall"] == [1.0, 0.0, 0.0]
    assert m["global/balanced_accuracy"] == pytest.approx(1 / 3)
    assert m["global/loss"] == 0.5
    assert m["global/local_clients"] == pytest.approx([1 / 3, 2 / 4, 0, 1])
    assert m["global/local_accuracy"] == pytest.approx((1 + 2 + 0 + 1) / 10)
    assert not [key for key in m if key.startswith(("personal", "validation"))]


def test_personal_measures() -> None:
    m = case((PERSONAL,))
    each = [1, 2 / 4, 0, 1]
    assert m["personal/clients"] == pytest.approx(each)
    assert m["personal/accuracy"] == pytest.approx((3 + 2 + 0 + 1) / 10), "weighted by samples"
    assert m["personal/accuracy_mean"] == pytest.approx(np.mean(each))
    assert m["personal/accuracy_std"] == pytest.approx(np.std(each))
    assert m["personal/accuracy_worst10"] == 0, "the worst tenth of four is one client"
    assert m["personal/recall"] == pytest.approx([4 / 4, 1 / 3, 1 / 3])
    assert m["personal/balanced_accuracy"] == pytest.approx(5 / 9)
    assert not [key for key in m if key.startswith("global")]


def test_validation_is_apart_from_the_test() -> None:
    m = case((GLOBAL, PERSONAL), validation=True)
    assert m["validation/global_accuracy"] == pytest.approx(2 / 4)
    assert m["validation/personal_accuracy"] == pytest.approx((1 + 0 + 0) / 4)
    assert m["validation/accuracy"] == pytest.approx((2 / 4 + 1 / 4) / 2)


def test_where_answers_depend_on_the_batch_clients_are_asked_apart() -> None:
    """With batch statistics at test time, no prediction may depend on another client's examples."""
    for norm, asked in (("shared", [60, 10]), ("batch", [60, 3, 4, 2, 1])):
        oracle, fed = Oracle(), four_clients(norm=norm)
        server = State(Model({"w": torch.tensor(1)}, {}), {})
        m = evaluate(oracle, fed, Algorithm(), server, {}, 1)
        assert oracle.asked == asked
        assert m["global/local_clients"] == pytest.approx([1 / 3, 2 / 4, 0, 1])


def test_a_class_without_rows_has_no_recall() -> None:
    """Its recall is undefined, and the balanced accuracy is over the other classes."""
    fed = four_clients(test=([0, 2, 3], [5], [6], [8]))  # no example of class 1

    class Declared(Algorithm):
        models = (PERSONAL,)

    m = evaluate(Oracle(), fed, Declared(), NOBODY, {}, 1)
    assert m["personal/recall"] == [2 / 3, None, 2 / 3]
    assert m["personal/balanced_accuracy"] == pytest.approx(2 / 3)


def test_minority_classes() -> None:
    """Classes that a client has, with fewer than half its mean class count."""
    labels = np.array([[10, 1, 4], [5, 5, 0], [9, 0, 1], [0, 0, 0], [6, 2, 1], [9, 2, 1], [8, 2, 0]])
    none, second, third = [False] * 3, [False, True, False], [False, False, True]
    expected = [second, none, third, none, third, third, second]  # [9, 2, 1]: 2 is just half of the mean
    assert minority_classes(labels).tolist() == expected


def test_minority_accuracy_counts_only_their_examples() -> None:
    fed = federation(table(60), [[0, 3, 6, 9, 12, 15, 18, 1], [2, 5]])  # client 0: seven of class 0, one of class 1
    test = (np.array([21, 4, 7]), np.array([8]))
    fed = Federation(fed.task, fed.train, fed.test, Split(fed.split.train, fed.split.validation, test), fed.batch, 0)

    class Declared(Algorithm):
        models = (PERSONAL,)

    m = evaluate(Oracle(), fed, Declared(), NOBODY, {}, 1)
    assert m["personal/minority_accuracy"] == 1.0
    m = evaluate(Oracle(), fed, Algorithm(), State(Model({"w": torch.tensor(1)}, {}), {}), {}, 1)
    assert m["global/minority_accuracy"] == 0.0, "it predicts class 0 where the minority is class 1"

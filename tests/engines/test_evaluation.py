"""The metrics, compared with numbers counted by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from fedrane import run
from fedrane.algorithm import GLOBAL, PERSONAL, Algorithm
from fedrane.data.federation import Federation, Pool
from fedrane.data.partition import Split
from fedrane.engines.evaluation import Predicted, against, evaluate, minority_classes
from fedrane.errors import ConfigError
from fedrane.task import Model, State
from fedrane.training.predictor import Predictor
from problems import FORKS, federation, quick, table

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


def test_where_predictions_depend_on_the_batch_clients_are_predicted_apart() -> None:
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


# ---- two classes


SCORES = [-1.0, 2.0, 3.0, 3.0, -2.0, 1.0, 1.0, 4.0, -5.0, 6.0]
LABELS = [0, 1, 0, 1, 0, 0, 1, 1, 0, 1]


class Scoring(Oracle):
    """An engine with a fixed margin of the second class for each example, whatever the model."""

    def predict(self, model: Model, pool: Pool, examples: NDArray[np.int64]) -> Predicted:
        margins = np.array(SCORES)[examples]
        return Predicted((margins > 0).astype(np.int64), np.full(len(examples), 0.5), margins)


class Both(Algorithm):
    models = (GLOBAL, PERSONAL)


def scored(positive: int, local: tuple[list[int], ...] = ([0, 1, 2, 3], [4, 5, 6], [7])) -> dict[str, Any]:
    """Both models measured on the clients' examples ``local``; the official test set has all ten."""
    data, classes = table(60), ("healthy", "ill")
    labels, labels_test = (np.resize(LABELS, len(y)) for y in (data.y, data.y_test))
    data = dataclasses.replace(data, y=labels, y_test=labels_test, classes=classes)
    data = dataclasses.replace(data, x_test=data.x_test[:10], y_test=data.y_test[:10])
    fed = federation(data, [[10, 11], [12, 13], [14, 15]], positive=positive)
    split = dataclasses.replace(fed.split, test=tuple(np.array(examples) for examples in local))
    return evaluate(Scoring(), dataclasses.replace(fed, split=split), Both(), NOBODY, {}, 1)


def test_measures_of_two_classes() -> None:
    """Counted by hand. A client's examples are ranked among themselves; the third client has one class only."""
    m = scored(positive=1)
    assert m["global/auroc"] == pytest.approx((4 + 4.5 + 3.5 + 5 + 5) / 25)
    assert m["global/auprc"] == pytest.approx((1 / 1 + 2 / 2 + 3 / 4 + 4 / 5 + 5 / 7) / 5)
    assert m["global/f1"] == pytest.approx(2 * 5 / (2 * 5 + 2)), "2 and 5 are the wrong ones"
    assert m["global/sensitivity_at_specificity_95"] == pytest.approx(2 / 5)
    for prefix in ("personal/", "global/local_"):
        assert m[f"{prefix}auroc"] == pytest.approx((4 * 0.625 + 3 * 0.75) / 7), "weighted by examples"
        assert m[f"{prefix}auprc"] == pytest.approx((4 * (1 / 2 + 2 / 3) / 2 + 3 * 1 / 2) / 7)
        assert m[f"{prefix}clients_with_both_classes"] == 2
        assert m[f"{prefix}f1"] == pytest.approx(2 * 4 / (2 * 4 + 2)), "of all clients' examples together"


def test_either_class_may_be_the_positive_one() -> None:
    second, first = scored(positive=1), scored(positive=0)
    for key in ("global/auroc", "personal/auroc", "global/local_auroc", "global/accuracy", "global/recall"):
        assert first[key] == pytest.approx(second[key]), "the area has a symmetry that the others have not"
    assert first["global/f1"] == pytest.approx(2 * 3 / (2 * 3 + 2))
    assert first["global/sensitivity_at_specificity_95"] == pytest.approx(3 / 5)
    assert first["global/auprc"] == pytest.approx((1 + 1 + 1 + 4 / 5 + 5 / 8) / 5)


def test_where_no_client_has_both_classes_nothing_is_ranked() -> None:
    m = scored(positive=1, local=([0, 2], [1, 3], [7]))
    assert m["personal/clients_with_both_classes"] == 0
    assert m["personal/f1"] == pytest.approx(2 * 3 / (2 * 3 + 1))
    assert not {"personal/auroc", "personal/auprc", "personal/sensitivity_at_specificity_95"} & m.keys()
    m = scored(positive=1, local=([0], [4], [8]))
    assert "personal/f1" not in m, "nothing is to be found, and nothing found"


def test_tasks_with_more_classes_have_none_of_it() -> None:
    keys = case((GLOBAL, PERSONAL))
    assert not [key for key in keys if key.endswith(("auroc", "auprc", "f1", "specificity_95", "both_classes"))]


def test_margins_have_no_ties_where_probabilities_have() -> None:
    scores = torch.tensor([[0.0, 100.0], [0.0, 101.0]])
    assert len(scores.softmax(1)[:, 1].unique()) == 1
    *_, margins = against(scores, torch.tensor([1, 1]))
    assert margins.tolist() == [100.0, 101.0]
    stacked = against(scores.expand(3, 2, 2), torch.ones(3, 2, dtype=torch.int64))
    assert [column.shape for column in stacked] == [(3, 2)] * 3
    assert len(against(torch.zeros(4, 3), torch.zeros(4, dtype=torch.int64))) == 2, "of three classes there is none"


@pytest.mark.parametrize("engine", ["sequential", "threaded", pytest.param("processes", marks=FORKS), "stacked"])
def test_every_engine_measures_what_scikit_learn_does(engine: str) -> None:
    """With a method that has both models; AUROC, AUPRC and F1 of what its predictors predict."""
    e = quick(method="fedrod", dataset="breast-cancer", rounds=1, lr=0.02, positive="malignant", engine=engine)
    result = run(e.replace(precision="float64", threads=2 if engine in ("threaded", "processes") else 0))
    record, pools = result.history[-1], result.federation

    def measured(model: Predictor, pool: Pool, examples: NDArray[np.int64]) -> list[float]:
        with torch.no_grad():
            scores = model(pool.x[examples]).numpy()
        positive, score = pool.y[examples].numpy() == 0, scores[:, 0] - scores[:, 1]
        functions = ((roc_auc_score, score), (average_precision_score, score), (f1_score, score >= 0))
        return [float(function(positive, value)) for function, value in functions]

    everything = np.arange(len(pools.test))
    expected = measured(result.model, pools.test, everything)
    assert [record[f"global/{name}"] for name in ("auroc", "auprc", "f1")] == pytest.approx(expected, abs=1e-12)
    both = [k for k, r in enumerate(pools.split.test) if len(pools.train.y[r].unique()) == 2]
    assert record["personal/clients_with_both_classes"] == len(both) < len(pools.split.test)
    each = [measured(result.personal(k), pools.train, pools.split.test[k])[:2] for k in both]
    means = np.average(each, axis=0, weights=[len(pools.split.test[k]) for k in both])
    assert [record[f"personal/{name}"] for name in ("auroc", "auprc")] == pytest.approx(means.tolist(), abs=1e-12)


def test_the_positive_class_is_one_of_two() -> None:
    for settings, problem in (
        ({"dataset": "breast-cancer", "positive": "cancer"}, "positive=cancer is no class.*'malignant' and 'benign'"),
        ({"dataset": "digits", "positive": "7"}, "positive=7 would have no effect.*10 classes"),
    ):
        with pytest.raises(ConfigError, match=problem):
            run(quick(**settings))

"""A client a core ends where clients one after another end; and ``auto`` takes the engine its rule says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import fedrane
from asserts import close, untimed
from fedrane import conformance, engines
from fedrane.data.dataset import Dataset
from fedrane.engines import Sequential, Stacked, Threaded
from fedrane.engines.threaded import _channels_last
from fedrane.methods import METHODS
from problems import quick


@pytest.fixture(autouse=True)
def three_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_ends_where_the_sequential_engine_ends(name: str) -> None:
    entry = METHODS[name]
    settings: dict[str, Any] = {"participation": 0.8, "dropout": 0.2, "momentum": 0.5, "weight_decay": 0.01}
    one, many = (
        conformance.trained(entry.kind(**entry.preset), engine=engine, **settings)
        for engine in ("sequential", "threaded")
    )
    close(conformance.states(one), conformance.states(many), 1e-12)
    for a, b in zip(untimed(one.history), untimed(many.history), strict=True):
        for key in a.keys() - {"gne/iterations"}:
            assert a[key] == pytest.approx(b[key], abs=1e-9), key


def pictures(channels: int, side: int) -> Dataset:
    numbers, y = np.random.Generator(np.random.Philox(5)), np.arange(90) % 3
    x = numbers.integers(0, 255, (90, channels, side, side)).astype(np.uint8)
    middle = (0.5,) * channels
    return Dataset("noise", x[:70], y[:70], x[70:], y[70:], tuple("abc"), middle, middle)


@pytest.mark.parametrize(("model", "channels"), [("convnet", 1), ("convnet", 3), ("resnet18", 3)])
def test_networks_of_convolutions(model: str, channels: int) -> None:
    settings: dict[str, Any] = {"model": model, "clients": 4, "rounds": 2, "epochs": 1, "batch": 8, "lr": 0.01}
    one, many = (
        fedrane.run(
            fedrane.Experiment(engine=engine, precision="float64", device="cpu", **settings),
            dataset=pictures(channels, 16),
        )
        for engine in ("sequential", "threaded")
    )
    close(conformance.states(one), conformance.states(many), 1e-10)  # some sums of BatchNorm's nearly cancel


def test_an_image_of_one_channel_lies_channels_last_by_its_strides() -> None:
    for shape in ((4, 1, 5, 6), (4, 3, 5, 6)):
        image = torch.arange(float(np.prod(shape))).reshape(shape)
        laid = _channels_last(image)
        assert torch.equal(laid, image)
        assert laid.stride() == (5 * 6 * shape[1], 1, 6 * shape[1], shape[1])


def test_a_mistake_in_one_client_ends_the_round_and_says_where() -> None:
    class Wrong(fedrane.Algorithm):
        def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
            if int(ctx.client.index) == 2:
                raise KeyError("no such thing")
            return super().objective(task, ctx, model, batch)

    with pytest.raises(KeyError, match="no such thing") as caught:
        conformance.trained(Wrong(), engine="threaded")
    assert "in step 0 of client 2, round 1" in caught.value.__notes__
    assert torch.get_num_threads() == 3


class Chosen(Exception):  # noqa: N818 - ends a run before it begins
    pass


@pytest.mark.parametrize(
    ("settings", "engine"),
    [
        ({"model": "mlp", "clients": 10}, Stacked),
        ({"model": "mlp", "clients": 2}, Stacked),
        ({"model": "convnet", "clients": 10, "batch": 16}, Stacked),  # on images of 8 × 8
        ({"model": "convnet", "clients": 10, "batch": 128, "partition": {"kind": "iid"}}, Threaded),
        ({"model": "resnet18", "clients": 10}, Threaded),
    ],
)
def test_auto_goes_by_the_work_of_a_step(
    settings: dict[str, Any], engine: type[Sequential | Stacked], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spy(algorithm: Any, federation: Any) -> Any:
        assert type(engines.automatic(algorithm, federation)) is engine
        raise Chosen

    monkeypatch.setitem(engines.ENGINES, "auto", spy)
    with pytest.raises(Chosen):
        fedrane.run(quick(engine="auto", device="cpu", **settings))


def test_a_hook_that_cannot_answer_one_row_does_not_keep_auto_from_choosing() -> None:
    class Pairs(fedrane.Algorithm):
        def predict(self, task: Any, model: Any, x: Any, live: Any) -> Any:
            if len(x) == 1:
                raise ValueError("rows come in pairs")
            return super().predict(task, model, x, live)

    assert np.isfinite(conformance.trained(Pairs(), engine="auto").history[-1]["train/loss"])

"""Feature skew: each client's images change in its own way, by an amount that is known, and the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import fedrane
from fedrane import Experiment
from fedrane.data import skew as module
from fedrane.data.skew import ClientSkews, FeatureSkew
from fedrane.errors import ConfigError
from fedrane.training.setup import as_dataset, make_federation, make_partition

Images = NDArray[Any]


def images(count: int = 12, *shape: int) -> Images:
    return np.random.default_rng(0).integers(0, 256, (count, *(shape or (3, 6, 6))), dtype=np.uint8)


def dealt(count: int, clients: int) -> list[NDArray[np.int64]]:
    return [np.arange(count)[client::clients] for client in range(clients)]


def skewed(x: Images, clients: int, seed: int = 0, **how: float) -> list[Images]:
    """The images of each client, changed."""
    parts = dealt(len(x), clients)
    changed = FeatureSkew(**how).applied(x, parts, seed)
    assert (changed.dtype, changed.shape) == (np.uint8, x.shape)
    return [changed[part] for part in parts]


def test_without_skew_nothing_is_copied() -> None:
    x = images()
    assert FeatureSkew().applied(x, dealt(12, 3), 0) is x


@pytest.mark.parametrize("how", [{"noise": 0.2}, {"rotation": 30.0}, {"intensity": 0.5}])
def test_the_given_images_stay_and_the_seed_decides(how: dict[str, float]) -> None:
    x = images()
    before = x.copy()
    first, again, other = (np.stack(skewed(x, 4, seed, **how)) for seed in (3, 3, 4))
    assert np.array_equal(x, before)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_an_image_does_not_depend_on_how_many_are_changed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    x, how = images(40), {"noise": 0.2, "rotation": 30.0, "intensity": 0.5}
    whole = skewed(x, 3, **how)
    monkeypatch.setattr(module, "_AT_ONCE", 300)
    assert all(map(np.array_equal, whole, skewed(x, 3, **how)))


def test_a_quarter_turn_moves_pixels_and_changes_none() -> None:
    x = images(12, 2, 5, 5)
    skews = ClientSkews.of(FeatureSkew(rotation=90.0), 2, 2, 0)
    assert sorted(skews.angles) == [-90, 90]
    for turned, angle, part in zip(skewed(x, 2, rotation=90.0), skews.angles, dealt(12, 2), strict=True):
        assert np.array_equal(turned, np.rot90(x[part], 1 if angle > 0 else -1, axes=(2, 3)))


def test_a_half_turn_works_on_any_shape() -> None:
    x = images(6, 1, 4, 7)
    assert np.array_equal(np.stack(skewed(x, 2, rotation=180.0)), np.stack([x[0::2], x[1::2]])[..., ::-1, ::-1])


def test_angles_are_spread_evenly_and_the_one_between_turns_nothing() -> None:
    x = images(10)
    angles = ClientSkews.of(FeatureSkew(rotation=40.0), 5, 3, 0).angles
    assert sorted(angles) == pytest.approx([-40, -20, 0, 20, 40])
    changed = skewed(x, 5, rotation=40.0)
    for angle, part, mine in zip(angles, dealt(10, 5), changed, strict=True):
        assert np.array_equal(mine, x[part]) == (angle == 0)


def test_a_rotation_is_bilinear_and_black_outside() -> None:
    x = np.full((2, 1, 9, 9), 200, np.uint8)
    for turned in skewed(x, 2, rotation=45.0):
        assert turned[0, 0, 4, 4] == 200
        assert (turned[0, 0, [0, 0, 8, 8], [0, 8, 0, 8]] == 0).all()
        assert (turned[0, 0, 2:7, 2:7] == 200).all()
    row = np.zeros((2, 1, 1, 3), np.uint8)
    row[..., 0, 2] = 200
    third = skewed(row, 2, rotation=60.0)[0]  # (0, 1) from the centre comes from (± sin 60°, cos 60°) of it
    assert third[0, 0, 0, 2] == round(200 * (1 - np.sin(np.pi / 3)) * 0.5)


def test_a_channel_is_multiplied_by_the_client_s_own_factor() -> None:
    x = np.full((5, 3, 2, 2), 100, np.uint8)
    factors = ClientSkews.of(FeatureSkew(intensity=0.4), 5, 3, 0).factors
    for channel in range(3):
        assert sorted(factors[:, channel]) == pytest.approx([0.6, 0.8, 1, 1.2, 1.4])
    assert len(np.unique(factors, axis=0)) == 5
    assert not np.array_equal(factors[:, 0], factors[:, 1])  # a cast, and not only another brightness
    changed = np.concatenate(skewed(x, 5, intensity=0.4))
    assert np.array_equal(changed, np.rint(100 * factors)[:, :, None, None].repeat(2, 2).repeat(2, 3))


def test_what_is_brighter_than_white_is_white() -> None:
    assert np.concatenate(skewed(np.full((4, 1, 2, 2), 250, np.uint8), 4, intensity=0.5)).max() == 255


def test_noise_has_the_client_s_deviation() -> None:
    x = np.full((800, 1, 8, 8), 128, np.uint8)
    deviations = ClientSkews.of(FeatureSkew(noise=0.1), 4, 1, 0).deviations
    assert sorted(deviations) == pytest.approx([0.025, 0.05, 0.075, 0.1])
    for noisy, deviation in zip(skewed(x, 4, noise=0.1), deviations, strict=True):
        away = noisy.astype(float) - 128
        assert away.std() == pytest.approx(255 * deviation, rel=0.03)
        assert abs(away.mean()) < 1
        assert not np.array_equal(away[0], away[1])


def test_noise_is_added_after_the_rotation() -> None:
    """Noise is the camera's: it is in the black corners too."""
    noisy = skewed(np.full((2, 1, 9, 9), 200, np.uint8), 2, rotation=45.0, noise=0.3)
    assert any(client[..., [0, 0, 8, 8], [0, 8, 0, 8]].any() for client in noisy)


def test_clients_train_and_are_tested_on_their_images_and_the_test_set_is_plain() -> None:
    plain = Experiment(clients=4, validation=0.2, batch=32)
    e = plain.replace(skew=FeatureSkew(noise=0.1, intensity=0.3)).replace(
        model="mlp", device="cpu", precision="float32"
    )
    dataset = as_dataset(e, None)
    e = e.replace(partition=replace(e.partition, kind="dirichlet"))
    partition = make_partition(e, dataset)
    federation = make_federation(e, dataset, partition, None)
    assert np.array_equal(federation.test.x.numpy(), dataset.x_test)
    expected = e.skew.applied(dataset.x, partition.clients, e.seed)
    for part in (federation.split.train, federation.split.validation, federation.split.test):
        for examples in part:
            assert np.array_equal(federation.train.x.numpy()[examples], expected[examples])
            assert not np.array_equal(expected[examples], dataset.x[examples])
    assert federation.train.normalise.shift == pytest.approx(dataset.mean[0] / dataset.std[0])


@pytest.mark.parametrize("engine", ["stacked", "threaded"])
def test_every_engine_sees_the_same_images(engine: str) -> None:
    e = Experiment(clients=3, rounds=1, epochs=1, batch=64, model="mlp", device="cpu", threads=1, engine="sequential")
    changed = e.replace(skew=FeatureSkew(0.1, 20.0, 0.3))
    one, other, plain = (fedrane.run(x).history[-1] for x in (changed, changed.replace(engine=engine), e))
    assert one["train/loss"] == pytest.approx(other["train/loss"], rel=1e-5)
    assert one["train/loss"] != pytest.approx(plain["train/loss"], rel=1e-3)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise": -0.1}, r"skew\.noise=-0\.1.*Use 0 \(off\) to 1"),
        ({"noise": 1.5}, r"skew\.noise=1\.5"),
        ({"noise": float("nan")}, r"skew\.noise=nan"),
        ({"rotation": 200.0}, r"skew\.rotation=200\.0.*to 180"),
        ({"rotation": -1.0}, r"skew\.rotation=-1\.0"),
        ({"intensity": 1.0}, r"skew\.intensity=1\.0.*must not become black"),
    ],
)
def test_every_wrong_setting_has_a_remedy(wrong: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FeatureSkew(**wrong)


@pytest.mark.parametrize("key", ["noise", "rotation", "intensity"])
def test_a_table_has_no_images_to_change(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"skew\.{key} on inputs of shape \(13,\).*not images"):
        fedrane.run([f"skew.{key}=0.1", "dataset=wine", "clients=3", "rounds=1"])

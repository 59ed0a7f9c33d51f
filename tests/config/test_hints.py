"""Hints for words that are no keys: each leads to something that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedrane import Experiment
from fedrane.config import hints, reference
from fedrane.config.settings import parse
from fedrane.errors import ConfigError

NAMES = {key.name for key in reference.keys()}
TAKEN = NAMES | {alias for key in reference.keys() for alias in key.aliases}


def test_hints_lead_to_keys_and_none_is_one() -> None:
    assert hints.KEYS.keys() <= NAMES
    words = [word for each in (*hints.KEYS.values(), *hints.SENTENCES.values()) for word in each]
    assert len(words) == len(set(words))
    assert not TAKEN.intersection(words)


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("rounds", "5"), "Write rounds=5"),
        (("learning_rate", "lr=1"), "Write learning_rate=…"),
        (("fedprox",), "write method=fedprox"),
        (("cifar10",), "write dataset=cifar10"),
        (("mine.csv",), "write dataset=mine.csv"),
        (("mine.py",), "Write method=mine.py:Class"),
        (("cuda",), "device=cuda"),
        (("nonsense",), "Write for instance clients=10"),
    ],
)
def test_a_word_without_a_value(
    words: tuple[str, ...], remedy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.csv", "mine.py"):
        Path(name).touch()
    with pytest.raises(ConfigError) as error:
        parse(words)
    assert remedy in error.value.remedy


@pytest.mark.parametrize(
    ("word", "remedy"),
    [
        ("optim=adam", "Use optimizer=…"),
        ("adamw=1", "optimizer=adamw"),
        ("nesterov=true", "momentum=0.9"),
        ("beta2=0.99", "Use adam.decay=…"),
        ("warmup_rounds=3", "Use schedule.warmup=…"),
        ("epochs_local=2", "Use epochs=…"),
        ("num-steps=2", "Use steps=…"),
        ("gpu=1", "device=cuda"),
        ("mu=0.1", "method.strength=0.1"),
        ("lrr=0.1", "Did you mean 'lr'"),
    ],
)
def test_an_unknown_key(word: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as error:
        Experiment.from_words([word])
    assert remedy in error.value.remedy
    with pytest.raises(ConfigError, match="optimiser"):
        Experiment.from_dict({"optimiser": "adam"})


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("--rounds 5", "write rounds=5"),
        ("clients=3 --lr=0.1 --out x", "write lr=0.1"),
        ("--num-rounds 5", "write num_rounds=5"),
        ("--partition.alpha --out x", "write partition.alpha=…"),
        ("--rounds clients=3", "write rounds=…"),
        ("--gpu", "device=cuda"),
        ("--nonsense 3", ""),
    ],
)
def test_a_setting_written_as_an_option(words: str, remedy: str) -> None:
    option = next(word.partition("=")[0] for word in words.split() if word.startswith("--"))
    found = hints.for_option(option, words.split())
    assert remedy in found
    assert bool(remedy) == bool(found)

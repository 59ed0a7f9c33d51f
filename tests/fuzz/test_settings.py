"""Settings as words and as TOML files: an experiment, or one clear error."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fedrane
from contained import examples, used_or_refused
from damage import damaged, replaced, toml_of, values, words
from fedrane import Experiment
from fedrane.cli.arguments import experiment_of
from fedrane.config.settings import ALIASES
from fedrane.data.partition import KINDS
from fedrane.experiment import KEYS, PRECISIONS
from fedrane.methods import METHODS

pytestmark = pytest.mark.slow

FIELDS = {f.name for entry in METHODS.values() for f in fields(entry.cls)}
CODE = (
    "json:loads",
    "fedrane.methods.fedavg:FedAvg",
    "builtins:exec",
    "nowhere.py:M",
    "nowhere:M",
    ":",
    "a:b:c",
    ".py:",
)
keys = (
    st.sampled_from(sorted(KEYS | ALIASES.keys() | {"method", "preset"} | {f"method.{name}" for name in FIELDS}))
    | words
)
named = st.sampled_from([*METHODS, *KINDS, *PRECISIONS, *CODE, "mlp", "convnet", "paper", "cosine", "refuse", "group"])
settings = st.builds("{}={}".format, keys, words | named | st.integers().map(str) | st.floats().map(repr)) | words


@examples(300)
@given(given=st.lists(settings, max_size=5))
def test_words(given: list[str], tmp_path: Path) -> None:
    made = used_or_refused(tmp_path, lambda: experiment_of(given))
    if made is not None:
        assert Experiment.from_words([]).to_toml()
        used_or_refused(tmp_path, made.to_toml)


tables = st.dictionaries(keys, values | named, max_size=5).map(
    lambda table: "\n".join(
        f"{key if key.isascii() and key else toml_of(key)} = {toml_of(v)}" for key, v in table.items()
    )
)
WRITTEN = Experiment(method="fedrane", clients=3).to_toml().encode()
"""All settings and all tables."""


@examples(300)
@given(
    content=damaged(WRITTEN)
    | tables.map(lambda text: text.encode(errors="replace"))
    | st.sampled_from(
        [b"a=" + b"[" * 9000, b"a=" + b'{"a"=' * 9000, b"a." * 9000 + b"a=1", b"a=" + b"1" * 9000, b"\xff"]
    )
)
def test_toml(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "it.toml").write_bytes(content)
    made = used_or_refused(tmp_path, lambda: experiment_of([str(tmp_path / "it.toml")]))
    if made is not None:
        (tmp_path / "again.toml").write_text(made.to_toml(), encoding="utf-8")
        assert experiment_of([str(tmp_path / "again.toml")]) == made


TUNED = [{"method": "fedavg", "dataset": "digits", "alpha": 0.5, "settings": {"lr": 0.1}}]
"""As tuning writes it."""
odd = (
    named | st.booleans() | st.integers() | st.floats() | st.sampled_from([[], {}, [[1]], {"a": {"b": 1}}, "a\0b.py:M"])
)


@examples(150)
@given(
    content=damaged(f"tuned = {toml_of(TUNED)}".encode())
    | replaced(TUNED, odd).map(lambda entries: f"tuned = {toml_of(entries)}".encode())
)
def test_tuned(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tuned.toml").write_bytes(content)
    used_or_refused(tmp_path, lambda: experiment_of(["dataset=digits"], tuned=tmp_path / "tuned.toml"))


SMALL = {
    "dataset": "digits",
    "model": "mlp",
    "clients": 3,
    "rounds": 1,
    "epochs": 1,
    "batch": 256,
    "engine": "sequential",
}
tiny = {
    "clients": st.integers(1, 40),
    "batch": st.integers(1, 10**12),
    "rounds": st.integers(1, 2),
    "epochs": st.integers(1, 2) | st.integers(),
    "participation": st.floats(),
    "client_dropout": st.floats(),
    "validation": st.floats(),
    "patience": st.integers(),
    "seed": st.integers(),
    "threads": st.integers(-1, 3),
    "engine": st.sampled_from(["sequential", "stacked", "threaded", "auto"]),
    "precision": st.sampled_from(PRECISIONS),
    "norm": st.sampled_from(["shared", "batch", "local", "group"]),
    "eval_every": st.integers(),
    **dict.fromkeys(("lr", "momentum", "weight_decay", "clip"), st.floats()),
    "partition": st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from(sorted(KINDS)),
            "alpha": st.floats(),
            "shards": st.integers(),
            "minimum": st.integers(),
            "test": st.floats(),
        },
    ),
    "augment": st.fixed_dictionaries({}, optional={"crop": st.integers(), "flip": st.booleans(), "mixup": st.floats()}),
    "gate": st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from(["refuse", "clip", "off", "flower"]),
            "factor": st.floats(),
            "norm": st.floats(),
        },
    ),
    "schedule": st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from(["constant", "step", "exponential", "cosine"]),
            "factor": st.floats(),
            "every": st.integers(),
            "floor": st.floats(),
        },
    ),
}


@st.composite
def experiments(draw: st.DrawFn) -> dict[str, object]:
    """Settings of a run that takes milliseconds, a few of them anything at all."""
    chosen = draw(st.lists(st.sampled_from(sorted(tiny)), max_size=4, unique=True))
    name = draw(st.sampled_from(sorted(METHODS)))
    table = {
        f.name: draw(st.floats() | st.integers()) for f in fields(METHODS[name].cls) if draw(st.integers(0, 5)) == 0
    }
    return SMALL | {key: draw(tiny[key]) for key in chosen} | {"method": {"name": name, **table}}


@examples(40)
@given(settings=experiments())
def test_runs(settings: dict[str, object], tmp_path: Path) -> None:
    """Whatever the numbers are, a run ends well or says why not; what ends well is finite."""
    result = used_or_refused(tmp_path, lambda: fedrane.run(Experiment.from_dict(settings)))
    if result is not None and result.history and "global/accuracy" in result.history[-1]:
        assert 0 <= result.history[-1]["global/accuracy"] <= 1

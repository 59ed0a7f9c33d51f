"""W&B, MLflow and TensorBoard, each with its real package, offline."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import wandb
from typer.testing import CliRunner

import fedrane
from fedrane import MLflowLogger, TensorBoardLogger, WandbLogger
from fedrane.cli.commands import app
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment
from fedrane.training.result import Result
from fedrane.training.run_folder import Folder
from fedrane.training.trackers import TRACKERS, Tracker, flat_summary, scalars
from problems import Listener, quick

SQLALCHEMY = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")
"""MLflow's tables are older than the newest SQLAlchemy."""


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_PROJECT", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    wandb.teardown()  # it reads its environment once in a process, perhaps in the test of another file


# ---- what all trackers do, with one that keeps it in memory


class Memory(Tracker):
    """A service that fails on demand."""

    SERVICE, HELP = "memory", "Buy more"

    def __init__(self, where: str = "here") -> None:
        self.notes: list[str] = []
        super().__init__(self.notes.append)
        self.where, self.down, self.calls = where, False, 0
        self.opened: list[tuple[str | None, Mapping[str, Any]]] = []
        self.rounds: dict[int, Mapping[str, float]] = {}
        self.ended: list[Any] = []

    def place(self) -> str:
        return self.where

    def open(self, experiment: Experiment, settings: Mapping[str, Any], earlier: str | None) -> str:
        self.fail()
        self.opened.append((earlier, settings))
        return earlier or "id-1"

    def write(self, round: int, values: Mapping[str, float]) -> None:
        self.fail()
        self.rounds[round] = values

    def finish(self, summary: Mapping[str, float], finished: bool) -> None:
        self.fail()
        self.ended.append(summary if finished else "stopped")

    def abort(self) -> None:
        self.ended.append("aborted")

    def fail(self) -> None:
        self.calls += 1
        if self.down:
            raise OSError("no network")


class At(fedrane.Callback):
    """Does something after a round."""

    def __init__(self, round: int, do: Any) -> None:
        self.at, self.do = round, do

    def round(self, record: dict[str, Any]) -> None:
        if record["round"] == self.at:
            self.do()


def interrupt() -> None:
    raise KeyboardInterrupt


def down(tracker: Memory, is_down: bool) -> Any:
    return lambda: setattr(tracker, "down", is_down)


def same_rounds(tracker: Memory, result: Result) -> None:
    assert tracker.rounds == {record["round"]: scalars(record) for record in result.history}


def test_what_is_logged(tmp_path: Path) -> None:
    tracker = Memory()
    result = fedrane.run(quick(rounds=3, method="fedprox"), tmp_path / "run", callbacks=[tracker])
    same_rounds(tracker, result)
    assert tracker.rounds[2]["global/accuracy"] == result.history[1]["global/accuracy"]
    ((earlier, settings),) = tracker.opened
    assert earlier is None
    assert (settings["method.strength"], settings["partition.alpha"], settings["rounds"]) == (0.01, 0.5, 3)
    (summary,) = tracker.ended
    assert summary["summary/global/best/accuracy"] == result.summary["global/best"]["global/accuracy"]
    assert not summary.keys() & tracker.rounds[1].keys(), "a sum must not become the last point of a curve"
    assert not tracker.notes


def test_a_resumed_run_goes_on_in_the_same_one(tmp_path: Path) -> None:
    first, second = Memory(), Memory()
    fedrane.run(quick(rounds=4), tmp_path / "run", callbacks=[first], stop=lambda: len(first.rounds) == 1)
    assert first.ended == ["stopped"]
    fedrane.resume(tmp_path / "run", callbacks=[second])
    assert second.opened[0][0] == "id-1"
    assert (list(first.rounds), list(second.rounds)) == ([1, 2], [3, 4])


def test_a_run_that_was_begun_without_it_or_elsewhere_is_logged_whole(tmp_path: Path) -> None:
    fedrane.run(quick(rounds=2), tmp_path / "run", callbacks=[Memory("there")])
    late = Memory()
    result = fedrane.resume(tmp_path / "run", rounds=3, callbacks=[late])
    assert late.opened[0][0] is None
    same_rounds(late, result)
    known = Folder(tmp_path / "run").read_json(TRACKERS)
    assert known == {"memory: there": {"id": "id-1"}, "memory: here": {"id": "id-1"}}


def test_what_did_not_arrive_is_sent_when_the_run_is_resumed(tmp_path: Path) -> None:
    """Also if it was killed before its end, when it had not been tried again."""
    away, back = Memory(), Memory()
    fedrane.run(quick(rounds=3), tmp_path / "run", callbacks=[At(2, down(away, True)), away])
    assert list(away.rounds) == [1]
    assert Folder(tmp_path / "run").read_json(TRACKERS) == {"memory: here": {"id": "id-1", "missing": 2}}
    fedrane.resume(tmp_path / "run", rounds=4, callbacks=[back])
    assert list(back.rounds) == [2, 3, 4]
    assert Folder(tmp_path / "run").read_json(TRACKERS) == {"memory: here": {"id": "id-1"}}


def test_a_logger_is_as_new_in_the_next_run() -> None:
    tracker = Memory()
    fedrane.run(quick(rounds=2), callbacks=[At(1, down(tracker, True)), tracker])
    tracker.rounds.clear()
    down(tracker, False)()
    fedrane.run(quick(rounds=2), callbacks=[tracker])
    assert list(tracker.rounds) == [1, 2]


def test_a_failure_is_reported_once_and_made_good_at_the_end() -> None:
    tracker = Memory()
    when = [At(2, down(tracker, True)), At(4, down(tracker, False))]
    result = fedrane.run(quick(rounds=5), callbacks=[*when, tracker])
    assert result.finished
    assert tracker.notes == ["memory: no network; the training goes on, and the rest is sent at its end"]
    same_rounds(tracker, result)
    assert tracker.calls == 1 + 2 + 4 + 1, "it is not tried in each round, which could take a timeout"
    assert len(tracker.ended) == 1


def test_a_service_that_stays_away_does_not_end_the_run() -> None:
    tracker = Memory()
    result = fedrane.run(quick(rounds=3), callbacks=[At(2, down(tracker, True)), tracker])
    assert result.finished
    assert list(tracker.rounds) == [1]
    assert "2 rounds did not arrive" in tracker.notes[-1]
    plain = fedrane.run(quick(rounds=3))
    assert [r["global/accuracy"] for r in result.history] == [r["global/accuracy"] for r in plain.history]


def test_by_default_a_failure_is_a_warning() -> None:
    tracker = Memory()
    Tracker.__init__(tracker)
    with pytest.warns(UserWarning, match="memory: no network"):
        fedrane.run(quick(rounds=2), callbacks=[At(1, down(tracker, True)), tracker])


def test_what_cannot_be_opened_is_an_error_before_the_first_round() -> None:
    tracker, seen = Memory(), Listener()
    tracker.down = True
    with pytest.raises(ConfigError, match=r"memory cannot be used: no network\. Buy more"):
        fedrane.run(quick(rounds=2), callbacks=[tracker, seen])
    assert tracker.ended == []


def test_a_run_that_breaks_is_closed_as_broken() -> None:
    tracker = Memory()
    with pytest.raises(KeyboardInterrupt):
        fedrane.run(quick(rounds=3), callbacks=[tracker, At(2, interrupt)])
    assert tracker.ended == ["aborted"]


def test_only_numbers_are_scalars() -> None:
    record = {"round": 3, "warmup": True, "lost": [], "cohort": [1], "a": 1, "b": 0.5, "c": None, "clients/loss": [1.0]}
    assert scalars(record) == {"a": 1, "b": 0.5}
    assert flat_summary({"method": "x", "seed": 3, "rounds": 2}) == {"summary/rounds": 2}


# ---- W&B


def written(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(run.glob("wandb/offline-run-*/run-*.wandb"))]


def test_wandb(tmp_path: Path) -> None:
    """Two sessions of one run: settings, tags, every round, the summary, one id."""
    run = tmp_path / "run"
    asked = iter([False, True])  # after the second round
    e = quick(rounds=3, method="fedprox", seed=5)
    fedrane.run(e, run, callbacks=[WandbLogger("mine", notes="an option")], stop=lambda: next(asked))
    (entry,) = Folder(run).read_json(TRACKERS).values()
    id = entry["id"]
    result = fedrane.resume(run, callbacks=[WandbLogger("mine")])
    first, second = written(run)
    assert {path.name for path in run.glob("wandb/offline-run-*/run-*.wandb")} == {f"run-{id}.wandb"}
    for word in (b"fedprox", b"seed 5", b"digits-fedprox-seed5", b"method.strength", b"an option", b"mine"):
        assert word in first, word
    for record in result.history:
        session = first if record["round"] < 3 else second
        assert re.search(rb"global/accuracy[^a-z]{1,12}" + str(record["global/accuracy"]).encode(), session), record
    assert b"summary/global/best/accuracy" in second
    assert str(result.summary["global/best"]["global/accuracy"]).encode() in second


def test_wandb_leaves_a_run_that_is_open_alone(tmp_path: Path) -> None:
    import wandb

    with wandb.init(project="other", dir=str(tmp_path)) as mine:
        fedrane.run(quick(rounds=1), tmp_path / "run", callbacks=[WandbLogger()])
        mine.log({"after": 1})
        assert mine.project == "other"
    assert b"global/accuracy" not in next((tmp_path / "wandb").glob("offline-run-*/*.wandb")).read_bytes()


# ---- MLflow


def logged(uri: str, run: Path) -> tuple[Any, dict[int, float]]:
    from mlflow import MlflowClient

    (entry,) = Folder(run).read_json(TRACKERS).values()
    id = entry["id"]
    client = MlflowClient(uri)
    return client.get_run(id), {point.step: point.value for point in client.get_metric_history(id, "global/accuracy")}


@pytest.mark.parametrize(
    "scheme", ["file", pytest.param("sqlite", marks=[pytest.mark.slow, SQLALCHEMY])], ids=lambda name: name
)
def test_mlflow(tmp_path: Path, scheme: str) -> None:
    """Two sessions of one run, and more rounds than it was begun with."""
    uri, run = f"{scheme}:///{tmp_path / 'store'}", tmp_path / "run"
    fedrane.run(quick(rounds=2, method="fedprox", seed=5), run, callbacks=[MLflowLogger(uri, "mine")])
    found, _ = logged(uri, run)
    assert found.info.status == "FINISHED"
    assert found.data.params["rounds"] == "2"
    result = fedrane.resume(run, rounds=3, callbacks=[MLflowLogger(uri, "mine")])
    found, points = logged(uri, run)
    assert points == {record["round"]: pytest.approx(record["global/accuracy"]) for record in result.history}
    assert found.info.run_name == "digits-fedprox-seed5"
    assert found.data.params["method.strength"] == "0.01"
    tags = {"method": "fedprox", "dataset": "digits", "seed": "5", "rounds": "3"}
    assert tags.items() <= found.data.tags.items()
    best = result.summary["global/best"]["global/accuracy"]
    assert found.data.metrics["summary/global/best/accuracy"] == pytest.approx(best)
    assert found.data.metrics["bytes_up"] == result.history[-1]["bytes_up"]


def test_mlflow_knows_how_a_run_ended(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'store'}"
    fedrane.run(quick(rounds=2), tmp_path / "a", callbacks=[MLflowLogger(uri)], stop=lambda: True)
    assert logged(uri, tmp_path / "a")[0].info.status == "KILLED"

    with pytest.raises(KeyboardInterrupt):
        fedrane.run(quick(rounds=2), tmp_path / "b", callbacks=[MLflowLogger(uri), At(1, interrupt)])
    assert logged(uri, tmp_path / "b")[0].info.status == "FAILED"


def test_mlflow_writes_no_password(tmp_path: Path) -> None:
    place = MLflowLogger("https://me:secret@tracking.example:5000/x", "mine").place()
    assert place == "https://tracking.example:5000/x mine"


def test_a_uri_that_is_none_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"MLflow cannot be used: .*Check the URI"):
        fedrane.run(quick(rounds=1), callbacks=[MLflowLogger("nonsense://x")])


# ---- the command, and what is not installed


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri := f"file://{tmp_path / 'store'}")
    monkeypatch.setenv("WANDB_PROJECT", "of-the-environment")
    run = tmp_path / "run"
    words = ["dataset=digits", "model=mlp", "clients=4", "rounds=2", "epochs=1", "batch=256"]
    done = CliRunner().invoke(app, ["run", "--wandb", "--mlflow", "--out", str(run), *words])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["resume", "--wandb", "--mlflow", str(run), "rounds=3"])
    assert done.exit_code == 0, done.output
    known = Folder(run).read_json(TRACKERS)
    assert list(known) == ["Weights & Biases: of-the-environment", f"MLflow: {uri} fedrane"]
    assert len(written(run)) == 2
    Folder(run).write_json(TRACKERS, {"MLflow": known[f"MLflow: {uri} fedrane"]})
    assert list(logged(uri, run)[1]) == [1, 2, 3]


@pytest.mark.parametrize(
    ("logger", "package", "extra"),
    [(WandbLogger, "wandb", "wandb"), (MLflowLogger, "mlflow", "mlflow"), (MLflowLogger, "alembic", "mlflow")],
)
def test_without_the_package_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, logger: Any, package: str, extra: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs the extra '{extra}'.*pip install 'fedrane\[{extra}\]'"):
        logger()


def test_tensorboard_from_python(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    result = fedrane.run(quick(rounds=3), callbacks=[TensorBoardLogger(tmp_path)])
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    points = {event.step: event.value for event in events.Scalars("global/accuracy")}
    assert points == {r["round"]: pytest.approx(r["global/accuracy"]) for r in result.history}

"""Whatever moment a run is killed, resuming it gives the very bytes of the run that was never interrupted."""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from fedrane.training.run_folder import CONFIG
from harness import TINY, USER_METHODS, Driver, leftovers, lines, same_run, until
from problems import SLOW

UNEVEN = (*TINY, "participation=0.6", "client_dropout=0.2", "momentum=0.9", "clip=1")
GLIDING = f"{USER_METHODS}:Gliding"
"""Has state on the server, and a post-training stage."""


def words(method: str, every: int, rounds: int) -> tuple[str, ...]:
    return (*UNEVEN, f"method={method}", f"checkpoint_every={every}", f"rounds={rounds}")


def go_on(run: Path, of: tuple[str, ...]) -> tuple[str, ...]:
    """What its user does after a kill: resume, or where nothing had begun, start again."""
    return ("resume", str(run)) if (run / CONFIG).exists() else ("run", "--out", str(run), *of)


@pytest.mark.parametrize(("method", "every"), [pytest.param("fedavg", 1, marks=SLOW), ("local", 3)])
def test_twenty_kills_at_random_moments(fedrane: Driver, tmp_path: Path, method: str, every: int) -> None:
    """Killed twenty times on its way, the run ends in the same bytes."""
    of = words(method, every, rounds=60)
    assert fedrane("run", "--out", tmp_path / "reference", *of).status == 0
    run, chance = tmp_path / "killed", np.random.default_rng(every)
    for _ in range(20):
        before = lines(run)
        process = fedrane.start(*go_on(run, of))
        ahead = chance.integers(3)
        if ahead:
            goal = before // every * every + ahead  # beyond what the resumed run has in common with the killed one
            until(lambda goal=goal: lines(run) >= goal, f"{goal} rounds are recorded")
        time.sleep(chance.uniform(0, 0.02 if ahead else 0.12))
        process.send(signal.SIGKILL)
        assert process.wait().killed
    assert fedrane(*go_on(run, of)).status == 0
    same_run(run, tmp_path / "reference")


@pytest.mark.parametrize(
    ("method", "every", "stride"),
    [("fedavg", 3, 9), *(pytest.param(*each, marks=SLOW) for each in (("local", 1, 1), ("fedavg", 3, 2)))],
)
def test_killed_at_any_touch_of_the_folder(
    fedrane: Driver, tmp_path: Path, method: str, every: int, stride: int
) -> None:
    """Killed before each fsync, rename, removal and checkpoint in turn: also the very first, and old ones' removal."""
    of = words(method, every, rounds=4 if every > 1 else 3)
    log = tmp_path / "log"
    assert (
        fedrane("run", "--out", tmp_path / "reference", *of, sabotage={"trigger": "touch", "log": str(log)}).status == 0
    )
    touches = log.read_text().splitlines()
    assert {"fsync", "mkdir", "replace", "unlink", "save_file"} <= set(touches)
    for at in range(0, len(touches), stride):
        run = tmp_path / f"killed-{at}"
        assert fedrane("run", "--out", run, *of, sabotage={"trigger": "touch", "at": at}).killed
        ended = fedrane(*go_on(run, of))
        assert ended.status == 0, f"killed before {touches[at]} ({at}): {ended}"
        same_run(run, tmp_path / "reference")


@SLOW
def test_the_resumed_run_is_killed_too(fedrane: Driver, tmp_path: Path) -> None:
    """Killed once more wherever it touches its folder after it was resumed; the method has a post-training stage."""
    of = words(GLIDING, every=3, rounds=5)
    assert fedrane("run", "--out", tmp_path / "reference", *of).status == 0
    assert fedrane("run", "--out", tmp_path / "killed", *of, sabotage={"trigger": "line", "at": 5}).killed
    for at in itertools.count(0, 2):
        run = tmp_path / f"killed-{at}"
        shutil.copytree(tmp_path / "killed", run)
        again = fedrane("resume", run, sabotage={"trigger": "touch", "at": at})
        if not again.killed:
            break
        assert fedrane("resume", run).status == 0
        same_run(run, tmp_path / "reference")
    assert at > 20
    assert again.status == 0


@SLOW
def test_killed_while_more_rounds_are_planned(fedrane: Driver, tmp_path: Path) -> None:
    """Wherever it touches the folder of a finished run with post-training, the command brings it to its new end, and
    a plain resume to the old end or the new one."""
    old_plan, new_plan = (words(GLIDING, every=2, rounds=rounds) for rounds in (3, 5))
    for name, of in (("old", old_plan), ("new", new_plan)):
        assert fedrane("run", "--out", tmp_path / name, *of).status == 0
    for at in itertools.count(0, 2):
        run, plain = tmp_path / f"killed-{at}", tmp_path / f"plain-{at}"
        shutil.copytree(tmp_path / "old", run)
        again = fedrane("resume", run, "rounds=5", sabotage={"trigger": "touch", "at": at})
        if not again.killed:
            break
        shutil.copytree(run, plain)
        assert fedrane("resume", run, "rounds=5").status == 0
        same_run(run, tmp_path / "new")
        assert fedrane("resume", plain).status == 0
        same_run(plain, tmp_path / ("new" if "rounds = 5" in (plain / CONFIG).read_text() else "old"))
    assert at > 20
    assert again.status == 0


@pytest.mark.parametrize("round", [1, 4, 6])
def test_killed_in_the_middle_of_a_metrics_line(fedrane: Driver, tmp_path: Path, round: int) -> None:
    """Half a line is cut off and written again."""
    of = words(GLIDING, every=1, rounds=5)
    assert fedrane("run", "--out", tmp_path / "reference", *of).status == 0
    run = tmp_path / "killed"
    assert fedrane("run", "--out", run, *of, sabotage={"trigger": "line", "at": round}).killed
    assert lines(run) == round - 1
    assert fedrane("resume", run).status == 0
    same_run(run, tmp_path / "reference")


@pytest.mark.parametrize("round", [1, 6])
def test_killed_in_the_middle_of_a_checkpoint(fedrane: Driver, tmp_path: Path, round: int) -> None:
    """Half a checkpoint is never taken for one, and is cleared away."""
    of = words(GLIDING, every=1, rounds=5)
    assert fedrane("run", "--out", tmp_path / "reference", *of).status == 0
    run = tmp_path / "killed"
    assert fedrane("run", "--out", run, *of, sabotage={"trigger": "checkpoint", "at": round}).killed
    assert len(leftovers(run)) == 2
    assert fedrane("resume", run).status == 0
    same_run(run, tmp_path / "reference")


def test_killed_before_it_has_a_configuration(fedrane: Driver, tmp_path: Path) -> None:
    """A run that never began cannot be resumed; it is simply started again, also as another one."""
    run, of = tmp_path / "killed", words("fedavg", every=1, rounds=2)
    assert fedrane("run", "--out", run, *of, sabotage={"trigger": "touch", "at": 8}).killed
    assert run.exists()
    assert not (run / CONFIG).exists()
    refused = fedrane("resume", run)
    assert refused.status == 2
    assert "holds no run" in refused.stderr
    for folder in (run, tmp_path / "reference"):
        assert fedrane("run", "--out", folder, *of, "seed=1").status == 0
    same_run(run, tmp_path / "reference")


def test_an_early_stop_survives_a_kill(fedrane: Driver, tmp_path: Path) -> None:
    """Where patience ends a run, the one that was killed on its way ends in the same round."""
    of = (*words(GLIDING, every=3, rounds=40), "validation=0.2", "patience=2", "lr=1e-6")
    assert fedrane("run", "--out", tmp_path / "reference", *of).status == 0
    assert lines(tmp_path / "reference") < 40
    run = tmp_path / "killed"
    assert fedrane("run", "--out", run, *of, sabotage={"trigger": "line", "at": 3}).killed
    assert fedrane("resume", run).status == 0
    same_run(run, tmp_path / "reference")

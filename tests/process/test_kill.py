"""Whatever moment a run is killed, resuming it gives the very bytes of the run that was never interrupted."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest
from harness import TINY, Driver, lines, same_run, until

from fedrane.folder import CONFIG

UNEVEN = (*TINY, "participation=0.6", "dropout=0.2", "momentum=0.9")
SETTINGS = [("fedavg", 1), ("fedavg", 3), ("local", 1), ("local", 3)]


def words(method: str, every: int, rounds: int) -> tuple[str, ...]:
    return (*UNEVEN, f"method={method}", f"checkpoint_every={every}", f"rounds={rounds}")


def go_on(run: Path, of: tuple[str, ...]) -> tuple[str, ...]:
    """What its user does after a kill: resume, or where nothing had begun, start again."""
    return ("resume", str(run)) if (run / CONFIG).exists() else ("run", "--out", str(run), *of)


@pytest.mark.parametrize(("method", "every"), [("fedavg", 1), ("local", 3)])
def test_twenty_kills_at_random_moments(fedrane: Driver, tmp_path: Path, method: str, every: int) -> None:
    """Killed twenty times on its way, the run ends in the same bytes."""
    of = words(method, every, rounds=60)
    assert fedrane("run", "--out", tmp_path / "whole", *of).status == 0
    run, chance = tmp_path / "killed", random.Random(f"{method} {every}")
    for _ in range(20):
        before = lines(run)
        process = fedrane.start(*go_on(run, of))
        ahead = chance.randrange(3)
        if ahead:
            goal = before // every * every + ahead  # beyond what the resumed run has in common with the killed one
            until(lambda goal=goal: lines(run) >= goal, f"{goal} rounds are recorded")
        time.sleep(chance.uniform(0, 0.02 if ahead else 0.12))
        process.send(signal.SIGKILL)
        assert process.wait().killed
    assert fedrane(*go_on(run, of)).status == 0
    same_run(run, tmp_path / "whole")


@pytest.mark.parametrize(("method", "every"), SETTINGS)
def test_killed_at_any_touch_of_the_folder(fedrane: Driver, tmp_path: Path, method: str, every: int) -> None:
    """Before each fsync, rename, removal and checkpoint of the run, and then before one of the resumed run's."""
    of = words(method, every, rounds=4)
    log = tmp_path / "log"
    assert fedrane("run", "--out", tmp_path / "whole", *of, sabotage={"kind": "touch", "log": str(log)}).status == 0
    touches = log.read_text().splitlines()
    assert {"fsync", "replace", "unlink", "save_file"} <= set(touches)
    for at in range(SETTINGS.index((method, every)) % 2, len(touches), 2):
        run = tmp_path / f"killed-{at}"
        assert fedrane("run", "--out", run, *of, sabotage={"kind": "touch", "at": at}).killed
        again = fedrane(*go_on(run, of), sabotage={"kind": "touch", "at": at % 11})
        assert again.killed or again.status == 0
        assert fedrane(*go_on(run, of)).status == 0, f"killed before {touches[at]} ({at})"
        same_run(run, tmp_path / "whole")

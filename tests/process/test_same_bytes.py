"""One seed, one result."""

from __future__ import annotations

from pathlib import Path

from harness import TINY, Driver, checkpoints, executable, lines, metrics, same_run

WORDS = (*TINY, "method=local", "participation=0.5", "client_dropout=0.2", "rounds=6")


def test_one_seed_gives_one_result(fedrane: Driver, tmp_path: Path) -> None:
    """Two processes, which hash differently, write the same configuration, checkpoints and metrics."""
    assert fedrane("run", "--out", tmp_path / "one", *WORDS, "seed=7").status == 0
    assert executable(tmp_path, "run", "--out", tmp_path / "two", *WORDS, "seed=7").wait().status == 0
    same_run(tmp_path / "one", tmp_path / "two")
    assert checkpoints(tmp_path / "one") == checkpoints(tmp_path / "two")
    assert lines(tmp_path / "one") == 6


def test_another_seed_gives_other_cohorts(fedrane: Driver, tmp_path: Path) -> None:
    """Who takes part in a round is drawn from the seed."""
    for seed in (1, 2):
        assert fedrane("run", "--out", tmp_path / str(seed), *WORDS, f"seed={seed}").status == 0
    drawn = [[sorted(r["cohort"] + r["lost"]) for r in metrics(tmp_path / str(seed))] for seed in (1, 2)]
    assert drawn[0] != drawn[1]
    assert all(len(cohort) == 2 for cohorts in drawn for cohort in cohorts)

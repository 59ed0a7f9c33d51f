"""What a logger hooks into."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics
from fedrane.experiment import Experiment
from fedrane.training.result import Result


class Callback:
    """What another logger hooks into; every method may stay as it is."""

    def prepare(self, folder: Path | None) -> None:
        """Before ``begin``: the run folder; None for a run without one."""

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        """Before the first round of this process; ``history`` is what earlier ones recorded."""

    def round(self, record: Metrics) -> None:
        """After each round."""

    def message(self, text: str) -> None:
        """Something the user should know."""

    def end(self, result: Result) -> None:
        """After the last round, or when the run was asked to stop."""

    def close(self) -> None:
        """After ``end``, and after an error or an interruption too: release what is open."""

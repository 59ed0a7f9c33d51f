"""What a command prints while it trains: progress, or JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console

from fedrane.cli.console import write_line
from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics
from fedrane.experiment import Experiment
from fedrane.training.callbacks import Callback
from fedrane.training.progress import Messages, watcher
from fedrane.training.result import Result


class JsonLines(Callback):
    """One JSON object per line: each round's record, and at the end the summary."""

    def __init__(self, write: Any, fields: Mapping[str, str] = {}) -> None:
        self.write = write
        self.fields: dict[str, Any] = dict(fields)

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        self.fields |= {"method": experiment.method_name, "seed": experiment.seed}

    def round(self, record: Metrics) -> None:
        self.write(json.dumps({"event": "round", **self.fields, **record}) + "\n")

    def message(self, text: str) -> None:
        self.write(json.dumps({"event": "message", "text": text}) + "\n")

    def end(self, result: Result) -> None:
        folder = str(result.folder) if result.folder else None
        self.write(
            json.dumps({"event": "end", "finished": result.finished, "folder": folder, **self.fields, **result.summary})
            + "\n"
        )


def printer(console: Console, as_json: bool, quiet: bool, label: str = "", fields: Mapping[str, str] = {}) -> Callback:
    """The callback that prints a run. ``label`` precedes its lines; ``fields`` are added to its JSON objects."""
    if as_json:
        return JsonLines(write_line, fields)
    return Messages(console) if quiet else watcher(console, label)

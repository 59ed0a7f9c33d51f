"""Traces one round, writes the trace for Perfetto, and sums up where the time went."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from fedrane.data.federation import Federation
from fedrane.engines.evaluation import Metrics
from fedrane.experiment import Experiment
from fedrane.system.files import require_text
from fedrane.training.callbacks import Callback
from fedrane.training.loop import PHASES
from fedrane.training.result import Result

MAX_OPERATIONS = 12
"""In the summary, the slowest first."""


class Part(NamedTuple):
    name: str
    seconds: float
    calls: int


class Profiler(Callback):
    """Traces the second round (the first compiles and captures), or the only one."""

    def __init__(self, path: Path) -> None:
        require_text(path, "the profiler")
        self.path = path
        self.phases: list[Part] = []
        self.operations: list[Part] = []
        self._tracer: Any = None
        self._done = False

    def begin(self, experiment: Experiment, federation: Federation, history: Sequence[Metrics], total: int) -> None:
        left = total - (int(history[-1]["round"]) if history else 0)
        if left == 1:
            self._start()

    def round(self, record: Metrics) -> None:
        if self._tracer is None and not self._done:
            self._start()
        elif self._tracer is not None:
            self._stop()

    def end(self, result: Result) -> None:
        if self._tracer is not None:
            self._stop()

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._tracer = profile(activities=activities, acc_events=True)
        self._tracer.__enter__()

    def _stop(self) -> None:
        tracer, self._tracer, self._done = self._tracer, None, True
        tracer.__exit__(None, None, None)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        tracer.export_chrome_trace(str(self.path))
        events = tracer.key_averages()
        on_gpu = any(event.self_device_time_total for event in events)
        self.phases = [Part(e.key, e.cpu_time_total / 1e6, e.count) for e in events if e.key in PHASES]
        self.phases.sort(key=lambda part: PHASES.index(part.name))
        parts = [
            Part(e.key, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6, e.count)
            for e in events
            if e.key not in PHASES
        ]
        self.operations = sorted(parts, key=lambda part: -part.seconds)[:MAX_OPERATIONS]

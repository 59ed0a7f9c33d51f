"""A step on static buffers: captured once, then replayed for new contents of the buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedrane.engines.replay import Recording


class _Graph(NamedTuple):
    """A captured CUDA graph, and what the captured work gave: tensors that each replay overwrites."""

    graph: torch.cuda.CUDAGraph
    output: Any

    def replay(self) -> None:
        self.graph.replay()


class StaticStep:
    """Buffers that keep their memory, and the work on them: as a CUDA graph on a GPU, as a recording on a CPU.

    On a GPU with a ``stream``, captures and replays go there. ``pool`` is the memory of its graphs; steps that never
    run at the same time may share one.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None = None, pool: Any = None) -> None:
        self.device, self.stream, self.pool = device, stream, pool
        self.buffers: list[Tensor] = []
        self._layout: Any = None
        self._captured: dict[int, _Graph | Recording] = {}

    def load(self, values: list[Tensor], layout: Any, allocate: Callable[[], list[Tensor]]) -> None:
        """Copy the values into the buffers; for values of another layout than before, these are allocated first.

        A buffer may be longer than its value: then its first entries are overwritten.
        """
        if layout != self._layout:
            self._layout, self.buffers = layout, allocate()
            self.forget()
        to = [b if b.shape == v.shape else b[: len(v)] for b, v in zip(self.buffers, values, strict=True)]
        if to:
            torch._foreach_copy_(to, values)

    def forget(self) -> None:
        """Capture again next time: memory that the work uses has moved."""
        self._captured = {}

    def run(
        self,
        work: Callable[[], Any],
        writes: Sequence[Tensor] | None,
        size: int = 0,
        warm_up: Callable[[], object] | None = None,
    ) -> Any:
        """Do the work; there may be several, each with its own ``size``.

        It leaves ``writes`` changed and nothing else. With None it writes nothing and gives tensors, which a GPU
        overwrites the next time; on a CPU that is done plainly. ``warm_up``, by default the work itself, runs before
        the capture on a GPU and compiles what is compiled on first use.
        """
        if self.device.type != "cuda" and writes is None:
            return work()
        if size not in self._captured:
            on_cpu = self.device.type != "cuda"
            self._captured[size] = Recording(work, writes or ()) if on_cpu else self._capture(work, warm_up or work)
        captured = self._captured[size]
        with self.on_stream():
            captured.replay()
        return captured.output if isinstance(captured, _Graph) else None

    def _capture(self, work: Callable[[], Any], warm_up: Callable[[], object]) -> _Graph:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self.stream or torch.cuda.Stream(self.device)):  # type: ignore[no-untyped-call]
            warm_up()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            output = work()
        return _Graph(graph, output)

    def on_stream(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    @property
    def recordings(self) -> list[Recording]:
        return [captured for captured in self._captured.values() if isinstance(captured, Recording)]

    @property
    def plain(self) -> bool:
        """Whether some work cannot be replayed, and is done plainly each time."""
        return any(recording.plain for recording in self.recordings)

    @property
    def refused(self) -> str:
        """Why it cannot, for the user; empty if it can, or if replaying would gain nothing."""
        return next((recording.refused for recording in self.recordings if recording.refused), "")

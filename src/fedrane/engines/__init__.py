"""Where and when hooks run. Engines know no method; the sequential one is the reference for all others."""

from fedrane.engines.base import Engine, LocalEngine, Trained
from fedrane.engines.processes import Processes
from fedrane.engines.registry import (
    AUTO,
    AUTOMATIC,
    DEPLOYED,
    ENGINES,
    WORKERS,
    automatic_threads,
    check,
    choose,
    make,
    opened,
    server_threads,
)
from fedrane.engines.sequential import Sequential
from fedrane.engines.stacked import Stacked
from fedrane.engines.threaded import Threaded

__all__ = [
    "AUTO",
    "AUTOMATIC",
    "DEPLOYED",
    "ENGINES",
    "WORKERS",
    "Engine",
    "LocalEngine",
    "Processes",
    "Sequential",
    "Stacked",
    "Threaded",
    "Trained",
    "automatic_threads",
    "check",
    "choose",
    "make",
    "opened",
    "server_threads",
]

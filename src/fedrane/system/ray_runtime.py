"""Ray for this process: a cluster of its own, or the one that ``RAY_ADDRESS`` names; and pickles for its workers.

The address is not a setting: a run folder from someone else must not choose the machines whose pickles are loaded here.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fedrane.errors import ConfigError

ADDRESS = "RAY_ADDRESS"
ENVIRONMENT = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
"""No telemetry; and Ray behaves as it will in future versions, of which it would warn."""
LOGGING: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
"""Only errors: a run reports through its callbacks."""


@contextmanager
def running(cpus: int) -> Iterator[None]:
    """Ray, with this number of CPUs if it is started here. One that the caller has started is used, and left running;
    else the cluster that ``RAY_ADDRESS`` names is joined."""
    import ray

    if ray.is_initialized():
        yield
        return
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    address = os.environ.get(ADDRESS)
    own: dict[str, Any] = {} if address else {"num_cpus": cpus, "include_dashboard": False}
    with quiet("ray"):
        try:
            ray.init(**own, **LOGGING)
        except (OSError, RuntimeError, ValueError) as error:
            what = f"{ADDRESS}={address}" if address else "engine=ray: Ray does not start"
            raise ConfigError(what, str(error), "Start a cluster with 'ray start --head'" if address else "") from error
        try:
            yield
        finally:
            ray.shutdown()


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Silence these loggers, errors aside."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def dumps(value: Any) -> bytes:
    """Pickle for a process with the same packages; what is in a user's file goes along, as it cannot be imported."""
    from ray import cloudpickle

    pickle: Any = cloudpickle
    modules = sys.modules.copy()  # at once: while a list of items grows, another thread may import
    users = [module for name, module in modules.items() if name.startswith("fedrane_user_")]
    for module in users:
        pickle.register_pickle_by_value(module)
    try:
        pickled: bytes = pickle.dumps(value)
    finally:
        for module in users:
            pickle.unregister_pickle_by_value(module)
    return pickled


def loads(pickled: bytes) -> Any:
    """The value; for what this process or its own workers have pickled."""
    from ray import cloudpickle

    return cloudpickle.loads(pickled)

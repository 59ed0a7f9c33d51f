"""A warm interpreter that forks a process for each command it is asked for: a real process without torch's start-up.

Requests and replies are lines of JSON. ``{"argv": […], …}`` starts a command and replies with its process number;
``{"wait": pid}`` replies with how it ended.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard
from sabotage import sabotage

import fedrane.cli


def warm() -> None:
    """Import whatever is imported late; on one thread, so that the process may be forked afterwards."""
    torch.set_num_threads(1)
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"  # scikit-learn imports pandas, and that pyarrow
    with tempfile.TemporaryDirectory() as folder:
        for method in ("fedavg", "local"):
            command(["run", "--out", f"{folder}/{method}", f"method={method}", "model=mlp", "clients=4", "rounds=1"])
    threads = len(list(Path("/proc/self/task").iterdir()))
    if threads != 1:
        raise RuntimeError(f"{threads} threads: a fork would lose all but one")


def command(argv: list[str]) -> int:
    sys.argv = ["fedrane", *argv]
    try:
        fedrane.cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:  # noqa: BLE001 - as the interpreter would
        traceback.print_exc()
        return 1
    return 0


def child(request: dict[str, Any]) -> int:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
    warnings.simplefilter("error")
    os.chdir(request["cwd"])
    os.environ.update(request["env"])
    if request["limit"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["limit"], request["limit"]))
    if request["sabotage"]:
        sabotage(**request["sabotage"])
    for name in request["absent"]:
        sys.modules.update(dict.fromkeys([name, *(m for m in sys.modules if m.startswith(f"{name}."))]))
    status = command(request["argv"])
    sys.stdout.flush()
    return status


def fork(work: Callable[[], int]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = work()
    except BaseException:  # noqa: BLE001 - nothing of the parent's may run here
        traceback.print_exc()
    os._exit(status)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    warm()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        if "wait" in request:
            _, status = os.waitpid(request["wait"], 0)
            reply = {"status": os.waitstatus_to_exitcode(status)}
        else:
            reply = {"pid": fork(lambda request=request: child(request))}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()

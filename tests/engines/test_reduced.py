"""Uploads that are summed up as they come: the same bits as with all of them kept."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fedrane
from asserts import same_bytes, untimed
from fedrane import Algorithm, Done, State, Task, tree
from fedrane.engines import Engine, make, threaded
from fedrane.engines.processes import Processes, impossible
from fedrane.engines.sequential import Sequential
from fedrane.engines.stacked import Stacked
from fedrane.engines.threaded import Threaded
from fedrane.errors import Diverged
from fedrane.methods import METHODS
from fedrane.methods.fedavg import FedAvg
from fedrane.ops.attack import Attack
from fedrane.ops.gate import Gate
from fedrane.system import memory
from fedrane.system.threads import limited
from fedrane.testing import conformance
from fedrane.training import loop
from harness import PATIENCE, environment
from problems import FORKS, KINDS, Listener, federation, quick, slow_except, table

AVERAGING = [name for name, entry in METHODS.items() if not entry.cls(**entry.preset).sees_uploads]
SEES_UPLOADS = {
    *("apple", "fedfv", "fedmgda", "fedmtl", "fedrane", "fedrane-wo-gne", "fedrane-wo-lra", "krum", "median"),
    *("multi-krum", "q-ffl", "rfa", "trimmed-mean"),
}
ENGINES = ["sequential", "stacked", "threaded", pytest.param("processes", marks=FORKS)]
SIZES = [9, 4, 17, 8, 1, 12, 9]
COHORT = [0, 1, 3, 4, 5, 6]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are summed up however few they are."""
    monkeypatch.setattr(loop, "KEPT_UPLOADS", {"cpu": 0})


def some_clients(method: Algorithm) -> Any:
    ends = [sum(SIZES[:k]) for k in range(len(SIZES) + 1)]
    clients = [list(range(begin, begin + size)) for begin, size in zip(ends, SIZES, strict=False)]
    return federation(table(90), clients, batch=5, optimizer=fedrane.task.SGD(momentum=0.5))


def made(name: str, waves: int = 0) -> Engine:
    """An engine; a stacked one with that many clients at a time."""
    method = FedAvg()
    engine = make(name, method, some_clients(method))
    if isinstance(engine, Stacked) and waves:
        engine.max_clients = waves
    return engine


def reduced(engine: Any) -> State:
    """The server after a round whose uploads are summed up."""
    server = engine.algorithm.init(engine.federation.task, engine.federation.roster)
    sent = engine.train_round(server, {}, COHORT, 1, 0.1, 2, reduce=True)
    assert not tree.leaves(sent.ups)
    return sent.sums.update(sent.cohort)[0]  # type: ignore[no-any-return]


def test_who_must_see_every_upload() -> None:
    assert set(METHODS) - set(AVERAGING) == SEES_UPLOADS


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_is_the_same_with_and_without_the_uploads(engine: str) -> None:
    made_engine: Any = made(engine, waves=4)
    server = FedAvg().init(made_engine.federation.task, made_engine.federation.roster)
    kept, gone = (made_engine.train_round(server, {}, COHORT, 1, 0.1, 2, reduce) for reduce in (False, True))
    assert kept.sums is None
    assert gone.ups == State(fedrane.Model({}, {}), {})
    same_bytes(gone.sums.update(gone.cohort)[0], FedAvg().aggregate(None, server, kept.ups, kept.cohort)[0])  # type: ignore[arg-type]
    for column in ("index", "size", "steps", "round", "lr"):
        assert torch.equal(getattr(gone.cohort, column), getattr(kept.cohort, column))
    for what in ("client_states", "metrics", "examples", "bytes_down", "bytes_up", "messages"):
        assert getattr(gone, what) == getattr(kept, what), what
    assert gone.sums.finite == [True] * len(COHORT)


@pytest.mark.parametrize("engine", ["threaded", pytest.param("processes", marks=FORKS)])
def test_any_number_of_workers_gives_the_same_bits(engine: str) -> None:
    servers = []
    for workers in (1, 2, 5):
        with limited(workers):
            servers.append(reduced(made(engine)))
    for server in servers[1:]:
        same_bytes(servers[0], server)


def test_any_wave_gives_the_same_bits() -> None:
    whole = reduced(made("stacked"))
    for waves in (1, 2, 3, 5):
        same_bytes(reduced(made("stacked", waves)), whole)


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("name", slow_except([name for name in KINDS if name in AVERAGING], AVERAGING))
def test_every_averaging_method_ends_with_the_same_bytes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Round by round, with lost uploads, post-training stages and whatever clients keep; the cosines alone are gone."""
    entry = METHODS[name]

    def run() -> fedrane.Result:
        method = entry.cls(**entry.preset)
        return conformance.trained(method, engine="stacked", participation=0.8, client_dropout=0.2, rounds=3)

    gone = run()
    monkeypatch.setattr(loop, "KEPT_UPLOADS", {"cpu": 1 << 30})
    kept = run()
    same_bytes(conformance.states(gone), conformance.states(kept))
    for a, b in zip(untimed(gone.history), untimed(kept.history), strict=True):
        assert "cosine" not in a or a["cohort"] == []
        b.pop("cosine", None)
        assert a == b


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    "seen",
    [{"gate": Gate("refuse")}, {"attack": Attack("sign")}, {"method": "median"}],
    ids=lambda seen: next(iter(seen)),
)
def test_uploads_are_kept_for_whom_must_see_them(seen: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And it is said if they will not fit."""
    listener = Listener()
    result = fedrane.run(quick(rounds=1, **seen), callbacks=[listener])
    assert len(result.history[0]["cosine"]) == 4
    assert not any("more than is free" in text for text in listener.messages)
    monkeypatch.setattr(memory, "available", lambda: 1e5)
    monkeypatch.setattr(memory, "require", lambda *_: None)
    fedrane.run(quick(rounds=1, **seen), callbacks=[listener])
    (text,) = (text for text in listener.messages if "more than is free" in text)
    assert {"gate": "gate.kind=refuse", "attack": "attack.kind=sign", "method": "the method"}[next(iter(seen))] in text


class Breaks(FedAvg):
    """Client 2's upload is not finite."""

    def finish(self, task: Task, ctx: Any, work: Any) -> Done:
        done = super().finish(task, ctx, work)
        bad = torch.where(ctx.client.index == 2, torch.nan, 0.0)
        model = done.up.model
        return done._replace(up=State(model._replace(params=tree.map(lambda p: p + bad, model.params)), {}))


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_whose_upload_is_not_finite_is_named(engine: str) -> None:
    with pytest.raises(Diverged, match=r"from client 2\)"):
        fedrane.run(quick(method=Breaks(), rounds=1, engine=engine))


def test_few_results_wait_at_a_time() -> None:
    """Also if the first takes longest: the others do not run ahead of it without end."""
    with limited(2):
        engine = Threaded(FedAvg(), some_clients(FedAvg()))
    first, started = threading.Event(), list[int]()

    def work(_: Sequential, item: int) -> int:
        started.append(item)
        assert item or first.wait(PATIENCE)
        return item

    results = engine.in_order(work, range(50))
    release = threading.Timer(0.3, first.set)
    release.start()
    taken = []
    for result in results:
        taken.append(result)
        assert len(started) <= len(taken) + 2 * threaded.AHEAD
    assert taken == list(range(50))
    release.join()


@FORKS
def test_processes_use_the_same_memory_again() -> None:
    with limited(2):
        engine = Processes(FedAvg(), some_clients(FedAvg()))
    with contextlib.closing(engine.in_order(lambda _, item: torch.full((1000,), item), range(40))) as results:
        for k, result in enumerate(results):
            assert torch.equal(result, torch.full((1000,), k))
            files = [fd for fd in Path("/proc/self/fd").iterdir() if "memfd:clients" in os.path.realpath(fd)]
            assert sum(fd.stat().st_blocks for fd in files) * 512 <= 2 * threaded.AHEAD * 2**14  # of 8000 bytes each
    some = engine.in_order(lambda _, item: item, range(40))
    assert next(some) == 0
    some.close()  # type: ignore[attr-defined]  # the others are not waited for


@pytest.mark.parametrize("engine", ["threaded", pytest.param("processes", marks=FORKS)])
def test_an_error_of_one_ends_the_round(engine: str) -> None:
    def work(_: Sequential, item: int) -> int:
        if item == 3:
            raise ValueError("of client 3")
        time.sleep(0.01)
        return item

    made_engine: Any = made(engine)
    results: Iterator[int] = made_engine.in_order(work, range(100))
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="of client 3"):
        next(results)


PEAK = """
from pathlib import Path
from torch import nn
from fedrane.engines import make
from fedrane.methods.fedavg import FedAvg
from fedrane.system.threads import limited
from problems import federation, table

def peak():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 1024

def wide(shape, classes):
    return nn.Sequential(nn.Linear(shape[0], 15_000), nn.Tanh(), nn.Linear(15_000, classes))

for count in (32, 288):
    fed = federation(table(2 * count), [[2 * k, 2 * k + 1] for k in range(count)], wide, batch=2)
    with limited(2):
        engine = make("{engine}", FedAvg(), fed)
    engine.max_clients = 8  # of the stacked one
    server = FedAvg().init(fed.task, fed.roster)
    sent = engine.train_round(server, {{}}, list(range(count)), 1, 0.1, 1, reduce=True)
    assert sent.bytes_up > count * 2**20
    sent.sums.update(sent.cohort)
    print(peak())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from Linux's /proc")
@pytest.mark.parametrize("engine", slow_except(["threaded"], ["sequential", "stacked", "threaded", "processes"]))
def test_memory_does_not_grow_with_the_cohort(engine: str) -> None:
    """Of models of 1.1 MiB, 256 more would be 293 MiB, and twice that while they are stacked. The C library keeps some
    of what was freed: up to 110 MiB of it were seen, and no more with 256 clients again."""
    if engine == "processes" and impossible():
        pytest.skip(impossible())
    paths = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-c", PEAK.format(engine=engine)],
        env=environment(PYTHONPATH=paths),
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert not done.returncode, done.stderr
    few, many = map(float, done.stdout.split())
    assert many - few < 160

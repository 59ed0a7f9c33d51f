"""Ray's workers end where threads end, to the last bit: however many there are, and whichever of them die."""

from __future__ import annotations

import gc
import re
import subprocess
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from hypothesis import given
from hypothesis import strategies as st
from ray.cluster_utils import Cluster
from safetensors.torch import load_file

import fedrane
from asserts import untimed
from fedrane import tree
from fedrane.engines import ray_workers
from fedrane.errors import ConfigError, FedraneError
from fedrane.methods import METHODS
from fedrane.system import loading, ray_runtime
from fedrane.testing import conformance
from fedrane.training import loop
from fedrane.training.result import Result
from harness import FEDRANE, PATIENCE, TINY, environment
from problems import EVERY_METHOD, SLOW

pytestmark = pytest.mark.filterwarnings("default")  # Ray's own are its to mend

METHODS_OF_A_USER = '''
import os
import time
from dataclasses import dataclass
from pathlib import Path

import fedrane
import ray


class Wrong(fedrane.Algorithm):
    def finish(self, task, ctx, work):
        raise KeyError("no such thing")


@dataclass(frozen=True)
class Dies(fedrane.Algorithm):
    """The process that finishes client 1 in round 2 is killed, so many times."""

    folder: str = ""
    times: int = 1

    def finish(self, task, ctx, work):
        if int(ctx.client.round) == 2 and int(ctx.client.index) == 1:
            before = len(os.listdir(self.folder))
            if before < self.times:
                Path(self.folder, str(before)).touch()
                os._exit(1)
        return super().finish(task, ctx, work)


@dataclass(frozen=True)
class Holds(fedrane.Algorithm):
    """In round 2, a client on a machine that is not the first waits until its machine is killed."""

    held: str = ""

    def finish(self, task, ctx, work):
        first = [node["NodeID"] for node in ray.nodes() if "node:__internal_head__" in node["Resources"]]
        if int(ctx.client.round) == 2 and ray.get_runtime_context().get_node_id() not in first:
            Path(self.held).touch()
            time.sleep(600)
        return super().finish(task, ctx, work)
'''


@pytest.fixture
def users(tmp_path: Path) -> Path:
    """A user's file of methods, which no worker can import: they are sent."""
    file = tmp_path / "users.py"
    file.write_text(METHODS_OF_A_USER)
    return file


def of_user(users: Path, name: str, **fields: Any) -> fedrane.Algorithm:
    algorithm: fedrane.Algorithm = loading.load(f"{users}:{name}", "method")(**fields)
    return algorithm


@pytest.fixture(scope="module")
def two_workers() -> Iterator[None]:
    """Ray takes seconds to start: once for all tests."""
    with ray_workers.opened(gpu=False, workers=2):
        yield
    _collect()


@pytest.fixture(autouse=True)
def nothing_left_for_other_tests() -> Iterator[None]:
    yield
    _collect()


def _collect() -> None:
    """What Ray leaves open must not be noticed in another test."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def same(one: Result, other: Result) -> None:
    assert tree.equal(conformance.states(one), conformance.states(other))
    assert untimed(one.history) == untimed(other.history)


@given(
    st.lists(st.integers(0, 100), min_size=1, max_size=30).filter(any),
    st.integers(1, 12),
)
def test_ranges_are_whole_and_none_is_much_larger_than_the_others(costs: list[int], count: int) -> None:
    parts = ray_workers.ranges(costs, count)
    assert [i for part in parts for i in range(len(costs))[part]] == list(range(len(costs)))
    assert all(costs[part] for part in parts)
    assert len(parts) <= count
    assert max(sum(costs[part]) for part in parts) <= sum(costs) / count + max(costs)


@SLOW
@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_ends_where_it_ends_in_threads(two_workers: None, name: str) -> None:
    entry = METHODS[name]
    settings: dict[str, Any] = {"participation": 0.8, "client_dropout": 0.2, "precision": "float32", "threads": 2}
    one, other = (conformance.trained(entry.cls(**entry.preset), engine=e, **settings) for e in ("threaded", "ray"))
    same(one, other)


@SLOW
@pytest.mark.parametrize("name", ["fedavg", "fedbabu"])
def test_it_ends_where_threads_end(two_workers: None, name: str) -> None:
    """A worker makes one range at a time; more ranges than workers, more clients than ranges."""
    entry = METHODS[name]
    settings: dict[str, Any] = {"clients": 11, "precision": "float32"}
    one, other = (conformance.trained(entry.cls(**entry.preset), engine=e, **settings) for e in ("threaded", "ray"))
    same(one, other)
    assert other.experiment.engine == "ray"


@SLOW
def test_uploads_that_are_summed_in_the_workers_end_where_they_end_all_kept(
    two_workers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges come in any order, of other sizes than a tree's halves."""
    one = conformance.trained(METHODS["scaffold"].cls(), engine="ray", clients=11)
    monkeypatch.setattr(loop, "KEPT_UPLOADS", {"cpu": 0})
    monkeypatch.setattr(ray_workers, "MAX_RANGE", 1)
    other = conformance.trained(METHODS["scaffold"].cls(), engine="ray", clients=11)
    assert tree.equal(conformance.states(one), conformance.states(other))
    assert "cosine" in one.history[0]
    assert "cosine" not in other.history[0]


@SLOW
def test_a_worker_that_dies_is_replaced_and_its_clients_are_trained_again(
    two_workers: None, users: Path, tmp_path: Path
) -> None:
    messages: list[str] = []

    class Messages(fedrane.Callback):
        def message(self, text: str) -> None:
            messages.append(text)

    deaths = tmp_path / "deaths"
    deaths.mkdir()
    dies = of_user(users, "Dies", folder=str(deaths))
    data, network = conformance.blobs(), conformance.network(True)
    e = conformance.experiment(dies, engine="ray")
    died = fedrane.run(e, dataset=data, model=network, callbacks=[Messages()], progress=False)
    assert [path.name for path in deaths.iterdir()] == ["0"]
    assert messages == [f"round 2: {ray_workers.LOST}"]
    lived = conformance.trained(dies, engine="threaded")
    assert tree.equal(conformance.states(died), conformance.states(lived))


@SLOW
def test_clients_that_kill_each_worker_end_the_run(two_workers: None, users: Path, tmp_path: Path) -> None:
    deaths = tmp_path / "deaths"
    deaths.mkdir()
    with pytest.raises(FedraneError, match=r"3 workers of Ray have died with the same clients: .*memory"):
        conformance.trained(of_user(users, "Dies", folder=str(deaths), times=9), engine="ray")
    assert len(list(deaths.iterdir())) == ray_workers.MAX_ATTEMPTS


@SLOW
def test_an_error_in_a_hook_is_raised_here_with_its_client_and_line(two_workers: None, users: Path) -> None:
    with pytest.raises(KeyError, match="no such thing") as caught:
        conformance.trained(of_user(users, "Wrong"), engine="ray")
    assert re.fullmatch(r"in finish of client \d, round 1", caught.value.__notes__[0])
    assert caught.value.__notes__[1] == f"{users}, line 13, in finish"


def test_an_engine_without_its_workers_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result = conformance.trained(METHODS["fedavg"].cls())
    engine = ray_workers.Ray(result.algorithm, result.federation)
    monkeypatch.setattr(ray_workers, "_open", [])
    with pytest.raises(ConfigError, match=r"engine=ray without workers.*engines\.opened"):
        engine.train_round(result.server, {}, [0], 1, 0.1, 1)


def test_a_cluster_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**_: Any) -> None:
        raise ConnectionError("nobody listens")

    monkeypatch.setattr(ray_workers, "_open", [])
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setenv(ray_runtime.ADDRESS, "127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127\.0\.0\.1:1: nobody listens. Start a cluster"):
        conformance.trained(METHODS["fedavg"].cls(), engine="ray")


@SLOW
def test_one_worker_and_two_and_a_cluster_that_loses_a_machine(users: Path, tmp_path: Path) -> None:
    """The same bits with one worker, and with two machines of which one is killed in the middle of a round."""
    held = tmp_path / "held"

    def run(engine: str, *words: str, **more: str) -> dict[str, Any]:
        out = tmp_path / engine / "run"
        command = [FEDRANE, "run", "--out", out, *TINY, "rounds=3", f"engine={engine}", *words]
        ended = subprocess.run(command, env=environment(**more), capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
        assert (ray_workers.LOST in ended.stdout + ended.stderr) == bool(more)
        return tree.nest(load_file(max((out / "checkpoints").iterdir())))

    threads, one = run("threaded", "threads=1"), run("ray", "threads=1")
    (tmp_path / "ray").rename(tmp_path / "one")
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    try:
        killing = threading.Thread(target=_kill, args=(cluster, cluster.add_node(num_cpus=1), held), daemon=True)
        killing.start()
        two = run("ray", f"method={users}:Holds", f"method.held={held}", **{ray_runtime.ADDRESS: cluster.address})
        killing.join(PATIENCE)
    finally:
        cluster.shutdown()
    assert tree.equal(threads, one)
    assert tree.equal(threads, two)


def _kill(cluster: Cluster, node: Any, held: Path) -> None:
    """Kill the machine as soon as a client of the second round is on it."""
    end = time.monotonic() + PATIENCE
    while not held.exists() and time.monotonic() < end:
        time.sleep(0.05)
    cluster.remove_node(node, allow_graceful=False)

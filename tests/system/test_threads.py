"""The number of threads of a run, what decides it, and that it is restored afterwards. No time is asserted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_info

import fedrane
from asserts import same_bytes, untimed
from fedrane import Algorithm, Experiment, Result, engines, tree
from fedrane.data.dataset import Dataset
from fedrane.engines import registry
from fedrane.errors import ConfigError
from fedrane.report.comparison import compare
from fedrane.testing import conformance
from fedrane.training import setup
from fedrane.training.run_folder import CONFIG
from problems import FORKS, SLOW, Listener, federation, quick, table

Many = Callable[[int], None]


@pytest.fixture
def machine() -> Iterator[Many]:
    """Sets the number of threads that torch has when a run begins."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


class Watching(Algorithm):
    """Records the number of threads on which its hooks compute."""

    seen: list[tuple[str, int]]

    def __init__(self, fails: bool = False) -> None:
        self.__dict__["seen"], self.__dict__["fails"] = [], fails

    def init(self, task: Any, roster: Any) -> Any:
        self.seen.append(("init", torch.get_num_threads()))
        return super().init(task, roster)

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        self.seen.append(("step", torch.get_num_threads()))
        if self.fails:
            raise ZeroDivisionError
        return super().step(task, ctx, work, batch)

    def aggregate(self, task: Any, server: Any, ups: Any, cohort: Any) -> Any:
        self.seen.append(("aggregate", torch.get_num_threads()))
        self.seen.append(("blas", max(info["num_threads"] for info in blas())))
        return super().aggregate(task, server, ups, cohort)

    def predict(self, task: Any, model: Any, x: Any, mask: Any) -> Any:
        self.seen.append(("predict", torch.get_num_threads()))
        return super().predict(task, model, x, mask)

    def on(self, *hooks: str) -> set[int]:
        return {number for hook, number in self.seen if hook in hooks}


def blas() -> list[dict[str, Any]]:
    return [info for info in threadpool_info() if info["user_api"] == "blas"]


def ended(result: Result) -> tuple[Any, Any]:
    return conformance.states(result), untimed(result.history)


def same_end(one: Result, other: Result) -> None:
    (a, history), (b, other_history) = ended(one), ended(other)
    same_bytes(a, b)
    assert history == other_history


# ---- the chosen number is used


@pytest.mark.parametrize("engine", ["sequential", "stacked", "auto"])
def test_small_networks_are_computed_on_one_thread(engine: str, machine: Many) -> None:
    machine(2)
    method = Watching()
    assert conformance.trained(method, engine=engine).experiment.threads == 1
    assert method.on("init", "step", "aggregate", "predict", "blas") == {1}


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_a_number_that_is_given_is_taken(engine: str, machine: Many) -> None:
    machine(1)
    method = Watching()
    assert conformance.trained(method, engine=engine, threads=2).experiment.threads == 2
    assert method.on("step", "aggregate", "blas") == {2}
    assert method.on("init") == {1}, "where a run begins does not depend on it"


@pytest.mark.parametrize("given", [0, 3])
def test_workers_compute_on_one_thread_each_and_so_does_the_server(given: int, machine: Many) -> None:
    machine(2)
    method = Watching()
    result = conformance.trained(method, engine="threaded", threads=given)
    assert result.experiment.threads == (given or 2)
    assert method.on("step", "aggregate", "predict") == {1}
    assert torch.get_num_threads() == 2


def test_what_was_set_before_is_the_most_that_is_taken_unasked(machine: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.set_num_threads`` or OMP_NUM_THREADS."""
    fed = federation(table(), [[0, 1], [2, 3]])
    chosen = {name: engines.choose(name, 0, Algorithm(), fed, 4)[1] for name in ("stacked", "sequential", "threaded")}
    assert chosen == {"stacked": 1, "sequential": 1, "threaded": 4}
    monkeypatch.setattr(registry, "MAX_STACKED_MACS", 0)
    monkeypatch.setattr(registry, "MIN_PARALLEL_STACK_MACS", 0)
    for most, stack in ((1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (64, 8)):
        assert engines.choose("stacked", 0, Algorithm(), fed, most) == ("stacked", stack), "half, and at most 8"
        assert engines.choose("sequential", 0, Algorithm(), fed, most) == ("sequential", most)
        assert engines.choose("flower", 0, Algorithm(), fed, most) == ("flower", 1)


@pytest.mark.parametrize("threads", [-1, 1025, 1.5])
def test_a_number_that_cannot_be(threads: Any) -> None:
    with pytest.raises(ConfigError, match="threads="):
        quick(threads=threads)


# ---- the caller's number is restored


def libraries() -> list[tuple[str, int]]:
    return [(info["filepath"], info["num_threads"]) for info in threadpool_info()]


def test_the_caller_s_threads_are_as_before(machine: Many, tmp_path: Path) -> None:
    fedrane.run(quick(rounds=1))  # load all libraries before counting
    machine(3)
    before = libraries()
    fedrane.run(quick(), tmp_path / "run", stop=lambda: True)
    assert (torch.get_num_threads(), libraries()) == (3, before)
    fedrane.resume(tmp_path / "run")
    assert (torch.get_num_threads(), libraries()) == (3, before)


@pytest.mark.filterwarnings("ignore:.*one client at a time")
@pytest.mark.parametrize("engine", ["sequential", "stacked", "threaded", pytest.param("processes", marks=FORKS)])
def test_also_after_a_failure(engine: str, machine: Many) -> None:
    machine(3)
    before = libraries()
    with pytest.raises(ZeroDivisionError):
        conformance.trained(Watching(fails=True), engine=engine)
    assert (torch.get_num_threads(), libraries()) == (3, before)
    with pytest.raises(ConfigError):
        fedrane.run(quick(model="no-such-network"))
    assert torch.get_num_threads() == 3


# ---- the number is recorded, and used by resume


def test_a_folder_names_the_engine_and_the_threads(machine: Many, tmp_path: Path) -> None:
    machine(2)
    whole = fedrane.run(quick(engine="auto", method="fedbabu"), tmp_path / "run")  # which has a post-training stage
    text = (tmp_path / "run" / "config.toml").read_text()
    assert "auto" not in text
    assert 'engine = "stacked"\nthreads = 1\n' in text
    machine(1)
    same_end(whole, fedrane.run(fedrane.Experiment.from_toml(tmp_path / "run" / "config.toml")))


@pytest.mark.parametrize("engine", ["sequential", "stacked"])
def test_resume_computes_on_as_many_threads_as_before(engine: str, machine: Many, tmp_path: Path) -> None:
    """FedMTL's sums depend on the number of threads."""
    settings: dict[str, Any] = {"method": "fedmtl", "engine": engine, "clients": 20, "batch": 32}
    machine(2)
    whole = fedrane.run(quick(threads=2, **settings))
    fedrane.run(quick(threads=2, **settings), tmp_path / "run", stop=lambda: True)
    machine(1)
    same_end(whole, fedrane.resume(tmp_path / "run"))


def test_resume_reports_where_it_cannot_be_sure(tmp_path: Path) -> None:
    fedrane.run(quick(threads=3), tmp_path / "run", stop=lambda: True)
    listener = Listener()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(setup, "cores", lambda: 2)
        fedrane.resume(tmp_path / "run", callbacks=[listener])
    assert listener.messages == [
        "begun on 3 threads, and this machine has 2: last digits may differ, and it may be slow"
    ]


def test_a_folder_from_before_there_were_threads_is_resumed(tmp_path: Path) -> None:
    whole = fedrane.run(quick(engine="stacked"))
    fedrane.run(quick(engine="stacked"), tmp_path / "run", stop=lambda: True)
    config = tmp_path / "run" / "config.toml"
    text = config.read_text()
    config.write_text(text.replace('engine = "stacked"\nthreads = 1\n', 'engine = "auto"\n'))
    assert config.read_text() != text
    same_end(whole, fedrane.resume(tmp_path / "run"))


def test_a_comparison_goes_on_in_folders_that_name_what_was_left_open(tmp_path: Path) -> None:
    wanted = {"fedavg": quick(engine="auto", rounds=1)}
    assert compare(wanted, seeds=[0], out=tmp_path)
    assert compare(wanted, seeds=[0], out=tmp_path), "it is the same experiment"


# ---- on machines with another number of cores


def pictures() -> Dataset:
    numbers, y = np.random.Generator(np.random.Philox(5)), np.arange(240) % 3
    x = numbers.integers(0, 255, (240, 1, 16, 16)).astype(np.uint8)
    return Dataset("noise", x[:200], y[:200], x[200:], y[200:], tuple("abc"), (0.5,), (0.5,))


@pytest.mark.parametrize("engine", ["threaded", pytest.param("processes", marks=(FORKS, SLOW))])
def test_the_number_of_workers_changes_no_bit(engine: str) -> None:
    """FedMTL aggregates all clients' models in one product, which the server's threads would sum in parts."""
    settings: dict[str, Any] = {"method": "fedmtl", "engine": engine, "clients": 100, "partition": {"minimum": 2}}
    one, three = (fedrane.run(quick(threads=number, rounds=2, **settings)) for number in (1, 3))
    same_end(one, three)


@FORKS
@pytest.mark.parametrize("method", ["fedmtl", pytest.param("fedrane", marks=SLOW)])
def test_threads_go_on_where_processes_cannot_to_the_same_bits(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment = quick(method=method, model="convnet", engine="processes", threads=2, batch=16, lr=0.05)
    whole = fedrane.run(experiment, dataset=pictures())
    fedrane.run(experiment, tmp_path / "run", dataset=pictures(), stop=lambda: True)
    monkeypatch.setattr(setup, "impossible", lambda: "forking is not safe")
    listener = Listener()
    gone_on = fedrane.resume(tmp_path / "run", dataset=pictures(), callbacks=[listener])
    same_end(whole, gone_on)
    assert listener.messages == [
        "engine=processes cannot be used here: forking is not safe. Going on with engine=threaded, to the same bits"
    ]
    assert Experiment.from_toml(tmp_path / "run" / CONFIG).engine == "processes", "what it was begun with"


def test_a_worker_uploads_tensors_as_a_process_and_a_checkpoint_give_them_back() -> None:
    """Channels last in training, contiguous in what it returns."""
    result = fedrane.run(quick(method="fedrane", model="convnet", batch=16, rounds=1), dataset=pictures())
    trained = engines.Threaded(result.algorithm, result.federation).train_round(result.server, {}, [0, 1], 2, 0.05, 1)
    for path, leaf in tree.flatten(
        {
            "ups": trained.ups,
            "client_states": {str(k): client_state for k, client_state in trained.client_states.items()},
        }
    ).items():
        assert leaf.stride() == tree.as_saved(leaf).stride(), path


def test_a_resumed_worker_ends_with_the_same_bits(tmp_path: Path) -> None:
    """Client state is channels last in training but not in a checkpoint; clients that train no more predict from it."""
    settings: dict[str, Any] = {"method": "fedmtl", "model": "convnet", "batch": 16, "lr": 0.05}
    experiment = quick(engine="threaded", threads=2, participation=0.5, **settings)
    whole = fedrane.run(experiment, dataset=pictures())
    fedrane.run(experiment, tmp_path / "run", dataset=pictures(), stop=lambda: True)
    same_end(whole, fedrane.resume(tmp_path / "run", dataset=pictures()))


def test_resumed_workers_are_no_more_than_there_are_cores(machine: Many, tmp_path: Path) -> None:
    fedrane.run(quick(engine="threaded", threads=4), tmp_path / "run", stop=lambda: True)
    machine(2)
    assert fedrane.resume(tmp_path / "run").experiment.threads == 2


def test_a_device_that_is_not_here_is_one_clear_error(tmp_path: Path) -> None:
    fedrane.run(quick(), tmp_path / "run", stop=lambda: True)
    config = tmp_path / "run" / "config.toml"
    config.write_text(config.read_text().replace('device = "cpu"', 'device = "cuda:77"'))
    with pytest.raises(ConfigError, match="device=cuda:77 cannot be used"):
        fedrane.resume(tmp_path / "run")

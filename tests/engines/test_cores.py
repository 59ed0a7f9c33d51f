"""A client a core, in threads or in processes, ends where clients one after another end; and ``auto`` takes the engine
its rule says."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedrane
from asserts import close, untimed
from fedrane import Experiment, tree
from fedrane.data.dataset import Dataset
from fedrane.engines import Processes, Sequential, Threaded, replay, threaded
from fedrane.engines.threaded import Worker, channels_last
from fedrane.errors import ConfigError, FedraneError
from fedrane.methods import METHODS
from fedrane.task import Model
from fedrane.testing import conformance
from fedrane.training.loop import TrainingLoop
from fedrane.training.run_folder import CONFIG
from harness import PATIENCE
from problems import EVERY_METHOD, FORKS, SLOW, federation, quick, table


@pytest.fixture(autouse=True)
def three_cores() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


BOTH = pytest.mark.parametrize("engine", ["threaded", pytest.param("processes", marks=FORKS)])


@pytest.mark.parametrize("engine", ["threaded", pytest.param("processes", marks=(FORKS, SLOW))])
@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_ends_where_the_sequential_engine_ends(name: str, engine: str) -> None:
    entry = METHODS[name]
    settings: dict[str, Any] = {"participation": 0.8, "client_dropout": 0.2, "momentum": 0.5, "weight_decay": 0.01}
    one, other = (
        conformance.trained(entry.cls(**entry.preset), engine=each, **settings) for each in ("sequential", engine)
    )
    close(conformance.states(one), conformance.states(other), 1e-12)
    for a, b in zip(untimed(one.history), untimed(other.history), strict=True):
        for key in a.keys() - {"gne/iterations"}:
            assert a[key] == pytest.approx(b[key], abs=1e-9), key


def pictures(channels: int, side: int) -> Dataset:
    numbers, y = np.random.Generator(np.random.Philox(5)), np.arange(90) % 3
    x = numbers.integers(0, 255, (90, channels, side, side)).astype(np.uint8)
    middle = (0.5,) * channels
    return Dataset("noise", x[:70], y[:70], x[70:], y[70:], tuple("abc"), middle, middle)


@BOTH
@pytest.mark.parametrize(
    ("model", "channels"), [("convnet", 1), ("convnet", 3), pytest.param("resnet18", 3, marks=SLOW)]
)
def test_networks_of_convolutions(model: str, channels: int, engine: str) -> None:
    settings: dict[str, Any] = {"model": model, "clients": 4, "rounds": 2, "epochs": 1, "batch": 8, "lr": 0.01}
    one, other = (
        fedrane.run(
            fedrane.Experiment(engine=each, precision="float64", device="cpu", **settings),
            dataset=pictures(channels, 16),
        )
        for each in ("sequential", engine)
    )
    close(conformance.states(one), conformance.states(other), 1e-10)  # some sums of BatchNorm's nearly cancel


class CountsItsSteps(fedrane.Algorithm):
    """How often Python was asked for a step."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        self.asked.append(len(batch.y))
        return super().step(task, ctx, work, batch)


def test_full_steps_are_recorded_once_a_thread() -> None:
    torch.set_num_threads(1)
    method = CountsItsSteps()
    ended = conformance.trained(method, engine="threaded", rounds=3)
    fed = ended.federation
    plans = [
        mask
        for r in (1, 2, 3)
        for _, mask, _ in fed.batches(r, range(fed.population), ended.experiment.epochs).values()
    ]
    lengths = [int(n) for mask in plans for n in mask.sum(1)]
    assert lengths.count(fed.batch) > 20
    assert method.asked.count(fed.batch) == 1
    assert sorted(n for n in method.asked if n < fed.batch) == sorted(n for n in lengths if n < fed.batch)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> list[Worker]:
    """Those who trained, on one core."""
    results: list[Worker] = []

    class Seen(Worker):
        def begin(self, ctx: Any) -> Any:
            results.append(self)
            return super().begin(ctx)

    torch.set_num_threads(1)
    monkeypatch.setattr(threaded, "Worker", Seen)
    return results


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_can_be_recorded(name: str, workers: list[Worker]) -> None:
    entry = METHODS[name]
    conformance.trained(entry.cls(**entry.preset), engine="threaded", client_dropout=0.2, momentum=0.5)
    assert workers
    assert all(worker.records and worker.client.static.recordings[0].calls for worker in workers)


def test_what_cannot_be_recorded_is_computed_each_time(workers: list[Worker]) -> None:
    class Asks(fedrane.Algorithm):
        def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
            loss, outcome = super().objective(task, ctx, model, batch)
            return loss * (1 + float(batch.y.sum())), outcome

    one, other = (conformance.trained(Asks(), engine=engine, lr=1e-3) for engine in ("sequential", "threaded"))
    close(conformance.states(one), conformance.states(other), 1e-12)
    assert workers
    assert not any(worker.records or worker.client.work for worker in workers)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_steps_are_recorded_on_a_cpu_alone(device: str) -> None:
    fed = federation(table(), [[0, 1], [2, 3]])
    elsewhere = replace(fed, task=replace(fed.task, device=torch.device(device)))
    assert Worker(fedrane.Algorithm(), elsewhere).records == (device == "cpu")


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize(
    ("method", "model"), [("fedavg", "convnet"), ("fedrane", "convnet"), pytest.param("fedavg", "resnet18", marks=SLOW)]
)
def test_recorded_steps_give_the_same_bits(
    method: str, model: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which client a thread records with is chance."""
    settings: dict[str, Any] = {"model": model, "clients": 4, "rounds": 2, "epochs": 1, "batch": 8, "lr": 0.01}
    chosen = fedrane.Experiment(method=method, engine="threaded", precision=precision, device="cpu", **settings)
    kept = fedrane.run(chosen, dataset=pictures(1, 16))
    monkeypatch.setattr(replay, "MAX_RECORDED_BYTES", 0)
    recomputed = fedrane.run(chosen, dataset=pictures(1, 16))
    for a, b in zip(tree.leaves(conformance.states(kept)), tree.leaves(conformance.states(recomputed)), strict=True):
        assert torch.equal(a, b)


class HandsOn(fedrane.Algorithm):
    """What began is what is sent, whatever was learnt; each client begins elsewhere."""

    def begin(self, task: Any, ctx: Any) -> Any:
        began = {name: value + ctx.client.index for name, value in ctx.down.model.params.items()}
        return super().begin(task, ctx)._replace(extra={"began": began})

    def finish(self, task: Any, ctx: Any, work: Any) -> Any:
        done = super().finish(task, ctx, work)
        return done._replace(up=done.up._replace(model=Model(work.extra["began"], done.up.model.stats)))


@pytest.mark.parametrize("sizes", [(16, 32, 16), (24, 40, 20)], ids=["on a full batch", "on a shorter one"])
def test_what_a_client_ends_with_is_its_own(sizes: tuple[int, ...]) -> None:
    """On one core each client lies where the one before it lay."""
    torch.set_num_threads(1)
    ends = np.cumsum((0, *sizes))
    fed = federation(table(200), [list(range(*pair)) for pair in pairwise(ends)], batch=16)
    method = HandsOn()
    server = method.init(fed.task, fed.roster)
    one, other = (
        engine_class(method, fed).train_round(server, {}, [0, 1, 2], 1, 0.1, 2)
        for engine_class in (Sequential, Threaded)
    )
    close(one.ups, other.ups, 1e-12)


class ThroughSteps(fedrane.Algorithm):
    """The gradient, taken at the end, goes back through all steps."""

    def begin(self, task: Any, ctx: Any) -> Any:
        scale = torch.ones((), dtype=task.dtype, requires_grad=True)
        return super().begin(task, ctx)._replace(extra={"scale": scale, "sum": scale * 0})

    def step(self, task: Any, ctx: Any, work: Any, batch: Any) -> Any:
        extra = {"scale": work.extra["scale"], "sum": (work.extra["sum"] + batch.x.mean()) * work.extra["scale"]}
        return super().step(task, ctx, work, batch)._replace(extra=extra)

    def finish(self, task: Any, ctx: Any, work: Any) -> Any:
        (gradient,) = torch.autograd.grad(work.extra["sum"], work.extra["scale"])
        done = super().finish(task, ctx, work)
        return done._replace(metrics={**done.metrics, "gradient": gradient})


@BOTH
def test_a_gradient_through_all_steps(engine: str) -> None:
    one, other = (conformance.trained(ThroughSteps(), engine=each).history for each in ("sequential", engine))
    gradients, others = one[-1]["clients/gradient"], other[-1]["clients/gradient"]
    assert min(abs(gradient) for gradient in gradients) > 1e-3
    assert gradients == pytest.approx(others, abs=1e-12)


def test_an_image_of_one_channel_lies_channels_last_by_its_strides() -> None:
    for shape in ((4, 1, 5, 6), (4, 3, 5, 6)):
        image = torch.arange(float(np.prod(shape))).reshape(shape)
        laid = channels_last(image)
        assert torch.equal(laid, image)
        assert laid.stride() == (5 * 6 * shape[1], 1, 6 * shape[1], shape[1])


@BOTH
def test_a_mistake_in_one_client_ends_the_round_and_reports_where(engine: str) -> None:
    class Wrong(fedrane.Algorithm):
        def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
            if int(ctx.client.index) == 2:
                raise KeyError("no such thing")
            return super().objective(task, ctx, model, batch)

    with pytest.raises(KeyError, match="no such thing") as caught:
        conformance.trained(Wrong(), engine=engine)
    assert "in step 0 of client 2, round 1" in caught.value.__notes__
    assert torch.get_num_threads() == 3


@FORKS
def test_an_error_that_cannot_be_pickled_is_reported_all_the_same() -> None:
    class Odd(Exception):  # noqa: N818
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    class Wrong(fedrane.Algorithm):
        def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
            raise Odd(1, 2)

    with pytest.raises(RuntimeError, match="Odd: 1 and 2") as caught:
        conformance.trained(Wrong(), engine="processes")
    assert "in step 0 of client 0, round 1" in caught.value.__notes__


@FORKS
def test_a_process_that_dies_is_reported_and_none_is_left() -> None:
    class Killed(fedrane.Algorithm):
        def objective(self, task: Any, ctx: Any, model: Any, batch: Any) -> Any:
            if int(ctx.client.index) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().objective(task, ctx, model, batch)

    with pytest.raises(FedraneError, match=r"has died: most often the machine ran out of memory\. Use fewer"):
        conformance.trained(Killed(), engine="processes")
    assert not multiprocessing.active_children()


@FORKS
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_processes_do_not_outlive_the_run(tmp_path: Path, end: signal.Signals) -> None:
    engine = made()

    def slow(_: Sequential, item: int) -> None:
        (tmp_path / str(os.getpid())).touch()
        time.sleep(3 * PATIENCE)

    def run() -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(KeyboardInterrupt):
            engine.each(slow, range(2), [1, 1])

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    _until(lambda: len(list(tmp_path.iterdir())) == 2)
    children = [int(path.name) for path in tmp_path.iterdir()] if end == signal.SIGINT else []
    assert process.pid
    for pid in (*children, process.pid):  # a terminal's interrupt goes to all
        os.kill(pid, end)
    process.join(PATIENCE)
    assert process.exitcode == (0 if end == signal.SIGINT else -end)
    _until(lambda: not any(_lives(Path("/proc", pid.name, "stat")) for pid in tmp_path.iterdir()))


def made() -> Processes:
    return Processes(fedrane.Algorithm(), federation(table(), [[0, 1], [2, 3]]))


def _lives(process: Path) -> bool:
    try:
        return process.read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@FORKS
def test_an_interrupt_is_handled_by_the_run_alone() -> None:
    """A terminal sends it to all; the run may want to finish its round."""

    def interrupted(_: Sequential, item: int) -> int:
        os.kill(os.getpid(), signal.SIGINT)
        return item

    assert made().each(interrupted, range(3), [1] * 3) == [0, 1, 2]


@FORKS
def test_there_may_be_more_clients_than_files_can_be_open() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    try:
        results = made().each(lambda _, item: torch.tensor([item]), range(300), [1] * 300)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert torch.equal(torch.cat(results), torch.arange(300))


@FORKS
def test_processes_change_nothing_of_what_the_run_holds() -> None:
    """What comes back lies in memory of its own, so that a later round's processes cannot write into it."""
    engine = made()
    results = engine.each(lambda _, item: {"n": torch.full((3,), item), "none": torch.empty(0, 2)}, range(4), [1] * 4)
    assert [f["n"].tolist() for f in results] == [[k] * 3 for k in range(4)]
    assert results[0]["none"].shape == (0, 2)
    engine.each(lambda _, item: results[item]["n"].zero_(), range(4), [1] * 4)
    assert [f["n"].tolist() for f in results] == [[k] * 3 for k in range(4)]


@FORKS
def test_an_upload_may_require_a_gradient() -> None:
    class Attached(fedrane.Algorithm):
        def finish(self, task: Any, ctx: Any, work: Any) -> Any:
            done = super().finish(task, ctx, work)
            for value in done.up.model.params.values():
                value.requires_grad_()
            return done

    for engine in ("sequential", "processes"):
        assert np.isfinite(conformance.trained(Attached(), engine=engine).history[-1]["train/loss"])


def test_processes_are_refused_where_a_fork_is_not_safe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"engine=processes .* does not outlive a fork\. Use engine=threaded"):
        fedrane.run(quick(engine="processes", device="cpu"))


@pytest.mark.parametrize(
    ("settings", "cores", "engine"),
    [
        ({"model": "mlp", "clients": 10}, 16, "stacked"),
        ({"model": "mlp", "clients": 2}, 3, "stacked"),
        ({"model": "convnet", "clients": 10, "batch": 16}, 3, "stacked"),  # on images of 8 × 8
        ({"model": "convnet", "clients": 10, "batch": 128, "partition": {"kind": "iid"}}, 16, "threaded"),
        ({"model": "resnet18", "clients": 10}, 3, "threaded"),
        pytest.param({"model": "resnet18", "clients": 10}, 4, "processes", marks=FORKS),
    ],
)
def test_auto_goes_by_the_work_of_a_step_and_the_cores(
    settings: dict[str, Any], cores: int, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And it is written down before the first round."""
    torch.set_num_threads(cores)
    monkeypatch.setattr(TrainingLoop, "_one_round", lambda loop, stage: True)
    result = fedrane.run(quick(engine="auto", device="cpu", **settings), tmp_path / "run")
    assert Experiment.from_toml(tmp_path / "run" / CONFIG) == result.experiment
    assert result.experiment.engine == engine


def test_a_hook_that_cannot_predict_one_example_does_not_keep_auto_from_choosing() -> None:
    class Pairs(fedrane.Algorithm):
        def predict(self, task: Any, model: Any, x: Any, mask: Any) -> Any:
            if len(x) == 1:
                raise ValueError("examples come in pairs")
            return super().predict(task, model, x, mask)

    assert np.isfinite(conformance.trained(Pairs(), engine="auto").history[-1]["train/loss"])

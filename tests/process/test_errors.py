"""What a user gets wrong: one clear line on standard error, exit code 2, and nothing half-made left behind."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import TINY, USER_METHODS, Driver, checkpoints, executable, refused, same_run
from problems import SLOW

WORDS = (*TINY, "rounds=3")
GIVEN = {
    "broken.toml": "rounds = 3\nclients = = 4\n",
    "inf.toml": "clients = inf\n",
    "zeros.toml": f"lr = 1{'0' * 400}\n",
    "digits.toml": f"clients = 1{'0' * 5000}\n",
    "deep.toml": f"clients = {'[' * 5000}{']' * 5000}\n",
    "nul.toml": 'method = "a\\u0000b.py:M"\n',
    "ends.py": "raise SystemExit(0)\n",
    "own.py": """\
from dataclasses import dataclass
from fedrane.methods.fedavg import FedAvg
number = 3
def none(shape, classes): return None
def raises(shape, classes):
    raise RuntimeError("two\\nlines\\x1b")
def ends(shape, classes): raise SystemExit(0)
@dataclass(frozen=True)
class Checked(FedAvg):
    def __post_init__(self):
        raise ValueError("no")
@dataclass(frozen=True)
class Aggregates(FedAvg):
    def aggregate(self, *given):
        raise KeyError("a mistake")
@dataclass(frozen=True)
class Ends(FedAvg):
    def aggregate(self, *given):
        raise SystemExit(0)
""",
}
"""Files of a user, each with a mistake."""


@pytest.fixture(scope="module")
def finished(fedrane: Driver, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("finished") / "run"
    assert fedrane("run", "--out", run, *WORDS).status == 0
    return run


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    """A finished run of one's own to damage."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["dataset=fmist"], ["fmist", "'fmnist'"]),
        (["dataset=digits", "model=ml"], ["'ml'", "'mlp'"]),
        (["dataset=digits", "engine=stackd"], ["'stackd'", "'stacked'"]),
        (["method=fedavgg"], ["fedavgg", "'fedavg'", "path.py:Class"]),
        (["method=nowhere.py:Mine"], ["nowhere.py"]),
        ([f"method={USER_METHODS}:Glidin"], ["Glidin", "'Gliding'"]),
        (["lr=-1"], ["lr=-1", "positive"]),
        (["lr=nan"], ["lr=nan"]),
        (["lr=quick"], ["lr=quick", "number"]),
        (["clients=0"], ["clients=0", "at least 1"]),
        (["clients=2000"], ["2000 clients", "partition.minimum"]),
        (["participation=0"], ["participation=0", "fraction"]),
        (["rounds=2.5"], ["rounds=2.5", "whole number"]),
        (["patience=3"], ["patience=3", "validation"]),
        (["client=4"], ["client=4 would have no effect", "clients"]),
        (["lr=0.1", "learning_rate=0.1"], ["lr and learning_rate are both set"]),
        (["partition.alfa=1"], ["partition.alfa", "partition.alpha"]),
        (["method.strength=1"], ["method.strength"]),
        (["partition.kind=dirichelt"], ["dirichelt", "'dirichlet'"]),
        (["partition.file=nowhere.npz"], ["nowhere.npz"]),
        (["schedule.kind=cosin"], ["cosin", "'cosine'"]),
        (["method.nonsense=5", "method=fedprox"], ["method.nonsense", "fedprox has no such field"]),
        (["method=scaffold", "method.strength=5"], ["scaffold has no such field", "fedprox"]),
        (["lr=1", "lr=2"], ["lr is 1 and 2"]),
        (["data_root=a", "--data-root", "b"], ["data_root is a and"]),
        (["fedprox.strength=1"], ["'fedprox'", "method.FIELD"]),
        (["partition.shards=2"], ["partition.shards=2 would have no effect", "partition.kind=shards"]),
        (["schedule.every=2"], ["schedule.every=2", "schedule.kind is constant"]),
        (["model_head=fc"], ["model_head=fc", "network of your own"]),
        (["method=fedrane-wo-lra", "method.contrast=0.2"], ["method.contrast=0.2", "method.lra=True"]),
        (["device=warp"], ["device=warp", "device=cpu"]),
        (["fedavg"], ["'fedavg'", "key=value"]),
        (["nowhere.toml"], ["nowhere.toml", "no file"]),
        (["broken.toml"], ["broken.toml", "TOML", "line 2"]),
        (["inf.toml"], ["clients=inf", "whole number"]),
        (["zeros.toml"], ["lr=1000", "a number"]),
        (["digits.toml"], ["digits.toml", "TOML", "4300 digits"]),
        (["deep.toml"], ["deep.toml", "TOML", "recursion"]),
        (["nul.toml"], ["a\\x00b.py cannot be used"]),
        (["lr=1e308"], ["lr=1e+308", "float32"]),
        (["device=meta"], ["device=meta cannot be used"]),
        (["dataset=~nobody-here/x.npz"], ["~nobody-here/x.npz cannot be used", "home directory"]),
        ([f"dataset={'x' * 300}.npz"], ["xxx.npz cannot be used", "too long"]),
        ([f"method={'x' * 300}.py:M"], ["xxx.py cannot be used", "too long"]),
        (["model=own.py:none", "model_head=x"], ["own.py:none returned a NoneType"]),
        (["model=own.py:number", "model_head=x"], ["own.py:number is not a network"]),
        (["model=own.py:raises", "model_head=x"], ["RuntimeError: two lines", "own.py, line 6, in raises"]),
        (["model=own.py:ends", "model_head=x"], ["SystemExit: 0", "own.py, line 7, in ends"]),
        (["method=ends.py:Mine"], ["SystemExit: 0", "ends.py, line 1"]),
        (["method=own.py:Checked"], ["your own code raised ValueError: no", "own.py, line 11, in __post_init__"]),
        (["model=nowhere.py:network"], ["nowhere.py"]),
        (["model=broken.toml:network", "model_head=x"], ["broken.toml"]),
        ([f"model={USER_METHODS}:nett"], ["no 'nett'", "'network'"]),
        ([f"model={USER_METHODS}:network", "model_head=clasifier"], ["clasifier", "'classifier'"]),
        ([f"model={USER_METHODS}:network", "model_head=hidden"], ["hidden", "last"]),
    ],
)
def test_a_mistake_in_the_configuration(
    fedrane: Driver, tmp_path: Path, words: list[str], fragments: list[str]
) -> None:
    """Names the mistake and what is known; no folder is made, not even for TensorBoard."""
    for name, text in GIVEN.items():
        (tmp_path / name).write_text(text)
    refused(fedrane("run", "--tensorboard", "--out", "run", *words, cwd=tmp_path), *fragments)
    assert {path.name for path in tmp_path.iterdir()} == GIVEN.keys()


@pytest.mark.parametrize(("hook", "line"), [("Aggregates", 15), ("Ends", 19)])
def test_a_method_that_raises_is_named_with_its_line(fedrane: Driver, tmp_path: Path, hook: str, line: int) -> None:
    (tmp_path / "own.py").write_text(GIVEN["own.py"])
    ended = fedrane("run", "--quiet", "--out", "run", *TINY, f"method=own.py:{hook}", "engine=sequential", cwd=tmp_path)
    refused(ended, "your own code raised", f"own.py, line {line}, in aggregate")


@pytest.mark.parametrize(
    ("words", "fragments"),
    [
        (["--methods", "fedavg,fedpr"], ["fedpr"]),
        (["--methods", ","], ["no methods are named"]),
        (["--seeds", "0"], ["seeds=0"]),
        (["--methods", "local", "fedavg.glide=1"], ["fedavg is not one of the methods", "local"]),
        (["--methods", "fedavg,fedprox", "method.strength=1"], ["fedavg has no such field", "fedprox.strength=1"]),
        (["--methods", "fedprox,fedprox"], ["fedprox occurs twice", "a=fedprox,b=fedprox"]),
        (["--methods", "a=fedprox,b=fedprox"], ["a and b are the same experiment", "b.FIELD=value"]),
        (["--methods", "a=fedprox,b=fedavg", "a.clients=3"], ["a.clients=3", "same examples"]),
        (["--methods", "a=fedprox,b=fedavg", "a.partition.alpha=3"], ["a.partition.alpha=3", "same examples"]),
        (["--methods", "lr=fedprox"], ["'lr'", "already names"]),
        (["--methods", "fedavg", "method=local"], ["method=local", "Name them all there"]),
        (["dataset=fmist"], ["'fmnist'"]),
        (["dataset=digits", "engine=stackd"], ["'stacked'"]),
    ],
)
def test_a_mistake_in_a_comparison(fedrane: Driver, tmp_path: Path, words: list[str], fragments: list[str]) -> None:
    """All methods are known to be right before the first of them runs."""
    refused(fedrane("compare", "--out", "all", *words, cwd=tmp_path), *fragments)
    assert not list(tmp_path.iterdir())


def test_as_the_installed_command_prints_it(tmp_path: Path) -> None:
    """The same from a process of its own, without a folder named: none is made."""
    refused(executable(tmp_path, "run", "dataset=fmist").wait(), "fmist", "fmnist")
    assert {path.name for path in tmp_path.iterdir()} == {"stdout", "stderr"}


@pytest.mark.parametrize("more", [(), ("--tensorboard",)])
def test_a_folder_that_cannot_be_made(fedrane: Driver, tmp_path: Path, more: tuple[str, ...]) -> None:
    """Below a file there are no folders."""
    (tmp_path / "file").write_text("a letter")
    refused(fedrane("run", *more, "--out", tmp_path / "file" / "run", *WORDS), str(tmp_path / "file"))
    refused(fedrane("compare", "--out", tmp_path / "file" / "all", *WORDS), str(tmp_path / "file"))
    assert (tmp_path / "file").read_text() == "a letter"


@pytest.mark.parametrize("more", [(), ("--tensorboard",)])
def test_a_folder_that_holds_a_run(fedrane: Driver, copy: Path, finished: Path, more: tuple[str, ...]) -> None:
    """Nothing is overwritten, and the remedy is to resume it."""
    before = sorted(copy.rglob("*"))
    refused(fedrane("run", *more, "--out", copy, *WORDS, "seed=1"), "already holds a run", f"fedrane resume {copy}")
    assert sorted(copy.rglob("*")) == before
    same_run(copy, finished)


def test_a_folder_with_files_of_the_users(fedrane: Driver, tmp_path: Path) -> None:
    """Nothing is written there, whatever the names of the files are; a place inside it may be used."""
    mine = [f"mine/{name}" for name in ("summary.json", "checkpoints/round-000001.safetensors", ".lock", "table.md")]
    for name in mine:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("precious")
    for command in (("run",), ("run", "--tensorboard"), ("compare",)):
        refused(fedrane(*command, "--out", "mine", *WORDS, cwd=tmp_path), "mine is not empty", "new or empty")
    for command in (("reproduce", "table1"), ("reproduce", "table1", "--show"), ("tune", "fedavg")):
        refused(fedrane(*command, "--out", "mine", "--dataset", "digits", cwd=tmp_path), "mine is not empty")
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == sorted(tmp_path / name for name in mine)
    assert all((tmp_path / name).read_text() == "precious" for name in mine)
    assert fedrane("run", "--out", "mine/run", *WORDS, cwd=tmp_path).status == 0


def test_a_folder_of_another_program(fedrane: Driver, tmp_path: Path) -> None:
    """It has a config.toml, but none of ours: nothing in it is touched."""
    files = {"config.toml": "title = 1", ".lock": "taken", "notes.0123abcd.part": "half"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    refused(fedrane("resume", tmp_path), "metadata.json is missing")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == files


def test_a_folder_of_a_run_is_none_of_a_comparison(fedrane: Driver, copy: Path) -> None:
    (copy / "config.toml").unlink()
    refused(fedrane("compare", "--out", copy, *WORDS), "not made for a comparison")


def test_files_are_overwritten_only_by_force(fedrane: Driver, finished: Path, tmp_path: Path) -> None:
    """Each command that writes a file asks first, before any work."""
    (tmp_path / "figures").mkdir()
    for name in ("page.html", "it.npz", "it.png", "figures/mine.png"):
        (tmp_path / name).write_text("precious")
    commands = (
        ("report", finished, "--samples", "0", "-o", "page.html"),
        ("report", finished, "--samples", "0", "-o", "new.html", "--figures", "figures"),
        ("partition", *TINY, "--save", "it.npz"),
        ("partition", *TINY, "--plot", "it.png"),
    )
    for command in commands:
        refused(fedrane(*command, cwd=tmp_path), "exists already", "--force")
    assert not (tmp_path / "new.html").exists()
    assert (tmp_path / "it.npz").read_text() == "precious"
    for command in commands[::2]:
        assert fedrane(*command, "--force", cwd=tmp_path).status == 0
    assert (tmp_path / "page.html").stat().st_size > 1000
    assert (tmp_path / "it.npz").stat().st_size > 100


@pytest.mark.parametrize("command", ["resume", "predict"])
def test_a_folder_without_a_run(fedrane: Driver, tmp_path: Path, command: str) -> None:
    """It is left as it is, or left out of existence."""
    inputs = ["x.npz"] if command == "predict" else []
    (tmp_path / "empty").mkdir()
    for name in ("empty", "nowhere"):
        refused(fedrane(command, tmp_path / name, *inputs), str(tmp_path / name), "no run")
    assert not list((tmp_path / "empty").iterdir())
    assert not (tmp_path / "nowhere").exists()


def test_a_run_in_use(fedrane: Driver, copy: Path, tmp_path: Path) -> None:
    """Two processes never write into one folder, whether the other resumes a run or begins one."""
    begun = Path(shutil.copytree(copy, tmp_path / "begun"))
    (begun / "config.toml").unlink()
    for folder, command in ((copy, ("resume", copy)), (begun, ("run", "--out", begun, *WORDS))):
        files = sorted(folder.rglob("*"))
        with (folder / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            refused(fedrane(*command), str(folder), "in use by another process")
        assert sorted(folder.rglob("*")) == files
        assert fedrane(*command).status == 0
    same_run(begun, copy)


def _cut(content: bytes) -> bytes:
    return content[: len(content) // 2]


def _zeros(content: bytes) -> bytes:
    return bytes(len(content))


def _nothing(content: bytes) -> bytes:
    return b""


def _other(content: bytes) -> bytes:
    return content.replace(b"fedrane", b"another")


def _torn(content: bytes) -> bytes:
    return content.replace(rb"{\"format\"", rb"{;\"format\"")[: len(content)]


DAMAGES = [_cut, _zeros, _nothing, _other, _torn]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint(fedrane: Driver, copy: Path, finished: Path, damage: Callable[[bytes], bytes]) -> None:
    """The run goes on from the one before it, reports that, and ends in the same bytes."""
    newest = copy / "checkpoints" / max(checkpoints(copy))
    newest.write_bytes(damage(newest.read_bytes()))
    ended = fedrane("resume", copy)
    assert ended.status == 0
    assert str(newest) in ended.stdout
    assert "older checkpoint" in ended.stdout
    assert "after round 2" in ended.stdout
    same_run(copy, finished)


@pytest.mark.parametrize("damage", DAMAGES)
def test_all_checkpoints_damaged(fedrane: Driver, copy: Path, damage: Callable[[bytes], bytes]) -> None:
    """There is nothing to go on from, and the folder is left as it is."""
    for name, content in checkpoints(copy).items():
        (copy / "checkpoints" / name).write_bytes(damage(content))
    before = {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()}
    refused(fedrane("resume", copy), str(copy), "no checkpoint")
    refused(fedrane("predict", copy, "x.npz"), str(copy), "no checkpoint")
    assert {path: path.read_bytes() for path in copy.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("name", "content", "fragments"),
    [
        ("config.toml", b"rounds = = 3", "TOML"),
        ("partition.npz", b"PK", "corrupt"),
        ("metrics.jsonl", b'{"round": 1\n{"round": 2}\n', "line 1"),
        ("metrics.jsonl", b"\xff\xfe\n\n", "line 1"),
        ("metrics.jsonl", b"3\n", "line 1"),
        ("metrics.jsonl", b"[" * 100_000 + b"\n\n", "line 1"),
        ("metadata.json", b"[]", "no classes"),
        ("metadata.json", b"[" * 100_000, "recursion"),
    ],
)
def test_another_damaged_file(fedrane: Driver, copy: Path, name: str, content: bytes, fragments: str) -> None:
    """The file is named."""
    (copy / name).write_bytes(content)
    refused(fedrane("resume", copy), name, fragments)


@pytest.mark.parametrize("name", ["partition.npz", ".lock", "checkpoints", pytest.param("*", marks=SLOW)])
@pytest.mark.parametrize("kind", ["pipe", pytest.param("device", marks=SLOW)])
def test_a_file_without_end(fedrane: Driver, copy: Path, tmp_path: Path, name: str, kind: str) -> None:
    """Whichever file of a folder is a pipe that nobody writes to, or a device: each command comes to its end."""
    files = [path.relative_to(copy) for path in copy.rglob("*") if path.is_file()]
    chosen = [file for file in files if name in ("*", file.parts[0])]
    for file in chosen:
        shutil.copytree(copy, tmp_path / "run")
        (tmp_path / "run" / file).unlink()
        if kind == "pipe":
            os.mkfifo(tmp_path / "run" / file)
        else:
            (tmp_path / "run" / file).symlink_to("/dev/zero")
        for command, *more in (["verify"], ["predict", "x.npz"], ["resume"]):
            assert fedrane(command, tmp_path / "run", *more).status in (0, 1, 2)
        shutil.rmtree(tmp_path / "run")
    assert chosen


def test_a_folder_whose_mark_has_no_end_is_not_ours(fedrane: Driver, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".fedrane")
    refused(fedrane("run", "--out", tmp_path, *TINY), "not a plain file")


def test_output_that_cannot_be_written() -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "fedrane", "methods"], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert ended.returncode == 2
    assert ended.stderr == "error: system error: [Errno 28] No space left on device\n"


def test_training_that_diverges(fedrane: Driver, tmp_path: Path) -> None:
    """The last finite model is kept."""
    ended = fedrane("run", "--quiet", "--out", tmp_path / "run", *TINY, "rounds=30", "lr=1e30")
    refused(ended, "no longer finite", "lr")

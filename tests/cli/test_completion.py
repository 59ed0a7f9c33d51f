"""What the TAB key proposes, by the protocol of each shell, and in a real bash."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedrane.cli import completion
from fedrane.config import reference
from fedrane.training import run_folder

DRIVER = "import sys; sys.argv = ['fedrane']; from fedrane.cli import main; main()"


def asked(cwd: Path, **env: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", DRIVER], capture_output=True, text=True, check=False, cwd=cwd, env={**os.environ, **env}
    )
    assert not ended.stderr
    return ended.stdout


def bash(*words: str, cwd: Path = Path()) -> list[str]:
    """The proposals for the last of these words, which bash has split at ``=``."""
    line, last = "\n".join(("fedrane", *words)), str(len(words))
    return asked(cwd, _FEDRANE_COMPLETE="complete_bash", COMP_WORDS=line, COMP_CWORD=last).split()


def zsh(line: str, cwd: Path = Path()) -> str:
    """What the script of zsh evaluates: values with their descriptions."""
    return asked(cwd, _FEDRANE_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=f"fedrane {line}")


def test_commands_and_options() -> None:
    assert bash("r") == ["run", "resume", "report", "reproduce"]
    assert "--tensorboard" in bash("run", "--")
    assert bash("") and bash("")[0] == "run", "as in the help"  # noqa: PT018


def test_keys_and_values() -> None:
    assert bash("run", "epo") == ["epochs=", "epochs=5"]
    assert bash("run", "check") == ["checkpoint_every=", "checkpoint_every=1"]
    assert bash("run", "partition.") == [f"{k.name}=" for k in reference.keys() if k.name.startswith("partition.")]
    choices = {key.name: list(key.choices) for key in reference.keys()}
    assert bash("run", "partition.kind", "=") == choices["partition.kind"]
    assert bash("run", "partition.kind", "=", "dirichlet-") == ["dirichlet-capped", "dirichlet-quantity"]
    assert bash("run", "model", "=", "res") == ["resnet18", "resnet18-cifar"]
    assert bash("run", "augment.flip", "=") == ["true", "false"]
    assert bash("run", "learning_rate", "=") == ["0.1"]
    assert bash("partition", "dataset", "=", "fm") == ["fmnist"]


def test_a_method_s_fields() -> None:
    assert bash("run", "method", "=", "fedbabu", "method.tune_") == ["method.tune_epochs=", "method.tune_lr="]
    assert bash("run", "method", "=", "fedbabu", "method.tune", "=") == ["full", "head", "body"]
    assert bash("compare", "--methods", "fedavg,weak=fedprox", "weak.") == ["weak.strength=", "weak.strength=0.01"]


def test_names_and_folders(tmp_path: Path) -> None:
    assert bash("methods", "fedran") == ["fedrane", "fedrane-wo-lra", "fedrane-wo-gne"]
    assert bash("check", "sca") == ["scaffold"]
    assert bash("tune", "fedavg,dit") == ["fedavg,ditto"]
    assert "fedavg,fedavg" not in bash("compare", "--methods", "fedavg,feda"), "each once"
    assert bash("reproduce", "table-g") == ["table-gfl"]
    for name in ("runs/a", "runs/both/fedavg/seed-0", "runs/empty", "other/b"):
        (tmp_path / name).mkdir(parents=True)
        if "empty" not in name:
            (tmp_path / name / completion.CONFIG).touch()
    (tmp_path / "mine.toml").touch()
    assert bash("resume", "", cwd=tmp_path) == ["runs/a", "runs/both/fedavg/seed-0"]
    assert bash("resume", "oth", cwd=tmp_path) == ["other/b"]
    assert "mine.toml" in bash("run", "mi", cwd=tmp_path)
    assert completion.CONFIG == run_folder.CONFIG


HOSTILE = (
    "$(touch p)",
    "\\$(touch p)",
    "`touch p`",
    "\\`touch p`",
    "a;touch p",
    "a\ntouch p",
    "'",
    '"',
    "\x1b[2J",
    "a|b",
)


def test_a_name_that_a_shell_would_take_for_a_command_is_not_proposed(tmp_path: Path) -> None:
    """zsh evaluates what it gets: a folder of somebody else must not run a command by the TAB key alone."""
    for name in (*HOSTILE, "größe-0.5", "my run"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / completion.CONFIG).touch()
        (tmp_path / f"{name}.toml").touch()
    lines = asked(
        tmp_path, _FEDRANE_COMPLETE="complete_bash", COMP_WORDS="fedrane\nresume", COMP_CWORD="2"
    ).splitlines()
    assert lines == ["runs/größe-0.5", "runs/my run"]
    assert '"runs/my run"' in zsh("resume ", cwd=tmp_path)
    for line in ("resume ", "run "):
        assert "touch p" not in zsh(line, cwd=tmp_path)


def test_zsh_shows_meanings() -> None:
    shown = zsh("run method=fedr")
    assert '"method=fedrod":"A generic predictor' in shown
    assert '"clients=":"The number of clients' in zsh("run cl")
    assert '"run":"Train one experiment' in zsh("ru")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_asks_this_command(shell: str, tmp_path: Path) -> None:
    script = asked(tmp_path, _FEDRANE_COMPLETE=f"source_{shell}")
    assert f"_FEDRANE_COMPLETE=complete_{shell}" in script


@pytest.fixture
def path_with_command(tmp_path: Path) -> str:
    """A PATH on which a ``fedrane`` of this environment comes first."""
    command = tmp_path / "fedrane"
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom fedrane.cli import main\nsys.argv[0] = 'fedrane'\nmain()\n"
    )
    command.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def test_in_zsh(tmp_path: Path, path_with_command: str) -> None:
    """Installed by the command, and at the first TAB of a session in a terminal."""
    shell = shutil.which("zsh")
    if not shell:
        pytest.skip("there is no zsh")
    env = {**os.environ, "PATH": path_with_command, "HOME": str(tmp_path), "TERM": "dumb"}
    subprocess.run([shell, "-c", "fedrane --install-completion; true"], env=env, check=True, capture_output=True)
    process, terminal = pty.fork()
    if not process:
        os.execve(shell, [shell, "-i"], env)  # noqa: S606 - a shell is what is tested
    try:
        assert wait_for(terminal, 'print rea""dy\n', "ready")
        assert wait_for(terminal, "fedrane ru\t", "fedrane run ")
        assert wait_for(terminal, "method=fedrane-wo-l\t", "method=fedrane-wo-lra ")
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(terminal)


def wait_for(terminal: int, keys: str, expected: str, seconds: float = 120.0) -> bool:
    """Whether a terminal shows this after these keys."""
    os.write(terminal, keys.encode())
    shown, ends = "", time.monotonic() + seconds
    while expected not in shown and time.monotonic() < ends:
        if select.select([terminal], [], [], 1.0)[0]:
            shown += os.read(terminal, 4096).decode(errors="replace")
    return expected in shown


def test_in_bash(path_with_command: str) -> None:
    """The script that --install-completion installs, sourced and called as readline calls it."""
    lines = (
        'eval "$(_FEDRANE_COMPLETE=source_bash fedrane)"',
        "COMP_WORDS=(fedrane run method = scaf); COMP_CWORD=4",
        "$(complete -p fedrane | sed 's/.*-F \\([^ ]*\\) .*/\\1/') fedrane",
        'echo "${COMPREPLY[@]}"',
    )
    shell = shutil.which("bash")
    assert shell
    env = {**os.environ, "PATH": path_with_command}
    ended = subprocess.run([shell, "-c", "\n".join(lines)], capture_output=True, text=True, check=False, env=env)
    assert ended.stdout.split() == ["scaffold"], ended.stderr

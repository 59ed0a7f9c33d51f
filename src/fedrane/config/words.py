"""What a user asks for: a TOML file, ``key=value`` words that override it, or an experiment made in Python."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from fedrane.config import effects
from fedrane.config.settings import Layer, Notice, as_messages, parse
from fedrane.errors import ConfigError
from fedrane.experiment import Experiment

Words = str | Path | Sequence[str | Path]
"""One word, or several in any order; of these at most one is a TOML file, and a path is always one."""
Above = Callable[[Experiment], Layer | None]
"""Settings for an experiment that override those of its file."""


def experiments_of(
    words: Words,
    share: Callable[[dict[str, str]], Mapping[str, Mapping[str, str]]],
    above: Above | None = None,
    passed: Mapping[str, str] = {},
) -> tuple[dict[str, Experiment], list[Notice]]:
    """Several experiments of one file and the settings that override it; ``share`` deals out the settings by label.

    ``above`` gives settings that override the file, and words override both; ``passed`` takes the place of what was
    handed over from Python. Also those values of the file that none of the experiments uses.
    """
    words = [words] if isinstance(words, str | Path) else words
    files = [Path(word) for word in words if _is_file(word)]
    if len(files) > 1:
        raise ConfigError(" and ".join(map(str, files)), "one experiment is one file", "Override it with key=value")
    given = parse(_setting(str(word)) for word in words if not _is_file(word))
    made: dict[str, Experiment] = {}
    unused: list[list[Notice]] = []
    for label, mine in share(given).items():
        own, file = [f"{key}={value}" for key, value in mine.items()], files[0] if files else None
        asked, notices = Experiment.asked(own, file)
        if above and (layer := above(asked)):
            asked, notices = Experiment.asked(own, file, [layer])
        made[label], idle = effects.settle(asked.replace(**passed))
        unused.append(notices + idle)
    return made, [notice for notice in unused[0] if all(_about(notice, other) for other in unused)]


def as_experiment(asked: Experiment | Words, passed: Mapping[str, str] = {}) -> Experiment:
    """For Python: values of a file that are not used are a warning to the caller of our caller."""
    if isinstance(asked, Experiment):
        return asked
    made, unused = experiments_of(asked, lambda given: {"": given}, passed=passed)
    warn(unused, stacklevel=4)
    return made[""]


def warn(unused: Iterable[Notice], stacklevel: int) -> None:
    for text in as_messages(unused):
        warnings.warn(text, stacklevel=stacklevel)


def _is_file(word: str | Path) -> bool:
    return isinstance(word, Path) or (word.endswith(".toml") and "=" not in word)


def _setting(word: str) -> str:
    parts = word.split()
    if len(parts) > 1 and all("=" in part for part in parts):
        raise ConfigError(f"{word!r} is one word", "several settings are a list of words", f"Write {parts}")
    return word


def _about(notice: Notice, others: Iterable[Notice]) -> bool:
    return any((notice.source, notice.key) == (other.source, other.key) for other in others)

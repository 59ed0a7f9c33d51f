"""Each client alone, without communication. Not a federated method, but the baseline of every personal method."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedrane.algorithm import PERSONAL, Algorithm


@dataclass(frozen=True)
class Local(Algorithm):
    """Local training only, from the same initial model as all other methods."""

    models: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def shares(self, name: str) -> bool:
        return False

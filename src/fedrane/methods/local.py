"""Each client alone: nothing travels. Not a federated method but the row every personal method must beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fedrane.algorithm import PERSONAL, Algorithm


@dataclass(frozen=True)
class Local(Algorithm):
    """Local training, from the same start as all others."""

    answers: ClassVar[tuple[str, ...]] = (PERSONAL,)

    def shares(self, name: str) -> bool:
        return False

"""x"""

REPLAYABLE: frozenset[str] = frozenset()

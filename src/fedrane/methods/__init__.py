"""The methods, one file per paper. ``METHODS`` is the only registry; installed packages can add to it.

Your own method needs no change here: use ``method=path/to/file.py:Class``, ``method=package.module:Class``, or an entry
point in the group ``fedrane.methods``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from fedrane.algorithm import Algorithm
from fedrane.errors import ConfigError, nearest
from fedrane.methods.apple import APPLE
from fedrane.methods.ditto import Ditto
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedbabu import FedBABU
from fedrane.methods.feddyn import FedDyn
from fedrane.methods.fedmtl import FedMTL
from fedrane.methods.fedper import FedPer
from fedrane.methods.fedprox import FedProx
from fedrane.methods.fedrane import FedRANE
from fedrane.methods.fedrod import FedRoD
from fedrane.methods.local import Local
from fedrane.methods.moon import MOON
from fedrane.methods.pfedme import PFedMe
from fedrane.methods.scaffold import Scaffold
from fedrane.methods.spherefed import SphereFed
from fedrane.system import loading


@dataclass(frozen=True)
class Method:
    """An entry of the registry: a class, preset values of its fields, and its publication."""

    cls: type[Algorithm]
    venue: str
    year: int | None = None
    preset: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """Its hyper-parameters and their default values."""
        return {f.name: getattr(self.cls(**self.preset), f.name) for f in fields(self.cls)}

    @property
    def category(self) -> str:
        """``global``, ``personal`` or ``both``: which models it has."""
        return "both" if len(self.cls.models) > 1 else self.cls.models[0]

    @property
    def summary(self) -> str:
        preset = ", ".join(f"{key}={value}" for key, value in self.preset.items())
        return (self.cls.__doc__ or "").strip().splitlines()[0] + (f" With {preset}." if preset else "")


METHODS: dict[str, Method] = {
    "fedavg": Method(FedAvg, "AISTATS", 2017),
    "local": Method(Local, "–"),
    "fedprox": Method(FedProx, "MLSys", 2020),
    "scaffold": Method(Scaffold, "ICML", 2020),
    "feddyn": Method(FedDyn, "ICLR", 2021),
    "moon": Method(MOON, "CVPR", 2021),
    "fedmtl": Method(FedMTL, "NeurIPS", 2017),
    "fedper": Method(FedPer, "arXiv", 2019),
    "pfedme": Method(PFedMe, "NeurIPS", 2020),
    "ditto": Method(Ditto, "ICML", 2021),
    "apple": Method(APPLE, "IJCAI", 2022),
    "fedrod": Method(FedRoD, "ICLR", 2022),
    "fedbabu": Method(FedBABU, "ICLR", 2022),
    "spherefed": Method(SphereFed, "ECCV", 2022),
    "fedrane": Method(FedRANE, "ACM MM", 2023),
    "fedrane-wo-lra": Method(FedRANE, "ACM MM", 2023, {"lra": False}),
    "fedrane-wo-gne": Method(FedRANE, "ACM MM", 2023, {"gne": False}),
}


def find(name: str) -> Method:
    """The method of that name: from the registry, a file, a module or an installed package."""
    if name in METHODS:
        return METHODS[name]
    if loading.is_reference(name):
        return Method(_load(name, loading.version(name)), "user")
    if name in _installed():
        return Method(_load(_installed()[name], ""), "user")
    remedy = nearest(name, known()) + ", or your own file: method=path.py:Class"
    raise ConfigError(f"method={name!r} is not known", remedy=remedy)


def known() -> list[str]:
    """The names in the registry and those of installed packages."""
    return [*METHODS, *(name for name in _installed() if name not in METHODS)]


def _installed() -> dict[str, str]:
    return {entry.name: entry.value for entry in entry_points(group="fedrane.methods")}


def name_of(algorithm: Algorithm) -> str:
    """The name with which :func:`find` returns this method."""
    cls = type(algorithm)
    matches = [
        (len(entry.preset), name)
        for name, entry in METHODS.items()
        if entry.cls is cls and all(getattr(algorithm, key) == value for key, value in entry.preset.items())
    ]
    if matches:
        longest = max(length for length, _ in matches)
        best = [name for length, name in matches if length == longest]
        return best[0] if len(best) == 1 else min(matches)[1]  # with several presets at once, the plain method
    reference = f"{cls.__module__}:{cls.__qualname__}"
    named = [name for name, value in _installed().items() if value == reference]
    return named[0] if named else _origin.get(cls, reference)


_origin: dict[type[Algorithm], str] = {}
"""The reference each class was loaded by."""


@cache
def _load(name: str, version: str) -> type[Algorithm]:
    """Load the class once for each ``version`` of its file: an edited file is another method."""
    cls = _checked(loading.load(name, "method"), name)
    _origin[cls] = loading.absolute(name)
    return cls


def _checked(cls: Any, name: str) -> type[Algorithm]:
    if not (isinstance(cls, type) and issubclass(cls, Algorithm)):
        raise ConfigError(f"{name} is not a method", "it must derive from fedrane.Algorithm", "See CONTRIBUTING.md")
    annotated = set(vars(cls).get("__annotations__", ())) - {"models", "grid", "needs", "trains_model"}
    if "__dataclass_fields__" not in vars(cls) and annotated:
        raise ConfigError(
            f"{name} has annotated fields but is not a dataclass",
            "its hyper-parameters could not be set or saved",
            "Put @dataclass(frozen=True) above the class",
        )
    return cls

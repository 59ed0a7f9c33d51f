"""The methods, one file per paper. ``METHODS`` is the only registry; installed packages can add to it.

Your own method needs no change here: use ``method=path/to/file.py:Class``, ``method=package.module:Class``, or an entry
point in the group ``fedrane.methods``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any

from fedrane.algorithm import Algorithm
from fedrane.errors import ConfigError, nearest
from fedrane.methods.afl import AFL
from fedrane.methods.apfl import APFL
from fedrane.methods.apple import APPLE
from fedrane.methods.ditto import Ditto
from fedrane.methods.fedala import FedALA
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedavgm import FedAvgM
from fedrane.methods.fedbabu import FedBABU
from fedrane.methods.fedbn import FedBN
from fedrane.methods.feddecorr import FedDecorr
from fedrane.methods.feddyn import FedDyn
from fedrane.methods.fedfv import FedFV
from fedrane.methods.fedlc import FedLC
from fedrane.methods.fedmgda import FedMGDA
from fedrane.methods.fedmtl import FedMTL
from fedrane.methods.fednova import FedNova
from fedrane.methods.fedntd import FedNTD
from fedrane.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fedrane.methods.fedper import FedPer
from fedrane.methods.fedproto import FedProto
from fedrane.methods.fedprox import FedProx
from fedrane.methods.fedrane import FedRANE
from fedrane.methods.fedrep import FedRep
from fedrane.methods.fedrod import FedRoD
from fedrane.methods.fedsam import FedSAM
from fedrane.methods.lgfedavg import LGFedAvg
from fedrane.methods.local import Local
from fedrane.methods.moon import MOON
from fedrane.methods.pfedme import PFedMe
from fedrane.methods.qffl import QFFL
from fedrane.methods.robust import RFA, Krum, Median, MultiKrum, TrimmedMean
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
    "fednova": Method(FedNova, "NeurIPS", 2020),
    "fedavgm": Method(FedAvgM, "arXiv", 2019),
    "fedadagrad": Method(FedAdagrad, "ICLR", 2021),
    "fedadam": Method(FedAdam, "ICLR", 2021),
    "fedyogi": Method(FedYogi, "ICLR", 2021),
    "feddyn": Method(FedDyn, "ICLR", 2021),
    "moon": Method(MOON, "CVPR", 2021),
    "fedlc": Method(FedLC, "ICML", 2022),
    "fedntd": Method(FedNTD, "NeurIPS", 2022),
    "fedsam": Method(FedSAM, "ICML", 2022),
    "feddecorr": Method(FedDecorr, "ICLR", 2023),
    "median": Method(Median, "ICML", 2018),
    "trimmed-mean": Method(TrimmedMean, "ICML", 2018),
    "krum": Method(Krum, "NeurIPS", 2017),
    "multi-krum": Method(MultiKrum, "NeurIPS", 2017),
    "rfa": Method(RFA, "IEEE TSP", 2022),
    "q-ffl": Method(QFFL, "ICLR", 2020),
    "afl": Method(AFL, "ICML", 2019),
    "fedmgda": Method(FedMGDA, "IEEE TNSE", 2022),
    "fedfv": Method(FedFV, "IJCAI", 2021),
    "fedmtl": Method(FedMTL, "NeurIPS", 2017),
    "fedper": Method(FedPer, "arXiv", 2019),
    "lg-fedavg": Method(LGFedAvg, "arXiv", 2020),
    "apfl": Method(APFL, "arXiv", 2020),
    "fedrep": Method(FedRep, "ICML", 2021),
    "fedbn": Method(FedBN, "ICLR", 2021),
    "pfedme": Method(PFedMe, "NeurIPS", 2020),
    "ditto": Method(Ditto, "ICML", 2021),
    "apple": Method(APPLE, "IJCAI", 2022),
    "fedrod": Method(FedRoD, "ICLR", 2022),
    "fedbabu": Method(FedBABU, "ICLR", 2022),
    "fedproto": Method(FedProto, "AAAI", 2022),
    "fedala": Method(FedALA, "AAAI", 2023),
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
    if name in loading.installed():
        return Method(_load(loading.installed()[name], ""), "user")
    remedy = nearest(name, known()) + ", or your own file: method=path.py:Class"
    raise ConfigError(f"method={name!r} is not known", remedy=remedy)


def known() -> list[str]:
    """The names in the registry and those of installed packages."""
    return [*METHODS, *(name for name in loading.installed() if name not in METHODS)]


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
    named = [name for name, value in loading.installed().items() if value == reference]
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
    annotated = set(vars(cls).get("__annotations__", ())) - {"models", "grid", "choices", "needs", "trains_model"}
    if "__dataclass_fields__" not in vars(cls) and annotated:
        raise ConfigError(
            f"{name} has annotated fields but is not a dataclass",
            "its hyper-parameters could not be set or saved",
            "Put @dataclass(frozen=True) above the class",
        )
    return cls

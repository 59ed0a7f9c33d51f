"""Methods whose parameters can be set so that another method is left: the same bytes, under every normalisation policy.

A method that trains two models in a client, or keeps one beside the global one, must not let them touch each other.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from asserts import same_bytes
from fedrane import Algorithm, Model, Result
from fedrane.methods.apfl import APFL
from fedrane.methods.ditto import Ditto
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedbabu import FedBABU
from fedrane.methods.feddecorr import FedDecorr
from fedrane.methods.fedlc import FedLC
from fedrane.methods.fedmtl import FedMTL
from fedrane.methods.fedntd import FedNTD
from fedrane.methods.fedproto import FedProto
from fedrane.methods.fedprox import FedProx
from fedrane.methods.fedrane import FedRANE
from fedrane.methods.fedrep import FedRep
from fedrane.methods.fedrod import FedRoD
from fedrane.methods.fedsam import FedSAM
from fedrane.methods.local import Local
from fedrane.methods.moon import MOON
from fedrane.methods.spherefed import SphereFed
from fedrane.models.norms import POLICIES
from fedrane.testing import conformance
from problems import slow_except

Read = Callable[[Result], Any]


@dataclass(frozen=True)
class FixedHead(Algorithm):
    """FedAvg with a frozen random head."""

    def trains(self, name: str) -> bool:
        return not name.startswith("head.")


def of_server(result: Result) -> Model:
    """The server's model, without what a method adds to the network."""
    return _common(result.server.model)


def of_clients(result: Result) -> dict[str, Model]:
    """The models that the clients keep."""
    return {str(k): _common(client_state.model) for k, client_state in result.client_states.items()}


def of_layers(result: Result) -> dict[str, Model]:
    """The part of the averaged model that the clients keep."""
    kept = {
        k: Model(**client_state.extra["global"]) if "global" in client_state.extra else client_state.model
        for k, client_state in result.client_states.items()
    }
    return {str(k): _common(model) for k, model in kept.items()}


def _common(model: Model) -> Model:
    mine = ("body.", "head.")
    return Model(*({name: value for name, value in part.items() if name.startswith(mine)} for part in model))


PLAIN = {"lra": False, "gne": False}
REDUCTIONS: dict[str, tuple[Callable[[], Algorithm], Callable[[], Algorithm], tuple[Read, ...]]] = {
    "ditto": (lambda: Ditto(0.7), FedAvg, (of_server, of_layers)),
    "ditto-twice": (lambda: Ditto(0.7, personal_steps=2), FedAvg, (of_server, of_layers)),
    "ditto-alone": (lambda: Ditto(0.0), Local, (of_clients,)),
    "fedprox": (lambda: FedProx(0.0), FedAvg, (of_server, of_layers)),
    "fedrod": (lambda: FedRoD(0.0), FedAvg, (of_server, of_layers)),
    "moon": (lambda: MOON(0.0), FedAvg, (of_server, of_layers)),
    "fedlc": (lambda: FedLC(0.0), FedAvg, (of_server, of_layers)),
    "fedntd": (lambda: FedNTD(0.0), FedAvg, (of_server, of_layers)),
    "fedsam": (lambda: FedSAM(0.0), FedAvg, (of_server, of_layers)),
    "feddecorr": (lambda: FedDecorr(0.0), FedAvg, (of_server, of_layers)),
    "fedrane": (lambda: FedRANE(**PLAIN, head="linear", loss="ce"), FedAvg, (of_server,)),  # type: ignore[arg-type]
    "spherefed": (lambda: SphereFed(calibrate=False), lambda: FedRANE(**PLAIN), (of_server, of_clients)),  # type: ignore[arg-type]
    "fedbabu": (FedBABU, FixedHead, (of_server,)),
    "fedmtl": (lambda: FedMTL(0.0), Local, (of_clients,)),
    "apfl": (lambda: APFL(adaptive=True), FedAvg, (of_server, of_layers)),
    "apfl-alone": (lambda: APFL(1.0), Local, (of_clients,)),
    "fedrep": (lambda: FedRep(0), FixedHead, (of_server,)),
    "fedproto": (lambda: FedProto(0.0), Local, (of_clients,)),
}


@pytest.mark.parametrize("norm", slow_except(["shared", "local"], POLICIES))
@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_method_reduced_is_the_other_bit_for_bit(name: str, norm: str) -> None:
    special, plain, reads = REDUCTIONS[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the methods warn about these settings
        methods = [make() for make in (special, plain)]
    settings: dict[str, Any] = {"norm": norm, "rounds": 4, "weight_decay": 0.01}
    if plain is not Local:  # a late client starts from the current server model, which Local never changes
        settings |= {"participation": 0.6, "client_dropout": 0.2}
    runs = [conformance.trained(method, post_training=False, momentum=0.5, **settings) for method in methods]
    for read in reads:
        same_bytes(*map(read, runs))

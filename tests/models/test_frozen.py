"""Frozen parts of a network: constants that no method moves, keeps or sends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedrane
from asserts import close, same_bytes
from fedrane import Experiment, tree
from fedrane.data.dataset import Dataset
from fedrane.errors import CheckpointError, ConfigError, NoEffect
from fedrane.experiment import PYTHON
from fedrane.methods import METHODS
from fedrane.testing import conformance
from fedrane.testing.conformance import Small, blobs
from fedrane.training.setup import make_task
from problems import Listener, slow_except

BODY = "body.*"
PULLED = {"momentum": 0.9, "weight_decay": 0.1}
"""What moves a parameter without a gradient."""


def trained(method: Any = "fedavg", freeze: str = BODY, model: Any = None, **changes: Any) -> fedrane.Result:
    chosen = conformance.experiment(method, freeze=freeze, rounds=2, **changes)
    return fedrane.run(chosen, dataset=blobs(), model=model or Small(True), progress=False)


def in_states(result: fedrane.Result) -> set[str]:
    """The last name of everything that the server and the clients keep."""
    return {path.rpartition("/")[2] for path in tree.flatten(conformance.states(result))}


@pytest.mark.parametrize("name", slow_except(["fedprox", "scaffold", "ditto", "fedper"], METHODS))
def test_what_is_frozen_never_moves_and_is_never_sent(name: str) -> None:
    """Not by momentum, decay or a proximal term, nor in post-training: its bits are those it began with."""
    entry = METHODS[name]
    method = entry.cls(**entry.preset)
    network = Small(True)
    pulled = {"weight_decay": 0.1} if name in ("pfedme", "scaffold", "feddyn", "fednova", "apple") else PULLED
    result = trained(method, "body.inner.*", network, **pulled)
    frozen = {"body.inner.1.weight", "body.inner.1.bias"}
    assert result.task.frozen == frozen
    assert not any(name in path for path in in_states(result) for name in frozen)
    kept = dict(result.task.parts["body"].named_buffers())
    for key in ("inner.1.weight", "inner.1.bias"):
        torch.testing.assert_close(kept[key], network.get_parameter(key).double().detach(), rtol=0, atol=0)


def test_only_the_head_is_sent() -> None:
    whole, head = trained(freeze="head.bias"), trained()
    assert in_states(head) == {"head.weight", "head.bias"}
    assert head.history[0]["bytes_up"] == 5 * 8 * (8 * 3 + 3), "of five clients, in float64"
    assert head.history[0]["bytes_up"] < whole.history[0]["bytes_up"]


def test_training_the_head_is_training_on_the_features() -> None:
    """FedAvg with a frozen body is FedAvg of a linear network on what the body makes of the inputs, exactly.

    Statistics of batches, or running statistics that drift, would show.
    """
    network = Small(True).double()
    network.drop.p = 0.0
    for statistic in (network.norm.running_mean, network.norm.running_var):
        assert isinstance(statistic, Tensor)
        statistic.add_(0.3)
    data = blobs()
    head, network.head = network.head, nn.Identity()
    with torch.no_grad():
        x, x_test = (network.eval()(torch.from_numpy(part).double()) for part in (data.x, data.x_test))
    network.head = head
    zeros, ones = (0.0,) * 8, (1.0,) * 8
    features = Dataset(
        "features", x.numpy().astype(np.float32), data.y, x_test.numpy().astype(np.float32), data.y_test,
        data.classes, zeros, ones,
    )  # fmt: skip
    linear = nn.Sequential(nn.Identity(), nn.Linear(8, 3).double())
    linear[1].load_state_dict(head.state_dict())
    chosen = conformance.experiment("fedavg", rounds=2, model_head="1", **PULLED)
    alone = fedrane.run(chosen, dataset=features, model=linear, progress=False)
    whole = trained(model=network, **PULLED)
    close(alone.server.model.params, whole.server.model.params, 1e-6)


def test_a_frozen_normalisation_is_the_same_in_training_and_in_evaluation() -> None:
    task = trained().task
    x, model = torch.randn(5, 6, dtype=torch.float64), task.init()
    mask = torch.ones(5, dtype=torch.bool)
    batch = fedrane.task.Batch(x, torch.zeros(5, dtype=torch.int64), mask, torch.tensor(1), full=True)
    norm = task.parts["body"].norm
    hidden = torch.randn(5, 8, dtype=torch.float64)
    torch.testing.assert_close(norm.train()(hidden), norm.eval()(hidden), rtol=0, atol=0)
    assert model.stats == {}
    assert task.training(model, batch).stats == {}


def test_a_statistic_alone_freezes_its_partner_and_leaves_the_scale() -> None:
    task = trained(freeze="body.norm.running_mean").task
    assert task.frozen == {"body.norm.running_mean", "body.norm.running_var"}
    assert {"body.norm.weight", "body.norm.bias"} <= task.init().params.keys()


def test_what_is_not_frozen_starts_as_without() -> None:
    chosen = Experiment(model="convnet", model_head="", device="cpu")
    plain, frozen = (
        make_task(e, (1, 8, 8), "0123456789", None) for e in (chosen, chosen.replace(freeze="body.conv*,head.bias"))
    )
    first, left = plain.init().params, frozen.init().params
    assert set(left) == {"body.embed.weight", "body.embed.bias", "head.weight"}
    same_bytes({name: first[name] for name in left}, left)
    kept = dict(frozen.parts["body"].named_buffers())
    same_bytes(first["body.conv1.weight"], kept["conv1.weight"])


@pytest.mark.parametrize("engine", ["stacked", "threaded"])
def test_engines_agree(engine: str) -> None:
    settings = {"model": "convnet", "clients": 3, "rounds": 2, "epochs": 1, "batch": 64, "precision": "float64"}
    listener = Listener()
    ends = []
    for name in ("sequential", engine):
        chosen = Experiment(dataset="digits", freeze="body.conv*", engine=name, threads=1, **settings)
        ends.append(fedrane.run(chosen, callbacks=[listener], progress=False))
    assert listener.messages == []
    close(ends[0].server, ends[1].server, 1e-12)


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(torch.tanh(self.first(x))))
        return out


def test_a_weight_that_two_layers_share_is_frozen_in_both() -> None:
    network = Tied()
    result = trained(freeze="body.first.*", model=network)
    assert in_states(result) == {"body.second.bias", "head.weight", "head.bias"}
    body = result.task.parts["body"]
    same_bytes(body.first.weight, body.second.weight)


@pytest.mark.parametrize(
    ("method", "freeze", "why"),
    [
        ("fedavg", "body.iner.*", r"freeze=body\.iner\.\* matches no parameter.*Did you mean"),
        ("fedavg", "body.*,", "freeze= matches no parameter"),
        ("fedavg", "*", "leaves fedavg nothing to train"),
        ("fedbabu", "head.*", "includes head.bias.*fedbabu decides itself"),
        ("fedbabu", "body.*", "leaves fedbabu nothing to train"),
        ("spherefed", "*", "spherefed decides itself"),
    ],
)
def test_a_pattern_that_makes_no_sense_is_refused(method: str, freeze: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){why}"):
        trained(method, freeze)


# ---- pre-trained weights


FILE = """
import torch
from torch import nn


def net(shape, classes):
    body = nn.Sequential(nn.Linear(6, 8), nn.Tanh())
    body.load_state_dict(torch.load({weights!r}, weights_only=True))
    return nn.Sequential(body, nn.Linear(8, classes))
"""


def with_weights(folder: Path) -> tuple[str, dict[str, Tensor]]:
    weights = {"0.weight": torch.randn(8, 6), "0.bias": torch.randn(8)}
    torch.save(weights, folder / "w.pt")
    (folder / "net.py").write_text(FILE.format(weights=str(folder / "w.pt")))
    return f"{folder / 'net.py'}:net", weights


def of_file(name: str, **changes: Any) -> Experiment:
    return conformance.experiment("fedavg", model=name, rounds=1, **(changes | {"model_head": "1"}))


def test_a_function_keeps_its_weights_if_asked(tmp_path: Path) -> None:
    name, weights = with_weights(tmp_path)
    kept, drawn = (
        make_task(of_file(name, pretrained=given), (6,), "abc", None).init().params for given in (True, False)
    )
    torch.testing.assert_close(kept["body.0.0.weight"], weights["0.weight"].double(), rtol=0, atol=0)
    assert not torch.equal(drawn["body.0.0.weight"], weights["0.weight"].double())
    again = make_task(of_file(name, pretrained=True), (6,), "abc", None).init().params
    same_bytes(kept["head.weight"], again["head.weight"])


def test_a_module_from_python_keeps_its_weights() -> None:
    network = Small(False)
    first = make_task(conformance.experiment("fedavg", model=PYTHON), (6,), "abc", network).init().params
    same_bytes(first["body.inner.1.weight"], network.inner[1].weight.detach().double())


def test_a_run_folder_knows_its_frozen_weights(tmp_path: Path) -> None:
    """No checkpoint holds them: others must not take their place unnoticed."""
    name, _ = with_weights(tmp_path)
    chosen = of_file(name, pretrained=True, freeze=BODY)
    result = fedrane.run(chosen, tmp_path / "run", dataset=blobs(), progress=False)
    x = torch.from_numpy(blobs().x_test)
    torch.testing.assert_close(fedrane.load(tmp_path / "run").model(x), result.model(x))
    with_weights(tmp_path)
    with pytest.raises(CheckpointError, match="its layers or constants differ"):
        fedrane.load(tmp_path / "run")
    with pytest.raises(CheckpointError, match="the network changed since the run"):
        fedrane.resume(tmp_path / "run", rounds=2, dataset=blobs())


def test_pretrained_is_of_your_own_networks() -> None:
    with pytest.raises(NoEffect, match="pretrained=True would have no effect: that needs a network of your own"):
        fedrane.run(Experiment(model="mlp", pretrained=True), progress=False)

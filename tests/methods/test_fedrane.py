"""FedRANE: each part does something, each flag changes only its own part, and bad settings are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fedrane
from asserts import same_bytes, untimed
from fedrane import Done, Experiment, Work, tree
from fedrane.errors import ConfigError, Diverged
from fedrane.methods.fedavg import FedAvg
from fedrane.methods.fedrane import FedRANE
from fedrane.ops import graph, nash
from fedrane.ops.contrast import discrimination
from fedrane.ops.sphere import OrthonormalHead, squared_error, unit
from fedrane.task import Batch, Client, Context, Model, Roster, State, Task
from fedrane.testing.conformance import states
from problems import SLOW, Listener, quick, task_of

PLAIN: dict[str, Any] = {"head": "linear", "loss": "ce"}


def body(width: int = 16, inputs: int = 32) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Linear(inputs, 32), torch.nn.ReLU(), torch.nn.Linear(32, width), torch.nn.Linear(width, 3)
    )


def prepared(method: FedRANE, seed: int = 0) -> tuple[Task, Context]:
    task = method.prepare(task_of(body(), "3", (32,), 3, seed=seed))
    one = torch.tensor(1)
    client = Client(one, one, None, one, one, torch.tensor(0.1, dtype=torch.float64), 1)
    server = method.init(task, Roster(one[None]))
    return task, Context(method.send(task, server, client), State(Model({}, {}), {}), client)


def imbalanced(seed: int) -> Batch:
    """Three noisy clusters of 60, 50 and 18 examples with fixed centres."""
    draws = torch.Generator().manual_seed(seed)
    centres = torch.randn(3, 32, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    y = torch.cat([torch.full((n,), c) for c, n in enumerate((60, 50, 18))])
    x = centres[y] + torch.randn(128, 32, generator=draws, dtype=torch.float64)
    return Batch(x, y, torch.ones(128, dtype=torch.bool), torch.tensor(seed), full=True)


@pytest.mark.parametrize("settings", [{}, pytest.param(PLAIN, marks=SLOW)], ids=["default", "linear"])
def test_the_minority_is_augmented_towards_its_class(settings: dict[str, Any]) -> None:
    """After training on imbalanced batches, z̃ of the smallest class is closer to its class mean than z."""
    method = FedRANE(**settings)
    task, ctx = prepared(method)
    lr = torch.tensor(0.1 if settings else 0.5, dtype=torch.float64)
    ctx = ctx._replace(client=ctx.client._replace(lr=lr))
    work = method.begin(task, ctx)
    for seed in range(60):
        work = method.step(task, ctx, work, imbalanced(seed))
    batch = imbalanced(1000)
    net = task.training(work.model, batch)
    z = method._normalise(net.body(batch.x))
    augmented, relations = method._augment(net, z, batch.mask)
    minority = batch.y == 2

    def spread(examples: Tensor) -> float:
        """Distance to the class mean relative to the distance between class means."""
        means = torch.stack([examples[batch.y == c].mean(0) for c in range(3)])
        return float((examples[minority] - means[2]).norm(dim=1).mean() / (means[2] - means[:2]).norm(dim=1).mean())

    assert spread(augmented) < spread(z)
    share = relations.adjacency[minority][:, minority].sum() / relations.adjacency[minority].sum()
    assert float(share) > 2 * 17 / 127


@pytest.mark.parametrize("augmented", [0.5, 1.0])
@pytest.mark.parametrize("settings", [{}, PLAIN], ids=["default", "linear"])
def test_gradients_reach_the_body_and_the_attention(settings: dict[str, Any], augmented: float) -> None:
    """Of the contrast and of the prediction on z̃, separately."""
    for contrast in (0.0, 1e6):  # the prediction alone; then the contrast so strong that it drowns it
        method = FedRANE(**settings, augmented=augmented, contrast=contrast)
        task, ctx = prepared(method)
        model = method.start(task, ctx)

        def loss(params: dict[str, Tensor], method: FedRANE = method, ctx: Context = ctx, task: Task = task) -> Tensor:
            return method.objective(task, ctx, Model(params, {}), imbalanced(1))[0]

        gradients = torch.func.grad(loss)(model.params)
        for name, gradient in gradients.items():
            moved = float(gradient.abs().sum()) > 0
            assert moved or (name.startswith("head") and contrast > 0) or name == "head.bias", name


def test_the_graphs_gradient_flows_only_where_asked() -> None:
    batch = imbalanced(3)
    gradients = []
    for flag in (False, True):
        method = FedRANE(graph_gradient=flag)
        task, ctx = prepared(method)
        model = method.start(task, ctx)
        gradients.append(
            torch.func.grad(lambda p, m=method, t=task, c=ctx: m.objective(t, c, Model(p, {}), batch)[0])(model.params)
        )
    assert not torch.equal(gradients[0]["body.0.weight"], gradients[1]["body.0.weight"])


def test_without_both_parts_it_is_fedavg() -> None:
    """Bit for bit, in a whole run with partial participation, except for personal models."""
    settings: dict[str, Any] = {"rounds": 4, "participation": 0.5, "momentum": 0.5, "clients": 6}
    bare = fedrane.run(quick(method=FedRANE(lra=False, gne=False, **PLAIN), **settings))
    plain = fedrane.run(quick(method=FedAvg(), **settings))
    same_bytes(bare.server, plain.server)
    for a, b in zip(bare.history, plain.history, strict=True):
        assert {k: a[k] for k in untimed([b])[0]} == untimed([b])[0]


def uploads(method: FedRANE, clients: int = 4) -> tuple[Task, State, State, Client]:
    task, _ = prepared(method)
    server = method.init(task, Roster(torch.ones(clients)))
    examples = {
        name: p + 0.1 * torch.randn(clients, *p.shape, generator=torch.Generator().manual_seed(5), dtype=p.dtype)
        for name, p in server.model.params.items()
        if method.trains(name)
    }
    size = torch.tensor([10, 20, 30, 40])
    return (
        task,
        server,
        State(Model(examples, {}), {}),
        Client(torch.arange(4), size, None, size, size, size.double(), 4),
    )


def test_without_gne_it_averages_by_samples() -> None:
    method = FedRANE(gne=False)
    task, server, ups, cohort = uploads(method)
    after, record = method.aggregate(task, server, ups, cohort)
    assert record == {}
    ratio = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    for name, examples in ups.model.params.items():
        torch.testing.assert_close(after.model.params[name], torch.tensordot(ratio, examples, 1))


def test_with_gne_every_client_gains() -> None:
    """The step has a positive inner product with each client's deviation; the frozen head stays."""
    method = FedRANE(power=0.0, scope="model")
    task, server, ups, cohort = uploads(method)
    after, record = method.aggregate(task, server, ups, cohort)
    step = tree.sub({n: after.model.params[n] for n in ups.model.params}, server.model.params)
    cosines = tree.cosines(step, server.model.params, ups.model.params)
    assert min(cosines) > 0
    averaged, _ = FedRANE(gne=False).aggregate(task, server, ups, cohort)
    plain = tree.sub({n: averaged.model.params[n] for n in ups.model.params}, server.model.params)
    assert float(tree.norm(step)) == pytest.approx(float(tree.norm(plain))), "as long as the average's"
    assert np.std(cosines) < 0.5 * np.std(tree.cosines(plain, server.model.params, ups.model.params))
    assert torch.equal(after.model.params["head.weight"], server.model.params["head.weight"])
    assert {
        "gne/p",
        "gne/weights",
        "gne/norms",
        "gne/residual",
        "gne/ridge",
        "gne/excluded",
        "gne/moves",
    } <= record.keys()


def test_each_flag_changes_only_its_own_part() -> None:
    """Without LRA: no attention parameters, the objective of a plain network. GNE does not change the objective."""
    task, _ = prepared(FedRANE(lra=False))
    whole, ctx = prepared(FedRANE())
    extra = whole.init().params.keys() - task.init().params.keys()
    assert {name.split(".")[0] for name in extra} == {"relate"}
    same_bytes({n: whole.init().params[n] for n in task.init().params}, task.init().params)
    batch = imbalanced(2)
    a, b = (FedRANE(gne=flag).objective(whole, ctx, whole.init(), batch)[0] for flag in (True, False))
    assert torch.equal(a, b)
    for flag in (True, False):
        method = FedRANE(lra=flag)
        shared, server, ups, cohort = uploads(FedRANE(lra=False))
        after, _ = method.aggregate(shared, server, ups, cohort)
        expected, _ = FedRANE().aggregate(shared, server, ups, cohort)
        same_bytes(after, expected)


def test_the_loss_is_prediction_plus_contrast() -> None:
    batch = imbalanced(4)
    values = []
    for contrast in (0.0, 0.2, 0.4):
        method = FedRANE(contrast=contrast)
        task, ctx = prepared(method)
        loss, outcome = method.objective(task, ctx, task.init(), batch)
        values.append(float(loss))
        assert values[-1] == pytest.approx(float(outcome.metrics["loss"] + contrast * outcome.metrics["cd"]))
    assert values[2] - values[1] == pytest.approx(values[1] - values[0])


def gradients(method: FedRANE, batch: Batch) -> dict[str, Tensor]:
    task, ctx = prepared(method)
    params = method.start(task, ctx).params
    return torch.func.grad(lambda p: method.objective(task, ctx, Model(p, {}), batch)[0])(params)


def test_the_contrast_alone_moves_the_body() -> None:
    """The gradient is the prediction's plus λ_CD times the contrast's, which reaches body and attention."""
    none, some, twice = (gradients(FedRANE(contrast=contrast), imbalanced(4)) for contrast in (0.0, 0.2, 0.4))
    for name in (name for name in none if not name.startswith("head.")):
        contrast = some[name] - none[name]
        assert float(contrast.norm()) > 1e-6, name
        torch.testing.assert_close(twice[name] - none[name], 2 * contrast, rtol=1e-6, atol=1e-9)


def test_the_loss_is_the_mean_of_both_predictions() -> None:
    """Explicitly: half the squared distance of z and of z̃, both of norm 1, from the class."""
    batch, method = imbalanced(4), FedRANE(contrast=0.0)
    task, ctx = prepared(method)
    model = task.init()
    net = task.training(model, batch)
    z = unit(net.body(batch.x))
    adjacency = graph.relations(z, batch.mask, 0.1, 5).adjacency
    augmented = unit(net.part("relate", z, adjacency, batch.mask))
    target = torch.eye(3, dtype=torch.float64)[batch.y]
    losses = [
        0.5 * (examples @ model.params["head.weight"].T - target).square().sum(1).mean() for examples in (z, augmented)
    ]
    assert float((losses[0] - losses[1]).abs()) > 1e-6
    torch.testing.assert_close(method.objective(task, ctx, model, batch)[0], (losses[0] + losses[1]) / 2)
    for part in (0.0, 0.2, 1.0):
        mixed = FedRANE(contrast=0.0, augmented=part).objective(task, ctx, model, batch)[0]
        torch.testing.assert_close(mixed, part * losses[1] + (1 - part) * losses[0])


@pytest.mark.parametrize(("loss", "scale"), [("mse", 1.0), ("ce", 16.0), ("ce", 3.0)])
def test_scores_are_cosines(loss: str, scale: float) -> None:
    """With the rows of an orthonormal head; with cross entropy times the scale."""
    method, batch = FedRANE(loss=loss, scale=scale), imbalanced(2)
    task, _ = prepared(method)
    model = task.init()
    z = task.evaluating(model, batch.mask).body(batch.x)
    expected = z @ model.params["head.weight"].T / z.norm(dim=1, keepdim=True)
    torch.testing.assert_close(method.predict(task, model, batch.x, batch.mask), scale * expected)


DEFAULT_TERMS = nash.Terms(power=1.0, scope="layer")
SKETCH: dict[str, Any] = {"gram": "sketch", "sketch": 8}


def test_the_terms_of_the_bargain_are_those_set() -> None:
    plain = FedRANE(**PLAIN)
    task, server, ups, cohort = uploads(plain)
    usual, _ = plain.aggregate(task, server, ups, cohort)
    for terms in ({"power": 0.5}, {"length": "ball"}, {"scope": "model"}, {"blend": 0.3}, SKETCH):
        after, _ = FedRANE(**PLAIN, **terms).aggregate(task, server, ups, cohort)
        expected, _ = nash.negotiate(server.model, ups.model, cohort, DEFAULT_TERMS._replace(**terms), task.seed)
        same_bytes(after.model, expected)
        assert not tree.equal(after, usual), terms
    _, record = FedRANE(**PLAIN, solver="sequential").aggregate(task, server, ups, cohort)
    assert record["gne/iterations"] != plain.aggregate(task, server, ups, cohort)[1]["gne/iterations"]


@pytest.mark.parametrize(
    "setting",
    [
        {"relation": 0.5},
        {"alternations": 2},
        {"closed_form": "paper"},
        {"steps": 2},
        {"attention": "dot"},
        {"residual": False},
        {"neighbours": 3},
        {"contrast": 0.3},
        {"temperature": 0.5},
        {"projection": 16},
    ],
    ids=str,
)
def test_every_setting_of_the_augmentation_changes_it(setting: dict[str, Any]) -> None:
    """Every setting reaches the bargain."""
    values = []
    for method in (FedRANE(), FedRANE(**setting)):
        task, ctx = prepared(method)
        values.append(float(method.objective(task, ctx, task.init(), imbalanced(4))[0]))
    assert abs(values[1] - values[0]) > 1e-6


def test_a_projection_serves_the_contrast_alone() -> None:
    """CD compares the projected features; the prediction loss is the same as without a projection."""
    metrics = {}
    for width in (0, 8):
        method = FedRANE(projection=width)
        task, ctx = prepared(method)
        model = method.start(task, ctx)
        metrics[width] = method.objective(task, ctx, model, imbalanced(6))[1].metrics
    assert torch.equal(metrics[0]["loss"], metrics[8]["loss"])
    net = task.training(model, imbalanced(6))
    z = method._normalise(net.body(imbalanced(6).x))
    augmented, _ = method._augment(net, z, imbalanced(6).mask)
    first, _, last = task.parts["project"]

    def projected(features: Tensor) -> Tensor:
        p = {name: model.params[f"project.{name}"] for name in ("0.weight", "0.bias", "2.weight", "2.bias")}
        return (features @ p["0.weight"].T + p["0.bias"]).relu() @ p["2.weight"].T + p["2.bias"]

    assert last.out_features == 8
    assert first.in_features == z.shape[1]
    expected = discrimination(projected(z), projected(augmented), imbalanced(6).mask, method.temperature)
    torch.testing.assert_close(metrics[8]["cd"], expected)


def test_a_prediction_depends_on_its_batch_only_where_asked() -> None:
    examples = imbalanced(5)
    for predict_on, apart in (("direct", False), ("relational", True)):
        method = FedRANE(predict_on=predict_on)
        task, _ = prepared(method)
        model = task.init()
        together = method.predict(task, model, examples.x, examples.mask)
        alone = method.predict(task, model, examples.x[:1], examples.mask[:1])
        assert (not torch.allclose(together[:1], alone)) == apart
        assert task.depends_on_batch == apart


@pytest.mark.parametrize("name", ["fedrane", "fedrane-wo-lra", "fedrane-wo-gne"])
def test_the_names_of_the_tables(name: str, tmp_path: Path) -> None:
    """They can be used by name, recorded and resumed, and the saved configuration gives the name."""
    result = fedrane.run(quick(method=name, rounds=2), tmp_path / "run")
    assert result.experiment.method_name == name
    assert Experiment.from_toml(tmp_path / "run" / "config.toml").method_name == name
    last = result.history[1]  # of training
    assert ("gne/weights" in last) == (name != "fedrane-wo-gne")
    assert ("clients/cd" in last) == ("clients/homophily" in last) == (name != "fedrane-wo-lra")
    if "gne/p" in last:
        assert len(last["gne/p"]) == len(last["gne/norms"]) == 4
        assert last["gne/residual"] < 1e-10
        assert last["gne/ridge"] == 0
    same_bytes(states(fedrane.resume(tmp_path / "run")), states(result))


def test_sketches_are_of_the_run_and_the_round(tmp_path: Path) -> None:
    """A resumed run draws the same ones."""
    e = quick(method=FedRANE(lra=False, **SKETCH), rounds=3)
    whole, rounds = fedrane.run(e), fedrane.run(e.replace(rounds=2), tmp_path / "run")
    assert not tree.equal(rounds.server, whole.server)
    same_bytes(states(fedrane.resume(tmp_path / "run", rounds=3)), states(whole))
    assert not tree.equal(fedrane.run(e.replace(method=FedRANE(lra=False))).server, whole.server)


def test_the_seed_of_sketches_is_the_runs() -> None:
    method = FedRANE(**PLAIN, **SKETCH)
    task, server, ups, cohort = uploads(method)
    one, other = (method.aggregate(replace(task, seed=seed), server, ups, cohort)[0] for seed in (1, 2))
    assert not tree.equal(one.model, other.model)


def test_a_frozen_head_goes_down_once() -> None:
    result = fedrane.run(quick(method="fedrane-wo-lra", rounds=2))
    first, second = (r["bytes_down"] for r in result.history[:2])
    assert first - second == 4 * 4 * result.server.model.params["head.weight"].numel()
    assert second == result.history[1]["bytes_up"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"head": "orthogonal"}, "'orthonormal'"),
        ({"closed_form": "exakt"}, "'exact'"),
        ({"length": "averages"}, "'average'"),
        ({"scope": "modle"}, "'model'"),
        ({"power": -1.0}, "between 0 and 2"),
        ({"augmented": 1.1}, "between 0 and 1"),
        ({"solver": "newtonn"}, "'newton'"),
        ({"attention": "soft"}, "'softmax'"),
        ({"temperature": 0.0}, "temperature"),
        ({"relation": 0.0}, "relation"),
        ({"blend": 1.5}, "between 0 and 1"),
        ({"gram": "sketched"}, "'sketch'"),
        ({"gram": "sketch", "sketch": 7}, r"method\.sketch=7: it must be between 8 and"),
        ({"alternations": 0}, "alternations"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        FedRANE(**settings)


def test_the_papers_preset(tmp_path: Path) -> None:
    """λ_R 0.1, λ_CD 0.2, τ₁ 0.8, lr 0.5, batch 128, E 5, K 20, r = K, batch statistics; settings override it."""
    e = Experiment.from_words(["preset=paper"])
    method = e.algorithm
    assert isinstance(method, FedRANE)
    assert (method.relation, method.contrast, method.temperature, method.length) == (0.1, 0.2, 0.8, "ball")
    assert (e.lr, e.batch, e.epochs, e.clients, e.norm) == (0.5, 128, 5, 20, "batch")
    e = Experiment.from_words(["preset=paper", "lr=0.1", "method.length=average"])
    assert (e.lr, e.algorithm.length, e.algorithm.temperature) == (0.1, "average", 0.8)
    with pytest.raises(ConfigError, match="'paper'"):
        Experiment.from_words(["preset=papre"])


# ---- the sphere, which SphereFed shares


def test_the_orthonormal_head() -> None:
    head = OrthonormalHead(8, 5)
    torch.testing.assert_close(head.weight @ head.weight.T, torch.eye(5), atol=1e-6, rtol=0)
    assert head.bias is None
    with pytest.raises(ConfigError, match="orthonormal head for 9 classes on 8"):
        OrthonormalHead(8, 9)


def test_unit_rows() -> None:
    z = torch.cat([torch.randn(3, 5), torch.zeros(1, 5)]).requires_grad_()
    u = unit(z)
    torch.testing.assert_close(u.norm(dim=1), torch.tensor([1.0, 1.0, 1.0, 0.0]))
    u.sum().backward()
    assert bool(torch.isfinite(z.grad).all())


def test_the_gradient_stays_on_the_sphere() -> None:
    """The norm of a row does not matter, so the gradient is orthogonal to it."""
    z = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    (unit(z) * torch.randn(6, 5, dtype=torch.float64)).sum().backward()
    assert z.grad is not None
    assert float((z.grad * z.detach()).sum(1).abs().max()) < 1e-12
    assert torch.autograd.gradcheck(unit, (z,))


def test_the_squared_error_leaves_out_padding() -> None:
    scores, y = torch.randn(4, 3), torch.tensor([0, 2, 1, 1])
    mask = torch.tensor([True, True, False, True])
    expected = sum(0.5 * float((scores[i] - torch.eye(3)[y[i]]).square().sum()) for i in (0, 1, 3)) / 3
    scores[2] = float("nan")
    assert float(squared_error(scores, Batch(scores, y, mask, y[0]))) == pytest.approx(expected)


# ---- messages


class Sabotaged(FedRANE):
    """Client 0's upload and model are not finite."""

    def finish(self, task: Task, ctx: Context, work: Work) -> Done:
        done = super().finish(task, ctx, work)
        broken = torch.where(ctx.client.index == 0, float("nan"), 1.0)
        return done._replace(up=tree.scale(done.up, broken), client_state=tree.scale(done.client_state, broken))


def test_a_client_left_out_is_reported_and_keeps_its_state() -> None:
    listener = Listener()
    result = fedrane.run(quick(method=Sabotaged(calibrate=False), rounds=2), callbacks=[listener])
    assert [record["gne/excluded"] for record in result.history] == [[0], [0]]
    assert len(listener.messages) == 2
    assert "clients [0] do not bargain" in listener.messages[0]
    assert 0 not in result.client_states
    assert tree.finite(states(result))


def test_when_nobody_is_finite_the_run_ends() -> None:
    with pytest.raises(Diverged, match="no longer finite"):
        fedrane.run(quick(method=FedRANE(head="linear"), lr=1e30, rounds=3))


@pytest.mark.parametrize("relation", [1e-6, 1e-4, 1e-2])
def test_weak_penalties_are_safe_in_float32(relation: float) -> None:
    result = fedrane.run(quick(method=FedRANE(relation=relation), rounds=2, epochs=2, lr=0.5))
    assert tree.finite(states(result))


def test_both_ablations_at_once_are_neither() -> None:
    assert Experiment(method=FedRANE(lra=False, gne=False)).method_name == "fedrane"
    assert Experiment(method=FedRANE(lra=False)).method_name == "fedrane-wo-lra"


def test_the_preset_holds_for_the_ablations() -> None:
    for words in (["preset=paper", "method=fedrane-wo-lra"], ["method=fedrane-wo-gne", "preset=paper"]):
        e = Experiment.from_words(words)
        assert not (e.algorithm.lra and e.algorithm.gne)
        assert (e.algorithm.length, e.algorithm.power, e.algorithm.scope) == ("ball", 0.0, "model")
    assert Experiment.from_dict({"preset": "paper", "method": "fedrane"}).algorithm.length == "ball"
    with pytest.warns(UserWarning, match=r"preset=paper: method\.length=ball.* not used: .* the method is fedavg"):
        assert Experiment.from_words(["preset=paper", "method=fedavg"]).method_name == "fedavg"


def test_a_frozen_head_cannot_be_bargained_over() -> None:
    with pytest.raises(ConfigError, match="frozen"):
        FedRANE(scope="head")
    FedRANE(scope="head", head="linear")

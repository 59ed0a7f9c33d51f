"""What travels, what is refused, and what is left of a round when something goes wrong; without processes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord
from flwr.common.constant import ErrorCode
from torch import nn

import fedrane
from asserts import close, same_bytes, untimed
from fedrane import Callback, tree
from fedrane.errors import DataError
from fedrane.flower import messages, simulation
from fedrane.flower.codec import MessageError
from fedrane.flower.engine import TooFewRepliesError
from fedrane.flower.messages import ClientRequest
from fedrane.methods import METHODS
from fedrane.methods.apple import APPLE
from flower_grids import as_over_flower, looped, small, trained
from problems import EVERY_METHOD

PAGE = Path(__file__).parents[2] / "docs" / "deploy.md"


def client_states(result: Any) -> dict[str, Any]:
    return {str(k): client_state for k, client_state in sorted(result.client_states.items())}


class Listener(Callback):
    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


# ---- what travels


def with_norm(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Its normalisation layer stays with a client under ``norm=local``."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, classes))


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_no_parameter_travels_that_the_method_does_not_share(name: str, tmp_path: Path) -> None:
    """Nor one that never changes at the server, but for the first time."""
    experiment = small(method=name, rounds=2, participation=1.0, norm="local", model_head="4", eval_every=9, batch=999)
    with looped(tmp_path) as loop:
        result = fedrane.run(experiment.replace(engine="flower"), model=with_norm)
    task, method = result.task, experiment.algorithm
    parameters = task.init().params
    assert any(task.private(name) for name in parameters)
    met: set[int] = set()
    for message in trained(loop.grid.seen):
        request = message.content.config_records.get("request")
        for name, record in message.content.array_records.items():
            params = [path.rpartition(tree.SEPARATOR)[2] for path in record]  # of a model, a control, a core alike
            params = [name for name in params if name in parameters]
            assert all(method._shared(task, p) for p in params), f"{name} holds what stays with its client"
            if name == "up" or (name == "down" and request and request["client"] in met):
                assert all(method.trains(p) for p in params), f"{name} holds what is frozen"
        if request:
            met.add(int(request["client"]))
    assert met == set(range(6))


def bytes_on_the_page() -> dict[str, list[int]]:
    """The table of docs/deploy.md: each method's bytes down for the first time, down later, and up."""
    examples = re.findall(r"^\| ([a-z, -]+) \| ([\d,]+) \| ([\d,]+) \| ([\d,]+) \|$", PAGE.read_text("utf-8"), re.M)
    return {
        name: [int(n.replace(",", "")) for n in numbers] for names, *numbers in examples for name in names.split(", ")
    }


def test_the_page_s_bytes_are_of_all_methods() -> None:
    assert bytes_on_the_page().keys() == METHODS.keys()


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_bytes_are_those_of_the_arrays_that_travel_and_of_the_page(name: str, tmp_path: Path) -> None:
    experiment = small(method=name, clients=3, participation=1.0, rounds=2, batch=999, eval_every=9)
    with looped(tmp_path, nodes=3) as loop:
        result = fedrane.run(experiment.replace(engine="flower"))
    for way, key in (("down", "bytes_down"), ("up", "bytes_up")):
        records = [m.content.array_records.get(way, {}) for m in trained(loop.grid.seen)]
        assert sum(array.numpy().nbytes for r in records for array in r.values()) == sum(
            record[key] for record in result.history
        )
    first, later = result.history[:2]
    each = [first["bytes_down"], later["bytes_down"], later["bytes_up"]]
    assert each == [3 * n for n in bytes_on_the_page()[name]]


def test_bf16_halves_the_bytes_and_keeps_the_accuracy(tmp_path: Path) -> None:
    experiment = small(method="fedavg", rounds=10, participation=1.0, lr=0.2)
    with looped(tmp_path):
        bf16 = fedrane.run(experiment.replace(engine="flower-bf16"))
    reference = fedrane.run(experiment)
    for key in ("bytes_up", "bytes_down"):
        assert bf16.summary[key] == reference.summary[key] / 2
    close(bf16.server, reference.server, 0.02)
    assert abs(bf16.history[-1]["global/accuracy"] - reference.history[-1]["global/accuracy"]) < 0.02
    assert not tree.equal(bf16.server, reference.server)


# ---- losses


def lose(rounds: set[int], clients: set[int]) -> Callable[[Message], Message | None]:
    """An upload lost after the client has sent it."""

    def up(reply: Message) -> Message | None:
        fields = reply.content.config_records.get("reply")
        lost = fields is not None and fields["round"] in rounds and fields["client"] in clients
        return None if lost else reply

    return up


def test_a_lost_upload_leaves_the_controls_summed_up(tmp_path: Path, brief: None) -> None:
    """SCAFFOLD: c is the mean of the c_i, whoever was lost in whichever round."""
    with looped(tmp_path, up=lose({2, 3}, {0, 1, 4})):
        result = fedrane.run(
            small(method="scaffold", engine="flower", rounds=6, participation=1.0, precision="float64")
        )
    lost = [record["lost"] for record in result.history]
    assert lost == [[], [0, 1, 4], [0, 1, 4], [], [], []]
    assert "no reply" in result.history[1]["refused"]["0"]
    control = result.server.extra["control"]
    mean = {
        name: sum(client_state.extra["control"][name] for client_state in result.client_states.values()) / 6
        for name in control
    }
    close(mean, control, 1e-13)


def test_a_loss_is_what_a_simulated_dropout_is(tmp_path: Path, brief: None) -> None:
    local = fedrane.run(small(method="scaffold", client_dropout=0.4, participation=1.0))
    gone = {(record["round"], k) for record in local.history for k in record["lost"]}
    assert gone

    def up(reply: Message) -> Message | None:
        fields = reply.content.config_records.get("reply")
        return None if fields and (fields["round"], fields["client"]) in gone else reply

    with looped(tmp_path, up=up):
        result = fedrane.run(small(method="scaffold", engine="flower", participation=1.0))
    same_bytes(result.server, local.server)
    same_bytes(client_states(result), client_states(local))
    assert [r["lost"] for r in result.history] == [r["lost"] for r in local.history]


def test_too_few_replies_stop_the_run_and_lose_nothing(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, out = small(method="fedper", engine="flower", participation=1.0), tmp_path / "run"
    original = simulation.NodePool
    monkeypatch.setattr(simulation, "NodePool", lambda *a, **k: original(*a, **{"min_replies": 4, "retries": 1, **k}))
    with looped(tmp_path / "a", up=lose({3}, {0, 1, 2})), pytest.raises(TooFewRepliesError, match="3 of 6"):
        fedrane.run(experiment, out)
    with looped(tmp_path / "b"):
        resumed = fedrane.resume(out)
    reference = fedrane.run(experiment.replace(engine="sequential"))
    same_bytes(resumed.server, reference.server)
    same_bytes(client_states(resumed), client_states(reference))


def test_a_repeated_round_asks_only_those_who_are_missing(
    tmp_path: Path, brief: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = simulation.NodePool
    monkeypatch.setattr(simulation, "NodePool", lambda *a, **k: original(*a, **{"min_replies": 6, "retries": 1, **k}))
    lost: list[int] = []

    def up(reply: Message) -> Message | None:
        fields = reply.content.config_records.get("reply")
        if fields and fields["round"] == 2 and fields["client"] < 3 and fields["client"] not in lost:
            lost.append(int(fields["client"]))
            return None
        return reply

    experiment = small(method="scaffold", rounds=3, participation=1.0)
    listener = Listener()
    with looped(tmp_path, up=up) as loop:
        result = fedrane.run(experiment.replace(engine="flower"), callbacks=[listener])
    assert lost == [0, 1, 2]
    assert any("asked again" in text for text in listener.messages)
    assert len(list(trained(loop.grid.seen))) == 2 * (3 * 6 + 3)
    same_bytes(result.server, fedrane.run(experiment).server)


# ---- bad replies


def poison(reply: Message, change: Callable[[Any], None]) -> Message:
    change(reply.content)
    return reply


def _replace(content: Any, value: Array) -> None:
    first = next(iter(content.array_records["up"]))
    content.array_records["up"][first] = value


def _headed(values: Any, header: bytes) -> Array:
    """An array whose header has this text."""
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + values.tobytes()
    return Array(dtype=str(values.dtype), shape=values.shape, stype="numpy.ndarray", data=data)


def _first(content: Any) -> Any:
    return next(iter(content.array_records["up"].values())).numpy()


THREE = small(method="scaffold", engine="flower", rounds=3, participation=1.0, batch=999, eval_every=9)


def second(reply: Message) -> bool:
    """Whether this is the reply of client 2 in round 2."""
    fields = reply.content.config_records.get("reply")
    return fields is not None and fields["client"] == 2 and fields["round"] == 2


BAD: dict[str, Callable[[Any], Any]] = {
    "nan": lambda c: _replace(c, Array(np.full_like(_first(c), np.nan))),
    "a wrong shape": lambda c: _replace(c, Array(np.zeros((2, *_first(c).shape), np.float32))),
    "a wrong type": lambda c: _replace(c, Array(_first(c).astype(np.float64))),
    "a missing key": lambda c: c.array_records["up"].pop(next(iter(c.array_records["up"]))),
    "an extra key": lambda c: c.array_records["up"].__setitem__("more", Array(np.zeros(1, np.float32))),
    "a hundred times the size": lambda c: _replace(c, Array(np.zeros((100, *_first(c).shape), np.float32))),
    "a negative number of examples": lambda c: c.config_records["reply"].__setitem__("num_examples", -5),
    "a huge number of examples": lambda c: c.config_records["reply"].__setitem__("num_examples", 10**15),
    "another round": lambda c: c.config_records["reply"].__setitem__("round", 99),
    "no examples": lambda c: c.config_records["reply"].pop("num_examples"),
    "an infinite loss": lambda c: c.metric_records["metrics"].__setitem__("loss", float("inf")),
    "a loss that overflows a sum": lambda c: c.metric_records["metrics"].__setitem__("loss", 1e308),
    "no metrics": lambda c: c.pop("metrics"),
    "a header that is not closed": lambda c: _replace(c, _headed(_first(c), b"(" * 70)),
    "junk beside it": lambda c: c.__setitem__("junk", ConfigRecord({"more": b"x" * 1000})),
    "no arrays": lambda c: c.pop("up"),
    "nothing": lambda c: c.clear(),
}


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_reply_is_left_out_and_the_run_goes_on(bad: str, tmp_path: Path, lost_once: fedrane.Result) -> None:
    """As if that client's reply had been lost: reported to the user and in the metrics."""
    listener = Listener()
    with looped(tmp_path / "bad", up=lambda reply: poison(reply, BAD[bad]) if second(reply) else reply):
        result = fedrane.run(THREE, callbacks=[listener])
    assert [record["lost"] for record in result.history] == [[], [2], []]
    assert list(result.history[1]["refused"]) == ["2"]
    assert any("client 2 is left out" in text for text in listener.messages)

    same_bytes(result.server, lost_once.server)
    same_bytes(client_states(result), client_states(lost_once))


@pytest.fixture(scope="module")
def lost_once(tmp_path_factory: pytest.TempPathFactory) -> fedrane.Result:
    """The run in which the client's reply is an error of Flower's."""
    with looped(tmp_path_factory.mktemp("lost"), up=lambda reply: flowers_error(reply, 0)):
        return fedrane.run(THREE)


def flowers_error(reply: Message, code: int) -> Message:
    """What Flower itself sends instead of the reply of client 2 in round 2."""
    if not second(reply):
        return reply
    error = Message(Error(code=code, reason="gone"), reply_to=reply)
    error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
    return error


@pytest.mark.parametrize("code", [ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE])
def test_a_message_that_expires_a_moment_early_is_no_reply(code: int, tmp_path: Path, brief: None) -> None:
    """Flower counts a message's time from its making, we from when all are sent: either may be the first to end it."""
    with looped(tmp_path, up=lambda reply: flowers_error(reply, code)):
        result = fedrane.run(THREE)
    assert [record["lost"] for record in result.history] == [[], [2], []]
    assert result.history[1]["refused"] == {"2": "no reply within 0.2 s"}


class UnforeseenError(Exception):
    """Of no type that a reader of replies could expect."""


def test_whatever_a_reply_raises_costs_that_reply_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = messages.ClientReply

    def reply(up: Any, metrics: Any) -> Any:
        if not refused:
            refused.append(1)
            raise UnforeseenError("of its own kind")
        return original(up, metrics)

    refused: list[int] = []
    monkeypatch.setattr("fedrane.flower.engine.ClientReply", reply)
    with looped(tmp_path):
        result = fedrane.run(THREE)
    assert [len(record["lost"]) for record in result.history] == [1, 0, 0], [r.get("refused") for r in result.history]
    assert "UnforeseenError: of its own kind" in str(result.history[0]["refused"])


def test_a_reply_that_flower_cannot_parse_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flower parses a whole answer at once, and has confirmed it before: so each is asked for by itself."""
    original = simulation.NodePool
    monkeypatch.setattr(simulation, "NodePool", lambda *a, **k: original(*a, **{"one_by_one": True, **k}))
    with looped(tmp_path) as loop:
        pull = loop.grid.pull_messages

        def parsing(names: list[str]) -> Any:
            replies = list(pull(names))
            if any(second(reply) for reply in replies):
                raise UnforeseenError("of its own kind")
            return replies

        monkeypatch.setattr(loop.grid, "pull_messages", parsing)
        result = fedrane.run(THREE)
    assert [record["lost"] for record in result.history] == [[], [2], []]
    assert "UnforeseenError" in result.history[1]["refused"]["2"]


COUNTED = {"examples": 5, "hits": 3, "loss": 2.5, "few": 1, "few_hits": 0}
BY_CLASS = {"class_examples": [2, 3, 0], "class_hits": [1, 2, 0]}


def test_counts_that_can_be_true_are_read() -> None:
    assert messages.read_tally(MetricRecord(COUNTED | BY_CLASS), 3, 5) == (5, 3, 2.5, 1, 0, (2, 3, 0), (1, 2, 0), None)
    assert messages.read_tally(MetricRecord(COUNTED), 3, 5) == (5, 3, 2.5, 1, 0, (), (), None)
    assert messages.read_tally(None, 3, 0) is None


TWO_CLASSES = {"class_examples": [2, 3], "class_hits": [1, 2]}
RANKED = {"auroc": 0.75, "auprc": 0.5, "sensitivity_at_specificity_95": 0.0}


def test_measures_of_two_classes_that_can_be_true_are_read() -> None:
    """Of a client that has both classes and reports how many examples of each."""
    tally = messages.read_tally(MetricRecord(COUNTED | TWO_CLASSES | RANKED), 2, 5)
    assert tally is not None
    assert tally.ranking == (0.75, 0.5, 0.0)
    assert messages.tally_record(tally, by_class=True) == MetricRecord(COUNTED | TWO_CLASSES | RANKED)
    assert messages.tally_record(tally, by_class=False) == MetricRecord(COUNTED)
    alone = {"class_examples": [0, 5], "class_hits": [0, 3]}
    assert messages.read_tally(MetricRecord(COUNTED | alone), 2, 5) == (5, 3, 2.5, 1, 0, (0, 5), (0, 3), None)


@pytest.mark.parametrize(
    "content",
    [
        TWO_CLASSES,
        RANKED,
        TWO_CLASSES | RANKED | {"auroc": 1.5},
        TWO_CLASSES | RANKED | {"auprc": float("nan")},
        TWO_CLASSES | RANKED | {"auprc": [0.5]},
        TWO_CLASSES | {name: value for name, value in RANKED.items() if name != "auroc"},
        {"class_examples": [0, 5], "class_hits": [0, 3]} | RANKED,
    ],
    ids=str,
)
def test_measures_of_two_classes_that_cannot_be_true_are_refused(content: dict[str, Any]) -> None:
    """Missing, given without the counts by class, out of range, and of a client that has one class only."""
    with pytest.raises(MessageError, match="measures of two classes"):
        messages.read_tally(MetricRecord(COUNTED | content), 2, 5)


def test_of_three_classes_there_are_no_measures_of_two() -> None:
    with pytest.raises(MessageError, match="here none"):
        messages.read_tally(MetricRecord(COUNTED | BY_CLASS | RANKED), 3, 5)


@pytest.mark.parametrize(
    "change",
    [
        {"examples": -5},
        {"examples": 0},
        {"examples": 10**9},
        {"examples": 5.5},
        {"hits": 6},
        {"hits": 2.5},
        {"loss": float("nan")},
        {"loss": [1.0]},
        {"few": 6},
        {"few_hits": 2},
        {"few": 5, "few_hits": 4},
        {"few": 3},
        {"class_hits": [1, 2]},
        {"class_hits": [1, 2, 0, 0]},
        {"class_hits": [3, 0, 0]},
        {"class_hits": 3},
        {"class_hits": [1.5, 1.5, 0.0]},
        {"class_hits": [float("nan"), 2.0, 0.0]},
        {"class_examples": []},
        {"class_examples": [2, 3]},
        {"class_examples": [6, -1, 0]},
        {"class_examples": [2, 2, 0]},
        {"class_examples": [5], "class_hits": [3]},
        {"junk": 1.0},
    ],
    ids=str,
)
def test_counts_that_cannot_be_true_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(MessageError):
        messages.read_tally(MetricRecord(COUNTED | BY_CLASS | change), 3, 5)


@pytest.mark.parametrize("declared", [0, 4, 6])
def test_other_counts_than_were_declared_are_refused(declared: int) -> None:
    """A client that tests with a thousand times its examples would outvote the others."""
    with pytest.raises(MessageError, match="counts of 5 examples: by what it reported when it joined"):
        messages.read_tally(MetricRecord(COUNTED), 3, declared)


def test_counts_that_are_missing_are_refused_if_there_are_examples() -> None:
    with pytest.raises(MessageError, match="no counts"):
        messages.read_tally(None, 3, 5)


HOSTILE = "\x1b[31mred\n\x00\u202eabc" + "x" * 100_000


def test_a_node_s_text_is_bounded_and_cannot_control_a_terminal(tmp_path: Path) -> None:
    def up(reply: Message) -> Message:
        if second(reply):
            reply.content = type(reply.content)({"refused": ConfigRecord({"why": HOSTILE})})
        return reply

    listener = Listener()
    with looped(tmp_path, up=up):
        result = fedrane.run(THREE, callbacks=[listener])
    for text in [result.history[1]["refused"]["2"], *listener.messages]:
        assert text.isprintable()
        assert len(text) < 400
    assert r"\x1b[31mred \x00\u202eabc" in result.history[1]["refused"]["2"]


def test_flower_s_reason_is_bounded_as_well(tmp_path: Path) -> None:
    def up(reply: Message) -> Message:
        if not second(reply):
            return reply
        error = Message(Error(code=0, reason=HOSTILE.replace("\n", "")), reply_to=reply)
        error.metadata.__dict__["_reply_to_message_id"] = reply.metadata.reply_to_message_id
        return error

    with looped(tmp_path, up=up):
        text = fedrane.run(THREE).history[1]["refused"]["2"]
    assert text.isprintable()
    assert len(text) < 400


@pytest.mark.parametrize(
    "error", [DataError("jane-doe.png: HIV-positive"), KeyError("Jane Doe"), OSError("/home/jane")]
)
def test_a_client_s_error_leaves_it_as_a_code_without_data(error: Exception) -> None:
    why = str(messages.refusal_record(error, detailed=False).config_records["refused"]["why"])
    assert re.fullmatch(r"error '(data|defect)': the node's own log says more", why)
    told = str(messages.refusal_record(error, detailed=True).config_records["refused"]["why"])
    assert str(error) in told


def test_a_clients_message_about_a_request_is_reported() -> None:
    record = messages.refusal_record(MessageError("a message for client 2", "this is client 1"), detailed=False)
    assert "this is client 1" in str(record.config_records["refused"]["why"])


def test_an_upload_far_from_the_others_is_left_out_as_if_it_were_lost(
    tmp_path: Path, lost_once: fedrane.Result
) -> None:
    """The gate is on by itself where clients are nodes; the client goes back to the state before it."""

    def far(content: Any) -> None:
        _replace(content, Array(np.float32(1e30) * _first(content)))

    listener = Listener()
    with looped(tmp_path, up=lambda reply: poison(reply, far) if second(reply) else reply):
        result = fedrane.run(THREE, callbacks=[listener])
    assert [record["lost"] for record in result.history] == [[], [2], []]
    assert "the norm of its params is" in result.history[1]["refused"]["2"]
    assert any("client 2 is left out: the norm of its" in text for text in listener.messages)
    same_bytes(result.server, lost_once.server)
    same_bytes(client_states(result), client_states(lost_once))


def test_an_index_that_no_client_has_does_not_end_apple(tmp_path: Path) -> None:
    """The server looks up by it what comes down in the next round."""

    def wish(content: Any) -> None:
        content.array_records["up"]["extra/wanted"] = Array(np.full((2,), 10**6, np.int64))

    experiment = THREE.replace(method=APPLE(downloads=2))
    with looped(tmp_path, up=lambda reply: poison(reply, wish) if second(reply) else reply):
        result = fedrane.run(experiment)
    assert [record["cohort"] for record in result.history] == [[0, 1, 2, 3, 4, 5]] * 3


def test_an_identity_with_more_in_it_is_refused() -> None:
    record = messages.identity_record(3, 5)
    assert messages.read_identity(1000, record) == (3, 5)
    record.config_records["identity"]["junk"] = b"x" * 1000
    with pytest.raises(MessageError, match="1 entries that were not asked for"):
        messages.read_identity(1000, record)


@pytest.mark.parametrize("fields", [(-1, 5), (0, -5), (0, 0), (0, 10**15), ("0", 5), (True, 5)])
def test_a_node_that_introduces_itself_wrongly_is_not_taken_in(fields: Any, tmp_path: Path, brief: None) -> None:
    def up(reply: Message) -> Message:
        me = reply.content.config_records.get("identity")
        if me is not None and me["client"] == 3:
            reply.content["identity"] = ConfigRecord({"client": fields[0], "num_examples": fields[1]})
        return reply

    listener = Listener()
    with looped(tmp_path, up=up):
        result = fedrane.run(
            small(method="fedavg", engine="flower", rounds=2, participation=1.0, batch=999, eval_every=9),
            callbacks=[listener],
        )
    assert [record["lost"] for record in result.history] == [[3], [3]]
    assert any("not accepted" in text for text in listener.messages)


# ---- nodes that come and go


def test_a_node_that_comes_back_under_another_name_keeps_its_state(tmp_path: Path) -> None:
    """A restarted node has a new context; its folder has what it kept."""
    experiment = small(method="fedper", participation=1.0)
    nodes: dict[str, Any] = {}

    def down(message: Message) -> Message:
        request = message.content.config_records.get("request")
        grid = nodes["grid"]
        if request and request["round"] == 3 and request["client"] == 0 and 1000 in grid.online:
            grid.contexts.clear()
        return message

    with looped(tmp_path, down=down) as loop:
        nodes["grid"] = loop.grid
        result = fedrane.run(experiment.replace(engine="flower"))
    same_bytes(client_states(result), client_states(fedrane.run(experiment)))


def test_two_nodes_cannot_be_one_client(tmp_path: Path) -> None:
    listener = Listener()
    with looped(tmp_path) as loop:
        loop.grid.join(client=0, node=5)
        result = fedrane.run(small(method="fedavg", engine="flower", rounds=1, participation=1.0), callbacks=[listener])
    assert len(result.history[0]["cohort"]) == 6
    assert any("not accepted" in text and "client 0" in text for text in listener.messages)


def test_a_client_that_lost_its_folder_is_left_out(tmp_path: Path) -> None:
    """Its state cannot be guessed: SCAFFOLD's sum would not hold."""

    def down(message: Message) -> Message:
        request = message.content.config_records.get("request")
        if request and request["round"] == 2 and request["client"] == 1:
            for path in tmp_path.rglob("client-000001/*/round-*"):
                path.unlink()
            for context in nodes["grid"].contexts.values():
                context.state.clear()
        return message

    nodes: dict[str, Any] = {}
    with looped(tmp_path, down=down) as loop:
        nodes["grid"] = loop.grid
        result = fedrane.run(small(method="scaffold", engine="flower", rounds=2, participation=1.0))
    assert result.history[1]["lost"] == [1]
    assert "is lost" in result.history[1]["refused"]["1"]


def test_what_was_sent_once_is_sent_again_to_one_that_has_lost_it(tmp_path: Path) -> None:
    """After a resume the server does not know what its clients still hold."""
    experiment = small(method="fedrane", participation=1.0, rounds=4)
    rounds = iter(range(1, 9))
    with looped(tmp_path / "a"):
        fedrane.run(experiment.replace(engine="flower"), tmp_path / "run", stop=lambda: next(rounds) == 2)
    with looped(tmp_path / "b") as loop:
        resumed = fedrane.resume(tmp_path / "run")
    assert any("missing_constants" in m.content.config_records for m in trained(loop.grid.seen))
    reference = fedrane.run(experiment)
    same_bytes(resumed.server, reference.server)
    same_bytes(client_states(resumed), client_states(reference))
    assert untimed(resumed.history)[-1]["global/accuracy"] == untimed(reference.history)[-1]["global/accuracy"]


def test_a_message_for_another_client_is_refused_by_it(tmp_path: Path) -> None:
    def down(message: Message) -> Message:
        request = message.content.config_records.get("request")
        if request and request["client"] == 1:
            request["client"] = 2
        return message

    with looped(tmp_path, down=down):
        result = fedrane.run(small(method="fedavg", engine="flower", rounds=1, participation=1.0))
    assert result.history[0]["lost"] == [1]
    assert "this is client 1" in result.history[0]["refused"]["1"]


@pytest.mark.parametrize("change", ["network", "version", "type", "arrays"])
def test_a_client_refuses_a_message_that_it_cannot_mean(change: str, tmp_path: Path) -> None:
    def down(message: Message) -> Message:
        request, content = message.content.config_records.get("request"), message.content
        if request and request["client"] == 1 and change == "version":
            request["more"] = 1
        elif request and request["client"] == 1 and change == "type":
            request["epochs"] = "five"
        elif request and request["client"] == 1 and change == "arrays":
            del content["down"]
        elif request and request["client"] == 1:
            request["layout"] = str(request["layout"]).replace("[10, 64]", "[10, 63]").replace("[10]", "[11]")
            content["down"] = ArrayRecord({k: Array(np.zeros((11,), np.float32)) for k in content["down"]})
        return message

    with looped(tmp_path, down=down):
        result = fedrane.run(small(method="fedavg", engine="flower", rounds=1, participation=1.0))
    assert result.history[0]["lost"] == [1]
    assert "Error" not in result.history[0]["refused"]["1"], "foreseen"


def test_no_reply_at_all_stops_the_run(tmp_path: Path) -> None:
    with looped(tmp_path, up=_refusing), pytest.raises(TooFewRepliesError, match="client 0: no"):
        fedrane.run(small(method="fedavg", engine="flower", rounds=1, participation=1.0))


def _refusing(reply: Message) -> Message:
    if "reply" in reply.content.config_records:
        reply.content = type(reply.content)({"refused": ConfigRecord({"why": "no"})})
    return reply


@pytest.mark.parametrize(
    "changes",
    [{"epochs": 5, "steps": 4, "optimizer": "adam", "lr": 0.01}, {"epochs": 0.6}],
    ids=["steps", "part"],
)
def test_nodes_train_for_so_many_steps_or_a_part_of_an_epoch(changes: dict[str, Any], tmp_path: Path) -> None:
    """To the bits of a local run, by the optimiser of the experiment."""
    experiment = small(rounds=2, **changes)
    local = fedrane.run(experiment)
    with looped(tmp_path):
        remote = fedrane.run(experiment.replace(engine="flower"))
    same_bytes(local.server, remote.server)
    assert as_over_flower(local) == untimed(remote.history)


@pytest.mark.parametrize("bad", [{"epochs": -1.0}, {"epochs": float("nan")}, {"steps": -1}], ids=str)
def test_a_client_does_not_train_for_less_than_nothing(bad: dict[str, Any], tmp_path: Path) -> None:
    with looped(tmp_path) as loop:
        fedrane.run(small(rounds=1, engine="flower"))
    (first, *_) = trained(loop.grid.seen)
    record = first.content.config_records["request"]
    record.update(bad)
    with pytest.raises(MessageError, match="a client trains neither of them"):
        ClientRequest.read(first.content)

"""A client's states: the one that the server has aggregated is used, even if messages are lost or repeated."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import RecordDict

from asserts import same_bytes
from fedrane import Model, State
from fedrane.flower.client_state import NEVER, ClientStateStore, SavedState
from fedrane.flower.codec import MessageError
from fedrane.training import run_folder

KEY = "ab" * 8


def saved(value: float) -> SavedState:
    client_state = State(
        Model({"b": torch.full((2, 2), value), "a": torch.full((3,), value)}, {}), {"control": {}, "n": {}}
    )
    return SavedState(client_state, {"head.weight": torch.full((2,), -value)})


def store(folder: Path, state: RecordDict | None = None) -> ClientStateStore:
    return ClientStateStore(folder, RecordDict() if state is None else state, KEY)


def test_a_copy_comes_back_to_the_last_bit_from_either_store(tmp_path: Path) -> None:
    context = RecordDict()
    store(tmp_path, context).put(3, saved(1.5))
    for each in (store(tmp_path), store(tmp_path / "elsewhere", context)):
        state = each.committed(3, 3)
        assert state is not None
        same_bytes(state.client_state, saved(1.5).client_state)
        same_bytes(state.constant, saved(1.5).constant)
        assert list(state.client_state.model.params) == ["b", "a"]


def test_what_a_client_keeps_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody else can read it, not even while it is written."""
    modes: set[int] = set()
    save = run_folder.save_file

    def saving(tensors: Any, path: Path, metadata: Any) -> None:
        modes.add(stat.S_IMODE(path.stat().st_mode))
        save(tensors, path, metadata)
        modes.add(stat.S_IMODE(path.stat().st_mode))

    monkeypatch.setattr(run_folder, "save_file", saving)
    before = os.umask(0)
    try:
        here = store(tmp_path / "clients" / "0")
        here.require_current(1)
        here.put(1, saved(1))
    finally:
        os.umask(before)
    assert modes == {0o600}
    for path in (tmp_path / "clients").rglob("*"):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_an_upload_that_was_lost_leaves_the_state_before_it(tmp_path: Path) -> None:
    here = store(tmp_path)
    here.put(1, saved(1))
    here.committed(1, 1)
    here.put(2, saved(2))  # pending: the server never confirms that it has aggregated it
    state = here.committed(1, 1)
    assert state is not None
    same_bytes(state.client_state, saved(1).client_state)
    with pytest.raises(MessageError, match="round 2 is lost"):
        here.committed(2, 2)


def test_a_server_that_goes_back_finds_the_older_state(tmp_path: Path) -> None:
    """With room for three rounds back, each of them is there; what lies further back is cleared away."""
    here = store(tmp_path)
    for round in range(1, 9):
        here.committed(round - 1 if round > 1 else NEVER, round - 1 - 3)
        here.put(round, saved(round))
    for back in (8, 7, 6, 5):
        state = here.committed(back, 5)
        assert state is not None
        same_bytes(state.client_state, saved(back).client_state)
    assert [path.name for path in (tmp_path / KEY).glob("round-*")] == ["round-000005.safetensors"]


def test_a_client_that_was_never_aggregated_starts_fresh(tmp_path: Path) -> None:
    here = store(tmp_path)
    here.put(4, saved(4))
    assert here.committed(NEVER, 0) is None
    assert not list((tmp_path / KEY).glob("round-*"))


def test_a_damaged_copy_is_reported_as_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The reason and the folder's name stay in the client's own log."""
    here = store(tmp_path)
    here.put(2, saved(2))
    path = next((tmp_path / KEY).glob("round-*"))
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(MessageError, match="round 2 is lost") as raised:
        store(tmp_path).committed(2, 2)
    assert str(tmp_path) not in str(raised.value)
    assert str(tmp_path) in caplog.text
    assert "cannot be read" in caplog.text
    assert here.committed(2, 2) is not None  # Flower's context still has it


def test_what_the_server_sent_before_a_restart_is_refused(tmp_path: Path) -> None:
    here = store(tmp_path)
    here.require_current(1)
    here.require_current(3)
    here.require_current(3)
    with pytest.raises(MessageError, match="server start 2"):
        store(tmp_path).require_current(2)


@pytest.mark.parametrize("key", ["../../etc", "", "ABC", "a" * 65, "ab/cd1234"])
def test_a_key_cannot_lead_out_of_the_folder(tmp_path: Path, key: str) -> None:
    with pytest.raises(MessageError):
        ClientStateStore(tmp_path, RecordDict(), key)

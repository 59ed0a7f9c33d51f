"""Run folders as a run would leave them, made without one: every number in them is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from fedrane import Experiment
from fedrane.training import sessions
from fedrane.training.digests import DIGEST
from fedrane.training.run_folder import CALIBRATION, METADATA, METRICS, SESSIONS, SUMMARY, Folder, encode, read

NEW = ("run", "crc32", DIGEST)
"""The entries of a checkpoint's header that earlier versions did not write."""
CLIENTS, CLASSES = 5, ("zero", "one", "two")


def record(round: int, seed: int = 0, clients: int = CLIENTS, **more: Any) -> dict[str, Any]:
    """A round of FedAvg, better than the last."""
    level = 0.5 + 0.4 * (1 - 0.6**round) - 0.01 * seed
    each = [level - 0.05 * k for k in range(clients)]
    return {
        "round": round,
        "cohort": list(range(clients)),
        "lost": [],
        "global/accuracy": level,
        "global/local_accuracy_worst10": each[-1],
        "global/local_clients": each,
        "global/minority_accuracy": level - 0.2,
        "cosine": [0.9 - 0.3 * k for k in range(clients)],
        "seconds": 2.0,
        "eval_seconds": 1.0,
        "samples_per_second": 100.0,
        "bytes_up": 1000,
        "bytes_down": 3000,
        **more,
    }


def personal(level: float, clients: int = CLIENTS) -> dict[str, Any]:
    """What a method with personal models records beside."""
    each = [level + 0.01 * k for k in range(clients)]
    return {"personal/accuracy": level, "personal/accuracy_worst10": each[0], "personal/clients": each}


def two_classes(level: float, model: str = "global/", both: int = 3) -> dict[str, Any]:
    """What is recorded of two classes beside; ``both`` clients have test examples of both."""
    numbers = {"auroc": level, "auprc": level - 0.1, "sensitivity_at_specificity_95": level - 0.3, "f1": level - 0.2}
    local = f"{model.replace('global/', 'global/local_')}clients_with_both_classes"
    return {f"{model}{name}": value for name, value in numbers.items()} | {local: both}


def bargain(round: int, clients: int = CLIENTS) -> dict[str, Any]:
    """What FedRANE records beside."""
    return {"gne/weights": [1.0 + k for k in range(clients)], "gne/residual": 10.0 ** -(10 + round)}


def write(
    path: Path,
    records: list[dict[str, Any]],
    *,
    name: str = "fedavg",
    seed: int = 0,
    finished: bool = True,
    classes: tuple[str, ...] = CLASSES,
    clients: int = CLIENTS,
    **settings: Any,
) -> Path:
    """A folder with these rounds; ``name`` may be anything, as a file may hold anything."""
    folder = Folder(path)
    folder.create()
    experiment = Experiment(
        seed=seed, clients=clients, device="cpu", model="mlp", **{"rounds": len(records)} | settings
    )
    toml = experiment.to_toml().replace('name = "fedavg"', f"name = {json.dumps(name, ensure_ascii=False)}")
    (path / "config.toml").write_text(toml, encoding="utf-8")
    labels = np.arange(1, clients * len(classes) + 1).reshape(clients, len(classes)) + seed
    inputs = {"shape": [1, 8, 8], "classes": list(classes), "mean": [0.5], "std": [0.5]}
    folder.write_json(METADATA, {"inputs": inputs, "labels": labels.tolist()})
    for line in records:
        folder.append_metrics(line)
    if finished:
        folder.write_json(SUMMARY, {})
    folder.close()
    return path


def session(path: Path, command: str = "/bin/fedrane run lr=0.1", **more: Any) -> None:
    """Add a session to a run: when, where, and by which versions and command it was trained."""
    entry = {
        "command": command,
        "start": "2026-01-02T03:04:05+00:00",
        "end": "2026-01-02T03:06:05+00:00",
        "versions": {"fedrane": "0.1.0", "torch": "2.9.0"},
        "machine": {"device": "cpu", "device_name": "a processor"},
        "engine": "stacked",
        "threads": 2,
    }
    folder = Folder(path)
    folder.write_json(SESSIONS, [*sessions.read(folder), entry | more])


def older(run: Path) -> Path:
    """Make a run one of an earlier version, which wrote no id and no digests."""
    folder = Folder(run)
    metadata, records, paths = folder.read_metadata(), folder.read_metrics(), folder.checkpoints()
    others = {name: folder.read_json(name) for name in (SUMMARY, CALIBRATION, SESSIONS) if (run / name).is_file()}
    folder.write_metadata({key: value for key, value in metadata.items() if key not in ("id", "settings")})
    for name, value in others.items():
        folder.write_json(name, value)
    (run / METRICS).write_text("".join(json.dumps(record) + "\n" for record in records))
    for path in paths:
        tensors, header = encode(read(path)._replace(run=""))
        kept = {key: value for key, value in json.loads(header["fedrane"]).items() if key not in NEW}
        save_file(tensors, path, {"fedrane": json.dumps(kept)})
    return run


def simple(path: Path, rounds: int = 3, name: str = "fedavg", seed: int = 0, **more: Any) -> Path:
    """A run of FedAvg."""
    return write(path, [record(r, seed) for r in range(1, rounds + 1)], name=name, seed=seed, **more)


def full(path: Path, rounds: int = 4, name: str = "fedrane", seed: int = 0, post: int = 0, **more: Any) -> Path:
    """A run with everything that a report can show but a model; the last ``post`` rounds are post-training ones."""
    clients = more.get("clients", CLIENTS)
    recall = [1 / (2 + k) for k in range(len(more.get("classes", CLASSES)))]
    both = {"global/recall": recall, "personal/recall": recall}
    lines = [
        record(r, seed, clients, **personal(0.6 + 0.05 * r - 0.02 * seed, clients), **bargain(r, clients), **both)
        for r in range(1, rounds + 1)
    ]
    return write(path, lines, name=name, seed=seed, **{"rounds": rounds - post} | more)


def alone(path: Path, rounds: int = 3, name: str = "local", seed: int = 0, **more: Any) -> Path:
    """A run in which nothing travels."""
    kept = ("round", "cohort", "lost", "seconds", "eval_seconds", "samples_per_second")
    lines = [
        {key: value for key, value in record(r, seed).items() if key in kept} | personal(0.7 + 0.03 * r)
        for r in range(1, rounds + 1)
    ]
    return write(path, lines, name=name, seed=seed, **more)

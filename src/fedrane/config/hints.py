"""What users of other libraries type, and what it is here: remedies for words that are no keys."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedrane.config import reference
from fedrane.errors import FileError
from fedrane.system.files import user_path

KEYS = {
    "batch": ("bs", "lbs", "local_bs", "local_batch_size", "train_batch_size", "minibatch", "mini_batch"),
    "clients": ("n_clients", "nclients", "nodes", "num_nodes", "num_partners", "num_users", "users"),
    "clip": ("clip_norm", "gradient_clipping", "max_grad_norm", "max_norm"),
    "dataset": ("csv", "dataset_name", "datasets", "file", "path"),
    "adam.decay": ("adam_beta2", "beta2", "betas"),
    "adam.floor": ("adam_eps", "adam_epsilon", "eps", "epsilon"),
    "adam.momentum": ("adam_beta1", "beta1"),
    "epochs": ("epoch", "epochs_local", "inner_epochs", "local_ep", "n_epochs", "train_epochs"),
    "lr": ("client_lr", "eta", "local_learning_rate", "local_lr", "step_size"),
    "method": ("algo", "methods", "strategy"),
    "model": ("arch", "architecture", "model_name", "net", "network"),
    "optimizer": ("client_optimizer", "local_optimizer", "optim", "optimiser", "optimizer_name"),
    "participation": ("frac", "fraction", "fraction_fit", "join_ratio", "sample_fraction", "sample_rate", "sampling"),
    "partition.alpha": ("beta", "concentration", "dir_alpha", "dirichlet"),
    "partition.kind": ("distribution", "iid", "non_iid", "niid", "noniid", "partitioner", "split"),
    "partition.test": ("test_fraction", "test_ratio", "test_size"),
    "patience": ("early_stop", "early_stopping"),
    "positive": ("pos_class", "pos_label", "positive_class", "positive_label"),
    "precision": ("amp", "bf16", "dtype", "float16", "fp16", "half", "mixed_precision"),
    "rounds": ("comm_rounds", "communication_rounds", "global_epochs", "global_rounds", "n_rounds", "server_rounds"),
    "schedule.factor": ("gamma", "learning_rate_decay", "lr_decay"),
    "schedule.kind": ("lr_schedule", "lr_scheduler", "scheduler"),
    "schedule.warmup": ("lr_warmup", "num_warmup_rounds", "warm_up", "warmup", "warmup_rounds"),
    "seed": ("manual_seed", "rng", "torch_seed"),
    "steps": ("iterations", "k_steps", "local_iterations", "local_updates", "num_local_steps", "num_steps"),
    "threads": ("jobs", "n_jobs", "n_workers", "num_threads", "num_workers", "workers"),
    "validation": ("val", "val_fraction", "val_ratio", "val_split", "validation_split"),
}
"""Words that stand for a key, but are not accepted for it."""
SENTENCES = {
    "device=cuda is the GPU, device=auto takes it if there is one": ("cuda", "gpu", "gpus", "num_gpus", "use_cuda"),
    "The clients' optimiser is optimizer=sgd, optimizer=adam or optimizer=adamw": ("adamw", "sgd"),
    "SGD has momentum=0.9, as in torch.optim.SGD; Nesterov's is not implemented": ("nesterov",),
    "It is a field of some methods: method.strength=0.1 ('fedrane methods NAME' lists the fields)": (
        *("lam", "lambda", "lamda", "mu", "prox_mu", "proximal_mu", "strength"),
    ),
    "client_dropout=0.1 loses updates; dropout of activations is a layer of your own network": ("dropout",),
    "The folder is an option: --out DIR": ("log_dir", "logdir", "out", "outdir", "output", "output_dir", "save_dir"),
    "device=cpu computes without a GPU": ("cpu", "no_cuda"),
}
"""Remedies for words that no single key stands for."""


def for_key(word: str) -> str:
    """The remedy for a word that is no key; empty if nothing is known about it.

    >>> for_key("local_ep")
    'Use epochs=…'
    """
    plain = word.lower().replace("-", "_")
    key = next((key for key, words in KEYS.items() if plain in words), None)
    return f"Use {key}=…" if key else next((text for text, words in SENTENCES.items() if plain in words), "")


def for_word(word: str, following: str = "") -> str:
    """The remedy for a word that is not ``key=value``, followed by another; empty if nothing is known about it.

    >>> for_word("rounds", "5")
    'Write rounds=5'
    >>> for_word("fedprox")
    'It is a method: write method=fedprox (in a comparison --methods fedprox)'
    """
    value = following if following and "=" not in following else "…"
    if (key := _key(word)) is not None:
        return f"Write {key}={value}"
    if word in reference.built_in():
        return f"It is a method: write method={word} (in a comparison --methods {word})"
    if word in next(key.choices for key in reference.keys() if key.name == "dataset"):
        return f"It is a dataset: write dataset={word}"
    path = Path(word)
    if path.suffix.lower() == ".py" and _exists(path):
        return f"Write method={word}:Class, or model={word}:function"
    if _exists(path):
        label = " label=COLUMN" if path.suffix.lower() in (".csv", ".parquet") and _key("label") else ""
        return f"If it is your data, write dataset={word}{label}"
    return for_key(word)


def _exists(path: Path) -> bool:
    try:
        return user_path(path).exists()
    except (FileError, OSError):  # no file can have this name, or it may not be looked at
        return False


def for_option(option: str, following: Sequence[str]) -> str:
    """The remedy for ``--rounds 5`` and ``--rounds=5``; empty if it is no key.

    >>> for_option("--lr", ["--lr=0.1"])
    'Settings are words without dashes: write lr=0.1'
    """
    name = option.lstrip("-")
    at = next((n for n, word in enumerate(following) if word.partition("=")[0] == option), None)
    rest = following[at:] if at is not None else ()
    value = rest[0].partition("=")[2] if rest else ""
    if not value and len(rest) > 1 and not rest[1].startswith("-") and "=" not in rest[1]:
        value = rest[1]
    for word in (name, name.replace("-", "_")):
        if (key := _key(word)) is not None:
            return f"Settings are words without dashes: write {key}={value or '…'}"
    return for_key(name)


def _key(word: str) -> str | None:
    """The name of a key, or of an alias, as it can be written; None for another word."""
    return next((word for key in reference.keys() if word in (key.name, *key.aliases)), None)

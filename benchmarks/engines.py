"""How fast a round is: a plain loop, the same with its data on the device, our sequential engine, and our fast one.

(a) is the loop most libraries have: ``nn.Module``, ``DataLoader`` over normalised tensors, ``optimizer.step``,
one client after another, and the average of the uploads; (b) is the same with tensors on the device and no loader.
(c) and (d) are whole rounds of ``fedrane``, with gathering and aggregation, without evaluation. On a GPU, (e) is (d)
with the library's convolutions, grouped by ``vmap``, instead of our kernels, (f) is (d) with a captured step and a
stream for each client instead of stacks, and (g) is (f) with the library's convolutions. An example counts each time it
is trained on; padding does not. Ratios are taken within one run.

    python benchmarks/engines.py [--data-root DIR] [--datasets fmnist,cifar10] [--slow-epochs 1] [--epochs 5]
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from _harness import arguments, save
from _problems import MODELS, dataset, experiment
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from fedrane.data import partition as partitions
from fedrane.data.dataset import Dataset
from fedrane.engines import stacked
from fedrane.kernels import dispatch
from fedrane.models import build
from fedrane.runner import run
from fedrane.training.callbacks import Callback
from fedrane.training.setup import make_partition, resolve

Row = dict[str, Any]
Batches = Callable[[int], Iterator[tuple[Tensor, Tensor]]]


def network(name: str, examples: Dataset, device: torch.device) -> nn.Module:
    """As it is usually written: pools after their ReLU."""
    body, head = build(MODELS[name], examples.shape, len(examples.classes))
    if MODELS[name] == "convnet":
        layers = dict(body.named_children())
        names = ("conv1", "relu1", "pool1", "conv2", "relu2", "pool2", "flatten", "embed")
        body = nn.Sequential(*(layers[layer] for layer in names))
    return nn.Sequential(body, head).to(device)


def normalised(examples: Dataset) -> tuple[Tensor, Tensor]:
    mean, std = (torch.tensor(v).reshape(1, -1, 1, 1) for v in (examples.mean, examples.std))
    return (torch.from_numpy(examples.x).float() / 255 - mean) / std, torch.from_numpy(examples.y)


def plain_round(
    model: nn.Module, batches: Batches, sizes: list[int], device: torch.device, lr: float = 0.05, least: int = 2
) -> None:
    """What a library's FedAvg does in a round; a batch of fewer examples than ``least`` is left out."""
    start = copy.deepcopy(model.state_dict())
    total = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in start.items()}
    for k, size in enumerate(sizes):
        model.load_state_dict(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr)
        for x, y in batches(k):
            if len(y) < least:  # plain BatchNorm refuses a single one on a 1 × 1 map
                continue
            x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        for name, value in model.state_dict().items():
            total[name] += value * (size / sum(sizes))
    model.load_state_dict(total)


def plain(name: str, examples: Dataset, device: torch.device, epochs: int, on_device: bool) -> Row:
    e = resolve(experiment(name, "fedavg", device=str(device)), examples, True, False)
    split = partitions.split(make_partition(e, examples), e.seed, e.partition.test, 0.0)
    x, y = normalised(examples)
    if on_device:
        x, y = x.to(device), y.to(device)
    model = network(name, examples, device)

    def loader(k: int) -> Iterator[tuple[Tensor, Tensor]]:
        data = TensorDataset(x[split.train[k]], y[split.train[k]])
        for _ in range(epochs):
            yield from DataLoader(data, e.batch, shuffle=True, pin_memory=device.type == "cuda")

    def gathered(k: int) -> Iterator[tuple[Tensor, Tensor]]:
        index = torch.from_numpy(split.train[k]).to(device)
        for _ in range(epochs):
            for piece in index[torch.randperm(len(index), device=device)].split(e.batch):
                yield x[piece], y[piece]

    sizes = [len(examples) for examples in split.train]
    batches = gathered if on_device else loader
    warm_up = [next(batches(0))]
    plain_round(model, lambda k: iter(warm_up), sizes[:1], device)  # warm
    _finish(device)
    taken = []
    for _ in range(3):
        began = time.perf_counter()
        plain_round(model, batches, sizes, device)
        _finish(device)
        taken.append(time.perf_counter() - began)
    seconds = sorted(taken)[1]
    return {"samples_per_second": epochs * sum(sizes) / seconds, "seconds": seconds, "start": 0.0}


class Watch(Callback):
    def __init__(self) -> None:
        self.rounds: list[Any] = []
        self.messages: list[str] = []

    def round(self, record: Any) -> None:
        self.rounds.append(record)

    def message(self, text: str) -> None:
        self.messages.append(text)


def ours(name: str, examples: Dataset, device: torch.device, method: str, rounds: int, **changes: Any) -> Row:
    """The median of ``rounds`` rounds after the first, which compiles and captures; with 0, the first itself."""
    watch = Watch()
    e = experiment(name, method, device=str(device), rounds=rounds + 1, **changes)
    run(e, dataset=examples, callbacks=[watch])
    later = watch.rounds[1 : rounds + 1] or watch.rounds[:1]  # without post-training
    middle = sorted(later, key=lambda r: r["seconds"])[len(later) // 2]
    start = watch.rounds[0]["seconds"] - middle["seconds"]
    result = {"samples_per_second": middle["samples_per_second"], "seconds": middle["seconds"], "start": start}
    return result | {"messages": watch.messages[:1], "loss": middle["train/loss"]}


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measured(work: Callable[[], Row], device: torch.device) -> Row:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    row = work()
    if device.type == "cuda":
        row["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row


def cases(
    name: str,
    examples: Dataset,
    device: torch.device,
    methods: list[str],
    precisions: list[str],
    slow: int,
    epochs: int,
    rounds: int,
) -> Iterator[tuple[str, str, Row]]:
    def case(work: Callable[..., Row], *args: Any, **kwargs: Any) -> Row:
        return measured(lambda: work(name, examples, device, *args, **kwargs), device)

    yield "fedavg", "(a) plain loop, DataLoader", case(plain, slow, on_device=False)
    yield "fedavg", "(b) plain loop, data on the device", case(plain, slow, on_device=True)
    for method in methods:
        yield (
            method,
            "(c) sequential, float32",
            case(ours, method, 1, engine="sequential", precision="float32", epochs=slow),
        )
        for precision in precisions:
            fast = {"engine": "auto", "precision": precision, "epochs": epochs}
            yield method, f"(d) auto, {precision}", case(ours, method, rounds, **fast)
            if device.type == "cuda":
                with patch.object(dispatch, "ENABLED", False):
                    yield method, f"(e) kernels off, {precision}", case(ours, method, rounds, **fast)
                with patch.object(stacked, "split_over_streams", one_client_each):
                    yield method, f"(f) streams, {precision}", case(ours, method, rounds, **fast)
                    with patch.object(dispatch, "ENABLED", False):
                        yield method, f"(g) streams, kernels off, {precision}", case(ours, method, rounds, **fast)


def one_client_each(steps: list[int], max_streams: int) -> list[slice]:
    return [slice(k, k + 1) for k in range(len(steps))]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--data-root", type=Path, help="real data; without it, noise of their shape")
    parser.add_argument("--datasets", default="fmnist,cifar10")
    parser.add_argument("--slow-epochs", type=int, default=1, help="epochs of a round of (a), (b) and (c)")
    parser.add_argument("--epochs", type=int, default=5, help="the same of (d)")
    parser.add_argument("--methods", default="fedavg,fedrane")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precisions", default="float32,tf32,bf16" if torch.cuda.is_available() else "float32,bf16")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    results: list[Row] = []
    for name in options.datasets.split(","):
        examples = dataset(name, options.data_root)
        base = 0.0
        wanted = options.methods.split(","), options.precisions.split(",")
        for method, what, row in cases(
            name, examples, device, *wanted, options.slow_epochs, options.epochs, options.rounds
        ):
            base = base or row["samples_per_second"]
            row = {"dataset": examples.name, "model": MODELS[name], "method": method, "what": what, **row}
            row["times_a"] = row["samples_per_second"] / base
            results.append(row)
            print(
                f"{examples.name:8s} {MODELS[name]:9s} {method:8s} {what:36s} "
                f"{row['samples_per_second']:11,.0f} samples/s "
                f"{row['times_a']:6.2f} × (a)  start {row['start']:6.1f} s  peak {row.get('peak_gib', 0):5.1f} GiB",
                flush=True,
            )
            save(f"engines-{options.datasets.replace(',', '-')}", results, options.out)


if __name__ == "__main__":
    main()

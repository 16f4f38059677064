"""Client samples per second of FedAvg local training, beside a plain PyTorch loop, in one run.

    pip install -e ".[bench]"
    python experiments/speed.py

80 clients x 750 images of 28x28 (Fashion-MNIST where it is prepared, else random pixels), 32
clients a round, one local epoch of SGD with batches of 32 (24 steps, the last of 14), weighted
average. The two take turns, so that whatever else the machine does weighs on both; medians of
rounds. Compilation is given apart and counted nowhere; the loop warms up on one client.

The loop is what one writes by hand, without a data loader: images as float32 tensors in memory,
normalised beforehand (here they are uint8, gathered and normalised inside every step), a client's
images gathered once per round in shuffled order, one model that takes the global weights by
`load_state_dict` for each client, PyTorch's own layers and SGD.
"""

import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedjax_het.errors import ConfigError, exit_status

NUM_CLIENTS, CLIENT_SAMPLES, CLIENTS_PER_ROUND = 80, 750, 32
BATCH_SIZE, LOCAL_LR = 32, 0.05
SAMPLES_PER_ROUND = CLIENTS_PER_ROUND * CLIENT_SAMPLES
NETWORKS = {"mlp": ("mlp", None), "convnet32": ("convnet", 32), "convnet128": ("convnet", 128)}


@dataclass
class Arguments:
    """FedAvg local training: this package beside a plain PyTorch loop."""

    networks: tuple[str, ...] = tuple(NETWORKS)
    """Which of mlp, convnet32, convnet128."""
    turns: int = 3
    """How often the two take turns."""
    rounds: int = 0
    """Rounds in a turn (default: 10 for the MLP, 2 and 1 for the ConvNets)."""
    skip_torch: bool = False
    """Measure this package alone, where PyTorch is not installed."""


def main() -> int:
    import tyro

    arguments = tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))
    return exit_status(lambda: measure(arguments), name="error", stopped="stopped")


def measure(arguments: Arguments) -> int:
    from fedjax_het.errors import require, require_name

    for name in arguments.networks:
        require_name("networks", name, NETWORKS)
    require(arguments.turns >= 1, "turns", arguments.turns, "a whole number >= 1")
    if not arguments.skip_torch:
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise ConfigError(
                'torch is not installed: pip install -e ".[bench]", or pass --skip-torch'
            ) from error
    dataset, source = load_images()
    print(f"{describe_machine()}\nData: {source}")
    if not arguments.skip_torch:
        print(describe_torch())
    print(describe_matmul())
    print("Client samples per second, medians:")
    print(f"{'network':11} {'here':>11} {'PyTorch loop':>13} {'ratio':>6} {'compilation':>12}")
    for name in arguments.networks:
        rounds = arguments.rounds or {"mlp": 10, "convnet32": 2, "convnet128": 1}[name]
        compare(name, rounds, arguments.turns, dataset, with_torch=not arguments.skip_torch)
    return 0


def compare(name: str, rounds: int, turns: int, dataset: Any, *, with_torch: bool) -> None:
    """Time one network, in turns, and print its row."""
    from fedjax_het.simulation import benchmark_rounds

    model, width = NETWORKS[name]
    spec = fedavg_spec(model, width)
    loop = TorchLoop(model, width, dataset) if with_torch else None
    if loop:
        loop.round(num_clients=1)  # warm-up
    ours, theirs, compile_seconds = [], [], 0.0
    for _ in range(turns):
        seconds, compiling, samples = benchmark_rounds(spec, rounds, dataset)
        assert samples == SAMPLES_PER_ROUND, samples
        ours += list(seconds)
        compile_seconds = max(compile_seconds, compiling)
        if loop:
            theirs += [loop.round() for _ in range(rounds)]
    here, there = statistics.median(ours), statistics.median(theirs or [math.nan])
    columns = [
        f"{name:11}",
        f"{SAMPLES_PER_ROUND / here:>11,.0f}",
        f"{SAMPLES_PER_ROUND / there:>13,.0f}" if theirs else f"{'—':>13}",
        f"{there / here:>6.2f}" if theirs else f"{'—':>6}",
        f"{compile_seconds:>10.1f} s",
    ]
    print(" ".join(columns), flush=True)
    print(f"{'':11} seconds a round: {spread(ours)} here", end="", flush=True)
    print(f", {spread(theirs)} in the loop" if theirs else "", flush=True)


def spread(seconds: list[float]) -> str:
    """Median, range and number of rounds."""
    low, high = min(seconds), max(seconds)
    return f"{statistics.median(seconds):.3f} ({low:.3f} to {high:.3f}, {len(seconds)} rounds)"


def fedavg_spec(model: str, width: int | None) -> Any:
    from fedjax_het import RunSpec

    return RunSpec(
        "fedavg",
        "user",
        partition="iid",
        model=model,
        width=width,
        num_clients=NUM_CLIENTS,
        participation=CLIENTS_PER_ROUND / NUM_CLIENTS,
        local_epochs=1,
        batch_size=BATCH_SIZE,
        local_optimizer="sgd",
        optimizer_state="reset",
        averaging="weighted",
        hp={"local_lr": LOCAL_LR},
    )


def load_images() -> tuple[Any, str]:
    """Fashion-MNIST if it is prepared on this machine, else random images of its shape."""
    from fedjax_het.data import dataset_from_arrays, load_dataset

    try:
        return load_dataset("fashion_mnist"), "Fashion-MNIST"
    except ConfigError:
        random = np.random.default_rng(0)
        count = NUM_CLIENTS * CLIENT_SAMPLES
        images = random.integers(0, 256, (count, 28, 28, 1), np.uint8)
        labels = random.integers(0, 10, count, np.int32)
        dataset = dataset_from_arrays(images, labels, images[:1000], labels[:1000], num_classes=10)
        return (
            dataset,
            "random images of Fashion-MNIST's shape (TFDS_DATA_DIR has no fashion_mnist)",
        )


class TorchLoop:
    """FedAvg by hand in PyTorch, on as many threads as there are cores, or on a GPU."""

    def __init__(self, model: str, width: int | None, dataset: Any):
        import torch

        self.torch = torch
        torch.manual_seed(0)
        self.device = torch_device()
        pixels = torch.tensor(dataset.train_images).permute(0, 3, 1, 2).float() / 255
        shape = (1, -1, 1, 1)
        mean, std = torch.tensor(dataset.mean).view(shape), torch.tensor(dataset.std).view(shape)
        self.images = ((pixels - mean) / std).contiguous().to(self.device)
        self.labels = torch.tensor(dataset.train_labels).long().to(self.device)
        order = torch.randperm(len(self.labels))[: NUM_CLIENTS * CLIENT_SAMPLES]
        self.clients = order.view(NUM_CLIENTS, CLIENT_SAMPLES)
        self.model = (torch_mlp() if model == "mlp" else torch_convnet(width)).to(self.device)
        self.weights = {k: v.clone() for k, v in self.model.state_dict().items()}

    def round(self, num_clients: int = CLIENTS_PER_ROUND) -> float:
        """Train the round's clients in turn and average them; seconds taken."""
        torch = self.torch
        self._wait()
        start = time.perf_counter()
        chosen = torch.randperm(NUM_CLIENTS)[:num_clients]
        total = sum(len(self.clients[client]) for client in chosen)
        average = {name: torch.zeros_like(value) for name, value in self.weights.items()}
        for client in chosen:
            self.model.load_state_dict(self.weights)
            self._train(self.clients[client])
            share = len(self.clients[client]) / total
            for name, value in self.model.state_dict().items():
                average[name].add_(value, alpha=share)
        self.weights = average
        self._wait()
        return time.perf_counter() - start

    def _train(self, indices: Any) -> None:
        torch = self.torch
        optimizer = torch.optim.SGD(self.model.parameters(), lr=LOCAL_LR)
        shuffled = indices[torch.randperm(len(indices))].to(self.device)
        images = self.images[shuffled].split(BATCH_SIZE)  # the last one is kept, smaller
        labels = self.labels[shuffled].split(BATCH_SIZE)
        for batch, target in zip(images, labels, strict=True):
            optimizer.zero_grad(set_to_none=True)
            torch.nn.functional.cross_entropy(self.model(batch), target).backward()
            optimizer.step()

    def _wait(self) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()


def torch_device() -> str:
    import jax
    import torch

    if jax.default_backend() == "gpu" and torch.cuda.is_available():
        return "cuda"
    torch.set_num_threads(cores())
    return "cpu"


def torch_mlp() -> Any:
    from torch import nn

    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def torch_convnet(width: int) -> Any:
    from torch import nn

    layers: list[Any] = []
    for channels, padding in ((1, 3), (width, 1), (width, 1)):
        layers += [
            nn.Conv2d(channels, width, 3, padding=padding),
            nn.GroupNorm(width, width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(16 * width, 10))


def cores() -> int:
    from fedjax_het._startup import available_cores

    return available_cores()


def cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            names = (line.split(":", 1)[1].strip() for line in lines if "model name" in line)
            return next(names, platform.processor())
    except OSError:
        return platform.processor() or platform.machine()


def describe_machine() -> str:
    import jax
    import jaxlib

    devices = jax.devices()
    return (
        f"Machine: {cpu_model()}, {cores()} of {os.cpu_count()} cores; "
        f"{len(devices)} jax device(s) ({devices[0].device_kind}); "
        f"Python {platform.python_version()}, jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    )


def describe_torch() -> str:
    import torch

    device = torch_device()
    threads = f"{torch.get_num_threads()} threads" if device == "cpu" else "cuda"
    return f"PyTorch {torch.__version__}, {threads}"


def describe_matmul(size: int = 2048) -> str:
    """float32 matmul speed of one jax device: what arithmetic could reach."""
    import jax
    import jax.numpy as jnp

    a = jax.random.normal(jax.random.key(0), (size, size))
    multiply = jax.jit(jnp.matmul)
    seconds = statistics.median(list(times(lambda: multiply(a, a).block_until_ready()))[1:])
    gflops = 2 * size**3 / seconds / 1e9
    return f"Matmul {size}x{size} float32 on one jax device: {gflops:,.0f} GFLOP/s"


def times(function: Callable[[], Any], repeats: int = 8) -> Iterator[float]:
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        yield time.perf_counter() - start


if __name__ == "__main__":
    raise SystemExit(main())

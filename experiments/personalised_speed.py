"""Speed of FedAMP: this package beside a plain PyTorch loop of the same rounds.

    pip install -e ".[bench]" && python experiments/personalised_speed.py
    python experiments/personalised_speed.py --check

Clients in FedAMP's practical setting, one local epoch each; turns alternate in one run; medians;
compilation apart. Then how much of our round the messages take: distances, weights and mixtures
of all models. `--check` compares instead the models that both sides make of the same initial
weights and batches.
"""

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedjax_het import RunSpec
from fedjax_het._startup import available_cores
from fedjax_het.common.errors import ConfigError, require, require_name
from fedjax_het.common.records import Count
from fedjax_het.report.programs import record_program

PEER = Path(__file__).parent / "speed_peers" / "torch_fedamp.py"
MODELS = {"mlp": {}, "convnet": {"width": 32}}
CHECKED_ROUNDS = 2
CHECKED_PROX = 1.0  # strong enough to be missed
# Of the way that a client's model has come, the median client. In a ReLU network the order of a sum
# decides now and then on which side of the kink a unit falls; in the ConvNet it happens to all
# clients, as it does when PyTorch's own start is changed by 1e-6.
TOLERANCES = {"mlp": 1e-3, "convnet": 0.05}


@dataclass
class Arguments:
    """FedAMP on Fashion-MNIST: this package beside a PyTorch loop."""

    model: str = "mlp"
    """mlp (784-128-128-10) or convnet (width 32)."""
    clients: Count = 50
    rounds: Count = 5
    """In each turn."""
    turns: Count = 3
    """How often each side is timed."""
    threads: tuple[Count, ...] = ()
    """Of the PyTorch loop, which is timed with each of these (default: 1, and the cores)."""
    check: bool = False
    """Compare the models of both sides after two rounds; time nothing."""


def measure(a: Arguments) -> int:
    from fedjax_het.running.splits import split_clients

    require_name("model", a.model, MODELS)
    require(a.clients >= 5, "clients", a.clients, "at least 5, one for each group")
    dataset, source = images()
    spec = RunSpec(
        "fedamp",
        "fashion_mnist",
        protocol="fedamp",
        model=a.model,
        num_clients=a.clients,
        local_epochs=1,
        **MODELS[a.model],
    ).resolved()
    partition = split_clients(spec, dataset)
    print(
        f"{source}, {a.model}, {a.clients} clients of {partition.sizes.min()} to "
        f"{partition.sizes.max()} images, batch {spec.batch_size}; {available_cores()} cores, "
        f"load {os.getloadavg()[0]:.1f} before"
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = write_regime(spec, dataset, partition, a, Path(folder))
        if a.check:
            return check(spec, dataset, settings, Path(folder))
        return time_both(spec, dataset, a, settings)


def images():
    """-> (Dataset, what it is): random images where Fashion-MNIST is not prepared."""
    from fedjax_het import dataset_from_arrays, load_dataset

    try:
        return load_dataset("fashion_mnist"), "Fashion-MNIST"
    except ConfigError:
        random = np.random.default_rng(0)
        pixels = random.integers(0, 256, (70_000, 28, 28, 1), np.uint8)
        labels = random.integers(0, 10, 70_000, np.int32)
        split = pixels[:60_000], labels[:60_000], pixels[60_000:], labels[60_000:]
        dataset = dataset_from_arrays(*split, num_classes=10, mean=(0.5,), std=(0.29,))
        return dataset, "random images of Fashion-MNIST's shape"


def write_regime(spec: RunSpec, dataset, partition, a: Arguments, folder: Path) -> list[dict]:
    """Write what the peer reads; -> its two arguments."""
    np.savez(
        folder / "images.npz",
        images=dataset.train_images,
        labels=dataset.train_labels,
        mean=np.float32(dataset.mean),
        std=np.float32(dataset.std),
    )
    everyone = np.arange(partition.num_clients)
    np.savez(
        folder / "clients.npz",
        indices=partition.indices,
        sizes=partition.sizes,
        cohorts=np.tile(everyone, (a.rounds, 1)),
    )
    regime = {
        "network": spec.model,
        "width": spec.width,
        "batch_size": spec.batch_size,
        "local_lr": spec.hp["local_lr"],
        "threads": available_cores(),
        "images": str(folder / "images.npz"),
        "clients": str(folder / "clients.npz"),
    }
    numbers = {name: spec.hp[name] for name in ("sigma", "alpha")}
    return [regime, {"numbers": numbers, "prox_lambda": spec.hp["prox_lambda"]}]


def run_peer(settings: list[dict]) -> str:
    command = [sys.executable, str(PEER), *(json.dumps(record) for record in settings)]
    # On a busy machine threads that spin while they wait for each other take minutes for a round.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{PEER.name} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def time_both(spec: RunSpec, dataset, a: Arguments, settings: list[dict]) -> int:
    from fedjax_het.running.benchmark import benchmark_rounds

    threads = a.threads or sorted({1, available_cores()})
    ours, compiled = [], []
    theirs: dict[int, list[float]] = {n: [] for n in threads}
    shares: dict[int, list[float]] = {n: [] for n in threads}
    for _ in range(a.turns):
        times = benchmark_rounds(spec, a.rounds, dataset)
        ours += times.seconds
        compiled.append(times.compile_seconds)
        for n in threads:
            out = run_peer([{**settings[0], "threads": n}, settings[1]])
            made = json.loads(out.splitlines()[-1])
            assert made["samples"] == times.samples
            theirs[n] += made["seconds"]
            shares[n].append(made["message_share"])
    here = statistics.median(ours)
    print(f"compilation {compiled[0]:.1f} s; lanes: {times.lanes}; {made['version']}")
    print(row("fedjax_het", ours, a.clients, time_messages(spec, dataset) / here))
    for n in threads:
        share = statistics.median(shares[n])
        name = f"PyTorch, {n} thread{'s' if n > 1 else ''}"
        print(f"{row(name, theirs[n], a.clients, share)}  ratio {ratio(theirs[n], ours)}")
    best = min(theirs.values(), key=statistics.median)
    print(f"client rounds per second, times those of the better loop: {ratio(best, ours)}")
    return 0


def row(name: str, seconds: list[float], clients: int, share: float) -> str:
    middle = statistics.median(seconds)
    return (
        f"{name:18} {middle:7.3f} s a round ({min(seconds):.3f} to {max(seconds):.3f})  "
        f"{clients / middle:7,.0f} client rounds/s  messages {share:.0%}"
    )


def ratio(theirs: list[float], ours: list[float]) -> str:
    """Of medians, and of the fastest rounds, which other programs disturbed least."""
    medians, fastest = (f(theirs) / f(ours) for f in (statistics.median, min))
    return f"{medians:.2f} (of the fastest rounds {fastest:.2f})"


def time_messages(spec: RunSpec, dataset, repetitions: int = 10) -> float:
    """Seconds, the median, of one round's messages alone: with all models on every device, as the
    rounds' program has them."""
    import jax
    import jax.numpy as jnp

    from fedjax_het.algorithms.collaboration import (
        attention,
        median_pair,
        pass_messages,
        squared_distances,
    )
    from fedjax_het.running.prepare import prepare

    group = prepare([spec], dataset=dataset)
    task, plan = group.program.task, group.plan
    keys = jax.random.split(jax.random.key(0), spec.num_clients)
    models = plan.put(jax.jit(jax.vmap(task.model.init))(keys)["params"])
    heard = plan.put(jnp.ones(spec.num_clients, bool))

    @jax.jit
    def messages(models, heard, hp):
        distances = squared_distances(models, plan)
        sigma = hp["sigma"] * median_pair(distances, heard)
        alpha = hp["alpha"] * sigma / (len(distances) - 1)
        weights, _ = attention(distances, alpha, sigma, heard, guard=spec.options["guard"])
        return pass_messages(weights, models)

    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        jax.block_until_ready(messages(models, heard, spec.hp))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def check(spec: RunSpec, dataset, settings: list[dict], folder: Path) -> int:
    """Whether both sides make the same models of the same start and batches."""
    from fedjax_het.running.advance import start
    from fedjax_het.running.checkpoints import Checkpoints
    from fedjax_het.running.prepare import prepare
    from fedjax_het.running.runs import gathered

    rounds = CHECKED_ROUNDS + 5
    hp = {**spec.hp, "prox_lambda": CHECKED_PROX}
    spec = dataclasses.replace(spec, rounds=rounds, eval_every=rounds, hp=hp)
    group = prepare([spec], dataset=dataset)
    runs = gathered(group, group.federations)
    start(runs, Checkpoints())
    first = torch_models(runs.state)
    orders = [batch_order(group.federations[0].scheduler, r) for r in range(CHECKED_ROUNDS)]
    for r in range(CHECKED_ROUNDS):
        runs.state, _ = group.program.chunk(runs.state, runs.call(r, 1))
    ours = torch_models(runs.state)

    np.savez(folder / "start.npz", models=first, orders=np.stack(orders))
    paths = {"start": str(folder / "start.npz"), "models": str(folder / "models.npy")}
    run_peer([settings[0], {**settings[1], **paths, "prox_lambda": CHECKED_PROX}])
    moved = np.linalg.norm(ours - first, axis=1)
    apart = np.linalg.norm(ours - np.load(folder / "models.npy"), axis=1) / moved
    print(
        f"after {CHECKED_ROUNDS} rounds both sides' models of a client differ by "
        f"{np.median(apart):.1e} of the way they came (median; at most {apart.max():.1e})"
    )
    if not np.median(apart) < TOLERANCES[spec.model]:
        raise ConfigError(f"the models of both sides: expected {TOLERANCES[spec.model]} at most")
    return 0


def batch_order(scheduler, round_index: int) -> np.ndarray:
    """A round's training examples of all clients, one client after the other, as they come."""
    return np.concatenate(
        [
            indices[:size]
            for client in range(len(scheduler.participants(round_index)))
            for indices, size in zip(*scheduler.client_batches(round_index, client), strict=True)
        ]
    )


def torch_models(state) -> np.ndarray:
    """[K, P]: the clients' models as `parameters_to_vector` of the peer's network has them."""
    import jax

    params = jax.device_get(state.clients.variables["params"])
    columns = []
    for name in [*sorted(params.keys() - {"head"}, key=_depth), "head"]:
        layer = params[name]
        weight = layer["kernel"] if "kernel" in layer else layer["scale"]
        if name == "head" and "conv1" in params:  # its inputs are [height, width, channels]
            channels = params["conv1"]["bias"].shape[1]
            side = math.isqrt(weight.shape[1] // channels)
            weight = weight.reshape(-1, side, side, channels, weight.shape[2])
        # [K, in, out] or [K, height, width, in, out] -> [K, out, in] or [K, out, in, height, width]
        if weight.ndim == 5:
            weight = weight.transpose(0, 4, 3, 1, 2)
        elif weight.ndim == 3:
            weight = weight.transpose(0, 2, 1)
        columns += [weight.reshape(len(weight), -1), layer["bias"]]
    return np.concatenate(columns, axis=1)


def _depth(name: str) -> tuple[int, bool]:
    """conv1, norm1, conv2, ..."""
    return int(name[-1]), name.startswith("norm")


main = record_program(Arguments, measure)

if __name__ == "__main__":
    raise SystemExit(main())

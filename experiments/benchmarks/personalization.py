"""Compare the speed of FedAMP with a PyTorch loop of the same rounds.

    pip install -e ".[bench]" && python experiments/personalised_speed.py
    python experiments/personalised_speed.py --check

Clients are in FedAMP's practical setting, with one local epoch. Both programs alternate; results
are medians; compile times are separate. The last numbers are the fraction of a round that the
messages take: distances, weights and mixtures of all models. `--check` compares the models that
both programs make from equal initial weights and batches.
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
from typing import Any

import numpy as np

from experiments.benchmarks.local_training import load_images, write_images
from fedjax_het import RunSpec
from fedjax_het._startup import count_available_cores
from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.papers.programs import make_config_program
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, require, require_name

PEER = Path(__file__).parent / "peers" / "torch_fedamp.py"
MODELS: dict[str, dict[str, Any]] = {"mlp": {}, "convnet": {"width": 32}}
CHECK_ROUNDS = 2
CHECK_PROX_LAMBDA = 1.0  # strong enough to be missed
# Relative to the distance of a client's model from its start; median over clients. In a ReLU
# network the order of a sum sometimes decides on which side of the kink a unit falls. In the
# ConvNet this affects all clients, and a change of PyTorch's initial model by 1e-6 has the same
# effect.
TOLERANCES = {"mlp": 1e-3, "convnet": 0.05}


@dataclass
class Arguments:
    """FedAMP on Fashion-MNIST: this package beside a PyTorch loop."""

    model: str = "mlp"
    """mlp (784-128-128-10) or convnet (width 32)."""
    clients: PositiveInt = 50
    rounds: PositiveInt = 5
    """Number of rounds in each turn."""
    turns: PositiveInt = 3
    """Number of turns of each program."""
    threads: tuple[PositiveInt, ...] = ()
    """Numbers of threads of the PyTorch loop (default: 1 and the number of cores)."""
    check: bool = False
    """Compare the models of both programs after two rounds instead of the speed."""


def run_benchmark(arguments: Arguments) -> int:
    """Compare speed or models, and print the results.

    Args:
      arguments: options of the benchmark.

    Returns:
      The exit status, 0.

    Raises:
      ConfigError: if an option is invalid, the peer fails or the models differ.
    """
    from fedjax_het.runtime.data_assignment import build_partition

    require_name("model", arguments.model, MODELS)
    require(arguments.clients >= 5, "clients", arguments.clients, "at least 5, one for each group")
    dataset, source = load_images()
    spec = RunSpec(
        "fedamp",
        "fashion_mnist",
        protocol="fedamp",
        model=arguments.model,
        num_clients=arguments.clients,
        local_epochs=1,
        **MODELS[arguments.model],
    ).resolved()
    partition = build_partition(spec, dataset)
    print(
        f"{source}, {arguments.model}, {arguments.clients} clients of {partition.sizes.min()} to "
        f"{partition.sizes.max()} images, batch {spec.batch_size}; {count_available_cores()} cores, "
        f"load {os.getloadavg()[0]:.1f} before"
    )
    with tempfile.TemporaryDirectory() as folder:
        settings = write_peer_inputs(spec, dataset, partition, arguments, Path(folder))
        if arguments.check:
            return compare_models(spec, dataset, settings, Path(folder))
        return compare_speed(spec, dataset, arguments, settings)


def write_peer_inputs(
    spec: ResolvedRunSpec, dataset, partition, arguments: Arguments, folder: Path
) -> list[dict]:
    """Write the files of the peer and return its two arguments."""
    write_images(folder / "images.npz", dataset)
    cohorts = np.tile(np.arange(partition.num_clients), (arguments.rounds, 1))
    clients = {"indices": partition.indices, "sizes": partition.sizes, "cohorts": cohorts}
    np.savez(folder / "clients.npz", **clients)
    regime = {
        "network": spec.model,
        "width": spec.width,
        "batch_size": spec.batch_size,
        "local_lr": spec.learning_rate,
        "threads": count_available_cores(),
        "images": str(folder / "images.npz"),
        "clients": str(folder / "clients.npz"),
    }
    hyper_parameters = {name: spec.hp[name] for name in ("sigma", "alpha")}
    return [regime, {"numbers": hyper_parameters, "prox_lambda": spec.hp["prox_lambda"]}]


def run_peer(settings: list[dict]) -> str:
    """Run the peer and return its output; raise ConfigError if it fails."""
    command = [sys.executable, str(PEER), *(json.dumps(record) for record in settings)]
    # On a busy machine threads that spin while they wait for each other take minutes for a round.
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}
    process = subprocess.run(command, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise ConfigError(f"{PEER.name} failed:\n{process.stderr[-2000:]}")
    return process.stdout


def compare_speed(
    spec: ResolvedRunSpec, dataset, arguments: Arguments, settings: list[dict]
) -> int:
    """Time both programs in turns and print the results; return the exit status, 0."""
    from fedjax_het.runtime.benchmark import benchmark_rounds

    threads = arguments.threads or sorted({1, count_available_cores()})
    package_seconds, compile_seconds = [], []
    peer_seconds: dict[int, list[float]] = {n: [] for n in threads}
    message_fractions: dict[int, list[float]] = {n: [] for n in threads}
    for _ in range(arguments.turns):
        times = benchmark_rounds(spec, arguments.rounds, dataset)
        package_seconds += times.seconds
        compile_seconds.append(times.compile_seconds)
        for n in threads:
            output = run_peer([{**settings[0], "threads": n}, settings[1]])
            record = json.loads(output.splitlines()[-1])
            assert record["samples"] == times.samples
            peer_seconds[n] += record["seconds"]
            message_fractions[n].append(record["message_share"])
    package_median = statistics.median(package_seconds)
    print(f"compilation {compile_seconds[0]:.1f} s; lanes: {times.lanes}; {record['version']}")
    message_fraction = time_messages(spec, dataset) / package_median
    print(format_row("fedjax_het", package_seconds, arguments.clients, message_fraction))
    for n in threads:
        message_fraction = statistics.median(message_fractions[n])
        name = f"PyTorch, {n} thread{'s' if n > 1 else ''}"
        row = format_row(name, peer_seconds[n], arguments.clients, message_fraction)
        print(f"{row}  ratio {format_ratio(peer_seconds[n], package_seconds)}")
    best = min(peer_seconds.values(), key=statistics.median)
    ratio = format_ratio(best, package_seconds)
    print(f"client rounds per second, relative to the better loop: {ratio}")
    return 0


def format_row(name: str, seconds: list[float], clients: int, message_fraction: float) -> str:
    """Format the results of one program."""
    median = statistics.median(seconds)
    return (
        f"{name:18} {median:7.3f} s a round ({min(seconds):.3f} to {max(seconds):.3f})  "
        f"{clients / median:7,.0f} client rounds/s  messages {message_fraction:.0%}"
    )


def format_ratio(peer_seconds: list[float], package_seconds: list[float]) -> str:
    """Format the ratios of medians and of the fastest rounds, which were disturbed least."""
    medians, minima = (f(peer_seconds) / f(package_seconds) for f in (statistics.median, min))
    return f"{medians:.2f} (of the fastest rounds {minima:.2f})"


def time_messages(spec: ResolvedRunSpec, dataset, repetitions: int = 10) -> float:
    """Time the messages of one round, with all models on every device as in a round's program.

    Args:
      spec: settings of the run.
      dataset: the data set.
      repetitions: number of measurements.

    Returns:
      The median duration in seconds.
    """
    import jax
    import jax.numpy as jnp

    from fedjax_het.algorithms.client_attention import (
        compute_attention,
        compute_squared_distances,
        median_over_pairs,
        mix_models,
    )
    from fedjax_het.runtime.build import prepare_group

    group = prepare_group([spec], UserObjects(dataset))
    task, plan = group.program.signature.training.task, group.program.plan
    keys = jax.random.split(jax.random.key(0), spec.num_clients)
    models = plan.put(jax.jit(jax.vmap(task.model.init))(keys)["params"])
    is_participating = plan.put(jnp.ones(spec.num_clients, bool))

    @jax.jit
    def messages(models, is_participating, hp):
        distances = compute_squared_distances(models, plan)
        sigma = hp["sigma"] * median_over_pairs(distances, is_participating)
        alpha = hp["alpha"] * sigma / (len(distances) - 1)
        guard = spec.options["guard"]
        weights, _ = compute_attention(distances, alpha, sigma, is_participating, guard=guard)
        return mix_models(weights, models)

    seconds = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        jax.block_until_ready(messages(models, is_participating, spec.hyperparameters))
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def compare_models(spec: ResolvedRunSpec, dataset, settings: list[dict], folder: Path) -> int:
    """Compare the models that both programs make from equal initial weights and batches.

    Args:
      spec: settings of the run.
      dataset: the data set.
      settings: arguments of the peer.
      folder: folder of the peer's files.

    Returns:
      The exit status, 0.

    Raises:
      ConfigError: if the models differ by more than `TOLERANCES`.
    """
    from fedjax_het.runtime.build import prepare_group
    from fedjax_het.runtime.checkpointing import CheckpointWriter
    from fedjax_het.runtime.group_init import init_group
    from fedjax_het.runtime.runner import start_runs

    rounds = CHECK_ROUNDS + 5
    hp = {**spec.hp, "prox_lambda": CHECK_PROX_LAMBDA}
    changed_spec = dataclasses.replace(spec, rounds=rounds, eval_every=rounds, hp=hp)
    group = prepare_group([changed_spec], UserObjects(dataset))
    runs = init_group(group, group.prepared_runs)
    start_runs(runs, CheckpointWriter())
    initial_models = to_torch_vectors(runs.state)
    orders = [batch_order(group.prepared_runs[0].scheduler, r) for r in range(CHECK_ROUNDS)]
    for r in range(CHECK_ROUNDS):
        state, _ = group.program.chunk(runs.state, runs.build_chunk_inputs(r, 1))
        runs.update(state=state)
    package_models = to_torch_vectors(runs.state)

    np.savez(folder / "start.npz", models=initial_models, orders=np.stack(orders))
    paths = {"start": str(folder / "start.npz"), "models": str(folder / "models.npy")}
    run_peer([settings[0], {**settings[1], **paths, "prox_lambda": CHECK_PROX_LAMBDA}])
    distance_moved = np.linalg.norm(package_models - initial_models, axis=1)
    differences = np.linalg.norm(package_models - np.load(folder / "models.npy"), axis=1)
    differences /= distance_moved
    median = np.median(differences)
    print(
        f"after {CHECK_ROUNDS} rounds both sides' models of a client differ by {median:.1e} of "
        f"the way they came (median; at most {differences.max():.1e})"
    )
    if not median < TOLERANCES[spec.model]:
        raise ConfigError(f"the models of both sides: expected {TOLERANCES[spec.model]} at most")
    return 0


def batch_order(scheduler, round_index: int) -> np.ndarray:
    """Return the training examples of all clients in a round, in the order of their batches."""
    return np.concatenate(
        [
            indices[:size]
            for client in range(len(scheduler.participants(round_index)))
            for indices, size in zip(*scheduler.client_batches(round_index, client), strict=True)
        ]
    )


def to_torch_vectors(state) -> np.ndarray:
    """Return the clients' models `[K, P]` in the order of the peer's `parameters_to_vector`."""
    import jax

    params = jax.device_get(state.clients.variables["params"])
    columns = []
    for name in [*sorted(params.keys() - {"head"}, key=_layer_order), "head"]:
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


def _layer_order(name: str) -> tuple[int, bool]:
    """Return the sort key of a layer: conv1, norm1, conv2, ..."""
    return int(name[-1]), name.startswith("norm")


main = make_config_program(Arguments, run_benchmark)

if __name__ == "__main__":
    raise SystemExit(main())

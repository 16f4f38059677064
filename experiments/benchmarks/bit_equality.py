"""Compare the bits of every method between two versions of the package.

Run the program once in each version and compare the two files:

    python experiments/benchmarks/bit_equality.py --output before.json
    python experiments/benchmarks/bit_equality.py --output after.json --compare before.json

Each method makes four rounds on a small problem with clients of unequal size, in five ways. The
ways are one device, two devices, two runs side by side, client state on the host, and rounds in
several calls of a resumable round. Each digest is the SHA-256 of all metrics and of all leaves of
the final state. The digests of two versions are equal only on one machine with one version of jax.
The program exits with status 1 if a digest differs.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

import jax
import numpy as np

import fedjax_het
from fedjax_het import ConfigError, Placement, RunSpec, dataset_from_arrays, simulate, sweep
from fedjax_het.algorithms import METHODS

SIZES = (7, 5, 12, 3, 9, 20)
NUM_CLASSES = 3
SHAPE = (2, 2, 1)
ROUNDS = 4
OPTIONS = {
    "dynafed": {
        "num_iterations": 6,
        "inner_steps": 2,
        "trajectory_rounds": 3,
        "segment_length": 2,
        "target_counts": 1,
        "num_samples": 6,
        "fine_tune_epochs": 2,
    },
    "feddm": {"ipc": 2, "steps": 3, "server_epochs": 2},
    "fedaf": {"ipc": 2, "steps": 3, "server_epochs": 2},
    "fedgen": {"generator_hidden": 8, "generator_noise": 4, "generator_steps": 3},
}
# Protocols of methods whose runs do not have DynaFed's local training.
PROTOCOLS = {
    "fedaf": ("feddm", "fedaf"),
    "fedamp": (
        *("fedamp", "heurfedamp", "separate", "fedavg_ft", "fedprox_ft", "apfl", "ditto"),
        *("pfedme", "per_fedavg"),
    ),
    "fsl": ("data_sharing", "fsl", "fsl_p"),
}
WAYS = ("one_device", "two_devices", "parallel_runs", "host_state", "resumable_rounds")
# Module and name of two constants in the versions that the program has met.
LONG_FLOPS = (
    ("fedjax_het.running.long_rounds", "LONG_FLOPS"),
    ("fedjax_het.runtime.resumable_rounds", "LONG_FLOPS"),
)
CHUNK_SECONDS = (
    ("fedjax_het.runtime.runner", "CHUNK_SECONDS"),
    ("fedjax_het.runtime.long_phases", "CHUNK_SECONDS"),
)


def make_blobs(sizes, seed):
    """Return float32 images `[N, 2, 2, 1]` of three Gaussian classes and int32 labels `[N]`."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate(
        [(rng.integers(0, 2, n) + k) % NUM_CLASSES for k, n in enumerate(sizes)]
    )
    centers = np.random.default_rng(99).normal(size=(NUM_CLASSES, *SHAPE))
    images = centers[labels] + rng.normal(size=(len(labels), *SHAPE))
    return images.astype(np.float32), labels.astype(np.int32)


def make_spec(name: str, seed: int = 0) -> RunSpec:
    """Return the settings of one run of the small problem."""
    settings: dict = {}
    if METHODS[name].requires_server_examples:
        settings["pretrain_epochs"] = 2
    if name == "fsl":
        settings["gradient_gaps"] = 2
    protocols = {method: protocol for protocol, row in PROTOCOLS.items() for method in row}
    return RunSpec(
        algorithm=name,
        protocol=protocols.get(name, "dynafed"),
        dataset="user",
        partition="dirichlet",
        alpha=0.5,
        model="mlp",
        num_clients=6,
        participation=0.5,
        batch_size=4,
        rounds=ROUNDS,
        seed=seed,
        options=OPTIONS.get(name, {}),
        **settings,
    )


def find_constant(candidates):
    """Return the first module that can be imported among `candidates`, and the constant's name."""
    for module, name in candidates:
        try:
            actual = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        if hasattr(actual, name):
            return actual, name
    raise SystemExit(f"none of {candidates} exists in fedjax_het {fedjax_het.__version__}")


def digest_of(result) -> dict[str, str]:
    """Return the SHA-256 of the metrics and of the final state of a run."""
    metrics = hashlib.sha256()
    for name in sorted(result.metrics):
        metrics.update(name.encode() + np.ascontiguousarray(result.metrics[name]).tobytes())
    for name in sorted(result.artifacts):
        metrics.update(np.ascontiguousarray(result.artifacts[name]).tobytes())
    state = hashlib.sha256()
    clients: Any = getattr(result.state, "clients", None)
    get_client = getattr(clients, "get_client", getattr(clients, "client", None))
    if get_client is not None:  # the states are on the host
        rows = [get_client(k) for k in range(6)]
        leaves = [
            *jax.tree.leaves(result.state._replace(clients=())),
            *jax.tree.leaves(jax.tree.map(lambda *a: np.stack(a), *rows)),
        ]
    else:
        leaves = jax.tree.leaves(result.state)
    for leaf in leaves:
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        state.update(np.ascontiguousarray(np.asarray(leaf)).tobytes())
    return {"metrics": metrics.hexdigest()[:16], "state": state.hexdigest()[:16]}


def run_way(name: str, way: str, dataset) -> dict[str, str]:
    """Run one method in one way and return its digests."""
    if way == "parallel_runs":
        specs = [make_spec(name, seed) for seed in (0, 1)]
        placement = Placement(devices=1, lanes=1, spread="runs", width=2)
        results = sweep(specs, dataset=dataset, placement=placement, progress=None).results
        return {
            f"{key}{i}": value
            for i, one in enumerate(results)
            for key, value in digest_of(one).items()
        }
    placements = {
        "one_device": Placement(devices=1, lanes=2, server_work="alone"),
        "two_devices": Placement(devices=2, lanes=1, server_work="shared"),
        "host_state": Placement(devices=2, lanes=1, client_state="host", server_work="shared"),
        "resumable_rounds": Placement(devices=2, lanes=2, server_work="alone"),
    }
    if way != "resumable_rounds":
        return digest_of(simulate(make_spec(name), dataset=dataset, placement=placements[way]))
    long_module, long_name = find_constant(LONG_FLOPS)
    chunk_module, chunk_name = find_constant(CHUNK_SECONDS)
    flops, seconds = dict(getattr(long_module, long_name)), getattr(chunk_module, chunk_name)
    getattr(long_module, long_name)["cpu"] = 0
    setattr(chunk_module, chunk_name, 0.0)
    try:
        return digest_of(simulate(make_spec(name), dataset=dataset, placement=placements[way]))
    finally:
        getattr(long_module, long_name).update(flops)
        setattr(chunk_module, chunk_name, seconds)


def main() -> None:
    """Run the chosen methods and write one JSON file of digests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--compare", type=Path, help="JSON file of another version")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), help="methods to run")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    chosen = parser.parse_args()
    dataset = dataset_from_arrays(
        *make_blobs(SIZES, 0), *make_blobs((30, 30), 1), num_classes=NUM_CLASSES
    )
    digests: dict[str, dict[str, str]] = {}
    before = json.loads(chosen.compare.read_text()) if chosen.compare else None
    differences = 0
    for name in chosen.methods:
        for way in chosen.ways:
            try:
                digest = run_way(name, way, dataset)
            except ConfigError:
                digest = {"refused": "ConfigError"}
            digests[f"{name}/{way}"] = digest
            if before is not None and before.get(f"{name}/{way}", digest) != digest:
                differences += 1
                print(f"{name}/{way}: {digest} instead of {before[f'{name}/{way}']}", flush=True)
            chosen.output.write_text(json.dumps(digests, indent=1, sort_keys=True) + "\n")
    print(f"{len(digests)} digests of fedjax_het {fedjax_het.__version__}, {differences} differ")
    sys.exit(differences > 0)


if __name__ == "__main__":
    main()

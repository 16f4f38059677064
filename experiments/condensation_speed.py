"""Speed of condensation: this package beside a plain PyTorch loop of the same loss.

    pip install -e ".[bench]" && python experiments/condensation_speed.py

FedDM's loss (mean embeddings and logits of one class, a network drawn anew in every step, a
clipped step of SGD with momentum on the images) for the pairs of client and class that
Fashion-MNIST has at alpha 0.02. Turns alternate in one run; medians; compilation apart. Then what
packing saves: the same round where all clients hold all classes, as padding to the same shape would
make it.
"""

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedjax_het import RunSpec
from fedjax_het._startup import available_cores
from fedjax_het.common.records import Count, Positive
from fedjax_het.report.programs import record_program

PEER = Path(__file__).parent / "speed_peers" / "torch_condensation.py"


@dataclass
class Arguments:
    """Settings of the rounds that are timed; the server does not train in them."""

    dataset: str = "fashion_mnist"
    width: Count = 32
    alpha: Positive = 0.02
    ipc: Count = 50
    batch_size: Count = 256
    steps: Count = 10
    """Of condensation, for every pair."""
    turns: Count = 3
    """How often each side is timed; every turn of ours is three rounds."""


def measure(a: Arguments) -> int:
    from fedjax_het.data import load_dataset
    from fedjax_het.running.benchmark import benchmark_rounds
    from fedjax_het.running.splits import split_clients

    dataset = load_dataset(a.dataset, normalisation="fedaf")
    spec = RunSpec(
        "feddm",
        a.dataset,
        alpha=a.alpha,
        width=a.width,
        batch_size=a.batch_size,
        options={"ipc": a.ipc, "steps": a.steps, "server_epochs": 0},
    ).resolved()
    partition = split_clients(spec, dataset)
    counts = partition.label_counts(dataset.train_labels, dataset.num_classes)
    pairs = int((counts >= a.ipc).sum())
    images = pairs * a.steps * (a.batch_size + a.ipc)
    print(
        f"{a.dataset}, ConvNet {a.width} with batch norm, alpha {a.alpha:g}: {pairs} pairs of "
        f"client and class, {a.steps} steps of {a.batch_size} real and {a.ipc} synthetic images; "
        f"{available_cores()} cores"
    )
    ours, theirs, compiled = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.npz"
        held = [
            partition.client(k)[dataset.train_labels[partition.client(k)] == c]
            for k, c in zip(*np.nonzero(counts >= a.ipc), strict=True)
        ]
        np.savez(
            problem,
            images=(dataset.train_images / 255 - dataset.mean) / dataset.std,
            **{f"pair{i}": positions for i, positions in enumerate(held)},
        )
        for _ in range(a.turns):
            times = benchmark_rounds(spec, 3, dataset)
            ours.append(statistics.median(times.seconds))
            compiled.append(times.compile_seconds)
            words = [problem, a.width, a.ipc, a.batch_size, a.steps, available_cores()]
            done = subprocess.run(
                [sys.executable, PEER, *map(str, words)], capture_output=True, text=True, check=True
            )
            theirs.append(json.loads(done.stdout.splitlines()[-1])["seconds"])
    padded = benchmark_rounds(
        RunSpec(**{**spec.to_dict(), "partition": "iid", "alpha": None}), 3, dataset
    )
    here, other = statistics.median(ours), statistics.median(theirs)
    all_pairs = partition.num_clients * dataset.num_classes
    full = statistics.median(padded.seconds)
    print(f"compilation {compiled[0]:.1f} s; lanes: {times.lanes}")
    print(f"fedjax_het     {here:7.2f} s a round  {images / here:9,.0f} image steps/s")
    print(f"PyTorch loop   {other:7.2f} s a round  {images / other:9,.0f} image steps/s")
    print(f"ratio          {other / here:7.2f}")
    print(
        f"all {all_pairs} pairs {full:7.2f} s a round: packing the {pairs} that exist saves a "
        f"factor {full / here:.1f} ({all_pairs / pairs:.1f} by their numbers)"
    )
    return 0


main = record_program(Arguments, measure)

if __name__ == "__main__":
    raise SystemExit(main())

"""Compare the speed of condensation with a PyTorch loop of the same loss.

    pip install -e ".[bench]" && python experiments/condensation_speed.py

FedDM's loss compares mean embeddings and logits of one class, with a network drawn anew in every
step and a clipped SGD step with momentum on the images. The pairs of client and class are from
Fashion-MNIST at alpha 0.02. Programs alternate; results are medians; compile times are separate.
The last line is the gain of packing: the same round if all clients held all classes, as padding to
one shape would make it.
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
from fedjax_het._startup import count_available_cores
from fedjax_het.papers.programs import make_config_program
from fedjax_het.utils.config import PositiveFloat, PositiveInt

VARIANTS = {
    "PyTorch loop": (),
    "PyTorch loop, compiled": ("compile",),
    "torch.func.vmap": ("func",),
    "torch.func.vmap, compiled": ("func", "compile"),
}
PEER = Path(__file__).parent / "peers" / "torch_condensation.py"


@dataclass
class Arguments:
    """Compare the speed of condensation with a PyTorch loop; the server does not train."""

    dataset: str = "fashion_mnist"
    width: PositiveInt = 32
    alpha: PositiveFloat = 0.02
    ipc: PositiveInt = 50
    batch_size: PositiveInt = 256
    steps: PositiveInt = 10
    """Number of condensation steps of each pair of client and class."""
    turns: PositiveInt = 3
    """Number of turns of each program; a turn of this package has three rounds."""
    python: str = sys.executable
    """Interpreter with PyTorch (default: the running one)."""


def run_benchmark(arguments: Arguments) -> int:
    """Time both programs in turns and print the results; return the exit status, 0."""
    from fedjax_het.data import load_dataset
    from fedjax_het.runtime.benchmark import benchmark_rounds
    from fedjax_het.runtime.data_assignment import build_partition

    dataset = load_dataset(arguments.dataset, normalization="fedaf")
    spec = RunSpec(
        "feddm",
        arguments.dataset,
        alpha=arguments.alpha,
        width=arguments.width,
        batch_size=arguments.batch_size,
        options={"ipc": arguments.ipc, "steps": arguments.steps, "server_epochs": 0},
    ).resolved()
    partition = build_partition(spec, dataset)
    counts = partition.label_counts(dataset.train_labels, dataset.num_classes)
    pairs = int((counts >= arguments.ipc).sum())
    images = pairs * arguments.steps * (arguments.batch_size + arguments.ipc)
    print(
        f"{arguments.dataset}, ConvNet {arguments.width} with batch norm, alpha {arguments.alpha:g}: {pairs} pairs of "
        f"client and class, {arguments.steps} steps of {arguments.batch_size} real and {arguments.ipc} synthetic images; "
        f"{count_available_cores()} cores"
    )
    package_seconds, compile_seconds = [], []
    peer_seconds: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with tempfile.TemporaryDirectory() as folder:
        problem = Path(folder) / "problem.npz"
        pair_indices = [
            partition.client_indices(k)[dataset.train_labels[partition.client_indices(k)] == c]
            for k, c in zip(*np.nonzero(counts >= arguments.ipc), strict=True)
        ]
        np.savez(
            problem,
            images=(dataset.train_inputs / 255 - dataset.mean) / dataset.std,
            **{f"pair{i}": positions for i, positions in enumerate(pair_indices)},
        )
        for _ in range(arguments.turns):
            times = benchmark_rounds(spec, 3, dataset)
            package_seconds.append(statistics.median(times.seconds))
            compile_seconds.append(times.compile_seconds)
            numbers = [arguments.width, arguments.ipc, arguments.batch_size, arguments.steps]
            command = [arguments.python, PEER, problem, *numbers, count_available_cores()]
            for variant, words in VARIANTS.items():
                process = subprocess.run(
                    [str(word) for word in (*command, *words)],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                peer_seconds[variant].append(json.loads(process.stdout.splitlines()[-1])["seconds"])
    iid = RunSpec(**{**spec.to_dict(), "partition": "iid", "alpha": None})
    padded = benchmark_rounds(iid, 3, dataset)
    package_median, padded_median = map(statistics.median, (package_seconds, padded.seconds))
    medians = {variant: statistics.median(seconds) for variant, seconds in peer_seconds.items()}
    all_pairs = partition.num_clients * dataset.num_classes
    print(f"compilation {compile_seconds[0]:.1f} s; lanes: {times.lanes}")
    for name, median in {"fedjax_het": package_median, **medians}.items():
        print(
            f"{name:28} {median:7.2f} s a round  {images / median:9,.0f} image steps/s  "
            f"x {median / package_median:.2f}"
        )
    print(
        f"all {all_pairs} pairs {padded_median:7.2f} s a round: packing the {pairs} that exist saves a "
        f"factor {padded_median / package_median:.1f} ({all_pairs / pairs:.1f} by their numbers)"
    )
    return 0


main = make_config_program(Arguments, run_benchmark)

if __name__ == "__main__":
    raise SystemExit(main())

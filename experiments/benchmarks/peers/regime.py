"""What every program here reads and reports: one regime in, one line of JSON out. NumPy alone.

The programs of this folder run in environments of their own, most of which lack this package. So
they are scripts, which import each other as Python finds them beside the script that runs, and no
part of the package `experiments`.
"""

import json
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass
class Regime:
    """Equal work for all: these clients, in these rounds, with this network and optimiser."""

    network: str  # mlp, convnet or cnn
    width: int | None
    batch_size: int
    local_lr: float
    threads: int
    images: np.ndarray  # [N, 28, 28, 1] float32, normalised
    labels: np.ndarray  # [N] int64
    clients: list[np.ndarray]  # which images each client holds
    cohorts: list[np.ndarray]  # which clients take part in each round

    def samples(self, cohort: np.ndarray) -> int:
        """Client samples of a round: one pass."""
        return int(sum(len(self.clients[client]) for client in cohort))


def read_regime() -> Regime:
    """The regime that the first argument, a JSON object, describes."""
    settings = json.loads(sys.argv[1])
    images, labels = read_images(settings["images"])
    with np.load(settings["clients"]) as file:
        clients = np.split(file["indices"], np.cumsum(file["sizes"])[:-1])
        cohorts = list(file["cohorts"])
    names = ("network", "width", "batch_size", "local_lr", "threads")
    options = {name: settings[name] for name in names}
    return Regime(images=images, labels=labels, clients=clients, cohorts=cohorts, **options)


def read_images(path: str) -> tuple[np.ndarray, np.ndarray]:
    """All images [N, 28, 28, 1], float32 and normalised, and labels [N]."""
    with np.load(path) as file:
        images = (file["images"] / np.float32(255) - file["mean"]) / file["std"]
        return images.astype(np.float32), file["labels"].astype(np.int64)


def time_repetitions(
    run_round: Callable[[], None], rounds: int, wait: Callable[[], None]
) -> list[float]:
    """Seconds of each of so many rounds that are all alike, after one in which libraries start."""
    seconds = []
    for _ in range(1 + rounds):
        wait()
        start = time.perf_counter()
        run_round()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def time_rounds(
    regime: Regime, run_round: Callable[[np.ndarray], int], wait: Callable[[], None] = lambda: None
) -> tuple[list[float], list[int]]:
    """Seconds and samples of every round; `one_round(cohort)` returns the samples it processed.

    Before, the two smallest clients that hold anything run, untimed: libraries start, programs
    compile.
    """
    sizes = np.array([len(positions) for positions in regime.clients])
    by_size = np.argsort(sizes, kind="stable")
    run_round(by_size[sizes[by_size] > 0][:2])
    seconds, samples = [], []
    for cohort in regime.cohorts:
        wait()
        start = time.perf_counter()
        samples.append(run_round(cohort))
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds, samples


def peak_memory() -> int:
    """Bytes: this process's largest resident set so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def print_record(
    seconds: list[float], samples: list[int], version: str, **extra_fields: Any
) -> None:
    """Print the result, as the last line."""
    record = {"peak_memory": peak_memory(), **extra_fields}
    print(json.dumps({"seconds": seconds, "samples": samples, "version": version, **record}))

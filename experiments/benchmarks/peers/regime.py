"""Input and output of the programs in this folder: a regime in, a line of JSON out, by NumPy.

The programs run in environments of their own, most of which lack this package. They are therefore
scripts that import each other from the folder of the running script, not modules of the package
`experiments`.
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
    """Work that is equal for all programs.

    Attributes:
      network: mlp, convnet, cnn, lstm or gru.
      width: channels of a convnet, or width of a recurrent layer.
      layers: number of recurrent layers.
      batch_size: samples of a local step.
      local_lr: learning rate of the clients.
      threads: number of CPU threads.
      compile: whether a PyTorch program compiles its steps with `torch.compile`.
      images: normalized float32 `[N, 28, 28, 1]`, or tokens, int64 `[N, T]`.
      labels: int64 `[N]`, or the next tokens, `[N, T]`.
      clients: positions of the examples of each client.
      cohorts: clients of each round.
    """

    network: str
    width: int | None
    layers: int | None
    batch_size: int
    local_lr: float
    threads: int
    compile: bool
    images: np.ndarray
    labels: np.ndarray
    clients: list[np.ndarray]
    cohorts: list[np.ndarray]

    def samples(self, cohort: np.ndarray) -> int:
        """Return the number of client samples in one epoch of a cohort."""
        return int(sum(len(self.clients[client]) for client in cohort))


def read_regime() -> Regime:
    """Read the regime that the first argument of the program describes as JSON."""
    settings = json.loads(sys.argv[1])
    images, labels = read_images(settings["images"])
    with np.load(settings["clients"]) as file:
        clients = np.split(file["indices"], np.cumsum(file["sizes"])[:-1])
        cohorts = list(file["cohorts"])
    names = ("network", "width", "layers", "batch_size", "local_lr", "threads", "compile")
    options = {name: settings[name] for name in names}
    return Regime(images=images, labels=labels, clients=clients, cohorts=cohorts, **options)


def read_images(path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return all images, normalized float32 `[N, 28, 28, 1]`, or tokens, and labels."""
    with np.load(path) as file:
        if "mean" not in file:
            return file["images"].astype(np.int64), file["labels"].astype(np.int64)
        images = (file["images"] / np.float32(255) - file["mean"]) / file["std"]
        return images.astype(np.float32), file["labels"].astype(np.int64)


def time_repetitions(
    run_round: Callable[[], None], rounds: int, wait: Callable[[], None]
) -> list[float]:
    """Time equal rounds, after an untimed one in which libraries start.

    Args:
      run_round: function that makes a round.
      rounds: number of timed rounds.
      wait: function that waits for the device.

    Returns:
      Seconds of each round.
    """
    seconds = []
    for _ in range(1 + rounds):
        wait()
        start = time.perf_counter()
        run_round()
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def time_rounds(
    regime: Regime,
    run_round: Callable[[np.ndarray], int],
    wait: Callable[[], None] = lambda: None,
    warm_up: Callable[[], None] | None = None,
) -> tuple[list[float], list[int]]:
    """Time the rounds of all cohorts, after untimed work in which libraries start and compile.

    Args:
      regime: the regime.
      run_round: function of a cohort that returns the number of processed samples.
      wait: function that waits for the device.
      warm_up: the untimed work; None: a round of the two smallest clients with examples.

    Returns:
      Seconds and samples of every round.
    """
    if warm_up is None:
        sizes = np.array([len(positions) for positions in regime.clients])
        by_size = np.argsort(sizes, kind="stable")
        run_round(by_size[sizes[by_size] > 0][:2])
    else:
        warm_up()
    seconds, samples = [], []
    for cohort in regime.cohorts:
        wait()
        start = time.perf_counter()
        samples.append(run_round(cohort))
        wait()
        seconds.append(time.perf_counter() - start)
    return seconds, samples


def peak_memory() -> int:
    """Return the largest resident set of this process so far in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def print_record(
    seconds: list[float], samples: list[int], version: str, **extra_fields: Any
) -> None:
    """Print the results as one line of JSON, the last line."""
    record = {"peak_memory": peak_memory(), **extra_fields}
    print(json.dumps({"seconds": seconds, "samples": samples, "version": version, **record}))

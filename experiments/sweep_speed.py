"""Wall-clock of a sweep: one `fedjax-het sweep` beside one process per run.

    python experiments/sweep_speed.py

3 alphas x 8 seeds x 2 methods. Every process is started afresh and timed from its start to its end.
Programs are compiled before (the persistent cache is warm), which favours the separate processes:
each would compile its own. They are run one after the other, each with all cores, and again as many
at a time as there are cores, each on one.
"""

import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fedjax_het._startup import available_cores
from fedjax_het.common.records import Count, Positive
from fedjax_het.report.programs import record_program


@dataclass
class Arguments:
    """One sweep beside as many processes as it has runs."""

    dataset: str = "digits"
    model: str = "mlp"
    algorithms: tuple[str, ...] = ("fedavg", "scaffold")
    alphas: tuple[Positive, ...] = (0.01, 0.1, 1.0)
    seeds: Count = 8
    rounds: Count = 50
    num_clients: Count = 80


def measure(arguments: Arguments) -> int:
    a, cores = arguments, available_cores()
    shared = ["--dataset", a.dataset, "--model", a.model, "--rounds", a.rounds]
    shared += ["--num-clients", a.num_clients]
    runs = list(itertools.product(a.algorithms, a.alphas, range(a.seeds)))
    lists = ["--algorithm", *a.algorithms, "--alpha", *a.alphas, "--seeds", *range(a.seeds)]

    def alone(run: tuple, environment: dict[str, str]) -> None:
        method, alpha, seed = run
        words = ["--algorithm", method, "--alpha", alpha, "--seed", seed, "--quiet"]
        start("run", *shared, *words, environment=environment)

    def sweep() -> None:
        with tempfile.TemporaryDirectory() as folder:
            start("sweep", *shared, *lists, "--output-dir", folder)

    def one_after_the_other() -> None:
        for run in runs:
            alone(run, {})

    def one_on_each_core() -> None:
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(lambda run: alone(run, {"JAX_NUM_CPU_DEVICES": "1"}), runs))

    for method in a.algorithms:  # fill the cache
        for environment in ({}, {"JAX_NUM_CPU_DEVICES": "1"}):
            alone((method, a.alphas[0], 0), environment)
    sweep()
    print(f"{len(runs)} runs of {a.rounds} rounds: {a.dataset}, {a.model}; {cores} cores")
    ways = {
        "one sweep": sweep,
        "separate processes, one after the other": one_after_the_other,
        f"separate processes, {cores} at a time": one_on_each_core,
    }
    taken = dict(zip(ways, map(seconds, ways.values()), strict=True))
    for name, value in taken.items():
        print(f"{name:42} {value:7.1f} s  {value / taken['one sweep']:5.1f}")
    return 0


def seconds(work: Callable[[], None]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def start(*words: object, environment: dict[str, str] | None = None) -> None:
    subprocess.run(
        [sys.executable, "-m", "fedjax_het.cli", *map(str, words)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        check=True,
    )


main = record_program(Arguments, measure)

if __name__ == "__main__":
    raise SystemExit(main())

"""Compare the wall-clock time of `fedjax-het sweep` with one process per run.

    python experiments/sweep_speed.py

The sweep has 3 alphas x 8 seeds x 2 methods. Every process is started afresh and timed from its
start to its end. Programs are compiled before (the persistent cache is warm), which favors the
separate processes. They run one after the other, each with all cores, and again in parallel, one on
each core.
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
from typing import Any

from fedjax_het._startup import count_available_cores
from fedjax_het.papers.programs import make_config_program
from fedjax_het.utils.config import PositiveFloat, PositiveInt


@dataclass
class Arguments:
    """Compare one sweep with separate processes for its runs."""

    dataset: str = "digits"
    model: str = "mlp"
    algorithms: tuple[str, ...] = ("fedavg", "scaffold")
    alphas: tuple[PositiveFloat, ...] = (0.01, 0.1, 1.0)
    seeds: PositiveInt = 8
    rounds: PositiveInt = 50
    num_clients: PositiveInt = 80


def run_benchmark(arguments: Arguments) -> int:
    """Time the sweep and the separate processes; return the exit status, 0."""
    settings, cores = arguments, count_available_cores()
    common_arguments: list[Any] = ["--dataset", settings.dataset, "--model", settings.model]
    common_arguments += ["--rounds", settings.rounds, "--num-clients", settings.num_clients]
    common_arguments += ["--protocol", "dynafed"]
    runs = list(itertools.product(settings.algorithms, settings.alphas, range(settings.seeds)))
    sweep_arguments: list[Any] = ["--algorithm", *settings.algorithms, "--alpha", *settings.alphas]
    sweep_arguments += ["--seeds", *range(settings.seeds)]

    def run_one(run: tuple, environment: dict[str, str]) -> None:
        method, alpha, seed = run
        cli_arguments = ["--algorithm", method, "--alpha", alpha, "--seed", seed, "--quiet"]
        run_cli("run", *common_arguments, *cli_arguments, environment=environment)

    def run_sweep() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run_cli("sweep", *common_arguments, *sweep_arguments, "--output-dir", folder)

    def run_sequentially() -> None:
        for run in runs:
            run_one(run, {})

    def run_in_parallel() -> None:
        with ThreadPoolExecutor(cores) as pool:
            list(pool.map(lambda run: run_one(run, {"JAX_NUM_CPU_DEVICES": "1"}), runs))

    for method in settings.algorithms:  # fill the cache
        for environment in ({}, {"JAX_NUM_CPU_DEVICES": "1"}):
            run_one((method, settings.alphas[0], 0), environment)
    run_sweep()
    problem = f"{settings.dataset}, {settings.model}; {cores} cores"
    print(f"{len(runs)} runs of {settings.rounds} rounds: {problem}")
    strategies = {
        "one sweep": run_sweep,
        "separate processes, one after the other": run_sequentially,
        f"separate processes, {cores} at a time": run_in_parallel,
    }
    seconds = {name: measure_seconds(strategy) for name, strategy in strategies.items()}
    for name, value in seconds.items():
        print(f"{name:42} {value:7.1f} s  {value / seconds['one sweep']:5.1f}")
    return 0


def measure_seconds(function: Callable[[], None]) -> float:
    """Return the duration of a call in seconds."""
    start_time = time.perf_counter()
    function()
    return time.perf_counter() - start_time


def run_cli(*cli_arguments: object, environment: dict[str, str] | None = None) -> None:
    """Run a command of the package without output."""
    subprocess.run(
        [sys.executable, "-m", "fedjax_het", *map(str, cli_arguments)],
        env={**os.environ, **(environment or {})},
        stdout=subprocess.DEVNULL,
        check=True,
    )


main = make_config_program(Arguments, run_benchmark)

if __name__ == "__main__":
    raise SystemExit(main())

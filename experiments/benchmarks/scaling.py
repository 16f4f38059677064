"""Measure the cost of a round and the memory with 100, 1,000 and 10,000 clients and equal cohorts.

    python experiments/scale.py
    python experiments/scale.py --methods scaffold --client-state device --clients 100 1000

Images are random with CIFAR-10's shape. Every client holds 50 of 50,000 images, so that the data
have the same size for any number of clients. Every case is a process of its own, since peak memory
never falls, and makes a whole run; cases alternate. Times are of consecutive chunks of rounds,
without the first chunk and chunks with an evaluation. The tables show medians and the fastest
chunks, which other programs disturbed least.
"""

import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedjax_het import RunSpec
from fedjax_het._startup import count_available_cores
from fedjax_het.papers.programs import make_config_program
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, require, require_name

IMAGE_SHAPE, NUM_TRAIN, NUM_TEST, EXAMPLES_PER_CLIENT = (32, 32, 3), 50_000, 500, 50


@dataclass
class Arguments:
    """Measure rounds per second and peak memory by number of clients."""

    methods: tuple[str, ...] = ("fedavg", "scaffold")
    model: str = "fsl_cnn"
    clients: tuple[PositiveInt, ...] = (100, 1000, 10_000)
    sampled: PositiveInt = 10
    """Number of clients that train in each round."""
    rounds: PositiveInt = 60
    turns: PositiveInt = 3
    """Number of runs of each case."""
    client_state: Literal["host", "device", "auto"] = "host"
    """Memory of the clients' states: host, device or auto."""
    alone: bool = False
    """Run one case in this process, once; print it as JSON."""


def run_benchmark(arguments: Arguments) -> int:
    """Run one case in this process, or compare all cases; return the exit status, 0."""
    return run_case(arguments) if arguments.alone else compare_cases(arguments)


def compare_cases(arguments: Arguments) -> int:
    """Run all cases in processes of their own and print the results.

    Args:
      arguments: options of the benchmark.

    Returns:
      The exit status, 0.

    Raises:
      ConfigError: if an option is invalid or a case fails.
    """
    from fedjax_het.algorithms import METHODS

    for method in arguments.methods:
        require_name("methods", method, METHODS)
    is_valid = min(arguments.clients) >= arguments.sampled
    require(is_valid, "clients", arguments.clients, f"at least {arguments.sampled} each")
    require(arguments.rounds >= 20, "rounds", arguments.rounds, "a whole number >= 20")
    print(
        f"{arguments.model}, {arguments.sampled} clients of {EXAMPLES_PER_CLIENT} images a round, batch 10, one epoch; "
        f"{count_available_cores()} cores, load {os.getloadavg()[0]:.1f} before"
    )
    for method in arguments.methods:
        cases: dict[int, list[dict]] = {num_clients: [] for num_clients in arguments.clients}
        for _ in range(arguments.turns):
            for num_clients in arguments.clients:
                cases[num_clients].append(run_in_subprocess(arguments, method, num_clients))
        print_cases(method, cases)
    return 0


def run_in_subprocess(arguments: Arguments, method: str, num_clients: int) -> dict:
    """Run one case in a process of its own and return its record."""
    settings = {
        "methods": method,
        "model": arguments.model,
        "clients": num_clients,
        "sampled": arguments.sampled,
        "rounds": arguments.rounds,
        "client-state": arguments.client_state,
    }
    cli_arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, __file__, *cli_arguments, "--alone"]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise ConfigError(f"{method} with {num_clients} clients failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def run_case(arguments: Arguments) -> int:
    """Make one run and print the times of its chunks and its memory as JSON; return 0."""
    from fedjax_het import Placement, dataset_from_arrays
    from fedjax_het.data import partition_from_clients
    from fedjax_het.runtime.build import prepare_group
    from fedjax_het.runtime.checkpointing import CheckpointWriter
    from fedjax_het.runtime.group_init import init_group
    from fedjax_het.runtime.runner import advance_runs, start_runs

    (method,), (num_clients,) = arguments.methods, arguments.clients
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (NUM_TRAIN + NUM_TEST, *IMAGE_SHAPE), np.uint8)
    labels = random.integers(0, 10, NUM_TRAIN + NUM_TEST, np.int32)
    split = pixels[:NUM_TRAIN], labels[:NUM_TRAIN], pixels[NUM_TRAIN:], labels[NUM_TRAIN:]
    dataset = dataset_from_arrays(*split, num_classes=10, mean=(0.5,) * 3, std=(0.29,) * 3)
    clients = [random.choice(NUM_TRAIN, EXAMPLES_PER_CLIENT) for _ in range(num_clients)]
    partition = partition_from_clients(clients)
    spec = RunSpec(
        method,
        "user",
        protocol="dynafed",
        model=arguments.model,
        partition="iid",
        num_clients=num_clients,
        participation=arguments.sampled / num_clients,
        local_optimizer="sgd",
        local_epochs=1,
        batch_size=10,
        rounds=arguments.rounds,
        eval_every=arguments.rounds,
    )
    start_time = time.perf_counter()
    placement = Placement(lanes=1, client_state=arguments.client_state)
    group = prepare_group([spec], UserObjects(dataset, partition=partition), placement=placement)
    chunk_end_times = []

    def record_time(progress):
        chunk_end_times.append((progress.done, time.perf_counter()))

    runs = init_group(group, group.prepared_runs, progress=record_time)
    start_runs(runs, CheckpointWriter())
    ready_time = time.perf_counter()
    list(advance_runs(runs, CheckpointWriter()))
    chunk_durations = [
        (next_end[0] - previous_end[0], next_end[1] - previous_end[1])
        for previous_end, next_end in itertools.pairwise(chunk_end_times)
        if next_end[0] <= arguments.rounds - 5
    ]
    bytes_each = group.state_bytes
    record = {
        "seconds": [seconds / rounds for rounds, seconds in chunk_durations for _ in range(rounds)],
        "start": ready_time - start_time,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "states": bytes_each * num_clients,
        "where": group.client_state if bytes_each else "none",
    }
    print(json.dumps(record))
    return 0


def print_cases(method: str, cases: dict[int, list[dict]]) -> None:
    """Print the results of a method, and the spread of the rates over the numbers of clients."""
    first = next(iter(cases.values()))[0]
    print(f"{method}, client states: {first['where']}")
    rates, fastest_rates = [], []
    for num_clients, runs in cases.items():
        medians = [statistics.median(run["seconds"]) for run in runs]
        median_seconds = statistics.median(medians)
        rates.append(1 / median_seconds)
        fastest_rates.append(1 / min(min(run["seconds"]) for run in runs))
        peak = statistics.median(run["peak"] for run in runs)
        print(
            f"  {num_clients:6,} clients  {1 / median_seconds:7.2f} rounds/s ({rates[-1] / rates[0]:.2f} of the "
            f"first), fastest {fastest_rates[-1]:6.2f} ({fastest_rates[-1] / fastest_rates[0]:.2f})  "
            f"peak {peak / 1e9:5.2f} GB, all states {runs[0]['states'] / 1e9:5.2f} GB  "
            f"start {statistics.median(run['start'] for run in runs):.1f} s"
        )
    spans = [max(case_rates) / min(case_rates) - 1 for case_rates in (rates, fastest_rates)]
    print(f"  flat within {spans[0]:.0%}, of the fastest rounds within {spans[1]:.0%}")


main = make_config_program(Arguments, run_benchmark)

if __name__ == "__main__":
    raise SystemExit(main())

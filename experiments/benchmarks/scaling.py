"""Measure rounds per second, host time and memory with 1,000, 10,000 and 100,000 clients.

    python experiments/scale.py
    python experiments/scale.py --methods scaffold --client-state host --clients 1000 10000

Every client holds 20 images of its own, random ones of MNIST's shape, which a memory map reads from
a file. All cases have equal cohorts. Every case is a process of its own, since peak memory never
falls, and makes a whole run; cases alternate. Times are of consecutive chunks of rounds, without
the first chunk and chunks with an evaluation. The tables show medians and the fastest chunks, which
other programs disturbed least. Host time is processor time that makes the schedules, reads the
examples and moves the clients' states, in any thread.
"""

import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedjax_het import RunSpec
from fedjax_het._startup import count_available_cores
from fedjax_het.papers.programs import make_config_program
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import ConfigError, require, require_name
from fedjax_het.utils.memory_maps import release_pages

IMAGE_SHAPE, NUM_TEST = (28, 28, 1), 500
_ROWS_AT_ONCE = 50_000


@dataclass
class Arguments:
    """Measure rounds per second, host time and peak memory by number of clients."""

    methods: tuple[str, ...] = ("fedavg", "scaffold")
    model: str = "cnn"
    clients: tuple[PositiveInt, ...] = (1000, 10_000, 100_000)
    examples: PositiveInt = 20
    """Number of training examples of each client."""
    sampled: PositiveInt = 10
    """Number of clients that train in each round."""
    rounds: PositiveInt = 60
    turns: PositiveInt = 3
    """Number of runs of each case."""
    client_state: Literal["host", "disk", "device", "auto"] = "host"
    """Place of the clients' states: host, disk, device or auto."""
    folder: Path = Path(tempfile.gettempdir())
    """Folder of the temporary file of images, 0.8 kB for each."""
    alone: Path | None = None
    """File of images of the one case that runs in this process, once; print it as JSON."""


def run_benchmark(arguments: Arguments) -> int:
    """Run one case in this process, or compare all cases; return the exit status, 0."""
    return compare_cases(arguments) if arguments.alone is None else run_case(arguments)


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
        f"{arguments.model}, {arguments.sampled} clients of {arguments.examples} images a round, batch 10, one epoch; "
        f"{count_available_cores()} cores, load {os.getloadavg()[0]:.1f} before"
    )
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "images.npy"
        write_images(path, max(arguments.clients) * arguments.examples)
        for method in arguments.methods:
            cases: dict[int, list[dict]] = {num_clients: [] for num_clients in arguments.clients}
            for _ in range(arguments.turns):
                for num_clients in arguments.clients:
                    case = run_in_subprocess(arguments, method, num_clients, path)
                    cases[num_clients].append(case)
            print_cases(method, cases)
    return 0


def write_images(path: Path, count: int) -> None:
    """Write random images to a file, a part at a time."""
    images = np.lib.format.open_memmap(path, "w+", np.uint8, (count, *IMAGE_SHAPE))
    rng = np.random.default_rng(0)
    for first in range(0, count, _ROWS_AT_ONCE):
        part = images[first : first + _ROWS_AT_ONCE]
        part[...] = rng.integers(0, 256, part.shape, np.uint8)
        release_pages(images)  # the processes of the cases would begin with their memory


def run_in_subprocess(arguments: Arguments, method: str, num_clients: int, path: Path) -> dict:
    """Run one case in a process of its own and return its record."""
    settings = {
        "methods": method,
        "model": arguments.model,
        "clients": num_clients,
        "examples": arguments.examples,
        "sampled": arguments.sampled,
        "rounds": arguments.rounds,
        "client-state": arguments.client_state,
        "alone": path,
    }
    cli_arguments = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, __file__, *cli_arguments]
    process = subprocess.run(command, capture_output=True, text=True)
    if process.returncode:
        raise ConfigError(f"{method} with {num_clients} clients failed:\n{process.stderr[-2000:]}")
    return json.loads(process.stdout.splitlines()[-1])


def run_case(arguments: Arguments) -> int:
    """Make one run and print the times of its chunks and its memory as JSON; return 0."""
    from fedjax_het import Placement, dataset_from_arrays
    from fedjax_het.runtime.build import prepare_group
    from fedjax_het.runtime.checkpointing import CheckpointWriter
    from fedjax_het.runtime.group_init import init_group
    from fedjax_het.runtime.runner import advance_runs, start_runs

    (method,), (num_clients,) = arguments.methods, arguments.clients
    num_examples, random = num_clients * arguments.examples, np.random.default_rng(0)
    assert arguments.alone is not None
    images = np.load(arguments.alone, mmap_mode="r")[:num_examples]
    labels = random.integers(0, 10, num_examples + NUM_TEST, np.int32)
    test_images = random.integers(0, 256, (NUM_TEST, *IMAGE_SHAPE), np.uint8)
    start_time = time.perf_counter()
    dataset = dataset_from_arrays(
        *(images, labels[:num_examples], test_images, labels[num_examples:]), num_classes=10
    )
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
    placement = Placement(lanes=1, client_state=arguments.client_state)
    group = prepare_group([spec], UserObjects(dataset), placement=placement)
    assert group.client_data == "host"
    chunk_end_times = []

    def record_time(progress):
        chunk_end_times.append((progress.done, time.perf_counter()))

    runs = init_group(group, group.prepared_runs, progress=record_time)
    start_runs(runs, CheckpointWriter())
    ready_time = time.perf_counter()
    host_seconds: list[float] = []
    for name in ("build_chunk_inputs", "load_client_states", "store_client_states"):
        setattr(runs, name, add_cpu_time(getattr(runs, name), host_seconds))
    list(advance_runs(runs, CheckpointWriter()))
    chunk_durations = [
        (next_end[0] - previous_end[0], next_end[1] - previous_end[1])
        for previous_end, next_end in itertools.pairwise(chunk_end_times)
        if next_end[0] <= arguments.rounds - 5
    ]
    bytes_each = group.state_bytes
    record = {
        "seconds": [seconds / rounds for rounds, seconds in chunk_durations for _ in range(rounds)],
        "host": sum(host_seconds) / arguments.rounds,
        "start": ready_time - start_time,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "states": bytes_each * num_clients,
        "where": group.client_state if bytes_each else "none",
    }
    print(json.dumps(record))
    return 0


def add_cpu_time(function: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that appends the processor time of its thread to a list."""

    def timed(*args: Any) -> Any:
        start = time.thread_time()
        result = function(*args)
        seconds.append(time.thread_time() - start)
        return result

    return timed


def print_cases(method: str, cases: dict[int, list[dict]]) -> None:
    """Print the results of a method, and the spread of the rates over the numbers of clients."""
    first = next(iter(cases.values()))[0]
    print(f"{method}, client states: {first['where']}")
    rates, fastest_rates = [], []
    for num_clients, runs in cases.items():
        median = {
            name: statistics.median(run[name] for run in runs) for name in ("host", "peak", "start")
        }
        median_seconds = statistics.median(statistics.median(run["seconds"]) for run in runs)
        rates.append(1 / median_seconds)
        fastest_rates.append(1 / min(min(run["seconds"]) for run in runs))
        print(
            f"  {num_clients:7,} clients  {rates[-1]:6.2f} rounds/s ({rates[-1] / rates[0]:.2f} of the "
            f"first), fastest {fastest_rates[-1]:6.2f} ({fastest_rates[-1] / fastest_rates[0]:.2f})  "
            f"host {1000 * median['host']:4.1f} ms a round  peak {median['peak'] / 1e9:4.2f} GB, "
            f"all states {runs[0]['states'] / 1e9:6.2f} GB  start {median['start']:.1f} s"
        )
    spans = [max(case_rates) / min(case_rates) - 1 for case_rates in (rates, fastest_rates)]
    print(f"  flat within {spans[0]:.0%}, of the fastest rounds within {spans[1]:.0%}")


main = make_config_program(Arguments, run_benchmark)

if __name__ == "__main__":
    raise SystemExit(main())

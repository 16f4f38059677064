"""Cost of a round, and memory, with 100, 1,000 and 10,000 clients of which as many take part.

    python experiments/scale.py
    python experiments/scale.py --methods scaffold --client-state device --clients 100 1000

Random images of CIFAR-10's shape; every client holds 50 of them, drawn from 50,000, so that the
data are the same size for any number of clients. Every case is a process of its own, since peak
memory never falls, and makes a whole run; cases alternate. Of a run, what chunks of rounds took
one after the other, the first and those with an evaluation left out: medians, and of the fastest
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
from fedjax_het._startup import available_cores
from fedjax_het.common.errors import ConfigError, require, require_name
from fedjax_het.common.records import Count
from fedjax_het.report.programs import record_program

SHAPE, TRAIN, TEST, EACH = (32, 32, 3), 50_000, 500, 50


@dataclass
class Arguments:
    """Rounds per second and peak memory against the number of clients."""

    methods: tuple[str, ...] = ("fedavg", "scaffold")
    model: str = "fsl_cnn"
    clients: tuple[Count, ...] = (100, 1000, 10_000)
    sampled: Count = 10
    """Clients of a round."""
    rounds: Count = 60
    turns: Count = 3
    """How often each case is run."""
    client_state: Literal["host", "device", "auto"] = "host"
    """Where clients' states are: host, device or auto."""
    alone: bool = False
    """Run one case in this process, once; print it as JSON."""


def measure(a: Arguments) -> int:
    return run_alone(a) if a.alone else compare(a)


def compare(a: Arguments) -> int:
    from fedjax_het.algorithms import METHODS

    for method in a.methods:
        require_name("methods", method, METHODS)
    require(min(a.clients) >= a.sampled, "clients", a.clients, f"at least {a.sampled} each")
    require(a.rounds >= 20, "rounds", a.rounds, "a whole number >= 20")
    print(
        f"{a.model}, {a.sampled} clients of {EACH} images a round, batch 10, one epoch; "
        f"{available_cores()} cores, load {os.getloadavg()[0]:.1f} before"
    )
    for method in a.methods:
        cases: dict[int, list[dict]] = {number: [] for number in a.clients}
        for _ in range(a.turns):
            for number in a.clients:
                cases[number].append(in_process(a, method, number))
        show(method, cases)
    return 0


def in_process(a: Arguments, method: str, clients: int) -> dict:
    """One case in a process of its own."""
    settings = {
        "methods": method,
        "model": a.model,
        "clients": clients,
        "sampled": a.sampled,
        "rounds": a.rounds,
        "client-state": a.client_state,
    }
    words = [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, __file__, *words, "--alone"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"{method} with {clients} clients failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def run_alone(a: Arguments) -> int:
    """One run, with the time of its chunks."""
    from fedjax_het import Placement, dataset_from_arrays
    from fedjax_het.data import partition_from_clients
    from fedjax_het.running.advance import finish, start
    from fedjax_het.running.checkpoints import Checkpoints
    from fedjax_het.running.prepare import prepare
    from fedjax_het.running.programs import client_state_bytes
    from fedjax_het.running.runs import gathered

    (method,), (clients,) = a.methods, a.clients
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (TRAIN + TEST, *SHAPE), np.uint8)
    labels = random.integers(0, 10, TRAIN + TEST, np.int32)
    split = pixels[:TRAIN], labels[:TRAIN], pixels[TRAIN:], labels[TRAIN:]
    dataset = dataset_from_arrays(*split, num_classes=10, mean=(0.5,) * 3, std=(0.29,) * 3)
    partition = partition_from_clients([random.choice(TRAIN, EACH) for _ in range(clients)])
    spec = RunSpec(
        method,
        "user",
        model=a.model,
        partition="iid",
        num_clients=clients,
        participation=a.sampled / clients,
        local_optimizer="sgd",
        local_epochs=1,
        batch_size=10,
        rounds=a.rounds,
        eval_every=a.rounds,
    )
    began = time.perf_counter()
    placement = Placement(lanes=1, client_state=a.client_state)
    group = prepare([spec], dataset=dataset, own_partition=partition, placement=placement)
    ends = []
    runs = gathered(
        group,
        group.federations,
        progress=lambda p: ends.append((p.done, time.perf_counter())),
    )
    start(runs, Checkpoints())
    started = time.perf_counter()
    finish(runs, Checkpoints())
    pairs = [
        (later[0] - earlier[0], later[1] - earlier[1])
        for earlier, later in itertools.pairwise(ends)
        if later[0] <= a.rounds - 5
    ]
    bytes_each = client_state_bytes(group.program, group.federations[0].spec)
    record = {
        "seconds": [took / rounds for rounds, took in pairs for _ in range(rounds)],
        "start": started - began,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "states": bytes_each * clients,
        "where": group.client_state if bytes_each else "none",
    }
    print(json.dumps(record))
    return 0


def show(method: str, cases: dict[int, list[dict]]) -> None:
    """A method's rows, and how far from flat they are."""
    first = next(iter(cases.values()))[0]
    print(f"{method}, client states: {first['where']}")
    rates, fastest = [], []
    for number, runs in cases.items():
        medians = [statistics.median(run["seconds"]) for run in runs]
        middle = statistics.median(medians)
        rates.append(1 / middle)
        fastest.append(1 / min(min(run["seconds"]) for run in runs))
        peak = statistics.median(run["peak"] for run in runs)
        print(
            f"  {number:6,} clients  {1 / middle:7.2f} rounds/s ({rates[-1] / rates[0]:.2f} of the "
            f"first), fastest {fastest[-1]:6.2f} ({fastest[-1] / fastest[0]:.2f})  "
            f"peak {peak / 1e9:5.2f} GB, all states {runs[0]['states'] / 1e9:5.2f} GB  "
            f"start {statistics.median(run['start'] for run in runs):.1f} s"
        )
    spans = [max(all_) / min(all_) - 1 for all_ in (rates, fastest)]
    print(f"  flat within {spans[0]:.0%}, of the fastest rounds within {spans[1]:.0%}")


main = record_program(Arguments, measure)

if __name__ == "__main__":
    raise SystemExit(main())

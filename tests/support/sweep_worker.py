"""One of several workers on one sweep: started by test_workers.py, which may kill it.

python sweep_worker.py FOLDER LOG RUNS ROUNDS SECONDS

RUNS runs of ROUNDS rounds, each of which takes so many SECONDS at least. LOG gets a line for each
round of a run ("round SEED NUMBER") and each that is made ("made SEED").
"""

import contextlib
import re
import sys
import time
from pathlib import Path

import jax

import fedjax_het  # noqa: F401  (first, since it asks for CPU devices)

jax.config.update("jax_default_matmul_precision", "highest")

from fedjax_het import Placement, sweep  # noqa: E402
from fedjax_het.runtime import (  # noqa: E402
    checkpointing,
    group_state,
    leases,
    work_queue,
)
from support.data import make_user_dataset  # noqa: E402
from support.small_runs import make_spec  # noqa: E402


def specs_of(count, rounds):
    return [make_spec(seed=seed, rounds=rounds) for seed in range(count)]


def work(folder, log, count, rounds, seconds):
    group_state.MAX_ROUNDS_PER_CHUNK, checkpointing.CHECKPOINT_SECONDS = 1, 0.0
    work_queue.POLL_SECONDS, leases.LEASE_SECONDS = 0.1, 5.0
    with open(log, "a", buffering=1) as file:

        @contextlib.contextmanager
        def showing(label, **settings):
            seed = re.search(r"seed (\d+)", label)[1]

            def show(progress):
                file.write(f"round {seed} {progress.done}\n")
                time.sleep(seconds)

            yield show

        def print_line(line):
            if actual := re.match(r"\[.*seed (\d+): .* in ", line):
                file.write(f"made {actual[1]}\n")
            print(line, flush=True)

        work_queue.show_progress = showing
        settings = {
            "placement": Placement(lanes=1, blocks=1, spread="runs"),
            "progress": print_line,
        }
        specs = specs_of(count, rounds)
        assert all(sweep(specs, folder, dataset=make_user_dataset(), **settings).results)


if __name__ == "__main__":
    folder, log, count, rounds, seconds = sys.argv[1:]
    work(Path(folder), Path(log), int(count), int(rounds), float(seconds))

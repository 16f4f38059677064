"""Run one federation, from its settings to its result."""

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

from fedjax_het.common.errors import ConfigError
from fedjax_het.common.files import make_output_directory
from fedjax_het.data import Dataset, Partition
from fedjax_het.running.advance import Batch, Progress, resumable
from fedjax_het.running.prepare import prepare
from fedjax_het.running.result import Result
from fedjax_het.settings.spec import RunSpec


def simulate(
    spec: RunSpec,
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    lanes: int | str = "auto",
    devices: int | None = None,
    client_state: str = "auto",
    data_dir: str | os.PathLike | None = None,
) -> Result:
    """Run one federation.

    Args:
      spec: the settings; `None`s are filled from the method's paper.
      dataset, partition: the user's own; default: those that `spec` names.
      output_dir: where the result, and checkpoints on the way, are written.
      resume: continue from the checkpoint in `output_dir`, if there is one. The metrics are
        those of an uninterrupted run, bit for bit on a CPU.
      progress: called between chunks of rounds.
      lanes: vmapped lanes per device, or "auto"; `devices`: how many to use (default: all).
        Both are a matter of speed: results do not depend on them beyond rounding.
      client_state: where clients' states are, "device", "host" or "auto", see `prepare`: a matter
        of memory, and results are the same bits. The host needs a method whose server does not
        read them.
      data_dir: of the prepared data that `spec` names (default: TFDS_DATA_DIR).
    Raises: ConfigError, before anything compiles, if a setting cannot be used.

    Where `jax.distributed` was initialised, every process calls this with the same arguments; the
    devices of all of them share the lanes, all return the result, and the first writes it.
    """
    started = time.perf_counter()
    spec = spec.resolved()
    folder = None if output_dir is None else make_output_directory(output_dir)
    if resume and folder is None:
        raise ConfigError("resume = True: expected an output_dir, where checkpoints are kept")
    meta = resumable(folder, spec) if resume else None
    blocks = None
    if meta is not None:  # the same lanes, so that sums are taken in the same order
        lanes, blocks = meta["lanes"], meta["blocks"]
        devices = min(blocks, len(jax.devices()))
    group = prepare(
        [spec],
        dataset=dataset,
        partitions=None if partition is None else [partition],
        lanes=lanes,
        devices=devices,
        blocks=blocks,
        client_state=client_state,
        data_dir=data_dir,
    )
    batch = Batch(
        group,
        group.federations,
        folders=None if folder is None else [folder],
        progress=progress,
        started=started,
    )
    batch.announce()
    batch.start(None if meta is None else [meta])
    batch.finish()
    (result,) = batch.results()
    if folder is not None and jax.process_index() == 0:
        result.save(folder)
        result.partition.save(folder / "partition.npz")
        if result.tests is not None:
            result.tests.save(folder / "client_tests.npz")
    return result


class RoundTimes(NamedTuple):
    """What `benchmark_rounds` measured."""

    seconds: list[float]  # of each round
    samples: list[int]  # client samples of each round
    cohorts: list[np.ndarray]  # ids of the clients that took part
    compile_seconds: float
    useful_work_fraction: float
    lanes: str


def benchmark_rounds(
    spec: RunSpec, rounds: int, dataset: Dataset | None = None, **plan
) -> RoundTimes:
    """Time local training and averaging alone: the first rounds of `spec`, one program call each
    and no evaluation inside. For `plan` see `simulate`.
    """
    spec = dataclasses.replace(spec, rounds=rounds + 5, eval_every=rounds + 5)
    group = prepare([spec], dataset=dataset, **plan)
    batch = Batch(group, group.federations)
    batch.start()
    seconds = []
    for r in range(rounds):
        inputs = jax.block_until_ready(batch.chunk_inputs(r, 1))
        start = time.perf_counter()
        batch.load_states([r])
        batch.state, _ = jax.block_until_ready(group.program.chunk(batch.state, inputs))
        batch.store_states([r])
        seconds.append(time.perf_counter() - start)
    scheduler = group.federations[0].scheduler
    return RoundTimes(
        seconds,
        scheduler.work.samples[:rounds].tolist(),
        [scheduler.participants(r) for r in range(rounds)],
        batch.compile_seconds,
        group.useful_fraction(group.federations),
        group.plan.describe(),
    )

"""Timing of rounds without evaluation."""

import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np

from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.run_mapping import describe_plan
from fedjax_het.data import Dataset
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.checkpointing import CheckpointWriter
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import init_group
from fedjax_het.runtime.placement import Placement
from fedjax_het.runtime.runner import start_runs
from fedjax_het.runtime.schedules import require_fixed_selection
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.env import require_variables


class RoundTimes(NamedTuple):
    """The result of `benchmark_rounds`.

    Attributes:
      seconds: seconds of each round.
      samples: number of client samples of each round.
      cohorts: ids of the clients that took part in each round.
      compile_seconds: seconds of compilation.
      useful_work_fraction: fraction of processed samples that are real rather than padding.
      lanes: the plan in words.
    """

    seconds: list[float]
    samples: list[int]
    cohorts: list[np.ndarray]
    compile_seconds: float
    useful_work_fraction: float
    lanes: str


@validate_arguments
def benchmark_rounds(
    spec: RunSpec,
    rounds: PositiveInt,
    dataset: Dataset | None = None,
    *,
    placement: Placement = Placement(),
) -> RoundTimes:
    """Time local training and averaging in the first rounds of a run, without evaluation.

    Args:
      spec: the settings.
      rounds: number of rounds; each is a call of the program.
      dataset: the user's data set (default: the data set of `spec`).
      placement: devices and lanes.

    Returns:
      The seconds and the samples of each round.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.runtime.benchmark import benchmark_rounds
      >>> spec = RunSpec(dataset="digits", model="mlp", num_clients=2)
      >>> len(benchmark_rounds(spec, 2).seconds)
      2
    """
    require_variables()
    require_fixed_selection(spec, "benchmark_rounds")
    spec = dataclasses.replace(spec, rounds=rounds + 5, eval_every=rounds + 5)
    group = prepare_group([spec], UserObjects(dataset), placement)
    group_state = init_group(group, group.prepared_runs)
    start_runs(group_state, CheckpointWriter())
    seconds = []
    for r in range(rounds):
        inputs = jax.block_until_ready(group_state.build_chunk_inputs(r, 1))
        start_time = time.perf_counter()
        group_state.load_client_states([r])
        state, _ = jax.block_until_ready(group.program.chunk(group_state.state, inputs))
        group_state.store_client_states(state.clients, [r])
        group_state.update(state=state)
        seconds.append(time.perf_counter() - start_time)
    scheduler = group.prepared_runs[0].scheduler
    return RoundTimes(
        seconds,
        scheduler.work_counts.samples[:rounds].tolist(),
        [scheduler.draw_cohort(r) for r in range(rounds)],
        group_state.timing.compile_seconds,
        group.useful_work_fraction(group.prepared_runs),
        describe_plan(group.program.plan),
    )

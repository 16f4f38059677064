"""The time of rounds alone."""

import dataclasses
import time
from typing import NamedTuple

import jax
import numpy as np

from fedjax_het.common.doors import door
from fedjax_het.common.records import Count
from fedjax_het.common.variables import require_variables
from fedjax_het.data import Dataset
from fedjax_het.running.advance import start
from fedjax_het.running.checkpoints import Checkpoints
from fedjax_het.running.placement import Placement
from fedjax_het.running.prepare import prepare
from fedjax_het.running.runs import gathered
from fedjax_het.settings.spec import RunSpec


class RoundTimes(NamedTuple):
    """What `benchmark_rounds` measured."""

    seconds: list[float]  # of each round
    samples: list[int]  # client samples of each round
    cohorts: list[np.ndarray]  # ids of the clients that took part
    compile_seconds: float
    useful_work_fraction: float
    lanes: str


@door
def benchmark_rounds(
    spec: RunSpec,
    rounds: Count,
    dataset: Dataset | None = None,
    *,
    placement: Placement = Placement(),
) -> RoundTimes:
    """Time local training and averaging alone: the first rounds of `spec`, one program call each
    and no evaluation inside."""
    require_variables()
    spec = dataclasses.replace(spec, rounds=rounds + 5, eval_every=rounds + 5)
    group = prepare([spec], dataset=dataset, placement=placement)
    runs = gathered(group, group.federations)
    start(runs, Checkpoints())
    seconds = []
    for r in range(rounds):
        inputs = jax.block_until_ready(runs.call(r, 1))
        began = time.perf_counter()
        runs.load_states([r])
        runs.state, _ = jax.block_until_ready(group.program.chunk(runs.state, inputs))
        runs.store_states([r])
        seconds.append(time.perf_counter() - began)
    scheduler = group.federations[0].scheduler
    return RoundTimes(
        seconds,
        scheduler.work.samples[:rounds].tolist(),
        [scheduler.participants(r) for r in range(rounds)],
        runs.spent.compiling,
        group.useful_fraction(group.federations),
        group.plan.describe(),
    )

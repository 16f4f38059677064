"""Floating-point operations of a whole run: clients, server, and work between rounds."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import ServerStage
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.flops_interpreter import FlopCounter, Mask
from fedjax_het.core.rng import Stream
from fedjax_het.core.round_inputs import ChunkInputs
from fedjax_het.data import Dataset
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import compute_state_shapes, init_group, init_states
from fedjax_het.runtime.group_state import GroupState
from fedjax_het.runtime.placement import DEVICE_STATE, Placement
from fedjax_het.runtime.schedules import require_fixed_selection
from fedjax_het.utils.config import PositiveInt, validate_arguments

Tree = Any


class ServerStageFlops(NamedTuple):
    """Operations of the server's work between two rounds.

    Attributes:
      name: name of the work, such as "pretraining" or "synthesis".
      before_round: number of rounds that are done before it; 0 for pretraining.
      flops: floating-point operations.
    """

    name: str
    before_round: int
    flops: int


@dataclass(frozen=True)
class RunFlops:
    """Floating-point operations of a run, 2 for each multiply-add.

    Attributes:
      rounds: operations of clients and server in each round, float64 `[rounds]`, exact below 2^53.
      server_stages: work of the server between the rounds.
      tuning: operations of fine-tuning copies of the global model for their tests (`fedavg_ft`,
        `per_fedavg`), for all clients once. No sum includes it, since the number of tests is free.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.runtime.run_flops import RunFlops, ServerStageFlops
      >>> flops = RunFlops(np.array([5.0, 7.0]), (ServerStageFlops("pretraining", 0, 100),))
      >>> flops.total
      112.0
      >>> flops.cumulative.tolist()
      [105.0, 112.0]
    """

    rounds: np.ndarray
    server_stages: tuple[ServerStageFlops, ...] = ()
    tuning: int = 0

    @property
    def total(self) -> float:
        """Return the operations of the whole run."""
        return float(self.rounds.sum() + sum(stage.flops for stage in self.server_stages))

    @property
    def cumulative(self) -> np.ndarray:
        """Return the operations up to the end of each round, float64 `[rounds]`."""
        by_round = np.array(self.rounds, np.float64)
        for stage in self.server_stages:
            by_round[stage.before_round] += stage.flops
        return by_round.cumsum()


@validate_arguments
def count_flops(
    spec: RunSpec,
    dataset: Dataset | None = None,
    *,
    lanes: PositiveInt = 1,
    data_dir: str | os.PathLike | None = None,
) -> RunFlops:
    """Count the floating-point operations of a run.

    The count includes clients' training and condensation, and the server's training, distillation,
    synthesis and pretraining. It covers all products of matrices and convolutions that the run
    executes on one device. Loops end as the run's own schedules determine, padded batches count as
    executed, and every gradient of a step counts. It excludes elementwise work (norms, pooling,
    optimizers, sums of models), the initialization of the network, tests and diagnostics.
    `RunFlops.tuning` holds the fine-tuning of copies for their tests. Nothing is trained.

    Cost: a trace of each program, a compilation of the conditions of its loops, and the schedules
    of all rounds.

    Args:
      spec: settings of the run.
      dataset: the data set; None: the data set of `spec`.
      lanes: vmapped lanes. All run the longest lane's steps, and all these steps count.
      data_dir: folder of the data sets.

    Returns:
      Operations by round, and of the server's work between rounds.

    Raises:
      ConfigError: as `simulate` does.
      NotImplementedError: for a product inside an unknown operation of jax.

    Example:
      >>> from fedjax_het import RunSpec
      >>> from fedjax_het.runtime.run_flops import count_flops
      >>> spec = RunSpec(dataset="digits", model="mlp", num_clients=4, participation=1.0, rounds=2)
      >>> flops = count_flops(spec)
      >>> bool(flops.rounds[0] == flops.rounds[1] > 0)
      True
    """
    require_fixed_selection(spec, "count_flops")
    placement = Placement(lanes=lanes, blocks=1, devices=1, client_state=DEVICE_STATE)
    user_objects = UserObjects(dataset, data_dir=data_dir)
    group = prepare_group([spec], user_objects, placement, has_mesh=False)
    group_state = init_group(group, group.prepared_runs, traces_programs=False)
    algorithm = group.program.algorithm
    programs = {"rounds": _trace_rounds(group_state)}
    for stage in algorithm.server_stages:
        programs[stage.name] = _trace_server_stage(group_state, stage)
    required = _find_control_leaves(group_state, programs.values())
    state = _init_control_leaves(group_state, required)

    def execute(name: str, inputs: Tree = ()) -> int:
        """Count the operations of a program, and compute its control leaves of the state."""
        nonlocal state
        state, flops = programs[name].run([*state, *jax.tree.leaves(inputs)], required)
        return flops

    server_stages, rounds = [], []
    for i in range(group_state.total_rounds):
        for stage in algorithm.server_stages:
            if i in stage.before_rounds:
                server_stages.append(ServerStageFlops(stage.name, i, execute(stage.name)))
        rounds.append(execute("rounds", _build_round_inputs(group_state, i, is_evaluated=False)))
    tuning = 0
    if algorithm.fine_tuning is not None:
        final_state = state
        inputs = _build_round_inputs(group_state, group_state.total_rounds - 1, is_evaluated=True)
        tuning = execute("rounds", inputs)
        state = final_state
        tuning -= execute("rounds", _without_tuning_steps(inputs))
    return RunFlops(np.array(rounds, np.float64), tuple(server_stages), tuning)


def _trace_rounds(group_state: GroupState) -> FlopCounter:
    """Trace a round, `(state, inputs) -> (state, ...)`."""
    inputs = _build_round_inputs(group_state, 0, is_evaluated=False)
    program = group_state.group.program.chunk.program
    return FlopCounter(program.trace(compute_state_shapes(group_state), inputs).jaxpr)


def _trace_server_stage(group_state: GroupState, stage: ServerStage) -> FlopCounter:
    """Trace all iterations of the server's work between two rounds, `state -> state`."""
    program = group_state.group.program.server_stages[stage.name].program
    hp, examples = (group_state.cached_inputs.get(name) for name in ("hp", "server_examples"))
    inputs = group_state.build_keys(Stream.SERVER), jnp.int32(stage.num_iterations), examples
    trace = jax.make_jaxpr(lambda state: program(hp, state, *inputs))
    return FlopCounter(trace(compute_state_shapes(group_state)))


def _build_round_inputs(
    group_state: GroupState, round_index: int, *, is_evaluated: bool
) -> ChunkInputs:
    """Return the inputs of a round, with or without tests after it."""
    inputs = group_state.build_chunk_inputs(round_index, 1)
    evaluate = np.full_like(inputs.schedule.is_eval_round, is_evaluated)
    return inputs._replace(schedule=inputs.schedule._replace(is_eval_round=evaluate))


def _without_tuning_steps(inputs: ChunkInputs) -> ChunkInputs:
    """Return the inputs with no minibatch for the fine-tuning of copies."""
    assert inputs.tuning_schedule is not None
    zeros = {
        name: 0 * getattr(inputs.tuning_schedule, name) for name in ("max_steps", "num_segments")
    }
    return inputs._replace(tuning_schedule=inputs.tuning_schedule._replace(**zeros))


def _find_control_leaves(group_state: GroupState, programs: Collection[FlopCounter]) -> Mask:
    """Find the leaves of the state that decide how much any program does.

    They include the leaves from which a program computes such leaves. A counting run computes these
    leaves as the run itself does.
    """
    required = (False,) * len(jax.tree.leaves(compute_state_shapes(group_state)))
    while True:
        masks = [program.find_inputs(required)[: len(required)] for program in programs]
        extended = tuple(map(any, zip(required, *masks, strict=True)))
        if extended == required:
            return required
        required = extended


def _init_control_leaves(group_state: GroupState, required: Mask) -> list:
    """Return the required leaves of the state before the first round, None for others."""
    if not any(required):
        return [None] * len(required)
    init_states(group_state)
    leaves = jax.tree.leaves(group_state.state)
    return [
        leaf if is_required else None for leaf, is_required in zip(leaves, required, strict=True)
    ]

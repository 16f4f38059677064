"""The floating-point operations of a whole run: clients, server, and work between rounds."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import ServerStage
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.flops_interpreter import FlopsProgram, make_flops_program
from fedjax_het.core.rng import Stream
from fedjax_het.core.round_program import ChunkInputs
from fedjax_het.data import Dataset
from fedjax_het.runtime.build import on_single_device, prepare_group
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_state import GroupState, compute_state_shapes, init_group, init_states
from fedjax_het.runtime.placement import DEVICE_STATE, Placement
from fedjax_het.utils.config import PositiveInt, validate_arguments
from fedjax_het.utils.errors import require


class ServerStageFlops(NamedTuple):
    """Work of the server between two rounds: its name, how many rounds are done before it (0:
    pretraining), and its floating-point operations."""

    name: str
    before_round: int
    flops: int


@dataclass(frozen=True)
class RunFlops:
    """Floating-point operations of a run, 2 for each multiply-add.

    Attributes:
      rounds: [rounds] float64, exact below 2^53: of clients and server in each round.
      between: of work of the server between them.
      tuning: where copies of the global model are tuned to be scored (`fedavg_ft`, `per_fedavg`),
        of all clients once; in no sum, as it takes place as often as copies are asked for.
    """

    rounds: np.ndarray
    server_stages: tuple[ServerStageFlops, ...] = ()
    tuning: int = 0

    @property
    def total(self) -> float:
        """Of the whole run."""
        return float(self.rounds.sum() + sum(stage.flops for stage in self.server_stages))

    def compute_cumulative(self, rounds: int) -> float:
        """Of so many rounds, and of all work before the last of them."""
        require(0 <= rounds <= len(self.rounds), "rounds", rounds, f"from 0 to {len(self.rounds)}")
        server_flops = sum(
            stage.flops for stage in self.server_stages if stage.before_round < rounds
        )
        return float(self.rounds[:rounds].sum() + server_flops)

    @property
    def cumulative(self) -> np.ndarray:
        """[rounds]: `after` each of them."""
        return np.array(
            [self.compute_cumulative(rounds) for rounds in range(1, len(self.rounds) + 1)]
        )


@validate_arguments
def count_flops(
    spec: RunSpec,
    dataset: Dataset | None = None,
    *,
    lanes: PositiveInt = 1,
    data_dir: str | os.PathLike | None = None,
) -> RunFlops:
    """The floating-point operations that a run takes, all of it: clients' training and
    condensation, the server's training, distillation and synthesis, pretraining.

    Counted are the products of matrices and convolutions of the programs that the run goes through,
    on one device, with their loops as the run's own schedules make them end: batches are counted
    filled up, as they are executed, and every gradient of a step. Not counted are what is done
    value by value (norms, pooling, optimisers, sums of models), the first draw of the network, and
    what only measures: tests and surveys. The fine-tuning of copies that are tested and forgotten
    (`fedavg_ft`) is told apart. Nothing is trained, and the programs of the run are left as they
    are.

    Args:
      spec: the settings.
      dataset, data_dir: as `simulate` takes them.
      lanes: vmapped lanes, which go in step: what they do where one has no client left counts, too.
    Raises: ConfigError as `simulate` does; NotImplementedError for a product inside of an operation
      of jax that is not known here.
    Cost: a trace of each program, a compilation of what decides its loops, and the drawing of every
      round's schedule.
    """
    placement = Placement(lanes=lanes, blocks=1, devices=1, client_state=DEVICE_STATE)
    group = on_single_device(
        prepare_group([spec], UserObjects(dataset, data_dir=data_dir), placement)
    )
    group_state = init_group(group, group.prepared_runs)
    return _count_run(group_state)


class _TracedProgram(NamedTuple):
    """A program of a run. before, after: its inputs around the state, as leaves."""

    jaxpr: Any
    leading_inputs: list
    trailing_inputs: list

    def build_flop_counter(self, required_leaves: tuple[bool, ...]) -> FlopsProgram:
        """It, counting, with these leaves of the state among what it returns."""
        num_outputs = len(self.jaxpr.jaxpr.outvars) - len(required_leaves)
        return make_flops_program(self.jaxpr, (*required_leaves, *(False,) * num_outputs))

    def get_required_leaves(self, counter: FlopsProgram, num_leaves: int) -> tuple[bool, ...]:
        """Which leaves of the state, of so many, decide how much is done."""
        return counter.inputs[len(self.leading_inputs) : len(self.leading_inputs) + num_leaves]


def _count_run(group_state: GroupState) -> RunFlops:
    stages = group_state.group.program.algorithm.server_stages
    traced_programs = [
        _trace_rounds(group_state),
        *(_trace_server_stage(group_state, stage) for stage in stages),
    ]
    shapes = jax.tree.leaves(compute_state_shapes(group_state))
    required_leaves, counters = _find_control_leaves(traced_programs, len(shapes))
    state = _init_required_leaves(group_state, required_leaves)

    def execute_and_count(index: int, trailing_inputs: list) -> int:
        nonlocal state
        counter = counters[index]
        inputs = [*traced_programs[index].leading_inputs, *state, *trailing_inputs]
        leaves = [
            leaf for leaf, is_required in zip(inputs, counter.inputs, strict=True) if is_required
        ]
        outputs, flops = counter.run(leaves)
        outputs_iterator = iter(outputs)
        state = [next(outputs_iterator) if is_required else None for is_required in required_leaves]
        return flops

    server_stages, rounds = [], []
    for round_index in range(group_state.total_rounds):
        for i, stage in enumerate(stages):
            if stage.before_round == round_index:
                server_stages.append(
                    ServerStageFlops(
                        stage.name,
                        round_index,
                        execute_and_count(i + 1, traced_programs[i + 1].trailing_inputs),
                    )
                )
        rounds.append(
            execute_and_count(
                0,
                jax.tree.leaves(_build_round_inputs(group_state, round_index, is_evaluated=False)),
            )
        )
    tuning = 0
    if group_state.group.program.algorithm.fine_tuning is not None:
        final_state = state
        evaluated_inputs = _build_round_inputs(
            group_state, group_state.total_rounds - 1, is_evaluated=True
        )
        tuning = execute_and_count(0, jax.tree.leaves(evaluated_inputs))
        state = final_state
        tuning -= execute_and_count(0, jax.tree.leaves(_without_tuning_steps(evaluated_inputs)))
    return RunFlops(np.array(rounds, np.float64), tuple(server_stages), tuning)


def _trace_rounds(group_state: GroupState) -> _TracedProgram:
    inputs = _build_round_inputs(group_state, 0, is_evaluated=False)
    program = group_state.group.program.chunk.program
    return _TracedProgram(
        program.trace(compute_state_shapes(group_state), inputs).jaxpr, [], jax.tree.leaves(inputs)
    )


def _trace_server_stage(group_state: GroupState, stage: ServerStage) -> _TracedProgram:
    """All iterations of work between rounds."""
    program = group_state.group.program.server_stages[stage.name].program
    hp, trailing_inputs = (
        group_state.cached_inputs["hp"],
        (group_state.build_keys(Stream.SERVER), jnp.int32(stage.num_iterations)),
    )
    inputs = (
        hp,
        compute_state_shapes(group_state),
        *trailing_inputs,
        group_state.cached_inputs.get("server_examples"),
    )
    leaves = jax.tree.leaves(hp), jax.tree.leaves((*trailing_inputs, inputs[-1]))
    return _TracedProgram(program.trace(*inputs).jaxpr, *leaves)


def _build_round_inputs(
    group_state: GroupState, round_index: int, *, is_evaluated: bool
) -> ChunkInputs:
    """What the program reads for the next round, with tests after it or without."""
    inputs = group_state.build_chunk_inputs(round_index, 1)
    evaluate = np.full_like(inputs.schedule.is_eval_round, is_evaluated)
    return inputs._replace(schedule=inputs.schedule._replace(is_eval_round=evaluate))


def _without_tuning_steps(inputs: ChunkInputs) -> ChunkInputs:
    """The same, but copies have no minibatch to be tuned on."""
    assert inputs.tuning_schedule is not None
    zeros = {
        name: 0 * getattr(inputs.tuning_schedule, name) for name in ("max_steps", "num_segments")
    }
    return inputs._replace(tuning_schedule=inputs.tuning_schedule._replace(**zeros))


def _find_control_leaves(
    programs: Sequence[_TracedProgram], num_leaves: int
) -> tuple[tuple[bool, ...], list[FlopsProgram]]:
    """Which leaves of the state, of so many, decide how much is done in any program, or what these
    leaves become: these are computed as in the run. -> (they, the counting programs)."""
    required_leaves = (False,) * num_leaves
    while True:
        counters = [program.build_flop_counter(required_leaves) for program in programs]
        required_by_program = (
            program.get_required_leaves(counter, num_leaves)
            for program, counter in zip(programs, counters, strict=True)
        )
        extended = tuple(map(any, zip(required_leaves, *required_by_program, strict=True)))
        if extended == required_leaves:
            return required_leaves, counters
        required_leaves = extended


def _init_required_leaves(group_state: GroupState, required_leaves: tuple[bool, ...]) -> list:
    """The leaves that are kept of the state before the first round, None for others."""
    if not any(required_leaves):
        return [None] * len(required_leaves)
    init_states(group_state)
    leaves = jax.tree.leaves(group_state.state)
    return [
        leaf if is_required else None
        for leaf, is_required in zip(leaves, required_leaves, strict=True)
    ]

"""The start of runs: the state before the first round, and the traces of the programs."""

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.config.kind_settings import KIND_SETTINGS
from fedjax_het.core.contract_checks import without_trace_frames
from fedjax_het.core.execution_plan import PER_RUN
from fedjax_het.core.rng import Stream
from fedjax_het.core.round_evaluation import make_missing_metrics
from fedjax_het.core.run_mapping import describe_plan
from fedjax_het.core.schedule import AdaptiveScheduler
from fedjax_het.core.state_paging import StatePager
from fedjax_het.runtime.build import PreparedRun, RunGroup
from fedjax_het.runtime.candidate_losses import make_candidate_curves
from fedjax_het.runtime.compiled_programs import CompiledPrograms
from fedjax_het.runtime.group_state import GroupState, build_run_inputs, compute_chunk_limits
from fedjax_het.runtime.history import Timing, build_curves
from fedjax_het.runtime.placement import DISK_STATE, HOST_DATA
from fedjax_het.runtime.progress import Progress
from fedjax_het.runtime.resumable_rounds import is_long_round, trace_loop_layout
from fedjax_het.runtime.schedules import compute_traffic
from fedjax_het.runtime.signature import warn_batch_norm_padding

log = logging.getLogger("fedjax_het")


def init_group(
    group: RunGroup,
    prepared_runs: Sequence[PreparedRun],
    *,
    progress: Callable[[Progress], None] | None = None,
    start_time: float | None = None,
    records: Sequence[dict] = (),
    traces_programs: bool = True,
) -> GroupState:
    """Return the record of runs that will run in lockstep; their states are not allocated yet.

    Args:
      group: the runs that share the programs.
      prepared_runs: at most `max_parallel_runs` of them.
      progress: called between calls of the programs.
      start_time: the start of their wall-clock time, of `time.perf_counter` (default: now).
      records: the records of the checkpoints from which they resume.
      traces_programs: whether the programs are traced, which checks the method and finds the loops
        of a long round. A debug run checks the method at its rounds.

    Returns:
      The record before the first round.

    Raises:
      ContractError: if the functions of the method break the contract.
    """
    program = group.program
    assert len(prepared_runs) <= program.plan.max_parallel_runs
    evaluation, rounds = program.signature.evaluation, prepared_runs[0].spec.rounds
    group_state = GroupState(
        group,
        list(prepared_runs),
        compute_chunk_limits(group, prepared_runs),
        curves=[
            build_curves(
                make_missing_metrics(program.algorithm, evaluation, rounds), run, evaluation.metrics
            )
            | make_candidate_curves(run.spec)
            for run in prepared_runs
        ],
        timing=Timing() if start_time is None else Timing(start_time, group.probe_seconds),
        progress=progress or (lambda progress: None),
        records=records,
    )
    group_state.cached_inputs = group.shared_inputs | build_run_inputs(group_state)
    if traces_programs and not program.plan.is_debug:
        with group_state.timing.record_compilation(), without_trace_frames():
            _trace_programs(group_state)
    return group_state


def _trace_programs(group_state: GroupState) -> None:
    """Trace the programs before anything compiles; the traces are kept for their compilation.

    Find the loops at which a long round is split into parts. Raise ContractError if the method's
    functions break the contract, see `algorithms.checks.validate_algorithm`.
    """
    program = group_state.group.program
    _check_traffic_contract(program, group_state.prepared_runs[0])
    inputs = compute_state_shapes(group_state), group_state.build_first_step_inputs()
    jax.eval_shape(program.chunk.program, *inputs)
    resumes_within_round = any(record["within"] for record in group_state.records)
    if resumes_within_round or is_long_round(program, inputs[1]):
        group_state.loop_layout = trace_loop_layout(program, *inputs)
    for traced_program, traced_inputs in list_programs(group_state).values():
        jax.eval_shape(traced_program, *traced_inputs)


def _check_traffic_contract(program: CompiledPrograms, prepared_run: PreparedRun) -> None:
    """Raise ContractError where the functions that count bytes break the contract.

    The functions receive the shapes of the state of one client. A function that needs values is
    called when the run is done. Cost: an abstract evaluation of the method's init.
    """
    algorithm, hp = program.algorithm, prepared_run.hp
    algorithm.initial_traffic(prepared_run.federation_data)
    with contextlib.suppress(jax.errors.ConcretizationTypeError):
        compute_traffic(algorithm, program.signature.training, hp)


def list_programs(group_state: GroupState) -> dict[str, tuple[Any, tuple]]:
    """Return the jitted programs of the runs by name, each with its inputs.

    The inputs are arrays, or shapes that are placed like the arrays.
    """
    programs, state = group_state.group.program, compute_state_shapes(group_state)
    stage_inputs = (
        group_state.cached_inputs["hp"],
        state,
        group_state.build_keys(Stream.SERVER),
        jnp.int32(1),
        group_state.cached_inputs.get("server_examples"),
    )
    if not group_state.shards_server_stages:
        stage_inputs = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), stage_inputs
        )
    program = programs.chunk.program
    inputs: tuple = (state, group_state.build_first_step_inputs())
    if (layout := group_state.loop_layout) is not None:
        program = programs.partial_round.program
        inputs += (layout.build_spans(0), layout.carry_shapes)
    stages = programs.server_stages.items()
    return {"rounds": (program, inputs)} | {
        name: (stage.program, stage_inputs) for name, stage in stages
    }


def compute_state_shapes(group_state: GroupState) -> Any:
    """Return the states of all runs before the first round, as shapes placed like the states."""
    group, program = group_state.group, group_state.group.program
    plan, init = program.plan, functools.partial(program.init, group_state.limits.num_rows)
    hp, keys = group_state.cached_inputs["hp"], group_state.build_keys(Stream.INIT)

    def with_sharding(tree, kind):
        sharding = plan.sharding(PER_RUN if group.runs_parallel else kind)
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
        )

    return plan.map_state(jax.eval_shape(init, hp, keys), with_sharding)


def init_states(group_state: GroupState) -> None:
    """Make the states before the first round, at the place that the plan gives them."""
    group, plan = group_state.group, group_state.group.program.plan
    num_rows, slots = group_state.limits.num_rows, group_state.slots
    arguments = [group_state.cached_inputs["hp"], group_state.build_keys(Stream.INIT)]
    if group.initial_model is not None:
        arguments.append(group.stack_slots([group.initial_model.variables] * len(slots)))
    state = group.program.init(1 if group_state.has_paged_states else num_rows, *arguments)
    if group_state.has_paged_states:
        schedulers = [run.scheduler for run in slots]
        on_disk = group.client_state == DISK_STATE
        group_state.pager = StatePager(plan, schedulers, state.clients, num_rows, on_disk=on_disk)
        state = state._replace(clients=())
    group_state.update(state=state if group.runs_parallel else plan.map_state(state, plan.put))


def log_run_header(group_state: GroupState) -> None:
    """Log the partitions, the lanes and the fraction of useful work of runs that begin."""
    group, runs, limits = group_state.group, group_state.prepared_runs, group_state.limits
    dataset, spec = runs[0].dataset, runs[0].spec
    for i, run in enumerate(runs):
        log.info("data: %s. %s", dataset.name, group_state.get_split_measures(i))
        if run.server_data is not None:
            log.info("server: %s", run.summarize_server_data())
    log.info(
        "lanes: %s; %.1f %% of the processed samples are real, the others are padding",
        describe_plan(group.program.plan),
        100 * group.useful_work_fraction(runs),
    )
    if group_state.has_paged_states:
        log.info(
            "client states: on %s; the devices hold the states of %d clients for %d rounds",
            "disk" if group.client_state == DISK_STATE else "the host",
            limits.num_rows,
            limits.max_rounds,
        )
    if group.client_data == HOST_DATA:
        log.info(
            "training examples: on the host; the devices hold at most %d examples for %d rounds",
            limits.num_examples,
            limits.max_rounds,
        )
    warn_batch_norm_padding(spec, group.program.signature, runs[0].partition.sizes)
    if dataset.note:
        log.info("note: %s", dataset.note)
    warn_about_settings(runs)


def warn_about_settings(prepared_runs: Sequence[PreparedRun]) -> None:
    """Log warnings of settings without effect, and of runs that do not train, each line once.

    Args:
      prepared_runs: runs of one method.
    """
    warnings: list[str] = []
    for run in prepared_runs:
        spec = run.spec
        if spec.hyperparameters.get("local_lr") == 0:
            warnings.append("learning_rate = 0: clients do not train")
        is_planned = not isinstance(run.scheduler, AdaptiveScheduler)
        if is_planned and not run.scheduler.work_counts.participants.any():
            warnings.append("no client sends an update in any round: the model does not change")
        algorithm_spec = get_algorithm_spec(spec.algorithm, spec.options)
        warnings += algorithm_spec.settings_warnings(spec, algorithm_spec)
        for setting in KIND_SETTINGS.values():
            for kind in setting.parse(getattr(spec, setting.name)):
                warnings += kind.list_warnings(spec)
    for warning in dict.fromkeys(warnings):
        log.warning("note: %s", warning)

"""Preparation of runs: checked settings, placed data, and programs that are not compiled."""

import functools
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import Algorithm, FederationData
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.autotune import LaneChoice
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.evaluation import compute_test_batches, place_evaluation_set
from fedjax_het.core.execution_plan import (
    LANES_AXIS,
    PER_BLOCK,
    PER_RUN,
    RUNS_AXIS,
    ExecutionPlan,
)
from fedjax_het.core.lr_schedules import compute_round_lr_factors
from fedjax_het.core.memory import evict_programs_if_needed, release_freed_memory
from fedjax_het.core.schedule import Scheduler, ScheduleShape, compute_useful_fraction, merge_shapes
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import ServerSummary
from fedjax_het.nn.conv_products import AUTO
from fedjax_het.runtime import candidate_losses, held_out_eval, split_measures
from fedjax_het.runtime.compiled_programs import (
    CompiledPrograms,
    build_algorithm,
    build_programs,
)
from fedjax_het.runtime.data_assignment import (
    DataAssignment,
    UserObjects,
    assign_data,
    load_server_pool,
)
from fedjax_het.runtime.memory_limits import require_memory_for_plan, require_memory_for_settings
from fedjax_het.runtime.placement import (
    DEVICE_DATA,
    SPLIT_STATE,
    Placement,
    Planner,
    choose_client_data,
    choose_client_state,
    compute_client_state_bytes,
)
from fedjax_het.runtime.schedules import bind_scheduler, make_further_schedulers
from fedjax_het.runtime.signature import (
    build_signature,
    clear_network_caches,
    compute_static_key,
    warn_missing_norm_layers,
)
from fedjax_het.runtime.trained_model import ModelFile, load_initial_model
from fedjax_het.tasks import TASKS
from fedjax_het.tasks.checks import check_functions
from fedjax_het.utils.arrays import stack_on_host
from fedjax_het.utils.input_kinds import map_arrays

log = logging.getLogger("fedjax_het")

# Runs and rounds that are scheduled for each number of lanes that is timed.
MAX_TRIAL_RUNS, MAX_TRIAL_ROUNDS = 4, 3


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedRun(DataAssignment):
    """A run that is ready on the host: its data, and the schedule of its clients' work.

    Attributes:
      scheduler: plans the work of every round.
      tuning_scheduler: plans the fine-tuning of all clients' copies, where copies are evaluated.
      diagnostics_scheduler: plans the round in which all clients' gradients are measured.
      method_inputs: the other inputs of the method by name, see `Algorithm.round_inputs`.
    """

    scheduler: Scheduler
    tuning_scheduler: Scheduler | None = None
    diagnostics_scheduler: Scheduler | None = None
    method_inputs: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def lr_factors(self) -> np.ndarray:
        """Factors of `local_lr` in each round, float32 `[R]`."""
        spec = self.spec
        return compute_round_lr_factors(spec.lr_schedule or "constant", spec.hp, spec.rounds)

    @property
    def server_examples(self) -> Examples | None:
        """The server's examples on the host; None if the server has none."""
        if self.server_data is None:
            return None
        return Examples(*self.server_data.get_examples(self.dataset, self.pool))

    @property
    def federation_data(self) -> FederationData:
        """The data that a method's functions on the host read."""
        spec, samples_per_round = self.spec, None
        if spec.local_steps is not None:
            work = ClientWork(self.partition, 0, spec.batch_size, extra_batches=spec.local_steps)
            samples_per_round = int(work.num_samples.sum())
        held_out = None if self.held_out is None else self.held_out.partition
        withheld = [part for part in (self.validation, held_out) if part is not None]
        return FederationData(
            self.client_dataset,
            self.partition,
            self.server_examples,
            spec.local_epochs,
            spec.partition_seed,
            samples_per_round,
            np.concatenate([part.indices for part in withheld]) if withheld else None,
            self.drift,
        )

    def summarize_server_data(self) -> ServerSummary | None:
        """Return the server's examples in numbers; None if the server has none."""
        if self.server_data is None:
            return None
        return self.server_data.summarize(self.dataset, self.partition, self.pool)


@dataclass(frozen=True, eq=False)
class RunGroup:
    """Runs that share programs, `program.plan.max_parallel_runs` of them at a time.

    Attributes:
      program: the programs.
      prepared_runs: the runs.
      lane_choice: the number of lanes, and how it was chosen.
      initial_model: the model that all runs begin with, if it is read from a file.
      client_state: the place of client states: "device", "split", "host" or "disk".
      client_data: the place of the clients' training examples: "device" or "host".
      state_bytes: bytes of the state that one client has between rounds; 0 without a state.
      probe_seconds: seconds of the measurements that chose the lanes.
      shared_inputs: the inputs of the programs that are the same for all runs, by name.
    """

    program: CompiledPrograms
    prepared_runs: list[PreparedRun]
    lane_choice: LaneChoice
    initial_model: ModelFile | None
    client_state: str
    client_data: str
    state_bytes: int
    probe_seconds: float
    shared_inputs: dict[str, Any] = field(default_factory=dict)

    @property
    def runs_parallel(self) -> bool:
        """Whether each run has its own devices, which gives arrays a leading axis of runs."""
        return self.program.plan.mesh_axis == RUNS_AXIS

    @functools.cached_property
    def shapes(self) -> dict[str, ScheduleShape]:
        """Static sizes that hold for every round of all runs, by the name of the scheduler."""
        num_parallel, shapes = self.program.plan.num_parallel, {}
        for name in ("scheduler", "tuning_scheduler", "diagnostics_scheduler"):
            schedulers = [getattr(run, name) for run in self.prepared_runs]
            if schedulers[0] is not None:
                shapes[name] = merge_shapes(schedulers, num_parallel)
        return shapes

    def stack_slots(self, trees: Sequence[Any]) -> Any:
        """Place one pytree per slot on the devices: stacked, or the only one."""
        plan = self.program.plan
        if not self.runs_parallel:
            return plan.put(trees[0])
        return plan.put(jax.tree.map(lambda *leaves: stack_on_host(leaves), *trees), PER_RUN)

    def take_run(self, tree: Any, i: int) -> Any:
        """Return the part of one run of a pytree that has a leading axis of runs, if runs do.

        Args:
          tree: the pytree.
          i: the run.

        Returns:
          A pytree of the same structure.
        """
        return jax.tree.map(lambda a: a[i], tree) if self.runs_parallel else tree

    def useful_work_fraction(self, prepared_runs: Sequence[PreparedRun]) -> float:
        """Return the fraction of processed samples that are real rather than padding."""
        schedulers = [run.scheduler for run in prepared_runs]
        is_concurrent = self.program.plan.mesh_axis == LANES_AXIS
        return compute_useful_fraction(schedulers, is_concurrent=is_concurrent)


def evict_programs() -> None:
    """Free the memory of dropped programs, and drop all near the limit of memory maps."""
    release_freed_memory()
    evict_programs_if_needed(
        build_programs.cache_clear,
        candidate_losses.clear_programs,
        held_out_eval.clear_programs,
        split_measures.clear_programs,
        clear_network_caches,
    )


def prepare_group(
    specs: Sequence[RunSpec],
    user_objects: UserObjects = UserObjects(),
    placement: Placement = Placement(),
    *,
    assignments: Sequence[DataAssignment] | None = None,
    num_runs: int | None = None,
    has_mesh: bool = True,
    is_debug: bool = False,
) -> RunGroup:
    """Check the settings, make the partitions and build the programs. Nothing is compiled yet.

    Args:
      specs: runs of one `compute_static_key`.
      user_objects: the user's own objects; by default the objects that the settings name.
      placement: devices, lanes and the place of client states.
      assignments: the result of `assign_data` for each run, if it exists already.
      num_runs: number of runs that the programs serve, which may include further runs (default: the
        number of `specs`). It decides how devices are shared out.
      has_mesh: whether the programs are for a mesh of devices; False for the default device, which
        `placement` must then choose with client states on it.
      is_debug: whether the programs run without jit, which requires `has_mesh=False`.

    Returns:
      The runs and their programs, which are not compiled.

    Raises:
      ConfigError: if a setting or an object cannot be used.
    """
    evict_programs()
    resolved_specs = [spec.resolved() for spec in specs]  # no effect on resolved settings
    assert len({compute_static_key(spec) for spec in resolved_specs}) == 1
    spec, num_runs = resolved_specs[0], num_runs or len(resolved_specs)
    if assignments is None:
        dataset = user_objects.load_dataset(spec, caller="simulate")
    else:
        dataset = assignments[0].dataset
    devices = placement.list_devices()
    make_signature = partial(
        build_signature, spec, dataset, user_objects.network, user_objects.optimizer
    )
    signature = make_signature()
    if dataset.task not in TASKS.built_in:
        task = signature.training.task
        check_functions(task.kind, task.model.output_shape, task.label_shape, task.label_dtype)
    algorithm = build_algorithm(signature)
    client_data = choose_client_data(placement, spec, dataset, signature, algorithm)
    require_memory_for_settings(spec, dataset, signature, placement, devices, client_data)
    warn_missing_norm_layers(spec, signature)
    initial_model = load_initial_model(spec, signature)
    if assignments is None:
        pool = load_server_pool(spec, dataset, user_objects.data_dir)
        assignments = [
            assign_data(each, dataset, pool, user_objects.partition) for each in resolved_specs
        ]
    planner = Planner(placement, spec, signature, algorithm, devices, num_runs)
    makers = [bind_scheduler(each, algorithm, signature.training) for each in assignments]

    def build_trial_schedulers(lanes: int) -> list[Scheduler]:
        """Return schedulers of a few rounds of a few runs, to estimate how long lanes are idle."""
        layout = {"blocks": planner.blocks, "lanes": lanes}
        num_rounds = min(spec.rounds, MAX_TRIAL_ROUNDS)
        return [make(num_rounds=num_rounds, **layout) for make in makers[:MAX_TRIAL_RUNS]]

    start_time = time.perf_counter()
    lane_choice = planner.choose_num_lanes(build_trial_schedulers)
    probe_seconds = time.perf_counter() - start_time
    if lane_choice.conv_impl != AUTO:
        log.info("convolutions: %s", lane_choice.conv_impl)
        signature = make_signature(conv_impl=lane_choice.conv_impl)
        planner = replace(planner, signature=signature)
    layout = {"blocks": planner.blocks, "lanes": lane_choice.lanes}
    prepared_runs = [
        PreparedRun(
            **vars(assignment),
            scheduler=make(**layout),
            **make_further_schedulers(assignment, algorithm, layout),
        )
        for assignment, make in zip(assignments, makers, strict=True)
    ]
    prepared_runs = _add_method_inputs(prepared_runs, algorithm)
    schedulers = [run.scheduler for run in prepared_runs]
    plan = planner.build_plan(lane_choice, schedulers)
    if not has_mesh:
        plan = plan._replace(mesh=None, is_debug=is_debug)
    program = build_programs(signature, plan)
    state_bytes = compute_client_state_bytes(program, spec)
    client_state = choose_client_state(placement, program, spec, state_bytes)
    if client_state == SPLIT_STATE:
        program = build_programs(signature, plan._replace(has_sharded_client_states=True))
    schedulers = [s for s in (schedulers[0], prepared_runs[0].tuning_scheduler) if s is not None]
    require_memory_for_plan(program, spec, schedulers, client_state, state_bytes, placement)
    state = (client_state, client_data, state_bytes)
    return _place_shared_inputs(
        RunGroup(program, prepared_runs, lane_choice, initial_model, *state, probe_seconds)
    )


def _place_shared_inputs(group: RunGroup) -> RunGroup:
    """Return the group with the data of all its runs on the devices.

    Data of a group that had another plan stay where they are, unless the plan spreads them.
    """
    program, run, placed = group.program, group.prepared_runs[0], group.shared_inputs
    dataset, plan, test_inputs = run.dataset, program.plan, run.dataset.test_inputs
    has_global_model = program.algorithm.global_model is not None
    batch_size, num_batches = compute_test_batches(plan, test_inputs)
    num_eval_batches = num_batches if has_global_model else 1

    def place_examples(inputs: Any, labels: np.ndarray) -> Examples:
        return plan.put(Examples(inputs, np.asarray(labels)))

    def place_training_examples() -> Examples:
        inputs, labels = dataset.train_inputs, dataset.train_labels
        if run.pool is not None and program.algorithm.trains_on_server_data:
            inputs = map_arrays(lambda *parts: np.concatenate(parts), inputs, run.pool[0])
            labels = np.concatenate([labels, run.pool[1]])
        return place_examples(inputs, labels)

    builders: dict[str, Callable[[], Any]] = {
        "num_eval_batches": lambda: plan.put(jnp.int32(num_eval_batches)),
        "test_set": lambda: place_evaluation_set(
            plan, test_inputs, dataset.test_labels, dataset.test_domains
        ),
        "test_examples": lambda: place_examples(test_inputs, dataset.test_labels),
    }
    if group.client_data == DEVICE_DATA:  # otherwise each call has its own examples
        builders["examples"] = place_training_examples
    for name in {"examples", "test_examples"} & placed.keys():
        builders[name] = partial(plan.put, placed[name])
    test_set, shape = placed.get("test_set"), (plan.blocks, num_batches, batch_size)
    if test_set is not None and test_set.is_real.shape == shape:
        builders["test_set"] = partial(plan.put, test_set, PER_BLOCK)
    return replace(group, shared_inputs=program.build_inputs(builders))


def _add_method_inputs(prepared_runs: list[PreparedRun], algorithm: Algorithm) -> list[PreparedRun]:
    """Return the runs with the inputs that only their method reads."""
    if not algorithm.round_inputs:
        return prepared_runs
    federation_data = [run.federation_data for run in prepared_runs]
    names = [round_input.name for round_input in algorithm.round_inputs]
    trees = [round_input.make_inputs(federation_data) for round_input in algorithm.round_inputs]
    return [
        replace(run, method_inputs=dict(zip(names, inputs, strict=True)))
        for run, inputs in zip(prepared_runs, zip(*trees, strict=True), strict=True)
    ]


def with_plan(group: RunGroup, plan: ExecutionPlan) -> RunGroup:
    """Return the group on other devices or lanes, with programs for them.

    Args:
      group: the group.
      plan: the devices, and the lanes on them.

    Returns:
      The group with other programs.
    """
    program = build_programs(group.program.signature, plan)
    return _place_shared_inputs(replace(group, program=program))

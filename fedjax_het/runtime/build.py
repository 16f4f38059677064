"""Preparation of runs: settings are checked, data are placed, programs are built but not compiled."""

import dataclasses
import functools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from fedjax_het.algorithms import get_algorithm_spec
from fedjax_het.config.run_spec import ResolvedRunSpec, RunSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.data import Dataset, Partition
from fedjax_het.data.server_data import LabeledImages
from fedjax_het.runtime.compiled_programs import (
    CompiledPrograms,
    Signature,
    build_algorithm,
    build_local_training,
    build_network,
    build_programs,
    build_signature,
    compute_static_key,
    evict_programs,
)
from fedjax_het.runtime.data_assignment import assign_data, load_server_pool
from fedjax_het.runtime.memory_limits import require_memory_for_plan, require_memory_for_settings
from fedjax_het.runtime.placement import (
    SPLIT_STATE,
    Placement,
    build_plan,
    choose_client_state,
    choose_num_blocks,
    choose_num_lanes,
    describe_workload,
    reduce_parallel_runs,
    should_shard_server_work,
)
from fedjax_het.runtime.prepared_run import (
    InitialModel,
    PreparedRun,
    RunGroup,
    add_method_inputs,
    build_federation_data,
    build_prepared_run,
    build_trial_schedulers,
    build_work_items,
    compute_group_shapes,
)
from fedjax_het.runtime.program_inputs import GROUP_INPUTS, InputContext, build_inputs
from fedjax_het.runtime.trained_model import ModelFile, read_model_file
from fedjax_het.runtime.user_objects import UserObjects
from fedjax_het.utils.errors import ConfigError, require

log = logging.getLogger("fedjax_het")


def check_traffic_contract(
    program: CompiledPrograms,
    prepared_runs: Sequence[PreparedRun],
    dataset: Dataset,
    pool: LabeledImages | None,
) -> None:
    """Raise ContractError where the functions that count bytes break the contract.

    By the state's shapes, of one client: what needs its values is asked when the run is done.
    Cost: an abstract evaluation of the method's init.
    """
    algorithm, model, first_run = program.algorithm, program.task.model, prepared_runs[0]
    algorithm.initial_traffic(build_federation_data(first_run, dataset, pool))

    def count_traffic(key: jax.Array) -> tuple[()]:
        algorithm.traffic(first_run.hp, algorithm.init(first_run.hp, key, model.init(key), 1))
        return ()

    try:
        jax.eval_shape(count_traffic, jax.random.key(0))
    except jax.errors.ConcretizationTypeError:
        return


def load_initial_model(spec: ResolvedRunSpec, signature: Signature) -> InitialModel | None:
    """That which settings name; None where weights are drawn. Raises ConfigError for a file that is
    none, and for the model of another network."""
    if spec.init_from is None:
        return None
    model_file = _read_initial_model(spec.init_from)
    expected_variables = jax.eval_shape(
        build_local_training(signature).task.model.init, jax.random.key(0)
    )
    expected_shapes, file_shapes = (
        _format_leaf_shapes(expected_variables),
        _format_leaf_shapes(model_file.variables),
    )
    for name in {**expected_shapes, **file_shapes}:
        file_shape, expected_shape = (
            file_shapes.get(name, "nothing"),
            expected_shapes.get(name, "nothing"),
        )
        expected = f"a model of this network, {spec.model}, in which {name} is {expected_shape}, not {file_shape}"
        require(file_shape == expected_shape, "init_from", spec.init_from, expected)
    leaves = jax.tree.leaves(model_file.variables)  # of dicts, whose order is that of names
    variables = jax.tree.unflatten(jax.tree.structure(expected_variables), leaves)
    return InitialModel(variables, model_file.variables_digest)


def compute_initial_digest(path: str) -> str:
    """The digest of a file's model; "unknown" where it cannot be read, as the run will say."""
    try:
        return _read_initial_model(path).variables_digest
    except ConfigError:
        return "unknown"


def _read_initial_model(path: str) -> ModelFile:
    try:
        return read_model_file(Path(path))
    except OSError as error:
        expected = f"a model's file, as save_model writes it ({error.strerror})"
        require(False, "init_from", path, expected)
        raise


def _format_leaf_shapes(tree: Any) -> dict[str, str]:
    """Of each leaf, by its place."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): f"{leaf.dtype} {leaf.shape}"
        for path, leaf in leaves
    }


def prepare_group(
    specs: Sequence[RunSpec],
    user_objects: UserObjects = UserObjects(),
    placement: Placement = Placement(),
    *,
    partitions: Sequence[Partition] | None = None,
    pool: LabeledImages | None = None,
    num_runs: int | None = None,
) -> RunGroup:
    """Check the settings, make the partitions, place the data. Nothing is compiled yet.

    Args:
      specs: runs of one `compute_static_key`.
      user_objects: the user's own objects; those that the settings name where there are none.
      placement: devices, lanes and the place of client states.
      partitions: the partitions that the settings name, one for each run, if they exist already.
      pool: the result of `load_server_pool` for these runs, if it exists already.
      num_runs: number of runs that the programs serve, of which these may be some; it decides how
        devices are shared out (default: the number of `specs`).

    Returns:
      The runs, their programs (not compiled) and their data on the devices.

    Raises:
      ConfigError: if a setting or an object cannot be used.
    """
    evict_programs()
    resolved_specs = [spec.resolved() for spec in specs]  # nothing for those that are resolved
    assert len({compute_static_key(spec) for spec in resolved_specs}) == 1
    spec = resolved_specs[0]
    dataset = user_objects.load_dataset(spec, caller="simulate")
    devices = placement.list_devices()
    signature = build_signature(spec, dataset, user_objects.network, user_objects.optimizer)
    require_memory_for_settings(spec, dataset, signature, placement, devices)
    algorithm = build_algorithm(signature)
    _warn_missing_norm_layers(signature)
    initial_model = load_initial_model(spec, signature)
    pool = load_server_pool(spec, dataset, user_objects.data_dir) if pool is None else pool

    trains_on_server_data = algorithm.trains_on_server_data
    named_partitions: Sequence[Partition | None] = partitions or (None,) * len(resolved_specs)
    data_assignments = [
        assign_data(
            resolved_spec,
            dataset,
            pool,
            partition=named_partition,
            user_partition=user_objects.partition,
            trains_on_server_data=trains_on_server_data,
        )
        for resolved_spec, named_partition in zip(resolved_specs, named_partitions, strict=True)
    ]
    work_items = [
        build_work_items(data_assignment, dataset, algorithm)
        for data_assignment in data_assignments
    ]
    blocks = choose_num_blocks(placement, devices, spec)
    num_runs = num_runs or len(resolved_specs)
    build_schedulers = functools.partial(
        build_trial_schedulers, data_assignments, work_items, blocks
    )
    workload = describe_workload(signature, algorithm, spec.batch_size)
    lane_choice = choose_num_lanes(
        placement, workload, devices, blocks, spec, build_schedulers, num_runs
    )
    if lane_choice.conv_impl != signature.conv_impl:
        log.info("convolutions: %s", lane_choice.conv_impl)
        signature = signature._replace(conv_impl=lane_choice.conv_impl)
    prepared_runs = [
        build_prepared_run(
            data_assignment,
            items,
            algorithm,
            blocks=blocks,
            lanes=lane_choice.lanes,
            initial_model=initial_model,
        )
        for data_assignment, items in zip(data_assignments, work_items, strict=True)
    ]
    prepared_runs = add_method_inputs(prepared_runs, algorithm, dataset, pool)
    server_sharding_check = functools.partial(
        should_shard_server_work, placement, signature, algorithm, devices[:blocks]
    )
    schedulers = [f.scheduler for f in prepared_runs]
    plan = build_plan(
        placement, devices, blocks, lane_choice, schedulers, num_runs, server_sharding_check
    )
    program = build_programs(signature, plan)
    client_state = choose_client_state(placement, program, spec)
    if client_state == SPLIT_STATE:
        program = build_programs(signature, plan._replace(has_sharded_client_states=True))
    check_traffic_contract(program, prepared_runs, dataset, pool)
    require_memory_for_plan(program, prepared_runs[0], client_state, placement)
    shapes = compute_group_shapes(prepared_runs, program.plan)
    return _place_shared_inputs(
        RunGroup(program, prepared_runs, dataset, pool, shapes, lane_choice, client_state)
    )


def _warn_missing_norm_layers(signature: Signature) -> None:
    """Warn of a network without what makes the method another one than its base."""
    required_features = get_algorithm_spec(
        signature.algorithm, dict(signature.options)
    ).required_data
    if "norms" in required_features and not build_network(signature).norm_layers():
        log.warning(
            "note: %s is about normalisation layers, and network %r has none that are known as "
            "such: this is FedAvg",
            signature.algorithm,
            signature.model,
        )


def with_fewer_parallel_runs(group: RunGroup, num_parallel: int) -> RunGroup:
    """Return the group with so many runs at a time on each device; 0: one on all devices."""
    return _with_plan(group, reduce_parallel_runs(group.program.plan, num_parallel))


def on_single_device(group: RunGroup, *, is_debug: bool = False) -> RunGroup:
    """Return the group on the default device, with programs that contain no devices.

    is_debug: whether the programs run without jit, see `ExecutionPlan.is_debug`.
    """
    return _with_plan(group, group.program.plan._replace(mesh=None, is_debug=is_debug))


def _with_plan(group: RunGroup, plan: ExecutionPlan) -> RunGroup:
    program = build_programs(group.program.signature, plan)
    shapes = compute_group_shapes(group.prepared_runs, plan)
    return _place_shared_inputs(dataclasses.replace(group, program=program, shapes=shapes))


def _place_shared_inputs(group: RunGroup) -> RunGroup:
    """Return the group with its data on the devices."""
    shared_inputs = build_inputs(InputContext(group), GROUP_INPUTS)
    return dataclasses.replace(group, shared_inputs=shared_inputs)

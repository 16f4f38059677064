"""Programs of real runs, lowered for described devices."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_het import RunSpec
from fedjax_het.core.rng import Stream
from fedjax_het.data import Dataset, dataset_from_arrays
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.compiled_programs import build_programs
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import compute_state_shapes, init_group
from fedjax_het.runtime.placement import Placement

ROUNDS = "rounds"  # a chunk of them, as one program
DATASET_SHAPES = {"fashion_mnist": ((28, 28, 1), 60_000), "cifar10": ((32, 32, 3), 50_000)}


class Case(NamedTuple):
    """A program: the run that it belongs to, its lanes and its devices."""

    method: str
    dataset: str
    lanes: int
    settings: dict[str, Any]
    part: str = ROUNDS  # or the name of work between rounds
    devices: int = 1
    client_state: str = "device"


_HETEROGENEOUS_SETTINGS = {
    "protocol": "dynafed",
    "partition": "dirichlet_balanced",
    "alpha": 0.01,
    "num_clients": 80,
    "participation": 0.4,
    "local_epochs": 1,
    "batch_size": 32,
    "rounds": 200,
}


def _rounds_case(
    dataset: str, model: str, lanes: int, impl: str | None = None, **extra_fields: Any
) -> Case:
    network = {"network_options": {"conv_impl": impl}} if impl else {}
    method, part = extra_fields.pop("method", "fedavg"), extra_fields.pop("part", ROUNDS)
    settings = {**_HETEROGENEOUS_SETTINGS, "model": model, **network}
    return Case(method, dataset, lanes, settings, part, **extra_fields)


def _condensation_case(method: str, lanes: int, impl: str) -> Case:
    settings = {"alpha": 0.02, "rounds": 20, "network_options": {"conv_impl": impl}}
    return Case(method, "cifar10", lanes, settings)


CASES = {
    "mlp-1": _rounds_case("fashion_mnist", "mlp", 1),
    "mlp-32": _rounds_case("fashion_mnist", "mlp", 32),
    "scaffold-mlp-32": _rounds_case("fashion_mnist", "mlp", 32, method="scaffold"),
    "convnet-native-1": _rounds_case("cifar10", "convnet", 1, "native"),
    "convnet-native-32": _rounds_case("cifar10", "convnet", 32, "native"),
    "convnet-im2col-1": _rounds_case("cifar10", "convnet", 1, "im2col"),
    "convnet-im2col-32": _rounds_case("cifar10", "convnet", 32, "im2col"),
    "synthesis-mlp": _rounds_case("fashion_mnist", "mlp", 4, method="dynafed", part="synthesis"),
    "synthesis-convnet": _rounds_case(
        "cifar10", "convnet", 4, "im2col", method="dynafed", part="synthesis"
    ),
    "fedaf": _condensation_case("fedaf", 16, "im2col"),
    "feddm": _condensation_case("feddm", 16, "im2col"),
    "two-mlp": _rounds_case("fashion_mnist", "mlp", 16, devices=2),
    "two-scaffold-mlp": _rounds_case("fashion_mnist", "mlp", 16, method="scaffold", devices=2),
    "two-split-scaffold-mlp": _rounds_case(
        "fashion_mnist", "mlp", 16, method="scaffold", devices=2, client_state="split"
    ),
    "two-synthesis-mlp": _rounds_case(
        "fashion_mnist", "mlp", 4, method="dynafed", part="synthesis", devices=2
    ),
}


def shrink_case(case: Case) -> Case:
    """Return the same program for few clients, small images and a narrow network."""
    reduced_settings = {"num_clients": 4, "rounds": 2, "batch_size": 8}
    if case.settings.get("model") != "mlp":
        reduced_settings["width"] = 4
    settings = {**case.settings, **reduced_settings}
    if "participation" in settings:  # clients that condense have none
        settings["participation"] = 0.5
    return case._replace(lanes=min(case.lanes, 2), settings=settings)


def make_noise_dataset(name: str, *, small: bool = False) -> Dataset:
    """Make images of noise with the number and the shape of the images of a data set.

    Args:
      name: a name in `DATASET_SHAPES`.
      small: whether to make 2,400 training images of 8x8 pixels instead.

    Returns:
      The data set.
    """
    shape, count = DATASET_SHAPES[name]
    if small:
        shape, count = (8, 8, shape[-1]), 2_400
    rng, num_test = np.random.default_rng(0), count // 6 if small else 10_000
    images = rng.integers(0, 256, (count + num_test, *shape), np.uint8)
    labels = np.arange(count + num_test, dtype=np.int32) % 10
    split = images[:count], labels[:count], images[count:], labels[count:]
    return dataset_from_arrays(*split, num_classes=10)


def lower_case(case: Case, dataset: Dataset, devices: Sequence[jax.Device]) -> Any:
    """Lower the program of a case for described devices.

    Args:
      case: the case.
      dataset: the data set of the run.
      devices: devices, of which the first `case.devices` are used.

    Returns:
      The lowered program of jax.
    """
    spec = RunSpec(case.method, dataset=case.dataset, seed=0, **case.settings)
    placement = Placement(
        lanes=case.lanes, devices=case.devices, spread="lanes", client_state=case.client_state
    )
    if case.devices > 1:
        placement = dataclasses.replace(placement, server_work="shared")
    group = prepare_group([spec], UserObjects(dataset), placement=placement)
    host_plan = group.program.plan
    assert host_plan.mesh is not None
    chosen, names = np.array(devices[: case.devices]), host_plan.mesh.axis_names
    mesh = Mesh(chosen, names, axis_types=(jax.sharding.AxisType.Auto,))
    program = build_programs(group.program.signature, host_plan._replace(mesh=mesh))
    runs = init_group(group, group.prepared_runs)
    state = compute_state_shapes(runs)
    inputs: tuple
    if case.part == ROUNDS:
        stage, inputs = program.chunk, (state, runs.build_first_step_inputs())
    else:
        stage = program.server_stages[case.part]
        server = runs.build_keys(Stream.SERVER)
        cached = runs.cached_inputs
        inputs = (cached["hp"], state, server, jnp.int32(1), cached.get("server_examples"))
    return stage.program.lower(*_to_sharded_shapes(mesh, inputs))


def _to_sharded_shapes(mesh: Mesh, tree: Any) -> Any:
    """Return the shapes of arrays, sharded over `mesh` as the arrays are over their own."""

    def to_shape(leaf: Any) -> jax.ShapeDtypeStruct:
        old = getattr(leaf, "sharding", None)
        spec = old.spec if isinstance(old, NamedSharding) else PartitionSpec()
        is_weak, sharding = getattr(leaf, "weak_type", False), NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=is_weak)

    return jax.tree.map(to_shape, tree)

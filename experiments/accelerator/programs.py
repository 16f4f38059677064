"""The programs of real runs, lowered for devices that are described."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from fedjax_het import RunSpec
from fedjax_het.data import Dataset, dataset_from_arrays
from fedjax_het.engine.randomness import Stream
from fedjax_het.running.placement import Placement
from fedjax_het.running.prepare import prepare
from fedjax_het.running.programs import program_of
from fedjax_het.running.runs import gathered, state_shapes

ROUNDS = "rounds"  # a chunk of them, as one program
SHAPES = {"fashion_mnist": ((28, 28, 1), 60_000), "cifar10": ((32, 32, 3), 50_000)}


class Case(NamedTuple):
    """A program: of which run, in how many lanes, on how many devices."""

    method: str
    dataset: str
    lanes: int
    settings: dict[str, Any]
    part: str = ROUNDS  # or the name of work between rounds
    devices: int = 1
    client_state: str = "device"


_HET = {
    "partition": "dirichlet_balanced",
    "alpha": 0.01,
    "num_clients": 80,
    "participation": 0.4,
    "local_epochs": 1,
    "batch_size": 32,
    "rounds": 200,
}


def _fedavg(dataset: str, model: str, lanes: int, impl: str | None = None, **more: Any) -> Case:
    network = {"network_options": {"conv_impl": impl}} if impl else {}
    method, part = more.pop("method", "fedavg"), more.pop("part", ROUNDS)
    settings = {**_HET, "model": model, **network}
    return Case(method, dataset, lanes, settings, part, **more)


def _condensing(method: str, lanes: int, impl: str) -> Case:
    network = {"conv_impl": impl}
    settings = {"alpha": 0.02, "rounds": 20, "network_options": network}
    return Case(method, "cifar10", lanes, settings)


CASES = {
    "mlp-1": _fedavg("fashion_mnist", "mlp", 1),
    "mlp-32": _fedavg("fashion_mnist", "mlp", 32),
    "scaffold-mlp-32": _fedavg("fashion_mnist", "mlp", 32, method="scaffold"),
    "convnet-native-1": _fedavg("cifar10", "convnet", 1, "native"),
    "convnet-native-32": _fedavg("cifar10", "convnet", 32, "native"),
    "convnet-im2col-1": _fedavg("cifar10", "convnet", 1, "im2col"),
    "convnet-im2col-32": _fedavg("cifar10", "convnet", 32, "im2col"),
    "synthesis-mlp": _fedavg("fashion_mnist", "mlp", 4, method="dynafed", part="synthesis"),
    "synthesis-convnet": _fedavg(
        "cifar10", "convnet", 4, "im2col", method="dynafed", part="synthesis"
    ),
    "fedaf": _condensing("fedaf", 16, "im2col"),
    "feddm": _condensing("feddm", 16, "im2col"),
    "two-mlp": _fedavg("fashion_mnist", "mlp", 16, devices=2),
    "two-scaffold-mlp": _fedavg("fashion_mnist", "mlp", 16, method="scaffold", devices=2),
    "two-split-scaffold-mlp": _fedavg(
        "fashion_mnist", "mlp", 16, method="scaffold", devices=2, client_state="split"
    ),
    "two-synthesis-mlp": _fedavg(
        "fashion_mnist", "mlp", 4, method="dynafed", part="synthesis", devices=2
    ),
}


def small(case: Case) -> Case:
    """The same program of few clients, small images and a narrow network."""
    few = {"num_clients": 4, "participation": 0.5, "rounds": 2, "batch_size": 8, "width": 4}
    if case.settings.get("model") == "mlp":
        del few["width"]
    if "participation" not in case.settings:  # clients that condense
        few = {"num_clients": 4, "rounds": 2, "batch_size": 8, "width": 4}
    return case._replace(lanes=min(case.lanes, 2), settings={**case.settings, **few})


def blank_data(name: str, *, small: bool = False) -> Dataset:
    """Images of noise, as many and as large as those of the data set: programs read no more."""
    shape, count = SHAPES[name]
    if small:
        shape, count = (8, 8, shape[-1]), 2_400
    rng, tested = np.random.default_rng(0), count // 6 if small else 10_000
    images = rng.integers(0, 256, (count + tested, *shape), np.uint8)
    labels = np.arange(count + tested, dtype=np.int32) % 10
    return dataset_from_arrays(
        images[:count], labels[:count], images[count:], labels[count:], num_classes=10
    )


def lowered(case: Case, dataset: Dataset, devices: Sequence[jax.Device]) -> Any:
    """The case's program as jax lowers it for these devices, of which it takes the first."""
    spec = RunSpec(case.method, dataset=case.dataset, seed=0, **case.settings)
    placement = Placement(
        lanes=case.lanes, devices=case.devices, spread="lanes", client_state=case.client_state
    )
    if case.devices > 1:
        placement = dataclasses.replace(placement, server_work="shared")
    group = prepare([spec], dataset=dataset, placement=placement)
    here = group.plan
    assert here.mesh is not None
    mesh = Mesh(
        np.array(devices[: case.devices]),
        here.mesh.axis_names,
        axis_types=(jax.sharding.AxisType.Auto,),
    )
    program = program_of(group.program.signature, here._replace(mesh=mesh))
    source = dataclasses.replace(group.source, plan=here)
    group = dataclasses.replace(group, source=source)
    runs = gathered(group, group.federations)
    state = state_shapes(runs)
    inputs: tuple
    if case.part == ROUNDS:
        work, inputs = program.chunk, (state, runs.first_step())
    else:
        work = program.host_work[case.part]
        server = runs.keys(Stream.SERVER)
        inputs = (runs.kept["hp"], state, server, jnp.int32(1), runs.kept.get("server"))
    return work.program.lower(*_on(mesh, inputs))


def _on(mesh: Mesh, tree: Any) -> Any:
    """Shapes of arrays, spread over this mesh as they are over their own."""

    def one(leaf: Any) -> jax.ShapeDtypeStruct:
        own = getattr(leaf, "sharding", None)
        spec = own.spec if isinstance(own, NamedSharding) else PartitionSpec()
        weak = getattr(leaf, "weak_type", False)
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding, weak_type=weak)

    return jax.tree.map(one, tree)

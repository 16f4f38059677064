"""Where lanes run: how many devices, how many lanes on each."""

from typing import NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

AXIS = "lanes"


class Plan(NamedTuple):
    """A performance choice only: results do not depend on it beyond rounding.

    `mesh` has one axis, over which the lanes are sharded; with `None` the devices' blocks are
    worked through in turn on the default device (the reference that the tests compare with).
    """

    devices: int
    lanes: int  # per device: 1 is one flat lane, more are vmapped
    mesh: Mesh | None

    def describe(self) -> str:
        devices = jax.devices() if self.mesh is None else self.mesh.devices.flat
        how = "one flat lane each" if self.lanes == 1 else f"{self.lanes} vmapped lanes each"
        return f"{self.devices} x {devices[0].device_kind}, {how}"

    def replicated(self):
        return None if self.mesh is None else NamedSharding(self.mesh, PartitionSpec())

    def put(self, tree):
        """Copy a pytree to every device of the plan."""
        return jax.device_put(tree, self.replicated())


def make_plan(lanes: int = 1, devices: int | None = None, *, sharded: bool = True) -> Plan:
    """A plan of `lanes` lanes on each of `devices` devices (default: all of them)."""
    devices = devices or len(jax.devices())
    mesh = None
    if sharded:
        mesh = jax.make_mesh(
            (devices,),
            (AXIS,),
            axis_types=(jax.sharding.AxisType.Auto,),
            devices=jax.devices()[:devices],
        )
    return Plan(devices, lanes, mesh)

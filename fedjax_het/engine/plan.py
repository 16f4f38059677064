"""Where things run: the lanes of a federation, and several federations, on the devices."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_het.common.arrays import bits, host_values, is_key, with_bits
from fedjax_het.engine.sharing import ALONE, Sharing, once_known
from fedjax_het.engine.stretches import BLOCKS, TURNS, across

AXIS = "lanes"
RUNS = "runs"

# What an argument of a mapped function is to the federations, see `Plan.over_runs`.
RUN, DEVICE, SHARED = "one per federation", "one per device", "the same for all"
BLOCK = "one per block of lanes"
CLIENT = "one per client"


class Plan(NamedTuple):
    """A performance choice only: results do not depend on it beyond rounding.

    A federation's clients are packed onto `blocks` times `lanes` lanes. The mesh's one axis says
    what is spread over the devices:

    * "lanes": one federation, a block of its lanes on each device;
    * "runs": `width` federations on each device, each of which goes through its blocks in turn
      where it lives, so that devices need not wait for each other;
    * no mesh: one federation on the default device, block by block (what tests compare with).

    The blocks' sums are added in the same order everywhere, which is why `blocks` stays as it is
    when a federation moves from all devices to one.
    """

    blocks: int
    lanes: int  # per block: 1 is one flat lane, more are vmapped
    mesh: Mesh | None
    width: int = 1  # vmapped federations per device
    shares_server: bool = False  # whether devices that share a federation share its server's work
    splits_clients: bool = False  # whether each of them holds the states of a part of its clients

    @property
    def spreads(self) -> str | None:
        """The mesh's axis: "lanes", "runs" or None."""
        return None if self.mesh is None else self.mesh.axis_names[0]

    @property
    def devices(self) -> list[jax.Device]:
        """All of them; without a mesh the default one."""
        return jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        """Of its devices: "cpu", "gpu" or "tpu". Programs ask for this, not for the process's
        backend, so that they are the same where they are compiled for devices that are described.
        """
        return self.devices[0].platform

    @property
    def capacity(self) -> int:
        """Federations that run at once."""
        if self.mesh is None or self.spreads != RUNS:
            return 1
        return self.mesh.size * self.width

    @property
    def in_step(self) -> bool:
        """Whether several lanes or federations go through the same segments."""
        return self.lanes > 1 or self.width > 1

    def describe(self) -> str:
        devices = self.devices
        lanes = "one flat lane" if self.lanes == 1 else f"{self.lanes} vmapped lanes"
        each = "each" if self.spreads == AXIS else f"in {self.blocks} turns"
        federations = "" if self.spreads != RUNS else "a federation on each, "
        if self.width > 1:
            federations = f"{self.width} vmapped federations on each, "
        server = ", the server's work shared" if self.sharing.axis else ""
        return f"{len(devices)} x {devices[0].device_kind}, {federations}{lanes} {each}{server}"

    def put(self, tree: Any, kind: str = SHARED) -> Any:
        """Place a pytree: whole on every device, or its leading axis spread over the devices.

        `kind` says what that axis counts: federations (RUN); blocks (BLOCK), which are spread only
        where the blocks are; or clients (CLIENT), where their states are split. With several
        processes every one of them holds the same values and places its part.
        """
        sharding = self.sharding(kind)
        if self.mesh is None or sharding is None or not self.mesh.is_multi_process:
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda leaf: _put_global(leaf, sharding), tree)

    def sharding(self, kind: str = SHARED) -> NamedSharding | None:
        """How `put` spreads what is of this kind; None without a mesh."""
        if self.mesh is None:
            return None
        of_clients = AXIS if self.splits_clients else None
        axes = {SHARED: None, RUN: RUNS, DEVICE: RUNS, BLOCK: AXIS, CLIENT: of_clients}
        spread = axes[kind]
        return NamedSharding(self.mesh, P(spread) if spread == self.spreads else P())

    @property
    def holds_all_clients(self) -> "Plan":
        """The same for states of clients that are whole on every device."""
        return self._replace(splits_clients=False)

    def with_clients(self, state: Any, place: Callable[[Any, str], Any]) -> Any:
        """A `State` of one federation, `place(tree, kind)` of its parts."""
        rest = place(state._replace(clients=()), SHARED)
        return rest._replace(clients=place(state.clients, CLIENT))

    def hold(self, tree: Any, kind: str = SHARED) -> Any:
        """A traced pytree, to be left as `put` places it where lanes are on several devices: else
        XLA may spread what all hold, by collectives of its own."""
        if self.mesh is None or self.spreads != AXIS:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.sharding(kind))

    def over_runs(self, function: Callable, kinds: tuple) -> Callable:
        """`function` of one federation -> the same for all that run at once.

        `kinds` says for every argument, or for parts of one, whether it is given once per
        federation (a leading axis), once per device, or shared. Where federations are vmapped, what
        is given per device stays free of their axis: loops that depend on it run in step. With
        lanes spread over the devices there is one federation, and nothing to map.
        """
        if self.spreads != RUNS:
            return function
        specs = jax.tree.map(lambda kind: P() if kind == SHARED else P(RUNS), kinds)
        axes = jax.tree.map(lambda kind: 0 if kind == RUN else None, kinds)
        single = {DEVICE} if self.width > 1 else {DEVICE, RUN}

        def first(kind, tree):
            return jax.tree.map(lambda a: a[0], tree) if kind in single else tree

        def on_device(*args):
            args = jax.tree.map(first, kinds, args)
            if self.width > 1:
                return jax.vmap(function, in_axes=axes)(*args)
            return jax.tree.map(lambda a: a[None], function(*args))

        return jax.shard_map(
            on_device, mesh=self.mesh, in_specs=specs, out_specs=P(RUNS), check_vma=False
        )

    def sum_over_blocks(self, function: Callable, shared: tuple, parts: Any) -> jax.Array:
        """Sum of `function(*shared, part)`, an array, over the blocks, which are the leading axis
        of `parts`: each where it is placed. One collective where blocks are on several devices."""
        turns = len(jax.tree.leaves(parts)[0])
        if self.spreads != AXIS:

            def in_turn(run, spans, carried):
                return jax.lax.map(lambda given: run(spans, *given), (carried, parts))

            return across(in_turn, lambda part: function(*shared, part), TURNS, turns).sum(0)

        def sharded(shared, parts):
            own = jax.tree.map(lambda a: a[0], parts)
            return jax.lax.psum(function(*shared, own), AXIS)

        def on_devices(run, spans, carried):
            return jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=(P(), P(AXIS), P(), P(AXIS)),
                out_specs=(P(), P(AXIS), P()),
                check_vma=False,
            )(spans, carried, shared, parts)

        return across(on_devices, sharded, BLOCKS, turns)

    @property
    def sharing(self) -> Sharing:
        """How the server's work is shared."""
        if self.mesh is None or self.spreads != AXIS or not self.shares_server:
            return ALONE
        return Sharing(AXIS, self.mesh.size) if self.mesh.size > 1 else ALONE

    def shared(self, work: Callable[..., Any], *args: Any) -> Any:
        """`work(sharing, *args)`, work at the server on what all devices hold; see `Sharing`.

        Where devices do not share it, each does all of it. `work` must not close over traced
        arrays.
        """
        sharing = self.sharing
        if sharing.axis is None:
            return across(lambda run, *given: run(*given, *args), functools.partial(work, sharing))

        def on_devices(run, *given):
            return jax.shard_map(run, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)(
                *given, *args
            )

        return across(on_devices, functools.partial(work, sharing))

    def agreed(self, count: int) -> int:
        """The first process's number, where all processes enter the same programs."""
        if self.spreads == RUNS or self.mesh is None or not self.mesh.is_multi_process:
            return count
        from jax.experimental import multihost_utils

        return int(multihost_utils.broadcast_one_to_all(np.int32(count)))

    def once_known(self, signal: jax.Array, number: jax.Array | int) -> jax.Array | int:
        """`number`, ordered by `sharing.once_known` where lanes are on several devices."""
        return number if self.spreads != AXIS else once_known(signal, number)


def make_plan(
    lanes: int = 1,
    devices: int | Sequence[jax.Device] | None = None,
    *,
    spread: str | None = AXIS,
    blocks: int | None = None,
    width: int = 1,
    shares_server: bool = False,
) -> Plan:
    """A plan of `lanes` lanes in each of `blocks` blocks (default: as many as devices).

    Args:
      devices: which, or how many of the first (default: all).
      spread: "lanes" or "runs" over the devices; None for neither.
    """
    if not isinstance(devices, Sequence):
        devices = jax.devices()[: devices or len(jax.devices())]
    blocks = blocks or len(devices)
    auto = (jax.sharding.AxisType.Auto,)
    mesh = None if spread is None else Mesh(np.asarray(devices), (spread,), axis_types=auto)
    return Plan(blocks, lanes, mesh, width, shares_server)


def _put_global(leaf: Any, sharding: NamedSharding) -> jax.Array:
    values = host_values(leaf)
    if is_key(values):
        return with_bits(_put_global(bits(values), sharding), values)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

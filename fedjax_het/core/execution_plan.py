"""Where things run: the lanes of a federation, and several federations, on the devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fedjax_het.core.resumable_loops import BLOCKS, TURNS, WHOLE_LOOPS, LoopRunner
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism, order_after
from fedjax_het.utils.arrays import fetch_to_host, from_numpy_bits, is_prng_key, to_numpy_bits

LANES_AXIS = "lanes"
RUNS_AXIS = "runs"

# What an argument of a mapped function is to the federations, see `ExecutionPlan.map_runs`.
PER_RUN, PER_DEVICE, REPLICATED = "one per federation", "one per device", "the same for all"
PER_BLOCK = "one per block of lanes"
PER_CLIENT = "one per client"


class ExecutionPlan(NamedTuple):
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
    num_parallel: int = 1  # vmapped federations per device
    has_sharded_server: bool = (
        False  # whether devices that share a federation share its server's work
    )
    has_sharded_client_states: bool = (
        False  # whether each of them holds the states of a part of its clients
    )
    is_debug: bool = False
    """Whether programs run without jit: operation by operation, client by client, with values that
    a method's functions can print and test. Requires one lane and no mesh."""

    def eval_shape(self, function: Callable, *args: Any) -> Any:
        """Return the result of `function(*args)` as shapes; in debug mode with values."""
        return function(*args) if self.is_debug else jax.eval_shape(function, *args)

    @property
    def mesh_axis(self) -> str | None:
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
    def max_parallel_runs(self) -> int:
        """Federations that run at once."""
        if self.mesh is None or self.mesh_axis != RUNS_AXIS:
            return 1
        return self.mesh.size * self.num_parallel

    @property
    def is_lockstep(self) -> bool:
        """Whether several lanes or federations go through the same segments."""
        return self.lanes > 1 or self.num_parallel > 1

    def describe(self) -> str:
        devices = self.devices
        lanes_text = "one flat lane" if self.lanes == 1 else f"{self.lanes} vmapped lanes"
        block_text = "each" if self.mesh_axis == LANES_AXIS else f"in {self.blocks} turns"
        runs_text = "" if self.mesh_axis != RUNS_AXIS else "a federation on each, "
        if self.num_parallel > 1:
            runs_text = f"{self.num_parallel} vmapped federations on each, "
        server_text = ", the server's work shared" if self.server_parallelism.axis else ""
        return f"{len(devices)} x {devices[0].device_kind}, {runs_text}{lanes_text} {block_text}{server_text}"

    def put(self, tree: Any, placement: str = REPLICATED) -> Any:
        """Place a pytree: whole on every device, or its leading axis spread over the devices.

        `kind` says what that axis counts: federations (RUN); blocks (BLOCK), which are spread only
        where the blocks are; or clients (CLIENT), where their states are split. With several
        processes every one of them holds the same values and places its part.
        """
        sharding = self.sharding(placement)
        if self.mesh is None or sharding is None or not self.mesh.is_multi_process:
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda leaf: _put_on_all_processes(leaf, sharding), tree)

    def sharding(self, placement: str = REPLICATED) -> NamedSharding | None:
        """How `put` spreads what is of this kind; None without a mesh."""
        if self.mesh is None:
            return None
        client_axis = LANES_AXIS if self.has_sharded_client_states else None
        axis_by_placement = {
            REPLICATED: None,
            PER_RUN: RUNS_AXIS,
            PER_DEVICE: RUNS_AXIS,
            PER_BLOCK: LANES_AXIS,
            PER_CLIENT: client_axis,
        }
        axis = axis_by_placement[placement]
        return NamedSharding(self.mesh, P(axis) if axis == self.mesh_axis else P())

    @property
    def with_replicated_client_states(self) -> "ExecutionPlan":
        """The same for states of clients that are whole on every device."""
        return self._replace(has_sharded_client_states=False)

    def map_state(self, state: Any, place_tree: Callable[[Any, str], Any]) -> Any:
        """A `State` of one federation, `place(tree, kind)` of its parts."""
        placed_state = place_tree(state._replace(clients=()), REPLICATED)
        return placed_state._replace(clients=place_tree(state.clients, PER_CLIENT))

    def constrain_sharding(self, tree: Any, placement: str = REPLICATED) -> Any:
        """A traced pytree, to be left as `put` places it where lanes are on several devices: else
        XLA may spread what all hold, by collectives of its own."""
        if self.mesh is None or self.mesh_axis != LANES_AXIS:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.sharding(placement))

    def map_runs(self, function: Callable, placements: tuple) -> Callable:
        """`function` of one federation -> the same for all that run at once.

        `kinds` says for every argument, or for parts of one, whether it is given once per
        federation (a leading axis), once per device, or shared. Where federations are vmapped, what
        is given per device stays free of their axis: loops that depend on it run in step. With
        lanes spread over the devices there is one federation, and nothing to map.
        """
        if self.mesh_axis != RUNS_AXIS:
            return function
        specs = jax.tree.map(
            lambda placement: P() if placement == REPLICATED else P(RUNS_AXIS), placements
        )
        axes = jax.tree.map(lambda placement: 0 if placement == PER_RUN else None, placements)
        squeezed_placements = {PER_DEVICE} if self.num_parallel > 1 else {PER_DEVICE, PER_RUN}

        def squeeze_leading_axis(placement, tree):
            return jax.tree.map(lambda a: a[0], tree) if placement in squeezed_placements else tree

        def on_device(*args):
            args = jax.tree.map(squeeze_leading_axis, placements, args)
            if self.num_parallel > 1:
                return jax.vmap(function, in_axes=axes)(*args)
            return jax.tree.map(lambda a: a[None], function(*args))

        return jax.shard_map(
            on_device, mesh=self.mesh, in_specs=specs, out_specs=P(RUNS_AXIS), check_vma=False
        )

    def map_blocks(
        self,
        loops: LoopRunner,
        function: Callable,
        inputs: Any,
        block_args: Any,
        *,
        input_specs: Any = P(),
        output_specs: Any = P(),
    ) -> Any:
        """Call a function for every block of lanes: each on its device, or one after another.

        Args:
          loops: runs the long loops of the function.
          function: `function(loops, inputs, args)` of one block; on several devices its results are
            values that collectives have made the same everywhere, or as `output_specs` says.
          inputs: a tree of arrays that all blocks read.
          block_args: a tree of arrays with a leading axis of blocks.
          input_specs: how `inputs` are spread over several devices.
          output_specs: how the results are spread over several devices.

        Returns:
          The results of the function; with a leading axis of blocks where they run in turn.
        """
        num_blocks = len(jax.tree.leaves(block_args)[0])
        if self.mesh_axis != LANES_AXIS:

            def run_in_turn(run, spans, carries):
                return jax.lax.map(lambda block: run(spans, *block), (carries, block_args))

            def run_block(loops, args):
                return function(loops, inputs, args)

            return loops.map(run_in_turn, run_block, TURNS, num_blocks)

        def run_on_devices(run, spans, carries):
            return jax.shard_map(
                run,
                mesh=self.mesh,
                in_specs=(P(), P(LANES_AXIS), input_specs, P(LANES_AXIS)),
                out_specs=(output_specs, P(LANES_AXIS), P()),
                check_vma=False,
            )(spans, carries, inputs, block_args)

        def run_on_device(loops, inputs, args):
            return function(loops, inputs, jax.tree.map(lambda a: a[0], args))

        return loops.map(run_on_devices, run_on_device, BLOCKS, num_blocks)

    def sum_over_blocks(self, function: Callable, inputs: tuple, block_args: Any) -> jax.Array:
        """Sum an array over the blocks of lanes, each computed where it is placed.

        Args:
          function: `function(*inputs, args)` returns the array of one block.
          inputs: arguments that are whole on every device.
          block_args: a tree of arrays with a leading axis of blocks.

        Returns:
          The sum. It costs one collective where blocks are on several devices.
        """

        def call_function(loops: LoopRunner, *args: Any) -> jax.Array:
            return function(*args)

        return self.sum_loops_over_blocks(WHOLE_LOOPS, call_function, inputs, block_args)

    def sum_loops_over_blocks(
        self, loops: LoopRunner, function: Callable, inputs: tuple, block_args: Any
    ) -> jax.Array:
        """Sum an array over the blocks of lanes, computed by a function with long loops.

        Args:
          loops: runs the long loops of the round.
          function: `function(loops, *inputs, args)` returns the array of one block.
          inputs: arguments that are whole on every device.
          block_args: a tree of arrays with a leading axis of blocks.

        Returns:
          The sum. It costs one collective where blocks are on several devices.
        """
        is_spread = self.mesh_axis == LANES_AXIS

        def run_block(loops, inputs, args):
            block_value = function(loops, *inputs, args)
            return jax.lax.psum(block_value, LANES_AXIS) if is_spread else block_value

        values = self.map_blocks(loops, run_block, inputs, block_args)
        return values if is_spread else values.sum(0)

    @property
    def server_parallelism(self) -> ServerParallelism:
        """How the server's work is shared."""
        if self.mesh is None or self.mesh_axis != LANES_AXIS or not self.has_sharded_server:
            return SINGLE_DEVICE
        return (
            ServerParallelism(LANES_AXIS, self.mesh.size) if self.mesh.size > 1 else SINGLE_DEVICE
        )

    def shard_server_work(
        self, function: Callable[..., Any], *args: Any, loops: LoopRunner = WHOLE_LOOPS
    ) -> Any:
        """Run work at the server on values that all devices hold.

        Args:
          function: `function(server_parallelism, *args)`, see `ServerParallelism`; it must not close
            over traced arrays. Where devices do not share the work, each does all of it.
          *args: trees of arrays.
          loops: runs the long loops of the work, within a round `Cohort.loops`. By default they are
            whole: in a resumable round they are then repeated in every call.

        Returns:
          The result of `function`.
        """

        def run_work(inner_loops: LoopRunner, *args: Any) -> Any:
            return function(self.server_parallelism._replace(loops=inner_loops), *args)

        if self.server_parallelism.axis is None:
            return loops.map(lambda run, *loop_args: run(*loop_args, *args), run_work)

        def map_devices(run, *loop_args):
            return jax.shard_map(run, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False)(
                *loop_args, *args
            )

        return loops.map(map_devices, run_work)

    def sync_across_processes(self, count: int) -> int:
        """The first process's number, where all processes enter the same programs."""
        if self.mesh_axis == RUNS_AXIS or self.mesh is None or not self.mesh.is_multi_process:
            return count
        from jax.experimental import multihost_utils

        return int(multihost_utils.broadcast_one_to_all(np.int32(count)))

    def order_after(self, signal: jax.Array, value: Any) -> Any:
        """Order a value after a signal where lanes are on several devices.

        Args:
          signal: a float that is never -inf.
          value: a tree of numbers, see `server_parallelism.order_after`.

        Returns:
          `value`, which is not known before `signal`.
        """
        return value if self.mesh_axis != LANES_AXIS else order_after(signal, value)


def make_execution_plan(
    lanes: int = 1,
    devices: int | Sequence[jax.Device] | None = None,
    *,
    mesh_axis: str | None = LANES_AXIS,
    blocks: int | None = None,
    num_parallel: int = 1,
    has_sharded_server: bool = False,
) -> ExecutionPlan:
    """A plan of `lanes` lanes in each of `blocks` blocks (default: as many as devices).

    Args:
      devices: which, or how many of the first (default: all).
      spread: "lanes" or "runs" over the devices; None for neither.
    """
    if not isinstance(devices, Sequence):
        devices = jax.devices()[: devices or len(jax.devices())]
    blocks = blocks or len(devices)
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = (
        None
        if mesh_axis is None
        else Mesh(np.asarray(devices), (mesh_axis,), axis_types=axis_types)
    )
    return ExecutionPlan(blocks, lanes, mesh, num_parallel, has_sharded_server)


def _put_on_all_processes(leaf: Any, sharding: NamedSharding) -> jax.Array:
    values = fetch_to_host(leaf)
    if is_prng_key(values):
        return from_numpy_bits(_put_on_all_processes(to_numpy_bits(values), sharding), values)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

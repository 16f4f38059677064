"""Placement of the lanes of a federation, and of several federations, on the devices."""

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

# Meaning of the leading axis of an argument of a mapped function, see `core.run_mapping`.
PER_RUN, PER_DEVICE, REPLICATED = "one per federation", "one per device", "the same for all"
PER_BLOCK = "one per block of lanes"
PER_CLIENT = "one per client"


class ExecutionPlan(NamedTuple):
    """Devices, blocks and lanes of runs. Results do not depend on it beyond rounding.

    A federation's clients are packed onto `blocks` times `lanes` lanes. The name of the mesh's
    single axis states the dimension that is spread over the devices:

    * "lanes": one federation, a block of its lanes on each device;
    * "runs": `num_parallel` federations on each device, each of which runs its blocks in turn
      where it is, so that devices need not wait for each other;
    * no mesh: one federation on the default device, block by block.

    The blocks' sums are added in one order everywhere, so `blocks` does not change when a
    federation moves from all devices to one.

    Example:
      >>> from fedjax_het.core.execution_plan import make_execution_plan
      >>> plan = make_execution_plan(lanes=4, devices=1)
      >>> plan.blocks, plan.lanes, plan.mesh_axis, plan.is_lockstep
      (1, 4, 'lanes', True)
    """

    blocks: int
    "Blocks of lanes, D."
    lanes: int
    "Lanes per block, V: 1 is one flat lane, more are vmapped."
    mesh: Mesh | None
    "The devices; None: the default device."
    num_parallel: int = 1
    "Vmapped federations per device."
    has_sharded_server: bool = False
    "Whether devices that share a federation share its server's work."
    has_sharded_client_states: bool = False
    "Whether each of these devices holds the states of a part of the clients."
    is_debug: bool = False
    """Whether programs run without jit: operation by operation, client by client, with values that
    a method's functions can print and test. Requires one lane and no mesh."""

    @property
    def mesh_axis(self) -> str | None:
        """The mesh's axis: "lanes", "runs" or None."""
        return None if self.mesh is None else self.mesh.axis_names[0]

    @property
    def devices(self) -> list[jax.Device]:
        """All devices; without a mesh the default one."""
        return jax.devices()[:1] if self.mesh is None else list(self.mesh.devices.flat)

    @property
    def platform(self) -> str:
        """The kind of its devices: "cpu", "gpu" or "tpu".

        Programs read it instead of the process's backend, so that they are equal where they are
        compiled for devices that are only described.
        """
        return self.devices[0].platform

    @property
    def is_lockstep(self) -> bool:
        """Whether several lanes or federations go through the same segments."""
        return self.lanes > 1 or self.num_parallel > 1

    @property
    def max_parallel_runs(self) -> int:
        """Number of federations that run at once."""
        if self.mesh is None or self.mesh_axis != RUNS_AXIS:
            return 1
        return self.mesh.size * self.num_parallel

    @property
    def server_parallelism(self) -> ServerParallelism:
        """How devices share the server's work."""
        is_spread = self.mesh_axis == LANES_AXIS and self.has_sharded_server
        if self.mesh is None or not is_spread or self.mesh.size == 1:
            return SINGLE_DEVICE
        return ServerParallelism(LANES_AXIS, self.mesh.size)

    def eval_shape(self, function: Callable, *args: Any) -> Any:
        """Evaluate a function abstractly; in debug mode with values.

        Args:
          function: the function.
          *args: its arguments.

        Returns:
          The result as shapes; in debug mode as values.
        """
        return function(*args) if self.is_debug else jax.eval_shape(function, *args)

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
            values that collectives have made equal everywhere, or as `output_specs` says.
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

    def sum_over_blocks(
        self,
        function: Callable,
        inputs: tuple,
        block_args: Any,
        *,
        loops: LoopRunner | None = None,
    ) -> jax.Array:
        """Sum an array over the blocks of lanes, each computed where it is placed.

        Args:
          function: `function(*inputs, args)` returns the array of one block; with `loops`
            `function(loops, *inputs, args)`.
          inputs: arguments that are whole on every device.
          block_args: a tree of arrays with a leading axis of blocks.
          loops: runs the long loops of the function, if it has any.

        Returns:
          The sum. It costs one collective where blocks are on several devices.
        """
        is_spread = self.mesh_axis == LANES_AXIS

        def run_block(block_loops, inputs, args):
            loop_args = () if loops is None else (block_loops,)
            value = function(*loop_args, *inputs, args)
            return jax.lax.psum(value, LANES_AXIS) if is_spread else value

        values = self.map_blocks(loops or WHOLE_LOOPS, run_block, inputs, block_args)
        return values if is_spread else values.sum(0)

    def shard_server_work(
        self, function: Callable[..., Any], *args: Any, loops: LoopRunner = WHOLE_LOOPS
    ) -> Any:
        """Run work at the server on values that all devices hold.

        Args:
          function: `function(server_parallelism, *args)`, see `ServerParallelism`; it must not
            close over traced arrays. If devices do not share the work, each device does all of it.
          *args: trees of arrays.
          loops: runs the long loops of the work, within a round `Cohort.loops`. By default they are
            whole: a resumable round then repeats them in every call.

        Returns:
          The result of `function`.
        """

        def run_work(loops: LoopRunner, *args: Any) -> Any:
            return function(self.server_parallelism._replace(loops=loops), *args)

        def map_devices(run, *loop_args):
            if self.server_parallelism.axis is not None:
                run = jax.shard_map(
                    run, mesh=self.mesh, in_specs=P(), out_specs=P(), check_vma=False
                )
            return run(*loop_args, *args)

        return loops.map(map_devices, run_work)

    def order_after(self, signal: jax.Array, value: Any) -> Any:
        """Order a value after a signal where lanes are on several devices.

        Args:
          signal: a float that is never -inf.
          value: a tree of numbers, see `server_parallelism.order_after`.

        Returns:
          `value`, which is not known before `signal`.
        """
        return value if self.mesh_axis != LANES_AXIS else order_after(signal, value)

    def sharding(self, placement: str = REPLICATED) -> NamedSharding | None:
        """Return how `put` spreads arrays with this placement; None without a mesh."""
        if self.mesh is None:
            return None
        axes = {PER_RUN: RUNS_AXIS, PER_DEVICE: RUNS_AXIS, PER_BLOCK: LANES_AXIS}
        if self.has_sharded_client_states:
            axes[PER_CLIENT] = LANES_AXIS
        axis = axes.get(placement)
        return NamedSharding(self.mesh, P(axis) if axis == self.mesh_axis else P())

    def put(self, tree: Any, placement: str = REPLICATED) -> Any:
        """Place arrays: whole on every device, or their leading axis spread over the devices.

        With several processes each of them holds the same values and places its part.

        Args:
          tree: a tree of arrays.
          placement: meaning of the leading axis: federations (PER_RUN), blocks (PER_BLOCK) or
            clients (PER_CLIENT). Arrays are spread only if the blocks, or the client states, are.

        Returns:
          The arrays on the devices.
        """
        sharding = self.sharding(placement)
        if self.mesh is None or sharding is None or not self.mesh.is_multi_process:
            return jax.device_put(tree, sharding)
        return jax.tree.map(lambda leaf: _put_on_all_processes(leaf, sharding), tree)

    def map_state(self, state: Any, place_tree: Callable[[Any, str], Any]) -> Any:
        """Place the parts of a `State` of one federation.

        Args:
          state: the state.
          place_tree: `place_tree(tree, placement)` places a part, for example `put`.

        Returns:
          The state.
        """
        placed_state = place_tree(state._replace(clients=()), REPLICATED)
        return placed_state._replace(clients=place_tree(state.clients, PER_CLIENT))

    def constrain_sharding(self, tree: Any, placement: str = REPLICATED) -> Any:
        """Keep traced arrays as `put` places them, where lanes are on several devices.

        Otherwise XLA may spread arrays that all devices hold, by collectives that it inserts.

        Args:
          tree: a tree of traced arrays.
          placement: meaning of the leading axis.

        Returns:
          The arrays.
        """
        if self.mesh is None or self.mesh_axis != LANES_AXIS:
            return tree
        return jax.lax.with_sharding_constraint(tree, self.sharding(placement))

    def sync_across_processes(self, count: int) -> int:
        """Return the first process's number, where all processes enter the same programs."""
        if self.mesh_axis == RUNS_AXIS or self.mesh is None or not self.mesh.is_multi_process:
            return count
        from jax.experimental import multihost_utils

        return int(multihost_utils.broadcast_one_to_all(np.int32(count)))


def make_execution_plan(
    lanes: int = 1,
    devices: int | Sequence[jax.Device] | None = None,
    *,
    mesh_axis: str | None = LANES_AXIS,
    blocks: int | None = None,
    num_parallel: int = 1,
    has_sharded_server: bool = False,
) -> ExecutionPlan:
    """Build a plan.

    Args:
      lanes: lanes per block.
      devices: the devices, or their number; default: all.
      mesh_axis: "lanes" or "runs", which are spread over the devices; None for neither.
      blocks: blocks of lanes; default: the number of devices.
      num_parallel: vmapped federations per device.
      has_sharded_server: whether the devices share the server's work.

    Returns:
      The plan.
    """
    if not isinstance(devices, Sequence):
        devices = jax.devices()[: devices or len(jax.devices())]
    mesh = None
    if mesh_axis is not None:
        axis_types = (jax.sharding.AxisType.Auto,)
        mesh = Mesh(np.asarray(devices), (mesh_axis,), axis_types=axis_types)
    return ExecutionPlan(blocks or len(devices), lanes, mesh, num_parallel, has_sharded_server)


def _put_on_all_processes(leaf: Any, sharding: NamedSharding) -> jax.Array:
    values = fetch_to_host(leaf)
    if is_prng_key(values):
        return from_numpy_bits(_put_on_all_processes(to_numpy_bits(values), sharding), values)
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])

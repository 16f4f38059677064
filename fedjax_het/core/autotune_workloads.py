"""Made-up work to time: clients that train or condense, and a server that trains."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.core.client_loop import Cohort, Examples, train_cohort
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.local_training import LocalTraining, ServerMessage, make_local_sgd
from fedjax_het.core.memory import get_compiled_bytes, lower_bound_bytes
from fedjax_het.core.optimizers import USER_OBJECT, LocalTrainingOptions, optimizer_hyperparameters
from fedjax_het.core.schedule import RoundSettings, Scheduler
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.core.server_training import train_on_server
from fedjax_het.core.task import Task
from fedjax_het.core.training_variants import with_plain_sgd
from fedjax_het.core.work_items import ClientWork
from fedjax_het.data import partition_from_clients
from fedjax_het.nn.model import Model
from fedjax_het.nn.precision import configure_compute
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.input_kinds import map_arrays

STEPS_PER_CLIENT = 8  # per client and timing
NUM_SERVER_STEPS = 2  # a step can take half a second
NUM_REPEATS = 3
MAX_REPEAT_SECONDS = 1.0  # a longer timing is not repeated


class Workload(NamedTuple):
    """The work to time: steps of clients that train, or of pairs that condense.

    Attributes:
      training: local training.
      batch_size: examples per step.
      label: the network, and everything else that a step's time depends on.
      inputs_per_pair: inputs that a pair of a client and a class condenses; None if clients train.
    """

    training: LocalTraining
    batch_size: int
    label: str
    inputs_per_pair: int | None = None

    def format_key(self, devices: Sequence[jax.Device]) -> str:
        """Return the row in the table of timings."""
        pairs = self.inputs_per_pair
        work = self.training.optimizer if pairs is None else f"pairs of {pairs}"
        return format_key(self.label, work, self.batch_size, devices, STEPS_PER_CLIENT)


def format_key(
    label: str, work: str | None, batch_size: int, devices: Sequence[jax.Device], num_steps: int
) -> str:
    """Return the row of a workload in the table of timings.

    Args:
      label: the network, and everything else that a step's time depends on.
      work: optimizer, or kind of the work.
      batch_size: examples per step.
      devices: devices that share the work.
      num_steps: steps of a timing.

    Returns:
      The row.
    """
    scale = f"batch {batch_size}|{len(devices)} devices|{num_steps} steps"
    return f"{jaxlib.__version__}|{label}|{work}|{scale}"


class WorkloadMemoryError(Exception):
    """A program needs more memory than there is.

    Attributes:
      needed_bytes: bytes that it needs on each device.
    """

    def __init__(self, needed_bytes: int):
        """Store the number of bytes."""
        super().__init__(f"{needed_bytes / 1e9:.2f} GB are needed")
        self.needed_bytes = needed_bytes


def time_client_step(
    workload: Workload,
    conv_impl: str,
    devices: Sequence[jax.Device],
    num_lanes: int,
    num_clients: int,
    free_bytes: int | None,
) -> float:
    """Time the step of a client.

    Cost: a compilation, and some calls.

    Args:
      workload: the work.
      conv_impl: implementation of convolutions that leave it open.
      devices: devices that share the clients.
      num_lanes: lanes on each device.
      num_clients: clients on each device; equal for all numbers of lanes, to be fair.
      free_bytes: free bytes on each device; None: unknown.

    Returns:
      Seconds of a device per step of a client.

    Raises:
      WorkloadMemoryError: if the program needs more memory, before it runs.
    """
    plan, batch_size = make_execution_plan(num_lanes, devices), workload.batch_size
    num_clients, samples_per_client = plan.blocks * num_clients, STEPS_PER_CLIENT * batch_size
    task = workload.training.task
    model = configure_compute(task.model, conv_impl=conv_impl)
    task = task._replace(model=model)
    indices = np.arange(num_clients * samples_per_client)
    partition = partition_from_clients(list(indices.reshape(num_clients, samples_per_client)))
    work = ClientWork(partition, 1, batch_size)
    scheduler = Scheduler(work, RoundSettings(seed=0), plan.blocks, num_lanes)
    hp: dict[str, Any] = {}
    if workload.inputs_per_pair is None:
        training = _with_default_options(workload.training._replace(task=task))
        client_algorithm = make_local_sgd(training)
        assert training.optimizer is not None
        for name, hyperparameter in optimizer_hyperparameters(training.optimizer).items():
            hp[name] = np.float32(hyperparameter.default)
    else:
        client_algorithm = _make_condensing_client(task, workload.inputs_per_pair)

    def train_clients(hp, variables, key, cohort):
        message = ServerMessage(variables)
        return train_cohort(client_algorithm, plan, hp, message, (), key, cohort).update

    variables = _make_variables(model)
    cohort = Cohort(scheduler.make_round(0), _make_examples(task, len(indices)))
    inputs = hp, variables, make_key(1), cohort
    program = jax.jit(train_clients)
    _require_memory(lower_bound_bytes(program.trace(*inputs).jaxpr), free_bytes)
    placed_inputs = plan.put(inputs)
    compiled = program.lower(*placed_inputs).compile()
    _require_memory(get_compiled_bytes(compiled), free_bytes)
    return _time_fastest_call(compiled, placed_inputs) / (num_clients * STEPS_PER_CLIENT)


def time_server_step(
    task: Task, batch_size: int, devices: Sequence[jax.Device], *, is_sharded: bool
) -> float:
    """Time a step of the server's training.

    Args:
      task: network and normalization.
      batch_size: samples per step.
      devices: the devices.
      is_sharded: whether the devices share each step; otherwise each does all of it.

    Returns:
      Seconds per step.
    """
    plan = make_execution_plan(1, devices, has_sharded_server=is_sharded)

    def train(server_parallelism: ServerParallelism, variables, examples, key):
        return train_on_server(
            task,
            variables,
            examples,
            key,
            batch_size=batch_size,
            lr=0.01,
            epochs=1,
            server_parallelism=server_parallelism,
        )

    variables = _make_variables(task.model)
    examples = jax.tree.map(jnp.asarray, _make_examples(task, NUM_SERVER_STEPS * batch_size))
    inputs = plan.put((variables, examples, make_key(1)))
    program = jax.jit(lambda *args: plan.shard_server_work(train, *args))
    return _time_fastest_call(program, inputs) / NUM_SERVER_STEPS


def _make_variables(model: Model) -> Any:
    """Return zeros of the shapes of a network's variables; to compile `init` takes a second."""
    shapes = jax.eval_shape(model.init, make_key(0))
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _make_examples(task: Task, count: int) -> Examples:
    rng, model = np.random.default_rng(0), task.model

    def make_array(shape: tuple[int, ...], num_tokens: int | None) -> np.ndarray:
        high, dtype = (256, np.uint8) if num_tokens is None else (num_tokens, np.int32)
        return rng.integers(0, high, (count, *shape), dtype)

    inputs = map_arrays(make_array, model.input_shape, model.num_tokens)
    high = model.num_classes if task.label_dtype == "int32" else 2
    labels = rng.integers(0, high, (count, *task.label_shape)).astype(task.label_dtype)
    return Examples(inputs, labels)


def _require_memory(needed_bytes: int, free_bytes: int | None) -> None:
    if free_bytes is not None and needed_bytes > free_bytes:
        raise WorkloadMemoryError(needed_bytes)


def _with_default_options(training: LocalTraining) -> LocalTraining:
    """Return local training without the run's own options, which cost a step little."""
    if training.optimizer == USER_OBJECT:
        return with_plain_sgd(training)
    return training._replace(keep_state=False, options=LocalTrainingOptions())


def _make_condensing_client(task: Task, inputs_per_pair: int) -> ClientAlgorithm:
    """Return a client that moves inputs towards a batch's mean embedding."""
    model, embed = task.model, task.model.embed
    assert embed is not None  # methods that condense require it

    def begin(context, state):
        return jax.random.normal(context.key, (inputs_per_pair, *model.input_shape))

    def step(context, local, batch):
        def mean(inputs):
            return embed(context.message.variables, inputs, train=False)[0].mean(0)

        real = mean(task.normalize(batch.inputs))
        value, gradient = jax.value_and_grad(lambda x: jnp.square(real - mean(x)).sum())(local)
        return local - gradient, value

    def end(context, local, state):
        return ClientUpdate(sum=local.sum()), state, ()

    return ClientAlgorithm(lambda hp, variables: (), begin, step, end)


def _time_fastest_call(program: Callable, inputs: tuple) -> float:
    """Return the seconds of the fastest of some calls, without the compilation."""
    call_seconds: list[float] = []
    jax.block_until_ready(program(*inputs))
    while len(call_seconds) < NUM_REPEATS and sum(call_seconds) < MAX_REPEAT_SECONDS:
        start = time.perf_counter()
        jax.block_until_ready(program(*inputs))
        call_seconds.append(time.perf_counter() - start)
    return min(call_seconds)

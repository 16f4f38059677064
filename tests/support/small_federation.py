"""Small problems that the engine's tests share."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import Algorithm, FederationData
from fedjax_het.core.client_loop import Cohort, Examples
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan, make_execution_plan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.optimizers import LocalTrainingOptions
from fedjax_het.core.schedule import RoundSettings, Scheduler, compute_cohort_size
from fedjax_het.core.task import Task
from fedjax_het.core.work_items import ClientClassWork, ClientWork
from fedjax_het.data import dataset_from_arrays, partition_from_clients
from fedjax_het.nn import Model
from fedjax_het.systems import AsynchronousSimulation, Federation, SystemModel, SystemSimulation
from support.data import (
    BATCH_SIZE,
    CLIENT_SIZES,
    NUM_CLASSES,
    SERVER_EXAMPLES,
    consecutive_partition,
    make_blobs,
)
from support.networks import make_linear_model


class SmallFederation(NamedTuple):
    """A federation on `blobs`, driven by hand."""

    algorithm: Algorithm
    scheduler: Scheduler
    examples: Examples
    task: Task
    hp: dict
    server: Examples
    inputs: dict
    data: tuple[np.ndarray, np.ndarray]  # what clients train on: images, labels
    sizes: tuple[int, ...]  # of the clients
    averaging: str

    @property
    def num_clients(self):
        return len(self.sizes)

    def initial_state(self, seed=0):
        variables = self.task.model.init(jax.random.key(seed))
        return self.algorithm.init(self.hp, jax.random.key(seed), variables, self.num_clients)

    def cohort(self, r):
        """What a round reads besides the state."""
        return Cohort(self.scheduler.make_round(r), self.examples, self.server, self.inputs)

    def run(self, rounds, state=None):
        state = self.initial_state() if state is None else state
        run_round = jax.jit(self.algorithm.round)
        for r in range(rounds):
            state, info = run_round(self.hp, state, round_key(r), self.cohort(r))
        return state, info

    def global_params(self, state):
        """The global model's weights; of a method without one, the weights of all clients."""
        if self.algorithm.global_model is None:
            models = [self.personal_model(state, k) for k in range(self.num_clients)]
            return jax.tree.map(lambda *leaves: np.stack(leaves), *models)
        return jax.tree.map(np.asarray, self.algorithm.global_model(state)["params"])

    def train(self, rounds, state=None):
        """The global model's weights after so many rounds."""
        return self.global_params(self.run(rounds, state)[0])

    def personal_model(self, state, k):
        """The weights of the model that client k's own test is for."""
        get_model = self.algorithm.personal_variables
        if get_model is None and self.algorithm.global_model is None:
            variables = get_client_row(state.clients.variables, k)
        elif get_model is None:
            variables = self.algorithm.global_model(state)
        else:
            variables = get_model(self.hp, state, k)
        return jax.tree.map(np.asarray, variables["params"])


def round_key(r):
    """A round's key in `SmallFederation.run`."""
    return jax.random.fold_in(jax.random.key(7), r)


def step_key(r, client, number):
    """The key of a client's step in it."""
    return jax.random.fold_in(jax.random.fold_in(round_key(r), client), number)


@dataclass(frozen=True)
class FederationSetting:
    """A small problem: the examples of each client, and settings of local training.

    Attributes:
      data: images and labels, dealt one client after the other (default: `blobs(sizes)`).
      server: the server's examples, and epochs over them of a method that asks how many.
      keep: whether clients keep their optimiser's state.
      client_test_model: the model that clients' own tests are for.
      details: of local training besides; with `steps` in place of the epochs.
      systems: kinds of system heterogeneity.
    """

    plan: ExecutionPlan = field(default_factory=lambda: make_execution_plan(1, 1, mesh_axis=None))
    model: Model = field(default_factory=make_linear_model)
    sizes: tuple[int, ...] = CLIENT_SIZES
    data: tuple[np.ndarray, np.ndarray] | None = None
    server: tuple[tuple[np.ndarray, np.ndarray], int] = (SERVER_EXAMPLES, 2)
    optimizer: str = "sgd"
    keep: bool = False
    epochs: int = 1
    batch_size: int = BATCH_SIZE
    participation: float = 1.0
    averaging: str = "uniform"
    rounds: int = 20
    seed: int = 0
    client_test_model: str = "global"
    details: LocalTrainingOptions = LocalTrainingOptions()
    systems: tuple[SystemModel, ...] = ()

    def client_data(self, algorithm):
        """-> (images, labels, partition), with the server's examples where clients hold them."""
        images, labels = make_blobs(self.sizes) if self.data is None else self.data
        partition = consecutive_partition(self.sizes)
        if not algorithm.trains_on_server_data:
            return images, labels, partition
        server_indices = len(labels) + np.arange(len(self.server[0][1]))
        parts = map(partition.client_indices, self.clients)
        clients = [np.concatenate([part, server_indices]) for part in parts]
        data_pairs = zip((images, labels), self.server[0], strict=True)
        return *map(np.concatenate, data_pairs), partition_from_clients(clients)

    @property
    def clients(self):
        return range(len(self.sizes))

    def scheduler(self, algorithm, partition, labels):
        if algorithm.condensation_work is None:
            steps = self.details.num_steps
            passes = algorithm.extra_passes + (self.epochs if steps is None else 0)
            units = ClientWork(partition, passes, self.batch_size, extra_batches=steps or 0)
        else:
            units = ClientClassWork(
                partition, labels, NUM_CLASSES, algorithm.condensation_work, self.batch_size
            )
        settings = RoundSettings(self.seed, self.rounds, self.participation, self.averaging)
        has_plans = self.systems or algorithm.asynchronous is not None
        plans = self.plan_rounds(units, algorithm) if has_plans else None
        return Scheduler(units, settings, self.plan.blocks, self.plan.lanes, plans)

    def plan_rounds(self, work, algorithm):
        cohort_size = compute_cohort_size(len(self.sizes), self.participation)
        federation = Federation(np.array(self.sizes), cohort_size, self.seed, self.seed)
        simulation = (
            SystemSimulation(self.systems, federation)
            if algorithm.asynchronous is None
            else AsynchronousSimulation(
                self.systems, federation, **algorithm.asynchronous._asdict()
            )
        )
        get_workload = lambda r: work.make_workload(algorithm.extra_passes)  # noqa: E731
        return list(simulation.simulate_rounds(get_workload, self.rounds))


def make_full_pass_scheduler(plan: ExecutionPlan) -> Scheduler:
    """The schedule of a survey: all clients, weighted by their examples, each once through."""
    settings = RoundSettings(seed=0, averaging="weighted")
    units = ClientWork(consecutive_partition(), 1, BATCH_SIZE)
    return Scheduler(units, settings, plan.blocks, plan.lanes)


def make_small_federation(build, *, hp, **settings) -> SmallFederation:
    """`build(training, plan) -> Algorithm` with these numbers, on a `FederationSetting`."""
    setting_values = {name: value for name, value in settings.items() if value is not None}
    setting = FederationSetting(**setting_values)
    task = Task(setting.model, (0.0,), (1.0,))
    local = (
        setting.optimizer,
        setting.epochs,
        setting.keep,
        setting.batch_size,
        setting.client_test_model,
    )
    algorithm = build(LocalTraining(task, *local, options=setting.details), setting.plan)
    images, labels, partition = setting.client_data(algorithm)
    put_on_devices = setting.plan.put
    server = Examples(*map(jnp.asarray, setting.server[0]))
    num_classes = task.model.num_classes
    dataset = dataset_from_arrays(images, labels, images, labels, num_classes=num_classes)
    federation_data = FederationData(dataset, partition, server, setting.epochs, setting.seed)
    inputs = {
        required_input.name: put_on_devices(required_input.make_inputs([federation_data])[0])
        for required_input in algorithm.round_inputs
    }
    if "server_epochs" in inputs:
        inputs["server_epochs"] = jnp.int32(setting.server[1])
    return SmallFederation(
        algorithm,
        setting.scheduler(algorithm, partition, labels),
        put_on_devices(Examples(jnp.asarray(images), jnp.asarray(labels))),
        task,
        {name: jnp.float32(value) for name, value in {"server_lr": 1.0, **hp}.items()},
        put_on_devices(server),
        inputs,
        (images, labels),
        setting.sizes,
        setting.averaging,
    )

"""Small problems that the engine's tests share."""

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.contract import Algorithm, Holdings
from fedjax_het.data import dataset_from_arrays, partition_from_clients
from fedjax_het.engine.lanes import Cohort, Examples
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.optimizers import Details
from fedjax_het.engine.plan import Plan, make_plan
from fedjax_het.engine.schedule import Scheduler
from fedjax_het.engine.task import Task
from fedjax_het.engine.units import ClientUnits, PairUnits
from fedjax_het.nn import Model
from support.data import BATCH, CLASSES, SERVER, SIZES, blobs, consecutive
from support.networks import linear_model


class Small(NamedTuple):
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

    def start(self, seed=0):
        variables = self.task.model.init(jax.random.key(seed))
        return self.algorithm.init(self.hp, jax.random.key(seed), variables, self.num_clients)

    def cohort(self, r):
        """What a round reads besides the state."""
        return Cohort(self.scheduler.round(r), self.examples, self.server, self.inputs)

    def run(self, rounds, state=None):
        state = self.start() if state is None else state
        one = jax.jit(self.algorithm.round)
        for r in range(rounds):
            state, info = one(self.hp, state, round_key(r), self.cohort(r))
        return state, info

    def model(self, state):
        """The global model's weights; of a method without one, those of all clients."""
        own = self.algorithm.global_model is None
        variables = state.clients.variables if own else self.algorithm.global_model(state)
        return jax.tree.map(np.asarray, variables["params"])

    def personal(self, state, k):
        """The weights of the model that client k's own test is for."""
        personal = self.algorithm.personal
        variables = personal(self.hp, state, k) if personal else self.algorithm.global_model(state)
        return jax.tree.map(np.asarray, variables["params"])


def round_key(r):
    """A round's key in `Small.run`."""
    return jax.random.fold_in(jax.random.key(7), r)


def step_key(r, client, number):
    """The key of a client's step in it."""
    return jax.random.fold_in(jax.random.fold_in(round_key(r), client), number)


@dataclass(frozen=True)
class Setting:
    """A small problem: who holds what, and how it is trained on.

    Attributes:
      data: images and labels, dealt one client after the other (default: `blobs(sizes)`).
      server: the server's examples, and epochs over them of a method that asks how many.
      keep: whether clients keep their optimiser's state.
      scored: the model that clients' own tests are for.
      details: of local training besides; with `steps` in place of the epochs.
    """

    plan: Plan = field(default_factory=lambda: make_plan(1, 1, spread=None))
    model: Model = field(default_factory=linear_model)
    sizes: tuple[int, ...] = SIZES
    data: tuple[np.ndarray, np.ndarray] | None = None
    server: tuple[tuple[np.ndarray, np.ndarray], int] = (SERVER, 2)
    optimizer: str = "sgd"
    keep: bool = False
    epochs: int = 1
    batch_size: int = BATCH
    participation: float = 1.0
    averaging: str = "uniform"
    rounds: int = 20
    seed: int = 0
    scored: str = "global"
    details: Details = Details()

    def held(self, algorithm):
        """-> (images, labels, partition), with the server's examples where clients hold them."""
        images, labels = blobs(self.sizes) if self.data is None else self.data
        partition = consecutive(self.sizes)
        if not algorithm.shares_server_data:
            return images, labels, partition
        added = len(labels) + np.arange(len(self.server[0][1]))
        clients = [np.concatenate([part, added]) for part in map(partition.client, self.clients)]
        both = zip((images, labels), self.server[0], strict=True)
        return *map(np.concatenate, both), partition_from_clients(clients)

    @property
    def clients(self):
        return range(len(self.sizes))

    def scheduler(self, algorithm, partition, labels):
        if algorithm.pairs is None:
            steps = self.details.steps
            passes = algorithm.extra_passes + (self.epochs if steps is None else 0)
            units = ClientUnits(partition, passes, self.batch_size, further=steps or 0)
        else:
            units = PairUnits(partition, labels, CLASSES, algorithm.pairs, self.batch_size)
        return Scheduler(
            partition,
            units,
            seed=self.seed,
            rounds=self.rounds,
            participation=self.participation,
            averaging=self.averaging,
            eval_every=1,
            blocks=self.plan.blocks,
            lanes=self.plan.lanes,
        )


def everyone(plan: Plan, *, sizes=SIZES):
    """The schedule of a survey: all clients, weighted by their examples, each once through."""
    return survey_scheduler(plan, sizes=sizes).round(0)


def survey_scheduler(plan: Plan, *, sizes=SIZES) -> Scheduler:
    partition = consecutive(sizes)
    return Scheduler(
        partition,
        ClientUnits(partition, 1, BATCH),
        seed=0,
        rounds=1,
        participation=1.0,
        averaging="weighted",
        eval_every=1,
        blocks=plan.blocks,
        lanes=plan.lanes,
    )


def small(build, *, hp, **settings) -> Small:
    """`build(training, plan) -> Algorithm` with these numbers, on a `Setting`."""
    given = {name: value for name, value in settings.items() if value is not None}
    setting = Setting(**given)
    task = Task(setting.model, (0.0,), (1.0,))
    local = (setting.optimizer, setting.epochs, setting.keep, setting.batch_size, setting.scored)
    algorithm = build(LocalTraining(task, *local, details=setting.details), setting.plan)
    images, labels, partition = setting.held(algorithm)
    place = setting.plan.put
    server = Examples(*map(jnp.asarray, setting.server[0]))
    dataset = dataset_from_arrays(
        images, labels, images, labels, num_classes=task.model.num_classes
    )
    held = Holdings(dataset, partition, server, setting.epochs, setting.seed)
    inputs = {need.name: place(need.make([held])[0]) for need in algorithm.inputs}
    if "server_epochs" in inputs:
        inputs["server_epochs"] = jnp.int32(setting.server[1])
    return Small(
        algorithm,
        setting.scheduler(algorithm, partition, labels),
        place(Examples(jnp.asarray(images), jnp.asarray(labels))),
        task,
        {name: jnp.float32(value) for name, value in {"server_lr": 1.0, **hp}.items()},
        place(server),
        inputs,
        (images, labels),
        setting.sizes,
        setting.averaging,
    )

"""Small problems that the engine's tests share."""

import dataclasses
from functools import partial
from typing import NamedTuple, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.contract import Algorithm, Holdings
from fedjax_het.common.records import read
from fedjax_het.data import dataset_from_arrays, partition_from_clients
from fedjax_het.engine.lanes import Cohort, Examples
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan, make_plan
from fedjax_het.engine.schedule import Scheduler
from fedjax_het.engine.task import Task
from fedjax_het.engine.units import ClientUnits, PairUnits
from fedjax_het.nn import Head, Model
from fedjax_het.running.placement import Placement

SIZES = (7, 0, 12, 3, 9, 20)  # unequal clients, one smaller than a batch, one empty
CLASSES = 3
SHAPE = (2, 2, 1)
BATCH = 4


def blobs(sizes=SIZES, seed=0):
    """Float images of three Gaussian classes, and their labels; client after client, skewed."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate(
        [(rng.integers(0, 2, n) + k) % CLASSES for k, n in enumerate(sizes)]
    ).astype(np.int32)
    centres = np.random.default_rng(99).normal(size=(CLASSES, *SHAPE))
    images = (centres[labels] + rng.normal(size=(len(labels), *SHAPE))).astype(np.float32)
    return images, labels


def consecutive(sizes=SIZES):
    """A partition that gives every client the next `sizes[k]` examples."""
    ends = np.cumsum(sizes)
    return partition_from_clients([np.arange(e - n, e) for e, n in zip(ends, sizes, strict=True)])


def linear_model() -> Model:
    """Softmax regression."""

    def init(key):
        weights = 0.1 * jax.random.normal(key, (int(np.prod(SHAPE)), CLASSES))
        return {"params": {"w": weights, "b": jnp.zeros(CLASSES)}, "state": {}}

    def embed(variables, x, *, train, key=None):
        params, features = variables["params"], x.reshape(x.shape[0], -1)
        return features, features @ params["w"] + params["b"], variables["state"]

    def apply(variables, x, *, train, key=None):
        return embed(variables, x, train=train, key=key)[1:]

    head = Head(
        path=(),
        apply=lambda params, features: features @ params["w"] + params["b"],
    )
    return Model("linear", SHAPE, CLASSES, init, apply, None, embed=embed, head=head)


def softmax_gradient(w, b, x, y):
    """Mean cross-entropy gradient of softmax regression."""
    z = x @ w + b
    p = np.exp(z - z.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(y)), y] -= 1
    return x.T @ p / len(y), p.mean(0)


def user_dataset(sizes=SIZES, **more):
    images, labels = blobs(sizes)
    test_images, test_labels = blobs((30, 30), seed=1)
    return dataset_from_arrays(
        images, labels, test_images, test_labels, num_classes=CLASSES, **more
    )


def domains_dataset():
    """The same in three domains of unequal size, mixed."""
    return user_dataset(
        train_domains=np.arange(sum(SIZES)) * 5 % 3,
        test_domains=np.random.default_rng(2).choice(3, 60, p=(0.5, 0.3, 0.2)),
        domain_names=("clipart", "real", "sketch"),
    )


def placed(settings):
    """The same keywords, with those of a `Placement` in one."""
    names = {field.name for field in dataclasses.fields(Placement)}
    own = {name: value for name, value in settings.items() if name in names}
    return {k: v for k, v in settings.items() if k not in names} | {"placement": Placement(**own)}


class Small(NamedTuple):
    """A federation on `blobs`, driven by hand."""

    algorithm: Algorithm
    scheduler: Scheduler
    examples: Examples
    task: Task
    hp: dict
    num_clients: int
    server: Examples
    inputs: dict

    def start(self, seed=0):
        variables = self.task.model.init(jax.random.key(seed))
        return self.algorithm.init(self.hp, jax.random.key(seed), variables, self.num_clients)

    def cohort(self, r):
        """What a round reads besides the state."""
        return Cohort(self.scheduler.round(r), self.examples, self.server, self.inputs)

    def run(self, rounds, state=None):
        state = self.start() if state is None else state
        one = jax.jit(self.algorithm.round)
        key = jax.random.key(7)
        for r in range(rounds):
            state, info = one(self.hp, state, jax.random.fold_in(key, r), self.cohort(r))
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


def small(
    build,
    *,
    hp,
    plan: Plan | None = None,
    sizes=SIZES,
    optimizer="sgd",
    keep=False,
    epochs=1,
    batch_size=BATCH,
    participation=1.0,
    averaging="uniform",
    rounds=20,
    model=None,
    seed=0,
    data=None,
    scored="global",
    server=None,
) -> Small:
    """`build(training, plan) -> Algorithm` on the blobs; `server`: its examples, and epochs over
    them of a method that asks how many."""
    plan = plan or make_plan(1, 1, spread=None)
    server = (blobs((7,), seed=3), 2) if server is None else server
    task = Task(model or linear_model(), (0.0,), (1.0,))
    algorithm = build(LocalTraining(task, optimizer, epochs, keep, batch_size, scored), plan)
    images, labels = blobs(sizes) if data is None else data
    partition = consecutive(sizes)
    if algorithm.shares_server_data:
        added = len(labels) + np.arange(len(server[0][1]))
        partition = partition_from_clients(
            [np.concatenate([partition.client(k), added]) for k in range(len(sizes))]
        )
        images, labels = (
            np.concatenate(two) for two in zip((images, labels), server[0], strict=True)
        )
    if algorithm.pairs is None:
        units = ClientUnits(partition, epochs + algorithm.extra_passes, batch_size)
    else:
        units = PairUnits(partition, labels, CLASSES, algorithm.pairs, batch_size)
    scheduler = Scheduler(
        partition,
        units,
        seed=seed,
        rounds=rounds,
        participation=participation,
        averaging=averaging,
        eval_every=1,
        blocks=plan.blocks,
        lanes=plan.lanes,
    )
    examples = plan.put(Examples(jnp.asarray(images), jnp.asarray(labels)))
    hp = {name: jnp.float32(value) for name, value in {"server_lr": 1.0, **hp}.items()}
    own = Examples(*map(jnp.asarray, server[0]))
    dataset = dataset_from_arrays(images, labels, images, labels, num_classes=CLASSES)
    held = Holdings(dataset, partition, own, epochs, seed)
    inputs = {need.name: plan.put(need.make([held])[0]) for need in algorithm.inputs}
    if "server_epochs" in inputs:
        inputs["server_epochs"] = jnp.int32(server[1])
    return Small(algorithm, scheduler, examples, task, hp, len(sizes), plan.put(own), inputs)


def chosen(build, *, base=None, tuned=None, **values):
    """`build` with these options, and over this base."""
    record = get_type_hints(build.func if isinstance(build, partial) else build)["options"]
    others = {"base": base, "tuned": tuned}
    others = {name: other for name, other in others.items() if other is not None}
    return partial(build, options=read(record, values), **others)


def defaults(entry, options, optimizer="sgd", num_clients=len(SIZES)) -> dict[str, float]:
    """A method's hyper-parameters as they are where nothing is said."""
    numbers = entry.hyper_parameters(optimizer, entry.fill(options), num_clients)
    return {name: number.default for name, number in numbers.items()}


def builder_of(entry, options):
    """The method's `build(training, plan)`."""
    return lambda training, plan: entry.make(training, plan, entry.fill(options))


class FlatLoop:
    """What float64 loops of softmax regression share whose parameters are one vector: w's twelve
    numbers, then b's three. A method's own adds its state and `round(r)` -> the clients' ids."""

    def __init__(self, federation, start, *, averaging):
        images, labels = blobs()
        self.x, self.y = images.reshape(len(images), -1).astype(np.float64), labels
        self.f, self.averaging = federation, averaging
        self.hp = {name: float(value) for name, value in federation.hp.items()}
        params = federation.model(start)
        self.w = np.concatenate([params["w"].ravel(), params["b"]]).astype(np.float64)

    def gradient(self, theta, use):
        dw, db = softmax_gradient(theta[:12].reshape(4, 3), theta[12:], self.x[use], self.y[use])
        return np.concatenate([dw.ravel(), db])

    def mean(self, models, clients):
        weights = [SIZES[k] for k in clients] if self.averaging == "weighted" else None
        return np.average(models, axis=0, weights=weights)


def four_rounds_beside(make_loop, build, *, averaging, hp):
    """-> (state, loop) after rounds in which clients come back and an empty one is drawn; their
    models are equal."""
    settings = {"participation": 0.5, "averaging": averaging, "epochs": 2}
    federation = small(build, hp={"local_lr": 0.2, **hp}, **settings)
    start = federation.start()
    loop = make_loop(federation, start, averaging=averaging)
    state, _ = federation.run(4, start)
    rounds = [loop.round(r) for r in range(4)]
    assert any(len(clients) < 3 for clients in rounds)  # the empty client was drawn too
    assert set(rounds[0]) & set(rounds[1] + rounds[2] + rounds[3])  # with a state by then
    found = federation.model(state)
    np.testing.assert_allclose(found["w"].ravel(), loop.w[:12], atol=5e-6)
    np.testing.assert_allclose(found["b"], loop.w[12:], atol=5e-6)
    return state, loop

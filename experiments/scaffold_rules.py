"""SCAFFOLD by the rules of public benchmarks: the points that make its accuracy fall.

python experiments/scaffold_rules.py fedbench     MNIST, 10 clients, a minute a row on one core
python experiments/scaffold_rules.py niid_bench   CIFAR-10, 100 clients, 10 of them in each round

Clients train with momentum SGD, and each step adds the correction c - c_i to the gradient. Each row
changes points of Algorithm 1 of SCAFFOLD (Karimireddy et al., ICML 2020). The table has the test
accuracy after each round.
"""

import argparse
import sys
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het import load_dataset, make_model, make_partition
from fedjax_het.data import Dataset
from fedjax_het.nn import Model

MOMENTUM, LEARNING_RATE = 0.9, 0.01
NUM_TEST_IMAGES = 5000


class Rules(NamedTuple):
    """Points in which code differs from Algorithm 1; the defaults are Algorithm 1."""

    name: str = "Algorithm 1"
    random_start: bool = False
    "Controls start at the weights of a further network, not at zero."
    divides_by_sampled: bool = False
    "The change of c is a mean over the sampled clients, not over all clients."
    reversed_sign: bool = False
    "A control is (y - x) / (K lr), with the sign of an ascent."
    forgets_controls: bool = False
    "Each round starts with c_i = 0."
    adds_gradients: bool = False
    "The server adds the clients' mean gradients to c, not the changes of their controls."


class Benchmark(NamedTuple):
    """Setting of a benchmark, reduced to minutes of one core."""

    dataset: str
    partition: dict[str, Any]
    num_clients: int
    num_sampled: int
    epochs: int
    batch_size: int
    rounds: int
    max_norm: float
    rules: tuple[Rules, ...]


BENCHMARKS = {
    "fedbench": Benchmark(
        *("mnist_tenth", {"name": "dirichlet_capped", "alpha": 0.5}, 10, 10, 3, 16, 12, 1.0),
        rules=(
            Rules(),
            Rules("code", reversed_sign=True, forgets_controls=True, adds_gradients=True),
            Rules("code, kept controls", reversed_sign=True, adds_gradients=True),
            Rules("code, right sign", forgets_controls=True, adds_gradients=True),
            Rules("sign alone", reversed_sign=True),
        ),
    ),
    "niid_bench": Benchmark(
        *("cifar10", {"name": "iid"}, 100, 10, 10, 64, 12, np.inf),
        rules=(
            Rules(),
            Rules("code", random_start=True, divides_by_sampled=True),
            Rules("random controls", random_start=True),
            Rules("sampled clients", divides_by_sampled=True),
        ),
    ),
}


class Client(NamedTuple):
    """Minibatches of a client in a round: positions `[S, B]`, and which steps it makes `[S]`."""

    positions: np.ndarray
    is_step: np.ndarray


def plan_round(benchmark: Benchmark, parts: list[np.ndarray], rng: np.random.Generator) -> Client:
    """Draw the minibatches of several clients, padded to equally many steps.

    Args:
      benchmark: the setting.
      parts: positions of the examples of each client.
      rng: generator of the order.

    Returns:
      Positions `[K, S, B]` and steps `[K, S]`.
    """
    size, epochs = benchmark.batch_size, benchmark.epochs
    num_steps = epochs * max(-(-len(part) // size) for part in parts)
    batches, is_step = [], []
    for part in parts:
        count = -(-len(part) // size) * size
        orders = [np.resize(rng.permutation(part), count) for _ in range(epochs)]
        own = np.concatenate(orders).reshape(-1, size)
        batches.append(np.resize(own, (num_steps, size)))
        is_step.append(np.arange(num_steps) < len(own))
    return Client(np.stack(batches), np.stack(is_step))


@partial(jax.jit, static_argnames=("model", "max_norm"))
def train_clients(
    variables: Any,
    correction: Any,
    client: Client,
    inputs: jax.Array,
    labels: jax.Array,
    *,
    model: Model,
    max_norm: float,
) -> Any:
    """Train the clients of a round in lanes.

    Args:
      variables: the received model.
      correction: `c - c_i` of each client, leaves `[K, ...]`.
      client: the minibatches, see `plan_round`.
      inputs: all training images, normalized.
      labels: all training labels.
      model: the network.
      max_norm: largest norm of a gradient, which is clipped.

    Returns:
      The clients' parameters, leaves `[K, ...]`.
    """
    clip = optax.clip_by_global_norm(max_norm) if np.isfinite(max_norm) else optax.identity()
    optimizer = optax.chain(clip, optax.sgd(LEARNING_RATE, MOMENTUM))

    def compute_loss(params, positions):
        outputs = model.apply({**variables, "params": params}, inputs[positions], train=True)[0]
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels[positions]).mean()

    def train(own_correction, own):
        def step(carry, batch):
            params, state = carry
            gradients = jax.grad(compute_loss)(params, batch.positions)
            updates, next_state = optimizer.update(gradients, state, params)
            next_params = jax.tree.map(
                lambda p, u, c: p + u - LEARNING_RATE * c, params, updates, own_correction
            )
            choose = partial(jnp.where, batch.is_step)
            return jax.tree.map(choose, (next_params, next_state), carry), None

        start = variables["params"], optimizer.init(variables["params"])
        return jax.lax.scan(step, start, own)[0][0]

    return jax.vmap(train)(correction, client)


class State(NamedTuple):
    """The model, the server's control c, and the clients' controls c_i, leaves `[K, ...]`."""

    variables: Any
    server_control: Any
    controls: Any


def update_state(
    state: State, rules: Rules, cohort: np.ndarray, sizes: np.ndarray, trained: Any, steps: Any
) -> State:
    """Update the model and the controls after a round.

    Args:
      state: the state before the round.
      rules: the points that differ from Algorithm 1.
      cohort: the sampled clients, integers `[M]`.
      sizes: number of examples of each sampled client `[M]`.
      trained: their parameters, leaves `[M, ...]`.
      steps: their numbers of steps `[M]`.

    Returns:
      The next state.
    """
    params, server_control = state.variables["params"], state.server_control
    used = get_controls(state, rules, cohort)
    changes = jax.tree.map(jnp.subtract, trained, params)
    scales = (1 if rules.reversed_sign else -1) / (LEARNING_RATE * steps)
    gradients = jax.tree.map(
        lambda leaf: leaf * scales.reshape(-1, *[1] * (leaf.ndim - 1)), changes
    )
    updated = jax.tree.map(lambda c_i, c, g: c_i - c + g, used, server_control, gradients)
    added = gradients if rules.adds_gradients else jax.tree.map(jnp.subtract, updated, used)
    average = partial(jnp.tensordot, sizes / sizes.sum(), axes=1)
    num_clients = len(jax.tree.leaves(state.controls)[0])
    share = 1 if rules.divides_by_sampled else len(cohort) / num_clients
    return State(
        {
            **state.variables,
            "params": jax.tree.map(lambda x, d: x + average(d), params, changes),
        },
        jax.tree.map(lambda c, d: c + share * average(d), server_control, added),
        jax.tree.map(lambda c, new: c.at[cohort].set(new), state.controls, updated),
    )


def get_controls(state: State, rules: Rules, cohort: np.ndarray) -> Any:
    """Return the controls with which the sampled clients start, leaves `[M, ...]`."""
    controls = jax.tree.map(lambda leaf: leaf[cohort], state.controls)
    return jax.tree.map(jnp.zeros_like, controls) if rules.forgets_controls else controls


def measure_rules(benchmark: Benchmark, rules: Rules, dataset: Dataset, seed: int) -> list[float]:
    """Return the test accuracy after each round, in percent.

    Args:
      benchmark: the setting.
      rules: the points that differ from Algorithm 1.
      dataset: the images.
      seed: seed of the partition, the network and the order of the examples.

    Returns:
      Accuracies of the rounds.
    """
    num_clients, num_sampled = benchmark.num_clients, benchmark.num_sampled
    arguments = {"num_clients": num_clients, "seed": seed, **benchmark.partition}
    labels = dataset.train_labels
    partition = make_partition(arguments.pop("name"), labels, dataset.num_classes, **arguments)
    parts = [partition.client_indices(client) for client in range(num_clients)]
    rng = np.random.default_rng(seed)
    model = make_model("lenet5", dataset.input_shape, dataset.num_classes)
    variables, further = (model.init(key) for key in jax.random.split(jax.random.key(seed)))
    mean, std = np.array(dataset.mean), np.array(dataset.std)
    inputs, test_inputs = (
        jnp.asarray((images / 255 - mean) / std, jnp.float32)
        for images in (dataset.train_inputs, dataset.test_inputs[:NUM_TEST_IMAGES])
    )
    zeros = jax.tree.map(jnp.zeros_like, variables["params"])
    server_control = further["params"] if rules.random_start else zeros
    controls = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_clients), server_control)
    state = State(variables, server_control, controls)
    predict = jax.jit(lambda v: model.apply(v, test_inputs, train=False)[0].argmax(-1))
    accuracies = []
    for _ in range(benchmark.rounds):
        cohort = np.sort(rng.choice(num_clients, num_sampled, replace=False))
        client = plan_round(benchmark, [parts[k] for k in cohort], rng)
        used = get_controls(state, rules, cohort)
        trained = train_clients(
            state.variables,
            jax.tree.map(jnp.subtract, state.server_control, used),
            client,
            inputs,
            jnp.asarray(labels),
            model=model,
            max_norm=benchmark.max_norm,
        )
        sizes = np.array([len(parts[k]) for k in cohort], np.float32)
        state = update_state(state, rules, cohort, sizes, trained, client.is_step.sum(1))
        is_correct = np.asarray(predict(state.variables)) == dataset.test_labels[:NUM_TEST_IMAGES]
        accuracies.append(100 * float(is_correct.mean()))
    return accuracies


def main() -> int:
    """Print the accuracies of each row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, help="number of rounds (default: 12)")
    parser.add_argument("--rows", nargs="+", help="names of rows (default: all)")
    arguments = parser.parse_args()
    benchmark = BENCHMARKS[arguments.benchmark]
    benchmark = benchmark._replace(rounds=arguments.rounds or benchmark.rounds)
    dataset = load_dataset(benchmark.dataset)
    for rules in benchmark.rules:
        for seed in arguments.seeds:
            if arguments.rows is None or rules.name in arguments.rows:
                accuracies = measure_rules(benchmark, rules, dataset, seed)
                print(
                    f"{rules.name:20} seed {seed}: ", *(f"{a:.1f}" for a in accuracies), flush=True
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())

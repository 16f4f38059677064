"""The oracle of the methods' tests: federated rounds in NumPy float64, by plain loops.

It shares nothing with the package but who is sampled and which examples are in a minibatch. A model
is one vector of all weights, in the order of their sorted names. `ReferenceFedAvg` is FedAvg on
softmax regression; a method's test derives from it and states its own formula in a hook.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.core.server_training import make_shuffled_batches
from support.data import BATCH_SIZE, NUM_CLASSES
from support.small_federation import SmallFederation, make_small_federation

Params = dict[str, np.ndarray]


def flatten_inputs(inputs: np.ndarray) -> np.ndarray:
    """Rows of float64."""
    return inputs.reshape(len(inputs), -1).astype(np.float64)


def name_leaves(params: dict) -> Params:
    """The arrays of nested dictionaries by path, such as "head/kernel"."""
    leaves = {}
    for name, value in params.items():
        inner = name_leaves(value) if isinstance(value, dict) else {"": value}
        leaves |= {f"{name}/{path}".rstrip("/"): leaf for path, leaf in inner.items()}
    return leaves


def flatten_params(params: Params) -> np.ndarray:
    """All weights of a model as one float64 vector, by sorted name."""
    return np.concatenate([np.asarray(params[name], np.float64).ravel() for name in sorted(params)])


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def logit_gradient(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Gradient of every row's cross-entropy by its logits: softmax minus the label's one."""
    rows = softmax(logits)
    rows[np.arange(len(y)), y] -= 1
    return rows


def cross_entropy(logits: np.ndarray, y: np.ndarray) -> float:
    """Mean over rows."""
    top = logits.max(1, keepdims=True)
    log_sum = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
    return float(np.mean(log_sum - logits[np.arange(len(y)), y]))


def softmax_gradient(w, b, x, y):
    """Mean cross-entropy gradient of softmax regression."""
    rows = logit_gradient(x @ w + b, y)
    return x.T @ rows / len(y), rows.mean(0)


def softmax_regression_gradient(params: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """The gradient by its weights "w" and "b"."""
    w, b = softmax_gradient(params["w"], params["b"], x, y)
    return {"w": w, "b": b}


def finite_difference_gradient(
    function: Callable[[np.ndarray], float], point: np.ndarray, step: float = 1e-5
) -> np.ndarray:
    """By central differences."""
    steps = step * np.eye(len(point))
    return np.array([(function(point + s) - function(point - s)) / (2 * step) for s in steps])


class ReferenceAdam:
    """Adam with its usual decay rates; a moment each of one array."""

    def __init__(self) -> None:
        self.mean, self.square, self.num_steps = 0.0, 0.0, 0

    def step(self, point: np.ndarray, gradient: np.ndarray, lr: float) -> np.ndarray:
        self.num_steps += 1
        self.mean = 0.9 * self.mean + 0.1 * gradient
        self.square = 0.999 * self.square + 0.001 * gradient**2
        mean, square = (
            self.mean / (1 - 0.9**self.num_steps),
            self.square / (1 - 0.999**self.num_steps),
        )
        return point - lr * mean / (np.sqrt(square) + 1e-8)


class Minibatch(NamedTuple):
    """What a client's step is on.

    number: of the step, from 0 in each round.
    whole: indices of its examples and, where the client ran out of them, of what fills it up.
    """

    round: int
    client: int
    step: int
    x: np.ndarray  # [n, features] float64, without what fills it up
    y: np.ndarray  # [n] int
    padded_indices: np.ndarray  # [B] int


class ReferenceFedAvg:
    """Rounds of FedAvg: clients one after the other, their minibatches, their steps.

    A method's own rule goes into what is marked as a hook; `vector` has the global model.
    `kept[k]` is what client k keeps from round to round.
    """

    def __init__(self, federation: SmallFederation, *, params: Params | None = None) -> None:
        """params: what the global model begins with (default: its weights at the start)."""
        images, self.labels = federation.data
        self.inputs, self.federation = flatten_inputs(images), federation
        self.client_sizes = federation.sizes
        self.hp = {name: float(value) for name, value in federation.hp.items()}
        params = federation.global_params(federation.initial_state()) if params is None else params
        params = name_leaves(params)
        self.shapes = {name: params[name].shape for name in sorted(params)}
        self.global_vector = flatten_params(params)
        self.history: list[list[int]] = []  # the clients that trained in each round
        clients = range(len(self.client_sizes))
        self.client_states: list[Any] = [self.init_client_state(k) for k in clients]

    # --- hooks ---

    def before_round(self, r: int) -> None:
        """What the server makes before a round's clients train."""

    def init_client_state(self, client: int) -> Any:
        """What a client keeps before its first round."""
        return None

    def initial_client_model(self, client: int) -> np.ndarray:
        """The model with which a client begins its round."""
        return self.global_vector

    def loss_gradient(self, params: Params, x: np.ndarray, y: np.ndarray) -> Params:
        """Gradient of the mean loss by the weights."""
        return softmax_regression_gradient(params, x, y)

    def descent_direction(self, model: np.ndarray, batch: Minibatch) -> np.ndarray:
        """What a step goes along: the gradient and, of a method, further terms."""
        return self.gradient(model, batch.x, batch.y)

    def local_step(self, model: np.ndarray, batch: Minibatch) -> np.ndarray:
        """The model after a step."""
        return model - self.hp["local_lr"] * self.descent_direction(model, batch)

    def finish_client(self, client: int, model: np.ndarray, steps: int) -> None:
        """After a client's last step: what it keeps."""

    def update_server(self, r: int, clients: list[int], models: list[np.ndarray]) -> None:
        """What the server makes of the models of the round's clients."""
        self.global_vector = self.average_models(clients, models)

    # --- parts ---

    def params(self, model: np.ndarray) -> Params:
        """The weights of a vector by name."""
        params_by_name, offset = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            params_by_name[name] = model[offset : offset + size].reshape(shape)
            offset += size
        return params_by_name

    def gradient(self, model: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return flatten_params(self.loss_gradient(self.params(model), x, y))

    def participants(self, r: int) -> list[int]:
        """Those sampled that hold examples, ascending."""
        cohort = self.federation.scheduler.draw_cohort(r)
        return sorted(int(k) for k in cohort if self.client_sizes[k])

    def class_counts(self, client: int) -> np.ndarray:
        """The number of a client's examples in each class, `[C]`."""
        held = self.federation.scheduler.partition.client_indices(client)
        return np.bincount(self.labels[held], minlength=NUM_CLASSES)

    def minibatches(self, r: int, client: int) -> list[Minibatch]:
        minibatches = []
        batches, sizes = self.federation.scheduler.client_batches(r, client)
        for step, (padded, size) in enumerate(zip(batches, sizes, strict=True)):
            x, y = self.inputs[padded[:size]], self.labels[padded[:size]]
            minibatches.append(Minibatch(r, client, step, x, y, padded))
        return minibatches

    def aggregation_weights(self, clients: list[int]) -> np.ndarray:
        """How much each client's model weighs in the mean."""
        weights = self.client_weights()[clients]
        return weights / weights.sum()

    def client_weights(self) -> np.ndarray:
        """Of all clients in the objective."""
        counts = np.array(self.client_sizes, np.float64)
        if self.federation.averaging == "uniform":
            counts = (counts > 0).astype(np.float64)
        return counts / counts.sum()

    def weighted_mean(self, clients: list[int], values: Iterable[np.ndarray]) -> np.ndarray:
        total = 0
        for share, value in zip(self.aggregation_weights(clients), values, strict=True):
            total = total + share * value
        return total

    def step_towards(self, target: np.ndarray) -> np.ndarray:
        """The global model after a step of the server's rate towards a target."""
        return self.global_vector + self.hp["server_lr"] * (target - self.global_vector)

    def average_models(self, clients: list[int], models: list[np.ndarray]) -> np.ndarray:
        """The global model after FedAvg's step."""
        return self.step_towards(self.weighted_mean(clients, models))

    def run_sgd(
        self,
        model: np.ndarray,
        x: np.ndarray,
        y: np.ndarray,
        batches: Iterable[np.ndarray],
        lr: float,
    ) -> np.ndarray:
        """A model after SGD on lists of positions."""
        for index in batches:
            model = model - lr * self.gradient(model, x[index], y[index])
        return model

    # --- rounds ---

    def train_client(self, r: int, client: int) -> np.ndarray:
        """A client's model after its local training."""
        model, batches = self.initial_client_model(client), self.minibatches(r, client)
        for batch in batches:
            model = self.local_step(model, batch)
        self.finish_client(client, model, len(batches))
        return model

    def run_round(self, r: int) -> list[int]:
        """-> the clients that trained."""
        self.before_round(r)
        clients = self.participants(r)
        self.update_server(r, clients, [self.train_client(r, k) for k in clients])
        self.history.append(clients)
        return clients

    def count_repeat_clients(self) -> int:
        """How often a client trained that had trained before."""
        return sum(map(len, self.history)) - len(set().union(*self.history))

    def assert_model(self, params: Params, *, atol: float, model: np.ndarray | None = None) -> None:
        """That weights are those of the global model, or of another of the loop's."""
        expected = self.params(self.global_vector if model is None else model)
        params = name_leaves(params)
        assert params.keys() == expected.keys()
        for name, leaf in params.items():
            np.testing.assert_allclose(leaf, expected[name], atol=atol, err_msg=name)


class ClippedAndDecayed(ReferenceFedAvg):
    """A mixin: steps along the direction clipped entry by entry, then as a whole, plus decay."""

    num_clipped = 0

    def local_step(self, model, batch):
        direction, hp = self.descent_direction(model, batch), self.hp
        if "local_clip_value" in hp:
            direction = np.clip(direction, -hp["local_clip_value"], hp["local_clip_value"])
        if "local_clip_norm" in hp:
            norm = np.linalg.norm(direction)
            self.num_clipped += norm > hp["local_clip_norm"]
            direction = direction * min(1, hp["local_clip_norm"] / norm)
        return model - hp["local_lr"] * (direction + hp.get("local_weight_decay", 0) * model)


CLIP_AND_DECAY = (
    {"local_weight_decay": 0.1},
    {"local_clip_norm": 0.3},
    {"local_clip_value": 0.1, "local_clip_norm": 0.3, "local_weight_decay": 0.1},
)


def run_and_compare(loop: ReferenceFedAvg, rounds: int, *, atol: float) -> Any:
    """-> the package's state after as many rounds as the loop's; their global models are equal."""
    for r in range(rounds):
        loop.run_round(r)
    state, _ = loop.federation.run(rounds)
    loop.assert_model(loop.federation.global_params(state), atol=atol)
    return state


def run_four_rounds_and_compare(make_loop, build, *, averaging, hp, **settings):
    """-> (state, loop) after rounds in which clients come back and an empty one is drawn; their
    models are equal."""
    settings |= {"participation": 0.5, "averaging": averaging, "epochs": 2}
    loop = make_loop(make_small_federation(build, hp={"local_lr": 0.2, **hp}, **settings))
    state = run_and_compare(loop, 4, atol=5e-6)
    rounds = loop.history
    assert any(len(clients) < 3 for clients in rounds)  # the empty client was drawn too
    assert set(rounds[0]) & set(rounds[1] + rounds[2] + rounds[3])  # with a state by then
    return state, loop


# --- the server's own training -------------------------------------------------------------


def server_batches(key, epochs, count, batch_size=BATCH_SIZE, first=0) -> Iterator[np.ndarray]:
    """Positions of the server's minibatches, whose order is drawn where the package draws it."""
    order, _ = jax.random.split(key)
    size = min(batch_size, count)
    per_epoch = -(-count // size)
    for step in range(first * per_epoch, (first + epochs) * per_epoch):
        index, mask = make_shuffled_batches(order, count, size).take_step(step)
        yield np.asarray(index)[np.asarray(mask) > 0]

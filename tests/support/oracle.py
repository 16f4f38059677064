"""The oracle of the methods' tests: federated rounds in NumPy float64, by plain loops.

It shares nothing with the package but who is sampled and which examples are in a minibatch. A model
is one vector of all weights, in the order of their sorted names. `Loop` is FedAvg on softmax
regression; a method's test derives from it and states its own formula in a hook.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.engine.server import epoch_batch
from support.data import BATCH
from support.problems import Small, small

Params = dict[str, np.ndarray]


def flat(images: np.ndarray) -> np.ndarray:
    """Rows of float64."""
    return images.reshape(len(images), -1).astype(np.float64)


def joined(params: Params) -> np.ndarray:
    """All weights of a model as one float64 vector, by sorted name."""
    return np.concatenate([np.asarray(params[name], np.float64).ravel() for name in sorted(params)])


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def error(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
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
    rows = error(x @ w + b, y)
    return x.T @ rows / len(y), rows.mean(0)


def softmax_regression(params: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """The gradient by its weights "w" and "b"."""
    w, b = softmax_gradient(params["w"], params["b"], x, y)
    return {"w": w, "b": b}


def difference_gradient(
    function: Callable[[np.ndarray], float], point: np.ndarray, step: float = 1e-5
) -> np.ndarray:
    """By central differences."""
    steps = step * np.eye(len(point))
    return np.array([(function(point + s) - function(point - s)) / (2 * step) for s in steps])


class Minibatch(NamedTuple):
    """What a client's step is on.

    number: of the step, from 0 in each round.
    whole: indices of its examples and, where the client ran out of them, of what fills it up.
    """

    round: int
    client: int
    number: int
    x: np.ndarray  # [n, features] float64, without what fills it up
    y: np.ndarray  # [n] int
    whole: np.ndarray  # [B] int


class Loop:
    """Rounds of FedAvg: clients one after the other, their minibatches, their steps.

    A method's own rule goes into what is marked as a hook; `vector` has the global model.
    `kept[k]` is what client k keeps from round to round.
    """

    def __init__(self, federation: Small, *, params: Params | None = None) -> None:
        """params: what the global model begins with (default: its weights at the start)."""
        images, self.labels = federation.data
        self.images, self.federation, self.sizes = flat(images), federation, federation.sizes
        self.hp = {name: float(value) for name, value in federation.hp.items()}
        params = federation.model(federation.start()) if params is None else params
        self.shapes = {name: params[name].shape for name in sorted(params)}
        self.vector = joined(params)
        self.history: list[list[int]] = []  # the clients that trained in each round
        self.kept: list[Any] = [self.first(k) for k in range(len(self.sizes))]

    # --- hooks ---

    def before_round(self, r: int) -> None:
        """What the server makes before a round's clients train."""

    def first(self, client: int) -> Any:
        """What a client keeps before its first round."""
        return None

    def begin(self, client: int) -> np.ndarray:
        """The model with which a client begins its round."""
        return self.vector

    def network(self, params: Params, x: np.ndarray, y: np.ndarray) -> Params:
        """Gradient of the mean loss by the weights."""
        return softmax_regression(params, x, y)

    def slope(self, model: np.ndarray, batch: Minibatch) -> np.ndarray:
        """What a step goes along: the gradient and, of a method, further terms."""
        return self.gradient(model, batch.x, batch.y)

    def step(self, model: np.ndarray, batch: Minibatch) -> np.ndarray:
        """The model after a step."""
        return model - self.hp["local_lr"] * self.slope(model, batch)

    def end(self, client: int, model: np.ndarray, steps: int) -> None:
        """After a client's last step: what it keeps."""

    def serve(self, r: int, clients: list[int], models: list[np.ndarray]) -> None:
        """What the server makes of the models of the round's clients."""
        self.vector = self.averaged(clients, models)

    # --- parts ---

    def params(self, model: np.ndarray) -> Params:
        """The weights of a vector by name."""
        out, at = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            out[name] = model[at : at + size].reshape(shape)
            at += size
        return out

    def gradient(self, model: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return joined(self.network(self.params(model), x, y))

    def clients(self, r: int) -> list[int]:
        """Those sampled that hold examples, ascending."""
        return sorted(int(k) for k in self.federation.scheduler.participants(r) if self.sizes[k])

    def minibatches(self, r: int, client: int) -> list[Minibatch]:
        out = []
        batches, sizes = self.federation.scheduler.client_batches(r, client)
        for number, (whole, size) in enumerate(zip(batches, sizes, strict=True)):
            used = whole[:size]
            batch = Minibatch(r, client, number, self.images[used], self.labels[used], whole)
            out.append(batch)
        return out

    def shares(self, clients: list[int]) -> np.ndarray:
        """How much each client's model weighs in the mean."""
        weights = self.weights()[clients]
        return weights / weights.sum()

    def weights(self) -> np.ndarray:
        """Of all clients in the objective."""
        counts = np.array(self.sizes, np.float64)
        if self.federation.averaging == "uniform":
            counts = (counts > 0).astype(np.float64)
        return counts / counts.sum()

    def mean(self, clients: list[int], values: Iterable[np.ndarray]) -> np.ndarray:
        total = 0
        for share, value in zip(self.shares(clients), values, strict=True):
            total = total + share * value
        return total

    def towards(self, target: np.ndarray) -> np.ndarray:
        """The global model after a step of the server's rate towards a target."""
        return self.vector + self.hp["server_lr"] * (target - self.vector)

    def averaged(self, clients: list[int], models: list[np.ndarray]) -> np.ndarray:
        """The global model after FedAvg's step."""
        return self.towards(self.mean(clients, models))

    def descended(
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

    def train(self, r: int, client: int) -> np.ndarray:
        """A client's model after its local training."""
        model, batches = self.begin(client), self.minibatches(r, client)
        for batch in batches:
            model = self.step(model, batch)
        self.end(client, model, len(batches))
        return model

    def round(self, r: int) -> list[int]:
        """-> the clients that trained."""
        self.before_round(r)
        clients = self.clients(r)
        self.serve(r, clients, [self.train(r, k) for k in clients])
        self.history.append(clients)
        return clients

    def repeats(self) -> int:
        """How often a client trained that had trained before."""
        return sum(map(len, self.history)) - len(set().union(*self.history))

    def assert_model(self, params: Params, *, atol: float, model: np.ndarray | None = None) -> None:
        """That weights are those of the global model, or of another of the loop's."""
        expected = self.params(self.vector if model is None else model)
        assert params.keys() == expected.keys()
        for name, leaf in params.items():
            np.testing.assert_allclose(leaf, expected[name], atol=atol, err_msg=name)


def beside(loop: Loop, rounds: int, *, atol: float) -> Any:
    """-> the package's state after as many rounds as the loop's; their global models are equal."""
    for r in range(rounds):
        loop.round(r)
    state, _ = loop.federation.run(rounds)
    loop.assert_model(loop.federation.model(state), atol=atol)
    return state


def four_rounds_beside(make_loop, build, *, averaging, hp):
    """-> (state, loop) after rounds in which clients come back and an empty one is drawn; their
    models are equal."""
    settings = {"participation": 0.5, "averaging": averaging, "epochs": 2}
    loop = make_loop(small(build, hp={"local_lr": 0.2, **hp}, **settings))
    state = beside(loop, 4, atol=5e-6)
    rounds = loop.history
    assert any(len(clients) < 3 for clients in rounds)  # the empty client was drawn too
    assert set(rounds[0]) & set(rounds[1] + rounds[2] + rounds[3])  # with a state by then
    return state, loop


# --- the server's own training -------------------------------------------------------------


def server_batches(key, epochs, count, batch_size=BATCH, first=0) -> Iterator[np.ndarray]:
    """Positions of the server's minibatches, whose order is drawn where the package draws it."""
    order, _ = jax.random.split(key)
    size = min(batch_size, count)
    per_epoch = -(-count // size)
    for step in range(first * per_epoch, (first + epochs) * per_epoch):
        index, mask = epoch_batch(order, step, count, size)
        yield np.asarray(index)[np.asarray(mask) > 0]

"""A network of two layers in jax, and its losses and gradients in float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.nn import Head, Model
from support.data import IMAGE_SHAPE, NUM_CLASSES
from support.reference_loop import Params, ReferenceFedAvg, flatten_params, logit_gradient

NUM_FEATURES = 5


def make_two_layer_model() -> Model:
    """tanh features and a last fully connected layer."""

    def init(key):
        sizes = {"hidden": (int(np.prod(IMAGE_SHAPE)), NUM_FEATURES)}
        sizes |= {"head": (NUM_FEATURES, NUM_CLASSES)}
        keys = dict(zip(sizes, jax.random.split(key), strict=True))
        params = {
            name: {
                "kernel": 0.5 * jax.random.normal(keys[name], size),
                "bias": jnp.zeros(size[1]),
            }
            for name, size in sizes.items()
        }
        return {"params": params, "state": {}}

    def apply_head(params, features):
        return features @ params["kernel"] + params["bias"]

    def embed(variables, x, *, train, key=None, batch_axis=None):
        hidden = variables["params"]["hidden"]
        features = jnp.tanh(x.reshape(x.shape[0], -1) @ hidden["kernel"] + hidden["bias"])
        return features, apply_head(variables["params"]["head"], features), variables["state"]

    def apply(variables, x, *, train, key=None, batch_axis=None):
        return embed(variables, x, train=train, key=key)[1:]

    head = Head(("head",), apply_head)
    return Model("two_layers", IMAGE_SHAPE, NUM_CLASSES, init, apply, embed=embed, head=head)


def compute_features(params: Params, x: np.ndarray) -> np.ndarray:
    """Features of flat images, `[n, NUM_FEATURES]`."""
    return np.tanh(x @ params["hidden/kernel"] + params["hidden/bias"])


def compute_logits(params: Params, x: np.ndarray) -> np.ndarray:
    """Logits of flat images, `[n, NUM_CLASSES]`."""
    return compute_features(params, x) @ params["head/kernel"] + params["head/bias"]


def backpropagate(
    params: Params,
    x: np.ndarray,
    logit_gradients: np.ndarray,
    feature_gradients: np.ndarray | float = 0.0,
) -> Params:
    """The gradient by all weights, given the gradients by logits `[n, C]` and by features."""
    features = compute_features(params, x)
    back = logit_gradients @ params["head/kernel"].T + feature_gradients
    back = back * (1 - features**2)
    return {
        "head/kernel": features.T @ logit_gradients,
        "head/bias": logit_gradients.sum(0),
        "hidden/kernel": x.T @ back,
        "hidden/bias": back.sum(0),
    }


def cross_entropy_gradient(params: Params, x: np.ndarray, y: np.ndarray) -> Params:
    """The gradient of the mean cross-entropy by all weights."""
    return backpropagate(params, x, logit_gradient(compute_logits(params, x), y) / len(y))


class ReferenceTwoLayers(ReferenceFedAvg):
    """FedAvg on the network of two layers."""

    def loss_gradient(self, params, x, y):
        return cross_entropy_gradient(params, x, y)

    def select_layer(self, layer: str, values: np.ndarray, others: np.ndarray) -> np.ndarray:
        """A vector with one layer of `values` and the other layer of `others`."""
        chosen, rest = self.params(values), self.params(others)
        return flatten_params(
            {name: (chosen if name.startswith(layer) else rest)[name] for name in rest}
        )


class ReferenceLocalLayer(ReferenceTwoLayers):
    """Clients go on with their own layer; a client's state is its last model."""

    local_layer = "head"

    def init_client_state(self, client):
        return self.global_vector

    def initial_client_model(self, client):
        return self.personal_vector(client)

    def personal_vector(self, client):
        """The global model with the client's own layer."""
        return self.select_layer(self.local_layer, self.client_states[client], self.global_vector)

    def finish_client(self, client, model, steps):
        self.client_states[client] = model


def run_and_compare_personal_models(make_loop, federation, *, rounds: int = 4, atol: float = 2e-6):
    """-> (loop, state) after rounds in which clients come back; all personal models are equal.

    `make_loop(federation, params)` returns a loop with `personal_vector`.
    """
    start = federation.initial_state()
    loop = make_loop(federation, params=federation.personal_model(start, 0))
    for r in range(rounds):
        loop.run_round(r)
    assert loop.count_repeat_clients() >= 2
    state, _ = federation.run(rounds, start)
    for k in range(federation.num_clients):
        actual = federation.personal_model(state, k)
        loop.assert_model(actual, model=loop.personal_vector(k), atol=atol)
    return loop, state

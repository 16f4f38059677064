"""Small networks, some of whose gradients are written by hand."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.nn import Head, Model
from support.data import IMAGE_SHAPE, NUM_CLASSES


class TwoLayers(nn.Module):
    """A perceptron in flax with one hidden layer."""

    num_classes: int
    hidden: int = 6

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Dense(self.hidden)(x.reshape(x.shape[0], -1)))
        return nn.Dense(self.num_classes)(x)


def make_linear_model() -> Model:
    """Softmax regression."""

    def init(key):
        weights = 0.1 * jax.random.normal(key, (int(np.prod(IMAGE_SHAPE)), NUM_CLASSES))
        return {"params": {"w": weights, "b": jnp.zeros(NUM_CLASSES)}, "state": {}}

    def embed(variables, x, *, train, key=None, batch_axis=None):
        params, features = variables["params"], x.reshape(x.shape[0], -1)
        return features, features @ params["w"] + params["b"], variables["state"]

    def apply(variables, x, *, train, key=None, batch_axis=None):
        return embed(variables, x, train=train, key=key)[1:]

    head = Head((), lambda params, features: features @ params["w"] + params["b"])
    return Model("linear", IMAGE_SHAPE, NUM_CLASSES, init, apply, None, embed=embed, head=head)


def make_centered_model() -> Model:
    """Inputs without the minibatch's mean (in evaluation: the running one), scaled and shifted,
    and softmax regression; the layer that does so has a name that says nothing."""

    def init(key):
        weights = 0.5 * jax.random.normal(key, (4, NUM_CLASSES))
        params = {
            "first": {"scale": jnp.ones(4), "bias": jnp.zeros(4)},
            "last": {"kernel": weights, "bias": jnp.zeros(NUM_CLASSES)},
        }
        return {"params": params, "state": {"first": {"mean": jnp.zeros(4)}}}

    def apply(variables, x, *, train, key=None, sample_mask=None):
        first, last = (variables["params"][name] for name in ("first", "last"))
        mean, x = variables["state"]["first"]["mean"], x.reshape(len(x), -1)
        if train and sample_mask is not None:
            center = sample_mask @ x / sample_mask.sum()
        else:
            center = x.mean(0) if train else mean
        features = (x - center) * first["scale"] + first["bias"]
        new_state = {"first": {"mean": mean + 0.5 * (center - mean) if train else mean}}
        return features @ last["kernel"] + last["bias"], new_state

    return Model(
        *("centred", (2, 2, 1), NUM_CLASSES, init, apply),
        norm_layers=lambda: {("first",)},
        takes_sample_mask=True,
    )


CURVED_HIDDEN = 3


def make_curved_model(*, centred=False) -> Model:
    """Logits that are no linear function of the weights: mixing them is not mixing those.

    centred: the hidden layer's inputs have the minibatch's mean taken off, or the running one's
    that is kept for use, as in batch norm.
    """

    def init(key):
        shapes = {"first": (4, CURVED_HIDDEN), "second": (CURVED_HIDDEN, 3)}
        keys = dict(zip(shapes, jax.random.split(key), strict=True))
        params = {name: jax.random.normal(keys[name], shape) for name, shape in shapes.items()}
        return {"params": params, "state": {"mean": jnp.zeros(CURVED_HIDDEN)} if centred else {}}

    def apply(variables, x, *, train, key=None):
        params, state = variables["params"], variables["state"]
        hidden = x.reshape(x.shape[0], -1) @ params["first"]
        if centred:
            mean = hidden.mean(0) if train else state["mean"]
            hidden = hidden - mean
            state = {"mean": 0.9 * state["mean"] + 0.1 * mean} if train else state
        return jnp.tanh(hidden) @ params["second"], state

    return Model("curved", IMAGE_SHAPE, NUM_CLASSES, init, apply)

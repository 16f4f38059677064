"""A projection head between a network and its classifier."""

import jax
import jax.numpy as jnp

from fedjax_het.common.errors import require
from fedjax_het.nn.models import Model

HEAD = "head"  # what every network here calls its last layer


def with_projection_head(model: Model, size: int = 256) -> Model:
    """`model` whose classifier reads a projection of its features, as MOON's public code has it:

        z = linear(relu(linear(features)))  of F and then `size` numbers,  logits = linear(z).

    The model's own classifier is left out. `embed` gives z [B, size]. Parameters besides: F^2 + F,
    F size + size and size C + C, for F C + C that are left out. Weights and biases are drawn as
    PyTorch does by default.
    """
    variables = jax.eval_shape(model.init, jax.random.key(0))
    require(HEAD in variables["params"], "model", model.name, f"a network with a layer {HEAD!r}")
    left_out = variables["params"][HEAD]
    features = left_out["kernel"].shape[0]
    layers = {
        "projection1": (features, features),
        "projection2": (features, size),
        HEAD: (size, model.num_classes),
    }

    def init(key):
        from fedjax_het.nn.modules import uniform_fan_in  # here, since flax is slow to import

        drawn = model.init(key)
        params = {name: part for name, part in drawn["params"].items() if name != HEAD}
        for number, (name, shape) in enumerate(layers.items()):
            keys = jax.random.split(jax.random.fold_in(key, number))
            draw = uniform_fan_in(shape[0])
            params[name] = {"kernel": draw(keys[0], shape), "bias": draw(keys[1], shape[1:])}
        return {**drawn, "params": params}

    def embed(variables, x, *, train, key=None):
        params = dict(variables["params"])
        one, two, last = (params.pop(name) for name in layers)
        unused = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), left_out)
        body = {**variables, "params": {**params, HEAD: unused}}
        z, _, state = model.embed(body, x, train=train, key=key)
        z = _linear(two, jax.nn.relu(_linear(one, z)))
        return z, _linear(last, z), state

    def apply(variables, x, *, train, key=None):
        return embed(variables, x, train=train, key=key)[1:]

    return model._replace(init=init, apply=apply, embed=embed)


def _linear(layer, x):
    return x @ layer["kernel"] + layer["bias"]

"""A projection head between a network and its classifier."""

from typing import Any

import jax
import jax.numpy as jnp

from fedjax_het.nn.layers import uniform_fan_in
from fedjax_het.nn.model import Head, Model
from fedjax_het.utils.errors import ConfigError, require

HEAD_LAYERS = ("projection1", "projection2", "head")


def add_projection_head(model: Model, size: int = 256) -> Model:
    """Replace a network's classifier by MOON's projection head and a new classifier.

    As in MOON's public code, with F features, `size` projections and C classes:

        z = linear(relu(linear(features))),  widths F and `size`;  logits = linear(z)

    `embed` of the new model returns z `[B, size]`. The head adds F^2 + F, F size + size and size C
    + C parameters and removes the F C + C of the old classifier. Weights and biases are drawn as
    PyTorch does by default, U(±1/√fan_in).

    Args:
      model: a network with a last fully connected layer.
      size: length of z.

    Returns:
      The network with the projection head.

    Raises:
      ConfigError: if the network has no last fully connected layer, or has other layers with the
        names in `HEAD_LAYERS`.

    Example:
      >>> import jax
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.nn import add_projection_head
      >>> model = add_projection_head(make_model("mlp", (2, 2, 1), 3, hidden=[5]), size=4)
      >>> sorted(model.init(jax.random.key(0))["params"])
      ['head', 'hidden1', 'projection1', 'projection2']
    """
    if model.embed is None or model.head is None or not model.head.path:
        expected = "a network with a last fully connected layer, to put a projection before"
        raise ConfigError(f"model = {model.name!r}: expected {expected}")
    embed_body, path = model.embed, model.head.path
    variables = jax.eval_shape(model.init, jax.random.key(0))
    classifier_params = model.head.get_parameters(variables)
    conflicts = [name for name in HEAD_LAYERS if name in variables["params"] and (name,) != path]
    expected = f"a network without layers called {', '.join(conflicts)}"
    require(not conflicts, "model", model.name, expected)
    images = jax.ShapeDtypeStruct((2, *model.input_shape), jnp.float32)
    features = jax.eval_shape(lambda v, x: embed_body(v, x, train=False)[0], variables, images)
    width = features.shape[1]
    shapes = ((width, width), (width, size), (size, model.num_classes))

    def init(key):
        init_variables = model.init(key)
        params = _replace_layer(init_variables["params"], path, None)
        for index, (name, shape) in enumerate(zip(HEAD_LAYERS, shapes, strict=True)):
            keys = jax.random.split(jax.random.fold_in(key, index))
            draw = uniform_fan_in(shape[0])
            params[name] = {"kernel": draw(keys[0], shape), "bias": draw(keys[1], shape[1:])}
        return {**init_variables, "params": params}

    def embed(variables, x, **call_arguments):
        params = dict(variables["params"])
        hidden, projection, last = (params.pop(name) for name in HEAD_LAYERS)
        unused = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), classifier_params)
        body = {**variables, "params": _replace_layer(params, path, unused)}
        features, _, state = embed_body(body, x, **call_arguments)
        z = _apply_linear(projection, jax.nn.relu(_apply_linear(hidden, features)))
        return z, _apply_linear(last, z), state

    def apply(variables, x, **call_arguments):
        return embed(variables, x, **call_arguments)[1:]

    head = Head(HEAD_LAYERS[-1:], apply=_apply_linear)
    return model._replace(init=init, apply=apply, embed=embed, head=head)


def _apply_linear(layer, x):
    """Return the output of a fully connected layer."""
    return x @ layer["kernel"] + layer["bias"]


def _replace_layer(params: dict, path: tuple[str, ...], layer: Any) -> dict:
    """Return `params` with `layer` at `path`, or without the layer at `path` if `layer` is None."""
    name, *inside = path
    if inside:
        return {**params, name: _replace_layer(params[name], tuple(inside), layer)}
    others = {other: part for other, part in params.items() if other != name}
    return others if layer is None else {**others, name: layer}

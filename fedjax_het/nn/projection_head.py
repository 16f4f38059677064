"""A projection head between a network and its classifier."""

import jax
import jax.numpy as jnp

from fedjax_het.nn.layers import uniform_fan_in
from fedjax_het.nn.model import Head, Model, count_features, name_network, require_parts
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.errors import ConfigError

HEAD_LAYERS = ("projection1", "projection2", "head")


def add_projection_head(model: Model, size: int = 256) -> Model:
    """Replace a network's classifier by MOON's projection head and a new classifier.

    MOON's public code has this head for F features, `size` projections and C classes:

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
    require_parts(model, "embed", "head")
    if model.embed is None or model.head is None or not model.head.path:
        expected = "a network with layers before the last one, to put a projection between them"
        raise ConfigError(f"{name_network(model)}: expected {expected}")
    embed_body, classifier, path = model.embed, model.head, model.head.path
    variables = jax.eval_shape(model.init, make_key(0))
    classifier_params = classifier.get_parameters(variables)
    conflicts = [name for name in HEAD_LAYERS if name in variables["params"] and (name,) != path]
    if conflicts:
        expected = f"a network without layers called {', '.join(conflicts)}"
        raise ConfigError(f"{name_network(model)}: expected {expected}")
    width = count_features(model)
    shapes = ((width, width), (width, size), (size, model.num_classes))

    def init(key):
        body = classifier.replace_parameters(model.init(key), None)
        params = dict(body["params"])
        for index, (name, shape) in enumerate(zip(HEAD_LAYERS, shapes, strict=True)):
            keys = jax.random.split(jax.random.fold_in(key, index))
            draw = uniform_fan_in(shape[0])
            params[name] = {"kernel": draw(keys[0], shape), "bias": draw(keys[1], shape[1:])}
        return {**body, "params": params}

    def embed(variables, x, **call_arguments):
        params = dict(variables["params"])
        hidden, projection, last = (params.pop(name) for name in HEAD_LAYERS)
        unused = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), classifier_params)
        body = classifier.replace_parameters({**variables, "params": params}, unused)
        features, _, state = embed_body(body, x, **call_arguments)
        z = _apply_linear(projection, jax.nn.relu(_apply_linear(hidden, features)))
        return z, _apply_linear(last, z), state

    def apply(variables, x, **call_arguments):
        return embed(variables, x, **call_arguments)[1:]

    head = Head(HEAD_LAYERS[-1:], apply=_apply_linear)
    return model._replace(init=init, apply=apply, embed=embed, head=head, input_layer=None)


def _apply_linear(layer, x):
    """Return the output of a fully connected layer."""
    return x @ layer["kernel"] + layer["bias"]

"""A digest that distinguishes two networks with the same name."""

import hashlib
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.nn.model import Model

_MEMORY_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def compute_network_digest(model: Model) -> str:
    """Hash the function that a network computes, from its traces.

    The hash covers the shapes of the variables and the programs of `init` and `apply`, in
    evaluation and in training, with the arrays that the programs close over. It differs between
    networks with different weight shapes, layers, activations or initializations. It does not
    depend on names or on the backend. Another version of jax may give another digest. Cost: three
    traces.

    Args:
      model: the network.

    Returns:
      16 hexadecimal digits.

    Example:
      >>> from fedjax_het.nn import make_model
      >>> from fedjax_het.nn import compute_network_digest
      >>> digest = compute_network_digest(make_model("mlp", (2, 2, 1), 3))
      >>> len(digest), digest == compute_network_digest(make_model("mlp", (2, 2, 1), 3))
      (16, True)
    """
    key, images = jax.random.key(0), jnp.zeros((2, *model.input_shape))
    variables = jax.eval_shape(model.init, key)
    programs = [jax.make_jaxpr(model.init)(key)]
    for train in (False, True):
        key_argument = {"key": key} if train else {}

        def apply_model(variables, images, key_argument=key_argument, train=train):
            return model.apply(variables, images, train=train, **key_argument)

        programs.append(jax.make_jaxpr(apply_model)(variables, images))
    digest = hash_jaxprs(programs)
    leaves, structure = jax.tree.flatten(variables)
    digest.update(f"{structure}{[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}".encode())
    return digest.hexdigest()[:16]


def hash_jaxprs(programs: Iterable[Any]) -> Any:
    """Hash programs and the arrays that they close over with SHA-256.

    Args:
      programs: results of `jax.make_jaxpr`.

    Returns:
      The `hashlib` object, which accepts more data by `update`.
    """
    digest = hashlib.sha256()
    for program in programs:
        digest.update(_MEMORY_ADDRESS.sub("", str(program)).encode())
        for constant in program.consts:
            constant = jnp.asarray(constant)
            if not jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key):
                digest.update(np.asarray(constant).tobytes())
    return digest

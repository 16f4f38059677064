"""What tells two networks apart that have one name."""

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
    """16 hexadecimal digits: the hash of what the network computes, from its traces.

    In it are the shapes of the variables and the programs of `init` and of `apply`, in evaluation
    and in training, with the arrays that they close over: so two networks differ that differ in
    weights' shapes, layers, activations, or how weights are drawn. Names do not enter, nor does the
    backend. Another version of jax may give another digest. Cost: three traces.
    """
    key, images = jax.random.key(0), jnp.zeros((2, *model.input_shape))
    variables = jax.eval_shape(model.init, key)
    programs = [jax.make_jaxpr(model.init)(key)]
    for train in (False, True):
        key_argument = {"key": key} if train else {}

        def apply_model(variables, images, key_argument=key_argument, train=train):
            return model.apply(variables, images, train=train, **key_argument)

        programs.append(jax.make_jaxpr(apply_model)(variables, images))
    sha = hash_jaxprs(programs)
    leaves, structure = jax.tree.flatten(variables)
    sha.update(f"{structure}{[(leaf.shape, str(leaf.dtype)) for leaf in leaves]}".encode())
    return sha.hexdigest()[:16]


def hash_jaxprs(programs: Iterable[Any]) -> Any:
    """SHA-256 of what programs compute, by `jax.make_jaxpr`, with the arrays that they close over;
    it takes more by its `update`."""
    sha = hashlib.sha256()
    for program in programs:
        sha.update(_MEMORY_ADDRESS.sub("", str(program)).encode())
        for constant in program.consts:
            constant = jnp.asarray(constant)
            if not jax.dtypes.issubdtype(constant.dtype, jax.dtypes.prng_key):
                sha.update(np.asarray(constant).tobytes())
    return sha

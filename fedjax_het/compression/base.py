"""`Compressor`, the base class of all compressions of uploads, and error feedback."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from fedjax_het.utils.kinds import Kind

Tree = Any
Scope = Literal["model", "tensor"]
FLOAT_BITS = 32
"""Bits of a number that is sent as it is."""


@dataclass(frozen=True, kw_only=True)
class Compressor(Kind):
    """A compression of the change of a model; a value of the setting `compression`.

    A compressor is a pure function: it encodes the change and returns the decoded values, which the
    server averages. A class of this type defines `compress_vector` and `count_bits`.

    Example:
      >>> from fedjax_het.compression import Compressor, TopK
      >>> isinstance(TopK(fraction=0.1), Compressor)
      True
    """

    scope: Scope = "tensor"
    """Numbers that are compressed as one vector: all numbers of a "tensor" of the network, or all
    numbers of the "model"."""
    error_feedback: bool = False
    "Whether a client adds to its next upload the part that this upload has lost."
    strength: ClassVar[str] = ""
    "Name of the field that sets the size of the upload; empty: none."
    neutral: ClassVar[float | None] = None

    @abstractmethod
    def compress_vector(self, vector: jax.Array, key: jax.Array) -> jax.Array:
        """Return the decoded values of a vector.

        Args:
          vector: numbers of a float type, `[d]`, d >= 1.
          key: PRNG key of the draws.

        Returns:
          A vector of the same shape and type.
        """

    @abstractmethod
    def count_bits(self, size: int) -> int:
        """Return the bits that encode a vector.

        Args:
          size: number of entries, d >= 1.

        Returns:
          Number of bits, which does not depend on the values.
        """

    def compress(self, tree: Tree, key: jax.Array) -> Tree:
        """Return the decoded values of a pytree.

        Args:
          tree: pytree of float arrays.
          key: PRNG key of the client and the round.

        Returns:
          A tree of the same structure, shapes and types.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from fedjax_het.compression import TopK
          >>> change = {"w": jnp.array([[1.0, -4.0], [2.0, 3.0]])}
          >>> TopK(fraction=0.5).compress(change, jax.random.key(0))["w"].tolist()
          [[0.0, -4.0], [0.0, 3.0]]
        """
        if self.scope == "model":
            vector, unravel = ravel_pytree(tree)
            return unravel(self.compress_vector(vector, key)) if vector.size else tree
        leaves, structure = jax.tree.flatten(tree)
        decoded = [
            self.compress_vector(leaf.ravel(), jax.random.fold_in(key, i)).reshape(leaf.shape)
            if leaf.size
            else leaf
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, decoded)

    def compress_with_memory(self, tree: Tree, memory: Tree, key: jax.Array) -> tuple[Tree, Tree]:
        """Compress a change with error feedback (Stich, Cordonnier and Jaggi, 2018, Algorithm 1).

        p = change + memory is compressed, and p - decoded is the new memory.

        Args:
          tree: the change, a pytree of float arrays.
          memory: the part that earlier uploads have lost, like `tree`.
          key: PRNG key of the client and the round.

        Returns:
          The decoded values and the new memory, both like `tree`.

        Example:
          >>> import jax
          >>> import jax.numpy as jnp
          >>> from fedjax_het.compression import TopK
          >>> change, memory, key = jnp.array([3.0, 1.0]), jnp.array([0.0, 1.0]), jax.random.key(0)
          >>> decoded, memory = TopK(fraction=0.5).compress_with_memory(change, memory, key)
          >>> decoded.tolist(), memory.tolist()
          ([3.0, 0.0], [0.0, 2.0])
        """
        total = jax.tree.map(jnp.add, tree, memory)
        decoded = self.compress(total, key)
        return decoded, jax.tree.map(jnp.subtract, total, decoded)

    def count_bytes(self, tree: Tree) -> int:
        """Return the bytes of an upload, rounded up to a whole number.

        Args:
          tree: pytree of arrays, or of their shapes as `jax.eval_shape` returns them.

        Returns:
          Number of bytes, which depends on the shapes only.

        Example:
          >>> import jax.numpy as jnp
          >>> from fedjax_het.compression import Sign
          >>> Sign().count_bytes({"kernel": jnp.zeros((10, 3)), "bias": jnp.zeros(3)})
          13
        """
        sizes = [leaf.size for leaf in jax.tree.leaves(tree)]
        if self.scope == "model":
            sizes = [sum(sizes)]
        return -(-sum(self.count_bits(size) for size in sizes if size) // 8)

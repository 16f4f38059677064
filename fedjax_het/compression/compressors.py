"""Kinds of compression: top-k, QSGD, sign and uniform quantization."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp

from fedjax_het.compression.base import FLOAT_BITS, Compressor, Scope
from fedjax_het.utils.config import Bounds


@dataclass(frozen=True, kw_only=True)
class TopK(Compressor):
    """Send the k entries of largest absolute value (Stich, Cordonnier and Jaggi, NeurIPS 2018).

    k = round(fraction d), at least 1, of d entries. Bits: k (32 + ceil(log2 d)) for values and
    positions, at most 32 d.

    Example:
      >>> from fedjax_het.compression import TopK
      >>> TopK(fraction=0.1).count_bits(1000)  # 100 values with positions of 10 bits
      4200
    """

    fraction: Annotated[float, Bounds(0, 1, open_low=True)] = 0.01
    "Fraction of the entries that are sent, in (0, 1]."
    scope: Scope = "model"
    error_feedback: bool = True
    name: ClassVar[str] = "topk"
    description: ClassVar[str] = "the largest entries of the change, with error feedback"
    strength: ClassVar[str] = "fraction"

    def count_entries(self, size: int) -> int:
        """Return the number of entries that are sent of a vector with `size` entries."""
        return max(1, round(self.fraction * size))

    def compress_vector(self, vector, key):
        """Set all other entries to 0."""
        count = self.count_entries(vector.size)
        if count == vector.size:
            return vector
        positions = jax.lax.top_k(jnp.abs(vector), count)[1]
        return jnp.zeros_like(vector).at[positions].set(vector[positions])

    def count_bits(self, size):
        """Count values and positions, or all values where these are fewer bits."""
        position_bits = (size - 1).bit_length()
        return min(self.count_entries(size) * (FLOAT_BITS + position_bits), FLOAT_BITS * size)


@dataclass(frozen=True, kw_only=True)
class QSGD(Compressor):
    """Round to random levels without bias (Alistarh et al., NeurIPS 2017, arXiv:1610.02132).

    The decoded entry is ||v|| sign(v_i) xi_i / s, with s `levels`. xi_i is one of the two integers
    next to s |v_i| / ||v||, drawn such that its mean is that number. Bits: 32 for the norm, and
    ceil(log2(2 s + 1)) for each entry. The paper's Elias code, whose length depends on the values,
    is not used.

    Example:
      >>> from fedjax_het.compression import QSGD
      >>> QSGD(levels=1).count_bits(1000)  # the norm, and two bits for each entry
      2032
    """

    levels: Annotated[int, Bounds(1, 2**22)] = 16
    "Number s of levels above 0."
    name: ClassVar[str] = "qsgd"
    description: ClassVar[str] = "unbiased random rounding to levels"
    strength: ClassVar[str] = "levels"

    def compress_vector(self, vector, key):
        """Round each entry up with the probability that makes its mean exact."""
        norm = jnp.sqrt(jnp.vdot(vector, vector))
        level = self.levels * jnp.abs(vector) / jnp.where(norm == 0, 1, norm)
        lower = jnp.floor(level)
        draws = jax.random.uniform(key, vector.shape, vector.dtype)
        rounded = lower + (draws < level - lower)
        return norm * jnp.sign(vector) * rounded / self.levels

    def count_bits(self, size):
        """Count the norm, and a sign and a level for each entry."""
        return FLOAT_BITS + size * (2 * self.levels).bit_length()


@dataclass(frozen=True, kw_only=True)
class Sign(Compressor):
    """Send signs and the mean absolute value (EF-signSGD, Karimireddy et al., ICML 2019).

    The decoded vector is (||v||_1 / d) sign(v) (arXiv:1901.09847, Algorithm 1), where sign(0) is 1,
    so that a sign is one bit. Bits: 32 + d.

    Example:
      >>> from fedjax_het.compression import Sign
      >>> Sign().count_bits(1000)
      1032
    """

    error_feedback: bool = True
    name: ClassVar[str] = "sign"
    description: ClassVar[str] = "signs with a common scale, with error feedback"

    def compress_vector(self, vector, key):
        """Replace each entry by plus or minus the mean absolute value."""
        scale = jnp.abs(vector).mean()
        return jnp.where(vector >= 0, scale, -scale)

    def count_bits(self, size):
        """Count the scale, and one bit for each entry."""
        return FLOAT_BITS + size


@dataclass(frozen=True, kw_only=True)
class Uniform(Compressor):
    """Round to the nearest of equally spaced values between -max |v| and max |v|.

    The values are m max |v| / (2^(bits - 1) - 1) with an integer m, as in symmetric 8-bit
    quantization. Bits: 32 for max |v|, and `bits` for each entry.

    Example:
      >>> from fedjax_het.compression import Uniform
      >>> Uniform(bits=8).count_bits(1000)
      8032
    """

    bits: Annotated[int, Bounds(2, 24)] = 8
    "Bits of an entry."
    name: ClassVar[str] = "uniform"
    description: ClassVar[str] = "rounding to equally spaced values, of 8 bits by default"
    strength: ClassVar[str] = "bits"

    def compress_vector(self, vector, key):
        """Round each entry to the nearest value."""
        step = jnp.abs(vector).max() / (2 ** (self.bits - 1) - 1)
        return jnp.round(vector / jnp.where(step == 0, 1, step)) * step

    def count_bits(self, size):
        """Count the largest value, and an integer for each entry."""
        return FLOAT_BITS + size * self.bits

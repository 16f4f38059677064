"""Backdoor attacks: a trigger in the image makes the model predict a class of the attacker."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.attacks.base import DataAttack, MaliciousData, MaliciousLabels
from fedjax_het.metrics.registry import Metric
from fedjax_het.skews import FeatureSkew
from fedjax_het.utils.config import NonNegativeInt, PositiveInt, UnitInterval
from fedjax_het.utils.errors import require


@dataclass(frozen=True, kw_only=True)
class Backdoor(DataAttack):
    """Malicious clients train on images with a trigger and the label `target` (Gu et al., 2017).

    The trigger is a white square in the lower right corner, one pixel from the edges. A share of
    the examples of a malicious client has it, the other examples are clean. In every evaluation the
    metric `attack_success` is the share of test images of other classes that the global model
    assigns to `target` with the trigger. The attack combines with `scaled_update`, which is the
    model replacement of Bagdasaryan et al. (AISTATS 2020).

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.attacks import Backdoor
      >>> Backdoor(size=1).stamp(jnp.zeros((1, 4, 4, 1)))[0, :, :, 0].sum(0).tolist()
      [0.0, 0.0, 1.0, 0.0]
    """

    target: NonNegativeInt = 0
    "Class that the attacker wants for images with the trigger."
    poisoned: UnitInterval = 0.5
    "Share of the examples of a malicious client that have the trigger."
    size: PositiveInt = 3
    "Height and width of the trigger, in pixels."
    name: ClassVar[str] = "backdoor"
    description: ClassVar[str] = "malicious clients teach the model to obey a trigger in the image"

    def make_skews(self, seed):
        """Return the trigger and the false labels."""
        return BackdoorTrigger(attack=self, seed=seed), MaliciousLabels(attack=self, seed=seed)

    def change_labels(self, positions, labels, num_classes, seed):
        """Replace the labels of the poisoned examples."""
        expected = f"at most {num_classes - 1}, the last class"
        require(self.target < num_classes, "attack backdoor:target", self.target, expected)
        return np.where(self.select_poisoned(positions, seed), self.target, labels)

    def select_poisoned(self, positions: Any, seed: int) -> Any:
        """Return which training examples have the trigger if their client is malicious.

        The choice depends on seed and position alone, so that host and devices agree.

        Args:
          positions: positions of the examples, integers `[B]`, an array of NumPy or JAX.
          seed: seed of the partition.

        Returns:
          Bool `[B]`.

        Example:
          >>> import numpy as np
          >>> from fedjax_het.attacks import Backdoor
          >>> round(float(Backdoor(poisoned=0.3).select_poisoned(np.arange(9999), 0).mean()), 2)
          0.3
        """
        # The finalizer of MurmurHash3 (public domain), which mixes 32 bits.
        bits = positions.astype("uint32") + np.uint32(seed * 0x9E3779B9 % 2**32)
        for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
            bits = (bits ^ (bits >> shift)) * np.uint32(factor)
        bits = bits ^ (bits >> 16)
        return (bits >> 8) < round(self.poisoned * 2**24)

    def stamp(self, images: jax.Array) -> jax.Array:
        """Return images with the trigger.

        Args:
          images: `[..., H, W, C]`, uint8, or float32 with values in [0, 1].

        Returns:
          Images of this shape and type.
        """
        white = 255 if images.dtype == jnp.uint8 else 1
        edge = slice(-self.size - 1, -1)
        return images.at[..., edge, edge, :].set(white)

    def make_success_metric(self) -> Metric:
        """Return the metric `attack_success`, for outputs of images with the trigger."""

        def count(logits: jax.Array, labels: jax.Array, mask: jax.Array) -> jax.Array:
            is_other = (labels != self.target) * mask
            is_target = jnp.where(jnp.isfinite(logits).all(-1), logits.argmax(-1), jnp.nan)
            is_target = jnp.where(jnp.isnan(is_target), jnp.nan, is_target == self.target)
            return jnp.stack([jnp.where(is_other > 0, is_target, 0).sum(), is_other.sum()])

        return Metric(
            "attack_success",
            "share of images with the trigger that the model assigns to the attacker's class",
            count,
            lambda counts: {"attack_success": counts[0] / counts[1]},
            needs_classes=True,
        )


@dataclass(frozen=True, kw_only=True)
class BackdoorTrigger(MaliciousData, FeatureSkew):
    """The trigger on the training images of malicious clients, as a skew of the images.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.attacks import Backdoor
      >>> from fedjax_het.attacks.backdoor import BackdoorTrigger
      >>> skew = BackdoorTrigger(attack=Backdoor(fraction=0.5, choice="first"), seed=0)
      >>> skew.make_parameters(np.random.default_rng(0), 4, (8, 8, 1))[0].tolist()
      [True, True, False, False]
    """

    description: ClassVar[str] = "images of malicious clients"
    reads_positions: ClassVar[bool] = True
    changes_tests: ClassVar[bool] = False

    def validate_images(self, input_shape):
        """Require images that are larger than the trigger."""
        height, width = input_shape[:2]
        expected = f"at most {min(height, width) - 1} for images of {height} x {width}"
        is_valid = self.attack.size < min(height, width)
        require(is_valid, "attack backdoor:size", self.attack.size, expected)

    def get_static(self):
        """Return the attack."""
        return (self.attack, self.seed)

    def make_parameters(self, rng, num_clients, input_shape):
        """Return the malicious clients."""
        return self.attack.choose_clients(num_clients, self.seed), ()

    @staticmethod
    def transform(images, parameters, shared, keys, *static):
        """Stamp the poisoned images; `keys` are their positions."""
        attack, seed = static
        has_trigger = parameters & attack.select_poisoned(keys, seed)
        return jnp.where(has_trigger[:, None, None, None], attack.stamp(images), images)

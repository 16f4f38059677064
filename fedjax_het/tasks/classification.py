"""Classification: each example has one class."""

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax

from fedjax_het.tasks.base import TaskKind
from fedjax_het.utils.array_validation import validate_labels


def compute_cross_entropies(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return cross-entropies in nats.

    Args:
      logits: float32 `[..., C]`.
      labels: classes, int32 `[...]`, or probabilities, float32 `[..., C]`.

    Returns:
      Losses, float32 `[...]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.tasks.classification import compute_cross_entropies
      >>> round(float(compute_cross_entropies(jnp.zeros((1, 2)), jnp.array([1]))[0]), 4)
      0.6931
    """
    if labels.ndim == logits.ndim:
        return optax.softmax_cross_entropy(logits, labels)
    return jax.lax.platform_dependent(
        logits, labels, cpu=_cross_entropy_by_gather, default=_cross_entropy_by_mask
    )


_cross_entropy_by_gather = optax.softmax_cross_entropy_with_integer_labels


def _cross_entropy_by_mask(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the cross-entropy by a mask.

    On accelerators the gradient of a gather is a scatter, a separate operation.
    """
    is_label = labels[..., None] == jnp.arange(logits.shape[-1])
    return jax.nn.logsumexp(logits, axis=-1) - jnp.where(is_label, logits, 0).sum(-1)


def correct(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return whether the label has the largest output.

    An output that is not finite gives NaN, so that no mean hides it. The largest of NaN would be
    class 0.

    Args:
      logits: float32 `[..., C]`.
      labels: int32 `[...]`.

    Returns:
      Float32 `[...]`: 1, 0 or NaN.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.tasks.classification import correct
      >>> logits = jnp.array([[2.0, 1.0], [0.0, 3.0], [jnp.nan, 0.0]])
      >>> correct(logits, jnp.array([0, 0, 0])).tolist()
      [1.0, 0.0, nan]
    """
    is_correct = (logits.argmax(-1) == labels).astype(jnp.float32)
    return jnp.where(jnp.isfinite(logits).all(-1), is_correct, jnp.nan)


@dataclass(frozen=True)
class Classification(TaskKind):
    """One class for each example, int32 `[N]`: cross-entropy and accuracy.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.tasks import Classification
      >>> Classification().compute_scores(jnp.array([[2.0, 1.0]]), jnp.array([0])).tolist()
      [1.0]
    """

    name: ClassVar[str] = "classification"
    description: ClassVar[str] = "one class for each example: cross-entropy, accuracy"
    loss_is_in_nats: ClassVar[bool] = True
    has_classes: ClassVar[bool] = True

    @staticmethod
    def validate_labels(argument, labels, inputs_argument, inputs):
        """Check classes `[N]`, see `TaskKind`."""
        return validate_labels(argument, labels, inputs_argument, inputs)

    @staticmethod
    def count_outputs(labels, num_tokens):
        """Return the largest class plus one."""
        return int(labels.max()) + 1

    def predict(self, outputs):
        """Return the class of the largest logit, int64 `[N]`."""
        return outputs.argmax(-1)

    def compute_losses(self, outputs, labels):
        """Return cross-entropies in nats."""
        return compute_cross_entropies(outputs, labels)

    def compute_scores(self, outputs, labels):
        """Return 1 where the class has the largest logit, else 0."""
        return correct(outputs, labels)

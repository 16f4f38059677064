"""Multi-label classification: each label of an example is present or absent."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.tasks.base import TaskKind, hide_nonfinite
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.errors import require
from fedjax_het.utils.input_kinds import count_rows


@dataclass(frozen=True)
class MultiLabel(TaskKind):
    """Labels that are present (1) or absent (0), float32 `[N, L]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.tasks import MultiLabel
      >>> outputs, labels = jnp.array([[2.0, -1.0]]), jnp.array([[1.0, 1.0]])
      >>> round(float(MultiLabel().compute_losses(outputs, labels)[0]), 2)
      0.72
    """

    name: ClassVar[str] = "multi_label"
    description: ClassVar[str] = "several labels for each example: binary cross-entropy, accuracy"
    loss_is_in_nats: ClassVar[bool] = True

    @staticmethod
    def validate_labels(argument, labels, inputs_argument, inputs):
        """Check labels `[N, L]` of zeros and ones, see `TaskKind`."""
        expected = f"zeros and ones [N, L], a row for each of the {count_rows(inputs)} examples"
        labels = to_array(argument, labels, expected)
        is_valid = labels.ndim == 2 and len(labels) == count_rows(inputs) and labels.shape[1] > 0
        require(is_valid, f"shape of {argument}", labels.shape, expected)
        is_valid = labels.dtype.kind in "biuf" and bool(np.isin(labels, (0, 1)).all())
        require(is_valid, argument, f"{labels.dtype} values", expected)
        return labels.astype(np.float32)

    @staticmethod
    def count_outputs(labels, num_tokens):
        """Return the number of labels."""
        return labels.shape[1]

    def predict(self, outputs):
        """Return 1 for labels with a positive output, else 0, int64 `[N, L]`."""
        return (outputs > 0).astype(np.int64)

    def compute_losses(self, outputs, labels):
        """Return the mean binary cross-entropy over the labels of each example, in nats."""
        return optax.sigmoid_binary_cross_entropy(outputs, labels).mean(-1)

    def compute_scores(self, outputs, labels):
        """Return the fraction of labels whose output has the right sign."""
        return hide_nonfinite(((outputs > 0) == (labels > 0)).mean(-1, jnp.float32), outputs)

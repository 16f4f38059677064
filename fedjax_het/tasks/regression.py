"""Regression: each example has numbers as labels."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from fedjax_het.tasks.base import TaskKind, hide_nonfinite
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.arrays import is_constant
from fedjax_het.utils.errors import require
from fedjax_het.utils.input_kinds import count_rows

_MAX_LABEL = 1e18


@dataclass(frozen=True)
class Regression(TaskKind):
    """Numbers for each example, float32 `[N, D]`: squared error and coefficient of determination.

    Attributes:
      variances: variance of each of the D test labels.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.tasks import Regression
      >>> Regression.from_labels(np.array([[1.0], [3.0]])).variances
      (1.0,)
    """

    name: ClassVar[str] = "regression"
    description: ClassVar[str] = "numbers for each example: mean squared error, R2"
    score_name: ClassVar[str] = "R2"
    variances: tuple[float, ...] = (1.0,)

    @staticmethod
    def validate_labels(argument, labels, inputs_argument, inputs):
        """Check finite numbers `[N]` or `[N, D]`, see `TaskKind`."""
        expected = f"finite numbers [N] or [N, D], for each of the {count_rows(inputs)} examples"
        labels = to_array(argument, labels, expected)
        labels = labels[:, None] if labels.ndim == 1 else labels
        is_valid = labels.ndim == 2 and len(labels) == count_rows(inputs) and labels.shape[1] > 0
        require(is_valid, f"shape of {argument}", labels.shape, expected)
        require(labels.dtype.kind in "biuf", f"dtype of {argument}", str(labels.dtype), expected)
        labels = labels.astype(np.float64)
        is_valid = bool(np.isfinite(labels).all())
        require(is_valid, argument, "with a value that is not finite", expected)
        largest = float(np.abs(labels).max())
        expected = f"at most {_MAX_LABEL:g}, whose square is finite in float32: scale the labels"
        require(largest <= _MAX_LABEL, f"largest of {argument}", largest, expected)
        return labels.astype(np.float32)

    @staticmethod
    def count_outputs(labels, num_tokens):
        """Return the number of numbers."""
        return labels.shape[1]

    @classmethod
    def from_labels(cls, labels):
        """Return the kind with the variances of the labels; a constant label has the variance 1."""
        labels = labels.astype(np.float64)
        pairs = zip(labels.mean(0), labels.var(0), strict=True)
        return cls(tuple(1.0 if is_constant(m, v**0.5) else float(v) for m, v in pairs))

    def compute_losses(self, outputs, labels):
        """Return the mean squared error over the numbers of each example."""
        return jnp.square(outputs - labels).mean(-1)

    def compute_scores(self, outputs, labels):
        """Return 1 - error² / variance, whose mean over the test examples is R²."""
        relative = jnp.square(outputs - labels) / jnp.asarray(self.variances, jnp.float32)
        return hide_nonfinite(1 - relative.mean(-1), outputs)

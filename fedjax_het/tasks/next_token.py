"""Next-token prediction: each token of an example has the following token as its label."""

from dataclasses import dataclass
from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from fedjax_het.tasks.base import TaskKind, hide_nonfinite
from fedjax_het.tasks.classification import compute_cross_entropies
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.errors import require


@dataclass(frozen=True)
class NextToken(TaskKind):
    """The token after each token, int32 `[N, T]`; -1 where there is none.

    The loss of an example is the mean over its tokens. Means over test examples weight each token
    equally.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.tasks import NextToken
      >>> NextToken().count_targets(jnp.array([[3, 1, -1], [2, 0, 1]])).tolist()
      [2.0, 3.0]
    """

    name: ClassVar[str] = "next_token"
    description: ClassVar[str] = "the token after each token: cross-entropy, accuracy"
    loss_is_in_nats: ClassVar[bool] = True
    is_per_token: ClassVar[bool] = True

    @staticmethod
    def validate_labels(argument, labels, inputs_argument, inputs):
        """Check tokens `[N, T]` or -1, of the shape of the inputs, see `TaskKind`."""
        is_array = isinstance(inputs, np.ndarray)
        require(is_array, inputs_argument, "several arrays", f"one array of tokens, for {argument}")
        expected = f"integers {inputs.shape}, the token after each token, -1 where there is none"
        labels = to_array(argument, labels, expected)
        is_valid = labels.shape == inputs.shape and labels.dtype.kind in "iu"
        require(is_valid, argument, f"{labels.dtype} {labels.shape}", expected)
        low, high = int(labels.min()), int(labels.max())
        require(low >= -1, f"range of {argument}", (low, high), expected)
        require(high >= 0, argument, -1, f"{expected}; not -1 everywhere")
        return np.ascontiguousarray(labels, dtype=np.int32).view()

    @staticmethod
    def count_outputs(labels, num_tokens):
        """Return the number of tokens."""
        return num_tokens

    def predict(self, outputs):
        """Return the token of the largest logit, int64 `[N, T]`."""
        return outputs.argmax(-1)

    def compute_losses(self, outputs, labels):
        """Return the mean cross-entropy over the tokens of each example, in nats."""
        return self._average(compute_cross_entropies(outputs, jnp.maximum(labels, 0)), labels)

    def compute_scores(self, outputs, labels):
        """Return the fraction of tokens that have the largest logit."""
        is_correct = (outputs.argmax(-1) == labels).astype(jnp.float32)
        return hide_nonfinite(self._average(is_correct, labels), outputs)

    def count_targets(self, labels):
        """Return the number of tokens of each example that have a label."""
        return (labels >= 0).sum(-1, dtype=jnp.float32)

    def _average(self, values, labels):
        return jnp.where(labels >= 0, values, 0).sum(-1) / jnp.maximum(
            self.count_targets(labels), 1
        )

"""The interface of a kind of task: its labels, its loss and its score."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.utils.errors import ConfigError


@dataclass(frozen=True)
class TaskKind(ABC):
    """A kind of task: the meaning of labels and outputs, with a loss and a score of each example.

    An object is a static part of compiled programs. Its fields are constants of the data set, such
    as variances of the labels.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.tasks import TASKS
      >>> kind = TASKS["multi_label"].make()
      >>> outputs, labels = jnp.array([[2.0, -1.0]]), jnp.array([[1.0, 1.0]])
      >>> kind.compute_scores(outputs, labels).tolist()
      [0.5]
    """

    name: ClassVar[str]
    """Name of the kind, the value of `Dataset.task`."""
    description: ClassVar[str]
    """One line for `fedjax-het list`."""
    score_name: ClassVar[str] = "accuracy"
    """Name of the score in texts."""
    loss_is_in_nats: ClassVar[bool] = False
    """Whether the loss is a negative log-likelihood in nats, for labels of figures."""
    has_classes: ClassVar[bool] = False
    """Whether a label is a class. Only then partitions divide classes, and methods read classes."""
    is_per_token: ClassVar[bool] = False
    """Whether a network has outputs for each token of its input."""

    @staticmethod
    @abstractmethod
    def validate_labels(
        argument: str, labels: object, inputs_argument: str, inputs: Any
    ) -> np.ndarray:
        """Check labels and convert them to the type that is stored.

        Args:
          argument: name of the argument of the labels, for messages.
          labels: the user's labels.
          inputs_argument: name of the argument of the inputs, for messages.
          inputs: the checked inputs of the examples, `[N, ...]`, or arrays by name.

        Returns:
          Labels `[N, ...]`, int32 or float32.

        Raises:
          ConfigError: if shape, dtype or range is invalid.
        """

    @staticmethod
    @abstractmethod
    def count_outputs(labels: np.ndarray, num_tokens: int | None) -> int:
        """Return the number of outputs of a network, of each token if there are outputs per token.

        Args:
          labels: checked training labels.
          num_tokens: number of different tokens of the inputs, or None.
        """

    @classmethod
    def from_labels(cls, labels: np.ndarray) -> "TaskKind":
        """Return the kind with the constants of test labels `[N, ...]`."""
        return cls()

    @abstractmethod
    def compute_losses(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the loss of each example, float32 `[B]`.

        Args:
          outputs: outputs of the network, `[B, C]`, or `[B, T, C]` per token.
          labels: labels as stored, `[B, ...]`.
        """

    @abstractmethod
    def compute_scores(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the score of each example, float32 `[B]`; at most 1, and larger is better.

        An output that is not finite gives NaN, so that no mean hides it.

        Args:
          outputs: outputs of the network, `[B, C]`, or `[B, T, C]` per token.
          labels: labels as stored, `[B, ...]`.
        """

    @classmethod
    def require_classes(cls, owner: str, alternative: str = "") -> None:
        """Raise ConfigError if labels are no classes.

        Args:
          owner: the method or setting that reads classes, for the message.
          alternative: end of the message.
        """
        if not cls.has_classes:
            raise ConfigError(
                f"{owner} reads classes, and labels of task {cls.name!r} are none: expected a data "
                f"set of task 'classification'{alternative}"
            )

    def predict(self, outputs: np.ndarray) -> np.ndarray:
        """Return the predictions of outputs `[N, ...]`; by default the outputs themselves."""
        return outputs

    def count_targets(self, labels: jax.Array) -> jax.Array:
        """Return the weight of each example in means over test examples, float32 `[B]`."""
        return jnp.ones(len(labels), jnp.float32)


def hide_nonfinite(scores: jax.Array, outputs: jax.Array) -> jax.Array:
    """Return scores, NaN for examples with an output that is not finite.

    Args:
      scores: float32 `[B]`.
      outputs: outputs `[B, ...]`.

    Returns:
      Scores, float32 `[B]`.
    """
    is_finite = jnp.isfinite(outputs).reshape(len(outputs), -1).all(-1)
    return jnp.where(is_finite, scores, jnp.nan)

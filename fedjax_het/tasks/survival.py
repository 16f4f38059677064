"""Survival analysis in discrete time: labels are the events of intervals of time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_het.tasks.base import TaskKind, hide_nonfinite
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.errors import require
from fedjax_het.utils.input_kinds import count_rows

_NO_EVENT, _EVENT, _NOT_AT_RISK = 0, 1, -1


def encode_survival(times: np.ndarray, events: np.ndarray, ends: Sequence[float]) -> np.ndarray:
    """Return the labels of times until an event or until the end of the observation.

    Intervals begin at 0 or at the end of the interval before. Someone who leaves during an interval
    without an event is not at risk in it. Times after the last end are censored there.

    Args:
      times: time of each example, `[N]`, in the unit of `ends`.
      events: whether the event occurred at this time, `[N]`; otherwise the observation ended.
      ends: ends of the L intervals, ascending.

    Returns:
      Labels, int32 `[N, L]`: 1 in the interval of the event, 0 in an interval that ends without an
      event, -1 in other intervals.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.tasks.survival import encode_survival
      >>> times, events = np.array([1.5, 2.5, 9.0]), np.array([True, False, True])
      >>> encode_survival(times, events, [1, 2, 3]).tolist()
      [[0, 1, -1], [0, 0, -1], [0, 0, 0]]
    """
    bounds = np.asarray(ends)
    column, has_event = np.asarray(times)[:, None], np.asarray(events, bool)[:, None]
    survives = np.where(has_event, column > bounds, column >= bounds)
    is_at_risk = np.concatenate([np.ones_like(survives[:, :1]), survives[:, :-1]], axis=1)
    dies = is_at_risk & ~survives & has_event
    return np.where(survives, _NO_EVENT, np.where(dies, _EVENT, _NOT_AT_RISK)).astype(np.int32)


@dataclass(frozen=True)
class Survival(TaskKind):
    """Events of L intervals, int32 `[N, L]`: discrete-time likelihood, as Andreux et al. (2020).

    An output is the logit of the hazard: the probability of the event in an interval for someone at
    risk. The negative log-likelihood is a sum over examples, in contrast to Cox's partial
    likelihood, which compares examples of all clients (arXiv 2006.08997). The score is McFadden's
    R², 1 - loss / null loss, where the null model has the hazards of all test examples.

    Attributes:
      null_loss: mean negative log-likelihood of the null model.

    Example:
      >>> import jax.numpy as jnp
      >>> import numpy as np
      >>> from fedjax_het.tasks.survival import Survival
      >>> labels = np.array([[0, 1], [1, -1], [0, 0], [0, -1]])
      >>> kind = Survival.from_labels(labels)
      >>> hazards = jnp.array([[0.25, 0.5]] * 4)  # of the null model
      >>> outputs = jnp.log(hazards / (1 - hazards))
      >>> abs(round(float(kind.compute_scores(outputs, labels).mean()), 5))
      0.0
    """

    name: ClassVar[str] = "survival"
    description: ClassVar[str] = "events of intervals: discrete-time likelihood, pseudo-R2"
    loss_is_in_nats: ClassVar[bool] = True
    score_name: ClassVar[str] = "pseudo-R2"
    null_loss: float = 1.0

    @staticmethod
    def validate_labels(argument, labels, inputs_argument, inputs):
        """Check labels `[N, L]` of -1, 0 and 1 in this order in time, see `TaskKind`."""
        expected = (
            f"integers [N, L] of -1, 0 and 1, a row for each of {count_rows(inputs)} examples"
        )
        labels = to_array(argument, labels, expected)
        is_valid = labels.ndim == 2 and len(labels) == count_rows(inputs) and labels.shape[1] > 0
        require(is_valid, f"shape of {argument}", labels.shape, expected)
        is_valid = labels.dtype.kind in "iu" and bool(np.isin(labels, (-1, 0, 1)).all())
        require(is_valid, argument, f"{labels.dtype} values", expected)
        follows = (labels[:, :-1] == _NO_EVENT) | (labels[:, 1:] == _NOT_AT_RISK)
        require(bool(follows.all()), argument, "another order", "-1 after each -1 and each 1")
        return np.ascontiguousarray(labels, dtype=np.int32).view()

    @staticmethod
    def count_outputs(labels, num_tokens):
        """Return the number of intervals."""
        return labels.shape[1]

    @classmethod
    def from_labels(cls, labels):
        """Return the kind with the loss of the null model; 1 if that loss is 0."""
        from scipy.special import entr

        events, num_at_risk = (labels == _EVENT).sum(0), (labels != _NOT_AT_RISK).sum(0)
        hazards = events / np.maximum(num_at_risk, 1)
        losses = num_at_risk * (entr(hazards) + entr(1 - hazards))
        return cls(float(losses.sum() / len(labels)) or 1.0)

    def predict(self, outputs):
        """Return the probability of no event until the end of each interval, `[N, L]`."""
        from scipy.special import expit

        return np.cumprod(expit(-np.asarray(outputs)), axis=-1)

    def compute_losses(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the negative log-likelihood of each example, in nats."""
        losses = optax.sigmoid_binary_cross_entropy(outputs, labels == _EVENT)
        return jnp.where(labels == _NOT_AT_RISK, 0, losses).sum(-1)

    def compute_scores(self, outputs: jax.Array, labels: jax.Array) -> jax.Array:
        """Return 1 - loss / null loss, whose mean over the test examples is McFadden's R²."""
        return hide_nonfinite(1 - self.compute_losses(outputs, labels) / self.null_loss, outputs)

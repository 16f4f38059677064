"""FedDecorr (Shi et al., ICLR 2023, arXiv:2210.00226)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import HyperParameters
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.nn.model import require_parts
from fedjax_het.utils.config import Config, NonNegativeFloat, SearchRange

EPSILON = 1e-8  # added to variances, as in the public code


@dataclass(frozen=True)
class FedDecorrHyperParameters(Config):
    """Hyperparameters of FedDecorr."""

    feddecorr_beta: Annotated[NonNegativeFloat, SearchRange(0.01, 1)] = 0.1
    """Weight of the decorrelation term, the squared correlations of the features (the inputs of the
    last layer) in a minibatch; 0 is the base."""


def feddecorr(
    training: LocalTraining, plan: ExecutionPlan, *, base: Callable[..., Algorithm]
) -> Algorithm:
    """FedDecorr: clients decorrelate the features of each minibatch, in local training of a base.

        loss = loss of `base` + beta R,
        R = (N - 1)^2 / (N F (F - 1)) sum_{i != j} K_ij^2.

    K_ij is the correlation of features i and j over the N examples of the minibatch, F the number
    of features, and beta = `feddecorr_beta`. The features are the inputs of the last layer, of the
    network in training mode. Features without variance have no correlation, and a minibatch with
    one example has no term. beta = 0 is the base. The reported training loss contains the term.

    Every method with one global model whose clients train by local steps can be the base: each of
    its gradients of the local loss is a gradient of the whole loss.

    Evaluated: the models of `base`. Traffic and state: unchanged from `base`. Cost: products of
    N^2 F numbers per minibatch. Networks do not split a minibatch into micro-batches here.

    Default: beta 0.1, of the authors' code (bytedance/FedDecorr). Departure
    from the paper: R is the code's. It grows with the minibatch, as (N - 1)^2 / N times the mean of
    the squared correlations. In the paper R is the mean square of all entries of K. The results of
    the paper belong to the code.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      base: `base(training, plan)`, the method whose clients decorrelate features.

    Returns:
      The method.

    Raises:
      ConfigError: if the network has no `embed`.
    """
    model = training.task.model
    require_parts(model, "embed")
    return base(training._replace(regularizer=_weigh_decorrelation_loss), plan)


def _weigh_decorrelation_loss(
    hp: HyperParameters, features: jax.Array, mask: jax.Array
) -> jax.Array:
    return hp["feddecorr_beta"] * compute_decorrelation_loss(features, mask)


def compute_decorrelation_loss(features: jax.Array, mask: jax.Array) -> jax.Array:
    """Compute the term R of `feddecorr`.

    Args:
      features: features of a minibatch, `[B, F]`.
      mask: 1 for examples, 0 for samples that fill up the minibatch, `[B]`.

    Returns:
      The term, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.feddecorr import compute_decorrelation_loss
      >>> features = jnp.array([[1.0, 2.0], [3.0, 6.0], [0.0, 0.0]])  # K_12 is 1
      >>> round(float(compute_decorrelation_loss(features, jnp.array([1.0, 1.0, 0.0]))), 4)
      0.5
    """
    num_examples, num_features = mask.sum(), features.shape[1]
    mean = mask @ features / jnp.maximum(num_examples, 1)
    centered = (features - mean) * mask[:, None]
    variances = jnp.square(centered).sum(0) / jnp.maximum(num_examples - 1, 1)
    scaled = centered * jax.lax.rsqrt(variances + EPSILON)
    # ||Z^T Z|| = ||Z Z^T||: the products of samples are fewer than the products of features.
    square_sum = jnp.square(jnp.einsum("nf,mf->nm", scaled, scaled, precision="highest")).sum()
    diagonal_sum = jnp.square(jnp.square(scaled).sum(0)).sum()
    num_pairs = max(num_features * (num_features - 1), 1)
    return (square_sum - diagonal_sum) / (num_pairs * jnp.maximum(num_examples, 1))


SPEC = AlgorithmSpec(
    "feddecorr",
    feddecorr,
    "local training with decorrelated features, over another method (Shi et al., 2023)",
    title="FedDecorr",
    paper="Shi et al., ICLR 2023, arXiv:2210.00226",
    hyperparameters=FedDecorrHyperParameters,
    color="#9E59FE",
    wraps="model",
)

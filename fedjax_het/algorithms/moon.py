"""MOON, model-contrastive learning (Li, He and Song, CVPR 2021, arXiv:2103.16257)."""

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.client_state import with_client_memory
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import Batch, ClientContext
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import ClientTrainState, LocalTraining, make_local_sgd
from fedjax_het.nn import Model, add_projection_head, micro_batched_value_and_grad
from fedjax_het.nn.model import require_parts
from fedjax_het.utils.config import (
    Config,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    SearchRange,
)

Tree = Any


@dataclass(frozen=True)
class MOONOptions(Config):
    """Choices of MOON."""

    projection: NonNegativeInt = 0
    "Number of outputs of a projection head before the classifier; 0: no head."


@dataclass(frozen=True)
class MOONHyperParameters(Config):
    """Hyperparameters of MOON."""

    moon_mu: Annotated[NonNegativeFloat, SearchRange(0.1, 10)] = 1.0
    "Weight of the contrastive loss."
    moon_tau: PositiveFloat = 0.5
    "Temperature of the contrastive loss."


class PreviousModel(NamedTuple):
    """Memory of a client: its model at the end of its last round."""

    variables: Tree
    "Variables of the model; zeros before the client's first round."
    has_trained: jax.Array
    "`[]` int32: 1 if the client has trained, else 0."


class _ContrastiveAux(NamedTuple):
    """Previous model of a client in a round, and the weight of the contrastive loss, `[]`."""

    variables: Tree
    mu: jax.Array


def moon(training: LocalTraining, plan: ExecutionPlan, *, options: MOONOptions) -> Algorithm:
    """MOON: a contrastive loss pulls features to the global model's features (Eq. 3, Algorithm 1).

    Clients minimize cross-entropy + moon_mu times the mean over samples of

        -log(e^{cos(z, z_g) / tau} / (e^{cos(z, z_g) / tau} + e^{cos(z, z_p) / tau})).

    z is the input of the network's classifier for a sample. z_g is this input in the received
    global model, and z_p in the client's own model at the end of its previous round. Both are
    constants, of networks in evaluation mode (running batch-norm statistics, no dropout) as in the
    public code (QinbinLi/MOON). In a client's first round the contrastive loss is 0. moon_mu 0 is
    FedAvg. The reported training loss is the cross-entropy. The paper does not define a client's
    first round after round 0. In the public code z_p is then of the client's own random network.
    Runs with all clients in every round do not depend on this choice.

    projection: the size of a projection head between the network and its classifier, 256 in the
      public code. z is then the projection, see `add_projection_head`. With 0 there is no head and
      z are the features, so that all methods train the same network. The first layer of a head on a
      ConvNet's 2048 features has 13 times the weights of that network. FedAF does not state whether
      its MOON has a head.

    Traffic: one model down, one up. State: one model per client. Cost: one gradient and two more
    forward passes per minibatch.

    Defaults: mu 1 (the paper tunes it over 0.1, 1, 5, 10) and tau 0.5, the public code's. Departure
    from that code: it drops the last, smaller batch of an epoch, which every method of this package
    keeps. Its weight decay of 1e-5 is local_weight_decay.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.

    Raises:
      ConfigError: if the network has no `embed`.
    """
    model = training.task.model
    require_parts(model, "embed")

    def init(hp, variables):
        return PreviousModel(jax.tree.map(jnp.zeros_like, variables), jnp.int32(0))

    def begin(context, previous):
        mu = context.hp["moon_mu"] * previous.has_trained.astype(jnp.float32)
        return _ContrastiveAux(previous.variables, mu)

    def end(context, local, previous, update):
        return update, PreviousModel(local.variables, jnp.int32(1))

    loss_and_gradient = partial(_loss_and_gradient, training)
    base = make_local_sgd(training, loss_and_gradient=loss_and_gradient)
    client = with_client_memory(base, init=init, begin=begin, end=end)
    return build_federated_algorithm(training, plan, client)


def _adapt_network(model: Model, *, options: MOONOptions) -> Model:
    """Return the network, with a projection head if the options ask for one."""
    return add_projection_head(model, options.projection) if options.projection else model


def _loss_and_gradient(
    training: LocalTraining, context: ClientContext, local: ClientTrainState, batch: Batch
):
    """Return (reported loss, gradient of the whole loss, variables with new statistics).

    The reported loss is the mean loss of the task with the regularizer of local training.
    """
    task, regularizer = training.task, training.regularizer
    embed, variables, previous = task.model.embed, local.variables, local.aux
    assert embed is not None  # `moon` requires it

    def loss_sum(params, samples):
        x, mask = task.normalize(samples["inputs"]), samples["mask"]
        arguments = {"key": context.key, **task.model.make_batch_arguments(mask)}
        z, logits, state = embed({**variables, "params": params}, x, train=True, **arguments)
        z_global = embed(context.message.variables, x, train=False)[0]
        z_previous = embed(previous.variables, x, train=False)[0]
        losses = task.kind.compute_losses(logits, samples["labels"])
        tau = context.hp["moon_tau"]
        contrastive_losses = compute_contrastive_losses(z, z_global, z_previous, tau)
        reported = (losses * mask).sum()
        if regularizer is not None:
            term = regularizer(context.hp, z, mask)
            reported += jnp.maximum(mask.sum(), 1) * term
        total = reported + previous.mu * (contrastive_losses * mask).sum()
        return total, (reported, state)

    # A regularizer depends on all samples together.
    micro_batch = task.model.micro_batch if regularizer is None else None
    value_and_gradient = micro_batched_value_and_grad(loss_sum, micro_batch, has_aux=True)
    samples = {"inputs": batch.inputs, "labels": batch.labels, "mask": batch.mask}
    (_, (reported, state)), gradient = value_and_gradient(variables["params"], samples)
    count = jnp.maximum(batch.mask.sum(), 1)
    gradient = jax.tree.map(lambda g: g / count, gradient)
    return reported / count, gradient, {**variables, "state": state}


def compute_contrastive_losses(
    z: jax.Array, z_global: jax.Array, z_previous: jax.Array, tau: jax.Array | float
) -> jax.Array:
    """Compute -log of the softmax of cos / tau at the global model (Eq. 3).

    Args:
      z: features of the trained network, `[B, F]`.
      z_global: features of the global model, `[B, F]`.
      z_previous: features of the client's previous model, `[B, F]`.
      tau: temperature.

    Returns:
      Losses `[B]`, in nats.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.algorithms.moon import compute_contrastive_losses
      >>> z = jnp.ones((1, 3))
      >>> float(compute_contrastive_losses(z, z, z, 0.5)[0])  # log(2)
      0.6931471824645996
    """
    gap = _cosine_similarities(z, z_previous) - _cosine_similarities(z, z_global)
    return jax.nn.softplus(gap / tau)


def _cosine_similarities(a, b):
    """Return `[B]`, 0 for a vector of zeros, whose gradient is then finite too."""

    def normalize(x):
        return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-16))

    return (normalize(a) * normalize(b)).sum(-1)


SPEC = AlgorithmSpec(
    "moon",
    moon,
    "pulls features to the global model's, away from the client's previous ones (Li et al., 2021)",
    title="MOON",
    paper="Li, He and Song, CVPR 2021, arXiv:2103.16257",
    options=MOONOptions,
    hyperparameters=MOONHyperParameters,
    color="#AA4499",
    wrappable_as="average",
    evaluated_models=("global", "client"),
    adapt_network=_adapt_network,
)

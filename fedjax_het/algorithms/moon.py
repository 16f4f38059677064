"""MOON, model-contrastive learning (Li, He and Song, CVPR 2021, arXiv:2103.16257)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import Batch, ClientAlgorithm, ClientContext
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    apply_gradient,
    make_local_sgd,
)
from fedjax_het.core.task import Task
from fedjax_het.nn import Model, add_projection_head, micro_batched_value_and_grad
from fedjax_het.utils.config import Config, NonNegativeFloat, NonNegativeInt, PositiveFloat
from fedjax_het.utils.errors import require

Tree = Any


@dataclass(frozen=True)
class MOONOptions(Config):
    projection: NonNegativeInt = 0
    "Outputs of a projection head; 0: none."


@dataclass(frozen=True)
class MOONHyperParameters(Config):
    moon_mu: NonNegativeFloat = 1.0
    "Weight of the contrastive loss."
    moon_tau: PositiveFloat = 0.5
    "Its temperature."


class MOONClientState(NamedTuple):
    """What a client keeps: its model at the end of its last round, whether there was one, and its
    optimiser's state, if kept."""

    previous_variables: Tree
    has_trained: jax.Array  # [] int32: 0 or 1
    optimizer: Tree


class _ContrastiveAux(NamedTuple):
    """A client's previous model in a round, and the weight of the contrastive loss."""

    previous_variables: Tree
    mu: jax.Array  # []


def moon(
    training: LocalTraining, plan: ExecutionPlan, *, options: MOONOptions = MOONOptions()
) -> Algorithm:
    """Clients minimise cross-entropy + moon_mu times the mean over samples of

        -log(e^{cos(z, z_g) / tau} / (e^{cos(z, z_g) / tau} + e^{cos(z, z_p) / tau})),

    z being what the network's classifier reads of a sample, z_g the same of the global model as it
    was received and z_p that of the client's own model at the end of its previous round; both are
    constants, of networks in evaluation mode (running batch-norm statistics, no dropout) as in the
    public code (QinbinLi/MOON). In a client's first round this loss is 0. moon_mu 0 is FedAvg.

    projection: the size of a projection head between the network and its classifier, 256 in the
      public code, see `add_projection_head`; z is then the projection. 0: none, z being the
      features, so that all methods train the same network: the first layer of a head on a ConvNet's
      2048 features alone has 13 times the weights of that network. Of FedAF's MOON it is not known.
    Defaults: mu 1 (the paper tunes it in 0.1, 1, 5, 10) and tau 0.5, the public code's. Its batches
    leave out the last, smaller one of an epoch, which is kept here as for every method; its weight
    decay of 1e-5 is local_weight_decay.

    Scored is the global model; the loss reported is the cross-entropy. Traffic: FedAvg's. State:
    one model per client. Cost: two more forward passes a step.
    """
    model = training.task.model
    require(model.embed is not None, "model", model.name, "a network with `embed`: its features")
    base, task = make_local_sgd(training), training.task

    def init(hp, variables):
        zeros = jax.tree.map(jnp.zeros_like, variables)
        return MOONClientState(zeros, jnp.int32(0), base.init(hp, variables))

    def begin(context, state):
        local = base.begin(context, state.optimizer)
        mu = context.hp["moon_mu"] * state.has_trained.astype(jnp.float32)
        return local._replace(aux=_ContrastiveAux(state.previous_variables, mu))

    def step(context, local, batch):
        loss, gradient, new_variables = _loss_and_gradient(task, context, local, batch)
        variables, optimizer = apply_gradient(
            training, context, new_variables, gradient, local.optimizer_state, batch
        )
        return local._replace(variables=variables, optimizer_state=optimizer), loss

    def end(context, local, state):
        client_update, optimizer, output = base.end(context, local, state.optimizer)
        return client_update, MOONClientState(local.variables, jnp.int32(1), optimizer), output

    return build_federated_algorithm(training, plan, ClientAlgorithm(init, begin, step, end))


def make_moon_network(model: Model, *, options: MOONOptions) -> Model:
    """The network that these options ask for."""
    return add_projection_head(model, options.projection) if options.projection else model


def _loss_and_gradient(task: Task, context: ClientContext, local: ClientTrainState, batch: Batch):
    """Return (mean cross-entropy, gradient of the whole loss, variables with new statistics)."""
    embed, variables, aux = task.model.embed, local.variables, local.aux
    assert embed is not None  # `moon` requires it

    def loss_sum(params, samples):
        x = task.normalize(samples["images"])
        z, logits, state = embed({**variables, "params": params}, x, train=True, key=context.key)
        z_global, z_previous = (
            embed(other, x, train=False)[0]
            for other in (context.message.variables, aux.previous_variables)
        )
        cross_entropies = optax.softmax_cross_entropy_with_integer_labels(logits, samples["labels"])
        contrastive_loss = compute_contrastive_losses(
            z, z_global, z_previous, context.hp["moon_tau"]
        )
        cross_entropy_sum = (cross_entropies * samples["mask"]).sum()
        return cross_entropy_sum + aux.mu * (contrastive_loss * samples["mask"]).sum(), (
            cross_entropy_sum,
            state,
        )

    value_and_gradient = micro_batched_value_and_grad(
        loss_sum, task.model.micro_batch, has_aux=True
    )
    samples = {"images": batch.images, "labels": batch.labels, "mask": batch.mask}
    (_, (cross_entropy_sum, state)), gradient = value_and_gradient(variables["params"], samples)
    count = jnp.maximum(batch.mask.sum(), 1)
    gradient = jax.tree.map(lambda g: g / count, gradient)
    return cross_entropy_sum / count, gradient, {**variables, "state": state}


def compute_contrastive_losses(z, z_global, z_previous, tau) -> jax.Array:
    """[B] -log of the softmax of cos / tau at the global model, of features [B, F] each."""
    similarity_gap = _cosine_similarities(z, z_previous) - _cosine_similarities(z, z_global)
    return jax.nn.softplus(similarity_gap / tau)


def _cosine_similarities(a, b):
    """[B], 0 for a vector of zeros, whose gradient is then finite too."""

    def normalize(x):
        return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-16))

    return (normalize(a) * normalize(b)).sum(-1)


SPEC = AlgorithmSpec(
    "moon",
    moon,
    "pulls features to the global model's, away from the client's last ones (Li et al., 2021)",
    paper="Li, He and Song, CVPR 2021, arXiv:2103.16257",
    options=MOONOptions,
    hyperparameters=MOONHyperParameters,
    color="#AA4499",
    wrappable_as="average",
    evaluated_models=("global", "client"),
    adapt_network=make_moon_network,
)

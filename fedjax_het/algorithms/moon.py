"""MOON, model-contrastive learning (Li, He and Song, CVPR 2021, arXiv:2103.16257)."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.building import federated
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.entry import Entry
from fedjax_het.common.errors import require
from fedjax_het.common.records import NonNegative, Positive, Record, Whole
from fedjax_het.engine.contract import Batch, ClientMethod
from fedjax_het.engine.local import Broadcast, Local, LocalTraining, descend, local_sgd
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.task import Task
from fedjax_het.nn import Model, micro_batched_value_and_grad, with_projection_head

Tree = Any


@dataclass(frozen=True)
class MoonOptions(Record):
    projection: Whole = 0
    "Outputs of a projection head; 0: none."


@dataclass(frozen=True)
class MoonNumbers(Record):
    moon_mu: NonNegative = 1.0
    "Weight of the contrastive loss."
    moon_tau: Positive = 0.5
    "Its temperature."


class MoonClient(NamedTuple):
    """What a client keeps: its model at the end of its last round, whether there was one, and its
    optimiser's state, if kept."""

    previous: Tree
    trained: jax.Array  # [] int32: 0 or 1
    optimizer: Tree


class _Earlier(NamedTuple):
    """A client's previous model in a round, and the weight of the contrastive loss."""

    previous: Tree
    mu: jax.Array  # []


def moon(training: LocalTraining, plan: Plan, *, options: MoonOptions = MoonOptions()) -> Algorithm:
    """Clients minimise cross-entropy + moon_mu times the mean over samples of

        -log(e^{cos(z, z_g) / tau} / (e^{cos(z, z_g) / tau} + e^{cos(z, z_p) / tau})),

    z being what the network's classifier reads of a sample, z_g the same of the global model as it
    was received and z_p that of the client's own model at the end of its previous round; both are
    constants, of networks in evaluation mode (running batch-norm statistics, no dropout) as in the
    public code (QinbinLi/MOON). In a client's first round this loss is 0. moon_mu 0 is FedAvg.

    projection: the size of a projection head between the network and its classifier, 256 in the
      public code, see `with_projection_head`; z is then the projection. 0: none, z being the
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
    base, task = local_sgd(training), training.task

    def init(hp, variables):
        nothing = jax.tree.map(jnp.zeros_like, variables)
        return MoonClient(nothing, jnp.int32(0), base.init(hp, variables))

    def begin(hp, broadcast, state, client):
        local = base.begin(hp, broadcast, state.optimizer, client)
        mu = hp["moon_mu"] * state.trained.astype(jnp.float32)
        return local._replace(memory=_Earlier(state.previous, mu))

    def step(hp, broadcast, local, batch, client, key):
        loss, gradient, seen = _loss_and_gradient(task, hp, broadcast, local, batch, key)
        variables, optimizer = descend(
            training, hp, seen, gradient, local.optimizer, (batch, client)
        )
        return local._replace(variables=variables, optimizer=optimizer), loss

    def end(hp, broadcast, local, state, client):
        upload, optimizer, output = base.end(hp, broadcast, local, state.optimizer, client)
        return upload, MoonClient(local.variables, jnp.int32(1), optimizer), output

    return federated(training, plan, ClientMethod(init, begin, step, end))


def moon_network(model: Model, *, options: MoonOptions) -> Model:
    """The network that these options ask for."""
    return with_projection_head(model, options.projection) if options.projection else model


def _loss_and_gradient(task: Task, hp, broadcast: Broadcast, local: Local, batch: Batch, key):
    """-> (mean cross-entropy, gradient of the whole loss, variables with new statistics)."""
    embed, variables, earlier = task.model.embed, local.variables, local.memory
    assert embed is not None  # `moon` requires it

    def loss_sum(params, samples):
        x = task.normalise(samples["images"])
        z, logits, state = embed({**variables, "params": params}, x, train=True, key=key)
        z_global, z_previous = (
            embed(other, x, train=False)[0] for other in (broadcast.variables, earlier.previous)
        )
        entropies = optax.softmax_cross_entropy_with_integer_labels(logits, samples["labels"])
        contrast = contrastive_losses(z, z_global, z_previous, hp["moon_tau"])
        entropy = (entropies * samples["mask"]).sum()
        return entropy + earlier.mu * (contrast * samples["mask"]).sum(), (entropy, state)

    gradient_of = micro_batched_value_and_grad(loss_sum, task.model.micro_batch, has_aux=True)
    samples = {"images": batch.images, "labels": batch.labels, "mask": batch.mask}
    (_, (entropy, state)), gradient = gradient_of(variables["params"], samples)
    count = jnp.maximum(batch.mask.sum(), 1)
    gradient = jax.tree.map(lambda g: g / count, gradient)
    return entropy / count, gradient, {**variables, "state": state}


def contrastive_losses(z, z_global, z_previous, tau) -> jax.Array:
    """[B] -log of the softmax of cos / tau at the global model, of features [B, F] each."""
    gap = _cosines(z, z_previous) - _cosines(z, z_global)
    return jax.nn.softplus(gap / tau)


def _cosines(a, b):
    """[B], 0 for a vector of zeros, whose gradient is then finite too."""

    def unit(x):
        return x * jax.lax.rsqrt(jnp.maximum(jnp.square(x).sum(-1, keepdims=True), 1e-16))

    return (unit(a) * unit(b)).sum(-1)


ENTRY = Entry(
    "moon",
    moon,
    "pulls features to the global model's, away from the client's last ones (Li et al., 2021)",
    paper="Li, He and Song, CVPR 2021, arXiv:2103.16257",
    options=MoonOptions,
    numbers=MoonNumbers,
    colour="#AA4499",
    refinable="average",
    scored=("global", "client"),
    network=moon_network,
)

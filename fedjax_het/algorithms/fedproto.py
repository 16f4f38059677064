"""FedProto (Tan et al., AAAI 2022, arXiv:2105.00243)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.algorithms.base import Algorithm, RoundInfo, State, Traffic
from fedjax_het.algorithms.client_state import (
    Initialization,
    get_client_model,
    init_personal_models,
    make_personal_client,
)
from fedjax_het.algorithms.measuring_passes import with_measuring_passes
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_loop import train_cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    LocalTraining,
    begin_local_training,
    make_training_step,
)
from fedjax_het.nn import Model
from fedjax_het.nn.model import count_features, require_parts
from fedjax_het.utils.config import Config, NonNegativeFloat, SearchRange

Tree = Any
FAR = -1e9  # logit of a class without prototype


@dataclass(frozen=True)
class FedProtoOptions(Config):
    """Choices of FedProto."""

    distance: Literal["samples", "classes"] = "samples"
    """Distance to the prototypes, the mean features of each class over clients: "samples", mean
    square over samples and features; "classes", sum over classes of the squared distance of the
    mean features in the minibatch."""
    prediction: Literal["prototypes", "head"] = "prototypes"
    """Prediction of the evaluated model: "prototypes", the nearest prototype; "head", the last
    layer."""
    initialisation: Initialization = "shared"
    '"independent": every client draws its first weights; "shared": one draw for all clients.'


@dataclass(frozen=True)
class FedProtoHyperParameters(Config):
    """Hyperparameters of FedProto."""

    fedproto_lambda: Annotated[NonNegativeFloat, SearchRange(0.1, 10)] = 1.0
    "Weight of the distance to the prototypes; 0 is Separate."


class Prototypes(NamedTuple):
    """Global prototypes, the state of the server and its message."""

    features: jax.Array
    "`[C, F]`: mean features of each class."
    is_present: jax.Array
    "`[C]` bool: whether a client has sent features of the class so far."


class FeatureSums(NamedTuple):
    """Features of a client's examples, summed by class."""

    sums: jax.Array
    "`[C, F]`."
    counts: jax.Array
    "`[C]` float32: number of examples."


def fedproto(
    training: LocalTraining, plan: ExecutionPlan, *, options: FedProtoOptions
) -> Algorithm:
    """FedProto: clients share the mean features of classes instead of weights (Algorithm 1).

        w_k <- LocalSGD(CE + lambda D(phi, C), w_k),
        C_c <- sum_k n_kc m_kc / sum_k n_kc  over the round's clients k with examples of class c.

    phi are the features of a minibatch, the inputs of the last layer. C_c is the prototype of class
    c, m_kc the mean features of class c at client k, and lambda = `fedproto_lambda`. The client
    measures m_kc after local training, in one more pass with the network in evaluation mode. A
    class without prototype so far has no term. A class that no client of a round has keeps its
    prototype. lambda = 0 is Separate. The reported training loss contains the term, and the
    cross-entropy of the measuring pass. The reported update norm is the root mean square over
    clients.

    distance: "samples", D = the mean over samples and features of (phi - C_y)^2, as in public code
      (PFLlib); "classes", D = sum_c ||mean of phi over the samples of class c - C_c||^2. This sum
      over F features and C classes needs a smaller lambda: with lambda 1 and a rate of 0.1, an MLP
      on the digits stops learning.
    prediction: "prototypes", the class of the nearest prototype, as in that code. Before the first
      prototypes exist, the last layer predicts. "head": the last layer predicts.

    Evaluated: the own model of each client; there is no global model. Traffic: C prototypes down; C
    prototypes and C counts up. State: one model per client. Cost: one gradient per minibatch, and
    one pass, which costs as much as an epoch.

    Defaults: lambda 1 and the distance "samples", of PFLlib. Departures from that code: it averages
    features over all minibatches of local training, and prototypes over clients without weights.
    It drops prototypes of classes that no client of the round has.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method, which has no global model.

    Raises:
      ConfigError: if the network has no `embed`.
    """
    task, model = training.task, training.task.model
    embed, num_classes = model.embed, model.num_classes
    require_parts(model, "embed")
    assert embed is not None
    shape = (num_classes, count_features(model))
    compute_distance = _DISTANCES[options.distance]

    def begin(context, state):
        sums = FeatureSums(jnp.zeros(shape), jnp.zeros(num_classes))
        return begin_local_training(training, context.hp, state.variables, state.optimizer, sums)

    def loss_and_gradient(context, local, batch):
        def regularizer(features, mask):
            is_label = _mark_labels(batch.labels, num_classes) * mask[:, None]
            distance = compute_distance(features, is_label, context.message)
            return context.hp["fedproto_lambda"] * distance

        variables, key = local.variables, context.key
        return task.loss_and_gradient(variables, batch, key, regularizer=regularizer)

    def keep_sums(context, gradient, local, batch):
        return gradient, local.aux

    def measure(context, local, batch):
        inputs = task.normalize(batch.inputs)
        features, logits, _ = embed(local.variables, inputs, train=False)
        is_label = _mark_labels(batch.labels, num_classes) * batch.mask[:, None]
        sums = jnp.einsum("bc,bf->cf", is_label, features, precision="highest")
        losses = optax.softmax_cross_entropy(logits, is_label)
        loss = losses.sum() / jnp.maximum(batch.mask.sum(), 1)
        return FeatureSums(local.aux.sums + sums, local.aux.counts + is_label.sum(0)), loss

    step = make_training_step(training, keep_sums, loss_and_gradient)
    base = make_personal_client(training, begin, step)

    def end(context, local, state):
        update, new_state, output = base.end(context, local, state)
        return update._replace(sum=(update.sum, local.aux)), new_state, output

    client = with_measuring_passes(base._replace(end=end), training, measure, num_after=1)

    def init(hp, key, variables, num_clients):
        args = (hp, key, variables, num_clients, options.initialisation)
        server = Prototypes(jnp.zeros(shape), jnp.zeros(num_classes, bool))
        return State(server, init_personal_models(training, client, *args), jnp.int32(0))

    def round_(hp, state, key, cohort):
        server = state.server
        result = train_cohort(client, plan, hp, server, state.clients, key, cohort)
        squared_change, (sums, counts) = result.update.sum
        is_new = counts > 0
        means = sums / jnp.maximum(counts, 1)[:, None]
        features = jnp.where(is_new[:, None], means, server.features)
        server = Prototypes(features, server.is_present | is_new)
        update_norm = jnp.sqrt(squared_change / len(result.states.num_rounds))
        info = RoundInfo(result.train_loss, update_norm, client_losses=result.client_losses)
        return State(server, result.states, state.round + 1), info

    def personal_variables(hp, state, k):
        variables = get_client_model(hp, state, k)
        if options.prediction == "head":
            return variables
        return _join_prototypes(variables, state.server)

    size = 4 * shape[0] * shape[1]
    predicts = options.prediction == "prototypes"
    return Algorithm(
        init=init,
        round=round_,
        global_model=None,
        with_global_model=None,
        traffic=lambda hp, state: Traffic(size, size + 4 * num_classes),
        extra_passes=client.extra_passes,
        personal_variables=personal_variables,
        personal_model=_make_prototype_model(model, shape) if predicts else None,
    )


def _mark_labels(labels: jax.Array, num_classes: int) -> jax.Array:
    return (labels[:, None] == jnp.arange(num_classes)).astype(jnp.float32)


def _compute_sample_distance(features, is_label, prototypes: Prototypes) -> jax.Array:
    """Return the mean square over samples and features; `is_label` [B, C] masks padding."""
    targets = jnp.einsum("bc,cf->bf", is_label, prototypes.features, precision="highest")
    squares = jnp.square(features - targets).mean(1) * (is_label @ prototypes.is_present)
    return squares.sum() / jnp.maximum(is_label.sum(), 1)


def _compute_class_distance(features, is_label, prototypes: Prototypes) -> jax.Array:
    """Return the sum over classes of the squared distance of mean features."""
    counts = is_label.sum(0)
    sums = jnp.einsum("bc,bf->cf", is_label, features, precision="highest")
    means = sums / jnp.maximum(counts, 1)[:, None]
    squares = jnp.square(means - prototypes.features).sum(1)
    return jnp.where((counts > 0) & prototypes.is_present, squares, 0).sum()


_DISTANCES = {"samples": _compute_sample_distance, "classes": _compute_class_distance}


def _join_prototypes(variables: Tree, prototypes: Prototypes) -> Tree:
    """Return variables of `_make_prototype_model`."""
    return {**variables, "state": {"network": variables["state"], "prototypes": prototypes}}


def _make_prototype_model(model: Model, shape: tuple[int, int]) -> Model:
    """Return a network that predicts the class of the nearest prototype, for evaluation."""
    embed = model.embed
    assert embed is not None

    def init(key):
        prototypes = Prototypes(jnp.zeros(shape), jnp.zeros(shape[0], bool))
        return _join_prototypes(model.init(key), prototypes)

    def apply(variables, x, **arguments):
        state = variables["state"]
        prototypes = state["prototypes"]
        network = {**variables, "state": state["network"]}
        features, logits, _ = embed(network, x, **arguments)
        # -||phi - C_c||^2 without ||phi||^2, which all classes share.
        products = jnp.einsum("bf,cf->bc", features, prototypes.features, precision="highest")
        closeness = 2 * products - jnp.square(prototypes.features).sum(1)
        closeness = jnp.where(prototypes.is_present, closeness, FAR)
        return jnp.where(prototypes.is_present.any(), closeness, logits), state

    return model._replace(init=init, apply=apply, embed=None, head=None, input_layer=None)


SPEC = AlgorithmSpec(
    "fedproto",
    fedproto,
    "clients share mean features of classes and keep their models (Tan et al., 2022)",
    title="FedProto",
    paper="Tan et al., AAAI 2022, arXiv:2105.00243",
    options=FedProtoOptions,
    hyperparameters=FedProtoHyperParameters,
    color="#11C614",
    evaluated_models=("personal",),
    has_global_model=False,
    needs_classes=True,
)

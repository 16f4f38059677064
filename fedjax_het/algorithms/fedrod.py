"""FedRoD (Chen and Chao, ICLR 2022, arXiv:2107.00778)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import build_federated_algorithm
from fedjax_het.algorithms.class_counts import (
    ABSENT_LOGIT,
    CLASS_COUNTS,
    make_class_counts_message,
    make_corrected_loss,
)
from fedjax_het.algorithms.client_state import with_client_memory
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_algorithm import HyperParameters
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import (
    LocalTraining,
    apply_gradient,
    init_local_optimizer,
    make_local_sgd,
    select_kept_optimizer_state,
)
from fedjax_het.core.task import per_sample_cross_entropy
from fedjax_het.nn.model import require_parts

Tree = Any


class PersonalHead(NamedTuple):
    """A client's own head, a second last layer."""

    params: Tree
    "Parameters of the head."
    optimizer: Tree
    "State of the local optimizer for the head; between rounds `()`, unless the run keeps it."


def fedrod(training: LocalTraining, plan: ExecutionPlan) -> Algorithm:
    """FedRoD: a global model with a balanced loss, and a personal head on its features.

        (theta_k, h_k) ~ argmin mean over samples of CE(h(phi) + log n_k, y),
        g_k ~ argmin mean over samples of CE(h(phi) + g(phi), y) with h and phi constant,
        (theta, h) <- (theta, h) + server_lr sum_k p_k ((theta_k, h_k) - (theta, h)).

    phi = phi(x; theta) are the inputs of the last layer, h, and g_k is a layer of the same form.
    n_kc is the number of examples of class c at client k. The balanced softmax leaves out classes
    that a client lacks, since log 0 is minus infinity. Both heads learn from the same minibatches,
    by the same local optimizer, each with its own state. The features and logits for g_k come
    from the model before its step, in training mode. The reported training loss is the balanced
    loss.

    Evaluated: "personal", h + g_k on phi with the new global model, or "global", the model (theta,
    h). Traffic: FedAvg's; g_k and the class counts stay at the clients. State: one head per client.
    Cost: one gradient and one more forward pass per minibatch, which the compiler may share.

    The head g_k is the linear one of the paper's two forms. It starts at the initial h, as in
    public code (PFLlib), so the first personal model has twice the logits of the global model.

    Args:
      training: the choices of local training.
      plan: where the clients run.

    Returns:
      The method.

    Raises:
      ConfigError: if the network has no `embed` or no `head`.
    """
    model = training.task.model
    embed, head = model.embed, model.head
    require_parts(model, "embed", "head")
    assert embed is not None and head is not None

    def init(hp: HyperParameters, variables: Tree) -> PersonalHead:
        params = head.get_parameters(variables)
        optimizer = init_local_optimizer(training, hp, {"params": params})
        return PersonalHead(params, select_kept_optimizer_state(training, optimizer))

    def begin(context, memory: PersonalHead) -> PersonalHead:
        if training.keep_state:
            return memory
        optimizer = init_local_optimizer(training, context.hp, {"params": memory.params})
        return memory._replace(optimizer=optimizer)

    def step_head(context, local, batch) -> PersonalHead:
        inputs, personal = training.task.normalize(batch.inputs), local.aux
        arguments = {"key": context.key, **model.make_batch_arguments(batch.mask)}
        features, logits, _ = embed(local.variables, inputs, train=True, **arguments)

        def loss(params):
            outputs = (logits + head.apply(params, features), ())
            losses, _ = per_sample_cross_entropy(lambda inputs: outputs, inputs, batch.labels)
            return (losses * batch.mask).sum() / jnp.maximum(batch.mask.sum(), 1)

        gradient = jax.grad(loss)(personal.params)
        variables, optimizer = apply_gradient(
            training, context, {"params": personal.params}, gradient, personal.optimizer, batch
        )
        return PersonalHead(variables["params"], optimizer)

    base = make_local_sgd(
        training, loss_and_gradient=make_corrected_loss(training, _balance_logits)
    )

    def step(context, local, batch):
        new_local, loss = base.step(context, local, batch)
        return new_local._replace(aux=step_head(context, local, batch)), loss

    def end(context, local, memory, update):
        optimizer = select_kept_optimizer_state(training, local.aux.optimizer)
        return update, local.aux._replace(optimizer=optimizer)

    def personal_variables(hp, state, k):
        own, shared = get_client_row(state.clients.memory.params, k), state.server.variables
        # The heads are linear in their parameters: their outputs add up as their parameters do.
        both = jax.tree.map(jnp.add, head.get_parameters(shared), own)
        return head.replace_parameters(shared, both)

    client = with_client_memory(base._replace(step=step), init=init, begin=begin, end=end)
    algorithm = build_federated_algorithm(
        training, plan, client, make_message=make_class_counts_message
    )._replace(round_inputs=(CLASS_COUNTS,))
    if training.evaluated_model == "global":
        return algorithm
    return algorithm._replace(personal_variables=personal_variables)


def _balance_logits(hp: HyperParameters, counts: jax.Array, logits: jax.Array) -> jax.Array:
    return jnp.where(counts > 0, logits + jnp.log(jnp.maximum(counts, 1)), ABSENT_LOGIT)


SPEC = AlgorithmSpec(
    "fedrod",
    fedrod,
    "a global model with a balanced loss, and a personal head of each client (Chen and Chao, 2022)",
    title="FedRoD",
    paper="Chen and Chao, ICLR 2022, arXiv:2107.00778",
    color="#613327",
    evaluated_models=("personal", "global"),
    needs_classes=True,
)

"""APFL (Deng, Kamani and Mahdavi, 2020, arXiv:2003.13461)."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm, State
from fedjax_het.algorithms.client_state import build_dual_model_algorithm
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_rows import get_client_row
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import ClientTrainState, LocalTraining, apply_gradient
from fedjax_het.core.training_variants import require_constant_lr
from fedjax_het.nn import Model
from fedjax_het.utils.config import Config, SearchRange, UnitInterval

Tree = Any


@dataclass(frozen=True)
class APFLOptions(Config):
    """Choices of APFL."""

    PRESETS = {  # noqa: RUF012
        "paper": {},
        "fedtorch": {"mixing": "outputs", "adaptive": False},
    }

    preset: str = "paper"
    mixing: Literal["weights", "outputs"] = "weights"
    "Part of the two models that is mixed: weights or outputs."
    adaptive: bool = True
    "Whether a client's share of its own model is learned."
    alpha_update: Literal["round", "step"] = "round"
    'When the share is learned: "round", at a round\'s first minibatch; "step", at every step.'


@dataclass(frozen=True)
class APFLHyperParameters(Config):
    """Hyperparameters of APFL."""

    apfl_alpha: Annotated[UnitInterval, SearchRange(0.1, 0.9, is_log=False)] = 0.5
    "Share of its own model in a client's mixture; the initial share if it is learned."


def apfl(training: LocalTraining, plan: ExecutionPlan, *, options: APFLOptions) -> Algorithm:
    """APFL: every client mixes a personal model with the global model (Algorithm 1).

    Client k trains its copy w_k of FedAvg's model and a personal model v_k, which learns as part of
    their mixture. Every step, on one minibatch,

        w_k <- w_k - local_lr grad f(w_k),
        v_k <- v_k - local_lr alpha_k grad f(m_k),  m_k = alpha_k v_k + (1 - alpha_k) w_k,
        alpha_k <- alpha_k - local_lr <v_k - w_k, grad f(m_k)>, clipped to [0, 1],

    All right-hand sides use the values before the step. The local optimizer makes the steps of w_k
    and v_k.

    mixing: "weights" is the update of the formula. "outputs": m_k's logits are alpha_k times v_k's
      and 1 - alpha_k times w_k's; f(m_k) treats w_k as a constant, after its step.
    adaptive: whether alpha_k is learned, starting at `apfl_alpha`; otherwise it is constant.
    alpha_update: alpha_k is updated once a "round", at the first minibatch, as in the authors'
      code, or in every "step". With many or long steps per round, "step" drives alpha_k to 0. v_k
      learns at alpha_k times the pace of w_k. Later gradients of alpha_k in the round therefore
      favor w_k, although the evaluation mixes v_k with w. Measured on 10 clients of the digits in
      groups, 30 rounds: with "step", 8 values of alpha_k ended below 0.03, at a mean accuracy of
      0.905. With "round", all ended at 0.47 to 0.68, at 0.922.
    Presets: "paper" (weights, adaptive, round), and "fedtorch" (outputs, fixed), the authors' code.

    Evaluated: alpha_k v_k + (1 - alpha_k) w with the new global model w. A fixed alpha of 0 is
    FedAvg, of 1 Separate from a shared start. Mixed weights use mixed batch-norm statistics: the
    statistics of w, and the statistics of the mixture in which v_k was trained.

    Traffic: one model down, one up. State: one model and one number per client. Cost: two gradients
    per minibatch; "outputs" adds a forward pass.

    Departure from the authors' code: the code adds 0.02 alpha to the gradient of alpha, and
    estimates this gradient by another formula. The paper has neither.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      options: choices of the method.

    Returns:
      The method.

    Raises:
      ConfigError: for a learning rate that changes within a round, if alpha learns.
    """
    task, model, mixing = training.task, training.task.model, options.mixing
    if options.adaptive:
        require_constant_lr(training, "apfl's weights alpha learn at this rate")

    def step_personal_model(context, local, new_local, batch):
        personal, shared = local.aux, (local if mixing == "weights" else new_local).variables

        def apply(variables, x, **apply_args):
            params = variables["params"]
            own = {**variables, "params": params["own"]}
            return _apply_mixture(model, mixing, params["alpha"], own, shared, x, **apply_args)

        mixture = task._replace(model=model._replace(apply=apply))
        own, alpha = personal.variables["params"], personal.aux
        variables = {**personal.variables, "params": {"own": own, "alpha": alpha}}
        loss, gradient, variables = mixture.loss_and_gradient(variables, batch, context.key)
        variables, optimizer = {**variables, "params": own}, personal.optimizer_state
        updated = apply_gradient(training, context, variables, gradient["own"], optimizer, batch)
        if options.adaptive:
            is_due = options.alpha_update == "step" or batch.step_index == 0
            new_alpha = jnp.clip(alpha - context.hp["local_lr"] * gradient["alpha"], 0, 1)
            alpha = jnp.where(is_due, new_alpha, alpha)
        return ClientTrainState(*updated, alpha), loss

    def personal_variables(hp, state: State, k):
        personal = get_client_row(state.clients.memory, k)
        combine = _interpolate if mixing == "weights" else _stack_models
        return combine(personal.aux, personal.variables, state.server.variables)

    return build_dual_model_algorithm(
        training,
        plan,
        step_personal_model,
        init_aux=lambda hp: jnp.asarray(hp["apfl_alpha"], jnp.float32),
    )._replace(
        personal_variables=personal_variables,
        personal_model=None if mixing == "weights" else _make_logit_mixture_model(model),
        artifacts=lambda state: {"apfl_alpha": state.clients.memory.aux},
    )


def _interpolate(alpha: jax.Array, own: Tree, shared: Tree) -> Tree:
    return jax.tree.map(lambda v, w: alpha * v + (1 - alpha) * w, own, shared)


def _apply_mixture(model: Model, mixing: str, alpha, own, shared, x, **apply_args):
    """Return (logits `[B, C]`, the batch-norm statistics of `own`)."""
    if mixing == "weights":
        params = _interpolate(alpha, own["params"], shared["params"])
        return model.apply({**own, "params": params}, x, **apply_args)
    logits, state = model.apply(own, x, **apply_args)
    return _interpolate(alpha, logits, model.apply(shared, x, **apply_args)[0]), state


def _stack_models(alpha, own: Tree, shared: Tree) -> Tree:
    """Return variables of `_make_logit_mixture_model`."""
    stacked = {part: {"own": own[part], "shared": shared[part]} for part in own}
    return {**stacked, "params": {**stacked["params"], "alpha": alpha}}


def _make_logit_mixture_model(model: Model) -> Model:
    """Return a network of two networks whose logits are mixed, for evaluation."""

    def init(key):
        variables = model.init(key)
        return _stack_models(jnp.float32(0.5), variables, variables)

    def apply(variables, x, **apply_args):
        own, shared = ({p: variables[p][name] for p in variables} for name in ("own", "shared"))
        alpha = variables["params"]["alpha"]
        logits, state = _apply_mixture(model, "outputs", alpha, own, shared, x, **apply_args)
        return logits, {**variables["state"], "own": state}

    return model._replace(init=init, apply=apply, embed=None, input_layer=None)


SPEC = AlgorithmSpec(
    "apfl",
    apfl,
    "each client mixes a personal model with the global model (Deng et al., 2020)",
    title="APFL",
    paper="Deng, Kamani and Mahdavi, 2020, arXiv:2003.13461",
    options=APFLOptions,
    hyperparameters=APFLHyperParameters,
    color="#7B3294",
    evaluated_models=("personal",),
)

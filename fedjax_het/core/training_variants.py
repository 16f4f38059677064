"""Parts of local training for methods other than FedAvg."""

from typing import Any

import jax

from fedjax_het.core.client_algorithm import ClientAlgorithm, ClientUpdate
from fedjax_het.core.local_training import (
    ClientTrainState,
    LocalTraining,
    init_local_optimizer,
    make_training_step,
)
from fedjax_het.core.optimizers import (
    LR_NAME,
    USER_OBJECT,
    LocalTrainingOptions,
    transform_gradient,
)
from fedjax_het.utils.errors import require

Tree = Any


def make_local_model_training(training: LocalTraining) -> ClientAlgorithm:
    """Build a client that trains a copy of the server's model, and stores it as its state.

    The client sends nothing.

    Args:
      training: the choices of local training.

    Returns:
      The functions of the client, whose state is the variables of a model.

    Example:
      >>> from fedjax_het.methods import LocalTraining, make_local_model_training
      >>> client = make_local_model_training(LocalTraining(task=None, optimizer="sgd"))
      >>> client.init({}, {"params": 1.0})
      {'params': 1.0}
    """

    def init(hp, variables):
        return variables

    def begin(context, state):
        variables = context.message.variables
        optimizer_state = init_local_optimizer(training, context.hp, variables)
        return ClientTrainState(variables, optimizer_state, ())

    def end(context, local, state):
        return ClientUpdate(), local.variables, ()

    return ClientAlgorithm(init, begin, make_training_step(training), end)


def add_proximal_gradient(gradient: Tree, params: Tree, anchor: Tree, strength: Any) -> Tree:
    """Add the gradient of strength / 2 ||params - anchor||^2.

    Args:
      gradient: gradient of a loss.
      params: the weights.
      anchor: weights of the same structure.
      strength: a scalar; may be traced.

    Returns:
      gradient + strength * (params - anchor).

    Example:
      >>> from fedjax_het.core.training_variants import add_proximal_gradient
      >>> add_proximal_gradient({"w": 1.0}, {"w": 3.0}, {"w": 2.0}, 0.5)
      {'w': 1.5}
    """
    return jax.tree.map(lambda g, w, a: g + strength * (w - a), gradient, params, anchor)


def measure_applied_gradient(
    training: LocalTraining, hp: Any, params: Tree, gradient: Tree, corrected: Tree
) -> Tree:
    """Measure the gradient of a step for a control variate: with clipping and weight decay.

    Under plain SGD the mean over the K steps of a round equals the papers' variate, (x - y) / (K
    local_lr) less the correction. Under another optimizer (x - y) / (K local_lr) is no gradient,
    but this mean is. With `accumulation_steps` > 1 every minibatch counts as if clipped alone.

    Args:
      training: the choices of local training.
      hp: values of the hyperparameters by name.
      params: the weights before the step.
      gradient: gradient of the client's own loss.
      corrected: `gradient` plus the method's correction, which the optimizer receives.

    Returns:
      clip(corrected) + weight decay * params - correction; `gradient` itself without both.

    Example:
      >>> from fedjax_het.core.local_training import LocalTraining
      >>> from fedjax_het.core.training_variants import measure_applied_gradient
      >>> training = LocalTraining(task=None, optimizer="sgd")
      >>> measure_applied_gradient(training, {}, params=4.0, gradient=1.0, corrected=1.5)
      1.0
    """
    assert training.optimizer is not None, "clients that condense have none"
    applied = transform_gradient(training.optimizer, training.options, hp, corrected, params)
    if applied is corrected:
        return gradient
    return jax.tree.map(lambda a, c, g: a - (c - g), applied, corrected, gradient)


def count_optimizer_steps(training: LocalTraining, num_minibatches: Any) -> Any:
    """Return the steps of the local optimizer in a round.

    Args:
      training: the choices of local training.
      num_minibatches: minibatches of the round; may be traced.

    Returns:
      The number of steps.

    Example:
      >>> from fedjax_het.methods import LocalTraining, count_optimizer_steps
      >>> count_optimizer_steps(LocalTraining(task=None, optimizer="sgd"), 7)
      7
    """
    accumulation_steps = training.options.accumulation_steps
    return num_minibatches if accumulation_steps == 1 else -(-num_minibatches // accumulation_steps)


def with_plain_sgd(training: LocalTraining) -> LocalTraining:
    """Return the local training with steps of plain SGD.

    Args:
      training: the choices of local training.

    Returns:
      The choices with the optimizer "sgd", without options and kept state.

    Example:
      >>> from fedjax_het.methods import LocalTraining, with_plain_sgd
      >>> with_plain_sgd(LocalTraining(task=None, optimizer="adam")).optimizer
      'sgd'
    """
    return training._replace(optimizer="sgd", keep_state=False, options=LocalTrainingOptions())


def require_constant_lr(training: LocalTraining, reason: str) -> None:
    """Require that every local step has the rate `local_lr`, for methods that read it.

    Args:
      training: the choices of local training.
      reason: why the method requires it, in a few words.

    Raises:
      ConfigError: if the rate has a schedule over steps, or is not known.

    Example:
      >>> from fedjax_het.methods import LocalTraining, require_constant_lr
      >>> require_constant_lr(LocalTraining(task=None, optimizer="sgd"), "the method reads it")
    """
    schedule, hp_names = training.options.lr_schedule, training.options.optional_hyperparameters
    require(schedule is None, "lr_step_schedule", schedule, f"none: {reason}")
    has_lr = training.optimizer != USER_OBJECT or LR_NAME in hp_names
    expected = f"a number in addition to the passed optimizer: {reason}"
    require(has_lr, f"hp {LR_NAME}", None, expected)

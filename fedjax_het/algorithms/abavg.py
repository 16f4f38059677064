"""ABAVG, accuracy-based averaging (Xiao et al., ISPDC 2021)."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import add_scaled_variables
from fedjax_het.algorithms.ensemble_distillation import with_ensemble_step
from fedjax_het.algorithms.server_step import ServerStepContext, get_server_examples
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_rows import ClientModels
from fedjax_het.core.distillation import compute_weighted_sum, score_models
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.tasks.classification import correct
from fedjax_het.utils.arrays import normalize_weights


def abavg(
    training: LocalTraining, plan: ExecutionPlan, *, base: Callable[..., Algorithm]
) -> Algorithm:
    """ABAVG: the server weighs clients' models by their accuracy on its labeled examples.

        w <- w_base + server_lr sum_k (a_k - p_k) w_k,  a_k = acc_k / sum_j acc_j.

    a_k replace p_k, the weights of the run's `averaging`. Over FedAvg this is w + server_lr sum_k
    a_k (w_k - w), the published method. A base needs a new model with the term server_lr sum_k p_k
    w_k. FedDyn's and FedDC's servers still average their own state by p_k, the weights of the
    objective. FedNova cannot be a base, because it weighs changes of different lengths. The server
    optimizers cannot be bases, because their momentum or scale would belong to another average.

    Batch-norm statistics get the weights a_k at rate 1. Accuracies are over all examples, of
    networks in evaluation mode. If no model predicts any example, all models have equal weights. If
    a model has logits that are not finite, the average is not finite.

    Traffic and client state equal the traffic and state of `base`. Cost: one pass of each of the S
    client models over the server's examples, and memory for S models. The devices of a federation
    share the work.

    Departure from the paper: its formula could not be read. This rule follows DynaFed's public code
    without two errors: the code computes the accuracy on the last minibatch only, and with networks
    in training mode.

    Args:
      training: the choices of local training.
      plan: where the clients run, and the devices that share the server's work.
      base: `base(training, plan)`, the method whose average gets other weights.

    Returns:
      The method.
    """
    predict_correct = partial(score_models, training.task, correct)

    def average_by_accuracy(hp, context: ServerStepContext, models: ClientModels):
        args = (predict_correct, models.variables, get_server_examples(context))
        accuracies = plan.shard_server_work(*args, loops=context.cohort.loops).mean(0)
        weights = jnp.where(models.is_present, accuracies, 0)
        weights = jnp.where(weights.any(), weights, models.is_present)
        weights = normalize_weights(weights)
        change = compute_weighted_sum(weights - models.weights, models.variables)
        return add_scaled_variables(context.variables_after, hp["server_lr"], change)

    return with_ensemble_step(training, plan, base, average_by_accuracy, training.batch_size)


SPEC = AlgorithmSpec(
    "abavg",
    abavg,
    "clients' models averaged by their accuracy on the server's examples (Xiao et al., 2021)",
    title="ABAvg",
    paper="Xiao et al., ISPDC 2021",
    color="#332288",
    wraps="average",
    required_data=("proxy_data",),
    needs_classes=True,
)

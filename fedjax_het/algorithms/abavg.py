"""ABAVG, accuracy-based averaging (Xiao et al., ISPDC 2021)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.builders import ServerStepContext, get_server_examples
from fedjax_het.algorithms.ensemble_distillation import with_ensemble_step
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.client_loop import ClientModels, Examples
from fedjax_het.core.device_exchange import get_client_row
from fedjax_het.core.distillation import compute_logits, compute_weighted_sum
from fedjax_het.core.evaluation import correct
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.resumable_loops import TEACHERS
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.utils.arrays import set_row


def abavg(
    training: LocalTraining, plan: ExecutionPlan, *, base: Callable[..., Algorithm]
) -> Algorithm:
    """The average of the clients' models w_k with weights by their accuracy on the server's
    labelled examples, in place of the p_k of the run's `averaging`:

        w <- w_base + server_lr sum_k (a_k - p_k) w_k,  a_k = acc_k / sum_j acc_j.

    Over FedAvg that is w + server_lr sum_k a_k (w_k - w), the method as it was published. Its bases
    are those whose new model has a term server_lr sum_k p_k w_k, so that it is theirs with a_k in
    place of p_k; what FedDyn's and FedDC's servers keep stays a mean by p_k, the weights of the
    objective. Not FedNova, where they weigh changes of unlike length, and not the
    server optimisers, whose momentum or scale would be of another average. Batch-norm statistics
    are averaged likewise, with rate 1. Accuracies are of all the examples, of the networks as they
    are evaluated. If no model is right about any of them, all count alike; if one of them has
    logits that are not finite, so is the average.

    The paper's formula could not be read; this one is that of DynaFed's public code, less its two
    errors: there the accuracy is of the last minibatch alone, and of networks in training mode.

    Traffic and state: those of `base`. Cost: a pass of each of the S clients' models over the
    server's examples, shared by the devices that share a federation; memory of the S models.
    """
    task = training.task

    def predict_correct(server_parallelism: ServerParallelism, models, examples: Examples):
        def predict_shard(examples: Examples):
            labels, count = jnp.asarray(examples.labels), len(jax.tree.leaves(models)[0])

            def add_model(i, is_correct):
                logits = compute_logits(task, get_client_row(models, i), examples.images)
                return set_row(is_correct, correct(logits, labels), i)

            no_predictions = jnp.zeros((count, len(labels)))
            return server_parallelism.loops.run(
                TEACHERS, count, add_model, no_predictions, samples_per_iteration=len(labels) / 3
            ).T

        return server_parallelism.map_samples(predict_shard, examples)  # [n, S]

    def average_by_accuracy(hp, context: ServerStepContext, client_models: ClientModels):
        examples = get_server_examples(context)

        accuracies = plan.shard_server_work(
            predict_correct, client_models.variables, examples, loops=context.cohort.loops
        ).mean(0)
        accuracy_weights = jnp.where(client_models.is_present, accuracies, 0)
        accuracy_weights = jnp.where(
            accuracy_weights.any(), accuracy_weights, client_models.is_present
        )
        new_weights = accuracy_weights / jnp.maximum(
            accuracy_weights.sum(), jnp.finfo(jnp.float32).tiny
        )
        change = compute_weighted_sum(new_weights - client_models.weights, client_models.variables)
        return {
            name: jax.tree.map(
                lambda a, d, rate=hp["server_lr"] if name == "params" else 1.0: a + rate * d,
                part,
                change[name],
            )
            for name, part in context.variables_after.items()
        }

    return with_ensemble_step(training, plan, base, average_by_accuracy, training.batch_size)


SPEC = AlgorithmSpec(
    "abavg",
    abavg,
    "clients' models averaged by their accuracy on the server's examples (Xiao et al., 2021)",
    paper="Xiao et al., ISPDC 2021",
    color="#332288",
    wraps="average",
    required_data=("proxy_data",),
)

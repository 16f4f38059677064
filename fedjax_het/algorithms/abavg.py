"""ABAVG, accuracy-based averaging (Xiao et al., ISPDC 2021)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.algorithms.distilling import over_models
from fedjax_het.algorithms.entry import Entry
from fedjax_het.algorithms.refined import Round, server_examples
from fedjax_het.common.arrays import with_row
from fedjax_het.engine.ensemble import logits_of, weighted_sum
from fedjax_het.engine.evaluation import right_of
from fedjax_het.engine.lanes import ClientModels, Examples, client_row
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.plan import Plan
from fedjax_het.engine.sharing import Sharing
from fedjax_het.engine.stretches import TEACHERS, loop


def abavg(training: LocalTraining, plan: Plan, *, base: Callable[..., Algorithm]) -> Algorithm:
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

    def found_right(sharing: Sharing, models, examples: Examples):
        def of_examples(part: Examples):
            labels, count = jnp.asarray(part.labels), len(jax.tree.leaves(models)[0])

            def add(i, right):
                logits = logits_of(task, client_row(models, i), part.images)
                return with_row(right, right_of(logits, labels), i)

            none = jnp.zeros((count, len(labels)))
            return loop(TEACHERS, count, add, none, samples=len(labels) / 3).T

        return sharing.for_each_sample(of_examples, examples)  # [n, S]

    def refine(hp, this_round: Round, models: ClientModels):
        examples = server_examples(this_round)

        accuracies = plan.shared(found_right, models.variables, examples).mean(0)
        right = jnp.where(models.present, accuracies, 0)
        right = jnp.where(right.any(), right, models.present)
        shares = right / jnp.maximum(right.sum(), jnp.finfo(jnp.float32).tiny)
        change = weighted_sum(shares - models.weights, models.variables)
        return {
            name: jax.tree.map(
                lambda a, d, rate=hp["server_lr"] if name == "params" else 1.0: a + rate * d,
                part,
                change[name],
            )
            for name, part in this_round.after.items()
        }

    return over_models(training, plan, base, refine, training.batch_size)


ENTRY = Entry(
    "abavg",
    abavg,
    "clients' models averaged by their accuracy on the server's examples (Xiao et al., 2021)",
    paper="Xiao et al., ISPDC 2021",
    colour="#332288",
    refines="average",
    needs=("proxy_data",),
)

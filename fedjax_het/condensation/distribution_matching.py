"""Distribution matching: synthetic inputs with the mean embedding of real inputs.

Source: Zhao and Bilen, "Dataset Condensation with Distribution Matching" (WACV 2023). FedDM (CVPR
2023) adds the logits. FedAF (CVPR 2024, Eqs. 6 and 10) adds the distance between the mean logit and
the mean logit of the other owners of the class. It draws the network anew in every step (Eq. 17).
Its server also learns from the clients' soft labels (Eqs. 5, 8 and 11 to 15).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedjax_het.condensation.privacy import clip_rows
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.resumable_loops import SOFT_LABELS
from fedjax_het.core.task import Task
from fedjax_het.nn.micro_batch import choose_micro_batch_size, make_zero_sums
from fedjax_het.utils.arrays import take_row
from fedjax_het.utils.former_names import FORMER_INPUT_NAMES, accept_former_arguments

Tree = Any


def distribution_distance(real_mean: Array, synthetic_mean: Array) -> Array:
    """Return the squared L2 distance of two mean embeddings, summed over features (FedAF, Eq. 4).

    Args:
      real_mean: mean embedding of real inputs, `[F]`.
      synthetic_mean: mean embedding of synthetic inputs, `[F]`.

    Returns:
      The distance, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import distribution_distance
      >>> float(distribution_distance(jnp.float32([1, 2]), jnp.float32([0, 0])))
      5.0
    """
    return jnp.square(real_mean - synthetic_mean).sum()


def sliced_wasserstein(u: Array, v: Array) -> Array:
    """Compute the exact squared sliced 2-Wasserstein distance of two points, |u - v|^2 / C.

    FedAF compares single vectors. Projected on a unit direction theta, their squared distance is
    (theta . (u - v))^2, whose mean over the sphere is |u - v|^2 / C. For single vectors, slicing
    only scales the squared error.

    Args:
      u: `[C]`.
      v: `[C]`.

    Returns:
      The distance, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import sliced_wasserstein
      >>> float(sliced_wasserstein(jnp.float32([2, 0]), jnp.float32([0, 0])))
      2.0
    """
    return jnp.square(u - v).mean()


def sampled_sliced_wasserstein(u: Array, v: Array, key: Array, num_projections: int = 50) -> Array:
    """Estimate `sliced_wasserstein` by the mean over random directions.

    The expectation equals the exact form, which has no variance and costs less. This function
    serves comparisons with code that samples.

    Args:
      u: `[C]`.
      v: `[C]`.
      key: key of the directions.
      num_projections: number of directions.

    Returns:
      The estimate, `[]`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import sampled_sliced_wasserstein
      >>> u, v = jnp.float32([2, 0]), jnp.float32([0, 0])
      >>> 1 < sampled_sliced_wasserstein(u, v, jax.random.key(0), num_projections=1000) < 3
      Array(True, dtype=bool)
    """
    directions = jax.random.normal(key, (num_projections, u.size))
    directions /= jnp.linalg.norm(directions, axis=1, keepdims=True)
    return jnp.square(jnp.matmul(directions, u - v, precision="highest")).mean()


def gaussian_mmd(u: Array, v: Array) -> Array:
    """Compute the squared maximum mean discrepancy of two points, 2 - 2 k(u, v).

    The kernel k is the mean of five Gaussian kernels exp(-|u - v|^2 / (2 s)) with variances
    s = C / 16, C / 4, C, 4 C and 16 C. Other kernels give other distances: of two points, a linear
    kernel gives |u - v|^2, which is C times `sliced_wasserstein`.

    Args:
      u: `[C]`.
      v: `[C]`.

    Returns:
      The distance in [0, 2], `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import gaussian_mmd
      >>> u, far = jnp.float32([2, 0]), jnp.float32([1e3, 0])
      >>> float(gaussian_mmd(u, u)), float(gaussian_mmd(u, far))
      (0.0, 2.0)
    """
    variances = u.size * 4.0 ** jnp.arange(-2, 3)
    return 2 - 2 * jnp.exp(-jnp.square(u - v).sum() / (2 * variances)).mean()


@accept_former_arguments("mean_embedding", FORMER_INPUT_NAMES)
def mean_embedding(
    embed: Callable[[Array], tuple[Array, Array]],
    inputs: Array,
    mask: Array,
    micro_batch_size: int | None,
) -> tuple[Array, Array]:
    """Compute the mean features and logits of the inputs whose mask is 1.

    Micro-batches behind the last such input are left out. The result has no gradient then.

    Args:
      embed: `inputs -> (features [B, F], logits [B, C])`, computed for each input independently.
      inputs: `[B, ...]`.
      mask: `[B]`, 1 or 0.
      micro_batch_size: inputs that fit a CPU core's cache, see `choose_micro_batch_size`; None: all
        at once.

    Returns:
      Mean features `[F]` and mean logits `[C]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import mean_embedding
      >>> embed = lambda inputs: (inputs.reshape(len(inputs), -1), inputs.mean((1, 2)))
      >>> inputs, mask = jnp.ones((6, 2, 2, 3)), jnp.ones(6)
      >>> [mean.shape for mean in mean_embedding(embed, inputs, mask, None)]
      [(12,), (3,)]
    """

    def weighted_sums(micro_batch):
        inputs, mask = micro_batch
        return tuple((values * mask[:, None]).sum(0) for values in embed(inputs))

    micro_batch_size = choose_micro_batch_size(len(inputs), micro_batch_size)
    if micro_batch_size == len(inputs):
        sums = weighted_sums((inputs, mask))
    else:
        micro_batches = (
            inputs.reshape(-1, micro_batch_size, *inputs.shape[1:]),
            mask.reshape(-1, micro_batch_size),
        )

        def add_micro_batch(i, sums):
            micro_batch = (take_row(array, i) for array in micro_batches)
            return jax.tree.map(jnp.add, sums, weighted_sums(tuple(micro_batch)))

        num_inputs = jnp.where(mask > 0, jnp.arange(1, len(mask) + 1), 0).max()
        num_micro_batches = (num_inputs + micro_batch_size - 1) // micro_batch_size
        zero_sums = make_zero_sums(weighted_sums, micro_batches)
        sums = jax.lax.fori_loop(0, num_micro_batches, add_micro_batch, zero_sums)
    return tuple(total / jnp.maximum(mask.sum(), 1) for total in sums)


def interpolate_params(params: Tree, fresh_params: Tree, gamma: Array) -> Tree:
    """Interpolate parameters as FedAF's re-sampling does (Eq. 17).

    The result is gamma * received + (1 - gamma) * freshly initialized. Every step uses the received
    parameters. If each step used the previous result, as a literal reading of the equation
    suggests, the received parameters would vanish after a few steps (0.9^1000).

    Args:
      params: received parameters.
      fresh_params: freshly initialized parameters of the same structure.
      gamma: `[]`, weight of the received parameters.

    Returns:
      Parameters of the same structure.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import interpolate_params
      >>> print(interpolate_params({"w": jnp.ones(2)}, {"w": jnp.zeros(2)}, 0.25)["w"])
      [0.25 0.25]
    """
    return jax.tree.map(lambda w, fresh: gamma * w + (1 - gamma) * fresh, params, fresh_params)


def sample_on_ball(key: Array, params: Tree, rho: Array) -> Tree:
    """Sample parameters near the received ones as FedDM does: w + g * min(1, rho / |g|).

    g is standard normal, as in the public re-implementations. With 10^5 parameters |g| is far above
    rho = 5, so the sample has a uniform direction and the distance rho. It is not the truncated
    Gaussian of the paper's text.

    Args:
      key: key of g.
      params: received parameters, w.
      rho: `[]`, maximum distance.

    Returns:
      Parameters of the same structure.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import sample_on_ball
      >>> sample = sample_on_ball(jax.random.key(0), {"w": jnp.zeros(1000)}, 5.0)
      >>> round(float(jnp.linalg.norm(sample["w"])), 3)
      5.0
    """
    flat, unravel = ravel_pytree(params)
    noise = jax.random.normal(key, flat.shape)
    return unravel(flat + noise * jnp.minimum(1.0, rho / jnp.linalg.norm(noise)))


def average_over_owners(values: Array, is_owner: Array) -> tuple[Array, Array]:
    """Average over the clients that own a class.

    Deviation from Eqs. 8 and 12, which divide by all K clients and do not define the values of
    clients without the class. With zeros for them soft labels would not add up to 1.

    Args:
      values: `[K, C, F]`, a vector for each client and class.
      is_owner: `[K, C]` bool.

    Returns:
      The mean `[C, F]`, zero for classes without an owner, and whether a class has an owner, `[C]`.
    """
    weights = is_owner.astype(values.dtype)
    total = jnp.einsum("kc,kcf->cf", weights, jnp.where(is_owner[..., None], values, 0))
    count = weights.sum(0)
    return divide_by_count(total, count), count > 0


def compute_soft_labels(mean_logits: Array, tau: Array) -> Array:
    """Return softmax(v / tau) of the *mean* logit v, not the mean of softmaxes (Eq. 11).

    Args:
      mean_logits: `[..., C]`.
      tau: `[]`, temperature.

    Returns:
      Soft labels, `[..., C]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import compute_soft_labels
      >>> print(compute_soft_labels(jnp.zeros((2, 4)), 2.0)[0])
      [0.25 0.25 0.25 0.25]
    """
    return jax.nn.softmax(mean_logits / tau, axis=-1)


def symmetric_kl(log_p: Array, log_q: Array) -> Array:
    """Return (KL(p || q) + KL(q || p)) / 2 over the last axis, in nats (Eq. 15).

    Args:
      log_p: log-probabilities, `[..., C]`.
      log_q: log-probabilities, `[..., C]`.

    Returns:
      `[...]`.
    """
    return 0.5 * ((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q)).sum(-1)


def sum_logits_by_class(
    logits: Array, labels: Array, weights: Array, num_classes: int
) -> tuple[Array, Array]:
    """Sum the weighted logits of each class.

    Args:
      logits: `[B, F]`.
      labels: `[B]` int.
      weights: `[B]`.
      num_classes: number of classes, C.

    Returns:
      Sums of the weighted logits, `[C, F]`, and of the weights, `[C]`.
    """
    class_weights = jax.nn.one_hot(labels, num_classes) * weights[:, None]
    return class_weights.T @ logits, class_weights.sum(0)


def divide_by_count(sums: Array, count: Array) -> Array:
    """Divide sums by counts; the result is zero where the count is zero.

    Args:
      sums: `[C, F]`.
      count: `[C]`.

    Returns:
      `[C, F]`.
    """
    return sums / jnp.maximum(count, 1)[:, None]


def soft_label_matching_loss(
    mean_logits: Array, is_present: Array, soft_labels: Array, tau: Array
) -> Array:
    """Compute the local-global knowledge matching loss (Eq. 15).

    The loss is the symmetric KL divergence between softmax(mean logit / tau) and the clients' soft
    label, in nats, summed over the present classes.

    Args:
      mean_logits: `[C, C]`, mean logit of the synthetic inputs of each class.
      is_present: `[C]` bool, True for the classes to sum over.
      soft_labels: `[C, C]`, the clients' soft labels.
      tau: `[]`, temperature.

    Returns:
      The loss, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import compute_soft_labels, soft_label_matching_loss
      >>> logits, is_present = jnp.eye(3), jnp.ones(3, bool)
      >>> loss = soft_label_matching_loss(logits, is_present, compute_soft_labels(logits, 2.0), 2.0)
      >>> bool(loss < 1e-6)
      True
    """
    log_probabilities = jax.nn.log_softmax(mean_logits / tau, axis=-1)
    log_soft_labels = jnp.log(jnp.maximum(soft_labels, 1e-30))
    return (is_present * symmetric_kl(log_soft_labels, log_probabilities)).sum()


def compute_class_mean_logits(
    task: Task,
    plan: ExecutionPlan,
    variables: Tree,
    cohort: Cohort,
    num_clients: int,
    min_examples: int = 1,
    clip_norm: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Compute each client's mean logit of each of its classes over all of its data (FedAF, Eq. 5).

    Cost: one pass in evaluation mode over the data of the round's clients, shared by the devices.

    Args:
      task: network and normalization.
      plan: placement of the clients on the devices.
      variables: variables of the network.
      cohort: the round's clients, their schedule and examples.
      num_clients: number of clients in the cohort, K.
      min_examples: examples that a client needs to own a class; 1 in a verification run, which
        reads a single batch.
      clip_norm: maximum L2 norm of each example's logits; None: no clipping.

    Returns:
      Mean logits, `[K, C, C]`, zero for classes without examples; whether the client owns the
      class, `[K, C]`; and the number of examples, `[K, C]`.
    """
    num_classes = task.model.num_classes
    num_pairs = num_clients * num_classes
    schedule = cohort.schedule

    def sum_block(loops, variables, examples, trial, clip_norm, block_data):
        indices, pair_ids = block_data

        def limit(count):
            return jnp.where(trial, jnp.minimum(1, count), count)

        def add_batch(i, sums):
            batch = task.normalize(examples.take_by_owner(indices[i]))
            logits, _ = task.model.apply(variables, batch, train=False)
            if clip_norm is not None:
                (logits,) = clip_rows((logits,), clip_norm)
            logits_and_count = jnp.concatenate([logits, jnp.ones((len(logits), 1))], axis=1)
            # The pair of padding is beyond the end.
            return sums.at[pair_ids[i]].add(logits_and_count, mode="drop")

        max_batches, size = indices.shape
        return loops.run(
            SOFT_LABELS,
            limit((pair_ids[:, 0] < num_pairs).sum()),
            add_batch,
            jnp.zeros((num_pairs, num_classes + 1)),
            max_total=limit(max_batches),
            max_iterations=max_batches,
            samples_per_iteration=size / 3,
        )

    sums = plan.sum_over_blocks(
        sum_block,
        (variables, cohort.examples, schedule.is_verification, clip_norm),
        (schedule.full_pass_indices, schedule.full_pass_pair_ids),
        loops=cohort.loops,
    )
    sums, count = sums[:, :-1], sums[:, -1:]
    is_owner = count >= jnp.where(schedule.is_verification, 1, min_examples)
    shape = (num_clients, num_classes)
    means = (sums / jnp.maximum(count, 1)).reshape(*shape, num_classes)
    return means, is_owner.reshape(shape), count.reshape(shape)

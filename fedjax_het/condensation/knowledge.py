"""What clients tell of their classes besides images, and how the server learns from it.

Source: FedAF (CVPR 2024), Eqs. 5, 8 and 11 to 15.
"""

import jax
import jax.numpy as jnp
from jax import Array


def average_over_owners(values: Array, is_owner: Array) -> tuple[Array, Array]:
    """Mean over the clients that own a class: `[K, C, F]`, `[K, C]` -> (`[C, F]`, owned `[C]`).

    Deviation from Eqs. 8 and 12, which divide by all K clients and say nothing of those without
    the class: with zeros for them soft labels would not add up to 1. Classes that nobody owns are
    zero, and marked.
    """
    weights = is_owner.astype(values.dtype)
    total = jnp.einsum("kc,kcf->cf", weights, jnp.where(is_owner[..., None], values, 0))
    count = weights.sum(0)
    return divide_by_count(total, count), count > 0


def compute_soft_labels(mean_logits: Array, tau: Array) -> Array:
    """softmax(v / tau): of the *mean* logit, not the mean of softmaxes (Eq. 11)."""
    return jax.nn.softmax(mean_logits / tau, axis=-1)


def symmetric_kl(log_p: Array, log_q: Array) -> Array:
    """(KL(p || q) + KL(q || p)) / 2 in nats over the last axis (Eq. 15)."""
    return 0.5 * ((jnp.exp(log_p) - jnp.exp(log_q)) * (log_p - log_q)).sum(-1)


def sum_logits_by_class(
    logits: Array, labels: Array, weights: Array, num_classes: int
) -> tuple[Array, Array]:
    """Weighted sum of the logits of every class, `[B, C]` -> (`[num_classes, C]`, and of the
    weights, `[num_classes]`)."""
    class_weights = jax.nn.one_hot(labels, num_classes) * weights[:, None]
    return class_weights.T @ logits, class_weights.sum(0)


def divide_by_count(sums: Array, count: Array) -> Array:
    """`[C, F]` sums over `[C]` counts; zero where there is none."""
    return sums / jnp.maximum(count, 1)[:, None]


def soft_label_matching_loss(
    mean_logits: Array, is_present: Array, soft_labels: Array, tau: Array
) -> Array:
    """Local-global knowledge matching: symmetric KL of softmax(mean logit / tau) from the clients'
    soft labels, summed over the classes that are `present` `[C]` (Eq. 15).

    Args: mean_logits `[C, C]` of the synthetic images by class; targets `[C, C]` soft labels.
    """
    log_t = jax.nn.log_softmax(mean_logits / tau, axis=-1)
    log_r = jnp.log(jnp.maximum(soft_labels, 1e-30))
    return (is_present * symmetric_kl(log_r, log_t)).sum()

"""The comparison of two trainings against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
from support.x64 import enable_x64

from fedjax_het.condensation import (
    SyntheticData,
    SyntheticTask,
    compare_dynamics,
    training_dynamics,
)
from fedjax_het.core.client_loop import Examples

CLASSES, FEATURES, STEPS, STEP_SIZE = 3, 4, 5, 0.7


def softmax(x):
    exponentials = np.exp(x - x.max(1, keepdims=True))
    return exponentials / exponentials.sum(1, keepdims=True)


def draw(num_samples, seed):
    """Return images `[N, 2, 2, 1]` and label logits."""
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num_samples, 2, 2, 1)), rng.normal(size=(num_samples, CLASSES))


def gradient(weights, images, label_logits):
    x = images.reshape(len(images), -1)
    return x.T @ (softmax(x @ weights) - softmax(label_logits)) / len(x)


def test_gap_equals_numpy(monkeypatch):
    monkeypatch.setattr(training_dynamics, "_MICRO_BATCH", 4)  # several pieces, the last one short
    synthetic, real, (probe, _) = draw(6, 0), draw(11, 1), draw(9, 2)
    start = np.random.default_rng(3).normal(size=(FEATURES, CLASSES))
    with enable_x64(True):
        task = SyntheticTask(lambda w, x: x.reshape(len(x), -1) @ w, "none", "cross_entropy")
        data = SyntheticData(*map(jnp.asarray, synthetic), jnp.asarray(STEP_SIZE))
        examples = Examples(*map(jnp.asarray, real))
        compare = jax.jit(lambda *args: compare_dynamics(task, *args, num_steps=STEPS))
        gap = compare(jnp.asarray(start), data, examples, jnp.asarray(probe))
    on_synthetic, on_real, rows = start, start, []
    for _ in range(STEPS):
        both = [gradient(on_real, *data) for data in (synthetic, real)]
        norms = [np.linalg.norm(g) for g in both]
        cosine = (both[0] * both[1]).sum() / np.prod(norms)
        error = np.linalg.norm(both[0] - both[1]) / norms[1]
        on_synthetic = on_synthetic - STEP_SIZE * gradient(on_synthetic, *synthetic)
        on_real = on_real - STEP_SIZE * both[1]
        difference = np.abs(probe.reshape(9, -1) @ (on_synthetic - on_real))
        change = np.abs(probe.reshape(9, -1) @ (on_real - start)).max()
        rows.append((difference.max(), difference.mean(), cosine, error, change))
    np.testing.assert_allclose(np.stack(gap, 1), rows, rtol=1e-9)

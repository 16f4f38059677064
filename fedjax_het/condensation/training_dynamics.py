"""Training on synthetic data beside training on real data, from one start."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from fedjax_het.condensation.synthetic_data import SyntheticData, SyntheticTask, Tree
from fedjax_het.core.client_loop import Examples
from fedjax_het.nn.micro_batch import accumulate_micro_batches
from fedjax_het.utils.former_names import accept_former_arguments

_MICRO_BATCH = 500  # samples at a time


class DynamicsGap(NamedTuple):
    """Differences of two trainings from one start, for each of S steps.

    Attributes:
      logit_gap: `[S]`, largest absolute difference of a logit of both networks, over the probe
        inputs and the classes, after the step: the left side of DynaFed's Lemma 1.
      mean_logit_gap: `[S]`, mean absolute difference of the logits.
      gradient_cosine: `[S]`, cosine between the gradients of both data sets at the network that was
        trained on real data, before the step.
      gradient_error: `[S]`, norm of the difference of these gradients over the norm of the gradient
        of the real data: delta of DynaFed's Assumption 3 for epsilon 0.
      logit_change: `[S]`, largest absolute change of a logit by the training on real data since the
        start; a `logit_gap` of this size is the gap of data that teach nothing.

    Example:
      >>> from fedjax_het.condensation import DynamicsGap
      >>> DynamicsGap._fields
      ('logit_gap', 'mean_logit_gap', 'gradient_cosine', 'gradient_error', 'logit_change')
    """

    logit_gap: Array
    mean_logit_gap: Array
    gradient_cosine: Array
    gradient_error: Array
    logit_change: Array


@accept_former_arguments("compare_dynamics", {"probe_images": "probe_inputs"})
def compare_dynamics(
    task: SyntheticTask,
    params: Tree,
    synthetic: SyntheticData,
    real: Examples,
    probe_inputs: Array,
    *,
    num_steps: int,
) -> DynamicsGap:
    """Train on synthetic and on real data from one start, and compare the networks in each step.

    Both trainings are gradient descent with all examples, without augmentation, at the step size of
    the synthetic data:

        w <- w - step_size * grad L(w, D_syn),   v <- v - step_size * grad L(v, D),

    the two equations of DynaFed, section 5. Lemma 1 bounds the difference of the networks' outputs
    if the gradients are close; the function measures both.

    Cost: `num_steps` steps, each with two gradients of the synthetic data, one gradient of the real
    data, and two passes over the probe inputs.

    Args:
      task: network and loss.
      params: parameters at the start.
      synthetic: the synthetic data, and the step size.
      real: normalized inputs `[N, ...]`, and label logits `[N, C]`.
      probe_inputs: normalized inputs on which outputs are compared, `[n, ...]`.
      num_steps: number of steps, S.

    Returns:
      The differences.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import SyntheticData, SyntheticTask, compare_dynamics
      >>> from fedjax_het.methods import Examples
      >>> task = SyntheticTask(lambda w, inputs: inputs.reshape(len(inputs), -1) @ w)
      >>> inputs, labels = jnp.ones((6, 2, 2, 1)), jnp.eye(6, 3)
      >>> data = SyntheticData(inputs, labels, jnp.float32(0.1))
      >>> start = jnp.eye(4, 3)
      >>> gap = compare_dynamics(task, start, data, Examples(inputs, labels), inputs, num_steps=2)
      >>> print(gap.logit_gap, gap.gradient_error)
      [0. 0.] [0. 0.]
    """

    def compute_gradient(params: Tree, inputs: Array, labels: Array) -> Tree:
        def sum_gradients(samples: tuple[Array, Array, Array]) -> tuple[Tree, tuple[()]]:
            return jax.grad(task.sum_losses)(params, samples, None), ()

        samples = (inputs, labels, jnp.full(len(inputs), 1 / len(inputs)))
        return accumulate_micro_batches(
            sum_gradients, samples, micro_batch=_MICRO_BATCH, pad_last=True
        )[0]

    def compute_logits(params: Tree) -> Array:
        def apply(inputs: Array) -> tuple[tuple[()], Array]:
            return (), task.apply_params(params, inputs)

        return accumulate_micro_batches(apply, probe_inputs, micro_batch=_MICRO_BATCH)[1]

    real_data = jnp.asarray(real.inputs), jnp.asarray(real.labels)
    first_logits = compute_logits(params)

    def step(both: tuple[Tree, Tree], _) -> tuple[tuple[Tree, Tree], DynamicsGap]:
        on_synthetic, on_real = both
        real_gradient = compute_gradient(on_real, *real_data)
        data = synthetic.inputs, synthetic.label_logits
        gradient = compute_gradient(on_real, *data)
        norm = optax.tree.norm(real_gradient)
        cosine = optax.tree.vdot(gradient, real_gradient) / (optax.tree.norm(gradient) * norm)
        error = optax.tree.norm(optax.tree.sub(gradient, real_gradient)) / norm
        move = lambda w, g: w - synthetic.step_size * g  # noqa: E731
        on_real = jax.tree.map(move, on_real, real_gradient)
        on_synthetic = jax.tree.map(move, on_synthetic, compute_gradient(on_synthetic, *data))
        logits = compute_logits(on_real)
        gap, change = jnp.abs(compute_logits(on_synthetic) - logits), jnp.abs(logits - first_logits)
        gaps = DynamicsGap(gap.max(), gap.mean(), cosine, error, change.max())
        return (on_synthetic, on_real), gaps

    return jax.lax.scan(step, (params, params), length=num_steps)[1]

"""The inner loop of trajectory matching: differentiable training on synthetic data, and its loss.

A step of training evaluates the gradient g(w, X) = grad_w sum_i loss(w, x_i). To differentiate the
rest of the program, its backward pass needs the products u . dg/dw and u . dg/dX for a cotangent u.
Both products are parts of *one directional derivative*: the derivative of the gradient with respect
to (w, X), along u in w. This is `jax.jvp` of `jax.grad`. Compared with `jax.grad` of `jax.grad` it

* needs only w of the step: no activation is stored for the backward pass;
* is a sum over samples, which micro-batches in a CPU core's cache, or several devices, can compute;
* is a smaller program, which compiles in seconds instead of minutes.

It costs two gradients on dual numbers (the matrix products of about three gradients). Functions of
a step, such as training by `lax.scan`, are differentiated by `jax.grad` and can be vmapped.

If the network starts with a fully connected layer and all steps train on the same inputs, the
products of that layer with the inputs are replaced by smaller ones, see `_unroll_by_gram_matrix`.

Source: Kemaev et al., "Scalable Meta-Learning via Mixed-Mode Differentiation" (MixFlow-MG, 2025);
the product itself is from Pearlmutter (1994).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from fedjax_het.condensation.augment import augment, parse_strategy
from fedjax_het.condensation.synthetic_data import SyntheticData, SyntheticTask
from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.core.server_training import make_shuffled_batches
from fedjax_het.nn.batch_axis import take_local_rows
from fedjax_het.nn.micro_batch import accumulate_micro_batches

Tree = Any
Unravel = Callable[[Array], Tree]  # parameters from a vector [P], see `ravel_pytree`
Differentiation = Literal["exact", "first_order"]


def unroll(
    task: SyntheticTask,
    unravel: Unravel,
    vector: Array,
    synthetic: SyntheticData,
    key: Array,
    *,
    num_steps: int,
    batch_size: int | None = None,
    momentum: float = 0.0,
    differentiation: Differentiation = "exact",
) -> Array:
    """Train by SGD on synthetic data, differentiably: the inner loop A(X, y, w, s').

    The update, `num_steps` times, is

        m <- momentum * m + grad loss(w; augment(inputs), labels)
        w <- w - step_size * m

    Cost: `num_steps` gradients; the backward pass costs about three times as much. Memory:
    `num_steps` * P numbers, and the activations of a (micro-)batch. An accelerator also stores the
    augmented samples of all steps, unless several devices share them.

    Args:
      task: network, augmentation and loss.
      unravel: `vector [P] -> params`, the second result of `jax.flatten_util.ravel_pytree`.
      vector: `[P]`, parameters at the start.
      synthetic: the synthetic data.
      key: key of one augmentation per step and of the order of minibatches.
      num_steps: number of SGD steps, s'.
      batch_size: samples per step. An epoch visits each sample once, in a new order; its first
        batch is the remainder, as in the public codes of DynaFed and trajectory matching. None: all
        samples at every step, in their stored order, since neither the mean nor the independent
        augmentations depend on it.
      momentum: momentum of SGD; the buffer starts at 0.
      differentiation: "exact", or "first_order", in which each step's gradient is differentiated
        with its parameters held constant. The released code of TESLA (Cui et al., ICML 2023) does
        so; its derivative lacks the products of second derivatives along the training.

    Returns:
      Parameters at the end, `[P]`, differentiable in `vector` and in every leaf of `synthetic`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import SyntheticData, SyntheticTask, unroll
      >>> task = SyntheticTask(lambda w, inputs: inputs.reshape(len(inputs), -1) @ w)
      >>> unravel = lambda vector: vector.reshape(4, 3)
      >>> data = SyntheticData(jnp.ones((6, 2, 2, 1)), jnp.zeros((6, 3)), jnp.float32(0.04))
      >>> unroll(task, unravel, jnp.ones(12), data, jax.random.key(0), num_steps=2).shape
      (12,)
    """
    batch_axis = task.parallelism.batch_axis
    num_samples, num_inputs = len(synthetic.inputs), synthetic.inputs[0].size
    is_full_batch = batch_size is None or batch_size >= num_samples
    has_equal_inputs = is_full_batch and not parse_strategy(task.augment_strategy)
    if task.input_layer is not None and has_equal_inputs and num_samples <= num_inputs:
        return _unroll_by_gram_matrix(
            *(task, unravel, vector, synthetic),
            num_steps=num_steps,
            momentum=momentum,
            is_exact=differentiation == "exact",
        )

    def select_samples(synthetic: SyntheticData, step: tuple[Array, Array]) -> tuple[Array, ...]:
        """Return augmented inputs `[B, ...]`, label logits `[B, C]` and weights `[B]`."""
        key, step_index = step
        order_key, augment_key = jax.random.split(key)
        inputs, labels = synthetic.inputs, synthetic.label_logits
        if batch_size is not None and not is_full_batch:
            batches = make_shuffled_batches(order_key, len(inputs), batch_size)
            steps_per_epoch = batches.steps_per_epoch
            is_last_first = len(inputs) % batch_size > 0
            epoch, step_in_epoch = step_index // steps_per_epoch, step_index % steps_per_epoch
            step_in_epoch = (step_in_epoch - is_last_first) % steps_per_epoch
            index, mask = batches.take_step(epoch * steps_per_epoch + step_in_epoch)
            weights = mask.astype(inputs.dtype) / mask.sum()
            index, weights = take_local_rows((index, weights), batch_axis)
            inputs, labels = inputs[index], labels[index]
        else:
            weights = jnp.full(len(inputs), 1 / len(inputs), inputs.dtype)
            inputs, labels, weights = take_local_rows((inputs, labels, weights), batch_axis)
        step_key = jax.random.fold_in(augment_key, step_index)
        inputs = augment(step_key, inputs, strategy=task.augment_strategy, batch_axis=batch_axis)
        return inputs, labels, weights

    def loss_sum(vector: Array, samples: tuple[Array, Array, Array]) -> Array:
        return task.sum_losses(unravel(vector), samples, batch_axis)

    # On an accelerator the selection of samples needs 20 to 40 launches, whatever their number. The
    # samples of all steps are therefore selected at once, before the loop.
    selects_ahead = not has_equal_inputs and batch_axis is None and jax.default_backend() != "cpu"
    step_inputs: Any = jnp.arange(num_steps)
    if selects_ahead:
        step_inputs = jax.vmap(select_samples, (None, (None, 0)))(synthetic, (key, step_inputs))
    gradient = mixed_mode(
        loss_sum,
        (lambda samples, _: samples) if selects_ahead else select_samples,
        micro_batch=task.micro_batch,
        server_parallelism=task.parallelism,
    )

    def step(carry: tuple[Array, Array | None], step_input: Any) -> tuple[tuple, None]:
        vector, buffer = carry
        point = jax.lax.stop_gradient(vector) if differentiation == "first_order" else vector
        source = (step_input, None) if selects_ahead else (synthetic, (key, step_input))
        direction = gradient(point, *source)
        if buffer is not None:
            buffer = direction = momentum * buffer + direction
        return (vector - synthetic.step_size * direction, buffer), None

    initial = vector, jnp.zeros_like(vector) if momentum else None
    return jax.lax.scan(step, initial, step_inputs)[0][0]


def _unroll_by_gram_matrix(
    task: SyntheticTask,
    unravel: Unravel,
    vector: Array,
    synthetic: SyntheticData,
    *,
    num_steps: int,
    momentum: float,
    is_exact: bool,
) -> Array:
    """Train as `unroll` does, without products of the inputs X `[M, D]` in the steps.

    The gradient of the first layer's kernel W `[D, H]` is X' times the gradient of its outputs.
    After t steps the kernel is therefore W_t = W_0 + X' C_t for coefficients C_t `[M, H]`, and the
    layer's outputs are X W_t = X W_0 + (X X') C_t. A step has one product with the Gram matrix X X'
    `[M, M]` in place of two with X. Results differ from those of `unroll` by rounding.

    Cost: the products with X of about two steps. Devices that share the server's work repeat it.

    Args:
      task: see `unroll`; has an `input_layer`.
      unravel: see `unroll`.
      vector: see `unroll`.
      synthetic: see `unroll`.
      num_steps: see `unroll`.
      momentum: see `unroll`.
      is_exact: whether the derivative is exact, otherwise of first order.

    Returns:
      Parameters at the end, `[P]`.
    """
    inputs = synthetic.inputs.reshape(len(synthetic.inputs), -1)
    params = unravel(vector)
    layer: Tree = params[task.input_layer]
    kernel = layer["kernel"]
    others = {**params, task.input_layer: {"bias": layer["bias"]}}
    hold = (lambda tree: tree) if is_exact else jax.lax.stop_gradient
    gram_matrix = inputs @ hold(inputs).T
    initial_product = inputs @ hold(kernel)
    weights = jnp.full(len(inputs), 1 / len(inputs), inputs.dtype)

    def sum_losses(state: tuple[Array, Tree]) -> Array:
        product, others = state
        apply_params = partial(task.apply_params, input_product=product)
        samples = synthetic.inputs, synthetic.label_logits, weights
        return task._replace(apply_params=apply_params).sum_losses(others, samples, None)

    def step(carry: tuple[Tree, Tree], _: None) -> tuple[tuple, None]:
        state, buffer = carry
        coefficients, others = hold(state)
        product = initial_product + gram_matrix @ coefficients
        direction = jax.grad(sum_losses)((product, others))
        if momentum:
            buffer = direction = jax.tree.map(lambda b, g: momentum * b + g, buffer, direction)
        state = jax.tree.map(lambda p, d: p - synthetic.step_size * d, state, direction)
        return (state, buffer), None

    state = jnp.zeros_like(initial_product), others
    buffer = jax.tree.map(jnp.zeros_like, state) if momentum else None
    coefficients, others = jax.lax.scan(step, (state, buffer), None, num_steps)[0][0]
    kernel = kernel + inputs.T @ coefficients
    layer = {**others[task.input_layer], "kernel": kernel}
    return ravel_pytree({**others, task.input_layer: layer})[0]


def mixed_mode(
    loss_sum: Callable[[Array, Tree], Array],
    select_samples: Callable[[Tree, Tree], Tree],
    *,
    micro_batch: int | None = None,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Callable[[Array, Tree, Tree], Array]:
    """Build a step's gradient, grad_w sum_i loss(w, x_i), for forward-over-reverse differentiation.

    Cost of the derivative: the memory of two gradients and the work of about three; a step stores
    only its arguments.

    Args:
      loss_sum: `(vector [P], samples) -> []`, the sum of the samples' losses. Each sample's loss
        depends on itself and the weights alone, and a sample of zeros must have loss 0.
      select_samples: `(source, step) -> samples`, a tree of floats with the samples as the leading
        axis; only the local samples if devices share the step. The samples are differentiable in
        `source`. `step`, such as the step's index and key, is not differentiable.
      micro_batch: samples at a time, on a CPU; None: all. Must be None for a `loss_sum` that mixes
        samples (batch norm), which is not a sum over them.
      server_parallelism: devices that share the samples; each has all arguments. One collective per
        gradient and one per derivative. Must be a single device for a `loss_sum` that mixes
        samples.

    Returns:
      `(vector, source, step) -> gradient [P]`, differentiable in `vector` and `source`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation.unrolling import mixed_mode
      >>> gradient = mixed_mode(lambda w, x: (w * x**2).sum(), lambda source, step: source * step)
      >>> print(jax.grad(lambda x: gradient(jnp.ones(2), x, 1.0).sum())(jnp.ones(2)))
      [2. 2.]
    """

    @jax.custom_vjp
    def gradient(vector: Array, source: Tree, step: Tree) -> Array:
        def sum_gradients(samples: Tree) -> tuple[Array, tuple[()]]:
            return jax.grad(loss_sum)(vector, samples), ()

        local_gradient = accumulate_micro_batches(
            sum_gradients, select_samples(source, step), micro_batch=micro_batch, pad_last=True
        )[0]
        return server_parallelism.sum_over_devices(local_gradient)

    def forward(vector: Array, source: Tree, step: Tree) -> tuple[Array, tuple]:
        return gradient(vector, source, step), (vector, source, step)

    def backward(residuals: tuple, cotangent: Array) -> tuple[Array, Tree, None]:
        vector, source, step = residuals

        def directional_derivative(samples: Tree) -> tuple[Array, Tree]:
            def joint_gradient(vector):
                return jax.grad(loss_sum, argnums=(0, 1))(vector, samples)

            return jax.jvp(joint_gradient, (vector,), (cotangent,))[1]

        samples, pull_back = jax.vjp(lambda source: select_samples(source, step), source)
        vector_cotangent, sample_cotangents = accumulate_micro_batches(
            directional_derivative, samples, micro_batch=micro_batch, pad_last=True
        )
        local_cotangents = vector_cotangent, *pull_back(sample_cotangents)
        return *server_parallelism.sum_over_devices(local_cotangents), None

    gradient.defvjp(forward, backward)
    return gradient


def matching_loss(
    end: Array, start: Array, target: Array, *, distance: str = "normalized_l2"
) -> Array:
    """Compute the distance between the end of training on synthetic data and the target.

    Args:
      end: parameters after training on synthetic data, `[P]`.
      start: parameters before, `[P]`.
      target: parameters after training on real data, `[P]`.
      distance: "normalized_l2": `||end - target||^2 / ||start - target||^2`, which is 1 for a
        network that did not move and 0 at the target. The denominator uses the (averaged) target,
        as in the code. "cosine": 1 minus the cosine between `end` and `target`, the metric of
        DynaFed's Fig. 6.

    Returns:
      The loss, `[]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.condensation import matching_loss
      >>> float(matching_loss(jnp.float32([1, 0]), jnp.float32([0, 0]), jnp.float32([2, 0])))
      0.25
    """
    if distance == "normalized_l2":
        return jnp.square(end - target).sum() / jnp.square(start - target).sum()
    # One root per norm: the product of the squares would overflow float32 earlier.
    norms = jnp.sqrt(jnp.square(end).sum()) * jnp.sqrt(jnp.square(target).sum())
    return 1 - (end * target).sum() / norms

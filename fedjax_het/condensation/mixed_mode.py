"""Mixed-mode differentiation: the derivative of a training step's gradient, forward over reverse.

A step of training evaluates g(w, X) = grad_w sum_i loss(w, x_i). To differentiate what follows the
step, its backward pass needs the products u . dg/dw and u . dg/dX for a cotangent u of g. The order
of second derivatives is arbitrary, so both products are parts of *one directional derivative*: that
of the gradient with respect to (w, X), along u in w. This is `jax.jvp` of `jax.grad`. Compared with
reverse over reverse (`jax.grad` through `jax.grad`, see `reverse_mode`) it

* needs only w of the step: no activation is stored for the backward pass;
* is a sum over samples, which micro-batches in a CPU core's cache, or several devices, can compute;
* is a smaller program, which compiles in seconds instead of minutes.

It costs two gradients on dual numbers (the matrix products of about three gradients). The rule
applies to the step alone. Functions of it, such as training by `lax.scan`, are differentiated by
`jax.grad` as usual and can be vmapped.

Source: mixed-mode differentiation of bilevel programs, Kemaev et al., "Scalable Meta-Learning via
Mixed-Mode Differentiation" (MixFlow-MG, 2025); the product itself is from Pearlmutter (1994).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import Array

from fedjax_het.core.server_parallelism import SINGLE_DEVICE, ServerParallelism
from fedjax_het.nn.batch_axis import BatchAxis
from fedjax_het.nn.micro_batch import accumulate_micro_batches

Tree = Any


class LossSum(Protocol):
    """The loss of a training step, summed over samples."""

    def __call__(self, vector: Array, samples: Tree, /) -> Array:
        """Return the sum of the samples' losses, `[]`.

        A sample of zeros must have loss 0.

        Args:
          vector: weights of the network, `[P]`.
          samples: tree of arrays with the samples as the leading axis; each sample's loss depends
            on itself and the weights alone.
        """


class SelectSamples(Protocol):
    """The selection of a training step's samples."""

    def __call__(self, source: Tree, step: Tree, batch_axis: BatchAxis | None, /) -> Tree:
        """Return the samples of a step, a tree of floats.

        Args:
          source: data that the samples are made of; the samples are differentiable in it.
          step: arguments of the selection, such as the step's index and key; not differentiable.
          batch_axis: the devices that share the step; only the local samples are returned. None for
            a step of one device.
        """


class Gradient(Protocol):
    """The gradient of a step, grad_w sum_i loss(w, x_i).

    It is differentiable in its first two arguments.
    """

    def __call__(self, vector: Array, source: Tree, step: Tree, /) -> Array:
        """Return the gradient, `[P]`.

        Args:
          vector: weights of the network, `[P]`.
          source: see `SelectSamples`.
          step: see `SelectSamples`.
        """


class DifferentiationMode(Protocol):
    """A way to differentiate a step's gradient.

    Either `reverse_mode`, or `mixed_mode` with its keyword arguments bound.
    """

    def __call__(self, loss_sum: LossSum, select_samples: SelectSamples, /) -> Gradient:
        """Return the differentiable gradient of a step."""


def reverse_mode(loss_sum: LossSum, select_samples: SelectSamples) -> Gradient:
    """Build a step's gradient with reverse-over-reverse differentiation, `jax.grad` of `jax.grad`.

    This is the reference of `mixed_mode`. The backward pass recomputes the step instead of storing
    its activations.

    Args:
      loss_sum: the step's loss.
      select_samples: the step's samples.

    Returns:
      The gradient.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import reverse_mode
      >>> loss_sum = lambda w, x: (w * x**2).sum()
      >>> select_samples = lambda source, step, batch_axis: source * step
      >>> gradient = reverse_mode(loss_sum, select_samples)
      >>> print(jax.grad(lambda x: gradient(jnp.ones(2), x, 1.0).sum())(jnp.ones(2)))
      [2. 2.]
    """

    def gradient(vector: Array, source: Tree, step: Tree) -> Array:
        return jax.grad(loss_sum)(vector, select_samples(source, step, None))

    return jax.checkpoint(gradient, prevent_cse=False)


def mixed_mode(
    loss_sum: LossSum,
    select_samples: SelectSamples,
    *,
    micro_batch: int | None = None,
    server_parallelism: ServerParallelism = SINGLE_DEVICE,
) -> Gradient:
    """Build a step's gradient with forward-over-reverse differentiation.

    Values are the same as with `reverse_mode`. Cost of the derivative: the memory of two gradients
    and the work of about three; a step stores only its arguments.

    Args:
      loss_sum: the step's loss.
      select_samples: the step's samples.
      micro_batch: samples at a time, on a CPU; None: all. Must be None for a `loss_sum` that mixes
        samples (batch norm), which is not a sum over them.
      server_parallelism: devices that share the samples; each has all arguments. One collective per
        gradient and one per derivative. Must be a single device for a `loss_sum` that mixes
        samples.

    Returns:
      The gradient.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation import mixed_mode
      >>> loss_sum = lambda w, x: (w * x**2).sum()
      >>> select_samples = lambda source, step, batch_axis: source * step
      >>> gradient = mixed_mode(loss_sum, select_samples)
      >>> print(jax.grad(lambda x: gradient(jnp.ones(2), x, 1.0).sum())(jnp.ones(2)))
      [2. 2.]
    """

    batch_axis = server_parallelism.batch_axis

    @jax.custom_vjp
    def gradient(vector: Array, source: Tree, step: Tree) -> Array:
        def sum_gradients(samples: Tree) -> tuple[Array, tuple[()]]:
            return jax.grad(loss_sum)(vector, samples), ()

        samples = select_samples(source, step, batch_axis)
        local_gradient = accumulate_micro_batches(
            sum_gradients, samples, micro_batch=micro_batch, pad_last=True
        )[0]
        return server_parallelism.sum_over_devices(local_gradient)

    def forward(vector: Array, source: Tree, step: Tree) -> tuple[Array, tuple]:
        return gradient(vector, source, step), (vector, source, step)

    def backward(residuals: tuple, cotangent: Array) -> tuple[Array, Tree, None]:
        vector, source, step = residuals

        def directional_derivative(samples: Tree) -> tuple[Array, Tree]:
            joint_gradient = jax.grad(loss_sum, argnums=(0, 1))
            return jax.jvp(lambda vector: joint_gradient(vector, samples), (vector,), (cotangent,))[
                1
            ]

        samples, pull_back_to_source = jax.vjp(
            lambda source: select_samples(source, step, batch_axis), source
        )
        vector_and_sample_cotangents = accumulate_micro_batches(
            directional_derivative, samples, micro_batch=micro_batch, pad_last=True
        )
        vector_cotangent, sample_cotangents = vector_and_sample_cotangents
        local_cotangents = vector_cotangent, *pull_back_to_source(sample_cotangents)
        return *server_parallelism.sum_over_devices(local_cotangents), None

    gradient.defvjp(forward, backward)
    return gradient


class SGDState(NamedTuple):
    """State of SGD.

    Attributes:
      vector: weights, `[P]`.
      velocity: velocity of momentum, `[P]`; None without momentum.
    """

    vector: Array
    velocity: Array | None


def run_sgd(
    start: Array,
    gradient_fn: Callable[[Array, Array], Array],
    step_size: Array,
    *,
    num_steps: int,
    momentum: float = 0.0,
) -> Array:
    """Train by SGD: v <- momentum v + g, w <- w - step_size v, as PyTorch does.

    Args:
      start: weights at the start, `[P]`.
      gradient_fn: `(vector, step_index) -> gradient [P]`.
      step_size: learning rate, `[]`.
      num_steps: number of steps.
      momentum: momentum; 0 is plain SGD.

    Returns:
      Weights at the end, `[P]`.
    """

    def step(sgd_state: SGDState, step_index: Array) -> tuple[SGDState, None]:
        gradient = velocity = gradient_fn(sgd_state.vector, step_index)
        if sgd_state.velocity is not None:
            velocity = momentum * sgd_state.velocity + gradient
        next_velocity = None if sgd_state.velocity is None else velocity
        return SGDState(sgd_state.vector - step_size * velocity, next_velocity), None

    velocity = jnp.zeros_like(start) if momentum else None
    return jax.lax.scan(step, SGDState(start, velocity), jnp.arange(num_steps))[0].vector

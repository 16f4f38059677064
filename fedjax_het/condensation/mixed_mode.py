"""Mixed-mode differentiation: the gradient of a training step's gradient, forward over reverse.

A step of training reads g(w, X) = grad_w sum_i loss(w, x_i). To differentiate what follows the
step, its backward pass needs, for a cotangent u of g, the products u . dg/dw and u . dg/dX. Since
second derivatives may be taken in either order, both are parts of *one directional derivative*:
that of the gradient with respect to (w, X), along u in w, which is `jax.jvp` of `jax.grad`. Beside
reverse over reverse (`jax.grad` through `jax.grad`, see `reverse_mode`) it

* needs nothing of the step but w: no activation is kept, and none is stored to be read backwards;
* is a sum over samples, which can be taken a few samples at a time, in a core's cache, or by
  several devices;
* is a smaller program, compiled in seconds where the other takes minutes.

It costs two gradients that carry a second number beside each (about three gradients' products of
matrices). The step alone has a rule of its own: whatever is made of it, such as a training by
`lax.scan`, is differentiated by `jax.grad` as usual, and may be mapped.

Source: mixed-mode differentiation of bilevel programs, Kemaev et al., "Scalable Meta-Learning via
Mixed-Mode Differentiation" (MixFlow-MG, 2025); the product itself is Pearlmutter's (1994).
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
    """What a step descends."""

    def __call__(self, vector: Array, samples: Tree, /) -> Array:
        """A number: the sum over samples, the leading axis of the leaves of `samples`, of what
        each of them alone costs a network of weights `vector` `[P]`. A sample of zeros costs 0."""


class SelectSamples(Protocol):
    """What a step learns from."""

    def __call__(self, source: Tree, step: Tree, batch_axis: BatchAxis | None, /) -> Tree:
        """-> samples, floats: differentiable in `source`, not in `step`, which says which and how
        (a number, a key). Where devices share a step (`batch_axis`), this device's part."""


class Gradient(Protocol):
    """`grad_w sum_i loss(w, x_i)` of a step, differentiable in its first two arguments."""

    def __call__(self, vector: Array, source: Tree, step: Tree, /) -> Array: ...


class DifferentiationMode(Protocol):
    """How to differentiate through a step's gradient: `reverse_mode`, or `mixed_mode` with more
    arguments bound."""

    def __call__(self, loss_sum: LossSum, select_samples: SelectSamples, /) -> Gradient: ...


def reverse_mode(loss_sum: LossSum, select_samples: SelectSamples) -> Gradient:
    """Reverse over reverse, as `jax.grad` of `jax.grad` has it: the reference of `mixed_mode`.

    What the backward pass needs of a step is computed again, not kept.
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
    """The same gradient, whose derivative is taken forward over reverse.

    Args:
      micro_batch: so many samples at a time, on a CPU; None: all. A `loss_sum` that mixes samples
        (batch norm) is no sum over them: it takes all, alone.
      sharing: the devices that share the samples, each of which has all arguments; one collective
        a gradient, and one a derivative.
    Cost: the derivative, twice the gradient's memory and about three times its work, no memory of
      a step but its arguments.
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
    """Where training stands: weights `[P]`, and the momentum's velocity `[P]` (None without)."""

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
    """Weights after `num_steps` steps of SGD from `start`, by `gradient_of(vector, step)`.

    momentum: v <- momentum v + g, w <- w - step_size v, as PyTorch's; 0 is plain SGD.
    """

    def step(sgd_state: SGDState, step_index: Array) -> tuple[SGDState, None]:
        gradient = velocity = gradient_fn(sgd_state.vector, step_index)
        if sgd_state.velocity is not None:
            velocity = momentum * sgd_state.velocity + gradient
        next_velocity = None if sgd_state.velocity is None else velocity
        return SGDState(sgd_state.vector - step_size * velocity, next_velocity), None

    velocity = jnp.zeros_like(start) if momentum else None
    return jax.lax.scan(step, SGDState(start, velocity), jnp.arange(num_steps))[0].vector

"""By what the three products of a convolution are computed.

On GPUs it is the native convolution of one kernel, and products of matrices of several (lanes):
mapped over kernels, a native one is a grouped one, which libraries are slow at. A TPU's compiler
knows such ones, and pads the channels of patches to its registers' width, which takes half as much
memory again, so there it is the native one. On CPUs the native one takes half the time of products
of matrices, whose patches have to be written and read, but for few channels, for windows of one
pixel or that skip some, and where its padding is in vain; it has float32 alone. (Measured with 4 to
64 samples of 28 x 28 to 8 x 8 pixels, windows of 3 x 3 and 5 x 5 and 1 to 128 channels.)
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Literal, NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from fedjax_het.nn import conv_im2col, conv_native

ConvImpl = Literal["auto", "native", "im2col", "unrolled"]
AUTO, NATIVE, IM2COL, UNROLLED = CONV_IMPLS = get_args(ConvImpl)
_AUTO: ContextVar[str] = ContextVar("conv_impl", default=AUTO)

MOST_IN_VAIN = 1.4  # pixels of an input gradient for each of its outputs: the rest is padding

Sides = tuple[int, int]  # height, width


class Convolution(NamedTuple):
    """What is static about one."""

    size: Sides  # of the input
    window: Sides
    padding: int
    stride: int
    impl: str
    precision: str | None = None  # of its products, as jax names them; None: the backend's own

    @property
    def output_size(self) -> Sides:
        height, width = (
            (pixels + 2 * self.padding - reach) // self.stride + 1
            for pixels, reach in zip(self.size, self.window, strict=True)
        )
        return height, width


@contextlib.contextmanager
def automatic(impl: str) -> Iterator[None]:
    """What is traced inside takes `impl` for "auto"."""
    token = _AUTO.set(impl)
    try:
        yield
    finally:
        _AUTO.reset(token)


def what_is_automatic() -> str:
    return _AUTO.get()


def with_lanes(of: Convolution, lanes: int, platform: str) -> Convolution:
    """The same with what is automatic chosen for so many kernels side by side; on a CPU each
    product chooses for itself."""
    if of.impl != AUTO or platform == "cpu":
        return of
    return of._replace(impl=NATIVE if lanes == 1 or platform == "tpu" else IM2COL)


def output(of: Convolution, x: Array, kernel: Array, *, cpu: bool) -> Array:
    """-> [B, H', W', O] of x [B, H, W, I] and kernel [kh, kw, I, O]."""
    channels, features = kernel.shape[2:]
    enough = features >= 32 or channels * features >= 128
    if not _is_native(of, x, cpu=cpu, faster=enough):
        return conv_im2col.output(x, kernel, padding=of.padding, stride=of.stride)
    native = conv_native.output_on_cpu if cpu else conv_native.output
    return native(x, kernel, padding=of.padding, stride=of.stride)


def kernel_gradient(of: Convolution, x: Array, outputs: Array, *, cpu: bool) -> Array:
    """-> [kh, kw, I, O], of x and of a cotangent of the outputs [B, H', W', O]."""
    each_pixel = of.stride == 1
    if not _is_native(of, x, cpu=cpu, faster=each_pixel):
        return conv_im2col.kernel_gradient(
            x, outputs, window=of.window, padding=of.padding, stride=of.stride, cpu=cpu
        )
    if cpu and each_pixel:
        return conv_native.kernel_gradient_on_cpu(x, outputs, padding=of.padding)
    return conv_native.kernel_gradient(
        x, outputs, window=of.window, padding=of.padding, stride=of.stride
    )


def input_gradient(of: Convolution, outputs: Array, kernel: Array, *, cpu: bool) -> Array:
    """-> [B, H, W, I] of a cotangent of the outputs and of the kernel."""
    channels, features = kernel.shape[2:]
    same_form = of.stride == 1 and of.padding < min(of.window)
    few_in_vain = math.prod(of.size) <= MOST_IN_VAIN * math.prod(of.output_size)
    faster = same_form and few_in_vain and channels > 1 and channels * features >= 96
    if not _is_native(of, outputs, cpu=cpu, faster=faster):
        return conv_im2col.input_gradient(
            outputs, kernel, size=of.size, padding=of.padding, stride=of.stride, cpu=cpu
        )
    if cpu and same_form:
        return conv_native.input_gradient_on_cpu(outputs, kernel, padding=of.padding)
    return conv_native.input_gradient(
        outputs, kernel, size=of.size, padding=of.padding, stride=of.stride
    )


def _is_native(of: Convolution, numbers: Array, *, cpu: bool, faster: bool) -> bool:
    if of.impl != AUTO or not cpu:
        return of.impl != IM2COL
    return faster and max(of.window) > 1 and numbers.dtype == jnp.float32

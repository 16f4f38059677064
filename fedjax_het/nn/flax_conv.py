"""flax's own convolution layers, computed by `conv2d`, whose derivatives are fast on a CPU too."""

import contextlib
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax

from fedjax_het.nn.conv import conv2d


def is_supported_conv(module: nn.Module) -> bool:
    """Whether a layer is an `nn.Conv` of two dimensions with one group, no dilation, equal strides
    and nothing else about it that `conv2d` does not do."""
    return (
        isinstance(module, nn.Conv)
        and not isinstance(module.kernel_size, int)
        and len(module.kernel_size) == 2
        and module.feature_group_count == 1
        and {*_to_pair(module.input_dilation), *_to_pair(module.kernel_dilation)} == {1}
        and len(set(_to_pair(module.strides))) == 1
        and module.precision is None
        and module.conv_general_dilated is None
        and module.conv_general_dilated_cls is None
    )


@contextlib.contextmanager
def override_convolution(module: nn.Conv) -> Iterator[None]:
    """Inside, a call of `module` takes `conv2d`, by flax's own field for another convolution."""

    def convolve(x, kernel, strides, padding, **kwargs: Any) -> jax.Array:
        if isinstance(padding, str):
            padding = jax.lax.padtype_to_pads(x.shape[1:3], kernel.shape[:2], strides, padding)
        pad_widths = {width for side in padding for width in side}
        if len(pad_widths) > 1 or min(pad_widths) < 0:
            zero = jax.numpy.zeros((), x.dtype)
            x = jax.lax.pad(x, zero, [(0, 0, 0), *((*side, 0) for side in padding), (0, 0, 0)])
            pad_widths = {0}
        return conv2d(x, kernel, pad_widths.pop(), stride=strides[0])

    # A module's fields are frozen for users; the call that reads this one is between these lines.
    object.__setattr__(module, "conv_general_dilated", convolve)
    try:
        yield
    finally:
        object.__setattr__(module, "conv_general_dilated", None)


def _to_pair(value: Any) -> tuple[int, ...]:
    """A setting of both axes as flax reads it: None is 1."""
    if value is None:
        return (1, 1)
    return (value, value) if isinstance(value, int) else tuple(value)

"""Features of images in a fixed random network, for distances of distributions of images."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.core.example_transform import ExampleTransform
from fedjax_het.core.miscompile_guard import VerifiedJit

NUM_FEATURES = 32
"""Number of features of an image: the mean of 8 channels in each cell of a grid of 2 x 2 cells."""
_SEED = 0
_WIDTHS = (16, 8)
_GRID = 2
_MAX_BATCH_SIZE, _MAX_BATCH_PIXELS = 256, 2**21


def compute_random_features(images: jax.Array) -> jax.Array:
    """Compute features of images in a random convolution network whose weights are constants.

    The network has two layers of 3 x 3 convolutions with 16 and 8 channels, without biases, padded
    with zeros. The absolute value follows each, as in scattering networks (Bruna and Mallat, PAMI
    2013), because a ReLU would leave some random channels at 0 for all images. An average of 2 x 2
    pixels follows the first layer. A feature is the mean of a channel in one of 2 x 2 cells of the
    image. Weights are drawn once from a normal
    distribution with variance 2 / (9 C) for C input channels (He et al., ICCV 2015). They depend on
    the number of channels only.

    Args:
      images: float32 `[B, H, W, C]` with values in [0, 1], of any size.

    Returns:
      Features, float32 `[B, 32]`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.core.feature_network import compute_random_features
      >>> compute_random_features(jnp.ones((5, 8, 8, 3))).shape
      (5, 32)
    """
    first, second = make_random_filters(images.shape[-1])
    hidden = _convolve(images, first)
    hidden = nn.avg_pool(hidden, (2, 2), (2, 2), padding="SAME", count_include_pad=False)
    hidden = _convolve(hidden, second)
    rows, columns = (jnp.asarray(_make_cells(size)) for size in hidden.shape[1:3])
    features = jnp.einsum("ih,jw,bhwc->bijc", rows, columns, hidden, precision="highest")
    return features.reshape(len(images), NUM_FEATURES)


def make_random_filters(num_channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the filters of both layers.

    Args:
      num_channels: number of channels of an image, C.

    Returns:
      Filters, float32 `[3, 3, C, 16]` and `[3, 3, 16, 8]`.
    """
    rng = np.random.default_rng(_SEED)
    filters, num_inputs = [], num_channels
    for width in _WIDTHS:
        shape = (3, 3, num_inputs, width)
        draws = rng.standard_normal(shape) * np.sqrt(2 / (9 * num_inputs))
        filters.append(draws.astype(np.float32))
        num_inputs = width
    return filters[0], filters[1]


def _convolve(images: jax.Array, filters: np.ndarray) -> jax.Array:
    convolved = jax.lax.conv_general_dilated(
        images,
        jnp.asarray(filters),
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        precision=jax.lax.Precision.HIGHEST,
    )
    return jnp.abs(convolved)


def _make_cells(size: int) -> np.ndarray:
    """Return the weights of the pixels in each cell of an axis, `[2, size]`.

    Cell i has the pixels from floor(i size / 2) to ceil((i + 1) size / 2), which overlap if the
    size is odd.
    """
    edges = np.arange(_GRID + 1) * size / _GRID
    pixels = np.arange(size)
    is_inside = (pixels >= np.floor(edges[:-1, None])) & (pixels < np.ceil(edges[1:, None]))
    return (is_inside / is_inside.sum(1, keepdims=True)).astype(np.float32)


def compute_client_features(
    images: np.ndarray, transform: ExampleTransform, positions: np.ndarray, clients: np.ndarray
) -> np.ndarray:
    """Compute the features of examples as their clients see them.

    Cost: one pass over the examples, 0.3 million multiplications for an image of 28 x 28 pixels.

    Args:
      images: images of the data set on the host, as stored, `[N, H, W, C]`.
      transform: feature skews of the clients.
      positions: positions of the M examples, integers `[M]`.
      clients: client of each example, integers `[M]`.

    Returns:
      Features on the host, float32 `[M, 32]`.
    """
    height, width = images.shape[1:3]
    batch_size = max(1, min(_MAX_BATCH_SIZE, _MAX_BATCH_PIXELS // (height * width)))
    program, variant = _build_program(), f"{images.shape[1:]} {transform.skews}"
    transform = jax.device_put(dataclasses.replace(transform, owners=None))
    features = np.zeros((len(positions), NUM_FEATURES), np.float32)
    for start in range(0, len(positions), batch_size):
        # The last batch repeats examples, so that all batches have one shape.
        batch = np.arange(start, start + batch_size) % len(positions)
        ids = positions[batch].astype(np.int32)
        arguments = (images[ids], ids, clients[batch].astype(np.int32), transform)
        program.verify(arguments, variant)
        stop = min(start + batch_size, len(positions))
        features[start:stop] = np.asarray(program(*arguments))[: stop - start]
    return features


@functools.cache
def _build_program() -> VerifiedJit:
    def compute(images, positions, clients, transform):
        images = transform.apply_by_client(images, positions, clients)
        return compute_random_features(images)

    return VerifiedJit(compute, name="features of examples")

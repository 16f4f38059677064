"""Differentiable siamese augmentation (DSA): random image changes with gradients to the pixels.

There are six families: `color` (brightness, saturation and contrast together), `crop`, `cutout`,
`flip`, `scale` and `rotate`. Each is a function `(key, images [B, H, W, C], draw) -> images` in
`FAMILIES`. `draw(key, low, high)` returns one parameter per image, `[B]`: a float in [low, high),
or, for integer bounds, a whole number in [low, high]. `augment` supplies a random `draw`.

Source: Zhao and Bilen, "Dataset Condensation with Differentiable Siamese Augmentation" (ICML
2021), with the ranges of its public code, which MTT and DynaFed use unchanged.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedjax_het.nn.batch_axis import BatchAxis, get_num_shards, take_local_rows
from fedjax_het.utils.errors import require

Draw = Callable[..., Array]

DSA_STRATEGY = "color_crop_cutout_flip_scale_rotate"  # all six families, as in MTT and DynaFed

# Ranges of the public code. Brightness shifts are in units of the images: for normalized images, in
# standard deviations.
MAX_BRIGHTNESS_SHIFT = 0.5
MAX_SATURATION = 2.0
CONTRAST_RANGE = (0.5, 1.5)
CROP_FRACTION = 0.125  # of each side: 4 pixels of 28 and of 32
CUTOUT_FRACTION = 0.5
MAX_SCALE = 1.2
MAX_ROTATION_DEGREES = 15.0


def augment(
    key: Array,
    images: Array,
    *,
    strategy: str,
    siamese: bool = False,
    batch_axis: BatchAxis | None = None,
) -> Array:
    """Change images by one family, drawn uniformly per call (DSA's mode 'S', which DynaFed uses).

    Cost: only the drawn family runs on a CPU, unless the key is vmapped. On an accelerator all
    families run, since reading the drawn index on the host would stall the device.

    Args:
      key: the only source of randomness; the same key draws the same parameters.
      images: `[B, H, W, C]` floats, C = 1 or 3, any H and W.
      strategy: family names joined by underscores, such as "color_crop_cutout_flip_scale_rotate";
        "none" or "" changes nothing.
      siamese: whether all samples share the same parameters, which then depend on the key alone and
        not on B. A real and a synthetic batch with the same key then see the same transformation.
        Otherwise each sample has its own parameters, also if devices share the batch.
      batch_axis: the devices that share the batch, of which `images` are the local part; None for a
        whole batch.

    Returns:
      Images of the same shape and dtype.

    Raises:
      ConfigError: if a family is unknown or repeated.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fedjax_het.condensation.augment import augment
      >>> augment(jax.random.key(0), jnp.ones((4, 8, 8, 1)), strategy="flip_crop").shape
      (4, 8, 8, 1)
    """
    names = parse_strategy(strategy)
    if not names:
        return images
    # In siamese mode the whole batch shares one draw of parameters.
    num_draws = 1 if siamese else get_num_shards(batch_axis) * images.shape[0]

    def draw(key: Array, low: int | float, high: int | float) -> Array:
        if isinstance(low, int):
            values = jax.random.randint(key, (num_draws,), low, high + 1)
        else:
            values = jax.random.uniform(key, (num_draws,), images.dtype, low, high)
        if num_draws > 1:
            values = take_local_rows(values, batch_axis)
        return jnp.broadcast_to(values, images.shape[:1])

    transforms = [partial(FAMILIES[name], draw=draw) for name in names]
    family_key, parameter_key = jax.random.split(key)
    family_index = jax.random.randint(family_key, (), 0, len(names))

    def switch(family_index: Array, key: Array, images: Array) -> Array:
        return lax.switch(family_index, transforms, key, images)

    def select(family_index: Array, key: Array, images: Array) -> Array:
        return lax.select_n(family_index, *(transform(key, images) for transform in transforms))

    args = (family_index, parameter_key, images)
    return lax.platform_dependent(*args, cpu=switch, default=select)


def parse_strategy(strategy: str, argument: str = "strategy") -> tuple[str, ...]:
    """Split a strategy into the names of its families.

    Args:
      strategy: see `augment`.
      argument: name of the argument in the message.

    Returns:
      The names, in order.

    Raises:
      ConfigError: if a family is unknown or repeated.
    """
    if strategy in ("", "none"):
        return ()
    names = tuple(strategy.split("_"))
    is_valid = set(names) <= set(FAMILIES) and len(set(names)) == len(names)
    expected = f"'none' or distinct names out of {', '.join(FAMILIES)}, joined by '_'"
    require(is_valid, argument, strategy, expected)
    return names


def resolve_strategy(strategy: str, input_shape: tuple[int, ...], argument: str) -> str:
    """Return the strategy for inputs of a shape; `DSA_STRATEGY` augments images only.

    Args:
      strategy: see `augment`.
      input_shape: shape of the input of one example.
      argument: name of the argument in the message.

    Returns:
      The strategy; "none" in place of `DSA_STRATEGY` for inputs that are not images `[H, W, C]`.

    Raises:
      ConfigError: if another strategy has a family and the inputs are no images.

    Example:
      >>> from fedjax_het.condensation.augment import DSA_STRATEGY, resolve_strategy
      >>> resolve_strategy(DSA_STRATEGY, (30,), "augment_strategy")
      'none'
    """
    if len(input_shape) == 3:
        return strategy
    is_valid = strategy == DSA_STRATEGY or not parse_strategy(strategy, argument)
    expected = f"'none', as inputs of shape {tuple(input_shape)} are no images [H, W, C]"
    require(is_valid, argument, strategy, expected)
    return "none"


def _color(key: Array, images: Array, draw: Draw) -> Array:
    """Shift the brightness, then scale saturation and contrast.

    Saturation scales each pixel's distance from its mean over channels; images of one channel do
    not change. Contrast scales the distance of each value from the mean of its image.
    """
    shift_key, saturation_key, contrast_key = jax.random.split(key, 3)
    images = images + _per_sample(draw(shift_key, -MAX_BRIGHTNESS_SHIFT, MAX_BRIGHTNESS_SHIFT))
    gray = images.mean(axis=3, keepdims=True)
    images = (images - gray) * _per_sample(draw(saturation_key, 0.0, MAX_SATURATION)) + gray
    mean = images.mean(axis=(1, 2, 3), keepdims=True)
    return (images - mean) * _per_sample(draw(contrast_key, *CONTRAST_RANGE)) + mean


def _crop(key: Array, images: Array, draw: Draw) -> Array:
    """Shift images by whole pixels, with zeros outside.

    `out[b, i, j] = images[b, i + row_shift[b], j + column_shift[b]]`
    """

    def draw_coordinates(key: Array, side: int) -> Array:
        max_shift = int(side * CROP_FRACTION + 0.5)
        return jnp.arange(side) + draw(key, -max_shift, max_shift)[:, None]

    keys = jax.random.split(key)
    return _resample_separably(images, *map(draw_coordinates, keys, images.shape[1:3]))


def _cutout(key: Array, images: Array, draw: Draw) -> Array:
    """Set a rectangle of each image to zero.

    It covers `size` rows from `center - size // 2` on, clipped at the border. The columns follow
    the same rule.
    """

    def draw_inside(key: Array, side: int) -> Array:
        size = int(side * CUTOUT_FRACTION + 0.5)
        # The center of a rectangle of even size lies between two pixels, which adds one position.
        start = draw(key, 0, side - size % 2)[:, None] - size // 2
        return (jnp.arange(side) >= start) & (jnp.arange(side) < start + size)

    row_key, column_key = jax.random.split(key)
    in_rows, in_columns = map(draw_inside, (row_key, column_key), images.shape[1:3])
    return jnp.where((in_rows[:, :, None] & in_columns[:, None])[..., None], 0.0, images)


def _flip(key: Array, images: Array, draw: Draw) -> Array:
    """Mirror images left to right where the draw is 1."""
    return jnp.where(_per_sample(draw(key, 0, 1) == 1), images[:, :, ::-1], images)


def _scale(key: Array, images: Array, draw: Draw) -> Array:
    """Sample bilinearly at a factor times the distance from the center, with zeros outside.

    A factor above 1 shrinks the picture. The centers of the corner pixels define the coordinates
    (`align_corners` in PyTorch's terms).
    """

    def draw_coordinates(key: Array, side: int) -> Array:
        factor = draw(key, 1 / MAX_SCALE, MAX_SCALE)
        return _centered_coordinates(side) * factor[:, None] + (side - 1) / 2

    keys = jax.random.split(key)
    return _resample_separably(images, *map(draw_coordinates, keys, images.shape[1:3]))


def _rotate(key: Array, images: Array, draw: Draw) -> Array:
    """Rotate counter-clockwise, bilinearly, with zeros outside.

    The rotation is in pixel coordinates. The public code rotates normalized coordinates, which is
    the same for square images and shears others.

    Cost: four gathers per pixel. A rotation does not factorize into rows and columns; dense
    interpolation matrices measured 10 to 70 times slower on a CPU.
    """
    limit = MAX_ROTATION_DEGREES * jnp.pi / 180
    angles = draw(key, -limit, limit)[:, None, None]
    batch, height, width, channels = images.shape
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    y, x = _centered_coordinates(height)[:, None], _centered_coordinates(width)
    # A border of zeros (one pixel before, two after) puts all four neighbors of every clipped
    # coordinate inside the array.
    row = jnp.clip(sin * x + cos * y + (height - 1) / 2, -1, height)
    column = jnp.clip(cos * x - sin * y + (width - 1) / 2, -1, width)
    top, left = jnp.floor(row), jnp.floor(column)
    row_fraction, column_fraction = (row - top)[..., None], (column - left)[..., None]
    padded_width = width + 3
    padded = jnp.pad(images, ((0, 0), (1, 2), (1, 2), (0, 0))).reshape(-1, channels)
    sample_offset = (jnp.arange(batch) * (height + 3) * padded_width)[:, None, None]
    corner = sample_offset + (top.astype(int) + 1) * padded_width + left.astype(int) + 1

    def pixel(offset: int) -> Array:
        return padded.at[corner + offset].get(mode="promise_in_bounds")

    above = (1 - column_fraction) * pixel(0) + column_fraction * pixel(1)
    below = (1 - column_fraction) * pixel(padded_width) + column_fraction * pixel(padded_width + 1)
    return ((1 - row_fraction) * above + row_fraction * below).astype(images.dtype)


FAMILIES: dict[str, Callable[..., Array]] = {
    "color": _color,
    "crop": _crop,
    "cutout": _cutout,
    "flip": _flip,
    "scale": _scale,
    "rotate": _rotate,
}


def _resample_separably(images: Array, rows: Array, columns: Array) -> Array:
    """Sample bilinearly at rows `[B, H']` x columns `[B, W']`, with zeros outside.

    Two batched products with interpolation matrices: the derivative has no scatter. The precision
    is the highest, since the matrices move pixels and a reduced precision would round the pixels.
    """

    def weights(coordinates: Array, side: int) -> Array:
        """Return weights of linear interpolation: 1 at distance 0, and 0 from distance 1 on."""
        distance = jnp.abs(coordinates[..., None] - jnp.arange(side))
        return jnp.maximum(0, 1 - distance).astype(images.dtype)

    _, height, width, _ = images.shape
    images = jnp.einsum("bik,bkjc->bijc", weights(rows, height), images, precision="highest")
    return jnp.einsum("bjl,bilc->bijc", weights(columns, width), images, precision="highest")


def _centered_coordinates(side: int) -> Array:
    """Return pixel coordinates relative to the center."""
    return jnp.arange(side) - (side - 1) / 2


def _per_sample(values: Array) -> Array:
    """Reshape parameters `[B]` to `[B, 1, 1, 1]`."""
    return values[:, None, None, None]

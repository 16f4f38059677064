"""Differentiable siamese augmentation (DSA): random image changes with gradients to the pixels.

There are six families: `color` (brightness, saturation and contrast together), `crop`, `cutout`,
`flip`, `scale` and `rotate`. Each is a pure function of images `[B, H, W, C]` and explicit
parameters, so tests can compare it with a closed form; `augment` draws the parameters.

Source: Zhao and Bilen, "Dataset Condensation with Differentiable Siamese Augmentation" (ICML
2021), with the ranges of its public code, which MTT and DynaFed use unchanged.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedjax_het.nn.batch_axis import BatchAxis, get_num_shards, take_local_rows
from fedjax_het.utils.errors import require

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


def brightness(images: Array, shift: Array) -> Array:
    """Add `shift` `[B]` to every pixel of a sample.

    Args:
      images: `[B, H, W, C]`.
      shift: `[B]`, in units of the images.

    Returns:
      Images of the same shape.
    """
    return images + _per_sample(shift)


def saturation(images: Array, factor: Array) -> Array:
    """Scale each pixel's distance from its mean over channels.

    Images of one channel do not change.

    Args:
      images: `[B, H, W, C]`.
      factor: `[B]`; 1 is the identity, 0 makes the image gray.

    Returns:
      Images of the same shape.
    """
    gray = images.mean(axis=3, keepdims=True)
    return (images - gray) * _per_sample(factor) + gray


def contrast(images: Array, factor: Array) -> Array:
    """Scale each value's distance from the mean of its image.

    Args:
      images: `[B, H, W, C]`.
      factor: `[B]`; 1 is the identity.

    Returns:
      Images of the same shape.
    """
    mean = images.mean(axis=(1, 2, 3), keepdims=True)
    return (images - mean) * _per_sample(factor) + mean


def crop(images: Array, row_shift: Array, column_shift: Array) -> Array:
    """Shift images, with zeros outside.

    `out[b, i, j] = images[b, i + row_shift[b], j + column_shift[b]]`

    Args:
      images: `[B, H, W, C]`.
      row_shift: `[B]`, whole pixels.
      column_shift: `[B]`, whole pixels.

    Returns:
      Images of the same shape.
    """
    _, height, width, _ = images.shape
    rows = jnp.arange(height) + row_shift[:, None]
    columns = jnp.arange(width) + column_shift[:, None]
    return _resample_separably(images, rows, columns)


def cutout(
    images: Array, center_row: Array, center_column: Array, *, size: tuple[int, int]
) -> Array:
    """Set a rectangle of each image to zero.

    It covers the rows from `center - size // 2` (inclusive) to `center - size // 2 + size`
    (exclusive), clipped at the border. The columns follow from `center_column` by the same rule.

    Args:
      images: `[B, H, W, C]`.
      center_row: `[B]`, whole pixels.
      center_column: `[B]`, whole pixels.
      size: height and width of the rectangle in pixels.

    Returns:
      Images of the same shape.
    """
    _, height, width, _ = images.shape
    top, left = center_row - size[0] // 2, center_column - size[1] // 2
    rows, columns = jnp.arange(height), jnp.arange(width)
    in_rows = (rows >= top[:, None]) & (rows < top[:, None] + size[0])
    in_columns = (columns >= left[:, None]) & (columns < left[:, None] + size[1])
    inside = in_rows[:, :, None] & in_columns[:, None, :]
    return jnp.where(inside[..., None], 0.0, images)


def flip(images: Array, mask: Array) -> Array:
    """Mirror some images left to right.

    Args:
      images: `[B, H, W, C]`.
      mask: `[B]` bool, True for the images to mirror.

    Returns:
      Images of the same shape.
    """
    return jnp.where(_per_sample(mask), images[:, :, ::-1], images)


def scale(images: Array, row_factor: Array, column_factor: Array) -> Array:
    """Sample bilinearly at `factor` times the distance from the center, with zeros outside.

    The centers of the corner pixels define the coordinates (`align_corners` in PyTorch's terms).

    Args:
      images: `[B, H, W, C]`.
      row_factor: `[B]`; above 1 shrinks the picture vertically.
      column_factor: `[B]`; above 1 shrinks the picture horizontally.

    Returns:
      Images of the same shape.
    """
    _, height, width, _ = images.shape
    rows = _centered_coordinates(height) * row_factor[:, None] + (height - 1) / 2
    columns = _centered_coordinates(width) * column_factor[:, None] + (width - 1) / 2
    return _resample_separably(images, rows, columns)


def rotate(images: Array, angles: Array) -> Array:
    """Rotate counter-clockwise, bilinearly, with zeros outside.

    The rotation is in pixel coordinates. The public code rotates normalized coordinates, which is
    the same for square images and shears others.

    Cost: four gathers per pixel. A rotation does not factorize into rows and columns; dense
    interpolation matrices measured 10 to 70 times slower on a CPU.

    Args:
      images: `[B, H, W, C]`.
      angles: `[B]`, radians.

    Returns:
      Images of the same shape and dtype.
    """
    batch, height, width, channels = images.shape
    cos, sin = jnp.cos(angles)[:, None, None], jnp.sin(angles)[:, None, None]
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


def augment(
    key: Array,
    images: Array,
    *,
    strategy: str,
    siamese: bool = False,
    single: bool = True,
    batch_axis: BatchAxis | None = None,
) -> Array:
    """Change images at random, differentiably.

    Cost: with `single`, only the drawn family runs on a CPU, unless the key is vmapped. On an
    accelerator all families run, since reading the drawn index on the host would stall the device.

    Args:
      key: the only source of randomness; the same key draws the same parameters.
      images: `[B, H, W, C]` floats, C = 1 or 3, any H and W.
      strategy: family names joined by underscores, such as "color_crop_cutout_flip_scale_rotate";
        "none" or "" changes nothing.
      siamese: whether all samples share the same parameters, which then depend on the key alone and
        not on B: a real and a synthetic batch with the same key see the same transformation.
        Otherwise each sample has its own parameters, also if devices share the batch.
      single: whether to draw one family per call, all equally likely (DSA's mode 'S', which DynaFed
        uses); otherwise all families are applied in the given order.
      batch_axis: the devices that share the batch, of which `images` are the local part; None for a
        whole batch.

    Returns:
      Images of the same shape and dtype.

    Raises:
      ConfigError: if a family is unknown or repeated.
    """
    families = parse_strategy(strategy)
    if not families:
        return images
    # In siamese mode the whole batch shares one draw of parameters.
    num_draws = 1 if siamese else get_num_shards(batch_axis) * images.shape[0]
    transforms = [_draw_and_apply(_FAMILIES[name], num_draws, batch_axis) for name in families]
    if single:
        family_key, parameter_key = jax.random.split(key)
        family_index = jax.random.randint(family_key, (), 0, len(families))
        return _apply_drawn_family(transforms, family_index, parameter_key, images)
    for transform, family_key in zip(transforms, jax.random.split(key, len(families)), strict=True):
        images = transform(family_key, images)
    return images


def _apply_drawn_family(transforms: list, family_index: Array, key: Array, images: Array) -> Array:
    """Apply the transform of index `family_index` to the images."""

    def apply_by_switch(family_index: Array, key: Array, images: Array) -> Array:
        return lax.switch(family_index, transforms, key, images)

    def apply_by_select(family_index: Array, key: Array, images: Array) -> Array:
        return lax.select_n(family_index, *(transform(key, images) for transform in transforms))

    return lax.platform_dependent(
        family_index, key, images, cpu=apply_by_switch, default=apply_by_select
    )


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
    families = tuple(strategy.split("_"))
    is_valid = set(families) <= set(_FAMILIES) and len(set(families)) == len(families)
    expected = f"'none' or distinct names out of {', '.join(_FAMILIES)}, joined by '_'"
    require(is_valid, argument, strategy, expected)
    return families


def _draw_color(key: Array, images: Array, draw: Callable) -> Array:
    """Change brightness, saturation and contrast by parameters from `draw(key, low, high)`."""
    shift_key, saturation_key, contrast_key = jax.random.split(key, 3)
    images = brightness(images, draw(shift_key, -MAX_BRIGHTNESS_SHIFT, MAX_BRIGHTNESS_SHIFT))
    images = saturation(images, draw(saturation_key, 0.0, MAX_SATURATION))
    return contrast(images, draw(contrast_key, *CONTRAST_RANGE))


def _draw_crop(key: Array, images: Array, draw: Callable) -> Array:
    """Shift images by parameters from `draw(key, low, high)`."""
    row_key, column_key = jax.random.split(key)
    max_row_shift, max_column_shift = (
        int(side * CROP_FRACTION + 0.5) for side in images.shape[1:3]
    )
    return crop(
        images,
        draw(row_key, -max_row_shift, max_row_shift),
        draw(column_key, -max_column_shift, max_column_shift),
    )


def _draw_cutout(key: Array, images: Array, draw: Callable) -> Array:
    """Cut rectangles out of images at centers from `draw(key, low, high)`."""
    row_key, column_key = jax.random.split(key)
    height, width = images.shape[1:3]
    size = int(height * CUTOUT_FRACTION + 0.5), int(width * CUTOUT_FRACTION + 0.5)
    # The center of a rectangle of even size lies between two pixels, which adds one position.
    last_row, last_column = height - size[0] % 2, width - size[1] % 2
    return cutout(images, draw(row_key, 0, last_row), draw(column_key, 0, last_column), size=size)


def _draw_flip(key: Array, images: Array, draw: Callable) -> Array:
    """Mirror the images for which `draw(key, low, high)` returns 1."""
    return flip(images, draw(key, 0, 1) == 1)


def _draw_scale(key: Array, images: Array, draw: Callable) -> Array:
    """Scale images by factors from `draw(key, low, high)`."""
    row_key, column_key = jax.random.split(key)
    low, high = 1 / MAX_SCALE, MAX_SCALE
    return scale(images, draw(row_key, low, high), draw(column_key, low, high))


def _draw_rotate(key: Array, images: Array, draw: Callable) -> Array:
    """Rotate images by angles from `draw(key, low, high)`."""
    limit = MAX_ROTATION_DEGREES * jnp.pi / 180
    return rotate(images, draw(key, -limit, limit))


_FAMILIES = {
    "color": _draw_color,
    "crop": _draw_crop,
    "cutout": _draw_cutout,
    "flip": _draw_flip,
    "scale": _draw_scale,
    "rotate": _draw_rotate,
}


def _draw_and_apply(
    family: Callable, num_draws: int, batch_axis: BatchAxis | None
) -> Callable[[Array, Array], Array]:
    """Return `(key, images) -> images` for a family, with uniformly drawn parameters.

    Integer bounds draw integers, including both ends; float bounds draw floats.
    """

    def transform(key: Array, images: Array) -> Array:
        def draw(key: Array, low: int | float, high: int | float) -> Array:
            if isinstance(low, int):
                values = jax.random.randint(key, (num_draws,), low, high + 1)
            else:
                values = jax.random.uniform(key, (num_draws,), images.dtype, low, high)
            if num_draws > 1:
                values = take_local_rows(values, batch_axis)
            return jnp.broadcast_to(values, images.shape[:1])

        return family(key, images, draw)

    return transform


def _resample_separably(images: Array, rows: Array, columns: Array) -> Array:
    """Sample bilinearly at rows `[B, H']` x columns `[B, W']`, with zeros outside.

    Two batched products with interpolation matrices: the derivative has no scatter. The precision
    is the highest, since the matrices move pixels and a reduced precision would round the pixels.
    """
    _, height, width, _ = images.shape
    row_weights = _linear_interpolation_weight(rows[..., None] - jnp.arange(height)).astype(
        images.dtype
    )
    column_weights = _linear_interpolation_weight(columns[..., None] - jnp.arange(width)).astype(
        images.dtype
    )
    images = jnp.einsum("bik,bkjc->bijc", row_weights, images, precision="highest")
    return jnp.einsum("bjl,bilc->bijc", column_weights, images, precision="highest")


def _linear_interpolation_weight(distance: Array) -> Array:
    """Return the weight of linear interpolation: 1 at distance 0, and 0 from distance 1 on."""
    return jnp.maximum(0, 1 - jnp.abs(distance))


def _centered_coordinates(side: int) -> Array:
    """Return pixel coordinates relative to the center."""
    return jnp.arange(side) - (side - 1) / 2


def _per_sample(values: Array) -> Array:
    """Reshape parameters `[B]` to `[B, 1, 1, 1]`."""
    return values[:, None, None, None]

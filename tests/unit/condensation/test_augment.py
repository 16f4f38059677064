"""Differentiable augmentation against closed forms and a float64 NumPy oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from support.x64 import enable_x64

from fedjax_het.condensation import augment as aug
from fedjax_het.utils.errors import ConfigError

ALL = "color_crop_cutout_flip_scale_rotate"
SHAPES = [(3, 7, 7, 1), (2, 6, 9, 3), (2, 8, 5, 1)]


def random_images(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def apply(family, images, *parameters):
    """The images under a family of the augmentation with these parameters, in order of drawing."""

    @jax.jit
    def transform(images, *parameters):
        values = iter(parameters)
        return aug.FAMILIES[family](jax.random.key(0), images, lambda key, low, high: next(values))

    return transform(images, *parameters)


def bilinear(image, rows, columns):
    """`image [H, W, C]` in float64 at coordinates `[H', W']`, zero outside: one pixel at a time."""
    image = np.asarray(image, np.float64)
    height, width, _ = image.shape
    out = np.zeros((*rows.shape, image.shape[2]))
    for place in np.ndindex(rows.shape):
        row, column = rows[place], columns[place]
        for i in (int(np.floor(row)), int(np.floor(row)) + 1):
            for j in (int(np.floor(column)), int(np.floor(column)) + 1):
                if 0 <= i < height and 0 <= j < width:
                    out[place] += (1 - abs(row - i)) * (1 - abs(column - j)) * image[i, j]
    return out


def affine_oracle(images, matrices):
    """PyTorch's affine_grid and grid_sample with align_corners, on pixel coordinates (x, y)."""
    _, height, width, _ = images.shape
    y, x = np.mgrid[:height, :width].astype(np.float64)
    y, x = y - (height - 1) / 2, x - (width - 1) / 2
    out = []
    for image, matrix in zip(images, matrices, strict=True):
        columns = matrix[0, 0] * x + matrix[0, 1] * y + (width - 1) / 2
        rows = matrix[1, 0] * x + matrix[1, 1] * y + (height - 1) / 2
        out.append(bilinear(image, rows, columns))
    return np.stack(out)


@pytest.mark.parametrize("shape", SHAPES)
def test_color_closed_form(shape):
    images, row = random_images(shape), (-1, 1, 1, 1)
    ranges = ((-0.5, 0.5), (0, 2), (0.5, 1.5))
    shift, saturation, contrast = (np.linspace(*ends, shape[0]) for ends in ranges)
    expected = images + shift.reshape(row)
    gray = expected.mean(3, keepdims=True)
    expected = gray + saturation.reshape(row) * (expected - gray)
    mean = expected.mean((1, 2, 3), keepdims=True)
    expected = mean + contrast.reshape(row) * (expected - mean)
    actual = apply("color", images, *map(jnp.asarray, (shift, saturation, contrast)))
    np.testing.assert_allclose(actual, expected, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("row", "column"), [(0, 0), (2, -3), (-4, 1), (1, 4), (-20, 0)])
def test_crop_shifts_pixels(shape, row, column):
    images = random_images(shape)
    expected = np.zeros(shape, np.float32)
    for i in range(shape[1]):
        for j in range(shape[2]):
            if 0 <= i + row < shape[1] and 0 <= j + column < shape[2]:
                expected[0, i, j] = images[0, i + row, j + column]
    expected[1:] = images[1:]  # the other samples are not moved
    moved = np.arange(shape[0]) == 0
    np.testing.assert_array_equal(apply("crop", images, row * moved, column * moved), expected)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("corner", ["middle", "first", "last"])
def test_cutout_zeroes_rectangle(shape, corner):
    images = random_images(shape) + 10.0  # no zeros of its own
    size = [round(side / 2 + 0.01) for side in shape[1:3]]  # half of a side, rounded up
    last = [shape[1] - size[0] % 2, shape[2] - size[1] % 2]  # the last centre that is ever drawn
    centre = {"middle": [shape[1] // 2, shape[2] // 2], "first": [0, 0], "last": last}[corner]
    expected = images.copy()
    top, left = centre[0] - size[0] // 2, centre[1] - size[1] // 2
    expected[:, max(top, 0) : top + size[0], max(left, 0) : left + size[1]] = 0
    centres = [np.full(shape[0], c) for c in centre]
    out = apply("cutout", images, *centres)
    np.testing.assert_array_equal(out, expected)
    assert (expected == 0).any()


@pytest.mark.parametrize("shape", SHAPES)
def test_flip_mirrors_chosen_samples(shape):
    images, mask = random_images(shape), np.arange(shape[0]) == 1
    once = apply("flip", images, mask)
    np.testing.assert_array_equal(once[0], images[0])
    np.testing.assert_array_equal(once[1], images[1][:, ::-1])
    np.testing.assert_array_equal(apply("flip", once, mask), images)


@pytest.mark.parametrize("shape", SHAPES)
def test_scale_and_rotate_sample_bilinearly(shape):
    images = random_images(shape)
    with enable_x64(True):
        images64 = jnp.asarray(images, jnp.float64)
        row, column = np.linspace(0.8, 1.2, shape[0]), np.linspace(1.15, 0.85, shape[0])
        scaled = apply("scale", images64, row, column)
        angles = np.linspace(-0.26, 1.2, shape[0])
        rotated = apply("rotate", images64, angles)
    matrices = [np.diag([c, r]) for r, c in zip(row, column, strict=True)]
    np.testing.assert_allclose(scaled, affine_oracle(images, matrices), atol=1e-12)
    cos, sin = np.cos(angles), np.sin(angles)
    matrices = np.stack([np.stack([cos, -sin], -1), np.stack([sin, cos], -1)], 1)
    np.testing.assert_allclose(rotated, affine_oracle(images, matrices), atol=1e-12)


@pytest.mark.parametrize("side", [6, 7])
def test_rotate_quarter_turns(side):
    images = random_images((3, side, side, 3))
    out = apply("rotate", images, np.asarray([0, np.pi / 2, -np.pi / 2], np.float32))
    for image, rotated, turns in zip(images, out, (0, 1, -1), strict=True):
        np.testing.assert_allclose(rotated, np.rot90(image, turns), atol=1e-5)


@pytest.mark.parametrize("strategy", [*ALL.split("_"), ALL])
def test_augment_pixel_gradients(strategy):
    with enable_x64(True):
        images = jnp.asarray(random_images((2, 6, 5, 3)), jnp.float64)
        direction = jnp.asarray(random_images((2, 6, 5, 3), seed=1), jnp.float64)

        @jax.jit
        def value(images):
            return jnp.sin(aug.augment(jax.random.key(3), images, strategy=strategy)).sum()

        slope = (jax.jit(jax.grad(value))(images) * direction).sum()
        step = 1e-5
        measured = (value(images + step * direction) - value(images - step * direction)) / (
            2 * step
        )
        np.testing.assert_allclose(slope, measured, rtol=1e-7)
        assert abs(measured) > 1e-3


@pytest.mark.parametrize("strategy", [*ALL.split("_"), ALL])
def test_augment_siamese_ignores_batch(strategy):
    real = random_images((5, 8, 8, 3))
    real[4] = real[1]

    @jax.jit
    def augment(key, images):
        return aug.augment(key, images, strategy=strategy, siamese=True)

    for seed in range(8):
        key = jax.random.key(seed)
        out = np.asarray(augment(key, real))
        synthetic = np.asarray(augment(key, real[[0, 3]]))
        np.testing.assert_allclose(synthetic, out[[0, 3]], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(out[4], out[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("strategy", ALL.split("_"))
def test_augment_draws_per_sample(strategy):
    copies = np.repeat(random_images((1, 28, 28, 3)), 16, axis=0)
    out = np.asarray(aug.augment(jax.random.key(0), copies, strategy=strategy))
    distinct = len(np.unique(np.round(out.reshape(16, -1), 4), axis=0))
    assert distinct == 2 if strategy == "flip" else distinct > 10


@pytest.mark.slow
def test_augment_draws_family_uniformly():
    images = random_images((4, 10, 10, 3)) + 5.0

    def candidates(key):
        """The image under the drawn family, and under each family with the same parameter key."""
        own = [aug.augment(key, images, strategy=name) for name in ALL.split("_")]
        return aug.augment(key, images, strategy=ALL), jnp.stack(own)

    drawn, own = jax.lax.map(candidates, jax.random.split(jax.random.key(11), 600))
    matches = np.abs(drawn[:, None] - own).max(axis=(2, 3, 4, 5)) < 1e-5  # [draws, families]
    np.testing.assert_array_equal(matches.sum(1), 1)
    assert stats.chisquare(matches.sum(0)).pvalue > 1e-3


def test_augment_parameter_ranges():
    """Constant or one-hot images reveal what was drawn."""
    side, batch = 28, 2000
    ones = jnp.ones((batch, side, side, 1))
    keys = jax.random.split(jax.random.key(5), 4)

    augment = jax.jit(aug.augment, static_argnames="strategy")
    shift = np.asarray(augment(keys[0], ones, strategy="color"))[:, 0, 0, 0] - 1
    assert -0.5 <= shift.min() < -0.48 and 0.48 < shift.max() <= 0.5

    spot = jnp.zeros((batch, side, side, 1)).at[:, 14, 14].set(1.0)
    cropped = np.asarray(augment(keys[1], spot, strategy="crop"))[..., 0]
    _, rows, columns = np.nonzero(cropped)
    assert len(rows) == batch  # a spot in the middle never leaves the picture
    for place in (rows, columns):
        assert set(place - 14) == set(range(-4, 5))

    cut = 1 - np.asarray(augment(keys[2], ones, strategy="cutout"))[..., 0]
    heights, widths = cut.max(2).sum(1), cut.max(1).sum(1)
    assert set(heights) == set(widths) == set(range(7, 15))  # half of 14 where centred on a border

    flipped = np.asarray(augment(keys[3], ones * np.arange(side)[:, None], strategy="flip"))
    assert abs((flipped[:, 0, 0, 0] != 0).mean() - 0.5) < 0.06


@pytest.mark.parametrize("strategy", ["", "none"])
def test_augment_without_strategy(strategy):
    images = random_images((2, 4, 4, 1))
    np.testing.assert_array_equal(aug.augment(jax.random.key(0), images, strategy=strategy), images)


@pytest.mark.parametrize("strategy", ["colour", "flip_flip", "flip-crop", "crop_"])
def test_augment_rejects_invalid_strategy(strategy):
    with pytest.raises(ConfigError, match=repr(strategy)):
        aug.augment(jax.random.key(0), random_images((1, 4, 4, 1)), strategy=strategy)


def test_augment_in_differentiated_scan():
    """As in the unrolled inner loop, the draw being a real branch: against finite differences."""
    with enable_x64(True):
        images = jnp.asarray(random_images((4, 6, 6, 1)), jnp.float64)

        def step(total, key):
            out = aug.augment(key, images * (1 + total), strategy="color_crop_rotate")
            return total + 1e-3 * jnp.square(out).sum(), None

        def value(total):
            keys = jax.random.split(jax.random.key(2), 8)
            return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), total, keys)[0]

        value, slope = jax.jit(value), jax.jit(jax.grad(value))(0.1)
        np.testing.assert_allclose(slope, (value(0.1 + 1e-6) - value(0.1 - 1e-6)) / 2e-6, rtol=1e-7)

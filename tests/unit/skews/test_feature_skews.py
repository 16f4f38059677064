"""Feature skews against NumPy and SciPy, and their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import ndimage

from fedjax_het import ConfigError
from fedjax_het.skews import (
    SKEWS,
    Blur,
    Color,
    Contrast,
    FeatureSkew,
    Inversion,
    Noise,
    PixelPermutation,
    Resolution,
    Rotation,
)

SHAPE = (7, 7, 3)
IMAGES = np.random.default_rng(0).random((4, *SHAPE)).astype(np.float32)
KEYS = jax.random.split(jax.random.key(0), len(IMAGES))
FEATURE_SKEWS = [name for name in SKEWS if issubclass(SKEWS[name].make, FeatureSkew)]


def transform(skew, client=-1, num_clients=4, images=IMAGES):
    """Images of the last of four clients, whose level is 1 on a ramp."""
    rng = np.random.default_rng(1)
    by_client, shared = skew.make_parameters(rng, num_clients, images.shape[1:])
    own = jax.tree.map(lambda a: jnp.asarray(a)[client], by_client)
    keys = KEYS[: len(images)]
    return np.asarray(skew.transform(jnp.asarray(images), own, shared, keys, *skew.get_static()))


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_rotation_by_quarter_turns(turns):
    actual = transform(Rotation(degrees=90.0 * turns, levels="equal"))
    np.testing.assert_allclose(actual, np.rot90(IMAGES, turns, (1, 2)), atol=1e-5)


def test_rotation_by_any_angle():
    actual = transform(Rotation(degrees=30.0, levels="equal"))
    # Like SciPy, zeros outside; SciPy's angle is of the plane (row, column), counterclockwise too.
    expected = ndimage.rotate(IMAGES, 30, (1, 2), reshape=False, order=1, mode="constant")
    np.testing.assert_allclose(actual[:, 2:5, 2:5], expected[:, 2:5, 2:5], atol=1e-4)


def test_blur():
    actual = transform(Blur(sigma=1.2), client=1)  # half of the strength
    sigmas = (0, 0.6, 0.6, 0)
    expected = ndimage.gaussian_filter(IMAGES.astype(np.float64), sigmas, mode="nearest", radius=4)
    np.testing.assert_allclose(actual, expected, atol=1e-5)


def test_contrast_and_inversion():
    means = IMAGES.mean((1, 2, 3), keepdims=True)
    actual = transform(Contrast(amount=0.8), client=1)
    np.testing.assert_allclose(actual, means + 0.6 * (IMAGES - means), atol=1e-6)
    skew = Inversion()
    actual = [transform(skew, client=k) for k in range(4)]
    is_inverted = [np.allclose(images, 1 - IMAGES, atol=1e-6) for images in actual]
    is_plain = [np.array_equal(images, IMAGES) for images in actual]
    assert sum(is_inverted) == sum(is_plain) == 2


def test_color_keeps_brightness_and_gray():
    actual = transform(Color(degrees=120.0))
    weights = np.array([0.299, 0.587, 0.114])
    np.testing.assert_allclose(actual @ weights, IMAGES @ weights, atol=1e-5)
    assert np.abs(actual - IMAGES).max() > 0.1
    gray = np.repeat(IMAGES[..., :1], 3, -1)
    np.testing.assert_allclose(transform(Color(), images=gray), gray, atol=1e-3)
    twice = transform(Color(degrees=180.0), images=transform(Color(degrees=180.0)))
    np.testing.assert_allclose(twice, IMAGES, atol=1e-5)
    with pytest.raises(ConfigError, match=r"skew color = .*three channels"):
        Color().validate_images((28, 28, 1))


def test_resolution():
    actual = transform(Resolution(factor=3.0))
    for rows in (slice(0, 3), slice(3, 6), slice(6, 7)):
        for columns in (slice(0, 3), slice(3, 6), slice(6, 7)):
            block = IMAGES[:, rows, columns].mean((1, 2), keepdims=True)
            np.testing.assert_allclose(
                actual[:, rows, columns],
                np.broadcast_to(block, actual[:, rows, columns].shape),
                atol=1e-6,
            )


def test_noise_has_the_deviation_of_the_client_and_is_fixed():
    images = np.zeros((2, 60, 60, 1), np.float32)
    skew = Noise(std=0.4)
    deviations = [transform(skew, client=k, images=images).std() for k in range(4)]
    np.testing.assert_allclose(deviations, [0.1, 0.2, 0.3, 0.4], rtol=0.05)
    np.testing.assert_array_equal(transform(skew, images=images), transform(skew, images=images))
    first, second = transform(skew, images=images)
    assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < 0.05


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_permutation_moves_a_share_of_the_pixels(share):
    skew = PixelPermutation(share=share, groups=2)
    actual = [transform(skew, client=k) for k in range(4)]
    is_plain = [np.array_equal(images, IMAGES) for images in actual]
    assert sum(is_plain) == 2
    moved = actual[is_plain.index(False)]
    pixels = [np.sort(images.reshape(4, -1, 3), 1) for images in (moved, IMAGES)]
    np.testing.assert_array_equal(*pixels)
    changed = (moved != IMAGES).any((0, 3)).mean()
    assert share - 0.1 <= changed <= share


@pytest.mark.parametrize("name", FEATURE_SKEWS)
def test_neutral_parameters_are_the_identity(name):
    """Also where a client has level 0, whose parameters the program computes with."""
    kind = SKEWS[name].make
    skew = kind(**{kind.strength: float(kind.neutral)})
    assert skew.is_neutral and not kind().is_neutral
    images = np.repeat(IMAGES[..., :1], 3, -1) if name == "color" else IMAGES
    np.testing.assert_allclose(transform(skew, images=images), images, atol=1e-5)

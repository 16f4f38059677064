"""The fixed random network, and Frechet distances, against float64 NumPy and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg

from fedjax_het.core.example_transform import ExampleTransform, make_skew_inputs
from fedjax_het.core.feature_network import (
    NUM_FEATURES,
    compute_client_features,
    compute_random_features,
    make_random_filters,
)
from fedjax_het.data.heterogeneity import compute_feature_distances, compute_frechet_distance
from fedjax_het.skews import Noise
from fedjax_het.skews.assignment import ClientSkews
from fedjax_het.utils.arrays import make_key

RNG = np.random.default_rng(0)


def convolve(image, filters):
    """Absolute sum over the 3 x 3 neighborhood of each pixel, with zeros outside."""
    height, width, _ = image.shape
    padded = np.pad(image, ((1, 1), (1, 1), (0, 0)))
    values = np.zeros((height, width, filters.shape[-1]))
    for y in range(height):
        for x in range(width):
            values[y, x] = np.tensordot(padded[y : y + 3, x : x + 3], filters, 3)
    return np.abs(values)


def reference_features(image):
    first, second = (np.asarray(f, np.float64) for f in make_random_filters(image.shape[-1]))
    hidden = convolve(image, first)
    height, width = (-(-size // 2) for size in image.shape[:2])
    pooled = np.zeros((height, width, hidden.shape[-1]))
    for y in range(height):
        for x in range(width):
            pooled[y, x] = hidden[2 * y : 2 * y + 2, 2 * x : 2 * x + 2].mean((0, 1))
    hidden = convolve(pooled, second)
    features = []
    for i in range(2):
        rows = hidden[i * height // 2 : -(-(i + 1) * height // 2)]
        for j in range(2):
            cell = rows[:, j * width // 2 : -(-(j + 1) * width // 2)]
            features.append(cell.mean((0, 1)))
    return np.concatenate(features)


@pytest.mark.parametrize("shape", [(8, 8, 1), (7, 10, 3), (1, 5, 1), (1, 1, 2)])
def test_features_of_any_size(shape):
    images = RNG.random((2, *shape))
    expected = np.stack([reference_features(image) for image in images])
    actual = compute_random_features(jnp.asarray(images, jnp.float32))
    assert actual.shape == (2, NUM_FEATURES)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-6)


def test_features_of_batches_are_those_of_one_batch():
    images = RNG.integers(0, 256, (300, 6, 6, 1)).astype(np.uint8)
    positions, clients = RNG.permutation(300)[:270], np.repeat([1, 0], 135)
    skew = ClientSkews(((Noise(std=0.5), (np.float32([0.0, 0.5]), ())),))
    transform = make_skew_inputs(skew, make_key(3), np.zeros(300, np.int32), None).transform
    features = compute_client_features(images, transform, positions, clients)
    for client in (0, 1):
        own = positions[clients == client]
        seen = transform.apply(images[own], jnp.asarray(own), jnp.int32(client))
        expected = compute_random_features(seen)
        np.testing.assert_allclose(features[clients == client], expected, rtol=1e-5, atol=1e-6)
    plain = compute_client_features(
        images, ExampleTransform((), make_key(0), ()), positions, clients
    )
    np.testing.assert_array_equal(features[135:], plain[135:])
    assert (np.abs(features[:135] - plain[:135]).max(1) > 1e-3).all()


def reference_frechet(mean, covariance, other_mean, other_covariance):
    root = scipy.linalg.sqrtm(covariance @ other_covariance).real
    return np.square(mean - other_mean).sum() + np.trace(covariance + other_covariance - 2 * root)


def test_frechet_distance():
    for _ in range(3):
        factors = RNG.normal(size=(2, 5, 5))
        covariances = factors @ factors.transpose(0, 2, 1)
        means = RNG.normal(size=(2, 5))
        arguments = (means[0], covariances[0], means[1], covariances[1])
        actual = compute_frechet_distance(*arguments)
        assert actual == pytest.approx(reference_frechet(*arguments), rel=1e-9)
        swapped = compute_frechet_distance(*arguments[2:], *arguments[:2])
        assert swapped == pytest.approx(actual, rel=1e-9)
    assert compute_frechet_distance(*arguments[:2], *arguments[:2]) == pytest.approx(0, abs=1e-12)


def test_distances_of_clients():
    features, owners = RNG.normal(size=(90, 4)), np.repeat([0, 2, 3], [20, 30, 40])
    distances = compute_feature_distances(features, owners, 5)
    pooled = features / np.sqrt(np.trace(np.cov(features.T, bias=True)))
    moments = (pooled.mean(0), np.cov(pooled.T, bias=True))
    for client in (0, 2, 3):
        own = pooled[owners == client]
        expected = reference_frechet(*moments, own.mean(0), np.cov(own.T, bias=True))
        assert distances[client] == pytest.approx(expected, rel=1e-6)
    assert np.isnan(distances[[1, 4]]).all()
    scaled = compute_feature_distances(1000 * features + 7, owners, 5)
    np.testing.assert_allclose(scaled, distances, rtol=1e-6)
    equal = compute_feature_distances(np.tile(features, (3, 1)), np.repeat(np.arange(3), 90), 3)
    np.testing.assert_allclose(equal, 0, atol=1e-10)
    constant = compute_feature_distances(np.ones((4, 2)), np.arange(4) % 2, 2)
    np.testing.assert_array_equal(constant, 0)


def test_weights_are_constants():
    with jax.threefry_partitionable(True), jax.default_matmul_precision("bfloat16"):
        one = compute_random_features(jnp.ones((1, 4, 4, 1)))
    np.testing.assert_array_equal(one, compute_random_features(jnp.ones((1, 4, 4, 1))))

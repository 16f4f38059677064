"""Six artificial domains of the embedded digits, for the quick presets of Table 2, Figures 4 and 9.

Each image belongs to one domain, which is drawn once and for all. The images of a domain have the
feature skew `DOMAIN_SKEWS[domain]` with its full strength and are stored as uint8 images.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.data import Dataset, dataset_from_arrays, load_dataset
from fedjax_het.skews import Blur, FeatureSkew, Inversion, Noise, Resolution, Rotation

DOMAIN_SKEWS: dict[str, FeatureSkew | None] = {
    "plain": None,
    "inverted": Inversion(levels="equal"),
    "rotated": Rotation(degrees=90.0, levels="equal"),
    "blurred": Blur(sigma=1.0, levels="equal"),
    "noisy": Noise(std=0.25, levels="equal"),
    "coarse": Resolution(factor=2.0, levels="equal"),
}
"""Skew of the images of each domain; None: the images as they are."""
DOMAINS = tuple(DOMAIN_SKEWS)
_SEED = 0  # another value would be another benchmark
_NOTE = (
    "the embedded digits in six artificial domains (plain, inverted, rotated by 90 degrees, blurred, "
    "noisy, coarse), each image in one; no images of DomainNet"
)


def make_digit_domains() -> Dataset:
    """Make the digits in six domains of about 240 training and 60 test images each.

    A domain has about 24 training and 6 test images of every class.
    """
    digits = load_dataset("digits")
    rng = np.random.default_rng(_SEED)
    arrays: dict[str, Any] = {}
    for split, key in zip(("train", "test"), jax.random.split(jax.random.key(_SEED)), strict=True):
        images = np.array(getattr(digits, f"{split}_inputs"))
        labels = getattr(digits, f"{split}_labels")
        # Sorted by class, then dealt in turn: every domain gets as much of each class.
        order = np.argsort(labels + rng.random(len(labels)))
        domains = np.empty(len(labels), np.int32)
        domains[order] = np.arange(len(labels)) % len(DOMAINS)
        for i, skew in enumerate(DOMAIN_SKEWS.values()):
            if skew is not None:
                images[domains == i] = apply_skew(skew, images[domains == i], key)
        arrays[f"{split}_inputs"] = images
        arrays[f"{split}_labels"], arrays[f"{split}_domains"] = labels, domains
    return dataset_from_arrays(
        **arrays,
        name="digits in six domains",
        num_classes=10,
        class_names=digits.class_names,
        domain_names=DOMAINS,
        note=_NOTE,
    )


def apply_skew(skew: FeatureSkew, images: np.ndarray, key: jax.Array) -> np.ndarray:
    """Transform images as a client of level 1 sees them.

    Args:
      skew: the skew, with the levels "equal".
      images: uint8 `[N, H, W, C]`.
      key: PRNG key of the images' draws.

    Returns:
      The images, rounded and clipped to uint8 `[N, H, W, C]`.
    """
    num_images, height, width, channels = images.shape
    rng = np.random.default_rng(_SEED)
    by_client, shared = skew.make_parameters(rng, 1, (height, width, channels))
    values, keys = jnp.asarray(images, jnp.float32) / 255, jax.random.split(key, num_images)
    changed = skew.transform(values, by_client[0], shared, keys, *skew.get_static())
    return np.rint(255 * np.asarray(changed)).clip(0, 255).astype(np.uint8)

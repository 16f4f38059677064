"""Six artificial domains of the embedded digits, for the quick presets of Table 2, Figures 4 and 9.

Each image belongs to one domain, which is drawn once and for all and determines how the image is
changed:

plain      as it is
inverted   white and black exchanged
rotated    by a quarter turn, anticlockwise
blurred    by the mean over 3 x 3 pixels, zeros outside
noisy      with Gaussian noise of deviation 64 of 255, clipped
coarse     every second pixel of every second row, repeated to 2 x 2
"""

from typing import Any

import numpy as np

from fedjax_het.data import Dataset, dataset_from_arrays, load_dataset

DOMAINS = ("plain", "inverted", "rotated", "blurred", "noisy", "coarse")
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
    for part in ("train", "test"):
        images = getattr(digits, f"{part}_images")
        labels = getattr(digits, f"{part}_labels")
        # Sorted by class, then dealt in turn: every domain gets as much of each class.
        order = np.argsort(labels + rng.random(len(labels)))
        domains = np.empty(len(labels), np.int32)
        domains[order] = np.arange(len(labels)) % len(DOMAINS)
        pairs = zip(images, domains, strict=True)
        changed = [apply_domain(image, DOMAINS[domain], rng) for image, domain in pairs]
        arrays[f"{part}_images"] = np.stack(changed)
        arrays[f"{part}_labels"], arrays[f"{part}_domains"] = labels, domains
    return dataset_from_arrays(
        **arrays,
        name="digits in six domains",
        num_classes=10,
        class_names=digits.class_names,
        domain_names=DOMAINS,
        note=_NOTE,
    )


def apply_domain(image: np.ndarray, domain: str, rng: np.random.Generator) -> np.ndarray:
    """Change an image as its domain requires.

    Args:
      image: uint8 `[H, W, 1]`.
      domain: name of the domain.
      rng: generator, from which only domain `noisy` draws.

    Returns:
      The image, uint8 `[H, W, 1]`.
    """
    if domain == "inverted":
        return 255 - image
    if domain == "rotated":
        return np.rot90(image).copy()
    if domain == "blurred":
        padded = np.pad(image.astype(np.float64), ((1, 1), (1, 1), (0, 0)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(0, 1))
        return np.rint(windows.mean(axis=(-2, -1))).astype(np.uint8)
    if domain == "noisy":
        noisy = image + rng.normal(0, 64, image.shape)
        return np.rint(noisy).clip(0, 255).astype(np.uint8)
    if domain == "coarse":
        return image[::2, ::2].repeat(2, axis=0).repeat(2, axis=1)
    return image

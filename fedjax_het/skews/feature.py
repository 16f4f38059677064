"""Skews of the images, such as noise and rotation."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.ndimage import map_coordinates

from fedjax_het.skews.base import FeatureSkew, Levels
from fedjax_het.utils.config import Bounds, NonNegativeFloat, UnitInterval
from fedjax_het.utils.errors import require

Degrees = Annotated[float, Bounds(-360, 360)]


@dataclass(frozen=True, kw_only=True)
class Noise(FeatureSkew):
    """Gaussian noise on every pixel, as in NIID-Bench (Li et al., ICDE 2022).

    Client k of K has noise of standard deviation std (k + 1) / K, of values in [0, 1] without
    clipping. The noise of an example is drawn once; NIID-Bench draws it at every access.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import Noise
      >>> levels, _ = Noise(std=0.5).make_parameters(np.random.default_rng(0), 2, (8, 8, 1))
      >>> levels.tolist()
      [0.25, 0.5]
    """

    std: NonNegativeFloat = 0.3
    "Largest standard deviation, of pixel values in [0, 1]."
    name: ClassVar[str] = "noise"
    description: ClassVar[str] = "Gaussian noise on the pixels, of increasing strength over clients"
    strength: ClassVar[str] = "std"

    @staticmethod
    def transform(images, parameters, shared, keys):
        """Add noise."""
        draw = jax.vmap(lambda key: jax.random.normal(key, images.shape[1:]))
        return images + parameters * draw(keys)


@dataclass(frozen=True, kw_only=True)
class Rotation(FeatureSkew):
    """Rotation around the center, counterclockwise, with bilinear interpolation and zeros outside.

    `levels="groups"` with four groups and 270 degrees are IFCA's rotations by 0, 90, 180 and 270.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import Rotation
      >>> angles, _ = Rotation(degrees=90).make_parameters(np.random.default_rng(0), 4, (8, 8, 1))
      >>> sorted(angles.tolist())
      [0.0, 0.0, 90.0, 90.0]
    """

    degrees: Degrees = 90.0
    "Largest angle in degrees."
    levels: Levels = "groups"
    "Levels of the clients, see `LevelSkew`."
    name: ClassVar[str] = "rotation"
    description: ClassVar[str] = "rotated images, by default of half of the clients"
    strength: ClassVar[str] = "degrees"

    @staticmethod
    def transform(images, parameters, shared, keys):
        """Rotate by the client's angle."""
        height, width = images.shape[1:3]
        angle = jnp.deg2rad(parameters)
        y, x = jnp.meshgrid(
            jnp.arange(height) - (height - 1) / 2,
            jnp.arange(width) - (width - 1) / 2,
            indexing="ij",
        )
        # The source of each pixel; the y axis points down.
        source_x = jnp.cos(angle) * x - jnp.sin(angle) * y + (width - 1) / 2
        source_y = jnp.sin(angle) * x + jnp.cos(angle) * y + (height - 1) / 2

        def rotate_channel(channel):
            return map_coordinates(channel, [source_y, source_x], order=1, mode="constant")

        return jax.vmap(jax.vmap(rotate_channel, -1, -1))(images)


@dataclass(frozen=True, kw_only=True)
class Blur(FeatureSkew):
    """Gaussian blur; pixels outside the image have the value of the nearest pixel.

    Example:
      >>> from fedjax_het.skews import Blur
      >>> Blur(sigma=1.5).get_static()  # the radius of the kernel in pixels
      (5,)
    """

    sigma: NonNegativeFloat = 2.0
    "Largest standard deviation of the kernel, in pixels."
    name: ClassVar[str] = "blur"
    description: ClassVar[str] = "Gaussian blur, of increasing strength over clients"
    strength: ClassVar[str] = "sigma"

    def get_static(self):
        """Return the radius of the kernel."""
        return (int(np.ceil(3 * self.sigma)),)

    @staticmethod
    def transform(images, parameters, shared, keys, radius):
        """Convolve rows and columns with the client's kernel."""
        offsets = jnp.arange(-radius, radius + 1)
        weights = jnp.exp(-0.5 * jnp.square(offsets / jnp.maximum(parameters, 1e-3)))
        weights = weights / weights.sum()
        for axis in (1, 2):
            positions = jnp.arange(images.shape[axis])
            indices = jnp.clip(positions[:, None] + offsets, 0, images.shape[axis] - 1)
            # Row i of the matrix has the weight of each source pixel of pixel i.
            matrix = (weights[:, None] * jax.nn.one_hot(indices, images.shape[axis])).sum(1)
            images = jnp.moveaxis(jnp.tensordot(matrix, images, ((1,), (axis,))), 0, axis)
        return images


@dataclass(frozen=True, kw_only=True)
class Contrast(FeatureSkew):
    """Lower contrast: each image moves toward its mean value.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.skews import Contrast
      >>> images = jnp.array([0.0, 1.0]).reshape(1, 1, 2, 1)
      >>> Contrast.transform(images, 0.5, (), None).ravel().tolist()
      [0.25, 0.75]
    """

    amount: UnitInterval = 0.8
    "Largest share by which the differences from the mean shrink."
    name: ClassVar[str] = "contrast"
    description: ClassVar[str] = "lower contrast, of increasing strength over clients"
    strength: ClassVar[str] = "amount"

    @staticmethod
    def transform(images, parameters, shared, keys):
        """Shrink the differences from the mean."""
        means = images.mean((1, 2, 3), keepdims=True)
        return means + (1 - parameters) * (images - means)


@dataclass(frozen=True, kw_only=True)
class Color(FeatureSkew):
    """Rotation of the hue, in the YIQ color space; brightness does not change.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.skews import Color
      >>> Color.transform(jnp.ones((2, 8, 8, 3)), 180.0, (), None).shape
      (2, 8, 8, 3)
    """

    degrees: Degrees = 180.0
    "Largest angle of the hue in degrees."
    name: ClassVar[str] = "color"
    description: ClassVar[str] = "rotated hue of RGB images, of increasing angle over clients"
    strength: ClassVar[str] = "degrees"

    def validate_images(self, input_shape):
        """Require three channels."""
        require(input_shape[-1] == 3, "skew color", input_shape, "images of three channels, RGB")

    @staticmethod
    def transform(images, parameters, shared, keys):
        """Rotate the two color channels."""
        angle = jnp.deg2rad(parameters)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        rotation = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
        rotation = rotation.at[1, 1].set(cos).at[2, 2].set(cos)
        rotation = rotation.at[1, 2].set(-sin).at[2, 1].set(sin)
        matrix = jnp.asarray(_YIQ_TO_RGB) @ rotation @ jnp.asarray(_RGB_TO_YIQ)
        return images @ matrix.T


_RGB_TO_YIQ = np.array(
    [[0.299, 0.587, 0.114], [0.5959, -0.2746, -0.3213], [0.2115, -0.5227, 0.3112]], np.float32
)
_YIQ_TO_RGB = np.linalg.inv(_RGB_TO_YIQ.astype(np.float64)).astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Inversion(FeatureSkew):
    """White and black exchanged: a mixture (1 - a) x + a (1 - x) with the client's a.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.skews import Inversion
      >>> images = jnp.array([0.0, 0.25]).reshape(1, 1, 2, 1)
      >>> Inversion.transform(images, 1.0, (), None).ravel().tolist()
      [1.0, 0.75]
    """

    amount: UnitInterval = 1.0
    "Largest share of the inverted image."
    levels: Levels = "groups"
    "Levels of the clients, see `LevelSkew`."
    name: ClassVar[str] = "inversion"
    description: ClassVar[str] = "inverted images, by default of half of the clients"
    strength: ClassVar[str] = "amount"

    @staticmethod
    def transform(images, parameters, shared, keys):
        """Mix with the inverted image."""
        return images + parameters * (1 - 2 * images)


@dataclass(frozen=True, kw_only=True)
class Resolution(FeatureSkew):
    """Lower resolution: blocks of s x s pixels have their mean; s is rounded for each client.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.skews import Resolution
      >>> images = jnp.array([0.0, 0.5, 1.0, 0.0]).reshape(1, 1, 4, 1)
      >>> Resolution.transform(images, 2.0, (), None).ravel().tolist()
      [0.25, 0.25, 0.5, 0.5]
    """

    factor: Annotated[float, Bounds(1)] = 4.0
    "Largest side of a block in pixels."
    name: ClassVar[str] = "resolution"
    description: ClassVar[str] = "lower resolution, by blocks of increasing size over clients"
    strength: ClassVar[str] = "factor"
    neutral: ClassVar[float | None] = 1

    def make_parameters(self, rng, num_clients, input_shape):
        """Return the side of each client's blocks."""
        return np.rint(1 + (self.factor - 1) * self.draw_levels(rng, num_clients)), ()

    @staticmethod
    def transform(images, parameters, shared, keys):
        """Average over blocks."""
        for axis in (1, 2):
            blocks = jnp.floor(jnp.arange(images.shape[axis]) / parameters)
            is_same_block = (blocks[:, None] == blocks).astype(images.dtype)
            matrix = is_same_block / is_same_block.sum(1, keepdims=True)
            images = jnp.moveaxis(jnp.tensordot(matrix, images, ((1,), (axis,))), 0, axis)
        return images


@dataclass(frozen=True, kw_only=True)
class PixelPermutation(FeatureSkew):
    """A fixed permutation of a share of the pixels in each group of clients.

    The first group has no permutation. All channels of a pixel move together.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import PixelPermutation
      >>> skew = PixelPermutation(groups=3)
      >>> _, sources = skew.make_parameters(np.random.default_rng(0), 6, (4, 4, 1))
      >>> sources.shape
      (3, 16)
    """

    share: UnitInterval = 1.0
    "Share of the pixels that change places."
    levels: Levels = "groups"
    "Groups of clients; the other kinds of levels are not supported."
    name: ClassVar[str] = "permutation"
    description: ClassVar[str] = "permuted pixels, another permutation for each group of clients"
    strength: ClassVar[str] = "share"

    def check(self):
        """Require groups."""
        require(self.levels == "groups", "levels", self.levels, "groups")

    def make_parameters(self, rng, num_clients, input_shape):
        """Return the group of each client, and the source of each pixel in each group."""
        num_pixels = input_shape[0] * input_shape[1]
        sources = np.tile(np.arange(num_pixels, dtype=np.int32), (self.groups, 1))
        for row in sources[1:]:
            moved = rng.choice(num_pixels, round(self.share * num_pixels), replace=False)
            row[np.sort(moved)] = moved
        return self.draw_groups(rng, num_clients).astype(np.int32), sources

    @staticmethod
    def transform(images, parameters, shared, keys):
        """Gather the pixels."""
        batch_size, height, width, channels = images.shape
        pixels = images.reshape(batch_size, height * width, channels)
        return pixels[:, shared[parameters]].reshape(images.shape)

"""`Skew`, the base class of all kinds of heterogeneity, and the levels of the clients."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from fedjax_het.utils.config import PositiveInt
from fedjax_het.utils.errors import display_name, require
from fedjax_het.utils.kinds import Kind

Tree = Any
Levels = Literal["ramp", "uniform", "groups", "equal"]


@dataclass(frozen=True, kw_only=True)
class Skew(Kind):
    """A kind of heterogeneity with its parameters; a value of the setting `skew`.

    Example:
      >>> from fedjax_het.skews import Noise, Skew
      >>> isinstance(Noise(std=0.3), Skew), Noise.strength
      (True, 'std')
    """

    needs_classes: ClassVar[bool] = False
    """Whether the skew reads classes; otherwise it works for every task."""

    @property
    def source(self) -> str:
        """Setting that made the skew, and its kind, for messages."""
        return f"skew {self.name!r}"


@dataclass(frozen=True, kw_only=True)
class LevelSkew(Skew):
    """A skew whose strength is multiplied by a level in [0, 1] of each client.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import Noise
      >>> Noise(levels="groups").draw_levels(np.random.default_rng(0), 4).shape
      (4,)
    """

    levels: Levels = "ramp"
    """Levels of the clients. "ramp": (k + 1) / K for client k, as in NIID-Bench's noise; "uniform":
    drawn from [0, 1]; "groups": evenly spaced from 0 to 1 over `groups`; "equal": 1."""
    groups: PositiveInt = 2
    'Number of groups of clients, of equal size up to one, for the levels "groups".'

    def draw_levels(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        """Return the level of each client.

        Args:
          rng: NumPy Generator, from which "uniform" and "groups" draw.
          num_clients: number of clients, K.

        Returns:
          Levels in [0, 1], float32 `[K]`.

        Example:
          >>> import numpy as np
          >>> from fedjax_het.skews import Noise
          >>> Noise(std=0.1).draw_levels(np.random.default_rng(0), 4).tolist()
          [0.25, 0.5, 0.75, 1.0]
        """
        if self.levels == "ramp":
            levels = np.arange(1, num_clients + 1) / num_clients
        elif self.levels == "uniform":
            levels = rng.random(num_clients)
        elif self.levels == "groups":
            levels = self.draw_groups(rng, num_clients) / max(self.groups - 1, 1)
        else:
            levels = np.ones(num_clients)
        return levels.astype(np.float32)

    def draw_groups(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        """Return the group of each client: a random division into groups of nearly equal size.

        Args:
          rng: NumPy Generator.
          num_clients: number of clients, K.

        Returns:
          Group numbers from 0, int64 `[K]`.

        Raises:
          ConfigError: if there are more groups than clients.
        """
        argument, expected = (
            f"skew {self.name}:groups",
            f"at most {num_clients}, the number of clients",
        )
        require(self.groups <= num_clients, argument, self.groups, expected)
        return rng.permutation(np.arange(num_clients) % self.groups)

    def list_warnings(self, run):
        """Return warnings of groups without effect."""
        prefix = f"{display_name('skew')} {self.name}:groups = {self.groups} has no effect"
        if self.levels != "groups":
            has_default = self.groups == type(self)().groups
            return [] if has_default else [f"{prefix} with levels = {self.levels}"]
        return (
            [f"{prefix}: the skew changes the groups after the first"] if self.groups == 1 else []
        )


@dataclass(frozen=True, kw_only=True)
class FeatureSkew(LevelSkew):
    """A skew of the images: each client sees its own examples, and its own tests, transformed.

    Values of images are in [0, 1]; `transform` may leave this range.

    Example:
      >>> from fedjax_het.skews import SKEWS, FeatureSkew
      >>> [name for name, kind in SKEWS.items() if issubclass(kind.make, FeatureSkew)][:3]
      ['rotation', 'inversion', 'contrast']
    """

    reads_positions: ClassVar[bool] = False
    """Whether `transform` receives the positions of the examples, int32 `[B]`, in place of keys."""
    changes_tests: ClassVar[bool] = True
    "Whether the clients' own tests are transformed, too."

    def validate_images(self, input_shape: tuple[int, ...]) -> None:
        """Raise ConfigError if images of this shape, `(H, W, C)`, cannot be transformed."""

    def get_static(self) -> tuple[Any, ...]:
        """Return the values that the compiled transformation depends on."""
        return ()

    def make_parameters(
        self, rng: np.random.Generator, num_clients: int, input_shape: tuple[int, ...]
    ) -> tuple[Tree, Tree]:
        """Return the parameters of all clients.

        Args:
          rng: NumPy Generator of the skew.
          num_clients: number of clients, K.
          input_shape: shape of an image, `(H, W, C)`.

        Returns:
          Arrays with a leading axis K, and arrays that all clients share.
        """
        levels = self.draw_levels(rng, num_clients)
        return np.float32(getattr(self, self.strength)) * levels, ()

    @staticmethod
    @abstractmethod
    def transform(
        images: jax.Array, parameters: Tree, shared: Tree, keys: jax.Array, *static: Any
    ) -> jax.Array:
        """Transform images of one client.

        Args:
          images: float32 `[B, H, W, C]` with values in [0, 1].
          parameters: the client's parameters, without the axis of clients.
          shared: the parameters that all clients share.
          keys: PRNG keys of the examples, `[B]`.
          *static: result of `get_static`.

        Returns:
          The images, float32 `[B, H, W, C]`.
        """

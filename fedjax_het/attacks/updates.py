"""Attacks on the updates of malicious clients."""

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from jax.scipy.stats import norm

from fedjax_het.aggregation.base import ClientUpdates, average_changes
from fedjax_het.attacks.base import UpdateAttack
from fedjax_het.utils.arrays import expand_like, normalize_weights
from fedjax_het.utils.config import Bounds, NonNegativeFloat, PositiveFloat

Tree = Any


@dataclass(frozen=True, kw_only=True)
class SignFlip(UpdateAttack):
    """Malicious clients send the negative of their update, times a factor.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates
      >>> from fedjax_het.attacks import SignFlip
      >>> updates = ClientUpdates(jnp.ones((2, 1)), jnp.ones(2) / 2, jnp.ones(2, bool))
      >>> SignFlip(scale=3).forge(updates, jnp.array([True, False]), jax.random.key(0)).tolist()
      [[-3.0], [-3.0]]
    """

    scale: PositiveFloat = 1.0
    "Factor of the negative update."
    name: ClassVar[str] = "sign_flip"
    description: ClassVar[str] = "malicious clients send the negative of their update"

    def forge(self, updates, is_malicious, key):
        """Return the negative updates."""
        return jax.tree.map(lambda a: -self.scale * a, updates.changes)


@dataclass(frozen=True, kw_only=True)
class ScaledUpdate(UpdateAttack):
    """Malicious clients send their update times a factor (Bagdasaryan et al., AISTATS 2020).

    With the factor K / server_lr a single client replaces the model by its own ("model
    replacement").

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates
      >>> from fedjax_het.attacks import ScaledUpdate
      >>> updates = ClientUpdates(jnp.ones((1, 1)), jnp.ones(1), jnp.ones(1, bool))
      >>> ScaledUpdate(scale=10).forge(updates, jnp.array([True]), jax.random.key(0)).tolist()
      [[10.0]]
    """

    scale: PositiveFloat = 10.0
    "Factor of the update."
    name: ClassVar[str] = "scaled_update"
    description: ClassVar[str] = "malicious clients send a multiple of their update"

    def forge(self, updates, is_malicious, key):
        """Return the multiples."""
        return jax.tree.map(lambda a: self.scale * a, updates.changes)


@dataclass(frozen=True, kw_only=True)
class GaussianUpdate(UpdateAttack):
    """Malicious clients send Gaussian noise in place of their update (Blanchard et al., 2017).

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates
      >>> from fedjax_het.attacks import GaussianUpdate
      >>> updates = ClientUpdates(jnp.ones((2, 5)), jnp.ones(2) / 2, jnp.ones(2, bool))
      >>> GaussianUpdate().forge(updates, jnp.array([True, False]), jax.random.key(0)).shape
      (2, 5)
    """

    std: PositiveFloat = 1.0
    "Standard deviation of every entry."
    name: ClassVar[str] = "gaussian"
    description: ClassVar[str] = "malicious clients send Gaussian noise"

    def forge(self, updates, is_malicious, key):
        """Draw the noise of every client."""
        return optax.tree.scale(self.std, optax.tree.random_like(key, updates.changes))


@dataclass(frozen=True, kw_only=True)
class ALIE(UpdateAttack):
    """A Little Is Enough (Baruch, Baruch and Goldberg, NeurIPS 2019, Algorithm 3).

    All malicious clients send mean - z std of the updates of the malicious clients, by coordinate.
    By default z = Phi^-1((n - s) / n), with n the clients of the round, m of which are malicious,
    and s = floor(n / 2 + 1) - m.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates
      >>> from fedjax_het.attacks import ALIE
      >>> updates = ClientUpdates(jnp.array([[1.0], [3.0]]), jnp.ones(2) / 2, jnp.ones(2, bool))
      >>> ALIE(z=1.0).forge(updates, jnp.array([True, True]), jax.random.key(0)).tolist()
      [[1.0], [1.0]]
    """

    z: Annotated[float, Bounds(0, 100)] | None = None
    "Number of standard deviations; None: z of the paper, Phi^-1((n - s) / n)."
    name: ClassVar[str] = "alie"
    description: ClassVar[str] = "malicious clients hide inside the spread of updates (ALIE)"

    def forge(self, updates, is_malicious, key):
        """Return the shifted mean of the malicious clients for every client."""
        is_known = is_malicious & updates.is_present
        count = is_known.sum()
        weights = is_known / jnp.maximum(count, 1)
        mean = average_changes(updates.changes, weights)
        deviations = jax.tree.map(lambda a, m: jnp.square(a - m), updates.changes, mean)
        z: Any = self.z
        if z is None:
            n = updates.num_present
            num_supporters = jnp.floor(n / 2 + 1) - count
            share = (n - num_supporters) / jnp.maximum(n, 1)
            z = jnp.clip(norm.ppf(jnp.clip(share, 0, 1 - 1e-6)), 0, None)
        shifted = jax.tree.map(
            lambda m, v: m - z * jnp.sqrt(v), mean, average_changes(deviations, weights)
        )
        return _tile(shifted, updates)


@dataclass(frozen=True, kw_only=True)
class InnerProduct(UpdateAttack):
    """Inner-product manipulation (Xie, Koyejo and Gupta, UAI 2019).

    All malicious clients send -scale times the mean of the other clients' updates.

    Example:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates
      >>> from fedjax_het.attacks import InnerProduct
      >>> updates = ClientUpdates(jnp.array([[1.0], [3.0]]), jnp.ones(2) / 2, jnp.ones(2, bool))
      >>> is_malicious = jnp.array([True, False])
      >>> InnerProduct(scale=2).forge(updates, is_malicious, jax.random.key(0)).tolist()
      [[-6.0], [-6.0]]
    """

    scale: NonNegativeFloat = 0.5
    "Factor of the negative mean; values below 1 are hard to see, large values do more harm."
    name: ClassVar[str] = "inner_product"
    description: ClassVar[str] = "malicious clients send the negative mean of the others"

    def forge(self, updates, is_malicious, key):
        """Return the negative mean for every client."""
        weights = normalize_weights(jnp.where(is_malicious, 0, updates.weights))
        mean = average_changes(updates.changes, weights)
        return _tile(jax.tree.map(lambda a: -self.scale * a, mean), updates)


def replace_malicious(updates: ClientUpdates, is_malicious: jax.Array, forged: Tree) -> Tree:
    """Replace the changes of malicious clients by forged changes.

    Args:
      updates: the changes of all clients.
      is_malicious: bool `[S]`.
      forged: changes like `updates.changes`.

    Returns:
      Changes like `updates.changes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fedjax_het.aggregation import ClientUpdates
      >>> from fedjax_het.attacks.updates import replace_malicious
      >>> updates = ClientUpdates(jnp.ones((2, 1)), jnp.ones(2) / 2, jnp.ones(2, bool))
      >>> replace_malicious(updates, jnp.array([True, False]), jnp.zeros((2, 1))).tolist()
      [[0.0], [1.0]]
    """
    return jax.tree.map(
        lambda a, f: jnp.where(expand_like(is_malicious, a), f, a), updates.changes, forged
    )


def _tile(change: Tree, updates: ClientUpdates) -> Tree:
    """Return one change for every client."""
    num_clients = len(updates.weights)
    return jax.tree.map(lambda a: jnp.broadcast_to(a, (num_clients, *a.shape)), change)

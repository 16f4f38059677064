"""Skews of numbers of examples: unequal clients and a long-tailed distribution of the classes."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np

from fedjax_het.data.sampling import shuffle_by_class, systematic_round, take_quota
from fedjax_het.skews.base import Skew
from fedjax_het.utils.config import Bounds, NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class AmountSkew(Skew):
    """A skew that gives clients other examples, on the host.

    Example:
      >>> from fedjax_het.skews import SKEWS, AmountSkew
      >>> [name for name, kind in SKEWS.items() if issubclass(kind.make, AmountSkew)]
      ['long_tail', 'quantity', 'power_law']
    """

    @abstractmethod
    def select_examples(
        self,
        rng: np.random.Generator,
        clients: list[np.ndarray],
        labels: np.ndarray,
        num_classes: int,
    ) -> list[np.ndarray]:
        """Return the positions of the examples of each client.

        Args:
          rng: NumPy Generator of the skew.
          clients: positions of the examples of each of the K clients.
          labels: labels of the training examples, integers `[N]`.
          num_classes: number of classes, C.

        Returns:
          K arrays of positions.
        """


@dataclass(frozen=True, kw_only=True)
class SizeSkew(AmountSkew):
    """A skew that multiplies the sizes of the clients by drawn factors.

    The class counts n_kc of the partition become proportional to f_k n_kc for each class, and all
    examples of a class are divided in these proportions. Class proportions within a client change
    only as far as the other clients' sizes require it. On an `iid` partition client k has the share
    f_k / sum_j f_j of the examples.

    Clients that are users or domains keep their own examples: client k keeps the share
    f_k / max_j f_j of them, and no client holds the other examples.
    """

    @abstractmethod
    def draw_factors(self, rng: np.random.Generator, num_clients: int) -> np.ndarray:
        """Return the factor of each client, float64 `[K]`."""

    def select_own_examples(
        self, rng: np.random.Generator, clients: list[np.ndarray]
    ) -> list[np.ndarray]:
        """Return a random share of each client's own examples, at least one if there are any.

        Args:
          rng: NumPy Generator of the skew.
          clients: positions of the examples of each of the K clients, users or domains.

        Returns:
          K arrays of positions.
        """
        factors = self.draw_factors(rng, len(clients))
        counts = [
            max(round(share * len(own)), 1)
            for share, own in zip(factors / factors.max(), clients, strict=True)
        ]
        return [rng.permutation(own)[:n] for own, n in zip(clients, counts, strict=True)]

    def select_examples(self, rng, clients, labels, num_classes):
        """Divide the examples of each class again."""
        counts = np.stack([np.bincount(labels[own], minlength=num_classes) for own in clients])
        weights = self.draw_factors(rng, len(clients))[:, None] * counts  # [K, C]
        totals = weights.sum(0)
        shares = np.divide(weights, totals, out=np.zeros(counts.shape), where=totals > 0)
        class_sizes = counts.sum(0)
        new_counts = [
            systematic_round(rng, share, size) if size else np.zeros(len(clients), np.int64)
            for share, size in zip(shares.T, class_sizes, strict=True)
        ]
        held = np.concatenate(clients)
        pools = [held[own] for own in shuffle_by_class(rng, labels[held], num_classes)]
        return take_quota(pools, np.stack(new_counts))


@dataclass(frozen=True, kw_only=True)
class Quantity(SizeSkew):
    """Sizes drawn from a symmetric Dirichlet distribution, as in NIID-Bench's quantity skew.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import Quantity
      >>> Quantity(alpha=0.5).draw_factors(np.random.default_rng(0), num_clients=3).shape
      (3,)
    """

    alpha: Annotated[float, Bounds(1e-3, 1e6)] = 0.5
    "Concentration of the Dirichlet distribution; a small value gives very unequal clients."
    name: ClassVar[str] = "quantity"
    description: ClassVar[str] = "unequal numbers of examples, by a Dirichlet distribution"
    strength: ClassVar[str] = "alpha"
    neutral: ClassVar[float | None] = None

    def draw_factors(self, rng, num_clients):
        """Draw the shares."""
        return rng.dirichlet(np.full(num_clients, self.alpha)) + 1e-12


@dataclass(frozen=True, kw_only=True)
class PowerLaw(SizeSkew):
    """Sizes that follow a power law of the rank: the client of rank r has r^-exponent.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import PowerLaw
      >>> factors = PowerLaw(exponent=1.0).draw_factors(np.random.default_rng(0), num_clients=4)
      >>> sorted(factors.tolist())[::3]
      [0.25, 1.0]
    """

    exponent: NonNegativeFloat = 1.0
    "Exponent; 0 changes nothing."
    name: ClassVar[str] = "power_law"
    description: ClassVar[str] = "unequal numbers of examples, by a power law of the rank"
    strength: ClassVar[str] = "exponent"

    def draw_factors(self, rng, num_clients):
        """Assign the ranks at random."""
        return (1.0 + rng.permutation(num_clients)) ** -self.exponent


@dataclass(frozen=True, kw_only=True)
class LongTail(AmountSkew):
    """A long-tailed distribution of the classes, as in Cui et al. (CVPR 2019).

    Class c of C keeps the share ratio^(-c / (C - 1)) of its examples, drawn at random from all
    clients. The other examples are used by no client.

    Example:
      >>> from fedjax_het.skews import LongTail
      >>> LongTail(ratio=1).is_neutral
      True
    """

    ratio: Annotated[float, Bounds(1)] = 10.0
    "Number of examples of the first class divided by the number of the last one."
    needs_classes: ClassVar[bool] = True
    name: ClassVar[str] = "long_tail"
    description: ClassVar[str] = "few examples of later classes, in the data of all clients"
    strength: ClassVar[str] = "ratio"
    neutral: ClassVar[float | None] = 1

    def select_examples(self, rng, clients, labels, num_classes):
        """Drop examples of later classes."""
        held = np.concatenate(clients)
        # Each example once, in the order of the clients, which may share examples.
        held = held[np.sort(np.unique(held, return_index=True)[1])]
        exponents = -np.arange(num_classes) / max(num_classes - 1, 1)
        class_sizes = np.bincount(labels[held], minlength=num_classes)
        kept_counts = np.rint(class_sizes * self.ratio**exponents).astype(np.int64)
        kept_counts = np.maximum(kept_counts, class_sizes > 0)
        pools = shuffle_by_class(rng, labels[held], num_classes)
        pairs = zip(pools, kept_counts, strict=True)
        kept = held[np.concatenate([pool[:count] for pool, count in pairs])]
        return [own[np.isin(own, kept)] for own in clients]

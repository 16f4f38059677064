"""`Attack`, the base class of all attacks of malicious clients."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import numpy as np

from fedjax_het.aggregation import ClientUpdates
from fedjax_het.skews import LabelSkew, Skew
from fedjax_het.utils.config import UnitInterval
from fedjax_het.utils.kinds import Kind

Tree = Any
_STREAM = 0xA77AC4  # of a partition's seed


@dataclass(frozen=True, kw_only=True)
class Attack(Kind):
    """An attack of some clients; a value of the setting `attack`.

    Example:
      >>> from fedjax_het.attacks import Attack, SignFlip
      >>> isinstance(SignFlip(fraction=0.3), Attack)
      True
    """

    fraction: UnitInterval = 0.2
    "Fraction of the clients that are malicious, rounded to a whole number of clients."
    choice: Literal["random", "first"] = "random"
    """Malicious clients: "random", drawn with the seed of the partition; "first", the clients with
    the smallest ids."""
    strength: ClassVar[str] = "fraction"

    def choose_clients(self, num_clients: int, seed: int) -> np.ndarray:
        """Return the malicious clients.

        Several attacks with equal fractions and choices have equal malicious clients.

        Args:
          num_clients: number of clients, K.
          seed: seed of the partition.

        Returns:
          Bool `[K]`: whether the client is malicious.

        Example:
          >>> from fedjax_het.attacks import SignFlip
          >>> SignFlip(fraction=0.5, choice="first").choose_clients(4, seed=0).tolist()
          [True, True, False, False]
        """
        order = np.arange(num_clients)
        if self.choice == "random":
            order = np.random.default_rng([seed, _STREAM]).permutation(num_clients)
        is_malicious = np.zeros(num_clients, bool)
        is_malicious[order[: round(self.fraction * num_clients)]] = True
        return is_malicious

    def list_warnings(self, run):
        """Return a warning if no client is malicious."""
        if self.choose_clients(run.num_clients, seed=0).any():
            return []
        setting = f"{self.name}:fraction={self.fraction:g}"
        return [f"attack {setting}: no client of {run.num_clients} is malicious"]


@dataclass(frozen=True, kw_only=True)
class UpdateAttack(Attack):
    """An attack by which malicious clients send other updates.

    Example:
      >>> from fedjax_het.attacks import SignFlip, UpdateAttack
      >>> issubclass(SignFlip, UpdateAttack)
      True
    """

    @abstractmethod
    def forge(self, updates: ClientUpdates, is_malicious: jax.Array, key: jax.Array) -> Tree:
        """Return the changes that malicious clients send.

        Args:
          updates: the changes of all clients after their own training.
          is_malicious: bool `[S]`.
          key: PRNG key of the attack and the round.

        Returns:
          Changes like `updates.changes`; the entries of other clients are ignored.
        """


@dataclass(frozen=True, kw_only=True)
class DataAttack(Attack):
    """An attack by which malicious clients train on other data.

    Example:
      >>> from fedjax_het.attacks import DataAttack, LabelFlip
      >>> issubclass(LabelFlip, DataAttack)
      True
    """

    @abstractmethod
    def make_skews(self, seed: int) -> tuple[Skew, ...]:
        """Return the data of malicious clients as skews.

        Args:
          seed: seed of the partition.

        Returns:
          The skews.
        """

    def change_labels(
        self, positions: np.ndarray, labels: np.ndarray, num_classes: int, seed: int
    ) -> np.ndarray:
        """Return the labels with which malicious clients train.

        Args:
          positions: positions of the examples of malicious clients, `[N]`.
          labels: their labels, `[N]`.
          num_classes: number of classes.
          seed: seed of the partition.

        Returns:
          Labels, `[N]`; by default the labels of the examples.
        """
        del positions, num_classes, seed
        return labels


@dataclass(frozen=True, kw_only=True)
class LabelAttack(DataAttack):
    """An attack by which malicious clients train with other labels.

    Example:
      >>> from fedjax_het.attacks import LabelAttack, LabelFlip
      >>> issubclass(LabelFlip, LabelAttack)
      True
    """

    @abstractmethod
    def make_label_map(self, num_classes: int) -> np.ndarray:
        """Return the label with which malicious clients train in place of each class.

        Args:
          num_classes: number of classes, C.

        Returns:
          Classes, int32 `[C]`.
        """

    def make_skews(self, seed):
        """Return the false labels."""
        return (MaliciousLabels(attack=self, seed=seed),)

    def change_labels(self, positions, labels, num_classes, seed):
        """Map the labels."""
        del positions, seed
        return self.make_label_map(num_classes)[labels]


@dataclass(frozen=True, kw_only=True)
class MaliciousData(Skew):
    """The data of malicious clients as a skew.

    Example:
      >>> from fedjax_het.attacks import LabelFlip
      >>> from fedjax_het.attacks.base import MaliciousLabels
      >>> MaliciousLabels(attack=LabelFlip()).source
      "attack 'label_flip'"
    """

    attack: Any = None
    "A `DataAttack`."
    seed: int = 0
    "Seed of the partition."
    name: ClassVar[str] = "attack"
    strength: ClassVar[str] = "seed"
    neutral: ClassVar[float | None] = None

    @property
    def source(self):
        """Setting and kind of the attack."""
        return f"attack {self.attack.name!r}"


@dataclass(frozen=True, kw_only=True)
class MaliciousLabels(MaliciousData, LabelSkew):
    """The labels of malicious clients as a skew of the labels, which tests do not have.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.attacks import LabelFlip
      >>> from fedjax_het.attacks.base import MaliciousLabels
      >>> skew = MaliciousLabels(attack=LabelFlip(fraction=0.5, choice="first"), seed=0)
      >>> clients, labels = [np.array([0]), np.array([1])], np.array([3, 3])
      >>> skew.change_labels(np.random.default_rng(0), clients, labels, 10)
      array([6, 3])
    """

    description: ClassVar[str] = "labels of malicious clients"

    def change_labels(self, rng, clients, labels, num_classes):
        """Replace the labels of the malicious clients."""
        malicious = np.flatnonzero(self.attack.choose_clients(len(clients), self.seed))
        own = np.concatenate([np.empty(0, int), *(clients[k] for k in malicious)])
        changed = np.array(labels)
        changed[own] = self.attack.change_labels(own, changed[own], num_classes, self.seed)
        return changed

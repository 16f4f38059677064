"""Skews of the labels of examples: label noise and concept shift."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedjax_het.skews.base import Levels, LevelSkew
from fedjax_het.utils.config import UnitInterval


@dataclass(frozen=True, kw_only=True)
class LabelSkew(LevelSkew):
    """A skew that gives examples of a client other labels, on the host.

    Example:
      >>> from fedjax_het.skews import SKEWS, LabelSkew
      >>> [name for name, kind in SKEWS.items() if issubclass(kind.make, LabelSkew)]
      ['label_noise', 'concept']
    """

    needs_classes: ClassVar[bool] = True

    @abstractmethod
    def change_labels(
        self,
        rng: np.random.Generator,
        clients: list[np.ndarray],
        labels: np.ndarray,
        num_classes: int,
    ) -> np.ndarray:
        """Return the labels of all training examples as the clients see them.

        Args:
          rng: NumPy Generator of the skew.
          clients: positions of the examples of each of the K clients, which share none.
          labels: labels of the training examples, integers `[N]`.
          num_classes: number of classes, C.

        Returns:
          Labels, integers `[N]`.
        """

    def make_label_maps(
        self, rng: np.random.Generator, num_clients: int, num_classes: int
    ) -> np.ndarray | None:
        """Return the class that stands for each class in a client's own test, or None.

        Args:
          rng: NumPy Generator of the skew, in the state of `change_labels`.
          num_clients: number of clients, K.
          num_classes: number of classes, C.

        Returns:
          Classes, int32 `[K, C]`; None if tests have the labels of the data set.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class LabelNoise(LabelSkew):
    """Wrong labels: each example of client k has a wrong label with probability rate * level_k.

    Tests have the true labels.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import LabelNoise
      >>> skew, labels = LabelNoise(rate=1.0, kind="pair"), np.array([0, 1, 2])
      >>> skew.change_labels(np.random.default_rng(0), [np.arange(3)], labels, num_classes=3)
      array([1, 2, 0])
    """

    rate: UnitInterval = 0.4
    "Largest probability of a wrong label."
    kind: Literal["symmetric", "pair"] = "symmetric"
    """Wrong label of class c: "symmetric", one of the other classes with equal probabilities;
    "pair", class c + 1, and class 0 for the last one."""
    levels: Levels = "equal"
    "Levels of the clients, see `LevelSkew`."
    name: ClassVar[str] = "label_noise"
    description: ClassVar[str] = "wrong training labels, symmetric or of the next class"
    strength: ClassVar[str] = "rate"

    def change_labels(self, rng, clients, labels, num_classes):
        """Replace labels at random."""
        changed = np.array(labels)
        levels = self.draw_levels(rng, len(clients)).astype(np.float64)
        for level, positions in zip(levels, clients, strict=True):
            is_wrong = rng.random(len(positions)) < self.rate * level
            shifts = np.ones(len(positions), np.int64)
            if self.kind == "symmetric":
                shifts = rng.integers(1, max(num_classes, 2), len(positions))
            wrong = (labels[positions] + shifts) % num_classes
            changed[positions] = np.where(is_wrong, wrong, labels[positions])
        return changed


@dataclass(frozen=True, kw_only=True)
class ConceptShift(LabelSkew):
    """Another meaning of the labels: a permutation of a share of the classes in each group.

    The first group has the labels of the data set. A client's own test has the client's labels.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.skews import ConceptShift
      >>> ConceptShift(share=1.0).make_label_maps(np.random.default_rng(0), 4, 10).shape
      (4, 10)
    """

    share: UnitInterval = 1.0
    "Share of the classes that are permuted; with less than two classes nothing changes."
    levels: Literal["groups"] = "groups"
    "Groups of clients."
    name: ClassVar[str] = "concept"
    description: ClassVar[str] = "permuted classes, another permutation for each group of clients"
    strength: ClassVar[str] = "share"

    def change_labels(self, rng, clients, labels, num_classes):
        """Apply the label map of each client."""
        changed = np.array(labels)
        maps = self.make_label_maps(rng, len(clients), num_classes)
        for label_map, positions in zip(maps, clients, strict=True):
            changed[positions] = label_map[labels[positions]]
        return changed

    def make_label_maps(self, rng, num_clients, num_classes):
        """Return a cyclic permutation of the drawn classes for each group, by client."""
        maps = np.tile(np.arange(num_classes, dtype=np.int32), (self.groups, 1))
        for row in maps[1:]:
            moved = rng.permutation(num_classes)[: round(self.share * num_classes)]
            # A cycle has no fixed point, so every drawn class changes.
            row[moved] = np.roll(moved, 1)
        return maps[self.draw_groups(rng, num_clients)]

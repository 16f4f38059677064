"""Attacks on the labels of malicious clients."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from fedjax_het.attacks.base import LabelAttack


@dataclass(frozen=True, kw_only=True)
class LabelFlip(LabelAttack):
    """Malicious clients train with false labels on all of their examples.

    Example:
      >>> from fedjax_het.attacks import LabelFlip
      >>> LabelFlip().make_label_map(4).tolist()
      [3, 2, 1, 0]
    """

    labels: Literal["reversed", "next"] = "reversed"
    """Label in place of class c: "reversed", C - 1 - c (Fang et al., USENIX Security 2020); "next",
    c + 1, and 0 for the last class."""
    name: ClassVar[str] = "label_flip"
    description: ClassVar[str] = "malicious clients train with false labels"

    def make_label_map(self, num_classes):
        """Return the false labels."""
        classes = np.arange(num_classes, dtype=np.int32)
        return classes[::-1].copy() if self.labels == "reversed" else np.roll(classes, -1)

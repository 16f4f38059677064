"""The methods, by name."""

from fedjax_het.algorithms.registry import ALGORITHMS, Entry

__all__ = ["ALGORITHMS", "Entry"]

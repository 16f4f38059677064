"""The methods, by name."""

from fedjax_het.algorithms.registry import ALGORITHMS, Entry, entry_of, register

__all__ = ["ALGORITHMS", "Entry", "entry_of", "register"]

"""64-bit arrays in tests."""

import importlib

import jax


def enable_x64(enabled=True):
    """Return a context whose arrays may have 64 bits; `jax.enable_x64` exists since jax 0.8."""
    if hasattr(jax, "enable_x64"):
        return jax.enable_x64(enabled)
    return importlib.import_module("jax.experimental").enable_x64(enabled)

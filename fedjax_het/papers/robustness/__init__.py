"""Experiments on malicious clients."""

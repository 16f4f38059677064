"""Differential privacy of clients: accuracy against epsilon."""

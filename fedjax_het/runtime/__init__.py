"""Execution of runs and sweeps, and their results."""

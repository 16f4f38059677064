"""Figures of runs, sweeps and tables."""

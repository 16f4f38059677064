"""Plots of runs, sweeps and tables."""

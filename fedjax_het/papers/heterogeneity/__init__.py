"""Experiments on kinds of heterogeneity, which belong to no paper."""

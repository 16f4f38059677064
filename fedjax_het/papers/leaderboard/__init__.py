"""Leaderboards of methods under one kind of heterogeneity, with equal tuning budgets."""

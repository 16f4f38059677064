"""Hyperparameter search with equal budgets for all methods."""

from fedjax_het.tuning.search_space import get_search_space as get_search_space
from fedjax_het.tuning.tuner import TuningResult as TuningResult
from fedjax_het.tuning.tuner import tune as tune

"""How unequally clients are served, of their accuracies on tests of their own."""

import numpy as np


def compute_fairness(accuracy: np.ndarray) -> dict[str, np.ndarray]:
    """Of shares `[rounds, K]`, NaN for a client without a test; in float64, `[rounds]` each.

    worst_decile: the mean of the worst tenth of clients (rounded up). accuracy_variance: over
    clients. accuracy_gini: the mean absolute difference of two clients, by twice the mean; 0 where
    all are served alike. NaN in rounds in which nobody was tested.
    """
    names = ("worst_decile", "accuracy_variance", "accuracy_gini")
    values = {name: np.full(len(accuracy), np.nan) for name in names}
    for r, row in enumerate(np.asarray(accuracy, np.float64)):
        tested = np.sort(row[np.isfinite(row)])
        if not len(tested):
            continue
        worst_decile = tested[: -(-len(tested) // 10)]
        ranks = np.arange(1, len(tested) + 1)
        total = tested.sum()
        weighted_rank_sum = (2 * ranks - len(tested) - 1) @ tested
        gini = weighted_rank_sum / (len(tested) * total) if total > 0 else 0.0
        for name, value in zip(names, (worst_decile.mean(), tested.var(), gini), strict=True):
            values[name][r] = value
    return values

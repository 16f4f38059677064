"""How unequally clients are served, of their accuracies on tests of their own."""

import numpy as np


def fairness(accuracy: np.ndarray) -> dict[str, np.ndarray]:
    """Of shares `[rounds, K]`, NaN for a client without a test; in float64, `[rounds]` each.

    worst_decile: the mean of the worst tenth of clients (rounded up). accuracy_variance: over
    clients. accuracy_gini: the mean absolute difference of two clients, by twice the mean; 0 where
    all are served alike. NaN in rounds in which nobody was tested.
    """
    names = ("worst_decile", "accuracy_variance", "accuracy_gini")
    found = {name: np.full(len(accuracy), np.nan) for name in names}
    for r, row in enumerate(np.asarray(accuracy, np.float64)):
        known = np.sort(row[np.isfinite(row)])
        if not len(known):
            continue
        worst = known[: -(-len(known) // 10)]
        ranks = np.arange(1, len(known) + 1)
        total = known.sum()
        spread = (2 * ranks - len(known) - 1) @ known
        gini = spread / (len(known) * total) if total > 0 else 0.0
        for name, value in zip(names, (worst.mean(), known.var(), gini), strict=True):
            found[name][r] = value
    return found

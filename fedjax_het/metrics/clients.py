"""Fairness among clients, from their accuracies on their own tests."""

import numpy as np


def compute_fairness(accuracy: np.ndarray) -> dict[str, np.ndarray]:
    """Compute how unequally a model serves the clients in each round.

    Args:
      accuracy: accuracies `[rounds, K]` in [0, 1]; NaN for a client without a test.

    Returns:
      Three float64 arrays `[rounds]` by name, NaN in rounds without any tested client:

      * `worst_decile`: mean accuracy of the worst tenth of the clients (rounded up).
      * `accuracy_variance`: variance over clients.
      * `accuracy_gini`: Gini coefficient, the mean absolute difference of two clients divided by
        twice the mean; 0 if all clients have equal accuracy.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.metrics.clients import compute_fairness
      >>> fairness = compute_fairness(np.array([[0.5, 1.0, np.nan]]))
      >>> {name: float(values[0]) for name, values in fairness.items()}
      {'worst_decile': 0.5, 'accuracy_variance': 0.0625, 'accuracy_gini': 0.16666666666666666}
    """
    names = ("worst_decile", "accuracy_variance", "accuracy_gini")
    values = {name: np.full(len(accuracy), np.nan) for name in names}
    for r, row in enumerate(np.asarray(accuracy, np.float64)):
        accuracies = np.sort(row[np.isfinite(row)])
        if not len(accuracies):
            continue
        worst_decile = accuracies[: -(-len(accuracies) // 10)]
        ranks = np.arange(1, len(accuracies) + 1)
        total = accuracies.sum()
        weighted_rank_sum = (2 * ranks - len(accuracies) - 1) @ accuracies
        gini = weighted_rank_sum / (len(accuracies) * total) if total > 0 else 0.0
        for name, value in zip(names, (worst_decile.mean(), accuracies.var(), gini), strict=True):
            values[name][r] = value
    return values

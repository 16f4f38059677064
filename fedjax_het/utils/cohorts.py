"""Number of the clients of a round."""


def compute_cohort_size(num_clients: int, participation: float) -> int:
    """Return the number of clients sampled each round.

    Args:
      num_clients: clients of the federation, K.
      participation: share of the clients, rounded down to a number of at least 1.

    Returns:
      The number of clients, S.

    Example:
      >>> from fedjax_het.utils.cohorts import compute_cohort_size
      >>> compute_cohort_size(10, 0.25)
      2
    """
    return max(1, int(num_clients * participation + 1e-9))

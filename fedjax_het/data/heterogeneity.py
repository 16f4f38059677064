"""Measures of heterogeneity: distances of the clients' classes and features, and unequal sizes."""

import numpy as np


def compute_hellinger_distance(distributions: np.ndarray) -> float:
    """Compute the Hellinger distance of several distributions, as in FedArtML.

        sqrt(sum_{i, j} ||sqrt(p_i) - sqrt(p_j)||^2 / (2 K (K - 1)))

    Cost: K C operations; no pair of distributions is compared.

    Args:
      distributions: distributions p_k, floats `[K, C]`.

    Returns:
      The distance, in [0, 1]; 0 for one distribution.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.heterogeneity import compute_hellinger_distance
      >>> round(compute_hellinger_distance(np.eye(3)), 6)
      1.0
    """
    num_clients = len(distributions)
    if num_clients == 1:
        return 0.0
    # sum_{i, j} ||a_i - a_j||^2 = 2 K sum_i ||a_i||^2 - 2 ||sum_i a_i||^2 with ||a_i||^2 = 1.
    squared_norm = np.square(np.sqrt(distributions).sum(0)).sum()
    total = max(2 * num_clients**2 - 2 * squared_norm, 0.0)
    return float(np.sqrt(min(total / (2 * num_clients * (num_clients - 1)), 1.0)))


def compute_jensen_shannon_distance(distributions: np.ndarray) -> float:
    """Compute the Jensen-Shannon distance of several distributions, as in FedArtML.

        sqrt((H(mean_k p_k) - mean_k H(p_k)) / log(K)),  with log(2) for K = 1

    Args:
      distributions: distributions p_k, floats `[K, C]`.

    Returns:
      The distance, in [0, 1]; 0 for equal distributions.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.heterogeneity import compute_jensen_shannon_distance
      >>> round(compute_jensen_shannon_distance(np.eye(3)), 6)
      1.0
    """
    mean = distributions.mean(0, keepdims=True)
    divergence = compute_entropies(mean)[0] - compute_entropies(distributions).mean()
    divergence = max(divergence / np.log(max(len(distributions), 2)), 0.0)
    return float(min(np.sqrt(divergence), 1.0))


def compute_total_variation(distributions: np.ndarray, pooled: np.ndarray) -> float:
    """Compute the mean total variation distance of distributions from the pooled one.

        mean_k 1/2 sum_c |p_k(c) - p(c)|

    Twice this number is the earth mover's distance of Zhao et al. (2018, arXiv:1806.00582).

    Args:
      distributions: distributions p_k, floats `[K, C]`.
      pooled: distribution p of the examples of all clients, floats `[C]`.

    Returns:
      The distance, in [0, 1].

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.heterogeneity import compute_total_variation
      >>> compute_total_variation(np.eye(2), np.array([0.5, 0.5]))
      0.5
    """
    return float(np.abs(distributions - pooled).sum(1).mean() / 2)


def compute_entropies(distributions: np.ndarray) -> np.ndarray:
    """Compute the entropy of each distribution.

    Args:
      distributions: distributions, floats `[K, C]`.

    Returns:
      Entropies in nats, `[K]`.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.heterogeneity import compute_entropies
      >>> compute_entropies(np.array([[0.5, 0.5], [1.0, 0.0]])).round(3).tolist()
      [0.693, 0.0]
    """
    logs = np.log(distributions, out=np.zeros_like(distributions), where=distributions > 0)
    return 0.0 - (distributions * logs).sum(1)


def compute_gini(values: np.ndarray) -> float:
    """Compute the Gini coefficient: half the relative mean absolute difference of two values.

    Args:
      values: numbers >= 0, `[K]`.

    Returns:
      The coefficient, in [0, 1); 0 if all values are equal.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.heterogeneity import compute_gini
      >>> compute_gini(np.array([0, 0, 4, 4]))
      0.5
    """
    total, count = values.sum(), len(values)
    ranks = 2 * np.arange(1, count + 1) - count - 1
    return float((ranks * np.sort(values)).sum() / (count * total)) if total else 0.0


def compute_frechet_distance(
    mean: np.ndarray, covariance: np.ndarray, other_mean: np.ndarray, other_covariance: np.ndarray
) -> float:
    """Compute the squared Frechet distance of two normal distributions, as in the FID.

        ||m - m'||^2 + tr(S + S' - 2 (S S')^(1/2))

    Source: Heusel et al., "GANs Trained by a Two Time-Scale Update Rule", NeurIPS 2017, equation 6.

    Args:
      mean: mean m, floats `[F]`.
      covariance: covariance S, floats `[F, F]`.
      other_mean: mean m', floats `[F]`.
      other_covariance: covariance S', floats `[F, F]`.

    Returns:
      The squared distance, >= 0.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.heterogeneity import compute_frechet_distance
      >>> compute_frechet_distance(np.zeros(2), np.eye(2), np.ones(2), 4 * np.eye(2))
      4.0
    """
    # S S' has the eigenvalues of the symmetric matrix R S' R with R = S^(1/2).
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0))) @ vectors.T
    products = np.linalg.eigvalsh(root @ other_covariance @ root)
    trace = np.trace(covariance) + np.trace(other_covariance)
    trace -= 2 * np.sqrt(np.maximum(products, 0)).sum()
    return float(np.square(mean - other_mean).sum() + max(trace, 0.0))


def compute_feature_distances(
    features: np.ndarray, owners: np.ndarray, num_clients: int
) -> np.ndarray:
    """Compute the distance of each client's features from the features of all clients.

    The distance is `compute_frechet_distance` of the means and covariances, in units of the total
    variance of all features. It does not change with the scale of the features.

    Args:
      features: features of the examples of all clients, floats `[M, F]`.
      owners: client of each example, integers `[M]`.
      num_clients: number of clients, K.

    Returns:
      Squared distances, float64 `[K]`; NaN for a client without examples.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.data.heterogeneity import compute_feature_distances
      >>> compute_feature_distances(np.array([[0.0], [2.0], [0.0], [2.0]]), np.arange(4) // 2, 3)
      array([ 0.,  0., nan])
    """
    features = np.asarray(features, np.float64)
    features = features - features.mean(0)
    variance = np.square(features).sum(1).mean()
    features = features / np.sqrt(variance) if variance > 0 else features
    pooled = features.T @ features / len(features)
    distances = np.full(num_clients, np.nan)
    clients, counts = np.unique(owners, return_counts=True)
    parts = np.split(features[np.argsort(owners, kind="stable")], np.cumsum(counts)[:-1])
    for client, own in zip(clients, parts, strict=True):
        mean = own.mean(0)
        covariance = (own - mean).T @ (own - mean) / len(own)
        distances[client] = compute_frechet_distance(np.zeros_like(mean), pooled, mean, covariance)
    return distances

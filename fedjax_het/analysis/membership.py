"""Membership inference: whether scores tell training examples from other examples."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from fedjax_het.data import Dataset, load_dataset
from fedjax_het.runtime.results import Result
from fedjax_het.utils.array_validation import to_array
from fedjax_het.utils.config import validate_arguments
from fedjax_het.utils.errors import require
from fedjax_het.utils.input_kinds import take_rows

FALSE_POSITIVE_RATE = 0.001


class AttackResult(NamedTuple):
    """Success of a membership attack by scores.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.analysis.membership import evaluate_membership_attack
      >>> evaluate_membership_attack(np.array([2.0, 3.0]), np.array([0.0, 1.0])).auc
      1.0
    """

    auc: float
    """Probability that a member scores above another example; 0.5 for a guess."""
    p_value: float
    """Mann and Whitney's test that the probability is 0.5."""
    found: float
    """Fraction of members above the score that one in a thousand others reach."""


def evaluate_membership_attack(members: np.ndarray, others: np.ndarray) -> AttackResult:
    """Evaluate a membership attack.

    Args:
      members: scores of members, `[N]`.
      others: scores of other examples, `[M]`.

    Returns:
      The success of the attack.

    Raises:
      ConfigError: if there is no score, or a score that is not finite.

    Example:
      >>> import numpy as np
      >>> from fedjax_het.analysis.membership import evaluate_membership_attack
      >>> evaluate_membership_attack(np.arange(4) + 0.5, np.arange(4)).auc
      0.625
    """
    from scipy import stats

    scores, expected = [], "finite scores, at least one"
    for name, values in (("members", members), ("others", others)):
        array = to_array(name, values, expected)
        is_valid = array.ndim == 1 and len(array) > 0 and array.dtype.kind in "fiub"
        is_valid = is_valid and bool(np.isfinite(array).all())
        require(is_valid, name, f"{array.dtype} {array.shape}", expected)
        scores.append(array.astype(np.float64))
    own, other = scores
    test_result = stats.mannwhitneyu(own, other)
    threshold = np.quantile(other, 1 - FALSE_POSITIVE_RATE, method="higher")
    auc = float(test_result.statistic) / (len(own) * len(other))
    return AttackResult(auc, float(test_result.pvalue), float((own > threshold).mean()))


@validate_arguments
def measure_membership_inference(
    result: Result, *, dataset: Dataset | None = None, client: int | None = None
) -> AttackResult:
    """Attack the final model of a run: examples with a small loss are guessed to be members.

    Members are the clients' training examples, the others are the test examples (Yeom et al., CSF
    2018, section 3.2). An attack with shadow models may find more.

    Cost: one pass over all examples.

    Args:
      result: a result with its final state and its partition, as `simulate` returns it.
      dataset: the user's data set (default: the data set of the run by its name).
      client: client whose model is attacked, with its own examples as members (default: the global
        model, with the examples of all clients).

    Returns:
      The success of the attack.

    Raises:
      ConfigError: for a result without state or partition, and for a model whose losses are not
        finite.

    Example:
      >>> from fedjax_het import RunSpec, simulate
      >>> from fedjax_het.analysis import measure_membership_inference
      >>> result = simulate(RunSpec("fedavg", "digits", model="mlp", num_clients=4, rounds=2))
      >>> 0.4 < measure_membership_inference(result).auc < 0.6
      True
    """
    partition = result.partition
    require(partition is not None, "result.partition", None, "a result that simulate returned")
    assert partition is not None
    dataset = load_dataset(result.spec.dataset) if dataset is None else dataset
    model = result.model(client)
    indices = partition.indices if client is None else partition.client_indices(client)
    members = np.unique(indices)

    def compute_scores(inputs, labels: np.ndarray) -> np.ndarray:
        outputs = jnp.asarray(model.logits(inputs))
        losses = model.task.kind.compute_losses(outputs, jnp.asarray(labels))
        return -np.asarray(losses, np.float64)

    return evaluate_membership_attack(
        compute_scores(take_rows(dataset.train_inputs, members), dataset.train_labels[members]),
        compute_scores(dataset.test_inputs, dataset.test_labels),
    )

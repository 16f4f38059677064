"""Membership inference on a trained model, against losses by NumPy."""

import numpy as np
import pytest
from support.data import make_user_dataset
from support.small_runs import final_model_logits, make_spec, run_spec

from fedjax_het import ConfigError, simulate
from fedjax_het.analysis import measure_membership_inference
from fedjax_het.data import dataset_from_arrays


def compute_losses(logits, labels):
    shifted = logits - logits.max(1, keepdims=True)
    return np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]


def test_area_is_the_share_of_pairs_in_order():
    dataset = make_user_dataset()
    result = run_spec(make_spec("fedavg", rounds=3))
    members = np.unique(result.partition.indices)
    swapped = dataset_from_arrays(
        *(dataset.test_inputs, dataset.test_labels),
        *(dataset.train_inputs[members], dataset.train_labels[members]),
        mean=dataset.mean,
        std=dataset.std,
        num_classes=dataset.num_classes,
    )
    own = compute_losses(final_model_logits(result, swapped), swapped.test_labels)
    others = compute_losses(final_model_logits(result, dataset), dataset.test_labels)
    pairs = own[:, None] < others[None]
    ties = own[:, None] == others[None]
    attack = measure_membership_inference(result, dataset=dataset)
    assert attack.auc == pytest.approx((pairs + ties / 2).mean(), abs=2e-3)


def test_overfitting_is_found():
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(80, 4, 4, 1)).astype(np.float32)
    labels = rng.integers(0, 3, 80)  # nothing to learn: a model can only remember
    dataset = dataset_from_arrays(inputs[:40], labels[:40], inputs[40:], labels[40:])
    settings = {"rounds": 100, "local_epochs": 5, "learning_rate": 0.01, "num_clients": 2}
    settings |= {"network_options": {"hidden": [64]}}
    spec = make_spec("fedavg", **settings, partition="iid", participation=1.0)
    result = simulate(spec, dataset=dataset, progress=None)
    attack = measure_membership_inference(result, dataset=dataset)
    assert attack.auc > 0.8 and attack.p_value < 1e-4


def test_a_result_without_partition_is_refused():
    result = run_spec(make_spec("fedavg", rounds=1))
    result.partition = None
    with pytest.raises(ConfigError, match=r"result\.partition = None: expected a result that"):
        measure_membership_inference(result, dataset=make_user_dataset())

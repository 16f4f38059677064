"""Whole runs on the small problem, killed and compared."""

import dataclasses

import numpy as np

from fedjax_het import Placement, RunSpec, simulate, sweep
from fedjax_het.algorithms import METHODS
from fedjax_het.config.settings import get_former_protocol
from support.data import CLIENT_SIZES, make_user_dataset

SYNTHESIS_OPTIONS = {
    "num_iterations": 6,
    "inner_steps": 2,
    "trajectory_rounds": 4,
    "segment_length": 2,
    "target_counts": 1,
    "num_samples": 6,
    "fine_tune_epochs": 2,
}
CONDENSATION_OPTIONS = {"ipc": 2, "steps": 3, "server_epochs": 2}
GENERATOR_OPTIONS = {"generator_hidden": 8, "generator_noise": 4, "generator_steps": 3}
# The loss "code" has absolute differences, whose gradients jump with the last bit.
IMAGE_GENERATOR_OPTIONS = {"distill_iterations": 2, "distill_batch_size": 4, "image_width": 2}
IMAGE_GENERATOR_OPTIONS |= {"synthesis_loss": "paper"}
FAST_OPTIONS = {
    "dynafed": SYNTHESIS_OPTIONS,
    "feddm": CONDENSATION_OPTIONS,
    "fedaf": CONDENSATION_OPTIONS,
    "ccvr": {"virtual_features": 4, "calibration_epochs": 2, "calibration_batch_size": 4},
    "fedftg": IMAGE_GENERATOR_OPTIONS,
    "fedgen": GENERATOR_OPTIONS,
}


LOCAL_RUN = {
    "model": "mlp",
    "num_clients": 4,
    "partition": "iid",
    "dataset": "user",
    "batch_size": 8,
    "protocol": "dynafed",
}


# A run of a method that a test defines.
OWN_METHOD_RUN = {
    "dataset": "user",
    "model": "mlp",
    "network_options": {"hidden": [4]},
    "partition": "iid",
    "num_clients": len(CLIENT_SIZES),
    "participation": 0.5,
    "batch_size": 4,
    "rounds": 3,
    "local_optimizer": "sgd",
    "optimizer_state": "reset",
    "protocol": "dynafed",
}


def make_spec(algorithm="fedavg", **settings):
    defaults = {
        "protocol": get_former_protocol(algorithm),  # few epochs; Adam's state at the clients
        "dataset": "user",
        "partition": "iid",
        "model": "mlp",
        "num_clients": 6,
        "participation": 0.5,
        "batch_size": 4,
        "rounds": 9,
        "options": FAST_OPTIONS.get(algorithm, {}),
        **({"pretrain_epochs": 4} if METHODS[algorithm].requires_server_examples else {}),
        **({"gradient_gaps": 2} if algorithm == "fsl" else {}),
        # After few steps the mean of logits is nearly the mean model's: rounding would decide.
        **({"hp": {"server_lr": 0.7}} if algorithm == "feddf" else {}),
        # Batch norm removes the biases before it: of their gradients, which are rounding, Adam
        # makes whole steps.
        **({"hp": {"image_generator_lr": 1e-6}} if algorithm == "fedftg" else {}),
    }
    return RunSpec(algorithm=algorithm, **{**defaults, **settings})


def run_spec(spec_, **settings):
    return simulate(spec_, dataset=make_user_dataset(), **with_placement(settings))


def run_sweep(specs, directory=None, **settings):
    settings = {"dataset": make_user_dataset(), "progress": None, **settings}
    return sweep(specs, directory, **with_placement(settings))


def sweep_specs(specs, **settings):
    return run_sweep(specs, **settings).results


class KilledError(Exception):
    pass


def make_killing_callback(number):
    calls = iter(range(number))

    def progress(_):
        if next(calls, None) is None:
            raise KilledError

    return progress


def assert_results_equal(a, b, rtol=0, atol=0):
    """To the bit, unless a tolerance is given."""
    for arrays, other_arrays in ((a.metrics, b.metrics), (a.artifacts, b.artifacts)):
        assert arrays.keys() == other_arrays.keys()
        for name in arrays:
            np.testing.assert_allclose(arrays[name], other_arrays[name], rtol, atol, err_msg=name)


def assert_all_equal(results, others, **tolerance):
    for result, other in zip(results, others, strict=True):
        assert_results_equal(result, other, **tolerance)


def final_model_logits(result, dataset):
    """Of the MLP, in float64."""
    params = result.state.server.variables["params"]
    x = dataset.test_inputs.reshape(len(dataset.test_labels), -1).astype(np.float64)
    x = (x - np.asarray(dataset.mean)[0]) / np.asarray(dataset.std)[0]
    layers = [params[name] for name in ("hidden1", "hidden2", "head")]
    for i, layer in enumerate(layers):
        x = x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def assert_domain_accuracies(result, dataset):
    """The last round's accuracy per domain, counted from the final model."""
    is_correct = final_model_logits(result, dataset).argmax(1) == dataset.test_labels
    sizes = np.bincount(dataset.test_domains)
    domain_accuracies = np.bincount(dataset.test_domains, is_correct) / sizes
    curves = [result.metrics[f"test_accuracy_{name}"] for name in dataset.domain_names]
    np.testing.assert_allclose([curve[-1] for curve in curves], domain_accuracies, rtol=1e-6)
    overall = (np.array(curves) * sizes[:, None]).sum(0) / sizes.sum()
    np.testing.assert_allclose(result.metrics["test_accuracy"], overall, rtol=1e-6)
    mean = result.metrics["test_accuracy_domains"]
    np.testing.assert_allclose(mean, np.mean(curves, 0), rtol=1e-6)
    return domain_accuracies


def with_placement(settings):
    """The same keywords, with those of a `Placement` in one."""
    names = {field.name for field in dataclasses.fields(Placement)}
    placement = Placement(**{k: v for k, v in settings.items() if k in names})
    return {k: v for k, v in settings.items() if k not in names} | {"placement": placement}

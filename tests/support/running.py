"""Whole runs on the small problem, killed and compared."""

import dataclasses

import numpy as np

from fedjax_het import Placement, RunSpec, simulate
from fedjax_het.algorithms import METHODS
from support.data import user_dataset

SYNTHESIS = {
    "num_iterations": 6,
    "inner_steps": 2,
    "trajectory_rounds": 4,
    "segment_length": 2,
    "target_counts": 1,
    "num_samples": 6,
    "fine_tune_epochs": 2,
}
CONDENSATION = {"ipc": 2, "steps": 3, "server_epochs": 2}
GENERATOR = {"generator_hidden": 8, "generator_noise": 4, "generator_steps": 3}
OPTIONS = {
    "dynafed": SYNTHESIS,
    "feddm": CONDENSATION,
    "fedaf": CONDENSATION,
    "fedgen": GENERATOR,
}


def spec(algorithm="fedavg", **settings):
    defaults = {
        "dataset": "user",
        "partition": "iid",
        "model": "mlp",
        "num_clients": 6,
        "participation": 0.5,
        "batch_size": 4,
        "rounds": 9,
        "options": OPTIONS.get(algorithm, {}),
        **({"pretrain_epochs": 4} if METHODS[algorithm].server_data else {}),
        **({"gradient_gaps": 2} if algorithm == "fsl" else {}),
        # After few steps the mean of logits is nearly the mean model's: rounding would decide.
        **({"hp": {"server_lr": 0.7}} if algorithm == "feddf" else {}),
    }
    return RunSpec(algorithm=algorithm, **{**defaults, **settings})


def run(spec_, **settings):
    return simulate(spec_, dataset=user_dataset(), **placed(settings))


class KilledError(Exception):
    pass


def kill_after(number):
    calls = iter(range(number))

    def progress(_):
        if next(calls, None) is None:
            raise KilledError

    return progress


def assert_same(a, b, rtol=0, atol=0):
    """To the bit, unless a tolerance is given."""
    for one, other in ((a.metrics, b.metrics), (a.artifacts, b.artifacts)):
        assert one.keys() == other.keys()
        for name in one:
            np.testing.assert_allclose(one[name], other[name], rtol, atol, err_msg=name)


def logits_of_the_final_model(made, data):
    """Of the MLP, in float64."""
    params = made.state.server.variables["params"]
    x = data.test_images.reshape(len(data.test_labels), -1).astype(np.float64)
    x = (x - np.asarray(data.mean)[0]) / np.asarray(data.std)[0]
    layers = [params[name] for name in ("hidden1", "hidden2", "head")]
    for i, layer in enumerate(layers):
        x = x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
        x = np.maximum(x, 0) if i < len(layers) - 1 else x
    return x


def check_domains(made, data):
    """The last round's accuracy per domain, counted from the final model."""
    right = logits_of_the_final_model(made, data).argmax(1) == data.test_labels
    sizes = np.bincount(data.test_domains)
    counted = np.bincount(data.test_domains, right) / sizes
    curves = [made.metrics[f"test_accuracy_{name}"] for name in data.domain_names]
    np.testing.assert_allclose([curve[-1] for curve in curves], counted, rtol=1e-6)
    overall = (np.array(curves) * sizes[:, None]).sum(0) / sizes.sum()
    np.testing.assert_allclose(made.metrics["test_accuracy"], overall, rtol=1e-6)
    mean = made.metrics["test_accuracy_domains"]
    np.testing.assert_allclose(mean, np.mean(curves, 0), rtol=1e-6)
    return counted


def placed(settings):
    """The same keywords, with those of a `Placement` in one."""
    names = {field.name for field in dataclasses.fields(Placement)}
    own = {name: value for name, value in settings.items() if name in names}
    return {k: v for k, v in settings.items() if k not in names} | {"placement": Placement(**own)}

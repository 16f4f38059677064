"""Files of results of runs that did not happen."""

import json

import numpy as np

from fedjax_het import Result
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.result_builder import summarize_metrics


def write_result(folder, spec, accuracy, *, renamed=None, **summary):
    """Write a result as a run of `spec` with these test accuracies would.

    `renamed` replaces settings in the file, as another process or a user could have written them.
    """
    metrics = {"test_accuracy": accuracy, "train_loss": np.ones(len(accuracy))}
    provenance = {**describe_environment(), "finished": "2026-01-01T00:00:00+00:00"}
    speed = {"wall_seconds": 1.0, "client_samples_per_second": 1e3}
    summary = {**summarize_metrics(metrics), **provenance, **speed, **summary}
    path = Result(spec.resolved(), metrics, summary).save(folder)
    if renamed:
        record = json.loads(path.read_text())
        record["spec"] |= renamed
        del record["checksum"]  # of the unchanged text
        path.write_text(json.dumps(record))
    return path

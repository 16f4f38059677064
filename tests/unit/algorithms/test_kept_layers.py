"""Traffic of methods whose clients keep layers."""

import jax
import numpy as np
from support.documentation_pages import ROOT, find_code_blocks

from fedjax_het import RunSpec, simulate
from fedjax_het.methods import num_bytes


def test_traffic_excludes_kept_layers():
    """FedPer of the page on methods: the head is neither sent nor received."""
    page = ROOT / "docs/guide/custom-method.md"
    (code,) = [code for _, code in find_code_blocks("python", [page]) if "def fedper(" in code]
    exec(code.split("settings = ")[0], {})
    settings = {"model": "mlp", "num_clients": 4, "participation": 1.0, "rounds": 2}
    plain, kept = (simulate(RunSpec(name, **settings)) for name in ("fedavg", "fedper"))
    variables = plain.model().variables
    head = kept.model(0).task.model.head
    shared_bytes = num_bytes(head.replace_parameters(variables, None))
    assert 0 < shared_bytes < num_bytes(variables)
    np.testing.assert_array_equal(kept.metrics["bytes_up"], 4 * shared_bytes)
    np.testing.assert_array_equal(kept.metrics["bytes_down"], 4 * shared_bytes)
    np.testing.assert_array_equal(plain.metrics["bytes_up"], 4 * num_bytes(variables))
    assert jax.tree.structure(kept.model(0).variables) == jax.tree.structure(variables)

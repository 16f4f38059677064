"""One of several processes of a federation: started by test_distributed.py.

python distributed_worker.py FOLDER COORDINATOR NUM_PROCESSES PROCESS_ID METHOD
"""

import sys
from pathlib import Path

import jax

import fedjax_het  # noqa: F401  (first, since it asks for CPU devices)

folder, coordinator, count, index, method = sys.argv[1:]
jax.config.update("jax_default_matmul_precision", "highest")
if int(count) > 1:
    jax.distributed.initialize(coordinator, int(count), int(index))

import numpy as np  # noqa: E402

from fedjax_het import Placement, simulate, sweep  # noqa: E402
from support.data import make_user_dataset  # noqa: E402
from support.small_runs import make_spec  # noqa: E402

folder = Path(folder)
dataset, LANES = make_user_dataset(), Placement(lanes=1)
wide = {"num_clients": 10, "participation": 0.9, "rounds": 6}  # nine clients a round
spec = make_spec(method, **wide)
result = simulate(spec, dataset=dataset, placement=LANES, output_dir=folder / "run")
assert result.summary["lanes"].startswith(f"{len(jax.devices())} x cpu"), result.summary["lanes"]
if method == "scaffold":
    on_host = Placement(lanes=1, client_state="host")
    elsewhere = simulate(spec, dataset=dataset, placement=on_host)
    assert elsewhere.summary["client_state"] == "host"
    for name, curve in result.metrics.items():
        np.testing.assert_array_equal(elsewhere.metrics[name], curve, err_msg=name)
np.savez(folder / f"metrics-{count}-{index}.npz", **result.metrics)
specs = [make_spec(method, seed=seed, rounds=3) for seed in range(5)]
lines: list[str] = []
sweep_result = sweep(
    specs, folder / "sweep", dataset=dataset, placement=LANES, progress=lines.append
)
assert all(sweep_result.results)
own = sum(line.startswith("[") for line in lines)
(folder / f"made-{count}-{index}").write_text(str(own))

"""A run, or a sweep of some, that is to be killed: started by test_faults.py.

python fault_worker.py run|sweep FOLDER METHOD
"""

import sys
import time
from pathlib import Path

import jax

import fedjax_het  # noqa: F401  (first, since it asks for CPU devices)

jax.config.update("jax_default_matmul_precision", "highest")

from fedjax_het import simulate, sweep  # noqa: E402
from fedjax_het.runtime import group_state, long_phases  # noqa: E402
from support.data import make_user_dataset  # noqa: E402
from support.fault_injection import PLACEMENT, make_seed_specs, make_short_spec  # noqa: E402

# A checkpoint after each round.
group_state.MAX_ROUNDS_PER_CHUNK, long_phases.CHUNK_SECONDS = 1, 0.0
what, folder, method = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
arguments = {"dataset": make_user_dataset(), "placement": PLACEMENT}
if what == "run":
    slowly = {"progress": lambda _: time.sleep(0.05)}
    simulate(make_short_spec(method), output_dir=folder, resume=True, **slowly, **arguments)
else:
    sweep(make_seed_specs(method), folder, **arguments)

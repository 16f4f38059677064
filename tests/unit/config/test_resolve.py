"""Resolution of settings: equal runs have one digest, bad values are errors of one line."""

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import ConfigError, RunSpec, grid

SETTINGS = {"model": "mlp", "partition": "dirichlet"}


def test_run_spec_converts_scalars():
    plain = RunSpec("fedprox", alpha=1.0, seed=1, hp={"prox_mu": 0.1}, **SETTINGS)
    for alpha, seed, mu in (
        (1, np.int64(1), np.float32(0.1)),
        (np.float64(1), np.array(1), np.float64(0.1)),
        (jnp.float32(1), jnp.int32(1), jnp.float32(0.1)),
    ):
        other = RunSpec("fedprox", alpha=alpha, seed=seed, hp={"prox_mu": mu}, **SETTINGS)
        assert other == plain and other.digest() == plain.digest()
    assert len(grid(seed=np.arange(3), **SETTINGS)) == 3


def test_resolve_reports_misspelled_name_first():
    with pytest.raises(ConfigError, match=r"^partition = 'dirchlet'.*did you mean 'dirichlet'"):
        RunSpec(model="mlp", partition="dirchlet", alpha=0.1).resolved()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("alpha", bad) for bad in ([1.0], "1", True, 1e300, 1e-300, np.nan, np.ones((3, 3)))),
        *(("seed", bad) for bad in (None, "1", 1.0, True, -1, 2**70)),
        *(("rounds", bad) for bad in (True, 1.5, 10**12, "3", (i for i in range(3)))),
        *(("hp", bad) for bad in (None, [], {1: 2.0})),
        *(("options", bad) for bad in (None, [], "preset=code")),
        *(("client_tests", bad) for bad in ("yes", 1)),
        *(("participation", bad) for bad in (0, 1.5, True)),
        *(("algorithm", bad) for bad in (["fedavg"], None, 3, np.ones(3))),
        *(("partition_seed", bad) for bad in (-1, 0.5)),
        *(("classes", bad) for bad in (0, "2")),
        *(("hp local_lr", bad) for bad in (1e300, 10**400, "0.1", True, -1, np.inf)),
        *(("hp local_weight_decay", bad) for bad in (-1.0, [0.1])),
    ],
)
def test_resolve_rejects_invalid_settings(setting, value):
    kind, _, name = setting.partition(" ")
    arguments = {"local_optimizer": "adamw"} | SETTINGS | {kind: {name: value} if name else value}
    with pytest.raises(ConfigError) as raised:
        RunSpec(**arguments).resolved()
    message = str(raised.value)
    assert message.startswith(f"{setting} = ") and len(message.splitlines()) == 1
    assert len(message) < 600

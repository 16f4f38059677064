"""Methods that correct clients' drift end at the optimum of the objective that averaging is for."""

import numpy as np
import pytest
from support.algorithm_builders import bind_options
from support.quadratics import DIMENSIONS, Quadratics, train_on_quadratics

from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.feddc import feddc
from fedjax_het.algorithms.feddyn import feddyn
from fedjax_het.algorithms.fednova import fednova
from fedjax_het.algorithms.scaffold import scaffold

SIZES = (1, 1, 1, 1, 6)
# |x - b_k|^2 / 2 with b = (0, 0, 0, 0, 10): the mean's optimum is the mean of b. FedAvg finds it
# here, whatever its local steps, for all Hessians are one.
SAME = Quadratics(
    np.eye(DIMENSIONS)[None].repeat(5, 0), np.outer([0, 0, 0, 0, 10], np.ones(DIMENSIONS))
)
NUMBERS = {"feddyn_alpha": 0.3, "feddc_alpha": 0.3, "local_lr": 0.1}
CORRECTED = {"scaffold": bind_options(scaffold), "feddyn": feddyn, "feddc": feddc}


@pytest.mark.parametrize(("averaging", "optimum"), [("uniform", 2.0), ("weighted", 6.0)])
@pytest.mark.parametrize("build", [fedavg, *CORRECTED.values()], ids=["fedavg", *CORRECTED])
def test_optimum_depends_on_averaging_weights(build, averaging, optimum):
    settings = {"sizes": SIZES, "averaging": averaging, "hp": NUMBERS}
    actual = train_on_quadratics(build, SAME, 200, **settings)
    np.testing.assert_allclose(actual, np.full(DIMENSIONS, optimum), atol=1e-3)


def test_fednova_finds_the_optimum_under_unequal_steps():
    """FedAvg weighs clients by their steps, here 1, 1 and 5 (Wang et al., 2020, Theorem 1)."""
    optima = np.outer([0, 0, 10], np.ones(DIMENSIONS))
    quadratics = Quadratics(np.eye(DIMENSIONS)[None].repeat(3, 0), optima)
    settings = {"sizes": (4, 4, 20), "batch_size": 4, "hp": {"local_lr": 0.004}, "steps": 1}
    expected = {fednova: 10 / 3, fedavg: 10 * 5 / 7}
    for build, optimum in expected.items():
        actual = train_on_quadratics(build, quadratics, 1000, **settings)
        np.testing.assert_allclose(actual, np.full(DIMENSIONS, optimum), atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("build", CORRECTED.values(), ids=CORRECTED)
@pytest.mark.parametrize("sizes", [SIZES, (0, 3, 1, 6, 2)])
def test_optimum_with_partial_participation(build, sizes):
    """In rounds of two of five clients, of which one may hold nothing."""
    rng = np.random.default_rng(1)
    bends = rng.uniform(0.3, 2, size=(5, DIMENSIONS))
    different = Quadratics(bends[:, :, None] * np.eye(DIMENSIONS), rng.normal(size=(5, DIMENSIONS)))
    for averaging, weights in (("uniform", np.sign(sizes)), ("weighted", np.array(sizes))):
        settings = {"sizes": sizes, "averaging": averaging, "hp": NUMBERS, "participation": 0.4}
        actual = train_on_quadratics(build, different, 2000, **settings)
        np.testing.assert_allclose(actual, different.joint_optimum(weights), atol=2e-3)

"""FedDecorr against float64 loops, its limit over every base, and its term."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.algorithm_builders import FAST_OPTIONS, make_method_federation
from support.markers import method_cases
from support.reference_loop import (
    ReferenceFedAvg,
    finite_difference_gradient,
    flatten_params,
    logit_gradient,
    run_and_compare,
)
from support.two_layers import (
    backpropagate,
    compute_features,
    compute_logits,
    make_two_layer_model,
)

from fedjax_het import ConfigError, RunSpec, simulate
from fedjax_het.algorithms import METHODS, get_possible_bases
from fedjax_het.algorithms.feddecorr import EPSILON, compute_decorrelation_loss


def decorrelation_loss(features):
    """The term by the correlations of features."""
    n, num_features = features.shape
    if n == 1:
        return 0.0
    is_pair = ~np.eye(num_features, dtype=bool)
    covariances = np.cov(features.T)
    deviations = np.sqrt(np.diag(covariances) + EPSILON)
    correlations = covariances / np.outer(deviations, deviations)
    return (n - 1) ** 2 / n * np.square(correlations[is_pair]).mean()


def decorrelation_gradient(features):
    """The gradient of the term by the features, derived by hand."""
    n, num_features = features.shape
    centered = features - features.mean(0)
    variances = np.square(centered).sum(0) / max(n - 1, 1) + EPSILON
    scaled = centered / np.sqrt(variances)
    products = scaled.T @ scaled
    np.fill_diagonal(products, 0)
    to_scaled = 4 * scaled @ products / (num_features * (num_features - 1) * n)
    to_variances = -(to_scaled * centered).sum(0) / (2 * variances**1.5)
    to_centered = to_scaled / np.sqrt(variances) + 2 * centered * to_variances / max(n - 1, 1)
    return to_centered - to_centered.mean(0)


class ReferenceFedDecorr(ReferenceFedAvg):
    """Clients decorrelate features."""

    def descent_direction(self, model, batch):
        params = self.params(model)
        rows = logit_gradient(compute_logits(params, batch.x), batch.y) / len(batch.y)
        term = decorrelation_gradient(compute_features(params, batch.x))
        gradient = backpropagate(params, batch.x, rows, self.hp["feddecorr_beta"] * term)
        return flatten_params(gradient)


class OverFedProx(ReferenceFedDecorr):
    def descent_direction(self, model, batch):
        pull = self.hp["prox_mu"] * (model - self.global_vector)
        return super().descent_direction(model, batch) + pull


class OverFedSAM(ReferenceFedDecorr):
    """Both gradients are gradients of the whole loss."""

    def descent_direction(self, model, batch):
        gradient = super().descent_direction(model, batch)
        ahead = model + self.hp["fedsam_rho"] * gradient / np.linalg.norm(gradient)
        return super().descent_direction(ahead, batch)


def make_federation(base, hp=None, **settings):
    settings = {"model": make_two_layer_model(), "epochs": 2, "participation": 0.5} | settings
    return make_method_federation(
        "feddecorr", {"base": base}, hp={"local_lr": 0.2} | (hp or {}), **settings
    )


@pytest.mark.parametrize(
    ("base", "make_loop", "hp"),
    [
        ("fedavg", ReferenceFedDecorr, {}),
        ("fedprox", OverFedProx, {"prox_mu": 0.5}),
        ("fedsam", OverFedSAM, {"fedsam_rho": 0.1}),
    ],
)
@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_rounds_match_float64_loop(averaging, base, make_loop, hp):
    hp = {"feddecorr_beta": 0.3, "server_lr": 0.7, **hp}
    loop = make_loop(make_federation(base, hp, averaging=averaging))
    run_and_compare(loop, 4, atol=5e-6)
    assert loop.count_repeat_clients() >= 2


def test_gradient_of_oracle():
    features = np.random.default_rng(0).normal(size=(4, 3))
    loss = lambda vector: decorrelation_loss(vector.reshape(4, 3))  # noqa: E731
    expected = finite_difference_gradient(loss, features.ravel())
    np.testing.assert_allclose(decorrelation_gradient(features).ravel(), expected, atol=1e-7)


@pytest.mark.parametrize("num_examples", [1, 2, 5])
def test_samples_that_fill_up_a_minibatch_do_not_count(num_examples):
    features = np.random.default_rng(1).normal(size=(5, 3)).astype(np.float32)
    features[:, 2] = 1  # no variance
    mask = (np.arange(5) < num_examples).astype(np.float32)
    loss, gradient = jax.value_and_grad(compute_decorrelation_loss)(jnp.asarray(features), mask)
    examples = features[:num_examples].astype(np.float64)
    np.testing.assert_allclose(loss, decorrelation_loss(examples), rtol=1e-5, atol=1e-7)
    expected = decorrelation_gradient(examples)
    np.testing.assert_allclose(gradient[:num_examples], expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(gradient[num_examples:], 0)


BASES = get_possible_bases(METHODS["feddecorr"])


@pytest.mark.parametrize("base", method_cases(BASES, quick=("fednova", "moon")))
def test_beta_0_is_base_and_every_base_has_the_term(base):
    settings = {"model": make_two_layer_model(), "participation": 0.8}
    options = FAST_OPTIONS.get(base, {})
    hp = {"local_lr": 0.1}
    alone = make_method_federation(base, options, hp=hp, **settings)
    start = alone.initial_state()
    expected = alone.train(2, start)
    for beta in (0.0, 1.0):
        federation = make_method_federation(
            "feddecorr", {"base": base, **options}, hp={**hp, "feddecorr_beta": beta}, **settings
        )
        actual = federation.train(2, start)
        gap = jax.tree.map(lambda a, b: np.abs(a - b).max(), actual, expected)
        hidden_gap = gap["hidden"]["kernel"]
        assert (hidden_gap < 2e-6) if beta == 0 else (hidden_gap > 1e-3), (beta, gap)


def test_network_without_features_is_one_line():
    class Pooled(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Conv(10, (3, 3))(x).mean((1, 2))

    with pytest.raises(ConfigError, match=r"^network has no known `embed`") as raised:
        simulate(RunSpec("feddecorr", num_clients=4, rounds=1), network=Pooled())
    assert "\n" not in str(raised.value)

"""Leveled logits: the step against NumPy, and its place behind the average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from support.algorithm_builders import bind_options
from support.data import NUM_CLASSES
from support.reference_loop import ReferenceFedAvg, run_and_compare
from support.small_federation import make_small_federation, round_key
from support.small_runs import make_spec, run_spec

from fedjax_het import ConfigError, register_network
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.levelled import levelled
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.nn import make_model
from fedjax_het.nn.model import Head

NUM_IMAGES = 40


class Levelled(ReferenceFedAvg):
    """The bias loses the mean logits over noise images after each round."""

    def update_server(self, r, clients, models):
        super().update_server(r, clients, models)
        key = fold_in_purpose(round_key(r), Purpose.SERVER)
        shape = self.federation.task.model.input_shape
        noise = np.asarray(jax.random.normal(key, (NUM_IMAGES, *shape), np.float32), np.float64)
        params = self.params(self.global_vector)
        logits = noise.reshape(NUM_IMAGES, -1) @ params["w"] + params["b"]
        bias = params["b"] - logits.mean(0)
        self.global_vector = np.concatenate([bias, self.global_vector[NUM_CLASSES:]])  # "b", "w"


def test_rounds_match_reference():
    build = bind_options(levelled, base=fedavg, noise_images=NUM_IMAGES)
    federation = make_small_federation(build, hp={"local_lr": 0.2}, participation=0.7)
    run_and_compare(Levelled(federation), 3, atol=1e-5)


def test_mean_logits_on_noise_are_zero():
    """The corrected model prefers no class on other noise images."""
    build = bind_options(levelled, base=fedavg, noise_images=2000)
    preferences = []
    for method in (build, fedavg):
        params = make_small_federation(method, hp={"local_lr": 0.5}).train(3)
        noise = np.random.default_rng(0).normal(size=(2000, len(params["w"])))
        preferences.append(np.abs((noise @ params["w"] + params["b"]).mean(0)).max())
    assert 10 * preferences[0] < preferences[1]


def test_rejects_network_without_bias():
    class Biasless(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(NUM_CLASSES, use_bias=False)(x.reshape(len(x), -1))

    register_network("biasless", Biasless)
    expected = "expected a network that ends in a fully connected layer with a bias"
    with pytest.raises(ConfigError, match=f"model = 'biasless': {expected}"):
        run_spec(make_spec("levelled", model="biasless"))
    kernel = {"params": jnp.ones((16, NUM_CLASSES)), "state": {}}  # no dictionary of parameters
    matrix = make_model("mlp", (4, 4, 1), NUM_CLASSES)._replace(
        init=lambda key: kernel, head=Head((), jnp.matmul)
    )
    with pytest.raises(ConfigError, match=expected):
        make_small_federation(bind_options(levelled, base=fedavg), hp={}, model=matrix)

"""Forward over reverse against reverse over reverse, in float64, and against a plain loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from support.markers import slow_case
from support.x64 import enable_x64

from fedjax_het.condensation import SyntheticData, matching_loss, unroll, unrolling
from fedjax_het.core.server_parallelism import ServerParallelism
from fedjax_het.nn import make_model

CLASSES, SHAPE, SAMPLES = 3, (4, 4, 1), 6
NETWORKS = {
    "mlp": ("mlp", {}),
    "convnet": ("convnet", {"width": 3, "depth": 1, "conv_impl": "im2col"}),
    "batch norm": ("convnet", {"width": 3, "depth": 1, "norm": "batch"}),
}


def network(name):
    """-> (apply_params, flat weights, unravel), in float64."""
    kind, options = NETWORKS[name]
    model = make_model(kind, SHAPE, CLASSES, **options)
    variables = jax.tree.map(lambda a: a.astype(jnp.float64), model.init(jax.random.key(0)))

    def apply_params(params, images, **axis_argument):
        variables_of_step = {**variables, "params": params}
        return model.apply(variables_of_step, images, train=True, **axis_argument)[0]

    return apply_params, *ravel_pytree(variables["params"])


def synthetic(samples=SAMPLES):
    rng = np.random.default_rng(1)
    return SyntheticData(
        images=jnp.asarray(rng.normal(size=(samples, *SHAPE))),
        label_logits=jnp.asarray(rng.normal(size=(samples, CLASSES))),
        step_size=jnp.asarray(0.7),
    )


@pytest.fixture
def reverse_mode(monkeypatch):
    """`unroll` with `jax.grad` of `jax.grad`, which recomputes a step in the backward pass."""

    def reverse_mode(loss_sum, select_samples, **_):
        def gradient(vector, source, step):
            return jax.grad(loss_sum)(vector, select_samples(source, step))

        return jax.checkpoint(gradient, prevent_cse=False)

    return lambda: monkeypatch.setattr(unrolling, "mixed_mode", reverse_mode)


def value_and_gradient(name="mlp", *, map_over=lambda f: f, **options):
    """Of the matching loss with respect to the data, after four steps."""
    apply_params, vector, unravel = network(name)
    target = vector + 0.1 * np.random.default_rng(2).normal(size=vector.shape)

    def loss(data, vector):
        end = unroll(
            apply_params,
            unravel,
            vector,
            data,
            jax.random.key(4),
            num_steps=4,
            **{"augment_strategy": "none", **options},
        )
        return matching_loss(end, vector, target)

    program = map_over(jax.value_and_grad(loss, argnums=(0, 1)))
    return jax.jit(program)(synthetic(), vector)


def assert_equal(ours, theirs, rtol=1e-9):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        scale = np.abs(b).max()
        assert scale > 1e-6
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"batch_size": 4, "augment_strategy": "color_rotate"}),
        ("mlp", {"loss_scaling": "cross_entropy"}),
        slow_case("convnet", {"augment_strategy": "scale_cutout", "batch_size": 4}),
        slow_case("batch norm", {}),
    ],
)
def test_mixed_mode_equals_reverse_mode(name, options, reverse_mode):
    with enable_x64(True):
        ours = value_and_gradient(name, **options)
        reverse_mode()
        assert_equal(ours, value_and_gradient(name, **options))


@pytest.mark.parametrize("micro_batch", [slow_case(1), slow_case(2), 3, slow_case(4)])
def test_micro_batches_add_up(micro_batch):
    with enable_x64(True):
        whole = value_and_gradient("convnet")
        assert_equal(value_and_gradient("convnet", micro_batch=micro_batch), whole)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 5])
def test_devices_share_the_samples(batch_size):
    """Six samples, or five, on two devices: parts that are equal, and parts that are not."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("d",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    shared = {"micro_batch": 2, "server_parallelism": ServerParallelism("d", 2)}

    def on_both(function):
        return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    options = {"batch_size": batch_size, "augment_strategy": "flip"}
    with enable_x64(True):
        alone = value_and_gradient(**options)
        assert_equal(value_and_gradient(map_over=on_both, **options, **shared), alone)


def test_it_is_mapped_over_starts():
    with enable_x64(True):
        apply_params, vector, unravel = network("mlp")
        starts = jnp.stack([vector, 2 * vector])

        def slope(start):
            def end(data):
                key = jax.random.key(4)
                return unroll(
                    apply_params, unravel, start, data, key, num_steps=2, augment_strategy="none"
                ).sum()

            return jax.grad(end)(synthetic())

        one_by_one = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(slope, starts))
        assert_equal(jax.vmap(slope)(starts), one_by_one)


def test_backward_pass_keeps_no_activations(reverse_mode):
    """Of many steps as of few, but for the weights and the gradient of each."""

    def temporary(steps, **options):
        apply_params, vector, unravel = network("convnet")

        def loss(data):
            end = unroll(
                apply_params,
                unravel,
                vector,
                data,
                jax.random.key(0),
                num_steps=steps,
                augment_strategy="none",
                **options,
            )
            return jnp.square(end - 1).sum()

        program = jax.jit(jax.grad(loss)).lower(synthetic(60)).compile()
        return program.memory_analysis().temp_size_in_bytes, vector.nbytes

    with enable_x64(True):
        few, weights = temporary(2, micro_batch=6)
        many, _ = temporary(12, micro_batch=6)
        assert many - few <= 10 * 3 * weights
        reverse_mode()
        assert many < temporary(12)[0] / 2

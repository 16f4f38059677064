"""The inner loop against NumPy, finite differences, and reverse over reverse in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jax.sharding import PartitionSpec as P
from support.markers import slow_case
from support.x64 import enable_x64

from fedjax_het.condensation import SyntheticData, SyntheticTask, matching_loss, unroll, unrolling
from fedjax_het.condensation.augment import DSA_STRATEGY
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
    variables = jax.tree.map(
        lambda a: a.astype(jnp.float64), jax.jit(model.init)(jax.random.key(0))
    )

    def apply_params(params, images, **axis_argument):
        variables_of_step = {**variables, "params": params}
        return model.apply(variables_of_step, images, train=True, **axis_argument)[0]

    return apply_params, *ravel_pytree(variables["params"])


def synthetic(samples=SAMPLES):
    rng = np.random.default_rng(1)
    return SyntheticData(
        inputs=jnp.asarray(rng.normal(size=(samples, *SHAPE))),
        label_logits=jnp.asarray(rng.normal(size=(samples, CLASSES))),
        step_size=jnp.asarray(0.7),
    )


def make_target(vector):
    return vector + 0.1 * np.random.default_rng(2).normal(size=vector.shape)


def make_loss(name="mlp", **options):
    """-> the matching loss of (data, weights) after four steps, and weights."""
    apply_params, vector, unravel = network(name)
    target, steps = make_target(vector), {"num_steps": 4}
    for key in ("num_steps", "batch_size", "momentum", "differentiation"):
        if key in options:
            steps[key] = options.pop(key)
    task = SyntheticTask(apply_params, **{"augment_strategy": "none", **options})

    def loss(data, vector):
        end = unroll(task, unravel, vector, data, jax.random.key(4), **steps)
        return matching_loss(end, vector, target)

    return loss, vector


def value_and_gradient(name="mlp", *, map_over=lambda f: f, **options):
    loss, vector = make_loss(name, **options)
    program = map_over(jax.value_and_grad(loss, argnums=(0, 1)))
    return jax.jit(program)(synthetic(), vector)


@pytest.fixture
def reverse_mode(monkeypatch):
    """`unroll` with `jax.grad` of `jax.grad`, which recomputes a step in the backward pass."""

    def reverse_mode(loss_sum, select_samples, **_):
        def gradient(vector, source, step):
            return jax.grad(loss_sum)(vector, select_samples(source, step))

        return jax.checkpoint(gradient, prevent_cse=False)

    return lambda: monkeypatch.setattr(unrolling, "mixed_mode", reverse_mode)


def assert_equal(ours, theirs, rtol=1e-9):
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        scale = np.abs(b).max()
        assert scale > 1e-6
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * scale)


@pytest.mark.parametrize("hidden", [(), (5,), (5, 4)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("differentiation", ["exact", "first_order"])
def test_gram_matrix_replaces_products_with_inputs(hidden, momentum, differentiation, monkeypatch):
    monkeypatch.setitem(NETWORKS, "mlp", ("mlp", {"hidden": hidden}))
    settings = {"momentum": momentum, "differentiation": differentiation}
    with enable_x64(True):
        input_layer = "hidden1" if hidden else "head"
        ours = value_and_gradient(input_layer=input_layer, **settings)
        theirs = value_and_gradient(**settings)
    assert_equal(ours, theirs)


def test_steps_of_unroll_have_no_product_with_inputs():
    """The loop over steps has a product with the Gram matrix instead."""
    with enable_x64(True):
        texts = [
            str(jax.make_jaxpr(loss)(synthetic(), vector))
            for loss, vector in (make_loss(input_layer="hidden1"), make_loss())
        ]
    shape = f"f64[{SAMPLES},{SAMPLES}]"
    assert [shape in text for text in texts] == [True, False]


@pytest.mark.parametrize(
    "settings", [{"batch_size": 4}, {"augment_strategy": "flip"}], ids=["batches", "augmentation"]
)
def test_unroll_with_changing_inputs_has_no_gram_matrix(settings):
    with enable_x64(True):
        loss, vector = make_loss(input_layer="hidden1", **settings)
        text = str(jax.make_jaxpr(loss)(synthetic(), vector))
    assert f"f64[{SAMPLES},{SAMPLES}]" not in text


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 4},
        slow_case({"augment_strategy": DSA_STRATEGY, "momentum": 0.9}),
        slow_case({"augment_strategy": "flip_color", "differentiation": "first_order"}),
    ],
    ids=["batches", "augmentation", "first order"],
)
def test_accelerator_selects_samples_of_all_steps_before_loop(settings, monkeypatch):
    with enable_x64(True):
        in_loop = value_and_gradient(**settings)
        loss, vector = make_loss(**settings)
        monkeypatch.setattr(unrolling.jax, "default_backend", lambda: "gpu")
        assert_equal(value_and_gradient(**settings), in_loop)
        text = str(jax.make_jaxpr(loss)(synthetic(), vector))
    num_samples = settings.get("batch_size", SAMPLES)
    assert f"f64[4,{num_samples},{','.join(map(str, SHAPE))}]" in text


@pytest.mark.parametrize(
    ("scaling", "momentum"),
    [("cross_entropy_over_classes", 0.0), ("cross_entropy", 0.0), ("cross_entropy", 0.9)],
)
def test_unroll_equals_sgd_loop(scaling, momentum):
    """A softmax regression by hand."""
    start = np.random.default_rng(0).normal(size=(16, CLASSES))
    with enable_x64(True):
        data = synthetic()
        labels = np.asarray(jax.nn.softmax(data.label_logits))
        end = unroll(
            SyntheticTask(lambda w, x: x.reshape(len(x), -1) @ w, "none", scaling),
            lambda vector: vector.reshape(16, CLASSES),
            jnp.asarray(start.ravel()),
            data,
            jax.random.key(0),
            num_steps=7,
            momentum=momentum,
        )
    x = np.asarray(data.inputs).reshape(SAMPLES, -1)
    divisor = SAMPLES * (CLASSES if scaling == "cross_entropy_over_classes" else 1)
    expected, buffer = start, 0.0
    for _ in range(7):
        exponentials = np.exp(x @ expected)
        error = exponentials / exponentials.sum(1, keepdims=True) - labels
        buffer = momentum * buffer + x.T @ error / divisor
        expected = expected - float(data.step_size) * buffer
    np.testing.assert_allclose(end.reshape(expected.shape), expected, rtol=1e-10)


@pytest.mark.slow
def test_first_order_sums_derivatives_of_steps():
    """The end is the start minus the step size times gradients at the visited points, which the
    derivative holds constant."""
    with enable_x64(True):
        value, (gradients, _) = value_and_gradient(differentiation="first_order")
        exact_value, (exact, _) = value_and_gradient()
        (apply_params, vector, unravel), data = network("mlp"), synthetic()
        task, weights = SyntheticTask(apply_params, "none"), jnp.full(SAMPLES, 1 / SAMPLES)

        def step(start, point, data):
            """Return `start` after a step along the gradient at `point`."""
            samples = data.inputs, data.label_logits, weights
            gradient = jax.grad(lambda w: task.sum_losses(unravel(w), samples, None))(point)
            return start - data.step_size * gradient

        points = [vector]
        for _ in range(4):
            points.append(step(points[-1], points[-1], data))

        def reference(data):
            end = vector
            for point in points[:-1]:
                end = step(end, point, data)
            return matching_loss(end, vector, make_target(vector))

        np.testing.assert_allclose(value, exact_value, rtol=1e-12)
        assert_equal(gradients, jax.grad(reference)(data))
        assert not np.allclose(gradients.inputs, exact.inputs, rtol=1e-3)


@pytest.mark.parametrize(
    ("kind", "strategy", "batch_size"),
    [
        ("mlp", "none", None),
        slow_case("convnet", "none", 4),
        slow_case("mlp", "color_rotate", 4),
        slow_case("convnet", "scale_cutout", None),
    ],
)
def test_matching_loss_gradient_finite_differences(kind, strategy, batch_size):
    """With respect to images, label logits and step size."""
    with enable_x64(True):
        loss, vector = make_loss(kind, augment_strategy=strategy, batch_size=batch_size)
        data, loss = synthetic(), jax.jit(loss)
        gradient = jax.jit(jax.grad(loss))(data, vector)
        rng = np.random.default_rng(3)
        for name in SyntheticData._fields:
            leaf = getattr(data, name)
            direction = rng.normal(size=leaf.shape)
            slope = (getattr(gradient, name) * direction).sum()
            above, below = (
                loss(data._replace(**{name: leaf + step * direction}), vector)
                for step in (1e-5, -1e-5)
            )
            np.testing.assert_allclose(slope, (above - below) / 2e-5, rtol=1e-6)
            assert abs(slope) > 1e-5


def test_inner_epoch_begins_with_remainder():
    """An epoch of 6 samples in batches of 4: two samples, then four, as in the public codes."""
    task = SyntheticTask(lambda w, images: images.reshape(len(images), -1) @ w, "none")
    rng = np.random.default_rng(0)
    data = SyntheticData(jnp.ones((6, 2, 2, 1)), jnp.asarray(rng.normal(size=(6, 3))), 0.1)

    def sum_end(images, num_steps):
        args = (lambda w: w.reshape(4, 3), jnp.ones(12), data._replace(inputs=images))
        key = jax.random.key(0)
        return (unroll(task, *args, key, num_steps=num_steps, batch_size=4) ** 2).sum()

    slope = jax.jit(jax.grad(sum_end), static_argnums=1)
    used = [np.abs(slope(data.inputs, n)).max((1, 2, 3)) > 0 for n in range(1, 4)]
    assert [int(images.sum()) for images in used] == [2, 6, 6]


def test_matching_loss_closed_forms():
    start, target = jnp.asarray([1.0, 2.0, 3.0]), jnp.asarray([2.0, 0.0, 3.0])
    assert matching_loss(start, start, target) == 1
    assert matching_loss(target, start, target) == 0
    np.testing.assert_allclose(matching_loss((start + target) / 2, start, target), 0.25)
    for factor, expected in ((3, 0), (-1, 2)):
        cosine = matching_loss(factor * target, start, target, distance="cosine")
        np.testing.assert_allclose(cosine, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mlp", {"batch_size": 4, "augment_strategy": "color_rotate"}),
        ("mlp", {"loss_scaling": "cross_entropy", "momentum": 0.9}),
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
def test_mixed_mode_micro_batches(micro_batch):
    with enable_x64(True):
        whole = value_and_gradient("convnet")
        assert_equal(value_and_gradient("convnet", micro_batch=micro_batch), whole)


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [None, 5])
def test_mixed_mode_on_two_devices(batch_size):
    """Six samples, or five, on two devices: parts that are equal, and parts that are not."""
    devices = jax.devices()[:2]
    mesh = jax.make_mesh((2,), ("d",), devices=devices, axis_types=(jax.sharding.AxisType.Auto,))
    shared = {"micro_batch": 2, "parallelism": ServerParallelism("d", 2)}

    def on_both(function):
        return jax.shard_map(function, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)

    options = {"batch_size": batch_size, "augment_strategy": "flip"}
    with enable_x64(True):
        alone = value_and_gradient(**options)
        assert_equal(value_and_gradient(map_over=on_both, **options, **shared), alone)


def test_unroll_vmap_over_starts():
    with enable_x64(True):
        loss, vector = make_loss()
        starts, slope = jnp.stack([vector, 2 * vector]), jax.jit(jax.grad(loss))
        one_by_one = [slope(synthetic(), start) for start in starts]
        expected = jax.tree.map(lambda *leaves: jnp.stack(leaves), *one_by_one)
        slopes = jax.jit(jax.vmap(slope, in_axes=(None, 0)))
        assert_equal(slopes(synthetic(), starts), expected)


def test_backward_pass_stores_no_activations(reverse_mode):
    """The memory of many steps is that of few, except for weights and gradient of each."""

    def temporary(num_steps, **options):
        loss, vector = make_loss("convnet", num_steps=num_steps, **options)
        program = jax.jit(jax.grad(loss)).lower(synthetic(60), vector).compile()
        return program.memory_analysis().temp_size_in_bytes, vector.nbytes

    with enable_x64(True):
        few, weights = temporary(2, micro_batch=6)
        many, _ = temporary(12, micro_batch=6)
        assert many - few <= 10 * 3 * weights
        reverse_mode()
        assert many < temporary(12)[0] / 2

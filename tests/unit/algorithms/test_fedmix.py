"""FedMix and NaiveMix against float64 loops, each other as lambda vanishes, and whole runs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chex import assert_trees_all_close, assert_trees_all_equal
from support.algorithm_builders import bind_options
from support.data import (
    CLIENT_SIZES,
    NUM_CLASSES,
    consecutive_partition,
    make_blobs,
)
from support.networks import make_curved_model, make_linear_model
from support.reference_loop import (
    ReferenceFedAvg,
    finite_difference_gradient,
    flatten_params,
    run_and_compare,
    softmax,
    softmax_gradient,
)
from support.small_federation import make_small_federation, step_key
from support.small_runs import make_spec, run_spec, sweep_specs

from fedjax_het.algorithms.fedmix import _fedmix_losses, _Mixup, fedmix, naivemix
from fedjax_het.algorithms.fsl import fsl
from fedjax_het.core.client_algorithm import Batch
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.core.task import Task
from fedjax_het.data import MeanBlocks, average_examples
from fedjax_het.nn import make_model

METHODS = {"fedmix": fedmix, "naivemix": naivemix}
PRINTED = partial(bind_options, fedmix, coefficient="printed")


def method(name, mean_size=3):
    if name == "printed":
        return PRINTED(mean_size=mean_size)
    return bind_options(METHODS[name], mean_size=mean_size)


# --- averages --------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, 5, None])
def test_each_example_is_in_one_average(size):
    _, labels = make_blobs()
    count = len(labels)
    marked = np.eye(count, dtype=np.float32).reshape(count, 1, count, 1)  # example i has pixel i
    means, shares = average_examples(
        marked, labels, NUM_CLASSES, consecutive_partition(), MeanBlocks(size), seed=0
    )
    members = [np.flatnonzero(mean) for mean in means.reshape(-1, count)]
    assert sorted(np.concatenate(members)) == list(range(count))
    owner = np.repeat(np.arange(len(CLIENT_SIZES)), CLIENT_SIZES)
    blocks = [[] for _ in CLIENT_SIZES]
    for mean, share, block in zip(means.reshape(-1, count), shares, members, strict=True):
        (client,) = set(owner[block])
        blocks[client].append(len(block))
        np.testing.assert_allclose(mean[block], 1 / len(block), rtol=1e-6)
        np.testing.assert_allclose(share, np.eye(NUM_CLASSES)[labels[block]].mean(0), rtol=1e-6)
    expected = [
        [size] * (n // size) + [n % size] * (n % size > 0) if size else [n] * (n > 0)
        for n in CLIENT_SIZES
    ]
    assert blocks == expected
    assert [len(b) for b in blocks] == MeanBlocks(size).num_averages(
        np.array(CLIENT_SIZES)
    ).tolist()


def test_averages_are_shuffled_and_in_unit_interval():
    images, labels = make_blobs()
    stored = np.random.default_rng(0).integers(0, 256, images.shape).astype(np.uint8)
    arguments = (labels, NUM_CLASSES, consecutive_partition(), MeanBlocks(3))
    (means, _), (again, _), (other, _) = (
        average_examples(stored, *arguments, seed=seed) for seed in (0, 0, 1)
    )
    floats, _ = average_examples((stored / 255).astype(np.float32), *arguments, seed=0)
    np.testing.assert_allclose(means, floats, atol=1e-6)
    np.testing.assert_array_equal(means, again)
    assert not np.array_equal(means, other)


# --- float64 loops ---------------------------------------------------------------------------


def mixed_gradient(name, w, b, x, y, strength, mean_image, mean_label):
    """Of the mean loss over a batch of softmax regression, by hand."""
    own = np.eye(NUM_CLASSES)[y]
    if name == "naivemix":
        mixed = (1 - strength) * x + strength * mean_image
        error = softmax(mixed @ w + b) - (1 - strength) * own - strength * mean_label
        return mixed.T @ error / len(y), error.mean(0)
    shrunk = (1 - strength) * x
    p = softmax(shrunk @ w + b)
    # dl/dx' = W (p - e_y), so that the term is s (p - e_y) with s = W' x_g.
    s = mean_image @ w
    through_p = p * s - p * (p @ s)[:, None]
    dw = (1 - strength) * shrunk.T @ (p - own) + strength * shrunk.T @ (p - mean_label)
    db = (1 - strength) * (p - own).sum(0) + strength * (p - mean_label).sum(0)
    slope = np.outer(mean_image, (p - own).sum(0)) + shrunk.T @ through_p
    weight = strength * (1 if name == "printed" else 1 - strength)
    return (dw + weight * slope) / len(y), (db + weight * through_p.sum(0)) / len(y)


class Mixed(ReferenceFedAvg):
    """Every step is mixed with one of the averages, which is drawn where the method draws it."""

    def __init__(self, federation, name):
        super().__init__(federation)
        averages = federation.inputs["averages"]
        self.name, self.count, self.seen = name, int(averages.num_rows), set()
        self.means = np.asarray(averages.inputs, np.float64).reshape(self.count, -1)
        self.mean_labels = np.asarray(averages.labels, np.float64)

    def descent_direction(self, model, batch):
        draw = fold_in_purpose(step_key(batch.round, batch.client, batch.step), Purpose.MIXING)
        pair = int(jax.random.randint(draw, (), 0, self.count))
        self.seen.add(pair)
        p, strength = self.params(model), self.hp["mixup_lambda"]
        average = self.means[pair], self.mean_labels[pair]
        mixed = mixed_gradient(self.name, p["w"], p["b"], batch.x, batch.y, strength, *average)
        return flatten_params(dict(zip("wb", mixed, strict=True)))


@pytest.mark.parametrize(
    ("name", "mean_size"),
    [*((name, size) for name in METHODS for size in (None, 3)), ("printed", 3)],
)
def test_three_rounds_match_float64_loop(name, mean_size):
    hp = {"local_lr": 0.3, "mixup_lambda": 0.3}
    federation = make_small_federation(method(name, mean_size), hp=hp, participation=0.7, epochs=2)
    loop = Mixed(federation, name)
    run_and_compare(loop, 3, atol=3e-6)
    assert len(loop.seen) >= 5  # of the 5 clients' averages, or of more


def test_reference_gradient_matches_loss():
    """By differences, of the loss written out with each sample's own input gradient."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(5, 4)), rng.integers(0, NUM_CLASSES, 5)
    w, b = rng.normal(size=(4, NUM_CLASSES)), rng.normal(size=NUM_CLASSES)
    mean_image, mean_label = rng.normal(size=4), np.array([0.5, 0.3, 0.2])

    def loss(flat, strength=0.3):
        b, w, total = flat[:NUM_CLASSES], flat[NUM_CLASSES:].reshape(4, NUM_CLASSES), 0
        for image, label in zip((1 - strength) * x, y, strict=True):
            p = softmax((image @ w + b)[None])[0]
            slope = w @ (p - np.eye(NUM_CLASSES)[label])
            own = -np.log(p[label]) + strength * slope @ mean_image
            total += (1 - strength) * own - strength * mean_label @ np.log(p)
        return total / len(y)

    dw, db = mixed_gradient("fedmix", w, b, x, y, 0.3, mean_image, mean_label)
    numeric = finite_difference_gradient(loss, flatten_params({"w": w, "b": b}))
    np.testing.assert_allclose(flatten_params({"w": dw, "b": db}), numeric, atol=1e-8)


# --- limits ----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [make_linear_model(), make_curved_model()], ids=["linear", "curved"]
)
def test_fedmix_error_is_quadratic_in_lambda(model):
    """Loss and gradient of a batch: an error in the first-order term, as by the batch size, would
    make the gap of order lambda."""

    def step(name, strength):
        hp = {"local_lr": 1.0, "mixup_lambda": strength}
        federation = make_small_federation(
            method(name, 2), hp=hp, sizes=(16, 3), batch_size=16, model=model
        )
        state, info = federation.run(1, federation.initial_state())
        moved = jax.tree.leaves(federation.global_params(state))
        return np.concatenate([info.train_loss.ravel(), *(leaf.ravel() for leaf in moved)])

    gaps = []
    for strength in (0.1, 0.05, 0.025):
        gaps.append(np.linalg.norm(step("fedmix", strength) - step("naivemix", strength)))
    ratios = np.divide(gaps[:-1], gaps[1:])
    assert gaps[0] > 1e-3, gaps  # there is something to vanish
    assert ((ratios > 3.3) & (ratios < 4.7)).all(), (gaps, ratios)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "batch"])
def test_convnet_term_matches_forward_mode(norm):
    """Convolutions as matrix products have a reverse rule of their own; the backend's have both."""
    settings = {"width": 4, "depth": 2, "norm": norm}
    products, native = (
        make_model("convnet", (8, 8, 1), NUM_CLASSES, conv_impl=impl, **settings)
        for impl in ("im2col", "native")
    )
    rng = np.random.default_rng(5)
    images = jnp.asarray(rng.normal(size=(6, 8, 8, 1)), jnp.float32)
    labels = jnp.asarray(rng.integers(0, NUM_CLASSES, 6))
    mean_image = jnp.asarray(rng.normal(size=(8, 8, 1)), jnp.float32)
    mean_label, strength = jnp.asarray([0.2, 0.5, 0.3]), 0.3
    variables = products.init(jax.random.key(0))

    def by_hand(params):
        def losses(images):
            arguments = {**variables, "params": params}
            log_p = jax.nn.log_softmax(native.apply(arguments, images, train=True)[0])
            return -log_p[jnp.arange(6), labels], -log_p @ mean_label

        shrunk = (1 - strength) * images
        direction = jnp.broadcast_to(mean_image, images.shape)
        (own, others), (slope, _) = jax.jvp(losses, (shrunk,), (direction,))
        mixed = (1 - strength) * own + strength * others + strength * (1 - strength) * slope
        return mixed.mean()

    task = Task(products, (0.0,), (1.0,))
    batch = Batch(images, labels, jnp.ones(6), jnp.int32(0))
    losses = partial(_fedmix_losses, False, _Mixup(strength, mean_image, mean_label))
    extra = {"sample_losses": losses, "extra_sample_arrays": (batch.mask,)}
    step = jax.jit(lambda v: task.loss_and_gradient(v, batch, None, **extra))
    loss, gradient, _ = step(variables)
    expected, expected_gradient = jax.jit(jax.value_and_grad(by_hand))(variables["params"])
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert_trees_all_close(gradient, expected_gradient, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_micro_batches_do_not_change_step(name):
    hp = {"local_lr": 0.1, "mixup_lambda": 0.3}
    whole = make_small_federation(method(name), hp=hp)
    pieces = make_small_federation(
        method(name), hp=hp, model=make_linear_model()._replace(micro_batch=2)
    )
    assert_trees_all_close(whole.run(2)[0], pieces.run(2)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_averages_are_normalized(name):
    """As if images had been stored normalised."""
    images, labels = make_blobs()
    shift, scale = np.float32(0.4), np.float32(0.5)
    hp = {"local_lr": 0.1, "mixup_lambda": 0.3}
    stored = make_small_federation(method(name), hp=hp, data=((images - shift) / scale, labels))

    def normalising(training, plan):
        task = training.task._replace(mean=(0.4,), std=(0.5,))
        return method(name)(training._replace(task=task), plan)

    within = make_small_federation(normalising, hp=hp)
    actual, expected = (one.train(1) for one in (within, stored))
    assert_trees_all_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_single_average_pulls_to_its_label():
    """Where the client's images are zero, NaiveMix learns from the other client's average alone."""
    images, labels = make_blobs((6, 6))
    images[:6], labels[:6] = 0, 0
    hp = {"local_lr": 1.0, "mixup_lambda": 0.5}
    federation = make_small_federation(
        method("naivemix", None), hp=hp, sizes=(6, 6), data=(images, labels)
    )
    start = federation.global_params(federation.initial_state())
    moved = federation.train(1)
    assert np.abs(moved["w"] - start["w"]).max() > 1e-3
    assert softmax_gradient(start["w"], start["b"], np.zeros((6, 4)), labels[:6])[0].max() == 0


def test_fedmix_as_base():
    hp = {"local_lr": 0.1, "mixup_lambda": 0.2, "gamma": 0.0, "gamma_decay": 1.0}
    alone = make_small_federation(method("fedmix"), hp=hp, participation=0.7)
    over = make_small_federation(bind_options(fsl, base=method("fedmix")), hp=hp, participation=0.7)
    assert set(over.inputs) - {"server_epochs"} == set(alone.inputs) == {"averages"}
    assert_trees_all_equal(over.inputs["averages"], alone.inputs["averages"])
    actual, expected = (one.train(2) for one in (over, alone))
    assert_trees_all_close(actual, expected, atol=1e-6)


# --- whole runs ------------------------------------------------------------------------------


SETTINGS = {"partition": "dirichlet_balanced", "alpha": 0.5}
SETTINGS |= {"num_clients": 5, "participation": 1.0, "rounds": 4}
MIXED = {"options": {"mean_size": 4}, "hp": {"mixup_lambda": 0.2}, **SETTINGS}


@pytest.mark.slow
def test_seeds_with_unequal_averages_share_program():
    """Whose averages are fewer than others' reads none of the padding."""
    specs = [make_spec("fedmix", **MIXED, seed=s) for s in range(3)]
    results = sweep_specs(specs, spread="runs")
    counts = [int(MeanBlocks(4).num_averages(one.partition.sizes).sum()) for one in results]
    fewest = int(np.argmin(counts))
    assert counts[fewest] < max(counts)
    alone, together = run_spec(specs[fewest]), results[fewest]
    for name in ("train_loss", "bytes_up"):
        np.testing.assert_allclose(alone.metrics[name], together.metrics[name], rtol=2e-4)


@pytest.mark.slow
def test_averages_are_sent_once():
    mixed, plain = (
        run_spec(make_spec(name, **arguments))
        for name, arguments in (("fedmix", MIXED), ("fedavg", SETTINGS))
    )
    count = int(MeanBlocks(4).num_averages(mixed.partition.sizes).sum())
    sent = 4 * (4 + NUM_CLASSES) * count
    up = mixed.metrics["bytes_up"] - plain.metrics["bytes_up"]
    down = mixed.metrics["bytes_down"] - plain.metrics["bytes_down"]
    np.testing.assert_array_equal(up, [sent, 0, 0, 0])
    np.testing.assert_array_equal(down, [5 * sent, 0, 0, 0])

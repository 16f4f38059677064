"""FedDM and FedAF: rounds against float64 loops, limit identities, invariances, bad input."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.algorithm_builders import make_method_federation
from support.data import (
    CLIENT_SIZES,
    IMAGE_SHAPE,
    NUM_CLASSES,
    consecutive_partition,
    make_blobs,
    make_user_dataset,
)
from support.networks import make_linear_model
from support.reference_loop import flatten_inputs, softmax
from support.small_runs import make_spec

from fedjax_het.algorithms.fedaf import _DISTANCES
from fedjax_het.condensation.distribution_matching import compute_class_mean_logits
from fedjax_het.condensation.privacy import add_noise_to_means, clip_rows, compute_gaussian_epsilon
from fedjax_het.config.run_spec import RunSpec
from fedjax_het.core.client_loop import Cohort
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.task import Task
from fedjax_het.core.work_items import ClientClassWork, CondensationWork
from fedjax_het.data import partition_from_clients
from fedjax_het.runtime.build import prepare_group
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.utils.errors import ConfigError

PIXELS = int(np.prod(IMAGE_SHAPE))


def make_quick(name, options=None, hp=None, **settings):
    """A method with settings that make it quick; every batch is the whole class or pool."""
    fast = {"ipc": 2, "steps": 3, "server_epochs": 4, "server_batch_size": 64}
    settings = {"batch_size": 32, **settings}
    return make_method_federation(name, {**fast, **(options or {})}, hp, **settings)


def run(name, rounds=1, options=None, hp=None, **settings):
    federation = make_quick(name, options, hp, **settings)
    return federation, federation.run(rounds)[0]


def images_of(state):
    """[K, C, ipc, pixels]"""
    images = np.asarray(state.clients.inputs)
    return images.reshape(-1, NUM_CLASSES, images.shape[2], PIXELS)


def weights_of(state):
    """[pixels, C]"""
    return np.asarray(state.server.variables["params"]["w"])


def find_condensed_pairs(state):
    """Return whether each pair condensed in the last round, `[K, C]` bool."""
    return np.asarray(state.clients.created_round).reshape(-1, NUM_CLASSES) == int(state.round)


# --- a float64 loop ------------------------------------------------------------------------


def gaussian_mmd_gradient(u, v):
    gap, variances = u - v, NUM_CLASSES * np.array([1 / 16, 1 / 4, 1, 4, 16])
    return gap * (2 * np.exp(-(gap @ gap) / (2 * variances)) / variances).mean()


def cosine_gradient(u, v):
    length, direction = np.linalg.norm(u), v / np.linalg.norm(v)
    return (u * (u @ direction) / length**2 - direction) / length


DISTANCE_GRADIENTS = {
    "swd": lambda u, v: 2 * (u - v) / NUM_CLASSES,
    "mmd": gaussian_mmd_gradient,
    "cosine": cosine_gradient,
    "l2": lambda u, v: (u - v) / np.linalg.norm(u - v),
}


def round_pixels(images, bits, mean=0.0, std=1.0):
    """Normalized images whose pixels are multiples of 1 / (2**bits - 1) in [0, 1]."""
    max_level = 2**bits - 1
    pixels = np.clip(images * std + mean, 0, 1)
    return (np.round(pixels * max_level) / max_level - mean) / std


class Oracle:
    """Rounds of FedAF or FedDM on softmax regression, whose features are the pixels, by loops.

    With batches of whole classes and gamma = 1 nothing but the initial images is drawn.
    """

    def __init__(self, federation, start, *, options, logit_term, ipc, steps, epochs, least):
        images, labels = make_blobs()
        self.x, self.y = flatten_inputs(images), labels
        self.f, self.hp = federation, {k: float(v) for k, v in federation.hp.items()}
        params = federation.global_params(start)
        self.w, self.b = (params[n].astype(np.float64) for n in ("w", "b"))
        self.logit_term, self.ipc, self.steps, self.epochs = logit_term, ipc, steps, epochs
        self.least, self.distance = least, options.get("distance", "swd")
        self.bits = options.get("upload_bits", 32)

    def owned(self, k):
        held = self.f.scheduler.partition.client_indices(k)
        return {c: held[self.y[held] == c] for c in range(NUM_CLASSES) if (self.y[held] == c).any()}

    def round(self, r):
        logits = self.x @ self.w + self.b
        owned = [self.owned(k) for k in range(len(CLIENT_SIZES))]
        v, targets = {}, {}
        for c in range(NUM_CLASSES):
            holdings = [classes[c] for classes in owned if c in classes]
            means = [logits[m].mean(0) for m in holdings if len(m) >= self.least]
            if means:
                v[c] = np.mean(means, 0)
                if "tau" in self.hp:
                    targets[c] = np.mean([softmax(m / self.hp["tau"]) for m in means], 0)
        self.images = {
            (k, c): self.condense(r, k, c, held, v[c])
            for k, classes in enumerate(owned)
            for c, held in classes.items()
            if len(held) >= self.ipc  # so that it has peers: itself
        }
        self.train(targets)

    def condense(self, r, k, c, held, peers):
        seeds = self.f.scheduler.work_items.draw_init_examples(
            0, r, np.array([k * NUM_CLASSES + c])
        )[0]
        s = self.x[seeds].reshape(self.ipc, -1, PIXELS).mean(1)
        velocity, real = np.zeros_like(s), self.x[held].mean(0)
        for _ in range(self.steps):
            gap = s.mean(0) - real
            slope = 2 * gap
            if self.logit_term:
                slope = slope + 2 * self.w @ (self.w.T @ gap)
            u = s.mean(0) @ self.w + self.b
            pull = self.hp.get("lambda_loc", 0.0)
            slope = slope + pull * self.w @ DISTANCE_GRADIENTS[self.distance](u, peers)
            gradient = np.tile(slope / self.ipc, (self.ipc, 1))
            velocity = self.hp["image_momentum"] * velocity + gradient
            s = s - self.hp["image_lr"] * velocity
        return s if self.bits == 32 else round_pixels(s, self.bits)

    def train(self, targets):
        x = np.concatenate(list(self.images.values()))
        y = np.repeat([c for _, c in self.images], self.ipc)
        velocity = [0.0, 0.0]
        for _ in range(self.epochs):
            z = x @ self.w + self.b
            dz = (softmax(z) - np.eye(NUM_CLASSES)[y]) / len(y)
            for c, r in targets.items():
                members = y == c
                if members.any():
                    dz[members] += (
                        self.hp["lambda_glob"] * self.pull(z[members].mean(0), r) / members.sum()
                    )
            gradients = x.T @ dz, dz.sum(0)
            for i, (weight, gradient) in enumerate(zip((self.w, self.b), gradients, strict=True)):
                velocity[i] = (
                    self.hp["server_momentum"] * velocity[i]
                    + gradient
                    + self.hp["server_weight_decay"] * weight
                )
            self.w, self.b = (
                p - self.hp["server_lr"] * v
                for p, v in zip((self.w, self.b), velocity, strict=True)
            )

    def pull(self, mean, r):
        """Gradient of (KL(r || t) + KL(t || r)) / 2, t = softmax(mean / tau), on the mean."""
        t = softmax(mean / self.hp["tau"])
        of_t = 0.5 * (np.log(t / r) + 1 - r / t)
        return t * (of_t - (t * of_t).sum()) / self.hp["tau"]


@pytest.mark.parametrize(
    ("name", "options", "hp"),
    [
        ("fedaf", {}, {"gamma": 1.0, "lambda_loc": 0.7, "lambda_glob": 1.3}),
        ("fedaf", {"owners": "all"}, {"gamma": 1.0, "lambda_loc": 0.7, "lambda_glob": 1.3}),
        ("fedaf", {"init": "real"}, {"gamma": 1.0, "lambda_loc": 0.0, "lambda_glob": 0.0}),
        ("feddm", {"clipping": "none"}, {"rho": 0.0, "server_weight_decay": 0.1}),
        ("feddm", {"clipping": "none", "upload_bits": 4}, {"rho": 0.0}),
        *(
            pytest.param(
                "fedaf",
                {"distance": distance},
                {"gamma": 1.0, "lambda_loc": 2.0},
                marks=pytest.mark.slow,
            )
            for distance in ("mmd", "cosine", "l2")
        ),
    ],
    ids=[
        *("fedaf", "fedaf-all-owners", "fedaf-without-both", "feddm", "feddm-4-bits"),
        *("fedaf-mmd", "fedaf-cosine", "fedaf-l2"),
    ],
)
def test_three_rounds_match_float64_loop(name, options, hp):
    hp = {**hp, "image_lr": 0.3, "image_momentum": 0.5, "server_lr": 0.2}
    federation = make_quick(name, options, hp)
    start = federation.initial_state()
    least = 1 if options.get("owners") == "all" else 2
    oracle = Oracle(
        *(federation, start),
        **{"options": options, "logit_term": name == "feddm", "least": least},
        **{"ipc": 2, "steps": 3, "epochs": 4},
    )
    state, _ = federation.run(3, start)
    for r in range(3):
        oracle.round(r)
    actual = federation.global_params(state)
    np.testing.assert_allclose(actual["w"], oracle.w, atol=5e-6)
    np.testing.assert_allclose(actual["b"], oracle.b, atol=5e-6)
    pairs = {
        (int(k), int(c)) for k, c in zip(*np.nonzero(find_condensed_pairs(state)), strict=True)
    }
    assert pairs == set(oracle.images) and len(pairs) > 5
    for k, c in pairs:
        np.testing.assert_allclose(images_of(state)[k, c], oracle.images[k, c], atol=5e-6)


# --- distances and quantized uploads --------------------------------------------------------


@pytest.mark.parametrize("name", ["mmd", "cosine", "l2"])
def test_distance_gradients(name):
    u, v = np.random.default_rng(0).normal(size=(2, NUM_CLASSES))
    gradient = jax.grad(_DISTANCES[name])(jnp.float32(u), jnp.float32(v))
    np.testing.assert_allclose(gradient, DISTANCE_GRADIENTS[name](u, v), rtol=1e-4)
    zeros = jnp.zeros(NUM_CLASSES)  # no logits yet
    assert np.isfinite(jax.grad(_DISTANCES[name])(zeros, zeros)).all()


@pytest.mark.parametrize("bits", [2, 8, 16])
def test_quantize_matches_float64(bits):
    rng, mean, std = np.random.default_rng(0), np.array([0.2, 0.5]), np.array([0.3, 0.7])
    task = Task(make_linear_model(), tuple(mean), tuple(std))
    images = rng.normal(size=(50, 4, 4, 2)).astype(np.float32)
    pixels = images.astype(np.float64) * std + mean
    assert (pixels < 0).any() and (pixels > 1).any()
    is_tie = np.abs(pixels * (2**bits - 1) % 1 - 0.5) < 0.02  # float32 may round the other way
    assert is_tie.mean() < 0.1
    actual = np.asarray(task.quantize(jnp.asarray(images), bits))
    expected = round_pixels(images.astype(np.float64), bits, mean, std)
    np.testing.assert_allclose(actual[~is_tie], expected[~is_tie], atol=1e-6)
    stored = task.normalize(rng.integers(0, 256, (9, 4, 4, 2)).astype(np.uint8))
    changes = np.abs(task.quantize(stored, bits) - stored)
    assert (changes.max() < 2e-6) == (bits >= 8)


def test_32_bits_equal_default():
    options = {"upload_bits": 32, "distance": "swd"}
    digests = [make_spec("fedaf", options=given).digest() for given in ({}, options)]
    assert digests[0] == digests[1]
    _, default = run("fedaf", 1, {})
    _, given = run("fedaf", 1, options)
    jax.tree.map(np.testing.assert_array_equal, default, given)


# --- limits and invariances ----------------------------------------------------------------


def test_fedaf_without_terms_is_plain_sharing():
    hp = {"gamma": 1.0, "lambda_loc": 0.0, "lambda_glob": 0.0}
    _, ours = run("fedaf", 2, {}, hp)
    _, plain = run("feddm", 2, {"clipping": "none", "logit_term": False}, {"rho": 0.0})
    np.testing.assert_array_equal(images_of(ours), images_of(plain))
    for name in ("w", "b"):
        a, b = (s.server.variables["params"][name] for s in (ours, plain))
        np.testing.assert_allclose(a, b, atol=1e-6)


def test_each_fedaf_term_has_effect():
    hp = {"gamma": 1.0, "lambda_loc": 0.0, "lambda_glob": 0.0}
    _, plain = run("fedaf", 1, {}, hp)
    _, local = run("fedaf", 1, {}, {**hp, "lambda_loc": 1.0})
    _, globally = run("fedaf", 1, {}, {**hp, "lambda_glob": 1.0})
    _, resampled = run("fedaf", 1, {}, {**hp, "gamma": 0.5, "lambda_loc": 1.0})
    assert np.abs(images_of(local) - images_of(plain)).max() > 1e-3
    np.testing.assert_array_equal(images_of(globally), images_of(plain))
    assert np.abs(weights_of(globally) - weights_of(plain)).max() > 1e-5
    assert np.abs(images_of(resampled) - images_of(local)).max() > 1e-4


@pytest.mark.slow
def test_sampled_distances_approximate_exact_images():
    hp = {"gamma": 1.0, "lambda_loc": 0.5}
    _, exact = run("fedaf", 1, {}, hp)
    _, rough = run("fedaf", 1, {"swd": "sampled", "swd_projections": 3}, hp)
    _, fine = run("fedaf", 1, {"swd": "sampled", "swd_projections": 20_000}, hp)
    gap = lambda s: np.abs(images_of(s) - images_of(exact)).max()  # noqa: E731
    assert gap(fine) < 0.1 * gap(rough)


@pytest.mark.slow
@pytest.mark.parametrize("plan", [(2, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("clipping", ["per_class", "global"])
def test_packing_does_not_change_results(plan, clipping):
    devices, lanes = plan
    options, hp = {"clipping": clipping, "augment_strategy": "flip"}, {"clip_norm": 0.01}
    _, reference = run("feddm", 2, options, hp, participation=0.8)
    _, packed = run(
        "feddm", 2, options, hp, participation=0.8, plan=make_execution_plan(lanes, devices)
    )
    for a, b in zip(jax.tree.leaves(reference), jax.tree.leaves(packed), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.slow
def test_per_client_items_match_per_class_items():
    """What clients as units are for is one norm over all classes; far above it nothing differs."""
    _, pairs = run("feddm", 2, {"clipping": "none"})
    _, clients = run("feddm", 2, {"clipping": "global"}, {"clip_norm": 1e9})
    assert (find_condensed_pairs(pairs) == find_condensed_pairs(clients)).all()
    here = find_condensed_pairs(pairs)
    # Pixels reach 30; the two programs round as they please.
    np.testing.assert_allclose(
        images_of(pairs)[here], images_of(clients)[here], rtol=1e-6, atol=1e-5
    )


@pytest.mark.slow
def test_clipping_bounds_client_or_class_step():
    options = {"steps": 1, "server_epochs": 0, "init": "noise"}  # far from the real means
    hp = {"clip_norm": 1e-3, "image_lr": 10.0}
    moved = {}
    for clipping in ("per_class", "global"):
        _, still = run("feddm", 1, {**options, "clipping": clipping}, {**hp, "image_lr": 0.0})
        _, state = run("feddm", 1, {**options, "clipping": clipping}, hp)
        moved[clipping] = (images_of(state) - images_of(still)) / 10
        here = find_condensed_pairs(state)
    by_class = np.linalg.norm(
        moved["per_class"].reshape(len(CLIENT_SIZES), NUM_CLASSES, -1), axis=-1
    )
    np.testing.assert_allclose(by_class[here], 1e-3, rtol=1e-3)
    by_client = np.linalg.norm(moved["global"].reshape(len(CLIENT_SIZES), -1), axis=-1)
    np.testing.assert_allclose(by_client[here.any(1)], 1e-3, rtol=1e-3)


@pytest.mark.slow
def test_empty_client_changes_nothing():
    _, without = run("fedaf", 2, sizes=(7, 12, 9))
    _, with_ = run("fedaf", 2, sizes=(7, 12, 9, 0))
    # Permutations are drawn over all images that there could be; a batch is the whole pool here.
    np.testing.assert_allclose(weights_of(with_), weights_of(without), atol=1e-6)


@pytest.mark.slow
def test_image_initialization_follows_options():
    still = {"image_lr": 0.0}
    images, labels = make_blobs()
    flat = images.reshape(len(images), -1)
    for init, options in (("mean", {"init_images": 3}), ("real", {}), ("noise", {})):
        federation, state = run("feddm", 1, {"init": init, **options}, still)
        here, actual = find_condensed_pairs(state), images_of(state)
        for k, c in zip(*np.nonzero(here), strict=True):
            held = federation.scheduler.partition.client_indices(k)
            real = flat[held[labels[held] == c]]
            if init == "real":
                nearest = np.abs(real[:, None] - actual[k, c][None]).max(-1).argmin(0)
                assert len(set(nearest)) == 2  # different ones
                np.testing.assert_allclose(real[nearest], actual[k, c], atol=1e-6)
            elif init == "mean":
                unit = k * NUM_CLASSES + c
                seeds = federation.scheduler.work_items.draw_init_examples(
                    0, 0, np.array([unit])
                ).reshape(2, 3)
                np.testing.assert_allclose(flat[seeds].mean(1), actual[k, c], atol=1e-6)
                assert (labels[seeds] == c).all()
        if init == "noise":
            drawn = actual[here]
            assert abs(drawn.mean()) < 0.3 and 0.7 < drawn.std() < 1.3


@pytest.mark.slow
def test_warm_start_continues_from_last_images():
    still = {"image_lr": 0.0}
    for warm in (True, False):
        options = {"warm_start": warm, "init": "noise"}
        _, first = run("feddm", 1, options, still)
        _, second = run("feddm", 2, options, still)
        same = np.array_equal(images_of(first), images_of(second))
        assert same == warm


def test_class_mean_logits_cover_all_client_data():
    federation, _ = run("fedaf", participation=0.7)
    images, labels = make_blobs()
    params = federation.global_params(federation.initial_state())
    logits = images.reshape(len(images), -1) @ params["w"] + params["b"]
    drawn = set(federation.scheduler.draw_cohort(0).tolist())
    for devices in (1, 2):
        plan = make_execution_plan(1, devices)
        other = make_quick("fedaf", batch_size=4, plan=plan, participation=0.7)
        cohort = Cohort(other.scheduler.make_round(0), other.examples)
        variables = jax.tree.map(jnp.asarray, {"params": params, "state": {}})
        means, owns, counts = jax.jit(
            lambda v, c, p=plan, o=other: compute_class_mean_logits(
                o.task, p, v, c, len(CLIENT_SIZES)
            )
        )(plan.put(variables), cohort)
        for k in range(len(CLIENT_SIZES)):
            held = federation.scheduler.partition.client_indices(k)
            for c in range(NUM_CLASSES):
                members = held[labels[held] == c]
                assert counts[k, c] == (len(members) if k in drawn else 0)
                assert bool(owns[k, c]) == (k in drawn and len(members) > 0)
                if owns[k, c]:
                    np.testing.assert_allclose(means[k, c], logits[members].mean(0), atol=1e-5)


@pytest.mark.slow
def test_logits_can_exclude_non_condensing_clients():
    images, labels = make_blobs()
    counts = consecutive_partition().label_counts(labels, NUM_CLASSES)
    assert ((counts > 0) & (counts < 3)).any() and (counts >= 3).any(0).all()
    federation, state = run("fedaf", 1, {"owners": "condensing", "threshold": 3})
    params = federation.global_params(federation.initial_state())
    logits = images.reshape(len(images), -1) @ params["w"] + params["b"]
    for c in range(NUM_CLASSES):
        means = [
            logits[held[labels[held] == c]].mean(0)
            for k, held in enumerate(
                map(consecutive_partition().client_indices, range(len(CLIENT_SIZES)))
            )
            if counts[k, c] >= 3
        ]
        np.testing.assert_allclose(state.server.extra.logits[c], np.mean(means, 0), atol=1e-5)
    _, everyone = run("fedaf", 1, {"threshold": 3, "owners": "all"})
    assert np.abs(state.server.extra.logits - everyone.server.extra.logits).max() > 1e-2


# --- pairs ---------------------------------------------------------------------------------


def pair_units(**work):
    labels = make_blobs()[1]
    settings = CondensationWork(
        **{"ipc": 2, "steps": 5, "threshold": 3, "needs_full_pass": True, **work}
    )
    return ClientClassWork(consecutive_partition(), labels, NUM_CLASSES, settings, 4), labels


@pytest.mark.parametrize("top_up", [False, True])
@pytest.mark.parametrize("by_client", [False, True])
def test_missing_pairs_cost_nothing(by_client, top_up):
    units, labels = pair_units(is_per_client=by_client, repeats_examples=top_up)
    counts = consecutive_partition().label_counts(labels, NUM_CLASSES)
    assert units.num_steps.sum() == 5 * (counts >= 3).sum() == 5 * units.num_pairs.sum()
    for client in range(len(CLIENT_SIZES)):
        held = set(consecutive_partition().client_indices(client).tolist())
        for unit in units.work_ids_of_clients(np.array([client])):
            if not units.num_steps[unit]:
                continue
            batches, sizes = units.draw_batches(0, 2, np.array([unit]))
            assert batches.shape == (units.num_steps[unit], 4)
            for batch, size in zip(batches, sizes, strict=True):
                (class_,) = set(labels[batch].tolist())
                assert set(batch.tolist()) <= held
                there = counts[client, class_]
                assert size == (4 if top_up else min(4, there)) and there >= 3
                assert len(set(batch[: min(size, there)].tolist())) == min(size, there)
            if not by_client:
                assert class_ == unit % NUM_CLASSES
            else:
                kept = np.flatnonzero(counts[client] >= 3)
                assert (labels[batches[: len(kept), 0]] == kept).all()  # they take turns
            again, _ = units.draw_batches(0, 2, np.array([unit]))
            np.testing.assert_array_equal(again, batches)


def test_every_step_draws_new_network():
    units, _ = pair_units()
    unit = int(np.argmax(units.sizes))
    batches, _ = units.draw_batches(0, 0, np.array([unit]))
    assert len({tuple(sorted(b)) for b in batches.tolist()}) > 1
    assert (batches != units.draw_batches(0, 1, np.array([unit]))[0]).any()


def test_full_pass_visits_each_example_once():
    units, labels = pair_units()
    clients = np.array([5, 0, 3])
    examples, pairs = np.zeros((2, 5, 4), np.int32), np.zeros((2, 5, 4), np.int32)
    units.fill_full_pass(examples, pairs, clients)
    there = pairs < len(CLIENT_SIZES) * NUM_CLASSES
    expected = np.concatenate([consecutive_partition().client_indices(k) for k in sorted(clients)])
    assert sorted(examples[there]) == sorted(expected)
    for example, pair in zip(examples[there], pairs[there], strict=True):
        client, class_ = divmod(int(pair), NUM_CLASSES)
        assert labels[example] == class_ and example in consecutive_partition().client_indices(
            client
        )


def test_artifacts_and_summary():
    federation, state = run("fedaf", 2)
    left = federation.algorithm.artifacts(state)
    pairs = int(find_condensed_pairs(state).sum())
    assert left["condensed_images"].shape == (pairs, 2, *IMAGE_SHAPE)
    for image_set, k, c in zip(
        left["condensed_images"], left["condensed_clients"], left["condensed_classes"], strict=True
    ):
        expected = images_of(state)[k, c].reshape(2, *IMAGE_SHAPE)
        np.testing.assert_allclose(image_set, expected, rtol=1e-3, atol=1e-3)
    counted = federation.algorithm.summary(federation.hp, state)
    assert counted == {"condensed_pairs": pairs, "condensed_images": 2 * pairs}
    owned = np.asarray(left["soft_labels"]).sum(1)
    np.testing.assert_allclose(owned[owned > 0], 1, atol=1e-6)


# --- privacy -------------------------------------------------------------------------------

PRIVATE = {"private": True, "init": "noise"}


def test_privacy_noise_scales_with_example_count():
    """Its deviation on every number is dp_noise * dp_clip / n."""
    means = (jnp.zeros(40_000), jnp.zeros(10_000))
    for count in (10, 200):
        noise = {"dp_noise": 3.0, "dp_clip": 0.2}
        parts = add_noise_to_means(noise, means, jnp.int32(count), jax.random.key(0))
        drawn = np.concatenate(parts)
        wanted = 0.6 / count
        assert abs(drawn.std() / wanted - 1) < 0.02
        assert abs(drawn.mean()) < 4 * wanted / np.sqrt(len(drawn))
        assert len(np.unique(drawn)) > 0.99 * len(drawn)


def test_example_influence_on_mean_is_bounded():
    """Another example in the place of one: twice the norm over their number, however far off."""
    rng, count, norm = np.random.default_rng(0), 8, 1.5
    features, logits = rng.normal(size=(count, 6)), 100 * rng.normal(size=(count, 3))
    other = features.copy(), logits.copy()
    other[0][0], other[1][0] = -features[0], -logits[0]

    def mean(rows):
        parts = clip_rows(tuple(jnp.asarray(row) for row in rows), norm)
        together = np.concatenate([np.asarray(part) for part in parts], axis=1)
        assert (np.linalg.norm(together, axis=1) <= norm * (1 + 1e-5)).all()
        return together.mean(0)

    moved = np.linalg.norm(mean((features, logits)) - mean(other))
    np.testing.assert_allclose(moved, 2 * norm / count, rtol=1e-4)  # the worst there is
    few = (jnp.asarray(1e-3 * features),)
    np.testing.assert_allclose(clip_rows(few, norm)[0], few[0], rtol=1e-6)


@pytest.mark.parametrize("name", ["feddm", "fedaf"])
def test_example_influence_on_upload_is_bounded(name):
    """Without noise to speak of, and however far off the example is that takes its place."""
    options = {**PRIVATE, "steps": 1, "server_epochs": 0, "clipping": "none"}
    hp = {"dp_noise": 1e-6, "dp_clip": 1e-3, "image_lr": 1.0}
    images, labels = make_blobs()
    far = images.copy()
    far[0] = 15.0  # of client 0
    ends = []
    for data in ((images, labels), (far, labels)):
        federation, state = run(name, 1, options, hp, data=data)
        ends.append((images_of(state), federation.algorithm.artifacts(state)))
    change = np.abs(ends[0][0] - ends[1][0])
    own = change[0, labels[0]].copy()
    change[0, labels[0]] = 0
    if name == "feddm":
        assert 0 < own.max() < 1e-2
        assert change.max() == 0  # of no other class, of no other client
    else:
        gap = np.abs(ends[0][1]["class_logits"] - ends[1][1]["class_logits"])
        assert 0 < gap.max() <= 2 * 1e-3


def test_privacy_noise_moves_images():
    options = {**PRIVATE, "steps": 1, "server_epochs": 0, "clipping": "none"}

    def after(noise):
        return images_of(run("feddm", 1, options, {"dp_noise": noise, "dp_clip": 0.5})[1])

    still, nearly, loud = after(1e-6), after(2e-6), after(50.0)
    assert np.abs(loud - still).max() > 100 * np.abs(nearly - still).max() > 0


def test_epsilon_matches_renyi_closed_form():
    pytest.importorskip("dp_accounting")
    sigma, delta, queries = 8.0, 1e-5, 10
    orders = np.linspace(1.01, 200, 50_000)
    renyi = queries * orders / (2 * (sigma / 2) ** 2)  # the sensitivity is twice the norm
    least = renyi + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
    common = {"dp_noise": sigma, "delta": delta, "num_queries": queries, "batch_size": 32}
    actual = compute_gaussian_epsilon(num_examples=32, **common)
    assert actual == pytest.approx(least.min(), rel=0.02)
    assert compute_gaussian_epsilon(num_examples=3200, **common) < 0.5 * actual  # sampling hides
    # Without sampling, queries of all examples are more of the same.
    more = compute_gaussian_epsilon(
        num_examples=32, **{**common, "num_queries": 7}, num_full_queries=3
    )
    assert more == pytest.approx(actual)


def test_private_run_reports_epsilon():
    pytest.importorskip("dp_accounting")
    spent = {}
    for name in ("feddm", "fedaf"):
        federation = make_quick(name, PRIVATE)
        states = [federation.run(rounds)[0] for rounds in (1, 2)]
        spent[name] = [federation.algorithm.summary(federation.hp, s)["epsilon"] for s in states]
        assert 0 < spent[name][0] < spent[name][1] < np.inf
    assert spent["fedaf"] > spent["feddm"]  # it tells of logits too


# --- bad input -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ipc", "threshold"])
def test_rejects_more_images_than_examples(name):
    spec = make_spec("fedaf", options={"ipc": 2, name: 5000})
    with pytest.raises(ConfigError, match=f"{name} = 5000: expected at most"):
        prepare_group([spec], UserObjects(make_user_dataset()))


def test_one_class_clients_train_joint_model():
    labels = make_blobs()[1]
    clients = [np.flatnonzero(labels == c) for c in range(NUM_CLASSES)]
    units = ClientClassWork(
        partition_from_clients(clients),
        labels,
        NUM_CLASSES,
        CondensationWork(ipc=2, steps=1, threshold=2),
        4,
    )
    assert units.num_pairs.sum() == NUM_CLASSES


def test_random_projections_need_their_distance():
    """An option without effect is refused before anything compiles."""
    options = {"distance": "mmd", "swd": "sampled"}
    with pytest.raises(
        ConfigError, match="swd = 'sampled': expected no value, with distance = 'mmd'"
    ):
        RunSpec("fedaf", options=options).resolved()

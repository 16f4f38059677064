"""Runs with skews: equal to runs on changed arrays, and invariant to placement and resuming."""

import numpy as np
import pytest
from support.markers import slow_case
from support.small_runs import KilledError, assert_results_equal, make_killing_callback

from fedjax_het import (
    ConfigError,
    Placement,
    RunSpec,
    dataset_from_arrays,
    grid,
    load_dataset,
    make_partition,
    simulate,
    sweep,
)
from fedjax_het.compression import QSGD, TopK
from fedjax_het.core.example_transform import make_skew_inputs
from fedjax_het.core.rng import Stream, make_stream_key
from fedjax_het.data import partition_from_clients
from fedjax_het.runtime.data_assignment import assign_data, build_partition
from fedjax_het.skews import SKEW_SETTING, SKEWS, LongTail, Noise, Quantity
from fedjax_het.skews.assignment import assign_skews, select_examples
from fedjax_het.systems import Deadline

SETTINGS = {
    "model": "mlp",
    "num_clients": 6,
    "rounds": 3,
    "local_epochs": 1,
    "alpha": 0.5,
    "learning_rate": 0.1,
}
COMBINED = ["quantity:alpha=0.5", "label_noise:rate=0.3", "rotation:degrees=180", "noise:std=0.3"]
DIGITS = load_dataset("digits")


def run(skew=None, **settings):
    return simulate(RunSpec(**{**SETTINGS, "skew": skew, **settings}))


@pytest.mark.parametrize("name", [n for n in SKEWS if SKEWS[n].make.neutral is not None])
def test_neutral_skew_is_the_plain_run(name):
    kind = SKEWS[name].make
    neutral = {f"{name}.{kind.strength}": kind.neutral}
    specs = [RunSpec(**SETTINGS, skew=skew).resolved() for skew in (None, neutral)]
    assert specs[0] == specs[1] and specs[0].digest() == specs[1].digest()


def assign_on_host(skew, spec):
    """The partition and the labels of a run, and the images of all examples at their clients."""
    skews, seed = SKEW_SETTING.parse(skew), spec.partition_seed
    partition = make_partition(
        "dirichlet", DIGITS.train_labels, 10, num_clients=6, seed=seed, alpha=0.5
    )
    partition = select_examples(skews, partition, DIGITS.train_labels, 10, seed)
    skewed, own = assign_skews(skews, partition, DIGITS, seed)
    dataset = skewed or DIGITS
    owners = np.zeros(len(DIGITS.train_labels), np.int32)
    owners[partition.indices] = np.repeat(np.arange(6), partition.sizes)
    key = make_stream_key(seed, Stream.SKEW)
    inputs = make_skew_inputs(own, key, dataset.train_labels, owners)
    images = DIGITS.train_inputs / np.float32(255)
    if inputs.transform is not None:
        for k in range(6):
            positions = partition.client_indices(k)
            images[positions] = inputs.transform.apply(
                DIGITS.train_inputs[positions], positions, np.int32(k)
            )
    return partition, dataset.train_labels, images, inputs


@pytest.mark.parametrize(
    "skew",
    [COMBINED, slow_case(["blur", "contrast"]), slow_case(["concept"]), slow_case(["long_tail"])],
)
def test_run_equals_run_on_changed_arrays(skew):
    spec = RunSpec(**SETTINGS, partition="dirichlet", skew=skew).resolved()
    partition, labels, images, _ = assign_on_host(spec.skew, spec)
    changed = dataset_from_arrays(
        images,
        labels,
        DIGITS.test_inputs / np.float32(255),
        DIGITS.test_labels,
        num_classes=10,
        mean=DIGITS.mean,
        std=DIGITS.std,
    )
    settings = {**spec.to_dict(), "skew": None}
    plain = simulate(
        RunSpec.from_dict({**settings, "dataset": "user"}), dataset=changed, partition=partition
    )
    skewed = simulate(spec)
    for name in ("train_loss", "test_accuracy", "update_norm"):
        np.testing.assert_allclose(
            skewed.metrics[name], plain.metrics[name], rtol=2e-4, atol=3e-3, err_msg=name
        )
    assert np.abs(skewed.metrics["train_loss"] - run().metrics["train_loss"]).max() > 1e-2


@pytest.mark.parametrize("skew", [["rotation:degrees=180,levels=ramp"], ["concept"]])
def test_client_tests_have_the_skew_of_the_client(skew):
    result = run(skew, client_tests=True, test_per_client="all")
    *_, inputs = assign_on_host(result.spec.skew, result.spec)
    model = result.model()
    for k in range(6):
        images, labels = DIGITS.test_inputs, DIGITS.test_labels
        if inputs.test_transform is not None:
            positions = np.arange(len(labels))
            images = np.asarray(inputs.test_transform.apply(images, positions, np.int32(k)))
        if inputs.test_label_maps is not None:
            labels = inputs.test_label_maps[k][labels]
        predicted = np.asarray(model.predict(images))
        accuracy = np.mean(predicted == labels)
        assert result.metrics["client_accuracy"][-1, k] == pytest.approx(accuracy, abs=0.006)
    assert np.ptp(result.metrics["client_accuracy"][-1]) > 0.02


@pytest.mark.slow
def test_results_do_not_depend_on_placement_and_sweep():
    spec = RunSpec(**SETTINGS, skew=COMBINED, validation=0.2, client_tests=True)
    reference = simulate(spec)
    for placement in (Placement(lanes=2), Placement(devices=2), Placement(devices=1, lanes=4)):
        other = simulate(spec, placement=placement)
        assert_results_equal(other, reference, rtol=1e-4, atol=6e-3)
    stds = [0.0, 0.1, 0.3]
    specs = grid(**SETTINGS, validation=0.2, client_tests=True, skew={"noise.std": stds})
    assert [spec.skew for spec in specs] == [{"noise.std": std} for std in stds]
    results = sweep(specs, progress=None).results
    for spec, result in zip(specs, results, strict=True):
        assert_results_equal(result, simulate(spec), rtol=1e-4, atol=6e-3)


def test_resume_is_bit_equal(eager, tmp_path):
    spec = RunSpec(**{**SETTINGS, "rounds": 6}, skew=COMBINED)
    whole = simulate(spec)
    with pytest.raises(KilledError):
        simulate(spec, output_dir=tmp_path, progress=make_killing_callback(1))
    assert (tmp_path / "checkpoint.npz").exists()
    assert_results_equal(simulate(spec, output_dir=tmp_path, resume=True), whole)


def test_all_kinds_combine():
    images = [np.repeat(DIGITS.train_inputs, 3, axis=-1), np.repeat(DIGITS.test_inputs, 3, axis=-1)]
    dataset = dataset_from_arrays(
        images[0], DIGITS.train_labels, images[1], DIGITS.test_labels, mean=[0.3] * 3, std=[0.4] * 3
    )
    spec = RunSpec(**{**SETTINGS, "rounds": 1}, skew=list(SKEWS), client_tests=True)
    result = simulate(spec, dataset=dataset)
    assert {key.partition(".")[0] for key in result.spec.skew} == {*SKEWS}
    assert np.isfinite(result.metrics["train_loss"]).all()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["feddm", "fedaf"])
def test_condensing_clients_see_their_skew(algorithm):
    options = {"ipc": 1, "steps": 2, "server_epochs": 1}
    settings = {**SETTINGS, "rounds": 2, "options": options}
    del settings["local_epochs"], settings["learning_rate"]
    settings |= {"model": "convnet", "width": 4, "depth": 1}
    plain, inverted = (
        simulate(RunSpec(algorithm, **settings, skew=skew))
        for skew in (None, ["inversion:levels=equal"])
    )
    assert np.isfinite(inverted.metrics["train_loss"]).all()
    assert not np.allclose(plain.metrics["test_accuracy"], inverted.metrics["test_accuracy"])


@pytest.mark.slow
def test_held_out_clients_have_their_skew():
    plain, inverted = (
        run(skew, held_out_clients=2, held_out_epochs=1)
        for skew in (None, ["inversion:levels=equal"])
    )
    assert not np.array_equal(
        plain.artifacts["held_out_accuracy"], inverted.artifacts["held_out_accuracy"]
    )


def test_results_name_the_data_set_and_the_partition(tmp_path):
    """Label skews leave the digest of the data set, and a sweep finds its results again."""
    spec = RunSpec(**{**SETTINGS, "rounds": 1}, skew=COMBINED)
    result, plain = simulate(spec), run(rounds=1)
    assert result.summary["dataset_digest"] == plain.summary["dataset_digest"]
    assert result.summary["partition_digest"] != plain.summary["partition_digest"]
    split = build_partition(spec.resolved(), DIGITS)
    assert result.summary["partition_digest"] == split.digest()
    own = make_partition("dirichlet", DIGITS.train_labels, 10, num_clients=6, seed=0, alpha=0.5)
    quantity = RunSpec(**{**SETTINGS, "alpha": None, "rounds": 1}, skew="power_law:exponent=1")
    ginis = [r.summary["split"]["size_gini"] for r in (simulate(quantity, partition=own), plain)]
    assert ginis[0] > ginis[1] + 0.05


def test_forms_of_the_setting_are_equal():
    forms = (
        ["quantity:alpha=0.5", "noise:std=0.3"],
        ["noise:std=0.3", "quantity:alpha=0.5"],
        [Noise(std=0.3), Quantity(alpha=0.5)],
        {"noise.std": 0.3, "quantity.alpha": 0.5},
    )
    specs = [RunSpec(**SETTINGS, skew=form).resolved() for form in forms]
    assert len({spec.digest() for spec in specs}) == 1
    label = RunSpec(model="mlp", skew=["label:alpha=0.1", "noise:std=0.3"]).resolved()
    named = RunSpec(model="mlp", partition="dirichlet", alpha=0.1, skew=["noise:std=0.3"])
    assert label == named.resolved()


@pytest.mark.parametrize(
    ("skew", "message"),
    [
        ("nois:std=1", "skew = 'nois' is unknown: did you mean 'noise'"),
        ("noise:sdt=1", "skew noise = 'sdt' is unknown: did you mean 'std'"),
        ("noise:std=-1", "skew noise:std = -1: expected a .*number >= 0"),
        ("noise:std", "skew = 'noise:std': expected noise:field=value"),
        ("noise:std=1e39", r"skew noise:std = .* \(float32 stores numbers up to 3.4e.38\)"),
        (["noise", "std=1"], "skew = 'std=1': expected a kind and its fields, as in noise:std=0.3"),
        ("label", "skew = 'label': expected a field and its value, as in label:alpha=0.1"),
        ("label:alpha=0", "skew label:alpha = 0: expected a number in"),
        ({"noise.std": [0.1, 0.2]}, "skew noise:std = .*expected one value: only a sweep accepts"),
        (["noise:std=1", "noise:std=2"], "skew = 'noise:std=2': expected noise once"),
        (["label:alpha=0.1", "domain"], "skew = .*expected one kind of partition"),
        ("permutation:levels=ramp", "levels = 'ramp': expected groups"),
        (3, "skew = 3: expected a list of skews"),
        ([["noise"], ["blur"]], r"skew = .*'blur'\]\]: expected one list of skews; a sweep"),
        ("color", "skew color = .*: expected images of three channels"),
        (
            "rotation:groups=7",
            "skew rotation:groups = 7: expected at most 6, the number of clients",
        ),
    ],
)
def test_wrong_skew_is_one_line(skew, message):
    with pytest.raises(ConfigError, match=message) as raised:
        simulate(RunSpec(**{**SETTINGS, "alpha": None}, skew=skew))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "fields", "message"),
    [
        (Noise, {"std": -1}, "noise:std = -1: expected a finite number >= 0"),
        (Noise, {"levels": "x"}, "noise:levels = 'x' is unknown"),
        (TopK, {"fraction": 2}, r"topk:fraction = 2: expected a number in \(0, 1\]"),
        (QSGD, {"levels": 0}, r"qsgd:levels = 0: expected a whole number in \[1, 4194304\]"),
        (Deadline, {"seconds": -1}, "deadline:seconds = -1: expected a finite number > 0"),
    ],
)
def test_constructors_validate_their_fields(kind, fields, message):
    with pytest.raises(ConfigError, match=message):
        kind(**fields)


def test_averages_of_images_exclude_skews_of_images():
    with pytest.raises(ConfigError, match=r"skew = 'noise': expected no skew of images: fedmix"):
        RunSpec("fedmix", model="mlp", skew="noise:std=0.1").resolved()
    assert RunSpec("fedmix", model="mlp", skew="quantity:alpha=1").resolved().skew


def test_label_skew_excludes_a_partition():
    with pytest.raises(ConfigError, match=r"alpha = 0.5: expected no value: skew label is"):
        RunSpec(**SETTINGS, skew="label:alpha=0.1").resolved()


SHARED = partition_from_clients([range(60), range(40, 100), range(100, 160)])


@pytest.mark.parametrize("skew", ["concept", "label_noise", "quantity", "power_law"])
def test_skews_that_clients_cannot_share_are_one_line(skew):
    expected = rf"^skew = '{skew}': expected clients that share no examples \(20 examples belong"
    with pytest.raises(ConfigError, match=expected):
        simulate(RunSpec(model="mlp", num_clients=3, rounds=1, skew=skew), partition=SHARED)


def test_skews_of_images_that_clients_share_have_a_warning(caplog):
    for skew, count in (("noise", 1), ("churn", 0)):
        caplog.clear()
        spec = RunSpec(model="mlp", num_clients=3, rounds=1, skew=skew).resolved()
        assign_data(spec, DIGITS, None, SHARED)
        assert caplog.text.count("with the skew of the last client") == count


def test_long_tail_counts_an_example_of_several_clients_once():
    labels = np.arange(160) % 2
    skewed = select_examples([LongTail(ratio=4)], SHARED, labels, 2, 0)
    clients = [set(skewed.client_indices(k).tolist()) for k in range(3)]
    kept = set().union(*clients)
    assert clients == [kept & set(SHARED.client_indices(k).tolist()) for k in range(3)]
    assert np.bincount(labels[[*kept]]).tolist() == [80, 20]


@pytest.mark.parametrize("skew", ["label:alpha=1", "natural"])
def test_own_partition_excludes_skews_that_are_partitions(skew):
    spec = RunSpec(model="mlp", num_clients=3, rounds=1, skew=["noise", skew])
    with pytest.raises(ConfigError, match=f"^skew = '{skew[:5]}.*expected a skew that is no part"):
        simulate(spec, partition=SHARED)


@pytest.mark.parametrize(
    ("skew", "message"),
    [
        ("noise:groups=3", "noise:groups = 3 has no effect with levels = ramp"),
        ("rotation:groups=1", "rotation:groups = 1 has no effect: the skew changes the groups"),
        ("concept:groups=1", "concept:groups = 1 has no effect: the skew changes the groups"),
        ("churn:rounds=5", "churn:rounds = 5: the run ends after 3 rounds, before the last phase"),
        ("noise:levels=groups,groups=3", ""),
        ("rotation", ""),
        ("drift", ""),
    ],
)
def test_fields_without_effect_have_a_warning(skew, message):
    spec = RunSpec(**SETTINGS, skew=skew).resolved()
    warnings = [text for kind in SKEW_SETTING.parse(spec.skew) for text in kind.list_warnings(spec)]
    assert len(warnings) == bool(message) and message in "".join(warnings)

"""Models that are kept: saved, loaded, asked, and evaluated."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import serialization
from support.data import make_user_dataset
from support.markers import slow_case
from support.networks import TwoLayers
from support.small_runs import make_spec, run_spec

from fedjax_het import ConfigError, Result, dataset_from_arrays, evaluate, load_model, simulate
from fedjax_het.nn import count_parameters
from fedjax_het.utils.io import DamagedFileError

DATA = make_user_dataset()


def with_tests(**settings):
    return {"client_tests": True, "test_per_client": 6, **settings}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("fedavg", {}),
        slow_case("dynafed", {}),
        slow_case("fedbn", {"model": "convnet", "width": 4, "depth": 1, "norm": "batch"}),
        slow_case("moon", {}),
        slow_case("fsl", {}),
    ],
)
def test_saved_model_has_the_last_accuracy(name, settings, tmp_path):
    result = run_spec(make_spec(name, rounds=5, **settings))
    path = result.save_model(tmp_path / "model.msgpack")
    model = load_model(path)
    measured = evaluate(model, DATA)
    assert measured.accuracy == result.metrics["test_accuracy"][-1]
    np.testing.assert_allclose(measured.loss, result.metrics["test_loss"][-1], rtol=1e-5)
    assert measured.confusion.sum() == len(DATA.test_labels)
    jax.tree.map(np.testing.assert_array_equal, model.variables, result.model().variables)
    assert count_parameters(model.variables) > 0
    assert (model.input_spec.mean, model.input_spec.class_names) == (DATA.mean, DATA.class_names)


@pytest.mark.parametrize(
    ("name", "options"),
    [("fedamp", {}), slow_case("apfl", {"preset": "fedtorch"}), slow_case("ditto", {})],
)
def test_client_models_have_the_last_accuracy(name, options, tmp_path):
    result = run_spec(make_spec(name, rounds=5, options=options, **with_tests()))
    tests = result.tests
    for k in range(3):
        model = load_model(result.save_model(tmp_path / f"{k}.msgpack", client=k))
        held = tests.client_indices(k)
        actual = model.evaluate(DATA.test_inputs[held], DATA.test_labels[held])
        np.testing.assert_allclose(actual.accuracy, result.metrics["client_accuracy"][-1, k])
        assert model.client == k and f"client {k}" in repr(model)


def test_representation_names_the_dataset_of_the_settings():
    model = run_spec(make_spec(rounds=1)).model()
    assert repr(model).endswith(f"on {DATA.name})")
    model = dataclasses.replace(model, spec=dataclasses.replace(model.spec, dataset="digits"))
    assert repr(model).endswith(f"on digits (own {DATA.name!r}))")


def test_load_model_requires_the_user_network(tmp_path):
    result = simulate(make_spec(model=None, rounds=5), dataset=DATA, network=TwoLayers)
    path = result.save_model(tmp_path / "model.msgpack")
    model = load_model(path, network=TwoLayers)
    assert evaluate(model, DATA).accuracy == result.metrics["test_accuracy"][-1]
    with pytest.raises(ConfigError, match="network = None: expected the network"):
        load_model(path)
    with pytest.raises(ConfigError, match="network = "):
        load_model(path, network=lambda num_classes: TwoLayers(num_classes, hidden=7))
    named = run_spec(make_spec(rounds=5)).save_model(tmp_path / "named.msgpack")
    with pytest.raises(ConfigError, match="None, as the file names the network"):
        load_model(named, network=TwoLayers)


def test_logits_of_batches_and_single_images(tmp_path):
    model = run_spec(make_spec(rounds=5)).model()
    images = np.concatenate([DATA.train_inputs] * 20)  # several batches, the last one short
    logits = model.logits(images)
    assert len(images) > 500 and logits.shape == (len(images), DATA.num_classes)
    alone = np.concatenate([model.logits(image[None]) for image in DATA.train_inputs[:5]])
    np.testing.assert_allclose(logits[:5], alone, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(model.predict(images), logits.argmax(1))


def test_logits_of_integers_and_floats():
    images = np.random.default_rng(0).integers(0, 256, (40, 6, 6, 1), np.uint8)
    labels = np.arange(40) % 2
    data = dataset_from_arrays(images, labels, images, labels, mean=(0.3,), std=(0.4,))
    model = simulate(make_spec(rounds=1), dataset=data).model()
    as_floats = model.logits(images.astype(np.float32) / 255)
    np.testing.assert_allclose(model.logits(images), as_floats, rtol=1e-4, atol=1e-5)


def test_confusion_matrix():
    model = run_spec(make_spec(rounds=5)).model()
    actual = evaluate(model, DATA)
    predicted = model.predict(DATA.test_inputs)
    for label in range(DATA.num_classes):
        of_class = predicted[DATA.test_labels == label]
        counts = np.bincount(of_class, minlength=DATA.num_classes)
        np.testing.assert_array_equal(actual.confusion[label], counts)
        expected = counts[label] / counts.sum() if counts.sum() else np.nan
        np.testing.assert_allclose(actual.class_accuracy[label], expected, rtol=1e-6)


@pytest.mark.parametrize("cut", [0, 10, -1, "flip"])
def test_load_model_rejects_damaged_files(cut, tmp_path):
    path = run_spec(make_spec(rounds=1)).save_model(tmp_path / "model.msgpack")
    text = bytearray(path.read_bytes())
    if cut == "flip":
        text[-40] ^= 1
    else:
        text = text[:cut]
    path.write_bytes(text)
    with pytest.raises(DamagedFileError) as raised:
        load_model(path)
    assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda result: result.model(0), "clients of fedavg have no models of their own"),
        (lambda result: result.model().logits(np.zeros((2, 3, 3, 1), np.uint8)), "inputs = "),
        (lambda result: result.model().evaluate(DATA.test_inputs, [5] * 60), r"labels\[0\] = 5"),
        (lambda result: Result(result.spec, {}, {}).model(), "has no final state"),
    ],
)
def test_invalid_calls(ask, expected):
    with pytest.raises(ConfigError, match=expected):
        ask(run_spec(make_spec(rounds=1)))


@pytest.mark.parametrize("name", ["run.json", "run.state.npz"])
def test_file_of_a_result_is_no_model(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(
        ConfigError, match="expected a model, not a file of a result; `fedjax-het exp"
    ):
        load_model(tmp_path / name)
    with pytest.raises(ConfigError, match=r"init_from = .*: expected a model, not a file"):
        run_spec(make_spec(init_from=str(tmp_path / name)))


def test_model_of_a_method_without_global_model():
    result = run_spec(make_spec("fedamp", rounds=1))
    with pytest.raises(ConfigError, match="client = None: expected 0 to 5"):
        result.model()
    with pytest.raises(ConfigError, match="client = 6: expected 0 to 5"):
        result.model(6)


def make_model_of(images, **settings):
    labels = np.arange(len(images)) % 2
    data = dataset_from_arrays(images, labels, images, labels, **settings)
    return simulate(make_spec(rounds=1), dataset=data).model()


PIXELS = np.random.default_rng(0).integers(0, 256, (40, 4, 4, 1), np.uint8)
WIDE = PIXELS.astype(np.uint16) * 257
FLOATS = (PIXELS / 255).astype(np.float32)
STANDARDIZED = 4 * FLOATS - 2
EQUAL_INPUTS = {
    "uint8": (PIXELS, PIXELS.astype(np.int64), PIXELS.astype(np.uint16), FLOATS),
    "uint16": (WIDE, WIDE.astype(">u2"), PIXELS, FLOATS, FLOATS.astype(np.float64)),
    "float32": (FLOATS, FLOATS.astype(np.float64), FLOATS.astype(np.float16)),
}
REJECTED_INPUTS = {
    "uint8": (WIDE, WIDE.astype(np.int32), STANDARDIZED, FLOATS[..., 0], np.moveaxis(PIXELS, 3, 1)),
    "uint16": (PIXELS.astype(np.int64), WIDE.astype(np.int32), STANDARDIZED),
    "float32": (PIXELS, WIDE, PIXELS.astype(np.int64)),
}


@pytest.mark.parametrize("dtype", EQUAL_INPUTS)
def test_saved_model_knows_scale_of_images(dtype, tmp_path):
    first, *others = EQUAL_INPUTS[dtype]
    model = load_model(make_model_of(first).save(tmp_path / "model.msgpack"))
    spec = model.input_spec
    scale = {"uint8": 255, "uint16": 65535, "float32": 1}[dtype]
    assert (spec.dtype, spec.scale, spec.layout) == (dtype, scale, "NHWC")
    for images in others:
        tolerance = 1e-2 if images.dtype == np.float16 else 1e-4
        np.testing.assert_allclose(model.logits(images), model.logits(first), atol=tolerance)
    for images in REJECTED_INPUTS[dtype]:
        with pytest.raises(
            ConfigError, match=r"^(dtype of |range of |)inputs = .*: expected [^\n]+$"
        ):
            model.logits(images)


@pytest.mark.parametrize("type_name", ["<u2", ">u2"])
def test_model_of_8_bits_rejects_16_bits_by_type(type_name):
    with pytest.raises(ConfigError, match=r"^dtype of inputs = .*training images are uint8"):
        make_model_of(PIXELS).logits(WIDE.astype(type_name))


def test_dark_16_bit_images_keep_their_scale():
    model, dark = make_model_of(WIDE), WIDE // 257
    np.testing.assert_allclose(
        model.logits(dark), model.logits(dark / np.float32(65535)), atol=1e-6
    )
    labels = np.arange(len(WIDE)) % 2
    renamed = dataclasses.replace(dataset_from_arrays(WIDE, labels, WIDE, labels), name="wide")
    assert simulate(make_spec(rounds=1), dataset=renamed).model().input_spec.dtype == "uint16"


def test_former_model_files_are_read(tmp_path):
    """Files of version 0.6.0 have neither type nor scale of the images."""
    path, model = tmp_path / "model.msgpack", make_model_of(PIXELS)
    content = serialization.msgpack_restore(model.save(path).read_bytes())
    record = json.loads(content["record"])
    for name in ("dtype", "scale", "layout"):
        del record["inputs"][name]
    path.write_bytes(serialization.msgpack_serialize({**content, "record": json.dumps(record)}))
    former = load_model(path)
    assert former.input_spec.dtype is None
    np.testing.assert_array_equal(former.logits(PIXELS), model.logits(PIXELS))
    np.testing.assert_array_equal(former.logits(FLOATS), model.logits(FLOATS))
    assert former.logits(STANDARDIZED).shape == (40, 2)

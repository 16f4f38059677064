"""Synthetic images as files that other code can train on."""

import json

import flax.linen as nn
import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.small_runs import SYNTHESIS_OPTIONS, make_spec, run_spec

from fedjax_het import ConfigError, Result, simulate
from fedjax_het.cli import main

DATA = make_user_dataset()


@pytest.mark.parametrize("name", [slow_case("dynafed"), "feddm", slow_case("fedaf")])
def test_synthetic_dataset_file(name, tmp_path):
    result = run_spec(make_spec(name, rounds=5))
    with np.load(result.save_synthetic_dataset(tmp_path / "set.npz"), allow_pickle=False) as data:
        read = dict(data)
    images, count = read["images"], len(read["images"])
    assert images.dtype == np.float32 and images.shape[1:] == DATA.input_shape and count > 0
    seen = (images - read["mean"]) / read["std"]
    if name == "dynafed":
        kept = result.artifacts["synthetic_images"]
        logits = result.artifacts["synthetic_label_logits"]
        actual = np.log(read["soft_labels"])
        np.testing.assert_allclose(actual - actual[:, :1], logits - logits[:, :1], atol=1e-4)
        assert (read["clients"] == -1).all() and read["step_size"] > 0
    else:
        kept = result.artifacts["condensed_images"].astype(np.float32)
        each = kept.shape[1]
        kept = kept.reshape(-1, *DATA.input_shape)
        np.testing.assert_array_equal(read["labels"][::each], result.artifacts["condensed_classes"])
        np.testing.assert_array_equal(
            read["clients"][::each], result.artifacts["condensed_clients"]
        )
        for client, label in zip(read["clients"], read["labels"], strict=True):
            held = result.partition.client_indices(client)
            assert label in DATA.train_labels[held]  # who condenses a class has some of it
        assert np.isnan(read["step_size"])
    np.testing.assert_allclose(seen, kept, atol=1e-5)
    np.testing.assert_allclose(read["soft_labels"].sum(1), 1, rtol=1e-6)
    np.testing.assert_array_equal(read["soft_labels"].argmax(1), read["labels"])
    assert tuple(read["class_names"]) == DATA.class_names


def test_export_command(tmp_path, capsys):
    output = simulate(make_spec("feddm", rounds=3), dataset=DATA, output_dir=tmp_path / "out")
    result = str(tmp_path / "out" / f"{output.digest()}.json")
    model, synthetic = tmp_path / "model.msgpack", tmp_path / "deep" / "set.npz"
    assert main(["export", result, "--model", str(model), "--synthetic", str(synthetic)]) == 0
    assert str(model) in capsys.readouterr().out
    assert main(["export", result, "--model", str(model), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"files": [str(model)]}
    assert model.exists()
    with np.load(synthetic) as data:
        np.testing.assert_array_equal(data["images"], output.synthetic_dataset().inputs)


def test_usage_of_export_fits_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["export", "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_export_errors(tmp_path, capsys):
    output = simulate(make_spec(rounds=2), dataset=DATA, output_dir=tmp_path)
    message = "^fedavg synthesizes no data: expected a result of dynafed, feddm or fedaf$"
    with pytest.raises(ConfigError, match=message):
        output.synthetic_dataset()
    result = str(tmp_path / f"{output.digest()}.json")
    assert Result.load(result).model() is not None
    cases = {
        result: "--model is missing: expected a path, or --synthetic PATH",
        f"{result} --client 2 --synthetic s": "--client = 2: expected no value, or --model PATH",
        f"{result} --model m --client 2": "--client = 2: expected no value: clients of fedavg",
        f"{result} --synthetic s.npz": "fedavg synthesizes no data: expected a result of dynafed",
        f"{result.replace('.json', '.yaml')} --model m": ".yaml': expected the JSON file of a result",
        f"{result.replace('.json', '.npz')} --model m": ".npz': expected the JSON file of a result",
        f"{tmp_path}/none.json --model m": "the JSON file of a result",
        f"{result} --model {tmp_path}": "expected a file that can be written",
    }
    copy = Result.load(result).save(tmp_path / "without_state")
    cases[f"{copy} --model m"] = "has no final state: expected a run with --keep-state\n"
    cases[f"{copy} --synthetic s"] = "fedavg synthesizes no data"  # with a state, too
    network = nn.Sequential([lambda x: x.reshape(len(x), -1), nn.Dense(DATA.num_classes)])
    own = simulate(
        make_spec(rounds=2, model=None), dataset=DATA, network=network, output_dir=tmp_path
    )
    cases[f"{tmp_path}/{own.digest()}.json --model m"] = (
        "the network of the run is known in Python only: expected Result.load(result).save_model("
    )
    for words, expected in cases.items():
        assert main(["export", *words.split()]) == 2, words
        error = capsys.readouterr().err
        assert expected in error and error.count("\n") == 1, error


@pytest.mark.slow
def test_run_without_synthesis_has_no_synthetic_dataset(tmp_path, capsys):
    options = {**SYNTHESIS_OPTIONS, "trajectory_rounds": 4}
    spec = make_spec("dynafed", options=options, rounds=2)
    output = simulate(spec, dataset=DATA, output_dir=tmp_path)
    message = r"dynafed synthesizes after round 4 \(options trajectory_rounds\), .* has 2 rounds"
    with pytest.raises(ConfigError, match=message):
        output.save_synthetic_dataset(tmp_path / "set.npz")
    words = [
        "export",
        str(tmp_path / f"{output.digest()}.json"),
        "--synthetic",
        str(tmp_path / "s"),
    ]
    assert main(words) == 2 and capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "set.npz").exists() and not (tmp_path / "s").exists()

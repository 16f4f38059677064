"""Settings in a YAML file, which flags of the command line replace."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from support.small_runs import FAST_OPTIONS

from fedjax_het import ConfigError, Result, RunSpec, grid, simulate
from fedjax_het.algorithms import METHODS
from fedjax_het.cli import COMMANDS, _parse_command, main
from fedjax_het.cli.options import load_config_file
from fedjax_het.cli.run import RunCommand, build_run_spec
from fedjax_het.cli.sweep import SweepCommand, build_run_specs
from fedjax_het.config.run_spec import spec_to_yaml
from fedjax_het.utils.yaml_files import dump_yaml, load_yaml

SMALL = {"dataset": "digits", "model": "mlp", "num_clients": 4, "rounds": 2}


def written(tmp_path, text, name="run.yaml"):
    path = tmp_path / name
    path.write_text(text if isinstance(text, str) else yaml.safe_dump(text, sort_keys=False))
    return str(path)


@pytest.mark.parametrize("name", METHODS)
def test_spec_to_yaml_round_trip(name, tmp_path):
    more = {"partition": "dirichlet", "alpha": 0.07, "options": FAST_OPTIONS.get(name, {})}
    spec = RunSpec(name, dataset="digits", seed=5, **more)
    path = written(tmp_path, spec_to_yaml(spec.resolved()))
    assert RunSpec(**load_config_file(path)).digest() == spec.digest()


def test_result_files_repeat_the_run(tmp_path, capsys):
    spec = RunSpec("fedprox", alpha=0.1, seed=2, hp={"prox_mu": 1e-5}, precision="float32", **SMALL)
    result = simulate(spec, output_dir=tmp_path / "first")
    (said,) = (tmp_path / "first").glob("*.yaml")
    assert said.stem == result.digest()
    for path in (said, said.with_suffix(".json")):
        folder = tmp_path / path.suffix[1:]
        words = ["run", "--config", str(path), "--quiet", "--output-dir", str(folder)]
        assert main(words) == 0
        (again,) = (Result.load(one) for one in folder.glob("*[0-9a-f].json"))
        assert again.digest() == result.digest()
        assert again.metrics["test_accuracy"].tolist() == result.metrics["test_accuracy"].tolist()


def test_local_training_flags_and_files_agree(tmp_path, capsys):
    flags = [
        *("--local-optimizer", "nadam", "--optimizer-option", "nesterov=false"),
        *("--lr-schedule", "cosine", "--lr-step-schedule", "step", "--local-steps", "2"),
        *("--gradient-accumulation", "2", "--hp", "lr_warmup=1", "lr_step_every=3", "local_b1=0.8"),
        *("local_clip_norm=2", "--num-clients", "2", "--rounds", "1", "--model", "mlp"),
    ]
    spec = RunSpec(
        local_optimizer="nadam",
        optimizer_options={"nesterov": False},
        lr_schedule="cosine",
        lr_step_schedule="step",
        local_steps=2,
        gradient_accumulation=2,
        hp={"lr_warmup": 1, "lr_step_every": 3, "local_b1": 0.8, "local_clip_norm": 2},
        num_clients=2,
        rounds=1,
        model="mlp",
    )
    assert main(["run", *flags, "--quiet", "--output-dir", str(tmp_path)]) == 0
    (result,) = (Result.load(one) for one in tmp_path.glob("*[0-9a-f].json"))
    assert result.spec.digest() == spec.digest()
    (said,) = tmp_path.glob("*.yaml")
    assert RunSpec(**load_config_file(said)).digest() == spec.digest()
    listed = written(tmp_path, {"lr_schedule": ["cosine", "linear", "step"], **SMALL}, "s.yaml")
    actual = ["sweep", "--config", listed, "--hp", "lr_every=1,2", "lr_final=0,0.1", "--list"]
    capsys.readouterr()
    assert main([*actual, "--output-dir", str(tmp_path / "none")]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 + 2
    assert main(["run", *flags, "--local-epochs", "3"]) == 2
    assert "--local-epochs = 3: expected no value" in capsys.readouterr().err


def parsed(record, path, *own):
    return _parse_command(record, ["--config", path, *own])


def test_flags_replace_file_values(tmp_path):
    settings = {"alpha": 0.1, "rounds": 5, "hp": {"prox_mu": 0.1, "local_lr": "2e-1"}}
    settings |= {"quiet": True, "num-clients": 7, "client_tests": True, "model": None, "lanes": 4}
    path = written(tmp_path, settings)
    expected = RunCommand(
        alpha=0.1,
        rounds=9,
        hp={"prox_mu": 3.0, "local_lr": 0.2},
        quiet=True,
        num_clients=7,
        client_tests=True,
        lanes=4,
        config=Path(path),
    )
    own = ["--rounds", "9", "--hp", "prox_mu=3"]
    assert parsed(RunCommand, path, *own) == expected
    without = parsed(RunCommand, path, *own, "--no-quiet", "--alpha", "None", "--lanes=auto")
    assert without == replace(expected, quiet=False, alpha=None, lanes="auto")


def test_file_lists_make_a_sweep(tmp_path, capsys):
    settings = {"algorithm": ["fedavg", "fedprox"], "alpha": [0.1, 1], "seed": [0, 1], **SMALL}
    settings |= {"hp": {"prox_mu": [0.01, 0.1]}, "output_dir": str(tmp_path / "made")}
    path = written(tmp_path, settings)
    actual = parsed(SweepCommand, path)
    assert actual.hp == {"prox_mu": (0.01, 0.1)} and actual.seeds == (0, 1)
    assert actual.dataset == ("digits",) and actual.output_dir == tmp_path / "made"
    assert main(["sweep", "--config", path, "--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 * 2 * (1 + 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alhpa: 0.1", "setting = 'alhpa' is unknown: did you mean 'alpha'"),
        ("alpha: many", "alpha = 'many': expected a finite number"),
        ("alpha: [0.1, 1]", "alpha = [0.1, 1]: expected a finite number"),
        ("hp: 3", "hp = 3: expected values by name"),
        ("hp: {prox_mu: much}", "hp prox_mu = 'much': expected a finite number"),
        ("quiet: 3", "quiet = 3: expected True or False"),
        ("- alpha", "expected a file of names and values"),
        ("alpha: [", "expected a file of YAML"),
        ("", "expected a file of names and values"),
        ("alpha: !!python/object/apply:os.system [ls]", "expected a file of YAML"),
        ("rounds: 2.5", "rounds = 2.5: expected a whole number"),
    ],
)
def test_config_file_rejects_bad_content(text, expected, tmp_path, capsys):
    path = written(tmp_path, text)
    assert main(["run", "--algorithm", "fedprox", "--dataset", "digits", "--config", path]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1
    assert path in said


def test_missing_config_file(tmp_path, capsys):
    for config_path in (str(tmp_path / "none.yaml"), str(tmp_path)):
        assert main(["run", "--config", config_path]) == 2
        said = capsys.readouterr().err
        assert config_path in said and said.count("\n") == 1
    with pytest.raises(ConfigError, match="expected a file of YAML"):
        load_config_file(tmp_path)


def test_config_file_accepts_every_setting(tmp_path):
    for name in ("run", "sweep"):
        record = COMMANDS[name].config_class
        spec = RunSpec("dynafed", alpha=0.5, options={"preset": "code"}, **SMALL).resolved()
        said = json.loads(json.dumps(spec.to_dict()))
        actual = parsed(record, written(tmp_path, said))
        assert actual.options["preset"] in ("code", ("code",))


@pytest.mark.parametrize(
    ("text", "names", "lines"),
    [
        ("alpha: 1\nrounds: 2\nalpha: 2", ("alpha", "alpha"), (1, 3)),
        ("local-epochs: 1\n\nlocal_epochs: 1", ("local-epochs", "local_epochs"), (1, 3)),
        ("hp:\n  prox_mu: 1\n  prox_mu: 1", ("prox_mu", "prox_mu"), (2, 3)),
        ('{"seed": 1, "spec": {},\n"seed": 1}', ("seed", "seed"), (1, 2)),
    ],
)
def test_file_with_a_key_twice(text, names, lines, tmp_path, capsys):
    path = written(tmp_path, text)
    for command in ("run", "sweep"):
        assert main([command, "--config", path]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        places = [f"{name} in line {line}" for name, line in zip(names, lines, strict=True)]
        assert f"(each name once: {' and '.join(places)})" in line and path in line


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("010", 10), ("0o10", 8), ("0x1F", 31), ("-012", -12), ("+7", 7), ("1_000", "1_000")),
        *(("1e-3", 0.001), ("1.e2", 100.0), (".5", 0.5), ("-.inf", float("-inf")), ("1E5", 1e5)),
        *(("1:30", "1:30"), ("190:20:30", "190:20:30"), ("1.5:30", "1.5:30"), ("0b11", "0b11")),
        *((word, word) for word in ("yes", "no", "on", "off", "Yes", "NO", "y", "n", "=", "nan")),
        *(("true", True), ("False", False), ("null", None), ("~", None), ("", None)),
        *(("2026-01-02", "2026-01-02"), ("'010'", "010"), ("08", 8), ("<<x", "<<x")),
    ],
)
def test_plain_values_follow_yaml_1_2(text, value):
    loaded = load_yaml(f"x: {text}\ny: [1]")["x"]
    assert loaded == value and type(loaded) is type(value)
    assert load_yaml(dump_yaml({"x": value})) == {"x": value}
    assert load_yaml(dump_yaml({"x": text.strip("'")})) == {"x": text.strip("'")}


def test_yaml_merge_keys():
    text = "base: &base {alpha: 1, rounds: 2}\nother: {<<: *base, rounds: 3}\nlast: *base"
    content = load_yaml(text)
    assert content["other"] == {"alpha": 1, "rounds": 3} and content["last"] == content["base"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rounds: 1:30", "rounds = '1:30': expected a whole number"),
        ("resume: yes", "resume = 'yes': expected True or False"),
        ("rounds: 1" + "0" * 5000, "config = "),
    ],
)
def test_values_of_yaml_1_1_are_refused(text, message, tmp_path, capsys):
    assert main(["run", "--config", written(tmp_path, text)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize("text", ["yes", "off", "1:30", "1_000", "2026-01-01", "0o10", "1e3"])
def test_written_texts_are_texts_in_yaml_1_1(text):
    content = dump_yaml({"name": text})
    assert load_yaml(content) == yaml.safe_load(content) == {"name": text}


def test_file_in_utf_8_under_any_locale(tmp_path, monkeypatch):
    path = tmp_path / "run.yaml"
    path.write_bytes("dataset: Kätzchen".encode())
    monkeypatch.setattr("locale.getencoding", lambda: "ascii", raising=False)
    assert load_config_file(path) == {"dataset": "Kätzchen"}


@pytest.mark.parametrize(
    "words",
    [
        ["--metrics", "macro_f1", "calibration"],
        ["--metrics", "macro_f1, calibration"],
        ["--metrics=macro_f1", "--metrics=calibration"],
    ],
)
@pytest.mark.parametrize(
    "text", ["metrics: [macro_f1, calibration]", "metrics: 'macro_f1,calibration'"]
)
def test_metrics_as_a_list(words, text, tmp_path):
    spec = RunSpec(metrics=["macro_f1", "calibration"], **SMALL)
    assert spec == RunSpec(metrics="macro_f1, calibration", **SMALL)
    digest = spec.digest()
    path = written(tmp_path, f"{{dataset: digits, model: mlp, num_clients: 4, rounds: 2, {text}}}")
    small = ["--dataset=digits", "--model=mlp", "--num-clients=4", "--rounds=2"]
    for flags in ([*small, *words], ["--config", path]):
        assert build_run_spec(_parse_command(RunCommand, flags)).digest() == digest
        (spec,) = build_run_specs(_parse_command(SweepCommand, flags))
        assert spec.digest() == digest
    (spec,) = grid(metrics=["macro_f1", "calibration"], algorithm="fedavg", seed=0, **SMALL)
    assert spec.digest() == digest


@pytest.mark.parametrize("key", ["x", "rounds", "local-lr"])
def test_yaml_merge_precedence(key):
    def load(text):
        return load_yaml(text.replace("KEY", key))

    text = "a: &a {KEY: 1}\nlist:\n- inner: &b {<<: *a, KEY: 2}\nlast: {<<: *b, z: 3}"
    content = load(text)
    assert content["list"] == [{"inner": {key: 2}}] and content["last"] == {key: 2, "z": 3}
    both = "a: &a {KEY: 1}\nb: &b {KEY: 2, z: 2}\n"
    assert load(f"{both}c: {{<<: [*a, *b]}}")["c"] == {key: 1, "z": 2}
    assert load(f"{both}c:\n  <<: *b\n  <<: *a")["c"] == {key: 2, "z": 2}
    assert load(f"{both}c: {{KEY: 3, <<: [*a, *b]}}")["c"] == {key: 3, "z": 2}
    with pytest.raises(ValueError, match=f"{key} in line 1 and {key} in line 2"):
        load("a: &a {KEY: 1,\n KEY: 2}\nb: {<<: *a}")
    with pytest.raises(ValueError, match="<< in line 1: expected a mapping"):
        load_yaml("{<<: 3}")
    assert load_yaml("<<: {local-lr: 1}\nlocal_lr: 2") == {"local_lr": 2}
    assert load_yaml("&a {<<: *a, x: 1}") == {"x": 1}


def test_file_with_seed_and_seeds(tmp_path, capsys):
    path = written(tmp_path, {"seed": 3, "seeds": [0, 1]})
    assert main(["sweep", "--config", path, "--list"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--seeds = [0, 1]: expected seed or seeds, not both" in line and path in line

"""Trackers: what they keep, read back by their own libraries, also after a kill and a resume."""

import csv
import json
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.data import make_user_dataset
from support.paths import ROOT, TESTS
from support.small_runs import KilledError, assert_results_equal, make_spec, run_spec

from fedjax_het import ConfigError, Placement, Result, federation, register_tracker, simulate, sweep
from fedjax_het.cli import main
from fedjax_het.runtime import checkpointing, group_state, trackers
from fedjax_het.runtime.trackers import TRACKERS

NAMES = ("csv", "tensorboard", "wandb", "mlflow")
ROUNDS = 9


@pytest.fixture
def eager(monkeypatch):
    """Short chunks, and a checkpoint after each."""
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 2)
    monkeypatch.setattr(checkpointing, "CHECKPOINT_SECONDS", 0.0)


# --- read back: -> (rounds and values of every curve, settings) -------------------------------


def read_csv(folder, name):
    with open(folder / "csv" / f"{name}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    curves = {}
    for row in rows:
        for metric, text in row.items():
            if metric != "round" and text:
                curves.setdefault(metric, []).append((int(row["round"]), float(text)))
    assert [int(row["round"]) for row in rows] == list(range(1, len(rows) + 1))
    return curves, None


def read_tensorboard(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / name), size_guidance={"scalars": 0})
    events.Reload()
    own = [tag for tag in events.Tags()["scalars"] if not tag.startswith("summary/")]
    curves = {tag: [(each.step, each.value) for each in events.Scalars(tag)] for tag in own}
    curves.pop("final_accuracy", None)
    (text,) = events.Tensors("settings/text_summary")
    lines = text.tensor_proto.string_val[0].decode().splitlines()
    return curves, dict(line.strip().split(": ", 1) for line in lines)


def read_wandb(folder, name):
    """Of all parts that were kept offline, as `wandb sync` sends them on: every record of a file is
    one of its protocol buffers, in a log as LevelDB writes it."""
    from wandb.proto.wandb_internal_pb2 import Record

    curves, settings, ids = {}, {}, set()
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{name}-*.wandb")):
        for text in records_of(path.read_bytes()):
            record = Record.FromString(text)
            ids |= {record.run.run_id} - {""}
            settings |= {each.key: json.loads(each.value_json) for each in record.run.config.update}
            for item in record.history.item:
                metric = item.key or item.nested_key[0]
                if not metric.startswith("_"):
                    at = record.history.step.num, json.loads(item.value_json)
                    curves.setdefault(metric, []).append(at)
    assert len(ids) == 1
    return curves, settings


def records_of(data, block=2**15, header=7):
    """The records of a log: pieces with a checksum, a length and whether they end a record."""
    at, parts = header, []
    while at + header <= len(data):
        if block - at % block < header:
            at += block - at % block
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if kind == 0:
            return
        parts.append(data[at + header : at + header + length])
        at += header + length
        if kind in (1, 4):
            yield b"".join(parts)
            parts = []


def read_mlflow(folder, name):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedjax_het").experiment_id
    own = f"tags.`fedjax_het.run` = '{name}'"
    (found,) = client.search_runs([experiment], filter_string=own)
    assert found.info.status == "FINISHED" and found.data.tags["summary.rounds"]
    history = {m: client.get_metric_history(found.info.run_id, m) for m in found.data.metrics}
    curves = {m: [(each.step, each.value) for each in values] for m, values in history.items()}
    return curves, found.data.params


READ = {
    "csv": read_csv,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


def check(tracker, folder, result):
    """That a record has every measured number once, and the settings."""
    curves, settings = READ[tracker](folder, result.digest())
    expected = {
        metric: [(at + 1, value) for at, value in enumerate(values) if np.isfinite(value)]
        for metric, values in result.metrics.items()
        if values.ndim == 1 and metric not in ("bytes_up", "bytes_down", "client_samples")
    }
    assert curves.keys() == {metric for metric, values in expected.items() if values}
    for metric, values in curves.items():
        assert [at for at, _ in values] == [at for at, _ in expected[metric]], metric
        np.testing.assert_allclose(
            [value for _, value in values], [value for _, value in expected[metric]], rtol=1e-6
        )
    if settings is not None:
        assert settings["algorithm"] == result.spec.algorithm
        assert float(settings["hp.local_lr"]) == result.spec.hp["local_lr"]
        assert int(settings["rounds"]) == result.spec.rounds


def quick(name):
    library = name in ("wandb", "mlflow")  # seconds to import, to begin
    return pytest.param(name, marks=[pytest.mark.slow] * library)


@pytest.mark.filterwarnings("ignore")  # of the trackers' own
@pytest.mark.parametrize("tracker", [quick(name) for name in NAMES])
def test_record_has_every_round_once(tracker, tmp_path, monkeypatch, eager):
    """Also of a run that raised in a round and was resumed, whose rounds after the checkpoint are
    made again."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def breaks(now):
        if now.done >= 5 and not now.result:
            raise KilledError

    settings = make_spec(rounds=ROUNDS, eval_every=2)
    with pytest.raises(KilledError):
        run_spec(settings, output_dir=tmp_path, track=[tracker], callbacks=[breaks])
    if tracker == "csv":  # as a full disk leaves it
        (path,) = (tmp_path / "csv").glob("*.csv")
        path.write_text(path.read_text()[:-9])
    made = run_spec(settings, output_dir=tmp_path, track=[tracker], resume=True)
    assert_results_equal(made, run_spec(settings))
    check(tracker, tmp_path, made)
    again = run_spec(settings, output_dir=tmp_path, track=[tracker])  # begun again: a new record
    if tracker in ("csv", "tensorboard"):
        check(tracker, tmp_path, again)


KILLED = """
import os, signal, sys
from pathlib import Path
from support.data import make_user_dataset
from support.small_runs import make_spec
from fedjax_het import simulate
from fedjax_het.runtime import group_state

group_state.MAX_ROUNDS_PER_CHUNK = 2


def kill(now):
    if now.done >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)


resume = (Path(sys.argv[1]) / "checkpoint.npz").exists()
simulate(
    make_spec(rounds=9, eval_every=2),
    dataset=make_user_dataset(),
    output_dir=sys.argv[1],
    resume=resume,
    track=["csv", "tensorboard", "wandb", "mlflow"],
    callbacks=[kill],
)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_records_of_a_run_that_was_killed_twice(tmp_path):
    """Its trackers are ahead of its checkpoints whenever it is killed."""
    here = TESTS
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment = {
        **own,  # W&B of this process would serve its children, too, and outlive them
        "PYTHONPATH": os.pathsep.join([str(here), str(here.parent)]),
        "FEDJAX_HET_CHECKPOINT_SECONDS": "0",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    for kill_at in (3, 5, 99):
        command = [sys.executable, "-c", KILLED, str(tmp_path), str(kill_at)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert ended.returncode == (0 if kill_at == 99 else -signal.SIGKILL), ended.stderr
    (path,) = [p for p in tmp_path.glob("*.json") if len(p.stem) == 16]
    made = Result.load(path)
    assert made.summary["rounds"] == ROUNDS
    for tracker in NAMES:
        check(tracker, tmp_path, made)


def test_sweep_has_a_record_per_run(tmp_path, monkeypatch):
    monkeypatch.setattr(group_state, "MAX_ROUNDS_PER_CHUNK", 2)
    specs = [make_spec(seed=seed, rounds=16, patience=2 if seed else None) for seed in range(3)]
    made = sweep(
        specs,
        tmp_path,
        dataset=make_user_dataset(),
        track=["csv", "tensorboard"],
        placement=Placement(width=2, spread="runs", lanes=1),
        progress=lambda line: None,
    )
    assert any("stopped_early" in result.summary for result in made.results)
    for result in made.results:
        for tracker in ("csv", "tensorboard"):
            check(tracker, tmp_path, result)


class Kept:
    """A user's own record."""

    def __init__(self, opening, told):
        self.done, self.told = 0, told
        told.append(opening)

    def log(self, round, values):
        self.told.append((round, values))
        if round == 4:
            raise OSError(28, "No space left on device")

    def flush(self):
        pass

    def close(self, summary):
        self.told.append(summary)


def test_failing_tracker_is_logged_once(tmp_path, caplog, eager):
    told = []
    register_tracker("mine", lambda opening: Kept(opening, told))
    try:
        made = run_spec(make_spec(), output_dir=tmp_path, track=["mine", "csv"])
    finally:
        TRACKERS.reset()
    assert_results_equal(made, run_spec(make_spec()))
    check("csv", tmp_path, made)
    (line,) = [each for each in caplog.messages if "track" in each]
    assert line.startswith("track = 'mine': cannot be written (No space left on device)")
    assert [each[0] for each in told[1:]] == [1, 2, 3, 4]
    assert told[0].digest == made.digest() and told[0].folder == tmp_path and told[0].done == 0


def test_unusable_trackers_are_refused(tmp_path, monkeypatch):
    calls = (simulate, federation)
    for call in calls:
        with pytest.raises(ConfigError, match=r"^track = 'csb' is unknown: did you mean 'csv'"):
            call(make_spec(), dataset=make_user_dataset(), track=["csb"], output_dir=tmp_path)
        with pytest.raises(ConfigError, match=r"^track = \['csv'\]: expected an output_dir"):
            call(make_spec(), dataset=make_user_dataset(), track=["csv"])
    with pytest.raises(ConfigError, match=r"^track = \['csv'\]: expected an? directory"):
        sweep([make_spec()], dataset=make_user_dataset(), track=["csv"])
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(ConfigError) as raised:
            simulate(make_spec(), dataset=make_user_dataset(), track=[name], output_dir=tmp_path)
        said = str(raised.value)
        assert said.startswith(f"track = '{name}'") and f"fedjax_het[{name}]" in said
        assert "\n" not in said
    with pytest.raises(ConfigError, match="expected one that no tracker"):
        register_tracker("csv", lambda opening: None)


def test_extras_install_the_packages():
    import tomllib

    project = ROOT / "pyproject.toml"
    extras = tomllib.loads(project.read_text())["project"]["optional-dependencies"]
    for name, tracker in TRACKERS.items():
        for package in tracker.packages:
            assert any(word.startswith(package) for word in extras[name]), (name, package)


def test_command_tracks(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("track: [csv]\nrounds: 2\nnum_clients: 4\nmodel: mlp\n")
    words = ["--config", "run.yaml", "--partition", "iid", "--quiet"]
    assert main(["run", *words, "--output-dir", "out"]) == 0
    rounds = json.loads(capsys.readouterr().out.splitlines()[-1])["rounds"]
    (table,) = Path("out/csv").glob("*.csv")
    assert rounds == 2 and len(table.read_text().splitlines()) == 3

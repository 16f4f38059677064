"""Records of trackers, read by their own libraries, also after a kill and a resume."""

import csv
import json
import os
import signal
import struct
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.paths import ROOT, TESTS
from support.small_runs import KilledError, assert_results_equal, make_spec, run_spec, run_sweep

from fedjax_het import ConfigError, Result, federation, register_tracker, simulate, sweep
from fedjax_het.cli import main
from fedjax_het.runtime import trackers
from fedjax_het.runtime.trackers import TRACKERS, TrackedRun

SPEC = make_spec(rounds=9, eval_every=2)


# --- readers of records, which return (round, value) pairs by metric, and the settings ---------


def read_csv(folder, digest):
    with open(folder / "csv" / f"{digest}.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["round"]) for row in rows] == list(range(1, len(rows) + 1))
    names = rows[0].keys() - {"round"}
    curves = {
        name: [(int(row["round"]), float(row[name])) for row in rows if row[name]] for name in names
    }
    return {name: pairs for name, pairs in curves.items() if pairs}, None


def read_tensorboard(folder, digest):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard" / digest), size_guidance={"scalars": 0})
    events.Reload()
    curves = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }
    texts = {}
    for name in ("settings", "summary"):
        (text,) = events.Tensors(f"{name}/text_summary")
        lines = text.tensor_proto.string_val[0].decode().splitlines()
        parts = (line.strip().partition(":") for line in lines)
        texts[name] = {key: value.strip() for key, _, value in parts}
    assert int(texts["summary"]["rounds"])
    return curves, texts["settings"]


def read_wandb(folder, digest):
    """Read the files that `wandb sync` uploads: protocol buffers in a log of LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    curves, settings, ids = {}, {}, set()
    for path in sorted(folder.glob(f"wandb/offline-run-*/run-{digest}-*.wandb")):
        for record in map(Record.FromString, iterate_log(path.read_bytes())):
            ids |= {record.run.run_id} - {""}
            settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            for item in record.history.item:
                metric = item.key or item.nested_key[0]
                if not metric.startswith("_"):
                    pair = record.history.step.num, json.loads(item.value_json)
                    curves.setdefault(metric, []).append(pair)
    assert len(ids) == 1
    return curves, settings


def iterate_log(data, block=2**15, header=7):
    """Yield the records of a log, whose pieces have a checksum, a length and a kind."""
    position, parts = header, []
    while position + header <= len(data):
        if block - position % block < header:
            position += block - position % block
            continue
        length, kind = struct.unpack_from("<HB", data, position + 4)
        if kind == 0:
            return
        parts.append(data[position + header : position + header + length])
        position += header + length
        if kind in (1, 4):  # the end of a record
            yield b"".join(parts)
            parts = []


def read_mlflow(folder, digest):
    from mlflow.tracking import MlflowClient

    path = quote(str(folder / "mlflow.db"))
    client = MlflowClient(tracking_uri=f"sqlite+pysqlite:///{path}")
    experiment = client.get_experiment_by_name("fedjax_het").experiment_id
    query = f"tags.`fedjax_het.run` = '{digest}'"
    (run,) = client.search_runs([experiment], filter_string=query)
    assert run.info.status == "FINISHED" and run.data.tags["summary.rounds"]
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    curves = {name: [(point.step, point.value) for point in h] for name, h in history.items()}
    return curves, run.data.params


READERS = {
    "csv": read_csv,
    "tensorboard": read_tensorboard,
    "wandb": read_wandb,
    "mlflow": read_mlflow,
}


def check(tracker, folder, result):
    """A record has every measured number once, and the settings."""
    curves, settings = READERS[tracker](folder, result.digest())
    expected = {
        # After an early stop, the bytes of a result are 0.
        metric: [(i + 1, v) for i, v in enumerate(values[: result.rounds]) if np.isfinite(v)]
        for metric, values in result.metrics.items()
        if values.ndim == 1
    }
    assert curves.keys() == {metric for metric, pairs in expected.items() if pairs}
    for metric, pairs in curves.items():
        np.testing.assert_allclose(pairs, expected[metric], rtol=1e-6, err_msg=metric)
    if settings is not None:
        assert settings["algorithm"] == result.spec.algorithm
        assert float(settings["hp.local_lr"]) == result.spec.hyperparameters["local_lr"]
        assert int(settings["rounds"]) == result.spec.rounds


@pytest.mark.filterwarnings("ignore")  # of the libraries
@pytest.mark.parametrize("tracker", ["csv", "tensorboard", slow_case("wandb"), slow_case("mlflow")])
def test_record_has_every_round_once(tracker, tmp_path, monkeypatch, eager):
    """The run raises in a round, and repeats the rounds after its checkpoint."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def fail(status):
        if status.done >= 5 and not status.result:
            raise KilledError

    settings = {"output_dir": tmp_path, "track": [tracker]}
    with pytest.raises(KilledError):
        run_spec(SPEC, callbacks=[fail], **settings)
    if tracker == "csv":  # as a full disk leaves it
        (path,) = (tmp_path / "csv").glob("*.csv")
        path.write_text(path.read_text()[:-9])
    result = run_spec(SPEC, resume=True, **settings)
    assert_results_equal(result, run_spec(SPEC))
    check(tracker, tmp_path, result)
    if tracker in ("csv", "tensorboard"):  # which replace the record of a repeated run
        check(tracker, tmp_path, run_spec(SPEC, **settings))


KILLED_RUN = """
import os, signal, sys
from pathlib import Path
from support.data import make_user_dataset
from support.small_runs import make_spec
from fedjax_het import simulate
from fedjax_het.runtime import group_state

group_state.MAX_ROUNDS_PER_CHUNK = 2


def kill(status):
    if status.done >= int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)


simulate(
    make_spec(rounds=9, eval_every=2),
    dataset=make_user_dataset(),
    output_dir=sys.argv[1],
    resume=(Path(sys.argv[1]) / "checkpoint.npz").exists(),
    track=["csv", "tensorboard", "wandb", "mlflow"],
    callbacks=[kill],
)
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_records_of_a_run_that_was_killed_twice(tmp_path):
    """Records are ahead of checkpoints whenever the run is killed."""
    environment = {
        # W&B of this process would serve child processes, too, and outlive them.
        **{name: value for name, value in os.environ.items() if not name.startswith("WANDB_")},
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(ROOT)]),
        "FEDJAX_HET_CHECKPOINT_SECONDS": "0",
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
    }
    for kill_at in (3, 5, 99):
        command = [sys.executable, "-c", KILLED_RUN, str(tmp_path), str(kill_at)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == (0 if kill_at == 99 else -signal.SIGKILL), done.stderr
    (path,) = [path for path in tmp_path.glob("*.json") if len(path.stem) == 16]
    result = Result.load(path)
    assert result.rounds == 9
    for tracker in READERS:
        check(tracker, tmp_path, result)


def test_sweep_has_a_record_per_run(tmp_path, short_chunks):
    specs = [make_spec(seed=seed, rounds=16, patience=2 if seed else None) for seed in range(3)]
    settings = {"track": ["csv", "tensorboard"], "width": 2, "spread": "runs", "lanes": 1}
    results = run_sweep(specs, tmp_path, **settings).results
    assert any(result.summary["stopped_early"] for result in results)
    for result in results:
        for tracker in settings["track"]:
            check(tracker, tmp_path, result)


class FailingRecord:
    """A record of the user that fails in round 4."""

    def __init__(self, run, calls):
        self.done, self.calls = 0, calls
        calls.append(run)

    def log(self, round, values):
        self.calls.append(round)
        if round == 4:
            raise OSError(28, "No space left on device")

    def flush(self):
        pass


def test_failing_tracker_is_logged_once(tmp_path, caplog, eager):
    calls = []
    register_tracker("mine", lambda run: FailingRecord(run, calls))
    try:
        result = run_spec(make_spec(), output_dir=tmp_path, track=["mine", "csv"])
    finally:
        TRACKERS.reset()
    assert_results_equal(result, run_spec(make_spec()))
    check("csv", tmp_path, result)
    (line,) = [line for line in caplog.messages if "track" in line]
    assert line.startswith("track = 'mine': cannot be written (No space left on device)")
    run, *rounds = calls
    assert (run.digest, run.folder, run.done) == (result.digest(), tmp_path, 0)
    assert rounds == [1, 2, 3, 4]


def test_unusable_trackers_are_refused(tmp_path, monkeypatch):
    data = {"dataset": make_user_dataset()}
    for call in (simulate, federation):
        with pytest.raises(ConfigError, match=r"^track = 'csb' is unknown: did you mean 'csv'"):
            call(make_spec(), track=["csb"], output_dir=tmp_path, **data)
        with pytest.raises(ConfigError, match=r"^track = \['csv'\]: expected an output_dir"):
            call(make_spec(), track=["csv"], **data)
    with pytest.raises(ConfigError, match=r"^track = \['csv'\]: expected an? directory"):
        sweep([make_spec()], track=["csv"], **data)
    with pytest.raises(ConfigError, match="expected a name that no tracker"):
        register_tracker("csv", lambda run: None)
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "mlflow"):
        with pytest.raises(ConfigError, match=rf"^track = '{name}'.*fedjax_het\[{name}\]") as error:
            simulate(make_spec(), track=[name], output_dir=tmp_path, **data)
        assert "\n" not in str(error.value)


ODD_NAMES = (
    "a?",
    "a!",
    "/x",
    "..",
    ".",
    "",
    "é",
    "狗",
    "x" * 300,
    'a,b"c',
    "a/../b",
    "a//b",
    "t/",
    "..a",
)


@pytest.mark.parametrize("tracker", READERS)
@pytest.mark.filterwarnings("ignore")  # of the libraries
def test_odd_names_keep_their_values(tracker, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = tmp_path / "what? #100%3F"
    folder.mkdir()
    digest, settings = "0123456789abcdef", {"algorithm": "fedavg", "options.a?": 1, "options.a!": 2}
    names = [name for name in ODD_NAMES if name or tracker != "wandb"]
    run = TrackedRun(folder, digest, settings, tuple(names), 0)
    record = TRACKERS[tracker].open(run)
    record.log(1, {name: float(value) for value, name in enumerate(names)})
    record.flush()
    record.close({"rounds": 1, "a?": "b" * 9000})
    curves, _ = READERS[tracker](folder, digest)
    values = sorted(value for ((_, value),) in curves.values())
    assert values == list(range(len(names)))
    assert os.listdir(tmp_path) == [folder.name]


def test_extras_install_the_packages():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
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

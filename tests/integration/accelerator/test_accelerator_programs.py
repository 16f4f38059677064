"""The programs for machines with an accelerator, as far as a CPU can try them."""

import json
import signal
import subprocess
import sys
import tarfile
import time
from types import SimpleNamespace

import pytest

from experiments.accelerator import half_hour, precision, prove
from fedjax_het.core.autotune import MAX_UNROLLED_LANES
from fedjax_het.papers.programs import load_program

FAST = {"train_loss": [1.0, 0.5], "device": "x"}


def test_compare_curves():
    def agrees(device, cpu=FAST, other=FAST):
        return prove.compare_curves(device, cpu, other)["agrees"]

    assert agrees(FAST)
    assert agrees({**FAST, "train_loss": [1.0, 0.5 + prove.MIN_TOLERANCE / 2]})
    off = {**FAST, "train_loss": [1.0, 0.52]}
    assert not agrees(off)
    assert agrees(off, other={**FAST, "train_loss": [1.0, 0.505]})  # the CPU itself is that far off
    assert not agrees({**FAST, "train_loss": [1.0, float("nan")]})
    assert prove.compare_curves({"error": "no room"}, FAST, FAST) == {"error": "no room"}


def test_select_fastest():
    speeds = {
        "mlp, highest, 1 lanes": {"client_samples_per_second": 5.0},
        "mlp, highest, 4 lanes": {"client_samples_per_second": 7.0},
        "convnet, native, highest, 4 lanes": {"client_samples_per_second": 2.0},
        "convnet, im2col, highest, 1 lanes": {"client_samples_per_second": 3.0},
        "convnet, im2col, bfloat16, 4 lanes": {"error": "no room"},
    }
    best = prove.select_fastest(speeds)
    assert best.keys() == {"mlp, highest", "convnet, highest"}
    assert best["mlp, highest"]["lanes"] == 4
    assert (
        best["convnet, highest"] | {"conv_impl": "im2col", "lanes": 1} == best["convnet, highest"]
    )


def test_workers_measure_same_cases():
    device, cpu, other = prove.make_parity_workers(list(prove.METHODS))
    assert "JAX_PLATFORMS" not in device.environment
    assert cpu.environment["JAX_PLATFORMS"] == other.environment["JAX_PLATFORMS"] == "cpu"
    assert device.cases == cpu.cases
    assert [case._replace(lanes=4) for case in other.cases] == cpu.cases
    arguments = [case for place in prove.make_speed_workers("full", "gpu") for case in place.cases]
    few = sum(lanes <= MAX_UNROLLED_LANES for lanes in prove.SCALES["full"].lanes)
    assert len(arguments) == len({case.name for case in arguments}) == 3 * (3 * 4 + few)
    assert {case.settings["precision"] for case in arguments} == {"float32", "tf32", "bfloat16"}
    (some,) = prove.make_speed_workers("full", "gpu", ("tf32",), (4, 32))
    assert {case.lanes for case in some.cases} == {4, 32}
    assert {case.settings["precision"] for case in some.cases} == {"tf32"}


def test_speed_skips_first_round(monkeypatch):
    times = SimpleNamespace(samples=[8] * 4, seconds=[9.0, 2.0, 4.0, 1.0], compile_seconds=3.0)
    monkeypatch.setattr("fedjax_het.runtime.benchmark.benchmark_rounds", lambda *a, **k: times)
    settings = {"algorithm": "fedavg", "model": "mlp", "precision": "float32"}
    actual = prove.measure_case(prove.Case("x", "speed", "quick", settings, 1))
    assert (actual["client_samples_per_second"], actual["compile_seconds"]) == (4.0, 3.0)


def test_prove_continues_after_timeout(tmp_path, monkeypatch, capsys):
    most, waits = 1, False

    def at_once(places, seconds):
        if waits:
            time.sleep(seconds)
        speed = {"client_samples_per_second": 1.0}
        return [{case.name: speed for case in place.cases[:most]} for place in places]

    monkeypatch.setattr(prove, "run_workers", at_once)
    monkeypatch.setattr(prove, "_query_device", lambda: ("x", "gpu"))
    words = ["--only", "speed", "--precisions", "tf32", "--lanes", "1", "--minutes", "0.01"]
    words += ["--output-dir", str(tmp_path)]
    assert prove.main(words) == 1  # as if its process had died
    waits = True
    assert prove.main(words) == 130
    assert "2 cases are left" in capsys.readouterr().err
    most, waits = 99, False
    assert prove.main(words) == 0
    assert len(json.loads((tmp_path / prove.RESULTS_FILE).read_text())["speed"]) == 4


@pytest.mark.parametrize(
    "words", [("--precisions", "float16"), ("--lanes", "3"), ("--methods", "fedavgg")]
)
def test_prove_rejects_invalid_cases(words, tmp_path, capsys):
    assert prove.main([*words, "--output-dir", str(tmp_path)]) == 2
    assert words[1] in capsys.readouterr().err


@pytest.mark.slow
def test_prove_numbers_on_cpu(tmp_path, capsys):
    arguments = ["--scale", "quick", "--only", "numbers", "--methods", "fedavg", "dynafed"]
    assert prove.main([*arguments, "--output-dir", str(tmp_path)]) == 0
    kept = json.loads((tmp_path / prove.RESULTS_FILE).read_text())
    assert kept["numbers"].keys() == {"fedavg", "dynafed"}
    for row in kept["numbers"].values():
        assert row["agrees"] and row["difference"] <= row["another order"] < prove.MIN_TOLERANCE
    assert "another order" in (tmp_path / "prove.md").read_text()
    before = (tmp_path / prove.RESULTS_FILE).stat().st_mtime_ns
    assert prove.main([*arguments, "--output-dir", str(tmp_path)]) == 0  # nothing is due
    assert (tmp_path / prove.RESULTS_FILE).stat().st_mtime_ns == before


@pytest.mark.parametrize("scale", ["paper", "quick"])
def test_campaign_tasks_are_commands(scale, tmp_path, capsys):
    planned = half_hour.plan_tasks(scale, tmp_path)
    assert planned[0].name == "prove numbers"
    assert len({piece.name for piece in planned}) == len(planned)
    for piece in planned:
        if piece.program == half_hour.PROVE:
            assert (half_hour.ACCELERATOR_FOLDER.parent / piece.program).is_file()
            continue
        assert load_program(piece.program)([*piece.words, "--list"]) == 0, piece
        assert len(capsys.readouterr().out.splitlines()) > 0


def test_campaign_continues(tmp_path, monkeypatch, capsys):
    begun = []
    statuses = {"table1 fashion 0.01": [130, 0], "table1 cifar 0.01": [2, 2]}

    def run_task(piece, seconds):
        begun.append(piece.name)
        status = statuses.get(piece.name, [0]).pop(0) if piece.name in statuses else 0
        return status, "no data in x" if status == 2 else "said"

    monkeypatch.setattr(half_hour, "run_task", run_task)
    archive = tmp_path / "kept.tar"
    for folder in ("a", "b"):  # another machine, which has the archive alone
        arguments = ["--output-dir", str(tmp_path / folder), "--carry", str(archive)]
        assert half_hour.main(arguments) == 0
    both = half_hour.plan_tasks("paper", tmp_path)
    assert begun == [piece.name for piece in both] + ["table1 fashion 0.01", "table1 cifar 0.01"]
    shown = capsys.readouterr().out
    assert "table1 cifar 0.01: passed over, as its data are not there" in shown
    with tarfile.open(archive) as packed:
        assert half_hour.LOG_FILE in packed.getnames()


def test_campaign_stops_in_time(tmp_path, monkeypatch):
    def never(piece, seconds):
        raise AssertionError("begun too late")

    monkeypatch.setattr(half_hour, "run_task", never)
    assert half_hour.main(["--minutes", "0.5", "--output-dir", str(tmp_path)]) == 0


@pytest.mark.slow
def test_task_is_interrupted(tmp_path, monkeypatch):
    program = tmp_path / "slow.py"
    program.write_text(
        "import time\n"
        "try:\n    time.sleep(60)\n"
        "except KeyboardInterrupt:\n    print('kept'); raise SystemExit(130)\n"
    )
    monkeypatch.setattr(half_hour, "ACCELERATOR_FOLDER", tmp_path / "accelerator")
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as behind `nohup ... &`
    status, said = half_hour.run_task(half_hour.Task("slow", "slow.py", ()), 6.0)
    signal.signal(signal.SIGINT, before)
    assert (status, said) == (130, "kept\n")
    quick = tmp_path / "quick.py"
    quick.write_text("print('done')")
    assert half_hour.run_task(half_hour.Task("quick", "quick.py", ()), 30.0) == (0, "done\n")


@pytest.mark.slow
def test_precision_errors(tmp_path, capsys):
    assert precision.main(["--steps", "5", "--output", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "precision.json").read_text())
    assert len(rows) == 2 * 4
    for title, errors in rows.items():
        assert 5 * errors["float32"] < min(errors["tf32"], errors["bfloat16"]), title
    assert "synthesis, 5 inner steps, mlp" in capsys.readouterr().out


def test_help_is_docstring():
    words = [sys.executable, str(half_hour.ACCELERATOR_FOLDER / "half_hour.py"), "--help"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert "--carry" in said and "DynaFed" in said

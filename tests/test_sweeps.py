"""Runs on disk: made once, made whole, made again when broken."""

import numpy as np
import pytest

from fedjax_het import sweep
from fedjax_het.errors import ConfigError
from fedjax_het.result import Result
from fedjax_het.spec import RunSpec

FEDAVG = RunSpec("fedavg", "digits", model="mlp", alpha=0.1, rounds=6)
FEDPROX = RunSpec("fedprox", "digits", model="mlp", alpha=0.1, rounds=6, hp={"prox_mu": 0.5})


class FakeSimulate:
    """Stands where `simulate` does: records what it was asked and returns a made-up result."""

    def __init__(self, fail=None):
        self.specs, self.keywords, self.fail = [], [], fail or {}

    def __call__(self, spec, **keywords):
        self.specs.append(spec)
        self.keywords.append(keywords)
        if error := self.fail.get(spec.digest()):
            raise error
        spec = spec.resolved()
        accuracy = np.linspace(0.1, 0.6, spec.rounds) + spec.seed / 100
        return Result(
            spec,
            {"test_accuracy": accuracy, "per_class": np.zeros((spec.rounds, 10))},
            {
                "algorithm": "not the setting",
                "final_accuracy": float(accuracy[-5:].mean()),
                "final_accuracy_std": float(accuracy[-5:].std()),
                "diverged": False,
                "wall_seconds": 1.5,
                "versions": {"jax": "0.0"},
            },
        )


def test_a_run_is_made_once(tmp_path):
    simulate, lines = FakeSimulate(), []
    specs = [FEDAVG, FEDPROX, FEDAVG]
    assert sweep.run_missing(specs, tmp_path, simulate=simulate, progress=lines.append) == {}
    assert simulate.specs == [FEDAVG, FEDPROX]
    assert [line.split(":")[0] for line in lines] == [
        "[1/2] fedavg, digits, mlp, alpha 0.1, seed 0",
        "[2/2] fedprox, digits, mlp, alpha 0.1, seed 0",
    ]
    sweep.run_missing(specs, tmp_path, simulate=simulate, progress=lines.append)
    assert len(simulate.specs) == 2
    assert lines[-1] == f"2 of 2 runs are in {tmp_path} already"


@pytest.mark.parametrize("suffix", ["json", "npz"])
@pytest.mark.parametrize("damage", ["truncated", "empty", "absent", "garbage"])
def test_a_broken_file_makes_the_run_again_and_no_other(tmp_path, suffix, damage):
    sweep.run_missing([FEDAVG, FEDPROX], tmp_path, simulate=FakeSimulate(), progress=str)
    path = tmp_path / f"{FEDPROX.digest()}.{suffix}"
    whole = path.read_bytes()
    if damage == "absent":
        path.unlink()
    else:
        cut = {"truncated": whole[: len(whole) // 2], "empty": b"", "garbage": b"\xff" * 100}
        path.write_bytes(cut[damage])
    again = FakeSimulate()
    sweep.run_missing([FEDAVG, FEDPROX], tmp_path, simulate=again, progress=str)
    assert again.specs == [FEDPROX]
    assert path.read_bytes()[:20] == whole[:20]


def test_what_is_done_survives_a_stop(tmp_path):
    stopped = FakeSimulate(fail={FEDPROX.digest(): KeyboardInterrupt()})
    with pytest.raises(KeyboardInterrupt):
        sweep.run_missing([FEDAVG, FEDPROX], tmp_path, simulate=stopped, progress=str)
    assert list(sweep.load_results(tmp_path)["digest"]) == [FEDAVG.digest()]
    again = FakeSimulate()
    sweep.run_missing([FEDAVG, FEDPROX], tmp_path, simulate=again, progress=str)
    assert again.specs == [FEDPROX]


def test_a_run_keeps_its_checkpoints_apart_until_it_is_done(tmp_path):
    class Checkpoints(FakeSimulate):
        def __call__(self, spec, *, output_dir, **keywords):
            output_dir.mkdir(parents=True)
            (output_dir / "checkpoint.npz").touch()
            return super().__call__(spec, output_dir=output_dir, **keywords)

    simulate = Checkpoints()
    sweep.run_missing([FEDAVG, FEDPROX], tmp_path, simulate=simulate, progress=str)
    assert all(keywords["resume"] is True for keywords in simulate.keywords)
    assert len({keywords["output_dir"] for keywords in simulate.keywords}) == 2
    assert not any(keywords["output_dir"].exists() for keywords in simulate.keywords)


def test_missing_data_stops_only_the_runs_that_need_it(tmp_path):
    cifar = [RunSpec("fedavg", "cifar10", model="mlp", seed=seed) for seed in (0, 1)]
    error = ConfigError("dataset = 'cifar10': set TFDS_DATA_DIR")
    simulate = FakeSimulate(fail={spec.digest(): error for spec in cifar})
    lines = []
    reasons = sweep.run_missing(
        [*cifar, FEDAVG], tmp_path, simulate=simulate, progress=lines.append
    )
    assert reasons == {spec.digest(): str(error) for spec in cifar}
    assert sum(str(error) in line for line in lines) == 1
    assert sweep.is_done(tmp_path, FEDAVG.digest())


def test_a_fault_of_the_program_is_not_taken_for_missing_data(tmp_path):
    simulate = FakeSimulate(fail={FEDAVG.digest(): RuntimeError("bug")})
    with pytest.raises(RuntimeError, match="bug"):
        sweep.run_missing([FEDAVG], tmp_path, simulate=simulate, progress=str)


def test_a_setting_that_cannot_be_used_stops_before_the_first_run(tmp_path):
    simulate = FakeSimulate()
    bad = RunSpec("fedavg", "digits", model="mlp", alpha=-1.0)
    with pytest.raises(ConfigError, match="alpha"):
        sweep.run_missing([FEDAVG, bad], tmp_path / "new", simulate=simulate, progress=str)
    assert simulate.specs == []
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="output_dir"):
        sweep.run_missing([FEDAVG], tmp_path / "file" / "x", simulate=FakeSimulate())


def test_the_time_to_go_is_that_of_runs_of_the_same_kind(tmp_path, monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(sweep.time, "perf_counter", lambda: now[0])
    fake = FakeSimulate()

    def simulate(spec, **keywords):
        now[0] += 2.0 if spec.algorithm == "fedavg" else 20.0
        return fake(spec, **keywords)

    fedavg = [RunSpec("fedavg", "digits", model="mlp", seed=seed) for seed in range(4)]
    fedprox = RunSpec("fedprox", "digits", model="mlp")
    specs = [fedavg[0], fedprox, *fedavg[1:]]
    sweep.run_missing(specs, tmp_path, simulate=simulate, progress=lines.append)
    assert lines[0].endswith("in 2.0 s; about 8.0 s to go")  # nothing else is known yet
    assert lines[1].endswith("in 20 s; about 6.0 s to go")
    assert lines[-1].endswith("; done")


def test_results_and_curves_are_read_as_frames(tmp_path):
    specs = [FEDAVG, FEDPROX, RunSpec("fedavg", "digits", model="mlp", rounds=3, seed=7)]
    sweep.run_missing(specs, tmp_path, simulate=FakeSimulate(), progress=str)
    (tmp_path / "table.json").write_text("{}")  # not a run
    results = sweep.load_results(tmp_path).set_index("digest")
    assert set(results.index) == {spec.digest() for spec in specs}
    assert results.loc[FEDPROX.digest(), "hp.prox_mu"] == 0.5
    assert np.isnan(results.loc[FEDAVG.digest(), "hp.prox_mu"])
    assert list(results.loc[[spec.digest() for spec in specs], "seed"]) == [0, 0, 7]
    assert set(results["algorithm"]) == {"fedavg", "fedprox"}
    assert set(results["versions.jax"]) == {"0.0"}

    curves = sweep.load_curves(tmp_path)
    assert set(curves.columns) == {"digest", "round", "test_accuracy"}
    last = curves[curves["digest"] == specs[2].digest()]
    assert list(last["round"]) == [1, 2, 3]
    np.testing.assert_allclose(last["test_accuracy"], [0.17, 0.42, 0.67])


def test_a_broken_run_is_left_out_of_the_frames_with_a_warning(tmp_path):
    sweep.run_missing([FEDAVG, FEDPROX], tmp_path, simulate=FakeSimulate(), progress=str)
    (tmp_path / f"{FEDAVG.digest()}.json").write_text("{")
    with pytest.warns(UserWarning, match=FEDAVG.digest()):
        results = sweep.load_results(tmp_path)
    assert list(results["digest"]) == [FEDPROX.digest()]


def test_an_empty_folder_gives_empty_frames(tmp_path):
    assert len(sweep.load_results(tmp_path)) == 0
    assert len(sweep.load_curves(tmp_path)) == 0

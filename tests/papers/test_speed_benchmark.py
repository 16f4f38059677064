"""The speed benchmark: its arguments, its tables, and a tiny regime end to end."""

import json
import sys

import numpy as np
import pytest

from experiments.benchmarks import local_training as speed
from fedjax_het import RunSpec
from fedjax_het.utils.errors import ConfigError


def turn(samples, seconds, **more):
    here = {
        "flops_per_sample": 1000,
        "matmul_flops": 1e6,
        "useful_work_fraction": 0.5,
        "compile_seconds": 2.0,
        "peak_memory": 3_000_000,
        "lanes": "two lanes",
        "devices": "2 x cpu",
    }
    return {"samples": samples, "seconds": seconds, "version": "1.0", **here, **more}


RECORD = {
    "machine": "a machine",
    "data": "images",
    "regimes": {
        "R1": {
            "here": [turn([100, 200], [0.5, 1.0]), turn([300], [1.0], compile_seconds=0.1)],
            "torch": [turn([100], [2.0])],
            "fedjax": [turn([100], [1.0])],
        },
        "R6-32": {"here": [turn([10], [4.0])]},
    },
}


def test_benchmark_row_by_hand():
    row = speed.summarize_turns(RECORD["regimes"]["R1"])
    assert row.samples_per_second == 200  # the median of 200, 200 and 300 samples per second
    assert row.ratios == {"torch": 4.0, "fedjax": 2.0}
    assert row.flops == 200_000 and row.matmul_share == 0.2
    assert row.compile_seconds == 2.0  # of the first turn: the second finds it in the cache


def test_benchmark_table_is_markdown():
    text = speed.format_tables(RECORD)
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("|")]
    first, second = cells[:4], cells[4:]
    assert {len(line) for line in first} == {8} and {len(line) for line in second} == {3}
    assert [cell.strip() for cell in first[2][:3]] == ["R1", "200", "2.00"]
    assert [cell.strip() for cell in first[3][:3]] == ["R6-32", "2", "—"]
    assert [cell.strip() for cell in second[2]] == ["R1", "4.00", "2.00"]
    assert [line for line in text.splitlines() if line.startswith("* torch: 1.0; ")]


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"regimes": ("R9",)}, "R1"),
        ({"peers": ("tensorflow",)}, "torch"),
        ({"peers": ("fedjax",)}, "make_environments"),
    ],
)
def test_benchmark_rejects_bad_arguments(settings, word, tmp_path):
    arguments = speed.Arguments(environments=tmp_path, **settings)
    with pytest.raises(ConfigError, match=word):
        speed.run_benchmark(arguments)


def test_regimes_have_valid_settings():
    for name, regime in speed.REGIMES.items():
        spec = RunSpec(dataset="user", **regime.spec).resolved()
        assert spec.num_clients <= regime.num_images, name
        assert set(regime.peers) <= set(speed.PEERS), name


@pytest.mark.slow
def test_benchmark_tiny_regime(monkeypatch, tmp_path, capsys):
    """Our program in a process of its own: what it writes for the peers is what it trained on."""
    spec = {**speed.FEDAVG, "num_clients": 6, "participation": 0.5, "batch_size": 4}
    tiny = speed.Regime("tiny", {**spec, "partition": "dirichlet", "alpha": 0.5}, 2, num_images=90)
    monkeypatch.setitem(speed.REGIMES, "R1", tiny)
    monkeypatch.setattr(speed.tempfile, "TemporaryDirectory", lambda: Folder(tmp_path))
    arguments = speed.Arguments(("R1",), turns=1, peers=(), output=tmp_path / "out")
    assert speed.run_benchmark(arguments) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["regimes"]["R1"]["here"]
    with np.load(tmp_path / "clients.npz") as file:
        clients = np.split(file["indices"], np.cumsum(file["sizes"])[:-1])
        samples = [sum(len(clients[client]) for client in cohort) for cohort in file["cohorts"]]
    assert sorted(np.concatenate(clients)) == list(range(90))
    assert result["samples"] == samples and len(result["seconds"]) == 2
    assert min(result["seconds"]) > 0 and 0 < result["useful_work_fraction"] <= 1
    assert result["matmul_flops"] > 1e8 and result["peak_memory"] > 1e7
    assert "| R1 |" in capsys.readouterr().out == (tmp_path / "out.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("teachers", [0, 2])
def test_benchmark_server_training(teachers, monkeypatch, tmp_path):
    """Samples are those of all epochs of a round; the faster of alone and shared is said."""
    server = {"batch_size": 8, "epochs": 3, "teachers": teachers}
    tiny = speed.Regime("tiny", speed.FEDAVG, 2, kind="server", num_images=80, server=server)
    monkeypatch.setitem(speed.REGIMES, "R7", tiny)
    arguments = speed.Arguments(("R7",), turns=1, peers=(), output=tmp_path / "out")
    assert speed.run_benchmark(arguments) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["regimes"]["R7"]["here"]
    assert result["samples"] == [240, 240] and min(result["seconds"]) > 0
    assert "one device" in result["lanes"] or "shared" in result["lanes"]


class Folder:
    """A temporary folder that stays."""

    def __init__(self, path):
        self.path = path

    def __enter__(self):
        return str(self.path)

    def __exit__(self, *exception):
        pass


def test_peers_share_round(monkeypatch, tmp_path):
    """What every peer reads: normalised images, the clients, equal work."""
    monkeypatch.syspath_prepend(str(speed.PEERS_FOLDER))
    import regime

    images = np.arange(5 * 28 * 28, dtype=np.uint8).reshape(5, 28, 28, 1)
    np.savez(tmp_path / "i.npz", images=images, labels=np.arange(5), mean=[0.5], std=[0.25])
    np.savez(tmp_path / "c.npz", indices=[4, 3, 2, 0, 1], sizes=[3, 0, 2], cohorts=[[0, 2], [1, 0]])
    settings = speed.make_settings(speed.REGIMES["R1"], speed.Arguments(), tmp_path)
    settings |= {"images": str(tmp_path / "i.npz"), "clients": str(tmp_path / "c.npz")}
    monkeypatch.setattr(sys, "argv", ["program", json.dumps(settings)])
    read = regime.read_regime()
    np.testing.assert_allclose(read.images[0, 0, :3, 0], (np.arange(3) / 255 - 0.5) / 0.25)
    assert [client.tolist() for client in read.clients] == [[4, 3, 2], [], [0, 1]]
    seen = []

    def one_round(cohort):
        seen.append(cohort.tolist())
        return read.samples(cohort)

    seconds, samples = regime.time_rounds(read, one_round)
    assert seen == [[2, 0], [0, 2], [1, 0]]  # the two smallest that hold anything come first
    assert samples == [5, 3] and len(seconds) == 2

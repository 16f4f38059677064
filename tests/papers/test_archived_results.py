"""The kept runs of `experiments/`: archives are read like files, and all results can be loaded."""

import re
import warnings

import numpy as np
import pytest
from support.markers import slow_case
from support.paths import ROOT

from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.render import MISSING
from fedjax_het.config.run_spec import hash_settings
from fedjax_het.papers.archived_results import archive_runs, archive_runs_main
from fedjax_het.runtime.device_report import describe_environment
from fedjax_het.runtime.result_store import list_run_files, load_curves, load_result, load_results
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.sweep import plan_sweep
from fedjax_het.utils.io import ARCHIVE_NAME, DamagedFileError

ARCHIVES = sorted((ROOT / "experiments").rglob(ARCHIVE_NAME))
NUM_RUNS = 4783
# Runs of a version that had other options.
OF_OTHER_OPTIONS = "dynafed/results/ablations"
# Runs of versions that named them otherwise, by the names of their files: their digests since then.
OTHER_DIGESTS = {
    "153590f8a52a6e18": "80f034537940c760",
    "63bb8eb24c1154bd": "a30d76b15ee3b7cd",
    "30d298e358f67e98": "72be360df7b74246",
    "586a3b7e5d199e1e": "61c34292263afb9a",
    "d5c46cc09ffe6e1e": "449b211db1b7067e",
}


@pytest.mark.parametrize("step", [10, slow_case(1)])
def test_archived_results_load_under_digest(step):
    runs = [path for archive in ARCHIVES for path in list_run_files(archive.parent)]
    assert len(runs) == NUM_RUNS
    for path in runs[::step]:
        result = Result.load(path)
        assert result.metrics and result.summary
        if OF_OTHER_OPTIONS not in path.as_posix():
            assert result.digest() == OTHER_DIGESTS.get(path.stem, path.stem)
            assert result.spec.protocol is not None
            is_renamed = path.stem in OTHER_DIGESTS
            assert is_renamed or result.spec.digest() == hash_settings(result.spec)


TESTS_OVER_CLIENTS_OR_IMAGES = {"fig2.md", "leakage.md"}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "experiments").glob("**/results/*/*.md")), ids=lambda path: path.stem
)
def test_archived_tables_have_names_of_methods_and_no_tests_of_few_seeds(path):
    rows = [line.strip("| ").split(" | ") for line in path.read_text().splitlines() if "|" in line]
    header, _, *rows = rows
    if "p" in header and path.name not in TESTS_OVER_CLIENTS_OR_IMAGES:
        tested = [row for row in rows if row[header.index("p")] not in ("", MISSING)]
        assert tested and all(int(row[header.index("Seeds")].split()[0]) >= 3 for row in tested)
    if "Method" in header:
        methods = {row[header.index("Method")].partition(" ")[0] for row in rows}
        assert not methods & {*METHODS} and not any("=" in method for method in methods)


def test_no_run_files_beside_archive():
    for archive in ARCHIVES:
        names = [path.stem for path in archive.parent.iterdir()]
        assert not [name for name in names if re.fullmatch("[0-9a-f]{16}", name)]


@pytest.fixture
def folder(tmp_path):
    """Files of two kept runs, as if this version had made them here."""
    source = ROOT / "experiments" / "fedaf" / "results" / "table1-cpu"
    for path in list_run_files(source)[:2]:
        result = Result.load(path)
        result.summary |= describe_environment()
        result.save(tmp_path)
    return tmp_path


def test_archive_reads_like_files(folder):
    results, curves = load_results(folder), load_curves(folder)
    digest = results["digest"][0]
    before = load_result(folder, digest)
    assert archive_runs(folder) == 4
    assert [path.name for path in folder.iterdir()] == [ARCHIVE_NAME]
    assert load_results(folder).equals(results) and load_curves(folder).equals(curves)
    after = load_result(folder, digest)
    assert after.summary == before.summary and after.spec == before.spec
    for name, values in before.metrics.items():
        np.testing.assert_array_equal(after.metrics[name], values)
    assert {state for _, _, state in plan_sweep([after.spec], folder)} == {"done"}


def test_archive_does_not_depend_on_order(folder, tmp_path_factory):
    archive_runs(folder)
    together = (folder / ARCHIVE_NAME).read_bytes()
    other = tmp_path_factory.mktemp("other")
    for path in reversed(list_run_files(folder)):
        Result.load(path).save(other)
        assert archive_runs(other) == 2
    assert (other / ARCHIVE_NAME).read_bytes() == together


def test_file_takes_precedence_over_archive(folder):
    archive_runs(folder)
    path = list_run_files(folder)[0]
    result = Result.load(path)
    result.summary["finished"] = "2030"
    result.save(folder)
    assert Result.load(path).summary["finished"] == "2030"


def test_damaged_archive_is_reported(folder):
    archive_runs(folder)
    archive = folder / ARCHIVE_NAME
    content = bytearray(archive.read_bytes())
    content[200:260] = bytes(60)  # within the first member
    archive.write_bytes(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert len(load_results(folder)) == 1
    assert "damaged" in str(caught[0].message) and "\n" not in str(caught[0].message)
    archive.write_bytes(b"no archive")
    with pytest.raises(DamagedFileError, match=r"runs.zip' is damaged"):
        load_results(folder)


def test_archive_rejects_missing_folder(tmp_path, capsys):
    assert archive_runs_main(["--folders", str(tmp_path / "none")]) == 2
    assert "expected a folder of results" in capsys.readouterr().err

"""The experiment on text by speaker: its runs, and the program."""

import pytest

from fedjax_het.papers.table import TableArguments, make_cells
from fedjax_het.papers.text.speakers import METHODS, SPEAKERS, main


@pytest.mark.parametrize("preset", SPEAKERS.presets)
def test_clients_are_the_speakers(preset):
    cells = make_cells(SPEAKERS, TableArguments(preset))
    assert [cell.method for cell in cells] == [*METHODS]
    for run in (cell.runs[0].resolved() for cell in cells):
        assert (run.partition, run.num_clients, run.participation) == ("natural", 20, 1.0)
        assert run.has_client_tests and run.hyperparameters["local_momentum"] == 0


@pytest.mark.slow
def test_program_writes_table_and_curves(tmp_path, capsys):
    arguments = ["--methods", "fedavg", "ditto", "--rounds", "1", "--output-dir", str(tmp_path)]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "FedAvg" in text and "Ditto" in text and "0 of 1" not in text
    assert "The paper's table" not in text
    assert (tmp_path / "curves.png").is_file()

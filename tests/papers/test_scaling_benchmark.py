"""The benchmark of many clients runs on few clients, in processes of its own."""

import re

import pytest

from experiments.benchmarks import scaling


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "disk"])
def test_prints_a_line_for_each_number_of_clients(place, capsys, tmp_path):
    words = "--methods scaffold --model mlp --clients 20 40 --examples 4 --rounds 20 --turns 1"
    paths = ["--folder", str(tmp_path), "--client-state", place]
    assert scaling.main([*words.split(), *paths]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == f"scaffold, client states: {place}" and lines[-1].startswith("  flat within")
    for count, line in zip((20, 40), lines[2:], strict=False):
        assert re.match(rf" +{count} clients +[\d.]+ rounds/s .* host +[\d.]+ ms a round ", line)
    assert not list(tmp_path.iterdir())

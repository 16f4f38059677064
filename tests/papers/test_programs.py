"""Programs beside the tables: a bad flag is one line with the flag as written, and status 2."""

import importlib
import re
from dataclasses import dataclass

import pytest
from support.paths import ROOT

from fedjax_het.papers.programs import make_config_program

# By module, flags with values that they cannot have.
BAD = {
    "accelerator.launches": (["--target", "x"], ["--programs", "mlp"], ["--output", "no/x.json"]),
    "accelerator.prove": (["--scale", "x"], ["--methods", "fedavgg"], ["--minutes", "-1"]),
    "accelerator.half_hour": (["--scale", "x"], ["--minutes", "-1"]),
    "accelerator.precision": (["--steps", "0"], ["--images", "x"], ["--seed", "-1"]),
    "all": (["--only", "fslx"], ["--preset", "papre"], ["--onyl", "fsl"]),
    "dynafed.fig3": (
        ["--preset", "x"],
        ["--shown", "0"],
        ["--seed", "-1"],
        ["--shown", "1.5"],
        ["--result", "no/x.json"],
    ),
    "dynafed.fig5": (["--rounds", "x"],),
    "fedaf.fig9": (["--epochs", "0"], ["--images", "99"], ["--seed", "x"], ["--output-dir", ""]),
    "fedaf.table7": (["--ipc", "0"], ["--partitions", "1"], ["--seeds", "-1"], ["--ipc", "nan"]),
    "fedaf.fig6": (["--preset", "x"], ["--seed", "-1"], ["--seed", "x"], ["--output-dir", ""]),
    "fsl.fig3": (["--preset", "x"], ["--seed", str(10**30)], ["--sede", "1"]),
    "leakage": (["--rounds", "x"], ["--seeds", "x"]),
    "dynafed.convergence": (["--steps", "0"], ["--seeds", "-1"], ["--output-dir", ""]),
    "dynafed.measures": (["--rounds", "x"],),
    "dynafed.theory": (["--rounds", "x"],),
    "fedamp.robustness": (["--rounds", "x"],),
    "fedamp.theory": (["--rounds", "x"],),
    "fsl.fig9": (["--rounds", "x"],),
    "fsl.theory": (["--preset", "x"], ["--presets", "quick"]),
    "fsl.surface": (["--rounds", "x"],),
    "speed": (["--turns", "0"], ["--regimes", "R0"], ["--rounds", "-1"], ["--peers", "x"]),
    "sweep_speed": (["--seeds", "0"], ["--alphas", "nan"], ["--num-clients", "-1"]),
    "condensation_speed": (["--width", "0"], ["--alpha", "-1"], ["--turns", "x"]),
    "personalised_speed": (["--model", "x"], ["--clients", "4"], ["--threads", "0"]),
    "scale": (["--sampled", "0"], ["--clients", "5"], ["--client-state", "x"], ["--methods", "x"]),
}
CASES = [(module, flags) for module, several in BAD.items() for flags in several]


@pytest.mark.parametrize(("module", "flags"), CASES)
def test_bad_flag_is_one_line(module, flags, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    main = importlib.import_module(f"experiments.{module}").main
    assert main(flags) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1, said.err
    assert flags[0] in said.err and said.err.startswith("error: ")
    assert not list(tmp_path.iterdir())


def test_every_program_is_covered():
    """Programs that are not tables; the tables have tests of their own."""
    is_tried = {*BAD, "fedaf.fig7", "fedaf.fig8", "fsl.fig4"}  # built like fig6 and fig3
    scripts = ROOT / "experiments"
    benchmarks = {
        actual[1]: path.stem
        for path in scripts.glob("*.py")
        if (actual := re.search(r"from experiments\.benchmarks\.(\w+) import", path.read_text()))
    }
    for folder in (scripts, ROOT / "fedjax_het" / "papers"):
        for path in folder.rglob("*.py"):
            if re.search(r"^main = make_(?!table)\w*program\(", path.read_text(), re.MULTILINE):
                name = ".".join(path.relative_to(folder).with_suffix("").parts)
                assert benchmarks.get(name.removeprefix("benchmarks."), name) in is_tried


@dataclass
class Printing:
    """Prints."""

    times: int = 1
    """Number of words."""
    loud: bool = False
    """Print in capitals."""


def test_program_output_and_help(capsys):
    def work(arguments):
        print("done" * arguments.times)
        return 3

    assert make_config_program(Printing, work)(["--times", "2", "--loud"]) == 3
    assert capsys.readouterr() == ("donedone\n", "")
    with pytest.raises(SystemExit) as ended:
        make_config_program(Printing, work)(["--help"])
    assert not ended.value.code and "--times" in capsys.readouterr().out

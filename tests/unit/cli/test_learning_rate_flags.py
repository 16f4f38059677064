"""Learning rates on the command line: flags, short flags, files, and errors of one line."""

import pytest

from fedjax_het.cli import _parse_command, main
from fedjax_het.cli.run import RunCommand, build_run_spec
from fedjax_het.cli.sweep import SweepCommand, build_run_specs
from fedjax_het.config.settings import HYPERPARAMETER_SETTINGS

RUN = ["--model", "mlp", "--local-optimizer", "momentum"]


@pytest.mark.parametrize(
    ("flag", "setting"),
    [
        ("--learning-rate", "learning_rate"),
        ("--lr", "learning_rate"),
        ("--momentum", "momentum"),
        ("--weight-decay", "weight_decay"),
        ("--server-learning-rate", "server_learning_rate"),
        ("--server-lr", "server_learning_rate"),
    ],
)
def test_flag_sets_learning_rate(flag, setting):
    spec = build_run_spec(_parse_command(RunCommand, [*RUN, flag, "0.5"]))
    assert getattr(spec, setting) == 0.5
    assert spec.hyperparameters == {HYPERPARAMETER_SETTINGS[setting]: 0.5}
    specs = build_run_specs(_parse_command(SweepCommand, [*RUN, flag, "0.5", "0.25"]))
    assert [getattr(spec, setting) for spec in specs] == [0.5, 0.25]


def test_file_and_flag_combine(tmp_path):
    """A flag replaces the value of the file, whichever name either has."""
    path = tmp_path / "run.yaml"
    words = [*RUN, "--config", str(path)]
    for text, flags, expected in (
        ("learning_rate: 0.1", [], 0.1),
        ("hp: {local_lr: 0.1}", [], 0.1),
        ("learning_rate: 0.1", ["--hp", "local_lr=0.2"], 0.2),
        ("hp: {local_lr: 0.1}", ["--lr", "0.2"], 0.2),
    ):
        path.write_text(text)
        assert (
            build_run_spec(_parse_command(RunCommand, [*words, *flags])).learning_rate == expected
        )
        if not flags:
            (spec,) = build_run_specs(_parse_command(SweepCommand, words))
            assert spec.learning_rate == expected
    path.write_text("learning_rate: [0.1, 0.2]")
    assert len(build_run_specs(_parse_command(SweepCommand, words))) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--lr", "0.1", "--hp", "local_lr=0.2"],
            "--learning-rate, --hp local_lr = (0.1, 0.2): expected one of the two names",
        ),
        (["--lr", "-1"], "--learning-rate = -1.0: expected a"),
        (["--hp", "local_lr=-1"], "--hp local_lr = -1.0: expected a finite number >= 0"),
        (["--local-lr", "0.1"], "'--local-lr' is unknown: did you mean '--learning-rate'?"),
        (
            ["--algorithm", "fedaf", "--lr", "1"],
            "--learning-rate = 1.0: expected no value: clients",
        ),
        (["--hp", "prox_mu=0.1,0.2"], "--hp prox_mu = '0.1,0.2': expected a"),
        (["--alpha", "0.1", "1"], "--alpha = '0.1 1': expected one value"),
    ],
)
def test_bad_flag_is_one_line(words, message, capsys):
    assert main(["run", *words]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_bad_names_and_lists_in_a_file(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    for text, message in (
        ("lr: 0.1", "setting = 'lr' is unknown: did you mean 'learning_rate'?"),
        ("learning_rate: [0.1, 0.2]", "--learning-rate = [0.1, 0.2]: expected a"),
        ("hp: {prox_mu: [0.1]}", "hp prox_mu = [0.1]: expected a"),
    ):
        path.write_text(text)
        assert main(["run", "--config", str(path)]) == 2
        (line,) = capsys.readouterr().err.strip().splitlines()
        assert message in line

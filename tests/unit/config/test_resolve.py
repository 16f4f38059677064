"""What enters is checked at the door: equal values have one name, bad ones are one line."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_het import ConfigError, RunSpec, grid
from fedjax_het.cli import main
from fedjax_het.utils.console import log_to_stderr

SETTINGS = {"model": "mlp", "partition": "dirichlet"}


def test_numbers_of_all_kinds_are_one_run():
    plain = RunSpec("fedprox", alpha=1.0, seed=1, hp={"prox_mu": 0.1}, **SETTINGS)
    for alpha, seed, mu in (
        (1, np.int64(1), np.float32(0.1)),
        (np.float64(1), np.array(1), np.float64(0.1)),
        (jnp.float32(1), jnp.int32(1), jnp.float32(0.1)),
    ):
        other = RunSpec("fedprox", alpha=alpha, seed=seed, hp={"prox_mu": mu}, **SETTINGS)
        assert other == plain and other.digest() == plain.digest()
    assert len(grid(seed=np.arange(3), **SETTINGS)) == 3


def test_a_misspelt_name_is_what_is_wrong():
    with pytest.raises(ConfigError, match=r"^partition = 'dirchlet'.*did you mean 'dirichlet'"):
        RunSpec(model="mlp", partition="dirchlet", alpha=0.1).resolved()


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        *(("alpha", bad) for bad in ([1.0], "1", True, 1e300, 1e-300, np.nan, np.ones((3, 3)))),
        *(("seed", bad) for bad in (None, "1", 1.0, True, -1, 2**70)),
        *(("rounds", bad) for bad in (True, 1.5, 10**12, "3", (i for i in range(3)))),
        *(("hp", bad) for bad in (None, [], {1: 2.0})),
        *(("options", bad) for bad in (None, [], "preset=code")),
        *(("local_tests", bad) for bad in ("yes", 1)),
        *(("participation", bad) for bad in (0, 1.5, True)),
        *(("algorithm", bad) for bad in (["fedavg"], None, 3, np.ones(3))),
        *(("partition_seed", bad) for bad in (-1, 0.5)),
        *(("classes", bad) for bad in (0, "2")),
        *(("hp local_lr", bad) for bad in (1e300, 10**400, "0.1", True, -1, np.inf)),
        *(("hp local_weight_decay", bad) for bad in (-1.0, [0.1])),
    ],
)
def test_what_cannot_be_used_is_one_line_that_names_it(setting, value):
    kind, _, name = setting.partition(" ")
    given = {"local_optimizer": "adamw"} | SETTINGS | {kind: {name: value} if name else value}
    with pytest.raises(ConfigError) as raised:
        RunSpec(**given).resolved()
    message = str(raised.value)
    assert message.startswith(f"{setting} = ") and len(message.splitlines()) == 1
    assert len(message) < 600


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["run", "--rounds", "abc"], ("--rounds", "abc")),
        (["run", "--ruonds", "3"], ("--ruonds", "--rounds")),
        (["run", "--alpha"], ("--alpha",)),
        (["run", "--local-tests", "yes"], ("--local-tests", "yes")),
        (["sweep", "--alpha", "0.1", "x"], ("--alpha", "x")),
        (["rnu"], ("rnu", "run")),
        ([], ("run",)),
        (["table", "table1", "--alphas", "x"], ("--alphas", "x")),
    ],
)
def test_type_errors_of_the_command_line_are_one_line(words, named, capsys):
    assert main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert all(name in said.err for name in named)


def test_ctrl_c_promises_no_checkpoint_that_is_not_kept(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_het.cli._run", interrupted)
    assert main(["run"]) == 130 and "nothing is kept" in capsys.readouterr().err
    assert main(["run", "--output-dir", "x"]) == 130 and "--resume" in capsys.readouterr().err


WRONG_COUNTS = [("1.7", "'1.7'"), ("nan", "'nan'"), ("inf", "'inf'"), ("0", "0"), ("1e3", "'1e3'")]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((["--lanes", bad], f"lanes = {shown}") for bad, shown in WRONG_COUNTS),
        *((["--vmapped", bad], f"vmapped = {shown}") for bad, shown in WRONG_COUNTS),
        (["--memory", "-1"], "--memory = -1.0"),
        *((["--memory", bad], f"--memory = '{bad}'") for bad in ("nan", "inf")),
        (["--hp", "local_lr=0.1", "local_lr=0.2"], "hp local_lr = '0.2': expected it once"),
    ],
)
def test_bad_words_of_a_sweep_are_refused(words, message, tmp_path, capsys):
    assert main(["sweep", "--output-dir", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_a_line_of_the_log_is_printed_once(monkeypatch, capsys):
    """Also where a library has given the root logger a handler, as absl does."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    log_to_stderr(logging.INFO)
    log_to_stderr(logging.INFO)
    logging.getLogger("fedjax_het.data").info("one line")
    assert capsys.readouterr().err == "one line\n"

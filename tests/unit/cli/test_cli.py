"""The command line: output, help, completion, and messages about bad words."""

import contextlib
import inspect
import json
import logging
import re
import subprocess
import sys

import numpy as np
import pytest
from support.paths import ROOT

import fedjax_het
from fedjax_het import ConfigError, RunSpec, dataset_from_arrays, simulate
from fedjax_het.algorithms import METHODS
from fedjax_het.cli import COMMANDS, _parse_command, main
from fedjax_het.cli.options import list_help_options
from fedjax_het.cli.show import KINDS
from fedjax_het.config.protocols import PROTOCOLS
from fedjax_het.core.lr_schedules import LR_SCHEDULES
from fedjax_het.core.optimizers import OPTIMIZERS
from fedjax_het.data import DATASETS, PARTITIONS
from fedjax_het.nn import NETWORKS
from fedjax_het.skews import PARTITION_SKEWS, SKEWS
from fedjax_het.utils.command_line import get_options
from fedjax_het.utils.console import count_repeated_warnings, log_to_stderr


def run(line):
    return main(["run", "--quiet", *line.split()])


def read_summary(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def print_and_exit(capsys, *words):
    """Return the output of a command line that prints a help or a script and ends the process."""
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    return capsys.readouterr().out


def test_run_prints_json_summary(capsys, tmp_path):
    line = "--algorithm fedprox --model mlp --rounds 6 --alpha 0.5 --seed 4"
    assert run(f"{line} --hp prox_mu=0.05 local_lr=0.002 --output-dir {tmp_path}") == 0
    last = read_summary(capsys)
    assert last["algorithm"] == "fedprox" and last["dataset"] == "digits" and last["seed"] == 4
    assert last["rounds"] == 6 and last["diverged"] is False
    promised = "final_accuracy best_accuracy client_samples_per_second compile_seconds wall_seconds"
    assert all(last[name] > 0 for name in promised.split())
    (path,) = tmp_path.glob("[0-9a-f]*.json")
    spec = json.loads(path.read_text())["spec"]
    assert spec["hp"]["prox_mu"] == 0.05 and spec["hp"]["local_lr"] == 0.002
    for picture in ("curve.png", "partition.png"):
        assert next(tmp_path.glob(f"*.{picture}")).stat().st_size > 5000


@pytest.mark.slow
def test_run_dynafed_writes_images(tmp_path):
    options = "trajectory_rounds=2 segment_length=1 preset=code num_iterations=3 inner_steps=1"
    line = f"--algorithm dynafed --model mlp --rounds 4 --output-dir {tmp_path}"
    assert run(f"{line} --option {options} num_samples=10") == 0
    assert next(tmp_path.glob("*.synthesis.png")).stat().st_size > 5000
    arrays = next(tmp_path.glob("*.json")).with_suffix(".npz")
    with np.load(arrays) as data:
        assert data["artifacts/synthetic_images"].shape == (10, 8, 8, 1)
        assert data["artifacts/matching_loss"].shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--columns", "split.size_ginni"], "--columns = 'split.size_ginni' is unknown: did you"),
        (["--sort", "made"], "--sort = 'made': expected a number of a result, such as"),
        (["--sort", "test_accuracy"], "--sort = 'test_accuracy' is unknown: did you mean 'best_"),
        (["--sort", "split.feature_distance"], "expected --metrics feature_distance, which meas"),
    ],
)
def test_sweep_checks_columns_before_the_runs(words, message, tmp_path, capsys):
    folder = tmp_path / "runs"
    sweep = ["sweep", "--dataset", "digits", "--model", "mlp", "--rounds", "1"]
    assert main([*sweep, "--output-dir", str(folder), *words]) == 2 and not folder.exists()
    error = capsys.readouterr().err
    assert message in error and "lane_probe" not in error


def test_run_counts_held_out_server_data(tmp_path, capsys):
    line = "--algorithm abavg --model mlp --rounds 2 --server-data held_out --server-option size=40"
    assert run(f"{line} --option base=fedprox --output-dir {tmp_path}") == 0
    last = read_summary(capsys)
    assert last["algorithm"] == "abavg" and not last["diverged"]
    record = json.loads(next(tmp_path.glob("[0-9a-f]*.json")).read_text())
    server, split = record["summary"]["server"], record["summary"]["split"]
    assert server["source"] == "held_out" and server["num_examples"] == 40
    assert split["num_unused"] == 40


@pytest.mark.slow
def test_run_fedamp_writes_collaboration(tmp_path, capsys):
    line = "--algorithm fedamp --num-clients 6 --rounds 3 --eval-every 2"
    assert run(f"{line} --output-dir {tmp_path}") == 0
    last = read_summary(capsys)
    assert last["final_accuracy"] is None and last["bmta"] > 0 and not last["diverged"]
    for picture in ("curve.png", "collaboration.png"):
        assert next(tmp_path.glob(f"*.{picture}")).stat().st_size > 5000


def test_client_band_shows_mean_and_quantiles():
    from matplotlib.figure import Figure

    from fedjax_het.analysis.figures.run_figures import _draw_client_band

    axes = Figure().add_subplot()
    missing = np.full(11, np.nan)
    measured = np.append(np.arange(0, 100, 10.0), np.nan)  # the last client has no test
    (end,) = _draw_client_band(axes, np.array([1, 2, 3]), np.stack([missing, measured, measured]))
    (line,), (band,) = axes.lines, axes.collections
    assert end.y == pytest.approx(45)
    assert line.get_xdata().tolist() == [2, 3]
    assert line.get_ydata().tolist() == pytest.approx([45, 45])
    (outline,) = band.get_paths()
    assert (outline.vertices[:, 1].min(), outline.vertices[:, 1].max()) == pytest.approx((9, 81))


def test_closed_pipe_is_no_error():
    """Reproduce `fedjax-het list | head -0`."""
    command = [sys.executable, "-m", "fedjax_het", "list"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as listing:
        listing.stdout.close()
        said = listing.stderr.read()
    assert (said, listing.returncode) == (b"", 141)


def test_list_prints_all_names(capsys):
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    for group in (METHODS, DATASETS, PARTITIONS, NETWORKS):
        assert all(name in out for name in group)


BAD = {
    "unknown method": ("--algorithm fedavgg", "did you mean 'fedavg'"),
    "unknown data": ("--dataset fashion", "fashion_mnist"),
    "unknown partition": ("--partition dirichlett", "did you mean 'dirichlet'"),
    "system without rounds' duration": ("--system deadline", "--system deadline: expected speed"),
    "field of a skew": ("--skew noise:std", "--skew = 'noise:std': expected noise:field=value"),
    "unknown network": ("--model convnett", "did you mean 'convnet'"),
    "unknown hp": ("--hp proxmu=1", "--hp = 'proxmu'"),
    "unknown option": ("--algorithm scaffold --option opt=I", "did you mean 'option'"),
    "unknown preset": ("--algorithm dynafed --option preset=papers", "'paper'"),
    "unknown optimiser": ("--local-optimizer adm", "did you mean 'adam'"),
    "alpha": ("--alpha 0", "alpha = 0.0: expected"),
    "participation": ("--participation 1.5", "participation = 1.5: expected"),
    "no participation": ("--participation 0", "participation = 0.0: expected"),
    "rounds": ("--rounds 0", "rounds = 0: expected"),
    "clients": ("--num-clients 5000", "--num-clients = 5000: expected at most"),
    "no clients": ("--num-clients 0", "--num-clients = 0: expected"),
    "hp without value": ("--hp prox_mu", "expected NAME=VALUE"),
    "hp no number": ("--algorithm fedprox --hp prox_mu=big", "expected a finite number"),
    "negative rate": ("--hp local_lr=-1", "hp local_lr = -1.0: expected"),
    "scaffold option": ("--algorithm scaffold --option option=III", "'III'"),
    "lanes": ("--lanes none", "lanes"),
    "resume nowhere": ("--resume", "an --output-dir"),
    "alpha without dirichlet": ("--partition iid --alpha 1", "alpha = 1.0"),
    "width of an mlp": ("--model mlp --width 8", "network 'mlp' has no option 'width'"),
    "trajectory beyond the end": (
        "--algorithm dynafed --option segment_length=30",
        "--option segment_length, --option min_start = (20, 30, 1)",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_run_rejects_bad_input(case, capsys, monkeypatch):
    import fedjax_het.core.miscompile_guard as guard

    monkeypatch.setattr(guard.jax, "jit", None)  # nothing may compile
    arguments, expected = BAD[case]
    code = run(arguments if "--model" in arguments else f"--model mlp {arguments}")
    captured = capsys.readouterr()
    assert code == 2 and captured.out == ""
    assert len(captured.err.strip().splitlines()) == 1
    assert expected in captured.err


WRONG_COUNTS = {"1.7": "'1.7'", "nan": "'nan'", "inf": "'inf'", "0": "0", "1e3": "'1e3'"}


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["rnu"], ("rnu", "run")),
        (["run", "--rounds", "abc"], ("--rounds", "abc")),
        (["run", "--ruonds", "3"], ("--ruonds", "--rounds")),
        (["run", "--alpha"], ("--alpha",)),
        (["run", "--client-tests", "yes"], ("--client-tests", "yes")),
        (["sweep", "--client-tests", "[1,2]"], ("--client-tests = '[1,2]'",)),
        (["sweep", "--alpha", "0.1", "x"], ("--alpha", "x")),
        *((["sweep", "--lanes", bad], (f"lanes = {text}",)) for bad, text in WRONG_COUNTS.items()),
        *((["sweep", "--vmapped", bad], (f"ped = {text}",)) for bad, text in WRONG_COUNTS.items()),
        (["sweep", "--memory", "-1"], ("--memory = -1.0",)),
        *((["sweep", "--memory", bad], (f"--memory = '{bad}'",)) for bad in ("nan", "inf")),
        (["sweep", "--hp", "a=0.1", "a=0.2"], ("hp a = '0.2': expected it once",)),
        (["sweep", "--hp", "local_lr=0.1,x"], ("hp local_lr = 'x': expected a finite number",)),
        (["sweep", "--hp", "prox_mu"], ("expected NAME=VALUE",)),
        (["table", "table1", "--alphas", "x"], ("--alphas", "x")),
        (["run", "--alpah", "1"], ("flag = '--alpah' is unknown: did you mean '--alpha'?\n",)),
        (["run", "--warmup", "2"], ("--warmup' is unknown: did you mean '--hp lr_warmup=VALUE'?",)),
        (["sweep", "--prox-mu", "2"], ("did you mean '--hp prox_mu=VALUE'?",)),
        (["run", "--dataset", "fmnist"], ("is unknown: did you mean 'fashion_mnist'?\n",)),
        (
            ["run", "--model", "convnet", "--norm", "quux"],
            ("--norm = 'quux' is unknown: expected gro",),
        ),
        (["run", "--hp", "lr_decay=0.5"], ("= 0.5: expected no value, or --lr-schedule step or",)),
        (["run", "--lr-schedule", "step"], ("--hp lr_every is missing: expected a number of",)),
        (["run", "--quux", "1"], ("flag = '--quux' is unknown: see `fedjax-het run --help`\n",)),
        (["show", "quux"], ("name = 'quux' is unknown: see `fedjax-het list`\n",)),
        (["run", "fedavg"], ("'fedavg' is unexpected: a value needs a flag before it; see `",)),
        (["devices", "x"], ("'x' is unexpected: a value needs a flag before it; see `fedjax-",)),
        (["show"], ("name = ''",)),
        (["table", "quux"], ("table = 'quux' is unknown: see `fedjax-het table --list`\n",)),
        (["show", "fedmxi"], ("name = 'fedmxi' is unknown: did you mean 'fedmix'",)),
        # Paths that are longer than any system allows.
        (["run", "--data-dir", "1" * 300], ("--data-dir = '111",)),
        (["run", "--output-dir", "1" * 300], ("--output-dir = '111",)),
        (["sweep", "--data-dir", "1" * 300], ("--data-dir = '111",)),
        (["sweep", "--output-dir", "1" * 300], ("--output-dir = '111",)),
        (["table", "dynafed.table6", "--output-dir", "1" * 300], ("--output-dir = '111",)),
        (["--tyro-print-completion", "ksh"], ("--tyro-print-completion = 'ksh' is unknown",)),
        (["--tyro-print-completion"], ("--tyro-print-completion = ''",)),
        (["--tyro-none", "bash"], ("flag = '--tyro-none' is unknown",)),
    ],
)
def test_command_line_rejects_bad_words(words, parts, capsys):
    assert main(words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert all(part in captured.err for part in parts)


def test_interrupt_message_depends_on_output_dir(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedjax_het.cli._run", interrupted)
    assert main(["run"]) == 130 and "nothing is kept" in capsys.readouterr().err
    assert main(["run", "--output-dir", "x"]) == 130 and "repeat" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_interrupt_message_has_notes(kind, monkeypatch, capsys):
    def interrupted(*_):
        error = kind(143)
        error.add_note("the next run continues after round 3 of 4")
        raise error

    monkeypatch.setattr("fedjax_het.cli._run", interrupted)
    with contextlib.suppress(SystemExit):
        assert main(["run", "--output-dir", "x"]) == 130
    word = "interrupted" if kind is KeyboardInterrupt else "terminated"
    expected = f"fedjax-het: {word}; the next run continues after round 3 of 4\n"
    assert capsys.readouterr().err == expected


def test_log_message_is_printed_once(monkeypatch, capsys):
    """A handler of the root logger, as absl adds one, prints no second line."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    log_to_stderr(logging.INFO)
    log_to_stderr(logging.INFO)
    logging.getLogger("fedjax_het.data").info("one line")
    assert capsys.readouterr().err == "one line\n"


def test_repeated_warnings_are_counted(capsys):
    log_to_stderr(logging.WARNING)
    log = logging.getLogger("fedjax_het")
    text = "local tests have 12 examples of each client, and further words that follow"
    with pytest.raises(KeyError), count_repeated_warnings():
        for number in (1, 1, 23, 1):
            log.warning("%d %s", number, text)
            log.error("an error")
            log.warning("the same numbers")
        raise KeyError
    log.warning("1 %s", text)
    lines = capsys.readouterr().err.splitlines()
    assert [line for line in lines if line != "an error"] == [
        f"1 {text}",
        "the same numbers",
        "4 times with other numbers: 1 local tests have 12 examples of each client, and further "
        "words ...",
        "4 times: the same numbers",
        f"1 {text}",
    ]
    assert lines.count("an error") == 4


def test_modules_log_to_one_logger():
    """Filters of a logger, such as the count of warnings, do not apply to loggers of modules."""
    sources = (ROOT / "fedjax_het").rglob("*.py")
    assert not [path for path in sources if "getLogger(__name__)" in path.read_text("utf-8")]


def test_run_rejects_unwritable_output_dir(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert run(f"--model mlp --output-dir {tmp_path / 'file' / 'x'}") == 2
    assert "--output-dir" in capsys.readouterr().err


def test_dataset_from_arrays_rejects_bad_arrays():
    images = np.zeros((10, 4, 4, 1), np.float32)
    labels = np.arange(10) % 2
    with pytest.raises(ConfigError, match="nan: expected finite"):
        dataset_from_arrays(np.full_like(images, np.nan), labels, images, labels)
    with pytest.raises(ConfigError, match="label"):
        dataset_from_arrays(images, labels + 5, images, labels, num_classes=2)
    data = dataset_from_arrays(images, labels, images, labels)
    with pytest.raises(ConfigError, match="num_clients"):
        simulate(RunSpec(dataset="user", model="mlp", num_clients=11), dataset=data)


@pytest.mark.parametrize("preset", ["paper", "code"])
def test_resolve_writes_out_preset(preset):
    spec = RunSpec("dynafed", options={"preset": preset, "num_iterations": 7}).resolved()
    assert spec.options["trajectory_rounds"] == {"paper": 20, "code": 24}[preset]
    assert spec.options["num_iterations"] == 7
    assert spec.resolved() == spec and spec.digest() == spec.resolved().digest()
    assert RunSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize("text", ["hidden2,head", "[hidden2,head]", '["hidden2","head"]'])
def test_list_option_takes_words(text, capsys, tmp_path):
    words = ["--algorithm", "fedper", "--option", f"head_layers={text}", "--model", "mlp"]
    assert main(["sweep", *words, "--list", "--output-dir", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert "head_layers ['hidden2', 'head']" in line or "head_layers" in line, line


def test_show_prints_options(capsys):
    assert main(["show", "fedmix", "convnet", "dirichlet", "dynafed"]) == 0
    said = capsys.readouterr().out
    assert "mean_size = None: a whole number >= 1 or None. Number of examples in an average" in said
    assert "mixup_lambda = 0.05: a number in [0, 1)" in said
    assert "depth" in said and "alpha" in said
    assert "base methods (option base; default fedavg): fedavg, fedprox" in said
    assert "num_iterations = 1000: a whole number >= 1. N: outer iterations." in said
    assert "default protocol: standard (NIID-Bench, Li et al., ICDE 2022)" in said
    assert "--num-clients: 10; dynafed 80; fedamp 50 (digits 10); pfllib 20" in said
    assert "--hp mixup_lambda: 0.05" in said


def test_show_prints_settings_of_the_default_dataset(capsys):
    assert main(["show", "fedprox", "fedrod", "fedper"]) == 0
    said = capsys.readouterr().out
    assert "evaluated on the test set: the global model" in said
    assert (
        "evaluated on clients' own tests (--client-test-model NAME): personal (default), a" in said
    )
    assert "evaluated on the test set: no model" in said
    assert main(["show", "fedprox"]) == 0
    said = capsys.readouterr().out
    assert "settings of the protocol standard on Fashion-MNIST (in parentheses: on digits;" in said
    assert "--model: cnn (digits mlp); dynafed, fedaf, feddm convnet;" in said
    assert "--hp prox_mu: 0.01 (digits 0.1); dynafed, fedamp, fsl 0.002;" in said


def test_show_prints_optimizers_and_schedules(capsys):
    assert main(["show", "lion", "rmsprop", "cosine", *OPTIMIZERS, *LR_SCHEDULES]) == 0
    said = capsys.readouterr().out
    assert "  local_b2 = 0.99: a number in [0, 1)" in said
    assert "  local_clip_norm: a number > 0" in said and "  centered = False" in said
    assert "  lr_length: a number >= 1" in said
    assert "  lr_step_length, required: a number >= 1" in said
    for name in (*OPTIMIZERS, *LR_SCHEDULES):
        assert f"\n{name}: " in said
    assert main(["list"]) == 0
    said = capsys.readouterr().out
    assert "local optimizers" in said and "  cosine_restarts " in said


@pytest.mark.parametrize("name", METHODS)
def test_show_prints_settings_by_protocol(name, capsys):
    assert main(["show", name]) == 0
    said = capsys.readouterr().out
    spec = RunSpec(name, dataset="fashion_mnist").resolved()
    (rounds,) = (line for line in said.splitlines() if line.startswith("  --rounds: "))
    assert f"settings of the protocol {METHODS[name].protocol} " in said
    assert re.fullmatch(rf"  --rounds: {spec.rounds}(;.*)?", rounds)
    assert all(f"--hp {number}: " in said for number in spec.hp)


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_help_prints_defaults_by_protocol(command, capsys):
    lines = print_and_exit(capsys, command, "--help-all").splitlines()
    text = " ".join(" ".join(line.strip("│| ").split()) for line in lines)
    assert "None" not in text and "PROTOCOLS" not in text
    for name in ("num_clients", "participation", "rounds", "batch_size", "local_epochs"):
        flag = f"--{name.replace('_', '-')} "
        said = text[text.index(flag) :].split("(by protocol: ")[1].split(")")[0]
        found = []
        for group in said.split("; "):
            names, value = group.rsplit(" ", 1)
            for protocol in names.split(", "):
                spec = RunSpec("fedavg", "fashion_mnist", protocol=protocol).resolved()
                assert float(value) == pytest.approx(getattr(spec, name))
                found.append(protocol)
        assert sorted(found) == sorted(PROTOCOLS)
    assert "(default: fedavg)" in text and "(default: digits)" in text
    assert all(o.flag in text for o in get_options(COMMANDS[command].config_class).values())


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_help_fits_three_screens(command, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = print_and_exit(capsys, command, "--help").splitlines()
    assert len(lines) <= 3 * 40 and max(map(len, lines)) <= 80
    text = "\n".join(lines)
    groups = ("data", "partition", "model", "local training", "method", "evaluation", "run")
    assert all(f" {group} options " in text for group in (*groups, "output"))
    plain = "".join(text.replace("│", "").split())
    assert "namesallpartitions." in plain and "also--lr." in plain
    assert "(default:dirichlet_capped)" in plain and "(default:standard,ofNIID-Bench)" in plain
    assert "theprotocol'sortheoptimizer's" not in plain  # the value is printed
    assert "--help-all" in text and "--algorithm" in text and "--held-out-clients" not in text


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_every_option_has_group_and_help(command):
    config_class = COMMANDS[command].config_class
    grouped = [o.name for o in list_help_options(config_class, include_rare=True) if o.group]
    assert sorted(grouped) == sorted(get_options(config_class))
    for option in get_options(config_class).values():
        assert option.help[0].isupper() and option.help[-1] == "." and len(option.help) > 15


def test_help_of_the_program(capsys, monkeypatch):
    """Without a command, the status is 2, since a script that calls it has a fault."""
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main([])
    out = capsys.readouterr().out
    assert ended.value.code == 2 and max(map(len, out.splitlines())) <= 80
    for name, command in COMMANDS.items():
        assert f"   fedjax-het {command.example}\n" in out
        assert command.example.split()[0] == name
        docstring = inspect.cleandoc(command.config_class.__doc__)
        assert docstring.split("\n\n")[0].replace("\n", " ") == command.summary
    assert print_and_exit(capsys, "help") == print_and_exit(capsys, "-h") == out
    assert print_and_exit(capsys, "help", "run") == print_and_exit(capsys, "run", "--help")


def test_examples_of_commands_are_valid():
    for name in ("run", "sweep", "list", "show"):
        words = COMMANDS[name].example.split()[1:]
        _parse_command(COMMANDS[name].config_class, words)


def test_list_and_show_print_json(capsys):
    assert main(["list", "methods", "partitions", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert set(names) == {"methods", "partitions"} and set(names["methods"]) == set(METHODS)
    assert main(["list", "partitions"]) == 0
    out = capsys.readouterr().out
    assert "dirichlet" in out and "fedprox" not in out
    for command in ("show", "describe"):
        assert main([command, "fedprox", "--json"]) == 0
        assert "prox_mu" in json.loads(capsys.readouterr().out)["fedprox"]
    assert main(["list", "skews", "--json"]) == 0
    assert {*PARTITION_SKEWS, *SKEWS} == json.loads(capsys.readouterr().out)["skews"].keys()
    assert main(["show", "label_quantity"]) == 0
    assert "partition classes_per_client\noptions (--skew label_q" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["list", "--help"])
    words = capsys.readouterr().out.replace(",", " ").split()
    assert {*KINDS} <= {*words}
    for words in (["data", "sources"], ["Data-Sources"], ["datasources"]):
        capsys.readouterr()
        assert main(["list", *words, "--json"]) == 0
        assert [*json.loads(capsys.readouterr().out)] == ["data sources"]
    assert main(["list", "methds"]) == 2
    assert "did you mean 'methods'?" in capsys.readouterr().err


def test_run_and_sweep_accept_both_names_of_seeds(capsys):
    for flag in ("--seed", "--seeds"):
        assert _parse_command(COMMANDS["run"].config_class, [flag, "3"]).seed == 3
        assert _parse_command(COMMANDS["sweep"].config_class, [flag, "3", "4"]).seeds == (3, 4)
        assert _parse_command(COMMANDS["run"].config_class, [f"{flag}=3"]).seed == 3
    assert main(["run", "--seeds", "3", "4"]) == 2
    expected = "--seed = '3 4': expected one value; only `fedjax-het sweep` accepts several\n"
    assert capsys.readouterr().err == f"fedjax-het: {expected}"


@pytest.mark.parametrize("command", ["run", "sweep"])
def test_flag_of_one_value_everywhere(command, capsys):
    assert main([command, "--output-dir", "a", "b"]) == 2
    assert capsys.readouterr().err.endswith("'a b': expected one value\n")


@pytest.mark.slow
def test_terminal_shows_summaries_as_text(capsys, monkeypatch, tmp_path):
    line = ["--model", "mlp", "--num-clients", "3", "--rounds", "2", "--local-epochs", "1"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    folder = str(tmp_path)
    for _ in range(2):  # the second command finds the result
        assert main(["run", *line, "--output-dir", folder]) == 0
        out = capsys.readouterr().out.splitlines()
        assert len(out) <= 7 and max(map(len, out[:4])) <= 80
        assert out[0] == "Method:   FedAvg, protocol standard, network mlp"
        assert "3 clients" in out[1] and "final accuracy" in out[2] and "2 of 2" in out[3]
    assert main(["run", *line, "--output-dir", folder, "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 2
    monkeypatch.setattr("fedjax_het.cli.demo._METHODS", ("fedavg",))
    monkeypatch.setattr("fedjax_het.cli.demo._ROUNDS", 2)
    assert main(["demo", "--output-dir", folder]) == 0
    out = capsys.readouterr().out
    assert "Runs:   2 of 2 have a result" in out and f"Plot:   {folder}" in out
    assert (tmp_path / "learning_curves.png").is_file() and "{" not in out
    assert main(["report", folder, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)["files"]
    assert "overview.md" in files and main(["report", folder, "--quiet"]) == 0
    words = capsys.readouterr().out.split()
    assert words[:5] == ["Written", "to", f"{folder}:", "overview.md,", "overview.tex,"]


def test_version(capsys):
    assert main(["version"]) == 0
    words = [sys.executable, "-m", "fedjax_het", "--version"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    expected = f"fedjax-het {fedjax_het.__version__}\n"
    assert done.stdout == capsys.readouterr().out == expected


def test_missing_argument_before_a_flag(capsys):
    assert main(["export", "--model", "x"]) == 2
    expected = "fedjax-het: --model = '': expected a value after it; 'x' was read as result\n"
    assert capsys.readouterr().err == expected

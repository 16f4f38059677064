"""Bad values at every entry point are reported in one line that names the argument.

Fields, options, hyperparameters and flags are read from their records, so that new ones are tested
automatically. `pytest -m long tests/fuzz/test_entry_points.py` tries all of them with every kind of
mistake.
"""

import contextlib
import dataclasses
import decimal
import fractions
import inspect
import io
import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.expected_values import INVALID, expected_value, to_python_scalar
from support.stored_results import write_result

from fedjax_het import ConfigError, RunSpec, grid
from fedjax_het.algorithms import METHODS, get_algorithm_spec, get_possible_bases
from fedjax_het.cli import COMMANDS, main
from fedjax_het.config.protocols import PROTOCOLS
from fedjax_het.core.optimizers import OPTIMIZERS
from fedjax_het.data import DATASETS, NORMALIZATIONS, PARTITIONS, SERVER_SOURCES
from fedjax_het.nn import NETWORKS
from fedjax_het.papers.table.declaration import TableArguments
from fedjax_het.utils.command_line import get_options
from fedjax_het.utils.config import Bounds, field_types

# --- values that a user may write by mistake

TRICKY_TEXTS = (
    *("a\nb", "\x1b[31mred\x1b[0m", "\u202eabc", "[/bold]"),
    *("\r\n", "a\tb", "x" * 3000, "%s{}"),
)
_texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
_scalars = st.one_of(
    st.integers(-9, 9).flatmap(
        lambda n: st.sampled_from([np.int64(n), np.int8(n), np.float32(n / 10), np.float64(n / 10)])
    ),
    st.sampled_from(
        [np.array(3), np.array(0.1), np.bool_(True), np.float32(np.nan), np.str_("fedavg")]
    ),
)


def misspell(word: str) -> st.SearchStrategy[str]:
    """One letter dropped, doubled or changed."""
    positions = st.integers(0, max(0, len(word) - 1))
    return st.one_of(
        positions.map(lambda i: word[:i] + word[i + 1 :]),
        positions.map(lambda i: word[:i] + word[i : i + 1] * 2 + word[i + 1 :]),
        st.builds(lambda i, c: word[:i] + c + word[i + 1 :], positions, st.sampled_from("qxz9")),
    )


def value_strategies(word: str) -> dict[str, st.SearchStrategy[Any]]:
    """By kind of mistake, values of Python; `word` is one that is right somewhere."""
    small = st.integers(-5, 5)
    return {
        "words for numbers": st.one_of(st.just("auto"), st.floats(-9, 9).map(str), small.map(str)),
        "lists": st.one_of(
            st.lists(small, max_size=3), st.tuples(st.floats(0, 1)), st.just([[word]])
        ),
        "None": st.none(),
        "mappings": st.sampled_from([{}, {"a": 1}, {1: 2}, {word: None}]),
        "truth values": st.booleans(),
        "NumPy scalars": _scalars,
        "NumPy arrays": st.sampled_from(
            [np.ones(3), np.zeros((2, 2)), np.array([]), np.array(["a"]), np.arange(2)]
        ),
        "not finite": st.sampled_from([math.nan, math.inf, -math.inf]),
        "huge": st.sampled_from([1e300, 1e39, -1e300, 10**30, -(10**30), 2**31, 2**63, 10**400]),
        "tiny": st.sampled_from([1e-300, 1e-46, 5e-324, -1e-300]),
        "negative": st.one_of(st.integers(-(10**9), -1), st.floats(-1e9, -1e-3)),
        "zero": st.sampled_from([0, 0.0, -0.0]),
        "fractions": st.floats(0.01, 9).filter(lambda x: x != int(x)),
        "whole numbers": st.integers(1, 9),
        "empty words": st.just(""),
        "misspelt words": misspell(word),
        "other words": _texts,
        "escapes": st.sampled_from(TRICKY_TEXTS),
        "other objects": st.sampled_from(
            [
                *(object(), b"fedavg", 1j, {1}, range(3), len, decimal.Decimal("0.1"), int),
                *(fractions.Fraction(1, 3), np.datetime64("2020-01-01"), Ellipsis),
            ]
        ),
    }


def argument_strategies(word: str) -> dict[str, st.SearchStrategy[list[str]]]:
    """By kind of mistake, what may stand after a flag."""
    single_argument_strategies = {
        kind: strategy.map(lambda value: [str(value)])
        for kind, strategy in value_strategies(word).items()
        if kind not in ("escapes", "empty words", "NumPy scalars", "NumPy arrays", "mappings")
    }
    return single_argument_strategies | {
        "empty words": st.just([""]),
        "escapes": st.sampled_from(TRICKY_TEXTS).map(lambda text: [text]),
        "JSON": st.sampled_from(
            ["[1,2]", "{}", '{"a": 1}', "null", "true", "[" * 9999, "9" * 5000]
        ).map(lambda text: [text]),
        "missing values": st.just([]),
        "several words": st.lists(
            _texts.filter(lambda w: not w.startswith("-")), min_size=2
        ).filter(all),
    }


def expected_argument_value(word: str, annotation: Any) -> Any:
    """Return the meaning of a word on a command line for an annotation, or INVALID."""
    if annotation is str or annotation in (Path, Path | None):
        return word
    if annotation is bool:
        return {"true": True, "false": False}.get(word.lower(), INVALID)
    for parse in (int, float):
        try:
            parsed = expected_value(parse(word), annotation)
        except ValueError:
            continue
        if parsed is not INVALID:
            return parsed
    constants = {"None": None, "True": True, "False": False}
    return expected_value(constants.get(word, word), annotation)


def is_value_in_message(value: Any, message: str) -> bool:
    """Whether a message has the value, or a part of it, or its beginning."""
    value = to_python_scalar(value)
    if isinstance(value, dict):
        elements = [*value, *value.values()]
    else:
        elements = list(value) if isinstance(value, list | tuple | range | np.ndarray) else []
    texts = [repr(value), " ".join(repr(value).split())]
    if " at 0x" in texts[0]:
        texts += [f"a {type(value).__name__}", f"an {type(value).__name__}"]
    if inspect.isroutine(value):
        texts.append("a function")
    if isinstance(value, list):
        texts.append(repr(tuple(value)))
        texts.append(repr(" ".join(map(str, value))))  # words of the command line
    if isinstance(value, np.ndarray):
        texts += [repr(value.tolist()), repr(tuple(value.ravel().tolist()))]
    if isinstance(value, int | fractions.Fraction) and abs(value) < 1e300:
        texts.append(repr(float(value)))
    if isinstance(value, str) and (value != value.strip() or "," in value):
        elements = [word.strip() for word in value.split(",")]  # names of metrics
    return any(text[:25] in message for text in texts) or any(
        is_value_in_message(part, message) for part in elements
    )


# --- tests

LONGEST = 1500  # characters of a line, which may list all methods, networks or flags
BASE = {"model": "mlp", "partition": "dirichlet", "alpha": 0.5}
# Settings that a setting requires.
CONTEXT: dict[str, dict[str, Any]] = {
    "classes": {"partition": "classes_per_client", "alpha": None},
    "partition": {"alpha": None},
    **{name: {"model": "convnet"} for name in ("width", "depth", "norm")},
    "stem": {"model": "resnet18"},
    "momentum": {"local_optimizer": "momentum"},
    **{name: {"client_tests": True} for name in ("test_per_client", "client_test_model")},
    **{name: {"algorithm": "fsl"} for name in ("server_data", "server_options", "pretrain_epochs")},
}
# Valid words of settings.
NAMES: dict[str, Any] = {
    "algorithm": METHODS,
    "dataset": (*DATASETS, "user"),
    "normalization": NORMALIZATIONS,
    "partition": PARTITIONS,
    "model": (*NETWORKS, "user"),
    "norm": ("group", "instance", "batch", "none"),
    "stem": ("imagenet", "cifar"),
    "local_optimizer": OPTIMIZERS,
    "optimizer_state": ("reset", "keep"),
    "averaging": ("uniform", "weighted"),
    "protocol": PROTOCOLS,
    "client_test_model": ("global", "client", "received"),
    "server_data": SERVER_SOURCES,
}


class Target(NamedTuple):
    """A setting or option to which a user gives a value."""

    named: str  # name in messages
    kind: Any
    make: Callable[[Any], Any]  # returns the digests of the runs with a value
    word: str = "fedavg"  # a valid word of some setting


class EnteredError(Exception):
    """Raised where a command starts its work."""


@pytest.fixture(scope="module", autouse=True)
def nothing_is_computed(tmp_path_factory):
    def entered(*args, **named):
        raise EnteredError

    def compiled(*args, **named):
        raise AssertionError("something is compiled")

    places = ("data", "data.dataset_registry", "data.server_sources", "runtime.data_assignment")
    work = (
        *("runtime.sweep.execute_runs", "runtime.ray_launcher.sweep_on_ray"),
        *("analysis.report.write_files", "papers.table.command.sweep"),
        *("papers.table.command.plan_sweep", "runtime.sweep.load_dataset"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("here"))
        Path(FOLDER).mkdir()
        write_result(FOLDER, RunSpec(rounds=6, **BASE), np.linspace(0.1, 0.5, 6))
        patch.setattr(jax, "jit", compiled)
        patch.setattr(jax.distributed, "initialize", entered)
        for place in places:
            patch.setattr(f"fedjax_het.{place}.load_dataset", entered)
        for place in work:
            patch.setattr(f"fedjax_het.{place}", entered)
        yield


# --- Python


def run_settings() -> Iterator[Target]:
    hints = field_types(RunSpec)
    for field in dataclasses.fields(RunSpec):
        name, kind = field.name, hints[field.name]
        word = "fedavg"
        if name in NAMES:
            names = Literal[tuple(NAMES[name])]
            kind = names | None if field.default is None else names
            word = next(iter(NAMES[name]))
        arguments = {**BASE, **CONTEXT.get(name, {})}
        yield Target(name, kind, lambda v, n=name, g=arguments: digest(**{**g, n: v}), word)


def grids() -> Iterator[Target]:
    for target in run_settings():
        if target.named not in ("hp", "options"):
            arguments = {**BASE, **CONTEXT.get(target.named, {})}

            def make(value, name=target.named, arguments=arguments):
                values = value if name == "metrics" else [value]  # a list of metrics is one value
                return [spec.digest() for spec in grid(**{**arguments, name: values})]

            yield target._replace(make=make)


def digest(**arguments: Any) -> str:
    return RunSpec(**arguments).digest()


def method_hyperparameters() -> Iterator[Target]:
    for name in METHODS:
        spec = RunSpec(name).resolved()
        entry = get_algorithm_spec(name, spec.options)
        known = entry.collect_hyperparameters(spec.local_optimizer, spec.options, spec.num_clients)
        for number, record in known.items():
            make = lambda v, m=name, n=number: digest(algorithm=m, hp={n: v})  # noqa: E731
            yield Target(f"hp {number}", Annotated[float, record.bounds], make)


def method_options() -> Iterator[Target]:
    for name in METHODS:
        entry = get_algorithm_spec(name, {})
        kinds: dict[str, Any] = {}
        for part in filter(None, (entry.base, entry)):
            unset = type(None) if part.options.PRESETS else None
            hints = get_type_hints(part.options, include_extras=True)
            for option in dataclasses.fields(part.options):
                kind = hints[option.name]
                kinds[option.name] = kind | unset if unset else kind
        if entry.options.PRESETS:
            kinds[entry.options.PRESET_FIELD] = Literal[tuple(entry.options.PRESETS)] | None
        if "target_counts" in kinds:  # a single number stands for a list
            kinds["target_counts"] |= int
        if "head_layers" in kinds:  # a text stands for a list
            kinds["head_layers"] |= str
        if entry.has_base:
            kinds["base"] = Literal[get_possible_bases(entry)] | None
        for option, kind in kinds.items():
            make = lambda v, m=name, n=option: digest(algorithm=m, options={n: v})  # noqa: E731
            yield Target(f"options {option}", kind, make)


def component_options() -> Iterator[Target]:
    """Yield options of networks, partitions and server data, from annotations of functions."""
    parts: list[tuple[str, str, Any, Any, dict[str, Any]]] = []
    for name, network in NETWORKS.items():
        arguments = {**BASE, "model": name}
        parts.append(("network_options", name, network.make, network.options, arguments))
    for name, scheme in PARTITIONS.items():
        arguments = {"model": "mlp", "partition": name}
        parts.append(("partition_options", name, scheme.split, scheme.parameters, arguments))
    for name, source in SERVER_SOURCES.items():
        arguments = {"algorithm": "fsl", "server_data": name}
        parts.append(
            ("server_options", name, source.draw or source.pool, source.options, arguments)
        )
    for field, _, function, names, arguments in parts:
        hints = get_type_hints(function, include_extras=True)
        for option in names:
            if option in RunSpec.__dataclass_fields__ or option == "classes_per_client":
                continue  # a setting
            kind = hints.get(option, Any)
            make = lambda v, g=arguments, f=field, n=option: digest(**g, **{f: {n: v}})  # noqa: E731
            yield Target(f"{field} {option}", kind, make)


ENTRY_POINTS = {
    "settings": run_settings,
    "grid": grids,
    "hp": method_hyperparameters,
    "options": method_options,
    "parts": component_options,
}


def assert_one_line(line: str, named: str) -> None:
    assert line.isprintable(), line
    assert len(line) < LONGEST, line
    assert re.search(rf"(?<![\w-]){re.escape(named)}(?!\w)", line), (named, line)


def try_value(target: Target, value: Any) -> None:
    """Require an error that names argument and value, or runs equal to those of the meaning."""
    is_list_of_metrics = target.named == "metrics" and isinstance(value, list | tuple)
    meaning = ", ".join(map(str, value)) or None if is_list_of_metrics else value
    meant = expected_value(meaning, target.kind)
    try:
        result = target.make(value)
    except ConfigError as error:
        alone = meant is INVALID  # otherwise the message may name a conflicting argument
        assert_one_line(str(error), target.named if alone else target.named.split()[-1])
        assert value is None or is_value_in_message(value, str(error)), (value, str(error))
    else:
        assert meant is not INVALID, (target.named, value)
        assert result == target.make(meant), (target.named, value)


def fuzz_settings(examples: int):
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def run_examples(strategy: st.SearchStrategy[Any], examples: int, work: Callable[[Any], None]):
    fuzz_settings(examples)(given(strategy)(lambda value: work(value)))()


@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_entry_points_reject_bad_values(entry_point):
    targets = list(ENTRY_POINTS[entry_point]())

    @fuzz_settings(60)
    @given(st.data())
    def each(data):
        target = data.draw(st.sampled_from(targets))
        try_value(target, data.draw(st.one_of(*value_strategies(target.word).values())))

    each()


@pytest.mark.long
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_every_argument_with_every_mistake(entry_point):
    for target in ENTRY_POINTS[entry_point]():
        for strategy in value_strategies(target.word).values():
            examples = {"settings": 12, "grid": 4}.get(entry_point, 2)
            run_examples(strategy, examples, partial(try_value, target))


DICTS = {
    "hp": ("prox_mu", {"algorithm": "fedprox"}),
    "options": ("preset", {"algorithm": "dynafed"}),
    "network_options": ("hidden", {}),
    "partition_options": ("min_size", {"partition": "dirichlet_capped"}),
    "server_options": ("size", {"algorithm": "fsl"}),
}


@fuzz_settings(60)
@given(st.sampled_from(sorted(DICTS)), st.data())
def test_mappings_reject_unknown_names(field, data):
    right, more = DICTS[field]
    name = data.draw(st.one_of(misspell(right), st.text()))
    if name in (right, "alpha", "base"):
        return
    with pytest.raises(ConfigError) as error_info:
        RunSpec(**{**BASE, **more, field: {name: 1}}).resolved()
    assert_one_line(str(error_info.value), field)
    assert repr(name)[:25] in str(error_info.value)


# --- the command line

PAIRS = {
    "--hp": "hp",
    "--option": "options",
    "--network-option": "network_options",
    "--partition-option": "partition_options",
    "--server-option": "server_options",
}


FOLDER = "results"  # contains one run
MORE = {"report": (FOLDER,)}  # positional arguments


class Flag(NamedTuple):
    """A flag of a command, and the words that it requires."""

    command: tuple[str, ...]
    flag: str
    kind: Any
    context: tuple[str, ...]


def flags() -> list[Flag]:
    """Return every flag of every command."""
    return [
        *(
            flag
            for name, command in COMMANDS.items()
            for flag in list_flags((name, *MORE.get(name, ())), command.config_class)
        ),
        *list_flags(("table", "dynafed.table5"), TableArguments),
        *list_flags(("table", "fsl.table1"), TableArguments),
    ]


def list_flags(command: tuple[str, ...], record: Any) -> Iterator[Flag]:
    for option in get_options(record).values():
        kind = option.annotation
        if option.is_positional:
            continue
        if get_origin(kind) is dict:  # words NAME=VALUE
            kind = tuple[str, ...]
        if option.name in NAMES:
            valid = Literal[tuple(NAMES[option.name])]
            kind = tuple[valid, ...] if is_list(kind) else valid | None
        context = CONTEXT.get(option.name, {})
        words = [
            word
            for name, value in {**BASE, **context}.items()
            if name != option.name and value is not None and record is not TableArguments
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        used = tuple(words) if command[0] in ("run", "sweep") else ()
        yield Flag(command, option.flag, kind, used)


def get_item_type(kind: Any) -> Any:
    """Return the type of a list's items, or None."""
    lists = [each for each in (kind, *get_args(kind)) if get_origin(each) is tuple]
    return get_args(lists[0])[0] if lists else None


def is_list(kind: Any) -> bool:
    return get_item_type(kind) is not None


FLAGS = flags()


def run_command_line(words: list[str]) -> tuple[int | None, str]:
    """Return exit status and stderr of a command line; status None where the work starts."""
    out, error = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        try:
            status = main(words)
        except EnteredError:
            status = None
    assert status is None or status == 0 or not out.getvalue()
    return status, error.getvalue()


def assert_refused(actual: tuple[int | None, str], named: str, shown: list[str]) -> None:
    status, said = actual
    assert status == 2, (named, shown, said)
    if said.startswith("{"):
        said = json.loads(said)["message"] + "\n"
    assert said.endswith("\n") and said.count("\n") == 1, said
    assert_one_line(said[:-1], named)
    read = [expected_argument_value(word, float) for word in shown]
    forms = [*shown, " ".join(shown), *(each for each in read if each is not INVALID)]
    seen = any(is_value_in_message(form, said) or str(form)[:20] in said for form in forms)
    assert seen or "None" in shown, (shown, said)


def try_words(flag: Flag, words: list[str]) -> None:
    elsewhere = "dir" in flag.flag and any("/" in word or ".." in word for word in words)
    if elsewhere or flag.command == ("table",):  # a word may be the table's name
        return
    line = [*flag.command, *flag.context, flag.flag, *words]
    several = is_list(flag.kind)
    item = get_item_type(flag.kind) if several else flag.kind
    right = 0 if flag.kind is bool else 1
    meant = [expected_argument_value(word, item) for word in words if word]
    bad = (len(words) != right and not (several and words)) or "" in words or INVALID in meant
    bad |= flag.flag in PAIRS and any("=" not in word for word in words)
    actual = run_command_line(line)
    # The required argument of `export` takes a single word, which leaves the flag without a value.
    # Without any word, it is the argument that lacks a value.
    is_export = flag.command == ("export",)
    is_taken = is_export and "a value after it" in actual[1]
    named = "result" if is_export and not words else flag.flag
    if is_export and flag.kind is bool and len(words) == 1:
        # The word is the result: it is no path, or the file to write is missing.
        named, is_taken = "result" if "result = " in actual[1] else "--model", True
    if bad or actual[0] == 2:
        assert_refused(actual, named, [""] if is_taken else words or [""])


LINE_MISTAKES = st.one_of(*argument_strategies("fedavg").values())
WORD_MISTAKES = LINE_MISTAKES.filter(lambda words: len(words) == 1).map(lambda words: words[0])


def is_plain(words: list[str]) -> bool:
    return not any(re.match("--?[A-Za-z]", word) and word != "-inf" for word in words)


@fuzz_settings(50)
@given(st.sampled_from(FLAGS), LINE_MISTAKES.filter(is_plain))
def test_flags_reject_bad_words(flag, words):
    try_words(flag, words)


# Positional arguments: the words before it, and its name in messages.
PLACES = {
    (): "command",
    ("show",): "name",
    ("report",): "directory",
    ("table",): "table",
    ("run", "--import"): "--import",
}


@fuzz_settings(30)
@given(st.sampled_from(sorted(PLACES)), WORD_MISTAKES)
def test_positional_arguments_reject_bad_words(place, word):
    if not is_plain([word]):
        return
    actual = run_command_line([*place, word])
    if actual[0] is not None and word not in METHODS:
        assert_refused(actual, PLACES[place], [word])


@fuzz_settings(20)
@given(st.sampled_from(["run", "sweep"]), st.sampled_from(sorted(PAIRS)), WORD_MISTAKES)
def test_name_value_flags_reject_bad_values(command, flag, text):
    name, more = DICTS[PAIRS[flag]]
    context = {**BASE, **more}
    arguments = [word for key, value in context.items() for word in (f"--{key}", str(value))]
    actual = run_command_line([command, *arguments, flag, f"{name}={text}"])
    meant = expected_argument_value(text, Annotated[float, Bounds(0)]) if text else INVALID
    if actual[0] == 2 or not text or (flag == "--hp" and command == "run" and meant is INVALID):
        assert_refused(actual, flag, [text, text.split(",")[0], name])


@fuzz_settings(40)
@given(st.sampled_from(FLAGS).flatmap(lambda f: st.tuples(st.just(f), misspell(f.flag[2:]))))
def test_unknown_flag_is_reported(drawn):
    flag, name = drawn
    known = {each.flag for each in FLAGS if each.command == flag.command}
    known.add("--seed")  # a short form of --seeds in a sweep
    wrong = f"--{name}"
    if wrong.replace("_", "-") not in known and name[:1].isalpha():
        assert_refused(run_command_line([*flag.command, wrong, "1"]), wrong, [wrong])


@fuzz_settings(20)
@given(st.sampled_from(FLAGS))
def test_repeated_flag_is_list_or_rejected(flag):
    words = [] if flag.kind is bool else ["1"]
    line = [*flag.command, flag.flag, *words, flag.flag, *words]
    if is_list(flag.kind):
        assert run_command_line(line) == run_command_line([*flag.command, flag.flag, "1", "1"])
    else:
        assert_refused(run_command_line(line), flag.flag, ["1", ""])


@pytest.mark.slow
def test_flags_reject_empty_word():
    for flag in FLAGS:
        if flag.kind is not bool:
            assert_refused(run_command_line([*flag.command, flag.flag, ""]), flag.flag, [""])


@pytest.mark.long
def test_every_flag_with_every_mistake():
    for flag in FLAGS:
        for strategy in argument_strategies("fedavg").values():
            run_examples(strategy.filter(is_plain), 3, partial(try_words, flag))

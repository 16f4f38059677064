"""Public functions use any value, or reject it in one line that names the argument.

The test finds functions, arguments and annotations, so that new functions are covered. Each
function needs the arguments of a good call here.
"""

import collections.abc
import functools
import inspect
import math
import os
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import jax
import numpy as np
import optax
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.data import make_user_dataset
from support.expected_values import INVALID, expected_value
from support.stored_results import write_result

import fedjax_het
from fedjax_het import ConfigError, MetricInfo, Placement, RunSpec, analysis, data, nn
from fedjax_het.aggregation import Median
from fedjax_het.analysis.render import TableSection, TextTable
from fedjax_het.attacks import SignFlip
from fedjax_het.runtime import (
    benchmark,
    result_store,
    run_flops,
    runner,
    session,
    split_measures,
    sweep,
)
from fedjax_het.runtime import ray_launcher as ray
from fedjax_het.runtime.results import Result
from fedjax_het.runtime.signature import build_signature
from fedjax_het.runtime.split_measures import SplitMeasures
from fedjax_het.runtime.synthetic_dataset import SyntheticDataset
from fedjax_het.runtime.trained_model import InputSpec, TrainedModel
from fedjax_het.skews import Noise
from fedjax_het.systems import Speed
from fedjax_het.tasks import Regression
from fedjax_het.utils.config import VALIDATED_FUNCTIONS, parameter_types, validate_arguments

# --- unexpected values


class Unprintable:
    """Whose every answer is an error."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def __eq__(self, other):
        raise RuntimeError("no ==")

    __hash__ = object.__hash__

    def __array__(self, *_, **__):
        raise RuntimeError("no array")


class NotAnnotated:
    """Stands for the annotation of what has none."""


# Kept as long as the process, which removes it and what lies in it at its end.
_SCRATCH_FOLDER = tempfile.TemporaryDirectory(prefix="odd-values-")


def _make_scratch_file() -> Path:
    """One that may be written over."""
    handle, name = tempfile.mkstemp(suffix=".txt", dir=_SCRATCH_FOLDER.name)
    os.close(handle)
    return Path(name)


def make_unexpected_values() -> list[Any]:
    """Return the values, which a call may use up or write over."""
    return [
        *(None, "", "x", "1", "a\nb\x1b[31m", "\0", "x" * 10_000, b"1", True, False),
        *([], [1], ["x"], [None], [[1], [1, 2]], (1, "x"), {}, {"a": 1}, {1: 2}, {1}),
        *(0, -1, 1, 1.5, math.nan, math.inf, -math.inf, 10**30, -(10**30), 1e300, 1e-300, 1j),
        *(np.True_, np.int64(3), np.float32(0.5), np.str_("x"), np.float64("nan")),
        *(np.ones(3), np.arange(3), np.ones((2, 2)), np.array(2), np.array([None, "x"], object)),
        *(object(), (i for i in range(3)), Unprintable(), [Unprintable()], lambda: None, int),
        *(Path("/nowhere/at/all"), _make_scratch_file()),
        *(pd.DataFrame(), pd.DataFrame({"a": [1, 2]})),
    ]


def is_certainly_invalid(value: Any, annotation: Any) -> bool:
    """Whether an annotation rules a value out: of arrays and lists of numbers it says little."""
    if get_origin(annotation) in (Union, types.UnionType):
        members = get_args(annotation)
        if any((get_origin(member) or member) in (os.PathLike, Path) for member in members):
            members = (Path, *(member for member in members if member is types.NoneType))
        return all(is_certainly_invalid(value, member) for member in members)
    origin, items = get_origin(annotation), get_args(annotation)
    if annotation in (Any, np.ndarray, NotAnnotated) or getattr(annotation, "_is_protocol", False):
        return False
    if annotation is Path:
        return not isinstance(value, str | os.PathLike) or str(value) == "" or "\0" in str(value)
    if origin is type:
        return not isinstance(value, type)
    if annotation is Callable or origin is collections.abc.Callable:
        return not callable(value)
    if origin in (collections.abc.Sequence, collections.abc.Iterable, list, tuple):
        return _is_invalid_sequence(value, origin, items)
    if origin in (Mapping, dict) or annotation is dict:
        return not isinstance(value, Mapping)
    if origin in (Annotated, Literal) or annotation in (bool, int, float, str, types.NoneType):
        return expected_value(value, annotation) is INVALID
    return isinstance(annotation, type) and not isinstance(value, annotation)


def _is_invalid_sequence(value: Any, origin: Any, items: tuple[Any, ...]) -> bool:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        return True
    ordered = hasattr(value, "__len__") and not isinstance(value, Mapping | set)
    if (origin is collections.abc.Sequence and not ordered) or getattr(value, "shape", None) == ():
        return True
    has_class_items = (
        items and isinstance(items[0], type) and items[0] not in (int, float, np.ndarray)
    )
    if not (has_class_items and hasattr(value, "__len__")):
        return False
    return any(not isinstance(item, items[0]) for item in value)


# --- tests

MODULES = (fedjax_het, data, nn, analysis)
# Functions of programs, whose arguments are checked where the user passes them.
NOT_VALIDATED = {
    *("find_parameter_name", "conv2d", "count_parameters", "make_generator", "parse_row"),
    "make_image_generator",
    *("count_training_flops", "micro_batched_value_and_grad", "compute_network_digest"),
    *("norm_mask", "get_norm_variables", "choose_micro_batch_size"),
    "add_projection_head",
    "show_environment",  # has no arguments
    "grid",  # has the settings of RunSpec: `test_entry_points.py`
}
# Functions that raise OSError, as documented.
FILE_FUNCTIONS = {
    *("Partition.save", "Result.load", "Result.save", "SyntheticDataset.save"),
    *("TrainedModel.save", "load_model"),
}


class Reached(Exception):
    """Raised where a function would start to compile."""


DATA = make_user_dataset(class_names=("a", "b", "c"))
ROWS = [
    (image, int(label)) for image, label in zip(DATA.test_inputs, DATA.test_labels, strict=True)
]
LABELS = DATA.train_labels
SPLIT = data.make_partition("iid", LABELS, 3, num_clients=4, seed=0)
SPEC = RunSpec(dataset="user", model="mlp", partition="iid", num_clients=4, rounds=1, batch_size=8)
ROWS = pd.DataFrame(
    {
        "digest": ["a", "b"],
        "settings": ["c", "d"],
        "algorithm": ["fedavg", "fedavg"],
        "dataset": ["digits"] * 2,
        "alpha": [0.1, 1.0],
        "rounds": [2, 2],
        "seed": [0, 0],
        "final_accuracy": [0.5, 0.6],
        "diverged": [False, False],
    }
)
CURVES = pd.DataFrame(
    {"digest": ["a", "a", "b", "b"], "round": [1, 2, 1, 2], "test_accuracy": [0.1, 0.2, 0.3, 0.4]}
)
TABLE = TextTable("t", ("Method",), (TableSection(({"Method": "a", "x": "1"},)),))


@functools.cache
def make_untrained_model():
    """Return an untrained model."""
    task = build_signature(SPEC.resolved(), DATA).training.task
    variables = task.model.init(jax.random.key(0))
    return TrainedModel(SPEC.resolved(), InputSpec.from_dataset(DATA), variables, None, task)


def make_good_calls(folder) -> dict[str, dict]:
    """Return the arguments of a good call of each function, without sufficient defaults."""
    labels = {"labels": LABELS, "num_classes": 3}
    tests = {"partition": SPLIT, "train_labels": LABELS, "test_labels": DATA.test_labels}
    images = {f"{split}_inputs": getattr(DATA, f"{split}_inputs") for split in ("train", "test")}
    targets = {f"{split}_labels": getattr(DATA, f"{split}_labels") for split in ("train", "test")}
    run = {"spec": SPEC, "dataset": DATA}
    many = {"specs": [SPEC], "dataset": DATA}
    frames = {"results": ROWS, "curves": CURVES}
    stored = write_result(folder / "stored", RunSpec(rounds=2, model="mlp"), np.ones(2))
    attacked = Result.load(stored)
    attacked.partition, attacked.models = SPLIT, lambda client, **_: make_untrained_model()
    compared = {"cells": [], "results": ROWS, "reported": pd.DataFrame()}
    return {
        "describe": {"name": "fedprox"},
        "list_methods": {},
        "register_partition": {"name": "mine", "split": lambda rng, labels: []},
        "register_skew": {"kind": Noise},
        "register_attack": {"kind": SignFlip},
        "register_aggregation": {"kind": Median},
        "register_system": {"kind": Speed},
        "register_task": {"kind": Regression},
        "measure_split": run,
        "measure_membership_inference": {"result": attacked, "dataset": DATA},
        "plot_client_measures": {"measures": SplitMeasures(SPLIT.summarize(**labels), SPLIT.sizes)},
        "plot_metric_vs_measure": {"results": ROWS, "measure": "final_accuracy"},
        "Partition.client_indices": {"self": SPLIT, "k": 0},
        "Result.save": {"self": Result.load(stored), "directory": folder / "saved"},
        "Result.load": {"cls": Result, "path": stored},
        "TrainedModel.save": {"self": make_untrained_model(), "path": folder / "saved.msgpack"},
        "SyntheticDataset.save": {
            "self": SyntheticDataset(*[np.zeros(1)] * len(SyntheticDataset._fields)),
            "path": folder / "synthetic.npz",
        },
        "Partition.save": {"self": SPLIT, "path": folder / "split.npz"},
        "Partition.load": {"cls": data.Partition, "path": SPLIT.save(folder / "kept.npz")},
        "Partition.label_counts": {"self": SPLIT, **labels},
        "Partition.summarize": {"self": SPLIT, **labels},
        "make_partition": {"scheme": "iid", **labels, "num_clients": 4, "seed": 0},
        "partition_from_clients": {"clients": [[0, 1], [2]]},
        "average_examples": {
            **labels,
            "inputs": DATA.train_inputs,
            "partition": SPLIT,
            "blocks": data.MeanBlocks(2),
            "seed": 0,
        },
        "plot_partition": {"partition": SPLIT, **labels},
        "dataset_from_arrays": {**images, **targets},
        "make_client_tests": {"partition": SPLIT, "dataset": DATA, "seed": 0},
        "draw_local_tests": {**tests, "num_classes": 3, "seed": 0},
        "make_domain_tests": {"partition": SPLIT, "test_domains": np.arange(60) % 4},
        "make_user_tests": {
            "partition": data.make_partition(
                "natural", LABELS, 3, num_clients=4, seed=0, users=np.arange(len(LABELS)) % 4
            ),
            "test_users": np.arange(60) % 4,
        },
        "make_full_tests": {"partition": SPLIT, "num_examples": 60},
        "make_proportional_tests": {**tests, "num_classes": 3, "seed": 0},
        "compute_client_mixtures": {"partition": SPLIT, **labels},
        "get_client_groups": {
            "partition": data.make_partition(
                "grouped", np.arange(3000) % 3, 3, num_clients=4, seed=0, groups=[[0], [1]]
            )
        },
        "load_image_folder": {"path": folder},
        "dataset_from_object": {"train": ROWS, "test": ROWS},
        "load_dataset": {"name": "digits", "cache_dir": folder},
        "register_dataset": {"name": "mine", "load": lambda: DATA},
        "register_metric": {
            "name": "mine",
            "sums": len,
            "finish": len,
            "infos": {"mine": MetricInfo()},
        },
        "register_server_source": {"name": "mine", "draw": lambda dataset: [0]},
        "resolve_server_options": {"source": "iid"},
        "make_server_pool": {"source": "iid", "dataset": DATA},
        "draw_withheld_examples": {"source": "held_out", "dataset": DATA, "seed": 0},
        "make_server_data": {"source": "iid", "dataset": DATA, "partition": SPLIT, "seed": 0},
        "plot_server_examples": {
            "dataset": DATA,
            "server_images": DATA.train_inputs,
            "server_labels": LABELS,
        },
        "plot_condensed": {"images": np.ones((1, 2, 4, 4, 3)), "clients": [0], "classes": [1]},
        "to_model": {
            "network": lambda input_shape, num_classes: nn.make_model(
                "mlp", input_shape, num_classes
            ),
            "input_shape": (2, 2, 1),
            "num_classes": 3,
        },
        "make_model": {"name": "mlp", "input_shape": (2, 2, 1), "num_classes": 3},
        "register_tracker": {"name": "mine", "open": lambda opening: None},
        "register_network": {"name": "mine", "make": lambda: None},
        "register_optimizer": {"name": "mine", "make": lambda learning_rate: optax.sgd(0.1)},
        "register_method": {"name": "mine", "build": lambda training, plan: None},
        "assign_method_colors": {"methods": ["fedavg"]},
        "find_varying_settings": {"results": ROWS},
        "load_result": {"directory": folder, "digest": "0" * 16},
        "load_results": {"directory": folder},
        "load_curves": {"directory": folder},
        "load_model": {"path": make_untrained_model().save(folder / "model.msgpack")},
        "evaluate": {"model": make_untrained_model(), "dataset": DATA},
        "plot_learning_curves": frames,
        "plot_gradient_gaps": frames,
        "plot_metric_vs_alpha": {"results": ROWS},
        "plot_metric_vs_setting": {"results": ROWS, "x": "alpha"},
        "plot_client_accuracies": {"panels": {"a": {"fedavg": np.ones(3)}}},
        "run_paired_tests": {
            "accuracies": {"a": np.arange(5.0), "b": np.ones(5)},
            "methods": ["a"],
        },
        "plot_collaboration": {"weights": np.eye(3)},
        "add_ranks": {"table": pd.DataFrame()},
        "compute_rank_correlations": {"table": pd.DataFrame()},
        "compare_with_reported": compared,
        "list_diverged_runs": {"cells": [], "results": ROWS},
        "plot_table_curves": {**compared, "curves": CURVES},
        "print_table": {"table": TABLE},
        "to_markdown": {"table": TABLE},
        "to_latex": {"table": TABLE},
        "to_csv": {"frame": ROWS},
        "make_comparison_caption": {"table": pd.DataFrame()},
        "format_comparison_table": {"table": pd.DataFrame(), "title": "t"},
        "summarize_runs": {"results": ROWS},
        "make_overview_table": {"results": ROWS},
        "make_pivot_table": {"results": ROWS},
        "plot_heat_map": {"results": ROWS, "x": "alpha", "y": "rounds"},
        "write_report": {"directory": folder},
        "simulate": run,
        "federation": run,
        "benchmark_rounds": {**run, "rounds": 1},
        "count_flops": {"spec": SPEC, "dataset": DATA, "lanes": 2},
        "sweep": {**many, "directory": folder / "sweep"},
        "tune": {**many, "directory": folder / "tune"},
        "plan_sweep": {**many, "directory": folder / "sweep"},
        "sweep_on_ray": {**many, "directory": folder / "sweep"},
    }


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return a current folder; functions that would compile raise `Reached`."""

    def reached(*_, **__):
        raise Reached

    for module, name in (
        *((module, "prepare_group") for module in (session, benchmark, run_flops)),
        *((sweep, "execute_runs"), (ray, "RayCluster"), (split_measures, "measure_assignment")),
    ):
        monkeypatch.setattr(module, name, reached)
    monkeypatch.setattr(runner, "init_states", reached)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def list_functions() -> dict[str, tuple]:
    """Return the validated functions by name, with the annotations of their arguments."""
    actual = {}
    for name, function in VALIDATED_FUNCTIONS.items():
        inner = inspect.unwrap(function)
        if inner.__module__.startswith("fedjax_het."):
            kinds = dict.fromkeys(named(inner), NotAnnotated) | parameter_types(inner)
            short = name.removeprefix(f"{inner.__module__}.")
            actual[short] = (function, {n: k for n, k in kinds.items() if n not in ("self", "cls")})
    return actual


def named(function):
    parameters = inspect.signature(function).parameters.values()
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def classify_call(function, arguments, name, kind, value) -> str:
    """Return the outcome of a call with a value: refused, used or reached."""
    wrong = is_certainly_invalid(value, kind)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(**{**arguments, name: value})
    except ConfigError as error:
        message = str(error)
        assert len(message.splitlines()) == 1 and len(message) < 1000, message
        named = not wrong or message.startswith((f"{name} = ", f"{name}[", f"{name}:"))
        assert named, f"{name} is not named: {message}"
        return "refused"
    except OSError:
        assert function.__qualname__ in FILE_FUNCTIONS
        return "refused"
    except Reached:
        assert not wrong, f"{name} = {type(value)} was taken"
        return "reached"
    assert not wrong, f"{name} = {type(value)} was used"
    return "used"


# --- the harness ------------------------------------------------------------------------------


def test_every_public_function_is_validated():
    names = ((module, name) for module in MODULES for name in module.__all__)
    public = {name for module, name in names if inspect.isfunction(getattr(module, name))}
    assert public - NOT_VALIDATED <= set(list_functions()), "decorate it with `validate_arguments`"


def test_every_validated_function_has_good_call(folder):
    calls = make_good_calls(folder)
    assert set(calls) == set(list_functions())


def test_functions_reject_values_by_annotation(folder):
    calls, counts = make_good_calls(folder), Counter()
    for name, (function, kinds) in list_functions().items():
        for argument, kind in kinds.items():
            for value in make_unexpected_values():
                if is_certainly_invalid(value, kind):
                    assert classify_call(function, calls[name], argument, kind, value) == "refused"
                    counts[name] += 1
    assert len(counts) == len(list_functions()) and counts.total() > 3000


DRAWN = st.one_of(
    st.integers(),
    st.floats(),
    st.text(max_size=30),
    st.binary(max_size=10),
    st.lists(st.one_of(st.integers(), st.text(max_size=5), st.floats(), st.none()), max_size=4),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3),
    st.tuples(st.integers(), st.integers()),
    st.integers(-(2**63), 2**63 - 1).map(np.int64),
    st.floats(width=32).map(np.float32),
    st.builds(np.full, st.lists(st.integers(0, 3), max_size=4).map(tuple), st.integers(-5, 300)),
)


@pytest.mark.long
def test_functions_use_or_reject_random_values(folder):
    calls, outcomes = make_good_calls(folder), Counter()

    def try_values(*call):
        @settings(
            max_examples=100, deadline=None, database=None, suppress_health_check=list(HealthCheck)
        )
        @given(DRAWN)
        def try_value(value):
            outcomes[classify_call(*call, value)] += 1

        try_value()

    for name, (function, kinds) in list_functions().items():
        for argument, kind in kinds.items():
            call = function, calls[name], argument, kind
            for value in make_unexpected_values():
                outcomes[classify_call(*call, value)] += 1
            try_values(*call)
    assert outcomes["refused"] > 5000


# --- single functions -----------------------------------------------------------------------------


def test_validate_arguments_converts_scalars(folder):
    @validate_arguments
    def taken(count: int, share: float, flag: bool, word: str):
        return count, share, flag, word

    plain = (3, 0.1, True, "x")
    assert taken(np.int64(3), np.float32(0.1), np.True_, np.str_("x")) == plain
    assert all(type(a) is type(b) for a, b in zip(taken(*plain), plain, strict=True))
    assert type(taken(np.array(3), 1, np.bool_(0), "")[0]) is int
    with pytest.raises(TypeError, match="missing"):
        taken(3)


@pytest.mark.parametrize("name", ["lanes", "width", "blocks", "memory", "devices"])
@pytest.mark.parametrize(
    "odd",
    [
        *(True, 1.5, math.nan, math.inf, -1, 0, 10**30, "1", "", [1], {"a": 1}, np.ones(3)),
        *((i for i in range(3)), Unprintable()),
    ],
)
def test_placement_rejects_bad_values(name, odd):
    with pytest.raises(ConfigError) as raised:
        Placement(**{name: odd})
    assert str(raised.value).startswith(f"{name} = ")


def test_placement_converts_scalars():
    placement = Placement(lanes=np.int64(2), memory=np.float64(1).astype(int))
    assert placement == Placement(lanes=2, memory=1)
    for name in ("spread", "server_work", "client_state"):
        for odd in ("x", None, np.ones(3), [1], Unprintable(), 1):
            with pytest.raises(ConfigError, match=f"^{name} = "):
                Placement(**{name: odd})


def test_missing_folders(tmp_path):
    for read in (result_store.load_results, result_store.load_curves, analysis.write_report):
        with pytest.raises(ConfigError, match=r"^directory = '/nonexistent': expected a folder"):
            read("/nonexistent")
    with pytest.raises(ConfigError, match=r"^directory = "):
        analysis.write_report(tmp_path)  # an empty folder


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        *(("color", bad) for bad in (3, "red", "#12345", None)),
        *(("dashes", bad) for bad in ("x", (1,), (1, 2), (0, ("a",)))),
        *(("evaluated_models", bad) for bad in ("global", (), 3)),
        *(("min_clients", bad) for bad in (0, "1", True, 1.5)),
        *(("trains_locally", bad) for bad in (1, "yes", None)),
        *(("required_data", bad) for bad in ("server_data", ("data",), 3)),
        *(("hyperparameters", bad) for bad in ({1: 2}, {"a b": 1}, {"class": 1}, 3, {"a": "x"})),
        *(("rules", bad) for bad in ({}, (3,))),
        *(("options", bad) for bad in (3, dict, None)),
        *(("paper", bad) for bad in (3, None)),
        *(("settings_warnings", bad) for bad in (3, None)),
        *(("adapt_network", bad) for bad in ("mlp", 3)),
        ("protocol", 3),
    ],
)
def test_register_method_rejects_bad_arguments(fact, value):
    with pytest.raises(ConfigError) as raised:
        fedjax_het.register_method("mine", lambda training, plan: None, **{fact: value})
    (line,) = str(raised.value).splitlines()
    assert fact in line or "a = 'x'" in line

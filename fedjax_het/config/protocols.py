"""Protocols: defaults of the settings of a run, each from one paper or benchmark.

A protocol is a list of rules, each with the data sets and networks to which it applies. A later
rule replaces an earlier one, and the rules of a method come last. `RunSpec.resolved()` uses them
for each setting that is None.

`standard` is NIID-Bench's default experiment (Li et al., ICDE 2022, arXiv:2102.02079, section VI-A,
and `scripts/image-data-without-noise.sh` of github.com/Xtra-Computing/NIID-Bench). All 10 parties
train in each of 50 rounds, for 10 local epochs in batches of 64. A new optimizer in every round is
SGD with learning rate 0.01, momentum 0.9 and weight decay 1e-5 (`--reg`). Averages are weighted by
numbers of examples. Labels follow Dir(0.5), and each party has at least 10 examples. Departures:

* The network is `cnn`, which has the structure of the benchmark's network `lenet5` (two 5x5
  convolutions, each with a 2x2 max pool, then hidden layers) with 32 and 64 filters instead of 6
  and 16. It needs images of 16x16 or more: the digits and a user's data set have `mlp`.
* Images are normalized by the data set's usual mean and standard deviation, because methods that
  condense or generate images expect that. The benchmark scales gray images to [0, 1].
* Images are not augmented. The benchmark crops and flips color images at random.
* Methods have their default hyperparameters. The benchmark tunes FedProx's mu per data set.

`niid_bench` is `standard` without the first departure, and with gray and color images in [0, 1].
"""

import math
from collections.abc import Mapping
from typing import Any

from fedjax_het.algorithms.spec import AlgorithmSpec, DefaultsRule
from fedjax_het.data import DATASETS
from fedjax_het.utils.cohorts import compute_cohort_size
from fedjax_het.utils.errors import require_name

# Proxy data of a server are examples that no client holds. Papers take them from another data set,
# or from the training split. DynaFed's paper does not state their number.
_PROXY_DATA_RULE = DefaultsRule(settings={"server_data": "held_out", "server_options": {}})

# Settings of each experiment; the rules below refine them. Sources:
# DynaFed: paper section 6 and appendix; the released code for settings that the paper omits.
# FedAF: sections 5.1 and 5.2 and appendix A. The settings of its baselines point at MOON's code,
# which provides the partition. The paper does not state the weight decay 1e-5 of that code.
# FedAMP: section 7 for clients' data and tests. Clients, rounds, networks and training are in an
# appendix that could not be read; their values are chosen here.
# FSL: section IV, scenario 1. The paper does not state the batch size. 50 is the value of scenario
# 2 for EMNIST, and gives K = K_0 on CIFAR-10, as a remark of the paper requires. For eta_g of FL
# and DS, the sentence on the implementation gives sqrt(S) for all methods with such a server step.
# PFLlib: docs/benchmark.html, and the defaults of system/main.py for the optimizer, which the page
# does not state.
_PAPERS = ("standard", "dynafed", "fedaf", "fedamp", "fsl", "pfllib")
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "partition": (
        *("dirichlet_capped", "dirichlet_balanced", "dirichlet_capped", "grouped"),
        *("classes_per_client", "dirichlet_capped"),
    ),
    "alpha": (0.5, 0.01, 0.1, None, None, 0.1),
    "classes": (None, None, None, None, 2, None),
    "model": ("mlp", "convnet", "convnet", "cnn", "fsl_cnn", "cnn"),
    "normalization": (None, None, None, None, "fsl", "pfllib"),
    "num_clients": (10, 80, 10, 50, 10, 20),
    "participation": (1.0, 0.4, 1.0, 1.0, 0.4, 1.0),
    "local_epochs": (10, 1, 10, 5, 1, 1),
    "batch_size": (64, 32, 64, 50, 50, 10),
    "rounds": (50, 200, 20, 100, 1000, 2000),
    "local_optimizer": ("momentum", "adam", "momentum", "sgd", "sgd", "sgd"),
    "optimizer_state": ("reset", "keep", "reset", "reset", "reset", "reset"),
    "averaging": ("weighted", "uniform", "weighted", "weighted", "uniform", "weighted"),
    "client_tests": (None, None, None, True, None, True),
    "test_per_client": (None, None, None, None, None, "proportional"),
    "server_data": (None, None, None, None, "iid", None),
}
# FedProx's mu in DynaFed's code. FedAF states another value for FedProx itself.
_PAPERS_PROX_MU = 0.002


def _make_sgd_value(value: float) -> Any:
    """Return a rule's value for SGD with or without momentum; others have their own default."""

    def get_value(settings: Mapping[str, Any], method: AlgorithmSpec) -> float | None:
        return value if settings["local_optimizer"] in ("sgd", "momentum", "nesterov") else None

    return get_value


def _server_lr(settings: Mapping[str, Any], method: AlgorithmSpec) -> float | None:
    """Return the square root of the cohort size if the server steps along the mean change.

    A method with its own hyperparameter `server_lr` has its own step size.
    """
    method_hps = method.collect_method_hyperparameters(settings["options"], settings["num_clients"])
    if (method.base or method).server_step != "mean" or "server_lr" in method_hps:
        return None
    return math.sqrt(compute_cohort_size(settings["num_clients"], settings["participation"]))


def _make_rule(paper: str, hp: dict[str, Any] | None = None) -> DefaultsRule:
    """Return the rule of a paper's settings, and of hyperparameters."""
    values = {name: row[_PAPERS.index(paper)] for name, row in _SETTINGS.items()}
    settings = {name: value for name, value in values.items() if value is not None}
    hp = {**({} if paper == "standard" else {"prox_mu": _PAPERS_PROX_MU}), **(hp or {})}
    return DefaultsRule(settings=settings, hp=hp)


_FEDAF = (
    _make_rule("fedaf"),
    DefaultsRule(models=("convnet",), settings={"norm": "batch"}),
    DefaultsRule(models=("resnet18",), settings={"stem": "imagenet"}),
    DefaultsRule(
        datasets=("mnist", "fashion_mnist", "cifar10", "cifar100", "domainnet"),
        settings={"normalization": "fedaf"},
    ),
    DefaultsRule(
        datasets=("domainnet",), settings={"partition": "by_domain", "num_clients": 6, "rounds": 10}
    ),
)
_DIGITS = ("digits", "digits_by_writer")  # images of 8 x 8 pixels
_STANDARD_HYPERPARAMETERS = {
    "local_lr": _make_sgd_value(0.01),
    "local_weight_decay": _make_sgd_value(1e-5),
}


def _make_inputs_rule(name: str, defaults: Mapping[str, Any]) -> DefaultsRule:
    """Return the rule of a data set without images: a network that accepts them, and its users."""
    # A protocol's constants of images and options of its own network do not apply.
    settings: dict[str, Any] = {"normalization": None, "norm": None, **defaults}
    if settings.get("partition") == "natural":
        settings["test_per_client"] = None  # users have their own test examples
    return DefaultsRule(datasets=(name,), settings=settings)


_OTHER_INPUTS = tuple(
    _make_inputs_rule(name, dataset.defaults)
    for name, dataset in DATASETS.items()
    if name in DATASETS.built_in and dataset.defaults
)
_LARGER_IMAGES = tuple(
    name for name in DATASETS.built_in if name not in _DIGITS and not DATASETS[name].defaults
)
_STANDARD = (
    _make_rule("standard", _STANDARD_HYPERPARAMETERS),
    DefaultsRule(datasets=_LARGER_IMAGES, settings={"model": "cnn"}),
    # Clients of the digits make about 30 steps in a round, in which a mu of 0.01 does nothing.
    DefaultsRule(datasets=_DIGITS, hp={"prox_mu": 0.1}),
)
_RULES: dict[str, tuple[DefaultsRule, ...]] = {
    "standard": _STANDARD,
    "dynafed": (_make_rule("dynafed"),),
    "fedaf": _FEDAF,
    # FedDM's setting in its public re-implementations, since the authors' code is not public. They
    # normalize CIFAR-100 with the constants of CIFAR-10; here CIFAR-100 has its own constants.
    "feddm": (
        *_FEDAF,
        DefaultsRule(settings={"alpha": 0.5}),
        DefaultsRule(models=("convnet",), settings={"norm": "instance"}),
    ),
    "fedamp": (
        _make_rule("fedamp", {"local_lr": 0.05}),
        DefaultsRule(datasets=_DIGITS, settings={"model": "mlp", "num_clients": 10}),
        DefaultsRule(datasets=("emnist_byclass",), settings={"num_clients": 62}),
        DefaultsRule(datasets=("cifar100",), settings={"num_clients": 40}),
    ),
    "fsl": (
        _make_rule("fsl", {"server_lr": _server_lr}),
        DefaultsRule(datasets=("cifar10",), settings={"server_options": {"size": 500}}),
        DefaultsRule(
            datasets=("emnist_45",),
            settings={"num_clients": 45, "participation": 5 / 45, "server_options": {"size": 225}},
        ),
    ),
    # Default values of PFLlib's code with which methods could not have the reported accuracies are
    # not used: FedProx and Ditto without proximal terms (`mu` 0), pFedMe without server updates
    # (`beta` 0). These methods have the defaults of this package. FedGen has the objective of
    # PFLlib's code: one loss on generated features, of constant weight, in every step.
    "pfllib": (
        _make_rule(
            "pfllib",
            {
                "local_lr": _make_sgd_value(0.005),
                "prox_mu": 0.01,
                "inner_lr": 0.005,  # Per-FedAvg's step before evaluation has the learning rate
                "personal_lr": 0.01,
            },
        ),
        DefaultsRule(
            options={
                **{"generator_hidden": 512, "generator_noise": 512, "generator_steps": 1000},
                **{"generator_batch_size": 10, "guided_steps": 100_000},
                "head_epochs": 1,
            },
            hp={
                **{"generated_weight": 1.0, "distilled_weight": 0.0, "guidance_decay": 1.0},
                **{"teacher_weight": 1.0, "diversity_weight": 0.0},
                **{"generator_lr": 0.005, "generator_lr_decay": 1.0},
                "generator_weight_decay": 0.0,
            },
        ),
        DefaultsRule(datasets=_DIGITS, settings={"model": "mlp"}),
    ),
    "niid_bench": (
        *_STANDARD,
        DefaultsRule(settings={"normalization": "unit"}),
        DefaultsRule(datasets=_LARGER_IMAGES, settings={"model": "lenet5"}),
    ),
}
PROTOCOLS = {name: (*rules, *_OTHER_INPUTS) for name, rules in _RULES.items()}
"""Rules of each protocol, by name."""
OWN_PROTOCOL = "own"
"""Value of the setting `protocol` that stands for the default protocol of each method."""
_SOURCES = {
    "standard": "NIID-Bench, Li et al., ICDE 2022",
    "niid_bench": "Li et al., ICDE 2022",
    "dynafed": "Pi et al., CVPR 2023",
    "fedaf": "Wang et al., CVPR 2024",
    "feddm": "public re-implementations of Xiong et al., CVPR 2023",
    "fedamp": "Huang et al., AAAI 2021",
    "fsl": "Mai et al., 2022",
    "pfllib": "PFLlib's leaderboard, Zhang et al., JMLR 2025",
}


def describe_protocol(protocol: str) -> str:
    """Describe a protocol by its name and source.

    Args:
      protocol: name of the protocol.

    Returns:
      The name; with the source in parentheses for a protocol of the package.

    Example:
      >>> from fedjax_het.config.protocols import describe_protocol
      >>> describe_protocol("standard")
      'standard (NIID-Bench, Li et al., ICDE 2022)'
    """
    return f"{protocol} ({_SOURCES[protocol]})" if protocol in _SOURCES else protocol


def choose_protocol(protocol: str | None, method: AlgorithmSpec) -> str:
    """Choose the protocol of a run.

    Args:
      protocol: the setting; None and "own" stand for the default protocol of the method.
      method: the method.

    Returns:
      The name, a key of `PROTOCOLS`.

    Raises:
      ConfigError: if there is no protocol of this name.
    """
    name = method.protocol if protocol is None or protocol == OWN_PROTOCOL else protocol
    require_name("protocol", name, PROTOCOLS)
    return name


def get_protocol_defaults(
    protocol: str, method: AlgorithmSpec, dataset: str, model: str | None
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the defaults of a run under a protocol, which the rules of the method refine.

    Args:
      protocol: name of the protocol.
      method: the method.
      dataset: name of the data set.
      model: name of the network; None for the protocol's own.

    Returns:
      `(settings, options, hp)`, each by name.
    """
    settings: dict[str, Any] = {}
    options: dict[str, Any] = {}
    hp: dict[str, Any] = {}
    proxy_rules = (_PROXY_DATA_RULE,) if "proxy_data" in method.required_data else ()
    for rule in (*PROTOCOLS[protocol], *proxy_rules, *method.rules):
        if rule.matches(protocol, dataset, model or settings.get("model")):
            settings.update(rule.settings)
            options.update(rule.options)
            hp.update(rule.hp)
    return settings, options, hp

"""What is known of a method besides its function: one record, at the end of the method's file."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_type_hints

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.checks import validate_algorithm
from fedjax_het.core.contract_checks import ContractError
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.optimizers import optimizer_hyperparameters
from fedjax_het.nn import Model
from fedjax_het.utils.config import (
    Bounds,
    Config,
    HyperParameter,
    PositiveInt,
    config_to_dict,
    hyperparameters_of,
    parse_config,
    validate,
)
from fedjax_het.utils.errors import display_names_within, require, require_name

SERVER_LR = {"server_lr": HyperParameter(1.0, Bounds(0))}


class DefaultsRule(NamedTuple):
    """Settings of the runs that match; () matches all.

    settings: fields of `RunSpec`; options, hp: those of the method (others' are ignored). An option
    or a number may be a function of the run's settings and its method's entry, of which None leaves
    the method its own.
    """

    protocols: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    settings: dict[str, Any] = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012
    hp: dict[str, Any] = {}  # noqa: RUF012

    def matches(self, protocol: str, dataset: str, model: str | None) -> bool:
        value_and_allowed = (
            (protocol, self.protocols),
            (dataset, self.datasets),
            (model, self.models),
        )
        return all(not names or name in names for name, names in value_and_allowed)


@dataclass(frozen=True)
class NoOptions(Config):
    """Of a method without choices."""


@dataclass(frozen=True)
class NoHyperParameters(Config):
    """Of a method without numeric hyper-parameters of its own."""


def no_settings_warnings(run: Any, algorithm_spec: "AlgorithmSpec") -> Sequence[str]:
    return ()


DashPattern = tuple[float, tuple[float, ...]]  # as matplotlib has them: offset, lengths on and off


@dataclass(frozen=True)
class AlgorithmSpec:
    """A method that can be named.

    build(training, plan) -> Algorithm; with `options=`, the record, where the method has any, and
    with `base=`, called as `base(training, plan)`, where it is put over another.
    """

    name: str
    build: Callable[..., Algorithm]
    description: str
    paper: str = ""
    options: type[Config] = NoOptions
    """Its static choices."""
    hyperparameters: type[Config] | Callable[[Any, int], Config] = NoHyperParameters
    """Its numeric hyper-parameters besides the local optimiser's and `server_lr`; or a function of
    its options and the number of clients that gives the record."""
    protocol: str = "dynafed"
    """Whose settings hold where nothing else is said."""
    rules: tuple[DefaultsRule, ...] = ()
    """What holds for this method under a protocol, on a data set, of a network; after the
    protocol's own rules."""
    color: str = ""
    """In every figure, as hexadecimal digits; "": one of a few that such methods share."""
    dashes: DashPattern | None = None
    """For a method whose curve often lies on another's: that shows through the gaps."""
    server_step: Literal["mean", "own"] = "mean"
    """Whether its server takes a step of `server_lr` along the clients' mean change, or what
    `server_lr` scales is a step of its own kind."""
    wraps: Literal["nothing", "model", "average"] = "nothing"
    """What it needs of the method that it is put over (option "base"): "model": that there is one
    global model, on which it works after each round; "average": besides, that this model is
    w + server_lr sum p_k (w_k - w), in which it takes other weights."""
    wrappable_as: Literal["nothing", "model", "average"] = "nothing"
    """What it is for methods that are put over others: "average" is also a "model"."""
    required_data: tuple[Literal["server_data", "proxy_data", "averages", "norms"], ...] = ()
    """Data besides the clients' own: examples of the server's; such that stand for data of its own,
    which no client holds; averages of clients' examples. And normalisation layers of the network,
    without which it is another method: a run says so."""
    trains_locally: bool = True
    """False where clients condense their data instead."""
    evaluated_models: tuple[str, ...] = ("global",)
    """The models that a client's own test may be for, the method's usual one first."""
    has_global_model: bool = True
    """Whether the server has one model for all."""
    has_diagnostics: bool = False
    """Whether it has a survey of its own where it has no global model, see `Algorithm.diagnostics`."""
    min_clients: PositiveInt = 1
    settings_warnings: "Callable[[Any, AlgorithmSpec], Sequence[str]]" = no_settings_warnings
    """(run, entry) -> what of its settings does nothing, or not what one would think, a line each,
    which is told where the run begins. Raises ConfigError for numbers that do not fit its options.
    The run is a resolved `RunSpec`; the entry has its base."""
    adapt_network: Callable[..., Model] | None = None
    """(model[, options=]) -> the network that it trains in place of the run's."""
    base: "AlgorithmSpec | None" = field(default=None, repr=False)
    """The wrapped method of a run; see `with_base`."""

    @property
    def requires_server_examples(self) -> bool:
        return "server_data" in self.required_data or "proxy_data" in self.required_data

    @property
    def has_base(self) -> bool:
        return self.wraps != "nothing"

    def can_wrap(self, other: "AlgorithmSpec") -> bool:
        """Whether it can be put over another method."""
        accepted_kinds = {"nothing": (), "model": ("model", "average"), "average": ("average",)}
        return other.wrappable_as in accepted_kinds[self.wraps]

    def with_base(self, base: "AlgorithmSpec") -> "AlgorithmSpec":
        """This method on another: with the options and hyper-parameters of both."""
        return replace(self, base=base, evaluated_models=base.evaluated_models)

    # --- its choices and numbers, as a run's settings hold them -------------------------------

    @property
    def option_names(self) -> tuple[str, ...]:
        method_options = tuple(config_to_dict(self.options()))
        return (*self._base_option_names, *method_options, *(("base",) if self.has_base else ()))

    def complete_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options with what presets and defaults say, "base" left out. Raises ConfigError."""
        for name in options:
            require_name("option", name, self.option_names)
        base_options, method_options = self._split_options(options)
        completed_base_options = self.base.complete_options(base_options) if self.base else {}
        return {
            **completed_base_options,
            **config_to_dict(parse_config(self.options, method_options)),
        }

    def parse_method_options(self, options: Mapping[str, Any]) -> Config:
        """The record of its own of these options, without its base's. Raises ConfigError."""
        return parse_config(self.options, self._split_options(options)[1])

    def collect_hyperparameters(
        self, local_optimizer: str | None, options: Mapping[str, Any], num_clients: int
    ) -> dict[str, HyperParameter]:
        """Every numeric hyper-parameter, with its default and its range."""
        local_hyperparameters = {}
        if self.trains_locally and local_optimizer is not None:
            local_hyperparameters = optimizer_hyperparameters(local_optimizer)
        server_hyperparameters = SERVER_LR if self.has_global_model else {}
        return {
            **server_hyperparameters,
            **local_hyperparameters,
            **self.collect_method_hyperparameters(options, num_clients),
        }

    def collect_method_hyperparameters(
        self, options: Mapping[str, Any], num_clients: int
    ) -> dict[str, HyperParameter]:
        """Those of its record, and of its base's."""
        base_options, method_options = self._split_options(options)
        base_hyperparameters = (
            self.base.collect_method_hyperparameters(base_options, num_clients) if self.base else {}
        )
        return {
            **base_hyperparameters,
            **hyperparameters_of(self.make_hyperparameter_record(method_options, num_clients)),
        }

    def make_hyperparameter_record(self, options: Mapping[str, Any], num_clients: int) -> Config:
        """Its own hyper-parameters' defaults under these of its own options."""
        if isinstance(self.hyperparameters, type):
            return self.hyperparameters()
        return self.hyperparameters(parse_config(self.options, options), num_clients)

    # --- the method itself --------------------------------------------------------------------

    def build_algorithm(
        self, training: LocalTraining, plan: ExecutionPlan, options: Mapping[str, Any]
    ) -> Algorithm:
        """The algorithm of these options. Raises ConfigError."""
        base_options, _ = self._split_options(options)
        static_args: dict[str, Any] = {}
        if self.options is not NoOptions:
            static_args["options"] = self.parse_method_options(options)
        if self.has_base:
            assert self.base is not None, "see `get_algorithm_spec`"
            static_args["base"] = partial(self.base.build_algorithm, options=base_options)
        self._validate_build_signature(static_args)
        try:
            with display_names_within("options", config_to_dict(self.options())):
                algorithm = self.build(training, plan, **static_args)
        except ContractError as error:
            is_method_named = str(error).startswith("method ")
            raise ContractError(
                f"{'' if is_method_named else f'method {self.name!r}: '}{error}"
            ) from error
        return validate_algorithm(self.name, algorithm)

    def get_trained_network(self, model: Model, options: Mapping[str, Any]) -> Model:
        """The network that the method trains where a run asks for `model`."""
        base_options, _ = self._split_options(options)
        if self.base is not None:
            model = self.base.get_trained_network(model, base_options)
        if self.adapt_network is None:
            return model
        if self.options is NoOptions:
            return self.adapt_network(model)
        return self.adapt_network(model, options=self.parse_method_options(options))

    @property
    def identity_key(self) -> tuple[Any, ...]:
        """What tells it from another method of the same name, see `register_method`."""
        base_key = self.base.identity_key if self.base else ()
        return (self.build, self.adapt_network, *base_key)

    @property
    def _base_option_names(self) -> tuple[str, ...]:
        return self.base.option_names if self.base else ()

    def _split_options(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the base's options, its own); of a name that both have, each gets the value."""
        method_option_names = config_to_dict(self.options())
        base_options = {
            name: value for name, value in options.items() if name in self._base_option_names
        }
        method_options = {
            name: value for name, value in options.items() if name in method_option_names
        }
        return base_options, method_options

    def _validate_build_signature(self, static_args: Mapping[str, Any]) -> None:
        try:
            inspect.signature(self.build).bind(None, None, **static_args)
        except TypeError:
            expected_signature = ", ".join(("training", "plan", *static_args))
            raise ContractError(
                f"method {self.name!r}: build takes {inspect.signature(self.build)}: expected "
                f"({expected_signature})"
            ) from None


def validate_algorithm_spec(algorithm_spec: AlgorithmSpec) -> AlgorithmSpec:
    """The entry. Raises ConfigError for facts that cannot be."""
    for argument, annotation in get_type_hints(AlgorithmSpec, include_extras=True).items():
        if argument not in ("options", "hyperparameters", "base"):  # which say more below
            validate(argument, getattr(algorithm_spec, argument), annotation)
    for argument, valid in (
        ("server_step", ("mean", "own")),
        ("wraps", ("nothing", "model", "average")),
        ("wrappable_as", ("nothing", "model", "average")),
    ):
        require_name(argument, getattr(algorithm_spec, argument), valid)
    for name in algorithm_spec.required_data:
        require_name("required_data", name, ("server_data", "proxy_data", "averages", "norms"))
    require(
        callable(algorithm_spec.build),
        "build",
        algorithm_spec.build,
        "a function of (training, plan)",
    )
    is_valid = isinstance(algorithm_spec.options, type) and issubclass(
        algorithm_spec.options, Config
    )
    require(is_valid, "options", algorithm_spec.options, "a frozen dataclass that is a `Record`")
    is_valid = not isinstance(algorithm_spec.hyperparameters, type) or issubclass(
        algorithm_spec.hyperparameters, Config
    )
    require(
        is_valid and callable(algorithm_spec.hyperparameters),
        "hyperparameters",
        algorithm_spec.hyperparameters,
        "a `Record`, or its maker",
    )
    is_valid = algorithm_spec.wrappable_as == "nothing" or (
        algorithm_spec.has_global_model and not algorithm_spec.has_base
    )
    require(
        is_valid,
        "wrappable_as",
        algorithm_spec.wrappable_as,
        "'nothing', or one global model and no base",
    )
    color_match = re.fullmatch("(#[0-9a-fA-F]{6})?", algorithm_spec.color)
    require(color_match is not None, "color", algorithm_spec.color, "hexadecimal digits: '#D55E00'")
    require(
        len(algorithm_spec.evaluated_models) > 0,
        "evaluated_models",
        algorithm_spec.evaluated_models,
        "at least one model",
    )
    return algorithm_spec

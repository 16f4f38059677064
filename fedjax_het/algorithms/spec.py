"""The entry of a method in the registry: its options, hyperparameters and required data."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_type_hints

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.checks import validate_algorithm
from fedjax_het.algorithms.compressed_uploads import with_compressed_uploads
from fedjax_het.algorithms.private_updates import get_client_level, with_private_rounds
from fedjax_het.algorithms.received_updates import make_malicious_input
from fedjax_het.core.contract_checks import ContractError
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.optimizers import LOCAL_PREFIX, optimizer_hyperparameters
from fedjax_het.nn import Model
from fedjax_het.utils.config import (
    Bounds,
    Config,
    HyperParameter,
    PositiveInt,
    config_to_dict,
    field_types,
    hyperparameters_of,
    parse_config,
    validate,
)
from fedjax_het.utils.errors import display_names_within, require, require_name
from fedjax_het.utils.input_kinds import INPUT_KINDS, InputKind, require_input_kind
from fedjax_het.utils.registry import format_entry

HYPERPARAMETER_SETTINGS = {
    "learning_rate": "local_lr",
    "momentum": "local_momentum",
    "weight_decay": "local_weight_decay",
    "server_learning_rate": "server_lr",
}
"""Settings that are hyperparameters, with their names in `hp`, which stored results contain."""
SERVER_LR = {"server_lr": HyperParameter(1.0, Bounds(0))}


class DefaultsRule(NamedTuple):
    """Default settings of the runs that match; an empty tuple matches all runs.

    Example:
      >>> from fedjax_het.methods import DefaultsRule
      >>> rule = DefaultsRule(("fedaf",), ("domainnet",), options={"ipc": 20})
      >>> rule.matches("fedaf", "domainnet", "convnet")
      True
    """

    protocols: tuple[str, ...] = ()
    "Names of protocols."
    datasets: tuple[str, ...] = ()
    "Names of data sets."
    models: tuple[str, ...] = ()
    "Names of networks."
    settings: dict[str, Any] = {}  # noqa: RUF012
    "Values of fields of `RunSpec`."
    options: dict[str, Any] = {}  # noqa: RUF012
    """Values of the method's options; names that the method does not have are ignored. A value may
    be a function of the run's settings and the method's entry; None leaves the method's default."""
    hp: dict[str, Any] = {}  # noqa: RUF012
    "Values of the method's hyperparameters, by the rules of `options`."

    def matches(self, protocol: str, dataset: str, model: str | None) -> bool:
        """Return whether the rule applies to a run.

        Args:
          protocol: name of the run's protocol.
          dataset: name of the run's data set.
          model: name of the run's network, or None for a network that the user passes.

        Returns:
          True if the run matches all three conditions.
        """
        conditions = zip((protocol, dataset, model), self[:3], strict=True)
        return all(not allowed or value in allowed for value, allowed in conditions)


DashPattern = tuple[float, tuple[float, ...]]  # matplotlib's: offset, lengths of dashes and gaps
WrapKind = Literal["nothing", "model", "average"]
_ACCEPTED_KINDS = {"nothing": (), "model": ("model", "average"), "average": ("average",)}


@dataclass(frozen=True)
class AlgorithmSpec:
    """Entry of a method in the registry.

    Example:
      >>> from fedjax_het.methods import METHODS
      >>> spec = METHODS["scaffold"]
      >>> spec.paper, spec.option_names
      ('Karimireddy et al., ICML 2020, arXiv:1910.06378', ('option',))
    """

    name: str
    "Word that names the method."
    build: Callable[..., Algorithm]
    """`build(training, plan) -> Algorithm`. A method with options also has the parameter `options`,
    a method with a base the parameter `base`, a function `base(training, plan) -> Algorithm`."""
    description: str
    "One line for `fedjax-het list`."
    paper: str = ""
    "Authors, venue and number of the paper."
    options: type[Config] = Config
    "Class of the method's static choices."
    hyperparameters: type[Config] | Callable[[Any, int], Config] = Config
    """Class of the method's numeric hyperparameters without the local optimizer's and `server_lr`;
    or a function `(options, num_clients) -> record`."""
    protocol: str = "standard"
    "Protocol of runs that name none."
    rules: tuple[DefaultsRule, ...] = ()
    "Defaults of this method, applied after the protocol's own rules."
    title: str = ""
    """Name in figures and tables, such as "SCAFFOLD" (default: `name` with spaces for
    underscores)."""
    color: str = ""
    'Color in every figure, such as "#D55E00"; "": a color from the palette of other methods.'
    dashes: DashPattern | None = None
    "Dashes of a curve that often lies on another one, which then shows through the gaps."
    server_step: Literal["mean", "own"] = "mean"
    """"mean": the server makes a step of `server_lr` along the clients' mean change; "own":
    `server_lr` scales another step."""
    wraps: WrapKind = "nothing"
    """Methods that the option "base" accepts. "model": methods with one global model, on which this
    method works after each round or in local training. "average": methods whose model is w +
    server_lr sum_k p_k (w_k - w), in which this method uses other weights."""
    wrappable_as: WrapKind = "nothing"
    """Kind of base that this method can be; "average" implies "model". A base computes the
    gradients of its local loss by `LocalTraining.loss_and_gradient`, with the regularizer."""
    required_data: tuple[
        Literal["server_data", "shared_server_data", "proxy_data", "averages", "norms"], ...
    ] = ()
    """Data in addition to the clients' examples. "server_data": the server's examples.
    "shared_server_data", with "server_data": clients train on them, too. "proxy_data": server's
    examples that no client holds. "averages": averages of clients' examples. "norms": normalization
    layers of the network, without which a run logs a warning."""
    input_kinds: tuple[InputKind, ...] = INPUT_KINDS
    """Kinds of inputs that the method accepts; a method that synthesizes inputs accepts no tokens,
    and a method that draws images accepts images alone."""
    needs_classes: bool = False
    "Whether the method reads labels as classes; otherwise it works for every task."
    trains_locally: bool = True
    "False if clients condense their data instead."
    evaluated_models: tuple[str, ...] = ("global",)
    """Names of the models that a client's own test may evaluate, the default first. "global": the
    server's; "client": the client's after local training; any other name, such as "personal": a
    model of the method. A run chooses one name by its setting `client_test_model`. `build` reads
    the choice as `training.evaluated_model`, and `Algorithm.personal_variables` computes that
    model, or `Algorithm.fine_tuning` trains it. `build_federated_algorithm` supplies "client"."""
    local_parameters: Callable[..., Any] | None = None
    """`local_parameters(model, variables[, options=]) -> parts of the variables` that stay at the
    client, such as `model.head.get_parameters(variables)`. This is the one declaration of such a
    method: `build_federated_algorithm` stores the parts in the client's state, leaves them out of
    messages and uploads, and evaluates each client's own model on its own test. `evaluated_models`
    is then ("personal",) and `has_global_model` False."""
    has_global_model: bool = True
    """Whether the server has one model for all clients. False: `Algorithm.global_model` is None,
    and runs have no hyperparameter `server_lr`, unless the method has `local_parameters`. FedAvg's
    server update reads `server_lr`, so such a method passes its own `update` to
    `build_federated_algorithm`."""
    has_diagnostics: bool = False
    "Whether the method has method-specific diagnostics, see `Algorithm.diagnostics`."
    min_clients: PositiveInt = 1
    "Smallest number of clients."
    min_rounds: Callable[[Any], int] = lambda options: 1
    """`min_rounds(options) -> rounds`: smallest number of rounds in which the method takes effect,
    such as the first round after a synthesis. A trial of `tune` has at least this number."""
    settings_warnings: Callable[..., Sequence[str]] = lambda run, algorithm_spec: ()
    """`settings_warnings(run, algorithm_spec) -> lines`: warnings of settings without effect or
    with an unexpected one, logged when the run starts. `run` is a resolved `RunSpec`,
    `algorithm_spec` the entry with its base. Raises ConfigError for numbers that the options
    exclude."""
    adapt_network: Callable[..., Model] | None = None
    "`adapt_network(model[, options=]) -> model`: the network that the method trains."
    base: "AlgorithmSpec | None" = field(default=None, repr=False)
    "The wrapped method of a run; see `with_base`."

    def __post_init__(self) -> None:
        """Derive the title."""
        if self.title == "":
            object.__setattr__(self, "title", str(self.name).replace("_", " "))

    @property
    def requires_server_examples(self) -> bool:
        """Whether the method reads examples of the server."""
        return "server_data" in self.required_data or "proxy_data" in self.required_data

    def require_input_kind(self, input_shape: tuple[int, ...], num_tokens: int | None) -> None:
        """Raise ConfigError unless the method and its base accept inputs.

        Args:
          input_shape: shape of the input of one example.
          num_tokens: number of different tokens; None for inputs of floats.
        """
        for spec in filter(None, (self, self.base)):
            require_input_kind(spec.name, input_shape, num_tokens, spec.input_kinds)

    @property
    def has_base(self) -> bool:
        """Whether the method wraps another method."""
        return self.wraps != "nothing"

    def can_wrap(self, other: "AlgorithmSpec") -> bool:
        """Return whether another method can be the base of this method."""
        return other.wrappable_as in _ACCEPTED_KINDS[self.wraps]

    def with_base(self, base: "AlgorithmSpec") -> "AlgorithmSpec":
        """Return this method over a base, with the options and hyperparameters of both."""
        return replace(self, base=base, evaluated_models=base.evaluated_models)

    @property
    def is_personalized(self) -> bool:
        """Whether clients' own tests evaluate another model than the global one by default."""
        return self.evaluated_models[0] != "global"

    # --- options and hyperparameters of a run

    @property
    def option_names(self) -> tuple[str, ...]:
        """Names of all options; options of the base come first."""
        base_names = self.base.option_names if self.base else ()
        names = config_to_dict(self.options())
        return (*base_names, *names, *(("base",) if self.has_base else ()))

    def complete_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Return all options except "base", with the values of presets and defaults.

        An option that method and base both have is passed to both. Raises ConfigError for an
        unknown option or a value that does not fit.
        """
        for name in options:
            require_name("option", name, self.option_names)
        completed: dict[str, Any] = {}
        if self.base:
            base_names = self.base.option_names
            base_options = {name: options[name] for name in options if name in base_names}
            completed = self.base.complete_options(base_options)
        return completed | config_to_dict(self.parse_method_options(options))

    def parse_method_options(self, options: Mapping[str, Any]) -> Config:
        """Return the record of the method's own options. Raises ConfigError."""
        names = config_to_dict(self.options())
        return parse_config(self.options, {n: options[n] for n in options if n in names})

    def get_min_rounds(self, options: Mapping[str, Any]) -> int:
        """Return the smallest number of rounds in which the method and its base take effect.

        Args:
          options: options of the method and its base.
        """
        specs = filter(None, (self, self.base))
        return max(spec.min_rounds(spec.parse_method_options(options)) for spec in specs)

    def collect_hyperparameters(
        self, local_optimizer: str | None, options: Mapping[str, Any], num_clients: int
    ) -> dict[str, HyperParameter]:
        """Return every numeric hyperparameter of a run.

        Args:
          local_optimizer: name of the clients' optimizer; None for clients that condense.
          options: options of the method and its base.
          num_clients: number of clients, K.

        Returns:
          Defaults and bounds by name.

        Raises:
          ConfigError: if an option does not fit.
        """
        has_server_lr = self.has_global_model or self.local_parameters is not None
        hyperparameters = dict(SERVER_LR) if has_server_lr else {}
        if self.trains_locally and local_optimizer is not None:
            hyperparameters |= optimizer_hyperparameters(local_optimizer)
        return hyperparameters | self.collect_method_hyperparameters(options, num_clients)

    def collect_method_hyperparameters(
        self, options: Mapping[str, Any], num_clients: int
    ) -> dict[str, HyperParameter]:
        """Return the hyperparameters of the method and its base, without the optimizer's.

        Args:
          options: options of the method and its base.
          num_clients: number of clients, K.

        Returns:
          Defaults and bounds by name.
        """
        own = hyperparameters_of(self.make_hyperparameter_record(options, num_clients))
        if self.base is None:
            return own
        return self.base.collect_method_hyperparameters(options, num_clients) | own

    def make_hyperparameter_record(self, options: Mapping[str, Any], num_clients: int) -> Config:
        """Return the method's own hyperparameters with their default values.

        Args:
          options: options, on which defaults may depend.
          num_clients: number of clients, K.

        Returns:
          An instance of the class of hyperparameters.
        """
        if isinstance(self.hyperparameters, type):
            return self.hyperparameters()
        return self.hyperparameters(self.parse_method_options(options), num_clients)

    # --- the method

    def build_algorithm(
        self, training: LocalTraining, plan: ExecutionPlan, options: Mapping[str, Any]
    ) -> Algorithm:
        """Build the method.

        Args:
          training: the choices of local training.
          plan: where the clients run.
          options: options of the method and its base.

        Returns:
          The algorithm, whose functions check the contract while they are traced.

        Raises:
          ConfigError: if an option does not fit.
          ContractError: if `build` has other parameters or returns another type. Also if the
            algorithm disagrees with `has_global_model` or lacks the model of the clients' own
            tests.
        """
        arguments: dict[str, Any] = {}
        if self.options is not Config:
            arguments["options"] = self.parse_method_options(options)
        if self.has_base:
            assert self.base is not None, "see `get_algorithm_spec`"
            arguments["base"] = partial(self.base.build_algorithm, options=options)
        if (select := self.local_parameters) is not None:
            if "options" in inspect.signature(select).parameters:
                select = partial(select, options=arguments["options"])
            training = training._replace(local_parameters=select)
        signature = inspect.signature(self.build)
        try:
            signature.bind(None, None, **arguments)
        except TypeError:
            expected = ", ".join(("training", "plan", *arguments))
            raise ContractError(
                f"method {self.name!r}: build takes {signature}: expected ({expected})"
            ) from None
        try:
            with display_names_within("options", config_to_dict(self.options())):
                algorithm = self.build(training, plan, **arguments)
        except ContractError as error:
            prefix = "" if str(error).startswith("method ") else f"method {self.name!r}: "
            raise ContractError(f"{prefix}{error}") from error.__cause__
        algorithm = validate_algorithm(self.name, algorithm, training.task.model)
        if training.compressor is not None and not self.has_base:  # a base has done it
            algorithm = with_compressed_uploads(algorithm, training.compressor)
        client_level = get_client_level(training)
        if client_level is not None and algorithm.protects_privacy and not self.has_base:
            size = training.expected_cohort_size
            algorithm = with_private_rounds(algorithm, client_level, size)
        if algorithm.combines_changes and training.attacks and not self.has_base:
            inputs = (*algorithm.round_inputs, make_malicious_input(training.attacks))
            algorithm = algorithm._replace(round_inputs=inputs)
        self._check_declarations(algorithm, training.evaluated_model)
        # An evaluation of personal models reads the states of all clients.
        if algorithm.personal_variables is not None:
            algorithm = algorithm._replace(can_page_state=False)
        return algorithm

    def _check_declarations(self, algorithm: Algorithm, evaluated_model: str) -> None:
        """Raise ContractError unless the algorithm has the data and models that the entry names."""
        is_shared = "shared_server_data" in self.required_data
        if algorithm.trains_on_server_data and not is_shared:
            raise ContractError(
                f"method {self.name!r}: Algorithm.trains_on_server_data is True: expected "
                "required_data=('server_data', 'shared_server_data')"
            )
        if (algorithm.global_model is not None) != self.has_global_model:
            actual, expected = ("None", "a function") if self.has_global_model else ("set", "None")
            raise ContractError(
                f"method {self.name!r}: Algorithm.global_model is {actual}: expected {expected}, "
                f"as has_global_model={self.has_global_model}"
            )
        fields = ("personal_variables", "fine_tuning")
        own_models = [name for name in fields if getattr(algorithm, name) is not None]
        if evaluated_model == "global" and own_models:
            raise ContractError(
                f"method {self.name!r}: Algorithm.{own_models[0]} is set, but clients' tests evaluate "
                "the global model: expected another model in `evaluated_models`, such as "
                f"evaluated_models=('personal',), or {own_models[0]}=None for 'global'"
            )
        # A tuned model is the global model when its tuning has zero epochs, see `fine_tuning.py`.
        if evaluated_model not in ("global", "tuned") and not own_models:
            raise ContractError(
                f"method {self.name!r}: clients' tests evaluate {evaluated_model!r} of "
                "`evaluated_models`: expected Algorithm.personal_variables or fine_tuning"
            )

    def get_trained_network(self, model: Model, options: Mapping[str, Any]) -> Model:
        """Return the network that the method trains.

        Args:
          model: the network of the run.
          options: options of the method and its base.

        Returns:
          The network, as base and method adapt it.
        """
        if self.base is not None:
            model = self.base.get_trained_network(model, options)
        if self.adapt_network is None:
            return model
        if self.options is Config:
            return self.adapt_network(model)
        return self.adapt_network(model, options=self.parse_method_options(options))

    @property
    def identity_key(self) -> tuple[Any, ...]:
        """Functions that distinguish the method from another method of its name."""
        base_key = self.base.identity_key if self.base else ()
        return (self.build, self.adapt_network, *base_key)

    def __repr__(self) -> str:
        return format_entry(self)


def validate_algorithm_spec(algorithm_spec: AlgorithmSpec) -> AlgorithmSpec:
    """Return the entry with each field as its annotation has it. Raises ConfigError."""
    spec = algorithm_spec
    for argument, annotation in get_type_hints(AlgorithmSpec, include_extras=True).items():
        if argument not in ("base", "hyperparameters"):
            validate(argument, getattr(spec, argument), annotation)
    for argument in ("options", "hyperparameters"):
        value = getattr(spec, argument)
        is_class = isinstance(value, type) and issubclass(value, Config)
        may_be_function = argument == "hyperparameters" and not isinstance(value, type)
        is_function = may_be_function and callable(value)
        others = ", a dictionary of defaults >= 0, or a function"
        expected = "a class that is a Config" + others * (argument == "hyperparameters")
        require(is_class or is_function, argument, value, expected)
    names = field_types(spec.hyperparameters) if isinstance(spec.hyperparameters, type) else ()
    for name in names:
        is_free = name not in HYPERPARAMETER_SETTINGS and not name.startswith(LOCAL_PREFIX)
        expected = f"a name that is no setting and does not start with {LOCAL_PREFIX}"
        require(is_free, "hyperparameters", name, expected)
    is_valid = spec.wrappable_as == "nothing" or (spec.has_global_model and not spec.has_base)
    expected = "'nothing', or one global model and no base"
    require(is_valid, "wrappable_as", spec.wrappable_as, expected)
    is_valid = re.fullmatch("(#[0-9a-fA-F]{6})?", spec.color) is not None
    require(is_valid, "color", spec.color, "hexadecimal digits: '#D55E00'")
    has_models = len(spec.evaluated_models) > 0
    require(has_models, "evaluated_models", spec.evaluated_models, "at least one model")
    is_valid = spec.local_parameters is None or not spec.has_global_model
    expected = "False, as local_parameters leave the server without a whole model"
    require(is_valid, "has_global_model", spec.has_global_model, expected)
    is_valid = spec.has_global_model or "global" not in spec.evaluated_models
    expected = "models of clients, such as 'personal', as has_global_model=False"
    require(is_valid, "evaluated_models", spec.evaluated_models, expected)
    return spec

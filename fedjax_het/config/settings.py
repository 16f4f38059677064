"""Settings of a run as a frozen record, without their resolution."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal

from fedjax_het.aggregation import AGGREGATION_SETTING
from fedjax_het.algorithms import METHODS
from fedjax_het.algorithms.spec import HYPERPARAMETER_SETTINGS as HYPERPARAMETER_SETTINGS
from fedjax_het.attacks import ATTACK_SETTING
from fedjax_het.compression import to_compression_setting
from fedjax_het.config.kind_settings import KIND_SETTINGS
from fedjax_het.privacy import PRIVACY_SETTING
from fedjax_het.skews import SKEW_SETTING
from fedjax_het.systems import SYSTEM_SETTING
from fedjax_het.utils.config import Bounds, to_python_scalar
from fedjax_het.utils.errors import ConfigError, require, require_name
from fedjax_het.utils.former_names import rename_former_arguments

# Settings younger than the first kept results. Digests of older runs must not change.
_OMITTED_WHEN_EMPTY = (
    *("stem", "client_tests", "test_per_client", "client_test_model"),
    *("partition_options", "server_data", "server_options", "pretrain_epochs", "gradient_gaps"),
    *("network_options", "precision", "init_from", "held_out_clients", "held_out_epochs"),
    *("metrics", "optimizer_options", "lr_schedule", "lr_step_schedule", "local_steps"),
    *("gradient_accumulation", "target_accuracy", "patience", "min_delta", "validation", "skew"),
    *("system", "attack", "aggregation", "compression", "privacy"),
)
FORMER_SETTING_NAMES = {
    "accumulation": "gradient_accumulation",
    "local_tests": "client_tests",
    "measures": "metrics",
    "min_gain": "min_delta",
    "normalisation": "normalization",
    "scored": "client_test_model",
    "stop_at": "target_accuracy",
}
"""Names of settings in version 0.6, which files, command lines and digests contain."""
ADDED_DEFAULTS: dict[str, dict[str, Any]] = {
    "options": {
        "teacher_weights": "label",
        "differentiation": "exact",
        "distance": "swd",
        "initial_max_start": None,
        "inner_momentum": 0.0,
        "max_syntheses": 1,
        "path": "rounds",
        "path_decay": 0.5,
        "starts": "path",
        "synthesis_interval": 20,
        "upload_bits": 32,
    },
    "hp": {
        "fine_tune_lr_decay": 1.0,
        "fine_tune_prox": 0.0,
        "fine_tune_mix": 1.0,
        "gamma_decay": 1.0,
    },
}
"""Options and hyperparameters that methods of version 0.6 lack, with the values that digests leave
out."""
SETTING_ALIASES = {"lr": "learning_rate", "server_lr": "server_learning_rate"}
"""Short names of settings on the command line."""
SETTINGS_BY_HYPERPARAMETER = {name: setting for setting, name in HYPERPARAMETER_SETTINGS.items()}
"""Settings that are hyperparameters, by their names in `hp`."""
SETTING_SYNONYMS = SETTING_ALIASES | SETTINGS_BY_HYPERPARAMETER | {"hyperparameters": "hp"}
"""Settings that messages suggest, by other names."""
_FORMER_METHODS = {
    "fedamp": (
        *("fedamp", "heurfedamp", "separate", "fedavg_ft", "fedprox_ft", "apfl", "ditto"),
        *("pfedme", "per_fedavg"),
    ),
    "fedaf": ("feddm", "fedaf"),
    "fsl": ("data_sharing", "fsl", "fsl_p"),
}
_FORMER_PROTOCOLS = {name: protocol for protocol, row in _FORMER_METHODS.items() for name in row}
# Settings that every resolved run has.
_ALWAYS_RESOLVED = (
    *("algorithm", "dataset", "partition", "model", "num_clients", "participation"),
    *("batch_size", "rounds", "partition_seed"),
)


def get_former_protocol(algorithm: str) -> str:
    """Return a method's default protocol of version 0.6, which its files and digests leave out."""
    return _FORMER_PROTOCOLS.get(algorithm, "dynafed")


def rename_former_settings(
    settings: Mapping[str, Any], caller: str | None = None
) -> dict[str, Any]:
    """Replace the names of settings in version 0.6 by their present names.

    Settings of a resolved run without a protocol, as version 0.6 wrote them, receive the method's
    default protocol of that version, unless `caller` is given.

    Args:
      settings: values by name.
      caller: name of the function in a DeprecationWarning (default: no warning).

    Returns:
      Values by present name.

    Raises:
      ConfigError: if a setting is given under both names.
    """
    settings = rename_former_arguments(settings, FORMER_SETTING_NAMES, caller)
    is_resolved = all(settings.get(name) is not None for name in _ALWAYS_RESOLVED)
    if caller is None and is_resolved and isinstance(settings["algorithm"], str):
        settings.setdefault("protocol", get_former_protocol(settings["algorithm"]))
    return settings


MAX_ROUNDS = 10**6
"""Largest number of rounds, and of epochs in a round."""
# Metadata of fields, which leave annotations and signatures short; `field_types` reads them.
_NON_NEGATIVE = {"bounds": Bounds(0)}
_POSITIVE = {"bounds": Bounds(0, open_low=True)}
_COUNT = {"bounds": Bounds(1)}
_ROUND_COUNT = {"bounds": Bounds(1, MAX_ROUNDS)}
_ROUND_COUNT_OR_ZERO = {"bounds": Bounds(0, MAX_ROUNDS)}
_SHARE = {"bounds": Bounds(0, 1)}
_POSITIVE_SHARE = {"bounds": Bounds(0, 1, open_low=True)}
_OPEN_SHARE = {"bounds": Bounds(0, 1, open_low=True, open_high=True)}
_DECAY = {"bounds": Bounds(0, 1, open_high=True)}
# Real-valued settings that accept integers > 0; messages show other integers as they are.
_FLOAT_SETTINGS = (
    *("alpha", "participation", "target_accuracy", "min_delta"),
    *HYPERPARAMETER_SETTINGS,
)
LOCAL_TRAINING_SETTINGS = (
    *("local_epochs", "local_optimizer", "optimizer_state", "averaging", "optimizer_options"),
    *("lr_schedule", "lr_step_schedule", "local_steps", "gradient_accumulation", "compression"),
)
"""Settings without a use for methods whose clients condense their data instead of training."""
SERVER_DATA_SETTINGS = ("server_data", "server_options")
"""Settings of the server's examples."""
NETWORK_SETTINGS = ("width", "depth", "norm", "stem")
"""Settings that are parameters of networks."""
PARTITION_SETTINGS = ("alpha", "classes")
"""Settings that are parameters of partitions."""


def drop_unused_settings(algorithm: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Remove the settings that a method does not use, so that methods can be compared.

    Args:
      algorithm: name of the method.
      settings: values by name.

    Returns:
      The other settings.
    """
    method = METHODS[algorithm]
    unused: tuple[str, ...] = () if method.trains_locally else LOCAL_TRAINING_SETTINGS
    measures_gradients = settings.get("gradient_gaps") and settings.get("server_data")
    uses_server_data = settings.get("pretrain_epochs") or measures_gradients
    if not (method.requires_server_examples or uses_server_data):
        unused = (*unused, *SERVER_DATA_SETTINGS)
    return {name: value for name, value in settings.items() if name not in unused}


def require_setting(argument: str, name: str, valid: Iterable[str]) -> None:
    """Raise an error for an unknown setting; the message suggests the setting that is meant.

    Args:
      argument: kind of the name in the message, "setting" or "flag".
      name: the name, as a flag with dashes or without.
      valid: valid names.

    Raises:
      ConfigError: if the name is unknown.

    Example:
      >>> from fedjax_het.config.settings import require_setting
      >>> from fedjax_het.utils.errors import ConfigError
      >>> try:
      ...     require_setting("setting", "lr", ["learning_rate", "rounds"])
      ... except ConfigError as error:
      ...     print(error)
      setting = 'lr' is unknown: did you mean 'learning_rate'?
    """
    synonym = SETTING_SYNONYMS.get(name.removeprefix("--").replace("-", "_"), "")
    suggestion = f"--{synonym}".replace("_", "-") if name.startswith("--") else synonym
    if name not in valid and suggestion in valid:
        raise ConfigError(f"{argument} = {name!r} is unknown: did you mean {suggestion!r}?")
    require_name(argument, name, valid)


@dataclass(frozen=True)
class RunSettings:
    """Fields of `RunSpec`; None stands for a default."""

    algorithm: str = "fedavg"
    """Federated learning method; `fedjax-het list` names all methods."""
    dataset: str = "digits"
    """Data set of `fedjax-het list`, or FORMAT:LOCATION, such as npz:scans.npz."""
    _: KW_ONLY
    normalization: str | None = None
    """Source of the mean and standard deviation that normalize the inputs: dynafed, fedaf, fedamp,
    fsl, pfllib, unit or dataset (default: the protocol's, otherwise the data set's own)."""
    partition: str | None = None
    """Scheme that splits the training data among the clients; `fedjax-het list` names all
    partitions."""
    alpha: float | None = field(default=None, metadata=_POSITIVE)
    """Concentration of the Dirichlet partition, > 0. Small values give clients few labels."""
    classes: int | None = field(default=None, metadata=_COUNT)
    """Number of labels on each client, for partitions by label."""
    model: str | None = None
    """Network that the clients train; `fedjax-het list` names all networks. The protocol standard
    has cnn for the package's data sets other than digits."""
    width: int | None = field(default=None, metadata=_COUNT)
    """Filters of each convolution (default: the network's own number)."""
    depth: int | None = field(default=None, metadata=_COUNT)
    """Number of blocks, for networks of variable depth (default: the network's own number)."""
    norm: str | None = None
    """Normalization layers of the network: group, instance, batch or none (default: the protocol's,
    otherwise the network's own)."""
    stem: str | None = None
    """First layers of resnet18: imagenet or cifar (default: imagenet)."""
    network_options: dict[str, Any] = field(default_factory=dict)
    """Further options of the network, e.g. hidden=[64,64]; `fedjax-het show NETWORK` lists them
    (default: the network's own)."""
    num_clients: int | None = field(default=None, metadata=_COUNT)
    """Number of clients in the federation."""
    participation: float | None = field(default=None, metadata=_POSITIVE_SHARE)
    """Fraction of the clients that is sampled in each round, in (0, 1]."""
    local_epochs: int | None = field(default=None, metadata=_ROUND_COUNT)
    """Epochs of local training per client and round."""
    batch_size: int | None = field(default=None, metadata=_COUNT)
    """Examples per minibatch of local training. Methods whose clients condense their data use this
    number of real examples per class and step."""
    rounds: int | None = field(default=None, metadata=_ROUND_COUNT)
    """Number of communication rounds."""
    local_optimizer: str | None = None
    """Optimizer of local training; `fedjax-het list` names all optimizers."""
    optimizer_state: Literal["reset", "keep"] | None = None
    """State of the local optimizer: reset at the start of each round, or keep across a client's
    rounds."""
    averaging: Literal["uniform", "weighted"] | None = None
    """Weights of the clients in the server's average: uniform, or weighted by their numbers of
    samples."""
    eval_every: int = field(default=1, metadata=_COUNT)
    """Rounds between two evaluations. The last five rounds are always evaluated."""
    seed: int = field(default=0, metadata=_NON_NEGATIVE)
    """Seed of all random draws: partition, client sampling, initialization, batches."""
    partition_seed: int | None = field(default=None, metadata=_NON_NEGATIVE)
    """Seed of the partition and of the clients' test data (default: the seed of all random
    draws)."""
    protocol: str | None = None
    """Experiment that provides omitted settings: standard, niid_bench, pfllib, dynafed, fedaf,
    feddm, fedamp, fsl, or own, the method's default. Methods of the last five papers have their
    paper's protocol by default. All other methods, and sweeps with several defaults, have standard.
    """
    client_tests: bool | None = None
    """Evaluate each client on test data distributed like its training data (default: only for
    personalized methods)."""
    test_per_client: int | Literal["all", "proportional"] | None = field(
        default=None, metadata=_COUNT
    )
    """Test examples per client. "all" uses the whole test split for every client, "proportional"
    divides the test split among the clients in proportion to their training data (default: 100, or
    fewer if the test split is too small; classes with too few test examples are left out)."""
    client_test_model: str | None = None
    """Model that is evaluated on the clients' own test data: global, client or received (default:
    the method's own)."""
    partition_options: dict[str, Any] = field(default_factory=dict)
    """Further options of the partition, e.g. dominating_share=0.9; `fedjax-het show PARTITION`
    lists them (default: the partition's own)."""
    skew: dict[str, Any] = field(
        default_factory=dict, metadata={"convert": SKEW_SETTING.to_settings}
    )
    """Skews, e.g. noise:std=0.3; see `list skews` (default: none)."""
    system: dict[str, Any] = field(
        default_factory=dict, metadata={"convert": SYSTEM_SETTING.to_settings}
    )
    """Devices, see `list systems` (default: none)."""
    attack: dict[str, Any] = field(
        default_factory=dict, metadata={"convert": ATTACK_SETTING.to_settings}
    )
    """Attacks of malicious clients, e.g. sign_flip:fraction=0.2; see `list attacks` (default:
    none)."""
    aggregation: dict[str, Any] = field(
        default_factory=dict, metadata={"convert": AGGREGATION_SETTING.to_settings}
    )
    """Robust rules of the server, e.g. trimmed_mean:fraction=0.2; see `list aggregations`
    (default: the weighted mean)."""
    privacy: dict[str, Any] = field(
        default_factory=dict, metadata={"convert": PRIVACY_SETTING.to_settings}
    )
    """Differential privacy, e.g. client_level:noise_multiplier=1,clip_norm=0.5; see `list privacy`
    (default: none)."""
    server_data: str | None = None
    """Source of the server's own examples; `fedjax-het list` names all sources (default: held_out
    where they are proxy data, iid for other methods that need them)."""
    server_options: dict[str, Any] = field(default_factory=dict)
    """Options of the source of the server's examples, e.g. size=500; `fedjax-het show SOURCE` lists
    them (default: the protocol's, otherwise the source's own)."""
    pretrain_epochs: int | None = field(default=None, metadata=_ROUND_COUNT_OR_ZERO)
    """Epochs of training on the server's examples before the first round (default: the method's
    own, usually 0)."""
    gradient_gaps: int | None = field(default=None, metadata=_NON_NEGATIVE)
    """Rounds between two measurements of the distance between the gradients of the server's and the
    clients' losses and the gradient over all data (default: never)."""
    precision: Literal["float32", "tf32", "bfloat16"] | None = None
    """Number format of the network: float32; tf32, which rounds products to TF32; bfloat16, which
    sums in float32 (default: the backend's own: float32 on a CPU, tf32 on a GPU that supports it,
    bfloat16 products on a TPU)."""
    init_from: str | None = None
    """File of the initial model, written by `save_model` (default: random weights)."""
    held_out_clients: int | None = field(default=None, metadata=_COUNT)
    """Number of additional clients that never train. The final global model is evaluated on test
    data like theirs, before and after fine-tuning (default: none)."""
    held_out_epochs: int | None = field(default=None, metadata=_ROUND_COUNT_OR_ZERO)
    """Epochs of fine-tuning on each held-out client's own data, at the learning rate without a
    schedule over rounds (default: the method's own fine-tuning, otherwise 1)."""
    metrics: str | tuple[str, ...] | None = None
    """Further metrics, as a list or separated by commas, e.g. macro_f1,drift; `fedjax-het list`
    names all metrics (default: none)."""
    optimizer_options: dict[str, bool] = field(default_factory=dict)
    """Boolean options of the local optimizer, e.g. nesterov=true; `fedjax-het show OPTIMIZER` lists
    them (default: the optimizer's own)."""
    lr_schedule: str | None = None
    """Schedule of the local learning rate over rounds, e.g. cosine; `fedjax-het list` names all
    schedules (default: constant)."""
    lr_step_schedule: str | None = None
    """Schedule of the local learning rate over the optimizer steps of a client, e.g. cosine;
    `fedjax-het list` names all schedules (default: constant)."""
    local_steps: int | None = field(default=None, metadata=_ROUND_COUNT)
    """Minibatches of local training per client and round, for clients of any size. The setting
    cannot be combined with local epochs (default: local epochs are counted)."""
    gradient_accumulation: int | None = field(default=None, metadata=_ROUND_COUNT)
    """Minibatches whose gradients are averaged for one optimizer step. The last step of a round may
    average fewer (default: 1)."""
    validation: float | None = field(default=None, metadata=_OPEN_SHARE)
    """Fraction in (0, 1) of each client's training examples that is withheld from training. Early
    stopping, the best round and tuning then use the accuracy on these examples instead of the test
    accuracy (default: none)."""
    target_accuracy: float | None = field(default=None, metadata=_POSITIVE_SHARE)
    """Accuracy in (0, 1], or another task's score, at which the run ends (default: the run ends
    after its last round). It is the global model's validation accuracy, or its test accuracy
    without validation examples; for a method without a global model, the mean over clients."""
    patience: int | None = field(default=None, metadata=_COUNT)
    """Evaluations without a gain in accuracy, or the task's score, after which the run ends
    (default: the run ends after its last round)."""
    min_delta: float | None = field(default=None, metadata=_SHARE)
    """Amount by which the accuracy must exceed the best so far to count as a gain for early
    stopping (default: 0)."""
    compression: str | None = None
    """Compression of the clients' uploads, e.g. topk:fraction=0.01; see `fedjax-het list
    compressors` (default: none)."""
    learning_rate: float | None = field(default=None, metadata=_NON_NEGATIVE)
    """Learning rate of the clients' optimizer, also --lr (default: the protocol's or the
    optimizer's)."""
    momentum: float | None = field(default=None, metadata=_DECAY)
    """Momentum of the clients' optimizer, in [0, 1), for optimizers that have it (default: the
    protocol's, otherwise the optimizer's own)."""
    weight_decay: float | None = field(default=None, metadata=_NON_NEGATIVE)
    """Weight decay of the clients' optimizer, >= 0: L2 regularization, or decoupled in an optimizer
    with a decay of its own, such as adamw (default: the protocol's, usually none)."""
    server_learning_rate: float | None = field(default=None, metadata=_NON_NEGATIVE)
    """Learning rate of the server, >= 0, which scales the clients' mean change or the step of the
    server's optimizer (default: the protocol's, otherwise the method's own, usually 1)."""
    hp: dict[str, float] = field(default_factory=dict)
    """Numeric hyperparameters of the method, e.g. prox_mu=0.01; `fedjax-het show METHOD` lists
    them (default: the protocol's, otherwise the method's own)."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the method, e.g. preset=code; `fedjax-het show METHOD` lists them (default: the
    method's own)."""

    def __post_init__(self) -> None:
        """Make equal settings compare equal: convert NumPy scalars, and integers to floats.

        `RunSpec` also validates them.
        """
        for setting in dataclasses.fields(RunSettings):
            value = to_python_scalar(getattr(self, setting.name))
            if setting.name in KIND_SETTINGS:
                value = KIND_SETTINGS[setting.name].to_settings(value)
            if setting.name == "compression":
                value = to_compression_setting(value)
            if setting.name == "metrics" and isinstance(value, list | tuple):
                value = ", ".join(map(str, value)) or None
            if setting.name in _FLOAT_SETTINGS and type(value) is int and 0 < value < 2**53:
                value = float(value)
            object.__setattr__(self, setting.name, value)

    def __eq__(self, other: object) -> bool:
        """Return whether the settings are equal, whether or not they have been resolved."""
        return isinstance(other, RunSettings) and vars(self) == vars(other)

    def __hash__(self) -> int:
        """Return the hash of the settings, which equal settings share."""
        return hash(_to_hashable(vars(self)))

    @property
    def hyperparameters(self) -> dict[str, float]:
        """All given hyperparameters by their names in `hp`, including the learning rates."""
        given = self._get_given(tuple(HYPERPARAMETER_SETTINGS))
        return {HYPERPARAMETER_SETTINGS[name]: value for name, value in given.items()} | self.hp

    @property
    def has_client_tests(self) -> bool:
        """Whether a resolved run tests each client on data distributed like its training data."""
        return bool(self.client_tests) or METHODS[self.algorithm].is_personalized

    @property
    def evaluated_model(self) -> str:
        """Model that is evaluated on the clients' own test data."""
        return self.client_test_model or METHODS[self.algorithm].evaluated_models[0]

    @property
    def has_early_stopping(self) -> bool:
        """Whether the settings can end the run before its last round."""
        return self.target_accuracy is not None or self.patience is not None

    @property
    def model_options(self) -> dict[str, Any]:
        """Arguments of `make_model` from the settings."""
        return {**self._get_given(NETWORK_SETTINGS), **self.network_options}

    @property
    def partition_arguments(self) -> dict[str, Any]:
        """Arguments of `make_partition` from the settings."""
        return {**self._get_given(PARTITION_SETTINGS), **self.partition_options}

    def _get_given(self, names: tuple[str, ...]) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def to_dict(self) -> dict[str, Any]:
        """Return the settings by name; unset settings that old digests lack are omitted."""
        values = dataclasses.asdict(self) | {"hp": self.hyperparameters}
        for name in HYPERPARAMETER_SETTINGS:
            del values[name]
        omitted = [name for name in _OMITTED_WHEN_EMPTY if values[name] in (None, {})]
        return {name: value for name, value in values.items() if name not in omitted}


def update_settings(settings: RunSettings, **changes: Any) -> RunSettings:
    """Return settings with changes that need no conversion; a fast `dataclasses.replace`.

    Args:
      settings: the settings.
      **changes: new values of fields.

    Returns:
      Changed settings.
    """
    changed = object.__new__(RunSettings)
    vars(changed).update(vars(settings), **changes)
    return changed


def merge_hyperparameters(settings: RunSettings) -> RunSettings:
    """Return settings whose `hp` contains the learning rates, as resolution needs them."""
    unset = dict.fromkeys(HYPERPARAMETER_SETTINGS)
    return update_settings(settings, hp=settings.hyperparameters, **unset)


def require_one_name(setting: str, value: Any, hp_value: Any) -> None:
    """Require that a setting does not have another value under its name in `hp`.

    Args:
      setting: name of the setting, such as `learning_rate`.
      value: value of the setting; None if it is not given.
      hp_value: value under the setting's name in `hp`; None if it is not given.

    Raises:
      ConfigError: if the two values differ.

    Example:
      >>> from fedjax_het.config.settings import require_one_name
      >>> require_one_name("learning_rate", 0.1, None)
    """
    is_valid = value is None or hp_value in (None, value)
    names = f"{setting}, hp {HYPERPARAMETER_SETTINGS[setting]}"
    require(is_valid, names, (value, hp_value), "one of the two names")


def separate_hyperparameters(settings: RunSettings) -> RunSettings:
    """Return settings whose learning rates are fields and not in `hp`.

    Raises:
      ConfigError: if a field and `hp` have different values.
    """
    hp = dict(settings.hp)
    names = HYPERPARAMETER_SETTINGS.items()
    changes = {setting: hp.pop(name) for setting, name in names if name in hp}
    for setting, value in changes.items():
        require_one_name(setting, getattr(settings, setting), value)
    return update_settings(settings, hp=hp, **changes)


def _to_hashable(value: Any) -> Any:
    if isinstance(value, dict):
        return frozenset((name, _to_hashable(item)) for name, item in value.items())
    return tuple(map(_to_hashable, value)) if isinstance(value, list | tuple) else value


def _check_arguments(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate the generated constructor: check names, and accept names of version 0.6."""

    @functools.wraps(init)
    def wrapper(self: RunSettings, *args: Any, **settings: Any) -> None:
        if len(args) > 2:
            expected = "a setting by name, e.g. model='mlp'; only algorithm and dataset have places"
            require(False, "argument 3", args[2], expected)
        fields = RunSettings.__dataclass_fields__
        if not settings.keys() <= fields.keys():
            settings = rename_former_settings(settings, "RunSpec")
            for name in settings:
                require_setting("setting", name, fields)
        init(self, *args, **settings)

    return wrapper


RunSettings.__init__ = _check_arguments(RunSettings.__init__)  # type: ignore[method-assign]

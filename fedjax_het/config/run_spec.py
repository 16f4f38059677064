"""What one run is: a frozen record of settings, and the hash that names it."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import yaml

from fedjax_het.algorithms import METHODS
from fedjax_het.utils.config import (
    Bounds,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    to_python_scalar,
)

# Settings younger than the first kept results, whose names must not change.
_OMITTED_WHEN_EMPTY = (
    "protocol",
    "stem",
    "local_tests",
    "test_per_client",
    "scored",
    "partition_options",
    "server_data",
    "server_options",
    "pretrain_epochs",
    "gradient_gaps",
    "network_options",
    "precision",
    "init_from",
    "held_out_clients",
    "held_out_epochs",
    "measures",
    "optimizer_options",
    "lr_schedule",
    "lr_step_schedule",
    "local_steps",
    "accumulation",
    "stop_at",
    "patience",
    "min_gain",
)
MAX_ROUNDS = 10**6  # and most epochs of one
_RoundCount = Annotated[int, Bounds(1, MAX_ROUNDS)]
_ParticipationRate = Annotated[float, Bounds(0, 1, open_low=True)]
# Numbers that may be written as whole ones.
_FLOAT_SETTINGS = ("alpha", "participation", "stop_at", "min_gain")
# What clients that condense their data instead of training on them have no use for.
LOCAL_TRAINING_SETTINGS = (
    *("local_epochs", "local_optimizer", "optimizer_state", "averaging"),
    *("optimizer_options", "lr_schedule", "lr_step_schedule", "local_steps", "accumulation"),
)
SERVER_DATA_SETTINGS = ("server_data", "server_options")
# Settings that belong to a network, or a partition, among whose parameters they are.
NETWORK_SETTINGS = ("width", "depth", "norm", "stem")
PARTITION_SETTINGS = ("alpha", "classes")


def drop_unused_settings(algorithm: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Of settings that several methods are compared at, those that this one has a use for."""
    method = METHODS[algorithm]
    unused: tuple[str, ...] = () if method.trains_locally else LOCAL_TRAINING_SETTINGS
    measures_gradients = settings.get("gradient_gaps") and settings.get("server_data")
    if not (
        method.requires_server_examples or settings.get("pretrain_epochs") or measures_gradients
    ):
        unused = (*unused, *SERVER_DATA_SETTINGS)
    return {name: value for name, value in settings.items() if name not in unused}


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides a run's numbers. `None` means: as in the method's paper.

    `hp` holds numeric hyper-parameters (traced: changing one never recompiles), `options` the
    method's static choices (a preset, SCAFFOLD's option). `spec.resolved()` fills every `None`.
    """

    algorithm: str = "fedavg"
    """The method; `fedjax-het list` names them."""
    dataset: str = "digits"
    """The data set."""
    normalisation: str | None = None
    """Whose constants normalise the images: dynafed, fedaf, fedamp, fsl, unit or dataset (default:
    the protocol's, or the data set's usual ones)."""
    partition: str | None = None
    """How data are split among clients."""
    alpha: PositiveFloat | None = None
    """Dirichlet concentration: small is heterogeneous. For partitions that take one."""
    classes: PositiveInt | None = None
    """Labels per client; for partitions that take them."""
    model: str | None = None
    """The network."""
    width: PositiveInt | None = None
    """Filters of every convolution (default: the network's)."""
    depth: PositiveInt | None = None
    """Blocks of the network, of those that take a number (default: the network's)."""
    norm: str | None = None
    """group, instance, batch or none (default: the protocol's, or the network's)."""
    stem: str | None = None
    """imagenet or cifar; for resnet18 only (default: imagenet)."""
    network_options: dict[str, Any] = field(default_factory=dict)
    """What else the network takes, e.g. hidden=64; see `fedjax_het.nn.NETWORKS`."""
    num_clients: PositiveInt | None = None
    """In the federation."""
    participation: _ParticipationRate | None = None
    """Share of clients sampled each round, in (0, 1]."""
    local_epochs: _RoundCount | None = None
    """Passes of a client over its data in a round."""
    batch_size: PositiveInt | None = None
    """Of local training; real images of a class and step where clients condense."""
    rounds: _RoundCount | None = None
    """Of communication."""
    local_optimizer: str | None = None
    """sgd, momentum, nesterov, adam, adamw or another that `fedjax-het list` names."""
    optimizer_state: str | None = None
    """reset each round, or keep every client's across rounds."""
    averaging: str | None = None
    """uniform over the round's clients, or weighted by their samples."""
    eval_every: PositiveInt = 1
    """Rounds between evaluations; the last five are always evaluated."""
    seed: NonNegativeInt = 0
    """Of all that is drawn."""
    partition_seed: NonNegativeInt | None = None
    """Of the split of the data, and of clients' tests (default: the seed)."""
    protocol: str | None = None
    """Whose settings fill what is left out: dynafed, fedaf, feddm, fedamp or fsl (default: the
    method's own)."""
    local_tests: bool | None = None
    """Test every client on data like its own (default: for methods of personalised models)."""
    test_per_client: PositiveInt | Literal["all"] | None = None
    """Test images of each client (default: 100, or fewer where the test split has too few); all:
    the whole test split for everyone, instead of data like its own."""
    scored: str | None = None
    """Which model a client's own test is for: global, client, received (default: the method's)."""
    partition_options: dict[str, Any] = field(default_factory=dict)
    """What else the partition takes, e.g. dominating_share; see `fedjax_het.data.partition_schemes`."""
    server_data: str | None = None
    """Where the server's own examples are from: iid, held_out, clients, glyphs, stl10 or user
    (default: iid, for methods whose server has some; held_out, where they are a proxy)."""
    server_options: dict[str, Any] = field(default_factory=dict)
    """What that takes, e.g. size; see `fedjax_het.data.SERVER_SOURCES`."""
    pretrain_epochs: Annotated[int, Bounds(0, MAX_ROUNDS)] | None = None
    """Epochs over the server's examples before the first round."""
    gradient_gaps: NonNegativeInt | None = None
    """Rounds between measurements of how far the gradients of the server's and the clients' losses
    are from that of all data (default: never)."""
    precision: Literal["float32", "tf32", "bfloat16"] | None = None
    """Of networks: float32, true products of float32; tf32; bfloat16, parameters and activations in
    it, with float32 for what is kept and added up (default: the backend's own products of float32
    numbers: of float32 on a CPU, of tf32 on a GPU that has it, of bfloat16 on a TPU)."""
    init_from: str | None = None
    """File of the model that the run begins with, as `save_model` writes it (default: weights drawn
    by the seed)."""
    held_out_clients: PositiveInt | None = None
    """Clients besides, drawn by the partition's seed, that never take part: the final global model
    is scored on tests like their data, before and after fine-tuning (default: none)."""
    held_out_epochs: Annotated[int, Bounds(0, MAX_ROUNDS)] | None = None
    """Epochs of that fine-tuning, over a held-out client's own data, at the rate before its
    schedule over rounds (default: the method's own tuning, or 1)."""
    measures: str | None = None
    """What else is measured, names with commas between: class_accuracy, macro_f1, calibration,
    confusion, fairness, drift (default: nothing)."""
    optimizer_options: dict[str, bool] = field(default_factory=dict)
    """Truth values of the local optimiser, e.g. nesterov=True."""
    lr_schedule: str | None = None
    """Course of local_lr over rounds: constant, step, exponential, cosine, cosine_restarts, linear,
    polynomial or inverse; its numbers, as `fedjax-het show` has them, are in hp (default:
    constant)."""
    lr_step_schedule: str | None = None
    """The same over a client's steps, as its optimiser counts them (default: constant)."""
    local_steps: Annotated[int, Bounds(1, MAX_ROUNDS)] | None = None
    """Minibatches of a client's round, whatever it holds, instead of local_epochs."""
    accumulation: Annotated[int, Bounds(1, MAX_ROUNDS)] | None = None
    """Minibatches whose gradients are averaged for a step; what is left at a round's end is a step
    of fewer (default: 1)."""
    stop_at: Annotated[float, Bounds(0, 1, open_low=True)] | None = None
    """Accuracy, in (0, 1], at which the run ends: of the global model, or the mean over clients'
    own tests where there is none; looked at where it is measured (default: never)."""
    patience: PositiveInt | None = None
    """Measured rounds without a gain in that accuracy after which the run ends (default: never)."""
    min_gain: Annotated[float, Bounds(0, 1)] | None = None
    """What accuracy must exceed the best so far by to be a gain, with patience (default: 0)."""
    hp: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Equal settings have equal values: scalars of NumPy are Python's, 1 is 1.0 where a setting
        is no whole number. Whether they can be used is checked where a run is resolved."""
        for setting in dataclasses.fields(RunSpec):
            value = to_python_scalar(getattr(self, setting.name))
            if setting.name == "measures" and isinstance(value, list | tuple):
                value = ", ".join(map(str, value))
            if setting.name in _FLOAT_SETTINGS and type(value) is int and abs(value) < 2**53:
                value = float(value)
            object.__setattr__(self, setting.name, value)

    def resolved(self) -> "ResolvedRunSpec":
        """Return the run with every default written out, after checking every setting.

        Raises:
          ConfigError: if a setting cannot be used.
        """
        return RunSpec._resolve(self)

    @staticmethod
    def _resolve(spec: "RunSpec") -> "ResolvedRunSpec":
        """Resolve a run; `config/__init__` sets it to `config.resolve.resolve`.

        That module imports this class, so that this module cannot import it.
        """
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        """Return whether the settings are equal, whether or not they have been resolved."""
        return isinstance(other, RunSpec) and vars(self) == vars(other)

    @property
    def has_client_tests(self) -> bool:
        """Whether a resolved run tests every client on data like its own."""
        return bool(self.local_tests) or METHODS[self.algorithm].evaluated_models[0] != "global"

    @property
    def evaluated_model(self) -> str:
        """Which model a client's own test is for."""
        return self.scored or METHODS[self.algorithm].evaluated_models[0]

    @property
    def has_early_stopping(self) -> bool:
        """Whether its settings may end it before its last round."""
        return self.stop_at is not None or self.patience is not None

    @property
    def model_options(self) -> dict[str, Any]:
        """The settings of the network that are given, as `make_model` takes them."""
        values = {name: getattr(self, name) for name in NETWORK_SETTINGS}
        network_settings = {name: value for name, value in values.items() if value is not None}
        return {**network_settings, **self.network_options}

    @property
    def partition_arguments(self) -> dict[str, Any]:
        """The settings of the partition that are given, as `make_partition` takes them."""
        values = {name: getattr(self, name) for name in PARTITION_SETTINGS}
        partition_settings = {name: value for name, value in values.items() if value is not None}
        return {**partition_settings, **self.partition_options}

    def to_dict(self) -> dict[str, Any]:
        """The settings; those that were added later are left out where they say nothing."""
        values = dataclasses.asdict(self)
        return {
            k: v for k, v in values.items() if v not in (None, {}) or k not in _OMITTED_WHEN_EMPTY
        }

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunSpec":
        return cls(**values)

    def digest(self) -> str:
        """Return the 16 hexadecimal digits that name this run: a hash of the resolved settings.

        Raises:
          ConfigError: if a setting cannot be used.
        """
        return self.resolved().digest()


class ResolvedRunSpec(RunSpec):
    """The settings of a run with every default written out, all of them checked.

    Only `config.resolve.resolve` creates one. The class itself and `dataclasses.replace` return a
    `RunSpec`, because changed settings must be resolved again.

    Settings of local training may still be None: clients that condense their data have none.
    """

    partition: str
    model: str
    num_clients: int
    participation: float
    batch_size: int
    rounds: int
    partition_seed: int
    protocol: str

    def __new__(cls, *args: Any, **settings: Any) -> RunSpec:  # type: ignore[misc]
        return RunSpec(*args, **settings)

    def __reduce__(self) -> tuple[Any, ...]:
        return mark_as_resolved, (RunSpec(**vars(self)),)

    def resolved(self) -> "ResolvedRunSpec":
        """Return this run, which is resolved already."""
        return self

    def digest(self) -> str:
        """Return the 16 hexadecimal digits that name this run: a hash of its settings."""
        return hash_settings(self)


def mark_as_resolved(spec: RunSpec) -> ResolvedRunSpec:
    """Return resolved settings as an instance of `ResolvedRunSpec`; for `resolve` and pickle."""
    resolved = object.__new__(ResolvedRunSpec)
    vars(resolved).update(vars(spec))
    return resolved


def hash_settings(spec: RunSpec) -> str:
    """Return the digest of settings as they are, without resolving them.

    Settings that are stored in a file may name what only another process has registered.

    Args:
      spec: resolved settings.

    Returns:
      16 hexadecimal digits.
    """
    text = json.dumps(spec.to_dict(), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def spec_to_yaml(spec: RunSpec) -> str:
    """Return the YAML text from which the run can be repeated, settings in their order."""
    nonempty_settings = {
        name: value for name, value in spec.to_dict().items() if value not in (None, {})
    }
    return yaml.safe_dump(nonempty_settings, sort_keys=False, default_flow_style=None)

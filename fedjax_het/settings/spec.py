"""What one run is: a frozen record of settings, their defaults, their checks and their hash."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from fedjax_het.common.errors import is_whole, require, require_name
from fedjax_het.settings.protocols import PROTOCOLS, protocol_values

if TYPE_CHECKING:
    from fedjax_het.algorithms import Entry

# Settings younger than the first kept results, whose names must not change.
_ADDED = (
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
)
# What clients that condense their data instead of training on them have no use for.
LOCAL_TRAINING = ("local_epochs", "local_optimizer", "optimizer_state", "averaging")
SERVER_DATA = ("server_data", "server_options")


def of_use(algorithm: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Of settings that several methods are compared at, those that this one has a use for."""
    from fedjax_het.algorithms import ALGORITHMS

    entry = ALGORITHMS[algorithm]
    unused = () if entry.trains_locally else LOCAL_TRAINING
    asked = any(settings.get(name) for name in ("pretrain_epochs", "gradient_gaps"))
    if not (entry.server_data or asked):
        unused = (*unused, *SERVER_DATA)
    return {name: value for name, value in settings.items() if name not in unused}


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides a run's numbers. `None` means: as in the method's paper.

    `hp` holds numeric hyper-parameters (traced: changing one never recompiles), `options` the
    method's static choices (a preset, SCAFFOLD's option). `spec.resolved()` fills every `None`.
    """

    algorithm: str = "fedavg"
    dataset: str = "digits"
    normalisation: str | None = None
    """Whose constants normalise the images: dynafed, fedaf, fedamp, fsl, unit or dataset."""
    partition: str | None = None
    alpha: float | None = None
    """Dirichlet concentration: small is heterogeneous. Dirichlet partitions only."""
    classes: int | None = None
    """Labels per client; for classes_per_client only."""
    model: str | None = None
    width: int | None = None
    """Filters of every convolution."""
    depth: int | None = None
    norm: str | None = None
    """group, instance, batch or none."""
    stem: str | None = None
    """imagenet or cifar; for resnet18 only."""
    num_clients: int | None = None
    participation: float | None = None
    """Share of clients sampled each round, in (0, 1]."""
    local_epochs: int | None = None
    batch_size: int | None = None
    """Of local training; real images of a class and step where clients condense."""
    rounds: int | None = None
    local_optimizer: str | None = None
    """sgd, momentum, adam or adamw."""
    optimizer_state: str | None = None
    """reset each round, or keep every client's across rounds."""
    averaging: str | None = None
    """uniform over the round's clients, or weighted by their samples."""
    eval_every: int = 1
    """Rounds between evaluations; the last five are always evaluated."""
    seed: int = 0
    partition_seed: int | None = None
    """Default: the seed."""
    protocol: str | None = None
    """Whose settings fill what is left out: one of `PROTOCOLS` (default: the method's)."""
    local_tests: bool | None = None
    """Test every client on data like its own (default: for methods of personalised models)."""
    test_per_client: int | Literal["all"] | None = None
    """Test images of each client (default: 100, or fewer where the test split has too few); all:
    the whole test split for everyone, instead of data like its own."""
    scored: str | None = None
    """Which model a client's own test is for: global, client, received (default: the method's)."""
    partition_options: dict[str, Any] = field(default_factory=dict)
    """What else the partition takes, e.g. dominating_share; see `fedjax_het.data.schemes`."""
    server_data: str | None = None
    """Where the server's own examples are from: iid, held_out, clients, glyphs, stl10 or user
    (default: iid, for methods whose server has some; held_out, where they are a proxy)."""
    server_options: dict[str, Any] = field(default_factory=dict)
    """What that takes, e.g. size; see `fedjax_het.data.SERVER_SOURCES`."""
    pretrain_epochs: int | None = None
    """Epochs over the server's examples before the first round."""
    gradient_gaps: int | None = None
    """Rounds between measurements of how far the gradients of the server's and the clients' losses
    are from that of all data (default: never)."""
    hp: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def resolved(self) -> "RunSpec":
        """The same run with every default written out, and checked. Raises `ConfigError`."""
        from fedjax_het.algorithms import ALGORITHMS, entry_of
        from fedjax_het.algorithms.pretraining import PRETRAINING_HP
        from fedjax_het.data import PARTITIONS, parameter_called
        from fedjax_het.engine.local import OPTIMIZERS

        require_name("algorithm", self.algorithm, ALGORITHMS)
        entry = entry_of(self.algorithm, self.options)
        protocol = entry.protocol if self.protocol is None else self.protocol
        require_name("protocol", protocol, PROTOCOLS)
        settings, protocol_options, protocol_hp = protocol_values(
            protocol, self.algorithm, self.dataset, self.model
        )
        if not entry.trains_locally:
            nothing = f"nothing: clients of {self.algorithm} condense their data"
            for name in LOCAL_TRAINING:
                require(getattr(self, name) is None, name, getattr(self, name), nothing)
        settings = of_use(self.algorithm, settings)
        usual = {name: settings.pop(name, None) for name in SERVER_DATA}
        usual["pretrain_epochs"] = settings.get("pretrain_epochs")
        filled = {name: value for name, value in settings.items() if getattr(self, name) is None}
        # A protocol that is the method's own goes without saying.
        named = None if protocol == entry.protocol else protocol
        spec = dataclasses.replace(self, protocol=named, **filled)
        PARTITIONS.require(spec.partition)
        if parameter_called(spec.partition, "alpha") is None:
            require(self.alpha is None, "alpha", self.alpha, "no alpha: the partition takes none")
            spec = dataclasses.replace(spec, alpha=None)
        if parameter_called(spec.partition, "classes") is None:
            none = "no classes: the partition takes none"
            require(self.classes is None, "classes", self.classes, none)
            spec = dataclasses.replace(spec, classes=None)
        spec = _with_server_data(self, spec, entry, usual)
        if spec.partition_seed is None:
            spec = dataclasses.replace(spec, partition_seed=spec.seed)
        spec = _with_local_tests(self, spec, entry.scored, settings)
        clients = spec.num_clients
        require(is_whole(clients, 1), "num_clients", clients, "a whole number >= 1")
        least = entry.min_clients
        require(clients >= least, "num_clients", clients, f"at least {least}: {self.algorithm}")
        if entry.trains_locally:
            require_name("local_optimizer", spec.local_optimizer, OPTIMIZERS)
        for name in self.options:
            require_name("option", name, entry.option_names)
        told = {name: value for name, value in protocol_options.items() if name in entry.options}
        options = {**entry.options, **told, **self.options}
        base = options.pop("base", None)
        entry.check(options)
        options = entry.fill(options)
        if base not in (None, *entry.bases[:1]):  # the usual one goes without saying
            options["base"] = base
        hp = entry.hyper_parameters(spec.local_optimizer, options, clients)
        if spec.pretrain_epochs:
            hp = hp | PRETRAINING_HP
        for name in self.hp:
            require_name("hp", name, hp)
        told = {name: value for name, value in protocol_hp.items() if name in hp}
        share = spec.participation
        require(0 < share <= 1, "participation", share, "a share in (0, 1]")
        told = {n: value(spec.__dict__) if callable(value) else value for n, value in told.items()}
        told = {name: value for name, value in told.items() if value is not None}
        hp = {name: _number(name, value) for name, value in {**hp, **told, **self.hp}.items()}
        entry.check_hp(hp)
        spec = dataclasses.replace(spec, hp=hp, options=options)
        _check(spec)
        return spec

    @property
    def tests_clients(self) -> bool:
        """Whether a resolved run tests every client on data like its own."""
        from fedjax_het.algorithms import ALGORITHMS

        return bool(self.local_tests) or ALGORITHMS[self.algorithm].scored[0] != "global"

    @property
    def scored_model(self) -> str:
        """Which model a client's own test is for."""
        from fedjax_het.algorithms import ALGORITHMS

        return self.scored or ALGORITHMS[self.algorithm].scored[0]

    @property
    def model_options(self) -> dict[str, Any]:
        """The settings of the network that are given, as `make_model` takes them."""
        values = {name: getattr(self, name) for name in ("width", "depth", "norm", "stem")}
        return {name: value for name, value in values.items() if value is not None}

    def to_dict(self) -> dict[str, Any]:
        """The settings; those that were added later are left out where they say nothing."""
        values = dataclasses.asdict(self)
        return {k: v for k, v in values.items() if v not in (None, {}) or k not in _ADDED}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunSpec":
        return cls(**values)

    def digest(self) -> str:
        """16 hexadecimal digits that name this run: the hash of the resolved settings."""
        text = json.dumps(self.resolved().to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _number(name: str, value: Any) -> float:
    """A hyper-parameter's value; momentum of 1 would forget nothing."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if name.endswith("momentum"):
        require(0 <= number < 1, f"hp {name}", value, "a number in [0, 1)")
    require(0 <= number < math.inf, f"hp {name}", value, "a finite number >= 0")
    return number


def _with_server_data(
    given: RunSpec, spec: RunSpec, entry: "Entry", usual: dict[str, Any]
) -> RunSpec:
    """Its server's examples, where they have a use, checked; `usual` are the protocol's."""
    from fedjax_het.data import check_server_options

    for name in ("pretrain_epochs", "gradient_gaps"):
        value = getattr(spec, name)
        require(value is None or is_whole(value, 0), name, value, "a whole number >= 0")
    epochs, gaps = spec.pretrain_epochs, spec.gradient_gaps or None
    if epochs:
        needs = "none: the method has no global model to pretrain"
        require(entry.global_model, "pretrain_epochs", epochs, needs)
    elif not usual["pretrain_epochs"]:
        epochs = None  # none, where none is usual, goes without saying
    if entry.server_data or epochs or (gaps and given.server_data):
        source = given.server_data or usual["server_data"] or "iid"
        told = usual["server_options"] or {}
        told = told if source == (usual["server_data"] or "iid") else {}
        options = check_server_options(source, {**told, **given.server_options})
    else:
        source, options = None, {}
        nothing = f"nothing: the server of {spec.algorithm} has no examples, unless it pretrains"
        for name in SERVER_DATA:
            require(getattr(given, name) in (None, {}), name, getattr(given, name), nothing)
    return dataclasses.replace(
        spec,
        server_data=source,
        server_options=options,
        pretrain_epochs=epochs,
        gradient_gaps=gaps,
    )


def _with_local_tests(
    given: RunSpec, spec: RunSpec, models: tuple[str, ...], usual: dict[str, Any]
) -> RunSpec:
    """Its local tests checked, and left unsaid where they are as without saying; `usual` are the
    protocol's settings."""
    own = models[0] != "global"
    tested = own if spec.local_tests is None else spec.local_tests
    scored, count = spec.scored, spec.test_per_client
    if not tested:
        require(not own, "local_tests", False, f"True: {spec.algorithm} has no other test")
        for name in ("scored", "test_per_client"):
            value = getattr(given, name)
            require(value is None, name, value, "nothing, or local_tests = True")
        scored = count = None
    if scored is not None:
        require_name("scored", scored, models)
    ok = count in (None, "all") or is_whole(count, 1)
    require(ok, "test_per_client", count, "a whole number >= 1, or 'all'")
    said = None if own else True if tested else False if usual.get("local_tests") else None
    unsaid = scored == models[0] and "scored" not in usual
    return dataclasses.replace(
        spec,
        local_tests=said,
        scored=None if unsaid else scored,
        test_per_client=count,
    )


def _check(spec: RunSpec) -> None:
    from fedjax_het.data import DATASETS
    from fedjax_het.nn import NETWORKS

    if spec.dataset != "user":
        DATASETS.require(spec.dataset)
    NETWORKS.require(spec.model)
    for name in ("num_clients", "local_epochs", "batch_size", "rounds", "eval_every"):
        value = getattr(spec, name)
        if value is None and name in LOCAL_TRAINING:
            continue
        require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
    if spec.alpha is not None:
        require(spec.alpha > 0, "alpha", spec.alpha, "a concentration > 0")
    for name, valid in (
        ("optimizer_state", ("reset", "keep")),
        ("averaging", ("uniform", "weighted")),
    ):
        if getattr(spec, name) is not None:
            require_name(name, getattr(spec, name), valid)
    require(0 <= spec.seed < 2**31, "seed", spec.seed, "a whole number in [0, 2**31)")

"""What one run is: a frozen record of settings, their defaults, their checks and their hash."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass, field
from typing import Any

from fedjax_het.errors import require, require_name

# DynaFed's protocol (paper section 6, appendix; released code for what the paper leaves open):
# shared by every method of its tables.
DYNAFED_PROTOCOL: dict[str, Any] = {
    "partition": "dirichlet_balanced",
    "alpha": 0.01,
    "model": "convnet",
    "num_clients": 80,
    "participation": 0.4,
    "local_epochs": 1,
    "batch_size": 32,
    "rounds": 200,
    "local_optimizer": "adam",
    "optimizer_state": "keep",
    "averaging": "uniform",
}


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
    num_clients: int | None = None
    participation: float | None = None
    """Share of clients sampled each round, in (0, 1]."""
    local_epochs: int | None = None
    batch_size: int | None = None
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
    hp: dict[str, float] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)

    def resolved(self) -> "RunSpec":
        """The same run with every default written out, and checked. Raises `ConfigError`."""
        from fedjax_het.algorithms import ALGORITHMS
        from fedjax_het.engine.local import OPTIMIZERS

        require_name("algorithm", self.algorithm, ALGORITHMS)
        entry = ALGORITHMS[self.algorithm]
        filled = {
            name: value for name, value in entry.protocol.items() if getattr(self, name) is None
        }
        spec = dataclasses.replace(self, **filled)
        if not str(spec.partition).startswith("dirichlet"):
            require(self.alpha is None, "alpha", self.alpha, "no alpha: the partition takes none")
            spec = dataclasses.replace(spec, alpha=None)
        if spec.partition_seed is None:
            spec = dataclasses.replace(spec, partition_seed=spec.seed)
        require_name("local_optimizer", spec.local_optimizer, OPTIMIZERS)
        for name in self.options:
            require_name("option", name, entry.options)
        options = {**entry.options, **self.options}
        entry.check(options)
        options = entry.fill(options)
        hp = entry.hyper_parameters(spec.local_optimizer, options)
        for name in self.hp:
            require_name("hp", name, hp)
        spec = dataclasses.replace(
            spec,
            hp={k: float(v) for k, v in {**hp, **self.hp}.items()},
            options=options,
        )
        _check(spec)
        return spec

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunSpec":
        return cls(**values)

    def digest(self) -> str:
        """16 hexadecimal digits that name this run: the hash of the resolved settings."""
        text = json.dumps(self.resolved().to_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def _check(spec: RunSpec) -> None:
    from fedjax_het.data import DATASETS, PARTITIONS
    from fedjax_het.nn import MODELS

    if spec.dataset != "user":
        require_name("dataset", spec.dataset, DATASETS)
    require_name("partition", spec.partition, PARTITIONS)
    require_name("model", spec.model, MODELS)
    for name in ("num_clients", "local_epochs", "batch_size", "rounds", "eval_every"):
        value = getattr(spec, name)
        require(isinstance(value, int) and value >= 1, name, value, "a whole number >= 1")
    require(0 < spec.participation <= 1, "participation", spec.participation, "a share in (0, 1]")
    if spec.alpha is not None:
        require(spec.alpha > 0, "alpha", spec.alpha, "a concentration > 0")
    require_name("optimizer_state", spec.optimizer_state, ("reset", "keep"))
    require_name("averaging", spec.averaging, ("uniform", "weighted"))
    require(0 <= spec.seed < 2**31, "seed", spec.seed, "a whole number in [0, 2**31)")
    for name, value in spec.hp.items():
        require(0 <= value < math.inf, f"hp {name}", value, "a finite number >= 0")

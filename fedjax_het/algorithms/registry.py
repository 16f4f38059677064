"""One line per method: how to build it, what it reads, and the protocol of its paper."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fedjax_het.algorithms.abavg import abavg
from fedjax_het.algorithms.apfl import (
    APFL_HP,
    APFL_OPTIONS,
    apfl,
    check_apfl,
    check_apfl_hp,
    fill_apfl,
)
from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.condensing import fill_condensing
from fedjax_het.algorithms.ditto import ditto
from fedjax_het.algorithms.dynafed import (
    DYNAFED_OPTIONS,
    check_dynafed,
    dynafed,
    dynafed_hyper_parameters,
    fill_dynafed,
)
from fedjax_het.algorithms.fedaf import (
    FEDAF_HP,
    FEDAF_OPTIONS,
    check_fedaf,
    check_fedaf_hp,
    fedaf,
)
from fedjax_het.algorithms.fedamp import (
    FEDAMP_OPTIONS,
    HEURFEDAMP_OPTIONS,
    check_fedamp,
    check_fedamp_hp,
    fedamp,
    fedamp_hyper_parameters,
    fill_fedamp,
    heurfedamp,
    heurfedamp_hyper_parameters,
)
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.fedbe import (
    FEDBE_OPTIONS,
    check_fedbe,
    check_fedbe_hp,
    fedbe,
    fedbe_hyper_parameters,
    fill_fedbe,
)
from fedjax_het.algorithms.fedbn import fedbn
from fedjax_het.algorithms.feddc import FEDDC_HP, feddc
from fedjax_het.algorithms.feddf import (
    FEDDF_OPTIONS,
    check_feddf,
    check_feddf_hp,
    feddf,
    feddf_hyper_parameters,
    fill_feddf,
)
from fedjax_het.algorithms.feddm import (
    FEDDM_OPTIONS,
    check_feddm,
    check_feddm_hp,
    feddm,
    feddm_hyper_parameters,
)
from fedjax_het.algorithms.feddyn import FEDDYN_HP, check_feddyn_hp, feddyn
from fedjax_het.algorithms.fedgen import (
    FEDGEN_OPTIONS,
    check_fedgen,
    check_fedgen_hp,
    fedgen,
    fedgen_hyper_parameters,
    fill_fedgen,
)
from fedjax_het.algorithms.fedmix import (
    FEDMIX_HP,
    FEDMIX_OPTIONS,
    NAIVEMIX_HP,
    NAIVEMIX_OPTIONS,
    check_fedmix,
    check_mix,
    check_mix_hp,
    fedmix,
    naivemix,
)
from fedjax_het.algorithms.fednova import fednova
from fedjax_het.algorithms.fedopt import (
    ADAPTIVE_HP,
    FEDAVGM_HP,
    FEDAVGM_OPTIONS,
    check_adaptive_hp,
    check_fedavgm,
    fedadam,
    fedavgm,
    fedyogi,
)
from fedjax_het.algorithms.fedprox import fedprox
from fedjax_het.algorithms.fine_tuning import (
    FINE_TUNING_OPTIONS,
    check_fine_tuning,
    fine_tuned,
)
from fedjax_het.algorithms.fsl import FSL_HP, FSL_OPTIONS, check_fsl, data_sharing, fsl
from fedjax_het.algorithms.moon import (
    MOON_HP,
    MOON_OPTIONS,
    check_moon,
    check_moon_hp,
    moon,
    moon_network,
)
from fedjax_het.algorithms.per_fedavg import (
    PER_FEDAVG_OPTIONS,
    check_per_fedavg,
    check_per_fedavg_hp,
    per_fedavg,
    per_fedavg_hyper_parameters,
)
from fedjax_het.algorithms.pfedme import (
    PFEDME_HP,
    PFEDME_OPTIONS,
    check_pfedme,
    check_pfedme_hp,
    pfedme,
)
from fedjax_het.algorithms.scaffold import check_scaffold, scaffold
from fedjax_het.algorithms.separate import check_separate, separate
from fedjax_het.common.errors import require, require_name
from fedjax_het.engine.local import optimizer_defaults
from fedjax_het.nn import Model
from fedjax_het.settings.protocols import PROTOCOLS


class Entry(NamedTuple):
    """A registered method.

    build(training, plan, **options) -> Algorithm; `hp` are its numeric hyper-parameters besides
    the local optimiser's and `server_lr`, or a function of the options and the number of clients
    that gives them. `check(options)` and `check_hp(hp)` raise ConfigError; `fill(options)` writes
    out what a preset stands for. `protocol`, one of `PROTOCOLS`, says what is not said otherwise.
    `bases` are the methods that this one can be put on, the usual one first: option "base". `build`
    then takes `base`, called as `base(training, plan)`; see `entry_of`.
    `server_data`: whether the server has examples of its own.
    `trains_locally` is false where clients condense their data instead. `scored` are the models
    that a client's own test may be for, the method's usual one first. `global_model`: whether the
    server has one model for all. `min_clients`: fewer are bad input. `network(model, **options)` is
    the network that the method trains in place of the run's.
    """

    build: Callable[..., Algorithm]
    description: str
    hp: "dict[str, float] | Callable[[dict, int], dict[str, float]]" = {}  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012
    check: Callable[[dict], None] = lambda options: None
    check_hp: Callable[[dict], None] = lambda hp: None
    fill: Callable[[dict], dict] = lambda options: options
    protocol: str = "dynafed"
    trains_locally: bool = True
    scored: tuple[str, ...] = ("global",)
    global_model: bool = True
    min_clients: int = 1
    bases: tuple[str, ...] = ()
    server_data: bool = False
    network: Callable[..., Model] = lambda model, **options: model

    @property
    def option_names(self) -> tuple[str, ...]:
        return (*self.options, *(("base",) if self.bases else ()))

    def over(self, base: "Entry") -> "Entry":
        """This method on another: with the options and hyper-parameters of both."""

        def parts(options: dict) -> tuple[dict, dict]:
            theirs = {name: value for name, value in options.items() if name in base.options}
            own = {name: value for name, value in options.items() if name in self.options}
            return theirs, own

        def build(training, plan, **options) -> Algorithm:
            theirs, own = parts(options)
            return self.build(training, plan, base=partial(base.build, **theirs), **own)

        def hp(options: dict, num_clients: int) -> dict[str, float]:
            theirs, own = parts(options)
            return base.own_hp(theirs, num_clients) | self.own_hp(own, num_clients)

        def check(options: dict) -> None:
            theirs, own = parts(options)
            base.check(theirs)
            self.check(own)

        def fill(options: dict) -> dict:
            theirs, own = parts(options)
            return base.fill(theirs) | self.fill(own)

        def check_hp(hp: dict) -> None:
            base.check_hp(hp)
            self.check_hp(hp)

        def network(model: Model, **options) -> Model:
            theirs, own = parts(options)
            return self.network(base.network(model, **theirs), **own)

        return self._replace(
            build=build,
            hp=hp,
            options={**base.options, **self.options},
            check=check,
            check_hp=check_hp,
            fill=fill,
            scored=base.scored,
            network=network,
        )

    def own_hp(self, options: dict, num_clients: int) -> dict[str, float]:
        return self.hp(options, num_clients) if callable(self.hp) else self.hp

    def hyper_parameters(
        self, local_optimizer: str | None, options: dict, num_clients: int
    ) -> dict[str, float]:
        """Every numeric hyper-parameter with its default."""
        own = self.own_hp(options, num_clients)
        local = optimizer_defaults(local_optimizer) if self.trains_locally else {}
        server = {"server_lr": 1.0} if self.global_model else {}
        return {**server, **local, **own}


def entry_of(algorithm: str, options: dict[str, Any]) -> Entry:
    """A method as its option "base" has it. Raises ConfigError for a base that it cannot have."""
    entry = ALGORITHMS[algorithm]
    if not entry.bases:
        return entry
    base = options.get("base", entry.bases[0])
    require_name("option base", base, entry.bases)
    return entry.over(ALGORITHMS[base])


# What a method that works on the server's model can be put on.
LOCAL_METHODS = (
    *("fedavg", "fedprox", "scaffold", "feddyn", "moon", "fednova", "fedavgm", "fedadam"),
    *("fedyogi", "feddc", "fedgen", "fedmix", "naivemix"),
)
# Those of which ABAVG's formula is the base with other weights, see there.
_AVERAGING_METHODS = tuple(
    name for name in LOCAL_METHODS if name not in ("fednova", "fedavgm", "fedadam", "fedyogi")
)

_FSL = Entry(
    fsl,
    "after each round the server learns from examples of its own (Mai et al., 2022)",
    hp=FSL_HP,
    options=FSL_OPTIONS,
    check=check_fsl,
    protocol="fsl",
    bases=LOCAL_METHODS,
    server_data=True,
)

ALGORITHMS: dict[str, Entry] = {
    "fedavg": Entry(
        fedavg,
        "average of the clients' models (McMahan et al., 2017)",
        scored=("global", "client"),
    ),
    "fedprox": Entry(
        fedprox,
        "FedAvg with a proximal pull to the global model (Li et al., 2020)",
        hp={"prox_mu": 0.002},
        scored=("global", "client"),
    ),
    "scaffold": Entry(
        scaffold,
        "control variates against client drift (Karimireddy et al., 2020)",
        options={"option": "II"},
        check=check_scaffold,
        scored=("global", "client"),
    ),
    "feddyn": Entry(
        feddyn,
        "each client's loss shifted so that all have one optimum in common (Acar et al., 2021)",
        hp=FEDDYN_HP,
        check_hp=check_feddyn_hp,
        scored=("global", "client"),
    ),
    "moon": Entry(
        moon,
        "pulls features to the global model's, away from the client's last ones (Li et al., 2021)",
        hp=MOON_HP,
        options=MOON_OPTIONS,
        check=check_moon,
        check_hp=check_moon_hp,
        scored=("global", "client"),
        network=moon_network,
    ),
    "fedbn": Entry(
        fedbn,
        "FedAvg of all but normalisation layers, which clients keep (Li et al., 2021)",
        scored=("global", "personal"),
    ),
    "fednova": Entry(
        fednova,
        "FedAvg of changes per unit of local work (Wang et al., 2020)",
        scored=("global", "client"),
    ),
    "fedavgm": Entry(
        fedavgm,
        "FedAvg with momentum at the server (Hsu et al., 2019)",
        hp=FEDAVGM_HP,
        options=FEDAVGM_OPTIONS,
        check=check_fedavgm,
        scored=("global", "client"),
    ),
    "fedadam": Entry(
        fedadam,
        "FedAvg with Adam at the server (Reddi et al., 2021)",
        hp=ADAPTIVE_HP,
        check_hp=check_adaptive_hp,
        scored=("global", "client"),
    ),
    "fedyogi": Entry(
        fedyogi,
        "FedAvg with Yogi at the server (Reddi et al., 2021)",
        hp=ADAPTIVE_HP,
        check_hp=check_adaptive_hp,
        scored=("global", "client"),
    ),
    "feddc": Entry(
        feddc,
        "clients' drift is learned and taken off, besides control variates (Gao et al., 2022)",
        hp=FEDDC_HP,
        scored=("global", "client"),
    ),
    "fedgen": Entry(
        fedgen,
        "clients also learn from features that a generator at the server makes (Zhu et al., 2021)",
        hp=fedgen_hyper_parameters,
        options=FEDGEN_OPTIONS,
        check=check_fedgen,
        check_hp=check_fedgen_hp,
        fill=fill_fedgen,
    ),
    "fedmix": Entry(
        fedmix,
        "mixup with other clients' averaged data, to first order (Yoon et al., 2021)",
        hp=FEDMIX_HP,
        options=FEDMIX_OPTIONS,
        check=check_fedmix,
        check_hp=check_mix_hp,
        scored=("global", "client"),
    ),
    "naivemix": Entry(
        naivemix,
        "mixup with other clients' averaged data (Yoon et al., 2021)",
        hp=NAIVEMIX_HP,
        options=NAIVEMIX_OPTIONS,
        check=check_mix,
        check_hp=check_mix_hp,
        scored=("global", "client"),
    ),
    "dynafed": Entry(
        dynafed,
        "FedAvg, fine-tuned on data synthesised from the global trajectory (Pi et al., 2023)",
        hp=dynafed_hyper_parameters,
        options=DYNAFED_OPTIONS,
        check=check_dynafed,
        fill=fill_dynafed,
        bases=LOCAL_METHODS,
    ),
    "feddf": Entry(
        feddf,
        "the average learns the mean logits of the clients' models (Lin et al., 2020)",
        hp=feddf_hyper_parameters,
        options=FEDDF_OPTIONS,
        check=check_feddf,
        check_hp=check_feddf_hp,
        fill=fill_feddf,
        bases=LOCAL_METHODS,
        server_data=True,
    ),
    "fedbe": Entry(
        fedbe,
        "FedDF from a Bayesian ensemble of clients and models drawn between (Chen & Chao, 2021)",
        hp=fedbe_hyper_parameters,
        options=FEDBE_OPTIONS,
        check=check_fedbe,
        check_hp=check_fedbe_hp,
        fill=fill_fedbe,
        bases=LOCAL_METHODS,
        server_data=True,
    ),
    "abavg": Entry(
        abavg,
        "clients' models averaged by their accuracy on the server's examples (Xiao et al., 2021)",
        bases=_AVERAGING_METHODS,
        server_data=True,
    ),
    "feddm": Entry(
        feddm,
        "clients condense by distribution matching, the server trains on that (Xiong et al., 2023)",
        hp=feddm_hyper_parameters,
        options=FEDDM_OPTIONS,
        check=check_feddm,
        check_hp=check_feddm_hp,
        fill=fill_condensing,
        protocol="fedaf",
        trains_locally=False,
    ),
    "fedaf": Entry(
        fedaf,
        "FedDM with the help of peers' logits, and soft labels for the server (Wang et al., 2024)",
        hp=FEDAF_HP,
        options=FEDAF_OPTIONS,
        check=check_fedaf,
        check_hp=check_fedaf_hp,
        fill=fill_condensing,
        protocol="fedaf",
        trains_locally=False,
    ),
    "fsl": _FSL,
    "fsl_p": _FSL._replace(
        build=partial(fsl, incremental=False),
        description="FSL whose server learns beside the clients instead of after them "
        "(Mai et al., 2022)",
    ),
    "data_sharing": Entry(
        data_sharing,
        "clients train on the server's examples besides their own (Zhao et al., 2018)",
        protocol="fsl",
        bases=LOCAL_METHODS,
        server_data=True,
    ),
    "separate": Entry(
        separate,
        "every client trains alone",
        options={"initialisation": "shared"},
        check=check_separate,
        protocol="fedamp",
        scored=("client",),
        global_model=False,
    ),
    "fedavg_ft": Entry(
        partial(fine_tuned, base=fedavg),
        "FedAvg, scored after fine-tuning at each client (Wang et al., 2019)",
        options=FINE_TUNING_OPTIONS,
        check=check_fine_tuning,
        protocol="fedamp",
        scored=("tuned",),
    ),
    "fedprox_ft": Entry(
        partial(fine_tuned, base=fedprox),
        "FedProx, scored after fine-tuning at each client (Wang et al., 2019)",
        hp={"prox_mu": 0.002},
        options=FINE_TUNING_OPTIONS,
        check=check_fine_tuning,
        protocol="fedamp",
        scored=("tuned",),
    ),
    "fedamp": Entry(
        fedamp,
        "each client receives its own mixture of similar models (Huang et al., 2021)",
        hp=fedamp_hyper_parameters,
        options=FEDAMP_OPTIONS,
        check=check_fedamp,
        check_hp=check_fedamp_hp,
        fill=fill_fedamp,
        protocol="fedamp",
        scored=("client", "received"),
        global_model=False,
        min_clients=2,
    ),
    "heurfedamp": Entry(
        heurfedamp,
        "FedAMP with weights by the models' cosines (Huang et al., 2021)",
        hp=heurfedamp_hyper_parameters,
        options=HEURFEDAMP_OPTIONS,
        check=check_fedamp,
        check_hp=check_fedamp_hp,
        fill=fill_fedamp,
        protocol="fedamp",
        scored=("client", "received"),
        global_model=False,
        min_clients=2,
    ),
    "apfl": Entry(
        apfl,
        "each client mixes a model of its own with the global one (Deng et al., 2020)",
        hp=APFL_HP,
        options=APFL_OPTIONS,
        check=check_apfl,
        check_hp=check_apfl_hp,
        fill=fill_apfl,
        protocol="fedamp",
        scored=("personal",),
    ),
    "ditto": Entry(
        ditto,
        "FedAvg, and a model of each client's own that is pulled to it (Li et al., 2021)",
        hp={"ditto_lambda": 1.0},
        protocol="fedamp",
        scored=("personal",),
    ),
    "pfedme": Entry(
        pfedme,
        "clients' models are proximal points of the global one (Dinh et al., 2020)",
        hp=PFEDME_HP,
        options=PFEDME_OPTIONS,
        check=check_pfedme,
        check_hp=check_pfedme_hp,
        protocol="fedamp",
        scored=("personal",),
    ),
    "per_fedavg": Entry(
        per_fedavg,
        "FedAvg of the loss after one step at each client (Fallah et al., 2020)",
        hp=per_fedavg_hyper_parameters,
        options=PER_FEDAVG_OPTIONS,
        check=check_per_fedavg,
        check_hp=check_per_fedavg_hp,
        protocol="fedamp",
        scored=("tuned",),
    ),
}

_BUILT_IN = frozenset(ALGORITHMS)


def register(name: str, entry: Entry) -> None:
    """Make a method of one's own known to runs, sweeps and reports, as long as this process lasts.

    A name of one's own may be given again, as when a notebook's cell is run twice: what is run from
    then on is the new method. Results on disk are named by the settings, the method's name among
    them, not by its code: give a changed method a new name or a new folder.

    Raises: ConfigError if `name` is a method of the package or no word, or if the entry names a
      protocol or a base that does not exist.
    """
    require(name not in _BUILT_IN, "name", name, "one that no method of the package has")
    require(name.isidentifier(), "name", name, "letters, digits and underscores")
    require_name("protocol", entry.protocol, PROTOCOLS)
    for base in entry.bases:
        require_name("base", base, ALGORITHMS)
        ok = ALGORITHMS[base].global_model and not ALGORITHMS[base].bases
        require(ok, "base", base, "a method with one global model that is on no other")
    ALGORITHMS[name] = entry

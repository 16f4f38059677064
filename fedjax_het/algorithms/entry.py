"""What is known of a method besides its function: one record, at the end of the method's file."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple, get_type_hints

from fedjax_het.algorithms.checking import checked_algorithm
from fedjax_het.algorithms.contract import Algorithm
from fedjax_het.common.doors import of_kind
from fedjax_het.common.errors import named_within, require, require_name
from fedjax_het.common.records import Bounds, Count, Number, Record, as_dict, numbers_of, read
from fedjax_het.engine.contract import ContractError
from fedjax_het.engine.local import LocalTraining
from fedjax_het.engine.optimizers import optimizer_numbers
from fedjax_het.engine.plan import Plan
from fedjax_het.nn import Model

SERVER_LR = {"server_lr": Number(1.0, Bounds(0))}


class Rule(NamedTuple):
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
        pairs = ((protocol, self.protocols), (dataset, self.datasets), (model, self.models))
        return all(not names or name in names for name, names in pairs)


@dataclass(frozen=True)
class NoOptions(Record):
    """Of a method without choices."""


@dataclass(frozen=True)
class NoNumbers(Record):
    """Of a method without numeric hyper-parameters of its own."""


def no_remarks(run: Any, entry: "Entry") -> Sequence[str]:
    return ()


Dashes = tuple[float, tuple[float, ...]]  # as matplotlib has them: offset, lengths on and off


@dataclass(frozen=True)
class Entry:
    """A method that can be named.

    build(training, plan) -> Algorithm; with `options=`, the record, where the method has any, and
    with `base=`, called as `base(training, plan)`, where it is put over another.
    """

    name: str
    build: Callable[..., Algorithm]
    description: str
    paper: str = ""
    options: type[Record] = NoOptions
    """Its static choices."""
    numbers: type[Record] | Callable[[Any, int], Record] = NoNumbers
    """Its numeric hyper-parameters besides the local optimiser's and `server_lr`; or a function of
    its options and the number of clients that gives the record."""
    protocol: str = "dynafed"
    """Whose settings hold where nothing else is said."""
    rules: tuple[Rule, ...] = ()
    """What holds for this method under a protocol, on a data set, of a network; after the
    protocol's own rules."""
    colour: str = ""
    """In every figure, as hexadecimal digits; "": one of a few that such methods share."""
    dashes: Dashes | None = None
    """For a method whose curve often lies on another's: that shows through the gaps."""
    server_step: Literal["mean", "own"] = "mean"
    """Whether its server takes a step of `server_lr` along the clients' mean change, or what
    `server_lr` scales is a step of its own kind."""
    refines: Literal["nothing", "model", "average"] = "nothing"
    """What it needs of the method that it is put over (option "base"): "model": that there is one
    global model, on which it works after each round; "average": besides, that this model is
    w + server_lr sum p_k (w_k - w), in which it takes other weights."""
    refinable: Literal["nothing", "model", "average"] = "nothing"
    """What it is for methods that are put over others: "average" is also a "model"."""
    needs: tuple[Literal["server_data", "proxy_data", "averages", "norms"], ...] = ()
    """Data besides the clients' own: examples of the server's; such that stand for data of its own,
    which no client holds; averages of clients' examples. And normalisation layers of the network,
    without which it is another method: a run says so."""
    trains_locally: bool = True
    """False where clients condense their data instead."""
    scored: tuple[str, ...] = ("global",)
    """The models that a client's own test may be for, the method's usual one first."""
    global_model: bool = True
    """Whether the server has one model for all."""
    surveys: bool = False
    """Whether it has a survey of its own where it has no global model, see `Algorithm.survey`."""
    min_clients: Count = 1
    remarks: "Callable[[Any, Entry], Sequence[str]]" = no_remarks
    """(run, entry) -> what of its settings does nothing, or not what one would think, a line each,
    which is told where the run begins. Raises ConfigError for numbers that do not fit its options.
    The run is a resolved `RunSpec`; the entry has its base."""
    network: Callable[..., Model] | None = None
    """(model[, options=]) -> the network that it trains in place of the run's."""
    base: "Entry | None" = field(default=None, repr=False)
    """What it is put over, in a run; see `over`."""

    @property
    def server_data(self) -> bool:
        return "server_data" in self.needs or "proxy_data" in self.needs

    @property
    def has_base(self) -> bool:
        return self.refines != "nothing"

    def can_refine(self, other: "Entry") -> bool:
        """Whether it can be put over another method."""
        wanted = {"nothing": (), "model": ("model", "average"), "average": ("average",)}
        return other.refinable in wanted[self.refines]

    def over(self, base: "Entry") -> "Entry":
        """This method on another: with the options and hyper-parameters of both."""
        return replace(self, base=base, scored=base.scored)

    # --- its choices and numbers, as a run's settings hold them -------------------------------

    @property
    def option_names(self) -> tuple[str, ...]:
        own = tuple(as_dict(self.options()))
        return (*self._base_names, *own, *(("base",) if self.has_base else ()))

    def fill(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """All options with what presets and defaults say, "base" left out. Raises ConfigError."""
        for name in options:
            require_name("option", name, self.option_names)
        theirs, own = self._parts(options)
        of_base = self.base.fill(theirs) if self.base else {}
        return {**of_base, **as_dict(read(self.options, own))}

    def own_options(self, options: Mapping[str, Any]) -> Record:
        """The record of its own of these options, without its base's. Raises ConfigError."""
        return read(self.options, self._parts(options)[1])

    def hyper_parameters(
        self, local_optimizer: str | None, options: Mapping[str, Any], num_clients: int
    ) -> dict[str, Number]:
        """Every numeric hyper-parameter, with its default and its range."""
        local = {}
        if self.trains_locally and local_optimizer is not None:
            local = optimizer_numbers(local_optimizer)
        server = SERVER_LR if self.global_model else {}
        return {**server, **local, **self.own_numbers(options, num_clients)}

    def own_numbers(self, options: Mapping[str, Any], num_clients: int) -> dict[str, Number]:
        """Those of its record, and of its base's."""
        theirs, own = self._parts(options)
        of_base = self.base.own_numbers(theirs, num_clients) if self.base else {}
        return {**of_base, **numbers_of(self.numbers_record(own, num_clients))}

    def numbers_record(self, options: Mapping[str, Any], num_clients: int) -> Record:
        """Its own hyper-parameters' defaults under these of its own options."""
        if isinstance(self.numbers, type):
            return self.numbers()
        return self.numbers(read(self.options, options), num_clients)

    # --- the method itself --------------------------------------------------------------------

    def make(self, training: LocalTraining, plan: Plan, options: Mapping[str, Any]) -> Algorithm:
        """The algorithm of these options. Raises ConfigError."""
        theirs, _ = self._parts(options)
        static: dict[str, Any] = {}
        if self.options is not NoOptions:
            static["options"] = self.own_options(options)
        if self.has_base:
            assert self.base is not None, "see `entry_of`"
            static["base"] = partial(self.base.make, options=theirs)
        self._require_arguments(static)
        try:
            with named_within("options", as_dict(self.options())):
                built = self.build(training, plan, **static)
        except ContractError as error:
            named = str(error).startswith("method ")
            raise ContractError(f"{'' if named else f'method {self.name!r}: '}{error}") from error
        return checked_algorithm(self.name, built)

    def network_of(self, model: Model, options: Mapping[str, Any]) -> Model:
        """The network that the method trains where a run asks for `model`."""
        theirs, _ = self._parts(options)
        if self.base is not None:
            model = self.base.network_of(model, theirs)
        if self.network is None:
            return model
        if self.options is NoOptions:
            return self.network(model)
        return self.network(model, options=self.own_options(options))

    @property
    def functions(self) -> tuple[Any, ...]:
        """What tells it from another method of the same name, see `register_method`."""
        of_base = self.base.functions if self.base else ()
        return (self.build, self.network, *of_base)

    @property
    def _base_names(self) -> tuple[str, ...]:
        return self.base.option_names if self.base else ()

    def _parts(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """(the base's options, its own); of a name that both have, each gets the value."""
        own_names = as_dict(self.options())
        theirs = {name: value for name, value in options.items() if name in self._base_names}
        own = {name: value for name, value in options.items() if name in own_names}
        return theirs, own

    def _require_arguments(self, static: Mapping[str, Any]) -> None:
        try:
            inspect.signature(self.build).bind(None, None, **static)
        except TypeError:
            wanted = ", ".join(("training", "plan", *static))
            raise ContractError(
                f"method {self.name!r}: build takes {inspect.signature(self.build)}: expected "
                f"({wanted})"
            ) from None


def checked_entry(entry: Entry) -> Entry:
    """The entry. Raises ConfigError for facts that cannot be."""
    for argument, kind in get_type_hints(Entry, include_extras=True).items():
        if argument not in ("options", "numbers", "base"):  # which say more below
            of_kind(argument, getattr(entry, argument), kind)
    for argument, valid in (
        ("server_step", ("mean", "own")),
        ("refines", ("nothing", "model", "average")),
        ("refinable", ("nothing", "model", "average")),
    ):
        require_name(argument, getattr(entry, argument), valid)
    for name in entry.needs:
        require_name("needs", name, ("server_data", "proxy_data", "averages", "norms"))
    require(callable(entry.build), "build", entry.build, "a function of (training, plan)")
    ok = isinstance(entry.options, type) and issubclass(entry.options, Record)
    require(ok, "options", entry.options, "a frozen dataclass that is a `Record`")
    ok = not isinstance(entry.numbers, type) or issubclass(entry.numbers, Record)
    require(ok and callable(entry.numbers), "numbers", entry.numbers, "a `Record`, or its maker")
    ok = entry.refinable == "nothing" or (entry.global_model and not entry.has_base)
    require(ok, "refinable", entry.refinable, "'nothing', or one global model and no base")
    hexadecimal = re.fullmatch("(#[0-9a-fA-F]{6})?", entry.colour)
    require(hexadecimal is not None, "colour", entry.colour, "hexadecimal digits: '#D55E00'")
    require(len(entry.scored) > 0, "scored", entry.scored, "at least one model")
    return entry

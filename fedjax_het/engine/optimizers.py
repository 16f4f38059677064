"""The optimisers that clients may have, by name: what of optax makes sense, and users' own.

One entry is made of a function's signature: its arguments with numbers as defaults are numeric
hyper-parameters, `local_<argument>`, its truth values are the setting `optimizer_options`.
"""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_het.common.doors import door
from fedjax_het.common.errors import ConfigError, require
from fedjax_het.common.records import Bounds, Number, above
from fedjax_het.common.registry import Registry
from fedjax_het.common.signatures import REQUIRED, first_line, parameters_of
from fedjax_het.nn.digest import hash_of_traces

Rate = Any  # a scalar, or a function of the optimiser's steps so far that returns one
OWN = "user"  # the name of an optimiser that is passed to the run itself


class LocalOptimizer(NamedTuple):
    """An optimiser that clients may have.

    make(learning_rate, **numbers and options) -> optax.GradientTransformation; the rate and the
      numbers are traced, and the rate may be a schedule.
    numbers: hyper-parameters of every run that has it, by their names in `hp`.
    optional: such that are there only where they are given; its own default holds where not.
    options: its static truth values and their defaults.
    flat: whether it treats every weight alike, so that all may be one row.
    """

    name: str
    make: Callable[..., optax.GradientTransformation]
    numbers: dict[str, Number]
    description: str = ""
    optional: dict[str, Number] = {}  # noqa: RUF012
    options: dict[str, bool] = {}  # noqa: RUF012
    flat: bool = False


class Details(NamedTuple):
    """What local training is besides its optimiser's name; static.

    options: of the optimiser, those that are not as by default.
    numbers: of `hp`, those of local training that are there only where they are given.
    schedule: of the rate over a client's steps, one of `SCHEDULES`; None: it is constant.
    accumulation: minibatches of a step.
    steps: minibatches of a round; None: they are those of its epochs.
    own: of the optimiser "user": a `GradientTransformation`, or a function of `hp` that makes one.
    """

    options: tuple[tuple[str, bool], ...] = ()
    numbers: tuple[str, ...] = ()
    schedule: str | None = None
    accumulation: int = 1
    steps: int | None = None
    own: Any = None


PREFIX = "local_"
RATE = f"{PREFIX}lr"
_FADING = Bounds(0, 1, open_high=True)  # 1 would forget nothing
_BOUNDS = {
    **dict.fromkeys(("b1", "b2", "b3", "decay", "momentum", "rho"), _FADING),
    "initial_accumulator_value": Bounds(0),
}
# Of any optimiser: numbers that are there only where they are given; see `transformation`.
CLIP_VALUE, CLIP_NORM, DECAY = (
    f"{PREFIX}{name}" for name in ("clip_value", "clip_norm", "weight_decay")
)
OF_ANY = {
    CLIP_VALUE: Number(1.0, above(0)),
    CLIP_NORM: Number(10.0, above(0)),
    DECAY: Number(1e-4, Bounds(0)),
}


def of_signature(
    name: str,
    make: Callable[..., optax.GradientTransformation],
    rate: float,
    description: str = "",
    *,
    old: Mapping[str, float] | None = None,
    flat: bool = False,
) -> LocalOptimizer:
    """The entry of a function `make(learning_rate, ...)`.

    Its arguments with a number as default are hyper-parameters, those with a truth value options.
    One that is None, and is of a name that others have as a number, is an optional number. All else
    (masks, types) stays as it is.
    old: the numbers that runs have always had, with their defaults; the others are then optional.
    """
    numbers = {RATE: Number(rate, Bounds(0))}
    optional: dict[str, Number] = {}
    options: dict[str, bool] = {}
    for argument, default in parameters_of(make, besides=("learning_rate",)).items():
        called = f"{PREFIX}{argument}"
        if isinstance(default, bool):
            if not argument.endswith("mask"):
                options[argument] = default
        elif isinstance(default, int | float):
            number = Number(float(default), _BOUNDS.get(argument, Bounds(0)))
            (numbers if old is None or called in old else optional)[called] = number
        elif default is None and argument in _BOUNDS:
            optional[called] = Number(0.9, _BOUNDS[argument])
    for called, value in (old or {}).items():
        numbers[called] = numbers[called]._replace(default=value)
    return LocalOptimizer(name, make, numbers, description, optional, options, flat)


def _plain(learning_rate: Rate) -> optax.GradientTransformation:
    return optax.sgd(learning_rate)


def _momentum(learning_rate: Rate, momentum: float = 0.9) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=momentum)


def _nesterov(learning_rate: Rate, momentum: float = 0.9) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=momentum, nesterov=True)


def _sm3(learning_rate: Rate, momentum: float = 0.9) -> optax.GradientTransformation:
    """optax's, whose own rate is no schedule."""
    return optax.chain(optax.scale_by_sm3(momentum), optax.scale_by_learning_rate(learning_rate))


# Name, the rate's default, whether every weight is treated alike, and what it is.
_OF_OPTAX = (
    ("rmsprop", 1e-3, True, "gradients by the root of their mean square (Hinton, 2012)"),
    ("adagrad", 1e-2, True, "gradients by the root of the sum of squares (Duchi et al., 2011)"),
    ("adadelta", 1.0, True, "steps as long as the last ones were (Zeiler, 2012)"),
    ("adabelief", 1e-3, True, "Adam by how far gradients are from their mean (2020)"),
    ("nadam", 1e-3, True, "Adam with Nesterov's momentum (Dozat, 2016)"),
    ("nadamw", 1e-3, True, "nadam with decoupled weight decay"),
    ("yogi", 1e-2, True, "Adam whose second moment moves by bounded amounts (2018)"),
    ("lion", 1e-4, True, "signs of a momentum, decoupled weight decay (Chen et al., 2023)"),
    ("lamb", 1e-3, False, "AdamW, layer by layer as long as the weights ask (You et al., 2019)"),
    ("lars", 0.1, False, "momentum, layer by layer as long as the weights ask (You et al., 2017)"),
    ("radam", 1e-3, True, "Adam with a rectified second moment (Liu et al., 2019)"),
    ("adamax", 1e-3, True, "Adam by the largest gradient (Kingma and Ba, 2015)"),
    ("adamaxw", 1e-3, True, "adamax with decoupled weight decay"),
    ("amsgrad", 1e-3, True, "Adam by its largest second moment (Reddi et al., 2018)"),
    ("novograd", 1e-3, False, "Adam with a second moment for each layer (Ginsburg et al., 2019)"),
    ("adan", 1e-3, True, "Adam with Nesterov's momentum of three moments (Xie et al., 2022)"),
    ("sign_sgd", 1e-3, True, "signs of gradients (Bernstein et al., 2018)"),
)


def _built_in() -> list[LocalOptimizer]:
    """Those that this optax has."""
    known = {
        name: of_signature(name, getattr(optax, name), rate, words, flat=flat)
        for name, rate, flat, words in _OF_OPTAX
        if hasattr(optax, name)
    }
    return [
        of_signature("sgd", _plain, 0.01, "plain steps along the gradient"),
        of_signature("momentum", _momentum, 0.01, "SGD with heavy-ball momentum", flat=True),
        of_signature("adam", optax.adam, 1e-3, "Adam (Kingma and Ba, 2015)", old={}, flat=True),
        of_signature(
            "adamw",
            optax.adamw,
            1e-3,
            "Adam with decoupled weight decay (Loshchilov and Hutter, 2019)",
            old={DECAY: 1e-4},
            flat=True,
        ),
        of_signature("nesterov", _nesterov, 0.01, "SGD with Nesterov's momentum", flat=True),
        *known.values(),
        of_signature("sm3", _sm3, 0.1, "Adagrad by rows and columns (Anil et al., 2019)"),
    ]


OPTIMIZERS: Registry[LocalOptimizer] = Registry(
    "local optimiser", _built_in(), argument="local_optimizer"
)


@door
def register_optimizer(name: str, make: Any, description: str = "") -> None:
    """Make an optimiser of one's own known to runs, sweeps and reports, as long as this process
    lasts.

        def centred(learning_rate, decay=0.99):
            return optax.rmsprop(learning_rate, decay, centered=True)

        register_optimizer("centred", centred)
        RunSpec("fedavg", "digits", local_optimizer="centred", hp={"local_decay": 0.9})

    make: a function `make(learning_rate, ...)` that returns an `optax.GradientTransformation`; its
        other arguments have defaults. Numbers are hyper-parameters `local_<argument>`, traced;
        truth values are `optimizer_options`. The rate is 0.01 by default, or as the signature says.
    description: for `fedjax-het list`; by default the first line of the docstring.

    Raises: ConfigError for a name of the package's own or no word, and for what is no such
      function.
    """
    expected = "a function of learning_rate that returns an optax.GradientTransformation"
    parameters = parameters_of(make) if callable(make) else {}
    ok = "learning_rate" in parameters and not isinstance(make, optax.GradientTransformation)
    require(ok and not inspect.isclass(make), "make", make, expected)
    require(name != OWN, "name", name, "another one: a run's own object has this one")
    for argument, default in parameters.items():
        fits = default is not REQUIRED or argument == "learning_rate"
        require(fits, f"make's argument {argument}", "without a default", "one with a default")
    rate = parameters["learning_rate"]
    usual = float(rate) if isinstance(rate, int | float) else 0.01
    entry = of_signature(name, make, usual, description or first_line(make))
    numbers = {number: of.default for number, of in entry.numbers.items()}
    check_transformation(name, partial(_made, entry, {}), numbers)
    OPTIMIZERS.add(entry)


def optimizer_numbers(name: str) -> dict[str, Number]:
    """The numeric hyper-parameters that a run with this optimiser always has."""
    return {} if name == OWN else OPTIMIZERS[name].numbers


def optional_numbers(name: str, given: Mapping[str, Any]) -> dict[str, Number]:
    """Those that it has where they are given. The user's own reads what its function does, so that
    any `local_...` of `given` may be one."""
    if name == OWN:
        read = {each: Number(0.0, Bounds()) for each in given if each.startswith(PREFIX)}
        return {**read, RATE: Number(0.01, Bounds(0)), **OF_ANY}
    entry = OPTIMIZERS[name]
    return {
        each: of for each, of in {**OF_ANY, **entry.optional}.items() if each not in entry.numbers
    }


def transformation(
    name: str, details: Details, hp: Any, factor: Callable[[Any], Any] | None = None
) -> optax.GradientTransformation:
    """The optimiser of these numbers.

    Where they are given the gradient is first clipped, entry by entry (`local_clip_value`), then as
    a whole (`local_clip_norm`, of all layers together), then has `local_weight_decay` times the
    weights added: L2, as in papers on SGD. Of adamw, nadamw, adamaxw, lion, lamb, lars, novograd
    and adan `local_weight_decay` is their own argument: decoupled from the gradient's moments (of
    lars: added to the gradient that is scaled).

    factor(steps): of the rate, by the optimiser's own count.
    """
    if name == OWN:
        own: tuple[str, ...] = ()
        made = own_transformation(details.own, hp)
    else:
        entry = OPTIMIZERS[name]
        made, own = (
            _made(entry, dict(details.options), hp, factor, details.numbers),
            (*entry.numbers,),
        )
    before = [
        of(hp[number])
        for number, of in (
            (CLIP_VALUE, optax.clip),
            (CLIP_NORM, optax.clip_by_global_norm),
            (DECAY, optax.add_decayed_weights),
        )
        if number in details.numbers and number not in own
    ]
    return optax.chain(*before, made) if before else made


def _made(
    entry: LocalOptimizer,
    options: Mapping[str, bool],
    hp: Any,
    factor: Callable[[Any], Any] | None = None,
    given: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    rate: Rate = hp[RATE]
    if factor is not None:
        rate = lambda count: hp[RATE] * factor(count)  # noqa: E731
    read = [*entry.numbers, *(name for name in entry.optional if name in given)]
    numbers = {name.removeprefix(PREFIX): hp[name] for name in read if name != RATE}
    return entry.make(rate, **numbers, **options)


def own_transformation(own: Any, hp: Any) -> optax.GradientTransformation:
    """What a user's object is with these numbers."""
    return own if isinstance(own, optax.GradientTransformation) else own(hp)


def check_transformation(
    name: str, make: Callable[[Any], optax.GradientTransformation], numbers: Mapping[str, float]
) -> None:
    """Raise ConfigError, in one line, unless `make(hp)` is a transformation whose updates are as
    the gradients, and whose state keeps its shapes. Cost: an abstract evaluation."""
    what, params = f"optimizer {name!r}", _small_tree()

    def steps(hp, params):
        made = make(hp)
        require(
            isinstance(made, optax.GradientTransformation),
            what,
            made,
            "an optax.GradientTransformation, or a function of hp that returns one",
        )
        state = made.init(params)
        return state, made.update(params, state, params)

    try:
        hp = {each: jnp.float32(value) for each, value in numbers.items()}
        state, (updates, after) = jax.eval_shape(steps, hp, params)
    except ConfigError:
        raise
    except KeyError as error:
        given = ", ".join(numbers) or "none is given"
        said = f"{what} reads hp[{error}]: expected it among the hyper-parameters ({given})"
        raise ConfigError(said) from error
    except Exception as error:  # of a user's function
        raise ConfigError(f"{what} fails: {type(error).__name__}: {error}") from error
    ok = _kinds(updates) == _kinds(params)
    require(ok, what, "updates of other shapes", "updates of the shapes of the gradients")
    ok = _kinds(state) == _kinds(after)
    require(ok, what, "a state that changes its shapes", "one that keeps them")


def optimizer_digest(own: Any, hp: Mapping[str, float]) -> str:
    """16 hexadecimal digits: the hash of what a user's object computes, from the traces of its
    `init` and `update` on a small tree, the numbers of `hp` being traced, with the arrays that they
    close over. Names do not enter, nor how the state is nested. Another version of jax or optax may
    give another digest. Cost: two traces."""
    numbers = {name: jnp.float32(value) for name, value in hp.items()}
    params = _small_tree()

    def begun(hp, params):
        return jax.tree.leaves(own_transformation(own, hp).init(params))

    def updated(hp, state, params):
        updates, state = own_transformation(own, hp).update(params, state, params)
        return updates, jax.tree.leaves(state)

    state = jax.eval_shape(lambda hp: own_transformation(own, hp).init(params), numbers)
    traces = jax.make_jaxpr(begun)(numbers, params), jax.make_jaxpr(updated)(numbers, state, params)
    return hash_of_traces(traces).hexdigest()[:16]


def _small_tree() -> dict[str, Any]:
    return {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}


def _kinds(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

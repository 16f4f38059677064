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

from fedjax_het.nn.network import hash_jaxprs
from fedjax_het.utils.config import (
    Bounds,
    HyperParameter,
    validate_arguments,
)
from fedjax_het.utils.errors import ConfigError, require
from fedjax_het.utils.registry import REQUIRED, Registry, get_keyword_parameters, get_summary_line

LearningRate = Any  # a scalar, or a function of the optimiser's steps so far that returns one
USER_OBJECT = "user"  # the name of an optimiser that is passed to the run itself


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
    hyperparameters: dict[str, HyperParameter]
    description: str = ""
    optional_hyperparameters: dict[str, HyperParameter] = {}  # noqa: RUF012
    options: dict[str, bool] = {}  # noqa: RUF012
    is_elementwise: bool = False


class LocalTrainingOptions(NamedTuple):
    """What local training is besides its optimiser's name; static.

    options: of the optimiser, those that are not as by default.
    numbers: of `hp`, those of local training that are there only where they are given.
    schedule: of the rate over a client's steps, one of `LR_SCHEDULES`; None: it is constant.
    accumulation: minibatches of a step.
    steps: minibatches of a round; None: they are those of its epochs.
    own: of the optimiser "user": a `GradientTransformation`, or a function of `hp` that makes one.
    """

    optimizer_options: tuple[tuple[str, bool], ...] = ()
    optional_hyperparameters: tuple[str, ...] = ()
    lr_schedule: str | None = None
    accumulation_steps: int = 1
    num_steps: int | None = None
    user_optimizer: Any = None


LOCAL_PREFIX = "local_"
LR_NAME = f"{LOCAL_PREFIX}lr"
_DECAY_BOUNDS = Bounds(0, 1, open_high=True)  # 1 would forget nothing
_BOUNDS = {
    **dict.fromkeys(("b1", "b2", "b3", "decay", "momentum", "rho"), _DECAY_BOUNDS),
    "initial_accumulator_value": Bounds(0),
}
# Of any optimiser: numbers that are there only where they are given; see `transformation`.
CLIP_VALUE_NAME, CLIP_NORM_NAME, WEIGHT_DECAY_NAME = (
    f"{LOCAL_PREFIX}{name}" for name in ("clip_value", "clip_norm", "weight_decay")
)
COMMON_HYPERPARAMETERS = {
    CLIP_VALUE_NAME: HyperParameter(1.0, Bounds(0, open_low=True)),
    CLIP_NORM_NAME: HyperParameter(10.0, Bounds(0, open_low=True)),
    WEIGHT_DECAY_NAME: HyperParameter(1e-4, Bounds(0)),
}


def optimizer_from_signature(
    name: str,
    make: Callable[..., optax.GradientTransformation],
    default_lr: float,
    description: str = "",
    *,
    fixed_hyperparameters: Mapping[str, float] | None = None,
    is_elementwise: bool = False,
) -> LocalOptimizer:
    """The entry of a function `make(learning_rate, ...)`.

    Its arguments with a number as default are hyper-parameters, those with a truth value options.
    One that is None, and is of a name that others have as a number, is an optional number. All else
    (masks, types) stays as it is.
    old: the numbers that runs have always had, with their defaults; the others are then optional.
    """
    hyperparameters = {LR_NAME: HyperParameter(default_lr, Bounds(0))}
    optional: dict[str, HyperParameter] = {}
    options: dict[str, bool] = {}
    for argument, default in get_keyword_parameters(make, exclude=("learning_rate",)).items():
        hp_name = f"{LOCAL_PREFIX}{argument}"
        if isinstance(default, bool):
            if not argument.endswith("mask"):
                options[argument] = default
        elif isinstance(default, int | float):
            hyperparameter = HyperParameter(float(default), _BOUNDS.get(argument, Bounds(0)))
            (
                hyperparameters
                if fixed_hyperparameters is None or hp_name in fixed_hyperparameters
                else optional
            )[hp_name] = hyperparameter
        elif default is None and argument in _BOUNDS:
            optional[hp_name] = HyperParameter(0.9, _BOUNDS[argument])
    for hp_name, value in (fixed_hyperparameters or {}).items():
        hyperparameters[hp_name] = hyperparameters[hp_name]._replace(default=value)
    return LocalOptimizer(
        name, make, hyperparameters, description, optional, options, is_elementwise
    )


def _sgd(learning_rate: LearningRate) -> optax.GradientTransformation:
    return optax.sgd(learning_rate)


def _momentum(learning_rate: LearningRate, momentum: float = 0.9) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=momentum)


def _nesterov(learning_rate: LearningRate, momentum: float = 0.9) -> optax.GradientTransformation:
    return optax.sgd(learning_rate, momentum=momentum, nesterov=True)


def _sm3(learning_rate: LearningRate, momentum: float = 0.9) -> optax.GradientTransformation:
    """optax's, whose own rate is no schedule."""
    return optax.chain(optax.scale_by_sm3(momentum), optax.scale_by_learning_rate(learning_rate))


# Name, the rate's default, whether every weight is treated alike, and what it is.
_OPTAX_OPTIMIZERS = (
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


def _make_builtin_optimizers() -> list[LocalOptimizer]:
    """Those that this optax has."""
    optax_optimizers = {
        name: optimizer_from_signature(
            name, getattr(optax, name), default_lr, description, is_elementwise=is_elementwise
        )
        for name, default_lr, is_elementwise, description in _OPTAX_OPTIMIZERS
        if hasattr(optax, name)
    }
    return [
        optimizer_from_signature("sgd", _sgd, 0.01, "plain steps along the gradient"),
        optimizer_from_signature(
            "momentum", _momentum, 0.01, "SGD with heavy-ball momentum", is_elementwise=True
        ),
        optimizer_from_signature(
            "adam",
            optax.adam,
            1e-3,
            "Adam (Kingma and Ba, 2015)",
            fixed_hyperparameters={},
            is_elementwise=True,
        ),
        optimizer_from_signature(
            "adamw",
            optax.adamw,
            1e-3,
            "Adam with decoupled weight decay (Loshchilov and Hutter, 2019)",
            fixed_hyperparameters={WEIGHT_DECAY_NAME: 1e-4},
            is_elementwise=True,
        ),
        optimizer_from_signature(
            "nesterov", _nesterov, 0.01, "SGD with Nesterov's momentum", is_elementwise=True
        ),
        *optax_optimizers.values(),
        optimizer_from_signature(
            "sm3", _sm3, 0.1, "Adagrad by rows and columns (Anil et al., 2019)"
        ),
    ]


OPTIMIZERS: Registry[LocalOptimizer] = Registry(
    "local optimiser", _make_builtin_optimizers(), argument="local_optimizer"
)


@validate_arguments
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
    parameters = get_keyword_parameters(make) if callable(make) else {}
    has_learning_rate = "learning_rate" in parameters and not isinstance(
        make, optax.GradientTransformation
    )
    require(has_learning_rate and not inspect.isclass(make), "make", make, expected)
    require(name != USER_OBJECT, "name", name, "another one: a run's own object has this one")
    for argument, default in parameters.items():
        has_default = default is not REQUIRED or argument == "learning_rate"
        require(
            has_default, f"make's argument {argument}", "without a default", "one with a default"
        )
    signature_lr = parameters["learning_rate"]
    default_lr = float(signature_lr) if isinstance(signature_lr, int | float) else 0.01
    entry = optimizer_from_signature(name, make, default_lr, description or get_summary_line(make))
    default_values = {
        hp_name: hyperparameter.default for hp_name, hyperparameter in entry.hyperparameters.items()
    }
    check_transformation(name, partial(_make_from_entry, entry, {}), default_values)
    OPTIMIZERS.add(entry)


def optimizer_hyperparameters(name: str) -> dict[str, HyperParameter]:
    """The numeric hyper-parameters that a run with this optimiser always has."""
    return {} if name == USER_OBJECT else OPTIMIZERS[name].hyperparameters


def optional_optimizer_hyperparameters(
    name: str, hp: Mapping[str, Any]
) -> dict[str, HyperParameter]:
    """Those that it has where they are given. The user's own reads what its function does, so that
    any `local_...` of `given` may be one."""
    if name == USER_OBJECT:
        user_hyperparameters = {
            hp_name: HyperParameter(0.0, Bounds())
            for hp_name in hp
            if hp_name.startswith(LOCAL_PREFIX)
        }
        return {
            **user_hyperparameters,
            LR_NAME: HyperParameter(0.01, Bounds(0)),
            **COMMON_HYPERPARAMETERS,
        }
    entry = OPTIMIZERS[name]
    return {
        hp_name: hyperparameter
        for hp_name, hyperparameter in {
            **COMMON_HYPERPARAMETERS,
            **entry.optional_hyperparameters,
        }.items()
        if hp_name not in entry.hyperparameters
    }


def make_transformation(
    name: str, options: LocalTrainingOptions, hp: Any, lr_factor: Callable[[Any], Any] | None = None
) -> optax.GradientTransformation:
    """The optimiser of these numbers.

    Where they are given the gradient is first clipped, entry by entry (`local_clip_value`), then as
    a whole (`local_clip_norm`, of all layers together), then has `local_weight_decay` times the
    weights added: L2, as in papers on SGD. Of adamw, nadamw, adamaxw, lion, lamb, lars, novograd
    and adan `local_weight_decay` is their own argument: decoupled from the gradient's moments (of
    lars: added to the gradient that is scaled).

    factor(steps): of the rate, by the optimiser's own count.
    """
    if name == USER_OBJECT:
        entry_hyperparameters: tuple[str, ...] = ()
        base_transformation = make_user_transformation(options.user_optimizer, hp)
    else:
        entry = OPTIMIZERS[name]
        base_transformation, entry_hyperparameters = (
            _make_from_entry(
                entry,
                dict(options.optimizer_options),
                hp,
                lr_factor,
                options.optional_hyperparameters,
            ),
            (*entry.hyperparameters,),
        )
    gradient_transformations = [
        make_gradient_transformation(hp[hp_name])
        for hp_name, make_gradient_transformation in (
            (CLIP_VALUE_NAME, optax.clip),
            (CLIP_NORM_NAME, optax.clip_by_global_norm),
            (WEIGHT_DECAY_NAME, optax.add_decayed_weights),
        )
        if hp_name in options.optional_hyperparameters and hp_name not in entry_hyperparameters
    ]
    return (
        optax.chain(*gradient_transformations, base_transformation)
        if gradient_transformations
        else base_transformation
    )


def _make_from_entry(
    entry: LocalOptimizer,
    options: Mapping[str, bool],
    hp: Any,
    lr_factor: Callable[[Any], Any] | None = None,
    optional_names: tuple[str, ...] = (),
) -> optax.GradientTransformation:
    learning_rate: LearningRate = hp[LR_NAME]
    if lr_factor is not None:
        learning_rate = lambda count: hp[LR_NAME] * lr_factor(count)  # noqa: E731
    hp_names = [
        *entry.hyperparameters,
        *(name for name in entry.optional_hyperparameters if name in optional_names),
    ]
    values = {name.removeprefix(LOCAL_PREFIX): hp[name] for name in hp_names if name != LR_NAME}
    return entry.make(learning_rate, **values, **options)


def make_user_transformation(user_optimizer: Any, hp: Any) -> optax.GradientTransformation:
    """What a user's object is with these numbers."""
    return (
        user_optimizer
        if isinstance(user_optimizer, optax.GradientTransformation)
        else user_optimizer(hp)
    )


def check_transformation(
    name: str,
    make: Callable[[Any], optax.GradientTransformation],
    default_values: Mapping[str, float],
) -> None:
    """Raise ConfigError, in one line, unless `make(hp)` is a transformation whose updates are as
    the gradients, and whose state keeps its shapes. Cost: an abstract evaluation."""
    label, params = f"optimizer {name!r}", _make_small_tree()

    def init_and_update(hp, params):
        transformation = make(hp)
        require(
            isinstance(transformation, optax.GradientTransformation),
            label,
            transformation,
            "an optax.GradientTransformation, or a function of hp that returns one",
        )
        state = transformation.init(params)
        return state, transformation.update(params, state, params)

    try:
        hp = {hp_name: jnp.float32(value) for hp_name, value in default_values.items()}
        state, (updates, new_state) = jax.eval_shape(init_and_update, hp, params)
    except ConfigError:
        raise
    except KeyError as error:
        hp_names = ", ".join(default_values) or "none is given"
        text = f"{label} reads hp[{error}]: expected it among the hyper-parameters ({hp_names})"
        raise ConfigError(text) from error
    except Exception as error:  # of a user's function
        raise ConfigError(f"{label} fails: {type(error).__name__}: {error}") from error
    is_matching = _shapes_and_dtypes(updates) == _shapes_and_dtypes(params)
    require(is_matching, label, "updates of other shapes", "updates of the shapes of the gradients")
    is_matching = _shapes_and_dtypes(state) == _shapes_and_dtypes(new_state)
    require(is_matching, label, "a state that changes its shapes", "one that keeps them")


def compute_optimizer_digest(user_optimizer: Any, hp: Mapping[str, float]) -> str:
    """16 hexadecimal digits: the hash of what a user's object computes, from the traces of its
    `init` and `update` on a small tree, the numbers of `hp` being traced, with the arrays that they
    close over. Names do not enter, nor how the state is nested. Another version of jax or optax may
    give another digest. Cost: two traces."""
    traced_hp = {name: jnp.float32(value) for name, value in hp.items()}
    params = _make_small_tree()

    def traced_init(hp, params):
        return jax.tree.leaves(make_user_transformation(user_optimizer, hp).init(params))

    def traced_update(hp, state, params):
        updates, state = make_user_transformation(user_optimizer, hp).update(params, state, params)
        return updates, jax.tree.leaves(state)

    state = jax.eval_shape(
        lambda hp: make_user_transformation(user_optimizer, hp).init(params), traced_hp
    )
    traces = (
        jax.make_jaxpr(traced_init)(traced_hp, params),
        jax.make_jaxpr(traced_update)(traced_hp, state, params),
    )
    return hash_jaxprs(traces).hexdigest()[:16]


def _make_small_tree() -> dict[str, Any]:
    return {"b": jnp.zeros(2), "w": jnp.zeros((3, 2))}


def _shapes_and_dtypes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)

"""What tf32 and bfloat16 do to the gradients of the papers' methods, on a CPU.

    python experiments/accelerator/precision.py --output experiments/accelerator/results

Each number is the relative error ||found - exact|| / ||exact|| of one gradient, by the precision of
networks (`RunSpec.precision`); exact is float64. A CPU computes in bfloat16 as other backends do,
but for the order of sums. It has no tf32: parameters and images are rounded to 10 bits of fraction
instead, as a GPU rounds what enters a product; activations between layers stay float32 here, so the
real error is larger by what they add. What the errors do to accuracies is not known without runs.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from fedjax_het.algorithms.collaboration import squared_distances
from fedjax_het.common.arrays import enable_x64
from fedjax_het.common.files import make_output_directory
from fedjax_het.common.records import Count, Whole
from fedjax_het.condensation.distribution import distribution_distance
from fedjax_het.condensation.synthetic import SyntheticData
from fedjax_het.condensation.unrolling import matching_loss, unroll
from fedjax_het.nn import Model, make_model
from fedjax_het.nn.computing import BFLOAT16, FLOAT32, TF32, computed
from fedjax_het.report.programs import record_program

Tree = Any
NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {},
    "convnet": {"width": 32, "norm": "instance"},
}
SHAPE, CLASSES = (16, 16, 1), 10
STEP = 0.05  # of the inner loop, and of clients
FRACTION = 13  # bits of float32's 23 that tf32 has not


@dataclass
class Arguments:
    """How much is unrolled, and where the table goes."""

    steps: tuple[Count, ...] = (5, 20)
    """Of DynaFed's inner loop."""
    images: Count = 30
    seed: Whole = 0
    output: Path | None = None
    """Folder of the table, as JSON."""


def measure(a: Arguments) -> int:
    rows = {}
    for name, options in NETWORKS.items():
        for title, gradient in _gradients(a).items():
            model = make_model(name, SHAPE, CLASSES, **options)
            rows[f"{title}, {name}"] = _errors(model, gradient, a)
    print("| gradient | float32 | tf32 (operands) | bfloat16 |\n|---|---|---|---|")
    for title, errors in rows.items():
        print(f"| {title} | {' | '.join(f'{error:.1e}' for error in errors.values())} |")
    if a.output is not None:
        text = json.dumps(rows, indent=1) + "\n"
        (make_output_directory(a.output) / "precision.json").write_text(text)
    return 0


def _errors(model: Model, gradient: Callable, a: Arguments) -> dict[str, float]:
    """Relative errors by precision."""
    with enable_x64(True):
        variables, data = _problem(model, a, np.float64)
        exact = np.asarray(ravel_pytree(jax.jit(partial(gradient, model))(variables, data))[0])
    variables, data = _problem(model, a, np.float32)
    ways = {
        FLOAT32: computed(model, precision=FLOAT32),
        TF32: _in_tf32(model),
        BFLOAT16: computed(model, precision=BFLOAT16),
    }
    errors = {}
    for precision, way in ways.items():
        found = ravel_pytree(jax.jit(partial(gradient, way))(variables, data))[0]
        gap = np.linalg.norm(np.asarray(found, np.float64) - exact)
        errors[precision] = float(gap / np.linalg.norm(exact))
    return errors


def _problem(model: Model, a: Arguments, dtype: Any) -> tuple[Tree, Tree]:
    """A network, and images around a mean for each class: the same numbers in each type."""
    with enable_x64(False):
        drawn = jax.tree.map(np.asarray, model.init(jax.random.key(a.seed)))
    rng = np.random.default_rng(a.seed)
    labels = np.arange(a.images) % CLASSES
    means = rng.normal(size=(CLASSES, *SHAPE))
    images = means[labels] + rng.normal(size=(2, a.images, *SHAPE))
    images = images.astype(np.float32)  # what every type can hold
    cast = partial(jax.tree.map, lambda leaf: jnp.asarray(leaf, dtype))
    return cast(drawn), {"real": cast(images[0]), "made": cast(images[1]), "labels": labels}


def _in_tf32(model: Model) -> Model:
    """As if products rounded what enters them, of parameters and images."""

    def around(function: Callable) -> Callable:
        def call(variables, x, **how):
            params = jax.tree.map(_rounded, variables["params"])
            return function({**variables, "params": params}, _rounded(x), **how)

        return call

    assert model.embed is not None
    return model._replace(apply=around(model.apply), embed=around(model.embed))


@jax.custom_jvp
def _rounded(x: jax.Array) -> jax.Array:
    """To the nearest number of 10 bits of fraction; its derivative is 1."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    half = jnp.uint32(1 << (FRACTION - 1))
    kept = (bits + half) >> FRACTION << FRACTION
    return jax.lax.bitcast_convert_type(kept, jnp.float32)


@_rounded.defjvp
def _(primals, tangents):
    return _rounded(*primals), tangents[0]


# --- the gradients -------------------------------------------------------------------------------


def _gradients(a: Arguments) -> dict[str, Callable]:
    """By name, `(model, variables, data) -> tree`."""
    unrolled = {
        f"DynaFed's synthesis, {steps} inner steps": partial(_of_synthesis, steps=steps)
        for steps in a.steps
    }
    return {
        "a client's step (FedAvg; FSL's clients and server)": _of_step,
        **unrolled,
        "FedDM's and FedAF's matching": _of_matching,
        "FedAMP's distances of models, after 5 steps": _of_distances,
    }


def _loss(model: Model, variables: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
    logits = model.apply(variables, images, train=True)[0]
    return -jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels].mean()


def _of_step(model: Model, variables: Tree, data: Tree) -> Tree:
    """Of the parameters, of a batch."""
    return jax.grad(
        lambda params: _loss(model, {**variables, "params": params}, data["real"], data["labels"])
    )(variables["params"])


def _trained(model: Model, variables: Tree, images: jax.Array, labels: jax.Array, steps: int):
    """The parameters after some steps of SGD."""

    def step(params, _):
        given = {**variables, "params": params}
        gradient = _of_step(model, given, {"real": images, "labels": labels})
        return jax.tree.map(lambda w, g: w - STEP * g, params, gradient), None

    return jax.lax.scan(step, variables["params"], length=steps)[0]


def _of_synthesis(model: Model, variables: Tree, data: Tree, *, steps: int) -> Tree:
    """Of the images, labels and step size, through the inner loop; the target is where as many
    steps on real images go, in this precision too."""
    start, unravel = ravel_pytree(variables["params"])
    target = ravel_pytree(_trained(model, variables, data["real"], data["labels"], steps))[0]
    labels = jax.nn.one_hot(data["labels"], CLASSES, dtype=start.dtype)

    def loss(made: SyntheticData) -> jax.Array:
        end = unroll(
            lambda params, x: model.apply({**variables, "params": params}, x, train=True)[0],
            unravel,
            start,
            made,
            jax.random.key(0),
            num_steps=steps,
            augment_strategy="none",
        )
        return matching_loss(end, start, target)

    return jax.grad(loss)(
        SyntheticData(data["made"], labels, jnp.asarray(STEP, start.dtype))
    ).images


def _of_matching(model: Model, variables: Tree, data: Tree) -> Tree:
    """Of the images of a class, which follow the mean embedding of a batch."""
    embed = model.embed
    assert embed is not None

    def mean(images):
        return embed(variables, images, train=False)[0].mean(0)

    goal = mean(data["real"])
    return jax.grad(lambda made: distribution_distance(goal, mean(made)))(data["made"])


def _of_distances(model: Model, variables: Tree, data: Tree) -> Tree:
    """Between three clients' models, which decide who listens to whom."""
    number = len(data["labels"]) // 3
    parts = [slice(k * number, (k + 1) * number) for k in range(3)]
    models = [
        _trained(model, variables, data["real"][part], data["labels"][part], 5) for part in parts
    ]
    return squared_distances(jax.tree.map(lambda *leaves: jnp.stack(leaves), *models))


main = record_program(Arguments, measure)

if __name__ == "__main__":
    raise SystemExit(main())

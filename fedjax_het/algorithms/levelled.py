"""Leveled logits: a correction of the global model's class preferences without training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from fedjax_het.algorithms.base import Algorithm
from fedjax_het.algorithms.server_step import ServerStepContext, with_server_step
from fedjax_het.algorithms.spec import AlgorithmSpec
from fedjax_het.core.execution_plan import ExecutionPlan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.rng import Purpose, fold_in_purpose
from fedjax_het.nn.model import name_network
from fedjax_het.utils.arrays import make_key
from fedjax_het.utils.config import Config, PositiveInt
from fedjax_het.utils.errors import ConfigError
from fedjax_het.utils.input_kinds import FLOAT_KINDS


@dataclass(frozen=True)
class LevelledOptions(Config):
    """Choices of leveled logits."""

    noise_images: PositiveInt = 500
    "Number n of noise images, drawn anew in each round."


def levelled(
    training: LocalTraining,
    plan: ExecutionPlan,
    *,
    base: Callable[..., Algorithm],
    options: LevelledOptions,
) -> Algorithm:
    """Leveled logits: the server subtracts the mean logits over noise images from the bias.

    After each round of `base`, with images z_i of independent entries from N(0, 1),

        b <- b - 1/n sum_i f(w; z_i),

    where b is the bias of the last layer. All classes then have the mean logit 0 on noise. The
    averages of clients with few classes prefer some classes; this step removes the part of the
    preference that does not depend on the image. A round in which no client has data changes
    nothing.

    The method is a control for methods whose server learns without data: FedGen, DynaFed and
    others also level the classes, and a claim that their data or generators carry knowledge must
    exceed this step. No paper proposes it.

    Traffic and client state are unchanged from `base`; the server has no state. Cost: one pass of
    the global model over n images per round.

    Args:
      training: the choices of local training.
      plan: where the clients run.
      base: `base(training, plan)`, the method whose average is corrected.
      options: choices of the method.

    Returns:
      The method.

    Raises:
      ConfigError: if the network does not end in a fully connected layer with a bias.
    """
    model, head = training.task.model, training.task.model.head
    shapes = jax.eval_shape(model.init, make_key(0))
    layer = None if head is None else head.get_parameters(shapes)
    leaves = layer.items() if isinstance(layer, Mapping) else ()
    biases = [n for n, leaf in leaves if getattr(leaf, "shape", None) == (model.num_classes,)]
    if head is None or len(biases) != 1:
        expected = "a network that ends in a fully connected layer with a bias, to correct it"
        raise ConfigError(f"{name_network(model)}: expected {expected}")
    (name,) = biases

    def run_server_step(hp, step_state, context: ServerStepContext):
        average = context.variables_after
        key = fold_in_purpose(context.key, Purpose.SERVER)
        noise = jax.random.normal(key, (options.noise_images, *model.input_shape), jnp.float32)
        logits = model.apply(average, noise, train=False)[0].mean(0)
        logits *= (context.cohort.schedule.num_steps > 0).any()
        layer = head.get_parameters(average)
        layer = {**layer, name: layer[name] - logits.astype(layer[name].dtype)}
        return head.replace_parameters(average, layer), step_state

    return with_server_step(
        base(training, plan), run_server_step, server_batch_size=options.noise_images
    )


SPEC = AlgorithmSpec(
    "levelled",
    levelled,
    "the average with the mean logits on noise images subtracted: a control without training",
    title="Levelled",
    options=LevelledOptions,
    color="#B8A038",
    dashes=(0, (1, 1)),
    wraps="model",
    input_kinds=FLOAT_KINDS,
    needs_classes=True,
)

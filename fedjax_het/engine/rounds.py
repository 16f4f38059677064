"""A chunk of rounds as one compiled program."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_het.engine.lanes import Cohort, Examples
from fedjax_het.engine.plan import DEVICE, RUN, SHARED, Plan
from fedjax_het.engine.schedule import RoundSchedule
from fedjax_het.engine.task import Task
from fedjax_het.evaluation import Evaluation, EvaluationSet, evaluate


class ChunkInputs(NamedTuple):
    """What a chunk reads besides the state; all of it traced, so one program serves a run."""

    hp: Any
    train_key: jax.Array
    schedule: RoundSchedule  # [R, ...]
    num_rounds: jax.Array  # [] int32, <= R
    num_eval_batches: jax.Array  # [] int32, per block
    examples: Examples
    test: EvaluationSet


_ONCE_PER_DEVICE = ("round", "evaluate", "trial", "num_segments", "segment_ends")
# What of a chunk's inputs belongs to a federation, see `Plan.over_runs`. Federations that are
# vmapped go through the same rounds and segments, so that every loop has one bound.
CHUNK_KINDS = ChunkInputs(
    hp=RUN,
    train_key=RUN,
    schedule=RoundSchedule(
        *(DEVICE if name in _ONCE_PER_DEVICE else RUN for name in RoundSchedule._fields)
    ),
    num_rounds=DEVICE,
    num_eval_batches=SHARED,
    examples=SHARED,
    test=SHARED,
)


class RoundMetrics(NamedTuple):
    """Per round; float32 `[R]`, NaN where nothing was measured."""

    test_accuracy: jax.Array
    test_loss: jax.Array
    train_loss: jax.Array
    update_norm: jax.Array
    domain_accuracy: jax.Array | None  # [R, G]; None for a data set without domains


def make_chunk(algorithm, task: Task, plan: Plan, num_domains: int = 0):
    """-> chunk(state, inputs) -> (state, RoundMetrics): up to R rounds, evaluation inside.

    `num_domains` is the data set's; 0 for one without.
    """

    def chunk(state, inputs: ChunkInputs):
        capacity = inputs.schedule.round.shape[0]
        nothing = Evaluation.missing(num_domains)

        def test(state):
            model, batches = algorithm.global_model(state), inputs.num_eval_batches
            return evaluate(task, plan, model, inputs.test, batches, num_domains=num_domains)

        def one_round(r, carry):
            state, metrics = carry
            schedule = jax.tree.map(lambda a: a[r], inputs.schedule)
            key = jax.random.fold_in(inputs.train_key, schedule.round)
            state, info = algorithm.round(inputs.hp, state, key, Cohort(schedule, inputs.examples))
            tested = jax.lax.cond(schedule.evaluate, test, lambda _: nothing, state)
            now = RoundMetrics(
                tested.accuracy,
                tested.loss,
                info.train_loss,
                info.update_norm,
                tested.domain_accuracy,
            )
            metrics = jax.tree.map(lambda all_, one: all_.at[r].set(one), metrics, now)
            return state, metrics

        empty = jax.tree.map(
            lambda one: jnp.full((capacity, *one.shape), nothing.accuracy),
            RoundMetrics(*[nothing.accuracy] * 4, nothing.domain_accuracy),
        )
        return jax.lax.fori_loop(0, inputs.num_rounds, one_round, (state, empty))

    return chunk

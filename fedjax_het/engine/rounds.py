"""A chunk of rounds as one compiled program."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.engine.evaluation import (
    ClientTests,
    Evaluation,
    EvaluationSet,
    evaluate,
    evaluate_clients,
)
from fedjax_het.engine.gradient_gaps import GAPS, gradient_gaps
from fedjax_het.engine.lanes import Cohort, Examples, client_row, for_each_client, train_cohort
from fedjax_het.engine.local import Broadcast
from fedjax_het.engine.plan import DEVICE, RUN, SHARED, Plan
from fedjax_het.engine.randomness import Purpose, key_for
from fedjax_het.engine.schedule import RoundSchedule
from fedjax_het.engine.task import Task


class ChunkInputs(NamedTuple):
    """What a chunk reads besides the state; all of it traced, so one program serves a run."""

    hp: Any
    train_key: jax.Array
    schedule: RoundSchedule  # [R, ...]
    tuning: RoundSchedule | None  # [R, ...] of all clients, where they tune copies to be scored
    num_rounds: jax.Array  # [] int32, <= R
    num_eval_batches: jax.Array  # [] int32, per block
    examples: Examples
    test: EvaluationSet | None  # None where there is no global model to test
    client_tests: ClientTests | None  # None where clients have no tests of their own
    test_examples: Examples | None  # that these index
    server: ServerTraining | None  # None where the server has no examples
    survey: RoundSchedule | None  # of all clients, where their gradients are measured
    averages: Averages | None  # None where clients share none


_ONCE_PER_DEVICE = ("round", "num_clients", "evaluate", "trial", "num_segments", "segment_ends")
# What of a chunk's inputs belongs to a federation, see `Plan.over_runs`. Federations that are
# vmapped go through the same rounds and segments, so that every loop has one bound.
SCHEDULE_KINDS = RoundSchedule(
    *(DEVICE if name in _ONCE_PER_DEVICE else RUN for name in RoundSchedule._fields)
)

SERVER_KINDS = ServerTraining(Examples(RUN, RUN), RUN)
AVERAGES_KINDS = Averages(RUN, RUN, RUN)


def chunk_kinds(
    *,
    tunes: bool,
    tests_clients: bool,
    global_model: bool,
    server: bool,
    surveys: bool,
    averages: bool,
) -> ChunkInputs:
    """What each of the inputs is to the federations."""
    return ChunkInputs(
        hp=RUN,
        train_key=RUN,
        schedule=SCHEDULE_KINDS,
        tuning=SCHEDULE_KINDS if tunes else None,
        num_rounds=DEVICE,
        num_eval_batches=SHARED,
        examples=SHARED,
        test=SHARED if global_model else None,
        client_tests=ClientTests(RUN, RUN) if tests_clients else None,
        test_examples=SHARED if tests_clients else None,
        server=SERVER_KINDS if server else None,
        survey=SCHEDULE_KINDS if surveys else None,
        averages=AVERAGES_KINDS if averages else None,
    )


class RoundMetrics(NamedTuple):
    """Per round; float32 `[R]` and more, NaN where nothing was measured."""

    test_accuracy: jax.Array  # of the global model
    test_loss: jax.Array
    train_loss: jax.Array
    update_norm: jax.Array
    domain_accuracy: jax.Array | None  # [R, G]; None for a data set without domains
    client_accuracy: jax.Array | None  # [R, K]; None where clients have no tests of their own
    records: dict[str, jax.Array]  # [R, ...] what else the method records


class Measuring(NamedTuple):
    """What is measured besides the test set; static."""

    num_clients: int
    num_domains: int = 0  # the data set's
    tests_clients: bool = False
    gaps_every: int = 0  # rounds between measurements of gradients; 0: never

    def nothing(self, algorithm, rounds: int) -> RoundMetrics:
        """NaN for every round."""

        def nan(*shape):
            return np.full((rounds, *shape), np.nan, np.float32)

        records = algorithm.records(self.num_clients)
        if self.gaps_every:
            records = records | dict.fromkeys(GAPS, ())
        by_domain = self.num_domains and algorithm.global_model
        return RoundMetrics(
            *(nan() for _ in range(4)),
            domain_accuracy=nan(self.num_domains) if by_domain else None,
            client_accuracy=nan(self.num_clients) if self.tests_clients else None,
            records={name: nan(*shape) for name, shape in records.items()},
        )


def make_chunk(algorithm, task: Task, plan: Plan, measuring: Measuring):
    """-> chunk(state, inputs) -> (state, RoundMetrics): up to R rounds, evaluation inside."""
    num_clients, num_domains = measuring.num_clients, measuring.num_domains

    def test(inputs: ChunkInputs, state) -> Evaluation:
        if algorithm.global_model is None:
            return Evaluation.missing(0)
        model, batches = algorithm.global_model(state), inputs.num_eval_batches
        return evaluate(task, plan, model, inputs.test, batches, num_domains=num_domains)

    def test_clients(inputs: ChunkInputs, state, r, key, signal) -> jax.Array:
        """[K], measured once `signal` is known."""
        personal, source = algorithm.personal, (inputs.hp, state)
        if algorithm.tuning is not None:
            source = tuned(inputs, state, r, key, signal)
            signal = jnp.float32(0)

            def model_of(source, k):
                return client_row(source, k)
        elif personal is None:

            def model_of(source, k):
                return algorithm.global_model(source[1])
        else:

            def model_of(source, k):
                return personal(*source, k)

        groups = inputs.client_tests.clients.shape[1]
        groups = jnp.where(inputs.schedule.trial[r], 1, groups)
        network = algorithm.personal_model or task.model
        return evaluate_clients(
            task._replace(model=network),
            plan,
            model_of,
            source,
            inputs.client_tests,
            inputs.test_examples,
            num_clients,
            plan.once_known(signal, groups),
        )

    def tuned(inputs: ChunkInputs, state, r, key, signal):
        """Every client's copy of the global model, tuned."""
        schedule = jax.tree.map(lambda a: a[r], inputs.tuning)
        segments = plan.once_known(signal, schedule.num_segments)
        cohort = Cohort(schedule._replace(num_segments=segments), inputs.examples)
        variables = algorithm.global_model(state)
        copies = for_each_client(variables, num_clients)
        key = key_for(key, Purpose.TUNING)
        sent, client = Broadcast(variables), algorithm.tuning.client
        return train_cohort(client, plan, inputs.hp, sent, copies, key, cohort).states

    def surveyed(inputs: ChunkInputs, state, schedule: RoundSchedule):
        """-> (gaps by name, what is known when they are); NaN in rounds without a measurement."""
        due = schedule.trial | (schedule.round % measuring.gaps_every == 0)
        cohort = Cohort(inputs.survey, inputs.examples, inputs.server)
        gaps = jax.lax.cond(
            due,
            lambda variables: gradient_gaps(task, plan, variables, cohort),
            lambda variables: dict.fromkeys(GAPS, jnp.float32(jnp.nan)),
            algorithm.global_model(state),
        )
        return gaps, gaps[GAPS[0]]

    def chunk(state, inputs: ChunkInputs):
        empty = measuring.nothing(algorithm, inputs.schedule.round.shape[0])
        nothing = jax.tree.map(lambda a: jnp.full(a.shape[1:], jnp.nan, jnp.float32), empty)

        def one_round(r, carry):
            state, metrics = carry
            schedule = jax.tree.map(lambda a: a[r], inputs.schedule)
            key = jax.random.fold_in(inputs.train_key, schedule.round)
            gaps = {}
            if measuring.gaps_every:
                gaps, signal = surveyed(inputs, state, schedule)
                segments = plan.once_known(signal, schedule.num_segments)
                schedule = schedule._replace(num_segments=segments)
            cohort = Cohort(schedule, inputs.examples, inputs.server, inputs.averages)
            state, info = algorithm.round(inputs.hp, state, key, cohort)

            def measured(state):
                tested = test(inputs, state)
                of_clients = None
                if measuring.tests_clients:
                    of_clients = test_clients(inputs, state, r, key, tested.loss)
                return tested, of_clients

            def unmeasured(state):
                tested = Evaluation.missing(num_domains if algorithm.global_model else 0)
                return tested, nothing.client_accuracy

            tested, of_clients = jax.lax.cond(schedule.evaluate, measured, unmeasured, state)
            now = RoundMetrics(
                tested.accuracy,
                tested.loss,
                info.train_loss,
                info.update_norm,
                tested.domain_accuracy,
                of_clients,
                info.records | gaps,
            )
            metrics = jax.tree.map(lambda all_, one: all_.at[r].set(one), metrics, now)
            return state, metrics

        start = jax.tree.map(jnp.asarray, empty)
        return jax.lax.fori_loop(0, inputs.num_rounds, one_round, (state, start))

    return chunk

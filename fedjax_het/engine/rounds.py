"""A chunk of rounds as one compiled program."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.common.arrays import row_of, with_row
from fedjax_het.engine.drift import nothing_sent, watching
from fedjax_het.engine.evaluation import (
    ClientEvaluation,
    ClientTests,
    Evaluation,
    EvaluationSet,
    evaluate,
    evaluate_clients,
)
from fedjax_het.engine.gradient_gaps import GAPS, Survey, gradient_gaps
from fedjax_het.engine.lanes import Cohort, Examples, client_row, for_each_client, train_cohort
from fedjax_het.engine.local import Broadcast
from fedjax_het.engine.measured import Measure, shapes_of
from fedjax_het.engine.plan import BLOCK, DEVICE, RUN, SHARED, Plan
from fedjax_het.engine.randomness import Purpose, key_for
from fedjax_het.engine.schedule import RoundSchedule
from fedjax_het.engine.soundness import not_finite_apart
from fedjax_het.engine.stretches import (
    BLOCKS,
    TUNING,
    Found,
    done,
    either,
    in_stretch,
    metered,
    next_done,
)
from fedjax_het.engine.task import Task


class ChunkInputs(NamedTuple):
    """What a chunk reads besides the state; all of it traced, so one program serves a run.

    How each is made on the host, and for which methods, is said in `running.inputs`.
    """

    hp: Any
    train_key: jax.Array
    schedule: RoundSchedule  # [R, ...]
    num_rounds: jax.Array  # [] int32, <= R
    num_eval_batches: jax.Array  # [] int32, per block
    examples: Examples
    tuning: RoundSchedule | None = None  # [R, ...] of all clients, where they tune copies
    test: EvaluationSet | None = None  # None where there is no global model to test
    client_tests: ClientTests | None = None  # None where clients have no tests of their own
    test_examples: Examples | None = None  # that these index
    server: Examples | None = None  # [n_0, ...]; None where the server has no examples
    survey: RoundSchedule | None = None  # of all clients, where their gradients are measured
    inputs: dict[str, Any] = {}  # noqa: RUF012  what the method asks for besides, by name
    rates: jax.Array | None = None  # [R] factors of `local_lr`; None where it is constant


_ONCE_PER_DEVICE = (
    "round",
    "num_clients",
    "evaluate",
    "trial",
    "longest",
    "num_segments",
    "segment_ends",
)
# What of a chunk's inputs belongs to a federation, see `Plan.over_runs`. Federations that are
# vmapped go through the same rounds and segments, so that every loop has one bound.
SCHEDULE_KINDS: Any = RoundSchedule._make(
    DEVICE if name in _ONCE_PER_DEVICE else RUN for name in RoundSchedule._fields
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
    measured: dict[str, jax.Array]  # [R, ...] what the run's `measures` find
    sound: jax.Array  # 1 where the round's losses, update and state are finite, else 0


class Measuring(NamedTuple):
    """What is measured besides the test set; static."""

    num_clients: int
    num_domains: int = 0  # the data set's
    tests_clients: bool = False
    survey_every: int = 0  # rounds between surveys of all clients' data; 0: never
    measures: tuple[Measure, ...] = ()
    num_classes: int = 0  # the data set's, where there are measures

    @property
    def of_examples(self) -> tuple[Measure, ...]:
        """Of the global model's outputs."""
        return tuple(measure for measure in self.measures if measure.sums is not None)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what these find in an evaluation, by name."""
        return shapes_of(self.of_examples, self.num_classes)

    @property
    def of_uploads(self) -> tuple[str, ...]:
        """What is found of what clients send, by name; numbers."""
        return tuple(name for measure in self.measures for name in measure.of_uploads)

    def nothing(self, algorithm, rounds: int) -> RoundMetrics:
        """NaN for every round."""

        def nan(*shape):
            return np.full((rounds, *shape), np.nan, np.float32)

        records = algorithm.records(self.num_clients)
        if self.survey_every:
            names = GAPS if algorithm.survey is None else algorithm.survey.names
            records = records | dict.fromkeys(names, ())
        by_domain = self.num_domains and algorithm.global_model
        return RoundMetrics(
            test_accuracy=nan(),
            test_loss=nan(),
            train_loss=nan(),
            update_norm=nan(),
            domain_accuracy=nan(self.num_domains) if by_domain else None,
            client_accuracy=nan(self.num_clients) if self.tests_clients else None,
            records={name: nan(*shape) for name, shape in records.items()},
            measured={
                **{name: nan(*shape) for name, shape in self.shapes.items()},
                **{name: nan() for name in self.of_uploads},
            },
            sound=nan(),
        )


class Rounds(NamedTuple):
    """What the rounds of a run are made of; static."""

    algorithm: Any  # an `Algorithm`
    task: Task
    plan: Plan
    measuring: Measuring


def make_chunk(
    rounds: Rounds, note: Callable[[ChunkInputs, float], None] = lambda inputs, samples: None
) -> Callable:
    """-> chunk(state, inputs) -> (state, RoundMetrics): up to R rounds, evaluation inside.

    note(inputs, samples): told, as it is traced, on how many samples a round trains at most.
    """
    algorithm, plan, measuring = rounds.algorithm, rounds.plan, rounds.measuring

    def chunk(state, inputs: ChunkInputs):
        empty = measuring.nothing(algorithm, inputs.schedule.round.shape[0])
        nothing = _nothing(rounds)

        def one_round(r, carry):
            state, curves, unsound = carry
            with metered() as meter:
                state, metrics, unsound = _round(rounds, inputs, state, r, nothing, unsound)
            note(inputs, meter.samples)
            if plan.splits_clients:
                state = plan.with_clients(state, plan.hold)
            curves = jax.tree.map(lambda curve, now: with_row(curve, now, r), curves, metrics)
            return state, curves, unsound

        start = state, jax.tree.map(jnp.asarray, empty), _unsound(rounds, state)
        return jax.lax.fori_loop(0, inputs.num_rounds, one_round, start)[:2]

    return chunk


def make_stretch(rounds: Rounds) -> Callable:
    """-> stretch(state, inputs, spans, carried) -> (state, RoundMetrics, carried, totals): a part
    of the first of the rounds of `inputs`; see `engine.stretches`.

    spans: `[n, 2]` int32 of its long loops: iterations done, and to be done after this call.
    Returns: a state and metrics that count when the last loop is done; `totals` `[n]`, a loop's
      iterations, known once those before it are done.
    """

    def stretch(state, inputs: ChunkInputs, spans, carried):
        spans = jnp.where(inputs.num_rounds > 0, spans, 0)  # none, where there is no run
        with in_stretch(spans, carried) as found:
            before = _unsound(rounds, state)
            state, metrics, _ = _round(rounds, inputs, state, 0, _nothing(rounds), before)
        metrics = jax.tree.map(lambda a: a[None], metrics)
        whole, totals = rounds.plan.hold, jnp.stack(found.totals)
        carried = jax.tree.map(
            lambda kind, part: whole(part, BLOCK if kind == BLOCKS else SHARED),
            found.kinds,
            found.carried,
        )
        state = rounds.plan.with_clients(state, whole)
        return state, whole(metrics, SHARED), carried, whole(totals, SHARED)

    return stretch


def loops_of(rounds: Rounds, kinds: ChunkInputs, state, inputs: ChunkInputs) -> Found:
    """The long loops of a round, by tracing it; what they carry, of all federations that go in
    step, as shapes.

    Args:
      kinds: of the inputs, see `Plan.over_runs`. state, inputs: of all of them, or as shapes.
    """
    known: list[Found] = []

    def look(state, inputs):
        with in_stretch(None, ()) as found:
            _round(rounds, inputs, state, 0, _nothing(rounds), _unsound(rounds, state))
        known.append(found)
        return found.carried

    carried = jax.eval_shape(rounds.plan.over_runs(look, (RUN, kinds)), state, inputs)
    return known[0]._replace(carried=carried, totals=[])


def _nothing(rounds: Rounds) -> RoundMetrics:
    """What a round without an evaluation has measured."""
    empty = rounds.measuring.nothing(rounds.algorithm, 1)
    return jax.tree.map(lambda a: jnp.full(a.shape[1:], jnp.nan, jnp.float32), empty)


def _unsound(rounds: Rounds, state) -> jax.Array:
    """What a round is handed of the one before: how many entries of the state are not finite. The
    states of clients that are read by row alone are left out, as their lanes look at them."""
    clients = () if rounds.algorithm.pageable else state.clients
    return not_finite_apart(rounds.plan, (state.server, clients))


def _round(rounds: Rounds, inputs: ChunkInputs, state, r, nothing: RoundMetrics, unsound):
    """The r-th round of a chunk: -> (state, its RoundMetrics, `_unsound` of the state); `nothing`
    is what is not due."""
    algorithm, plan, measuring = rounds.algorithm, rounds.plan, rounds.measuring
    inputs = _at_its_rate(inputs, r)
    schedule = jax.tree.map(lambda a: row_of(a, r), inputs.schedule)
    key = jax.random.fold_in(inputs.train_key, schedule.round)
    gaps = {}
    if measuring.survey_every:
        gaps, signal = _survey(rounds, inputs, state, schedule)
        segments = plan.once_known(signal, schedule.num_segments)
        schedule = schedule._replace(num_segments=segments)
    cohort = Cohort(schedule, inputs.examples, inputs.server, inputs.inputs)
    state, info, drift = _worked(rounds, inputs.hp, state, key, cohort)

    # What is counted is in both branches, where it does not mix with what made the state: fused
    # with it, it could change the order of sums.
    def measured(state):
        tested = _test(rounds, inputs, state, r)
        sound = jnp.isfinite(tested.loss) if algorithm.global_model else jnp.array(True)
        client_accuracy = None
        if measuring.tests_clients:
            of_clients = _test_clients(rounds, inputs, state, r, key, tested.loss)
            client_accuracy, sound = of_clients.accuracy, sound & of_clients.sound
        return tested, client_accuracy, sound, _unsound(rounds, state)

    def unmeasured(state):
        domains = measuring.num_domains if algorithm.global_model else 0
        tested = Evaluation.missing(domains, measuring.shapes)
        return tested, nothing.client_accuracy, jnp.array(True), _unsound(rounds, state)

    due = schedule.evaluate & done()
    tested, client_accuracy, sound, now = either(due, measured, unmeasured, state)
    sound &= jnp.isfinite(info.train_loss) & jnp.isfinite(info.update_norm)
    sound &= (now <= unsound).all()
    metrics = RoundMetrics(
        tested.accuracy,
        tested.loss,
        info.train_loss,
        info.update_norm,
        tested.domain_accuracy,
        client_accuracy,
        info.records | gaps,
        tested.measured | drift,
        sound.astype(jnp.float32),
    )
    return state, metrics, now


def _worked(rounds: Rounds, hp, state, key, cohort: Cohort):
    """The method's round: -> (state, its RoundInfo, what is found of what clients sent)."""
    names = rounds.measuring.of_uploads
    if not names:
        return *rounds.algorithm.round(hp, state, key, cohort), {}
    like = jax.eval_shape(rounds.task.model.init, jax.random.key(0))
    with watching(like["params"]) as watch:
        state, info = rounds.algorithm.round(hp, state, key, cohort)
    if watch.found is None:
        nothing_sent()
    return state, info, {name: watch.found[name] for name in names}


def _at_its_rate(inputs: ChunkInputs, r) -> ChunkInputs:
    """The same with the local rate of the r-th round, for clients and server."""
    if inputs.rates is None:
        return inputs
    rate = inputs.hp["local_lr"] * row_of(inputs.rates, r)
    return inputs._replace(hp={**inputs.hp, "local_lr": rate})


def _test(rounds: Rounds, inputs: ChunkInputs, state, r) -> Evaluation:
    """Of the global model, if there is one."""
    task, plan, measuring = rounds.task, rounds.plan, rounds.measuring
    if rounds.algorithm.global_model is None:
        return Evaluation.missing(0, {})
    assert inputs.test is not None
    model, batches = rounds.algorithm.global_model(state), inputs.num_eval_batches
    if rounds.algorithm.tuning is not None:  # in a stretch, with what ends it
        assert inputs.tuning is not None
        batches = batches * next_done(inputs.tuning.longest[r])
    return evaluate(
        task,
        plan,
        model,
        inputs.test,
        batches,
        num_domains=measuring.num_domains,
        measures=measuring.of_examples,
    )


def _test_clients(rounds: Rounds, inputs: ChunkInputs, state, r, key, signal) -> ClientEvaluation:
    """Of the models that clients' own tests are for, measured once `signal` is known."""
    algorithm, plan = rounds.algorithm, rounds.plan
    personal, source = algorithm.personal, (inputs.hp, state)
    if algorithm.tuning is not None:
        source = _tuned(rounds, inputs, state, r, key, signal)
        signal = jnp.float32(0)
        model_of = client_row
    elif personal is None:

        def model_of(source, k):
            return algorithm.global_model(source[1])
    else:

        def model_of(source, k):
            return personal(*source, k)

    assert inputs.client_tests is not None and inputs.test_examples is not None
    groups = inputs.client_tests.clients.shape[1]
    groups = jnp.where(inputs.schedule.trial[r], 1, groups) * done()
    network = algorithm.personal_model or rounds.task.model
    return evaluate_clients(
        rounds.task._replace(model=network),
        plan,
        model_of,
        source,
        inputs.client_tests,
        inputs.test_examples,
        rounds.measuring.num_clients,
        plan.once_known(signal, groups),
    )


def _tuned(rounds: Rounds, inputs: ChunkInputs, state, r, key, signal):
    """Every client's copy of the global model, tuned."""
    algorithm, plan = rounds.algorithm, rounds.plan.holds_all_clients
    schedule = jax.tree.map(lambda a: row_of(a, r), inputs.tuning)
    segments = plan.once_known(signal, schedule.num_segments)
    cohort = Cohort(schedule._replace(num_segments=segments), inputs.examples)
    variables = algorithm.global_model(state)
    copies = for_each_client(variables, rounds.measuring.num_clients)
    key = key_for(key, Purpose.TUNING)
    sent, client = Broadcast(variables), algorithm.tuning.client
    return train_cohort(client, plan, inputs.hp, sent, copies, key, cohort, name=TUNING).states


def _survey(rounds: Rounds, inputs: ChunkInputs, state, schedule: RoundSchedule):
    """-> (what is found, by name; what is known when it is); NaN in rounds without one."""
    due = schedule.trial | (schedule.round % rounds.measuring.survey_every == 0)
    assert inputs.survey is not None
    cohort = Cohort(inputs.survey, inputs.examples, inputs.server, inputs.inputs)
    survey = rounds.algorithm.survey or Survey(GAPS, partial(_gaps, rounds))
    found = either(
        due,
        lambda state: survey.measure(inputs.hp, state, cohort),
        lambda state: dict.fromkeys(survey.names, jnp.float32(jnp.nan)),
        state,
    )
    return found, found[survey.names[0]]


def _gaps(rounds: Rounds, hp, state, cohort: Cohort) -> dict[str, jax.Array]:
    """The survey of methods with a global model: how far gradients are apart."""
    algorithm = rounds.algorithm
    of_server = None
    if algorithm.server_gradient is not None:
        of_server = partial(algorithm.server_gradient, state, cohort.inputs)
    variables = algorithm.global_model(state)
    return gradient_gaps(rounds.task, rounds.plan, variables, cohort, of_server)

"""How good the final global model is on clients that took no part, as it is and fine-tuned."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from fedjax_het.algorithms.contract import Tuning
from fedjax_het.data import Dataset, Partition
from fedjax_het.engine.evaluation import ClientTests, client_tests, evaluate_clients, tests_shape
from fedjax_het.engine.guard import CheckedProgram
from fedjax_het.engine.lanes import Cohort, Examples, client_row, for_each_client, train_cohort
from fedjax_het.engine.local import Broadcast, whole_model
from fedjax_het.engine.plan import Plan, make_plan
from fedjax_het.engine.randomness import Purpose, Stream, device_key, key_for
from fedjax_het.engine.schedule import RoundSchedule, Scheduler
from fedjax_het.engine.units import ClientUnits
from fedjax_het.running.programs import Signature, algorithm_of, training_of
from fedjax_het.running.splits import HeldOut
from fedjax_het.settings.spec import ResolvedSpec

MOST_LANES = 8  # clients that are tuned at a time


class HeldOutAccuracy(NamedTuple):
    """Shares of each held-out client's own test, `[H]`; NaN where it has none."""

    received: np.ndarray  # of the global model
    tuned: np.ndarray | None  # of its copy, fine-tuned; None where clients do not train


def held_out_accuracy(
    signature: Signature,
    spec: ResolvedSpec,
    dataset: Dataset,
    held_out: HeldOut,
    variables: Any,
    hp: dict[str, Any],
) -> HeldOutAccuracy:
    """Of a final global model.

    Every held-out client fine-tunes a copy on its data: as the method tunes what it scores, if it
    does, else by local training without the method's terms, for `held_out_epochs`.
    Cost: a compilation; a pass over the clients' tests, and their epochs, on one device.
    """
    clients = held_out.partition.num_clients
    plan = make_plan(min(clients, MOST_LANES), 1, spread=None)
    examples, tests = _apart(dataset.test_images, dataset.test_labels, held_out.tests)
    asked = jax.device_put(client_tests(plan, tests, tests_shape(plan, tests)))
    given = (hp, variables, asked, examples)
    received = np.asarray(_scoring(signature, plan, clients)(*given))
    tuning = _tuning(signature)
    if tuning is None:
        return HeldOutAccuracy(received, None)
    if spec.held_out_epochs is not None:
        tuning = tuning._replace(epochs=spec.held_out_epochs, steps=None)
    train, own = _apart(dataset.train_images, dataset.train_labels, held_out.partition)
    scheduler = _scheduler(spec, own, tuning, plan)
    program = _tuning_and_scoring(signature, plan, clients)
    # As copies were tuned in a round after the last one.
    after = jax.random.fold_in(device_key(spec.seed, Stream.TRAIN), spec.rounds)
    key = key_for(after, Purpose.TUNING)
    program.verify((*given, scheduler.first_step(0), train, key))
    _, tuned = program(*given, scheduler.round(0), train, key)
    return HeldOutAccuracy(received, np.asarray(tuned))


def _scheduler(spec: ResolvedSpec, own: Partition, tuning: Tuning, plan: Plan) -> Scheduler:
    """Of the round in which all of them tune."""
    units = ClientUnits(
        own, tuning.epochs, spec.batch_size, steps=tuning.steps, stream=Stream.TUNING
    )
    return Scheduler(
        own,
        units,
        seed=spec.seed,
        rounds=1,
        participation=1.0,
        averaging=None,
        eval_every=1,
        blocks=plan.blocks,
        lanes=plan.lanes,
    )


@functools.lru_cache(maxsize=32)
def _scoring(signature: Signature, plan: Plan, clients: int) -> Callable:
    """-> accuracies `[clients]` of what was received."""

    def received(hp, variables, tests, examples):
        return _score(signature, plan, clients, lambda model, k: model, variables, tests, examples)

    return jax.jit(received)


@functools.lru_cache(maxsize=32)
def _tuning_and_scoring(signature: Signature, plan: Plan, clients: int) -> CheckedProgram:
    """-> (tuned copies `[clients, ...]`, their accuracies)."""
    tuning = _tuning(signature)
    assert tuning is not None
    client = tuning.client

    def tuned(hp, variables, tests, examples, schedule: RoundSchedule, train: Examples, key):
        copies = for_each_client(variables, clients)
        cohort, sent = Cohort(schedule, train), Broadcast(variables)
        made = train_cohort(client, plan, hp, sent, copies, key, cohort).states
        return made, _score(signature, plan, clients, client_row, made, tests, examples)

    return CheckedProgram(
        tuned,
        baseline=lambda args: (for_each_client(args[1], clients), 0.0),
        name="held-out clients",
    )


def _score(
    signature: Signature,
    plan: Plan,
    clients: int,
    model_of: Callable,
    source: Any,
    tests: ClientTests,
    examples: Examples,
) -> jax.Array:
    task, groups = training_of(signature).task, tests.clients.shape[1]
    given = (model_of, source, tests, examples, clients, groups)
    return evaluate_clients(task, plan, *given).accuracy


def _tuning(signature: Signature) -> Tuning | None:
    """How a client tunes its copy; None where clients do not train."""
    tuning, training = algorithm_of(signature).tuning, training_of(signature)
    if tuning is None and training.optimizer is not None:
        return Tuning(whole_model(training), 1)
    return tuning


def _apart(
    images: np.ndarray, labels: np.ndarray, partition: Partition
) -> tuple[Examples, Partition]:
    """Of a split, what these clients have, and where in it."""
    chosen, indices = np.unique(partition.indices, return_inverse=True)
    examples = Examples(images[chosen], np.asarray(labels[chosen], np.int32))
    return jax.device_put(examples), dataclasses.replace(partition, indices=indices)

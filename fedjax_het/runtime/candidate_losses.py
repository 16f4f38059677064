"""Losses of the global model on the training data of candidates, for client selection by losses.

One program of a network computes the losses of examples, one batch after the other; the host
averages them in float64. A loss depends on the model and the client's examples alone, so lanes,
devices and other runs in lockstep do not change it beyond rounding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.config.run_spec import ResolvedRunSpec
from fedjax_het.core.client_loop import ClientExamples
from fedjax_het.core.evaluation import CPU_BATCH_SIZE
from fedjax_het.core.memory import MAX_CACHED_PROGRAMS
from fedjax_het.core.miscompile_guard import VerifiedJit
from fedjax_het.core.rng import Stream, make_host_rng
from fedjax_het.core.task import Task
from fedjax_het.core.work_items import ClientClassWork, ClientWork, DriftingWork
from fedjax_het.systems import SYSTEM_SETTING, AdaptiveSelection
from fedjax_het.utils.arrays import fetch_to_host, set_row, take_row

CANDIDATE_LOSS_NAME = "candidate_loss"
"""Name of the record of each candidate's loss before a round, `[R, K]`; NaN for other clients."""


def make_candidate_curves(spec: ResolvedRunSpec) -> dict[str, np.ndarray]:
    """Return the record of the candidates' losses before the first round.

    Args:
      spec: settings of the run.

    Returns:
      NaN, float32 `[R, K]`, by name; empty for a run whose clients report no such losses.
    """
    models = SYSTEM_SETTING.parse(spec.system)
    if not any(isinstance(m, AdaptiveSelection) and m.loss_reports for m in models):
        return {}
    return {CANDIDATE_LOSS_NAME: np.full((spec.rounds, spec.num_clients), np.nan, np.float32)}


def measure_candidate_losses(
    task: Task,
    variables: Any,
    examples: ClientExamples,
    work_items: ClientWork | ClientClassWork | DriftingWork,
    spec: ResolvedRunSpec,
    *,
    round_index: int,
    candidates: np.ndarray,
    loss_reports: str,
) -> np.ndarray:
    """Compute the losses of a model on the training examples of the candidates of a round.

    Cost: one forward pass over the examples.

    Args:
      task: network and normalization.
      variables: the global model before the round.
      examples: the training examples as the clients see them.
      work_items: the work of the clients, which names their examples in the round.
      spec: settings of the run.
      round_index: the round.
      candidates: ids of the candidates, int64 `[n]`.
      loss_reports: "all" or "minibatch", see `AdaptiveSelection.loss_reports`.

    Returns:
      Losses, float64 `[n]`; 0 for a candidate without examples in the round.
    """
    partition = work_items.of_round(round_index).partition
    positions = [partition.client_indices(k) for k in candidates.tolist()]
    if loss_reports == "minibatch":
        path = spec.seed, Stream.SYSTEM, *CANDIDATE_LOSS_NAME.encode(), round_index
        positions = [
            make_host_rng(*path, k).permutation(own)[: spec.batch_size]
            for k, own in zip(candidates.tolist(), positions, strict=True)
        ]
    num_examples = len(work_items.partition.indices)
    return _compute_losses(task, variables, examples, positions, capacity=num_examples)


def _compute_losses(
    task: Task,
    variables: Any,
    examples: ClientExamples,
    positions: list[np.ndarray],
    *,
    capacity: int,
) -> np.ndarray:
    """Return the mean loss of a model on each list of examples, float64 `[n]`; 0 without examples.

    The arrays of the program have room for `capacity` examples, so that all rounds share it.
    """
    sizes = np.array([len(own) for own in positions], np.int64)
    num_examples, program = int(sizes.sum()), _build_program(task)
    batch_size = min(CPU_BATCH_SIZE, capacity)
    batches = np.zeros((-(-capacity // batch_size), batch_size), np.int32)
    batches.reshape(-1)[:num_examples] = np.concatenate([*positions, np.zeros(0, np.int64)])
    program.verify((variables, examples, batches, np.int32(1)))
    num_batches = np.int32(-(-num_examples // batch_size))
    losses = fetch_to_host(program(variables, examples, batches, num_batches))
    owners = np.repeat(np.arange(len(sizes)), sizes)
    sums = np.bincount(owners, losses.reshape(-1)[:num_examples], len(sizes))
    return sums / np.maximum(sizes, 1)


@functools.lru_cache(maxsize=MAX_CACHED_PROGRAMS)
def _build_program(task: Task) -> VerifiedJit:
    def compute(variables, examples, batches, num_batches):
        def add_batch(m, losses):
            positions = take_row(batches, m)
            inputs = task.normalize(examples.take_by_owner(positions))
            logits, _ = task.model.apply(variables, inputs, train=False)
            labels = examples.take_labels(positions, jnp.int32(0))  # the labels of training
            values = task.kind.compute_losses(logits, labels)
            return set_row(losses, values.astype(jnp.float32), m)

        losses = jnp.zeros(batches.shape, jnp.float32)
        return jax.lax.fori_loop(0, num_batches, add_batch, losses)

    return VerifiedJit(compute, name="losses of candidates")


def clear_programs() -> None:
    """Drop the programs of all networks."""
    _build_program.cache_clear()

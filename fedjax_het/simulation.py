"""Run one federation, from its settings to its result."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np

import fedjax_het
from fedjax_het.algorithms.base import Algorithm
from fedjax_het.data import Dataset, Partition
from fedjax_het.engine.checkpoint import load_checkpoint, read_meta, save_checkpoint
from fedjax_het.engine.randomness import Stream, device_key
from fedjax_het.engine.rounds import ChunkInputs, RoundMetrics
from fedjax_het.errors import ConfigError
from fedjax_het.federation import prepare
from fedjax_het.files import make_output_directory
from fedjax_het.result import Result, summarise
from fedjax_het.spec import RunSpec

log = logging.getLogger("fedjax_het")

MAX_CHUNK = 16  # rounds per call of the compiled program, at most
CHUNK_SECONDS = 2.0  # how often progress shows and a checkpoint may be written
CHECKPOINT_SECONDS = float(os.environ.get("FEDJAX_HET_CHECKPOINT_SECONDS", "20"))


class Progress(NamedTuple):
    """Where a run stands; handed to the `progress` callable between chunks."""

    phase: str  # "rounds" or the name of work between rounds
    done: int
    total: int
    rate: float  # rounds (or iterations) per second since this start
    samples_per_second: float  # client samples; 0 outside rounds
    seconds_to_go: float
    accuracy: float = np.nan  # the latest measured


def simulate(
    spec: RunSpec,
    *,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    output_dir: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[Progress], None] | None = None,
    lanes: int | str = "auto",
    devices: int | None = None,
) -> Result:
    """Run one federation.

    Args:
      spec: the settings; `None`s are filled from the method's paper.
      dataset, partition: the user's own; default: those that `spec` names.
      output_dir: where the result, and checkpoints on the way, are written.
      resume: continue from the checkpoint in `output_dir`, if there is one. The metrics are
        those of an uninterrupted run, bit for bit on a CPU.
      progress: called between chunks of rounds.
      lanes: vmapped lanes per device, or "auto"; `devices`: how many to use (default: all).
        Both are a matter of speed: results do not depend on them beyond rounding.
    Raises: ConfigError, before anything compiles, if a setting cannot be used.
    """
    started = time.perf_counter()
    spec = spec.resolved()
    checkpoint = (
        None if output_dir is None else make_output_directory(output_dir) / "checkpoint.npz"
    )
    meta = _resumable(checkpoint, spec) if resume else None
    if meta is not None:  # the same lanes, so that sums are taken in the same order
        lanes, devices = meta["lanes"], min(meta["devices"], len(jax.devices()))
    federation = prepare(spec, dataset=dataset, partition=partition, lanes=lanes, devices=devices)
    federation.announce()
    run = _Run(federation, checkpoint, progress, started)
    if meta is not None:
        run.restore(meta)
    run.compile()
    run.finish()
    result = run.result()
    if output_dir is not None:
        result.save(output_dir)
        result.partition.save(Path(output_dir) / "partition.npz")
    return result


def _resumable(checkpoint: Path | None, spec: RunSpec) -> dict | None:
    """The record of a checkpoint to continue from; None if there is none yet."""
    if checkpoint is None:
        raise ConfigError("resume = True: expected an output_dir, where checkpoints are kept")
    if not checkpoint.exists():
        return None
    meta = read_meta(checkpoint)
    if meta["digest"] != spec.digest():
        then, now = meta["spec"], spec.to_dict()
        differ = [f"{k} {then.get(k)!r} -> {now[k]!r}" for k in now if then.get(k) != now[k]]
        raise ConfigError(
            f"checkpoint = {str(checkpoint)!r}: expected this configuration's, but it is another "
            f"one's ({', '.join(differ)}); use its settings or another output_dir"
        )
    return meta


class _Run:
    """The host loop: chunks of rounds, work between rounds, progress, checkpoints."""

    def __init__(self, federation, checkpoint, progress, started):
        self.f, self.checkpoint, self.started = federation, checkpoint, started
        self.progress = progress or (lambda p: None)
        self.capacity = min(MAX_CHUNK, federation.spec.rounds)
        self.done = 0
        self.metrics = {
            name: np.full(federation.spec.rounds, np.nan, np.float32)
            for name in RoundMetrics._fields
        }
        self.compile_seconds = self.round_seconds = self.host_seconds = self.earlier_seconds = 0.0
        self.timed_rounds, self.timed_samples = 0, 0
        self.saved_at = time.perf_counter()

    @property
    def algorithm(self) -> Algorithm:
        return self.f.program.algorithm

    def compile(self) -> None:
        """Compile the rounds' program on one step, and verify its numbers where needed."""
        start = time.perf_counter()
        one_step = self._verify("rounds")
        nothing = one_step._replace(num_rounds=jnp.int32(0))
        self.f.state, _ = jax.block_until_ready(self.f.program.chunk(self.f.state, nothing))
        self.compile_seconds += time.perf_counter() - start

    def _verify(self, part: str) -> ChunkInputs:
        """Verify the rounds' program in its present state; -> what its first step reads."""
        one_step = self.f.first_step(min(self.done, self.f.spec.rounds - 1), self.capacity)
        self.f.program.chunk.verify((self.f.state, one_step), part)
        return one_step

    def finish(self) -> None:
        rounds = self.f.spec.rounds
        upcoming: dict[tuple[int, int], ChunkInputs] = {}
        while self.done < rounds:
            self._host_work()
            count = self._chunk_length()
            inputs = upcoming.pop((self.done, count), None)
            if inputs is None:
                inputs = self.f.chunk_inputs(self.done, count, self.capacity)
            start = time.perf_counter()
            self.f.state, metrics = self.f.program.chunk(self.f.state, inputs)
            following = (self.done + count, min(count, rounds - self.done - count))
            if following[1] > 0:  # prepared on the host while the device works
                upcoming = {following: self.f.chunk_inputs(*following, self.capacity)}
            metrics = jax.tree.map(np.asarray, metrics)
            self.round_seconds += time.perf_counter() - start
            for name, values in metrics._asdict().items():
                self.metrics[name][self.done : self.done + count] = values[:count]
            work = self.f.scheduler.work
            self.timed_rounds += count
            self.timed_samples += int(work.samples[self.done : self.done + count].sum())
            self.done += count
            self._report()
            if not np.isfinite(metrics.train_loss[:count]).all():
                log.warning("diverged in round %d; stopped", self.done)
                break
            self._save()

    def _chunk_length(self) -> int:
        """As many rounds as fit the time between two signs of life, up to the next stop."""
        stops = [w.before_round for w in self.algorithm.host_work if w.before_round > self.done]
        most = min([self.f.spec.rounds, *stops]) - self.done
        if not self.timed_rounds:
            return 1
        pace = self.round_seconds / self.timed_rounds
        return max(1, min(most, self.capacity, int(CHUNK_SECONDS / pace)))

    def _host_work(self) -> None:
        """Work that is due before the next round, on one device: it is not made of lanes."""
        for work in self.algorithm.host_work:
            if work.before_round != self.done or work.done(self.f.state) >= work.total:
                continue
            program = self.f.program.host_work[work.name]
            state = jax.device_put(self.f.state, jax.devices()[0])
            hp = jax.device_put(self.f.inputs.hp, jax.devices()[0])
            key = device_key(self.f.spec.seed, Stream.SERVER)
            start = time.perf_counter()
            program.verify((hp, state, key, jnp.int32(1)))
            state = jax.block_until_ready(program(hp, state, key, jnp.int32(0)))
            self.compile_seconds += time.perf_counter() - start
            done = first = work.done(state)
            start, count = time.perf_counter(), 1
            while done < work.total:
                state = program(hp, state, key, jnp.int32(min(count, work.total - done)))
                done = work.done(state)
                rate = (done - first) / (time.perf_counter() - start)
                count = max(1, int(CHUNK_SECONDS * rate))
                self.progress(
                    Progress(work.name, done, work.total, rate, 0.0, (work.total - done) / rate)
                )
                self.f.state = state
                self._save()
            self.host_seconds += time.perf_counter() - start
            self.f.state = self.f.program.plan.put(state)
            start = time.perf_counter()
            self._verify(work.name)
            self.compile_seconds += time.perf_counter() - start

    def _report(self) -> None:
        rate = self.timed_rounds / max(self.round_seconds, 1e-9)
        accuracy = self.metrics["test_accuracy"][: self.done]
        accuracy = accuracy[np.isfinite(accuracy)]
        self.progress(
            Progress(
                "rounds",
                self.done,
                self.f.spec.rounds,
                rate,
                self.timed_samples / max(self.round_seconds, 1e-9),
                (self.f.spec.rounds - self.done) / rate,
                float(accuracy[-1]) if len(accuracy) else np.nan,
            )
        )

    def _save(self) -> None:
        """Write a checkpoint, if one is wanted and the last is old enough."""
        now = time.perf_counter()
        if self.checkpoint is None or now - self.saved_at < CHECKPOINT_SECONDS:
            return
        meta = {
            "digest": self.f.spec.digest(),
            "spec": self.f.spec.to_dict(),
            "partition": self.f.partition.digest(),
            "dataset": self.f.dataset.digest(),
            "round": self.done,
            "lanes": self.f.program.plan.lanes,
            "devices": self.f.program.plan.devices,
            "seconds": self._wall(),
            **versions(),
        }
        save_checkpoint(self.checkpoint, (self.f.state, self.metrics), meta)
        self.saved_at = time.perf_counter()

    def restore(self, meta: dict) -> None:
        """Continue from the checkpoint whose record is `meta`. ConfigError if the data differ."""
        for name in ("dataset", "partition"):
            if meta[name] != getattr(self.f, name).digest():
                raise ConfigError(
                    f"checkpoint = {str(self.checkpoint)!r}: expected this {name}'s, but it is "
                    f"another one's; pass the same {name} or another output_dir"
                )
        like = (self.f.state, self.metrics)
        state, self.metrics = load_checkpoint(self.checkpoint, like)
        self.f.state = self.f.program.plan.put(state)
        self.done, self.earlier_seconds = meta["round"], meta["seconds"]

    def _wall(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def result(self) -> Result:
        f, work = self.f, self.f.scheduler.work
        traffic = self.algorithm.traffic(f.inputs.hp, f.state)
        ran = np.arange(f.spec.rounds) < self.done
        metrics = {
            **self.metrics,
            "bytes_down": work.participants * traffic.down * ran,
            "bytes_up": work.participants * traffic.up * ran,
            "client_samples": work.samples * ran,
        }
        summary = {
            "algorithm": f.spec.algorithm,
            "dataset": f.dataset.name,
            "seed": f.spec.seed,
            **summarise(self.metrics),
            **self.algorithm.summary(f.state),
            "rounds": self.done,
            "client_samples_per_second": self.timed_samples / max(self.round_seconds, 1e-9),
            "useful_work_fraction": work.useful_fraction(f.scheduler.shape, f.spec.batch_size),
            "compile_seconds": self.compile_seconds,
            "round_seconds": self.round_seconds,
            "server_seconds": self.host_seconds,
            "wall_seconds": self._wall(),
            "bytes_up": float(metrics["bytes_up"].sum()),
            "bytes_down": float(metrics["bytes_down"].sum()),
            "lanes": f.program.plan.describe(),
            "lane_probe_seconds_per_step": {str(v): t for v, t in f.lane_choice.seconds.items()},
            "unfused": f.program.chunk.unfused,
            "partition_digest": f.partition.digest(),
            "split": dataclasses.asdict(f.split),
            "dataset_note": f.dataset.note,
            **versions(),
        }
        artifacts = {name: np.asarray(a) for name, a in self.algorithm.artifacts(f.state).items()}
        return Result(f.spec, metrics, summary, artifacts, f.state, f.partition)


def versions() -> dict[str, str]:
    """What made the numbers, besides the settings."""
    return {
        "fedjax_het": fedjax_het.__version__,
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "device": jax.devices()[0].device_kind,
        "matmul_precision": str(jax.config.jax_default_matmul_precision or "default"),
    }


class RoundTimes(NamedTuple):
    """What `benchmark_rounds` measured."""

    seconds: list[float]  # of each round
    samples: list[int]  # client samples of each round
    cohorts: list[np.ndarray]  # ids of the clients that took part
    compile_seconds: float
    useful_work_fraction: float
    lanes: str


def benchmark_rounds(
    spec: RunSpec, rounds: int, dataset: Dataset | None = None, **plan
) -> RoundTimes:
    """Time local training and averaging alone: the first rounds of `spec`, one program call each
    and no evaluation inside. For `plan` see `simulate`.
    """
    spec = dataclasses.replace(spec, rounds=rounds + 5, eval_every=rounds + 5)
    run = _Run(prepare(spec, dataset=dataset, **plan), None, None, time.perf_counter())
    run.compile()
    f, seconds = run.f, []
    for r in range(rounds):
        inputs = jax.block_until_ready(f.chunk_inputs(r, 1, run.capacity))
        start = time.perf_counter()
        f.state, _ = jax.block_until_ready(f.program.chunk(f.state, inputs))
        seconds.append(time.perf_counter() - start)
    work = f.scheduler.work
    return RoundTimes(
        seconds,
        work.samples[:rounds].tolist(),
        [f.scheduler.participants(r) for r in range(rounds)],
        run.compile_seconds,
        work.useful_fraction(f.scheduler.shape, f.spec.batch_size),
        f.program.plan.describe(),
    )

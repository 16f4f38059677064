"""Federations advanced together, from the first round to the last: the host's side of the work."""

import dataclasses
import logging
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_het.algorithms.base import Algorithm, num_bytes
from fedjax_het.common.environment import environment
from fedjax_het.common.errors import ConfigError
from fedjax_het.engine.checkpoint import load_checkpoint, read_meta, save_checkpoint
from fedjax_het.engine.evaluation import client_tests
from fedjax_het.engine.host_state import Pager
from fedjax_het.engine.lanes import Averages, ServerTraining
from fedjax_het.engine.plan import BLOCK, DEVICE, RUN, RUNS, host_values
from fedjax_het.engine.randomness import Stream, device_key
from fedjax_het.engine.rounds import SCHEDULE_KINDS, ChunkInputs, RoundMetrics
from fedjax_het.engine.schedule import (
    RoundSchedule,
    Scheduler,
    Shape,
    merged_cuts,
    stack_rounds,
    with_rows,
)
from fedjax_het.measures.personal import mean_accuracies
from fedjax_het.running.prepare import HOST_STATE, Federation, Group, client_state_bytes
from fedjax_het.running.result import Result, summarise
from fedjax_het.settings.spec import RunSpec

log = logging.getLogger("fedjax_het")

MAX_CHUNK = 16  # rounds per call of the compiled program, at most
MAX_SCHEDULE_BYTES = 2**26  # of the rounds of a call, unless one alone takes more
MAX_TABLE_BYTES = 2**26  # likewise of client states where they are moved to the devices and back
CHUNK_SECONDS = 2.0  # how often progress shows and a checkpoint may be written
CHECKPOINT_SECONDS = float(os.environ.get("FEDJAX_HET_CHECKPOINT_SECONDS", "20"))  # 0: always
CHECKPOINT_SHARE = 0.1  # of the time, at most, is spent on checkpoints
CHECKPOINT = "checkpoint.npz"


class Progress(NamedTuple):
    """Where runs stand; handed to the `progress` callable between chunks."""

    phase: str  # "rounds" or the name of work between rounds
    done: int
    total: int
    rate: float  # rounds (or iterations) per second since this start, of each run
    samples_per_second: float  # client samples of all runs; 0 outside rounds
    seconds_to_go: float
    accuracy: float = np.nan  # the latest measured, mean over the runs


class Batch:
    """Runs of one group that go in step: chunks of rounds, work between rounds, checkpoints.

    Args:
      federations: as many as run at once, or fewer.
      folders: one for each where its checkpoints are kept, or None to keep none.
      started: when their wall-clock began.
    """

    def __init__(
        self,
        group: Group,
        federations: Sequence[Federation],
        *,
        folders: Sequence[Path] | None = None,
        progress: Callable[[Progress], None] | None = None,
        started: float | None = None,
    ):
        assert len(federations) <= group.plan.capacity
        self.group, self.federations, self.plan = group, list(federations), group.plan
        self.folders = folders
        self.progress = progress or (lambda p: None)
        self.started = time.perf_counter() if started is None else started
        # An idle place does the last federation's work once more, or nothing.
        short = self.plan.capacity - len(self.federations)
        self.places = self.federations + self.federations[-1:] * short
        self.rounds = self.federations[0].spec.rounds
        shapes = [shape for shape in (group.shape, group.tuning_shape) if shape is not None]
        batch_size = self.federations[0].spec.batch_size
        bytes_a_round = sum(shape.num_bytes(batch_size) for shape in shapes)
        fitting = MAX_SCHEDULE_BYTES // (bytes_a_round * self.plan.capacity)
        self.num_rows = group.program.measuring.num_clients  # client states on the devices
        self.pager: Pager | None = None
        self.paged = group.client_state == HOST_STATE
        if self.paged:
            cohort = max(f.scheduler.cohort_size for f in self.federations)
            row = client_state_bytes(group.program, self.federations[0].spec)
            fitting = min(fitting, MAX_TABLE_BYTES // (row * cohort * self.plan.width))
        self.capacity = max(1, min(MAX_CHUNK, self.rounds, fitting))
        if self.paged:
            self.num_rows = min(self.num_rows, self.capacity * cohort)
        self.done = 0
        self.stopped: list[int | None] = [None] * len(self.federations)  # the round it diverged in
        measuring = group.program.measuring
        self.metrics = [
            self._curves(measuring.nothing(self.algorithm, self.rounds)) for _ in self.federations
        ]
        self.compile_seconds = self.round_seconds = self.host_seconds = self.earlier_seconds = 0.0
        self.timed_rounds, self.timed_samples = 0, 0
        self.saved_at, self.save_seconds = time.perf_counter(), 0.0
        hp = self._stacked([{k: np.float32(v) for k, v in f.spec.hp.items()} for f in self.places])
        self.inputs = group.shared._replace(
            hp=hp,
            train_key=self._keys(Stream.TRAIN),
            client_tests=self._client_tests(),
            server=self._server(),
            averages=self._averages(),
            survey=self._survey(
                lambda scheduler, shape, cuts: [scheduler.round(0, shape, cuts(0))]
            ),
        )
        self.state: Any = None  # until it starts: `memory` is asked before anything is allocated

    @property
    def algorithm(self) -> Algorithm:
        return self.group.program.algorithm

    @property
    def _apart(self) -> bool:
        return self.plan.spreads == RUNS

    def announce(self) -> None:
        """Log what is about to run: the splits, the lanes, the share of useful work."""
        name = self.group.dataset.name
        for federation in self.federations:
            log.info("data: %s. %s", name, self.group.split(federation))
            if federation.server is not None:
                log.info("server: %s", self.group.server_summary(federation))
        log.info(
            "lanes: %s; %.1f %% of the samples that they run through are the clients'",
            self.plan.describe(),
            100 * self.group.useful_fraction(self.federations),
        )
        if self.paged:
            log.info(
                "client states: on the host; on the devices those of %d clients, for %d rounds",
                self.num_rows,
                self.capacity,
            )
        if self.group.dataset.note:
            log.info("note: %s", self.group.dataset.note)

    def start(self, metas: Sequence[dict] | None = None) -> None:
        """Begin, or continue from the checkpoints whose records are `metas`; compile.

        Raises ConfigError if a checkpoint is of other data.
        """
        given = (self.inputs.hp, self._keys(Stream.INIT))
        state = self.group.program.init(1 if self.paged else self.num_rows)(*given)
        if self.paged:
            schedulers = [f.scheduler for f in self.places]
            self.pager = Pager(self.plan, schedulers, state.clients, self.num_rows)
            state = state._replace(clients=())
        self.state = state if self._apart else self.plan.put(state)
        if metas is not None:
            self._restore(metas)
        self._compile()

    def memory(self) -> int:
        """Bytes that the compiled programs need on each device. Nothing is allocated for it."""
        hp, key = self.inputs.hp, self._keys(Stream.INIT)
        sharding = self.plan.sharding(RUN)
        state = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding),
            jax.eval_shape(self.group.program.init(self.num_rows), hp, key),
        )
        programs = self.group.program
        lowered = [programs.chunk.program.lower(state, self.first_step())]
        lowered += [
            work.program.lower(hp, state, key, jnp.int32(1), self.inputs.server)
            for work in programs.host_work.values()
        ]
        needs = (one.compile().memory_analysis() for one in lowered)
        return max(
            n.argument_size_in_bytes
            + n.output_size_in_bytes
            - n.alias_size_in_bytes
            + n.temp_size_in_bytes
            for n in needs
        )

    # --- what the programs read --------------------------------------------------------------

    def _stacked(self, trees: Sequence[Any]) -> Any:
        """One pytree for every place -> what the programs take: stacked, or the only one."""
        if not self._apart:
            return self.plan.put(trees[0])
        return self.plan.put(jax.tree.map(lambda *leaves: np.stack(leaves), *trees), RUN)

    def _keys(self, stream: Stream) -> jax.Array:
        keys = [device_key(f.spec.seed, stream) for f in self.places]
        return self.plan.put(jnp.stack(keys), RUN) if self._apart else self.plan.put(keys[0])

    def _client_tests(self):
        if self.group.program.kinds.client_tests is None:
            return None
        shape = self.group.tests_shape
        tests = [client_tests(self.plan, f.tests, shape) for f in self.places]
        if not self._apart:
            return self.plan.put(tests[0], BLOCK)
        return self._stacked(tests)

    def _server(self) -> ServerTraining | None:
        if self.group.program.kinds.server is None:
            return None

        def of(federation: Federation) -> ServerTraining:
            examples = self.group.server_examples(federation)
            spec, count = federation.spec, len(examples.labels)
            # FSL, section IV-A: E_s = ceil(n E_c / (N n_0)).
            held = len(federation.partition.indices) * (spec.local_epochs or 1)
            return ServerTraining(examples, np.int32(-(-held // (spec.num_clients * count))))

        return self._stacked([of(federation) for federation in self.places])

    def _averages(self) -> Averages | None:
        if self.group.program.kinds.averages is None:
            return None
        return self._stacked([self.group.averages(federation) for federation in self.places])

    def _survey(self, rounds_of: Callable) -> RoundSchedule | None:
        """The one round in which all clients' gradients are measured."""
        if self.group.survey_shape is None:
            return None
        survey = [f.survey for f in self.places]
        stacked = self._schedules(rounds_of, survey, self.group.survey_shape, capacity=1)
        return jax.tree.map(lambda a: a[:, 0] if self._apart else a[0], stacked)

    def chunk_inputs(self, first: int, count: int) -> ChunkInputs:
        """What the program reads for rounds `first .. first+count-1`."""
        rounds = range(first, first + count)

        def rounds_of(scheduler: Scheduler, shape: Shape, cuts: Callable):
            return [scheduler.round(r, shape, cuts(r)) for r in rounds]

        return self._scheduled(rounds_of, count)

    def first_step(self) -> ChunkInputs:
        """The same for the first step of every lane of the next round, and of an evaluation."""
        r = min(self.done, self.rounds - 1)

        def rounds_of(scheduler: Scheduler, shape: Shape, cuts: Callable):
            step = scheduler.first_step(r, shape)
            if self.plan.width > 1:  # one segment for all: where a lane has no client, it idles
                step = step._replace(num_segments=np.ones_like(step.num_segments))
            return [step]

        return self._scheduled(rounds_of, 1)._replace(
            num_eval_batches=self.plan.put(jnp.int32(1)),
            survey=self._survey(lambda scheduler, shape, _: [scheduler.first_step(0, shape)]),
        )

    def _scheduled(self, rounds_of: Callable, count: int) -> ChunkInputs:
        """Inputs with what `rounds_of(scheduler, shape, cuts)` gives for all places, stacked."""
        inputs = self.inputs._replace(
            schedule=self._schedules(
                rounds_of, [f.scheduler for f in self.places], self.group.shape, paged=self.paged
            ),
            num_rounds=self._num_rounds(count),
        )
        if self.group.tuning_shape is None:
            return inputs
        tuning = [f.tuning for f in self.places]
        return inputs._replace(tuning=self._schedules(rounds_of, tuning, self.group.tuning_shape))

    def _schedules(
        self,
        rounds_of: Callable,
        schedulers: Sequence[Scheduler],
        shape: Shape,
        *,
        capacity: int | None = None,
        paged: bool = False,
    ) -> RoundSchedule:
        capacity = capacity or self.capacity
        width, schedules = self.plan.width, []
        for start in range(0, len(schedulers), width):
            mine = schedulers[start : start + width]
            cuts = (lambda r: None) if width == 1 else lambda r, s=mine: merged_cuts(s, r)
            schedules += [stack_rounds(rounds_of(s, shape, cuts), capacity) for s in mine]
        if paged:
            schedules = [
                with_rows(one, s.trained(np.unique(one.round)), self.num_rows)
                for one, s in zip(schedules, schedulers, strict=True)
            ]
        if not self._apart:
            return self.plan.put(schedules[0])
        columns = zip(SCHEDULE_KINDS, zip(*schedules, strict=True), strict=True)
        stacked = RoundSchedule(
            *(np.stack(leaves[::width] if kind == DEVICE else leaves) for kind, leaves in columns)
        )
        return self.plan.put(stacked, RUN)

    def _num_rounds(self, count: int) -> jax.Array:
        """`count` for every device that has a run."""
        if not self._apart:
            return self.plan.put(jnp.int32(count))
        starts = np.arange(0, len(self.places), self.plan.width)
        return self.plan.put(np.int32(count) * (starts < len(self.federations)), DEVICE)

    # --- the work ----------------------------------------------------------------------------

    def _compile(self) -> None:
        """Compile the rounds' program on one step, and verify its numbers where needed."""
        start = time.perf_counter()
        nothing = self._verify("rounds")._replace(num_rounds=self._num_rounds(0))
        self.state, _ = jax.block_until_ready(self.group.program.chunk(self.state, nothing))
        self.compile_seconds += time.perf_counter() - start

    def _verify(self, part: str) -> ChunkInputs:
        """Verify the rounds' program in its present state; -> what its first step reads."""
        one_step = self.first_step()
        self.load_states([min(self.done, self.rounds - 1)])
        self.group.program.chunk.verify((self.state, one_step), part)
        return one_step

    def finish(self) -> None:
        """Run what is left."""
        upcoming: dict[tuple[int, int], ChunkInputs] = {}
        while self.done < self.rounds and None in self.stopped:
            self._host_work()
            count = self._chunk_length()
            inputs = upcoming.pop((self.done, count), None)
            if inputs is None:
                inputs = self.chunk_inputs(self.done, count)
            start = time.perf_counter()
            rounds = range(self.done, self.done + count)
            self.load_states(rounds)
            self.state, metrics = self.group.program.chunk(self.state, inputs)
            following = (self.done + count, min(count, self.rounds - self.done - count))
            if following[1] > 0:  # prepared on the host while the device works
                upcoming = {following: self.chunk_inputs(*following)}
            metrics = jax.tree.map(host_values, metrics)
            self.store_states(rounds)
            self.round_seconds += time.perf_counter() - start
            self.timed_rounds += count
            for i, federation in enumerate(self.federations):
                mine = jax.tree.map(lambda a, i=i: a[i], metrics) if self._apart else metrics
                self._record(i, count, mine)
                work = federation.scheduler.work.samples[self.done : self.done + count]
                self.timed_samples += int(work.sum())
            self.done += count
            self._report()
            self._save()

    def load_states(self, rounds: Sequence[int]) -> None:
        """Put the states of these rounds' clients on the devices, if they are on the host."""
        if self.pager is not None:
            self.state = self.state._replace(clients=())  # makes room
            self.state = self.state._replace(clients=self.pager.load(rounds))

    def store_states(self, rounds: Sequence[int]) -> None:
        """Take them back when these rounds are done."""
        if self.pager is not None:
            self.pager.store(self.state.clients, rounds)

    def _curves(self, metrics: RoundMetrics) -> dict[str, np.ndarray]:
        """Metrics by name, `[R]` each; a domain's apart, and their unweighted mean; of clients
        `[R, K]`, their mean, and apart where they have names; what else the method records as it
        is."""
        curves = {name: getattr(metrics, name) for name in RoundMetrics._fields[:4]}
        if metrics.domain_accuracy is not None:
            names = (*self.group.dataset.domain_names, "domains")
            domains = metrics.domain_accuracy
            of_domains = [*domains.T, domains.mean(1)]
            curves |= {f"test_accuracy_{n}": a for n, a in zip(names, of_domains, strict=True)}
        if metrics.client_accuracy is not None:
            clients = metrics.client_accuracy
            curves["client_accuracy"] = clients
            curves["mean_client_accuracy"] = mean_accuracies(clients).astype(np.float32)
            names = self.federations[0].partition.client_names
            curves |= {f"client_accuracy_{name}": clients[:, k] for k, name in enumerate(names)}
        return curves | metrics.records

    def _record(self, i: int, count: int, metrics: RoundMetrics) -> None:
        """Keep a chunk's metrics, up to the round in which the run diverged."""
        if self.stopped[i] is not None:
            return
        bad = np.flatnonzero(~np.isfinite(metrics.train_loss[:count]))
        kept = int(bad[0]) + 1 if len(bad) else count
        for name, values in self._curves(metrics).items():
            self.metrics[i][name][self.done : self.done + kept] = values[:kept]
        if len(bad):
            self.stopped[i] = self.done + kept
            seed = self.federations[i].spec.seed
            log.warning("diverged in round %d; stopped (seed %d)", self.stopped[i], seed)

    def _chunk_length(self) -> int:
        """As many rounds as fit the time between two signs of life, up to the next stop."""
        stops = [w.before_round for w in self.algorithm.host_work if w.before_round > self.done]
        most = min(min([self.rounds, *stops]) - self.done, self.capacity)
        if not self.timed_rounds:
            return 1
        pace = self.round_seconds / self.timed_rounds
        return self.plan.agreed(max(1, min(most, int(CHUNK_SECONDS / pace))))

    def _host_work(self) -> None:
        """Work that is due before the next round: on one device, or for every run on its own."""
        for work in self.algorithm.host_work:
            if work.before_round != self.done or self._work_done(work) >= work.total:
                continue
            program = self.group.program.host_work[work.name]
            local = (lambda tree: tree) if self._apart else _on_one_device
            state, hp = local(self.state), local(self.inputs.hp)
            key, server = local(self._keys(Stream.SERVER)), local(self.inputs.server)
            start = time.perf_counter()
            program.verify((hp, state, key, jnp.int32(1), server))
            state = jax.block_until_ready(program(hp, state, key, jnp.int32(0), server))
            self.compile_seconds += time.perf_counter() - start
            self.state = state
            done = first = self._work_done(work)
            start, count = time.perf_counter(), 1
            while done < work.total:
                count = self.plan.agreed(min(count, work.total - done))
                state = jax.block_until_ready(program(hp, state, key, jnp.int32(count), server))
                done += count
                rate = (done - first) / (time.perf_counter() - start)
                count = max(1, int(CHUNK_SECONDS * rate))
                self.progress(
                    Progress(work.name, done, work.total, rate, 0.0, (work.total - done) / rate)
                )
                self.state = state
                self._save()
            self.host_seconds += time.perf_counter() - start
            self.state = state if self._apart else self.plan.put(state)
            start = time.perf_counter()
            self._verify(work.name)
            self.compile_seconds += time.perf_counter() - start

    def _work_done(self, work) -> int:
        first = jax.tree.map(lambda a: a[0], self.state) if self._apart else self.state
        return work.done(first)

    def _report(self) -> None:
        rate = self.timed_rounds / max(self.round_seconds, 1e-9)
        name = "test_accuracy" if self.algorithm.global_model else "mean_client_accuracy"
        seen = [m[name][: self.done] for m in self.metrics]
        latest = [a[np.isfinite(a)][-1] for a in seen if np.isfinite(a).any()]
        self.progress(
            Progress(
                "rounds",
                self.done,
                self.rounds,
                rate,
                self.timed_samples / max(self.round_seconds, 1e-9),
                (self.rounds - self.done) / rate,
                float(np.mean(latest)) if latest else np.nan,
            )
        )

    # --- what is kept ------------------------------------------------------------------------

    def _states(self) -> list[Any]:
        """Every run's state, on the host."""
        host = jax.tree.map(host_values, self.state)
        if not self._apart:
            return [host]
        return [jax.tree.map(lambda a, i=i: a[i], host) for i in range(len(self.federations))]

    def _save(self) -> None:
        """Write checkpoints, if they are wanted and the last are old enough."""
        start = time.perf_counter()
        mine = self._apart or jax.process_index() == 0
        if self.folders is None or not mine:
            return
        if CHECKPOINT_SECONDS:
            wait = max(CHECKPOINT_SECONDS, self.save_seconds / CHECKPOINT_SHARE)
            if start - self.saved_at < wait:
                return
        runs = zip(self.federations, self.folders, self._states(), self.metrics, strict=True)
        for i, (federation, folder, state, metrics) in enumerate(runs):
            meta = {
                "digest": federation.spec.digest(),
                "spec": federation.spec.to_dict(),
                "partition": federation.partition.digest(),
                "dataset": self.group.dataset.digest(),
                "round": self.done,
                "work": {w.name: w.done(state) for w in self.algorithm.host_work},
                "stopped": self.stopped[i],
                "blocks": self.plan.blocks,
                "lanes": self.plan.lanes,
                "touched": None,  # how many clients' states there are, if not all
                "seconds": self._wall(),
                **environment(),
            }
            saved: tuple = (state, metrics)
            if self.pager is not None:
                clients = self.pager.states[i]
                meta["touched"] = len(clients.touched)
                state = state._replace(clients=clients.rows)
                saved = (state, metrics, clients.touched)
            save_checkpoint(folder / CHECKPOINT, saved, meta)
        self.saved_at = time.perf_counter()
        self.save_seconds = self.saved_at - start

    def _restore(self, metas: Sequence[dict]) -> None:
        states = []
        for i, (meta, federation) in enumerate(zip(metas, self.federations, strict=True)):
            path = self.folders[i] / CHECKPOINT
            found = {"dataset": self.group.dataset, "partition": federation.partition}
            for name, data in found.items():
                if meta[name] != data.digest():
                    raise ConfigError(
                        f"checkpoint = {str(path)!r}: expected this {name}'s, but it is "
                        f"another one's; pass the same {name} or another output_dir"
                    )
            state, self.metrics[i] = self._load(path, meta, i)
            self.stopped[i] = meta["stopped"]
            states.append(state)
        self.state = self._stacked(states + states[-1:] * (len(self.places) - len(states)))
        self.done, self.earlier_seconds = metas[0]["round"], metas[0]["seconds"]

    def _load(self, path: Path, meta: dict, i: int) -> tuple[Any, dict]:
        """A run's state and curves, from a checkpoint of a run that had clients' states here or
        elsewhere."""
        state, saved = self._states()[i], meta.get("touched")
        if self.pager is None and saved is None:
            return load_checkpoint(path, (state, self.metrics[i]))
        fresh = state.clients
        first = self.pager.states[i].first if self.pager else jax.tree.map(lambda a: a[0], fresh)
        everyone = np.arange(self.group.program.measuring.num_clients)
        count = len(everyone) if saved is None else saved
        rows = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape), a.dtype), first)
        like = (state._replace(clients=rows), self.metrics[i], everyone[:count])
        state, metrics, *ids = load_checkpoint(path, like[:2] if saved is None else like)
        ids, rows = ids[0] if ids else everyone, state.clients
        if self.pager is not None:
            self.pager.states[i].scatter(ids, rows)
            return state._replace(clients=()), metrics
        clients = jax.tree.map(np.array, fresh)
        for of_all, of_ids in zip(*map(jax.tree.leaves, (clients, rows)), strict=True):
            of_all[ids] = of_ids
        return state._replace(clients=clients), metrics

    def _wall(self) -> float:
        """Wall-clock of one run: those made together share it."""
        spent = time.perf_counter() - self.started
        return self.earlier_seconds + spent / len(self.federations)

    def results(self) -> list[Result]:
        """What was made, in the order of the federations."""
        return [self._result(i, state) for i, state in enumerate(self._states())]

    def _result(self, i: int, state: Any) -> Result:
        group, plan, federation = self.group, self.plan, self.federations[i]
        spec, work, share = federation.spec, federation.scheduler.work, len(self.federations)
        hp = {name: np.float32(value) for name, value in spec.hp.items()}
        traffic = self.algorithm.traffic(hp, state)
        rounds = self.stopped[i] or self.done
        ran = np.arange(self.rounds) < rounds
        # What every client is sent once, with the first model, and what they send before.
        once_down, once_up = np.zeros(self.rounds), np.zeros(self.rounds)
        if self.algorithm.shares_server_data:
            once_down[0] += spec.num_clients * num_bytes(group.server_examples(federation))
        if self.algorithm.averaging is not None:
            numbers = int(np.prod(group.dataset.input_shape)) + group.dataset.num_classes
            once_up[0] += 4 * numbers * group.num_averages(federation)
            once_down[0] += spec.num_clients * once_up[0]
        up = work.participants * traffic.up + work.pairs * traffic.up_per_pair
        metrics = {
            **self.metrics[i],
            "bytes_down": work.participants * traffic.down * ran + once_down,
            "bytes_up": up * ran + once_up,
            "client_samples": work.samples * ran,
        }
        device = i // plan.width * plan.width
        held = group.server_summary(federation)
        summary = {
            "algorithm": spec.algorithm,
            "dataset": group.dataset.name,
            "seed": spec.seed,
            **summarise(self.metrics[i], group.dataset.domain_names),
            **self.algorithm.summary(hp, state),
            "rounds": rounds,
            "client_samples_per_second": self.timed_samples / max(self.round_seconds, 1e-9),
            "useful_work_fraction": group.useful_fraction(
                self.federations[device : device + plan.width]
            ),
            "compile_seconds": self.compile_seconds,
            "round_seconds": self.round_seconds / share,
            "server_seconds": self.host_seconds / share,
            "wall_seconds": self._wall(),
            "made_together": share,
            "bytes_up": float(metrics["bytes_up"].sum()),
            "bytes_down": float(metrics["bytes_down"].sum()),
            "lanes": plan.describe(),
            "lane_probe_seconds_per_step": {
                str(v): t for v, t in group.lane_choice.seconds.items()
            },
            "client_state": group.client_state,
            "unfused": group.program.chunk.unfused,
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "dataset_digest": group.dataset.digest(),
            "partition_digest": federation.partition.digest(),
            "split": dataclasses.asdict(group.split(federation)),
            "server": None if held is None else dataclasses.asdict(held),
            "dataset_note": group.dataset.note,
            **environment(),
        }
        artifacts = {name: np.asarray(a) for name, a in self.algorithm.artifacts(state).items()}
        if self.pager is not None:
            state = state._replace(clients=self.pager.states[i])
        return Result(
            spec, metrics, summary, artifacts, state, federation.partition, federation.tests
        )


def resumable(folder: Path, spec: RunSpec) -> dict | None:
    """The record of the checkpoint to continue a run from; None if there is none yet."""
    checkpoint = folder / CHECKPOINT
    if not checkpoint.exists():
        return None
    meta = read_meta(checkpoint)
    if meta["digest"] != spec.digest():
        then, now = meta["spec"], spec.resolved().to_dict()
        differ = [f"{k} {then.get(k)!r} -> {now[k]!r}" for k in now if then.get(k) != now[k]]
        raise ConfigError(
            f"checkpoint = {str(checkpoint)!r}: expected this configuration's, but it is another "
            f"one's ({', '.join(differ)}); use its settings or another output_dir"
        )
    return meta


def _on_one_device(tree: Any) -> Any:
    """A copy on this process's first device: the work is not made of lanes."""
    device = jax.local_devices()[0]
    return jax.tree.map(
        lambda a: (
            jax.device_put(a.addressable_data(0), device)
            if isinstance(a, jax.Array) and not a.is_fully_addressable
            else jax.device_put(a, device)
        ),
        tree,
    )

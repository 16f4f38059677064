"""Memory: estimated before it is asked for; what does not fit is refused with the numbers."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.small_runs import make_spec, run_spec

from fedjax_het import Placement, sweep
from fedjax_het.algorithms import METHODS
from fedjax_het.core import memory
from fedjax_het.core.autotune import LaneChoice
from fedjax_het.core.memory import compute_compiled_bytes, lower_bound_bytes
from fedjax_het.runtime import build, memory_limits
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_state import init_group
from fedjax_het.runtime.memory_limits import (
    InsufficientMemoryError,
    MemoryItem,
    require_memory,
    translate_out_of_memory,
)
from fedjax_het.utils.errors import ConfigError

# --- how much there is ---------------------------------------------------------------------------


def test_free_memory_is_what_the_tightest_group_leaves(monkeypatch, tmp_path):
    monkeypatch.setattr(memory, "_CGROUP_ROOT", tmp_path)
    monkeypatch.setattr(memory, "_free_address_space", lambda: ())
    machine = memory.free_host_bytes()
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_host_bytes() <= 1.5 * machine
    (tmp_path / "memory.max").write_text("5000000\n")
    (tmp_path / "memory.current").write_text("4000000\n")
    # What files take, the system gives back.
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 300000\nactive_file 200000\n")
    assert memory.free_host_bytes() == 1_500_000
    (tmp_path / "memory.max").write_text("1000\n")
    assert memory.free_host_bytes() == 0


def test_free_memory_is_what_the_limit_of_the_process_leaves(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10**15, 10**15))
    assert 10**15 - next(memory._free_address_space()) > 10**6
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10**5, 10**5))
    assert memory.free_host_bytes() == 0
    assert memory.usable_free_bytes(jax.local_devices()) == 0


# --- what a program takes ------------------------------------------------------------------------


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def test_the_least_that_a_program_takes_is_what_libraries_and_loops_make():
    product = traced(lambda a, b: jnp.tanh(a @ b).sum(), (50, 4), (4, 70))
    assert lower_bound_bytes(product) == 50 * 70 * 4
    by_value = traced(lambda a: (jnp.exp(a) + 1).sum(), (1000,))
    assert lower_bound_bytes(by_value) == 0

    def unused(a, b):
        a @ b
        return a + 1

    assert lower_bound_bytes(traced(unused, (50, 4), (4, 70))) == 0

    def collected(steps):
        def loop(a):
            return jax.lax.scan(lambda c, _: (c + 1, jnp.sin(c)), a, length=steps)

        return lower_bound_bytes(traced(loop, (20,)))

    assert collected(6) == (6 + 1) * 20 * 4
    assert collected(1) == 0  # is no loop

    def unrolled(a, w):  # what a gradient through a loop keeps
        return jax.grad(lambda w: jax.lax.fori_loop(0, 9, lambda i, x: jnp.tanh(x @ w), a).sum())(w)

    assert lower_bound_bytes(traced(unrolled, (30, 8), (8, 8))) >= 9 * 30 * 8 * 4


@pytest.mark.parametrize("name", ["scaffold", *(slow_case(n) for n in METHODS if n != "scaffold")])
def test_the_estimate_is_no_false_alarm(name):
    """What is said before the programs are compiled is less than the compiler says then."""
    group = build.prepare_group([make_spec(name)], UserObjects(make_user_dataset()))
    made = init_group(group, group.prepared_runs)
    for program, inputs in made.list_programs().values():
        least = lower_bound_bytes(program.trace(*inputs).jaxpr)
        assert 0 < least <= compute_compiled_bytes(program, inputs)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        slow_case("fedavg", {"batch_size": 50}),
        slow_case("scaffold", {"model": "mlp", "network_options": {"hidden": [300]}}),
        slow_case("fedavg", {"model": "convnet", "network_options": {"width": 4, "depth": 1}}),
    ],
)
def test_what_is_said_of_the_settings_is_less_too(monkeypatch, name, settings):
    monkeypatch.setattr(memory_limits, "_MIN_ACTIVATION_FACTOR", 2**60)  # every batch is looked at
    group = build.prepare_group([make_spec(name, **settings)], UserObjects(make_user_dataset()))
    made, federation = init_group(group, group.prepared_runs), group.prepared_runs[0]
    given = (
        federation.spec,
        group.prepared_runs[0].dataset,
        group.program.signature,
        jax.local_devices(),
        10**9,
    )
    said = sum(part.num_bytes for part in memory_limits.list_device_items(*given))
    assert 0 < said <= max(compute_compiled_bytes(*each) for each in made.list_programs().values())


# --- what is refused -----------------------------------------------------------------------------


def test_a_refusal_says_what_is_needed_there_and_would_fit():
    parts = [
        MemoryItem("batch_size", 1000, "a batch", 3 * 10**9),
        MemoryItem("model", "mlp", "it", 10**9),
    ]
    require_memory(parts, 4 * 10**9, "are free")
    require_memory(parts, None, "are free")
    with pytest.raises(InsufficientMemoryError) as refused:
        require_memory(parts, 2 * 10**9, "are free")
    assert str(refused.value) == (
        "batch_size = 1000: expected at most 333, as the run needs at least 4.00 GB, 3.00 GB of it "
        "for a batch, and 2.00 GB are free"
    )
    with pytest.raises(InsufficientMemoryError, match="expected more memory, or less of it, as"):
        require_memory([parts[0]._replace(alternative="less of it")], 0, "are free")
    # What the message names does fit.
    require_memory(
        [parts[0]._replace(setting_value=333, num_bytes=999 * 10**6), parts[1]], 2 * 10**9, ""
    )
    # All that grows with a setting counts to it.
    halves = [part._replace(num_bytes=part.num_bytes // 2) for part in (parts[0], *parts[:1])]
    with pytest.raises(InsufficientMemoryError, match="expected at most 500, as the run needs at"):
        require_memory(halves, 15 * 10**8, "are free")


@pytest.mark.parametrize(
    ("settings", "room", "said"),
    [
        ({"batch_size": 10**8}, 2 * 10**8, r"batch_size = 100000000: expected at most \d+, as"),
        (
            {"network_options": {"hidden": [10**6, 10**6]}},
            None,
            r"network_options = \{'hidden': \(1000000, 1000000\)\}: expected one that takes",
        ),
        ({}, 10**3, r"model = 'mlp': expected more memory|network_options = "),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_split(monkeypatch, settings, room, said):
    monkeypatch.setattr(build, "assign_data", None)
    with pytest.raises(InsufficientMemoryError, match=f"^{said}") as refused:
        run_spec(make_spec(**settings), memory=room)
    assert len(str(refused.value).splitlines()) == 1 and "needs at least" in str(refused.value)


def test_the_data_set_counts_on_every_device(monkeypatch):
    group = build.prepare_group([make_spec()], UserObjects(make_user_dataset()))
    given = group.prepared_runs[0].spec, group.prepared_runs[0].dataset, group.program.signature
    images = group.prepared_runs[0].dataset.train_images.nbytes

    def placed(devices):
        return memory_limits.list_device_items(*given, devices, None)[0].num_bytes

    one, two = jax.local_devices()[:1], jax.local_devices()[:2]
    assert placed(one) == 0  # the device reads the host's
    assert len(two) == 1 or placed(two) == images // 2
    monkeypatch.setattr(memory_limits, "_uses_host_memory", lambda devices: False)
    assert placed(two) == images


def test_what_clients_keep_goes_to_the_host_or_is_refused(monkeypatch):
    monkeypatch.setattr(build, "_place_shared_inputs", None)
    one = make_spec("scaffold", num_clients=50, participation=0.1)
    with pytest.raises(
        InsufficientMemoryError
    ) as refused:  # of 50 clients: a control and Adam's moments, 11 MB
        run_spec(one, memory=5 * 10**6, client_state="device")
    assert str(refused.value).startswith("num_clients = 50: expected at most ")
    assert "or client_state='host', as the run needs at least" in str(refused.value)


def test_a_compiled_program_that_needs_more_is_refused_before_its_first_round():
    group = build.prepare_group([make_spec()], UserObjects(make_user_dataset()))
    needed = compute_compiled_bytes(
        *init_group(group, group.prepared_runs).list_programs()["rounds"]
    )
    with pytest.raises(
        InsufficientMemoryError, match=r"^batch_size = 4: the rounds of fedavg need \d"
    ) as refused:
        run_spec(make_spec(), memory=needed - 1, progress=lambda progress: pytest.fail("it began"))
    assert "are there: expected batch_size = 3, a smaller network or more memory" in str(
        refused.value
    )
    assert not run_spec(make_spec(rounds=1), memory=2 * needed).summary["diverged"]


def test_a_run_that_finds_no_room_takes_fewer_lanes(monkeypatch):
    monkeypatch.setattr(
        "fedjax_het.runtime.placement.choose_lanes", lambda *a, **s: LaneChoice(4, 1, {})
    )
    asked = []

    def refused(programs, program, *args):
        asked.append(program.plan.lanes)
        if program.plan.lanes > 1:
            raise InsufficientMemoryError("none")

    monkeypatch.setattr("fedjax_het.runtime.session.require_memory_for_programs", refused)
    found = run_spec(
        make_spec(rounds=1, local_optimizer="sgd")
    )  # what clients keep could be elsewhere
    assert asked == [4, 2, 1] and "one flat lane" in found.summary["lanes"]
    with pytest.raises(InsufficientMemoryError, match="none"):  # what was said stands
        run_spec(make_spec(rounds=1, local_optimizer="sgd"), lanes=2)


def test_a_sweep_makes_the_runs_that_fit():
    specs = [
        make_spec(rounds=1),
        make_spec(rounds=1, batch_size=10**8),
        make_spec("fedprox", rounds=1),
    ]
    lines = []
    placement = Placement(memory=10**8)
    made = sweep(specs, dataset=make_user_dataset(), placement=placement, progress=lines.append)
    assert [result is None for result in made.results] == [False, True, False]
    (reason,) = made.not_run.values()
    assert reason.startswith("batch_size = 100000000: expected at most ")


def test_running_out_of_memory_all_the_same_is_one_line():
    settings = make_spec().resolved()
    for error in (
        MemoryError("Unable to allocate 9 GiB\nfor an array"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n  at x"),
    ):
        with pytest.raises(ConfigError) as refused, translate_out_of_memory(settings):
            raise error
        assert str(refused.value).startswith("memory: fedavg with num_clients=6, batch_size=4 ran")
        assert "\n" not in str(refused.value)
    with (
        pytest.raises(jax.errors.JaxRuntimeError, match="other"),
        translate_out_of_memory(settings),
    ):
        raise jax.errors.JaxRuntimeError("INTERNAL: other")


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
def test_a_command_under_a_limit_is_refused_in_one_line():
    words = "run --dataset digits --model mlp --num-clients 4 --rounds 1 --batch-size 100000000"
    command = f"ulimit -v 12000000; exec {sys.executable} -m fedjax_het {words} --quiet"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "batch_size = 100000000: expected at most" in line and "GB are free" in line

"""Memory: free bytes, lower bounds of programs, and refusals of runs that do not fit."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from support.data import make_user_dataset
from support.markers import method_cases, slow_case
from support.small_runs import FAST_OPTIONS, make_spec, run_spec, run_sweep

from fedjax_het import Placement
from fedjax_het.algorithms import METHODS
from fedjax_het.core import memory
from fedjax_het.core.autotune import LaneChoice
from fedjax_het.core.memory import compute_compiled_bytes, lower_bound_bytes
from fedjax_het.runtime import build, memory_limits
from fedjax_het.runtime.data_assignment import UserObjects
from fedjax_het.runtime.group_init import init_group, list_programs
from fedjax_het.runtime.memory_limits import (
    InsufficientMemoryError,
    MemoryItem,
    require_memory,
    translate_out_of_memory,
)
from fedjax_het.utils.errors import ConfigError

# --- how much there is ---------------------------------------------------------------------------


def test_free_memory_respects_control_groups(monkeypatch, tmp_path):
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


def test_free_memory_respects_the_process_limit(monkeypatch):
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10**15, 10**15))
    assert 10**15 - next(memory._free_address_space()) > 10**6
    monkeypatch.setattr(resource, "getrlimit", lambda which: (10**5, 10**5))
    assert memory.free_host_bytes() == 0
    assert memory.usable_free_bytes(jax.local_devices()) == 0


# --- what a program takes ------------------------------------------------------------------------


def traced(function, *shapes):
    return jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))


def test_lower_bound_counts_products_and_loops():
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


def prepare(spec, **settings):
    user_objects = UserObjects(make_user_dataset())
    return build.prepare_group([spec], user_objects, Placement(**settings))


CASES = [
    *method_cases(METHODS, {}, quick=["scaffold"]),
    slow_case("fedavg", {"batch_size": 50}),
    slow_case("scaffold", {"model": "mlp", "network_options": {"hidden": [300]}}),
    slow_case("fedavg", {"model": "convnet", "network_options": {"width": 4, "depth": 1}}),
]


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_estimates_are_below_compiled_memory(name, settings, monkeypatch):
    """The bounds of settings and of traced programs refuse no run that would fit."""
    monkeypatch.setattr(memory_limits, "_MIN_ACTIVATION_FACTOR", 2**60)  # count every batch
    group = prepare(make_spec(name, **settings))
    programs = list_programs(init_group(group, group.prepared_runs)).values()
    for program, inputs in programs:
        bound = lower_bound_bytes(program.trace(*inputs).jaxpr)
        assert 0 < bound <= compute_compiled_bytes(program, inputs)
    run = group.prepared_runs[0]
    arguments = run.spec, run.dataset, group.program.signature, jax.local_devices(), 10**9
    bound = sum(item.num_bytes for item in memory_limits.list_device_items(*arguments))
    assert 0 < bound <= max(compute_compiled_bytes(*program) for program in programs)


# --- what is refused -----------------------------------------------------------------------------


def test_refusal_names_needed_available_and_fitting():
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
            r"network_options = \{'hidden': \(1000000, 1000000\)\}: expected a value that takes",
        ),
        ({}, 10**3, r"model = 'mlp': expected more memory|network_options = "),
    ],
)
def test_settings_are_refused_before_partitioning(monkeypatch, settings, room, said):
    monkeypatch.setattr(build, "assign_data", None)
    with pytest.raises(InsufficientMemoryError, match=f"^{said}") as refused:
        run_spec(make_spec(**settings), memory=room)
    assert len(str(refused.value).splitlines()) == 1 and "needs at least" in str(refused.value)


def test_dataset_counts_on_every_device(monkeypatch):
    group = prepare(make_spec())
    run = group.prepared_runs[0]
    arguments = run.spec, run.dataset, group.program.signature
    images = run.dataset.train_inputs.nbytes

    def placed(devices):
        return memory_limits.list_device_items(*arguments, devices, None)[0].num_bytes

    one, two = jax.local_devices()[:1], jax.local_devices()[:2]
    assert placed(one) == 0  # the device reads the host's
    assert len(two) == 1 or placed(two) == images // 2
    monkeypatch.setattr(memory_limits, "_uses_host_memory", lambda devices: False)
    assert placed(two) == images


def test_large_client_states_are_refused_on_devices(monkeypatch):
    monkeypatch.setattr(build, "_place_shared_inputs", None)
    one = make_spec("scaffold", num_clients=50, participation=0.1)
    # Of 50 clients: a control and Adam's moments, 11 MB.
    with pytest.raises(InsufficientMemoryError) as refused:
        run_spec(one, memory=5 * 10**6, client_state="device")
    assert str(refused.value).startswith("num_clients = 50: expected at most ")
    assert "or client_state='host', as the run needs at least" in str(refused.value)


def test_compiled_program_is_refused_before_a_round():
    group = prepare(make_spec())
    programs = list_programs(init_group(group, group.prepared_runs))
    needed = compute_compiled_bytes(*programs["rounds"])
    message = r"^batch_size = 4: the rounds of fedavg need \d.*available: expected batch_size = 3, a smaller"
    with pytest.raises(InsufficientMemoryError, match=message):
        run_spec(make_spec(), memory=needed - 1, progress=lambda progress: pytest.fail("it began"))
    assert not run_spec(make_spec(rounds=1), memory=2 * needed).summary["diverged"]


@pytest.mark.parametrize(
    ("method", "option"),
    [
        slow_case("ccvr", "virtual_features"),
        slow_case("fedftg", "distill_batch_size"),
        ("fedgen", "generator_noise"),
    ],
)
def test_refusal_names_the_option_of_the_server(method, option, monkeypatch):
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda *a, **k: pytest.fail("compiled"))
    options = {**FAST_OPTIONS[method], option: 10**7}
    message = (
        rf"^options {option} = 10000000: expected at most \d+ or more memory, as the rounds of"
    )
    with pytest.raises(InsufficientMemoryError, match=message):
        run_spec(make_spec(method, options=options, local_optimizer="sgd"), memory=10**8, lanes=1)


def test_refusal_names_the_option_of_the_network():
    spec = make_spec("moon", options={"projection": 10**7})
    with pytest.raises(
        InsufficientMemoryError, match=r"^options projection = 10000000: expected at"
    ):
        run_spec(spec, memory=10**8)


def test_run_without_room_takes_fewer_lanes(monkeypatch):
    choose_lanes, lanes = lambda *args, **settings: LaneChoice(4, 1, {}), []
    monkeypatch.setattr("fedjax_het.runtime.placement.choose_lanes", choose_lanes)

    def refuse(group_state, memory):
        lanes.append(group_state.group.program.plan.lanes)
        if lanes[-1] > 1:
            raise InsufficientMemoryError("none")

    monkeypatch.setattr("fedjax_het.runtime.program_memory.require_memory_for_programs", refuse)
    spec = make_spec(rounds=1, local_optimizer="sgd")  # without client states, which could move
    result = run_spec(spec)
    assert lanes == [4, 2, 1] and "one flat lane" in result.summary["lanes"]
    with pytest.raises(InsufficientMemoryError, match="none"):  # the user's number stays
        run_spec(spec, lanes=2)


def test_sweep_executes_the_runs_that_fit():
    settings = ({}, {"batch_size": 10**8}, {"algorithm": "fedprox"})
    specs = [make_spec(**{"algorithm": "fedavg", "rounds": 1, **each}) for each in settings]
    sweep_result = run_sweep(specs, memory=10**8)
    assert [result is None for result in sweep_result.results] == [False, True, False]
    (reason,) = sweep_result.not_run.values()
    assert reason.startswith("batch_size = 100000000: expected at most ")


def test_out_of_memory_errors_are_translated():
    settings = make_spec().resolved()
    for error in (
        MemoryError("Unable to allocate 9 GiB\nfor an array"),
        jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\n  at x"),
    ):
        with pytest.raises(ConfigError) as refused, translate_out_of_memory(settings):
            raise error
        assert str(refused.value).startswith("memory: fedavg with num_clients=6, batch_size=4 ran")
        assert "\n" not in str(refused.value)
    spec = make_spec("ccvr", options={"virtual_features": 10**6}).resolved()
    with (
        pytest.raises(ConfigError, match="expected options virtual_features below 1000000, more"),
        translate_out_of_memory(spec),
    ):
        raise MemoryError
    error = jax.errors.JaxRuntimeError("INTERNAL: other")
    with pytest.raises(type(error), match="other"), translate_out_of_memory(settings):
        raise error


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v is Linux's")
def test_command_under_a_limit_is_refused_in_one_line():
    words = "run --dataset digits --model mlp --num-clients 4 --rounds 1 --batch-size 100000000"
    command = f"ulimit -v 12000000; exec {sys.executable} -m fedjax_het {words} --quiet"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, env=os.environ)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert "batch_size = 100000000: expected at most" in line and "GB are free" in line

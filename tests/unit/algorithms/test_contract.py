"""What a method's functions must be: what breaks it is one line, before anything compiles."""

import doctest
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.data import CLIENT_SIZES, consecutive_partition
from support.small_runs import OWN_METHOD_RUN, run_spec, sweep_specs

from fedjax_het import ConfigError, RunSpec, methods, register_method
from fedjax_het.algorithms.base import FineTuning, InitialTraffic, RoundInput, ServerStage, Traffic
from fedjax_het.algorithms.builders import add_mean_change, build_federated_algorithm
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.algorithms.server_step import with_server_step
from fedjax_het.core.client_algorithm import ClientUpdate
from fedjax_het.core.local_training import ServerMessage, make_local_sgd
from fedjax_het.core.training_variants import make_local_model_training
from fedjax_het.runtime import runner
from fedjax_het.runtime.results import Result


def test_methods_docstring_runs():
    actual = doctest.testmod(methods)
    assert actual.attempted >= 8 and actual.failed == 0


# --- each way of breaking it -----------------------------------------------------------------


class Own(NamedTuple):
    seen: jax.Array
    trace: jax.Array


def client_of(training, **changed):
    """FedAvg's client that counts its rounds, with some of its functions in place of these."""
    base = make_local_sgd(training)

    def init(hp, variables):
        return Own(jnp.int32(0), jnp.zeros(2))

    def begin(context, state):
        return base.begin(context, ())

    def end(context, local, state):
        upload, _, output = base.end(context, local, ())
        return upload, state._replace(seen=state.seen + 1), output

    functions = {"init": init, "begin": begin, "end": end}
    for name, change in changed.items():
        functions[name] = change(functions.get(name) or getattr(base, name))
    return base._replace(**functions)


def method(**changed):
    return lambda training, plan: build_federated_algorithm(
        training, plan, client_of(training, **changed)
    )


def adjusting(adjust):
    return lambda training, plan: build_federated_algorithm(
        training, plan, make_local_sgd(training, adjust=adjust)
    )


def losing(loss_and_gradient):
    return lambda training, plan: build_federated_algorithm(
        training, plan, make_local_sgd(training, loss_and_gradient=loss_and_gradient)
    )


def ending(change):
    """`end` with what it returns put through `change(upload, state, output)`."""
    return method(end=lambda end: lambda *arguments: change(*end(*arguments)))


def with_round(change):
    """FedAvg whose round gives `change(state, info)`."""

    def build(training, plan):
        algorithm = fedavg(training, plan)
        return algorithm._replace(round=lambda *arguments: change(*algorithm.round(*arguments)))

    return build


def with_server(**functions):
    """FedAvg with some of its server's functions in place of its own."""
    return lambda training, plan: build_federated_algorithm(
        training, plan, make_local_sgd(training), **functions
    )


def stepping(run_server_step):
    return lambda training, plan: with_server_step(fedavg(training, plan), run_server_step)


def replacing(**fields):
    """FedAvg with these fields in place of its own."""
    return lambda training, plan: fedavg(training, plan)._replace(**fields)


def recording(shapes, **actual):
    """FedAvg that announces records of `shapes`, and reports `found`."""

    def build(training, plan):
        algorithm = fedavg(training, plan)

        def round_(*arguments):
            state, info = algorithm.round(*arguments)
            return state, info._replace(records=actual)

        return algorithm._replace(round=round_, record_shapes=lambda num_clients: shapes)

    return build


def build_personal(training, plan):
    """FedAvg with FedAvg's server update and without a global model."""
    algorithm = fedavg(training, plan)
    return algorithm._replace(
        global_model=None,
        with_global_model=None,
        personal_variables=lambda hp, state, k: state.server.variables,
        can_page_state=False,
    )


UPLOAD_INSTEAD = "expected ClientUpdate(mean=..., sum=...)"

BREAKS = {
    "build takes (training): expected (training, plan)": lambda training: None,
    "built None: expected an Algorithm": lambda training, plan: None,
    "ClientAlgorithm.init takes (hp): expected (hp, variables)": method(
        init=lambda init: lambda hp: ()
    ),
    "ClientAlgorithm.begin takes (hp, message, state): expected (context, state)": method(
        begin=lambda begin: lambda hp, message, state: ()
    ),
    "ClientAlgorithm.step takes (context, batch): expected (context, local, batch)": method(
        step=lambda step: lambda context, batch: ((), 0.0)
    ),
    "ClientAlgorithm.end takes (hp, message, local, state): expected (context, local, state)": method(
        end=lambda end: lambda hp, message, local, state: ()
    ),
    "adjust takes (hp, gradient, local, message, batch, client): expected (context, gradient, local, batch)": adjusting(
        lambda hp, gradient, local, message, batch, client: (gradient, ())
    ),
    "adjust returned a dict: expected (gradient, aux)": adjusting(
        lambda context, gradient, local, batch: gradient
    ),
    "adjust: gradient['head']['bias'] is missing: expected the same structure, as the": adjusting(
        lambda context, gradient, local, batch: (local.aux, gradient)
    ),
    "adjust: gradient['head']['kernel'] is missing: expected the same structure": adjusting(
        lambda context, gradient, local, batch: (
            gradient | {"head": {"bias": gradient["head"]["bias"]}},
            local.aux,
        )
    ),
    "loss_and_gradient returned 2 values: expected (loss, gradient, variables)": losing(
        lambda context, local, batch: (0.0, local.variables["params"])
    ),
    "loss_and_gradient: gradient['params']['head']['bias'] is one too many": losing(
        lambda context, local, batch: (0.0, local.variables, local.variables)
    ),
    "init_server: .extra is a str: expected an array": with_server(
        init_server=lambda hp, variables: ServerMessage(variables, extra="a")
    ),
    "ClientAlgorithm.begin = None: expected a function of (context, state)": method(
        begin=lambda begin: None
    ),
    "ClientAlgorithm.step returned a ClientTrainState: expected (local, loss)": method(
        step=lambda step: lambda *arguments: step(*arguments)[0]
    ),
    "ClientAlgorithm.end returned 2 values: expected (update, state, output)": ending(
        lambda upload, state, output: (upload, state)
    ),
    "ClientAlgorithm.end returned None: expected (update, state, output)": method(
        end=lambda end: lambda *arguments: None
    ),
    f"ClientAlgorithm.end: update is a dict: {UPLOAD_INSTEAD}": ending(
        lambda upload, state, output: (upload.mean, state, output)
    ),
    "ClientAlgorithm.end: update.sum['k'] is key<fry>[]: random keys have no sum": ending(
        lambda upload, state, output: (upload._replace(sum={"k": jax.random.key(0)}), state, output)
    ),
    "update: the mean change": ending(
        lambda upload, state, output: (ClientUpdate(upload.mean["params"]), state, output)
    ),
    "update: the mean change['params']['head']['bias'] is float32[1,3]: expected float32[3]": ending(
        lambda upload, state, output: (
            ClientUpdate(jax.tree.map(lambda leaf: leaf[None], upload.mean)),
            state,
            output,
        )
    ),
    "ClientAlgorithm.end: state['seen'] is one too many, and .seen is missing": ending(
        lambda upload, state, output: (upload, {"seen": state.seen}, output)
    ),
    "ClientAlgorithm.end: state.seen is float32[]: expected int32[], as `init` returns": ending(
        lambda upload, state, output: (upload, state._replace(seen=0.5), output)
    ),
    "ClientAlgorithm.end: state.trace is float32[3]: expected float32[2], as `init` returns": ending(
        lambda upload, state, output: (upload, state._replace(trace=jnp.ones(3)), output)
    ),
    "ClientAlgorithm.step: local.aux is one too many: expected the same structure, as `begin` returns": method(
        step=lambda step: lambda *arguments: (step(*arguments)[0]._replace(aux=jnp.ones(1)), 0.0)
    ),
    "ClientAlgorithm.step: loss is float32[3]: expected a float32 scalar": method(
        step=lambda step: lambda *arguments: (step(*arguments)[0], jnp.zeros(3))
    ),
    "Algorithm.round returned a State: expected (state, info)": with_round(
        lambda state, info: state
    ),
    "Algorithm.round: state.clients is one too many: expected the same structure": with_round(
        lambda state, info: (state._replace(clients=jnp.zeros(2)), info)
    ),
    "Algorithm.round: state.round is float32[]: expected an int32 scalar": with_round(
        lambda state, info: (state._replace(round=jnp.float32(0)), info)
    ),
    "init_server takes (hp): expected (hp, variables)": with_server(init_server=lambda hp: None),
    "init_server returned None: expected a ServerMessage": with_server(
        init_server=lambda hp, variables: None
    ),
    "update returned None: expected a ServerMessage": with_server(
        update=lambda hp, server, upload, counts: None
    ),
    "update returned a dict: expected a ServerMessage": with_server(
        update=lambda hp, server, upload, counts: {"variables": {}}
    ),
    "make_message takes (server): expected (server, cohort)": with_server(
        make_message=lambda server: server
    ),
    "make_message returned None: expected a ServerMessage": with_server(
        make_message=lambda server, cohort: None
    ),
    "run_server_step takes (step_state, context): expected (hp, step_state, context)": stepping(
        lambda step_state, context: None
    ),
    "run_server_step returned a dict: expected (variables, step_state)": stepping(
        lambda hp, step_state, context: context.variables_after
    ),
    "run_server_step: variables['params']['head']['bias'] is missing: expected the same structure": stepping(
        lambda hp, step_state, context: ({}, step_state)
    ),
    "client is a tuple of 2: expected a ClientAlgorithm": lambda training, plan: (
        build_federated_algorithm(training, plan, (1, 2))
    ),
    "Algorithm.global_model returned None: expected variables, a dict of params and state": lambda training, plan: (
        fedavg(training, plan)._replace(global_model=lambda state: None)
    ),
    "Algorithm.result_model returned None: expected variables, a dict of params and state": replacing(
        result_model=lambda state: None
    ),
    "Algorithm.global_model: variables['params']['x'] is one too many, and": replacing(
        global_model=lambda state: {"params": {"x": jnp.zeros(3)}, "state": {}}
    ),
    "Algorithm.record_shapes returned None: expected a dict": lambda training, plan: fedavg(
        training, plan
    )._replace(record_shapes=lambda num_clients: None),
    "ClientAlgorithm.begin returned None: expected the client in training, () if there is none": method(
        begin=lambda begin: lambda *arguments: None
    ),
    "ClientAlgorithm.begin: ['a'] is a str: expected an array": method(
        begin=lambda begin: lambda *arguments: {"a": "x"}
    ),
    "ClientAlgorithm.init returned None: expected the client's state, () if there is none": method(
        init=lambda init: lambda *arguments: None
    ),
    "Algorithm.traffic: down = 'a': expected a number of bytes": replacing(
        traffic=lambda hp, state: Traffic("a", 1)
    ),
    "Algorithm.traffic: up = nan: expected a number of bytes": replacing(
        traffic=lambda hp, state: Traffic(1, float("nan"))
    ),
    "Algorithm.traffic returned None: expected a Traffic": replacing(
        traffic=lambda hp, state: None
    ),
    "Algorithm.initial_traffic = None: expected a function": replacing(initial_traffic=None),
    "Algorithm.initial_traffic returned None: expected a InitialTraffic": replacing(
        initial_traffic=lambda holdings: None
    ),
    "Algorithm.initial_traffic: down = -1: expected a number of bytes": replacing(
        initial_traffic=lambda holdings: InitialTraffic(-1)
    ),
    "Algorithm.initial_traffic takes (): expected (federation_data)": replacing(
        initial_traffic=lambda: InitialTraffic()
    ),
    "Algorithm.round = None: expected a function": replacing(round=None),
    "Algorithm.server_stages = None: expected a list": replacing(server_stages=None),
    "Algorithm.server_stages[0] = a function: expected a ServerStage": replacing(
        server_stages=(lambda: None,)
    ),
    "ServerStage.num_iterations = -1: expected a whole number >= 0": replacing(
        server_stages=(ServerStage("w", (0,), -1, lambda state: 0, lambda *arguments: None),)
    ),
    "ServerStage.before_rounds = [2, 1]: expected rounds in ascending order": replacing(
        server_stages=(ServerStage("w", (2, 1), 1, lambda state: 0, lambda *arguments: None),)
    ),
    "Algorithm.round_inputs = None: expected a list": replacing(round_inputs=None),
    "RoundInput.make_inputs = None: expected a function": replacing(
        round_inputs=(RoundInput("x", None),)
    ),
    "RoundInput('x').make_inputs returned None: expected a list of 1, one for each federation": replacing(
        round_inputs=(RoundInput("x", lambda holdings: None),)
    ),
    "RoundInput('x').make_inputs returned 2 of them: expected a list of 1, one for each federation": replacing(
        round_inputs=(RoundInput("x", lambda holdings: [1.0, 2.0]),)
    ),
    "RoundInput('x').make_inputs: [0] is a str: expected an array": replacing(
        round_inputs=(RoundInput("x", lambda holdings: ["a"]),)
    ),
    "Algorithm.extra_passes = '2': expected a whole number >= 0": replacing(extra_passes="2"),
    "Algorithm.can_page_state = 'yes': expected True or False": replacing(can_page_state="yes"),
    "Algorithm.fine_tuning = 3: expected a FineTuning": replacing(fine_tuning=3),
    "Algorithm.round: info.records has ['spread']: expected [], as in `Algorithm.record_shapes`": recording(
        {}, spread=jnp.float32(0)
    ),
    "Algorithm.round: info.records has []: expected ['spread'], as in `Algorithm.record_shapes`": recording(
        {"spread": ()}
    ),
    "Algorithm.round: info.records['spread'] is float32[]: expected the shape (2,)": recording(
        {"spread": (2,)}, spread=jnp.float32(0)
    ),
}


def train(name="mine", settings=(), **arguments):
    """The result of a run of a method that is registered."""
    return run_spec(RunSpec(name, **OWN_METHOD_RUN | dict(settings)), **arguments)


def find_error(build, **facts):
    """The one line with which a method is rejected."""
    with pytest.raises(ConfigError) as error_info:
        register_method("mine", build, **facts)
        train()
    (line,) = str(error_info.value).splitlines()
    # No other traceback precedes it, and no note of jax follows it.
    error = error_info.value
    assert error.__suppress_context__ or error.__context__ is None or error.__cause__
    assert not getattr(error, "__notes__", [])
    return line


@pytest.mark.parametrize("message", BREAKS)
def test_broken_contract_is_reported_before_compile(message, monkeypatch):
    monkeypatch.setattr(runner, "init_states", lambda runs: pytest.fail("it went on"))
    line = find_error(BREAKS[message])
    assert line.startswith(("method 'mine': ", "method 'mine' built")) and message in line


def build_unlisted(training, plan):
    """FedAvg with models of clients that `evaluated_models` does not list."""
    return fedavg(training, plan)._replace(
        personal_variables=lambda hp, state, k: state.server.variables
    )


def build_unlisted_tuning(training, plan):
    """FedAvg with a fine-tuning that `evaluated_models` does not list."""
    tuning = FineTuning(make_local_model_training(training), epochs=1)
    return fedavg(training, plan)._replace(fine_tuning=tuning)


def build_sharing(training, plan):
    """FedAvg whose clients train on the server's examples."""
    return fedavg(training, plan)._replace(trains_on_server_data=True)


PERSONAL = {"evaluated_models": ("personal",)}
SHARING = "trains_on_server_data is True: expected required_data=('server_data', 'shared_server_da"


@pytest.mark.parametrize(
    ("build", "facts", "message"),
    [
        (build_personal, {"has_global_model": False}, "('global',): expected models of clients"),
        (fedavg, PERSONAL | {"has_global_model": False}, "global_model is set: expected None"),
        (build_personal, PERSONAL, "global_model is None: expected a function"),
        (fedavg, PERSONAL, "evaluate 'personal' of `evaluated_models`: expected Algorithm.person"),
        (
            build_unlisted,
            {},
            "Algorithm.personal_variables is set, but clients' tests evaluate the",
        ),
        (build_unlisted, {"evaluated_models": ("global", "own")}, "personal_variables=None for"),
        (build_unlisted_tuning, {}, "Algorithm.fine_tuning is set, but clients' tests evaluate"),
        (build_sharing, {"required_data": ("server_data",)}, SHARING),
        # FedAvg's update, which is the default one, reads server_lr.
        (build_personal, PERSONAL | {"has_global_model": False}, "has_global_model=False"),
        (build_personal, PERSONAL | {"has_global_model": False}, "`update=`"),
    ],
)
def test_models_agree_with_method_entry(build, facts, message):
    assert message in find_error(build, **facts)


def test_personal_variables_match_network():
    def build(training, plan):
        return build_personal(training, plan)._replace(
            personal_variables=lambda hp, state, k: jax.tree.map(
                lambda leaf: leaf[None], state.server.variables
            )
        )

    facts = {"has_global_model": False, **PERSONAL, "hyperparameters": {"server_lr": 1.0}}
    line = find_error(build, **facts)
    assert line.startswith("method 'mine': Algorithm.personal_variables: variables['params']")
    assert "as the network" in line


def test_undeclared_hyperparameter_is_reported():
    line = find_error(adjusting(lambda context, *arguments: context.hp["mu"]))
    assert line.startswith("method 'mine': adjust reads hp['mu']: expected a declared")
    assert "local_lr, " in line and "server_lr)" in line


def test_server_state_may_have_python_numbers():
    def update(hp, server, client_update, counts):
        return add_mean_change(hp, server, client_update.mean)._replace(extra=server.extra + 1)

    def init_server(hp, variables):
        return ServerMessage(variables, extra=0)

    def build(training, plan):
        algorithm = with_server(init_server=init_server, update=update)(training, plan)
        return algorithm._replace(summary=lambda hp, state: {"extra": state.server.extra})

    register_method("mine", build)
    result = train()
    assert result.summary["extra"] == result.spec.rounds


@pytest.mark.parametrize("name", ["local_lr", "learning_rate"])
def test_settings_are_no_hyperparameters_of_a_method(name):
    with pytest.raises(ConfigError, match=f"hyperparameters = '{name}': expected a name that is"):
        register_method("mine", fedavg, hyperparameters={name: 0.5})


def test_list_of_hyperparameters_is_rejected():
    expected = r"hyperparameters = \['a'\]: expected a class .*, a dictionary of defaults >= 0, or"
    with pytest.raises(ConfigError, match=expected):
        register_method("mine", fedavg, hyperparameters=["a"])


def test_other_missing_key_is_no_hyperparameter():
    register_method("mine", adjusting(lambda context, gradient, *arguments: gradient["bais"]))
    with pytest.raises(KeyError, match="bais"):
        train()


def test_other_exceptions_name_function_and_method():
    register_method(
        "mine", method(step=lambda step: lambda *arguments: jnp.zeros(3) @ jnp.zeros(4))
    )
    with pytest.raises(TypeError, match="contracting dimensions") as error_info:
        train()
    assert {"in ClientAlgorithm.step", "in method 'mine'"} <= set(error_info.value.__notes__)


TELLS = {
    "nothing": (lambda *arguments: None, {}, "returned None: expected a dict"),
    "an error": (lambda *arguments: 1 / 0, {}, "division by zero"),
    "an object": (
        lambda *arguments: {"a": object(), "b": jnp.float32(2)},
        {"b": 2.0},
        "['a'] is left",
    ),
}


@pytest.mark.parametrize("case", TELLS)
def test_failing_outputs_do_not_lose_run(case, tmp_path, caplog):
    tell, kept, message = TELLS[case]

    def build(training, plan):
        return fedavg(training, plan)._replace(artifacts=tell, summary=tell)

    register_method("mine", build)
    result = train(output_dir=tmp_path)
    assert result.artifacts == kept and {n: result.summary[n] for n in kept} == kept
    assert "a" not in result.summary and caplog.text.count(message) == 2
    assert Result.load(tmp_path / f"{result.digest()}.json").summary == result.summary


# --- what the engine does with uploads -------------------------------------------------------


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_engine_applies_averaging_weights(averaging):
    """A client that sends its plain change, and knows of no weights, is FedAvg's."""

    def plain(training, plan):
        base = make_local_sgd(training)

        def end(context, local, state):
            assert not hasattr(context.client, "weight")
            change = jax.tree.map(lambda w, a: w - a, local.variables, context.message.variables)
            return ClientUpdate(mean=change), state, ()

        return build_federated_algorithm(training, plan, base._replace(end=end))

    register_method("plain", plain)
    settings = {"averaging": averaging, "participation": 1.0, "hp": {"local_lr": 0.3}}
    own, average = (train(name, settings) for name in ("plain", "fedavg"))
    for name in ("test_accuracy", "test_loss", "train_loss"):
        np.testing.assert_array_equal(own.metrics[name], average.metrics[name])
    assert np.ptp(own.metrics["test_loss"]) > 0.01, "it learns"


class Counted(NamedTuple):
    variables: dict
    samples: jax.Array


@pytest.mark.parametrize("averaging", ["uniform", "weighted"])
def test_mean_covers_trained_clients(averaging):
    def counting(training, plan):
        base = make_local_sgd(training)

        def end(context, local, state):
            _, state, output = base.end(context, local, state)
            return ClientUpdate(mean=context.client.num_samples), state, output

        algorithm = build_federated_algorithm(
            training,
            plan,
            base._replace(end=end),
            init_server=lambda hp, variables: Counted(variables, jnp.float32(0)),
            update=lambda hp, server, upload, counts: server._replace(samples=upload.mean),
        )
        return algorithm._replace(artifacts=lambda state: {"samples": state.server.samples})

    register_method("counting", counting)
    settings = {"participation": 1.0, "averaging": averaging}
    # One of the clients has no data.
    result = train("counting", settings, partition=consecutive_partition())
    sizes = np.array([size for size in CLIENT_SIZES if size])
    expected = sizes.mean() if averaging == "uniform" else (sizes**2).sum() / sizes.sum()
    np.testing.assert_allclose(result.artifacts["samples"], expected, rtol=1e-6)


LARGE = 2**24 + 1  # the first whole number that float32 does not have


class Sums(NamedTuple):
    whole: jax.Array
    small: jax.Array
    large: jax.Array
    flags: jax.Array
    half: jax.Array


def summing(training, plan):
    """FedAvg whose server keeps what its clients' sums were in the last round."""
    base = make_local_sgd(training)

    def end(context, local, state):
        upload, state, output = base.end(context, local, state)
        first = context.client.id == 0
        sums = Sums(
            jnp.where(first, LARGE, 0),
            jnp.int8(100),
            jnp.where(first, jnp.uint32(2**31), jnp.uint32(1)),
            jnp.array([True, False]),
            jnp.bfloat16(256),  # 256 + 1 is no bfloat16
        )
        return upload._replace(sum=(sums, jnp.bfloat16(1))), state, output

    algorithm = build_federated_algorithm(
        training, plan, base._replace(end=end), init_server=first_of, update=keep_sums
    )
    return algorithm._replace(artifacts=lambda state: state.server.sums._asdict())


class Summed(NamedTuple):
    variables: dict
    sums: Sums


def first_of(hp, variables):
    zero = Sums(jnp.int32(0), jnp.int32(0), jnp.uint32(0), jnp.zeros(2, jnp.int32), jnp.float32(0))
    return Summed(variables, zero)


def keep_sums(hp, server, upload, counts):
    sums, ones = upload.sum
    return Summed(server.variables, sums._replace(half=sums.half + ones))


PLACEMENTS = {
    "one device": {"devices": 1},
    "two blocks": {"devices": min(2, len(jax.devices())), "blocks": 2},
    "side by side": {"spread": "runs", "width": 2, "blocks": 2},
}


@pytest.mark.parametrize("where", PLACEMENTS)
def test_integer_and_bool_sums_are_exact(where):
    register_method("summing", summing)
    count = len(CLIENT_SIZES)
    expected = Sums(LARGE, 100 * count, 2**31 + count - 1, [count, 0], 257 * count)
    seeds = (0, 1) if where == "side by side" else (0,)
    settings = OWN_METHOD_RUN | {"participation": 1.0}
    specs = [RunSpec("summing", **settings, seed=seed) for seed in seeds]
    for sweep_result in sweep_specs(specs, **PLACEMENTS[where]):
        for name, want in expected._asdict().items():
            np.testing.assert_array_equal(sweep_result.artifacts[name], want, err_msg=name)

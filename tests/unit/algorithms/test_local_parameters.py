"""Methods whose clients keep parameters: one declaration sets the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.documentation_pages import ROOT, find_code_blocks
from support.small_federation import make_small_federation

from fedjax_het import ConfigError, RunSpec, register_method, simulate
from fedjax_het.algorithms import METHODS
from fedjax_het.algorithms.fedavg import fedavg
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.local_training import LocalTraining
from fedjax_het.core.task import Task
from fedjax_het.methods import (
    ClientUpdate,
    ServerMessage,
    build_federated_algorithm,
    get_client_row,
    make_local_sgd,
    num_bytes,
)
from fedjax_het.nn import make_model

SETTINGS = {"model": "mlp", "num_clients": 4, "participation": 0.5, "rounds": 3}
SETTINGS |= {"hp": {"server_lr": 0.7}, "local_epochs": 1, "client_tests": True}


def select_head(model, variables):
    return model.head.get_parameters(variables)


def build_by_hand(training, plan):
    """FedPer with each part written out."""
    base, head = make_local_sgd(training), training.task.model.head

    def insert(context, own):
        variables = head.replace_parameters(context.message.variables, own)
        return context._replace(message=ServerMessage(variables))

    def end(context, local, state):
        update, optimizer, output = base.end(insert(context, state[0]), local, state[1])
        shared = head.replace_parameters(update.mean, None)
        return ClientUpdate(shared), (head.get_parameters(local.variables), optimizer), output

    client = base._replace(
        init=lambda hp, variables: (head.get_parameters(variables), base.init(hp, variables)),
        begin=lambda context, state: base.begin(insert(context, state[0]), state[1]),
        end=end,
    )
    return build_federated_algorithm(
        training,
        plan,
        client,
        init_server=lambda hp, variables: ServerMessage(head.replace_parameters(variables, None)),
        update=lambda hp, server, client_update, counts: ServerMessage(
            jax.tree.map(lambda w, d: w + 0.7 * d, server.variables, client_update.mean)
        ),
    )._replace(
        global_model=None,
        with_global_model=None,
        personal_variables=lambda hp, state, k: head.replace_parameters(
            state.server.variables, get_client_row(state.clients[0], k)
        ),
    )


def test_declaration_equals_method_by_hand():
    register_method("declared", fedavg, local_parameters=select_head)
    register_method(
        "by_hand", build_by_hand, evaluated_models=("personal",), has_global_model=False
    )
    by_hand = {**SETTINGS, "hp": {}}
    declared, expected = (
        simulate(RunSpec(name, **settings))
        for name, settings in (("declared", SETTINGS), ("by_hand", by_hand))
    )
    assert declared.spec.client_test_model in (None, "personal")
    for name in ("train_loss", "client_accuracy", "bytes_up", "bytes_down", "update_norm"):
        np.testing.assert_allclose(
            declared.metrics[name], expected.metrics[name], rtol=1e-6, err_msg=name
        )
    assert np.isnan(declared.metrics["test_accuracy"]).all()


def test_traffic_down_is_the_message():
    """The momentum of the server is not sent."""

    def build(training, plan):
        return build_federated_algorithm(
            training,
            plan,
            make_local_sgd(training),
            init_server=lambda hp, variables: ServerMessage(variables, extra=variables["params"]),
            update=lambda hp, server, client_update, counts: server,
            make_message=lambda server, cohort: ServerMessage(server.variables),
        )

    federation = make_small_federation(build, hp={"local_lr": 0.1})
    traffic = federation.algorithm.traffic(federation.hp, federation.initial_state())
    assert traffic.down == traffic.up > 0


def test_traffic_excludes_local_parameters():
    """FedPer of the page on methods: the head is neither sent nor received."""
    page = ROOT / "docs/guide/custom-method.md"
    (code,) = [code for _, code in find_code_blocks("python", [page]) if "def fedper(" in code]
    exec(code.split("settings = ")[0], {})
    settings = {"model": "mlp", "num_clients": 4, "participation": 1.0, "rounds": 2}
    plain, kept = (simulate(RunSpec(name, **settings)) for name in ("fedavg", "own_fedper"))
    variables = plain.model().variables
    head = kept.model(0).task.model.head
    shared_bytes = num_bytes(head.replace_parameters(variables, None))
    assert 0 < shared_bytes < num_bytes(variables)
    np.testing.assert_array_equal(kept.metrics["bytes_up"], 4 * shared_bytes)
    np.testing.assert_array_equal(kept.metrics["bytes_down"], 4 * shared_bytes)
    np.testing.assert_array_equal(plain.metrics["bytes_up"], 4 * num_bytes(variables))
    assert jax.tree.structure(kept.model(0).variables) == jax.tree.structure(variables)


FAULTS = {
    "local_parameters fails on the network 'mlp', with the parameters ": lambda model, v: v["head"],
    "local_parameters returned 0 leaves": lambda model, v: None,
    "expected parts of the variables without change, at least one leaf and not all": (
        lambda model, v: v
    ),
    "local_parameters returned 1 leaves": lambda model, v: jnp.zeros(3),
}


@pytest.mark.parametrize("message", FAULTS)
def test_wrong_selection_is_one_line(message):
    register_method("selecting", fedavg, local_parameters=FAULTS[message])
    with pytest.raises(ConfigError) as raised:
        simulate(RunSpec("selecting", **SETTINGS))
    line = str(raised.value)
    assert line.startswith("method 'selecting': local_parameters") and message in line
    assert "\n" not in line


def test_update_must_be_change_of_variables():
    def build(training, plan):
        base = make_local_sgd(training)

        def end(context, local, state):
            update, state, output = base.end(context, local, state)
            return ClientUpdate(mean=update.mean["params"]), state, output

        return build_federated_algorithm(training, plan, base._replace(end=end))

    register_method("partial", build, local_parameters=select_head)
    with pytest.raises(ConfigError, match=r"update\.mean is a dict: expected a change of all var"):
        simulate(RunSpec("partial", **SETTINGS))


def test_global_model_contradicts_local_parameters():
    with pytest.raises(ConfigError, match="has_global_model = True: expected False"):
        register_method("both", fedavg, local_parameters=select_head, has_global_model=True)


def test_paging_is_derived():
    """A client's first state that depends on the weights, or personal models, forbid paging."""
    training = LocalTraining(Task(make_model("mlp", (4, 4, 1), 3), (0.0,), (1.0,)), "adam")
    plan = make_execution_plan()
    base = make_local_sgd(training)

    def can_page(init):
        client = base._replace(init=init)
        return build_federated_algorithm(training, plan, client).can_page_state

    assert can_page(base.init)
    assert can_page(lambda hp, v: jax.tree.map(jnp.zeros_like, v))
    assert can_page(lambda hp, v: hp["strength"] * jnp.zeros(3))
    assert not can_page(lambda hp, v: v)
    assert not can_page(lambda hp, v: jax.tree.map(lambda w: w.mean(), v))

    register_method(
        "own_models",
        lambda training, plan: fedavg(training, plan)._replace(
            personal_variables=lambda hp, state, k: state.server.variables
        ),
        evaluated_models=("personal",),
    )
    built = METHODS["own_models"].build_algorithm(
        training._replace(evaluated_model="personal"), plan, {}
    )
    assert fedavg(training, plan).can_page_state and not built.can_page_state

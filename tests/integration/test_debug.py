"""Runs without jit: `simulate(..., debug=True)`."""

import numpy as np
import pytest
from support.small_runs import OWN_METHOD_RUN, run_spec

from fedjax_het import RunSpec, register_method
from fedjax_het.core.contract_checks import ClientError, ContractError
from fedjax_het.methods import build_federated_algorithm, make_local_sgd


def run(name, **kwargs):
    return run_spec(RunSpec(name, **OWN_METHOD_RUN), **kwargs)


def register_step(name, inspect_step):
    """Register FedAvg whose step calls `inspect_step(context, batch, loss)`."""

    def build(training, plan):
        base = make_local_sgd(training)

        def step(context, local, batch):
            local, loss = base.step(context, local, batch)
            inspect_step(context, batch, loss)
            return local, loss

        return build_federated_algorithm(training, plan, base._replace(step=step))

    register_method(name, build)


def test_exception_names_round_client_and_step():
    def fail(context, batch, loss):
        if batch.step_index == 1:
            raise TypeError("unsupported\noperand")

    register_step("failing", fail)
    with pytest.raises(ClientError) as error_info:
        run("failing", debug=True)
    message = str(error_info.value)
    assert message.startswith("method 'failing', round 0, client ")
    assert message.endswith(", step 1: TypeError: unsupported operand")
    assert isinstance(error_info.value.__cause__, TypeError)


def test_contract_error_names_step():
    def build(training, plan):
        base = make_local_sgd(training)
        return build_federated_algorithm(
            training, plan, base._replace(step=lambda context, batch: ())
        )

    register_method("wrong", build)
    with pytest.raises(ContractError, match=r"step 0: ContractError: ClientAlgorithm\.step takes"):
        run("wrong", debug=True)


@pytest.mark.parametrize("function", ["begin", "end"])
def test_exception_outside_step_names_client(function):
    """No abstract evaluation before the run raises the exception first, without its client."""

    def build(training, plan):
        base = make_local_sgd(training)

        def fail(*args):
            raise LookupError("no such entry")

        return build_federated_algorithm(training, plan, base._replace(**{function: fail}))

    register_method("failing", build)
    with pytest.raises(ClientError) as error_info:
        run("failing", debug=True)
    message = str(error_info.value)
    assert message.startswith("method 'failing', round 0, client ")
    assert message.endswith(": LookupError: no such entry")


@pytest.mark.slow
def test_debug_run_reads_values_and_equals_compiled_run():
    losses = []
    register_step("reading", lambda context, batch, loss: losses.append(float(loss)))
    actual, expected = run("reading", debug=True), run("fedavg")
    assert len(losses) >= 6 and np.isfinite(losses).all()
    for name in ("train_loss", "test_loss", "update_norm"):
        np.testing.assert_allclose(actual.metrics[name], expected.metrics[name], rtol=1e-5)
    assert actual.summary["bytes_up"] == expected.summary["bytes_up"]

"""fedjax_het in the benchmark: one regime in, one line of JSON out.

Workloads: rounds (local training and averaging), a sweep (whole runs; the rounds count), DynaFed's
synthesis (its iterations), and the training of a server on its own images. In rounds, images stay
uint8 and are gathered and normalized in every step. The record also holds the speed of matrix
products on the same devices.
"""

import dataclasses
import json
import sys
import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P
from regime import peak_memory, print_record

import fedjax_het
from fedjax_het import (
    RunSpec,
    dataset_from_arrays,
    load_dataset,
    make_model,
    make_partition,
    simulate,
)
from fedjax_het.core.client_loop import Examples
from fedjax_het.core.client_rows import ClientModels
from fedjax_het.core.distillation import compute_logits, sum_over_models
from fedjax_het.core.execution_plan import make_execution_plan
from fedjax_het.core.server_training import (
    EpochRange,
    ServerTraining,
    make_shuffled_batches,
    train_on_examples,
    train_on_server,
)
from fedjax_het.core.task import Task
from fedjax_het.nn import Model, count_training_flops
from fedjax_het.runtime.benchmark import benchmark_rounds

MATMUL_SIZES = (512, 1024, 2048)
MATMUL_SECONDS = 0.3


def main() -> None:
    """Measure the workload that the first argument describes, and print the record."""
    settings = json.loads(sys.argv[1])
    dataset, spec = read_dataset(settings), RunSpec(dataset="user", **settings["spec"])
    workloads = {
        "rounds": time_rounds,
        "sweep": time_sweep,
        "synthesis": time_synthesis,
        "server": time_server,
    }
    record = workloads[settings["kind"]](spec, dataset, settings)
    devices = jax.devices()
    print_record(
        **record,
        peak_memory=accelerator_memory() or peak_memory(),
        version=f"fedjax_het {fedjax_het.__version__}, jax {jax.__version__}",
        devices=f"{len(devices)} x {devices[0].device_kind}",
        matmul_flops=matmul_flops(),
    )


def read_dataset(settings: dict[str, Any]):
    """Return the data set; its test split is not used."""
    if settings["dataset"] is not None:
        return load_dataset(settings["dataset"])
    with np.load(settings["images"]) as file:
        images = file["images"][: settings["num_images"]]
        labels = file["labels"][: settings["num_images"]]
        mean, std = file["mean"].tolist(), file["std"].tolist()
    test_split = images[:100], labels[:100]  # nothing is measured on them
    return dataset_from_arrays(images, labels, *test_split, num_classes=10, mean=mean, std=std)


def build_network(spec: RunSpec, dataset) -> Model:
    """Build the network of a run."""
    resolved = spec.resolved()
    shape, num_tokens = dataset.input_shape, dataset.num_tokens
    options = {
        **resolved.model_options,
        "num_tokens": num_tokens,
        "per_token": dataset.train_labels.ndim > 1,
    }
    return make_model(resolved.model, shape, dataset.num_outputs, **options)


def flops_per_sample(spec: RunSpec, dataset) -> int:
    """Count the operations of training on one sample."""
    return count_training_flops(build_network(spec, dataset))


def time_rounds(spec: RunSpec, dataset, settings: dict[str, Any]) -> dict[str, Any]:
    """Time the rounds of one run, and write clients and cohorts for the peers."""
    times = benchmark_rounds(spec, settings["rounds"], dataset)
    parameters: dict[str, Any] = {} if spec.alpha is None else {"alpha": spec.alpha}
    scheme, num_clients = spec.resolved().partition, spec.resolved().num_clients
    partition = make_partition(
        scheme,
        dataset.train_classes,
        dataset.num_classes,
        num_clients=num_clients,
        seed=0,
        users=dataset.train_users,
        **parameters,
    )
    sizes = partition.sizes
    assert times.samples == [int(sizes[cohort].sum()) for cohort in times.cohorts]
    cohorts = np.stack(times.cohorts)
    np.savez(settings["clients"], indices=partition.indices, sizes=sizes, cohorts=cohorts)
    return {
        "seconds": times.seconds,
        "samples": times.samples,
        "compile_seconds": times.compile_seconds,
        "useful_work_fraction": times.useful_work_fraction,
        "lanes": times.lanes,
        "flops_per_sample": flops_per_sample(spec, dataset),
    }


def time_sweep(spec: RunSpec, dataset, settings: dict[str, Any]) -> dict[str, Any]:
    """Time a round of all runs of a sweep together, and of one run alone."""
    sweep_record, single_run_record = (
        sweep_seeds(spec, dataset, settings["rounds"], seeds) for seeds in (settings["seeds"], 1)
    )
    return {**sweep_record, "seconds_of_one": single_run_record["seconds"]}


def sweep_seeds(spec: RunSpec, dataset, rounds: int, seeds: int) -> dict[str, Any]:
    """Time one sweep over `seeds` seeds; the compile time is separate."""
    from fedjax_het import sweep

    spec = dataclasses.replace(spec, rounds=rounds, eval_every=rounds)
    specs = [dataclasses.replace(spec, seed=seed) for seed in range(seeds)]
    sweep_result = sweep(specs, dataset=dataset, progress=lambda line: None)
    results = [result for result in sweep_result.results if result is not None]
    seconds = sum(result.summary["round_seconds"] for result in results)
    samples = int(sum(result.metrics["client_samples"].sum() for result in results))
    first = results[0].summary
    return {
        "seconds": [seconds / rounds],
        "samples": [samples // rounds],
        "compile_seconds": first["compile_seconds"],
        "useful_work_fraction": first["useful_work_fraction"],
        "lanes": first["lanes"],
        "flops_per_sample": flops_per_sample(spec, dataset),
    }


def time_synthesis(spec: RunSpec, dataset, settings: dict[str, Any]) -> dict[str, Any]:
    """Time DynaFed's synthesis after a few rounds.

    A sample is one image in one inner step, whose derivative costs three times the step itself.
    """
    options = {**spec.options, "num_iterations": settings["rounds"]}
    result = simulate(dataclasses.replace(spec, options=options), dataset=dataset)
    options, summary = result.spec.options, result.summary
    iterations = options["num_iterations"]
    return {
        "seconds": [summary["server_seconds"] / iterations],
        "samples": [options["num_samples"] * options["inner_steps"]],
        "compile_seconds": summary["compile_seconds"],
        "useful_work_fraction": 1.0,
        "lanes": summary["lanes"],
        "flops_per_sample": 4 * flops_per_sample(spec, dataset),
    }


def time_server(spec: RunSpec, dataset, settings: dict[str, Any]) -> dict[str, Any]:
    """Time the training of the server, on one device or shared by all, whichever is faster.

    A sample is one that a step processes.
    """
    server = settings["server"]
    model = build_network(spec, dataset)
    task = Task(model, dataset.mean, dataset.std)
    examples = Examples(jnp.asarray(dataset.train_inputs), jnp.asarray(dataset.train_labels))
    teachers = jax.vmap(model.init)(jax.random.split(jax.random.key(1), max(server["teachers"], 1)))
    teacher_weights = jnp.full(max(server["teachers"], 1), 1.0)

    def distill_ensemble(sharing, variables, examples, teachers, key):
        models = ClientModels(teachers, teacher_weights, teacher_weights > 0)

        def predict(images):
            logits = sum_over_models(
                lambda teacher: compute_logits(task, teacher, images), models, len(images)
            )
            return jax.nn.softmax(logits / server["teachers"])

        targets = sharing.map_samples(predict, examples.inputs)
        order_key, step_key = jax.random.split(key)
        batches = make_shuffled_batches(order_key, len(targets), server["batch_size"])
        training = ServerTraining(
            task.loss_and_gradient, optax.adam(1e-3), step_key, parallelism=sharing
        )
        soft_examples, epoch_range = (
            Examples(examples.inputs, targets),
            EpochRange(server["epochs"]),
        )
        return train_on_examples(training, variables, soft_examples, batches, epoch_range)

    def train_on_labels(sharing, variables, examples, teachers, key):
        options = {"batch_size": server["batch_size"], "epochs": server["epochs"], "lr": 0.01}
        return train_on_server(
            task, variables, examples, key, **options, server_parallelism=sharing
        )

    train = distill_ensemble if server["teachers"] else train_on_labels
    arguments = model.init(jax.random.key(0)), examples, teachers, jax.random.key(2)

    def time_program(shares_server: bool):
        devices = None if shares_server else 1
        plan = make_execution_plan(devices=devices, has_sharded_server=shares_server)
        start = time.perf_counter()
        program = jax.jit(partial(plan.shard_server_work, train)).lower(*arguments).compile()
        compile_seconds = time.perf_counter() - start

        def run_round() -> float:
            start = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            return time.perf_counter() - start

        run_round()
        return run_round(), compile_seconds, run_round, shares_server

    sharding_choices = (False, True) if jax.device_count() > 1 else (False,)
    _, compile_seconds, run_round, is_sharded = min(
        map(time_program, sharding_choices), key=lambda choice: choice[0]
    )
    rounds = settings["rounds"]
    return {
        "seconds": [run_round() for _ in range(rounds)],
        "samples": [len(dataset.train_inputs) * server["epochs"]] * rounds,
        "compile_seconds": compile_seconds,
        "useful_work_fraction": 1.0,
        "lanes": f"shared by {jax.device_count()} devices" if is_sharded else "one device",
        "flops_per_sample": flops_per_sample(spec, dataset),
    }


def accelerator_memory() -> int:
    """Return the peak bytes of all devices together; 0 on a CPU."""
    counts = [device.memory_stats() or {} for device in jax.local_devices()]
    return sum(count.get("peak_bytes_in_use", 0) for count in counts)


def matmul_flops() -> float:
    """Return the operations per second of products of square float32 matrices, of the best size."""
    return max(map(measure_matmul_flops, MATMUL_SIZES))


def measure_matmul_flops(size: int) -> float:
    """Measure the products of matrices of one size on all devices at once."""
    mesh = jax.make_mesh((jax.device_count(),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))

    def multiply_repeatedly(matrix, count):
        return jax.lax.fori_loop(0, count, lambda _, product: matrix @ product, matrix)

    specs: dict[str, Any] = {"in_specs": (P("x"), P()), "out_specs": P("x")}
    run = jax.jit(jax.shard_map(multiply_repeatedly, mesh=mesh, check_vma=False, **specs))
    blocks = jax.random.normal(jax.random.key(0), (size * jax.device_count(), size))
    blocks = jax.device_put(blocks / size**0.5, jax.NamedSharding(mesh, P("x")))

    def seconds(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(run(blocks, jnp.int32(count)))
        return time.perf_counter() - start

    seconds(1)  # compiles
    count = 1
    while (elapsed := seconds(count)) < MATMUL_SECONDS:
        count *= 2
    best = min(elapsed, seconds(count), seconds(count))
    return 2 * size**3 * count * jax.device_count() / best


if __name__ == "__main__":
    main()

"""Settings of methods: bad options and numbers are rejected with their value, presets, defaults."""

import re

import pytest
from support.algorithm_builders import make_method_federation
from support.networks import make_linear_model

from fedjax_het import ConfigError, RunSpec

BAD_OPTIONS = {
    "abavg": {"base": ["dynafed", "fednova", "fedavgm", "fedadam", "fedyogi"]},
    "apfl": {
        "mixing": ["output"],
        "adaptive": ["no"],
        "alpha_update": ["epoch"],
        "preset": ["torch"],
    },
    "fedaf": {
        "ipc": [0],
        "init": ["mode"],
        "clipping": ["yes"],
        "lgkm": ["all"],
        "augment_strategy": ["twirl", None],
        "warm_start": ["no"],
        "owners": ["some"],
    },
    "fedamp": {"guard": ["clip"], "preset": ["papr"], "history": ["yes"]},
    "fedavg_ft": {"tuning_epochs": [-1]},
    "fedavgm": {"nesterov": ["yes"], "damped": ["yes"]},
    "fedbe": {
        "preset": ["fedaux"],
        "over_classes": ["no"],
        "posterior": ["laplace"],
        "num_samples": [-1],
        "swa_start": [1.5],
        "swa_every": [0],
    },
    "feddf": {
        "distill_epochs": [-1],
        "distill_batch_size": [0],
        "preset": ["code"],
        "annealed": [1],
    },
    "fedala": {"initial_epochs": [0]},
    "fedbabu": {"tuning_epochs": [-1], "tuned_part": ["layer"]},
    "feddm": {"private": ["no"]},
    "fedgen": {
        "generator_hidden": [0],
        "generator_noise": [1.5],
        "generator_steps": [-1],
        "generator_batch_size": [1],
        "guided_steps": [-1],
        "fedgen_preset": ["mnst"],
    },
    "fedmix": {"mean_size": [0, 1.5], "coefficient": ["lambda"]},
    "fedrep": {"head_epochs": [-1]},
    "fsl": {"server_epochs": [0], "base": ["fedamp"]},
    "moon": {"projection": [-1, 2.5, True]},
    "per_fedavg": {"order": ["second"]},
    "pfedme": {"inner_steps": [0, 2.5]},
    "separate": {"initialisation": ["same"]},
}
BAD_NUMBERS = {
    "apfl": {"apfl_alpha": [1.5, -0.1]},
    "ditto": {"ditto_lambda": [-1.0]},
    "fedadagrad": {"server_beta1": [1.0], "server_tau": [0.0]},
    "fedadam": {"server_beta1": [1.0], "server_tau": [0.0], "server_lr": ["a"]},
    "fedaf": {"gamma": [1.5, -0.1], "tau": [0.0], "clip_norm": [0.0]},
    "fedamp": {"sigma": [0.0, -1.0]},
    "fedala": {"ala_lr": [-1.0], "ala_share": [1.1]},
    "fedavg": {"local_momentum": [1.0]},
    "fedavgm": {"server_momentum": [1.0]},
    "fedbe": {"sharpening": [0.0], "distill_momentum": [1]},
    "feddf": {"distill_clip": [0.0]},
    "feddyn": {"feddyn_alpha": [0.0, -0.1]},
    "fedgen": {
        "guidance_decay": [1.1],
        "generator_lr_decay": [0.0],
        "generated_weight": [-1.0],
    },
    "fedmix": {"mixup_lambda": [1.0, -0.1]},
    "fednova": {"local_momentum": [1.0]},
    "fedyogi": {"server_beta2": [1.5]},
    "fsl": {"gamma": [-1.0]},
    "heurfedamp": {"sigma": [0.0], "self_weight": [1.5, -0.1]},
    "moon": {"moon_tau": [0.0], "moon_mu": [-1.0]},
    "pfedme": {"pfedme_lambda": [0.0]},
}
# Of which the message is not `name = value`, or which need a second setting.
BAD_SETTINGS = [
    ("apfl", {"options": {"mixing": "output"}}, "did you mean 'outputs'"),
    ("fedgen", {"options": {"fedgen_preset": "mnst"}}, "did you mean 'mnist'"),
    ("fedaf", {"hp": {"gamma": 1.5}}, "hp gamma = 1.5: expected a number in ["),
    ("fedaf", {"hp": {"tau": 0.0}}, "hp tau = 0.0: expected a finite number > 0"),
    ("fedadam", {"hp": {"server_lr": "a"}}, "hp server_lr = 'a': expected a finite number"),
    ("fednova", {"hp": {"local_momentum": 1.0}}, "hp local_momentum = 1.0: expected a number in ["),
    ("fedamp", {"hp": {"self_weight": 0.5}}, "hp = 'self_weight' is unknown"),
    ("dynafed", {"options": {"image_lr": 0.1}}, "since it is a hyperparameter: hp image_lr"),
    ("dynafed", {"hp": {"inner_steps": 5}}, "since it is an option: options inner_steps"),
    ("dynafed", {"options": {"base": "fedamp"}}, "base = 'fedamp': expected a base that dynafed"),
    ("dynafed", {"options": {"base": []}}, "options base = [] is unknown: expected fedavg, "),
    ("fedaf", {"options": {"upload_bits": "8"}}, "expected one of the numbers 2, 4, 8, 16, 32"),
    ("feddf", {"options": {"num_samples": 3}}, "'num_samples'"),
    ("feddf", {"options": {"preset": "fedaux"}, "hp": {"distill_clip": 5.0}}, "distill_clip"),
    ("fedbe", {"hp": {"posterior_alpha": 1.0}}, "posterior_alpha"),
    ("fedbe", {"options": {"posterior": "dirichlet"}, "hp": {"posterior_alpha": 0.0}}, "alpha"),
    ("naivemix", {"options": {"coefficient": "printed"}}, "'coefficient'"),
    ("fsl", {"options": {"option": "I"}}, "'option'"),
    ("per_fedavg", {"hp": {"hf_delta": 0.1}}, "hf_delta"),  # not read by order "first"
    ("per_fedavg", {"options": {"order": "hessian_free"}, "hp": {"hf_delta": 0.0}}, "hf_delta = 0"),
    ("fedaf", {"local_epochs": 3}, "local_epochs = 3: expected no value"),
    ("fedaf", {"local_optimizer": "adam"}, "local_optimizer = 'adam': expected no value"),
    ("fedaf", {"protocol": "fedprox"}, "protocol = 'fedprox' is unknown"),
    (
        "feddm",
        {"options": {"private": True, "init": "noise", "top_up": True}},
        "top_up = True: expected False",
    ),
    ("feddm", {"options": {"private": True}}, "init = 'mean': expected noise"),
    ("fedamp", {"num_clients": 1}, "num_clients = 1: expected at least 2"),
    ("heurfedamp", {"num_clients": 1}, "num_clients = 1: expected at least 2"),
    ("fedamp", {"client_test_model": "global"}, "client_test_model = 'global'"),
    ("heurfedamp", {"gradient_gaps": 2}, "gradient_gaps = 2: expected no value"),
]


# Settings of a method, and the options, hyperparameters and fields that they resolve to.
DEFAULTS = [
    ("apfl", {}, {"preset": "paper"}),
    (
        "apfl",
        {"options": {"preset": "paper"}},
        {"mixing": "weights", "adaptive": True, "alpha_update": "round", "apfl_alpha": 0.5},
    ),
    (
        "apfl",
        {"options": {"preset": "fedtorch"}},
        {"mixing": "outputs", "adaptive": False, "alpha_update": "round", "apfl_alpha": 0.5},
    ),
    (
        "apfl",
        {"options": {"preset": "fedtorch", "adaptive": True}},
        {"mixing": "outputs", "adaptive": True},
    ),
    ("dynafed", {"dataset": "cifar100"}, {"samples_per_class": 15, "fine_tune_epochs": 8}),
    (
        "dynafed",
        {"dataset": "cifar100", "options": {"num_samples": 150}},
        {"num_samples": 150, "samples_per_class": None},
    ),
    ("dynafed", {"dataset": "cifar10", "alpha": 0.16}, {"fine_tune_epochs": 15}),
    ("dynafed", {"dataset": "cifar10", "alpha": 0.01}, {"fine_tune_epochs": 20}),
    ("dynafed", {"dataset": "cinic10"}, {"fine_tune_lr": 2.5e-4}),
    ("dynafed", {"dataset": "fashion_mnist"}, {"fine_tune_lr": 1e-4}),
    (
        "fedaf",
        {"dataset": "cifar10"},
        {"norm": "batch", "num_clients": 10, "rounds": 20, "batch_size": 256}
        | {"lambda_loc": 1e-4, "lambda_glob": 0.01, "gamma": 0.9}
        | {"image_lr": 1, "image_momentum": 0.9, "server_lr": 1e-3}
        | {"ipc": 50, "threshold": 50, "steps": 1000, "server_epochs": 500},
    ),
    ("fedaf", {"dataset": "fashion_mnist"}, {"lambda_loc": 1e-3, "lambda_glob": 2.0}),
    (
        "fedaf",
        {"dataset": "domainnet"},
        {"partition": "by_domain", "num_clients": 6, "rounds": 10, "ipc": 20},
    ),
    ("feddm", {"dataset": "cifar10"}, {"clipping": "per_class", "clip_norm": 2, "rho": 5}),
    (
        "feddm",
        {"dataset": "cifar10", "protocol": "feddm"},
        {"ipc": 10, "threshold": 10, "norm": "instance", "alpha": 0.5, "server_lr": 0.01},
    ),
    *(
        (
            "fedgen",
            {"options": {"fedgen_preset": preset}},
            {"generator_hidden": hidden, "generator_noise": noise, "generated_weight": 10.0}
            | {"distilled_weight": distilled, "generator_lr": lr},
        )
        for preset, hidden, noise, distilled, lr in (
            ("cifar", 512, 64, 10.0, 3e-4),
            ("mnist", 256, 32, 10.0, 3e-4),
            ("emnist", 256, 32, 1.0, 1e-4),
        )
    ),
    (
        "fedgen",
        {"options": {"fedgen_preset": "mnist", "generator_hidden": 7}},
        {"generator_hidden": 7, "generator_noise": 32},
    ),
    ("fedmix", {"dataset": "cifar10"}, {"mixup_lambda": 0.05}),
    ("fedmix", {"dataset": "cifar100"}, {"mixup_lambda": 0.1}),
    ("naivemix", {"dataset": "cifar10"}, {"mixup_lambda": 0.1}),
    ("naivemix", {"dataset": "cifar100"}, {"mixup_lambda": 0.1}),
    (
        "fedprox",
        {"dataset": "cifar10", "protocol": "fedaf"},
        {"local_epochs": 10, "batch_size": 64, "prox_mu": 0.001}
        | {"local_optimizer": "momentum", "local_momentum": 0.9},
    ),
    ("per_fedavg", {"options": {"order": "first"}}, {"hf_delta": None}),
    ("per_fedavg", {"options": {"order": "hessian_free"}}, {"hf_delta": 1e-3}),
]


@pytest.mark.parametrize(("method", "settings", "expected"), DEFAULTS)
def test_defaults_match_papers_and_public_code(method, settings, expected):
    spec = RunSpec(method, **settings).resolved()
    values = {**spec.to_dict(), **spec.options, **spec.hyperparameters}
    assert {name: values.get(name) for name in expected} == expected
    assert spec.resolved() == spec
    assert RunSpec.from_dict(spec.to_dict()).digest() == spec.digest()


@pytest.mark.parametrize(
    ("name", "missing", "message"),
    [
        *((name, "embed", "a `Model` with `embed`") for name in ("fedaf", "feddm", "moon")),
        *(
            ("fedgen", missing, "a `Model` with `embed` and `head`")
            for missing in ("head", "embed")
        ),
    ],
)
def test_rejects_network_without_part(name, missing, message):
    model = make_linear_model()._replace(**{missing: None})
    with pytest.raises(ConfigError, match=f"^model = 'linear' has no known `{missing}`.*{message}"):
        make_method_federation(name, model=model)


def list_cases(table, setting):
    return [
        (method, {setting: {name: value}}, f"{name} = {value!r}")
        for method, values_by_name in table.items()
        for name, values in values_by_name.items()
        for value in values
    ]


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [*list_cases(BAD_OPTIONS, "options"), *list_cases(BAD_NUMBERS, "hp"), *BAD_SETTINGS],
)
def test_rejects_bad_settings(method, settings, message):
    protocol = {"protocol": "fedaf"} if "local_momentum" in str(settings) else {}
    with pytest.raises(ConfigError, match=re.escape(message)):
        RunSpec(method, "digits", **{**protocol, **settings}).resolved()

"""Lists and descriptions of entries, and how objects look in a notebook."""

import numpy as np
import pytest
import treescope
from support.data import make_user_dataset

from fedjax_het import (
    ConfigError,
    RunSpec,
    describe,
    grid,
    list_methods,
    load_dataset,
    make_partition,
    register_method,
    simulate,
    sweep,
)
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.inspection import REGISTRIES
from fedjax_het.cli import main

TINY = {"model": "mlp", "num_clients": 3, "rounds": 2, "partition": "dirichlet", "alpha": 1.0}


def test_list_methods_filters_personalized_methods():
    methods = list_methods()
    assert methods == list(METHODS) and grid(algorithm=methods[:2], seed=0)
    personalized = list_methods(personalized=True)
    assert {"ditto", "fedamp", "fedavg_ft"} <= {*personalized} < {*methods}
    assert sorted([*personalized, *list_methods(personalized=False)]) == sorted(methods)
    with pytest.raises(ConfigError, match="personalized = 'yes'"):
        list_methods(personalized="yes")


def test_list_methods_prints_titles():
    lines = repr(list_methods()).splitlines()
    assert len(lines) == len(METHODS)
    assert lines[2].split()[:2] == ["scaffold", "SCAFFOLD"]
    assert METHODS["scaffold"].description in lines[2]
    html = list_methods()._repr_html_()
    assert html.count("<tr>") == len(METHODS) + 1 and ">pFedMe<" in html


def test_every_method_has_a_title():
    titles = [method.title for method in METHODS.values()]
    assert len({*titles}) == len(titles) and METHODS["fedavg_ft"].title == "FedAvg-FT"
    for name, method in METHODS.items():
        words = method.title.lower().replace("q-", "q").replace("-", "_")
        assert words.replace(" ", "_") == name
    assert register_method("my_method", METHODS["fedavg"].build).title == "my method"
    assert register_method("mine", METHODS["fedavg"].build, title="Mine").title == "Mine"


@pytest.mark.parametrize("kind", REGISTRIES)
def test_describe_equals_show(kind, capsys):
    name = next(iter(REGISTRIES[kind][0]))
    text = describe(name)
    assert main(["show", name]) == 0 and capsys.readouterr().out == f"{text}\n\n"
    assert repr(text) == str(text) and text.startswith((f"{name}: ", f"{name} ("))


def test_describe_rejects_unknown_name():
    with pytest.raises(ConfigError, match=r"name = 'fedprx' is unknown: did you mean 'fedprox'"):
        describe("fedprx")


@pytest.mark.parametrize("kind", REGISTRIES)
def test_entries_have_short_representations(kind):
    for entry in REGISTRIES[kind][0].values():
        text = repr(entry)
        assert entry.name in text and entry.description in text
        assert " at 0x" not in text and "function" not in text.split(":")[0]


def test_partition_representation_has_no_arrays():
    partition = make_partition(
        "dirichlet", np.arange(100) % 10, 10, num_clients=4, seed=0, alpha=0.5
    )
    text = repr(partition)
    assert text.startswith("Partition(scheme dirichlet, alpha 0.5, ") and "array" not in text
    assert f"clients 4, examples per client {partition.sizes.min()} to " in text
    assert ">examples per client<" in partition._repr_html_()


def test_html_tables_escape_names():
    dataset = make_user_dataset(name="<b>own</b>")
    html = dataset._repr_html_()
    assert "&lt;b&gt;own" in html and "<b>" not in html and "color" not in html


def test_sweep_and_treescope(tmp_path):
    results = sweep(grid(algorithm=["fedavg", "fedprox"], **TINY))
    html = results._repr_html_()
    assert html.startswith("<p>2 of 2 runs</p><table>") and html.count("<tr>") == 3
    assert "fedprox" in html and "bmta" not in html  # a column without values
    model = simulate(RunSpec(**TINY)).model()
    text = treescope.render_to_text(model)
    assert text.startswith("TrainedModel(") and "'params'" in text and "algorithm='fedavg'" in text
    assert treescope.render_to_text(RunSpec(alpha=0.1)).startswith("RunSpec(algorithm='fedavg'")


def test_data_set_html():
    html = load_dataset("digits")._repr_html_()
    assert ">digits<" in html and ">training images<" in html

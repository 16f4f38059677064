"""Results in a few words, as HTML, as pictures, and as tables with labels."""

import dataclasses
import json
from html.parser import HTMLParser

import numpy as np
import pytest
from support.small_runs import make_spec, run_spec, run_sweep

from fedjax_het import ConfigError, Result, RunSpec
from fedjax_het.runtime import result_display


@pytest.fixture(scope="module")
def result():
    return run_spec(make_spec(rounds=6, client_tests=True, test_per_client=6))


class Cells(HTMLParser):
    """The text of a table, and the elements of it."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text += f"{data}\n"


def test_repr_has_two_lines(result):
    text = repr(result)
    assert text.count("\n") == 1 and "array" not in text and len(text) < 300
    assert "fedavg on user" in text and "6 clients" in text and "seed 0" in text
    assert f"{100 * result.final_accuracy:.2f} %" in text
    assert repr([result]) == f"[{text}]"


def test_properties_read_the_summary(result):
    accuracy = result.metrics["test_accuracy"]
    assert result.final_accuracy == pytest.approx(accuracy[-5:].mean())
    assert result.best_accuracy == accuracy.max()
    assert result.client_accuracy == pytest.approx(result.metrics["mean_client_accuracy"].max())
    assert (result.rounds, result.diverged) == (6, False) and result.seconds > 0
    assert result.bytes_up == result.metrics["bytes_up"].sum() > 0
    assert result.bytes_down == result.metrics["bytes_down"].sum() > 0
    with pytest.raises(
        KeyError, match="'accuracy' is unknown: expected test_accuracy, test_loss, "
    ):
        result.metrics["accuracy"]


def test_html_has_a_curve_and_escapes_names(result):
    page = Cells(result._repr_html_())
    assert "fedavg on user" in page.text and result.spec.partition in page.text
    (line,) = (attributes for tag, attributes in page.tags if tag == "polyline")
    points = np.array([point.split(",") for point in line["points"].split()], float)
    assert len(points) == 6 and (np.diff(points[:, 0]) > 0).all()
    accuracy = result.metrics["test_accuracy"]
    assert points[:, 1].argmin() == accuracy.argmax()  # down is up in pictures
    bad = RunSpec.from_dict(result.spec.to_dict() | {"dataset": "<script>alert(1)</script>"})
    stranger = Result(bad, result.metrics, {**result.summary}, {"<b>x": np.zeros(1)})
    assert {"script", "b"}.isdisjoint(tag for tag, _ in Cells(stranger._repr_html_()).tags)


def test_repr_has_final_and_best_mean_of_clients(result):
    text, mean = repr(result), 100 * result.summary["final_client_accuracy"]
    assert f"final mean of clients' own tests {mean:.2f} %, best mean of" in text


def test_plot_draws_a_metric(result):
    import matplotlib.pyplot as plt

    axes = result.plot()
    (line,) = axes.get_lines()
    np.testing.assert_allclose(line.get_ydata(), 100 * result.metrics["test_accuracy"])
    np.testing.assert_array_equal(line.get_xdata(), np.arange(1, 7))
    assert axes.get_xlabel() == "Round" and "%" in axes.get_ylabel()
    assert result.plot("train_loss", x="bytes", axes=axes) is axes
    moved = axes.get_lines()[1].get_xdata()
    assert moved[-1] == result.bytes_up + result.bytes_down and (np.diff(moved) > 0).all()
    with pytest.raises(ConfigError, match="did you mean 'test_loss'"):
        result.plot("tst_loss")
    with pytest.raises(ConfigError, match="x = 'time' is unknown"):
        result.plot(x="time")
    plt.close("all")


@pytest.mark.parametrize(
    ("metric", "scale", "label"),
    [
        ("worst_decile", 100, "Worst decile of clients (%)"),
        ("accuracy_variance", 1, "Variance of clients' accuracies"),
        ("accuracy_gini", 1, "Gini coefficient of clients' accuracies"),
        ("gain_of_user", 1, "gain of user"),
        ("test_accuracy_photo", 100, "Test accuracy, photo (%)"),
        ("test_loss", 1, "Test loss (nats)"),
    ],
)
def test_plot_follows_declaration(metric, scale, label, result):
    import matplotlib.pyplot as plt

    values = np.array([0.1, np.nan, 0.3, 0.2])
    axes = dataclasses.replace(result, metrics={**result.metrics, metric: values}).plot(metric)
    (line,) = axes.get_lines()
    np.testing.assert_allclose(line.get_ydata(), scale * values[[0, 2, 3]])
    assert axes.get_ylabel() == label
    plt.close("all")


def test_plot_has_gaps_without_training(result):
    import matplotlib.pyplot as plt

    values = np.array([np.nan, 0.4, np.nan, 0.3, 0.2, np.nan])
    axes = dataclasses.replace(result, metrics={**result.metrics, "train_loss": values}).plot(
        "train_loss"
    )
    (line,) = axes.get_lines()
    np.testing.assert_array_equal(line.get_ydata(), values)
    assert line.get_marker() == "." and line.get_markevery() == [1]
    plt.close("all")


def test_to_pandas_has_a_row_per_round(result):
    frame = result.to_pandas()
    assert frame.index.name == "round" and list(frame.index) == list(range(1, 7))
    np.testing.assert_array_equal(frame["test_loss"], result.metrics["test_loss"])
    assert "client_accuracy" not in frame and "mean_client_accuracy" in frame


def test_to_xarray_has_dimensions(result):
    named = result.to_xarray()
    assert named.sizes["round"] == 6 and named.sizes["client"] == 6
    assert named["client_accuracy"].dims == ("round", "client")
    np.testing.assert_array_equal(
        named["client_accuracy"].sel(round=3), result.metrics["client_accuracy"][2]
    )
    assert json.loads(named.attrs["settings"])["algorithm"] == "fedavg"
    assert json.loads(named.attrs["summary"])["final_accuracy"] == result.final_accuracy


def test_xarray_attributes_are_json(result):
    summary = {**result.summary, "loss": np.nan, "norm": np.float32(np.inf)}
    named = dataclasses.replace(result, summary=summary).to_xarray()
    values = json.loads(named.attrs["summary"], parse_constant=pytest.fail)
    assert values["loss"] is None and values["norm"] is None


def test_missing_xarray_names_the_extra(result, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "xarray", None)
    with pytest.raises(ConfigError, match=r"pip install .*\[xarray\]"):
        result.to_xarray()


def test_sweep_to_xarray(monkeypatch):
    specs = [make_spec(rounds=r, seed=seed) for r, seed in ((4, 0), (4, 1), (6, 0))]
    swept = run_sweep(specs)
    named = swept.to_xarray()
    assert dict(named.sizes)["run"] == 3 and named.sizes["round"] == 6
    assert list(named["seed"].values) == [0, 1, 0] and list(named["rounds"].values) == [4, 4, 6]
    assert list(named["run"].values) == [each.digest() for each in swept.results]
    losses = named["test_loss"].values
    for values, each in zip(losses, swept.results, strict=True):
        own = each.metrics["test_loss"]
        np.testing.assert_array_equal(values[: len(own)], own)
        assert np.isnan(values[len(own) :]).all()
    text = repr(swept)
    assert text.startswith("SweepResult(3 of 3 runs") and text.count("\n") == 3
    assert "fedavg" in Cells(swept._repr_html_()).text
    monkeypatch.setattr("fedjax_het.runtime.sweep._MAX_SHOWN_RUNS", 1)
    assert repr(swept).splitlines()[-1] == "  and 2 more)"
    assert swept._repr_html_().endswith("<p>and 2 more</p>")
    with pytest.raises(ConfigError, match="results = 'none'"):
        result_display.build_runs_dataset([])


def test_repr_of_a_diverged_run(result):
    gone = Result(result.spec, result.metrics, {**result.summary, "diverged": True, "rounds": 4})
    assert "diverged in round 4" in repr(gone) and gone.diverged


def test_costs_to_an_accuracy(result):
    curve = result.metrics["test_accuracy"]
    target = float(np.sort(curve)[3])
    reached = next(r for r in range(6) if curve[r] >= target)
    costs = result.costs_to(target)
    assert costs.rounds == reached + 1
    assert costs.bytes_up == sum(result.metrics["bytes_up"][: reached + 1])
    assert costs.client_samples == sum(result.metrics["client_samples"][: reached + 1])
    kernels = {
        name: layer["kernel"].size for name, layer in result.model().variables["params"].items()
    }
    products = 3 * sum(kernels.values()) - kernels["hidden1"]  # of an MLP, one for each weight
    assert costs.flops == costs.client_samples * 2 * products
    assert 0 < costs.seconds <= result.seconds
    assert result.costs_to(1.0) is None or curve.max() == 1
    with pytest.raises(ConfigError, match="accuracy = 80"):
        result.costs_to(80)


def test_costs_without_a_global_model():
    own = run_spec(make_spec("fedamp", rounds=3, client_tests=True, test_per_client=6))
    assert own.costs_to(0.0).rounds == 1

"""The figures' lines, bands, points and cells are the numbers of the results; not their pixels."""

import io
import math

import numpy as np
import pandas as pd
import pytest

from fedjax_het import analysis
from fedjax_het.algorithms import METHODS
from fedjax_het.analysis.figures.metric_vs_setting import find_numeric_pair
from fedjax_het.analysis.overview import get_method_title
from fedjax_het.papers.fedaf.privacy import plot_privacy
from fedjax_het.utils.errors import ConfigError

ROUNDS = 12
ALPHAS = (0.01, 0.1, 1.0)
SEEDS = (0, 1, 2)
DIVERGED = {("fedprox", 0.01, 1), *(("scaffold", 0.1, seed) for seed in SEEDS)}


def sweep(methods=("fedavg", "fedprox", "scaffold"), alphas=ALPHAS, seeds=SEEDS, **settings):
    """Results and curves whose values are drawn at random: nothing in them is alike."""
    random = np.random.default_rng(len(methods) + 10 * len(alphas))
    rows, frames = [], []
    for method in methods:
        for alpha in alphas:
            for seed in seeds:
                digest = "-".join(map(str, [method, alpha, seed, *settings.values()]))
                curve = random.uniform(0.2, 0.9, ROUNDS)
                lost = (method, alpha, seed) in DIVERGED
                rows.append(
                    {
                        "digest": digest,
                        "settings": f"settings-{digest}",
                        "finished": "2026-01-01",
                        "algorithm": method,
                        "dataset": "digits",
                        "alpha": alpha,
                        "seed": seed,
                        "partition_seed": seed,
                        "final_accuracy": None if lost else curve[-5:].mean(),
                        "best_accuracy": curve.max(),
                        "diverged": lost,
                        "bytes_up": float(random.integers(1, 10**9)),
                        **settings,
                    }
                )
                columns = {"round": np.arange(1, ROUNDS + 1), "test_accuracy": curve}
                frames.append(pd.DataFrame({"digest": digest, **columns, "train_loss": 3 - curve}))
    return pd.DataFrame(rows), pd.concat(frames, ignore_index=True)


def joined(*sweeps):
    results, curves = zip(*sweeps, strict=True)
    return pd.concat(results, ignore_index=True), pd.concat(curves, ignore_index=True)


def values(results, method, alpha, metric="final_accuracy", **settings):
    """A metric of the runs that did not diverge, by seed."""
    chosen = (results["algorithm"] == method) & (results["alpha"] == alpha) & ~results["diverged"]
    for name, value in settings.items():
        chosen &= results[name] == value
    return results[chosen][metric].to_numpy(float)


@pytest.mark.parametrize(
    ("alphas", "titles"),
    [
        ((0.01, 0.1), ["digits, alpha 0.01", "digits, alpha 0.1"]),
        ((0.1,), ["digits"]),  # what all panels share is not said
    ],
)
def test_panel_titles(alphas, titles):
    results, curves = sweep(("fedavg",), alphas, participation=0.4)
    panels = ["dataset", "participation", "alpha"]
    by = [*panels, "algorithm"]
    figure = analysis.plot_learning_curves(results, curves, by=by, panels=panels)
    assert [panel.get_title() for panel in figure.axes] == titles
    for classes, words in ((1.0, "1 class a client"), (2.0, "2 classes a client")):
        results, curves = sweep(alphas=(0.1,), classes=classes)  # a column that lacks some: floats
        by = ["classes", "algorithm"]
        figure = analysis.plot_learning_curves(results, curves, panels=["classes"], by=by)
        assert [panel.get_title() for panel in figure.axes] == [words]


def display(label):
    """Return a label with its method's name for display."""
    method, *settings = label.split(", ")
    return ", ".join([get_method_title(method), *settings])


def line(panel, label):
    (actual,) = [line for line in panel.lines if line.get_label() == display(label)]
    return actual


def band(panel, number):
    """Lower and upper limit of a band, by its abscissa."""
    vertices = panel.collections[number].get_paths()[0].vertices
    limits = {}
    for x, y in vertices:
        low, high = limits.get(x, (math.inf, -math.inf))
        limits[x] = (min(low, y), max(high, y))
    return limits


def names(panel):
    """At the lines' ends, in one line each, from the top."""
    actual = sorted(panel.texts, key=lambda text: -text.xyann[1])
    return [text.get_text().replace("\n", " ") for text in actual]


def note(figure):
    return figure.get_supxlabel().replace("\n", " ")


def drawn(figure):
    """A figure that does not fit into its canvas warns, and a warning is an error."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    assert buffer.getvalue().startswith(b"\x89PNG")


# Learning curves


def smoothed(curves, method, alpha, seeds, metric="test_accuracy"):
    """[rounds - 4, seeds]: the mean of a round and the four before it."""
    columns = []
    for seed in seeds:
        own = curves[curves["digest"] == f"{method}-{alpha}-{seed}"][metric].to_numpy()
        columns.append([own[r - 4 : r + 1].mean() for r in range(4, ROUNDS)])
    return np.array(columns).T


@pytest.mark.parametrize("x", ["seconds", "bytes"])
def test_learning_curves_against_cost(x):
    """A run has at each cost the value of its last round up to then."""
    results, curves = sweep(("fedavg",), (0.1,), seeds=(0, 1))
    durations = curves["digest"].map({"fedavg-0.1-0": 2.0, "fedavg-0.1-1": 3.0})
    curves["simulated_seconds"] = durations
    curves["bytes_up"], curves["bytes_down"] = durations / 4, 3 * durations / 4
    figure = analysis.plot_learning_curves(results, curves, x=x)
    actual = line(figure.axes[0], "fedavg")
    costs = actual.get_xdata()
    grid = {*range(2, 2 * ROUNDS + 1, 2), *range(3, 2 * ROUNDS + 1, 3)}
    assert costs.tolist() == sorted(cost for cost in grid if cost >= 3)
    own = [curves[curves["digest"] == f"fedavg-0.1-{seed}"]["test_accuracy"] for seed in (0, 1)]
    for cost, mean in zip(costs, actual.get_ydata(), strict=True):
        rounds = int(cost // 2), int(cost // 3)
        expected = np.mean([100 * own[seed].iloc[rounds[seed] - 1] for seed in (0, 1)])
        assert mean == pytest.approx(expected)
    assert figure.axes[0].get_xlabel() in ("Simulated time (s)", "Bytes moved, up and down")
    with pytest.raises(ConfigError, match="window = 5: expected 1 with x"):
        analysis.plot_learning_curves(results, curves, x=x, window=5)


def test_learning_curve_means_and_bands():
    results, curves = sweep()
    figure = analysis.plot_learning_curves(results, curves, window=5)
    assert [panel.get_title() for panel in figure.axes] == ["alpha 0.01", "alpha 0.1", "alpha 1"]
    for panel, alpha in zip(figure.axes, ALPHAS, strict=True):
        for number, method in enumerate(("fedavg", "fedprox")):
            seeds = [seed for seed in SEEDS if (method, alpha, seed) not in DIVERGED]
            expected = 100 * smoothed(curves, method, alpha, seeds)
            actual = line(panel, method)
            np.testing.assert_array_equal(actual.get_xdata(), np.arange(5, ROUNDS + 1))
            np.testing.assert_allclose(actual.get_ydata(), expected.mean(axis=1))
            limits = band(panel, number)
            for r, spread in enumerate(expected.std(axis=1, ddof=1)):
                mean = expected[r].mean()
                assert limits[r + 5] == pytest.approx((mean - spread, mean + spread))
        final = 100 * values(results, "fedavg", alpha).mean()
        assert line(panel, "fedavg").get_ydata()[-1] == pytest.approx(final)
        assert panel.get_xlim() == (0, ROUNDS)
    assert figure.axes[0].get_ylabel() == "Test accuracy (%)"
    assert note(figure).startswith("line: mean of 5 rounds (running) and 2 to 3 seeds; band: ")
    drawn(figure)


def test_diverged_method_has_no_line():
    figure = analysis.plot_learning_curves(*sweep())
    labels = [
        {line.get_label() for line in panel.lines if line.get_label()[0] != "_"}
        for panel in figure.axes
    ]
    fedavg, fedprox, scaffold = map(display, ("fedavg", "fedprox", "scaffold"))
    assert labels == [{fedavg, fedprox, scaffold}, {fedavg, fedprox}, labels[0]]
    expected = [{fedavg, f"{fedprox} †", scaffold}, {fedavg, fedprox}]
    assert [set(names(panel)) for panel in figure.axes[:2]] == expected
    assert note(figure).endswith(
        f"† runs that diverged or ended early are left out: {fedprox}, {scaffold}"
    )
    figure = analysis.plot_learning_curves(*sweep(["scaffold"], alphas=(0.1, 1.0)))
    assert [text.get_text() for text in figure.axes[0].texts] == ["diverged"]
    assert names(figure.axes[1]) == [scaffold]
    drawn(figure)
    results, curves = sweep(["scaffold"], alphas=(0.1, 1.0))
    results["is_partial"] = results["diverged"]
    figure = analysis.plot_learning_curves(results.assign(diverged=False), curves)
    assert [text.get_text() for text in figure.axes[0].texts] == ["ended early"]


def test_learning_curves_of_loss():
    results, curves = sweep(["fedavg"])
    figure = analysis.plot_learning_curves(results, curves, metric="train_loss", window=5)
    expected = smoothed(curves, "fedavg", 0.1, SEEDS, "train_loss").mean(axis=1)
    np.testing.assert_allclose(line(figure.axes[1], "fedavg").get_ydata(), expected)
    assert figure.axes[0].get_ylabel() == "Training loss (nats)"
    with pytest.raises(ConfigError, match=r"metric = 'train_los' .* did you mean 'train_loss'"):
        analysis.plot_learning_curves(results, curves, metric="train_los")


def test_learning_curve_has_gaps_without_training():
    results, curves = sweep(["fedavg"], alphas=(0.1,), seeds=(0,))
    curves.loc[curves["round"].isin([1, 3, 6]), "train_loss"] = np.nan
    figure = analysis.plot_learning_curves(results, curves, metric="train_loss", window=1)
    drawn_line = line(figure.axes[0], "fedavg")
    np.testing.assert_array_equal(drawn_line.get_ydata(), curves["train_loss"][1:])
    assert drawn_line.get_markevery() == [0]  # round 2
    curves["train_loss"] = np.nan
    figure = analysis.plot_learning_curves(results, curves, metric="train_loss")
    assert [text.get_text() for text in figure.axes[0].texts] == ["not run"]


def test_learning_curve_of_shorter_run():
    results, curves = sweep(["fedavg"], alphas=(0.1,))
    short = (curves["digest"] == "fedavg-0.1-0") & (curves["round"] > 10)
    curves = curves[~short]
    figure = analysis.plot_learning_curves(results, curves, window=5)
    expected = 100 * smoothed(curves, "fedavg", 0.1, SEEDS[1:])[6:].mean(axis=1)
    np.testing.assert_allclose(line(figure.axes[0], "fedavg").get_ydata()[6:], expected)


@pytest.mark.parametrize("window", [1, 5])
def test_short_runs_are_not_smoothed(window):
    results, curves = sweep(["fedavg"], alphas=(0.1,), seeds=(0,))
    curves = curves[curves["round"] <= 9]
    figure = analysis.plot_learning_curves(results, curves, **({"window": 5} if window > 1 else {}))
    (panel,) = figure.axes
    x, y = line(panel, "fedavg").get_data()
    np.testing.assert_array_equal(x, np.arange(1, 10))
    np.testing.assert_allclose(y, 100 * curves["test_accuracy"])
    assert "mean of" not in note(figure)
    figure = analysis.plot_learning_curves(results, curves, window=4)
    (panel,) = figure.axes
    assert note(figure) == "line: mean of 4 rounds (running)"
    assert line(panel, "fedavg").get_xdata()[0] == 4


def test_variants_have_shades_of_one_hue():
    rates = (0.01, 0.1, 1.0, 10.0)
    sweeps = (sweep(["fedprox"], alphas=(0.1,), **{"hp.prox_mu": mu}) for mu in rates)
    results, curves = joined(*sweeps)
    figure = analysis.plot_learning_curves(results, curves)
    labels = [f"fedprox, prox_mu {mu:g}" for mu in rates]
    assert sorted(names(figure.axes[0])) == [*map(display, labels)]
    actual = [line(figure.axes[0], label) for label in labels]
    brightness = [sum(int(each.get_color()[k : k + 2], 16) for k in (1, 3, 5)) for each in actual]
    assert brightness == sorted(set(brightness))
    three = results["hp.prox_mu"] < 10
    figure = analysis.plot_learning_curves(results[three], curves)
    actual = [line(figure.axes[0], label) for label in labels[:3]]
    assert actual[0].get_color() == analysis.assign_method_colors(["fedprox"])["fedprox"]
    assert len({str(each._dash_pattern) for each in actual}) == 3


def test_panel_grid():
    alphas = (0.01, 0.02, 0.05, 0.1, 0.2)
    figure = analysis.plot_learning_curves(*sweep(["fedavg"], alphas))
    places = [panel.get_subplotspec() for panel in figure.axes]
    expected = [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0)]
    assert [(p.rowspan.start, p.colspan.start) for p in places] == expected
    assert [bool(panel.get_xlabel()) for panel in figure.axes] == [False, True, True, True, True]
    two = [sweep(["fedavg"], alphas[:2], dataset=name) for name in ("digits", "mnist")]
    figure = analysis.plot_learning_curves(*joined(*two))
    titles = ["digits, alpha 0.01", "digits, alpha 0.02", "mnist, alpha 0.01", "mnist, alpha 0.02"]
    assert [panel.get_title() for panel in figure.axes] == titles
    assert figure.axes[2].get_subplotspec().rowspan.start == 1


# Accuracy against alpha


def test_metric_vs_alpha():
    results, _ = sweep()
    figure = analysis.plot_metric_vs_alpha(results)
    (panel,) = figure.axes
    assert panel.get_xscale() == "log"
    for number, method in enumerate(("fedavg", "fedprox")):
        runs = [100 * values(results, method, alpha) for alpha in ALPHAS]
        actual = line(panel, method)
        np.testing.assert_array_equal(actual.get_xdata(), ALPHAS)
        np.testing.assert_allclose(actual.get_ydata(), [own.mean() for own in runs])
        limits = band(panel, number)
        for alpha, own in zip(ALPHAS, runs, strict=True):
            spread = np.std(own, ddof=1)
            assert limits[alpha] == pytest.approx((own.mean() - spread, own.mean() + spread))
        points = [p for p in panel.lines if p.get_label() == "_runs"][number]
        assert points.get_color() == actual.get_color()
        assert points.get_alpha() < 0.5
        assert sorted(points.get_ydata()) == pytest.approx(sorted(np.concatenate(runs)))
    drawn(figure)


def test_diverged_runs_are_crosses():
    results, _ = sweep()
    figure = analysis.plot_metric_vs_alpha(results)
    (panel,) = figure.axes
    crosses = [p for p in panel.lines if p.get_label() == "_diverged"]
    colors = analysis.assign_method_colors(["fedavg", "fedprox", "scaffold"])
    expected = [(0.01, colors["fedprox"]), (0.1, colors["scaffold"])]
    assert [(p.get_xdata()[0], p.get_color()) for p in crosses] == expected
    # Nothing is drawn across the alpha at which all diverged.
    assert math.isnan(line(panel, "scaffold").get_ydata()[1])
    assert note(figure).endswith("×: a run that diverged or ended early")


def test_crosses_are_below_values():
    results, _ = sweep()
    results.loc[(results["alpha"] == 0.01) & (results["seed"] == 0), "diverged"] = True
    (panel,) = analysis.plot_metric_vs_alpha(results).axes
    heights = [p.get_ydata()[0] for p in panel.lines if p.get_label() == "_diverged"]
    assert len(heights) == 4 and len(set(heights)) == 3  # three at 0.01, over each other
    low, high = panel.get_ylim()
    runs = [p.get_ydata() for p in panel.lines if p.get_label() == "_runs"]
    assert low + max(heights) * (high - low) < np.concatenate(runs).min()


def test_single_run_figures():
    results, curves = sweep(["fedavg"], alphas=(0.1,), seeds=(0,))
    figure = analysis.plot_metric_vs_alpha(results)
    (panel,) = figure.axes
    assert [actual.get_label() for actual in panel.lines] == [display("fedavg"), "_leader"]
    low, high = panel.get_xlim()
    assert low < 0.1 < high
    drawn(figure)
    drawn(analysis.plot_learning_curves(results, curves))
    drawn(analysis.plot_heat_map(results, x="alpha", y="algorithm"))


def test_tick_labels_do_not_overlap():
    alphas = (0.01, 0.011, 0.012, 0.1, 1.0)
    figure = analysis.plot_metric_vs_alpha(sweep(["fedavg"], alphas)[0])
    (panel,) = figure.axes
    assert tuple(panel.get_xticks()) == alphas
    texts = [label.get_text() for label in panel.get_xticklabels()]
    assert texts == ["0.01", "", "", "0.1", "1"]


def test_best_eight_methods_have_color():
    methods = [*METHODS][:12]
    results, _ = sweep(methods, alphas=(0.01, 0.1), seeds=(0,))
    (panel,) = analysis.plot_metric_vs_alpha(results).axes
    means = results[~results["diverged"]].groupby("algorithm")["final_accuracy"].mean()
    best = set(means.sort_values().index[-8:])
    assert {name.removesuffix(" †") for name in names(panel)} == {*map(display, best)}
    colors = {name: line(panel, name).get_color() for name in methods if name in means}
    assert len({colors[name] for name in best}) == 8
    (gray,) = {colors[name] for name in colors if name not in best}
    assert gray not in {colors[name] for name in best}


@pytest.mark.parametrize("metric", ["bytes_up", "bmta_round"])
def test_colored_methods_follow_direction(metric):
    methods = [name for name in METHODS if not any(name == run[0] for run in DIVERGED)][:12]
    results, _ = sweep(methods, alphas=(0.01, 0.1), seeds=(0,))
    results["bmta_round"] = 1.0 + np.arange(len(results))
    results.loc[results["algorithm"] == methods[9], metric] = np.nan  # no value is not the best
    (panel,) = analysis.plot_metric_vs_alpha(results, metric=metric).axes
    means = results.groupby("algorithm")[metric].mean().sort_values()
    expected = set(means.index[:8]) if metric == "bytes_up" else set(methods[:8])
    assert set(names(panel)) == {*map(display, expected)}


def test_runs_without_alpha_are_left_out():
    results, _ = sweep(["fedavg"])
    more = results.iloc[[0]].assign(alpha=np.nan, settings="iid", final_accuracy=0.99)
    figure = analysis.plot_metric_vs_alpha(pd.concat([results, more]))
    assert max(line(figure.axes[0], "fedavg").get_ydata()) < 95
    with pytest.raises(ConfigError, match="alpha"):
        analysis.plot_metric_vs_alpha(more)


# Heat maps


def heat_map_sweep():
    rates = (0.001, 0.01)
    results, _ = joined(*(sweep(**{"hp.local_lr": rate}) for rate in rates))
    results["final_accuracy"] *= np.linspace(0.5, 1, len(results))  # the two rates differ
    missing = (results["algorithm"] == "fedavg") & (results["alpha"] == 1.0)
    return results[~(missing & (results["hp.local_lr"] == 0.01))], rates


def test_heat_map_means():
    results, rates = heat_map_sweep()
    figure = analysis.plot_heat_map(results, x="alpha", y="learning_rate")
    *panels, bar = figure.axes
    methods = {display(name): name for name in ("fedavg", "fedprox", "scaffold")}
    assert [panel.get_title() for panel in panels] == [*methods]
    assert bar.get_ylabel() == "Test accuracy (%)"
    scales = set()
    for panel in panels:
        (image,) = panel.images
        array = image.get_array().filled(np.nan)
        scales.add(image.get_clim())
        texts = {
            (round(text.get_position()[1]), round(text.get_position()[0])): text.get_text()
            for text in panel.texts
        }
        for (row, column), value in np.ndenumerate(array):
            setting = {"hp.local_lr": rates[row]}
            method, alpha = methods[panel.get_title()], ALPHAS[column]
            own = values(results, method, alpha, **setting)
            lost = any((method, alpha, seed) in DIVERGED for seed in SEEDS)
            if len(own):
                assert value == pytest.approx(100 * own.mean())
                assert texts[row, column] == f"{value:.1f}" + " †" * lost
            else:
                assert math.isnan(value)
                assert texts[row, column] == ("†" if lost else "—")
        assert [text.get_text() for text in panel.get_xticklabels()] == ["0.01", "0.1", "1"]
        assert [text.get_text() for text in panel.get_yticklabels()] == ["0.001", "0.01"]
    assert len(scales) == 1
    summary = analysis.summarize_runs(results)
    assert scales == {(summary["mean"].min(), summary["mean"].max())}
    drawn(figure)


def test_heat_map_numbers_fit_cells():
    results, _ = heat_map_sweep()
    for metric in ("final_accuracy", "bytes_up"):
        figure = analysis.plot_heat_map(results, x="alpha", y="hp.local_lr", metric=metric)
        drawn(figure)
        for panel in figure.axes[:-1]:
            width = panel.get_window_extent().width / len(ALPHAS)
            assert all(text.get_window_extent().width < width for text in panel.texts)


def test_heat_map_of_other_settings():
    results, _ = heat_map_sweep()
    figure = analysis.plot_heat_map(results, x="hp.local_lr", y="algorithm", by=["alpha"])
    panels = figure.axes[:-1]
    assert [panel.get_title() for panel in panels] == ["alpha 0.01", "alpha 0.1", "alpha 1"]
    rows = [text.get_text() for text in panels[0].get_yticklabels()]
    assert rows == [*map(display, ("scaffold", "fedprox", "fedavg"))]  # from the bottom
    array = panels[2].images[0].get_array().filled(np.nan)
    own = values(results, "fedprox", 1.0, **{"hp.local_lr": 0.001})
    assert array[1, 0] == pytest.approx(100 * own.mean())
    assert math.isnan(array[2, 1])


def test_heat_map_omits_method_without_setting():
    plain, _ = sweep(["fedavg"])
    proximal, _ = joined(*(sweep(["fedprox"], **{"hp.prox_mu": mu}) for mu in (0.01, 0.1)))
    results = pd.concat([plain, proximal])
    figure = analysis.plot_heat_map(results, x="alpha", y="hp.prox_mu")
    assert [panel.get_title() for panel in figure.axes[:-1]] == [display("fedprox")]
    with pytest.raises(ConfigError, match=r"y = 'prox_mu' is unknown: did you mean 'hp.prox_mu'"):
        analysis.plot_heat_map(results, x="alpha", y="prox_mu")
    with pytest.raises(ConfigError, match="y = 'alpha': expected another"):
        analysis.plot_heat_map(results, x="alpha", y="alpha")
    with pytest.raises(ConfigError, match="both"):
        analysis.plot_heat_map(results[results["algorithm"] == "fedavg"], x="alpha", y="hp.prox_mu")


def test_find_numeric_pair():
    plain, _ = sweep(["fedavg"])
    assert find_numeric_pair(plain) == []
    assert find_numeric_pair(heat_map_sweep()[0]) == ["alpha", "hp.local_lr"]
    one_alpha, _ = sweep(["fedprox"], alphas=(0.1,), **{"hp.prox_mu": 0.5})
    other, _ = sweep(["fedprox"], alphas=(0.1,), **{"hp.prox_mu": 0.1})
    each_in_one_method = pd.concat([plain, one_alpha, other])
    assert find_numeric_pair(each_in_one_method) == []
    assert find_numeric_pair(heat_map_sweep()[0], by=["algorithm", "alpha"]) == []


def test_privacy_figure():
    rows = [(2.0, 0.5, 5), (2.0, 0.7, 5), (8.0, 0.8, 5), (np.nan, 0.9, 5), (np.nan, 0.1, 0)]
    results = pd.DataFrame(rows, columns=["epsilon", "best_accuracy", "hp.image_lr"])
    results = results.assign(dataset="digits", algorithm="feddm")
    results = results.assign(final_accuracy=0.5, diverged=False)
    (panel,) = plot_privacy(results, pd.DataFrame()).axes
    private, plain, still = panel.lines
    np.testing.assert_allclose(private.get_xdata(), [2, 8])
    np.testing.assert_allclose(private.get_ydata(), [60, 80])
    assert (plain.get_linestyle(), still.get_linestyle()) == ("--", ":")
    np.testing.assert_allclose([line.get_ydata()[0] for line in (plain, still)], [90, 10])

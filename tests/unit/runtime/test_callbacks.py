"""Callbacks, and rounds as a loop: statuses, stops, errors and checkpoints."""

import numpy as np
import pytest
from support.data import make_user_dataset
from support.markers import slow_case
from support.small_runs import assert_results_equal, make_spec, run_spec, run_sweep

from fedjax_het import ConfigError, federation, simulate


class Listener:
    """Records the statuses of each run by digest."""

    def __init__(self, then=lambda now: None):
        self.told, self.then = {}, then

    def __call__(self, now):
        new = {name: np.array(curve) for name, curve in now.new_metrics.items()}
        kept = (now.phase, now.done, new, now.bytes_up, now.bytes_down)
        self.told.setdefault(now.digest, []).append(kept)
        self.then(now)

    def curves(self, name):
        records = [new for _, _, new, *_ in self.told[name]]
        return {metric: np.concatenate([new[metric] for new in records]) for metric in records[0]}


METHODS = ["fedavg", *map(slow_case, ("feddm", "dynafed", "fedgen", "fedmix"))]


@pytest.mark.parametrize("name", METHODS)
def test_callbacks_receive_all_metrics_once(name, short_chunks, tmp_path):
    accuracies, data = {}, make_user_dataset()

    def tests_the_model(now):
        if now.phase == "rounds":
            tested = now.model().evaluate(data.test_inputs, data.test_labels)
            accuracies[now.done] = tested.accuracy

    listener = Listener(tests_the_model)
    result = run_spec(make_spec(name), callbacks=[listener], output_dir=tmp_path)
    assert_results_equal(result, run_spec(make_spec(name)))
    (digest,) = listener.told
    assert digest == result.digest() and (tmp_path / f"{digest}.json").exists()
    records = listener.told[digest]
    phases, rounds = [each[0] for each in records], [each[1] for each in records]
    assert phases[0] == "start" and phases[-1] == "end" and phases.count("start") == 1
    work = {phase for phase in phases if phase not in ("start", "rounds", "end")}
    assert bool(work) == (name == "dynafed")
    assert rounds[0] == 0 and rounds[-1] == 9 and rounds == sorted(rounds)
    for metric, values in listener.curves(digest).items():
        np.testing.assert_array_equal(values, result.metrics[metric], err_msg=metric)
    for _, done, _, up, down in records:
        assert up == result.metrics["bytes_up"][:done].sum()
        assert down == result.metrics["bytes_down"][:done].sum()
    assert len(accuracies) >= 3
    for done, accuracy in accuracies.items():
        measured = result.metrics["test_accuracy"][done - 1]
        assert accuracy == pytest.approx(float(measured), abs=1e-6)


def test_callback_stops_a_resumable_run(short_chunks, tmp_path):
    whole = run_spec(make_spec("scaffold"))

    def ends(now):
        if now.phase == "rounds" and now.done >= 4:
            now.stop("seen\nenough")

    later = Listener()
    result = run_spec(make_spec("scaffold"), callbacks=[ends, later], output_dir=tmp_path)
    end = result.summary["rounds"]
    entries = {"why": "callback", "round": end, "reason": result.summary["stopped_early"]["reason"]}
    assert 4 <= end < 9 and result.summary["stopped_early"] == entries
    assert entries["reason"].startswith("seen") and "\n" not in entries["reason"]
    assert [each[0] for each in later.told[result.digest()]][-1] == "end"
    for name, values in whole.metrics.items():
        np.testing.assert_array_equal(result.metrics[name][:end], values[:end], err_msg=name)
    assert np.isnan(result.metrics["test_accuracy"][end:]).all()
    assert not result.summary["diverged"] and not result.metrics["bytes_up"][end:].any()
    assert_results_equal(run_spec(make_spec("scaffold"), output_dir=tmp_path, resume=True), whole)
    assert not (tmp_path / "checkpoint.npz").exists()


def test_stop_before_the_first_round_has_a_result():
    result = run_spec(make_spec(), callbacks=[lambda now: now.stop("not today")])
    assert result.summary["rounds"] == 0 and result.summary["final_accuracy"] is None
    assert result.summary["best_accuracy"] is None and not result.summary["diverged"]
    assert result.model().evaluate(make_user_dataset().test_inputs, make_user_dataset().test_labels)


def test_callback_error_is_noted_and_leaves_checkpoint(short_chunks, tmp_path):
    def breaks(now):
        if now.done >= 4:
            raise ZeroDivisionError("by zero")

    other = Listener()
    with pytest.raises(ZeroDivisionError, match="by zero") as raised:
        run_spec(make_spec(), callbacks=[other, breaks], output_dir=tmp_path)
    (note,) = raised.value.__notes__
    assert "breaks after round" in note and "a checkpoint is written" in note
    assert (tmp_path / "checkpoint.npz").exists()
    before = max(each[1] for each in next(iter(other.told.values())))
    again = Listener()
    assert_results_equal(
        run_spec(make_spec(), callbacks=[again], output_dir=tmp_path, resume=True),
        run_spec(make_spec()),
    )
    (entries,) = again.told.values()
    assert entries[0][:2] == ("start", before) and len(entries[0][2]["train_loss"]) == before >= 4


@pytest.mark.parametrize(
    ("callbacks", "said"), [(3, "callbacks = 3: expected a list"), ([3], "callbacks[0] = 3")]
)
def test_invalid_callbacks_are_rejected(callbacks, said):
    for call in (simulate, federation):
        with pytest.raises(ConfigError) as raised:
            call(make_spec(), dataset=make_user_dataset(), callbacks=callbacks)
        assert str(raised.value).startswith(said)


# --- in sweeps --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("width", [slow_case(1), 2])
def test_sweep_callbacks_receive_every_run(width, short_chunks, tmp_path):
    """Whichever go side by side, also where some wait; and stop the one that they look at."""

    def ends_one(now):
        if now.spec.seed == 1 and now.done >= 3:
            now.stop("this one")

    listener = Listener(ends_one)
    specs = [make_spec(seed=seed, rounds=16) for seed in range(3)]
    specs += [make_spec(seed=seed, rounds=16, patience=1) for seed in range(3, 5)]
    placement = {"width": width, "spread": "runs", "lanes": 1}
    sweep_result = run_sweep(specs, tmp_path, callbacks=[listener], **placement)
    assert listener.told.keys() == {result.digest() for result in sweep_result.results}
    for result in sweep_result.results:
        rounds, records = result.summary["rounds"], listener.told[result.digest()]
        assert records[-1][0] == "end" and [each[0] for each in records].count("end") == 1
        starts = [at for at, each in enumerate(records) if each[0] == "start"]
        known = 0
        for at, (_, done, new, *_) in enumerate(records):
            assert len(new["train_loss"]) == done - (0 if at in starts else known)
            known = done
        last = records[starts[-1] :]
        curve = np.concatenate([new["train_loss"] for _, _, new, *_ in last])
        np.testing.assert_array_equal(curve, result.metrics["train_loss"][:rounds])
        why = (result.summary["stopped_early"] or {}).get("why")
        seed = result.spec.seed
        assert why == "callback" if seed == 1 else why == "plateau" if seed > 2 else why is None
        if seed == 1:
            assert 3 <= rounds <= 5


def test_callback_error_ends_a_resumable_sweep(short_chunks, tmp_path):
    def breaks(now):
        if now.done >= 4:
            raise KeyError("here")

    specs = [make_spec(seed=seed) for seed in range(2)]
    with pytest.raises(KeyError) as raised:
        run_sweep(specs, tmp_path, callbacks=[breaks])
    assert "breaks after round" in raised.value.__notes__[0]
    assert list((tmp_path / "unfinished").glob("*/checkpoint.npz"))
    rounds = Listener()
    run_sweep(specs, tmp_path, callbacks=[rounds])
    assert min(records[0][1] for records in rounds.told.values()) >= 0
    assert max(records[0][1] for records in rounds.told.values()) >= 4


# --- as a loop --------------------------------------------------------------------------------


def test_rounds_loop_equals_simulate():
    whole = run_spec(make_spec("scaffold"))
    running = federation(make_spec("scaffold"), dataset=make_user_dataset())
    seen = [(now.done, now.metrics["test_accuracy"][-1]) for now in running.rounds(every=2)]
    assert [done for done, _ in seen if done % 2 and done < 9] == [1]  # the first is timed
    assert {2, 4, 6, 8, 9} <= {done for done, _ in seen}
    assert all(whole.metrics["test_accuracy"][done - 1] == accuracy for done, accuracy in seen)
    assert_results_equal(running.result(), whole)
    assert running.result() is running.result() and not list(running.rounds())


@pytest.mark.parametrize("takes_result", [False, True])
def test_left_loop_leaves_a_checkpoint(takes_result, short_chunks, tmp_path):
    whole = run_spec(make_spec())
    session = federation(make_spec(), dataset=make_user_dataset(), output_dir=tmp_path)
    with pytest.raises(ConfigError, match=r"^result = "):
        session.result()
    for now in session.rounds():
        if now.done >= 4:
            break
    assert (tmp_path / "checkpoint.npz").exists() and not list(tmp_path.glob("*.json"))
    if takes_result:  # of the first rounds
        result, end = session.result(), now.done
        assert result.summary["stopped_early"]["round"] == result.summary["rounds"] == end < 9
        for name, values in whole.metrics.items():
            np.testing.assert_array_equal(result.metrics[name][:end], values[:end], err_msg=name)
    else:
        assert_results_equal(run_spec(make_spec(), output_dir=tmp_path, resume=True), whole)
    assert [now.done for now in session.rounds()][-1] == 9
    assert_results_equal(session.result(), whole)


def test_status_is_read_only():
    running = federation(make_spec(rounds=3), dataset=make_user_dataset())
    for now in running.rounds():
        with pytest.raises(ValueError, match="read-only"):
            now.metrics["test_accuracy"][0] = 1
        with pytest.raises(ConfigError, match=r"^reason = 3"):
            now.stop(3)
        with pytest.raises(ConfigError, match=r"^client = "):
            now.model(client=1)
    with pytest.raises(ConfigError, match=r"^every = 0"):
        running.rounds(every=0)

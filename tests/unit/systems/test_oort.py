"""Oort's selection against its rules by hand."""

import math

import numpy as np
import pytest

from fedjax_het.core.work_items import Workload
from fedjax_het.systems import Federation, Oort, Speed, SystemSimulation

NUM_CLIENTS, COHORT_SIZE = 24, 6
SIZES = np.arange(NUM_CLIENTS)  # client 0 has no examples
FEDERATION = Federation(SIZES, COHORT_SIZE, seed=3, partition_seed=5)
WORKLOAD = Workload(SIZES, np.maximum(SIZES, 1), 0 * SIZES, 0 * SIZES)
SPEED = Speed(sigma=1, step_seconds=2)


def draw_losses(r):
    return np.random.default_rng(r).uniform(0.1, 2, NUM_CLIENTS).astype(np.float32)


def simulate(oort, *models, rounds):
    plans = SystemSimulation([oort, *models], FEDERATION).simulate_rounds(
        lambda r: WORKLOAD, rounds
    )
    result = [next(plans).clients.tolist()]
    for r in range(rounds - 1):
        losses = np.full(NUM_CLIENTS, np.nan, np.float32)
        losses[result[-1]] = draw_losses(r)[result[-1]]
        result.append(plans.send(losses).clients.tolist())
    return result


def select_by_hand(oort, durations, rounds):
    """Return the clients of each round, from the docstring's formulas for one client at a time."""
    utility, last, counts, means = {}, {}, dict.fromkeys(range(NUM_CLIENTS), 0), []
    epsilon, percentile, result = oort.exploration, oort.preferred, []
    for number in range(1, rounds + 1):
        done, w = number - 1, oort.pacer_rounds
        if done >= 2 * w and done % w == 0:
            before, latest = sum(means[done - 2 * w : done - w]), sum(means[done - w :])
            if abs(latest - before) <= 0.1 * before:
                percentile = min(100, percentile + oort.pacer_step)
            elif abs(latest - before) >= 5 * before:
                percentile = max(oort.pacer_step, percentile - oort.pacer_step)
        ranked = sorted(durations[1:])
        preferred = math.inf
        if percentile < 100:
            preferred = ranked[min(int(len(ranked) * percentile / 100), len(ranked) - 1)]
        slow = {
            k: (preferred / durations[k]) ** oort.alpha if durations[k] > preferred else 1.0
            for k in range(1, NUM_CLIENTS)
        }
        epsilon = max(epsilon * oort.decay, oort.min_exploration)
        blacklist = sorted(counts, key=lambda k: (-counts[k], k))
        blacklist = [k for k in blacklist if counts[k] > oort.blacklist_rounds]
        blacklist = blacklist[: int(0.3 * NUM_CLIENTS)] if oort.blacklist_rounds else []
        known = sorted(k for k in utility if k not in blacklist)
        new = [k for k in range(1, NUM_CLIENTS) if k not in utility]
        num_new = min(len(new), max(int(COHORT_SIZE * epsilon), COHORT_SIZE - len(known)))
        num_known = min(COHORT_SIZE - num_new, len(known))
        rng = oort.make_rng(FEDERATION.seed, number - 1)
        exploited = []
        if num_known:
            values = sorted(utility[k] for k in known)
            limit = values[min(int(len(values) * oort.clip), len(values) - 1)]
            low, spread = 0.999 * values[0], max(values[-1] - 0.999 * values[0], 1e-4)
            score = {
                k: (
                    (min(utility[k], limit) - low) / spread
                    + math.sqrt(0.1 * math.log(number) / last[k])
                )
                * slow[k]
                for k in known
            }
            cut = oort.cutoff * sorted(score.values(), reverse=True)[num_known - 1]
            admitted = [k for k in known if score[k] >= cut]
            weights = np.array([score[k] for k in admitted])
            drawn = rng.choice(admitted, num_known, replace=False, p=weights / weights.sum())
            exploited = drawn.tolist()
        rewards = {k: SIZES[k] * slow[k] for k in new}
        best = sorted(new, key=lambda k: (-rewards[k], k))[: int(oort.window * num_new)]
        explored = []
        if num_new:
            weights = np.array([rewards[k] for k in best])
            explored = rng.choice(best, num_new, replace=False, p=weights / weights.sum()).tolist()
        losses = draw_losses(number - 1)
        for k in explored + exploited:
            utility[k], last[k] = SIZES[k] * float(losses[k]), number
            counts[k] += 1
        means.append(float(np.mean([utility[k] for k in exploited])) if exploited else 0.0)
        result.append(sorted(explored + exploited))
    return result


@pytest.mark.parametrize(
    "oort",
    [
        Oort(),
        Oort(exploration=0.5, cutoff=0.5, clip=0.5, window=2.0, alpha=1.0),
        Oort(pacer_rounds=2, pacer_step=20.0, preferred=50.0, blacklist_rounds=4, decay=0.5),
    ],
    ids=["defaults", "shares", "pacer and blacklist"],
)
def test_rounds_equal_the_rule_by_hand(oort):
    rng = SPEED.make_rng(FEDERATION.partition_seed)
    durations = 2 * np.exp(rng.standard_normal(NUM_CLIENTS)) * SIZES
    expected = select_by_hand(oort, durations, 25)
    assert [sorted(clients) for clients in simulate(oort, SPEED, rounds=25)] == expected


def test_penalty_prefers_fast_clients():
    rng = SPEED.make_rng(FEDERATION.partition_seed)
    durations = 2 * np.exp(rng.standard_normal(NUM_CLIENTS)) * SIZES
    means = []
    for alpha in (0.0, 4.0):
        cohorts = simulate(Oort(alpha=alpha, cutoff=0.0, decay=0.0), SPEED, rounds=60)
        assert {len(set(cohort)) for cohort in cohorts} == {COHORT_SIZE}
        assert 0 not in np.concatenate(cohorts)
        means.append(durations[np.concatenate(cohorts[30:])].mean())
    assert means[1] < 0.7 * means[0]


def test_a_large_exponent_selects_the_fastest_clients():
    durations = np.exp(np.random.default_rng(0).standard_normal(NUM_CLIENTS))
    oort = Oort(alpha=1e6, preferred=0.0, exploration=0.0, min_exploration=0.0)
    state = oort.start(FEDERATION)
    available, fastest = np.arange(NUM_CLIENTS), 1 + np.argsort(durations[1:])[:COHORT_SIZE]
    for r in range(3):  # new clients, then known ones
        selected, state = oort.select_by_losses(
            state, FEDERATION, available, COHORT_SIZE, durations=durations, round_index=r
        )
        assert set(selected.tolist()) == set(fastest.tolist())
        losses = np.full(NUM_CLIENTS, np.nan, np.float32)
        losses[1:] = 1.0  # all clients are known after the first round
        state = oort.record_losses(state, losses)


def test_durations_of_absent_clients_do_not_count():
    """Absent clients equal clients that never have examples."""
    oort, durations = Oort(preferred=50.0), np.linspace(1, 10, NUM_CLIENTS)
    absent, available = [1, 3, 5], np.arange(2, NUM_CLIENTS, 2)
    never = FEDERATION._replace(sizes=np.where(np.isin(SIZES, absent), 0, SIZES))
    absent_durations = np.where(np.isin(SIZES, absent), np.nan, durations)
    choices = [
        oort.select_by_losses(
            *(oort.start(federation), federation, available, COHORT_SIZE),
            durations=values,
            round_index=0,
        )[0].tolist()
        for federation, values in ((never, durations), (FEDERATION, absent_durations))
    ]
    assert choices[0] == choices[1]

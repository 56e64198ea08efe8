"""The drift test: ranks and capital against slow computations, uniformity, false alarms, and what a change looks like."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gapa_onnx.monitor import drift as module
from gapa_onnx.monitor.drift import BETS, Ordinary, drift, log_capital, smoothed_ranks

N, T = 300, 700  # ordinary rows; rows of a stream, more than one block of direct comparison


def streams(count: int, rows: int, ordinary: int, seed: int):
    rng = np.random.default_rng(seed)
    for number in range(count):
        known = Ordinary.of(rng.gamma(2.0, size=ordinary))
        yield number, known, rng.gamma(2.0, size=rows)


def test_ranks_are_those_of_counting():
    assert T > 2 * module.BLOCK
    for number, known, stream in streams(3, T, N, seed=0):
        places = known.places(stream)
        u = smoothed_ranks(known, places, number)
        beyond = np.array([(known.scores > s).sum() for s in stream])
        stranger = beyond + [(places[:t] > place).sum() for t, place in enumerate(places)]
        beside = np.array(
            [(places[:t] == place).sum() for t, place in enumerate(places)]
        )  # told apart by chance
        size = known.rows + 1 + np.arange(T)
        assert (u >= stranger / size).all() and (u <= (stranger + beside + 1) / size).all()


def test_without_ordinary_rows_ranks_are_among_earlier_ones():
    stream = np.random.default_rng(0).normal(size=T)
    nobody = Ordinary.of(np.empty(0))
    u = smoothed_ranks(nobody, np.argsort(np.argsort(stream)) * 2)
    stranger = np.array([(stream[:t] > s).sum() for t, s in enumerate(stream)])
    assert (np.floor(u * np.arange(1, T + 1)) == stranger).all()


@pytest.mark.parametrize("kinds", [None, 7, 1])
def test_ranks_are_uniform_also_where_scores_repeat(kinds: int | None):
    """5 groups of u: uniform, and no guide to the next one. P-values of a right program lie above 1e-4 in 9,999 of
    10,000 runs; the seed is fixed."""
    first, later = [], []
    for number, known, stream in streams(60, 200, 50, seed=1):
        scores, seen = (
            x if kinds is None else np.minimum(x, kinds - 1).round() for x in (known.scores, stream)
        )
        ordinary = Ordinary.of(scores)
        u = smoothed_ranks(ordinary, ordinary.places(seen), number)
        first.append(u[:-1])
        later.append(u[1:])
    before, after = np.concatenate(first), np.concatenate(later)
    assert stats.kstest(before, "uniform").pvalue > 1e-4
    pairs, *_ = np.histogram2d(before, after, bins=5, range=[(0, 1), (0, 1)])
    assert stats.chisquare(pairs.ravel()).pvalue > 1e-4


def test_p_values_say_where_a_score_lies():
    from gapa_onnx.plan.heads.pvalues import p_value

    rng = np.random.default_rng(3)
    scores = np.concatenate([rng.normal(size=200), np.full(5, 0.25)])  # one that repeats
    known = Ordinary.of(scores)
    stream = np.concatenate([rng.normal(size=500), [-9.0, 9.0, np.nan, 0.25]])
    places = known.places_of_p_values(p_value(scores, stream).astype(np.float32))
    expected = known.places(stream)
    between = np.flatnonzero(np.isin(known.scores, 0.25))[0]
    sure = expected != 2 * between  # what lies just below the repeated one has its p-value
    assert (places[sure] == expected[sure]).all() and places[~sure].tolist() == [2 * between + 1] * (
        ~sure
    ).sum()
    assert places[-4:].tolist() == [0, 2 * len(known.scores), 2 * len(known.scores), 2 * between + 1]


def test_the_capital_is_that_of_betting_row_by_row():
    u = np.random.default_rng(4).random(40) ** 2
    accounts: list[tuple[float, tuple[float, float, float]]] = []
    waiting, told = 1.0, []
    for t, value in enumerate(u, 1):
        entering, waiting = waiting - 1 / (t + 1), 1 / (t + 1)
        accounts += [(entering / len(BETS), tuple(bet)) for bet in BETS]
        accounts = [
            (money * (1 - part + (part / (high - low) if low <= value < high else 0.0)), (low, high, part))
            for money, (low, high, part) in accounts
        ]
        told.append(math.log(waiting + sum(money for money, _ in accounts)))
    np.testing.assert_allclose(log_capital(u), told, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(log_capital(np.stack([u, u[::-1]]))[0], told, rtol=1e-9, atol=1e-12)


def test_each_bet_is_fair():
    ends = BETS[:, 1] - BETS[:, 0]
    mean = ends * (1 - BETS[:, 2] + BETS[:, 2] / ends) + (1 - ends) * (1 - BETS[:, 2])
    np.testing.assert_allclose(mean, 1, rtol=1e-12)


def test_false_alarms_are_as_rare_as_it_says():
    """At level .05 at most 5% of streams; more than 11 of 80 has a probability below .001 if it is 5%."""
    alarms = [
        drift(known, known.places(stream), 0.05, number).alarm is not None
        for number, known, stream in streams(80, 1500, 100, seed=5)
    ]
    assert sum(alarms) <= 11


def test_p_values_of_a_fixed_table_would_raise_them():
    """The same bets on ranks among the table alone: what the ranks among the stream so far are for."""
    alarms = 0
    for number, known, stream in streams(10, 5000, 100, seed=6):
        u = (
            known.rows - np.searchsorted(known.scores, stream) + np.random.default_rng(number).random(5000)
        ) / (known.rows + 1)
        alarms += bool(log_capital(u).max() >= -math.log(0.01))
    assert alarms >= 3  # of 10; of ranks that are uniform fewer than 1 in 5,000 such runs


@pytest.mark.parametrize(("first", "most"), [(0, 150), (1000, 400)])
def test_strange_rows_are_told(first: int, most: int):
    """A tenth of the rows from the first on are beyond all others."""
    rng = np.random.default_rng(7)
    for number, known, stream in streams(10, first + 600, 1000, seed=8):
        strange = (rng.random(len(stream)) < 0.1) & (np.arange(len(stream)) >= first)
        found = drift(known, known.places(np.where(strange, stream + 50, stream)), 0.01, number)
        assert found.alarm is not None and first <= found.alarm <= first + most


def test_rows_that_are_too_ordinary_are_told():
    """A camera that shows one picture: nothing is strange, and yet the input has changed."""
    for number, known, stream in streams(5, 500, 1000, seed=9):
        found = drift(known, known.places(np.minimum(stream, 0.3)), 0.01, number)
        assert found.alarm is not None and found.alarm <= 300


def test_the_same_seed_gives_the_same_answer():
    _, known, stream = next(iter(streams(1, 300, 50, seed=10)))
    places = known.places(np.round(stream))
    one, again, other = (drift(known, places, 0.01, seed).log_evidence for seed in (1, 1, 2))
    assert one.tobytes() == again.tobytes() != other.tobytes()


def test_a_stream_may_be_empty():
    known = Ordinary.of(np.arange(5.0))
    assert drift(known, known.places(np.empty(0))).alarm is None

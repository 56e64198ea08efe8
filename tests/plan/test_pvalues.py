"""p-values against counting one by one, in numpy and in the graph of every opset, and what they promise."""

from __future__ import annotations

import numpy as np
import pytest
from support.graph_runs import run_graph
from support.ordinary import counted_p

from gapa_onnx.plan.heads.pvalues import (
    TableTensors,
    emit_flag,
    emit_p_value,
    laid_out,
    p_value,
    read_p_value,
)

COUNTS = (0, 1, 2, 3, 4, 5, 10, 16, 17, 101)


def ordinary(count: int, kind: str) -> np.ndarray:
    """Scores of ordinary inputs in no order: all different, few different, all the same, or very large and small."""
    generator = np.random.default_rng(count)
    scores = {
        "different": generator.normal(size=count),
        "ties": generator.integers(0, 3, count).astype(float),
        "one value": np.full(count, 0.25),
        "far apart": generator.choice([-1, 1], count) * 10.0 ** generator.integers(-30, 30, count),
    }
    return scores[kind].astype(np.float32)


KINDS = ("different", "ties", "one value", "far apart")


def questions(scores: np.ndarray) -> np.ndarray:
    """Below and above all, at each of them, a rounding beside each, between, and what is no number."""
    beside = [np.nextafter(scores, np.float32(to), dtype=np.float32) for to in (-np.inf, np.inf)]
    odd = np.array([-3e38, 3e38, 0, -0.0, 0.3, np.nan, np.inf, -np.inf], np.float32)
    return np.concatenate([scores, *beside, odd])


# ------------------------------------------------------------------------------------ the table


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_table_holds_all_scores_in_order(count, kind):
    scores = ordinary(count, kind)
    table, largest = laid_out(scores)
    assert table.shape[1] ** 2 >= count > (table.shape[1] - 1) ** 2 or count == 0  # about √n wide
    np.testing.assert_array_equal(table.ravel()[:count], np.sort(scores))
    assert np.isposinf(table.ravel()[count:]).all() and np.isposinf(table[-1]).all()
    np.testing.assert_array_equal(largest, table[:-1, -1])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_by_numpy(count, kind):
    scores = ordinary(count, kind)
    asked = questions(scores)
    np.testing.assert_array_equal(p_value(scores, asked).astype(np.float32), counted_p(scores, asked))
    assert (p_value(scores, asked) <= 1).all()


# ------------------------------------------------------------------------------------ the graph


def by_graph(scores: np.ndarray, asked: np.ndarray, level: float, opset: int, optimise: bool = True):
    """p and flag as a file with these ordinary scores has them; and p once more, read from the same table."""
    tables: list[TableTensors] = []

    def write(graph, values):
        p, tensors = emit_p_value(graph, values["score"], asked.ndim, "y/score")
        tables.append(tensors)
        again = read_p_value(graph, values["score"], asked.ndim, tensors, "y/other")
        return p, emit_flag(graph, p, tensors, "y/ood", values["score"]), again

    def numbers():
        return {**tables[0].filled(scores), tables[0].level: np.asarray(level)}

    return run_graph(opset, {"score": asked}, write, numbers, optimise=optimise)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", COUNTS)
def test_the_graph_counts(count, kind):
    scores = ordinary(count, kind)
    asked = questions(scores)
    p, flags, again = by_graph(scores, asked, 0.05, 17)
    expected = counted_p(scores, asked)
    assert p.dtype == np.float32 and flags.dtype == bool
    np.testing.assert_array_equal(p, expected)
    np.testing.assert_array_equal(again, expected)
    np.testing.assert_array_equal(flags, ~(expected > np.float32(0.05)))
    assert flags[~np.isfinite(asked)].all()  # whatever the level: p is 0 there


@pytest.mark.parametrize("opset", [8, 9, 10, 11, 12, 13, 17, 18, 21])
@pytest.mark.parametrize("shape", [(40,), (5, 8), (2, 4, 5), (2, 2, 2, 5)], ids=str)
def test_every_opset_and_rank(opset, shape):
    scores = ordinary(101, "ties")
    asked = questions(scores)[-40:].reshape(shape)
    p, flags, _ = by_graph(scores, asked, 0.3, opset, optimise=opset % 2 == 0)
    np.testing.assert_array_equal(p, counted_p(scores, asked))
    np.testing.assert_array_equal(flags, ~(p > np.float32(0.3)))


def test_double_precision_and_no_rows():
    scores = np.random.default_rng(0).normal(size=50)
    asked = np.concatenate([scores, np.nextafter(scores, np.inf)])
    p, *_ = by_graph(scores, asked, 0.05, 17)
    assert p.dtype == np.float64
    np.testing.assert_array_equal(p, counted_p(scores, asked))
    p, flags, _ = by_graph(scores, np.empty(0), 0.05, 17)
    assert p.shape == flags.shape == (0,)


@pytest.mark.parametrize("count", [19, 99, 10_000])
def test_the_level_itself_is_flagged(count):
    """One in n + 1 is as rare as can be; at 1 - quantile, which is hardly ever a binary number, an input is flagged."""
    scores = np.arange(count, dtype=np.float32)
    wanted = int(0.05 * (count + 1))  # rows that may be as strange or stranger, the new one among them
    asked = np.array([count - wanted, count - wanted + 1, count], np.float32)
    p, flags, _ = by_graph(scores, asked, 1 - 0.95, 17)
    np.testing.assert_array_equal(p, counted_p(scores, asked))
    assert flags.tolist() == [False, True, True]
    np.testing.assert_array_equal(by_graph(scores, asked, 0.0, 17)[1], [False] * 3)
    np.testing.assert_array_equal(by_graph(scores, asked, 1.0, 17)[1], [True] * 3)


# ------------------------------------------------------------------------------------ the promise


@pytest.mark.parametrize("count", [1, 19, 50])
@pytest.mark.parametrize("kind", ["normal", "ties", "heavy tails"])
def test_p_at_most_alpha_has_probability_at_most_alpha(count, kind):
    """Over draws of ordinary scores and a new one of the same kind; equal to alpha where no two scores can be equal and
    (n + 1) alpha is a whole number."""
    generator = np.random.default_rng(3)
    draws = 20_000
    drawn = {
        "normal": generator.normal(size=(draws, count + 1)),
        "ties": generator.integers(0, 4, (draws, count + 1)).astype(float),
        "heavy tails": generator.standard_cauchy((draws, count + 1)),
    }[kind]
    p = np.array([p_value(row[1:], row[0]) for row in drawn])
    for alpha in (0.02, 0.05, 0.1, 0.3, 0.5, 0.9):
        error = 4 * np.sqrt(alpha * (1 - alpha) / draws)
        assert (p <= alpha).mean() <= alpha + error
        exact = (count + 1) * alpha
        if kind != "ties" and abs(exact - round(exact)) < 1e-9:
            assert (p <= alpha + 1e-12).mean() == pytest.approx(alpha, abs=error)

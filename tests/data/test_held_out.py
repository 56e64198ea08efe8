"""Held-out rows: cut by what is in them, never shared with the calibration rows."""

from __future__ import annotations

import numpy as np
import pytest

from gapa_onnx.data import InputSpec, hold_out, open_data
from gapa_onnx.data.held_out import MOST_COUNTING, MOST_FITTING, row_digests
from gapa_onnx.errors import UserError

INPUTS = [InputSpec("x", np.dtype(np.float32), ("n", 3)), InputSpec("k", np.dtype(np.int64), ("n",))]


def rows(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {
        "x": generator.normal(size=(count, 3)).astype(np.float32),
        "k": generator.integers(9, size=count),
    }


def opened(arrays: dict[str, np.ndarray]):
    return open_data(arrays, INPUTS)


def test_the_cut_follows_the_rows_whatever_their_order_and_batches():
    arrays = rows(700)
    held = hold_out(opened(arrays), opened(rows(50, 1)))
    assert held.exact and held.rows == 700
    assert held.fitting.sum() == 350 and (held.counting == ~held.fitting).all()
    order = np.random.default_rng(2).permutation(700)
    pieces = [{name: array[order][a : a + 33] for name, array in arrays.items()} for a in range(0, 700, 33)]
    again = hold_out(open_data(pieces, INPUTS), opened(rows(50, 1)))
    np.testing.assert_array_equal(again.fitting, held.fitting[order])


def test_every_input_counts():
    arrays = rows(40)
    digests = row_digests(opened(arrays))
    assert len(np.unique(digests)) == 40
    other = row_digests(opened({**arrays, "k": (arrays["k"] + 1)}))
    assert not np.isin(other, digests).any()


def test_a_constant_input_does_not_depend_on_the_size_of_a_batch():
    inputs = [INPUTS[0], InputSpec("state", np.dtype(np.float32), (2, 4))]
    arrays = {"x": rows(5)["x"], "state": np.arange(8, dtype=np.float32).reshape(2, 4)}
    data = open_data(arrays, inputs)
    whole = row_digests(data)
    one_by_one = [row_digests(open_data({**arrays, "x": arrays["x"][i : i + 2]}, inputs)) for i in (0, 2)]
    np.testing.assert_array_equal(np.concatenate(one_by_one), whole[:4])


def test_equal_rows_stay_together():
    arrays = rows(300)
    for array in arrays.values():
        array[150:] = array[:150]
    held = hold_out(opened(arrays), opened(rows(50, 1)))
    np.testing.assert_array_equal(held.fitting[:150], held.fitting[150:])


@pytest.mark.parametrize("kind, fitting", [("labels", MOST_FITTING), ("targets", 9000 - MOST_COUNTING)])
def test_the_parts_of_many_rows(kind, fitting):
    known = {"y": np.zeros(9000, np.int64 if kind == "labels" else np.float64)}
    held = hold_out(opened(rows(9000)), opened(rows(50, 1)), **{kind: known})
    assert held.fitting.sum() == fitting and held.counting.sum() == 9000 - fitting


def test_rows_that_nothing_is_known_of_are_not_fitted_to():
    labels = np.full(1000, -1)
    labels[::4] = 2
    held = hold_out(opened(rows(1000)), opened(rows(50, 1)), labels={"y": labels})
    assert held.fitting.sum() == 200 and (labels[held.fitting] == 2).all()
    assert held.counting.sum() == 800
    inside = held.labels_in(held.counting)["y"]
    assert (inside >= 0).sum() == 50 and (inside[held.fitting] == -1).all()
    among = hold_out(opened(rows(1000)), None, labels={"y": labels}, errors=True)
    assert not among.exact and among.fitting.sum() == among.counting.sum() == 125


def test_targets_outside_of_a_part_are_not_seen():
    targets = np.arange(200.0).reshape(100, 2)
    held = hold_out(opened(rows(100)), None, targets={"y": targets})
    inside = held.targets_in(held.fitting)["y"]
    np.testing.assert_array_equal(inside[held.fitting], targets[held.fitting])
    assert np.isnan(inside[held.counting]).all() and np.isfinite(targets).all()


def test_held_out_rows_that_are_calibration_rows():
    calib, held = rows(200), rows(60, 1)
    for name in calib:
        held[name][[7, 30]] = calib[name][[150, 3]]
    with pytest.raises(UserError, match="2 of 60 held-out rows are calibration rows too, the first is row 7"):
        hold_out(opened(held), opened(calib))


def test_truth_that_does_not_fit_the_rows():
    with pytest.raises(UserError, match="9 labels for 60 held-out rows"):
        hold_out(opened(rows(60)), opened(rows(50, 1)), labels={"y": np.zeros(9, np.int64)})

"""One thread within, as many as before outside; pieces of work that all run, or raise."""

from __future__ import annotations

import numpy as np
import pytest
from threadpoolctl import threadpool_info

from gapa_onnx.threads import one_thread, side_by_side


def counts() -> list[int]:
    np.ones((2, 2)) @ np.ones((2, 2))
    return [pool["num_threads"] for pool in threadpool_info()]


def test_threads_are_limited_and_given_back():
    before = counts()
    with one_thread():
        assert set(counts()) == {1}
        with one_thread():
            pass
        assert set(counts()) == {1}
    assert counts() == before
    with pytest.raises(ZeroDivisionError), one_thread():
        1 / 0
    assert counts() == before


def test_every_piece_runs_once_on_one_thread():
    before = counts()
    done, threads = [], []

    def work(piece: int) -> None:
        threads.append(set(counts()))
        done.append(piece)

    side_by_side(work, range(20))
    assert sorted(done) == list(range(20)) and all(each == {1} for each in threads)
    assert counts() == before


def test_what_a_piece_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        side_by_side(lambda piece: 1 / piece, [1, 0, 2])

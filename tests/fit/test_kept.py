"""Rows that are kept: the same from memory and from a file, text always in memory."""

from __future__ import annotations

import numpy as np
import pytest

from gapa_onnx.fit.kept import Kept


def parts() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [
        {
            "x": generator.normal(size=(3, number + 1)).astype(np.float32),
            "inputs:ids": generator.integers(0, 9, size=3),
            "half": np.full((2, 2), number, np.float16),
            "scalar": np.asarray(number > 1),
        }
        for number in range(5)
    ]


@pytest.mark.parametrize("limit", [0, 100, 1 << 20])
def test_what_is_kept_comes_back(limit):
    kept = Kept(limit)
    for part in parts():
        kept.add(part)
    assert len(kept) == 5
    for _ in range(2):  # it can be read again
        for found, expected in zip(kept, parts(), strict=True):
            assert list(found) == list(expected)
            for name, array in expected.items():
                assert found[name].dtype == array.dtype
                np.testing.assert_array_equal(found[name], array)


def test_beyond_the_limit_nothing_more_is_held_in_memory():
    kept = Kept(limit=100)
    for part in parts():
        kept.add(part)
    held = sum(array.nbytes for part in kept._parts if isinstance(part, dict) for array in part.values())
    assert 0 < held <= 100
    assert kept._file is not None


def test_text_stays_in_memory():
    kept = Kept(limit=0)
    kept.add({"text": np.array(["a", "bc"], object)})
    assert kept[0]["text"].tolist() == ["a", "bc"] and kept._file is None


def test_reading_in_between_does_not_disturb_what_is_added():
    kept = Kept(limit=0)
    for number, part in enumerate(parts()):
        kept.add(part)
        np.testing.assert_array_equal(kept[0]["x"], parts()[0]["x"])
        np.testing.assert_array_equal(kept[number]["x"], part["x"])

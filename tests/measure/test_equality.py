"""Fingerprints tell what arrays themselves would."""

from __future__ import annotations

import numpy as np
import pytest

from gapa_onnx.measure.equality import Fingerprint, bit_equal, fingerprints

LIKE = np.array([[1.0, np.nan], [0.0, -2.5]], np.float32)
OTHERS = {
    "a bit": np.array([[1.0, np.nan], [-0.0, -2.5]], np.float32),
    "the type": LIKE.view(np.int32),
    "the shape": LIKE.reshape(4),
    "the order": LIKE[::-1],
    "no array": [1.0, 2.0],
}


def test_the_same_array_is_equal_whatever_its_layout():
    assert bit_equal(LIKE, LIKE.copy()) and bit_equal(Fingerprint.of(LIKE), np.asfortranarray(LIKE))


@pytest.mark.parametrize("what", OTHERS)
def test_what_differs_is_not_equal(what):
    assert not bit_equal(LIKE, OTHERS[what])
    assert not bit_equal(Fingerprint.of(LIKE), OTHERS[what])


def test_empty_arrays_and_numbers_have_fingerprints():
    for array in (np.zeros((0, 3), np.float32), np.array(2.0), np.array([True, False])):
        assert bit_equal(Fingerprint.of(array), array.copy())


def test_words_and_maps_are_kept_as_they_are():
    words = np.array(["a", "b"], object)
    (kept,) = fingerprints([{"words": words, "maps": [{0: 0.5}]}])
    assert bit_equal(kept["words"], np.array(["a", "b"], object))
    assert not bit_equal(kept["words"], np.array(["a", "c"], object))
    assert bit_equal(kept["maps"], [{0: 0.5}]) and not bit_equal(kept["maps"], [{0: 0.25}])

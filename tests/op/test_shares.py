"""The share by matrix products is the reference's, also in blocks and where neighbours are missing."""

from __future__ import annotations

import numpy as np
import pytest
from support.dense_shares import clustered, solve_tolerance

from gapa_onnx.op import reference, shares


@pytest.mark.parametrize("offset", [0, 1 << 10])
def test_as_the_reference(offset, monkeypatch):
    points, queries = clustered(300, 6, 31)
    points, queries = points + np.float32(offset), queries[:50] + np.float32(offset)
    ids = reference.nearest(queries, points, 12)
    ids[::3, 7:] = -1
    ids[4] = -1
    expected = reference.unexplained_share(queries, points, ids, 2.0, 1e-6)
    found = shares.unexplained_share(queries, points, ids, 2.0, 1e-6)
    np.testing.assert_allclose(found, expected, atol=solve_tolerance(12, 1e-6), rtol=0)
    assert found[4] == 1 and np.ptp(found) > 0.01
    monkeypatch.setattr(shares, "_CACHED", 1)
    np.testing.assert_array_equal(shares.unexplained_share(queries, points, ids, 2.0, 1e-6), found)
    assert shares.rows_at_once(12, 6) == 1
    assert shares.unexplained_share(queries[:0], points, ids[:0], 2.0, 1e-6).shape == (0,)

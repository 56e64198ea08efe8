"""Neighbourhoods prepared beforehand: which points they hold, what s they give, and that s is never too small."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from scipy.spatial.distance import cdist
from support import operator_models
from support.dense_shares import by_definition, clustered, dense_share, kernel, solve_tolerance
from support.paths import MODELS
from support.small_models import parse

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.fit.statistics import leave_one_out_share
from gapa_onnx.op import index as index_module
from gapa_onnx.op import reference
from gapa_onnx.op.index import build_index
from gapa_onnx.op.neighbourhoods import choose, neighbourhoods
from gapa_onnx.record import read
from gapa_onnx.settings import Settings

# ------------------------------------------------------------------------- the index


def test_lists_reach_the_recall_for_the_nearest_point_at_least_cost():
    points, held_out = clustered(2500, 8, 3)
    index = build_index("local", points, k=7, held_out=held_out, search="ivf")
    lists, nprobe = index.settings["lists"], index.settings["nprobe"]
    assert lists == len(index.tensors["centroids"]) > 1 and nprobe == index.tensors["nprobe"][0]
    np.testing.assert_array_equal(index.tensors["neighbourhoods"], by_definition(index.points, 7))

    own = reference.list_of_row(index.tensors["list_offsets"])[reference.nearest(held_out, index.points, 1)]
    order = reference.nearest(held_out, index.tensors["centroids"], lists)
    place = (order == own).argmax(axis=1)  # where the list of the nearest point stands
    assert index.recall == pytest.approx((place < nprobe).mean(), abs=2 / 500) and index.recall >= 0.99
    assert (place < nprobe - 1).mean() < 0.99

    def cost(factor: int) -> float:
        built = index_module._lists(points, round(factor * 2500**0.5), 0)
        wanted = reference.nearest(held_out, built.points, 1)
        _, _, compared = index_module._smallest_nprobe(built, held_out, wanted, 0.99)
        return index_module._LIST_COST * len(built.centroids) + index_module._LISTED_COST * compared

    costs = {factor: cost(factor) for factor in (1, 2, 4, 8)}
    assert lists == pytest.approx(min(costs, key=costs.get) * 2500**0.5, rel=0.05)  # empty lists are dropped


@pytest.mark.parametrize(
    "m, search, several", [(500, "auto", False), (500, "ivf", True), (6000, "flat", False)]
)
def test_how_many_lists(m, search, several):
    points, held_out = clustered(m, 4, 4)
    index = build_index("local", points, k=3, held_out=held_out, search=search)
    assert (index.settings["lists"] > 1) == several
    if not several:
        assert index.settings == {"lists": 1, "nprobe": 1} and index.recall == 1.0
        np.testing.assert_array_equal(index.points, points)  # no need to reorder
        assert build_index("local", points, k=3, held_out=held_out[:0], search=search).recall == 1.0


def test_auto_keeps_one_list_where_lists_save_nothing():
    """In many dimensions without clusters a nearest point may be in any list."""
    rng = np.random.default_rng(5)
    points, held_out = (rng.normal(size=(n, 60)).astype(np.float32) for n in (800, 300))
    assert build_index("local", points, k=3, held_out=held_out).settings["lists"] == 1
    points, held_out = clustered(6000, 3, 5)
    assert build_index("local", points, k=3, held_out=held_out).settings["lists"] > 1


def test_rows_that_are_inducing_points_do_not_flatter_the_recall():
    """A point is always found in its own list; what counts is a row that is not among the points."""
    points, new = clustered(3000, 12, 6)
    index = build_index("local", points, k=3, held_out=points[::6], search="ivf")
    t = index.tensors
    constants = {"k": np.array([1]), "length_scale": np.float32(1), "jitter": np.float32(1e-6)}
    found = reference.evaluate("local", constants | t, new)[1]
    assert (found == reference.nearest(new, index.points, 1)).mean() > 0.975  # .99 − 3 standard errors of 500
    assert t["nprobe"][0] > 1


def test_user_mistakes():
    points, held_out = clustered(600, 4, 7)
    with pytest.raises(UserError, match="cannot search for the nearest point by 'hnsw'"):
        build_index("local", points, k=3, held_out=held_out, search="hnsw")
    with pytest.raises(UserError, match="no held-out rows"):
        build_index("local", points, k=3, held_out=held_out[:0])
    for index in ("hnsw", "ivfpq"):
        with pytest.raises(UserError, match=f"`index={index!r}` is not for") as caught:
            Settings(solver="cached", index=index)
        assert "auto, flat or ivf" in caught.value.hint
    with pytest.raises(UserError, match="`solver='lazy'`"):
        Settings(solver="lazy")


# ---------------------------------------------------------------------- the operator


def local_tensors(
    points: np.ndarray,
    k: int,
    *,
    lists: int = 1,
    nprobe: int = 1,
    length_scale=1.5,
    jitter=1e-6,
    groups=neighbourhoods,
):
    held_out, search = (points[:0], "flat") if lists == 1 else (points[::3] + 0.1, "ivf")
    index = build_index("local", points, k=k, held_out=held_out, search=search, groups=groups)
    constants = {"k": k, "length_scale": np.float32(length_scale), "jitter": np.float32(jitter)}
    given = constants | index.tensors
    return given | {"k": np.array([k]), "nprobe": np.array([nprobe])}


def near_and_far(points: np.ndarray, seed: int) -> np.ndarray:
    """Points themselves, between them, among them, and out to where nothing is known."""
    rng = np.random.default_rng(seed)
    d = points.shape[1]
    middle = (points[rng.integers(0, len(points), 200)] + points[rng.integers(0, len(points), 200)]) / 2
    spread = rng.normal(size=(800, d)) * rng.choice([0.3, 1, 2, 5, 30], (800, 1))
    return np.concatenate([points[:50], middle, spread]).astype(np.float32)


def test_reference_takes_over_the_neighbourhood_of_the_nearest_point():
    rng = np.random.default_rng(8)
    points = rng.normal(size=(200, 5)).astype(np.float32)
    queries = near_and_far(points, 9)
    s, ids = reference.evaluate("local", local_tensors(points, 12), queries)
    nearest = cdist(queries.astype(float), points.astype(float)).argmin(axis=1)
    np.testing.assert_array_equal(ids, by_definition(points, 12)[nearest])
    for row, share, members in zip(queries.astype(float), s[:, 0], ids):
        expected = dense_share(row, points[members].astype(float), 1.5, float(np.float32(1e-6)))
        assert share == pytest.approx(expected, abs=solve_tolerance(12, 1e-6))


NIGHTLY = [pytest.param(k, marks=pytest.mark.nightly) for k in (2, 5, 50, 100)]


@pytest.mark.parametrize("k", [1, 20, 300, *NIGHTLY])
@pytest.mark.parametrize("d, length_scale", [(3, 1.0), (20, 6.0)])
@pytest.mark.parametrize("chosen", [False, True])
def test_s_is_never_below_s_given_all_inducing_points(k, d, length_scale, chosen):
    """The reference and the portable function, with one list and with probing so few that points are missed."""
    points = np.random.default_rng(d).normal(size=(300, d)).astype(np.float32)
    queries = near_and_far(points, 10)[:: 1 if k <= 50 else k // 3]
    jitter = float(np.float32(1e-6))
    gram = kernel(points.astype(float), points.astype(float), length_scale) + jitter * np.eye(300)
    to_queries = kernel(points.astype(float), queries.astype(float), length_scale)  # (300, n)
    given_all = 1 - np.einsum("mn,mn->n", to_queries, np.linalg.solve(gram, to_queries))
    given_all = np.clip(given_all, 0, 1)
    tolerance = solve_tolerance(300, jitter)
    data = np.random.default_rng(d + 1).normal(size=(2000, d)).astype(np.float32)
    for lists in (1, 2):
        t = local_tensors(
            points,
            k,
            lists=lists,
            length_scale=length_scale,
            groups=lambda listed, k: (
                choose(listed, data, k, length_scale, jitter) if chosen else neighbourhoods(listed, k)
            ),
        )
        s = reference.evaluate("local", t, queries)[0][:, 0]
        assert (s >= given_all - tolerance).all()
        portable, _ = operator_models.session(operator_models.model_of("local", t)).run(None, {"z": queries})
        assert (portable[:, 0] >= given_all * (1 - 2.0**-24) - tolerance - 2.0**-24).all()
        if k < 300:  # and the test is not vacuous: something is lost
            assert (s > given_all + 10 * tolerance).mean() > 0.1


# --------------------------------------------------------------------- leave-one-out


def test_leaving_out_equals_deleting_the_row():
    """Rows that are inducing points: the nearest other point, and its neighbourhood without the row."""
    points = np.random.default_rng(11).normal(size=(90, 4)).astype(np.float32)
    near = neighbourhoods(points, 10)
    shares = leave_one_out_share(points, points, 8, 1.5, 1e-4, neighbourhoods=near)
    exact = points.astype(float)
    dropped = 0
    for i, row in enumerate(exact):
        distance = np.linalg.norm(exact - row, axis=1)
        distance[i] = np.inf
        members = [j for j in near[distance.argmin(), :8] if j != i]
        dropped += len(members) < 8
        assert shares[i] == pytest.approx(
            dense_share(row, exact[members], 1.5, 1e-4), abs=solve_tolerance(8, 1e-4)
        )
    assert 0 < dropped < 90  # both cases occur


@pytest.mark.parametrize("spread", [1.0, 6.0])
def test_a_row_leaves_the_mean_that_it_is_part_of(spread):
    """Means are computed again from the other rows. With wide clusters another mean is then the nearest."""
    rng = np.random.default_rng(12)
    places = 20 * rng.normal(size=(14, 2))
    drawn = np.concatenate([np.arange(14), rng.integers(0, 13, 50)])  # the last cluster is mostly one row
    rows = (places[drawn] + spread * rng.normal(size=(64, 2))).astype(np.float32)
    means = rows[:14].astype(float)
    for _ in range(50):  # Lloyd's iteration, to rest: each row is nearest to the mean that it is part of
        owner = cdist(rows.astype(float), means).argmin(axis=1)
        means = np.stack(
            [
                rows[owner == c].mean(axis=0, dtype=float) if (owner == c).any() else means[c]
                for c in range(14)
            ]
        )
    assert (cdist(rows.astype(float), means.astype(np.float32)).argmin(axis=1) == owner).all()
    sizes = np.bincount(owner, minlength=14)
    means = means[sizes > 0].astype(np.float32)
    owner, sizes = (np.cumsum(sizes > 0) - 1)[owner], sizes[sizes > 0]
    near = neighbourhoods(means, 5)

    shares = leave_one_out_share(rows, means, 5, 15.0, 1e-4, sizes, near)
    moved_away = 0
    for i, row in enumerate(rows.astype(float)):
        others = np.delete(np.arange(64), i)
        left = means.astype(float)
        members = rows[others[owner[others] == owner[i]]].astype(float)
        left[owner[i]] = members.mean(axis=0) if len(members) else np.inf
        nearest = np.linalg.norm(left - row, axis=1).argmin()
        moved_away += nearest != owner[i]
        group = left[near[nearest]]
        expected = dense_share(row, group[np.isfinite(group[:, 0])], 15.0, 1e-4)
        # The means are rounded to float32, which moves the kernel by at most its slope times the rounding.
        rounding = np.abs(means).max() * np.finfo(np.float32).eps / 15.0
        assert abs(shares[i] - expected) <= 2 * 25 * rounding / 1e-4
    assert moved_away >= (sizes == 1).sum() and (spread == 1.0 or moved_away > (sizes == 1).sum())


def test_left_out_rows_without_anything_near_and_bad_rows():
    row = np.ones((1, 3), np.float32)
    one = neighbourhoods(row, 1)
    assert leave_one_out_share(row, row, 1, 1.0, 1e-6, neighbourhoods=one) == [1.0]
    points = np.random.default_rng(13).normal(size=(60, 3)).astype(np.float32)
    rows = np.concatenate([points[:5] + 1, points[:1] * np.nan])
    shares = leave_one_out_share(rows, points, 4, 1.0, 1e-6, np.ones(60, int), neighbourhoods(points, 4))
    assert np.isnan(shares[-1]) and np.isfinite(shares[:-1]).all()
    t = local_tensors(points, 4, length_scale=1.0)
    new = reference.evaluate("local", t, rows[:5])[0][:, 0]  # no point is near: nothing to leave out
    np.testing.assert_allclose(shares[:5], new, atol=solve_tolerance(4, 1e-6), rtol=0)


# -------------------------------------------------------------------- the whole path


@pytest.fixture(scope="module")
def digits():
    calibration = MODELS / "digits_cnn_calibration.npz"
    return gapa_onnx.convert(MODELS / "digits_cnn.onnx", calibration, m=300, k=20, solver="cached")


def test_conversion(digits):
    failed = [check for check in digits.checks if not check.passed]
    assert not failed
    record = read(digits.model)
    (site,) = record.sites
    assert record.settings["solver"] == "cached" and site.index == "prepared"
    assert site.index_settings == {"lists": 1, "nprobe": 1} and site.recall == 1.0
    assert site.share_error > 0


CONVERT = """
import sys, gapa_onnx
gapa_onnx.convert(*sys.argv[1:4], m=600, k=10, solver="cached", index="ivf")
"""


def test_same_bytes_whatever_the_threads(tmp_path):
    written = set()
    for threads in ("1", "2"):
        arguments = [MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", tmp_path / threads]
        environment = {**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads}
        subprocess.run([sys.executable, "-c", CONVERT, *map(str, arguments)], check=True, env=environment)
        written.add((tmp_path / threads).read_bytes())
    assert len(written) == 1


def test_scale_comes_from_left_out_rows_of_the_same_operator(digits):
    (fit,) = digits.calibration.fits
    rows = np.random.default_rng(14).normal(size=(50, fit.index.points.shape[1])).astype(np.float32)
    expected = leave_one_out_share(
        rows, fit.index.points, fit.k, fit.length_scale, fit.jitter, fit.sizes, fit.index.groups
    )
    np.testing.assert_array_equal(fit.leave_one_out(rows), expected)
    np.testing.assert_array_equal(fit.index.groups.whole, fit.index.tensors["neighbourhoods"])
    assert fit.scale == pytest.approx(0.05 / fit.share_quantiles["0.5"], rel=0.02)


def test_flagged_share_of_new_rows_is_what_was_asked_for(digits):
    """Held-out images are like the calibration images: about one in twenty is flagged."""
    session = gapa_onnx.session(digits.model.SerializeToString())
    x = np.load(MODELS / "digits_cnn_heldout.npz")["image"]
    (flags,) = session.run(["logits_ood"], {"image": x})
    bound = 4 * np.sqrt(0.05 * 0.95 / len(x)) + 0.02  # of the sample, and of the quantile itself
    assert abs(flags.mean() - 0.05) < bound


@pytest.mark.parametrize("opset", [7, 9, 10, 11, 13, 18])
def test_opsets(opset):
    rng = np.random.default_rng(15)
    weights = {"w1": rng.standard_normal((3, 8)), "w2": rng.standard_normal((8, 4))}
    text = "net (float[n, 3] x) => (float[n, 4] y) { z = MatMul(x, w1)  h = Relu(z)  y = MatMul(h, w2) }"
    model = parse(text, opset, **weights)
    rows = rng.standard_normal((200, 3)).astype(np.float32)
    conversion = gapa_onnx.convert(model, {"x": rows}, m=40, k=5, solver="cached", index="ivf")
    assert all(check.passed for check in conversion.checks)
    assert conversion.calibration.fits[0].index.settings["lists"] > 1


def test_ties_for_the_nearest_point_do_not_fail_a_check():
    """Features on a grid: a query halfway between two points has two neighbourhoods to choose from."""
    from gapa_onnx.measure.agreement import _share_of

    points = np.array([[0.0], [1.0], [3.0], [4.5]], np.float32)
    queries = np.array([[0.5], [3.2]], np.float32)
    ports = {"points": points, "length_scale": np.float32(1), "jitter": np.float32(1e-6)}
    ports |= {"centroids": points.mean(axis=0)[None], "nprobe": np.array([1])}
    one, other = np.array([[0, 1], [2, 3]]), np.array([[1, 2], [3, 2]])
    exact = reference.unexplained_share(queries, points, one, 1.0, 1e-6)
    swapped = reference.unexplained_share(queries, points, other, 1.0, 1e-6)
    found = _share_of(queries, ports, other, one, exact)
    assert found[0] == pytest.approx(swapped[0], rel=1e-9) and abs(found[0] - exact[0]) > 0.01  # as near
    assert found[1] == exact[1] != swapped[1]  # not as near: what was found is wrong, and shows


def test_ties_for_the_list_to_search_do_not_fail_a_check():
    """The nearest point of a list that is as near as the other's need not be as near as that one's."""
    from gapa_onnx.measure.agreement import _share_of

    points = np.array([[-3.0], [-1.0], [2.0], [2.0], [9.0]], np.float32)
    ports = {"points": points, "length_scale": np.float32(1), "jitter": np.float32(1e-6)}
    ports |= {
        "centroids": np.array([[-2.0], [2.0], [9.0]], np.float32),
        "list_offsets": np.array([0, 2, 4, 5]),
        "nprobe": np.array([1]),
    }
    queries = np.array([[0.0], [1.0]], np.float32)  # halfway between two centroids, and not
    one, other = np.array([[1, 0], [2, 3]]), np.array([[2, 3], [1, 0]])
    exact = reference.unexplained_share(queries, points, one, 1.0, 1e-6)
    found = _share_of(queries, ports, other, one, exact)
    swapped = reference.unexplained_share(queries, points, other, 1.0, 1e-6)
    assert found[0] == pytest.approx(swapped[0], rel=1e-12) and abs(found[0] - exact[0]) > 0.01
    assert found[1] == exact[1] != swapped[1]

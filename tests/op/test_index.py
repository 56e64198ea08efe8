"""The index tensors: their layout, what they promise, and that a seed means the same bytes."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys

import faiss
import numpy as np
import pytest
from scipy.spatial.distance import cdist
from support.paths import ROOT

from gapa_onnx.errors import UserError
from gapa_onnx.op import index as index_module
from gapa_onnx.op import reference
from gapa_onnx.op.approximation import find, share_error, to_faiss
from gapa_onnx.op.contract import PREPARED, SCHEMAS
from gapa_onnx.op.index import build_index, subvectors

K = 10
KINDS = [
    kind for kind in SCHEMAS if kind != PREPARED
]  # that is made of a local one: tests/op/test_prepared.py


def data(m=3000, d=16, seed=0):
    """Clustered points and held-out rows near them."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.normal(size=(8, d))
    rows = centres[rng.integers(0, 8, m + 400)] + rng.normal(size=(m + 400, d))
    return tuple(np.split(rows.astype(np.float32), [m]))


POINTS, HELD_OUT = data()


@pytest.fixture(scope="module")
def built():
    return {kind: build_index(kind, POINTS, k=K, held_out=HELD_OUT) for kind in KINDS}


def exact(points, k=K):
    return np.argsort(cdist(HELD_OUT.astype(float), points.astype(float)), axis=1, kind="stable")[:, :k]


def recall(found, wanted):
    return np.mean([len(set(f) & set(w)) / len(w) for f, w in zip(found, wanted)])


@pytest.mark.parametrize("kind", KINDS)
def test_tensors_follow_the_contract(built, kind):
    index = built[kind]
    ports = SCHEMAS[kind].constants[3:]
    assert list(index.tensors) == [port.name for port in ports]
    for port in ports:
        tensor = index.tensors[port.name]
        assert tensor.dtype == port.dtype and tensor.ndim == len(port.shape)
    assert index.points.shape == POINTS.shape and index.points.dtype == np.float32
    if kind in ("ivf", "ivfpq", "local"):
        offsets = index.tensors["list_offsets"]
        assert offsets[0] == 0 and offsets[-1] == len(POINTS) and (np.diff(offsets) > 0).all()
        assert len(offsets) == len(index.tensors["centroids"]) + 1
    if kind != "ivfpq":  # the same points, maybe in another order
        np.testing.assert_array_equal(np.sort(index.points.view("V64"), 0), np.sort(POINTS.view("V64"), 0))


def test_a_point_is_in_the_list_of_its_nearest_centroid(built):
    t = built["ivf"].tensors
    distance = cdist(t["points"].astype(float), t["centroids"].astype(float))
    own = np.take_along_axis(distance, reference.list_of_row(t["list_offsets"])[:, None], axis=1)[:, 0]
    assert (own <= distance.min(axis=1) + 1e-4).all()


def test_graph_layout(built):
    t = built["hnsw"].tensors
    assert len(t["links"]) == (64 + 32 * (t["levels"] - 1)).sum()
    assert t["levels"].min() >= 1 and t["levels"][t["entry_point"][0]] == t["levels"].max()
    assert t["links"].min() == -1 and t["links"].max() < len(POINTS)
    begin = 0
    for row, levels in enumerate(t["levels"]):
        for level in range(levels):
            slots = t["links"][begin : begin + (64 if level == 0 else 32)]
            used = slots[slots >= 0]
            assert row not in used and len(set(used)) == len(used)
            assert (t["levels"][used] > level).all()  # a link on a level leads to a point of that level
            begin += len(slots)


@pytest.mark.parametrize("kind", KINDS)
def test_faiss_rebuilt_from_the_tensors_finds_what_was_promised(built, kind):
    index = built[kind]
    count = 1 if kind == "local" else K
    _, found = to_faiss(index).search(HELD_OUT, count)
    wanted = exact(index.points, count)
    assert index.recall >= 0.99
    assert recall(found, wanted) == pytest.approx(index.recall, abs=1e-3)  # ties may fall either way


@pytest.mark.parametrize("kind", ["flat", "ivf", "ivfpq", "local"])
def test_reference_and_faiss_find_the_same_rows(built, kind):
    index = built[kind]
    constants = {"k": np.array([K]), "length_scale": np.float32(3), "jitter": np.float32(1e-6)}
    _, mine = reference.evaluate(kind, constants | index.tensors, HELD_OUT)
    assert (mine == find(index, HELD_OUT, K)).mean() > 0.999


def test_rebuilt_graph_searches_as_the_original():
    points, held_out = data(m=800, seed=1)
    index = build_index("hnsw", points, k=K, held_out=held_out, seed=5)
    original = faiss.IndexHNSWFlat(points.shape[1], 32)
    original.hnsw.rng = faiss.RandomGenerator(5)
    threads = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    original.add(points)
    faiss.omp_set_num_threads(threads)
    original.hnsw.efSearch = int(index.tensors["ef"][0])
    for mine, theirs in zip(to_faiss(index).search(held_out, K), original.search(held_out, K)):
        np.testing.assert_array_equal(mine, theirs)


def test_nprobe_is_the_smallest_that_reaches_the_recall(built):
    index = built["ivf"]
    lists, wanted = to_faiss(index), exact(index.points)
    assert 1 < index.settings["nprobe"] < index.settings["lists"]
    lists.nprobe = index.settings["nprobe"] - 1
    assert recall(lists.search(HELD_OUT, K)[1], wanted) < 0.99
    all_lists = build_index("ivf", POINTS, k=K, held_out=HELD_OUT, recall_target=1.1)  # cannot be reached
    assert all_lists.settings["nprobe"] == all_lists.settings["lists"] and all_lists.recall == 1.0


def test_effort_search():
    calls = []

    def recall_at(ef):
        calls.append(ef)
        return ef / 1000

    ef = index_module._smallest_effort(recall_at, 16, 5000, 0.4)
    assert 400 <= ef <= 440 and len(calls) < 15
    assert index_module._smallest_effort(lambda ef: 0.0, 16, 700, 0.4) == 700
    assert index_module._smallest_effort(lambda ef: 1.0, 16, 700, 0.4) == 16
    assert index_module._smallest_effort(lambda ef: 1.0, 16, 9, 0.4) == 9


def test_decoded_points_are_near_the_originals(built):
    index = built["ivfpq"]
    order = index_module._lists(POINTS, round(4 * len(POINTS) ** 0.5), 0).points  # same seed, same order
    moved = np.linalg.norm(index.points.astype(float) - order, axis=1).mean()
    spread = np.sqrt(POINTS.astype(float).var(axis=0).sum())
    assert index.settings["decoding_error"] == pytest.approx(moved / spread, rel=1e-6)
    assert 0 < index.settings["decoding_error"] < 0.3


@pytest.mark.parametrize(
    "d, m", [(16, 4), (200, 50), (10, 2), (6, 1), (9, 3), (22, 11), (13, 13), (3, 1), (1, 1)]
)
def test_subvectors(d, m):
    assert subvectors(d) == m and d % m == 0


@pytest.mark.parametrize("kind", KINDS)
def test_share_error_against_a_direct_computation(built, kind):
    index = built[kind]
    error = share_error(index, HELD_OUT, 3.0, 1e-6, K)
    found = find(index, HELD_OUT, K)
    approximate = reference.unexplained_share(HELD_OUT, index.points, found, 3.0, 1e-6)
    best = reference.unexplained_share(HELD_OUT, index.points, exact(index.points), 3.0, 1e-6)
    assert error.max == pytest.approx(np.abs(approximate - best).max(), abs=1e-6)
    assert error.mean == pytest.approx(np.abs(approximate - best).mean(), abs=1e-6)
    assert (error.max > 0) == (kind != "flat")


def test_auto():
    rng = np.random.default_rng(0)
    points = rng.normal(size=(index_module.FLAT_LIMIT + 1, 4)).astype(np.float32)
    assert build_index("auto", points[:-1], k=3, held_out=points[:20]).kind == "flat"
    assert build_index("auto", points, k=3, held_out=points[:20]).kind == "ivf"
    # Where the nearest may be in any list, lists save nothing.
    points = rng.normal(size=(index_module.FLAT_LIMIT + 1, 60)).astype(np.float32)
    held_out = rng.normal(size=(100, 60)).astype(np.float32)
    assert build_index("auto", points, k=3, held_out=held_out).kind == "flat"


def test_the_counted_cost_of_lists():
    """The chosen number of lists is the cheapest of the numbers tried, by cost = 7 L + 1.12 points compared."""
    rng = np.random.default_rng(3)
    points, held_out = (rng.uniform(size=(n, 3)).astype(np.float32) for n in (4000, 200))
    index = build_index("ivf", points, k=5, held_out=held_out)

    def cost(tensors) -> float:
        offsets, nprobe = tensors["list_offsets"], int(tensors["nprobe"][0])
        probed = np.argsort(((held_out[:, None] - tensors["centroids"]) ** 2).sum(axis=2))[:, :nprobe]
        return 7 * (len(offsets) - 1) + 1.12 * np.diff(offsets)[probed].sum(axis=1).mean()

    for factor in (1, 2, 4, 8):
        lists = index_module._lists(points, round(factor * 4000**0.5), 0)
        wanted = index_module.search_exactly(held_out, lists.points, 5)
        nprobe, found, _ = index_module._smallest_nprobe(lists, held_out, wanted, 0.99)
        assert found >= 0.99 and cost(index.tensors) <= cost(lists.tensors(nprobe)) * 1.0001


@pytest.mark.parametrize("kind", KINDS)
def test_duplicates_and_tiny_sets(kind):
    points = np.repeat(np.eye(3, 4, dtype=np.float32), 100, axis=0)
    index = build_index(kind, points, k=5, held_out=points[::50] + 0.1)
    assert np.isfinite(index.points).all() and 0 <= index.recall <= 1
    assert to_faiss(index).search(points[:4], 5)[1].shape == (4, 5)
    if kind != "ivfpq":
        assert len(build_index(kind, points[:1], k=1, held_out=points[:2]).points) == 1


def test_user_mistakes():
    with pytest.raises(UserError, match="at least 256") as caught:
        build_index("ivfpq", POINTS[:255], k=3, held_out=HELD_OUT)
    assert "flat" in caught.value.hint
    with pytest.raises(UserError, match="no index kind 'tree'"):
        build_index("tree", POINTS, k=3, held_out=HELD_OUT)
    for k in (0, 3001):
        with pytest.raises(UserError, match="neighbours cannot be taken"):
            build_index("flat", POINTS, k=k, held_out=HELD_OUT)
    with pytest.raises(UserError, match="no held-out rows"):
        build_index("hnsw", POINTS, k=3, held_out=HELD_OUT[:0])
    with pytest.raises(UserError, match="NaN or infinite"):
        build_index("flat", POINTS * np.float32(np.nan), k=3, held_out=HELD_OUT)


def digest(seed=3):
    """One hash over all tensors of all kinds; also run in other processes, see below."""
    total = hashlib.sha256()
    for kind in KINDS:
        index = build_index(kind, POINTS, k=K, held_out=HELD_OUT, seed=seed)
        for name, array in index.tensors.items():
            total.update(name.encode() + array.tobytes())
    return total.hexdigest()


def test_a_seed_means_the_same_bytes_whatever_the_threads():
    code = f"import runpy, sys; print(runpy.run_path({__file__!r})['digest']())"
    digests = {digest()}
    for threads in ("1", "2"):
        path = os.pathsep.join([str(ROOT), *sys.path])
        environment = os.environ | {"OMP_NUM_THREADS": threads, "PYTHONPATH": path}
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=120, check=True
        )
        assert done.stderr == ""  # FAISS must not print its training warnings
        digests.add(done.stdout.strip())
    assert len(digests) == 1
    assert digest(seed=4) not in digests


def test_builds_on_one_thread_and_restores_the_count(monkeypatch):
    """Older releases of FAISS link an HNSW graph differently on every run with more than one thread."""
    seen = []
    build = index_module._build_hnsw

    def spy(*arguments):
        seen.append(faiss.omp_get_max_threads())
        return build(*arguments)

    monkeypatch.setattr(index_module, "_build_hnsw", spy)
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(2)
    try:
        build_index("hnsw", POINTS[:300], k=3, held_out=HELD_OUT)
        assert seen == [1] and faiss.omp_get_max_threads() == 2
        monkeypatch.setattr(index_module, "_build_hnsw", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build_index("hnsw", POINTS[:300], k=3, held_out=HELD_OUT)
        assert faiss.omp_get_max_threads() == 2
    finally:
        faiss.omp_set_num_threads(before)

"""Factors of neighbourhoods, and the body that reads shares from them in float32 without a loop."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.inliner
import pytest
from onnx.reference import ReferenceEvaluator
from support.operator_models import model_of, prepared, session, tensors
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.op import factors, function, reference
from gapa_onnx.op.contract import PREPARED
from gapa_onnx.op.factors import MOST_FACTORS, with_factors
from gapa_onnx.op.index import build_index
from gapa_onnx.op.neighbourhoods import choose, neighbourhoods

LOOPS = {"Loop", "If", "Scan"}


def unfolded(folded: np.ndarray) -> np.ndarray:
    """Element by element, as the docstring of `factors` says."""
    count, rows, half = folded.shape
    inverse = np.zeros((count, rows - 1, rows - 1))
    for r in range(half):
        for c in range(r + 1):
            inverse[:, r, c] = folded[:, r + 1, c]
            inverse[:, half + r, half + c] = folded[:, c, r]
        inverse[:, half + r, :half] = folded[:, half + 1 + r]
    return inverse


@pytest.mark.parametrize("k", [1, 2, 7, 8])
def test_factors_are_the_inverse_of_each_kernel_matrix(k: int) -> None:
    points = np.random.default_rng(0).normal(size=(40, 5)).astype(np.float32)
    table = factors.even(neighbourhoods(points, k))
    found = factors.factors(points, table, k, 2.0, 1e-3)
    assert found is not None and found.dtype == np.float32
    assert found.nbytes == factors.bytes_of(40, k)
    for point, inverse in enumerate(unfolded(found)):
        near = points[table[point, :k]].astype(np.float64)
        gram = np.exp(-((near[:, None] - near[None]) ** 2).sum(-1) / (2 * 2.0**2)) + 1e-3 * np.eye(k)
        # Rounding of the stored numbers, 2⁻²⁴ each, through a product with the matrix.
        scale = np.abs(inverse[:k, :k]) @ np.abs(np.linalg.cholesky(gram))
        error = inverse[:k, :k] @ np.linalg.cholesky(gram) - np.eye(k)
        assert (np.abs(error) <= 2.0**-23 * scale + 1e-12).all()
        assert not inverse[k:].any()


def drawn(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows that are hard on single precision, and queries: near them, between them, far away."""
    rng = np.random.default_rng(3)
    width = {"line": 1, "plane": 2, "offset": 8, "massive axis": 40, "far cluster": 5, "tanh of three": 3}[
        name
    ]
    rows = rng.normal(size=(3000, width))
    if name == "offset":
        rows += 1000
    if name == "massive axis":
        rows[:, 0] *= 100
    if name == "far cluster":
        rows[:60] += 1000
    if name == "tanh of three":
        rows = np.tanh(rows @ rng.normal(size=(3, 50)))
    near = rows[:300] + 0.05 * rows.std(axis=0) * rng.normal(size=(300, rows.shape[1]))
    far = rows.mean(axis=0) + 4 * (rows[300:600] - rows.mean(axis=0))
    return rows.astype(np.float32), np.concatenate([rows[:50], near, far]).astype(np.float32)


@pytest.mark.parametrize("name", ["line", "plane", "offset", "massive axis", "far cluster", "tanh of three"])
def test_s_in_float32_is_that_in_float64(name: str) -> None:
    """|Δs| ≤ 10⁻³ s + 10⁻⁵ on the same neighbourhood, also where kernel matrices are singular but for the jitter."""
    rows, queries = drawn(name)
    gaps = np.linalg.norm(rows[::2].astype(np.float64) - rows[1::2], axis=1)
    length_scale = np.float32(np.median(gaps))
    points = rows[:400]
    near = choose(points, rows, 50, float(length_scale), 1e-6).whole
    given = tensors(
        0, m=400, d=rows.shape[1] * 3
    )  # a width that its codes can have; only these are replaced:
    given |= {"k": np.array([50]), "length_scale": length_scale, "points": points, "neighbourhoods": near}
    given |= {
        "centroids": points.mean(axis=0, keepdims=True),
        "list_offsets": np.array([0, 400]),
        "nprobe": np.array([1]),
    }
    for many in (False, True):
        s, ids = session(model_of(PREPARED, given, many=many)).run(None, {"z": queries})
        expected = reference.unexplained_share(
            queries, points, ids, float(length_scale), float(given["jitter"])
        )
        assert (np.abs(s[:, 0] - expected) <= 1e-3 * expected + 1e-5).all()
        assert expected.max() > 0.5  # and are not all next to 0


@pytest.mark.parametrize("k", [1, 2, 5, 8, 9])
def test_one_factor_serves_every_smaller_k(k: int) -> None:
    whole = prepared(tensors(4, k=9))
    queries = np.random.default_rng(5).normal(size=(200, 6)).astype(np.float32)
    fewer = whole | {"k": np.array([k])}
    s, ids = session(model_of(PREPARED, fewer)).run(None, {"z": queries})
    expected = reference.unexplained_share(queries, whole["points"], ids, 1.5, 1e-6)
    assert ids.shape == (200, k)
    assert (np.abs(s[:, 0] - expected) <= 1e-3 * expected + 1e-5).all()


def test_a_wrong_factor_would_be_seen() -> None:
    given = prepared(tensors(4))
    given["factors"] = given["factors"] * np.float32(1.01)
    queries = np.random.default_rng(5).normal(size=(200, 6)).astype(np.float32)
    s, ids = session(model_of(PREPARED, given)).run(None, {"z": queries})
    expected = reference.unexplained_share(queries, given["points"], ids, 1.5, 1e-6)
    assert (np.abs(s[:, 0] - expected) > 1e-3 * expected + 1e-5).mean() > 0.5


def test_nothing_that_other_engines_lack() -> None:
    function_ = function.body(PREPARED, 17, 8, many=False)
    assert {node.op_type for node in function_.node}.isdisjoint(LOOPS | {"NonZero", "CumSum", "Einsum"})
    casts = [a.i for n in function_.node if n.op_type == "Cast" for a in n.attribute]
    assert onnx.TensorProto.DOUBLE not in casts
    constants = [a.t.data_type for n in function_.node if n.op_type == "Constant" for a in n.attribute]
    assert onnx.TensorProto.DOUBLE not in constants
    assert any(node.op_type == "Loop" for node in function.body(PREPARED, 17, 8, many=True).node)


def test_memory_is_bounded_where_queries_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of every size say what all rows at once do."""
    given, rng = prepared(tensors(6)), np.random.default_rng(7)
    queries = rng.normal(size=(45, 6)).astype(np.float32)
    queries[[7, 44], 2] = np.nan, np.inf
    whole = session(model_of(PREPARED, given, many=False)).run(None, {"z": queries})
    per_row = (300 + 10 * (6 + 10)) * 12  # of `_rows_per_chunk`, for M = 300, N = 10, d = 6
    for rows in (1, 7, 45):
        monkeypatch.setattr(function, "CHUNK_BYTES", (rows - 1) * per_row)
        run = session(model_of(PREPARED, given, many=True)).run
        for n in (45, 2, 0):
            s, ids = run(None, {"z": queries[:n]})
            np.testing.assert_array_equal(ids, whole[1][:n])
            np.testing.assert_allclose(s, whole[0][:n], rtol=1e-3, atol=1e-5)


def test_what_cannot_be_prepared_stays_local() -> None:
    points = np.random.default_rng(8).normal(size=(60, 4)).astype(np.float32)
    held_out = points[:10]

    def built(points: np.ndarray, k: int) -> object:
        return build_index("local", points, k=k, held_out=held_out, search="flat")

    assert with_factors(built(points, 8), 8, 1.0, 1e-6).kind == PREPARED
    twice = np.concatenate([points[:30], points[:30]])  # singular without a jitter
    assert with_factors(built(twice, 8), 8, 1.0, 0.0).kind == "local"
    assert factors.bytes_of(3000, 50) <= MOST_FACTORS < factors.bytes_of(3200, 50)


def test_an_engine_without_functions_runs_a_whole_file() -> None:
    """ONNX's own evaluator, in numpy, behind the standard's inliner: the answers of onnxruntime without the library."""
    data = MODELS / "digits_mlp_calibration.npz"
    converted = gapa_onnx.convert(MODELS / "digits_mlp.onnx", data, m=200, k=20).model
    rows = np.load(MODELS / "digits_mlp_heldout.npz")["pixels"][:16].astype(np.float32)
    names = [output.name for output in converted.graph.output]
    portable = session(converted).run(names, {"pixels": rows})
    inlined = onnx.inliner.inline_local_functions(converted)
    other = ReferenceEvaluator(inlined).run(names, {"pixels": rows})
    for name, one, two in zip(names, portable, other):
        if name.endswith("ood"):
            np.testing.assert_array_equal(one, two)
        elif not name.endswith("pvalue"):  # which moves in steps
            np.testing.assert_allclose(two, one, rtol=1e-3, atol=1e-3 * np.abs(one).max(), err_msg=name)

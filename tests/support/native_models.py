"""Models of one node for the native kernel.

The index tensors are built here, by numpy and faiss-cpu, so that nothing of the package but the contract is trusted.
"""

from __future__ import annotations

import faiss
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from gapa_onnx.op.contract import DOMAIN, PREPARED, SCHEMAS, VERSION
from gapa_onnx.sessions.runtime import library_path

M, D, K = 400, 6, 12
LISTS, SUBVECTORS, DEGREE = 10, 3, 8
LIBRARY = library_path()


def squared_distances(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Directly, in float64: (n, d), (m, d) -> (n, m)."""
    return ((a[:, None].astype(np.float64) - b[None].astype(np.float64)) ** 2).sum(-1)


def tensors(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """The constant inputs of a valid operator, by name."""
    rng = np.random.default_rng(seed)
    points = rng.normal(size=(M, D)).astype(np.float32)  # (M, d)
    out = {
        "k": np.array([K], np.int64),
        "length_scale": np.array(2.0, np.float32),
        "jitter": np.array(1e-6, np.float32),
    }
    if kind == "flat":
        return out | {"points": points}
    if kind == "hnsw":
        graph = faiss.IndexHNSWFlat(D, DEGREE)
        graph.add(points)
        return out | {
            "points": points,
            "levels": faiss.vector_to_array(graph.hnsw.levels).astype(np.int32),
            "links": faiss.vector_to_array(graph.hnsw.neighbors).astype(np.int32),
            "degree": np.array([DEGREE], np.int64),
            "entry_point": np.array([graph.hnsw.entry_point], np.int64),
            "ef": np.array([48], np.int64),
        }
    centroids = points[rng.choice(M, LISTS, replace=False)] + np.float32(0.01)  # (L, d)
    lists = np.argmin(squared_distances(points, centroids), axis=1)  # (M,)
    order = np.argsort(lists, kind="stable")
    points, lists = points[order], lists[order]
    inverted = {
        "centroids": centroids,
        "list_offsets": np.searchsorted(lists, np.arange(LISTS + 1)).astype(np.int64),
        "nprobe": np.array([3], np.int64),
    }
    if kind == "ivf":
        return out | {"points": points} | inverted
    if kind in ("local", PREPARED):
        width = K + 3 if kind == "local" else K + 4
        near = np.argsort(squared_distances(points, points), axis=1, kind="stable")[:, :width]  # (M, N)
        local = out | {"points": points, "neighbourhoods": near.astype(np.int32)} | inverted
        if kind == "local":
            return local
        # What the portable body reads besides is nothing to the kernel.
        lists_of_rows = np.repeat(np.arange(LISTS, dtype=np.int32), np.diff(inverted["list_offsets"]))
        return local | {"list_of_row": lists_of_rows, "factors": np.zeros((M, K + 5, K // 2 + 2), np.float32)}
    residuals = (points - centroids[lists]).reshape(M, SUBVECTORS, -1)  # (M, m, d/m)
    books = residuals[rng.choice(M, 256, replace=False)].transpose(1, 0, 2)  # (m, 256, d/m)
    codes = np.stack(
        [np.argmin(squared_distances(residuals[:, j], books[j]), axis=1) for j in range(SUBVECTORS)], axis=1
    )  # (M, m)
    return out | {"codes": codes.astype(np.uint8), "codebooks": np.ascontiguousarray(books)} | inverted


def inducing_points(given: dict[str, np.ndarray]) -> np.ndarray:
    """The rows that the reported neighbours refer to, (M, d)."""
    if "points" in given:
        return given["points"]
    lists = np.repeat(np.arange(LISTS), np.diff(given["list_offsets"]))  # (M,)
    codes, books = given["codes"], given["codebooks"]
    decoded = np.concatenate([books[j][codes[:, j]] for j in range(len(books))], axis=1)  # (M, d)
    return given["centroids"][lists] + decoded


def model(
    kind: str,
    given: dict[str, np.ndarray],
    query_shape: tuple = ("n", D),
    neighbours: bool = True,
    as_graph_input: str | None = None,
) -> bytes:
    """A model that is the operator and nothing else."""
    schema = SCHEMAS[kind]
    outputs = ["s", "neighbours"] if neighbours else ["s"]
    node = helper.make_node(schema.name, [port.name for port in schema.inputs], outputs, domain=DOMAIN)
    inputs = [helper.make_tensor_value_info("query", TensorProto.FLOAT, query_shape)]
    if as_graph_input:
        array = given[as_graph_input]
        element = helper.np_dtype_to_tensor_dtype(array.dtype)
        inputs.append(helper.make_tensor_value_info(as_graph_input, element, array.shape))
    declared = [helper.make_tensor_value_info("s", TensorProto.FLOAT, None)]
    if neighbours:
        declared.append(helper.make_tensor_value_info("neighbours", TensorProto.INT64, None))
    graph = helper.make_graph(
        [node], "one_node", inputs, declared, [numpy_helper.from_array(v, k) for k, v in given.items()]
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()


def session(
    data: bytes,
    threads: int = 1,
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.register_custom_ops_library(str(LIBRARY))
    return ort.InferenceSession(data, options, providers=["CPUExecutionProvider"])

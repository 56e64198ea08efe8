"""Models of one operator node with its standard-ops body, and sessions of a stock onnxruntime to run them."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from gapa_onnx.op import function, reference
from gapa_onnx.op import prepared as prepared_function
from gapa_onnx.op.contract import DOMAIN, PREPARED, SCHEMAS, VERSION
from gapa_onnx.op.factors import even, factors

LEVELS = [
    ort.GraphOptimizationLevel.ORT_DISABLE_ALL,
    ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
]


def session(model, level=ort.GraphOptimizationLevel.ORT_ENABLE_ALL):
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def newest_opset() -> int:
    """The newest opset that both the onnx package and this onnxruntime know."""
    for opset in range(onnx.defs.onnx_opset_version(), 6, -1):
        x = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in "xy"]
        graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "g", x[:1], x[1:])
        try:
            session(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8))
            return opset
        except Exception:  # noqa: BLE001 - onnxruntime's own type, and any refusal means "try an older one"
            continue
    raise AssertionError("no opset runs")


NEWEST = newest_opset()


def tensors(seed=0, m=300, d=6, k=8, lists=12, nprobe=3, length_scale=1.5, jitter=1e-6, centre=0.0):
    """Constants for every kind at once: arbitrary lists, some empty, and a graph that is never walked."""
    rng = np.random.default_rng(seed)
    offsets = np.sort(np.concatenate([[0, 0, m], rng.integers(0, m + 1, lists - 2)])).astype(np.int64)
    given = {
        "k": np.array([k]),
        "length_scale": np.float32(length_scale),
        "jitter": np.float32(jitter),
        "points": (centre + rng.normal(size=(m, d))).astype(np.float32),
        "codes": rng.integers(0, 256, (m, 3)).astype(np.uint8),
        "codebooks": (0.5 * rng.normal(size=(3, 256, d // 3))).astype(np.float32),
        "centroids": (centre + rng.normal(size=(lists, d))).astype(np.float32),
        "list_offsets": offsets,
        "nprobe": np.array([nprobe]),
        "levels": np.ones(m, np.int32),
        "links": np.full(64 * m, -1, np.int32),
        "degree": np.array([32]),
        "entry_point": np.array([0]),
        "ef": np.array([16]),
    }
    # One column more than k: the operator reads the first k.
    near = reference.nearest(given["points"], given["points"], min(k + 1, m)).astype(np.int32)
    return given | {"neighbourhoods": near}


def prepared(t):
    """The same constants, with what the prepared operator has besides."""
    table, k = even(t["neighbourhoods"]), int(t["k"][0])
    folded = factors(t["points"], table, k, float(t["length_scale"]), float(t["jitter"]))
    of_row = reference.list_of_row(t["list_offsets"]).astype(np.int32)
    return t | {"neighbourhoods": table, "list_of_row": of_row, "factors": folded}


def oldest_opset(kind):
    """From which on there is a function for it."""
    return prepared_function.OLDEST_OPSET if kind == PREPARED else function.OLDEST_OPSET


def model_of(kind, t, opset=17, rank=2, sites=1, many=True):
    """A model with `sites` nodes of the operator, each with its own constants."""
    schema = SCHEMAS[kind]
    t = prepared(t) if kind == PREPARED and "factors" not in t else t
    leading = [f"n{i}" for i in range(rank - 1)]
    nodes, initializers, outputs = [], [], []
    for site in range(sites):
        names = [f"site{site}/{port.name}" for port in schema.constants]
        for port, name in zip(schema.constants, names):
            initializers.append(numpy_helper.from_array(np.asarray(t[port.name], port.dtype), name))
        out = [f"s{site}", f"neighbours{site}"]
        nodes.append(helper.make_node(schema.name, ["z", *names], out, name=f"site{site}", domain=DOMAIN))
        outputs.append(helper.make_tensor_value_info(out[0], TensorProto.FLOAT, [*leading, 1]))
        outputs.append(helper.make_tensor_value_info(out[1], TensorProto.INT64, [*leading, int(t["k"][0])]))
    query = helper.make_tensor_value_info("z", TensorProto.FLOAT, [*leading, t["points"].shape[1]])
    return helper.make_model(
        helper.make_graph(nodes, "g", [query], outputs, initializers),
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)],
        functions=[function.body(kind, opset, int(t["k"][0]), t, many)],
        ir_version=8,
    )

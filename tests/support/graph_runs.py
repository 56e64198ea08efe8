"""Nodes that a function writes, run by onnxruntime on given arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, numpy_helper

from gapa_onnx.sessions.runtime import session_options
from gapa_onnx.variance.graph import Value, VarianceGraph

Write = Callable[[VarianceGraph, Mapping[str, Value]], Sequence[Value]]


def run_graph(
    opset: int,
    feeds: Mapping[str, np.ndarray],
    write: Write,
    numbers: Callable[[], Mapping[str, np.ndarray]] = dict,
    *,
    optimise: bool = True,
) -> list[np.ndarray]:
    """What `write` makes of tensors with these values; `numbers`, asked afterwards, fill its parameters in."""
    graph = VarianceGraph(opset, set(feeds))
    wanted = write(graph, {name: graph.tensor(name, array.dtype) for name, array in feeds.items()})
    outputs = [graph.output(value, f"answer_{at}") for at, value in enumerate(wanted)]
    added = graph.to_proto(outputs)
    filled = numbers()
    for tensor in added.initializer:
        if tensor.name in filled:
            kind = helper.tensor_dtype_to_np_dtype(tensor.data_type)
            array = np.asarray(filled[tensor.name]).astype(kind)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    def port(name: str, dtype: np.dtype, rank: int | None) -> onnx.ValueInfoProto:
        shape = None if rank is None else [None] * rank
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)

    inputs = [port(name, array.dtype, array.ndim) for name, array in feeds.items()]
    answers = [port(value.name, value.dtype, None) for value in outputs]
    model = helper.make_model(
        helper.make_graph(list(added.node), "written", inputs, answers, list(added.initializer)),
        opset_imports=[helper.make_opsetid("", opset)],
        ir_version=8,
    )
    session = ort.InferenceSession(
        model.SerializeToString(),
        session_options(optimise=optimise, threads=1),
        providers=["CPUExecutionProvider"],
    )
    found: list[np.ndarray] = session.run([value.name for value in outputs], dict(feeds))
    return found

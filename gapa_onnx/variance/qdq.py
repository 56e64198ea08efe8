"""Reading a quantised model without changing what onnxruntime makes of it.

A float layer between DequantizeLinear and QuantizeLinear is computed in whole numbers, which rounds
to another step now and then than its floats would. Whether that is done depends on who reads what
lies around the layer, and the variance graph is a reader. So it does not read everything in place:

    dequantised  Nobody but its QuantizeLinear may read what a layer puts out. In place of such a tensor
                 the one that is dequantised from it is read: the same but for rounding.
    copies       On x86 int8 activations are retyped to uint8, each by itself, if nothing but one layer
                 reads them; where somebody does, even if only to make an output of it, the layers around
                 stay layers of floats. The means of such a model are computed a second time, beside it.
                 With uint8 activations, or in whole-number operators (QLinearConv, …), none of it is needed.
"""

from __future__ import annotations

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import can_be_repeated
from gapa_onnx.model.load import SourceModel
from gapa_onnx.model.splice import OPAQUE_IDENTITY
from gapa_onnx.variance.graph import VarianceGraph


def reading_graph(source: SourceModel) -> VarianceGraph:
    """An empty variance graph that reads the source such that it stays what it is."""
    constants = frozenset(tensor.name for tensor in source.proto.graph.initializer)
    if not _would_be_retyped(source.graph) or not all(map(can_be_repeated, source.graph.nodes)):
        return VarianceGraph(source.opset, set(source.names), dequantised(source.graph), constants)
    nodes, copies = _copy(source)
    graph = VarianceGraph(source.opset, set(source.names), copies, constants)
    graph.copy(nodes, outside=set(source.names))
    return graph


def dequantised(graph: gs.Graph) -> dict[str, str]:
    """Floats that exist to be quantised only, and what is dequantised from them."""
    outputs = {tensor.name for tensor in graph.outputs}
    found = {}
    for node in graph.nodes:
        x = node.inputs[0] if node.op == "QuantizeLinear" else None
        if x is None or not x.inputs or len(x.outputs) != 1 or x.name in outputs:
            continue
        for reader in node.outputs[0].outputs:
            same = reader.op == "DequantizeLinear" and reader.inputs[1].name == node.inputs[1].name
            if same and reader.outputs[0].dtype == x.dtype:
                found[x.name] = reader.outputs[0].name
                break
    return found


def _would_be_retyped(graph: gs.Graph) -> bool:
    return any(
        node.op == "QuantizeLinear"
        and node.outputs[0].dtype == np.int8
        and any(reader.op == "DequantizeLinear" for reader in node.outputs[0].outputs)
        for node in graph.nodes
    )


def _copy(source: SourceModel) -> tuple[list[gs.Node], dict[str, str]]:
    """All nodes that depend on the inputs, under other names, and those names."""
    nodes, copies = [], {}
    for x in source.graph.inputs:
        if x.dtype in (np.float32, np.float64, np.float16):
            # A runtime would see that a copy computes the same, and merge the two.
            nodes.append(gs.Node(OPAQUE_IDENTITY, f"{x.name}/copy", {}, [x], [gs.Variable(f"{x.name}/copy")]))
            copies[x.name] = f"{x.name}/copy"
    for node in source.graph.nodes:
        if any(tensor.name in copies for tensor in node.inputs):
            copies |= {tensor.name: f"{tensor.name}/copy" for tensor in node.outputs if tensor.name}
            inputs, outputs = (
                [gs.Variable(copies[t.name]) if t.name in copies else t for t in tensors]
                for tensors in (node.inputs, node.outputs)
            )
            nodes.append(gs.Node(node.op, outputs[0].name, node.attrs, inputs, outputs, node.domain))
    return nodes, copies

"""Operators that the ONNX standard defines by a function of others, spelled out.

An operator without a rule of its own still has one if its function body has: the body's nodes are
copied into the variance graph, where they compute the interior means again, and rules apply to them.
"""

from __future__ import annotations

import onnx
import onnx.inliner
import onnx_graphsurgeon as gs

from gapa_onnx.variance.graph import VarianceGraph


def expansion(node: gs.Node, graph: VarianceGraph) -> gs.Graph | None:
    """The body of a node's operator with names that are free in `graph`, or None if it has no body."""
    schema = schema_with_body(node.domain, node.op, graph.opset)
    if schema is None:
        return None
    called = _call(node, graph.opset)
    # Bodies refer to attributes by name, and the inliner does not know defaults.
    defaults = [
        a.default_value for n, a in schema.attributes.items() if n not in node.attrs and a.default_value.name
    ]
    called.graph.node[0].attribute.extend(defaults)
    inlined = onnx.inliner.inline_selected_functions(
        called, [(schema.domain, node.op)], inline_schema_functions=True
    )
    if any(inner.op_type == node.op for inner in inlined.graph.node):
        return None  # no body for these types or this opset
    try:
        inlined = onnx.shape_inference.infer_shapes(inlined, data_prop=True)
    except Exception:  # what stays unknown is met by the rules
        pass
    body = gs.import_onnx(inlined)
    inputs = {tensor.name for tensor in body.inputs}
    for name, tensor in body.tensors().items():
        if name and name not in inputs:
            tensor.name = graph.unique(f"{node.outputs[0].name}/expanded/{name}")
    for inner in body.nodes:
        inner.name = inner.outputs[0].name
    return body


def schema_with_body(domain: str | None, op_type: str, opset: int) -> onnx.defs.OpSchema | None:
    """The definition of an operator that the standard gives a function body, else None."""
    try:
        schema = onnx.defs.get_schema(op_type, opset, domain or "")
    except onnx.defs.SchemaError:
        return None
    return schema if has_body(schema) else None


def has_body(schema: onnx.defs.OpSchema) -> bool:
    """Whether the standard defines the operator by a function, be it one that depends on the node."""
    # The type stubs of onnx leave out both of these.
    return bool(getattr(schema, "has_function") or getattr(schema, "has_context_dependent_function"))  # noqa: B009


def _call(node: gs.Node, opset: int) -> onnx.ModelProto:
    """A model of this node alone; its inputs are what the node reads."""
    inputs = [gs.Variable(t.name, t.dtype, t.shape) if t.name else gs.Variable.empty() for t in node.inputs]
    outputs = [gs.Variable(t.name, t.dtype, t.shape) if t.name else gs.Variable.empty() for t in node.outputs]
    alone = gs.Node(node.op, node.name, node.attrs, inputs, outputs, node.domain)
    fed = list({tensor.name: tensor for tensor in inputs if tensor.name}.values())
    named = [tensor for tensor in outputs if tensor.name]
    graph = gs.Graph([alone], fed, named, name="call", opset=opset)
    model: onnx.ModelProto = gs.export_onnx(graph, do_type_check=False, ir_version=10)
    return model

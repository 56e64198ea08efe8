"""The gate that every model passes first: what it is made of is what ONNX says, before anybody walks through it.

Whoever reads a model behind this may rely on: names are text, nodes have outputs, as many inputs as their operator wants,
and the attributes that it cannot be without; tensors are of known types and as large as they say; functions end, and
unfold to no more nodes than fit into memory. Much else may still be wrong, which onnxruntime tells.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import onnx

from gapa_onnx.errors import UserError
from gapa_onnx.tensors import fault, is_text

MOST_NODES = 300_000  # of a model whose functions are put in place of their calls
DEEPEST = 100  # calls of functions inside functions
_TYPES = onnx.TensorProto.DataType
_Nodes = Iterable[onnx.NodeProto]
_Key = tuple[str, str]


class Fault(ValueError):
    """What is wrong, in words."""


def require_sound(model: onnx.ModelProto, label: str) -> None:
    """UserError for a model that is damaged, or made to do damage."""
    try:
        _look_at(model)
    except Fault as found:
        raise damaged(label, str(found)) from None


def damaged(label: str, what: str) -> UserError:
    return UserError(f"{label} is damaged: {' '.join(what.split())}", "export the model again")


def _look_at(model: onnx.ModelProto) -> None:
    opsets = _opsets(model.opset_import)
    _require(is_text(model.producer_name, model.graph.name, model.doc_string), "its header is not text")
    for entry in model.metadata_props:
        _require(is_text(entry.key, entry.value), "its metadata are not text")
    functions = {(function.domain, function.name): function for function in model.functions}
    _require(len(functions) == len(model.functions), "two of its functions have one name")
    _look_at_graph(model.graph, opsets, functions.keys())
    _require(not _refers(model.graph), "an attribute refers to that of a function, where there is none")
    for (domain, name), function in functions.items():
        _require(is_text(domain, name, *function.input, *function.output), "a function's name is not text")
        _look_at_nodes(function.node, _opsets(function.opset_import), functions.keys())
    if functions:
        _require_few_nodes(model.graph.node, functions)


def _opsets(imports: Iterable[onnx.OperatorSetIdProto]) -> dict[str, int]:
    found = {}
    for entry in imports:
        _require(is_text(entry.domain), "the domain of an opset is not text")
        _require(entry.version >= 1, f"it imports version {entry.version} of {entry.domain or 'ai.onnx'}")
        found["" if entry.domain == "ai.onnx" else entry.domain] = entry.version
    return found


def _look_at_graph(graph: onnx.GraphProto, opsets: dict[str, int], functions: Iterable[_Key]) -> None:
    for value in (*graph.input, *graph.output, *graph.value_info):
        _require(is_text(value.name), "a tensor's name is not text")
        _look_at_type(value)
    for value in graph.input:
        kind = value.type
        known = kind.WhichOneof("value") != "tensor_type" or kind.tensor_type.elem_type
        _require(bool(known), f"the input {value.name!r} has no type")
    for tensor in graph.initializer:
        _look_at_tensor(tensor)
    for sparse in graph.sparse_initializer:
        _look_at_tensor(sparse.values)
        _look_at_tensor(sparse.indices)
    _look_at_nodes(graph.node, opsets, functions)


def _refers(graph: onnx.GraphProto) -> bool:
    """Whether an attribute stands for one of the function that it is in."""
    attributes = [attribute for node in graph.node for attribute in node.attribute]
    bodies = [body for one in attributes for body in (*([one.g] if one.HasField("g") else []), *one.graphs)]
    return any(one.ref_attr_name for one in attributes) or any(map(_refers, bodies))


def _look_at_type(value: onnx.ValueInfoProto) -> None:
    kind = value.type
    if kind.WhichOneof("value") != "tensor_type":
        return
    _require(
        kind.tensor_type.elem_type in _TYPES.values(),
        f"{value.name!r} is of the type {kind.tensor_type.elem_type}, which ONNX does not have",
    )
    for size in kind.tensor_type.shape.dim:
        _require(is_text(size.dim_param, size.denotation), f"the shape of {value.name!r} is not text")


def _look_at_tensor(tensor: onnx.TensorProto) -> None:
    _require(is_text(tensor.name), "a tensor's name is not text")
    for entry in tensor.external_data:
        _require(is_text(entry.key, entry.value), f"the place of the tensor {tensor.name!r} is not text")
    wrong = fault(tensor)
    _require(wrong is None, f"the tensor {tensor.name!r} {wrong}")


def _look_at_nodes(nodes: _Nodes, opsets: dict[str, int], functions: Iterable[_Key]) -> None:
    known = set(functions)
    for node in nodes:
        texts = (node.name, node.op_type, node.domain, node.doc_string, *node.input, *node.output)
        _require(is_text(*texts), "the name of a node or of what it reads is not text")
        _require(bool(node.op_type), f"the node {node.name!r} has no operator")
        said = f"the node {node.name or node.op_type!r}"
        _require(any(node.output), f"{said} has no outputs")
        for attribute in node.attribute:
            _look_at_attribute(attribute, said, opsets, known)
        if (node.domain, node.op_type) not in known:
            _look_at_operator(node, said, opsets)


def _look_at_attribute(
    attribute: onnx.AttributeProto, said: str, opsets: dict[str, int], functions: Iterable[_Key]
) -> None:
    _require(is_text(attribute.name, attribute.ref_attr_name), f"an attribute of {said} is not text")
    kinds = onnx.AttributeProto.AttributeType.values()
    _require(attribute.type in kinds, f"the attribute {attribute.name!r} of {said} is of no known type")
    for tensor in (*([attribute.t] if attribute.HasField("t") else []), *attribute.tensors):
        _look_at_tensor(tensor)
    for body in (*([attribute.g] if attribute.HasField("g") else []), *attribute.graphs):
        _look_at_graph(body, opsets, functions)


class _Wanted(NamedTuple):
    """What an operator asks of a node."""

    few: int
    many: int
    ports: tuple[tuple[str, bool], ...]  #: of its inputs in order: name, and whether it may not be left empty
    attributes: tuple[tuple[str, int, bool], ...]  #: name, type, and whether it may not be left out


@functools.cache
def _wanted(operator: str, version: int, domain: str) -> _Wanted | None:
    """None where nothing is known: of operators of others, or from after our onnx."""
    if not version or (domain == "" and version > onnx.defs.onnx_opset_version()):
        return None
    try:
        schema = onnx.defs.get_schema(operator, version, domain)
    except onnx.defs.SchemaError:
        return None
    single = onnx.defs.OpSchema.FormalParameterOption.Single
    return _Wanted(
        schema.min_input,
        schema.max_input,
        tuple((port.name, port.option == single) for port in schema.inputs),
        tuple((name, _kind(one), one.required) for name, one in schema.attributes.items()),
    )


def _kind(attribute: Any) -> int:  # whose enum has no types that a checker knows
    return int(attribute.type.value)


def _look_at_operator(node: onnx.NodeProto, said: str, opsets: dict[str, int]) -> None:
    """What its operator wants of a node."""
    domain = "" if node.domain == "ai.onnx" else node.domain
    wanted = _wanted(node.op_type, opsets.get(domain, 0), domain)
    if wanted is None:
        return
    fits = wanted.few <= len(node.input) <= wanted.many
    _require(
        fits,
        f"{said} has {len(node.input)} inputs, where {node.op_type} takes {wanted.few} to {wanted.many}",
    )
    for (port, needed), name in zip(wanted.ports, node.input):
        _require(bool(name) or not needed, f"{said} has no input {port!r}")
    given = {attribute.name: attribute for attribute in node.attribute}
    for name, kind, needed in wanted.attributes:
        found = given.get(name)
        _require(found is not None or not needed, f"{said} has no attribute {name!r}")
        if found is not None and found.type and not found.ref_attr_name:
            right = int(found.type) == kind
            _require(right, f"the attribute {name!r} of {said} is of another type than {node.op_type} takes")


def _require_few_nodes(nodes: _Nodes, functions: dict[_Key, onnx.FunctionProto]) -> None:
    """Count the nodes that there would be without functions, without making any."""
    sizes: dict[_Key, int] = {}
    open_calls: list[_Key] = []

    def size(nodes: _Nodes) -> int:
        total = 0
        for node in nodes:
            total += called((node.domain, node.op_type)) if (node.domain, node.op_type) in functions else 1
            for attribute in node.attribute:
                for body in (attribute.g, *attribute.graphs):
                    total += size(body.node)
            _require(total <= MOST_NODES, f"its functions unfold to more than {MOST_NODES} nodes")
        return total

    def called(key: _Key) -> int:
        if key not in sizes:
            _require(key not in open_calls, f"its function {key[1]!r} calls itself")
            _require(len(open_calls) < DEEPEST, f"its functions call each other {DEEPEST} deep")
            open_calls.append(key)
            sizes[key] = size(functions[key].node)
            open_calls.pop()
        return sizes[key]

    size(nodes)
    for key in functions:  # also those that nobody calls: whoever puts functions in place looks at them
        called(key)


def _require(right: bool, what: str) -> None:
    if not right:
        raise Fault(what)

"""Adding to a model without touching it: the source nodes stay as they are, byte for byte.

Source nodes keep their order. Each new node stands right behind the last source node that it needs:
onnxruntime loads large graphs much faster that way.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx

from gapa_onnx.model.constants import RANDOM
from gapa_onnx.model.protos import duplicate

OPAQUE_IDENTITY = (
    "Sum"  # of one tensor: no operation either, but one that optimisers neither remove nor merge
)
OPAQUE_ADD = "Sum"  # of two tensors: rounds like Add, and is not merged with one
FUNCTIONS_IR = 8  # the first IR version with model-local functions


def splice(
    source: onnx.ModelProto,
    additions: onnx.GraphProto,
    outputs: Iterable[onnx.ValueInfoProto],
    functions: Iterable[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """A copy of the source with nodes, initializers, outputs and functions added."""
    model = duplicate(source)
    if any(node.op_type in RANDOM for node in model.graph.node):
        model.graph.node.extend(
            additions.node
        )  # onnxruntime seeds a random operator by its place in the list
    else:
        _interleave(model.graph, additions)
    model.graph.initializer.extend(additions.initializer)
    model.graph.output.extend(outputs)
    model.functions.extend(functions)
    imported = {entry.domain for entry in model.opset_import}
    called = (node.domain for node in additions.node if node.domain)
    for domain in dict.fromkeys([*(function.domain for function in functions), *called]):
        if domain not in imported:
            model.opset_import.add(domain=domain, version=1)
    _raise_ir_version(model)
    return model


def exposed(model: onnx.ModelProto, names: Iterable[str]) -> onnx.ModelProto:
    """A copy of a model with some of its tensors as further outputs."""
    copy = duplicate(model)
    present = {output.name for output in copy.graph.output}
    for name in dict.fromkeys(names):
        if name not in present:
            copy.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    return copy


def extract(
    model: onnx.ModelProto, outputs: Iterable[str], given: Iterable[onnx.ValueInfoProto] = ()
) -> onnx.ModelProto:
    """The part of a model that computes some of its tensors; those that are `given` become inputs."""
    given, outputs = list(given), list(outputs)
    known = {value.name for value in given}
    needed, nodes = set(outputs), []
    for node in reversed(model.graph.node):
        if any(name in needed and name not in known for name in node.output):
            nodes.append(node)
            needed.update(reads(node))
    weights = needed - known
    part = duplicate(model, lambda weight: weight if weight.name in weights else None)
    graph = part.graph
    # A file may list its initializers as inputs too; without its number such an input would have to be fed.
    left_out = {weight.name for weight in model.graph.initializer} - weights
    inputs = [value for value in model.graph.input if value.name not in left_out]
    del graph.node[:], graph.output[:], graph.value_info[:], graph.input[:]
    graph.input.extend(inputs)
    graph.node.extend(reversed(nodes))
    graph.output.extend(onnx.helper.make_empty_tensor_value_info(name) for name in outputs)
    graph.input.extend(given)
    return part


def prune(graph: onnx.GraphProto, wanted: Iterable[str]) -> None:
    """Take out the nodes and initializers that the wanted tensors do not need."""
    needed, nodes = set(wanted), []
    for node in reversed(graph.node):
        if not needed.isdisjoint(node.output):
            nodes.append(node)
            needed.update(name for name in reads(node) if name)
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in reversed(nodes)]
    initializers = [tensor for tensor in graph.initializer if tensor.name in needed]
    if len(kept) < len(graph.node):
        del graph.node[:]
        graph.node.extend(kept)
    if len(initializers) < len(graph.initializer):
        initializers = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in initializers]
        del graph.initializer[:]
        graph.initializer.extend(initializers)


def _interleave(graph: onnx.GraphProto, additions: onnx.GraphProto) -> None:
    place: dict[str, int] = {}  # the source node after which a tensor is known
    behind: list[list[onnx.NodeProto]] = [[] for _ in range(len(graph.node) + 1)]
    for position, node in enumerate(graph.node, start=1):
        place.update((name, position) for name in node.output)
    for node in additions.node:
        position = max((place.get(name, 0) for name in reads(node)), default=0)
        place.update((name, position) for name in node.output)
        behind[position].append(node)
    source = [onnx.NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    del graph.node[:]
    graph.node.extend(behind[0])
    for node, followers in zip(source, behind[1:]):
        graph.node.append(node)
        graph.node.extend(followers)


def reads(node: onnx.NodeProto) -> Iterator[str]:
    """Names that a node reads, also those inside its bodies."""
    yield from node.input
    for attribute in node.attribute:
        for body in (attribute.g, *attribute.graphs):
            yield from (output.name for output in body.output)
            for inner in body.node:
                yield from reads(inner)


def _raise_ir_version(model: onnx.ModelProto) -> None:
    """To the first version that has functions; older runtimes refuse newer ones than they know."""
    if model.ir_version < 4:
        # Before IR 4 every initializer had to be listed as an input too, and was constant all the
        # same. From IR 4 on such an input can be overridden, which would stop constant folding and
        # so change the last bits of the outputs.
        initializers = {tensor.name for tensor in model.graph.initializer}
        kept = [value for value in model.graph.input if value.name not in initializers]
        del model.graph.input[:]
        model.graph.input.extend(kept)
    model.ir_version = max(model.ir_version, FUNCTIONS_IR)

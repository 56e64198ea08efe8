"""Adding to a model without touching it: the source nodes stay as they are, byte for byte.

New nodes are appended behind the source's, which is a valid order since no source node reads a
new tensor.
"""

from __future__ import annotations

from collections.abc import Iterable

import onnx

FUNCTIONS_IR = 8  # the first IR version with model-local functions


def splice(
    source: onnx.ModelProto,
    additions: onnx.GraphProto,
    outputs: Iterable[onnx.ValueInfoProto],
    functions: Iterable[onnx.FunctionProto] = (),
) -> onnx.ModelProto:
    """A copy of the source with nodes, initializers, outputs and functions added."""
    model = onnx.ModelProto()
    model.CopyFrom(source)
    model.graph.node.extend(additions.node)
    model.graph.initializer.extend(additions.initializer)
    model.graph.output.extend(outputs)
    model.functions.extend(functions)
    imported = {entry.domain for entry in model.opset_import}
    for domain in dict.fromkeys(function.domain for function in functions):
        if domain not in imported:
            model.opset_import.add(domain=domain, version=1)
    _raise_ir_version(model)
    return model


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

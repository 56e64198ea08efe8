"""What a node of a model reads."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_graphsurgeon as gs


def names_read(node: gs.Node) -> Iterator[str]:
    """Names of all tensors that a node reads, also those that its subgraphs take from outside."""
    yield from (tensor.name for tensor in node.inputs if tensor.name)
    for value in node.attrs.values():
        if isinstance(value, gs.Graph):
            yield from (tensor.name for tensor in value.outputs)
            for inner in value.nodes:
                yield from names_read(inner)

"""What is the same in every run of a model: initializers, Constant nodes, and all that follows from them alone."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import numpy as np
import onnx_graphsurgeon as gs
from onnx_graphsurgeon.ir.tensor import LazyValues

from gapa_onnx.arrays import Array

RANDOM = {
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Multinomial",
    "Bernoulli",
}


def constant_of(tensor: gs.Tensor) -> Array | None:
    """The value of an initializer or a Constant node, else None."""
    if isinstance(tensor, gs.Constant):
        values: Array = tensor.values
        return values
    if len(tensor.inputs) == 1 and tensor.inputs[0].op == "Constant":
        for value in tensor.inputs[0].attrs.values():
            return np.asarray(value.values if isinstance(value, gs.Constant) else value)
    return None


def numbers_of(tensor: gs.Tensor) -> Array | None:
    """As `constant_of`, for what is read once: a large weight is not kept beside the model."""
    held = tensor._values if isinstance(tensor, gs.Constant) else None
    if isinstance(held, LazyValues):
        numbers: Array = held.load()
        return numbers
    return constant_of(tensor)


def constant_names(graph: gs.Graph, known: AbstractSet[str] = frozenset()) -> set[str]:
    """Names of the constants of a graph and of all that is computed from them alone."""
    names = {tensor.name for tensor in graph.tensors().values() if isinstance(tensor, gs.Constant)} | known
    for node in graph.nodes:
        if can_be_repeated(node) and all(tensor.name in names or not tensor.name for tensor in node.inputs):
            names.update(tensor.name for tensor in node.outputs)
    return names


def can_be_repeated(node: gs.Node) -> bool:
    """Whether the same inputs give the same outputs: not of what draws at random, nor of what has a body, which
    reads more than its inputs and whose tensors have names of their own."""
    return node.op not in RANDOM and not has_subgraph(node)


def has_subgraph(node: gs.Node) -> bool:
    return any(isinstance(value, gs.Graph) for value in node.attrs.values())

"""Sequences and optionals: the variance of a sequence is the sequence of its elements' variances.

An element that is certain has zeros there, since which element is taken may be known at run time only.
"""

from __future__ import annotations

import numpy as np

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import Accuracy, deterministic, rule, variance_or_zeros
from gapa_onnx.variance.rules.view import NodeView, Operand, Refused

deterministic("it counts elements only", "SequenceLength", "OptionalHasElement")
deterministic("it has no elements", "SequenceEmpty")


@rule(
    "SequenceAt", "SequenceErase", "ConcatFromSequence", "Optional", "OptionalGetElement", "SplitToSequence",
    accuracy=Accuracy.EXACT,
)  # fmt: skip
def of_one(node: NodeView) -> Value:
    """The same node, on the variances of the elements."""
    places = [operand.raw if operand.present else None for operand in node.inputs[1:]]
    return _same(node, node.inputs[0].var, *places)


@rule("SequenceConstruct", accuracy=Accuracy.EXACT)
def sequence_construct(node: NodeView) -> Value:
    """The same node, on the variances of the elements; zeros where one is certain."""
    return _same(node, *(variance_or_zeros(operand) for operand in node.inputs))


@rule("SequenceInsert", accuracy=Accuracy.EXACT)
def sequence_insert(node: NodeView) -> Value:
    """The same node, on the variances of the elements; zeros where one is certain."""
    sequence, element = node.inputs[:2]
    place = node.input(2)
    var = zero_sequence(sequence) if sequence.certain else sequence.var
    return _same(node, var, variance_or_zeros(element), *([] if place is None else [place.raw]))


def _same(node: NodeView, *inputs: Value | None) -> Value:
    """As `node.again`, typed like the variances: the type of a sequence is not always known."""
    dtype = next(operand.var.dtype for operand in node.inputs if operand.var is not None)
    return node.graph.emit(node.op_type, *inputs, dtype=dtype, **node.node.attrs)


def zero_sequence(sequence: Operand) -> Value:
    """Zeros in the shapes of the elements of a certain sequence: what made it, done with zeros."""
    graph, dtype = sequence.graph, sequence.dtype
    maker = sequence.tensor.inputs[0] if sequence.tensor.inputs else None
    operands = [] if maker is None else [Operand(graph, tensor) for tensor in maker.inputs]

    def same(*inputs: Value, places: list[Operand]) -> Value:
        assert maker is not None  # only asked where something made the sequence
        rest = [operand.raw if operand.present else None for operand in places]
        return graph.emit(maker.op, *inputs, *rest, dtype=dtype, **maker.attrs)

    match None if maker is None else maker.op:
        case "SequenceEmpty":
            nothing = graph.emit("SequenceConstruct", graph.constant(np.zeros(0, dtype)))
            return graph.emit("SequenceErase", nothing, graph.constant(np.int64(0)))
        case "SequenceConstruct":
            return same(*(graph.zeros(operand.mean) for operand in operands), places=[])
        case "SequenceInsert":
            return same(zero_sequence(operands[0]), graph.zeros(operands[1].mean), places=operands[2:])
        case "SequenceErase":
            return same(zero_sequence(operands[0]), places=operands[1:])
        case "SplitToSequence":
            return same(graph.zeros(operands[0].mean), places=operands[1:])
        case "Identity":
            return zero_sequence(operands[0])
    raise Refused(
        f"{sequence.tensor.name!r} is a certain sequence, and what made it cannot be done with zeros"
    )

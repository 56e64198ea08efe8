"""A model as its designer sees it: linear layers, activations, and the data that layers read."""

from __future__ import annotations

import functools
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import can_be_repeated, constant_names, constant_of, has_subgraph
from gapa_onnx.model.dtypes import is_float, is_quantised
from gapa_onnx.model.load import SourceModel
from gapa_onnx.variance.graph import names_read
from gapa_onnx.variance.patterns import Composite, find_composites
from gapa_onnx.variance.patterns.composite import Output, Spelled
from gapa_onnx.variance.patterns.softmax import softmax
from gapa_onnx.variance.rules import Rule, VirtualNode, behaviour, is_declared

Node: TypeAlias = gs.Node | VirtualNode

QUANTISERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")
RESHAPERS = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
CARRIERS = ("Dropout", "Identity", *RESHAPERS, *QUANTISERS)  #: what holds the same numbers before and behind


def is_layer(node: Node, *constants: AbstractSet[str]) -> bool:
    """A linear layer: weights known, data not. Control flow with a layer in its body counts as one:
    its interior tensors are out of reach, what goes in is not.

    `constants` are the names of known tensors, of the node's graph and of those around it.
    """
    if has_subgraph(node):
        bodies = [value for value in node.attrs.values() if isinstance(value, gs.Graph)]
        return any(_has_layer(body, *constants) for body in bodies)
    rule = behaviour(node.domain, node.op)
    if not (isinstance(rule, Rule) and rule.linear):
        return False
    names = [node.inputs[at].name for at in rule.operands if at < len(node.inputs)]
    known = [any(name in group for group in constants) for name in names]
    if len(rule.operands) == 1:
        return not known[0]
    return any(known) and not all(known) and not _takes_expectation(node)


def _has_layer(body: gs.Graph, *constants: AbstractSet[str]) -> bool:
    known = constant_names(body)
    return any(is_layer(inner, known, *constants) for inner in body.nodes)


def _takes_expectation(node: Node) -> bool:
    """Whether a product with evenly spaced numbers takes the mean of a distribution, which a softmax has made:
    detectors tell the sides of a box so. These numbers are no weights that were learned."""
    if node.op not in ("Conv", "MatMul", "Gemm", "Einsum"):
        return False
    sizes = list(node.inputs[1].shape or [])
    count = prod(size if isinstance(size, int) else 0 for size in sizes) if sizes else 0
    if (
        count < 3
        or count not in (sizes[0], prod(sizes[1:]))
        or count not in _distributions_before(node.inputs[0])
    ):
        return False  # not one number for each of a distribution's
    weights = constant_of(node.inputs[1])
    steps = np.diff(np.zeros(2) if weights is None else weights.ravel().astype(np.float64))
    return bool(steps[0]) and np.allclose(steps, steps[0], rtol=1e-5, atol=0)


def _distributions_before(tensor: gs.Tensor) -> tuple[int, ...]:
    """The possible lengths of a distribution, if a tensor holds what a softmax has made."""
    while len(tensor.inputs) == 1 and tensor.inputs[0].op in (*CARRIERS, "Transpose", "Cast"):
        tensor = tensor.inputs[0].inputs[0]
    maker = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    if maker is None or tensor.shape is None:
        return ()
    if maker.op in ("Mul", "Div"):
        spelled = softmax(Output(tensor, opset=13))  # from where on one axis can be named
        return (tensor.shape[spelled.attrs["axis"]],) if isinstance(spelled, Spelled) else ()
    if maker.op != "Softmax":
        return ()
    sizes = tensor.shape[maker.attrs.get("axis", -1) :]  # before opset 13 all from there on are one
    return tuple(
        size
        for size in (sizes[0], prod(size for size in sizes if isinstance(size, int)))
        if isinstance(size, int)
    )


def is_activation(node: Node) -> bool:
    """An elementwise nonlinearity of one float tensor."""
    rule = behaviour(node.domain, node.op)
    return isinstance(rule, Rule) and rule.activation and is_float(node.outputs[0].dtype)


def is_numeric(tensor: gs.Tensor) -> bool:
    """Whether a tensor's type is one that features have."""
    return is_float(tensor.dtype) or is_quantised(tensor.dtype)


def is_merged_into_layer(activation: gs.Node) -> bool:
    """Whether an activation is merged into the layer before it, since quantising behind it clips as it
    does (see `qdq`): what is dequantised from it is then all that exists."""
    if activation.op not in ("Relu", "Clip"):
        return False
    quantised = [node.op == "QuantizeLinear" for node in activation.outputs[0].outputs]
    produced = activation.inputs[0].inputs
    return bool(quantised) and all(quantised) and bool(produced) and produced[0].op != "DequantizeLinear"


@dataclass(frozen=True, eq=False)
class Network:
    """The layers and activations of a model. What takes a walk over all nodes is found once."""

    source: SourceModel = field(repr=False)

    @classmethod
    def of(cls, source: SourceModel) -> Network:
        """The one view of a model, which every caller shares."""
        return source.once(cls)

    @functools.cached_property
    def composites(self) -> tuple[Composite, ...]:
        """Groups of nodes that spell out one operator, last nodes first."""
        return tuple(find_composites(self.source.graph, visible=set()))

    @functools.cached_property
    def activations(self) -> dict[int, Node]:
        """By the identity of their (last) node; x·sigmoid(x) is one activation, its sigmoid is none."""
        nodes, outputs = self.source.graph.nodes, {tensor.name for tensor in self.source.outputs}
        composites = [c for c in self.composites if is_declared(c.node.domain, c.node.op)]
        inside: set[int] = set().union(*(composite.hidden(outputs) for composite in composites))
        seen_as = {id(composite.last): composite.node for composite in composites}
        candidates = {id(node): seen_as.get(id(node), node) for node in nodes if id(node) not in inside}
        return {key: node for key, node in candidates.items() if is_activation(node)}

    @functools.cached_property
    def layers(self) -> dict[int, gs.Node]:
        """The linear layers by identity, in graph order."""
        constants = self.source.constants
        return {id(node): node for node in self.source.graph.nodes if is_layer(node, constants)}

    def is_known(self, tensor: gs.Tensor) -> bool:
        """Whether a tensor is left out, or the same in every run."""
        return not tensor.name or tensor.name in self.source.constants

    def data_of(self, layer: gs.Node) -> gs.Tensor | None:
        """The first tensor of the graph that a layer reads and that is not known beforehand."""
        tensors, constants = self.source.tensors, self.source.constants
        read = (tensors[name] for name in names_read(layer) if name in tensors and name not in constants)
        return next((tensor for tensor in read if self.holds_features(tensor)), None)

    def holds_features(self, tensor: gs.Tensor) -> bool:
        """Whether a tensor can hold features: by its type, and as it has elements that depend on what is fed by
        more than shapes."""
        empty = tensor.shape is not None and 0 in tensor.shape
        followed = tensor.name in self.source.constants or tensor.name in self._of_shapes
        return is_numeric(tensor) and not empty and not followed

    def follows_data(self, name: str) -> bool:
        """Whether the tensor of this name depends on what is fed by more than shapes."""
        return bool(name) and name not in self.source.constants and name not in self._of_shapes

    @functools.cached_property
    def _of_shapes(self) -> frozenset[str]:
        """Tensors that follow from the shapes of others, and constants: the zeros that a loop begins with."""
        found: set[str] = set()
        constants = self.source.constants
        for node in self.source.graph.nodes:
            read = [tensor.name for tensor in node.inputs if tensor.name and tensor.name not in constants]
            if node.op in ("Shape", "Size") or (
                read and can_be_repeated(node) and all(name in found for name in read)
            ):
                found.update(tensor.name for tensor in node.outputs)
        return frozenset(found)

    @functools.cached_property
    def straight_from_layers(self) -> frozenset[str]:
        """Tensors that come from a layer with no activation of their own on the way."""
        found: set[str] = set()
        for node in self.source.graph.nodes:
            bent = is_activation(node) and not is_merged_into_layer(node)
            data = next((tensor for tensor in node.inputs if not self.is_known(tensor)), None)
            if id(node) in self.layers or (not bent and data is not None and data.name in found):
                found.update(tensor.name for tensor in node.outputs)
        return frozenset(found)

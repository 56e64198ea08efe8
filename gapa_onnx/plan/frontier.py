"""The last layers of a model: those with no other layer between them and an output.

The frontier of a tensor is the set of layers that it comes from. Where paths meet in a sum or product, every element
of the result depends on all of them, so that of layers in a row the last one is enough. Where they are put side by
side (Concat) or chosen from (Where, Max), each has its own part of the result, and all of them count.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import has_subgraph
from gapa_onnx.model.dtypes import is_whole
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.layers import CARRIERS, Network, Node, is_merged_into_layer
from gapa_onnx.variance.graph import names_read
from gapa_onnx.variance.rules import Deterministic, behaviour

_JOINS = {
    "Add", "Sub", "Mul", "Div", "Sum", "Mean", "QLinearAdd", "QLinearMul", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "SkipGroupNorm",
}  # fmt: skip

Layers = frozenset[int]  #: by the identity of their nodes


@dataclass(frozen=True)
class Place:
    """Where a site can be: at an activation, or at a tensor."""

    tensor: gs.Tensor  #: that becomes uncertain
    activation: Node | None


@dataclass(frozen=True, eq=False)
class Frontier:
    """The last layers of each output of a model, and the places in front of them."""

    source: SourceModel = field(repr=False)

    @classmethod
    def of(cls, source: SourceModel) -> Frontier:
        """The one view of a model, which every caller shares."""
        return source.once(cls)

    @property
    def network(self) -> Network:
        return Network.of(self.source)

    @functools.cached_property
    def layers(self) -> dict[str, Layers]:
        """The last layers of each output that is an answer by itself."""
        if not any(self._fronts.values()):
            return {tensor.name: self._before_the_end for tensor in self.source.outputs}
        return {name: front for name, front in self._fronts.items() if name not in self.states}

    @functools.cached_property
    def states(self) -> dict[str, Layers]:
        """The last layers of each state that is handed on from call to call and that other outputs depend on."""
        fronts = self._fronts
        states = [name for name in fronts if self._fed_as(name)]
        every = frozenset().union(*fronts.values())
        leading_on = _Fronts(self.network, {}).before(every, every) if states and every else set()
        return {name: fronts[name] for name in states if fronts[name] <= leading_on}

    def grows(self, state: str) -> bool:
        """Whether a state is longer behind a call than in front of it: keys and values of an attention, whose last
        part alone is new. What it is made of is certain again at the next call."""
        own, before = self.source.tensors[state].shape, self.source.tensors[self._fed_as(state)[0]].shape
        return any(isinstance(a, str) and isinstance(b, str) and a != b for a, b in zip(own, before))

    @functools.cached_property
    def _fronts(self) -> dict[str, Layers]:
        """The last layers of each output that holds features."""
        network = self.network
        outputs = [tensor for tensor in self.source.outputs if network.holds_features(tensor)]
        inside, found = _behind_layers(network, outputs), _Fronts(network, {})
        for node in self.source.graph.nodes:
            if id(node) in inside:
                found.visit(node)
        return {tensor.name: found.by_tensor.get(tensor.name, frozenset()) for tensor in outputs}

    @functools.cached_property
    def _before_the_end(self) -> Layers:
        """The last layers of a model whose outputs come from none by a way that carries features: from trees or as
        labels, behind layers that lead to these."""
        network = self.network
        every = frozenset(network.layers)
        return _Fronts(network, {}).last(every) if every else every

    def _fed_as(self, output: str) -> list[str]:
        """The inputs as which an output may be fed again: of the same rank, with the same lengths where both are
        known, of which there are some."""
        own = self.source.tensors[output].shape

        def fits(shape: Sequence[object] | None) -> bool:
            if not shape or own is None:
                return False
            pairs = [p for p in zip(shape, own) if all(isinstance(size, int) for size in p)]
            return len(shape) == len(own) and bool(pairs) and all(a == b for a, b in pairs)

        return [spec.name for spec in self.source.inputs if fits(spec.shape)]

    @functools.cached_property
    def places(self) -> dict[str, tuple[Place, set[str]]]:
        """The places in front of the last layers, by the name of their tensors in graph order, each with the outputs
        whose last layers those are."""
        return self._places(self.layers)

    def places_of(self, state: str) -> list[Place]:
        """The places in front of the last layers of a state, but not the state of the call before."""
        found = [place for place, _ in self._places({state: self.states[state]}).values()]
        return [place for place in found if place.tensor.name not in self._fed_as(state)]

    def _places(self, fronts: Mapping[str, Layers]) -> dict[str, tuple[Place, set[str]]]:
        found: dict[str, tuple[Place, set[str]]] = {}
        every = frozenset().union(*fronts.values())
        for key, layer in self.network.layers.items():
            data = self.network.data_of(layer) if key in every else None
            if data is not None:
                place = place_at(self.network, data)
                outputs = {output for output, layers in fronts.items() if key in layers}
                found.setdefault(place.tensor.name, (place, set()))[1].update(outputs)
        return found


def place_at(network: Network, data: gs.Tensor) -> Place:
    """The activation that a layer's data come from if only reshaping lies between, else the data."""
    tensor = data
    while len(tensor.inputs) == 1 and tensor.inputs[0].op in CARRIERS:
        tensor = tensor.inputs[0].inputs[0]
    producer = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    activation = network.activations.get(id(producer))
    if activation is not None and not is_merged_into_layer(producer):
        return Place(activation.outputs[0], activation)
    if len(data.inputs) == 1 and data.inputs[0].op == "DynamicQuantizeLinear":
        data = data.inputs[0].inputs[0]  # its steps differ from batch to batch
    return Place(data, None)


def _behind_layers(network: Network, outputs: list[gs.Tensor]) -> set[int]:
    """The nodes that outputs come from, back to the last layers."""
    seen: set[int] = set()
    pending = list(outputs)
    while pending:
        for node in pending.pop().inputs:
            if id(node) not in seen:
                seen.add(id(node))
                if id(node) not in network.layers:
                    pending.extend(tensor for tensor in node.inputs if carries(tensor))
    return seen


def comes_from(tensor: gs.Tensor, names: AbstractSet[str]) -> bool:
    """Whether a tensor is one of these, or made of some by more than shapes and choices."""
    seen: set[int] = set()
    pending = [tensor]
    while pending:
        tensor = pending.pop()
        if tensor.name in names:
            return True
        for node in tensor.inputs:
            if id(node) not in seen:
                seen.add(id(node))
                pending.extend(operand for operand in node.inputs if carries(operand))
    return False


def carries(tensor: gs.Tensor) -> bool:
    """Whether a tensor may depend on features by more than its shape or a choice."""
    counts = is_whole(tensor.dtype) and np.dtype(tensor.dtype).itemsize == 8
    return not counts and tensor.dtype not in (bool, np.bool_)


@dataclass
class _Fronts:
    """The frontiers of tensors, found node by node in the order of the graph."""

    network: Network
    by_tensor: dict[str, Layers]
    last_of: dict[Layers, Layers] = field(default_factory=dict)  #: what has been asked before

    def visit(self, node: gs.Node) -> None:
        if id(node) in self.network.layers:
            front = frozenset([id(node)])
        elif isinstance(behaviour(node.domain, node.op), Deterministic):
            return
        else:
            fronts = {self.by_tensor[t.name] for t in node.inputs if t.name in self.by_tensor and carries(t)}
            front = next(iter(fronts)) if len(fronts) == 1 else frozenset().union(*fronts)
            if len(fronts) > 1 and node.op in _JOINS:
                front = self.last(front)
        made = (
            node.outputs[:1] if node.op == "DynamicQuantizeLinear" else node.outputs
        )  # a scale is no way past a layer
        self.by_tensor.update((tensor.name, front) for tensor in made)

    def last(self, layers: Layers) -> Layers:
        """Those that lead to no other of them."""
        if layers not in self.last_of:
            self.last_of[layers] = layers - self.before(layers, layers)
        return self.last_of[layers]

    def before(self, layers: Layers, wanted: Layers) -> set[int]:
        """The nodes whose results some of these layers depend on, as far back as the first that is wanted."""
        order = self._order
        first = min(order[key] for key in wanted)
        before: set[int] = set()
        pending = [self.network.layers[key] for key in layers]
        while pending:
            for maker in self._makers(pending.pop()):
                if id(maker) not in before and order[id(maker)] >= first:
                    before.add(id(maker))
                    pending.append(maker)
        return before

    def _makers(self, node: gs.Node) -> Iterator[gs.Node]:
        if has_subgraph(node):
            tensors = self.network.source.tensors
            read = [tensors[name] for name in names_read(node) if name in tensors]
        else:
            read = node.inputs
        return (maker for tensor in read for maker in tensor.inputs)

    @functools.cached_property
    def _order(self) -> dict[int, int]:
        return {id(node): at for at, node in enumerate(self.network.source.graph.nodes)}

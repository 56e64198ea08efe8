"""Where Gaussian-process activations go: `sites` is auto, last, all, or names.

`auto` is the penultimate representation: what goes into the last linear layer of each output, at its
activation if only reshaping lies between; and where fully connected layers lead there, also the first of their
activations, which still tells inputs apart that the last one no longer does (docs/defaults.md). `all` are the
activations with a linear layer behind them, `last` is the last of these.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from math import prod

import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.constants import constant_tensors, has_subgraph
from gapa_onnx.model.dtypes import is_float, is_quantised
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.layers import is_layer
from gapa_onnx.variance.graph import names_read
from gapa_onnx.variance.patterns import find_composites
from gapa_onnx.variance.qdq import twins
from gapa_onnx.variance.rules import Deterministic, Rule, VirtualNode, behaviour, is_declared
from gapa_onnx.variance.sites import Layout, Site

WIDEST_FLAT_QUERY = 4096  # beyond it `auto` pools: distances and file size grow with the width
MOST_POSITIONS = 1024  # beyond it `auto` pools: every position is a query of its own


def find_sites(source: SourceModel, spec: str) -> tuple[Site, ...]:
    """Sites by `auto`, `last`, `all`, or names separated by commas, each with an optional `:layout`."""
    if spec == "auto":
        sites = _auto(source)
    elif spec in ("last", "all"):
        hidden = _hidden_sites(source)
        sites = (hidden[-1:] if spec == "last" else hidden) or _auto(source)
    else:
        sites = [_named(source, name.strip()) for name in spec.split(",") if name.strip()]
        if not sites:
            raise UserError("no site is named", "let `sites` be auto, last, all or names separated by commas")
    if not sites:
        raise UserError(
            f"no floating-point output of {source.label} comes from a linear layer with constant weights, "
            f"so no place for a site is obvious{_trees(source)}",
            "name one with `sites`; `gapa-onnx inspect MODEL` lists the tensors",
        )
    return tuple({site.output: site for site in sites}.values())


def _trees(source: SourceModel) -> str:
    """A remark on models that no site would help: they are constant but for jumps."""
    for node in source.graph.nodes:
        entry = behaviour(node.domain, node.op)
        if node.op.startswith("TreeEnsemble") and isinstance(entry, Deterministic):
            return f"; no variance would pass {node.op}: {entry.reason}"
    return ""


def _auto(source: SourceModel) -> list[Site]:
    """The penultimate representation: what goes into the last linear layer of each output, at its
    activation if only reshaping lies between, else the identity there. In front of it the first vector."""
    constants = constant_tensors(source)
    tensors = source.graph.tensors()
    activations = _activations(source.graph)
    sites = []
    for layer in _last_layers(source, constants):
        data = _data_of(layer, constants, tensors)
        if data is None:
            continue
        last = _at_data(data, activations)
        sites += [*_first_vector(last, constants, tensors, activations), last]
    return sites


def _first_vector(
    last: Site, constants: set[str], tensors: dict[str, gs.Tensor], activations: Activations
) -> list[Site]:
    """The first activation of the fully connected layers that end in a site, if it is another one: back
    from layer to layer, as long as each reads the activation of the one before and that is a vector."""
    first = last
    while (earlier := _vector_before(first, constants, tensors, activations)) is not None:
        first = earlier
    return [] if first is last else [first]


def _vector_before(
    site: Site, constants: set[str], tensors: dict[str, gs.Tensor], activations: Activations
) -> Site | None:
    """The site at the activation, a vector per sample, that the layer in front of this one reads."""
    layer = _layer_before(tensors[site.query], constants) if _is_vector(site) else None
    data = None if layer is None else _data_of(layer, constants, tensors)
    found = None if data is None else _at_data(data, activations)
    return found if found is not None and _is_vector(found) else None


def _is_vector(site: Site) -> bool:
    return site.activation is not None and site.rank == 2


def _layer_before(tensor: gs.Tensor, constants: set[str]) -> gs.Node | None:
    """The linear layer that a tensor comes from, with nothing on the way where other data join: a bias is no data,
    nor is a single number, the scale of dynamic quantisation."""
    while len(tensor.inputs) == 1 and not has_subgraph(tensor.inputs[0]):
        node = tensor.inputs[0]
        if is_layer(node, constants):
            return node
        data = [t for t in node.inputs if t.name and t.name not in constants and t.shape not in ((), [])]
        if len(data) != 1:
            return None
        tensor = data[0]
    return None


def _at_data(data: gs.Tensor, activations: Activations) -> Site:
    """At the activation that a layer's data come from if only reshaping lies between, else at the data."""
    tensor, reshaped = data, False
    while len(tensor.inputs) == 1 and tensor.inputs[0].op in (*_CARRIERS, *_QUANTISERS):
        reshaped = reshaped or tensor.inputs[0].op in _RESHAPERS
        tensor = tensor.inputs[0].inputs[0]
    producer = tensor.inputs[0] if len(tensor.inputs) == 1 else None
    activation = activations.get(id(producer))
    if activation is not None and not _inside_quantised_layer(producer):
        return _at_activation(activation, _map_layout(activation.inputs[0], reshaped))
    if len(data.inputs) == 1 and data.inputs[0].op == "DynamicQuantizeLinear":
        data = data.inputs[0].inputs[0]  # its steps differ from batch to batch
    return _at_tensor(data, _map_layout(data, reshaped=False))


def _inside_quantised_layer(activation: gs.Node) -> bool:
    """Whether an activation is merged into the layer before it, since quantising behind it clips as it
    does (see `qdq`): what is dequantised from it is then all that exists."""
    if activation.op not in ("Relu", "Clip"):
        return False
    quantised = [node.op == "QuantizeLinear" for node in activation.outputs[0].outputs]
    produced = activation.inputs[0].inputs
    return bool(quantised) and all(quantised) and bool(produced) and produced[0].op != "DequantizeLinear"


def _data_of(layer: gs.Node, constants: set[str], tensors: dict[str, gs.Tensor]) -> gs.Tensor | None:
    """The first tensor of the graph that a layer reads and that is not known beforehand."""
    read = (tensors[name] for name in names_read(layer) if name in tensors and name not in constants)
    return next((tensor for tensor in read if _holds_features(tensor)), None)


def _holds_features(tensor: gs.Tensor) -> bool:
    return is_float(tensor.dtype) or is_quantised(tensor.dtype)


_RESHAPERS = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")
_CARRIERS = ("Dropout", "Identity", *_RESHAPERS)
_QUANTISERS = ("QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear")


def _map_layout(tensor: gs.Tensor, reshaped: bool) -> Layout:
    """How `auto` queries a feature map. One that is flattened for the next layer is one query, else
    each position is one; either only while that is known to be cheap."""
    shape = tensor.shape
    if shape is None or len(shape) < 3 or not all(isinstance(size, int) for size in shape[1:]):
        return Layout.POOLED
    if reshaped:
        return Layout.FLAT if prod(shape[1:]) <= WIDEST_FLAT_QUERY else Layout.POOLED
    return Layout.POSITIONS if prod(shape[2:]) <= MOST_POSITIONS else Layout.POOLED


def _last_layers(source: SourceModel, constants: set[str]) -> list[gs.Node]:
    """The linear layers with no other linear layer between them and an output, in graph order."""
    found, seen = {}, set()
    pending = [tensor for tensor in source.outputs if _holds_features(tensor)]
    while pending:
        tensor = pending.pop()
        for node in tensor.inputs:
            if id(node) in seen or (node.op == "DynamicQuantizeLinear" and tensor is not node.outputs[0]):
                continue  # a scale is no way past a layer
            seen.add(id(node))
            if is_layer(node, constants):
                found[id(node)] = node
            else:
                pending.extend(node.inputs)
    # Along a residual path an earlier layer is found too; only layers that lead to no other count.
    return [node for node in source.graph.nodes if id(node) in found and not _leads_to(node, found)]


def _leads_to(node: gs.Node, others: dict[int, gs.Node]) -> bool:
    seen: set[int] = set()
    pending = [reader for tensor in node.outputs for reader in tensor.outputs]
    while pending:
        reader = pending.pop()
        if id(reader) in others:
            return True
        if id(reader) not in seen:
            seen.add(id(reader))
            pending += [further for tensor in reader.outputs for further in tensor.outputs]
    return False


def _hidden_sites(source: SourceModel) -> list[Site]:
    """Activations of data with a linear layer somewhere behind them, in graph order. Of an activation
    that quantisation has merged into its layer, what the next layer reads is left."""
    constants = constant_tensors(source)
    tensors = source.graph.tensors()
    activations = _activations(source.graph)
    before_layer: set[str] = set()
    hidden = []
    for node in reversed(source.graph.nodes):
        leads_on = any(tensor.name in before_layer for tensor in node.outputs)
        layer = is_layer(node, constants)
        activation = activations.get(id(node)) if leads_on else None
        if activation is not None and activation.inputs[0].name not in constants:
            if not _inside_quantised_layer(node):
                hidden.append(_at_activation(activation, Layout.POOLED))
        if layer and not has_subgraph(node):
            data = _data_of(node, constants, tensors)
            if data is not None and _has_merged_activation(data, constants):
                hidden.append(_at_tensor(data, Layout.POOLED))
        if leads_on or layer:
            before_layer.update(tensor.name for tensor in node.inputs if tensor.name)
    return hidden[::-1]


def _has_merged_activation(data: gs.Tensor, constants: set[str]) -> bool:
    """Whether quantised data come from another layer with no activation of their own on the way."""
    quantised = is_quantised(data.dtype) or any(node.op == "DequantizeLinear" for node in data.inputs)
    tensor: gs.Tensor | None = data
    while quantised and tensor is not None and len(tensor.inputs) == 1:
        node = tensor.inputs[0]
        if is_layer(node, constants):
            return True
        if _is_activation(node) and not _inside_quantised_layer(node):
            return False
        tensor = next((t for t in node.inputs if t.name and t.name not in constants), None)
    return False


Activations = dict[int, gs.Node | VirtualNode]


def _activations(graph: gs.Graph) -> Activations:
    """By the identity of their (last) node; x·sigmoid(x) is one activation, its sigmoid is none."""
    composites = [c for c in find_composites(graph, visible=set()) if is_declared(c.node.domain, c.node.op)]
    outputs = {tensor.name for tensor in graph.outputs}
    inside = set().union(*(composite.hidden(outputs) for composite in composites))
    seen_as = {id(composite.last): composite.node for composite in composites}
    candidates = {id(node): seen_as.get(id(node), node) for node in graph.nodes if id(node) not in inside}
    return {key: node for key, node in candidates.items() if _is_activation(node)}


def _is_activation(node: gs.Node | VirtualNode) -> bool:
    rule = behaviour(node.domain, node.op)
    return isinstance(rule, Rule) and rule.activation and is_float(node.outputs[0].dtype)


def _at_activation(node: gs.Node | VirtualNode, map_layout: Layout | None) -> Site:
    query, output = node.inputs[0], node.outputs[0]
    return _site(node.name or output.name, query, output, node.op, map_layout)


def _at_tensor(tensor: gs.Tensor, map_layout: Layout | None) -> Site:
    return _site(tensor.name, tensor, tensor, None, map_layout)


def _site(
    name: str, query: gs.Tensor, output: gs.Tensor, activation: str | None, map_layout: Layout | None
) -> Site:
    """`map_layout` is for tensors of more than two axes; None takes each position by itself."""
    rank = None if query.shape is None else len(query.shape)
    layout = Layout.ROWS
    if rank is not None and rank > 2:
        if map_layout is Layout.FLAT:
            layout = Layout.FLAT
        elif _channels_first(query):
            layout = map_layout or Layout.POSITIONS
    return Site(name, query.name, output.name, activation, layout, rank)


def _channels_first(tensor: gs.Tensor) -> bool:
    """Whether axis 1 holds the features: true behind convolutions and pooling."""
    while len(tensor.inputs) == 1:
        node = tensor.inputs[0]
        if node.op in _CHANNELS_FIRST:
            return True
        rule = behaviour(node.domain, node.op)
        elementwise = isinstance(rule, Rule) and (
            rule.activation or node.op in ("Add", "Sub", "Mul", "Div", "Dropout", "Cast", *_QUANTISERS)
        )
        if not elementwise:
            return False
        tensor = next((t for t in node.inputs if isinstance(t, gs.Variable) and t.inputs), node.inputs[0])
    return False


_CHANNELS_FIRST = {
    "Conv", "ConvTranspose", "BatchNormalization", "InstanceNormalization", "GroupNormalization", "MaxPool",
    "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "LpPool", "LRN", "Resize", "Upsample", "DepthToSpace",
    "SpaceToDepth", "ConvInteger", "QLinearConv", "QLinearAveragePool", "QLinearGlobalAveragePool",
}  # fmt: skip


# ----------------------------------------------------------------------- names


def _named(source: SourceModel, text: str) -> Site:
    name, layout = _split_layout(source, text)
    tensors = source.graph.tensors()
    for node in source.graph.nodes:
        if node.name == name or any(tensor.name == name for tensor in node.outputs):
            tensor = node.outputs[0] if node.name == name else tensors[name]
            if _is_activation(node) and _inside_quantised_layer(node) and tensor.name in twins(source.graph):
                return _checked(_at_tensor(tensors[twins(source.graph)[tensor.name]], layout), tensor, layout)
            activation = _activations(source.graph).get(id(node)) or (node if _is_activation(node) else None)
            site = _at_activation(activation, layout) if activation else _at_tensor(tensor, layout)
            return _checked(site, tensor, layout)
    if name in tensors and any(tensor.name == name for tensor in source.graph.inputs):
        return _checked(_at_tensor(tensors[name], layout), tensors[name], layout)
    near = difflib.get_close_matches(name, list(_candidates(source)), n=3, cutoff=0.5)
    hint = (
        f"did you mean {' or '.join(map(repr, near))}?"
        if near
        else "`gapa-onnx inspect MODEL` lists the names"
    )
    raise UserError(f"no node or tensor is called {name!r}", hint)


def _split_layout(source: SourceModel, text: str) -> tuple[str, Layout | None]:
    """`name:pooled` asks for a layout; a colon may also be part of the name."""
    name, colon, suffix = text.rpartition(":")
    if colon and text not in source.names and suffix in {layout.value for layout in Layout}:
        return name, Layout(suffix)
    return text, None


def _checked(site: Site, tensor: gs.Tensor, asked: Layout | None) -> Site:
    readers = tensor.outputs
    if len(readers) == 1 and _is_activation(readers[0]) and _inside_quantised_layer(readers[0]):
        raise UserError(
            f"{site.name!r} exists in whole numbers only: runtimes merge it into the {readers[0].op} behind it",
            f"name {readers[0].outputs[0].name!r} instead",
        )
    if not _holds_features(tensor):
        raise UserError(
            f"{site.name!r} does not hold floating-point numbers", "name an activation or a float tensor"
        )
    if site.rank == 0:
        raise UserError(f"{site.name!r} is a single number, not a vector of features", "name another tensor")
    if asked is not None and asked is not site.layout:
        raise UserError(
            f"{site.name!r} cannot be queried as {asked.value!r}: it is not a map of known rank with channels first",
            "leave the layout out, or use :flat on a tensor of known rank",
        )
    return site


def _candidates(source: SourceModel) -> Iterator[str]:
    for node in source.graph.nodes:
        if node.name:
            yield node.name
        yield from (tensor.name for tensor in node.outputs)
    yield from (tensor.name for tensor in source.graph.inputs)

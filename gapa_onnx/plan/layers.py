"""What a linear layer is: the operators whose rule says so, with weights that are known."""

from __future__ import annotations

import onnx_graphsurgeon as gs

from gapa_onnx.model.constants import constant_names, has_subgraph
from gapa_onnx.variance.rules import Rule, behaviour


def is_layer(node: gs.Node, constants: set[str]) -> bool:
    """A linear layer: weights known, data not. Control flow with a layer in its body counts as one:
    its interior tensors are out of reach, what goes in is not."""
    if has_subgraph(node):
        bodies = [value for value in node.attrs.values() if isinstance(value, gs.Graph)]
        return any(
            is_layer(inner, constants | constant_names(body)) for body in bodies for inner in body.nodes
        )
    rule = behaviour(node.domain, node.op)
    if not (isinstance(rule, Rule) and rule.linear):
        return False
    known = [node.inputs[at].name in constants for at in rule.operands if at < len(node.inputs)]
    return not known[0] if len(rule.operands) == 1 else any(known) and not all(known)

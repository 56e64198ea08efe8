"""Reading means without disturbing how onnxruntime computes them.

onnxruntime fuses groups of nodes when nothing else reads what lies between them, and a fused group may
round differently. A variance node that reads such an interior tensor would undo the fusion and change
the last bits of the predictions. So the source model is optimised once to see which tensors are left,
and a tensor that is not is computed again from those that are, if cheap nodes suffice:

    x = Sub(residual, y) is swallowed by a fused LayerNormalization   →   x/again = Sub(residual/tap, y/tap)
    x = Add(residual, y)                                              →   x/again = Sum(residual, y)

where t/tap = Sum(t), the identity in a form that common-subexpression elimination does not see through.
What would need a layer again (the input of a Relu that is fused into a convolution) is read as it is;
such fusions are known to round alike, and `verify` has the last word.
"""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import onnx
import onnxruntime as ort

from gapa_onnx.model.dtypes import is_float
from gapa_onnx.model.load import SourceModel
from gapa_onnx.model.opening import open_proto
from gapa_onnx.model.splice import OPAQUE_ADD, OPAQUE_IDENTITY
from gapa_onnx.model.weights import LARGE_TENSOR, is_outside
from gapa_onnx.sessions.runtime import session_options

WEIGHTS_ENTRY = "session.optimized_model_external_initializers_file_name"
LEAST_ENTRY = "session.optimized_model_external_initializers_min_size_in_bytes"
UNPACKED_ENTRY = "session.disable_prepacking"
MOST_NODES = 24  # computed again for one tensor

CHEAP = {
    "Abs", "Add", "Cast", "Clip", "Concat", "Div", "Dropout", "Elu", "Erf", "Exp", "Expand", "Flatten", "Gather",
    "HardSigmoid", "Identity", "LeakyRelu", "Log", "Max", "Min", "Mul", "Neg", "Pow", "Reciprocal", "ReduceMax",
    "ReduceMean", "ReduceSum", "Relu", "Reshape", "Shape", "Sigmoid", "Slice", "Softmax", "Softplus", "Split", "Sqrt",
    "Squeeze", "Sub", "Tanh", "Transpose", "Unsqueeze", "Where",
}  # fmt: skip


def protect(source: SourceModel, additions: onnx.GraphProto) -> None:
    """Let the additions read no tensor that onnxruntime's optimiser would otherwise fuse away."""
    left = _left_by_optimiser(source)
    if left is None:
        return
    again = _Again(source, left)
    for node in additions.node:
        for position, name in enumerate(node.input):
            node.input[position] = again.name_for(name)
    nodes = [*again.nodes, *additions.node]
    nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del additions.node[:]
    additions.node.extend(nodes)


class _Again:
    """Names to read in place of interior tensors, and the nodes that compute them again."""

    def __init__(self, source: SourceModel, left: frozenset[str]):
        self.nodes: list[onnx.NodeProto] = []
        self._left = left | {value.name for value in source.proto.graph.input}
        self._opset = source.opset
        self._constants = source.constants
        self._producers = {name: node for node in source.proto.graph.node for name in node.output if name}
        self._tensors = source.tensors
        self._order = {name: position for position, name in enumerate(self._producers)}
        self._renamed: dict[str, str] = {}
        self._taps: set[str] = set()

    def name_for(self, name: str) -> str:
        """The tensor itself where it may be read, else its second computation."""
        if name in self._renamed:
            return self._renamed[name]
        if self._is_readable(name):
            return name
        needed = self._needed(name)
        if needed is None:
            return name
        for node in needed:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            # Sum broadcasts from opset 8 on, and never takes whole numbers, such as those of shapes.
            opaque = node.op_type == "Add" and self._opset >= 8 and self._is_float(node.output[0])
            copy.op_type = OPAQUE_ADD if opaque else node.op_type
            for position, read in enumerate(node.input):
                copy.input[position] = self._renamed.get(read) or (read if opaque else self._tap(read))
            for position, made in enumerate(node.output):
                if made:
                    copy.output[position] = self._renamed[made] = f"{made}/again"
            copy.name = copy.output[0]
            self.nodes.append(copy)
        return self._renamed[name]

    def _is_readable(self, name: str) -> bool:
        return name in self._left or name in self._constants or name not in self._producers

    def _needed(self, name: str) -> list[onnx.NodeProto] | None:
        """The nodes to compute again, in order; None if that takes more than cheap ones."""
        needed: dict[int, onnx.NodeProto] = {}
        pending = [name]
        while pending:
            wanted = pending.pop()
            if not wanted or wanted in self._renamed or self._is_readable(wanted):
                continue
            node = self._producers[wanted]
            if node.op_type not in CHEAP or node.domain or len(needed) == MOST_NODES:
                return None
            if id(node) not in needed:
                needed[id(node)] = node
                pending.extend(node.input)
        return sorted(needed.values(), key=lambda node: self._order[next(o for o in node.output if o)])

    def _tap(self, name: str) -> str:
        if not name or name in self._constants or not self._is_float(name):
            return name
        tap = f"{name}/tap"
        if tap not in self._taps:
            self.nodes.append(onnx.helper.make_node(OPAQUE_IDENTITY, [name], [tap], tap))
            self._taps.add(tap)
        return tap

    def _is_float(self, name: str) -> bool:
        tensor = self._tensors.get(name)
        return tensor is not None and is_float(tensor.dtype)


@lru_cache(maxsize=1)  # settings that keep a budget are looked for on one source
def _left_by_optimiser(source: SourceModel) -> frozenset[str] | None:
    """Names of the tensors in the optimised source model; None if that cannot be found out."""
    proto = source.proto
    with tempfile.TemporaryDirectory(prefix="gapa-onnx-") as folder:
        options = session_options()
        # Layouts for one kind of processor come after this level; they rename tensors but keep groups.
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.add_session_config_entry(UNPACKED_ENTRY, "1")  # it never runs, and packing copies the weights
        options.optimized_model_filepath = str(Path(folder) / "optimised.onnx")
        if any(map(is_outside, proto.graph.initializer)):  # they leave the file that onnxruntime writes too
            options.add_session_config_entry(WEIGHTS_ENTRY, "optimised.weights")
            options.add_session_config_entry(LEAST_ENTRY, str(LARGE_TENSOR))
        try:
            open_proto(proto, options)
            optimised = onnx.load(options.optimized_model_filepath, load_external_data=False)
        except Exception:  # some models cannot be saved; they are read as they are
            return None
    return frozenset(name for node in optimised.graph.node for name in node.output)

"""What a model's tables say about its tokens: how many it knows, and how many a sequence has at most.

Tokens pick rows of a table of embeddings, and positions rows of another, or of a table of angles. The tables are
constants, so that their sizes are limits that are known before the model runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx

from gapa_onnx.data.spec import TokenLimits

_SAME_ROWS = ("Identity", "Cast", "DequantizeLinear", "CastLike")  # of a table
_SAME_NUMBERS = ("Identity", "Cast", "Reshape", "Unsqueeze", "Squeeze", "Expand", "Flatten")  # of what picks
_POSITIONS = ("Range",)
#: Operators with a table of positions: which of their inputs it is.
_ROTATING = {
    ("com.microsoft", "RotaryEmbedding"): 2,
    ("com.microsoft", "GroupQueryAttention"): 7,
    ("", "RotaryEmbedding"): 1,
}


class Tables:
    """The constant tables of a graph and who picks from them."""

    def __init__(self, graph: onnx.GraphProto):
        self._made: dict[str, onnx.NodeProto] = {name: node for node in graph.node for name in node.output}
        self._sizes: dict[str, tuple[int, ...]] = {t.name: tuple(t.dims) for t in graph.initializer}
        for node in graph.node:
            if node.op_type == "Constant":
                for attribute in node.attribute:
                    if attribute.HasField("t"):
                        self._sizes[node.output[0]] = tuple(attribute.t.dims)
        self._nodes = graph.node

    def limits(self, name: str) -> TokenLimits | None:
        """What the graph says of an input that picks rows of a table; None of any other."""
        rows = [rows for picks, rows in self._picking() if picks == name]
        return TokenLimits(min(rows), self._longest(), self._head_size()) if rows else None

    def _longest(self) -> int | None:
        """The positions of the smallest table of these; None where there is none, or positions are computed."""
        rows = [rows for picks, rows in self._picking() if self._are_positions(picks)]
        for node in self._nodes:
            at = _ROTATING.get((node.domain, node.op_type))
            if at is not None and at < len(node.input):
                size = self._size(node.input[at])
                rows += [size[0]] if size else []
        return min(rows, default=None)

    def _head_size(self) -> int | None:
        """By what attention is given: queries, keys and values side by side, or queries alone."""
        for node in self._nodes:
            if node.op_type == "GroupQueryAttention":
                heads = {attribute.name: attribute.i for attribute in node.attribute}
                together = heads["num_heads"] + (0 if node.input[1] else 2 * heads["kv_num_heads"])
                width = self._width(node.input[0])
                return None if width is None else width // together
        return None

    def _width(self, name: str) -> int | None:
        """The features of a linear layer's output, also with a bias; None of any other tensor."""
        node = self._made.get(name)
        if node is not None and node.op_type == "Add":
            return self._width(node.input[0]) or self._width(node.input[1])
        if node is None or node.op_type not in ("MatMul", "MatMulNBits"):
            return None
        told = [attribute.i for attribute in node.attribute if attribute.name == "N"]
        size = self._size(node.input[1])
        return told[0] if told else size[-1] if size else None

    def _picking(self) -> Iterator[tuple[str, int]]:
        """What picks rows of a table, followed back to where its numbers come from, and the rows."""
        for node in self._nodes:
            if node.op_type == "EmbedLayerNormalization":
                size = self._size(node.input[2])
                if size:
                    yield self._origin(node.input[0]), size[0]
            elif node.op_type in ("Gather", "GatherBlockQuantized") and _along_rows(node):
                packed = (
                    node.op_type == "GatherBlockQuantized"
                )  # several numbers in one, but one row of scales each
                size = self._size(node.input[2 if packed else 0])
                if size is not None and len(size) == 2:
                    yield self._origin(node.input[1]), size[0]

    def _are_positions(self, name: str) -> bool:
        """Whether numbers are 0, 1, 2 … along a sequence: an input of that name, a Range, or the first of a constant."""
        node = self._made.get(name)
        if node is None:
            return "position" in name.lower()
        if node.op_type == "Slice":
            return self._size(node.input[0]) is not None
        return node.op_type in _POSITIONS

    def _origin(self, name: str) -> str:
        node = self._made.get(name)
        while node is not None and node.op_type in _SAME_NUMBERS and node.input[0]:
            name = node.input[0]
            node = self._made.get(name)
        return name

    def _size(self, name: str) -> tuple[int, ...] | None:
        """The shape of a constant; None of what is computed from inputs."""
        turned = False
        node = self._made.get(name)
        while name not in self._sizes and node is not None and node.op_type in (*_SAME_ROWS, "Transpose"):
            turned ^= node.op_type == "Transpose"
            name = node.input[0]
            node = self._made.get(name)
        size = self._sizes.get(name)
        if turned and size is not None:
            return size[::-1] if len(size) == 2 else None
        return size


def _along_rows(node: onnx.NodeProto) -> bool:
    """Whether a Gather takes whole rows."""
    axes = [attribute.i for attribute in node.attribute if attribute.name in ("axis", "gather_axis")]
    return all(axis == 0 for axis in axes)

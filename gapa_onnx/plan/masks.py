"""Which positions are padding: the masks of a model, and which of its tensors they are for.

A mask is an input (N, T) that is called one, beside inputs with the same two axes: attention_mask beside input_ids. Or
it is the tensor that the setting `mask` names. Whether its ones or its zeros are padding is seen where the graph uses
it: what scores of attention are lowered by, or what features are multiplied with. Where that does not tell, a mask of
padding is taken to have ones there, and any other mask zeros.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.constants import constant_of
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.head import Head
from gapa_onnx.variance.masks import INVERTED, tensor_of
from gapa_onnx.variance.sites import Layout, Site

_CALLED_MASK = re.compile(r"mask(_?\d+)?(:\d+)?$", re.IGNORECASE)
_OTHER_MASKS = re.compile(r"head|global|loss|label|perm|special|image|pixel", re.IGNORECASE)
_OF_PADDING = re.compile(r"pad", re.IGNORECASE)
_MADE_UP = re.compile(r"unk__\d+$")  # names of shape inference
_SLIDING = ("Conv", "MaxPool", "AveragePool", "LpPool")
LOW = -1000.0  # what a score of attention is lowered by at padding, at least

Size = int | str | None


@dataclass(frozen=True)
class Mask:
    """A tensor (N, T) that tells padding from the rest."""

    name: str  #: with a `~` in front where its ones are padding, see `variance.masks`
    shape: tuple[Size, ...] | None


def find_masks(source: SourceModel, asked: str) -> tuple[Mask, ...]:
    """The masks of a model: `asked` is auto, none, or a tensor, with a `~` in front where its ones are padding."""
    if asked == "none":
        return ()
    if asked != "auto":
        return (_named(source, asked),)
    inputs = [tensor for tensor in source.graph.inputs if tensor.name not in source.constants]
    found = []
    for tensor in inputs:
        if _may_be_mask(tensor) and any(_goes_with(tensor, other) for other in inputs):
            ones_are_padding = _ones_are_padding(source, tensor.name)
            if ones_are_padding is not None:
                sign = INVERTED if ones_are_padding else ""
                found.append(Mask(sign + tensor.name, tuple(tensor.shape)))
    return tuple(found)


def with_mask(source: SourceModel, site: Site, masks: Sequence[Mask]) -> Site:
    """The site with the mask of its queries, where one of the masks is theirs."""
    shape = _shape(source, site.query)
    if site.layout is Layout.FLAT or not masks:
        return site
    if shape is not None and not site.in_order:
        shape = [shape[axis] for axis in (*site.others, site.axis)]  # the axes in the order of `arrange`
    if site.layout is Layout.POOLED:  # the mean is written into the graph, so that axes must be known
        fits = shape is not None and len(shape) > 2
        return replace(site, mask=_of_positions(masks, shape) if fits else None)
    return replace(site, mask=_of_positions(masks, shape) or _perhaps_of_rows(masks, shape))


def head_with_mask(source: SourceModel, head: Head, masks: Sequence[Mask]) -> Head:
    """The head with the mask of its positions, where it has some, and with that of lengths, where it has one score."""
    shape = _shape(source, head.output)
    if not masks or shape is None:
        return head
    if head.axis is not None:
        leading = [*shape[: head.axis], *shape[head.axis + 1 :]]
        mask = _of_positions(masks, leading) if len(leading) > 1 else None
        return replace(head, mask=mask) if len(leading) > 1 else replace(head, lengths=_of_lengths(masks))
    # Two axes of known sizes may agree by chance: a vector as wide as texts are long.
    told = len(shape) > 2 or (len(shape) == 2 and not isinstance(shape[1], int))
    return replace(head, mask=_of_positions(masks, shape) if told else None, lengths=_of_lengths(masks))


def _of_positions(masks: Sequence[Mask], shape: Sequence[Size] | None) -> str | None:
    """The mask whose two axes are the first two of a tensor; the first of several."""
    if shape is None or len(shape) < 2:
        return None
    return next((mask.name for mask in masks if mask.shape and all(map(_same, mask.shape, shape))), None)


def _perhaps_of_rows(masks: Sequence[Mask], shape: Sequence[Size] | None) -> str | None:
    """The mask of a tensor whose rows may be positions, as far as is known before the model runs: where sizes are
    open, the arrays tell (`variance.masks.valid_queries`)."""
    if len(masks) != 1:
        return None
    (mask,) = masks
    if shape is None or mask.shape is None:
        return mask.name
    merged = len(shape) == 2 and not _same(mask.shape[0], shape[0])  # rows of N·T positions
    several = len(shape) > 2 and all(_same(a, b) or _open(b) for a, b in zip(mask.shape, shape))
    return mask.name if merged or several else None


def _of_lengths(masks: Sequence[Mask]) -> str | None:
    """The mask that tells how long an input is; None where there are several, of a question and of its context."""
    return masks[0].name if len(masks) == 1 else None


def _same(a: Size, b: Size) -> bool:
    return a == b and not _nameless(a)


def _nameless(size: Size) -> bool:
    return size is None or size == "" or size == -1


def _open(size: Size) -> bool:
    """Whether nothing is known of a size: it has no name, or one that shape inference made up."""
    return _nameless(size) or (isinstance(size, str) and _MADE_UP.match(size) is not None)


def _shape(source: SourceModel, name: str) -> list[Size] | None:
    """The shape of a tensor, with a convolution's sizes called as those that it leaves as they are."""
    shape, kept = source.tensors[name].shape, source.once(_kept_sizes)
    return None if shape is None else [kept.get(size, size) for size in shape]


def _kept_sizes(source: SourceModel) -> dict[Size, Size]:
    """Sizes behind windows that slide over all positions and leave their number, and the same sizes before them.

    Shape inference makes up a new name for a size that has one, whatever the window.
    """
    kept: dict[Size, Size] = {}
    for node in source.graph.nodes:
        if node.op not in _SLIDING:
            continue
        before, after = node.inputs[0].shape, node.outputs[0].shape
        if before is None or after is None or len(before) != len(after):
            continue
        for a, b, leaves in zip(before[2:], after[2:], _leave_size(node, len(before) - 2)):
            if leaves and isinstance(b, str) and not _nameless(a):
                kept[b] = kept.get(a, a)
    return kept


def _leave_size(node: gs.Node, axes: int) -> list[bool]:
    """Along which axes a window meets each position once."""
    window = node.attrs.get("kernel_shape")
    if window is None and len(node.inputs) > 1 and node.inputs[1].shape is not None:
        window = node.inputs[1].shape[2:]
    if window is None or not all(isinstance(size, int) for size in window):
        return [False] * axes
    strides, dilations = (node.attrs.get(name, [1] * axes) for name in ("strides", "dilations"))
    padding = node.attrs.get("auto_pad", "NOTSET")
    pads = node.attrs.get("pads", [0] * 2 * axes) if padding == "NOTSET" else [0] * 2 * axes
    return [
        stride == 1 and (padding.startswith("SAME") or pads[at] + pads[at + axes] == dilation * (size - 1))
        for at, (size, stride, dilation) in enumerate(zip(window, strides, dilations))
    ]


# ------------------------------------------------------------------------- what is a mask


def _named(source: SourceModel, asked: str) -> Mask:
    """The mask that the user names."""
    name = tensor_of(asked.strip())
    tensor = source.tensors.get(name)
    if tensor is None or not name:
        near = difflib.get_close_matches(name, list(source.tensors), n=2, cutoff=0.5)
        hint = (
            f"did you mean {' or '.join(map(repr, near))}?"
            if near
            else "let `mask` be auto, none or a tensor"
        )
        raise UserError(f"`mask` names {name!r}, which is no tensor of the model", hint)
    if name in source.constants or (tensor.shape is not None and len(tensor.shape) != 2):
        what = "the same in every run" if name in source.constants else f"of {len(tensor.shape)} axes"
        raise UserError(
            f"`mask` names {name!r}, which is {what}; a mask has two axes, the rows and their positions",
            "name another tensor, or let `mask` be auto or none",
        )
    shape = None if tensor.shape is None else tuple(tensor.shape)
    if asked.strip().startswith(INVERTED):
        return Mask(INVERTED + name, shape)
    return Mask((INVERTED if _ones_are_padding(source, name) else "") + name, shape)


def _may_be_mask(tensor: gs.Tensor) -> bool:
    called = _CALLED_MASK.search(tensor.name) and not _OTHER_MASKS.search(tensor.name)
    return bool(called) and tensor.shape is not None and len(tensor.shape) == 2


def _goes_with(mask: gs.Tensor, other: gs.Tensor) -> bool:
    """Whether another input has the same rows and positions: token numbers, or their embeddings."""
    if other is mask or other.shape is None or _CALLED_MASK.search(other.name):
        return False
    # Files that leave all sizes open give them no names either.
    return len(other.shape) >= 2 and all(
        _same(a, b) or (_open(a) and _open(b)) for a, b in zip(mask.shape, other.shape)
    )


# ------------------------------------------------------------ whether its ones are padding

_MOVERS = ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape", "Expand", "Transpose", "Slice", "Tile", "Gather",
           "Flatten")  # fmt: skip
_ARITHMETIC: dict[str, Callable[[float, float], float]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": lambda a, b: a / b if b else float("inf"),
    "Equal": lambda a, b: float(a == b),
    "Greater": lambda a, b: float(a > b),
    "Less": lambda a, b: float(a < b),
    "GreaterOrEqual": lambda a, b: float(a >= b),
    "LessOrEqual": lambda a, b: float(a <= b),
    "And": lambda a, b: float(bool(a) and bool(b)),
    "Or": lambda a, b: float(bool(a) or bool(b)),
}
_ATTENDING = ("Attention", "MultiHeadAttention", "QAttention", "DecoderMaskedMultiHeadAttention")

#: What a tensor holds where the mask is 0, and where it is 1.
Pair = tuple[float, float]


def _ones_are_padding(source: SourceModel, name: str) -> bool | None:
    """Whether a mask has ones at padding; None where it is added to scores as it is, and so holds neither."""
    pairs: dict[str, Pair] = {name: (0.0, 1.0)}
    by_features: bool | None = None
    for node in source.graph.nodes:
        read = _read(node, pairs)
        if read is None:
            continue
        pair = _pair(node, pairs)
        added = _added(node, pairs) if pair is None else None
        if added in ((0.0, 1.0), (0.0, -1.0)):
            return by_features
        lowered = pair or added
        if lowered is not None and min(lowered) <= LOW < max(lowered):
            return lowered[1] < lowered[0]
        if node.op in _ATTENDING:
            return read == (1.0, 0.0)
        if pair is not None:
            pairs.update(dict.fromkeys((tensor.name for tensor in node.outputs), pair))
        elif node.op == "Mul" and by_features is None and set(read) == {0.0, 1.0}:
            by_features = read == (1.0, 0.0)
    return bool(_OF_PADDING.search(name)) if by_features is None else by_features


def _pair(node: gs.Node, pairs: dict[str, Pair]) -> Pair | None:
    """What a node makes of a mask; None where features come in."""
    if node.op in _MOVERS:
        return pairs.get(node.inputs[0].name)
    if node.op == "Not":
        zero, one = pairs[node.inputs[0].name]
        return float(not zero), float(not one)
    if node.op == "Where":
        return _chosen(node, pairs)
    if node.op not in _ARITHMETIC:
        return None
    a, b = (_known(tensor, pairs) for tensor in node.inputs)
    if a is None or b is None:  # another mask, such as the causal one, which may hide more
        return _read(node, pairs) if node.op in ("And", "Or") else None
    apply = _ARITHMETIC[node.op]
    return apply(a[0], b[0]), apply(a[1], b[1])


def _chosen(node: gs.Node, pairs: dict[str, Pair]) -> Pair | None:
    """Where: scores that are kept count as 0."""
    condition = pairs.get(node.inputs[0].name)
    if condition is None:
        return None
    held = [_known(tensor, pairs) for tensor in node.inputs[1:]]
    if held == [None, None]:
        return None
    yes, no = (one or (0.0, 0.0) for one in held)
    return (yes if condition[0] else no)[0], (yes if condition[1] else no)[1]


def _added(node: gs.Node, pairs: dict[str, Pair]) -> Pair | None:
    """What is added to features: the other way round where it is taken off them; None at other nodes."""
    if node.op not in ("Add", "Sub"):
        return None
    first, second = (pairs.get(tensor.name) for tensor in node.inputs)
    if second is not None and node.op == "Sub":
        return -second[0], -second[1]
    return first or second


def _read(node: gs.Node, pairs: dict[str, Pair]) -> Pair | None:
    """The first of a node's inputs that is made of the mask."""
    return next((pairs[tensor.name] for tensor in node.inputs if tensor.name in pairs), None)


def _known(tensor: gs.Tensor, pairs: dict[str, Pair]) -> Pair | None:
    """What a tensor holds, of a mask or as one constant number."""
    if tensor.name in pairs:
        return pairs[tensor.name]
    value = constant_of(tensor)
    if value is None or value.size != 1 or value.dtype.kind not in "fiub":
        return None
    number = float(np.asarray(value).reshape(()))
    return number, number

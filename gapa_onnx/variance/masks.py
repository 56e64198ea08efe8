"""Which positions of a sequence are padding, in a graph and in arrays.

A mask is a tensor (N, T) of the source. It is written as the tensor's name where its zeros are padding, and with a `~`
in front where its other numbers are, as in torch's key_padding_mask.
"""

from __future__ import annotations

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.model.load import SourceModel
from gapa_onnx.variance.graph import Value, VarianceGraph

INVERTED = "~"


def tensor_of(mask: str) -> str:
    """The tensor that a mask is made of."""
    return mask.removeprefix(INVERTED)


def is_inverted(mask: str) -> bool:
    """Whether what is not zero is padding."""
    return mask.startswith(INVERTED)


def valid_positions(mask: str, values: Array) -> Array:
    """Where there is no padding, as bool, from the values of the mask's tensor."""
    found: Array = (values == 0) if is_inverted(mask) else (values != 0)
    return found


def valid_in(graph: VarianceGraph, source: SourceModel, mask: str) -> Value:
    """Where there is no padding, as a tensor of bool (N, T)."""
    name = tensor_of(mask)
    held = graph.cast(graph.tensor(name, np.dtype(source.tensors[name].dtype or np.int64)), np.bool_)
    return graph.emit("Not", held) if is_inverted(mask) else held


def masked_mean(graph: VarianceGraph, value: Value, valid: Value, rank: int) -> Value:
    """The mean of (N, T, …) over the positions that are no padding -> (N, …); 0 where all are.

    What stands at padding may be an infinity or no number at all, so that it is not multiplied but left out.
    """
    spread = graph.unsqueeze(valid, list(range(2, rank))) if rank > 2 else valid
    kept = graph.where(spread, value, graph.constant(np.asarray(0, value.dtype)))
    count = graph.reduce("ReduceSum", graph.cast(spread, value.dtype), [1], keepdims=False)
    return graph.reduce("ReduceSum", kept, [1], keepdims=False) / graph.at_least(count, 1.0)


def pooled(graph: VarianceGraph, value: Value, valid: Value, rank: int) -> Value:
    """The mean of (N, T, …, d) over all positions that are no padding -> (N, d)."""
    if rank > 3:
        value = graph.reduce("ReduceMean", value, list(range(2, rank - 1)), keepdims=False)
    return masked_mean(graph, value, valid, 3)


def valid_queries(valid: Array | None, queries: Array) -> Array | None:
    """Which queries (…, d) are no padding, as (q,) for the rows of (q, d), from valid (N, T).

    None where the queries are not those of positions: neither their first two axes are (N, T), nor is their first
    one both of them in one.
    """
    leading = queries.shape[:-1]
    if valid is None or valid.ndim != 2:
        return None
    if leading[:2] == valid.shape:
        whole = np.broadcast_to(valid.reshape(*valid.shape, *(1,) * (len(leading) - 2)), leading)
        return np.array(whole).reshape(-1)
    return valid.reshape(-1) if leading == (valid.size,) else None

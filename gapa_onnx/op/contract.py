"""The contract of the `ai.gapa` operators: what goes in, what comes out, and what is promised.

Four operators, one per kind of index, share one formula. For a query z with neighbours
z̃_1 … z̃_K (the K nearest of M inducing points that the index can reach),

    s(z) = 1 − kᵀ (G + jitter·I)⁻¹ k,   k_i = r(z, z̃_i),   G_ij = r(z̃_i, z̃_j),
    r(a, b) = exp(−‖a − b‖² / (2 length_scale²)),

clamped to [0, 1]. s is the share of the prior variance that the calibration data leave
unexplained: 0 at an inducing point, 1 far from all of them. A query with a NaN or an infinity
gets s = NaN, never a confident number.

This is the only module that knows these names. The numpy reference (`reference`), the standard-ops
body (`function`) and the C++ kernel (runtime/src) are all tested against it.

Why four names and not one with an attribute: each kind is also a model-local function whose body
differs, and a function is found by its name. Why parameters are tensors and not attributes: before
opset 12 a function body cannot turn an attribute into a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DOMAIN = "ai.gapa"
VERSION = 1


@dataclass(frozen=True)
class Port:
    """One input or output of an operator."""

    name: str
    dtype: type
    shape: tuple[str, ...]  #: symbolic; "…" stands for any leading dimensions
    meaning: str


@dataclass(frozen=True)
class OpSchema:
    """One operator of the domain."""

    name: str
    index: str  #: flat, ivf, ivfpq or hnsw, as on the command line
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @property
    def constants(self) -> tuple[Port, ...]:
        """The inputs that are initializers: all but the query."""
        return self.inputs[1:]


_QUERY = Port("query", np.float32, ("…", "d"), "points of activation space, one per leading index")
_K = Port("k", np.int64, ("1",), "neighbours per query, 1 ≤ k ≤ M")
_LENGTH_SCALE = Port("length_scale", np.float32, (), "of the RBF kernel, > 0")
_JITTER = Port("jitter", np.float32, (), "added to the diagonal of G, > 0, relative to a prior variance of 1")
_POINTS = Port("points", np.float32, ("M", "d"), "the inducing points")
_CENTROIDS = Port("centroids", np.float32, ("L", "d"), "of the inverted lists")
_LIST_OFFSETS = Port(
    "list_offsets",
    np.int64,
    ("L+1",),
    "list l holds rows list_offsets[l] … list_offsets[l+1]-1; first 0, last M",
)
_NPROBE = Port(
    "nprobe", np.int64, ("1",), "lists searched per query, those of the nearest centroids, 1 ≤ nprobe ≤ L"
)

_COMMON = (_QUERY, _K, _LENGTH_SCALE, _JITTER)
_OUTPUTS = (
    Port("s", np.float32, ("…", "1"), "the unexplained share of the prior variance"),
    Port(
        "neighbours",
        np.int64,
        ("…", "k"),
        "rows of the inducing points, nearest first; -1 where a list ran out or the query is not finite",
    ),
)

SCHEMAS = {
    schema.index: schema
    for schema in (
        OpSchema("GapaActivation", "flat", (*_COMMON, _POINTS), _OUTPUTS),
        OpSchema(
            "GapaActivationIVF", "ivf", (*_COMMON, _POINTS, _CENTROIDS, _LIST_OFFSETS, _NPROBE), _OUTPUTS
        ),
        OpSchema(
            "GapaActivationIVFPQ",
            "ivfpq",
            (
                *_COMMON,
                Port("codes", np.uint8, ("M", "m"), "product-quantised residuals to the list's centroid"),
                Port("codebooks", np.float32, ("m", "256", "d/m"), "what a code stands for, per sub-vector"),
                _CENTROIDS,
                _LIST_OFFSETS,
                _NPROBE,
            ),
            _OUTPUTS,
        ),
        OpSchema(
            "GapaActivationHNSW",
            "hnsw",
            (
                *_COMMON,
                _POINTS,
                Port("levels", np.int32, ("M",), "levels of the graph that each point is on, ≥ 1"),
                Port(
                    "links",
                    np.int32,
                    ("E",),
                    "neighbour lists, point by point and level by level: 2·degree slots on level 0, "
                    "degree slots on each level above, unused slots -1",
                ),
                Port("degree", np.int64, ("1",), "links per point and level above level 0"),
                Port(
                    "entry_point", np.int64, ("1",), "row where the search starts; it is on the highest level"
                ),
                Port("ef", np.int64, ("1",), "candidates kept during the search; max(ef, k) is used"),
            ),
            _OUTPUTS,
        ),
    )
}
"""The operators by index kind. For IVFPQ the inducing points *are* the decoded codes."""

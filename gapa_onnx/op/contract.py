"""The contract of the `ai.gapa` operators: what goes in, what comes out, and what is promised.

Five operators, one per kind of index, share one formula. For a query z with neighbours
z̃_1 … z̃_K (the K nearest of M inducing points that the index can reach),

    s(z) = 1 − kᵀ (G + jitter·I)⁻¹ k,   k_i = r(z, z̃_i),   G_ij = r(z̃_i, z̃_j),
    r(a, b) = exp(−‖a − b‖² / (2 length_scale²)),

clamped to [0, 1]. s is the share of the prior variance that the calibration data leave
unexplained: 0 at an inducing point, 1 far from all of them. A query with a NaN or an infinity
gets s = NaN, never a confident number.

`GapaActivationLocal` differs in its neighbours: they are those of the nearest inducing point, not of the
query itself, so that everything that depends on them alone can be computed once, at load. They are listed
in the order of the neighbourhood; where the probed lists are empty there are none. `GapaActivationPrepared` is
the same operator of an even number of neighbours, with the inverse factor of each neighbourhood as one more tensor:
the portable body reads s from that without a loop, and in float32; the native kernel computes it by itself.

`GapaClasses` is for heads. A row is what has the same place but for its class. With m and v the means and
variances of its C logits,

    score = mean_c v,   probs = softmax(m / √(1 + π/8 · score)),

where the class that is the largest of `output`, the first of equal ones, gets the largest probability and all
others at most (1 − ε) times that, with ε that of float32: the source's prediction, whatever rounding does.
With the logits in descending order and ε_s the points (column r mod R for the logit of rank r),

    p_s = softmax(m + √v ε_s),  entropy = H(mean_s p_s),  aleatoric = mean_s H(p_s),
    epistemic = entropy − aleatoric = Σ_c (mean_s f(p_sc) − f(mean_s p_sc)) ≥ 0,   f(p) = p log p − p.

A row with a NaN gets NaN (its score only if the NaN is a variance); a mean below −1e30 counts as −1e30, a
class that is ruled out.

`GapaLeading` is for vocabularies: the k largest of C numbers, which heads are then computed for.

This is the only module that knows these names. The numpy reference (`reference`), the standard-ops
body (`function`) and the C++ kernel (runtime/src) are all tested against it.

Why several names and not one with an attribute: each kind is also a model-local function whose body
differs, and a function is found by its name. Why parameters are tensors and not attributes: before
opset 12 a function body cannot turn an attribute into a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DOMAIN = "ai.gapa"
VERSION = 1


PREPARED = "prepared"  #: the local index whose file holds the factors


@dataclass(frozen=True)
class Port:
    """One input or output of an operator."""

    name: str
    dtype: type[np.generic]
    shape: tuple[str, ...]  #: symbolic; "…" stands for any leading dimensions
    meaning: str


@dataclass(frozen=True)
class OpSchema:
    """One operator of the domain."""

    name: str
    index: str  #: flat, ivf, ivfpq, hnsw, local or prepared; "" for what has no index
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

_NEIGHBOURHOODS = Port(
    "neighbourhoods",
    np.int32,
    ("M", "N"),
    "rows of N points for each point, itself first; the first k count, k ≤ N",
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
        OpSchema(
            "GapaActivationLocal",
            "local",
            (*_COMMON, _POINTS, _NEIGHBOURHOODS, _CENTROIDS, _LIST_OFFSETS, _NPROBE),
            _OUTPUTS,
        ),
        OpSchema(
            "GapaActivationPrepared",
            PREPARED,
            (
                *_COMMON,
                _POINTS,
                _NEIGHBOURHOODS,
                _CENTROIDS,
                _LIST_OFFSETS,
                _NPROBE,
                Port("list_of_row", np.int32, ("M",), "the list of each point, as `list_offsets` says it"),
                Port(
                    "factors",
                    np.float32,
                    ("M", "N+1", "N/2"),
                    "L⁻¹ of each neighbourhood, with L Lᵀ = G + jitter·I; `factors` says how it is folded",
                ),
            ),
            _OUTPUTS,
        ),
    )
}
"""The operators by index kind. For IVFPQ the inducing points *are* the decoded codes. For local and prepared the
lists serve to find the nearest point; one list that holds them all makes that exact."""

CLASSES = OpSchema(
    "GapaClasses",
    "",
    (
        Port("mean", np.float32, ("…", "C", "…"), "logits"),
        Port("var", np.float32, ("…", "C", "…"), "their variances, ≥ 0"),
        Port("output", np.float32, ("…", "C", "…"), "the source's answer, whose first class is kept"),
        Port("points", np.float32, ("S", "R"), "what stands for Gaussian noise, see `heads.points`"),
        Port("axis", np.int64, ("1",), "where the classes are, 0 ≤ axis < rank of the logits"),
    ),
    (
        Port("probs", np.float32, ("…", "C", "…"), "the probabilities, largest where `output` is"),
        Port("entropy", np.float32, ("…",), "total uncertainty in nats"),
        Port("aleatoric", np.float32, ("…",), "what remains if the logits were known, ≥ 0"),
        Port("epistemic", np.float32, ("…",), "what knowing them would tell, ≥ 0"),
        Port("score", np.float32, ("…",), "mean variance"),
    ),
)

LEADING = OpSchema(
    "GapaLeading",
    "",
    (
        Port("x", np.float32, ("…", "C"), "numbers, such as the logits of a vocabulary"),
        Port("k", np.int64, ("1",), "how many are wanted, 1 ≤ k ≤ C"),
    ),
    (
        Port("values", np.float32, ("…", "k"), "the largest in descending order; a NaN counts as infinite"),
        Port("indices", np.int64, ("…", "k"), "where they are; the first of equal ones comes first"),
    ),
)

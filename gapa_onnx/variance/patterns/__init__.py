"""Composite patterns: several source nodes that spell out one standard operator.

Seen node by node, the factors of x·sigmoid(x) would count as independent, and the delta method would
be wrong. Here such groups are found before rules apply, and each is presented to the rule of the
operator that it spells out. Source nodes are not touched. A group that has the operators of a pattern and
still is not what the pattern spells is turned down, with a reason.

Where to look: `activations`, `normalisation`, `softmax` (with attention), `expectation`, `quantised` hold the patterns,
each a function that reads like its formula; `formula` and `reductions` are the vocabulary they are written
in; `composite` finds them in a graph.
"""

from __future__ import annotations

from gapa_onnx.variance.patterns import (  # noqa: F401  (they fill the list)
    activations,
    expectation,
    normalisation,
    quantised,
    softmax,
)
from gapa_onnx.variance.patterns.composite import (
    PATTERN_DOMAIN,
    PATTERNS,
    Composite,
    TurnedDown,
    find_composites,
    turned_down,
)

__all__ = ["PATTERNS", "PATTERN_DOMAIN", "Composite", "TurnedDown", "find_composites", "turned_down"]

"""Sequences and optionals, built and taken apart again."""

from __future__ import annotations

import numpy as np

from cases.framework import Given, case, certain, const, ints

ONE = Given(np.int64(1))
PAIR = "s = SequenceConstruct(a, b)"

case("SequenceConstruct", f"{PAIR}; y = ConcatFromSequence<axis=0>(s)", a=(2, 3), b=(1, 3))
case("SequenceConstruct", f"{PAIR}; y = ConcatFromSequence<axis=0>(s)", 11, a=certain(2, 3), b=(1, 3))
case("SequenceConstruct", f"{PAIR}; y = ConcatFromSequence<axis=1>(s)", a=(2, 3), b=const(2, 1))
case("ConcatFromSequence", f"{PAIR}; y = ConcatFromSequence<axis=1, new_axis=1>(s)", a=(2, 3), b=(2, 3))
case("SequenceAt", f"{PAIR}; y = SequenceAt(s, i)", a=certain(2, 3), b=(1, 3), i=ONE)
case("SequenceAt", f"{PAIR}; y = SequenceAt(s, i)", 11, a=(2, 3), b=(1, 3), i=Given(np.int64(-2)))
case("SequenceErase", f"{PAIR}; t = SequenceErase(s, i); y = ConcatFromSequence<axis=0>(t)",
     a=(2, 3), b=(1, 3), i=ONE)  # fmt: skip
case("SequenceErase", f"{PAIR}; t = SequenceErase(s); y = ConcatFromSequence<axis=0>(t)", a=(2, 3), b=(1, 3))
JOIN = "y = ConcatFromSequence<axis=0>(t)"
case("SequenceInsert", f"{PAIR}; t = SequenceInsert(s, c, i); {JOIN}", a=(2, 3), b=(1, 3), c=(1, 3), i=ONE)
case("SequenceInsert", f"{PAIR}; t = SequenceInsert(s, c); {JOIN}", 11, a=(2, 3), b=(1, 3), c=certain(1, 3))
# A sequence that is certain so far, however it was made.
case("SequenceInsert", f"{PAIR}; t = SequenceInsert(s, c); {JOIN}", a=const(2, 3), b=certain(1, 3), c=(1, 3))
case("SequenceInsert", f"r = SplitToSequence(a); s = SequenceErase(r, i); t = SequenceInsert(s, c, i); {JOIN}",
     a=certain(3, 2), c=(1, 2), i=ONE)  # fmt: skip
case("SequenceInsert", f"r = SequenceConstruct(a); q = SequenceInsert(r, a); s = Identity(q);"
     f"t = SequenceInsert(s, c, i); {JOIN}", 15, a=certain(3, 2), c=(1, 2), i=ONE)  # fmt: skip
case("SplitToSequence", "s = SplitToSequence(x); y = SequenceAt(s, i)", x=(3, 2), i=ONE)
case("SplitToSequence", "s = SplitToSequence<axis=1>(x, n); y = SequenceAt(s, i)", 11,
     x=(2, 5), n=ints(2, 3), i=ONE)  # fmt: skip
case("SplitToSequence", "s = SplitToSequence<axis=1, keepdims=0>(x); y = SequenceAt(s, i)", x=(2, 3), i=ONE)
case("Optional", "o = Optional(x); y = OptionalGetElement(o)", 15, x=(2, 3))
case("Optional", f"{PAIR}; o = Optional(s); t = OptionalGetElement(o); y = SequenceAt(t, i)", 15,
     a=(2, 3), b=(1, 3), i=ONE)  # fmt: skip
case("OptionalGetElement", "o = Optional(x); y = OptionalGetElement(o)", 18, x=(2, 3))
case("OptionalGetElement", "y = OptionalGetElement(x)", 18, x=(2, 3))

"""Scatter, top-k and other choices; retyping."""

from __future__ import annotations

import numpy as np

from cases.framework import Given, between, case, certain, const, ints, number

PLACES = ints(1, 0, 2, 0, 2, 1, shape=(2, 3))

case("Scatter", "y = Scatter(x, i, u)", 9, exact=True, x=(3, 3), i=PLACES, u=(2, 3))
case("Scatter", "y = Scatter<axis=1>(x, i, u)", 10, exact=True, x=(2, 4), i=PLACES, u=certain(2, 3))
case("ScatterElements", "y = ScatterElements(x, i, u)", 11, exact=True, x=(3, 3), i=PLACES, u=(2, 3))
case("ScatterElements", "y = ScatterElements<axis=-1>(x, i, u)", 13, exact=True,
     x=const(2, 4), i=PLACES, u=(2, 3))  # fmt: skip
case("ScatterElements", 'y = ScatterElements<reduction="add">(x, i, u)', 16, exact=True,
     x=(3, 3), i=ints(1, 1, 2, 1, 1, 2, shape=(2, 3)), u=(2, 3))  # fmt: skip
for kind in ("max", "min"):
    case("ScatterElements", f'y = ScatterElements<reduction="{kind}", axis=1>(x, i, u)', 18,
         x=(2, 4), i=ints(1, 1, 2, 3, 3, 0, shape=(2, 3)), u=(2, 3))  # fmt: skip
    case("ScatterND", f'y = ScatterND<reduction="{kind}">(x, i, u)', 18,
         x=(3, 2), i=ints(2, 0, 2, shape=(3, 1)), u=(3, 2))  # fmt: skip
case("ScatterND", "y = ScatterND(x, i, u)", 11, exact=True, x=(3, 2), i=ints(2, 0, shape=(2, 1)), u=(2, 2))
case("ScatterND", "y = ScatterND(x, i, u)", 13, exact=True,
     x=(3, 2), i=ints(2, 1, 0, 0, shape=(2, 2)), u=const(2))  # fmt: skip
case("ScatterND", 'y = ScatterND<reduction="add">(x, i, u)', 16, exact=True,
     x=certain(3, 2), i=ints(2, 2, shape=(2, 1)), u=(2, 2))  # fmt: skip
case("TensorScatter", "y = TensorScatter(x, u)", 24, x=(2, 2, 4, 3), u=(2, 2, 2, 3))
case("TensorScatter", 'y = TensorScatter<mode="circular">(x, u, i)', 24,
     x=certain(2, 2, 4, 3), u=(2, 2, 2, 3), i=ints(3, 1))  # fmt: skip

case("TopK", "y, i = TopK<axis=1>(x, k)", x=(2, 5, 3), k=ints(2))
case("TopK", "y, i = TopK<largest=0, sorted=0>(x, k)", x=(3, 5), k=ints(3))
case("TopK", "y, i = TopK(x, k)", 10, x=(3, 5), k=ints(2))
case("TopK", "y, i = TopK<axis=0>(x, k)", 10, x=(5, 2), k=ints(2))
case("TopK", "y, i = TopK<axis=1, k=3>(x)", 9, x=(2, 5, 3))
case("TopK", "y, i = TopK<k=2>(x)", 7, x=(3, 5))
case("OneHot", "y = OneHot(i, d, v)", 11, i=ints(1, 0, 2), d=Given(np.int64(3)), v=(2,))
case("OneHot", "y = OneHot<axis=0>(i, d, v)", 9, i=ints(1, 0, 2), d=Given(np.int64(3)), v=between(0, 1, 2))
case("Unique", "y, i, j, c = Unique(x)", x=(2, 3))
case("Unique", "y = Unique<sorted=0>(x)", 11, x=(6,))
case("Unique", "y = Unique<axis=1>(x)", x=(2, 3))

case("CastLike", "y = CastLike(x, t)", 15, x=(2, 3), t=const(1))
case("CastLike", "y = CastLike(x, t)", 19, x=(2, 3), t=number(1.0))

"""Operators that exist in patterns only; `test_patterns` has them as the source spells them."""

from __future__ import annotations

from cases.framework import between, case, const, define

define(  # with ε = 0: a function has no constants of its inputs' type
    "ai.gapa.pattern", "Normalization", "<axes>(x, scale, bias) => (y)",
    """m = ReduceMean<axes: ints = @axes>(x)
       d = Sub(x, m)
       s = Mul(d, d)
       v = ReduceMean<axes: ints = @axes>(s)
       r = Sqrt(v)
       u = Div(d, r)
       w = Mul(u, scale)
       y = Add(w, bias)""",
)  # fmt: skip
for axes, shape, parameter in (("[-2]", (2, 5, 3), (1, 5, 1)), ("[-3, -1]", (2, 3, 4), (3, 1))):
    case("Normalization", f"y = ai.gapa.pattern.Normalization<axes={axes}>(x, scale, bias)",
         x=shape, scale=const(*parameter), bias=const(*parameter))  # fmt: skip

define(
    "ai.gapa.pattern", "Centering", "<axes>(x) => (y)",
    "m = ReduceMean<axes: ints = @axes>(x)  y = Sub(x, m)",
)  # fmt: skip
case("Centering", "y = ai.gapa.pattern.Centering<axes=[-1]>(x)", x=(3, 4))
case("Centering", "y = ai.gapa.pattern.Centering<axes=[-1]>(x)", x=(3, 2))
case("Centering", "y = ai.gapa.pattern.Centering<axes=[-3, -2]>(x)", x=(2, 3, 2))

define(
    "ai.gapa.pattern", "SumNormalization", "<axes>(x) => (y)",
    "a = Constant<value_ints: ints = @axes>()  s = ReduceSum(x, a)  y = Div(x, s)",
)  # fmt: skip
case("SumNormalization", "y = ai.gapa.pattern.SumNormalization<axes=[-1]>(x)", x=between(0.2, 1.5, 3, 4))
case("SumNormalization", "y = ai.gapa.pattern.SumNormalization<axes=[-2]>(x)", x=between(0.2, 1.5, 2, 5, 3))

define(
    "ai.gapa.pattern", "SoftmaxExpectation", "<axis, keepdims>(x, w) => (y)",
    """p = Softmax<axis: int = @axis>(x)
       q = Mul(p, w)
       a = Constant<value_int: int = @axis>()
       one = Constant<value_ints: ints = [1]>()
       b = Reshape(a, one)
       y = ReduceSum<keepdims: int = @keepdims>(q, b)""",
)  # fmt: skip
for axis, keepdims, shape, weights in (
    (1, 1, (2, 5, 3), (1, 5, 1)),
    (-1, 0, (3, 4), (4,)),
    (1, 0, (2, 3, 2), (3, 1)),
    (-1, 1, (2, 2, 3), (2, 3)),
):
    case("SoftmaxExpectation", f"y = ai.gapa.pattern.SoftmaxExpectation<axis={axis}, keepdims={keepdims}>(x, w)",
         x=shape, w=const(*weights))  # fmt: skip

define(
    "ai.gapa.pattern", "SoftmaxMixture", "<axis>(x, w) => (y)",
    "p = Softmax<axis: int = @axis>(x)  y = MatMul(p, w)",
)  # fmt: skip
case("SoftmaxMixture", "y = ai.gapa.pattern.SoftmaxMixture<axis=-1>(x, w)", x=(3, 4), w=const(4, 2))
case("SoftmaxMixture", "y = ai.gapa.pattern.SoftmaxMixture<axis=-1>(x, w)", x=between(-4, 4, 2, 3, 5),
     w=const(5, 3, low=9, high=11))  # fmt: skip

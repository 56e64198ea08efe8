"""Groups of nodes that spell out one operator, in the ways in which exporters do.

A line is the operator's name and the nodes from x to y, in ONNX text form. `plain` says that the rules
applied node by node give the same variance: the pattern then is there for its name, or its numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx

from support.rule_checks import parse

#: Numbers and vectors that spellings may use by name.
CONSTANTS = """
    float zero = {0}, float half = {0.5}, float one = {1}, float two = {2}, float three = {3}, float six = {6},
    float neg_one = {-1}, float neg_half = {-0.5}, float sixth = {0.16666667}, float root2 = {1.4142135},
    float inv_root2 = {0.70710678}, float neg_inv_root2 = {-0.70710678}, float k = {0.7978845608},
    float cubic = {0.044715}, float quick = {1.702}, float eps = {0.00001}, float tiny = {0.000000000001},
    float slow = {0.2}, float fifth = {0.2}, float nth = {0.16666667}, float steep = {3},
    float[1] one1 = {1}, float[6] g = {0.5, -1.5, 2, 1, 0.7, 1.3}, float[6] b = {1, 2, 3, 4, 5, 6},
    float[6, 1] g6 = {0.5, -1.5, 2, 1, 0.7, 1.3}, float[1, 6] g_row = {0.5, -1.5, 2, 1, 0.7, 1.3},
    float[1, 6, 1, 1] bins = {0, 1, 2, 3, 4, 5}, float[6, 1, 1] bins3 = {0, 1, 2, 3, 4, 5},
    float[6, 2] pair = {0, 20, 1, 17, 2, 18, 3, 15, 4, 16, 5, 13},
    float[2, 6] rows = {0, 1, 2, 3, 4, 5, 20, 17, 18, 15, 16, 13},
    float[2, 6, 1, 1] maps = {0, 1, 2, 3, 4, 5, 20, 17, 18, 15, 16, 13},
    int64[1] last = {-1}, int64[1] first = {1}, int64[2] matrix = {2, 1}, int64[2] whole = {2, 6}
"""


@dataclass(frozen=True, eq=False)
class Spelling:
    """A group of nodes from x to y that is one operator."""

    op: str
    body: str
    opset: int = 17
    attrs: dict = field(default_factory=dict)
    inputs: tuple[str, ...] = ("x",)
    shape: tuple[int, ...] = (2, 6)
    makes: tuple[int, ...] | None = None  #: the shape of y; None: that of x
    plain: bool = False  #: True where the rules node by node give the same

    @property
    def id(self) -> str:
        return f"{self.op} | {' '.join(self.body.split())} | opset {self.opset}"

    def model(self, dtype: str = "float") -> onnx.ModelProto:
        x, y = (", ".join(map(str, shape)) for shape in (self.shape, self.makes or self.shape))
        text = f"m (float[{x}] x) => (float[{y}] y) <{CONSTANTS}> {{ {self.body} }}"
        model = parse(text.replace("float", dtype), self.opset)
        for node in model.graph.node:  # what the text says of casts to float is meant for any type
            for attribute in node.attribute:
                if node.op_type == "Cast" and attribute.i == onnx.TensorProto.FLOAT and dtype == "double":
                    attribute.i = onnx.TensorProto.DOUBLE
        return model

    def values(self) -> tuple[np.ndarray, np.ndarray]:
        """x and its variance; no x at a kink (0, ±3) and all distinct."""
        rng = np.random.default_rng(5)
        size = int(np.prod(self.shape))
        x = np.linspace(-3.7, 4.1, size)[rng.permutation(size)].reshape(self.shape)
        return x, 1e-6 * rng.uniform(0.5, 1.5, self.shape)


SPELLINGS: list[Spelling] = []


def spelling(op: str, *bodies: str, opsets: tuple[int, ...] = (17,), **more) -> None:
    SPELLINGS.extend(Spelling(op, body, opset, **more) for body in bodies for opset in opsets)


OLD_AND_NEW = (9, 11, 13, 17)

# ------------------------------------------------------------------------------ activations

spelling(
    "Swish",
    "s = Sigmoid(x) y = Mul(x, s)",
    "s = Sigmoid(x) y = Mul(s, x)",
    "i = Identity(x) s = Sigmoid(i) j = Cast<to=1>(s) y = Mul(x, j)",
    "i = Identity(x) s = Sigmoid(i) y = Mul(i, s)",
    "n = Neg(x) e = Exp(n) d = Add(one, e) y = Div(x, d)",
    "n = Neg(x) e = Exp(n) d = Add(e, one) s = Reciprocal(d) y = Mul(s, x)",
    "n = Neg(x) e = Exp(n) d = Add(e, one) s = Div(one, d) y = Mul(s, x)",
    opsets=(9, 17),
    attrs={"alpha": 1},
)
spelling(
    "Swish",
    "z = Mul(x, quick) s = Sigmoid(z) y = Mul(x, s)",
    "z = Mul(quick, x) s = Sigmoid(z) y = Mul(s, x)",
    "q = Constant<value: tensor = float {1.702}>() z = Mul(q, x) s = Sigmoid(z) y = Mul(s, x)",
    attrs={"alpha": 1.702},
)
spelling(
    "Sigmoid",
    "n = Neg(x) e = Exp(n) d = Add(one, e) y = Div(one, d)",
    "n = Neg(x) e = Exp(n) d = Add(e, one) y = Reciprocal(d)",
    plain=True,
)
spelling("Swish", "z = Div(x, two) s = Sigmoid(z) y = Mul(x, s)", attrs={"alpha": 0.5})

spelling(
    "HardSwish",
    "h = HardSigmoid<alpha=0.1666667, beta=0.5>(x) y = Mul(x, h)",
    "h = HardSigmoid<alpha=0.1666667, beta=0.5>(x) y = Mul(h, x)",
    "t = Add(x, three) r = Relu(t) c = Min(r, six) m = Mul(x, c) y = Div(m, six)",
    "t = Add(three, x) r = Max(t, zero) c = Min(six, r) m = Mul(c, x) y = Mul(sixth, m)",
    "t = Mul(x, sixth) u = Add(t, half) m = Max(u, zero) c = Min(m, one) y = Mul(x, c)",
    opsets=(9, 17),
)
for clip, opsets in (("Clip<min=0.0, max=6.0>(t)", (9,)), ("Clip(t, zero, six)", (11, 17))):
    spelling(
        "HardSwish",
        f"t = Add(x, three) c = {clip} m = Mul(x, c) y = Div(m, six)",
        f"t = Add(three, x) c = {clip} m = Mul(c, x) y = Mul(m, sixth)",
        f"t = Add(x, three) c = {clip} d = Div(c, six) y = Mul(x, d)",
        f"t = Add(x, three) c = {clip} d = Mul(sixth, c) y = Mul(d, x)",
        f"t = Add(x, three) c = {clip} d = Div(x, six) y = Mul(d, c)",
        f"i = Identity(x) t = Add(i, three) c = {clip} j = Identity(c) m = Mul(i, j) y = Div(m, six)",
        opsets=opsets,
    )
    spelling(
        "HardSigmoid",
        f"t = Add(x, three) c = {clip} y = Div(c, six)",
        f"t = Add(x, three) c = {clip} y = Mul(sixth, c)",
        opsets=opsets,
        attrs={"alpha": 1 / 6, "beta": 0.5},
        plain=True,
    )
spelling(
    "HardSigmoid",
    "t = Mul(x, fifth) u = Add(t, half) y = Clip(u, zero, one)",
    attrs={"alpha": 0.2, "beta": 0.5},
    plain=True,
)

ERF = "z = Div(x, root2) e = Erf(z) a = Add(e, one)"
spelling(
    "Gelu",
    f"{ERF} m = Mul(x, a) y = Mul(m, half)",
    f"{ERF} m = Mul(a, half) y = Mul(x, m)",
    f"{ERF} m = Mul(x, half) y = Mul(m, a)",
    f"{ERF} m = Mul(half, x) y = Mul(a, m)",
    f"{ERF} m = Mul(a, x) y = Div(m, two)",
    "z = Mul(x, inv_root2) e = Erf(z) a = Add(one, e) m = Mul(half, a) y = Mul(m, x)",
    "z = Mul(x, inv_root2) e = Erf(z) h = Mul(e, half) a = Add(h, half) y = Mul(a, x)",
    "z = Mul(x, neg_inv_root2) e = Erf(z) a = Sub(one, e) m = Mul(half, a) y = Mul(m, x)",
    "i = Identity(x) z = Div(i, root2) e = Erf(z) a = Add(e, one) m = Mul(i, a) y = Mul(m, half)",
    "h = Mul(x, half) z = Div(x, root2) e = Erf(z) f = Add(e, one1) y = Mul(h, f)",
    opsets=(9, 17),
)
TANH = "h = Tanh(i) a = Add(h, one)"
spelling(
    "Gelu",
    f"p = Pow(x, three) q = Mul(p, cubic) s = Add(x, q) i = Mul(s, k) {TANH} m = Mul(x, a) y = Mul(m, half)",
    f"p = Mul(x, x) q = Mul(p, x) r = Mul(cubic, q) s = Add(r, x) i = Mul(k, s) {TANH} m = Mul(half, a) y = Mul(x, m)",
    f"p = Mul(cubic, x) q = Mul(x, p) r = Mul(x, q) s = Add(x, r) i = Mul(k, s) {TANH} m = Mul(half, a) y = Mul(x, m)",
    f"u = Mul(x, k) p = Mul(x, x) q = Mul(p, cubic) s = Add(q, one) i = Mul(u, s) {TANH} m = Mul(half, x) y = Mul(m, a)",
    f"u = Mul(x, k) v = Mul(x, cubic) w = Mul(v, x) s = Add(one, w) i = Mul(s, u) {TANH} m = Mul(half, x) y = Mul(m, a)",
    opsets=(9, 17),
    attrs={"approximate": "tanh"},
)

spelling(
    "Mish",
    "p = Softplus(x) t = Tanh(p) y = Mul(x, t)",
    "p = Softplus(x) t = Tanh(p) y = Mul(t, x)",
    "e = Exp(x) a = Add(e, one) p = Log(a) t = Tanh(p) y = Mul(x, t)",
    "e = Exp(x) a = Add(one, e) p = Log(a) t = Tanh(p) y = Mul(t, x)",
    opsets=(9, 17),
)

spelling(
    "LeakyRelu",
    "a = Mul(x, slow) y = Max(x, a)",
    "a = Mul(slow, x) y = Max(a, x)",
    "n = Neg(x) p = Relu(x) q = Relu(n) s = Mul(q, slow) y = Sub(p, s)",
    "n = Mul(x, neg_one) p = Relu(x) q = Relu(n) s = Mul(q, slow) t = Neg(s) y = Add(t, p)",
    opsets=(9, 17),
    attrs={"alpha": 0.2},
    plain=True,
)
spelling(
    "LeakyRelu",
    "p = Relu(x) a = Abs(x) d = Sub(x, a) s = Mul(d, slow) t = Mul(s, half) y = Add(p, t)",
    "p = Relu(x) d = Sub(x, p) s = Mul(slow, d) y = Add(p, s)",
    opsets=(9, 17),
    attrs={"alpha": 0.2},
)
spelling(
    "PRelu",
    "p = Relu(x) a = Abs(x) d = Sub(x, a) s = Mul(g, d) t = Mul(s, half) y = Add(p, t)",
    "p = Relu(x) d = Sub(x, p) s = Mul(d, g) y = Add(s, p)",
    opsets=(9, 17),
    inputs=("x", "g"),
)
spelling(
    "PRelu",
    "n = Neg(x) p = Relu(x) q = Relu(n) s = Mul(g, q) y = Sub(p, s)",
    "n = Neg(x) p = Relu(x) q = Relu(n) s = Mul(g, q) y = Add(p, s)",
    opsets=(9, 17),
    inputs=("x", "g"),
    plain=True,
)

# --------------------------------------------------------------------------- normalisations

MEAN = "m = ReduceMean<axes=[1]>(x) d = Sub(x, m)"
MEAN18 = "m = ReduceMean(x, last) d = Sub(x, m)"
VARIANCE = "q = Pow(d, two) v = ReduceMean<axes=[1]>(q) w = Add(v, eps)"
LAYER = dict(opsets=OLD_AND_NEW, attrs={"axis": -1, "epsilon": 1e-5})
spelling(
    "LayerNormalization",
    f"{MEAN} {VARIANCE} s = Sqrt(w) y = Div(d, s)",
    f"{MEAN} q = Mul(d, d) v = ReduceMean<axes=[1]>(q) w = Add(eps, v) s = Sqrt(w) r = Reciprocal(s) y = Mul(d, r)",
    f"{MEAN} {VARIANCE} s = Sqrt(w) r = Div(one, s) y = Mul(r, d)",
    f"{MEAN} {VARIANCE} r = Pow(w, neg_half) y = Mul(d, r)",
    f"{MEAN} {VARIANCE} d2 = Sub(x, m) s = Sqrt(w) y = Div(d2, s)",
    f"{MEAN} d2 = Sub(x, m) q = Mul(d, d2) v = ReduceMean<axes=[1]>(q) w = Add(v, eps) s = Pow(w, half) y = Div(d, s)",
    "i = Identity(x) m = ReduceMean<axes=[1]>(i) n = Identity(m) d = Sub(i, n) e = Cast<to=1>(d)"
    f"{VARIANCE.replace('Pow(d', 'Pow(e')} s = Sqrt(w) y = Div(d, s)",
    "m = ReduceMean<axes=[1]>(x) d = Sub(x, m) p = Mul(x, x) pm = ReduceMean<axes=[1]>(p) mm = Mul(m, m) v = Sub(pm, mm)"
    "f = Max(v, zero) w = Add(f, eps) s = Sqrt(w) y = Div(d, s)",
    **LAYER,
)
spelling(
    "LayerNormalization",
    f"{MEAN18} q = Mul(d, d) v = ReduceMean(q, last) w = Add(v, eps) s = Sqrt(w) y = Div(d, s)",
    "t = ReduceSum<keepdims=0>(x, first) m0 = Mul(t, nth) m = Reshape(m0, matrix) d = Sub(x, m)"
    "q = Mul(d, d) t2 = ReduceSum<keepdims=0>(q, first) v0 = Div(t2, six) v = Unsqueeze(v0, last)"
    "w0 = Expand(v, whole) w = Add(w0, eps) s = Sqrt(w) y = Div(d, s)",
    opsets=(18,),
    attrs={"axis": -1, "epsilon": 1e-5},
)
spelling(
    "LayerNormalization",
    f"{MEAN} {VARIANCE} s = Sqrt(w) n = Div(d, s) y = Mul(n, g)",
    f"{MEAN} {VARIANCE} s = Sqrt(w) n = Mul(g, d) y = Div(n, s)",
    f"{MEAN} {VARIANCE} s = Sqrt(w) r = Reciprocal(s) n = Mul(r, g) y = Mul(d, n)",
    f"{MEAN} {VARIANCE} s = Sqrt(w) r = Reciprocal(s) n = Mul(r, g) xs = Mul(x, n) ms = Mul(m, n) y = Sub(xs, ms)",
    inputs=("x", "g"),
    **LAYER,
)
spelling(
    "LayerNormalization",
    f"{MEAN} {VARIANCE} s = Sqrt(w) n = Div(d, s) t = Mul(n, g) y = Add(t, b)",
    f"{MEAN} {VARIANCE} s = Sqrt(w) n = Div(d, s) t = Mul(g, n) y = Add(b, t)",
    f"{MEAN} {VARIANCE} s = Sqrt(w) r = Reciprocal(s) n = Mul(r, g) xs = Mul(x, n) ms = Mul(m, n)"
    "c = Sub(b, ms) y = Add(xs, c)",
    f"{MEAN} {VARIANCE} s = Sqrt(w) r = Reciprocal(s) n = Mul(g, r) xs = Mul(n, x) ms = Mul(n, m)"
    "c = Sub(b, ms) y = Add(c, xs)",
    inputs=("x", "g", "b"),
    **LAYER,
)
spelling(
    "LayerNormalization",
    f"{MEAN} {VARIANCE} s = Sqrt(w) n = Div(d, s) y = Add(n, b)",
    inputs=("x", "", "b"),
    **LAYER,
)
INSTANCE = (
    "m = ReduceMean<axes=[2, 3]>(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes=[2, 3]>(q) w = Add(v, eps)"
    "s = Sqrt(w) y = Div(d, s)"
)
spelling(
    "LayerNormalization",
    INSTANCE,
    shape=(2, 2, 2, 3),
    opsets=OLD_AND_NEW,
    attrs={"axis": -2, "epsilon": 1e-5},
)
spelling(
    "Normalization",
    INSTANCE.replace("[2, 3]", "[1, 2]"),
    shape=(2, 2, 2, 3),
    opsets=OLD_AND_NEW,
    attrs={"axes": [-3, -2], "epsilon": 1e-5, "centred": 1},
)
spelling(
    "Normalization",
    "m = ReduceMean<axes=[1]>(x) d = Sub(x, m) q = Mul(d, d) v = ReduceMean<axes=[1]>(q)"
    "w = Add(v, eps) s = Sqrt(w) r = Reciprocal(s) n = Mul(r, g6) y = Mul(d, n)",
    shape=(2, 6, 2),
    inputs=("x", "g6"),
    opsets=OLD_AND_NEW,
    attrs={"axes": [-2], "epsilon": 1e-5, "centred": 1},
)
SQUARE = "q = Pow(x, two) v = ReduceMean<axes=[1]>(q) w = Add(v, eps) s = Sqrt(w)"
spelling(
    "RMSNormalization",
    f"{SQUARE} y = Div(x, s)",
    f"{SQUARE} r = Reciprocal(s) y = Mul(r, x)",
    f"{SQUARE} r = Div(one, s) y = Mul(x, r)",
    **LAYER,
)
spelling(
    "RMSNormalization",
    f"{SQUARE} n = Div(x, s) y = Mul(g, n)",
    f"{SQUARE} r = Reciprocal(s) n = Mul(x, r) y = Mul(n, g)",
    inputs=("x", "g"),
    **LAYER,
)
spelling(
    "Normalization",
    SQUARE + "y = Div(x, s)",
    shape=(2, 6, 2),
    opsets=(9, 17),
    attrs={"axes": [-2], "epsilon": 1e-5, "centred": 0},
)
spelling("Centering", "m = ReduceMean<axes=[1]>(x) y = Sub(x, m)", opsets=OLD_AND_NEW, attrs={"axes": [-1]})

L2 = dict(attrs={"axis": -1, "p": 2})
spelling(
    "LpNormalization",
    "n = ReduceL2<axes=[1]>(x) y = Div(x, n)",
    "q = Mul(x, x) t = ReduceSumSquare<axes=[1]>(x) n = Sqrt(t) y = Div(x, n)",
    "n = ReduceL2<axes=[1]>(x) r = Reciprocal(n) y = Mul(x, r)",
    "n = ReduceL2<axes=[1]>(x) e = Max(n, tiny) y = Div(x, e)",
    "n = ReduceL2<axes=[1]>(x) e = Add(n, tiny) f = Expand(e, whole) y = Div(x, f)",
    opsets=OLD_AND_NEW,
    **L2,
)
spelling(
    "LpNormalization",
    "q = Pow(x, two) t = ReduceSum<axes=[1]>(q) n = Sqrt(t) y = Div(x, n)",
    "q = Mul(x, x) t = ReduceSum<axes=[1]>(q) f = Max(t, tiny) s = Sqrt(f) r = Reciprocal(s) y = Mul(x, r)",
    "n = ReduceL2<axes=[1]>(x) e = Clip<min=0.000001>(n) y = Div(x, e)",
    opsets=(9,),
    **L2,
)
spelling(
    "LpNormalization",
    "q = Pow(x, two) t = ReduceSum(q, last) n = Sqrt(t) y = Div(x, n)",
    "n = ReduceL2<axes=[-1]>(x) e = Clip(n, tiny) f = Expand(e, whole) y = Div(x, f)",
    "n = ReduceL2<axes=[-1], keepdims=0>(x) e = Unsqueeze(n, last) y = Div(x, e)",
    **L2,
)
spelling(
    "LpNormalization", "n = ReduceL1<axes=[0]>(x) y = Div(x, n)", opsets=(9, 17), attrs={"axis": -2, "p": 1}
)
spelling(
    "SumNormalization",
    "e = Exp(x) w = Mul(e, g) z = Abs(w) t = ReduceSum<axes=[1]>(z) y = Div(z, t)",
    opsets=(9,),
    inputs=("z",),
    attrs={"axes": [-1]},
)
spelling(
    "SumNormalization",
    "z = Abs(x) t = ReduceSum(z, last) u = Add(t, tiny) y = Div(z, u)",
    "z = Abs(x) t = ReduceSum<keepdims=0>(z, last) u = Unsqueeze(t, last) y = Div(z, u)",
    inputs=("z",),
    attrs={"axes": [-1]},
)

# ---------------------------------------------------------------------------------- softmax

spelling(
    "Softmax",
    "e = Exp(x) t = ReduceSum<axes=[1]>(e) y = Div(e, t)",
    "m = ReduceMax<axes=[1]>(x) d = Sub(x, m) e = Exp(d) t = ReduceSum<axes=[1]>(e) y = Div(e, t)",
    "m = ReduceMax<axes=[1]>(x) d = Sub(x, m) e = Exp(d) t = ReduceSum<axes=[1]>(e) r = Reciprocal(t) y = Mul(e, r)",
    opsets=(9, 11),
    attrs={"axis": 1},
)
spelling(
    "Softmax",
    "e = Exp(x) t = ReduceSum(e, last) y = Div(e, t)",
    "m = ReduceMax<axes=[1]>(x) d = Sub(x, m) e = Exp(d) t = ReduceSum(e, last) y = Div(e, t)",
    "m = ReduceMax<axes=[1], keepdims=0>(x) m1 = Reshape(m, matrix) m2 = Expand(m1, whole)"
    "d = Sub(x, m2) e = Exp(d) t = ReduceSum<keepdims=0>(e, first) t1 = Reshape(t, matrix) t2 = Expand(t1, whole)"
    "y = Div(e, t2)",
    opsets=(13, 17),
    attrs={"axis": 1},
)
spelling(
    "Softmax",
    "m = ReduceMax<axes=[1]>(x) d = Sub(x, m) e = Exp(d) t = ReduceSum(e, first) y = Div(e, t)",
    shape=(2, 4, 2),
    attrs={"axis": 1},
)
spelling(
    "LogSoftmax",
    "p = Softmax<axis=1>(x) y = Log(p)",
    "p = Softmax<axis=1>(x) q = Identity(p) y = Log(q)",
    opsets=OLD_AND_NEW,
    attrs={"axis": 1},
    plain=True,
)
spelling(
    "LogSoftmax", "l = ReduceLogSumExp<axes=[1]>(x) y = Sub(x, l)", opsets=OLD_AND_NEW, attrs={"axis": 1}
)
spelling(
    "LogSoftmax",
    "e = Exp(x) t = ReduceSum<axes=[1]>(e) l = Log(t) y = Sub(x, l)",
    "m = ReduceMax<axes=[1]>(x) d = Sub(x, m) e = Exp(d) t = ReduceSum<axes=[1]>(e) l = Log(t) y = Sub(d, l)",
    opsets=(9, 11),
    attrs={"axis": 1},
)
spelling(
    "LogSoftmax",
    "m = ReduceMax<axes=[1]>(x) d = Sub(x, m) e = Exp(d) t = ReduceSum(e, last) p = Div(e, t) y = Log(p)",
    "m = ReduceMax<axes=[1]>(x) d = Sub(x, m) e = Exp(d) t = ReduceSum(e, last) l = Log(t) y = Sub(d, l)",
    opsets=(13, 17),
    attrs={"axis": 1},
)

# -------------------------------------------------------- means under a softmax's distribution

SIDES = (2, 6, 4, 3)  #: samples, bins, sides of a box, anchors
spelling(
    "SoftmaxExpectation",
    "p = Softmax<axis=1>(x) y = Conv(p, bins)",
    "p = Softmax<axis=-3>(x) y = Conv<kernel_shape=[1, 1], strides=[1, 1], pads=[0, 0, 0, 0]>(p, bins)",
    "p = Softmax<axis=1>(x) q = Mul(bins, p) y = ReduceSum(q, first)",
    "p = Softmax<axis=1>(x) q = Mul(p, bins) y = ReduceSum(q, first)",
    "e = Exp(x) t = ReduceSum(e, first) p = Div(e, t) y = Conv(p, bins)",
    inputs=("x", "bins"),
    shape=SIDES,
    makes=(2, 1, 4, 3),
)
spelling(
    "SoftmaxExpectation",
    "p = Softmax<axis=1>(x) q = Mul(p, bins3) y = ReduceSum<keepdims=0>(q, first)",
    inputs=("x", "bins3"),
    shape=SIDES,
    makes=(2, 4, 3),
)
spelling(  # as exporters write a softmax along another axis than the last before opset 13
    "SoftmaxExpectation",
    "p = Softmax<axis=3>(x) t = Transpose<perm=[0, 3, 1, 2]>(p) y = Conv(t, bins)",
    "p = Softmax<axis=3>(x) s = Transpose<perm=[0, 1, 3, 2]>(p) t = Transpose<perm=[0, 2, 1, 3]>(s) y = Conv(t, bins)",
    opsets=(9, 12, 17),
    inputs=("x", "bins"),
    shape=(2, 4, 3, 6),
    makes=(2, 1, 4, 3),
    attrs={"axis": 3, "perm": [0, 3, 1, 2]},
)
spelling(
    "SoftmaxExpectation",
    "p = Softmax<axis=2>(x) y = MatMul(p, g)",
    "p = Softmax<axis=2>(x) c = Cast<to=1>(p) i = Identity(c) y = MatMul(i, g)",
    opsets=(9, 17),
    inputs=("x", "g"),
    shape=(2, 3, 6),
    makes=(2, 3),
)
spelling(
    "SoftmaxExpectation",
    'p = Softmax<axis=2>(x) y = Einsum<equation="b s k, k -> b s">(p, g)',
    "p = Softmax(x) q = Mul(p, g) y = ReduceSum<keepdims=0>(q, last)",
    inputs=("x", "g"),
    shape=(2, 3, 6),
    makes=(2, 3),
)
spelling(
    "SoftmaxExpectation",
    'p = Softmax<axis=1>(x) y = Einsum<equation="bks,k->bs">(p, g)',
    inputs=("x", "g"),
    shape=(2, 6, 3),
    makes=(2, 3),
)
spelling(
    "SoftmaxExpectation",
    "p = Softmax(x) y = MatMul(p, g6)",
    "p = Softmax(x) y = Gemm(p, g6)",
    "m = ReduceMax<axes=[1]>(x) d = Sub(x, m) e = Exp(d) t = ReduceSum(e, last) p = Div(e, t) y = MatMul(p, g6)",
    inputs=("x", "g6"),
    makes=(2, 1),
)
spelling(
    "SoftmaxExpectation",
    "p = Softmax(x) y = Gemm<transB=1>(p, g_row)",
    inputs=("x", "g_row"),
    makes=(2, 1),
)
spelling("SoftmaxMixture", "p = Softmax(x) y = MatMul(p, pair)", inputs=("x", "pair"), makes=(2, 2))
spelling("SoftmaxMixture", "p = Softmax(x) y = Gemm<transB=1>(p, rows)", inputs=("x", "rows"), makes=(2, 2))
spelling(
    "SoftmaxMixture",
    "p = Softmax<axis=1>(x) y = Conv(p, maps)",
    inputs=("x", "maps"),
    shape=SIDES,
    makes=(2, 2, 4, 3),
)

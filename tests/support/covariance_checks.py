"""What covariances are checked against, J diag(v) Jᵀ with J by central differences in float64, and the case
table of the pullbacks: one line per form of an operator."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import scipy.special
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from gapa_onnx.model.load import load
from gapa_onnx.model.splice import splice
from gapa_onnx.variance.covariance import output_covariance
from gapa_onnx.variance.propagation import propagate
from gapa_onnx.variance.sites import Layout, Site
from support.reference_ops import OPERATORS
from support.rule_checks import Erf, GlobalMaxPool, parse, session

SINGLE = np.float32
STEP = 1e-5  # central differences in float64 err by STEP² |f'''| / 6 + ε |f| / STEP, some 1e-10
#: Relative to √(Σ_ii Σ_jj): float32 errs by ε per operation, some tens of them, times the condition of
#: slopes such as 1 - y² (below 30 in the ranges used here): 20 · 30 · 6e-8.
TOLERANCE = 4e-5
FLOOR = 0.01  #: of the largest deviation: slopes below it are what is left of larger ones that cancel
SAMPLES = 3

#: ONNX's reference of p = 1, of axes before opset 13, and of asymmetric pads is another function.
IN_ONNXRUNTIME = {"LpNormalization", "Softmax", "MaxPool"}

Arrays = dict[str, np.ndarray]


class Gelu(OpRun):
    """ONNX's own computes in float32."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        if approximate == "tanh":
            return (x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),)
        return (x / 2 * (1 + scipy.special.erf(x / np.sqrt(2))),)


def at(*names: str) -> tuple[Site, ...]:
    return tuple(Site(name, name, name, None, Layout.ROWS, None) for name in names)


def with_covariance(model: onnx.ModelProto, sites: tuple[Site, ...], output: str = "y") -> onnx.ModelProto:
    """The model with outputs `cov` and `diag`; the own variance of a site t is an input `t/own`."""
    source = load(model)
    names = list(dict.fromkeys(site.output for site in sites))
    graph = propagate(source, (), lambda graph, site: None).graph
    own = {name: graph.tensor(f"{name}/own", SINGLE) for name in names}
    found = output_covariance(source, graph, sites, own, output)
    wanted = [graph.output(value, name) for value, name in zip(found, ("cov", "diag"))]
    infos = [onnx.helper.make_tensor_value_info(value.name, onnx.TensorProto.FLOAT, None) for value in wanted]
    spliced = splice(source.proto, graph.to_proto(wanted), infos)
    spliced.graph.input.extend(
        onnx.helper.make_tensor_value_info(f"{name}/own", onnx.TensorProto.FLOAT, None) for name in names
    )
    return spliced


def covariance(
    model: onnx.ModelProto, feeds: Arrays, own: Arrays, output: str = "y"
) -> tuple[np.ndarray, np.ndarray]:
    """Σ (N, C, C) and its diagonal in float32, by onnxruntime."""
    spliced = with_covariance(model, at(*own), output)
    given = {name: np.asarray(x, SINGLE) if x.dtype.kind == "f" else x for name, x in feeds.items()}
    given |= {f"{name}/own": np.asarray(v, SINGLE) for name, v in own.items()}
    return tuple(session(spliced).run(["cov", "diag"], given))


# ------------------------------------------------------------------- what it must be


def in_double(model: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, everything that is float32 in float64."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for info in (*copy.graph.input, *copy.graph.output):
        info.type.tensor_type.elem_type = onnx.TensorProto.DOUBLE
    for tensor in copy.graph.initializer:
        array = onnx.numpy_helper.to_array(tensor)
        if array.dtype == SINGLE:
            tensor.CopyFrom(onnx.numpy_helper.from_array(array.astype(np.float64), tensor.name))
    for attribute in (a for node in copy.graph.node if node.op_type == "Cast" for a in node.attribute):
        attribute.i = onnx.TensorProto.DOUBLE
    return copy


def cut_at(model: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """The model with a shift added to one of its tensors, so that its derivative can be asked for."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    made = -1
    for position, node in enumerate(copy.graph.node):
        if name in node.output:
            made = position
        node.input[:] = [f"{name}/shifted" if read == name else read for read in node.input]
    shift = onnx.helper.make_node("Add", [name, f"{name}/shift"], [f"{name}/shifted"])
    copy.graph.node.insert(made + 1, shift)
    info = onnx.helper.make_tensor_value_info(f"{name}/shift", onnx.TensorProto.DOUBLE, None)
    copy.graph.input.append(info)
    return copy


def jacobian(model: onnx.ModelProto, feeds: Arrays, name: str, shape: tuple, output: str) -> np.ndarray:
    """d output / d tensor, (N, C, elements), of a model of float64; samples must not see each other."""
    shifted = cut_at(in_double(model), name)
    if output not in [o.name for o in shifted.graph.output]:
        shifted.graph.output.append(onnx.helper.make_tensor_value_info(output, onnx.TensorProto.DOUBLE, None))
    if any(node.op_type in IN_ONNXRUNTIME for node in model.graph.node):
        reference = session(shifted)
    else:
        reference = ReferenceEvaluator(shifted, new_ops=[Erf, Gelu, GlobalMaxPool, *OPERATORS])
    feeds = {n: x.astype(np.float64) if x.dtype == SINGLE else x for n, x in feeds.items()}

    def run(shift: np.ndarray) -> np.ndarray:
        return np.asarray(reference.run([output], feeds | {f"{name}/shift": shift})[0])

    columns = []
    for position in np.ndindex(shape[1:]):
        shift = np.zeros(shape)
        shift[(slice(None), *position)] = STEP  # all samples at once
        columns.append((run(shift) - run(-shift)) / (2 * STEP))
    alone = np.zeros(shape)
    alone[0] = 0.1
    np.testing.assert_array_equal(run(alone)[1:], run(0 * alone)[1:])
    return np.stack(columns, axis=-1)


def expected(model: onnx.ModelProto, feeds: Arrays, own: Arrays, output: str = "y") -> np.ndarray:
    total = 0
    for name, var in own.items():
        slopes = jacobian(model, feeds, name, var.shape, output)
        total = total + np.einsum("nci,ni,nki->nck", slopes, var.reshape(len(var), -1), slopes)
    return total


def assert_close(found: np.ndarray, wanted: np.ndarray, tolerance: float = TOLERANCE) -> None:
    """To a tolerance relative to √(Σ_ii Σ_jj)."""
    std = np.sqrt(np.diagonal(wanted, axis1=1, axis2=2))
    std = np.maximum(std, FLOOR * std.max())
    assert found.shape == wanted.shape
    error = np.abs(found - wanted) / (std[:, :, None] * std[:, None, :])
    assert error.max() <= tolerance, f"off by {error.max():.2g} at {np.argwhere(error > tolerance)[0]}"


def assert_is_covariance(cov: np.ndarray, diag: np.ndarray) -> None:
    """Symmetric to the bit, no eigenvalue below rounding, the diagonal that was given out."""
    np.testing.assert_array_equal(cov, cov.transpose(0, 2, 1))
    np.testing.assert_array_equal(np.diagonal(cov, axis1=1, axis2=2), diag)
    assert np.all(diag >= 0)
    least = np.linalg.eigvalsh(cov.astype(np.float64)).min(axis=1)
    # Each entry errs by ε d of a product of two standard deviations: C times that for an eigenvalue.
    assert np.all(least >= -cov.shape[1] * 1e-6 * diag.max(axis=1))


# ----------------------------------------------------------------------- cases

Constants = dict[str, tuple[int, ...] | list[int] | int | float]


@dataclass(frozen=True, eq=False)
class Case:
    """One operator: `body` makes y (N, C), or z with more axes, from x.

    A constant is drawn where a tuple gives its shape, positive if its name starts with p; a list or an
    int is one of int64, a float is itself.
    """

    op_type: str
    body: str
    shape: tuple[int, ...] = (4,)  #: of one sample of x
    constants: Constants = field(default_factory=dict)
    low: float = -1.5
    high: float = 1.5
    opset: int = 17
    domain: str = ""

    @property
    def id(self) -> str:
        return f"{self.opset} {self.body}"

    def model(self) -> onnx.ModelProto:
        sizes = ", ".join(["N", *map(str, self.shape)])
        body = self.body if "y = " in self.body else f"{self.body} y = Flatten(z)"
        model = parse(f"m (float[{sizes}] x) => (float[N, C] y) {{ {body} }}", self.opset)
        rng = np.random.default_rng(len(body))
        for name, value in self.constants.items():
            if isinstance(value, tuple):
                sign = 1 if name.startswith("p") else rng.choice([-1, 1], value)
                array = np.asarray(rng.uniform(0.4, 1.4, value) * sign, SINGLE)
            else:
                array = np.asarray(value, SINGLE if isinstance(value, float) else np.int64)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
        return model

    def values(self) -> tuple[Arrays, Arrays]:
        """Inputs and own variances."""
        rng = np.random.default_rng(len(self.body) + 1)
        x = rng.uniform(self.low, self.high, (SAMPLES, *self.shape)).astype(SINGLE)
        return {"x": x}, {"x": rng.uniform(0.5, 1.5, x.shape).astype(SINGLE)}


def unary(call: str, low: float = -1.5, high: float = 1.5, opset: int = 17) -> Case:
    """Beside x itself, with which it covaries by its slope: a variance alone would not see the sign."""
    op_type = call.partition("<")[0]
    return Case(op_type, f"t = {call}(x) y = Concat<axis=1>(t, x)", low=low, high=high, opset=opset)


def case(op_type: str, body: str, shape: tuple[int, ...] = (4,), opset: int = 17, low: float = -1.5,
         high: float = 1.5, domain: str = "", **constants) -> Case:  # fmt: skip
    return Case(op_type, body, shape, constants, low, high, opset, domain)


MAP = (2, 5, 4)  #: channels, height, width
PATTERN = "ai.gapa.pattern"

CASES = [
    # one element at a time
    unary("Neg"), unary("Abs"), unary("Reciprocal", 0.5, 2), unary("Exp"), unary("Log", 0.3, 2),
    unary("Sqrt", 0.3, 2), unary("Erf"), unary("Sin"), unary("Cos"), unary("Tan", -1, 1),
    unary("Asin", -0.8, 0.8), unary("Acos", -0.8, 0.8), unary("Atan"), unary("Sinh"), unary("Cosh"),
    unary("Asinh"), unary("Acosh", 1.5, 3), unary("Atanh", -0.8, 0.8), unary("Relu"), unary("Sigmoid"),
    unary("Tanh"), unary("LeakyRelu<alpha=0.2>"), unary("ThresholdedRelu<alpha=0.3>"), unary("Elu<alpha=0.7>"),
    unary("Selu"), unary("Celu<alpha=0.8>", opset=12), unary("HardSigmoid", -4, 4), unary("HardSwish", -4, 4),
    unary("Softplus"), unary("Softsign"), unary("Gelu", opset=20), unary('Gelu<approximate="tanh">', opset=20),
    unary("Mish", opset=18), unary("Swish<alpha=1.5>", opset=24), unary("Shrink<lambd=0.6, bias=0.1>"),
    unary("Identity"), unary("Dropout"), unary("Cast<to=1>"),
    case("CastLike", "y = CastLike(x, c)", c=1.0),
    case("Clip", "y = Clip(x, lo, hi)", lo=-0.7, hi=0.6),
    case("Clip", "y = Clip<min=-0.7>(x)", opset=9),
    case("PRelu", "y = PRelu(x, c)", c=(4,)),
    # several operands, also ones that are spread
    case("Add", "s = ReduceMax<axes=[1]>(x) y = Add(x, s)"),
    case("Add", "y = Add(c, x)", c=(4,)),
    case("Sub", "t = Sigmoid(x) s = ReduceMean<axes=[1]>(t) y = Sub(s, x)"),
    case("Mul", "t = Cos(x) y = Mul(t, x)"),
    case("Mul", "y = Mul(x, x)"),
    case("Mul", "z = Mul(x, c)", (2, 3), c=(1, 2, 1)),
    case("Mul", "t = ReduceMax<axes=[1]>(x) z = Mul(x, t)", (2, 3)),
    case("Div", "t = Exp(x) y = Div(x, t)"),
    case("Div", "y = Div(c, x)", low=0.5, c=1.3),
    case("Mod", "y = Mod<fmod=1>(x, c)", low=1.5, high=1.9, c=0.6),
    case("Pow", "y = Pow(x, c)", low=0.4, c=(4,)),
    case("Pow", "y = Pow(x, k)", k=3),
    case("Sum", "t = Sin(x) y = Sum(x, t, c)", c=(4,)),
    case("Mean", "t = Sin(x) s = Cos(x) y = Mean(x, t, s)"),
    case("Max", "t = Cos(x) y = Max(x, t)"),
    case("Min", "t = Cos(x) y = Min(x, t, c)", c=(4,)),
    case("Where", "t = Cos(x) o = Greater(x, t) y = Where(o, x, c)", c=(4,)),
    case("Where", "t = Cos(x) o = Greater(x, t) s = ReduceMean<axes=[1]>(x) y = Where(o, t, s)"),
    case("Expand", "s = ReduceMean<axes=[1]>(x) t = Tanh(s) y = Expand(t, k)", k=[1, 3]),
    # matrices
    case("Gemm", "y = Gemm<alpha=0.5>(x, W, c)", W=(4, 3), c=(3,)),
    case("Gemm", "t = Tanh(x) s = Gemm<transB=1, beta=2.0>(t, W, x) y = Tanh(s)", W=(4, 4)),
    case("MatMul", "y = MatMul(x, W)", W=(4, 3)),
    case("MatMul", "t = MatMul(x, W) z = Tanh(t)", (2, 4), W=(4, 3)),
    case("MatMul", "z = MatMul(W, x)", (3, 2), W=(4, 3)),
    case("MatMul", "t = Transpose<perm=[0, 2, 1]>(x) s = Tanh(t) z = MatMul(s, x)", (3, 2)),
    case("MatMul", "z = MatMul(x, W)", (1, 3, 4), W=(2, 4, 3)),
    case("MatMul", "y = MatMul(x, c)", (3, 4), c=(4,)),
    case("BatchNormalization", "y = BatchNormalization(x, c, c, c, p)", c=(4,), p=(4,)),
    case("BatchNormalization", "z = BatchNormalization(x, c, c, c, p)", (4, 2, 1), c=(4,), p=(4,)),
    # windows
    case("Conv", "z = Conv(x, W)", MAP, W=(3, 2, 1, 1)),
    case("Conv", "z = Conv<pads=[1, 0, 1, 2], strides=[2, 3], dilations=[2, 1]>(x, W, c)", MAP, W=(3, 2, 2, 3), c=(3,)),
    case("Conv", 'z = Conv<group=2, auto_pad="SAME_LOWER", strides=[2, 2]>(x, W)', MAP, W=(4, 1, 3, 2)),
    case("Conv", 'z = Conv<auto_pad="SAME_UPPER">(x, W)', (2, 5), W=(3, 2, 2)),
    case("ConvTranspose", "z = ConvTranspose<strides=[2, 2], pads=[1, 0, 0, 1], output_padding=[1, 0]>(x, W)",
         (2, 2, 3), W=(2, 2, 3, 2)),
    case("AveragePool", "z = AveragePool<kernel_shape=[2, 2], strides=[2, 2]>(x)", MAP),
    case("AveragePool", "z = AveragePool<kernel_shape=[3, 2], pads=[1, 0, 1, 1], strides=[2, 1]>(x)", MAP),
    case("AveragePool", "z = AveragePool<kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1>(x)", MAP),
    case("MaxPool", "z = MaxPool<kernel_shape=[2, 2], strides=[2, 2]>(x)", MAP, 13),
    case("MaxPool", "z = MaxPool<kernel_shape=[3, 2], pads=[1, 0, 1, 1]>(x)", MAP),
    case("GlobalAveragePool", "z = GlobalAveragePool(x)", MAP),
    case("GlobalMaxPool", "z = GlobalMaxPool(x)", MAP),
    # reductions
    case("ReduceMean", "y = ReduceMean<axes=[2], keepdims=0>(x)", (3, 2)),
    case("ReduceMean", "z = ReduceMean(x, k)", (3, 2), 18, k=[-2, -1]),
    case("ReduceSum", "y = ReduceSum<keepdims=0>(x, k)", (3, 2), k=[1]),
    case("ReduceMax", "y = ReduceMax<axes=[1], keepdims=0>(x)", (3, 2)),
    case("ReduceMin", "z = ReduceMin<axes=[1]>(x)", (3, 2)),
    case("ReduceSumSquare", "y = ReduceSumSquare<axes=[1], keepdims=0>(x)", (3, 2)),
    case("ReduceL1", "y = ReduceL1<axes=[1], keepdims=0>(x)", (3, 2)),
    case("ReduceL2", "z = ReduceL2<axes=[1]>(x)", (3, 2)),
    case("ReduceLogSum", "y = ReduceLogSum<axes=[1], keepdims=0>(x)", (3, 2), low=0.2),
    case("ReduceLogSumExp", "y = ReduceLogSumExp<axes=[1], keepdims=0>(x)", (3, 2)),
    # moved elements
    case("Reshape", "t = Reshape(x, k) z = Softmax<axis=2>(t)", (6,), k=[0, 3, -1]),
    case("Reshape", "y = Reshape(x, k)", (2, 3), k=[-1, 6]),
    case("Flatten", "y = Flatten(x)", (2, 3)),
    case("Squeeze", "y = Squeeze(x, k)", (3, 1), k=[-1]),
    case("Unsqueeze", "t = Unsqueeze(x, k) z = Softmax<axis=-1>(t)", k=[1]),
    case("Transpose", "t = Transpose<perm=[0, 3, 1, 2]>(x) z = Softmax<axis=1>(t)", (2, 3, 2)),
    case("Concat", "t = Tanh(x) y = Concat<axis=1>(t, x, c)", c=(SAMPLES, 2)),
    case("Split", "a, b = Split<axis=1>(x, k) t = Tanh(b) y = Mul(a, t)", k=[2, 2]),
    case("Split", "a, b, c = Split<axis=-1>(x, k) y = Tanh(b)", k=[1, 2, 1]),
    case("Slice", "y = Slice(x, a, b, k)", a=[-3], b=[9], k=[1]),
    case("Slice", "y = Slice<axes=[1], starts=[1], ends=[3]>(x)", opset=9),
    case("Pad", "y = Pad(x, k)", k=[0, 1, 0, 2]),
    case("Pad", "y = Pad<pads=[0, 1, 0, 0]>(x)", opset=9),
    case("Gather", "y = Gather<axis=1>(x, k)", k=[2, 0, 2, -1]),
    case("Gather", "y = Gather<axis=1>(x, k)", (3, 2), k=-3),
    # normalisations
    case("Softmax", "y = Softmax(x)"),
    case("Softmax", "z = Softmax<axis=1>(x)", (3, 2)),
    case("Softmax", "z = Softmax<axis=1>(x)", (3, 2), 11),
    case("LogSoftmax", "y = LogSoftmax(x)"),
    case("LayerNormalization", "y = LayerNormalization(x, c, c)", c=(4,)),
    case("LayerNormalization", "z = LayerNormalization<axis=1>(x, c)", (2, 3), c=(2, 3)),
    case("RMSNormalization", "y = RMSNormalization(x, c)", opset=23, c=(4,)),
    case("SimplifiedLayerNormalization", "y = SimplifiedLayerNormalization(x, c)", c=(4,)),
    case("InstanceNormalization", "z = InstanceNormalization(x, c, c)", (2, 3, 2), c=(2,)),
    case("GroupNormalization", "z = GroupNormalization<num_groups=2>(x, c, c)", (4, 3), 21, c=(4,)),
    case("GroupNormalization", "z = GroupNormalization<num_groups=2>(x, c, c)", (4, 3), 18, c=(2,)),
    case("MeanVarianceNormalization", "z = MeanVarianceNormalization<axes=[1, 2]>(x)", (3, 2)),
    case("LpNormalization", "y = LpNormalization(x)"),
    case("LpNormalization", "y = LpNormalization<p=1>(x)"),
    # what is spelled out
    case("Normalization", "m = ReduceMean<axes=[1]>(x) d = Sub(x, m) q = Mul(d, d) s = ReduceMean<axes=[1]>(q) "
         "e = Add(s, c) r = Sqrt(e) z = Div(d, r)", (3, 2), domain=PATTERN, c=1e-3),
    case("Centering", "m = ReduceMean<axes=[1]>(x) y = Sub(x, m)", domain=PATTERN),
    case("SumNormalization", "m = ReduceSum(x, k) y = Div(x, m)", low=0.2, domain=PATTERN, k=[1]),
    case("Swish", "s = Sigmoid(x) y = Mul(s, x)"),
]  # fmt: skip

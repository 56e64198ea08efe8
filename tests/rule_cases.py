"""The case table of the variance rules: one line per form of an operator.

A case is the operator's name, a node in ONNX text form, and its inputs. To test a new rule, add a
line. What an input may be:

    x=(2, 3)                 uncertain, values of either sign, 0.2 ≤ |x| ≤ 1.8
    x=between(1, 2, 4, 5)    uncertain, of shape (4, 5), values in [1, 2]
    x=certain(2, 3)          an input of the model without variance
    w=const(6, 3)            an initializer of floats; const(3, low=1, high=2) chooses the range
    n=number(0.5)            an initializer: one float
    i=ints(0, 1)             an initializer of int64; ints(0, 1, shape=(1, 2)) shapes it
    m=truths(1, 0, 1)        an initializer of bools

Values are drawn on a grid in random order: no two of a tensor are equal, and none is near 0. A case
whose operator has kinks or a domain chooses its range such that no value lies at an edge.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

DEFAULT_OPSET = 17


# ------------------------------------------------------------------------ inputs


@dataclass(frozen=True)
class Drawn:
    """A float tensor whose values are drawn when the case is built."""

    shape: tuple[int, ...]
    low: float | None = None  #: None: either sign, 0.2 ≤ |x| ≤ 1.8
    high: float | None = None
    constant: bool = False
    uncertain: bool = False

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        size = int(np.prod(self.shape))
        low, high = (0.2, 1.8) if self.low is None else (self.low, self.high)
        step = (high - low) / size
        values = low + step * (rng.permutation(size) + rng.uniform(0.1, 0.9))
        if self.low is None:
            values = values * rng.choice([-1.0, 1.0], size)
        return values.reshape(self.shape)


@dataclass(frozen=True, eq=False)
class Given:
    """An initializer with these values."""

    values: np.ndarray


def between(low: float, high: float, *shape: int) -> Drawn:
    return Drawn(shape, low, high, uncertain=True)


def certain(*shape: int, low: float | None = None, high: float | None = None) -> Drawn:
    return Drawn(shape, low, high)


def const(*shape: int, low: float | None = None, high: float | None = None) -> Drawn:
    return Drawn(shape, low, high, constant=True)


def number(value: float) -> Given:
    return Given(np.float64(value))


def ints(*values: int, shape: tuple[int, ...] | None = None) -> Given:
    array = np.array(values, np.int64)
    return Given(array if shape is None else array.reshape(shape))


def truths(*values: int) -> Given:
    return Given(np.array(values, np.bool_))


# ------------------------------------------------------------------------- cases


@dataclass(frozen=True, eq=False)
class Case:
    """One node with its inputs, from which a model of any float type can be made."""

    op_type: str
    text: str
    opset: int
    tensors: dict[str, Drawn | Given]

    @property
    def id(self) -> str:
        drawn = {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, Drawn)}
        inputs = ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in drawn.items())
        return f"{self.text} | {inputs} | opset {self.opset}"

    @property
    def node(self) -> onnx.NodeProto:
        return onnx.parser.parse_node(self.text)

    @property
    def inputs(self) -> list[str]:
        """Names of what has to be fed."""
        return [n for n, t in self.tensors.items() if isinstance(t, Drawn) and not t.constant]

    @property
    def uncertain(self) -> list[str]:
        return [n for n, t in self.tensors.items() if isinstance(t, Drawn) and t.uncertain]

    @property
    def is_product(self) -> bool:
        """True where two independent uncertain tensors are multiplied."""
        factors = set(self.node.input[:2])
        return self.op_type in ("Mul", "MatMul", "Gemm") and len(factors & set(self.uncertain)) == 2

    @property
    def multiplies_itself(self) -> bool:
        """True for x·x, where the rule is of first order."""
        return self.op_type == "Mul" and len(set(self.node.input)) == 1

    def values(self) -> dict[str, np.ndarray]:
        """Every input, in float64; the same at each call."""
        rng = np.random.default_rng(zlib.crc32(self.id.encode()))
        return {n: t.draw(rng) if isinstance(t, Drawn) else t.values for n, t in self.tensors.items()}

    def model(self, dtype: type = np.float64, shapes: str = "static") -> onnx.ModelProto:
        """The model; `shapes` of its inputs are `static`, `symbolic` or of `unknown` rank."""
        values = {name: _cast(array, dtype) for name, array in self.values().items()}
        inputs, node = [], self.node
        for name in self.inputs:
            symbols = [f"{name}_{axis}" for axis in range(values[name].ndim)]
            shape = {"static": values[name].shape, "symbolic": symbols, "unknown": None}[shapes]
            inputs.append(helper.make_tensor_value_info(name, element_type(dtype), shape))
        initializers = [numpy_helper.from_array(values[n], n) for n in self.tensors if n not in self.inputs]
        outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
        graph = helper.make_graph([node], "case", inputs, outputs, initializers)
        imports = [helper.make_opsetid("", self.opset)]
        ir_version = max(8, helper.find_min_ir_version_for(imports))
        model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
        return onnx.shape_inference.infer_shapes(model)  # declares the types of the outputs

    def feeds(self, dtype: type) -> dict[str, np.ndarray]:
        values = self.values()
        return {name: values[name].astype(dtype) for name in self.inputs}


def element_type(dtype: type) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _cast(array: np.ndarray, dtype: type) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(dtype) if array.dtype == np.float64 else array


CASES: list[Case] = []


def case(op_type: str, text: str, opset: int = DEFAULT_OPSET, **tensors: tuple | Drawn | Given) -> None:
    """Add a line to the table."""
    drawn = {name: Drawn(t, uncertain=True) if isinstance(t, tuple) else t for name, t in tensors.items()}
    CASES.append(Case(op_type, text, opset, drawn))


# -------------------------------------------------------------------- arithmetic

case("Add", "y = Add(a, b)", a=(2, 3), b=(2, 3))
case("Add", "y = Add(a, b)", a=(1, 3), b=certain(2, 3))
case("Add", "y = Add(a, b)", a=const(4, 1, 3), b=(2, 1))
case("Add", "y = Add(a, b)", 7, a=(1, 3), b=certain(2, 3))
case("Add", "y = Add(a, b)", a=(2, 1), b=(1, 3))
case("Add", "y = Add(x, x)", x=(2, 3))
case("Sub", "y = Sub(a, b)", a=(2, 3), b=(3,))
case("Sub", "y = Sub(a, b)", a=certain(2, 3), b=(1, 3))
case("Sub", "y = Sub(x, x)", x=(2, 3))
case("Mul", "y = Mul(a, b)", a=(2, 3), b=(2, 3))
case("Mul", "y = Mul(a, b)", a=(1, 3), b=(2, 1))
case("Mul", "y = Mul(a, b)", a=(1, 3), b=certain(2, 3))
case("Mul", "y = Mul(a, b)", a=const(2, 3), b=(3,))
case("Mul", "y = Mul(x, x)", x=(2, 3))
case("Div", "y = Div(a, b)", a=(2, 3), b=(2, 3))
case("Div", "y = Div(a, b)", a=certain(2, 3), b=(1, 3))
case("Div", "y = Div(a, b)", a=(1, 3), b=const(2, 3))
case("Neg", "y = Neg(x)", x=(2, 3))
case("Abs", "y = Abs(x)", x=(2, 3))
case("Reciprocal", "y = Reciprocal(x)", x=(2, 3))
case("Exp", "y = Exp(x)", x=(2, 3))
case("Log", "y = Log(x)", x=between(0.3, 3, 2, 3))
case("Sqrt", "y = Sqrt(x)", x=between(0.3, 3, 2, 3))
case("Erf", "y = Erf(x)", x=(2, 3))
case("Pow", "y = Pow(x, n)", x=between(0.3, 2, 2, 3), n=number(2.5))
case("Pow", "y = Pow(x, n)", x=(2, 3), n=number(3.0))
case("Pow", "y = Pow(x, n)", x=(2, 3), n=ints(2, 1, 3))
case("Pow", "y = Pow(x, n)", 7, x=(2, 3), n=number(2.0))
case("Pow", "y = Pow(x, n)", x=between(0.3, 2, 1, 3), n=const(2, 3))
case("Sum", "y = Sum(a, b, c)", a=(2, 3), b=certain(2, 3), c=(1, 3))
case("Sum", "y = Sum(a, b)", a=(1, 3), b=certain(2, 3))
case("Sum", "y = Sum(x)", x=(2, 3))
case("Sum", "y = Sum(x, b, x)", x=(2, 3), b=(2, 3))
case("Mean", "y = Mean(a, b, c)", a=(2, 3), b=certain(2, 3), c=(1, 3))
case("Mean", "y = Mean(a, b)", 7, a=(2, 3), b=(2, 3))
case("Max", "y = Max(a, b)", a=(4, 3), b=(4, 3))
case("Max", "y = Max(a, b, c)", a=(4, 3), b=certain(1, 3), c=between(-1.05, 1.05, 4, 1))
case("Max", "y = Max(a, b)", 7, a=(4, 3), b=(4, 3))
case("Min", "y = Min(a, b)", a=(4, 3), b=(4, 3))
case("Min", "y = Min(a, b)", a=(4, 3), b=number(0.31))

# -------------------------------------------------------- trigonometric, hyperbolic

case("Sin", "y = Sin(x)", x=(2, 3))
case("Cos", "y = Cos(x)", x=(2, 3))
case("Tan", "y = Tan(x)", x=between(-1.2, 1.1, 2, 3))
case("Asin", "y = Asin(x)", x=between(-0.8, 0.9, 2, 3))
case("Acos", "y = Acos(x)", x=between(-0.8, 0.9, 2, 3))
case("Atan", "y = Atan(x)", x=(2, 3))
case("Sinh", "y = Sinh(x)", x=(2, 3))
case("Cosh", "y = Cosh(x)", x=(2, 3))
case("Asinh", "y = Asinh(x)", x=(2, 3))
case("Acosh", "y = Acosh(x)", x=between(1.2, 3, 2, 3))
case("Atanh", "y = Atanh(x)", x=between(-0.8, 0.9, 2, 3))

# ------------------------------------------------------------------- activations

case("Relu", "y = Relu(x)", x=(4, 5))
case("Relu", "y = Relu(x)", 7, x=(4, 5))
case("Sigmoid", "y = Sigmoid(x)", x=(4, 5))
case("Tanh", "y = Tanh(x)", x=(4, 5))
case("LeakyRelu", "y = LeakyRelu(x)", x=(4, 5))
case("LeakyRelu", "y = LeakyRelu<alpha=0.3>(x)", x=(4, 5))
case("LeakyRelu", "y = LeakyRelu<alpha=-0.5>(x)", x=(4, 5))
case("LeakyRelu", "y = LeakyRelu<alpha=0.0>(x)", x=(4, 5))
case("ThresholdedRelu", "y = ThresholdedRelu(x)", x=(4, 5))
case("ThresholdedRelu", "y = ThresholdedRelu<alpha=-0.77>(x)", x=(4, 5))
case("Elu", "y = Elu(x)", x=(4, 5))
case("Elu", "y = Elu<alpha=0.7>(x)", x=(4, 5))
case("Selu", "y = Selu(x)", x=(4, 5))
case("Selu", "y = Selu<alpha=1.2, gamma=0.8>(x)", x=(4, 5))
case("Celu", "y = Celu(x)", x=(4, 5))
case("Celu", "y = Celu<alpha=0.6>(x)", x=(4, 5))
case("HardSigmoid", "y = HardSigmoid(x)", x=between(-4, 4, 4, 5))
case("HardSigmoid", "y = HardSigmoid<alpha=0.3, beta=0.4>(x)", x=between(-4, 4, 4, 5))
case("HardSwish", "y = HardSwish(x)", x=between(-5, 5, 4, 5))
case("Softplus", "y = Softplus(x)", x=(4, 5))
case("Softsign", "y = Softsign(x)", x=(4, 5))
case("Gelu", "y = Gelu(x)", 20, x=(4, 5))
case("Gelu", 'y = Gelu<approximate="tanh">(x)', 20, x=(4, 5))
case("Mish", "y = Mish(x)", 18, x=(4, 5))
case("Swish", "y = Swish(x)", 24, x=(4, 5))
case("Swish", "y = Swish<alpha=1.7>(x)", 24, x=(4, 5))
case("Shrink", "y = Shrink(x)", x=(3, 5))
case("Shrink", "y = Shrink<lambd=0.77, bias=0.2>(x)", x=(4, 5))
case("PRelu", "y = PRelu(x, slope)", x=(2, 3, 4), slope=const(3, 1))
case("PRelu", "y = PRelu(x, slope)", x=(2, 3), slope=(1, 3))
case("PRelu", "y = PRelu(x, slope)", 7, x=certain(4, 3), slope=(3,))
case("Clip", "y = Clip(x, low, high)", x=(4, 5), low=number(-0.77), high=number(0.77))
case("Clip", "y = Clip(x, low)", x=(4, 5), low=number(-0.77))
case("Clip", "y = Clip(x, , high)", x=(4, 5), high=number(0.77))
case("Clip", "y = Clip(x)", x=(4, 5))
case("Clip", "y = Clip<min=-0.77, max=0.77>(x)", 7, x=(4, 5))
case("Clip", "y = Clip<max=0.77>(x)", 10, x=(4, 5))

# ------------------------------------------------------------------------- linear

case("MatMul", "y = MatMul(a, b)", a=(2, 3), b=const(3, 4))
case("MatMul", "y = MatMul(a, b)", a=const(2, 3), b=(3, 4))
case("MatMul", "y = MatMul(a, b)", a=(2, 3), b=(3, 4))
case("MatMul", "y = MatMul(a, b)", a=(2, 2, 3), b=const(3, 4))
case("MatMul", "y = MatMul(a, b)", a=(2, 1, 2, 3), b=(2, 3, 2))
case("MatMul", "y = MatMul(a, b)", a=(3,), b=const(3, 4))
case("Gemm", "y = Gemm(a, b)", a=(2, 3), b=const(3, 4))
case("Gemm", "y = Gemm(a, b, c)", a=(2, 3), b=const(3, 4), c=const(4))
case("Gemm", "y = Gemm<alpha=0.5, beta=3.0, transB=1>(a, b, c)", a=(2, 3), b=const(4, 3), c=const(4))
case("Gemm", "y = Gemm<alpha=0.5, beta=3.0, transA=1>(a, b, c)", a=(3, 2), b=(3, 4), c=(4,))
case("Gemm", "y = Gemm<beta=3.0>(a, b, c)", a=certain(2, 3), b=const(3, 4), c=(1, 4))
case("Gemm", "y = Gemm<beta=3.0>(a, b, c)", a=const(2, 3), b=(3, 4), c=(2, 1))
case("Gemm", "y = Gemm<alpha=2.0, beta=3.0>(a, b, c)", 7, a=(2, 3), b=const(3, 4), c=const(4))
case("Gemm", "y = Gemm<beta=3.0, transA=1, transB=1>(a, b, c)", 9, a=(3, 2), b=const(4, 3), c=(4,))
case("Conv", "y = Conv(x, w)", x=(2, 3, 4), w=const(2, 3, 2))
case("Conv", "y = Conv(x, w, b)", x=(1, 2, 4, 4), w=const(3, 2, 3, 3), b=const(3))
case("Conv", "y = Conv<pads=[1,1,1,1], group=2>(x, w)", x=(2, 4, 3, 3), w=const(6, 2, 3, 3))
case("Conv", "y = Conv<strides=[2,1], pads=[0,1,1,0]>(x, w)", x=(1, 2, 5, 4), w=const(2, 2, 3, 2))
case("Conv", "y = Conv<dilations=[2,2]>(x, w)", x=(1, 2, 5, 5), w=const(2, 2, 2, 2))
case("Conv", 'y = Conv<auto_pad="SAME_UPPER", strides=[2,2]>(x, w)', x=(1, 2, 5, 4), w=const(2, 2, 3, 3))
case("Conv", "y = Conv<pads=[1,0,0,0,1,0]>(x, w)", x=(1, 1, 3, 3, 2), w=const(2, 1, 2, 2, 2))
case("Conv", "y = Conv(x, w)", 7, x=certain(2, 2, 4), w=(2, 2, 2))
case("ConvTranspose", "y = ConvTranspose(x, w)", x=(1, 2, 3), w=const(2, 3, 2))
case("ConvTranspose", "y = ConvTranspose<strides=[2,2], pads=[1,1,1,1], output_padding=[1,0]>(x, w, b)",
     x=(1, 2, 3, 3), w=const(2, 2, 3, 3), b=const(2))  # fmt: skip
case("ConvTranspose", "y = ConvTranspose<group=2, dilations=[2]>(x, w)", x=(1, 4, 3), w=const(4, 1, 2))
case("BatchNormalization", "y = BatchNormalization(x, s, b, m, v)",
     x=(2, 3, 2), s=const(3), b=const(3), m=const(3), v=const(3, low=0.5, high=2))  # fmt: skip
case("BatchNormalization", "y = BatchNormalization<epsilon=0.1>(x, s, b, m, v)",
     7, x=(2, 3, 2, 2), s=const(3), b=const(3), m=const(3), v=const(3, low=0.5, high=2))  # fmt: skip
case("BatchNormalization", "y = BatchNormalization<epsilon=0.1>(x, s, b, m, v)",
     9, x=(4, 3), s=const(3), b=const(3), m=const(3), v=const(3, low=0.5, high=2))  # fmt: skip
case("BatchNormalization", "y = BatchNormalization<training_mode=0>(x, s, b, m, v)",
     14, x=(2, 3, 2), s=const(3), b=const(3), m=const(3), v=const(3, low=0.5, high=2))  # fmt: skip

# ------------------------------------------------------- reductions, pooling, softmax

case("ReduceSum", "y = ReduceSum(x, axes)", x=(2, 3, 4), axes=ints(0, 2))
case("ReduceSum", "y = ReduceSum<keepdims=0>(x, axes)", x=(2, 3, 4), axes=ints(-1))
case("ReduceSum", "y = ReduceSum(x)", x=(2, 3))
case("ReduceSum", "y = ReduceSum<noop_with_empty_axes=1>(x)", x=(2, 3))
case("ReduceSum", "y = ReduceSum<axes=[1], keepdims=0>(x)", 7, x=(2, 3, 4))
case("ReduceSum", "y = ReduceSum<axes=[-1]>(x)", 11, x=(2, 3, 4))
case("ReduceMean", "y = ReduceMean<axes=[0,2], keepdims=0>(x)", x=(2, 3, 4))
case("ReduceMean", "y = ReduceMean(x)", 7, x=(2, 3))
case("ReduceMean", "y = ReduceMean(x, axes)", 18, x=(2, 3, 4), axes=ints(1))
case("ReduceMean", "y = ReduceMean<noop_with_empty_axes=1>(x)", 18, x=(2, 3))
case("ReduceMax", "y = ReduceMax<axes=[1]>(x)", x=(2, 5, 3))
case("ReduceMax", "y = ReduceMax<keepdims=0>(x)", x=(2, 5))
case("ReduceMax", "y = ReduceMax<keepdims=0>(x, axes)", 18, x=(2, 5, 3), axes=ints(0, -1))
case("ReduceMax", "y = ReduceMax<noop_with_empty_axes=1>(x)", 18, x=(2, 5))
case("ReduceMin", "y = ReduceMin<axes=[0,1], keepdims=0>(x)", 11, x=(2, 5, 3))
case("ReduceMin", "y = ReduceMin(x, axes)", 18, x=(2, 5, 3), axes=ints(2))
case("GlobalAveragePool", "y = GlobalAveragePool(x)", x=(2, 3, 2, 3))
case("GlobalAveragePool", "y = GlobalAveragePool(x)", 7, x=(2, 3, 4))
case("GlobalMaxPool", "y = GlobalMaxPool(x)", x=(2, 3, 2, 3))
case("GlobalMaxPool", "y = GlobalMaxPool(x)", 7, x=(2, 3, 4))
case("AveragePool", "y = AveragePool<kernel_shape=[2]>(x)", x=(2, 2, 5))
case("AveragePool", "y = AveragePool<kernel_shape=[2,3], strides=[2,1]>(x)", x=(2, 2, 4, 4))
case("AveragePool", "y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(x)", x=(1, 2, 4, 4))
case("AveragePool", "y = AveragePool<kernel_shape=[3], pads=[1,2], count_include_pad=1>(x)", x=(2, 2, 5))
case("AveragePool", 'y = AveragePool<kernel_shape=[3,2], auto_pad="SAME_UPPER">(x)', x=(1, 2, 3, 4))
case("AveragePool", "y = AveragePool<kernel_shape=[3], strides=[2], pads=[1,1]>(x)", 7, x=(2, 2, 5))
case("AveragePool", "y = AveragePool<kernel_shape=[2], dilations=[2], pads=[1,1]>(x)", 19, x=(2, 2, 5))
case("MaxPool", "y = MaxPool<kernel_shape=[2]>(x)", x=(2, 2, 5))
case("MaxPool", "y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)", x=(2, 2, 4, 4))
case("MaxPool", "y = MaxPool<kernel_shape=[3,3], strides=[2,1], pads=[1,1,1,1]>(x)", x=(2, 2, 4, 4))
case("MaxPool", "y = MaxPool<kernel_shape=[2,2], dilations=[2,1]>(x)", x=(1, 2, 4, 4))
case("MaxPool", "y = MaxPool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x)", x=(2, 1, 5, 5))
case("MaxPool", "y = MaxPool<kernel_shape=[2,2,2]>(x)", x=(1, 2, 3, 3, 2))
case("MaxPool", "y = MaxPool<kernel_shape=[3], pads=[1,1]>(x)", 8, x=(2, 2, 5))
case("MaxPool", 'y, i = MaxPool<kernel_shape=[2,2], auto_pad="SAME_LOWER">(x)', x=(2, 2, 3, 4))
case("MaxPool", "y, i = MaxPool<kernel_shape=[2,2], storage_order=1>(x)", x=(2, 2, 3, 4))
case("Softmax", "y = Softmax(x)", x=(2, 3, 4))
case("Softmax", "y = Softmax<axis=1>(x)", x=(2, 3, 4))
case("Softmax", "y = Softmax(x)", 7, x=(2, 3, 2))
case("Softmax", "y = Softmax<axis=2>(x)", 11, x=(2, 3, 4))
case("Softmax", "y = Softmax<axis=-1>(x)", 12, x=(2, 3, 4))
case("LogSoftmax", "y = LogSoftmax(x)", x=(2, 3, 4))
case("LogSoftmax", "y = LogSoftmax<axis=0>(x)", x=(4, 3))
case("LogSoftmax", "y = LogSoftmax<axis=1>(x)", 9, x=(2, 3, 2))

# --------------------------------------------------------------------- structural

case("Identity", "y = Identity(x)", x=(2, 3))
case("Dropout", "y = Dropout(x)", x=(2, 3))
case("Dropout", "y, m = Dropout(x, r, t)", x=(2, 3), r=number(0.5), t=Given(np.bool_(False)))
case("Dropout", "y, m = Dropout<ratio=0.5>(x)", 10, x=(2, 3))
case("Dropout", "y = Dropout<ratio=0.5>(x)", 7, x=(2, 3))
case("Cast", "y = Cast<to=11>(x)", x=(2, 3))  # 11: double
case("Cast", "y = Cast<to=11>(x)", 7, x=(2, 3))
case("Reshape", "y = Reshape(x, s)", x=(2, 3, 4), s=ints(0, -1))
case("Flatten", "y = Flatten<axis=2>(x)", x=(2, 3, 4))
case("Flatten", "y = Flatten(x)", 7, x=(2, 3, 4))
case("Transpose", "y = Transpose<perm=[2,0,1]>(x)", x=(2, 3, 4))
case("Transpose", "y = Transpose(x)", x=(2, 3))
case("Squeeze", "y = Squeeze(x, axes)", x=(2, 1, 3, 1), axes=ints(1))
case("Squeeze", "y = Squeeze(x)", x=(2, 1, 3))
case("Squeeze", "y = Squeeze<axes=[1]>(x)", 11, x=(2, 1, 3))
case("Unsqueeze", "y = Unsqueeze(x, axes)", x=(2, 3), axes=ints(0, 3))
case("Unsqueeze", "y = Unsqueeze<axes=[1]>(x)", 7, x=(2, 3))
case("Slice", "y = Slice(x, s, e)", x=(4, 3), s=ints(1), e=ints(3))
case("Slice", "y = Slice(x, s, e, a, p)", x=(4, 5), s=ints(4, 0), e=ints(-10, 3), a=ints(1, 0), p=ints(-2, 2))
case("Slice", "y = Slice<axes=[1], starts=[1], ends=[3]>(x)", 9, x=(2, 4))
case("Split", "a, b = Split<axis=1>(x, s)", x=(2, 5), s=ints(2, 3))
case("Split", "a, b, c = Split(x)", x=(6, 2))
case("Split", "a, b = Split<axis=1, split=[1,3]>(x)", 7, x=(2, 4))
case("Split", "a, b = Split<axis=-1, num_outputs=2>(x)", 18, x=(2, 5))
case("Gather", "y = Gather<axis=1>(x, i)", x=(2, 4), i=ints(3, 0, 0))
case("GatherElements", "y = GatherElements<axis=1>(x, i)", x=(2, 3), i=ints(2, 0, 1, 1, shape=(2, 2)))
case("GatherND", "y = GatherND(x, i)", x=(2, 3, 2), i=ints(1, 2, 0, 1, shape=(2, 2)))
case("Expand", "y = Expand(x, s)", x=(3, 1), s=ints(2, 1, 4))
case("Tile", "y = Tile(x, r)", x=(2, 3), r=ints(2, 1))
case("DepthToSpace", "y = DepthToSpace<blocksize=2>(x)", x=(1, 4, 2, 3))
case("DepthToSpace", 'y = DepthToSpace<blocksize=2, mode="CRD">(x)', x=(1, 8, 2, 1))
case("SpaceToDepth", "y = SpaceToDepth<blocksize=2>(x)", x=(1, 2, 4, 2))
case("Compress", "y = Compress<axis=1>(x, m)", x=(2, 3), m=truths(1, 0, 1))
case("ReverseSequence", "y = ReverseSequence<batch_axis=0, time_axis=1>(x, n)", x=(2, 4), n=ints(2, 3))
case("Trilu", "y = Trilu<upper=0>(x, k)", x=(3, 4), k=Given(np.int64(1)))
case("Concat", "y = Concat<axis=1>(a, b)", a=(2, 3), b=(2, 1))
case("Concat", "y = Concat<axis=0>(a, b, c)", a=certain(1, 3), b=(2, 3), c=const(1, 3))
case("Concat", "y = Concat<axis=0>(a, b)", 7, a=certain(1, 3), b=(2, 3))
case("Concat", "y = Concat<axis=0>(x, x)", x=(2, 3))
case("Where", "y = Where(m, a, b)", m=truths(1, 0, 1), a=(2, 3), b=(2, 3))
case("Where", "y = Where(m, a, b)", m=truths(1, 0, 1), a=(2, 1), b=certain(3))
case("Where", "y = Where(m, a, b)", m=truths(1, 0, 1), a=number(0.0), b=(2, 3))
case("Pad", "y = Pad(x, p)", x=(2, 3), p=ints(1, 0, 0, 2))
case("Pad", "y = Pad(x, p, v)", x=(2, 3), p=ints(1, 0, -1, 2), v=number(5.0))
case("Pad", 'y = Pad<mode="reflect">(x, p)', x=(2, 4), p=ints(1, 2, 0, 1))
case("Pad", 'y = Pad<mode="edge">(x, p)', x=(2, 3), p=ints(1, 2, 0, 1))
case("Pad", "y = Pad(x, p, , a)", 18, x=(2, 3), p=ints(1, 2), a=ints(-1))
case("Pad", 'y = Pad<mode="wrap">(x, p)', 19, x=(2, 3), p=ints(1, 2, 0, 1))
case("Pad", "y = Pad<pads=[0,1,0,2], value=5.0>(x)", 7, x=(2, 3))
case("Pad", 'y = Pad<mode="edge", pads=[1,0,0,2]>(x)', 10, x=(2, 3))

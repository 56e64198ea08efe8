"""How a case of a variance rule is written; the tables are the modules beside this one.

A case is the operator's name, a node in ONNX text form, and its inputs. To test a new rule, add a
line. What an input may be:

    x=(2, 3)                 uncertain, values of either sign, 0.2 ≤ |x| ≤ 1.8
    x=between(1, 2, 4, 5)    uncertain, of shape (4, 5), values in [1, 2]
    x=certain(2, 3)          an input of the model without variance
    w=const(6, 3)            an initializer of floats; const(3, low=1, high=2) chooses the range
    n=number(0.5)            an initializer: one float
    i=ints(0, 1)             an initializer of int64; ints(0, 1, shape=(1, 2)) shapes it
    m=truths(1, 0, 1)        an initializer of bools
    s=singles(1, 2)          an initializer of float32, whatever the type of the model
    q=steps(2, 3)            uncertain whole numbers that stand for real ones, uint8 in [40, 215] unless told

Values are drawn on a grid in random order: no two of a tensor are equal, and none is near 0. A case
whose operator has kinks or a domain chooses its range such that no value lies at an edge.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gapa_onnx.model.shapes import infer_shapes

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


@dataclass(frozen=True)
class Steps(Drawn):
    """Whole numbers that are drawn when the case is built."""

    dtype: type = np.uint8

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        return rng.integers(self.low, self.high, self.shape, endpoint=True).astype(self.dtype)


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


def steps(
    *shape: int,
    low: int = 40,
    high: int = 215,
    dtype: type = np.uint8,
    constant: bool = False,
    certain: bool = False,
) -> Steps:
    return Steps(shape, low, high, constant, not constant and not certain, dtype)


def number(value: float) -> Given:
    return Given(np.float64(value))


def ints(*values: int, shape: tuple[int, ...] | None = None) -> Given:
    array = np.array(values, np.int64)
    return Given(array if shape is None else array.reshape(shape))


def singles(*values: float) -> Given:
    return Given(np.array(values, np.float32))


def truths(*values: int) -> Given:
    return Given(np.array(values, np.bool_))


# ------------------------------------------------------------------------- cases


@dataclass(frozen=True, eq=False)
class Case:
    """One node with its inputs, from which a model of any float type can be made.

    The text may hold further nodes, separated by `;`: what makes the node's inputs, such as a
    sequence, or takes its outputs apart. The outputs of the last are those of the model.
    """

    op_type: str
    text: str
    opset: int
    tensors: dict[str, Drawn | Given]
    exact: bool | None = None  #: for variances of any size; None: as the rule says of itself
    #: what the node computes but for rounding to whole numbers, from all its inputs by name; differences
    #: are then taken of this function, to which the node itself is held within half a step
    smooth: Callable[..., np.ndarray] | None = None
    tolerance: float | None = None  #: relative, where a rule reads slopes off rounded numbers

    @property
    def id(self) -> str:
        drawn = {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, Drawn)}
        inputs = ", ".join(f"{name}{list(tensor.shape)}" for name, tensor in drawn.items())
        return f"{self.text} | {inputs} | opset {self.opset}"

    @property
    def nodes(self) -> list[onnx.NodeProto]:
        return [onnx.parser.parse_node(text) for text in self.text.split(";")]

    @property
    def node(self) -> onnx.NodeProto:
        """The node that the case is about."""
        nodes = self.nodes
        return next((node for node in nodes if node.op_type == self.op_type), nodes[0])

    @property
    def outputs(self) -> list[str]:
        return [name for name in self.nodes[-1].output if name]

    @property
    def inputs(self) -> list[str]:
        """Names of what has to be fed."""
        return [n for n, t in self.tensors.items() if isinstance(t, Drawn) and not t.constant]

    @property
    def uncertain(self) -> list[str]:
        return [n for n, t in self.tensors.items() if isinstance(t, Drawn) and t.uncertain]

    @property
    def key(self) -> tuple[str, str]:
        """Domain and operator, as in the rule table."""
        return self.node.domain, self.op_type

    @property
    def is_product(self) -> bool:
        """True where two independent uncertain tensors, or halves of one, are multiplied."""
        anywhere = self.op_type == "Einsum" or self.op_type.startswith("QLinear")
        factors = set(self.node.input if anywhere else self.node.input[:2])
        products = ("Mul", "MatMul", "Gemm", "FusedMatMul", "TransposeMatMul", "SwiGLU", "Einsum")
        products += ("MatMulInteger", "QLinearMatMul", "QLinearMul")
        return self.op_type == "BiasSplitGelu" or (
            self.op_type in products and len(factors & set(self.uncertain)) >= 2
        )

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
            inputs.append(helper.make_tensor_value_info(name, element_type(values[name].dtype), shape))
        initializers = [numpy_helper.from_array(values[n], n) for n in self.tensors if n not in self.inputs]
        outputs = [onnx.ValueInfoProto(name=name) for name in self.outputs]
        graph = helper.make_graph(self.nodes, "case", inputs, outputs, initializers)
        imports = [helper.make_opsetid("", self.opset)]
        if node.domain:
            imports.append(helper.make_opsetid(node.domain, 1))
        ir_version = max(8, helper.find_min_ir_version_for(imports, ignore_unknown=True))
        model = helper.make_model(graph, opset_imports=imports, ir_version=ir_version)
        model.functions.extend(definitions(model))
        model = infer_shapes(model)  # declares the types of the outputs
        del model.functions[:]
        return model

    def feeds(self, dtype: type) -> dict[str, np.ndarray]:
        values = self.values()
        return {name: _cast(values[name], dtype) for name in self.inputs}


def element_type(dtype: type) -> int:
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _cast(array: np.ndarray, dtype: type) -> np.ndarray:
    array = np.asarray(array)
    return array.astype(dtype) if array.dtype == np.float64 else array


CASES: list[Case] = []
#: For operators that onnxruntime has no kernel for on a CPU: what they are, in ONNX text form.
DEFINITIONS: dict[tuple[str, str], str] = {}


def case(
    op_type: str,
    text: str,
    opset: int = DEFAULT_OPSET,
    exact: bool | None = None,
    smooth: Callable[..., np.ndarray] | None = None,
    tolerance: float | None = None,
    **tensors: tuple | Drawn | Given,
) -> None:
    """Add a line to the table."""
    drawn = {name: Drawn(t, uncertain=True) if isinstance(t, tuple) else t for name, t in tensors.items()}
    CASES.append(Case(op_type, text, opset, drawn, exact, smooth, tolerance))


def define(domain: str, op_type: str, signature: str, body: str) -> None:
    """Spell an operator out in standard ones: `define("d", "F", "(x, b) => (y)", "y = Add(x, b)")`."""
    DEFINITIONS[domain, op_type] = f"{signature} {{ {body} }}"


def definitions(model: onnx.ModelProto) -> list[onnx.FunctionProto]:
    """The operators of a model that are spelled out here."""
    opset = next(entry.version for entry in model.opset_import if not entry.domain)
    keys = {(node.domain, node.op_type) for node in model.graph.node}
    return [
        onnx.parser.parse_function(
            f'<opset_import: ["" : {opset}], domain: "{domain}"> {op_type} {DEFINITIONS[domain, op_type]}'
        )
        for domain, op_type in sorted(keys & set(DEFINITIONS))
    ]

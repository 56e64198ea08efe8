"""Pipelines of scikit-learn as skl2onnx writes them, small and by hand; skl2onnx itself is not needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

ML = "ai.onnx.ml"
FLOAT, INT, TEXT = TensorProto.FLOAT, TensorProto.INT64, TensorProto.STRING


@dataclass
class Pipeline:
    """Nodes one after another, inputs and outputs as they come."""

    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    outputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def input(self, name: str, width: int, kind: int = FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, [None, width]))
        return name

    def weight(self, name: str, array: Any, dtype: Any = np.float32) -> str:
        self.weights.append(onnx.numpy_helper.from_array(np.asarray(array, dtype), name))
        return name

    def node(
        self, op: str, inputs: Sequence[str], outputs: Sequence[str], domain: str = "", **attrs: Any
    ) -> str:
        self.nodes.append(
            helper.make_node(op, list(inputs), list(outputs), name=outputs[-1], domain=domain, **attrs)
        )
        return outputs[-1]

    def ml(self, op: str, inputs: Sequence[str], outputs: Sequence[str], **attrs: Any) -> str:
        return self.node(op, inputs, outputs, ML, **attrs)

    def output(self, name: str, *shape: int | None, kind: int = FLOAT) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, kind, list(shape)))

    def zipped(self, tensor: str, classes: int) -> None:
        """`output_probability`: a list of maps, one for each row."""
        self.ml("ZipMap", [tensor], ["output_probability"], classlabels_int64s=list(range(classes)))
        value = helper.make_tensor_type_proto(FLOAT, [])
        maps = helper.make_sequence_type_proto(helper.make_map_type_proto(INT, value))
        self.outputs.append(helper.make_value_info("output_probability", maps))

    def model(self) -> onnx.ModelProto:
        graph = helper.make_graph(self.nodes, "pipeline", self.inputs, self.outputs, self.weights)
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


@dataclass(frozen=True)
class Linear:
    """The scores of a linear classifier: x Wᵀ + b."""

    weights: np.ndarray  #: W (e, d)
    bias: np.ndarray  #: (e,)

    @classmethod
    def random(cls, scores: int, width: int, seed: int = 0) -> Linear:
        generator = np.random.default_rng(seed)
        weights = generator.normal(size=(scores, width)).astype(np.float32)
        return cls(weights, generator.normal(size=scores).astype(np.float32))

    def scores(self, x: np.ndarray) -> np.ndarray:
        return x.astype(np.float64) @ self.weights.T.astype(np.float64) + self.bias

    @property
    def attrs(self) -> dict[str, list[float]]:
        return {"coefficients": self.weights.ravel().tolist(), "intercepts": self.bias.tolist()}


def logistic_regression(
    linear: Linear, classes: int, transform: str = "SOFTMAX", *, normalised: bool = True, zipmap: bool = False
) -> onnx.ModelProto:
    """LinearClassifier, Normalizer and ZipMap, as LogisticRegression and many others are exported."""
    made, width = Pipeline(), linear.weights.shape[1]
    made.input("X", width)
    labels = list(range(classes))
    made.ml(
        "LinearClassifier", ["X"], ["label", "raw" if normalised else "probabilities"],
        classlabels_ints=labels, post_transform=transform, multi_class=int(classes > 2), **linear.attrs,
    )  # fmt: skip
    if normalised:
        made.ml("Normalizer", ["raw"], ["probabilities"], norm="L1")
    made.output("label", None, kind=INT)
    if zipmap:
        made.zipped("probabilities", classes)
    else:
        made.output("probabilities", None, classes)
    return made.model()


def sigmoid_pair(linear: Linear, *, zipmap: bool = False, scaled: bool = True) -> onnx.ModelProto:
    """Sigmoid, then (1 - p, p) and the label by ArgMax, as binary MLPClassifier and SGDClassifier are exported."""
    made, width = Pipeline(), linear.weights.shape[1]
    made.input("X", width)
    x = "X"
    if scaled:
        x = made.ml("Scaler", ["X"], ["scaled"], offset=[0.0] * width, scale=[1.0] * width)
    made.node("MatMul", [x, made.weight("w", linear.weights.T)], ["product"])
    made.node("Add", ["product", made.weight("b", linear.bias)], ["score"])
    made.node("Sigmoid", ["score"], ["proba"])
    made.node("Sub", [made.weight("unity", np.ones(1)), "proba"], ["negative"])
    made.node("Concat", ["negative", "proba"], ["probabilities"], axis=1)
    made.node("ArgMax", ["probabilities"], ["label"], axis=1, keepdims=0)
    made.output("label", None, kind=INT)
    if zipmap:
        made.zipped("probabilities", 2)
    else:
        made.output("probabilities", None, 2)
    return made.model()


def one_against_rest(linear: Linear) -> onnx.ModelProto:
    """σ of each class, spelled out, divided by their sum with a guard for zero, as SGDClassifier is exported."""
    made, (classes, width) = Pipeline(), linear.weights.shape
    made.input("X", width)
    made.node("MatMul", ["X", made.weight("w", linear.weights.T)], ["product"])
    made.node("Add", ["product", made.weight("b", linear.bias)], ["score"])
    made.node("Mul", ["score", made.weight("negate", [-1])], ["negated"])
    made.node("Exp", ["negated"], ["grown"])
    made.node("Add", ["grown", made.weight("unity", [1])], ["below"])
    made.node("Reciprocal", ["below"], ["proba"])
    made.node("ReduceSum", ["proba", made.weight("axis", [1], np.int64)], ["total"], keepdims=1)
    made.node("Cast", ["total"], ["some"], to=TensorProto.BOOL)
    made.node("Not", ["some"], ["none"])
    made.node("Cast", ["none"], ["mask"], to=FLOAT)
    made.node("Add", ["proba", "mask"], ["guarded"])
    made.node("Mul", ["mask", made.weight("classes", [classes])], ["whole"])
    made.node("Add", ["total", "whole"], ["sum"])
    made.node("Div", ["guarded", "sum"], ["probabilities"])
    made.output("probabilities", None, classes)
    return made.model()


def naive_bayes(mean: np.ndarray) -> onnx.ModelProto:
    """exp(a - log Σ exp a) of squared distances to the classes' means (C, d), as GaussianNB is exported."""
    made, (classes, width) = Pipeline(), mean.shape
    made.input("X", width)
    made.node("Reshape", ["X", made.weight("shape", [-1, 1, width], np.int64)], ["rows"])
    made.node("Sub", ["rows", made.weight("theta", mean[None])], ["off"])
    made.node("Mul", ["off", "off"], ["squares"])
    made.node("ReduceSum", ["squares", made.weight("axis", [2], np.int64)], ["distance"], keepdims=0)
    made.node("Mul", ["distance", made.weight("half", [-0.5])], ["jll"])
    made.node("ReduceLogSumExp", ["jll"], ["norm"], axes=[1], keepdims=0)
    made.node("Reshape", ["norm", made.weight("column", [-1, 1], np.int64)], ["norms"])
    made.node("Sub", ["jll", "norms"], ["log"])
    made.node("Exp", ["log"], ["probabilities"])
    made.output("probabilities", None, classes)
    return made.model()


def with_columns(linear: Linear, *, zipmap: bool = True) -> onnx.ModelProto:
    """A ColumnTransformer: two numeric columns scaled, one of text one-hot with three categories; five features."""
    made = Pipeline()
    encoded = _columns(made, scaled=True)
    made.ml(
        "LinearClassifier", [encoded], ["label", "probabilities"],
        classlabels_ints=[0, 1], post_transform="LOGISTIC", multi_class=0, **linear.attrs,
    )  # fmt: skip
    made.output("label", None, kind=INT)
    if zipmap:
        made.zipped("probabilities", 2)
    else:
        made.output("probabilities", None, 2)
    return made.model()


def _columns(made: Pipeline, *, scaled: bool) -> str:
    for name in ("age", "fare"):
        made.input(name, 1)
    made.input("city", 1, TEXT)
    numbers = made.node("Concat", ["age", "fare"], ["numbers"], axis=1)
    if scaled:
        numbers = made.ml("Scaler", [numbers], ["scaled"], offset=[40.0, 20.0], scale=[0.1, 0.05])
    made.ml("OneHotEncoder", ["city"], ["which"], cats_strings=["Basel", "Bern", "Chur"], zeros=1)
    made.node("Reshape", ["which", made.weight("flat", [-1, 3], np.int64)], ["cities"])
    return made.node("Concat", [numbers, "cities"], ["transformed"], axis=1)


# ------------------------------------------------------------------ models that no variance passes


def _stumps(features: Sequence[int], levels: Sequence[float]) -> dict[str, Any]:
    """Trees of one split each: feature ≤ level."""
    trees = len(features)
    return {
        "nodes_treeids": [tree for tree in range(trees) for _ in range(3)],
        "nodes_nodeids": [0, 1, 2] * trees,
        "nodes_featureids": [number for feature in features for number in (feature, 0, 0)],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"] * trees,
        "nodes_values": [number for level in levels for number in (float(level), 0.0, 0.0)],
        "nodes_truenodeids": [1, 0, 0] * trees,
        "nodes_falsenodeids": [2, 0, 0] * trees,
    }


def _forest(made: Pipeline, x: str, features: Sequence[int], levels: Sequence[float]) -> list[str]:
    """`label` and `probabilities` of two classes: each stump votes for one of them. The class that leaves count for is
    the second, so that onnxruntime makes 1 - p of the first."""
    trees = len(features)
    made.ml(
        "TreeEnsembleClassifier", [x], ["label", "probabilities"], **_stumps(features, levels),
        class_treeids=[tree for tree in range(trees) for _ in range(4)],
        class_nodeids=[1, 1, 2, 2] * trees, class_ids=[0, 1] * (2 * trees),
        class_weights=[1 / trees, 0.0, 0.0, 1 / trees] * trees,
        classlabels_strings=["no", "yes"], post_transform="NONE",
    )  # fmt: skip
    return ["label", "probabilities"]


def forest_classifier(width: int, *, scaled: bool = True, zipmap: bool = False) -> onnx.ModelProto:
    """A Scaler and a forest of stumps, with labels that are text."""
    made = Pipeline()
    x = made.input("X", width)
    if scaled:
        x = made.ml("Scaler", [x], ["scaled"], offset=[1.0] * width, scale=[0.5] * width)
    _forest(made, x, list(range(width)), [0.0] * width)
    made.output("label", None, kind=TEXT)
    if zipmap:
        made.zipped("probabilities", 2)
    else:
        made.output("probabilities", None, 2)
    return made.model()


def forest_regressor(width: int) -> onnx.ModelProto:
    made = Pipeline()
    made.input("X", width)
    made.ml(
        "TreeEnsembleRegressor", ["X"], ["variable"], **_stumps(list(range(width)), [0.0] * width),
        target_treeids=[tree for tree in range(width) for _ in range(2)], target_nodeids=[1, 2] * width,
        target_ids=[0] * (2 * width), target_weights=[-1.0, 1.0] * width, n_targets=1,
    )  # fmt: skip
    made.output("variable", None, 1)
    return made.model()


def forest_of_columns() -> onnx.ModelProto:
    """Two numeric columns and one of text, encoded and put side by side for a forest."""
    made = Pipeline()
    _forest(made, _columns(made, scaled=False), [0, 1, 2], [40.0, 20.0, 0.5])
    made.output("label", None, kind=TEXT)
    made.output("probabilities", None, 2)
    return made.model()


def forests_apart() -> onnx.ModelProto:
    """Two inputs, each with a forest of its own: no tensor holds both."""
    made = Pipeline()
    for name in ("a", "b"):
        made.input(name, 2)
        part = Pipeline()
        _forest(part, name, [0, 1], [0.0, 0.0])
        for node in part.nodes:
            node.output[:] = [f"{name}_{output}" for output in node.output]
            node.name = node.output[0]
        made.nodes += part.nodes
    made.node("Add", ["a_probabilities", "b_probabilities"], ["sum"])
    made.output("sum", None, 2)
    return made.model()


def support_vectors(vectors: np.ndarray) -> onnx.ModelProto:
    """SVC(probability=True): two classes by an RBF kernel, their probabilities by Platt's scaling."""
    made, (count, width) = Pipeline(), vectors.shape
    made.input("X", width)
    made.ml(
        "SVMClassifier", ["X"], ["label", "raw"], kernel_type="RBF", kernel_params=[0.5, 0.0, 3.0],
        support_vectors=vectors.ravel().tolist(), vectors_per_class=[count // 2, count - count // 2],
        coefficients=np.where(np.arange(count) < count // 2, 1.0, -1.0).tolist(), rho=[0.1],
        prob_a=[-1.2], prob_b=[0.1], classlabels_ints=[0, 1], post_transform="NONE",
    )  # fmt: skip
    made.node("Cast", ["raw"], ["probabilities"], to=FLOAT)
    made.output("label", None, kind=INT)
    made.output("probabilities", None, 2)
    return made.model()


def nearest_neighbours(points: np.ndarray, targets: np.ndarray) -> onnx.ModelProto:
    """The mean target of the three nearest points, as KNeighborsRegressor is exported; the rows are scaled before."""
    made, width = Pipeline(), points.shape[1]
    made.input("X", width)
    made.ml("Scaler", ["X"], ["scaled"], offset=[0.0] * width, scale=[0.5] * width)
    made.node("Unsqueeze", ["scaled", made.weight("one", [1], np.int64)], ["rows"])
    made.node("Sub", ["rows", made.weight("points", points[None])], ["off"])
    made.node("Mul", ["off", "off"], ["squares"])
    made.node("ReduceSum", ["squares", made.weight("last", [2], np.int64)], ["distances"], keepdims=0)
    three = made.weight("three", [3], np.int64)
    made.node("TopK", ["distances", three], ["near", "which"], axis=1, largest=0, sorted=1)
    made.node("Gather", [made.weight("targets", targets), "which"], ["found"], axis=0)
    made.node("ReduceMean", ["found"], ["variable"], axes=[1], keepdims=1)
    made.output("variable", None, 1)
    return made.model()

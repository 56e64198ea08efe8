"""Classical models. They compute in float32 whatever their input: differences are taken of `smooth`."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from cases.framework import between, case, certain, ints

WEIGHTS = np.array([[0.5, -0.4, 0.2, 0.1], [0.1, 0.3, -0.6, 0.8], [0.7, 0.2, 0.1, -0.3]])  # (3, 4)
BIAS = np.array([0.1, 0.2, 0.3])
NOBODY = np.zeros(1)  # stands for labels, which have no slope


def listed(array: np.ndarray) -> str:
    return "[" + ", ".join(f"{float(number)!r}" for number in np.ravel(array)) + "]"


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def logistic(scores: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-scores))


probit = np.vectorize(NormalDist().inv_cdf)

# ------------------------------------------------------------------------- linear models

REGRESSOR = f"y = ai.onnx.ml.LinearRegressor<coefficients={listed(WEIGHTS)}, intercepts={listed(BIAS)}, targets=3{{more}}>(x)"
case("LinearRegressor", f"y = ai.onnx.ml.LinearRegressor<coefficients={listed(WEIGHTS[0])}>(x)", x=(3, 4), exact=True,
     smooth=lambda x: x @ WEIGHTS[:1].T)  # fmt: skip
case("LinearRegressor", f"y = ai.onnx.ml.LinearRegressor<coefficients={listed(WEIGHTS[0])}, intercepts=[0.5]>(x)", 9,
     x=(4,), exact=True, smooth=lambda x: x[None] @ WEIGHTS[:1].T + 0.5)  # fmt: skip
case(
    "LinearRegressor", REGRESSOR.format(more=""), x=(2, 4), exact=True, smooth=lambda x: x @ WEIGHTS.T + BIAS
)
case("LinearRegressor", REGRESSOR.format(more=', post_transform="LOGISTIC"'), x=(2, 4),
     smooth=lambda x: logistic(x @ WEIGHTS.T + BIAS))  # fmt: skip
case("LinearRegressor", REGRESSOR.format(more=', post_transform="SOFTMAX"'), x=(2, 4),
     smooth=lambda x: softmax(x @ WEIGHTS.T + BIAS))  # fmt: skip

CLASSIFIER = 'label, y = ai.onnx.ml.LinearClassifier<coefficients={w}, intercepts={b}, classlabels_ints={c}, post_transform="{t}">(x)'
THREE = {"w": listed(WEIGHTS), "b": listed(BIAS), "c": "[0, 1, 2]"}
for transform, function in (
    ("NONE", lambda s: s),
    ("LOGISTIC", logistic),
    ("SOFTMAX", softmax),
    ("SOFTMAX_ZERO", softmax),
):
    case("LinearClassifier", CLASSIFIER.format(**THREE, t=transform), x=(3, 4), exact=transform == "NONE",
         smooth=lambda x, f=function: (NOBODY, f(x @ WEIGHTS.T + BIAS)))  # fmt: skip
case("LinearClassifier", CLASSIFIER.format(**THREE | {"w": listed(9 * WEIGHTS)}, t="SOFTMAX"), 9, x=(3, 4),  # p near 1
     smooth=lambda x: (NOBODY, softmax(9 * x @ WEIGHTS.T + BIAS)))  # fmt: skip
#: onnxruntime's quantile of the normal distribution is an approximation, true to some 1e-6 of 1 here.
case("LinearClassifier", CLASSIFIER.format(**THREE | {"w": listed(0.1 * WEIGHTS), "b": "[0.5, 0.4, 0.6]"}, t="PROBIT"),
     x=(3, 4), smooth=lambda x: (NOBODY, probit(0.1 * x @ WEIGHTS.T + [0.5, 0.4, 0.6])), tolerance=1e-3)  # fmt: skip
TWO = {"w": listed(WEIGHTS[0]), "b": "[0.1]", "c": "[0, 1]"}
case("LinearClassifier", CLASSIFIER.format(**TWO, t="NONE"), x=(3, 4), exact=True,
     smooth=lambda x: (NOBODY, np.array([1, 0]) + (x @ WEIGHTS[:1].T + 0.1) * [-1, 1]))  # fmt: skip
case("LinearClassifier", CLASSIFIER.format(**TWO, t="LOGISTIC"), x=(3, 4),
     smooth=lambda x: (NOBODY, logistic((x @ WEIGHTS[:1].T + 0.1) * [-1, 1])))  # fmt: skip

# ----------------------------------------------------------------------- support vectors

VECTORS = np.array(
    [[0.5, 0.4, 0.2], [0.1, -0.3, 0.6], [-0.5, 0.2, 0.9], [0.3, 0.3, 0.3], [0.8, -0.1, -0.7]]
)  # (5, 3)
GAMMA, OFFSET, DEGREE = 0.5, 0.2, 3.0
PARAMETERS = f"kernel_params={listed(np.array([GAMMA, OFFSET, DEGREE]))}"
KERNELS = {
    "LINEAR": lambda x: x @ VECTORS.T,
    "POLY": lambda x: (GAMMA * x @ VECTORS.T + OFFSET) ** DEGREE,
    "RBF": lambda x: np.exp(-GAMMA * ((x[:, None] - VECTORS) ** 2).sum(-1)),
    "SIGMOID": lambda x: np.tanh(GAMMA * x @ VECTORS.T + OFFSET),
}
COEFFICIENTS = np.array([0.5, -0.7, 0.3, 0.9, -0.4])

for kind, kernel in KERNELS.items():
    case("SVMRegressor", f'y = ai.onnx.ml.SVMRegressor<kernel_type="{kind}", {PARAMETERS}, rho=[0.15], n_supports=5, '
         f"coefficients={listed(COEFFICIENTS)}, support_vectors={listed(VECTORS)}>(x)", x=(4, 3), exact=kind == "LINEAR",
         smooth=lambda x, kernel=kernel: (kernel(x) @ COEFFICIENTS + 0.15)[:, None])  # fmt: skip
    case("SVMClassifier", f'label, y = ai.onnx.ml.SVMClassifier<kernel_type="{kind}", {PARAMETERS}, rho=[0.15], '
         f"vectors_per_class=[3, 2], classlabels_ints=[0, 1], coefficients={listed(COEFFICIENTS)}, "
         f"support_vectors={listed(VECTORS)}>(x)", x=(4, 3), exact=kind == "LINEAR",
         smooth=lambda x, kernel=kernel: (NOBODY, (kernel(x) @ COEFFICIENTS + 0.15)[:, None] * [-1, 1]))  # fmt: skip
case("SVMRegressor", f"y = ai.onnx.ml.SVMRegressor<{PARAMETERS}, rho=[0.15], coefficients=[0.5, -0.4, 0.2]>(x)", 9,
     x=(4, 3), exact=True, smooth=lambda x: x @ [[0.5], [-0.4], [0.2]] + 0.15)  # fmt: skip
case("SVMClassifier", f"label, y = ai.onnx.ml.SVMClassifier<{PARAMETERS}, rho=[0.15], classlabels_ints=[0, 1, 2], "
     f"coefficients={listed(WEIGHTS)}>(x)", x=(4, 4), exact=True,
     smooth=lambda x: (NOBODY, x @ WEIGHTS.T + 0.15))  # fmt: skip

PAIRWISE = (
    np.random.default_rng(0).normal(size=(3, 5)).round(3)
)  # of four classes, with 2, 1, 1 and 1 vectors
OWNER = [0, 0, 1, 2, 3]


def pairwise(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Score of classes i < j: over their vectors, each with its coefficient against the other class."""
    kernel, columns = KERNELS["LINEAR"](x), []
    for i, j in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        mine = sum(PAIRWISE[j - 1, s] * kernel[:, s] for s in range(5) if OWNER[s] == i)
        theirs = sum(PAIRWISE[i, s] * kernel[:, s] for s in range(5) if OWNER[s] == j)
        columns.append(mine + theirs + 0.1)
    return NOBODY, np.stack(columns, axis=1)


case("SVMClassifier", f"label, y = ai.onnx.ml.SVMClassifier<{PARAMETERS}, rho={listed(np.full(6, 0.1))}, "
     f"vectors_per_class=[2, 1, 1, 1], classlabels_ints=[0, 1, 2, 3], coefficients={listed(PAIRWISE)}, "
     f"support_vectors={listed(VECTORS)}>(x)", x=(4, 3), exact=True, smooth=pairwise)  # fmt: skip

# ------------------------------------------------------------------------------ features

case("Scaler", "y = ai.onnx.ml.Scaler<offset=[1.0, 2.0, 3.0], scale=[0.5, -3.0, 2.0]>(x)", x=(2, 3),
     smooth=lambda x: (x - [1, 2, 3]) * [0.5, -3, 2])  # fmt: skip
case(
    "Scaler",
    "y = ai.onnx.ml.Scaler<offset=[1.0], scale=[0.5]>(x)",
    9,
    x=(2, 3),
    smooth=lambda x: (x - 1) * 0.5,
)
case("Imputer", "y = ai.onnx.ml.Imputer<imputed_value_floats=[5.0], replaced_value_float=-9.0>(x)", x=(2, 3))
case("Imputer", "y = ai.onnx.ml.Imputer<imputed_value_floats=[5.0, 6.0, 7.0]>(x)", 9, x=(2, 3))
case("ArrayFeatureExtractor", "y = ai.onnx.ml.ArrayFeatureExtractor(x, i)", x=(2, 4), i=ints(3, 0, 0))
case("ArrayFeatureExtractor", "y = ai.onnx.ml.ArrayFeatureExtractor(x, i)", 9, x=(4,), i=ints(3, 0))
case("FeatureVectorizer", "y = ai.onnx.ml.FeatureVectorizer<inputdimensions=[3, 2]>(a, b)", a=(2, 3), b=certain(2, 2),
     smooth=lambda a, b: np.concatenate([a, b], axis=1))  # fmt: skip
NORMS = {
    "L1": lambda x: np.abs(x).sum(-1, keepdims=True),
    "L2": lambda x: np.sqrt((x * x).sum(-1, keepdims=True)),
    "MAX": lambda x: x.max(-1, keepdims=True),
}
for norm, divisor in NORMS.items():
    for shape, opset in (((3, 4), 17), ((4,), 9)):
        case("Normalizer", f'y = ai.onnx.ml.Normalizer<norm="{norm}">(x)', opset, x=between(0.4, 2, *shape),
             smooth=lambda x, divisor=divisor: x / divisor(x))  # fmt: skip
case("Normalizer", "y = ai.onnx.ml.Normalizer(x)", x=(3, 4), smooth=lambda x: x / NORMS["MAX"](x))

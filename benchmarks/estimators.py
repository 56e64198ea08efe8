"""scikit-learn's estimators as ONNX models, trained on scikit-learn's own data; needs skl2onnx.

`names()` costs nothing. `export(name)` trains one estimator and gives its model and rows: the training rows for
calibration, held-out rows, and three strange sets of them. A classifier comes twice: with ZipMap, as skl2onnx writes
it unless told otherwise, and without.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
from real_models_data import Sets

STRANGE = ("shuffled columns", "uniform rows", "three times as far")


def _make(path: str, **settings: Any) -> Callable[[], Any]:
    """An estimator by its path in scikit-learn; nothing is imported before it is asked for."""

    def build() -> Any:
        from importlib import import_module

        module, name = path.rsplit(".", 1)
        return getattr(import_module(f"sklearn.{module}"), name)(**settings)

    return build


def _pipeline(*steps: Callable[[], Any]) -> Callable[[], Any]:
    def build() -> Any:
        from sklearn.pipeline import make_pipeline

        return make_pipeline(*(step() for step in steps))

    return build


_SCALED = _make("preprocessing.StandardScaler")
_LOGISTIC = _make("linear_model.LogisticRegression", max_iter=2000)


def _stacked(kind: str) -> Callable[[], Any]:
    def build() -> Any:
        from sklearn import ensemble, linear_model, tree

        parts = [
            ("tree", tree.DecisionTreeClassifier(max_depth=4, random_state=0)),
            ("logistic", linear_model.LogisticRegression(max_iter=5000)),
        ]
        if kind == "stacking":
            return ensemble.StackingClassifier(parts, cv=3)
        return ensemble.VotingClassifier(parts, voting="soft", flatten_transform=False)

    return build


def _gaussian_process() -> Any:
    from sklearn.gaussian_process import GaussianProcessRegressor, kernels

    return GaussianProcessRegressor(kernels.RBF(4.0), alpha=1.0, normalize_y=True, optimizer=None)


#: name -> (data set, estimator); "wine" has three classes, "cancer" two, "diabetes" and "two targets" numbers
ESTIMATORS: dict[str, tuple[str, Callable[[], Any]]] = {
    "LogisticRegression, 2 classes": ("cancer", _pipeline(_SCALED, _LOGISTIC)),
    "LogisticRegression, 3 classes": ("wine", _pipeline(_SCALED, _LOGISTIC)),
    "LogisticRegression, strings": ("strings", _LOGISTIC),
    "SGDClassifier": (
        "wine",
        _pipeline(_SCALED, _make("linear_model.SGDClassifier", loss="log_loss", random_state=0)),
    ),
    "LinearSVC": ("wine", _pipeline(_SCALED, _make("svm.LinearSVC"))),
    "LinearDiscriminantAnalysis": ("wine", _make("discriminant_analysis.LinearDiscriminantAnalysis")),
    "GaussianNB": ("wine", _make("naive_bayes.GaussianNB")),
    "MLPClassifier": (
        "wine",
        _pipeline(
            _SCALED,
            _make("neural_network.MLPClassifier", hidden_layer_sizes=(32, 16), max_iter=500, random_state=0),
        ),
    ),
    "PCA + LogisticRegression": (
        "cancer",
        _pipeline(_SCALED, _make("decomposition.PCA", n_components=8), _LOGISTIC),
    ),
    "SVC": ("wine", _pipeline(_SCALED, _make("svm.SVC", probability=True, random_state=0))),
    "KNeighborsClassifier": ("wine", _pipeline(_SCALED, _make("neighbors.KNeighborsClassifier"))),
    "DecisionTreeClassifier": ("cancer", _make("tree.DecisionTreeClassifier", max_depth=5, random_state=0)),
    "RandomForestClassifier": (
        "wine",
        _make("ensemble.RandomForestClassifier", n_estimators=20, random_state=0),
    ),
    "GradientBoostingClassifier": (
        "cancer",
        _make("ensemble.GradientBoostingClassifier", n_estimators=20, random_state=0),
    ),
    "ExtraTreesClassifier": (
        "cancer",
        _make("ensemble.ExtraTreesClassifier", n_estimators=20, random_state=0),
    ),
    "AdaBoostClassifier": ("wine", _make("ensemble.AdaBoostClassifier", n_estimators=10, random_state=0)),
    "VotingClassifier": ("wine", _stacked("voting")),
    "StackingClassifier": ("wine", _stacked("stacking")),
    "LinearRegression": ("diabetes", _make("linear_model.LinearRegression")),
    "Ridge, two targets": ("two targets", _pipeline(_SCALED, _make("linear_model.Ridge"))),
    "MLPRegressor": (
        "diabetes",
        _pipeline(
            _SCALED,
            _make("neural_network.MLPRegressor", hidden_layer_sizes=(32,), max_iter=800, random_state=0),
        ),
    ),
    "SVR": ("diabetes", _pipeline(_SCALED, _make("svm.SVR", C=100))),
    "KNeighborsRegressor": ("diabetes", _make("neighbors.KNeighborsRegressor")),
    "RandomForestRegressor": (
        "diabetes",
        _make("ensemble.RandomForestRegressor", n_estimators=20, random_state=0),
    ),
    "GaussianProcessRegressor": (
        "diabetes",
        _pipeline(_SCALED, _gaussian_process),
    ),
    "KMeans": ("wine", _pipeline(_SCALED, _make("cluster.KMeans", n_clusters=3, n_init=3, random_state=0))),
    "IsolationForest": ("cancer", _make("ensemble.IsolationForest", n_estimators=20, random_state=0)),
}

_WITH_CLASSES = tuple(name for name, (data, _) in ESTIMATORS.items() if data in ("wine", "cancer", "strings"))
_NO_CLASSES = ("KMeans", "IsolationForest", "LinearSVC")


def names() -> list[str]:
    """Every row: an estimator, and a classifier also without ZipMap."""
    found = []
    for name in ESTIMATORS:
        found.append(name)
        if name in _WITH_CLASSES and name not in _NO_CLASSES:
            found.append(f"{name}, no ZipMap")
    return found


def export(name: str) -> tuple[onnx.ModelProto, Sets]:
    """A trained estimator and its rows."""
    plain = name.removesuffix(", no ZipMap")
    data, build = ESTIMATORS[plain]
    if data == "strings":
        return _with_strings(build(), plain == name)
    x, y = _data(data)
    order = np.random.default_rng(0).permutation(len(x))
    cut = 2 * len(x) // 3
    train, rest = order[:cut], order[cut:]
    estimator = build().fit(x[train], y[train])
    zipmap = plain == name if plain in _WITH_CLASSES and plain not in _NO_CLASSES else None
    proto = _exported(estimator, {"input": ("Float", x.shape[1])}, zipmap)
    known, strange = {"input": x[rest]}, {what: {"input": part} for what, part in _strange(x[rest]).items()}
    return proto, _sets(f"scikit-learn's {data}", {"input": x[train]}, known, strange)


def _sets(kind: str, calibration: dict, known: dict, strange: dict) -> Sets:
    return Sets(kind, True, [calibration], [known], {what: [batch] for what, batch in strange.items()})


def _data(name: str) -> tuple[np.ndarray, np.ndarray]:
    from sklearn import datasets

    load = {
        "wine": datasets.load_wine,
        "cancer": datasets.load_breast_cancer,
        "diabetes": datasets.load_diabetes,
        "two targets": datasets.load_diabetes,
    }
    x, y = load[name](return_X_y=True)
    if name == "two targets":  # the body mass index becomes the second
        x, y = np.delete(x, 2, axis=1), np.stack([y, 1000 * x[:, 2]], axis=1)
    return x.astype(np.float32), y


def _strange(x: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    centre = x.mean(axis=0)
    found = (
        rng.permuted(x, axis=0),
        rng.uniform(x.min(axis=0), x.max(axis=0), x.shape),
        centre + 3 * (x - centre),
    )
    return {what: part.astype(np.float32) for what, part in zip(STRANGE, found)}


def _exported(estimator: Any, inputs: dict[str, tuple[str, int]], zipmap: bool | None) -> onnx.ModelProto:
    """`inputs` are kind and columns of each; `zipmap` is None where there are no probabilities."""
    from skl2onnx import convert_sklearn
    from skl2onnx.common import data_types

    types = [
        (name, getattr(data_types, f"{kind}TensorType")([None, width]))
        for name, (kind, width) in inputs.items()
    ]
    last = estimator[-1] if hasattr(estimator, "steps") else estimator
    options = None if zipmap is None else {id(estimator): {"zipmap": zipmap}}
    if type(last).__name__ == "LinearSVC":  # in a pipeline skl2onnx would ask it for a ZipMap
        options = {type(last): {"raw_scores": True}}
    return convert_sklearn(
        estimator, type(last).__name__, types, options=options, target_opset={"": 17, "ai.onnx.ml": 3}
    )


def _with_strings(last: Any, zipmap: bool) -> tuple[onnx.ModelProto, Sets]:
    """A table as from a csv: most columns are numbers, two are words that a one-hot encoder reads."""
    from sklearn.compose import make_column_transformer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    x, y = _data("wine")
    levels = np.array(["low", "middle", "high"], object)
    words = np.stack(
        [levels[np.digitize(x[:, c], np.quantile(x[:, c], (0.33, 0.67)))] for c in (0, 6)], axis=1
    )
    numbers = np.delete(x, (0, 6), axis=1)
    count = numbers.shape[1]
    order = np.random.default_rng(0).permutation(len(x))
    train, rest = order[:120], order[120:]
    whole = np.concatenate([numbers.astype(object), words], axis=1)
    table = make_column_transformer(
        (StandardScaler(), list(range(count))),
        (OneHotEncoder(handle_unknown="ignore"), [count, count + 1]),
    )
    estimator = make_pipeline(table, last).fit(whole[train], y[train])
    proto = _exported(estimator, {"numbers": ("Float", count), "words": ("String", 2)}, zipmap)
    strange = {
        what: {"numbers": part, "words": words[rest]} for what, part in _strange(numbers[rest]).items()
    }
    return proto, _sets(
        "scikit-learn's wine, two columns as words",
        {"numbers": numbers[train], "words": words[train]},
        {"numbers": numbers[rest], "words": words[rest]},
        strange,
    )

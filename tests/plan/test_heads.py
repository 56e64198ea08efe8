"""Heads for classes: emitted nodes against float64 numpy, predictions that no rounding may change, and
fixed points against Monte Carlo and numeric integration."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score
from support.paths import ROOT, SHARED

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.op import contract
from gapa_onnx.op.contract import CLASSES, DOMAIN, VERSION
from gapa_onnx.op.heads import head_bodies
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.plan.heads import HeadOptions, emit_classes, head_points, reference
from gapa_onnx.plan.heads.points import COARSE, FINE, LEADING, TABLE_COLUMNS, Points, grid, latin, samples
from gapa_onnx.record import PointsRecord
from gapa_onnx.sessions.runtime import session_options
from gapa_onnx.variance.graph import VarianceGraph

DATA = SHARED / "data"
PARTS = ("entropy", "aleatoric", "epistemic")
ROLES = ("probs", *PARTS, "score")


@dataclass(frozen=True)
class Case:
    """A source model that is one input of logits `z`, and the operator at its end, if any."""

    shape: tuple[int, ...]
    axis: int = 1
    task: Task = Task.CLASSIFICATION
    link: str = "softmax"
    options: HeadOptions = field(default_factory=HeadOptions)
    known: bool = True  #: whether the number of classes is
    factor: bool = False
    ending: str | None = None
    dtype: type = np.float32

    @property
    def head(self) -> Head:
        output = "y" if self.ending else "z"
        return Head(output, self.task, "z", self.link, self.axis, len(self.shape), "")

    @property
    def classes(self) -> int | None:
        return self.shape[self.axis] if self.known else None

    @property
    def points(self) -> Points:
        return head_points(self.head, self.options, self.classes, correlated=self.factor)

    def draw(self, seed: int = 0) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(seed)
        mean = (3 * rng.standard_normal(self.shape)).astype(self.dtype)
        var = np.exp(rng.standard_normal(self.shape))
        feeds = {"z": mean, "v": var}
        if self.factor:
            feeds["f"] = 0.5 * rng.standard_normal((*self.shape, self.shape[self.axis]))
            feeds["v"] = np.square(feeds["f"]).sum(axis=-1)
        wide = np.float64 if self.dtype is np.float64 else np.float32
        return {"z": mean, **{name: feeds[name].astype(wide) for name in feeds if name != "z"}}

    def model(self, opset: int) -> onnx.ModelProto:
        wide = np.float64 if self.dtype is np.float64 else np.float32
        graph = VarianceGraph(opset, {"z", "y", "v", "f"})
        mean = graph.cast(graph.tensor("z", self.dtype), wide)
        found = emit_classes(
            graph,
            self.head,
            graph.tensor(self.head.output, self.dtype),
            mean,
            graph.tensor("v", wide),
            self.options,
            classes=self.classes,
            factor=graph.tensor("f", wide) if self.factor else None,
        )
        values = {role: graph.output(value, f"y_{role}") for role, value in found.roles.items()}
        added = graph.to_proto(list(values.values()))
        kind = helper.np_dtype_to_tensor_dtype
        shape = [size if self.known and i == self.axis else None for i, size in enumerate(self.shape)]
        inputs = [helper.make_tensor_value_info("z", kind(np.dtype(self.dtype)), shape)]
        inputs += [helper.make_tensor_value_info("v", kind(np.dtype(wide)), shape)]
        inputs += [helper.make_tensor_value_info("f", kind(np.dtype(wide)), [None] * 3)] * self.factor
        attributes = {} if self.ending == "Sigmoid" else {"axis": self.axis}
        source = [helper.make_node(self.ending, ["z"], ["y"], **attributes)] if self.ending else []
        outputs = [helper.make_tensor_value_info("y", kind(np.dtype(self.dtype)), shape)] if source else []
        outputs += [
            helper.make_tensor_value_info(f"y_{role}", kind(value.dtype), self.open_shape(role))
            for role, value in values.items()
        ]
        nodes = [*source, *added.node]
        called = {node.op_type for node in nodes}
        functions = list(head_bodies(opset, called, many_rows=True))
        domains = [helper.make_opsetid("", opset), *[helper.make_opsetid(DOMAIN, VERSION)] * len(functions)]
        model = helper.make_model(
            helper.make_graph(nodes, "heads", inputs, outputs, list(added.initializer)),
            opset_imports=domains,
            functions=functions,
            ir_version=8,
        )
        onnx.checker.check_model(model)
        return model

    def open_shape(self, role: str) -> list[None]:
        return [None] * (len(self.shape) - (role not in ("probs", "tokens", "token_var")))

    def session(self, opset: int = 17, *, optimise: bool = True) -> ort.InferenceSession:
        options = session_options(optimise=optimise, threads=1)
        return ort.InferenceSession(
            self.model(opset).SerializeToString(), options, providers=["CPUExecutionProvider"]
        )

    def run(
        self, feeds: dict[str, np.ndarray], opset: int = 17, *, optimise: bool = True
    ) -> dict[str, np.ndarray]:
        return answers(self.session(opset, optimise=optimise), feeds)


def answers(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name.removeprefix("y_") for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feeds)))


def expected(case: Case, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same by numpy."""
    mean, var = feeds["z"].astype(np.float64), feeds["v"]
    tokens = case.task is Task.TOKENS
    found: dict[str, np.ndarray] = {}
    if tokens:
        top_k = case.options.leading(mean.shape[case.axis])
        found["tokens"], mean, var = reference.leading(mean, var, case.axis, top_k)
        found["token_var"] = var
    parts = reference.split(mean, var, case.axis, case.points, case.link, factor=feeds.get("f"))
    found["probs"] = reference.bridge(mean, var, case.axis, case.link, case.options.bridge)
    found |= {part: getattr(parts, part) for part in PARTS}
    by_variance = case.options.score == "variance"
    found["score"] = reference.score(var, case.axis) if by_variance else found["epistemic"]
    return found


CASES = {
    "rows": Case((64, 10)),
    "two classes": Case((64, 2)),
    "one class": Case((8, 1)),
    "many classes": Case((8, 200)),
    "more classes than columns": Case((2, TABLE_COLUMNS + 100)),
    "no batch": Case((10,), axis=0),
    "classes first": Case((10, 6), axis=0),
    "per class": Case((64, 10), options=HeadOptions(bridge="per-class", score="epistemic")),
    "samples": Case((64, 10), options=HeadOptions(samples=32, seed=3)),
    "positions": Case((3, 7, 10), axis=2),
    "pixels": Case((2, 5, 4, 3), task=Task.SEGMENTATION),
    "pixels, samples": Case((2, 5, 4, 3), task=Task.SEGMENTATION, options=HeadOptions(samples=8)),
    "labels": Case((64, 7), task=Task.MULTILABEL, link="sigmoid"),
    "many labels": Case((4, 1000), task=Task.MULTILABEL, link="sigmoid"),
    "labels, samples": Case((64, 7), link="sigmoid", options=HeadOptions(samples=32)),
    "pixels yes or no": Case((2, 1, 4, 3), task=Task.SEGMENTATION, link="sigmoid"),
    "factor": Case((16, 10), factor=True),
    "factor, samples": Case((16, 10), factor=True, options=HeadOptions(samples=32)),
    "behind softmax": Case((64, 10), ending="Softmax"),
    "behind sigmoid": Case((64, 10), link="sigmoid", ending="Sigmoid"),
    "double": Case((32, 10), dtype=np.float64),
    "double pixels": Case((2, 5, 4, 3), dtype=np.float64),
    "double labels": Case((32, 10), link="sigmoid", dtype=np.float64),
    "half": Case((32, 10), dtype=np.float16),
}
NEWER = {
    "open": Case((64, 10), known=False),
    "open positions": Case((3, 7, 10), axis=2, known=False),
    "open and wide": Case((2, TABLE_COLUMNS + 100), known=False),
    "open labels": Case((16, 7), link="sigmoid", options=HeadOptions(samples=32), known=False),
    "tokens": Case((2, 3, 700), axis=2, task=Task.TOKENS),
    "few tokens": Case((2, 3, 40), axis=2, task=Task.TOKENS),
    "half tokens": Case((4, 700), task=Task.TOKENS, dtype=np.float16),
    "tokens per row": Case((4, 700), task=Task.TOKENS, options=HeadOptions(top_k=5)),
    "tokens per class": Case((4, 90), task=Task.TOKENS, options=HeadOptions(bridge="per-class")),
    "tokens, samples": Case((4, 90), task=Task.TOKENS, options=HeadOptions(samples=8)),
    "more tokens than columns": Case((2, 3000), task=Task.TOKENS, options=HeadOptions(top_k=1500)),
}


def check_against_numpy(case: Case, opset: int, *, optimise: bool = True) -> None:
    feeds = case.draw()
    found, wanted = case.run(feeds, opset, optimise=optimise), expected(case, feeds)
    found.pop("y", None)
    assert found.keys() == wanted.keys()
    for role, answer in wanted.items():
        assert found[role].shape == answer.shape, role
        if role == "tokens":
            assert found[role].dtype == np.int64
            np.testing.assert_array_equal(found[role], answer)
        else:  # 1e-5 is promised; sums over a thousand labels have a thousand roundings
            bound = 1e-5 if case.dtype is not np.float64 else 1e-12
            np.testing.assert_allclose(found[role], answer, atol=bound, rtol=bound, err_msg=role)


@pytest.mark.parametrize("opset", [7, 9, 11, 13, 17, 21])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_as_numpy(case: Case, opset: int) -> None:
    check_against_numpy(case, opset)


@pytest.mark.parametrize("opset", [11, 13, 18, 24])
@pytest.mark.parametrize("case", NEWER.values(), ids=NEWER)
def test_as_numpy_newer(case: Case, opset: int) -> None:
    check_against_numpy(case, opset)


@pytest.mark.parametrize("opset", [8, 10, 12, 22])
@pytest.mark.parametrize("name", ["rows", "pixels", "labels", "positions"])
def test_as_numpy_unoptimised(name: str, opset: int) -> None:
    check_against_numpy(CASES[name], opset, optimise=False)


def operators(case: Case, opset: int = 17) -> set[str]:
    return {node.op_type for node in case.model(opset).graph.node}


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize(
    "name", ["rows", "samples", "classes first", "pixels", "half", "tokens", "open", "behind softmax"]
)
def test_a_softmax_head_is_one_operator(name: str, opset: int) -> None:
    """With the logits as they come, on whichever axis, and nothing else behind them."""
    case = (CASES | NEWER)[name]
    nodes = case.model(opset).graph.node
    (node,) = (node for node in nodes if node.op_type == CLASSES.name)
    first = "z/classes/probs" if name == "tokens" else "y_probs"
    assert list(node.output) == [first, *(f"y_{role}" for role in ROLES[1:])]
    assert node.input[3] == f"{case.head.output}/classes/points"
    others = {
        "tokens": [contract.LEADING.name, "GatherElements", "TopK"],
        "half": ["Cast", "Shape", "Reshape", "Cast"],
        "behind softmax": ["Softmax"],
    }
    assert [other.op_type for other in nodes if other is not node] == others.get(name, [])


def test_a_bridge_per_class_has_nodes_of_its_own() -> None:
    nodes = Case((64, 10), options=HeadOptions(bridge="per-class")).model(17).graph.node
    (node,) = (node for node in nodes if node.op_type == CLASSES.name)
    assert list(node.output) == ["z/classes/probs", *(f"y_{role}" for role in ROLES[1:])]
    assert nodes[-1].op_type == "Exp" and list(nodes[-1].output) == ["y_probs"]


@pytest.mark.parametrize("name", ["labels", "factor", "double", "double pixels"])
def test_all_else_is_nodes(name: str) -> None:
    assert CLASSES.name not in operators(CASES[name])
    assert CLASSES.name not in operators(CASES["rows"], opset=10)


def test_only_positions_take_a_loop() -> None:
    """Rank 2 takes all points at once, and more axes a few copies of the logits."""
    assert "Loop" not in operators(CASES["rows"], opset=10) | operators(CASES["labels"])
    assert "Loop" in operators(CASES["pixels"], opset=10) & operators(CASES["double pixels"])


@pytest.mark.parametrize("name", ["rows", "many classes", "labels", "pixels"])
def test_rows_do_not_depend_on_their_batch(name: str) -> None:
    case = CASES[name]
    feeds = case.draw()
    session = case.session()
    together = answers(session, feeds)
    single = [answers(session, {k: v[i : i + 1] for k, v in feeds.items()}) for i in range(case.shape[0])]
    for role, answer in together.items():
        apart = np.concatenate([one[role] for one in single])
        # Vectorised exponentials differ in the last bit from those of the rest of a row.
        np.testing.assert_allclose(answer, apart, atol=1e-6, rtol=1e-6)


# --------------------------------------------------------------------- the prediction


def adversarial(rng: np.random.Generator, rows: int, classes: int) -> dict[str, np.ndarray]:
    """Logits that rounding ties or swaps, with variances from none to enormous."""
    normal = rng.standard_normal((rows, classes)).astype(np.float32)
    near = np.full((rows, classes), 1.5, np.float32)
    for _ in range(3):  # up to three steps of rounding apart
        near = np.where(rng.random(near.shape) < 0.5, np.nextafter(near, np.float32(2)), near)
    saturated = normal.copy()
    saturated[np.arange(rows), rng.integers(classes, size=rows)] += 200
    parts = [
        normal,
        np.round(normal),  # ties
        near,
        near * np.float32(-1000),
        normal * np.float32(1e-30),
        normal * np.float32(1e-7),
        normal * np.float32(1e4),
        normal * np.float32(1e30),
        np.zeros_like(normal),
        np.full_like(normal, -7.25),
        saturated,
        np.round(saturated),
    ]
    logits = np.concatenate(parts)
    scales = np.array([0, 1e-12, 1e-3, 1, 30, 1e6, 1e30], np.float32)
    var = rng.choice(scales, (len(logits), 1)) * rng.random(logits.shape).astype(np.float32)
    return {"z": logits, "v": var}


@pytest.mark.parametrize("optimise", [True, False])
@pytest.mark.parametrize("ending", [None, "Softmax", "LogSoftmax"])
@pytest.mark.parametrize("classes, rows", [(2, 400), (3, 300), (10, 200), (100, 30), (1000, 10)])
def test_argmax_is_kept(classes: int, rows: int, ending: str | None, optimise: bool) -> None:
    case = Case((rows, classes), ending=ending)
    for opset in (8, 17):
        feeds = adversarial(np.random.default_rng(classes), rows, classes)
        found = case.run(feeds, opset, optimise=optimise)
        source = found.get("y", feeds["z"])
        assert np.isfinite(found["probs"]).all()
        np.testing.assert_array_equal(found["probs"].argmax(axis=1), source.argmax(axis=1))
        if classes > 1:  # and no other class comes near enough to tie
            ranked = np.sort(found["probs"], axis=1)
            assert (ranked[:, -1] > ranked[:, -2]).all()


def test_bare_formula_would_change_the_argmax() -> None:
    """The test above can fail: without the guard, rounding does tie and swap classes."""
    feeds = adversarial(np.random.default_rng(3), 300, 3)
    scaled = feeds["z"] / np.sqrt(1 + np.float32(np.pi / 8) * feeds["v"].mean(axis=1, keepdims=True))
    weights = np.exp(scaled - scaled.max(axis=1, keepdims=True))
    assert (weights.argmax(axis=1) != feeds["z"].argmax(axis=1)).sum() > 100


@pytest.mark.parametrize("optimise", [True, False])
@pytest.mark.parametrize("ending", [None, "Softmax", "LogSoftmax"])
def test_argmax_is_kept_in_half_precision(ending: str | None, optimise: bool) -> None:
    case = Case((200, 10), ending=ending, dtype=np.float16)
    feeds = adversarial(np.random.default_rng(5), 200, 10)
    keep = np.abs(feeds["z"]).max(axis=1) < 6e4
    feeds = {"z": feeds["z"][keep].astype(np.float16), "v": feeds["v"][keep]}
    found = case.run(feeds, optimise=optimise)
    source = found.get("y", feeds["z"])
    np.testing.assert_array_equal(found["probs"].argmax(axis=1), source.argmax(axis=1))


def test_argmax_is_kept_per_pixel() -> None:
    case = Case((60, 4, 2, 3), task=Task.SEGMENTATION)
    flat = adversarial(np.random.default_rng(6), 60, 4)
    feeds = {k: np.moveaxis(v.reshape(-1, 2, 3, 4), -1, 1).copy() for k, v in flat.items()}
    for opset in (9, 17):
        found = case.run(feeds, opset)
        np.testing.assert_array_equal(found["probs"].argmax(axis=1), feeds["z"].argmax(axis=1))


@pytest.mark.parametrize("ending", [None, "Sigmoid"])
@pytest.mark.parametrize("opset", [7, 17])
def test_labels_keep_their_answers(ending: str | None, opset: int) -> None:
    case = Case((200, 5), link="sigmoid", ending=ending)
    feeds = adversarial(np.random.default_rng(7), 200, 5)
    found = case.run(feeds, opset)
    source, half = (found["y"], 0.5) if ending else (feeds["z"], 0.0)
    np.testing.assert_array_equal(found["probs"] > 0.5, source > half)
    np.testing.assert_array_equal(found["probs"].argmax(axis=1), source.argmax(axis=1))


@pytest.mark.parametrize("ending", [None, "Softmax"])
def test_first_token_is_the_argmax(ending: str | None) -> None:
    case = Case((50, 40), task=Task.TOKENS, options=HeadOptions(top_k=12), ending=ending)
    feeds = adversarial(np.random.default_rng(8), 50, 40)
    found = case.run(feeds)
    source = found.get("y", feeds["z"])
    np.testing.assert_array_equal(found["tokens"][:, 0], source.argmax(axis=1))
    steps = np.diff(found["probs"], axis=1)
    assert (steps <= 0).all() and (steps[:, 0] < 0).all()
    assert all(len(set(row)) == 12 for row in found["tokens"].tolist())


def test_paper_bridge_may_change_the_argmax() -> None:
    """It is an option for that reason: a class of large variance loses."""
    case = Case((1, 2), options=HeadOptions(bridge="per-class"))
    found = case.run({"z": np.float32([[2.0, 1.9]]), "v": np.float32([[30.0, 0.0]])})
    assert found["probs"].argmax() == 1


# ------------------------------------------------------------------- extreme numbers


@pytest.mark.parametrize("opset", [7, 9, 13, 17])
@pytest.mark.parametrize("optimise", [True, False])
@pytest.mark.parametrize("name", ["rows", "pixels", "labels", "many classes"])
def test_unknown_variance_gives_no_number(name: str, optimise: bool, opset: int) -> None:
    case = CASES[name]
    feeds = case.draw()
    feeds["v"][0] = np.nan  # all of a row
    one = (1, *(0,) * (len(case.shape) - 1))
    feeds["v"][one] = np.nan  # one class of one row or pixel
    found = case.run(feeds, opset, optimise=optimise)
    for role, answer in found.items():
        assert np.isnan(answer[0]).all(), role
        row = np.moveaxis(answer[1], 0, -1) if role == "probs" else answer[1]
        assert np.isnan(row[(0,) * (len(case.shape) - 2)]).all(), role
        assert not np.isnan(answer[2:]).any(), role


@pytest.mark.parametrize("name", ["rows", "labels", "pixels"])
def test_certain_logits_leave_no_epistemic_part(name: str) -> None:
    case = CASES[name]
    feeds = case.draw()
    feeds["v"] = np.zeros_like(feeds["v"])
    found = case.run(feeds)
    assert (found["epistemic"] >= 0).all()
    assert (found["epistemic"] < 1e-6 * case.shape[case.axis]).all()
    link = reference.sigmoid(feeds["z"]) if case.link == "sigmoid" else reference.softmax(feeds["z"], 1)
    np.testing.assert_allclose(found["probs"], link, atol=1e-6)


@pytest.mark.parametrize("opset", [8, 17])
def test_classes_that_are_ruled_out(opset: int) -> None:
    """A logit of -inf is a probability of 0, with no part in the entropies."""
    case, smaller = Case((64, 10)), Case((64, 7))
    feeds = case.draw()
    feeds["z"][:, 7:] = -np.inf
    found = case.run(feeds, opset)
    assert (found["probs"][:, 7:] == 0).all()
    alone = smaller.run({name: value[:, :7] for name, value in feeds.items()}, opset)
    for part in PARTS:
        np.testing.assert_allclose(found[part], alone[part], atol=1e-6)


def test_order_of_the_classes_does_not_matter() -> None:
    case = Case((64, 10))
    feeds = case.draw()
    shuffle = np.random.default_rng(1).permutation(10)
    found, shuffled = case.run(feeds), case.run({k: v[:, shuffle] for k, v in feeds.items()})
    np.testing.assert_allclose(found["probs"][:, shuffle], shuffled["probs"], atol=1e-6)
    for part in PARTS:
        np.testing.assert_allclose(found[part], shuffled[part], atol=1e-6)


@pytest.mark.parametrize("name", ["rows", "positions", "labels"])
def test_small_epistemic_parts_keep_their_order(name: str) -> None:
    """With variances of 1e-3, a difference of float32 entropies would be mostly rounding."""
    case = Case((1500, 10)) if name == "rows" else Case((1500, 1, 10), axis=2)
    if name == "labels":
        case = Case((1500, 4), link="sigmoid")
    feeds = case.draw()
    feeds["z"] *= 2
    feeds["v"] *= np.float32(1e-3)
    found, wanted = case.run(feeds), expected(case, feeds)
    spread = wanted["epistemic"].ravel()
    assert np.median(spread) < 2e-4 and spread.min() < 1e-6
    assert spearmanr(found["epistemic"].ravel(), spread)[0] > 0.999


# ---------------------------------------------------------------------------- points


@pytest.mark.parametrize("count, fine", [(COARSE, False), (FINE, True)])
def test_latin_points(count: int, fine: bool) -> None:
    values = latin(200, fine=fine).values
    assert values.shape == (count, 200)
    np.testing.assert_array_equal(values[count // 2 :], -values[: count // 2])
    np.testing.assert_allclose((values[:, :LEADING] ** 2).mean(axis=0), 1)
    cells = np.sort(np.abs(values[: count // 2, :LEADING]), axis=0)
    np.testing.assert_allclose(cells, np.repeat(cells[:, :1], LEADING, axis=1))  # each cell once
    assert len({column.tobytes() for column in values.T}) == 200  # no two classes move together
    np.testing.assert_array_equal(latin(20, fine=fine).values, values[:, :20])
    assert abs((values**2).mean() - 1) < 0.05  # 200 columns whose variance is 1 within some 20%
    assert latin(None).values.shape == (COARSE, TABLE_COLUMNS)


def test_points_are_the_same_everywhere() -> None:
    """Raw bits and the normal quantile: no generator of a library that may change."""
    first_two = {
        False: [0.6025828, 1.37138075, -0.24680707, -1.37138075, 1.93815896, -0.41853827],
        True: [-0.12012625, -1.70947237, -2.19696999, 0.54408231, -1.09907479, -0.84712796],
    }
    for fine, numbers in first_two.items():
        np.testing.assert_allclose(latin(3, fine=fine).values[:2].ravel(), numbers, rtol=1e-7)


def test_points_by_head() -> None:
    rows, wide, pixels = Case((4, 10)), Case((4, 1000)), Case((4, 150, 2, 2), task=Task.SEGMENTATION)
    assert rows.points.record == PointsRecord("latin", COARSE)
    assert wide.points.record == PointsRecord("latin", FINE)
    assert pixels.points.record == PointsRecord("latin", COARSE)
    assert CASES["factor"].points.record == PointsRecord("latin", FINE)
    assert CASES["labels"].points.record == PointsRecord("grid", 16)
    assert CASES["samples"].points.record == PointsRecord("samples", 32)
    assert NEWER["tokens"].points.values.shape == (COARSE, 512)


def test_samples_are_the_paper_s_noise() -> None:
    noise = samples(2000, 5, seed=4).values
    np.testing.assert_array_equal(noise, samples(2000, 5, seed=4).values)
    assert (noise != samples(2000, 5, seed=5).values).all()
    assert abs(noise.mean()) < 5 / np.sqrt(noise.size)
    assert abs((noise**2).mean() - 1) < 5 * np.sqrt(2 / noise.size)


def binary_parts(mean: np.ndarray, var: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Total and epistemic entropy of a yes or no, by integration on 4001 nodes."""
    z, step = np.linspace(-9, 9, 4001, retstep=True)
    density = step * np.exp(-z * z / 2) / np.sqrt(2 * np.pi)
    p = reference.sigmoid(mean[:, None] + np.sqrt(var)[:, None] * z)

    def entropy(p: np.ndarray) -> np.ndarray:
        p = np.clip(p, 1e-300, 1 - 1e-16)
        return -p * np.log(p) - (1 - p) * np.log1p(-p)

    total = entropy((p * density).sum(axis=1))
    return total, total - (entropy(p) * density).sum(axis=1)


@pytest.mark.parametrize("std, bound", [(0.1, 1e-8), (1, 3e-6), (2, 1e-5), (4, 2e-3), (8, 4e-2)])
def test_grid_integrates_labels(std: float, bound: float) -> None:
    mean = np.linspace(-12, 12, 49)
    var = np.full(49, std**2)
    total, epistemic = binary_parts(mean, var)
    found = reference.split(mean[:, None], var[:, None], 1, grid(), "sigmoid")
    np.testing.assert_allclose(found.entropy, total, atol=bound)
    np.testing.assert_allclose(found.epistemic, epistemic, atol=bound)


def test_latin_integrates_two_classes() -> None:
    """softmax of two is a sigmoid of their difference, whose variance is the sum."""
    rng = np.random.default_rng(2)
    mean, var = 2 * rng.standard_normal((300, 2)), rng.uniform(0.05, 5, (300, 2))
    total, epistemic = binary_parts(mean[:, 0] - mean[:, 1], var.sum(axis=1))
    found = reference.split(mean, var, 1, latin(2))
    assert np.abs(found.epistemic - epistemic).max() < 0.05
    assert spearmanr(found.epistemic, epistemic)[0] > 0.98
    drawn = reference.split(mean, var, 1, samples(20_000, 2, seed=0))
    # The spread of -log p over draws is below 2 here.
    np.testing.assert_allclose(drawn.epistemic, epistemic, atol=5 * 2 / np.sqrt(20_000))
    np.testing.assert_allclose(drawn.entropy, total, atol=5 * 2 / np.sqrt(20_000))


@pytest.mark.parametrize("classes", [3, 10, 100, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("peak", [0, 6])
def test_latin_ranks_as_monte_carlo(classes: int, peak: float) -> None:
    rng = np.random.default_rng(classes)
    rows = 100 if classes == 1000 else 200
    mean = 2 * rng.standard_normal((rows, classes))
    mean[:, 0] += peak * rng.random(rows)
    var = np.exp(rng.uniform(np.log(0.05), np.log(8), (rows, 1)) + 0.4 * rng.standard_normal(mean.shape))
    drawn = reference.split(mean, var, 1, samples(1024, classes, seed=9))
    found = reference.split(mean, var, 1, latin(classes, fine=classes > 32))
    assert spearmanr(found.epistemic, drawn.epistemic)[0] > 0.99
    assert 0.85 < found.epistemic.sum() / drawn.epistemic.sum() < 1.1


def test_factor_carries_the_covariance() -> None:
    """Against draws from the full covariance; logits that move together leave the classes certain."""
    rng = np.random.default_rng(3)
    mean, root = 2 * rng.standard_normal((100, 6)), rng.standard_normal((6, 6))
    factor = np.linalg.cholesky(root @ root.T)[None] * np.sqrt(rng.uniform(0.05, 2, (100, 1, 1)))
    var = np.square(factor).sum(axis=-1)
    noise = rng.standard_normal((20_000, 6))
    mixture, aleatoric = np.zeros_like(mean), np.zeros(100)
    for draws in np.array_split(noise, 40):
        p = reference.softmax(mean + np.einsum("nij,sj->sni", factor, draws), -1)
        mixture += p.sum(axis=0) / len(noise)
        aleatoric -= (p * np.log(p)).sum(axis=(0, 2)) / len(noise)
    epistemic = -(mixture * np.log(mixture)).sum(axis=1) - aleatoric
    found = reference.split(mean, var, 1, latin(6, fine=True), factor=factor)
    assert spearmanr(found.epistemic, epistemic)[0] > 0.97
    common = np.zeros((100, 6, 6))
    common[:, :, 0] = 3  # one source moves all logits alike
    case = Case((100, 6), factor=True)
    feeds = {"z": mean.astype(np.float32), "v": np.full((100, 6), 9, np.float32)}
    alike = case.run({**feeds, "f": common.astype(np.float32)})
    assert (alike["epistemic"] < 1e-5).all()
    assert (case.run({**feeds, "f": factor.astype(np.float32)})["epistemic"] > 1e-4).mean() > 0.9


# ------------------------------------------------------- the acceptance line, on data


@functools.cache
def logits_of(model: bytes, calib: bytes, *batches: bytes) -> list[tuple[np.ndarray, np.ndarray]]:
    """Logits and their variances under a converted model; arrays come as bytes so that they cache."""
    source = onnx.load_from_string(model)
    name, output = source.graph.input[0].name, source.graph.output[0].name
    width = source.graph.input[0].type.tensor_type.shape.dim[1].dim_value
    rows = [np.frombuffer(batch, np.float32).reshape(-1, width) for batch in (calib, *batches)]
    converted = gapa_onnx.convert(source, {name: rows[0]}, m=300).model
    session = gapa_onnx.session(converted.SerializeToString())
    return [tuple(session.run([output, f"{output}_var"], {name: batch})) for batch in rows[1:]]


def check_acceptance(inside: tuple[np.ndarray, np.ndarray], outside: tuple[np.ndarray, np.ndarray]) -> None:
    """Spearman ≥ .97 and AUROC within .005 of 4096 draws, through onnxruntime."""
    mean, var = (np.concatenate(pair) for pair in zip(inside, outside))
    found = Case(mean.shape).run({"z": mean, "v": var})["epistemic"]
    drawn = Case(mean.shape, options=HeadOptions(samples=4096))
    truth = reference.split(mean, var, 1, drawn.points).epistemic
    label = np.arange(len(mean)) >= len(inside[0])
    assert spearmanr(found, truth)[0] >= 0.97
    assert abs(roc_auc_score(label, found) - roc_auc_score(label, truth)) <= 0.005


@pytest.mark.parametrize("strange", ["noise", pytest.param("shuffled", marks=pytest.mark.nightly)])
def test_digits_as_monte_carlo(strange: str) -> None:
    def pixels(kind: str) -> bytes:
        with np.load(ROOT / "models" / f"digits_mlp_{kind}.npz") as file:
            return file["pixels"].astype(np.float32).tobytes()

    model = (ROOT / "models" / "digits_mlp.onnx").read_bytes()
    check_acceptance(*logits_of(model, pixels("calibration"), pixels("heldout"), pixels(strange)))


def small_classifier(x: np.ndarray, labels: np.ndarray) -> onnx.ModelProto:
    """tanh features with random weights, and an output layer fitted by least squares to ±5."""
    rng = np.random.default_rng(0)
    w = (rng.standard_normal((784, 200)) / 8).astype(np.float32)
    hidden = np.tanh(x @ w)
    target = np.where(labels[:, None] == np.arange(10), 5.0, -5.0)
    out = np.linalg.solve(hidden.T @ hidden + 10 * np.eye(200), hidden.T @ target).astype(np.float32)
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["h"]),
        helper.make_node("MatMul", ["h", "out"], ["logits"]),
    ]
    sizes = {"x": ["n", 784], "logits": ["n", 10]}
    x_info, y_info = (
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in sizes.items()
    )
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in (("w", w), ("out", out))]
    graph = helper.make_graph(nodes, "small", [x_info], [y_info], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize(
    "known, other",
    [("mnist", "fashion_mnist"), pytest.param("fashion_mnist", "mnist", marks=pytest.mark.nightly)],
)
def test_images_as_monte_carlo(known: str, other: str) -> None:
    if not DATA.is_dir():
        pytest.skip("needs the MNIST and Fashion-MNIST files of ../shared/data")

    def images(name: str, kind: str, count: int) -> np.ndarray:
        with np.load(DATA / f"{name}.npz") as file:
            return file[f"x_{kind}"][:count].reshape(count, 784).astype(np.float32) / 255

    with np.load(DATA / f"{known}.npz") as file:
        labels = file["y_train"][:3000]
    train = images(known, "train", 3000)
    tests = [images(name, "test", 500) for name in (known, other)]
    model = small_classifier(train, labels).SerializeToString()
    check_acceptance(*logits_of(model, train.tobytes(), *(batch.tobytes() for batch in tests)))


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    "choice, text",
    [
        ({"bridge": "probit"}, "`bridge='probit'` is not known"),
        ({"score": "entropy"}, "`score='entropy'` is not known"),
        ({"samples": 1}, "`samples` is 1"),
        ({"top_k": 0}, "`top_k` is 0"),
    ],
)
def test_options_are_checked(choice: dict, text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        HeadOptions(**choice)
    assert caught.value.hint


@pytest.mark.parametrize(
    "case, opset, text",
    [
        (Case((4, 10), known=False), 8, "left open"),
        (Case((4, 10), known=False), 9, "left open"),
        (Case((4, 10), known=False, options=HeadOptions(samples=8)), 17, "`samples` needs the number"),
        (Case((4, 90), task=Task.TOKENS), 10, "needs opset 11"),
        (Case((4, 90), task=Task.TOKENS, known=False), 17, "size of the vocabulary"),
    ],
)
def test_what_cannot_be_done_is_said(case: Case, opset: int, text: str) -> None:
    with pytest.raises(UserError, match=text) as caught:
        case.model(opset)
    assert caught.value.hint


def test_unknown_rank_is_said() -> None:
    graph = VarianceGraph(17, {"y", "v"})
    y, v = graph.tensor("y", np.float32), graph.tensor("v", np.float32)
    head = Head("y", Task.CLASSIFICATION, "y", "softmax", 1, None, "")
    with pytest.raises(UserError, match="number of axes"):
        emit_classes(graph, head, y, y, v, HeadOptions(), classes=10)


def test_same_bytes_every_time() -> None:
    for case in (CASES["rows"], CASES["pixels"], CASES["samples"], NEWER["tokens"]):
        assert case.model(17).SerializeToString() == case.model(17).SerializeToString()

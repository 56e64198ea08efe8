"""Models that no variance passes: one score for each row, the unexplained share of its standardised features."""

from __future__ import annotations

import json

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support import pipelines
from support.ordinary import counted_p, ordinary_scores

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.errors import UserError
from gapa_onnx.measure.coverage import NAME
from gapa_onnx.measure.evaluation.evaluate import evaluate
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse, require_convertible
from gapa_onnx.record import require
from gapa_onnx.sessions.runtime import open_session
from gapa_onnx.settings import Settings

WIDTH = 4
MIXING = np.random.default_rng(5).normal(size=(2, WIDTH))
UNITS = np.array([1000.0, 1.0, 0.01, 30.0])  # of the columns


def correlated(count: int, seed: int) -> np.ndarray:
    """Rows near a plane, with columns in very different units."""
    generator = np.random.default_rng(seed)
    rows = generator.normal(size=(count, 2)) @ MIXING + 0.1 * generator.normal(size=(count, WIDTH))
    return (rows * UNITS + 5 * UNITS).astype(np.float32)


def shuffled(rows: np.ndarray, seed: int = 9) -> np.ndarray:
    return np.random.default_rng(seed).permuted(rows, axis=0)


ROWS, HELD_OUT = correlated(600, 0), correlated(1000, 1)
SMALL = correlated(80, 0)

#: name: model, the tensor that is the query, the output that the score stands beside
MODELS = {
    "forest": (pipelines.forest_classifier(WIDTH), "scaled", "probabilities"),
    "forest, zipped": (pipelines.forest_classifier(WIDTH, zipmap=True), "scaled", "output_probability"),
    "forest, not scaled": (pipelines.forest_classifier(WIDTH, scaled=False), "X", "probabilities"),
    "forest of numbers": (pipelines.forest_regressor(WIDTH), "X", "variable"),
    "support vectors": (pipelines.support_vectors(SMALL[:6]), "X", "probabilities"),
    "neighbours": (pipelines.nearest_neighbours(SMALL[:20] / 2, np.arange(20)), "scaled", "variable"),
}


def said(conversion: gapa_onnx.Conversion):
    record = require(conversion.model, "it")
    (head,) = record.heads.values()
    return record, head


def asked(conversion, rows, *, native=True):
    """Score and flag of rows, with our library or without it."""
    _, head = said(conversion)
    names = [head.outputs["score"], head.outputs["ood"]]
    if native:
        return open_session(conversion.model, "it").run(names, rows)
    plain = ort.InferenceSession(conversion.model.SerializeToString(), providers=["CPUExecutionProvider"])
    return plain.run(names, rows)


@pytest.mark.parametrize("name", MODELS)
def test_a_score_and_nothing_else(name):
    model, query, output = MODELS[name]
    conversion = gapa_onnx.convert(model, {"X": SMALL}, k=20)
    assert all(check.passed for check in conversion.checks), conversion.checks
    record, head = said(conversion)
    assert list(record.heads) == [output] and head.task == "none" and head.score_only
    assert set(head.outputs) == {"score", "pvalue", "ood"} and head.score.kind == "share"
    assert head.reason.startswith("score only: no variance passes ")
    (site,) = record.sites
    assert site.query == query and site.metric == "standardised" and not record.cuts
    before = [value.name for value in model.graph.output]
    assert [value.name for value in conversion.model.graph.output] == [
        *before,
        f"{output}_score",
        f"{output}_pvalue",
        f"{output}_ood",
    ]
    score, flag = asked(conversion, {"X": SMALL})
    assert score.shape == flag.shape == (80,) and score.dtype == np.float32 and flag.dtype == bool
    (coverage,) = (check for check in conversion.checks if check.name == NAME)
    assert "score only" in coverage.detail and not coverage.uncovered


def test_the_reasons():
    reasons = {
        name: said(gapa_onnx.convert(m, {"X": SMALL}, k=20))[1].reason for name, (m, *_) in MODELS.items()
    }
    assert "a tree ensemble" in reasons["forest"] and "a tree ensemble" in reasons["forest of numbers"]
    assert "ai.onnx.ml::SVMClassifier: its probabilities are coupled" in reasons["support vectors"]
    assert "TopK" in reasons["neighbours"]


def test_the_score_in_float64():
    """s = 1 - kᵀ (K + ε I)⁻¹ k over the K nearest rows, standardised, is the score with and without the library."""
    conversion = gapa_onnx.convert(
        pipelines.forest_classifier(WIDTH), {"X": ROWS}, k=15, inducing="all", solver="exact", index="flat"
    )
    record, _ = said(conversion)
    site = record.sites[0]
    features = (ROWS.astype(np.float64) - 1) * 0.5
    centre, spread = features.mean(axis=0), features.std(axis=0)
    points = (features - centre) / spread
    fed = np.concatenate([HELD_OUT[:20], shuffled(HELD_OUT)[:20]])
    queries = ((fed.astype(np.float64) - 1) * 0.5 - centre) / spread

    def kernel(a, b):
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(axis=-1) / (2 * site.length_scale**2))

    expected = []
    for query in queries:
        near = points[np.argsort(((points - query) ** 2).sum(axis=1))[:15]]
        k = kernel(near, query[None])[:, 0]
        expected.append(1 - k @ np.linalg.solve(kernel(near, near) + site.jitter * np.eye(15), k))
    distances = np.sqrt(((points[:, None] - points[None]) ** 2).sum(axis=-1))[np.triu_indices(len(points), 1)]
    assert site.length_scale == pytest.approx(np.median(distances), rel=0.03)  # of a sample of pairs
    for native in (True, False):
        score, flag = asked(conversion, {"X": fed}, native=native)
        # Rounding of the features to single precision moves small shares, which are differences of nearly equal numbers.
        assert np.allclose(score, expected, rtol=2e-3, atol=2e-6)
        p = counted_p(ordinary_scores(conversion.model, said(conversion)[1].score), score)
        assert (flag == ~(p > np.float32(0.05))).all()
    assert np.ptp(expected) > 0.01


@pytest.mark.parametrize("name", ["forest", "forest of numbers", "neighbours"])
def test_strange_rows_are_told_apart(name):
    """About one in twenty held-out rows is flagged, far rows are, and columns that do not fit together are told."""
    conversion = gapa_onnx.convert(MODELS[name][0], {"X": ROWS})
    score, flag = asked(conversion, {"X": HELD_OUT})
    assert (
        0.02 < flag.mean() < 0.09
    )  # 5% with 600 rows to find the line and 1000 to count: a deviation is 1.1%
    _, far = asked(conversion, {"X": (HELD_OUT + 20 * UNITS).astype(np.float32)})
    assert far.all()
    strange, _ = asked(conversion, {"X": shuffled(HELD_OUT)})
    larger = (strange[:, None] > score[None]).mean() + 0.5 * (strange[:, None] == score[None]).mean()
    assert larger > 0.9  # AUROC


def test_what_is_not_a_number_is_flagged():
    conversion = gapa_onnx.convert(pipelines.forest_regressor(WIDTH), {"X": SMALL}, k=20)
    rows = SMALL[:3].copy()
    rows[0, 1], rows[1, 2] = np.nan, np.inf
    score, flag = asked(conversion, {"X": rows})
    assert flag[:2].all() and np.isfinite(score[2])


def test_a_column_that_never_moves_keeps_its_unit():
    rows = SMALL.copy()
    rows[:, 1] = 7
    conversion = gapa_onnx.convert(pipelines.forest_regressor(WIDTH), {"X": rows}, k=20)
    centre, factors = conversion.calibration.fits[0].geometry.linear
    assert centre[1] == 7 and factors[1] == 1
    assert np.allclose(factors[[0, 2, 3]], 1 / rows[:, [0, 2, 3]].astype(np.float64).std(axis=0), rtol=1e-5)
    moved = rows[:5].copy()
    moved[:, 1] = 40
    assert asked(conversion, {"X": moved})[1].all()


def table(count: int, seed: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    age = generator.normal(40, 10, (count, 1))
    city = np.where(age > 40, "Basel", "Bern").astype(object)
    return {"age": age.astype(np.float32), "fare": (age / 2).astype(np.float32), "city": city}


def test_columns_of_numbers_and_words():
    """What the encoders make side by side is the query; a city that never came with such an age is strange."""
    conversion = gapa_onnx.convert(pipelines.forest_of_columns(), table(300, 0))
    record, _ = said(conversion)
    assert all(check.passed for check in conversion.checks)
    assert record.sites[0].query == "transformed" and record.sites[0].width == 5
    usual = table(200, 1)
    assert asked(conversion, usual)[1].mean() < 0.12
    city = np.where(usual["city"] == "Bern", "Basel", "Bern").astype(object)
    assert asked(conversion, {**usual, "city": city})[1].mean() > 0.9
    assert asked(conversion, {**usual, "city": np.full((200, 1), "Chur", object)})[1].all()


def test_inputs_that_no_tensor_joins():
    """Two tables with trees of their own: both are in one query."""
    first, second = ROWS[:, :2], ROWS[:, 2:]
    conversion = gapa_onnx.convert(pipelines.forests_apart(), {"a": first, "b": second})
    record, head = said(conversion)
    assert all(check.passed for check in conversion.checks)
    assert record.sites[0].joined == ("b",) and record.sites[0].width == 4
    assert head.reason == "score only: no single tensor holds all that is fed"
    usual = {"a": HELD_OUT[:, :2], "b": HELD_OUT[:, 2:]}
    score, flag = asked(conversion, usual)
    assert 0.02 < flag.mean() < 0.09
    apart = {**usual, "b": np.roll(usual["b"], 7, axis=0)}  # either table by itself is as usual
    assert (asked(conversion, apart)[0][:, None] > score[None]).mean() > 0.9


# ---------------------------------------------------------- operators without a rule, and what still stops

LAYERS = """
    <ir_version: 8, opset_import: ["": 17, "com.example": 1]>
    model (float[n, 4] x) => (%s) {
      w = Constant <value = float[4, 3] {1, 2, 3, -1, 0, 1, 2, 1, 0, 1, -2, 1}> ()
      h = Tanh (x)
      y = MatMul (h, w)
      %s
    }
"""


def planned(outputs: str, end: str, **settings):
    source = load(onnx.parser.parse_model(LAYERS % (outputs, end)))
    return analyse(source, Settings(**settings))


def test_an_operator_without_a_rule_at_the_end():
    """Nothing but copies follows it, so that nothing is lost by a score."""
    plan = planned("float[n, 3] z", "m = com.example.Mystery (y) z = Identity (m)")
    assert plan.score_only and [site.query for site in plan.sites] == ["x"]
    assert (
        plan.heads[0].reason
        == "score only: no variance passes com.example::Mystery: no rule for com.example::Mystery yet"
    )
    require_convertible(plan, Settings())


@pytest.mark.parametrize(
    "outputs, end",
    [
        ("float[n, 3] z", "m = com.example.Mystery (y) z = Softmax (m)"),  # half-way
        ("float[n, 3] y, float[n, 3] z", "z = com.example.Mystery (y)"),  # another output is reached
    ],
)
def test_a_path_that_is_refused_half_way_stops(outputs, end):
    plan = planned(outputs, end)
    assert not plan.score_only and len(plan.refused) == 1
    with pytest.raises(UserError) as error:
        require_convertible(plan, Settings())
    assert "com.example::Mystery" in error.value.message and "`sites='score-only'`" in error.value.hint


def test_sites_that_are_named_stop():
    plan = planned("float[n, 3] z", "z = com.example.Mystery (y)", sites="h")
    assert not plan.score_only and plan.refused


def test_labels_of_a_network():
    """Where a network puts out labels alone, the score is that of its last hidden layer."""
    plan = planned("int64[n] label", "label = ArgMax <axis = 1, keepdims = 0> (y)")
    assert plan.score_only and plan.sites[0].query == "x" and plan.sites[0].activation == "Tanh"
    assert plan.heads[0].output == "label" and "ArgMax" in plan.heads[0].reason


def test_a_score_can_be_asked_for():
    model = onnx.parser.parse_model(LAYERS % ("float[n, 3] y", ""))
    conversion = gapa_onnx.convert(model, {"x": SMALL / UNITS.astype(np.float32)}, k=20, sites="score-only")
    assert all(check.passed for check in conversion.checks)
    _, head = said(conversion)
    assert (
        set(head.outputs) == {"score", "pvalue", "ood"}
        and head.reason == "score only: no variance is asked for"
    )
    with pytest.raises(UserError, match="needs a variance"):
        planned("float[n, 3] y", "", sites="score-only", task="classification")


def test_naive_bayes_has_variances():
    """It has no layer and yet a path for variance: its inputs are the site."""
    mean = np.random.default_rng(3).normal(size=(3, WIDTH)).astype(np.float32)
    plan = analyse(load(pipelines.naive_bayes(mean)), Settings())
    assert not plan.score_only and plan.outputs == ("probabilities",)
    assert plan.sites[0].query == "X" and plan.sites[0].standardised


# ----------------------------------------------------------------------------------------- commands


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scores")
    onnx.save(MODELS["forest, zipped"][0], folder / "forest.onnx")
    for name, rows in (("data", ROWS), ("held", HELD_OUT), ("odd", shuffled(HELD_OUT))):
        np.savez(folder / f"{name}.npz", X=rows)
    assert main(["convert", str(folder / "forest.onnx"), "--calib", str(folder / "data.npz")]) == 0
    return folder


def test_what_commands_say(files, capsys):
    source, out, held = (str(files / name) for name in ("forest.onnx", "forest.gapa.onnx", "held.npz"))
    assert main(["inspect", source]) == 0
    assert "score only: no variance passes a tree ensemble" in " ".join(capsys.readouterr().out.split())
    assert main(["convert", source, "--calib", held, "--dry-run"]) == 0
    assert "output_probability_score and output_probability_ood" in capsys.readouterr().out
    assert main(["inspect", out]) == 0
    assert "score only: no variance passes a tree ensemble" in " ".join(capsys.readouterr().out.split())
    assert main(["run", out, "--data", held]) == 0
    text = capsys.readouterr().out
    assert "no output has a variance" in text and "of 1000 beyond the threshold" in text and "yes" in text
    assert main(["verify", source, out, "--data", held]) == 0
    capsys.readouterr()
    assert main(["threshold", out, "--quantile", "0.5", "-o", str(files / "half.onnx"), "--data", held]) == 0
    capsys.readouterr()
    assert main(["run", str(files / "half.onnx"), "--data", held]) == 0
    # (1 + 499) / 1001 ≤ 0.5 < (1 + 500) / 1001
    assert "output_probability: 499 of 1000 beyond the threshold" in capsys.readouterr().out


def test_evaluate_tells_strange_rows_and_nothing_else(files, capsys):
    pytest.importorskip("sklearn")
    out, held, odd = (str(files / name) for name in ("forest.gapa.onnx", "held.npz", "odd.npz"))
    report = files / "report.html"
    command = ["evaluate", out, "--data", held, "--ood", odd, "--json", "--report", str(report)]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["detection"]["score"]["auroc"] > 0.9 and answer["flagged"]["data"] < 0.09
    assert answer["metrics"] == {"source": {}, "gapa": {}} and not answer["aurc"]
    assert "score only" in answer["notes"][0] and report.stat().st_size
    assert evaluate(out, held).detection == {}


def test_labels_are_still_needed_elsewhere(tmp_path):
    pytest.importorskip("sklearn")
    linear = pipelines.Linear.random(3, WIDTH)
    gapa_onnx.convert(pipelines.logistic_regression(linear, 3), {"X": SMALL / 100}, tmp_path / "m.onnx", k=20)
    with pytest.raises(UserError, match="judged by labels"):
        evaluate(tmp_path / "m.onnx", {"X": SMALL / 100})


@pytest.mark.parametrize(
    "signature, body, rows",
    [
        ("(float[6] x) => (float[2] a, float[4] b)", "a, b = Split<axis=0, split=[2, 4]>(x)", {"x": (6,)}),
        ("(float[2, 3, 2] x, float[4, 3, 2] z) => (float[6, 3, 2] y)", "y = Concat<axis=0>(x, z)", {"x": (2, 3, 2), "z": (4, 3, 2)}),
    ],
)  # fmt: skip
def test_inputs_without_rows_are_one_sample(signature, body, rows):
    """Sizes that are fixed and differ are no rows: what is fed together has one score."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 12]> net {signature} {{ {body} }}')
    rng = np.random.default_rng(0)
    given = [{k: rng.normal(size=s).astype(np.float32) for k, s in rows.items()} for _ in range(60)]
    conversion = gapa_onnx.convert(model, given, m=30, k=8, allow_uncovered=True)
    assert conversion.plan.score_only and all(check.passed for check in conversion.checks)
    name = f"{conversion.plan.heads[0].output}_score"
    session = ort.InferenceSession(conversion.model.SerializeToString(), providers=["CPUExecutionProvider"])
    far = {name: 30 * array for name, array in given[0].items()}
    (near_score,), (far_score,) = (session.run([name], fed) for fed in (given[0], far))
    assert near_score.shape == far_score.shape == (1,) and far_score > near_score

"""Shares of witnesses in every geometry: the file against float64, native and portable; what they do to variances."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from scipy.spatial.distance import cdist
from support.small_models import parse

import gapa_onnx
from gapa_onnx.fit.calibrate import SiteFit
from gapa_onnx.model.splice import exposed
from gapa_onnx.record import read

EPS = float(np.finfo(np.float32).eps)
METRICS = ("euclidean", "direction", "polar", "whitened", "whitened-direction", "projected")
NET = """net (float[n, 6] x) => (float[n, 3] y) {
    a = MatMul(x, v)  b = Tanh(a)  c = MatMul(b, q)  h = Tanh(c)  y = MatMul(h, w) }"""
SMALL = {"m": 60, "k": 12, "solver": "exact", "index": "flat", "jitter": 1e-4, "task": "classification"}


def net(opset: int = 17) -> onnx.ModelProto:
    """A network whose places are wider than what goes in, but for rounding of no lower rank."""
    generator = np.random.default_rng(0)
    shapes = {"v": (6, 8), "q": (8, 8), "w": (8, 3)}
    return parse(NET, opset, **{name: generator.normal(size=shape) / 2 for name, shape in shapes.items()})


def data(rows: int, seed: int) -> np.ndarray:
    """Correlated columns of several sizes around a mean that is not 0."""
    generator = np.random.default_rng(seed)
    mixed = generator.normal(size=(rows, 6)) @ np.random.default_rng(9).normal(size=(6, 6))
    return (mixed * [1, 2, 0.5, 1, 1, 0.3] + 0.5).astype(np.float32)


def coordinates(metric: str, z: np.ndarray, fit: SiteFit) -> np.ndarray:
    """Queries (n, d) as they are compared, in float64 by the definitions at the head of `fit.geometry`."""
    how, z = fit.geometry, z.astype(np.float64)

    def coordinate(at, squares):
        short, middle, slope = (float(part[at]) for part in (told.short, told.middle, told.slope))
        return (np.log(np.sqrt(squares) + short) - middle) * slope

    told = how.lengths
    if metric == "projected":
        axes = how.axes
        centred = z - axes.centre
        white = (centred @ axes.along) * axes.whitening
        left = centred - (centred @ axes.along) @ axes.along.T  # the axes are orthonormal
        unit = z @ axes.along[:, : len(axes.origin)] / np.maximum(length(z), axes.short)
        return np.concatenate(
            [
                unit * axes.factors[0],
                white / length(white) * axes.factors[1],
                *(coordinate(at, length(part) ** 2) for at, part in enumerate((z, white, left))),
            ],
            axis=1,
        )
    if how.linear is not None:
        centre, by = (part.astype(np.float64) for part in how.linear)
        z = (z - centre) @ by
    if metric in ("euclidean", "whitened"):
        return z
    unit = z / np.where(length(z) > 0, length(z), 1)
    return np.concatenate([unit, coordinate(0, length(z) ** 2)], axis=1) if metric == "polar" else unit


def length(z: np.ndarray) -> np.ndarray:
    return np.linalg.norm(z, axis=1, keepdims=True)


def share(u: np.ndarray, points: np.ndarray, k: int, length_scale: float, jitter: float) -> np.ndarray:
    """s of queries by a dense solve over the k nearest points, (n,)."""
    found = []
    for one in u:
        near = points[np.argsort(((points - one) ** 2).sum(axis=1), kind="stable")[:k]].astype(np.float64)
        gram = np.exp(-cdist(near, near, "sqeuclidean") / (2 * length_scale**2)) + jitter * np.eye(len(near))
        to = np.exp(-((near - one) ** 2).sum(axis=1) / (2 * length_scale**2))
        found.append(1 - to @ np.linalg.solve(gram, to))
    return np.array(found)


def runs(model: onnx.ModelProto, names: list[str], x: np.ndarray) -> dict[str, list[np.ndarray]]:
    """With our library and without it."""
    shown = exposed(model, [n for n in names if n not in {o.name for o in model.graph.output}])
    plain = ort.InferenceSession(shown.SerializeToString(), providers=["CPUExecutionProvider"])
    native = gapa_onnx.session(shown.SerializeToString())
    return {how: one.run(names, {"x": x}) for how, one in (("native", native), ("portable", plain))}


@pytest.mark.parametrize("opset", [9, 17])
@pytest.mark.parametrize("metric", METRICS)
def test_shares_of_a_file_in_float64(metric, opset):
    conversion = gapa_onnx.convert(net(opset), {"x": data(300, 1)}, metric=metric, **SMALL)
    assert all(check.passed for check in conversion.checks)
    record = read(conversion.model)
    fits = conversion.calibration.places
    assert [place.metric for place in record.places] == [metric] * 2 and len(record.witnesses) == 1
    x = np.concatenate(
        [data(40, 2), 3 * data(10, 3), np.zeros((1, 6), np.float32)]
    )  # the last has no direction
    names = [place.share for place in record.places] + [fit.site.query for fit in fits]
    for how, answers in runs(conversion.model, names, x).items():
        shares, queries = answers[:2], answers[2:]
        assert not queries[1][-1].any()  # of the witness, x v
        for fit, found, z in zip(fits, shares, queries):
            u = coordinates(metric, z, fit)
            compared = fit.as_compared(z)
            if (
                metric == "projected"
            ):  # what is left is a difference of squares, known to a rounding of the whole
                centred = length(z - fit.geometry.axes.centre) ** 2
                told = fit.geometry.lengths
                beside = np.exp(u[:, -1:] / told.slope[-1] + told.middle[-1])  # its length and what is short
                close = 8 * EPS * centred / (told.short[-1] * beside) * told.slope[-1]
                assert (np.abs(compared - u)[:, -1:] <= close).all()
                compared, u = compared[:-1, :-1], u[:-1, :-1]  # of the row of zeros see below
            np.testing.assert_allclose(compared, u, rtol=1e-4, atol=2e-5)
            u = fit.as_compared(z).astype(np.float64)
            expected = share(u, fit.index.points, fit.k, fit.length_scale, fit.jitter)
            # Coordinates in single precision, which the solve magnifies by up to 1 / jitter.
            relative = 3e-2 if metric == "projected" else 5e-3
            np.testing.assert_allclose(
                found[:, 0], expected, rtol=relative, atol=2e-5, err_msg=f"{how} {fit.site.output}"
            )
            assert np.ptp(expected) > 0.01 and np.isfinite(found).all()


@pytest.mark.parametrize(
    "metric",
    [
        *METRICS[:-1],
        "projected",
    ],
)
def test_a_vector_of_zeros_is_no_farther_than_a_unit(metric):
    """It has no direction, and a length that counts as short as any: its coordinates are no larger than others'."""
    conversion = gapa_onnx.convert(net(), {"x": data(300, 1)}, metric=metric, **SMALL)
    for fit in conversion.calibration.places:
        zero = fit.as_compared(np.zeros((50, 8), np.float32))
        largest = np.abs(fit.index.points).max()
        assert np.isfinite(zero).all() and np.abs(zero).max() < 20 * largest


@pytest.mark.parametrize("metric", METRICS)
def test_left_out_shares_are_those_of_a_fit_without_the_row(metric):
    """With all rows as points: those of the other rows alone, whatever their lengths are."""
    settings = {**SMALL, "inducing": "all", "metric": metric}
    conversion = gapa_onnx.convert(net(), {"x": data(80, 1)}, **settings)
    for fit in conversion.calibration.places:
        points = fit.index.points
        assert len(points) == 80
        found = fit.leave_one_out(points)
        for row in range(0, 80, 7):
            others = np.delete(points, row, axis=0)
            expected = share(
                points[row : row + 1].astype(np.float64), others, fit.k, fit.length_scale, fit.jitter
            )
            assert found[row] == pytest.approx(expected[0], rel=1e-3, abs=1e-6)


@pytest.mark.parametrize("metric", ["direction", "whitened-direction", "polar"])
def test_a_row_is_left_out_of_the_mean_that_is_its_point(metric):
    """Points are means of rows: of directions they are shorter than 1, and a row leaves the mean of the others."""
    conversion = gapa_onnx.convert(net(), {"x": data(300, 1)}, metric=metric, **{**SMALL, "m": 25})
    session = gapa_onnx.session(
        exposed(net(), [fit.site.query for fit in conversion.calibration.places]).SerializeToString()
    )
    for fit in conversion.calibration.places:
        rows = fit.as_compared(session.run([fit.site.query], {"x": data(300, 1)})[0])
        points, sizes = fit.index.points.astype(np.float64), fit.sizes
        if metric != "polar":
            assert (np.linalg.norm(points, axis=1) < 0.999).mean() > 0.5  # means of unit vectors
        owners = cdist(rows.astype(np.float64), points).argmin(axis=1)
        found = fit.leave_one_out(rows)
        for row in range(0, 300, 23):
            own, others = owners[row], points.copy()
            if sizes[own] > 1:
                others[own] = (sizes[own] * points[own] - rows[row]) / (sizes[own] - 1)
            else:
                others = np.delete(points, own, axis=0)
            expected = share(
                rows[row : row + 1].astype(np.float64), others, fit.k, fit.length_scale, fit.jitter
            )
            assert found[row] == pytest.approx(expected[0], rel=1e-3, abs=1e-6)


# ------------------------------------------------------------------------- what they change


@pytest.mark.parametrize("task", ["classification", "regression"])
def test_a_variance_is_raised_by_what_witnesses_find_beyond_the_ordinary(task):
    """And by nothing else: (1 + beyond) times that of a file without witnesses; predictions stay, bit for bit."""
    choices = {**SMALL, "metric": "euclidean", "task": task}
    x = np.concatenate([data(50, 2), 4 * data(20, 3)])
    alone, heard = (
        gapa_onnx.convert(net(), {"x": data(300, 1)}, witnesses=witnesses, **choices)
        for witnesses in ("none", "auto")
    )
    record = read(heard.model)
    gauge = record.heads["y"].score.witnesses.earlier
    held = {t.name: onnx.numpy_helper.to_array(t).astype(np.float64) for t in heard.model.graph.initializer}
    assert gauge.reads == (record.witnesses[0].share,)
    shares, var, mean = runs(heard.model, [gauge.reads[0], "y_var", "y"], x)["native"]
    var_alone, mean_alone = runs(alone.model, ["y_var", "y"], x)["native"]
    z = (np.log(np.maximum(shares[:, :1].astype(np.float64), 1e-12)) - held[gauge.centre]) * held[gauge.slope]
    beyond = np.logaddexp(0, z)
    np.testing.assert_array_equal(mean, mean_alone)
    (site,), (site_alone,) = heard.numbers.fits, alone.numbers.fits
    assert (site.scale, site.ceiling) == (site_alone.scale, site_alone.ceiling)
    np.testing.assert_allclose(var, (1 + beyond) * var_alone, rtol=1e-4)
    assert np.median(beyond[:50]) < 0.1 and beyond[50:].max() > 1


def test_without_witnesses_nothing_of_them_is_in_the_file():
    choices = {**SMALL, "metric": "euclidean"}
    model = gapa_onnx.convert(net(), {"x": data(300, 1)}, witnesses="none", **choices).model
    assert read(model).witnesses == () and not any("beyond" in t.name for t in model.graph.initializer)
    assert not any("a/gapa" in name for node in model.graph.node for name in node.output)
    score = read(model).heads["y"].score
    assert score.kind == "witnesses" and score.witnesses.earlier is None  # by the site and the entropy alone


def test_coordinates_are_no_noise_where_activations_span_little():
    """Sixteen numbers that are made of three: what is left beside the principal axes is rounding alone, in which numpy
    and onnxruntime differ; no share may follow it."""
    generator = np.random.default_rng(0)
    text = """net (float[n, 3] x) => (float[n, 3] y) {
        a = MatMul(x, v)  b = Tanh(a)  c = MatMul(b, q)  h = Tanh(c)  y = MatMul(h, w) }"""
    shapes = {"v": (3, 16), "q": (16, 16), "w": (16, 3)}
    model = parse(text, **{name: generator.normal(size=shape) / 2 for name, shape in shapes.items()})
    x, new = (generator.normal(size=(rows, 3)).astype(np.float32) for rows in (400, 100))
    conversion = gapa_onnx.convert(model, {"x": x}, metric="projected", **SMALL)
    (fit,) = conversion.calibration.witnesses
    place = read(conversion.model).witnesses[0]
    found, z = runs(conversion.model, [place.share, place.query], new)["native"]
    expected = share(fit.as_compared(z), fit.index.points, fit.k, fit.length_scale, fit.jitter)
    np.testing.assert_allclose(found[:, 0], expected, rtol=0.02, atol=1e-5)

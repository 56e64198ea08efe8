"""Inducing points in half precision and in 8 bits: rounding, the nodes that undo it, and what a file gains."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.fit.statistics import leave_one_out_share
from gapa_onnx.op.contract import SCHEMAS
from gapa_onnx.op.storage import fit_storage, read_points
from gapa_onnx.record import read
from gapa_onnx.sessions.runtime import library_path, register, session_options
from gapa_onnx.settings import Settings

ROUNDED = ("float16", "int8")
WIDTH, POINTS, K = 64, 400, 10


def operators(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The operators at the sites of a model."""
    names = {schema.name for schema in SCHEMAS.values()}
    return [node for node in model.graph.node if node.op_type in names]


def cloud(rows: int, seed: int = 0, width: int = WIDTH) -> np.ndarray:
    rng = np.random.default_rng(seed)
    centres = np.random.default_rng(99).standard_normal((6, width)) * 2
    return (centres[rng.integers(6, size=rows)] + rng.standard_normal((rows, width))).astype(np.float32)


@pytest.fixture(scope="module")
def network() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        network (float[n, {WIDTH}] x) => (float[n, 5] y) {{ z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2) }}"""
    )
    for name, shape in (("w1", (WIDTH, WIDTH)), ("w2", (WIDTH, 5))):
        weights = (rng.standard_normal(shape) / 8).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    return model


@pytest.fixture(scope="module")
def converted(network, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")

    @functools.cache
    def make(points: str, **choices):
        path = folder / f"{points}-{'-'.join(map(str, choices.values()))}.onnx"
        conversion = convert(network, path, points, **choices)
        assert conversion.path is not None, conversion.checks
        return conversion

    return make


def convert(network, path, points: str, **choices):
    return gapa_onnx.convert(
        network,
        {"x": cloud(1500)},
        path,
        points=points,
        m=POINTS,
        k=K,
        **{"metric": "euclidean", "witnesses": "none"} | choices,
    )


# ------------------------------------------------------------------ arithmetic


@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize("offset", [0.0, 3.0, -2000.0])
def test_rounding_again_changes_nothing(format, offset):
    points = cloud(300) + np.float32(offset)
    storage = fit_storage(format, points)
    once = storage.rounded(points)
    assert once.dtype == np.float32
    np.testing.assert_array_equal(storage.rounded(once), once)


def test_half_precision_is_within_half_a_unit():
    points = cloud(300)
    error = np.abs(fit_storage("float16", points).rounded(points) - points)
    assert (error <= np.abs(points) * 2.0**-11 + 2.0**-25).all()
    assert error.max() > 0


def test_eight_bits_are_within_half_a_step_of_each_coordinate():
    points = cloud(300) * np.logspace(-3, 3, WIDTH).astype(np.float32)  # no common scale would do
    error = np.abs(fit_storage("int8", points).rounded(points).astype(np.float64) - points)
    step = np.ptp(points.astype(np.float64), axis=0) / 255
    largest = np.abs(points).max(axis=0)
    # besides half a step the rounding of the step itself, 255 times over, and of two operations
    assert (error <= step / 2 + 4 * largest * 2.0**-23).all()
    assert (error.max(axis=0) > step / 4).all()


def test_coordinates_that_hardly_or_never_move():
    points = np.tile(np.float32([1e6, 0.0, -7.5]), (4, 1))
    points[1, 0] = np.nextafter(np.float32(1e6), np.float32(2e6))  # a range far below 255 roundings
    storage = fit_storage("int8", points)
    once = storage.rounded(points)
    np.testing.assert_array_equal(once[:, 1:], points[:, 1:])
    np.testing.assert_allclose(once[:, 0], points[:, 0], rtol=2.0**-21)
    np.testing.assert_array_equal(storage.rounded(once), once)


def test_what_half_precision_cannot_hold_is_refused():
    with pytest.raises(UserError, match="65504") as caught:
        fit_storage("float16", np.float32([[1.0, -1e5]]))
    assert "int8" in caught.value.hint


def test_settings_refuse_what_makes_no_sense():
    with pytest.raises(UserError, match="`points='float64'` is not known"):
        Settings(points="float64")
    with pytest.raises(UserError, match="stores points as codes of its own"):
        Settings(points="int8", index="ivfpq")


# ------------------------------------------------------------- leaving one out


@pytest.mark.parametrize("format", ROUNDED)
@pytest.mark.parametrize("local", [False, True], ids=["exact", "cached"])
def test_a_rounded_row_is_left_out_as_its_original_would_be(format, local):
    """Every row is an inducing point: without its own rounded copy, s is that of the other rounded rows."""
    from gapa_onnx.op import reference
    from gapa_onnx.op.neighbourhoods import neighbourhoods

    rows = cloud(60, width=5)
    storage = fit_storage(format, rows)
    points = storage.rounded(rows)
    near = neighbourhoods(points, 8) if local else None
    shares = leave_one_out_share(rows, points, 8, 3.0, 1e-4, None, near, storage.rounded(rows))
    for i in range(len(rows)):
        others = np.delete(np.arange(len(points)), i)
        if local:
            closest = others[np.argmin(((points[others].astype(float) - rows[i]) ** 2).sum(axis=1))]
            ids = near[closest][near[closest] != i]
        else:
            ids = others[reference.nearest(rows[i : i + 1], points[others], 8)[0]]
        expected = reference.unexplained_share(rows[i : i + 1], points, ids[None], 3.0, 1e-4)
        np.testing.assert_allclose(shares[i], expected[0], rtol=1e-6, atol=1e-9)
    unaware = leave_one_out_share(rows, points, 8, 3.0, 1e-4, None, near)
    assert np.median(unaware) < np.median(shares) / 2


# ------------------------------------------------------------------- the file


@pytest.mark.parametrize("choices", [{}, {"index": "ivf"}, {"index": "hnsw"}, {"solver": "cached"}], ids=str)
@pytest.mark.parametrize("format", ROUNDED)
def test_the_file_holds_the_points_that_everything_was_fitted_to(converted, format, choices):
    conversion = converted(format, **choices)
    (fit,), (node,) = conversion.calibration.fits, operators(conversion.model)
    ports = [name for name in node.input if name.endswith("/points")]
    np.testing.assert_array_equal(read_points(conversion.model, ports[0]), fit.index.points)
    stored = {t.name: t.data_type for t in conversion.model.graph.initializer}
    kind = {"float16": onnx.TensorProto.FLOAT16, "int8": onnx.TensorProto.UINT8}[format]
    assert stored[f"{ports[0]}/{format}"] == kind and ports[0] not in stored
    # onnxruntime's own decoding, to the bit
    exposed = onnx.ModelProto.FromString(conversion.model.SerializeToString())
    exposed.graph.output.append(onnx.helper.make_tensor_value_info(ports[0], onnx.TensorProto.FLOAT, None))
    for optimise in (False, True):
        options = session_options(optimise=optimise)
        register(options)
        session = ort.InferenceSession(exposed.SerializeToString(), options)
        (decoded,) = session.run([ports[0]], {"x": cloud(3)})
        np.testing.assert_array_equal(decoded, fit.index.points)


@pytest.mark.parametrize("choices", [{}, {"index": "ivf"}, {"solver": "cached"}], ids=str)
@pytest.mark.parametrize("format", ROUNDED)
def test_the_same_variance_natively_and_portably_at_every_level(converted, network, format, choices):
    path, x = converted(format, **choices).path, cloud(40, seed=5)
    source = ort.InferenceSession(network.SerializeToString())
    levels = ort.GraphOptimizationLevel
    answers = []
    for level in (levels.ORT_DISABLE_ALL, levels.ORT_ENABLE_BASIC, levels.ORT_ENABLE_ALL):
        for native in (False, True) if library_path() else (False,):
            options = ort.SessionOptions()
            options.graph_optimization_level = level
            if native:
                register(options)
            mean, var = ort.InferenceSession(str(path), options).run(["y", "y_var"], {"x": x})
            if level == levels.ORT_ENABLE_ALL:
                np.testing.assert_array_equal(mean, source.run(["y"], {"x": x})[0])
            answers.append(var)
    for var in answers[1:]:
        np.testing.assert_allclose(var, answers[0], rtol=1e-4)


def test_the_native_kernel_gets_constants_once_they_are_folded(converted, tmp_path):
    """The optimised graph has no decoding left: points are prepared at load, not at every run."""
    for format in ROUNDED:
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
        if not register(options):
            pytest.skip("the native library is not built")
        ort.InferenceSession(str(converted(format).path), options)
        optimised = onnx.load(tmp_path / "optimised.onnx")
        (node,) = operators(optimised)
        assert set(node.input[1:]) <= {tensor.name for tensor in optimised.graph.initializer}


def test_the_file_is_smaller_by_what_the_points_save(converted):
    sizes = {format: converted(format).path.stat().st_size for format in ("float32", *ROUNDED)}
    values, more = POINTS * WIDTH, 2 * 4 * WIDTH + 1500  # step and least; nodes, names and the record
    for format, saved in (("float16", 2), ("int8", 3)):
        assert saved * values - more <= sizes["float32"] - sizes[format] <= saved * values


def test_the_error_is_measured_against_the_points_as_they_were(converted, network):
    from gapa_onnx.op import reference

    exact = converted("float32").calibration.fits[0]
    assert exact.storage_error == 0.0
    queries = cloud(500, seed=7) @ onnx.numpy_helper.to_array(network.graph.initializer[0])
    errors = {}
    for format in ROUNDED:
        conversion = converted(format)
        fit = conversion.calibration.fits[0]
        assert fit.length_scale == exact.length_scale
        (site,) = read(conversion.model).sites
        assert (site.storage, site.storage_error) == (format, fit.storage_error)
        shares = [
            reference.unexplained_share(
                queries, f.index.points, reference.nearest(queries, f.index.points, K), f.length_scale, 1e-6
            )
            for f in (fit, exact)
        ]
        # Fresh queries of the same kind: the largest of 500 errors is of the order of the largest of 1000.
        errors[format] = np.abs(shares[0] - shares[1]).max()
        assert fit.storage_error / 5 < errors[format] < 5 * fit.storage_error
    assert 0 < errors["float16"] < errors["int8"]


def test_same_bytes_twice(converted, network, tmp_path):
    convert(network, tmp_path / "again.onnx", "int8")
    assert converted("int8").path.read_bytes() == (tmp_path / "again.onnx").read_bytes()

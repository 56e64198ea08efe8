"""Fewer neighbours at run time, in a whole converted file: the native library and the portable function agree."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.sessions.inference import open_model
from gapa_onnx.sessions.runtime import LIBRARY_VARIABLE, library_path, lower_neighbours


@pytest.fixture(scope="module", params=["exact", "cached"])
def converted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """The path of the digits classifier with 20 neighbours, and rows for it."""
    folder = tmp_path_factory.mktemp("converted")
    rows = dict(np.load(MODELS / "digits_mlp_calibration.npz"))
    source = MODELS / "digits_mlp.onnx"
    name = onnx.load(source).graph.input[0].name
    path = folder / "digits.onnx"
    gapa_onnx.convert(source, {name: rows[name]}, path, k=20, m=150, task="none", solver=request.param)
    return path, {name: rows[name][:40] + np.float32(0.3)}


def variances(session, feed: dict[str, np.ndarray]) -> np.ndarray:
    (name,) = [output.name for output in session.get_outputs() if output.name.endswith("_var")]
    return session.run([name], feed)[0]


@pytest.mark.parametrize("native", [True, False])
def test_equals_the_file_with_that_k(converted, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    path, feed = converted
    if not native:
        monkeypatch.setenv(LIBRARY_VARIABLE, "")
    lowered = variances(gapa_onnx.session(path, k=4), feed)
    model = onnx.load(path)
    lower_neighbours(model, 4)
    monkeypatch.undo()
    np.testing.assert_allclose(
        lowered, variances(gapa_onnx.session(model.SerializeToString()), feed), rtol=1e-4
    )
    full = variances(gapa_onnx.session(path), feed)
    assert (lowered >= full * (1 - 1e-4)).all() and (lowered > 1.01 * full).any()
    unchanged = variances(gapa_onnx.session(path, k=500), feed)
    assert unchanged.tobytes() == full.tobytes()


@pytest.mark.parametrize("native", [True, False])
def test_the_environment_is_asked_where_nothing_else_says(
    converted, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, feed = converted
    if not native:
        monkeypatch.setenv(LIBRARY_VARIABLE, "")
    full, four, seven = (variances(gapa_onnx.session(path, k=k), feed).tobytes() for k in (500, 4, 7))
    assert len({full, four, seven}) == 3
    monkeypatch.setenv("GAPA_ONNX_K", "4")
    assert variances(gapa_onnx.session(path), feed).tobytes() == four
    assert variances(gapa_onnx.session(path, k=7), feed).tobytes() == seven
    options = ort.SessionOptions()
    options.add_session_config_entry("ai.gapa.k", "7")
    assert variances(gapa_onnx.session(path, options), feed).tobytes() == seven
    assert variances(open_model(path), feed).tobytes() == full  # the commands of gapa-onnx do not ask it
    monkeypatch.setenv("GAPA_ONNX_K", "")
    assert variances(gapa_onnx.session(path), feed).tobytes() == full


@pytest.mark.parametrize("text", ["0", "-3", "many", "5.0", " 5", "9" * 40, "٣"])
@pytest.mark.parametrize("native", [True, False])
def test_an_environment_without_a_number_is_refused(
    converted, native: bool, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GAPA_ONNX_K", text)
    message = "environment variable GAPA_ONNX_K must be a whole number of neighbours, at least 1, but is"
    if native:  # as a server that knows nothing of this package meets it: a status of onnxruntime
        with pytest.raises(Exception, match=message) as refusal:
            ort.SessionOptions().register_custom_ops_library(str(library_path()))
        assert not isinstance(refusal.value, UserError)
    monkeypatch.setenv(LIBRARY_VARIABLE, str(library_path()) if native else "")
    with pytest.raises(UserError, match=message):
        gapa_onnx.session(converted[0])


def test_a_file_with_k_inside_its_functions_is_refused() -> None:
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 9, "ai.gapa" : 1]>
        g (float[n, 2] z) => (float s) <int64[1] k = {3}> {
            s, near = ai.gapa.GapaActivation (z, k, z, z, z)
        }"""
    )
    with pytest.raises(UserError, match="fixed inside"):
        lower_neighbours(model, 2)

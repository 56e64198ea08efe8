"""Batches that a model takes only as they were given: never cut, never joined, and right to the last number."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.small_models import parse

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.data import InputSpec, open_data
from gapa_onnx.errors import UserError
from gapa_onnx.record import read
from gapa_onnx.sessions.feeding import feeding

WIDTH, HIDDEN, CLASSES = 6, 8, 3
SMALL = {"m": 30, "k": 5}
Given = list[dict[str, np.ndarray]]


def weights(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    generator = np.random.default_rng(5)
    return [generator.normal(size=shape).astype(np.float32) for shape in shapes]


def in_fours() -> onnx.ModelProto:
    """Rows in fours, each of which sees the mean of its four: (N, d) -> (N / 4, 4, d)."""
    w1, w2 = weights((WIDTH, HIDDEN), (HIDDEN, CLASSES))
    model = parse(
        "net (float[n, 6] x) => (float[n, 3] y) { f = Reshape(x, four)  m = ReduceMean<axes=[1], keepdims=1>(f)"
        " c = Add(f, m)  r = Reshape(c, flat)  z = MatMul(r, w1)  h = Tanh(z)  y = MatMul(h, w2) }",
        w1=w1,
        w2=w2,
    )
    for name, shape in (("four", [-1, 4, WIDTH]), ("flat", [-1, WIDTH])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(shape, np.int64), name))
    return model


def with_state() -> onnx.ModelProto:
    """A recurrent layer, time first, whose state (1, N, h) has another name for N than the inputs (T, N, d)."""
    w, r, w2 = weights((1, 4 * HIDDEN, WIDTH), (1, 4 * HIDDEN, HIDDEN), (HIDDEN, CLASSES))
    return parse(
        "net (float[t, n, 6] x, float[1, rows, 8] h0, float[1, rows, 8] c0) =>"
        " (float[n, 3] y, float[1, n, 8] hn) {"
        " s, hn, cn = LSTM<hidden_size=8>(x, w, r, , , h0, c0)"
        " l = Squeeze(hn, zero)  z = MatMul(l, w1)  h = Relu(z)  y = MatMul(h, w2) }",
        w=w / 3,
        r=r / 3,
        w1=np.random.default_rng(1).normal(size=(HIDDEN, HIDDEN)),
        w2=w2,
    )


def _with_zero(model: onnx.ModelProto) -> onnx.ModelProto:
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0], np.int64), "zero"))
    return model


def over_time() -> onnx.ModelProto:
    """Time first, and an answer for each moment: sequences of any length run, and only whole ones are right."""
    w, r, w2 = weights((1, 4 * HIDDEN, WIDTH), (1, 4 * HIDDEN, HIDDEN), (HIDDEN, CLASSES))
    return parse(
        "net (float[t, 1, 6] x) => (float[t, 1, 3] y) { s, hn, cn = LSTM<hidden_size=8>(x, w, r)"
        " l = Squeeze(s, zero)  z = MatMul(l, w1)  h = Relu(z)  y = MatMul(h, w2) }",
        w=w,
        r=r,
        w1=np.random.default_rng(1).normal(size=(HIDDEN, HIDDEN)),
        w2=w2,
    )


def streaming() -> onnx.ModelProto:
    """Sound in pieces, a state with the samples on its second axis, and a rate that is one number for all."""
    w1, w2, w3 = weights((WIDTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, 1))
    return parse(
        "net (float[n, 6] x, float[2, m, 8] state, float rate) => (float[n, 1] y, float[2, n, 8] after) {"
        " a = MatMul(x, w1)  s = ReduceMean<axes=[0], keepdims=0>(state)  b = MatMul(s, w2)  c = Add(a, b)"
        " z = Mul(c, rate)  h = Tanh(z)  y = MatMul(h, w3)  after = Add(state, h) }",
        w1=w1,
        w2=w2,
        w3=w3,
    )


def batches_for(model: str, count: int = 30) -> Given:
    rng = np.random.default_rng(9)

    def normal(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    made = {
        "in_fours": lambda i: {"x": normal(8 if i % 3 else 4, WIDTH)},
        "with_state": lambda i: {
            "x": normal(5 + i % 2, 2 + i % 3, WIDTH),
            "h0": normal(1, 2 + i % 3, HIDDEN),
            "c0": normal(1, 2 + i % 3, HIDDEN),
        },
        "over_time": lambda i: {"x": normal(4 + i % 3, 1, WIDTH)},
        "streaming": lambda i: {
            "x": normal(3, WIDTH),
            "state": normal(2, 3, HIDDEN),
            "rate": np.array(1 + i % 2, np.float32),
        },
    }
    return [made[model](i) for i in range(count)]


MODELS = {
    "in_fours": in_fours(),
    "with_state": _with_zero(with_state()),
    "over_time": None,  # below: its Squeeze takes another axis
    "streaming": streaming(),
}
_time = over_time()
_time.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1], np.int64), "zero"))
MODELS["over_time"] = _time


def session_of(model: onnx.ModelProto) -> ort.InferenceSession:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def answers(model: onnx.ModelProto, given: Given, name: str) -> list[np.ndarray]:
    opened = session_of(model)
    return [opened.run([name], batch)[0] for batch in given]


class Calibration:
    """As onnxruntime's quantiser takes data."""

    def __init__(self, given: Given):
        self.left = iter(given)

    def get_next(self) -> dict[str, np.ndarray] | None:
        return next(self.left, None)


def as_folder(given: Given, folder: Path) -> Path:
    folder.mkdir()
    for number, batch in enumerate(given):
        np.savez(folder / f"{number:03}.npz", **batch)
    return folder


def as_loader(given: Given, folder: Path) -> str:
    as_folder(given, folder)
    (folder.parent / "loader.py").write_text(
        "from pathlib import Path\nimport numpy as np\n\ndef load():\n"
        f"    for path in sorted(Path({str(folder)!r}).iterdir()):\n"
        "        with np.load(path) as file:\n            yield dict(file)\n"
    )
    return f"{folder.parent / 'loader.py'}:load"


FORMS = {
    "list": lambda given, tmp: given,
    "generator": lambda given, tmp: (batch for batch in given),
    "reader": lambda given, tmp: Calibration(given),
    "folder": lambda given, tmp: as_folder(given, tmp / "given"),
    "loader": lambda given, tmp: as_loader(given, tmp / "given"),
}


@pytest.mark.parametrize("model, form", [(m, "list") for m in MODELS] + [("with_state", f) for f in FORMS])
def test_a_model_is_fed_what_was_given(model, form, tmp_path):
    given = batches_for(model)
    conversion = gapa_onnx.convert(MODELS[model], FORMS[form](given, tmp_path), task="y=regression", **SMALL)
    assert all(check.passed for check in conversion.checks)
    fed = conversion.calibration.fed
    assert fed.size is None
    for batch, own in zip(fed.batches(), given, strict=True):
        assert batch.keys() == own.keys()
        for name, array in own.items():
            np.testing.assert_array_equal(batch[name], array)
    expected = answers(MODELS[model], given, "y")
    assert fed.counted == tuple(map(len, expected)) and conversion.calibration.rows == sum(fed.counted)
    # the site is fitted to what the model computes for the batches as they are
    *_, fit = conversion.calibration.fits
    probed = onnx.ModelProto()
    probed.CopyFrom(MODELS[model])
    probed.graph.output.append(onnx.helper.make_empty_tensor_value_info(fit.site.query))
    queries = np.concatenate([rows.reshape(-1, HIDDEN) for rows in answers(probed, given, fit.site.query)])
    assert fit.rows == len(queries)
    np.testing.assert_allclose(fit.prior_var.ravel(), queries.astype(np.float64).var(axis=0), rtol=1e-5)
    # and the file gives the source's answers for them, with a variance each
    opened = session_of(conversion.model)
    names = [value.name for value in opened.get_outputs()]
    for batch, mean in zip(given, expected):
        found = dict(zip(names, opened.run(names, batch)))
        assert found["y"].tobytes() == mean.tobytes()
        assert found["y_var"].shape == mean.shape and (found["y_var"] > 0).all()


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> tuple[Path, Path, str]:
    """Source, converted file and data of the model with a state."""
    folder = tmp_path_factory.mktemp("as_given")
    source, out = folder / "net.onnx", folder / "net.gapa.onnx"
    onnx.save(MODELS["with_state"], source)
    data = str(as_folder(batches_for("with_state"), folder / "data"))
    assert main(["convert", str(source), "--calib", data, "-o", str(out), "--m", "30", "--k", "5",
                 "--task", "y=regression"]) == 0  # fmt: skip
    return source, out, data


def test_run_writes_a_row_per_sample(converted, tmp_path, capsys):
    _, out, data = converted
    assert main(["run", str(out), "--data", data, "-o", str(tmp_path / "y.npz")]) == 0
    assert "hn" in capsys.readouterr().err  # (1, N, h): no row per sample
    expected = np.concatenate(answers(MODELS["with_state"], batches_for("with_state"), "y"))
    with np.load(tmp_path / "y.npz") as file:
        np.testing.assert_array_equal(file["y"], expected)
        assert file["y_ood"].shape == expected.shape[:1]
        assert file["y_ood"].mean() < 0.2
        assert "hn" not in file


def test_evaluate_takes_a_label_per_sample(converted):
    _, out, data = converted
    truth = np.concatenate(answers(MODELS["with_state"], batches_for("with_state"), "y"))
    found = gapa_onnx.evaluate(out, data, truth + 0.5, output="y")
    assert found.rows == len(truth)
    assert found.metrics["gapa"]["rmse"] == pytest.approx(0.5, rel=1e-5)
    with pytest.raises(UserError, match="label"):
        gapa_onnx.evaluate(out, data, truth[:-1], output="y")


def test_verify_threshold_and_bench_feed_them_too(converted, tmp_path, capsys):
    source, out, data = converted
    assert main(["verify", str(source), str(out), "--data", data, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    samples = [len(rows) for rows in answers(MODELS["with_state"], batches_for("with_state"), "y")]
    assert answer["passed"] and answer["rows"] == sum(samples)
    moved = tmp_path / "moved.onnx"
    gapa_onnx.set_threshold(out, data=data, quantile=0.9, output="y", out=moved)
    assert read(onnx.load(moved)).heads["y"].score.rows == sum(samples)
    main(
        ["bench", str(source), str(out), "--data", data, "--rounds", "6", "--json"]
    )  # a busy machine may refuse
    measured = json.loads(capsys.readouterr().out)["measurements"]
    assert [entry["batch"] for entry in measured] == samples[:1]


def test_a_budget_is_measured_on_a_batch_as_given(monkeypatch):
    from gapa_onnx.measure import budget

    asked = []

    def fake(source, model, *, batch, data, parts):
        asked.append((batch, data))
        return type("Found", (), {"ratio": 1.1, "control": 1.0})

    monkeypatch.setattr(budget, "measure", fake)
    given = batches_for("with_state")
    gapa_onnx.convert(MODELS["with_state"], given, budget=2, task="y=regression", **SMALL)
    ((rows, batch),) = asked
    assert rows == given[0]["x"].shape[1] and batch["x"].shape == given[0]["x"].shape


def test_targets_belong_to_samples():
    given = batches_for("in_fours", 40)
    targets = np.concatenate(answers(MODELS["in_fours"], given, "y"))
    targets = targets + np.random.default_rng(0).normal(size=targets.shape)
    conversion = gapa_onnx.convert(MODELS["in_fours"], given, targets=targets, task="regression", **SMALL)
    noise = read(conversion.model).heads["y"].noise
    assert noise.rows == len(targets) - len(targets) // 3
    with pytest.raises(UserError, match=f"{len(targets) - 1} targets for {len(targets)} calibration rows"):
        gapa_onnx.convert(MODELS["in_fours"], given, targets=targets[:-1], task="regression", **SMALL)


def test_what_the_model_says_of_a_batch_as_given_is_told():
    with pytest.raises(UserError, match=r"the model failed on the data: .*\{6,6\}"):
        gapa_onnx.convert(MODELS["in_fours"], [{"x": np.ones((6, 6), np.float32)}] * 3, **SMALL)


def test_data_that_fit_neither_way_are_refused_as_before():
    inputs = [InputSpec("x", np.dtype(np.float32), ("n", 6))]
    with pytest.raises(UserError, match=r"shape \(4, 5\), but input 'x' takes float32 \(n, 6\)"):
        open_data({"x": np.ones((4, 5))}, inputs)


def test_a_free_batch_axis_is_still_cut_and_joined():
    rows = np.random.default_rng(0).normal(size=(50, 2)).astype(np.float32)
    model = parse("net (float[n, 2] x) => (float[n, 2] y) { z = MatMul(x, w)  y = Tanh(z) }", w=np.eye(2))
    for given in ([{"x": rows[:20]}, {"x": rows[20:]}], {"x": rows}):
        fed = feeding(session_of(model), open_data(given, [InputSpec("x", np.dtype(np.float32), ("n", 2))]))
        assert fed.size == 256 and [len(batch["x"]) for batch in fed.batches()] == [50]


def test_three_rows_that_the_model_fixes_stay_together():
    rows = np.random.default_rng(0).normal(size=(60, 2)).astype(np.float32)
    model = parse(
        "net (float[3, 2] x) => (float[3, 4] y) { z = MatMul(x, w)  h = Tanh(z)  y = MatMul(h, v) }",
        w=np.random.default_rng(1).normal(size=(2, 8)),
        v=np.random.default_rng(2).normal(size=(8, 4)),
    )
    for given in ({"x": rows}, [{"x": part} for part in np.split(rows, 20)]):
        conversion = gapa_onnx.convert(model, given, **SMALL)
        assert conversion.calibration.rows == 60 and all(check.passed for check in conversion.checks)
        assert {batch["x"].shape for batch in conversion.calibration.fed.batches()} == {(3, 2)}


def test_a_constant_with_a_long_first_axis_is_no_row(tmp_path):
    """The state (2, 1, 8) of a model that takes one row at a time does not make two rows of it."""
    model = streaming()
    for value in (*model.graph.input[:2], *model.graph.output):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param:
                axis.dim_value = 1
    rng = np.random.default_rng(3)

    def load() -> Iterator[dict[str, np.ndarray]]:
        for _ in range(40):
            yield {"x": rng.normal(size=(1, 6)), "state": np.zeros((2, 1, 8)), "rate": np.array([1.0])}

    conversion = gapa_onnx.convert(model, load, task="y=regression", **SMALL)
    assert conversion.calibration.rows == 40

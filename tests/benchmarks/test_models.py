"""The checked-in example models are what provenance.json says; the demo counts and draws what it claims."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest
from support.paths import BENCHMARKS, MODELS

PROVENANCE = json.loads((MODELS / "provenance.json").read_text(encoding="utf-8"))
NAMES = list(PROVENANCE["models"])


def run(name: str, rows: np.ndarray) -> np.ndarray:
    session = onnxruntime.InferenceSession(MODELS / f"{name}.onnx", providers=["CPUExecutionProvider"])
    return session.run(None, {PROVENANCE["models"][name]["input"]: rows})[0]


def import_file(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[path.stem]
    return module


def load(name: str, kind: str) -> dict[str, np.ndarray]:
    with np.load(MODELS / f"{name}_{kind}.npz") as file:
        return dict(file)


def test_every_binary_is_recorded_small_and_unchanged():
    present = {path.name for path in MODELS.iterdir() if path.suffix in {".onnx", ".npz"}}
    assert present == set(PROVENANCE["files"])
    for file, recorded in PROVENANCE["files"].items():
        content = (MODELS / file).read_bytes()
        assert len(content) == recorded["bytes"] < 1_000_000
        assert hashlib.sha256(content).hexdigest() == recorded["sha256"], file


@pytest.mark.parametrize("name", NAMES)
def test_the_file_is_clean_and_readable(name):
    model = onnx.load(MODELS / f"{name}.onnx")
    onnx.checker.check_model(model, full_check=True)
    recorded = PROVENANCE["models"][name]
    assert (model.ir_version, [(o.domain, o.version) for o in model.opset_import]) == (8, [("", 17)])
    assert [i.name for i in model.graph.input] == [recorded["input"]]
    assert [o.name for o in model.graph.output] == [recorded["output"]]
    for value in (*model.graph.input, *model.graph.output):
        assert value.type.tensor_type.shape.dim[0].dim_param == "batch"
    named = [node.name for node in model.graph.node]
    assert all(named) and len(set(named)) == len(named)


def test_batch_normalization_is_a_node_that_does_something():
    model = onnx.load(MODELS / "digits_cnn.onnx")
    (node,) = [node for node in model.graph.node if node.op_type == "BatchNormalization"]
    constants = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    mean, var = (constants[name] for name in node.input[3:])
    # statistics of data, not torch's start values 0 and 1
    assert np.abs(mean).max() > 0.01 and np.abs(var - 1).max() > 0.01


@pytest.mark.parametrize("name", NAMES)
def test_heldout_result_is_what_provenance_records(name):
    rows, recorded = load(name, "heldout"), PROVENANCE["models"][name]
    answer, labels = run(name, rows[recorded["input"]]).astype(np.float64), rows["labels"]
    if recorded["measure"] == "accuracy":
        result, floor = np.mean(answer.argmax(axis=1) == labels), 0.95
    else:
        variance = np.mean((labels - labels.mean(dtype=np.float64)) ** 2)
        result, floor = 1 - np.mean((labels - answer) ** 2) / variance, 0.3
    assert result >= recorded["heldout"] - 1e-6
    assert result >= floor  # guards against a provenance that was lowered together with the model


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_float32_of_the_models_shape_and_count(name):
    recorded = PROVENANCE["models"][name]
    for kind, count in recorded["rows"].items():
        rows = load(name, kind)
        extra = {"labels"} if kind == "heldout" else set()
        assert set(rows) == {recorded["input"]} | extra, kind
        assert rows[recorded["input"]].dtype == np.float32
        assert len(rows[recorded["input"]]) == count
        assert np.isfinite(run(name, rows[recorded["input"]])).all()  # also: the shape is accepted


@pytest.mark.parametrize("name", NAMES)
def test_calibration_and_heldout_are_disjoint_and_complete(name):
    """Together they are the whole data set, and no held-out row is a copy of a calibration row."""
    key = PROVENANCE["models"][name]["input"]
    calibration, heldout = load(name, "calibration")[key], load(name, "heldout")[key]
    assert len(calibration) + len(heldout) == (442 if name.startswith("diabetes") else 1797)
    seen = {row.tobytes() for row in calibration}
    assert not any(row.tobytes() in seen for row in heldout)


@pytest.mark.parametrize("name", ["digits_cnn", "digits_mlp"])
def test_foreign_digits_are_made_as_described(name):
    key = PROVENANCE["models"][name]["input"]
    heldout, rotated, shuffled, noise = (
        load(name, kind)[key].reshape(-1, 64) for kind in ("heldout", "rotated", "shuffled", "noise")
    )  # each (450, 64)
    came_from = [c * 8 + 7 - r for r in range(8) for c in range(8)]  # a quarter turn to the left
    assert np.array_equal(rotated, heldout[:, came_from])
    assert np.array_equal(np.sort(shuffled), np.sort(heldout))
    assert np.mean(np.all(shuffled == heldout, axis=1)) == 0
    for rows in (heldout, rotated, shuffled, noise):
        assert np.isin(rows * 16, np.arange(17)).all()
    # 450·64 draws from 17 levels: each level's share within 5 standard errors of 1/17
    share = np.bincount((noise * 16).astype(int).ravel(), minlength=17) / noise.size
    assert np.abs(share - 1 / 17).max() < 5 * np.sqrt(1 / 17 * 16 / 17 / noise.size)


def test_shifted_patients_have_one_feature_moved_by_five():
    heldout, shifted = (load("diabetes_mlp", kind)["features"] for kind in ("heldout", "shifted"))
    moved = np.abs(shifted) - np.abs(heldout)  # (111, 10)
    assert np.array_equal((moved != 0).sum(axis=1), np.ones(len(moved)))
    np.testing.assert_allclose(moved.max(axis=1), 5, atol=1e-5)
    assert np.array_equal(moved.argmax(axis=1), np.arange(len(moved)) % 10)


def test_diabetes_rows_are_standardised_by_the_calibration_rows():
    rows = load("diabetes_mlp", "calibration")["features"].astype(np.float64)
    np.testing.assert_allclose(rows.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(rows.std(axis=0), 1, atol=1e-6)


def test_readme_table_is_that_of_provenance():
    make_models = import_file(MODELS / "make_models.py")
    text = (MODELS / "README.md").read_text(encoding="utf-8")
    table = text.split(make_models.TABLE_BEGIN)[1].split(make_models.TABLE_END)[0].strip()
    assert table == make_models.measured_table(PROVENANCE)


@pytest.fixture(scope="module")
def demo():
    pytest.importorskip("sklearn")
    return import_file(BENCHMARKS / "demo.py")


def test_demo_summary_by_hand(demo):
    def result(score: list[float], logits: list[float]):
        spread = np.array([[0.5, 1.5]])  # the mean over the two classes is the score itself
        images = np.zeros((len(score), 1, 8, 8))
        return demo.Result(images, np.array([logits] * len(score)), np.c_[score] * spread)

    known = result([float(i) for i in range(1, 21)], [0.0, 0.0])
    foreign = result([0.5, 10.0, 19.5, 30.0], [0.0, np.log(3)])
    first, second = demo.summarise({"known": known, "foreign": foreign})
    # the 95% quantile of 1 … 20 is 19.05, and only 20 is above
    assert first == demo.Row("known", 20, 0.5, 10.5, None, 1 / 20)
    assert (second.rows, second.var, second.beyond) == (4, 14.75, 2 / 4)
    # pairs won by the foreign row: 0 of 20, 9 and a tie, 19, 20
    assert second.auroc == pytest.approx((0 + 9.5 + 19 + 20) / 80, abs=1e-12)
    assert second.confidence == pytest.approx(0.75, abs=1e-12)
    assert [line.split()[0] for line in demo.format_table([first, second]).splitlines()[1:]] == [
        "set", "known", "foreign",
    ]  # fmt: skip


@pytest.mark.parametrize("nudge, code, says", [(0.0, 0, "bit-equal on 1800 rows"), (1e-6, 1, "DIFFERENT")])
def test_demo_with_a_stand_in_session(demo, monkeypatch, tmp_path, capsys, nudge, code, says):
    """The whole program but the conversion: a stand-in variance, and logits that are the source's or not."""
    pytest.importorskip("matplotlib")

    def answer(names, feeds):
        assert names == ["logits", "logits_var"]
        logits = run("digits_cnn", feeds["image"])
        ink = feeds["image"].mean(axis=(1, 2, 3))  # (n,)
        return [logits + np.float32(nudge), np.full_like(logits, 0.25) + ink[:, None]]

    stand_in = SimpleNamespace(session=lambda path: SimpleNamespace(run=answer))
    monkeypatch.setitem(sys.modules, "gapa_onnx", stand_in)
    monkeypatch.setattr(demo, "convert", lambda out: out / "converted.onnx")
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path / "made")])
    assert demo.main() == code
    printed = capsys.readouterr().out
    assert says in printed and all(name in printed for name in demo.SETS)
    assert (tmp_path / "made" / "uncertainty.png").read_bytes()[:4] == b"\x89PNG"


def test_demo_says_when_the_command_is_missing(demo, monkeypatch, tmp_path):
    monkeypatch.setattr(demo.shutil, "which", lambda *_, **__: None)
    with pytest.raises(SystemExit, match="gapa-onnx is not installed\nhint: "):
        demo.convert(tmp_path)

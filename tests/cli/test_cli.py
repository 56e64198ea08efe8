"""The command line as people meet it: answers, exit codes, errors without a trace, nothing half-written."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import typer
from onnx import numpy_helper
from support.paths import ROOT

from gapa_onnx.cli import main
from gapa_onnx.cli.help_pages import COMMANDS, help_pages
from gapa_onnx.sessions.runtime import LIBRARY_VARIABLE, library_path

MODEL = ROOT / "models" / "digits_mlp.onnx"
CALIB = ROOT / "models" / "digits_mlp_calibration.npz"
HELDOUT = ROOT / "models" / "digits_mlp_heldout.npz"
NATIVE = library_path() is not None


def call(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of one command in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("converted") / "digits.gapa.onnx"
    assert main(["convert", str(MODEL), "--calib", str(CALIB), "-o", str(out), "--m", "100"]) == 0
    return out


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder for outputs."""
    out = tmp_path / "out"
    out.mkdir()
    return out


# ------------------------------------------------------------------------------ convert


def test_convert_summary(capsys, folder):
    model = Path(shutil.copy(MODEL, folder / "digits.onnx"))
    code, out, err = call(capsys, "convert", model, "--calib", CALIB, "--m", 100)
    assert code == 0
    assert "Traceback" not in err and "error" not in err
    written = folder / "digits.gapa.onnx"
    assert sorted(folder.iterdir()) == [written, model]
    assert re.search(
        r"tanh2\s+Tanh\s+rows\s+100\s+\d+\s+50\s+\d\.\d+\s+\d+(?:\.\d+)?\s+prepared\s+1\.000\s+0\.\d+", out
    )
    for place, kind in (("tanh2", "site"), ("tanh1", "witness")):
        tried = re.search(rf"{place}\s+{kind}\s+rows\s+100\s+\d+\s+(\S+)\s+(.+)", out)
        assert re.search(rf"{tried[1]} 0\.\d{{3}}", tried[2]) and tried[2].count(", ") == 1
    assert re.search(r"logits\s+classification\s+no Softmax at the end", out)
    assert re.search(r"flags\s+p ≤ 0.05, by 1347 left-out calibration rows", out)
    assert "1347 rows" in out and "none dropped" in out
    assert "logits_var" in out
    assert "FAIL" not in out and out.count("pass  ") == 14
    assert f"gapa-onnx run {written} --data {CALIB}" in out
    assert "\x1b" not in out + err  # no colours where there is no terminal


def test_convert_json_describes_the_file(capsys, folder):
    out = folder / "a.onnx"
    code, text, _ = call(
        capsys, "convert", MODEL, "--calib", CALIB, "-o", out, "--m", 100, "--k", 10, "--scale", 2,
        "--length-scale", "7.5", "--inducing", "random", "--metric", "whitened", "--seed", 3, "--json",
    )  # fmt: skip
    answer = json.loads(text)
    assert code == 0
    assert answer["output"] == str(out) and answer["bytes"] == out.stat().st_size
    assert all(check["passed"] for check in answer["checks"])
    site = answer["provenance"]["sites"][0]
    assert (site["k"], site["points"], site["length_scale"], site["scale"]) == (10, 100, 7.5, 2.0)
    settings = answer["provenance"]["settings"]
    assert (settings["inducing"], settings["metric"], settings["seed"]) == ("random", "whitened", 3)


def test_convert_is_deterministic(capsys, folder, converted):
    again = folder / "again.onnx"
    assert call(capsys, "convert", MODEL, "--calib", CALIB, "-o", again, "--m", 100)[0] == 0
    assert again.read_bytes() == converted.read_bytes()


def test_paper_sets_its_choices_and_refuses_others(capsys, folder):
    base = ("convert", MODEL, "--calib", CALIB, "-o", folder / "a.onnx", "--m", 100, "--json", "--paper")
    code, text, _ = call(capsys, *base)
    settings = json.loads(text)["provenance"]["settings"]
    assert code == 0
    assert (settings["length_scale"], settings["scale"], settings["metric"]) == ("input", "none", "euclidean")
    code, text, err = call(capsys, *base, "--length-scale", "site")
    assert (code, text) == (2, "")
    assert "error: --paper sets --length-scale itself" in err


def test_dry_run_writes_nothing(capsys, folder):
    out = folder / "a.onnx"
    code, text, _ = call(
        capsys, "convert", MODEL, "--calib", CALIB, "-o", out, "--dry-run", "--sites", "all", "--json"
    )
    plan = json.loads(text)
    assert code == 0
    assert [site["name"] for site in plan["sites"]] == ["tanh1", "tanh2"]
    assert plan["variance_outputs"] == ["logits"] and plan["refused"] == []
    assert plan["data"]["rows"] == 1347
    code, text, _ = call(capsys, "convert", MODEL, "--calib", CALIB, "-o", out, "--dry-run")
    assert code == 0 and "tanh2" in text and "logits_var" in text
    assert not list(folder.iterdir())


def test_dry_run_meets_the_errors_of_a_real_run(capsys, folder):
    np.savez(folder / "bad.npz", pixels=np.zeros((60, 63), np.float32))
    code, _, err = call(capsys, "convert", MODEL, "--calib", folder / "bad.npz", "--dry-run")
    assert code == 2 and "63" in err
    model = save(folder / "m.onnx", REFUSED)
    np.savez(folder / "x.npz", x=rows(60))
    code, text, err = call(capsys, "convert", model, "--calib", folder / "x.npz", "--dry-run")
    assert code == 2
    assert "Mystery" in text and "error: 1 node(s) behind the sites have no variance rule" in err


def test_failed_check_writes_nothing(capsys, folder, monkeypatch):
    from gapa_onnx import compiler
    from gapa_onnx.measure.verify import Check

    monkeypatch.setattr(compiler, "verify", lambda *_, **__: [Check("a promise", False, "broken on purpose")])
    arguments = (
        "convert",
        MODEL,
        "--calib",
        CALIB,
        "-o",
        folder / "a.onnx",
        "--inducing",
        "random",
        "--k",
        10,
    )
    code, text, _ = call(capsys, *arguments)
    assert code == 1
    assert re.search(r"FAIL\s+a promise\s+broken on purpose", text) and "nothing was written" in text
    code, text, _ = call(capsys, *arguments, "--json")
    assert code == 1 and json.loads(text)["output"] is None
    assert not list(folder.iterdir())


def test_cut_is_said_loudly(capsys, folder):
    model, data, out = save(folder / "m.onnx", CUT), folder / "x.npz", folder / "a.onnx"
    np.savez(data, x=rows(200))
    options = ("--m", 60, "--k", 20)
    code, _, err = call(capsys, "convert", model, "--calib", data, "-o", out, *options)
    assert code == 2 and "CDist" in err and "--on-unsupported cut" in err
    assert not out.exists()
    code, text, err = call(
        capsys, "convert", model, "--calib", data, "-o", out, *options, "--on-unsupported", "cut"
    )
    assert code == 0 and out.exists()
    assert "warning: the variance is cut at 1 node(s)" in err and "CDist" in err
    assert "y_var, the variance of y" in text
    assert re.search(r"certain\s+z: no site reaches it", text)
    assert "CDist" in call(capsys, "inspect", out)[1]


def test_rows_with_nan_are_counted_and_said(capsys, folder):
    with np.load(CALIB) as file:
        pixels = file["pixels"].copy()
    pixels[[700, 701, 900]] = np.nan
    pixels[1000, 5] = np.inf
    np.savez(folder / "nan.npz", pixels=pixels)
    code, text, _ = call(
        capsys, "convert", MODEL, "--calib", folder / "nan.npz", "-o", folder / "a.onnx", "--m", 100
    )
    assert code == 0
    # an infinite pixel is not an infinite pre-activation behind a tanh: it may be dropped or not
    assert re.search(r"1347 rows of .*, [34] dropped at the sites for NaN or infinity", text)


def test_converting_with_images_takes_mean_and_std(capsys, folder):
    Image = pytest.importorskip("PIL.Image")
    model = ROOT / "models" / "digits_cnn.onnx"
    with np.load(ROOT / "models" / "digits_cnn_calibration.npz") as file:
        images = file["image"][:80]
    (folder / "images").mkdir()
    for number, image in enumerate(images):
        Image.fromarray((image[0] * 255).astype(np.uint8)).save(folder / "images" / f"{number:03}.png")
    arguments = (
        "convert",
        model,
        "--calib",
        folder / "images",
        "-o",
        folder / "a.onnx",
        "--k",
        20,
        "--m",
        40,
    )
    code, text, _ = call(capsys, *arguments, "--image-mean", "0.5", "--image-std", "0.25", "--json")
    assert code == 0 and json.loads(text)["provenance"]["data"]["rows"] == 80
    for option, value in (("--image-mean", "a,b"), ("--image-std", "0"), ("--image-std", "1,-1,1")):
        code, _, err = call(capsys, *arguments, option, value)
        assert code == 2 and f"error: {option}" in err and "hint: " in err


# ---------------------------------------------------------------------- other commands


def test_inspect_source(capsys):
    code, text, _ = call(capsys, "inspect", ROOT / "models" / "digits_cnn.onnx")
    assert code == 0
    for heading in ("Operator", "Count", "Behaviour", "Accuracy", "Reason", "Nodes"):
        assert heading in text
    assert re.search(r"MaxPool\s+1\s+rule\s+first order", text)
    assert re.search(r"relu3\s+Relu\s+rows\s+fc1_out\s+\(batch, 64\)", text)
    assert re.search(r"witnesses: .*\(--witnesses auto\)", text)
    assert re.search(r"relu2_out\s+pooled\s+relu2_out\s+\(batch, 32, 4, 4\)", text)


def test_inspect_json_and_cost(capsys):
    code, text, _ = call(capsys, "inspect", ROOT / "models" / "digits_cnn.onnx", "--json")
    answer = json.loads(text)
    assert code == 0 and answer["kind"] == "source" and answer["opset"] == 17
    assert answer["inputs"] == [{"name": "image", "type": "float", "shape": ["batch", 1, 8, 8]}]
    assert [site["name"] for site in answer["sites"]] == ["relu3"]
    assert [site["name"] for site in answer["candidates"]] == ["relu1", "relu2", "relu3"]
    convolutions = 8 * 8 * 16 * 9 + 4 * 4 * 32 * 16 * 9
    assert answer["cost"]["model"] == convolutions + 512 * 64 + 64 * 10
    assert [(one["name"], one["layout"]) for one in answer["witnesses"]] == [
        ("relu1_out", "pooled"),
        ("relu2_out", "pooled"),
    ]
    # The site, of 1000 points and 50 neighbours, and the witnesses, of 400 and 20.
    counts = ((1000, 50, 64), (400, 20, 16), (400, 20, 32))
    of_each = [m * width + k * width + k * k // 2 for m, k, width in counts]
    assert answer["cost"]["sites"] == sum(of_each)
    _, text, _ = call(capsys, "inspect", ROOT / "models" / "digits_cnn.onnx", "--witnesses", "none", "--json")
    assert json.loads(text)["witnesses"] == [] and json.loads(text)["cost"]["sites"] == of_each[0]
    _, text, _ = call(
        capsys, "inspect", ROOT / "models" / "digits_cnn.onnx", "--sites", "relu1:positions", "--json"
    )
    assert json.loads(text)["cost"]["sites"] == 8 * 8 * (2000 * 16 + 50 * 16 + 50 * 50 // 2)


def test_inspect_shows_refusals_and_models_without_sites(capsys, folder):
    code, text, _ = call(capsys, "inspect", save(folder / "m.onnx", REFUSED))
    assert code == 0
    assert "no variance rule behind the sites" in text and "com.example::Mystery" in text
    assert "model unknown" in text  # its cost
    code, text, _ = call(capsys, "inspect", save(folder / "n.onnx", NO_LAYER))
    assert code == 0
    assert "comes from a linear layer" in text and "zero" in text


def test_inspect_converted(capsys, converted):
    code, text, _ = call(capsys, "inspect", converted, "--json")
    answer = json.loads(text)
    assert code == 0 and answer["kind"] == "converted"
    assert answer["provenance"]["heads"]["logits"]["outputs"]["var"] == "logits_var"
    code, text, _ = call(capsys, "inspect", converted)
    assert code == 0
    for part in ("tanh2", "quantiles", "0.95", "logits_var", answer["provenance"]["source"]["sha256"]):
        assert part in text
    (witness,) = answer["provenance"]["witnesses"]
    best = max(witness["metrics"].items(), key=lambda entry: entry[1])
    assert re.search(rf"tanh1\s+witness\s+rows\s.*{witness['metric']}\s+{best[0]} {best[1]:.3f}, ", text)
    assert re.search(rf"tanh1\s+{witness['share_quantiles']['0.05']:.4g}\s", text)


def test_the_words_of_a_table_are_explained_below_it(capsys, converted):
    _, text, _ = call(capsys, "inspect", converted)
    headings = re.search(r"^Site +Activation.*", text, re.M)[0].split()
    for word in set(headings) - {"Site", "Activation"}:
        assert re.search(rf"^  {word}  +\w", text, re.M), word
    assert "sites: the places where uncertainty enters" in text
    _, text, _ = call(capsys, "verify", MODEL, converted, "--data", HELDOUT, "--rows", 8)
    assert re.search(r"^  share +the part of a site's variance", text, re.M)


def test_sentences_go_on_below_themselves_in_a_terminal(monkeypatch):
    from rich.console import Console

    from gapa_onnx.cli import layout

    screen = Console(file=io.StringIO(), force_terminal=True, width=40, color_system=None)
    monkeypatch.setattr(layout, "console", lambda: screen)
    layout.lines(
        ("cost", "an estimate that is longer than the line"),
        ("next", "gapa-onnx run model.gapa.onnx --data rows.npz"),
    )
    assert screen.file.getvalue().splitlines() == [
        "cost        an estimate that is longer",
        "            than the line",
        "next        gapa-onnx run model.gapa.onnx --data rows.npz",  # to be copied
    ]


def test_verify_passes(capsys, converted):
    code, text, _ = call(capsys, "verify", MODEL, converted, "--data", HELDOUT)
    assert code == 0 and "FAIL" not in text and "256 queries" in text
    code, text, _ = call(capsys, "verify", MODEL, converted, "--data", HELDOUT, "--rows", 10, "--json")
    answer = json.loads(text)
    assert code == 0 and answer["passed"] and answer["rows"] == 10


def test_verify_fails_on_another_source(capsys, converted, folder):
    proto = onnx.load(MODEL)
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "fc3.weight")
    weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight) * np.float32(1.5), "fc3.weight"))
    onnx.save(proto, folder / "other.onnx")
    code, text, _ = call(capsys, "verify", folder / "other.onnx", converted, "--data", HELDOUT)
    assert code == 1
    assert re.search(r"FAIL\s+converted from this source", text)
    assert re.search(r"FAIL\s+source outputs bit-equal, optimisation none\s+differs: logits", text)
    code, text, _ = call(capsys, "verify", folder / "other.onnx", converted, "--data", HELDOUT, "--json")
    assert code == 1 and json.loads(text)["passed"] is False


def test_verify_takes_the_source_as_it_is(capsys, folder, monkeypatch):
    """A model with functions of its own is what was given, not what inlining makes of it."""
    from gapa_onnx.measure import verify as verification

    taken, check = [], verification.verify
    monkeypatch.setattr(
        verification,
        "verify",
        lambda source, *rest, **more: taken.append(source) or check(source, *rest, **more),
    )
    data, out = npz(folder / "x.npz", x=rows(200)), folder / "a.onnx"
    onnx.save(onnx.parser.parse_model(WITH_FUNCTION), folder / "m.onnx")
    options = ("--m", 60, "--k", 20)
    assert call(capsys, "convert", folder / "m.onnx", "--calib", data, "-o", out, *options)[0] == 0
    code, text, _ = call(capsys, "verify", folder / "m.onnx", out, "--data", data)
    assert code == 0 and "FAIL" not in text
    assert [function.name for function in taken[-1].functions] == ["Layer"]


def test_verify_wants_a_converted_file(capsys):
    code, _, err = call(capsys, "verify", MODEL, MODEL, "--data", HELDOUT)
    assert code == 2 and "was not written by gapa-onnx" in err and "hint: " in err


def test_run_shows_a_table(capsys, converted):
    code, text, _ = call(capsys, "run", converted, "--data", HELDOUT)
    assert code == 0
    with np.load(HELDOUT) as file:
        session = ort.InferenceSession(converted, providers=["CPUExecutionProvider"])
        logits, probs = session.run(["logits", "logits_probs"], {"pixels": file["pixels"]})
    lines = [line.split() for line in text.splitlines() if re.match(r"\s+\d+\s+class", line)]
    assert [int(line[2]) for line in lines] == logits[:10].argmax(axis=1).tolist()
    np.testing.assert_allclose([float(line[3]) for line in lines], probs[:10].max(axis=1), atol=6e-4)
    assert "450 rows" in text and "std mean" in text and "of 450 beyond the threshold" in text
    code, text, _ = call(capsys, "run", MODEL, "--data", HELDOUT)
    assert code == 0 and "no output has a variance" in text


def test_run_writes_what_a_session_computes(capsys, converted, folder):
    with np.load(HELDOUT) as file:
        pixels = file["pixels"]
    plain = ort.InferenceSession(converted, providers=["CPUExecutionProvider"])
    logits, var = plain.run(["logits", "logits_var"], {"pixels": pixels})
    for kind in ("npz", "csv", "json"):
        options = ("--portable", "--batch-size", 100)
        assert call(capsys, "run", converted, "--data", HELDOUT, "-o", folder / f"p.{kind}", *options)[0] == 0
    with np.load(folder / "p.npz") as written:
        assert set(written) == {output.name for output in plain.get_outputs()}
        exact = written["logits"], written["logits_var"]
    np.testing.assert_allclose(exact[0], logits, rtol=1e-5, atol=1e-5)  # one batch of 450, or five of 100
    np.testing.assert_allclose(exact[1], var, rtol=1e-4)
    outputs = json.loads((folder / "p.json").read_text())["outputs"]
    assert np.array_equal(np.float32(outputs["logits"]), exact[0])
    assert np.array_equal(np.float32(outputs["logits_var"]), exact[1])
    with open(folder / "p.csv", newline="") as file:
        heading, *lines = csv.reader(file)
    assert heading[:20] == [f"{name}[{i}]" for name in ("logits", "logits_var") for i in range(10)]
    numbers = np.array([line[:20] for line in lines], np.float32)
    assert np.array_equal(numbers, np.concatenate(exact, axis=1))  # the text holds every bit
    assert len(list(folder.iterdir())) == 3


def test_run_keeps_nan_as_null(capsys, converted, folder):
    pixels = np.zeros((3, 64), np.float32)
    pixels[1] = np.nan
    np.savez(folder / "x.npz", pixels=pixels)
    assert call(capsys, "run", converted, "--data", folder / "x.npz", "-o", folder / "p.json")[0] == 0
    var = json.loads((folder / "p.json").read_text())["outputs"]["logits_var"]
    assert var[1] == [None] * 10 and None not in var[0] + var[2]
    assert "10 not known (NaN)" in call(capsys, "run", converted, "--data", folder / "x.npz")[1]


def test_doctor(capsys, monkeypatch, folder):
    code, text, _ = call(capsys, "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(text)["findings"]}
    assert code == 0
    assert findings["onnxruntime"]["detail"].startswith(ort.__version__)
    assert findings["portable function"]["passed"]
    assert ("native kernel" in findings) == NATIVE
    assert call(capsys, "doctor")[0] == 0

    monkeypatch.setenv(LIBRARY_VARIABLE, str(folder / "missing.so"))
    code, text, _ = call(capsys, "doctor")
    assert code == 1 and "FAIL" in text
    (folder / "broken.so").write_bytes(b"not a library")
    monkeypatch.setenv(LIBRARY_VARIABLE, str(folder / "broken.so"))
    code, text, _ = call(capsys, "doctor")
    assert code == 1 and "does not run" in text
    monkeypatch.setenv(LIBRARY_VARIABLE, "")  # switched off: portable, and that is no fault
    code, text, _ = call(capsys, "doctor")
    assert code == 0 and "missing" in text


def test_missing_library_is_said_once(converted, folder):
    environment = {**os.environ, LIBRARY_VARIABLE: ""}
    command = [sys.executable, "-m", "gapa_onnx.cli", "run", converted, "--data", HELDOUT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0
    assert (
        done.stderr == "note: the native library is missing: running the portable function, which is slower\n"
    )


# -------------------------------------------------------------------------- bad input

LAYERS = """
    <ir_version: 8, opset_import: ["": 17, "com.example": 1, "com.microsoft": 1]>
    model (float[n, 4] x) => (%s) {
      w1 = Constant <value = float[4, 6] {%s}> ()
      w2 = Constant <value = float[6, 3] {%s}> ()
      hidden = MatMul (x, w1)
      active = Tanh (hidden)
      y = MatMul (active, w2)
      %s
    }
"""
_RNG = np.random.default_rng(0)
_WEIGHTS = tuple(", ".join(f"{value:.3f}" for value in _RNG.normal(size=size)) for size in (24, 18))
REFUSED = LAYERS % ("float[n, 3] z", *_WEIGHTS, "m = com.example.Mystery (y) z = Softmax (m)")
CUT = LAYERS % (
    "float[n, 3] y, float[n, 2] z",
    *_WEIGHTS,
    "c = Constant <value = float[2, 3] {0, 0, 0, 1, 1, 1}> ()\n"
    'z = com.microsoft.CDist <metric = "euclidean"> (y, c)',
)
CONSTANT = LAYERS.replace("hidden = MatMul (x, w1)", "nought = Sub (x, x) hidden = MatMul (nought, w1)") % (
    "float[n, 3] y",
    *_WEIGHTS,
    "",
)
WITH_FUNCTION = """
    <ir_version: 8, opset_import: ["": 17, "own": 1]>
    model (float[n, 4] x) => (float[n, 4] y)
    <float[4, 4] w = {1,0,2,0, 0,1,0,2, 1,1,0,0, 0,0,1,1}>
    { a = own.Layer (x, w) h = Tanh (a) y = MatMul (h, w) }
    <domain: "own", opset_import: ["": 17]>
    Layer (p, q) => (r) { r = MatMul (p, q) }
"""
NO_LAYER = """
    <ir_version: 8, opset_import: ["": 17]>
    model (string[n, 4] x, float[n, 4] unread) => (string[n, 4] y) { zero = Sub (unread, unread) y = Identity (x) }
"""


def save(path: Path, text: str) -> Path:
    model = onnx.parser.parse_model(text)
    for node in model.graph.node:
        node.name = f"{node.output[0]}_node"
    onnx.save(model, path)
    return path


def rows(count: int) -> np.ndarray:
    return np.random.default_rng(7).normal(size=(count, 4)).astype(np.float32)  # (n, 4)


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def pixels_with_nan(count: int, bad: int) -> np.ndarray:
    pixels = np.random.default_rng(0).normal(size=(count, 64)).astype(np.float32)
    pixels[:bad] = np.nan
    return pixels


def text_file(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def truncated(path: Path) -> Path:
    data = MODEL.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    return path


# what is wrong: a function of a folder gives the arguments of `convert`; words of error and hint
def cumulative(path: Path) -> Path:
    """A model whose logits are summed up along the classes."""
    model = onnx.load(MODEL)
    model.graph.node[-1].output[0] = "parts"
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.int64(1), "along"))
    model.graph.node.append(onnx.helper.make_node("CumSum", ["parts", "along"], ["logits"]))
    onnx.save(model, path)
    return path


BAD = {
    "no such model": (lambda f: ["gone.onnx", "--calib", CALIB], "no such file: gone.onnx", "path"),
    "model is a folder": (lambda f: [f, "--calib", CALIB], "is a folder", ".onnx"),
    "not ONNX": (
        lambda f: [text_file(f / "m.onnx", "hello, world"), "--calib", CALIB],
        "not an ONNX file",
        "export",
    ),
    "empty file": (lambda f: [text_file(f / "m.onnx", ""), "--calib", CALIB], "not an ONNX file", "export"),
    "truncated": (lambda f: [truncated(f / "m.onnx"), "--calib", CALIB], "cut short", "export"),
    "no such data": (lambda f: [MODEL, "--calib", "gone.npz"], "gone.npz", ""),
    "nearly the name of the data": (
        lambda f: [MODEL, "--calib", CALIB.with_name("digits_mlp_calibratoin.npz")],
        "there is no file or folder",
        "digits_mlp_calibration.npz",
    ),
    "wrong data name": (
        lambda f: [MODEL, "--calib", npz(f / "d.npz", a=pixels_with_nan(60, 0), b=pixels_with_nan(60, 0))],
        "several arrays fit input 'pixels', which takes float32 (batch, 64); there are 'a' float32",
        "name the array 'pixels'",
    ),
    "wrong data shape": (
        lambda f: [MODEL, "--calib", npz(f / "d.npz", pixels=np.zeros((60, 65), np.float32))],
        "65",
        "",
    ),
    "wrong data type": (
        lambda f: [MODEL, "--calib", npz(f / "d.npz", pixels=np.full((60, 64), "text"))],
        "float32",
        "",
    ),
    "empty data": (
        lambda f: [MODEL, "--calib", npz(f / "d.npz", pixels=np.zeros((0, 64), np.float32))],
        "no rows",
        "",
    ),
    "more than half NaN": (
        lambda f: [MODEL, "--calib", npz(f / "d.npz", pixels=pixels_with_nan(200, 120))],
        "120 of 200 calibration rows",
        "half",
    ),
    "fewer rows than K": (
        lambda f: [MODEL, "--calib", npz(f / "d.npz", pixels=pixels_with_nan(20, 0))],
        "20 rows",
        "--k",
    ),
    "constant layer": (
        lambda f: [save(f / "m.onnx", CONSTANT), "--calib", npz(f / "d.npz", x=rows(60))],
        "constant over the calibration data",
        "--sites",
    ),
    "unknown site": (
        lambda f: [MODEL, "--calib", CALIB, "--sites", "tanh3"],
        "'tanh3'",
        "did you mean 'tanh2'",
    ),
    "no rule": (
        lambda f: [save(f / "m.onnx", REFUSED), "--calib", npz(f / "d.npz", x=rows(60))],
        "com.example::Mystery",
        "--on-unsupported cut",
    ),
    "no place for a site": (
        lambda f: [save(f / "m.onnx", NO_LAYER), "--calib", npz(f / "d.npz", x=rows(60))],
        "comes from a linear layer",
        "--sites",
    ),
    "loader fails": (
        lambda f: [MODEL, "--calib", f"{text_file(f / 'l.py', 'def load(): raise OSError(1)')}:load"],
        "OSError",
        "loader",
    ),
    "unknown choice": (lambda f: [MODEL, "--calib", CALIB, "--index", "tree"], "--index tree", "hnsw"),
    "K above M": (lambda f: [MODEL, "--calib", CALIB, "--k", 60, "--m", 50], "--k 60", "fewer"),
    "not a number": (
        lambda f: [MODEL, "--calib", CALIB, "--scale", "big"],
        "--scale big",
        "positive number",
    ),
    "m is text": (lambda f: [MODEL, "--calib", CALIB, "--m", "many"], "--m", "whole number"),
    "no data given": (lambda f: [MODEL], "no data are given", "--calib PATH, or --parts"),
    "unknown option": (lambda f: [MODEL, "--calib", CALIB, "--bridges", "shared"], "--bridges", "--help"),
    "unknown bridge": (
        lambda f: [MODEL, "--calib", CALIB, "--bridge", "wide"],
        "--bridge wide",
        "per-class",
    ),
    "one sample": (
        lambda f: [MODEL, "--calib", CALIB, "--samples", 1],
        "--samples is 1; it must be at least 2",
        "leave --samples out",
    ),
    "unknown task": (lambda f: [MODEL, "--calib", CALIB, "--task", "sorting"], "sorting", "regression"),
    "quantile of 1": (lambda f: [MODEL, "--calib", CALIB, "--ood-quantile", "1"], "--ood-quantile", "0.95"),
    "no targets there": (
        lambda f: [MODEL, "--calib", CALIB, "--task", "regression", "--targets", f / "none.npy"],
        "there is no file",
        "--targets",
    ),
    "tail without a full covariance": (
        lambda f: [cumulative(f / "m.onnx"), "--calib", CALIB, "--covariance", "full"],
        "CumSum",
        "--covariance diag",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_a_sentence(capsys, tmp_path, folder, case):
    arguments, error, hint = BAD[case]
    code, out, err = call(capsys, "convert", *arguments(tmp_path), "-o", folder / "a.onnx")
    assert code == 2 and out == ""
    assert "Traceback" not in err
    lines = err.splitlines()
    assert lines[0].startswith("error: ") and lines[-1].startswith("hint: ")
    assert error in "\n".join(lines[:-1]) and hint in lines[-1]
    assert not list(folder.iterdir())


def test_the_error_says_what_was_expected_and_what_came(capsys, tmp_path):
    data = npz(tmp_path / "d.npz", pixels=np.zeros((60, 8, 9), np.float32))
    _, _, err = call(capsys, "convert", MODEL, "--calib", data, "-o", tmp_path / "a.onnx")
    assert "(batch, 64)" in err and "(60, 8, 9)" in err


def test_output_that_cannot_be_written(capsys, folder):
    for out, words in ((folder / "gone" / "a.onnx", "does not exist"), (folder, "it is a folder")):
        code, _, err = call(capsys, "convert", MODEL, "--calib", CALIB, "-o", out)
        assert code == 2 and words in err and "hint: " in err
    assert not list(folder.iterdir())


def test_the_source_is_never_overwritten(capsys, folder):
    model = Path(shutil.copy(MODEL, folder / "m.onnx"))
    code, _, err = call(capsys, "convert", model, "--calib", CALIB, "-o", folder / "." / "m.onnx")
    assert code == 2 and "is the source model" in err
    assert model.read_bytes() == MODEL.read_bytes()


def test_converted_twice(capsys, converted, folder):
    code, _, err = call(capsys, "convert", converted, "--calib", CALIB, "-o", folder / "a.onnx")
    assert code == 2 and "was converted by gapa-onnx already" in err and "hint: " in err
    assert not list(folder.iterdir())


@pytest.mark.parametrize("command", ["inspect", "verify", "run"])
def test_other_commands_refuse_broken_files(capsys, tmp_path, converted, command):
    for model in (
        "gone.onnx",
        text_file(tmp_path / "t.onnx", "hello, world"),
        truncated(tmp_path / "half.onnx"),
    ):
        files = [MODEL, model] if command == "verify" else [model]
        data = [] if command == "inspect" else ["--data", HELDOUT]
        code, _, err = call(capsys, command, *files, *data)
        assert code == 2 and err.startswith("error: ") and "\nhint: " in err and "Traceback" not in err


def test_run_refuses_early(capsys, converted, folder):
    for name, words in (("p.txt", "kind"), ("gone/p.csv", "does not exist")):
        code, _, err = call(capsys, "run", converted, "--data", "gone.npz", "-o", folder / name)
        assert code == 2 and words in err
    code, _, err = call(capsys, "run", converted, "--data", CALIB, "--batch-size", 0)
    assert code == 2 and "--batch-size" in err
    assert not list(folder.iterdir())


@pytest.mark.skipif(not NATIVE, reason="the native library is not built")
def test_corrupt_index_is_a_sentence(capsys, converted, folder):
    proto = onnx.load(converted)
    k = next(tensor for tensor in proto.graph.initializer if tensor.name.endswith("/k"))
    k.CopyFrom(numpy_helper.from_array(np.array([10**9]), k.name))
    onnx.save(proto, folder / "corrupt.onnx")
    code, _, err = call(capsys, "run", folder / "corrupt.onnx", "--data", HELDOUT)
    assert code == 2 and err.startswith("error: onnxruntime cannot load") and "hint: " in err


def test_debug_shows_the_trace(capsys):
    code, _, err = call(capsys, "--debug", "inspect", "gone.onnx")
    assert code == 2 and "Traceback" in err and "error: no such file: gone.onnx" in err


NEARLY_GELU = """m (float[n, 4] x) => (float[n, 4] y)
    <float r = {0.70710678}, float one = {1}, float third = {0.3333}>
    { a = Mul(x, r) e = Erf(a) o = Add(e, one) b = Mul(x, o) y = Mul(b, third) }"""


def test_debug_shows_what_is_nearly_one_operator(capsys, folder):
    path = save(folder / "nearly.onnx", NEARLY_GELU)
    code, text, _ = call(capsys, "inspect", "--debug", path)
    assert code == 0 and "nearly one operator" in text and "Gelu" in text and "in place of halves" in text
    assert "nearly one operator" not in call(capsys, "inspect", path)[1]
    code, _, err = call(capsys, "inspect", "--debug", "gone.onnx")
    assert code == 2 and "Traceback" in err


# --------------------------------------------------------------------- the process


def test_a_bug_ends_in_a_traceback(folder):
    broken = "import gapa_onnx.model.load as step; step.load = None"
    script = f"{broken}\nfrom gapa_onnx.cli import main\nmain(['inspect', {str(MODEL)!r}])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=folder)
    assert done.returncode == 1 and "TypeError" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="signals are sent in another way there")
def test_interrupt_leaves_nothing(tmp_path, folder):
    started = tmp_path / "started"
    loader = text_file(
        tmp_path / "loader.py",
        "import pathlib, time\n"
        "def load():\n"
        f"    pathlib.Path({str(started)!r}).touch()\n"
        "    time.sleep(120)\n"
        "    yield {}\n",
    )
    command = [
        sys.executable,
        "-m",
        "gapa_onnx.cli",
        "convert",
        MODEL,
        "--calib",
        f"{loader}:load",
        "-o",
        folder / "a.onnx",
    ]
    # A background job of a shell without job control ignores SIGINT, and so would its children.
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not started.exists() and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        assert started.exists(), "the loader was never called"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted" and "Traceback" not in err and out == ""
    assert not list(folder.iterdir())


def test_version_and_help(capsys):
    from gapa_onnx import __version__

    assert call(capsys, "--version") == (0, f"gapa-onnx {__version__}\n", "")
    code, out, _ = call(capsys)
    assert code == 2 and "convert" in out
    code, _, err = call(capsys, "evaluate")
    assert code == 2 and "error: " in err


def test_help_pages_are_current():
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    fresh = help_pages()
    if f"typer {typer.__version__} -->" in page:
        assert page == fresh, "run: cd docs && python -m gapa_onnx.cli.help_pages > cli.md"
    # Another typer lays the page out in another way; what is offered must be the same.
    assert set(re.findall(r"--[a-z][a-z-]+", page)) == set(re.findall(r"--[a-z][a-z-]+", fresh))
    for command in COMMANDS:
        assert f"## gapa-onnx {command}" in page

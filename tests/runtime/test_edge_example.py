"""The C++ example runs a model without Python and prints what a Python session computes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.paths import ROOT

from gapa_onnx.op.contract import DOMAIN, SCHEMAS, VERSION
from gapa_onnx.sessions.runtime import library_path

RUNTIME = ROOT / "runtime"
LIBRARY = library_path()
D, CLASSES = 3, 2

pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> str:
    """gapa_run: GAPA_ONNX_RUN, else compiled here."""
    if os.environ.get("GAPA_ONNX_RUN"):
        return os.environ["GAPA_ONNX_RUN"]
    if shutil.which("g++") is None:
        pytest.skip("there is no g++ to build the example with, and GAPA_ONNX_RUN is not set")
    out = tmp_path_factory.mktemp("gapa_run") / "gapa_run"
    sources = [str(RUNTIME / "examples" / name) for name in ("run.cc", "npy.cc")]
    command = ["g++", "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", f"-I{RUNTIME / 'include'}"]
    subprocess.run([*command, *sources, "-ldl", "-o", str(out)], check=True)
    return str(out)


@pytest.fixture(scope="module")
def onnxruntime_library() -> str:
    found = sorted((Path(ort.__file__).parent / "capi").glob("libonnxruntime.so*"))
    if not found:
        pytest.skip("this onnxruntime wheel has no separate libonnxruntime.so")
    return str(found[0])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """y = x W and y_var = s(x) · (W²)ᵀ1: one linear layer behind one site."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(D, CLASSES)).astype(np.float32)
    constants = {
        "k": np.array([4], np.int64),
        "length_scale": np.array(1.5, np.float32),
        "jitter": np.array(1e-6, np.float32),
        "points": rng.normal(size=(20, D)).astype(np.float32),
        "weight": weight,
        "scale": (weight**2).sum(axis=0, keepdims=True),
    }
    schema = SCHEMAS["flat"]
    inputs = ["x", *(port.name for port in schema.constants)]
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["y"]),
        helper.make_node(schema.name, inputs, ["s", "neighbours"], domain=DOMAIN),
        helper.make_node("Mul", ["s", "scale"], ["y_var"]),
    ]
    declared = [("y", TensorProto.FLOAT), ("y_var", TensorProto.FLOAT), ("neighbours", TensorProto.INT64)]
    graph = helper.make_graph(
        nodes,
        "linear",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", D])],
        [helper.make_tensor_value_info(name, element, None) for name, element in declared],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    path = tmp_path_factory.mktemp("model") / "linear.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    return str(path)


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60)


def table(text: str, name: str) -> np.ndarray:
    """The numbers printed under an output's title, row by row."""
    body = text.split(f"\n{name}  (")[1].split("\n")[1:]
    rows = []
    for line in body:
        if not re.match(r"\s+\d+ \|", line):
            break
        rows.append([float(number) for number in line.split("|")[1].replace("±", " ").split()])
    return np.array(rows)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_prints_what_python_computes(program, onnxruntime_library, model, tmp_path, dtype) -> None:
    x = np.random.default_rng(1).normal(size=(12, D)).astype(dtype)
    np.save(tmp_path / "x.npy", x)
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(LIBRARY))
    running = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    y, var, neighbours = running.run(None, {"x": x.astype(np.float32)})

    done = run(
        program,
        "--onnxruntime",
        onnxruntime_library,
        "--library",
        LIBRARY,
        "--rows",
        "0",
        model,
        tmp_path / "x.npy",
    )
    assert done.returncode == 0, done.stderr
    printed = table(done.stdout, "y")  # mean, std, mean, std
    np.testing.assert_allclose(printed[:, 0::2], y, rtol=1e-6)  # seven digits are printed
    np.testing.assert_allclose(printed[:, 1::2], np.sqrt(var), rtol=1e-6)
    np.testing.assert_array_equal(table(done.stdout, "neighbours"), neighbours)
    assert "y  (12, 2)  mean ± std" in done.stdout and "\ny_var" not in done.stdout


def test_shows_the_first_rows_and_says_how_many_more(program, onnxruntime_library, model, tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((12, D), np.float32))
    base = (program, "--onnxruntime", onnxruntime_library, "--library", LIBRARY)
    done = run(*base, model, tmp_path / "x.npy")
    assert len(table(done.stdout, "y")) == 10 and "… 2 more rows" in done.stdout
    np.save(tmp_path / "empty.npy", np.zeros((0, D), np.float32))
    done = run(*base, model, tmp_path / "empty.npy")
    assert done.returncode == 0 and "y  (0, 2)" in done.stdout


def test_mistakes_get_a_sentence(program, onnxruntime_library, model, tmp_path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((2, D), np.float32))
    np.save(tmp_path / "ints.npy", np.zeros((2, D), np.int64))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(np.zeros((2, D), np.float32)))
    np.save(tmp_path / "wide.npy", np.zeros((2, D + 1), np.float32))
    (tmp_path / "cut.npy").write_bytes((tmp_path / "x.npy").read_bytes()[:-5])
    (tmp_path / "text.npy").write_text("not an array")
    (tmp_path / "short.npy").write_bytes(
        b"\x93NUMPY\x02\x00\x01\x00"
    )  # before the four bytes of a length end
    base = (program, "--onnxruntime", onnxruntime_library, "--library", LIBRARY, model)
    for name, sentence in {
        "ints.npy": "holds '<i8'",
        "fortran.npy": "is in Fortran order",
        "cut.npy": "is cut off",
        "text.npy": "is not an .npy file",
        "short.npy": "is cut off in its header",
        "missing.npy": "cannot open",
        "wide.npy": "invalid dimensions",
    }.items():
        done = run(*base, tmp_path / name)
        assert done.returncode == 1 and done.stderr.startswith("error: ") and sentence in done.stderr, done
    done = run(*base, tmp_path / "x.npy", tmp_path / "x.npy")
    assert done.returncode == 1 and "the model has 1 inputs ('x'), but 2 files were given" in done.stderr
    done = run(program, "--onnxruntime", tmp_path / "none.so", model, tmp_path / "x.npy")
    assert done.returncode == 1 and "none.so" in done.stderr
    assert run(program, model).returncode == 2
    assert run(program, "--unknown", "1").returncode == 2

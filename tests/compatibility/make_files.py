"""Make the converted files of every format that ever existed, each by the last commit that wrote it.

    .venv/bin/python tests/compatibility/make_files.py [FORMAT…]

Needs the repository with its history. The code of a commit is run as it lies there, by the packages that are installed
today; the native library takes no part. A file's own answers, without the library, are kept beside it: what it said
when it was made. A format is added here, with its commit, when record.FORMAT is raised.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnxruntime as ort

ROOT = Path(__file__).resolve().parents[2]
FILES = Path(__file__).parent / "files"

#: format of the record -> the last commit that wrote it; format 0 has no number
COMMITS = {
    0: "fcc93cd",
    1: "7c8827d",
    2: "462e86e",
    3: "52177a2",
    4: "fb0dbd1",
    5: "392e4a7",
}
ROWS, WIDTH, HIDDEN, CLASSES = 400, 4, 12, 3
#: what files are made with: every operator that one of these networks can have
CHOICES = {
    "classes": {"m": 24, "k": 8, "index": "flat"},
    "flat": {"m": 24, "k": 8, "index": "flat", "solver": "exact"},
    "ivf": {"m": 24, "k": 8, "index": "ivf", "solver": "exact"},
    "ivfpq": {"m": 256, "k": 8, "index": "ivfpq", "solver": "exact"},
    "hnsw": {"m": 24, "k": 8, "index": "hnsw", "solver": "exact"},
}

#: run in the checkout of a commit; it has no more in common with today's code than the names here
CONVERT = """
import json, sys
import numpy as np
sys.path.insert(0, sys.argv[1])
import gapa_onnx
source, calib, out, choices = sys.argv[2:]
gapa_onnx.convert(source, calib, out, seed=0, **json.loads(choices))
"""


def main() -> int:
    chosen = [int(text) for text in sys.argv[1:]] or list(COMMITS)
    FILES.mkdir(exist_ok=True)
    for number in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            make(number, Path(scratch))
    return 0


def make(number: int, scratch: Path) -> None:
    """The files of one format, and what they say, in one archive."""
    checkout, made = scratch / "checkout", scratch / "made"
    checkout.mkdir()
    made.mkdir()
    archive = subprocess.run(
        ["git", "archive", COMMITS[number], "gapa_onnx"], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x"], cwd=checkout, input=archive.stdout, check=True)
    np.savez(scratch / "calibration.npz", x=rows(0, ROWS))
    for name, choices in CHOICES.items():
        task = "classification" if name == "classes" else "regression"
        source, out = scratch / f"{name}.onnx", made / f"{name}.onnx"
        source.write_bytes(network(name).SerializeToString())
        call = [sys.executable, "-c", CONVERT, checkout, source, scratch / "calibration.npz", out]
        subprocess.run(
            [*map(str, call), json.dumps({**choices, "task": task})],
            check=True,
            cwd=scratch,
            stdout=subprocess.DEVNULL,
        )
        session = ort.InferenceSession(out, providers=["CPUExecutionProvider"])
        names = [output.name for output in session.get_outputs()]
        np.savez(
            out.with_suffix(".npz"), **dict(zip(names, session.run(names, {"x": rows(1, 8)}))), x=rows(1, 8)
        )
        print(f"format {number}, {name}: {out.stat().st_size} bytes, {', '.join(names)}")
    with tarfile.open(FILES / f"format{number}.tar.xz", "w:xz", preset=9) as packed:
        for path in sorted(made.iterdir()):
            entry = tarfile.TarInfo(path.name)
            entry.size = path.stat().st_size
            packed.addfile(entry, io.BytesIO(path.read_bytes()))


def rows(seed: int, count: int) -> np.ndarray:
    """Inputs; the last one is far from the others."""
    x = np.random.default_rng(seed).normal(size=(count, WIDTH)).astype(np.float32)
    x[-1] *= 20 if seed else 1
    return x


def network(name: str) -> onnx.ModelProto:
    """A layer, Relu and a layer, with a softmax behind where it is for classes."""
    rng = np.random.default_rng(7)
    sizes = [("w", (WIDTH, HIDDEN)), ("b", (HIDDEN,)), ("v", (HIDDEN, CLASSES)), ("c", (CLASSES,))]
    weights = [
        onnx.numpy_helper.from_array(rng.normal(size=size).astype(np.float32), key) for key, size in sizes
    ]
    nodes = [
        onnx.helper.make_node("Gemm", ["x", "w", "b"], ["z"], name="first"),
        onnx.helper.make_node("Relu", ["z"], ["h"], name="relu"),
        onnx.helper.make_node("Gemm", ["h", "v", "c"], ["y"], name="last"),
    ]
    last, width = "y", CLASSES
    if name == "classes":
        nodes.append(onnx.helper.make_node("Softmax", ["y"], ["p"], name="softmax", axis=1))
        last = "p"
    value = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes,
        name,
        [onnx.helper.make_tensor_value_info("x", value, ["n", WIDTH])],
        [onnx.helper.make_tensor_value_info(last, value, ["n", width])],
        weights,
    )
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)


if __name__ == "__main__":
    sys.exit(main())

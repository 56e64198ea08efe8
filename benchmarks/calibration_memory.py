"""Peak memory of convert on 1,000,000 calibration rows of 64-d activations, streamed from disk.

    python benchmarks/calibration_memory.py [--rows 1000000] [--quick]

Prints one line of JSON; the promise is a peak below 1.5 GB.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx

WIDTH = 64
LIMIT = 1.5e9
RESULTS = Path(__file__).parent / "results"

CONVERT = """
import json, resource, sys, time
import gapa_onnx
start = time.time()
conversion = gapa_onnx.convert(sys.argv[1], sys.argv[2], sys.argv[3], inducing=sys.argv[4])
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
points = conversion.calibration.fits[0].index.points.shape
print(json.dumps({"peak_bytes": peak, "seconds": round(time.time() - start, 1), "points": points}))
"""


def write_model(path: Path) -> None:
    """Two layers of 64 units with a tanh between them."""
    rng = np.random.default_rng(0)
    text = f"""<ir_version: 8, opset_import: ["": 17]>
        network (float[batch, {WIDTH}] x) => (float[batch, 10] y) {{
          z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2)
        }}"""
    model = onnx.parser.parse_model(text)
    for name, shape in (("w1", (WIDTH, WIDTH)), ("w2", (WIDTH, 10))):
        weights = (rng.standard_normal(shape) / 8).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    onnx.save(model, path)


def write_rows(path: Path, rows: int) -> None:
    """Rows of 20 clusters, written block by block: this program's own memory stays small too."""
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((20, WIDTH)).astype(np.float32) * 3
    array = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(rows, WIDTH))
    for start in range(0, rows, 50_000):
        stop = min(rows, start + 50_000)
        noise = rng.standard_normal((stop - start, WIDTH), dtype=np.float32)
        array[start:stop] = centres[rng.integers(20, size=stop - start)] + noise
    array.flush()


def measure(rows: int, inducing: str) -> dict:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model.onnx")
        write_rows(folder / "rows.npy", rows)
        arguments = [str(folder / "model.onnx"), str(folder / "rows.npy"), str(folder / "out.onnx"), inducing]
        done = subprocess.run(
            [sys.executable, "-c", CONVERT, *arguments], capture_output=True, text=True, check=True
        )
    return {"rows": rows, "inducing": inducing, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--inducing", default="kmeans")
    parser.add_argument("--quick", action="store_true", help="100,000 rows")
    options = parser.parse_args()
    result = measure(100_000 if options.quick else options.rows, options.inducing)
    result["below_limit"] = result["peak_bytes"] < LIMIT
    print(json.dumps(result))
    if not options.quick and options.rows == 1_000_000:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "calibration_memory.json").write_text(json.dumps(result) + "\n")
    return 0 if result["below_limit"] else 1


if __name__ == "__main__":
    sys.exit(main())

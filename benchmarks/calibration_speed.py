"""Where the time of a conversion goes, in times one pass of the source model over the same rows.

    python benchmarks/calibration_speed.py [--quick]

A two-layer network with a site of its width, 60,000 rows of 200 and 1,000,000 rows of 64, which is as small as
networks get, and ResNet-20 with 50,000 images. CPU time of the process on one thread. `pass` is the source model alone,
in the batches that `convert` feeds; the steps are those of `gapa_onnx.compiler`. Writes benchmarks/results/calibration_speed.json.

All that comes after the pass is bounded: k-means sees at most 256 rows per inducing point, and 2000 rows are left
out. So for more rows, and for a larger network, the pass is what remains.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import networks
import numpy as np
import onnx
from lines import machine

from gapa_onnx.data import open_data
from gapa_onnx.emit.emit import emit
from gapa_onnx.emit.rewrite import rewrite
from gapa_onnx.fit.calibrate import fit
from gapa_onnx.fit.collect import collect
from gapa_onnx.measure.verify import verify
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.sessions.runtime import open_session, session_options
from gapa_onnx.settings import Settings
from gapa_onnx.settle.settle import settle

RESULTS = Path(__file__).parent / "results"
SIZES = (("two layers", 60_000, 200), ("two layers", 1_000_000, 64), ("resnet20", 50_000, 64))
QUICK = (("two layers", 5000, 64),)
VERIFIED_ROWS = 64


def two_layers(width: int) -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    model = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        network (float[batch, {width}] x) => (float[batch, 10] y) {{
          z = MatMul(x, w1)  h = Tanh(z)  y = MatMul(h, w2)
        }}"""
    )
    for name, shape in (("w1", (width, width)), ("w2", (width, 10))):
        weights = (rng.standard_normal(shape) / np.sqrt(width)).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weights, name))
    return model


def clusters(rows: int, width: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    centres = rng.standard_normal((20, width), dtype=np.float32) * 3
    noise = rng.standard_normal((rows, width), dtype=np.float32)
    return centres[rng.integers(20, size=rows)] + noise


def measure(network: str, rows: int, width: int) -> dict[str, Any]:
    settings = Settings()
    if network == "two layers":
        source, given = load(two_layers(width)), {"x": clusters(rows, width)}
    else:
        source, given = load(networks.make(network)), networks.rows(network, rows)
    data = open_data(given, source.inputs)
    seconds: dict[str, float] = {}

    def step(name: str, work: Callable[..., Any], *arguments: Any) -> Any:
        start = time.process_time()
        result = work(*arguments)
        seconds[name] = time.process_time() - start
        return result

    plan = step("analyse", analyse, source, settings)
    collected = step("collect", collect, plan, data, settings)
    calibration = step("fit", fit, collected, settings)
    template = step("rewrite", rewrite, plan, calibration, settings)
    numbers = step("settle", settle, template, calibration, settings)
    converted = step("emit", emit, template, numbers, calibration, settings)
    sample = itertools.islice(calibration.fed.batches(VERIFIED_ROWS), 1)
    checks = step("verify", verify, source.given, converted, sample)
    assert all(check.passed for check in checks)
    total = sum(seconds.values())

    session = open_session(source.proto, "the model", session_options(threads=1))
    start = time.process_time()
    for batch in calibration.fed.batches():
        session.run(None, batch)
    forward = time.process_time() - start
    return {
        "network": network,
        "rows": rows,
        "width": width,
        "pass_seconds": round(forward, 3),
        "total_seconds": round(total, 2),
        "total_over_pass": round(total / forward, 2),
        "shares": {name: round(taken / total, 3) for name, taken in seconds.items()},
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5,000 rows only, and no file")
    quick = parser.parse_args().quick
    sizes = []
    for size in QUICK if quick else SIZES:
        sizes.append(measure(*size))
        print(json.dumps(sizes[-1]), flush=True)
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        answer = {"machine": machine(), "sizes": sizes}
        (RESULTS / "calibration_speed.json").write_text(json.dumps(answer, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

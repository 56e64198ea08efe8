"""How conversion time grows with the number of nodes: a deep chain of MatMul, Add, Tanh.

    python benchmarks/scale.py [--quick]

The site is the first activation, so that the variance passes through all nodes. One line of JSON per
size, also written to benchmarks/results/scale.jsonl: seconds in all, of which onnxruntime's own loading of
the models (six sessions) is the larger part, and seconds of loading and analysing alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import helper, numpy_helper

from gapa_onnx import convert
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.settings import Settings

WIDTH = 8
RESULTS = Path(__file__).parent / "results"


def chain(nodes: int) -> onnx.ModelProto:
    """`nodes` nodes in a row; each layer has weights of its own."""
    rng = np.random.default_rng(0)
    graph_nodes, weights, name = [], [], "x"
    for layer in range(nodes // 3):
        for kind, shape in (("w", (WIDTH, WIDTH)), ("b", (WIDTH,))):
            array = (rng.standard_normal(shape) / np.sqrt(WIDTH)).astype(np.float32)
            weights.append(numpy_helper.from_array(array, f"{kind}{layer}"))
        graph_nodes += [
            helper.make_node("MatMul", [name, f"w{layer}"], [f"m{layer}"], f"matmul{layer}"),
            helper.make_node("Add", [f"m{layer}", f"b{layer}"], [f"z{layer}"], f"add{layer}"),
            helper.make_node("Tanh", [f"z{layer}"], [f"h{layer}"], f"tanh{layer}"),
        ]
        name = f"h{layer}"
    x = helper.make_tensor_value_info("x", 1, ["n", WIDTH])
    y = helper.make_tensor_value_info(name, 1, ["n", WIDTH])
    graph = helper.make_graph(graph_nodes, "chain", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def measure(nodes: int) -> dict:
    model = chain(nodes)
    rows = np.random.default_rng(1).standard_normal((100, WIDTH)).astype(np.float32)
    start = time.perf_counter()
    analyse(load(model), Settings(sites="h0"))
    analysed = time.perf_counter() - start
    start = time.perf_counter()
    conversion = convert(model, {"x": rows}, sites="h0", m=20, k=5)
    converted = time.perf_counter() - start
    assert all(check.passed for check in conversion.checks)
    return {
        "nodes": nodes,
        "emitted_nodes": len(conversion.model.graph.node),
        "load_and_analyse_seconds": round(analysed, 2),
        "convert_seconds": round(converted, 2),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="1,000 nodes only")
    quick = parser.parse_args().quick
    lines = []
    for nodes in (1000,) if quick else (1000, 5000, 20_000):
        lines.append(json.dumps(measure(nodes)))
        print(lines[-1], flush=True)
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "scale.jsonl").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `inspect` does for a model grows in proportion to its nodes. Work is counted, not timed: lines of Python that
are run, for n and for 2n nodes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from gapa_onnx.cli import main

WIDTH = 4
Block = Callable[[int, str], tuple[list[onnx.NodeProto], str]]


def layers(at: int, x: str) -> tuple[list[onnx.NodeProto], str]:
    """A chain of layers."""
    return [
        helper.make_node("MatMul", [x, "w"], [f"m{at}"]),
        helper.make_node("Add", [f"m{at}", "b"], [f"z{at}"]),
        helper.make_node("Tanh", [f"z{at}"], [f"h{at}"]),
    ], f"h{at}"


def residual(at: int, x: str) -> tuple[list[onnx.NodeProto], str]:
    """Two branches that meet again: every layer leads to all later ones, and past them."""
    return [
        helper.make_node("MatMul", [x, "w"], [f"m{at}"]),
        helper.make_node("Relu", [f"m{at}"], [f"r{at}"]),
        helper.make_node("Add", [f"r{at}", x], [f"h{at}"]),
    ], f"h{at}"


def elementwise(at: int, x: str) -> tuple[list[onnx.NodeProto], str]:
    """No layer until the end: whoever looks back from an activation sees all the way to the input."""
    return [
        helper.make_node("Relu", [x], [f"r{at}"]),
        helper.make_node("Mul", [f"r{at}", "b"], [f"m{at}"]),
        helper.make_node("Sigmoid", [f"m{at}"], [f"h{at}"]),
    ], f"h{at}"


def refused(at: int, x: str) -> tuple[list[onnx.NodeProto], str]:
    """Operators that nobody knows."""
    return [
        helper.make_node("MatMul", [x, "w"], [f"m{at}"]),
        helper.make_node("Tanh", [f"m{at}"], [f"t{at}"]),
        helper.make_node("Unheard", [f"t{at}"], [f"h{at}"], domain="nobody.knows"),
    ], f"h{at}"


def model(block: Block, nodes: int, shape: list[Any]) -> onnx.ModelProto:
    made, x = [], "x"
    for at in range(nodes // 3):
        more, x = block(at, x)
        made += more
    made.append(helper.make_node("MatMul", [x, "w"], ["y"]))
    weights = {"w": np.eye(WIDTH, dtype=np.float32), "b": np.ones(WIDTH, np.float32)}
    graph = helper.make_graph(
        made,
        block.__name__,
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("nobody.knows", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def lines_run(call: Callable[[], Any]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return count


def cases() -> Iterator[Any]:
    vector, sequence, feature_map = ["n", WIDTH], ["n", 3, WIDTH], ["n", 2, 3, WIDTH]
    for block, shape, sites in (
        (layers, vector, "auto"),
        (layers, vector, "h0"),
        (residual, vector, "auto"),
        (residual, vector, "h0"),
        (elementwise, sequence, "auto"),
        (elementwise, feature_map, "h0"),
        (refused, vector, "h0"),
    ):
        yield pytest.param(block, shape, sites, id=f"{block.__name__}-{len(shape)}-{sites}")


@pytest.mark.parametrize(("block", "shape", "sites"), list(cases()))
def test_inspect_does_twice_the_work_for_twice_the_nodes(
    block: Block, shape: list[Any], sites: str, tmp_path: Path
) -> None:
    work = {}
    for nodes in (150, 300, 600):
        path = tmp_path / f"{nodes}.onnx"
        onnx.save(model(block, nodes, shape), path)
        arguments = ["inspect", str(path), "--sites", sites, "--json"]
        if not work:
            assert main(arguments) == 0  # and what is only done once per process is done
        work[nodes] = lines_run(lambda arguments=arguments: main(arguments))
    # What the second 150 nodes add is what the next 300 add, by twos.
    assert work[600] - work[300] == pytest.approx(2 * (work[300] - work[150]), rel=0.02)

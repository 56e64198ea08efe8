"""What onnxruntime says against a batch is a sentence, however late in the work it says it."""

from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.small_models import parse

import gapa_onnx
from gapa_onnx.errors import UserError
from gapa_onnx.fit.reader import QueryReader
from gapa_onnx.measure.agreement import run
from gapa_onnx.sessions.inference import run_batch
from gapa_onnx.sessions.runtime import open_session

PAIRS = "net (float[n, 2] x) => (float[m, 4] y) { h = Abs(x)  y = Reshape<allowzero=0>(h, s) }"


def in_pairs():
    """A model that takes rows in pairs only, which its inputs do not say."""
    model = parse(PAIRS)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([-1, 4]), "s"))
    return model


ODD = {"x": np.ones((3, 2), np.float32)}


def reads(batch):
    session = open_session(in_pairs(), "the model")
    return run_batch(session, ["y"], batch)


def reads_left_out_rows(batch):
    return QueryReader(in_pairs(), "the model", ("y",), ()).queries(batch)


def verifies(batch):
    return run(in_pairs(), [batch], level="all")


@pytest.mark.parametrize("step", [reads, reads_left_out_rows, verifies])
def test_a_batch_that_fails_is_a_sentence(step):
    step({"x": np.ones((2, 2), np.float32)})
    with pytest.raises(UserError) as error:
        step(ODD)
    assert "failed on the" in error.value.message and error.value.hint
    assert "\n" not in error.value.message and "ONNXRuntimeError" not in error.value.message


def _unguarded_runs(path: Path) -> list[int]:
    """Lines that run a session outside of any try."""
    tree = ast.parse(path.read_text())
    guarded = {
        id(call)
        for node in ast.walk(tree)
        if isinstance(node, ast.Try)
        for part in node.body
        for call in ast.walk(part)
    }
    return [
        call.lineno
        for call in ast.walk(tree)
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr == "run"
        and id(call) not in guarded
    ]


def test_every_run_of_a_session_is_guarded():
    """`run_batch` is what all of the library runs models with."""
    package = Path(gapa_onnx.__file__).parent
    others = {"cli", "clients"}  # what people run, and the programs that packages hold
    rooms = [path for path in package.rglob("*.py") if others.isdisjoint(path.relative_to(package).parts)]
    assert len(rooms) > 100
    assert not {str(path): lines for path in rooms if (lines := _unguarded_runs(path))}

"""GapaLeading, the largest of a long row: numpy, the function and the native kernel say the same."""

from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.native_models import LIBRARY, session

from gapa_onnx.op.contract import DOMAIN, LEADING, VERSION
from gapa_onnx.op.leading import OLDEST_OPSET, leading_body

native = pytest.mark.skipif(LIBRARY is None, reason="the native library is not built")


def model(k: int, rank: int, opset: int = 17, portable: bool = False) -> bytes:
    """The operator and nothing else."""
    names = [port.name for port in LEADING.outputs]
    node = helper.make_node(LEADING.name, [port.name for port in LEADING.inputs], names, domain=DOMAIN)
    types = (TensorProto.FLOAT, TensorProto.INT64)
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [None] * rank)],
        [helper.make_tensor_value_info(name, kind, [None] * rank) for name, kind in zip(names, types)],
        [numpy_helper.from_array(np.array([k], np.int64), "k")],
    )
    return helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)],
        functions=[leading_body(opset)] if portable else [],
        ir_version=8,
    ).SerializeToString()


def by_function(x: np.ndarray, k: int, opset: int = 17) -> list[np.ndarray]:
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    running = ort.InferenceSession(
        model(k, x.ndim, opset, portable=True), options, providers=["CPUExecutionProvider"]
    )
    return running.run(None, {"x": x})


def by_kernel(x: np.ndarray, k: int, threads: int = 1) -> list[np.ndarray]:
    return session(model(k, x.ndim), threads).run(None, {"x": x})


def by_numpy(x: np.ndarray, k: int) -> list[np.ndarray]:
    order = np.argsort(-np.where(np.isnan(x), np.inf, x), axis=-1, kind="stable")[..., :k]
    return [np.take_along_axis(x, order, axis=-1), order]


def rows(kind: str) -> np.ndarray:
    generator = np.random.default_rng(0)
    x = generator.normal(size=(2, 3, 5000)).astype(np.float32)
    if kind == "ties":
        x = np.round(2 * x) / 2 * np.float32(1)  # a few values, and zeros of both signs
        x[..., ::7] *= -1
    elif kind == "ascending":
        x = np.sort(x, axis=-1)
    elif kind == "descending":
        x = -np.sort(-x, axis=-1)
    elif kind == "infinite":
        x[0, :, 100:] = -np.inf
        x[1, 0, 4000:4010] = np.inf
        x[1, 1] = -np.inf
    elif kind == "no numbers":
        x[0, 0, 4321] = np.nan
        x[0, 1, ::3] = np.nan
        x[0, 2, 17], x[0, 2, 4990] = np.nan, np.inf
        x[1, 0] = np.nan
    return x


KINDS = ["plain", "ties", "ascending", "descending", "infinite", "no numbers"]


@pytest.mark.parametrize("k", [1, 20, 512, 4999, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_function_as_numpy(kind: str, k: int) -> None:
    x = rows(kind)
    for found, expected in zip(by_function(x, k), by_numpy(x, k)):
        np.testing.assert_array_equal(found, expected)


@native
@pytest.mark.parametrize("k", [1, 20, 512, 4999, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_as_numpy(kind: str, k: int) -> None:
    x = rows(kind)
    for found, expected in zip(by_kernel(x, k), by_numpy(x, k)):
        np.testing.assert_array_equal(found, expected)


@native
def test_kernel_does_not_depend_on_threads_or_neighbours() -> None:
    x = np.random.default_rng(1).normal(size=(40, 3000)).astype(np.float32)
    one, two = by_kernel(x, 100), by_kernel(x, 100, threads=2)
    alone = [by_kernel(row[None], 100) for row in x]
    for position, found in enumerate(one):
        np.testing.assert_array_equal(found, two[position])
        np.testing.assert_array_equal(found, np.concatenate([answer[position] for answer in alone]))


@native
@pytest.mark.parametrize("shape", [(0, 50), (50,), (2, 0, 50), (1, 7)])
def test_kernel_takes_any_number_of_rows(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    for found, expected in zip(by_kernel(x, 5), by_numpy(x, 5)):
        np.testing.assert_array_equal(found, expected)


@native
def test_kernel_refuses_more_than_there_are() -> None:
    with pytest.raises(Exception, match="at least k = 8 elements"):
        by_kernel(np.zeros((2, 7), np.float32), 8)


@pytest.mark.parametrize("opset", [11, 13, 17, 21])
def test_function_at_every_opset(opset: int) -> None:
    x = rows("ties")
    for found, expected in zip(by_function(x, 30, opset), by_numpy(x, 30)):
        np.testing.assert_array_equal(found, expected)


def test_no_function_before_its_operators() -> None:
    with pytest.raises(ValueError, match="only from 11 on"):
        leading_body(OLDEST_OPSET - 1)

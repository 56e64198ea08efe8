"""What tables say about tokens: how many a model knows, how long a sequence may be, how wide a head is."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.decoders import HEAD, VOCABULARY, decoder
from support.texts import POSITIONS, encoder

from gapa_onnx.data.spec import TokenLimits
from gapa_onnx.model.load import load, read_inputs

MICROSOFT = "com.microsoft"


def limits(model: onnx.ModelProto, name: str = "input_ids") -> TokenLimits | None:
    return {spec.name: spec.limits for spec in load(model).inputs}[name]


def graph(nodes: list[onnx.NodeProto], weights: dict[str, np.ndarray], **inputs: list[int | str]):
    """A model of these nodes; what the last one puts out is its output."""
    return helper.make_model(
        helper.make_graph(
            nodes,
            "g",
            [helper.make_tensor_value_info(n, TensorProto.INT64, shape) for n, shape in inputs.items()],
            [helper.make_tensor_value_info(nodes[-1].output[0], TensorProto.FLOAT, None)],
            [numpy_helper.from_array(array, name) for name, array in weights.items()],
        ),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)],
        ir_version=8,
    )


def floats(*shape: int) -> np.ndarray:
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize("kind", [{}, {"cached": True}, {"tied": True}], ids=str)
def test_decoders(kind):
    assert limits(decoder(**kind)) == TokenLimits(VOCABULARY, None, None)
    assert limits(decoder(**kind), "attention_mask") is None


def test_an_encoder_has_so_many_positions(tmp_path):
    assert limits(encoder()) == TokenLimits(64, POSITIONS, None)
    onnx.save(encoder(), tmp_path / "a.onnx")
    assert read_inputs(tmp_path / "a.onnx") == load(tmp_path / "a.onnx").inputs


IDS = {"input_ids": ["b", "s"]}
EMBED = helper.make_node("Gather", ["words", "input_ids"], ["e"])
TABLES = {
    "turned": (
        [helper.make_node("Transpose", ["head"], ["words"], perm=[1, 0]), EMBED],
        {"head": floats(8, 30)},
        IDS,
        TokenLimits(30),
    ),
    "cast": (
        [helper.make_node("Cast", ["input_ids"], ["i"], to=TensorProto.INT32), helper.make_node("Gather", ["words", "i"], ["e"])],
        {"words": floats(30, 8)},
        IDS,
        TokenLimits(30),
    ),
    "four bits": (
        [helper.make_node("GatherBlockQuantized", ["packed", "input_ids", "scales"], ["e"], domain=MICROSOFT, gather_axis=0, quantize_axis=1, bits=4, block_size=32)],
        {"packed": np.zeros((30, 16), np.uint8), "scales": floats(30, 1)},
        IDS,
        TokenLimits(30),
    ),
    "positions that are fed": (
        [helper.make_node("Gather", ["places", "position_ids"], ["p"]), EMBED, helper.make_node("Add", ["e", "p"], ["y"])],
        {"words": floats(30, 8), "places": floats(20, 8)},
        {**IDS, "position_ids": ["b", "s"]},
        TokenLimits(30, 20),
    ),
    "positions that are counted": (
        [
            helper.make_node("Shape", ["input_ids"], ["n1"], start=1, end=2),
            helper.make_node("Squeeze", ["n1"], ["n"]),
            helper.make_node("Range", ["zero", "n", "one"], ["r"]),
            helper.make_node("Unsqueeze", ["r", "front"], ["r2"]),
            helper.make_node("Gather", ["places", "r2"], ["p"]),
            EMBED,
            helper.make_node("Add", ["e", "p"], ["y"]),
        ],
        {"words": floats(30, 8), "places": floats(20, 8), "zero": np.int64(0), "one": np.int64(1), "front": np.array([0])},
        IDS,
        TokenLimits(30, 20),
    ),
    "buckets of distances are no positions": (
        [
            helper.make_node("Shape", ["input_ids"], ["n1"], start=1, end=2),
            helper.make_node("Squeeze", ["n1"], ["n"]),
            helper.make_node("Range", ["zero", "n", "one"], ["r"]),
            helper.make_node("Min", ["r", "most"], ["bucket"]),
            helper.make_node("Gather", ["biases", "bucket"], ["p"]),
            EMBED,
            helper.make_node("Add", ["e", "p"], ["y"]),
        ],
        {"words": floats(30, 8), "biases": floats(4, 8), "zero": np.int64(0), "one": np.int64(1), "most": np.int64(3)},
        IDS,
        TokenLimits(30),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLES)
def test_tables(name):
    nodes, weights, inputs, expected = TABLES[name]
    assert limits(graph(nodes, weights, **inputs)) == expected


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("bits", [32, 4])
def test_heads_of_grouped_attention(packed, bits):
    """As the builder of onnxruntime-genai has it: caches whose last axis has no size."""
    heads, kv = 4, 2
    width = (heads + 2 * kv) * HEAD if packed else heads * HEAD
    linear = (
        helper.make_node("MatMul", ["e", "qkv"], ["q"])
        if bits == 32
        else helper.make_node("MatMulNBits", ["e", "qkv4", "scales"], ["q"], domain=MICROSOFT, N=width, K=32, bits=4, block_size=32)
    )  # fmt: skip
    others = ["", ""] if packed else ["k", "k"]
    nodes = [
        EMBED,
        linear,
        helper.make_node("MatMul", ["e", "kw"], ["k"]),
        helper.make_node("GroupQueryAttention", ["q", *others, "", "", "lengths", "total", "cos", "cos"], ["y"], domain=MICROSOFT, num_heads=heads, kv_num_heads=kv),
    ]  # fmt: skip
    weights = {
        "words": floats(30, 32), "qkv": floats(32, width), "kw": floats(32, kv * HEAD), "cos": floats(99, HEAD // 2),
        "qkv4": np.zeros((width, 1, 16), np.uint8), "scales": floats(width), "lengths": np.zeros(1, np.int32),
        "total": np.int32(5),
    }  # fmt: skip
    assert limits(graph(nodes, weights, **IDS)) == TokenLimits(30, 99, HEAD)

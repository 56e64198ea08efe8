"""Variances of a vocabulary's leading tokens: the same numbers as those of all tokens, and nothing of the size of a head."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from support.decoders import decoder, token_rows, with_empty_past
from support.steps import steps

import gapa_onnx
from gapa_onnx.data import Batch
from gapa_onnx.emit.emit import emit
from gapa_onnx.emit.numbers import Numbers
from gapa_onnx.measure.verify import verify
from gapa_onnx.model.load import load
from gapa_onnx.sessions.runtime import library_path
from gapa_onnx.settings import Settings
from gapa_onnx.settle.settle import settle
from gapa_onnx.variance.weights import read_packed, unpacked

VOCABULARY, WIDTH, TOP = 1100, 48, 20
MICROSOFT = "com.microsoft"
# τ is stated: fitted, it is held back by the probabilities that a file has, so that it depends on how many tokens lead
SMALL: dict[str, Any] = {
    "m": 60,
    "k": 8,
    "task": "tokens",
    "witnesses": "none",
    "score": "variance",
    "scale": 0.5,
}
#: float32 sums of 48 products, of a share that two sessions compute alike
CLOSE = 64 * float(np.finfo(np.float32).eps)


def packed(
    weights: np.ndarray, block: int, bits: int, zeros: bool
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Weights (rows, width) in few bits, as MatMulNBits takes them, and what they then stand for."""
    rows, width = weights.shape
    blocks, levels = -(-width // block), 2**bits
    filled = np.zeros((rows, blocks * block))
    filled[:, :width] = weights
    grouped = filled.reshape(rows, blocks, block)
    scales = ((grouped.max(-1) - grouped.min(-1)) / (levels - 1) + 1e-3).astype(np.float32)
    zero = (
        np.clip(np.round(-grouped.min(-1) / scales), 0, levels - 1)
        if zeros
        else np.full(scales.shape, levels / 2)
    )
    steps = np.clip(np.round(grouped / scales[..., None] + zero[..., None]), 0, levels - 1)
    meant = ((steps - zero[..., None]) * scales[..., None]).reshape(rows, -1)[:, :width]

    def pack(numbers: np.ndarray) -> np.ndarray:
        per_byte = 8 // bits
        flat = np.zeros((rows, -(-numbers.shape[1] // per_byte) * per_byte), np.uint8)
        flat[:, : numbers.shape[1]] = numbers
        parts = flat.reshape(rows, -1, per_byte).astype(np.uint32) << (
            bits * np.arange(per_byte, dtype=np.uint32)
        )
        return parts.sum(-1).astype(np.uint8)

    inputs = {"q": pack(steps.reshape(rows, -1)).reshape(rows, blocks, -1), "s": scales.reshape(-1)}
    return (inputs | {"zp": pack(zero).reshape(-1)} if zeros else inputs), meant


class Head:
    """A model with tokens per position: two layers, and a head that is stored in one of several ways."""

    def __init__(self, kind: str, rank: int = 3):
        generator = np.random.default_rng(3)
        self.weights = generator.normal(size=(VOCABULARY, WIDTH)).astype(np.float32)
        self.weights[7] = self.weights[3]  # a tie in every row
        given = {"w1": generator.normal(size=(6, WIDTH)).astype(np.float32)}
        nodes = [helper.make_node("MatMul", ["x", "w1"], ["z"]), helper.make_node("Tanh", ["z"], ["h"])]
        more, held = getattr(self, f"_{kind}")()
        nodes += more
        free = ["n", "t"][: rank - 1]
        graph = helper.make_graph(
            nodes,
            "head",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*free, 6])],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, [*free, VOCABULARY])],
            [numpy_helper.from_array(array, name) for name, array in {**given, **held}.items()],
        )
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
        self.model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
        shape = (120, 6) if rank == 2 else (30, 4, 6)
        self.x = generator.normal(size=shape).astype(np.float32)

    def _matmul(self):
        return [helper.make_node("MatMul", ["h", "w"], ["y"])], {"w": np.ascontiguousarray(self.weights.T)}

    def _tied(self):
        turn = helper.make_node("Transpose", ["w"], ["wt"], perm=[1, 0])
        return [turn, helper.make_node("MatMul", ["h", "wt"], ["y"])], {"w": self.weights}

    def _gemm(self):
        node = helper.make_node("Gemm", ["h", "w", "b"], ["y"], transB=1, alpha=0.5)
        self.weights, held = 0.5 * self.weights, self.weights
        return [node], {"w": held, "b": np.zeros(VOCABULARY, np.float32)}

    def _qdq(self):
        scale = (np.abs(self.weights).max(axis=1) / 127).astype(np.float32)
        steps = np.round(self.weights / scale[:, None]).astype(np.int8)
        self.weights = steps * scale[:, None]
        back = helper.make_node("DequantizeLinear", ["q", "s", "zero"], ["w"], axis=1)
        held = {"q": np.ascontiguousarray(steps.T), "s": scale, "zero": np.zeros(VOCABULARY, np.int8)}
        return [back, helper.make_node("MatMul", ["h", "w"], ["y"])], held

    def _bits(self, bits: int = 4, zeros: bool = False):
        held, self.weights = packed(self.weights, 32, bits, zeros)
        sizes = {"K": WIDTH, "N": VOCABULARY, "bits": bits, "block_size": 32}
        return [helper.make_node("MatMulNBits", ["h", *held], ["y"], domain=MICROSOFT, **sizes)], held

    def _int4(self):
        return self._bits()

    def _int4_zeros(self):
        return self._bits(zeros=True)

    def _int8(self):
        return self._bits(8, zeros=True)


KINDS = ["matmul", "tied", "gemm", "qdq", "int4", "int4_zeros", "int8"]


@dataclass(frozen=True)
class Converted:
    head: Head
    numbers: Numbers
    model: onnx.ModelProto


@functools.cache
def converted(kind: str, site: str, top_k: int | str = TOP, rank: int = 3) -> Converted:
    """A file that nothing has verified: these tests do."""
    head, settings = Head(kind, 2 if kind == "gemm" else rank), Settings(sites=site, top_k=top_k, **SMALL)
    made = steps(head.model, {"x": head.x}, settings)
    numbers = settle(made.template, made.calibration, settings)
    return Converted(head, numbers, emit(made.template, numbers, made.calibration, settings))


def answers(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *more: str) -> dict[str, np.ndarray]:
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    shown.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in more)
    session = gapa_onnx.session(shown.SerializeToString())
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


def amplitude(done: Converted) -> tuple[np.ndarray, float]:
    """c² τ of the one site, and its b: the own variance is c² τ s / (1 + b s)."""
    (fit,) = done.numbers.fits
    return fit.prior_var.astype(np.float64) * fit.scale, fit.damping


@pytest.mark.parametrize("rank", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_leading_tokens_as_numpy(kind: str, rank: int) -> None:
    """Right behind the site, against c² τ s / (1 + b s) · W² in float64."""
    done = converted(kind, "h", TOP, rank)
    head = done.head
    found = answers(done.model, {"x": 2 * head.x[:9]}, "h/gapa/share")
    assert "y_var" not in found
    own, damping = amplitude(done)
    share = found["h/gapa/share"].astype(np.float64)
    whole = share / (1 + damping * share) * (head.weights.astype(np.float64) ** 2 @ own)
    order = np.argsort(-found["y"], axis=-1, kind="stable")[..., :TOP]
    np.testing.assert_array_equal(found["y_tokens"], order)
    expected = np.take_along_axis(whole, order, axis=-1)
    np.testing.assert_allclose(found["y_token_var"], expected, rtol=CLOSE)
    np.testing.assert_allclose(found["y_score"], expected.mean(-1), rtol=CLOSE)


@pytest.mark.parametrize("kind", KINDS)
def test_leading_tokens_behind_a_site_further_up(kind: str) -> None:
    """The variance in front of the head is a vector per position: the rows of the tokens are gathered."""
    done = converted(kind, "z")
    head = done.head
    found = answers(done.model, {"x": 2 * head.x[:9]}, "h/var")
    whole = found["h/var"].astype(np.float64) @ head.weights.astype(np.float64).T ** 2
    expected = np.take_along_axis(whole, found["y_tokens"], axis=-1)
    np.testing.assert_allclose(found["y_token_var"], expected, rtol=CLOSE)
    assert "Loop" in {node.op_type for node in done.model.graph.node}


@pytest.mark.parametrize("site", ["h", "z"])
@pytest.mark.parametrize("kind", ["tied", "qdq", "int4_zeros"])
def test_all_tokens_on_request(kind: str, site: str) -> None:
    """What is asked for is the whole of what is given by default."""
    few, every = (
        answers(done.model, {"x": done.head.x[:5]})
        for done in (converted(kind, site), converted(kind, site, "all"))
    )
    assert every["y_tokens"].shape[-1] == every["y_probs"].shape[-1] == VOCABULARY
    assert every["y_var"].shape == every["y"].shape
    gathered = np.take_along_axis(every["y_var"], every["y_tokens"], axis=-1)
    np.testing.assert_allclose(every["y_token_var"], gathered, rtol=CLOSE)
    np.testing.assert_array_equal(few["y_tokens"], every["y_tokens"][..., :TOP])
    np.testing.assert_allclose(few["y_token_var"], gathered[..., :TOP], rtol=CLOSE)


def test_more_tokens_than_the_vocabulary_has() -> None:
    done = converted("matmul", "h", 10 * VOCABULARY)
    found = answers(done.model, {"x": done.head.x[:2]})
    assert found["y_tokens"].shape == (2, 4, VOCABULARY) and "y_var" not in found
    assert (np.sort(found["y_tokens"], axis=-1) == np.arange(VOCABULARY)).all()


def test_of_equal_logits_the_first_token_leads() -> None:
    done = converted("matmul", "h", 10 * VOCABULARY)
    found = answers(done.model, {"x": done.head.x[:4]})
    np.testing.assert_array_equal(found["y"][..., 3], found["y"][..., 7])
    ranks = np.argsort(found["y_tokens"], axis=-1)
    np.testing.assert_array_equal(ranks[..., 7], ranks[..., 3] + 1)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_has_the_size_of_the_head(kind: str) -> None:
    """Right behind the site the head's weight is read by the source alone, and what is stored is a vector."""
    done = converted(kind, "h")
    source, graph = done.head.model.graph, done.model.graph
    weights = {"w", "wt", "q"}
    own = [node.name or node.op_type for node in source.node if weights & set(node.input)]
    assert [node.name or node.op_type for node in graph.node if weights & set(node.input)] == own
    added = {tensor.name: tensor for tensor in graph.initializer[len(source.initializer) :]}
    assert list(added["y/var/profile"].dims) == [VOCABULARY]
    wide = [name for name, tensor in added.items() if VOCABULARY in tensor.dims]
    assert wide == ["y/var/profile"]


@pytest.mark.parametrize("kind, site", [("tied", "h"), ("int4_zeros", "z")])
def test_the_whole_conversion_is_sound(kind: str, site: str) -> None:
    """Bit-equal logits, native = portable, and every token that leads has a variance."""
    head = Head(kind)
    done = gapa_onnx.convert(head.model, {"x": head.x}, sites=site, top_k=TOP, **SMALL)
    assert all(check.passed for check in done.checks), done.checks
    names = {check.name for check in done.checks}
    assert "every part that varies has a variance" in names
    assert library_path() is None or "whole graph: native = portable" in names


def test_a_leading_token_without_a_variance_is_told() -> None:
    """Its variance is made 0 behind the conversion, while its logit varies."""
    done = converted("matmul", "h")
    x = done.head.x[:6]
    found = answers(done.model, {"x": x})
    token = int(found["y_tokens"][0, 0, 0])
    damaged = onnx.ModelProto()
    damaged.CopyFrom(done.model)
    profile = next(tensor for tensor in damaged.graph.initializer if tensor.name == "y/var/profile")
    numbers = np.array(numpy_helper.to_array(profile))
    numbers[token] = 0
    profile.CopyFrom(numpy_helper.from_array(numbers, profile.name))
    checks = verify(done.head.model, damaged, [Batch({"x": x}, 6)], allow_uncovered=False)
    told = next(check for check in checks if check.name == "every part that varies has a variance")
    assert not told.passed and f"tokens {token} of those that lead" in told.detail


# ---------------------------------------------------------------------------- decoders


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_norm_of_a_decoder_is_the_site(tied: bool) -> None:
    model, rows = decoder(tied=tied, vocabulary=VOCABULARY), token_rows(12, 8, vocabulary=VOCABULARY)
    done = gapa_onnx.convert(model, rows, m=60, k=8, top_k=TOP, witnesses="none", score="variance")
    assert all(check.passed for check in done.checks)
    assert [site.output for site in done.plan.sites] == ["last"]
    names = {tensor.name for tensor in done.model.graph.initializer}
    assert "logits/var/profile" in names and "last/gapa/amplitude" not in names
    found = answers(done.model, rows)
    assert found["logits_token_var"].shape == (12, 8, TOP) and (found["logits_token_var"] > 0).all()


def test_a_cache_has_no_site_of_its_own() -> None:
    """Keys and values are certain again at the next call: only what is in front of the head has a site."""
    model = decoder(cached=True)
    rows = with_empty_past(token_rows(12, 8))
    done = gapa_onnx.convert(model, rows, m=60, k=8, top_k=TOP, witnesses="none", score="variance")
    assert [site.output for site in done.plan.sites] == ["last"]
    assert set(done.plan.states) == {f"present.{i}.{part}" for i in range(2) for part in ("key", "value")}
    record = json.loads(next(p.value for p in done.model.metadata_props if p.key.startswith("gapa")))
    assert list(record["heads"]) == ["logits"]


# --------------------------------------------------------------------------- few bits


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("zeros", [False, True])
def test_packed_weights_are_read_as_they_are_meant(bits: int, zeros: bool) -> None:
    weights = np.random.default_rng(0).normal(size=(37, 45))
    held, meant = packed(weights, 16, bits, zeros)
    graph = helper.make_graph(
        [
            helper.make_node(
                "MatMulNBits", ["x", *held], ["y"], domain=MICROSOFT, K=45, N=37, bits=bits, block_size=16
            )
        ],
        "bits",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 45])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 37])],
        [numpy_helper.from_array(array, name) for name, array in held.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    source = load(helper.make_model(graph, opset_imports=opsets, ir_version=9))
    read = read_packed(source.graph.nodes[0])
    np.testing.assert_allclose(read.part(0, 0, 37), meant, rtol=1e-12, atol=1e-12)
    np.testing.assert_array_equal(read.part(0, 5, 9), read.part(0, 0, 37)[5:9])
    vector = np.random.default_rng(1).random(45)
    np.testing.assert_allclose(read.squares_times(vector), meant**2 @ vector, rtol=1e-12)


def test_numbers_in_a_byte() -> None:
    assert unpacked(np.array([[0xA3]], np.uint8), 4).tolist() == [[3, 10]]
    assert unpacked(np.array([[0b11100100]], np.uint8), 2).tolist() == [[0, 1, 2, 3]]

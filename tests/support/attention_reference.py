"""The paper's two variants of attention in float64, and models of one fused operator to hold them against."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import helper

from gapa_onnx.variance.rules import Options
from support.rule_checks import run_with_variances, session

FULL = Options(attention="full")
SINGLE = 2e-5  # some hundred operations in float32; onnxruntime's exponentials err by 1e-6
Arrays = dict[str, np.ndarray]


def softmax(e: np.ndarray) -> np.ndarray:
    p = np.exp(e - e.max(axis=-1, keepdims=True))
    return p / p.sum(axis=-1, keepdims=True)


def attend(q, k, v, var_q, var_k, var_v, *, scale, bias=0.0, softcap=0.0, full=False):
    """y, its variance, the weights and theirs; all (batch, heads, tokens, d)."""
    e = scale * np.einsum("bhtd,bhsd->bhts", q, k)
    var_e = scale**2 * (
        np.einsum("bhtd,bhsd->bhts", q**2, var_k)
        + np.einsum("bhtd,bhsd->bhts", var_q, k**2)
        + np.einsum("bhtd,bhsd->bhts", var_q, var_k)
    )
    if softcap:
        slope = 1 / np.cosh(e / softcap) ** 2
        e, var_e = softcap * np.tanh(e / softcap), slope**2 * var_e
    a = softmax(e + bias)
    jacobian = a[..., :, None] * (np.eye(a.shape[-1]) - a[..., None, :])  # (b, h, t, s, s')
    var_a = np.einsum("bhtsr,bhtr->bhts", jacobian**2, var_e)
    var_y = np.einsum("bhts,bhsd->bhtd", a**2, var_v)
    if full:
        var_y += np.einsum("bhts,bhsd->bhtd", var_a, v**2) + np.einsum("bhts,bhsd->bhtd", var_a, var_v)
    return np.einsum("bhts,bhsd->bhtd", a, v), var_y, a, var_a


def heads(x: np.ndarray, count: int) -> np.ndarray:
    return x.reshape(*x.shape[:2], count, -1).transpose(0, 2, 1, 3)


def joined(x: np.ndarray) -> np.ndarray:
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def causal(queries: int, keys: int, offset: int = 0) -> np.ndarray:
    return np.where(np.arange(keys) <= np.arange(queries)[:, None] + offset, 0.0, -np.inf)


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def variances(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed + 100, *shape]).uniform(0.05, 0.2, shape)


def fused(
    op: str,
    inputs: Arrays,
    outputs: int = 1,
    dtype: type = np.float32,
    domain: str = "com.microsoft",
    order: list[str] | None = None,
    **attrs,
) -> tuple[onnx.ModelProto, Arrays]:
    """A model of one node and what it is fed; an empty name in `order` leaves an input out."""
    feeds = {
        n: np.asarray(a, dtype if np.asarray(a).dtype == np.float64 else None) for n, a in inputs.items()
    }
    node = helper.make_node(
        op, order or list(inputs), [f"y{i}" for i in range(outputs)], domain=domain, **attrs
    )
    infos = [_info(name, array) for name, array in feeds.items()]
    graph = helper.make_graph([node], "g", infos, [onnx.ValueInfoProto(name=n) for n in node.output])
    opsets = [helper.make_opsetid("", 17 if domain else 24), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    found = session(model).run(None, feeds)
    for output, array in zip(model.graph.output, found):
        output.CopyFrom(_info(output.name, array))
    return model, feeds


def _info(name: str, array: np.ndarray) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)


def check(model, feeds, own, wanted: Arrays, options: Options, rtol: float) -> None:
    """Means first, so that the formulas are about what the operator computes."""
    own = {name: var.astype(feeds[name].dtype) for name, var in own.items()}
    found = run_with_variances(model, feeds, own, options)
    for name, array in wanted.items():
        np.testing.assert_allclose(
            found[name], array, rtol=rtol, atol=rtol * np.abs(array).max(), err_msg=name
        )

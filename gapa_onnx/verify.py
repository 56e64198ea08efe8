"""Step 6, verify: the promises of a converted file, checked on data.

1. the source outputs are the same, bit for bit, with and without graph optimisation;
2. every variance is finite and not negative;
3. at every site the native kernel, the portable function and the float64 reference agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnxruntime import InferenceSession, set_seed

from gapa_onnx import provenance
from gapa_onnx.errors import UserError
from gapa_onnx.op import reference
from gapa_onnx.op.contract import DOMAIN, SCHEMAS
from gapa_onnx.runtime import library_path, open_session, register, session_options

SHARE_TOLERANCE = (
    1e-4  # relative, where s > SMALLEST_SHARE: single precision of the answer, and its conditioning
)
SMALLEST_SHARE = 1e-6

Batch = dict[str, np.ndarray]


@dataclass(frozen=True)
class Check:
    """One promise, kept or not."""

    name: str
    passed: bool
    detail: str


def verify(source: onnx.ModelProto, converted: onnx.ModelProto, batches: Iterable[Batch]) -> list[Check]:
    """Check a converted model against its source on some batches of inputs."""
    record = provenance.read(converted)
    if record is None:
        raise UserError(
            "the second file was not written by gapa-onnx", "give the source first, then the converted file"
        )
    batches = list(batches)
    return [
        *_same_outputs(source, converted, batches),
        _sound_variances(converted, record["outputs"], batches),
        *_agreement(converted, batches),
    ]


def _same_outputs(
    source: onnx.ModelProto, converted: onnx.ModelProto, batches: Sequence[Batch]
) -> list[Check]:
    names = [output.name for output in source.graph.output]
    if names != [output.name for output in converted.graph.output][: len(names)]:
        return [Check("source outputs come first, in order", False, f"expected {', '.join(names)}")]
    checks = []
    for optimise in (False, True):
        before, after = _session(source, optimise=optimise), _session(converted, optimise=optimise)
        different = {
            name
            for batch in batches
            for name, old, new in zip(names, before.run(names, batch), after.run(names, batch))
            if not bit_equal(old, new)
        }
        title = f"source outputs bit-equal, optimisation {'all' if optimise else 'none'}"
        detail = f"differs: {', '.join(sorted(different))}" if different else f"{len(names)} output(s)"
        checks.append(Check(title, not different, detail))
    return checks


def bit_equal(a, b) -> bool:
    """The same type, shape and bytes; NaNs count as equal to themselves. Also for lists and dicts."""
    if isinstance(a, np.ndarray):
        same_kind = isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape
        return same_kind and (a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(bit_equal, a, b))
    return a == b


def _sound_variances(converted: onnx.ModelProto, outputs: dict[str, str], batches: Sequence[Batch]) -> Check:
    session = _session(converted)
    faults = set()
    for batch in batches:
        for output, name in outputs.items():
            mean, var = session.run([output, name], batch)
            var = var[np.isfinite(mean)]  # an output that is not a number itself has no error bar
            if not np.isfinite(var).all():
                faults.add(f"{name} has NaN or infinity")
            elif (var < 0).any():
                faults.add(f"{name} is negative ({var.min():.3g})")
    detail = "; ".join(sorted(faults)) or ", ".join(outputs.values())
    return Check("variances finite and not negative", not faults, detail)


def _agreement(converted: onnx.ModelProto, batches: Sequence[Batch]) -> list[Check]:
    """The share s of every site, computed three ways on the same queries."""
    nodes = [node for node in converted.graph.node if node.domain == DOMAIN]
    native = _shares(converted, nodes, batches, native=True) if library_path() else None
    portable = _shares(converted, nodes, batches, native=False)
    checks = []
    for node in nodes:
        exact, reached = _reference_shares(converted, node, portable[node.name][0])
        checks.append(_agree(f"{node.name}: portable = reference", portable[node.name][1], exact))
        if native is None:
            continue
        if reached:  # an index whose search the function does not repeat is compared at its own neighbours
            checks.append(_agree(f"{node.name}: native = reference", native[node.name][1], exact))
        else:
            lower = native[node.name][1] < exact * (1 - SHARE_TOLERANCE) - SMALLEST_SHARE
            detail = f"{len(exact)} queries, recall shows in a larger share only"
            checks.append(Check(f"{node.name}: native not below reference", not lower.any(), detail))
    if native is None:
        checks.append(Check("native library", True, "missing: only the portable function was checked"))
    return checks


def _shares(
    converted: onnx.ModelProto, nodes: Sequence[onnx.NodeProto], batches: Sequence[Batch], *, native: bool
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Queries (n, d) and shares (n,) of each site."""
    exposed = onnx.ModelProto()
    exposed.CopyFrom(converted)
    present = {output.name for output in exposed.graph.output}
    names = [name for node in nodes for name in (node.input[0], node.output[0])]
    for name in dict.fromkeys(names):
        if name not in present:
            exposed.graph.output.append(onnx.helper.make_empty_tensor_value_info(name))
    session = _session(exposed, native=native)
    answers = [dict(zip(names, session.run(names, batch))) for batch in batches]
    return {
        node.name: (
            np.concatenate([a[node.input[0]].reshape(-1, a[node.input[0]].shape[-1]) for a in answers]),
            np.concatenate([a[node.output[0]].reshape(-1) for a in answers]),
        )
        for node in nodes
    }


def _reference_shares(
    converted: onnx.ModelProto, node: onnx.NodeProto, queries: np.ndarray
) -> tuple[np.ndarray, bool]:
    """The float64 shares, and whether the native search reaches the same neighbours."""
    schema = next(schema for schema in SCHEMAS.values() if schema.name == node.op_type)
    wanted = dict(zip(node.input[1:], (port.name for port in schema.constants)))
    tensors = {
        wanted[tensor.name]: onnx.numpy_helper.to_array(tensor)
        for tensor in converted.graph.initializer
        if tensor.name in wanted
    }
    share, _ = reference.evaluate(schema.index, tensors, queries)
    return share.reshape(-1), schema.index != "hnsw"


def _agree(name: str, share: np.ndarray, exact: np.ndarray) -> Check:
    counted = exact > SMALLEST_SHARE
    error = np.abs(share[counted] - exact[counted]) / exact[counted]
    worst = float(error.max(initial=0.0))
    same_nans = bool((np.isnan(share) == np.isnan(exact)).all())
    return Check(
        name, worst <= SHARE_TOLERANCE and same_nans, f"{len(exact)} queries, relative error ≤ {worst:.1e}"
    )


def _session(model: onnx.ModelProto, *, optimise: bool = True, native: bool = True) -> InferenceSession:
    options = session_options(optimise=optimise)
    if native:
        register(options)
    set_seed(0)  # for models with random operators: the same draws before and after
    return open_session(model, "the model", options)

"""`gapa-onnx doctor`: whether everything that a conversion and its result need works here."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapa_onnx.cli import options
from gapa_onnx.cli.console import print_json, quiet_runtime

if TYPE_CHECKING:
    import numpy as np
    import onnx

TOLERANCE = 1e-4  # relative, as in `verify`


@dataclass(frozen=True)
class Finding:
    """One line of the answer; `passed` is None for what is only said."""

    name: str
    passed: bool | None
    detail: str


def doctor(as_json: options.Json = False) -> int:
    """Show versions and check the native library, onnxruntime and the CPU."""
    from gapa_onnx.cli import render

    quiet_runtime()
    findings = [
        *_versions(),
        _runtime(),
        _providers(),
        _cpu(),
        *_library(),
        _answer("portable function", None),
    ]
    passed = all(finding.passed is not False for finding in findings)
    if as_json:
        print_json({"passed": passed, "findings": [asdict(finding) for finding in findings]})
    else:
        render.findings([asdict(finding) for finding in findings])
    return 0 if passed else 1


def _versions() -> list[Finding]:
    import faiss
    import numpy
    import onnx
    import onnx_graphsurgeon

    import gapa_onnx

    modules = {
        "gapa-onnx": gapa_onnx,
        "onnx": onnx,
        "onnx-graphsurgeon": onnx_graphsurgeon,
        "faiss": faiss,
        "numpy": numpy,
    }
    found = [Finding(name, None, module.__version__) for name, module in modules.items()]
    return [Finding("python", None, f"{platform.python_version()} on {platform.platform()}"), *found]


def _runtime() -> Finding:
    import onnxruntime

    from gapa_onnx.sessions.runtime import OLDEST_RUNTIME, runtime_version

    oldest = ".".join(map(str, OLDEST_RUNTIME))
    works = runtime_version() >= OLDEST_RUNTIME
    verdict = f"{oldest} or newer" if works else f"too old for the native library, which needs {oldest}"
    return Finding("onnxruntime", works, f"{onnxruntime.__version__}, {verdict}")


def _providers() -> Finding:
    import onnxruntime

    return Finding("providers", None, ", ".join(onnxruntime.get_available_providers()))


def _cpu() -> Finding:
    from gapa_onnx.sessions.processor import features, model_name

    parts = (platform.machine(), model_name(), " ".join(features()))
    text = ", ".join(part for part in parts if part)
    return Finding("cpu", None, f"{text}, {os.cpu_count()} threads")


def _library() -> list[Finding]:
    from gapa_onnx.sessions.runtime import LIBRARY_VARIABLE, library_path

    library = library_path()
    if library is not None:
        return [Finding("native library", True, str(library)), _answer("native kernel", library)]
    named = os.environ.get(LIBRARY_VARIABLE)
    if named:
        return [Finding("native library", False, f"${LIBRARY_VARIABLE} is {named}, where there is no file")]
    return [Finding("native library", None, "missing: files run by the portable function, which is slower")]


def _answer(name: str, library: Path | None) -> Finding:
    """A tiny model with the operator, compared with the float64 reference."""
    import numpy as np
    import onnxruntime

    from gapa_onnx.op import reference
    from gapa_onnx.sessions.runtime import first_line, session_options

    model, tensors = _tiny_model()
    queries = np.random.default_rng(1).normal(size=(32, 3)).astype(np.float32)  # (n, d)
    options = session_options()
    try:
        if library is not None:
            options.register_custom_ops_library(str(library))
        session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        (share,) = session.run(["s"], {"query": queries})
    except Exception as error:  # onnxruntime has no common base class for its errors
        return Finding(name, False, f"does not run: {first_line(error)}")
    exact, _ = reference.evaluate("flat", tensors, queries)
    worst = float(np.max(np.abs(share - exact) / exact))
    return Finding(name, bool(worst <= TOLERANCE), f"relative error {worst:.1e} on {len(queries)} queries")


def _tiny_model() -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """One flat operator over 20 points, with its body in standard operators; and its constants."""
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    from gapa_onnx.op.contract import DOMAIN, SCHEMAS, VERSION
    from gapa_onnx.op.function import body

    opset, schema = 17, SCHEMAS["flat"]
    tensors: dict[str, np.ndarray] = {
        "k": np.array([4], np.int64),
        "length_scale": np.array(1.5, np.float32),
        "jitter": np.array(1e-6, np.float32),
        "points": np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32),  # (M, d)
    }
    names = [port.name for port in schema.constants]
    node = helper.make_node(schema.name, ["query", *names], ["s", "neighbours"], domain=DOMAIN)
    graph = helper.make_graph(
        [node],
        "doctor",
        [helper.make_tensor_value_info("query", TensorProto.FLOAT, ["n", 3])],
        [helper.make_tensor_value_info("s", TensorProto.FLOAT, ["n", 1])],
        [numpy_helper.from_array(tensors[name], name) for name in names],
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, VERSION)],
        functions=[body("flat", opset, 4, tensors)],
        ir_version=8,
    )
    return model, tensors

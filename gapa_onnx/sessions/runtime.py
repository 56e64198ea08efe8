"""Running converted files: sessions with the native library registered, and where that library is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import onnx
import onnxruntime as ort
from google.protobuf.message import DecodeError

from gapa_onnx.errors import UserError
from gapa_onnx.model.digest import is_as_written
from gapa_onnx.model.load import read_proto
from gapa_onnx.model.opening import open_proto
from gapa_onnx.model.sound import damaged, require_sound
from gapa_onnx.model.weights import require_own_data
from gapa_onnx.op.contract import DOMAIN, SCHEMAS
from gapa_onnx.presence import require_described, require_promises, require_thresholds
from gapa_onnx.record import require

LIBRARY_VARIABLE = "GAPA_ONNX_LIBRARY"
NEIGHBOURS_ENTRY = (
    "ai.gapa.k"  #: of a session's configuration; the native library reads it when it is registered
)
NEIGHBOURS_VARIABLE = "GAPA_ONNX_K"  #: the same, for servers that hand on no configuration; the entry wins
ALL_NEIGHBOURS = 10**17  #: more than any file has
FIRST_WITH_K_AS_INPUT = 10  # the first opset whose TopK takes its count as an input
OLDEST_RUNTIME = (1, 17)  # the first with a thread pool for custom operators

_said_portable = False


def library_path() -> Path | None:
    """Where the native library is: $GAPA_ONNX_LIBRARY, or in gapa_onnx_runtime; None if it is missing."""
    named = os.environ.get(LIBRARY_VARIABLE)
    if named is not None:
        return Path(named) if named and Path(named).is_file() else None
    try:
        import gapa_onnx_runtime

        return gapa_onnx_runtime.library_path()
    except (ModuleNotFoundError, FileNotFoundError):  # a platform that it is not built for
        return None


def runtime_version() -> tuple[int, int]:
    major, minor = ort.__version__.split(".")[:2]
    return int(major), int(minor)


def register(options: ort.SessionOptions) -> bool:
    """Register the native library, where there is one for this onnxruntime; False if not."""
    library = library_path()
    if library is None or runtime_version() < OLDEST_RUNTIME:
        return False
    try:
        options.register_custom_ops_library(str(library))
    except Exception as error:  # onnxruntime has no common base class for its errors
        raise UserError(
            f"the native library {library} does not load: {first_line(error)}",
            "`gapa-onnx doctor` tells more; set GAPA_ONNX_LIBRARY to nothing to go without it",
        ) from error
    return True


def register_or_say(options: ort.SessionOptions) -> bool:
    """Register the native library; where there is none, say once what runs instead."""
    global _said_portable
    native = register(options)
    if not native and not _said_portable:
        _said_portable = True
        old = f"onnxruntime {ort.__version__} is too old for the native library"
        reason = "the native library is missing" if library_path() is None else old
        warnings.warn(
            f"{reason}: running the portable function, which is slower", RuntimeWarning, stacklevel=3
        )
    return native


def session(
    path: str | os.PathLike[str] | bytes,
    options: ort.SessionOptions | None = None,
    providers: list[str] | None = None,
    *,
    k: int | None = None,
    check: bool = False,
) -> ort.InferenceSession:
    """An onnxruntime session with the native library registered, where there is one.

    Without it the file runs all the same, by the standard operators inside; that is said once. `k` lowers
    the number of neighbours that its operators use; where a file has fewer, these stay. So does the environment variable
    GAPA_ONNX_K, unless `k` or an entry in `options` says another number. `check` refuses, with a UserError,
    a file that is not what it was when gapa-onnx wrote it; all of it is read once more for that.
    """
    if check:
        require_as_written(path)
    options = options or ort.SessionOptions()
    if k is not None:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise UserError(f"k must be a whole number of neighbours, at least 1, not {k!r}", "leave it out")
        options.add_session_config_entry(NEIGHBOURS_ENTRY, str(k))
    native = register_or_say(options)
    lowered = None if native else _asked_neighbours(options)
    if lowered is not None:
        model = onnx.load_from_string(path) if isinstance(path, bytes) else read_proto(Path(path))
        lower_neighbours(model, lowered)
        return open_session(model, "the model", options, providers)
    source = path if isinstance(path, bytes) else os.fspath(path)
    if not isinstance(path, bytes):
        require_own_data(Path(path))
    return ort.InferenceSession(source, options, providers=providers or ["CPUExecutionProvider"])


def _asked_neighbours(options: ort.SessionOptions) -> int | None:
    """What the native library would lower k to; None where nobody asks for that."""
    try:
        text, where = options.get_session_config_entry(NEIGHBOURS_ENTRY), f"session entry {NEIGHBOURS_ENTRY}"
    except RuntimeError:  # there is none
        text, where = os.environ.get(NEIGHBOURS_VARIABLE, ""), f"environment variable {NEIGHBOURS_VARIABLE}"
        if not text:
            return None
    digits = text.isascii() and text.isdigit()
    if not digits or not 1 <= int(text) <= ALL_NEIGHBOURS:
        raise UserError(
            f"the {where} must be a whole number of neighbours, at least 1, but is {text!r}", "leave it out"
        )
    return None if int(text) == ALL_NEIGHBOURS else int(text)


def require_as_written(given: str | os.PathLike[str] | bytes) -> None:
    """UserError unless a converted file is sound, and what it was when it was written."""
    label = "the model" if isinstance(given, bytes) else str(given)
    if isinstance(given, bytes):
        try:
            model = onnx.load_from_string(given)
        except DecodeError as error:
            raise damaged(label, "it is not an ONNX file, or it is cut short") from error
        require_sound(model, label)
    else:
        model = read_proto(Path(given))
    record = require(model, label)
    require_described(record.heads, {output.name for output in model.graph.output})
    require_thresholds(record, model.graph)
    require_promises(record, model.graph)
    if not is_as_written(model, record):
        raise damaged(label, "it is not what it was when gapa-onnx wrote it")


def lower_neighbours(model: onnx.ModelProto, k: int) -> None:
    """Lower the number of neighbours of all operators of a converted file to k, where it is larger."""
    graphs = list(_graphs(model.graph))
    wanted = _inputs_that_hold_k(graphs)
    counts = [tensor for graph in graphs for tensor in graph.initializer if tensor.name in wanted]
    for tensor in counts:
        held = onnx.numpy_helper.to_array(tensor)
        tensor.CopyFrom(onnx.numpy_helper.from_array(held.clip(max=k), tensor.name))
    opset = next((entry.version for entry in model.opset_import if entry.domain in ("", "ai.onnx")), 0)
    if len(counts) < len(wanted) or (wanted and opset < FIRST_WITH_K_AS_INPUT):
        raise UserError(
            "the number of neighbours is fixed inside this file's portable functions",
            "use the native library, or convert with a smaller `k`",
        )


def _inputs_that_hold_k(graphs: Iterable[onnx.GraphProto]) -> set[str]:
    """The names of the tensors that tell our operators how many neighbours they use."""
    place = {schema.name: [port.name for port in schema.inputs].index("k") for schema in SCHEMAS.values()}
    nodes = [node for graph in graphs for node in graph.node if node.domain == DOMAIN]
    return {node.input[place[node.op_type]] for node in nodes if node.op_type in place}


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    """A graph and all graphs inside it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    yield from _graphs(inner)


def session_options(*, optimise: bool = True, threads: int = 0, quiet: bool = True) -> ort.SessionOptions:
    """Options for our own runs, which no environment changes; `optimise` off means no graph optimisation at all."""
    options = ort.SessionOptions()
    options.add_session_config_entry(NEIGHBOURS_ENTRY, str(ALL_NEIGHBOURS))
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 4 if quiet else 2  # errors are raised, and then told once
    return options


def open_session(
    model: onnx.ModelProto,
    label: str,
    options: ort.SessionOptions | None = None,
    providers: list[str] | None = None,
) -> ort.InferenceSession:
    """A plain session of a model in memory; one that onnxruntime refuses is the user's to fix."""
    options = options or session_options()
    providers = providers or ["CPUExecutionProvider"]
    try:
        return open_proto(model, options, providers)
    except Exception as error:  # onnxruntime has no common base class for its errors
        message = f"onnxruntime cannot load {label}: {first_line(error)}"
        raise UserError(message, "check that the model runs by itself") from error


def first_line(error: BaseException) -> str:
    """The first sentence of an onnxruntime error, without its code."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text.split(" : ", 3)[-1] if text.startswith("[ONNXRuntimeError]") else text

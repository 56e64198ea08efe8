"""Folders for servers, and for C++: the model, the native library, code that runs both, settings, a client.

One table says what lies where. All servers are asked by the open inference protocol (V2), so they share one client, and what
runs the model is one file for all of them (`clients/serving/gapa_model.py`); a stack adds the few lines that are its own.
"""

from __future__ import annotations

import io
import json
import platform
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

import numpy as np

from gapa_onnx import __version__
from gapa_onnx.errors import UserError
from gapa_onnx.monitor import metrics
from gapa_onnx.packaging.converted import ConvertedFile, Port, library_file, model_files
from gapa_onnx.packaging.folder import File

_HERE = Path(__file__).parent
_CLIENTS = _HERE / "clients"  # of the checkout: clients/, beside cli/
_NATIVE = _HERE / "native"  # of the checkout: runtime/examples and runtime/include

MODEL_RUNNER, METRICS, ABOUT = "gapa_model.py", "gapa_metrics.py", "gapa.json"
_LONGEST_LABEL = 63  # of a name of Kubernetes


@dataclass(frozen=True)
class _Made:
    """What texts of a folder speak of."""

    name: str  #: of the model, as the server knows it
    label: str  #: the same for Kubernetes
    file: ConvertedFile
    library: str


@dataclass(frozen=True)
class _Layout:
    """Where things lie in the folder of a stack."""

    url: str  #: where the server listens; "" for no server
    requirements: tuple[str, ...] = ()  #: packages to install
    home: str = ""  #: of model, library and code, in the folder; {name} is the model's
    code: tuple[str, ...] = ()  #: of clients/, copied beside the model
    texts: tuple[str, ...] = ("README.md",)  #: of clients/<stack>/, filled in
    made: Mapping[str, Callable[[_Made], str]] = field(
        default_factory=dict
    )  #: settings that list inputs and outputs


def contents(file: ConvertedFile, beside: Path, stack: str) -> list[File]:
    """All files of the folder; a UserError that says what a stack cannot take."""
    layout = _LAYOUTS[stack]
    library = library_file()
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", file.path.name.split(".")[0]).strip("-") or "model"
    label = re.sub(r"^[^a-z]+", "", name.lower().replace("_", "-"))[:_LONGEST_LABEL].strip("-") or "model"
    made = _Made(name, label, file, library.name)
    home = PurePosixPath(layout.home.format(name=name))
    files = [File(str(home / one.name), one.what, one.source) for one in (*model_files(file), library)]
    files += [_copied(home, _CLIENTS / code) for code in layout.code]
    files += [_filled(text, (_CLIENTS / stack / text).read_text("utf-8"), made) for text in layout.texts]
    files += [_named(path.format(name=name), text(made)) for path, text in layout.made.items()]
    files += _server(layout, home, made) if layout.url else _program(made)
    return files


# ----------------------------------------------------------------------- what servers share


def _server(layout: _Layout, home: PurePosixPath, made: _Made) -> Iterator[File]:
    about = {"name": made.name, "model": made.file.path.name, "library": made.library}
    asked = {"url": layout.url, "name": made.name, "inputs": _described(_ports(made.file.ports))}
    yield _copied(home, _CLIENTS / "serving" / MODEL_RUNNER)
    yield File(str(home / METRICS), _WHAT[METRICS], Path(metrics.__file__))
    yield File(str(home / ABOUT), _WHAT[ABOUT], _json(about))
    yield _copied(PurePosixPath(), _CLIENTS / "serving" / "client.py")
    yield _named("client.json", _json(asked))
    if layout.requirements:
        wanted = [*layout.requirements, "onnxruntime>=1.17", "numpy"]
        yield File(str(home / "requirements.txt"), _WHAT["requirements.txt"], "\n".join(wanted) + "\n")


def _ports(ports: tuple[Port, ...]) -> tuple[Port, ...]:
    """The ports that the protocol can carry; a UserError where an input is none of them."""
    for port in ports:
        if port.datatype is None and not port.is_output:
            raise UserError(
                f"the input {port.name!r} has a type that servers do not take",
                "export the model with inputs of floats, whole numbers, truth values or text",
            )
    return tuple(port for port in ports if port.datatype is not None)


def _described(ports: tuple[Port, ...], outputs: bool = False) -> list[dict[str, Any]]:
    return [
        {"name": port.name, "datatype": port.datatype, "shape": list(port.shape or ())}
        for port in ports
        if port.is_output is outputs
    ]


def _copied(home: PurePosixPath, source: Path) -> File:
    return File(str(home / source.name), _WHAT[source.name], source)


def _named(name: str, source: str) -> File:
    return File(name, _WHAT[PurePosixPath(name).name], source)


def _filled(name: str, template: str, made: _Made) -> File:
    return _named(
        name,
        template.format(
            name=made.name,
            label=made.label,
            version=__version__,
            source=made.file.record.source.file or "a model in memory",
            model=shlex.quote(made.file.path.name),
            library=made.library,
            platform=f"{platform.system()} on {platform.machine()}",
            examples=" ".join(f"input{place}.npy" for place, _ in enumerate(_inputs(made.file))),
        ),
    )


def _json(plain: Mapping[str, Any]) -> str:
    return json.dumps(plain, indent=4) + "\n"


# ----------------------------------------------------------------------------- MLServer


def _mlserver_model(made: _Made) -> str:
    ports = _ports(made.file.ports)
    return _json(
        {
            "name": made.name,
            "implementation": "served.Served",
            "platform": "onnxruntime_onnx",
            "inputs": _described(ports),
            "outputs": _described(ports, outputs=True),
        }
    )


def _mlserver_settings(made: _Made) -> str:
    # one process: onnxruntime has threads of its own, and metrics are where the model is
    return _json(
        {"debug": False, "http_port": 8080, "grpc_port": 8081, "metrics_port": 8082, "parallel_workers": 0}
    )


# ------------------------------------------------------------------------------- Triton


def _triton(made: _Made, backend: str) -> str:
    """config.pbtxt: shapes are whole, batches are answered as they come."""
    lines = [f'name: "{made.name}"', f'backend: "{backend}"', "max_batch_size: 0"]
    for port in _ports(made.file.ports):
        if port.shape is None:
            raise UserError(
                f"the rank of {port.name!r} is not known, and Triton asks for the shape of each tensor",
                "export the model with shapes, or choose another server",
            )
        dims = ", ".join(map(str, port.shape)) or "1"
        kind = "output" if port.is_output else "input"
        scalar = "" if port.shape else " reshape: { shape: [ ] }"
        datatype = "STRING" if port.datatype == "BYTES" else port.datatype
        name = json.dumps(port.name, ensure_ascii=False)  # the escapes of protobuf's texts are JSON's
        lines.append(f"{kind} [ {{ name: {name} data_type: TYPE_{datatype} dims: [ {dims} ]{scalar} }} ]")
    if backend == "onnxruntime":
        lines += [
            f"default_model_filename: {json.dumps(made.file.path.name)}",
            f'model_operations {{ op_library_filename: "models/{made.name}/1/{made.library}" }}',
        ]
    lines.append("instance_group [ { kind: KIND_CPU } ]")
    return "\n".join(lines) + "\n"


# ---------------------------------------------------------------------------------- C++


def _inputs(file: ConvertedFile) -> list[Port]:
    return [port for port in file.ports if not port.is_output]


def _program(made: _Made) -> Iterator[File]:
    """The example program, and an input of each kind to try it with."""
    for name in ("run.cc", "npy.cc", "npy.h"):
        yield _copied(PurePosixPath(), _NATIVE / "examples" / name)
    yield _copied(PurePosixPath("include/gapa"), _NATIVE / "include" / "gapa" / "ort_abi.h")
    yield File("CMakeLists.txt", _WHAT["CMakeLists.txt"], _CLIENTS / "cpp" / "CMakeLists.txt")
    for place, port in enumerate(_inputs(made.file)):
        if port.datatype not in ("FP32", "FP64"):
            raise UserError(
                f"the input {port.name!r} is neither float32 nor float64, which the C++ example feeds alone",
                "choose another stack, or write the program from runtime/examples",
            )
        shape = [max(size, 1) for size in port.shape or ()]
        content = io.BytesIO()
        np.save(content, np.random.default_rng(place).normal(size=shape).astype(np.float32))
        yield File(f"input{place}.npy", f"a made-up {port.name}", content.getvalue())


_WHAT = {
    ABOUT: "which files the model consists of",
    MODEL_RUNNER: "runs the model: arrays in, arrays out",
    METRICS: "score, p-value and flags as metrics, where prometheus_client or OpenTelemetry is",
    "README.md": "how to use this folder",
    "client.json": "what the client asks, and where",
    "client.py": "an example: asks the server and shows what it says",
    "requirements.txt": "what to install",
    "served.py": "the model as a runtime of MLServer",
    "model-settings.json": "what MLServer reads of the model",
    "settings.json": "what MLServer reads of itself",
    "Dockerfile": "an image that serves the model",
    "inferenceservice.yaml": "what KServe is told",
    "model.py": "the model for Triton's Python backend",
    "config.pbtxt": "what Triton reads: the onnxruntime backend, with the native library",
    "python.pbtxt": "the same for the Python backend",
    "app.py": "the application",
    "serve_config.yaml": "what Ray Serve is told",
    "service.py": "the service",
    "bentofile.yaml": "what a Bento is built from",
    "run.cc": "the program: runs the model and prints how far to trust it",
    "npy.cc": "reads .npy files",
    "npy.h": "the same, declared",
    "ort_abi.h": "onnxruntime's C interface, as far as it is used",
    "CMakeLists.txt": "builds the program",
}

_MLSERVER = ("mlserver/served.py",)
_LAYOUTS: Mapping[str, _Layout] = MappingProxyType(
    {
        "triton": _Layout(
            "http://127.0.0.1:8000",
            home="models/{name}/1",
            code=("triton/model.py",),
            made={
                "models/{name}/config.pbtxt": lambda made: _triton(made, "onnxruntime"),
                "models/{name}/configs/python.pbtxt": lambda made: _triton(made, "python"),
            },
        ),
        "kserve": _Layout(
            "http://127.0.0.1:8080",
            ("mlserver>=1.6",),
            home="model",
            code=_MLSERVER,
            texts=("README.md", "Dockerfile", "inferenceservice.yaml"),
            made={"model/model-settings.json": _mlserver_model, "model/settings.json": _mlserver_settings},
        ),
        "mlserver": _Layout(
            "http://127.0.0.1:8080",
            ("mlserver>=1.6",),
            code=_MLSERVER,
            made={"model-settings.json": _mlserver_model, "settings.json": _mlserver_settings},
        ),
        "ray": _Layout(
            "http://127.0.0.1:8000",
            ("ray[serve]>=2.10",),
            code=("ray/app.py",),
            texts=("README.md", "serve_config.yaml"),
        ),
        "bentoml": _Layout(
            "http://127.0.0.1:3000",
            ("bentoml>=1.4",),
            code=("bentoml/service.py",),
            texts=("README.md", "bentofile.yaml"),
        ),
        "cpp": _Layout(""),
    }
)

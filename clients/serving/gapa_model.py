"""A model with uncertainty for servers: arrays by name in, arrays by name out.

`Model.infer` speaks the JSON of the open inference protocol (V2), so that every server that is given this file answers
the same requests. JSON has no NaN: null stands for it, both ways, and for an infinity in answers. Needs onnxruntime and numpy.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

try:  # with prometheus_client or opentelemetry-api installed
    from gapa_metrics import Metrics
except ImportError:
    Metrics = None

#: onnxruntime's name of a type -> the protocol's and numpy's.
TYPES = {
    "float": ("FP32", np.float32),
    "double": ("FP64", np.float64),
    "float16": ("FP16", np.float16),
    "bool": ("BOOL", np.bool_),
    "string": ("BYTES", np.object_),
    **{f"{sign}int{bits}": (f"{sign}int{bits}".upper(), np.dtype(f"{sign}int{bits}").type)
       for sign in ("", "u") for bits in (8, 16, 32, 64)},
}  # fmt: skip
QUIET = ort.RunOptions()
QUIET.log_severity_level = 4  # what is wrong with a request is told to whoever made it


class BadRequest(ValueError):
    """What a client has to change, in a sentence."""


@dataclass(frozen=True)
class Port:
    """An input or output."""

    name: str
    datatype: str  #: of the protocol
    dtype: Any
    shape: tuple[int, ...]  #: -1 for what is free

    def described(self) -> dict[str, Any]:
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


class Model:
    """The model of a folder, with the native library where it loads. May be asked by many threads at once."""

    def __init__(self, folder: str | Path):
        about = json.loads(Path(folder, "gapa.json").read_text(encoding="utf-8"))
        self.name: str = about["name"]
        options = ort.SessionOptions()
        if about["library"]:
            options.register_custom_ops_library(str(Path(folder, about["library"]).absolute()))
        self.session = ort.InferenceSession(
            str(Path(folder, about["model"])), options, providers=["CPUExecutionProvider"]
        )
        self.inputs = {value.name: _port(value) for value in self.session.get_inputs()}
        served = [value for value in self.session.get_outputs() if value.type.startswith("tensor(")]
        self.outputs = {value.name: _port(value) for value in served}
        record = self.session.get_modelmeta().custom_metadata_map.get("gapa_onnx")
        self.metrics = None if Metrics is None or record is None else Metrics(self.name, json.loads(record))

    def run(self, arrays: Mapping[str, Any], names: Sequence[str] | None = None) -> dict[str, Any]:
        """The named outputs, all unless named. Arrays must have the types of the inputs: nothing is rounded."""
        self._require(arrays, names)
        asked = list(self.outputs if names is None else names)
        watched = [] if self.metrics is None else [n for n in self.metrics.outputs if n not in asked]
        try:
            found = self.session.run([*asked, *watched], dict(arrays), QUIET)
        except Exception as error:  # onnxruntime has no common base class for its errors
            raise BadRequest(f"the model does not take this: {str(error).strip().splitlines()[0]}") from None
        answers = dict(zip([*asked, *watched], found))
        if self.metrics is not None:
            self.metrics.observe(answers)
        return {name: answers[name] for name in asked}

    def infer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a request in the words of the protocol; BadRequest says what is wrong with one."""
        if not isinstance(request, Mapping) or not isinstance(request.get("inputs"), list):
            raise BadRequest('a request is {"inputs": [{"name", "datatype", "shape", "data"}, …]}')
        given = dict(self._decoded(entry) for entry in request["inputs"])
        try:
            names = [entry["name"] for entry in request.get("outputs") or []]
        except (TypeError, KeyError):
            raise BadRequest('outputs are asked for as [{"name": …}, …]') from None
        answers = self.run(given, names or None)
        answer = {"model_name": self.name, "outputs": [_encoded(*pair) for pair in answers.items()]}
        return answer if request.get("id") is None else {**answer, "id": request["id"]}

    def metadata(self) -> dict[str, Any]:
        """What the model takes and gives, in the words of the protocol."""
        sides = {"inputs": self.inputs, "outputs": self.outputs}
        told = {side: [port.described() for port in ports.values()] for side, ports in sides.items()}
        return {"name": self.name, "platform": "onnxruntime_onnx", **told}

    def _require(self, arrays: Mapping[str, Any], names: Sequence[str] | None) -> None:
        for name in self.inputs.keys() - arrays.keys():
            raise BadRequest(f"the input {name!r} is missing")
        for name, array in arrays.items():
            port = self._input(name)
            if array.dtype.type is not port.dtype:
                raise BadRequest(f"the input {name!r} is {array.dtype}; the model takes {port.datatype}")
            if len(array.shape) != len(port.shape) or any(
                wanted not in (-1, size) for wanted, size in zip(port.shape, array.shape)
            ):
                raise BadRequest(
                    f"the input {name!r} has the shape {list(array.shape)}; the model takes {list(port.shape)}"
                )
        for name in names or ():
            if not isinstance(name, str) or name not in self.outputs:
                raise BadRequest(f"there is no output {name!r}, but {', '.join(self.outputs)}")

    def _input(self, name: Any) -> Port:
        if not isinstance(name, str) or name not in self.inputs:
            raise BadRequest(f"there is no input {name!r}, but {', '.join(self.inputs)}")
        return self.inputs[name]

    def _decoded(self, entry: Any) -> tuple[str, Any]:
        """An input of a request as its name and an array."""
        if not isinstance(entry, Mapping) or entry.keys() < {"name", "datatype", "shape", "data"}:
            raise BadRequest("an input has a name, a datatype, a shape and data")
        port = self._input(entry["name"])
        if entry["datatype"] != port.datatype:
            raise BadRequest(
                f"the input {port.name!r} is {entry['datatype']}; the model takes {port.datatype}"
            )
        try:
            shape = [operator.index(size) for size in entry["shape"]]
            if port.dtype is np.object_:
                array = np.array(entry["data"], np.object_)
            else:
                plain = np.array(entry["data"])
                wanted = {"f": "fiuO", "b": "b"}.get(np.dtype(port.dtype).kind, "iu")
                if plain.size and plain.dtype.kind not in wanted:
                    raise ValueError(f"{plain.dtype} in place of {port.datatype}")
                array = np.array(entry["data"], port.dtype)
        except (ValueError, TypeError, OverflowError) as error:
            raise BadRequest(f"the data of {port.name!r} cannot be read: {error}") from None
        if min(shape, default=0) < 0 or array.size != math.prod(shape):
            raise BadRequest(f"the input {port.name!r} has {array.size} numbers, which are no {shape}")
        return port.name, array.reshape(shape)


def _port(value: Any) -> Port:
    kind = value.type[len("tensor(") : -1]
    if not value.type.startswith("tensor(") or kind not in TYPES:
        raise ValueError(f"{value.name!r} is a {value.type}, which the protocol does not have")
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return Port(value.name, *TYPES[kind], shape)


def _encoded(name: str, array: Any) -> dict[str, Any]:
    datatype = next(word for word, dtype in TYPES.values() if dtype is array.dtype.type)
    data = array.ravel()
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        data = np.where(np.isfinite(data), data.astype(np.float64), None)
    return {"name": name, "datatype": datatype, "shape": list(array.shape), "data": data.tolist()}

"""Models in memory as sessions of onnxruntime; their weights may be in files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import onnx
import onnxruntime as ort

from gapa_onnx.model.protos import duplicate, is_large
from gapa_onnx.model.weights import MOVED, Writer, beneath, is_outside, place_of, relocated

FOLDER_ENTRY = "session.model_external_initializers_file_folder_path"
FIRST_WITH_FOLDER = (1, 21)  # the first onnxruntime that can be told where a model in memory has its weights


def open_proto(
    model: onnx.ModelProto, options: ort.SessionOptions, providers: Sequence[str] = ("CPUExecutionProvider",)
) -> ort.InferenceSession:
    """A session; raises what onnxruntime does."""
    with tempfile.TemporaryDirectory(prefix="gapa-onnx-") as name:
        scratch = Path(os.path.realpath(name))
        if is_large(model):
            model = _moved_out(model, scratch / "model.weights")
        beside, folder = beneath(model)
        if folder is None:
            return ort.InferenceSession(beside.SerializeToString(), options, providers=list(providers))
        if tuple(map(int, ort.__version__.split(".")[:2])) >= FIRST_WITH_FOLDER:
            options.add_session_config_entry(FOLDER_ENTRY, str(folder))
            return ort.InferenceSession(beside.SerializeToString(), options, providers=list(providers))
        path = scratch / "model.onnx"
        path.write_bytes(_linked(model, scratch).SerializeToString())
        return ort.InferenceSession(str(path), options, providers=list(providers))


def _moved_out(model: onnx.ModelProto, path: Path) -> onnx.ModelProto:
    """The model with the weights that are in memory in a file: protobuf cannot serialise so many as one message."""
    with open(path, "wb") as file:
        writer = Writer(file, str(path))
        return duplicate(model, lambda tensor: tensor if is_outside(tensor) else writer.put(tensor, MOVED))


def _linked(model: onnx.ModelProto, scratch: Path) -> onnx.ModelProto:
    """The model with links to its files beside it, which an onnxruntime of that age follows."""
    files = dict.fromkeys(place_of(tensor).file for tensor in model.graph.initializer if is_outside(tensor))
    names = {file: f"{number}.weights" for number, file in enumerate(files)}
    for file, name in names.items():
        os.symlink(file, scratch / name)
    return relocated(model, names)

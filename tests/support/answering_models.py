"""Small converted files whose answers are written into their input: every output is a slice of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from gapa_onnx.record import FORMAT

_TYPES = {"b": TensorProto.BOOL, "i": TensorProto.INT64, "f": TensorProto.FLOAT}
KEY = "gapa_onnx"
#: The record of a file that holds nothing yet, as JSON has it.
EMPTY_RECORD: dict[str, Any] = {
    "format": FORMAT,
    "version": "0",
    "source": {"file": None, "sha256": "", "opset": 17, "producer": ""},
    "settings": {},
    "data": {"rows": 0, "dropped": 0},
    "sites": [],
    "witnesses": [],
    "heads": {},
    "cuts": [],
}
#: What a head says of its score besides the threshold.
_SCORE = {
    "kind": "epistemic",
    "rows": 0,
    "source": "by hand",
    "holds": "approximately",
    "ranked": "y_score",
    "quantiles": {},
    **{name: f"y/score/{name}" for name in ("ordinary", "largest", "count", "level")},
}


@dataclass(frozen=True)
class Answering:
    """A converted file and the input that makes it give the wanted answers."""

    path: Path
    data: dict[str, np.ndarray]


def answering(
    path: Path,
    answers: Mapping[str, np.ndarray],
    head: Mapping[str, Any],
    *,
    output: str = "y",
    inputs: Mapping[str, np.ndarray] | None = None,
    batch: int | str = "n",
) -> Answering:
    """Write a model that gives `answers` (name -> (n, …)), with a head that names them by role.

    `head` is completed, and its score too: a role `probs` is the output `y_probs`. `inputs` are further inputs, unused.
    """
    nodes, initializers, outputs, start = [], [], [], 0
    for name, values in answers.items():
        size = math.prod(values.shape[1:])
        constants = {"from": [start], "to": [start + size], "axis": [1], "shape": [-1, *values.shape[1:]]}
        for key, value in constants.items():
            initializers.append(numpy_helper.from_array(np.array(value, np.int64), f"{name}/{key}"))
        kind = _TYPES[values.dtype.kind]
        nodes += [
            helper.make_node(
                "Slice", ["x", *(f"{name}/{k}" for k in ("from", "to", "axis"))], [f"{name}/cut"]
            ),
            helper.make_node("Reshape", [f"{name}/cut", f"{name}/shape"], [f"{name}/shaped"]),
            helper.make_node("Cast", [f"{name}/shaped"], [name], to=kind),
        ]
        outputs.append(helper.make_tensor_value_info(name, kind, [batch, *values.shape[1:]]))
        start += size
    ports = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, start])]
    for name, values in (inputs or {}).items():
        ports.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [batch, *values.shape[1:]]))
    graph = helper.make_graph(nodes, "answers", ports, outputs, initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    roles = {name.removeprefix(f"{output}_"): name for name in answers if name != output}
    whole = {
        "logits": output,
        "link": "identity",
        "axis": None,
        "reason": "by hand",
        "outputs": roles,
        **head,
    }
    if "score" in whole:
        whole["scores"] = {"score": {**_SCORE, **whole.pop("score")}}
    write_record(model, {**EMPTY_RECORD, "heads": {output: whole}})
    onnx.save(model, path)
    rows = len(next(iter(answers.values())))
    flat = np.concatenate([v.reshape(rows, -1).astype(np.float32) for v in answers.values()], axis=1)
    return Answering(path, {"x": flat, **(inputs or {})})


def write_record(model: onnx.ModelProto, record: Mapping[str, Any]) -> None:
    """The record of a converted file."""
    del model.metadata_props[:]
    entry = model.metadata_props.add()
    entry.key, entry.value = KEY, json.dumps(record)

"""What a converted file says about itself, as JSON in its metadata_props.

{"version", "source": {"file", "sha256", "opset"}, "settings": {…}, "data": {…},
 "sites": [{"name", "query", "output", "activation", "layout", "width", "points", "k",
            "length_scale", "scale", "jitter", "index", "recall", "share_quantiles", …}],
 "cuts": [{"node", "operator", "reason"}], "outputs": {"logits": "logits_var"},
 "heads": {"logits": {"task", "logits", "link", "axis", "reason", "bridge", "points": {"kind", "count"},
                      "outputs": {"var": "logits_var", "probs": "logits_probs", …},
                      "score": {"kind", "quantile", "threshold", "rows", "from", "quantiles"},
                      "noise": {"rows", "nll", "constant_nll"}}}}

Kinds of points are latin, grid and samples (`heads.points`).
"""

from __future__ import annotations

import json
from typing import Any

import onnx

METADATA_KEY = "gapa_onnx"


def write(proto: onnx.ModelProto, record: dict[str, Any]) -> None:
    """Put the record into a model, in place of the one that it may have."""
    entries = [entry for entry in proto.metadata_props if entry.key == METADATA_KEY]
    entry = entries[0] if entries else proto.metadata_props.add(key=METADATA_KEY)
    entry.value = json.dumps(record, sort_keys=True, ensure_ascii=False, allow_nan=False)


def read(proto: onnx.ModelProto) -> dict[str, Any] | None:
    """The record of a converted file, None for any other model."""
    for entry in proto.metadata_props:
        if entry.key == METADATA_KEY:
            return json.loads(entry.value)
    return None

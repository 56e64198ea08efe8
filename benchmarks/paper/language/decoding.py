"""Feeding a decoder of any of the exports: a text at once, then token by token with the keys and values of the past."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gapa_onnx.data.spec import TokenLimits
from gapa_onnx.data.token_inputs import token_inputs
from gapa_onnx.model.load import load

PAST, PRESENT = "past_key_values.", "present."


def prefill(model: Path, ids: np.ndarray) -> dict[str, np.ndarray]:
    """What a model takes for tokens (n, t) without a past."""
    inputs = load(model).inputs
    filled = token_inputs(inputs, "the text", TokenLimits())
    arrays = filled.arrays(ids, np.full(len(ids), ids.shape[1]))
    return {spec.name: np.ascontiguousarray(arrays[spec.name], spec.dtype) for spec in inputs}


def step(
    before: Mapping[str, np.ndarray], answers: Mapping[str, np.ndarray], ids: np.ndarray
) -> dict[str, np.ndarray]:
    """What it takes for the next tokens (n, 1) after what was fed before and its answers."""
    feeds = dict(before)
    kind = before["attention_mask"].dtype
    feeds["attention_mask"] = np.ones((len(ids), before["attention_mask"].shape[1] + 1), kind)
    if not any(name.startswith(PAST) for name in before):
        feeds["input_ids"] = np.concatenate([before["input_ids"], ids], axis=1)
        return feeds
    feeds["input_ids"] = ids.astype(before["input_ids"].dtype)
    if "position_ids" in before:
        feeds["position_ids"] = np.full(
            ids.shape, feeds["attention_mask"].shape[1] - 1, before["position_ids"].dtype
        )
    for name in before:
        if name.startswith(PAST):
            feeds[name] = answers[name.replace(PAST, PRESENT, 1)]
    return feeds


def answered(session: Any, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All outputs by name."""
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))

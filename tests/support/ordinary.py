"""The ordinary scores that a converted file ranks others by, and p-values by counting them."""

from __future__ import annotations

import numpy as np
import onnx

from gapa_onnx.record import ScoreRecord


def stored(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The initializers of a file by name."""
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


def ordinary_scores(model: onnx.ModelProto, score: ScoreRecord) -> np.ndarray:
    """(n,), in ascending order."""
    held = stored(model)
    return held[score.ordinary].ravel()[: int(held[score.count])]


def counted_p(ordinary: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """(1 + #{ordinary ≥ score}) / (n + 1) by counting, and 0 where a score is not finite; in the scores' own type."""
    flat = scores.reshape(-1)
    at_least = np.array([sum(1 for one in ordinary if one >= score) for score in flat])
    p = np.where(np.isfinite(flat), (1 + at_least) / (len(ordinary) + 1), 0.0)
    return p.astype(scores.dtype).reshape(scores.shape)

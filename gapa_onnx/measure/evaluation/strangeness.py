"""Files with a score and no variance: how well strange inputs are told from usual ones, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.measure.evaluation.answers import Answered
from gapa_onnx.measure.evaluation.rows import (
    VALID,
    Columns,
    Findings,
    flag_column,
    place_scores,
    score_columns,
)


def strangeness_columns(answered: Answered, found: Mapping[str, Array]) -> Columns:
    """The score of each row, and whether it is flagged."""
    scores = score_columns(place_scores(answered, found))
    valid: Array = np.all([np.isfinite(values) for values in scores.values()], axis=0)
    return {**scores, **flag_column(found), VALID: valid}


def strangeness_findings(columns: Columns) -> Findings:
    """Nothing about predictions: they are the source's, and no uncertainty stands beside them."""
    note = (
        "the file has a score only, so labels are not used: predictions are the source's, without error bars"
    )
    return Findings({"source": {}, "gapa": {}}, np.full(len(columns[VALID]), np.nan), notes=(note,))

"""Calibration rows, each run as if it had not been among the data: what thresholds are made of.

A calibration row lies near the inducing points because some of them were made from it, so in the
converted file its variance is smaller than that of a new row of the same kind. Here the share s of each
site is computed without the row's own part in the inducing points (`statistics.leave_one_out_share`) and
fed into the file's graph behind the sites, which then answers as it would for a new row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from gapa_onnx.data import DataSource
from gapa_onnx.fit.calibrate import Calibration, SiteFit
from gapa_onnx.fit.statistics import QUANTILES, quantile
from gapa_onnx.model.splice import extract
from gapa_onnx.op.contract import CLASSES, DOMAIN
from gapa_onnx.sessions.inference import row_count
from gapa_onnx.sessions.runtime import open_session

MOST_ROWS = 2000  # for a score's quantiles: 0.95 is then known to about half a percent
MOST_QUERIES = 20_000  # of all sites together, each a solve of K x K
FEWEST_ROWS = 32  # where a row has very many queries
VALUES_PER_ROW = 256  # kept where a row has a score per pixel or token

Batch = dict[str, np.ndarray]


def left_out(
    model: onnx.ModelProto,
    calibration: Calibration,
    data: DataSource,
    wanted: Sequence[str],
    *,
    among: np.ndarray | None = None,
    most: int = MOST_ROWS,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> Iterator[tuple[np.ndarray, Batch]]:
    """Some calibration rows: their positions in the data, and tensors of the converted model for them.

    Rows are chosen at random, fewer than `most` where each has many queries, and only `among` the positions
    given. `wanted` are names of tensors behind, or beside, the sites.
    """
    for positions, (answers,) in left_out_by_scale(
        model, calibration, data, wanted, (1.0,), among=among, most=most, seed=seed, progress=progress
    ):
        yield positions, answers


def left_out_by_scale(
    model: onnx.ModelProto,
    calibration: Calibration,
    data: DataSource,
    wanted: Sequence[str],
    factors: Sequence[float] | np.ndarray,
    *,
    among: np.ndarray | None = None,
    most: int = MOST_ROWS,
    seed: int = 0,
    progress: Callable[[str, float], None] = lambda text, done: None,
) -> Iterator[tuple[np.ndarray, list[Batch]]]:
    """As `left_out`, with the tensors as they would be if τ of every site were multiplied by each factor.

    Factors (f,) are the same for all sites, factors (f, sites) have one for each; 0 makes a site certain.
    What a site's variance would be, another share s would make of it with the τ that is there.
    """
    fits = {share_name(fit): fit for fit in calibration.fits}
    by_site = np.reshape(factors, (len(factors), -1)) * np.ones(len(fits))  # (f, sites)
    sites = [(node, fits[node.output[0]]) for node in site_nodes(model)]
    queries = list(dict.fromkeys(node.input[0] for node, _ in sites))
    shares = [
        onnx.helper.make_tensor_value_info(node.output[0], onnx.TensorProto.FLOAT, None) for node, _ in sites
    ]
    before = open_session(extract(model, queries), "the model")
    behind = open_session(extract(model, list(wanted), shares), "the converted model")
    read = {value.name for value in behind.get_inputs()}
    chosen = _choose(calibration, among, most, seed)
    done = 0
    for positions, batch in _chosen_rows(data, calibration.batch_rows, chosen):
        at = dict(zip(queries, before.run(queries, batch)))
        found = {node.output[0]: _share(fit, at[node.input[0]]) for node, fit in sites}
        answers = []
        for row in by_site:
            factor = dict(zip(fits, row))
            moved = {name: _scaled(fits[name], share, factor[name]) for name, share in found.items()}
            fed = {**batch, **moved}
            fed = {name: array for name, array in fed.items() if name in read}
            answers.append(dict(zip(wanted, behind.run(list(wanted), fed))))
        yield positions, answers
        done += len(positions)
        progress("leaving rows out", min(1.0, done / len(chosen)))


def _scaled(fit: SiteFit, share: np.ndarray, factor: float) -> np.ndarray:
    """The shares that give, by this fit, the variance of the fit with τ times the factor; unchanged for 1."""
    if factor == 1:
        return share
    other = replace(fit, scale=fit.scale * factor)
    return fit.share_for(other.own_share(share.astype(np.float64))).astype(np.float32)


def share_name(fit: SiteFit) -> str:
    """The tensor of a converted model that holds s of a site."""
    return f"{fit.site.prefix}/share"


def site_nodes(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The operators of a converted model that stand at its sites, in order."""
    return [node for node in model.graph.node if node.domain == DOMAIN and node.op_type != CLASSES.name]


def _choose(calibration: Calibration, among: np.ndarray | None, most: int, seed: int) -> np.ndarray:
    """Positions of the rows to run, ascending."""
    rows = np.arange(calibration.rows) if among is None else among
    per_row = sum(fit.rows for fit in calibration.fits) / calibration.rows
    count = min(most, max(FEWEST_ROWS, int(MOST_QUERIES * most / MOST_ROWS / max(per_row, 1e-9))))
    if len(rows) <= count:
        return rows
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))


def _chosen_rows(data: DataSource, batch_rows: int, chosen: np.ndarray) -> Iterator[tuple[np.ndarray, Batch]]:
    """Batches of the chosen rows, as large as they may be; whole ones where the model fixes their size."""
    fixed = any(spec.shape and isinstance(spec.shape[0], int) for spec in data.inputs)
    start, held, shapes = 0, [], None
    for batch in data.batches(batch_rows):
        rows = row_count(batch)
        inside = chosen[(chosen >= start) & (chosen < start + rows)] - start
        if len(inside) and fixed:
            yield start + np.arange(rows), batch
        elif len(inside):
            # Rows of another shape, and what is not given by rows, cannot be put together.
            by_row = {name: array.shape[:1] == (rows,) for name, array in batch.items()}
            before, shapes = shapes, None
            if all(by_row.values()):
                shapes = {name: array.shape[1:] for name, array in batch.items()}
            full = sum(len(positions) for positions, _ in held) + len(inside) > batch_rows
            if held and (full or shapes is None or shapes != before):
                yield _joined(held)
                held = []
            part = {name: array[inside] if by_row[name] else array for name, array in batch.items()}
            held.append((start + inside, part))
        start += rows
    if held:
        yield _joined(held)


def _joined(parts: Sequence[tuple[np.ndarray, Batch]]) -> tuple[np.ndarray, Batch]:
    if len(parts) == 1:
        return parts[0]
    positions, batches = zip(*parts)
    batch = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return np.concatenate(positions), batch


def _share(fit: SiteFit, query: np.ndarray) -> np.ndarray:
    """Leave-one-out shares in the shape of the operator's answer: (…, d) -> (…, 1)."""
    rows = query.reshape(-1, query.shape[-1])
    return fit.leave_one_out(rows).astype(np.float32).reshape(*query.shape[:-1], 1)


class ScoreSample:
    """Scores of left-out rows, some of each row where it has many."""

    def __init__(self, seed: int = 0):
        self._generator = np.random.default_rng(seed)
        self._kept: list[np.ndarray] = []

    def add(self, scores: np.ndarray) -> None:
        """Take in scores (rows, …)."""
        flat = scores.reshape(len(scores), -1) if scores.ndim else scores.reshape(1, 1)
        if flat.shape[1] > VALUES_PER_ROW:
            flat = flat[:, self._generator.choice(flat.shape[1], VALUES_PER_ROW, replace=False)]
        self._kept.append(flat[np.isfinite(flat)].astype(np.float64))

    @property
    def values(self) -> np.ndarray:
        return np.concatenate(self._kept) if self._kept else np.empty(0)

    def table(self) -> dict[str, float]:
        """The score at each of the `QUANTILES`, by name ("0.95")."""
        values = self.values
        return {str(q): quantile(values, q) for q in QUANTILES}


def threshold_at(quantiles: Mapping[str, float], wanted: float) -> float:
    """The score at a quantile, between two of the table by linear interpolation, beyond it at its end."""
    levels = sorted((float(name), value) for name, value in quantiles.items())
    return float(np.interp(wanted, *zip(*levels)))

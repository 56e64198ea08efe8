"""Scores, p-values and flags as metrics of Prometheus and OpenTelemetry, by the same names.

    gapa_score    histogram   how strange a row is; its buckets end at the quantiles of ordinary rows
    gapa_pvalue   histogram   the share of ordinary rows that are as strange or stranger
    gapa_rows     counter     rows that were answered; Prometheus shows it as gapa_rows_total
    gapa_flags    counter     those among them that were flagged

Labels are the model and the output. Of images and texts whose positions have scores only those of the whole are counted.
Packages hold a copy of this module beside their model, so it imports nothing of this package; what is not installed of
prometheus_client and opentelemetry-api is not written to.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

PORT_VARIABLE = (
    "GAPA_ONNX_METRICS_PORT"  #: serves Prometheus's metrics there, where the server does not by itself
)
LABELS = ("model", "output")
SCORE, P_VALUE, ROWS, FLAGS = "gapa_score", "gapa_pvalue", "gapa_rows", "gapa_flags"
WHAT = {
    SCORE: "How strange a row is",
    P_VALUE: "Share of ordinary rows that are as strange or stranger",
    ROWS: "Rows that were answered",
    FLAGS: "Rows that were flagged as strange",
}
P_VALUE_ENDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
_WHOLE = ("image_", "seq_", "")  # a row's own score, in the order in which one is looked for

_lock = threading.Lock()
_prometheus: dict[Any, dict[str, Any]] = {}  # of a registry: its metrics, which models share


@dataclass(frozen=True)
class Watched:
    """The graph outputs that say how strange a row is; None for what a file does not have."""

    output: str  #: of the source, that they are about
    score: str
    pvalue: str | None
    flag: str | None
    ends: tuple[float, ...]  #: of the score's buckets


class Metrics:
    """The metrics of one model.

    Args:
        model: its name, a label.
        record: what its file says about itself, as JSON has it: the metadata entry `gapa_onnx`.
        registry: of prometheus_client; its own unless given.
    """

    def __init__(self, model: str, record: Mapping[str, Any], registry: Any = None):
        self.model = model
        self.watched = watched(record)
        self._sinks = [
            sink for sink in (_of_prometheus(self.watched, registry), _of_telemetry(self.watched)) if sink
        ]

    @property
    def outputs(self) -> tuple[str, ...]:
        """The graph outputs that `observe` wants; none where nothing would be written."""
        names = [name for one in self.watched for name in (one.score, one.pvalue, one.flag) if name]
        return tuple(names) if self._sinks else ()

    def observe(self, answers: Mapping[str, Any]) -> None:
        """Count the rows of a batch, given by the names of `outputs`."""
        for one in self.watched if self._sinks else ():
            score = np.ravel(answers[one.score])
            rows, score = len(score), score[np.isfinite(score)]  # of a NaN no sum would recover
            rare = np.ravel(answers[one.pvalue]).astype(np.float64) if one.pvalue else np.empty(0)
            rare = np.round(rare, 6)  # else float32's .05 lies beyond the bucket that ends at .05
            flagged = int(np.count_nonzero(answers[one.flag])) if one.flag else 0
            for sink in self._sinks:
                sink({"model": self.model, "output": one.output}, rows, score, rare, flagged)


def watched(record: Mapping[str, Any]) -> tuple[Watched, ...]:
    """The scores of a record, one of each output: of the row as a whole where it has one."""
    found = []
    for output, head in record["heads"].items():
        names = head["outputs"]
        whose = next((prefix for prefix in _WHOLE if f"{prefix}score" in names), None)
        if whose is None:
            continue
        quantiles = head.get("scores", {}).get(f"{whose}score", {}).get("quantiles", {})
        pvalue, flag = names.get(f"{whose}pvalue"), names.get(f"{whose}ood")
        found.append(Watched(output, names[f"{whose}score"], pvalue, flag, _ends(quantiles.values())))
    return tuple(found)


def _ends(quantiles: Iterable[float]) -> tuple[float, ...]:
    """Ends of buckets: the quantiles of ordinary rows, and as far again beyond the last."""
    ends = sorted({float(value) for value in quantiles if np.isfinite(value)})
    if not ends:
        return (0.0, 1.0)
    wide = (ends[-1] - ends[0]) or abs(ends[-1]) or 1.0
    return (*ends, ends[-1] + wide, ends[-1] + 4 * wide)


def _of_prometheus(all_watched: Sequence[Watched], registry: Any) -> Any:
    """What writes a batch to Prometheus; None without prometheus_client, or with nothing to write."""
    try:
        import prometheus_client  # here: servers with several processes say only now where they meet
    except ImportError:
        return None
    if not all_watched:
        return None
    registry = prometheus_client.REGISTRY if registry is None else registry
    with _lock:
        metrics = _prometheus.get(registry)
        if metrics is None:
            ends = {SCORE: sorted({end for one in all_watched for end in one.ends}), P_VALUE: P_VALUE_ENDS}
            metrics = _prometheus[registry] = {
                name: prometheus_client.Histogram(
                    name, WHAT[name], LABELS, buckets=ends[name], registry=registry
                )
                for name in (SCORE, P_VALUE)
            } | {
                name: prometheus_client.Counter(name, WHAT[name], LABELS, registry=registry)
                for name in (ROWS, FLAGS)
            }
            if os.environ.get(PORT_VARIABLE):
                prometheus_client.start_http_server(int(os.environ[PORT_VARIABLE]), registry=registry)

    def write(labels: Mapping[str, str], rows: int, score: Any, rare: Any, flagged: int) -> None:
        for name, values in ((SCORE, score), (P_VALUE, rare)):
            child = metrics[name].labels(**labels)
            for value in values.tolist():
                child.observe(value)
        metrics[ROWS].labels(**labels).inc(rows)
        metrics[FLAGS].labels(**labels).inc(flagged)

    return write


def _of_telemetry(all_watched: Sequence[Watched]) -> Any:
    """What writes a batch to OpenTelemetry; None without its API, or with nothing to write."""
    try:
        from opentelemetry import metrics as telemetry
    except ImportError:
        return None
    if not all_watched:
        return None
    meter = telemetry.get_meter("gapa_onnx")
    advised = {SCORE: sorted({end for one in all_watched for end in one.ends}), P_VALUE: list(P_VALUE_ENDS)}
    try:
        histograms = {
            name: meter.create_histogram(name, "1", WHAT[name], explicit_bucket_boundaries_advisory=ends)
            for name, ends in advised.items()
        }
    except TypeError:  # before release 1.30 buckets are a matter of the SDK's views alone
        histograms = {name: meter.create_histogram(name, "1", WHAT[name]) for name in advised}
    counters = {name: meter.create_counter(name, "1", WHAT[name]) for name in (ROWS, FLAGS)}

    def write(labels: Mapping[str, str], rows: int, score: Any, rare: Any, flagged: int) -> None:
        for name, values in ((SCORE, score), (P_VALUE, rare)):
            for value in values.tolist():
                histograms[name].record(value, dict(labels))
        counters[ROWS].add(rows, dict(labels))
        counters[FLAGS].add(flagged, dict(labels))

    return write

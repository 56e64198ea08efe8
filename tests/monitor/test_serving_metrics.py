"""Metrics of Prometheus and OpenTelemetry hold what a batch said, also where scores are no numbers."""

from __future__ import annotations

import builtins
import json
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gapa_onnx.monitor.metrics import Metrics, watched

RECORD = {
    "heads": {
        "y": {
            "outputs": {"score": "y_score", "pvalue": "y_pvalue", "ood": "y_ood"},
            "scores": {"score": {"quantiles": {"0.5": 1.0, "0.95": 3.0}}},
        },
        "map": {
            "outputs": {"score": "map_score", "image_score": "map_image_score", "image_ood": "map_image_ood"}
        },
        "bare": {"outputs": {"var": "bare_var"}},
    }
}
ANSWERS = {
    "y_score": np.array([0.5, 2.0, 4.0, np.nan], np.float32),
    "y_pvalue": np.array([0.9, 0.2, 0.01, 0.0], np.float32),
    "y_ood": np.array([False, False, True, True]),
    "map_image_score": np.array([1.0, 1.0, 1.0, 1.0], np.float32),
    "map_image_ood": np.zeros(4, np.bool_),
}


def test_a_whole_row_is_what_is_watched(digits_file: Path):
    assert [(one.output, one.score, one.pvalue) for one in watched(RECORD)] == [
        ("y", "y_score", "y_pvalue"),
        ("map", "map_image_score", None),
    ]
    assert watched(RECORD)[0].ends == (1.0, 3.0, 5.0, 11.0)
    session = ort.InferenceSession(str(digits_file), providers=["CPUExecutionProvider"])
    record = json.loads(session.get_modelmeta().custom_metadata_map["gapa_onnx"])
    (one,) = watched(record)
    assert {one.score, one.pvalue, one.flag} <= {value.name for value in session.get_outputs()}


def test_prometheus_shows_what_was_observed():
    registry = CollectorRegistry()
    metrics = Metrics("net", RECORD, registry)
    assert set(metrics.outputs) == set(ANSWERS)
    for _ in range(2):
        metrics.observe(ANSWERS)
    Metrics("other", RECORD, registry).observe(ANSWERS)  # another model of the same process
    labels = {"model": "net", "output": "y"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(name, {**labels, **more})

    assert value("gapa_rows_total") == 8 and value("gapa_flags_total") == 4
    assert value("gapa_score_count") == 6 and value("gapa_score_sum") == 13  # of a NaN no sum would recover
    assert [value("gapa_score_bucket", le=end) for end in ("1.0", "3.0", "5.0", "+Inf")] == [2, 4, 6, 6]
    assert [value("gapa_pvalue_bucket", le=end) for end in ("0.001", "0.01", "0.2", "1.0")] == [2, 4, 6, 8]
    assert value("gapa_rows_total", output="map") == 8 and value("gapa_flags_total", output="map") == 0
    assert value("gapa_rows_total", model="other") == 4
    text = generate_latest(registry).decode()
    assert "# TYPE gapa_score histogram" in text and "# HELP gapa_flags_total Rows that were flagged" in text


def test_telemetry_has_the_same_by_the_same_names(monkeypatch: pytest.MonkeyPatch):
    from opentelemetry import metrics as telemetry
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    monkeypatch.setattr(telemetry, "get_meter", provider.get_meter)
    Metrics("net", RECORD, CollectorRegistry()).observe(ANSWERS)
    (resource,) = reader.get_metrics_data().resource_metrics
    found = {metric.name: metric.data.data_points for metric in resource.scope_metrics[0].metrics}
    assert set(found) == {"gapa_score", "gapa_pvalue", "gapa_rows", "gapa_flags"}
    points = {name: next(p for p in ps if p.attributes["output"] == "y") for name, ps in found.items()}
    assert points["gapa_rows"].value == 4 and points["gapa_flags"].value == 2
    assert points["gapa_score"].explicit_bounds == (0.0, 1.0, 3.0, 5.0, 11.0)  # of both outputs
    assert sum(points["gapa_score"].bucket_counts) == 3 and points["gapa_pvalue"].count == 4
    assert dict(points["gapa_rows"].attributes) == {"model": "net", "output": "y"}


def test_nothing_is_asked_where_nothing_would_be_written(monkeypatch: pytest.MonkeyPatch):
    real = builtins.__import__

    def without(name: str, *args: object, **kwargs: object):
        if name.startswith(("prometheus_client", "opentelemetry")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    metrics = Metrics("net", RECORD)
    assert metrics.outputs == ()
    metrics.observe({})

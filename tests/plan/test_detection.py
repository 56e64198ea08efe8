"""Which outputs are a detector's: every usual form is found by itself, and what only looks like one is not."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support import detectors, shapes_detector
from support.small_models import parse, transformer_block

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.plan.detection import Slab, find_detectors
from gapa_onnx.plan.evidence import read_outputs
from gapa_onnx.plan.head import Task
from gapa_onnx.plan.tasks import find_heads
from gapa_onnx.settings import Settings

CLASSES = 3


def found(model):
    source = load(model)
    return find_detectors(source, read_outputs(source))


def one(model):
    (detector,) = found(model)
    return detector


def tasks(model, spec="auto"):
    source = load(model)
    names = [tensor.name for tensor in source.outputs]
    return {head.output: head for head in find_heads(source, names, spec)}


# ------------------------------------------------------------------------------ found

IN_ONE = {
    "yolo": (1, 4, None),  # axis of the features, first class, place of the object's probability
    "yolov5": (2, 5, 4),
    "yolox": (2, 5, 4),
}


@pytest.mark.parametrize("size", [32, None], ids=["static", "symbolic"])
@pytest.mark.parametrize("form", IN_ONE)
def test_boxes_and_classes_in_one_output(form, size):
    axis, first, objectness = IN_ONE[form]
    detector = one(detectors.FORMS[form](CLASSES, size=size))
    assert detector.boxes == Slab("output0", axis, 0, 4)
    assert detector.classes == Slab("output0", axis, first, CLASSES)
    assert detector.boxes.candidate_axis == 3 - axis
    assert (detector.link, detector.squashed, detector.background) == ("sigmoid", True, None)
    assert (detector.objectness, detector.selected) == (objectness, None)
    assert detector.outputs == ("output0",) and detector.spoken_for == ()


@pytest.mark.parametrize("size", [32, None], ids=["static", "symbolic"])
@pytest.mark.parametrize(
    "form, width, link, background",
    [("ssd", CLASSES + 1, "softmax", 0), ("retina", CLASSES, "sigmoid", None)],
)
def test_probabilities_beside_boxes(form, width, link, background, size):
    detector = one(detectors.FORMS[form](CLASSES, size=size))
    assert detector.boxes == Slab("boxes", 2, 0, 4)
    assert detector.classes == Slab("scores", 2, 0, width)
    assert (detector.link, detector.squashed, detector.background) == (link, True, background)
    assert detector.logits is not None and detector.logits.tensor != "scores"
    assert detector.outputs == ("scores", "boxes") and detector.spoken_for == ("boxes",)


@pytest.mark.parametrize("size", [32, None], ids=["static", "symbolic"])
def test_logits_beside_boxes_are_a_set_predictors(size):
    detector = one(detectors.detr_like(CLASSES, size=size))
    assert detector.boxes == Slab("pred_boxes", 2, 0, 4)
    assert detector.classes == Slab("logits", 2, 0, CLASSES + 1)
    assert (detector.link, detector.squashed, detector.background) == ("softmax", False, CLASSES)


def test_logits_that_focal_loss_has_left_low_are_a_question_each():
    detector = one(detectors.retina_like(CLASSES, squashed=False))
    assert (detector.link, detector.squashed, detector.background) == ("sigmoid", False, None)


def test_a_sigmoid_over_classes_alone_has_no_object_before_them():
    detector = one(detectors.detr_like(CLASSES, joined=True))
    assert detector.classes == Slab("output0", 2, 4, CLASSES) and detector.objectness is None
    assert detector.logits is not None  # the last thing to be put behind the boxes


@pytest.mark.parametrize("size", [32, None], ids=["static", "symbolic"])
def test_what_suppression_selects_from(size):
    detector = one(detectors.suppressed(CLASSES, size=size))
    assert detector.boxes == Slab("all_boxes", 2, 0, 4)
    assert detector.classes == Slab("all_scores", 1, 0, CLASSES)
    assert detector.logits == Slab("cls", 1, 0, CLASSES)
    assert (detector.selected, detector.squashed) == ("selected", True)
    assert detector.outputs == ("kept_boxes", "kept_scores") and detector.spoken_for == ()


@pytest.mark.parametrize("classes", [1, 2])
@pytest.mark.parametrize("form", detectors.FORMS)
def test_one_or_two_classes(form, classes):
    detector = one(detectors.FORMS[form](classes))
    assert detector.classes.count == classes + (detector.background is not None)


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("form", detectors.FORMS)
def test_a_fixed_batch_changes_nothing(form, batch):
    build = detectors.FORMS[form]
    assert found(build(batch=batch)) == found(build())


@pytest.mark.parametrize("form", shapes_detector.FORMS)
def test_fitted_detectors(form):
    detector = one(shapes_detector.model(form))
    assert detector.objectness == (4 if form == "5+C" else None)
    assert detector.classes.count == len(shapes_detector.CLASSES)


def test_features_behind_the_classes_are_left_alone():
    """Keypoints or mask coefficients stand behind the classes of other members of the family."""
    model = parse(
        "net (float[n, 3, 8, 8] x) => (float[n, 12, 64] y) { "
        "b = Conv(x, wb) c = Conv(x, wc) k = Conv(x, wk) s = Sigmoid(c) j = Concat<axis = 1>(b, s, k) "
        "shape = Constant<value_ints = [0, 12, -1]>() y = Reshape(j, shape) }",
        wb=np.ones((4, 3, 1, 1)), wc=np.ones((2, 3, 1, 1)), wk=np.ones((6, 3, 1, 1)),
    )  # fmt: skip
    assert one(model).classes == Slab("y", 1, 4, 2)


# -------------------------------------------------------------------------- not found

WEIGHTS = {
    "w": (8, 9), "w4": (8, 4), "w5": (8, 5), "wide": (8, 300), "seven": (8, 7), "three": (8, 3),
}  # fmt: skip
TOKENS = "float[n, 20, 8] x"
STRANGERS = {
    "a tagger with 4 + C logits": (TOKENS, "float[n, 20, 9] y", "y = MatMul(x, w)"),
    "labels of tokens": (TOKENS, "float[n, 20, 9] y", "l = MatMul(x, w) y = Sigmoid(l)"),
    "classes of tokens": (TOKENS, "float[n, 20, 9] y", "l = MatMul(x, w) y = Softmax<axis = 2>(l)"),
    "keypoints": ("float[n, 17, 8] x", "float[n, 17, 3] keypoints", "keypoints = MatMul(x, three)"),
    "a time series": ("float[n, 10, 8] x", "float[n, 10, 300] y", "y = MatMul(x, wide)"),
    "two taggers": (
        TOKENS, "float[n, 20, 4] ner_probs, float[n, 20, 5] pos_probs",
        "a = MatMul(x, w4) ner_probs = Softmax<axis = 2>(a) b = MatMul(x, w5) pos_probs = Softmax<axis = 2>(b)",
    ),
    "two taggers with labels": (
        TOKENS, "float[n, 20, 4] label_probs, float[n, 20, 5] class_probs",
        "a = MatMul(x, w4) label_probs = Sigmoid(a) b = MatMul(x, w5) class_probs = Sigmoid(b)",
    ),
    "two taggers with logits": (
        TOKENS, "float[n, 20, 4] ner_logits, float[n, 20, 5] pos_logits",
        "ner_logits = MatMul(x, w4) pos_logits = MatMul(x, w5)",
    ),
    "numbers and classes of different things": (
        TOKENS, "float[n, 20, 4] boxes, float[n, 5] scores",
        "boxes = MatMul(x, w4) m = ReduceMean<axes = [1], keepdims = 0>(x) l = MatMul(m, w5) scores = Softmax(l)",
    ),
    "classification with two outputs": (
        "float[n, 8] x", "float[n, 4] kind, float[n, 5] colour",
        "a = MatMul(x, w4) kind = Softmax(a) b = MatMul(x, w5) colour = Softmax(b)",
    ),
    "three numbers before a sigmoid": (
        TOKENS, "float[n, 20, 10] y", "a = MatMul(x, three) b = MatMul(x, seven) s = Sigmoid(b) y = Concat<axis = 2>(a, s)",
    ),
    "fewer candidates than features": (
        "float[n, 5, 8] x", "float[n, 5, 9] y", "a = MatMul(x, w4) b = MatMul(x, w5) s = Sigmoid(b) y = Concat<axis = 2>(a, s)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", STRANGERS)
def test_what_is_no_detector(name):
    signature, outputs, body = STRANGERS[name]
    weights = {key: np.ones(shape) for key, shape in WEIGHTS.items() if f", {key})" in body}
    model = parse(f"net ({signature}) => ({outputs}) {{ {body} }}", **weights)
    onnx.checker.check_model(model)
    assert found(model) == ()
    assert Task.DETECTION not in {head.task for head in tasks(model).values()}


def test_a_segmentation_and_a_transformer_are_no_detectors():
    maps = parse(
        "net (float[n, 3, 8, 8] x) => (float[n, 9, 8, 8] y) { l = Conv(x, w) y = Sigmoid(l) }",
        w=np.ones((9, 3, 1, 1)),
    )
    assert found(maps) == () and found(transformer_block()) == ()


# -------------------------------------------------------------------------- asked for


def test_task_detection_goes_by_sizes():
    text = "net (float[n, 20, 8] x) => (float[n, 20, 9] y) { y = MatMul(x, w) }"
    model = parse(text, w=np.ones((8, 9)))
    detector = tasks(model, "detection")["y"].detector
    assert detector is not None
    assert detector.boxes == Slab("y", 2, 0, 4) and detector.classes == Slab("y", 2, 5, 4)
    assert detector.objectness == 4 and not detector.squashed  # no sigmoid in sight: logits


def test_task_detection_sees_probabilities():
    """Class chances that were multiplied with that of an object."""
    text = (
        "net (float[n, 8, 20] x) => (float[n, 7, 20] y) { b = MatMul(wb, x) c = MatMul(wc, x) o = MatMul(wo, x) "
        "sc = Sigmoid(c) so = Sigmoid(o) s = Mul(sc, so) y = Concat<axis = 1>(b, s) }"
    )
    model = parse(text, wb=np.ones((4, 8)), wc=np.ones((3, 8)), wo=np.ones((1, 8)))
    assert found(model) == ()
    detector = tasks(model, "y=detection")["y"].detector
    assert detector is not None and detector.squashed and detector.objectness is None
    assert detector.classes == Slab("y", 1, 4, 3)


@pytest.mark.parametrize("spec", ["detection", "output0=detection"])
def test_task_detection_leaves_what_is_seen(spec):
    model = detectors.yolox_like()
    assert tasks(model, spec)["output0"].detector == one(model)


@pytest.mark.parametrize("form", ["ssd", "suppressed"])
def test_task_detection_makes_one_head_of_two_outputs(form):
    model = detectors.FORMS[form]()
    heads = tasks(model, "detection")
    assert [name for name, head in heads.items() if head.task is Task.DETECTION] == [one(model).outputs[0]]
    assert all((head.detector is not None) is (head.task is Task.DETECTION) for head in heads.values())


def test_task_detection_where_there_is_no_candidate():
    model = parse("net (float[n, 8] x) => (float[n, 9] y) { y = MatMul(x, w) }", w=np.ones((8, 9)))
    with pytest.raises(UserError, match="detection"):
        tasks(model, "detection")


@pytest.mark.parametrize("form", detectors.FORMS)
def test_task_none_switches_it_off(form):
    source = load(detectors.FORMS[form]())
    plan = analyse(source, Settings(task="none", candidates=10))
    assert {head.task for head in plan.heads} == {Task.NONE}
    assert not any(head.detector for head in plan.heads)
    assert not any(site.chosen for site in plan.sites)


# ------------------------------------------------------------------- which sites choose


@pytest.mark.parametrize("size", [32, None], ids=["static", "symbolic"])
@pytest.mark.parametrize("form", detectors.FORMS)
def test_every_site_asks_only_for_what_candidates_need(form, size):
    plan = analyse(load(detectors.FORMS[form](size=size)), Settings(candidates=10))
    assert plan.sites and all(site.chosen for site in plan.sites)


@pytest.mark.parametrize("candidates", ["all", 1000])
def test_nothing_is_chosen_where_all_candidates_have_answers(candidates):
    plan = analyse(load(detectors.yolo_like()), Settings(candidates=candidates))
    assert not any(site.chosen for site in plan.sites)


def test_an_output_beside_the_detector_needs_all_positions():
    model = detectors.yolo_like()
    model.graph.output.append(onnx.helper.make_tensor_value_info("cls_0", onnx.TensorProto.FLOAT, None))
    text = [node for node in model.graph.node if node.output[0] == "classes_0"]
    model.graph.output[-1].name = text[0].output[0]
    plan = analyse(load(model), Settings(candidates=10))
    assert any(head.detector for head in plan.heads)
    assert not any(site.chosen for site in plan.sites)

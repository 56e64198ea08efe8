"""What a converted detector says of its candidates, against float64 numpy that knows nothing of graphs.

The sites' own variances are computed at every position of every map, with dense solves; where a converted file asks
at too few positions, its variances are smaller than these.
"""

from __future__ import annotations

import functools

import numpy as np
import onnx
import pytest
from support import detectors
from support.dense_shares import kernel
from support.ordinary import counted_p, ordinary_scores

import gapa_onnx
from gapa_onnx.model.splice import extract
from gapa_onnx.record import read, require
from gapa_onnx.sessions.inference import open_model

CANDIDATES = 12
IMAGES = detectors.pictures(3, seed=7)
CLASSES = 3


def converted(form, candidates=CANDIDATES, size=32):
    """A detector whose sites compare a query with all of their inducing points."""
    return _converted(form, candidates, size)


@functools.cache
def _converted(form, candidates, size):
    model = detectors.FORMS[form](CLASSES, size=size)
    return gapa_onnx.convert(model, detectors.pictures(24), m=24, k=24, candidates=candidates)


def run(model, feeds, inner=(), portable=False):
    session = opened(model.SerializeToString(), tuple(dict.fromkeys(inner)), portable)
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


@functools.cache
def opened(model, inner, portable):
    """A session that shows some inner tensors, too."""
    exposed = onnx.ModelProto.FromString(model)
    present = {output.name for output in exposed.graph.output}
    exposed.graph.output.extend(
        onnx.helper.make_empty_tensor_value_info(name) for name in inner if name not in present
    )
    return open_model(exposed, portable=portable, threads=1)


class Answers:
    """What a file says of some images, and where its candidates are."""

    def __init__(self, form, candidates=CANDIDATES, feeds=IMAGES, size=32):
        self.conversion = converted(form, candidates, size)
        (self.head,) = [head for head in self.conversion.plan.heads if head.detector]
        self.detector = self.head.detector
        slabs = filter(None, (self.detector.boxes, self.detector.classes, self.detector.logits))
        sites = (name for site in self.conversion.plan.sites for name in (site.query, site.output))
        layers = (name for name in self.layers() if name.partition("_")[2].isdigit())
        selected = filter(None, [self.detector.selected])
        inner = [*(slab.tensor for slab in slabs), *sites, *layers, *selected]
        self.values = run(self.conversion.model, feeds, inner)
        self.candidates = self["candidates"]

    def __getitem__(self, role):
        return self.values[f"{self.head.output}_{role}"]

    def layers(self):
        return [name for node in self.conversion.plan.source.proto.graph.node for name in node.output]

    def of(self, slab, array, indices=None):
        """Features of candidates: (n, K, f)."""
        last = None if slab.count is None else slab.start + slab.count
        by_candidate = np.moveaxis(array, slab.axis, 2)[..., slab.start : last].astype(np.float64)
        indices = self.candidates if indices is None else indices
        return np.take_along_axis(by_candidate, indices[..., None], axis=1)

    @property
    def class_scores(self):
        return self.of(self.detector.classes, self.values[self.detector.classes.tensor])

    @property
    def class_logits(self):
        if self.detector.logits is not None:
            return self.of(self.detector.logits, self.values[self.detector.logits.tensor])
        scores = self.class_scores
        return np.log(scores / (1 - scores)) if self.detector.squashed else scores


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


# ---------------------------------------------------------------- the variances in numpy


def own_variances(answers):
    """Of each site at all of its positions, in the shape of its tensor: c² τ s / (1 + b s)."""
    found = {}
    for fit in answers.conversion.numbers.fits:
        site, points = fit.site, np.asarray(fit.index.points, np.float64)
        assert fit.k == len(points)
        query = np.moveaxis(answers.values[site.query].astype(np.float64), site.axis, -1)
        rows = query.reshape(-1, query.shape[-1])
        if fit.geometry.metric == "direction":
            rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
        gram = kernel(points, points, fit.length_scale) + fit.jitter * np.eye(len(points))
        to_rows = kernel(points, rows, fit.length_scale)
        shares = np.clip(1 - (to_rows * np.linalg.solve(gram, to_rows)).sum(axis=0), 0, 1)
        levelled = fit.scale * shares / (1 + max(fit.scale / fit.ceiling - 1, 0) * shares)
        by_position = np.moveaxis(levelled.reshape(*query.shape[:-1], 1), -1, site.axis)
        found[site.output] = by_position * np.asarray(fit.prior_var, np.float64)
    return found


def weight_of(answers, layer):
    graph = answers.conversion.plan.source.proto.graph
    nodes = {node.output[0]: node for node in graph.node}
    node = nodes[layer] if nodes[layer].op_type == "Conv" else nodes[nodes[layer].input[0]]
    (weight,) = (tensor for tensor in graph.initializer if tensor.name == node.input[1])
    return onnx.numpy_helper.to_array(weight).astype(np.float64)


def through_layer(answers, layer, var):
    """The variance behind a convolution or a matrix product: squared weights."""
    weight = weight_of(answers, layer) ** 2
    if weight.ndim == 2:
        return var @ weight
    reach = weight.shape[2] // 2
    padded = np.pad(var, [(0, 0), (0, 0), (reach, reach), (reach, reach)])
    (h, w), result = var.shape[2:], 0
    for dy, dx in np.ndindex(weight.shape[2:]):
        result = result + np.einsum(
            "oc,nchw->nohw", weight[:, :, dy, dx], padded[:, :, dy : dy + h, dx : dx + w]
        )
    return result


def flat(maps):
    """(n, f, h, w) as (n, h w, f)."""
    return np.moveaxis(maps.reshape(*maps.shape[:2], -1), 1, 2)


def by_anchor(maps, features):
    """(n, a f, h, w) as (n, h w a, f)."""
    return np.moveaxis(maps, 1, 3).reshape(len(maps), -1, features)


def plain(answers, own, layer, site):
    parts = [flat(through_layer(answers, f"{layer}_{i}", own[f"{site}_{i}"])) for i in range(2)]
    return np.concatenate(parts, axis=1)


def yolo_classes(answers, own):
    return {"class": plain(answers, own, "classes", "cls")}


def yolox(answers, own):
    return {
        "class": plain(answers, own, "classes", "cls"),
        "box": plain(answers, own, "boxes", "box"),
        "object": plain(answers, own, "objects", "box"),
    }


def yolov5(answers, own):
    boxes, rest = [], []
    for i in range(2):
        var, logits = (
            np.moveaxis(maps.reshape(len(maps), 3, 5 + CLASSES, *maps.shape[2:]), 2, 4)
            for maps in (
                through_layer(answers, f"numbers_{i}", own[f"head_{i}"]),
                answers.values[f"numbers_{i}"].astype(np.float64),
            )
        )
        p = sigmoid(logits[..., :4])
        reach = np.arange(4.0, 10).reshape(1, 3, 1, 1, 2)
        slopes = [2 * 2.0 ** (i + 2) + 0 * p[..., :2], 8 * p[..., 2:] * reach]
        slope = np.concatenate(slopes, axis=4) * p * (1 - p)
        boxes.append((slope**2 * var[..., :4]).reshape(len(var), -1, 4))
        rest.append(var[..., 4:].reshape(len(var), -1, 1 + CLASSES))
    objects, classes = np.split(np.concatenate(rest, axis=1), [1], axis=2)
    return {"class": classes, "box": np.concatenate(boxes, axis=1), "object": objects}


def two_outputs(answers, own):
    def of(layer, features):
        parts = [through_layer(answers, f"{layer}_{i}", own[f"head_{i}"]) for i in range(2)]
        return np.concatenate([by_anchor(part, features) for part in parts], axis=1)

    moved, grown = np.split(of("boxes", 4), 2, axis=2)
    sides = [by_anchor(answers.values[f"boxes_{i}"].astype(np.float64), 4) for i in range(2)]
    extent = 0.3 * np.exp(0.2 * np.concatenate(sides, axis=1)[..., 2:])
    corner = 0.1**2 * moved + (0.2 * extent / 2) ** 2 * grown
    return {
        "class": of("classes", answers.detector.classes.count),
        "box": np.concatenate([corner, corner], axis=2),
    }


def detr(answers, own):
    (box_site,) = (site for site in answers.conversion.plan.sites if site.output == "box_0")
    alive = answers.values[box_site.query] > 0
    hidden = own["box_0"] + alive * through_layer(answers, "before_box", own["head_0"])
    p = answers.values["pred_boxes"].astype(np.float64)
    box = (p * (1 - p)) ** 2 * through_layer(answers, "boxes_0", hidden)
    return {"class": through_layer(answers, "logits", own["head_0"]), "box": box}


EXPECTED = {
    "yolo": yolo_classes,
    "yolov5": yolov5,
    "yolox": yolox,
    "ssd": two_outputs,
    "retina": two_outputs,
    "detr": detr,
    "suppressed": yolo_classes,
}


def expected(answers, form):
    """Variances of all candidates (n, A, f), by what they are of."""
    return EXPECTED[form](answers, own_variances(answers))


def at(candidates, numbers):
    return np.take_along_axis(numbers, candidates[..., None], axis=1)


CLOSE = 1e-5  # in single precision; measured, 3e-6 at most


# ------------------------------------------------------------------------------- answers


@pytest.mark.parametrize("size", [32, None], ids=["static", "symbolic"])
@pytest.mark.parametrize("form", detectors.FORMS)
def test_every_check_passes(form, size):
    conversion = converted(form, size=size)
    assert [f"{check.name}: {check.detail}" for check in conversion.checks if not check.passed] == []
    assert all(site.chosen for site in conversion.plan.sites)
    source = run(conversion.plan.source.given, IMAGES)
    answer = run(conversion.model, IMAGES)
    for name, value in source.items():
        np.testing.assert_array_equal(answer[name], value)


@pytest.mark.parametrize("form", detectors.FORMS)
def test_variances_of_candidates(form):
    answers = Answers(form)
    numbers = expected(answers, form)
    np.testing.assert_allclose(answers["class_var"], at(answers.candidates, numbers["class"]), rtol=CLOSE)
    if "box" in numbers:
        np.testing.assert_allclose(answers["box_var"], at(answers.candidates, numbers["box"]), rtol=CLOSE)
    for role, width in (("class_var", answers.detector.classes.count), ("box_var", 4)):
        assert answers[role].shape == (3, CANDIDATES, width)
        assert (answers[role] > 0).all()


@pytest.mark.parametrize("form", detectors.FORMS)
def test_probabilities_by_the_bridge(form):
    answers = Answers(form)
    spread = answers["class_var"].astype(np.float64).mean(axis=2)
    bridged = answers.class_logits / np.sqrt(1 + np.pi / 8 * spread)[..., None]
    if answers.detector.link == "sigmoid":
        probs = sigmoid(bridged)
    else:
        probs = np.exp(bridged) / np.exp(bridged).sum(axis=2, keepdims=True)
    np.testing.assert_allclose(answers["probs"], probs, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(answers["score"], spread, rtol=1e-5)
    np.testing.assert_allclose(answers["entropy"], answers["aleatoric"] + answers["epistemic"], atol=1e-5)
    assert (answers["probs"].argmax(axis=2) == answers.class_scores.argmax(axis=2)).all()


@pytest.mark.parametrize("form", detectors.FORMS)
def test_the_score_of_an_image_is_over_all_that_was_asked(form):
    """The mean over the queries of all sites of τ s / (1 + b s): own variance in units of prior variance."""
    answers = Answers(form)
    fits = answers.conversion.numbers.fits
    for row in range(3):
        alone = {name: array[row : row + 1] for name, array in IMAGES.items()}
        values = run(answers.conversion.model, alone, [f"{fit.site.prefix}/share" for fit in fits])
        found = []
        for fit in fits:
            share = values[f"{fit.site.prefix}/share"].astype(np.float64).ravel()
            found.append(fit.scale * share / (1 + max(fit.scale / fit.ceiling - 1, 0) * share))
        np.testing.assert_allclose(answers["image_score"][row], np.concatenate(found).mean(), rtol=1e-4)
    assert answers["image_score"].shape == (3,)
    heads = require(answers.conversion.model, "it").heads.values()
    (head,) = [head for head in heads if head.detection is not None]
    assert set(head.scores) == {"score", "image_score"}
    for role, record in head.scores.items():
        whose = role.removesuffix("score")
        ordinary = ordinary_scores(answers.conversion.model, record)
        p, flags = answers[f"{whose}pvalue"], answers[f"{whose}ood"]
        assert flags.shape == answers[role].shape
        np.testing.assert_array_equal(p, counted_p(ordinary, answers[role]))
        np.testing.assert_array_equal(flags, ~(p > np.float32(0.05)))


@pytest.mark.parametrize("form", ["yolov5", "yolox"])
def test_the_probability_of_an_object(form):
    answers = Answers(form)
    var = at(answers.candidates, expected(answers, form)["object"])[..., 0]
    p = np.moveaxis(answers.values["output0"].astype(np.float64), 2, 0)[4]
    p = np.take_along_axis(p, answers.candidates, axis=1)
    bridged = sigmoid(np.log(p / (1 - p)) / np.sqrt(1 + np.pi / 8 * var))
    np.testing.assert_allclose(answers["objectness"], bridged, rtol=CLOSE)


@pytest.mark.parametrize("form", detectors.FORMS)
def test_candidates_are_the_most_confident(form):
    answers = Answers(form)
    detector = answers.detector
    everything = answers.values[detector.classes.tensor]
    count = everything.shape[detector.classes.candidate_axis]
    scores = answers.of(detector.classes, everything, np.tile(np.arange(count), (3, 1)))
    if not detector.squashed:
        scores = np.exp(scores) / np.exp(scores).sum(axis=2, keepdims=True)
    if detector.background is not None:
        scores = np.delete(scores, detector.background, axis=2)
    confidence = scores.max(axis=2)
    if detector.objectness is not None:
        confidence = confidence * everything[..., detector.objectness]
    best = -np.sort(-confidence, axis=1)[:, :CANDIDATES]
    chosen = np.take_along_axis(confidence, answers.candidates, axis=1)
    np.testing.assert_allclose(chosen, best, rtol=1e-6)  # in order, the largest first
    assert all(len(set(row)) == len(row) for row in answers.candidates)


@pytest.mark.parametrize("form", ["yolo", "yolov5", "yolox", "ssd", "retina", "detr"])
def test_all_candidates_are_those_of_the_whole_output(form):
    answers = Answers(form, "all")
    detector = answers.detector
    count = answers.candidates.shape[1]
    assert (np.sort(answers.candidates, axis=1) == np.arange(count)).all()
    box_var = answers.values[f"{detector.boxes.tensor}_var"]
    np.testing.assert_allclose(answers["box_var"], answers.of(detector.boxes, box_var), rtol=1e-6)
    var = answers.of(detector.classes, answers.values[f"{detector.classes.tensor}_var"])
    if detector.link == "sigmoid" and detector.squashed:
        slope = answers.class_scores * (1 - answers.class_scores)
        np.testing.assert_allclose(answers["class_var"] * slope**2, var, rtol=1e-4)
    elif not detector.squashed:
        np.testing.assert_allclose(answers["class_var"], var, rtol=1e-6)
    else:  # Var p_i = p_i² ((1 - 2 p_i) v_i + Σ_j p_j² v_j)
        p, v = answers.class_scores, answers["class_var"]
        total = (p**2 * v).sum(axis=2, keepdims=True)
        np.testing.assert_allclose(p**2 * ((1 - 2 * p) * v + total), var, rtol=1e-4)
    np.testing.assert_allclose(
        answers["class_var"], at(answers.candidates, expected(answers, form)["class"]), rtol=CLOSE
    )


def test_what_suppression_selects_has_the_answers_of_its_candidate():
    answers = Answers("suppressed")
    rows, _, places = answers.values["selected"].T
    assert len(rows) > 5 and set(rows) == {0, 1, 2}
    numbers = expected(answers, "suppressed")["class"][rows, places]
    np.testing.assert_allclose(answers["selected_class_var"], numbers, rtol=CLOSE)
    np.testing.assert_allclose(answers["selected_score"], numbers.mean(axis=1), rtol=CLOSE)
    compared = 0
    for line, (row, place) in enumerate(zip(rows, places)):
        for rank in np.flatnonzero(answers.candidates[row] == place):
            compared += 1
            for role in ("class_var", "box_var", "probs", "entropy", "epistemic", "score", "ood"):
                chosen = answers[f"selected_{role}"][line]
                np.testing.assert_allclose(chosen, answers[role][row, rank], rtol=1e-6, err_msg=role)
    assert compared > 5
    np.testing.assert_allclose(  # the variance of the model's own output
        answers.values["kept_scores_var"],
        _variances_of_selected(answers),
        rtol=1e-4,
    )


def _variances_of_selected(answers):
    """Var p = (p (1 - p))² Var logit, of the class that each was selected for."""
    labels = answers.values["selected"][:, 1]
    p = answers.values["kept_scores"].astype(np.float64)
    return (p * (1 - p)) ** 2 * answers["selected_class_var"][np.arange(len(labels)), labels]


def test_nothing_selected_is_no_answer():
    model = detectors.suppressed(CLASSES, threshold=0.999)
    conversion = gapa_onnx.convert(model, detectors.pictures(24), m=24, k=24, candidates=CANDIDATES)
    answer = run(conversion.model, IMAGES)
    assert answer["kept_boxes"].shape == (0, 4) and answer["kept_boxes_selected_box_var"].shape == (0, 4)
    assert answer["kept_boxes_box_var"].shape == (3, CANDIDATES, 4)


def test_classes_whose_number_is_open():
    """Scores that went through a choice of classes: neither their number nor their logits are in sight."""
    model = detectors.suppressed(CLASSES)
    nodes = list(model.graph.node)
    place = next(at for at, node in enumerate(nodes) if node.output[0] == "all_scores")
    nodes[place].output[0] = "known_scores"
    keep, zero = np.ones(CLASSES, bool), np.zeros(1, np.int64)
    model.graph.initializer.extend(
        onnx.numpy_helper.from_array(value, name) for name, value in (("keep", keep), ("zero", zero))
    )
    nodes[place + 1 : place + 1] = [
        onnx.helper.make_node("NonZero", ["keep"], ["kept_as_rows"]),
        onnx.helper.make_node("Squeeze", ["kept_as_rows", "zero"], ["kept"]),
        onnx.helper.make_node("Gather", ["known_scores", "kept"], ["all_scores"], axis=1),
    ]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    conversion = gapa_onnx.convert(model, detectors.pictures(24), m=24, k=24, candidates=CANDIDATES)
    detector = conversion.plan.heads[0].detector
    assert detector.classes.count is None and detector.logits is None and detector.squashed
    answer, usual = run(conversion.model, IMAGES), Answers("suppressed")
    np.testing.assert_array_equal(answer["kept_boxes_candidates"], usual.candidates)
    for role in ("class_var", "box_var", "probs", "selected_class_var", "selected_probs"):
        np.testing.assert_allclose(answer[f"kept_boxes_{role}"], usual[role], rtol=1e-3, err_msg=role)


@pytest.mark.parametrize("form", detectors.FORMS)
def test_an_image_has_the_same_answers_in_any_batch(form):
    conversion = converted(form)
    together = run(conversion.model, IMAGES)
    names = [
        name for name in together if "selected" not in name and not name.startswith(("kept_scores", "labels"))
    ]
    names = [name for name in names if len(together[name]) == 3 and name != "kept_boxes"]
    assert any(name.endswith("class_var") for name in names)
    for row in range(3):
        alone = run(conversion.model, {"images": IMAGES["images"][row : row + 1]})
        for name in names:
            np.testing.assert_allclose(
                alone[name][0], together[name][row], rtol=1e-4, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("form", detectors.FORMS)
def test_portable_is_native(form):
    conversion = converted(form)
    shares = [place.share for place in read(conversion.model).places]
    native, portable = (run(conversion.model, IMAGES, shares, portable=flag) for flag in (False, True))
    # A share may be off by 10⁻³ s + 10⁻⁵ in single precision: a variance, a multiple of it, by a thousandth of itself, and by
    # what 10⁻⁵ is of an ordinary share beside the largest.
    beside = 1e-5 / min(np.median(native[name]) for name in shares if native[name].size)
    assert beside < 0.1
    for name, value in native.items():
        if value.dtype == np.float32 and not name.endswith("pvalue"):  # these move in steps
            allowed = beside * np.abs(value).max(initial=0)
            np.testing.assert_allclose(portable[name], value, rtol=1e-3, atol=allowed, err_msg=name)
        elif value.dtype != np.float32 and not name.endswith("ood"):
            np.testing.assert_array_equal(portable[name], value, err_msg=name)


def test_fewer_candidates_than_asked_for():
    conversion = converted("detr", 1000)
    answer = run(conversion.model, IMAGES)
    assert answer["logits_box_var"].shape == (3, 20, 4)
    assert (np.sort(answer["logits_candidates"], axis=1) == np.arange(20)).all()
    assert (answer["logits_class_var"] > 0).all() and not any(s.chosen for s in conversion.plan.sites)


@pytest.mark.parametrize("form", ["yolo", "yolov5", "ssd"])
def test_images_of_another_size(form):
    """Larger and not square; and so small that there are fewer candidates than are asked for."""
    larger = {"images": np.ascontiguousarray(detectors.pictures(3, 48, seed=5)["images"][:, :, :32])}
    answers = Answers(form, feeds=larger, size=None)
    np.testing.assert_allclose(
        answers["class_var"], at(answers.candidates, expected(answers, form)["class"]), rtol=CLOSE
    )
    small = Answers(form, feeds={"images": IMAGES["images"][:, :, :8, :8]}, size=None)
    count = small.values[small.detector.classes.tensor].shape[small.detector.classes.candidate_axis]
    assert small.candidates.shape == (3, min(count, CANDIDATES)) and (small["box_var"] > 0).all()


# --------------------------------------------------------------------------- Monte Carlo


def test_variances_are_those_of_sampled_activations():
    """Activations drawn around the maps of the last hidden layer, by the variances that sites give them."""
    answers, draws = Answers("yolov5", feeds={"images": IMAGES["images"][:1]}), 4000
    own, rng = own_variances(answers), np.random.default_rng(0)
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ["n", *var.shape[1:]])
        for name, var in own.items()
    ]
    tail = extract(answers.conversion.plan.source.proto, ["output0"], infos)
    del tail.graph.input[0]  # the image

    feeds = {
        name: (answers.values[name] + np.sqrt(var) * rng.normal(size=(draws, *var.shape[1:]))).astype(
            np.float32
        )
        for name, var in own.items()
    }
    (output,) = open_model(tail, threads=1).run(["output0"], feeds)
    numbers = output[:, answers.candidates[0]].astype(np.float64)  # (draws, K, 5 + C)
    boxes, p = numbers[..., :4], numbers[..., 5:]
    logits = np.log(p / (1 - p))
    error = np.sqrt(2 / (draws - 1))  # of a variance of normal numbers, as a part of it
    np.testing.assert_allclose(logits.var(axis=0, ddof=1), answers["class_var"][0], rtol=5 * error)
    slack = 0.05  # boxes are not linear in them; what the first order leaves
    np.testing.assert_allclose(boxes.var(axis=0, ddof=1), answers["box_var"][0], rtol=5 * error + slack)


@pytest.mark.parametrize("opset", [11, 12])
@pytest.mark.parametrize("form", ["yolox", "ssd", "retina", "detr"])
def test_the_oldest_opsets(form, opset):
    """Their Min takes no whole numbers, and their Softmax all axes from the given one on."""
    model = detectors.FORMS[form](CLASSES, size=32)
    model.opset_import[0].version = opset
    conversion = gapa_onnx.convert(model, detectors.pictures(24), m=24, k=8, candidates=CANDIDATES)
    assert all(check.passed for check in conversion.checks)
    new, old = (run(one.model, IMAGES) for one in (converted(form), conversion))
    (head,) = [head for head in conversion.plan.heads if head.detector]
    np.testing.assert_array_equal(old[f"{head.output}_candidates"], new[f"{head.output}_candidates"])


@pytest.mark.parametrize("opset", [11, 17])
def test_candidates_by_a_softmax_along_the_first_of_two_axes(opset):
    """Logits (N, C, A), whose last class is no object, against numpy."""
    text = (
        f'<ir_version: 8, opset_import: ["": {opset}]> net (float[n, 8] x) =>'
        " (float[n, 4, 9] boxes, float[n, 3, 9] scores) <int64[3] b = {0, 4, 9}, int64[3] s = {0, 3, 9}>"
        " { z = MatMul(x, w)  h = Tanh(z)  p = MatMul(h, u)  boxes = Reshape(p, b)"
        "  q = MatMul(h, v)  scores = Reshape(q, s) }"
    )
    model, rng = onnx.parser.parse_model(text), np.random.default_rng(3)
    for name, shape in (("w", (8, 6)), ("u", (6, 36)), ("v", (6, 27))):
        model.graph.initializer.append(
            onnx.numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name)
        )
    rows = {"x": rng.normal(size=(60, 8)).astype(np.float32)}
    found = run(gapa_onnx.convert(model, rows, m=30, k=8, candidates=4).model, rows)
    chances = np.exp(found["scores"].astype(np.float64))
    confidence = (chances / chances.sum(axis=1, keepdims=True))[:, :2].max(axis=1)
    np.testing.assert_array_equal(found["scores_candidates"], np.argsort(-confidence, axis=1)[:, :4])

"""Which elements of inner tensors wanted elements come from, against brute force: each is changed, one after the other.

Never too few may be found. Where a detector's heads are convolutions, not one too many either.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support import detectors
from support.small_models import parse

from gapa_onnx.model.load import load
from gapa_onnx.model.splice import extract, splice
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.plan.candidates import selections
from gapa_onnx.plan.heads.detection import most_confident
from gapa_onnx.settings import Settings
from gapa_onnx.variance.demand import Demand, demand
from gapa_onnx.variance.qdq import reading_graph

empty = onnx.helper.make_empty_tensor_value_info
JUST = 1e-6  # of a number that has not changed: a batch of another size may round in another order


def session(model):
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def exposing(model, names):
    present = {output.name for output in model.graph.output}
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    copy.graph.output.extend(empty(name) for name in names if name not in present)
    return copy


def tail_of(source, outputs, given):
    """The model from some tensors on, which are its only inputs."""
    infos = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, source.tensors[name].shape)
        for name in given
    ]
    tail = extract(source.proto, outputs, infos)
    read = {name for node in tail.graph.node for name in node.input}
    kept = [value for value in tail.graph.input if value.name in read]
    del tail.graph.input[:]
    tail.graph.input.extend(kept)
    return session(tail)


def differs(changed, base):
    return np.abs(changed - base) > JUST * (1 + np.abs(base))


# ------------------------------------------------------------------------- detectors


def chosen_positions(source, count, feeds):
    """By site, which positions (n, …) are queries; and which candidates (n, A) have answers."""
    settings = Settings(candidates=count)
    plan = analyse(source, settings)
    detector = plan.heads[0].detector
    assert all(site.chosen for site in plan.sites)
    graph = reading_graph(source)
    found = selections(source, graph, plan.sites, plan.heads, count)
    best = most_confident(graph, source, detector, count)
    asked = {site.output: graph.emit("Identity", found[site.output].indices) for site in plan.sites}
    wanted = [*asked.values(), graph.emit("Identity", best)]
    slabs = detector.boxes.tensor, detector.classes.tensor
    inner = [*(site.output for site in plan.sites), *slabs, *filter(None, [detector.selected])]
    model = exposing(
        splice(source.proto, graph.to_proto(wanted), [empty(value.name) for value in wanted]), inner
    )
    names = [output.name for output in model.graph.output]
    values = dict(zip(names, session(model).run(names, feeds)))

    shape = values[detector.classes.tensor].shape
    candidates = np.zeros((shape[0], shape[detector.classes.candidate_axis]), bool)
    np.put_along_axis(candidates, values[wanted[-1].name], True, axis=1)
    if detector.selected is not None:
        rows, _, places = values[detector.selected].T
        candidates[rows, places] = True
    positions = {}
    for site in plan.sites:
        sizes = [values[site.output].shape[axis] for axis in site.others]
        positions[site] = np.zeros(sizes, bool)
        positions[site][tuple(values[asked[site.output].name].T)] = True
    return detector, positions, candidates, values


def brute_force(source, detector, site, sites, candidates, values, row):
    """Which positions of a site change any number of the candidates of one row."""
    at = {other.output: values[other.output][row] for other in sites}
    features = site.axis - 1
    moved = np.moveaxis(at[site.output], features, -1)  # (…, d)
    places = list(np.ndindex(moved.shape[:-1]))
    changed = np.repeat(moved[None], len(places), axis=0)
    for which, place in enumerate(places):
        changed[(which, *place)] += 1
    feeds = {name: np.repeat(value[None], len(places), axis=0) for name, value in at.items()}
    feeds[site.output] = np.moveaxis(changed, -1, features + 1)
    slabs = detector.boxes, detector.classes
    tail = tail_of(source, list(dict.fromkeys(slab.tensor for slab in slabs)), list(at))
    read = {entry.name for entry in tail.get_inputs()}
    answers = tail.run([slab.tensor for slab in slabs], {n: v for n, v in feeds.items() if n in read})
    depends = np.zeros((len(places), candidates.shape[1]), bool)
    for slab, answer in zip(slabs, answers):
        last = None if slab.count is None else slab.start + slab.count
        base, new = (
            np.moveaxis(array, slab.axis, 2)[..., slab.start : last]
            for array in (values[slab.tensor][row : row + 1], answer)
        )
        depends |= differs(new, base).any(axis=2)
    return depends[:, candidates[row]].any(axis=1).reshape(moved.shape[:-1])


def wide_pictures(rows, seed):
    """Not square: an exchange of axes would show."""
    images = detectors.pictures(rows, 48, seed)["images"]
    return {"images": np.ascontiguousarray(images[:, :, :32])}


CASES = [
    *((form, {}, count) for form in detectors.FORMS for count in (1, 6)),
    *((form, {"size": None}, 6) for form in detectors.FORMS),
    ("yolo", {"scales": 1}, 3),
    ("yolo", {"scales": 3}, 3),
    ("yolo", {"kernel": 3}, 3),
    ("yolo", {"kernel": 3, "size": None}, 3),
    ("yolov5", {"anchors": 2, "scales": 3}, 3),
    ("detr", {"joined": True}, 3),
    ("retina", {"squashed": False}, 3),
    ("suppressed", {"threshold": 0.9}, 3),  # where nothing is selected
]


@pytest.mark.parametrize(
    "form, options, count", CASES, ids=lambda value: str(value).replace("'", "").replace(" ", "")
)
def test_positions_of_candidates_are_those_that_change_them(form, options, count):
    source = load(detectors.FORMS[form](**{"width": 4, "seed": 3} | options))
    feeds = wide_pictures(2, 1) if options.get("size", 32) is None else detectors.pictures(2, seed=1)
    detector, positions, candidates, values = chosen_positions(source, count, feeds)
    assert (candidates.sum(axis=1) >= count).all() and not candidates.all()
    some = 0
    for site, asked in positions.items():
        for row in range(2):
            needed = brute_force(source, detector, site, list(positions), candidates, values, row)
            assert not (needed & ~asked[row]).any(), f"{site.output}: too few"
            assert not (asked[row] & ~needed).any(), f"{site.output}: too many"
            some += needed.sum()
    assert some > 0


# ----------------------------------------------------------------------- single nodes


def needed_by_demand(source, place, mask, axes, feeds):
    """What the walk finds of `place` where elements of `y` are wanted: bool, in the shape of the tensor."""
    graph = reading_graph(source)
    full = tuple(size > 1 or axis in axes for axis, size in enumerate(mask.shape))
    wanted = {"y": Demand(graph.constant(mask.astype(np.float32)), full)}
    found = demand(source, graph, wanted, [place])[place]
    if found is None:
        return None
    tensor = graph.tensor(place, np.float32)
    shown = graph.emit("Expand", found.mask, graph.shape(tensor))
    model = splice(source.proto, graph.to_proto([shown]), [empty(shown.name)])
    (answer,) = session(exposing(model, [place])).run([shown.name], feeds)
    return answer > 0


def needed_by_trying(source, place, mask, feeds):
    (base,) = session(exposing(source.proto, [place])).run([place], feeds)
    tail = tail_of(source, ["y"], [place])
    others = {entry.name: feeds[entry.name] for entry in tail.get_inputs() if entry.name != place}
    (before,) = tail.run(["y"], {place: base, **others})
    wanted = np.broadcast_to(mask, before.shape)
    needed = np.zeros(base.shape, bool)
    for at in np.ndindex(base.shape):
        changed = base.copy()
        changed[at] += 0.5
        (after,) = tail.run(["y"], {place: changed, **others})
        needed[at] = (differs(after, before) & wanted).any()
    return needed


EXACT, ENOUGH, ALL = "exact", "enough", "all"

#: name -> inputs, the shape of y, the body from s on, how exact the answer is, and weights by shape
NODES = {
    "sum": ("float[n, 3, 4] x", "float[n, 3, 4] y", "y = Add(s, s)", EXACT, {}),
    "one feature for all": ("float[n, 1, 4] x", "float[n, 3, 4] y", "y = Mul(s, w)", EXACT, {"w": (3, 4)}),
    "one place for all": ("float[n, 3, 1] x", "float[n, 3, 4] y", "y = Mul(s, w)", EXACT, {"w": (3, 4)}),
    "one place for all, by another name": (
        "float[n, 3, p] x, float[n, 3, q] z", "float[n, 3, r] y", "y = Mul(s, z)", EXACT, {},
    ),
    "all places, by another name": (
        "float[n, 3, r] x, float[n, 3, q] z", "float[n, 3, p] y", "y = Mul(s, z)", EXACT, {},
    ),
    "one row for all": ("float[1, 3, 4] x, float[n, 3, 4] z", "float[n, 3, 4] y", "y = Sub(z, s)", EXACT, {}),
    "fewer axes": ("float[3, 4] x, float[n, 3, 4] z", "float[n, 3, 4] y", "y = Sub(z, s)", ALL, {}),
    "softmax": ("float[n, 3, 4] x", "float[n, 3, 4] y", "y = Softmax<axis = 1>(s)", EXACT, {}),
    "normalisation": (
        "float[n, 3, 4] x", "float[n, 3, 4] y", "t = Transpose<perm = [0, 2, 1]>(s) "
        "l = LayerNormalization(t, w, b) y = Transpose<perm = [0, 2, 1]>(l)", EXACT, {"w": (3,), "b": (3,)},
    ),
    "product": ("float[n, 4, 3] x", "float[n, 4, 2] y", "y = MatMul(s, w)", EXACT, {"w": (3, 2)}),
    "product with one row of many": (
        "float[1, 4, 3] x, float[n, 3, 2] z", "float[n, 4, 2] y", "y = MatMul(s, z)", EXACT, {},
    ),
    "product with fewer axes": (
        "float[4, 3] x, float[n, 3, 2] z", "float[n, 4, 2] y", "y = MatMul(s, z)", ALL, {},
    ),
    "product from the left": ("float[n, 3, 4] x", "float[n, 2, 4] y", "y = MatMul(w, s)", ALL, {"w": (2, 3)}),
    "reshape": (
        "float[n, 3, 2, 2] x", "float[n, 3, 4] y",
        "r = Constant<value_ints = [0, 3, -1]>() y = Reshape(s, r)", EXACT, {},
    ),
    "reshape that parts anchors": (
        "float[n, 6, 2] x", "float[n, 4, 3] y",
        "r = Constant<value_ints = [0, 2, 3, 2]>() p = Reshape(s, r) t = Transpose<perm = [0, 1, 3, 2]>(p) "
        "q = Constant<value_ints = [0, 4, 3]>() y = Reshape(t, q)", EXACT, {},
    ),
    "reshape of rows": (
        "float[2, 3, 4] x", "float[2, 4, 3] y",
        "r = Constant<value_ints = [6, 4]>() p = Reshape(s, r) e = Exp(p) "
        "q = Constant<value_ints = [2, 3, 4]>() u = Reshape(e, q) y = Transpose<perm = [0, 2, 1]>(u)", EXACT, {},
    ),
    "reshape of rows, by symbols": (
        "float[n, 3, a] x", "float[n, a, 3] y",
        "r = Constant<value_ints = [-1, 4]>() p = Reshape(s, r) e = Exp(p) "
        "q = Constant<value_ints = [-1, 3, 4]>() u = Reshape(e, q) y = Transpose<perm = [0, 2, 1]>(u)", EXACT, {},
    ),
    "squeeze": (
        "float[n, 3, 1, 4] x", "float[n, 3, 4] y", "a = Constant<value_ints = [2]>() y = Squeeze(s, a)", EXACT, {},
    ),
    "parts of features": (
        "float[n, 4, 3] x", "float[n, 2, 3] y",
        "p = Constant<value_ints = [2, 2]>() a, b = Split<axis = 1>(s, p) y = Add(a, b)", EXACT, {},
    ),
    "some candidates": (
        "float[n, 2, 6] x", "float[n, 2, 4] y",
        "b = Constant<value_ints = [2]>() e = Constant<value_ints = [6]>() a = Constant<value_ints = [2]>() "
        "y = Slice(s, b, e, a)", ENOUGH, {},
    ),
    "one feature": (
        "float[n, 3, 4] x", "float[n, 1, 4] y",
        "i = Constant<value_int = 1>() g = Gather<axis = 1>(s, i) a = Constant<value_ints = [1]>() y = Unsqueeze(g, a)",
        ENOUGH, {},
    ),
    "chosen features": (
        "float[n, 3, 4] x", "float[n, 2, 4] y", "i = Constant<value_ints = [2, 0]>() y = Gather<axis = 1>(s, i)", ENOUGH, {},
    ),
    "two parts": (
        "float[n, 3, 4] x", "float[n, 3, 8] y", "e = Exp(s) y = Concat<axis = 2>(s, e)", EXACT, {},
    ),
    "convolution": (
        "float[n, 2, 5] x", "float[n, 3, 5] y", "y = Conv<pads = [1, 1]>(s, w)", EXACT, {"w": (3, 2, 3)},
    ),
    "convolution with steps": (
        "float[n, 2, 8] x", "float[n, 3, 4] y", "y = Conv<pads = [1, 1], strides = [2]>(s, w)", ALL, {"w": (3, 2, 3)},
    ),
    "convolution with gaps": (
        "float[n, 2, 8] x", "float[n, 3, 8] y", "y = Conv<pads = [2, 2], dilations = [2]>(s, w)", ALL, {"w": (3, 2, 3)},
    ),
    "convolution in groups": (
        "float[n, 2, 5] x", "float[n, 2, 5] y", "y = Conv<pads = [1, 1], group = 2>(s, w)", EXACT, {"w": (2, 1, 3)},
    ),
    "a node that is not known": (
        "float[n, 3, 4] x", "float[n, 3, 4] y", "a = Constant<value_int = 2>() y = CumSum(s, a)", ALL, {},
    ),
}  # fmt: skip
LENGTHS = {"n": 2, "p": 1, "q": 4, "r": 4, "a": 4}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", NODES)
def test_elements_that_a_node_needs(name, seed):
    signature, result, body, exact, shapes = NODES[name]
    rng = np.random.default_rng(seed)
    weights = {key: rng.normal(size=shape) for key, shape in shapes.items()}
    source = load(parse(f"net ({signature}) => ({result}) {{ s = Neg(x) {body} }}", **weights))
    feeds = {}
    for entry in source.inputs:
        sizes = [LENGTHS.get(size, size) for size in entry.shape]
        feeds[entry.name] = rng.normal(size=sizes).astype(np.float32)
    (y,) = session(source.proto).run(["y"], feeds)
    axis = 1 if name.startswith("product") and "left" not in name else 2
    shape = [len(y), 1, 1]
    shape[axis] = y.shape[axis]
    mask = rng.random(shape) < 0.3
    mask[(0,) * 3] = True
    found = needed_by_demand(source, "s", mask, (0, axis), feeds)
    if exact is ALL:
        assert found is None
        return
    assert found is not None
    needed = needed_by_trying(source, "s", mask, feeds)
    assert not (needed & ~found).any(), "too few"
    if exact is EXACT:
        assert (found == needed).all(), "too many"

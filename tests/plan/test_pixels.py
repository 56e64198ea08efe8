"""Segmentation: `auto` asks a query for each position of a map that is affordable, and says so where it cannot."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.small_models import parse

import gapa_onnx
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.plan.tasks import Task
from gapa_onnx.settings import Settings

SAID = "one query per image: variance and score rank images, not pixels"

# Down by `stride` and up again, beside a skip: e and d are as fine as the image, m and c are coarse.
NET = """net (float[n, {given}] x) => (float[n, {result}] y) {{ {first}
    p = Conv<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(i, k)  e = Relu(p)
    q = AveragePool<kernel_shape = [{stride}, {stride}], strides = [{stride}, {stride}]>(e)
    r = Conv(q, a)  m = Relu(r)  t = Conv(m, b)  c = Tanh(t)
    u = ConvTranspose<kernel_shape = [{stride}, {stride}], strides = [{stride}, {stride}]>(c, v)
    s = Concat<axis = 1>(e, u)  g = Conv(s, w)  d = Relu(g)  l = Conv(d, o)  {last} }}"""


def unet(
    side="64, 64", stride=4, last="y = Softmax<axis = 1>(l)", channels_last=False, seed=0
) -> onnx.ModelProto:
    rng = np.random.default_rng(seed)
    shapes = {
        "k": (8, 1, 3, 3), "a": (12, 8, 1, 1), "b": (12, 12, 1, 1), "v": (12, 8, stride, stride), "w": (8, 16, 1, 1),
        "o": (3, 8, 1, 1),
    }  # fmt: skip
    weights = {name: rng.normal(size=shape) / np.sqrt(shape[1]) for name, shape in shapes.items()}
    first = "i = Transpose<perm = [0, 3, 1, 2]>(x)" if channels_last else "i = Identity(x)"
    if channels_last:
        last = "z = Transpose<perm = [0, 2, 3, 1]>(l)  y = Softmax<axis = 3>(z)"
    given, result = (f"{side}, 1", f"{side}, 3") if channels_last else (f"1, {side}", f"3, {side}")
    return parse(NET.format(given=given, result=result, stride=stride, first=first, last=last), **weights)


def sites_of(model: onnx.ModelProto, **choices) -> list[tuple[str, str, int]]:
    return [
        (site.output, site.layout.value, site.axis)
        for site in analyse(load(model), Settings(**choices)).sites
    ]


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(
    "side, stride, site",
    [
        ("64, 64", 4, ("d", "positions", 1)),  # 4096 positions are affordable
        ("256, 256", 4, ("c", "positions", 1)),  # 65,536 are not, 4096 on the way there are
        ("256, 256", 2, ("c", "positions", 1)),
        ("512, 512", 2, ("d", "pooled", 1)),  # 65,536 on the way there
        ("256, 256", 128, ("d", "pooled", 1)),  # 4 tell nothing
        ("h, w", 4, ("c", "positions", 1)),
        ("h, w", 128, ("d", "pooled", 1)),
    ],
)
def test_auto_prefers_a_map_that_tells_about_pixels(side, stride, site, channels_last):
    assert sites_of(unet(side, stride, channels_last=channels_last)) == [site]


@pytest.mark.parametrize(
    "task, site", [("auto", "d"), ("segmentation", "c"), ("y=segmentation", "c"), ("none", "d")]
)
def test_the_task_may_be_given(task, site):
    """Three channels that end in nothing may be an image."""
    (found,) = sites_of(unet("256, 256", last="y = Identity(l)"), task=task)
    assert found[0] == site


def test_a_map_behind_which_variance_stops_is_no_way_to_pixels():
    model = unet("256, 256")
    (node,) = (node for node in model.graph.node if node.op_type == "ConvTranspose")
    node.op_type, node.domain = "NoSuchOperator", "com.example"
    model.opset_import.add(domain="com.example", version=1)
    model.graph.value_info.append(onnx.helper.make_tensor_value_info("u", 1, ["n", 8, 256, 256]))
    assert sites_of(model) == [("d", "pooled", 1)]


def test_of_maps_about_as_fine_the_last_is_taken():
    """Without padding a layer takes a border away."""
    text = """net (float[n, 1, 64, 64] x) => (float[n, 3, s, t] y) { p = Conv(x, k)  e = Relu(p)  q = Conv(e, m)
        d = Relu(q)  l = Conv(d, o)  y = Softmax<axis = 1>(l) }"""
    shapes = {"k": (4, 1, 3, 3), "m": (4, 4, 3, 3), "o": (3, 4, 1, 1)}
    assert sites_of(parse(text, **{name: np.ones(shape) for name, shape in shapes.items()})) == [
        ("d", "positions", 1)
    ]


@pytest.mark.parametrize(
    "choices, advice",
    [
        ({"sites": "d:pooled"}, "let `sites` be c:positions"),
        ({"sites": "last"}, "let `sites` be c:positions"),
        ({"sites": "c"}, "let `sites` be c:positions"),  # a named map is pooled unless it says otherwise
        ({"sites": "d:positions"}, None),
        ({"sites": "auto"}, None),
        ({"sites": "c:positions, d:pooled"}, None),  # one of them tells
        ({"sites": "d:pooled", "task": "none"}, None),
    ],
)
def test_what_is_said_where_a_query_is_an_image(choices, advice):
    (head,) = analyse(load(unet("256, 256")), Settings(**choices)).heads
    assert (SAID in head.reason) == (advice is not None)
    assert advice is None or advice in head.reason


def test_where_no_map_is_coarse_enough_the_pooled_one_is_named():
    (head,) = analyse(load(unet("512, 512", stride=2))).heads
    assert head.task is Task.SEGMENTATION and f"{SAID}; for pixels let `sites` be d:positions" in head.reason


def test_convert_and_inspect_say_it(tmp_path, capsys):
    from gapa_onnx.cli import main

    onnx.save(unet(), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=images(40, seed=1))
    for command in (
        ["inspect", "net.onnx", "--sites", "d:pooled"],
        ["convert", "net.onnx", "--calib", "data.npz", "--sites", "d:pooled", "--k", "8", "-o", "out.onnx"],
        ["inspect", "out.onnx"],
    ):
        main([str(tmp_path / part) if part.endswith(("onnx", "npz")) else part for part in command])
        said = " ".join(capsys.readouterr().out.split())
        assert "one query per image" in said and "--sites" in said, command


def images(count: int, seed: int) -> np.ndarray:
    """Smooth ones: waves of a few directions."""
    rng = np.random.default_rng(seed)
    at = np.stack(np.meshgrid(np.arange(64), np.arange(64))) / 64
    made = [
        np.sin(2 * np.pi * np.tensordot(rng.normal(size=2), at, 1) + rng.uniform(0, 6)) for _ in range(count)
    ]
    return np.stack(made)[:, None].astype(np.float32)


@pytest.mark.parametrize("sites", ["auto", "c:positions"])
def test_strange_pixels_of_one_image_have_more_variance_than_the_others(sites):
    """A chequered square in a smooth image. With the mean of a map as the query no pixel is told from another but by
    the slopes behind the site."""
    strange = images(6, seed=2)
    square = np.zeros((64, 64), bool)
    square[20:44, 12:36] = True
    strange[:, 0, square] = np.indices((24, 24)).sum(axis=0).ravel() % 2 * 4 - 2.0
    areas = {}
    for asked in (sites, "d:pooled"):
        conversion = gapa_onnx.convert(unet(), {"x": images(60, seed=1)}, k=10, m=200, sites=asked)
        assert all(check.passed for check in conversion.checks)
        (var,) = gapa_onnx.session(conversion.model.SerializeToString()).run(["y_var"], {"x": strange})
        told = var.mean(axis=1)
        areas[asked] = [(one[square][:, None] > one[~square][None]).mean() for one in told]
    assert min(areas[sites]) > 0.9 and max(areas["d:pooled"]) < 0.6

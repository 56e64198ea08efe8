"""Which places are witnesses: what all features pass through, ends of stages, and names."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.small_models import parse

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel, load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.plan.layers import Network
from gapa_onnx.plan.witnesses import MOST, cut_tensors
from gapa_onnx.settings import Settings


def weights(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    generator = np.random.default_rng(0)
    return parse(text, **{name: generator.normal(size=shape) / 3 for name, shape in shapes.items()})


def conv(made: str, read: str, weight: str, stride: int = 1) -> str:
    return (
        f"{made} = Conv<kernel_shape=[3,3], pads=[1,1,1,1], strides=[{stride},{stride}]>({read}, {weight})\n"
    )


def source(body: str, given: str, made: str, **shapes: tuple[int, ...]) -> SourceModel:
    return load(weights(f"net ({given}) => ({made}) {{ {body} }}", **shapes))


def cuts(model: SourceModel, end: str) -> tuple[list[str], list[str]]:
    """The names of what everything passes through: with a layer between it and the end, and without."""
    before, behind = cut_tensors(Network.of(model), model.tensors[end])
    return [tensor.name for tensor in before], [tensor.name for tensor in behind]


def witnesses(model: SourceModel, **choices: str) -> list[str]:
    found = analyse(model, Settings(**choices)).witnesses
    assert all(site.rank == 2 or site.layout == "pooled" for site in found)  # one query for each sample
    return [site.output for site in found]


IMAGE = "float[n, 3, 16, 16] x"
POOLED = "p = GlobalAveragePool({})  h = Flatten(p)  y = MatMul(h, w)"


def residual() -> SourceModel:
    """A stem and three blocks, of which the second halves the size with a layer on its short way."""
    body = conv("s", "x", "k0") + "r0 = Relu(s)\n"
    body += (
        conv("a1", "r0", "k1")
        + "b1 = Relu(a1)\n"
        + conv("c1", "b1", "k2")
        + "d1 = Add(c1, r0)  r1 = Relu(d1)\n"
    )
    body += conv("a2", "r1", "k3", 2) + "b2 = Relu(a2)\n" + conv("c2", "b2", "k4") + conv("e2", "r1", "k5", 2)
    body += "d2 = Add(c2, e2)  r2 = Relu(d2)\n"
    body += conv("a3", "r2", "k6", 2) + "b3 = Relu(a3)\n" + conv("c3", "b3", "k7") + conv("e3", "r2", "k8", 2)
    body += "d3 = Add(c3, e3)  r3 = Relu(d3)\n"
    shapes = {"k0": (4, 3, 3, 3), "k1": (4, 4, 3, 3), "k2": (4, 4, 3, 3), "w": (10, 2)}
    shapes |= {"k3": (6, 4, 3, 3), "k4": (6, 6, 3, 3), "k5": (6, 4, 3, 3)}
    shapes |= {"k6": (10, 6, 3, 3), "k7": (10, 10, 3, 3), "k8": (10, 6, 3, 3)}
    return source(body + POOLED.format("r3"), IMAGE, "float[n, 2] y", **shapes)


def test_of_a_residual_network_the_ends_of_blocks():
    model = residual()
    before, behind = cuts(model, "r3")
    # No tensor inside a block: the short way leads around it.
    assert before == ["s", "r0", "d1", "r1", "d2", "r2"] and behind == ["d3"]
    assert [site.output for site in analyse(model).sites] == ["h"]
    assert witnesses(model) == ["r1", "r2"]  # the last of each size but the last, of which the site tells


def test_of_a_plain_network_the_last_map_of_each_size():
    body, shapes, read, channels = "", {"w": (24, 2)}, "x", 3
    for stage, width in enumerate((4, 6, 8, 10, 12, 24)):
        for layer in range(2):
            name = f"{stage}{layer}"
            body += conv(f"a{name}", read, f"k{name}") + f"r{name} = Relu(a{name})\n"
            shapes[f"k{name}"] = (width, channels, 3, 3)
            read, channels = f"r{name}", width
        if stage < 5:
            body += f"m{stage} = MaxPool<kernel_shape=[2,2], strides=[2,2]>({read})\n"
            read = f"m{stage}"
    model = source(body + POOLED.format(read), "float[n, 3, 64, 64] x", "float[n, 2] y", **shapes)
    found = witnesses(model)
    assert len(found) == MOST and found[0] == "r01"  # the first and the last, and what is evenly between
    every = ["r01", *(f"m{stage}" for stage in range(4)), *(f"r{stage}1" for stage in range(1, 5))]
    assert set(found) <= set(every)
    sizes = [model.tensors[name].shape[2] for name in found]
    assert sizes == sorted(set(sizes), reverse=True)  # each of another stage, from early to late


def test_what_is_concatenated_is_passed_by_all_where_it_joins():
    """Dense layers: each reads all before it, so only their joined outputs are no way around."""
    body = conv("a", "x", "k0") + conv("b", "a", "k1") + "ab = Concat<axis=1>(a, b)\n"
    body += (
        conv("c", "ab", "k2") + "abc = Concat<axis=1>(ab, c)\n" + conv("t", "abc", "k3", 2) + "u = Relu(t)\n"
    )
    body += conv("v", "u", "k4", 2)
    shapes = {
        "k0": (4, 3, 3, 3),
        "k1": (4, 4, 3, 3),
        "k2": (4, 8, 3, 3),
        "k3": (6, 12, 3, 3),
        "k4": (8, 6, 3, 3),
    }
    model = source(body + POOLED.format("v"), IMAGE, "float[n, 2] y", w=(8, 2), **shapes)
    before, behind = cuts(model, "h")
    assert before == ["a", "ab", "abc", "t", "u"] and behind == ["v", "p"]
    assert witnesses(model) == ["abc", "u"]


def test_nothing_past_a_skip_of_a_u_net_but_its_bottleneck():
    """What the decoder joins comes from every level, so nothing between the first level and the join is passed by all."""
    body = conv("a", "x", "k0") + "ra = Relu(a)\n" + conv("b", "ra", "k1", 2) + "rb = Relu(b)\n"
    body += 'u = Resize<mode="nearest">(rb, , scales)\n' + "j = Concat<axis=1>(ra, u)\n"
    body += conv("c", "j", "k2") + "rc = Relu(c)\n" + "y = Conv<kernel_shape=[1,1]>(rc, k3)"
    shapes = {"k0": (4, 3, 3, 3), "k1": (6, 4, 3, 3), "k2": (5, 10, 3, 3), "k3": (2, 5, 1, 1)}
    proto = weights(f"net ({IMAGE}) => (float[n, 2, 16, 16] y) {{ {body} }}", **shapes)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "scales"))
    model = load(proto)
    before, behind = cuts(model, "rc")
    assert before == ["a", "ra", "j"] and behind == ["c"]
    assert not {"b", "rb", "u"} & set(witnesses(model))


def test_two_inputs_meet_before_a_witness():
    body = "a = MatMul(x, v)  ra = Tanh(a)  b = MatMul(z, u)  rb = Tanh(b)  s = Add(ra, rb)  t = MatMul(s, q)  rt = Tanh(t)  o = MatMul(rt, q)  h = Relu(o)  y = MatMul(h, w)"
    shapes = {"v": (4, 5), "u": (3, 5), "q": (5, 5), "w": (5, 2)}
    model = source(body, "float[n, 4] x, float[n, 3] z", "float[n, 2] y", **shapes)
    before, _ = cuts(model, "h")
    assert before == ["s", "t", "rt"]  # not a or ra: z does not pass there
    assert witnesses(model) == ["rt"]  # the first that goes into an activation


def test_branches_of_one_input_meet_before_a_witness():
    """The short way of the first block begins at what is fed."""
    body = "a = MatMul(x, v)  b = Tanh(a)  c = MatMul(b, q)  d = MatMul(x, u)  e = Add(c, d)  f = Relu(e)  g = MatMul(f, q)  h = Relu(g)  y = MatMul(h, w)"
    model = source(body, "float[n, 4] x", "float[n, 2] y", v=(4, 5), u=(4, 5), q=(5, 5), w=(5, 2))
    assert cuts(model, "h")[0] == ["e", "f"] and witnesses(model) == ["f"]


def transformer(blocks: int = 6) -> SourceModel:
    """Attention of one head with a mask that every block reads, each with a residual."""
    body = "bias = Sub(mask, one)  big = Mul(bias, huge)  m = Unsqueeze(big, axis)  e = MatMul(x, w0)\n"
    shapes, read = {"w0": (6, 8), "w": (8, 3)}, "e"
    for at in range(blocks):
        for name in "qkv":
            body += f"{name}{at} = MatMul({read}, w{name}{at})  "
            shapes[f"w{name}{at}"] = (8, 8)
        body += (
            f"t{at} = Transpose<perm=[0,2,1]>(k{at})  l{at} = MatMul(q{at}, t{at})  b{at} = Add(l{at}, m)  "
            f"s{at} = Softmax<axis=-1>(b{at})  o{at} = MatMul(s{at}, v{at})  r{at} = Add({read}, o{at})  "
            f"f{at} = MatMul(r{at}, wf{at})  g{at} = Relu(f{at})  z{at} = Add(r{at}, g{at})\n"
        )
        shapes[f"wf{at}"] = (8, 8)
        read = f"z{at}"
    body += f"first = Gather<axis=1>({read}, zero)  h = Tanh(first)  y = MatMul(h, w)"
    model = weights(f"net (float[n, t, 6] x, float[n, t] mask) => (float[n, 3] y) {{ {body} }}", **shapes)
    for name, value in (
        ("one", np.float32(1)),
        ("huge", np.float32(1e4)),
        ("axis", [1]),
        ("zero", np.int64(0)),
    ):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    return load(model)


def test_of_a_transformer_blocks_a_third_and_two_thirds_of_the_way():
    model = transformer()
    before, _ = cuts(model, "h")
    assert before == ["e", *(name for at in range(6) for name in (f"r{at}", f"z{at}"))][:-1]  # and then z5
    found = analyse(model).witnesses
    assert [site.layout.value for site in found] == ["pooled", "pooled"]
    places = [before.index(site.output) for site in found]
    assert places == [len(before) // 3, 2 * len(before) // 3]
    assert {site.mask for site in found} == {"mask"}  # means are over what is no padding


def test_where_sizes_are_open_stages_are_told_by_width():
    body, shapes, read, channels = "", {"w": (8, 2)}, "x", 3
    for stage, width in enumerate((4, 4, 6, 6, 8)):
        body += conv(f"a{stage}", read, f"k{stage}", 1 + stage % 2) + f"r{stage} = Relu(a{stage})\n"
        shapes[f"k{stage}"], read, channels = (width, channels, 3, 3), f"r{stage}", width
    model = source(body + POOLED.format(read), "float[n, 3, height, width] x", "float[n, 2] y", **shapes)
    assert witnesses(model) == ["r1", "r3"]


def recurrent(first: str) -> onnx.ModelProto:
    """Four LSTMs, of sequences whose first axis is that of `time` or that of samples."""
    time = first == "time"
    layout = "" if time else "layout=1, "
    body = "".join(
        f"s{at}, hn{at}, cn{at} = LSTM<{layout}hidden_size=6>({f'q{at - 1}' if at else 'x'}, w{at}, r{at})  "
        f"q{at} = Squeeze(s{at}, direction)\n"
        for at in range(4)
    )
    body += f"last = Gather<axis={0 if time else 1}>(q3, end)  y = MatMul(last, w)"
    shapes = {f"w{at}": (1, 24, 6 if at else 4) for at in range(4)} | {
        f"r{at}": (1, 24, 6) for at in range(4)
    }
    given = "float[7, n, 4] x" if time else "float[n, 7, 4] x"
    proto = weights(f"net ({given}) => (float[n, 2] y) {{ {body} }}", w=(6, 2), **shapes)
    for name, value in (("direction", np.array([1 if time else 2])), ("end", np.array(-1))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.int64), name))
    return proto


def test_layers_of_a_recurrent_network():
    model = load(recurrent("samples"))
    before, behind = cuts(model, "last")
    assert [name for name in before if name.startswith("q")] == ["q0", "q1", "q2"] and behind[-1] == "q3"
    found = analyse(model).witnesses
    assert [site.layout.value for site in found] == ["pooled", "pooled"]
    assert [site.output for site in found] == [before[len(before) // 3], before[2 * len(before) // 3]]


def test_an_axis_of_time_is_none_of_samples():
    proto = recurrent("time")
    assert witnesses(load(proto)) == []
    x = np.random.default_rng(0).normal(size=(7, 60, 4)).astype(np.float32)
    batches = [{"x": x[:, at : at + 6]} for at in range(0, 60, 6)]
    conversion = gapa_onnx.convert(proto, batches, m=20, k=5, task="classification")
    assert all(check.passed for check in conversion.checks)


# ------------------------------------------------------------------------------- as asked


MLP = "a = MatMul(x, v)  b = Tanh(a)  c = MatMul(b, q)  d = Tanh(c)  e = MatMul(d, q)  h = Tanh(e)  y = MatMul(h, w)"
MLP_SHAPES = {"v": (4, 5), "q": (5, 5), "w": (5, 2)}


def mlp() -> SourceModel:
    return source(MLP, "float[n, 4] x", "float[n, 2] y", **MLP_SHAPES)


@pytest.mark.parametrize(
    "choices, sites, found",
    [
        ({}, ["h"], ["b"]),
        ({"witnesses": "none"}, ["h"], []),
        ({"witnesses": "d"}, ["h"], ["d"]),
        ({"witnesses": "d, b"}, ["h"], ["d", "b"]),
        ({"witnesses": "h"}, ["h"], []),  # a site tells already
        ({"witnesses": "e"}, ["h"], []),  # what it compares is the same
        ({"witnesses": "d,h,d"}, ["h"], ["d"]),
        ({"sites": "d"}, ["d"], ["b"]),  # named sites keep their witnesses
        ({"sites": "all"}, ["b", "d", "h"], []),
        ({"sites": "b"}, ["b"], []),  # nothing lies before
        ({"score": "variance"}, ["h"], []),
        ({"score": "epistemic"}, ["h"], []),
    ],
)
def test_sites_and_witnesses(choices, sites, found):
    plan = analyse(mlp(), Settings(**choices))
    assert [site.output for site in plan.sites] == sites
    assert [site.output for site in plan.witnesses] == found
    assert plan.places == (*plan.sites, *plan.witnesses)


def test_the_paper_has_no_witnesses():
    settings = Settings().as_in_paper()
    assert settings.witnesses == "none" and settings.score == "variance" and settings.metric == "euclidean"
    assert analyse(mlp(), settings).witnesses == ()


@pytest.mark.parametrize("asked, told", [("tanh9", "'tanh9'"), (" , ", "no witness is named")])
def test_names_that_are_not_there(asked, told, tmp_path, capsys):
    with pytest.raises(UserError, match=told):
        analyse(mlp(), Settings(witnesses=asked))
    onnx.save(
        weights(f"net (float[n, 4] x) => (float[n, 2] y) {{ {MLP} }}", **MLP_SHAPES), tmp_path / "m.onnx"
    )
    np.savez(tmp_path / "d.npz", x=np.zeros((60, 4), np.float32))
    command = ["convert", str(tmp_path / "m.onnx"), "--calib", str(tmp_path / "d.npz"), "--witnesses", asked]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert told in error and "Traceback" not in error and not (tmp_path / "m.gapa.onnx").exists()


def test_a_vector_without_samples_is_no_witness():
    body = "g = ReduceMean<axes=[0], keepdims=0>(x)  a = MatMul(x, v)  h = Tanh(a)  s = Add(h, g)  y = MatMul(s, w)"
    model = source(body, "float[n, 5] x", "float[n, 2] y", v=(5, 5), w=(5, 2))
    with pytest.raises(UserError, match="no axis of samples"):
        analyse(model, Settings(witnesses="g"))

"""Which places are witnesses: what all features pass through, ends of stages, and names."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.decoders import decoder
from support.small_models import parse

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel, load
from gapa_onnx.model.splice import exposed
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.plan.cuts import cut_tensors
from gapa_onnx.plan.layers import Network
from gapa_onnx.plan.witnesses import MOST
from gapa_onnx.record import read
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
    return [cut.tensor.name for cut in before], [cut.tensor.name for cut in behind]


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
    assert witnesses(model) == ["ra", "j"]


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
    given = "float[time, n, 4] x" if time else "float[n, 7, 4] x"
    proto = weights(f"net ({given}) => (float[n, 2] y) {{ {body} }}", w=(6, 2), **shapes)
    for name, value in (("direction", np.array([1 if time else 2])), ("end", np.array(-1))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value.astype(np.int64), name))
    return proto


@pytest.mark.parametrize("first, samples", [("samples", 0), ("time", 1)])
def test_layers_of_a_recurrent_network(first, samples):
    model = load(recurrent(first))
    before, behind = cuts(model, "last")
    assert [name for name in before if name.startswith("q")] == ["q0", "q1", "q2"] and behind[-1] == "q3"
    found = analyse(model).witnesses
    assert [(site.output, site.layout.value, site.samples) for site in found] == [
        ("q1", "pooled", samples),
        ("q2", "pooled", samples),
    ]
    (named,) = analyse(model, Settings(witnesses="q0")).witnesses
    assert named.samples == samples


def test_two_recurrent_layers_with_time_first_between_them():
    """As PyTorch writes `batch_first`: turned at both ends."""
    body = (
        "t = Transpose<perm=[1,0,2]>(x)  s0, h0, c0 = LSTM<hidden_size=6>(t, w0, r0)  q0 = Squeeze(s0, one)\n"
    )
    body += "s1, h1, c1 = LSTM<hidden_size=6>(q0, w1, r1)  q1 = Squeeze(s1, one)  u = Transpose<perm=[1,0,2]>(q1)\n"
    body += "last = Gather<axis=1>(u, end)  y = MatMul(last, w)"
    shapes = {"w0": (1, 24, 4), "w1": (1, 24, 6), "r0": (1, 24, 6), "r1": (1, 24, 6), "w": (6, 2)}
    proto = with_whole(
        weights(f"net (float[n, 7, 4] x) => (float[n, 2] y) {{ {body} }}", **shapes), one=[1], end=-1
    )
    (found,) = analyse(load(proto)).witnesses  # not the same again before it is squeezed
    assert (found.output, found.samples) == ("q0", 1)


def test_both_directions_of_a_recurrent_layer_are_features():
    body = 's0, h0, c0 = LSTM<hidden_size=6, direction="bidirectional">(x, w0, r0)\n'
    body += "t0 = Transpose<perm=[0,2,1,3]>(s0)  q0 = Reshape(t0, shape)\n"
    body += "s1, h1, c1 = LSTM<hidden_size=6>(q0, w1, r1)  q1 = Squeeze(s1, one)\n"
    body += "last = Gather<axis=0>(q1, end)  y = MatMul(last, w)"
    shapes = {"w0": (2, 24, 4), "w1": (1, 24, 12), "r0": (2, 24, 6), "r1": (1, 24, 6), "w": (6, 2)}
    proto = weights(f"net (float[7, n, 4] x) => (float[n, 2] y) {{ {body} }}", **shapes)
    (found,) = analyse(load(with_whole(proto, one=[1], end=-1, shape=[0, 0, 12]))).witnesses
    assert (found.output, found.axis, found.samples) == ("q0", 2, 1)


def masked_recurrent() -> onnx.ModelProto:
    """Words with padding, and time before samples between the layers."""
    body = "e = Gather(table, ids)  f = Cast<to=1>(mask)  g = Unsqueeze(f, two)  m = Mul(e, g)\n"
    body += (
        "t = Transpose<perm=[1,0,2]>(m)  s0, h0, c0 = LSTM<hidden_size=6>(t, w0, r0)  q0 = Squeeze(s0, one)\n"
    )
    body += "s1, h1, c1 = LSTM<hidden_size=6>(q0, w1, r1)  q1 = Squeeze(s1, one)\n"
    body += "last = Gather<axis=0>(q1, end)  y = MatMul(last, w)"
    shapes = {"table": (30, 4), "w0": (1, 24, 4), "w1": (1, 24, 6), "r0": (1, 24, 6), "r1": (1, 24, 6)}
    given = "int64[n, time] ids, int64[n, time] mask"
    proto = weights(f"net ({given}) => (float[n, 2] y) {{ {body} }}", w=(6, 2), **shapes)
    return with_whole(proto, one=[1], two=[2], end=-1)


@pytest.mark.parametrize("masked", [False, True])
def test_the_mean_over_time_where_it_comes_first(masked):
    """The query of the file is the mean in float64 over the axis of time, of what is no padding."""
    generator = np.random.default_rng(0)
    if masked:
        proto = masked_recurrent()
        lengths = generator.integers(3, 8, size=(80, 1))
        mask = (np.arange(7) < lengths).astype(np.int64)
        batches = [{"ids": generator.integers(0, 30, (80, 7)), "mask": mask}]
        place, weight = "q0", mask.T[..., None]
    else:
        proto = recurrent("time")
        batches = [{"x": generator.normal(size=(7, 8, 4)).astype(np.float32)} for _ in range(10)]
        place, weight = "q1", np.ones((7, 8, 1))
    conversion = gapa_onnx.convert(proto, batches, m=20, k=5, task="classification", metric="euclidean")
    assert all(check.passed for check in conversion.checks)
    record = next(one for one in read(conversion.model).witnesses if one.output == place)
    assert record.rows == 80
    node = next(node for node in conversion.model.graph.node if node.name == record.operator)
    shown = exposed(conversion.model, [place, node.input[0], record.share])
    sequence, query, share = gapa_onnx.session(shown.SerializeToString()).run(
        [place, node.input[0], record.share], batches[0]
    )
    expected = (sequence.astype(np.float64) * weight).sum(axis=0) / weight.sum(axis=0)
    # Sums of 7 numbers below 1 in single precision.
    np.testing.assert_allclose(query, expected, rtol=0, atol=8 * np.finfo(np.float32).eps)
    assert query.shape == (weight.shape[1], 6) and share.shape == (weight.shape[1], 1)
    if masked:  # all rows in one batch
        fit = next(one for one in conversion.calibration.places if one.site.output == place)
        spread = sequence[weight[..., 0] > 0].astype(np.float64).var(axis=0)
        np.testing.assert_allclose(fit.prior_var.reshape(-1), spread, rtol=0.005)  # of n or n − 1 numbers


# --------------------------------------------------------------------------- kinds of networks


def with_whole(proto: onnx.ModelProto, **numbers: object) -> onnx.ModelProto:
    """The model with further constants: whole numbers, or arrays as they are."""
    for name, value in numbers.items():
        array = value if isinstance(value, np.ndarray) else np.array(value, np.int64)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


def heads_of_attention(blocks: int, read: str, rotary: bool = False, width: int = 8) -> tuple[str, dict]:
    """Blocks whose attention has two heads, of pre-norm; the last makes `z{blocks - 1}`."""
    body, shapes = "", {"gain": (width,)}
    for at in range(blocks):
        body += f"n{at} = LayerNormalization({read}, gain)\n"
        for name in "qkv":
            body += f"{name}{at} = MatMul(n{at}, w{name}{at})  {name}s{at} = Reshape({name}{at}, split)  "
            body += f"{name}t{at} = Transpose<perm=[0,2,1,3]>({name}s{at})\n"
            shapes[f"w{name}{at}"] = (width, width)
        if rotary:
            body += f"qr{at} = Mul(qt{at}, turns)  kr{at} = Mul(kt{at}, turns)\n"
        q, k = (f"qr{at}", f"kr{at}") if rotary else (f"qt{at}", f"kt{at}")
        body += (
            f"kx{at} = Transpose<perm=[0,1,3,2]>({k})  l{at} = MatMul({q}, kx{at})  "
            f"p{at} = Softmax<axis=-1>(l{at})  o{at} = MatMul(p{at}, vt{at})  "
            f"ot{at} = Transpose<perm=[0,2,1,3]>(o{at})  oj{at} = Reshape(ot{at}, joined)  "
            f"d{at} = MatMul(oj{at}, wo{at})  r{at} = Add({read}, d{at})\n"
            f"g{at} = LayerNormalization(r{at}, gain)  f{at} = MatMul(g{at}, wf{at})  a{at} = Relu(f{at})  "
            f"b{at} = MatMul(a{at}, wb{at})  z{at} = Add(r{at}, b{at})\n"
        )
        shapes |= {f"wo{at}": (width, width), f"wf{at}": (width, 16), f"wb{at}": (16, width)}
        read = f"z{at}"
    return body, shapes


POOLINGS = {
    "mean": "h = ReduceMean<axes=[1], keepdims=0>(end)  y = MatMul(h, w)",
    "first": "h = Gather<axis=1>(end, zero)  y = MatMul(h, w)",
    "pooler": "t = Gather<axis=1>(end, zero)  u = MatMul(t, wp)  h = Tanh(u)  y = MatMul(h, w)",
}
SPLIT = {"split": [0, 0, 2, 4], "joined": [0, 0, 8], "zero": 0}


def encoder(pooling: str, lookup: str = "words = Gather(table, ids)", time: object = 5) -> onnx.ModelProto:
    """Words and the kinds of segments, both looked up, and positions that are the same for all."""
    blocks, shapes = heads_of_attention(3, "e")
    body = f"{lookup}  kinds = Gather(segments, types)  s = Add(words, kinds)  e = Add(s, places)\n"
    body += f"{blocks} end = LayerNormalization(z2, gain)  {POOLINGS[pooling]}"
    shapes |= {"table": (30, 8), "segments": (2, 8), "places": (5, 8), "wp": (8, 8), "w": (8, 3)}
    given = f"int64[n, {time}] ids, int64[n, {time}] types"
    return with_whole(weights(f"net ({given}) => (float[n, 3] y) {{ {body} }}", **shapes), **SPLIT)


RESIDUALS = [name for at in range(3) for name in (f"r{at}", f"z{at}")]


@pytest.mark.parametrize("time", [5, "time"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_of_an_encoder_what_its_blocks_hand_on(pooling, time):
    """Inside of attention nothing is passed by all: the words lead around it."""
    model = load(encoder(pooling, time=time))
    before, _ = cuts(model, "h")
    assert before[:6] == ["s", "e", "r0", "z0", "r1", "z1"]
    # Of 18 layers the first block has 6, and the second as many. What a pooler reads is the first of the vectors.
    assert witnesses(model) == ["z0", "z1", *(["t"] if pooling == "pooler" else [])]


@pytest.mark.parametrize("time", [5, "time"])
def test_a_site_inside_of_a_block_does_not_end_the_stage(time):
    """It is wider than what blocks hand on, and where lengths are open widths tell stages apart."""
    blocks, shapes = heads_of_attention(6, "e")
    body = f"e = Gather(table, ids) {blocks} y = LayerNormalization(z5, gain)"
    proto = weights(
        f"net (int64[n, {time}] ids) => (float[n, {time}, 8] y) {{ {body} }}", table=(30, 8), **shapes
    )
    assert witnesses(load(with_whole(proto, **SPLIT)), sites="a5") == ["z1", "z3"]


QUANTISED = {
    "table": "real = DequantizeLinear(whole, step, none)  words = Gather(real, ids)",
    "vectors": "some = Gather(whole, ids)  words = DequantizeLinear(some, step, none)",
    "rows": "some = Gather(whole, ids)  real = Cast<to=1>(some)  by = Gather(steps, ids)  words = Mul(real, by)",
}


@pytest.mark.parametrize("form", QUANTISED)
def test_a_quantised_table_begins_features(form):
    proto = encoder("mean", QUANTISED[form])
    whole = np.random.default_rng(1).integers(-100, 100, (30, 8)).astype(np.int8)
    real = {"step": np.array(0.01, np.float32), "steps": np.full((30, 1), 0.01, np.float32)}
    model = load(with_whole(proto, whole=whole, none=np.array(0, np.int8), **real))
    assert witnesses(model) == ["z0", "z1"]


def test_a_table_in_blocks_begins_features():
    proto = encoder(
        "mean", "words = com.microsoft.GatherBlockQuantized<block_size=16, bits=8>(whole, ids, steps)"
    )
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    model = load(
        with_whole(proto, whole=np.full((30, 8), 130, np.uint8), steps=np.full((30, 1), 0.01, np.float32))
    )
    before, _ = cuts(model, "h")
    assert before == ["s", "e", *RESIDUALS[:-1]]


def test_what_onnxruntime_has_fused_begins_features():
    """Beside the vectors of words it makes a mask, which every block reads."""
    body = "e, lengths = com.microsoft.EmbedLayerNormalization(ids, , table, places, , gain, shift, , mask)\n"
    shapes, read = {"table": (30, 8), "places": (9, 8), "gain": (8,), "shift": (8,), "w": (8, 3)}, "e"
    for at in range(3):
        body += f"a{at} = com.microsoft.Attention<num_heads=2>({read}, wa{at}, ba{at}, lengths)\n"
        body += f"r{at} = com.microsoft.SkipLayerNormalization({read}, a{at}, gain, shift)  f{at} = MatMul(r{at}, wf{at})\n"
        body += f"z{at} = com.microsoft.SkipLayerNormalization(r{at}, f{at}, gain, shift)\n"
        shapes |= {f"wa{at}": (8, 24), f"ba{at}": (24,), f"wf{at}": (8, 8)}
        read = f"z{at}"
    body += f"end = Identity({read})  {POOLINGS['first']}"
    proto = weights(f"net (int32[n, t] ids, int32[n, t] mask) => (float[n, 3] y) {{ {body} }}", **shapes)
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    model = load(with_whole(proto, zero=0))
    assert cuts(model, "h")[0] == ["e", *RESIDUALS[:-1]]


def test_turns_of_positions_are_no_way_around_blocks():
    """A table that every block multiplies queries and keys with, at positions that are fed."""
    blocks, shapes = heads_of_attention(3, "e", rotary=True)
    body = "e = Gather(table, ids)  found = Gather(angles, places)  turns = Unsqueeze(found, one)\n"
    body += f"{blocks} end = Identity(z2)  {POOLINGS['mean']}"
    given = "int64[n, t] ids, int64[n, t] places"
    proto = weights(
        f"net ({given}) => (float[n, 3] y) {{ {body} }}", table=(30, 8), angles=(9, 4), w=(8, 3), **shapes
    )
    model = load(with_whole(proto, one=[1], **SPLIT))
    assert cuts(model, "h")[0] == ["e", *RESIDUALS[:-1]]
    assert witnesses(model) == ["z0", "z1"]


def test_what_is_looked_up_joins_other_numbers_once():
    """A category beside numbers: what lies before they meet is not passed by all."""
    body = "a = MatMul(x, v)  b = Tanh(a)  c = Gather(table, kind)  d = Concat<axis=1>(b, c)  e = MatMul(d, q)  f = Tanh(e)  g = MatMul(f, r)  h = Tanh(g)  y = MatMul(h, w)"
    shapes = {"v": (4, 5), "table": (6, 3), "q": (8, 5), "r": (5, 5), "w": (5, 2)}
    model = source(body, "float[n, 4] x, int64[n] kind", "float[n, 2] y", **shapes)
    assert cuts(model, "h")[0] == ["d", "e", "f"] and witnesses(model) == ["f"]


@pytest.mark.parametrize("blocks", [3, 12])
def test_of_patches_and_a_class_token_blocks(blocks):
    """A map, tokens, and one token more are three sizes, but only the last holds layers."""
    body = "m = Conv<kernel_shape=[4,4], strides=[4,4]>(x, k)  f = Reshape(m, flat)  t = Transpose<perm=[0,2,1]>(f)\n"
    body += "shape = Shape(x)  n = Slice(shape, nought, one)  many = Concat<axis=0>(n, rest)\n"
    body += "first = Expand(token, many)  c = Concat<axis=1>(first, t)  e = Add(c, places)\n"
    inner, shapes = heads_of_attention(blocks, "e")
    body += f"{inner} end = LayerNormalization(z{blocks - 1}, gain)  {POOLINGS['first']}"
    shapes |= {"k": (8, 3, 4, 4), "token": (1, 1, 8), "places": (17, 8), "w": (8, 3)}
    proto = weights(f"net ({IMAGE}) => (float[n, 3] y) {{ {body} }}", **shapes)
    model = load(with_whole(proto, flat=[0, 8, 16], nought=[0], one=[1], rest=[1, 8], **SPLIT))
    assert {"m", "f", "t", "c", "e"} <= set(cuts(model, "h")[0])
    assert witnesses(model) == [f"z{blocks // 3 - 1}", f"z{2 * blocks // 3 - 1}"]


def test_a_sum_that_its_norm_hands_on_is_passed_by_everything():
    """Fused norms give two tensors, a norm and the sum that it is of: all features are in the second."""
    body, shapes = "s0 = MatMul(x, w0)\n", {"w0": (4, 8), "gain": (8,), "w": (8, 3)}
    for at in range(6):
        read = f"n{at}" if at else "s0"
        body += f"a{at} = MatMul({read}, u{at})  t{at} = Tanh(a{at})  b{at} = MatMul(t{at}, v{at})\n"
        skip = f"com.microsoft.SkipSimplifiedLayerNormalization(s{at}, b{at}, gain)"
        body += f"n{at + 1}, mean{at}, inverse{at}, s{at + 1} = {skip}\n"
        shapes |= {f"u{at}": (8, 8), f"v{at}": (8, 8)}
    body += "y = MatMul(n6, w)"
    generator = np.random.default_rng(0)
    model = parse(f"net (float[n, t, 4] x) => (float[n, t, 3] y) {{ {body} }}",
                  **{name: generator.normal(size=shape) / 3 for name, shape in shapes.items()})  # fmt: skip
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    before, _ = cuts(load(model), "n6")
    assert [name for name in before if name[0] in "sn"] == ["s0", "s1", "s2", "s3", "s4", "s5"]


@pytest.mark.parametrize("cached", [False, True])
def test_of_a_decoder_the_residual_stream(cached):
    """One query for each position, as each token has a score of its own."""
    model = load(decoder(blocks=6, cached=cached))
    found = analyse(model, Settings()).witnesses
    assert [site.output for site in found] == ["x4"]  # two thirds of the way from x0, the words, to x6
    assert all(site.layout == "rows" for site in found)


def test_of_lenet_maps_and_the_first_vector():
    body = conv("a", "x", "k0") + "ra = Relu(a)  pa = MaxPool<kernel_shape=[2,2], strides=[2,2]>(ra)\n"
    body += conv("b", "pa", "k1") + "rb = Relu(b)  pb = MaxPool<kernel_shape=[2,2], strides=[2,2]>(rb)\n"
    body += (
        "f = Flatten(pb)  c = MatMul(f, v)  rc = Relu(c)  d = MatMul(rc, u)  h = Relu(d)  y = MatMul(h, w)"
    )
    shapes = {"k0": (4, 3, 3, 3), "k1": (6, 4, 3, 3), "v": (96, 12), "u": (12, 8), "w": (8, 2)}
    model = source(body, IMAGE, "float[n, 2] y", **shapes)
    assert witnesses(model) == ["ra", "pb", "rc"]


def test_of_layers_without_pooling_one_place_each():
    """What goes into an activation and what comes out of it is nearly the same."""
    body = conv("a", "x", "k0", 2) + "ra = Relu(a)\n" + conv("b", "ra", "k1", 2) + "rb = Relu(b)\n"
    body += conv("c", "rb", "k2") + "rc = Relu(c)\n" + POOLED.format("rc")
    shapes = {"k0": (4, 3, 3, 3), "k1": (6, 4, 3, 3), "k2": (8, 6, 3, 3), "w": (8, 2)}
    assert witnesses(source(body, IMAGE, "float[n, 2] y", **shapes)) == ["ra", "rb"]


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

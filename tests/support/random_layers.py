"""Random networks on feature maps, as people build them: channels first or last, turned by Transpose, cut by Split
and joined by Concat between layers.

The variance of the input is a number per position times a number per channel, as that of a site is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx
from cases import element_type
from hypothesis import strategies as st

from gapa_onnx.model.load import load
from gapa_onnx.model.splice import splice
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.propagation import propagate
from gapa_onnx.variance.sites import Layout, Site
from gapa_onnx.variance.values import Scaled
from support.numpy_rules import Arrays, Moments, Unfit
from support.random_graphs import OPSETS, STD, Draft, RandomGraph

FEWEST, MOST = 2, 6  #: blocks


@dataclass(frozen=True, eq=False)
class LayeredGraph(RandomGraph):
    """A graph whose only uncertain input is a feature map."""

    scale: np.ndarray  #: 1 long on the axis of the channels
    profile: np.ndarray  #: one number per channel, in a shape that broadcasts against the map
    axis: int  #: of the channels: 1, or -1 for the last

    def scaled(self, dtype: type) -> onnx.ModelProto:
        """The model with variances that come from scale · profile, which is not written out: `x0/scale` is fed."""
        source = load(self.model(dtype))

        def birth(graph: VarianceGraph, site: Site) -> Value:
            scale = graph.tensor(f"{site.output}/scale", dtype)
            return Scaled(scale, graph.constant(self.profile.astype(dtype)), self.axis)

        site = Site("x0", "x0", "x0", None, Layout.ROWS, None)
        result = propagate(source, [site], birth)
        assert not result.refused, result.refused
        named = {
            o: result.graph.output(v, f"{o}_var") for o in self.outputs if (v := result.variances.get(o))
        }
        infos = [
            onnx.helper.make_tensor_value_info(v.name, element_type(dtype), None) for v in named.values()
        ]
        model = splice(source.proto, result.graph.to_proto(list(named.values())), infos)
        fed = onnx.helper.make_tensor_value_info("x0/scale", element_type(dtype), self.scale.shape)
        model.graph.input.append(fed)
        return model

    def scaled_feeds(self, dtype: type) -> Arrays:
        return self.feeds(dtype) | {"x0/scale": self.scale.astype(dtype)}


@st.composite
def layered_graphs(draw: st.DrawFn) -> LayeredGraph:
    draft = Maps(draw(st.sampled_from(OPSETS)), draw(st.integers(0, 2**32 - 1)))
    return draft.network(draw(st.integers(FEWEST, MOST)))


class Maps(Draft):
    """A network that grows by blocks; each reads the map that the one before it made."""

    def __init__(self, opset: int, seed: int):
        super().__init__(opset, seed, tree=False)

    def _draw_inputs(self) -> None:
        self.now, self.last = "x0", self.coin()
        spatial = [self.integer(2, 3) for _ in range(self.integer(1, 2))]
        shape = [1 if len(spatial) > 1 else self.integer(1, 2), self.integer(2, 3), *spatial]
        ones = [1] * len(spatial)
        scale = STD**2 * self.rng.uniform(0.5, 1.5, (shape[0], 1, *spatial))
        profile = self.rng.uniform(0.5, 2, (shape[1], *ones))
        mean = self.numbers(tuple(shape))
        if self.last:
            mean, scale, profile = np.moveaxis(mean, 1, -1), np.moveaxis(scale, 1, -1), profile.reshape(-1)
        self.scale, self.profile = scale, profile
        support = np.eye(mean.size, dtype=bool)
        self.tensors["x0"] = Moments(np.ascontiguousarray(mean), scale * profile, support)
        self.inputs.append("x0")

    def network(self, blocks: int) -> LayeredGraph:
        for _ in range(blocks):
            block = self.choose(layer, layer, joined, cut, activation, turned, scaled, pooled)
            before = self.now, self.last
            try:
                block(self)
                self.drawn.append(block.__name__)
            except Unfit:
                self.now, self.last = before  # what was added of it stays, as further outputs
        if not self.nodes:
            (self.now,) = self.add("Tanh", self.now)
        found = self._finished()
        return LayeredGraph(
            **vars(found), scale=self.scale, profile=self.profile, axis=-1 if self.tensors_last else 1
        )

    @property
    def tensors_last(self) -> bool:
        return self.profile.ndim == 1

    @property
    def channels(self) -> int:
        return self.mean(self.now).shape[self.axis_of_channels]

    @property
    def axis_of_channels(self) -> int:
        return self.rank(self.now) - 1 if self.last else 1

    def turn(self, last: bool) -> None:
        """Move the channels to the end, or from it."""
        if last != self.last:
            rank = self.rank(self.now)
            perm = [0, *range(2, rank), 1] if last else [0, rank - 1, *range(1, rank - 1)]
            (self.now,) = self.add("Transpose", self.now, perm=perm)
            self.last = last

    def along(self, numbers: np.ndarray) -> str:
        """A constant with one number per channel."""
        behind = 0 if self.last else self.rank(self.now) - 2
        return self.constant(numbers.reshape(-1, *[1] * behind))


# -------------------------------------------------------------------------- blocks


def layer(g: Maps) -> None:
    g.choose(convolution, convolution, dense)(g)


def convolution(g: Maps) -> None:
    """In the layout that it wants, with Transposes around where the map has another."""
    was_last, channels = g.last, g.channels
    g.turn(last=False)
    kernel = [g.integer(1, min(2, size)) for size in g.mean(g.now).shape[2:]]
    group = g.choose(1, 1, channels)
    weight = g.numbers((group * g.integer(1, 2), channels // group, *kernel))
    pads = [0] * len(kernel) + [k - 1 for k in kernel]
    (g.now,) = g.add("Conv", g.now, g.constant(weight), group=group, kernel_shape=kernel, pads=pads)
    if g.coin():
        g.turn(last=was_last)


def dense(g: Maps) -> None:
    was_last = g.last
    g.turn(last=True)
    (g.now,) = g.add("MatMul", g.now, g.constant(g.numbers((g.channels, g.integer(2, 3)))))
    if g.coin():
        (g.now,) = g.add("Add", g.now, g.constant(g.numbers((g.channels,))))
    if g.coin():
        g.turn(last=was_last)


def activation(g: Maps) -> None:
    (g.now,) = g.add(g.choose("Relu", "Tanh", "Sigmoid"), g.now)


def turned(g: Maps) -> None:
    g.turn(last=not g.last)


def scaled(g: Maps) -> None:
    """A number per channel, as BatchNormalization has it with the channels first."""
    if not g.last and g.coin():
        four = [g.numbers((g.channels,)) for _ in range(3)] + [g.rng.uniform(0.3, 2, g.channels)]
        (g.now,) = g.add("BatchNormalization", g.now, *map(g.constant, four), epsilon=1e-3)
    else:
        (g.now,) = g.add("Mul", g.now, g.along(g.numbers((g.channels,))))


def pooled(g: Maps) -> None:
    sizes = g.mean(g.now).shape[2:]
    if g.last or math.prod(sizes) < 4 or min(sizes) < 2:
        raise Unfit("too small")
    ones = [1] * len(sizes)
    (g.now,) = g.add(g.choose("AveragePool", "MaxPool"), g.now, kernel_shape=[2, *ones[1:]], strides=ones)


def _branch(g: Maps, start: str, last: bool, grow: Callable[[Maps], None] | None) -> tuple[str, bool]:
    g.now, g.last = start, last
    if grow is not None:
        grow(g)
        g.turn(last)
    return g.now, g.last


def joined(g: Maps) -> None:
    """Two branches of one map, or a map and what is certain, one behind the other."""
    start, last, axis = g.now, g.last, g.axis_of_channels
    first, _ = _branch(g, start, last, g.choose(layer, activation))
    if g.integer(0, 2) == 0:
        second = g.constant(g.numbers(g.mean(first).shape))
    else:
        second, _ = _branch(g, start, last, g.choose(layer, activation, None))
    shapes = [np.delete(g._operand(name).mean.shape, axis).tolist() for name in (first, second)]
    if shapes[0] != shapes[1]:
        raise Unfit("maps of different sizes")
    (g.now,) = g.add("Concat", *g.choose((first, second), (second, first)), axis=axis)
    g.last = last


def cut(g: Maps) -> None:
    """The channels in two parts; one goes through a layer or an activation, and both are joined again."""
    channels, last, axis = g.channels, g.last, g.axis_of_channels
    if channels < 2:
        raise Unfit("one channel")
    size = g.integer(1, channels - 1)
    sizes = (size, channels - size)
    if g.opset >= 13:
        parts = g.add("Split", g.now, g.ints(*sizes), outputs=2, axis=axis)
    else:
        parts = g.add("Split", g.now, outputs=2, axis=axis, split=list(sizes))
    changed, _ = _branch(g, parts[0], last, g.choose(layer, activation))
    if np.delete(g.mean(changed).shape, axis).tolist() != np.delete(g.mean(parts[1]).shape, axis).tolist():
        raise Unfit("maps of different sizes")
    (g.now,) = g.add("Concat", *g.choose((changed, parts[1]), (parts[1], changed)), axis=axis)
    g.last = last

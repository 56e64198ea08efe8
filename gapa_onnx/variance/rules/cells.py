"""One step of an RNN, GRU or LSTM: the next state, its mean and its variance.

With U_k = W_k x + R_k h what a gate k receives, and for a unit j

    M_kl = cov(U_k, U_l)_j = Σ_m W_k,jm W_l,jm v_x,m + Σ_m R_k,jm R_l,jm v_h,m

the variance of Σ_k a_k U_k is Σ_kl a_k a_l M_kl: gates that read the same input are not taken for
independent, since the products of their weights are a matrix like the weights themselves. A step is so
exact to first order where the units of the state that it starts from are uncorrelated.

There is no term v_a v_b for the products of gates: the variance of a sigmoid by its slope has no upper
bound, and such terms make long sequences explode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from itertools import combinations_with_replacement

from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.rules.view import NodeView

State = dict[str, Value]  #: means h (and c), variances v_h (and v_c), the covariance hc; each (B, H)

# ------------------------------------------------------------------------- activations

Activation = Callable[[Value], tuple[Value, Value | float]]  #: the value and the slope


def _relu(x: Value) -> tuple[Value, Value]:
    on = x > 0
    return x * on, on


def _sigmoid(x: Value) -> tuple[Value, Value]:
    y = x.sigmoid()
    return y, y * (1 - y)


def _tanh(x: Value) -> tuple[Value, Value]:
    y = x.tanh()
    return y, 1 - y * y


def _softsign(x: Value) -> tuple[Value, Value]:
    scale = 1 / (1 + x.abs())
    return x * scale, scale * scale


def _softplus(x: Value) -> tuple[Value, Value]:
    return x.graph.at_least(x, 0) + x.graph.emit("Log", 1 + (-x.abs()).exp()), x.sigmoid()


def _leaky_relu(x: Value, alpha: float) -> tuple[Value, Value]:
    on = x > 0
    slope = on + alpha * (1 - on)
    return x * slope, slope


def _thresholded_relu(x: Value, alpha: float) -> tuple[Value, Value]:
    on = x > alpha
    return x * on, on


def _elu(x: Value, alpha: float) -> tuple[Value, Value]:
    on = x > 0
    decay = alpha * x.graph.at_most(x, 0).exp()
    return x * on + (1 - on) * (decay - alpha), on + (1 - on) * decay


def _hard_sigmoid(x: Value, alpha: float, beta: float) -> tuple[Value, Value]:
    y = alpha * x + beta
    return x.graph.at_least(x.graph.at_most(y, 1), 0), alpha * (y > 0) * (y < 1)


def _affine(x: Value, alpha: float, beta: float) -> tuple[Value, float]:
    return alpha * x + beta, alpha


def _scaled_tanh(x: Value, alpha: float, beta: float) -> tuple[Value, Value]:
    t = (beta * x).tanh()
    return alpha * t, alpha * beta * (1 - t * t)


#: What an activation takes of `activation_alpha` and `activation_beta`, with defaults. None: ONNX and
#: onnxruntime differ in the default, or there is none, so that the value must be stated.
ACTIVATIONS: dict[str, tuple[Callable[..., tuple[Value, Value | float]], dict[str, float | None]]] = {
    "Relu": (_relu, {}),
    "Tanh": (_tanh, {}),
    "Sigmoid": (_sigmoid, {}),
    "Softsign": (_softsign, {}),
    "Softplus": (_softplus, {}),
    "LeakyRelu": (_leaky_relu, {"alpha": 0.01}),
    "ThresholdedRelu": (_thresholded_relu, {"alpha": None}),
    "Elu": (_elu, {"alpha": 1.0}),
    "HardSigmoid": (_hard_sigmoid, {"alpha": 0.2, "beta": 0.5}),
    "Affine": (_affine, {"alpha": None, "beta": None}),
    "ScaledTanh": (_scaled_tanh, {"alpha": None, "beta": None}),
}


def activations_of(node: NodeView, defaults: list[str], directions: int) -> list[list[Activation]]:
    """The activations of each direction. Numbers are consumed in order, by those that take them."""
    names = node.attr("activations") or defaults * directions
    if len(names) != len(defaults) * directions:
        raise node.refuse(f"it names {len(names)} activations, not {len(defaults)} for each direction")
    numbers = {kind: list(node.attr(f"activation_{kind}") or ()) for kind in ("alpha", "beta")}
    found: list[Activation] = []
    for name in names:
        if name not in ACTIVATIONS:
            raise node.refuse(f"its activation {name!r} is not one that ONNX lists")
        function, parameters = ACTIVATIONS[name]
        values = {
            kind: numbers[kind].pop(0) if numbers[kind] else default for kind, default in parameters.items()
        }
        if None in values.values():
            raise node.refuse(f"its activation {name} leaves a parameter out: runtimes differ in the default")
        found.append(functools.partial(function, **values))
    return [found[d * len(defaults) : (d + 1) * len(defaults)] for d in range(directions)]


def clipped(activation: Activation, bound: float | None) -> Activation:
    if not bound:
        return activation

    def apply(x: Value) -> tuple[Value, Value]:
        graph = x.graph
        y, slope = activation(graph.at_least(graph.at_most(x, bound), -bound))
        return y, (x.abs() < bound) * slope

    return apply


# ------------------------------------------------------------------------------- cells


@dataclass(frozen=True)
class Weights:
    """One direction of a layer, by gate. Pairs of gates are two letters, in the order of the gates.

    `at` takes one step out of what has an axis T.
    """

    data: Mapping[str, Value]  #: W_k x and the bias (T, B, H)
    data_pairs: Mapping[str, Value]  #: Σ_m W_k W_l v_x (T, B, H); empty where the data is certain
    recurrence: Mapping[str, Value]  #: R_kᵀ (H, H)
    recurrence_pairs: Mapping[str, Value]  #: (R_k R_l)ᵀ (H, H)
    own: Mapping[str, Value]  #: R_k of a unit on itself (H,)
    peepholes: Mapping[str, Value]  #: (H,); empty where there are none
    recurrence_bias: Mapping[str, Value]  #: (H,); only where it cannot be joined to the data's

    def within(self, graph: VarianceGraph) -> Weights:
        """The same values, for use in the body of a loop."""
        groups = {group.name: getattr(self, group.name) for group in fields(self)}
        return Weights(**{g: {k: graph.adopt(v) for k, v in values.items()} for g, values in groups.items()})

    def at(self, step: Value) -> Weights:
        def rows(values: Mapping[str, Value]) -> dict[str, Value]:
            return {key: value.graph.emit("Gather", value, step, axis=0) for key, value in values.items()}

        return replace(self, data=rows(self.data), data_pairs=rows(self.data_pairs))

    def recurred(self, gate: str, h: Value) -> Value:
        return matmul(h, self.recurrence[gate])

    def covariance(self, pair: str, v_h: Value, factor: Value | None = None) -> Value:
        """M_kl (B, H); `factor` scales what comes from the state."""
        of_state = matmul(v_h, self.recurrence_pairs[pair])
        of_state = of_state if factor is None else factor * of_state
        return of_state + self.data_pairs[pair] if pair in self.data_pairs else of_state


def matmul(a: Value, b: Value) -> Value:
    return a.graph.emit("MatMul", a, b)


def _quadratic(slopes: Mapping[str, Value], covariances: Mapping[str, Value]) -> Value:
    """Σ_kl a_k a_l M_kl, from one M per pair."""
    terms = [
        (1 if a == b else 2) * (slopes[a] * slopes[b]) * covariances[a + b]
        for a, b in combinations_with_replacement(slopes, 2)
    ]
    return sum(terms[1:], terms[0])


def _at_least_zero(var: Value) -> Value:
    """A sum of terms of either sign that is ≥ 0 but for rounding, where gates nearly cancel."""
    return var.graph.at_least(var, 0)


@dataclass(frozen=True)
class Cell:
    """What one step of an operator does."""

    gates: str  #: letters in the order of the weights
    used: str  #: those that are computed
    activations: list[str]
    step: Callable[[NodeView, list[Activation], Weights, State], State]

    @property
    def pairs(self) -> list[str]:
        return [a + b for a, b in combinations_with_replacement(self.used, 2)]


def rnn_step(node: NodeView, activations: list[Activation], w: Weights, old: State) -> State:
    """h' = f(W x + R h)"""
    h, slope = activations[0](w.data["h"] + w.recurred("h", old["h"]))
    return {"h": h, "v_h": slope * slope * w.covariance("hh", old["v_h"])}


def lstm_step(node: NodeView, activations: list[Activation], w: Weights, old: State) -> State:
    """c' = f c + i g,  h' = o φ(c')"""
    f, g, phi = activations
    h, c, v_h, v_c, hc = (old[name] for name in ("h", "c", "v_h", "v_c", "hc"))
    coupled = "f" not in w.recurrence
    M = {pair: w.covariance(pair, v_h) for pair in w.recurrence_pairs}
    received = {gate: w.data[gate] + w.recurred(gate, h) for gate in w.recurrence}

    def peep(gate: str, cell: Value) -> Value:
        return received[gate] + w.peepholes[gate] * cell if w.peepholes else received[gate]

    in_gate, in_slope = f(peep("i", c))
    new, new_slope = g(received["c"])
    forget, forget_slope = (1 - in_gate, 0.0) if coupled else f(peep("f", c))
    cell = forget * c + in_gate * new
    slopes: dict[str, Value] = {"i": ((new - c) if coupled else new) * in_slope}
    if not coupled:
        slopes["f"] = c * forget_slope
    slopes["c"] = in_gate * new_slope
    of_cell = forget  # the slope of c' in c
    for gate in ("i", "f") if w.peepholes else ():
        of_cell = of_cell + slopes[gate] * w.peepholes[gate] if gate in slopes else of_cell
    own = sum((slope * w.own[gate] for gate, slope in slopes.items()), 0)  # that in the unit's own h
    var_cell = _quadratic(slopes, M) + of_cell * of_cell * v_c + 2 * of_cell * own * hc
    var_cell = _at_least_zero(var_cell)

    out, out_slope = f(peep("o", cell))
    shown, shown_slope = phi(cell)
    slope_out = shown * out_slope
    slope_cell = out * shown_slope + slope_out * w.peepholes["o"] if w.peepholes else out * shown_slope
    # The covariance of what the output gate receives with the new cell.
    pairs = {"i": "io", "f": "of", "c": "oc"}
    shared = sum((slope * M[pairs[gate]] for gate, slope in slopes.items()), 0)
    shared = shared + of_cell * w.own["o"] * hc
    var_out = slope_cell * slope_cell * var_cell + 2 * slope_cell * slope_out * shared
    var_out = _at_least_zero(var_out + slope_out * slope_out * M["oo"])
    covariance = slope_cell * var_cell + slope_out * shared
    return {"h": out * shown, "c": cell, "v_h": var_out, "v_c": var_cell, "hc": covariance}


def gru_step(node: NodeView, activations: list[Activation], w: Weights, old: State) -> State:
    """h' = (1 - z) n + z h"""
    f, g = activations
    h, v_h = old["h"], old["v_h"]
    before = node.attr("linear_before_reset", 0)  # the reset gate acts on R h, else on h
    update, update_slope = f(w.data["z"] + w.recurred("z", h))
    reset, reset_slope = f(w.data["r"] + w.recurred("r", h))
    M = {pair: w.covariance(pair, v_h) for pair in ("zz", "zr", "rr")}
    if before:
        linear = w.recurred("h", h)
        linear = linear + w.recurrence_bias["h"] if w.recurrence_bias else linear
        new, new_slope = g(w.data["h"] + reset * linear)
        for pair, factor in (("zh", reset), ("rh", reset), ("hh", reset * reset)):
            M[pair] = w.covariance(pair, v_h, factor)
        on_reset = linear  # the slope of what n receives in the unit's own reset gate
    else:
        new, new_slope = g(w.data["h"] + w.recurred("h", reset * h))
        for pair, scaled in (("zh", reset * v_h), ("rh", reset * v_h), ("hh", reset * reset * v_h)):
            M[pair] = w.covariance(pair, scaled)
        on_reset = w.own["h"] * h
    slope_new = (1 - update) * new_slope
    slopes = {"z": (h - new) * update_slope, "r": slope_new * on_reset * reset_slope, "h": slope_new}
    own = slopes["z"] * w.own["z"] + slopes["r"] * w.own["r"] + slopes["h"] * reset * w.own["h"]
    var = _quadratic(slopes, M) + (update * update + 2 * update * own) * v_h
    if not before:
        # The reset gates of the other units reach this one through R_h: no pair of matrices has
        # their covariance with the rest, so that they count as independent of it and of each other.
        others = (h * reset_slope) * (h * reset_slope) * M["rr"]
        beyond = matmul(others, w.recurrence_pairs["hh"]) - w.own["h"] * w.own["h"] * others
        var = var + slope_new * slope_new * beyond
    return {"h": (1 - update) * new + update * h, "v_h": _at_least_zero(var)}

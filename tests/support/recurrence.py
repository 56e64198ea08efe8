"""RNN, GRU and LSTM in float64 numpy, one step at a time, and the covariance of their state.

`first_order` carries the whole covariance of the state, with the Jacobians of a step by central
differences: Σ' = A Σ Aᵀ + B V Bᵀ, which is the true first-order variance. With `between_units=False`
it drops what lies between different units after each step, which is what the rules say they do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx.reference.op_run import OpRun

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
DEFAULTS = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


FUNCTIONS = {
    "Relu": lambda x, a, b: np.maximum(x, 0),
    "Tanh": lambda x, a, b: np.tanh(x),
    "Sigmoid": lambda x, a, b: sigmoid(x),
    "Affine": lambda x, a, b: a * x + b,
    "LeakyRelu": lambda x, a, b: np.where(x >= 0, x, a * x),
    "ThresholdedRelu": lambda x, a, b: np.where(x >= a, x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "HardSigmoid": lambda x, a, b: np.clip(a * x + b, 0, 1),
    "Elu": lambda x, a, b: np.where(x >= 0, x, a * np.expm1(x)),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)),
    "Softplus": lambda x, a, b: np.logaddexp(0, x),
}
TAKES = {
    "Affine": "ab", "LeakyRelu": "a", "ThresholdedRelu": "a", "ScaledTanh": "ab", "HardSigmoid": "ab", "Elu": "a",
}  # fmt: skip
NUMBERS = {"LeakyRelu": (0.01, 0), "HardSigmoid": (0.2, 0.5), "Elu": (1.0, 0)}  #: defaults


@dataclass
class Layer:
    """One node with its weights; tensors as the operator has them, with layout 0."""

    op_type: str
    W: np.ndarray  # (D, K·H, I)
    R: np.ndarray  # (D, K·H, H)
    B: np.ndarray | None = None  # (D, 2·K·H)
    P: np.ndarray | None = None  # (D, 3·H)
    direction: str = "forward"
    activations: Sequence[str] = ()
    activation_alpha: Sequence[float] = ()
    activation_beta: Sequence[float] = ()
    clip: float | None = None
    input_forget: int = 0
    linear_before_reset: int = 0
    functions: list = field(init=False)

    def __post_init__(self) -> None:
        names = list(self.activations) or DEFAULTS[self.op_type] * self.directions
        alphas, betas = list(self.activation_alpha), list(self.activation_beta)
        self.functions = []
        for name in names:
            a, b = NUMBERS.get(name, (0, 0))
            a = alphas.pop(0) if "a" in TAKES.get(name, "") and alphas else a
            b = betas.pop(0) if "b" in TAKES.get(name, "") and betas else b
            self.functions.append(lambda x, name=name, a=a, b=b: FUNCTIONS[name](x, a, b))

    @property
    def directions(self) -> int:
        return 2 if self.direction == "bidirectional" else 1

    @property
    def hidden(self) -> int:
        return self.R.shape[-1]

    def step(self, d: int, x: np.ndarray, state: np.ndarray) -> np.ndarray:
        """(…, I) and (…, H) or, for LSTM, (…, 2 H) with h first."""
        H, K = self.hidden, GATES[self.op_type]
        per = len(self.functions) // self.directions
        bias = np.zeros(2 * K * H) if self.B is None else self.B[d]
        peep = np.zeros(3 * H) if self.P is None else self.P[d]
        functions = self.functions[d * per : (d + 1) * per]
        limit = np.inf if not self.clip else self.clip

        def bounded(function):
            return lambda a: function(np.clip(a, -limit, limit))

        f = bounded(functions[0])
        W, R, Wb, Rb = (np.split(array, K) for array in (self.W[d], self.R[d], bias[: K * H], bias[K * H :]))
        h = state[..., :H]
        given = [x @ w.T + b for w, b in zip(W, Wb)]
        if self.op_type == "RNN":
            return f(given[0] + h @ R[0].T + Rb[0])
        g = bounded(functions[1])
        if self.op_type == "GRU":
            z = f(given[0] + h @ R[0].T + Rb[0])
            r = f(given[1] + h @ R[1].T + Rb[1])
            if self.linear_before_reset:
                n = g(given[2] + r * (h @ R[2].T + Rb[2]))
            else:
                n = g(given[2] + (r * h) @ R[2].T + Rb[2])
            return (1 - z) * n + z * h
        c = state[..., H:]
        i, o, forget, new = (a + h @ r.T + b for a, r, b in zip(given, R, Rb))
        p_i, p_o, p_f = np.split(peep, 3)
        i = f(i + p_i * c)
        forget = 1 - i if self.input_forget else f(forget + p_f * c)
        cell = forget * c + i * g(new)
        return np.concatenate([f(o + p_o * cell) * functions[2](cell), cell], axis=-1)

    def walk(self, d: int, steps: int) -> range:
        backward = self.direction == "reverse" or d == 1
        return range(steps - 1, -1, -1) if backward else range(steps)

    def state(self, d: int, batch: int, h: np.ndarray | None, c: np.ndarray | None) -> np.ndarray:
        zeros = np.zeros((batch, self.hidden))
        parts = [h, c][: 2 if self.op_type == "LSTM" else 1]
        return np.concatenate([zeros if p is None else p[d] for p in parts], axis=-1)

    def run(self, x, lengths=None, h=None, c=None) -> list[np.ndarray]:
        """Y (T, D, B, H), Y_h (D, B, H) and for LSTM Y_c."""
        T, batch, H = x.shape[0], x.shape[1], self.hidden
        lengths = np.full(batch, T) if lengths is None else lengths
        Y = np.zeros((T, self.directions, batch, H))
        last = []
        for d in range(self.directions):
            state = self.state(d, batch, h, c)
            for t in self.walk(d, T):
                inside = (t < lengths)[:, None]
                state = np.where(inside, self.step(d, x[t], state), state)
                Y[t, d] = np.where(inside, state[:, :H], 0)
            last.append(np.where((lengths > 0)[:, None], state, 0))
        last = np.stack(last)
        return [Y, last[..., :H], last[..., H:]][: 3 if self.op_type == "LSTM" else 2]

    def first_order(self, x, v_x, lengths=None, h=None, c=None, v_h=None, v_c=None, *, between_units=True):
        """The variances of what `run` gives. Absent variances are zero."""
        T, batch, H = x.shape[0], x.shape[1], self.hidden
        lengths = np.full(batch, T) if lengths is None else lengths
        Y = np.zeros((T, self.directions, batch, H))
        last = []
        for d in range(self.directions):
            state, var = self.state(d, batch, h, c), self.state(d, batch, v_h, v_c)
            size = state.shape[1]
            units = np.arange(size) % H
            kept = np.ones((size, size)) if between_units else (units[:, None] == units[None]).astype(float)
            covariance = np.stack([np.diag(v) for v in var])  # (B, S, S)
            for t in self.walk(d, T):
                for b in np.flatnonzero(t < lengths):
                    by_x, by_state = self._jacobians(d, x[t, b], state[b])
                    new = by_state @ covariance[b] @ by_state.T
                    covariance[b] = kept * (new + (by_x * (0 if v_x is None else v_x[t, b])) @ by_x.T)
                    state[b] = self.step(d, x[t, b], state[b])
                    Y[t, d, b] = np.diagonal(covariance[b])[:H]
            diagonal = np.diagonal(covariance, axis1=1, axis2=2)
            last.append(np.where((lengths > 0)[:, None], diagonal, 0))
        last = np.stack(last)
        return [Y, last[..., :H], last[..., H:]][: 3 if self.op_type == "LSTM" else 2]

    def _jacobians(self, d: int, x: np.ndarray, state: np.ndarray, h: float = 1e-5):
        """Of the next state, by the input (S, I) and by the state (S, S)."""
        steps = h * np.eye(len(x)), h * np.eye(len(state))
        by_x = (self.step(d, x + steps[0], state) - self.step(d, x - steps[0], state)) / (2 * h)
        by_state = (self.step(d, x, state + steps[1]) - self.step(d, x, state - steps[1])) / (2 * h)
        return by_x.T, by_state.T


# --------------------------------------------- the operators, for ONNX's reference evaluator


def _operator(op_type: str) -> type[OpRun]:
    """ONNX's own lacks activations, directions, lengths and clipping."""

    def _run(self, X, W, R, B=None, lengths=None, h=None, c=None, P=None, **attributes):
        attributes = {k: v for k, v in attributes.items() if v is not None and k != "hidden_size"}
        batch_first = attributes.pop("layout", 0)
        if batch_first:
            X = np.swapaxes(X, 0, 1)
            h, c = (None if s is None else np.swapaxes(s, 0, 1) for s in (h, c))
        layer = Layer(op_type, W, R, B, P, **attributes)
        found = layer.run(X, lengths, h, *([c] if op_type == "LSTM" else []))
        if batch_first:
            found = [np.transpose(found[0], (2, 0, 1, 3)), *(np.swapaxes(s, 0, 1) for s in found[1:])]
        return tuple(found[: max(1, len(self.onnx_node.output))])

    return type(op_type, (OpRun,), {"op_domain": "", "_run": _run})


OPERATORS = [_operator(op_type) for op_type in GATES]

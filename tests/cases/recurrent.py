"""RNN, GRU, LSTM: the forms in which the rules are exact to first order.

One step, from a state whose units are independent; or one unit, for any number of steps. What several
units do over several steps is in `test_recurrent`.
"""

from __future__ import annotations

import numpy as np
from support.recurrence import Layer

from cases.framework import Given, case, certain, const, steps


def lengths(*values: int) -> Given:
    return Given(np.array(values, np.int32))


def small(*shape: int):
    """Weights that do not saturate the gates."""
    return const(*shape, low=-0.9, high=0.8)


# --------------------------------------------------------------------------------- RNN

ONE = dict(x=(1, 2, 2), w=small(1, 3, 2), r=small(1, 3, 3))
case("RNN", "y, h = RNN<hidden_size=3>(x, w, r)", **ONE)
case("RNN", "y, h = RNN<hidden_size=3>(x, w, r)", 7, **ONE)
case("RNN", "y, h = RNN<hidden_size=3>(x, w, r)", 14, **ONE)
case("RNN", "y, h = RNN<hidden_size=3>(x, w, r)", 22, **ONE)
case("RNN", "y = RNN<hidden_size=3>(x, w, r, b)", **ONE, b=small(1, 6))
case("RNN", ", h = RNN<hidden_size=3>(x, w, r)", **ONE)
case("RNN", "y, h = RNN<hidden_size=3, clip=0.6>(x, w, r)", **ONE)
case("RNN", "y, h = RNN<hidden_size=3>(x, w, r, , , s)", **ONE, s=(1, 2, 3))
case("RNN", "y, h = RNN<hidden_size=3>(x, w, r, , , s)", **ONE, s=certain(1, 2, 3))
case("RNN", "y, h = RNN<hidden_size=3>(x, w, r, , , s)", **ONE | dict(x=certain(1, 2, 2)), s=(1, 2, 3))
case(
    "RNN", 'y, h = RNN<hidden_size=3, direction="bidirectional">(x, w, r, b, , s)',
    x=(1, 2, 2), w=small(2, 3, 2), r=small(2, 3, 3), b=small(2, 6), s=(2, 2, 3),
)  # fmt: skip
UNIT = dict(x=(4, 2, 2), w=small(1, 1, 2), r=small(1, 1, 1))
case("RNN", "y, h = RNN<hidden_size=1>(x, w, r)", **UNIT)
case("RNN", 'y, h = RNN<hidden_size=1, direction="reverse">(x, w, r)', 7, **UNIT)
case("RNN", 'y, h = RNN<hidden_size=1, direction="reverse">(x, w, r, , n)', **UNIT, n=lengths(2, 4))
for call in (
    '["Relu"]', '["Sigmoid"]', '["Softsign"]', '["Softplus"]', '["LeakyRelu"]',
    '["LeakyRelu"], activation_alpha=[0.3]', '["Elu"]', '["Elu"], activation_alpha=[0.7]',
    '["HardSigmoid"], activation_alpha=[0.3], activation_beta=[0.4]', '["HardSigmoid"]',
    '["ThresholdedRelu"], activation_alpha=[0.33]', '["Affine"], activation_alpha=[0.8], activation_beta=[0.1]',
    '["ScaledTanh"], activation_alpha=[0.9], activation_beta=[1.2]',
):  # fmt: skip
    case("RNN", f"y, h = RNN<hidden_size=3, activations={call}>(x, w, r)", **ONE)

# --------------------------------------------------------------------------------- GRU

ONE = dict(x=(1, 2, 2), w=small(1, 9, 2), r=small(1, 9, 3), b=small(1, 18))
AFTER = "hidden_size=3, linear_before_reset=1"
case("GRU", "y, h = GRU<hidden_size=3>(x, w, r, b)", **ONE)
case("GRU", "y, h = GRU<hidden_size=3>(x, w, r, b)", 7, **ONE)
case("GRU", "y, h = GRU<hidden_size=3>(x, w, r, b)", 14, **ONE)
case("GRU", f"y, h = GRU<{AFTER}>(x, w, r, b)", **ONE)
case("GRU", f"y, h = GRU<{AFTER}>(x, w, r, b)", 22, **ONE)
case("GRU", f"y, h = GRU<{AFTER}>(x, w, r, b, , s)", **ONE, s=(1, 2, 3))
case("GRU", f"y, h = GRU<{AFTER}>(x, w, r, b, , s)", 7, **ONE, s=(1, 2, 3))
case("GRU", f"y, h = GRU<{AFTER}>(x, w, r, b, , s)", **ONE, s=certain(1, 2, 3))
case("GRU", f"y, h = GRU<{AFTER}>(x, w, r, b, , s)", **ONE | dict(x=certain(1, 2, 2)), s=(1, 2, 3))
case("GRU", f", h = GRU<{AFTER}, clip=0.7>(x, w, r, b, , s)", **ONE, s=(1, 2, 3))
case("GRU", f'y = GRU<{AFTER}, activations=["HardSigmoid", "Relu"]>(x, w, r, b, , s)', **ONE, s=(1, 2, 3))
case(
    "GRU", f'y, h = GRU<{AFTER}, direction="reverse">(x, w, r, b, n, s)', **ONE, s=(1, 2, 3), n=lengths(1, 0)
)
case(
    "GRU", f'y, h = GRU<{AFTER}, direction="bidirectional">(x, w, r, b, , s)',
    x=(1, 2, 2), w=small(2, 9, 2), r=small(2, 9, 3), b=small(2, 18), s=(2, 2, 3),
)  # fmt: skip
UNIT = dict(x=(4, 2, 2), w=small(2, 3, 2), r=small(2, 3, 1), b=small(2, 6))
case("GRU", 'y, h = GRU<hidden_size=1, direction="bidirectional">(x, w, r, b)', **UNIT)
case(
    "GRU", 'y, h = GRU<hidden_size=1, linear_before_reset=1, direction="bidirectional">(x, w, r, b, n, s)', 9,
    **UNIT, n=lengths(4, 2), s=(2, 2, 1),
)  # fmt: skip

# -------------------------------------------------------------------------------- LSTM

ONE = dict(x=(1, 2, 2), w=small(1, 12, 2), r=small(1, 12, 3), b=small(1, 24))
STATES = dict(s=(1, 2, 3), t=(1, 2, 3))
case("LSTM", "y, h, c = LSTM<hidden_size=3>(x, w, r)", x=(1, 2, 2), w=small(1, 12, 2), r=small(1, 12, 3))
case("LSTM", "y, h, c = LSTM<hidden_size=3>(x, w, r, b)", 7, **ONE)
case("LSTM", "y, h, c = LSTM<hidden_size=3>(x, w, r, b)", 14, **ONE)
case("LSTM", "y, h, c = LSTM<hidden_size=3>(x, w, r, b)", 22, **ONE)
case("LSTM", "y, h, c = LSTM<hidden_size=3>(x, w, r, b, , s, t)", **ONE, **STATES)
case("LSTM", "y, h, c = LSTM<hidden_size=3>(x, w, r, b, , s, t)", 7, **ONE, **STATES)
case("LSTM", "y, h, c = LSTM<hidden_size=3>(x, w, r, b, , s, t)", **ONE, s=certain(1, 2, 3), t=(1, 2, 3))
case("LSTM", ", , c = LSTM<hidden_size=3>(x, w, r, b, , s, t)", **ONE, **STATES)
case("LSTM", ", h = LSTM<hidden_size=3>(x, w, r, b, , s, t)", **ONE | dict(x=certain(1, 2, 2)), **STATES)
case("LSTM", "y, h, c = LSTM<hidden_size=3>(x, w, r, b, , s, t, p)", **ONE, **STATES, p=small(1, 9))
case("LSTM", "y, h, c = LSTM<hidden_size=3, clip=0.7>(x, w, r, b, , s, t, p)", **ONE, **STATES, p=small(1, 9))
case("LSTM", "y, h, c = LSTM<hidden_size=3, input_forget=1>(x, w, r, b, , s, t)", **ONE, **STATES)
case(
    "LSTM",
    "y, h, c = LSTM<hidden_size=3, input_forget=1>(x, w, r, b, , s, t, p)",
    **ONE,
    **STATES,
    p=small(1, 9),
)
case(
    "LSTM", 'y, h, c = LSTM<hidden_size=3, activations=["HardSigmoid", "Softsign", "Elu"]>(x, w, r, b, , s, t)',
    **ONE, **STATES,
)  # fmt: skip
case(
    "LSTM", 'y, h, c = LSTM<hidden_size=3, direction="bidirectional">(x, w, r, b, , s, t)',
    x=(1, 2, 2), w=small(2, 12, 2), r=small(2, 12, 3), b=small(2, 24), s=(2, 2, 3), t=(2, 2, 3),
)  # fmt: skip
UNIT = dict(
    x=(4, 2, 2), w=small(2, 4, 2), r=small(2, 4, 1), b=small(2, 8), s=(2, 2, 1), t=(2, 2, 1), p=small(2, 3)
)
case(
    "LSTM",
    'y, h, c = LSTM<hidden_size=1, direction="reverse">(x, w, r)',
    x=(4, 2, 2),
    w=small(1, 4, 2),
    r=small(1, 4, 1),
)
case(
    "LSTM", 'y, h, c = LSTM<hidden_size=1, direction="bidirectional">(x, w, r, b, n, s, t, p)',
    **UNIT, n=lengths(4, 2),
)  # fmt: skip
case(
    "LSTM", 'y, h, c = LSTM<hidden_size=1, direction="bidirectional">(x, w, r, b, n, s, t, p)', 7,
    **UNIT, n=lengths(4, 2),
)  # fmt: skip

# ----------------------------------------------------------------- DynamicQuantizeLSTM


def dequantised(x, w, r, b, ws, wz, rs, rz):
    """Y of an LSTM with these weights."""
    parts = ((w, ws, wz), (r, rs, rz))
    W, R = (np.swapaxes((q - z.reshape(len(q), 1, -1)) * s.reshape(len(q), 1, -1), 1, 2) for q, s, z in parts)
    direction = "bidirectional" if len(w) == 2 else "forward"
    return Layer("LSTM", W, R, b, direction=direction).run(x)[0]


def quantised(directions: int, channels: int, dtype: type, **tensors) -> None:
    """`channels` is 1 for one scale per matrix, or how many columns have a scale of their own."""
    zero = 128 if dtype is np.uint8 else 0
    shape = (directions,) if channels == 1 else (directions, channels)
    scales = np.linspace(0.006, 0.008, directions * channels).reshape(shape)
    zeros = np.full(shape, zero, dtype)
    direction = ', direction="bidirectional"' if directions == 2 else ""
    given = dict(
        ws=Given(scales), wz=Given(zeros), rs=Given(scales[..., ::-1].copy() if channels > 1 else scales),
        rz=Given(zeros),
    )  # fmt: skip
    hidden = tensors["r"].shape[1]
    text = f"y = com.microsoft.DynamicQuantizeLSTM<hidden_size={hidden}{direction}>(x, w, r, b, , , , , ws, wz, rs, rz)"
    case("DynamicQuantizeLSTM", text, smooth=dequantised, **tensors, **given)


def bytes_(*shape: int, dtype: type):
    low, high = (-100, 100) if dtype is np.int8 else (28, 228)
    return steps(*shape, low=low, high=high, dtype=dtype, constant=True)


for kind in (np.int8, np.uint8):
    weights = dict(w=bytes_(1, 2, 12, dtype=kind), r=bytes_(1, 3, 12, dtype=kind), b=small(1, 24))
    quantised(1, 1, kind, x=(1, 2, 2), **weights)
weights = dict(w=bytes_(1, 2, 12, dtype=np.int8), r=bytes_(1, 3, 12, dtype=np.int8), b=small(1, 24))
quantised(1, 12, np.int8, x=(1, 2, 2), **weights)
weights = dict(w=bytes_(2, 2, 4, dtype=np.int8), r=bytes_(2, 1, 4, dtype=np.int8), b=small(2, 8))
quantised(2, 1, np.int8, x=(4, 2, 2), **weights)

"""RNN, GRU and LSTM against a slow evaluation of what the rules say, and against the truth.

The case table (`cases.recurrent`) holds the forms where the rules are exact to first order. Here every
form, with several steps and units: equal to the recursion that drops correlation between units
(`recurrence`), and how far that is from the true first-order variance.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.recurrence import GATES, Layer
from support.rule_checks import add_variances, parse, propagate_inputs, session

from gapa_onnx.model.load import load
from gapa_onnx.plan.placement import find_sites
from gapa_onnx.variance.sites import Layout

ORDER = {"X": 0, "W": 1, "R": 2, "B": 3, "lengths": 4, "h": 5, "c": 6, "P": 7}
OUTPUTS = {"RNN": ["Y", "Y_h"], "GRU": ["Y", "Y_h"], "LSTM": ["Y", "Y_h", "Y_c"]}


@dataclass(frozen=True)
class Form:
    """A node with drawn weights and inputs."""

    op_type: str
    attributes: dict = field(default_factory=dict)
    uncertain: str = "X"  #: names, separated by spaces
    given: str = "B"  #: optional inputs that are there
    steps: int = 4
    batch: int = 3
    size: int = 2
    hidden: int = 3
    lengths: tuple[int, ...] = ()
    outputs: tuple[str, ...] = ()
    opset: int = 17
    std: float = 0.1
    scale: float = 0.7  #: of all but X

    @property
    def id(self) -> str:
        shape = f"T{self.steps} B{self.batch} I{self.size} H{self.hidden}"
        attributes = ", ".join(f"{k}={v}" for k, v in self.attributes.items())
        rest = f"given {self.given} | uncertain {self.uncertain} | {shape} | opset {self.opset}"
        lengths = f" | lengths {self.lengths}" if self.lengths else ""
        return f"{self.op_type}({attributes}) | {rest}{lengths}{' | ' if self.outputs else ''}{' '.join(self.outputs)}"

    @property
    def batch_first(self) -> bool:
        return bool(self.attributes.get("layout"))

    def tensors(self) -> dict[str, np.ndarray]:
        """With layout 0."""
        rng = np.random.default_rng(len(self.id))
        D = 2 if self.attributes.get("direction") == "bidirectional" else 1
        K, H = GATES[self.op_type], self.hidden
        shapes = {
            "X": (self.steps, self.batch, self.size), "W": (D, K * H, self.size), "R": (D, K * H, H),
            "B": (D, 2 * K * H), "h": (D, self.batch, H), "c": (D, self.batch, H), "P": (D, 3 * H),
        }  # fmt: skip
        names = ["X", "W", "R", *self.given.split()]
        drawn = {name: rng.normal(size=shapes[name]) * (self.scale if name != "X" else 1) for name in names}
        if self.lengths:
            drawn["lengths"] = np.array(self.lengths, np.int32)
        return drawn

    def variances(self) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(1 + len(self.id))
        tensors = self.tensors()
        return {n: self.std**2 * rng.uniform(0.2, 1.8, tensors[n].shape) for n in self.uncertain.split()}

    def laid_out(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        swapped = ("X", "h", "c") if self.batch_first else ()
        return {
            n: np.ascontiguousarray(np.swapaxes(a, 0, 1)) if n in swapped else a for n, a in arrays.items()
        }

    def model(self, dtype: type = np.float64) -> onnx.ModelProto:
        tensors = self.laid_out(self.tensors())
        tensors = {n: a if n == "lengths" else a.astype(dtype) for n, a in tensors.items()}
        inputs = [n if n in tensors else "" for n in ORDER][: 1 + max(ORDER[n] for n in tensors)]
        wanted = self.outputs or OUTPUTS[self.op_type]
        outputs = [n if n in wanted else "" for n in OUTPUTS[self.op_type]]
        node = helper.make_node(self.op_type, inputs, outputs, hidden_size=self.hidden, **self.attributes)
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        fed = [n for n in ("X", "h", "c") if n in tensors]
        infos = [helper.make_tensor_value_info(n, kind, [f"{n}{axis}" for axis in range(3)]) for n in fed]
        ranks = {"Y": 4, "Y_h": 3, "Y_c": 3}
        results = [
            helper.make_tensor_value_info(n, kind, [f"{n}{a}" for a in range(ranks[n])]) for n in wanted
        ]
        initializers = [numpy_helper.from_array(a, n) for n, a in tensors.items() if n not in fed]
        graph = helper.make_graph([node], "form", infos, results, initializers)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)

    def layer(self) -> Layer:
        tensors = self.tensors()
        attributes = {k: v for k, v in self.attributes.items() if k != "layout"}
        return Layer(
            self.op_type, tensors["W"], tensors["R"], tensors.get("B"), tensors.get("P"), **attributes
        )

    def expected(self, between_units: bool) -> dict[str, np.ndarray]:
        tensors, var = self.tensors(), self.variances()
        given = [tensors.get(n) for n in ("lengths", "h", "c")]
        found = self.layer().first_order(
            tensors["X"], var.get("X"), *given, var.get("h"), var.get("c"), between_units=between_units
        )
        if self.batch_first:
            found = [np.transpose(found[0], (2, 0, 1, 3)), *(np.swapaxes(v, 0, 1) for v in found[1:])]
        return {
            n: v for n, v in zip(OUTPUTS[self.op_type], found) if n in (self.outputs or OUTPUTS[self.op_type])
        }

    def emitted(self, dtype: type = np.float64) -> dict[str, np.ndarray]:
        """The variance graph by itself: it reads nothing that the source's node computes, so that it
        runs where onnxruntime has no kernel for the node (double, layout 1)."""
        model = self.model(dtype)
        result = propagate_inputs(model, self.uncertain.split())
        assert not result.refused, result.refused
        spliced, names = add_variances(model, result)
        onnx.checker.check_model(spliced, full_check=True)
        drop_source(spliced, model)
        read = {name for node in spliced.graph.node for name in node.input if name}
        assert not read & set(model.graph.node[0].output)
        tensors = self.laid_out(self.tensors()) | {
            f"{n}/own": v for n, v in self.laid_out(self.variances()).items()
        }
        feeds = {i.name: tensors[i.name].astype(dtype) for i in spliced.graph.input}
        return dict(zip((o.name for o in model.graph.output), session(spliced).run(names, feeds)))


def drop_source(spliced: onnx.ModelProto, model: onnx.ModelProto) -> None:
    """Leave the variance graph by itself."""
    kept = [node for node in spliced.graph.node if node not in list(model.graph.node)]
    outputs = spliced.graph.output[len(model.graph.output) :]
    del spliced.graph.node[:], spliced.graph.output[:]
    spliced.graph.node.extend(kept)
    spliced.graph.output.extend(outputs)


def form(op_type: str, *, uncertain="X", given="B", **rest) -> Form:
    own = {name: rest.pop(name) for name in list(rest) if name in Form.__dataclass_fields__}
    return Form(op_type, rest, uncertain, given, **own)


BOTH = "bidirectional"
SHARED = [
    dict(),
    dict(opset=7), dict(opset=8), dict(opset=9), dict(opset=11), dict(opset=13), dict(opset=14), dict(opset=18),
    dict(opset=22),
    dict(given=""),
    dict(direction="reverse"),
    dict(direction=BOTH),
    dict(direction=BOTH, layout=1, given="B h", uncertain="X h"),
    dict(layout=1),
    dict(layout=1, opset=22, direction="reverse", given="B h"),
    dict(given="B h"),
    dict(given="h", uncertain="h"),
    dict(given="B h", uncertain="X h", direction=BOTH, opset=7),
    dict(lengths=(2, 4, 1)),
    dict(lengths=(2, 4, 0), given="B h", uncertain="X h"),
    dict(lengths=(2, 4, 1), direction="reverse"),
    dict(lengths=(2, 4, 1), direction=BOTH, given="B h", uncertain="X h"),
    dict(lengths=(3, 4, 0), direction=BOTH, opset=7),
    dict(lengths=(3, 1, 2), layout=1, direction=BOTH),
    dict(clip=0.5),
    dict(batch=1), dict(hidden=1), dict(steps=1), dict(size=1, hidden=5), dict(steps=9),
    dict(outputs=("Y_h",)), dict(outputs=("Y",)), dict(outputs=("Y_h",), direction="reverse"),
]  # fmt: skip
PEEPS = "B h c P"
FORMS = [form(op_type, **rest) for op_type in GATES for rest in SHARED]
FORMS += [
    *(form("GRU", linear_before_reset=1, **rest) for rest in SHARED),
    form("LSTM", given="B h c", uncertain="c"),
    form("LSTM", given="B h c", uncertain="h c", direction=BOTH),
    form("LSTM", given="B h c", uncertain="X h c", layout=1, lengths=(2, 4, 1), direction=BOTH),
    form("LSTM", given="B c", uncertain="X"),
    form("LSTM", given=PEEPS),
    form("LSTM", given="P"),
    form("LSTM", given=PEEPS, uncertain="X h c", opset=7),
    form("LSTM", given=PEEPS, uncertain="X h c", direction=BOTH),
    form("LSTM", given=PEEPS, uncertain="X c", clip=0.6),
    form("LSTM", given="B h c", uncertain="X h c", input_forget=1),
    form("LSTM", given=PEEPS, uncertain="X h c", input_forget=1),
    form("LSTM", outputs=("Y_c",)),
    form("LSTM", outputs=("Y", "Y_c"), direction=BOTH),
]
ACTIVATIONS = [
    ("Relu", {}), ("Tanh", {}), ("Sigmoid", {}), ("Softsign", {}), ("Softplus", {}), ("LeakyRelu", {}),
    ("LeakyRelu", {"activation_alpha": [0.3]}), ("Elu", {}), ("Elu", {"activation_alpha": [0.7]}),
    ("HardSigmoid", {}), ("HardSigmoid", {"activation_alpha": [0.3], "activation_beta": [0.4]}),
    ("ThresholdedRelu", {"activation_alpha": [0.25]}),
    ("Affine", {"activation_alpha": [0.8], "activation_beta": [0.1]}),
    ("ScaledTanh", {"activation_alpha": [0.9], "activation_beta": [1.2]}),
]  # fmt: skip
FORMS += [form("RNN", activations=[name], **numbers) for name, numbers in ACTIVATIONS]
FORMS += [form("RNN", activations=[name], opset=7, **numbers) for name, numbers in ACTIVATIONS]
MIXED = {"activation_alpha": [0.3, 0.9, 0.6], "activation_beta": [0.4, 1.1]}
FORMS += [
    form("LSTM", activations=["HardSigmoid", "ScaledTanh", "Elu"], given=PEEPS, uncertain="X c", **MIXED),
    form("LSTM", activations=["Sigmoid", "Relu", "Tanh", "HardSigmoid", "Softsign", "LeakyRelu"], direction=BOTH),
    form("GRU", activations=["HardSigmoid", "ScaledTanh"], linear_before_reset=1, activation_alpha=[0.3, 0.9],
         activation_beta=[0.4, 1.1]),
    form("GRU", activations=["Sigmoid", "Relu", "HardSigmoid", "Elu"], direction=BOTH, linear_before_reset=1,
         activation_alpha=[0.3, 0.5]),
]  # fmt: skip


def resets_h(form: Form) -> bool:
    """GRU whose reset gate acts on h before R: other units' reset gates count as independent."""
    return form.op_type == "GRU" and not form.attributes.get("linear_before_reset")


def ids(forms: list[Form]) -> dict:
    return {"argvalues": forms, "ids": [f.id for f in forms]}


# ------------------------------------------------------------ equal to what the rules say


@pytest.mark.parametrize("form", **ids([f for f in FORMS if not resets_h(f)]))
def test_equals_the_recursion_without_correlation_between_units(form: Form) -> None:
    """Jacobians by central differences err by some 1e-10 for slopes of order 1, the rest is rounding."""
    found = form.emitted()
    for name, wanted in form.expected(between_units=False).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=1e-6 * form.std**2, err_msg=name)


def reset_before(layer: Layer, x: np.ndarray, v_x: np.ndarray, h: np.ndarray, v_h: np.ndarray) -> np.ndarray:
    """v_h after one step of a GRU with linear_before_reset=0, of one sample, unit by unit.

    Unit j sees its own reset gate as a function of x and h, and those of the others as variables of
    their own. Derivatives by central differences.
    """
    H, e = layer.hidden, 1e-5
    W, R, Wb, Rb = (np.split(a, 3) for a in (layer.W[0], layer.R[0], *np.split(layer.B[0], 2)))
    f, g = layer.functions

    def reset(x, h):
        return f(x @ W[1].T + Wb[1] + h @ R[1].T + Rb[1])

    def squared_slopes(function, *points):
        """For each argument, (∂/∂·)² with the outputs first."""
        for position, point in enumerate(points):
            columns = []
            for step in e * np.eye(len(point)):
                shifted = [
                    [p + s if q == position else p for q, p in enumerate(points)] for s in (step, -step)
                ]
                columns.append((function(*shifted[0]) - function(*shifted[1])) / (2 * e))
            yield np.square(np.stack(columns, axis=-1))

    r0 = reset(x, h)
    by_x, by_h = squared_slopes(reset, x, h)
    v_r = by_x @ v_x + by_h @ v_h
    found = np.zeros(H)
    for j in range(H):

        def unit(x, h, others, j=j):
            r = np.where(np.arange(H) == j, reset(x, h), others)
            z = f(x @ W[0].T + Wb[0] + h @ R[0].T + Rb[0])
            n = g(x @ W[2].T + Wb[2] + (r * h) @ R[2].T + Rb[2])
            return ((1 - z) * n + z * h)[j]

        by_x, by_h, by_r = squared_slopes(unit, x, h, r0)
        found[j] = by_x @ v_x + by_h @ v_h + by_r @ v_r  # by its own reset the slope is 0
    return found


def test_gru_that_resets_before_the_linear_part() -> None:
    checked = form("GRU", given="B h", uncertain="X h", steps=4, batch=2, hidden=3)
    tensors, var, layer = checked.tensors(), checked.variances(), checked.layer()
    h, v_h = tensors["h"][0].copy(), var["h"][0].copy()
    found = checked.emitted()["Y"]
    for t in range(checked.steps):
        for b in range(checked.batch):
            v_h[b] = reset_before(layer, tensors["X"][t, b], var["X"][t, b], h[b], v_h[b])
        h = layer.step(0, tensors["X"][t], h)
        np.testing.assert_allclose(found[t, 0], v_h, rtol=1e-6, err_msg=f"step {t}")


@pytest.mark.parametrize("form", **ids([f for f in FORMS if resets_h(f)]))
def test_gru_that_resets_first_takes_every_form(form: Form) -> None:
    """That its values are right is tested above; here, that directions, lengths, layouts and opsets
    do to it what they do to the other kind. With R_h = 0 the two kinds are one."""
    found, wanted = (zero_recurrence(form, kind).emitted() for kind in (0, 1))
    assert list(found) == list(wanted)
    for name in wanted:
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-10, atol=1e-15)


def zero_recurrence(form: Form, kind: int) -> Form:
    class WithoutRecurrence(Form):
        def tensors(self):
            tensors = super().tensors()
            tensors["R"][:, 2 * self.hidden :] = 0
            if "B" in tensors:
                tensors["B"][:, -self.hidden :] = 0
            return tensors

        @property
        def id(self):
            return form.id  # which chooses the values

    fields = {name: getattr(form, name) for name in Form.__dataclass_fields__}
    fields["attributes"] = form.attributes | {"linear_before_reset": kind}
    return WithoutRecurrence(**fields)


# ------------------------------------------------------------------- equal to the truth

EXACT = [
    form(op_type, steps=1, given=given, uncertain=uncertain, **more)
    for op_type, more in (("RNN", {}), ("GRU", {"linear_before_reset": 1}), ("LSTM", {}))
    for given, uncertain in (("B", "X"), ("B h", "X"), ("B h", "h"), ("B h", "X h"))
]
EXACT += [
    form("GRU", steps=1),
    form("GRU", steps=1, direction=BOTH),
    form("LSTM", steps=1, given=PEEPS, uncertain="X h c", direction=BOTH),
    form("LSTM", steps=1, given="B c", uncertain="X c", input_forget=1),
    form("RNN", steps=6, hidden=1),
    form("GRU", steps=6, hidden=1, given="B h", uncertain="X h"),
    form("GRU", steps=6, hidden=1, linear_before_reset=1, direction=BOTH),
    form("LSTM", steps=6, hidden=1, given=PEEPS, uncertain="X h c", direction=BOTH),
    form("LSTM", steps=6, hidden=1, input_forget=1, lengths=(6, 3, 5)),
]


@pytest.mark.parametrize("form", **ids(EXACT))
def test_one_step_and_one_unit_are_exact_to_first_order(form: Form) -> None:
    """One step: the state that it starts from has independent units. One unit: there is nothing to drop."""
    found = form.emitted()
    for name, wanted in form.expected(between_units=True).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-6, atol=1e-6 * form.std**2, err_msg=name)


def test_one_tensor_for_both_initial_states() -> None:
    """h and c are then one variable: with a slope of 1 in each, dh' = (∂h'/∂h + ∂h'/∂c) dh."""
    drawn = form("LSTM", steps=1, hidden=1, given="B h c", uncertain="h")
    tensors, v = drawn.tensors(), drawn.variances()["h"]
    model = drawn.model()
    model.graph.node[0].input[6] = "h"
    del model.graph.input[2]
    spliced, names = add_variances(model, propagate_inputs(model, ["h"]))
    drop_source(spliced, model)
    found = session(spliced).run(names, {"X": tensors["X"], "h": tensors["h"], "h/own": v})
    e, layer = 1e-5, drawn.layer()
    upper, lower = (layer.run(tensors["X"], h=tensors["h"] + s, c=tensors["h"] + s) for s in (e, -e))
    for var, above, below in zip(found, upper, lower):
        np.testing.assert_allclose(var, ((above - below) / (2 * e)) ** 2 * v, rtol=1e-6)


#: Emitted by true first-order variance, averaged over Y_h: what dropping the correlation between 16 units
#: costs after 1, 2, 5 and 20 steps, for normal weights of a standard deviation of 1/√16 and of 0.7.
RATIOS = {
    ("RNN", 0.25): (1, 1.02, 0.94, 0.94),
    ("RNN", 0.7): (1, 1.06, 1.01, 3.76),  # chaotic: small errors of the state grow
    ("GRU", 0.25): (1, 0.99, 0.98, 0.98),
    ("GRU", 0.7): (1, 1.03, 0.96, 0.99),
    ("GRU after", 0.25): (1, 0.99, 0.98, 0.98),
    ("GRU after", 0.7): (1, 0.93, 1.04, 0.87),
    ("LSTM", 0.25): (1, 1.00, 0.99, 0.97),
    ("LSTM", 0.7): (1, 0.98, 0.99, 0.99),
}


@pytest.mark.parametrize("kind, scale", RATIOS)
def test_ratio_to_the_true_first_order_variance(kind: str, scale: float) -> None:
    op_type, *after = kind.split()
    attributes = {"linear_before_reset": 1} if after else {}
    ratios = []
    for steps in (1, 2, 5, 20):
        drawn = form(op_type, steps=steps, batch=4, size=8, hidden=16, scale=scale, **attributes)
        found, true = drawn.emitted()["Y_h"], drawn.expected(between_units=True)["Y_h"]
        ratios.append(found.mean() / true.mean())
    np.testing.assert_allclose(ratios, RATIOS[kind, scale], atol=0.006)


# ------------------------------------------------------------------ precision, guards, NaN


@pytest.mark.parametrize("op_type", GATES)
def test_single_precision(op_type: str) -> None:
    """Some tens of operations a step, over 30 steps."""
    drawn = form(op_type, steps=30, hidden=8, size=4, direction=BOTH)
    double, single = drawn.emitted(), drawn.emitted(np.float32)
    for name, wanted in double.items():
        assert single[name].dtype == np.float32
        np.testing.assert_allclose(single[name], wanted, rtol=2e-4, atol=1e-6 * wanted.max(), err_msg=name)


@pytest.mark.parametrize("op_type", GATES)
def test_long_sequences_with_large_variances_stay_finite(op_type: str) -> None:
    drawn = form(op_type, steps=500, hidden=8, size=4, std=3.0)
    for name, found in drawn.emitted(np.float32).items():
        assert np.all(np.isfinite(found)) and np.all(found >= 0), name


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_what_lies_beyond_the_end_is_not_read(direction: str) -> None:
    """Padding may hold anything, NaN too."""
    padded = form("LSTM", lengths=(2, 4, 1), direction=direction, given="B h c", uncertain="X h c")

    class Filled(Form):
        def tensors(self):
            tensors = super().tensors()
            for sample, length in enumerate(self.lengths):
                tensors["X"][length:, sample] = np.nan
            return tensors

    filled = Filled(**{name: getattr(padded, name) for name in Form.__dataclass_fields__})
    for name, wanted in padded.emitted().items():
        np.testing.assert_array_equal(filled.emitted()[name], wanted)


@pytest.mark.parametrize("op_type", GATES)
def test_nan_is_not_hidden(op_type: str) -> None:
    class Spoilt(Form):
        def variances(self):
            var = super().variances()
            var["X"][1, 0, 0] = np.nan
            return var

    spoilt = Spoilt(op_type)
    found = spoilt.emitted()["Y"]
    assert np.all(np.isfinite(found[:1])) and np.all(np.isfinite(found[:, :, 1:]))
    assert np.all(np.isnan(found[1:, :, 0]))


# --------------------------------------------------------------------------- in a model


def test_a_recurrent_layer_is_a_place_for_a_site() -> None:
    model = parse(
        "m (float[4, n, 2] x) => (float[4, 1, n, 2] y) <float[1, 2, 2] w = {1, 2, 3, 4}, float[1, 2, 2] r = {1, 2, 3, 4}>"
        "{ a = Tanh(x) y = RNN<hidden_size=2>(a, w, r) }"
    )
    (site,) = find_sites(load(model), "auto")
    assert (site.query, site.output, site.layout) == ("x", "a", Layout.ROWS)


def test_in_the_body_of_a_loop() -> None:
    """A loop inside a loop: the outer one is a twin of the source's, the inner one is emitted."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 17]>
        m (float[2, 1, 2] x, int64 n) => (float[1, 1, 2] y) <float[1, 2, 2] w = {0.5, -0.3, 0.2, 0.4},
           float[1, 2, 2] r = {0.1, 0.6, -0.2, 0.3}, float[1, 1, 2] h0 = {0, 0}, bool on = {1}>
        { y = Loop (n, on, h0) <body = b (int64 i, bool go, float[1, 1, 2] h) => (bool go_on, float[1, 1, 2] next)
            { go_on = Identity(go) all, next = RNN <hidden_size = 2> (x, w, r, , , h) }> }"""
    )
    x, v = np.float32([[[0.3, -0.5]], [[0.8, 0.1]]]), np.float32([[[0.1, 0.2]], [[0.3, 0.4]]])
    spliced, names = add_variances(model, propagate_inputs(model, ["x"]))
    found = session(spliced).run(names, {"x": x, "n": np.array(2, np.int64), "x/own": v})[0]
    W, R = (numpy_helper.to_array(t).astype(float) for t in model.graph.initializer[:2])
    layer = Layer("RNN", W, R)
    h = v_h = None
    for _ in range(2):
        v_h = layer.first_order(x, v, h=h, v_h=v_h, between_units=False)[1]
        h = layer.run(x, h=h)[1]
    np.testing.assert_allclose(found, v_h, rtol=1e-5)


# -------------------------------------------------------------------------- refusals

REFUSALS = [
    ("RNN(c, x, r)", "weights W are uncertain"),
    ("RNN(c, w, x)", "weights R are uncertain"),
    ("RNN(c, w, r, b)", "weights B are uncertain"),
    ('RNN<activations=["Gelu"]>(x, w, r)', "'Gelu'"),
    ('RNN<activations=["Tanh", "Tanh"]>(x, w, r)', "2 activations"),
    ('RNN<activations=["ThresholdedRelu"]>(x, w, r)', "runtimes differ"),
    ('RNN<activations=["Affine"], activation_alpha=[1.0]>(x, w, r)', "runtimes differ"),
    ('RNN<activations=["ScaledTanh"], activation_beta=[1.0]>(x, w, r)', "runtimes differ"),
]


@pytest.mark.parametrize("call, reason", REFUSALS)
def test_refusals_tell_their_reason(call: str, reason: str) -> None:
    call = call.replace("RNN<", "RNN<hidden_size=2, ").replace("RNN(", "RNN<hidden_size=2>(")
    model = parse(
        f"m (float[1, 2, 2] x, float[1, 4] b, float[1, 2, 2] c) => (float[1, 1, 2, 2] y) <float[1, 2, 2] w = {{1, 2, 3, 4}},"
        f"float[1, 2, 2] r = {{1, 2, 3, 4}}> {{ y = {call} }}"
    )
    (entry,) = propagate_inputs(model, ["x", "b"]).refused
    assert entry.operator == "RNN" and reason in entry.reason

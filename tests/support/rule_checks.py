"""What every case of the rule table is checked against, with nothing of the rules trusted.

    Jacobian      v_y = J² v, with J by central differences of the source node in float64
    Monte Carlo   the sample variance of the source node under Gaussian inputs
    properties    v ≥ 0, zero in is zero out, c² in is c² out

The source node and the variance graph are both run by onnxruntime, in double where it has the
kernels. Where it lacks one, the variances are those of the float32 model, and J comes from ONNX's
reference implementation in float64, or from long steps where the node is linear in each input, or
from steps of medium length, extrapolated, where that implementation does not know the operator.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx.inliner
import onnxruntime as ort
import onnxruntime.capi.onnxruntime_pybind11_state as ort_errors
from cases import Case, definitions, element_type
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from gapa_onnx.model.dtypes import variance_dtype
from gapa_onnx.model.load import load
from gapa_onnx.model.splice import splice
from gapa_onnx.variance.graph import Value, VarianceGraph
from gapa_onnx.variance.propagation import Propagation, propagate
from gapa_onnx.variance.rules import TABLE, Accuracy, Options
from gapa_onnx.variance.sites import Layout, Site
from support import recurrence
from support.reference_ops import OPERATORS

NEWEST_OPSET = 26  #: that onnxruntime runs
STEP = 1e-5
LONG_STEP = 1.0  #: for what is linear in each input: no truncation error, rounding by ε |y| / LONG_STEP
#: Central differences in float64 err by STEP² |f'''| / 6 + ε |f| / STEP ≈ 1e-10 where f and its
#: derivatives are of order 1; those of Tan, Atanh and Reciprocal reach some 1e3.
TOLERANCE_DOUBLE = 1e-6
#: The float32 variance itself errs by ε per operation, some tens of them, times the condition of
#: terms such as 1 - y² (below 30 in the cases' ranges): 20 · 30 · 6e-8.
TOLERANCE_SINGLE = 4e-5
#: Two steps, MEDIUM_STEP and its half, extrapolated: truncation is MEDIUM_STEP⁴ |f⁽⁵⁾| / 480 ≈ 2e-6 for
#: a fifth derivative of 10, rounding is 3 ε |y| / MEDIUM_STEP ≈ 4e-6. Squared slopes err by twice as much
#: in relative terms, more where slopes are small; the floor is the square's error at slopes of 0.02.
MEDIUM_STEP = 0.1
TOLERANCE_EXTRAPOLATED = 2e-4
FLOOR_EXTRAPOLATED = 3e-7
SMALL_STD = 2e-4  #: first order: the next term is smaller by SMALL_STD²; float32 noise by (ε/SMALL_STD)²
STANDARD_ERRORS = 5

Arrays = dict[str, np.ndarray]
Run = Callable[[Arrays], list[np.ndarray]]


#: onnxruntime knows them, and runs them on a GPU only.
WITHOUT_KERNEL = {"GroupNorm", "SkipGroupNorm"}


def expanded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with standard operators for those that onnxruntime has no kernel of."""
    functions = definitions(model)
    if not functions:
        return model
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    copy.functions.extend(functions)
    return onnx.inliner.inline_local_functions(copy)


def session(model: onnx.ModelProto) -> ort.InferenceSession | ReferenceEvaluator:
    """Of onnxruntime, or of ONNX itself for opsets and operators that onnxruntime does not run.

    Operators that the cases spell out are expanded first.
    """
    model = expanded(model)
    too_new = any(entry.domain == "" and entry.version > NEWEST_OPSET for entry in model.opset_import)
    if too_new or any(node.op_type in WITHOUT_KERNEL for node in model.graph.node):
        return ReferenceEvaluator(model, new_ops=OPERATORS)
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


# ----------------------------------------------------------- one model with variances


def propagate_inputs(
    model: onnx.ModelProto, uncertain: Sequence[str], *, cut: bool = False, options: Options = Options()
) -> Propagation:
    """The variances of a model whose inputs are uncertain: that of `x` is read from `x/own`."""
    source = load(model)
    tensors = source.graph.tensors()
    sites = [Site(name, name, name, None, Layout.ROWS, None) for name in uncertain]

    def birth(graph: VarianceGraph, site: Site) -> Value:
        return graph.tensor(f"{site.output}/own", variance_dtype(tensors[site.output].dtype))

    return propagate(source, sites, birth, cut=cut, options=options)


def add_variances(model: onnx.ModelProto, result: Propagation) -> tuple[onnx.ModelProto, list[str | None]]:
    """The model with an input `x/own` per uncertain input x and an output `y_var` per uncertain
    output, and for each output of the source the name of its variance."""
    wanted: dict[str, Value] = {}
    for output in model.graph.output:
        var = result.variances.get(output.name)
        if var is not None:
            wanted[output.name] = result.graph.output(var, f"{output.name}_var")
    infos = [_like(output, wanted[output.name]) for output in model.graph.output if output.name in wanted]
    spliced = splice(model, result.graph.to_proto(list(wanted.values())), infos)
    own = [_like(x, result.variances[x.name]) for x in model.graph.input if x.name in result.variances]
    spliced.graph.input.extend(own)
    return spliced, [wanted[o.name].name if o.name in wanted else None for o in model.graph.output]


def run_with_variances(
    model: onnx.ModelProto, feeds: Arrays, variances: Arrays, options: Options = Options()
) -> Arrays:
    """All outputs of a model with variances: `y` and `y_var`."""
    result = propagate_inputs(model, list(variances), options=options)
    assert not result.refused, result.refused
    spliced, _ = add_variances(model, result)
    names = [output.name for output in spliced.graph.output]
    own = {f"{name}/own": var for name, var in variances.items()}
    return dict(zip(names, session(spliced).run(None, feeds | own)))


def parse(text: str, opset: int = 17) -> onnx.ModelProto:
    """A model from ONNX text: `m (float[2] x) => (float[2] y) { y = Relu(x) }`."""
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {text}')


def _like(info: onnx.ValueInfoProto, value: Value) -> onnx.ValueInfoProto:
    """The declaration of a variance: shaped like its tensor, in its own name and type."""
    declared = onnx.ValueInfoProto()
    declared.CopyFrom(info)
    declared.name = value.name
    declared.type.tensor_type.elem_type = element_type(value.dtype)
    return declared


@dataclass(frozen=True)
class Evaluation:
    """A model of one case, and its variance graph."""

    case: Case
    dtype: type
    model: onnx.ModelProto
    spliced: onnx.ModelProto
    variance_names: list[str | None]  #: of each output of the source
    source: ort.InferenceSession
    session: ort.InferenceSession

    def run(self, feeds: Arrays) -> list[np.ndarray]:
        """The outputs of the source node."""
        whole = {n for n, a in feeds.items() if np.asarray(a).dtype.kind in "iub"}
        return self.source.run(
            None, {n: a if n in whole else np.asarray(a, self.dtype) for n, a in feeds.items()}
        )

    def outputs_and_variances(self, variances: Arrays) -> tuple[list[np.ndarray], list[np.ndarray | None]]:
        feeds = self.case.feeds(self.dtype)
        own_dtypes = {name: variance_dtype(array.dtype) for name, array in feeds.items()}
        feeds |= {f"{name}/own": var.astype(own_dtypes[name]) for name, var in variances.items()}
        names = [output.name for output in self.spliced.graph.output]
        found = dict(zip(names, self.session.run(None, {n: np.asarray(a) for n, a in feeds.items()})))
        means = [found[output.name] for output in self.model.graph.output]
        return means, [None if name is None else found[name] for name in self.variance_names]

    @property
    def output_types(self) -> dict[str, str]:
        """Of the source, as onnxruntime calls them."""
        if isinstance(self.source, ReferenceEvaluator):
            return {}
        return {output.name: output.type for output in self.source.get_outputs()}

    def variances(self, variances: Arrays) -> list[np.ndarray | None]:
        return self.outputs_and_variances(variances)[1]


@functools.cache
def evaluation(case: Case, dtype: type, shapes: str = "static") -> Evaluation | None:
    """None where onnxruntime has no kernel for this type."""
    model = case.model(dtype, shapes)
    source = _session_if_possible(model)
    if source is None:
        return None
    result = propagate_inputs(model, case.uncertain)
    assert not result.refused, result.refused
    spliced, names = add_variances(model, result)
    both = _session_if_possible(spliced) if dtype is np.float64 else session(spliced)
    return None if both is None else Evaluation(case, dtype, model, spliced, names, source, both)


def _session_if_possible(model: onnx.ModelProto) -> ort.InferenceSession | None:
    """None where a kernel is missing, or where the operator itself does not know the type."""
    try:
        return session(model)
    except (ort_errors.NotImplemented, ort_errors.InvalidGraph) as error:
        if "NOT_IMPLEMENTED" in str(error) or re.search(r"'tensor\((double|float16)\)' of input", str(error)):
            return None
        raise
    except ort_errors.Fail as error:
        if "bound to different types" in str(error):  # of a constant in the operator's function body
            return None
        raise


def best(case: Case) -> Evaluation:
    """In double if onnxruntime can, else in float32."""
    found = [evaluation(case, dtype) for dtype in (np.float64, np.float32)]
    found = [one for one in found if one is not None and _runs(one)]
    assert found, "onnxruntime runs this case neither in double nor in float32"
    return found[0]


def draw_variances(case: Case, std: float) -> Arrays:
    """A variance for each element of each uncertain input, of the order of std²."""
    rng = np.random.default_rng(len(case.id))
    values = case.values()
    return {name: std**2 * rng.uniform(0.5, 1.5, values[name].shape) for name in case.uncertain}


# --------------------------------------------------------------------------- checks


class Erf(OpRun):
    """ONNX's own computes in float32."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (np.vectorize(math.erf, otypes=[np.float64])(x),)


class Gelu(OpRun):
    """As Erf; the tanh form needs no reference."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> tuple[np.ndarray]:
        assert approximate == "none"
        return (x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))) / 2,)


class GlobalMaxPool(OpRun):
    """ONNX's own drops an axis of (n, c, d)."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> tuple[np.ndarray]:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


IN_NUMPY = {operator.__name__ for operator in OPERATORS}
SINGLE_INSIDE = {"Shrink", "GroupNormalization"}  #: onnxruntime's double kernel computes in float32
#: The variance adds to the expected square that they divide by: they scale by c² only where it is small.
SATURATING = {
    "LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
    "SkipSimplifiedLayerNormalization", "EmbedLayerNormalization", "InstanceNormalization",
    "GroupNormalization", "GroupNorm", "SkipGroupNorm", "MeanVarianceNormalization", "LpNormalization", "Normalizer",
    "LRN", "ReduceL2", "LpPool", "GlobalLpPool", "Normalization",
}  # fmt: skip


def check_jacobian(case: Case) -> None:
    """J² v. Products of two uncertain tensors have a term v_a v_b besides, which is 1e-8 here."""
    found = best(case)
    double = found.dtype is np.float64 and case.op_type not in SINGLE_INSIDE
    double = double and "tensor(float)" not in found.output_types.values()
    run, step, extrapolate = found.run, STEP, False
    feeds = case.feeds(np.float64)
    if case.smooth:
        double, run, feeds = False, *smooth_run(case)
        check_smooth(case, found)
    elif not double and is_exact(case):
        step = LONG_STEP
    elif not double and case.node.domain and case.op_type not in IN_NUMPY:
        step, extrapolate = MEDIUM_STEP, True
    elif not double:
        new_ops = [Erf, Gelu, GlobalMaxPool, *OPERATORS, *recurrence.OPERATORS]
        reference = ReferenceEvaluator(expanded(case.model(np.float64)), new_ops=new_ops)
        run = functools.partial(reference.run, None)
    variances = draw_variances(case, std=1e-4)
    expected = squared_jacobian_product(run, feeds, variances, step, extrapolate)
    tolerance = TOLERANCE_DOUBLE if double else TOLERANCE_EXTRAPOLATED if extrapolate else TOLERANCE_SINGLE
    tolerance = case.tolerance or tolerance
    for name, mean, var, wanted in zip(case.outputs, *found.outputs_and_variances(variances), expected):
        if mean.dtype.kind != "f" and not case.smooth:
            assert var is None, f"{name} is discrete but has a variance"
            continue
        if var is None:
            assert not np.any(wanted), f"{name} has no variance"
            continue
        assert var.shape == mean.shape
        # where J is 0 it is so to 1e-6 in float32
        floor = (FLOOR_EXTRAPOLATED if extrapolate else 1e-12) * max(v.max() for v in variances.values())
        np.testing.assert_allclose(var, wanted, rtol=tolerance, atol=floor, err_msg=name)


def smooth_run(case: Case) -> tuple[Run, Arrays]:
    """What a case's node computes but for rounding, and all its inputs, in float64."""
    feeds = {name: np.asarray(array, np.float64) for name, array in case.values().items()}

    def run(values: Arrays) -> list[np.ndarray]:
        found = case.smooth(**values)
        return [np.asarray(y) for y in found] if isinstance(found, tuple) else [np.asarray(found)]

    return run, feeds


def check_smooth(case: Case, found: Evaluation) -> None:
    """The function that stands for a node is what the node computes: whole numbers to half a step, and
    what float32 loses of 255; real numbers to float32, or to 2 % if the node rounds its inputs to 8 bits."""
    run, feeds = smooth_run(case)
    wanted, node = run(feeds)[-1], found.run(case.feeds(found.dtype))[-1]
    rounded = case.op_type.startswith("DynamicQuantize")
    atol = (
        0.501
        if node.dtype.kind in "iu"
        else (0.02 if rounded else case.tolerance or 1e-5) * np.abs(wanted).max()
    )
    np.testing.assert_allclose(np.asarray(node, np.float64), wanted, rtol=0, atol=atol)


def squared_jacobian_product(
    run: Run, feeds: Arrays, variances: Arrays, h: float = STEP, extrapolate: bool = False
) -> list[np.ndarray]:
    """Σ_j (∂y/∂x_j)² v_j for each output, by central differences."""
    totals = [np.zeros(np.shape(y)) for y in run(feeds)]
    for name, var in variances.items():
        for position in np.ndindex(var.shape):
            slopes = _slopes(run, feeds, name, position, h)
            if extrapolate:  # removes the error that goes with h²
                half = _slopes(run, feeds, name, position, h / 2)
                slopes = [(4 * fine - coarse) / 3 for fine, coarse in zip(half, slopes)]
            for total, slope in zip(totals, slopes):
                total += slope**2 * var[position]
    return totals


def _slopes(run: Run, feeds: Arrays, name: str, position: tuple[int, ...], h: float) -> list[np.ndarray]:
    """∂y/∂x_j for each output and one element j of the input `name`."""
    shifted = []
    for step in (h, -h):
        x = feeds[name].copy()
        x[position] += step
        shifted.append([np.asarray(y, np.float64) for y in run(feeds | {name: x})])
    return [(upper - lower) / (2 * h) for upper, lower in zip(*shifted)]


def check_monte_carlo(case: Case, std: float, samples: int) -> None:
    """The sample variance is that of the rule, within five standard errors of itself."""
    found = best(case)
    variances = draw_variances(case, std)
    rng = np.random.default_rng(1)
    run, feeds = smooth_run(case) if case.smooth else (found.run, case.feeds(np.float64))
    drawn = {n: feeds[n] + rng.normal(size=(samples, *v.shape)) * np.sqrt(v) for n, v in variances.items()}
    outputs = [run(feeds | {n: x[i] for n, x in drawn.items()}) for i in range(samples)]
    for name, var, values in zip(case.outputs, found.variances(variances), zip(*outputs)):
        if var is None:
            continue
        values = np.asarray(values, np.float64)  # (samples, …)
        rounding = (4 * np.finfo(found.dtype).eps * np.abs(values).max()) ** 2
        values = values - values[0]  # what is constant is exactly 0 from here on
        squares = (values - values.mean(axis=0)) ** 2
        estimate = squares.sum(axis=0) / (samples - 1)
        error = squares.std(axis=0) / np.sqrt(samples)  # √((m₄ - m₂²) / n), whatever the distribution
        close = np.abs(estimate - var) <= STANDARD_ERRORS * error + rounding
        assert np.all(close), f"{name}: sampled {estimate}, by the rule {var}, standard error {error}"


def is_exact(case: Case) -> bool:
    """True where the rule holds for variances of any size."""
    if case.exact is not None:
        return case.exact
    return TABLE[case.key].accuracy is Accuracy.EXACT and not case.multiplies_itself


def check_properties(case: Case) -> None:
    found = evaluation(case, np.float32) or best(case)
    variances = draw_variances(case, std=0.5)
    one = found.variances(variances)
    four = found.variances({name: 4 * v for name, v in variances.items()})
    zero = found.variances({name: 0 * v for name, v in variances.items()})
    for v, v4, v0 in zip(one, four, zero):
        if v is None:
            continue
        assert v.dtype == variance_dtype(found.dtype) or case.op_type == "Cast"
        assert np.all(np.isfinite(v)) and np.all(v >= 0)
        assert np.all(v0 == 0)
        if not case.is_product and case.op_type not in SATURATING:
            np.testing.assert_allclose(v4, 4 * v, rtol=1e-6)  # a power of 2: no rounding but in sums
    if case.op_type in SATURATING:
        small = {name: 1e-4 * v for name, v in variances.items()}  # some 1e-5 of the squares, and less
        smaller = found.variances({name: v / 4 for name, v in small.items()})
        for v, v4 in zip(smaller, found.variances(small)):
            if v is not None:
                np.testing.assert_allclose(v4, 4 * v, rtol=1e-2)


def check_graph(case: Case) -> None:
    """A valid model; the source untouched in it; names that tell what belongs to what."""
    found = evaluation(case, np.float32) or best(case)
    means, variances = found.outputs_and_variances(draw_variances(case, std=1))
    outputs = dict(zip((*case.outputs, *found.variance_names), (*means, *variances)))
    onnx.checker.check_model(_declared(found.spliced, outputs), full_check=True)
    assert source_nodes(found.model, found.spliced) == list(found.model.graph.node)
    for mean, wanted in zip(means, found.run(case.feeds(found.dtype))):
        np.testing.assert_array_equal(mean, wanted)
    check_names(found.model, found.spliced)


def _declared(spliced: onnx.ModelProto, outputs: dict[str, np.ndarray]) -> onnx.ModelProto:
    """The model in the form that ONNX's checker accepts: what onnxruntime or an older ONNX defines not in
    ONNX's own domain, outputs declared that ONNX cannot infer."""
    model = onnx.ModelProto()
    model.CopyFrom(spliced)
    opset = next(entry.version for entry in model.opset_import if entry.domain == "")
    for node in model.graph.node:
        if node.domain:
            continue
        if not onnx.defs.has(node.op_type) or onnx.defs.get_schema(node.op_type, opset).deprecated:
            node.domain = "com.microsoft"
            model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    for output in model.graph.output:
        if not output.type.WhichOneof("value") or not output.type.tensor_type.HasField("shape"):
            array = outputs[output.name]
            info = onnx.helper.make_tensor_value_info(output.name, element_type(array.dtype), array.shape)
            output.CopyFrom(info)
    return model


def source_nodes(model: onnx.ModelProto, spliced: onnx.ModelProto) -> list[onnx.NodeProto]:
    """The nodes of the spliced model whose outputs the source has, in order."""
    names = {name for node in model.graph.node for name in node.output if name}
    return [node for node in spliced.graph.node if names & set(node.output)]


def check_names(model: onnx.ModelProto, spliced: onnx.ModelProto) -> None:
    """Every added tensor is new, and is called `<source tensor>/var…`, `<output>_var` or a constant."""
    source = {value.name for value in (*model.graph.input, *model.graph.initializer)}
    source |= {name for node in model.graph.node for name in node.output}
    kept = source_nodes(model, spliced)
    added = [name for node in spliced.graph.node if node not in kept for name in node.output]
    constants = [tensor.name for tensor in spliced.graph.initializer[len(model.graph.initializer) :]]
    assert len(set(added + constants)) == len(added + constants)
    assert not source & set(added + constants)
    prefixes = tuple(f"{name}/var" for name in source)
    outputs = {f"{value.name}_var" for value in model.graph.output}
    for name in added:
        assert name in outputs or name.startswith(prefixes), f"{name!r} does not tell what it belongs to"
    for name in constants:
        assert name.startswith("gapa/const/"), name


def check_half(case: Case) -> None:
    """A float16 model has float32 variances, those of the float32 model but for its rounding.

    Inputs and outputs are rounded by 2⁻¹¹, and slopes with them: 10 · 2⁻¹¹ relative for curvatures
    of some units, and as much of the input's variance where the slope crosses 0.
    """
    half, single = evaluation(case, np.float16), evaluation(case, np.float32)
    if half is None or not _runs(half):
        return
    variances = draw_variances(case, std=1e-2)
    largest = max(v.max() for v in variances.values())
    for var, wanted in zip(half.variances(variances), single.variances(variances)):
        if wanted is not None:
            assert var.dtype == wanted.dtype
            np.testing.assert_allclose(var, wanted, rtol=10 * 2**-11, atol=2**-11 * largest)


def _runs(found: Evaluation) -> bool:
    """False where onnxruntime has a kernel for the type that turns out not to serve it."""
    try:
        found.run(found.case.feeds(found.dtype))
    except ort_errors.RuntimeException as error:
        if re.search("data type is not supported|does not support double", str(error)):
            return False
        raise
    return True


SHAPES_KNOWN = {"EmbedLayerNormalization"}  #: onnxruntime itself wants the shapes of its tables


def check_shapes(case: Case, shapes: str) -> str | None:
    """The same variances where the shapes are not known; the reason where a rule needs the rank."""
    if case.op_type in SHAPES_KNOWN:
        return None
    model = case.model(np.float32, shapes)
    result = propagate_inputs(model, case.uncertain)
    if result.refused:
        return result.refused[0].reason
    known, other = evaluation(case, np.float32), evaluation(case, np.float32, shapes)
    variances = draw_variances(case, std=1)
    for var, wanted in zip(other.variances(variances), known.variances(variances)):
        if wanted is not None:
            np.testing.assert_allclose(var, wanted, rtol=1e-6)
    return None

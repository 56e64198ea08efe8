"""What a model gets that no variance passes: a score of its inputs, and nothing else.

Trees are constant but for jumps, neighbours are chosen and not computed, some operators have no rule. The unexplained
share of a site in front of them still says how strange an input is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.evidence import read_outputs
from gapa_onnx.plan.head import Head, Task
from gapa_onnx.plan.layers import CARRIERS
from gapa_onnx.settings import Settings
from gapa_onnx.variance.propagation import Propagation, first_output, live_tensors
from gapa_onnx.variance.rules import Deterministic, behaviour
from gapa_onnx.variance.sites import Site

_SAME_VALUES = (*CARRIERS, "Cast", "Normalizer", "Transpose", "ZipMap")
_SHAPES = ("Shape", "Size")
MOST_NAMED = 3  # operators, of those that no variance passes


def score_head(source: SourceModel, why: str, settings: Settings) -> Head:
    """The head of the output that the score stands beside: the first of numbers, else the first."""
    if settings.task not in ("auto", Task.NONE.value):
        raise UserError(
            f"`task={settings.task!r}` needs a variance, and the file will have a score only: {why}",
            "leave `task` out",
        )
    outputs = read_outputs(source)
    name = next((name for name, seen in outputs.items() if seen.is_float), next(iter(outputs)))
    return Head(name, Task.NONE, name, "identity", None, None, f"score only: {why}")


def score_site(sites: Sequence[Site]) -> Site:
    """The last of the sites that variance would have been born at, in units of standard deviations."""
    return replace(sites[-1], standardised=True)


def stopped(source: SourceModel, site: Site, found: Propagation, half_way: bool) -> str | None:
    """Why no variance of a site reaches an output, in words; None where it does.

    `found` is the walk that ends at operators without a rule. Where variance was refused `half_way`, which is that
    operators with a rule follow, the user may want to choose other sites, so that nothing is given up here.
    """
    if any(tensor.name in found.variances for tensor in source.outputs):
        return None
    if found.refused:
        named = {entry.node for entry in found.refused}
        if half_way and not _are_last(source, named):
            return None
        first = found.refused[0]
        return f"no variance passes {first.operator}: {first.reason}"
    operators = dict(_where_it_ends(source, {*found.variances, site.output}))
    if any(name.startswith("TreeEnsemble") for name in operators):
        return "no variance passes a tree ensemble, which is constant but for jumps"
    listed = [f"{name} ({why})" if why else name for name, why in operators.items()]
    return f"no variance passes {', '.join(listed[:MOST_NAMED]) or 'to an output'}"


def _are_last(source: SourceModel, nodes: set[str]) -> bool:
    """Whether behind some nodes the same numbers are handed on, or nothing that has a variance."""
    behind: set[str] = set()
    for node in source.graph.nodes:
        if node.name in nodes or first_output(node) in nodes:
            behind.update(tensor.name for tensor in node.outputs)
        elif any(tensor.name in behind for tensor in node.inputs):
            if node.op not in _SAME_VALUES and not isinstance(behaviour(node.domain, node.op), Deterministic):
                return False
            behind.update(tensor.name for tensor in node.outputs)
    return bool(behind)


def _where_it_ends(source: SourceModel, uncertain: set[str]) -> Iterator[tuple[str, str]]:
    """The operators that read what is uncertain and make nothing that is, and why where that is known."""
    live = live_tensors(source.graph)
    for node in source.graph.nodes:
        made: list[gs.Tensor] = [tensor for tensor in node.outputs if tensor.name in live]
        reads = any(tensor.name in uncertain for tensor in node.inputs)
        if made and reads and node.op not in _SHAPES and not any(tensor.name in uncertain for tensor in made):
            entry = behaviour(node.domain, node.op)
            yield node.op, entry.reason if isinstance(entry, Deterministic) else ""

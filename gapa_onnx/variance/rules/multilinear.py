"""What is linear in each of its operands: Einsum, and the determinant in each of its elements.

Of y = Σ Π_o X_o over index assignments, with independent elements x + e, every choice S of operands
contributes the products of their e, whose coefficients are sums of products of the other means:

    Var y = Σ_{S ≠ ∅} f(v of S, (f(means of the others))²)

The inner f sums over the indices that neither S nor the output has. Where there are two operands and
every summed index is in both, this is f(v_a, b²) + f(a², v_b) + f(v_a, v_b).
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import combinations

from gapa_onnx.variance.graph import Value
from gapa_onnx.variance.rules.registry import Accuracy, rule
from gapa_onnx.variance.rules.view import NodeView, Operand

MOST_UNCERTAIN = 3  #: operands of an Einsum; k of them make 2ᵏ - 1 terms
LARGEST_MATRIX = 6  #: of a Det; its m² minors have (m - 1)² elements each


@rule("Einsum", accuracy=Accuracy.EXACT, linear=True)
def einsum(node: NodeView) -> Value:
    """Σ_S f(v of S, (f(means of the others))²) over the choices S of uncertain operands"""
    operands = node.inputs
    terms, result = _parse(node.attr("equation"))
    _refuse_what_is_not_multilinear(node, terms, result)
    uncertain = [i for i, operand in enumerate(operands) if not operand.certain]
    choices = [c for size in range(1, len(uncertain) + 1) for c in combinations(uncertain, size)]
    parts = [_contribution(operands, terms, result, choice) for choice in choices]
    return sum(parts[1:], parts[0])


def _contribution(operands: list[Operand], terms: list[str], result: str, chosen: tuple[int, ...]) -> Value:
    """f(v of S, (f(means of the others))²) for one choice S."""
    others = [i for i in range(len(operands)) if i not in chosen]
    variances = [operands[i].variance for i in chosen]
    equation = ",".join(terms[i] for i in chosen)
    if not others:
        return _einsum(variances, f"{equation}->{result}")
    kept = set(_indices(result)).union(*(_indices(terms[i]) for i in chosen))
    found = dict.fromkeys(index for i in others for index in _indices(terms[i]))
    remaining = "".join(index for index in found if index in kept)
    coefficient = _product([operands[i].mean for i in others], [terms[i] for i in others], remaining)
    if not remaining:
        return _einsum(variances, f"{equation}->{result}") * coefficient.squared
    return _einsum([*variances, coefficient.squared], f"{equation},{remaining}->{result}")


def _product(means: list[Value], terms: list[str], result: str) -> Value:
    """f(means), which is the mean itself where there is one and nothing to sum."""
    return means[0] if terms == [result] else _einsum(means, f"{','.join(terms)}->{result}")


def _einsum(values: list[Value], equation: str) -> Value:
    return values[0].graph.emit("Einsum", *values, equation=equation)


def _indices(term: str) -> list[str]:
    return re.findall(r"\.\.\.|[A-Za-z]", term)


def _parse(equation: str) -> tuple[list[str], str]:
    """The terms of the operands and of the result, which may be left to be understood."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if arrow:
        return terms, right
    times = Counter(index for term in terms for index in _indices(term))
    once = sorted(index for index, count in times.items() if count == 1 and index != "...")
    return terms, ("..." if "..." in times else "") + "".join(once)


def _refuse_what_is_not_multilinear(node: NodeView, terms: list[str], result: str) -> None:
    uncertain = [operand.tensor.name for operand in node.inputs if not operand.certain]
    if len(set(uncertain)) < len(uncertain):
        raise node.refuse("a tensor is multiplied by itself: its factors are not independent")
    if len(uncertain) > MOST_UNCERTAIN:
        raise node.refuse(f"more than {MOST_UNCERTAIN} of its operands are uncertain")
    if any("..." in term for term in terms) and "..." not in result:
        raise node.refuse("it sums over the dimensions of an ellipsis")
    sizes = _sizes_by_index(node.inputs, terms)
    if any(1 in found and len(found) > 1 and index not in result for index, found in sizes.items()):
        raise node.refuse("it sums over an index of which one operand has a single value")


def _sizes_by_index(operands: list[Operand], terms: list[str]) -> dict[str, set[int]]:
    """All sizes that an index is known to have; those of a term with an ellipsis are not told apart."""
    sizes: dict[str, set[int]] = {}
    for operand, term in zip(operands, terms):
        if operand.shape is not None and "..." not in term:
            for index, size in zip(_indices(term), operand.shape):
                if isinstance(size, int):
                    sizes.setdefault(index, set()).add(size)
    return sizes


@rule("Det", accuracy=Accuracy.FIRST_ORDER)
def determinant(node: NodeView) -> Value:
    """Σ_ij m_ij² v_ij with m_ij the determinant without row i and column j"""
    x, graph = node.inputs[0], node.graph
    rank, size = x.rank, x.sizes[-1]
    if isinstance(size, int) and size > LARGEST_MATRIX:
        raise node.refuse(f"its matrices are larger than {LARGEST_MATRIX}: their minors are too many")
    others = _all_but_each(x)  # (m, m - 1)
    minors = graph.emit("Gather", x.mean, others, axis=rank - 2)  # (…, m, m - 1, m)
    minors = graph.emit("Gather", minors, others, axis=rank)  # (…, m, m - 1, m, m - 1)
    perm = [*range(rank - 2), rank - 2, rank, rank - 1, rank + 1]
    minors = graph.emit("Det", graph.emit("Transpose", minors, perm=perm))  # that of no elements is 1
    return graph.reduce("ReduceSum", minors.squared * x.variance, [rank - 2, rank - 1], keepdims=False)


def _all_but_each(x: Operand) -> Value:
    """For each index of the last axis, all the other indices: k, or k + 1 from that index on."""
    graph = x.graph
    size = graph.dimension(x.raw, x.rank - 1)
    each = graph.unsqueeze(graph.positions(size), [1])  # (m, 1)
    k = graph.positions(size - 1)  # (m - 1)
    return k + (k >= each)

"""Graphs of random operators: what the rules make of a whole graph, against evaluations that know no rule.

any graph    the variance is that of `numpy_rules`, node by node
trees        it is that of the graph: J² v with J of the whole graph, and Monte Carlo
layers       feature maps with channels first or last, split, transposed and joined between layers
all          the model is valid, and the source's outputs keep every bit; half of the files are not sorted
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from support import random_operators  # noqa: F401  (fills the palette)
from support.graph_checks import (
    FIRST_ORDER_COMPOSITES,
    SINGLE,
    check_graph,
    check_moments,
    check_tree,
    composites_of,
    expected,
    ort_session,
)
from support.random_graphs import PALETTE, RandomGraph, random_graphs
from support.random_layers import LayeredGraph, layered_graphs

EXAMPLES = [200, pytest.param(1000, marks=pytest.mark.nightly)]
LAYERS = [100, pytest.param(500, marks=pytest.mark.nightly)]
TREES = [25, pytest.param(200, marks=pytest.mark.nightly)]


def check_examples(examples: int, strategy, check: Callable[[RandomGraph], None]) -> None:
    """The same examples at each run."""
    decorate = settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    decorate(given(strategy)(check))()


@pytest.mark.parametrize("examples", EXAMPLES)
def test_variances_node_by_node(examples):
    counts = Counter()

    def check(graph: RandomGraph) -> None:
        wanted = expected(graph)
        counts["graphs"] += 1
        counts["with composites"] += wanted is not graph.tensors
        counts["left out"] += wanted is None
        counts["unsorted"] += not graph.is_sorted
        if wanted is not None:
            counts.update(graph.drawn)
            check_graph(graph, wanted, counts)

    check_examples(examples, random_graphs(), check)
    print(counts)  # with pytest -rP
    assert set(PALETTE) <= set(counts), "an operator was never drawn"
    assert counts["with composites"] > 0.05 * counts["graphs"]
    assert counts["left out"] < 0.05 * counts["graphs"]
    assert counts["double by InferenceSession"] > 0.2 * counts["graphs"]
    assert counts["unsorted"] > 0.3 * counts["graphs"]


# ------------------------------------------------------------------------------ trees


@pytest.mark.parametrize("examples", TREES)
def test_variances_of_trees(examples):
    """No tensor is read twice and no elements are mixed that have something in common: to first order,
    the variances are those of the graph as a whole."""
    counts = Counter()

    def check(graph: RandomGraph) -> None:
        counts["graphs"] += 1
        if any(composite.node.op not in FIRST_ORDER_COMPOSITES for composite in composites_of(graph)):
            counts["left out"] += 1
            return
        counts.update(graph.drawn)
        check_tree(graph)

    check_examples(examples, random_graphs(tree=True, without=frozenset({"spelled out"})), check)
    print(counts)
    assert counts["left out"] < 0.05 * counts["graphs"]


# ----------------------------------------------------------------------------- layers


@pytest.mark.parametrize("examples", LAYERS)
def test_variances_of_layers(examples):
    """Also where the variance comes as one number per position times one per channel, which layers read as such."""
    counts = Counter()

    def check(graph: LayeredGraph) -> None:
        wanted = expected(graph)
        counts["graphs"] += 1
        counts[f"channels {'last' if graph.axis == -1 else 'first'}"] += 1
        counts["unsorted"] += not graph.is_sorted
        counts.update(graph.drawn)
        assert wanted is not None
        check_graph(graph, wanted, counts)
        session = ort_session(graph.scaled(np.float32))
        names = [output.name for output in session.get_outputs()]
        found = dict(zip(names, session.run(None, graph.scaled_feeds(np.float32))))
        check_moments(found, wanted, graph, SINGLE)

    check_examples(examples, layered_graphs(), check)
    print(counts)
    blocks = {"layer", "joined", "cut", "activation", "turned", "scaled", "pooled"}
    assert blocks <= set(counts), "a block was never drawn"
    assert min(counts["channels first"], counts["channels last"], counts["unsorted"]) > 0.3 * counts["graphs"]

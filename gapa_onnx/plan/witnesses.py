"""Witnesses: places whose share is computed and not passed on, to say how strange an input looks there.

A late layer has forgotten much of what makes an input strange, and an early one knows nothing of classes, so places at
several depths see more than one. `auto` takes tensors that all features pass through (`cuts`), on the way to the last
site:

    maps of several sizes       the last tensor of each size: the ends of the stages of a convolutional network
    most of them of one size    a third and two thirds of the way: blocks of a transformer, layers of a recurrent network;
                                where each token has a score of its own, two thirds
    vectors                     the first of the fully connected layers

at most `MOST` of them, and none of a small stage that ends in the last site, which would say the same again. Where they
are is one thing; what a query is there is another: a position where the last site has a query for each position of a
sequence, so that each token has a score of its own, else a sample, the mean over its positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_graphsurgeon as gs

from gapa_onnx.errors import UserError
from gapa_onnx.model.load import SourceModel
from gapa_onnx.plan.axes import FeatureAxes
from gapa_onnx.plan.cuts import Cut, cut_tensors
from gapa_onnx.plan.frontier import place_at
from gapa_onnx.plan.head import Head
from gapa_onnx.plan.layers import RESHAPERS, Network
from gapa_onnx.plan.naming import named_site, site_at, site_at_activation, site_at_tensor
from gapa_onnx.variance.sites import Layout, Site

MOST = 3  # beside the sites; each costs a query for every sample
WIDEST = 4096  # features of a query: distances and the size of the file grow with them
WAYS = (1 / 3, 2 / 3)  # how far along a stage that holds most of a network
WAYS_OF_TOKENS = (2 / 3,)  # early blocks know tokens, hardly texts


def find_witnesses(
    source: SourceModel, spec: str, sites: Sequence[Site], heads: Sequence[Head] = ()
) -> tuple[Site, ...]:
    """The witnesses by `auto`, `none`, or names as those of sites; what is a site already is left out. What positions have
    scores is seen at the heads."""
    network = Network.of(source)
    if spec == "none" or not sites:
        return ()
    asking = _Asking(network, sites[-1], any_has_positions(heads))
    if spec == "auto":
        ways = WAYS_OF_TOKENS if asking.of_tokens else WAYS
        places = _auto(network, sites, source.tensors[sites[-1].output], ways)
        found = [one for place in places if (one := asking(place)) is not None]
    else:
        found = [_named(asking, name.strip()) for name in spec.split(",") if name.strip()]
        if not found:
            raise UserError(
                "no witness is named", "let `witnesses` be auto, none or names separated by commas"
            )
    taken = {name for site in sites for name in (site.query, site.output)}
    return tuple({one.query: one for one in found if taken.isdisjoint((one.query, one.output))}.values())


def _named(asking: _Asking, text: str) -> Site:
    """A place by its name."""
    found = asking(named_site(asking.network, text))
    if found is None:
        raise UserError(
            f"{text!r} has no axis of samples beside that of its features, so it cannot be a witness",
            "name a tensor of shape (samples, features) or a map of these",
        )
    return found


# ------------------------------------------------------------------------------- what a query is


@dataclass(frozen=True)
class _Asking:
    """What a query is at a witness of the `last` site."""

    network: Network
    last: Site
    by_position: bool  #: whether an output has a score for each position of a sequence

    def __call__(self, site: Site) -> Site | None:
        """A place with a query for each position where the last site has one for each of the same, as tokens have, else
        with one for each sample; None where its axes do not allow that."""
        if self.of_tokens and site.rank == 3 and site.axis in (-1, 2):
            return replace(site, layout=Layout.ROWS)
        return one_query_each(self.network, site, self.network.source.tensors[self.last.output])

    @property
    def of_tokens(self) -> bool:
        """Whether each position of a sequence has a query of its own at the last site, and a score."""
        return self.by_position and are_positions(self.last)


def are_positions(site: Site) -> bool:
    """Whether the queries of a place are those of the positions (N, T) of a sequence, whose features come last."""
    return site.layout is Layout.ROWS and site.rank == 3 and not site.chosen


def has_positions(head: Head) -> bool:
    """Whether an output (N, T, classes) has a score for each position of a sequence."""
    return head.detector is None and head.rank == 3 and head.axis == 2


def any_has_positions(heads: Sequence[Head]) -> bool:
    """Whether one of the outputs has; what stands beside a detector is of its candidates."""
    return any(map(has_positions, heads)) and not any(head.detector for head in heads)


def one_query_each(network: Network, site: Site, last: gs.Tensor) -> Site | None:
    """The same place with one query for each sample of the `last` place, the mean over positions; None where its axes do
    not allow that."""
    if site.rank is None or site.rank < 2 or site.axis == 0:
        return None
    if site.rank == 2:
        return site
    samples = _samples(network, network.source.tensors[site.query], last)
    return replace(site, layout=Layout.POOLED, samples=samples if samples < site.axis else 0)


def _samples(network: Network, tensor: gs.Tensor, last: gs.Tensor) -> int:
    """The axis of samples: the first, unless the names of sizes tell that it is another one, as in a sequence whose time
    comes first. It is called as the first axis of rows (N, d) at the last place, or of what is fed."""
    fed = [spec.shape[0] for spec in network.source.inputs if spec.shape]
    rows = [last.shape[0]] if last.shape is not None and len(last.shape) == 2 else []
    called = (name for name in (*rows, *fed) if isinstance(name, str) and name in (tensor.shape or ()))
    return next((list(tensor.shape).index(name) for name in called), 0)


# ------------------------------------------------------------------------------- where they are


def _auto(network: Network, sites: Sequence[Site], last: gs.Tensor, ways: Sequence[float]) -> list[Site]:
    if any(site.chosen or site.joined or site.standardised for site in sites):
        return []
    before, behind = cut_tensors(network, last)
    passed = [cut for cut in before if _is_place(network, cut.tensor, last)]
    stages = _Stages(network, last, ways)
    inside = [cut for cut in passed if cut.depth]  # embeddings alone are what is fed in another form
    places = [site_at_tensor(network, cut.tensor) for cut in stages.witnesses(inside, behind)]
    return _spread_out(places + _first_vector(network, passed))


@dataclass(frozen=True)
class _Stages:
    """The stages of a network on the way to the `last` site, and the places that stand for them."""

    network: Network
    last: gs.Tensor
    ways: Sequence[float]  #: how far along the final stage places are, where it holds most of the network

    def witnesses(self, passed: Sequence[Cut], behind: Sequence[Cut]) -> list[Cut]:
        """The end of each stage; of the final one, where it holds half of what everything passes through or more, what is some
        `ways` along it. A smaller one that ends in the last site is left out: the site tells."""
        stages, told = self._by_stage(passed), self._by_stage(behind)
        final = self._final((*passed, *behind))
        if final not in stages and isinstance(final, int) and _is_sequence(self.last):
            final = self._final(
                passed
            )  # of open length, where the inside of a block is as a stage of its own by its width
        held = stages.get(final, [])
        ends = {stage: cuts[-1] for stage, cuts in stages.items() if stage not in told}
        if not held or 2 * len(held) < sum(map(len, stages.values())):
            return list(ends.values())
        ends.pop(final, None)
        end = max(cut.depth for cut in (*held, *told.get(final, ())))
        # What the stage begins with may have had another form before, as patches have that become tokens.
        others = [one for one in ends.values() if one.bent or one.depth != held[0].depth]
        start = max((one.depth for one in passed[: passed.index(held[0])]), default=0)
        return sorted((*others, *_along(held, start, end, self.ways)), key=passed.index)

    def _final(self, cuts: Sequence[Cut]) -> object:
        """The stage of the last map that has positions."""
        found = [self._stage(cut.tensor) for cut in cuts if _is_map(cut.tensor)]
        return next((stage for stage in reversed(found) if stage != ()), None)

    def _by_stage(self, cuts: Sequence[Cut]) -> dict[object, list[Cut]]:
        """The maps among tensors, in their order, by what those of one stage have in common."""
        stages: dict[object, list[Cut]] = {}
        for cut in cuts:
            if _is_map(cut.tensor):
                stages.setdefault(self._stage(cut.tensor), []).append(cut)
        return stages

    def _stage(self, tensor: gs.Tensor) -> object:
        """What maps of one stage have in common: their size, or where that is open their width."""
        axis = FeatureAxes.of(self.network.source).at(tensor).axis % len(tensor.shape)
        beside = (_samples(self.network, tensor, self.last), axis)
        sizes = tuple(size for at, size in enumerate(tensor.shape) if at not in beside and size != 1)
        return sizes if all(isinstance(size, int) for size in sizes) else tensor.shape[axis]


def _is_sequence(tensor: gs.Tensor) -> bool:
    return tensor.shape is not None and len(tensor.shape) == 3


def _is_map(tensor: gs.Tensor) -> bool:
    """Whether a tensor has positions beside features. What a recurrent layer makes has its features on two axes, one of
    them that of directions, and is put together behind it."""
    recurrent = bool(tensor.inputs) and tensor.inputs[0].op in ("LSTM", "GRU", "RNN")
    return tensor.shape is not None and len(tensor.shape) > 2 and not recurrent


def _along(held: Sequence[Cut], start: int, end: int, ways: Sequence[float]) -> list[Cut]:
    """What is some ways along a stage, in layers. Of tensors without a layer between them the last:
    they hold nearly the same."""
    by_depth = {cut.depth: cut for cut in held}
    wanted = [start + way * (end - start) for way in ways]
    depths = [next((depth for depth in by_depth if depth >= one), held[-1].depth) for one in wanted]
    return [by_depth[depth] for depth in dict.fromkeys(depths)]


def _first_vector(network: Network, passed: Sequence[Cut]) -> list[Site]:
    """The first of the tensors (N, d) that goes into an activation, else into a layer: what lies before may be fused with
    the layer that makes it. A map that is flattened is none."""
    tensors = [cut.tensor for cut in passed]
    vectors = [
        tensor for tensor in tensors if len(tensor.shape) == 2 and tensor.inputs[0].op not in RESHAPERS
    ]
    for tensor in vectors:
        found = next(
            (network.activations[id(node)] for node in tensor.outputs if id(node) in network.activations),
            None,
        )
        if found is not None:
            return [site_at_activation(network, found)]
    read = (tensor for tensor in vectors if any(id(node) in network.layers for node in tensor.outputs))
    return [site_at(network, place_at(network, tensor)) for tensor in read][:1]


def _spread_out(places: list[Site]) -> list[Site]:
    """At most `MOST`, the first and the last of them and what is evenly between."""
    if len(places) <= MOST:
        return places
    return [places[round(at * (len(places) - 1) / (MOST - 1))] for at in range(MOST)]


def _is_place(network: Network, tensor: gs.Tensor, last: gs.Tensor) -> bool:
    """Whether a tensor has features of known width, no wider than is cheap, and may have the axis of samples that the last
    place has; what was fed tells in the end (`fit.collect`)."""
    if tensor.shape is None or len(tensor.shape) < 2 or not network.holds_features(tensor):
        return False
    axis, samples = FeatureAxes.of(network.source).at(tensor).axis, _samples(network, tensor, last)
    width, rows = tensor.shape[axis], tensor.shape[samples]
    fed = [spec.shape[0] for spec in network.source.inputs if spec.shape]
    return (
        samples < axis
        and isinstance(width, int)
        and 1 < width <= WIDEST
        and (not isinstance(rows, int) or rows < 0 or rows in fed)  # some files declare an open size as -1
        and not _are_others(network, rows, last.shape[0] if last.shape else None)
    )


def _are_others(network: Network, size: object, other: object) -> bool:
    """Whether two sizes are those of different axes of what is fed: time and samples, where time comes first."""
    declared = {one for spec in network.source.inputs for one in spec.shape or ()} - {None}
    return size != other and size in declared and other in declared

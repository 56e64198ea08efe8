"""How strange an input is, by all witnesses together: the shares of several places and the entropy of the prediction.

Each of these numbers x is put on the scale of ordinary inputs,

    z = (log x − median) / (quantile .95 − median)          0 at the median of ordinary inputs, 1 where few are beyond

and added up: the last place as it is, the entropy where it is not far below the ordinary, earlier places where all of them
together are beyond it,

    beyond = softplus(4 (z_earlier − 1¼))                   z_earlier: the mean of the z of earlier places, on that scale too
    score  = ½ z_last + beyond + ⅓ softplus(2 (z_entropy + ½))

An early place knows nothing of classes, and what it finds ordinary may still be of none; a network may be sure of what
it has never seen. So neither takes anything away, or in the case of the entropy little. Ordinary inputs are strange to
one of several places more often than to all of them, so that their mean tells more than each by itself. The score
increases strictly in every share, also beyond all that was seen. The variance of a site is 1 + beyond times what its own
place says: had variance been born at the earlier places, it would have arrived there too.

Of a position of a sequence, such as a token, earlier places count as they are,

    score = ½ z_last + z_earlier + ⅓ softplus(2 (z_entropy + ½))

since a single one is hardly ever far beyond the ordinary, and a strange text is known by the mean over its tokens: it is
shifted where no token stands out. What was chosen on what is in docs/decisions.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.variance.graph import Value, VarianceGraph

QUANTILE = 0.95  # of ordinary inputs, that is at 1
NARROWEST = 0.05  # between the median and that quantile: where all are alike, every difference would be huge
FARTHEST = 200.0  # nats behind the most probable class: what lies there has a probability of 0 in float32


@dataclass(frozen=True)
class Kind:
    """How numbers of one kind enter: steepness · (mean of z − start), through a softplus or as it is."""

    faintest: float  #: what is 0 has no logarithm
    steepness: float = 1.0
    start: float = 0.0
    bent: bool = False  #: through a softplus
    weight: float = 1.0


LAST = Kind(1e-12, 0.5)
EARLIER = Kind(1e-12, 4.0, 1.25, True)
ALONG = Kind(1e-12)  #: earlier places of positions: a sequence is told by the mean of what it says of each
ENTROPY = Kind(1e-7, 2.0, -0.5, True, 1 / 3)


@dataclass(frozen=True)
class Gauge:
    """Numbers of one kind and the parameters that they are measured by: Σ (log x − centre) · slope."""

    kind: Kind
    reads: tuple[str, ...]  #: the outputs of the places whose shares they are, or the tensor of entropies
    centre: str  #: parameter (columns,)
    slope: str  #: parameter (columns,)

    def fitted(self, columns: Array) -> tuple[Array, Array]:
        """Centre and slope from the numbers (n, columns) of ordinary inputs."""
        logs = np.log(np.maximum(columns, self.kind.faintest))
        finite = logs[np.isfinite(logs).all(axis=1)]
        count = columns.shape[1]
        if not len(finite):
            return np.zeros(count), np.ones(count)
        median, unit = _scale(finite)
        middle, whole = np.zeros(1), np.ones(1)
        if count > 1:
            middle, whole = _scale(((finite - median) / unit).mean(axis=1, keepdims=True))
        # Σ slope (log x − centre) is steepness · ((mean of z − middle) / whole − start): what is taken off the mean is taken
        # off every z.
        centre = median + (middle + self.kind.start * whole) * unit
        return centre, self.kind.steepness / (count * unit * whole)

    def __call__(self, columns: Array, centre: Array, slope: Array) -> Array:
        """What numbers (n, columns) add to a score, (n,), as the graph computes it."""
        z = ((np.log(np.maximum(columns, self.kind.faintest)) - centre) * slope).sum(axis=1)
        found: Array = self.kind.weight * (np.logaddexp(0, z) if self.kind.bent else z)
        return found


def _scale(logs: Array) -> tuple[Array, Array]:
    """Median of numbers (n, columns), and how far their quantile .95 is from it."""
    median = np.median(logs, axis=0)
    return median, np.maximum(np.quantile(logs, QUANTILE, axis=0) - median, NARROWEST)


@dataclass(frozen=True)
class WitnessTensors:
    """What a score is combined from."""

    last: Gauge
    earlier: Gauge | None
    entropy: Gauge | None

    @property
    def gauges(self) -> tuple[Gauge, ...]:
        return tuple(gauge for gauge in (self.last, self.earlier, self.entropy) if gauge is not None)


@dataclass
class Testimony:
    """What witnesses say of samples, or of each position of them, written once for all that ask."""

    graph: VarianceGraph
    held_out: bool = False  #: whether their word is ranked among rows that the model was not fitted to
    rank: int = 2  #: of shares: (N, 1) for samples, (N, T, 1) for positions
    shares: dict[str, Value] = field(default_factory=dict)  #: by the output of a place, the last place first
    _measured: dict[tuple[Kind, tuple[str, ...]], tuple[Value, Gauge]] = field(default_factory=dict)

    def measured(self, kind: Kind, numbers: Mapping[str, Value], prefix: str) -> tuple[Value, Gauge]:
        """Emit what numbers (…, 1), by what they are read from, add to a score: (…, 1)."""
        key = (kind, tuple(numbers))
        if key not in self._measured:
            self._measured[key] = self._emit(kind, numbers, prefix)
        return self._measured[key]

    def _emit(self, kind: Kind, numbers: Mapping[str, Value], prefix: str) -> tuple[Value, Gauge]:
        graph, columns, axis = self.graph, list(numbers.values()), self.rank - 1
        dtype, count = columns[0].dtype, len(columns)
        centre = graph.constant(np.zeros(count, dtype), f"{prefix}/centre")
        slope = graph.constant(np.ones(count, dtype), f"{prefix}/slope")
        with graph.scope(prefix):
            together = graph.emit("Concat", *columns, axis=axis) if count > 1 else columns[0]
            z = (graph.emit("Log", graph.at_least(together, kind.faintest)) - centre) * slope
            z = graph.reduce("ReduceSum", z, [axis]) if count > 1 else z
            found = graph.emit("Softplus", z) if kind.bent else z
            found = found if kind.weight == 1 else found * kind.weight
        return found, Gauge(kind, tuple(numbers), centre.name, slope.name)

    def beyond(self, places: tuple[str, ...], prefix: str) -> tuple[Value, Gauge]:
        """Emit how far earlier places are beyond the ordinary, (…, 1)."""
        return self.measured(EARLIER, {place: self.shares[place] for place in places}, prefix)


@dataclass(frozen=True)
class Heard:
    """All that witnesses say."""

    samples: Testimony
    positions: Testimony


def emit_strangeness(
    testimony: Testimony, places: tuple[str, ...], entropy: Value | None, prefix: str
) -> tuple[Value, Value, WitnessTensors]:
    """Emit the score (N,) or (N, T) of places, the last of which comes first, and the entropy (…, 1); and the same by
    shares alone."""
    graph, (last, *earlier) = testimony.graph, places
    score, of_last = testimony.measured(LAST, {last: testimony.shares[last]}, f"{last}/gapa/z")
    of_earlier = of_entropy = None
    if earlier:
        if testimony.rank == 2:
            beyond, of_earlier = testimony.beyond(tuple(earlier), f"{last}/gapa/beyond")
        else:
            shares = {place: testimony.shares[place] for place in earlier}
            beyond, of_earlier = testimony.measured(ALONG, shares, f"{last}/gapa/earlier")
        with graph.scope(prefix):
            score = score + beyond
    by_shares = score
    if entropy is not None:
        added, of_entropy = testimony.measured(ENTROPY, {entropy.name: entropy}, f"{prefix}/entropy")
        with graph.scope(prefix):
            score = score + added
    with graph.scope(prefix):
        axes = [testimony.rank - 1]
        score, by_shares = graph.squeeze(score, axes), graph.squeeze(by_shares, axes)
    return score, by_shares, WitnessTensors(of_last, of_earlier, of_entropy)


def emit_entropy(graph: VarianceGraph, logits: Value, link: str, scope: str, axis: int = 1) -> Value:
    """The entropy (…, 1) of the source's own prediction from its logits (…, C); of labels the sum over them.

    Each term is positive, so that nothing cancels where the prediction is sure. A class that is ruled out, by a logit of
    minus infinity, has no part in it.
    """
    with graph.scope(scope):
        if link == "sigmoid":
            behind = graph.at_least(-graph.emit("Abs", logits), -FARTHEST)
            rest = behind.exp()  # odds of the less probable answer
            terms = graph.emit("Log", 1.0 + rest) - behind * rest / (1.0 + rest)
            return graph.reduce("ReduceSum", terms, [axis])
        logs = graph.at_least(graph.emit("LogSoftmax", logits, axis=axis), -FARTHEST)
        return -graph.reduce("ReduceSum", logs.exp() * logs, [axis])

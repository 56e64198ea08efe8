"""Has the input changed? A test on a stream of scores, without labels, that may be looked at after every row.

The null hypothesis is that ordinary rows and the rows of the stream so far are exchangeable. With n ordinary scores, the
t-th row of the stream has the smoothed rank

    u_t = (#{ordinary rows that are stranger} + #{earlier rows of the stream that are stranger} + U) / (n + t),

U uniform; ties are broken by a seed. Under the hypothesis u_1, u_2, … are independent and uniform, whatever the scores'
distribution is and however few the ordinary ones are. (The p-values of a file rank among ordinary rows alone: given
these they are not uniform, and betting against them raises false alarms.) Somebody who bets against uniformity starts with 1; the
capital is a martingale, so that by Ville's inequality it ever reaches 1/α with probability at most α.

The bets are densities on (0, 1): more rows than there should be are among the strangest, or among the most ordinary. All
of them are placed at once, and as nobody knows when an input changes, a share 1/(t (t + 1)) of the capital enters
before row t: a change at row t has to be told 2 ln t more plainly than one at the start.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array

#: Of the bets: tail of the ranks, and how many of the rows are held to come from it alone.
TAILS = (0.002, 0.01, 0.05, 0.2)
PARTS = (0.03, 0.1, 0.3, 0.8)
ORDINARY_TAILS = (0.05, 0.2)  #: the same at the other end
ORDINARY_PARTS = (0.3, 0.8)
BLOCK = 256  #: rows that are compared with each other directly

#: (lower end, upper end, part) of each bet: density 1 − part + part / (upper − lower) between the ends, 1 − part elsewhere.
BETS: Array = np.array(
    [(0.0, tail, part) for tail in TAILS for part in PARTS]
    + [(1 - tail, 1.0, part) for tail in ORDINARY_TAILS for part in ORDINARY_PARTS]
)


@dataclass(frozen=True)
class Ordinary:
    """Ordinary scores, in ascending order without repetition, and how often each occurs."""

    scores: Array  #: (d,)
    counts: Array  #: (d,)

    @staticmethod
    def of(scores: Array) -> Ordinary:
        return Ordinary(*np.unique(np.asarray(scores, np.float64), return_counts=True))

    @property
    def rows(self) -> int:
        return int(self.counts.sum())

    def places(self, scores: Array) -> Array:
        """Where scores lie: 2 i + 1 at the i-th ordinary one, 2 i below it. What is no number lies beyond all."""
        known = np.where(np.isnan(scores), np.inf, scores)
        left, right = (np.searchsorted(self.scores, known, side) for side in ("left", "right"))
        found: Array = left + right
        return found

    def places_of_p_values(self, pvalues: Array) -> Array:
        """The same from p-values: of what they leave open, a score that occurs once is passed over."""
        at_least = np.rint(np.asarray(pvalues, np.float64) * (self.rows + 1)).astype(np.int64) - 1
        below = self.rows - np.clip(at_least, 0, self.rows)
        index = np.searchsorted(np.cumsum(self.counts), below, "right")
        repeated = np.append(self.counts, 0)[index] > 1
        found: Array = 2 * index + repeated
        return found


def smoothed_ranks(ordinary: Ordinary, places: Array, seed: int = 0) -> Array:
    """u (t,) of a stream: small where a row is stranger than others."""
    generator = np.random.default_rng(seed)
    own, uniform = generator.random((2, len(places)))
    stranger = _stranger_ordinary(ordinary, places, own, generator) + _stranger_before(places + own)
    found: Array = (stranger + uniform) / (ordinary.rows + 1 + np.arange(len(places)))
    return found


def _stranger_ordinary(
    ordinary: Ordinary, places: Array, own: Array, generator: np.random.Generator
) -> Array:
    """How many ordinary rows are stranger; equal ones are told apart by numbers that each row has been given."""
    if not ordinary.rows:
        return np.zeros(len(places))
    beyond = np.concatenate([np.cumsum(ordinary.counts[::-1])[::-1], [0, 0]])  # at and above the i-th
    found: Array = beyond[(places + 1) // 2].astype(np.float64)
    for index in np.unique(places[places % 2 == 1] // 2):
        theirs = np.sort(generator.random(int(ordinary.counts[index])))
        here = np.flatnonzero(places == 2 * index + 1)
        found[here] += len(theirs) - np.searchsorted(theirs, own[here])
    return found


def _stranger_before(keys: Array) -> Array:
    """How many earlier rows have a larger key, for each row; block by block, in O(t log t)."""
    found = np.zeros(len(keys))
    before = np.empty(0)
    earlier = np.tri(BLOCK, k=-1, dtype=bool)
    for first in range(0, len(keys), BLOCK):
        block = keys[first : first + BLOCK]
        size = len(block)
        found[first : first + size] = len(before) - np.searchsorted(before, block, "right")
        found[first : first + size] += ((block[None, :] > block[:, None]) & earlier[:size, :size]).sum(1)
        before = np.sort(np.concatenate([before, block]), kind="stable")  # two runs that are merged
    return found


def log_capital(u: Array) -> Array:
    """ln of the capital after each row, of one stream (t,) or of many of one length (streams, t)."""
    ranks = np.atleast_2d(u)
    low, high, part = BETS.T[:, :, None]
    inside, outside = np.log1p(part / (high - low) - part), np.log1p(-part)
    time = np.arange(1, ranks.shape[1] + 1)
    waiting = -np.log1p(time)  # ln of what has not been placed yet, 1/(t + 1)
    entering = -np.log(time * (time + 1.0)) - np.log(len(BETS))
    found = np.empty(ranks.shape)
    for row, stream in enumerate(ranks):
        won = np.cumsum(np.where((stream >= low) & (stream < high), inside, outside), axis=1)  # (bets, t)
        before = np.concatenate([np.zeros((len(BETS), 1)), won[:, :-1]], axis=1)
        placed = won + np.logaddexp.accumulate(entering - before, axis=1)
        found[row] = np.logaddexp(np.logaddexp.reduce(placed, axis=0), waiting)
    return found.reshape(np.shape(u))


@dataclass(frozen=True)
class Drift:
    """What the test says of a stream."""

    rows: int
    ordinary: int  #: rows that it was compared with, beside itself
    level: float
    log_evidence: Array  #: (rows,): ln of the capital after each row
    ranks: Array  #: (rows,): u

    @property
    def alarm(self) -> int | None:
        """The row, counted from 0, at which the input had changed; None if it has not."""
        over = np.flatnonzero(self.log_evidence >= -np.log(self.level))
        return int(over[0]) if len(over) else None


def drift(ordinary: Ordinary, places: Array, level: float = 0.01, seed: int = 0) -> Drift:
    """Test a stream of places (`Ordinary.places`) against ordinary rows.

    Without ordinary rows the stream is only compared with its own beginning.
    """
    u = smoothed_ranks(ordinary, places, seed)
    return Drift(len(places), ordinary.rows, level, log_capital(u), u)

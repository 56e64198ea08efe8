"""What one pass keeps of a place, and of the inputs: moments and a sample of rows, see `streams`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data import Batch
from gapa_onnx.errors import UserError
from gapa_onnx.fit.choosing import metrics_for, metrics_of_positions
from gapa_onnx.fit.geometry import is_whitened
from gapa_onnx.fit.packing import within
from gapa_onnx.fit.statistics import finite_rows
from gapa_onnx.fit.streams import Moments, RowSample
from gapa_onnx.settings import Settings
from gapa_onnx.threads import one_thread
from gapa_onnx.variance.masks import valid_queries
from gapa_onnx.variance.sites import Layout, Site

SAMPLE_BYTES = 256 << 20  # rows kept for choosing inducing points, all sites together
INPUT_SAMPLE_BYTES = 64 << 20  # rows kept for the median distance of the inputs
HELD_OUT_ROWS = 2000  # rows for leave-one-out shares and for the recall of an index
_STATISTICS = ("sample", "moments", "channel_moments")


class Collector:
    """Running statistics of one site."""

    def __init__(self, site: Site, settings: Settings, sites: int, sequences: bool = False):
        self.site = site
        self.sequences = sequences  # whether positions of a sequence have scores of their own
        self.settings = settings
        self.budget = SAMPLE_BYTES // sites
        self.sample: RowSample | None = None  # made when the first batch tells the width
        self.width = 0
        self.map_shape: tuple[int, ...] = ()
        self.dropped = 0
        self.axes = 0  # of the queries (…, d)
        self._stretch = 0

    @property
    def chooses(self) -> bool:
        """Whether its geometry may be chosen by strange inputs: that of a query which stands for a whole sample, or may,
        where only what is fed tells the number of axes."""
        open_ = self.settings.metric_at(self.site.chosen) == "auto"
        return open_ and not (self.site.standardised or (self.site.many and self.site.rank is not None))

    def one_each(self, rows: int) -> bool:
        """Whether each of so many rows of the data had one query, with no axis beside that of the rows."""
        return self.axes == 2 and self.seen + self.dropped == rows

    def as_many_as(self, other: Collector) -> bool:
        """Whether both have a query for each of the same positions (N, T)."""
        both = self.by_position and other.by_position
        return both and self.seen + self.dropped == other.seen + other.dropped

    @property
    def by_position(self) -> bool:
        """Whether its queries are those of the positions (N, T) of a sequence."""
        rows = self.site.layout is Layout.ROWS and not self.site.chosen
        return self.sequences and rows and self.axes == 3

    @property
    def seen(self) -> int:
        """The rows that came and were finite."""
        return self.sample.seen if self.sample else 0

    def begin(self, stretch: int) -> None:
        """What comes belongs to another stretch of the data."""
        self._stretch = stretch
        if self.sample is not None:
            for one in (self.sample, self.moments, self.channel_moments):
                one.begin(stretch)

    def join(self, later: Collector) -> None:
        """Take in what was found on the stretches that come next."""
        self.axes = max(self.axes, later.axes)
        if later.sample is not None:
            sample = self.sample or self._begin(later.width)
            self._require_width(later.width)
            sample.join(later.sample)
            self.moments.join(later.moments)
            self.channel_moments.join(later.channel_moments)
        self.dropped += later.dropped
        self.map_shape = later.map_shape or self.map_shape

    def arrays(self) -> dict[str, Array]:
        """All that there is, for `restore`."""
        found = {
            "numbers": np.array([self.width, self.dropped, self.axes], np.int64),
            "map_shape": np.array(self.map_shape, np.int64),
        }
        if self.sample is not None:
            for part in _STATISTICS:
                found |= {f"{part}/{name}": array for name, array in getattr(self, part).arrays().items()}
        return found

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Be what another was; raises ValueError where that cannot be."""
        width, self.dropped, self.axes = arrays["numbers"].tolist()
        self.map_shape = tuple(arrays["map_shape"].tolist())
        if width:
            self._begin(width).join(RowSample.of(within(arrays, "sample")))
            self.moments.join(Moments.of(within(arrays, "moments")))
            self.channel_moments.join(Moments.of(within(arrays, "channel_moments")))

    @one_thread()  # of products that a covariance is summed from
    def add(self, query: Array, feature_map: Array | None, valid: Array | None = None) -> None:
        """Take in the queries (…, d) of a batch; where positions are padding, `valid` (N, T) is false."""
        rows = query.reshape(-1, query.shape[-1]) if query.ndim else query.reshape(1, 1)  # (n, d)
        self.axes = max(self.axes, query.ndim)
        sample = self.sample or self._begin(rows.shape[1])
        self._require_width(rows.shape[1])
        rows = unpadded(rows, query, valid)
        finite = finite_rows(rows)
        self.dropped += int(len(rows) - finite.sum())
        rows = rows[finite]
        sample.add(rows)
        self.moments.add(rows)
        if feature_map is not None:
            self.map_shape = feature_map.shape[1:]
        if self.site.layout is Layout.POOLED and feature_map is not None:
            positions = feature_map.transpose(*self.site.others, self.site.axis)
            channels = positions.reshape(-1, self.width).astype(np.float32)
            channels = unpadded(channels, positions, valid)
            self.channel_moments.add(channels[finite_rows(channels)])

    def _require_width(self, width: int) -> None:
        if width != self.width:
            raise UserError(
                f"site {self.site.name!r} is {self.width} wide on some calibration data and {width} on others",
                "use data of one size, or another site or layout",
            )

    def _begin(self, width: int) -> RowSample:
        self.width = width
        self.sample = RowSample(self._capacity(self.settings), width, self.settings.seed)
        asked = self.settings.metric_at(self.site.chosen)
        open_ = (
            metrics_of_positions(width, passes=False)
            if self.by_position
            else metrics_for(width)
            if self.chooses
            else ()
        )
        candidates = open_ if asked == "auto" else (asked,)
        self.moments = Moments(width, covariance=any(map(is_whitened, candidates)))
        self.channel_moments = Moments(width)  # used where the query is a pooled map
        self.begin(self._stretch)
        return self.sample

    def rows(self, settings: Settings) -> Array:
        """The sample that these settings call for: (n, width)."""
        return self.sample.smaller(self._capacity(settings)) if self.sample else np.empty((0, 0), np.float32)

    def _capacity(self, settings: Settings) -> int:
        capacity = max(settings.k + 1, self.budget // (4 * self.width))
        if settings.inducing != "all":
            capacity = min(capacity, max(256 * settings.most_points, 2 * HELD_OUT_ROWS))
        return capacity


def unpadded(rows: Array, queries: Array, valid: Array | None) -> Array:
    """The rows (n, d) of queries (…, d) that are no padding."""
    kept = valid_queries(valid, queries)
    return rows if kept is None else rows[kept]


class InputSample:
    """A sample of the model's inputs, each row flattened, for their median distance."""

    def __init__(self, seed: int):
        self.seed = seed
        self.sample: RowSample | None = None
        self._stretch = 0

    @property
    def rows(self) -> Array:
        """The sampled rows: (n, D)."""
        return self.sample.rows if self.sample else np.empty((0, 0), np.float32)

    def begin(self, stretch: int) -> None:
        """What comes belongs to another stretch of the data."""
        self._stretch = stretch
        if self.sample is not None:
            self.sample.begin(stretch)

    def add(self, batch: Batch) -> None:
        parts = [
            a.reshape(len(a), -1) for a in batch.values() if a.ndim and np.issubdtype(a.dtype, np.number)
        ]
        rows = np.concatenate([p for p in parts if len(p) == len(parts[0])], axis=1).astype(
            np.float32
        )  # (n, D)
        self._of_width(rows.shape[1]).add(rows[finite_rows(rows)])

    def join(self, later: InputSample) -> None:
        """Take in the sample of the stretches that come next."""
        if later.sample is not None:
            self._of_width(later.width).join(later.sample)

    def arrays(self) -> dict[str, Array]:
        """All that there is, for `restore`."""
        return {} if self.sample is None else self.sample.arrays()

    def restore(self, arrays: Mapping[str, Array]) -> None:
        """Be what another was."""
        if arrays:
            self.width = arrays["rows"].shape[1]
            self.sample = RowSample.of(arrays)

    def _of_width(self, width: int) -> RowSample:
        if self.sample is None:
            capacity = max(2, INPUT_SAMPLE_BYTES // (4 * width))
            self.sample = RowSample(min(capacity, 20_000), width, self.seed)
            self.sample.begin(self._stretch)
            self.width = width
        if width != self.width:
            raise UserError(
                f"rows of the calibration data hold {self.width} and {width} numbers, so they have no distance",
                "use data of one size, or leave `length_scale` at `site`",
            )
        return self.sample

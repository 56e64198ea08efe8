"""What can be chosen about a conversion, with its defaults, checked once."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gapa_onnx.errors import UserError

INDUCING = ("kmeans", "fps", "random", "all")
INDEXES = ("auto", "flat", "ivf", "hnsw", "ivfpq")
SOLVERS = ("auto", "exact", "cached")
CACHED_INDEXES = ("auto", "flat", "ivf")  # that find one nearest point
POINT_FORMATS = ("float32", "float16", "int8")
METRICS = ("euclidean", "whitened")
ON_UNSUPPORTED = ("error", "cut")
ATTENTION = ("values", "full")
COVARIANCES = ("diag", "full")
BRIDGES = ("shared", "per-class")
SCORES = ("variance", "epistemic")

LEAST_POINTS = 20  # for each neighbour, of --m auto
MOST_POINTS = {"one": 50, "many": 40}  # for each neighbour, where a row of the data asks one query or many
POINT_NUMBERS = {"one": 500_000, "many": 350_000}  # that they are together, between these
MOST_KEPT = 48 << 20  # bytes of prepared neighbourhoods, of which the native library keeps no more


@dataclass(frozen=True)
class Settings:
    """Choices of a conversion. The formulas that they enter are in ARCHITECTURE.md."""

    sites: str = "auto"
    inducing: str = "kmeans"
    m: str | int = "auto"  #: inducing points per site
    k: int = 50  #: neighbours per query
    index: str = "auto"
    points: str = "float32"  #: how inducing points are stored, see `op.storage`
    solver: str = "auto"  #: with the query's own neighbours, or with those of its nearest inducing point
    length_scale: str | float = "site"  #: median distance at the site, of the inputs, or a number
    scale: str | float = "loo"  #: τ from leave-one-out shares, "none" for τ = 1, or a number
    metric: str = "euclidean"
    jitter: float = 1e-6  #: relative to the prior variance
    on_unsupported: str = "error"
    attention: str = "values"  #: what is uncertain in attention: the values, or its weights too
    task: str = "auto"  #: what each output means: a word of `tasks.Task`, or output=word,…
    covariance: str = "diag"  #: of the classes or targets of a sample: variances only, or all of it
    bridge: str = "shared"  #: one factor for all logits, which keeps every argmax, or one for each
    samples: int | None = None  #: draws for the split of uncertainty; None for fixed points
    top_k: int = 512  #: logits that count where tokens are predicted
    score: str = "variance"  #: what the threshold is for
    ood_quantile: float = 0.95  #: of the scores of calibration rows, each left out
    seed: int = 0

    def __post_init__(self) -> None:
        _one_of("--inducing", self.inducing, INDUCING)
        _one_of("--index", self.index, INDEXES)
        _one_of("--solver", self.solver, SOLVERS)
        _one_of("--points", self.points, POINT_FORMATS)
        if self.points != "float32" and self.index == "ivfpq":
            raise UserError(
                f"--index ivfpq stores points as codes of its own, --points {self.points} has nothing to do",
                "leave out either of them",
            )
        if self.solver == "cached" and self.index not in CACHED_INDEXES:
            raise UserError(
                f"--solver cached looks for one point only, which --index {self.index} is not for",
                "use --index auto, flat or ivf, or --solver exact",
            )
        _one_of("--metric", self.metric, METRICS)
        _one_of("--on-unsupported", self.on_unsupported, ON_UNSUPPORTED)
        _one_of("--attention", self.attention, ATTENTION)
        _one_of("--covariance", self.covariance, COVARIANCES)
        _one_of("--bridge", self.bridge, BRIDGES)
        _one_of("--score", self.score, SCORES)
        object.__setattr__(self, "m", _word_or_count("--m", self.m, ("auto",)))
        counts = {"--k": self.k, "--samples": self.samples, "--top-k": self.top_k}
        for option, number in counts.items():
            if number is not None and number < 1:
                raise UserError(f"{option} is {number}; it must be at least 1")
        if self.inducing != "all" and self.k > self.most_points:
            raise UserError(
                f"--k {self.k} is more than --m {self.m}", "use fewer neighbours than inducing points"
            )
        if not 0 < self.jitter < 1:
            raise UserError(f"--jitter is {self.jitter}; it must be between 0 and 1", "the default is 1e-6")
        require_quantile("--ood-quantile", self.ood_quantile)
        object.__setattr__(
            self, "length_scale", _word_or_number("--length-scale", self.length_scale, ("site", "input"))
        )
        object.__setattr__(self, "scale", _word_or_number("--scale", self.scale, ("loo", "none")))

    def as_in_paper(self) -> Settings:
        """The paper's reading: length scale of the inputs, no τ, Euclidean distances, the query's own neighbours."""
        solver = "exact" if self.solver == "auto" else self.solver
        return replace(self, length_scale="input", scale="none", metric="euclidean", solver=solver)

    @property
    def most_points(self) -> int:
        """M at most, where not all rows are taken."""
        return MOST_POINTS["one"] * self.k if self.m == "auto" else self.m

    def points_for(self, width: int, many: bool = False) -> int:
        """M where activations have this width, and a row of the data asks one query or many.

        Detection gains with every doubling of M (docs/defaults.md), so that cost decides. Where every token or
        pixel is a query, it is paid so many times; a query for the whole row may cost more.
        """
        if self.m != "auto":
            return self.m
        queries = "many" if many else "one"
        return min(max(POINT_NUMBERS[queries] // width, LEAST_POINTS * self.k), MOST_POINTS[queries] * self.k)

    @property
    def cached(self) -> bool:
        """Whether neighbourhoods are prepared: where they may be, and all of them fit into memory."""
        if self.solver != "auto":
            return self.solver == "cached"
        kept = 4 * self.most_points * self.k * (self.k + 1)
        return self.inducing != "all" and self.index in CACHED_INDEXES and kept <= MOST_KEPT

    @property
    def cut(self) -> bool:
        return self.on_unsupported == "cut"


def require_quantile(option: str, quantile: float) -> None:
    if not 0 < quantile < 1:
        raise UserError(
            f"{option} is {quantile}; it must be between 0 and 1",
            "0.95 flags about one in twenty inputs like the calibration data",
        )


def _one_of(option: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"{option} {value!r} is not known", f"choose one of {', '.join(allowed)}")


def _word_or_count(option: str, value: str | int, words: tuple[str, ...]) -> str | int:
    if value in words:
        return value
    try:
        number = int(value)
    except ValueError:
        raise UserError(
            f"{option} {value!r} is not known", f"choose {', '.join(words)} or a whole number"
        ) from None
    if number < 1:
        raise UserError(f"{option} is {number}; it must be at least 1")
    return number


def _word_or_number(option: str, value: str | float, words: tuple[str, ...]) -> str | float:
    if value in words:
        return value
    try:
        number = float(value)
    except ValueError:
        number = 0.0
    if not 0 < number < float("inf"):
        raise UserError(f"{option} {value!r} is not known", f"choose {', '.join(words)} or a positive number")
    return number

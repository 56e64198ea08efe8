"""What can be chosen about a conversion: each setting is declared once, with its default, check and help.

`Settings` checks values by these declarations (`choices`), and the command line makes its options and their help of them
(`cli/options.py`), so that a new setting is one field here. Messages name a setting in backticks as Python
spells it, `k` or `k=20`; the command line turns that into a flag.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

from gapa_onnx.declarations import (
    CHOICE,
    Choice,
    count,
    count_or_none,
    fraction,
    fraction_or_none,
    one_of,
    word_or_count,
    word_or_number,
    words,
)
from gapa_onnx.errors import UserError

LEAST_POINTS = 20  # for each neighbour, where `m` is auto
MOST_POINTS = 40  # the same where a row of the data asks many queries, which stand for more kinds of them
CHOSEN_POINTS = 8  # the same at a detector's candidates, of which there are hundreds at several scales
WITNESS_POINTS = 20  # the same at witnesses that are means over a map, which more points tell no more
VECTOR_POINTS = 18  # the same at other witnesses: in networks without maps they are half of the cost
WITNESS_NEIGHBOURS = 20  # K there at most: a share that is only ranked may be coarser
POINT_NUMBERS = 350_000  # that they are together, between these
MOST_KEPT = 48 << 20  # bytes of prepared neighbourhoods, of which the native library keeps no more
CACHED_INDEXES = ("auto", "flat", "ivf")  # that find one nearest point

SCORE_ONLY = "score-only"  # of `sites`: how strange an input is, and no variance of any output

HEADS = "What the outputs mean"  # groups of settings, as help shows them
PROMISES = "What is promised"
GAUSSIAN_PROCESS = "Gaussian process"


def choices() -> Mapping[str, Choice]:
    """The declaration of every setting by name, in the order of the fields."""
    return _CHOICES


# ------------------------------------------------------------------------------- the settings

#: What `paper` decides, beside the solver; who asks for it cannot choose these.
PAPER = MappingProxyType(
    {
        "length_scale": "input",
        "scale": "none",
        "metric": "euclidean",
        "witnesses": "none",
        "score": "variance",
    }
)

_QUANTILE_HINT = "0.95 flags about one in twenty inputs like the calibration data"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Choices of a conversion. The formulas that they enter are in ARCHITECTURE.md."""

    sites: str = words(
        default="auto",
        metavar="S",
        help="Where uncertainty enters: auto (the input of the last layer), last, all, score-only (a score of how strange an input is, and no variances; auto "
        "comes to that where none passes, as in trees), or names of nodes or tensors, separated by commas, each with an "
        "optional :rows, :positions, :pooled or :flat.",
    )
    witnesses: str = words(
        default="auto",
        metavar="W",
        help="Places that say how strange an input is, and pass no variance on: auto (ends of stages, blocks, the first "
        "hidden vector), none beside the sites, or names as those of sites.",
    )
    on_unsupported: str = one_of(
        "error",
        "cut",
        help="At an operator without a variance rule: stop, or count what leaves it as certain.",
    )
    attention: str = one_of(
        "values",
        "full",
        help="What is uncertain where a model attends: the values, or the attention weights too.",
    )
    mask: str = words(
        default="auto",
        metavar="M",
        help="What tells padding: auto (an input that is called a mask), none, or a tensor (rows, positions) whose zeros "
        "are padding, with a ~ in front where its ones are.",
    )
    seed: int = count(default=0, least=0, help="The same seed gives the same bytes.")

    task: str = words(
        default="auto",
        metavar="T",
        help="What outputs mean: auto, classification, multilabel, regression, segmentation, tokens, detection, none, "
        "or OUTPUT=T,… for each.",
        group=HEADS,
    )
    candidates: str | int = word_or_count(
        "all",
        default=300,
        help="Of a detector: how many candidates an image has answers for, the most confident ones; all of them also have "
        "a variance of the whole output.",
        group=HEADS,
    )
    ood_quantile: float = fraction(
        default=0.95,
        metavar="Q",
        help="Share of inputs like the calibration data that stay unflagged; `gapa-onnx threshold` changes it.",
        hint=_QUANTILE_HINT,
        group=HEADS,
    )
    score: str = one_of(
        "witnesses",
        "variance",
        "epistemic",
        help="How strange an input is: by the witnesses and, of classes, the entropy of the prediction; by the mean "
        "variance; or by the epistemic part of the entropy.",
        group=HEADS,
    )
    bridge: str = one_of(
        "shared",
        "per-class",
        help="From logits to probabilities: one factor for all classes, which never changes the most probable "
        "one, or one for each as in the paper.",
        group=HEADS,
    )
    samples: int | None = count_or_none(
        least=2,  # one draw has no spread to split
        metavar="S",
        help="Split uncertainty by S fixed random draws, as in the paper, in place of well-spread points; at least 2.",
        group=HEADS,
    )
    top_k: str | int = word_or_count(
        "all",
        default=512,
        help="Of a vocabulary: how many tokens of each position have answers, those with the largest logits; all of them "
        "also have a variance of the whole output.",
        group=HEADS,
    )
    covariance: str = one_of(
        "diag",
        "full",
        help="Of the elements of an output: variances only, or all of it as OUTPUT_cov.",
        group=HEADS,
    )

    coverage: float = fraction(
        default=0.9,
        metavar="C",
        help="How many of the sets (OUTPUT_set, with `labels`) or intervals (OUTPUT_lower and OUTPUT_upper, with `targets`) "
        "hold the truth; `gapa-onnx threshold` changes it.",
        hint="0.9 leaves the truth out of one set or interval in ten",
        group=PROMISES,
    )
    sets: str = one_of(
        "lac",
        "aps",
        "raps",
        help="How classes come into a set: each that is probable enough (the smallest sets), the most probable ones up to "
        "a sum of probabilities (sets that grow where the input is hard), or that with a penalty for many classes.",
        group=PROMISES,
    )
    per_class: str = one_of(
        "no",
        "yes",
        help="Whether the coverage holds for the rows of every class by itself; that needs rows of each.",
        group=PROMISES,
    )
    max_error: float | None = fraction_or_none(
        metavar="R",
        help="The most error among the rows that are answered; OUTPUT_defer is true for the others. With `labels`.",
        group=PROMISES,
    )
    confidence: float = fraction(
        default=0.9,
        metavar="D",
        help="With which that error is not exceeded, whatever rows it was counted on.",
        group=PROMISES,
    )

    inducing: str = one_of(
        "kmeans",
        "fps",
        "random",
        "all",
        help="How inducing points, the remembered activations, are chosen from the calibration rows.",
        group=GAUSSIAN_PROCESS,
    )
    private: int = count(
        default=1,
        help="Keep only inducing points that are means of at least so many calibration rows, so that none of these is "
        "in the file.",
        group=GAUSSIAN_PROCESS,
    )
    m: str | int = word_or_count(
        "auto",
        help="Inducing points per site; auto takes 20 for each neighbour, so 1000; up to 40 where each token or "
        "pixel is a query and activations are narrow.",
        group=GAUSSIAN_PROCESS,
    )
    k: int = count(
        default=50,
        help="Neighbours per query: the inducing points it is compared with.",
        group=GAUSSIAN_PROCESS,
    )
    index: str = one_of(
        "auto",
        "flat",
        "ivf",
        "hnsw",
        "ivfpq",
        help="How neighbours are searched; auto is exact while that is cheap.",
        group=GAUSSIAN_PROCESS,
    )
    points: str = one_of(
        "float32",
        "float16",
        "int8",
        help="How inducing points are stored: half precision or 8 bits make the file smaller; by how much that "
        "moves the variance is measured and told.",
        group=GAUSSIAN_PROCESS,
    )
    solver: str = one_of(
        "auto",
        "exact",
        "cached",
        help="Neighbours of the query itself, or those of its nearest inducing point, which are prepared "
        "beforehand: faster, and never less uncertain than with all inducing points. auto prepares them if they take "
        "less than 48 MB.",
        group=GAUSSIAN_PROCESS,
    )
    portable: str = one_of(
        "fast",
        "small",
        "none",
        help="For engines without the native library: factors of prepared neighbourhoods, up to 16 MB a place; as many "
        "neighbours as need no more space than the points, in place of `k`, for either way of running; or nothing: "
        "the file then needs the library.",
        group=GAUSSIAN_PROCESS,
    )
    length_scale: str | float = word_or_number(
        "site",
        "input",
        help="Of the kernel: the median distance at the site, that of the inputs, or a number.",
        group=GAUSSIAN_PROCESS,
    )
    scale: str | float = word_or_number(
        "loo",
        "none",
        help="Of the variance: from leave-one-out on the calibration rows, and `targets` where given; 1, or a number.",
        group=GAUSSIAN_PROCESS,
    )
    metric: str = one_of(
        "auto",
        "euclidean",
        "direction",
        "whitened",
        "whitened-direction",
        "polar",
        "projected",
        help="Of distances between activations: as they are, between their directions, after whitening, both, in polar "
        "coordinates (direction and length), or of their first principal components. auto takes at each place what tells "
        "inputs apart that are made strange, or those of `strange`.",
        group=GAUSSIAN_PROCESS,
    )
    jitter: float = fraction(
        default=1e-6,
        metavar="NUMBER",
        help="Added to the kernel's diagonal, relative to the prior variance.",
        group=GAUSSIAN_PROCESS,
    )

    def __post_init__(self) -> None:
        for name, choice in choices().items():
            object.__setattr__(self, name, choice.check(name, getattr(self, name)))
        _require_consistent(self)

    def as_in_paper(self) -> Settings:
        """The paper's reading: length scale of the inputs, no τ, Euclidean distances, the query's own neighbours, and
        the mean variance as the score."""
        solver = "exact" if self.solver == "auto" else self.solver
        changed: dict[str, Any] = {**PAPER, "solver": solver}
        return replace(self, **changed)

    def of_witness(self) -> Settings:
        """The same for a place that passes no variance on."""
        return replace(self, k=min(self.k, WITNESS_NEIGHBOURS))

    def within_space(self, width: int) -> Settings:
        """The same where factors may take no more space than points of this width and their neighbourhoods: fewer
        neighbours, for `portable` small."""
        if self.portable != "small" or not self.cached:
            return self
        most = int((1 + (1 + 8 * width) ** 0.5) / 2)  # k (k + 1) / 2 <= width + k
        return replace(self, k=max(1, min(self.k, most)))

    def metric_at(self, chosen: bool) -> str:
        """The metric of a place, auto where the data choose; `chosen` where its queries are those of a detector's
        candidates, of which an ordinary image has strange ones too."""
        if self.metric != "auto":
            return self.metric
        return "direction" if chosen else "auto"

    @property
    def most_points(self) -> int:
        """M at most, where not all rows are taken."""
        return MOST_POINTS * self.k if isinstance(self.m, str) else self.m

    def points_for(
        self,
        width: int,
        many: bool = False,
        chosen: bool = False,
        witness: bool = False,
        pooled: bool = False,
    ) -> int:
        """M where activations have this width, and a row of the data asks one query or many.

        Variances tell a little more with every doubling of M (docs/defaults.md), scores by witnesses do not, so that cost
        decides.
        """
        if not isinstance(self.m, str):
            return self.m
        if chosen:
            return CHOSEN_POINTS * self.k
        if witness and not many:
            return (WITNESS_POINTS if pooled else VECTOR_POINTS) * self.k
        if not many:
            return LEAST_POINTS * self.k
        return min(max(POINT_NUMBERS // width, LEAST_POINTS * self.k), MOST_POINTS * self.k)

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


_CHOICES: Mapping[str, Choice] = MappingProxyType({f.name: f.metadata[CHOICE] for f in fields(Settings)})


def _require_consistent(settings: Settings) -> None:
    """The rules between several settings, once each is sound by itself."""
    if settings.points != "float32" and settings.index == "ivfpq":
        raise UserError(
            f"`index='ivfpq'` stores points as codes of its own, `points={settings.points!r}` has nothing to do",
            "leave out either of them",
        )
    if settings.private > 1 and settings.inducing != "kmeans":
        raise UserError(
            f"`inducing={settings.inducing!r}` keeps calibration rows themselves, which `private={settings.private}` rules out",
            "leave `inducing` out: kmeans keeps means",
        )
    if settings.solver == "cached" and settings.index not in CACHED_INDEXES:
        raise UserError(
            f"`solver='cached'` looks for one point only, which `index={settings.index!r}` is not for",
            "set `index` to auto, flat or ivf, or use `solver='exact'`",
        )
    if settings.inducing != "all" and settings.k > settings.most_points:
        raise UserError(
            f"`k={settings.k}` is more than `m={settings.m}`", "use fewer neighbours than inducing points"
        )


def require_quantile(name: str, quantile: float) -> None:
    """Refuse what is no quantile; `name` is the argument that it was given as."""
    if not 0 < quantile < 1:
        raise UserError(f"`{name}` is {quantile}; it must be between 0 and 1", _QUANTILE_HINT)

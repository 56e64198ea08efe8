"""What the numbers are called, which way is better, how they are printed, and the headline."""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gapa_onnx.measure.evaluation.result import Evaluation

ABSENT = "–"
HIGHER, LOWER = "higher", "lower"
USEFUL_AUROC = 0.6  # below, a score is not called a success

_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Metric:
    """How one number is shown."""

    label: str
    better: str | float | None  #: HIGHER, LOWER, the value that it should have, or not known
    meaning: str = ""
    percent: bool = False

    def badness(self, value: float) -> float:
        """A number that is smaller for a better value; NaN where better is not defined."""
        if isinstance(self.better, str):
            return -value if self.better == HIGHER else value
        return math.nan if self.better is None else abs(value - self.better)

    @property
    def direction(self) -> str:
        if self.better is None:
            return ""
        if isinstance(self.better, str):
            return {HIGHER: "↑ higher", LOWER: "↓ lower"}[self.better]
        return f"→ {number(self.better, self.percent)}"


_METRICS = {
    "accuracy": Metric("Accuracy", HIGHER, "share of predictions that are right", percent=True),
    "nll": Metric("NLL", LOWER, "negative log-likelihood: how surprised the model is by the truth"),
    "ece": Metric("ECE", LOWER, "expected calibration error: gap between confidence and accuracy"),
    "brier": Metric("Brier score", LOWER, "squared distance of the probabilities from the truth"),
    "rmse": Metric("RMSE", LOWER, "root of the mean squared error"),
    "mae": Metric("MAE", LOWER, "mean absolute error"),
    "crps": Metric("CRPS", LOWER, "distance of the predicted distribution from the truth"),
    "cqm": Metric("CQM", LOWER, "mean gap between promised and actual coverage of intervals"),
    "miou": Metric(
        "Mean IoU", HIGHER, "overlap of predicted and true regions, mean over classes", percent=True
    ),
    "perplexity": Metric("Perplexity", LOWER, "number of tokens the model hesitates between"),
    "aurc": Metric("AURC", LOWER, "area under the risk-coverage curve"),
    "auroc": Metric("AUROC", HIGHER, "chance that a strange input scores above a usual one"),
    "aupr": Metric("AUPR", HIGHER, "area under the precision-recall curve"),
    "fpr95": Metric("FPR95", LOWER, "false alarms when 95% of the strange inputs are caught", percent=True),
    "errorauroc": Metric(
        "Error AUROC", HIGHER, "chance that a wrong prediction is less certain than a right one"
    ),
    "ap50": Metric(
        "AP50", HIGHER, "average precision: boxes that find an object, by falling confidence", percent=True
    ),
    "precision": Metric("Precision", HIGHER, "share of shown boxes that find an object", percent=True),
    "recall": Metric("Recall", HIGHER, "share of objects that a shown box finds", percent=True),
    "within1sigma": Metric(
        "Within 1 sigma", 0.6827, "true box numbers within one standard deviation", percent=True
    ),
    "within2sigma": Metric("Within 2 sigma", 0.9545, "true box numbers within two", percent=True),
    "boxrankcorrelation": Metric(
        "Rank correlation", HIGHER, "of the variance of box numbers with their squared error"
    ),
    "subsetaccuracy": Metric("Subset accuracy", HIGHER, "share of rows with every label right", percent=True),
    "targetsintopk": Metric(
        "Targets in the top k", HIGHER, "share of true tokens among those looked at", percent=True
    ),
}
_ALIASES = {
    "acc": "accuracy",
    "pixelaccuracy": "accuracy",
    "tokenaccuracy": "accuracy",
    "logloss": "nll",
    "brierscore": "brier",
    "meaniou": "miou",
    "iou": "miou",
    "fpr": "fpr95",
}
_SCORES = {
    "entropy": "total entropy",
    "aleatoric": "aleatoric uncertainty",
    "epistemic": "epistemic uncertainty",
    "bald": "epistemic uncertainty",
    "score": "score",
    "variance": "variance",
    "var": "variance",
    "std": "standard deviation",
    "totalstd": "total standard deviation",
    "maxprob": "1 − max probability",
    "maxprobability": "1 − max probability",
    "confidence": "1 − confidence",
    "imagescore": "score of the image",
    "imageconfidence": "1 − highest confidence of the image",
}


def key(name: str) -> str:
    """A name without case and punctuation: `max-prob` and `max_prob` are one."""
    squeezed = re.sub(r"[^a-z0-9]", "", name.lower())
    return _ALIASES.get(squeezed, squeezed)


def metric(name: str) -> Metric:
    """What is known of a metric; a name that is not known is shown as it is, without a direction."""
    known = _METRICS.get(key(name))
    if known is not None:
        return known
    level = re.fullmatch(r"coverage(\d+)", key(name))
    if level:
        digits = level[1]
        nominal = int(digits) / (10 ** (len(digits) - 1) if digits.startswith("0") else 100)
        label = f"Coverage at {number(nominal, percent=True)}"
        return Metric(label, nominal, "share of targets inside the interval", percent=True)
    return Metric(plain(name).replace("_", " "), None)


def score_label(name: str) -> str:
    """A score in words; `source_entropy` is the entropy of the model by itself."""
    squeezed = key(name)
    if squeezed.startswith("source") and squeezed != "source":
        rest = re.sub(r"^source[^a-z0-9]*", "", name, flags=re.IGNORECASE)
        return f"{score_label(rest)} (source)"
    return _SCORES.get(squeezed) or plain(name).replace("_", " ")


def plain(text: object, most: int = 60) -> str:
    """Text from a file that can be drawn and encoded: no control characters or lone surrogates, not endless."""
    clean = "".join(c if c.isprintable() else " " for c in str(text).encode("utf-8", "replace").decode())
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def number(value: float | int | None, percent: bool = False, figures: int = 3) -> str:
    """So many significant figures; a dash for what is absent or not a number."""
    if not isinstance(value, numbers.Real):
        return ABSENT
    value = float(value)
    if math.isnan(value):
        return ABSENT
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if percent:
        return _percent(value)
    mantissa, exponent = f"{value:.{figures - 1}e}".split("e")
    if -4 < int(exponent) < 6 or value == 0:  # from 0.001 to 999,999
        return f"{value:,.{min(4, max(0, figures - 1 - int(exponent)))}f}".replace("-", "−")
    return f"{mantissa} × {_power(int(exponent))}".replace("-", "−", 1)


def power_of_ten(value: float) -> str:
    """A tick of a logarithmic axis."""
    exponent = round(math.log10(value))
    return f"{10.0**exponent:g}" if -3 < exponent < 4 else _power(exponent)


def _power(exponent: int) -> str:
    return f"10{str(exponent).translate(_SUPERSCRIPTS)}"


def whole(value: object) -> str:
    """A count with thousands apart."""
    count = float(value) if isinstance(value, numbers.Real) else math.nan
    return f"{int(count):,}" if math.isfinite(count) else ABSENT


def _percent(value: float) -> str:
    """One decimal, and as many more as it takes not to print 99.97% as 100%."""
    for digits in (1, 2, 3):
        shown = round(100 * value, digits)
        if shown not in (0, 100) or value in (0, 1):
            break
    text = f"{shown:.{digits}f}"
    return f"{text.removesuffix('.0')}%".replace("-", "−")


def best(values: Iterable[tuple[str, float | None]], measure: Metric, figures: int = 3) -> set[str]:
    """Names of the best values; none where nothing is better than anything else as printed."""
    bad = {
        name: measure.badness(float(value))
        for name, value in values
        if value is not None and not math.isnan(measure.badness(float(value)))
    }
    if not bad:
        return set()
    printed = {name: number(value, measure.percent, figures) for name, value in bad.items()}
    winner = printed[min(bad, key=bad.__getitem__)]
    winners = {name for name, text in printed.items() if text == winner}
    return set() if len(winners) == len(printed) else winners


def value(evaluation: Evaluation, who: str, name: str) -> float | None:
    """A metric by its squeezed name, None where it is absent or NaN."""
    for spelled, found in evaluation.metrics.get(who, {}).items():
        if key(spelled) == name and found is not None and not math.isnan(found):
            return float(found)
    return None


def best_detection(evaluation: Evaluation) -> tuple[str, float] | None:
    """The score that tells the OOD set apart best, and its AUROC."""
    return _best_score(evaluation.detection)


def best_error_detection(evaluation: Evaluation) -> tuple[str, float] | None:
    """The file's own score that tells wrong predictions from right ones best, and its AUROC."""
    own = {
        name: row for name, row in evaluation.error_detection.items() if not key(name).startswith("source")
    }
    return _best_score(own)


def _best_score(table: Mapping[str, Mapping[str, float]]) -> tuple[str, float] | None:
    found = [
        (name, float(row["auroc"]))
        for name, row in table.items()
        if row.get("auroc") is not None and not math.isnan(row["auroc"])
    ]
    return max(found, key=lambda entry: entry[1]) if found else None


def headline(evaluation: Evaluation) -> str:
    """The evaluation in one sentence."""
    parts = [part for part in (_quality(evaluation), _flags(evaluation), _separation(evaluation)) if part]
    if not parts:
        return "There are neither targets nor an OOD set, so there is nothing to compare yet."
    sentence = "; ".join(parts)
    return f"{sentence[0].upper()}{sentence[1:]}."


def comparison(evaluation: Evaluation) -> str:
    """What became better or worse against the source, in one sentence; empty without both."""
    parts = []
    for name in ("ece", "nll", "crps", "cqm"):
        before, after = value(evaluation, "source", name), value(evaluation, "gapa", name)
        if before is None or after is None:
            continue
        was, now, label = number(before), number(after), _METRICS[name].label
        verb = "falls" if after < before else "rises"
        parts.append(f"{label} stays at {now}" if was == now else f"{label} {verb} from {was} to {now}")
    return f"Against the source model by itself, {_listed(parts)} (lower is better)." if parts else ""


def _quality(evaluation: Evaluation) -> str:
    accuracy = value(evaluation, "gapa", "accuracy")
    if accuracy is None:
        accuracy = value(evaluation, "source", "accuracy")
    if accuracy is not None:
        unit = {"segmentation": " of pixels are right", "tokens": " of tokens are right"}
        text = f"{number(accuracy, percent=True)}{unit.get(evaluation.task, ' accurate')}"
        errors = best_error_detection(evaluation)
        if errors is not None and errors[1] >= USEFUL_AUROC and not evaluation.detection:
            text += f", and {_named(errors[0])} points at the errors with AUROC {number(errors[1])}"
        return text
    precise = value(evaluation, "source", "ap50")
    if precise is not None:
        return f"the average precision is {number(precise, percent=True)}"
    parts = []
    if evaluation.intervals is not None and len(evaluation.intervals.nominal):
        nominal = min(evaluation.intervals.nominal, key=lambda level: abs(level - 0.9))
        held = evaluation.intervals.coverage[list(evaluation.intervals.nominal).index(nominal)]
        parts.append(
            f"{number(nominal, percent=True)} intervals hold {number(held, percent=True)} of the targets"
        )
    rmse = value(evaluation, "gapa", "rmse")
    if rmse is not None:
        parts.append(f"the typical error (RMSE) is {number(rmse)}")
    return ", ".join(parts)


def _flags(evaluation: Evaluation) -> str:
    shares = {name: share for name, share in evaluation.flagged.items() if not math.isnan(share)}
    parts = []
    if "data" in shares:
        parts.append(f"{number(shares['data'], percent=True)} of the data")
    if "ood" in shares:
        parts.append(f"{number(shares['ood'], percent=True)} of the OOD set")
    return f"flags {' and '.join(parts)}" if parts else ""


def _separation(evaluation: Evaluation) -> str:
    found = best_detection(evaluation)
    if found is None:
        return ""
    name, auroc = found
    if auroc < USEFUL_AUROC:
        return f"no score tells them apart (best AUROC {number(auroc)})"
    return f"{_named(name)} separates them with AUROC {number(auroc)}"


def _named(score: str) -> str:
    label = score_label(score)
    return "the score" if label == "score" else label.replace(" (source)", " of the source by itself")


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"

"""An evaluation as text for people."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from rich.text import Text

from gapa_onnx.cli.console import console
from gapa_onnx.cli.flags import as_flags
from gapa_onnx.cli.layout import lines, new_table
from gapa_onnx.measure.evaluation.result import Evaluation

_TITLES = {
    "accuracy": "ACC",
    "subset_accuracy": "Subset ACC",
    "nll": "NLL",
    "ece": "ECE",
    "brier": "Brier",
    "mean_iou": "mIoU",
    "perplexity": "Perplexity",
    "targets_in_top_k": "In top k",
    "rmse": "RMSE",
    "mae": "MAE",
    "crps": "CRPS",
    "cqm": "CQM",
    "coverage50": "50%",
    "coverage90": "90%",
    "coverage95": "95%",
    "promised": "Promised",
    "coverage": "Coverage",
    "set_size": "Size",
    "width": "Width",
    "answered": "Answered",
    "error": "Error",
    "rows": "Rows",
    "auroc": "AUROC",
    "aupr": "AUPR",
    "fpr95": "FPR95",
    "ap50": "AP50",
    "precision": "Precision",
    "recall": "Recall",
    "within_1_sigma": "In 1 sigma",
    "within_2_sigma": "In 2 sigma",
    "box_rank_correlation": "Rank corr.",
}
_SCORES = {
    "entropy": "entropy",
    "epistemic": "epistemic (BALD)",
    "score": "score",
    "maxprob": "1 − max prob",
    "std": "std of the model",
    "total_std": "std with noise",
    "source_entropy": "source: entropy",
    "source_maxprob": "source: 1 − max prob",
    "confidence": "1 − confidence",
    "source_confidence": "source: 1 − confidence",
    "image_score": "score of the image",
    "image_confidence": "1 − highest of the image",
    "source_image_confidence": "source: 1 − highest of the image",
}
_PLACES = {"segmentation": "pixels", "tokens": "tokens", "detection": "boxes"}


def evaluation(found: Evaluation) -> None:
    """Everything that was measured, in a screenful."""
    strange = f", {found.ood_rows} OOD rows" if found.ood_rows else ""
    lines(("file", f"{found.file}, output {found.output}, {found.task}"))
    lines(("data", f"{found.rows} rows{strange}"))
    _rows("predictions", "", found.metrics)
    for name, groups in found.promises.items():
        _rows(_PROMISES[name], "rows", _worst(groups))
    sets = found.ood_sets if len(found.ood_sets) > 1 else {}
    _rows("telling the OOD set from the data" if not sets else "telling all OOD sets from the data",
          "score", _named(found.detection))  # fmt: skip
    for name, rows in sets.items():
        _rows(f"telling {name} from the data", "score", _named(rows))
    _rows(_errors_title(found), "score", _errors(found))
    _shifts(found)
    console().print()
    lines(("flagged", _flagged(found)))
    if found.cost is not None:
        lines(("cost", f"{found.cost.ratio:.2f} times the source"))
    for text in found.notes:
        lines(("note", as_flags(text)))


_PROMISES = {
    "sets": "sets: how often the true class is inside",
    "deferral": "deferral: how often what is answered is wrong",
    "intervals": "intervals: how often the true value is inside",
}
MOST_CLASSES = 10


def _worst(groups: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    """The groups, of many classes those that fare worst."""
    classes = [name for name in groups if name.startswith("class ")]
    classes.sort(key=lambda name: (groups[name].get("coverage", 1.0), -groups[name].get("error", 0.0)))
    left_out = set(classes[MOST_CLASSES:])
    return {name: values for name, values in groups.items() if name not in left_out}


def next_steps(
    found: Evaluation, data: str, labels: str | None, report: Path | None, figures: Path | None
) -> None:
    """What was written, and what else can be asked."""
    if report is not None:
        lines(("report", str(report)))
    if figures is not None:
        lines(("figures", str(figures)))
    true = "" if labels is None else f" --labels {shlex.quote(labels)}"
    command = f"gapa-onnx evaluate {shlex.quote(found.file)} --data {shlex.quote(data)}{true}"
    if not found.ood_rows:
        lines(("next", f"{command} --ood PATH, with data unlike these: are they told apart?"))
    if report is None:
        lines(("next", f"{command} --report report.html"))


def _flagged(found: Evaluation) -> str:
    if "data" not in found.flagged:
        return "nothing: the file has no threshold"
    of = {"detection": " images"}.get(found.task, f" {_PLACES.get(found.task, 'rows')}")
    text = f"{found.flagged['data']:.1%} of the data's{of}"
    if found.threshold and "quantile" in found.threshold:
        text += f" ({1 - found.threshold['quantile']:.1%} expected of data like the calibration's)"
    others = {"ood": f"the OOD{of}", "data boxes": "the data's boxes", "ood boxes": "the OOD boxes"}
    told = [
        f", {found.flagged[kind]:.1%} of {what}" for kind, what in others.items() if kind in found.flagged
    ]
    return text + "".join(told)


def _errors_title(found: Evaluation) -> str:
    what = _PLACES[found.task] if found.task == "detection" else "rows"
    area = f"AURC: area under the {found.risk} of the most certain {what}"
    if not found.error_detection:
        return area
    return f"telling wrong {_PLACES.get(found.task, 'predictions')} from right ones; {area}"


def _errors(found: Evaluation) -> dict[str, dict[str, float]]:
    return {
        _SCORES.get(name, name): {**found.error_detection.get(name, {}), "AURC": area}
        for name, area in found.aurc.items()
    }


def _shifts(found: Evaluation) -> None:
    """Each set of the series: the metrics of gapa with those of the source in brackets, and the mean score."""
    rows: dict[str, dict[str, float | str]] = {}
    for shift in found.shifts:
        ours, source = shift.metrics["gapa"], shift.metrics["source"]
        rows[shift.name] = {
            name: f"{value:.3g}" + (f" ({source[name]:.3g})" if name in source else "")
            for name, value in ours.items()
        }
        score = next(
            name for name in ("score", "epistemic", "std", "entropy", "maxprob") if name in shift.mean_scores
        )
        rows[shift.name][f"mean {_SCORES[score]}"] = shift.mean_scores[score]
    _rows("shifts; of the source in brackets", "set", rows)


def _named(rows: Mapping[str, Mapping[str, float]]) -> dict[str, Mapping[str, float]]:
    return {_SCORES.get(name, name): values for name, values in rows.items()}


def _rows(title: str, heading: str, rows: Mapping[str, Mapping[str, float | str]]) -> None:
    """A table with a row per entry and a column per number; nothing for no rows."""
    columns = list(dict.fromkeys(name for values in rows.values() for name in values))
    if not columns:
        return
    table = new_table()
    table.add_column(heading, no_wrap=True)
    for name in columns:
        table.add_column(_TITLES.get(name, name), justify="right", no_wrap=True)
    for label, values in rows.items():
        table.add_row(label, *(_number(values.get(name)) for name in columns))
    console().print()
    console().print(Text(title, "bold"))
    console().print(table)


def _number(value: float | str | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if isinstance(value, int):
        return str(value)
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e3 or value == 0 else f"{value:.4g}"

"""What a model answered, row by row: collected and shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gapa_onnx.cli.answer_files import Arrays, flat, labels
from gapa_onnx.cli.console import console
from gapa_onnx.cli.layout import new_table
from gapa_onnx.cli.tokens import Reading, show_tokens, spoken_of
from gapa_onnx.errors import UserError
from gapa_onnx.model.caches import many_caches, names_told

HEAD = 10  # rows in the table
MOST_COLUMNS = 6  # elements of one output in the table, if the terminal is wide enough
CELL_WIDTH = 18

Column = tuple[str, list[str]]  #: its label, and a cell for each row


class Predictions:
    """The answers of all batches; with `keep` only the first rows, and a summary of the rest.

    `heads` is what a converted file says about its outputs, see `gapa_onnx.record`.
    """

    def __init__(
        self,
        names: Sequence[str],
        heads: Mapping[str, Mapping[str, Any]],
        keep: int | None,
        lengths: bool = False,
    ):
        self.lengths = lengths  #: whether rows of several lengths are to be filled up
        self.asked = list(names)
        self.names = list(names)
        self.left_out: list[str] = []  #: outputs that do not have one row per sample, such as a state
        self.heads = {
            output: head
            for output, head in heads.items()
            if output in self.names or "var" not in head["outputs"]
        }
        self.keep = keep
        self.rows = 0
        self.spread = {name: _Spread() for name, head in self.heads.items() if _variance(head) is not None}
        self.flags = {name: _Flags() for name, head in self.heads.items() if "ood" in head["outputs"]}
        self.images = {name: _Flags() for name, head in self.heads.items() if "image_ood" in head["outputs"]}
        self._pieces: dict[str, list[np.ndarray]] = {name: [] for name in self.names}

    def add(self, rows: int, answers: Sequence[np.ndarray]) -> None:
        """Take in the answers for some rows."""
        by_name = dict(zip(self.asked, answers))
        for name in self.asked:
            if name not in self.left_out and by_name[name].shape[:1] != (rows,):
                self._leave_out(name)
        for name in self.names:
            if self.keep is None or self.rows < self.keep:
                self._pieces[name].append(by_name[name])
        for name, spread in self.spread.items():
            spread.add(by_name[str(_variance(self.heads[name]))])
        for name, flags in self.flags.items():
            flags.add(by_name[self.heads[name]["outputs"]["ood"]])
        for name, flags in self.images.items():
            flags.add(by_name[self.heads[name]["outputs"]["image_ood"]])
        self.rows += rows

    def _leave_out(self, name: str) -> None:
        """Forget an output, and what the file says about it."""
        self.left_out.append(name)
        self.names.remove(name)
        del self._pieces[name]
        concerned = [one for one, head in self.heads.items() if name in (one, *head["outputs"].values())]
        for output in concerned:
            if (
                "detection" in self.heads[output]
            ):  # what it selects from all images is not by row, its candidates are
                continue
            for held in (self.heads, self.spread, self.flags):
                held.pop(output, None)
        if not self.names:
            raise UserError(
                f"output {name!r} does not have one row per sample", "run the model from Python instead"
            )

    def arrays(self) -> dict[str, np.ndarray]:
        """Each output (rows, …)."""
        whole = {}
        for name, pieces in self._pieces.items():
            try:
                whole[name] = np.concatenate(_of_one_size(pieces) if self.lengths else pieces)[: self.keep]
            except ValueError as error:
                shapes = sorted({str(piece.shape[1:]) for piece in pieces})
                raise UserError(
                    f"output {name!r} has rows of different shapes: {', '.join(shapes[:3])}",
                    "give data of one size",
                ) from error
        return whole


def _variance(head: Mapping[str, Any]) -> str | None:
    """The output that holds the variance of a head, of its leading tokens where it has no other."""
    outputs: Mapping[str, str] = head["outputs"]
    return outputs.get("var", outputs.get("token_var"))


def _of_one_size(pieces: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Answers (rows, …) of sequences of several lengths, filled up to the longest with NaN, -1 or false."""
    if len({piece.shape[1:] for piece in pieces}) < 2 or len({piece.ndim for piece in pieces}) > 1:
        return list(pieces)
    size = np.max([piece.shape[1:] for piece in pieces], axis=0)
    filler = {"f": np.nan, "b": False}.get(pieces[0].dtype.kind, -1)
    filled = []
    for piece in pieces:
        whole = np.full((len(piece), *size), filler, piece.dtype)
        whole[tuple(map(slice, piece.shape))] = piece
        filled.append(whole)
    return filled


class _Spread:
    """Running mean and maximum of a standard deviation."""

    def __init__(self) -> None:
        self.count, self.total, self.largest, self.missing = 0, 0.0, 0.0, 0

    def add(self, var: np.ndarray) -> None:
        known = np.isfinite(var) & (var >= 0)  # a damaged file may say anything
        std = np.sqrt(var[known].astype(np.float64))
        self.count += std.size
        self.total += float(std.sum())
        self.largest = max(self.largest, float(std.max(initial=0.0)))
        self.missing += int(var.size - std.size)

    def __str__(self) -> str:
        mean = self.total / self.count if self.count else float("nan")
        missing = f", {self.missing} not known (NaN)" if self.missing else ""
        return f"std mean {mean:.4g}, largest {self.largest:.4g}{missing}"


class _Flags:
    """How many answers lie beyond the threshold."""

    def __init__(self) -> None:
        self.count, self.flagged = 0, 0

    def add(self, flags: np.ndarray) -> None:
        self.count += flags.size
        self.flagged += int(flags.sum())

    def __str__(self) -> str:
        return f"{self.flagged} of {self.count} beyond the threshold"


# ---------------------------------------------------------------------------- table


def show(predictions: Predictions, reading: Reading | None = None) -> None:
    """The first rows, what each output says about them, and a line about all rows."""
    arrays = predictions.arrays()
    tokens = None if reading is None else spoken_of(predictions.heads, arrays)
    caches = many_caches(predictions.names)
    means = [name for name in _means(predictions) if name not in (tokens, *caches)]
    if reading is not None and tokens is not None:
        show_tokens(tokens, predictions.heads[tokens], arrays, reading)
    if means:
        _show_elements(predictions, arrays, means)
    if caches:
        console().print(f"{names_told(caches)}: not shown; -o FILE writes all", soft_wrap=True)
    _say_about_all(predictions)


def _show_elements(predictions: Predictions, arrays: Arrays, means: Sequence[str]) -> None:
    """The first rows and the first elements of outputs."""
    out = console()
    most = min(MOST_COLUMNS, max(1, out.width // CELL_WIDTH // max(1, len(means))))
    table = new_table()
    table.add_column("row", justify="right", no_wrap=True)
    columns, hidden = [], []
    for name in means:
        head = predictions.heads.get(name)
        shown, left = _columns(name, arrays, head, most)
        for label, cells in shown:
            table.add_column(label, justify="right", no_wrap=True)
            columns.append(cells)
        if left:
            hidden.append(f"{name}: {left} more element(s) per row; -o FILE writes all")
    for row in range(len(arrays[predictions.names[0]]) if predictions.names else 0):
        table.add_row(str(row), *(cells[row] for cells in columns))
    out.print(table)
    out.print()
    for line in hidden:
        out.print(line, soft_wrap=True)


def _means(predictions: Predictions) -> list[str]:
    """The outputs that have columns: neither what stands beside them, nor what a detector's candidates speak for."""
    beside = {name for head in predictions.heads.values() for name in head["outputs"].values()}
    for output, head in predictions.heads.items():
        where = head.get("detection", {})
        beside |= {where[part] for part in ("boxes", "classes") if where and where[part] != output}
    means = [name for name in predictions.names if name not in beside]
    return means + [name for name in predictions.heads if name not in predictions.names]  # lists of maps


def _say_about_all(predictions: Predictions) -> None:
    """How uncertain and how strange all rows are."""
    out = console()
    known = predictions.spread or predictions.images
    out.print(f"{predictions.rows} rows" + ("" if known else "; no output has a variance"))
    for name in predictions.heads:
        said = [str(held[name]) for held in (predictions.spread, predictions.flags) if name in held]
        if name in predictions.images:
            said[-1] += " among candidates"
            said.append(f"{predictions.images[name]} among images")
        out.print(f"{name}: {'; '.join(said)}", soft_wrap=True)


def _columns(
    name: str, arrays: Arrays, head: Mapping[str, Any] | None, most: int
) -> tuple[list[Column], int]:
    """Labelled columns of cells for one output, and how many of its elements do not fit."""
    roles, link = (head["outputs"], head["link"]) if head else ({}, None)
    if head is not None and "detection" in head:
        return _best_candidate(arrays, head), 0
    if name not in arrays:  # a list of maps, beside which there is a score
        return _scores(roles, arrays), 0
    mean, titles = arrays[name], labels(name, arrays[name])
    left = max(0, len(titles) - most)
    probs = arrays[roles["probs"]] if "probs" in roles and mean.ndim == 2 else None
    if probs is not None and link == "softmax" and "tokens" not in roles:
        columns, left = _best_class(name, mean, probs), 0
    elif probs is not None and link == "sigmoid":
        columns = _probabilities(titles[:most], probs)
    else:
        var = roles.get("total_var", roles.get("var"))  # with the noise, where it is known
        columns = _error_bars(titles[:most], mean, None if var is None else arrays[var])
    return columns + _promised(roles, arrays) + _scores(roles, arrays), left


def _best_candidate(arrays: Arrays, head: Mapping[str, Any]) -> list[Column]:
    """The most confident candidate of each image, and how strange it and the image are."""
    roles, where = head["outputs"], head["detection"]
    probs = arrays[roles["probs"]][:, 0]  # (rows, classes)
    if where["background"] is not None:
        probs = np.array(probs)
        probs[:, where["background"]] = -1.0  # no object is no class
    best = probs.argmax(axis=1)
    columns: list[Column] = [
        ("best candidate", [f"class {i}" for i in best]),
        ("probability", [f"{p:.3f}" for p in probs.max(axis=1)]),
    ]
    if where["boxes"] in arrays:
        by_candidate = np.moveaxis(arrays[where["boxes"]], where["box_axis"], -1)
        first = arrays[roles["candidates"]][:, 0]
        boxes = by_candidate[np.arange(len(first)), first, where["box_start"] : where["box_start"] + 4]
        stds = arrays[roles["box_var"]][:, 0] ** 0.5
        cells = [", ".join(f"{x:.4g} ± {s:.2g}" for x, s in zip(box, std)) for box, std in zip(boxes, stds)]
        columns.append(("its box", cells))
    columns.append(("its score", [f"{value:.4g}" for value in arrays[roles["score"]][:, 0]]))
    for role in ("image_score", "image_pvalue", "image_ood"):
        if role in roles:
            columns.append((role.replace("_", " "), [_cell(value, None) for value in arrays[roles[role]]]))
    return columns


def _promised(roles: Mapping[str, str], arrays: Arrays) -> list[Column]:
    """The set of classes, whether a row is deferred, and the interval of a single number."""
    columns: list[Column] = []
    if "set" in roles:
        chosen = [np.flatnonzero(row) for row in arrays[roles["set"]]]
        cells = [
            ", ".join(map(str, row[:MOST_COLUMNS])) + ", …" * (len(row) > MOST_COLUMNS) for row in chosen
        ]
        columns.append(("set", cells))
    if "defer" in roles:
        columns.append(("defer", [_cell(value, None) for value in arrays[roles["defer"]]]))
    if "lower" in roles and arrays[roles["lower"]][:1].size == 1:
        ends = zip(flat(arrays[roles["lower"]])[:, 0], flat(arrays[roles["upper"]])[:, 0])
        columns.append(("interval", [f"{lower:.4g} … {upper:.4g}" for lower, upper in ends]))
    return columns


def _scores(roles: Mapping[str, str], arrays: Arrays) -> list[Column]:
    """One column for each number that a row has about its strangeness."""
    whole = [f"{whose}{role}" for whose in ("image_", "seq_") for role in ("score", "pvalue", "ood")]
    return [
        (role.replace("_", " "), [_cell(value, None) for value in arrays[roles[role]]])
        for role in ("epistemic", "score", "pvalue", "ood", *whole)
        if role in roles and arrays[roles[role]].ndim == 1
    ]


def _best_class(name: str, logits: np.ndarray, probs: np.ndarray) -> list[Column]:
    """The class of each row, and its probability."""
    best = logits.argmax(axis=1)
    its = np.take_along_axis(probs, best[:, None], axis=1)[:, 0]
    return [(name, [f"class {i}" for i in best]), ("probability", [f"{p:.3f}" for p in its])]


def _probabilities(titles: Sequence[str], probs: np.ndarray) -> list[Column]:
    """One column per label, which may hold or not."""
    return [(f"p({label})", [f"{p:.3f}" for p in probs[:, i]]) for i, label in enumerate(titles)]


def _error_bars(titles: Sequence[str], mean: np.ndarray, var: np.ndarray | None) -> list[Column]:
    """One column per element, with its standard deviation where that is known."""
    values = flat(mean)
    stds = np.full(values.shape, None) if var is None else flat(var) ** 0.5
    return [
        (label, [_cell(value, std) for value, std in zip(values[:, i], stds[:, i])])
        for i, label in enumerate(titles)
    ]


def _cell(value: Any, std: Any) -> str:
    if isinstance(value, np.bool_):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, np.floating) else str(value)
    return text if std is None else f"{text} ± {std:.2g}"

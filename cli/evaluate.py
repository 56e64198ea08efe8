"""`gapa-onnx evaluate`: how good the uncertainty of a converted file is, beside the source by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gapa_onnx.cli import options
from gapa_onnx.cli.console import print_json, progress_bar, quiet_runtime, say_if_portable
from gapa_onnx.errors import UserError

_Labels = Annotated[
    str | None,
    typer.Option(
        "--labels",
        metavar="FILE",
        help="What is true of each row: a .npy, .npz (key y, labels or targets), .csv or .txt. Classes from 0, "
        "a 0/1 matrix, numbers, maps of classes (255: ignored) or next tokens (negative: ignored). For a detector, "
        "boxes in a COCO-style .json. A file with a score only, or text that a decoder reads, needs none.",
        show_default=False,
    ),
]
_Ood = Annotated[
    list[str] | None,
    typer.Option(
        "--ood", metavar="PATH", help="Data unlike those of the training; may be given several times."
    ),
]
_Shifts = Annotated[
    Path | None,
    typer.Option(
        "--shifts",
        metavar="FOLDER",
        help="Ever stranger versions of the data with the same labels, in order of the number in their names.",
    ),
]
_Source = Annotated[
    Path | None,
    typer.Option("--source", metavar="MODEL", help="The original file: measures what the conversion costs."),
]
_Output = Annotated[
    str | None, typer.Option("--output", metavar="NAME", help="Which output, where several have a task.")
]
_Report = Annotated[
    Path | None, typer.Option("--report", metavar="FILE", help="Write everything as one .html page.")
]
_Figures = Annotated[
    Path | None, typer.Option("--figures", metavar="DIR", help="Write every figure as .png and .svg.")
]


@options.preparing_options()
def evaluate(
    out: options.Converted,
    data: options.Data,
    labels: _Labels = None,
    *,
    ood: _Ood = None,
    shifts: _Shifts = None,
    source: _Source = None,
    output: _Output = None,
    report: _Report = None,
    figures: _Figures = None,
    batch_size: options.BatchSize = None,
    preparation: options.Prepared,
    as_json: options.Json = False,
) -> int:
    """Measure accuracy, calibration and detection of a converted file, beside its source by itself."""
    from gapa_onnx.cli import render_evaluation
    from gapa_onnx.measure.evaluation.evaluate import evaluate as measure
    from gapa_onnx.measure.evaluation.summary import summary_of

    _require_places(report, figures)
    quiet_runtime()
    with progress_bar() as progress:
        found = measure(
            out,
            data,
            labels,
            ood=ood or None,
            shifts=shifts,
            source=source,
            output=output,
            batch_size=batch_size,
            images=preparation.images,
            text=preparation.text,
            progress=progress,
        )
    say_if_portable()
    written = []
    if report is not None or figures is not None:
        from gapa_onnx.measure.evaluation.report import write_figures, write_report

        if report is not None:
            write_report(found, report)
            written.append(str(report))
        if figures is not None:
            written += map(str, write_figures(found, figures))
    if as_json:
        print_json({**summary_of(found), "written": written})
    else:
        render_evaluation.evaluation(found)
        render_evaluation.next_steps(found, str(data), labels, report, figures)
    return 0


def _require_places(report: Path | None, figures: Path | None) -> None:
    """Whether files can be written is found out before any work is done."""
    from gapa_onnx.files import writable

    if report is not None and report.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--report {report} is not a .html file", "give it a name that ends in .html")
    if report is not None:
        writable(report)
    if figures is not None and figures.exists() and not figures.is_dir():
        raise UserError(f"--figures {figures} is a file", "name a folder; it is made if there is none")

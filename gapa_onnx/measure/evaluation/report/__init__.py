"""The evaluation as one self-contained HTML page, and its figures as files.

Needs matplotlib and Pillow (the extra `evaluate`), which are imported only here, on the first call.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from gapa_onnx.errors import UserError
from gapa_onnx.files import told, write
from gapa_onnx.measure.evaluation.result import Evaluation

FORMATS = ("png", "svg")


def write_report(evaluation: Evaluation, path: str | PathLike[str]) -> None:
    """Write one HTML file that holds everything: no script, no network, the same bytes every time.

    It has only the sections for which there are data.
    """
    _require_libraries("a report")
    from gapa_onnx.measure.evaluation.report.page import page

    write(Path(path), page(evaluation).encode("utf-8", "replace"))


def write_figures(
    evaluation: Evaluation, folder: str | PathLike[str], formats: Sequence[str] = FORMATS
) -> tuple[Path, ...]:
    """Write every figure of the report to `folder` as `<figure id>.<format>`; the paths written."""
    unknown = [name for name in formats if name not in FORMATS]
    if unknown:
        raise UserError(f"figures cannot be written as {unknown[0]!r}", f"choose from {', '.join(FORMATS)}")
    _require_libraries("figures")
    from gapa_onnx.measure.evaluation.report.drawing import render
    from gapa_onnx.measure.evaluation.report.figures import figures
    from gapa_onnx.measure.evaluation.report.pictures import picture_figures

    written = []
    with told(Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
    for figure in (*figures(evaluation), *picture_figures(evaluation)):
        for name in formats:
            written.append(Path(folder) / f"{figure.id}.{name}")
            write(written[-1], render(figure, name))
    return tuple(written)


def _require_libraries(what: str) -> None:
    try:
        import matplotlib  # noqa: F401
        import PIL  # noqa: F401
    except ImportError as error:
        raise UserError(
            f"{what} cannot be drawn without matplotlib and Pillow", 'pip install "gapa-onnx[evaluate]"'
        ) from error

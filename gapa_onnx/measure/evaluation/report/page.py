"""The HTML page. Everything that comes from a file or a model is escaped by `text`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from gapa_onnx.measure.evaluation.report import figures as draw
from gapa_onnx.measure.evaluation.report import pictures, promises, regression, shifts, wording
from gapa_onnx.measure.evaluation.report.drawing import Figure, inline_svg
from gapa_onnx.measure.evaluation.report.making import making
from gapa_onnx.measure.evaluation.report.markup import cards, section, table, text
from gapa_onnx.measure.evaluation.report.wording import number, score_label, whole
from gapa_onnx.measure.evaluation.result import Evaluation, Example, SegmentationExample

#: nothing may be fetched, whatever is in the file
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
_PIXELATED_BELOW = 64
FIGURES = 4  # significant ones, in the table of metrics


def page(evaluation: Evaluation) -> str:
    """The whole report."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    title = f"{text(_short_file(evaluation.file))} · evaluation"
    body = "\n".join(
        part
        for part in (
            _header(evaluation),
            _quality(evaluation),
            promises.promises(evaluation),
            _detection(evaluation),
            _shifts(evaluation),
            _segmentation(evaluation.segmentation[: pictures.MOST_MAPS]),
            _examples(evaluation),
            making(evaluation),
        )
        if part
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""


def _short_file(file: str) -> str:
    return file.replace("\\", "/").rstrip("/").rpartition("/")[2] or file


def _header(evaluation: Evaluation) -> str:
    facts = [
        evaluation.task,
        f"output {evaluation.output}",
        f"{whole(evaluation.rows)} rows",
        f"{whole(evaluation.ood_rows)} OOD rows" if evaluation.ood_rows else "no OOD set",
    ]
    tiles = "".join(
        f'<div class="tile"><dt>{text(label)}</dt><dd>{text(shown)}</dd><p>{text(note)}</p></div>'
        for label, shown, note in _tiles(evaluation)
    )
    compared = wording.comparison(evaluation)
    return f"""<header>
<p class="eyebrow">gapa-onnx · evaluation</p>
<h1>{text(_short_file(evaluation.file))}</h1>
<p class="facts">{" · ".join(text(fact) for fact in facts)}</p>
<p class="headline">{text(wording.headline(evaluation))}</p>
{f'<p class="compared">{text(compared)}</p>' if compared else ""}
{f'<dl class="tiles">{tiles}</dl>' if tiles else ""}
</header>"""


def _tiles(evaluation: Evaluation) -> Iterable[tuple[str, str, str]]:
    """The few numbers to remember: label, number, and what to compare it with."""
    for name in ("accuracy", "ap50", "rmse", "ece", "cqm"):
        found, before = (wording.value(evaluation, who, name) for who in ("gapa", "source"))
        if found is not None:
            known = wording.metric(name)
            note = f"source: {number(before, known.percent)}" if before is not None else ""
            yield known.label, number(found, known.percent), note
    if "data" in evaluation.flagged:
        yield "Data flagged", number(evaluation.flagged["data"], percent=True), _expected(evaluation)
    if "ood" in evaluation.flagged:
        yield "OOD flagged", number(evaluation.flagged["ood"], percent=True), "by the file's own threshold"
    separated = wording.best_detection(evaluation)
    if separated:
        label, count = score_label(separated[0]), len(evaluation.detection)
        yield (
            "AUROC",
            number(separated[1]),
            f"{label}, best of {count} scores" if count > 1 else f"of the {label}",
        )
    if evaluation.cost is not None:
        yield "Time", f"{evaluation.cost.ratio:.2f} ×", "of the source model's"


def _expected(evaluation: Evaluation) -> str:
    quantile = (evaluation.threshold or {}).get("quantile")
    return "" if quantile is None else f"expected: {number(1 - quantile, percent=True)}"


def _quality(evaluation: Evaluation) -> str:
    makers = (draw.reliability, regression.coverage, draw.risk_coverage, regression.intervals)
    drawn = [_figure(figure) for maker in makers if (figure := maker(evaluation)) is not None]
    rows = [cards([_metrics_card(evaluation)]), cards(drawn), cards([_notes_card(evaluation)])]
    return section("Quality", "How right the predictions are, and how well the model knows it.", rows)


def _metrics_card(evaluation: Evaluation) -> str:
    names = dict.fromkeys(name for found in evaluation.metrics.values() for name in found)
    if not names:
        return ""
    who = {"source": "Source", "gapa": "With gapa"}
    rows = []
    for name in names:
        known = wording.metric(name)
        values = {model: evaluation.metrics.get(model, {}).get(name) for model in who}
        winners = wording.best(
            ((model, found) for model, found in values.items() if found is not None), known, FIGURES
        )
        label = f'<span>{text(known.label)}</span> <span class="meaning">{text(known.meaning)}</span>'
        rows.append(
            [
                label,
                _direction(known),
                *(_marked(number(values[model], known.percent, FIGURES), model in winners) for model in who),
            ]
        )
    grid = table(
        ["Metric", "Better", *who.values()], rows, "Metrics of the source and of the converted file", "tl"
    )
    note = '<p class="note">● marks the better of the two where they differ as printed.</p>'
    return f'<div class="card" id="table-metrics"><h3>Source and gapa</h3>{grid}{note}</div>'


def _direction(known: wording.Metric) -> str:
    """An arrow and a word; there is no room for the word on a phone, unless it is a number to aim at."""
    arrow, _, word = known.direction.partition(" ")
    hidden = ' class="word"' if known.better in (wording.HIGHER, wording.LOWER) else ""
    return f"<span>{text(arrow)}</span> <span{hidden}>{text(word)}</span>" if arrow else ""


def _notes_card(evaluation: Evaluation) -> str:
    if not evaluation.notes:
        return ""
    notes = "".join(f"<li>{text(note[:1].upper() + note[1:])}</li>" for note in evaluation.notes)
    return f'<div class="card" id="notes"><h3>Notes</h3><ul>{notes}</ul></div>'


def _detection(evaluation: Evaluation) -> str:
    roc = draw.detection_curves(evaluation)
    first = [part for part in (_scores_card(evaluation), _figure(roc) if roc else "") if part]
    drawn = [_figure(figure) for figure in draw.histograms(evaluation)]
    rows = [cards([*first, *drawn])] if len(first) + len(drawn) <= 3 else [cards(first), cards(drawn)]
    rows.insert(1, cards([_sets_card(evaluation)]))
    if evaluation.ood_rows or evaluation.detection:
        return section(
            "Telling strange inputs apart",
            f"{whole(evaluation.rows)} rows of data against {whole(evaluation.ood_rows)} rows from elsewhere (OOD).",
            rows,
        )
    return section("Scores", "How uncertain the file is about the data; higher is stranger.", rows)


def _found_by_scores(evaluation: Evaluation, names: Sequence[str]) -> dict[str, dict[str, float | None]]:
    """How well each score tells strange inputs and errors."""
    found: dict[str, dict[str, float | None]] = {
        name: dict(evaluation.detection.get(name, {})) for name in names
    }
    for name, area in evaluation.aurc.items():
        found[name]["aurc"] = area
    for name, row in evaluation.error_detection.items():
        found[name]["errorauroc"] = row.get("auroc")
    return found


def _scores_card(evaluation: Evaluation) -> str:
    names = list(dict.fromkeys([*evaluation.detection, *evaluation.error_detection, *evaluation.aurc]))
    found = _found_by_scores(evaluation, names)
    candidates = ("auroc", "aupr", "fpr95", "errorauroc", "aurc")
    columns = [name for name in candidates if any(name in row for row in found.values())]
    if not names or not columns:
        return ""
    winners = {
        column: wording.best(
            ((name, found[name][column]) for name in names if column in found[name]), wording.metric(column)
        )
        for column in columns
    }
    rows = [
        [
            text(score_label(name)),
            *(
                _marked(
                    number(found[name].get(column), wording.metric(column).percent), name in winners[column]
                )
                for column in columns
            ),
        ]
        for name in names
    ]
    heads = [f"{wording.metric(c).label} {wording.metric(c).direction.split(' ')[0]}" for c in columns]
    meanings = "; ".join(f"{wording.metric(c).label}: {wording.metric(c).meaning}" for c in columns)
    grid = table(["Score", *heads], rows, "Scores", "t")
    mark = "● marks the best. " if any(winners.values()) else ""
    return (
        f'<div class="card" id="table-detection"><h3>Scores</h3>{grid}'
        f'<p class="note">{mark}{text(meanings)}.</p></div>'
    )


def _sets_card(evaluation: Evaluation) -> str:
    """Each OOD set by itself, where there are several."""
    if len(evaluation.ood_sets) < 2:
        return ""
    names = list(dict.fromkeys(name for row in evaluation.ood_sets.values() for name in row))
    rows = []
    for label, found in evaluation.ood_sets.items():
        areas = {name: found.get(name, {}).get("auroc") for name in names}
        winners = wording.best(((n, a) for n, a in areas.items() if a is not None), wording.metric("auroc"))
        rows.append([text(label), *(_marked(number(areas[name]), name in winners) for name in names)])
    grid = table(["OOD set", *(score_label(name) for name in names)], rows, "AUROC of each OOD set", "t")
    return (
        f'<div class="card" id="table-ood-sets"><h3>AUROC of each OOD set</h3>{grid}'
        '<p class="note">● marks the best score for a set.</p></div>'
    )


def _marked(shown: str, winner: bool) -> str:
    if not winner:
        return text(shown)
    return f'<strong class="best"><span title="better" aria-label="better">●</span> {text(shown)}</strong>'


def _shifts(evaluation: Evaluation) -> str:
    figure = shifts.shifts(evaluation)
    lede = "Each point is a whole data set, measured like the data above."
    return section("Under shift", lede, [cards([_figure(figure)])]) if figure else ""


def _figure(figure: Figure) -> str:
    panels = "".join(
        f'<div class="plot" role="img" aria-label="{text(panel.alt)}">{inline_svg(panel, f"{figure.id}-{index}")}</div>'
        for index, panel in enumerate(figure.panels)
    )
    kind = " pair" if len(figure.panels) == 2 else ""
    return (
        f'<figure class="card{kind}" id="{figure.id}" aria-label="{text(figure.title)}"><h3>{text(figure.title)}</h3>'
        f'<div class="panels">{panels}</div>'
        f"<figcaption>{text(figure.caption)}</figcaption></figure>"
    )


def _examples(evaluation: Evaluation) -> str:
    groups = pictures.example_groups(evaluation)
    if not groups:
        return ""
    blocks = "".join(
        f'<h4>{text(title)}</h4><div class="thumbnails">{"".join(_thumbnail(e) for e in examples)}</div>'
        for title, examples in groups
    )
    figure = (
        '<figure class="card" id="figure-examples" aria-label="Most and least certain inputs">'
        f"<h3>Most and least certain inputs</h3>{blocks}"
        "<figcaption>The number is the score; higher is stranger. ✗ marks a prediction that differs from its target."
        "</figcaption></figure>"
    )
    return section("Examples", "What the file is sure of, and what it is not.", [cards([figure])])


def _thumbnail(example: Example) -> str:
    image = pictures.picture(example.image, pictures.THUMBNAIL)
    wrong = pictures.is_wrong(example)
    small = " pixelated" if max(image.size) < _PIXELATED_BELOW else ""
    verdict = f"{'✗ ' if wrong else ''}{example.predicted}"
    target = f" · target {example.target}" if example.target and example.origin != "ood" else ""
    label = f"row {example.row}: predicted {example.predicted}{target}, score {number(example.score)}"
    return (
        f'<div class="thumbnail{" wrong" if wrong else ""}">'
        f'<img class="thumb{small}" src="{pictures.data_uri(image)}" alt="{text(label)}" '
        f'width="{image.width}" height="{image.height}">'
        f"<p><strong>{text(verdict)}</strong><span>{text(target.removeprefix(' · '))}</span>"
        f"<span>{text(number(example.score))}</span></p></div>"
    )


def _segmentation(shown: Sequence[SegmentationExample]) -> str:
    if not shown:
        return ""
    most = pictures.brightest(shown)
    rows = "".join(_maps_row(example, most) for example in shown)
    swatches = "".join(
        f'<li><span class="swatch" style="background:{pictures.class_colour(index)}"></span>{index}</li>'
        for index in pictures.classes(shown)
    )
    scale = ", ".join(pictures.heat(9))
    figure = (
        '<figure class="card" id="figure-segmentation" aria-label="Errors and uncertainty, pixel by pixel">'
        f'<h3>Errors and uncertainty</h3><div class="maps">{rows}</div>'
        f'<div class="legends"><ul class="swatches"><li>Classes</li>{swatches}</ul>'
        f'<p class="heat"><span>0</span><span class="bar" style="background:linear-gradient(90deg, {scale})"></span>'
        f"<span>{text(number(most))} and more</span></p></div>"
        "<figcaption>Orange pixels of the error map are wrong, grey ones have no label. Honest uncertainty is bright where "
        "the errors are. All uncertainty maps share one scale.</figcaption></figure>"
    )
    return section("Pixel by pixel", "Is it uncertain where it is wrong?", [cards([figure])])


def _maps_row(example: SegmentationExample, most: float) -> str:
    cells = []
    for name, image in zip(pictures.MAPS, pictures.maps(example, most)):
        if image is None:
            cells.append('<div class="cell"><span>no image</span></div>')
        else:
            small = " pixelated" if max(image.size) < _PIXELATED_BELOW else ""
            cells.append(
                f'<div class="cell"><img class="map{small}" src="{pictures.data_uri(image)}" alt="{name} of row {int(example.row)}" '
                f'width="{image.width}" height="{image.height}"><span>{name}</span></div>'
            )
    about = (
        f'<div class="cell about"><strong>Row {whole(example.row)}</strong>'
        f"<span>{number(pictures.wrong_share(example), percent=True)} of pixels wrong</span></div>"
    )
    return f'<div class="maps-row">{about}{"".join(cells)}</div>'

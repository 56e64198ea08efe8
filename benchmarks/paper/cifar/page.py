"""The sections of RESULTS.md about CIFAR-10 and about strange images that are near."""

from __future__ import annotations

from pathlib import Path

import tex_tables
from lines import say
from tables import Row, table

from cifar.rows import ROWS

RESULTS = Path(__file__).resolve().parents[1] / "results"

SETS = {
    "svhn": "SVHN",
    "digits": "digits",
    "textures": "textures",
    "blurred": "blurred",
    "noisy": "noisy",
    "blended": "blended",
}
INSIDE = {name: name.upper() for name in ("acc", "nll", "ece", "ood", "bald")}
ORDER = [row.name for row in ROWS]
FIGURE = "cifar_cost.png"
NEAR = {"unseen": "unseen classes", "blended": "blends"}


def section(rows: list[Row]) -> str:
    parts = [
        "ResNets with weights that others trained on CIFAR-10 (option A shortcuts); every method starts from the same "
        "network, and those on features from the 64 numbers that its last layer reads for the 50,000 training "
        "images. ACC, NLL and ECE on 9,500 test images (500 are for the temperature); OOD and BALD are AUROCs "
        "against 2,032 images of SVHN by the entropy of the prediction and its epistemic part, then the AUROC of the "
        "method's own score against each strange set: SVHN, MNIST's digits, textures made here, and test images "
        "blurred, with noise, and two mixed. *fit*: CPU seconds from the network to the method. *time*: of a batch "
        "of 256 over the network's in onnxruntime, one thread. *changed*: images of the test set and SVHN whose most "
        "probable class is not the network's. Empty: the method has no such notion, or the control of a timing was "
        "off.\n"
    ]
    printed = tex_tables.cifar()
    for net in sorted({row["net"] for row in rows}, key=place):
        chosen = [row for row in rows if row["net"] == net]
        parts += [f"### {title(net)}\n", our_table(chosen)]
        parts += _paper([row for row in printed if row["net"] == net])
    if _drawn(rows, RESULTS / FIGURE):
        parts.append(f"![AUROC against cost](results/{FIGURE})\n")
    return "\n".join([*parts, origin(rows)])


def place(net: str) -> tuple[int, str]:
    """Where a network stands on the page: by its depth, float32 first."""
    depth, _, kind = net.removeprefix("resnet").partition(" ")
    return int(depth), kind


def title(net: str) -> str:
    """resnet20 int8 → ResNet-20, int8"""
    depth, kind = place(net)
    return f"ResNet-{depth}, {kind}" if kind else f"ResNet-{depth}"


def our_table(rows: list[Row]) -> str:
    sets = {key: name for key, name in SETS.items() if f"score_{key}" in rows[0]}
    header = ["", *INSIDE.values(), *sets.values(), "fit (s)", "time", "changed"]
    lines = []
    for row in sorted(rows, key=lambda row: ORDER.index(row["row"])):
        figures = [_digits(row[name], 3) for name in (*INSIDE, *(f"score_{key}" for key in sets))]
        costs = [_digits(row["fit_seconds"], 1), _digits(row["ratio"], 2), row["argmax_changed"]]
        lines.append([row["row"], *figures, *costs])
    return table(header, lines)


def _paper(rows: list[Row]) -> list[str]:
    """The paper's lines; [] for a network that it does not have."""
    if not rows:
        return []
    columns = {
        "acc": "ACC",
        "nll": "NLL",
        "ood": "OOD",
        "fit_seconds": "train (s)",
        "test_seconds": "test (s)",
    }
    body = [[row["row"], *(row[column] for column in columns)] for row in rows]
    remark = f"({rows[0]['origin']}; other weights of this network, so this is context and no comparison.)\n"
    return ["Of the paper:\n", table(["", *columns.values()], body), remark]


def _drawn(rows: list[Row], path: Path) -> bool:
    try:
        from cifar.figure import draw
    except ImportError:
        say("no matplotlib: the figure of costs stays as it is")
        return path.exists()
    draw(rows, path)
    return True


def near(rows: list[Row]) -> str:
    names = list(dict.fromkeys(row["row"] for row in rows))
    header = ["", "left out", "ACC", *(f"{kind}: {name}" for kind in NEAR.values() for name in names)]
    lines = []
    for data in dict.fromkeys(row["data"] for row in rows):
        by_name = {row["row"]: row for row in rows if row["data"] == data}
        any_row = next(iter(by_name.values()))
        figures = [_digits(by_name.get(name, {}).get(kind, ""), 3) for kind in NEAR for name in names]
        lines.append([data, any_row["left_out"].replace(" ", ", "), _digits(any_row["acc"], 3), *figures])
    return (
        "Networks that were trained without two classes. AUROC for the test images of the eight classes that a network "
        "knows against the test images of the other two, and against equal mixtures of two of its test images of "
        "different classes: by the entropy of the network's own prediction, by the distance to the 50th neighbour of "
        "the normalised features, by the score of the default.\n\n" + table(header, lines)
    )


def origin(rows: list[Row]) -> str:
    said = [
        f"{column.replace('_', '-')} {', '.join(sorted({row[column] for row in rows}))}"
        for column in ("gapa_onnx", "onnxruntime", "processor", "cores")
    ]
    settings = sorted({f"{row['row']}: `{row['settings']}`" for row in rows if row["settings"]})
    return "; ".join(said) + (". Settings: " + "; ".join(settings) if settings else "") + ".\n"


def _digits(figure: str, digits: int) -> str:
    return f"{float(figure):.{digits}f}" if figure else ""

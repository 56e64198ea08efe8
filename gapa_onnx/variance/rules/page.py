"""The operator page of the documentation, written from the rule table.

`python -m gapa_onnx.variance.rules.page > docs/operators.md` writes it anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import onnx

from gapa_onnx.variance.expansion import has_body
from gapa_onnx.variance.rules import TABLE, Deterministic, Refusal, Rule
from gapa_onnx.variance.rules.registry import Behaviour, Key

STANDARD = ("", "ai.onnx.ml", "ai.onnx.preview", "ai.onnx.preview.training")

INTRODUCTION = """\
# Operators

<!-- Written by `python -m gapa_onnx.variance.rules.page > docs/operators.md`; do not edit. -->

What becomes of the variance at each operator, opsets 7 to {opset}. `gapa-onnx inspect MODEL` shows the same for the
operators of a model. In the formulas v is the variance of an input, x its mean, y the mean of the output; w are
weights.

**Behaviour**

- *rule*: the variance of the outputs follows from that of the inputs, by the formula.
- *spelled out*: the standard defines the operator by others, and their rules apply.
- *deterministic*: no variance leaves it, for the reason given.
- *refused*: the variance cannot be stated, for the reason given. Conversion stops and says so where variance arrives
  at such an operator; choose sites behind it, or let `on_unsupported="cut"` treat its outputs as certain. A rule may
  refuse single forms of its operator, such as an uncertain tensor where weights are expected, and names the form.

**Accuracy** of a rule, for inputs whose elements are independent

- *exact*: the variance, whatever its size.
- *first order*: exact in the limit of small variances: Σ (∂y/∂x)² v.
- *composed*: as true as the rules of what is inside.
- *heuristic*: right in size, not in every case; the formula says when it is exact.

Where forms of one operator differ, the accuracy is that of the least accurate. Correlation between the elements of a
tensor is not carried from one operator to the next.
"""

TITLES = {
    "": "ONNX",
    "ai.onnx.ml": "Classical models (`ai.onnx.ml`)",
    "com.microsoft": "onnxruntime (`com.microsoft`)",
    "ai.gapa.pattern": "Groups of nodes that are seen as one",
}


def page() -> str:
    """The whole page, in Markdown."""
    domains = sorted({domain for domain, _ in _rows()}, key=lambda domain: (_place(domain), domain))
    sections = [_section(domain) for domain in domains]
    return "\n".join([INTRODUCTION.format(opset=onnx.defs.onnx_opset_version()), *sections])


def spelled_out() -> set[Key]:
    """Operators of the standard that have no rule but a body of operators that have."""
    schemas = [s for s in onnx.defs.get_all_schemas() if s.domain in STANDARD and not s.deprecated]
    bodies = {(s.domain, s.name) for s in schemas if has_body(s)}
    return bodies - set(TABLE)


def _rows() -> dict[Key, tuple[str, str, str]]:
    """Behaviour, accuracy and formula or reason of every operator."""
    rows = {key: ("spelled out", "composed", "the rules of its function body") for key in spelled_out()}
    return rows | {key: _describe(entry) for key, entry in TABLE.items()}


def _describe(entry: Behaviour) -> tuple[str, str, str]:
    match entry:
        case Rule():
            return "rule", entry.accuracy.value, entry.formula
        case Deterministic():
            return "deterministic", "", entry.reason
        case Refusal():
            return "refused", "", entry.reason


def _place(domain: str) -> int:
    order = list(TITLES)
    return order.index(domain) if domain in order else len(order)


def _section(domain: str) -> str:
    return "\n".join(_section_lines(domain)) + "\n"


def _section_lines(domain: str) -> Iterator[str]:
    rows = {op: row for (of, op), row in sorted(_rows().items()) if of == domain}
    yield f"## {TITLES.get(domain, f'`{domain}`')}\n"
    yield f"{len(rows)} operators.\n" if len(rows) > 1 else "1 operator.\n"
    yield "| operator | behaviour | accuracy | formula or reason |"
    yield "|---|---|---|---|"
    for op, cells in rows.items():
        yield f"| {op} | " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    sys.stdout.write(page())

"""Names of settings and arguments as flags: the library writes `k=20`, which Python takes, the terminal --k 20."""

from __future__ import annotations

import re
import shlex

from gapa_onnx.settings import choices

_SHORT = {"out": "-o"}

#: What texts of the library name beside settings: arguments of its functions that are options here.
ARGUMENTS = frozenset(
    {
        "allow_uncovered",
        "batch",
        "beside",
        "budget",
        "calib",
        "data",
        "held_out",
        "labels",
        "out",
        "output",
        "paper",
        "quantile",
        "rounds",
        "source",
        "strange",
        "targets",
    }
    | {"threads", "value"}
)

_PREPARING = re.compile(r"`(Image|Text)Options\(([a-z_]+)=([^`]+)\)`")
_TEXT_FLAGS = {"field": "text_field", "rows": "text_rows"}  # the others are called the same
_SPELLED = re.compile(r"`([a-z_]+)(?:=(?:'([^'`]*)'|\"([^\"`]*)\"|([^'\"`\s]+)))?`")


def flag(name: str, value: object = None) -> str:
    """The flag of a setting or argument, with a value if there is one."""
    option = _SHORT.get(name) or "--" + name.replace("_", "-")
    return option if value is None else f"{option} {shlex.quote(str(value))}"


def as_flags(text: str) -> str:
    """A text of the library for the terminal: `k` is --k there, `task="regression"` --task regression, and
    `paper=True` --paper, `ImageOptions(mean=(0.5, 0.4, 0.3))` --image-mean 0.5,0.4,0.3, and `TextOptions(seq_len=…)`
    --seq-len. Other words in backticks stay as they are."""
    return _SPELLED.sub(_flag_of, _PREPARING.sub(_preparing_flag_of, text))


def _preparing_flag_of(spelled: re.Match[str]) -> str:
    kind, name, value = spelled.groups()
    if kind == "Text":
        return flag(_TEXT_FLAGS.get(name, name), None if value == "…" else value.strip("'\""))
    return flag(f"image_{name}", re.sub(r"[()'\s]", "", value))


def _flag_of(spelled: re.Match[str]) -> str:
    name, *quoted, bare = spelled.groups()
    if name not in ARGUMENTS and name not in choices():
        return spelled[0]
    value = next((text for text in quoted if text is not None), bare)
    return flag(name, None if value == "True" else value)

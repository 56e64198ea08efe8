"""What a model takes beside tokens, filled in from the tokens: masks, positions, types, and caches that are empty.

Inputs are known by the names that exports of decoders and encoders give them: attention_mask, position_ids,
token_type_ids, past_key_values.0.key, past_key_self_0, use_cache_branch. One that is not known so is named in an error.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gapa_onnx.arrays import Array
from gapa_onnx.data.convert import kind
from gapa_onnx.data.spec import InputSpec, TokenLimits, fixed
from gapa_onnx.errors import UserError

IDS = re.compile(r"(input_?ids?|ids|tokens?|token_ids|input_tokens|input_word_ids|idx)$", re.IGNORECASE)
_MASK = re.compile(r"(attention_?mask|attn_mask|att_mask|input_mask|mask)$", re.IGNORECASE)
_POSITIONS = re.compile(r"(position_?ids?|positions?|pos_ids|input_positions)$", re.IGNORECASE)
_TYPES = re.compile(r"(token_type_?ids|token_types|input_type_ids|segment_?ids?|segments)$", re.IGNORECASE)
_CACHE = re.compile(r"past|cache", re.IGNORECASE)
_BRANCH = re.compile(r"use_cache(_branch)?$", re.IGNORECASE)
_KEEP = re.compile(r"(num_)?logits_to_keep$", re.IGNORECASE)  # 0 is all

#: From the lengths of n sequences (n,) and the most tokens of them to an array.
Fill = Callable[[Array, int], Array]


def is_filled_in(name: str) -> bool:
    """Whether an input of this name goes along with tokens, or with what else is fed, and is none itself."""
    name = _plain(name)
    known = (_POSITIONS, _TYPES, _BRANCH, _KEEP)
    return "mask" in name.lower() or bool(_CACHE.search(name)) or any(one.match(name) for one in known)


@dataclass(frozen=True)
class TokenInputs:
    """The input that takes tokens, and how the others follow from them."""

    ids: InputSpec
    limits: TokenLimits
    fills: Mapping[str, Fill]
    cached: bool  #: whether some of them are caches
    typed: bool  #: whether one says which of two texts a token is of
    masked: bool  #: whether one says which tokens are padding

    @property
    def seq_len(self) -> int | None:
        """The length of a sequence, where the model fixes it."""
        size = None if self.ids.shape is None else self.ids.shape[1]
        return size if fixed(size) else None

    def arrays(self, tokens: Array, lengths: Array) -> dict[str, Array]:
        """All inputs for sequences (n, T) of which so many tokens are no padding."""
        filled = {name: fill(lengths, tokens.shape[1]) for name, fill in self.fills.items()}
        return {self.ids.name: tokens, **filled}


def token_inputs(inputs: Sequence[InputSpec], where: str, limits: TokenLimits) -> TokenInputs:
    """Which input takes tokens, and how to fill in the others; a UserError where that cannot be. `limits` stand in for
    those of inputs that have none."""
    ids = _ids(inputs)
    if ids is None:
        takes = ", ".join(f"'{spec.name}' {spec}" for spec in inputs[:8])
        raise UserError(
            f"{where} is text, and the model takes no tokens: its inputs are {takes}",
            "give arrays, for example a .npz with the names of the inputs",
        )
    fills: dict[str, Fill] = {}
    unknown = []
    for spec in inputs:
        if spec is not ids:
            fill = _fill(spec, ids, (ids.limits or limits).head_size)
            if fill is None:
                unknown.append(f"'{spec.name}' ({spec})")
            else:
                fills[spec.name] = fill
    if unknown:
        raise UserError(
            f"text gives the model its tokens, but not its input{'s' * (len(unknown) > 1)} {', '.join(unknown)}",
            "give all inputs as a .npz, or write a loader.py:function",
        )
    names = [_plain(name) for name in fills]
    return TokenInputs(
        ids,
        ids.limits or limits,
        fills,
        cached=any(map(_CACHE.search, names)),
        typed=any(map(_TYPES.match, names)),
        masked=any(map(_MASK.match, names)),
    )


def _plain(name: str) -> str:
    """A name without the scope in front of it and the number behind it: serving/input_ids:0."""
    return name.rsplit("/", 1)[-1].split(":")[0]


def _ids(inputs: Sequence[InputSpec]) -> InputSpec | None:
    """The input that takes tokens: by its name, or the only one that may."""
    able = [
        spec
        for spec in inputs
        if spec.dtype in (np.int32, np.int64)
        and (spec.shape is None or len(spec.shape) == 2)
        and not is_filled_in(spec.name)
    ]
    named = [spec for spec in able if IDS.match(_plain(spec.name))]
    if named:
        return named[0]
    return able[0] if len(able) == 1 else None


def _fill(spec: InputSpec, ids: InputSpec, head_size: int | None) -> Fill | None:
    """How an input follows from the lengths of sequences; None where that is not known."""
    name = _plain(spec.name)
    for known, fill, axes, kinds in _FILLS:
        if known.match(name) and kind(spec.dtype) in kinds and _has_axes(spec, axes):
            return fill
    return _empty_cache(spec, ids, head_size) if _CACHE.search(name) and kind(spec.dtype) == "float" else None


def _has_axes(spec: InputSpec, numbers: Sequence[int]) -> bool:
    return spec.shape is None or len(spec.shape) in numbers


#: By name: what fills an input in, for how many axes, and for which kinds of numbers.
_FILLS: tuple[tuple[re.Pattern[str], Fill, tuple[int, ...], tuple[str, ...]], ...] = (
    (_MASK, lambda lengths, width: np.arange(width) < lengths[:, None], (2,), ("int", "bool", "float")),
    (_POSITIONS, lambda lengths, width: np.tile(np.arange(width), (len(lengths), 1)), (2,), ("int",)),
    (_TYPES, lambda lengths, width: np.zeros((len(lengths), width), np.int64), (2,), ("int",)),
    (_BRANCH, lambda lengths, width: np.zeros(1, np.bool_), (0, 1), ("bool",)),
    (_KEEP, lambda lengths, width: np.zeros((), np.int64), (0,), ("int",)),
)


def _empty_cache(spec: InputSpec, ids: InputSpec, head_size: int | None) -> Fill | None:
    """A cache of no positions; None where its shape has a place for some, or does not tell.

    (N, heads, positions, d), or keys and values stacked, (2, N, heads, positions, d).
    """
    if spec.shape is None or len(spec.shape) < 3:
        return None
    rows = ids.shape[0] if ids.shape else None
    axis = int(fixed(spec.shape[0]) and spec.shape[0] != rows)  # of the rows
    *others, last = (size for at, size in enumerate(spec.shape) if at != axis)
    others.append(last if fixed(last) else head_size)
    sizes = [size if fixed(size) else 0 for size in others]
    if sum(map(fixed, others)) != len(others) - 1:  # the positions alone are open
        return None

    def fill(lengths: Array, width: int) -> Array:
        several = 1 if axis else len(lengths)  # only along the first axis can be cut into rows
        return np.zeros([*sizes[:axis], several, *sizes[axis:]], spec.dtype)

    return fill

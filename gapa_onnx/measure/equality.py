"""Whether two answers are the same to the last bit, also where only a fingerprint of the first was kept."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Fingerprint:
    """What is kept of an array that others are to equal bit for bit: a text's answers may be too large to keep."""

    kind: str
    shape: tuple[int, ...]
    digest: bytes

    @classmethod
    def of(cls, answer: Any) -> Any:
        """Of an array of numbers; all else stays as it is."""
        if not isinstance(answer, np.ndarray) or answer.dtype == object:
            return answer
        data = np.ascontiguousarray(answer).reshape(-1).view(np.uint8).data
        return cls(answer.dtype.str, answer.shape, hashlib.blake2b(data, digest_size=32).digest())


def fingerprints(answers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of all answers, by name."""
    return [{name: Fingerprint.of(found) for name, found in held.items()} for held in answers]


def bit_equal(a: Any, b: Any) -> bool:
    """The same type, shape and bytes; NaNs count as equal to themselves. Also for lists and dicts, and where the first
    is only a fingerprint."""
    if isinstance(a, Fingerprint):
        return bool(a == Fingerprint.of(b))
    if isinstance(a, np.ndarray):
        if not isinstance(b, np.ndarray) or a.dtype != b.dtype or a.shape != b.shape:
            return False
        return bool(a.tolist() == b.tolist() if a.dtype == object else a.tobytes() == b.tobytes())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(bit_equal, a, b))
    return bool(a == b)

"""Converted files in a stock onnxruntime of any supported release: nothing but that and numpy is needed here.

python -m fuzz.stock FOLDER LIBRARY     answers numbers of kinds: FOLDER/case.onnx is a damaged file of that kind
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort

from fuzz import workers


def answers(
    path: Path, library: str, names: list[str], feed: dict[str, np.ndarray]
) -> list[np.ndarray] | str:
    """What the file says, or where it was refused."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    if library:
        options.register_custom_ops_library(library)
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception:
        return "refused at load"
    try:
        return session.run(names, feed)
    except Exception:
        return "refused at run"


def _rows(array: np.ndarray, count: int) -> np.ndarray | None:
    return array.reshape(count, -1) if array.ndim and array.size and array.shape[0] == count else None


def _sound(rows: np.ndarray) -> np.ndarray:
    return (np.isfinite(rows) & (rows >= 0)).all(axis=1)


def judged(found: list[np.ndarray], kind: dict[str, list[str]], expected: dict[str, np.ndarray]) -> str:
    """How the answers compare with those of the file as it was written."""
    if all(
        a.dtype == e.dtype and a.shape == e.shape and a.tobytes() == e.tobytes()
        for a, e in zip(found, expected.values())
    ):
        return "same"
    by_name = dict(zip(expected, found))
    flags = by_name[kind["ood"][0]]
    count = len(expected[kind["ood"][0]])
    if flags.dtype != np.bool_ or flags.shape[:1] != (count,):
        return "another form"
    flagged = flags.reshape(count, -1).any(axis=1)
    unsound, changed = np.zeros(count, bool), np.zeros(count, bool)
    for name, array in by_name.items():
        rows, before = _rows(array, count), _rows(expected[name], count)
        if rows is None or before is None or rows.shape != before.shape:
            return "another form"
        if name in kind["variances"]:
            unsound |= ~_sound(rows) & _sound(before)
        if name != kind["ood"][0]:
            changed |= ~((rows == before) | ((rows != rows) & (before != before))).all(axis=1)
    if (unsound & ~flagged).any():
        return "unsound, not flagged"
    if unsound.any():
        return "unsound, flagged"
    return "flagged" if flagged[changed].all() and changed.any() else "different"


def main(arguments: list[str]) -> None:
    folder, library = Path(arguments[0]), arguments[1]
    kinds = json.loads((folder / "kinds.json").read_text())
    expected: dict[int, dict[str, np.ndarray]] = {}
    feeds = []
    for number, kind in enumerate(kinds):
        with np.load(folder / kind["feed"]) as feed:
            feeds.append(dict(feed))
        said = answers(folder / kind["file"], library, kind["outputs"], feeds[number])
        assert not isinstance(said, str), f"{kind['file']}: {said}"
        expected[number] = dict(zip(kind["outputs"], said))

    def case(number: int) -> str:
        found = answers(folder / "case.onnx", library, kinds[number]["outputs"], feeds[number])
        return found if isinstance(found, str) else judged(found, kinds[number], expected[number])

    workers.serve(case)


if __name__ == "__main__":
    main(sys.argv[1:])

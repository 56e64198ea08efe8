"""Whether converted decoders answer as their sources, bit for bit: at once, and token by token.

    python benchmarks/paper/language/equality.py [--cache DIR] [--only plain cached gqa int4] [--tokens N] [--data DIR] [--fresh]

Each form of `exports.py` is converted with the defaults on so many tokens of text, to FORM/converted.onnx in the cache. Then
source and file read held-out text at once, and go on greedily, each by its own answers; every output of the source is
compared at every step. Prints one line a form, exits with 1 where a bit differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[2] / "tests")]

import numpy as np  # noqa: E402
import onnxruntime as ort  # noqa: E402
import packages  # noqa: E402
from backbones import DATA  # noqa: E402

import gapa_onnx  # noqa: E402
from gapa_onnx import TextOptions  # noqa: E402
from gapa_onnx.sessions.runtime import session, session_options  # noqa: E402
from language.decoding import answered, prefill, step  # noqa: E402
from language.exports import FORMS  # noqa: E402
from language.texts import CALIBRATION, FILES, HELDOUT, sequences  # noqa: E402

TOKENS = 12_000
ROWS, STEPS = 2, 8
CONVERTED = "converted.onnx"


def converted(folder: Path, tokens: int, data: Path, tokenizer: Path, fresh: bool) -> Path:
    """The converted file of one form, beside the source; made where it is not there yet."""
    path = folder / CONVERTED
    if fresh or not path.exists():
        text = TextOptions(tokenizer, tokens=tokens)
        gapa_onnx.convert(folder / "model.onnx", data / "text" / FILES[CALIBRATION], path, text=text)
    return path


def differing(source: Any, file: Any, fed: dict[str, np.ndarray], steps: int = STEPS) -> list[str]:
    """The outputs of the source that are not the same, with the step; [] where all are. Both are `fed` a text at first."""
    found, feeds = [], [fed, fed]
    for number in range(steps + 1):
        ours, theirs = (answered(one, given) for one, given in zip((source, file), feeds))
        found += [f"{name} at step {number}" for name in ours if not _same(ours[name], theirs[name])]
        following = [one["logits"][:, -1].argmax(axis=-1)[:, None] for one in (ours, theirs)]
        feeds = [step(before, said, token) for before, said, token in zip(feeds, (ours, theirs), following)]
    return found


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=packages.cache_folder("language"))
    parser.add_argument("--only", nargs="+", choices=FORMS, default=FORMS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--fresh", action="store_true")
    given = parser.parse_args()
    tokenizer = given.cache / "checkpoint" / "tokenizer.json"
    ids = sequences(HELDOUT, tokenizer, ROWS, given.data).ids
    failed = False
    for form in given.only:
        folder = given.cache / form
        path = converted(folder, given.tokens, given.data, tokenizer, given.fresh)
        options = session_options(threads=1)
        source = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        found = differing(
            source, session(path, session_options(threads=1)), prefill(folder / "model.onnx", ids)
        )
        told = (
            f"{len(found)} differ: {', '.join(found[:5])}"
            if found
            else "every bit of every output is the same"
        )
        outputs = len(source.get_outputs())
        print(
            f"{form}: {outputs} outputs, {ids.shape[1]} tokens at once and {STEPS} more one by one: {told}",
            flush=True,
        )
        failed = failed or bool(found)
    sys.exit(failed)


if __name__ == "__main__":
    main()

"""The tool as it is: the model converted with its defaults on the calibration text, and what the file says of each set.

FOLDER/default.gapa.onnx                the converted file
FOLDER/set/tool/logits_score.npy …      what it puts out for each token (n, t), and for each sequence (n,)
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lines import say

import gapa_onnx
from gapa_onnx import TextOptions
from gapa_onnx.sessions.runtime import session, session_options
from language.dump import LOGITS, Dump

TOKENS = ("entropy", "epistemic", "score", "pvalue")
SEQUENCES = ("seq_score", "seq_ood", "seq_pvalue")
CALIBRATION_TOKENS = 200_000
BATCH = 8
KEPT = 64  # sequences that are read between two times of keeping the answers
FILE = "default.gapa.onnx"


def converted(model: Path, data: Any, dump: Dump, tokenizer: Path | None, **settings: Any) -> Path:
    """The converted file; made where it is not there yet, with what it took beside it."""
    path = dump.folder / FILE
    if not path.exists():
        text = TextOptions(tokenizer, tokens=CALIBRATION_TOKENS) if tokenizer else None
        start, worked = time.monotonic(), time.process_time()
        result = gapa_onnx.convert(model, data, path, text=text, **settings)
        took = {"seconds": time.monotonic() - start, "cpu": time.process_time() - worked}
        failed = [f"{check.name}: {check.detail}" for check in result.checks if not check.passed]
        (dump.folder / "default.json").write_text(json.dumps({**took, "failed": failed}))
        if failed:
            raise SystemExit("\n".join(failed))
    return path


def read(path: Path, dump: Dump, sets: Sequence[str], threads: int) -> None:
    """Run the file over sets, as far as that was not done."""
    opened = None
    for of in sets:
        folder, ids = dump.folder / of / "tool", dump.array(of, "ids")
        folder.mkdir(exist_ok=True)
        while (done := _done(folder)) < dump.done(of):
            opened = opened or session(path, session_options(threads=threads))
            given = {output.name for output in opened.get_outputs()}
            names = [f"{LOGITS}_{role}" for role in (*TOKENS, *SEQUENCES) if f"{LOGITS}_{role}" in given]
            parts = []
            for start in range(done, min(done + KEPT, dump.done(of)), BATCH):
                rows = np.asarray(ids[start : min(start + BATCH, dump.done(of))])
                parts.append(opened.run(names, {"input_ids": rows, "attention_mask": np.ones_like(rows)}))
            for at, name in enumerate(names):
                held, new = folder / f"{name}.npy", np.concatenate([part[at] for part in parts])
                np.save(held, np.concatenate([np.load(held), new]) if done else new)
            (folder / "done.json").write_text(json.dumps(_rows(parts, done)))
            say(f"{of}: {_done(folder)} of {dump.done(of)} sequences through the converted file")


def _done(folder: Path) -> int:
    """How many sequences were read."""
    path = folder / "done.json"
    return int(json.loads(path.read_text())) if path.exists() else 0


def _rows(parts: Sequence[Sequence[np.ndarray]], before: int) -> int:
    return before + sum(len(part[0]) for part in parts)


def said(dump: Dump, of: str, role: str) -> np.ndarray | None:
    """What the file put out for a set under a role; None where it has no such output."""
    path = dump.folder / of / "tool" / f"{LOGITS}_{role}.npy"
    return np.load(path)[: _done(path.parent)] if path.exists() else None

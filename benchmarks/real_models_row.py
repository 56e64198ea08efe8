"""One row of the table of real models: a model converted as a user would, and what comes out, measured.

    python benchmarks/real_models_row.py KIND NAME OUT.json [--quick]

What is covered is read from the converted model's answers on held-out rows, never from what its record says:
an element of an output counts where it varies over the rows, and is covered where its variance is above 0 on some row.
"""

from __future__ import annotations

import json
import re
import resource
import sys
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

ROOT = Path(__file__).resolve().parents[1]
ZOO = ROOT.parent / "shared" / "zoo"
sys.path.insert(0, str(ROOT))

from real_models_data import Batch, Sets, sets  # noqa: E402

from gapa_onnx import UserError, convert, record, session  # noqa: E402
from gapa_onnx.measure.coverage import NAME as COVERAGE  # noqa: E402

FEW_ROWS = 100
Row = dict[str, Any]
Answers = list[dict[str, Any]]


def main() -> None:
    kind, name, out = sys.argv[1:4]
    ort.set_default_logger_severity(4)
    row: Row = {"kind": kind, "model": name}
    try:
        row |= measured(kind, name, "--quick" in sys.argv)
    except UserError as refusal:
        row |= {"state": "refused", "says": [sentence(refusal)]}
    except Exception as error:
        row |= {"state": "TRACEBACK", "says": [f"{type(error).__name__}: {error}"], "trace": _trace(error)}
    row["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    Path(out).write_text(json.dumps(row))


def measured(kind: str, name: str, quick: bool) -> Row:
    try:
        source, proto, rows = _model(kind, name, quick)
        asked = _answers(proto.SerializeToString(), rows.held_out, library=False)
    except UserError:
        raise
    except Exception as error:  # of onnxruntime, or of a training: not ours
        return {"state": "does not run", "says": [f"not converted: {_first_line(error)}"]}
    row: Row = {
        "data": rows.kind,
        "rows": _count(rows.calibration, rows.free),
        "nodes": len(proto.graph.node),
    }
    row |= _neighbours(rows)
    start = time.process_time()
    try:
        conversion = convert(source, rows.calibration, **_neighbours(rows))
    except UserError as refusal:
        return row | {"state": "refused", "says": [sentence(refusal)], "seconds": _since(start)}
    except Exception as error:
        text = f"{type(error).__name__}: {_first_line(error)}"
        return row | {"state": "TRACEBACK", "says": [text], "trace": _trace(error), "seconds": _since(start)}
    row |= {"seconds": _since(start)}
    try:
        return row | outcome(conversion, proto, asked, rows)
    except Exception as error:
        text = f"running it: {type(error).__name__}: {_first_line(error)}"
        return row | {"state": "TRACEBACK", "says": [text], "trace": _trace(error)}


def _neighbours(rows: Sets) -> dict[str, int]:
    """The default, but where so few rows of a large input are used that there would not be enough neighbours."""
    count = _count(rows.calibration, rows.free)
    return {} if count >= FEW_ROWS else {"k": max(count // 3, 2)}


def _model(kind: str, name: str, quick: bool) -> tuple[Any, onnx.ModelProto, Sets]:
    """What is converted, the model itself, and its rows."""
    if kind == "scikit-learn":
        import estimators

        proto, rows = estimators.export(name)
        return proto, proto, rows
    if kind == "example":
        return _example(name)
    path = ZOO / f"{name}.onnx" if kind == "zoo" else Path(name)
    proto = onnx.load(path)
    return path, proto, sets(path.stem, proto, quick)


def _example(name: str) -> tuple[Any, onnx.ModelProto, Sets]:
    """A model of models/, with the rows that lie beside it."""
    path = ROOT / "models" / f"{name}.onnx"
    proto = onnx.load(path)
    inputs = [entry.name for entry in proto.graph.input]

    def rows(what: str) -> list[Batch]:
        with np.load(path.with_name(f"{name}_{what}.npz")) as file:
            return [{key: file[key][:256] for key in inputs}]

    strange = [file.stem.removeprefix(f"{name}_") for file in sorted(path.parent.glob(f"{name}_*.npz"))]
    unlike = {what: rows(what) for what in strange if what not in ("calibration", "heldout")}
    return path, proto, Sets("its own", True, rows("calibration"), rows("heldout"), unlike)


# ----------------------------------------------------------------------- the outcome


def outcome(conversion: Any, proto: onnx.ModelProto, asked: Answers, rows: Sets) -> Row:
    found = record.require(conversion.model, "the model")
    converted = conversion.model.SerializeToString()
    known = _answers(converted, rows.held_out)
    heads = dict(found.heads)
    cover = {
        output.name: _covered(output.name, heads, known, rows)
        for output in proto.graph.output
        if _varies([answer[output.name] for answer in asked])
    }
    says = announced(conversion, heads)
    open_parts = [name for name, part in cover.items() if part["share"] < 1 and not part["score_only"]]
    silent = [name for name in open_parts if not any(name in text for text in says)]
    unequal = [n for n in asked[0] if not all(_same(a[n], k[n]) for a, k in zip(asked, known))]
    return {
        "state": _state(conversion, heads, cover, open_parts, silent, unequal),
        "says": says + [f"{name} differs from the source's" for name in unequal],
        "silent": silent,
        "tasks": {output: head.task for output, head in heads.items()},
        "sites": [
            {
                "name": site.name,
                "layout": site.layout,
                "axis": getattr(site, "axis", None),
                "width": site.width,
            }
            for site in found.sites
        ],
        "cover": cover,
        "auroc": _aurocs(converted, heads, known, rows),
    }


def announced(conversion: Any, heads: Mapping[str, Any]) -> list[str]:
    """What a user is told about what has no variance: by `convert` itself, one sentence each."""
    says = [f"{name}: no site reaches it, so it gets no variance" for name in conversion.plan.certain_outputs]
    says += [f"{check.name}: {check.detail}" for check in conversion.checks if not check.passed]
    for output, head in heads.items():
        uncovered = getattr(head, "uncovered", None)
        if uncovered:
            says.append(f"{output}: recorded as not covered: {uncovered}")
        if "var" not in head.outputs:
            says.append(f"{output}: {head.reason}")
    if conversion.plan.refused:
        says.append(f"the variance is cut at {len(conversion.plan.refused)} node(s) without a rule")
    return list(dict.fromkeys(says))


def _state(
    conversion: Any,
    heads: Mapping[str, Any],
    cover: Mapping[str, Row],
    open_parts: list[str],
    silent: list[str],
    unequal: list[str],
) -> str:
    if unequal:
        return "NOT BIT-EQUAL"
    if silent:
        return "uncovered, NOT SAID"
    if not all(check.passed for check in conversion.checks if check.name != COVERAGE):
        return "CHECK FAILED"
    if open_parts:
        return "uncovered, said"
    if any(part["share"] == 1 for part in cover.values()):
        return "covered"
    scored = any("score" in head.outputs for head in heads.values())
    return "score only" if scored else "nothing varies"


def _covered(output: str, heads: Mapping[str, Any], answers: Answers, rows: Sets) -> Row:
    """Which part of an output that varies has a variance above 0."""
    head = heads.get(output)
    roles = {} if head is None else head.outputs
    means = _stacked([_numbers(answer[output]) for answer in answers], rows)
    varying = np.ptp(np.nan_to_num(means), axis=0) > 0
    if head is not None and head.link != "identity" and head.logits != output and (means >= 0).all():
        varying &= ((means > 1e-18) & (means < 1 - 3e-7)).any(axis=0)  # else no slope is a number
    if "var" not in roles:
        return {"share": 0.0, "elements": int(varying.sum()), "score_only": "score" in roles}
    var = _stacked([_numbers(answer[roles["var"]]) for answer in answers], rows)
    if var.shape != means.shape:  # of the candidates only, or of a map's numbers in another order
        varying = np.ones(var.shape[1:], bool)
    above = (var > 0)[:, varying]
    return {
        "share": float(above.any(axis=0).mean()) if varying.any() else 1.0,
        "every_row": float(above.mean()) if varying.any() else 1.0,
        "elements": int(varying.sum()),
        "score_only": False,
    }


def _varies(values: Sequence[Any]) -> bool:
    """Whether an output holds numbers that are not the same for all rows."""
    arrays = [_numbers(value) for value in values]
    if any(array is None or not array.size for array in arrays):
        return False
    if any(array.shape != arrays[0].shape for array in arrays):
        return True
    if len(arrays) > 1 and any((array != arrays[0]).any() for array in arrays[1:]):
        return True
    return bool(arrays[0].ndim and (np.ptp(np.nan_to_num(arrays[0]), axis=0) > 0).any())


def _numbers(value: Any) -> Any:
    """A float array of an output; None where it holds whole numbers or words."""
    if isinstance(value, list) and value and isinstance(value[0], dict):  # ZipMap
        value = np.array([list(entry.values()) for entry in value])
    elif isinstance(value, list):
        value = np.concatenate([np.ravel(part) for part in value]) if value else np.zeros(0)
    return value if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.floating) else None


def _stacked(arrays: Sequence[np.ndarray], rows: Sets) -> np.ndarray:
    """All rows under each other: batches of free rows end to end, others as one row each; unlike shapes as elements."""
    if rows.free and all(a.ndim and len(a) == _size(b) for a, b in zip(arrays, rows.held_out)):
        if len({array.shape[1:] for array in arrays}) == 1:
            return np.concatenate(arrays)
    if len({array.shape for array in arrays}) == 1:
        return np.stack(arrays)
    return np.concatenate([array.ravel() for array in arrays])[:, None]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == object and a.tolist() == b.tolist() or a.tobytes() == b.tobytes()
    return bool(a == b) if not isinstance(a, list) else all(map(_same, a, b))


# ------------------------------------------------------------------------- the score


def _aurocs(
    converted: bytes, heads: Mapping[str, Any], known: Answers, rows: Sets
) -> dict[str, float | None]:
    """Of the score, held-out rows against each strange set; with several outputs the mean of theirs."""
    scores = [head.outputs["score"] for head in heads.values() if "score" in head.outputs]
    found: dict[str, float | None] = {}
    for what, batches in rows.strange.items():
        strange = _answers(converted, batches)
        areas = [auroc(_scores(known, name, rows), _scores(strange, name, rows)) for name in scores]
        found[what] = round(float(np.mean(areas)), 3) if areas else None
    return found


def _scores(answers: Answers, name: str, rows: Sets) -> np.ndarray:
    """One number a row, where the score has its rows; else one a batch. What is no number is strange."""
    found = []
    for answer in answers:
        score = np.nan_to_num(np.asarray(answer[name], np.float64), nan=np.inf)
        per_row = rows.free and score.ndim and len(score) > 1
        found.append(score.reshape(len(score), -1).mean(axis=1) if per_row else [score.mean()])
    return np.concatenate(found)


def auroc(known: np.ndarray, strange: np.ndarray) -> float:
    """The chance that a strange row scores higher than a known one; ties count half."""
    above = (strange[:, None] > known[None]).mean()
    return float(above + 0.5 * (strange[:, None] == known[None]).mean())


# ------------------------------------------------------------------------- sessions


def _answers(model: bytes, batches: Iterable[Batch], library: bool = True) -> Answers:
    running = _session(model, library)
    names = [output.name for output in running.get_outputs()]
    return [dict(zip(names, running.run(None, batch))) for batch in batches]


def _session(model: bytes, library: bool) -> ort.InferenceSession:
    ort.set_seed(0)  # some policies draw their actions at random
    options = ort.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    if library:
        return session(model, options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _count(batches: Sequence[Batch], free: bool) -> int:
    return sum(_size(batch) for batch in batches) if free else len(batches)


def _size(batch: Batch) -> int:
    return max((len(array) for array in batch.values() if np.ndim(array)), default=1)


def _since(start: float) -> float:
    return round(time.process_time() - start, 1)


def sentence(refusal: UserError) -> str:
    """In one line, and without the folders of this machine."""
    return re.sub(r"\S*/(?=[^/\s]+\.onnx)", "", " ".join(refusal.message.split()))


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _trace(error: Exception) -> str:
    return "".join(traceback.format_exception(error))[-3000:]


if __name__ == "__main__":
    main()

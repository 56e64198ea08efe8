"""The same numbers before and after a change of structure: files that two checkouts of this project convert.

    python benchmarks/same_numbers.py OLD NEW [--quick]

OLD and NEW are checkouts (each with cli/ reachable as gapa_onnx/cli, or installed beside). Models: models/, every
model of ../shared/zoo that is there, 50 random graphs. For each of them

    source     the source's outputs are the same bits in both files
    template   the new template with τ, A and thresholds of the old file answers as that file does:
               |new − old| ≤ 1e-5 |old| + 1e-6 · the largest of the output
    fitted     τ of each site as the new checkout finds it, over the old one's
    AUROC      of the score on held-out digits against strange ones, old and new

Writes benchmarks/results/same_numbers.json. OLD is a commit before `gapa_onnx/record.py` held a typed record.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
SETTINGS = {"m": 12, "k": 4}
STRANGE = ("noise", "rotated", "shuffled")


# ------------------------------------------------------------------- the models


def cases(folder: Path, quick: bool) -> None:
    """Write what both checkouts convert: models, calibration batches, batches to answer, settings."""
    sys.path.insert(0, str(ROOT / "tests"))
    from support import zoo

    from gapa_onnx.model.load import load

    found: list[dict[str, Any]] = []
    for name in ("digits_mlp", "digits_cnn", "diabetes_mlp"):
        rows = dict(np.load(ROOT / "models" / f"{name}_calibration.npz"))
        known = dict(np.load(ROOT / "models" / f"{name}_heldout.npz"))
        inputs = [spec.name for spec in load(ROOT / "models" / f"{name}.onnx").inputs]
        data = [{key: rows[key] for key in inputs}]
        asked = [{key: known[key] for key in inputs}]
        found.append(case(name, ROOT / "models" / f"{name}.onnx", data, asked, {}))
    for name in zoo.names()[: 10 if quick else None]:
        source = load(zoo.FOLDER / name)
        rows = 4 if zoo.free_batch(source) else 1
        count = 6 if any(part in name for part in zoo.SLOW) else 12
        data = [zoo.feeds(source, rows, seed) for seed in range(count)]
        found.append(case(name, zoo.FOLDER / name, data, [zoo.feeds(source, rows, 99)], SETTINGS))
    found += random_cases(folder, 5 if quick else 50)
    (folder / "cases.pickle").write_bytes(pickle.dumps(found))


def case(name: str, path: Path, data: list, asked: list, settings: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "path": str(path), "data": data, "asked": asked, "settings": settings}


def random_cases(folder: Path, count: int) -> list[dict[str, Any]]:
    """Random graphs whose uncertain inputs are sites, fed with their own inputs and noise."""
    import onnx
    from hypothesis import HealthCheck, given, seed, settings
    from support import random_operators  # noqa: F401  fills the palette
    from support.random_graphs import RandomGraph, random_graphs

    graphs: list[RandomGraph] = []

    @seed(0)
    @settings(max_examples=12 * count, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(random_graphs())
    def draw(graph: RandomGraph) -> None:
        graphs.append(graph)

    draw()
    made, generator = [], np.random.default_rng(0)
    for number, graph in enumerate(graphs):
        sites = [name for name in graph.uncertain if graph.tensors[name].mean.ndim]
        rows = {graph.tensors[name].mean.shape[:1] for name in graph.inputs}
        # calibration data have as many rows in every input
        if not sites or len(rows) > 1 or len(made) == count:
            continue
        path = folder / f"random_{number}.onnx"
        onnx.save(graph.model(np.float32), path)
        feeds = graph.feeds(np.float32)

        def noisy(feeds: dict = feeds) -> dict:
            return {
                key: (array + 0.3 * generator.normal(size=array.shape)).astype(np.float32)
                for key, array in feeds.items()
            }

        data, asked = [noisy() for _ in range(30)], [feeds, noisy()]
        made.append(
            case(path.stem, path, data, asked, {**SETTINGS, "sites": ",".join(sites), "task": "none"})
        )
    return made


# ----------------------------------------------------------------- each checkout


def answers(model: Any, batches: list[dict]) -> list[dict[str, Any]]:
    """All outputs for each batch; without optimisation, so that both graphs compute their nodes as they stand."""
    import onnxruntime as ort

    from gapa_onnx import library_path

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    options.register_custom_ops_library(str(library_path()))
    ort.set_seed(0)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_outputs()]
    return [dict(zip(names, session.run(names, batch))) for batch in batches]


def strange(one: dict[str, Any]) -> list[dict]:
    paths = [ROOT / "models" / f"{one['name']}_{kind}.npz" for kind in STRANGE]
    return [{key: dict(np.load(path))[key] for key in one["asked"][0]} for path in paths if path.exists()]


def old(folder: Path) -> None:
    """Convert with the old checkout: what the files answer, and their numbers."""
    from gapa_onnx import provenance
    from gapa_onnx.compiler import convert
    from gapa_onnx.errors import UserError

    found: dict[str, Any] = {}
    for one in pickle.loads((folder / "cases.pickle").read_bytes()):
        try:
            done = convert(one["path"], calibration(one), **one["settings"])
        except UserError as error:
            found[one["name"]] = {"refused": error.message}
            continue
        heads = provenance.read(done.model)["heads"]
        found[one["name"]] = {
            "numbers": {fit.site.output: (fit.scale, fit.ceiling) for fit in done.calibration.fits},
            "thresholds": {
                name: head["score"]["threshold"] for name, head in heads.items() if "score" in head
            },
            "answers": answers(done.model, one["asked"] + strange(one)),
        }
    (folder / "old.pickle").write_bytes(pickle.dumps(found))


def new(folder: Path) -> None:
    """Convert with the new checkout, once with the old file's numbers and once with its own."""
    from dataclasses import replace

    from gapa_onnx.data import open_data
    from gapa_onnx.emit.emit import emit
    from gapa_onnx.emit.rewrite import rewrite
    from gapa_onnx.errors import UserError
    from gapa_onnx.fit.calibrate import calibrate
    from gapa_onnx.model.load import load
    from gapa_onnx.plan.analyse import analyse, require_convertible
    from gapa_onnx.settings import Settings
    from gapa_onnx.settle.settle import settle

    before, found = pickle.loads((folder / "old.pickle").read_bytes()), {}
    for one in pickle.loads((folder / "cases.pickle").read_bytes()):
        settings = Settings(**one["settings"])
        try:
            source = load(one["path"])
            plan = analyse(source, settings)
            require_convertible(plan, settings)
            data = open_data(calibration(one), source.inputs)
            fitted = calibrate(plan, data, settings)
            template = rewrite(plan, fitted, settings)
            own = settle(template, fitted, settings)
        except UserError as error:
            found[one["name"]] = {"refused": error.message}
            continue
        entry = {
            "numbers": {fit.site.output: (fit.scale, fit.ceiling) for fit in own.fits},
            "fitted": answers(emit(template, own, fitted, settings), one["asked"] + strange(one)),
        }
        known = before.get(one["name"], {})
        if "numbers" in known:
            given = {name: dict(zip(("scale", "ceiling"), pair)) for name, pair in known["numbers"].items()}
            fits = tuple(replace(fit, **given[fit.site.output]) for fit in own.fits)
            scores = {
                name: replace(score, threshold=known["thresholds"][name])
                for name, score in own.scores.items()
            }
            model = emit(template, replace(own, fits=fits, scores=scores), fitted, settings)
            entry["answers"] = answers(model, one["asked"] + strange(one))
        found[one["name"]] = entry
    (folder / "new.pickle").write_bytes(pickle.dumps(found))


def calibration(one: dict[str, Any]) -> Any:
    return one["data"][0] if len(one["data"]) == 1 else one["data"]


# ------------------------------------------------------------------- comparison


def compared(folder: Path) -> dict[str, Any]:
    before, after = (pickle.loads((folder / f"{name}.pickle").read_bytes()) for name in ("old", "new"))
    every = pickle.loads((folder / "cases.pickle").read_bytes())
    rows = [row(one, before[one["name"]], after[one["name"]]) for one in every]
    converted = [one for one in rows if "worst" in one]
    ratios = np.array([ratio for one in converted for ratio in one["tau_ratios"]])
    return {
        "models": len(rows),
        "refused by both": sum("refused" in one for one in rows),
        "otherwise than before": [one["model"] for one in rows if "changed" in one],
        "converted": len(converted),
        "source outputs not bit-equal": [one["model"] for one in converted if not one["source_same"]],
        "beyond the tolerance": [one["model"] for one in converted if one["worst"] > 1],
        "largest difference over its tolerance": max(one["worst"] for one in converted),
        "sites": len(ratios),
        "tau off by more than 10%": int((np.abs(ratios - 1) > 0.1).sum()),
        "largest tau ratio": float(max(ratios.max(), 1 / ratios.min())),
        "auroc": {one["model"]: one["auroc"] for one in converted if one.get("auroc")},
        "rows": rows,
    }


def row(one: dict[str, Any], before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    name = Path(one["path"]).stem
    if ("refused" in before) != ("refused" in after):
        return {"model": name, "changed": before.get("refused") or after.get("refused")}
    if "refused" in before:
        return {"model": name, "refused": before["refused"].splitlines()[0].replace(one["path"], name)}
    added = set().union(*({key for key in entry} for entry in before["answers"]))
    sources = source_outputs(one["path"])
    same, worst = True, 0.0
    for left, right in zip(before["answers"], after["answers"]):
        for key in sorted(added):
            if key in sources:
                same &= equal(left[key], right[key])
            else:
                worst = max(worst, distance(left[key], right[key]))
    ratios = [after["numbers"][site][0] / scale for site, (scale, _) in before["numbers"].items()]
    return {
        "model": name,
        "source_same": bool(same),
        "worst": worst,
        "tau_ratios": ratios,
        "auroc": aurocs(before["answers"], after["fitted"]) if len(before["answers"]) > 2 else {},
    }


def source_outputs(path: str) -> set[str]:
    import onnx

    return {value.name for value in onnx.load(path, load_external_data=False).graph.output}


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return repr(a) == repr(b)


def distance(a: Any, b: Any) -> float:
    """The largest difference in units of the tolerance; that of flags is 0 where at most one element differs."""
    if isinstance(a, list):
        return max((distance(x, y) for x, y in zip(a, b)), default=0.0)
    if a.shape != b.shape or (np.isnan(a.astype(np.float64)) != np.isnan(b.astype(np.float64))).any():
        return float("inf")
    if a.dtype.kind in "biu":
        return 0.0 if (a != b).sum() <= max(1, a.size // 1000) else float("inf")
    a, b = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(a) & np.isfinite(b)
    if not finite.any():
        return 0.0
    tolerance = 1e-5 * np.abs(a[finite]) + 1e-6 * np.abs(a[finite]).max()
    return float((np.abs(a - b)[finite] / np.maximum(tolerance, np.finfo(np.float64).tiny)).max())


def aurocs(before: list[dict], after: list[dict]) -> dict[str, list[float]]:
    """Of each score on known rows (the first batch) against strange ones: old, new."""
    names = [key for key in before[0] if key.endswith("_score")]
    return {
        f"{name} {number}": [
            round(auroc(found[0][name], found[number][name]), 5) for found in (before, after)
        ]
        for name in names
        for number in range(1, len(before))
    }


def auroc(known: np.ndarray, other: np.ndarray) -> float:
    ranks = np.concatenate([known, other]).argsort(kind="stable").argsort() + 1
    high = ranks[len(known) :].sum() - len(other) * (len(other) + 1) / 2
    return float(high / (len(known) * len(other)))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--quick", action="store_true", help="ten models of the zoo, five random graphs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for step, checkout in (("cases", options.new), ("old", options.old), ("new", options.new)):
            call = f"from same_numbers import *; {step}(Path({scratch!r}){', ' + str(options.quick) if step == 'cases' else ''})"
            places = os.pathsep.join([str(checkout.resolve()), str(Path(__file__).parent)])
            environment = {**os.environ, "PYTHONPATH": places}
            subprocess.run(
                [sys.executable, "-W", "ignore", "-c", call], env=environment, cwd=scratch, check=True
            )
        found = compared(Path(scratch))
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "same_numbers.json").write_text(json.dumps(found, indent=1) + "\n")
    print(json.dumps({name: value for name, value in found.items() if name != "rows"}, indent=1))
    good = not (
        found["source outputs not bit-equal"]
        or found["beyond the tolerance"]
        or found["otherwise than before"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

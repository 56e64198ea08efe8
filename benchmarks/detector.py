"""A detector that people use, on photographs: can strange images be told, and what does it cost?

    python benchmarks/detector.py [--quick] [--candidates 300] [--metric auto]

nudenet's 320n (YOLOv8n, from PyPI) is calibrated on the training photographs of Oxford-IIIT Pet and asked about the test
photographs, noise, and the test photographs with their tiles shuffled. Needs ../shared/data and pillow; says what is
missing. Results go to results/detector.json; `--quick` takes a few photographs, measures no cost and writes nothing.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import packages

import gapa_onnx
from gapa_onnx.measure.bench import measure

HERE = Path(__file__).resolve().parent
PETS = HERE.parents[1] / "shared" / "data" / "pets128.tar"
RESULT = HERE / "results" / "detector.json"
SIDE = 320
TILES = (8, 4)  # along each side
QUICK = {"trainval": 30, "test": 16}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--candidates", type=int, default=300)
    parser.add_argument("--metric", default="auto")
    options = parser.parse_args()
    if not PETS.exists():
        print("skipped: there is no ../shared/data/pets128.tar")
        return 0
    try:
        package = next(entry for entry in packages.PACKAGES if entry.name == "nudenet")
        source = packages.fetch(package, packages.cache_folder())
    except packages.Missing as reason:
        print(f"skipped: {reason}")
        return 0
    with tempfile.TemporaryDirectory() as folder:
        found = _measured(source, Path(folder) / "detector.onnx", options)
    print(json.dumps(found, indent=1))
    if not options.quick:
        RESULT.write_text(json.dumps(found, indent=1) + "\n")
    return 0


def _measured(source: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    known, new = (_photographs(part, QUICK[part] if options.quick else None) for part in QUICK)
    start = time.process_time()
    calib = [{"images": _pixels(picture)} for picture in known]
    conversion = gapa_onnx.convert(source, calib, out, candidates=options.candidates, metric=options.metric)
    seconds = time.process_time() - start
    failed = [check.name for check in conversion.checks if not check.passed]
    rng = np.random.default_rng(1)
    session = gapa_onnx.session(out)
    ordinary = _answers(session, map(_pixels, new))
    found: dict[str, Any] = {
        "calibration photographs": len(known),
        "test photographs": len(new),
        "failed checks": failed,
        "images flagged": float(ordinary["image_ood"].mean()),
        "candidates flagged": float(ordinary["ood"].mean()),
        "smallest class variance": float(ordinary["class_var"].min()),
        "CPU seconds of the conversion": round(seconds, 1),
    }
    strange = {
        "noise": (rng.random((1, 3, SIDE, SIDE)).astype(np.float32) for _ in new),
        **{f"tiles {n} x {n}": _all_shuffled(new, n, rng) for n in TILES},
    }
    for name, pictures in strange.items():
        answers = _answers(session, pictures)
        found[f"AUROC, {name}"] = round(_auroc(ordinary["image_score"], answers["image_score"]), 4)
        found[f"images flagged, {name}"] = float(answers["image_ood"].mean())
    if not options.quick:
        found["cost"] = [_cost(source, out, new, batch) for batch in (1, 4)]
    return found


def _cost(source: Path, out: Path, new: list[bytes], batch: int) -> dict[str, float]:
    rows = np.concatenate([_pixels(picture) for picture in new[:batch]])
    cost = measure(source, out, batch=batch, data={"images": rows})
    return {
        "batch": batch,
        "ratio": round(cost.comparison.ratio, 3),
        "control": round(cost.comparison.control, 3),
    }


def _photographs(part: str, most: int | None) -> list[bytes]:
    with tarfile.open(PETS) as archive:
        names = archive.extractfile(f"./{part}.txt").read().decode().split()[:most]  # type: ignore[union-attr]
        return [archive.extractfile(f"./images/{name}.jpg").read() for name in names]  # type: ignore[union-attr]


def _pixels(picture: bytes) -> np.ndarray:
    from PIL import Image

    image = Image.open(io.BytesIO(picture)).convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR)
    return np.asarray(image, np.float32).transpose(2, 0, 1)[None] / 255


def _shuffled(pixels: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    side = SIDE // count
    tiles = pixels.reshape(3, count, side, count, side).transpose(1, 3, 0, 2, 4).reshape(-1, 3, side, side)
    mixed = tiles[rng.permutation(count * count)].reshape(count, count, 3, side, side)
    return np.ascontiguousarray(mixed.transpose(2, 0, 3, 1, 4).reshape(1, 3, SIDE, SIDE))


def _all_shuffled(pictures: list[bytes], count: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    for picture in pictures:
        yield _shuffled(_pixels(picture), count, rng)


def _answers(session: Any, pictures: Iterable[np.ndarray]) -> dict[str, np.ndarray]:
    roles = ("image_score", "image_ood", "ood", "class_var")
    wanted = [f"output0_{role}" for role in roles]

    def rows() -> Iterator[list[np.ndarray]]:
        for pixels in pictures:
            yield session.run(wanted, {"images": pixels})

    return dict(zip(roles, map(np.concatenate, zip(*rows()))))


def _auroc(ordinary: np.ndarray, strange: np.ndarray) -> float:
    """The share of pairs in which the strange one has the larger score."""
    larger = (strange[:, None] > ordinary).mean() + (strange[:, None] == ordinary).mean() / 2
    return float(larger)


if __name__ == "__main__":
    sys.exit(main())

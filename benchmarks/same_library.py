"""Whether two builds of the native library answer alike: bits on one machine, digits on two kinds of CPU.

    python benchmarks/same_library.py files FOLDER                  convert models/ with every kind of index
    python benchmarks/same_library.py answers FOLDER LIBRARY OUT    run them; needs numpy and onnxruntime only
    python benchmarks/same_library.py compare ONE OTHER             exit code 1 unless all bits are equal

`answers` runs where the library does: under an emulator, in another system's root, from any Python 3.8 on.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

MODELS = Path(__file__).resolve().parents[1] / "models"
KINDS = ("flat", "ivf", "ivfpq", "hnsw", "local")
M, K = 300, 20
INPUTS = {"digits_mlp": "pixels", "diabetes_mlp": "features"}
ROWS_AT_A_TIME = (1, 7, 64)


def files(folder: Path) -> None:
    """A file of every kind for each model, and rows to ask: held-out ones, and the same far away."""
    import gapa_onnx

    folder.mkdir(parents=True, exist_ok=True)
    for name, given in INPUTS.items():
        source = MODELS / f"{name}.onnx"
        with np.load(MODELS / f"{name}_heldout.npz") as arrays:
            x = arrays[given][:64]
        np.save(folder / f"{name}.npy", np.concatenate([x, 5 * x[::4]]))
        for kind in KINDS:
            choices = {"solver": "cached"} if kind == "local" else {"solver": "exact", "index": kind}
            out = folder / f"{name}.{kind}.onnx"
            gapa_onnx.convert(source, MODELS / f"{name}_calibration.npz", out, m=M, k=K, seed=0, **choices)


def answers(folder: Path, library: Path, out: Path) -> None:
    """What every file says with a library, for some numbers of rows at a time."""
    import onnxruntime as ort

    said = {}
    for path in sorted(folder.glob("*.onnx")):
        x = np.load(folder / f"{path.name.split('.')[0]}.npy")
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.register_custom_ops_library(str(library))
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        (given,) = session.get_inputs()
        names = [output.name for output in session.get_outputs()]
        for count in ROWS_AT_A_TIME:
            batches = [x[at : at + count] for at in range(0, len(x), count)]
            parts = [session.run(names, {given.name: batch}) for batch in batches]
            for name, values in zip(names, zip(*parts)):
                said[f"{path.stem}/{count}/{name}"] = np.concatenate(values)
    np.savez(out, **said)


def compare(one: Path, other: Path) -> int:
    """How many answers are the same bits, and the largest difference; 1 where one is not the same."""
    worst: dict[str, float] = {}
    unequal: dict[str, int] = {}
    flags = rows = 0
    with np.load(one) as first, np.load(other) as second:
        assert set(first) == set(second)
        for key in first:
            a, b = first[key], second[key]
            kind = key.split("/")[0]
            rows += len(a)
            unequal.setdefault(kind, 0)
            worst.setdefault(kind, 0.0)
            if a.tobytes() == b.tobytes():
                continue
            unequal[kind] += 1
            if a.dtype == bool:
                flags += int((a != b).sum())
            else:
                off = np.abs(a.astype(np.float64) - b) / np.maximum(np.abs(a), 1e-3 * np.abs(a).max())
                worst[kind] = max(worst[kind], float(off.max()))
        print(f"{len(first.files)} answers of {len(worst)} files, {rows} rows")
    for kind, count in unequal.items():
        told = f"{count} not equal, by at most {worst[kind]:.1e}" if count else "all bits equal"
        print(f"  {kind}: {told}")
    if flags:
        print(f"  {flags} flags differ")
    return 1 if any(unequal.values()) else 0


def main() -> int:
    command, *paths = sys.argv[1:] or ["help"]
    given = list(map(Path, paths))
    if command == "files" and len(given) == 1:
        files(*given)
    elif command == "answers" and len(given) == 3:
        answers(*given)
    elif command == "compare" and len(given) == 2:
        return compare(*given)
    else:
        print(__doc__, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

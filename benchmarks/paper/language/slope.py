"""What the conversion of larger decoders takes: decoders with random weights, in three sizes or more.

    python benchmarks/paper/language/slope.py [--cache DIR] [--only SIZE …]

Each size is converted in a process of its own, on 24 sequences of 16 random tokens with K = 5. Fitted are lines in the
number of parameters: of the highest memory, of the part of it that is no file's, and of CPU seconds, and the last two of
the source alone beside them; results/language_conversion.csv has a line for each size. Memory that is mapped from the file
of the weights is counted in the first; under pressure the system takes it back.

glibc keeps freed blocks of up to 32 MB for later ones. The matrices of a decoder of 3 billion parameters are larger, those of
these are not; so here, too, every block of a megabyte goes back when it is freed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:1] = [str(HERE.parent), str(HERE.parents[1]), str(HERE.parents[2] / "tests")]

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import packages  # noqa: E402
from support.decoders import decoder  # noqa: E402

from language.conversion import parameters  # noqa: E402

#: width, inner width, blocks
SIZES = {"80M": (768, 2048, 6), "180M": (1024, 4096, 8), "430M": (1536, 6144, 10)}
VOCABULARY = 49_152
ROWS, LENGTH = 24, 16
TOLD = {"3B": 3.2e9, "8B": 8.0e9}
ALLOCATION = {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}


def made(size: str, folder: Path) -> Path:
    """A decoder of this size, its weights in a second file."""
    path = folder / f"random-{size}" / "model.onnx"
    if not path.exists():
        width, inner, blocks = SIZES[size]
        model = decoder(width=width, inner=inner, blocks=blocks, vocabulary=VOCABULARY, tied=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    return path


def measured(model: Path, folder: Path) -> dict[str, Any]:
    """Figures of one conversion, in a process of its own."""
    data = folder / "random-tokens.npz"
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH))
    np.savez(data, input_ids=ids, attention_mask=np.ones_like(ids))
    command = [sys.executable, str(HERE / "conversion.py"), str(model), str(data), "k=5", "--json"]
    command += ["--out", str(model.with_name("converted.onnx")), "--keep", model.parent.name]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | ALLOCATION)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cache", type=Path, default=packages.cache_folder("language"))
    parser.add_argument("--only", nargs="+", choices=SIZES, default=list(SIZES))
    chosen = parser.parse_args()
    lines = []
    for size in chosen.only:
        path = made(size, chosen.cache)
        found = measured(path, chosen.cache)
        own = max(step["peak"][1] for step in found["steps"].values())
        sizes = found["peak"], own, found["forward_peak"][1]
        lines.append((parameters(path), *sizes, found["cpu"], found["forward_cpu"]))
        print(f"{size:>5} {lines[-1][0] / 1e6:7.0f} M  {told(lines[-1][1:])}", flush=True)
    counts, *columns = map(np.array, zip(*lines))
    for size, count in TOLD.items():
        by_line = [float(np.polyval(np.polyfit(counts, values, 1), count)) for values in columns]
        print(f"{size:>5} by the line {told(by_line)}")


def told(figures: Sequence[float]) -> str:
    peak, own, forward_own, cpu, forward = figures
    memory = f"{peak / 1e9:6.2f} GB, own {own / 1e9:6.2f}, of the source alone {forward_own / 1e9:6.2f}"
    return f"{memory}  {cpu:7.0f} CPU s, forward of the data {forward:6.1f}"


if __name__ == "__main__":
    main()

"""What the conversion of larger decoders takes: decoders with random weights, in three sizes or more.

    python benchmarks/paper/language/slope.py [--cache DIR] [--only SIZE …]

Each size is converted in a process of its own, on 24 sequences of 16 random tokens with K = 5. Fitted are lines in the
number of parameters: of the highest memory, and of CPU seconds, of which those of the forward passes are told beside
them; results/language_conversion.csv has a line for each size. Memory that is mapped from the file of the weights is counted; under pressure the system takes it back.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

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


def made(size: str, folder: Path) -> Path:
    """A decoder of this size, its weights in a second file."""
    path = folder / f"random-{size}" / "model.onnx"
    if not path.exists():
        width, inner, blocks = SIZES[size]
        model = decoder(width=width, inner=inner, blocks=blocks, vocabulary=VOCABULARY, tied=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        onnx.save(model, path, save_as_external_data=True, location="model.onnx.data")
    return path


def measured(model: Path, folder: Path) -> dict[str, float]:
    """Figures of one conversion, in a process of its own."""
    data = folder / "random-tokens.npz"
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH))
    np.savez(data, input_ids=ids, attention_mask=np.ones_like(ids))
    command = [sys.executable, str(HERE / "conversion.py"), str(model), str(data), "k=5", "--json"]
    command += ["--out", str(model.with_name("converted.onnx")), "--keep", model.parent.name]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
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
        lines.append((parameters(path), found["peak"], found["cpu"], found["forward_cpu"]))
        count, peak, cpu, forward = lines[-1]
        print(
            f"{size:>5} {count / 1e6:7.0f} M  {peak / 1e9:6.2f} GB  {cpu:7.0f} CPU s, forward of the data {forward:6.1f}"
        )
    counts, peaks, cpus, forwards = map(np.array, zip(*lines))
    for size, count in TOLD.items():
        told = [float(np.polyval(np.polyfit(counts, values, 1), count)) for values in (peaks, cpus, forwards)]
        print(
            f"{size:>5} by the line {told[0] / 1e9:6.1f} GB  {told[1]:7.0f} CPU s, forward of the data {told[2]:6.1f}"
        )


if __name__ == "__main__":
    main()

"""All fuzzers in turn: `make fuzz HOURS=8`, or the quick mode of continuous integration. Run it from tests/.

python -m fuzz.run --hours 8      goes on where it ended; counts are kept in build/fuzz/tally.json
python -m fuzz.run --quick        the first cases of each, within three minutes with what has to be built
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fuzz import files, operators, sources
from fuzz.tally import Tally

QUICK = 165.0  # seconds, builds included
ROUND = 900.0  # seconds of the long mode until the next fuzzer has its turn

#: name -> share of the time, what runs for so many seconds in a folder
PARTS: dict[str, tuple[float, Callable[[float, Path, bool], Tally]]] = {
    "operators, AddressSanitizer and UBSan": (
        0.4,
        lambda seconds, folder, keep: operators.fuzz("address", seconds, 50_000, keep=keep, jobs=2),
    ),
    "operators, ThreadSanitizer, 4 threads": (
        0.15,
        lambda seconds, folder, keep: operators.fuzz("thread", seconds, 2_000, keep=keep),
    ),
    "converted files in onnxruntime": (
        0.2,
        lambda seconds, folder, keep: files.fuzz(seconds, folder / "files", keep=keep),
    ),
    "sources and data through the commands": (
        0.25,
        lambda seconds, folder, keep: sources.fuzz(seconds, folder / "sources", keep=keep),
    ),
}


def turn(seconds: float, keep: bool) -> list[str]:
    """Each fuzzer for its share of the time; what failed."""
    failures: list[str] = []
    whole = sum(share for share, _ in PARTS.values())
    with tempfile.TemporaryDirectory() as scratch:
        for name, (share, fuzz) in PARTS.items():
            counted = fuzz(seconds * share / whole, Path(scratch), keep)
            print(f"{name}: {counted.cases:,} cases, {len(counted.failures)} failures", flush=True)
            failures += [f"{name}: {failure}" for failure in counted.failures]
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--quick", action="store_true")
    chosen = parser.parse_args()
    start = time.monotonic()
    for kind in ("address", "thread"):
        operators.build(kind)
    if chosen.quick:
        failures = operators.replay() + turn(max(40.0, QUICK - (time.monotonic() - start)), keep=False)
    else:
        failures = operators.replay()
        while (left := chosen.hours * 3600 - (time.monotonic() - start)) > 0:
            failures += [one for one in turn(min(left, ROUND), keep=True) if one not in failures]
    for failure in failures:
        print(failure, file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

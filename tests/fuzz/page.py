"""docs/fuzzing.md: what the fuzzers are, and how their longest run so far ended.

python -m fuzz.page             writes the page from benchmarks/results/fuzz.json
python -m fuzz.page --record    first makes the counts of build/fuzz/tally.json that record
"""

from __future__ import annotations

import json
import sys
from typing import Any

from fuzz import files, operators, sources, tally
from fuzz.tally import ROOT, Tally

RECORD = ROOT / "benchmarks" / "results" / "fuzz.json"
PAGE = ROOT / "docs" / "fuzzing.md"

TEXT = """# Fuzzing

Written by `python -m fuzz.page` in tests/ from benchmarks/results/fuzz.json.

```sh
make fuzz HOURS=8                            # all fuzzers in turn; goes on where it ended
cd tests && ../.venv/bin/python -m fuzz.run --quick    # the first cases of each, as in .ci/run
```

A case is a number, and the same number is the same case. Counts are kept in build/fuzz/tally.json, by a hash of the code that
they were counted with: other code starts again from its first case. What failed once stays in tests/fuzz/corpus/ or has a test
of its own where it was mended.

| what | where | a failure is |
|---|---|---|
| Operators behind a stand-in for onnxruntime's C interface, which can make any call or allocation fail | tests/fuzz/native, operators.py | a crash; a report of AddressSanitizer, UBSan or, with {threads} threads on one node, ThreadSanitizer; a share outside of [0, 1], or a number for a query that is none; a neighbour twice or not among the nearest; a row whose answer depends on its batch or thread; a part of an output that was not written; a refused case with which nothing is wrong |
| Converted files of every index and of four tasks, damaged, natively in onnxruntime {oldest} and in the newest | tests/fuzz/files.py, stock.py | a crash of ours; numbers damaged so that a variance is negative or none, and no flag; an unsound variance that `session(check=True)` or `verify` accepts |
| Models, converted files and data in every form, damaged, through the commands | tests/fuzz/sources.py | a trace; exit code 2 without one sentence; a process that ends |

A seed of an operator is repeated by `build/fuzz/address/gapa_fuzz --first SEED --count 1 --show`, a case of sources by
`python -m fuzz.sources FOLDER NUMBER`. With bytes in place of a seed the same cases are a target for libFuzzer
(tests/fuzz/native/target.cc); tests/fuzz/oss-fuzz has build files in the form of OSS-Fuzz, which were never run there.
FAISS itself is Debian's build, without instruments.

## The longest run so far

{results}"""

HEADINGS = {
    "operators (address)": ("Operators, AddressSanitizer and UBSan", operators.OUTCOMES),
    "operators (thread)": ("Operators, ThreadSanitizer", operators.OUTCOMES),
    "operators (library)": ("Operators, the library as it is shipped", operators.OUTCOMES),
    files.NAME: ("Whole files", files.OUTCOMES),
    sources.NAME: ("Sources and data", sources.OUTCOMES),
}


def section(heading: str, outcomes: dict[str, str], counted: Tally) -> list[str]:
    known = {one for line in counted.table.values() for one in line}
    shown = {name: text for name, text in outcomes.items() if name in known}
    words = ", ".join(f"{name} {value}" for name, value in sorted(counted.notes.items()))
    cases = f"{counted.cases:,} cases in {counted.seconds:,.0f} seconds on the clock"
    lines = [
        f"### {heading}",
        "",
        f"{cases}{'; ' + words if words else ''}. Failures: {len(counted.failures)}.",
        "",
    ]
    return [*lines, *tally.lines(counted, shown), ""]


def page(record: dict[str, Any]) -> str:
    results: list[str] = []
    for name, (heading, outcomes) in HEADINGS.items():
        if name in record:
            results += section(heading, outcomes, Tally(**record[name]))
    if "coverage" in record:
        results += ["### Lines of runtime/src that the cases reach", "", record["coverage"], ""]
    return TEXT.format(threads=operators.THREADS, oldest=files.OLDEST, results="\n".join(results))


def main() -> int:
    if "--record" in sys.argv:
        kept = {**(json.loads(RECORD.read_text()) if RECORD.exists() else {}), **tally.read()}
        RECORD.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    PAGE.write_text(page(json.loads(RECORD.read_text(encoding="utf-8"))), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())

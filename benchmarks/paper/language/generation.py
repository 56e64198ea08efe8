"""Does a package generate the source's tokens in onnxruntime-genai, and what does a token cost?

    python benchmarks/paper/language/generation.py SOURCE_FOLDER PACKAGE_FOLDER [--tokens 100] [--threads 1] [--json]

Needs onnxruntime-genai alone. Source, source again and package take turns at each token, so that whatever else the
machine does hits all three; the control is the source over itself. Times are CPU seconds, which do not go on while another
process has the core.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnxruntime_genai as og

PROMPTS = (
    "The capital of France is",
    "In 1897 the British physicist J. J. Thomson",
    "def fibonacci(n):\n    ",
    "My favourite recipe for pancakes:",
    "The Treaty of Westphalia was signed in",
    "Once upon a time, in a village by the sea,",
    "Zxqv blorp fnord wibble the",
    "Q: How many legs does a spider have?\nA:",
)
WARM = 3  # steps that are not counted: caches grow, threads wake
RESAMPLED = 1000


def opened(folder: Path, threads: int) -> Any:
    """The model of a folder, run on so many threads."""
    config = og.Config(str(folder))
    options = {"session_options": {"intra_op_num_threads": threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    return og.Model(config)


def started(model: Any, ids: list[int], tokens: int) -> tuple[Any, float]:
    """A generator that has read a prompt, and the seconds that took."""
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(ids) + tokens, do_sample=False, top_k=1)
    generator = og.Generator(model, params)
    start = time.process_time()
    generator.append_tokens(ids)
    return generator, time.process_time() - start


def compared(source: Path, package: Path, tokens: int, threads: int) -> dict[str, Any]:
    """Tokens of both, and seconds of each step of source, source again and package."""
    models = [opened(folder, threads) for folder in (source, package)]
    tokenizer = og.Tokenizer(models[0])
    steps: list[list[float]] = [[], [], []]
    prompts: list[list[float]] = [[], [], []]
    made, same = 0, []
    for prompt in PROMPTS:
        ids = [int(token) for token in tokenizer.encode(prompt)]
        begun = [started(model, ids, tokens) for model in (models[0], models[0], models[1])]
        generators = [generator for generator, _ in begun]
        for kept, (_, seconds) in zip(prompts, begun):
            kept.append(seconds)
        for step in range(tokens):
            if generators[0].is_done() or generators[2].is_done():
                break
            for turn in range(3):
                at = (step + turn) % 3
                start = time.process_time()
                generators[at].generate_next_token()
                if step >= WARM:
                    steps[at].append(time.process_time() - start)
        sequences = [[int(token) for token in generator.get_sequence(0)] for generator in generators]
        made += len(sequences[0]) - len(ids)
        same.append(sequences[0] == sequences[2])
    return {
        "prompts": len(PROMPTS),
        "tokens": made,
        "same": sum(same),
        "threads": threads,
        "source_seconds": statistics.median(steps[0]),
        "ratio": ratio(steps[2], steps[0]),
        "control": ratio(steps[1], steps[0]),
        "prompt_seconds": [statistics.median(kept) for kept in prompts],
    }


def ratio(over: list[float], under: list[float]) -> dict[str, float]:
    """The median of ratios of steps that were taken in turn, and its 95% interval by resampling steps."""
    pairs = [a / b for a, b in zip(over, under)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(pairs, k=len(pairs))) for _ in range(RESAMPLED))
    low, high = (medians[round(q * (RESAMPLED - 1))] for q in (0.025, 0.975))
    return {"median": statistics.median(pairs), "low": low, "high": high}


def told(found: dict[str, Any]) -> Iterator[str]:
    yield f"{found['same']} of {found['prompts']} prompts have the same tokens; {found['tokens']} were generated"
    yield f"a token takes {found['source_seconds'] * 1e3:.2f} ms of the source, on {found['threads']} thread(s)"
    for name, text in (("ratio", "package over source"), ("control", "source over itself")):
        one = found[name]
        yield f"{text}: {one['median']:.3f}, with 95% between {one['low']:.3f} and {one['high']:.3f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    found = compared(given.source, given.package, given.tokens, given.threads)
    if given.json:
        print(json.dumps(found))
    else:
        sys.stdout.writelines(f"{line}\n" for line in told(found))
    return 0 if found["same"] == found["prompts"] else 1


if __name__ == "__main__":
    sys.exit(main())

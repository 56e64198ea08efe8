"""The paper's language task on SmolLM2-135M-Instruct: WikiText-103 against OpenWebText, and wrong tokens.

    python benchmarks/paper/language/run.py [--quick] [--data DIR] [--cache DIR] [--steps NAME …] [--sets NAME …]
                                            [--sequences N] [--fresh]

    dump      one forward pass over all text; everything but `tool` is computed from what it leaves (`dump.py`)
    peers     source entropy and NLL, best temperature, last-layer Laplace, Mahalanobis, nearest neighbours
    points    the method against M, K and k-means or random points, at two places
    layers    the method at every block
    tokens    is the next token wrong? AUROC and PRR (`judging.py`)
    tool      the model converted with the defaults, and the same figures for what the file puts out

All write to results/language.csv and results/language_tokens.csv line by line; what is there is not run again. AUROCs are
those of sequence scores, held-out WikiText against another set (`texts.py`): a column for each set and one for its
standard error (`judging.py`). `--sets` leaves sets out, so that what is chosen can be chosen without OpenWebText. `--sequences` is how many
of the calibration text are looked at, at most, by all steps but `tool`.
The model has to be there: `exports.py --only plain` makes it in the same cache. `--quick` is a minute with a
tiny decoder and made-up tokens, and writes to a folder of the cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:1] = [
    str(HERE.parent),
    str(HERE.parents[1]),
    str(HERE.parents[2] / "tests"),
]  # modules are of a package

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import packages  # noqa: E402
from backbones import DATA  # noqa: E402
from lines import Lines, say  # noqa: E402
from support.decoders import decoder  # noqa: E402

from language import rows, tool  # noqa: E402
from language.dump import Dump, Maker, steps  # noqa: E402
from language.task import Task  # noqa: E402
from language.texts import CALIBRATION, FILES, HELDOUT, OTHERS, WEB, Sequences, made_up, sequences  # noqa: E402

COUNTS = {CALIBRATION: 2084, HELDOUT: 640, **dict.fromkeys(OTHERS, 160), WEB: 640}
QUICK = {CALIBRATION: 48, HELDOUT: 24, OTHERS[0]: 12, WEB: 24}
QUICK_LENGTH = 16
EVERY = 3  # sweeps read one position in so many
STEPS = ("dump", "peers", "points", "layers", "tokens", "tool")
THREADS = 2


def main() -> None:
    options = _arguments().parse_args()
    cache = options.cache / "quick" if options.quick else options.cache
    results = cache if options.quick else HERE.parent / "results"
    cache.mkdir(parents=True, exist_ok=True)
    try:
        model, tokenizer, sets = _quick(cache) if options.quick else _full(options)
    except packages.Missing as reason:
        say(f"skipped: {reason}")
        return
    sets = {name: found for name, found in sets.items() if name in (CALIBRATION, HELDOUT, *options.sets)}
    dump = Dump(cache / "dump", tuple(sets))
    if "dump" in options.steps:
        maker = Maker(dump, model, sets, THREADS)
        for of, count in steps(sets):
            maker.make(of, count)
    task = Task(model, dump, 1 if options.quick else EVERY, options.quick)
    lines = Lines(results / "language.csv", rows.KEY, fresh=options.fresh)
    token_lines = Lines(results / "language_tokens.csv", rows.TOKEN_KEY, fresh=options.fresh)
    if "peers" in options.steps:
        rows.peers(task, lines)
    for name in ("points", "layers"):
        if name in options.steps:
            rows.sweep(task, lines, name)
    if "tokens" in options.steps:
        rows.wrong_tokens(task, token_lines)
    if "tool" in options.steps:
        data, settings = _calibration(options, sets)
        path = tool.converted(model, data, dump, tokenizer, **settings)
        tool.read(path, dump, [HELDOUT, *task.sides], THREADS)
        rows.of_tool(task, lines, token_lines)


def _arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--cache", type=Path, default=packages.cache_folder("language"))
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--sets", nargs="+", choices=(*OTHERS, WEB), default=(*OTHERS, WEB))
    parser.add_argument("--sequences", type=int, default=COUNTS[CALIBRATION])
    parser.add_argument("--fresh", action="store_true")
    return parser


def _full(options: argparse.Namespace) -> tuple[Path, Path, dict[str, Sequences]]:
    model, tokenizer = options.cache / "plain" / "model.onnx", options.cache / "checkpoint" / "tokenizer.json"
    if not (model.exists() and tokenizer.exists()):
        raise packages.Missing(
            f"there is no {model}; make it: python benchmarks/paper/language/exports.py --only plain"
        )
    counts = COUNTS | {CALIBRATION: options.sequences}
    return model, tokenizer, {name: sequences(name, tokenizer, n, options.data) for name, n in counts.items()}


def _quick(cache: Path) -> tuple[Path, None, dict[str, Sequences]]:
    model = cache / "decoder.onnx"
    onnx.save(decoder(), model)
    return model, None, {name: made_up(name, count, QUICK_LENGTH) for name, count in QUICK.items()}


def _calibration(
    options: argparse.Namespace, sets: Mapping[str, Sequences]
) -> tuple[Path | dict[str, np.ndarray], dict[str, int]]:
    """What the tool is given, and its settings: in the quick mode few points, as there are few rows."""
    if not options.quick:
        return options.data / "text" / FILES[CALIBRATION], {}
    ids = sets[CALIBRATION].ids
    return {"input_ids": ids, "attention_mask": np.ones_like(ids)}, {"m": 50, "k": 5}


if __name__ == "__main__":
    main()

"""What one site costs by itself, against M, K, d and batch: the numbers and the figure of `speed`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from lines import Lines, machine, say
from onnx import helper, numpy_helper

from gapa_onnx.errors import UserError
from gapa_onnx.measure import bench
from gapa_onnx.measure.profiling import open_quiet
from gapa_onnx.op.contract import DOMAIN, SCHEMAS, VERSION
from gapa_onnx.op.index import Index, build_index

USUAL = {"m": 10_000, "k": 50, "d": 200, "batch": 256}
GROWTH = {
    "m": (100, 1000, 10_000, 100_000, 1_000_000),
    "k": (1, 5, 20, 50, 100, 200, 500),
    "d": (16, 64, 200, 512, 1024),
    "batch": (1, 8, 32, 256, 1024),
}
KINDS = {"m": ("flat", "auto", "local"), **dict.fromkeys(("k", "d", "batch"), ("flat", "local"))}
WIDTH_OF_M = 64  # a million points of width 200 would be 0.8 GB
MOST = {"local": {"m": 100_000, "k": 200}}  # beyond, building takes too long


def growth(path: Path, *, fresh: bool) -> None:
    """Microseconds per query of the operator alone, one thread, one number varied at a time."""
    results = Lines(path, ("varied", "kind", "m", "k", "d", "batch"), fresh=fresh)
    for varied, sizes in GROWTH.items():
        for kind, size in itertools.product(KINDS[varied], sizes):
            sizes_now = {**USUAL, varied: size} | ({"d": WIDTH_OF_M} if varied == "m" else {})
            key = (varied, kind, *sizes_now.values())
            too_many = any(sizes_now[name] > most for name, most in MOST.get(kind, {}).items())
            if too_many or results.has(*key) or kind not in ("auto", *SCHEMAS):
                continue
            try:
                model, index = operator(kind, **{name: sizes_now[name] for name in "mkd"})
            except (UserError, KeyError) as error:
                say(f"left out: {kind} {sizes_now}: {error}")
                continue
            query = clustered(sizes_now["batch"], sizes_now["d"], seed=2)
            found = bench.compare(_thrice(model, query), time.thread_time, rounds=18)
            if not found.sound:
                say(f"left out: {kind} {sizes_now}: the control is {found.control:.3f}; try again")
                continue
            results.add(
                {
                    "varied": varied,
                    "kind": kind,
                    **sizes_now,
                    "index": index.kind,
                    "recall": "" if index.recall is None else round(index.recall, 4),
                    "us_per_query": round(found.source_seconds / sizes_now["batch"] * 1e6, 3),
                    "control": round(found.control, 4),
                    **machine(),
                }
            )
    draw(results.rows, path.with_suffix(".png"))


def operator(kind: str, m: int, k: int, d: int) -> tuple[onnx.ModelProto, Index]:
    """A model of one `ai.gapa` node over clustered points, and its index."""
    points = clustered(m, d, seed=0)
    index = build_index(kind, points, k=k, held_out=clustered(500, d, seed=1))
    schema = SCHEMAS[index.kind]
    constants = {"k": np.array([k]), "length_scale": np.float32(np.sqrt(d)), "jitter": np.float32(1e-6)}
    arrays = {port.name: {**constants, **index.tensors}[port.name] for port in schema.constants}
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node(schema.name, ["query", *arrays], ["s", "neighbours"], schema.name, domain=DOMAIN)],
        "site",
        [value("query", onnx.TensorProto.FLOAT, ["n", d])],
        [value("s", onnx.TensorProto.FLOAT, ["n", 1])],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in arrays.items()],
    )
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8), index


def clustered(rows: int, d: int, seed: int) -> np.ndarray:
    """As activations lie: around 50 centres, in 20 directions mostly."""
    shape, generator = np.random.default_rng(0), np.random.default_rng(seed + 1)
    centres, directions = shape.standard_normal((50, d)), shape.standard_normal((20, d)) / 2
    blocks = []
    for start in range(0, rows, 100_000):
        n = min(100_000, rows - start)
        inner = generator.standard_normal((n, 20)) @ directions + 0.1 * generator.standard_normal((n, d))
        blocks.append((centres[generator.integers(0, 50, n)] + inner).astype(np.float32))
    return np.concatenate(blocks)


def _thrice(model: onnx.ModelProto, query: np.ndarray) -> Iterator[list[bench.Run]]:
    while True:
        sessions = [open_quiet(model, 1) for _ in range(3)]
        yield [lambda session=session: session.run(["s"], {"query": query}) for session in sessions]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    titles = {"m": "inducing points M", "k": "neighbours K", "d": "width d", "batch": "rows per batch"}
    labels = {"flat": "exact search", "auto": "--index auto", "local": "--solver cached"}
    colours = dict(zip(labels, ("tab:blue", "tab:orange", "tab:green")))
    figure, axes = plt.subplots(2, 2, figsize=(9, 6.5), sharey=True, layout="constrained")
    for (varied, title), axis in zip(titles.items(), axes.flat):
        for kind in KINDS[varied]:
            line = [row for row in rows if (row["varied"], row["kind"]) == (varied, kind)]
            line.sort(key=lambda row: float(row[varied]))
            x, y = ([float(row[name]) for row in line] for name in (varied, "us_per_query"))
            axis.plot(x, y, marker="o", color=colours[kind], label=labels[kind]) if line else None
            if (varied, kind) == ("m", "flat") and line:  # what growth in proportion would look like
                axis.plot(x[-2:], [y[-1] * x[-2] / x[-1], y[-1]], ":", color="grey", label="∝ M")
        axis.set(xscale="log", yscale="log", xlabel=title)
        axis.xaxis.set_minor_formatter("")
        axis.grid(alpha=0.3)
    for axis in axes[:, 0]:
        axis.set_ylabel("µs per query, one thread")
    axes[0, 0].legend(frameon=False)
    symbols = {"m": "M", "k": "K", "d": "d", "batch": "batch"}
    usual = ", ".join(f"{symbols[name]} = {size:,}" for name, size in USUAL.items())
    figure.suptitle(f"One site: {usual} where not varied; d = {WIDTH_OF_M} where M is", fontsize=10)
    figure.savefig(path, dpi=150)
    print(f"figure {path}")

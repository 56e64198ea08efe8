"""What the native operators cost by themselves: exact search and solve beside faiss-cpu, and per row.

    python benchmarks/native_kernel.py [--quick] [--only faiss operators] [--fresh]

    faiss      A is GapaActivation over all points (search *and* solve), B is `faiss.IndexFlatL2.search` alone: A, A
               and B take turns in one process on two threads, by wall time. The control is A against A; beyond
               1.00 ± 0.03 it is tried again, then no ratio is given                -> results/native_kernel.csv
    operators  CPU time per row on one thread, and the library's instructions per row counted by callgrind, which no
               busy machine can disturb: with AVX2, since valgrind has no AVX-512  -> results/native_operators.csv

The OpenBLAS inside faiss-cpu does not know every CPU and may fall back to old instructions, which would flatter us.
So FAISS runs twice, in processes of their own: as installed, and with OPENBLAS_CORETYPE naming the best core type
that this CPU can run. A line that is there is not measured again.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import faiss
import numpy as np
import onnx
import onnxruntime as ort
from backbones import CACHE
from lines import Lines, machine, say
from onnx import TensorProto, helper, numpy_helper

from gapa_onnx.measure import bench
from gapa_onnx.op.contract import CLASSES, DOMAIN, SCHEMAS, VERSION, OpSchema
from gapa_onnx.sessions.runtime import library_path, session

RESULTS = Path(__file__).parent / "results"
DIM, NEIGHBOURS, POINTS, THREADS = 200, 50, 55_000, 2
BLAS_CORE = "OPENBLAS_CORETYPE"
COUNTED = "avx2"  # the instruction set that callgrind can count
COUNTED_BATCH = 32  # rows; instructions per row differ little beyond a few, and each count takes a minute


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--quick", action="store_true", help="a tenth of the queries, few rounds, to cache/quick"
    )
    parser.add_argument("--only", choices=("faiss", "operators"), nargs="+", default=("faiss", "operators"))
    parser.add_argument("--fresh", action="store_true", help="measure again what is there")
    parser.add_argument("--compare", choices=DATA, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if library_path() is None:
        sys.exit("the native library is missing: `gapa-onnx doctor` tells more")
    folder = CACHE / "quick" if options.quick else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    if options.compare:
        against_faiss(folder, options.compare, options.quick)
        return 0
    fresh = options.fresh or options.quick
    if "faiss" in options.only:
        compare_all(folder, fresh, options.quick)
    if "operators" in options.only:
        operators(folder, fresh, options.quick)
    return 0


# --------------------------------------------------------------------------- data


def random_rows(count: int, seed: int) -> np.ndarray:
    """(count, d) without structure: the worst case of a search."""
    return np.random.default_rng(seed).normal(size=(count, DIM)).astype(np.float32)


def clustered_rows(count: int, seed: int) -> np.ndarray:
    """(count, d) like a hidden layer on images: ten classes on curved sheets of a dozen dimensions."""
    layer = np.random.default_rng(12345)
    classes, spread = layer.normal(size=(10, 12)) * 2, layer.normal(size=(10, 12, 12)) / np.sqrt(12)
    first, second = layer.normal(size=(12, DIM)) / 3, layer.normal(size=(DIM, DIM)) / np.sqrt(DIM)
    rng = np.random.default_rng(seed)
    label = rng.integers(10, size=count)
    latent = classes[label] + np.einsum("nij,nj->ni", spread[label], rng.normal(size=(count, 12)))
    return np.tanh(np.tanh(latent @ first) @ second + 0.05 * rng.normal(size=(count, DIM))).astype(np.float32)


DATA = {"random": random_rows, "clustered": clustered_rows}


def length_scale(points: np.ndarray) -> np.ndarray:
    """The median distance of points, ()."""
    sample = points[:: max(1, len(points) // 500)].astype(np.float64)
    gaps = sample[:, None] - sample[None]
    return np.array(np.sqrt(np.median((gaps**2).sum(-1))), np.float32)


# --------------------------------------------------------------- models of one node


def one_node(schema: OpSchema, constants: dict[str, np.ndarray], inputs: dict[str, tuple]) -> onnx.ModelProto:
    """`inputs` are the shapes of those that are not constant."""
    outputs = [port.name for port in schema.outputs]
    node = helper.make_node(schema.name, [port.name for port in schema.inputs], outputs, domain=DOMAIN)
    types = [helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype)) for port in schema.outputs]
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, dtype, None) for name, dtype in zip(outputs, types)],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def opened(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # A thread that spins while the other side is measured would be charged to it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return session(model.SerializeToString(), options)


def exact(points: np.ndarray) -> onnx.ModelProto:
    """One GapaActivation node."""
    constants = {**kernel_constants(points, min(NEIGHBOURS, len(points))), "points": points}
    return one_node(SCHEMAS["flat"], constants, {"query": ("n", DIM)})


def local(points: np.ndarray, neighbours: int) -> onnx.ModelProto:
    """One GapaActivationLocal node; its search is exact."""
    index = faiss.IndexFlatL2(DIM)
    index.add(points)
    constants = {
        **kernel_constants(points, neighbours),
        "points": points,
        "neighbourhoods": index.search(points, neighbours)[1].astype(np.int32),
        "centroids": points.mean(axis=0, keepdims=True),
        "list_offsets": np.array([0, len(points)], np.int64),
        "nprobe": np.array([1], np.int64),
    }
    return one_node(SCHEMAS["local"], constants, {"query": ("n", DIM)})


def kernel_constants(points: np.ndarray, neighbours: int) -> dict[str, np.ndarray]:
    return {
        "k": np.array([neighbours], np.int64),
        "length_scale": length_scale(points),
        "jitter": np.array(1e-6, np.float32),
    }


def classes(shape: tuple[int, ...], points: int) -> onnx.ModelProto:
    """One GapaClasses node for logits of this shape."""
    constants = {
        "points": np.random.default_rng(0).normal(size=(points, shape[1])).astype(np.float32),
        "axis": np.array([1], np.int64),
    }
    any_batch = ("n", *shape[1:])
    return one_node(CLASSES, constants, {"mean": any_batch, "var": any_batch, "output": any_batch})


# ------------------------------------------------------------------ beside FAISS


def compare_all(folder: Path, fresh: bool, quick: bool) -> None:
    """Each comparison in a process of its own: OpenBLAS reads its core type once."""
    for name in DATA:
        for core in (None, best_blas_core()):
            lines = Lines(folder / "native_kernel.csv", FAISS_KEY, fresh=False)
            if fresh or not lines.has(name, core or AS_INSTALLED, machine()["processor"]):
                call = [sys.executable, __file__, "--compare", name, *(["--quick"] if quick else [])]
                subprocess.run(call, env=os.environ | ({BLAS_CORE: core} if core else {}), check=True)


FAISS_KEY = ("rows", "blas_core", "processor")
AS_INSTALLED = "as installed"


def against_faiss(folder: Path, name: str, quick: bool) -> None:
    queries, rounds = (1000, 6) if quick else (10_000, 12)
    points, query = DATA[name](POINTS, 1), DATA[name](queries, 2)
    running = opened(exact(points), THREADS)
    index = faiss.IndexFlatL2(DIM)
    index.add(points)
    faiss.omp_set_num_threads(THREADS)
    _, ours = running.run(None, {"query": query[:200]})
    _, theirs = index.search(query[:200], NEIGHBOURS)

    def search_and_solve() -> None:
        running.run(["s"], {"query": query})

    runs = (search_and_solve, search_and_solve, lambda: index.search(query, NEIGHBOURS))
    for attempt in range(bench.ATTEMPTS):
        found = bench.summary(in_turns(runs, rounds * 2**attempt))
        if found.sound:
            break
    low, high = (1 / q for q in reversed(found.ratio_quartiles))
    Lines(folder / "native_kernel.csv", FAISS_KEY, fresh=False).add(
        {
            "rows": name,
            "blas_core": os.environ.get(BLAS_CORE, AS_INSTALLED),
            "threads": THREADS,
            "points": POINTS,
            "queries": queries,
            "d": DIM,
            "k": NEIGHBOURS,
            "ratio": round(1 / found.ratio, 3) if found.sound else "refused",
            "quartiles": f"{low:.3f} … {high:.3f}" if found.sound else "",
            "control": round(found.control, 4),
            "rounds": found.rounds,
            "us_per_query": round(found.source_seconds / queries * 1e6, 1),
            "faiss_us_per_query": round(found.converted_seconds / queries * 1e6, 1),
            "same_neighbours": round(float((ours == theirs).mean()), 5),
            "faiss": faiss.__version__,
            **machine(),
        }
    )


def in_turns(runs: tuple[bench.Run, ...], rounds: int) -> np.ndarray:
    """Seconds, (3, rounds), in all orders."""
    seconds = np.empty((3, rounds))
    for run in runs:
        run()
    for number in range(rounds):
        for position in bench.ORDERS[number % len(bench.ORDERS)]:
            started = time.perf_counter()
            runs[position]()
            seconds[position, number] = time.perf_counter() - started
    return seconds


def best_blas_core() -> str:
    try:
        return "SkylakeX" if "avx512f" in Path("/proc/cpuinfo").read_text() else "Haswell"
    except OSError:
        return "Haswell"


# ---------------------------------------------------------------------- operators


@dataclass(frozen=True)
class Operator:
    """A model of one node, and rows for it."""

    name: str
    rows: str
    make: Callable[[], onnx.ModelProto]
    feeds: Callable[[int, int], dict[str, np.ndarray]]  #: of a number of rows and a seed
    batches: tuple[int, ...] = (1, 32, 256)


def every_operator() -> Iterator[Operator]:
    for name, rows in DATA.items():

        def query(n: int, seed: int, rows: Callable = rows) -> dict[str, np.ndarray]:
            return {"query": rows(n, 2 + seed)}

        few, many = rows(NEIGHBOURS, 1), rows(1000, 1)
        # With as many points as neighbours there is next to no search; with one neighbour next to no solve.
        yield Operator("GapaActivation, M = 50", name, lambda few=few: exact(few), query)
        yield Operator("GapaActivation, M = 1000", name, lambda many=many: exact(many), query)
        yield Operator(
            "GapaActivationLocal, M = 1000", name, lambda many=many: local(many, NEIGHBOURS), query
        )
        yield Operator("GapaActivationLocal, M = 1000, K = 1", name, lambda many=many: local(many, 1), query)
    for shape, points, batches in (((1, 10), 16, (1, 32, 256)), ((1, 1000), 32, (1, 32))):

        def logits(n: int, seed: int, shape: tuple = shape) -> dict[str, np.ndarray]:
            rng = np.random.default_rng(seed)
            mean = 3 * rng.normal(size=(n, *shape[1:])).astype(np.float32)
            return {"mean": mean, "var": rng.random(mean.shape).astype(np.float32), "output": mean}

        yield Operator(
            f"GapaClasses, {shape[1]} classes",
            "random",
            lambda s=shape, p=points: classes(s, p),
            logits,
            batches,
        )


def operators(folder: Path, fresh: bool, quick: bool) -> None:
    lines = Lines(folder / "native_operators.csv", ("operator", "rows", "batch"), fresh=fresh)
    for operator in every_operator():
        batches = operator.batches[-1:] if quick else operator.batches
        wanted = [batch for batch in batches if not lines.has(operator.name, operator.rows, batch)]
        model = operator.make() if wanted else None
        for batch in wanted:
            counted = batch == COUNTED_BATCH and not quick
            lines.add(
                {
                    "operator": operator.name,
                    "rows": operator.rows,
                    "batch": batch,
                    **cpu_us(model, operator, batch, rounds=6 if quick else 30),
                    "instructions": instructions(model, operator, batch) if counted else "",
                    **machine(),
                }
            )


def cpu_us(model: onnx.ModelProto, operator: Operator, batch: int, rounds: int) -> dict[str, float]:
    """CPU time per row, over runs of eight batches."""
    running = opened(model, threads=1)
    feeds = [operator.feeds(batch, seed) for seed in range(8)]
    repeats = max(1, 512 // (batch * len(feeds)))
    times = []
    for _ in range(rounds + 1):  # the first warms up
        started = time.process_time()
        for _ in range(repeats):
            for feed in feeds:
                running.run(None, feed)
        times.append((time.process_time() - started) / (repeats * len(feeds) * batch) * 1e6)
    return {"cpu_us": round(statistics.median(times[1:]), 2), "cpu_us_least": round(min(times[1:]), 2)}


COUNTED_RUNS = """
import sys, numpy, onnxruntime
model, library, feeds, runs = sys.argv[1:]
options = onnxruntime.SessionOptions()
options.intra_op_num_threads = 1
options.register_custom_ops_library(library)
session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
with numpy.load(feeds) as arrays:
    feed = dict(arrays)
session.run(None, feed)
print("ready", flush=True)
sys.stdin.readline()
for _ in range(int(runs)):
    session.run(None, feed)
print("done", flush=True)
sys.stdin.readline()
"""
RUNS = 4


def instructions(model: onnx.ModelProto, operator: Operator, batch: int) -> int | str:
    """Instructions per row that the library itself executes; those of onnxruntime around it differ from run to run."""
    if shutil.which("valgrind") is None:
        say("  no valgrind, so instructions are not counted")
        return ""
    with tempfile.TemporaryDirectory() as folder:
        path, feeds = Path(folder) / "model.onnx", Path(folder) / "feeds.npz"
        onnx.save(model, path)
        np.savez(feeds, **operator.feeds(batch, 0))
        return round(count(path, feeds, Path(folder) / "counted") / (RUNS * batch))


def count(path: Path, feeds: Path, counted: Path) -> int:
    """Instructions of some runs; counting is switched on and off around them, so that only they are slow."""
    call = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={counted}"]
    call += [sys.executable, "-c", COUNTED_RUNS, str(path), str(library_path()), str(feeds), str(RUNS)]
    environment = os.environ | {"GAPA_ONNX_ISA": COUNTED, "OMP_NUM_THREADS": "1"}
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(call, env=environment, text=True, **pipes) as process:
        for state in ("on", "off"):
            if not process.stdout.readline():
                sys.exit(process.stderr.read())
            switch = ["callgrind_control", "-i", state, str(process.pid)]
            subprocess.run(switch, check=True, capture_output=True)
            process.stdin.write("go\n")
            process.stdin.flush()
        process.stderr.read()
    listing = ["callgrind_annotate", "--threshold=100", "--auto=no", str(counted)]
    lines = subprocess.run(listing, check=True, capture_output=True, text=True).stdout.splitlines()
    ours = [line for line in lines if line.endswith(f"{library_path().name}]")]
    return sum(int(line.split()[0].replace(",", "")) for line in ours)


if __name__ == "__main__":
    raise SystemExit(main())

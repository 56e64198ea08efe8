"""What the native operator costs: exact search and solve beside faiss-cpu, and per query at small sizes.

    python benchmarks/native_kernel.py [--quick]

All figures are ratios or CPU time per query (`process_time`, so that waiting for a core does not count; a core
shared with another process still does). The comparison runs A, B, A, … in one process on two threads, then on one (on
a busy machine FAISS's waiting threads spin, which its CPU time then holds): A is
GapaActivation over all points (search *and* solve), B is `faiss.IndexFlatL2.search` alone. Beside it stands the
control, A against A of the same rounds; `control_holds` says whether it read 1.00 ± 0.03.

The OpenBLAS inside faiss-cpu does not know every CPU and may fall back to old instructions, which would flatter us.
So each comparison runs twice, in processes of their own: as installed, and with OPENBLAS_CORETYPE naming the best
core type that this CPU can run. Results go to benchmarks/results/native_kernel.json.

Two more tables, one thread: GapaActivationLocal at 1000 points (with as many neighbours as the others, and with
one, which is next to nothing but the search), and GapaClasses per row.

    python benchmarks/native_kernel.py --only local split      # these alone; no file
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import faiss
import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from gapa_onnx.op.contract import CLASSES, DOMAIN, SCHEMAS, VERSION, OpSchema
from gapa_onnx.runtime import library_path, session

RESULTS = Path(__file__).parent / "results"
DIM, NEIGHBOURS = 200, 50
BLAS_CORE = "OPENBLAS_CORETYPE"


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


def one_node(
    schema: OpSchema, constants: dict[str, np.ndarray], inputs: dict[str, tuple], threads: int
) -> ort.InferenceSession:
    """A session of one node; `inputs` are the shapes of those that are not constant."""
    outputs = [port.name for port in schema.outputs]
    node = helper.make_node(schema.name, [port.name for port in schema.inputs], outputs, domain=DOMAIN)
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [
            helper.make_tensor_value_info(
                port.name, helper.np_dtype_to_tensor_dtype(np.dtype(port.dtype)), None
            )
            for port in schema.outputs
        ],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # A thread that spins while the other side is measured would be charged to it.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return session(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString(), options)


def operator(points: np.ndarray, threads: int) -> ort.InferenceSession:
    """A session of one GapaActivation node."""
    constants = {
        "k": np.array([min(NEIGHBOURS, len(points))], np.int64),
        "length_scale": length_scale(points),
        "jitter": np.array(1e-6, np.float32),
        "points": points,
    }
    return one_node(SCHEMAS["flat"], constants, {"query": ("n", DIM)}, threads)


def local_operator(points: np.ndarray, neighbours: int, lists: int, nprobe: int) -> ort.InferenceSession:
    """A session of one GapaActivationLocal node; one list makes the search exact."""
    offsets, centroids = [0, len(points)], points.mean(axis=0, keepdims=True)
    if lists > 1:
        means = faiss.Kmeans(DIM, lists, niter=10, seed=1, min_points_per_centroid=1)
        means.train(points)
        centroids = means.centroids
        of_point = means.index.search(points, 1)[1][:, 0]
        points = points[np.argsort(of_point, kind="stable")]
        offsets = np.searchsorted(np.sort(of_point), np.arange(lists + 1))
    index = faiss.IndexFlatL2(DIM)
    index.add(points)
    constants = {
        "k": np.array([neighbours], np.int64),
        "length_scale": length_scale(points),
        "jitter": np.array(1e-6, np.float32),
        "points": points,
        "neighbourhoods": index.search(points, neighbours)[1].astype(np.int32),
        "centroids": centroids,
        "list_offsets": np.array(offsets, np.int64),
        "nprobe": np.array([nprobe], np.int64),
    }
    return one_node(SCHEMAS["local"], constants, {"query": ("n", DIM)}, threads=1)


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU seconds."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - cpu


def against_faiss(
    rows: Callable[[int, int], np.ndarray], count: int, queries: int, rounds: int, threads: int
) -> dict:
    points, query = rows(count, 1), rows(queries, 2)
    running = operator(points, threads)
    index = faiss.IndexFlatL2(DIM)
    index.add(points)
    faiss.omp_set_num_threads(threads)
    _, neighbours = running.run(None, {"query": query[:200]})
    _, theirs = index.search(query[:200], NEIGHBOURS)
    ours, again, faiss_only = [], [], []
    for _ in range(rounds):
        ours.append(clocked(lambda: running.run(None, {"query": query})))
        faiss_only.append(clocked(lambda: index.search(query, NEIGHBOURS)))
        again.append(clocked(lambda: running.run(None, {"query": query})))

    def ratio(top: list, bottom: list, clock: int) -> dict:
        quotients = [a[clock] / b[clock] for a, b in zip(top, bottom)]
        return {"median": round(statistics.median(quotients), 3), "all": [round(q, 3) for q in quotients]}

    controls = [ratio(again, ours, clock) for clock in (0, 1)]
    return {
        "points": count,
        "queries": queries,
        "threads": threads,
        "blas_core": os.environ.get(BLAS_CORE, "as installed"),
        "search_and_solve_over_faiss_search_wall": ratio(ours, faiss_only, 0),
        "search_and_solve_over_faiss_search_cpu": ratio(ours, faiss_only, 1),
        "control_a_over_a_wall": controls[0],
        "control_a_over_a_cpu": controls[1],
        "control_holds": all(abs(control["median"] - 1) <= 0.03 for control in controls),
        "cpu_us_per_query": round(statistics.median(a[1] for a in ours) / queries * 1e6, 1),
        "faiss_cpu_us_per_query": round(statistics.median(b[1] for b in faiss_only) / queries * 1e6, 1),
        "same_neighbours_as_faiss": round(float((neighbours == theirs).mean()), 5),
    }


def best_blas_core() -> str:
    return "SkylakeX" if "avx512f" in cpu_description() else "Haswell"


def cpu_description() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


def compared(name: str, blas_core: str | None, quick: bool) -> list[dict]:
    """`against_faiss` in a process of its own: OpenBLAS reads its core type once."""
    command = [sys.executable, __file__, "--compare", name, *(["--quick"] if quick else [])]
    environment = os.environ | ({BLAS_CORE: blas_core} if blas_core else {})
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout)


def cpu_us(running: ort.InferenceSession, feeds: list[dict], rows: int, rounds: int) -> dict:
    """CPU time per row, over runs of all feeds; `rows` is how many are in one."""
    repeats = max(1, 512 // (rows * len(feeds)))
    for feed in feeds:
        running.run(None, feed)
    times = []
    for _ in range(rounds):
        _, cpu = clocked(lambda: [running.run(None, feed) for _ in range(repeats) for feed in feeds])
        times.append(cpu / (repeats * len(feeds) * rows) * 1e6)
    return {"cpu_us_median": round(statistics.median(times), 2), "cpu_us_least": round(min(times), 2)}


def per_query(rows: Callable[[int, int], np.ndarray], count: int, batch: int, rounds: int) -> dict:
    """One thread. With as many points as neighbours there is next to no search: that is the solve."""
    feeds = [{"query": rows(batch, seed)} for seed in range(2, 10)]
    return {"points": count, "batch": batch} | cpu_us(
        operator(rows(count, 1), threads=1), feeds, batch, rounds
    )


def local_per_query(rows: Callable[[int, int], np.ndarray], rounds: int) -> list[dict]:
    found = []
    for neighbours, lists, nprobe in [(k, *of) for k in (NEIGHBOURS, 1) for of in ((1, 1), (32, 2), (64, 3))]:
        running = local_operator(rows(1000, 1), neighbours, lists, nprobe)
        for batch in (1, 32, 256):
            feeds = [{"query": rows(batch, seed)} for seed in range(2, 10)]
            case = {"k": neighbours, "lists": lists, "nprobe": nprobe, "batch": batch}
            found.append(case | cpu_us(running, feeds, batch, rounds))
    return found


def split_per_row(rounds: int) -> list[dict]:
    """Random logits; the number of points as in converted files."""
    rng = np.random.default_rng(0)
    found = []
    for shape, count in (
        ((1, 10), 16),
        ((256, 10), 16),
        ((4096, 10), 16),
        ((1, 21, 128, 128), 16),
        ((64, 1000), 32),
    ):
        feed = {
            "mean": 3 * rng.normal(size=shape).astype(np.float32),
            "var": rng.random(shape).astype(np.float32),
        }
        feed["output"] = feed["mean"]
        constants = {
            "points": rng.normal(size=(count, shape[1])).astype(np.float32),
            "axis": np.array([1], np.int64),
        }
        running = one_node(CLASSES, constants, {name: shape for name in feed}, threads=1)
        rows = int(np.prod(shape)) // shape[1]
        found.append({"shape": shape, "points": count} | cpu_us(running, [feed], rows, rounds))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a tenth of the queries, few rounds, no file")
    parser.add_argument(
        "--compare", choices=DATA, help="only this comparison, as JSON (for the program itself)"
    )
    parser.add_argument("--only", choices=("local", "split"), nargs="+", help="only these tables; no file")
    arguments = parser.parse_args()
    quick = arguments.quick
    if library_path() is None:
        print("the native library is not built", file=sys.stderr)
        return 1
    queries, rounds = (1000, 3) if quick else (10_000, 5)
    if arguments.compare:
        rows = DATA[arguments.compare]
        print(json.dumps([against_faiss(rows, 55_000, queries, rounds, threads) for threads in (2, 1)]))
        return 0
    if arguments.only:
        if "local" in arguments.only:
            for name, rows in DATA.items():
                for row in local_per_query(rows, rounds * 6):
                    print("local", name, json.dumps(row), flush=True)
        if "split" in arguments.only:
            for row in split_per_row(rounds * 6):
                print("split", json.dumps(row), flush=True)
        return 0
    report = {
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load_before": [round(x, 1) for x in os.getloadavg()],
        },
        "versions": {
            "python": platform.python_version(),
            "onnxruntime": ort.__version__,
            "faiss": faiss.__version__,
            "numpy": np.__version__,
            "isa": os.environ.get("GAPA_ONNX_ISA", "as the CPU allows"),
        },
        "d": DIM,
        "k": NEIGHBOURS,
    }
    for name, rows in DATA.items():
        cores = (None, best_blas_core())
        report[name] = {"against_faiss": [found for core in cores for found in compared(name, core, quick)]}
        for comparison in report[name]["against_faiss"]:
            print(name, json.dumps(comparison), flush=True)
        report[name]["per_query"] = [
            per_query(rows, count, batch, rounds * 3)
            for count, batch in ((NEIGHBOURS, 256), (1000, 1), (1000, 32), (1000, 256))
        ]
        print(name, json.dumps(report[name]["per_query"]), flush=True)
        report[name]["local"] = local_per_query(rows, rounds * 6)
        print(name, json.dumps(report[name]["local"]), flush=True)
    report["split"] = split_per_row(rounds * 6)
    print("split", json.dumps(report["split"]), flush=True)
    report["machine"]["load_after"] = [round(x, 1) for x in os.getloadavg()]
    if not quick:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / "native_kernel.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


def cpu_name() -> str:
    names = [line for line in cpu_description().splitlines() if line.startswith("model name")]
    return names[0].split(":", 1)[1].strip() if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())

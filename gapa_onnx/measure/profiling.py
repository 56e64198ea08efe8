"""Where the time of a converted file goes, by onnxruntime's own profiler.

    source       nodes of the source model
    search       the sites' operators with one neighbour in place of K: an estimate
    solve        the rest of what these operators take
    propagation  from the sites' answers to the variances of the outputs
    heads        what only probabilities, scores and flags need

The profiler's overhead is on every node, so small nodes look larger than they are. Where the portable function
runs, for want of the native library or because it is older than the file, search and solve are one part.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from gapa_onnx.arrays import Array
from gapa_onnx.model.protos import duplicate
from gapa_onnx.op.contract import DOMAIN, SCHEMAS
from gapa_onnx.record import read
from gapa_onnx.sessions.inference import run_batch
from gapa_onnx.sessions.runtime import open_session, register, session_options

SOURCE, SITES, SEARCH, SOLVE, PROPAGATION, HEADS = (
    "source", "search + solve", "search", "solve", "propagation", "heads",
)  # fmt: skip
WARM_UP = 2
RUNS = (7, 100)
SECONDS = 0.5  # that the runs take, where their number allows

_OPERATORS = {schema.name for schema in SCHEMAS.values()}

Batch = Mapping[str, Array]
Event = Mapping[str, Any]


def open_quiet(
    model: onnx.ModelProto, threads: int, native: bool = True, profile: Path | None = None
) -> ort.InferenceSession:
    """A session whose threads do not spin, with the native library where there is one and it is wanted."""
    options = session_options(threads=threads)
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    if native:
        register(options)
    return open_session(model, "the model", options)


def split(
    source: onnx.ModelProto, converted: onnx.ModelProto, feeds: Batch, threads: int
) -> dict[str, float]:
    """Seconds of one run of the converted model by part."""
    groups = node_groups(source, converted)
    parts, native = _profiled(converted, groups, feeds, threads)
    parts = dict.fromkeys((SOURCE, SITES, PROPAGATION, HEADS), 0.0) | parts
    if not native:
        return parts
    whole = parts.pop(SITES)
    fewer, _ = _profiled(with_one_neighbour(converted), groups, feeds, threads)
    search = min(whole, fewer.get(SITES, 0.0))
    return {SOURCE: parts.pop(SOURCE), SEARCH: search, SOLVE: whole - search, **parts}


def added_shares(parts: Mapping[str, float]) -> dict[str, float]:
    """Of all parts but the source's own nodes; they add up to 1."""
    added = {name: seconds for name, seconds in parts.items() if name != SOURCE}
    total = sum(added.values())
    return {name: seconds / total for name, seconds in added.items()} if total else {}


def node_groups(source: onnx.ModelProto, converted: onnx.ModelProto) -> dict[str, str]:
    """The part that each added node belongs to, by name; nodes of the source are not in it."""
    own = {name for node in source.graph.node for name in node.output}
    added = [node for node in converted.graph.node if not set(node.output) & own]
    record = read(converted)
    needed = {
        name
        for head in (record.heads.values() if record else ())
        for role, name in head.outputs.items()
        if role in ("var", "cov", "token_var")
    }
    groups = {}
    for node in reversed(added):
        for_variance = bool(needed & set(node.output))
        if for_variance:
            needed.update(node.input)
        is_site = node.domain == DOMAIN and node.op_type in _OPERATORS
        groups[node.name] = SITES if is_site else PROPAGATION if for_variance else HEADS
    return groups


def with_one_neighbour(converted: onnx.ModelProto) -> onnx.ModelProto:
    """The same model, whose sites search for one neighbour only."""
    schemas = {schema.name: [port.name for port in schema.inputs] for schema in SCHEMAS.values()}
    counts = {
        node.input[schemas[node.op_type].index("k")]
        for node in converted.graph.node
        if node.domain == DOMAIN and node.op_type in schemas
    }

    def weight(tensor: onnx.TensorProto) -> onnx.TensorProto:
        one = np.array([1], np.int64)
        return onnx.numpy_helper.from_array(one, tensor.name) if tensor.name in counts else tensor

    return duplicate(converted, weight)


# ------------------------------------------------------------------------- events


def _profiled(
    model: onnx.ModelProto, groups: Mapping[str, str], feeds: Batch, threads: int
) -> tuple[dict[str, float], bool]:
    """Seconds by part, and whether the sites' operators ran as such, not as functions."""
    with tempfile.TemporaryDirectory(prefix="gapa-onnx-") as folder:
        opened = open_quiet(model, threads, profile=Path(folder) / "profile")
        names = [value.name for value in opened.get_outputs()]
        fed = {value.name: feeds[value.name] for value in opened.get_inputs() if value.name in feeds}
        for _ in range(WARM_UP):
            started = time.perf_counter()
            run_batch(opened, names, fed)
        taken = time.perf_counter() - started
        for _ in range(int(min(max(SECONDS / taken, RUNS[0]), RUNS[1]))):
            run_batch(opened, names, fed)
        events = json.loads(Path(opened.end_profiling()).read_text())
    runs = sorted((event for event in events if event["name"] == "model_run"), key=lambda event: event["ts"])
    nodes = [event for event in events if event["cat"] == "Node" and event["name"].endswith("_kernel_time")]
    inlined = any(_called(event["name"]) in _OPERATORS for event in nodes)
    return seconds_by_part(nodes, runs[WARM_UP:], groups), not inlined


def seconds_by_part(
    nodes: Iterable[Event], runs: Sequence[Event], groups: Mapping[str, str]
) -> dict[str, float]:
    """Medians over runs of the seconds that nodes take, part by part.

    Nodes inside the body of a loop or a branch are events too, within the time of the node that runs the
    body; only what that one takes by itself counts for it, and what has no name of its own goes with it.
    """
    totals: list[dict[str, float]] = [{} for _ in runs]
    open_nodes: list[tuple[float, str]] = []  # (end, part), outermost first
    for event in sorted(nodes, key=lambda event: (event["ts"], -event["dur"])):
        run = _run_of(event, runs)
        if run is None:
            continue
        while open_nodes and open_nodes[-1][0] < event["ts"] + event["dur"]:
            open_nodes.pop()
        outer = open_nodes[-1][1] if open_nodes else None
        part = _part(event["name"].removesuffix("_kernel_time"), groups) or outer or SOURCE
        totals[run][part] = totals[run].get(part, 0.0) + event["dur"] * 1e-6
        if outer is not None:
            totals[run][outer] -= event["dur"] * 1e-6
        open_nodes.append((event["ts"] + event["dur"], part))
    names = dict.fromkeys(name for total in totals for name in total)
    return {name: statistics.median(total.get(name, 0.0) for total in totals) for name in names}


def _run_of(event: Event, runs: Sequence[Event]) -> int | None:
    """Which run an event is in; None between runs, and where it warms up."""
    within = (i for i, run in enumerate(runs) if run["ts"] <= event["ts"] < run["ts"] + run["dur"])
    return next(within, None)


def _part(name: str, groups: Mapping[str, str]) -> str | None:
    """Of a node as onnxruntime calls it: fusions and inlined functions carry the old name inside the new one."""
    if name in groups:
        return groups[name]
    if _called(name) is not None:
        return SITES if _called(name) in _OPERATORS else HEADS
    within = [old for old in groups if old and old in name]
    return groups[max(within, key=len)] if within else None


def _called(name: str) -> str | None:
    """The function that a node comes from, where onnxruntime has put it in place of a call."""
    return name.removeprefix("_inlfunc_").split("_")[0] if name.startswith("_inlfunc_Gapa") else None

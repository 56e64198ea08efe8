"""The cost of a converted file: statistics by a clock of our own, parts by hand-made events, never real time."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper
from support.paths import MODELS

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.data import InputSpec
from gapa_onnx.errors import UserError
from gapa_onnx.measure import bench, profiling
from gapa_onnx.measure.feeds import first_rows, fixed_batch, made_up
from gapa_onnx.model.load import load
from gapa_onnx.record import read
from gapa_onnx.sessions.runtime import library_path

SOURCE = MODELS / "digits_mlp.onnx"
DATA = MODELS / "digits_mlp_heldout.npz"


@pytest.fixture(scope="module")
def converted(digits_file) -> Path:
    return digits_file


class Clock:
    """Runs only while something is run."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def taking(self, *seconds: float):
        turns = itertools.cycle(seconds)

        def run() -> None:
            self.now += next(turns)

        return run


# ---------------------------------------------------------------------- statistics


def test_ratio_and_control_are_medians_over_rounds():
    clock = Clock()
    runs = [clock.taking(0.1), clock.taking(0.101), clock.taking(0.2, 0.2, 0.2, 0.9, 0.2)]
    found = bench.compare(itertools.repeat(runs), clock, rounds=30)
    assert found.control == pytest.approx(1.01) and found.sound
    assert found.ratio == pytest.approx(0.2 / 0.1005)
    assert found.rounds == 36  # 10 for each of three openings, filled up to all orders
    assert 0.1 <= found.source_seconds <= 0.101 and found.converted_seconds == pytest.approx(0.2)


def test_short_runs_are_repeated_within_a_reading():
    clock, counted = Clock(), [0, 0, 0]

    def counting(position: int, seconds: float):
        take = clock.taking(seconds)

        def run() -> None:
            counted[position] += 1
            take()

        return run

    runs = [counting(0, 1e-4), counting(1, 1e-4), counting(2, 1.0)]
    found = bench.compare(itertools.repeat(runs), clock, rounds=6)
    assert found.ratio == pytest.approx(1e4)
    before = bench.LOADS * (bench.WARM_UP + 1)
    readings = found.rounds
    assert counted[2] == before + readings
    assert counted[0] == counted[1] == pytest.approx(before + 20 * readings, abs=readings)  # 2 ms by 0.1 ms


def test_a_drifting_machine_does_not_move_the_ratio():
    """All three slow down together, eightfold in the end: ratios within a round hardly notice."""
    clock = Clock()

    def slowing(seconds: float):
        def run() -> None:
            clock.now += seconds * 2 ** (clock.now / 1000)

        return run

    runs = [slowing(1.0), slowing(1.0), slowing(2.0)]
    found = bench.compare(itertools.repeat(runs), clock, rounds=300)
    assert found.ratio == pytest.approx(2.0, rel=0.01) and found.control == pytest.approx(1.0, abs=0.01)


def test_every_order_occurs_equally_often():
    clock, called = Clock(), []

    def naming(position: int):
        def run() -> None:
            called.append(position)
            clock.now += 1.0

        return run

    bench.compare(itertools.repeat([naming(p) for p in range(3)]), clock, rounds=18)
    warm = 3 * (bench.WARM_UP + 1)
    first_load = called[warm : warm + 18]
    orders = [tuple(first_load[i : i + 3]) for i in range(0, 18, 3)]
    assert sorted(orders) == sorted(itertools.permutations(range(3)))


def test_a_control_that_is_off_is_tried_again_with_more_rounds_and_refused():
    clock = Clock()
    runs = [clock.taking(0.1), clock.taking(0.104), clock.taking(0.2)]
    openings = itertools.count()

    def opened():
        while True:
            next(openings)
            yield runs

    found = bench.compare(opened(), clock, rounds=18)
    assert not found.sound and found.control == pytest.approx(1.04)
    assert next(openings) == bench.ATTEMPTS * bench.LOADS
    assert found.rounds == 18 * 2 ** (bench.ATTEMPTS - 1) // 6 * 6
    refusal = bench.Refusal(256, 1, found)
    assert "1.04 instead of 1.00" in refusal.reason and "not given" in refusal.reason


def test_a_second_attempt_may_do():
    clock = Clock()
    busy = [clock.taking(0.1), clock.taking(0.2), clock.taking(0.2)]
    calm = [clock.taking(0.1), clock.taking(0.1), clock.taking(0.2)]
    found = bench.compare(itertools.chain([busy] * bench.LOADS, itertools.repeat(calm)), clock, rounds=6)
    assert found.sound and found.ratio == pytest.approx(2.0)


def test_measure_refuses_when_the_clock_says_so(converted, monkeypatch):
    """Every reading of the control, whatever its place in the round, takes longer than the source's."""
    times = itertools.cycle([1.0])
    clock = Clock()

    def fake_run(model, feeds, threads, native):
        assert native
        number = next(opened)
        return clock.taking({0: 1.0, 1: 1.5, 2: 2.0}[order[number % len(order)]] * next(times))

    order = list(itertools.chain(*bench.ORDERS))  # as `measure_on` opens them
    opened = itertools.count()
    monkeypatch.setattr(bench, "_run", fake_run)
    feeds = made_up(load(SOURCE).inputs, 4)
    model = onnx.load(SOURCE)
    found = bench.measure_on(model, onnx.load(converted), feeds, rounds=6, clock=clock)
    assert isinstance(found, bench.Refusal) and found.comparison.control == pytest.approx(1.5)


def test_without_the_library_portable_functions_are_measured(converted):
    """A file that can only be run by the library is not run without it."""
    stripped = onnx.load(converted)
    del stripped.functions[:]
    if library_path() is None:
        pytest.skip("the native library is not built")
    feeds = made_up(load(SOURCE).inputs, 4)
    bench._run(stripped, feeds, 1)()
    with pytest.raises(UserError, match="not a registered function"):
        bench._run(stripped, feeds, 1, native=False)


# --------------------------------------------------------------------------- parts


def _event(name: str, start: float, duration: float) -> dict:
    return {"name": f"{name}_kernel_time", "cat": "Node", "ts": start, "dur": duration}


def test_parts_add_up_and_bodies_count_once():
    groups = {"h/gapa/share": profiling.SITES, "y_var": profiling.PROPAGATION, "y/split/1": profiling.HEADS}
    nodes = [
        _event("fused z1", 0, 10),
        _event("h/gapa/share", 10, 50),
        _event("loop", 60, 30),  # of the source, with two nodes inside
        _event("inside", 62, 10),
        _event("", 75, 10),
        _event("fused y_var", 90, 4),  # renamed by a fusion
        _event("y/split/1", 94, 6),
        _event("z1", -50, 20),  # of a run that does not count
    ]
    parts = profiling.seconds_by_part(nodes, [{"ts": 0, "dur": 100}], groups)
    assert sum(parts.values()) == pytest.approx(100e-6)
    assert parts == pytest.approx(
        {"source": 40e-6, "search + solve": 50e-6, "propagation": 4e-6, "heads": 6e-6}
    )
    shares = profiling.added_shares(parts)
    assert sum(shares.values()) == pytest.approx(1) and shares["heads"] == pytest.approx(0.1)


def test_parts_inside_the_body_of_an_added_node_belong_to_it():
    nodes = [
        _event("_inlfunc_GapaActivationIVF_loop", 0, 30),
        _event("Gather", 2, 5),
        _event("z", 30, 10),
        _event("_inlfunc_GapaClasses_exp_1", 40, 20),
    ]
    parts = profiling.seconds_by_part(nodes, [{"ts": 0, "dur": 100}], {})
    assert parts == pytest.approx({"search + solve": 30e-6, "source": 10e-6, "heads": 20e-6})


def test_medians_over_runs():
    nodes = [_event("z", start, dur) for start, dur in ((0, 1), (100, 2), (200, 90))]
    runs = [{"ts": start, "dur": 100} for start in (0, 100, 200)]
    assert profiling.seconds_by_part(nodes, runs, {}) == pytest.approx({"source": 2e-6})


def test_every_added_node_has_a_part(converted):
    source, model = onnx.load(SOURCE), onnx.load(converted)
    groups = profiling.node_groups(source, model)
    names = {node.name for node in source.graph.node}
    assert set(groups) == {node.name for node in model.graph.node} - names
    assert sum(part == profiling.SITES for part in groups.values()) == 2
    outputs = next(iter(read(model).heads.values())).outputs
    made = {output: node.name for node in model.graph.node for output in node.output}
    assert groups[made[outputs["var"]]] == profiling.PROPAGATION
    assert groups[made[outputs["probs"]]] == groups[made[outputs["ood"]]] == profiling.HEADS


def test_split_of_a_real_run(converted, monkeypatch):
    feeds = made_up(load(SOURCE).inputs, 8)
    models = onnx.load(SOURCE), onnx.load(converted)
    parts = profiling.split(*models, feeds, 1)
    two = {profiling.SEARCH, profiling.SOLVE} if gapa_onnx.library_path() else {profiling.SITES}
    assert set(parts) == {profiling.SOURCE, profiling.PROPAGATION, profiling.HEADS} | two
    assert all(seconds >= 0 for seconds in parts.values()) and parts[profiling.SOURCE] > 0
    monkeypatch.setenv("GAPA_ONNX_LIBRARY", "")
    portable = profiling.split(*models, feeds, 1)  # as where the library is missing, or too old
    assert portable[profiling.SITES] > portable[profiling.SOURCE]  # dozens of nodes against three layers


def test_one_neighbour(converted):
    model = onnx.load(converted)
    changed = profiling.with_one_neighbour(model)
    before, after = (
        {t.name: numpy_helper.to_array(t) for t in m.graph.initializer} for m in (model, changed)
    )
    different = [name for name in before if not np.array_equal(before[name], after[name])]
    assert len(different) == 2  # one k for each site
    assert all(before[name].tolist() == [20] and after[name].tolist() == [1] for name in different)


# --------------------------------------------------------------------------- feeds


def test_inputs_are_made_up_to_fit():
    specs = [
        InputSpec("x", np.float32, ("n", 3, "t")),
        InputSpec("ids", np.int64, ("n", "t")),
        InputSpec("mask", bool, (None, "n")),
        InputSpec("scale", np.float64, ()),
        InputSpec("words", object, ("n",)),
    ]
    feeds = made_up(specs, 4)
    assert {name: array.shape for name, array in feeds.items()} == {
        "x": (4, 3, 1), "ids": (4, 1), "mask": (4, 4), "scale": (), "words": (4,)
    }  # fmt: skip
    assert all(feeds[spec.name].dtype == spec.dtype for spec in specs)
    assert not feeds["ids"].any() and feeds["mask"].all() and len(np.unique(feeds["x"])) == 12
    with pytest.raises(UserError, match="no declared shape"):
        made_up([InputSpec("x", np.float32, None)], 4)
    state = InputSpec("state", np.float32, (2, 1, 8))  # not batched, beside an input that is
    assert made_up([specs[0], state], 4)["state"].shape == (2, 1, 8)
    with pytest.raises(UserError, match="takes 1 row.s. at a time, not 4") as caught:
        made_up([InputSpec("x", np.float32, (1, 3)), state], 4)
    assert "`batch=1`" in caught.value.hint


def test_data_are_repeated_to_fill_a_batch():
    rows = np.arange(3 * 64, dtype=np.float32).reshape(3, 64)
    source = load(SOURCE)
    name = source.inputs[0].name
    feeds = first_rows({name: rows}, source, 8)
    np.testing.assert_array_equal(feeds[name], rows[[0, 1, 2, 0, 1, 2, 0, 1]])
    feeds = first_rows({name: rows}, source, 2)
    np.testing.assert_array_equal(feeds[name], rows[:2])


# -------------------------------------------------------------------- command line


def test_bench_prints_json(converted, capsys):
    code = main(["bench", str(SOURCE), str(converted), "--data", str(DATA), "--batch", "1,32", "--json"])
    answer = json.loads(capsys.readouterr().out)
    entries = answer["measurements"]
    assert [entry["batch"] for entry in entries] == [1, 32]
    assert answer["versions"]["onnxruntime"] and answer["machine"]["cores"]
    assert code == (1 if any(entry["refused"] for entry in entries) else 0)
    for entry in entries:  # what a busy machine makes of the control is not ours to say
        if entry["refused"]:
            assert "not given" in entry["refused"] and entry["ratio"] is None
        else:
            low, high = entry["ratio_quartiles"]
            assert low <= entry["ratio"] <= high and abs(entry["control"] - 1) <= bench.TOLERATED
            assert sum(entry["added"].values()) == pytest.approx(1)


@pytest.fixture
def measured(monkeypatch):
    """`measure` answers at once: batch 1 is refused."""
    comparison = bench.Comparison(2.5, 1.01, (2.4, 2.6), (0.99, 1.02), 1e-3, 2.5e-3, 30)
    parts = {"source": 1e-3, "search": 5e-4, "solve": 9e-4, "propagation": 0.0, "heads": 1e-4}

    def measure(source, out, *, batch, threads, **_):
        if batch == 1:
            off = bench.Comparison(2.5, 1.2, (2.4, 2.6), (1.1, 1.3), 1e-3, 2.5e-3, 120)
            return bench.Refusal(batch, threads, off)
        return bench.Measurement(batch, threads, comparison, "cpu", parts)

    monkeypatch.setattr(bench, "measure", measure)


def test_bench_prints_a_table(converted, capsys, measured):
    assert main(["bench", str(SOURCE), str(converted), "--batch", "32", "--threads", "1,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.strip().startswith("32")]
    expected = ["1.00", "ms", "2.50", "2.40", "…", "2.60", "1.010", "33%", "60%", "0%", "7%"]
    expected[0] = "1"
    assert rows == [["32", "1", *expected], ["32", "2", *expected]]


def test_bench_says_why_there_is_no_figure(converted, capsys, measured):
    assert main(["bench", str(SOURCE), str(converted), "--batch", "1,32"]) == 1
    said = capsys.readouterr()
    assert "refused" in said.out and "1.200" in said.out and said.out.count("2.50") == 1
    assert "1.20 instead of 1.00" in said.err and "end what else runs" in said.err


def _refused(capsys, *arguments: str) -> str:
    assert main(["bench", *arguments]) == 2
    text = capsys.readouterr().err
    assert text.startswith("error: ")
    return text


def test_bad_arguments_are_a_sentence(converted, tmp_path, capsys):
    source, out = str(SOURCE), str(converted)
    assert "--batch is 0" in _refused(capsys, source, out, "--batch", "32,0")
    assert "--threads is -1" in _refused(capsys, source, out, "--threads", "-1")
    assert "'all' is not a list of numbers" in _refused(capsys, source, out, "--batch", "all")
    assert "was not written by gapa-onnx" in _refused(capsys, source, source)
    assert "converted by gapa-onnx already" in _refused(capsys, out, source)
    assert "no such file" in _refused(capsys, source, str(tmp_path / "nothing.onnx"))
    other = str(MODELS / "digits_cnn.onnx")
    assert "was not converted from" in _refused(capsys, other, out)
    assert "error: " in _refused(capsys, source, out, "--data", str(tmp_path / "nothing.npz"), "--batch", "1")
    with pytest.raises(UserError, match="`batch` is 0"):
        bench.measure(SOURCE, converted, batch=0)


def test_a_model_that_made_up_inputs_do_not_fit(tmp_path):
    """Two free axes of one name in truth, declared with different ones."""
    value = helper.make_tensor_value_info
    weight = numpy_helper.from_array(np.ones((5, 3), np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["z"]), helper.make_node("Tanh", ["z"], ["y"])]
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["n", "t"])], [value("y", 1, ["n", 3])], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    rows = np.random.default_rng(0).standard_normal((60, 5)).astype(np.float32)
    out = gapa_onnx.convert(model, {"x": rows}, m=10, k=5).model
    with pytest.raises(UserError, match="failed on inputs that were made up") as caught:
        bench.measure(model, out, batch=4)
    assert "`data`" in caught.value.hint
    found = bench.measure(load(model), out, batch=4, data={"x": rows}, rounds=6, parts=False)
    assert found.batch == 4 and found.comparison.rounds >= 6


def test_a_fixed_batch_is_measured_as_it_is(tmp_path, capsys, measured):
    proto = onnx.load(SOURCE)
    for entry in (*proto.graph.input, *proto.graph.output):
        entry.type.tensor_type.shape.dim[0].dim_value = 2
    onnx.save(proto, tmp_path / "fixed.onnx")
    gapa_onnx.convert(
        tmp_path / "fixed.onnx", MODELS / "digits_mlp_calibration.npz", tmp_path / "out.onnx", m=50
    )
    assert fixed_batch(load(tmp_path / "fixed.onnx").inputs) == 2
    assert fixed_batch(load(SOURCE).inputs) is None
    assert main(["bench", str(tmp_path / "fixed.onnx"), str(tmp_path / "out.onnx"), "--json"]) == 0
    assert [entry["batch"] for entry in json.loads(capsys.readouterr().out)["measurements"]] == [2]

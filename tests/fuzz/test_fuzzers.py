"""The fuzzers themselves: some cases of each, what has failed once, and that they find what they look for."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from random import Random

import numpy as np
import onnx
import pytest
from support.paths import ROOT

import gapa_onnx.cli
from fuzz import damage, files, operators, page, sources, stock, tally, workers

BUILT = {kind: ROOT / "build" / "fuzz" / kind / "gapa_fuzz" for kind in ("address", "thread")}


def program(kind: str) -> Path:
    if not BUILT[kind].exists():
        pytest.skip(
            f"there is no {BUILT[kind].relative_to(ROOT)}: `make fuzz` builds it, which takes minutes"
        )
    return BUILT[kind]


def test_the_stand_in_has_what_the_library_calls():
    """Every slot of ort_abi.h that runtime/src uses is in the stand-in, by number."""
    header = (ROOT / "runtime/include/gapa/ort_abi.h").read_text()
    slots = {
        name: number for number, name in re.findall(r"Slot<(\d+),[^;]*?>\s+(\w+)\{\}", header, re.DOTALL)
    }
    source = "".join(
        path.read_text() for path in (ROOT / "runtime/src").rglob("*") if path.suffix in (".cc", ".h", ".inc")
    )
    used = {slots[name] for name in re.findall(r"ort::(\w+)\(", source) if name in slots}
    offered = set(re.findall(r"put\((\d+),", (operators.NATIVE / "stand_in.cc").read_text()))
    assert len(used) > 15 and used <= offered


@pytest.mark.parametrize("kind", BUILT)
def test_operators_keep_their_promises(kind):
    threads = operators.THREADS if kind == "thread" else 0
    found, said = operators.run(program(kind), 0, 300, 30, threads, "avx2")
    assert said == ""
    for operator, outcomes in found["operators"].items():
        cases = sum(outcomes.values()) - outcomes["sound"]
        assert outcomes["computed"] >= max(outcomes["sound"], 0.3 * cases), operator


@pytest.mark.parametrize("seed", operators.seeds())
def test_what_failed_once_does_not_fail_again(seed):
    assert operators.run(program("address"), seed, 1, 60, 0, "avx2")[1] == ""


def test_a_seed_is_one_case():
    command = [program("address"), "--first", "7", "--count", "1", "--show"]
    once, again = (
        subprocess.run(command, capture_output=True, text=True, check=True).stderr for _ in range(2)
    )
    assert once == again and "Gapa" in once


def test_the_same_generator_does_the_same_damage():
    model = sources.source_models()["classifier"].SerializeToString()
    assert damage.some_bytes(model, Random(1)) == damage.some_bytes(model, Random(1))
    changed = []
    for _ in range(2):
        message = onnx.ModelProto.FromString(model)
        damage.a_message(message, Random(3))
        changed.append(message.SerializeToString())
    assert changed[0] == changed[1] != model


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    sources.prepare(folder)
    return folder


def test_damaged_sources_and_data_end_in_an_answer_or_a_sentence(sound):
    """Here only cases that onnxruntime does not see; a process of their own has those that it may die of."""
    ended = []
    for number in range(150):
        case = sources.Maker(sound, sound / "case", number).case()
        if ", model" in case.about or case.arguments[0] in ("convert", "evaluate", "verify"):
            continue
        ended.append(sources.outcome(case.arguments))
    assert [said for how, said in ended if how in sources.BROKEN] == []
    assert {how for how, _ in ended} >= {"0", "2"}


def test_damaged_files_are_refused_flagged_or_known(tmp_path):
    """A few in this process, in the release that is installed."""
    kinds = files.prepare(tmp_path)
    library = str(gapa_onnx.library_path() or "")
    with np.load(tmp_path / kinds[0]["feed"]) as feed:
        rows = dict(feed)
    ended = set()
    for number in range(60):
        random, kind = Random(number), kinds[number % len(kinds)]
        whole = (tmp_path / kind["file"]).read_bytes()
        before = stock.answers(tmp_path / kind["file"], library, kind["outputs"], rows)
        (tmp_path / "case.onnx").write_bytes(files.damaged(whole, "numbers", random))
        found = stock.answers(tmp_path / "case.onnx", library, kind["outputs"], rows)
        how = (
            found if isinstance(found, str) else stock.judged(found, kind, dict(zip(kind["outputs"], before)))
        )
        taken = files.accepts(tmp_path) if how.startswith("unsound") and "unsound" not in str(ended) else []
        assert not files.failed("numbers", how, taken), (number, how)
        ended.add(how)
    assert ended & {"unsound, flagged", "flagged"} and "refused at load" in ended


def test_a_trace_is_told_from_a_sentence(monkeypatch):
    def broken(arguments):
        raise RuntimeError("a defect")

    monkeypatch.setattr(gapa_onnx.cli, "main", broken)
    assert sources.outcome([])[0] == "trace"
    monkeypatch.setattr(gapa_onnx.cli, "main", lambda arguments: 2)
    assert sources.outcome([])[0] == "no sentence"


def test_a_worker_that_dies_is_told_and_replaced(tmp_path):
    worker = workers.Worker("python3", "fuzz.dying", str(tmp_path))
    try:
        assert worker.answer(1, 30) == ("", 1)
        ended, said = worker.answer(0, 30)
        assert ended == workers.DIED and "dying.py" in said
        assert worker.answer(2, 30) == ("", 2)
        assert worker.answer(-1, 0.5)[0] == workers.SLOW
        assert worker.answer(3, 30) == ("", 3)
    finally:
        worker.end()


def test_counts_survive_and_belong_to_their_code(tmp_path):
    path = tmp_path / "tally.json"
    counted = tally.resumed("some", "code", path)
    counted.count("row", "computed", 3)
    counted.cases = 3
    tally.keep("some", counted, path)
    tally.keep("other", tally.Tally("code", cases=9), path)
    again = tally.resumed("some", "code", path)
    assert (again.cases, again.total("computed")) == (3, 3)
    other = tally.resumed("some", "other code", path)
    assert (other.cases, other.before, other.table) == (0, 3, {})
    assert json.loads(path.read_text())["other"]["cases"] == 9


def test_the_page_is_that_of_the_record():
    assert page.PAGE.read_text(encoding="utf-8") == page.page(
        json.loads(page.RECORD.read_text(encoding="utf-8"))
    )

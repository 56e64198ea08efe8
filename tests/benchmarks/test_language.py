"""What the scripts about language models measure, on a tiny decoder."""

from __future__ import annotations

import csv
import importlib
import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.decoders import decoder, token_rows
from support.paths import BENCHMARKS

LANGUAGE = BENCHMARKS / "paper" / "language"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="memory is read from /proc")
def test_a_conversion_is_measured_step_by_step(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(LANGUAGE))
    monkeypatch.delitem(sys.modules, "conversion", raising=False)
    import conversion

    path = tmp_path / "decoder.onnx"
    onnx.save(decoder(blocks=1), path)
    rows = token_rows(24, 8)
    figures = conversion.measured(path, rows, tmp_path / "out.onnx", m=50, k=5)
    assert list(figures["steps"]) == list(conversion.STEPS) and figures["failed"] == []
    steps = figures["steps"].values()
    assert sum(step["seconds"] for step in steps) <= figures["seconds"]
    assert sum(step["cpu"] for step in steps) <= figures["cpu"] + 0.1  # the clock of the CPU is coarse
    assert max(step["peak"][0] for step in steps) <= figures["peak"] * 1.01  # which is told in kilobytes
    assert figures["rows"] == 24
    read = list(figures.pop("fed").batches(figures["batch"]))
    assert sum(len(batch["input_ids"]) for batch in read) == 24
    figures |= conversion.forward(path, read)
    assert 0 < figures["forward_peak"][1] < figures["forward_peak"][0]
    lines = list(conversion.told(figures))
    assert [line.split()[0] for line in lines] == [*conversion.STEPS, "all", "forward"]
    assert conversion.compiler.load.__name__ == "load"  # nothing is watched any more


@pytest.fixture
def module(monkeypatch):
    """Modules of the benchmark by name."""
    for folder in (BENCHMARKS, BENCHMARKS / "paper"):
        monkeypatch.syspath_prepend(str(folder))
    yield lambda name: importlib.import_module(f"language.{name}")


def test_auroc_counts_pairs_and_weights_are_repetitions(module):
    judging = module("judging")
    generator = np.random.default_rng(0)
    known, strange = (generator.integers(0, 6, n).astype(float) for n in (30, 40))
    pairs = np.sign(strange[:, None] - known[None, :])
    assert judging.auroc(known, strange) == pytest.approx((pairs + 1).mean() / 2, abs=1e-12)
    weights = generator.integers(0, 4, (3, 70)).astype(float)
    found = judging.weighted_auroc(known, strange, weights[:, :30], weights[:, 30:])
    for row, value in zip(weights.astype(int), found):
        repeated = judging.auroc(np.repeat(known, row[:30]), np.repeat(strange, row[30:]))
        assert value == pytest.approx(repeated, abs=1e-12)


def test_errors_grow_where_documents_are_few(module):
    judging = module("judging")
    generator = np.random.default_rng(1)
    effects = generator.standard_normal(10)
    few = np.repeat(np.arange(10), 30)
    known = effects[few] + 0.1 * generator.standard_normal(300)  # sequences of a document are alike
    strange = generator.standard_normal(300)
    every = np.arange(300)
    by_documents = judging.separation(known, strange, few, every, drawn=300)
    by_sequences = judging.separation(known, strange, every, every, drawn=300)
    assert by_documents.value == by_sequences.value == pytest.approx(judging.auroc(known, strange))
    assert by_documents.error > 2 * by_sequences.error


def test_rejection_ratio_is_one_for_an_oracle_and_nothing_for_chance(module):
    judging = module("judging")
    generator = np.random.default_rng(2)
    wrong = generator.random(20_000) < 0.3
    assert judging.rejection_ratio(wrong.astype(float), wrong) == pytest.approx(1, abs=0.02)
    assert judging.rejection_ratio(generator.random(20_000), wrong) == pytest.approx(0, abs=0.05)
    assert judging.rejection_ratio(-wrong.astype(float), wrong) == pytest.approx(-1, abs=0.02)
    assert judging.rejection_ratio(np.zeros(20_000), wrong) == pytest.approx(0, abs=0.05)  # ties say nothing


def test_what_is_kept_is_what_the_model_says(module, tmp_path):
    dump, texts = module("dump"), module("texts")
    path = tmp_path / "decoder.onnx"
    onnx.save(decoder(), path)
    sets = {name: texts.made_up(name, 10, 8) for name in ("calibration", "heldout")}
    kept = dump.Dump(tmp_path / "dump", tuple(sets))
    dump.Maker(kept, path, sets, 1).make("heldout", 4)
    dump.Maker(kept, path, sets, 1).make("heldout")  # goes on
    dump.Maker(kept, path, sets, 1).make("calibration")
    ids = sets["heldout"].ids
    session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    logits = session.run(None, {"input_ids": ids, "attention_mask": np.ones_like(ids)})[0].astype(np.float64)
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert kept.done("heldout") == 10 and kept.places == 4  # embeddings, two blocks, what the head reads
    assert np.allclose(kept.array("heldout", "entropy"), -(np.exp(logp) * logp).sum(axis=-1), atol=1e-5)
    following = np.take_along_axis(logp[:, :-1], ids[:, 1:, None], axis=-1)[..., 0]
    assert np.allclose(kept.array("heldout", "nll")[:, :-1], -following, atol=1e-5)
    assert np.isnan(kept.array("heldout", "nll")[:, -1]).all()
    tempered = logits / dump.TEMPERATURES[0]
    tempered -= np.log(np.exp(tempered).sum(axis=-1, keepdims=True))
    assert np.allclose(
        kept.array("heldout", "tempered")[..., 0], -(np.exp(tempered) * tempered).sum(axis=-1), atol=1e-5
    )
    top = np.take_along_axis(logp, np.asarray(kept.array("heldout", "top_ids"), np.int64), axis=-1)
    assert np.allclose(kept.array("heldout", "top_logp"), top, atol=1e-5) and (np.diff(top) <= 1e-6).all()
    head = module("method").head_weights(path)
    assert np.allclose(kept.hidden("heldout", 3).astype(np.float64) @ head.T, logits, atol=0.02)  # float16


def test_shares_and_laplace_against_plain_algebra(module):
    method, peers = module("method"), module("peers")
    from gapa_onnx.op import reference

    generator = np.random.default_rng(3)
    points, queries = (generator.standard_normal((n, 6)).astype(np.float32) for n in (40, 25))
    native = method.operator(points, 5, 2.0).run(["s"], {"query": queries})[0][:, 0]
    ids = reference.nearest(queries, points, 5)
    assert np.allclose(
        native, reference.unexplained_share(queries, points, ids, 2.0, method.JITTER), atol=1e-5
    )

    spread, hidden = generator.standard_normal((6, 6)), generator.standard_normal((7, 6))
    second = spread @ spread.T
    curvature = generator.uniform(0.001, 0.2, 9)
    sizes, axes = np.linalg.eigh(second)
    fitted = peers.Laplace(axes, sizes, curvature, 100, 3.0)
    ids = generator.integers(0, 9, (7, 4))
    plain = [
        [h @ np.linalg.inv(100 * curvature[token] * second + 3.0 * np.eye(6)) @ h for token in row]
        for h, row in zip(hidden, ids)
    ]
    assert np.allclose(fitted.variances(hidden, ids), plain, rtol=2e-3)  # of a table


def test_quick_mode_writes_every_kind_of_line(tmp_path):
    command = [sys.executable, str(LANGUAGE / "run.py"), "--quick", "--cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "quick" / "language.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert {"source entropy", "last-layer Laplace", "points", "layers", "tool"} <= {
        line["row"] for line in lines
    }
    assert all(0 <= float(line["web"]) <= 1 for line in lines)
    assert {line["place"] for line in lines if line["row"] == "layers"} == set("0123")
    oracle = next(line for line in lines if line["row"].startswith("best temperature"))
    entropy = next(line for line in lines if line["row"] == "source entropy")
    assert float(oracle["web"]) >= float(entropy["web"])  # temperature 1 is among those it may choose
    with open(tmp_path / "quick" / "language_tokens.csv", newline="") as file:
        assert {"method, epistemic", "tool, entropy"} <= {line["row"] for line in csv.DictReader(file)}


def test_decoders_are_compared_at_once_and_step_by_step(module, tmp_path):
    equality, decoding = module("equality"), module("decoding")
    paths = [tmp_path / f"{seed}.onnx" for seed in (0, 1)]
    for seed, path in enumerate(paths):
        onnx.save(decoder(cached=True, seed=seed), path)
    one, other = (ort.InferenceSession(str(path), providers=["CPUExecutionProvider"]) for path in paths)
    fed = decoding.prefill(paths[0], np.array([[5, 7, 11]]))
    said = decoding.answered(one, fed)
    further = decoding.step(fed, said, np.array([[13]]))
    at_once = decoding.answered(one, decoding.prefill(paths[0], np.array([[5, 7, 11, 13]])))
    assert np.allclose(decoding.answered(one, further)["logits"][:, -1], at_once["logits"][:, -1], atol=1e-5)
    assert equality.differing(one, one, fed, 2) == []
    assert "logits at step 0" in equality.differing(one, other, fed, 2)


def test_costs_are_ratios_beside_their_control(module, tmp_path):
    cost = module("cost")
    readings = np.array([[1.0, 2.0, 4.0], [1.0, 2.0, 4.0], [1.1, 2.2, 4.4]])
    found = cost.summary(readings)
    assert (
        found["ratio"] == pytest.approx(1.1) and found["control"] == 1 and found["high"] == pytest.approx(1.1)
    )
    command = [sys.executable, str(LANGUAGE / "cost.py"), "--quick", "--cache", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    with open(tmp_path / "quick" / "language_cost.csv", newline="") as file:
        found = {line["what"]: line for line in csv.DictReader(file)}
    assert set(found) == {"load", "stays", "most", "prefill", "step"}
    assert all(float(found[what]["file"]) > 0 for what in ("load", "prefill", "step"))


def test_rounds_are_counted_together_until_the_file_is_made_anew(module, tmp_path, monkeypatch):
    cost = module("cost")
    source, file, feeds = (tmp_path / name for name in ("model.onnx", "converted.onnx", "feeds"))
    file.touch()

    def process(paths, threads, runs=None):
        seconds = [1.1 if path == file else 1.0 for path in paths]
        return {"load": 2 * seconds[0]} if runs is None else {"step": seconds[: len(paths) - 1]}

    monkeypatch.setattr(cost, "_process", process)
    found = [cost.rounds(source, file, feeds, 4, 1, {"step": 9}) for _ in range(2)][-1]
    assert found["step"].T.tolist() == [[1.0, 1.0, 1.1]] * 8  # whatever order they were opened in
    assert found["load"].T.tolist() == [[2.0, 2.0, 2.2]] * 8
    later = file.with_name("rounds.json").stat().st_mtime + 1
    os.utime(file, (later, later))
    assert cost.rounds(source, file, feeds, 1, 1, {"step": 9})["step"].shape == (3, 1)


def line(row: str, quantity: str = "mean", web: str = "0.7", **more: str) -> dict[str, str]:
    """A line of language.csv."""
    columns = ("place", "metric", "inducing", "m", "k", "rows", "chosen", "flagged")
    origin = ("gapa_onnx", "onnxruntime", "processor", "cores")
    sets = {f"{name}{what}": "" for name in ("web", "shuffled", "readme", "code") for what in ("", "_error")}
    found = dict.fromkeys((*columns, *origin), "") | sets
    return found | {"row": row, "quantity": quantity, "web": web, "web_error": "0.01", **more}


def test_the_page_says_what_was_aimed_at_and_what_was_found(module, tmp_path, monkeypatch):
    page = module("page")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    place = {"metric": "euclidean", "inducing": "random", "k": "50", "m": "100"}
    rows = [
        line("source entropy", web="0.7"),
        line("best temperature (oracle)", web="0.72", chosen="1.5"),
        line("kNN, last", web="0.78"),
        line("points", "epistemic", "0.6", place="2", **place),
        line("layers", "epistemic", "0.61", place="2", **place),
        line("layers", "share median", "0.65", place="2", **place),
        line("tool", "seq_score", "0.76", rows="heldout:640 web:320"),
        line("tool", "seq_ood", "0.6", flagged="heldout:0.08 web:0.3"),
    ]
    text = page.section(rows)
    assert "best temperature (oracle): 1.5 | 0.720 ± 0.010" in text
    verdicts = {
        cells[1].strip(): cells[2:4]
        for cells in (row.split("|") for row in text.splitlines())
        if len(cells) == 5
    }
    at_least, above, flagged = (
        next(found for what, found in verdicts.items() if what.startswith(start))
        for start in ("score of a sequence", "above every", "share of held-out")
    )
    assert [part.strip() for part in at_least] == ["+0.040", "met"]
    assert [part.strip() for part in above] == ["-0.020 to kNN, last", "**not met**"]
    assert [part.strip() for part in flagged] == ["0.080 (OpenWebText 0.300)", "**not met**"]
    assert "held-out WikiText 640, OpenWebText 320" in text
    assert "0.600 ± 0.010" in text and "head's input" in text
    pytest.importorskip("matplotlib")
    assert (tmp_path / "language_points.png").stat().st_size > 5000
    assert (tmp_path / "language_layers.png").stat().st_size > 5000


def test_larger_models_are_told_by_a_line(module):
    page = module("page")
    rows = [
        {
            "form": f"random-{n}",
            "parameters": f"{n}e6",
            "tokens": "384",
            "peak_gb": str(0.5 + n / 250),
            "own_gb": str(0.3 + n / 500),
            "forward_own_gb": str(0.1 + n / 500),
            "seconds": "9",
        }
        | {"cpu": str(10 + n / 10), "forward": "1", "forward_cpu": str(1 + n / 50)}
        for n in (100, 200, 400)
    ]
    told = page.conversion(rows)
    assert "3B: 6.7 GB of its own, where the source alone takes 6.5 GB (13.3 GB with what is mapped)" in told
    assert "8B: 16.3 GB of its own" in told and "265 CPU seconds" in told and "649 CPU seconds" in told

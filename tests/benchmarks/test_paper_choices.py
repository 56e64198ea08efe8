"""benchmarks/paper/choices.py and its networks: the sets that they are measured on, the figures, and the page of defaults."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.paths import BENCHMARKS

import gapa_onnx
from gapa_onnx.sessions.runtime import library_path

pytest.importorskip("scipy")
pytest.importorskip("threadpoolctl")
FOLDERS = [BENCHMARKS, BENCHMARKS / "paper"]


@pytest.fixture
def module(monkeypatch):
    """Import a module of benchmarks/paper by name, as the scripts there do; forgotten after the test."""
    before = set(sys.modules)
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if any(str(folder) in str(getattr(sys.modules[name], "__file__", "")) for folder in FOLDERS):
            del sys.modules[name]


# ----------------------------------------------------------------------------- networks


def test_pieces_of_texts(module):
    sequences = module("sequences")
    words = ["b", "a", "b", "c"] * 20  # 80 words: two pieces of 32, the rest dropped
    known = sequences.numbered([words, ["a"]])
    assert known == {"b": 0, "a": 1, "c": 2}  # by frequency, of equals by the alphabet
    found = sequences.pieces([words, ["a"] * 31, ["other"] * 32], known)
    assert found.shape == (3, sequences.WORDS) and found.dtype == np.int64
    assert found[0, :4].tolist() == [0, 1, 0, 2] and (found[0] == found[1]).all()
    assert len(set(found[2])) == 1 and found[2, 0] >= sequences.COMMON


def test_texts_for_tests_are_of_other_documents(module, tmp_path):
    sequences = module("sequences")

    def documents(word: str, count: int) -> str:
        return "\n".join(" ".join([f"{word}{chr(97 + i)}"] * 64) for i in range(count))

    for name, word in (("openwebtext", "w"), ("wikitext_calibration", "k"), ("wikitext_heldout", "h")):
        (tmp_path / f"{name}.txt").write_text(documents(word, 5))
    found = sequences.texts(tmp_path)
    assert found.x_train.shape == (2 * (4 + 5), 32) and (found.y_train == 0).sum() == 8
    assert found.x_test.shape == (2 + 2, 32)  # one document of the web, as much of the other class
    train, test = ({int(n) for n in x.ravel()} for x in (found.x_train, found.x_test))
    assert max(train) < 9 and min(test) >= sequences.COMMON  # words of tests were never numbered
    assert len(found.code) > 100


def test_halves_have_a_part_of_either_class(module):
    subjects = module("subjects")
    pieces, labels = np.arange(24).reshape(6, 4), np.array([0, 1, 1, 0, 0, 1])
    expected = [[0, 1, 6, 7], [12, 13, 10, 11], [16, 17, 22, 23]]
    assert subjects.halves(pieces, labels).tolist() == expected


def test_other_words_and_noise(module):
    subjects = module("subjects")
    pieces = np.full((500, 32), 10**6)
    changed = subjects.with_other_words(pieces) != pieces
    spread = np.sqrt(subjects.REPLACED * (1 - subjects.REPLACED) / changed.size)
    assert abs(changed.mean() - subjects.REPLACED) < 4 * spread
    grey = np.full((50, 784), 0.5, np.float32)
    noise = subjects.with_noise(grey) - grey
    assert noise.dtype == np.float32 and np.abs(noise).max() <= 0.5
    # a normal cut off at two standard deviations has 0.9595 of the spread, with what lies beyond kept at the edges
    assert noise.std() == pytest.approx(0.9595 * subjects.NOISE, rel=0.01)


def test_the_last_layer_is_what_makes_the_logits(module):
    subjects, backbones = module("subjects"), module("backbones")
    assert subjects.last_layer(backbones.as_onnx(_weights())) == ("h2", ("weight3", "bias3"))
    no_layer = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[n, 3] x) => (float[n, 3] logits) { logits = Relu(x) }'
    )
    with pytest.raises(ValueError, match="Relu"):
        subjects.last_layer(no_layer)


def test_every_network_has_a_name_of_its_own(module):
    found = module("subjects").SUBJECTS
    assert len({subject.file for subject in found}) == len(found)


# ------------------------------------------------------------------------------ figures


def _weights():
    generator = np.random.default_rng(3)
    sizes = (8, 7, 6, 4)
    return [
        (generator.normal(size=(a, b)).astype(np.float32), generator.normal(size=b).astype(np.float32))
        for a, b in zip(sizes, sizes[1:])
    ]


@pytest.fixture
def task(module, tmp_path):
    """A small tanh network as the benchmark sees one."""
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(360, 8)).astype(np.float32)
    path = tmp_path / "tiny.onnx"
    onnx.save(module("backbones").as_onnx(_weights()), path)
    return module("cifar.task").Task(
        name="tiny",
        path=path,
        x_train=rows[:300],
        y_train=np.zeros(300, np.int64),
        test=rows[300:],
        labels=generator.integers(0, 4, 60),
        outside={name: rows[:40] * np.float32(scale) for name, scale in (("far", 4), ("noisy", 1.5))},
        features="h2",
        last_layer=("weight3", "bias3"),
    )


def test_figures_are_what_pairs_say(module, task):
    choices = module("choices")
    generator = np.random.default_rng(5)

    def answer(rows: np.ndarray):
        probs = generator.dirichlet(np.ones(4), len(rows))
        score = np.round(generator.normal(size=len(rows)), 1)  # some are equal
        return choices.Said(
            probs, bald=generator.random(len(rows)), score=score, flagged=score > 1, var=score**2
        )

    answers = {name: answer(x) for name, x in task.sets.items()}
    found = choices.figures(task, answers)
    known, strange = answers["test"], answers["far"]

    def pairs(inside, outside):
        ordered = np.sign(outside[:, None] - inside[None])
        return (ordered > 0).mean() + (ordered == 0).mean() / 2

    entropies = [-(a.probs * np.log(a.probs)).sum(axis=1) for a in (known, strange)]
    assert found["score_far"] == pytest.approx(pairs(known.score, strange.score), abs=1e-5)
    assert found["bald_far"] == pytest.approx(pairs(known.bald, strange.bald), abs=1e-5)
    assert found["entropy_far"] == pytest.approx(pairs(*entropies), abs=1e-5)
    right = known.probs[np.arange(60), task.labels]
    assert found["nll"] == pytest.approx(-np.log(right).mean(), abs=1e-5)
    assert found["flagged"] == pytest.approx((known.score > 1).mean(), abs=1e-5)
    source = gapa_onnx.session(task.path)
    changed = sum(
        (source.run(["logits"], {"x": task.sets[name]})[0].argmax(1) != said.probs.argmax(1)).sum()
        for name, said in answers.items()
    )
    assert found["argmax_changed"] == changed
    ranked = choices.figures(task, choices.ranked(answers, "var"))
    assert ranked["score_far"] == pytest.approx(pairs(known.var, strange.var), abs=1e-5)
    assert ranked["flagged"] == ""


@pytest.mark.skipif(library_path() is None, reason="needs the native library")
@pytest.mark.parametrize(
    "first, by, second",
    [
        ({"witnesses": "none"}, "var", {"score": "variance"}),
        ({"witnesses": "none"}, "bald", {"score": "epistemic"}),
        ({}, "score", {"metric": "polar"}),
    ],
)
def test_what_is_not_converted_is_what_a_conversion_says(module, task, tmp_path, first, by, second):
    """`score` is read from the file without witnesses, and a geometry that the default has everywhere not converted again."""
    choices = module("choices")
    paths = [tmp_path / f"{number}.onnx" for number in (1, 2)]
    made = gapa_onnx.convert(task.path, {"x": task.x_train}, paths[0], **first)
    assert {fit.geometry.metric for fit in made.calibration.places} == {
        "polar"
    }  # of few features no other is tried
    gapa_onnx.convert(task.path, {"x": task.x_train}, paths[1], **second)
    here, there = (choices._answers(path, task) for path in paths)
    for name, said in choices.ranked(here, by).items():
        np.testing.assert_allclose(said.score, there[name].score, rtol=1e-6)
        np.testing.assert_array_equal(said.probs, there[name].probs)


@pytest.mark.skipif(library_path() is None, reason="needs the native library")
def test_each_choice_has_a_line(module, task, tmp_path):
    choices = module("choices")
    wanted = ["source", "kNN normalised", "default", "its variance", "polar", "paper"]
    found = dict(choices.measured(task, wanted, tmp_path))
    assert list(found) == wanted
    assert found["source"]["nll"] == found["kNN normalised"]["nll"]
    assert found["polar"] == found["default"] != found["paper"]
    assert found["default"]["argmax_changed"] == 0 and found["default"]["places"].startswith("h2 polar; ")
    assert found["paper"]["places"] == "h2 euclidean"


# --------------------------------------------------------------------------------- page


def line(network: str, choice: str, **figures: str) -> dict[str, str]:
    zeros = {f"{kind}_{name}": "0.9" for kind in ("score",) for name in ("far", "blended", "noisy")}
    known = {"network": network, "data": "d", "choice": choice, "map_nll": "1", "nll": "1"}
    return {**known, **zeros, **figures}


def test_the_page_says_where_the_default_is_behind(module):
    defaults = module("defaults")
    rows = [
        line("a", "default", nll="1.001", score_far="0.95"),
        line("a", "source", score_far="0.955"),
        line("a", "kNN normalised"),
        line("b", "default", nll="0.9"),
        line("b", "source", score_noisy="0.93"),
        line("b", "kNN normalised", score_noisy="0.92"),
    ]
    assert defaults.within(rows).endswith("so on every network; the largest is +0.0010 (a on d).")
    assert defaults.behind(rows).endswith("on: b on d, noisy (0.030 behind entropy).")
    assert "**0.955**" in defaults.scores(rows) and "0.950 / **0.955**" in defaults.scores(rows)
    rows[0]["nll"] = "1.0021"
    assert defaults.within(rows).endswith("not so on a on d (+0.0021).")


def test_tables_are_of_networks_that_have_every_value(module):
    defaults = module("defaults")
    rows = [line("a", "default"), line("a", "paper"), line("b", "default")]
    assert defaults.common(rows, ["paper", "default"]) == [rows[1], rows[0]]


def test_results_are_read_beside_the_network_itself(module, tmp_path: Path):
    path = tmp_path / "choices.csv"
    lines = ["lstm,mnist,source,2", "lstm,mnist,default,1.5", "lstm,mnist,kNN normalised,2"]
    lines += [f"lenet,mnist,{choice},1" for choice in ("default", "source", "kNN normalised")]
    lines += ["resnet20,cifar10,source,1"]  # not whole
    path.write_text("\n".join(["network,data,choice,nll", *lines]))
    defaults = module("defaults")
    found = defaults.read(path)
    assert [row["network"] for row in found] == ["lenet"] * 3 + ["lstm"] * 3  # in the order of the page
    assert [defaults.excess(row) for row in found] == [0.0, 0.0, 0.0, 0.0, -0.5, 0.0]
    said = defaults.missing(found)
    assert "resnet20 on cifar10" in said and "lstm" not in said


def test_the_page_knows_every_network(module):
    subjects = module("subjects").SUBJECTS
    assert tuple((subject.name, subject.data) for subject in subjects) == module("defaults").NETWORKS

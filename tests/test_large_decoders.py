"""A decoder whose weights count as large: converted with its weights in files, by the part of it that queries need."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from support.decoders import decoder, token_rows, with_empty_past

import gapa_onnx
from gapa_onnx.data import open_data
from gapa_onnx.data.strange import strange_batches
from gapa_onnx.fit.collect import collect
from gapa_onnx.model import weights
from gapa_onnx.model.load import load
from gapa_onnx.plan.analyse import analyse
from gapa_onnx.sessions import feeding
from gapa_onnx.sessions.runtime import open_session
from gapa_onnx.settings import Settings

CHOICES = dict(m=50, k=5)


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    """The same decoder, converted in memory and from a file with low limits: both paths."""
    folder = tmp_path_factory.mktemp("large")
    rows, model = token_rows(24, 8), decoder(blocks=1)
    within = gapa_onnx.convert(model, rows, folder / "within.onnx", **CHOICES)
    onnx.save(
        model, folder / "source.onnx", save_as_external_data=True, location="w.data", size_threshold=1024
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights, "LARGE_TENSOR", 4096)
        patch.setattr(weights, "LARGE_MODEL", 8192)
        beside = gapa_onnx.convert(folder / "source.onnx", rows, folder / "beside.onnx", **CHOICES)
        assert any(map(weights.is_outside, beside.emitted.graph.initializer))
    return within, beside


def test_both_keep_their_promises(converted):
    for conversion in converted:
        assert [check for check in conversion.checks if not check.passed] == []


def test_weights_outside_the_source_are_outside_the_result(converted):
    within, beside = converted
    (data,) = beside.path.parent.glob("beside.onnx.*.data")
    table = onnx.numpy_helper.to_array(
        next(t for t in decoder().graph.initializer if t.name == "head.weight")
    )
    assert table.nbytes > 4096 and data.stat().st_size > table.nbytes
    assert not list(within.path.parent.glob("within.onnx.*"))
    assert {file.name for file in beside.path.parent.iterdir()} == {
        "source.onnx", "w.data", "within.onnx", "beside.onnx", data.name
    }  # fmt: skip


def test_where_weights_lie_changes_no_bit(converted):
    within, beside = (gapa_onnx.session(conversion.path) for conversion in converted)
    rows = token_rows(3, 7, seed=1)
    for one, other in zip(within.run(None, rows), beside.run(None, rows)):
        np.testing.assert_array_equal(one, other)


def test_the_model_that_is_given_back_has_its_weights(converted):
    _, beside = converted
    assert not any(map(weights.is_outside, beside.model.graph.initializer))
    rows = token_rows(2, 5, seed=2)
    expected = gapa_onnx.session(beside.path).run(None, rows)
    for one, other in zip(gapa_onnx.session(beside.model.SerializeToString()).run(None, rows), expected):
        np.testing.assert_array_equal(one, other)


def test_the_pass_runs_no_head(converted):
    """Nor keeps a session of a large model between steps, and reads what the whole model has."""
    _, beside = converted
    reader = beside.calibration.reader
    names = {tensor.name for tensor in reader.model.graph.initializer}
    assert "embed.weight" in names and "head.weight" not in names
    assert "logits" not in {value.name for value in reader.model.graph.output}
    assert reader._opened == []
    source = load(decoder(blocks=1))
    data = open_data(token_rows(24, 8), source.inputs)
    collected = collect(analyse(source, Settings(**CHOICES)), data, Settings(**CHOICES))
    rows = token_rows(2, 8, seed=3)
    site = collected.collectors[0].site
    copy = onnx.ModelProto.FromString(source.given.SerializeToString())
    copy.graph.output.append(onnx.helper.make_empty_tensor_value_info(site.query))
    expected = open_session(copy, "whole").run([site.query], rows)[0]
    found = collected.reader.queries(rows)[0]
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


def test_texts_are_cut_where_their_answers_are_large():
    model, rows = decoder(blocks=1), token_rows(24, 40)
    source = load(model)
    fed = feeding.feeding(open_session(model, "decoder"), open_data(rows, source.inputs))
    assert fed.texts == {"input_ids", "attention_mask"}
    whole = next(fed.verified(16, 4, 1e9))
    assert whole["input_ids"].shape == (16, 40)
    most = fed.row_bytes * 2  # half of what the least number of rows takes
    cut = next(fed.verified(16, 4, most))
    assert {array.shape for array in cut.values()} == {(4, 20)} and cut.rows == 4
    np.testing.assert_array_equal(cut["input_ids"], rows["input_ids"][:4, :20])
    assert next(fed.verified(16, 4, 1.0))["input_ids"].shape == (4, feeding.FEWEST_POSITIONS)


def test_a_word_counts_as_many_numbers():
    """A thousand words are a batch: what a model makes of them is not seen in its inputs."""
    model, rows = decoder(blocks=1, vocabulary=8), token_rows(64, 96, vocabulary=8)
    source = load(model)
    fed = feeding.feeding(open_session(model, "decoder"), open_data(rows, source.inputs))
    assert fed.size == feeding.INPUT_NUMBERS // (2 * 96 * feeding.NUMBERS_OF_A_TOKEN) == 10


def test_an_empty_past_makes_no_row_strange():
    """Only what the words have: a kind that changes nothing would call ordinary rows strange."""
    rows = token_rows(6, 5)
    kinds = [kind for kind, _ in strange_batches(rows, 0)]
    assert kinds and [kind for kind, _ in strange_batches(with_empty_past(rows), 0)] == kinds

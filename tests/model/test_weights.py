"""Weights outside their model: what is read, written and run is the same as with all of it in memory."""

from __future__ import annotations

import os

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.decoders import decoder, token_rows

from gapa_onnx.errors import UserError
from gapa_onnx.model import opening, weights
from gapa_onnx.model.load import load, read_proto
from gapa_onnx.model.opening import open_proto
from gapa_onnx.model.writing import save


@pytest.fixture
def small(monkeypatch):
    """Limits so low that a tiny decoder counts as large."""
    monkeypatch.setattr(weights, "LARGE_TENSOR", 4096)
    monkeypatch.setattr(weights, "LARGE_MODEL", 8192)


def beside(folder, **choices):
    """A decoder with its weights in a second file, as exporters write it; and the same in memory."""
    model, path = decoder(**choices), folder / "decoder.onnx"
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    onnx.save(copy, path, save_as_external_data=True, location="decoder.onnx.data", size_threshold=1024)
    return path, model


def answers(session) -> list[np.ndarray]:
    return session.run(None, token_rows(2, 6))


def outside(model: onnx.ModelProto) -> set[str]:
    return {tensor.name for tensor in model.graph.initializer if weights.is_outside(tensor)}


def test_only_large_weights_of_a_large_model_stay_outside(tmp_path, small):
    path, model = beside(tmp_path)
    held = read_proto(path)
    large = {tensor.name for tensor in model.graph.initializer if len(tensor.raw_data) >= 4096}
    assert outside(held) == large and "head.weight" in large
    for one, other in zip(held.graph.initializer, model.graph.initializer):
        np.testing.assert_array_equal(weights.array_of(one), onnx.numpy_helper.to_array(other))
    assert isinstance(weights.array_of(held.graph.initializer[0]).base, np.memmap)
    assert weights.inside(held).graph.initializer == model.graph.initializer
    assert len(held.SerializeToString()) < sum(len(t.raw_data) for t in model.graph.initializer) / 2


def test_few_weights_are_read(tmp_path):
    path, model = beside(tmp_path)
    assert read_proto(path).graph.initializer == model.graph.initializer


def test_the_graph_has_the_values_of_weights_outside(tmp_path, small):
    path, model = beside(tmp_path)
    source = load(path)
    for tensor in model.graph.initializer:
        held = source.tensors[tensor.name].values
        np.testing.assert_array_equal(held, onnx.numpy_helper.to_array(tensor))


def test_a_model_in_memory_is_held_outside_as_long_as_it_lives(small):
    model = decoder()
    source = load(model)
    (file,) = {weights.place_of(t).file for t in source.given.graph.initializer if weights.is_outside(t)}
    assert os.path.exists(file)
    expected = answers(ort.InferenceSession(model.SerializeToString()))
    np.testing.assert_array_equal(answers(open_proto(source.given, ort.SessionOptions())), expected)
    del source
    assert not os.path.exists(file)


@pytest.mark.parametrize("by_links", [False, True])
def test_sessions_of_weights_outside_answer_the_same(tmp_path, small, monkeypatch, by_links):
    path, model = beside(tmp_path)
    expected = answers(ort.InferenceSession(model.SerializeToString()))
    if by_links:  # as for an onnxruntime that is too old to be told a folder; newer ones do not follow links
        monkeypatch.setattr(opening, "FIRST_WITH_FOLDER", (99, 0))
        monkeypatch.setattr(opening.os, "symlink", os.link)
    if by_links and not _links_are_followed(tmp_path):
        pytest.skip("this onnxruntime refuses links")
    np.testing.assert_array_equal(answers(open_proto(read_proto(path), ort.SessionOptions())), expected)


def _links_are_followed(folder) -> bool:
    """Whether onnxruntime reads data through a hard link, which the newest take for an attack."""
    there = folder / "linked"
    there.mkdir()
    os.link(folder / "decoder.onnx", there / "decoder.onnx")
    os.link(folder / "decoder.onnx.data", there / "decoder.onnx.data")
    try:
        ort.InferenceSession(str(there / "decoder.onnx"))
    except Exception:  # onnxruntime has no common base class for its errors
        return False
    finally:
        for file in there.iterdir():
            file.unlink()
    return True


def test_what_was_outside_is_written_outside_and_what_was_inside_inside(tmp_path, small):
    path, model = beside(tmp_path)
    expected = answers(ort.InferenceSession(model.SerializeToString()))
    for name, held in (("external", load(path)), ("inside", load(decoder()))):
        out = tmp_path / f"{name}.onnx"
        save(held.given, out)
        assert len(list(tmp_path.glob(f"{name}.onnx.*.data"))) == (name == "external")
        np.testing.assert_array_equal(answers(ort.InferenceSession(str(out))), expected)
        first = [file.read_bytes() for file in sorted(tmp_path.glob(f"{name}.onnx*"))]
        save(held.given, out)
        assert [file.read_bytes() for file in sorted(tmp_path.glob(f"{name}.onnx*"))] == first


def test_a_model_is_written_over_itself_without_its_weights_being_touched(tmp_path, small):
    path, _ = beside(tmp_path)
    data = tmp_path / "decoder.onnx.data"
    before, number = data.read_bytes(), data.stat().st_ino
    held = read_proto(path)
    held.doc_string = "changed"
    save(held, path)
    assert (data.read_bytes(), data.stat().st_ino) == (before, number)
    again = read_proto(path)
    assert again.doc_string == "changed" and outside(again) == outside(held)


def test_weights_at_one_place_are_written_once(tmp_path, small):
    path, _ = beside(tmp_path)
    held = read_proto(path)
    (table,) = [tensor for tensor in held.graph.initializer if tensor.name == "embed.weight"]
    twin = held.graph.initializer.add()
    twin.CopyFrom(table)
    twin.name = "twin"
    save(held, tmp_path / "twins.onnx")
    places = {t.name: weights.place_of(t) for t in read_proto(tmp_path / "twins.onnx").graph.initializer
              if t.name in ("twin", "embed.weight")}  # fmt: skip
    assert places["twin"] == places["embed.weight"]


@pytest.mark.parametrize("fault", ["missing", "short", "elsewhere"])
def test_weights_that_cannot_be_read_are_the_users_to_fix(tmp_path, small, fault):
    folder = tmp_path / "model"
    folder.mkdir()
    path, _ = beside(folder)
    data = folder / "decoder.onnx.data"
    if fault == "missing":
        data.unlink()
    elif fault == "short":
        data.write_bytes(data.read_bytes()[:-5000])
    else:
        data.rename(tmp_path / "decoder.onnx.data")
        text = path.read_bytes()
        model = onnx.ModelProto.FromString(text)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                entry.value = entry.value.replace("decoder", "../decoder")
        path.write_bytes(model.SerializeToString())
    with pytest.raises(UserError):
        read_proto(path)

"""Models with their weights in a second file: killed at any moment, the old one loads or the new one does."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from support.decoders import decoder, token_rows
from support.kills import in_a_child, killed_before

from gapa_onnx.model import protos
from gapa_onnx.model.load import read_proto
from gapa_onnx.model.writing import save

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")


@pytest.fixture
def large(monkeypatch):
    """A limit so low that a tiny decoder is beyond what protobuf can serialise."""
    monkeypatch.setattr(protos, "LARGEST_PROTO", 8192)


def with_other_weights() -> onnx.ModelProto:
    model = decoder()
    for tensor in model.graph.initializer:
        if tensor.name.endswith("weight"):
            half = (onnx.numpy_helper.to_array(tensor) / 2).astype(np.float32)
            tensor.CopyFrom(onnx.numpy_helper.from_array(half, tensor.name))
    return model


def answer(path: Path) -> np.ndarray:
    return ort.InferenceSession(str(path)).run(None, token_rows(2, 6))[0]


def named(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


#: The calls of a save: two files are made, brought to the disk and put in place, and old weights are removed.
MOMENTS = [("open", n) for n in range(1, 9)] + [("fsync", n) for n in range(1, 6)] + [
    ("replace", 1), ("replace", 2), ("unlink", 1), ("unlink", 2),
]  # fmt: skip


@pytest.mark.parametrize(("call", "number"), MOMENTS)
def test_a_killed_save_leaves_a_model_that_loads(tmp_path, large, call, number):
    path = tmp_path / "model.onnx"
    save(decoder(), path)
    old, other = answer(path), with_other_weights()
    code = in_a_child(killed_before(call, number, lambda: save(other, path)))
    assert code in (0, -signal.SIGKILL)
    found = answer(path)
    save(other, path)
    new = answer(path)
    assert not np.array_equal(old, new)
    assert np.array_equal(found, old) or np.array_equal(found, new)
    assert len(named(tmp_path)) == 2  # whatever was left behind is gone


def test_a_save_is_killed_between_its_two_renames(tmp_path, large):
    """The moment at which the new weights stand beside the old model: it does not read them."""
    path = tmp_path / "model.onnx"
    save(decoder(), path)
    old = answer(path)
    assert (
        in_a_child(killed_before("replace", 2, lambda: save(with_other_weights(), path))) == -signal.SIGKILL
    )
    assert len([name for name in named(tmp_path) if name.endswith(".data")]) == 2
    assert np.array_equal(answer(path), old)


def test_the_same_model_has_the_same_files_wherever_it_is_written(tmp_path, large):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        save(decoder(), tmp_path / folder / "model.onnx")
    assert named(tmp_path / "a") == named(tmp_path / "b")
    for name in named(tmp_path / "a"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_files_of_weights_that_others_have_written_stay(tmp_path, large):
    for name in ("model.onnx.data", "other.onnx.0123456789abcdef.data", "model.onnx.0123.data"):
        (tmp_path / name).write_bytes(b"not ours")
    (tmp_path / "model.onnx.0123456789abcdef.data").write_bytes(b"of a save before")
    save(decoder(), tmp_path / "model.onnx")
    assert (tmp_path / "model.onnx.data").read_bytes() == b"not ours"
    assert (tmp_path / "other.onnx.0123456789abcdef.data").exists()
    assert (tmp_path / "model.onnx.0123.data").exists()
    assert not (tmp_path / "model.onnx.0123456789abcdef.data").exists()
    assert read_proto(tmp_path / "model.onnx").graph.initializer


def test_a_model_behind_a_link_has_its_weights_beside_it(tmp_path, large):
    (tmp_path / "there").mkdir()
    (tmp_path / "link.onnx").symlink_to(tmp_path / "there" / "model.onnx")
    save(decoder(), tmp_path / "link.onnx")
    assert os.path.islink(tmp_path / "link.onnx")
    assert len(named(tmp_path / "there")) == 2
    assert answer(tmp_path / "there" / "model.onnx").size

"""Shards of the data, read one by one, against one pass over all: the same file, byte for byte."""

from __future__ import annotations

import json
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.decoders import decoder, token_rows
from support.texts import decoder_tokenizer, sentences

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.data import Batch, TextOptions
from gapa_onnx.errors import DataWarning, UserError
from gapa_onnx.fit.collect import Shard
from gapa_onnx.fit.kept_rows import KeptRows, Purpose
from gapa_onnx.fit.parts import Collected
from gapa_onnx.fit.streams import Moments, RowSample

DENSE = """<ir_version: 8, opset_import: ["": 17]>
net (float[N, 20] x) => (float[N, 4] logits) { z = MatMul(x, w1)  h = Relu(z)  y = MatMul(h, w2)  g = Relu(y)  logits = MatMul(g, w3) }"""
MAPS = """<ir_version: 8, opset_import: ["": 17]>
net (float[N, 2, 6, 6] x) => (float[N, 3] logits) {
  a = Conv <pads = [1, 1, 1, 1]> (x, k1)  r = Relu(a)  b = Conv(r, k2)  s = Relu(b)
  p = GlobalAveragePool(s)  f = Flatten(p)  logits = MatMul(f, w)
}"""
SMALL = {"m": 40, "k": 8, "batch_size": 64}


def filled(text: str, **shapes: tuple[int, ...]) -> onnx.ModelProto:
    generator, model = np.random.default_rng(0), onnx.parser.parse_model(text)
    for name, shape in shapes.items():
        array = generator.normal(size=shape) / np.sqrt(np.prod(shape[1:]) if len(shape) > 2 else shape[0])
        model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(np.float32), name))
    return model


def dense(rows: str = "N") -> onnx.ModelProto:
    return filled(DENSE.replace("N", rows), w1=(20, 32), w2=(32, 24), w3=(24, 4))


def vectors(rows: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 20)).astype(np.float32)


def in_shards(model, data, count: int, folder: Path, **choices) -> Collected:
    """All shards, each through a file, put together in another order than that of the data."""
    parts = []
    for number in range(count, 0, -1):
        path = folder / f"part{number}.npz"
        gapa_onnx.collect(model, data, shard=(number, count), **choices).save(path)
        parts.append(Collected.load(path))
    return Collected.merge(parts)


def bytes_of(conversion: gapa_onnx.Conversion) -> bytes:
    assert all(check.passed for check in conversion.checks)
    return conversion.model.SerializeToString(deterministic=True)


@pytest.fixture(scope="module")
def part(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("part") / "part.npz"
    gapa_onnx.collect(dense(), vectors(300), **SMALL).save(path)
    return path


# ------------------------------------------------------------------------------- the same bytes


def test_vectors_with_labels(tmp_path):
    labels = np.random.default_rng(2).integers(-1, 4, 900)
    rows = vectors(900)
    rows[[70, 700], 3] = (
        np.nan
    )  # their queries are dropped: a shard cannot tell which number its first one has
    whole = gapa_onnx.convert(dense(), rows, labels=labels, **SMALL)
    assert whole.calibration.dropped == 2
    found = gapa_onnx.convert(dense(), in_shards(dense(), rows, 3, tmp_path, labels=labels, **SMALL))
    assert bytes_of(found) == bytes_of(whole)


def test_maps_and_the_distance_of_inputs(tmp_path):
    model = filled(MAPS, k1=(4, 2, 3, 3), k2=(5, 4, 3, 3), w=(5, 3))
    images = np.random.default_rng(1).normal(size=(400, 2, 6, 6)).astype(np.float32)
    choices = {**SMALL, "sites": "all", "length_scale": "input"}
    whole = gapa_onnx.convert(model, images, **choices)
    found = gapa_onnx.convert(model, in_shards(model, images, 2, tmp_path, **choices))
    assert bytes_of(found) == bytes_of(whole)


def test_tokens(tmp_path):
    model, rows = decoder(blocks=1), token_rows(260, 8)
    choices = {"m": 50, "k": 5, "batch_size": 32}
    whole = gapa_onnx.convert(model, rows, **choices)
    found = gapa_onnx.convert(model, in_shards(model, rows, 3, tmp_path, **choices))
    assert bytes_of(found) == bytes_of(whole)


def test_documents_that_are_set_apart(tmp_path):
    pytest.importorskip("tokenizers")
    texts, tokenizer = tmp_path / "calib.txt", tmp_path / "tokenizer.json"
    texts.write_text("\n".join(sentences(40, 0, 20, 60)))
    decoder_tokenizer().save(str(tokenizer))
    model = decoder(cached=True, blocks=1)
    choices = {"m": 40, "k": 5, "task": "logits=tokens", "top_k": 8, "sites": "last", "witnesses": "none"}
    choices |= {"text": TextOptions(tokenizer=str(tokenizer), seq_len=8), "batch_size": 8}
    whole = gapa_onnx.convert(model, str(texts), **choices)
    found = gapa_onnx.convert(model, in_shards(model, str(texts), 2, tmp_path, **choices))
    assert whole.calibration.fed.data.text is not None and found.calibration.fed.data.text is None
    assert bytes_of(found) == bytes_of(whole)


def test_a_batch_that_the_model_fixes_and_rows_that_come_later(tmp_path):
    """Rows held out and strange ones are given when the parts are converted, and compared with rows of all parts."""
    model, rows, held, strange = dense("4"), vectors(500), vectors(200, 3), 3 * vectors(200, 4)
    labels = np.random.default_rng(2).integers(0, 4, 200)
    choices = {"m": 40, "k": 8}
    later = {"held_out": held, "labels": labels, "strange": strange}
    whole = gapa_onnx.convert(model, rows, **later, **choices)
    parts = in_shards(model, rows, 2, tmp_path, held_out=True, **choices)
    assert bytes_of(gapa_onnx.convert(model, parts, **later)) == bytes_of(whole)
    with pytest.raises(UserError, match="1 of 200 held-out rows are calibration rows too"):
        again = np.concatenate([rows[400:401], held[1:]])
        gapa_onnx.convert(model, parts, held_out=again, labels=labels)
    with pytest.raises(UserError, match="none are given"):
        gapa_onnx.convert(model, parts)


def test_more_shards_than_the_data_have_stretches(tmp_path):
    whole = gapa_onnx.convert(dense(), vectors(200), **SMALL)
    parts = in_shards(dense(), vectors(200), 7, tmp_path, **SMALL)
    assert 0 in [one.record.read for one in parts.parts]
    assert bytes_of(gapa_onnx.convert(dense(), parts)) == bytes_of(whole)


def test_parts_that_are_merged_are_saved_as_one(tmp_path):
    whole = in_shards(dense(), vectors(200), 2, tmp_path, **SMALL)
    whole.save(tmp_path / "both.npz")
    both = Collected.load(tmp_path / "both.npz")
    assert [part.record for part in both.parts] == [part.record for part in whole.parts]
    assert bytes_of(gapa_onnx.convert(dense(), both)) == bytes_of(gapa_onnx.convert(dense(), whole))


# -------------------------------------------------------------------------------- what is kept


@pytest.mark.parametrize("covariance", [False, True])
def test_moments_of_shards_are_those_of_the_stream(covariance):
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(4000, 5)) * [1, 2, 3, 4, 5] + 1e4
    ends = np.sort(generator.integers(0, 4000, 22))
    stretches = np.split(rows, ends)
    whole = Moments(5, covariance)
    for number, stretch in enumerate(stretches):
        whole.begin(number)
        whole.add(stretch)
    for cuts in ([7], [1, 2, 16], [4, 9, 13, 22], list(range(1, 23))):
        joined = Moments(5, covariance)
        for first, last in zip([0, *cuts], [*cuts, 23]):
            part = Moments(5, covariance)
            for number in range(first, last):
                part.begin(number)
                part.add(stretches[number])
            joined.join(Moments.of(part.arrays()))
        np.testing.assert_array_equal(joined.mean, whole.mean)
        np.testing.assert_array_equal(joined.std, whole.std)
        assert joined.count == 4000
        if covariance:
            np.testing.assert_array_equal(joined.covariance, whole.covariance)
    np.testing.assert_allclose(whole.mean, rows.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(whole.std, rows.std(axis=0), rtol=1e-9)


def test_a_sample_of_shards_is_that_of_the_stream():
    rows = np.arange(6000, dtype=np.float32).reshape(3000, 2)
    whole, parts = RowSample(100, 2, seed=3), [RowSample(100, 2, seed=3) for _ in range(3)]
    for number, stretch in enumerate(np.array_split(rows, 12)):
        for sample in (whole, parts[number // 5]):
            sample.begin(number)
            sample.add(stretch)
    joined = RowSample.of(parts[0].arrays())
    for part in parts[1:]:
        joined.join(RowSample.of(part.arrays()))
    np.testing.assert_array_equal(joined.rows, whole.rows)
    np.testing.assert_array_equal(joined.smaller(17), whole.smaller(17))
    assert joined.seen == whole.seen == 3000 and len(joined.rows) == 100


def test_rows_that_are_kept_are_random_ones():
    """Each row is kept with the same probability, whatever its position."""
    counts = np.zeros(400)
    for seed in range(300):
        kept = KeptRows(seed, {Purpose.SCORES: 40})
        for number in range(4):
            kept.begin(number)
            kept.add(Batch({"x": np.zeros((100, 1))}, 100), 100 * number, 100)
        counts[kept.first[Purpose.SCORES].positions] += 1
    assert counts.sum() == 300 * 40
    # 300 draws with probability 1/10 have a standard deviation of 5.2; of 400 rows none is beyond 5 of them
    assert abs(counts - 30).max() < 26
    assert abs(counts[:200].sum() - 6000) < 5 * np.sqrt(12000 * 0.25)


# ------------------------------------------------------------------------------- what is refused


def test_parts_that_do_not_belong_together(part):
    one = Collected.load(part)
    shard = replace(one.record, shard=2, of=2)
    first = replace(one.parts[0], record=replace(one.record, of=2))

    def merged(**changed):
        second = replace(one.parts[0], record=replace(shard, **changed))
        return Collected.merge([Collected((first,)), Collected((second,))])

    assert len(merged().parts) == 2
    for changed in ({"rows": 301}, {"begins": "x"}, {"source": "x"}, {"batch": 32}, {"version": "0"}):
        with pytest.raises(UserError, match="do not belong together"):
            merged(**changed)
    with pytest.raises(UserError, match="two parts 1/2"):
        merged(shard=1)
    for name in ("onnxruntime", "processor"):
        with pytest.warns(DataWarning, match="not byte for byte"):
            merged(**{name: "other"})
    with pytest.raises(UserError, match=r"parts are missing: 2/2 \(1 of 2\)"):
        gapa_onnx.convert(dense(), Collected((first,)))
    with pytest.raises(UserError, match="another model"):
        gapa_onnx.convert(filled(DENSE, w1=(20, 32), w2=(32, 24), w3=(24, 4)[::-1][::-1]), rebuilt(one))
    with pytest.raises(UserError, match="hold the choices"):
        gapa_onnx.convert(dense(), one, k=5)
    with pytest.raises(UserError, match="budget"):
        gapa_onnx.convert(dense(), one, budget=2.0)


def rebuilt(one: Collected) -> Collected:
    return Collected((replace(one.parts[0], record=replace(one.record, source="0" * 64)),))


def test_damaged_parts_are_told(part, tmp_path, capsys):
    whole, path = part.read_bytes(), tmp_path / "bad.npz"
    generator = np.random.default_rng(0)
    for position in generator.integers(0, len(whole), 40).tolist():
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 0x55]) + whole[position + 1 :])
        try:
            same = Collected.load(path)
        except UserError as error:
            assert "is no part, or it is damaged" in error.message
        else:  # a byte that nobody reads
            assert same.record == Collected.load(part).record
    path.write_bytes(whole[: len(whole) // 2])
    (tmp_path / "net.onnx").write_bytes(dense().SerializeToString())
    assert main(["convert", str(tmp_path / "net.onnx"), "--parts", str(path)]) == 2
    assert "damaged" in capsys.readouterr().err
    assert not (tmp_path / "net.gapa.onnx").exists()


def test_pickles_are_never_read(part, tmp_path):
    path = tmp_path / "pickled.npz"
    with zipfile.ZipFile(part) as old, zipfile.ZipFile(path, "w") as new:
        for name in old.namelist():
            if name.endswith("digests.npy"):
                with new.open(name, "w") as file:
                    np.lib.format.write_array(file, np.array([print], object), allow_pickle=True)
            else:
                new.writestr(name, old.read(name))
    with pytest.raises(UserError, match="damaged"):
        Collected.load(path)


def test_data_that_cannot_be_cut_are_refused():
    def batches():
        yield {"x": vectors(100)}

    with pytest.raises(UserError, match="cannot be read in shards: only reading them all"):
        gapa_onnx.collect(dense(), batches, shard="1/2", **SMALL)
    for text in ("3", "0/2", "3/2", "a/b"):
        with pytest.raises(UserError, match="no shard"):
            Shard.of(text)


def test_shards_cover_all_rows_once():
    for rows, count in ((0, 3), (10, 3), (7, 8), (55_000, 8)):
        ends = [Shard(number, count).ends(rows) for number in range(1, count + 1)]
        assert ends[0][0] == 0 and ends[-1][1] == rows
        assert all(one[1] == other[0] for one, other in zip(ends, ends[1:]))


# ------------------------------------------------------------------------------ the command line


def test_the_command_line(tmp_path, capsys):
    model, data, out = tmp_path / "net.onnx", tmp_path / "x.npy", tmp_path / "out.onnx"
    model.write_bytes(dense().SerializeToString())
    np.save(data, vectors(300))
    options = ["--m", "40", "--k", "8", "--batch-size", "64"]
    for shard in (1, 2):
        name = str(tmp_path / f"p{shard}.npz")
        arguments = ["collect", str(model), "--calib", str(data), "--shard", f"{shard}/2", "-o", name]
        assert main([*arguments, *options, "--json"]) == 0
        told = json.loads(capsys.readouterr().out)
        assert (
            told["rows"] == 300
            and told["shard"] == f"{shard}/2"
            and told["read"] == (192 if shard == 1 else 108)
        )
    pattern = str(tmp_path / "p?.npz")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["convert", str(model), "--parts", pattern, "-o", str(out)]) == 0
    whole = gapa_onnx.convert(str(model), str(data), tmp_path / "whole.onnx", **SMALL)
    assert out.read_bytes() == whole.path.read_bytes()
    assert main(["convert", str(model), "--parts", pattern, "--k", "5"]) == 2
    assert "--k is given beside them" in capsys.readouterr().err
    assert main(["convert", str(model)]) == 2
    assert "give --calib PATH" in capsys.readouterr().err

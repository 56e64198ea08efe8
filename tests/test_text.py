"""A decoder and an encoder from text to answers: the file remembers how text was read, and reads it so ever after."""

from __future__ import annotations

import hashlib
import json
import shlex
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.decoders import decoder, with_empty_past
from support.texts import decoder_tokenizer, encoder, encoder_tokenizer, sentences

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.data import TextOptions, metadata, remembered
from gapa_onnx.data import tokenizer as tokenizer_module
from gapa_onnx.data.tokenizer import METADATA_KEY as TOKENIZER_KEY
from gapa_onnx.errors import DataWarning, UserError
from gapa_onnx.measure import bench, verify
from gapa_onnx.record import METADATA_KEY, TextRecord, read

pytest.importorskip("tokenizers")

LENGTH = 16
SMALL = {"m": 40, "k": 5}
OPTIONS = [
    "--m",
    "40",
    "--k",
    "5",
    "--task",
    "logits=tokens",
    "--top-k",
    "8",
    "--sites",
    "last",
    "--witnesses",
    "none",
]


@dataclass(frozen=True)
class Case:
    """A cached decoder that was converted with text, and more text."""

    folder: Path
    source: Path
    path: Path
    tokenizer: Path
    command: str  #: that `convert` printed as the next

    def text(self, name: str) -> Path:
        return self.folder / f"{name}.txt"


TEXTS = {
    "calib": sentences(40, 0, 20, 60),
    "data": sentences(8, 1, 12, 40),
    "held": sentences(30, 2, 20, 60),
    "other": [text[::-1] for text in sentences(30, 3, 20, 60)],
}


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("text")
    source, path, tokenizer = (folder / name for name in ("net.onnx", "net.gapa.onnx", "tokenizer.json"))
    onnx.save(decoder(cached=True, blocks=1), source)
    decoder_tokenizer().save(str(tokenizer))
    for name, texts in TEXTS.items():
        (folder / f"{name}.txt").write_text("\n".join(texts))
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "gapa_onnx.cli.render.lines", lambda *told: lines.extend(t for n, t in told if n == "next")
        )
        arguments = ["convert", source, "--calib", folder / "calib.txt", "-o", path, "--seq-len", LENGTH]
        arguments += ["--tokenizer", tokenizer, "--held-out", folder / "held.txt", *OPTIONS]
        assert main([str(word) for word in arguments]) == 0
    return Case(folder, source, path, tokenizer, lines[-1])


def rows_by_hand(texts: list[str], length: int = LENGTH) -> dict[str, np.ndarray]:
    """All inputs of a decoder for the whole pieces of texts, made without the library."""
    tokenizer, rows = decoder_tokenizer(), []
    for text in texts:
        ids = tokenizer.encode(text).ids
        rows += [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    ids = np.array(rows, np.int64)
    return with_empty_past({"input_ids": ids, "attention_mask": np.ones_like(ids)}, blocks=1)


def said(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[str, list[str]]:
    """What a command prints, and its warnings, once it has gone well."""
    capsys.readouterr()
    assert main([str(argument) for argument in arguments]) == 0
    out, err = capsys.readouterr()
    return out, [line for line in err.splitlines() if not line.startswith("note:")]


def answers(path: Path, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = gapa_onnx.session(path)
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds)))


# -------------------------------------------------------------------------------- the record


def test_the_record_holds_how_text_was_read(case, capsys):
    model = onnx.load(case.path)
    record = read(model)
    before = remembered(record, metadata(model))
    content = case.tokenizer.read_bytes()
    assert record.text == TextRecord(
        hashlib.sha256(content).hexdigest(), "tokenizer.json", LENGTH, "text", "pieces", 300, None, None
    )
    assert before.tokenizer.text.encode() == content
    assert record.data.rows == len(rows_by_hand(TEXTS["calib"])["input_ids"])
    line = f"tokenizer.json (sha256 {record.text.tokenizer[:12]}…), documents in pieces of 16 tokens, of 300 that"
    assert line in said(capsys, "inspect", case.path)[0]
    printed = json.loads(said(capsys, "inspect", "--json", case.path)[0])["provenance"]["text"]
    assert printed["seq_len"] == LENGTH
    rehearsed, _ = said(
        capsys,
        "convert",
        case.source,
        "--calib",
        case.text("calib"),
        "--tokenizer",
        case.tokenizer,
        "--dry-run",
    )
    assert "documents in pieces of 96 tokens" in rehearsed and "200,000 in all at most" in rehearsed


@pytest.mark.parametrize(
    "damage, words",
    [
        (lambda kept: "?" + kept, "its tokenizer cannot be unpacked"),
        (lambda kept: kept[: len(kept) // 8 * 4], "its tokenizer is cut short"),
        (
            lambda kept: tokenizer_module.TokenizerFile("{}", None, "").kept(),
            "text.tokenizer is not the sha256",
        ),
    ],
)
def test_a_tokenizer_that_is_damaged(case, damage, words):
    model = onnx.load(case.path)
    kept = metadata(model)[TOKENIZER_KEY]
    with pytest.raises(UserError, match=words):
        remembered(read(model), {TOKENIZER_KEY: damage(kept)})


def test_a_tokenizer_that_is_too_large_to_keep(case, tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_module, "MOST_KEPT", 10)
    assert tokenizer_module.tokenizer_file(case.tokenizer).kept() is None
    model = onnx.load(case.path)
    entries = [entry for entry in model.metadata_props if entry.key == METADATA_KEY]
    del model.metadata_props[:]
    model.metadata_props.extend(entries)
    onnx.save(model, tmp_path / "a.onnx")
    move = {"quantile": 0.9, "data": case.text("data"), "out": tmp_path / "b.onnx"}
    with pytest.raises(UserError, match="calibrated with tokenizer.json .* too large to keep") as caught:
        gapa_onnx.set_threshold(tmp_path / "a.onnx", **move)
    assert "`TextOptions(tokenizer=…)`" in caught.value.hint
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        gapa_onnx.set_threshold(tmp_path / "a.onnx", **move, text=TextOptions(case.tokenizer))


# ------------------------------------------------------------------------------ the commands


def test_the_next_command_works(case, capsys):
    program, *arguments = shlex.split(case.command)
    assert program == "gapa-onnx" and not any("token" in word for word in arguments[1:])
    out = case.folder / "next.npz"
    _, warned = said(capsys, *arguments, "-o", out)
    assert not warned and len(np.load(out)["logits_score"]) == len(rows_by_hand(TEXTS["calib"])["input_ids"])


def test_run_reads_text_as_the_file_says(case, capsys):
    out = case.folder / "a.npz"
    for options, length, warnings_told in (((), LENGTH, 0), (("--seq-len", "9"), 9, 1)):
        _, warned = said(capsys, "run", case.path, "--data", case.text("data"), "-o", out, *options)
        assert len(warned) == warnings_told
        expected = answers(case.path, rows_by_hand(TEXTS["data"], length))
        found = dict(np.load(out))
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            # the same numbers in batches of another size: rounding of float32
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-4, err_msg=name)
    (line,) = warned
    assert line == (
        "warning: this text is read with --seq-len 9, but the file was calibrated with --seq-len 16: scores will differ"
    )


def test_sequences_of_several_lengths(case, capsys):
    texts = ["the cat sat", "the dog ran under a tree", "red"]
    (case.folder / "prompts.txt").write_text("\n\n".join(texts))
    out = case.folder / "p.npz"
    said(capsys, "run", case.path, "--data", case.folder / "prompts.txt", "--seq-len", "40", "-o", out)
    found = np.load(out)
    lengths = [len(decoder_tokenizer().encode(text).ids) for text in texts]
    assert len(set(lengths)) > 1 and found["logits"].shape[:2] == (3, max(lengths))
    for row, (text, length) in enumerate(zip(texts, lengths)):
        alone = answers(case.path, rows_by_hand([text], length))
        np.testing.assert_allclose(found["logits"][row, :length], alone["logits"][0], rtol=1e-4, atol=1e-4)
        assert np.isnan(found["logits"][row, length:]).all()
        assert (found["logits_tokens"][row, length:] == -1).all()
    assert said(capsys, "run", case.path, "--data", case.folder / "prompts.txt")[0]


def test_another_tokenizer_is_used_and_warned_of(case, capsys, tmp_path):
    decoder_tokenizer(270).save(str(tmp_path / "tokenizer.json"))
    _, (line,) = said(
        capsys,
        "run",
        case.path,
        "--data",
        case.text("data"),
        "--tokenizer",
        tmp_path,
        "-o",
        tmp_path / "a.npz",
    )
    assert "this text is read with another tokenizer, but the file was calibrated with that of sha256" in line


def test_verify_and_bench_read_text_so(case, capsys, monkeypatch):
    fed = []
    check, measure = verify.verify, bench.measure_on
    monkeypatch.setattr(
        verify, "verify", lambda s, c, batches, **o: fed.extend(batches) or check(s, c, batches, **o)
    )
    monkeypatch.setattr(
        bench,
        "measure_on",
        lambda s, c, feeds, **o: fed.append(feeds) or measure(s, c, feeds, **{**o, "parts": False}),
    )
    expected = rows_by_hand(TEXTS["data"])
    pair = (case.source, case.path, "--data", case.text("data"))
    for command in (
        ("verify", *pair, "--rows", "16"),
        ("bench", *pair, "--batch-size", "16", "--rounds", "1"),
    ):
        fed.clear()
        main([str(word) for word in command])  # a busy machine refuses the figure of a bench
        assert capsys.readouterr().err.count("warning:") == 0
        for name, array in expected.items():
            got = np.concatenate([batch[name] for batch in fed])
            assert len(got) >= 16
            np.testing.assert_array_equal(got, array[: len(got)])


def test_threshold_on_text(case, capsys, tmp_path):
    np.savez(tmp_path / "rows.npz", **rows_by_hand(TEXTS["held"]))
    (tmp_path / "held.jsonl").write_text("\n".join(json.dumps({"body": text}) for text in TEXTS["held"]))
    found = {}
    for data, options in ((tmp_path / "held.jsonl", ["--text-field", "body"]), (tmp_path / "rows.npz", [])):
        move = (
            "threshold",
            case.path,
            "--quantile",
            "0.9",
            "--data",
            data,
            "-o",
            tmp_path / "a.onnx",
            "--json",
        )
        text, warned = said(capsys, *move, *options)
        assert not warned
        found[data.suffix] = {name: entry["threshold"] for name, entry in json.loads(text).items()}
        moved = onnx.load(tmp_path / "a.onnx")
        assert read(moved).text == read(onnx.load(case.path)).text and TOKENIZER_KEY in metadata(moved)
    assert found[".jsonl"] == pytest.approx(found[".npz"], rel=1e-3)


def test_evaluate_knows_the_tokens_that_follow(case):
    pytest.importorskip("sklearn")
    rows, other = rows_by_hand(TEXTS["held"]), rows_by_hand(TEXTS["other"])
    following = np.concatenate([rows["input_ids"][:, 1:], np.full((len(rows["input_ids"]), 1), -1)], axis=1)
    expected = gapa_onnx.evaluate(case.path, rows, following, ood=other)
    with warnings.catch_warnings():
        warnings.simplefilter("error", DataWarning)
        found = gapa_onnx.evaluate(case.path, case.text("held"), ood=case.text("other"))
    assert found.metrics["source"]["nll"] == pytest.approx(expected.metrics["source"]["nll"], rel=1e-4)
    # by hand: the mean over all tokens but the first of each row
    logits = answers(case.path, rows)["logits"].astype(np.float64)
    log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    nll = -np.take_along_axis(log_probs[:, :-1], rows["input_ids"][:, 1:, None], axis=-1).mean()
    assert found.metrics["source"]["nll"] == pytest.approx(nll, rel=1e-4)
    assert found.detection["score"]["auroc"] == pytest.approx(expected.detection["score"]["auroc"], abs=1e-3)


def test_evaluate_text_of_several_lengths(case, tmp_path):
    pytest.importorskip("sklearn")
    texts = sentences(12, 5, 2, 9)
    (tmp_path / "a.txt").write_text("\n".join(texts))
    found = gapa_onnx.evaluate(case.path, tmp_path / "a.txt", text=TextOptions(seq_len=LENGTH))
    total = count = 0
    for ids in (decoder_tokenizer().encode(text).ids for text in texts):
        whole = (
            [ids]
            if len(ids) < LENGTH
            else [ids[at : at + LENGTH] for at in range(0, len(ids) - LENGTH + 1, LENGTH)]
        )
        for piece in whole:
            feeds = with_empty_past(
                {"input_ids": np.array([piece]), "attention_mask": np.ones((1, len(piece)), np.int64)}, 1
            )
            logits = answers(case.path, feeds)["logits"][0].astype(np.float64)
            log_probs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            total -= sum(log_probs[at, token] for at, token in enumerate(piece[1:]))
            count += len(piece) - 1
    assert found.metrics["source"]["nll"] == pytest.approx(total / count, rel=1e-4)


# ------------------------------------------------------------------------------------ Python


def test_python_takes_a_tokenizer_and_strange_text(case):
    made = gapa_onnx.convert(
        decoder(blocks=1), case.text("calib"), strange=case.text("other"), task="logits=tokens", top_k=8,
        text=TextOptions(decoder_tokenizer(), seq_len=LENGTH, tokens=1200), **SMALL,
    )  # fmt: skip
    record = read(made.model)
    # 75 sequences, of which documents with a third of them at most are set apart, where what is ordinary is counted
    apart = record.data.held_out
    assert record.data.rows + apart.counting == 75 and apart.among == "documents set apart"
    assert 15 <= apart.counting <= 25 and record.text.file is None and record.text.vocabulary == 300
    with pytest.raises(UserError, match="strange inputs are calibration rows too"):
        gapa_onnx.convert(
            decoder(blocks=1), case.text("calib"), strange=case.text("calib"), task="logits=tokens", top_k=8,
            text=TextOptions(decoder_tokenizer(), seq_len=LENGTH, tokens=1200), **SMALL,
        )  # fmt: skip


def test_text_that_is_shorter_than_a_sequence(case, capsys, tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on a mat")
    arguments = ["convert", case.source, "--calib", tmp_path / "a.txt", "--tokenizer", case.tokenizer]
    assert main([*map(str, arguments), "-o", str(tmp_path / "a.onnx")]) == 2
    error = capsys.readouterr().err
    assert "tokens, fewer than one sequence of 96" in error and "shorter sequences with --seq-len\n" in error
    assert not (tmp_path / "a.onnx").exists()


def test_an_encoder_has_one_row_for_each_document(tmp_path):
    pytest.importorskip("sklearn")
    texts, labels = sentences(120, 6, 3, 30), np.arange(120) % 3
    (tmp_path / "calib.txt").write_text("\n".join(sentences(150, 7, 3, 30)))
    (tmp_path / "test.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    encoder_tokenizer().save(str(tmp_path / "tokenizer.json"))
    options = TextOptions(tmp_path / "tokenizer.json", seq_len=20)
    out = tmp_path / "a.onnx"
    made = gapa_onnx.convert(encoder(), tmp_path / "calib.txt", out, text=options, **SMALL)
    record = read(made.model)
    assert record.data.rows == 150 and record.text.rows == "documents" and record.text.longest == 48
    tokenizer = encoder_tokenizer()
    tokenizer.enable_truncation(20)
    tokenizer.enable_padding(length=20)
    encoded = tokenizer.encode_batch(texts)
    rows = {
        "input_ids": np.array([one.ids for one in encoded], np.int64),
        "attention_mask": np.array([one.attention_mask for one in encoded], np.int64),
        "token_type_ids": np.array([one.type_ids for one in encoded], np.int64),
    }
    expected = gapa_onnx.evaluate(out, rows, labels)
    found = gapa_onnx.evaluate(out, tmp_path / "test.jsonl", labels)
    assert found.metrics["gapa"] == pytest.approx(expected.metrics["gapa"], rel=1e-4)
    with pytest.raises(UserError, match="at most 48 tokens, not of 49"):
        gapa_onnx.evaluate(out, tmp_path / "test.jsonl", labels, text=replace(options, seq_len=49))

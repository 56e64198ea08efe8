"""Text as rows of tokens: held against the tokenizer itself, and what goes along with tokens against plain arrays."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from support.texts import decoder_tokenizer, encoder_tokenizer, sentences

from gapa_onnx.data import InputSpec, Preparation, TextOptions, open_data
from gapa_onnx.data import documents as documents_module
from gapa_onnx.data.spec import TokenLimits
from gapa_onnx.data.strange import strange_batches
from gapa_onnx.errors import UserError

pytest.importorskip("tokenizers")

LENGTH = 12
IDS = InputSpec("input_ids", np.int64, ("batch", "sequence"))
MASK = InputSpec("attention_mask", np.int64, ("batch", "sequence"))
TYPES = InputSpec("token_type_ids", np.int64, ("batch", "sequence"))
TEXTS = sentences(40, 0)


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, made in (("decoder", decoder_tokenizer()), ("encoder", encoder_tokenizer())):
        made.save(str(folder / f"{name}.json"))
    return {name: folder / f"{name}.json" for name in ("decoder", "encoder")}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("\n\n".join(TEXTS) + "\n   \n")
    return path


def opened(path, inputs, tokenizer, **options):
    return open_data(path, inputs, Preparation(text=TextOptions(tokenizer, **options)))


def rows_of(data, batch_size: int = 7) -> list[dict[str, np.ndarray]]:
    """Every row with all inputs, whatever the batches."""
    return [
        {name: array[row] for name, array in batch.items()}
        for batch in data.batches(batch_size)
        for row in range(batch.rows)
    ]


def pieces_by_hand(texts: list[str], length: int = LENGTH) -> list[list[int]]:
    tokenizer, made = decoder_tokenizer(), []
    for text in texts:
        ids = tokenizer.encode(text).ids
        whole = [ids[at : at + length] for at in range(0, len(ids), length)]
        made += [ids] if len(ids) < length else [piece for piece in whole if len(piece) == length]
    return made


# -------------------------------------------------------------------------------- rows


def test_a_decoder_reads_pieces(corpus, tokenizers):
    expected = pieces_by_hand(TEXTS)
    assert {len(piece) for piece in expected} > {LENGTH} and len(expected) > len(TEXTS)
    data = opened(corpus, (IDS,), tokenizers["decoder"], seq_len=LENGTH)
    assert data.rows == len(expected)
    for size in (1, 7, 500):
        found = [row["input_ids"].tolist() for row in rows_of(data, size)]
        assert sorted(found) == sorted(expected)
    assert [row["input_ids"].tolist() for row in rows_of(data, 1)] == expected


def test_an_encoder_reads_documents(corpus, tokenizers):
    data = opened(corpus, (IDS, MASK, TYPES), tokenizers["encoder"], seq_len=LENGTH)
    rows, tokenizer = rows_of(data), encoder_tokenizer()
    assert data.rows == len(rows) == len(TEXTS)
    cut = 0
    for row, text in zip(rows, TEXTS):
        ids = tokenizer.encode(text).ids
        if len(ids) > LENGTH:
            ids, cut = [*ids[: LENGTH - 1], tokenizer.token_to_id("[SEP]")], cut + 1
        padding = LENGTH - len(ids)
        assert row["input_ids"].tolist() == ids + [tokenizer.token_to_id("[PAD]")] * padding
        assert row["attention_mask"].tolist() == [1] * len(ids) + [0] * padding
        assert not row["token_type_ids"].any() and row["token_type_ids"].shape == (LENGTH,)
    assert 0 < cut < len(TEXTS)


def test_which_of_the_two_is_seen_or_said(corpus, tokenizers):
    past = InputSpec("past_key_values.0.key", np.float32, ("batch", 2, "past", 8))
    for inputs, tokenizer, rows, expected in (
        ((IDS, MASK), "decoder", None, "pieces"),
        ((IDS, MASK), "encoder", None, "documents"),
        ((IDS, MASK, past), "encoder", None, "pieces"),
        ((IDS, MASK, TYPES), "decoder", None, "documents"),
        ((IDS, MASK), "decoder", "documents", "documents"),
        ((IDS, MASK), "encoder", "pieces", "pieces"),
    ):
        data = opened(corpus, inputs, tokenizers[tokenizer], rows=rows)
        assert data.text.record.rows == expected
        assert data.text.record.seq_len == 96


def test_a_length_that_the_model_fixes(corpus, tokenizers):
    ids, mask = (InputSpec(name, np.int64, (4, LENGTH)) for name in ("input_ids", "attention_mask"))
    expected = pieces_by_hand(TEXTS)
    masked = rows_of(opened(corpus, (ids, mask), tokenizers["decoder"]))
    for row, piece in zip(masked, expected):
        assert row["input_ids"][row["attention_mask"] == 1].tolist() == piece
        assert row["attention_mask"].sum() == len(piece)
    assert len(masked) == len(expected) // 4 * 4  # what fills no batch of four is left out
    whole = [piece for piece in expected if len(piece) == LENGTH]
    bare = rows_of(opened(corpus, (ids,), tokenizers["decoder"]))
    assert [row["input_ids"].tolist() for row in bare] == whole[: len(whole) // 4 * 4]
    with pytest.raises(UserError, match=r"takes int64 \(4, 12\), so sequences cannot have 13"):
        opened(corpus, (ids,), tokenizers["decoder"], seq_len=13)


@pytest.mark.parametrize("most", [LENGTH, 100, 101, 500, 10**9])
def test_so_many_tokens_at_most(corpus, tokenizers, most):
    expected, left = [], most
    for piece in pieces_by_hand(TEXTS):
        if len(piece) > left:
            break
        left -= len(piece)
        expected.append(piece)
    if most == LENGTH:
        assert len(expected) == 1
    data = opened(corpus, (IDS,), tokenizers["decoder"], seq_len=LENGTH, tokens=most)
    assert [row["input_ids"].tolist() for row in rows_of(data)] == expected
    assert data.rows == len(expected) and f"{most:,} in all at most" in data.description


def test_next_tokens(corpus, tokenizers):
    expected = pieces_by_hand(TEXTS)
    found = opened(corpus, (IDS,), tokenizers["decoder"], seq_len=LENGTH).text.next_tokens()
    assert found.shape == (len(expected), LENGTH)
    for row, piece in zip(found.tolist(), expected):
        assert row == piece[1:] + [-1] * (LENGTH - len(piece) + 1)


def test_text_is_read_once_and_as_far_as_asked(tokenizers, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("\n".join(sentences(2000, 1)))
    read = []
    lines = documents_module._lines
    monkeypatch.setattr(
        documents_module, "_lines", lambda file: (read.append(1) or line for line in lines(file))
    )
    data = opened(path, (IDS,), tokenizers["decoder"], seq_len=LENGTH)
    next(data.batches(4))
    assert len(read) < 600
    count = data.rows
    assert len(read) in (2000, 2001)
    path.unlink()
    for _ in range(2):
        assert len(rows_of(data, 64)) == count
    assert len(read) in (2000, 2001)


# ------------------------------------------------------------------------------- files


def test_jsonl_and_folders_hold_the_same(corpus, tokenizers, tmp_path):
    def found(path, **options):
        data = opened(path, (IDS,), tokenizers["decoder"], seq_len=LENGTH, **options)
        return [row["input_ids"].tolist() for row in rows_of(data, 1)], data.description

    expected = pieces_by_hand(TEXTS)
    for name in ("text", "content"):
        lines = [json.dumps({"id": n, name: text}) for n, text in enumerate(TEXTS)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join([*lines, "", json.dumps({name: "  "})]))
    assert found(tmp_path / "text.jsonl")[0] == expected
    assert found(tmp_path / "content.jsonl", field="content")[0] == expected
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    (folder / "a.txt").write_text("\ufeff" + "\r\n".join(TEXTS[:10]), encoding="utf-8", newline="")
    (folder / "inner" / "c.txt").write_text("\n".join(TEXTS[20:]))
    (folder / "b.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in TEXTS[10:20]))
    rows, told = found(folder)
    assert rows == expected and told.startswith("folder of 3 text files, in sequences of 12 tokens")
    np.savez(folder / "rows.npz", input_ids=np.ones((3, 5), np.int64))  # then text is a remark about the data
    (batch,) = opened(folder, (IDS,), None).batches()
    assert batch["input_ids"].shape == (3, 5)


def test_a_line_as_long_as_a_book_is_taken_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(documents_module, "LONGEST_PART", 64)
    words = " ".join(sentences(5, 3, 30, 60))
    path = tmp_path / "book.txt"
    path.write_text("first line\n" + words + "\n" + "x" * 200 + "\nlast line")
    found = list(documents_module.documents([path], "text"))
    assert found[0] == "first line" and found[-1] == "last line"
    assert max(map(len, found)) <= 2 * 64
    book = [part for part in found[1:-1] if not part.startswith("xx")]
    assert "".join(book) == words and len(book) > 5
    assert "".join(part for part in found if part.startswith("xx")) == "x" * 200


# ------------------------------------------------------------------- what goes along with tokens


def cache(name: str, *shape: int | str, kind=np.float32) -> InputSpec:
    return InputSpec(name, kind, shape)


FILLED = {
    "optimum": ([MASK, cache("past_key_values.0.key", "b", 3, "past", 8)], (2, 3, 0, 8)),
    "self": ([cache("past_key_self_0", "b", 3, "p", 8, kind=np.float16)], (2, 3, 0, 8)),
    "static batch": ([cache("past.0.value", "batch", 3, "p", 8)], (2, 3, 0, 8)),
    "stacked": ([cache("past_0", 2, "batch", 3, "p", 8)], (2, 1, 3, 0, 8)),
    "open head": ([cache("past_key_values.0.key", "b", 3, "past", "kv_cache_dim")], (2, 3, 0, 64)),
}  # fmt: skip


@pytest.mark.parametrize("name", FILLED)
def test_caches_are_empty(corpus, tokenizers, name):
    others, shape = FILLED[name]
    ids = InputSpec("input_ids", np.int64, ("batch", "sequence"), TokenLimits(None, None, 64))
    data = opened(corpus, (ids, *others), tokenizers["decoder"], seq_len=LENGTH)
    batches = list(data.batches(2))
    filled = batches[0][others[-1].name]
    assert filled.dtype == others[-1].dtype
    one = name == "stacked"  # which has the rows on another axis, so that they come one by one
    assert filled.shape == shape and batches[0]["input_ids"].shape == (1 if one else 2, LENGTH)


def test_masks_positions_and_switches(corpus, tokenizers):
    positions = InputSpec("position_ids", np.int32, ("batch", "sequence"))
    mask = InputSpec("attention_mask", np.float32, ("batch", "past + sequence"))
    branch = InputSpec("use_cache_branch", np.bool_, (1,))
    keep = InputSpec("num_logits_to_keep", np.int64, ())
    types = InputSpec("serving/segment_ids:0", np.int64, None)
    data = opened(corpus, (IDS, positions, mask, branch, keep, types), tokenizers["decoder"], seq_len=LENGTH, rows="pieces")  # fmt: skip
    for batch in data.batches(5):
        count, length = batch["input_ids"].shape
        np.testing.assert_array_equal(batch["position_ids"], np.tile(np.arange(length), (count, 1)))
        np.testing.assert_array_equal(batch["attention_mask"], np.ones((count, length)))
        assert batch["position_ids"].dtype == np.int32 and batch["attention_mask"].dtype == np.float32
        assert batch["use_cache_branch"].tolist() == [False] and batch["num_logits_to_keep"] == 0
        assert batch["num_logits_to_keep"].shape == ()
        assert not batch[types.name].any() and batch[types.name].shape == (count, length)


@pytest.mark.parametrize(
    "spec",
    [
        InputSpec("encoder_hidden_states", np.float32, ("b", "s", 8)),
        InputSpec("decoder_input_ids", np.int64, ("b", "s")),
        cache("past_key_values.0.key", "b", 3, 128, 8),
        cache("past_key_values.0.key", "b", "heads", "past", 8),
        cache("past_key_values.0.key", "b", 3, "past", "kv_cache_dim"),
        InputSpec("attention_mask", np.float32, ("b", 1, "s", "s")),
        InputSpec("cache_position", np.int64, ("s",)),
        InputSpec("use_cache_branch", np.int64, ()),
    ],
    ids=lambda spec: f"{spec.name} {spec.shape}",
)
def test_what_cannot_be_filled_in_is_named(corpus, tokenizers, spec):
    with pytest.raises(UserError, match="text gives the model its tokens, but not its input ") as caught:
        opened(corpus, (IDS, spec), tokenizers["decoder"])
    assert f"'{spec.name}' ({spec})" in caught.value.message and caught.value.hint


def test_tokens_of_other_names(corpus, tokenizers):
    for name in ("tokens", "serving/input_ids:0", "anything"):
        data = opened(corpus, (InputSpec(name, np.int32, (None, None)),), tokenizers["decoder"])
        assert next(data.batches(2))[name].dtype == np.int32


def test_strange_versions_leave_what_is_filled_in_alone(corpus, tokenizers):
    inputs = (
        IDS,
        MASK,
        InputSpec("position_ids", np.int64, ("batch", "sequence")),
        cache("past_key_values.0.key", "batch", 3, "past", 8),
    )
    batch = next(opened(corpus, inputs, tokenizers["decoder"], seq_len=LENGTH, tokens=240).batches(20))
    made = dict(strange_batches(batch, 0, batch["attention_mask"] == 1))
    assert made.keys() == {"shuffled", "foreign"}
    for strange in made.values():
        assert (strange["input_ids"] != batch["input_ids"]).any()
        for spec in inputs[1:]:
            assert strange[spec.name] is batch[spec.name]


# ------------------------------------------------------------------------------- bad input


def refused(path, inputs=(IDS, MASK), **options) -> str:
    with pytest.raises(UserError) as caught:
        opened(path, inputs, options.pop("tokenizer", None), **options)
    assert caught.value.hint
    return str(caught.value)


def test_text_without_a_tokenizer(corpus, tmp_path):
    assert "is text, and no tokenizer is given" in refused(corpus)
    assert "there is no tokenizer" in refused(corpus, tokenizer=tmp_path)
    assert "of type int cannot be read" in refused(corpus, tokenizer=5)


@pytest.mark.parametrize(
    "content, words",
    [
        ("no json", "it is not JSON"),
        ("[1]", "it has no model"),
        ('{"model": {"type": "None of them"}}', "is not a tokenizer: "),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_tokenizer_that_is_none(corpus, tmp_path, content, words):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert words in refused(corpus, tokenizer=path)
    assert words in refused(corpus, tokenizer=tmp_path)


def test_without_the_package(corpus, tokenizers, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match="needs tokenizers") as caught:
        opened(corpus, (IDS,), tokenizers["decoder"])
    assert "gapa-onnx[text]" in caught.value.hint


def test_more_tokens_than_the_model_knows(corpus, tokenizers):
    ids = InputSpec("input_ids", np.int64, ("b", "s"), TokenLimits(279, 20))
    message = refused(corpus, (ids,), tokenizer=tokenizers["decoder"])
    assert "decoder.json has 280 tokens, but the model knows 279" in message
    ids = InputSpec("input_ids", np.int64, ("b", "s"), TokenLimits(280, 20))
    assert opened(corpus, (ids,), tokenizers["decoder"]).text.record.seq_len == 20
    message = refused(corpus, (ids,), tokenizer=tokenizers["decoder"], seq_len=21)
    assert "at most 20 tokens, not of 21" in message


@pytest.mark.parametrize(
    "text, words",
    [
        ("", "holds no text"),
        ("\n  \n\t\n", "holds no text"),
        ('{"texts": "a", "n": 1}', "line 1 has no field 'text'; it has 'texts', 'n'"),
        ('\n{"text": 1}', "line 2: the field 'text' holds no text"),
        ('"text"', "line 1 is not a JSON object"),
        ("{", "line 1 is not JSON"),
    ],
)
def test_text_that_is_none(tokenizers, tmp_path, text, words):
    path = tmp_path / ("a.jsonl" if words.startswith("line") else "a.txt")
    path.write_text(text)
    assert words in refused(path, tokenizer=tokenizers["decoder"])


def test_the_field_that_is_meant_is_guessed(tokenizers, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"id": "3", "content": "the cat sat", "n": 1}')
    message = refused(tmp_path / "a.jsonl", tokenizer=tokenizers["decoder"])
    assert "`TextOptions(field='content')`?" in message


def test_documents_that_are_too_short(tokenizers, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("the cat\nthe dog sat on a mat\n")
    fixed = (InputSpec("input_ids", np.int64, ("b", 30)),)
    assert "has the 30 tokens of a sequence; the longest has " in refused(
        path, fixed, tokenizer=tokenizers["decoder"]
    )
    data = opened(path, (IDS,), tokenizers["decoder"])
    assert data.rows == 2
    with pytest.raises(UserError, match="tokens, fewer than one sequence of 96"):
        data.text.require_a_sequence()
    message = refused(path, (IDS, MASK, TYPES), tokenizer=tokenizers["encoder"], seq_len=2)
    assert "no room for text: the tokenizer puts 2 around it" in message


def test_too_few_tokens(corpus, tokenizers):
    message = refused(corpus, tokenizer=tokenizers["decoder"], seq_len=LENGTH, tokens=1)
    assert "`TextOptions(tokens=1)` is less than the first sequence has" in message
    for wrong in ({"seq_len": 0}, {"tokens": -1}, {"seq_len": 1.5}, {"rows": "lines"}):
        with pytest.raises(UserError):
            TextOptions(**wrong)


def test_text_for_a_model_that_takes_none(corpus, tokenizers):
    for inputs in (
        (InputSpec("x", np.float32, ("n", 4)),),
        (InputSpec("a", np.int64, ("n", 4)), InputSpec("b", np.int64, ("n", 4))),
    ):
        assert "is text, and the model takes no tokens" in refused(
            corpus, inputs, tokenizer=tokenizers["decoder"]
        )


def test_a_failure_is_told_on_every_pass(tokenizers, tmp_path):
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": text}) for text in sentences(300, 2)]
    path.write_text("\n".join([*good, "{"]))
    data = opened(path, (IDS,), tokenizers["decoder"], seq_len=LENGTH)
    for _ in range(2):
        with pytest.raises(UserError, match="line 301 is not JSON"):
            rows_of(data)

"""Documents of a calibration text that are set apart: whole ones, so many at random, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.texts import decoder_tokenizer, encoder_tokenizer, sentences

from gapa_onnx.data import InputSpec, Preparation, TextOptions, open_data, set_apart
from gapa_onnx.data.source import DataSource

pytest.importorskip("tokenizers")

LENGTH = 16
IDS = InputSpec("input_ids", np.int64, ("batch", "sequence"))
MASK = InputSpec("attention_mask", np.int64, ("batch", "sequence"))


def opened(texts: list[str], folder: Path, tokenizer=decoder_tokenizer, **options) -> DataSource:
    (folder / "corpus.txt").write_text("\n".join(texts))
    how = Preparation(text=TextOptions(tokenizer(), seq_len=LENGTH, **options))
    return open_data(folder / "corpus.txt", [IDS, MASK], how)


def pieces(data: DataSource, batch_size: int) -> list[tuple[int, ...]]:
    return [tuple(row) for batch in data.batches(batch_size) for row in batch["input_ids"].tolist()]


def by_hand(texts: list[str]) -> list[list[tuple[int, ...]]]:
    """The sequences of each document; a rest is dropped."""
    ids = [decoder_tokenizer().encode(text).ids for text in texts]
    return [
        [tuple(one[at : at + LENGTH]) for at in range(0, len(one) - LENGTH + 1, LENGTH)] or [tuple(one)]
        for one in ids
    ]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_documents_stay_whole(tmp_path, seed):
    texts = sentences(30, 1, 10, 60)
    documents = by_hand(texts)
    kept, held = set_apart(opened(texts, tmp_path), seed)
    assert held is not None and held.apart and held.exact and held.counting.all()
    inside, outside = pieces(kept, 5), pieces(held.data, 7)
    assert len(set(inside)) == len(inside) and not set(inside) & set(outside)  # so that rows tell documents
    whose = [all(piece in outside for piece in document) for document in documents]
    assert [piece for document, away in zip(documents, whose) for piece in document if away] == outside
    assert [piece for document, away in zip(documents, whose) for piece in document if not away] == inside
    assert kept.rows == len(inside) and held.rows == held.data.rows == len(outside)
    longest = max(map(len, documents))
    assert len(outside) <= (len(inside) + len(outside)) / 3 < len(outside) + longest  # as many as fit
    again, other = (set_apart(opened(texts, tmp_path), one)[1] for one in (seed, seed + 1))
    assert pieces(again.data, 3) == outside != pieces(other.data, 3)


def test_few_rows_gauge(tmp_path):
    _, held = set_apart(opened(sentences(400, 1, 16, 24), tmp_path), 0)
    assert held.fitting.sum() == min(100, held.rows)


@pytest.mark.parametrize("texts", [sentences(5, 1, 40, 60), sentences(30, 1, 1, 4)], ids=["few", "short"])
def test_nothing_is_set_apart_where_rows_are_documents(tmp_path, texts):
    data = opened(texts, tmp_path)
    assert set_apart(data, 0) == (data, None)


def test_nothing_is_set_apart_of_an_encoder_or_of_numbers(tmp_path):
    data = opened(sentences(30, 1, 10, 60), tmp_path, encoder_tokenizer, rows="documents")
    assert set_apart(data, 0) == (data, None)
    ids = np.arange(160).reshape(10, LENGTH)
    numbers = open_data({"input_ids": ids, "attention_mask": np.ones_like(ids)}, [IDS, MASK])
    assert set_apart(numbers, 0) == (numbers, None)

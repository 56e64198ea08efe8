"""Made sentences, tokenizers that are trained on them, and a tiny encoder that classifies texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
from onnx import numpy_helper

from support.small_models import parse

WORDS = (
    "the a cat dog bird fish sat ran flew swam on under over beside mat tree house river quickly slowly then again "
    "red blue green small large old new and but while because"
).split()
POSITIONS = 48  # that the encoder knows
WIDTH = 16


def sentences(count: int, seed: int, shortest: int = 3, longest: int = 60) -> list[str]:
    """Texts of so many words; each word is like to be followed by a few others."""
    generator = np.random.default_rng(seed)
    follows = np.random.default_rng(0).integers(0, len(WORDS), (len(WORDS), 16))
    made = []
    for length in generator.integers(shortest, longest + 1, count):
        words = [int(generator.integers(len(WORDS)))]
        while len(words) < length:
            words.append(int(follows[words[-1], generator.integers(16)]))
        made.append(" ".join(WORDS[word] for word in words))
    return made


def decoder_tokenizer(size: int = 280) -> Any:
    """Pairs of bytes, and nothing around a text, as decoders have it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.train_from_iterator(sentences(60, 9), trainer)
    return tokenizer


def encoder_tokenizer() -> Any:
    """Whole words, with [CLS] and [SEP] around a text, as encoders have it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    vocabulary = {word: number for number, word in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return tokenizer


def encoder(classes: int = 3, tokens: int = 64, length: int | str = "sequence") -> onnx.ModelProto:
    """A classifier of texts: tokens, types and positions from tables, the mean over what is no padding, two layers."""
    generator = np.random.default_rng(1)
    shape = f"int64[batch, {length}]"
    model = parse(
        f"bert ({shape} input_ids, {shape} attention_mask, {shape} token_type_ids) => (float[batch, {classes}] logits) {{"
        "t = Gather(words, input_ids)  s = Gather(types, token_type_ids)  steps = Shape<start = 1, end = 2>(input_ids)"
        "  places = Slice(numbers, first, steps, second)  p = Gather(positions, places)  ts = Add(t, s)  e = Add(ts, p)"
        "  f = Cast<to = 1>(attention_mask)  m = Unsqueeze(f, last)  kept = Mul(e, m)  sums = ReduceSum(kept, second)"
        "  count = ReduceSum(m, second)  mean = Div(sums, count)  pooled = Squeeze(mean, second)"
        "  z = MatMul(pooled, a)  h = Tanh(z)  logits = MatMul(h, b) }",
        words=generator.normal(size=(tokens, WIDTH)),
        types=generator.normal(size=(2, WIDTH)),
        positions=0.1 * generator.normal(size=(POSITIONS, WIDTH)),
        a=generator.normal(size=(WIDTH, 24)),
        b=generator.normal(size=(24, classes)),
    )
    numbers = {"numbers": np.arange(POSITIONS)[None], "first": [0], "second": [1], "last": [2]}
    model.graph.initializer.extend(
        numpy_helper.from_array(np.array(values, np.int64), name) for name, values in numbers.items()
    )
    return model

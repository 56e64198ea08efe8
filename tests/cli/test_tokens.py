"""A decoder at the command line: tokens with what is said of each, and caches that are told as one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from support.genai_folders import HEAD, KEY_HEADS, builder_folder
from support.texts import decoder_tokenizer, sentences

import gapa_onnx
from gapa_onnx.cli import main

pytest.importorskip("tokenizers")

BLOCKS = 3
TOLD = f"present.0.key … present.{BLOCKS - 1}.value ({2 * BLOCKS} caches)"
FED = TOLD.replace("present", "past_key_values")


@dataclass(frozen=True)
class Case:
    source: Path
    file: Path
    data: Path
    texts: list[str]
    converting: str  #: what `convert` printed

    def said(self, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
        capsys.readouterr()
        assert main([str(argument) for argument in arguments]) == 0
        return capsys.readouterr().out


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("tokens")
    source = builder_folder(folder, BLOCKS)
    texts = ["the cat\nsat", *sentences(5, 7, 20, 40)]
    (folder / "data.jsonl").write_text("".join(f'{{"text": {text!r}}}\n'.replace("'", '"') for text in texts))
    (folder / "corpus.txt").write_text("\n".join(sentences(40, 0, 20, 60)))
    arguments = [
        "convert",
        source,
        "--calib",
        folder / "corpus.txt",
        "--tokenizer",
        folder / "tokenizer.json",
    ]
    arguments += ["--seq-len", 48, "--task", "logits=tokens", "--top-k", 9, "--m", 40, "--k", 5]
    printed: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.write", printed.append, raising=False)
        assert main([str(argument) for argument in arguments]) == 0
    return Case(source, folder / "model.gapa.onnx", folder / "data.jsonl", texts, "".join(printed))


def test_caches_are_one_line_everywhere(case: Case, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    data, out = ("--data", case.data), tmp_path / "answers.npz"
    told = {
        "convert": (case.converting, [TOLD, TOLD]),  # it is certain, and not judged
        "inspect the source": (case.said(capsys, "inspect", case.source), [FED, TOLD]),
        "inspect": (case.said(capsys, "inspect", case.file), [FED, TOLD]),
        "run": (case.said(capsys, "run", case.file, *data), [TOLD]),
        "run the source": (
            case.said(
                capsys, "run", case.source, *data, "--tokenizer", case.source.with_name("tokenizer.json")
            ),
            [TOLD],
        ),
        "write": (case.said(capsys, "run", case.file, *data, "-o", out), [TOLD]),
        "verify": (case.said(capsys, "verify", case.source, case.file, *data), [TOLD]),
        "evaluate": (case.said(capsys, "evaluate", case.file, *data), []),
    }
    for command, (text, wanted) in told.items():
        plain = " ".join(text.split())  # cells may be folded
        assert re.findall(r"\S+ … \S+ \(\d+ caches\)", plain) == wanted, command
        assert "present.1.key" not in plain and "past_key_values.1.key" not in plain, command
    assert f"present.{BLOCKS - 1}.value" in np.load(out)  # and all are written


def pieces(texts: list[str], length: int = 48) -> Iterator[list[int]]:
    """The rows of a decoder: whole sequences, and short documents."""
    tokenizer = decoder_tokenizer()
    for text in texts:
        ids = tokenizer.encode(text).ids
        whole = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
        yield from whole or [ids]


def test_run_shows_each_token_with_what_is_said_of_it(case: Case, capsys: pytest.CaptureFixture[str]):
    printed = case.said(capsys, "run", case.file, "--data", case.data)
    tables = re.split(r"row \d+: ", printed)[1:]
    assert len(tables) == 3  # of the first sequences
    tokenizer, session = decoder_tokenizer(), gapa_onnx.session(case.file)
    for ids, shown in zip(pieces(case.texts), tables):
        empty = np.zeros((1, KEY_HEADS, 0, HEAD), np.float32)
        past = {f"past_key_values.{i}.{part}": empty for i in range(BLOCKS) for part in ("key", "value")}
        feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, len(ids)), np.int64), **past}
        names = [
            f"logits_{role}" for role in ("score", "pvalue", "ood", "entropy", "epistemic", "tokens", "probs")
        ]
        *numbers, tokens, probs = (array[0] for array in session.run(names, feeds))
        assert shown.startswith(f"{len(ids)} tokens")
        lines = shown.splitlines()[3:]
        assert len(ids) <= 32 or f"… {len(ids) - 32} more tokens" in shown
        for at in range(min(len(ids), 32)):
            piece = tokenizer.decode([ids[at]])
            assert lines[at].startswith('"' + piece.replace("\n", "\\n") + '"')
            cells = lines[at].rsplit(maxsplit=1)
            assert cells[1] == f"{probs[at, 0]:.3f}"
            found = re.search(r'"\s+(\S+)\s+(\S+)\s+(yes|no)\s+(\S+)\s+(\S+)\s+"', lines[at])
            assert found is not None, lines[at]
            for cell, array in zip(found.groups(), numbers):
                if array.dtype == bool:
                    assert cell == ("yes" if array[at] else "no")
                else:  # four digits are printed; rows of other lengths were computed apart, as here
                    assert float(cell) == pytest.approx(float(array[at]), rel=1e-3, abs=1e-6)
    assert '"\\n"' in tables[0]  # the end of a line is seen
    assert "how strange the text is up to here" in printed
    assert "beyond the threshold" in printed and "no output has a variance" not in printed


def test_words_are_shown_only_by_a_model_that_has_them(case: Case):
    from gapa_onnx.cli.tokens import _following

    tokenizer = decoder_tokenizer()
    logits = np.array([[[0.1, 0.7, 0.2]]], np.float32)
    assert _following({}, logits, (0, 0), tokenizer) == ("class 1", "")
    assert _following({"probs": logits}, logits, (0, 0), tokenizer) == ("class 1", "0.700")

"""`gapa-onnx watch`: what column is read, what it says, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from support.paths import MODELS

import gapa_onnx
from gapa_onnx import record as records
from gapa_onnx.cli import main

ROWS = 400


@pytest.fixture(scope="module")
def held_out_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The digits classifier whose ordinary rows are held-out ones; others of these are the stream."""
    folder = tmp_path_factory.mktemp("watched")
    rows = dict(np.load(MODELS / "digits_mlp_calibration.npz"))
    name = onnx.load(MODELS / "digits_mlp.onnx").graph.input[0].name
    order = np.random.default_rng(0).permutation(len(rows[name]))
    kept = rows[name][order]
    path = folder / "digits.gapa.onnx"
    gapa_onnx.convert(
        MODELS / "digits_mlp.onnx", {name: kept[:700]}, path, held_out={name: kept[700:]}, k=20, m=150
    )
    return path


def table(path: Path, columns: dict[str, np.ndarray]) -> Path:
    lines = [",".join(columns), *(",".join(map(str, row)) for row in zip(*columns.values()))]
    path.write_text("\n".join(lines) + "\n")
    return path


def ordinary_rows(file: Path) -> tuple[records.ScoreRecord, np.ndarray]:
    model = onnx.load(file)
    (head,) = records.require(model, "").heads.values()
    score = head.scores["score"]
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    scores = stored[score.ordinary].ravel()
    return score, scores[np.isfinite(scores)]


def streams(file: Path, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores like the ordinary ones, and the same with a tenth beyond them."""
    _, scores = ordinary_rows(file)
    rng = np.random.default_rng(seed)
    same = (rng.choice(scores, ROWS) + rng.normal(0, 0.05 * scores.std(), ROWS)).astype(np.float32)
    changed = np.where(rng.random(ROWS) < 0.1, same + 10 * np.ptp(scores), same).astype(np.float32)
    return same, changed


def p_values(file: Path, scores: np.ndarray) -> np.ndarray:
    _, ordinary = ordinary_rows(file)
    return ((1 + (ordinary[:, None] >= scores).sum(0)) / (len(ordinary) + 1)).astype(np.float32)


def test_a_change_is_told_and_is_the_exit_code(
    held_out_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    score, _ = ordinary_rows(held_out_file)
    name = next(o for o in ("logits_score",) if score.ranked == o)
    same, changed = streams(held_out_file)
    assert main(["watch", str(table(tmp_path / "same.csv", {name: same})), "--file", str(held_out_file)]) == 0
    told = capsys.readouterr().out
    assert (
        "changed     no" in told
        and f"{ROWS} rows, compared with" in told
        and "held-out rows of digits" in told
    )
    path = table(tmp_path / "changed.csv", {"other": same, name: changed, "text": np.array(["a"] * ROWS)})
    assert main(["watch", str(path), "--file", str(held_out_file)]) == 1
    told = capsys.readouterr().out
    assert "changed     yes, told at row" in told and "█" in told and "1 : 100" in told
    assert max(map(len, told.splitlines())) <= 130, told


def test_p_values_say_about_the_same(held_out_file: Path, tmp_path: Path):
    _, changed = streams(held_out_file)
    both = {"logits_score": changed, "logits_pvalue": p_values(held_out_file, changed)}
    path = table(tmp_path / "both.csv", both)
    by_score, by_p = (
        gapa_onnx.watch(path, held_out_file, column=name)[0].drift
        for name in ("logits_score", "logits_pvalue")
    )
    assert gapa_onnx.watch(path, held_out_file)[0].column == "logits_score"
    # the p-value leaves open where in a gap between ordinary scores a row lies; few rows of this stream share one
    assert by_score.alarm is not None and by_p.alarm is not None
    assert np.abs(by_score.ranks - by_p.ranks).max() <= 0.1
    assert np.abs(by_score.log_evidence[: by_score.alarm] - by_p.log_evidence[: by_score.alarm]).max() < 3


def test_parquet_and_json(held_out_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    import pyarrow
    from pyarrow import parquet

    _, changed = streams(held_out_file)
    parquet.write_table(pyarrow.table({"logits_score": changed}), tmp_path / "preds.parquet")
    csv = table(tmp_path / "preds.csv", {"logits_score": changed})
    answers = []
    for path in (tmp_path / "preds.parquet", csv):
        assert main(["watch", str(path), "--file", str(held_out_file), "--json"]) == 1
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0] == answers[1]
    stream = answers[0]["streams"]["logits_score"]
    assert stream["changed"] and stream["rows"] == ROWS and stream["holds"] == "exactly"


def test_without_a_file_the_beginning_is_compared_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rng = np.random.default_rng(0)
    same = rng.normal(size=600)
    later = np.where(np.arange(600) >= 300, same + 3, same)
    for values, code in ((same, 0), (later, 1)):
        assert main(["watch", str(table(tmp_path / "preds.csv", {"y_score": values}))]) == code
    assert "compared with its own beginning" in capsys.readouterr().out
    found = gapa_onnx.watch(table(tmp_path / "p.csv", {"y_pvalue": 1 / (1 + np.exp(later))}))[0].drift
    score = gapa_onnx.watch(tmp_path / "preds.csv")[0].drift
    np.testing.assert_array_equal(found.ranks, score.ranks)  # small p-values are large scores


def test_rows_of_the_training_are_said_to_be_no_fair_measure(
    digits_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    scores = ordinary_rows(digits_file)[1]
    path = table(tmp_path / "preds.csv", {"logits_pvalue": p_values(digits_file, scores[:50])})
    main(["watch", str(path), "--file", str(digits_file)])
    assert "convert with --held-out" in " ".join(capsys.readouterr().err.split())


REFUSED = {
    "no column": ("a_score\n1\n", [], "has no column logits_score or logits_pvalue: it has a_score"),
    "another column": ("logits_var\n1\n", ["--column", "logits_var"], "the file has no ordinary rows of"),
    "a missing column": ("logits_score\n1\n", ["--column", "b"], "has no column b: it has logits_score"),
    "no rows": ("logits_score\n", [], "has no rows of numbers"),
    "an empty cell": ("logits_score,b\n,1\n", [], "has no column logits_score or logits_pvalue: it has b"),
    "uneven": ("logits_score,b\n1\n", [], "row 0 of"),
    "no p-value": ("logits_pvalue\n1.5\n", [], "row 0 of logits_pvalue is 1.5, which is no p-value"),
    "a level": ("logits_score\n1\n", ["--level", "0"], "level must lie between 0 and 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_missing_is_a_sentence(
    case: str, held_out_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    text, options, message = REFUSED[case]
    path = tmp_path / "preds.csv"
    path.write_text(text)
    assert main(["watch", str(path), "--file", str(held_out_file), *options]) == 2
    error, hint = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ") and message in error and hint.startswith("hint: ")


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = table(tmp_path / "preds.csv", {"x": np.ones(3)})
    for arguments, message in (
        ([str(path)], "has no column that ends in _score or _pvalue: it has x"),
        ([str(tmp_path / "preds.npz")], "is of a kind that cannot be watched"),
        ([str(tmp_path / "none.csv")], "cannot be read"),
        ([str(path), "--file", str(MODELS / "digits_mlp.onnx")], "was not written by gapa-onnx"),
    ):
        assert main(["watch", *arguments]) == 2
        assert message in capsys.readouterr().err

"""Every setting: what it takes, what it refuses, and how it becomes an option; and the words of the library."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
import typer

import gapa_onnx
from gapa_onnx.cli import app, main
from gapa_onnx.cli.flags import ARGUMENTS, as_flags, flag
from gapa_onnx.errors import UserError
from gapa_onnx.settings import PAPER, Settings, choices

NAN, INFINITE = float("nan"), float("inf")

#: By setting: values that it takes, and values at and beyond its bounds that it refuses.
BOUNDS: dict[str, tuple[tuple[object, ...], tuple[object, ...]]] = {
    "sites": (("auto", "last", "fc1:pooled"), ("", "  ", None)),
    "witnesses": (("auto", "none", "fc1, fc2:pooled"), ("", "  ", None)),
    "on_unsupported": (("error", "cut"), ("ignore", "")),
    "attention": (("values", "full"), ("keys", "")),
    "mask": (("auto", "none", "~padding"), ("", " ", None)),
    "seed": ((0, 7, 2**40), (-1, 0.5, "x")),
    "task": (("auto", "y=regression,z=none"), ("", " ", None)),
    "candidates": ((1, 300, "all", "12"), (0, -1, "most", None, 1.5)),
    "ood_quantile": ((0.001, 0.95), (0, 1, -0.1, NAN, "half")),
    "score": (("witnesses", "variance", "epistemic"), ("entropy", "")),
    "bridge": (("shared", "per-class"), ("per_class", "")),
    "samples": ((None, 2, 1000), (1, 0, -5, 2.5)),
    "top_k": ((1, 512), (0, -1, 1.5)),
    "covariance": (("diag", "full"), ("low-rank", "")),
    "coverage": ((0.5, 0.999), (0, 1, -0.1, NAN, "most")),
    "sets": (("lac", "aps", "raps"), ("saps", "")),
    "per_class": (("no", "yes"), ("maybe", True, "")),
    "max_error": ((None, 0.001, 0.5), (0, 1, -0.1, NAN, "little")),
    "confidence": ((0.5, 0.99), (0, 1, NAN, "sure")),
    "inducing": (("kmeans", "fps", "random", "all"), ("grid", "")),
    "private": ((1, 5), (0, -1, 2.5, "all")),
    "m": (("auto", 50, "700"), (0, "0", -1, "many", 60.5, "60.5")),
    "k": ((1, 50), (0, -1, 10.5, "ten")),
    "index": (("auto", "flat", "ivf", "hnsw", "ivfpq"), ("lsh", "")),
    "points": (("float32", "float16", "int8"), ("float64", "")),
    "solver": (("auto", "exact", "cached"), ("lazy", "")),
    "portable": (("fast", "small", "none"), ("slow", "")),
    "length_scale": (("site", "input", 0.5, "0.5"), (0, -1, "wide", NAN, INFINITE)),
    "scale": (("loo", "none", 2, "2"), (0, -1, "all", NAN, INFINITE)),
    "metric": (
        ("auto", "euclidean", "direction", "whitened", "whitened-direction", "polar", "projected"),
        ("cosine", "standardised", ""),
    ),
    "jitter": ((1e-9, 0.5), (0, 1, -1e-6, NAN, "little")),
}
ACCEPTED = [(name, value) for name, (taken, _) in BOUNDS.items() for value in taken]
REFUSED = [(name, value) for name, (_, refused) in BOUNDS.items() for value in refused]


def test_every_setting_is_declared_once_and_stands_in_the_table():
    assert [field.name for field in fields(Settings)] == list(choices()) == list(BOUNDS)
    for name, (taken, refused) in BOUNDS.items():
        assert taken and refused, name
        assert choices()[name].help.endswith("."), name


@pytest.mark.parametrize("name, value", ACCEPTED)
def test_a_setting_takes(name, value):
    settings = Settings(**{name: value})
    assert str(getattr(settings, name)) in (str(value), str(float(value) if str(value).isdigit() else value))
    assert replace(settings) == settings


@pytest.mark.parametrize("name, value", REFUSED)
def test_a_setting_refuses(name, value):
    with pytest.raises(UserError) as caught:
        Settings(**{name: value})
    assert caught.value.message.startswith((f"`{name}` is ", f"`{name}={value!r}` "))
    assert as_flags(caught.value.message).startswith(flag(name))


@pytest.mark.parametrize("name, value", [(n, v) for n, v in REFUSED if v is not None])
def test_the_command_line_refuses_the_same(capsys, name, value):
    arguments = ["convert", "no.onnx", "--calib", "no.npz", f"{flag(name)}={value}"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert flag(name) in error and "there is no file" not in error and "Traceback" not in error


def test_rules_between_settings():
    for choice, words in (
        ({"k": 60, "m": 59}, "`k=60` is more than `m=59`"),
        ({"private": 5, "inducing": "all"}, "keeps calibration rows themselves"),
        ({"index": "ivfpq", "points": "int8"}, "`points='int8'` has nothing to do"),
        ({"solver": "cached", "index": "hnsw"}, "`index='hnsw'` is not for"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            Settings(**choice)
    assert Settings(k=60, m=59, inducing="all").k == 60  # then M is the number of rows


def test_values_are_kept_as_plain_python():
    settings = Settings(
        k=np.int64(10), m="300", scale="2", length_scale=np.float32(0.5), jitter=np.float32(0.25)
    )
    assert vars(settings) == {
        **vars(Settings()),
        "k": 10,
        "m": 300,
        "scale": 2.0,
        "length_scale": 0.5,
        "jitter": 0.25,
    }
    assert {type(vars(settings)[name]) for name in ("k", "m")} == {int}
    assert {type(vars(settings)[name]) for name in ("scale", "length_scale", "jitter")} == {float}


def test_paper_decides_what_it_says():
    chosen = Settings(metric="whitened", scale=3).as_in_paper()
    assert {name: getattr(chosen, name) for name in PAPER} == PAPER and chosen.solver == "exact"


# ------------------------------------------------------------------------------- options and flags


def _options() -> dict[str, dict[str, list[str]]]:
    """By command and parameter, the flags that the command line takes."""
    group = typer.main.get_command(app)
    return {
        name: {p.name: p.opts for p in command.params if p.opts and p.opts[0].startswith("-")}
        for name, command in group.commands.items()
    }


def test_every_setting_is_an_option_of_convert():
    taken = _options()["convert"]
    for name in choices():
        assert flag(name) in taken[name]
    assert "--sites" in _options()["inspect"]["sites"]


def test_every_argument_that_the_library_may_name_is_an_option():
    taken = {name: flags for command in _options().values() for name, flags in command.items()}
    for name in ARGUMENTS:
        assert flag(name) in taken[name]
    python = {
        name
        for f in (gapa_onnx.convert, gapa_onnx.evaluate, gapa_onnx.set_threshold, gapa_onnx.package)
        for name in _parameters(f)
    }
    from gapa_onnx.measure.bench import measure

    assert ARGUMENTS <= python | _parameters(measure)


def _parameters(function) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    "text, shown",
    [
        ("`k` is 0", "--k is 0"),
        ("`k=20` is more than `m=10`", "--k 20 is more than --m 10"),
        ('use `task="regression"`', "use --task regression"),
        ("`ImageOptions(mean=0.5)`", "--image-mean 0.5"),
        (
            "`ImageOptions(size=(8, 6))` or `ImageOptions(colors='bgr')`",
            "--image-size 8,6 or --image-colors bgr",
        ),
        ("`TextOptions(seq_len=48)` or `TextOptions(seq_len=…)`", "--seq-len 48 or --seq-len"),
        (
            "`TextOptions(field='my text')`, `TextOptions(rows='pieces')`",
            "--text-field 'my text', --text-rows pieces",
        ),
        ("use `on_unsupported='cut'`.", "use --on-unsupported cut."),
        ("`task='my output=none'`", "--task 'my output=none'"),
        ("`length_scale=0.5` and `out`", "--length-scale 0.5 and -o"),
        ("leave `paper=True` out", "leave --paper out"),
        ("choose another place with `out`", "choose another place with -o"),
        ("`gapa-onnx inspect MODEL` lists them", "`gapa-onnx inspect MODEL` lists them"),
        ("`tanh1` and `K` are no settings, nor is k", "`tanh1` and `K` are no settings, nor is k"),
        ("`index=''` is not known", "--index '' is not known"),
    ],
)
def test_spellings_become_flags(text, shown):
    assert as_flags(text) == shown


FLAG = re.compile(r"(?<![\w(-])--[a-z]|(?<=[\s\"`])-o\b")  # not the var(--colour) of a style sheet


def test_only_the_command_line_speaks_of_flags():
    """Python users read the same texts. A whole command, which starts with the program's name, may have flags."""
    library = Path(gapa_onnx.__file__).parent
    programs = {"cli", "clients"}  # the latter are shipped with packages, and have options of their own
    texts = [path for path in library.rglob("*.py") if not programs & set(path.relative_to(library).parts)]
    assert len(texts) > 100
    found = [
        f"{path.relative_to(library)}:{number}: {line.strip()}"
        for path in texts
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if FLAG.search(line) and "gapa-onnx " not in line
    ]
    assert not found, "\n".join(found)


def test_reasons_in_a_file_hold_no_flags(capsys, tmp_path):
    """What is recorded is read from Python too; the command line shows it with flags."""
    models = Path(__file__).resolve().parents[1] / "models"
    arguments = [
        "convert",
        models / "digits_mlp.onnx",
        "--calib",
        models / "digits_mlp_calibration.npz",
        "--dry-run",
    ]
    assert main([*map(str, arguments), "-o", str(tmp_path / "a.onnx"), "--json"]) == 0
    reason = json.loads(capsys.readouterr().out)["heads"]["logits"]["reason"]
    assert "`task='regression'` if they are not" in reason and not FLAG.search(reason)
    assert main([*map(str, arguments), "-o", str(tmp_path / "a.onnx")]) == 0
    assert "--task regression" in capsys.readouterr().out


def test_help_needs_no_runtime(tmp_path):
    script = (
        "import sys; from gapa_onnx.cli import main; main(['convert', '--help']); "
        "assert not {'onnxruntime', 'onnx', 'faiss'} & set(sys.modules)"
    )
    # elsewhere: in the root of a checkout Python would import the bare folder gapa_onnx
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, cwd=tmp_path)

"""docs/file-format.md is true of converted files, and a record that is not as it says is one sentence."""

from __future__ import annotations

import dataclasses
import json
import math
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import onnx
import pytest
from support.detectors import yolo_like
from support.paths import MODELS, ROOT
from support.small_models import noisy_data, noisy_net
from support.small_models import parse as small_model

import gapa_onnx
from gapa_onnx.cli import main
from gapa_onnx.errors import UserError
from gapa_onnx.op.contract import CLASSES, DOMAIN, LEADING, SCHEMAS, VERSION
from gapa_onnx.record import (
    FORMAT,
    METADATA_KEY,
    BudgetRecord,
    CutRecord,
    DetectionRecord,
    HeldOutRecord,
    ImageRecord,
    NoiseRecord,
    PromiseRecord,
    Record,
    TemperatureRecord,
    TextRecord,
    TrialRecord,
    parse,
    read,
    require,
)

PAGE = (ROOT / "docs" / "file-format.md").read_text(encoding="utf-8")
HELDOUT = MODELS / "digits_mlp_heldout.npz"

# ------------------------------------------------------------------------- converted files


@pytest.fixture(scope="module")
def files(digits_file: Path) -> dict[str, onnx.ModelProto]:
    """Converted files that together hold all that a file can hold."""
    x, y = noisy_data(300, 1)
    tokens = small_model(
        "net (float[n, 3, 4] x) => (float[n, 3, 8] y) "
        "{ u = MatMul(x, w)  g = Tanh(u)  z = MatMul(g, a)  h = Tanh(z)  y = MatMul(h, b) }",
        w=np.random.default_rng(4).normal(size=(4, 4)),
        a=np.random.default_rng(0).normal(size=(4, 16)),
        b=np.random.default_rng(1).normal(size=(16, 8)),
    )
    sentences = np.random.default_rng(2).normal(size=(60, 3, 4)).astype(np.float32)
    pictures = np.random.default_rng(3).normal(size=(40, 3, 16, 16)).astype(np.float32)
    small = {"m": 40, "k": 5}
    return {
        "classes": onnx.load(digits_file),
        "targets": gapa_onnx.convert(noisy_net(), {"x": x}, targets=y, **small).model,
        "int8": gapa_onnx.convert(
            noisy_net(), {"x": x}, points="int8", covariance="full", metric="whitened", **small
        ).model,
        "tokens": gapa_onnx.convert(
            tokens, {"x": sentences}, task="tokens", top_k=4, points="float16", witnesses="g", **small
        ).model,
        "sites": gapa_onnx.convert(
            MODELS / "digits_mlp.onnx", MODELS / "digits_mlp_calibration.npz", sites="all", **small
        ).model,
        "labels": gapa_onnx.convert(
            onnx.load(MODELS / "digits_mlp.onnx"), **labelled_digits(), sets="raps", max_error=0.2, **small
        ).model,
        "detector": gapa_onnx.convert(yolo_like(size=16), {"images": pictures}, candidates=8, **small).model,
    }


def labelled_digits() -> dict[str, Any]:
    held_out = np.load(HELDOUT)
    pixels, labels = held_out["pixels"], held_out["labels"]
    return {"calib": {"pixels": pixels[:200]}, "held_out": {"pixels": pixels[200:]}, "labels": labels[200:]}


@pytest.fixture(scope="module")
def whole(files: Mapping[str, onnx.ModelProto]) -> Record:
    """A record that has every field, also those that are optional."""
    record = read(files["classes"])
    head, one = record.heads["logits"], {"0.5": 0.25}  # tables of one line, as each place is damaged in turn
    promise = PromiseRecord("lac", 0.5, 100, "exactly", "logits/set/threshold", {"0.5": (-0.5,)}, 0.9)
    head = dataclasses.replace(
        head,
        scores={
            role: dataclasses.replace(head.score, quantiles=one, lengths={"slope": 0.5})
            for role in ("score", "image_score", "seq_score")
        },
        noise=NoiseRecord(1347, 1.5, 1.75),
        uncovered="classes 4..9 of 10 on axis 1 (60%)",
        mask="attention_mask",
        detection=DetectionRecord("logits", 1, 0, 2, "logits", 1, 5, 80, 4, 79, 300),
        temperature=TemperatureRecord(2.0, 1.25, 400, 0.25, 0.5),
        sets=promise,
        deferral=promise,
        intervals=promise,
    )
    more = {"share_quantiles": one, "mask": "attention_mask", "joined": ("pixels",), "metric": "standardised"}
    more["metrics"] = {"euclidean": 0.75}
    sites, witnesses = (
        tuple(dataclasses.replace(place, activation="Relu", **more) for place in places)
        for places in (record.sites, record.witnesses)
    )
    trial = TrialRecord("auto", "cached", 4000, 50, 1.25, 1.0, 0.05, 0.5, 0.99)
    cuts = (CutRecord("loop", "Loop", "no rule"),)
    return dataclasses.replace(
        record,
        data=dataclasses.replace(record.data, held_out=HeldOutRecord(400, 100, "held-out rows")),
        sites=sites,
        witnesses=witnesses,
        heads={"logits": head},
        images=ImageRecord(224, 224, "first", "rgb", 1, (0.485, 0.456, 0.406), (0.25,)),
        text=TextRecord("0" * 64, "tokenizer.json", 96, "text", "pieces", 49152, 8192, 64),
        budget=BudgetRecord(1.5, (trial,)),
        cuts=cuts,
        uncovered=("beside",),
        states=("state",),
    )


# -------------------------------------------------------------------------------- the page


def rows(heading: str) -> list[list[str]]:
    """The cells of the one table of a section; a line may describe several things of one kind."""
    section = PAGE.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| `")]
    return [
        [name, *(cell.strip() for cell in line[1:])] for line in lines for name in line[0].strip().split(", ")
    ]


WORDS = {str: "text", int: "integer", float: "number"}


def described(
    kind: Any, place: str, seen: set[type] | None = None
) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Place, type and allowed words of all that an annotated type holds, as the page spells them; the fields of a kind
    of record stand at its first place alone."""
    seen = set() if seen is None else seen
    origin, optional = get_origin(kind), False
    if origin in (Union, types.UnionType):
        parts = [part for part in get_args(kind) if part is not types.NoneType]
        optional = len(parts) < len(get_args(kind))
        if len(parts) > 1:
            named = [WORDS[part] for part in parts] + ["null"] * optional
            yield place, " or ".join([", ".join(named[:-1]), named[-1]]), ()
            return
        kind, origin = parts[0], get_origin(parts[0])
    null = " or null" if optional else ""
    if dataclasses.is_dataclass(kind):
        if optional:
            yield place, f"object{null}", ()
        if kind in seen:
            return
        seen.add(kind)
        for part in dataclasses.fields(kind):
            hint = get_type_hints(kind, include_extras=True)[part.name]
            inner = f"{place}.{part.name}".lstrip(".")
            for where, text, words in described(hint, inner, seen):
                left_out = part.default is None and where == inner
                yield where, text.replace(" or null", ", optional") if left_out else text, words
    elif origin is tuple:
        yield from described(get_args(kind)[0], f"{place}[]", seen)
    elif origin is Mapping:
        yield from described(get_args(kind)[1], f"{place}.*", seen)
    elif origin is Annotated:
        yield place, f"text{null}", get_args(kind)[1:]
    else:
        yield place, f"{WORDS[kind]}{null}", ()


def fields_on_page() -> dict[str, tuple[str, tuple[str, ...]]]:
    """Type and allowed words of every field. A witness has the fields of a site but for some, which its one line names."""
    found = {place: (kind, words) for place, kind, words in described(Record, "")}
    sites = {
        place.removeprefix("sites[]."): told for place, told in found.items() if place.startswith("sites[].")
    }
    twins = {
        place.removeprefix("witnesses[]."): told for place, told in found.items() if "witnesses[]." in place
    }
    assert twins == {name: sites[name] for name in twins}
    (line,) = [cells[2] for cells in rows("The record") if cells[0] == "`witnesses[]`"]
    assert {name for name in sites if f"`{name}`" in line} == sites.keys() - twins.keys()
    return {place: told for place, told in found.items() if "witnesses[]." not in place} | {
        "witnesses[]": ("object", ())
    }


def test_every_field_is_described():
    on_page = {cells[0].strip("`"): cells for cells in rows("The record")}
    expected = fields_on_page()
    assert set(on_page) == set(expected)
    assert {place: cells[1] for place, cells in on_page.items()} == {p: k for p, (k, _) in expected.items()}
    for place, (_, words) in expected.items():
        assert set(words) <= set(re.findall(r"`([^`]+)`", on_page[place][2])), place
    assert f"the key `{METADATA_KEY}`" in PAGE and f"describes {FORMAT} |" in PAGE


def test_every_field_of_every_kind_is_in_a_record(whole):
    """So that the tests of damage below leave none out."""
    seen = {type(part).__name__ for _, part in parts_of(whole)}
    assert seen == {name for name in vars(gapa_onnx.record) if name.endswith("Record")}
    for path, part in parts_of(whole):
        left_out = {one.name for one in dataclasses.fields(part) if getattr(part, one.name) is None}
        assert not left_out, spelled(path)


def test_the_page_is_short():
    assert len(PAGE.splitlines()) <= 220


def test_operators_are_described():
    on_page = {cells[0].strip("`"): cells[1].split(", ") for cells in rows("Operators")}
    schemas = [*SCHEMAS.values(), CLASSES, LEADING]
    assert on_page == {schema.name: [port.name for port in schema.inputs] for schema in schemas}
    assert f"Domain `{DOMAIN}`, version {VERSION}" in PAGE


# ---------------------------------------------------------------------- names in the graph


ALWAYS = {
    "<output>_var", "<output>_score", "<output>_pvalue", "<output>_ood", "<output>/score/ordinary",
    "<output>/score/ordinary/largest", "<output>/score/ordinary/count", "<output>/score/level", "<site>/gapa/share",
    "<site>/gapa/neighbours", "<site>/gapa/<input>",
}  # fmt: skip


def names_of(model: onnx.ModelProto) -> dict[str, set[str]]:
    """All names of a file by kind."""
    graph = model.graph
    initializers = {tensor.name for tensor in graph.initializer}
    return {
        "output": {value.name for value in graph.output},
        "initializer": initializers,
        "node": {node.name for node in graph.node if node.name},
        "tensor": initializers | {name for node in graph.node for name in node.output},
    }


def filled(pattern: str, model: onnx.ModelProto) -> set[str]:
    """The names that a pattern of the page stands for in a file."""
    record = read(model)
    if "<site>" in pattern:
        names = set()
        for site in record.sites if pattern.endswith("/amplitude") else record.places:
            ports = [port.name for port in SCHEMAS[site.index].constants] if "<input>" in pattern else [""]
            names |= {pattern.replace("<site>", site.output).replace("<input>", port) for port in ports}
        return names
    if "<output>" in pattern:
        return {pattern.replace("<output>", output) for output in record.heads}
    own = {value.name for value in model.graph.input} | {n for node in model.graph.node for n in node.output}
    return {pattern.replace("<tensor>", name) for name in own}


@pytest.mark.parametrize(
    "pattern, kind", [(cells[0].strip("`"), cells[1]) for cells in rows("Names in the graph")]
)
def test_every_name_on_the_page_is_in_a_file(files, pattern, kind):
    found = {name: filled(pattern, model) & names_of(model)[kind] for name, model in files.items()}
    assert any(found.values())
    if pattern in ALWAYS:
        if pattern == "<output>_var":  # a detector has those of its candidates
            assert not found.pop("detector") and not found.pop("tokens")
        assert found == {name: filled(pattern, files[name]) for name in found}


def test_every_number_of_a_file_has_a_name_on_the_page(files):
    """All added initializers but unnamed constants are in the table, the later layers of the noise head by its text."""
    patterns = [cells[0].strip("`") for cells in rows("Names in the graph")]
    sources = {"classes": onnx.load(MODELS / "digits_mlp.onnx"), "targets": noisy_net(), "int8": noisy_net()}
    for name, source in sources.items():
        known = {tensor.name for tensor in source.graph.initializer}
        for pattern in patterns:
            known |= filled(pattern, files[name])
            known |= filled(pattern.replace("_1", "_2"), files[name]) | filled(
                pattern.replace("_1", "_3"), files[name]
            )
        added = names_of(files[name])["initializer"] - known
        assert {one for one in added if not one.startswith("gapa/const/")} == set()


def test_the_record_names_what_is_there(files):
    for model in files.values():
        record, names = read(model), names_of(model)
        stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
        nodes = {node.name: node for node in model.graph.node}
        for place in record.places:
            assert nodes[place.operator].op_type == SCHEMAS[place.index].name
            assert nodes[place.operator].output[0] == place.share
            assert {place.query, place.output} <= names["tensor"]
        for head in record.heads.values():
            assert set(head.outputs.values()) <= names["output"]
            assert head.operator is None or nodes[head.operator].op_type == CLASSES.name
            assert {role for role in head.outputs if role.endswith("score")} - {"selected_score"} == set(
                head.scores
            )
            for score in head.scores.values():
                assert stored[score.level] == np.float32(1 - score.quantile)
                ordinary = stored[score.ordinary].ravel()[: int(stored[score.count])]
                np.testing.assert_array_equal(ordinary, np.sort(ordinary))
                assert np.isfinite(ordinary).all() and np.isinf(stored[score.ordinary][-1]).all()
                assert len(ordinary) == np.isfinite(stored[score.ordinary]).sum()
                np.testing.assert_array_equal(stored[score.largest], stored[score.ordinary][:-1, -1])
                assert score.ranked in names["tensor"] and score.rows > 0
                if score.witnesses is not None:
                    told = score.witnesses
                    for gauge in filter(None, (told.last, told.earlier, told.entropy)):
                        assert set(gauge.reads) <= names["tensor"]
                        assert gauge is told.entropy or {p.share for p in record.places} >= set(gauge.reads)
                        assert stored[gauge.centre].shape == stored[gauge.slope].shape == (len(gauge.reads),)
        functions = {(function.domain, function.name) for function in model.functions}
        assert {(n.domain, n.op_type) for n in model.graph.node if n.domain == DOMAIN} <= functions


# ------------------------------------------------------------------------------ the reader


def test_a_record_is_read_as_it_was_written(files, whole):
    for record in [*(read(model) for model in files.values()), whole]:
        again = parse(json.dumps(record.as_json()))
        assert again == record and again.as_json() == record.as_json()


def parts_of(part: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    """Every dataclass inside a record, with the keys that lead to it."""
    if dataclasses.is_dataclass(part):
        yield path, part
        part = {one.name: getattr(part, one.name) for one in dataclasses.fields(part)}
    entries = (
        part.items() if isinstance(part, Mapping) else enumerate(part) if isinstance(part, tuple) else ()
    )
    for key, value in entries:
        yield from parts_of(value, (*path, key))


def spelled(path: tuple[str | int, ...]) -> str:
    """The place as messages have it: sites[0].name."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")


def damage(record: Record, path: tuple[str | int, ...], **new: Any) -> str:
    """The record's text with another `value` at a place, or without it."""
    plain = json.loads(json.dumps(record.as_json()))
    inside = plain
    for key in path[:-1]:
        inside = inside[key]
    if "value" in new:
        inside[path[-1]] = new["value"]
    else:
        del inside[path[-1]]
    return json.dumps(plain)


def refused(text: str, place: str) -> None:
    """The text is turned down by one sentence that names the place."""
    with pytest.raises(UserError) as caught:
        parse(text)
    message = caught.value.message
    assert message.startswith("the file's record is damaged: ") and place in message, message
    assert "\n" not in message and len(message) < 200
    assert caught.value.hint == "convert the source model again"


def test_a_missing_field(whole):
    for path, part in parts_of(whole):
        for one in dataclasses.fields(part):
            text = damage(whole, (*path, one.name))
            made = one.default_factory
            if (*path, one.name) == ("format",):  # the first records had none
                with pytest.raises(UserError, match="older gapa-onnx"):
                    parse(text)
            elif one.default is made is dataclasses.MISSING:
                refused(text, f"{spelled((*path, one.name))} is missing")
            else:
                expected = one.default if made is dataclasses.MISSING else made()
                assert getattr(dict(parts_of(parse(text)))[path], one.name) == expected


WRONG = (None, True, "text", 7, 0.5, math.nan, math.inf, -math.inf, 10**400, [], {}, [[]], {"a": []})


def test_a_field_of_another_type(whole):
    for path, part in parts_of(whole):
        hints = get_type_hints(type(part), include_extras=True)
        for one in dataclasses.fields(part):
            place = (*path, one.name)
            for value in WRONG:
                if not fits(hints[one.name], value) and place != ("format",):
                    refused(damage(whole, place, value=value), spelled(place))


def fits(kind: Any, value: Any) -> bool:
    """Whether one of the wrong values may stand in a field all the same."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return any(fits(part, value) for part in get_args(kind))
    if origin is Annotated or dataclasses.is_dataclass(kind):
        return False
    if origin is Mapping:
        return isinstance(value, dict) and all(fits(get_args(kind)[1], held) for held in value.values())
    if origin is tuple:
        return value == []
    if kind is float:
        return type(value) in (int, float) and abs(value) < 1e308
    return type(value) is kind


SCORE = ("heads", "logits", "scores", "score")


@pytest.mark.parametrize(
    "path, value, told",
    [
        (("settings", "m"), [1], "settings.m is a list, not text or a whole number or a finite number"),
        (("settings", "jitter"), math.nan, "settings.jitter is NaN"),
        (("sites", 0, "share_quantiles", "0.5"), math.inf, "sites[0].share_quantiles.0.5 is Infinity"),
        (("witnesses", 0, "index_settings", "nprobe"), "1", 'witnesses[0].index_settings.nprobe is "1"'),
        (("witnesses", 0, "scale"), 1.0, "witnesses[0].scale is not known"),
        (("witnesses", 0, "metrics", "direction"), "1", 'witnesses[0].metrics.direction is "1"'),
        (("sites", 0, "layout"), "row", 'sites[0].layout is "row", not one of rows, positions, pooled, flat'),
        (("sites", 0), 3, "sites[0] is 3, not an object"),
        (("heads", "logits", "outputs", "var"), 3, "heads.logits.outputs.var is 3, not text"),
        ((*SCORE, "quantiles", "0.5"), None, "heads.logits.scores.score.quantiles.0.5 is null"),
        ((*SCORE, "witnesses", "last", "reads", 0), None, "scores.score.witnesses.last.reads[0] is null"),
        (("heads", "logits", "bridge"), "wide", "not one of shared, per-class"),
        (("budget", "trials", 0), [], "budget.trials[0] is a list"),
    ],
)
def test_a_damaged_entry(whole, path, value, told):
    refused(damage(whole, path, value=value), told)


def test_an_unknown_field(whole):
    for path, _ in parts_of(whole):
        refused(damage(whole, (*path, "colour"), value=1), f"{spelled((*path, 'colour'))} is not known")
    refused(damage(whole, ("two\nlines",), value=1), "two lines is not known")


@pytest.mark.parametrize(
    "text, told",
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ('{"format": 1,}', "it is not JSON"),
        ("[" * 100_000, "it is not JSON"),
        ("9" * 5000, "it is not JSON"),
        ("[]", "it is a list, not an object"),
        ("null", "it is null, not an object"),
        ('"gapa"', 'it is "gapa", not an object'),
        ("{}", "format is missing"),
        ('{"format": null}', "format is null, not 5"),
        ('{"format": -1}', "format is -1, not 5"),
        ('{"format": "5"}', 'format is "5", not 5'),
        ('{"format": true}', "format is true, not 5"),
        ('{"format": 5.0}', "format is 5.0, not a whole number"),
        ('{"format": 5}', "version is missing"),
    ],
)
def test_text_that_is_no_record(text, told):
    refused(text, told)


def test_a_newer_format(whole):
    newer = damage(whole, ("format",), value=FORMAT + 1)
    for text in (newer, json.dumps({"format": FORMAT + 1, "all": "else"})):
        with pytest.raises(UserError, match=f"has format {FORMAT + 1}, .* reads up to {FORMAT}") as caught:
            parse(text)
        assert caught.value.hint == "update gapa-onnx"


@pytest.mark.parametrize("number", range(FORMAT))
def test_an_older_format(number):
    texts = [json.dumps({"format": number, "all": "else"}), *(['{"sites": []}'] if number == 0 else [])]
    for text in texts:
        with pytest.raises(
            UserError, match=f"an older gapa-onnx, .* format {number}; this one reads {FORMAT}"
        ) as caught:
            parse(text)
        assert "convert the source model again" in str(caught.value.hint)


def test_a_model_without_a_record():
    assert read(noisy_net()) is None
    with pytest.raises(UserError, match="net.onnx was not written by gapa-onnx"):
        require(noisy_net(), "net.onnx")


# --------------------------------------------------------------------------- the commands

COMMANDS: dict[str, list[str]] = {
    "inspect": ["inspect", "FILE"],
    "run": ["run", "FILE", "--data", "DATA", "-o", "OUT.npz"],
    "threshold": ["threshold", "FILE"],
    "move": ["threshold", "FILE", "--quantile", "0.9"],
    "hold out": ["threshold", "FILE", "--quantile", "0.9", "--data", "DATA"],
    "verify": ["verify", "SOURCE", "FILE", "--data", "DATA", "--rows", "8"],
    "evaluate": ["evaluate", "FILE", "--data", "DATA", "--labels", "LABELS", "--report", "OUT.html"],
}


@pytest.fixture
def told(digits_file, tmp_path, capsys):
    """What a command says about the digits with another record, once it has changed nothing."""
    held_out = np.load(HELDOUT)
    np.savez(tmp_path / "data.npz", pixels=held_out["pixels"])
    np.save(tmp_path / "labels.npy", held_out["labels"])
    places = {
        "FILE": tmp_path / "digits.onnx",
        "DATA": tmp_path / "data.npz",
        "LABELS": tmp_path / "labels.npy",
        "SOURCE": MODELS / "digits_mlp.onnx",
        "OUT.npz": tmp_path / "out.npz",
        "OUT.html": tmp_path / "out.html",
    }

    def call(command: str, text: str) -> tuple[int, str]:
        model = onnx.load(digits_file)
        (entry,) = [entry for entry in model.metadata_props if entry.key == METADATA_KEY]
        entry.value = text
        onnx.save(model, places["FILE"])
        before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        capsys.readouterr()
        code = main([str(places.get(word, word)) for word in COMMANDS[command]])
        if code:
            assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
        return code, capsys.readouterr().err

    return call


def assert_one_sentence(code: int, said: str, sentence: str) -> None:
    assert code == 2
    lines = [line for line in said.splitlines() if not line.startswith("note:")]
    assert len(lines) == 2 and "Traceback" not in said, said
    assert lines[0].startswith("error: ") and sentence in lines[0], said
    assert lines[1].startswith("hint: ")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_a_damaged_record(told, whole, command):
    missing = damage(whole, ("heads", "logits", "outputs"))
    assert_one_sentence(*told(command, missing), "record is damaged: heads.logits.outputs is missing")
    assert_one_sentence(*told(command, "{"), "record is damaged: it is not JSON")
    assert_one_sentence(*told(command, ""), "record is damaged: it is not JSON")
    newer = damage(whole, ("format",), value=FORMAT + 1)
    assert_one_sentence(*told(command, newer), f"has format {FORMAT + 1}")


OUTPUTS = ("heads", "logits", "outputs")
ABSENT = [
    ((*OUTPUTS, "var"), "gone", ("run", "verify", "evaluate"), "the output 'gone', which the model does not have"),
    ((*OUTPUTS, "ood"), "gone", ("run", "verify", "evaluate"), "the output 'gone', which the model does not have"),
    ((*OUTPUTS, "score"), "gone", ("run", "verify", "evaluate", "hold out"), "heads.logits.outputs.score stands for"),
    (OUTPUTS, {}, ("run", "verify"), "heads.logits.outputs.var is missing"),
    (OUTPUTS, {}, ("hold out",), "heads.logits.outputs.score is missing"),
    (OUTPUTS, {"var": "logits_var", "probs": "logits_probs"}, ("verify",), "outputs.entropy is missing"),
    (("heads", "other"), "a copy", ("run", "verify"), "heads.other stands for the output 'other'"),
    (("sites", 0, "operator"), "gone", ("verify",), "it names the operator 'gone', which is not in the graph"),
    (("sites", 0, "operator"), "fc1", ("verify",), "it names the operator 'fc1', which is not in the graph"),
    (("sites", 0, "operator"), "logits_probs", ("verify",), "it names the operator 'logits_probs'"),
    (("heads", "logits", "operator"), "gone", ("verify",), "it names the operator 'gone'"),
    (("witnesses", 0, "operator"), "gone", ("verify",), "it names the operator 'gone', which is not in the graph"),
    ((*SCORE, "level"), "gone", ("threshold", "move", "hold out", "verify"), "score.level is 'gone'"),
    ((*SCORE, "level"), "fc1.weight", ("threshold", "move", "verify"), "which is not a number of the graph"),
    ((*SCORE, "count"), "fc1.weight", ("threshold", "hold out", "verify"), "which is not a number of the graph"),
    ((*SCORE, "ordinary"), "gone", ("threshold", "move", "hold out", "verify"), "which is not an initializer of the graph"),
    ((*SCORE, "largest"), "gone", ("threshold", "hold out", "verify"), "which is not an initializer of the graph"),
    ((*SCORE, "quantiles"), {}, ("threshold", "move"), "heads.logits.scores.score.quantiles does not go from"),
    ((*SCORE, "quantiles"), {"half": 1.0}, ("threshold", "move"), "scores.score.quantiles does not go from"),
    ((*SCORE, "ranked"), "gone", ("hold out",), "gone"),
    ((*SCORE, "witnesses", "last", "slope"), "gone", ("verify",), "gone"),
    ((*SCORE, "witnesses", "earlier", "reads"), ["gone"], ("verify",), "gone"),
    (("heads", "logits", "axis"), 7, ("evaluate",), "heads.logits.axis is 7, and the output has 2 axes"),
]  # fmt: skip


@pytest.mark.parametrize(
    "path, value, command, sentence",
    [(path, value, command, sentence) for path, value, commands, sentence in ABSENT for command in commands],
)
def test_commands_on_a_record_of_another_file(told, files, path, value, command, sentence):
    record = read(files["classes"])
    value = record.as_json()["heads"]["logits"] if value == "a copy" else value
    assert_one_sentence(*told(command, damage(record, path, value=value)), sentence)


def test_verify_on_a_wrong_axis(told, files, capsys):
    code, said = told("verify", damage(read(files["classes"]), ("heads", "logits", "axis"), value=7))
    assert code == 1 and "Traceback" not in said


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_on_the_record_as_it_was(told, files, command):
    assert told(command, json.dumps(read(files["classes"]).as_json()))[0] == 0

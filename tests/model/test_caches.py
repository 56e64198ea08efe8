"""Many caches are told as one; anything else keeps its name."""

from __future__ import annotations

import pytest

from gapa_onnx.model.caches import many_caches, names_told, told_as_one

MODEL = [f"present.{i}.{part}" for i in range(30) for part in ("key", "value")]


def test_sixty_caches_are_one_entry_in_their_place():
    told = told_as_one(["logits", *MODEL, "logits_score"])
    assert told == [
        ("logits", "logits"),
        ("present.0.key", "present.0.key … present.29.value (60 caches)"),
        ("logits_score", "logits_score"),
    ]
    assert names_told(["logits", *MODEL]) == "logits, present.0.key … present.29.value (60 caches)"


@pytest.mark.parametrize(
    "name",
    ["past_key_values.{}.key", "past_key_self_{}", "present_{}", "kv_cache_{}", "new_past_{}", "Cache.{}"],
)
def test_usual_names_are_known(name: str):
    names = [name.format(i) for i in range(4)]
    assert many_caches(["x", *names]) == names


@pytest.mark.parametrize("name", ["output_{}", "boxes.{}", "presentation_{}", "pastry{}", "represented_{}"])
def test_other_outputs_keep_their_names(name: str):
    names = [name.format(i) for i in range(4)]
    assert many_caches(names) == [] and names_told(names) == ", ".join(names)


def test_few_caches_keep_their_names_and_known_ones_need_none():
    assert names_told(["y", *MODEL[:2]]) == f"y, {MODEL[0]}, {MODEL[1]}"
    states = ["h0", "h1", "h2"]
    assert names_told(["y", *states], states) == "y, h0 … h2 (3 caches)"

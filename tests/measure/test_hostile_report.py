"""A report of a model, files and labels whose names are attacks: in a browser nothing of theirs is alive.

All goes the way that a user goes: the model is converted, `evaluate --report` writes the page, Chromium opens it.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from support.browser import opened
from support.labelled_models import net, rows

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

import gapa_onnx
from gapa_onnx.cli import main

#: What would be alive somewhere: in text, in an attribute of either quote, in a style, a script, a comment, a drawing.
ATTACKS = (
    "<script>window.hit = 1</script>",
    '"><img src=x onerror="window.hit = 2">',
    "' onmouseover='window.hit = 3' x='",
    "javascript:window.hit = 4",
    "</style></script><svg onload=window.hit=5>",
    "]]><!--<iframe srcdoc='&lt;script&gt;parent.hit=6&lt;/script&gt;'>",
    "</text><a xlink:href='javascript:window.hit=7'>x</a>",
    '{"</script>": "<base href=//evil.example>"}',
    "&lt;script&gt;window.hit = 9&lt;/script&gt;<meta http-equiv=refresh content=0;url=javascript:1>",
)
#: What may lead somewhere or run, in an element of the page.
LIVE = """
const bad = [];
for (const e of document.querySelectorAll('*')) {
  if (['SCRIPT', 'IFRAME', 'OBJECT', 'EMBED', 'BASE', 'FORM', 'INPUT', 'AUDIO', 'VIDEO', 'FRAME', 'ANIMATE', 'SET']
      .includes(e.tagName.toUpperCase())) bad.push(e.outerHTML.slice(0, 200));
  for (const a of e.attributes) {
    if (/^on/i.test(a.name)) bad.push(a.name + ' of ' + e.outerHTML.slice(0, 200));
    if (/^(src|href|xlink:href|action|srcdoc|formaction|data)$/i.test(a.name) && !/^(#|data:,$|data:image\\/)/i.test(a.value))
      bad.push(a.name + '=' + a.value.slice(0, 200));
  }
}
return bad;"""
ELEMENTS = "return [...document.querySelectorAll('*')].map(e => e.tagName + ' ' + e.getAttributeNames().sort().join(' '));"


@dataclass(frozen=True)
class Page:
    path: Path
    names: tuple[str, ...]


def page(folder: Path, names: tuple[str, ...]) -> Page:
    """The report where everything that somebody else may name has one of these names."""
    folder.mkdir()
    given, everything = iter(names), " ".join(names)
    model = net()
    renamed = {name: f"{everything} {name}" for name in ("x", "z", "h", "y")}
    for number, node in enumerate(model.graph.node):
        node.name = f"{everything} {number}"
        node.input[:] = [renamed.get(name, name) for name in node.input]
        node.output[:] = [renamed.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        value.name = renamed.get(value.name, value.name)
    model.producer_name = model.graph.name = everything
    files = [
        folder / (next(given).replace("/", "\u2215") + ending)
        for ending in (".onnx", ".gapa.onnx", ".npz", ".npy", ".npz")
    ]
    source, converted, data, labels, other = files
    onnx.save(model, source)
    x, y = rows(200, 0)
    np.savez(data, **{renamed["x"]: x})
    np.savez(other, **{renamed["x"]: 3 * x})
    np.save(labels, y)
    gapa_onnx.convert(source, data, converted, m=40, k=5, task="classification")
    told = ["evaluate", converted, "--data", data, "--labels", labels, "--ood", other, "--source", source]
    report = folder / "page.html"
    assert main([*map(str, told), "--report", str(report)]) == 0
    return Page(report, names)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Page]:
    folder = tmp_path_factory.mktemp("hostile")
    harmless = tuple(f"name {number}" for number in range(len(ATTACKS)))
    return {"hostile": page(folder / "a", ATTACKS), "harmless": page(folder / "b", harmless)}


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with opened(tmp_path_factory.mktemp("profile")) as running:
        yield running


def test_nothing_of_theirs_is_alive(browser: Any, pages: dict[str, Page]) -> None:
    browser.get(pages["hostile"].path.as_uri())
    assert browser.execute_script(LIVE) == []
    for element in browser.find_elements("css selector", "summary"):
        element.click()  # what is folded up is there as well
    browser.execute_script(
        "for (const e of document.querySelectorAll('*')) for (const kind of ['mouseover', 'click', 'focus', 'error', 'load'])"
        " e.dispatchEvent(new Event(kind));"
    )
    assert browser.execute_script("return window.hit") is None
    assert browser.current_url == pages["hostile"].path.as_uri()
    assert browser.get_log("browser") == []


def test_names_make_no_elements(browser: Any, pages: dict[str, Page]) -> None:
    """The page has the elements and attributes that it has with harmless names, and the attacks as text."""
    found = {}
    for kind, made in pages.items():
        browser.get(made.path.as_uri())
        found[kind] = Counter(browser.execute_script(ELEMENTS))
    assert found["hostile"] == found["harmless"]
    browser.get(pages["hostile"].path.as_uri())
    text = browser.execute_script("return document.documentElement.textContent")
    assert [name for name in ATTACKS if name not in text] == []


def test_a_page_that_lets_a_name_through_is_seen(
    browser: Any, pages: dict[str, Page], tmp_path: Path
) -> None:
    """The checks above can fail."""
    path = tmp_path / "page.html"
    shutil.copy(pages["harmless"].path, path)
    path.write_text(path.read_text().replace("</body>", f"{''.join(ATTACKS[:5])}</body>"))
    browser.get(path.as_uri())
    assert browser.execute_script(LIVE) and browser.get_log("browser")

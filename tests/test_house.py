"""The house stands: rooms import only rooms before them, modules and functions stay small, imports are declared.

The limits and the order of rooms are in tools/house.py; `python tools/house.py` prints all that breaks them.
"""

from __future__ import annotations

import re
import sys
from importlib.metadata import packages_distributions

import draw_house
import house
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Modules over the limit of lines.
LONG_MODULES: set[str] = set()
MOST_LONG_MODULES = 0

#: Functions over the limit of lines.
LONG: set[str] = set()
#: Functions over the limit of complexity.
TANGLED: set[str] = set()
MOST_EXCEPTIONS = 10

#: Entries of pyproject.toml that excuse a module from mypy.
MOST_UNTYPED = 5

#: Extras that no user of the product installs.
DEVELOPERS = ("test", "lint", "benchmarks")

CONFIGURATION = tomllib.loads((house.ROOT / "pyproject.toml").read_text(encoding="utf-8"))
HOUSE = house.modules()
IMPORTS = house.imports(HOUSE)
FUNCTIONS = {function.name: function for module in HOUSE.values() for function in module.functions()}


def parsed(name: str, text: str) -> house.Module:
    return house.Module(name, house.ROOT, text)


def test_every_module_is_in_a_room():
    assert {house.room(name) for name in HOUSE} == set(house.ROOMS)


def test_a_room_imports_only_rooms_before_it():
    assert [str(entry) for entry in house.wrong_ways(IMPORTS)] == []


def test_no_modules_import_each_other():
    assert house.cycles(IMPORTS) == []


def test_modules_are_short():
    long = {name for name, module in HOUSE.items() if module.lines > house.MOST_LINES_OF_A_MODULE}
    assert long - LONG_MODULES == set(), "split them"
    assert LONG_MODULES - long == set(), "these are short now: take them off the list"
    assert len(LONG_MODULES) <= MOST_LONG_MODULES


def test_functions_are_short():
    long = {name for name, function in FUNCTIONS.items() if function.lines > house.MOST_LINES_OF_A_FUNCTION}
    assert long - LONG == set(), "split them"
    assert LONG - long == set(), "these are short now: take them off the list"


def test_functions_branch_little():
    tangled = {name for name, function in FUNCTIONS.items() if function.complexity > house.MOST_COMPLEXITY}
    assert tangled - TANGLED == set(), "split them"
    assert TANGLED - tangled == set(), "these are simple now: take them off the list"


def test_exceptions_are_few():
    assert len(LONG | TANGLED) <= MOST_EXCEPTIONS


def test_modules_without_types_are_few():
    lenient = [entry for entry in CONFIGURATION["tool"]["mypy"]["overrides"] if entry.get("ignore_errors")]
    names = [name for entry in lenient for name in entry["module"]]
    assert len(names) <= MOST_UNTYPED
    assert {name.removesuffix(".*") for name in names} <= set(HOUSE)


def test_what_is_imported_is_declared():
    project = CONFIGURATION["project"]
    extras = [names for extra, names in project["optional-dependencies"].items() if extra not in DEVELOPERS]
    wanted = [*project["dependencies"], *sum(extras, [])]
    declared = {_canonical(re.match(r"[\w.-]+", entry)[0]) for entry in wanted}
    homes = packages_distributions()
    imported = set().union(*map(house.third_party, HOUSE.values())) - set(sys.stdlib_module_names)
    undeclared = {
        name
        for name in imported
        if declared.isdisjoint({_canonical(name), *map(_canonical, homes.get(name, ()))})
    }
    assert undeclared == set()


def _canonical(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


def test_the_picture_of_the_house_is_current():
    """But for the numbers of lines, which change with every commit."""
    committed = draw_house.without_lines(draw_house.PICTURE.read_text(encoding="utf-8"))
    assert committed == draw_house.without_lines(draw_house.draw(HOUSE, IMPORTS)), "run `make house`"


# ------------------------------------------------------------------- the tests of the tests


def test_imports_are_found_wherever_they_stand():
    text = """
import gapa_onnx.fit.fit, numpy.linalg
from gapa_onnx import __version__, settings
from gapa_onnx.plan import analyse, Plan
if TYPE_CHECKING:
    from gapa_onnx.emit.emit import emit
def later():
    try:
        from gapa_onnx.cli import main
    except ImportError:
        import onnx
"""
    names = ("settings", "plan", "plan.analyse", "fit.fit", "emit.emit", "cli", "data.one")
    rooms = {f"gapa_onnx.{name}": parsed(f"gapa_onnx.{name}", "") for name in names}
    rooms["gapa_onnx.data.one"] = one = parsed("gapa_onnx.data.one", text)
    found = house.imports(rooms)
    assert {entry.of.removeprefix("gapa_onnx.") for entry in found} == set(names) - {"data.one"}
    assert [entry.of for entry in found if entry.only_for_types] == ["gapa_onnx.emit.emit"]
    assert house.third_party(one) == {"numpy", "onnx"}
    late = {
        "gapa_onnx.fit.fit",
        "gapa_onnx.plan",
        "gapa_onnx.plan.analyse",
        "gapa_onnx.emit.emit",
        "gapa_onnx.cli",
    }
    assert {entry.of for entry in house.wrong_ways(found)} == late
    with pytest.raises(ValueError, match="line 1: a relative import"):
        house.imports({"gapa_onnx.data.two": parsed("gapa_onnx.data.two", "from . import one")})


def test_cycles_are_found():
    def read(by: str, of: str, only_for_types: bool = False) -> house.Import:
        return house.Import(by, of, 1, only_for_types)

    chain = [read("a", "b"), read("b", "c"), read("d", "a")]
    assert house.cycles(chain) == []
    assert house.cycles([*chain, read("c", "a", only_for_types=True)]) == []
    assert house.cycles([*chain, read("c", "a")]) == [["a", "b", "c"]]
    assert house.cycles([read("a", "a")]) == [["a"]]


@pytest.mark.parametrize(
    ("body", "complexity"),
    [
        ("pass", 1),
        ("if a:\n  pass\n elif b:\n  pass\n else:\n  pass", 3),
        ("for a in b:\n  pass\n else:\n  pass", 3),
        ("while a and b or c:\n  pass", 4),
        ("try:\n  pass\n except A:\n  pass\n except B:\n  pass\n finally:\n  pass", 3),
        ("return [x if x else y for x in z if x if y]", 5),
        ("assert a", 2),
        ("match a:\n  case 1:\n   pass\n  case _:\n   pass", 3),
        ("def g():\n  return a or b", 2),
    ],
)
def test_complexity_counts_branches(body: str, complexity: int):
    function = next(parsed("m", f"def f():\n {body}\n").functions())
    assert (function.name, function.complexity) == ("m.f", complexity)
    assert function.lines == 2 + body.count("\n")

"""The case table of the variance rules: one line per form of an operator, one module per topic.

To test a new rule, add a line to the module that fits; `framework` says how a line is written.
"""

from __future__ import annotations

import importlib
import pkgutil

from cases.framework import CASES, DEFAULT_OPSET, Case, Drawn, Given, definitions, element_type

for module in sorted(pkgutil.iter_modules(__path__), key=lambda module: module.name):
    importlib.import_module(f"cases.{module.name}")

__all__ = ["CASES", "DEFAULT_OPSET", "Case", "Drawn", "Given", "definitions", "element_type"]

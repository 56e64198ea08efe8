"""Runs in an environment with onnxruntime-genai: the tokens that a folder generates, and what it says after each.

python generation.py FOLDER TOKENS OUTPUT…     the tokens of the prompt are 1, 2, 3, …
"""

from __future__ import annotations

import json
import sys

import onnxruntime_genai as og

folder, count, *outputs = sys.argv[1:]
model = og.Model(folder)
params = og.GeneratorParams(model)
params.set_search_options(max_length=8 + int(count), do_sample=False)
generator = og.Generator(model, params)
generator.append_tokens(list(range(1, 9)))
told = []
while not generator.is_done():
    generator.generate_next_token()
    told.append({name: generator.get_output(name).tolist() for name in outputs})
print(json.dumps({"tokens": [int(token) for token in generator.get_sequence(0)], "told": told}))

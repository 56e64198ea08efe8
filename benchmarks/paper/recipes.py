"""The paper's MNIST network by several recipes: how far its figures hang on the way that a network was trained.

    python benchmarks/paper/recipes.py [--quick] [--data DIR] [--seeds 3] [--fresh] [--cache DIR]

The paper trains "following" Ortega et al. (2023), whose published script has SGD with momentum 0.5, 20,000 batches of
100 and weight decay; the step size of its tables it does not say. Recipes:

    Adam                      that of the classification table
    Adam, weight decay 1e-4   batches of 100, nine epochs
    SGD                       as published, with the step size and weight decay that bring seed 0 nearest the paper's MAP

Each is stopped where its accuracy is about the paper's. Writes results/recipes.csv line by line, with the figures of
classification.py; a line that is there is not run again.
"""

from __future__ import annotations

from dataclasses import replace

from classification import MAP, arguments, chosen, matching, measured, one_thread
from training import DATA_SETS, Recipe, problem

from backbones import images  # isort: skip  (training puts benchmarks/ on the path)
from lines import Lines, say  # isort: skip

NAME = "mnist"
RECIPES = {
    "Adam": Recipe(10),
    "Adam, weight decay 1e-4": Recipe(9, batch=100, weight_decay=1e-4),
    "SGD": Recipe(36, batch=100, rate=0.05, weight_decay=3e-4, momentum=0.5),
}
QUICK = {"SGD": replace(RECIPES["SGD"], epochs=1)}
ROWS = ("DDU", "GAPA-Diag", "gapa-onnx", "gapa-onnx last layer")
KEY = ("recipe", "row", "seed")


def main() -> None:
    parser = arguments(__doc__)
    parser.set_defaults(seeds=3)
    options = parser.parse_args()
    scale, folder = chosen(options)
    lines = Lines(folder / "recipes.csv", KEY, fresh=False)
    one_thread()
    outside = images(DATA_SETS[NAME], options.data)["x_test"]
    for seed in range(1 if options.quick else options.seeds):
        for label, recipe in (QUICK if options.quick else RECIPES).items():
            place = scale.folder / "recipes" / label.replace(" ", "_").replace(",", "")
            place.mkdir(parents=True, exist_ok=True)
            task = problem(NAME, seed, replace(scale, recipes={NAME: recipe}, folder=place), options.data)
            for row in [MAP, *(row for row in matching([""]) if row.name in ROWS)]:
                if options.fresh or not lines.has(label, row.name, seed):
                    say(f"{label}, seed {seed}: {row.name}")
                    lines.add(
                        {"recipe": label, "row": row.name, "seed": seed, **measured(row, task, outside)}
                    )


if __name__ == "__main__":
    main()

"""Heads and thresholds on MNIST and Fashion-MNIST: what was promised, measured.

    argmax         rows of both test sets whose most probable class is not the source's (0 is promised)
    flagged        share of test rows, which are new but of the same kind, beyond the 0.95 quantile
    BALD           the file's sampling-free epistemic part against Monte Carlo with 4096 draws: rank
                   correlation over test rows of both sets, and AUROC for telling the sets apart

Writes results/heads.csv. `--quick` trains for one epoch and takes fewer rows.
"""

from __future__ import annotations

import argparse
import csv
import sys
import tempfile
from pathlib import Path

import numpy as np
from backbones import DATA, HERE, classifier, images
from scipy.stats import spearmanr
from sklearn.metrics import roc_auc_score

import gapa_onnx

OTHER = {"mnist": "fashion_mnist", "fashion_mnist": "mnist"}
DRAWS = 4096
WANTED = ("", "_var", "_probs", "_epistemic", "_score", "_ood")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results" / "heads.csv")
    options = parser.parse_args()
    epochs, most = (1, 1000) if options.quick else (12, 10_000)
    rows = []
    for name in OTHER:
        data, elsewhere = images(name, options.data), images(OTHER[name], options.data)["x_test"]
        model = classifier(name, folder=options.data, epochs=epochs)
        for sites in ("auto", "all"):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "converted.onnx"
                gapa_onnx.convert(model, {"x": data["x_train"]}, path, sites=sites)
                inside, outside = (answers(path, x[:most]) for x in (data["x_test"], elsewhere))
            rows.append({"data": name, "sites": sites, "rows": most, **figures(inside, outside)})
            print(rows[-1], file=sys.stderr)
    with open(options.out, "w", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)


def answers(path: Path, x: np.ndarray) -> dict[str, np.ndarray]:
    session = gapa_onnx.session(path)
    names = [f"logits{role}" for role in WANTED]
    parts = [session.run(names, {"x": x[start : start + 256]}) for start in range(0, len(x), 256)]
    return {role: np.concatenate(part) for role, part in zip(WANTED, zip(*parts))}


def figures(inside: dict[str, np.ndarray], outside: dict[str, np.ndarray]) -> dict[str, float]:
    changed = sum(int((a[""].argmax(1) != a["_probs"].argmax(1)).sum()) for a in (inside, outside))
    sampled = [monte_carlo_bald(a[""], a["_var"]) for a in (inside, outside)]
    truth = np.repeat([0, 1], [len(inside[""]), len(outside[""])])
    fixed = np.concatenate([inside["_epistemic"], outside["_epistemic"]])
    auroc = {
        "bald": roc_auc_score(truth, fixed),
        "bald_sampled": roc_auc_score(truth, np.concatenate(sampled)),
        "score": roc_auc_score(truth, np.concatenate([inside["_score"], outside["_score"]])),
    }
    return {
        "argmax_changed": changed,
        "flagged": round(float(inside["_ood"].mean()), 4),
        "flagged_elsewhere": round(float(outside["_ood"].mean()), 4),
        "spearman": round(float(spearmanr(fixed, np.concatenate(sampled)).statistic), 4),
        "spearman_inside": round(float(spearmanr(inside["_epistemic"], sampled[0]).statistic), 4),
        **{f"auroc_{kind}": round(float(value), 4) for kind, value in auroc.items()},
    }


def monte_carlo_bald(mean: np.ndarray, var: np.ndarray, draws: int = DRAWS) -> np.ndarray:
    """H(mean p) − mean H(p) over independent draws of the logits, in float64: (n, c) -> (n,)."""
    generator = np.random.default_rng(0)
    bald = np.empty(len(mean))
    for row, (m, s) in enumerate(zip(mean.astype(np.float64), np.sqrt(var.astype(np.float64)))):
        logits = m + s * generator.standard_normal((draws, len(m)))
        logits -= logits.max(axis=1, keepdims=True)
        p = np.exp(logits)
        total = p.sum(axis=1, keepdims=True)
        p /= total
        entropies = np.log(total[:, 0]) - (p * logits).sum(axis=1)
        centre = p.mean(axis=0)
        bald[row] = -(centre * np.log(np.maximum(centre, 1e-300))).sum() - entropies.mean()
    return bald


if __name__ == "__main__":
    main()

"""What stands beside an output in a converted file, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def added(heads: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, str]]:
    """What a conversion adds to each output, and where the lines of its scores are."""
    found = []
    for name, head in heads.items():
        roles = head["outputs"]
        found += [("adds", f"{roles[r]}, {text.format(name)}") for r, text in _ROLES.items() if r in roles]
        for role, score in head.get("scores", {}).items():
            found.append(("flags", threshold_line(score) + _WHOSE.get(role, "")))
        found += promised(head)
        if "noise" in head:
            noise = head["noise"]
            found.append(
                ("noise", f"{noise['nll']:.4g} nats per row, {noise['constant_nll']:.4g} if it were constant")
            )
    return found


_ROLES = {
    "var": "the variance of {}",
    "cov": "the covariance of the elements of {}",
    "probs": "probabilities that allow for the variance",
    "tokens": "the tokens that they are of, those with the largest logits",
    "token_var": "the variances of these logits",
    "entropy": "how uncertain the class is, in nats: the sum of the next two",
    "aleatoric": "because the classes overlap",
    "epistemic": "because the model has not seen such inputs",
    "score": "how strange the input is",
    "pvalue": "how rare that is: the share of ordinary inputs as strange or stranger",
    "ood": "true where it is too rare",
    "candidates": "places of the most confident candidates, whose answers the others are",
    "class_var": "the variance of the class logits",
    "box_var": "the variance of the four box numbers, in their own units",
    "objectness": "the probability of an object that allows for the variance",
    "image_score": "how strange the image is as a whole",
    "image_pvalue": "how rare that is",
    "image_ood": "true where it is too rare",
    "seq_score": "how strange the sequence is as a whole",
    "seq_pvalue": "how rare that is",
    "seq_ood": "true where it is too rare",
    "aleatoric_var": "the variance of the noise around {}",
    "total_var": "both variances together",
    "set": "the classes that the true one is among, as promised below",
    "defer": "true where somebody else should answer, as promised below",
    "lower": "the lower end of an interval that the true value is in, as promised below",
    "upper": "its upper end",
}


_WHOSE = {"image_score": ", of images", "seq_score": ", of sequences"}


def promised(head: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a file promises of one output, and how its probabilities were calibrated."""
    found = []
    if "temperature" in head:
        t = head["temperature"]
        text = f"temperature {t['value']:.4g}, τ times {t['factor']:.3g}, by {t['rows']} labels: {t['nll']:.4g} nats per row"
        found.append(("calibrated", f"{text}, {t['nll_before']:.4g} before"))
    for name, text in PROMISES.items():
        if name in head:
            of = "pixels of an image, in the mean," if head["task"] == "segmentation" else "rows"
            found.append(("promise", promise_line(head[name], text.replace("rows", of))))
    return found


PROMISES = {
    "sets": "the true class is in the set of at least {:g} of all rows",
    "deferral": "at most {:g} of the answered rows are wrong",
    "intervals": "the true value is in the interval of at least {:g} of all rows",
}


def promise_line(promise: Mapping[str, Any], text: str) -> str:
    """A promise in words; `text` says what of, with a place for its level."""
    sure = f", with confidence {promise['confidence']:g}" if promise.get("confidence") else ""
    lines = promise["table"][f"{promise['level']:g}"]
    each = ", of every class" if len(lines) > 1 else ""
    holds = f"{promise['holds']}, counted on {promise['rows']} rows ({promise['kind']})"
    return f"{text.format(promise['level'])}{each}{sure}: {holds}"


def threshold_line(score: Mapping[str, Any]) -> str:
    level = (
        f"scores from {score['threshold']:.4g}"
        if score["quantile"] is None
        else f"p ≤ {1 - score['quantile']:.3g}"
    )
    holds = {"approximately": "approximately, as the model may have been fitted to them"}.get(
        score["holds"], "exactly"
    )
    return f"{level}, by {score['rows']} {score['source']} ({holds})"


def kept_of_data(record: Mapping[str, Any]) -> tuple[str, str]:
    """What of the calibration data can be read out of a file."""
    places = [*record["sites"], *record["witnesses"]]
    rows = sum(place["points"] for place in places if place["least_rows"] == 1)
    if rows:
        return "keeps", f"up to {rows} rows of your data, as activations: `--private N` keeps means alone"
    least = min((place["least_rows"] for place in places), default=0)
    return "keeps", f"no row of your data; each of its points is the mean of {least} rows or more"

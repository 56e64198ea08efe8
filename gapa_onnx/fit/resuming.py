"""Where later passes take a large model up again: they need what is behind its sites, not what leads to them."""

from __future__ import annotations

import numpy as np

from gapa_onnx.model.weights import is_outside
from gapa_onnx.plan.analyse import Plan


def resumed(plan: Plan) -> tuple[str, ...]:
    """The tensors of a large model that are kept of left-out rows, so that it need not run up to them again.

    Of other models none is: their tensors may take more room than their weights.
    """
    source = plan.source
    if not any(map(is_outside, source.proto.graph.initializer)):
        return ()
    names = []
    for site in plan.sites:
        tensor = source.tensors[site.query]
        made = tensor.inputs[0] if len(tensor.inputs) == 1 and site.query not in source.constants else None
        # A node with several outputs may be needed for the others.
        alone = made is not None and len(made.outputs) == 1
        if alone and tensor.dtype == np.float32 and not site.chosen and not site.joined:
            names.append(site.query)
    return tuple(dict.fromkeys(names))

"""Run the part of a template behind its sites, with shares, amplitudes and half-way points as inputs.

A large model is run from its sites on (`resuming`), any other from its own inputs.

So it can be run for any τ and A without being written again.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx
from onnxruntime import InferenceSession

from gapa_onnx.arrays import Array
from gapa_onnx.emit.emit import numbered
from gapa_onnx.emit.numbers import Numbers, head_tensors, site_tensors
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.fit.calibrate import SiteFit
from gapa_onnx.fit.resuming import resumed
from gapa_onnx.model.splice import extract, splice
from gapa_onnx.sessions.inference import run_batch
from gapa_onnx.sessions.runtime import open_session, session_options
from gapa_onnx.settle.left_out import LeftOutBatch

# Beyond it onnxruntime's optimiser takes longer than it saves on a few thousand rows: for 20,000 nodes of a source
# a session loads in 21.6 s with it and in 7 s without.
MOST_OPTIMISED = 5000
HINT = "choose other places with `sites`; the fault is not in the data, so please report it"


class Tail:
    """A session that computes some tensors of the template; of `numbers` it has noise heads, temperatures and lines."""

    def __init__(self, template: Template, wanted: Sequence[str], numbers: Numbers | None = None):
        self.template = template
        self.wanted = list(dict.fromkeys(wanted))
        self._session: InferenceSession | None = None
        if not self.wanted:  # shares may be all that a score is made of
            return
        parameters = {name for site in template.sites for name in (site.half_way, site.lift, *site.multiples)}
        shapes: dict[str, list[int] | None] = {
            tensor.name: list(tensor.dims)
            for tensor in template.additions.initializer
            if tensor.name in parameters
        }
        shapes |= {place.share: None for place in template.places}
        shapes |= {name: None for name in resumed(template.plan) if name not in self.wanted}
        given = [
            onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
            for name, shape in shapes.items()
        ]
        source = template.plan.source
        additions = template.additions
        if numbers is not None:
            additions = numbered(template, head_tensors(template, numbers))
        whole = splice(source.proto, additions, (), template.functions)
        part = extract(whole, self.wanted, given)
        options = session_options(optimise=len(part.graph.node) <= MOST_OPTIMISED)
        self._session = open_session(part, "the converted model", options)
        self._read = {value.name for value in self._session.get_inputs()}

    def __call__(self, batch: LeftOutBatch, fits: Sequence[SiteFit]) -> dict[str, Array]:
        """The wanted tensors for left-out rows, if the sites had these fits."""
        if self._session is None:
            return {}
        fed = {**batch.inputs, **site_tensors(self.template, fits)}
        fed |= {place.share: batch.shares[place.output] for place in self.template.places}
        needed = {name: array for name, array in fed.items() if name in self._read}
        answers = run_batch(self._session, self.wanted, needed, "the variance graph failed", HINT)
        return dict(zip(self.wanted, answers))

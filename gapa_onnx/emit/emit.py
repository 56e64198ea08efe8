"""Step 6, emit: put the template and its numbers into a copy of the source model.

The model gets a record, which says how it was made and what its tensors mean; it is written nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx

from gapa_onnx import __version__
from gapa_onnx.arrays import Array
from gapa_onnx.data import HeldOut
from gapa_onnx.data.tokenizer import METADATA_KEY as TOKENIZER_KEY
from gapa_onnx.data.tokenizer import TokenizerFile
from gapa_onnx.emit.numbers import Numbers, at_sites, file_tensors
from gapa_onnx.emit.places import SiteTensors
from gapa_onnx.emit.rewrite import Template
from gapa_onnx.fit.calibrate import Calibration, SiteFit
from gapa_onnx.model.digest import digest_of
from gapa_onnx.model.splice import prune, splice
from gapa_onnx.op.contract import CLASSES, DOMAIN
from gapa_onnx.plan.head import Head
from gapa_onnx.plan.heads.promises import Promises
from gapa_onnx.plan.outputs import points_record
from gapa_onnx.record import (
    FORMAT,
    METADATA_KEY,
    BudgetRecord,
    CutRecord,
    DataRecord,
    DetectionRecord,
    HeadRecord,
    HeldOutRecord,
    NoiseRecord,
    PlaceRecord,
    Record,
    SiteRecord,
    SourceRecord,
)
from gapa_onnx.settings import Settings


def emit(
    template: Template,
    numbers: Numbers,
    calibration: Calibration,
    settings: Settings,
    budget: BudgetRecord | None = None,
    held: HeldOut | None = None,
) -> onnx.ModelProto:
    """The converted model, with its record."""
    source = template.plan.source
    additions = _filled(template, numbers)
    functions = () if settings.portable == "none" else template.functions
    model = splice(source.proto, additions, template.outputs, functions)
    _loosen_outputs(model, template)
    record = _record(template, additions, numbers, calibration, settings, budget)
    if held is not None:
        record = replace(record, data=replace(record.data, held_out=_held_out_record(held)))
    attach(model, record)
    if calibration.fed.data.remembered.tokenizer is not None:
        _keep_tokenizer(model, calibration.fed.data.remembered.tokenizer)
    return model


def _keep_tokenizer(model: onnx.ModelProto, tokenizer: TokenizerFile) -> None:
    """Put the tokenizer of the calibration data into a model, so that whoever has the file can give it text."""
    kept = tokenizer.kept()
    if kept is not None:
        model.metadata_props.add(key=TOKENIZER_KEY, value=kept)


def unrecorded(template: Template, numbers: Numbers, wanted: Sequence[str]) -> onnx.ModelProto:
    """The converted model without its record, with some inner tensors as outputs too."""
    source = template.plan.source
    present = {info.name for info in (*source.proto.graph.output, *template.outputs)}
    more = [onnx.helper.make_empty_tensor_value_info(name) for name in wanted if name not in present]
    additions = _filled(template, numbers, wanted)
    model = splice(source.proto, additions, [*template.outputs, *more], template.functions)
    _loosen_outputs(model, template)
    return model


def seal(model: onnx.ModelProto, record: Record) -> Record:
    """Put the record into a model that is about to be written, with a digest of both; the record as it is then."""
    attach(model, record)
    sealed = replace(record, digest=digest_of(model))
    attach(model, sealed)
    return sealed


def attach(model: onnx.ModelProto, record: Record) -> None:
    """Put the record into a model, in place of the one that it may have."""
    entries = [entry for entry in model.metadata_props if entry.key == METADATA_KEY]
    entry = entries[0] if entries else model.metadata_props.add(key=METADATA_KEY)
    entry.value = json.dumps(record.as_json(), sort_keys=True, ensure_ascii=False, allow_nan=False)


def put_tensor(graph: onnx.GraphProto, name: str, array: Array) -> bool:
    """Replace the value of an initializer and keep its type; False where the graph has none of this name."""
    for tensor in graph.initializer:
        if tensor.name == name:
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(array, kind), name))
            return True
    return False


def numbered(template: Template, tensors: Mapping[str, Array]) -> onnx.GraphProto:
    """The template's nodes, with these numbers in their parameters."""
    additions = onnx.GraphProto()
    additions.CopyFrom(template.additions)
    for tensor in additions.initializer:
        if tensor.name in tensors:
            kind = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(onnx.numpy_helper.from_array(np.asarray(tensors[tensor.name], kind), tensor.name))
    return additions


def _filled(template: Template, numbers: Numbers, wanted: Sequence[str] = ()) -> onnx.GraphProto:
    """The template's nodes with their numbers filled in, and without nodes that no output and nothing wanted needs."""
    additions = numbered(template, file_tensors(template, numbers))
    plain = {site.levelled: site.share for site, fit in at_sites(template, numbers.fits) if not fit.damping}
    for node in additions.node:
        for position, name in enumerate(node.input):
            node.input[position] = plain.get(name, name)
    prune(additions, {*wanted, *(info.name for info in template.outputs)})
    return additions


def _loosen_outputs(model: onnx.ModelProto, template: Template) -> None:
    """Take back a number of rows that outputs declare where inputs leave it open.

    Some files declare the one row that they were exported with. onnxruntime believes it of all that is
    computed from such an output, and would reuse buffers of that size.
    """
    inputs = template.plan.source.inputs
    if not any(spec.shape and not isinstance(spec.shape[0], int) for spec in inputs):
        return
    for output in model.graph.output:
        dims = output.type.tensor_type.shape.dim
        if len(dims) and dims[0].HasField("dim_value"):
            dims[0].ClearField("dim_value")


# ------------------------------------------------------------------ the record


def _record(
    template: Template,
    additions: onnx.GraphProto,
    numbers: Numbers,
    calibration: Calibration,
    settings: Settings,
    budget: BudgetRecord | None,
) -> Record:
    """What the file says about itself."""
    source = template.plan.source
    operators = {
        name: node.name
        for node in additions.node
        if node.domain == DOMAIN and node.op_type == CLASSES.name
        for name in node.output
    }
    return Record(
        format=FORMAT,
        version=__version__,
        source=SourceRecord(
            file=source.path.name if source.path else None,
            sha256=source.sha256,
            opset=source.opset,
            producer=source.proto.producer_name,
        ),
        settings=dict(vars(settings)),
        data=DataRecord(calibration.rows, calibration.dropped),
        sites=tuple(
            SiteRecord(**_place(site, fit), scale=fit.scale, ceiling=fit.ceiling)
            for site, fit in at_sites(template, numbers.fits)
        ),
        witnesses=tuple(
            PlaceRecord(**_place(witness, fit))
            for witness in template.witnesses
            for fit in calibration.witnesses
            if fit.site.output == witness.output
        ),
        heads={
            head.output: _head_record(template, head, numbers, settings, operators)
            for head in template.plan.heads
        },
        images=calibration.fed.data.remembered.images,
        text=calibration.fed.data.remembered.text,
        cuts=tuple(CutRecord(entry.node, entry.operator, entry.reason) for entry in template.cuts),
        budget=budget,
        states=template.plan.states,
    )


def _held_out_record(held: HeldOut) -> HeldOutRecord:
    among = "documents set apart" if held.apart else "held-out rows" if held.exact else "calibration rows"
    return HeldOutRecord(int(held.fitting.sum()), int(held.counting.sum()), among)


def _place(tensors: SiteTensors, fit: SiteFit) -> dict[str, Any]:
    """What the record says of a place."""
    return dict(
        name=fit.site.name,
        query=fit.site.query,
        output=fit.site.output,
        activation=fit.site.activation,
        layout=fit.site.layout.value,
        axis=fit.site.axis,
        operator=tensors.share,
        share=tensors.share,
        rows=fit.rows,
        points=len(fit.index.points),
        least_rows=fit.least_rows,
        width=fit.index.points.shape[1],
        k=fit.k,
        length_scale=fit.length_scale,
        jitter=fit.jitter,
        index=fit.index.kind,
        index_settings=fit.index.settings,
        recall=fit.index.recall,
        share_error=fit.share_error,
        storage=fit.storage.format,
        storage_error=fit.storage_error,
        share_quantiles=fit.share_quantiles,
        mask=fit.site.mask,
        joined=fit.site.joined,
        metric=fit.geometry.metric,
        metrics=fit.metrics,
    )


def _head_record(
    template: Template, head: Head, numbers: Numbers, settings: Settings, operators: Mapping[str, str]
) -> HeadRecord:
    roles = template.roles[head.output]
    classes = "epistemic" in roles
    noise, promises = numbers.noise.get(head.output), numbers.promises.get(head.output, Promises())
    return HeadRecord(
        task=head.task.value,
        logits=head.logits,
        link=head.link,
        axis=head.axis,
        reason=head.reason + numbers.remarks.get(head.output, ""),
        outputs=roles,
        bridge=settings.bridge if classes else None,
        points=points_record(template.plan.source, head, settings) if classes else None,
        operator=operators.get(roles["entropy"]) if classes else None,
        scores={role: one.record for (output, role), one in numbers.scores.items() if output == head.output},
        detection=_detection_record(head, settings),
        noise=None if noise is None else NoiseRecord(noise.rows, noise.nll, noise.constant_nll),
        mask=head.mask,
        temperature=promises.temperature,
        sets=promises.sets,
        deferral=promises.deferral,
        intervals=promises.intervals,
    )


def _detection_record(head: Head, settings: Settings) -> DetectionRecord | None:
    detector = head.detector
    if detector is None:
        return None
    return DetectionRecord(
        boxes=detector.boxes.tensor,
        box_axis=detector.boxes.axis,
        box_start=detector.boxes.start,
        candidate_axis=detector.boxes.candidate_axis,
        classes=detector.classes.tensor,
        class_axis=detector.classes.axis,
        class_start=detector.classes.start,
        classes_count=detector.classes.count,
        objectness=detector.objectness,
        background=detector.background,
        candidates=None if isinstance(settings.candidates, str) else settings.candidates,
    )

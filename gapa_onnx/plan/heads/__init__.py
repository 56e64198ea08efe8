"""Answers that people can act on, from the mean and the variance of logits: probabilities, and how much
of their uncertainty lies in the data and how much in the model."""

from gapa_onnx.plan.heads.classes import Classes, HeadOptions, emit_classes, head_points

__all__ = ["Classes", "HeadOptions", "emit_classes", "head_points"]

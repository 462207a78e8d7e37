"""Stored dtypes against the one that will run: quantized weights, and numbers out of range."""

from __future__ import annotations

import torch

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig
from eyas.models.findings import Findings, report_quantized


def report_dtype(
    subject: str,
    model: ModelConfig,
    checkpoint: Checkpoint | None,
    dtype: torch.dtype,
    findings: Findings,
) -> bool:
    """Report how the stored dtypes meet the one that will run.

    Each side speaks for itself: a draft does not inherit its target's quantization, nor the
    reverse. Returns whether the tensors can be compared with the model's.
    """
    stored = {info.dtype for info in (checkpoint.tensors if checkpoint else {}).values()}
    if dtype == torch.float16 and (model.dtype == "bfloat16" or "bfloat16" in stored):
        option = "--draft-dtype" if subject == "draft" else "--dtype"
        findings.warn(
            subject,
            "dtype-overflow",
            f"the {subject}'s weights are bfloat16 and would run in float16, whose largest number "
            "is 65504",
            f"use {option} bfloat16 unless NaN never shows",
        )
    if model.quantization is None:
        return True
    if checkpoint is not None and checkpoint.is_plain:
        findings.warn(
            subject,
            "quantization-absent",
            f"config.json says that the {subject} is quantized ({model.quantization}), and all "
            "stored weights are plain: they run as stored",
            "remove quantization_config from its config.json, or take the quantized weights",
        )
        return True
    if model.quant is not None:
        return True
    report_quantized(subject, model.quantization, findings)
    return False

"""An EAGLE-3 draft's config.json and tensor headers as a DraftConfig, whatever its format.

Published drafts carry values copied from their target (number of layers, tied head, head size,
biases) that the stored tensors contradict. Where tensors are there, their shapes decide, and each
contradiction is a warning; what shapes cannot settle is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eyas.models.checkpoint import Checkpoint, CheckpointError, NoWeightsError
from eyas.models.config import DraftConfig, ModelConfig
from eyas.models.config_file import Fields, read_json, read_quantization, shape_problems
from eyas.models.draft_kind import report_refused_kind
from eyas.models.draft_layer import read_decoder, read_norm_flags
from eyas.models.draft_names import canonical_name
from eyas.models.draft_pairing import read_boundaries, read_target_width, read_vocabulary
from eyas.models.draft_source import DraftSource
from eyas.models.findings import Findings, report_quantized
from eyas.types import EyasError

__all__ = ["DraftReading", "canonical_name", "inspect_draft", "read_draft_config"]


@dataclasses.dataclass
class DraftReading:
    """config: None when errors left no usable shape. checkpoint: None without readable weights."""

    config: DraftConfig | None
    checkpoint: Checkpoint | None
    findings: Findings


def read_draft_config(
    folder: str | Path,
    target: ModelConfig,
    *,
    boundaries: Sequence[int] | None = None,
    norm_output: bool | None = None,
) -> DraftConfig:
    """Read a draft for `target`. boundaries, norm_output: override the checkpoint's own.

    Raises CheckError (an EyasError) with everything that is wrong.
    """
    reading = inspect_draft(folder, target, boundaries=boundaries, norm_output=norm_output)
    reading.findings.raise_on_errors()
    assert reading.config is not None
    return reading.config


def inspect_draft(
    folder: str | Path,
    target: ModelConfig | None,
    *,
    boundaries: Sequence[int] | None = None,
    norm_output: bool | None = None,
) -> DraftReading:
    """Read a draft and collect findings instead of raising. Without a target (its own config
    cannot be read) only what concerns the draft alone is looked at."""
    folder, findings = Path(folder), Findings()
    reading = DraftReading(None, None, findings)
    if not folder.is_dir():
        findings.error(
            "draft",
            "draft-not-found",
            f"{folder} is not a folder",
            "give the folder that holds the draft's config.json and weights",
        )
        return reading
    reading.checkpoint = _open_weights(folder, findings)
    try:
        data = read_json(folder / "config.json")
    except EyasError as error:
        findings.error("draft", "config-unreadable", str(error))
        return reading
    if _is_quantized(data, folder, reading.checkpoint, findings):
        return reading
    tensors = reading.checkpoint.tensors if reading.checkpoint else {}
    shapes = {name: info.shape for name, info in tensors.items()}
    if report_refused_kind(data, shapes, findings, has_weights=reading.checkpoint is not None):
        return reading
    source = DraftSource.read(data, folder, checkpoint=reading.checkpoint, findings=findings)
    reading.config = _read(source, target, boundaries, norm_output)
    return reading


def _open_weights(folder: Path, findings: Findings) -> Checkpoint | None:
    try:
        return Checkpoint.open(folder)
    except NoWeightsError as error:
        findings.skip(
            "draft", "weights-missing", f"{error}: tensor shapes and maps were not checked"
        )
    except CheckpointError as error:
        findings.error("draft", "weights-broken", str(error))
    return None


def _is_quantized(
    data: dict[str, Any], folder: Path, checkpoint: Checkpoint | None, findings: Findings
) -> bool:
    """Whether quantized weights are stored and tagged so: names and shapes mean nothing then."""
    if checkpoint is None or checkpoint.is_plain:
        return False
    places = [Fields(data, where="config.json", subject="draft")]
    places.append(Fields(places[0].section("transformer_layer_config"), where="", subject="draft"))
    methods = [read_quantization(fields, folder) for fields in places]
    method = next(filter(None, methods), None)
    if method is not None:
        report_quantized("draft", method, findings)
    return method is not None


def _read(
    source: DraftSource,
    target: ModelConfig | None,
    boundaries: Sequence[int] | None,
    norm_output: bool | None,
) -> DraftConfig | None:
    decoder = read_decoder(source)
    flags = read_norm_flags(source, norm_output=norm_output)
    fc_bias = source.has("fc.bias", claimed=source.top.flag("bias", False), key="bias")
    if not source.layer.missing and not source.layer.problems:
        source.layer.problems += shape_problems(decoder)
    if source.report_fields():
        return None  # comparing made-up sizes with the target's would only add noise
    target_width = read_target_width(source, target)
    vocabulary = read_vocabulary(source, target, target_width=target_width)
    choice = read_boundaries(source, target, override=boundaries, target_width=target_width)
    if source.report_fields() or choice is None:
        return None
    decoder = dataclasses.replace(
        decoder,
        vocab_size=vocabulary.num_embeddings,
        tie_word_embeddings=vocabulary.tied_head,
    )
    return DraftConfig(
        format=source.format,
        decoder=decoder,
        target_hidden_size=target_width,
        draft_vocab_size=vocabulary.draft_vocab_size,
        boundaries=choice.boundaries,
        boundary_rule=choice.rule,
        fc_bias=fc_bias,
        has_embedding=vocabulary.has_embedding,
        has_head=vocabulary.has_head,
        has_d2t=vocabulary.has_d2t,
        **flags,
    )

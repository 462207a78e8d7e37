"""Stored tensors against module trees, and vocabulary maps: the parts of the check that look into
weight files."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from eyas.models.checkpoint import Checkpoint
from eyas.models.config import ModelConfig
from eyas.models.draft_names import canonical_name
from eyas.models.findings import Findings
from eyas.models.loader import Coverage, cover, group_names
from eyas.models.vocab_map import map_findings
from eyas.models.weight_slots import WeightSlot, stored_names

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
_HEAD = "lm_head.weight"
_FC_INPUT = ("fc.", "input_norm.", "fc_norm.")
_HINTS = {
    "missing": "the checkpoint is not complete, or its config.json describes another model",
    "left-over": "the config.json describes another model, or this one is not fully supported",
    "twice": "keep one copy",
    "wrong-shape": "take the config.json that belongs to these weights",
    "wrong-dtype": "stored in another format than its config.json says: take the files that "
    "belong together",
}


def report_coverage(
    subject: str,
    model: nn.Module,
    checkpoint: Checkpoint | None,
    findings: Findings,
    *,
    slots: Mapping[str, WeightSlot],
) -> str:
    """Report every parameter without a tensor and every tensor without a parameter, wrong shapes
    and wrong dtypes. Nothing without a checkpoint: that it is absent has been said.

    Returns what to say of stored tensors that are known and not read.
    """
    if checkpoint is None:
        return ""
    is_draft = subject == "draft"
    own_names = stored_names(model)
    rename = canonical_name if is_draft else own_names.rename
    coverage = cover(slots, checkpoint.tensors, rename=rename, ignore=own_names.ignored)
    if is_draft:
        _drop_reported(coverage, findings)
    else:
        _report_layer_count(coverage, set(slots), findings)
        _report_head(coverage, findings)
    for kind, line in coverage.lines().items():
        findings.error(subject, f"tensors-{kind}", line, _HINTS[kind])
    if coverage.tied:
        names = group_names([name for name, _ in coverage.tied])
        findings.skip(
            subject,
            "tied-head-stored",
            f"config.json says that the head is tied, and {names} is stored all the same; their "
            "values are compared when the weights are loaded",
        )
    return "; ".join(
        f"{prefix}* ({coverage.ignored[prefix]} tensors): {reason}"
        for prefix, reason in own_names.ignored.items()
        if prefix in coverage.ignored
    )


def _drop_reported(coverage: Coverage, findings: Findings) -> None:
    """Take out what reading the draft has already reported in its own words."""
    coverage.twice = []
    coverage.left_over = [name for name in coverage.left_over if canonical_name(name) is not None]
    codes = {finding.code for finding in findings.errors}
    settled: tuple[str, ...] = ()
    if codes & {"fc-width", "target-width"}:
        settled += _FC_INPUT
    if "vocab-map-size" in codes:
        settled += ("d2t",)
    if "vocab-map-dtype" in codes:
        coverage.wrong_dtype = [w for w in coverage.wrong_dtype if canonical_name(w[0]) != "d2t"]
    coverage.wrong_shape = [
        wrong
        for wrong in coverage.wrong_shape
        if not (canonical_name(wrong[0]) or "").startswith(settled)
    ]


def _report_layer_count(coverage: Coverage, built: set[str], findings: Findings) -> None:
    """A config.json of another number of layers, told once instead of tensor by tensor."""
    shapes = {name for name, *_ in (*coverage.wrong_shape, *coverage.wrong_dtype)}
    stored = shapes | set(coverage.sources) | set(coverage.left_over) | set(coverage.twice)
    built_layers, stored_layers = _layers(built), _layers(stored)
    is_whole = stored_layers == set(range(len(stored_layers)))
    if not stored_layers or not is_whole or stored_layers == built_layers:
        return
    findings.error(
        "target",
        "layer-count",
        f"config.json says num_hidden_layers = {len(built_layers)}, the weights hold "
        f"{len(stored_layers)} layers",
        "correct it, or get the weights that belong to it; a draft's boundaries count from it too",
    )
    coverage.missing = [n for n in coverage.missing if _layers({n}) <= stored_layers]
    coverage.left_over = [n for n in coverage.left_over if _layers({n}) <= built_layers]


def _layers(names: set[str]) -> set[int]:
    return {int(match[1]) for name in names if (match := _LAYER.fullmatch(name))}


def _report_head(coverage: Coverage, findings: Findings) -> None:
    """An untied head that is not stored, where all else is: the flag is wrong, not the file."""
    if len(coverage.missing) != 1 or not f".{coverage.missing[0]}".endswith(f".{_HEAD}"):
        return
    findings.error(
        "target",
        "head-missing",
        f"config.json says tie_word_embeddings = false, and no {_HEAD} is stored",
        "set it to true if the model's head is its embedding, else get the whole checkpoint",
    )
    coverage.missing = []


def report_vocab_maps(
    checkpoint: Checkpoint | None, target: ModelConfig | None, findings: Findings
) -> None:
    """Read d2t and t2d (the only tensors that the check reads) and report what is wrong."""
    names = {canonical_name(name): name for name in (checkpoint.tensors if checkpoint else {})}
    if checkpoint is None or "d2t" not in names:
        return
    d2t_D = checkpoint.read(names["d2t"])
    t2d_V = checkpoint.read(names["t2d"]) if "t2d" in names else None
    if d2t_D.dim() != 1 or (t2d_V is not None and t2d_V.dim() != 1):
        findings.error("draft", "vocab-map-size", "d2t and t2d must have one dimension")
        return
    if target is None and t2d_V is None:
        return
    vocab_size = target.vocab_size if target is not None else len(t2d_V) if t2d_V is not None else 0
    if any(finding.code == "vocab-map-size" for finding in findings):
        t2d_V = None  # that it has another number of ids is no news
    findings.extend(map_findings(d2t_D, t2d_V, target_vocab_size=vocab_size))
